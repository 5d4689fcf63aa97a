"""Suffix windows: only some masks after the open block are evaluated; no position attends to the other masks. This
saves work on masks whose tokens are decided much later. DPad (Chen et al., "Diffusion Language Models with Suffix
Dropout", arXiv 2508.14148) keeps random masks, fewer at larger distance; density "cut" keeps the nearest masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_choice, check_int, check_number, short_repr

DENSITIES = ("cut", "gaussian", "uniform")
SCALES = {"same": 2.0, "shifted": 1.6}
"""DPad's density scale by prediction: LLaDA's and Dream's."""
SUFFIX_STREAM = 6
"""Stream of the draws that choose masks (`paradec.core.rng`). Its random numbers are keyed by the block's first
position instead of the step."""


@dataclass(frozen=True, repr=False)
class Suffix:
    """Masks after the open block to evaluate. They are chosen when a block opens, and keep their position ids.

    Tokens of the prompt are always evaluated, and distances include them. A row's masks depend only on its seed, its
    prompt and the block's position. The default is "cut": the random choice of DPad gave equal answers in measurements
    (docs/caches.md). DPad's early termination is `eos_early_stop`, which does not wait for the block's end.

    Args:
        window: number of positions after the block, at least 0 ("cut") or 1; DPad's is 256.
        density: "cut" keeps all masks of the window. "gaussian" keeps a mask with probability scale * N(z), where N is
            the standard normal density and z rises in even steps from 0 to `k_sigma` over the window. "uniform" keeps
            `count` random masks.
        scale: for "gaussian"; None is DPad's: 2.0 (LLaDA), or 1.6 for shifted models (Dream).
        count: for "uniform", from 0 to `window`.
        k_sigma: for "gaussian": end of the window in standard deviations.

    Raises ValueError for a setting out of its range or of another density.
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
                raise ValueError(
                    f"{name}={short_repr(value)} is a setting of density={owner!r}, not of {self.density!r}"
                )

    def __repr__(self) -> str:
        return f"Suffix({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    # ---- conversion to and from data ------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The window, and the settings that differ from their defaults."""
        changes = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"window": self.window} | changes

    @classmethod
    def from_value(cls, value: Any) -> Suffix | None:
        """Make a suffix from a window (64), a text ("64", "gaussian:64", "uniform:64:16" with the count), or `to_dict`
        data. Raises ValueError for anything else."""
        if value is None or isinstance(value, cls):
            return value
        try:
            return cls(**cls._settings(value))
        except ValueError as error:
            raise ValueError(f"suffix={short_repr(value)}: {error}") from None

    @classmethod
    def _settings(cls, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            names = [f.name for f in fields(cls)]
            if not set(value) <= set(names):
                raise ValueError(f"the settings of a suffix are {', '.join(names)}")
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return {"window": value}
        if not isinstance(value, str):
            raise ValueError("it must be paradec.Suffix(...), a window, or a text such as 'gaussian:64'")
        density, *numbers = value.split(":") if value[:1].isalpha() else ["cut", value]
        try:
            window, *count = map(int, numbers)
        except ValueError:
            window, count = 0, [0, 0]
        if density not in DENSITIES or len(count) != (density == "uniform"):
            raise ValueError("a text must have the form '64', 'gaussian:64' or 'uniform:64:16' (16 of 64)")
        return {"window": window, "density": density, "count": count[0] if count else None}

    # ---- compatibility --------------------------------------------------------------------------------------------

    def why_unsupported(self, sampler: Any, model: Any, cache: Any, has_holes: bool) -> str | None:
        """Return why this sampler, model and cache cannot use a suffix window, as a clause; None if they can.

        has_holes: whether the prompt has masks before some of its tokens (infilling). These tokens are always
        evaluated, so that even density "cut" leaves gaps.
        """
        facts = model.facts
        if facts.topology != "bidirectional":
            return f"{facts.name} is {facts.topology.replace('_', '-')}, and sees nothing after its block anyway"
        if getattr(model, "makes", "text") != "text":
            return f"{facts.name} makes pictures or codes, all of whose positions are near each other"
        if not cache.facts.supports_suffix:
            return f"cache={cache.name!r} needs whole rows; use 'none', 'prefix', 'dual', 'vicinity' or 'd2'"
        if sampler.needs.mask_probes:
            return f"sampler {sampler.name!r} evaluates additional masks next to the row"
        if (self.density != "cut" or has_holes) and not model.supports_store:
            return f"the window has gaps, and {facts.name} takes no position ids; use density='cut', without infilling"
        return None

    # ---- choice of masks ------------------------------------------------------------------------------------------

    def probabilities(self, prediction: str, size: int) -> np.ndarray:
        """Compute the probability that density "gaussian" keeps the mask at each distance: [size] float64."""
        scale = SCALES[prediction] if self.scale is None else self.scale
        z = np.arange(size) * (self.k_sigma / max(self.window - 1, 1))
        return scale * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)

    def choose_masks(
        self,
        masks: np.ndarray,
        start: np.ndarray,
        end: np.ndarray,
        keys: Tensor,
        generator: torch.Generator | None,
        prediction: str,
    ) -> np.ndarray:
        """Choose the masks to evaluate after an opening block: [N, L] bool.

        Args:
            masks: [N, L] bool, all undecided positions. start, end: [N] int64, the block. keys: [N, 2] int64, row keys.
            generator: for `rng="reference"` with one row; it draws as the public code does.
            prediction: the model's, "same" or "shifted".
        """
        distance = np.arange(masks.shape[1]) - end[:, None]
        is_near = masks & (distance >= 0) & (distance < self.window)
        if self.density == "cut" or not is_near.any():
            return is_near
        size = min(self.window, masks.shape[1])
        if generator is None:
            positions = torch.as_tensor(end[:, None] + np.arange(size), device=keys.device)
            step = torch.as_tensor(start, device=keys.device)
            numbers = rng.uniform(keys, step, positions, 1, SUFFIX_STREAM).squeeze(-1).cpu().numpy()
        else:
            numbers = self._draw_as_published(int(masks[0].nonzero()[0][-1]) + 1 - int(end[0]), size, generator)
        column = distance.clip(0, size - 1)
        numbers = np.take_along_axis(numbers, column, 1)
        if self.density == "gaussian":
            return is_near & (numbers < self.probabilities(prediction, size)[column])
        lowest = np.argsort(np.where(is_near, numbers, 2.0), axis=1, kind="stable")[:, : self.count]
        is_lowest = np.zeros_like(is_near)
        np.put_along_axis(is_lowest, lowest, True, axis=1)
        return is_near & is_lowest

    def _draw_as_published(self, suffix_length: int, size: int, generator: torch.Generator) -> np.ndarray:
        """Draw numbers [1, size] float64 as DPad does: uniform for "gaussian", else a permutation of the window."""
        numbers = np.ones((1, size))
        if self.density == "gaussian":
            draws = torch.rand(suffix_length, generator=generator, device=generator.device).cpu().numpy()
            numbers[0, : min(suffix_length, size)] = draws[:size]
        else:
            order = torch.randperm(min(suffix_length, size), generator=generator, device=generator.device).cpu().numpy()
            numbers[0, order] = np.arange(len(order)) / max(len(order), 1)
        return numbers
