"""The slots of a batch that stays full, and the tickets that hold them: rows that share their calls, in one state or on
the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from torch import Tensor

from paradec.api.output import Output
from paradec.core.interrupts import held_back
from paradec.core.prompts import Prompts
from paradec.request import Request
from paradec.samplers.masked.device.rows import DeviceRows

WIDTHS = 32
"""Canvases that have to grow are rounded up to a multiple of this."""


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
    isolated: bool = False
    """Whether a step of its group raised, so that it is decoded alone."""
    new: int = field(default=0, repr=False)
    began: float = field(default=0.0, repr=False)
    sent: int | None = field(default=None, repr=False)
    """Positions that the streamer has been given; None before it has begun."""

    @property
    def done(self) -> bool:
        """Whether it has ended, whatever the reason."""
        return self.output is not None


@dataclass
class Seen:
    """What streamers are given of a group, read from the device once for all rows."""

    canvas: Tensor
    """[B, L] int64, on the host."""
    final: np.ndarray
    """[B] int64, of `State.final`."""

    @classmethod
    def of(cls, group: Group) -> Self | None:
        """None where nobody listens."""
        if all(ticket is None or ticket.streamer is None for ticket in group.tickets):
            return None
        group.told(np.arange(len(group.tickets)))
        return cls(group.state.canvas.cpu(), group.state.final(np.arange(len(group.tickets))))


class Group:
    """Rows that share their calls: one state, whose rows are slots."""

    def __init__(self, key: Any, method: Any, state: Any, row_bytes: int, model: Any, shared: Any):
        self.key, self.method, self.state, self.row_bytes = key, method, state, row_bytes
        self.bound = model is not shared
        """Whether the model knows the rows' prompts: it takes rows in and gives them away as the state does."""
        self.model = model.taken(np.arange(state.batch)) if self.bound else model
        self.tickets: list[Ticket | None] = [None] * state.batch
        """By slot; None is free."""

    @property
    def occupied(self) -> int:
        """Slots that are taken."""
        return sum(ticket is not None for ticket in self.tickets)

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

    def told(self, slots: np.ndarray) -> None:
        """Called before the state of these slots [N] is read."""

    def dismiss(self, slots: np.ndarray, wipe: bool = False) -> None:
        """Take slots [N] out of the steps to come; `wipe` overwrites what they have stored."""
        self.state.dismiss(slots, wipe)

    def close(self) -> None:
        """The last row has ended."""

    def make_room(self, most: int, waiting: int, width: int) -> None:
        """Have a free slot of so many columns; of no more than `most` slots, as many as will soon be asked for."""
        slots, columns = len(self.tickets), self.columns(width)
        occupied = [slot for slot, ticket in enumerate(self.tickets) if ticket is not None]
        wanted = slots
        if len(occupied) == slots:
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

    def enter(self, ticket: Ticket, state: Any, model: Any) -> int:
        """Put a row into a free slot."""
        slot = self.tickets.index(None)
        if state is not self.state:
            if self.bound:
                self.model.put(np.array([slot]), model)
            self.state.put(np.array([slot]), state)
        self.tickets[slot] = ticket
        return slot

    def _arrange(self, occupied: Sequence[int], slots: int, columns: int) -> None:
        """Have so many slots, the `occupied` ones first; the others hold copies that nobody decodes."""
        first = occupied[0] if occupied else 0
        rows = np.array([*occupied, *[first] * (slots - len(occupied))], np.int64)
        state = self.state.taken(rows, columns)
        if slots > len(occupied):
            state.dismiss(np.arange(len(occupied), slots))
        self.state = state
        if self.bound:
            self.model = self.model.taken(rows)
        self.tickets = [*(self.tickets[slot] for slot in occupied), *[None] * (slots - len(occupied))]


class DeviceGroup(Group):
    """Rows that share their calls on the device (`compile=True`). The state on the host is told of a row when somebody
    reads it. All slots are made at once: a graph is captured for a number of them."""

    rows: DeviceRows | None = None
    """Made for the first row."""

    def __init__(self, *given: Any, capture: bool):
        super().__init__(*given)
        self.capture = capture

    def propose(self) -> Any:
        assert self.rows is not None
        with held_back():  # between two tensors the engine would not be at a commit
            return self.rows.step()

    def commit(self, proposal: Any) -> None:
        self.state.finish(np.flatnonzero(~proposal))

    def told(self, slots: np.ndarray) -> None:
        assert self.rows is not None
        self.rows.write_back(self.state, slots)

    def dismiss(self, slots: np.ndarray, wipe: bool = False) -> None:
        assert self.rows is not None
        self.rows.dismiss(slots, wipe)
        self.state.dismiss(slots)

    def enter(self, ticket: Ticket, state: Any, model: Any) -> int:
        slot = super().enter(ticket, state, model)
        if self.rows is None:
            self.rows = DeviceRows(self.method, self.model, state, len(self.tickets), self.capture)
        self.rows.put(slot, state)
        return slot

    def make_room(self, most: int, waiting: int, width: int) -> None:
        if self.rows is None and most > len(self.tickets):
            self._arrange([], most, self.width)
        super().make_room(most, waiting, width)

    def compact(self) -> None:
        """Nothing is given back before the last row has ended."""

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
