"""The step/commit protocol that every sampler follows, and the loop that drives it.

```
state = sampler.start(model, prompt, ...)       # everything that changes while decoding lives in the state
while not state.done:
    proposal = sampler.step(model, state)       # evaluate: what could become final, and how confident we are
    commit = sampler.commit(state, proposal)    # write: the only place where tokens (or the latent) change
```

`step` is `query` (what to evaluate), the model call, and `propose` (read the answer); hosts that own the model
call use the halves. The families (masked, draft and verify, forecast, continuous) share this file and differ in what
a query holds and in the one decision of their paper. The invariants are listed in `docs/contracts.md`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from paradec.core import rows as of_rows
from paradec.core.checks import check_choice, check_model
from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.registry import Registry, check_declared
from paradec.core.thumbnails import of_latent
from paradec.core.trace import Notes, Span, Trace


@dataclass
class Query:
    """One model call: what is evaluated for the rows of one shape bucket.

    Shapes: `N` rows of this bucket, `R = branches * N` rows in the call, `Q` positions each, `W` wanted positions each.
    Under guidance (`branches == 2`) the first N rows of the call are conditional, the rest the same without prompt.
    """

    rows: np.ndarray
    """[N] int64, on the host, distinct: the state's rows that this call evaluates."""
    tokens: Tensor
    """[R, Q] int64: input ids."""
    positions: Tensor
    """[R, Q] int64: position ids (a row's first token is 0, whatever its padding)."""
    wanted: Tensor | None = None
    """[R, W] int64: columns of the call whose logits are wanted; None asks for all of them."""
    valid: Tensor | None = None
    """[R, Q] bool: False where a column is padding; None when nothing is."""
    origin: Tensor | None = None
    """[R, 1] int64: where each row's prompt ends, for models that count blocks from there; None for all others."""
    visible: Tensor | None = None
    """[R, Q, Q] bool: which of the call's columns each column sees; None is the model's own topology. Over a store,
    columns see what is stored elsewhere too, and not what is stored at the positions that the call evaluates."""
    store_rows: Tensor | None = None
    """[R] int64: rows of the key/value store; None evaluates without a store."""
    slots: Tensor | None = None
    """[R, Q] int64: store slot that each position's key and value are written to, -1 for padding (and, with `visible`,
    for columns that are not kept); None writes nothing: a draft over the store."""
    store_index: np.ndarray | None = None
    """[R] int64, on the host: `store_rows` again, where the host knows it: then neighbours are read without a copy."""
    begin: int = 0
    """On models with canvases: the lowest position that the call evaluates."""
    visible_length: int | None = None
    """Slots from here on are seen by no row of the call; None if any may be."""
    step: int = 0
    """How many commits the state had seen, for the store's records."""
    branches: int = 1
    copies: np.ndarray | None = None
    """[N] int64, on the host: how many drafts of each row the call evaluates beside each other; None is one of each."""
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: real (unpadded) positions evaluated for each row in one branch, all drafts together.
    Everywhere else "forwarded" means all branches (`CallCost.add_to` multiplies)."""
    index: np.ndarray | None = None
    """[N] int64, on the host: where `rows` are among the running rows."""
    available: Tensor | None = None
    """[N, W] bool: False where a window position has no logits in this call; None when all have."""
    decided_at: Tensor | None = None
    """[R, Q] int64: after which of the row's steps each position took its token, -1 where it was given or is undecided;
    for models with `reads_order`, None for all others."""
    columns: Tensor | None = None
    """[N, K] int64, distinct within a row: which window positions the `K` columns of `wanted` are for; None when they
    are for all of them, in order."""
    kind: str = "full"
    """"full" (whole sequences) or "window" (a part, over a store); on models with canvases "encode" (final tokens, for
    their keys and values alone) and "canvas" (the open canvases, which write nothing)."""
    soft: Tensor | None = None
    """[R, Q, D]: the soft embeddings that an open canvas is conditioned on; None where there are none yet."""
    soften: Callable[[Tensor], Tensor] | None = None
    """From a model with canvases, with its answer: logits [..., V] -> the soft embeddings [..., D] of the next step."""
    images: Tensor | None = None
    """[N, D]: the embeddings at the image tokens of the call, in reading order; None where it has no images."""
    attention: Any = None
    """What the attention of this call does, row by row (`paradec.attention`); None attends to everything visible."""
    keep_hidden: bool = False
    """Whether the model shall leave its last hidden states in `hidden`."""
    keep_layers: tuple[int, ...] | None = None
    """Layers, from 0, whose outputs the model shall leave in `hidden` in the place of its last hidden states."""
    hidden: Tensor | None = None
    """[R, Q, D]: what the output matrix reads, of all columns of the call; where `keep_hidden` asked for it. With
    `keep_layers` [R, Q, layers * D]: theirs, side by side."""

    def but(self, **changes: Any) -> Query:
        """A copy with other fields (`dataclasses.replace`, without its cost at every step)."""
        query = object.__new__(Query)
        query.__dict__ = self.__dict__ | changes
        if "store_rows" in changes:
            query.__dict__["store_index"] = changes.get("store_index")
        return query


@dataclass
class LatentQuery:
    """One call of a continuous model. `N` rows of the state, `R = branches * N` rows in the call.

    Under guidance (`branches == 2`) the first N rows of the call are conditional, the rest are not.
    """

    rows: np.ndarray
    """[N] int64, on the host: the state's rows that this call evaluates."""
    latent: Tensor
    """[R, ...] float."""
    timestep: Tensor
    """Scalar or [R]."""
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    """What else the model reads, by name, each [R, ...]: class labels, say."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: positions (patches) evaluated for each row in one branch, as in `Query`."""
    kind: str = "full"


