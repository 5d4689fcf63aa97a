"""Biases, excluded words, minimal lengths, penalties and min_p, against plain loops."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from small_models import END, MASK, VOCAB, similar_model, tiny, tiny_gemma
from small_models import wrap_causal as causal

import paradec
from paradec import samplers
from paradec.models.self_drafting import SelfDrafting
from paradec.samplers.causal.drafts.text import PromptLookup
from paradec.samplers.causal.speculative import Speculative
from paradec.samplers.distributions import filter_logits

PROMPTS = [[3, 1, 4, 1, 0, 3, 1], [2, 2], [4], [0, 3, 1, 3, 2, 4, 2, 0, 3]]
NEW = 9
CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "presence_penalty": -0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"logit_bias": {5: 3.0, 7: -2.5}},
    {"bad_words": [[4]]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {1: 1.0}},
]
LONG_WORDS: list[dict[str, Any]] = [{"bad_words": [[4, 4]]}, {"bad_words": [[1, 3], [2]], "repetition_penalty": 0.8}]


def apply_controls(logits: Sequence[float], prompt: list[int], answer: list[int], index: int, **controls: Any) -> Any:
    """Apply the controls to the logits of one position. index: the position's index in the answer."""
    result = [float(value) for value in logits]
    for word in controls.get("bad_words", ()):
        if len(word) == 1 or answer[1 - len(word) :] == list(word[:-1]):
            result[word[-1]] = -math.inf
    for token, bias in controls.get("logit_bias", {}).items():
        result[token] += bias
    if controls.get("ignore_eos") or 0 <= index < controls.get("min_new_tokens", 0):
        result[controls["end"]] = -math.inf
    counts = Counter(answer)
    for token in {*prompt, *answer}:
        factor = controls.get("repetition_penalty", 1.0)
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        result[token] -= controls.get("frequency_penalty", 0.0) * counts[token]
        result[token] -= controls.get("presence_penalty", 0.0) * (counts[token] > 0)
    return result


# ---- causal models ---------------------------------------------------------------------------------------------------


def _self_drafting() -> tuple[Any, Any]:
    facts = {"topology": "causal", "prediction": "shifted", "eos_token_id": END, "mask_token_id": MASK}
    model = paradec.wrap(tiny(2).unwrap(), **facts)
    model.self_drafting = SelfDrafting(4)
    return samplers.create("self_speculative"), model


METHODS: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{name: lambda name=name: (samplers.create(name, window=4), causal()) for name in ("sjd", "scd", "jacobi")},
    "sjd_pac": lambda: (samplers.create("sjd_pac", window=4, siblings=3, branching=2), causal()),
    "one by one": lambda: (samplers.create("sjd", window=1), causal()),
    "speculative": lambda: (Speculative(drafter=similar_model()), causal()),
    "tree": lambda: (Speculative(drafter=similar_model(), tree=(2, 2, 1)), causal()),
    "lookup": lambda: (Speculative(drafter=PromptLookup(5, 2)), causal()),
    "recycling": lambda: (Speculative(drafter="token_recycling", rule="naive"), causal()),
    "self_speculative": _self_drafting,
}


