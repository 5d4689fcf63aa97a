"""`paradec compare`: scores, files, interrupts and the command."""

import csv
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import GOLDEN
from typer.testing import CliRunner

import paradec
from paradec import cli, samplers
from paradec.cli import show
from paradec.cli.tables import FORMATS
from paradec.core.prompts import encode
from paradec.models.adapter import Model
from paradec.request import Request
from paradec.tools import evaluation
from paradec.tools.evaluation import Comparison, Configuration
from paradec.tools.evaluation.configuration import COMBINATIONS
from paradec.tools.evaluation.metrics import aup, wilson

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
SMALL = {"names": ["factor", "low_confidence"], "max_new_tokens": 12, "block_length": 12}


@pytest.fixture(scope="module")
def small(packaged: Model) -> Comparison:
    questions = evaluation.packaged_questions(["copy", "shuffle"], limit=4)
    return evaluation.compare(packaged, questions=questions, batch=8, **SMALL)


def test_wilson_solves_its_equation() -> None:
    # at both ends p of the interval, right/count is z standard deviations away from p
    z = 1.959963984540054
    for right, count in ((1, 10), (5, 10), (47, 48), (700, 720)):
        for p in wilson(right, count):
            assert (right / count - p) ** 2 == pytest.approx(z * z * p * (1 - p) / count, abs=1e-12)
    # 81 of 263, the example of Newcombe (1998), table I
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_aup_by_hand() -> None:
    # one point: the rectangle under it, unweighted
    assert aup([(2.0, 80.0)], best=100) == 160
    # at the best accuracy all weights are 1: a trapezoid
    assert aup([(1.0, 80.0), (3.0, 80.0)]) == 80 + 2 * 80
    # weights: w(78) = exp(-3 * 2/80), w(80) = 1
    expected = 80 + 0.5 * 1 * (80 + 78 * math.exp(-0.075)) + 0.5 * 2 * (76 * math.exp(-0.15) + 78 * math.exp(-0.075))
    assert aup([(4.0, 76.0), (1.0, 80.0), (2.0, 78.0)]) == pytest.approx(expected, rel=1e-12)
    # settings more than five points of accuracy below the slowest one are excluded
    assert aup([(1.0, 80.0), (9.0, 74.9)]) == 80
    assert aup([(1.0, 80.0), (9.0, 75.0)]) == pytest.approx(80 + 0.5 * 8 * (80 + 75 * math.exp(-3 * 5 / 80)))
    # a faster setting better than the slowest one, and a best accuracy of another sampler
    worth = [y * math.exp(-3 * (1 - y / 90)) for y in (50.0, 60.0)]
    assert aup([(0.5, 50.0), (1.5, 60.0)], best=90) == pytest.approx(0.5 * 50 + 0.5 * sum(worth))
    # an excluded point in the middle: its neighbours are connected
    assert aup([(1.0, 80.0), (2.0, 10.0), (3.0, 80.0)]) == 80 + 2 * 80
    assert aup([(1.0, 0.0)]) == 0


@pytest.mark.parametrize("name", MASKED)
def test_every_masked_sampler_has_a_sweep(name: str) -> None:
    cls = samplers.get(name)
    assert len(cls.sweep) >= 2, f"sampler {name!r} needs a class attribute `sweep` with two entries or more"
    configurations = [c for c in evaluation.configurations(name) if c.sampler == name]
    assert [dict(c.changes) for c in configurations] == [{}, *map(dict, cls.sweep)]
    requests = [(c.make(), tuple(c.request(64).items())) for c in configurations]
    assert len(set(requests)) == len(requests), f"sampler {name!r} has a sweep entry that changes nothing"
    for method, request in requests:
        assert method.uses_steps or "steps" not in dict(request)
        assert Request(**dict(request))


def test_the_baseline_comes_first_and_once() -> None:
    names = [configuration.name for configuration in evaluation.configurations()]
    assert names[0] == "threshold" and len(set(names)) == len(names)
    assert {configuration.sampler for configuration in evaluation.configurations()} == {*MASKED, *COMBINATIONS}
    assert [c.name for c in evaluation.configurations(["factor"])][:2] == ["threshold", "factor"]


def without_times(data: dict[str, Any]) -> dict[str, Any]:
    for row in data["results"]:
        for name in ("seconds", "tokens_per_second"):
            row.pop(name)
        row["versus_baseline"].pop("tokens_per_second")
    return data


