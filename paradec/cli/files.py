"""`paradec generate --in prompts.jsonl --out answers.jsonl`: a line for every prompt, errors among them, and a resume.

A line of the answers is {"line", "id" and "constraint" (if the prompt has one), "prompt", "text", "tokens", "finished",
"nfe", "settings"}, with several answers to a prompt lists of the middle four; or {"line", "id", "prompt", "error",
"settings"}. A prompt that fails holds up no other.

"settings" is what the answer depends on beside the prompt: {"paradec": version, "model", "dtype" and "drafter" as they
were given, "request": what differs from the defaults of `paradec.Request`, and always the seed}. It is in every line,
so that answers of different settings cannot get into one file, whatever line a job was killed at.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

import paradec
from paradec.cli import options, show
from paradec.cli.work import Work
from paradec.constraints.values import constraint_of
from paradec.core.checks import check_text, shown
from paradec.core.interrupts import EXIT_CODE, held_back, raise_again
from paradec.core.text_files import decoded, json_bytes, lines_of, parse_json, read_text, write_bytes
from paradec.core.version import DRAWS

if TYPE_CHECKING:
    from paradec.api.output import Output
    from paradec.core.prompts import Prompts

SOME_FAILED = 1
"""The exit code where prompts failed; 2 is for wrong arguments."""
BEGINNING = b'{"line": '
"""Of every line of answers."""
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
    constraint: Any = None
    """What the answer must be, as data that `Request.constraint` takes; None takes what is asked of all."""

    def entry(self, found: dict[str, Any]) -> dict[str, Any]:
        """What is written of it."""
        named = {} if self.id is None else {"id": self.id}
        named |= {} if self.constraint is None else {"constraint": self.constraint}
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
    there: list[dict[str, Any]] = field(init=False, default_factory=list)
    """The whole lines of an earlier run."""
    before: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)
    """By line: its answers, without the prompts that failed, which are tried again."""
    settings: dict[str, Any] = field(init=False, default_factory=dict)
    """What every line says of how it was made."""

    def __post_init__(self) -> None:
        options.check_readable("--in", self.source)
        options.check_writable("--out", self.out)
        self.lines = read_lines(self.source)
        there = self.out.exists() and self.out.stat().st_size > 0
        if there and self.out.samefile(self.source):
            raise ValueError(f"--in and --out are one file, {str(self.out)!r}")
        if there and not self.resume:
            raise ValueError(f"--out {str(self.out)!r} holds something: --resume goes on with it, or remove it")
        if there:
            self.there = read_answers(self.out, self.lines)
            self.before = {entry["line"]: entry for entry in self.there if "error" not in entry}
        self.goes_on = there

    def agree(self, said: dict[str, Any]) -> int | None:
        """Take the settings, and the seed of an earlier run where none was given; returns the seed.

        Args:
            said: as `prepare` says it.

        Raises:
            ValueError: an earlier run had other settings; the message names them.
        """
        self.settings = {"paradec": paradec.__version__, **json.loads(json_bytes(said))}
        request = self.settings["request"]
        if request.get("temperature"):
            request["draws"] = DRAWS
        if self.there:
            request.setdefault("seed", self.there[0]["settings"]["request"].get("seed"))
        known: list[Any] = [self.settings]
        for entry in self.there:
            if entry["settings"] in known:
                continue
            if found := differences(entry["settings"], self.settings):
                raise ValueError(
                    f"--out {str(self.out)!r} was made with other settings (line {entry['line']}): {'; '.join(found)}. "
                    "Give the same ones, or another file"
                )
            known.append(entry["settings"])
            other = shown(entry["settings"].get("paradec"))
            warnings.warn(
                f"--out {str(self.out)!r} has answers of paradec {other}, and this is {paradec.__version__}: they may "
                "differ",
                stacklevel=2,
            )
        seed: int | None = request.get("seed")
        return seed

    def answer(self, work: Work, batch: int | None, as_json: bool) -> NoReturn:
        """Answer what is not answered yet, write each answer as soon as it has ended, print a summary, exit. In the end
        the file has the order of the prompts.

        Args:
            batch: rows decoded together at most; None is what fits.
        """
        self.settings["request"]["seed"] = work.request["seed"]
        rows = self._encode(work)
        todo = [line for line in self.lines if line.number not in self.before]
        parts = [rows[line.number] for line in todo if line.number in rows]
        fitting = work.rows_that_fit(_joined(parts)) if parts else 1
        size = min(fitting, batch or fitting)
        together = max(1, size // work.answers)  # lines
        if parts:
            work.try_start(min(parts, key=lambda part: len(part.rows[0])).part(0, 1))
        if self.goes_on:
            write_lines(self.out, self.before.values())  # nothing is written onto a line that was cut off
        found, code = show.Answers(single=False), 0
        entries: list[dict[str, Any]] = []
        raise_again()
        try:
            with self.out.open("ab") as file, show.Bar() as bar:

                def write(done: list[dict[str, Any]]) -> None:
                    """Append them, whole lines, at once."""
                    told = [entry | {"settings": self.settings} for entry in done]
                    file.write(b"".join(map(json_bytes, told)))
                    file.flush()
                    entries.extend(told)

                for first, lines in _in_chunks(todo, together):
                    chunk = Chunk(work, lines, rows, size, write)
                    if chunk.decode(found, bar, (first, len(todo))):
                        code = EXIT_CODE
                        break
        except KeyboardInterrupt:  # between two batches
            code = EXIT_CODE
        if self.out.is_file():  # answers are in the order of the prompts; a pipe has them as they came
            write_lines(self.out, sorted([*self.before.values(), *entries], key=lambda entry: entry["line"]))
        failed = sum("error" in entry for entry in entries)
        self._tell(found, len(entries) - failed, failed, code != 0, as_json)
        raise typer.Exit(code or (SOME_FAILED if failed else 0))

    def _encode(self, work: Work) -> dict[int, Prompts]:
        """By line: its rows, numbered among those of all lines, so that a run that goes on draws as a whole one."""
        from paradec.core.prompts import Prompts

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

    def _tell(self, found: show.Answers, answered: int, failed: int, interrupted: bool, as_json: bool) -> None:
        there = len(self.before)
        if as_json:
            data = {"out": str(self.out), "prompts": len(self.lines), "answered": answered, "failed": failed}
            data |= {"there_before": there, "interrupted": interrupted, "tokens": sum(found.tokens)}
            data |= {"forwards": found.nfe, "row_calls": sum(found.row_nfe)}
            data |= {"forwarded_tokens": found.forwarded_tokens}
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


@dataclass
class Chunk:
    """Lines that are decoded together. Each is written when it has ended; none is written twice."""

    work: Work
    lines: list[Line]
    rows: dict[int, Prompts]
    """By line: its rows."""
    size: int
    """Rows decoded together."""
    write: Callable[[list[dict[str, Any]]], None]
    written: set[int] = field(default_factory=set)
    """Numbers of lines."""

    def decode(self, found: show.Answers, bar: show.Bar, place: tuple[int, int]) -> bool:
        """Decode and write them; of an interrupted chunk those that had ended. Returns whether it was interrupted.

        Args:
            found: where their cost is added. place: how many lines are before these, and of how many.
        """
        self._write([line.entry({"error": line.error}) for line in self.lines if line.error is not None])
        good = [line for line in self.lines if line.error is None]
        try:
            return bool(good) and self._together(good, found, bar, place)
        except PER_PROMPT as error:
            if len(good) == 1:
                good[0].error = _said(error)
                self._write([good[0].entry({"error": good[0].error})])
                return False
        for line in good:  # one of them: each by itself
            one = Chunk(self.work, [line], self.rows, self.size, self.write)
            if line.number not in self.written and one.decode(found, bar, place):
                return True
        return False

    def _together(self, good: list[Line], found: show.Answers, bar: show.Bar, place: tuple[int, int]) -> bool:
        from paradec.cli.batches import completed, in_batches
        from paradec.cli.ended import Ended

        copies = self.work.answers
        asked = _joined([self.rows[line.number] for line in good])
        answers: list[dict[str, Any]] = [{} for _ in asked.rows]
        first = 0  # of the batch

        def tell(output: Output, ended: Iterable[int]) -> None:
            for row in ended:
                answers[first + row] = _answer(output, row)
            done = []
            for at, line in enumerate(good):
                own = answers[copies * at : copies * (at + 1)]
                if all(own):
                    lists = {name: [answer[name] for answer in own] for name in own[0]}
                    done.append(line.entry(own[0] if copies == 1 else lists))
            self._write(done)

        def run(batch: Prompts) -> Output:
            bar.among(place[0] * copies, len(asked.rows), place[1] * copies)
            more = {} if good[0].constraint is None else {"constraint": good[0].constraint}
            return self.work.run(batch, Ended(self.work.model, batch, tell, bar.update), **more)

        for batch, output, stopped in in_batches(run, asked, self.size):
            kept = completed(output) if stopped else range(len(batch.rows))
            with held_back():
                tell(output, kept)
                found.add(output, list(kept))
            if stopped:
                return True
            first += len(batch.rows)
        return False

    def _write(self, entries: list[dict[str, Any]]) -> None:
        new = [entry for entry in entries if entry["line"] not in self.written]
        if new:
            with held_back():
                self.write(new)
                self.written |= {entry["line"] for entry in new}


def _in_chunks(lines: Sequence[Line], most: int) -> Iterator[tuple[int, list[Line]]]:
    """The lines, at most so many together, which have one constraint; and how many are before them."""
    first = 0
    for _, same in itertools.groupby(lines, lambda line: line.constraint):
        while some := [*itertools.islice(same, most)]:
            yield first, some
            first += len(some)


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _answer(output: Output, row: int) -> dict[str, Any]:
    texts = output.text if output.text is not None else output.new_tokens.tolist()
    nfe, tokens, finished = output.row_nfe[row], output.tokens[row], output.finished[row]
    return {"text": texts[row], "tokens": tokens, "finished": finished, "nfe": nfe}


def _joined(parts: Sequence[Prompts]) -> Prompts:
    from paradec.core.prompts import Prompts

    rows = [row for part in parts for row in part.rows]
    before = [number for part in parts for number in part.before or ()]
    return Prompts(rows, False, [0] * len(rows), before)


def read_lines(path: Path) -> list[Line]:
    """The prompts of a file: one a line, in a file named .jsonl as JSON. Blank lines are passed over; a line that is no
    prompt has an error.

    Raises:
        ValueError: no text, or no prompt. OSError: it cannot be read.
    """
    try:
        given = lines_of(read_text(path))
    except ValueError as error:
        raise ValueError(f"--in {error}") from None
    if not given:
        raise ValueError(f"--in {str(path)!r} has no prompts")
    as_data = path.suffix.lower() == ".jsonl"
    return [_line_of(number, line) if as_data else Line(number, line) for number, line in given]


def _line_of(number: int, text: str) -> Line:
    try:
        data = parse_json(text)
    except ValueError as error:
        return Line(number, error=str(error))
    if isinstance(data, str):
        data = {"prompt": data}
    if not isinstance(data, dict):
        return Line(number, error='neither a text nor an object with "prompt" or "messages"')
    prompt, name = data.get("prompt", data.get("messages")), data.get("id")
    chat = isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt)
    if not isinstance(prompt, str) and not chat:
        return Line(number, None, name, '"prompt" must be a text, or "messages" a list of {"role", "content"}')
    try:
        check_text("prompt", prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
        asked = data.get("constraint")
        if asked is not None:
            constraint_of("constraint", asked)
    except (ValueError, TypeError) as error:
        return Line(number, prompt, name, str(error))
    return Line(number, prompt, name, constraint=asked)


def read_answers(path: Path, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The whole lines of an earlier run, in the order of the file: a last one that was cut off is left out.

    Raises:
        ValueError: something else, answers to other prompts, or lines that do not say their settings.
    """
    asked = {line.number: line.entry({}) for line in lines if line.error is None}
    prompts = {line.number: _question(asked.get(line.number, {"prompt": line.prompt})) for line in lines}
    found: list[dict[str, Any]] = []
    texts = path.read_bytes().split(b"\n")
    for place, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            entry = parse_json(decoded(text, "the line"))
            number = entry["line"]
            other = number not in prompts or _question(entry) != prompts[number]
        except (ValueError, KeyError, TypeError):
            # a part of a line, after which there is no line end
            if place == len(texts) and (text.startswith(BEGINNING) or BEGINNING.startswith(text)):
                continue
            raise ValueError(f"--out {str(path)!r} holds no answers at line {place}; give another file") from None
        if other:
            raise ValueError(
                f"--out {str(path)!r} holds the answer to another prompt than that of line {number}; give another file"
            )
        settings = entry.get("settings")
        if not isinstance(settings, dict) or not isinstance(settings.get("request"), dict):
            raise ValueError(f"--out {str(path)!r} does not say the settings of line {number}; give another file")
        found.append(entry)
    return found


def _question(entry: dict[str, Any]) -> bytes:
    return json_bytes([entry["prompt"], entry.get("constraint")])


def differences(there: dict[str, Any], here: dict[str, Any], inside: str = "") -> list[str]:
    """In which settings an earlier run differs from this one, but for the version: a clause for each."""
    found = []
    for name in {**there, **here}:
        one, other = there.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, "" if name == "request" else f"{inside}{name}.")
        elif one != other and name != "paradec":
            told = ["not set" if value is None else shown(value) for value in (one, other)]
            found.append(f"{inside}{name} is {told[0]} there and {told[1]} here")
    return found


def write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Write them, all or none."""
    write_bytes(path, b"".join(map(json_bytes, entries)))
