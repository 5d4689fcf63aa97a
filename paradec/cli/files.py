"""`paradec generate --in prompts.jsonl --out answers.jsonl`: a line for every prompt, errors among them, and a resume.

A line of answers is {"line", "id" and "constraint" (if given), "prompt", "text", "tokens", "finished", "nfe",
"settings"}, with several answers to a prompt lists of these four; or {"line", "id", "prompt", "error", "settings"}.
"settings" are {"paradec": version, "model", "dtype", "drafter", "request": what differs from the defaults of
`paradec.Request`, and the seed}. They are in every line, so that answers of different settings never share a file.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import typer

import paradec
from paradec.cli import options, show
from paradec.cli.work import Work, completed, in_batches
from paradec.constraints.values import constraint_of
from paradec.core.checks import check_text, shown
from paradec.core.interrupts import EXIT_CODE, held_back, raise_again
from paradec.core.text_files import decoded, json_bytes, lines_of, parse_json, read_text, write_bytes
from paradec.core.version import DRAWS

if TYPE_CHECKING:
    from paradec.core.prompts import Prompts

SOME_FAILED = 1
"""The exit code where prompts failed; 2 is for wrong arguments."""
BEGINNING = b'{"line": '
"""Of every line of answers."""
PER_PROMPT = (ValueError, TypeError, FloatingPointError)
"""Errors of one prompt that others are not concerned with."""


@dataclass
class Line:
    """A line of the file of prompts."""

    number: int
    prompt: Any = None
    """A text or a chat."""
    id: Any = None
    error: str | None = None
    constraint: Any = None
    """As data that `Request.constraint` takes; None takes what is asked of all."""

    def entry(self, found: dict[str, Any]) -> dict[str, Any]:
        """The line of answers with what was found."""
        named = {} if self.id is None else {"id": self.id}
        named |= {} if self.constraint is None else {"constraint": self.constraint}
        return {"line": self.number, **named, "prompt": self.prompt, **found}


@dataclass
class FileJob:
    """The two files: checked when made, before a model is loaded."""

    source: Path
    out: Path
    resume: bool = False
    lines: list[Line] = field(init=False)
    earlier: list[dict[str, Any]] = field(init=False, default_factory=list)
    """The whole lines of an earlier run."""
    settings: dict[str, Any] = field(init=False, default_factory=dict)
    """What every line says of how it was made."""

    def __post_init__(self) -> None:
        options.check_writable("--out", self.out)
        self.lines = read_lines(self.source)
        if not self.out.exists() or self.out.stat().st_size == 0:
            return
        if self.out.samefile(self.source):
            raise ValueError(f"--in and --out are one file, {str(self.out)!r}")
        if not self.resume:
            raise ValueError(f"--out {str(self.out)!r} holds something: --resume goes on with it, or remove it")
        self.earlier = read_answers(self.out, self.lines)

    def agree(self, said: dict[str, Any]) -> int | None:
        """Take the settings that `prepare` found. Returns the seed, of an earlier run where none was given. Raises
        ValueError where an earlier run had other settings."""
        self.settings = {"paradec": paradec.__version__, **json.loads(json_bytes(said))}
        request = self.settings["request"]
        if request.get("temperature"):
            request["draws"] = DRAWS
        if self.earlier:
            request.setdefault("seed", self.earlier[0]["settings"]["request"].get("seed"))
        for entry in self.earlier:
            if found := differences(entry["settings"], self.settings):
                raise ValueError(
                    f"--out {str(self.out)!r} was made with other settings (line {entry['line']}): {'; '.join(found)}. "
                    "Give the same ones, or another file"
                )
        versions = {shown(entry["settings"].get("paradec")) for entry in self.earlier}
        for other in versions - {shown(paradec.__version__)}:
            this = f"this is {paradec.__version__}: they may differ"
            warnings.warn(f"--out {str(self.out)!r} has answers of paradec {other}, and {this}", stacklevel=2)
        seed: int | None = request.get("seed")
        return seed

    def answer(self, work: Work, batch: int | None, as_json: bool) -> NoReturn:
        """Answer the other prompts, at most `batch` rows together (None: what fits), print a summary and exit."""
        self.settings["request"]["seed"] = work.request["seed"]
        rows = self._encode(work)
        before = {entry["line"]: entry for entry in self.earlier if "error" not in entry}
        todo = [line for line in self.lines if line.number not in before]
        parts = [rows[line.number] for line in todo if line.number in rows]
        fitting = work.rows_that_fit(_joined(parts)) if parts else 1
        size = min(fitting, batch or fitting)
        if parts:
            work.try_start(min(parts, key=lambda part: len(part.rows[0])).part(0, 1))
        if self.out.is_file():
            write_lines(self.out, before.values())  # nothing is written onto a line that was cut off
        code = 0
        raise_again()
        with self.out.open("ab") as file, show.Bar() as bar:
            run = Run(work, rows, size, file, self.settings, bar, total=len(todo))
            try:
                for _, alike in itertools.groupby(todo, lambda line: line.constraint):
                    while some := [*itertools.islice(alike, max(1, size // work.answers))]:
                        run.answer(some)
            except KeyboardInterrupt:
                code = EXIT_CODE
        if self.out.is_file():  # a pipe keeps the answers as they came
            write_lines(self.out, sorted([*before.values(), *run.entries], key=lambda entry: entry["line"]))
        failed = self._tell(run, len(before), code != 0, as_json)
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
                    line.error = _one_line(error)
        every = Prompts(rows, False, [0] * len(rows)).repeated(work.answers).numbered()
        copies = work.answers
        return {line.number: every.part(copies * i, copies * (i + 1)) for i, line in enumerate(kept)}

    def _tell(self, run: Run, before: int, interrupted: bool, as_json: bool) -> int:
        """Print the summary. Returns how many prompts failed."""
        found, failed = run.found, sum("error" in entry for entry in run.entries)
        answered, totals = len(run.entries) - failed, found.totals
        if as_json:
            data = {"out": str(self.out), "prompts": len(self.lines), "answered": answered, "failed": failed}
            data |= {"there_before": before, "interrupted": interrupted, "tokens": sum(found.rows["tokens"])}
            data |= {"forwards": totals["nfe"], "row_calls": sum(found.rows["row_nfe"])}
            data |= {"forwarded_tokens": totals["forwarded_tokens"], "seconds": totals["seconds"]}
            typer.echo(json.dumps(data, ensure_ascii=False))
            return failed
        what = f"{show.count(answered, 'answer')} in {self.out}"
        if before:
            what += f" beside {before} that were there"
        if failed:
            what += f", {failed} failed (their lines have an error)"
        if interrupted:
            what += f", interrupted at {before + answered + failed} of {len(self.lines)}: --resume goes on"
        typer.echo(what)
        if len(found):
            typer.echo(found.summary(len(found), interrupted=False))
        return failed


@dataclass
class Run:
    """Decodes lines, `size` rows together, and writes the answers to `file`. rows: by line number. total: of lines."""

    work: Work
    rows: dict[int, Prompts]
    size: int
    file: BinaryIO
    settings: dict[str, Any]
    bar: show.Bar
    total: int
    entries: list[dict[str, Any]] = field(init=False, default_factory=list)
    found: show.Answers = field(init=False, default_factory=lambda: show.Answers(single=False))

    def answer(self, lines: list[Line]) -> None:
        """Decode lines together, or each by itself where one raises. Ctrl-C raises KeyboardInterrupt at the end."""
        self._write([line.entry({"error": line.error}) for line in lines if line.error is not None])
        lines = [line for line in lines if line.error is None]
        try:
            self._decode(lines)
        except PER_PROMPT as error:
            if len(lines) == 1:
                self._write([lines[0].entry({"error": _one_line(error)})])
            else:
                for line in lines:
                    self.answer([line])

    def _decode(self, lines: list[Line]) -> None:

        if not lines:
            return
        copies = self.work.answers
        prompts = _joined([self.rows[line.number] for line in lines])
        self.bar.among(len(self.entries), len(lines), self.total)
        more = {} if lines[0].constraint is None else {"constraint": lines[0].constraint}
        answers: dict[int, dict[str, Any]] = {}
        first, interrupted = 0, False  # row of the batch
        for batch, output, interrupted in in_batches(
            lambda batch: self.work.run(batch, self.bar.update, **more), prompts, self.size
        ):
            kept = completed(output) if interrupted else range(len(batch.rows))
            self.found.add(output, kept)
            columns = {"text": output.new_tokens.tolist() if output.text is None else output.text}
            columns |= {"tokens": output.tokens, "finished": output.finished, "nfe": output.row_nfe}
            answers |= {first + row: {name: values[row] for name, values in columns.items()} for row in kept}
            first += len(batch.rows)
        done = []
        for at, line in enumerate(lines):
            own = [answers[row] for row in range(copies * at, copies * (at + 1)) if row in answers]
            if len(own) == copies:
                lists = {name: [answer[name] for answer in own] for name in own[0]}
                done.append(line.entry(own[0] if copies == 1 else lists))
        self._write(done)
        if interrupted:
            raise KeyboardInterrupt

    def _write(self, entries: list[dict[str, Any]]) -> None:
        """Append whole lines, at once."""
        with held_back():
            entries = [entry | {"settings": self.settings} for entry in entries]
            self.file.write(b"".join(map(json_bytes, entries)))
            self.file.flush()
            self.entries += entries


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _joined(parts: Sequence[Prompts]) -> Prompts:
    from paradec.core.prompts import Prompts

    rows = [row for part in parts for row in part.rows]
    before = [number for part in parts for number in part.before or ()]
    return Prompts(rows, False, [0] * len(rows), before)


def read_lines(path: Path) -> list[Line]:
    """Read the prompts of a file: one a line, in a file named .jsonl as JSON. Blank lines are skipped; a line that is
    not a prompt has an error. Raises ValueError for a file without text or prompts."""
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
    """The whole lines of an earlier run, in the order of the file: a last one that was cut off is left out. Raises
    ValueError for other lines, answers to other prompts, and lines that do not say their settings."""
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
            raise ValueError(f"--out {str(path)!r} answers another prompt than line {number}; give another file")
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
    """Write all entries or none."""
    write_bytes(path, b"".join(map(json_bytes, entries)))
