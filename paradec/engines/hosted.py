"""Rows of masked samplers whose logits somebody else computes.

An engine forwards the open block of each of its requests and hands the logits to `Hosted.step`. A row is the state that
the sampler itself starts for its prompt; the sampler's own `propose` and `commit` decide what becomes final. So memory,
schedules, stop rules, edits and random numbers are those of `paradec.generate`, and so are the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.checks import check_int, shown
from paradec.models.facts import ModelFacts
from paradec.protocol import NotFinite, Query, Sampler
from paradec.registry import unknown
from paradec.request import DEFAULTS, Request
from paradec.samplers.masked.base import MaskedSampler
from paradec.samplers.masked.state import MaskedState

FIELDS = (
    *("max_new_tokens", "block_length", "steps", "temperature", "top_p", "top_k", "top_n_sigma", "seed"),
    *("eos_early_stop", "logits_eos_inf", "holes_eos_inf", "confidence_eos_eot_inf", "suppress_tokens", "stop"),
)
"""Fields of `paradec.Request` that a hosted row may have. The others are the engine's business, or need the model."""
OWN = ("start", "query", "query_part", "step")
"""What a sampler must leave to the family, since the engine makes its calls."""


def refusal(sampler: Any) -> str | None:
    """Why an engine cannot host a sampler, as a clause with "it" for the sampler; None where it can."""
    if not isinstance(sampler, MaskedSampler):
        return f"it is of family {sampler.family!r}, and engines host the masked one"
    if "text" not in sampler.models:
        return f"it decodes models that make {', '.join(sampler.models)}"
    if sampler.drafts:
        return "it evaluates drafts of later steps beside the row"
    if sampler.shadows:
        return "it evaluates masks that the rest of the row does not see"
    if sampler.blocks(None) is not None:
        return "it cuts the blocks itself, and an engine's are fixed"
    if "height" in sampler.settings():
        return "it reads the answer as a picture"
    if own := [part for part in OWN if getattr(type(sampler), part) is not getattr(MaskedSampler, part)]:
        return f"it has a `{own[0]}` of its own, and the engine calls the model"
    return None


@dataclass(frozen=True)
class Stepped:
    """What one step did to a row."""

    tokens: Tensor
    """[W] int64, on the rows' device: the window that was stepped, as it stands now."""
    changed: bool
    """Whether any of them is another one than before. If not, the engine has just evaluated them as they stand."""
    closed: bool
    """Whether the window is final. `Hosted.window` is the next one then, unless the row is done."""
    done: bool
    """Whether the answer is whole, or has ended."""
    error: FloatingPointError | None = None
    """The logits were not finite: nothing was written, and the row is where it was."""


