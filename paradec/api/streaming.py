"""Observers of a request: a progress bar, and transformers' streamers, which receive tokens when they become final.

`put` receives token ids [B, n] in reading order: first the columns before the first mask of any row (prompts, padded on
the left), then each column once it and all columns before it are final in every row. `put_draft` is optional and not
called for causal models. After every step it receives the remaining columns [B, n], with mask ids at undecided
positions; on canvases of noise it receives the best tokens up to the end of the open canvas. `end` is called when the
decoding finishes, fails or is interrupted, but not if an argument is rejected before the decoding starts.
`TextStreamer`, `TextIteratorStreamer` and `TextDiffusionStreamer` of transformers work for one row. Tokens after a
row's end are not sent, except as padding next to longer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import short_repr
from paradec.core.prompts import align_right
from paradec.core.protocol import Commit, State, TextState

Callback = Callable[[Any, Commit], bool | None]


def check_streamer(streamer: Any, rows: int) -> None:
    """Raise TypeError for an object that is not a streamer, ValueError for one that does not support this request."""
    for method in ("put", "end"):
        if not callable(getattr(streamer, method, None)):
            raise TypeError(f"streamer={short_repr(streamer)} must have put and end, as transformers' streamers do")
    if getattr(streamer, "_takes_logits", False):
        raise ValueError(f"streamer={short_repr(streamer)} needs logits (_takes_logits); only token ids are streamed")
    from transformers import TextStreamer

    if rows > 1 and isinstance(streamer, TextStreamer):
        raise ValueError(f"streamer of type {type(streamer).__name__} takes one row; this request has {rows}")


@contextmanager
def streamer_callback(streamer: Any, state: TextState, callback: Callback | None) -> Iterator[Callback]:
    """Make a callback for `decode` that feeds the streamer, then calls `callback`. On exit, end the streamer.

    streamer: accepted by `check_streamer`. state: before its first step. callback: of the request, or None."""
    fill = state.facts.fill_token_id
    width = int(state.requested_end.max())
    offset = width - state.requested_end

    def align_canvas() -> Tensor:
        return align_right(state.canvas.cpu()[:, :width], state.requested_end, fill)

    # without a mask id, a draft could not mark undecided positions
    put_draft = None if state.facts.hole_id is None else getattr(streamer, "put_draft", None)
    sent = int((offset + state.prompt_length).min())

    def after_commit(stepped: State, commit: Commit) -> bool | None:
        nonlocal sent
        ids = align_canvas()
        # [L] bool: columns that are undecided in some row
        undecided = align_right(state.undecided.cpu()[:, :width], state.requested_end, False).any(0)
        stop = int((offset + state.end).max())  # beyond it all rows are padding
        final = min(int(undecided.int().argmax()), stop) if undecided.any() else stop
        if state.revises and state.running.any():  # tokens of an open block may be masked again
            final = min(final, int((offset + state.block_start)[state.running].min()))
        if final > sent:
            streamer.put(ids[:, sent:final])
            sent = final
        if draft_end := getattr(state, "draft_end", None):
            stop = int((offset + draft_end()).max())
        if put_draft is not None and final < stop:
            put_draft(ids[:, final:stop])
        return None if callback is None else callback(stepped, commit)

    try:
        with torch.inference_mode():
            streamer.put(align_canvas()[:, :sent])
        yield after_commit
    finally:
        streamer.end()


@contextmanager
def progress_callback(state: State | TextState, callback: Callback | None) -> Iterator[Callback]:
    """Make a callback for `paradec.core.protocol.decode` that updates a tqdm bar of final tokens and forwards, then
    calls `callback`.

    state: before its first step."""
    from tqdm.auto import tqdm  # shows a widget in notebooks

    with tqdm(total=state.progress[1], unit="token", desc="decoding", dynamic_ncols=True) as progress_bar:

        def after_commit(stepped: State, commit: Commit) -> bool | None:
            final, total = stepped.progress
            progress_bar.total = total  # rows may end before their last token
            progress_bar.set_postfix(forwards=int(stepped.nfe.max()), refresh=False)
            progress_bar.update(final - progress_bar.n)
            return None if callback is None else callback(stepped, commit)

        yield after_commit


@contextmanager
def request_callback(state: Any, callback: Any, streamer: Any = None, progress: bool = False) -> Iterator[Any]:
    """Make the callback for `decode` of a request with an optional streamer and bar; state: before its first step."""
    with ExitStack() as stack:
        if streamer is not None:
            callback = stack.enter_context(streamer_callback(streamer, state, callback))
        if progress:
            callback = stack.enter_context(progress_callback(state, callback))
        yield callback
