"""What a trainer needs of a decoding: every decision, its step, and its log-probability (`generate(rollout=True)`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.core.facts import ModelFacts
from paradec.core.registry import to_data
from paradec.core.rows import resize_axis

FORMAT = "paradec-rollout/1"
GIVEN, NEVER, FORCED = -1, -2, -3
"""The steps of what was given, of what was never decided, and of what was written before step 0 without a forward;
`FORCED - t` before step t."""
TENSORS = {"tokens": 0, "step_map": GIVEN, "logp": float("nan"), "logp_drawn": float("nan")}
"""Those with a column for every position, and what is after a row's end."""
WRITES = ("writes", "writes_logp", "writes_logp_drawn")
ROW_FIELDS = ("length", "prompt_length")
MODEL_SETTINGS = ("model", "sampler", "topology")
SHARED = (*MODEL_SETTINGS, "temperature", "guidance_scale")
"""Settings that the log-probabilities depend on."""


@dataclass
class Rollout:
    """Every decision of a request. `B` rows, `C` positions of the widest canvas; a row's canvas begins at position 0
    (prompts are not moved to the right as in `Output.sequences`), and of block-causal models it reaches to the end of
    the last block. What was decided after an answer's end is kept.

    `paradec.replay` computes `logp` anew, with gradients.
    """

    tokens: Tensor
    """[B, C] int64: prompts, and what was decided; the mask id (of causal models any) where nothing was."""
    step_map: Tensor
    """[B, C] int64: the row's step that wrote the token, from 0; -1 where it was given (and after a row's end), -2
    where nothing was decided, -3 - t where it was written before step t without a forward, as the only token that fits
    a constraint."""
    logp: Tensor
    """[B, C] float64: log softmax of the step's logits at the token: after guidance, without the mask and the tokens
    that are never proposed, at temperature 1 and before filters and the method's own stage. NaN where nothing was
    decided, or without a forward."""
    logp_drawn: Tensor | None
    """[B, C] float64: the same at the temperature of the request, before filters; None at temperature 0."""
    length: Tensor
    """[B] int64: positions of each row."""
    prompt_length: Tensor
    """[B] int64: the position of each row's first mask or first new token, where blocks begin on models that count
    them from there."""
    suppressed: Tensor
    """[B, S] int64: ids that were never proposed, the mask id of models that have one among them; -1 is none."""
    settings: dict[str, Any]
    """What of the request differs from the defaults, as data, with the names of `model` and `sampler`, and the model's
    `topology`."""
    version: int
    """Of the weights: `model.weights_version` when the decoding began."""
    approximation: str | None = None
    """What made the steps' logits others than those of whole rows: an approximate cache, a suffix window, sparse
    attention, weights that changed on the way. They are those of another policy, and `replay` differs from `logp`.
    None where nothing did."""
    writes: Tensor | None = None
    """[N, 4] int64, of samplers that take back what they have written, in the order of each row's steps: row, step,
    position, and the token written there (the mask id takes back). None of other samplers."""
    writes_logp: Tensor | None = None
    """[N] float64: as `logp`; NaN where a token was moved or taken back."""
    writes_logp_drawn: Tensor | None = None
    """[N] float64: as `logp_drawn`."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def exact(self) -> bool:
        """Whether every step's logits are those of whole rows, so that `replay` gives `logp`."""
        return self.approximation is None

    @property
    def decided(self) -> Tensor:
        """[B, C] bool: where a step decided something."""
        return self.step_map >= 0

    def row(self, row: int) -> Rollout:
        """One row alone, as wide as it is."""
        width, at = int(self.length[row]), slice(row, row + 1)
        found: dict[str, Any] = {name: value[at, :width].clone() for name, value in self._present(TENSORS)}
        found |= {name: getattr(self, name)[at].clone() for name in (*ROW_FIELDS, "suppressed")}
        if self.writes is not None:
            own = self.writes[:, 0] == row
            found |= {name: value[own] for name, value in self._present(WRITES)}
            found["writes"][:, 0] = 0
        return replace(self, **found)

    @classmethod
    def concatenate(cls, rollouts: Sequence[Rollout]) -> Rollout:
        """Several as one, those of `generate_many`, say; settings of single prompts (seeds) are those of the first.

        Raises:
            ValueError: none, or such as differ in model, sampler, temperature, guidance, version or approximation.
        """
        if not rollouts:
            raise ValueError("rollouts is empty; give at least one")
        first = rollouts[0]
        for other in rollouts[1:]:
            for name in (*SHARED, "version", "approximation"):
                own, theirs = (
                    each.settings.get(name) if name in SHARED else getattr(each, name) for each in (first, other)
                )
                if own != theirs:
                    raise ValueError(f"rollouts differ in {name}: {shown(own)} and {shown(theirs)}")
        width = max(each.tokens.shape[1] for each in rollouts)
        count = max(each.suppressed.shape[1] for each in rollouts)
        found: dict[str, Any] = {
            name: torch.cat([resize_axis(getattr(each, name), width, TENSORS[name]) for each in rollouts])
            for name, _ in first._present(TENSORS)
        }
        suppressed = [resize_axis(each.suppressed, count, -1) for each in rollouts]
        for name in ROW_FIELDS:
            found[name] = torch.cat([getattr(each, name) for each in rollouts])
        if first.writes is not None:
            found |= {name: torch.cat([getattr(each, name) for each in rollouts]) for name, _ in first._present(WRITES)}
            rows = [len(each) for each in rollouts]
            counts = torch.tensor([len(each.writes) for each in rollouts if each.writes is not None])
            before = torch.tensor([sum(rows[:at]) for at in range(len(rows))])
            found["writes"][:, 0] += before.repeat_interleave(counts).to(found["writes"].device)
        return replace(first, **found, suppressed=torch.cat(suppressed))

    @staticmethod
    def model_settings(facts: ModelFacts, sampler: Any) -> dict[str, Any]:
        """What `settings` say of a model and a sampler."""
        return {"model": facts.name, "sampler": sampler.name, "topology": facts.topology}

    def with_request(self, request: Any) -> Rollout:
        """The same with the settings of a row's own `paradec.Request`."""
        return replace(self, settings=request_settings(request, self.settings))

    def to(self, device: Any) -> Rollout:
        """The same on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **moved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as safetensors, for `load`."""
        from safetensors.torch import save_file

        told = {name: getattr(self, name) for name in ("settings", "version", "approximation")}
        tensors = {name: value.contiguous() for name, value in vars(self).items() if torch.is_tensor(value)}
        save_file(tensors, path, {"format": FORMAT, "told": json.dumps(told)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rollout:
        """Read what `save` wrote.

        Raises:
            ValueError: a file of something else. OSError: no such file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                told = file.metadata() or {}
                if told.get("format") != FORMAT:
                    raise ValueError(f"path={str(path)!r} holds no rollout of format {FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ValueError(f"path={str(path)!r} holds no rollout: {error}") from error
        return cls(**({"logp_drawn": None} | tensors), **json.loads(told["told"]))

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold: tensors as lists, None where nothing was decided."""
        found = {name: value.tolist() if torch.is_tensor(value) else value for name, value in vars(self).items()}
        for name in ("logp", "logp_drawn"):
            if found[name] is not None:
                found[name] = [[None if entry != entry else entry for entry in row] for row in found[name]]
        for name in WRITES[1:]:
            if found[name] is not None:
                found[name] = [None if entry != entry else entry for entry in found[name]]
        return found

    def __repr__(self) -> str:
        other = "" if self.exact else f", with {self.approximation}"
        return f"Rollout({len(self)} rows, {int(self.decided.sum())} decisions, version {self.version}{other})"

    def _present(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        return [(name, value) for name in names if (value := getattr(self, name)) is not None]


def request_settings(request: Any, named: dict[str, Any]) -> dict[str, Any]:
    """A rollout's settings: what of a `paradec.Request` differs from the defaults as data (what no file can hold
    as text), beside the model's and sampler's names, which are in `named`."""
    found = {name: named[name] for name in MODEL_SETTINGS}
    for name, value in request.changes().items():
        try:
            found[name] = json.loads(json.dumps(to_data(value)))
        except (TypeError, ValueError):
            found[name] = shown(value)
    return found
