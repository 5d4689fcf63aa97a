"""`--in FILE --out answers.jsonl` of `paradec generate` and `decide`: an answer or error per prompt; runs can resume.

A line of answers is a JSON object with these fields:
- "line" and "prompt"; "id" and "constraint" if the prompt has them
- "text", "tokens", "finished", "nfe", and with --logprobs "logprobs"; lists if there are several answers per prompt.
  Lines of `decide` have "answers" instead, lines of failed prompts "error".
- "settings": {"paradec": version, "model", "dtype", "quantization", "tokenizer", "drafter", "request": non-default
  fields of `paradec.Request`, and the seed}. They are the same in all lines of a file.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import typer

import paradec
from paradec.cli import options, show
from paradec.cli.work import Work, complete_row_indices, decode_in_batches
from paradec.core.checks import check_text, short_repr
from paradec.core.interrupts import EXIT_CODE, hold_interrupt, restore_interrupt
from paradec.core.text_files import decode_utf8, json_bytes, number_prompts, parse_json, write_bytes
from paradec.core.version import DRAWS
from paradec.request import Request

if TYPE_CHECKING:
    from paradec.core.prompts import Prompts

SOME_FAILED = 1
"""Exit code when some prompts failed; 2 is for wrong arguments."""
BEGINNING = b'{"line": '
"""First bytes of every line of answers."""
PER_PROMPT = (ValueError, TypeError, FloatingPointError)
"""Errors that concern a single prompt."""


@dataclass
class Line:
    """A line of the file of prompts."""

    number: int
    prompt: Any = None
    """A text or a chat."""
    id: Any = None
    error: str | None = None
    constraint: Any = None
    """JSON data for `Request.constraint`; None: the constraint of the command."""

    def entry(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Build the line of answers for this prompt."""
        id_field = {} if self.id is None else {"id": self.id}
        id_field |= {} if self.constraint is None else {"constraint": self.constraint}
        return {"line": self.number, **id_field, "prompt": self.prompt, **answer}