def next_logits(module: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = module(torch.tensor([ids])).logits[0, -1]
    return logits.clone()


@pytest.mark.thinned
@pytest.mark.parametrize("controls", [*CONTROLS, *LONG_WORDS, {"min_new_tokens": 5}, {"ignore_eos": True}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_causal_answers_equal_a_plain_loop(name: str, controls: dict[str, Any]) -> None:
    sampler, model = METHODS[name]()
    out = paradec.generate(model, PROMPTS, sampler=sampler, max_new_tokens=NEW, temperature=0, **controls)
    for prompt, tokens in zip(PROMPTS, out.new_tokens.tolist(), strict=True):
        answer: list[int] = []
        while len(answer) < NEW and (not answer or answer[-1] not in model.facts.eos_token_ids):
            logits = next_logits(model.module, prompt + answer)
            if model.facts.mask_token_id is not None:
                logits[model.facts.mask_token_id] = -torch.inf
            without_end = {"min_new_tokens": 0, "ignore_eos": 0}
            fields = controls | ({"end": END} if model.facts.eos_token_ids else without_end)
            values = apply_controls(logits, prompt, answer, len(answer), **fields)
            answer.append(int(np.argmax(values)))
        assert tokens[: len(answer)] == answer


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("tree", 2000),
        *(pytest.param(name, 6000, marks=pytest.mark.full) for name in ("sjd", "scd", "speculative", "tree")),
    ],
)
def test_lossless_methods_keep_the_penalised_distribution(name: str, rows: int) -> None:
    sampler, model = METHODS[name]()
    controls: dict[str, Any] = {"repetition_penalty": 0.8, "frequency_penalty": -2.0, "bad_words": [[2, 3]]}
    prompt, size = [3, 1, 2], model.facts.vocab_size
    expected = np.zeros((size, size))
    first = torch.tensor(apply_controls(next_logits(model.module, prompt), prompt, [], 0, **controls)).softmax(-1)
    for token in range(size):
        logits = apply_controls(next_logits(model.module, [*prompt, token]), prompt, [token], 1, **controls)
        expected[token] = first[token] * torch.tensor(logits).softmax(-1)
    request = {"max_new_tokens": 3, "temperature": 1, "seed": 1, "num_return_sequences": rows} | controls
    out = paradec.generate(model, [prompt], sampler=sampler, **request)
    counts = np.zeros((size, size))
    np.add.at(counts, tuple(out.new_tokens[:, :2].T.numpy()), 1)
    assert not counts[expected == 0].any()
    repeats = expected.trace() * rows  # the second token's penalty depends on the first, which may be a draft
    assert abs(counts.trace() - repeats) < 4 * math.sqrt(repeats)
    likely = expected * rows >= 5
    rare, expected_rare = rows - counts[likely].sum(), rows - (expected * rows)[likely].sum()
    statistic = ((counts - expected * rows) ** 2 / (expected * rows + 1e-300))[likely].sum()
    statistic += (rare - expected_rare) ** 2 / expected_rare
    freedom = likely.sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


# ---- masked models ---------------------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize("controls", [*CONTROLS, {"min_new_tokens": 6, "logit_bias": {END: 9.0}}, {"ignore_eos": True}])
def test_masked_answers_equal_a_plain_loop(prediction: str, controls: dict[str, Any]) -> None:
    model = tiny(2, prediction=prediction)
    request = {"sampler": "low_confidence", "max_new_tokens": NEW, "blocks": "whole", "eos_early_stop": False}
    out = paradec.generate(model, PROMPTS, **request, **controls)
    for prompt, tokens in zip(PROMPTS, out.new_tokens.tolist(), strict=True):
        row = prompt + [MASK] * NEW
        visible = torch.ones(1, 1, len(row), len(row), dtype=torch.bool)
        while MASK in row:
            with torch.inference_mode():
                logits = model.module(torch.tensor([row]), attention_mask=visible).logits[0]
            answer = [token for token in row[len(prompt) :] if token != MASK]
            choices = []
            for position in (place for place, token in enumerate(row) if token == MASK):
                column = logits[position - (prediction == "shifted")].clone()
                column[MASK] = -torch.inf
                values = apply_controls(column, prompt, answer, position - len(prompt), end=END, **controls)
                p = torch.tensor(values).softmax(-1)
                choices.append((float(p.max()), -position, int(p.argmax())))
            _, position, token = max(choices)
            row[-position] = token
        assert tokens == row[len(prompt) :]


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["threshold", "entropy_bound", "klass", "credit", "random", "localleap"])
@pytest.mark.parametrize("cache", ["none", "dual", "vicinity"])
def test_masked_rows_do_not_depend_on_the_batch(sampler: str, cache: str) -> None:
    model = tiny(2)
    request: dict[str, Any] = {"sampler": sampler, "cache": cache, "max_new_tokens": 8, "block_length": 4}
    request |= {"temperature": 0.7, "repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {7: -100.0}}
    together = paradec.generate(model, PROMPTS, seed=[1, 2, 3, 4], **request)
    for row, prompt in enumerate(PROMPTS):
        alone = paradec.generate(model, [prompt], seed=row + 1, **request)
        assert alone.new_tokens.tolist() == [together.new_tokens[row].tolist()]
    assert not (together.new_tokens == 7).any()


MASKED = [name for name in samplers.names() if samplers.registry.get(name).family == "masked"]


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", MASKED)
def test_excluded_words_of_one_token_are_never_proposed(sampler: str) -> None:
    method = samplers.create(sampler)
    model = tiny(1, (*method.needs.topologies, "bidirectional")[0])
    request: dict[str, Any] = {"sampler": method, "max_new_tokens": 8, "seed": 3}
    request |= {"temperature": 0.0 if "temperature" in method.unsupported else 0.7}
    expected = paradec.generate(model, PROMPTS[:3], suppress_tokens=[4, END], **request)
    controls: dict[str, Any] = {"bad_words": [[4]], "ignore_eos": True, "suppress_tokens": []}
    if "bad_words" in method.unsupported:
        refuses(lambda: paradec.generate(model, PROMPTS[:3], **controls, **request), "bad_words=.* has no meaning")
    else:
        output = paradec.generate(model, PROMPTS[:3], **controls, **request)
        assert torch.equal(output.new_tokens, expected.new_tokens)


def test_bad_words_and_biases_of_canvas_models() -> None:
    model = paradec.wrap(tiny_gemma())
    plain = paradec.generate(model, [[5, 6, 7]], max_new_tokens=16, seed=0)
    likeliest = plain.new_tokens.flatten().mode().values.item()
    output = paradec.generate(model, [[5, 6, 7]], max_new_tokens=16, seed=0, bad_words=[[likeliest]])
    assert (plain.new_tokens == likeliest).any() and not (output.new_tokens == likeliest).any()
    output = paradec.generate(model, [[5, 6, 7]], max_new_tokens=16, seed=0, logit_bias={9: 100.0})
    assert (output.new_tokens == 9).all()


# ---- min_p -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 40_000])
@pytest.mark.parametrize("min_p", [0.001, 0.3, 1.0])
def test_min_p_keeps_tokens_near_the_best(size: int, min_p: float) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(0)) * 3
    p = logits.double().softmax(-1)
    is_allowed = filter_logits(logits, None, None, min_p) > -torch.inf
    is_clear = (p / p.amax(-1, keepdim=True) / min_p - 1).abs() > 1e-5
    assert ((is_allowed == (p >= min_p * p.amax(-1, keepdim=True))) | ~is_clear).all() and is_allowed.any(-1).all()
    is_allowed_by_both = filter_logits(logits, None, 5, min_p) > -torch.inf
    assert (is_allowed_by_both.sum(-1) <= 5).all() and not (is_allowed_by_both & ~is_allowed).any()