def test_seeds_and_blocks_match_generate(packaged: Model) -> None:
    """Seeded draws are equal. If rows have unequal numbers of blocks, steps are a multiple of the largest number."""
    facts = packaged.facts
    model = paradec.wrap(
        packaged.module, tokenizer=packaged.tokenizer, mask_token_id=facts.mask_token_id, prediction="same",
        eos_token_id=facts.eos_token_ids, topology="block_causal", block_length=4,
    )  # fmt: skip
    questions = evaluation.packaged_questions("copy", limit=6)
    prompts = [question.prompt for question in questions]
    assert len({len(row) % 4 for row in encode(model, prompts).rows}) > 1
    warm, few = Configuration("factor", {"temperature": 2.0}), Configuration("low_confidence", {"steps": 1 / 4})
    request = {"max_new_tokens": 12, "seed": 5}
    actual = evaluation.compare(model, questions=questions, names=[warm, few], batch=6, **request)
    drawn = paradec.generate(model, prompts, sampler="factor", temperature=2.0, **request)
    stepwise = paradec.generate(model, prompts, sampler="low_confidence", steps=4, **request)
    for result, output in zip(actual.results[1:], (drawn, stepwise), strict=True):
        assert (result.row_calls, result.tokens) == (sum(output.row_nfe), sum(output.tokens))
    reseeded = paradec.generate(model, prompts, sampler="factor", temperature=2.0, **request | {"seed": 1})
    assert (sum(reseeded.row_nfe), sum(reseeded.tokens)) != (sum(drawn.row_nfe), sum(drawn.tokens))


def test_the_file_has_all_results(small: Comparison, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    small.to_json(file)
    data = json.loads(file.read_text())
    assert data["schema"] == "paradec-compare/2" and data["complete"] is True
    assert data["setup"]["tasks"] == {"copy": 4, "shuffle": 4} and data["setup"]["max_new_tokens"] == 12
    assert [row["sampler"] for row in data["results"]][0] == "threshold"
    assert len(data["results"]) == 1 + 2 * 3
    base = data["results"][0]
    for row in data["results"]:
        right = sum(counts[0] for counts in row["tasks"].values())
        assert row["accuracy"] == right / 8
        assert row["interval"] == list(wilson(right, 8))
        assert row["versus_baseline"]["accuracy"] == row["accuracy"] - base["accuracy"]
        assert row["versus_baseline"]["tokens_per_forward"] == row["tokens_per_forward"] / base["tokens_per_forward"]
        assert row["seconds"] > 0 and row["tokens_per_second"] > 0
    best = max(100 * row["accuracy"] for row in data["results"])
    curve = [(r["tokens_per_forward"], 100 * r["accuracy"]) for r in data["results"] if r["sampler"] == "factor"]
    assert data["aup"]["factor"] == aup(curve, best)
    assert set(data["aup"]) == {"factor", "low_confidence"}  # the baseline has one setting, not three
    assert without_times(Comparison.from_json(file).to_dict()) == without_times(small.to_dict())


def test_answers_and_lost_tokens_are_recorded(packaged: Model, small: Comparison, tmp_path: Path) -> None:
    questions = evaluation.packaged_questions(["copy", "shuffle"], limit=4)
    texts = [question.prompt for question in questions]
    assert [entry["prompt"] for entry in small.prompts] == texts
    quick = {"max_new_tokens": 12, "block_length": 12}
    for result in small.results:
        name, method = result.configuration.sampler, result.configuration.make()
        if name == "low_confidence":
            continue  # its steps come from the request
        for text, question, answer in zip(texts, questions, result.answers, strict=True):
            out = paradec.generate(packaged, text, sampler=method, **quick)
            expected = {"text": out.text, "right": question.right(out.text), "nfe": out.nfe, "tokens": out.tokens[0]}
            assert answer == expected, name
    assert any(small.lost(result) for result in small.results)  # otherwise the test checks nothing
    rows = small.to_dict()["results"]
    for row in rows:
        pairs = list(enumerate(zip(rows[0]["answers"], row["answers"], strict=True)))
        assert row["lost"] == [k for k, (base, answer) in pairs if base["right"] > answer["right"]]
        assert row["won"] == [k for k, (base, answer) in pairs if base["right"] < answer["right"]]
    data = json.loads(json.dumps(small.to_dict()))
    data["results"][1]["answers"].pop()
    (tmp_path / "cut.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="cut.json.*answers and counts differ"):
        Comparison.from_json(tmp_path / "cut.json")


@pytest.mark.parametrize("format_", FORMATS)
def test_tables_can_be_read_back(format_: str) -> None:
    rows = [["a|b", "x_1 & 5%", "1.0"], ["\\back{s}", 'say "a, b"\nc', "#2"]]
    text = FORMATS[format_](["one", "two", "right %"], rows)
    if format_ == "csv":
        actual = list(csv.reader(io.StringIO(text)))[1:]
    elif format_ == "markdown":
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()]
        assert [set(cell) for cell in lines.pop(1)] == [{"-"}, {"-"}, {"-", ":"}]
        actual = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in line] for line in lines[1:]]
    else:
        body = text.partition("\\midrule\n")[2].partition("\n\\bottomrule")[0].splitlines()
        actual = []
        for line in body:
            assert line.endswith(r" \\") and "%" not in line.replace(r"\%", "") and line.count(" & ") == 2
            cells = line.removesuffix(r" \\").split(" & ")
            plain = [cell.replace(r"\textbackslash{}", "\0") for cell in cells]
            actual.append([re.sub(r"\\(.)", r"\1", cell).replace("\0", "\\") for cell in plain])
        assert text.startswith("\\begin{tabular}{llr}") and text.endswith("\\end{tabular}")
    expected = rows if format_ == "csv" else [[cell.replace("\n", " ") for cell in row] for row in rows]
    assert actual == expected


