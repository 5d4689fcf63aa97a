"""Checkpoint families, one value per `model_type`, and the ids and tokenizer of a checkpoint."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_divides
from paradec.core.facts import ModelFacts
from paradec.models.checkpoint import (
    NEUTRAL,
    TURN_ENDS,
    CheckpointError,
    check_supported,
    checkpoint_errors,
    fetch,
    read_flag,
    read_positive,
    require_fields,
)
from paradec.models.rotary import read_max_lengths


@dataclass(frozen=True)
class Family:
    """Rules that convert checkpoints of one `model_type` to a transformers module and facts.

    module: the transformers class with the same blocks.
    config: config.json -> that class's configuration; raises CheckpointError for unsupported maths.
    prediction: "same" (logits row i predicts token i) or "shifted" (row i - 1 does).
    key_mapping: patterns of the file's weight names -> the class's names; None where they are equal.
    block_name: the field of config.json with the block length of a block-causal family.
    second_block_name: another such field, for checkpoints without the first.
    published_names: pattern of published names, for checkpoints without these fields; its group is the block length.
    published_block: the block length for published names without a number.
    block_align: where blocks are counted from, as in `paradec.core.facts.ModelFacts`.
    default_block_length: of a bidirectional family, for requests without one; None makes the answer one block.
    mask_token: the mask token's text in the vocabulary, for checkpoints that do not state its id.
    qwen2_tokenizer: whether vocab.json and merges.txt are Qwen2's, and replace a missing tokenizer.json.
    float32_angles: whether `rope_full_precision` (on by default) keeps rotary angles in float32.
    experts: whether files have one matrix per expert (mixture of experts), which the module stacks.
    fused: {name of a file's weight within a layer: names of the module's weights whose rows it joins}.
    reader: returns the class that reads the files if `module` cannot; its instance then gets the class `module`.
    modes: allowed values of load's `topology`, the default first; empty for families with one topology.
    draft_adapter: the checkpoint's folder with the adapter that the model uses for its own drafts.
    decoder: returns the subclass of `Decoder` for a configuration; None is `Decoder` itself.
    padding_ends: whether the tokenizer's end token, or else the padding token, replaces a missing end id."""

    module: str
    config: Callable[[Mapping[str, Any]], Any]
    prediction: str
    key_mapping: Mapping[str, str] | None = None
    block_name: str | None = None
    second_block_name: str | None = None
    published_names: re.Pattern[str] | None = None
    published_block: int | None = None
    block_align: str = "absolute"
    default_block_length: int | None = None
    mask_token: str | None = None
    qwen2_tokenizer: bool = False
    float32_angles: bool = False
    experts: bool = False
    fused: Mapping[str, tuple[str, ...]] | None = None
    reader: Callable[[], Any] | None = None
    padding_ends: bool = False
    modes: tuple[str, ...] = ()
    draft_adapter: str | None = None
    decoder: Callable[[Any], Any] | None = None

    @property
    def topology(self) -> str:
        """The topology of the family's training: the first of its modes, else "bidirectional" or "block_causal"."""
        if self.modes:
            return self.modes[0]
        return "bidirectional" if self.block_name is None else "block_causal"

    def block_length(self, config: Mapping[str, Any], source: str) -> int | None:
        """Block length of a block-causal checkpoint; None if neither config.json nor the name in `source` states one.
        Raises CheckpointError unless it is a positive integer."""
        for name in (self.block_name, self.second_block_name):
            if name is not None and (length := read_block_length(config, name)) is not None:
                return length
        match = self.published_names and self.published_names.fullmatch(os.path.basename(source.rstrip("/")))
        if not match:
            return None
        return int(match[1]) if match.lastindex else self.published_block


def read_block_length(config: Mapping[str, Any], name: str) -> int | None:
    """The block length in the field `name` of config.json; None if the field is missing. Raises CheckpointError unless
    it is a positive integer."""
    return None if config.get(name) is None else read_positive(config, name)


SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
"""Fields with the same name in config.json and in transformers' configurations."""


def read_shared_fields(
    config: Mapping[str, Any],
    required: tuple[str, ...],
    supported: Mapping[str, tuple[Any, ...]],
    is_fully_rotated: bool = True,
) -> dict[str, Any]:
    """Read the fields that all configurations of transformers' decoders have, except rotary angles. Raises
    CheckpointError for a missing, inconsistent or unsupported field.

    required: fields that config.json must state. supported: fields that change the maths, and their supported values.
    is_fully_rotated: whether rotary angles apply to the full head width."""
    require_fields(config, required)
    check_supported(config, supported)
    sizes = {name: read_positive(config, name) for name in SIZES}
    hidden, heads, kv_heads = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    with checkpoint_errors("config.json"):
        check_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
        if config.get("head_dim") is None:
            check_divides("num_attention_heads", heads, "hidden_size", hidden)
    width = hidden // heads if config.get("head_dim") is None else read_positive(config, "head_dim")
    if is_fully_rotated and width % 2:
        raise CheckpointError(f"config.json: head_dim={width} is odd; rotary angles need an even width")
    return {
        **sizes,
        "head_dim": width,
        "rms_norm_eps": float(read_positive(config, "rms_norm_eps")),
        "hidden_act": "silu",
        "tie_word_embeddings": bool(read_flag(config, "tie_word_embeddings", False)),
        **NEUTRAL,
    }


