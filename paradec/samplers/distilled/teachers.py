"""The teachers of Distilled Decoding: they draw tokens of a picture given those before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import Query, StoreCall
from paradec.models.images.distilled import Stages
from paradec.models.images.scales import ScaleQuery
from paradec.request import Request
from paradec.samplers.guidance import guided
from paradec.samplers.scales.base import guidance_at


class Teaching(Protocol):
    """A teacher in one request, and what it has read of the picture. `B` rows."""

    store: Any
    """Keys and values of what it has read; `release` gives them back."""

    def query(self, ids: Tensor, codes: Tensor, at: int, step: int) -> Any:
        """The call for cell or scale `at`; ids [B, N] int64 and codes [V, C] say which tokens are before it."""
        ...

    def answer(self, query: Any) -> Tensor:
        """Logits [branches * B, W, V], or of fewer branches where the others have no weight."""
        ...

    def guided(self, logits: Tensor, at: int) -> Tensor:
        """[B, W, V]."""
        ...

    def span(self, at: int) -> tuple[int, int]:
        """The first token of `at`, and the one after its last."""
        ...

    def read_up_to(self, at: int) -> None:
        """What `query` asked for is decided."""
        ...


class CellTeaching:
    """A LlamaGen, which draws a cell at a time over a key/value store. At guidance 1 its second branch is not evaluated
    (the public code reads no prefix then, and stops with an error)."""

    def __init__(self, teacher: Any, labels: Sequence[int], count: int, scale: float):
        laid = teacher.request(list(labels), teacher.grid())
        rows = laid.prompts.rows + (laid.unconditional.rows if scale != 1 else [])
        self.model, self.scale, self.batch = laid.model, scale, len(labels)
        self.branches = len(rows) // self.batch
        self.prompts = torch.tensor(rows, device=teacher.device)
        """[branches * B, 1] int64."""
        self.store = self.model.make_store(len(rows), 1 + count)
        self.stored = 0
        """Tokens that the store holds, the class among them."""

    def query(self, ids: Tensor, codes: Tensor, at: int, step: int) -> Query:
        context = torch.cat((self.prompts, ids[:, :at].repeat(self.branches, 1).to(self.prompts.device)), 1)
        index = np.arange(len(context))
        column = torch.arange(self.stored, at + 1, device=context.device)
        positions = column.expand(len(context), -1)
        return Query(
            rows=np.arange(self.batch),
            tokens=context[:, self.stored :],
            positions=positions,
            wanted=torch.full_like(positions[:, :1], at - self.stored),
            store=StoreCall(torch.as_tensor(index, device=context.device), positions, index, at + 1, step=step),
            branches=self.branches,
            forwarded=np.full(self.batch, len(column)),
            kind="full" if self.stored == 0 else "window",
        )

    def answer(self, query: Query) -> Tensor:
        return self.model(query, self.store)

    def guided(self, logits: Tensor, at: int) -> Tensor:
        return guided(logits, self.scale) if self.branches == 2 else logits

    def span(self, at: int) -> tuple[int, int]:
        return at, at + 1

    def read_up_to(self, at: int) -> None:
        self.stored = at + 1


class ScaleTeaching:
    """A VAR, which draws a scale at a time over a store of keys and values; it reads all scales before its first in one
    call. The public code has no mask there, so that coarse scales see finer ones; `masked` puts that of the training
    in."""

    def __init__(self, teacher: Any, labels: Sequence[int], request: Request, masked: bool):
        self.model, self.masked, self.scale = teacher, masked, request.guidance_scale
        self.scales, self.ends = teacher.facts.scales, (0, *teacher.facts.ends)
        self.labels = torch.tensor(labels, device=teacher.device)
        self.branches = 1 if self.scale == 1 else 2
        self.store = teacher.store(self.branches * len(labels), len(self.scales) - 1)
        self.stored = 0
        """Scales that the store holds."""

    def query(self, ids: Tensor, codes: Tensor, at: int, step: int) -> ScaleQuery:
        device = self.labels.device
        known = codes[ids[:, : self.ends[at]]].to(device, self.model.codes.dtype)
        with torch.no_grad():
            inputs = self.model.vq.inputs(known, self.scales)[0]
        first, stop = self.ends[self.stored], self.ends[at + 1]
        return ScaleQuery(
            rows=np.arange(len(self.labels)),
            inputs=inputs[:, max(first - 1, 0) : stop - 1],
            labels=self.labels,
            first=self.stored,
            last=at,
            store=self.store,
            branches=self.branches,
            # the unconditional half of a scale that it has no weight in is there for its keys and values alone
            wanted=self.branches if self._weight(at) != 1 else 1,
            masked=self.masked,
            forwarded=np.full(len(self.labels), stop - first),
            kind="full" if first == 0 else "window",
            positions=torch.arange(first, stop, device=device).expand(len(self.labels), -1),
        )

    def _weight(self, at: int) -> float:
        return guidance_at("linear", self.scale, at, len(self.scales))

    def answer(self, query: ScaleQuery) -> Tensor:
        return self.model(query).logits

    def guided(self, logits: Tensor, at: int) -> Tensor:
        return logits if self._weight(at) == 1 else guided(logits, self._weight(at))

    def span(self, at: int) -> tuple[int, int]:
        return self.ends[at], self.ends[at + 1]

    def read_up_to(self, at: int) -> None:
        self.stored = at + 1


def teaching_of(teacher: Any, labels: Sequence[int], stages: Stages, request: Request, masked_prefix: bool) -> Teaching:
    """A teacher of a student with these stages."""
    if stages.scales:
        return ScaleTeaching(teacher, labels, request, masked_prefix)
    return CellTeaching(teacher, labels, stages.kept[-1], request.guidance_scale)
