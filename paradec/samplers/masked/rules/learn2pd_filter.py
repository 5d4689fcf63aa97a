"""The learned filters of Learn2PD: networks that say which of a block's candidates are final already, and their files.

A file is a safetensors file: weights, and under "learn2pd" in its metadata what they were trained on, as JSON.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paradec.core.checks import shown
from paradec.core.text_files import replace_file
from paradec.models.checkpoint import DTYPES, check_dtypes
from paradec.samplers.masked.state import MaskedState

FORMAT = "paradec-learn2pd/1"
FEATURES = ("confidence", "entropy", "margin", "mask_ratio", "position")
"""What filters read of each position; see `block_features`."""
QUANTITIES = {"confidence": "confidence", "entropy": "minus_entropy", "margin": "margin"}
"""Features that are read from the logits -> the quantity that a sampler declares for them."""


class BlockFilter(nn.Module):
    """The paper's filter: the confidences of a whole block -> one logit per position, by two linear layers.

    Position j of the block has its own weights, so that it serves one block length; a shorter block is filled up with
    confidence 1. 2112 parameters for blocks of 32.
    """

    reads = ("confidence",)

    def __init__(self, block_length: int):
        super().__init__()
        self.block_length = block_length
        self.layers = nn.Sequential(
            nn.Linear(block_length, block_length), nn.ReLU(), nn.Linear(block_length, block_length)
        )

    def forward(self, features: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """Features [R, W] by name and valid [R, W] (False on what is no part of the block) -> logits [R, W]."""
        width, size = valid.shape[1], self.block_length
        confidence = torch.where(valid, features["confidence"], 1)[:, :size]
        confidence = nn.functional.pad(confidence, (0, size - confidence.shape[1]), value=1.0)
        logits = self.layers(confidence)[:, :width]
        return nn.functional.pad(logits, (0, width - logits.shape[1]), value=-math.inf)


class FeatureFilter(nn.Module):
    """Features of each position -> one logit per position, by a small transformer that sees the whole block.

    Serves any block length, as the filter of the paper's successor does (LPS).
    """

    reads = FEATURES

    def __init__(self, width: int = 24, heads: int = 2, layers: int = 2):
        super().__init__()
        self.enter = nn.Linear(len(FEATURES), width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.context = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.leave = nn.Linear(width, 1)

    def forward(self, features: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """As `BlockFilter.forward`; every row needs a valid position."""
        x = torch.stack([torch.where(valid, features[name], 0) for name in FEATURES], -1)
        return self.leave(self.context(self.enter(x), src_key_padding_mask=~valid)).squeeze(-1)


KINDS = {"block": BlockFilter, "features": FeatureFilter}


@dataclass(frozen=True)
class FilterFacts:
    """What a filter was trained on, and how well it did.

    Attributes:
        kind: "block" or "features".
        model: the name of the model's facts; vocab_size: its.
        block_length: positions per block.
        caches: cache names whose steps were recorded.
        threshold: that `held_out` was measured at.
        held_out: "precision", "recall", "records" and whatever else was measured on prompts kept from training.
        paradec: the version that trained it.
    """

    kind: str
    model: str
    vocab_size: int
    block_length: int
    caches: tuple[str, ...]
    threshold: float
    held_out: Mapping[str, Any] = field(default_factory=dict)
    paradec: str = ""
    format: str = FORMAT

    def network(self) -> BlockFilter | FeatureFilter:
        """A new network of this kind."""
        return BlockFilter(self.block_length) if self.kind == "block" else FeatureFilter()

    def mismatches(self, model: str, vocab_size: int, block_length: int | None, cache: str) -> list[str]:
        """What differs from a request, in words. `block_length` None: its blocks have no one length."""
        found = []
        if (self.model, self.vocab_size) != (model, vocab_size):
            ours, theirs = f"{self.model!r} ({self.vocab_size} tokens)", f"{model!r} ({vocab_size} tokens)"
            found.append(f"model {ours}, here {theirs}")
        if self.kind == "block" and self.block_length != block_length:
            found.append(f"block_length {self.block_length}, here {block_length or 'blocks of no one length'}")
        if cache not in self.caches:
            found.append(f"cache {' or '.join(map(repr, self.caches))}, here {cache!r}")
        return found


@dataclass(frozen=True)
class Filter:
    """A network in float64, ready to use, and what it was trained on."""

    facts: FilterFacts
    network: BlockFilter | FeatureFilter

    def accept(self, features: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """[R, W] float64: the probability that a position's candidate is final; of no use where not valid."""
        with torch.no_grad():
            return self.network({name: features[name] for name in self.network.reads}, valid).sigmoid()


