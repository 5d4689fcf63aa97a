"""`load` reads checkpoints in their published formats."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paradec.core.checks import check_choice, check_int, shown
from paradec.models import causal, cpu_dtypes, lora
from paradec.models import gguf_file as gguf
from paradec.models.base import Model
from paradec.models.checkpoint import (
    CheckpointError,
    check_weights,
    fetch,
    published_to_own,
    read_json,
    states_quantiser,
    stored_weights,
)
from paradec.models.decoder import Decoder
from paradec.models.family import Family
from paradec.models.images.loading import PACKAGED as PACKAGED_IMAGES
from paradec.models.images.loading import (
    PACKAGED_PIPELINES,
    file_type,
    image_loader,
    load_image_model,
    packaged_image,
)
from paradec.models.layout import lay_columns_first
from paradec.models.lora import LoRA
from paradec.models.pretrained import read_module, reason
from paradec.models.saving import Published
from paradec.models.tensor_parallel import asked
from paradec.models.text import (
    d2f,
    diffusion_gemma,
    dream,
    fast_dllm_v2,
    llada,
    llada2,
    llada_moe,
    sdar,
    stable_diffcoder,
)
from paradec.models.text.qwen import stated_block
from paradec.models.vocabulary import facts_of, tokenizer_of
from paradec.models.wrapping import default_attention, implementation, wrap

__all__ = ["load", "wrap"]

FAMILIES: dict[str, Family] = {
    "llada": llada.FAMILY,
    "Dream": dream.FAMILY,
    "sdar": sdar.FAMILY,
    "Fast_dLLM_Qwen": fast_dllm_v2.FAMILY,
    "sdar_moe": sdar.FAMILY_MOE,
    "llada2_moe": llada2.FAMILY,
    "mmada": llada.FAMILY,
}
"""What `load` reads, by the `model_type` of config.json."""
REFUSED = {
    "llada2_moe_veomni": "it is LLaDA2's training form, with all experts of a layer in one tensor; convert it to the "
    "published form, which load reads",
    "nemotron_labs_diffusion": "it needs YaRN angles and queries scaled by position, and its published code decides "
    "when attention is causal; neither has been checked. Load it with trust_remote_code=True and give it to "
    "paradec.wrap",
    "llava_llada": "LLaDA-V takes pictures as embeddings, not as tokens. For text alone, give its language model to "
    "paradec.wrap, loaded by its own code",
    "wedlm": "WeDLM decodes by moving what is decided to the front, under causal attention, which no sampler here "
    "does. Its weights are a Qwen3's or Qwen2's; give one of transformers to paradec.wrap with topology='causal' for "
    "the causal samplers",
    "omnivoice": "OmniVoice predicts several codebooks of sound at each position, and samplers here one token. Use its "
    "own code",
}
"""Diffusion language models that `load` does not read, and why."""
PACKAGED = "tiny-llada"
DEFAULT_NEW_TOKENS = 128
"""Answer length where neither the request nor generation_config.json names one."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    tp_plan: Any = None,
    tp_timeout: float | None = None,
    quantization_config: Any = None,
    revision: str | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    topology: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    gguf_file: str | None = None,
    **image_options: Any,
) -> Model:
    """Load a masked diffusion or causal language model, or an image model, from its published file format.

    LLaDA checkpoints (`model_type` "llada") run on transformers' `LlamaForCausalLM`, Dream checkpoints ("Dream") on
    `Qwen2ForCausalLM`, both without a causal mask; SDAR and TraDo ("sdar") on `Qwen3ForCausalLM` and Fast-dLLM v2
    ("Fast_dLLM_Qwen") on `Qwen2ForCausalLM`, both with the block-causal mask they were trained with. Mixtures of
    experts likewise: LLaDA-MoE and SDAR-MoE on `Qwen3MoeForCausalLM`, LLaDA2.0 and 2.1 on `Glm4MoeForCausalLM`
    (docs/models.md has the table). DiffusionGemma ("diffusion_gemma") runs on transformers' own class, with its
    generation_config.json for defaults. Weights must be safetensors (one file or sharded); remote code is never
    executed.

    Any causal language model in transformers' own format ("qwen3", "llama", "gemma3_text", ...) runs on its own class
    there, and ends and pads as its `generate` does; GGUF files as far as transformers reads them (with the package
    gguf), as plain numbers.

    Ids of masked models come from the checkpoint's own files: config.json, then generation_config.json, then the
    tokenizer; where they disagree on the mask or the padding, the first one counts (and the logger "paradec" says so).
    End tokens are all that these files and the tokenizer's turn ends name.

    Image models (`paradec.generate_images`): LlamaGen's, MAR's, VAR's, LPD's and kin's single files and folders
    (docs/pictures.md has the table), and Emu3, Chameleon's kin and Janus in transformers' format; "digits-ar" is the
    small one inside the package, "digits-ar-drafter" a smaller one that drafts for it, "digits-maskgit" a masked one,
    and "digits-var" and "digits-var-small" write scales.

    Args:
        source: a folder, a hub repository id, or None for the small model inside the package; also a GGUF file, as
            "folder/file.gguf" or "owner/repository/file.gguf", or a LoRA adapter alone, which names its base.
        dtype: parameters' dtype (a torch dtype or its name); None takes the checkpoint's.
        device: where to put the model; None is the CPU, or what `device_map`/`tp_plan` say.
        device_map, quantization_config, revision: as in transformers' `from_pretrained`.
        tp_plan: "auto", in each of the processes that `torchrun` started: every one reads a part of each matrix and
            decodes together with the others (docs/engines.md). A mapping changes transformers' plan, as there.
        tp_timeout: seconds that such a process waits for the others in a request; None is 600.
        attn_implementation: "sdpa", "eager", or "sparsed": sdpa, and SparseD with its defaults for requests that do not
            say which attention they want (`generate(attention=...)`).
        mask_token_id: overrides the checkpoint's; needed where it names none.
        block_length: the block that a block-causal checkpoint was trained with; overrides the checkpoint's, needed
            where it names none. (How an answer is cut is for `generate(block_length=...)`.)
        topology: "block_causal" for LLaDA's and Dream's formats with weights that were trained with blocks which see
            the prompt and earlier blocks only, counted from the prompt's end (D2F); needs `block_length`. None is what
            the format says, and for adapters with D2F's published names that, in blocks of 32.
        adapter: a folder or hub repository with a LoRA adapter in peft's format (adapter_config.json and
            adapter_model.safetensors), which is merged into the weights; for LLaDA's and Dream's formats and kin.
        offload_folder: where weights that `device_map` puts on the disk are kept, as in `from_pretrained`; mixtures of
            experts need one, since their files hold the experts one by one.
        gguf_file: the name of the GGUF file in `source`, as in transformers.
        image_options: what image models take besides, e.g. `vq=`, the file of the VQ autoencoder (MAR: `vae=`); see
            `paradec.models.images.llamagen.load_llamagen` and its kin.

    Raises:
        CheckpointError (a ValueError): not a checkpoint of these formats, corrupt or truncated files, missing or
            unexpected weights, a configuration whose maths is not supported, no mask id.
        ValueError: an argument out of its range.
    """
    for_text = {
        "device_map": device_map,
        "tp_plan": tp_plan,
        "tp_timeout": tp_timeout,
        "quantization_config": quantization_config,
        "mask_token_id": mask_token_id,
        "block_length": block_length,
        "topology": topology,
        "adapter": adapter,
        "offload_folder": offload_folder,
    }
    if source is None:
        if gguf_file is not None:
            raise ValueError(f"gguf_file={shown(gguf_file)} needs a source: the folder or repository that it is in")
        common: dict[str, Any] = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        packaged = importlib.resources.files("paradec") / "assets" / PACKAGED
        with importlib.resources.as_file(packaged) as folder:
            return load(folder, **common, **for_text, **image_options)
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise ValueError(f"source={shown(source)} must be a folder or a hub repository id")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"revision={shown(revision)} must be a text: a branch, tag or commit of a hub repository")
    check_int("mask_token_id", mask_token_id, low=0, none=True)
    check_int("block_length", block_length, low=1, none=True)
    if topology is not None:
        check_choice("topology", topology, ("bidirectional", "block_causal"))
    if adapter is not None:
        if not isinstance(adapter, (str, os.PathLike)) or not os.fspath(adapter):
            raise ValueError(f"adapter={shown(adapter)} must be a folder or a hub repository id")
        for_text["adapter"] = os.fspath(adapter)
    if offload_folder is not None and (not isinstance(offload_folder, (str, os.PathLike)) or not str(offload_folder)):
        raise ValueError(f"offload_folder={shown(offload_folder)} must be the path of a folder")
    dtype = _dtype(dtype)
    device = _device(device)
    if device is not None and (device_map is not None or tp_plan is not None):
        raise ValueError(f"device={device!s} goes with neither device_map nor tp_plan; give one of them")
    implementation(attn_implementation)
    source, gguf_file = gguf.file_of(os.fspath(source), gguf_file)
    if adapter is None and gguf_file is None and (alone := _adapter_alone(source, revision)):
        source, revision, for_text["adapter"] = *alone, lora.read_lora(source, revision)
    others = {"device_map": device_map, "quantization_config": quantization_config, "gguf_file": gguf_file}
    plan = asked(tp_plan, tp_timeout, others | {"offload_folder": offload_folder})
    options = {name: value for name, value in for_text.items() if name != "tp_timeout"} | {"tp_plan": plan}
    if gguf_file is not None:
        if image_options:
            raise TypeError(f"load() got an unexpected keyword argument {next(iter(image_options))!r}")
        read_it = partial(causal.load_causal, source, {}, revision, attn_implementation, device)
        return _laid(read_it(gguf_file=gguf_file, dtype=dtype, **options))
    if source in PACKAGED_IMAGES and not os.path.exists(source):
        source = packaged_image(source)
    pipeline = os.path.isfile(os.path.join(source, "model_index.json"))
    if pipeline or (source in PACKAGED_PIPELINES and not os.path.exists(source)):
        raise CheckpointError(
            f"{source!r} is a diffusers pipeline: load it with diffusers and give it to paradec.accelerate, or give "
            "its name to `paradec image`"
        )
    single = os.path.isfile(source) and not source.endswith(".json")  # only image models' checkpoints are one file
    beside = read_json(os.path.dirname(source) or ".", "config.json", None) if single else {}
    if beside and image_loader(beside.get("model_type")) is None:  # a text model's weights
        fetch(source, "config.json", revision)  # says that it wants the folder
    config = {"model_type": file_type(source)} if single else read_json(source, "config.json", revision, required=True)
    if image_loader(config.get("model_type")) is not None:
        for name, value in for_text.items():
            if value is not None:
                raise ValueError(f"{name}={shown(value)} is not for image models; leave it out")
        common = {"dtype": None if dtype == "auto" else dtype, "device": device, "revision": revision}
        return _laid(load_image_model(config["model_type"], source, image_options, **common))
    if image_options:
        raise TypeError(f"load() got an unexpected keyword argument {next(iter(image_options))!r}")
    if config.get("model_type") == diffusion_gemma.MODEL_TYPE:
        for name in ("mask_token_id", "block_length", "topology", "adapter"):
            if options.pop(name) is not None:
                raise CheckpointError(f"{name} is for checkpoints with masks; {source!r} decodes canvases of noise")
        if options.pop("tp_plan") is not None:
            raise CheckpointError(f"tp_plan={shown(tp_plan)} does not work for {source!r}, which decodes canvases")
        model = diffusion_gemma.load_diffusion_gemma(
            source, revision, dtype=dtype, device=device, attn_implementation=attn_implementation, **options
        )
        return _laid(model)
    of_masks = known_family(config) is not None or config.get("model_type") in [*REFUSED]
    read = _language_model if of_masks or not causal.is_causal(config) else causal.load_causal
    load_it = partial(read, source, config, revision, attn_implementation, device, dtype=dtype, **options)
    return _laid(load_it() if plan is None else plan.read(load_it))


