"""Rows of a batch that share their steps on the device: `compile=True`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from paradec.batching.slots import Group, Ticket
from paradec.core.interrupts import held_back
from paradec.samplers.masked.device import step as device_step
from paradec.samplers.masked.device.rows import DeviceRows
from paradec.samplers.masked.state import MaskedState


class DeviceGroup(Group[MaskedState]):
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

    def stop_rows(self, slots: np.ndarray, wipe: bool = False) -> None:
        assert self.rows is not None
        self.rows.stop_rows(slots, wipe)
        self.state.stop_rows(slots)

    def enter(self, tickets: Sequence[Ticket], state: MaskedState, model: Any) -> list[int]:
        slots = super().enter(tickets, state, model)
        if self.rows is None:
            self.rows = DeviceRows(self.method, self.model, state, len(self.tickets), self.capture)
        (slot,) = slots  # rows of a device step begin one by one
        self.rows.replace_row(slot, state)
        return slots

    def make_room(self, most: int, waiting: int, width: int, wanted_now: int = 1) -> None:
        if self.rows is None and most > len(self.tickets):
            self._arrange([], most, self.width)
        super().make_room(most, waiting, width, wanted_now)

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


def steps_on_device(method: Any, model: Any, request: Any, state: Any, uncapturable: str) -> bool:
    """Whether a row's steps are taken on the device. uncapturable: why no graph could be captured, if so."""
    if not request.compile:
        return False
    why = uncapturable or device_step.refusal(method, model, state)
    if why:
        warnings.warn(f"compile=True has no effect: {why}", stacklevel=2)
    return not why
