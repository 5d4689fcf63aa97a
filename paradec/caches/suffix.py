"""Suffix windows: of the masks after the open block only some are evaluated, and the others do not exist for now.

A masked model evaluates an answer's masks long before they are written, and they tell it little. Chen et al., "DPad:
Efficient Diffusion Language Models with Suffix Dropout", arXiv 2508.14148, keeps a random few of them for each block,
fewer the further away; the plain cut keeps the nearest. What a step costs no longer grows with what is left to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_choice, check_int, check_number, shown

DENSITIES = ("cut", "gaussian", "uniform")
SCALES = {"same": 2.0, "shifted": 1.6}
"""DPad's scales of the density, for LLaDA and for Dream."""
SUFFIX_STREAM = 6
"""Draws that choose which masks are kept; the block's first position is used in the place of the step."""


@dataclass(frozen=True, repr=False)
class Suffix:
    """Which masks after the open block a step evaluates. They are chosen when a block opens and stay while it is open;
    all keep their true position ids.

    What was given counts as context and is always evaluated, wherever it is: an infilling is without *masks* after
    the window, and has all of its text. Distances are counted in positions, given ones too. A row's masks depend on its
    seed, its prompt and where its block begins, not on its neighbours.

    "cut" is the default; the thinning is what the paper does, and answered alike where both were measured
    (docs/caches.md). DPad's early termination is `eos_early_stop`, which is on by default and ends a row as soon as all
    before its end token is decided, where DPad waits for the block.

    Args:
        window: positions after the block in which masks are kept, at least 0 ("cut") or 1. DPad's is 256.
        density: "cut" keeps all masks of the window. "gaussian" keeps the one at distance d with probability
            scale * N(z), the standard normal density, z from 0 to `k_sigma` in even steps over the window. "uniform"
            keeps `count` of them at random.
        scale: of "gaussian"; None is DPad's, 2.0 for models that predict in place (LLaDA) and 1.6 for shifted ones
            (Dream).
        count: masks that "uniform" keeps, at most; from 0 to `window`.
        k_sigma: of "gaussian": where the window ends, in standard deviations.

    Raises:
        ValueError: a setting out of its range, or one that the density does not have.
    """

    window: int = 64
    density: str = "cut"
    scale: float | None = None
    count: int | None = None
    k_sigma: float = 4.0

    def __post_init__(self) -> None:
        check_choice("density", self.density, DENSITIES)
        check_int("window", self.window, low=0 if self.density == "cut" else 1)
        check_number("scale", self.scale, low=0, high=1e6, none=True, open_low=True)
        check_number("k_sigma", self.k_sigma, low=0, high=1e3)
        check_int("count", self.count, low=0, high=self.window, none=self.density != "uniform")
        for name, value, default, owner in (
            ("scale", self.scale, None, "gaussian"),
            ("k_sigma", self.k_sigma, 4.0, "gaussian"),
            ("count", self.count, None, "uniform"),
        ):
            if value != default and self.density != owner:
                raise ValueError(f"{name}={shown(value)} is a setting of density={owner!r}, not of {self.density!r}")

    def __repr__(self) -> str:
        return f"Suffix({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    # ---- as data --------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, and the window."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"window": self.window} | changed

    @classmethod
    def of(cls, value: Any) -> Suffix | None:
        """A suffix from what a request may have in its place: a window (64), a text ("64", "gaussian:64",
        "uniform:64:16" with the count), or the mapping that `to_dict` makes.

        Raises:
            ValueError: anything else, or settings out of their range.
        """
        if value is None or isinstance(value, cls):
            return value
        try:
            return cls(**cls._settings(value))
        except ValueError as error:
            raise ValueError(f"suffix={shown(value)}: {error}") from None

    @classmethod
    def _settings(cls, value: Any) -> Mapping[str, Any]:
        """The settings that a short form means."""
        if isinstance(value, Mapping):
            known = [f.name for f in fields(cls)]
            if not set(value) <= set(known):
                raise ValueError(f"it has no other settings than {', '.join(known)}")
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return {"window": value}
        if not isinstance(value, str):
            raise ValueError("it must be paradec.Suffix(...), a window, or a text as 'gaussian:64'")
        density, *numbers = value.split(":") if value[:1].isalpha() else ["cut", value]
        try:
            window, *count = map(int, numbers)
        except ValueError:
            window, count = 0, [0, 0]
        if density not in DENSITIES or len(count) != (density == "uniform"):
            raise ValueError("it must be as '64', 'gaussian:64' or 'uniform:64:16' (16 of 64)")
        return {"window": window, "density": density, "count": count[0] if count else None}

    # ---- what it works with ---------------------------------------------------------------------------------------

    def refusal(self, sampler: Any, model: Any, cache: Any, gaps: bool) -> str | None:
        """Why a request cannot have it, as a clause; None where it can.

        Args:
            gaps: whether something given comes after a mask, so that a row can have gaps whatever the density.
        """
        facts = model.facts
        if facts.topology != "bidirectional":
            return f"{facts.name} is {facts.topology.replace('_', '-')}, and sees nothing after its block anyway"
        if getattr(model, "makes", "text") != "text":
            return f"{facts.name} makes pictures or codes, all of whose positions are near each other"
        if not cache.facts.suffixes:
            return f"cache={cache.name!r} counts on all of a row; use 'none', 'prefix', 'dual', 'vicinity' or 'd2'"
        if sampler.needs.mask_probes:
            return f"sampler {sampler.name!r} evaluates masks of its own beside the row"
        if (self.density != "cut" or gaps) and not model.supports_store:
            return f"it leaves gaps, and {facts.name} takes no position ids; use density='cut' and no holes"
        return None

    # ---- which masks ----------------------------------------------------------------------------------------------

    def probabilities(self, prediction: str, size: int) -> np.ndarray:
        """[size] float64: how likely "gaussian" keeps the mask at each of the first `size` distances of the window, for
        a model of this prediction."""
        scale = SCALES[prediction] if self.scale is None else self.scale
        z = np.arange(size) * (self.k_sigma / max(self.window - 1, 1))
        return scale * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)

    def kept(
        self,
        masks: np.ndarray,
        start: np.ndarray,
        end: np.ndarray,
        keys: Tensor,
        generator: torch.Generator | None,
        prediction: str,
    ) -> np.ndarray:
        """Which masks after the block that opens are kept: [N, L] bool.

        Args:
            masks: [N, L] bool: where rows have masks.
            start, end: [N] int64: the block.
            keys: [N, 2] int64: the rows' random keys.
            generator: where `rng="reference"` draws, of one row, as the public code does; it moves on.
            prediction: of the model, "same" or "shifted".
        """
        distance = np.arange(masks.shape[1]) - end[:, None]
        near = masks & (distance >= 0) & (distance < self.window)
        if self.density == "cut" or not near.any():
            return near
        size = min(self.window, masks.shape[1])
        if generator is None:
            at = torch.as_tensor(end[:, None] + np.arange(size), device=keys.device)
            step = torch.as_tensor(start, device=keys.device)
            numbers = rng.uniform(keys, step, at, 1, SUFFIX_STREAM).squeeze(-1).cpu().numpy()
        else:
            numbers = self._drawn_as_published(int(masks[0].nonzero()[0][-1]) + 1 - int(end[0]), size, generator)
        column = distance.clip(0, size - 1)
        numbers = np.take_along_axis(numbers, column, 1)
        if self.density == "gaussian":
            return near & (numbers < self.probabilities(prediction, size)[column])
        lowest = np.argsort(np.where(near, numbers, 2.0), axis=1, kind="stable")[:, : self.count]
        chosen = np.zeros_like(near)
        np.put_along_axis(chosen, lowest, True, axis=1)
        return near & chosen

    def _drawn_as_published(self, later: int, size: int, generator: torch.Generator) -> np.ndarray:
        """[1, size] numbers from DPad's draws for `later` positions: one for each, or an order of the window's."""
        numbers = np.ones((1, size))
        if self.density == "gaussian":
            drawn = torch.rand(later, generator=generator, device=generator.device).cpu().numpy()
            numbers[0, : min(later, size)] = drawn[:size]
        else:
            order = torch.randperm(min(later, size), generator=generator, device=generator.device).cpu().numpy()
            numbers[0, order] = np.arange(len(order)) / max(len(order), 1)
        return numbers
