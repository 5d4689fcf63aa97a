"""Ids and the tokenizer of a checkpoint of language, from its own files."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

from paradec.core.facts import ModelFacts
from paradec.models.checkpoint import TURN_ENDS, CheckpointError, fetch, token_id
from paradec.models.family import Family
from paradec.models.rotary import lengths

CONTROL = ("delete_token_id", "split_token_id")
"""Ids by which a model edits its text, in config.json (LLaDA2.2)."""
logger = logging.getLogger("paradec")


def facts_of(
    source: str,
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: Any,
    hf_config: Any,
    family: Family,
    mask_token_id: int | None,
    block_length: int | None,
    raised: bool = False,
) -> ModelFacts:
    """Ids from the checkpoint's own files: config.json first, then generation_config.json, then the tokenizer.
    `raised` says whether `load` was given another base of the rotary angles."""
    vocab = hf_config.vocab_size
    known = {} if tokenizer is None else tokenizer.get_vocab()
    tokenizer_mask = getattr(tokenizer, "mask_token_id", None)
    if tokenizer_mask is None:
        tokenizer_mask = known.get(family.mask_token)
    mask = _first_stated(source, "mask_token_id", config, generation, tokenizer_mask, mask_token_id)
    if mask is None:
        raise CheckpointError(f"config.json of {source!r} has no 'mask_token_id'; give load(..., mask_token_id=...)")
    ends = stated_ends(config, generation, tokenizer, family)
    pad = _first_stated(source, "pad_token_id", config, {}, getattr(tokenizer, "pad_token_id", None))
    control = {name: config.get(name) for name in CONTROL}
    stated = (("mask_token_id", mask), ("pad_token_id", pad), *control.items())
    for name, value in (*stated, *(("eos_token_id", end) for end in ends)):
        token_id(name, value, vocab)
    longest, trained = lengths(hf_config, raised)
    try:
        return ModelFacts(
            vocab_size=vocab,
            mask_token_id=mask,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            pad_token_id=pad,
            max_length=longest,
            trained_length=trained,
            prediction=family.prediction,
            topology=family.topology,
            block_length=block_length,
            block_align=family.block_align,
            whole_blocks=getattr(hf_config, "expert_capacity", None) is not None,
            tokenizer_size=tokenizer_size(tokenizer),
            **control,
            name=os.path.basename(source.rstrip("/")) or source,
        )
    except ValueError as error:
        raise CheckpointError(f"{source!r}: {error}") from error


def tokenizer_size(tokenizer: Any) -> int | None:
    """One more than the largest id that a tokenizer has a token for; None without a tokenizer that lists them."""
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(known.values()) + 1 if known else None


def stated_ends(config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Any, family: Family) -> list[Any]:
    """The ids that end answers, by what a checkpoint states; whether they are ids is not checked."""
    known = {} if tokenizer is None else tokenizer.get_vocab()
    ends: list[Any] = []
    for data in (config, generation):
        stated = data.get("eos_token_id")
        ends += stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not ends and family.padding_ends:
        places = (getattr(tokenizer, "eos_token_id", None), config.get("pad_token_id"))
        ends += [place for place in places if place is not None][:1]
    return ends + [known[token] for token in TURN_ENDS if token in known]


def _first_stated(
    source: str, name: str, config: dict[str, Any], generation: dict[str, Any], tokenizer_id: Any, given: Any = None
) -> Any:
    """The first of the places that state this id. Others that state another one are mentioned to the log; of the mask,
    without which nothing is read as it was trained, in a warning unless the id is given."""
    stated = {
        "argument": given,
        "config.json": config.get(name),
        "generation_config.json": generation.get(name),
        "tokenizer": tokenizer_id,
    }
    stated = {place: value for place, value in stated.items() if value is not None}
    if not stated:
        return None
    used, value = next(iter(stated.items()))
    if any(other != value for other in stated.values()):
        text = f"{source!r}: {name}={value!r} as its {used} says, of {stated!r}"
        if name == "mask_token_id" and given is None:
            warnings.warn(f"{text}; load(..., mask_token_id=...) gives another one", stacklevel=5)
        else:
            logger.info(text)
    return value


def tokenizer_of(source: str, family: Family, revision: str | None) -> Any:
    """The checkpoint's tokenizer, or None when it ships none."""
    if not any(fetch(source, name, revision) for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    has_json = fetch(source, "tokenizer.json", revision) is not None
    cls = PreTrainedTokenizerFast if has_json else Qwen2Tokenizer if family.qwen2_tokenizer else None
    if cls is None:
        raise CheckpointError(f"{source!r} has no tokenizer.json")
    try:
        return cls.from_pretrained(source, revision=revision)
    except Exception as error:  # the tokenizers library raises bare Exception for a corrupt file
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"the tokenizer of {source!r} cannot be read: {reason}") from error
