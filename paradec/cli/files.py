"""`paradec generate --in prompts.jsonl --out answers.jsonl`: a line for every prompt, errors among them, and a resume.

A line of the answers is {"line", "id" (if the prompt has one), "prompt", "text", "tokens", "finished", "nfe"}, with
several answers to a prompt lists of these; or {"line", "id", "prompt", "error"}. A prompt that fails holds up no other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from paradec.cli import options, ranks, show
from paradec.cli.work import Work
from paradec.interrupts import EXIT_CODE, held_back, raise_again

if TYPE_CHECKING:
    from paradec.generate import Output
    from paradec.prompts import Prompts

SOME_FAILED = 1
"""The exit code where prompts failed; 2 is for wrong arguments."""
PER_PROMPT = (ValueError, TypeError, FloatingPointError)
"""What a prompt may raise that others are not concerned with."""


@dataclass
class Line:
    """A line of the file of prompts."""

    number: int
    prompt: Any = None
    """A text or a chat."""
    id: Any = None
    error: str | None = None

    def entry(self, found: dict[str, Any]) -> dict[str, Any]:
        """What is written of it."""
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.number, **named, "prompt": self.prompt, **found}


@dataclass
class FileJob:
    """The two files: checked when made, before a model is loaded.

    Raises:
        ValueError: prompts that cannot be read, or answers that cannot be written or gone on with. OSError: no file.
    """

    source: Path
    out: Path
    resume: bool = False
    lines: list[Line] = field(init=False)
    before: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)
    """By line: answers of an earlier run."""

    def __post_init__(self) -> None:
        options.check_writable("--out", self.out)
        self.lines = read_lines(self.source)
        there = self.out.exists() and self.out.stat().st_size > 0
        if there and self.out.samefile(self.source):
            raise ValueError(f"--in and --out are one file, {str(self.out)!r}")
        if there and not self.resume:
            raise ValueError(f"--out {str(self.out)!r} holds something: --resume goes on with it, or remove it")
        if there:
            self.before = read_answers(self.out, self.lines)

    def answer(self, work: Work, batch: int | None, as_json: bool) -> NoReturn:
        """Answer what is not answered yet, write each answer as soon as its batch has ended, print a summary, exit.

        Args:
            batch: rows decoded together at most; None is what fits.
        """
        rows = self._encode(work)
        todo = [line for line in self.lines if line.number not in self.before]
        parts = [rows[line.number] for line in todo if line.number in rows]
        fitting = work.rows_that_fit(_joined(parts)) if parts else 1
        size = min(fitting, batch or fitting)
        together = max(1, size // work.answers)  # lines
        if parts:
            work.try_start(min(parts, key=lambda part: len(part.rows[0])).part(0, 1))
        if self.before and ranks.speaks():
            write_lines(self.out, self.before.values())  # without the prompts that failed, which are tried again
        found, entries, code = show.Answers(single=False), [], 0
        raise_again()
        try:
            with self._appended() as file, show.Bar() as bar:
                for first in range(0, len(todo), together):
                    chunk = todo[first : first + together]
                    done, interrupted = self._decode(work, chunk, rows, size, bar, (first, len(todo)), found)
                    with held_back():
                        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in done)
                        file.flush()
                        entries += done
                    if interrupted:
                        code = EXIT_CODE
                        break
        except KeyboardInterrupt:  # between two batches
            code = EXIT_CODE
        if self.before and ranks.speaks():  # answers stand in the order of the prompts
            every = [*self.before.values(), *entries]
            write_lines(self.out, sorted(every, key=lambda entry: entry["line"]))
        failed = sum("error" in entry for entry in entries)
        self._tell(found, len(entries) - failed, failed, code != 0, as_json)
        raise typer.Exit(code or (SOME_FAILED if failed else 0))

    def _appended(self) -> TextIO:
        """Where answers go: of several processes that decode together, one writes them."""
        return (self.out if ranks.speaks() else Path(os.devnull)).open("a", encoding="utf-8")

    def _encode(self, work: Work) -> dict[int, Prompts]:
        """By line: its rows, numbered among those of all lines, so that a run that goes on draws as a whole one."""
        from paradec.prompts import Prompts

        rows: list[list[int]] = []
        kept: list[Line] = []
        for line in self.lines:
            if line.error is None:
                try:
                    rows += work.encode(line.prompt).rows[:1]
                    kept.append(line)
                except PER_PROMPT as error:
                    line.error = _said(error)
        every = Prompts(rows, False, [0] * len(rows)).repeated(work.answers).numbered()
        copies = work.answers
        return {line.number: every.part(copies * i, copies * (i + 1)) for i, line in enumerate(kept)}

    def _decode(
        self,
        work: Work,
        chunk: list[Line],
        rows: dict[int, Prompts],
        size: int,
        bar: show.Bar,
        place: tuple[int, int],
        found: show.Answers,
    ) -> tuple[list[dict[str, Any]], bool]:
        """The entries of some lines, and whether they were interrupted: then of those that had ended.

        Args:
            size: rows decoded together. place: how many lines stand before these, and of how many. found: where their
                cost is added.
        """
        from paradec.cli.batches import completed, in_batches

        good = [line for line in chunk if line.number in rows]
        asked = _joined([rows[line.number] for line in good])

        def run(batch: Prompts) -> Output:
            bar.among(place[0] * work.answers, len(asked.rows), place[1] * work.answers)
            return work.run(batch, bar.update)

        answers: list[dict[str, Any]] = []
        stopped = False
        try:
            for _, output, stopped in in_batches(run, asked, size) if good else ():
                kept = completed(output) if stopped else range(len(output.tokens))
                for row in range(len(output.tokens)):
                    answers.append(_answer(output, row) if row in kept else {})
                found.add(output, list(kept))
        except PER_PROMPT as error:
            if len(good) > 1:  # one of them: each by itself
                return self._one_by_one(work, chunk, rows, size, bar, place, found)
            good[0].error = _said(error)
        done = []
        for line in chunk:
            if line.error is not None:
                done.append(line.entry({"error": line.error}))
                continue
            own, answers = answers[: work.answers], answers[work.answers :]
            if len(own) == work.answers and all(own):
                lists = {name: [answer[name] for answer in own] for name in own[0]}
                done.append(line.entry(own[0] if work.answers == 1 else lists))
        return done, stopped

    def _one_by_one(
        self, work: Work, chunk: list[Line], rows: dict[int, Prompts], *others: Any
    ) -> tuple[list[dict[str, Any]], bool]:
        done: list[dict[str, Any]] = []
        for line in chunk:
            entries, interrupted = self._decode(work, [line], rows, *others)
            done += entries
            if interrupted:
                return done, True
        return done, False

    def _tell(self, found: show.Answers, answered: int, failed: int, interrupted: bool, as_json: bool) -> None:
        there = len(self.before)
        if as_json:
            data = {"out": str(self.out), "prompts": len(self.lines), "answered": answered, "failed": failed}
            data |= {"there_before": there, "interrupted": interrupted, "tokens": sum(found.tokens)}
            data |= {"forwards": sum(found.row_nfe), "forwarded_tokens": found.forwarded_tokens}
            typer.echo(json.dumps(data | {"seconds": found.seconds}, ensure_ascii=False))
            return
        what = f"{show.count(answered, 'answer')} in {self.out}"
        if there:
            what += f" beside {there} that were there"
        if failed:
            what += f", {failed} failed (their lines have an error)"
        if interrupted:
            what += f", interrupted at {there + answered + failed} of {len(self.lines)}: --resume goes on"
        typer.echo(what)
        if found.tokens:
            typer.echo(found.summary(len(found.tokens), interrupted=False))


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _answer(output: Output, row: int) -> dict[str, Any]:
    texts = output.text if output.text is not None else output.new_tokens.tolist()
    nfe, tokens, finished = output.row_nfe[row], output.tokens[row], output.finished[row]
    return {"text": texts[row], "tokens": tokens, "finished": finished, "nfe": nfe}


def _joined(parts: Sequence[Prompts]) -> Prompts:
    from paradec.prompts import Prompts

    rows = [row for part in parts for row in part.rows]
    before = [number for part in parts for number in part.before or ()]
    return Prompts(rows, False, [0] * len(rows), before)


def read_lines(path: Path) -> list[Line]:
    """The prompts of a file: one a line, in a file named .jsonl as JSON. Empty lines are passed over; a line that is no
    prompt has an error.

    Raises:
        ValueError: no text, or no prompt. OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--in {str(path)!r} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    given = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not given:
        raise ValueError(f"--in {str(path)!r} has no prompts")
    as_data = path.suffix.lower() == ".jsonl"
    return [_line_of(number, line) if as_data else Line(number, line.rstrip("\r")) for number, line in given]


