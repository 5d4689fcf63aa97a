"""Parts of a `Batch`: tickets, their queue, and groups of slots."""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from paradec.api.generate import make_sampler
from paradec.api.output import Output
from paradec.core.checks import short_repr
from paradec.core.interrupts import hold_interrupt
from paradec.core.prompts import Prompts
from paradec.core.rows import replace_rows, select_rows
from paradec.request import DEFAULTS, Request
from paradec.samplers.masked.device import step as device_step
from paradec.samplers.masked.device.rows import DeviceRows

if TYPE_CHECKING:
    from paradec.samplers.causal.state import CausalState
    from paradec.samplers.masked.state import MaskedState

RowState: TypeAlias = "MaskedState | CausalState"
S = TypeVar("S", "MaskedState", "CausalState")
KINDS = ("text", "codes", "masked image")
"""Kinds of model (`paradec.core.checks.MODELS`) whose batches can be refilled with new rows."""
ROW_FIELDS = ("max_new_tokens", "seed", "stop_strings", "chat")
"""Request fields that may differ between rows of one group."""
MASKED_ROW_FIELDS = (*ROW_FIELDS, "suppress_tokens")
_WHY_NO_PREFIX = "a prefix needs rows that begin together; use paradec.generate"
REFUSED = {
    "prefix": _WHY_NO_PREFIX,
    "keep_prefix": "keys and values of ended rows are not kept; use paradec.generate",
    "share_prefix": _WHY_NO_PREFIX,
    "attention": "sparse attention keeps one pattern for all rows; use paradec.generate",
    "generator": "give a seed: a row's draws do not depend on when it begins",
    "num_return_sequences": "give the prompt once for each answer",
    "streamer": "a streamer belongs to one prompt; give it with the prompt",
    "callback": "there is no state of a single request; give each prompt a streamer",
    "trace": "a trace records a fixed set of rows; use paradec.generate",
    "progress": "count the outputs as they end",
}
"""Unsupported request fields, with advice."""
WIDTH_UNIT = 32  # the width of a growing canvas is rounded up to a multiple of this


class Cancelled(Exception):
    """A prompt was cancelled before its answer was complete."""


class BatchClosed(RuntimeError):
    """The batch is closed."""


@dataclass(eq=False)
class Ticket:
    """A prompt in a `Batch`: the handle for `cancel`, and later the output."""

    number: int  # in order of arrival
    id: Any
    prompts: Prompts
    request: Request
    sampler: Any  # the request's sampler, adapted to the model
    streamer: Any = None
    on_done: Callable[[Ticket], None] | None = None
    output: Output | None = None
    """Output of one row; None until the row ends."""
    cancelled: bool = False
    cache_salt: str | None = None  # only prompts with the same salt share keys and values
    isolated: bool = False  # decoded alone, because a step of its group raised
    num_new_tokens: int = field(default=0, repr=False)
    add_time: float = field(default_factory=time.perf_counter, repr=False)
    """`time.perf_counter`, in seconds, when the ticket was added; the other times use the same clock."""
    start_time: float = field(default=0.0, repr=False)
    first_commit_time: float = field(default=0.0, repr=False)
    sent: int | None = field(default=None, repr=False)
    """Number of positions that the streamer has received; None before its first call."""

    @property
    def done(self) -> bool:
        """Whether the prompt has ended, for any reason."""
        return self.output is not None


class Queue:
    """Waiting prompts, in order of arrival; thread-safe."""

    def __init__(self) -> None:
        self.waiting: deque[Ticket] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.cause: Exception | None = None  # why it was closed
        self.copies: Counter[bytes] = Counter()  # number of earlier prompts with equal seed and ids, by their hash
        self._number = 0

    def add(self, ticket: Ticket, alone: bool) -> None:
        """Number a ticket and append it. alone: draw as if no equal prompt had come before. Raises BatchClosed."""
        prompts = ticket.prompts
        identity = np.asarray([ticket.request.seed, *prompts.rows[0]], dtype=np.int64).tobytes()
        key = hashlib.blake2b(identity, digest_size=16).digest()
        with self.changed:
            self.check_open()
            copy_index = 0
            if not alone:  # count as `paradec.samplers.start.row_keys` does for a list of prompts
                copy_index = self.copies[key]
                self.copies[key] += 1
            ticket.prompts = Prompts(prompts.rows, True, prompts.starts, [copy_index], prompts.images, joins_batch=True)
            ticket.number = self._number
            self._number += 1
            self.waiting.append(ticket)
            self.changed.notify_all()

    def check_open(self) -> None:
        """Raise BatchClosed with the cause if the queue is closed."""
        if self.closed:
            raise BatchClosed(str(self.cause or "decoding has stopped: the batch was closed"))

    def peek(self, max_tickets: int, can_join: Callable[[Ticket, Ticket], bool]) -> list[Ticket]:
        """List the first ticket and those directly after it that can join it, without removing them."""
        tickets: list[Ticket] = []
        with self.changed:
            for ticket in self.waiting:
                if len(tickets) == max_tickets or (tickets and not can_join(tickets[0], ticket)):
                    break
                tickets.append(ticket)
        return tickets

    def remove(self, ticket: Ticket) -> None:
        with self.changed:
            self.waiting.remove(ticket)

    def requeue(self, tickets: Sequence[Ticket]) -> None:
        """Put tickets back into the queue, in order of arrival."""
        with self.changed:
            self.waiting = deque(sorted((*tickets, *self.waiting), key=lambda ticket: ticket.number))

    def close(self, error: Exception | None) -> None:
        """Accept no more tickets. error: the reason, or None."""
        with self.changed:
            self.closed, self.cause = True, self.cause or error
            self.changed.notify_all()


