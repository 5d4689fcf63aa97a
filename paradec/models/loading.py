"""`load` reads checkpoints in their published formats."""

from __future__ import annotations

import importlib.resources
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paradec.core.checks import check_choice, check_int, check_number, shown
from paradec.models import causal, lora
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError, fetch, read_json
from paradec.models.images.loading import PACKAGED as PACKAGED_IMAGES
from paradec.models.images.loading import PACKAGED_PIPELINES, file_type, image_loader, load_image_model, packaged_image
from paradec.models.masked import FAMILIES, UNSUPPORTED, known_family, load_masked
from paradec.models.tensor_parallel import load_on_all_ranks
from paradec.models.text import diffusion_gemma
from paradec.models.wrapping import registered_attention, wrap

__all__ = ["FAMILIES", "known_family", "load", "wrap"]

PACKAGED = "tiny-llada"
MAX_COPIED = 2**28
"""Bytes of matrices that are copied at most: a quarter of a second."""
LINE = 16
"""Numbers of float32 in a cache line."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    tp_plan: Any = None,
    quantization_config: Any = None,
    revision: str | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    topology: str | None = None,
    rope_theta: float | None = None,
    adapter: str | os.PathLike[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    gguf_file: str | None = None,
    **image_options: Any,
) -> Model:
    """Load a masked diffusion or causal language model, or an image model, from its published file format.

    LLaDA checkpoints (`model_type` "llada") run on transformers' `LlamaForCausalLM`, Dream checkpoints ("Dream") on
    `Qwen2ForCausalLM`, both without a causal mask. SDAR and TraDo ("sdar") run on `Qwen3ForCausalLM` and Fast-dLLM v2
    ("Fast_dLLM_Qwen") on `Qwen2ForCausalLM`, both with the block-causal mask that they were trained with. Of the
    mixtures of experts LLaDA-MoE and SDAR-MoE run on `Qwen3MoeForCausalLM`, LLaDA2.0 and 2.1 on `Glm4MoeForCausalLM`
    (docs/models.md has the table). DiffusionGemma ("diffusion_gemma") runs on transformers' own class, with its
    generation_config.json for defaults. Weights must be safetensors (one file or sharded); remote code is never
    executed.

    Any causal language model in transformers' own format ("qwen3", "llama", "gemma3_text", ...) runs on its own class,
    with the end and padding ids of transformers' `generate`. GGUF files that transformers can read (with the package
    gguf) are unpacked to plain numbers.

    The ids of a masked model's mask, padding and end tokens come from the checkpoint's files: config.json, then
    generation_config.json, then the tokenizer. If these disagree, the first one is used, with a warning about the mask
    (the logger "paradec" reports the padding). Every end token that one of them names is used, the tokenizer's turn
    ends too.

    Image models (for `paradec.generate_images`) load from the published files and folders of LlamaGen, MAR, VAR, LPD
    and others (docs/images.md has the table), and in transformers' format for Emu3, Chameleon, Janus and GLM-Image's
    prior (also from the folder of its pipeline). Six small ones are inside the package: "digits-ar",
    "digits-ar-drafter" (drafts for it), "digits-maskgit" (masked), "digits-lpd" (in any order), "digits-var" and
    "digits-var-small" (by scales).

    Args:
        source: a folder, a hub repository id, or None for the small model inside the package; also a GGUF file, as
            "folder/file.gguf" or "owner/repository/file.gguf", or a LoRA adapter alone, which names its base.
        dtype: parameters' dtype (a torch dtype or its name); None takes the checkpoint's.
        device: where to put the model; None is the CPU, or the devices of `device_map`/`tp_plan`.
        device_map, quantization_config, revision: as in transformers' `from_pretrained`.
        tp_plan: "auto", in each of the processes that `torchrun` started: every one reads a part of each matrix and
            decodes together with the others (docs/engines.md). A mapping changes transformers' plan, as there.
        attn_implementation: "sdpa", "eager", or "sparsed": sdpa, and SparseD with its defaults for requests that do not
            choose an attention (`generate(attention=...)`).
        mask_token_id: overrides the checkpoint's; needed if it names none.
        block_length: the block that a block-causal checkpoint was trained with; overrides the checkpoint's, needed
            if it names none. (`generate(block_length=...)` sets the blocks of an answer.)
        topology: "block_causal" for LLaDA's and Dream's formats with weights that were trained with blocks which see
            the prompt and earlier blocks only, counted from the prompt's end (D2F); needs `block_length`. None takes
            the format's topology, and for adapters with D2F's published names "block_causal" in blocks of 32.
            Nemotron-Labs-Diffusion is "causal_context" by default, and may be "causal" (token by token) and
            "block_causal".
        rope_theta: another base of the rotary angles than the checkpoint's, for masked models: a larger one stretches
            them over longer texts (LongLLaDA). Rows may then be longer than the model was trained for, with a warning.
        adapter: a folder or hub repository with a LoRA adapter in peft's format (adapter_config.json and
            adapter_model.safetensors), which is merged into the weights; for LLaDA's, Dream's and similar formats.
            Models that draft for themselves apply it to the drafts alone, in place of the checkpoint's own.
        offload_folder: where weights that `device_map` puts on the disk are kept, as in `from_pretrained`; mixtures of
            experts need one, since their files hold the experts one by one.
        gguf_file: the name of the GGUF file in `source`, as in transformers.
        image_options: further arguments of image models, e.g. `vq=`, the file of the VQ autoencoder (MAR: `vae=`); see
            `paradec.models.images.llamagen.load_llamagen` and the loaders beside it.

    Raises:
        CheckpointError (a ValueError): not a checkpoint of these formats, corrupt or truncated files, missing or
            unexpected weights, an unsupported configuration, no mask id.
        ValueError: an argument out of its range.
    """
    text_options = {
        "device_map": device_map,
        "tp_plan": tp_plan,
        "quantization_config": quantization_config,
        "mask_token_id": mask_token_id,
        "block_length": block_length,
        "topology": topology,
        "rope_theta": rope_theta,
        "adapter": adapter,
        "offload_folder": offload_folder,
    }
    if source is None:
        if gguf_file is not None:
            raise ValueError(f"gguf_file={shown(gguf_file)} needs a source: the folder or repository that it is in")
        common: dict[str, Any] = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        packaged = importlib.resources.files("paradec") / "assets" / PACKAGED
        with importlib.resources.as_file(packaged) as folder:
            return load(folder, **common, **text_options, **image_options)
    _check_arguments(source, revision, text_options)
    text_options["adapter"] = None if adapter is None else os.fspath(adapter)
    dtype, device = _parse_dtype(dtype), _parse_device(device)
    if device is not None and (device_map is not None or tp_plan is not None):
        raise ValueError(f"device={device!s} goes with neither device_map nor tp_plan; give one of them")
    registered_attention(attn_implementation)
    source, gguf_file = causal.split_gguf_path(os.fspath(source), gguf_file)
    if adapter is None and gguf_file is None and (base_checkpoint := _find_lone_adapter(source, revision)):
        source, revision, text_options["adapter"] = *base_checkpoint, lora.read_lora(source, revision)
    if tp_plan is not None:
        _check_plan(tp_plan, text_options | {"gguf_file": gguf_file})
    if gguf_file is not None:
        _refuse_image_options(image_options)
        load_gguf = partial(causal.load_causal, source, {}, revision, attn_implementation, device)
        return lay_out_by_columns(load_gguf(gguf_file=gguf_file, dtype=dtype, **text_options))
    source, config = _find_checkpoint(source, revision)
    if image_loader(config.get("model_type")) is not None:
        for name, value in text_options.items():
            if value is not None:
                raise ValueError(f"{name}={shown(value)} is not for image models; leave it out")
        common = {"dtype": None if dtype == "auto" else dtype, "device": device, "revision": revision}
        return lay_out_by_columns(load_image_model(config["model_type"], source, image_options, **common))
    _refuse_image_options(image_options)
    if config.get("model_type") == diffusion_gemma.MODEL_TYPE:
        model = _load_canvases(source, revision, attn_implementation, device, dtype=dtype, **text_options)
        return lay_out_by_columns(model)
    is_masked = known_family(config) is not None or config.get("model_type") in [*UNSUPPORTED]
    load_model = load_masked if is_masked or not causal.is_causal(config) else causal.load_causal
    load_now = partial(load_model, source, config, revision, attn_implementation, device, dtype=dtype, **text_options)
    return lay_out_by_columns(load_now() if tp_plan is None else load_on_all_ranks(load_now))


@torch.no_grad()
def lay_out_by_columns(model: Any) -> Any:
    """Let the float32 matrices of a small model's linear layers lie column by column on a CPU; return the model.

    Products of few positions read columns. From one to the next it is an odd number of cache lines, so that they do not
    compete for the same places in the caches. Shapes, values and saved files stay the same. Matrices of several layers
    stay where they are, and all where they take more than `MAX_COPIED`: in their file, which processes share.
    """
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
    """Raise ValueError for one of a wrong type or out of its range; the rest of `given` is checked by what takes it."""
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise ValueError(f"source={shown(source)} must be a folder or a hub repository id")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"revision={shown(revision)} must be a text: a branch, tag or commit of a hub repository")
    check_int("mask_token_id", options["mask_token_id"], low=0, none=True)
    check_int("block_length", options["block_length"], low=1, none=True)
    check_number("rope_theta", options["rope_theta"], low=0, open_low=True, none=True)
    topology, adapter, offload_folder = options["topology"], options["adapter"], options["offload_folder"]
    if topology is not None:
        check_choice("topology", topology, ("bidirectional", "block_causal", "causal", "causal_context"))
    if adapter is not None and (not isinstance(adapter, (str, os.PathLike)) or not os.fspath(adapter)):
        raise ValueError(f"adapter={shown(adapter)} must be a folder or a hub repository id")
    if offload_folder is not None and (not isinstance(offload_folder, (str, os.PathLike)) or not str(offload_folder)):
        raise ValueError(f"offload_folder={shown(offload_folder)} must be the path of a folder")


def _check_plan(plan: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a `tp_plan` that is none, or that does not go with other options of `load`."""
    is_mapping = isinstance(plan, dict) and all(isinstance(text, str) for pair in plan.items() for text in pair)
    if plan != "auto" and not (is_mapping and plan):
        raise ValueError(f"tp_plan={shown(plan)} must be 'auto' or a mapping of module names to transformers' styles")
    for name in ("device_map", "quantization_config", "gguf_file", "offload_folder"):
        if options[name] is not None:
            raise ValueError(f"tp_plan={shown(plan)} does not go with {name}={shown(options[name])}; give one of them")