def stop_after(count: int) -> Callable[..., None]:
    calls = itertools.count(1)

    def progress(*_: object) -> None:
        if next(calls) == count:
            raise KeyboardInterrupt

    return progress


def test_interrupted_comparisons_resume(packaged: Model, small: Comparison) -> None:
    questions = evaluation.packaged_questions(["copy", "shuffle"], limit=4)
    with pytest.raises(paradec.Interrupted) as caught:
        # two batches per configuration: the third configuration is interrupted
        evaluation.compare(packaged, questions=questions, batch=4, progress=stop_after(5), **SMALL)
    partial = caught.value.output
    assert not partial.complete and partial.to_dict()["complete"] is False
    assert [r.configuration.name for r in partial.results] == ["threshold", "factor"]
    measured = []

    def record(comparison: Comparison, configuration: Configuration, share: float) -> None:
        measured.append((configuration.name, share))

    full = evaluation.compare(packaged, questions=questions, batch=8, resume=partial, progress=record, **SMALL)
    assert "factor" not in [name for name, _ in measured] and len(measured) == 5
    shares = [share for _, share in measured]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)
    assert without_times(full.to_dict()) == without_times(small.to_dict())
    # a gap in the middle: later results survive an interrupt
    gap = replace(small, results=[r for r in small.results if r.configuration.name != "factor"])
    with pytest.raises(paradec.Interrupted) as caught:
        evaluation.compare(packaged, questions=questions, batch=4, resume=gap, progress=stop_after(1), **SMALL)
    assert [r.configuration for r in caught.value.output.results] == [r.configuration for r in gap.results]
    # results of samplers that this run does not measure survive too
    base = evaluation.compare(packaged, questions=questions, batch=8, resume=small, **SMALL | {"names": "factor"})
    assert without_times(base.to_dict()) == without_times(small.to_dict())
    with pytest.raises(ValueError, match="max_new_tokens=12"):
        evaluation.compare(packaged, questions=questions, resume=partial, max_new_tokens=16)
    with pytest.raises(ValueError, match="questions"):
        renamed = [replace(question, key=question.key + "?") for question in questions]
        evaluation.compare(packaged, questions=renamed, resume=partial, **SMALL)


def test_padding_forwards_are_counted(packaged: Model, small: Comparison) -> None:
    questions = evaluation.packaged_questions(["copy", "shuffle"], limit=4)
    for result in small.results:
        request = result.configuration.request(12) | {"max_new_tokens": 12, "block_length": 12, "trace": True}
        num_padding = 0
        for question in questions:
            out = paradec.generate(packaged, question.prompt, sampler=result.configuration.make(), **request)
            end = int(out.attention_mask.sum()) - 12 + out.tokens[0]
            first_positions = [min((commit[1] for commit in step.commits), default=0) for step in out.trace.steps]
            num_padding += sum(position >= end for position in first_positions)
        assert result.padding_forwards == num_padding
    schedule = next(result for result in small.results if result.configuration.name == "low_confidence")
    assert schedule.padding_forwards == schedule.row_calls - schedule.tokens > 0  # one token per forward
    assert small.baseline.padding_forwards == 0


def test_comparisons_with_a_cache(packaged: Model) -> None:
    questions = evaluation.packaged_questions("shuffle", limit=4)
    arguments: dict[str, Any] = {"questions": questions, "names": "threshold", "max_new_tokens": 16, "batch": 4}
    actual = evaluation.compare(packaged, cache="dual", block_length=4, **arguments)
    assert actual.setup["cache"] == "dual" and actual.setup["blocks"] == "FixedBlocks(length=4, align='prompt')"
    plain = evaluation.compare(packaged, block_length=4, **arguments)
    assert actual.baseline.forwarded_tokens < plain.baseline.forwarded_tokens


