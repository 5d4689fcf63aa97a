"""Typed questions over HTTP: answers equal transformers' pipeline, and wrong bodies are refused like by its server."""

import json
import math
import threading
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
    with running(model, request={"sampler": "jacobi"}) as found:
        yield found


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
    assert ask(server, {key: BODY[key] for key in ("state", "questions")}) == actual  # the model is known


def test_concurrent_questions_and_chats(server: Running) -> None:
    alone = ask(server, BODY)

    def one(number: int) -> bool:
        if number % 3 == 0:
            return server.post(chat("only level", max_tokens=4))[0] == 200
        return is_close(ask(server, BODY)["answers"], alone["answers"])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))


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
    seen: list[Tensor] = []

    class Looks(ConstantLogits):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids)
            return super().forward(ids)

    module = Looks({chat_ids("Yes")[0]: 1.0, chat_ids("No")[0]: 0.0, chat_ids("A")[0]: 0.0, chat_ids("B")[0]: 2.0})
    with running(chat_model("bidirectional", module=module)) as server:
        seen.clear()
        body = {"state": "<|mask|> and <|mask|>", "questions": {key: QUESTIONS[key] for key in ("spam", "tone")}}
        actual = ask(server, body)["answers"]
    assert actual["spam"]["noul"] == pytest.approx(1 / (1 + math.exp(-1))) and actual["tone"]["choice"] == "pushy"
    assert sum(len(ids) for ids in seen) == 2 and all((ids == CHAT_MASK).sum() == len(ids) for ids in seen)


def nested(depth: int) -> Any:
    result: Any = "x"
    for _ in range(depth):
        result = [result]
    return result


def with_question(**question: Any) -> dict[str, Any]:
    return BODY | {"questions": {"q": question}}


REFUSED: dict[str, tuple[Any, int, str]] = {
    "another field": (BODY | {"stream": True}, 422, "stream"),
    "ours": (BODY | {"paradec": {"temperature": 1}}, 422, "paradec"),
    "no state": ({"questions": QUESTIONS}, 422, "state"),
    "no questions": ({"state": "x"}, 422, "questions"),
    "none": (BODY | {"questions": {}}, 422, "questions"),
    "a list": (BODY | {"questions": [QUESTIONS["spam"]]}, 422, "questions"),
    "no type": (with_question(instructions="?"), 422, "type"),
    "another type": (with_question(type="span", instructions="?"), 422, "noul"),
    "27 options": (with_question(type="choice", criteria={f"{n}": None for n in range(27)}), 422, "26 options"),
    "no options": (with_question(type="choice", criteria={}), 422, "criteria"),
    "a field in it": (with_question(type="noul", instructions="?", weight=1), 422, "weight"),
    "asset": (BODY | {"assets": {"img-1": {"type": "image", "format": "png", "data_base64": ""}}}, 400, "images"),
    "another model": (BODY | {"model": "other"}, 404, "other"),
    "too long": (BODY | {"state": "x" * 9000}, 400, "longer than"),
    "nested state": (BODY | {"state": nested(400)}, 200, ""),
    "surrogate": (BODY | {"state": "\ud800"}, 400, "UTF-8"),
    "a long name": (BODY | {"x" * 100_000: 1}, 422, "xxx"),
    "a long type": (with_question(type="x" * 100_000), 422, "xxx"),
    "NaN": (json.dumps(BODY | {"state": [math.nan]}).encode(), 400, "state"),
    "large number": (json.dumps(BODY | {"state": ["N"]}).replace('"N"', "9" * 4000).encode(), 400, "longer than"),
    "1e999": (json.dumps(BODY | {"state": ["N"]}).replace('"N"', "1e999").encode(), 400, "state"),
    "much nested": (b'{"state": ' + b"[" * 100_000 + b"]" * 100_000 + b', "questions": {}}', 400, ""),
    "no JSON": (b'{"state": ', 400, "JSON"),
    "no mapping": (b"[1]", 422, "object"),
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_bodies_are_refused(server: Running, name: str) -> None:
    body, status, message = REFUSED[name]
    answer = ask(server, body, status)
    if status != 200:
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert message in answer["error"]["message"] and answer["error"]["type"] == kind
        assert ask(server, BODY)["usage"]["output_tokens"] == 0  # it goes on


def test_queued_tokens_are_counted_and_released(model: Any) -> None:
    with running(model, max_work=200, request={"sampler": "jacobi"}) as server:
        assert "server's limit of 200" in ask(server, BODY | {"state": "x" * 150}, 400)["error"]["message"]
        small = {"state": "x", "questions": {"spam": {"type": "noul", "instructions": "?"}}}
        for _ in range(15):
            ask(server, small)
        assert server.post(chat("x", max_tokens=4))[0] == 200


def test_a_client_that_goes_away_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, go = [], threading.Event()

    class Waits(ConstantLogits):
        def forward(self, ids: Tensor) -> Tensor:
            calls.append(len(ids))
            if len(calls) == first + 1:
                go.wait(30)
            return super().forward(ids)

    with running(chat_model("causal", module=Waits({chat_ids("Yes")[0]: 1.0}))) as server:
        first = len(calls)
        body = {"state": "x", "questions": {f"{n}": {"type": "noul", "instructions": f"{n}?"} for n in range(64)}}
        wire = server.send(json.dumps(body).encode(), PATH)
        wait(lambda: len(calls) > first)
        wire.close()
        wait(lambda: True)
        threading.Event().wait(0.3)  # the server notices the disconnect
        go.set()
        assert ask(server, {"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}})
    assert len(calls) == first + 2


def test_settings_of_a_folder(tmp_path: Path) -> None:
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
