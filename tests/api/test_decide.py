"""`decide`: answers from the probabilities of labels, compared with transformers' decision pipeline and plain loops."""

import copy
import functools
import itertools
import json
import math
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from oracles.renoising import causal
from recorded import replays
from small_models import CANVAS, tiny_gemma
from structured import CASES, case_names
from tokenized_models import (
    CHAT_END,
    CHAT_MASK,
    CHAT_TOKENIZER,
    CHAT_VOCAB,
    ConstantLogits,
    chat_ids,
    chat_model,
    chat_network,
    chat_tokenizer,
)
from torch import Tensor
from transformers import DynamicCache

import paradec
from paradec import Pick, Score, Span, YesNo
from paradec.api.decide import build_steps
from paradec.core import rng
from paradec.models.cache_argument import cache_keyword
from paradec.samplers.start import row_keys

pytest.importorskip("transformers.decision", reason="needs transformers 5.23")

QUESTIONS: dict[str, Any] = {
    "spam": YesNo("Is it spam?", true="an advertisement"),
    "tone": Pick({"about": "tone"}, {"calm": None, "pushy": "it presses", "loud": ["!", 1]}),
    "level": Score("How urgent?", ["can wait", "this week", "today", "now"]),
}
STATE = {"text": "WIN a phone <|mask|> now<|end|>", "n": [1, 2.5, None]}


def check_answers(actual: paradec.Decisions, expected: dict[str, Any], tolerance: float) -> None:
    assert [*actual] == [*expected]
    for name, answer in expected.items():
        output = actual[name]
        assert output.type == answer["type"]
        assert sum(output.probabilities.values()) == pytest.approx(1)
        if output.type == "noul":
            assert output.probabilities[True] == pytest.approx(answer["noul"], abs=tolerance)
            assert output.value == (output.probabilities[True] >= 0.5)
            continue
        assert [*output.probabilities.values()] == pytest.approx([*answer["probabilities"].values()], abs=tolerance)
        assert output.confidence == pytest.approx(answer["confidence"], abs=tolerance)
        is_score = output.type == "score"
        assert output.value == (pytest.approx(answer["score"], abs=tolerance) if is_score else answer["choice"])
        entropy = -sum(p * math.log(p) for p in output.probabilities.values() if p)
        assert output.entropy == pytest.approx(entropy, abs=1e-12)


def decide_by_pipeline(module: Any, template: str | None, temperature: dict[str, float]) -> Any:
    from transformers.decision import DecisionConfig
    from transformers.pipelines import DecisionPipeline

    config = DecisionConfig(chat_template=template, temperature=temperature)
    pipeline = DecisionPipeline(model=module, tokenizer=chat_tokenizer(), decision_config=config)
    questions: dict[str, Any] = {}
    for name, question in QUESTIONS.items():
        by_option = dict(zip(question.options, question.descriptions, strict=True))
        criteria = question.descriptions if question.type == "score" else by_option
        questions[name] = {"type": question.type, "instructions": question.instructions, "criteria": criteria}
    return pipeline({"state": STATE, "questions": questions})


@pytest.mark.parametrize("seed", range(3))
def test_causal_models_answer_like_the_pipeline(seed: int) -> None:
    module, temperature = chat_network(seed, torch.float32), {"noul": 1.5, "choice": 0.7}
    actual = paradec.decide(chat_model("causal", module=module), STATE, QUESTIONS, temperature=temperature)
    check_answers(actual, decide_by_pipeline(module, None, temperature), 2e-6)
    assert actual.forwards == 2  # the common prefix of the three prompts is evaluated once


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_masked_models_answer_like_the_pipeline_with_a_masked_template(prediction: str) -> None:
    from transformers.decision import DECISION_PROMPT

    answer = "<|mask|><|mark|>" if prediction == "same" else "<|mark|><|mask|>"
    template = (
        f"{{% set asked %}}{DECISION_PROMPT}{{% endset %}}<|turn|>user\n{{{{ asked }}}}<|end|>\n<|turn|>assistant\n"
    )
    module = chat_network(1, torch.float32)
    module.config.is_causal = False
    for layer in module.model.layers:
        layer.self_attn.is_causal = False
    expected = decide_by_pipeline(module, f"{template}{answer}<|end|>", {})
    check_answers(paradec.decide(chat_model("bidirectional", prediction, module), STATE, QUESTIONS), expected, 2e-6)