def _refuse_image_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for what image models alone take."""
    if options:
        raise TypeError(f"load() got an unexpected keyword argument {next(iter(options))!r}")


def _find_checkpoint(source: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Where a checkpoint is, and its config.json; of an image model's single file its `model_type`.

    Raises:
        CheckpointError: there is none, a diffusers pipeline, or a file of a folder that is wanted whole.
    """
    if source in PACKAGED_IMAGES and not os.path.exists(source):
        source = packaged_image(source)
    pipeline = os.path.isfile(os.path.join(source, "model_index.json"))
    prior = os.path.join(source, "vision_language_encoder")
    if pipeline and os.path.isfile(os.path.join(prior, "config.json")):  # GLM-Image's
        source, pipeline = prior, False
    if pipeline or (source in PACKAGED_PIPELINES and not os.path.exists(source)):
        raise CheckpointError(
            f"{source!r} is a diffusers pipeline: load it with diffusers and give it to paradec.accelerate, or give "
            "its name to `paradec image`"
        )
    if not os.path.isfile(source) or source.endswith(".json"):  # only image models' checkpoints are one file
        return source, read_json(source, "config.json", revision, required=True)
    folder_config = read_json(os.path.dirname(source) or ".", "config.json", None)
    if folder_config and image_loader(folder_config.get("model_type")) is None:  # a text model's weights
        fetch(source, "config.json", revision)  # says that it wants the folder
    return source, {"model_type": file_type(source)}


