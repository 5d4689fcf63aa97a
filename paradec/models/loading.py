"""`load`: models from checkpoints in their published formats."""

from __future__ import annotations

import importlib.resources
import inspect
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paradec.core.checks import check_choice, check_int, check_number, plain_name, short_repr, unknown_name
from paradec.core.component_text import parse_component
from paradec.core.other_names import LOAD_ARGUMENTS
from paradec.models import causal, gguf, lora
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError, check_path, fetch, first_line, is_int8, read_json
from paradec.models.family import read_tokenizer
from paradec.models.images.loading import PACKAGED as PACKAGED_IMAGES
from paradec.models.images.loading import PACKAGED_PIPELINES, file_type, image_loader, load_image_model, packaged_path
from paradec.models.masked import FAMILIES, UNSUPPORTED, known_family, load_masked
from paradec.models.tensor_parallel import load_on_all_ranks
from paradec.models.text import diffusion_gemma
from paradec.models.wrapping import registered_attention, wrap

__all__ = ["FAMILIES", "known_family", "load", "wrap"]

PACKAGED = "tiny-llada"
MAX_COPIED = 2**28
"""Maximum bytes that `lay_out_by_columns` copies, which takes about a quarter of a second."""
LINE = 16
"""Number of float32 values in a cache line."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    tp_plan: Any = None,
    quantization: Any = None,
    quantization_config: Any = None,
    revision: str | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    topology: str | None = None,
    rope_theta: float | None = None,
    adapter: str | os.PathLike[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    gguf_file: str | None = None,
    tokenizer: Any = None,
    **image_options: Any,
) -> Model:
    """Load a masked diffusion or causal language model, or an image model, from its published file format.

    Masked models (LLaDA, Dream, SDAR, TraDo, Fast-dLLM v2, LLaDA-MoE, LLaDA2 and others: docs/models.md has the table)
    run on transformers' modules of similar models, with the attention used in training. DiffusionGemma and causal
    language models in transformers' format ("qwen3", "llama", ...) run on transformers' own classes. Causal models use
    the end and padding ids of `generate` in transformers. Weights must be safetensors or GGUF. Remote code is not run.

    The ids of mask, padding and end are read from config.json, generation_config.json and the tokenizer. If these
    disagree, the first in this order is used for mask (with a warning) and padding; all end ids are used.

    Image models (docs/images.md) load from the published files and folders of LlamaGen, MAR, VAR, LPD and others, and
    in transformers' format for Emu3, Chameleon, Janus and GLM-Image's prior. The package contains "digits-ar",
    "digits-ar-drafter" (its drafter), "digits-maskgit" (masked), "digits-lpd" (any order), "digits-var" and
    "digits-var-small".

    Args:
        source: a folder, a hub repository id, or None for the small model inside the package. It may be a GGUF file
            ("folder/file.gguf", "owner/repository/file.gguf") or a LoRA adapter alone, whose config names its base.
        dtype: parameters' dtype (a torch dtype or its name). None keeps the checkpoint's dtype, but converts GGUF files
            to float32, or quantised GGUF files on a CPU to int8 weights and bfloat16.
        device: None is the CPU, or the devices of `device_map`/`tp_plan`.
        quantization: "int8" rounds the weights of text models to 8 bits while they are read, with a scale per output.
            Embeddings, norms, routers and layers of less than 2**20 weights are not rounded. Settings are given as
            "int8(min_weights=1)" or `paradec.models.int8.Int8Config`. `save_pretrained` writes the int8 weights.
        device_map, quantization_config, revision, offload_folder: as in transformers' `from_pretrained`; mixtures of
            experts need a folder to offload to disk.
        tp_plan: tensor parallelism under `torchrun` (docs/engines.md): "auto" is transformers' plan; a mapping (module
            names to styles) changes this plan. Each process reads a part of each matrix.
        attn_implementation: "sdpa", "eager", or "sparsed": sdpa, with SparseD for requests without `attention=`.
        mask_token_id: overrides the checkpoint's; needed if it states none.
        block_length: the block length with which a block-causal checkpoint was trained. Overrides the checkpoint's;
            needed if it states none. (`generate(block_length=...)` sets the blocks of an answer.)
        topology: which positions see each other; None is the format's topology ("block_causal" in blocks of 32 for
            D2F's published adapters). "block_causal" is for weights in LLaDA's or Dream's format that were trained with
            blocks from the prompt's end (D2F); it needs `block_length`. Nemotron-Labs-Diffusion ("causal_context") may
            also be "causal" (token by token) or "block_causal".
        rope_theta: replaces the base of a masked model's rotary angles; a larger base suits longer texts (LongLLaDA).
            Rows may be longer than in training, with a warning.
        adapter: a folder or hub repository with a LoRA adapter in peft's format, merged into the weights of LLaDA's,
            Dream's and similar formats. Models that make their own drafts apply it only to these drafts.
        gguf_file: the name of the GGUF file in `source`, as in transformers.
        tokenizer: a tokenizer of transformers, or a folder or hub id that has one; replaces the checkpoint's.
        image_options: further arguments of image models, such as `vq=`, the VQ autoencoder's file (MAR: `vae=`); see
            `paradec.models.images.llamagen.load_llamagen` and the other loaders.

    Raises:
        CheckpointError (a ValueError): an unknown format, corrupt files, missing or unexpected weights, an unsupported
            configuration, no mask id. ValueError: an argument out of its range."""
    for name in image_options:
        if name in LOAD_ARGUMENTS:
            raise TypeError(f"load has no argument {name!r}: {LOAD_ARGUMENTS[name]}")
    text_options = {
        "device_map": device_map,
        "tp_plan": tp_plan,
        "quantization": quantization,
        "quantization_config": quantization_config,
        "mask_token_id": mask_token_id,
        "block_length": block_length,
        "topology": topology,
        "rope_theta": rope_theta,
        "adapter": adapter,
        "offload_folder": offload_folder,
        "tokenizer": tokenizer,
    }
    if source is None:
        if gguf_file is not None:
            raise ValueError(f"gguf_file={short_repr(gguf_file)} needs source: the folder or repository of the file")
        common: dict[str, Any] = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        packaged = importlib.resources.files("paradec") / "assets" / PACKAGED
        with importlib.resources.as_file(packaged) as folder:
            return load(folder, **common, **text_options, **image_options)
    _check_arguments(source, revision, text_options)
    text_options["tokenizer"] = _parse_tokenizer(tokenizer)
    text_options["adapter"] = None if adapter is None else os.fspath(adapter)
    dtype, device = _parse_dtype(dtype), _parse_device(device)
    if device is not None and (device_map is not None or tp_plan is not None):
        raise ValueError(f"device={device!s} goes with neither device_map nor tp_plan; give one of them")
    registered_attention(attn_implementation)
    source, gguf_file = causal.split_gguf_path(os.fspath(source), gguf_file)
    similar = {plain_name(name): name for name in (*PACKAGED_IMAGES, *PACKAGED_PIPELINES)}.get(plain_name(source))
    if similar not in (None, source) and not os.path.exists(source):
        raise CheckpointError(f"{source!r} is not a folder here; did you mean the packaged model {similar!r}?")
    if adapter is None and gguf_file is None and (base_checkpoint := _find_lone_adapter(source, revision)):
        source, revision, text_options["adapter"] = *base_checkpoint, lora.read_lora(source, revision)
    quantization = text_options["quantization"] = _parse_quantization(text_options)
    if tp_plan is not None:
        _check_plan(tp_plan, text_options | {"gguf_file": gguf_file})
    if gguf_file is not None:
        _refuse_image_options(image_options)
        file = gguf.read_gguf(source, gguf_file, revision)
        return lay_out_by_columns(_load_gguf(file, attn_implementation, device, dtype, **text_options))
    source, config = _find_checkpoint(source, revision)
    if image_loader(config.get("model_type")) is not None:
        for name, value in text_options.items():
            if value is not None:
                raise ValueError(f"{name}={short_repr(value)} is not for image models; leave it out")
        common = {"dtype": None if dtype == "auto" else dtype, "device": device, "revision": revision}
        return lay_out_by_columns(load_image_model(config["model_type"], source, image_options, **common))
    _refuse_image_options(image_options)
    quantization = text_options.pop("quantization")
    if is_int8(config):
        import paradec.models.int8  # noqa: F401  (registers its quantiser)
    elif quantization is not None:
        if (stored := config.get("quantization_config")) is not None:
            raise CheckpointError(
                f"quantization='int8' does not work for {source!r}, which is quantised already: "
                f"quantization_config={short_repr(stored)}"
            )
        if config.get("model_type") == diffusion_gemma.MODEL_TYPE:
            raise CheckpointError(f"quantization='int8' does not work for {source!r}, which decodes canvases")
        text_options["quantization_config"] = quantization
    if config.get("model_type") == diffusion_gemma.MODEL_TYPE:
        for name in ("mask_token_id", "block_length", "topology", "rope_theta", "adapter"):
            if text_options.pop(name) is not None:
                raise CheckpointError(f"{name} is for checkpoints with masks; {source!r} decodes canvases")
        if text_options.pop("tp_plan") is not None:
            raise CheckpointError(f"tp_plan={short_repr(tp_plan)} does not work for {source!r}, which decodes canvases")
        common = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        return lay_out_by_columns(diffusion_gemma.load_diffusion_gemma(source, revision, **common, **text_options))
    is_masked = known_family(config) is not None or config.get("model_type") in [*UNSUPPORTED]
    load_model = load_masked if is_masked or not causal.is_causal(config) else causal.load_causal
    load_now = partial(load_model, source, config, revision, attn_implementation, device, dtype=dtype, **text_options)
    return lay_out_by_columns(load_now() if tp_plan is None else load_on_all_ranks(load_now))


@torch.no_grad()
def lay_out_by_columns(model: Any) -> Any:
    """Store the float32 matrices of a small CPU model's linear layers column by column. Return the model.

    Products with few positions read a matrix by columns. Columns begin an odd number of cache lines apart, so that they
    do not compete for the same cache sets. Matrices that several layers share stay unchanged. If all matrices together
    exceed `MAX_COPIED` bytes, none is changed, so that processes can share the memory-mapped files of large models."""
    readers = Counter(id(weight) for part in model.module.modules() for weight in part.parameters(recurse=False))
    linears = [part for part in model.module.modules() if type(part) is nn.Linear and readers[id(part.weight)] == 1]
    weights = [part.weight for part in linears if part.weight.is_cpu and part.weight.dtype == torch.float32]
    if sum(weight.nbytes for weight in weights) <= MAX_COPIED:
        for weight in weights:
            if type(weight) is nn.Parameter:
                rows, columns = weight.shape
                lines = -(-rows // LINE) | 1
                weight.data = weight.new_empty(columns, lines * LINE)[:, :rows].copy_(weight.t()).t()
    return model


def _check_arguments(source: Any, revision: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of a wrong type or out of its range."""
    check_path("source", source)
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"revision={short_repr(revision)} must be a text: a branch, tag or commit of a hub repository")
    check_int("mask_token_id", options["mask_token_id"], low=0, none=True)
    check_int("block_length", options["block_length"], low=1, none=True)
    check_number("rope_theta", options["rope_theta"], low=0, open_low=True, none=True)
    topology, adapter, offload_folder = options["topology"], options["adapter"], options["offload_folder"]
    if topology is not None:
        check_choice("topology", topology, ("bidirectional", "block_causal", "causal", "causal_context"))
    if adapter is not None:
        check_path("adapter", adapter)
    if offload_folder is not None:
        check_path("offload_folder", offload_folder, "the path of a folder")