FEW = {"a": Span("What?", ["level", "Yes or No", "Yes", "only level"]), "b": Span("And then?", ["No", "Answer", "x"])}
"""Labels of different lengths; one is a prefix of another."""


def visible_columns(model: Any, length: int, prompt: int) -> Tensor:
    """Return the mask [1, 1, length, length] of the model's topology; True means visible."""
    positions = torch.arange(length)
    if model.facts.block_align == "prompt":  # the prompt is block -1
        positions = (positions - prompt).clamp(min=-1)
    block = {"bidirectional": length, "causal": 1}.get(model.facts.topology, model.facts.block_length)
    block_index = positions.div(block, rounding_mode="floor")
    return (block_index <= block_index.unsqueeze(1))[None, None]


def plain_log_p(model: Any, row: list[int], position: int, ids: list[int], prompt: int = 0) -> float:
    """Return the log of the summed probability of `ids` at `position` of `row`. prompt: length of the row's prompt."""
    shift = 1 if model.facts.topology == "causal" else model.facts.shift
    with torch.no_grad():
        logits = model.module(torch.tensor([row]), attention_mask=visible_columns(model, len(row), prompt)).logits[0]
    return float(logits[position - shift].log_softmax(-1)[ids].logsumexp(0))


def plain_scores(model: Any, text: str, labels: list[str]) -> list[float]:
    """Return the log-probability of each label, computed token by token. text: the user's turn."""
    prompt, texts = chat_ids(f"<|turn|>user\n{text}<|end|>\n<|turn|>assistant\n"), [chat_ids(label) for label in labels]
    longest, is_causal = max(map(len, texts)), model.facts.topology == "causal"
    has_prefixes = any(a != b and b[: len(a)] == a for a in texts for b in texts)
    result = []
    for label_ids in texts:
        follows = [[token] for token in label_ids]
        if has_prefixes if is_causal else len(label_ids) < longest:
            follows.append([*model.facts.eos_token_ids])
        total = 0.0
        for count, ids in enumerate(follows):
            row = prompt + label_ids[:count]
            if not is_causal:
                row += [CHAT_MASK] * (longest - count) + [CHAT_END]  # the end token of the template
                begin = len(prompt) if model.facts.block_align == "prompt" else 0
                row += [CHAT_END] * (-(len(row) - begin) % model.facts.block_unit)
            total += plain_log_p(model, row, len(prompt) + count, ids, len(prompt))
        result.append(total)
    return result


MODELS = {
    "bidirectional": lambda: chat_model("bidirectional"),
    "shifted": lambda: chat_model("bidirectional", "shifted"),
    "block_causal": lambda: chat_model("block_causal", block_length=4),
    "prompt_blocks": lambda: chat_model("block_causal", block_length=4, block_align="prompt"),
    "causal": lambda: chat_model("causal"),
    "two_ends": lambda: chat_model("bidirectional", eos_token_id=(chat_ids("q")[0], CHAT_END)),
    "causal_two_ends": lambda: chat_model("causal", eos_token_id=(chat_ids("q")[0], CHAT_END)),
}


@pytest.mark.thinned
@pytest.mark.parametrize("kind", MODELS)
def test_scores_of_long_labels_follow_the_chain_rule(kind: str) -> None:
    model = MODELS[kind]()
    decision = paradec.decide(model, "Answer: level", FEW)
    for name, question in FEW.items():
        scores = plain_scores(model, f"Answer: level\n\n{question.instructions}", [*question.values])
        assert decision[name].log_scores == pytest.approx(scores, rel=1e-9)
        weights = np.exp(scores)
        assert decision[name].mass == pytest.approx(weights.sum(), rel=1e-9) and decision[name].mass < 1
        assert [*decision[name].probabilities.values()] == pytest.approx(weights / weights.sum(), rel=1e-9)
        assert decision[name].value == question.values[int(np.argmax(scores))]


def canvas_model(**more: Any) -> Any:
    module = tiny_gemma(dtype=torch.float64, vocab=CHAT_VOCAB, **more)
    return paradec.wrap(module, eos_token_id=CHAT_END, tokenizer=CHAT_TOKENIZER)


