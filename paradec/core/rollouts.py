"""What a trainer needs of a decoding: every decision, its step, and its log-probability (`generate(rollout=True)`)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.core.rows import fitted

FORMAT = "paradec-rollout/1"
GIVEN, NEVER = -1, -2
"""The steps of what was given, and of what was never decided."""
TENSORS = {"tokens": 0, "step_map": GIVEN, "logp": float("nan"), "logp_drawn": float("nan")}
"""Those with a column for every position, and what is after a row's end."""


@dataclass
class Rollout:
    """Every decision of a request. `B` rows, `C` positions of the widest canvas; a row's canvas begins at position 0
    (prompts are not moved to the right as in `Output.sequences`), and of block-causal models it reaches to the end of
    the last block. What was decided after an answer's end is kept.

    `paradec.replay` computes `logp` anew, with gradients.
    """

    tokens: Tensor
    """[B, C] int64: prompts, and what was decided; the mask id where nothing was."""
    step_map: Tensor
    """[B, C] int64: the row's step that wrote the token, from 0; -1 where it was given (and after a row's end), -2
    where nothing was decided."""
    logp: Tensor
    """[B, C] float64: log softmax of the step's logits at the token: after guidance, without the mask and the tokens
    that are never proposed, at temperature 1 and before filters and the method's own stage. NaN where nothing was
    decided."""
    logp_drawn: Tensor | None
    """[B, C] float64: the same at the temperature of the request, before filters; None at temperature 0."""
    length: Tensor
    """[B] int64: positions of each row."""
    prompt_length: Tensor
    """[B] int64: the position of each row's first mask, where blocks begin on models that count them from there."""
    suppressed: Tensor
    """[B, S] int64: ids that were never proposed, the mask id among them."""
    settings: dict[str, Any]
    """The request, as `Request.to_dict` has it, with `model`, its name."""
    version: int
    """Of the weights: `model.weights_version` at the end of the decoding."""
    exact: bool
    """Whether every step's logits are those of whole rows. With an approximate cache, a suffix window or sparse
    attention they are those of another policy, and `replay` differs from `logp`."""

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, row: int) -> Rollout:
        """One row alone, as wide as it is."""
        width, at = int(self.length[row]), slice(row, row + 1)
        found: dict[str, Any] = {name: value[at, :width].clone() for name, value in self._columns()}
        found |= {name: getattr(self, name)[at].clone() for name in ("length", "prompt_length", "suppressed")}
        return replace(self, **found)

    @classmethod
    def joined(cls, rollouts: Sequence[Rollout]) -> Rollout:
        """Several of one model and request (of `generate_many`, say) as one; their seeds are those of the first.

        Raises:
            ValueError: none, or such as differ in their settings, weights or exactness.
        """
        if not rollouts:
            raise ValueError("rollouts is empty; give at least one")
        first = rollouts[0]
        for other in rollouts[1:]:
            for name in ("version", "exact", "settings"):
                own, theirs = (
                    {key: entry for key, entry in value.items() if key != "seed"} if name == "settings" else value
                    for value in (getattr(first, name), getattr(other, name))
                )
                if own != theirs:
                    raise ValueError(f"rollouts differ in {name}: {shown(own)} and {shown(theirs)}")
        width = max(each.tokens.shape[1] for each in rollouts)
        count = max(each.suppressed.shape[1] for each in rollouts)
        found: dict[str, Any] = {
            name: torch.cat([fitted(getattr(each, name), width, TENSORS[name]) for each in rollouts])
            for name, _ in first._columns()
        }
        # the mask is among them, as any may be twice
        suppressed = [torch.cat([each.suppressed] + [each.suppressed[:, :1]] * count, 1)[:, :count] for each in rollouts]
        for name in ("length", "prompt_length"):
            found[name] = torch.cat([getattr(each, name) for each in rollouts])
        return replace(first, **found, suppressed=torch.cat(suppressed))

    def to(self, device: Any) -> Rollout:
        """The same on another device."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as safetensors, for `load`."""
        from safetensors.torch import save_file

        told = {"settings": self.settings, "version": self.version, "exact": self.exact}
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
        return found

    def __repr__(self) -> str:
        decided = int((self.step_map >= 0).sum())
        return f"Rollout({len(self)} rows, {decided} decisions, weights {self.version}{'' if self.exact else ', not exact'})"

    def _columns(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name in TENSORS if (value := getattr(self, name)) is not None]
