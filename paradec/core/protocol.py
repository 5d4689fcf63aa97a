"""The step/commit protocol that every sampler follows, and the loop that drives it.

```
state = sampler.start(model, prompt, ...)       # holds everything that changes while decoding
while not state.done:
    proposal = sampler.step(model, state)       # evaluate: tokens that could become final, with scores
    commit = sampler.commit(state, proposal)    # write: the only place where tokens (or the latent) change
```

`step` calls `query`, the model and `propose`. Invariants: `docs/fidelity.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_model, unknown_name
from paradec.core.family_queries import LatentProposal
from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.memory import Memory, MemorySpec
from paradec.core.query import CallCost, Cost, branch_rows
from paradec.core.recording import evaluated_spans, record_step
from paradec.core.registry import Component, Registry, check_class
from paradec.core.rows import ROWS, clear_rows, count_rows, row_layout
from paradec.core.trace import Notes, Trace


@dataclass
class Proposal:
    """Candidate tokens `values` [R, W] of one step at `positions` [R, W]: `R` running rows, `W` window positions."""

    rows: np.ndarray
    """[R] int64, on the host: rows of the state."""
    values: Tensor
    cost: Cost
    positions: Tensor
    scores: Tensor
    """[R, W] float64: confidence; higher is more confident."""
    available: Tensor
    """[R, W] bool: positions that were evaluated in this step and may be committed."""
    quantities: dict[str, Tensor] = field(default_factory=dict)
    """Further values read from the logits, by name, each [R, W, ...]."""
    made_at: int = 0
    """`State.commits` when the proposal was made. A proposal is valid for the next commit only."""
    kind: str = "full"
    logprobs: StepLogProbs | None = None


@dataclass
class Commit:
    """Values [R, W] that one step writes where `selected` [R, W] is True. To mask a token again, write the mask id."""

    rows: np.ndarray
    values: Tensor
    positions: Tensor | None = None
    selected: Tensor | None = None
    scores: Tensor | None = None
    kind: str = "full"
    logprobs: StepLogProbs | None = None

    def to_list(self) -> list[tuple[int, int, int, float]]:
        """List (row, position, token, confidence) of every write, sorted. Waits for the device."""
        if self.selected is None or self.positions is None:
            return []
        index, column = (i.cpu() for i in self.selected.nonzero(as_tuple=True))
        positions, values = self.positions.cpu()[index, column], self.values.cpu()[index, column]
        scores = torch.ones(len(index)) if self.scores is None else self.scores.cpu()[index, column]
        rows = self.rows[index.numpy()]
        return sorted(zip(rows.tolist(), positions.tolist(), values.tolist(), scores.tolist(), strict=True))

    def logprobs_list(self) -> list[list[Any]] | None:
        """List log-probabilities in the order of `to_list`, as in `TraceStep.logprobs`; None without any."""
        if self.selected is None or self.positions is None or self.logprobs is None:
            return None
        index, column = (i.cpu() for i in self.selected.nonzero(as_tuple=True))
        keys = zip(self.rows[index.numpy()].tolist(), self.positions.cpu()[index, column].tolist(), strict=True)
        entries = sorted(zip(keys, self.logprobs.to_lists(index, column), strict=True), key=lambda entry: entry[0])
        return [entry for _, entry in entries]


@dataclass
class State:
    """Everything that changes while decoding `B` rows; base class of each family's state. `nfe`, `row_forwards`,
    `forwarded_tokens` and `full_forwards` are the rows of `counts`."""

    batch: int
    memory: Memory = field(metadata=ROWS)
    trace: Trace | None = field(init=False, default=None)
    features: dict[str, Any] = field(init=False, default_factory=dict, metadata=ROWS)
    """Optional features (`paradec.samplers.features`) by name, in the order in which they are called."""
    has_notes: bool = field(init=False, default=True)
    """Whether a trace records the notes of `Sampler.observe`."""
    logprobs: LogProbs | None = field(init=False, default=None, metadata=ROWS)

    _counts: np.ndarray = field(init=False, repr=False, metadata=row_layout(axis=1))

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
        """[4, B] int64 over all commits: forward calls, rows evaluated (2 per call under guidance, K for K drafts),
        positions evaluated, and calls that evaluated the whole row."""
        while self._calls:  # calls of the steps committed since the last read
            self._calls.pop().add_to(self._counts)
        return self._counts.copy()

    @property
    def done(self) -> bool:
        """Whether every row is finished."""
        raise NotImplementedError(f"{type(self).__name__} must define the property done")

    @cached_property
    def rows(self) -> np.ndarray:
        """[R] int64, on the host, ascending: running rows. Families whose rows end at different steps assign it."""
        return np.arange(self.batch)

    @property
    def progress(self) -> tuple[int, int]:
        """(final, total) tokens, or solver steps, of all rows. Rows that ended early count as final."""
        raise NotImplementedError(f"{type(self).__name__} must define the property progress")

    @contextmanager
    def release_stores_on_exit(self) -> Iterator[None]:
        """Release `stores` on exit, even if a traceback keeps the state alive."""
        try:
            yield
        finally:
            for store in self.stores():
                if store is not None:
                    store.release()

    def stores(self) -> tuple[Any, ...]:
        """Objects with rows that are not in the state's fields, such as key/value stores; entries may be None."""
        return ()

    def cache_advice(self) -> str | None:
        """Why the cache cannot save time for this request; None where it can."""
        return None

    def why_rows_fixed(self) -> str | None:
        """Why rows cannot be replaced; None where they can."""
        return f"{type(self).__name__} cannot exchange rows"

    def before_row_change(self, other: Self | None) -> None:
        """Prepare for a selection of rows (`other` is None), or their replacement by the rows of `other`."""
        self._counts = self.counts  # count pending calls, whose indices are the old rows
        if other is not None:
            other._counts = other.counts
            self.commits += 1  # earlier proposals are invalid

    def after_row_change(self) -> None:
        self.batch, self._calls = self._counts.shape[1], [*self._calls]

    def stop_rows(self, rows: np.ndarray, wipe: bool = False) -> None:
        """Stop decoding `rows` [N]. wipe: also clear their memory and stores, which may hold NaN."""
        self.finish(rows)
        self.commits += 1
        for part in (self.memory, *self.stores()) if wipe else ():
            if part is not None:
                clear_rows(part, branch_rows(rows, self.batch, count_rows(part)))
        self.after_row_change()

    def finish(self, rows: np.ndarray) -> None:
        """Mark `rows` [N] as finished."""
        raise NotImplementedError

    def final_ends(self, rows: np.ndarray) -> np.ndarray:
        """[N] int64: end (exclusive) of each row's final prefix."""
        raise NotImplementedError

    def num_columns(self, rows: np.ndarray) -> int:
        """Count the canvas columns that `rows` [N] need."""
        raise NotImplementedError

    def check_current(self, proposal: Proposal | LatentProposal) -> None:
        """Raise ValueError if `proposal` was made before the latest commit."""
        if proposal.made_at != self.commits:
            raise ValueError("this proposal was made from an earlier state; call step again before commit")

    def count(self, cost: Cost) -> None:
        self._calls += cost.calls

    def add_counts(self, counts: np.ndarray) -> None:
        self._counts += counts


