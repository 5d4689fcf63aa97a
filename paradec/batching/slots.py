"""Parts of a batch that stays full: tickets, the queue in which they wait, and groups of slots.

`why_unsupported` says which requests a batch can be refilled with, `group_key` which of them share a group, and so
their calls.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from paradec.api.generate import make_sampler
from paradec.api.output import Output
from paradec.core.checks import shown
from paradec.core.interrupts import held_back
from paradec.core.prompts import Prompts
from paradec.core.rows import replace_rows, select_rows
from paradec.request import DEFAULTS, Request
from paradec.samplers.masked.device import step as device_step
from paradec.samplers.masked.device.rows import DeviceRows

if TYPE_CHECKING:
    from paradec.samplers.causal.state import CausalState
    from paradec.samplers.masked.state import MaskedState

RowState: TypeAlias = "MaskedState | CausalState"
"""States of the families whose rows come and go."""
S = TypeVar("S", "MaskedState", "CausalState")
KINDS = ("text", "codes", "masked image")
"""Kinds of model (`paradec.core.checks.MODELS`) whose batches can be refilled."""
ROW_FIELDS = ("max_new_tokens", "seed", "stop_strings", "chat")
"""Fields of a request in which the rows of one batch may differ."""
MASKED_ROW_FIELDS = (*ROW_FIELDS, "suppress_tokens")
"""The same for masked samplers."""
_PREFIX = "a prefix needs rows that begin together; use paradec.generate"
REFUSED = {
    "prefix": _PREFIX,
    "keep_prefix": "keys and values of ended rows are not kept; use paradec.generate",
    "share_prefix": _PREFIX,
    "attention": "sparse attention keeps one pattern for all rows; use paradec.generate",
    "generator": "give a seed: a row's draws do not depend on when it begins",
    "num_return_sequences": "give the prompt once for each answer",
    "streamer": "a streamer belongs to one prompt; give it with the prompt",
    "callback": "there is no state of a single request; give each prompt a streamer",
    "trace": "a trace records the rows that it began with; use paradec.generate",
    "progress": "count the outputs as they end",
}
"""Fields that are not supported here, and what to do instead."""
WIDTHS = 32
"""Canvases that have to grow are rounded up to a multiple of this."""


class Cancelled(Exception):
    """A prompt was cancelled before its answer was whole."""


class BatchClosed(RuntimeError):
    """The batch is closed."""


@dataclass(eq=False)
class Ticket:
    """A prompt in a `Batch`: the handle to cancel it by, with its answer once it has one."""

    number: int
    """How many prompts came before it."""
    id: Any
    prompts: Prompts
    request: Request
    sampler: Any
    """The request's, made for the model."""
    streamer: Any = None
    on_done: Callable[[Ticket], None] | None = None
    output: Output | None = None
    """One row; None while it waits or is being decoded."""
    cancelled: bool = False
    cache_salt: str | None = None
    """Only prompts with an equal one share keys and values."""
    isolated: bool = False
    """Decoded alone, because a step of its group raised."""
    new_tokens: int = field(default=0, repr=False)
    added: float = field(default_factory=time.perf_counter, repr=False)
    """Time of `add`; `began` is when it got a row, `committed` its first commit, all in seconds of one clock."""
    began: float = field(default=0.0, repr=False)
    committed: float = field(default=0.0, repr=False)
    sent: int | None = field(default=None, repr=False)
    """Positions that the streamer has received; None before the first call."""

    @property
    def done(self) -> bool:
        """Whether it has ended, whatever the reason."""
        return self.output is not None