def block_features(state: MaskedState, proposal: Any) -> tuple[dict[str, Tensor], Tensor]:
    """What filters read of a proposal, each [R, W] float64 and in [0, 1], and which columns belong to the block [R, W].

    "confidence" is p(candidate) at every position of the block, decided ones included; "entropy" is divided by that of
    a uniform choice of all tokens; "margin" is p(1st) - p(2nd); "mask_ratio" is the undecided share of the block, and
    "position" where in it the position is. Features whose quantity was not read are left out.
    """
    window, start = state.window, proposal.positions[:, :1]
    end = state.block_ends if proposal.block_end is None else proposal.block_end.unsqueeze(1)
    valid = (proposal.positions >= start) & (proposal.positions < end)
    found = {name: proposal.quantities[key] for name, key in QUANTITIES.items() if key in proposal.quantities}
    if "entropy" in found:
        found["entropy"] = -found["entropy"] / math.log(state.facts.vocab_size)
    undecided = window.undecided(proposal.current, state.facts.mask_id) & valid
    size = valid.sum(1, keepdim=True)
    found["mask_ratio"] = (undecided.sum(1, keepdim=True) / size).double().expand(valid.shape)
    found["position"] = (proposal.positions - start) / size.double()
    return found, valid


# ---- files ---------------------------------------------------------------------------------------------------------

_PACKAGED = Path(str(importlib.resources.files("paradec"))) / "assets" / "tiny-llada" / "learn2pd.safetensors"
_defaults: dict[tuple[str, int], str] = {("tiny-llada", 123): str(_PACKAGED)}


def default_filter(model: str, vocab_size: int) -> str | None:
    """The file that serves a model where a request names none; None if there is none."""
    return _defaults.get((model, vocab_size))


def quantities_of(path: str | None) -> tuple[str, ...]:
    """What a sampler has to read for a filter, None for any of the defaults; files that are gone need nothing."""
    paths = [path] if path else [*_defaults.values()]
    needed = {name for path in paths if os.path.isfile(path) for name in load_filter(path).network.reads}
    return tuple(QUANTITIES[name] for name in QUANTITIES if name == "confidence" or name in needed)


def register_filter(path: str | os.PathLike[str]) -> None:
    """Make a filter the default of the model that it was trained for, in this process.

    Raises:
        ValueError: no file, or not a filter. OSError: it cannot be read.
    """
    facts = read_facts(path)
    _defaults[facts.model, facts.vocab_size] = os.fspath(path)


def save_filter(path: str | os.PathLike[str], facts: FilterFacts, network: nn.Module) -> None:
    """Write a filter, whole or not at all. Weights are kept in float32."""
    weights = {name: tensor.detach().float().contiguous() for name, tensor in network.state_dict().items()}
    with replace_file(path) as draft:
        save_file(weights, draft, metadata={"learn2pd": json.dumps(dataclasses.asdict(facts))})
    _load.cache_clear()  # a clock's tick is long: the file may be as old as the one that it replaces


def read_facts(path: str | os.PathLike[str]) -> FilterFacts:
    """What the filter in a file was trained on.

    Raises:
        ValueError: no file, or not a filter of this format. OSError: it cannot be read.
    """
    if not os.path.isfile(path):
        raise ValueError(f"filter={shown(os.fspath(path))} is no file")
    try:
        with safe_open(path, framework="pt") as file:
            facts = FilterFacts(**json.loads((file.metadata() or {})["learn2pd"]))
        if facts.format != FORMAT or facts.kind not in KINDS:
            raise ValueError(f"format {facts.format!r}, kind {facts.kind!r}")
        return dataclasses.replace(facts, caches=tuple(facts.caches))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"filter={shown(os.fspath(path))} is no filter of format {FORMAT!r} ({error})") from None


def load_filter(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Filter:
    """Read a filter. A file that has not changed is read once per device.

    Raises:
        ValueError: no file, or not a filter of this format. OSError: it cannot be read.
    """
    if not os.path.isfile(path):
        raise ValueError(f"filter={shown(os.fspath(path))} is no file")
    return _load(os.fspath(path), os.stat(path).st_mtime_ns, str(device))


@lru_cache(maxsize=16)
def _load(path: str, modified: int, device: str) -> Filter:
    facts = read_facts(path)
    network = facts.network().double()
    try:
        with safe_open(path, framework="pt") as file:
            codes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
            check_dtypes(path, {name: DTYPES.get(code, code) for name, code in codes.items()})
            network.load_state_dict({name: file.get_tensor(name) for name in codes})
    except RuntimeError as error:
        reason = str(error).split("\n")[1].strip() if "\n" in str(error) else str(error)
        raise ValueError(f"filter={shown(path)} holds other weights than a {facts.kind!r} filter: {reason}") from None
    return Filter(facts, network.eval().requires_grad_(False).to(device))
