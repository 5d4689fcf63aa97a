"""Rollouts: all decisions of a request, each with its step and log-probability, for trainers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import short_repr
from paradec.core.registry import to_data
from paradec.core.rows import resize_axis

FORMAT = "paradec-rollout/1"
GIVEN, NEVER, FORCED = -1, -2, -3
"""Values of `step_map`: prompt or padding; undecided; `FORCED - t`: written by a constraint before step t."""
TENSORS = {"tokens": 0, "step_map": GIVEN, "logp": float("nan"), "logp_drawn": float("nan")}
"""Fields with a column per position, and their value after a row's end."""
WRITES = ("writes", "writes_logp", "writes_logp_drawn")  # fields with a row per write
ROW_FIELDS = ("length", "prompt_length")
MODEL_SETTINGS = ("model", "sampler", "topology")
SHARED = (*MODEL_SETTINGS, "temperature", "guidance_scale")
"""Settings that the log-probabilities depend on."""


@dataclass
class Rollout:
    """Every decision of a request (`generate(rollout=True)`): `B` rows, `C` positions of the widest canvas. Rows start
    at position 0; on block-causal models they reach the end of the last block. Decisions after an answer's end are
    included. `paradec.replay` recomputes `logp` with gradients."""

    tokens: Tensor
    """[B, C] int64: prompts and decided tokens; elsewhere the mask id (causal models: any id)."""
    step_map: Tensor
    """[B, C] int64: the row's step that wrote the token, from 0; -1 in the prompt and after the row's end; -2 where
    undecided; -3 - t where a constraint forced the token before step t without a forward."""
    logp: Tensor
    """[B, C] float64: log softmax of the step's logits at the token, at temperature 1: after guidance, without
    suppressed ids, before filters and the sampler's changes to logits. NaN where undecided or without a forward."""
    logp_drawn: Tensor | None
    """[B, C] float64: as `logp`, but at the request's temperature; None at temperature 0."""
    length: Tensor
    """[B] int64: length of each row."""
    prompt_length: Tensor
    """[B] int64: position of each row's first mask or new token. Some models count blocks from this position."""
    suppressed: Tensor
    """[B, S] int64: suppressed ids of each row, including the mask id; rows with fewer ids end with -1."""
    settings: dict[str, Any]
    """The request's non-default fields as data, with `model`, `sampler` and `topology`."""
    version: int
    """`model.weights_version` when the decoding began."""
    approximation: str | None = None
    """Reason why `replay` differs from `logp`: an approximate cache, a suffix window, sparse attention or changed
    weights. None if the steps' logits equal those of whole rows."""
    writes: Tensor | None = None
    """[N, 4] int64: row, step, position and token of every write, in the order of each row's steps, for samplers that
    may mask a token again (a write of the mask id); else None."""
    writes_logp: Tensor | None = None
    """[N] float64: as `logp`; NaN where a token was moved or masked again."""
    writes_logp_drawn: Tensor | None = None
    """[N] float64: as `logp_drawn`."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def exact(self) -> bool:
        """Whether `paradec.replay` computes the same `logp`."""
        return self.approximation is None

    @property
    def decided(self) -> Tensor:
        """[B, C] bool: where a step decided a token."""
        return self.step_map >= 0

    def row(self, row: int) -> Rollout:
        """Copy one row, cut to its length."""
        width, index = int(self.length[row]), slice(row, row + 1)
        changes: dict[str, Any] = {name: value[index, :width].clone() for name, value in self._tensors(TENSORS)}
        changes |= {name: getattr(self, name)[index].clone() for name in (*ROW_FIELDS, "suppressed")}
        if self.writes is not None:
            is_of_row = self.writes[:, 0] == row
            changes |= {name: value[is_of_row] for name, value in self._tensors(WRITES)}
            changes["writes"][:, 0] = 0
        return replace(self, **changes)

    @classmethod
    def concatenate(cls, rollouts: Sequence[Rollout]) -> Rollout:
        """Concatenate rollouts, e.g. of `generate_many`, with the `settings` of the first one. Raises ValueError
        for an empty list, or if settings in `SHARED`, versions or approximations differ."""
        if not rollouts:
            raise ValueError("rollouts is empty; give at least one")
        first = rollouts[0]
        for other in rollouts[1:]:
            for name in (*SHARED, "version", "approximation"):
                pair = [part.settings.get(name) if name in SHARED else getattr(part, name) for part in (first, other)]
                if pair[0] != pair[1]:
                    raise ValueError(f"rollouts differ in {name}: {short_repr(pair[0])} and {short_repr(pair[1])}")
        fills = {**TENSORS, "suppressed": -1}
        changes: dict[str, Any] = {}
        for name, value in first._tensors((*fills, *ROW_FIELDS, *WRITES)):
            values = [getattr(part, name) for part in rollouts]
            if name in fills:
                width = max(value.shape[1] for value in values)
                values = [resize_axis(value, width, fills[name]) for value in values]
            changes[name] = torch.cat(values)
        if first.writes is not None:
            offsets = np.cumsum([0, *(len(part) for part in rollouts[:-1])])
            counts = [0 if part.writes is None else len(part.writes) for part in rollouts]
            changes["writes"][:, 0] += torch.as_tensor(offsets.repeat(counts), device=changes["writes"].device)
        return replace(first, **changes)

    def with_request(self, request: Any) -> Rollout:
        """Copy the rollout, with the settings of a `paradec.Request`."""
        return replace(self, settings=request_settings(request, self.settings))

    def to(self, device: Any) -> Rollout:
        """Copy the rollout to another device."""
        changes: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file for `load`."""
        from safetensors.torch import save_file

        data = {name: getattr(self, name) for name in ("settings", "version", "approximation")}
        tensors = {name: value.contiguous() for name, value in vars(self).items() if torch.is_tensor(value)}
        save_file(tensors, path, {"format": FORMAT, "fields": json.dumps(data)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rollout:
        """Read a file of `save`. Raises ValueError for another format, OSError for a missing file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"path={str(path)!r} holds no rollout of format {FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ValueError(f"path={str(path)!r} holds no rollout: {error}") from error
        return cls(**({"logp_drawn": None} | tensors), **json.loads(metadata["fields"]))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data: tensors become lists, NaN becomes None."""
        data = {name: value.tolist() if torch.is_tensor(value) else value for name, value in vars(self).items()}
        for name in ("logp", "logp_drawn"):
            if data[name] is not None:
                data[name] = [[None if entry != entry else entry for entry in row] for row in data[name]]
        for name in WRITES[1:]:
            if data[name] is not None:
                data[name] = [None if entry != entry else entry for entry in data[name]]
        return data

    def __repr__(self) -> str:
        approximation = "" if self.exact else f", with {self.approximation}"
        return f"Rollout({len(self)} rows, {int(self.decided.sum())} decisions, version {self.version}{approximation})"

    def _tensors(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        return [(name, value) for name in names if (value := getattr(self, name)) is not None]


def request_settings(request: Any, model_settings: dict[str, Any]) -> dict[str, Any]:
    """Add a request's non-default fields to the `MODEL_SETTINGS` of `model_settings`, as JSON data or as texts."""
    settings = {name: model_settings[name] for name in MODEL_SETTINGS}
    for name, value in request.changes().items():
        try:
            settings[name] = json.loads(json.dumps(to_data(value)))
        except (TypeError, ValueError):
            settings[name] = short_repr(value)
    return settings
