"""`paradec bench parallel`: prompts, equal numbers of settings, the command."""

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paradec import cli
from paradec.tools.evaluation.metrics import aup
from paradec.tools.evaluation.parallel import SWEEPS, TASK_NAMES, parallel, parallel_questions, sweep


def test_prompts_cover_the_tasks_of_parallelbench() -> None:
    assert {question.task for question in parallel_questions(limit=1)} == {*TASK_NAMES}


@pytest.mark.parametrize("settings", [2, 3, 5])
@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_are_equal_in_number(name: str, settings: int) -> None:
    actual = sweep(name, settings)
    assert len({c.name for c in actual}) == settings and actual[0].changes == {}
    swept = sweep(name, 5)
    if name == "threshold":
        values = sorted(c.make().threshold for c in swept)
        assert (values[0], values[-1], len(set(values))) == (0.5, 1.0, 5)
    elif name == "factor":
        assert sorted(c.make().factor for c in swept) == [0.7, 1.0, 1.3, 1.6, 1.9]
    else:
        assert sorted(c.request(32).get("steps", 32) for c in swept) == [2, 4, 8, 16, 32]


def test_areas_use_equally_many_points() -> None:
    arguments = {"settings": 2, "tasks": ["copy", "shuffle"], "limit": 2, "batch": 4, "max_new_tokens": 12}
    actual = parallel(names=["low_confidence", "credit"], **arguments)
    counts = Counter(result.configuration.sampler for result in actual.results)
    assert counts == {"threshold": 2, "low_confidence": 2, "credit": 2}
    best = max(100 * result.accuracy() for result in actual.results)
    for name, area in actual.aup().items():
        results = [result for result in actual.results if result.configuration.sampler == name]
        assert area == aup([(r.tokens_per_forward, 100 * r.accuracy()) for r in results], best)
    assert set(actual.aup()) == set(counts) and actual.many == {"copy": False, "shuffle": True}


def test_the_command(tmp_path: Path) -> None:
    out, plot = tmp_path / "found.json", tmp_path / "curve.svg"
    flags = ["bench", "parallel", "--samplers", "factor", "--settings", "2", "--tasks", "sort,shuffle", "--limit", "2"]
    flags += ["--max-new-tokens", "12", "--batch", "4", "--out", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(cli.app, flags)
    assert result.exit_code == 0, result.output
    actual = json.loads(out.read_text())
    assert actual["complete"] and set(actual["aup"]) == {"threshold", "factor"} and len(actual["results"]) == 4
    assert "tokens per forward" in plot.read_text() or plot.stat().st_size > 1000
    wrong = CliRunner().invoke(cli.app, ["bench", "parallel", "--samplers", "klass"])
    assert wrong.exit_code == 2 and "settings=" in wrong.stderr