def _check_plan(plan: Any, options: Mapping[str, Any]) -> None:
    is_mapping = isinstance(plan, dict) and all(isinstance(text, str) for pair in plan.items() for text in pair)
    if plan != "auto" and not (is_mapping and plan):
        raise ValueError(
            f"tp_plan={short_repr(plan)} must be 'auto' or a mapping of module names to transformers' styles"
        )
    for name in ("device_map", "quantization_config", "gguf_file", "offload_folder"):
        if options[name] is not None:
            raise ValueError(
                f"tp_plan={short_repr(plan)} does not go with {name}={short_repr(options[name])}; give one of them"
            )


def _parse_quantization(options: Mapping[str, Any]) -> Any:
    """The `Int8Config` for `quantization`, or None. Raises ValueError for a wrong value or an incompatible option."""
    value = options["quantization"]
    if value is None:
        return None
    from paradec.models.int8 import Int8Config

    if not isinstance(value, Int8Config):
        part = parse_component("quantization", value) if isinstance(value, str) else None
        fields = ("activations", "min_weights", "weight_bits")
        if part is None or part.name != "int8" or not part.settings.keys() <= {*fields}:
            settings = f"with settings in parentheses: {', '.join(fields)}"
            raise ValueError(f"quantization={short_repr(value)} must be 'int8', also {settings}")
        value = Int8Config(**part.settings)
    for name in ("quantization_config", "adapter", "tp_plan", "device_map", "offload_folder"):
        if options[name] is not None:
            hint = (
                "merge it first: load with it, save_pretrained, load again" if name == "adapter" else "give one of them"
            )
            raise ValueError(f"quantization='int8' does not go with {name}={short_repr(options[name])}; {hint}")
    return replace(value)


