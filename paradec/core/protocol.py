"""The step/commit protocol that every sampler follows, and the loop that drives it.

```
state = sampler.start(model, prompt, ...)       # everything that changes while decoding lives in the state
while not state.done:
    proposal = sampler.step(model, state)       # evaluate: what could become final, and how confident we are
    commit = sampler.commit(state, proposal)    # write: the only place where tokens (or the latent) change
```

`step` is `query`, the model call and `propose`; hosts that call the model themselves use `query` and `propose`.
The invariants are listed in `docs/fidelity.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_model
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
    """Tokens that could become final, of the text and image-token families.

    Shapes: `R` running rows, `W` window positions each.
    """

    rows: np.ndarray
    """[R] int64, on the host: rows of the state."""
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
    """Further values read from the logits, by name, each [R, W, ...]."""
    made_at: int = 0
    """How many commits the state had seen; a proposal is good for the next one only."""
    kind: str = "full"
    """What was evaluated: "full", "window", or a combination."""
    logprobs: StepLogProbs | None = None
    """Log-probabilities of `values`, if the request asks for them."""


@dataclass
class Commit:
    """What became final in one step. `selected` marks the written `values`; methods that take tokens back write the
    mask id."""

    rows: np.ndarray
    values: Tensor
    positions: Tensor | None = None
    selected: Tensor | None = None
    scores: Tensor | None = None
    kind: str = "full"
    logprobs: StepLogProbs | None = None

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
        """`TraceStep.logprobs`, in the order of `to_list`; None where the request asks for none."""
        if self.selected is None or self.positions is None or self.logprobs is None:
            return None
        index, column = (i.cpu() for i in self.selected.nonzero(as_tuple=True))
        places = zip(self.rows[index.numpy()].tolist(), self.positions.cpu()[index, column].tolist(), strict=True)
        entries = sorted(zip(places, self.logprobs.to_lists(index, column), strict=True), key=lambda entry: entry[0])
        return [entry for _, entry in entries]


@dataclass
class State:
    """What changes while decoding, common to all families. `B` rows.

    `nfe`, `row_forwards`, `forwarded_tokens`, `full_forwards`: [B] int64 on the host, as the rows of `counts`.
    """

    batch: int
    memory: Memory = field(metadata=ROWS)
    trace: Trace | None = field(init=False, default=None)
    features: dict[str, Any] = field(init=False, default_factory=dict, metadata=ROWS)
    """Optional features of the request (`paradec.samplers.features`) by name, in the order of their calls."""
    has_notes: bool = field(init=False, default=True)
    """Whether a trace also has what `Sampler.observe` returns."""
    logprobs: LogProbs | None = field(init=False, default=None, metadata=ROWS)
    """Of the decided tokens, in the columns of the canvas, where the request asks for it."""

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
        """[4, B] int64 of all commits: forward calls, rows evaluated (2 per call under guidance, K for K drafts),
        positions evaluated, and calls that evaluated the row whole."""
        for call in self._calls:
            call.add_to(self._counts)
        self._calls.clear()
        return self._counts.copy()

    @property
    def done(self) -> bool:
        """True when every row is finished."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is done")

    @cached_property
    def rows(self) -> np.ndarray:
        """[R] int64, on the host, ascending: the rows that the next step evaluates. Families where one row may end
        before another set it."""
        return np.arange(self.batch)

    @property
    def progress(self) -> tuple[int, int]:
        """(final, total) tokens, or solver steps of latents, of all rows. A row that has ended early is final."""
        raise NotImplementedError(f"{type(self).__name__} does not report progress")

    @contextmanager
    def release_stores_on_exit(self) -> Iterator[None]:
        """Release `stores` on exit: a traceback would keep the state alive."""
        try:
            yield
        finally:
            for store in self.stores():
                if store is not None:
                    store.release()

    def stores(self) -> tuple[Any, ...]:
        """Key/value stores and the like, outside of the state's tensors; entries may be None."""
        return ()

    def cache_advice(self) -> str | None:
        """Why the cache cannot win for this request, if it cannot."""
        return None

    def why_rows_fixed(self) -> str | None:
        """Why rows cannot be replaced; None where they can."""
        return f"{type(self).__name__} does not give its rows away"

    def before_row_change(self, other: Self | None) -> None:
        """Before rows are selected (None), or replaced by those of `other`, a state that differs in rows only."""
        for state in (self,) if other is None else (self, other):
            state.counts  # noqa: B018 - sums the calls of the old rows
        if other is not None:
            self.commits += 1  # earlier proposals are of other rows

    def after_row_change(self) -> None:
        """Called when rows were selected or replaced."""
        self.batch, self._calls = self._counts.shape[1], [*self._calls]

    def stop_rows(self, rows: np.ndarray, wipe: bool = False) -> None:
        """Stop decoding `rows` [N]. wipe: also clear their memory and stores, where NaN would spread."""
        self.finish(rows)
        self.commits += 1
        for part in (self.memory, *self.stores()) if wipe else ():
            if part is not None:
                clear_rows(part, branch_rows(rows, self.batch, count_rows(part)))
        self.after_row_change()

    def finish(self, rows: np.ndarray) -> None:
        """Take `rows` [N] out of the decoding."""
        raise NotImplementedError

    def final_ends(self, rows: np.ndarray) -> np.ndarray:
        """[N] int64: the position up to which all of each row is final, and stays so."""
        raise NotImplementedError

    def num_columns(self, rows: np.ndarray) -> int:
        """Columns that `rows` [N] need."""
        raise NotImplementedError

    def check_current(self, proposal: Proposal | LatentProposal) -> None:
        """Raise ValueError if `proposal` was made before another commit."""
        if proposal.made_at != self.commits:
            raise ValueError("this proposal was made from an earlier state; call step again before commit")

    def count(self, cost: Cost) -> None:
        """Add the cost of a committed step."""
        self._calls += cost.calls

    def add_counts(self, counts: np.ndarray) -> None:
        """Add counts [4, B] of a loop that commits on the device."""
        self._counts += counts