class Hosted:
    """The rows of one sampler and one model that an engine evaluates. Any number of rows, by keys of the engine's.

    Args:
        sampler: a masked sampler, its name, or several that are joined ("credit+localleap").
        facts: of the model that the engine runs: mask id, topology, block length, where logits stand.
        device: where the logits will be.

    Raises:
        ValueError: a sampler that engines cannot host (`refusal`), or a model without a mask.
    """

    def __init__(self, sampler: str | Sampler, facts: ModelFacts, device: str | torch.device = "cpu"):
        method: Any = samplers.create(sampler) if isinstance(sampler, str) else sampler
        if not isinstance(method, Sampler):
            raise TypeError(f"sampler={shown(sampler)} must be a name or made by paradec.samplers.create")
        why = refusal(method)
        if why is not None or not isinstance(method, MaskedSampler):
            raise ValueError(f"sampler {method.name!r} cannot run inside an engine: {why}; use paradec.generate")
        if not isinstance(facts, ModelFacts):
            raise TypeError(f"facts={shown(facts)} must be paradec.models.facts.ModelFacts")
        if facts.mask_token_id is None or facts.topology not in ("bidirectional", "block_causal"):
            raise ValueError(f"{facts.name} has no masks to fill: engines host models with a mask token")
        self.sampler = method
        self.facts, self.device = facts, torch.device(device)
        self._answering = _Answering(facts, self.device)
        self._rows: dict[Hashable, MaskedState] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self) -> list[Hashable]:
        """The keys of the rows, in the order in which they were opened."""
        return list(self._rows)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def open(self, key: Hashable, prompt_ids: Any, max_new_tokens: int, **fields: Any) -> None:
        """Begin a row.

        Args:
            key: what the engine calls it; of no row that is open.
            prompt_ids: ids, a sequence or [L] int64. Mask ids among them are holes to fill.
            max_new_tokens: masks behind it, at least 0.
            fields: of `paradec.Request`, those in `FIELDS`, with its defaults.

        Raises:
            ValueError, TypeError: an argument out of its range, or one that no hosted row can have; nothing is opened.
        """
        if key in self._rows:
            raise ValueError(f"key={shown(key)} is open already; close it first")
        for name in fields:
            if name in DEFAULTS and name not in FIELDS:
                raise ValueError(
                    f"{name}={shown(fields[name])} has no meaning for a row inside an engine: leave it out"
                )
            if name not in FIELDS:
                raise TypeError(unknown("argument", name, FIELDS))
        if isinstance(prompt_ids, (str, bytes, Mapping)):
            raise TypeError(f"prompt_ids={shown(prompt_ids)} must be token ids")
        check_int("max_new_tokens", max_new_tokens, low=0)
        request = Request(sampler=self.sampler, max_new_tokens=max_new_tokens, **fields)
        with _plain():
            state = self.sampler.start(self._answering, prompt_ids, request)
        if state.batch != 1:
            raise ValueError(f"prompt_ids holds {state.batch} rows; open one at a time")
        if state.early_rules:
            raise ValueError(f"stop={shown(request.stop)} reads the logits behind the open block: engines have none")
        unit = self.facts.block_unit
        if (request.block_length or 1) > unit > 1:
            raise ValueError(
                f"block_length={request.block_length} is longer than the block that the engine runs ({unit})"
            )
        self._rows[key] = state

    def close(self, key: Hashable) -> None:
        """Forget a row, whether it is done or not."""
        self._state(key)
        del self._rows[key]

    def discard(self, key: Hashable) -> None:
        """`close`, where the row may be gone already."""
        self._rows.pop(key, None)

    def remembered(self, key: Hashable) -> dict[str, Tensor]:
        """What the sampler remembers of a row beyond its blocks, by name, each [1, ...]: for a row that goes on where
        this one ends (`remember`). Empty for most samplers."""
        memory = self._state(key).memory
        return {name: memory[name].clone() for name, spec in memory.specs.items() if spec.reset == "sequence"}

    def remember(self, key: Hashable, memory: Mapping[str, Tensor]) -> None:
        """Begin a row with what another one `remembered`. Before its first step.

        Raises:
            ValueError: the row has been stepped, or the sampler remembers nothing of such a name or shape.
        """
        state = self._state(key)
        if state.commits:
            raise ValueError(f"key={shown(key)} has been stepped; what it remembers is its own")
        for name, value in memory.items():
            if name not in state.memory or state.memory[name].shape != value.shape:
                raise ValueError(f"sampler {self.sampler.name!r} remembers no {name!r} of shape {list(value.shape)}")
        for name, value in memory.items():
            state.memory[name] = value.clone()

    def state(self, key: Hashable) -> MaskedState:
        """The sampler's own state of a row, to look at."""
        return self._state(key)

    def window(self, key: Hashable) -> tuple[int, Tensor]:
        """What to evaluate next: the position of the open block's first token, and its tokens [W] int64 (a copy).

        On a block-causal model it is the model's whole block: what was given of it stands in it, and masks at all that
        is undecided.

        Raises:
            ValueError: the row is done.
        """
        state = self._running(key)
        start, stop = self._window(state)
        return start, state.canvas[0, start:stop].clone()

    def answer(self, key: Hashable) -> list[int]:
        """The ids of the answer that are final: all of them once the row is done, its end token included."""
        state = self._state(key)
        final = int(state.final(_FIRST)[0])
        return state.canvas[0, int(state.answer_start[0]) : min(final, int(state.asked[0]))].tolist()

    def done(self, key: Hashable) -> bool:
        """Whether a row has nothing left to decide."""
        return self._state(key).done

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, logits: Mapping[Hashable, Tensor]) -> dict[Hashable, Stepped]:
        """One step of some rows.

        Args:
            logits: by key [W, V] of the row's `window`, any floating dtype: row i are those from which the token at
                start + i is predicted. (A model that predicts "shifted" gives them one position to the left.) Not
                written to.

        Raises:
            ValueError, TypeError: a key without an open row, a row that is done, or logits of another shape; no row has
                changed then.
        """
        for key, given in logits.items():
            self._check(key, given)
        with _plain():
            return {key: self._stepped(self._rows[key], given) for key, given in logits.items()}

    def _check(self, key: Hashable, logits: Any) -> None:
        state = self._running(key)
        start, stop = self._window(state)
        wanted = (stop - start, self.facts.vocab_size)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            what = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"logits of key={shown(key)} are {what}; give a floating-point tensor {list(wanted)}")
        if tuple(logits.shape) != wanted:
            raise ValueError(
                f"logits of key={shown(key)} have shape {list(logits.shape)}; its window takes {list(wanted)}"
            )

    def _stepped(self, state: MaskedState, logits: Tensor) -> Stepped:
        start, stop = self._window(state)
        before, decided = state.canvas[0, start:stop].clone(), int(state.decided[0])
        begin = int(state.block_start[0])
        self._answering.logits = logits[begin - start : int(state.block_end[0]) - start]
        error = None
        try:
            self.sampler.commit(state, self.sampler.step(self._answering, state))
        except NotFinite as found:
            error = FloatingPointError(str(found).replace(" for row 0", ""))
        finally:
            self._answering.logits = torch.empty(0)
        tokens = state.canvas[0, start:stop].clone()
        # where nothing is taken back, what was decided is counted on the host
        changed = not torch.equal(before, tokens) if state.revises else int(state.decided[0]) > decided
        closed = state.done or int(state.block_start[0]) >= stop
        return Stepped(tokens, changed, closed, state.done, error)

    def _state(self, key: Hashable) -> MaskedState:
        if key not in self._rows:
            raise ValueError(f"key={shown(key)} is not open; {len(self._rows)} rows are")
        return self._rows[key]

    def _running(self, key: Hashable) -> MaskedState:
        state = self._state(key)
        if state.done:
            raise ValueError(f"key={shown(key)} is done; its answer is whole")
        return state

    def _window(self, state: MaskedState) -> tuple[int, int]:
        """The first position of the engine's block, and the one behind it."""
        unit = self.facts.block_unit
        stop = -(-int(state.block_end[0]) // unit) * unit
        return int(state.block_start[0]) // unit * unit, min(stop, int(state.canvas.shape[1]))


class _Answering:
    """Stands where the sampler expects a model: the engine has evaluated it, and the answer to the one query of a step
    is `logits` [W, V]."""

    tokenizer = None
    kind = "hosted"
    pads = True
    supports_store = False
    supports_visibility = False
    default_max_new_tokens = 0
    default_block_length = None

    def __init__(self, facts: ModelFacts, device: torch.device):
        self.facts, self.device = facts, device
        self.logits = torch.empty(0)

    def __call__(self, query: Query) -> Tensor:
        """[1, W, V], a copy: the sampler writes to what it is given."""
        return self.logits.unsqueeze(0).clone()


@contextmanager
def _plain() -> Iterator[None]:
    """Neither gradients nor inference tensors: a row may be stepped under either, and go on under the other."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_FIRST = np.zeros(1, np.int64)