def _parse_tokenizer(value: Any) -> Any:
    """Return `value`, or the tokenizer that it names as a folder or hub id. Raises ValueError for another type."""
    if isinstance(value, (str, os.PathLike)):
        check_path("tokenizer", value)
        tokenizer = read_tokenizer(os.fspath(value), FAMILIES["Dream"], None)  # vocab.json alone is enough for Dream
        if tokenizer is None:
            raise CheckpointError(f"tokenizer={short_repr(value)} has no tokenizer.json")
        return tokenizer
    if value is not None and not (callable(value) and hasattr(value, "decode")):
        raise ValueError(f"tokenizer={short_repr(value)} must be a tokenizer of transformers, a folder or a hub id")
    return value


def _refuse_image_options(options: Mapping[str, Any]) -> None:
    if options:
        names = [name for name in inspect.signature(load).parameters if name != "image_options"]
        raise TypeError(unknown_name("argument", next(iter(options)), names))


def _find_checkpoint(source: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Return the path and config.json of a checkpoint. For an image model in a single file, the config is only its
    `model_type`. Raises CheckpointError for a missing checkpoint, a diffusers pipeline, or a file of a text model."""
    if source in PACKAGED_IMAGES and not os.path.exists(source):
        source = packaged_path(source)
    is_pipeline = os.path.isfile(os.path.join(source, "model_index.json"))
    prior = os.path.join(source, "vision_language_encoder")
    if is_pipeline and os.path.isfile(os.path.join(prior, "config.json")):  # GLM-Image's prior
        source, is_pipeline = prior, False
    if is_pipeline or (source in PACKAGED_PIPELINES and not os.path.exists(source)):
        raise CheckpointError(
            f"{source!r} is a diffusers pipeline: load it with diffusers (the packaged one is "
            "paradec.PixelDiTPipeline.digits()) and give it to paradec.accelerate, or give its name to `paradec image`"
        )
    if not os.path.isfile(source) or source.endswith(".json"):  # only an image model can be a single file
        return source, read_json(source, "config.json", revision, required=True)
    folder_config = read_json(os.path.dirname(source) or ".", "config.json", None)
    if folder_config and image_loader(folder_config.get("model_type")) is None:  # a text model's weights
        fetch(source, "config.json", revision)  # raises an error that asks for the folder
    return source, {"model_type": file_type(source)}


def _load_gguf(
    file: gguf.GgufFile, attn_implementation: str, device: torch.device | None, dtype: Any, **options: Any
) -> Model:
    """Load a GGUF file. Quantised weights become int8 on a CPU, unless options such as dtype or adapter are given."""
    from paradec.models.int8 import Int8Config

    quantization, is_supported = options.pop("quantization"), file.architecture in (*gguf.MASKED, *gguf.CAUSAL)
    other_options = [options[name] for name in ("quantization_config", "adapter", "device_map", "offload_folder")]
    is_cpu, has_options = device is None or device.type == "cpu", any(value is not None for value in other_options)
    can_choose = dtype == "auto" and is_cpu and not has_options
    if quantization is None and can_choose and is_supported and file.has_packed_layers(Int8Config.min_weights):
        quantization = Int8Config()
    if quantization is not None:
        if not is_supported:
            raise CheckpointError(
                f"quantization='int8' does not work for {file.path!r}, which holds {file.architecture!r}; it works for "
                f"{', '.join((*gguf.MASKED, *gguf.CAUSAL))}"
            )
        options["quantization_config"] = quantization
    options["dtype"] = (torch.float32 if quantization is None else torch.bfloat16) if dtype == "auto" else dtype
    if file.architecture not in gguf.MASKED:
        folder = os.path.dirname(file.path) or "."
        return causal.load_causal(folder, {}, None, attn_implementation, device, gguf=file, **options)
    try:
        model = load_masked(file.path, file.build_config(), None, attn_implementation, device, gguf=file, **options)
    except CheckpointError as error:
        raise error if file.path in str(error) else CheckpointError(f"{file.path!r}: {error}") from None
    model.facts = replace(model.facts, name=model.facts.name.removesuffix(causal.GGUF_ENDING))
    return model


def _find_lone_adapter(source: str, revision: str | None) -> tuple[str, str | None] | None:
    """The base checkpoint and its revision, if the source is only an adapter; else None."""
    if os.path.isfile(source) or source in PACKAGED_IMAGES or source in PACKAGED_PIPELINES:
        return None
    if fetch(source, "config.json", revision) is not None or fetch(source, lora.CONFIG, revision) is None:
        return None
    return lora.read_base(source, revision)


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None or dtype == "auto":
        return "auto"
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or parsed not in DTYPES:
        raise ValueError(
            f"dtype={short_repr(dtype)} must be one of 'float32', 'bfloat16', 'float16', 'float64', 'auto'"
        )
    return parsed


def _parse_device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"device={short_repr(device)} is not available here: {first_line(error)}") from error
    if parsed.type == "meta":
        raise ValueError(f"device={short_repr(device)} has no memory for weights; give another device, e.g. 'cpu'")
    return parsed
