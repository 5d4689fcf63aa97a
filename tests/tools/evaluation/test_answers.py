"""The adapter of a model to lm-evaluation-harness, and recipes. The harness itself is not needed."""

import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import TESTS
from small_models import wrap_kind
from typer.testing import CliRunner

import paradec
from paradec import cli
from paradec.core.prompts import encode
from paradec.models.adapter import Model
from paradec.request import Request
from paradec.tools.evaluation import evaluate as running
from paradec.tools.evaluation.answers import HarnessModel
from paradec.tools.evaluation.likelihood import log_likelihoods
from paradec.tools.evaluation.recipe import Recipe, generation_fields, request_from_arguments


def as_requests(*entries: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=entry) for entry in entries]


def score_pairs(lm: HarnessModel, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    """Return (log-likelihood, is greedy) of (context, continuation) pairs through the harness interface."""
    return lm._loglikelihood_tokens([(pair, *lm._encode_pair(*pair)) for pair in pairs], disable_tqdm=True)


def test_answers_end_at_stop_strings_and_lengths(packaged64: Model) -> None:
    lm = HarnessModel(packaged64, batch_size=3)
    prompt = lm.apply_chat_template([{"role": "user", "content": "Sort: pear fig apple"}])
    settings = ({"until": []}, {"until": ["fig"]}, {"max_gen_toks": 2, "until": []})
    full, stopped, short = lm.generate_until(as_requests(*((prompt, entry) for entry in settings)))
    assert full == paradec.generate(packaged64, "Sort: pear fig apple").text == "apple fig pear"
    assert stopped.strip() == "apple" and short.split() == ["apple", "fig"]
    assert HarnessModel(packaged64, until=False).generate_until(as_requests((prompt, {"until": ["fig"]}))) == [full]
    limited = HarnessModel(packaged64, max_new_tokens=1)  # the model's settings override the task's
    assert limited.generate_until(as_requests((prompt, {"max_gen_toks": 9, "until": []}))) == ["apple"]


@pytest.mark.thinned
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_answers_are_cached_in_order_and_counted(packaged64: Model, batch: int) -> None:
    cached = []

    class RecordingModel(HarnessModel):
        def keep(self, *entry: Any) -> None:
            cached.append(entry)

    lm = RecordingModel(packaged64, batch_size=batch, max_new_tokens=6)
    texts = ["Sort: pear fig apple", "Copy: kiwi", "Reverse: kiwi goat fox", "Copy: fig pear"]
    entries = [(lm.apply_chat_template([{"role": "user", "content": text}]), {"until": []}) for text in texts]
    answers = lm.generate_until(as_requests(*entries)) + lm.generate_until(as_requests(entries[0]))
    expected = [paradec.generate(packaged64, text, max_new_tokens=6) for text in [*texts, texts[0]]]
    assert answers == [out.text for out in expected]
    assert cached == [("generate_until", entry, text) for entry, text in zip([*entries, entries[0]], answers)]
    assert lm.spent.answers == 5 and lm.spent.row_calls == sum(out.nfe for out in expected)
    assert lm.spent.tokens == sum(sum(out.tokens) for out in expected)
    assert lm.spent.forwarded_tokens == sum(out.forwarded_tokens for out in expected)
    spent = lm.get_model_info()["spent"]
    assert spent["nfe"] == lm.spent.row_calls / 5
    assert spent["tokens_per_forward"] == lm.spent.tokens / lm.spent.row_calls
    assert spent["tokens_per_second"] == lm.spent.tokens / lm.spent.seconds


def test_prompts_have_the_ids_of_generate(packaged64: Model) -> None:
    lm, text = HarnessModel(packaged64), "Sort: pear fig apple"
    chat = lm.apply_chat_template([{"role": "user", "content": text}])
    assert lm.tok_encode(chat) == encode(packaged64, text).rows[0]
    assert lm.tok_encode(text) == encode(packaged64, text, chat=False).rows[0] != lm.tok_encode(chat)
    closed = [{"role": "user", "content": text}, {"role": "assistant", "content": "apple"}]
    prompts = lm.apply_chat_template(closed, add_generation_prompt=False)
    assert prompts.endswith("apple") and prompts.startswith(chat)


def test_unsupported_task_settings_are_refused(packaged64: Model) -> None:
    lm = HarnessModel(packaged64)
    with pytest.raises(ValueError, match="holds the mask id 122"):
        lm.generate_until(as_requests(("Sort: pear <|mdm_mask|>", {})))
    with pytest.raises(ValueError, match="num_beams=4, which paradec does not support"):
        lm.generate_until(as_requests(("Sort: pear", {"num_beams": 4})))
    assert lm.generate_until([]) == []


def test_task_penalties_act_like_generate(packaged64: Model) -> None:
    prompt = "Shuffle: pear fig apple kiwi"
    task_settings = {"repetition_penalty": 1, "bad_words": ["fig"], "min_new_tokens": 3, "max_gen_toks": 12}
    lm = HarnessModel(packaged64)
    chat = lm.apply_chat_template([{"role": "user", "content": prompt}])
    (actual,) = lm.generate_until(as_requests((chat, task_settings)))
    controls = {"bad_words": ["fig"], "min_new_tokens": 3, "max_new_tokens": 12}
    assert actual == paradec.generate(packaged64, prompt, **controls).text and "fig" not in actual


@pytest.mark.parametrize("batch", [1, 3])
def test_log_likelihoods_have_errors_and_greedy_flags(packaged64: Model, batch: int) -> None:
    """Every estimate has two strata. A single token needs no draw and has no error."""
    lm = HarnessModel(packaged64, mc_num=4, mc_batch=2, seed=3, batch_size=batch)
    chat = lm.apply_chat_template([{"role": "user", "content": "Copy: kiwi goat fox pear"}])
    answers = ["kiwi goat fox pear", "kiwi fox goat pear", "kiwi", "goat kiwi fox", "goat kiwi pear apple"]
    actual = score_pairs(lm, *((chat, answer) for answer in answers))
    assert [greedy for _, greedy in actual] == [True, False, True, False, False]
    pairs = [(lm.tok_encode(chat), lm.tok_encode(answer)) for answer in answers]
    expected = list(log_likelihoods(packaged64, pairs, samples=4, stratum=2, seed=3))
    assert [value for value, _ in actual] == pytest.approx([one.value for one in expected], abs=1e-9)
    errors, info = sorted(one.error for one in expected), lm.get_model_info()["log_likelihoods"]
    assert errors[0] == 0 < errors[2]
    assert (info["median_standard_error"], info["largest_standard_error"]) == pytest.approx((errors[2], errors[4]))
    assert info["judged"] == 5 and info["forwards"] == sum(one.forwards for one in expected) == 17
    assert info["without_a_standard_error"] == 0 and (info["samples"], info["stratum"]) == (4, 2)
    alone = HarnessModel(packaged64, mc_num=2, mc_batch=2, check_greedy=False)
    score_pairs(alone, *((chat, answer) for answer in answers[1:4]))
    info = alone.get_model_info()["log_likelihoods"]  # one stratum gives no error; the report has 0 for NaN
    assert (info["median_standard_error"], info["largest_standard_error"]) == (0, 0)
    assert info["without_a_standard_error"] == 2


def test_a_rendered_chat_gets_no_first_token() -> None:
    class WordTokenizer:  # like that of a causal model, it adds a first token
        bos_token_id, eos_token_id, unk_token_id, chat_template = 1, 2, None, "yes"

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + [3 + len(word) for word in text.split()]}

        def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
            return "s " + " ".join(turn["content"] for turn in chat)

    model = wrap_kind("Llama causal")
    lm = HarnessModel(paradec.wrap(model.module, tokenizer=WordTokenizer(), topology="causal", eos_token_id=2))
    chat = lm.apply_chat_template([{"role": "user", "content": "four letters"}])
    assert lm.tok_encode("four letters") == [1, 7, 10] and lm.tok_encode(chat) == [4, 7, 10]
    assert lm._encode_pair(chat, " go") == ([4, 7, 10], [5])
    assert lm._encode_pair("four  ", "go") == ([1, 7], [5])
    exact = next(log_likelihoods(lm.model, [([4, 7, 10], [5])]))
    ((value, greedy),) = score_pairs(lm, (chat, " go"))
    assert (value, greedy) == (exact.value, exact.greedy)


