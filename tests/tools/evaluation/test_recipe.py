"""Recipes, their dry runs, and what a task's arguments become; none of it needs lm-evaluation-harness."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import TESTS
from typer.testing import CliRunner

import paradec
from paradec import cli
from paradec.request import Request
from paradec.tools.evaluation import evaluate as running
from paradec.tools.evaluation.recipe import Recipe, generation_fields, request_from_arguments

RECIPES = sorted(TESTS.parent.glob("recipes/*.yaml"))


@pytest.fixture
def no_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    monkeypatch.delitem(sys.modules, "paradec.tools.evaluation.harness", raising=False)


def test_what_is_missing_is_named(no_harness: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"install paradec's extra 'eval'"):
        running.evaluate(Recipe(tasks=("gsm8k",)))
    shown = CliRunner().invoke(cli.app, ["eval", "--tasks", "gsm8k"])
    assert shown.exit_code == 2 and "extra 'eval'" in shown.stderr and len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_whole_and_run_dry(path: Path, no_harness: None) -> None:
    recipe = Recipe.load(path)
    said = running.plan(recipe)
    assert said["recipe"] == recipe.to_dict() and Recipe(**{**said["recipe"], "tasks": recipe.tasks}) == recipe
    assert said["tasks_known"] is None and "were not checked" in said["missing"][0]
    assert recipe.about
    assert (recipe.model is None) is ("total" in said["memory"]) is ("unknown" not in said["memory"])
    json.dumps(said)


def test_a_preset_stands_beside_its_recipe(tmp_path: Path) -> None:
    klass = paradec.samplers.create("klass", history=1)
    Request(sampler=klass, max_new_tokens=12).save(tmp_path / "tuned.json")
    (tmp_path / "mine.yaml").write_text("tasks: [a]\npreset: tuned.json\nrequest: {max_new_tokens: 9}\n")
    recipe = Recipe.load(tmp_path / "mine.yaml")
    assert recipe.method() == klass and recipe.preset == str(tmp_path / "tuned.json")
    said, request = request_from_arguments({"max_new_tokens": 9}, recipe.preset, seed=3)
    assert (request.sampler, request.max_new_tokens, request.seed) == (klass, 9, 3)
    assert set(said) == {"sampler", "max_new_tokens", "seed"}


@pytest.mark.parametrize(
    ("of_task", "fields"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.2, "top_p": 0.9}, {"temperature": 0.2, "top_p": 0.9}),
        ({"temperature": 0.2}, {"temperature": 0.2}),
        ({"max_gen_toks": 7, "max_tokens": 9}, {"max_new_tokens": 7, "temperature": 0.0}),
        ({"num_beams": 1}, {"temperature": 0.0}),
    ],
)
def test_fields_of_a_task(of_task: dict[str, Any], fields: dict[str, Any]) -> None:
    assert generation_fields(of_task) == (fields, [])
    assert generation_fields({**of_task, "until": "stop"}) == (fields, ["stop"])
