"""What a batch that stays full is made of: tickets, the queue in which they wait, and groups of slots.

`refusal` says which requests a batch can be refilled with, `key_of` which of them share a group, and so their calls.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from paradec import samplers
from paradec.api.generate import sampler_on
from paradec.api.output import Output
from paradec.core.checks import shown
from paradec.core.interrupts import held_back
from paradec.core.prompts import Prompts
from paradec.core.protocol import Memory
from paradec.core.rows import replace_rows, select_rows
from paradec.request import DEFAULTS, Request

if TYPE_CHECKING:
    from paradec.samplers.causal.state import CausalState
    from paradec.samplers.masked.state import MaskedState

RowState: TypeAlias = "MaskedState | CausalState"
"""Of the families whose rows come and go."""
S = TypeVar("S", "MaskedState", "CausalState")
MADE = ("text", "codes", "masked image")
"""Kinds of model (`paradec.core.checks.MODELS`) whose batches can be refilled."""
OWN = ("max_new_tokens", "seed", "stop_strings", "chat")
"""Fields of a request in which the rows of one batch may differ."""
OWN_MASKED = (*OWN, "suppress_tokens")
"""The same for masked samplers."""
_TOGETHER = "a prefix needs rows that begin together; use paradec.generate"
REFUSED = {
    "prefix": _TOGETHER,
    "keep_prefix": "keys and values of ended rows are not kept; use paradec.generate",
    "share_prefix": _TOGETHER,
    "attention": "sparse attention keeps one pattern for all rows; use paradec.generate",
    "generator": "give a seed: a row's draws do not depend on when it begins",
    "num_return_sequences": "give the prompt once for each answer",
    "streamer": "a streamer belongs to one prompt; give it with the prompt",
    "callback": "there is no state of a single request; give each prompt a streamer",
    "trace": "a trace records the rows that it began with; use paradec.generate",
    "progress": "count the outputs as they end",
}
"""Fields that mean nothing here, and what to do instead."""
WIDTHS = 32
"""Canvases that have to grow are rounded up to a multiple of this."""


class Cancelled(Exception):
    """A prompt was taken back before its answer was whole."""


class BatchClosed(RuntimeError):
    """A batch takes no prompts any more."""


@dataclass(eq=False)
class Ticket:
    """A prompt that was given to a `Batch`: the handle to cancel it by, and where its answer will be."""

    number: int
    """How many prompts came before it."""
    id: Any
    prompts: Prompts
    request: Request
    streamer: Any = None
    on_done: Callable[[Ticket], None] | None = None
    output: Output | None = None
    """Of one row; None as long as it is being decoded or waits."""
    cancelled: bool = False
    cache_salt: str | None = None
    """Only prompts with an equal one share keys and values."""
    isolated: bool = False
    """Whether a step of its group raised, so that it is decoded alone."""
    new: int = field(default=0, repr=False)
    added: float = field(default_factory=time.perf_counter, repr=False)
    """When it was made; this, `began` (it has a row) and `committed` (its first step is) in seconds of one clock."""
    began: float = field(default=0.0, repr=False)
    committed: float = field(default=0.0, repr=False)
    sent: int | None = field(default=None, repr=False)
    """Positions that the streamer has been given; None before it has begun."""

    @property
    def done(self) -> bool:
        """Whether it has ended, whatever the reason."""
        return self.output is not None


class Queue:
    """The prompts that wait for a slot, in the order in which they came. Any thread may use it."""

    def __init__(self) -> None:
        self.waiting: deque[Ticket] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.cause: Exception | None = None
        """Why it was closed."""
        self.copies: Counter[bytes] = Counter()
        self._number = 0

    def add(self, ticket: Ticket, alone: bool) -> None:
        """Give a ticket its number, and let it wait; `alone`: it does not count among equal ones.

        Raises:
            BatchClosed: the queue is closed.
        """
        prompts = ticket.prompts
        identity = np.asarray([ticket.request.seed, *prompts.rows[0]], dtype=np.int64).tobytes()
        key = hashlib.blake2b(identity, digest_size=16).digest()
        with self.changed:
            if self.closed:
                raise BatchClosed("this batch is closed")
            # what `paradec.core.rng.row_keys` counts in a list
            before = 0 if alone else self.copies[key]
            if not alone:
                self.copies[key] += 1
            ticket.prompts = Prompts(prompts.rows, True, prompts.starts, [before], prompts.images, among=True)
            ticket.number = self._number
            self._number += 1
            self.waiting.append(ticket)
            self.changed.notify_all()

    def first(self, most: int, alike: Callable[[Ticket, Ticket], bool]) -> list[Ticket]:
        """The ticket that has waited longest, and those right after it that are like it, `most` together."""
        found: list[Ticket] = []
        with self.changed:
            for ticket in self.waiting:
                if len(found) == most or (found and not alike(found[0], ticket)):
                    break
                found.append(ticket)
        return found

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out."""
        with self.changed:
            self.waiting.remove(ticket)

    def again(self, tickets: Sequence[Ticket]) -> None:
        """Let tickets wait at their old place: nothing that waits is older, but what came back before."""
        with self.changed:
            self.waiting = deque(sorted((*tickets, *self.waiting), key=lambda ticket: ticket.number))

    def cancelled(self) -> list[Ticket]:
        """Take out the tickets that were taken back."""
        with self.changed:
            gone = [ticket for ticket in self.waiting if ticket.cancelled]
            for ticket in gone:
                self.waiting.remove(ticket)
        return gone

    def close(self, error: Exception | None) -> None:
        """Take no more, because of `error`."""
        with self.changed:
            self.closed, self.cause = True, self.cause or error
            self.changed.notify_all()