TextState: TypeAlias = Any
"""A `MaskedState`, `CausalState` or `DenoisingState`."""


@dataclass(frozen=True)
class Sampler(Component):
    """A decoding method: an immutable, validated value whose fields are its settings, by default the paper's.
    Subclasses set `name`, `family`, `models`, `paper`, `arxiv` and `summary`, and implement `start`, `query`, `propose`
    and `commit`."""

    kind: ClassVar[str] = "sampler"
    family: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    uses_steps: ClassVar[bool] = False
    """Whether the sampler reads the request's `steps`."""
    draws: ClassVar[bool] = True
    """Whether a seed matters even at temperature 0, because the sampler draws positions, drafts or noise."""
    lock_step: ClassVar[bool] = False
    """Whether all rows run the same steps and end together, so that no row can be replaced."""
    models: ClassVar[tuple[str, ...]] = ()
    """Supported kinds of model: names of `paradec.core.checks.MODELS`."""
    unsupported: ClassVar[tuple[str, ...]] = ("order",)
    """Fields of `paradec.Request` that must have their default value."""
    request_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults for fields of `paradec.Request`, instead of the defaults of `Request` itself."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_class("sampler", cls)
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for setting in settings.keys() - parameters.keys():
                raise TypeError(unknown_name(f"setting of sampler {cls.name!r}", setting, [*parameters][1:]))
        return super().__new__(cls)

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model of a kind not in `models`."""
        check_model(f"sampler {self.name!r}", model, self.models)

    def start(self, model: Any, prompt: Any, /, *args: Any, **arguments: Any) -> State:
        """Make the state of one request: `start(model, prompt, request)`, or with the request's fields by name. Raises
        TypeError for a model of another kind, ValueError for an argument out of its range; the message names it."""
        raise NotImplementedError

    def memory(self) -> Mapping[str, MemorySpec]:
        """Declare tensors to keep between steps, by name; `start` allocates them in `State.memory`."""
        return {}

    def query(self, state: Any) -> list[Any]:
        """Build the model calls of this step, one query per group of rows of equal shape; [] calls no model."""
        raise NotImplementedError

    def propose(self, state: Any, outputs: list[Any], queries: list[Any]) -> Proposal | LatentProposal:
        """Build a proposal from the model's outputs (one per query). Changes nothing."""
        raise NotImplementedError

    def commit(self, state: Any, proposal: Any) -> Commit:
        """Decide which values become final and write them. The only part of a step that changes the state."""
        raise NotImplementedError

    def observe(self, state: Any, proposal: Any) -> Notes:
        """Return facts of the step for a trace, before the commit. Changes nothing."""
        return Notes(proposal.cost.counts[0].tolist(), evaluated_spans(proposal.cost.queries, state.batch))

    def step(self, model: Callable[..., Any], state: Any) -> Any:
        """Call `query`, the model once per query, then `propose`. Repeating a step gives the same proposal."""
        queries = self.query(state)
        store = getattr(state, "store", None)
        if store is None:
            return self.propose(state, [model(query) for query in queries], queries)
        return self.propose(state, [model(query, store) for query in queries], queries)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sampler:
        """Inverse of `to_dict`. Raises ValueError for an unknown name under "sampler" or a wrong setting."""
        return Registry.by_kind["sampler"].from_dict(data)