@dataclass
class Cost:
    """What one step spent: a call that a row takes part in is one `nfe`, however many rows it holds of it."""

    queries: list[Any]
    batch: int

    nfe = property(lambda self: self.counts[0])
    row_forwards = property(lambda self: self.counts[1])
    forwarded = property(lambda self: self.counts[2])

    @property
    def counts(self) -> np.ndarray:
        """[4, B] int64 on the host, per row of the state: forward calls, rows evaluated, positions evaluated, and
        those of the calls that evaluated it whole."""
        counts = np.zeros((4, self.batch), np.int64)
        for call in self.calls:
            call.add_to(counts)
        return counts

    @property
    def calls(self) -> list[CallCost]:
        """The model calls, without their tensors."""
        found = []
        for query in self.queries:
            copies = getattr(query, "copies", None)
            found.append(CallCost(query.rows, query.branches, copies, query.forwarded, query.kind == "full"))
        return found


class CallCost(NamedTuple):
    """What one model call costs; see `Query` for the fields."""

    rows: np.ndarray
    branches: int
    copies: np.ndarray | None
    forwarded: np.ndarray | None
    whole: bool

    def add_to(self, counts: np.ndarray) -> None:
        """Add this call to counts as `Cost.counts` has them, in place."""
        counts[0, self.rows] += 1
        counts[1, self.rows] += self.branches if self.copies is None else self.branches * self.copies
        counts[2, self.rows] += 0 if self.forwarded is None else self.branches * self.forwarded
        counts[3, self.rows] += self.whole


@dataclass
class Proposal:
    """Tokens that could become final, of the text and image-token families.

    Shapes: `R` running rows, `W` window positions each.
    """

    rows: np.ndarray
    """[R] int64, on the host: rows of the state that this proposal speaks of."""
    values: Tensor
    """[R, W] int64 token ids."""
    cost: Cost
    positions: Tensor
    """[R, W] int64: where the values would be written."""
    scores: Tensor
    """[R, W] float64: how confident the method is; higher is more confident."""
    available: Tensor
    """[R, W] bool: positions that were evaluated this step and may be committed."""
    quantities: dict[str, Tensor] = field(default_factory=dict)
    """Everything else that was read from the logits, by name, each [R, W, ...]."""
    made_at: int = 0
    """How many commits the state had seen; a proposal is good for the next one only."""
    kind: str = "full"
    """What was evaluated: "full", "window", or a combination."""
    logprobs: StepLogProbs | None = None
    """Of the values, where the request asks for them and the values are the tokens that would be written."""