def test_prompts_from_a_file(packaged: Model, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "Sort: pear fig apple", "answer": "apple fig  pear"},
        {"prompt": "Reverse: kiwi fig owl", "answer": ["kiwi fig owl", "owl fig kiwi"]},
        {"prompt": "Copy: kiwi fig owl", "answer": "fig kiwi owl", "task": "wrong"},
        {"prompt": "Copy: owl fig pear", "regex": "^owl", "task": "regex"},
        {"prompt": "Copy: fig pear owl", "regex": "OWL$", "task": "regex"},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    questions = evaluation.read_questions(file)
    assert [question.task for question in questions] == ["prompts", "prompts", "wrong", "regex", "regex"]
    assert [question.many for question in questions] == [None, True, None, None, None]
    selected = evaluation.read_questions(file, tasks=["regex", "wrong"])  # in the file's order
    assert [question.prompt for question in selected] == [question.prompt for question in questions[2:]]
    actual = evaluation.compare(packaged, questions=questions, names="threshold", batch=5, max_new_tokens=12)
    assert actual.baseline.tasks == {"prompts": (2, 2), "wrong": (0, 1), "regex": (1, 2)}
    assert "one answer %" not in actual.columns()
    assert len(evaluation.read_questions(file, limit=1)) == 3
    assert [question.prompt for question in evaluation.read_questions(file, tasks="wrong")] == ["Copy: kiwi fig owl"]
    with pytest.raises(ValueError, match="no-such-task"):
        evaluation.read_questions(file, tasks=["no-such-task"])
    file.write_text("\n".join(json.dumps({"prompt": str(k), "answer": f"{k}\n\nfig owl"}) for k in range(7)))
    few = evaluation.read_questions(file, limit=3)  # every second line
    assert [question.prompt for question in few] == ["0", "2", "4"]
    is_right = {"\n2\n\nfig  owl\n": True, "2 \n\nfig owl": True, "2\nfig owl": False, "2 fig owl": False}
    assert {text: few[1].right(text) for text in is_right} == is_right, "lines count, and spaces around words do not"


def test_constraints_of_all_prompts_and_of_single_lines(packaged: Model, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": f"Sort: {text}", "regex": "."} for text in ("pear fig apple", "fig pear apple", "owl fig")]
    lines[1] |= {"prompt": "Copy: kiwi fig", "constraint": {"choice": ["kiwi fig", "fig kiwi"]}}
    file.write_text("\n".join(json.dumps(line) for line in lines))
    questions = evaluation.read_questions(file)
    shared = paradec.Regex("[a-z]+ owl")
    request: dict[str, Any] = {"questions": questions, "max_new_tokens": 6, "constraint": shared}
    actual = evaluation.compare(packaged, names="low_confidence", defaults=True, batch=3, **request)
    for result in actual.results:
        texts = [answer["text"] for answer in result.answers or ()]
        assert texts[0].endswith(" owl") and texts[1] in ("kiwi fig", "fig kiwi") and texts[2].endswith(" owl")
    assert actual.setup["constraint"] == {"regex": shared.pattern}
    with pytest.raises(ValueError, match="constraint="):
        evaluation.compare(packaged, names="threshold", resume=actual, **request | {"constraint": None})
    with pytest.warns(UserWarning, match="wino is left out: .*replaces decided tokens"):
        evaluation.compare(packaged, questions=questions[:1], defaults=True, max_new_tokens=4, constraint=shared)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


FEW = ("--tasks", "copy,shuffle", "--limit", 2, "--samplers", "factor", "--batch", 4, "--max-new-tokens", 12)


def test_the_command_prints_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARADEC_DEBUG", raising=False)
    file = tmp_path / "results.json"
    result = run(*FEW, "--out", file)
    notes = [line for line in result.stderr.splitlines() if not line.startswith("tokens/s were measured on a busy")]
    assert result.exit_code == 0 and not notes
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    actual = Comparison.from_json(file)
    assert lines == [actual.columns(), *actual.table()] and len(lines) == 5 and actual.complete
    # all results exist: nothing is decoded
    monkeypatch.setattr(sys.modules["paradec.tools.evaluation.compare"], "generate", None)
    repeated = run(*FEW, "--out", file, "--resume", "--json")
    assert repeated.exit_code == 0
    assert json.loads(repeated.stdout)["results"] == json.loads(file.read_text())["results"]


def test_long_comparisons_print_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paradec.cli.show.Bar.line_interval", 0.0)
    result = run(*FEW)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("tokens/s were measured on a busy")]
    assert result.exit_code == 0 and len(lines) >= 4 and all(": " in line and " prompts (" in line for line in lines)
    assert lines[-1].startswith("factor") and lines[-1].endswith(" of 16 prompts (100%)"), lines
    assert "prompts" not in result.stdout


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from paradec.samplers.masked.loop import MaskedSampler