@pytest.mark.parametrize("seeds", [1, 3])
def test_canvas_models_answer_from_the_first_step(seeds: int) -> None:
    model, texts = canvas_model(), ["Yes", "No only"]
    actual = paradec.decide(model, "Answer: level", {"q": Span("What?", texts)}, seeds=seeds)["q"]
    prompt = chat_ids("<|turn|>user\nAnswer: level\n\nWhat?<|end|>\n<|turn|>assistant\n")
    positions = torch.arange(len(prompt), len(prompt) + CANVAS)

    def log_p(fixed: list[int], slot_index: int, ids: list[int]) -> float:
        total = 0.0
        for key in torch.as_tensor(row_keys([*range(seeds)], [prompt] * seeds)):
            noise = rng.uniform(key[None], torch.zeros(1, dtype=torch.int64), positions[None], 1, 4)[0, :, 0]
            canvas = (noise * CHAT_VOCAB).long()
            for slot, token in enumerate(fixed):
                canvas[slot] = canvas[slot] if token == -1 else token
            cached = cache_keyword(model.module, DynamicCache(config=model.module.config.text_config))
            mask = causal(model.module, len(prompt))
            inputs = {"decoder_input_ids": canvas[None], "decoder_position_ids": positions[None]}
            inputs |= dict.fromkeys(("self_conditioning_logits", "self_conditioning_mask"))
            with torch.no_grad():
                model.module.model.encoder(input_ids=torch.tensor([prompt]), attention_mask=mask, **cached)
                logits = model.module(**inputs, **cached).logits[0, slot_index]
            total += float(logits.double().softmax(-1)[ids].sum()) / seeds
        return math.log(total)

    short, long = chat_ids(texts[0]), chat_ids(texts[1])
    assert (len(short), len(long)) == (1, 2)
    expected = [
        log_p([-1, -1, CHAT_END], 0, short) + log_p([short[0], -1, CHAT_END], 1, [CHAT_END]),
        log_p([-1, -1, CHAT_END], 0, long[:1]) + log_p([long[0], -1, CHAT_END], 1, long[1:]),
    ]
    assert actual.log_scores == pytest.approx(expected, rel=1e-5)  # logits are float32


@pytest.mark.thinned
@pytest.mark.parametrize("kind", [*MODELS, pytest.param("canvas", marks=pytest.mark.full)])
def test_answers_do_not_depend_on_other_questions_or_the_batch(kind: str) -> None:
    model = canvas_model() if kind == "canvas" else MODELS[kind]()
    tolerance = 1e-5 if kind == "canvas" else 1e-9
    questions = FEW | {"long": Span("level " * 40, ["Yes", "No"])} | QUESTIONS
    together = paradec.decide(model, "only level", questions)
    for batch_size, names in itertools.product((1, 3), (["a", "long"], ["b"], ["tone", "spam", "level", "a"])):
        decision = paradec.decide(model, "only level", {name: questions[name] for name in names}, batch_size=batch_size)
        for name in names:
            assert decision[name].log_scores == pytest.approx(together[name].log_scores, rel=tolerance)
    assert decision.forwards > together.forwards


def test_models_without_padding_support() -> None:
    model = chat_model("bidirectional", module=ConstantLogits({token: token / 50 for token in range(CHAT_VOCAB)}))
    assert not model.pads
    yes, no = paradec.decide(model, "only level", FEW | QUESTIONS)["spam"].log_scores
    assert yes - no == pytest.approx((chat_ids("Yes")[0] - chat_ids("No")[0]) / 50)


def test_an_empty_prior_subtracts_the_scores_of_an_empty_state() -> None:
    model = chat_model("bidirectional")
    plain, empty = (paradec.decide(model, state, QUESTIONS) for state in ("only level", ""))
    actual = paradec.decide(model, "only level", QUESTIONS, prior="empty", temperature=2.0)
    for name in QUESTIONS:
        scores = np.subtract(plain[name].log_scores, empty[name].log_scores)
        assert actual[name].log_scores == pytest.approx(scores, rel=1e-9)
        weights = np.exp(scores / 2)
        assert [*actual[name].probabilities.values()] == pytest.approx(weights / weights.sum(), rel=1e-9)
        assert actual[name].mass == pytest.approx(plain[name].mass, rel=1e-9)  # the mass ignores the prior


