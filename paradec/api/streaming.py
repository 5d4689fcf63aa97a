"""Observers of a request: a progress bar, and text as it becomes final through transformers' protocol of streamers.

`put` gets token ids [B, n] in reading order: first what is before the first mask of any row (the prompt, padded on
the left), then columns as they become final in every row with nothing undecided before them. `put_draft`, where a
streamer has it, gets the rest of the canvas [B, n] after every step, mask ids at undecided positions; on canvases of
noise the best tokens of the open one, up to its end (causal models decide nothing beyond what is sent). `end` comes
when the decoding ends, whether it finished, failed or was interrupted; not when an argument was refused before it
began.
transformers' `TextStreamer`, `TextIteratorStreamer` and `TextDiffusionStreamer` work as they are, for one row. Tokens
after a row's end are not sent, except as padding beside longer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.core.prompts import align_right
from paradec.core.protocol import Commit, State, TextState

Callback = Callable[[Any, Commit], bool | None]


def check_streamer(streamer: Any, rows: int) -> None:
    """Raise TypeError for what is no streamer, ValueError for one that cannot take this request."""
    for method in ("put", "end"):
        if not callable(getattr(streamer, method, None)):
            raise TypeError(f"streamer={shown(streamer)} must have put and end, as transformers' streamers do")
    if getattr(streamer, "_takes_logits", False):
        raise ValueError(f"streamer={shown(streamer)} asks for logits (_takes_logits); only token ids are streamed")
    from transformers import TextStreamer

    if rows > 1 and isinstance(streamer, TextStreamer):
        raise ValueError(f"streamer of type {type(streamer).__name__} takes one row; this request has {rows}")


@contextmanager
def stream(streamer: Any, state: TextState, callback: Callback | None) -> Iterator[Callback]:
    """A callback for `decode` that feeds the streamer, then calls `callback`; the streamer is ended on leaving.

    streamer: as `check_streamer` takes it. state: before its first step. callback: the caller's own, or None."""
    fill = state.facts.fill_token_id
    width = int(state.requested_end.max())
    offset = width - state.requested_end

    def aligned() -> Tensor:
        return align_right(state.canvas.cpu()[:, :width], state.requested_end, fill)

    # without a mask nothing would say what is undecided
    drafts = None if state.facts.hole_id is None else getattr(streamer, "put_draft", None)
    sent = int((offset + state.prompt_length).min())

    def after_commit(stepped: State, commit: Commit) -> bool | None:
        nonlocal sent
        ids = aligned()
        # [L] bool: columns in which a row has nothing final yet
        undecided = align_right(state.undecided.cpu()[:, :width], state.requested_end, False).any(0)
        stop = int((offset + state.end).max())  # beyond it all rows are padding
        final = min(int(undecided.int().argmax()), stop) if undecided.any() else stop
        if state.revises and state.running.any():  # what is in an open block may be taken back
            final = min(final, int((offset + state.block_start)[state.running].min()))
        if final > sent:
            streamer.put(ids[:, sent:final])
            sent = final
        if shown := getattr(state, "draft_end", None):
            stop = int((offset + shown()).max())
        if drafts is not None and final < stop:
            drafts(ids[:, final:stop])
        return None if callback is None else callback(stepped, commit)

    try:
        with torch.inference_mode():
            streamer.put(aligned()[:, :sent])
        yield after_commit
    finally:
        streamer.end()


@contextmanager
def bar(state: State | TextState, callback: Callback | None) -> Iterator[Callback]:
    """A callback for `paradec.core.protocol.decode` that moves tqdm's bar (tokens that are final, and the forwards they
    took), then calls `callback`.

    state: before its first step."""
    from tqdm.auto import tqdm  # of notebooks, where it runs in one

    with tqdm(total=state.progress[1], unit="token", desc="decoding", dynamic_ncols=True) as progress_bar:

        def after_commit(stepped: State, commit: Commit) -> bool | None:
            final, total = stepped.progress
            progress_bar.total = total  # rows may end before their last token
            progress_bar.set_postfix(forwards=int(stepped.nfe.max()), refresh=False)
            progress_bar.update(final - progress_bar.n)
            return None if callback is None else callback(stepped, commit)

        yield after_commit


@contextmanager
def watch(state: Any, callback: Callback | None, streamer: Any = None, progress: bool = False) -> Iterator[Any]:
    """The callback for `decode` of a request with a streamer and a bar, if it has these. state: as in `stream`."""
    with ExitStack() as stack:
        if streamer is not None:
            callback = stack.enter_context(stream(streamer, state, callback))
        if progress:
            callback = stack.enter_context(bar(state, callback))
        yield callback
