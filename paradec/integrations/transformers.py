"""paradec's decoding in transformers: `model.generate(..., custom_generate=paradec.hf_generate)`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from paradec.api.generate import generate
from paradec.caches.base import Cache
from paradec.core.checks import short_repr
from paradec.core.weights import get_lock
from paradec.models.cache_argument import NAMES as CACHE_NAMES
from paradec.models.wrapping import wrap
from paradec.request import FIELDS, Preset

if TYPE_CHECKING:
    from paradec.attention.sparsed import SparseD
    from paradec.caches.suffix import Suffix
    from paradec.core.blocks import BlockPolicy
    from paradec.core.protocol import Commit, Sampler, State

READ_FROM_CONFIG = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "MaxLengthCriteria",
        "EosTokenCriteria",
    }
)
"""Logits processors and stopping criteria that transformers builds from settings which `hf_generate` reads itself."""
KNOWN_INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHE_NAMES})
"""Arguments besides ids that transformers passes to a decoding method. `hf_generate` refuses others, as it would ignore
them."""

UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states", "use_mtp"), False),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "assistant_early_exit")),
    **dict.fromkeys(("constraints", "force_words_ids")),
}
"""Fields of a generation config that request another decoding method or output, with their neutral values."""
NOT_PASSED = {
    "assistant_model": "is not supported; a causal model takes sampler=paradec.samplers.create('speculative', "
    "drafter=...)",
    "streamer": "is not passed to custom decoding methods by transformers; bind it: custom_generate="
    "functools.partial(paradec.hf_generate, streamer=...)",
}
"""Arguments that transformers' `generate` passes only to its own decoding methods, with the hint for the error."""
GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__


@dataclass
class MaskedDiffusionOutput(ModelOutput):
    """Output of `model.generate(..., custom_generate=paradec.hf_generate, return_dict_in_generate=True)`."""

    sequences: Tensor | None = None
    """[B, L] int64: prompts and answers, padded after their ends."""
    nfe: int | None = None
    """Maximum number of forward calls over the rows."""
    tokens_per_forward: float | None = None
    """Answer tokens per forward call, without padding."""


def hf_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    mask_token_id: int | None = None,
    prediction: str | None = None,
    topology: str | None = None,
    tokenizer: Any = None,
    kv_cache: str | Cache | None = None,
    preset: Preset | None = None,
    sampler: str | Sampler | None = None,
    attention: str | SparseD | None = None,
    suffix: Suffix | int | str | None = None,
    blocks: str | BlockPolicy | None = None,
    block_length: int | None = None,
    steps: int | None = None,
    seed: int | Sequence[int] | None = None,
    eos_early_stop: bool | None = None,
    logits_eos_inf: bool | None = None,
    holes_eos_inf: bool | None = None,
    confidence_eos_eot_inf: bool | None = None,
    stop_strings: str | Sequence[str] | None = None,
    streamer: Any = None,
    callback: Callable[[State, Commit], bool | None] | None = None,
    progress: bool | None = None,
    **model_kwargs: Any,
) -> Tensor | MaskedDiffusionOutput:
    """Decode a masked diffusion model or a causal model, loaded by transformers, inside transformers' `generate`.

    ```
    # a masked model
    model.generate(
        ids,
        max_new_tokens=64,
        custom_generate=paradec.hf_generate,
        prediction="same",
        mask_token_id=...,
    )
    # a causal model
    model.generate(ids, custom_generate=paradec.hf_generate, sampler="sjd")
    ```

    transformers prepares the inputs and calls this function, which wraps the model during the call. These arguments of
    transformers keep their meaning: `max_new_tokens`, `do_sample` with `temperature`, `top_k` (50 by default), `top_p`
    and `min_p`, `repetition_penalty`, `bad_words_ids`, `min_new_tokens` or `min_length`, `suppress_tokens`,
    `guidance_scale` (against the masked prompt), `num_return_sequences`, `eos_token_id`, `pad_token_id`,
    `return_dict_in_generate`. Refused are: other logits processors and stopping criteria, which expect one next token
    at a time; fields that request another method (`UNSUPPORTED`); and an `assistant_model`.

    transformers passes neither `streamer` nor `tokenizer` to custom decoding methods. Bind them:
    `custom_generate=functools.partial(paradec.hf_generate, streamer=..., tokenizer=...)`.

    Args:
        model: a causal language model of transformers, or such a model with weights trained for masked diffusion
            (Llama, Qwen2, ...). Without a mask token and without `prediction`, it counts as causal (`paradec.wrap`).
        input_ids: [B, L] int64; mask ids in them are filled, too.
        mask_token_id: by default that of the generation config, the model's config or the tokenizer.
        prediction: "same" (logits [:, i] predict token i: LLaDA) or "shifted" (they predict token i + 1: Dream).
            Required for a masked model, because the architecture does not determine it.
        topology, tokenizer: as in `paradec.wrap`; the topology of a masked model is "bidirectional" by default.
        kv_cache: `cache` of `paradec.generate` (the name `cache` belongs to transformers).
        preset: as in `paradec.generate`; transformers' arguments override it.
        sampler, ..., progress: as in `paradec.generate`; None is the preset's value.

    Returns:
        [B, L + N] int64, where N is the length of the longest answer. Shorter answers are padded after their ends,
        prompts on the left. With `return_dict_in_generate=True`, a `MaskedDiffusionOutput`.

    Raises:
        ValueError: an unsupported setting (the message has its name). Others: see `paradec.wrap`, `paradec.generate`.
    """
    arguments = {name: value for name, value in locals().items() if name in FIELDS and value is not None}
    if generation_config is None:
        raise ValueError("generation_config is missing; pass hf_generate to model.generate as custom_generate")
    if kv_cache is not None:
        arguments["cache"] = kv_cache
    _raise_unsupported(generation_config, [*(logits_processor or ()), *(stopping_criteria or ())], model_kwargs)
    attention_mask = model_kwargs.get("attention_mask")
    _check_positions(input_ids, attention_mask, model_kwargs.get("position_ids"))
    config, is_sampled = generation_config, generation_config.do_sample
    max_new_tokens = config.max_new_tokens if config.max_length is None else config.max_length - input_ids.shape[1]
    if max_new_tokens is None:
        raise ValueError("generation_config has neither max_new_tokens nor max_length: give one")
    transformers_arguments = {
        "max_new_tokens": max_new_tokens,
        "temperature": (1.0 if config.temperature is None else config.temperature) if is_sampled else 0.0,
        "top_p": config.top_p if is_sampled and config.top_p != 1.0 else None,
        "top_k": config.top_k or None if is_sampled else None,
        "min_p": config.min_p if is_sampled else None,
        "repetition_penalty": 1.0 if config.repetition_penalty is None else config.repetition_penalty,
        "bad_words": config.bad_words_ids,
        "min_new_tokens": max(config.min_new_tokens or 0, (config.min_length or 0) - input_ids.shape[1]),
        "guidance_scale": 1.0 if config.guidance_scale is None else config.guidance_scale,
        "suppress_tokens": config.suppress_tokens,
    }
    mask_ids = (mask_token_id, getattr(config, "mask_token_id", None), getattr(model.config, "mask_token_id", None))
    mask = next((value for value in mask_ids if value is not None), None)
    if topology is None and (prediction is not None or mask is not None):
        topology = "bidirectional"
    with get_lock(model), _restore_training_flags(model):
        wrapped = wrap(
            model,
            mask_token_id=mask,
            eos_token_id=() if config.eos_token_id is None else config.eos_token_id,
            pad_token_id=config.pad_token_id,
            prediction=prediction,
            topology=topology,
            tokenizer=tokenizer,
        )
        try:
            output = generate(
                wrapped,
                input_ids=input_ids,
                attention_mask=attention_mask,
                preset=preset,
                **arguments,
                **transformers_arguments,
            )
        finally:
            wrapped.unwrap()
    start = output.sequences.shape[1] - output.new_tokens.shape[1]
    holes = output.filled[:, :start].sum(1).tolist()
    longest = max(tokens - filled for tokens, filled in zip(output.tokens, holes, strict=True))
    sequences = output.sequences[:, : start + longest].to(input_ids.device)
    # restore the caller's columns that are padding in every row
    sequences = torch.nn.functional.pad(sequences, (input_ids.shape[1] - start, 0), value=wrapped.facts.fill_token_id)
    if not config.return_dict_in_generate:
        return sequences
    return MaskedDiffusionOutput(sequences, output.nfe, output.tokens_per_forward)


