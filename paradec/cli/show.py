"""A view of rows being filled in, for a terminal (`paradec generate --live`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

UNDECIDED = "\N{LIGHT SHADE}"
"""Stands for one token that is not final yet."""
STYLES = {"given": "dim", "final": "", "fresh": "bold green", "undecided": "dim"}


class LiveView:
    """Draws every row of a request after its commits, and clears itself away at the end.

    Args:
        tokenizer: the model's; without one, ids are shown.
        console: a rich console; by default standard output.
        interval: seconds between two drawings, at least.
    """

    def __init__(self, tokenizer: Any, console: Console | None = None, interval: float = 0.05):
        self.tokenizer = tokenizer
        self.interval = interval
        self.screen = Live(console=console or Console(), auto_refresh=False, transient=True)
        self.due = 0.0
        self.undecided: Any = None

    def __enter__(self) -> LiveView:
        self.screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.stop()

    def update(self, state: Any, commit: Any) -> None:
        """Called by `paradec.generate` after every commit."""
        if time.monotonic() < self.due and not state.done:
            return
        self.screen.update(self.draw(state), refresh=True)
        self.due = time.monotonic() + self.interval

    def draw(self, state: Any) -> RenderableType:
        """The rows as they stand. What became final since the last drawing stands out."""
        ids, given = state.canvas.tolist(), state.given.tolist()
        undecided = state.undecided.tolist()
        before, self.undecided = self.undecided, undecided
        if before is None:
            before = [[not flag for flag in row] for row in given]
        grid = Table.grid(padding=(0, 1))
        for row in range(state.batch):
            # a prompt is left out, unless there are holes in it
            holes = state.answer_start[row] > state.prompt_length[row]
            start, end = 0 if holes else int(state.prompt_length[row]), int(state.end[row])
            kinds = [
                "given"
                if given[row][i]
                else "undecided"
                if undecided[row][i]
                else "fresh"
                if before[row][i]
                else "final"
                for i in range(start, end)
            ]
            text = rendered(self.tokenizer, ids[row][start:end], kinds)
            grid.add_row(*([Text(f"[{row + 1}]", style="dim")] if state.batch > 1 else []), text)
        return grid


def rendered(tokenizer: Any, ids: Sequence[int], kinds: Sequence[str]) -> Text:
    """Tokens as styled text. `kinds` names one of `STYLES` for each."""

    def decoded(tokens: Sequence[int]) -> str:
        if tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return tokenizer.decode(tokens, skip_special_tokens=True)

    text = Text()
    for kind, group in groupby(range(len(ids)), key=lambda i: kinds[i]):
        columns = list(group)
        first = columns[0]
        if kind == "undecided":
            text.append(UNDECIDED * len(columns), STYLES[kind])
            continue
        # the token before says whether a space stands between them
        known = [ids[first - 1]] if first > 0 and kinds[first - 1] != "undecided" else []
        run = decoded([*known, *(ids[i] for i in columns)])[len(decoded(known)) :]
        text.append(run, STYLES[kind])
    return text