def _line_of(number: int, text: str) -> Line:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return Line(number, error=f"no JSON: {error}")
    if isinstance(data, str):
        return Line(number, data)
    if not isinstance(data, dict):
        return Line(number, error='neither a text nor an object with "prompt" or "messages"')
    prompt, name = data.get("prompt", data.get("messages")), data.get("id")
    chat = isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt)
    if not isinstance(prompt, str) and not chat:
        return Line(number, None, name, '"prompt" must be a text, or "messages" a list of {"role", "content"}')
    return Line(number, prompt, name)


def read_answers(path: Path, lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
    """The answers of an earlier run by line, without those that failed.

    Raises:
        ValueError: something else, or answers to other prompts.
    """
    prompts = {line.number: line.prompt for line in lines}
    found: dict[int, dict[str, Any]] = {}
    texts = path.read_text(encoding="utf-8").splitlines()
    for place, text in enumerate(texts, 1):
        try:
            entry = json.loads(text)
            number = entry["line"]
            other = number not in prompts or entry["prompt"] != prompts[number]
        except (json.JSONDecodeError, KeyError, TypeError):
            if place == len(texts):  # the run was ended while it was written
                continue
            raise ValueError(f"--out {str(path)!r} holds no answers at line {place}; give another file") from None
        if other:
            raise ValueError(
                f"--out {str(path)!r} holds the answer to another prompt than that of line {number}; give another file"
            )
        if "error" not in entry:
            found[number] = entry
    return found


def write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Write them, all or none."""
    draft = path.with_name(path.name + ".part")
    draft.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")
    os.replace(draft, path)
