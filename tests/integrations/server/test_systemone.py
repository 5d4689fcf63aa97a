"""Typed questions over HTTP: answers equal those of transformers' pipeline, and wrong bodies are refused."""

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import plain, replays
from serving import NAME, Running, chat, running, wait
from structured import CASES, case_names
from tokenized_models import CHAT_MASK, ConstantLogits, chat_ids, chat_model, chat_network, chat_tokenizer
from torch import Tensor

import paradec

pytest.importorskip("transformers.decision", reason="needs transformers 5.23")
PATH = "/v1/systemone"
QUESTIONS: dict[str, Any] = {
    "spam": {"type": "noul", "instructions": "Is it spam?", "criteria": {"false": "a letter"}},
    "tone": {"type": "choice", "criteria": {"calm": None, "pushy": {"it": ["presses"]}}},
    "level": {"type": "score", "instructions": ["How urgent?"], "criteria": ["can wait", "today", "now"]},
}
STATE = {"text": "WIN a phone <|mask|> now<|end|>"}
BODY: dict[str, Any] = {"model": NAME, "state": STATE, "questions": QUESTIONS}


@pytest.fixture(scope="module")
def model() -> Any:
    return chat_model("causal", module=chat_network(0, torch.float32))


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with running(model, request={"sampler": "jacobi"}) as instance:
        yield instance


def ask(server: Running, body: Any, status: int = 200) -> dict[str, Any]:
    actual, _, text = server.post(body, PATH)
    assert actual == status, text
    assert len(text) < 5000
    return json.loads(text)


def is_close(actual: Any, expected: Any, tolerance: float = 2e-6) -> bool:
    if isinstance(expected, dict):
        return [*actual] == [*expected] and all(is_close(actual[key], expected[key], tolerance) for key in expected)
    return actual == (pytest.approx(expected, abs=tolerance) if isinstance(expected, float) else expected)


def test_answers_equal_those_of_the_pipeline(server: Running, model: Any) -> None:
    from transformers.pipelines import DecisionPipeline

    pipeline = DecisionPipeline(model=chat_network(0, torch.float32), tokenizer=chat_tokenizer())
    request = {"state": STATE, "questions": QUESTIONS}
    actual = ask(server, BODY)
    assert [*actual] == ["model", "answers", "usage"] and actual["model"] == NAME
    assert is_close(actual["answers"], pipeline(request))
    tokens = sum(inputs["input_ids"].shape[-1] for inputs, _ in pipeline.preprocess(request)["prompts"])
    assert actual["usage"] == {"input_tokens": tokens, "output_tokens": 0}
    assert ask(server, {key: BODY[key] for key in ("state", "questions")}) == actual  # the field `model` is optional


def test_concurrent_questions_and_chats(server: Running) -> None:
    expected = ask(server, BODY)

    def is_answered(number: int) -> bool:
        if number % 3 == 0:
            return server.post(chat("only level", max_tokens=4))[0] == 200
        return is_close(ask(server, BODY)["answers"], expected["answers"])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_answered, range(24)))


@pytest.mark.parametrize("name", case_names("decide"))
@replays("name")
def test_recorded_answers(name: str) -> None:
    from transformers.decision import DecisionConfig, parse_questions

    from paradec.integrations.server.answers import build_question

    case = CASES[name]
    for parsed in parse_questions(plain(case["questions"], read=True), DecisionConfig()):
        key, question, expected = parsed.name, build_question(parsed), case["expected"]
        assert question.options == expected["options"][key] and question.labels == expected["labels"][key]
        ids = [chat_ids(label)[0] for label in question.labels]
        model = chat_model("bidirectional", module=ConstantLogits(dict(zip(ids, case["logits"][key], strict=True))))
        actual = paradec.decide(model, "x", {key: question}, temperature=case["temperature"])
        assert is_close(parsed.answer([*actual[key].probabilities.values()]), expected["answers"][key], 1e-9)


def test_a_mask_in_the_state_is_text_on_masked_models() -> None:
    """Each row that the model evaluates has one mask token: the position of the answer."""
    calls: list[Tensor] = []

    class RecordsCalls(ConstantLogits):
        def forward(self, ids: Tensor) -> Tensor:
            calls.append(ids)
            return super().forward(ids)

    module = RecordsCalls(
        {chat_ids("Yes")[0]: 1.0, chat_ids("No")[0]: 0.0, chat_ids("A")[0]: 0.0, chat_ids("B")[0]: 2.0}
    )
    with running(chat_model("bidirectional", module=module)) as server:
        calls.clear()
        body = {"state": "<|mask|> and <|mask|>", "questions": {key: QUESTIONS[key] for key in ("spam", "tone")}}
        actual = ask(server, body)["answers"]
    assert actual["spam"]["noul"] == pytest.approx(1 / (1 + math.exp(-1))) and actual["tone"]["choice"] == "pushy"
    assert sum(len(ids) for ids in calls) == 2 and all((ids == CHAT_MASK).sum() == len(ids) for ids in calls)


def nested_lists(depth: int) -> Any:
    result: Any = "x"
    for _ in range(depth):
        result = [result]
    return result


def with_question(**question: Any) -> dict[str, Any]:
    return BODY | {"questions": {"q": question}}