# ---- ids and the tokenizer ------------------------------------------------------------------------------------------

CONTROL_IDS = ("delete_token_id", "split_token_id")
"""Fields of config.json with the ids by which a model edits its text (LLaDA2.2)."""
logger = logging.getLogger("paradec")


def read_facts(
    source: str,
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: Any,
    hf_config: Any,
    family: Family,
    mask_token_id: int | None,
    block_length: int | None,
    has_new_base: bool = False,
) -> ModelFacts:
    """Build a checkpoint's facts. The mask id is the first of: `mask_token_id`, that of config.json, of
    generation_config.json, of the tokenizer. has_new_base: whether `load` replaced the base of the rotary angles."""
    vocab = hf_config.vocab_size
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    tokenizer_mask = getattr(tokenizer, "mask_token_id", None)
    if tokenizer_mask is None:
        tokenizer_mask = vocabulary.get(family.mask_token)
    mask = _first_id(source, "mask_token_id", config, generation, tokenizer_mask, mask_token_id)
    if mask is None:
        raise CheckpointError(f"config.json of {source!r} has no 'mask_token_id'; give load(..., mask_token_id=...)")
    eos_ids = read_end_ids(config, generation, tokenizer, family)
    pad = _first_id(source, "pad_token_id", config, {}, getattr(tokenizer, "pad_token_id", None))
    control = {name: config.get(name) for name in CONTROL_IDS}
    max_length, trained_length = read_max_lengths(hf_config, has_new_base)
    with checkpoint_errors(repr(source)):
        facts = ModelFacts(
            vocab_size=vocab,
            mask_token_id=mask,
            eos_token_ids=tuple(end for index, end in enumerate(eos_ids) if end not in eos_ids[:index]),
            pad_token_id=pad,
            max_length=max_length,
            trained_length=trained_length,
            prediction=family.prediction,
            topology=family.topology,
            block_length=block_length,
            block_align=family.block_align,
            whole_blocks=getattr(hf_config, "expert_capacity", None) is not None,
            tokenizer_size=tokenizer_size(tokenizer),
            **control,
            name=os.path.basename(source.rstrip("/")) or source,
        )
    return facts


def tokenizer_size(tokenizer: Any) -> int | None:
    """The largest token id plus one; None for a tokenizer without a vocabulary."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(vocabulary.values()) + 1 if vocabulary else None


def read_end_ids(config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Any, family: Family) -> list[Any]:
    """The ids that end answers, from the checkpoint's files and tokenizer, unchecked."""
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    end_ids: list[Any] = []
    for fields in (config, generation):
        eos_ids = fields.get("eos_token_id")
        end_ids += eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
    if not end_ids and family.padding_ends:
        candidates = (getattr(tokenizer, "eos_token_id", None), config.get("pad_token_id"))
        end_ids += [candidate for candidate in candidates if candidate is not None][:1]
    return end_ids + [vocabulary[token] for token in TURN_ENDS if token in vocabulary]


def _first_id(
    source: str, name: str, config: dict[str, Any], generation: dict[str, Any], tokenizer_id: Any, argument: Any = None
) -> Any:
    """The first id that is not None, in the order of `values`. If the ids differ, log this, or warn for mask ids
    without `argument`."""
    values = {
        "argument": argument,
        "config.json": config.get(name),
        "generation_config.json": generation.get(name),
        "tokenizer": tokenizer_id,
    }
    values = {source_name: value for source_name, value in values.items() if value is not None}
    if not values:
        return None
    first_source, value = next(iter(values.items()))
    if any(candidate != value for candidate in values.values()):
        message = f"{source!r}: {name}={value!r} is used, from its {first_source}; the values are {values!r}"
        if name == "mask_token_id" and argument is None:
            warnings.warn(f"{message}; load(..., mask_token_id=...) overrides it", stacklevel=5)
        else:
            logger.info(message)
    return value


def read_tokenizer(source: str, family: Family, revision: str | None) -> Any:
    """The checkpoint's tokenizer; None if it has none."""
    if not any(fetch(source, name, revision) for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    has_json = fetch(source, "tokenizer.json", revision) is not None
    cls = PreTrainedTokenizerFast if has_json else Qwen2Tokenizer if family.qwen2_tokenizer else None
    if cls is None:
        raise CheckpointError(f"{source!r} has no tokenizer.json")
    # the tokenizers library raises bare Exception for a corrupt file
    with checkpoint_errors(f"the tokenizer of {source!r} cannot be read", Exception):
        tokenizer = cls.from_pretrained(source, revision=revision)
    return tokenizer
