"""Distilled Decoding (Liu et al., arXiv 2412.17153): query, answer and adapter of a student.

A student maps one noise vector per token to its teacher's picture, in one or a few calls. Its network is a variant of
the teacher's (`distilled_llamagen`, `distilled_var`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from paradec.core.checks import check_int
from paradec.models.base import Adapter
from paradec.models.images.base import PictureModel, Snapshot, merge_defaults, widen
from paradec.models.images.grid import Grid


@dataclass(frozen=True)
class Stages:
    """The stages that a student was trained for. Raises ValueError for a stage out of range."""

    data_counts: tuple[int, ...]
    """[T + 1]: K(t), the number of data tokens at stage t; K(0) = 0. A call replaces the noise tokens after them."""
    second: int
    """Stage at which the second of two calls begins."""
    split: int
    """After every call the first K(split) tokens become codes; later tokens remain vectors of the continuous head."""
    scales: bool = False
    """Whether a stage is a scale of VAR; otherwise it is a cell of the raster."""

    def __post_init__(self) -> None:
        check_int("second", self.second, low=1, high=self.last)
        check_int("split", self.split, low=0, high=self.last)

    @property
    def last(self) -> int:
        """T: the stage at which all tokens are data."""
        return len(self.data_counts) - 1


@dataclass
class DistilledQuery:
    """One call of a student. `B` rows of `N` tokens, each a vector of `C` numbers."""

    rows: np.ndarray
    """[B] int64, on the host."""
    labels: Tensor
    """[B] int64."""
    tokens: Tensor
    """[B, N, C]: data, then noise."""
    num_data: int
    """The number of data tokens."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[B] int64, on the host: number of tokens evaluated for each row."""
    kind: str = "full"


@dataclass
class DistilledAnswer:
    """The outputs of both heads: vectors [B, N, C], and logits [B, N, V]."""

    continuous: Tensor
    logits: Tensor


@dataclass(frozen=True)
class DistilledFacts:
    name: str
    stages: Stages
    classes: int
    vocab_size: int
    channels: int


class ContinuousHead(nn.Module):
    """The head that predicts vectors: a norm without weights, shifted and scaled by the class, and a linear layer."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(2, width))
        self.linear = nn.Linear(width, channels)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """hidden [B, N, width], condition [B, width] -> [B, N, channels]."""
        shift, scale = (self.scale_shift_table + condition.unsqueeze(1)).unsqueeze(2).unbind(1)  # [B, 1, width] each
        return self.linear(layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1 + scale) + shift)


class DistilledModel(PictureModel, Adapter):
    """Base of the students' adapters. A subclass implements `codes`, `check_teacher`, `grid`, `latent` and `_pixels`.

    module: (labels [B], tokens [B, N, C], number of data tokens) -> vectors [B, N, C] and logits [B, N, V].
    defaults: `steps` of requests, and with a teacher `guidance_scale`, `top_k`, `top_p`, `temperature`."""

    makes = "distilled image"
    family = "distilled"
    default_sampler = "distilled"
    decoder_option = "vq"
    vq: Any
    facts: DistilledFacts
    teacher_defaults: ClassVar[Mapping[str, Any]] = {}
    """The authors' settings of the teacher."""

    def __init__(self, module: nn.Module, facts: DistilledFacts, defaults: Mapping[str, Any] | None = None):
        super().__init__(module.eval())
        self.facts = facts
        self.defaults = merge_defaults({"steps": 2, **self.teacher_defaults}, defaults)

    # ---- for subclasses -------------------------------------------------------------------------------------------

    def codes(self) -> Tensor:
        """[V, C]: the code vectors as the student reads them."""
        raise NotImplementedError

    def check_teacher(self, teacher: Any) -> None:
        """Raise TypeError or ValueError unless the teacher has this student's kind and sizes."""
        raise NotImplementedError

    # ---- shared ---------------------------------------------------------------------------------------------------

    @property
    def shared(self) -> dict[str, Any]:
        return {"vq": self.vq}

    def __call__(self, query: DistilledQuery) -> DistilledAnswer:
        with self.evaluation_context():
            continuous, logits = self.module(query.labels, query.tokens.to(self.dtype), query.num_data)
        return DistilledAnswer(widen(continuous), widen(logits))

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        fields = {} if getattr(sampler, "t_list", None) is not None else {"steps": self.defaults["steps"]}
        if getattr(sampler, "teacher", None) is not None:
            fields |= {name: value for name, value in self.defaults.items() if name != "steps"}
        if (top_k := fields.get("top_k")) is not None and top_k >= self.facts.vocab_size:
            fields["top_k"] = None
        return {"temperature": 1.0} | fields

    def read(self, state: Any, grid: Grid) -> Snapshot:
        accepted = np.array(state.accepted, np.int64).reshape(-1, state.batch)
        # the grid has the last tokens (VAR's last scale); earlier tokens count as the prompt
        prompt_lengths = [self.facts.stages.data_counts[-1] - grid.length] * state.batch
        return Snapshot(state.tokens.cpu(), state.done, accepted, prompt_lengths, [0] * state.batch)
