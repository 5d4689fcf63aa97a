"""Learned filters of Learn2PD, and their safetensors files. The metadata "learn2pd" is a `FilterFacts` as JSON."""

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

from paradec.core.checks import short_repr
from paradec.core.text_files import replace_file
from paradec.models.checkpoint import DTYPES, check_dtypes
from paradec.samplers.masked.state import MaskedState

FORMAT = "paradec-learn2pd/1"
FEATURES = ("confidence", "entropy", "margin", "mask_ratio", "position")
QUANTITIES = {"confidence": "confidence", "entropy": "minus_entropy", "margin": "margin"}
"""Features that are computed from logits, with the quantity of the proposal that each feature reads."""


class BlockFilter(nn.Module):
    """The paper's filter: two linear layers from the confidences of a block to one logit per position.

    Each position of the block has its own weights. A shorter block is padded with confidence 1. A filter for blocks of
    32 has 2112 parameters.
    """

    reads = ("confidence",)

    def __init__(self, block_length: int):
        super().__init__()
        self.block_length = block_length
        self.layers = nn.Sequential(
            nn.Linear(block_length, block_length), nn.ReLU(), nn.Linear(block_length, block_length)
        )

    def forward(self, features: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """Compute logits [R, W] from features [R, W] by name. valid: [R, W] bool, False outside the block."""
        width, size = valid.shape[1], self.block_length
        confidence = torch.where(valid, features["confidence"], 1)[:, :size]
        confidence = nn.functional.pad(confidence, (0, size - confidence.shape[1]), value=1.0)
        logits = self.layers(confidence)[:, :width]
        return nn.functional.pad(logits, (0, width - logits.shape[1]), value=-math.inf)


class FeatureFilter(nn.Module):
    """Transformer from the features of all positions to one logit per position, for blocks of any length."""

    reads = FEATURES

    def __init__(self, width: int = 24, heads: int = 2, layers: int = 2):
        super().__init__()
        self.enter = nn.Linear(len(FEATURES), width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.context = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.leave = nn.Linear(width, 1)

    def forward(self, features: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """Compute logits, as `BlockFilter.forward` does. Every row needs at least one valid position."""
        x = torch.stack([torch.where(valid, features[name], 0) for name in FEATURES], -1)
        return self.leave(self.context(self.enter(x), src_key_padding_mask=~valid)).squeeze(-1)


KINDS = {"block": BlockFilter, "features": FeatureFilter}


@dataclass(frozen=True)
class FilterFacts:
    """Training data and quality of a filter. kind: "block" or "features". caches: names of the caches in training.
    held_out: quality on held-out prompts at `threshold`. paradec: version of paradec that trained the filter."""

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
        return BlockFilter(self.block_length) if self.kind == "block" else FeatureFilter()

    def mismatches(self, model: str, vocab_size: int, block_length: int | None, cache: str) -> list[str]:
        """Describe the differences from a request. block_length: None for blocks of various lengths."""
        differences = []
        if (self.model, self.vocab_size) != (model, vocab_size):
            trained, requested = f"{self.model!r} ({self.vocab_size} tokens)", f"{model!r} ({vocab_size} tokens)"
            differences.append(f"model {trained}, here {requested}")
        if self.kind == "block" and self.block_length != block_length:
            differences.append(f"block_length {self.block_length}, here {block_length or 'blocks of various lengths'}")
        if cache not in self.caches:
            differences.append(f"cache {' or '.join(map(repr, self.caches))}, here {cache!r}")
        return differences


@dataclass(frozen=True)
class Filter:
    """A network in float64, with the facts about its training."""

    facts: FilterFacts
    network: BlockFilter | FeatureFilter

    def accept(self, features: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """Compute the probability that a position's candidate is final: [R, W] float64, undefined where not valid."""
        with torch.no_grad():
            return self.network({name: features[name] for name in self.network.reads}, valid).sigmoid()


def block_features(state: MaskedState, proposal: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Compute a proposal's features by name, each [R, W] float64 in [0, 1]; also which columns are in the block [R, W].

    "confidence" is p(candidate), even at decided positions. "entropy" is divided by the entropy of the uniform
    distribution. "margin" is p(1st) - p(2nd). "mask_ratio" is the undecided share of the block, and "position" the
    relative position in the block. Features are missing if the proposal lacks their quantity.
    """
    window, start = state.window, proposal.positions[:, :1]
    end = state.block_ends if proposal.block_end is None else proposal.block_end.unsqueeze(1)
    valid = (proposal.positions >= start) & (proposal.positions < end)
    features = {name: proposal.quantities[key] for name, key in QUANTITIES.items() if key in proposal.quantities}
    if "entropy" in features:
        features["entropy"] = -features["entropy"] / math.log(state.facts.vocab_size)
    undecided = window.undecided(proposal.current, state.facts.mask_id) & valid
    size = valid.sum(1, keepdim=True)
    features["mask_ratio"] = (undecided.sum(1, keepdim=True) / size).double().expand(valid.shape)
    features["position"] = (proposal.positions - start) / size.double()
    return features, valid


# ---- files ---------------------------------------------------------------------------------------------------------

_PACKAGED = Path(str(importlib.resources.files("paradec"))) / "assets" / "tiny-llada" / "learn2pd.safetensors"
DEFAULT_FILTERS: dict[tuple[str, int], str] = {("tiny-llada", 123): str(_PACKAGED)}
"""Default filter file for the name and vocabulary size of a model."""


def register_filter(path: str | os.PathLike[str]) -> None:
    """Make a filter the default for its model, in this process. Raises as `load_filter`."""
    facts = read_facts(path)
    DEFAULT_FILTERS[facts.model, facts.vocab_size] = os.fspath(path)


def save_filter(path: str | os.PathLike[str], facts: FilterFacts, network: nn.Module) -> None:
    """Write a filter atomically, with float32 weights."""
    weights = {name: tensor.detach().float().contiguous() for name, tensor in network.state_dict().items()}
    with replace_file(path) as draft:
        save_file(weights, draft, metadata={"learn2pd": json.dumps(dataclasses.asdict(facts))})
    _load.cache_clear()  # the new file may have the same modification time


def read_facts(path: str | os.PathLike[str]) -> FilterFacts:
    """Read the facts about a filter's training. Raises as `load_filter`."""
    if not os.path.isfile(path):
        raise ValueError(f"filter={short_repr(os.fspath(path))} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            facts = FilterFacts(**json.loads((file.metadata() or {})["learn2pd"]))
        if facts.format != FORMAT or facts.kind not in KINDS:
            raise ValueError(f"format {facts.format!r}, kind {facts.kind!r}")
        return dataclasses.replace(facts, caches=tuple(facts.caches))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"filter={os.fspath(path)!r} is not a filter of format {FORMAT!r} ({error})") from None


def load_filter(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Filter:
    """Read a filter. An unchanged file is read only once per device. Raises ValueError for a missing file or another
    format, OSError for an unreadable file."""
    modified = os.stat(path).st_mtime_ns if os.path.isfile(path) else 0
    return _load(os.fspath(path), modified, str(device))


@lru_cache(maxsize=16)
def _load(path: str, modified: int, device: str) -> Filter:
    facts = read_facts(path)
    network = facts.network().double()
    try:
        with safe_open(path, framework="pt") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
            check_dtypes(path, {name: DTYPES.get(dtype, dtype) for name, dtype in dtypes.items()})
            network.load_state_dict({name: file.get_tensor(name) for name in dtypes})
    except RuntimeError as error:
        reason = str(error).split("\n")[1].strip() if "\n" in str(error) else str(error)
        message = f"filter={os.fspath(path)!r} has other weights than a {facts.kind!r} filter: {reason}"
        raise ValueError(message) from None
    return Filter(facts, network.eval().requires_grad_(False).to(device))
