"""Bases: forecasts of a feature from earlier evaluations of it.

Steps are solver steps, not timesteps or noise levels. All bases except `dmd` are elementwise over the feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import factorial, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from paradec.core.checks import check_choice, short_repr
from paradec.core.component_text import parse_component
from paradec.samplers.forecast.refresh import Checked, integer, number

DTYPES = ("bfloat16", "float16", "float32", "float64")
RIDGE = 1e-8  # added to singular values before division, as in HiCache's public code


class History(NamedTuple):
    """Earlier evaluations of one feature [B, ...]."""

    tensors: tuple[Tensor, ...]  # differences (order 0 first) or features (newest first), as the basis needs
    nodes: tuple[int, ...]  # steps of these evaluations, newest first
    dtype: torch.dtype  # dtype of the feature and of forecasts

    def count_bytes(self, slots: int = 0) -> int:
        return self.tensors[0].nbytes * (slots or len(self.tensors))  # slots: number of tensors; 0: as many as now


@dataclass(frozen=True)
class Basis(Checked):
    """Base of the bases.

    order: O, the highest order of differences; 0 uses the last feature alone.
    dtype: dtype of the history, such as "bfloat16"; None: that of the feature. Sums use the wider of the two.
    last_warmup_step: last step that computes no differences; the sampler sets it (`Rule.last_warmup_step`)."""

    order: int = integer(1, low=0)
    dtype: torch.dtype | None = None
    last_warmup_step: int = -1

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None:
            dtype_name = str(self.dtype).removeprefix("torch.")
            check_choice("dtype", dtype_name, DTYPES)
            object.__setattr__(self, "dtype", getattr(torch, dtype_name))

    @classmethod
    def setting_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "last_warmup_step"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `basis_from` is the inverse."""
        settings = {key: getattr(self, key) for key in self.setting_names()}
        return {"how": self.name} | settings | {"dtype": self.dtype and str(self.dtype).removeprefix("torch.")}

    @property
    def slots(self) -> int:
        """Largest number of tensors in a history."""
        return self.order + 1

    def update(self, history: History | None, feature: Tensor, step: int) -> History:
        """Return the history after an evaluation at `step`; a feature of another shape starts a new history."""
        if history is not None and history.tensors[0].shape != feature.shape:
            history = None
        tensors, nodes = self.extend(history, feature, step)
        return History(tuple(tensor.to(self.dtype or feature.dtype) for tensor in tensors), nodes, feature.dtype)

    def extend(self, history: History | None, feature: Tensor, step: int) -> tuple[list[Tensor], tuple[int, ...]]:
        """Return tensors and nodes of the history after an evaluation; by default the last features."""
        tensors, nodes = (history.tensors, history.nodes) if history is not None else ((), ())
        return [feature, *tensors][: self.slots], (step, *nodes)[: self.slots]

    def forecast(self, history: History, step: float) -> Tensor:
        """Forecast the feature [B, ...] at a later step (for `DiCache` a fractional one), in the feature's dtype."""
        tensors, dtype = history.tensors, history.dtype
        if tensors[0].dtype == dtype:
            return self.expand(tensors, history.nodes, step)
        sum_dtype = torch.promote_types(tensors[0].dtype, dtype)
        return self.expand(tuple(tensor.to(sum_dtype) for tensor in tensors), history.nodes, step).to(dtype)

    def expand(self, tensors: tuple[Tensor, ...], nodes: tuple[int, ...], step: float) -> Tensor:
        """Forecast from a history's tensors; by default their sum weighted by `weights`."""
        total = tensors[0]
        weights = self.weights(nodes, step, len(tensors))
        if weights[0] != 1:
            total = total * weights[0]
        for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
            # not fused: product and sum are rounded separately; the sum reuses the product's memory
            total = total + tensor if weight == 1 else (tensor * weight).add_(total)
        return total

    def weights(self, nodes: tuple[int, ...], step: float, count: int) -> list[float]:
        """Weights of the `count` tensors of a history."""
        raise NotImplementedError

    def roll(self, history: History, forecast: Tensor) -> History:
        """Return the history after a forecast; by default unchanged."""
        return history


@dataclass(frozen=True)
class Taylor(Basis):
    """Taylor expansion from backward differences: sum_i D_i k^i / i!, k steps after the evaluation (TaylorSeer).

    As in the public code, differences of every order are divided by the gap between the last two evaluations. Forecasts
    are exact for linear, not for quadratic features (use `Newton`). Each evaluation adds an order, up to `order`.
    """

    name = "taylor"

    def extend(self, history: History | None, feature: Tensor, step: int) -> tuple[list[Tensor], tuple[int, ...]]:
        differences = [feature]
        if history is not None and step > self.last_warmup_step:
            for previous in history.tensors[: self.order]:
                differences.append((differences[-1] - previous).div_(step - history.nodes[0]))
        return differences, (step,)

    def weights(self, nodes: tuple[int, ...], step: float, count: int) -> list[float]:
        return [(step - nodes[0]) ** i / factorial(i) for i in range(count)]


@dataclass(frozen=True)
class Hermite(Taylor):
    """`Taylor` with k^i replaced by sigma^i H_i(sigma k), where H_i are physicists' Hermite polynomials (HiCache)."""

    sigma: float = number(0.5, low=0, open_low=True)

    name = "hermite"

    def weights(self, nodes: tuple[int, ...], step: float, count: int) -> list[float]:
        x = self.sigma * (step - nodes[0])
        values = [1.0, 2 * x]
        for i in range(2, count):
            values.append(2 * x * values[-1] - 2 * (i - 1) * values[-2])
        return [self.sigma**i * values[i] / factorial(i) for i in range(count)]