TextState: TypeAlias = Any
"""The state of a family of text: a `MaskedState`, `CausalState` or `DenoisingState`."""


@dataclass(frozen=True)
class Sampler(Component):
    """A method: an immutable, validated value whose fields are its settings (defaults: the paper's).

    Subclasses set `name`, `family`, `models`, `paper`, `arxiv` and `summary`, and implement `start`, `query`, `propose`
    and `commit`.
    """

    kind: ClassVar[str] = "sampler"
    family: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    uses_steps: ClassVar[bool] = False
    """Whether the method reads the request's `steps`."""
    draws: ClassVar[bool] = True
    """Whether a seed matters at temperature 0, too: to the order of positions, to drafts or to noise."""
    lock_step: ClassVar[bool] = False
    """Whether all rows take the same steps and end together, so that no row can be replaced."""
    models: ClassVar[tuple[str, ...]] = ()
    """Kinds of model that the method decodes with: names of `paradec.core.checks.MODELS`."""
    unsupported: ClassVar[tuple[str, ...]] = ("order",)
    """Fields of `paradec.Request` that must be at their default."""
    request_defaults: ClassVar[Mapping[str, Any]] = {}
    """The family's defaults, where they differ from those of `paradec.Request`."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_class("sampler", cls)
        return super().__new__(cls)

    def check_model(self, model: Any) -> None:
        """Raise TypeError unless the method decodes with models of this kind."""
        check_model(f"sampler {self.name!r}", model, self.models)

    def start(self, model: Any, prompt: Any, /, *args: Any, **arguments: Any) -> State:
        """Make the state of one request: `start(model, prompt, request)`, or with the request's fields by name."""
        raise NotImplementedError

    def memory(self) -> Mapping[str, MemorySpec]:
        """Tensors that the method keeps between steps, by name; `start` makes them in `State.memory`."""
        return {}

    def query(self, state: Any) -> list[Any]:
        """What to evaluate now: one query per shape bucket; an empty list when nothing needs the model."""
        raise NotImplementedError

    def propose(self, state: Any, outputs: list[Any], queries: list[Any]) -> Proposal | LatentProposal:
        """Read the model's answers (one per query). Changes nothing."""
        raise NotImplementedError

    def commit(self, state: Any, proposal: Any) -> Commit:
        """Decide what becomes final and write it. Within a step, only this changes the state."""
        raise NotImplementedError

    def observe(self, state: Any, proposal: Any) -> Notes:
        """Notes of a step before its commit, when a trace is recorded: the evaluated positions. Changes nothing."""
        return Notes(proposal.cost.counts[0].tolist(), evaluated_spans(proposal.cost.queries, state.batch))

    def step(self, model: Callable[..., Any], state: Any) -> Any:
        """`query`, one model call per query, `propose`. Repeating a step gives the same proposal."""
        queries = self.query(state)
        store = getattr(state, "store", None)
        if store is None:
            return self.propose(state, [model(query) for query in queries], queries)
        return self.propose(state, [model(query, store) for query in queries], queries)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sampler:
        """Inverse of `to_dict`.

        Raises:
            ValueError: no mapping with a registered name under "sampler", or a setting that does not fit it.
        """
        return Registry.by_kind["sampler"].from_dict(data)


class NotFinite(FloatingPointError):
    """The model returned NaN or infinite logits. Nothing of the step has been written."""

    def __init__(self, message: str, rows: np.ndarray):
        super().__init__(message)
        self.rows = rows
        """[N] int64: rows of the state with such logits."""

    @classmethod
    def at_steps(cls, rows: np.ndarray, steps: np.ndarray) -> NotFinite:
        """Make the error of `rows` [N] at their `steps` [N]; the message names the first."""
        return cls(f"the model returned NaN or infinite logits for row {rows[0]} at its step {steps[0]}", rows)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.rows)


def check_finite(sound: Tensor, rows: np.ndarray, message: str) -> None:
    """Raise NotFinite where some `rows` [R] are not `sound` [R] bool; `{row}` in the message is the first of these."""
    found = sound.cpu().numpy()
    if not found.all():
        raise NotFinite(message.format(row=rows[~found][0]), rows[~found])


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during decoding. `output` holds the tokens decoded until then."""

    output: Any = None


@contextmanager
def interruptible(output_so_far: Callable[[], Any]) -> Iterator[None]:
    """Raise `Interrupted` with the output so far where Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output = output_so_far()
        raise stopped from interrupt


def decode(
    sampler: Sampler,
    model: Callable[..., Tensor],
    state: State,
    callback: Callable[[State, Commit], bool | None] | None = None,
) -> State:
    """Step until the state is done, or `callback(state, commit)` returns True after a commit. An interrupt leaves the
    state at its last commit."""
    with torch.inference_mode():
        while not state.done:
            if state.trace is None:
                commit = sampler.commit(state, sampler.step(model, state))
            else:
                commit = record_step(sampler, model, state, state.trace)
            if callback is not None and callback(state, commit):
                break
    return state
