"""lm-evaluation-harness with a paradec model: the scores of `paradec compare`, caches, choices and recipes."""

import dataclasses
import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from places import TESTS
from typer.testing import CliRunner

lm_eval = pytest.importorskip("lm_eval", reason='needs the extra "eval"')

from paradec import cli  # noqa: E402
from paradec.models.adapter import Model  # noqa: E402
from paradec.tools import evaluation  # noqa: E402
from paradec.tools.evaluation import evaluate as evaluate_module  # noqa: E402
from paradec.tools.evaluation.harness import ParadecLM  # noqa: E402
from paradec.tools.evaluation.likelihood import log_likelihoods  # noqa: E402
from paradec.tools.evaluation.recipe import Recipe  # noqa: E402

ROOT = TESTS.parent
SOME = ("sort", "shuffle", "latin_square")


def test_the_built_in_models_are_still_listed() -> None:
    code = (
        "import paradec.tools.evaluation.harness as ours\n"
        "from lm_eval.api.registry import get_model, model_registry\n"
        "from lm_eval.models import MODEL_MAPPING\n"
        "assert {*MODEL_MAPPING} < {*model_registry.keys()}, 'some are missing'\n"
        "assert get_model('paradec') is ours.ParadecLM\n"
        "assert get_model('dummy').__name__ == 'DummyLM'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_the_entry_point_is_the_model() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    assert EntryPoint("paradec", points["paradec"], "lm_eval.models").load() is ParadecLM


def test_arguments_of_the_harness_s_command_line() -> None:
    create = lm_eval.api.registry.get_model("paradec").create_from_arg_string
    lm = create("sampler=klass,history=3,max_new_tokens=4", {"batch_size": "2", "device": None})
    assert lm.request.to_dict()["sampler"]["history"] == 3 and lm.batch_size == 2


def test_exact_match_equals_compare_at_every_batch_size(packaged64: Model) -> None:
    limit, tasks = 6, tuple(f"paradec_{task}" for task in SOME)
    # `compare` draws prompts of all lengths, but the harness takes the first ones. Give both the first ones.
    questions = [question for task in SOME for question in evaluation.packaged_questions(task)[:limit]]
    baseline = evaluation.compare(packaged64, questions=questions, names=["threshold"], batch=4).baseline
    expected = {f"paradec_{task}": right / count for task, (right, count) in baseline.tasks.items()}
    spent, texts = [], []
    for batch in (1, 5):
        recipe = Recipe(tasks=tasks, limit=limit, batch=batch)
        actual = evaluate_module.evaluate(recipe, model=packaged64, log_samples=True, bootstrap_iters=0)
        assert {task: actual["results"][task]["exact_match,none"] for task in tasks} == expected
        spent.append({name: actual["config"]["spent"][name] for name in ("row_calls", "tokens", "answers")})
        texts.append([sample["resps"] for task in tasks for sample in actual["samples"][task]])
        assert actual["met"]["chat"] and actual["met"]["dtype"] == "float64"
        assert actual["recipe"]["batch"] == batch and actual["met"]["versions"]["lm_eval"]
    assert texts[0] == texts[1] and spent[0] == spent[1]
    assert spent[0]["row_calls"] == baseline.row_calls and spent[0]["tokens"] == baseline.tokens
    json.dumps(actual)


@pytest.mark.full
def test_packaged_tasks_score_like_compare(packaged64: Model) -> None:
    baseline = evaluation.compare(packaged64, names=["threshold"], batch=16).baseline
    actual = evaluate_module.evaluate(Recipe(tasks=("paradec",), batch=16), model=packaged64, bootstrap_iters=0)
    for task, (right, count) in baseline.tasks.items():
        assert actual["results"][f"paradec_{task}"]["exact_match,none"] == right / count
    assert actual["groups"]["paradec"]["exact_match,none"] == pytest.approx(baseline.accuracy())


def test_an_interrupted_run_resumes_from_its_cache(packaged64: Model, tmp_path: Path) -> None:
    recipe = Recipe(tasks=("paradec_copy",), limit=5, batch=2)
    full = evaluate_module.evaluate(recipe, model=packaged64, log_samples=True)
    answered = 0

    class InterruptingLM(ParadecLM):
        def set_cache_hook(self, cache_hook: Any) -> None:
            super().set_cache_hook(cache_hook)
            keep = cache_hook.add_partial

            def add(*entry: Any) -> None:
                nonlocal answered
                keep(*entry)
                if (answered := answered + 1) == 3:
                    raise KeyboardInterrupt

            cache_hook.add_partial = add

    manager = evaluate_module.build_task_manager(recipe)
    arguments: dict[str, Any] = {"tasks": ["paradec_copy"], "task_manager": manager, "limit": 5}
    arguments |= {"apply_chat_template": True, "use_cache": str(tmp_path / "answers"), "bootstrap_iters": 0}
    with pytest.raises(KeyboardInterrupt):
        lm_eval.simple_evaluate(InterruptingLM(packaged64, batch_size=2), **arguments)
    lm = ParadecLM(packaged64, batch_size=2)
    actual = lm_eval.simple_evaluate(lm, **arguments)
    assert lm.spent.answers == 2
    assert actual["results"]["paradec_copy"]["exact_match,none"] == full["results"]["paradec_copy"]["exact_match,none"]


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    """Write a multiple-choice task as YAML and JSON lines."""
    rows = [{"question": "Copy: kiwi goat fox", "choices": ["kiwi goat fox", "goat kiwi fox"], "label": 0}]
    options = ["kiwi goat fox", "fox goat kiwi", "goat fox kiwi"]
    rows.append({"question": "Reverse: kiwi goat fox", "choices": options, "label": 1})
    folder = tmp_path / "choices"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choices", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}, "output_type": "multiple_choice",
        "test_split": "test", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "label",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (folder / "choices.yaml").write_text(yaml.safe_dump(task))
    return folder


def test_choices_are_judged_by_log_likelihoods(packaged64: Model, choices: Path, tmp_path: Path) -> None:
    recipe = Recipe(tasks=("choices",), include=str(choices), likelihood="monte_carlo", mc_num=4, mc_batch=2)
    recipes = [dataclasses.replace(recipe, batch=batch) for batch in (1, 7)]
    actual = [evaluate_module.evaluate(r, model=packaged64, log_samples=True) for r in recipes]
    assert [f["results"]["choices"]["acc,none"] for f in actual] == [1.0, 1.0]
    reported = actual[0]["config"]["log_likelihoods"]
    assert (reported["judged"], reported["method"], reported["samples"]) == (5, "monte_carlo", 4)
    assert 0 <= reported["median_standard_error"] <= reported["largest_standard_error"]
    first, second = ([sample["filtered_resps"] for sample in f["samples"]["choices"]] for f in actual)
    for a, b in zip(sum(first, []), sum(second, []), strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-9) and a[1] == b[1]
    assert [greedy for row in first for _, greedy in row] == [True, False, False, True, False]

    decoded = evaluate_module.evaluate(dataclasses.replace(recipe, choices="decode"), model=packaged64)
    assert decoded["results"]["choices"]["acc,none"] == 1.0 and "log_likelihoods" not in decoded["config"]
    assert decoded["config"]["spent"]["answers"] == 2 and decoded["config"]["spent"]["row_calls"] <= 4


def test_rolling_log_likelihoods_sum_their_windows(packaged64: Model) -> None:
    lm = ParadecLM(packaged64, likelihood="chain", max_length=5)
    ids = lm.tok_encode("kiwi goat fox pear fig apple")
    assert len(ids) == 6
    windows = [([lm.prefix_token_id], ids[:4]), (ids[1:4], ids[4:])]  # at most 5 tokens; every token is scored once
    expected = sum(actual.value for actual in log_likelihoods(packaged64, windows, method="chain"))
    entry: Any = SimpleNamespace(args=("kiwi goat fox pear fig apple",))
    assert lm.loglikelihood_rolling([entry])[0] == pytest.approx(expected, abs=1e-9)
    assert lm.check_greedy


def test_the_command_repeats_its_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("tasks: [paradec_copy]\nlimit: 3\nrequest: {sampler: klass, history: 1}\n")
    out = tmp_path / "result.json"
    arguments = ["eval", str(recipe), "--batch", "4", "--out", str(out), "--request", "history=2"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "paradec_copy\texact_match\t1.0000" in result.stdout and "forwards each" in result.stdout
    actual = json.loads(out.read_text())
    assert actual["changed"] == ["batch", "request"]
    assert actual["recipe"]["request"] == {"sampler": "klass", "history": 2} and actual["recipe"]["batch"] == 4
    assert actual["config"]["request"]["sampler"]["history"] == 2 and actual["met"]["versions"]["torch"]


@pytest.mark.full
def test_unknown_tasks_are_named() -> None:
    result = CliRunner().invoke(cli.app, ["eval", "--tasks", "paradec_copi"])
    assert result.exit_code == 2 and "has no task 'paradec_copi'" in result.stderr


@pytest.mark.full  # the harness looks through thousands of files
@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_recipes_name_tasks_of_the_harness(recipe: Path, manager: Any) -> None:
    assert all(manager.match_tasks([task]) for task in Recipe.load(recipe).tasks)


@pytest.fixture(scope="module")
def manager() -> Any:
    return evaluate_module.build_task_manager(Recipe(tasks=("gsm8k",)))
