"""Rows that come and go on the device: a `DeviceEngine` whose slots are refilled (`paradec.batching`).

The state of the group stays on the host, and is told of a row when somebody asks for it: when it has ended, when it is
taken back, or before a streamer reads it. What the engine holds is larger than its rows need (`StepLayout.refilled`),
so that graphs serve the rows that come later too; one that does not fit moves all of them into a larger engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paradec.core.protocol import NotFinite
from paradec.core.rows import clear_rows
from paradec.samplers.masked.device.engine import DeviceEngine
from paradec.samplers.masked.device.graphs import StepLayout, block_table
from paradec.samplers.masked.device.step import fingerprint, give_back, take_out
from paradec.samplers.masked.state import MaskedState


class DeviceRows:
    """The slots of a group, on the device.

    Args:
        sampler, model: of all its rows.
        state: a request of one row that `device_step.refusal` has nothing against, and that nobody has stepped.
        slots: rows at most.
        capture: replay CUDA graphs; False runs the same steps uncaptured, on any device.
    """

    def __init__(self, sampler: Any, model: Any, state: MaskedState, slots: int, capture: bool = True):
        self.sampler, self.model, self.capture = sampler, model, capture
        self.engine, self.module = self._engine(self._layout(state, slots))

    @torch.inference_mode()
    def replace_row(self, slot: int, state: MaskedState) -> None:
        """Let a row into a slot, which nobody has stepped."""
        table, old = block_table(state), self.engine
        layout = old.layout.holding(self._layout(state, old.batch))
        if layout != old.layout or fingerprint(self.model) != self.module:  # graphs hold on to the weights that were
            self._move(np.arange(old.batch), layout)
        self.engine.replace_rows(np.array([slot]), state, table)

    @torch.inference_mode()
    def arrange(self, rows: np.ndarray, slots: int) -> None:
        """Have so many slots, of which the first are the `rows` [N]."""
        self._move(rows, replace(self.engine.layout, batch=slots))

    @torch.inference_mode()
    def step(self) -> np.ndarray:
        """Take one step of the running rows. Returns [B] bool, on the host: those that are running still.

        Raises:
            NotFinite: for the rows of which logits were NaN or infinite; the others have taken their step.
            RuntimeError: as `MaskedSampler.commit`.
        """
        engine = self.engine
        whole, part, widest, _ = engine.flags.tolist()
        if whole + part:
            engine.advance(whole, part, widest)
        failed, stuck, running = torch.stack((engine.failed, engine.stuck.long(), engine.running.long())).cpu().numpy()
        if (rows := np.flatnonzero(failed >= 0)).size:
            engine.failed.fill_(-1)
            raise NotFinite.at_steps(rows, failed[rows])
        if stuck.any():
            raise RuntimeError(f"sampler {self.sampler.name!r} committed nothing for row {int(stuck.argmax())}")
        return running > 0

    @torch.inference_mode()
    def write_back(self, state: MaskedState, rows: np.ndarray) -> None:
        """Tell the host's state what was decoded of `rows` [N]."""
        if rows.size:
            self.engine.write_back(state, rows)

    @torch.inference_mode()
    def stop_rows(self, rows: np.ndarray, wipe: bool = False) -> None:
        """Take `rows` [N] out of the steps to come; `wipe` overwrites what they have stored."""
        self.engine.stop_rows(rows)
        if wipe and self.engine.store is not None:
            clear_rows(self.engine.store, rows)

    def close(self) -> None:
        """Leave the engine and its graphs to the model, for the next rows of their kind."""
        give_back(self.model, self.engine, self.module)

    def _layout(self, state: MaskedState, slots: int) -> StepLayout:
        return StepLayout.of(self.sampler, state, block_table(state)[0], self.capture).refilled(slots)

    @torch.inference_mode()
    def _engine(self, layout: StepLayout) -> tuple[DeviceEngine, Any]:
        engine, module = take_out(self.model, layout)
        engine.empty(self.model)
        return engine, module

    def _move(self, rows: np.ndarray, layout: StepLayout) -> None:
        """Go on with `rows` [N] in an engine of another layout."""
        old = self.engine
        self.engine, self.module = self._engine(layout)
        self.engine.take_over(old, rows)