def _load_canvases(
    source: str,
    revision: str | None,
    attn_implementation: str,
    device: torch.device | None,
    *,
    tp_plan: Any,
    **options: Any,
) -> Model:
    """What `load` does for models that decode canvases of noise."""
    for name in ("mask_token_id", "block_length", "topology", "rope_theta", "adapter"):
        if options.pop(name) is not None:
            raise CheckpointError(f"{name} is for checkpoints with masks; {source!r} decodes canvases of noise")
    if tp_plan is not None:
        raise CheckpointError(f"tp_plan={shown(tp_plan)} does not work for {source!r}, which decodes canvases")
    return diffusion_gemma.load_diffusion_gemma(
        source, revision, device=device, attn_implementation=attn_implementation, **options
    )


def _find_lone_adapter(source: str, revision: str | None) -> tuple[str, str | None] | None:
    """The base of a folder or repository that holds nothing but an adapter, and its revision; None for all others."""
    if os.path.isfile(source) or source in PACKAGED_IMAGES or source in PACKAGED_PIPELINES:
        return None
    if fetch(source, "config.json", revision) is not None or fetch(source, lora.CONFIG, revision) is None:
        return None
    return lora.read_base(source, revision)


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """Raises ValueError: not a floating dtype."""
    if dtype is None or dtype == "auto":
        return "auto"
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or parsed not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)} must be one of 'float32', 'bfloat16', 'float16', 'float64', 'auto'")
    return parsed


def _parse_device(device: str | torch.device | None) -> torch.device | None:
    """Raises ValueError: no such device here."""
    if device is None:
        return None
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"device={shown(device)} is not available here: {reason}") from error
    if parsed.type == "meta":
        raise ValueError(f"device={shown(device)} holds no numbers; give a device that computes, e.g. 'cpu'")
    return parsed