@dataclass
class LatentProposal:
    """What a continuous model's latent could become, of the forecast family."""

    rows: np.ndarray
    """[R] int64, on the host: rows of the state that this proposal speaks of."""
    values: Tensor
    """[R, ...] float: the model's output, or its forecast."""
    cost: Cost
    made_at: int = 0
    """As for `Proposal`."""
    kind: str = "full"
    """What was evaluated: "full", "window", or "forecast" (nothing)."""


@dataclass
class Commit:
    """What became final in one step. `selected` marks the entries of `values` that were written; methods that take
    tokens back write the mask id."""

    rows: np.ndarray
    values: Tensor
    positions: Tensor | None = None
    selected: Tensor | None = None
    scores: Tensor | None = None
    kind: str = "full"
    logprobs: StepLogProbs | None = None
    """Of the values that were written, where the request asks for them."""

    def to_list(self) -> list[tuple[int, int, int, float]]:
        """(row, position, token, confidence) of everything written, sorted. Waits for the device."""
        if self.selected is None or self.positions is None:
            return []
        index, column = (i.cpu() for i in self.selected.nonzero(as_tuple=True))
        positions, values = self.positions.cpu()[index, column], self.values.cpu()[index, column]
        scores = torch.ones(len(index)) if self.scores is None else self.scores.cpu()[index, column]
        rows = self.rows[index.numpy()]
        return sorted(zip(rows.tolist(), positions.tolist(), values.tolist(), scores.tolist(), strict=True))

    def logprobs_list(self) -> list[list[Any]] | None:
        """What `TraceStep.logprobs` holds, in the order of `to_list`; None where nothing was asked for."""
        if self.selected is None or self.positions is None or self.logprobs is None:
            return None
        index, column = (i.cpu() for i in self.selected.nonzero(as_tuple=True))
        places = zip(self.rows[index.numpy()].tolist(), self.positions.cpu()[index, column].tolist(), strict=True)
        entries = sorted(zip(places, self.logprobs.at(index, column), strict=True), key=lambda entry: entry[0])
        return [entry for _, entry in entries]


@dataclass(frozen=True)
class MemorySpec:
    """A tensor that a method remembers between steps.

    Args:
        dims: names of the dimensions after the row: "position" (the canvas length), "window" (the open block: column 0
            is its first position; grows with the widest block), "vocab", "hidden" (of models with canvases), or an int.
        fill: the value it starts from and is reset to.
        reset: "block" (whenever a row opens a block) or "sequence" (never within a request).
    """

    dims: tuple[str | int, ...] = ()
    dtype: torch.dtype = torch.float32
    fill: float = 0.0
    reset: str = "block"

    def __post_init__(self) -> None:
        check_choice("reset", self.reset, ("block", "sequence"))