def test_long_contexts_are_cut_on_the_left(packaged64: Model) -> None:
    lm = HarnessModel(packaged64, likelihood="chain", max_length=6, check_greedy=False)
    pair = (lm.tok_encode("goat fox pear fig"), lm.tok_encode("apple kiwi"))
    expected = pytest.approx(next(log_likelihoods(packaged64, [pair], method="chain")).value, abs=1e-9)
    with pytest.warns(UserWarning, match="a context of 5 tokens is cut to its last 4"):
        ((value, _),) = score_pairs(lm, ("kiwi goat fox pear fig", " apple kiwi"))
    assert value == expected
    with warnings.catch_warnings():  # entries of the maximum length are not cut
        warnings.simplefilter("error")
        assert score_pairs(lm, ("goat fox pear fig", " apple kiwi"))[0][0] == expected
        entry, _ = lm._build_entry("goat fox pear fig", {"max_gen_toks": 2})
        assert (entry["prompt"], entry["max_new_tokens"]) == (pair[0], 2)
    with pytest.warns(UserWarning, match="cut to its last 3"):
        assert lm._build_entry("goat fox pear fig", {"max_gen_toks": 3})[0]["prompt"] == pair[0][1:]
    for call in (
        lambda: lm.generate_until(as_requests(("kiwi goat", {"max_gen_toks": 6}))),
        lambda: score_pairs(lm, ("kiwi", " goat fox pear fig apple kiwi")),
    ):
        with pytest.raises(ValueError, match="max_length=6 leaves no room"):
            call()


