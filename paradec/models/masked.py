"""Masked language models: checkpoints of `FAMILIES` in their published formats, on modules of transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paradec.core.checks import short_repr
from paradec.models import lora, self_drafting
from paradec.models.checkpoint import (
    INT8,
    CheckpointError,
    fetch,
    first_line,
    is_int8,
    is_quantised,
    read_flag,
    read_json,
    read_module,
    read_weight_headers,
    rename_weight,
)
from paradec.models.decoder import Decoder
from paradec.models.family import Family, read_block_length, read_facts, read_tokenizer
from paradec.models.gguf import SHIFT, GgufFile
from paradec.models.lora import LoRA
from paradec.models.rotary import replace_base
from paradec.models.saving import PublishedCheckpoint, check_weights
from paradec.models.text import dream, llada, llada2, llada_moe, nemotron_diffusion, rnd1, sdar, stable_diffcoder
from paradec.models.wrapping import default_attention, registered_attention

FAMILIES: dict[str, Family] = {
    "llada": llada.FAMILY,
    "Dream": dream.FAMILY,
    "sdar": sdar.FAMILY,
    "Fast_dLLM_Qwen": dream.FAST_DLLM_V2,
    "sdar_moe": sdar.FAMILY_MOE,
    "llada2_moe": llada2.FAMILY,
    "mmada": llada.FAMILY,
    "nemotron_labs_diffusion": nemotron_diffusion.FAMILY,
    "rnd1": rnd1.FAMILY,
}
"""Families by the `model_type` of config.json."""
UNSUPPORTED = {
    "llada2_moe_veomni": "it is LLaDA2's training form, with all experts of a layer in one tensor; convert it to the "
    "published form, which load reads",
    "nemotron_labs_diffusion_vlm": "it reads pictures as embeddings, not as tokens; load reads only the text models "
    "(model_type 'nemotron_labs_diffusion')",
    "llava_llada": "LLaDA-V reads pictures as embeddings, not as tokens. For text, load its language model with its "
    "own code and give that to paradec.wrap",
    "wedlm": "WeDLM moves decided tokens to the front under causal attention, as no sampler of paradec does. Its "
    "weights are those of a Qwen3 or Qwen2: load them with transformers and give the module to paradec.wrap with "
    "topology='causal' for the causal samplers",
    "omnivoice": "OmniVoice predicts several tokens at each position, as no sampler of paradec does. Use its own code",
}
D2F = re.compile(r"D2F_(?:Dream|LLaDA)_\w+_Lora")
"""Names of D2F's adapters (SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora and others; Wang et al., arXiv 2508.09192). They make a
model block-causal (the prompt is one block, blocks of the answer follow it), but their files do not state this."""
D2F_BLOCK_LENGTH = 32
"""Block length in most of D2F's published scripts. (Training used 16.)"""
PROMPT_BLOCK = "prompt_block_length"
"""The field of config.json in which `save_pretrained` writes D2F's block length."""
DEFAULT_NEW_TOKENS = 128
"""Answer length if neither the request nor generation_config.json states one."""


