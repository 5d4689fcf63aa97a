"""`--live`: tokens being filled in, on a terminal. rich is imported when something is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paradec.core.checks import count, per_forward

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from paradec.api.output import Output
    from paradec.core.contract import TextState

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
LONG_RUN = 8
"""As many end tokens, or tokens of blocks that have not been opened, are shown one by one; more as a number."""
PACE = 0.12
"""Seconds that a step stays to be seen, where the model is faster."""
LONGEST_PACED = 6.0
"""Seconds that a request is held up at most for being watched."""


class LiveView:
    """Draws every row of a request after its commits, and clears itself away at the end.

    Args:
        tokenizer: the model's; without one, ids are shown.
        console: a rich console; by default standard output.
        interval: seconds between two drawings, at least.
        pace: seconds that each step stays, of models that are faster; what that takes is counted in `slept`.
    """

    def __init__(self, tokenizer: Any, console: Console | None = None, interval: float = 0.05, pace: float = 0.0):
        self.tokenizer = tokenizer
        self.interval = interval
        self.pace = pace
        self.slept = 0.0
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console()
        self.screen = Live(console=self.console, auto_refresh=False, transient=True)
        self.due = 0.0
        self.undecided: Any = None

    def __enter__(self) -> LiveView:
        from rich.text import Text

        self.screen.start()
        self.screen.update(Text("decoding ...", style="dim"), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.stop()

    def update(self, state: TextState, commit: Any) -> None:
        """Called by `paradec.generate` after every commit."""
        begin = time.monotonic()
        if begin < self.due and not state.done:
            return
        self.screen.update(self.draw(state), refresh=True)
        self.due = time.monotonic() + self.interval
        if self.pace > 0 and self.slept < LONGEST_PACED:
            time.sleep(self.pace)
            self.due = 0.0
            self.slept += time.monotonic() - begin  # and what it took to draw

    def timed(self, decode: Callable[[], Output]) -> Output:
        """Decode, and take out of the output's seconds what was slept."""
        from paradec.core.protocol import Interrupted

        try:
            output = decode()
        except Interrupted as interrupt:
            interrupt.output.seconds -= self.slept
            raise
        output.seconds -= self.slept
        return output

    def draw(self, state: TextState) -> RenderableType:
        """The rows as they are, below what they took. What became final since the last drawing is highlighted."""
        from rich.console import Group
        from rich.text import Text

        texts, decided, open_ = self._rows(state)
        legend = Text.assemble(
            (UNDECIDED, STYLES["undecided"]), (" undecided  ", "dim"), (END, STYLES["end"]), (" end  ", "dim"),
            ("new", "green"), no_wrap=True,
        )  # fmt: skip
        if hasattr(state, "draft_end"):
            legend.append("  ").append("draft", STYLES["draft"])
        elif getattr(state, "revises", False):
            legend.append("  ").append(UNDECIDED, STYLES["taken"]).append(" taken back", "dim")
        width, room = self.console.width, max(3, self.console.height - 3)
        lines = [line for text in texts for line in text.wrap(self.console, width)]
        if len(texts) > 1 and len(lines) > room:  # the first rows represent all
            shown = lines[: room - 1]
            shown.append(Text(f"and {len(lines) - len(shown)} more lines", style="dim"))
        else:  # of a long text the end, where the open block is
            shown = lines[-room:]
        return Group(_status(decided, open_, state.nfe.tolist(), width), *shown, legend)

    def _rows(self, state: TextState) -> tuple[list[Text], int, int]:
        """Each row as styled text, with its number where there are several; how many tokens are final, of end tokens
        one a row, and how many are not."""
        from rich.text import Text

        ids, given = state.canvas.tolist(), state.given.tolist()
        undecided = state.undecided.tolist()
        known: Any = self.undecided
        before: Any = [[not flag for flag in row] for row in given] if known is None else known
        self.undecided = undecided
        opened: Any = getattr(state, "block_end", state.end)
        drafted = state.draft_end() if hasattr(state, "draft_end") else state.prompt_length
        ends = {*state.facts.eos_token_ids, state.facts.pad_token_id}
        texts, decided, open_ = [], 0, 0
        for row in range(state.batch):
            # a prompt is left out, unless there are holes in it
            holes = state.answer_start[row] > state.prompt_length[row]
            start, end = 0 if holes else int(state.prompt_length[row]), int(state.end[row])

            def kind(i: int, row: int = row) -> str:
                if given[row][i]:
                    return "given"
                if undecided[row][i] and i < drafted[row]:
                    return "draft"
                if undecided[row][i]:
                    return "taken" if not before[row][i] else "undecided" if i < opened[row] else "ahead"
                if ids[row][i] in ends:
                    return "end"
                return "fresh" if before[row][i] else "final"

            number = Text(f"[{row + 1}] " if state.batch > 1 else "", style="dim")
            kinds = [kind(i) for i in range(start, end)]
            decided += kinds.count("final") + kinds.count("fresh") + ("end" in kinds)
            open_ += sum(map(kinds.count, ("undecided", "draft", "ahead", "taken")))
            texts.append(Text.assemble(number, rendered(self.tokenizer, ids[row][start:end], kinds)))
        return texts, decided, open_


def _status(decided: int, undecided: int, row_nfe: list[int], width: int) -> Text:
    """What the rows took so far, in one line that fits: a bar, tokens, forwards."""
    from rich.text import Text

    total = decided + undecided
    text = f"{decided} of {total} tokens, {count(max(row_nfe), 'forward')}"
    rate = f", {decided / max(1, sum(row_nfe)):.1f} {per_forward(len(row_nfe)).removeprefix('tokens ')}"
    text += rate if len(text + rate) <= width else ""
    cells = min(30, width - len(text) - 2)
    if cells < 5:
        return Text(text, style="dim", no_wrap=True)
    full = round(cells * decided / max(1, total))
    bar = Text("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * full, style="green")
    bar.append("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * (cells - full), style="bright_black")
    return Text.assemble(bar, "  ", (text, "dim"), no_wrap=True)


def rendered(tokenizer: Any, ids: Sequence[int], kinds: Sequence[str]) -> Text:
    """Tokens as styled text. `kinds` names one of `STYLES` for each."""
    from rich.text import Text

    def decoded(tokens: Sequence[int]) -> str:
        if tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return tokenizer.decode(tokens, skip_special_tokens=True)

    text = Text()
    known: list[int] = []  # the last token that is text: it says whether a space comes before the next one
    for kind, group in groupby(range(len(ids)), key=lambda i: kinds[i]):
        columns = list(group)
        if kind in SHOWN:
            count = len(columns)
            short = kind in ("end", "ahead") and count > LONG_RUN
            if (kind == "end" or short) and text.plain and not text.plain.endswith((" ", "\n")):
                text.append(" ")
            text.append(f"{SHOWN[kind]}\N{MULTIPLICATION SIGN}{count}" if short else SHOWN[kind] * count, STYLES[kind])
            continue
        run = decoded([*known, *(ids[i] for i in columns)])[len(decoded(known)) :]
        text.append(run, STYLES[kind])
        known = [ids[columns[-1]]] if decoded([ids[columns[-1]]]).strip() else known
    return text