def test_rotated_options_have_every_label_once() -> None:
    model, options = chat_model("causal"), ["calm", "pushy", "loud"]
    questions = {"tone": Pick("Tone?", options), "spam": QUESTIONS["spam"]}
    actual = paradec.decide(model, "only level", questions, rotate=True)
    scores = dict.fromkeys(options, 0.0)
    for shift in range(3):
        rotated = options[shift:] + options[:shift]
        answer = paradec.decide(model, "only level", {"tone": Pick("Tone?", rotated)})["tone"]
        for option, score in zip(rotated, answer.log_scores, strict=True):
            scores[option] += score / 3
    assert actual["tone"].log_scores == pytest.approx([*scores.values()], rel=1e-9)
    assert [*actual["tone"].probabilities] == options
    plain = paradec.decide(model, "only level", {"spam": QUESTIONS["spam"]})
    assert actual["spam"].log_scores == pytest.approx(plain["spam"].log_scores, rel=1e-9)


def test_fitted_temperatures_make_right_answers_likeliest() -> None:
    draw = random.Random(0)
    decided, right = [], []
    for _ in range(60):
        logits = {chat_ids(letter)[0]: draw.gauss(0, 3) for letter in "ABC"}
        logits |= {chat_ids("Yes")[0]: draw.gauss(0, 2), chat_ids("No")[0]: 0.0}
        model = chat_model("causal", module=ConstantLogits(logits))
        request = {"q": Pick("?", ["x", "y", "z"]), "u": Score("?", ["low", "high"]), "s": YesNo("?")}
        actual = paradec.decide(model, "s", request)
        # right answers are drawn at temperature 2.5
        weights = [math.exp(score / 2.5) for score in actual["q"].log_scores]
        decided.append(actual)
        picked = draw.choices("xyz", weights)[0]
        right.append({"q": picked, "s": draw.random() < 0.5, "u": int(actual["u"].value < 0.5)})
    with pytest.warns(UserWarning, match="'score' is at its limit, 1000"):
        fitted = paradec.fit_temperature(decided, right)

    def loss(name: str, temperature: float) -> float:
        total = 0.0
        for answers, known in zip(decided, right, strict=True):
            scores = dict(zip(answers[name].probabilities, answers[name].log_scores, strict=True))
            total += math.log(sum(math.exp((score - scores[known[name]]) / temperature) for score in scores.values()))
        return total

    for name, kind in (("q", "choice"), ("s", "noul")):
        grid = min(loss(name, 1.001**step) for step in range(-4000, 7000, 70))
        assert loss(name, fitted[kind]) <= grid + 1e-9
    assert 1.5 < fitted["choice"] < 4
    assert fitted["score"] > 900  # the likelier answer is always wrong
    repeated = paradec.decide(model, "s", request, temperature=fitted)
    assert repeated["q"].log_scores == actual["q"].log_scores and repeated["q"].confidence < actual["q"].confidence
    assert paradec.fit_temperature(decided, [{"u": round(actual["u"].value)} for actual in decided])["score"] < 0.002
    for wrong, message in (({"q": "w"}, "'w'"), ({"s": 1}, "1 to 's'"), ({"none": 1}, "none"), ({}, "no right")):
        with pytest.raises(ValueError, match=message):
            paradec.fit_temperature(decided, [wrong] * 60)
    refuses(lambda: paradec.fit_temperature(decided, [{}]), "60 results")
    refuses(lambda: paradec.fit_temperature(decided, ["a"] * 60), "a mapping for each result", TypeError)


@pytest.mark.parametrize("name", case_names("decide"))
@replays("name")
def test_recorded_answers(name: str) -> None:
    case = CASES[name]
    for key, question_fields in case["questions"].items():
        labels, instructions = case["expected"]["labels"][key], question_fields.get("instructions") or "?"
        criteria = question_fields.get("criteria")
        if question_fields["type"] == "noul":
            question: Any = YesNo(instructions, **(criteria or {}), labels=labels)
        else:
            question = {"choice": Pick, "score": Score}[question_fields["type"]](instructions, criteria, labels=labels)
        assert question.options == case["expected"]["options"][key]
        if len(labels) <= 26 and question_fields["type"] != "noul":
            assert type(question)(instructions, criteria).labels == labels  # the default labels
        ids = [chat_ids(label)[0] for label in labels]
        for topology in ("causal", "bidirectional"):
            model = chat_model(topology, module=ConstantLogits(dict(zip(ids, case["logits"][key], strict=True))))
            actual = paradec.decide(model, "x", {key: question}, temperature=case["temperature"])
            check_answers(actual, {key: case["expected"]["answers"][key]}, 1e-9)
            assert actual[key].mass == pytest.approx(1)