REFUSED: dict[str, tuple[Any, int, str]] = {
    "unknown field": (BODY | {"stream": True}, 422, "stream"),
    "field paradec": (BODY | {"paradec": {"temperature": 1}}, 422, "paradec"),
    "no state": ({"questions": QUESTIONS}, 422, "state"),
    "no questions": ({"state": "x"}, 422, "questions"),
    "empty questions": (BODY | {"questions": {}}, 422, "questions"),
    "list of questions": (BODY | {"questions": [QUESTIONS["spam"]]}, 422, "questions"),
    "no type": (with_question(instructions="?"), 422, "type"),
    "unknown type": (with_question(type="span", instructions="?"), 422, "noul"),
    "27 options": (with_question(type="choice", criteria={f"{n}": None for n in range(27)}), 422, "26 options"),
    "no options": (with_question(type="choice", criteria={}), 422, "criteria"),
    "unknown field of a question": (with_question(type="noul", instructions="?", weight=1), 422, "weight"),
    "asset": (BODY | {"assets": {"img-1": {"type": "image", "format": "png", "data_base64": ""}}}, 400, "images"),
    "another model": (BODY | {"model": "other"}, 404, "other"),
    "too long": (BODY | {"state": "x" * 9000}, 400, "longer than"),
    "nested state": (BODY | {"state": nested_lists(400)}, 200, ""),
    "surrogate": (BODY | {"state": "\ud800"}, 400, "UTF-8"),
    "a long name": (BODY | {"x" * 100_000: 1}, 422, "xxx"),
    "a long type": (with_question(type="x" * 100_000), 422, "xxx"),
    "NaN": (json.dumps(BODY | {"state": [math.nan]}).encode(), 400, "state"),
    "large number": (json.dumps(BODY | {"state": ["N"]}).replace('"N"', "9" * 4000).encode(), 400, "longer than"),
    "1e999": (json.dumps(BODY | {"state": ["N"]}).replace('"N"', "1e999").encode(), 400, "state"),
    "deeply nested": (b'{"state": ' + b"[" * 100_000 + b"]" * 100_000 + b', "questions": {}}', 400, ""),
    "no JSON": (b'{"state": ', 400, "JSON"),
    "no object": (b"[1]", 422, "object"),
}
"""Name -> (body, status, part of the error message)."""


@pytest.mark.thinned
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_bodies_are_refused(server: Running, name: str) -> None:
    body, status, message = REFUSED[name]
    answer = ask(server, body, status)
    if status != 200:
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert message in answer["error"]["message"] and answer["error"]["type"] == kind
        assert ask(server, BODY)["usage"]["output_tokens"] == 0  # the server still answers


def test_tokens_of_questions_count_towards_max_work_until_the_answer(model: Any) -> None:
    with running(model, max_work=200, request={"sampler": "jacobi"}) as server:
        assert "server's limit of 200" in ask(server, BODY | {"state": "x" * 150}, 400)["error"]["message"]
        small = {"state": "x", "questions": {"spam": {"type": "noul", "instructions": "?"}}}
        for _ in range(15):
            ask(server, small)
        assert server.post(chat("x", max_tokens=4))[0] == 200


def test_after_a_disconnect_the_other_questions_are_not_evaluated() -> None:
    calls, proceed = [], threading.Event()

    class WaitsOnce(ConstantLogits):
        def forward(self, ids: Tensor) -> Tensor:
            calls.append(len(ids))
            if len(calls) == start_calls + 1:
                proceed.wait(30)
            return super().forward(ids)

    with running(chat_model("causal", module=WaitsOnce({chat_ids("Yes")[0]: 1.0}))) as server:
        start_calls = len(calls)
        body = {"state": "x", "questions": {f"{n}": {"type": "noul", "instructions": f"{n}?"} for n in range(64)}}
        wire = server.send(json.dumps(body).encode(), PATH)
        wait(lambda: len(calls) > start_calls)
        wire.close()
        time.sleep(0.3)  # the server notices the disconnect
        proceed.set()
        assert ask(server, {"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}})
    assert len(calls) == start_calls + 2  # the call that waited, and the new question


def test_settings_are_read_from_the_model_folder(tmp_path: Path) -> None:
    chat_network(0, torch.float32).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    settings = {"labels": {"choice": ["level", "only", "Yes"]}, "temperature": {"choice": 2.0, "noul": 0.5}}
    (tmp_path / "decision.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded = paradec.load(str(tmp_path))
    tone = paradec.Pick(None, QUESTIONS["tone"]["criteria"], labels=["level", "only"])
    expected = paradec.decide(loaded, STATE, {"tone": tone}, temperature=2.0)["tone"]
    with running(loaded) as server:
        actual = ask(server, BODY)["answers"]
        probabilities = pytest.approx([*expected.probabilities.values()], abs=1e-6)
        assert [*actual["tone"]["probabilities"].values()] == probabilities
    (tmp_path / "decision_template.jinja").write_text("{{ state }}<|mark|>", encoding="utf-8")
    with running(loaded) as server:
        assert "decision_template.jinja" in ask(server, BODY, 400)["error"]["message"]
    (tmp_path / "decision.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"decision\.json"), running(loaded):
        pass
