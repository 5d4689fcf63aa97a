"""`paradec decide`: answer typed questions about a text, with probabilities."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from paradec.cli import options, show, tables

STATE = typer.Argument(metavar="TEXT", help='What the questions are about, in quotes; "-" reads standard input.')
YES_NO = typer.Option(metavar="QUESTION", help="Whether something is true; all questions may be repeated.")
OPTIONS = "QUESTION=A|B|..."
PICK = typer.Option(metavar=OPTIONS, help="One of several options.")
SCORE = typer.Option(metavar=OPTIONS, help="A level on a scale, the lowest first.")
SPAN = typer.Option(metavar=OPTIONS, help="One of several texts, which the prompt does not list.")
TEMPERATURE = typer.Option(help="Divides the log-probabilities of the labels, as `paradec.fit_temperature` finds it.")


@options.include("model dtype quantization device as_json")
def decide(
    text: Annotated[str, STATE],
    yes_no: Annotated[list[str] | None, YES_NO] = None,
    pick: Annotated[list[str] | None, PICK] = None,
    score: Annotated[list[str] | None, SCORE] = None,
    span: Annotated[list[str] | None, SPAN] = None,
    temperature: Annotated[float, TEMPERATURE] = 1.0,
    **shared: Any,
) -> None:
    """Answer typed questions about a text, with their probabilities.

    confidence: 0 is a guess, 1 is certain. mass: the total probability of the options among all texts that the model
    could write; if it is low, the model did not understand the question.
    """
    from paradec.api.decide import Pick, Score, Span, YesNo
    from paradec.api.decide import decide as decide_questions

    questions: dict[str, Any] = {question: YesNo(question) for question in yes_no or ()}
    for kind, option, texts in ((Pick, "--pick", pick), (Score, "--score", score), (Span, "--span", span)):
        for argument in texts or ():
            question, equals, listed = argument.rpartition("=")
            if not equals:
                raise ValueError(f"{option} takes {OPTIONS}, got {argument!r}")
            if (name := question or option.removeprefix("--")) in questions:
                raise ValueError(f"{option}={argument!r}: another question is called {name!r}; give it other words")
            questions[name] = kind(question or None, listed.split("|"))
    if not questions:
        raise ValueError("give a question: --yes-no, --pick, --score or --span")
    state, as_json = options.read_text(text), shared.pop("as_json")
    with show.waiting("loading"):
        model = options.load(shared)
    decisions = decide_questions(model, state, questions, temperature=temperature)
    if as_json:
        typer.echo(json.dumps(decisions.to_dict(), ensure_ascii=False))
        return
    rows = []
    for name, answer in decisions.items():
        likeliest = sorted(answer.probabilities.items(), key=lambda pair: -pair[1])[:5]
        listed = ", ".join(f"{value} {probability:.3f}" for value, probability in likeliest)
        rows.append([name, f"{answer.value}", f"{answer.confidence:.3f}", f"{answer.mass:.3f}", listed])
    tables.table(["question", "answer", "confidence", "mass", "probabilities"], rows)