def test_constraints_and_stop_strings_of_a_task_apply_together(packaged64: Model) -> None:
    lm = HarnessModel(packaged64, batch_size=2, max_new_tokens=8)
    prompt = lm.apply_chat_template([{"role": "user", "content": "Sort: pear fig apple"}])
    task = {"until": ["fig"], "constraint": {"regex": "pear [a-z]+ fig"}}
    assert lm.generate_until(as_requests((prompt, task), (prompt, {"until": []}))) == ["pear apple ", "apple fig pear"]


def test_choices_by_constrained_decoding(packaged64: Model) -> None:
    lm, scoring = HarnessModel(packaged64, choices="decode"), HarnessModel(packaged64)
    sort, copy = (
        lm.apply_chat_template([{"role": "user", "content": text}])
        for text in ("Sort: pear fig apple", "Copy: kiwi fig owl")
    )
    orders = ["apple pear fig", "apple fig pear", "apple fig"]
    pairs = [*((sort, order) for order in orders), (copy, "kiwi fig owl"), (sort, orders[1]), (sort, orders[0])]
    actual = score_pairs(lm, *pairs)
    no, yes = (-math.inf, False), (0.0, True)
    assert actual[:3] == [no, yes, no] and actual[4:] == [yes, no]
    assert actual[3] == score_pairs(scoring, pairs[3])[0]
    out = paradec.generate(packaged64, "Sort: pear fig apple", constraint=paradec.Choice(orders), max_new_tokens=4)
    assert out.text == orders[1] and lm.spent.answers == 2
    assert lm.spent.row_calls <= 4 and len(lm.likelihoods) == 1


RECIPES = sorted(TESTS.parent.glob("recipes/*.yaml"))


@pytest.fixture
def no_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    monkeypatch.delitem(sys.modules, "paradec.tools.evaluation.harness", raising=False)


def test_a_missing_harness_is_named(no_harness: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"install paradec's extra 'eval'"):
        running.evaluate(Recipe(tasks=("gsm8k",)))
    shown = CliRunner().invoke(cli.app, ["eval", "--tasks", "gsm8k"])
    assert shown.exit_code == 2 and "extra 'eval'" in shown.stderr and len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_complete_and_dry_run(path: Path, no_harness: None) -> None:
    recipe = Recipe.load(path)
    info = running.plan(recipe)
    assert info["recipe"] == recipe.to_dict() and Recipe(**{**info["recipe"], "tasks": recipe.tasks}) == recipe
    assert info["tasks_known"] is None and "were not checked" in info["missing"][0]
    assert recipe.about
    assert (recipe.model is None) is ("total" in info["memory"]) is ("unknown" not in info["memory"])
    json.dumps(info)


def test_presets_are_found_next_to_their_recipe(tmp_path: Path) -> None:
    klass = paradec.samplers.create("klass", history=1)
    Request(sampler=klass, max_new_tokens=12).save(tmp_path / "tuned.json")
    (tmp_path / "mine.yaml").write_text("tasks: [a]\npreset: tuned.json\nrequest: {max_new_tokens: 9}\n")
    recipe = Recipe.load(tmp_path / "mine.yaml")
    assert recipe.method() == klass and recipe.preset == str(tmp_path / "tuned.json")
    info, request = request_from_arguments({"max_new_tokens": 9}, recipe.preset, seed=3)
    assert (request.sampler, request.max_new_tokens, request.seed) == (klass, 9, 3)
    assert set(info) == {"sampler", "max_new_tokens", "seed"}


@pytest.mark.parametrize(
    ("task_settings", "fields"),
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
def test_task_settings_become_request_fields(task_settings: dict[str, Any], fields: dict[str, Any]) -> None:
    assert generation_fields(task_settings) == (fields, [])
    assert generation_fields({**task_settings, "until": "stop"}) == (fields, ["stop"])