def _laid(model: Any) -> Any:
    """The same model, its matrices as a CPU multiplies them fastest."""
    lay_columns_first(model.module)
    return model


def _language_model(
    source: str,
    config: dict[str, Any],
    revision: str | None,
    attn_implementation: str,
    device: torch.device | None,
    *,
    mask_token_id: int | None,
    block_length: int | None,
    topology: str | None,
    adapter: str | LoRA | None,
    **options: Any,
) -> Decoder:
    """What `load` does for masked language models; `options` are for `from_pretrained`."""
    family = _family(source, config)
    hf_config = family.config(config)
    if family.fused is not None:
        _check_fused(source, hf_config, options)
    quantised = _quantised(source, config, hf_config)
    if adapter is not None:
        adapter = _adapter(source, family, quantised, adapter, options)
    elif fetch(source, lora.CONFIG, revision) is not None:
        raise CheckpointError(
            f"{source!r} holds an adapter_config.json beside a config.json; give adapter={source!r} too, and it is "
            "merged into the weights there"
        )
    family, block_length = _blocks(source, config, family, block_length, topology, adapter)
    default_attention(attn_implementation, source, family.topology)
    stored = stored_weights(source, revision)
    if quantised:  # names, shapes and dtypes are for transformers' quantiser to check
        names = {published_to_own(name, family.key_mapping or {}): name for name in stored}
    else:
        names = check_weights(source, stored, hf_config, family.key_mapping or {})
    if adapter is not None:
        scales = adapter.scales(source, stored)
    generation = read_json(source, "generation_config.json", revision)
    tokenizer = tokenizer_of(source, family, revision)
    facts = facts_of(source, config, generation, tokenizer, hf_config, family, mask_token_id, block_length)
    name = implementation(attn_implementation)
    module = _pretrained(source, hf_config, family, config, revision, attn_implementation=name, **options)
    if adapter is not None:
        adapter.merge(module, family.key_mapping or {}, scales)
    if device is not None:
        module = module.to(device)
    default_new = generation.get("max_new_tokens")
    if isinstance(default_new, bool) or not isinstance(default_new, int) or default_new < 1:
        default_new = DEFAULT_NEW_TOKENS
    model = Decoder(
        module,
        facts,
        tokenizer=tokenizer,
        default_max_new_tokens=default_new,
        default_block_length=family.default_block_length,
        default_attention=default_attention(attn_implementation, facts.name, facts.topology),
        attn_implementation=name,
    )
    cpu_dtypes.hint(source, (tensor.dtype for tensor in stored.values()), model.dtype, model.device)
    place = os.path.abspath(source) if os.path.isdir(source) else source
    model.published = Published(place, family, config, generation, names)
    return model