@dataclass(frozen=True)
class Reuse(Basis):
    """Reuse of the last evaluated feature."""

    name = "reuse"
    slots = 1

    def weights(self, nodes: tuple[int, ...], step: float, count: int) -> list[float]:
        return [1.0]


@dataclass(frozen=True)
class Newton(Basis):
    """Polynomial through the last `order + 1` evaluations, evenly spaced or not: exact up to degree `order`."""

    name = "newton"

    def weights(self, nodes: tuple[int, ...], step: float, count: int) -> list[float]:
        return [prod((step - n) / (node - n) for n in nodes if n != node) for node in nodes]


@dataclass(frozen=True)
class FoCa(Basis):
    """Corrected forecast (cache-dit's form), from the last two evaluations and from the features of the last two steps,
    evaluated or forecast. Tensors: the last two evaluations, then the last two steps' features, newest first."""

    name = "foca"
    slots = 4

    def extend(self, history: History | None, feature: Tensor, step: int) -> tuple[list[Tensor], tuple[int, ...]]:
        if history is None:
            return [feature], (step,)
        evaluated, last = history.tensors[0], history.tensors[min(2, len(history.tensors) - 1)]
        return [feature, evaluated, feature, last], (step,)

    def expand(self, tensors: tuple[Tensor, ...], nodes: tuple[int, ...], step: float) -> Tensor:
        if len(tensors) == 1:
            return tensors[0]
        evaluated, evaluated_before, last, last_before = tensors
        slope, distance = (evaluated - evaluated_before) + (last - last_before), step - nodes[0]
        if distance <= 3:
            return evaluated + distance / 2 * slope
        weight = 3 / distance
        return weight * (evaluated + 1.5 * slope) + (1 - weight) * evaluated

    def roll(self, history: History, forecast: Tensor) -> History:
        if len(history.tensors) == 1:
            return history
        evaluated, evaluated_before, last, _ = history.tensors
        return history._replace(tensors=(evaluated, evaluated_before, forecast.to(evaluated.dtype), last))


@dataclass(frozen=True)
class DMD(Basis):
    """Dynamic mode decomposition of the last evenly spaced evaluations (at most `window`); `Hermite` if fewer than 4.

    As in HiCache's public code (hicache-pp), in float64. Singular values below 1e-4 of the largest are dropped. Costs
    an SVD per row and feature, so it is meant for whole outputs.
    """

    window: int = integer(6, low=4)
    sigma: float = number(0.5, low=0, open_low=True)

    name = "dmd"

    @property
    def slots(self) -> int:
        return max(self.window, self.order + 1)

    def expand(self, tensors: tuple[Tensor, ...], nodes: tuple[int, ...], step: float) -> Tensor:
        spacing = nodes[0] - nodes[1] if len(nodes) > 1 else 0
        count = 1  # evenly spaced evaluations
        while count < min(len(nodes), self.window) and nodes[count - 1] - nodes[count] == spacing:
            count += 1
        if count < 4:
            hermite, history = Hermite(self.order, sigma=self.sigma), None
            for tensor, node in zip(tensors[::-1], nodes[::-1], strict=True):
                history = hermite.update(history, tensor, node)
            assert history is not None
            return hermite.forecast(history, step)
        rows = torch.stack(tensors[:count][::-1], 1).flatten(2).transpose(1, 2).double()  # [B, features, snapshots]
        distance = (step - nodes[0]) / spacing
        return torch.stack([mode_forecast(row, distance) for row in rows]).view_as(tensors[0]).to(tensors[0].dtype)


def mode_forecast(snapshots: Tensor, distance: float) -> Tensor:
    """Forecast from evenly spaced snapshots [features, n] float64, oldest first, `distance` spacings after the last."""
    x, y = snapshots[:, :-1], snapshots[:, 1:]
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    rank = max(int((s > 1e-4 * s[0]).sum()), 1)
    u, s, v = u[:, :rank], s[:rank] + RIDGE, vh[:rank].mH
    values, vectors = torch.linalg.eig((u.mH @ y @ v / s).cpu())
    values, vectors = values.to(x.device), vectors.to(x.device)
    modes = (y @ v / s).to(vectors.dtype) @ vectors
    amplitudes = torch.linalg.pinv(modes) @ snapshots[:, -1].to(modes.dtype)
    return (modes @ (values**distance * amplitudes)).real


BASES: Mapping[str, type[Basis]] = {basis.name: basis for basis in (Taylor, Newton, Hermite, Reuse, FoCa, DMD)}


def basis_from(value: Any) -> Basis | None:
    """Make a basis from its name, e.g. "hermite(sigma=0.7)", or `to_dict`. Raises ValueError for anything else."""
    if value is None or isinstance(value, Basis):
        return value
    if isinstance(value, str):
        name, settings = parse_component("how", value) if "(" in value else (value, {})
    else:
        settings = dict(value) if isinstance(value, Mapping) else {}
        name = settings.pop("how", value)
    if not isinstance(name, str) or name not in BASES:
        raise ValueError(f"how={short_repr(value)} must be one of {', '.join(BASES)}, as a name or with its settings")
    for key in settings:
        check_choice(f"setting of how={name!r}", key, BASES[name].setting_names())
    return BASES[name](**settings)