class Group(Generic[S]):
    """Rows that share model calls: the slots of one state. model: `shared`, which is the batch's model, or a copy."""

    def __init__(self, key: Any, sampler: Any, state: S, row_bytes: int, model: Any, shared: Any):
        self.key, self.sampler, self.row_bytes = key, sampler, row_bytes
        self.state: S = state
        self.has_row_model = model is not shared
        """Whether the model stores the rows' prompts. Then rows of the model and of the state are replaced together."""
        self.model = select_rows(model, np.arange(state.batch)) if self.has_row_model else model
        self.tickets: list[Ticket | None] = [None] * state.batch
        """The ticket of each slot; None is a free slot."""

    @property
    def occupied(self) -> int:
        return sum(ticket is not None for ticket in self.tickets)

    @property
    def width(self) -> int:
        return int(self.state.canvas.shape[1])

    def columns_for(self, width: int) -> int:
        """Return the number of canvas columns after a row of `width` columns enters."""
        return self.width if width <= self.width else -(-width // WIDTH_UNIT) * WIDTH_UNIT

    def propose(self) -> Any:
        """Run one step of all rows; return the proposal for `commit`."""
        return self.sampler.step(self.model, self.state)

    def commit(self, proposal: Any) -> None:
        self.sampler.commit(self.state, proposal)

    def sync(self, slots: np.ndarray) -> None:
        """Update the host state of slots [N] before it is read."""

    def stop_rows(self, slots: np.ndarray, wipe: bool = False) -> None:
        """Stop decoding slots [N]. wipe: also overwrite their keys and values."""
        self.state.stop_rows(slots, wipe)

    def close(self) -> None:
        """Release resources after the last row."""

    def make_room(self, max_slots: int, num_waiting: int, width: int, num_free: int = 1) -> None:
        """Make `num_free` slots of `width` columns free; a resize adds more for `num_waiting`, up to `max_slots`."""
        num_slots, new_width = len(self.tickets), self.columns_for(width)
        occupied = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        if len(occupied) + num_free > num_slots:
            num_slots = self._next_size(num_slots, max_slots, num_waiting)
        num_slots = min(num_slots, max_slots)
        if (num_slots, new_width) != (len(self.tickets), self.width):
            self._resize(occupied, num_slots, new_width)

    def _next_size(self, num_slots: int, max_slots: int, num_waiting: int) -> int:
        return min(max_slots, num_slots + max(num_waiting, num_slots // 2, 1))

    def keep_slots(self, slots: Sequence[int]) -> None:
        if slots:
            self._resize(slots, len(slots), self.state.num_columns(np.array(slots)))

    def compact(self) -> None:
        """Drop free slots if at least half of the slots are free."""
        occupied = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        if occupied and 2 * len(occupied) <= len(self.tickets):
            self.keep_slots(occupied)

    def insert_rows(self, tickets: Sequence[Ticket], state: S, model: Any) -> list[int]:
        """Put the rows of a state into free slots; return the slots."""
        slots = [slot for slot, ticket in enumerate(self.tickets) if ticket is None][: len(tickets)]
        if state is not self.state:
            if self.has_row_model:
                replace_rows(self.model, np.array(slots), model)
            replace_rows(self.state, np.array(slots), state)
        for slot, ticket in zip(slots, tickets, strict=True):
            self.tickets[slot] = ticket
        return slots

    def _resize(self, occupied: Sequence[int], num_slots: int, width: int) -> None:
        """Resize to `num_slots` slots: the `occupied` slots, then free slots, which hold stopped copies of a row."""
        first: int = occupied[0] if occupied else 0
        rows = np.array([*occupied, *[first] * (num_slots - len(occupied))], np.int64)
        state = select_rows(self.state, rows, width - self.width)
        if num_slots > len(occupied):
            state.stop_rows(np.arange(len(occupied), num_slots))
        self.state = state
        if self.has_row_model:
            self.model = select_rows(self.model, rows)
        self.tickets = [*(self.tickets[slot] for slot in occupied), *[None] * (num_slots - len(occupied))]


class DeviceGroup(Group["MaskedState"]):
    """A group whose steps run on the device (`compile=True`). `sync` updates the host state before it is read.

    All slots are made at once, since a graph is captured for a fixed number of slots.
    """

    rows: DeviceRows | None = None  # made when the first row enters

    def __init__(self, *arguments: Any, capture: bool):
        super().__init__(*arguments)
        self.capture = capture

    def propose(self) -> Any:
        assert self.rows is not None
        with hold_interrupt():  # an interrupt in the middle would leave some of the step's writes undone
            return self.rows.step()

    def commit(self, proposal: Any) -> None:
        self.state.finish(np.flatnonzero(~proposal))  # proposal: [slots] bool, rows that still run

    def sync(self, slots: np.ndarray) -> None:
        assert self.rows is not None
        self.rows.write_back(self.state, slots)

    def stop_rows(self, slots: np.ndarray, wipe: bool = False) -> None:
        assert self.rows is not None
        self.rows.stop_rows(slots, wipe)
        self.state.stop_rows(slots)

    def insert_rows(self, tickets: Sequence[Ticket], state: MaskedState, model: Any) -> list[int]:
        slots = super().insert_rows(tickets, state, model)
        if self.rows is None:
            self.rows = DeviceRows(self.sampler, self.model, state, len(self.tickets), self.capture)
        (slot,) = slots  # rows with `compile` enter one at a time
        self.rows.replace_row(slot, state)
        return slots

    def make_room(self, max_slots: int, num_waiting: int, width: int, num_free: int = 1) -> None:
        if self.rows is None and max_slots > len(self.tickets):
            self._resize([], max_slots, self.width)
        super().make_room(max_slots, num_waiting, width, num_free)

    def compact(self) -> None:
        """Do nothing: all slots stay until the last row ends."""

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()

    def _next_size(self, num_slots: int, max_slots: int, num_waiting: int) -> int:
        return max_slots

    def _resize(self, occupied: Sequence[int], num_slots: int, width: int) -> None:
        if self.rows is not None and num_slots != len(self.tickets):
            self.rows.arrange(np.array(occupied), num_slots)
        elif self.rows is not None:
            occupied = range(num_slots)  # rows stay where they are
        super()._resize(occupied, num_slots, width)


def can_run_on_device(sampler: Any, model: Any, request: Request, state: Any, uncapturable: str) -> bool:
    """Whether a row's steps run on the device. uncapturable: why an earlier graph capture failed, or ""."""
    if not request.compile:
        return False
    if why := uncapturable or device_step.why_unsupported(sampler, model, state):
        warnings.warn(f"compile=True has no effect: {why}", stacklevel=2)
    return not why


def why_unsupported(model: Any, request: Request, sampler: Any = None) -> str | None:
    """Return why a request's rows cannot be put into a running batch, or None. sampler: None makes the request's."""
    for name, advice in REFUSED.items():
        value = getattr(request, name)
        if value is not DEFAULTS[name] and value != DEFAULTS[name] and not (name == "attention" and value == "dense"):
            return f"{name}={short_repr(value)} does not work with batches that are refilled: {advice}"
    if request.rng != "counter":
        return "rng='reference' does not work with batches that are refilled: it draws all rows from one stream"
    sampler = sampler or make_sampler(model, request.sampler)
    reason = f"sampler {sampler.name!r} of family {sampler.family!r} does not work with batches that are refilled"
    if sampler.lock_step:
        return f"{reason}: its rows take their steps together and end together; use paradec.generate_images"
    return None if sampler.family in ("masked", "draft_verify") else f"{reason}; 'masked' and 'draft_verify' do"


def group_key(ticket: Ticket, state: RowState, on_device: bool) -> tuple[Any, ...]:
    """Return the key of a ticket's group: rows with equal keys share model calls."""
    request, sampler = ticket.request, ticket.sampler
    row_fields = MASKED_ROW_FIELDS if sampler.family == "masked" and not on_device else ROW_FIELDS
    fields = {name: value for name, value in request.changes().items() if name not in (*row_fields, "sampler")}
    grid = getattr(ticket, "grid", None)  # only image tickets have a grid
    return sampler, fields, grid, getattr(state, "blocks", None), ticket.number if ticket.isolated else None, on_device


def estimate_row_bytes(model: Any, state: RowState, width: int) -> int:
    """Estimate the bytes of one row: `width` columns in the canvas, the sampler's memory and key/value stores."""
    nbytes = state.memory.nbytes // state.batch + 32 * width
    branches = state.branches
    if state.store is not None:
        nbytes += model.store_bytes(branches, width, getattr(state.cache, "store_dtype", None))
    drafting = getattr(state, "drafting", None)
    if drafting is not None and drafting.store is not None:
        nbytes += drafting.model.store_bytes(branches, width)
    return int(nbytes)


def call_on_done(tickets: deque[Any]) -> None:
    """Call `on_done` of ended tickets and remove them. Raises the callbacks' exceptions after all calls."""
    errors = []
    while tickets:
        with hold_interrupt():
            try:
                ticket = tickets.popleft()
            except IndexError:  # another thread took the last ticket
                break
            try:
                ticket.on_done(ticket)
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("on_done of several prompts", errors)