class Queue:
    """Prompts that wait for a slot, in order of arrival. Any thread may use it."""

    def __init__(self) -> None:
        self.waiting: deque[Ticket] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.cause: Exception | None = None  # of the close
        self.copies: Counter[bytes] = Counter()
        self._number = 0

    def add(self, ticket: Ticket, alone: bool) -> None:
        """Number a ticket and append it. alone: do not count it among equal ones.

        Raises:
            BatchClosed: the queue is closed.
        """
        prompts = ticket.prompts
        identity = np.asarray([ticket.request.seed, *prompts.rows[0]], dtype=np.int64).tobytes()
        key = hashlib.blake2b(identity, digest_size=16).digest()
        with self.changed:
            if self.closed:
                raise BatchClosed("this batch is closed")
            before = 0
            if not alone:  # as `paradec.samplers.start.row_keys` counts in a list
                before = self.copies[key]
                self.copies[key] += 1
            ticket.prompts = Prompts(prompts.rows, True, prompts.starts, [before], prompts.images, among=True)
            ticket.number = self._number
            self._number += 1
            self.waiting.append(ticket)
            self.changed.notify_all()

    def first(self, most: int, alike: Callable[[Ticket, Ticket], bool]) -> list[Ticket]:
        """List the ticket that has waited longest and those right after it that are alike, `most` in all."""
        tickets: list[Ticket] = []
        with self.changed:
            for ticket in self.waiting:
                if len(tickets) == most or (tickets and not alike(tickets[0], ticket)):
                    break
                tickets.append(ticket)
        return tickets

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket."""
        with self.changed:
            self.waiting.remove(ticket)

    def requeue(self, tickets: Sequence[Ticket]) -> None:
        """Put tickets back, in order of arrival."""
        with self.changed:
            self.waiting = deque(sorted((*tickets, *self.waiting), key=lambda ticket: ticket.number))

    def remove_cancelled(self) -> list[Ticket]:
        """Remove and return the tickets that were cancelled."""
        with self.changed:
            tickets = [ticket for ticket in self.waiting if ticket.cancelled]
            for ticket in tickets:
                self.waiting.remove(ticket)
        return tickets

    def close(self, error: Exception | None) -> None:
        """Accept no more tickets. error: why."""
        with self.changed:
            self.closed, self.cause = True, self.cause or error
            self.changed.notify_all()


class Group(Generic[S]):
    """Rows that share their calls: one state, whose rows are slots."""

    def __init__(self, key: Any, sampler: Any, state: S, row_bytes: int, model: Any, shared: Any):
        self.key, self.sampler, self.row_bytes = key, sampler, row_bytes
        self.state: S = state
        self.bound = model is not shared
        """Whether the model holds the rows' prompts, and so exchanges rows as the state does."""
        self.model = select_rows(model, np.arange(state.batch)) if self.bound else model
        self.tickets: list[Ticket | None] = [None] * state.batch
        """[slots]; None is free."""

    @property
    def occupied(self) -> int:
        """Number of slots in use."""
        return sum(ticket is not None for ticket in self.tickets)

    @property
    def has_streamer(self) -> bool:
        """Whether a row has a streamer."""
        return any(ticket is not None and ticket.streamer is not None for ticket in self.tickets)

    @property
    def width(self) -> int:
        """Columns of the canvas."""
        return int(self.state.canvas.shape[1])

    def columns(self, width: int) -> int:
        """Columns that the canvas needs for a row of `width`."""
        return self.width if width <= self.width else -(-width // WIDTHS) * WIDTHS

    @property
    def nbytes(self) -> int:
        """Approximate bytes of its rows."""
        return len(self.tickets) * self.row_bytes

    def propose(self) -> Any:
        """Take one step of all rows; `commit` takes the result."""
        return self.sampler.step(self.model, self.state)

    def commit(self, proposal: Any) -> None:
        """Make it final."""
        self.sampler.commit(self.state, proposal)

    def record_time(self) -> None:
        """Note the time of rows' first commit."""
        now = time.perf_counter()
        for ticket in self.tickets:
            if ticket is not None:
                ticket.committed = ticket.committed or now

    def sync(self, slots: np.ndarray) -> None:
        """Bring the state of slots [N] up to date; called before it is read."""

    def stop_rows(self, slots: np.ndarray, wipe: bool = False) -> None:
        """Stop decoding slots [N]. wipe: overwrite what they have stored."""
        self.state.stop_rows(slots, wipe)

    def close(self) -> None:
        """Called when the last row has ended."""

    def make_room(self, most: int, waiting: int, width: int, wanted_now: int = 1) -> None:
        """Make `wanted_now` free slots of `width` columns, and some for others that wait, up to `most` slots in all."""
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
        """Number of slots to have when all are taken."""
        return min(most, slots + max(waiting, slots // 2, 1))

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all slots but these."""
        if slots:
            self._arrange(slots, len(slots), self.state.extent(np.array(slots)))

    def compact(self) -> None:
        """Drop free slots where they are at least half."""
        occupied = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        if occupied and 2 * len(occupied) <= len(self.tickets):
            self.keep(occupied)

    def enter(self, tickets: Sequence[Ticket], state: S, model: Any) -> list[int]:
        """Put the rows of a state into free slots; return these."""
        slots = [slot for slot, ticket in enumerate(self.tickets) if ticket is None][: len(tickets)]
        if state is not self.state:
            if self.bound:
                replace_rows(self.model, np.array(slots), model)
            replace_rows(self.state, np.array(slots), state)
        for slot, ticket in zip(slots, tickets, strict=True):
            self.tickets[slot] = ticket
        return slots

    def _arrange(self, occupied: Sequence[int], slots: int, columns: int) -> None:
        """Change the number of slots, the `occupied` ones first; the others hold copies that nobody decodes."""
        first: int = occupied[0] if occupied else 0
        rows = np.array([*occupied, *[first] * (slots - len(occupied))], np.int64)
        state = select_rows(self.state, rows, columns - self.width)
        if slots > len(occupied):
            state.stop_rows(np.arange(len(occupied), slots))
        self.state = state
        if self.bound:
            self.model = select_rows(self.model, rows)
        self.tickets = [*(self.tickets[slot] for slot in occupied), *[None] * (slots - len(occupied))]


class DeviceGroup(Group["MaskedState"]):
    """Rows that share their calls on the device (`compile=True`). The state on the host is updated when it is read. All
    slots are made at once: a graph is captured for a number of them."""

    rows: DeviceRows | None = None  # made for the first row

    def __init__(self, *arguments: Any, capture: bool):
        super().__init__(*arguments)
        self.capture = capture

    def propose(self) -> Any:
        assert self.rows is not None
        with held_back():  # between two tensors the engine would not be at a commit
            return self.rows.step()

    def commit(self, proposal: Any) -> None:
        self.state.finish(np.flatnonzero(~proposal))

    def sync(self, slots: np.ndarray) -> None:
        assert self.rows is not None
        self.rows.write_back(self.state, slots)

    def stop_rows(self, slots: np.ndarray, wipe: bool = False) -> None:
        assert self.rows is not None
        self.rows.stop_rows(slots, wipe)
        self.state.stop_rows(slots)

    def enter(self, tickets: Sequence[Ticket], state: MaskedState, model: Any) -> list[int]:
        slots = super().enter(tickets, state, model)
        if self.rows is None:
            self.rows = DeviceRows(self.sampler, self.model, state, len(self.tickets), self.capture)
        (slot,) = slots  # rows of a device step begin one by one
        self.rows.replace_row(slot, state)
        return slots

    def make_room(self, most: int, waiting: int, width: int, wanted_now: int = 1) -> None:
        if self.rows is None and most > len(self.tickets):
            self._arrange([], most, self.width)
        super().make_room(most, waiting, width, wanted_now)

    def compact(self) -> None:
        """Keep all slots until the last row has ended."""

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()

    def _more(self, slots: int, most: int, waiting: int) -> int:
        return most

    def _arrange(self, occupied: Sequence[int], slots: int, columns: int) -> None:
        if self.rows is not None and slots != len(self.tickets):
            self.rows.arrange(np.array(occupied), slots)
        elif self.rows is not None:
            occupied = range(slots)  # rows stay where they are
        super()._arrange(occupied, slots, columns)


def can_run_on_device(sampler: Any, model: Any, request: Request, state: Any, uncapturable: str) -> bool:
    """Whether a row's steps run on the device. uncapturable: why no graph could be captured, if so."""
    if not request.compile:
        return False
    if why := uncapturable or device_step.refusal(sampler, model, state):
        warnings.warn(f"compile=True has no effect: {why}", stacklevel=2)
    return not why


def why_unsupported(model: Any, request: Request, sampler: Any = None) -> str | None:
    """Say in one line why a batch cannot be refilled with a request; None where it can be.

    Args:
        sampler: the request's, where it is made already.
    """
    for name, instead in REFUSED.items():
        value = getattr(request, name)
        if value is not DEFAULTS[name] and value != DEFAULTS[name] and not (name == "attention" and value == "dense"):
            return f"{name}={shown(value)} does not work with batches that are refilled: {instead}"
    if request.rng != "counter":
        return "rng='reference' does not work with batches that are refilled: it draws all rows from one stream"
    sampler = sampler or make_sampler(model, request.sampler)
    if sampler.lock_step:
        return (
            f"sampler {sampler.name!r} does not work with batches that are refilled: its rows take their steps "
            "together and end together; use paradec.generate_images"
        )
    if sampler.family not in ("masked", "draft_verify"):
        return (
            f"sampler {sampler.name!r} of family {sampler.family!r} does not work with batches that are refilled; "
            "'masked' and 'draft_verify' do"
        )
    return None


def can_start_together(model: Any, first: Ticket, second: Ticket) -> bool:
    """Whether two prompts may begin as rows of one request: they differ in nothing but their ids and seeds, and
    neither has what is laid out for all rows of a request (holes, pictures), is decoded alone, or steps on the
    device."""
    for ticket in (first, second):
        if ticket.isolated or ticket.request.compile or ticket.prompts.images is not None:
            return False
        if model.facts.hole_id in ticket.prompts.rows[0]:
            return False
    if first.request is second.request:
        return True
    return first.request.changes() | {"seed": None} == second.request.changes() | {"seed": None}


def join_tickets(tickets: Sequence[Ticket]) -> tuple[Prompts, Request]:
    """Make one request, with a row for each, of tickets that can start together."""
    first = tickets[0]
    if len(tickets) == 1:
        return first.prompts, first.request
    parts = [ticket.prompts for ticket in tickets]
    starts = [start for part in parts for start in part.starts]
    before = [number for part in parts for number in part.before or ()]
    prompts = Prompts([part.rows[0] for part in parts], False, starts, before, among=True)
    seeds: Any = tuple(ticket.request.seed for ticket in tickets)
    return prompts, first.request if len({*seeds}) == 1 else replace(first.request, seed=seeds)


def group_key(ticket: Ticket, state: RowState, on_device: bool) -> tuple[Any, ...]:
    """What rows must have in common to share their calls."""
    request, sampler = ticket.request, ticket.sampler
    differing = MASKED_ROW_FIELDS if sampler.family == "masked" and not on_device else ROW_FIELDS
    fields = {name: value for name, value in request.changes().items() if name not in (*differing, "sampler")}
    return sampler, fields, getattr(state, "blocks", None), ticket.number if ticket.isolated else None, on_device


def bytes_of_row(model: Any, state: RowState, width: int) -> int:
    """Approximate bytes of one row of `width` columns in canvas, memory and stores."""
    needed = state.memory.nbytes // state.batch + 32 * width
    branches = state.branches
    if state.store is not None:
        needed += model.store_bytes(branches, width, getattr(state.cache, "store_dtype", None))
    drafting = getattr(state, "drafting", None)
    if drafting is not None and drafting.store is not None:
        needed += drafting.model.store_bytes(branches, width)
    return int(needed)


def call_on_done(tickets: deque[Any]) -> None:
    """Call `on_done` of tickets that have ended, and remove them. Raises what they raise, once all were called."""
    errors = []
    while tickets:
        with held_back():
            try:
                ticket = tickets.popleft()
            except IndexError:  # another thread has called it
                break
            try:
                ticket.on_done(ticket)
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("on_done of several prompts", errors)