def _check_fused(source: str, hf_config: Any, options: dict[str, Any]) -> None:
    """What matrices that are split while they are read cannot be: quantised or spread over processes then. The plan of
    `tp_plan="auto"` leaves them whole; experts, which are most of such a model, are spread.

    Raises:
        ValueError: options that ask for one or the other.
    """
    plan = None if options.get("tp_plan") is None else options["tp_plan"].styles
    if options.get("quantization_config") is not None:
        raise ValueError(
            f"quantization_config={shown(options['quantization_config'])} does not work for {source!r}: its "
            "query_key_value matrices are split where they are read. Load it without, and quantise model.module "
            "(torchao.quantize_, say)"
        )
    if isinstance(plan, dict) and any("self_attn" in name for name in plan):
        raise ValueError(
            f"tp_plan={shown(plan)} spreads the attention of {source!r}, whose query_key_value matrices are split "
            "where they are read; give 'auto', or a plan without it"
        )
    if plan is not None:
        whole = {name: how for name, how in hf_config.base_model_tp_plan.items() if ".self_attn." not in name}
        hf_config.base_model_tp_plan = whole


def _quantised(source: str, config: dict[str, Any], hf_config: Any) -> bool:
    """Whether config.json says how the weights are quantised; transformers is told, whose quantisers read them.

    Raises:
        CheckpointError: a way that transformers does not know.
    """
    if not states_quantiser(source, config):
        return False
    hf_config.quantization_config = config["quantization_config"]
    return True