def load_masked(
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
    rope_theta: float | None = None,
    gguf: GgufFile | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Decoder:
    """Load a masked language model, as `load` does; `options` are for `from_pretrained`.

    gguf: the GGUF file at `source`; no other file is then read. tokenizer: replaces the checkpoint's."""
    if block_length is not None and known_family(config) in (sdar.FAMILY, sdar.FAMILY_MOE):
        config = {**config, sdar.ARGUMENT_BLOCK: block_length}
    family = _find_family(source, config)
    if (is_shifted := read_flag(config, SHIFT, None)) is not None:
        family = replace(family, prediction="shifted" if is_shifted else "same")
    config = replace_base(config, rope_theta)
    hf_config = family.config(config)
    if family.fused is not None:
        _check_fused(source, hf_config, options)
    has_quantization = is_quantised(source, config)
    if has_quantization:
        hf_config.quantization_config = config["quantization_config"]  # transformers' quantisers read the weights
    if adapter is not None:
        adapter = _read_adapter(source, family, has_quantization, adapter, options)
    elif gguf is None and fetch(source, lora.CONFIG, revision) is not None:
        raise CheckpointError(
            f"{source!r} holds both adapter_config.json and config.json; to merge that adapter into the weights, "
            f"give adapter={source!r} too"
        )
    family, block_length = _resolve_blocks(source, config, family, block_length, topology, adapter)
    default_attention(attn_implementation, source, family.topology)
    headers: dict[str, Any]  # shapes and dtypes, or tensors of a GGUF file, which are unpacked later
    headers = dict(read_weight_headers(source, revision) if gguf is None else gguf.read_weights(options["dtype"]))
    if is_int8(config):  # int8 matrices are stored as [in, out]
        headers = {name: h._replace(shape=h.shape[::-1]) if h.dtype == "int8" else h for name, h in headers.items()}
    if has_quantization:  # transformers' quantiser checks names, shapes and dtypes
        names = {rename_weight(name, family.key_mapping or {}): name for name in headers}
    else:
        names = check_weights(source, headers, hf_config, family)
    if adapter is not None and not family.modes:
        layers = adapter.layers(source, headers)
    generation = read_json(source, "generation_config.json", revision) if gguf is None else {}
    if tokenizer is None:
        tokenizer = read_tokenizer(source, family, revision) if gguf is None else gguf.build_tokenizer()
    facts_block_length = None if family.topology == "causal" else block_length
    facts_arguments = (source, config, generation, tokenizer, hf_config, family, mask_token_id, facts_block_length)
    facts, drafting = read_facts(*facts_arguments, has_new_base=rope_theta is not None), None
    if family.modes:
        drafting = self_drafting.read_self_drafting(source, family, block_length, headers, revision, adapter)
    attention_name = registered_attention(attn_implementation)
    if gguf is not None:
        options["state_dict"] = {name: headers[published] for name, published in names.items()}
    options["attn_implementation"] = attention_name
    module = _read_pretrained(source, hf_config, family, config, revision, **options)
    if adapter is not None and drafting is None:
        adapter.merge(module, family.key_mapping or {}, layers)
    if device is not None:
        module = module.to(device)
    max_new_tokens = generation.get("max_new_tokens")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        max_new_tokens = DEFAULT_NEW_TOKENS
    model = (Decoder if family.decoder is None else family.decoder(hf_config))(
        module,
        facts,
        tokenizer=tokenizer,
        default_max_new_tokens=max_new_tokens,
        default_block_length=family.default_block_length,
        default_attention=default_attention(attn_implementation, facts.name, facts.topology),
        attn_implementation="sdpa" if facts.topology == "causal" else attention_name,
    )
    model.self_drafting = drafting
    location = os.path.abspath(source) if os.path.isdir(source) else source
    model.published = PublishedCheckpoint(location, family, config, generation, names)
    return model


def _check_fused(source: str, hf_config: Any, options: dict[str, Any]) -> None:
    """For a checkpoint whose fused matrices are split while they are read: raise ValueError for options that would
    quantise or distribute them. With a `tp_plan`, leave attention out of transformers' plan."""
    plan, quantization = options.get("tp_plan"), options.get("quantization_config")
    if quantization is not None and getattr(quantization, "quant_method", None) != INT8:
        raise ValueError(
            f"quantization_config={short_repr(options['quantization_config'])} does not work for {source!r}, whose "
            "query_key_value matrices are split on reading. Load without it, and quantise the loaded model.module "
            "(for example with torchao.quantize_)"
        )
    if isinstance(plan, dict) and any("self_attn" in name for name in plan):
        raise ValueError(
            f"tp_plan={short_repr(plan)} includes the attention of {source!r}, whose query_key_value matrices are "
            "split on reading; give 'auto', or a plan without attention"
        )
    if plan is not None:
        expert_plan = {name: style for name, style in hf_config.base_model_tp_plan.items() if ".self_attn." not in name}
        hf_config.base_model_tp_plan = expert_plan


def known_family(config: Mapping[str, Any]) -> Family | None:
    """The masked family of a config.json, by its model_type or architecture; None for other models."""
    model_type = config.get("model_type")
    if model_type == "llada" and llada_moe.is_llada_moe(config):
        return llada_moe.FAMILY
    architectures = config.get("architectures")
    if model_type == "llama" and isinstance(architectures, list) and "StableDiffcoderForCausalLM" in architectures:
        return stable_diffcoder.FAMILY
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def _find_family(source: str, config: dict[str, Any]) -> Family:
    model_type, family = config.get("model_type"), known_family(config)
    if family in (sdar.FAMILY, sdar.FAMILY_MOE) and sdar.is_i_dlm(config, source):
        raise CheckpointError(
            f"{source!r} has model_type={model_type!r}, and its name or block_size="
            f"{short_repr(config.get(sdar.BLOCK_NAME))} means I-DLM: a causal model that verifies drafts "
            "in the call that makes new drafts, as no sampler of paradec does. For SDAR with such blocks give "
            "block_length=..."
        )
    if family is not None:
        return family
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        raise CheckpointError(
            f"{source!r} has model_type={model_type!r}, which load does not read: {UNSUPPORTED[model_type]}"
        )
    if config.get("is_causal") is False:
        raise CheckpointError(
            f"{source!r} has model_type={short_repr(model_type)}: it was written by a module's save_pretrained, which "
            "does not store the mask id. Load it with transformers and give it to paradec.wrap, or save again with "
            "save_pretrained of the model that paradec.load returned"
        )
    raise CheckpointError(
        f"{source!r} has model_type={short_repr(model_type)}; load reads {', '.join(map(repr, FAMILIES))} and the "
        "causal language models of transformers. Load another model with transformers and give it to paradec.wrap"
    )


def _read_adapter(
    source: str, family: Family, has_quantization: bool, adapter: str | LoRA, options: dict[str, Any]
) -> LoRA:
    """Read the adapter. Raises CheckpointError if it does not work with this checkpoint or these options."""
    name = adapter if isinstance(adapter, str) else adapter.source
    problem = None
    if family.experts or family.fused is not None:
        problem = "the module arranges its matrices differently from the file"
    elif has_quantization or options.get("quantization_config") is not None:
        problem = "an adapter cannot be added to quantised weights"
    elif options.get("tp_plan") is not None:
        problem = "with tp_plan each process reads only a part of each matrix"
    if problem is not None:
        raise CheckpointError(
            f"adapter={name!r} does not work for {source!r}: {problem}; merge it with peft (merge_and_unload), "
            "save the result and load that"
        )
    return lora.read_lora(adapter) if isinstance(adapter, str) else adapter


def _resolve_blocks(
    source: str,
    config: dict[str, Any],
    family: Family,
    block_length: int | None,
    topology: str | None,
    adapter: LoRA | None,
) -> tuple[Family, int | None]:
    """Return the family, changed to the checkpoint's topology, and the block length. Raises CheckpointError for a
    topology that does not fit the checkpoint, or an unknown block length."""
    if family.modes:
        return self_drafting.select_mode(source, family, topology), _resolve_block_length(
            source, config, family, block_length
        )
    if topology is not None and topology.startswith("causal"):
        raise CheckpointError(f"topology={topology!r} does not fit {source!r}, which was not trained with it")
    if family.block_name is not None:
        if topology == "bidirectional":
            raise CheckpointError(f"topology={topology!r} does not fit {source!r}, which is block-causal")
        return family, _resolve_block_length(source, config, family, block_length)
    config_block = read_block_length(config, PROMPT_BLOCK)
    is_d2f = adapter is not None and D2F.fullmatch(os.path.basename(adapter.source.rstrip("/"))) is not None
    if topology == "bidirectional" or (topology is None and config_block is None and not is_d2f):
        return family, _resolve_block_length(source, config, family, block_length)
    length = next(
        (n for n in (block_length, config_block, D2F_BLOCK_LENGTH if is_d2f else None) if n is not None), None
    )
    if length is None:
        raise CheckpointError(
            f"topology={topology!r} needs a block length for {source!r}; give that of its training with "
            "load(..., block_length=...) (D2F's scripts use 32 to 64)"
        )
    return replace(family, block_name=PROMPT_BLOCK, block_align="prompt"), length


def _resolve_block_length(source: str, config: dict[str, Any], family: Family, block_length: int | None) -> int | None:
    if family.block_name is None:
        if block_length is not None:
            raise CheckpointError(
                f"block_length={block_length} is for block-causal checkpoints; {source!r} is bidirectional. To decode "
                "an answer in blocks, give generate(..., block_length=...)"
            )
        return None
    length = family.block_length(config, source) if block_length is None else block_length
    if length is None:
        raise CheckpointError(
            f"neither config.json nor the name of {source!r} states its block length; give that of its training with "
            "load(..., block_length=...)"
        )
    return length


def _read_pretrained(
    source: str, hf_config: Any, family: Family, config: dict[str, Any], revision: str | None, **options: Any
) -> nn.Module:
    import transformers

    cls = getattr(transformers, family.module)
    try:
        module = read_module(
            cls if family.reader is None else family.reader(),
            source,
            revision,
            config=hf_config,
            key_mapping=None if family.key_mapping is None else dict(family.key_mapping),
            generation_config=transformers.GenerationConfig(),  # not the checkpoint's, which may be invalid
            **options,
        )
    except (ImportError, ValueError) as error:
        if isinstance(error, CheckpointError) or config.get("quantization_config") is None:
            raise
        raise CheckpointError(
            f"quantization_config={short_repr(config['quantization_config'])} of {source!r} cannot be applied: "
            f"{first_line(error)}"
        ) from error
    if family.reader is not None:
        module.__class__ = cls
    # let the module's `save_pretrained` write files that transformers can load: with transformers' weight names, and
    # with `is_causal` False, since config.json does not name paradec's attention
    family_patterns = {*(family.key_mapping or {}), *(family.fused or {})}
    conversions = getattr(module, "_weight_conversions", None) or []
    module._weight_conversions = [item for item in conversions if not family_patterns.issuperset(item.source_patterns)]
    module.config.is_causal = False
    if family.experts:  # torch's grouped products need rows of a multiple of 16 bytes, and do not support float64
        sizes = (module.config.hidden_size, module.config.moe_intermediate_size)
        if module.dtype == torch.float64 or any(size * module.dtype.itemsize % 16 for size in sizes):
            module.set_experts_implementation("eager")
    is_half = module.dtype in (torch.bfloat16, torch.float16)
    if is_half and family.float32_angles and config.get("rope_full_precision", True):
        module.model.rotary_emb = _Float32Angles(module.model.rotary_emb)
    return module.eval()


class _Float32Angles(nn.Module):
    """Rotary angles in float32 for a half-precision LLaDA (`rope_full_precision`); attention casts back."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x.new_empty((), dtype=torch.float32), position_ids=position_ids)