@dataclass
class FileJob:
    """The files of prompts and answers, which the constructor checks before a model is loaded."""

    source: Path
    out: Path
    resume: bool = False
    lines: list[Line] = field(init=False)
    earlier_entries: list[dict[str, Any]] = field(init=False, default_factory=list)
    """Complete lines of an earlier run."""
    settings: dict[str, Any] = field(init=False, default_factory=dict)
    """Field "settings" of every line."""

    def __post_init__(self) -> None:
        options.check_writable("--out", self.out)
        self.lines = read_lines(self.source)
        if not self.out.exists() or self.out.stat().st_size == 0:
            return
        if self.out.samefile(self.source):
            raise ValueError(f"--in and --out are one file, {str(self.out)!r}")
        if not self.resume:
            raise ValueError(f"--out {str(self.out)!r} is not empty: continue it with --resume, or remove it")
        self.earlier_entries = read_answers(self.out, self.lines)

    def set_settings(self, settings: dict[str, Any]) -> int | None:
        """Store the settings from `prepare`. Returns the seed, by default that of the earlier run. Raises ValueError if
        the earlier run had other settings."""
        self.settings = {"paradec": paradec.__version__, **json.loads(json_bytes(settings))}
        request = self.settings["request"]
        if request.get("temperature"):
            request["draws"] = DRAWS
        if self.earlier_entries and "seed" in (earlier := self.earlier_entries[0]["settings"]["request"]):
            request.setdefault("seed", earlier["seed"])
        for entry in self.earlier_entries:
            if changed := differences(entry["settings"], self.settings):
                raise ValueError(
                    f"--out {str(self.out)!r} was made with other settings (line {entry['line']}): "
                    f"{'; '.join(changed)}. Give the same settings, or another file"
                )
        versions = {short_repr(entry["settings"].get("paradec")) for entry in self.earlier_entries}
        for version in versions - {short_repr(paradec.__version__)}:
            this_version = f"this is {paradec.__version__}: they may differ"
            warnings.warn(f"--out {str(self.out)!r} has answers of paradec {version}, and {this_version}", stacklevel=2)
        seed: int | None = request.get("seed")
        return seed

    def answer(self, work: Work, batch: int | None, as_json: bool) -> NoReturn:
        """Answer the remaining prompts, at most `batch` rows together (None: what fits), print a summary and exit."""
        self.settings["request"]["seed"] = work.request["seed"]
        rows = self._encode(work)
        finished = {entry["line"] for entry in self.earlier_entries if "error" not in entry}
        parts = [rows[line.number] for line in self.lines if line.number in rows and line.number not in finished]
        max_rows = work.rows_that_fit(_concatenate(parts)) if parts else 1
        size = min(max_rows, batch or max_rows)
        if parts:
            shortest = min(parts, key=lambda part: len(part.rows[0])).slice_rows(0, 1)
            request = Request(sampler=work.method, **work.request)  # incompatible arguments raise now
            with work.method.start(work.model, shortest, request).release_stores_on_exit():
                pass
        self.run(partial(DecodeRun, work, rows, size), max(1, size // work.num_answers), as_json)

    def run(self, make_run: Callable[..., Run], num_lines: int, as_json: bool) -> NoReturn:
        """Answer the remaining prompts, `num_lines` together, print a summary and exit."""
        finished = {entry["line"]: entry for entry in self.earlier_entries if "error" not in entry}
        todo = [line for line in self.lines if line.number not in finished]
        if self.out.is_file():
            write_lines(self.out, finished.values())  # removes an incomplete last line
        code = 0
        restore_interrupt()
        with self.out.open("ab") as file, show.Bar() as bar:
            run = make_run(file=file, settings=self.settings, bar=bar, total=len(todo))
            try:
                for _, group in itertools.groupby(todo, lambda line: line.constraint):
                    while lines := [*itertools.islice(group, num_lines)]:
                        run.answer(lines)
            except KeyboardInterrupt:
                code = EXIT_CODE
        if self.out.is_file():  # in a pipe, answers stay in the order of writing
            write_lines(self.out, sorted([*finished.values(), *run.entries], key=lambda entry: entry["line"]))
        failed = self._print_summary(run, len(finished), code != 0, as_json)
        raise typer.Exit(code or (SOME_FAILED if failed else 0))

    def _encode(self, work: Work) -> dict[int, Prompts]:
        """Encode the rows of each line. `copy_indices` count over all lines, so that a resumed run draws the same."""
        from paradec.core.prompts import Prompts

        rows: list[list[int]] = []
        valid: list[Line] = []
        for line in self.lines:
            if line.error is None:
                try:
                    rows += work.encode(line.prompt).rows[:1]
                    valid.append(line)
                except PER_PROMPT as error:
                    line.error = _to_one_line(error)
        prompts = Prompts(rows, False, [0] * len(rows)).repeat(work.num_answers).number_duplicates()
        copies = work.num_answers
        return {line.number: prompts.slice_rows(copies * i, copies * (i + 1)) for i, line in enumerate(valid)}

    def _print_summary(self, run: Run, num_before: int, interrupted: bool, as_json: bool) -> int:
        """Print the summary. Returns the number of failed prompts."""
        answers, failed = run.answers, sum("error" in entry for entry in run.entries)
        answered = len(run.entries) - failed
        if as_json:
            data = {"out": str(self.out), "prompts": len(self.lines), "answered": answered, "failed": failed}
            data |= {"there_before": num_before, "interrupted": interrupted}
            if answers is not None:
                data |= {"tokens": sum(answers.rows["tokens"]), "forwards": answers.totals["nfe"]}
                data |= {"row_calls": sum(answers.rows["row_nfe"])}
                data |= {name: answers.totals[name] for name in ("forwarded_tokens", "seconds")}
            typer.echo(json.dumps(data, ensure_ascii=False))
            return failed
        message = f"{show.format_count(answered, 'answer')} in {self.out}"
        if num_before:
            message += f" besides {num_before} of an earlier run"
        if failed:
            message += f", {failed} failed (their lines have an error)"
        if interrupted:
            message += f", interrupted at {num_before + answered + failed} of {len(self.lines)}: --resume continues"
        typer.echo(message)
        if answers:
            typer.echo(answers.summary(len(answers), interrupted=False))
        return failed


@dataclass(kw_only=True)
class Run:
    """Base of runs that answer lines and write the answers to `file`. total: number of lines to answer."""

    file: BinaryIO
    settings: dict[str, Any]
    bar: show.Bar
    total: int
    entries: list[dict[str, Any]] = field(init=False, default_factory=list)
    answers: show.Answers | None = field(init=False, default=None)
    """Decoded answers with their cost."""

    def answer(self, lines: list[Line]) -> None:
        """Decode lines together; if that fails, each separately. Ctrl-C first writes complete answers, then raises."""
        self._write([line.entry({"error": line.error}) for line in lines if line.error is not None])
        lines = [line for line in lines if line.error is None]
        try:
            self._decode(lines)
        except PER_PROMPT as error:
            if len(lines) == 1:
                self._write([lines[0].entry({"error": _to_one_line(error)})])
            else:
                for line in lines:
                    self.answer([line])

    def _decode(self, lines: list[Line]) -> None:
        """Answer lines without an error, and write their entries."""
        raise NotImplementedError

    def _write(self, entries: list[dict[str, Any]]) -> None:
        """Append complete lines in one write."""
        with hold_interrupt():
            entries = [entry | {"settings": self.settings} for entry in entries]
            self.file.write(b"".join(map(json_bytes, entries)))
            self.file.flush()
            self.entries += entries


@dataclass
class DecodeRun(Run):
    """Run that decodes lines, `size` rows together. rows: the encoded rows of each line, by line number."""

    work: Work
    rows: dict[int, Prompts]
    size: int

    def __post_init__(self) -> None:
        self.answers = show.Answers(is_single=False, tokenizer=self.work.model.tokenizer)

    def _decode(self, lines: list[Line]) -> None:
        if not lines:
            return
        assert self.answers is not None
        copies = self.work.num_answers
        prompts = _concatenate([self.rows[line.number] for line in lines])
        self.bar.set_range(len(self.entries), len(lines), self.total)
        constraint = {} if lines[0].constraint is None else {"constraint": lines[0].constraint}
        answers: dict[int, dict[str, Any]] = {}
        first, interrupted = 0, False  # `first`: index of the batch's first row
        for batch, output, interrupted in decode_in_batches(
            lambda batch: self.work.run(batch, self.bar.update, **constraint), prompts, self.size
        ):
            complete_rows = complete_row_indices(output) if interrupted else range(len(batch.rows))
            self.answers.add(output, complete_rows)
            columns: dict[str, Any] = {"text": output.new_tokens.tolist() if output.text is None else output.text}
            columns |= {"tokens": output.tokens, "finished": output.finished, "nfe": output.row_nfe}
            if output.logprobs is not None:
                rows_logprobs = self.answers.rows["logprobs"][len(self.answers) - len(complete_rows) :]
                columns["logprobs"] = dict(zip(complete_rows, rows_logprobs, strict=True))
            answers |= {first + row: {name: values[row] for name, values in columns.items()} for row in complete_rows}
            first += len(batch.rows)
        finished = []
        for line_index, line in enumerate(lines):
            rows = range(copies * line_index, copies * (line_index + 1))
            line_answers = [answers[row] for row in rows if row in answers]
            if len(line_answers) == copies:
                lists = {name: [answer[name] for answer in line_answers] for name in line_answers[0]}
                finished.append(line.entry(line_answers[0] if copies == 1 else lists))
        self._write(finished)
        if interrupted:
            raise KeyboardInterrupt


def _to_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _concatenate(parts: Sequence[Prompts]) -> Prompts:
    from paradec.core.prompts import Prompts

    rows = [row for part in parts for row in part.rows]
    copies = [copy_index for part in parts for copy_index in part.copy_indices or ()]
    return Prompts(rows, False, [0] * len(rows), copies)


def read_lines(path: Path) -> list[Line]:
    """Read a file of prompts, one per line; .jsonl files have JSON lines. Blank lines are skipped; a line that is not a
    prompt gets an error. Raises ValueError for a file without text or prompts."""
    try:
        numbered_lines = number_prompts(path)
    except ValueError as error:
        raise ValueError(f"--in {error}") from None
    if not numbered_lines:
        raise ValueError(f"--in {str(path)!r} has no prompts")
    is_json = path.suffix.lower() == ".jsonl"
    return [_read_line(number, line) if is_json else Line(number, line) for number, line in numbered_lines]


def _read_line(number: int, text: str) -> Line:
    try:
        data = parse_json(text)
    except ValueError as error:
        return Line(number, error=str(error))
    if isinstance(data, str):
        data = {"prompt": data}
    if not isinstance(data, dict):
        return Line(number, error='neither a text nor an object with "prompt" or "messages"')
    prompt, prompt_id = data.get("prompt", data.get("messages")), data.get("id")
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt)
    if not isinstance(prompt, str) and not is_chat:
        message = '"prompt" must be a text, or "messages" a list of {"role", "content"}'
        names = ", ".join(map(repr, data)) or "no field"
        fields = "" if prompt is not None else f'; the line has {names}: rename the one with the text to "prompt"'
        return Line(number, None, prompt_id, message + fields)
    try:
        check_text("prompt", prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
        constraint = data.get("constraint")
        if constraint is not None:
            from paradec.constraints.values import parse_constraint  # imports numpy

            parse_constraint("constraint", constraint)
    except (ValueError, TypeError) as error:
        return Line(number, prompt, prompt_id, str(error))
    return Line(number, prompt, prompt_id, constraint=constraint)


def read_answers(path: Path, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Read the complete lines of an earlier run, in the order of the file; an incomplete last line is left out. Raises
    ValueError for other lines, answers to other prompts, and lines without settings."""
    prompts_of_file = {line.number: line.entry({}) for line in lines if line.error is None}
    prompts = {line.number: _prompt_key(prompts_of_file.get(line.number, {"prompt": line.prompt})) for line in lines}
    entries: list[dict[str, Any]] = []
    texts = path.read_bytes().split(b"\n")
    for line_number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            entry = parse_json(decode_utf8(text, "the line"))
            number = entry["line"]
            is_other_prompt = number not in prompts or _prompt_key(entry) != prompts[number]
        except (ValueError, KeyError, TypeError):
            # the last line may be incomplete
            if line_number == len(texts) and (text.startswith(BEGINNING) or BEGINNING.startswith(text)):
                continue
            raise ValueError(f"--out {str(path)!r} holds no answers at line {line_number}; give another file") from None
        if is_other_prompt:
            raise ValueError(f"--out {str(path)!r} answers another prompt than line {number}; give another file")
        settings = entry.get("settings")
        if not isinstance(settings, dict) or not isinstance(settings.get("request"), dict):
            raise ValueError(f"--out {str(path)!r} has no settings for line {number}; give another file")
        entries.append(entry)
    return entries


def _prompt_key(entry: dict[str, Any]) -> bytes:
    return json_bytes([entry["prompt"], entry.get("constraint")])


def differences(stored: dict[str, Any], current: dict[str, Any], inside: str = "") -> list[str]:
    """List the settings, except the version, that differ between an earlier run and this one, as clauses."""
    lines = []
    for name in {**stored, **current}:
        stored_value, current_value = stored.get(name), current.get(name)
        if isinstance(stored_value, dict) and isinstance(current_value, dict):
            lines += differences(stored_value, current_value, "" if name == "request" else f"{inside}{name}.")
        elif stored_value != current_value and name != "paradec":
            texts = ["not set" if value is None else short_repr(value) for value in (stored_value, current_value)]
            lines.append(f"{inside}{name} is {texts[0]} in the file and {texts[1]} here")
    return lines


def write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Write a file with all entries, or leave it unchanged."""
    write_bytes(path, b"".join(map(json_bytes, entries)))