def known_family(config: Mapping[str, Any]) -> Family | None:
    """The masked family that config.json is of, by its model_type or its architecture."""
    model_type = config.get("model_type")
    if model_type == "llada" and llada_moe.is_llada_moe(config):
        return llada_moe.FAMILY
    if model_type == "llama" and stable_diffcoder.is_stable_diffcoder(config):
        return stable_diffcoder.FAMILY
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def _family(source: str, config: dict[str, Any]) -> Family:
    """Raises CheckpointError: a model_type that `load` does not read."""
    model_type, known = config.get("model_type"), known_family(config)
    if known is not None:
        return known
    if isinstance(model_type, str) and model_type in REFUSED:
        raise CheckpointError(
            f"{source!r} has model_type={model_type!r}, which load does not read: {REFUSED[model_type]}"
        )
    if config.get("is_causal") is False:
        raise CheckpointError(
            f"{source!r} has model_type={shown(model_type)}: the save_pretrained of a module alone wrote it, which "
            "knows nothing of masks; load it with transformers and give it to paradec.wrap, or save with that of the "
            "model which paradec.load returns"
        )
    raise CheckpointError(
        f"{source!r} has model_type={shown(model_type)}; load reads {', '.join(map(repr, FAMILIES))} and the causal "
        "language models of transformers. Load another model with transformers and give it to paradec.wrap"
    )