@pytest.mark.parametrize("kind", ["causal", "masked", "masked, sampled scores"])
def test_min_p_1_takes_the_likeliest_token(kind: str) -> None:
    model = causal() if kind == "causal" else tiny(2)
    sampler = {"causal": "sjd", "masked": "threshold", "masked, sampled scores": "maskgit_plus"}[kind]
    request: dict[str, Any] = {"sampler": sampler, "max_new_tokens": 8, "seed": 0}
    if sampler == "maskgit_plus":  # it draws the order of positions, which one step makes irrelevant
        request |= {"steps": 1, "block_length": 8}
    best = paradec.generate(model, PROMPTS, temperature=0, **request)
    output = paradec.generate(model, PROMPTS, temperature=0.9, min_p=1.0, **request)
    without_min_p = paradec.generate(model, PROMPTS, temperature=0.9, **request)
    assert not torch.equal(without_min_p.new_tokens, best.new_tokens)
    if kind == "masked":  # the temperature changes the confidences and so the order, but no token is drawn
        best = paradec.generate(model, PROMPTS, temperature=0.9, min_p=1.0, **request | {"seed": 1})
    assert torch.equal(output.new_tokens, best.new_tokens)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias=101.0 .*-100.* 100"),
        ({"logit_bias": [1, 2]}, "logit_bias=.* mapping"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias=.* ids"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias=1.5 must be an integer"),
        ({"bad_words": [[token] for token in range(VOCAB)]}, "bad_words=.*excludes all"),
        ({"bad_words": ["pear"]}, "bad_words='pear' .* tokenizer"),
        ({"bad_words": "pear"}, "bad_words='pear' .* sequence"),
        ({"bad_words": [[]]}, "bad_words=.* empty"),
        ({"bad_words": [[1, 2]]}, "bad_words=.*'threshold'.* one token"),
        ({"bad_words": [[VOCAB]]}, "bad_words"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 .* from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 .*-2.* 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"min_p": 0.0}, "min_p=0.0"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 1.2, "rollout": True}, "repetition_penalty=1.2: rollout"),
        ({"ignore_eos": True, "constraint": paradec.Choice(["a"])}, "ignore_eos=True: constraint"),
        ({"repetition_penalty": 1.2, "sampler": "freedave"}, "repetition_penalty=1.2 .*'freedave'"),
        ({"presence_penalty": 1.2, "sampler": "wino"}, "presence_penalty=1.2 .*'wino'"),
    ],
)
def test_wrong_controls_are_refused(request_: dict[str, Any], message: str) -> None:
    refuses(lambda: paradec.generate(tiny(1), [1, 2, 3], max_new_tokens=4, **request_), message)


def test_a_request_with_controls_is_saved_and_read(tmp_path: Any) -> None:
    request = paradec.Request(logit_bias={5: 1.5}, bad_words=[[1], "pear"], min_p=0.25, repetition_penalty=1.5)
    numbers: dict[str, Any] = {"min_p": np.float32(0.25), "repetition_penalty": np.float16(1.5)}
    words = [np.array([1]), "pear"]
    numpy_request = paradec.Request(logit_bias={np.int64(5): np.float32(1.5)}, bad_words=words, **numbers)
    for saved in (request, numpy_request, replace(numpy_request, min_new_tokens=np.int64(0))):
        saved.save(tmp_path / "request.json")
        assert paradec.Request.load(tmp_path / "request.json") == request


def test_neutral_values_create_no_controls() -> None:
    neutral: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    neutral |= {"logit_bias": {}, "bad_words": [], "min_new_tokens": 0, "ignore_eos": False}
    for sampler in ("threshold", "wino"):
        state = samplers.create(sampler).start(tiny(1), PROMPTS, max_new_tokens=4, **neutral)
        assert "controls" not in state.features