class NotFinite(FloatingPointError):
    """The model returned NaN or infinite logits. Nothing of the step was written."""

    def __init__(self, message: str, rows: np.ndarray):
        super().__init__(message)
        self.rows = rows
        """[N] int64: rows of the state with such logits."""

    @classmethod
    def at_steps(cls, rows: np.ndarray, steps: np.ndarray) -> NotFinite:
        """Make the error for `rows` [N] at their `steps` [N]; the message names the first."""
        return cls(f"the model returned NaN or infinite logits for row {rows[0]} at its step {steps[0]}", rows)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.rows)


def check_finite(row_is_finite: Tensor, rows: np.ndarray, message: str) -> None:
    """Raise NotFinite unless `row_is_finite` [R] bool is True for all `rows` [R]; `{row}` in the message becomes the
    first row for which it is False."""
    is_finite = row_is_finite.cpu().numpy()
    if not is_finite.all():
        raise NotFinite(message.format(row=rows[~is_finite][0]), rows[~is_finite])


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during decoding. `output` holds the tokens decoded so far."""

    output: Any = None


@contextmanager
def interruptible(
    output_so_far: Callable[[], Any], message: str = "decoding was interrupted; the output so far is in .output"
) -> Iterator[None]:
    """Replace KeyboardInterrupt by Interrupted with the output so far."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted(message)
        stopped.output = output_so_far()
        raise stopped from interrupt


def decode(
    sampler: Sampler,
    model: Callable[..., Tensor],
    state: State,
    callback: Callable[[State, Commit], bool | None] | None = None,
) -> State:
    """Run steps until the state is done or `callback(state, commit)` returns True. Ctrl-C keeps all commits so far."""
    with torch.inference_mode():
        while not state.done:
            if state.trace is None:
                commit = sampler.commit(state, sampler.step(model, state))
            else:
                commit = record_step(sampler, model, state, state.trace)
            if callback is not None and callback(state, commit):
                break
    return state