@dataclass(frozen=True)
class Mine(MaskedSampler):
    name: ClassVar[str] = "mine_of_a_file"
    summary: ClassVar[str] = "all at once, or the best"
    sweep = ({"all_of_them": True},)
    all_of_them: bool = False

    def select(self, view):
        return view.candidates if self.all_of_them else view.best()
"""


def test_samplers_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers.registry, "_targets", dict(samplers.registry._targets))
    file, out = tmp_path / "own.py", tmp_path / "results.json"
    file.write_text(OWN)
    flags = ("--tasks", "copy", "--limit", 2, "--batch", 4, "--max-new-tokens", 6, "--out", out)
    actual = run(*flags, "--samplers", f"klass,{file}:Mine", "--format", "csv")
    assert actual.exit_code == 0, actual.output
    names = [row["sampler"] for row in csv.DictReader(io.StringIO(actual.stdout))]
    assert names.count("mine_of_a_file") == 2 and names[0] == "threshold" and "klass" in names
    rows = json.loads(out.read_text())["results"]
    best, all_of_them = (row for row in rows if row["sampler"] == "mine_of_a_file")
    assert best["nfe"] > all_of_them["nfe"] == 1 and rows[0]["source"] is None
    defaults = run(*flags[:-2], "--samplers", f"klass,{file}:Mine", "--defaults", "--json")
    assert [row["changes"] for row in json.loads(defaults.stdout)["results"]] == [{}] * 3
    measured, plain_show_share = [], show.Bar.show_share

    def show_share(bar: Any, name: str, *arguments: Any) -> None:
        measured.append(name)
        plain_show_share(bar, name, *arguments)

    monkeypatch.setattr(show.Bar, "show_share", show_share)
    repeated = run(*flags, "--samplers", f"klass,{file}:Mine", "--resume")
    assert repeated.exit_code == 0 and measured == []
    file.write_text(OWN + "\n# another rule\n")
    repeated = run(*flags, "--samplers", f"klass,{file}:Mine", "--resume")
    assert repeated.exit_code == 0 and {*measured} == {"mine_of_a_file", "mine_of_a_file(all_of_them=True)"}


def test_the_plot_is_written(small: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from paradec.tools.evaluation.plot import frontier

    file = tmp_path / "frontier.png"
    frontier(small, file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


def test_ids_are_compared_without_a_tokenizer(llada: Model, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    prompts = json.loads((GOLDEN / "llada-tiny" / "prompts.json").read_text())["lines"][:3]
    lines = [{"input_ids": prompt["prompt_ids"], "answer_ids": prompt["answer_ids"]} for prompt in prompts]
    lines[2]["answer_ids"] = lines[2]["answer_ids"][:-1]
    file.write_text("\n".join(map(json.dumps, lines)))
    questions = evaluation.read_questions(file)
    arguments: dict[str, Any] = {"names": "low_confidence", "defaults": True, "max_new_tokens": 16, "block_length": 8}
    actual = evaluation.compare(llada, questions=questions, **arguments)
    assert actual.baseline.tasks == {"prompts": (2, 3)}
    assert [answer["text"] for answer in actual.baseline.answers] == [prompt["answer_ids"] for prompt in prompts]
    actual.to_json(tmp_path / "found.json")
    assert evaluation.Comparison.from_json(tmp_path / "found.json").baseline.answers == actual.baseline.answers
    for line, message in (
        ({"input_ids": [1], "answer": "x"}, "llada-tiny has no tokenizer; give input_ids and answer_ids"),
        ({"prompt": "x", "input_ids": [1], "answer": "x"}, "either prompt or input_ids"),
        ({"input_ids": [1], "answer_ids": [1], "answer": "x"}, "give answer_ids, or answer or regex"),
        ({"input_ids": [], "answer_ids": [1]}, "input_ids=.* must be a row of token ids"),
    ):
        file.write_text(json.dumps(line))
        with pytest.raises(ValueError, match=message):
            evaluation.compare(llada, questions=evaluation.read_questions(file), **arguments)