class Memory:
    """The declared memory of a method: named tensors, each [B, *dims]. Only `commit` may write to it."""

    def __init__(self, specs: Mapping[str, MemorySpec], batch: int, sizes: Mapping[str, int], device: torch.device):
        self.specs = dict(specs)
        self.tensors: dict[str, Tensor] = {}
        for name, spec in self.specs.items():
            shape = [batch, *(sizes[d] if isinstance(d, str) else d for d in spec.dims)]
            self.tensors[name] = torch.full(shape, spec.fill, dtype=spec.dtype, device=device)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name not in self.specs:
            raise KeyError(f"memory {name!r} was not declared; declared: {sorted(self.specs)}")
        self.tensors[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, rows: np.ndarray, width: int | None = None) -> dict[str, Tensor]:
        """What is remembered of `rows` [R], distinct and ascending, by name, each [R, *dims]; "window" dimensions
        are cut to `width`. No copy where these are all rows: not to be written to."""
        found = {}
        for name, tensor in self.tensors.items():
            for axis, dim in enumerate(self.specs[name].dims, start=1):
                if dim == "window" and width is not None:
                    tensor = tensor.narrow(axis, 0, width)
            whole = len(rows) == len(tensor)
            found[name] = tensor if whole else tensor.index_select(0, torch.as_tensor(rows, device=tensor.device))
        return found

    def write(self, name: str, rows: np.ndarray, value: Tensor) -> None:
        """Remember `value` [R, *dims] of `rows` [R], distinct and ascending; "window" dimensions may be narrower than
        the memory's. What was read before stays as it is."""
        if value.shape == self[name].shape:
            self[name] = value.to(self[name].dtype)
            return
        self[name] = tensor = part = self[name].clone()  # proposals and copies may still hold the old one
        for axis, dim in enumerate(self.specs[name].dims, start=1):
            if dim == "window":
                part = part.narrow(axis, 0, value.shape[axis])
        if len(rows) == len(tensor):
            part.copy_(value)
        else:
            part.index_copy_(0, torch.as_tensor(rows, device=tensor.device), value.to(tensor.dtype))

    def reset(self, rows: np.ndarray, scope: str) -> None:
        """Set `rows` back to the fill value, in every tensor whose reset scope is `scope`."""
        for name, spec in self.specs.items():
            if spec.reset == scope and len(rows):
                self.tensors[name] = self.tensors[name].clone()
                self.tensors[name][torch.as_tensor(rows, device=self.tensors[name].device)] = spec.fill

    def grow(self, dim: str, size: int) -> None:
        """Widen the dimensions called `dim` to at least `size`, with the fill value."""
        for name, spec in self.specs.items():
            for axis, own in enumerate(spec.dims, start=1):
                tensor = self.tensors[name]
                if own == dim and tensor.shape[axis] < size:
                    shape = [*tensor.shape]
                    shape[axis] = size - shape[axis]
                    self.tensors[name] = torch.cat((tensor, tensor.new_full(shape, spec.fill)), axis)

    def shift(self, dim: str, rows: np.ndarray, by: np.ndarray) -> None:
        """Move what is remembered of `rows` [N] to the front of the dimensions called `dim`, by [N] places each; what
        comes in after it starts from the fill value."""
        for name, spec in self.specs.items():
            for axis, own in enumerate(spec.dims, start=1):
                if own == dim and len(rows):
                    self.tensors[name] = _shifted(self.tensors[name], axis, rows, by, spec.fill)

    def taken(self, rows: np.ndarray, columns: int | None = None) -> Memory:
        """A copy that has the `rows` [N] alone, with so many positions."""
        other = object.__new__(Memory)
        other.specs, other.tensors = dict(self.specs), {}
        for name, tensor in self.tensors.items():
            found = of_rows.taken(tensor, rows)
            for axis, dim in enumerate(self.specs[name].dims, start=1):
                if dim == "position" and columns is not None:
                    found = of_rows.fitted(found, columns, self.specs[name].fill, axis)
            other.tensors[name] = found
        return other

    def put(self, slots: np.ndarray, other: Memory) -> None:
        """Replace the rows `slots` [N] by those of another request of the same method, whose dimensions are as large at
        most; what that one has not begun to remember starts from its fill value."""
        for name, spec in other.specs.items():
            if name not in self.specs:  # known once a step has been taken
                shape = other.tensors[name].shape[1:]
                self.specs[name] = spec
                rows = len(next(iter(self.tensors.values())))
                self.tensors[name] = other.tensors[name].new_full((rows, *shape), spec.fill)
        for name, spec in self.specs.items():
            own = self.tensors[name].clone()  # proposals and copies may still hold the old one
            index = torch.as_tensor(slots, device=own.device)
            own.index_fill_(0, index, spec.fill)
            if name in other:
                part = own
                for axis, size in enumerate(other[name].shape[1:], start=1):
                    part = part.narrow(axis, 0, size)
                part.index_copy_(0, index, other[name].to(own.dtype))
            self.tensors[name] = own

    def size(self, dim: str) -> int:
        """Of the dimensions called `dim`, the largest; 0 without any."""
        sizes = [0]
        for name, spec in self.specs.items():
            sizes += [self.tensors[name].shape[axis] for axis, own in enumerate(spec.dims, start=1) if own == dim]
        return max(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _shifted(tensor: Tensor, axis: int, rows: np.ndarray, by: np.ndarray, fill: float) -> Tensor:
    """A copy of `tensor` with `rows` [N] moved down by [N] places along `axis`, filled up with `fill`."""
    index = torch.as_tensor(rows, device=tensor.device)
    own = tensor.index_select(0, index).movedim(axis, 1)  # [N, W, ...]
    source = torch.arange(own.shape[1], device=tensor.device) + torch.as_tensor(by, device=tensor.device).unsqueeze(1)
    shape = (*source.shape, *(1,) * (own.ndim - 2))
    there = (source < own.shape[1]).view(shape)
    source = source.clamp(max=own.shape[1] - 1).view(shape).expand_as(own)
    moved = torch.where(there, own.gather(1, source), own.new_full((), fill))
    return tensor.index_copy(0, index, moved.movedim(1, axis))


@dataclass
class State:
    """What changes while decoding, common to all families. `B` rows.

    `nfe`, `row_forwards`, `forwarded_tokens` and `full_forwards` are [B] int64 on the host: forward calls a row took
    part in, rows evaluated for it (2 per call under guidance, K for K drafts), positions evaluated for it in all of
    these, and the calls that evaluated it whole.
    """

    batch: int
    memory: Memory
    trace: Trace | None = field(init=False, default=None)
    noted: bool = field(init=False, default=True)
    """Whether a trace also has what `Sampler.observe` notes."""
    logprobs: LogProbs | None = field(init=False, default=None)
    """Of what was decided, in the columns of the canvas, where the request asks for it; changed by commits."""

    def __post_init__(self) -> None:
        self._counts = np.zeros((4, self.batch), np.int64)
        self._calls: list[CallCost] = []
        self.commits = 0

    nfe = property(lambda self: self.counts[0])
    row_forwards = property(lambda self: self.counts[1])
    forwarded_tokens = property(lambda self: self.counts[2])
    full_forwards = property(lambda self: self.counts[3])

    @property
    def counts(self) -> np.ndarray:
        """[4, B] int64, as `Cost.counts`, of everything committed."""
        for call in self._calls:
            call.add_to(self._counts)
        self._calls.clear()
        return self._counts.copy()

    @property
    def done(self) -> bool:
        """True when every row is finished."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is done")

    @property
    def progress(self) -> tuple[int, int]:
        """(final, total): tokens or solver steps that are final, and how many there will be."""
        raise NotImplementedError(f"{type(self).__name__} does not report progress")

    @contextmanager
    def freed_store(self) -> Iterator[None]:
        """Give the memory of `stores` back on exit, whatever happened: a traceback would keep the state alive."""
        try:
            yield
        finally:
            for store in self.stores():
                if store is not None:
                    store.release()

    def stores(self) -> tuple[Any, ...]:
        """What is kept outside of the state's tensors: nothing, unless a family has a store. None among them is
        nothing."""
        return ()

    def cache_advice(self) -> str | None:
        """Why the cache cannot win for this request, if it cannot."""
        return None

    # ---- rows that come and go ------------------------------------------------------------------------------------

    def fixed(self) -> str | None:
        """Why rows cannot leave this state and others take their place; None where they can."""
        return f"{type(self).__name__} does not give its rows away"

    def taken(self, rows: np.ndarray, columns: int | None = None) -> Self:
        """A copy that has the `rows` [N] alone, in this order, with so many positions; a row may be there several
        times."""
        raise NotImplementedError

    def put(self, slots: np.ndarray, other: Self) -> None:
        """Replace the rows `slots` [N] by all rows of the state of another request, which is alike but for its rows.
        The prompts that were there have left the batch; what other rows decode does not change."""
        raise NotImplementedError

    def dismiss(self, rows: np.ndarray, wipe: bool = False) -> None:
        """Let `rows` [N] go on no further. wipe: whether what they have stored may hold NaN, which spreads."""
        raise NotImplementedError

    def final(self, rows: np.ndarray) -> np.ndarray:
        """[N] int64: the position up to which all of each row is final, and stays so."""
        raise NotImplementedError

    def extent(self, rows: np.ndarray) -> int:
        """Columns that `rows` [N] need."""
        raise NotImplementedError

    def check_current(self, proposal: Proposal | LatentProposal) -> None:
        """Raise ValueError if `proposal` was made before another commit."""
        if proposal.made_at != self.commits:
            raise ValueError("this proposal was made from an earlier state; call step again before commit")

    def count(self, cost: Cost) -> None:
        """Add what a committed step spent. The one place where forwards are counted; they are summed when asked for."""
        self._calls += cost.calls

    def add_counts(self, counts: np.ndarray) -> None:
        """Add what a loop counted that commits on the device: [4, B] as `Cost.counts`."""
        self._counts += counts


@dataclass(frozen=True)
class Sampler:
    """A method: an immutable, validated value whose fields are its settings (defaults: the paper's).

    Subclasses state `name`, `family`, `models`, `paper`, `arxiv` and `summary`, and implement `start`, `query`,
    `propose` and `commit`. Two requests can share one sampler: everything that changes is in the `State`.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    uses_steps: ClassVar[bool] = False
    """Whether the request's `steps` means something to the method."""
    draws: ClassVar[bool] = True
    """Whether a seed matters at temperature 0, too: to the order of positions, to drafts or to noise."""
    lock_step: ClassVar[bool] = False
    """Whether all rows take the same steps and end together, so that no row can take the place of another."""
    models: ClassVar[tuple[str, ...]] = ()
    """Which kinds of model the method decodes with: names of `paradec.core.checks.MODELS`."""
    unsupported: ClassVar[tuple[str, ...]] = ()
    """Fields of `paradec.Request` that mean nothing to the family: another value than the default is an error that
    names the field."""
    request_defaults: ClassVar[Mapping[str, Any]] = {}
    """What `start` takes for fields that are not given, where that is not the default of `paradec.Request`."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_declared("sampler", cls)
        return super().__new__(cls)

    def check_model(self, model: Any) -> None:
        """Raise TypeError unless the method decodes with models of this kind."""
        check_model(f"sampler {self.name!r}", model, self.models)

    def start(self, model: Any, prompt: Any, /, *args: Any, **arguments: Any) -> State:
        """Make the state of one request: `start(model, prompt, request)`, or with the request's fields by name."""
        raise NotImplementedError

    def query(self, state: Any) -> list[Any]:
        """What to evaluate now: one query per shape bucket; an empty list when nothing needs the model."""
        raise NotImplementedError

    def propose(self, state: Any, outputs: list[Any], queries: list[Any]) -> Proposal | LatentProposal:
        """Read the model's answers (one per query). Changes nothing."""
        raise NotImplementedError

    def commit(self, state: Any, proposal: Any) -> Commit:
        """Decide what becomes final and write it. The only place where the state changes."""
        raise NotImplementedError

    def observe(self, state: Any, proposal: Any) -> Notes:
        """What a trace notes of a step before its commit: which positions are evaluated, and whose choice it is. Asked
        for when a trace is recorded, and at no other time. Changes nothing."""
        return Notes(proposal.cost.counts[0].tolist(), evaluated(proposal.cost.queries, state.batch))

    def step(self, model: Callable[..., Any], state: Any) -> Any:
        """`query`, one model call per query, `propose`. Repeating a step gives the same proposal."""
        queries = self.query(state)
        store = getattr(state, "store", None)
        if store is None:
            return self.propose(state, [model(query) for query in queries], queries)
        return self.propose(state, [model(query, store) for query in queries], queries)

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default."""
        return {
            f.name: f.default if f.default is not dataclasses.MISSING else None
            for f in dataclasses.fields(cls)
            if f.init
        }

    def to_dict(self) -> dict[str, Any]:
        """The sampler as plain data: its name under "sampler", then every setting."""
        return {"sampler": self.name} | {key: plain(getattr(self, key)) for key in self.settings()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sampler:
        """Inverse of `to_dict`.

        Raises:
            ValueError: no mapping with a registered name under "sampler", or a setting that does not fit it.
        """
        return Registry.by_kind["sampler"].from_dict(data)


def plain(value: Any) -> Any:
    """Turn a setting into data that JSON can hold: a nested sampler becomes its `to_dict`, a model its name."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "facts"):
        return value.facts.name
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    return value


class NotFinite(FloatingPointError):
    """The model returned NaN or infinite logits. Nothing of the step has been written."""

    def __init__(self, message: str, rows: np.ndarray):
        super().__init__(message)
        self.rows = rows
        """[N] int64: the state's rows that it returned them for; the others' answers were sound."""

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.rows)


def check_finite(sound: Tensor, rows: np.ndarray, message: str) -> None:
    """Raise NotFinite where some `rows` [R] are not `sound` [R] bool; `{row}` in the message is the first of these."""
    found = sound.cpu().numpy()
    if not found.all():
        broken = rows[~found]
        raise NotFinite(message.format(row=broken[0]), broken)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during decoding. `output` holds what was decoded until then."""

    output: Any = None


def decode(
    sampler: Sampler,
    model: Callable[..., Tensor],
    state: State,
    callback: Callable[[State, Commit], bool | None] | None = None,
) -> State:
    """Drive any sampler of any family until its state is done.

    `callback(state, commit)` runs after every commit; returning True ends the loop early. An interrupt leaves the
    state at its last commit.
    """
    with torch.inference_mode():
        while not state.done:
            if state.trace is None:
                commit = sampler.commit(state, sampler.step(model, state))
            else:
                commit = traced(sampler, model, state, state.trace)
            if callback is not None and callback(state, commit):
                break
    return state


def traced(sampler: Sampler, model: Callable[..., Tensor], state: State, trace: Trace) -> Commit:
    """One step with its commit, written down."""
    begin = time.perf_counter()
    proposal = sampler.step(model, state)
    notes = sampler.observe(state, proposal) if state.noted else None
    commit: Commit = sampler.commit(state, proposal)
    commits, pictures = commit.to_list(), None
    seconds = time.perf_counter() - begin
    if notes is not None and isinstance(proposal, LatentProposal) and commit.positions is None:
        pictures = of_latent(commit.values, len(trace.steps))
    forwarded = proposal.cost.forwarded.tolist()
    trace.add(commits, forwarded, commit.kind, notes, seconds, pictures, commit.logprobs_list())
    return commit


def evaluated(queries: Sequence[Any], batch: int) -> list[list[Span]] | None:
    """The positions of each of `batch` rows that model calls evaluate; None where they have no positions. Waits for the
    device."""
    found: list[list[np.ndarray]] = [[] for _ in range(batch)]
    said = False
    for query in queries:
        positions = getattr(query, "positions", getattr(query, "targets", None))
        if positions is None:
            continue
        said = True
        count = len(query.rows)  # of every branch and draft the same
        at, valid = positions[:count].cpu().numpy(), getattr(query, "valid", None)
        real = np.ones(at.shape, bool) if valid is None else valid[:count].cpu().numpy()
        for row, columns, kept in zip(query.rows.tolist(), at, real, strict=True):
            found[row].append(columns[kept])
    return [_runs(parts) for parts in found] if said else None


def _runs(parts: list[np.ndarray]) -> list[Span]:
    """Runs of neighbours among positions, which may be there several times."""
    at = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
    if not len(at):
        return []
    breaks = np.flatnonzero(np.diff(at) != 1)
    first, last = at[np.r_[0, breaks + 1]].tolist(), at[np.r_[breaks, len(at) - 1]].tolist()
    return [(start, stop + 1) for start, stop in zip(first, last, strict=True)]
