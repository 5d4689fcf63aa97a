"""tqdm's bar over a request: tokens that are final, and the forwards they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paradec.core.contract import TextState
from paradec.core.protocol import Commit, State


@contextmanager
def bar(
    state: State | TextState, callback: Callable[[Any, Commit], bool | None] | None
) -> Iterator[Callable[[Any, Commit], bool | None]]:
    """A callback for `paradec.core.protocol.decode` that moves a bar, then calls `callback`.

    Args:
        state: before its first step.
    """
    from tqdm.auto import tqdm  # of notebooks, where it runs in one

    with tqdm(total=state.progress[1], unit="token", desc="decoding", dynamic_ncols=True) as shown:

        def after_commit(stepped: State, commit: Commit) -> bool | None:
            final, total = stepped.progress
            shown.total = total  # rows may end before their last token
            shown.set_postfix(forwards=int(stepped.nfe.max()), refresh=False)
            shown.update(final - shown.n)
            return None if callback is None else callback(stepped, commit)

        yield after_commit
