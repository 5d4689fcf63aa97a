"""Hosted rows: rows of masked samplers whose logits an inference engine computes.

The engine forwards the open block of each request and passes the logits to `Hosted.step`. A row is decoded by the
sampler's own `propose` and `commit`. So schedules, stop rules, edits, random numbers and tokens are those of
`paradec.generate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec import samplers
from paradec.batching.slots import MASKED_ROW_FIELDS, Group
from paradec.core.checks import check_int, short_repr, unknown_name
from paradec.core.facts import ModelFacts
from paradec.core.protocol import NotFinite, Sampler
from paradec.core.query import Query
from paradec.core.rows import select_rows
from paradec.request import DEFAULTS, Request
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.state import MaskedState

FIELDS = (
    *("block_length", "steps", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "eos_early_stop"),
    *("logits_eos_inf", "holes_eos_inf", "confidence_eos_eot_inf", "suppress_tokens", "stop"),
)
"""Fields of `paradec.Request` that a hosted row may have. The others are set by the engine, or need the model."""
MAX_ROWS = 2**20
"""Maximum number of rows that share a state."""
ENGINE_METHODS = ("start", "query", "step")
"""Methods that a hosted sampler must not override, because the engine calls the model."""


def why_unsupported(sampler: Any) -> str | None:
    """The reason why an engine cannot host a sampler, as a clause with "it" for the sampler; None if it can."""
    if not isinstance(sampler, MaskedSampler):
        return f"it is of family {sampler.family!r}, and engines host the family 'masked'"
    if "text" not in sampler.models:
        return f"it decodes models that make {', '.join(sampler.models)}"
    if sampler.needs.multi_step:
        return "it evaluates drafts of later steps next to the row"
    if sampler.needs.mask_probes:
        return "it evaluates extra masks that the row's other positions do not attend to"
    if sampler.blocks(None) is not None:
        return "it chooses the blocks itself, and an engine's blocks are fixed"
    if "height" in sampler.settings():
        return "it decodes images"
    overridden = [name for name in ENGINE_METHODS if getattr(type(sampler), name) is not getattr(MaskedSampler, name)]
    if overridden:
        return f"it overrides `{overridden[0]}`, and the engine calls the model"
    return None


@dataclass(frozen=True)
class StepResult:
    """Result of one step of a row."""

    tokens: Tensor
    """[W] int64, on the rows' device: the window's tokens after the step."""
    changed: bool
    """Whether the step changed a token. If not, the logits of this step were computed from these `tokens`."""
    closed: bool
    """Whether the window's tokens are final. If so, `Hosted.window` returns the next window, unless the row is done."""
    done: bool
    """Whether the answer is complete."""
    error: FloatingPointError | None = None
    """Set if the logits were not finite; the row is unchanged then."""


