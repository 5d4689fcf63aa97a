"""Copies of one prompt that are decoded side by side, of which the one that ends first is returned.

First Finish Search, arXiv 2505.18149.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paradec.api.output import Output
from paradec.core.contract import TextState
from paradec.core.prompts import Prompts
from paradec.core.protocol import Commit, State
from paradec.request import Request

Callback = Callable[[State, Commit], bool | None]


def check_race(request: Request, prompts: Prompts) -> None:
    """Raise ValueError for what cannot be raced."""
    said = f"race={request.race}"
    if len(prompts.rows) != 1:
        raise ValueError(f"{said} takes one prompt; this request has {len(prompts.rows)}")
    if request.num_return_sequences != 1:
        raise ValueError(
            f"{said} returns one answer; num_return_sequences={request.num_return_sequences} asks for more"
        )
    if request.streamer is not None:
        raise ValueError(f"{said} knows which copy to return when it ends; streamer has to be None")


def until_first(callback: Callback | None) -> Callback:
    """A callback that calls `callback` and ends the decoding once a row has ended."""

    def after_commit(state: Any, commit: Commit) -> bool:
        return bool(callback is not None and callback(state, commit)) or not state.running.all()

    return after_commit


def warn_of_equals(race: int, state: TextState) -> None:
    """Warn, for the caller's caller, where all copies have the same tokens."""
    if race > 1 and (state.canvas == state.canvas[0]).all():
        warnings.warn(f"race={race} ran equal copies: give a temperature, or a sampler that draws", stacklevel=4)


def winner(output: Output, state: TextState) -> Output:
    """The output of the row that ended, or else of the one that is furthest (the lowest of several), with what all rows
    cost."""
    row = int(np.where(state.running, state.decided, np.iinfo(np.int64).max).argmax())
    lists = ["row_nfe", "tokens", "finished"] + ["draft_nfe"] * (output.draft_nfe is not None)
    tensors = ("sequences", "new_tokens", "attention_mask", "filled")
    changes: dict[str, Any] = {name: [getattr(output, name)[row]] for name in lists}
    changes |= {name: getattr(output, name)[row : row + 1] for name in tensors}
    for name in ("text", "fills"):
        if getattr(output, name) is not None:
            changes[name] = getattr(output, name)[row]
    for name in ("prefix", "logprobs", "rollout"):
        if getattr(output, name) is not None:
            changes[name] = getattr(output, name).row(row)
    return replace(output, **changes, race_winner=row)
