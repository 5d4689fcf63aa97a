"""The step/commit protocol that every sampler follows, and the loop that drives it.

```
state = sampler.start(model, prompt, ...)       # everything that changes while decoding lives in the state
while not state.done:
    proposal = sampler.step(model, state)       # evaluate: what could become final, and how confident we are
    commit = sampler.commit(state, proposal)    # write: the only place where tokens (or the latent) change
```

`step` is `query` (what to evaluate), the model call, and `propose` (read the answer); hosts that own the model
call use the halves. The families (masked, draft and verify, forecast, continuous) share this file and differ in what
a query holds and in the one decision of their paper. The invariants are listed in `docs/fidelity.md`.
"""

from __future__ import annotations

import dataclasses
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
from paradec.core.registry import Registry, check_declared
from paradec.core.rows import ROWS, clear_rows, count_rows, row_layout
from paradec.core.trace import Notes, Trace


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
        entries = sorted(zip(places, self.logprobs.to_lists(index, column), strict=True), key=lambda entry: entry[0])
        return [entry for _, entry in entries]


@dataclass
class State:
    """What changes while decoding, common to all families. `B` rows.

    `nfe`, `row_forwards`, `forwarded_tokens` and `full_forwards` are [B] int64 on the host: forward calls a row took
    part in, rows evaluated for it (2 per call under guidance, K for K drafts), positions evaluated for it in all of
    these, and the calls that evaluated it whole.
    """

    batch: int
    memory: Memory = field(metadata=ROWS)
    trace: Trace | None = field(init=False, default=None)
    features: dict[str, Any] = field(init=False, default_factory=dict, metadata=ROWS)
    """Optional features of the request (`paradec.samplers.features`) by name, in the order in which the loop calls
    them."""
    noted: bool = field(init=False, default=True)
    """Whether a trace also has what `Sampler.observe` notes."""
    logprobs: LogProbs | None = field(init=False, default=None, metadata=ROWS)
    """Of what was decided, in the columns of the canvas, where the request asks for it; changed by commits."""

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
        """[4, B] int64, as `Cost.counts`, of everything committed."""
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
        """[R] int64, on the host, ascending: the rows at work, which the next step evaluates. All rows, but in families
        where one may end before another; these set it."""
        return np.arange(self.batch)

    @property
    def progress(self) -> tuple[int, int]:
        """(final, total) of all rows together: tokens, or solver steps of latents, that are final, and how many there
        will be. A row that has ended early counts as final."""
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

    def before_row_change(self, other: Self | None) -> None:
        """Called before rows are selected, or replaced by those of `other`, a state of another request that is alike
        but for its rows. The prompts that were there have left the batch; what other rows decode does not change."""
        for state in (self,) if other is None else (self, other):
            state.counts  # noqa: B018 - what was counted is summed now
        if other is not None:
            self.commits += 1  # what was proposed before is of other rows

    def after_row_change(self) -> None:
        """Called when rows were selected or replaced: make again what follows from them."""
        self.batch, self._calls = self._counts.shape[1], [*self._calls]

    def stop_rows(self, rows: np.ndarray, wipe: bool = False) -> None:
        """Stop decoding `rows` [N]. wipe: also clear what they remember and have stored, which may hold NaN, and NaN
        spreads: hidden values are multiplied by 0."""
        self.finish(rows)
        self.commits += 1
        for part in (self.memory, *self.stores()) if wipe else ():
            if part is not None:
                clear_rows(part, branch_rows(rows, self.batch, count_rows(part)))
        self.after_row_change()

    def finish(self, rows: np.ndarray) -> None:
        """Let `rows` [N] go on no further."""
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


TextState: TypeAlias = Any
"""The state of a family of text: a `MaskedState`, `CausalState` or `DenoisingState`."""


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
    unsupported: ClassVar[tuple[str, ...]] = ("order",)
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

    def memory(self) -> Mapping[str, MemorySpec]:
        """Tensors that the method keeps between steps, by name; `start` makes them in `State.memory`, where the
        dimensions and the type that a spec leaves to the model are known."""
        return {}

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
        return Notes(proposal.cost.counts[0].tolist(), evaluated_spans(proposal.cost.queries, state.batch))

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
    """Turn a setting into data that JSON can hold: a nested sampler becomes its `to_dict`, a model or function its
    name."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "facts"):
        return value.facts.name
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    return value.__name__ if callable(value) and hasattr(value, "__name__") else value


class NotFinite(FloatingPointError):
    """The model returned NaN or infinite logits. Nothing of the step has been written."""

    def __init__(self, message: str, rows: np.ndarray):
        super().__init__(message)
        self.rows = rows
        """[N] int64: the state's rows that it returned them for; the others' answers were sound."""

    @classmethod
    def at_steps(cls, rows: np.ndarray, steps: np.ndarray) -> NotFinite:
        """Of `rows` [N], each at its own one of `steps` [N]; the message names the first."""
        return cls(f"the model returned NaN or infinite logits for row {rows[0]} at its step {steps[0]}", rows)

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.rows)


def check_finite(sound: Tensor, rows: np.ndarray, message: str) -> None:
    """Raise NotFinite where some `rows` [R] are not `sound` [R] bool; `{row}` in the message is the first of these."""
    found = sound.cpu().numpy()
    if not found.all():
        raise NotFinite(message.format(row=rows[~found][0]), rows[~found])


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during decoding. `output` holds what was decoded until then."""

    output: Any = None


@contextmanager
def interruptible(output_so_far: Callable[[], Any]) -> Iterator[None]:
    """Raise `Interrupted`, with the output of what was decoded until then, where Ctrl-C ends the block."""
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
    """Drive any sampler of any family until its state is done.

    `callback(state, commit)` runs after every commit; returning True ends the loop early. An interrupt leaves the
    state at its last commit.
    """
    with torch.inference_mode():
        while not state.done:
            if state.trace is None:
                commit = sampler.commit(state, sampler.step(model, state))
            else:
                commit = record_step(sampler, model, state, state.trace)
            if callback is not None and callback(state, commit):
                break
    return state
