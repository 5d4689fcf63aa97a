"""`--live`: tokens being filled in, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paradec.core.checks import format_count, throughput_unit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from paradec.core.protocol import TextState

UNDECIDED = "\N{LIGHT SHADE}"
"""Shown for one token that is not final yet."""
END = "\N{BLACK SQUARE}"
"""Shown for an end token, or the padding after one."""
STYLES = {
    "given": "dim",
    "final": "",
    "fresh": "bold green",
    "undecided": "dim",
    "draft": "italic yellow",
    "ahead": "dim",
    "taken": "bold red",
    "end": "dim blue",
}
SHOWN = {"undecided": UNDECIDED, "ahead": UNDECIDED, "taken": UNDECIDED, "end": END}
"""What is shown for one token of a kind that is not shown as text."""
LONG_RUN = 8  # more end tokens, or tokens of blocks that are not open yet, are shown as a number
PACE = 0.12  # seconds that a step stays to be seen, where the model is faster
MAX_PACED = 6.0  # seconds that watching delays a request at most


class LiveView:
    """Draws every row of a request after its commits, and clears itself away at the end.

    tokenizer: None shows ids. console: by default standard output. interval: the least seconds between drawings.
    pace: seconds that each step stays, of faster models; `slept` counts the seconds of a request that it took."""

    def __init__(self, tokenizer: Any, console: Console | None = None, interval: float = 0.05, pace: float = 0.0):
        from rich.console import Console
        from rich.live import Live

        self.tokenizer, self.interval, self.pace = tokenizer, interval, pace
        self.console = console or Console()
        self.screen = Live(console=self.console, auto_refresh=False, transient=True)
        self.due = self.slept = 0.0
        self.undecided: Any = None

    def __enter__(self) -> LiveView:
        self.due, self.slept, self.undecided = 0.0, 0.0, None
        self.screen.start()
        self.screen.update("decoding ...", refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.stop()

    def update(self, state: TextState, commit: Any) -> None:
        """Called by `paradec.generate` after every commit."""
        start = time.monotonic()
        if start < self.due and not state.done:
            return
        self.screen.update(self.draw(state), refresh=True)
        self.due = time.monotonic() + self.interval
        if self.pace > 0 and self.slept < MAX_PACED:
            time.sleep(self.pace)
            self.due = 0.0
            self.slept += time.monotonic() - start

    def draw(self, state: TextState) -> RenderableType:
        """The rows as they are, below their cost. What became final since the last drawing is highlighted."""
        from rich.console import Group
        from rich.text import Text

        texts, decided, total = self._rows(state)
        calls = state.nfe.tolist()
        rate = f"{decided / max(1, sum(calls)):.1f} {throughput_unit(len(calls)).removeprefix('tokens ')}"
        status = f"{decided} of {total} tokens, {format_count(max(calls), 'forward')}, {rate}"
        legend = Text.assemble(
            (UNDECIDED, STYLES["undecided"]), (" undecided  ", "dim"), (END, STYLES["end"]), (" end  ", "dim"),
            ("new", "green"), no_wrap=True,
        )  # fmt: skip
        if hasattr(state, "draft_end"):
            legend.append("  ").append("draft", STYLES["draft"])
        elif getattr(state, "revises", False):
            legend.append("  ").append(UNDECIDED, STYLES["taken"]).append(" taken back", "dim")
        # of a long text the end, where the open block is
        room = max(3, self.console.height - 3)
        lines = [line for text in texts for line in text.wrap(self.console, self.console.width)][-room:]
        return Group(Text(status, style="dim", no_wrap=True, overflow="crop"), *lines, legend)

    def _rows(self, state: TextState) -> tuple[list[Text], int, int]:
        """Each row as styled text; how many tokens are final (of end tokens one a row), and how many there are."""
        from rich.text import Text

        ids, is_given, undecided = state.canvas.tolist(), state.given.tolist(), state.undecided.tolist()
        was_decided: Any = (
            [[not flag for flag in row] for row in is_given] if self.undecided is None else self.undecided
        )
        self.undecided = undecided
        opened: Any = getattr(state, "block_end", state.end)
        drafted = state.draft_end() if hasattr(state, "draft_end") else state.prompt_length
        ends = {*state.facts.eos_token_ids, state.facts.pad_token_id}
        texts, decided, num_open = [], 0, 0
        for row in range(state.batch):
            # a prompt is left out, unless there are holes in it
            holes = state.answer_start[row] > state.prompt_length[row]
            start, end = 0 if holes else int(state.prompt_length[row]), int(state.end[row])

            def kind(i: int, row: int = row) -> str:
                if is_given[row][i]:
                    return "given"
                if undecided[row][i] and i < drafted[row]:
                    return "draft"
                if undecided[row][i]:
                    return "taken" if not was_decided[row][i] else "undecided" if i < opened[row] else "ahead"
                if ids[row][i] in ends:
                    return "end"
                return "fresh" if was_decided[row][i] else "final"

            row_label = Text(f"[{row + 1}] " if state.batch > 1 else "", style="dim")
            kinds = [kind(i) for i in range(start, end)]
            decided += kinds.count("final") + kinds.count("fresh") + ("end" in kinds)
            num_open += sum(map(kinds.count, ("undecided", "draft", "ahead", "taken")))
            texts.append(Text.assemble(row_label, rendered(self.tokenizer, ids[row][start:end], kinds)))
        return texts, decided, decided + num_open


def rendered(tokenizer: Any, ids: Sequence[int], kinds: Sequence[str]) -> Text:
    """Tokens as styled text. `kinds` names one of `STYLES` for each."""
    from rich.text import Text

    def decoded(tokens: Sequence[int]) -> str:
        if tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return tokenizer.decode(tokens, skip_special_tokens=True)

    text = Text()
    text_ids: list[int] = []  # the last token that is text: it says whether a space comes before the next one
    for kind, group in groupby(range(len(ids)), key=lambda i: kinds[i]):
        columns = list(group)
        if kind in SHOWN:
            count = len(columns)
            short = kind in ("end", "ahead") and count > LONG_RUN
            if (kind == "end" or short) and text.plain and not text.plain.endswith((" ", "\n")):
                text.append(" ")
            text.append(f"{SHOWN[kind]}\N{MULTIPLICATION SIGN}{count}" if short else SHOWN[kind] * count, STYLES[kind])
            continue
        run = decoded([*text_ids, *(ids[i] for i in columns)])[len(decoded(text_ids)) :]
        text.append(run, STYLES[kind])
        text_ids = [ids[columns[-1]]] if decoded([ids[columns[-1]]]).strip() else text_ids
    return text