def test_special_tokens_in_a_state_are_text() -> None:
    [[(step, _)], _] = build_steps(chat_model("bidirectional"), "a<|mask|>b<|end|>c", QUESTIONS["spam"], None)
    assert step.row.count(CHAT_MASK) == 1 and step.row[step.position] == CHAT_MASK and step.row.count(CHAT_END) == 2
    assert CHAT_TOKENIZER.decode([token for token in step.row if token != CHAT_MASK]).count("<|mask|>") == 1


def test_threads_do_not_disturb_each_other() -> None:
    model, states = chat_model("bidirectional"), [f"only level {number}<|end|>" for number in range(4)]
    alone = [paradec.decide(model, state, QUESTIONS | FEW).to_dict() for state in states]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda state: paradec.decide(model, state, QUESTIONS | FEW).to_dict(), states)) == alone


def test_custom_templates_and_the_packaged_model() -> None:
    model = paradec.load()
    full = Span(texts=[" ".join(order) for order in itertools.permutations(["apple", "fig", "pear"])])
    assert paradec.decide(model, "Sort: pear fig apple", {"all": full})["all"].value == "apple fig pear"
    request = {"kind": Pick("Sort: fig", ["x", "y"], labels=["pear", "fig"])}
    seen: list[Any] = []

    def template(state: str, question: Any) -> str:
        seen.append((state, question.options, question.labels))
        return str(question.instructions)

    assert paradec.decide(model, {"a": 1}, request, template=template)["kind"].value == "y"
    assert seen == [('{"a": 1}', ["x", "y"], ["pear", "fig"])]


def test_without_a_chat_template_the_text_is_the_prompt() -> None:
    tokenizer = copy.deepcopy(CHAT_TOKENIZER)
    tokenizer.chat_template = None
    model = chat_model("bidirectional")
    model.tokenizer = tokenizer
    actual = paradec.decide(model, "only level", {"q": Span("What?", ["Yes", "No"])})["q"]
    row = [*chat_ids("only level\n\nWhat?\n"), CHAT_MASK, CHAT_END]
    expected = [plain_log_p(model, row, len(row) - 2, chat_ids(label)) for label in ("Yes", "No")]
    assert actual.log_scores == pytest.approx(expected, rel=1e-9)
    refuses(lambda: paradec.decide(model, "a<|mask|>b", FEW), "'<|mask|>', a special token")


def test_values_are_copied_saved_and_compared() -> None:
    actual = paradec.decide(chat_model("bidirectional"), "x", QUESTIONS)
    for other in (copy.deepcopy(actual), pickle.loads(pickle.dumps(actual))):
        assert other == actual and other["tone"].probabilities == actual["tone"].probabilities
    for question in (*QUESTIONS.values(), *FEW.values()):
        assert pickle.loads(pickle.dumps(question)) == question == copy.deepcopy(question)
    data = json.loads(json.dumps(actual.to_dict()))
    assert data["answers"]["spam"]["probabilities"][0] == [True, actual["spam"].probabilities[True]]
    assert Pick("?", {"a": None, "b": "x"}).descriptions == [None, "x"]


class NeverCalled(ConstantLogits):
    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("a forward was run")