class Group(Generic[S]):
    """Rows that share their calls: one state, whose rows are slots."""

    def __init__(self, key: Any, method: Any, state: S, row_bytes: int, model: Any, shared: Any):
        self.key, self.method, self.row_bytes = key, method, row_bytes
        self.state: S = state
        self.bound = model is not shared
        """Whether the model knows the rows' prompts: it takes rows in and gives them away as the state does."""
        self.model = select_rows(model, np.arange(state.batch)) if self.bound else model
        self.tickets: list[Ticket | None] = [None] * state.batch
        """By slot; None is free."""

    @property
    def occupied(self) -> int:
        """Slots that are taken."""
        return sum(ticket is not None for ticket in self.tickets)

    @property
    def heard(self) -> bool:
        """Whether somebody listens to a row."""
        return any(ticket is not None and ticket.streamer is not None for ticket in self.tickets)

    @property
    def width(self) -> int:
        """Columns of the canvas."""
        return int(self.state.canvas.shape[1])

    def columns(self, width: int) -> int:
        """Columns of the canvas once it has a row of `width`."""
        return self.width if width <= self.width else -(-width // WIDTHS) * WIDTHS

    @property
    def nbytes(self) -> int:
        """Bytes that its rows take, about."""
        return len(self.tickets) * self.row_bytes

    def propose(self) -> Any:
        """One step of all rows; what `commit` is to be given."""
        return self.method.step(self.model, self.state)

    def commit(self, proposal: Any) -> None:
        """Make it final."""
        self.method.commit(self.state, proposal)

    def clock(self) -> None:
        """A step is committed: the first one of some rows."""
        now = time.perf_counter()
        for ticket in self.tickets:
            if ticket is not None:
                ticket.committed = ticket.committed or now

    def told(self, slots: np.ndarray) -> None:
        """Called before the state of these slots [N] is read."""

    def stop_rows(self, slots: np.ndarray, wipe: bool = False) -> None:
        """Take slots [N] out of the steps to come; `wipe` overwrites what they have stored."""
        self.state.stop_rows(slots, wipe)

    def close(self) -> None:
        """The last row has ended."""

    def make_room(self, most: int, waiting: int, width: int, wanted_now: int = 1) -> None:
        """Have `wanted_now` free slots of so many columns; of no more than `most` slots, as many as will soon be asked
        for by those that wait, which these are among."""
        slots, columns = len(self.tickets), self.columns(width)
        occupied = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        wanted = slots
        if len(occupied) + wanted_now > slots:
            wanted = self._more(slots, most, waiting)
        elif slots > most:
            wanted = most
        if (wanted, columns) != (slots, self.width):
            self._arrange(occupied, wanted, columns)

    def _more(self, slots: int, most: int, waiting: int) -> int:
        """How many slots there are to be when all are taken."""
        return min(most, slots + max(waiting, slots // 2, 1))

    def keep(self, slots: Sequence[int]) -> None:
        """Have these slots alone."""
        if slots:
            self._arrange(slots, len(slots), self.state.extent(np.array(slots)))

    def compact(self) -> None:
        """Give back what half of the slots and more have no use for."""
        occupied = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        if occupied and 2 * len(occupied) <= len(self.tickets):
            self.keep(occupied)

    def enter(self, tickets: Sequence[Ticket], state: S, model: Any) -> list[int]:
        """Put the rows of a state into free slots."""
        slots = [slot for slot, ticket in enumerate(self.tickets) if ticket is None][: len(tickets)]
        if state is not self.state:
            if self.bound:
                replace_rows(self.model, np.array(slots), model)
            replace_rows(self.state, np.array(slots), state)
        for slot, ticket in zip(slots, tickets, strict=True):
            self.tickets[slot] = ticket
        return slots

    def _arrange(self, occupied: Sequence[int], slots: int, columns: int) -> None:
        """Have so many slots, the `occupied` ones first; the others hold copies that nobody decodes."""
        first: int = occupied[0] if occupied else 0
        rows = np.array([*occupied, *[first] * (slots - len(occupied))], np.int64)
        state = select_rows(self.state, rows, columns - self.width)
        if slots > len(occupied):
            state.stop_rows(np.arange(len(occupied), slots))
        self.state = state
        if self.bound:
            self.model = select_rows(self.model, rows)
        self.tickets = [*(self.tickets[slot] for slot in occupied), *[None] * (slots - len(occupied))]


def method_of(model: Any, request: Request) -> Any:
    """The sampler that a request is decoded with."""
    method: Any = samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler
    return sampler_on(model, method)


def refusal(model: Any, request: Request) -> str | None:
    """Why a batch cannot be refilled with such a request, in one line; None where it can be."""
    for name, instead in REFUSED.items():
        value = getattr(request, name)
        if value is not DEFAULTS[name] and value != DEFAULTS[name] and not (name == "attention" and value == "dense"):
            return f"{name}={shown(value)} does not work with batches that are refilled: {instead}"
    if request.rng != "counter":
        return "rng='reference' does not work with batches that are refilled: it draws all rows from one stream"
    method = method_of(model, request)
    if method.lock_step:
        return (
            f"sampler {method.name!r} does not work with batches that are refilled: its rows take their steps together "
            "and end together; use paradec.generate_images"
        )
    if method.family not in ("masked", "draft_verify"):
        return (
            f"sampler {method.name!r} of family {method.family!r} does not work with batches that are refilled; "
            "'masked' and 'draft_verify' do"
        )
    return None


def check_request(model: Any, request: Request) -> None:
    """Raise ValueError where a batch cannot be refilled with such a request."""
    if why := refusal(model, request):
        raise ValueError(why)


def key_of(method: Any, ticket: Ticket, state: RowState, on_device: bool) -> tuple[Any, ...]:
    """What rows must have in common to share their calls."""
    request, alone = ticket.request, ticket.number if ticket.isolated else None
    own = OWN_MASKED if method.family == "masked" and not on_device else OWN
    changes = {name: value for name, value in request.changes().items() if name not in (*own, "sampler")}
    return method, changes, getattr(state, "blocks", None), alone, on_device


def bytes_of_row(model: Any, state: RowState, width: int) -> int:
    """Bytes that one row of so many columns takes in canvas, memory and stores, about."""
    needed = state.memory.nbytes // state.batch + 32 * width
    branches = state.branches
    if state.store is not None:
        needed += model.store_bytes(branches, width, getattr(state.cache, "store_dtype", None))
    drafting = getattr(state, "drafting", None)
    if drafting is not None and drafting.store is not None:
        needed += drafting.model.store_bytes(branches, width)
    return int(needed)


def rows_of(state: RowState, slots: Sequence[int]) -> Any:
    """A copy of the state with these rows, for what is decoded of them: without what they remember and have stored."""
    light: Any = copy.copy(state)
    light.store, light.memory = None, Memory({}, state.batch, {}, state.canvas.device)
    if drafting := getattr(state, "drafting", None):
        light.drafting = replace(drafting, store=None, broken=None, parents=None)
    found = select_rows(light, np.array(slots, np.int64))
    found.store = state.store
    return found


def tell(ended: deque[Any]) -> None:
    """Call `on_done` of tickets that have ended, and take them out. Raises what they raise, once all were called."""
    raised = []
    while ended:
        with held_back():
            try:
                ticket = ended.popleft()
            except IndexError:  # another thread has told it
                break
            try:
                ticket.on_done(ticket)
            except Exception as error:
                raised.append(error)
    if raised:
        raise raised[0] if len(raised) == 1 else ExceptionGroup("on_done of several prompts", raised)
