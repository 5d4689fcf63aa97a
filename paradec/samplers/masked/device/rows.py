"""A `DeviceEngine` whose slots are refilled (`paradec.batching`).

A row is copied to the group's state on the host only when it ends or is read by a streamer. The engine is
larger than its rows need (`StepLayout.for_slots`), so that its graphs serve later rows. If a row does not fit, all rows
move into a larger engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paradec.core.protocol import NotFinite
from paradec.core.rows import clear_rows
from paradec.samplers.masked.device.graphs import SIZES, StepLayout, block_table
from paradec.samplers.masked.device.step import fingerprint, return_engine, take_engine
from paradec.samplers.masked.state import MaskedState


class DeviceRows:
    """Slots of a group on the device, for rows of one sampler and model. state: the first row, before its first step;
    `device.step.why_unsupported` must accept this state. capture: whether to replay CUDA graphs."""

    def __init__(self, sampler: Any, model: Any, state: MaskedState, num_slots: int, capture: bool = True):
        self.sampler, self.model, self.capture = sampler, model, capture
        layout = StepLayout.from_state(sampler, state, block_table(state)[0], capture)
        self._make_engine(layout.for_slots(num_slots))

    @torch.inference_mode()
    def replace_row(self, slot: int, state: MaskedState) -> None:
        """Put a row, which has not run any step, into a slot."""
        table, engine = block_table(state), self.engine
        layout = StepLayout.from_state(self.sampler, state, table[0], self.capture)
        row_layout, layout = layout.for_slots(engine.batch), engine.layout
        sizes: Any = {name: max(getattr(layout, name), getattr(row_layout, name)) for name in SIZES}
        layout = replace(layout, **sizes, holes=layout.holes or row_layout.holes)
        if layout != engine.layout or fingerprint(self.model) != self.model_key:  # graphs have old shapes or weights
            self._move_rows(np.arange(engine.batch), layout)
        self.engine.replace_rows(np.array([slot]), state, table)

    @torch.inference_mode()
    def arrange(self, rows: np.ndarray, num_slots: int) -> None:
        """Change the number of slots. `rows` [N] move to the first slots; other rows are dropped."""
        self._move_rows(rows, replace(self.engine.layout, batch=num_slots))

    @torch.inference_mode()
    def step(self) -> np.ndarray:
        """Run one step of the running rows. Returns which rows still run: [B] bool, on the host. Raises NotFinite after
        the step for rows with NaN or infinite logits, RuntimeError as `MaskedSampler.commit`."""
        engine = self.engine
        num_full, num_window, widest, _ = engine.flags.tolist()
        if num_full + num_window:
            engine.advance(num_full, num_window, widest)
        failed, stuck, running = torch.stack((engine.failed, engine.stuck.long(), engine.running.long())).cpu().numpy()
        if (rows := np.flatnonzero(failed >= 0)).size:
            engine.failed.fill_(-1)
            raise NotFinite.at_steps(rows, failed[rows])
        if stuck.any():
            raise RuntimeError(f"sampler {self.sampler.name!r} committed nothing for row {int(stuck.argmax())}")
        return running > 0

    @torch.inference_mode()
    def write_back(self, state: MaskedState, rows: np.ndarray) -> None:
        if rows.size:
            self.engine.write_back(state, rows)

    @torch.inference_mode()
    def stop_rows(self, rows: np.ndarray, wipe: bool = False) -> None:
        """Stop `rows` [N]; `wipe` overwrites their stored keys and values."""
        self.engine.stop_rows(rows)
        if wipe and self.engine.store is not None:
            clear_rows(self.engine.store, rows)

    def close(self) -> None:
        """Return the engine and its graphs to the model, for later rows with the same layout."""
        return_engine(self.model, self.engine, self.model_key)

    @torch.inference_mode()
    def _make_engine(self, layout: StepLayout) -> None:
        self.engine, self.model_key = take_engine(self.model, layout)
        self.engine.clear(self.model)

    def _move_rows(self, rows: np.ndarray, layout: StepLayout) -> None:
        old = self.engine
        self._make_engine(layout)
        self.engine.copy_rows(old, rows)
