"""`paradec decide`: answer typed questions about a text, with probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options, show, tables
from paradec.cli.files import FileJob, Line, Run

TEXT = typer.Argument(metavar="TEXT", help='The text to ask about, in quotes; "-" reads standard input.')
YES_NO = typer.Option(metavar="QUESTION", help="Whether something is true; all options for questions may be repeated.")
OPTIONS = "QUESTION=A|B|..."
PICK = typer.Option(metavar=OPTIONS, help="One of several options.")
SCORE = typer.Option(metavar=OPTIONS, help="A level on a scale, the lowest first.")
SPAN = typer.Option(metavar=OPTIONS, help="One of several texts, which the prompt does not list.")
IN = options.existing_file('Texts, one per line; .jsonl: {"prompt": ...}, optional "id".', "--in")
OUT = typer.Option(metavar="FILE.jsonl", help="File for the answers to --in, one line per text.")
TEMPERATURE = typer.Option(help="Divides the labels' log-probabilities; `paradec.fit_temperature` finds a value.")


@options.include("model tokenizer dtype quantization device as_json")
def decide(
    text: Annotated[str | None, TEXT] = None,
    yes_no: Annotated[list[str] | None, YES_NO] = None,
    pick: Annotated[list[str] | None, PICK] = None,
    score: Annotated[list[str] | None, SCORE] = None,
    span: Annotated[list[str] | None, SPAN] = None,
    temperature: Annotated[float, TEMPERATURE] = 1.0,
    in_: Annotated[Path | None, IN] = None,
    out: Annotated[Path | None, OUT] = None,
    resume: bool = typer.Option(False, "--resume", help="Continue from --out; retry failed texts."),
    **shared: Any,
) -> None:
    """Answer typed questions about a text, with their probabilities.

    confidence: 0 is a guess, 1 is certain. mass: the total probability of the options among all texts that the model
    could write; if it is low, the model did not understand the question.
    """
    if (in_ is None) != (out is None) or (in_ is None) == (text is None) or resume and in_ is None:
        raise ValueError("give one text, or --in FILE with --out FILE.jsonl (and --resume)")
    job = None if in_ is None or out is None else FileJob(in_, out, resume)
    from paradec.api.decide import Pick, Score, Span, YesNo, check_decision_model
    from paradec.api.decide import decide as decide_questions

    questions: dict[str, Any] = {question: YesNo(question) for question in yes_no or ()}
    for kind, option, texts in ((Pick, "--pick", pick), (Score, "--score", score), (Span, "--span", span)):
        for argument in texts or ():
            question, equals, listed = argument.rpartition("=")
            if not equals:
                raise ValueError(f"{option} takes {OPTIONS}, got {argument!r}")
            if (name := question or option.removeprefix("--")) in questions:
                raise ValueError(f"{option}={argument!r}: another question is called {name!r}; change its words")
            questions[name] = kind(question or None, listed.split("|"))
    if not questions:
        raise ValueError("give a question: --yes-no, --pick, --score or --span")
    source, as_json = options.read_text(text or ""), shared.pop("as_json")
    if job is not None:
        stored = {name: [item.type, item.instructions, item.options] for name, item in questions.items()}
        data = {"model": shared["model"] or "packaged", "temperature": temperature, "request": {"questions": stored}}
        names = ("tokenizer", "dtype", "quantization")
        job.set_settings(data | {name: shared[name] for name in names if shared[name] is not None})
    with show.waiting("loading"):
        model = options.load(shared)
    check_decision_model(model)
    decide_one = partial(decide_questions, model, questions=questions, temperature=temperature)
    if job is not None:
        job.run(partial(DecisionRun, decide_one), 1, as_json)
    decisions = decide_one(source)
    if as_json:
        typer.echo(json.dumps(decisions.to_dict(), ensure_ascii=False))
        return
    rows = []
    for name, answer in decisions.items():
        likeliest = sorted(answer.probabilities.items(), key=lambda pair: -pair[1])[:5]
        listed = ", ".join(f"{value} {probability:.3f}" for value, probability in likeliest)
        rows.append([name, f"{answer.value}", f"{answer.confidence:.3f}", f"{answer.mass:.3f}", listed])
    tables.table(["question", "answer", "confidence", "mass", "probabilities"], rows)


@dataclass
class DecisionRun(Run):
    """Run that answers questions about each line. decide: function from a text to the result of `paradec.decide`."""

    decide: Callable[[Any], Any]

    def _decode(self, lines: list[Line]) -> None:
        for line in lines:
            if line.constraint is not None:
                raise ValueError('"constraint" is for `paradec generate`: the options of a question are the answers')
            answers = self.decide(line.prompt).to_dict()["answers"]
            self._write([line.entry({"answers": answers})])
            self.bar.show_share("deciding", len(self.entries) / self.total, len(self.entries), self.total)