def _adapter_alone(source: str, revision: str | None) -> tuple[str, str | None] | None:
    """The base of a folder or repository that holds nothing but an adapter, and its revision; None for all others."""
    if os.path.isfile(source) or source in PACKAGED_IMAGES or source in PACKAGED_PIPELINES:
        return None
    if fetch(source, "config.json", revision) is not None or fetch(source, lora.CONFIG, revision) is None:
        return None
    return lora.base_of(source, revision)


def _adapter(source: str, family: Family, quantised: bool, adapter: str | LoRA, options: dict[str, Any]) -> LoRA:
    """The adapter, read. Raises CheckpointError: one that does not work with this checkpoint or these options."""
    name = adapter if isinstance(adapter, str) else adapter.source
    why = None
    if family.experts or family.fused is not None:
        why = "its matrices are not in the module as they are in the file"
    elif quantised or options.get("quantization_config") is not None:
        why = "quantised weights cannot take a product"
    elif options.get("tp_plan") is not None:
        why = "each process of tp_plan reads a part of each matrix"
    if why is not None:
        raise CheckpointError(
            f"adapter={name!r} does not work for {source!r} here: {why}; merge it with peft (merge_and_unload) and "
            "load what that saves"
        )
    return lora.read_lora(adapter) if isinstance(adapter, str) else adapter


def _blocks(
    source: str,
    config: dict[str, Any],
    family: Family,
    given: int | None,
    topology: str | None,
    adapter: LoRA | None,
) -> tuple[Family, int | None]:
    """The family as this checkpoint was trained, and the block. Bidirectional families may have been trained in blocks
    from the prompt's end.

    Raises:
        CheckpointError: a topology that is not the checkpoint's, or blocks without a length.
    """
    if family.block_length is not None:
        if topology == "bidirectional":
            raise CheckpointError(f"topology={topology!r} does not fit {source!r}, which is block-causal")
        return family, _block_length(source, config, family, given)
    stated = stated_block(config, d2f.STATED)
    named = d2f.is_published(None if adapter is None else adapter.source)
    if topology == "bidirectional" or (topology is None and stated is None and not named):
        return family, _block_length(source, config, family, given)
    length = next((n for n in (given, stated, d2f.BLOCK_LENGTH if named else None) if n is not None), None)
    if length is None:
        raise CheckpointError(
            f"topology={topology!r} needs a block for {source!r}; give load(..., block_length=...) as it was trained "
            "(D2F's scripts have 32 to 64)"
        )
    return replace(family, block_length=partial(d2f.given, length), block_align="prompt"), length


