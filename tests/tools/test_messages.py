"""Wrong arguments and files of the tools: errors of one line with the argument or line, and the allowed values."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from decoding import refuses
from places import GOLDEN
from small_models import MASK, decoder, tiny, wrap_kind

import paradec
from paradec.models.adapter import Model
from paradec.samplers.masked.rules.learn2pd_filter import FilterFacts, load_filter, save_filter
from paradec.tools.evaluation import TASKS, get_task, load_prompts, read_questions
from paradec.tools.evaluation.answers import HarnessModel
from paradec.tools.evaluation.compare import Comparison
from paradec.tools.evaluation.likelihood import log_likelihoods
from paradec.tools.evaluation.metrics import aup, bootstrap, wilson
from paradec.tools.evaluation.parallel import parallel_questions
from paradec.tools.evaluation.recipe import Recipe
from paradec.tools.training.learn2pd import Records
from paradec.tools.training.learn2pd import read_prompts as read_for_learn2pd
from paradec.tools.tuning.prompts import read_prompts as read_for_tuning
from paradec.tools.tuning.prompts import to_questions

FIRST = '{"prompt": "a", "answer": "b"}\n'
DEEP = "[" * 100_000
FILES: dict[Callable[[Path], Any], list[tuple[str, ...]]] = {
    read_questions: [
        (FIRST + "[1]", "line 2", "object"), (FIRST + '{"prompt": "a"}', "line 2", "answer", "regex"),
        (FIRST + '{"prompt": "a", "answer": "b", "regex": "c"}', "line 2", "answer", "regex"),
        (FIRST + '{"prompt": " ", "answer": "b"}', "line 2", "prompt="),
        (FIRST + '{"answer": "b"}', "line 2", "prompt", "input_ids"),
        (FIRST + '{"prompt": "a", "answer": []}', "line 2", "answer="),
        (FIRST + '{"prompt": "a", "regex": "("}', "line 2", "regex="),
        (FIRST + '{"prompt": "a", "anwser": "b"}', "line 2", "'anwser'", "'answer'"),
        (FIRST + '{"prompt": "a", "answer": "b", "constraint": {"regexp": "b"}}', "line 2", "'regex'"),
    ],
    read_for_tuning: [
        ('{"text": "x"}', "line 1", "'text'"), ('{"answer": "x"}', "line 1", "prompt", "input_ids"),
        ('{"prompt": " "}', "line 1", "prompt=' '"), ('{"prompt": "x", "regex": "("}', "line 1", "regular expression"),
        ('{"input_ids": []}', "line 1", "input_ids=[]"),
        ('{"input_ids": [1], "answer_ids": [2], "answer": "x"}', "line 1", "answer"), ("", "no prompts"),
    ],
    read_for_learn2pd: [(FIRST + '{"answer": 3}', "line 2", "prompt=None")],
    **{
        partial(read): [
            (FIRST + DEEP, "line 2", "100 deep"), (FIRST + "{", "line 2", "JSON"),
            (FIRST + '{"prompt": ' + "1" * 5000 + "}", "line 2", "JSON"),
            (FIRST + '{"prompt": "\\ud800", "answer": ""}', "line 2", "prompt='\\ud800'", "UTF-8"),
        ]
        for read in (read_questions, read_for_tuning, read_for_learn2pd)
    },
    Comparison.from_json: [(text, "wrong.jsonl") for text in ("{}", "[]", '{"schema": "other"}', "no JSON")],
    Records.load: [("", "wrong.jsonl")],
    load_filter: [("", "wrong.jsonl"), ("{}", "wrong.jsonl")],
    Recipe.load: [
        ("tasks: []", "tasks=[]"), ("shots: 5", "tasks"), ("tasks: [a]\nshot: 5", "'shot'", "'shots'"),
        ("tasks: [a]\nrequest: {thresold: 1}", "thresold"),
        ("tasks: [a]\nrequest: {temperature: -1}", "temperature=-1"),
        ("tasks: [a]\nrequest: {sampler: {sampler: threshold, threshold: 7}}", "threshold=7"),
        ("tasks: [a]\nbatch: 0", "batch=0"), ("tasks: [a]\nchat: maybe", "chat='maybe'"),
        ("tasks: [a]\ndtype: int8", "dtype"), ("tasks: [a]\npublished: {value: 3}", "published="),
        ("tasks: [a]\npreset: none.json", "none.json"), ("- 3", "fields"), ("tasks: [", "YAML"),
    ],
}  # fmt: skip
FILE_CASES = [(read, text, words) for read, cases in FILES.items() for text, *words in cases]


@pytest.mark.parametrize(("read", "text", "words"), FILE_CASES, ids=range(len(FILE_CASES)))
def test_a_wrong_file_is_named_with_its_line(read: Any, text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(text)
    message = refuses(lambda: read(file), "", (ValueError, FileNotFoundError))
    assert "\n" not in message and all(word in message for word in words), message
    assert "wrong.jsonl" in message or "none.json" in message
    file.write_bytes(b'{"prompt": "\xff"}')
    refuses(lambda: read(file), r"wrong\.jsonl")


@cache
def packaged() -> Model:
    return paradec.load()


@cache
def model() -> Model:
    return tiny(1)


def score(pair: Any = ([3, 17], [5, 21]), of: Callable[[], Any] = model, **arguments: Any) -> Callable[[], Any]:
    return lambda: log_likelihoods(of(), [pair], **arguments)


def harness(**arguments: Any) -> Callable[[], Any]:
    return lambda: HarnessModel(packaged(), **arguments)


def tune(of: Callable[[], Any] = model, prompts: Any = ([1, 2], [3]), **arguments: Any) -> Callable[[], Any]:
    small = {"samplers": ["threshold"], "blocks": [None], "max_new_tokens": 6, "trials": 1, "batch": 4}
    return lambda: paradec.tune(of(), [*prompts], **(small | arguments))


CALLS: list[tuple[Any, ...]] = [
    *((partial(wilson, *counts),) for counts in ((3, 2), (-1, 2), (0, 0), (1, 2, 1), (1, 2, 0))),
    *((partial(aup, points),) for points in ([], [(0, 50)], [(1, 101)], [(1, -1)], [(math.nan, 50)], [(1, math.inf)])),
    (partial(bootstrap, []), "values"), (partial(load_prompts, "sorting"), "'sorting'", "sort", "latin_square"),
    (partial(get_task, "nope"), "task"), (partial(load_prompts, limit=0), "limit=0"),
    (lambda: TASKS["copy"].make(Random(0), size=9), "size=9", "(3, 4, 5, 6)"),
    (lambda: TASKS["sort"].check(TASKS["copy"].make(Random(0)), ""), "'copy'", "'sort'"),
    (partial(parallel_questions, "rotations"), "task: 'rotations'"), (partial(to_questions, []), "empty"),
    (partial(to_questions, b"ab"), "prompts="), (partial(to_questions, 3), "prompts="),
    (partial(to_questions, [1.5]), "prompt 0"),
    (partial(to_questions, ["a", "b"], ["x"]), "answers", "1 entries for 2"),
    (score(method="exact"), "method='exact'"), (score(method="loop"), "method"), (score(order="any"), "order"),
    (score(samples=0), "samples=0"), (score(samples=24, stratum=16), "samples=24", "stratum=16"),
    (score(guidance_scale=-1), "guidance_scale"), (score(batch_size=0), "batch_size=0"), (score(seed=-1), "seed=-1"),
    (score(([], [5]), lambda: tiny(1, prediction="shifted")), "context 0"),
    (score(([], [5]), lambda: wrap_kind("Llama causal")), "context 0"), (score(([5], [])), "continuation 0"),
    (score(([5], [MASK])), "mask id"), (score(([5], [99])), "vocabulary"), (score(([1] * 600, [5])), "longer"),
    (score(([5], [6]), lambda: wrap_kind("Llama causal"), method="chain"), "method='chain'"),
    (score(of=decoder), "log_likelihoods"), (harness(batch_size="auto"), "batch_size='auto'"),
    (harness(likelihood="exact"), "method='exact'"), (harness(mc_num=24), "samples=24"),
    (harness(dtype="float32"), "dtype='float32'"), (harness(seed=-1), "seed=-1"),
    (harness(num_return_sequences=2), "num_return_sequences=2"), (harness(tresh=1), "tresh"),
    (harness(choices="best"), "choices: 'best'"), (lambda: HarnessModel(wrap_kind("Bert")), "tokenizer"),
    (lambda: HarnessModel("digits-ar"), "language model"), (tune(objective="speed"), "objective: 'speed'"),
    (tune(eta=1), "eta=1"), (tune(tolerance=101), "tolerance=101"),
    (tune(samplers=["thresold"]), "'thresold'", "'threshold'"), (tune(samplers=["sjd"]), "'sjd'", "'draft_verify'"),
    (tune(caches=["duel"]), "'duel'", "'dual'"), (tune(blocks=[0]), "blocks=0"), (tune(sampler="threshold"), "sampler"),
    (tune(study="/nowhere/x.db"), "study='/nowhere/x.db'"), (tune(study=__file__), "SQLite"),
    (tune(lambda: tiny(1, "causal")), "autoregressive"), (tune(lambda: "model"), "tune"),
    (tune(prompts=("a text", "another")), "tokenizer"),
]  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize(("call", "words"), [pytest.param(call, words, id=str(words[:1])) for call, *words in CALLS])
def test_a_wrong_argument_is_named(call: Callable[[], Any], words: list[str]) -> None:
    message = refuses(call, "", (ValueError, TypeError, OSError))
    assert "\n" not in message and all(word in message for word in words), message


def test_filters_of_another_format_or_of_other_weights_are_refused(tmp_path: Path) -> None:
    facts = FilterFacts("block", "llada-tiny", 64, 4, ("none",), threshold=0.96)
    golden = GOLDEN / "llada-tiny"
    save_filter(tmp_path / "later", dataclasses.replace(facts, format="paradec-learn2pd/99"), facts.network())
    save_filter(tmp_path / "wrong", dataclasses.replace(facts, block_length=8), facts.network())
    for path in (golden / "model.safetensors", golden / "config.json", tmp_path / "later", tmp_path / "wrong"):
        refuses(partial(load_filter, path), path.name)
    refuses(lambda: paradec.samplers.create("learn2pd", filter="no such file"), "filter='no such file'")