@contextmanager
def _restore_training_flags(module: torch.nn.Module) -> Iterator[None]:
    """Restore the `training` flags of all modules at the end."""
    flags = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training


def _raise_unsupported(config: Any, processors: list[Any], model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments, settings, logits processors and stopping criteria that would have no effect."""
    for item in processors:
        name = type(item).__name__
        if name not in READ_FROM_CONFIG:
            raise ValueError(f"{name} expects one next token at a time; hf_generate cannot apply it")
        if (getattr(item, "unconditional_context", None) or {}).get("input_ids") is not None:
            raise ValueError("negative_prompt_ids is not supported: guidance_scale uses the masked prompt instead")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GENERATE_CODE:
        frame = frame.f_back
    for name, why in NOT_PASSED.items():
        if frame is not None and frame.f_locals.get(name) is not None:
            raise ValueError(f"{name}={short_repr(type(frame.f_locals[name]))} {why}")
    for name, value in UNSUPPORTED.items():
        if getattr(config, name, None) not in (None, value):
            raise ValueError(f"{name}={short_repr(getattr(config, name))} is not supported; it must be {value}")
    for name, value in model_kwargs.items():
        if value is not None and name not in KNOWN_INPUTS:
            raise ValueError(f"{name} is not supported by hf_generate; give input_ids and attention_mask")
    for name in CACHE_NAMES:
        cache = model_kwargs.get(name)
        if cache is not None and not isinstance(cache, TransformersCache):
            raise ValueError(
                f"{name}={short_repr(cache)} must be a cache of transformers; give kv_cache={short_repr(cache)}"
            )
        if cache is not None and cache.get_seq_length():
            raise ValueError(f"{name} already has tokens, and hf_generate has its own cache: choose a kv_cache")


def _check_positions(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
    """Raise ValueError unless positions count each row's tokens from 0, as paradec's do."""
    if position_ids is None:
        return
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    positions = position_ids.to(input_ids.device).expand_as(input_ids)
    if (positions != keep.cumsum(1) - 1)[keep.bool()].any():
        raise ValueError(f"position_ids={short_repr(position_ids.tolist())} must count each row's tokens from 0")