ONE = {"q": YesNo("?")}
WRONG: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no questions": ("x", {}, {}, "questions="),
    "a list": ("x", [YesNo("?")], {}, "questions="),
    "nan": ({"a": math.nan}, ONE, {}, "state="),
    "two states": (["a", "b"], ONE, {}, r"state=\['a', 'b'\] must be one text or JSON object"),
    "surrogate": ("a\ud800", ONE, {}, "UTF-8"),
    "rotate": ("x", ONE, {"rotate": "yes"}, "rotate='yes'"),
    "hot": ("x", ONE, {"temperature": {"noul": math.inf}}, "temperature=inf"),
    "type": ("x", ONE, {"temperature": {"pick": 1}}, "pick"),
    "prior of nothing": ("x", {"q": Span(texts=["a"])}, {"prior": "empty"}, "nothing is asked"),
    "seeds": ("x", ONE, {"seeds": 0}, "seeds=0"),
    "template": ("x", ONE, {"template": "Is it?"}, "template="),
    "template's text": ("x", ONE, {"template": lambda state, question: 3}, "template returned 3"),
    "long": ("x" * 9000, ONE, {}, "longer than"),
    "mask": ("x", {"q": Span(texts=["a", "<|mask|>"])}, {}, "mask or an end"),
    "end": ("x", {"q": Span(texts=["a", "<|end|>"])}, {}, "mask or an end"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_any_work(name: str) -> None:
    state, questions, arguments, message = WRONG[name]
    topology = "causal" if name in ("long", "end") else "bidirectional"
    with pytest.raises((ValueError, TypeError), match=message) as error:
        paradec.decide(chat_model(topology, module=NeverCalled({})), state, questions, **arguments)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: YesNo(), "instructions"),
        (lambda: YesNo("?", labels=["Yes"]), "labels="),
        (lambda: YesNo(functools.reduce(lambda inner, _: [inner], range(100_000), None)), "instructions="),
        (lambda: Pick("?", "ab"), "options="),
        (lambda: Pick("?", ["a", "a"]), "options="),
        (lambda: Pick("?", [f"{number}" for number in range(27)]), "27 options"),
        (lambda: Score("?", ["low", None]), "levels="),
        (lambda: Span("?", ["a\udfff"]), "texts="),
    ],
)
def test_invalid_questions_are_refused(make: Any, message: str) -> None:
    refuses(make, message, (ValueError, TypeError))


def test_unsuitable_models_are_refused() -> None:
    with pytest.raises(ValueError, match="topology='causal'"):
        paradec.decide(chat_model("causal_context", block_length=4, block_align="prompt"), "x", ONE)
    refuses(lambda: paradec.decide("model", "x", ONE), "decide takes", TypeError)
    model = chat_model("bidirectional")
    model.tokenizer = None
    refuses(
        lambda: paradec.decide(model, "x", ONE),
        "no tokenizer to write questions with: put its files into the model's folder, load with tokenizer=",
    )
    model = chat_model("bidirectional", eos_token_id=())
    assert paradec.decide(model, "x", {"q": Span(texts=["a", "b"])})["q"].value in ("a", "b")
    refuses(lambda: paradec.decide(model, "x", FEW), "no end token")
    with pytest.raises(ValueError, match="cannot write the label 'Yes'"):
        paradec.decide(paradec.load(), "fig", ONE, template=lambda state, question: state)
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        paradec.decide(paradec.load(), "fig <|mdm_mask|>", {"q": Span(texts=["fig"])})


def test_answers_longer_than_the_canvas_are_refused() -> None:
    model = canvas_model()
    refuses(lambda: paradec.decide(model, "x", {"q": Span(texts=["x" * 16, "y"])}), "17 positions after the prompt")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("topology", ["bidirectional", "causal"])
def test_logits_that_are_not_finite_are_reported(value: float, topology: str) -> None:
    module = ConstantLogits({token: value for token in chat_ids("Yes")} | {5: 1.0})
    refuses(lambda: paradec.decide(chat_model(topology, module=module), "x", ONE), "NaN", FloatingPointError)


def test_labels_of_probability_0_are_reported() -> None:
    with pytest.raises(FloatingPointError, match="no label of question 'q'"):
        paradec.decide(chat_model("causal", module=ConstantLogits({5: 1.0})), "x", ONE)
    half = chat_model("causal", module=ConstantLogits({chat_ids("Yes")[0]: 1.0}))
    assert paradec.decide(half, "x", ONE)["q"].probabilities == {True: 1.0, False: 0.0}
    refuses(lambda: paradec.decide(half, "x", ONE, prior="empty"), "about an empty state", FloatingPointError)


def test_questions_that_need_a_newer_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers.decision", None)
    refuses(lambda: paradec.decide(chat_model("causal"), "x", ONE), r"transformers 5\.23", ImportError)
    assert paradec.decide(chat_model("causal"), "x", FEW)["b"].value in FEW["b"].values