class Hosted:
    """Hosted rows of one sampler and one model, by keys that the engine chooses.

    A row is decoded as if `paradec.generate` got its prompt alone. Equal prompts with equal seeds have equal random
    draws, so give each row a different seed. Not thread-safe.

    Args:
        sampler: a masked sampler, its name, or a combination ("credit+localleap").
        facts: the engine's model: mask id, topology, block length, shift of the logits.
        device: device of the logits.

    Raises:
        ValueError: a sampler (`why_unsupported`) or a model that engines cannot host. TypeError: a wrong type.
    """

    def __init__(self, sampler: str | Sampler, facts: ModelFacts, device: str | torch.device = "cpu"):
        method: Any = samplers.create(sampler) if isinstance(sampler, str) else sampler
        if not isinstance(method, Sampler):
            raise TypeError(f"sampler={short_repr(sampler)} must be a name or made by paradec.samplers.create")
        reason = why_unsupported(method)
        if reason is not None or not isinstance(method, MaskedSampler):
            raise ValueError(f"sampler {method.name!r} cannot run inside an engine: {reason}; use paradec.generate")
        if not isinstance(facts, ModelFacts):
            raise TypeError(f"facts={short_repr(facts)} must be paradec.core.facts.ModelFacts")
        if facts.prompt_aligned:
            raise ValueError(
                f"{facts.name} has blocks that begin at the prompt's end, and engines' blocks begin at position 0; use "
                "paradec.generate"
            )
        if facts.mask_token_id is None or facts.topology not in ("bidirectional", "block_causal"):
            raise ValueError(f"{facts.name} has no masks to fill: engines host models with a mask token")
        self.sampler = method
        self.facts, self.device = facts, torch.device(device)
        self._model = _EngineLogits(facts, self.device)
        self._rows: dict[Hashable, _Row] = {}
        self._groups: list[Group] = []
        self._discarded: deque[Hashable] = deque()

    def __contains__(self, key: Hashable) -> bool:
        self._close_discarded()
        return key in self._rows

    def __len__(self) -> int:
        self._close_discarded()
        return len(self._rows)

    def keys(self) -> list[Hashable]:
        """The keys of the open rows, in the order of `open`."""
        self._close_discarded()
        return list(self._rows)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def open(self, key: Hashable, prompt_ids: Any, max_new_tokens: int, **fields: Any) -> None:
        """Open a row.

        Args:
            key: any hashable value that no open row has as its key.
            prompt_ids: token ids, a sequence or a tensor [L] int64. Mask ids in the prompt are filled, too.
            max_new_tokens: number of masks after the prompt, at least 0.
            fields: fields of `paradec.Request` that are in `FIELDS`.

        Raises:
            ValueError, TypeError: an argument is out of its range, or not supported for hosted rows. No row is opened.
        """
        self._close_discarded()
        if key in self._rows:
            raise ValueError(f"key={short_repr(key)} is open already; close it first")
        for name in fields:
            if name in DEFAULTS and name not in FIELDS:
                raise ValueError(f"{name}={short_repr(fields[name])} is not supported inside an engine: leave it out")
            if name not in FIELDS:
                raise TypeError(unknown_name("argument", name, FIELDS))
        if isinstance(prompt_ids, (str, bytes, Mapping)):
            raise TypeError(f"prompt_ids={short_repr(prompt_ids)} must be token ids")
        check_int("max_new_tokens", max_new_tokens, low=0)
        request = Request(sampler=self.sampler, max_new_tokens=max_new_tokens, **fields)
        with _no_inference_mode():
            state = self.sampler.start(self._model, prompt_ids, request)
        if state.batch != 1:
            raise ValueError(f"prompt_ids holds {state.batch} rows; open one at a time")
        if "early_stops" in state.features:
            raise ValueError(f"stop={short_repr(request.stop)} needs logits after the open block, which engines lack")
        unit = self.facts.block_unit
        if (request.block_length or 1) > unit > 1:
            raise ValueError(f"block_length={request.block_length} is longer than the engine's block of {unit}")
        if why := state.why_rows_fixed():
            raise ValueError(f"this row cannot run in an engine: {why}")
        self._add_row(key, request, state)

    def _add_row(self, key: Hashable, request: Request, state: MaskedState) -> None:
        """Add a row to the group of rows with similar requests, which are stepped together."""
        changes = request.changes().items()
        group_key = {name: value for name, value in changes if name not in MASKED_ROW_FIELDS}, state.blocks
        group = next((group for group in self._groups if group.key == group_key), None)
        row = _Row(group or Group(group_key, self.sampler, state, 0, self._model, self._model))
        if group is None:
            self._groups.append(row.group)
        else:
            with _no_inference_mode():
                group.make_room(MAX_ROWS, 0, max(group.width, state.num_columns(np.zeros(1, np.int64))))
        with _no_inference_mode():
            row.group.insert_rows([row], state, self._model)  # type: ignore[list-item] # batches insert tickets
        self._rows[key] = row

    def close(self, key: Hashable) -> None:
        """Remove a row, done or not."""
        row = self._find_row(key)
        group, slot = row.group, row.slot
        del self._rows[key]
        group.tickets[slot] = None
        if not group.occupied:
            self._groups.remove(group)
            return
        with _no_inference_mode():
            group.state.stop_rows(np.array([slot]))
            group.compact()

    def discard(self, key: Hashable) -> None:
        """Close a row at the next `open`, `step`, `keys`, `len` or `in`, if it is open. A finalizer may call this."""
        self._discarded.append(key)

    def _close_discarded(self) -> None:
        """Close the rows that were discarded."""
        while self._discarded:
            key = self._discarded.popleft()
            if key in self._rows:
                self.close(key)

    def copy_sequence_memory(self, key: Hashable) -> dict[str, Tensor]:
        """Copy the sampler's memory that is reset per sequence (not per block): by name, each [1, ...]. Empty for most
        samplers. Give it to `set_sequence_memory` for the row that continues this row's sequence."""
        state, slot = self._find_slot(key)
        names = [name for name, spec in state.memory.specs.items() if spec.reset == "sequence"]
        return {name: state.memory[name][slot : slot + 1].clone() for name in names}

    def set_sequence_memory(self, key: Hashable, memory: Mapping[str, Tensor]) -> None:
        """Initialise the memory of a row that has not been stepped, with another row's `copy_sequence_memory`. Raises
        ValueError: the row has been stepped, or the sampler has no memory of such a name or shape."""
        state, slot = self._find_slot(key)
        if state.row_step[slot]:
            raise ValueError(f"key={short_repr(key)} has been stepped; set its memory before the first step")
        for name, value in memory.items():
            if name not in state.memory or state.memory[name][:1].shape != value.shape:
                raise ValueError(f"sampler {self.sampler.name!r} has no memory {name!r} of shape {list(value.shape)}")
        with _no_inference_mode():
            for name, value in memory.items():
                state.memory.write(name, np.array([slot]), value.clone())

    def state(self, key: Hashable) -> MaskedState:
        """The sampler's state of a row, for inspection; a copy if other rows share the state."""
        state, slot = self._find_slot(key)
        if state.batch == 1:
            return state
        with _no_inference_mode():
            copy = select_rows(state, np.array([slot]))
            if not self._rows[key].done:
                copy.set_running_rows(np.zeros(1, np.int64))
        return copy

    def window(self, key: Hashable) -> tuple[int, Tensor]:
        """Return the position of the open block's first token, and its tokens [W] int64 (a copy).

        On a block-causal model the window is the model's whole block, including prompt tokens. Undecided positions hold
        the mask id. Raises ValueError: the row is done.
        """
        state, slot = self._find_running(key)
        start, stop = self._find_window(state, slot)
        return start, state.canvas[slot, start:stop].clone()

    def answer(self, key: Hashable) -> list[int]:
        """The final ids of the answer so far, including its end token."""
        state, slot = self._find_slot(key)
        final = int(state.final_ends(np.array([slot]))[0])
        ids: list[int] = state.canvas[slot, int(state.answer_start[slot]) : final].tolist()
        return ids

    def done(self, key: Hashable) -> bool:
        """Whether a row is complete."""
        return self._find_row(key).done

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, logits: Mapping[Hashable, Tensor]) -> dict[Hashable, StepResult]:
        """Step some rows; rows with similar requests are stepped together.

        Args:
            logits: for each key, logits [W, V] of the row's `window`, any floating dtype, not modified. Entry i is for
                the token at `window(key)[0]` + i; a model with shifted logits computes it one position earlier.

        Raises:
            ValueError, TypeError: a key without an open row, a row that is done, or a wrong shape. No row changes.
        """
        self._close_discarded()
        for key, row_logits in logits.items():
            self._check_logits(key, row_logits)
        results: dict[Hashable, StepResult] = {}
        with _no_inference_mode():
            for group in self._groups:
                keys = {self._rows[key].slot: key for key in logits if self._rows[key].group is group}
                slot_results = self._step_slots(group.state, {slot: logits[keys[slot]] for slot in sorted(keys)})
                results |= {keys[slot]: result for slot, result in slot_results.items()}
                for slot, result in slot_results.items():
                    self._rows[keys[slot]].done = result.done
        return {key: results[key] for key in logits}

    def _check_logits(self, key: Hashable, logits: Any) -> None:
        start, stop = self._find_window(*self._find_running(key))
        shape = (stop - start, self.facts.vocab_size)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            dtype = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"logits of key={short_repr(key)} are {dtype}; give a floating-point tensor {list(shape)}")
        if tuple(logits.shape) != shape:
            raise ValueError(f"logits of key={short_repr(key)} have shape {list(logits.shape)}, not {list(shape)}")

    def _step_slots(self, state: MaskedState, logits: dict[int, Tensor]) -> dict[int, StepResult]:
        """Step the slots that are keys of `logits` (each [W, V]; slots in ascending order)."""
        if not logits:
            return {}
        slots = list(logits)
        windows = np.array([self._find_window(state, slot) for slot in slots])
        columns = (
            np.minimum(windows[:, :1] + np.arange((windows[:, 1] - windows[:, 0]).max()), windows[:, 1:] - 1)
            + np.array(slots)[:, None] * state.canvas.shape[1]
        )
        positions = torch.as_tensor(columns, device=state.canvas.device)
        old_ids = state.canvas.take(positions)
        errors = self._commit(state, logits, dict(zip(slots, windows[:, 0].tolist())))
        new_ids = state.canvas.take(positions)
        changed = (old_ids != new_ids).any(1).tolist()
        results = {}
        for index, (slot, (start, stop)) in enumerate(zip(slots, windows.tolist(), strict=True)):
            is_done = slot not in errors and not state.running[slot]
            closed = is_done or int(state.block_start[slot]) >= stop
            tokens, error = new_ids[index, : stop - start], errors.get(slot)
            results[slot] = StepResult(tokens, changed[index], closed, is_done, error)
        return results

    def _commit(
        self, state: MaskedState, logits: dict[int, Tensor], starts: dict[int, int]
    ) -> dict[int, FloatingPointError]:
        """Step and commit the slots of `logits`, whose windows begin at `starts`. Returns errors by slot, for NaN or
        infinite logits; these slots stay unchanged."""
        errors: dict[int, FloatingPointError] = {}
        while remaining := [slot for slot in logits if slot not in errors]:
            state.set_running_rows(np.array(remaining))
            for slot in remaining:
                start, stop = int(state.block_start[slot]), int(state.block_end[slot])
                self._model.logits[slot] = logits[slot][start - starts[slot] : stop - starts[slot]]
            try:
                self.sampler.commit(state, self.sampler.step(self._model, state))
                break
            except NotFinite as error:
                for slot in error.rows.tolist():
                    step = int(state.row_step[slot])
                    errors[slot] = FloatingPointError(f"the model returned NaN or infinite logits at its step {step}")
            finally:
                self._model.logits = {}
        return errors

    def _find_row(self, key: Hashable) -> _Row:
        if key not in self._rows:
            raise ValueError(f"key={short_repr(key)} is not open; {len(self._rows)} other rows are open")
        return self._rows[key]

    def _find_slot(self, key: Hashable) -> tuple[MaskedState, int]:
        """The state that contains a row, and the row's slot in it."""
        row = self._find_row(key)
        return row.group.state, row.slot

    def _find_running(self, key: Hashable) -> tuple[MaskedState, int]:
        if self._find_row(key).done:
            raise ValueError(f"key={short_repr(key)} is done; its answer is complete")
        return self._find_slot(key)

    def _find_window(self, state: MaskedState, slot: int) -> tuple[int, int]:
        """The first position of the open block of the engine, and the position after the block's last one."""
        unit, longest = self.facts.block_unit, self.facts.max_length
        stop = -(-int(state.block_end[slot]) // unit) * unit
        if longest is not None:  # max_length may cut off the last block
            stop = min(stop, longest)
        return int(state.block_start[slot]) // unit * unit, stop


@dataclass(eq=False)
class _Row:
    """A hosted row, in a group of rows that share a state."""

    group: Group
    done: bool = False

    @property
    def slot(self) -> int:
        """The row's slot in the state."""
        return self.group.tickets.index(self)  # type: ignore[arg-type] # in batches, slots have tickets


class _EngineLogits:
    """Stand-in for the sampler's model. It returns the engine's logits, stored in `logits` by slot, each [W, V]."""

    tokenizer = None
    kind = "hosted"
    pads = True
    supports_store = False
    supports_visibility = False
    default_max_new_tokens = 0
    default_block_length = None

    def __init__(self, facts: ModelFacts, device: torch.device):
        self.facts, self.device = facts, device
        self.logits: dict[int, Tensor] = {}

    def __call__(self, query: Query) -> Tensor:
        """Return a copy of the logits, [N, W, V] for the N rows of the query. Shorter blocks are padded with zeros."""
        assert query.wanted is not None  # samplers that need logits of all positions are not hosted
        parts, width = [self.logits[row] for row in query.rows.tolist()], query.wanted.shape[1]
        if all(len(part) == width for part in parts):
            return torch.stack(parts)
        return torch.stack([pad(part, (0, 0, 0, width - len(part))) for part in parts])


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Disable gradients and inference mode. Rows can then be stepped both inside and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
