"""`--live`: show tokens on a terminal while they are decoded."""

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
"""Sign for an undecided token."""
END = "\N{BLACK SQUARE}"
"""Sign for an end token, or the padding after one."""
STYLES = {
    "given": "dim",
    "final": "",
    "new": "bold green",
    "undecided": "dim",
    "draft": "italic yellow",
    "ahead": "dim",
    "remasked": "bold red",
    "end": "dim blue",
}
SIGNS = {"undecided": UNDECIDED, "ahead": UNDECIDED, "remasked": UNDECIDED, "end": END}
"""Signs for kinds of tokens that are not drawn as text. "ahead": undecided, after the open block."""
LONG_RUN = 8  # longer runs of "end" or "ahead" are drawn as a number
PACE = 0.12  # minimum seconds that a step stays on the screen
MAX_PACED = 6.0  # maximum seconds by which `PACE` delays a request


class LiveView:
    """View that draws every row of a request after each commit, and clears the drawing at the end.

    tokenizer: None shows ids. console: by default standard output. interval: minimum seconds between drawings.
    pace: seconds that each step stays on the screen; `slept` is the delay of a request so far, in seconds."""

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
        """Draw the state. Called by `paradec.generate` after every commit."""
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
        """Draw the cost and the rows. Tokens that became final since the last drawing are highlighted."""
        from rich.console import Group
        from rich.text import Text

        texts, decided, total = self._style_rows(state)
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
            legend.append("  ").append(UNDECIDED, STYLES["remasked"]).append(" masked again", "dim")
        # a long text is cut at the beginning: the open block is at its end
        room = max(3, self.console.height - 3)
        lines = [line for text in texts for line in text.wrap(self.console, self.console.width)][-room:]
        return Group(Text(status, style="dim", no_wrap=True, overflow="crop"), *lines, legend)

    def _style_rows(self, state: TextState) -> tuple[list[Text], int, int]:
        """Return the rows as styled text, and the numbers of final and of all tokens. End tokens count once per row."""
        from rich.text import Text

        ids, is_given, undecided = state.canvas.tolist(), state.is_prompt.tolist(), state.undecided.tolist()
        was_undecided: Any = (
            [[not flag for flag in row] for row in is_given] if self.undecided is None else self.undecided
        )
        self.undecided = undecided
        block_ends: Any = getattr(state, "block_end", state.end)
        draft_ends = state.draft_end() if hasattr(state, "draft_end") else state.prompt_length
        ends = {*state.facts.eos_token_ids, state.facts.pad_token_id}
        texts, decided, num_open = [], 0, 0
        for row in range(state.batch):
            # a prompt is drawn only if it has holes
            has_holes = state.answer_start[row] > state.prompt_length[row]
            start, end = 0 if has_holes else int(state.prompt_length[row]), int(state.end[row])

            def kind(i: int, row: int = row) -> str:
                if is_given[row][i]:
                    return "given"
                if undecided[row][i] and i < draft_ends[row]:
                    return "draft"
                if undecided[row][i]:
                    return "remasked" if not was_undecided[row][i] else "undecided" if i < block_ends[row] else "ahead"
                if ids[row][i] in ends:
                    return "end"
                return "new" if was_undecided[row][i] else "final"

            row_label = Text(f"[{row + 1}] " if state.batch > 1 else "", style="dim")
            kinds = [kind(i) for i in range(start, end)]
            decided += kinds.count("final") + kinds.count("new") + ("end" in kinds)
            num_open += sum(map(kinds.count, ("undecided", "draft", "ahead", "remasked")))
            texts.append(Text.assemble(row_label, style_tokens(self.tokenizer, ids[row][start:end], kinds)))
        return texts, decided, decided + num_open


def style_tokens(tokenizer: Any, ids: Sequence[int], kinds: Sequence[str]) -> Text:
    """Convert tokens to styled text. kinds: a key of `STYLES` for each token."""
    from rich.text import Text

    def decode(tokens: Sequence[int]) -> str:
        if tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return tokenizer.decode(tokens, skip_special_tokens=True)

    text = Text()
    text_ids: list[int] = []  # the last token drawn as text: the next token, decoded after it, keeps its leading space
    for kind, group in groupby(range(len(ids)), key=lambda i: kinds[i]):
        columns = list(group)
        if kind in SIGNS:
            sign, count = SIGNS[kind], len(columns)
            is_long = kind in ("end", "ahead") and count > LONG_RUN
            if (kind == "end" or is_long) and text.plain and not text.plain.endswith((" ", "\n")):
                text.append(" ")
            text.append(f"{sign}\N{MULTIPLICATION SIGN}{count}" if is_long else sign * count, STYLES[kind])
            continue
        run = decode([*text_ids, *(ids[i] for i in columns)])[len(decode(text_ids)) :]
        text.append(run, STYLES[kind])
        text_ids = [ids[columns[-1]]] if decode([ids[columns[-1]]]).strip() else text_ids
    return text