def _block_length(source: str, config: dict[str, Any], family: Family, given: int | None) -> int | None:
    """Raises CheckpointError: a block-causal checkpoint that does not say its block, or a block for another one."""
    if family.block_length is None:
        if given is not None:
            raise CheckpointError(
                f"block_length={given} is for block-causal checkpoints; {source!r} is bidirectional. How an answer is "
                "cut is an argument of generate"
            )
        return None
    length = family.block_length(config, source) if given is None else given
    if length is None:
        raise CheckpointError(
            f"neither config.json nor the name of {source!r} says how long its blocks are; give load(..., "
            "block_length=...) as it was trained"
        )
    return length


def _pretrained(
    source: str,
    hf_config: Any,
    family: Family,
    config: dict[str, Any],
    revision: str | None,
    **options: Any,
) -> nn.Module:
    """Load the weights, strictly."""
    import transformers

    own = getattr(transformers, family.module)
    try:
        module = read_module(
            own if family.reader is None else family.reader(),
            source,
            revision,
            config=hf_config,
            key_mapping=None if family.key_mapping is None else dict(family.key_mapping),
            generation_config=transformers.GenerationConfig(),  # read above; the file's own may hold anything
            **options,
        )
    except (ImportError, ValueError) as error:
        if isinstance(error, CheckpointError) or config.get("quantization_config") is None:
            raise
        raise CheckpointError(
            f"quantization_config={shown(config['quantization_config'])} of {source!r} cannot be followed: "
            f"{reason(error)}"
        ) from error
    if family.reader is not None:
        module.__class__ = own
    _saves_alone(module, family)
    if family.experts and not _groups(module):
        module.set_experts_implementation("eager")
    half = module.dtype in (torch.bfloat16, torch.float16)
    if half and family.float32_angles and config.get("rope_full_precision", True):
        module.model.rotary_emb = _Float32Angles(module.model.rotary_emb)
    return module.eval()


def _groups(module: Any) -> bool:
    """Whether torch's grouped products, with which transformers runs experts, take these: they have no float64, and
    rows must be multiples of 16 bytes. The loop over the experts takes any."""
    sizes = (module.config.hidden_size, module.config.moe_intermediate_size)
    return module.dtype != torch.float64 and not any(size * module.dtype.itemsize % 16 for size in sizes)


def _saves_alone(module: Any, family: Family) -> None:
    """See to it that the module's own `save_pretrained` writes what transformers loads again.

    Its config.json is that of transformers' class, so the weights' names must be too: transformers would write them as
    the file had them, and find none of them again. And config.json must say that the model is not causal, since nothing
    in it names an attention of ours.
    """
    renamed = {*(family.key_mapping or {}), *(family.fused or {})}
    conversions = getattr(module, "_weight_conversions", None) or []
    module._weight_conversions = [entry for entry in conversions if not renamed.issuperset(entry.source_patterns)]
    module.config.is_causal = False


class _Float32Angles(nn.Module):
    """Rotary angles in float32 for a half-precision LLaDA (`rope_full_precision`): the products with q and k are then
    float32 too, and the attention function casts them back."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x.new_empty((), dtype=torch.float32), position_ids=position_ids)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """Raises ValueError: not a floating dtype."""
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)} must be one of 'float32', 'bfloat16', 'float16', 'float64', 'auto'")
    return found


def _device(device: str | torch.device | None) -> torch.device | None:
    """Raises ValueError: no such device here."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"device={shown(device)} is not available here: {reason}") from error
    if found.type == "meta":
        raise ValueError(f"device={shown(device)} holds no numbers; give a device that computes, e.g. 'cpu'")
    return found
