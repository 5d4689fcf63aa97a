"""Constrained answers over HTTP: with OpenAI's client, in streams, concurrently, and with very large schemas."""

import functools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from serving import NAME, Running, chat, running
from structured import nested_arrays, nested_objects
from tokenized_models import VOCAB, byte_level_tokenizer
from torch import Tensor, nn

import paradec
from paradec.constraints.compiler import Compiler
from paradec.integrations.server.request_body import read_presets
from paradec.samplers.features import spans

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>user\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 3]}, "maxItems": 2},
        "size": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 120}},
            "required": ["n"],
        },
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "size", "ok"],
}
PUT_TOOL = {"type": "function", "function": {"name": "put", "parameters": SCHEMA["properties"]["size"]}}
GO_TOOL = {
    "type": "function",
    "function": {"name": "go", "parameters": {"type": "object", "additionalProperties": False}},
}


class RandomLogits(nn.Module):
    """Fixed random logits that depend only on the position."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=2048)
        self.table = 3 * torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[torch.arange(ids.shape[1]) % 97].expand(len(ids), -1, -1).clone()


@pytest.fixture(scope="module")
def model() -> Any:
    tokenizer = byte_level_tokenizer("<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return paradec.wrap(RandomLogits(), prediction="same", topology="bidirectional", tokenizer=tokenizer)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with running(model, batch_size=8, request={"block_length": 32}) as instance:
        yield instance


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120)


def assert_matches_schema(text: str) -> None:
    actual = json.loads(text)
    assert list(actual) == ["name", "tags", "size", "ok"] and isinstance(actual["ok"], bool)
    assert len(actual["name"]) <= 4 and 5 <= actual["size"]["n"] <= 120
    assert len(actual["tags"]) <= 2 and all(tag in ("a", "b c", 3) for tag in actual["tags"])


FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_match_the_schema(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {"model": NAME, "messages": chat("x")["messages"], "max_tokens": 128, "temperature": 1.0}
    actual = client.chat.completions.create(response_format=FORMAT, stream=stream, seed=5, **request)
    if stream:
        chunks = list(actual)
        assert_matches_schema("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        assert [reason for chunk in chunks if (reason := chunk.choices[0].finish_reason)] == ["stop"]
    else:
        assert_matches_schema(actual.choices[0].message.content)
        assert actual.choices[0].finish_reason == "stop"


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("extra", "is_valid"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, lambda text: re.fullmatch("[ab]{3}c", text)),
        ({"structured_outputs": {"choice": ["one two", "six"]}}, lambda text: text in ("one two", "six")),
        ({"structured_outputs": {"json": {"type": "integer"}}}, lambda text: isinstance(json.loads(text), int)),
        pytest.param(
            {"structured_outputs": {"json_object": True}},
            lambda text: isinstance(json.loads(text), dict),
            marks=pytest.mark.full,
        ),
        ({"guided_regex": "a+"}, lambda text: re.fullmatch("a+", text)),
        ({"guided_choice": ["six"]}, lambda text: text == "six"),
        ({"guided_json": '{"type": "null"}'}, lambda text: text == "null"),
        ({"paradec": {"constraint": {"regex": "b+"}}}, lambda text: re.fullmatch("b+", text)),
        ({"response_format": {"type": "text"}, "guided_regex": "z"}, lambda text: text == "z"),
    ],
)
def test_every_field_that_sets_a_constraint(server: Running, extra: dict[str, Any], is_valid: Any) -> None:
    status, _, text = server.post(chat("x", max_tokens=40, **extra))
    assert status == 200, text
    assert is_valid(json.loads(text)["choices"][0]["message"]["content"])
    status, _, text = server.post({"prompt": "x", "max_tokens": 40, **extra}, "/v1/completions")
    assert status == 200 and is_valid(json.loads(text)["choices"][0]["text"])


def test_a_body_without_constraint_gets_that_of_its_preset_or_the_server(model: Any, tmp_path: Path) -> None:
    paradec.Request(constraint=paradec.Choice(("six",))).save(tmp_path / "six.json")
    request = {"block_length": 32, "constraint": paradec.Regex("[ab]{3}")}
    with running(model, request=request, presets=read_presets(tmp_path)) as server:
        for extra, pattern in (
            ({}, "[ab]{3}"),
            ({"response_format": {"type": "text"}}, "[ab]{3}"),
            ({"preset": "six"}, "six"),
            ({"preset": "six", "guided_regex": "z"}, "z"),
        ):
            status, _, text = server.post(chat("x", max_tokens=40, **extra))
            choice = json.loads(text)["choices"][0]
            assert status == 200 and choice["finish_reason"] == "stop"
            assert re.fullmatch(pattern, choice["message"]["content"])
        assert server.post(chat("x", max_tokens=40, stop=["a"]))[0] == 400
        assert server.post(chat("x", max_tokens=2))[0] == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "put"}}])
def test_required_tools_are_called_with_valid_arguments(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    request: Any = {"model": NAME, "messages": chat("x")["messages"], "max_tokens": 96, "tools": [PUT_TOOL, GO_TOOL]}
    actual = client.chat.completions.create(tool_choice=choice, temperature=1.0, seed=2, stream=stream, **request)
    if stream:
        chunks = list(actual)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [reason for chunk in chunks if (reason := chunk.choices[0].finish_reason)] == ["tool_calls"]
    else:
        calls = actual.choices[0].message.tool_calls
        assert actual.choices[0].finish_reason == "tool_calls"
    (name,) = [call.function.name for call in calls if call.function.name]
    arguments = json.loads("".join(call.function.arguments or "" for call in calls))
    assert name in ("put", "go") and (choice == "required" or name == "put")
    assert arguments == {} if name == "go" else 5 <= arguments["n"] <= 120


def format_of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


WRONG_FORMAT = {"type": "json_schema", "json_schema": FORMAT["json_schema"] | {"after": "x"}}
MANY_CHOICES = [f"{index:09d} {index * 7919 % 10**12:012d}" for index in range(30_000)]
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"oneOf": []}}}


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        ({"response_format": {"type": "xml"}}, 422, "must have the type"),
        ({"response_format": FORMAT | {"after": "x"}}, 422, "unknown field: 'after'; allowed: json_schema, type"),
        ({"response_format": FORMAT | {"strict": True}}, 422, "unknown field: 'strict'"),
        ({"response_format": WRONG_FORMAT}, 422, "unknown field of json_schema: 'after'"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, 422, '"json_object" alone'),
        (format_of_schema(nested_objects(200)), 422, "nested too deeply|more than|parts"),
        (format_of_schema(nested_arrays(22, minItems=2)), 422, "more than"),
        ({"guided_choice": MANY_CHOICES}, 422, "choices take more"),
        ({"structured_outputs": {"structural_tag": "x"}}, 422, "unknown key of constraint: 'structural_tag'"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 422, "unknown key of constraint: 'choice'"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "both constrain the answer"),
        ({"guided_regex": "a{50}", "max_tokens": 4}, 400, "=4: the constraint needs 50 tokens"),
        ({"guided_regex": "a+", "stop": ["b"], "stream": True}, 400, "stop may end an answer"),
        ({"guided_regex": "a+", "paradec": {"sampler": "saber"}}, 400, "replaces decided tokens"),
        ({"tool_choice": "required"}, 422, "needs tools"),
        ({"tool_choice": "required", "tools": [WRONG_TOOL]}, 422, "tool_choice='auto' does not need them"),
    ],
)
def test_wrong_formats_are_refused(server: Running, extra: dict[str, Any], status: int, message: str) -> None:
    actual, _, text = server.post(chat("x", **{"max_tokens": 40} | extra))
    assert actual == status, text
    assert re.search(message, json.loads(text)["error"]["message"]), text
    assert server.engine.alive and server.engine.batch.occupied == 0


def test_tables_that_are_too_large_are_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_TABLE_BYTES", 2**10)
    status, _, text = server.post(chat("x", max_tokens=40, guided_regex="a{30}"))
    assert status == 422 and "states times" in json.loads(text)["error"]["message"], text
    assert server.engine.alive and server.engine.batch.occupied == 0


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.full)])
def test_concurrent_constrained_requests(client: openai.OpenAI, server: Running, count: int) -> None:

    def ask(number: int) -> str:
        request: Any = {"model": NAME, "messages": chat(f"x{number}")["messages"], "temperature": 1.0, "seed": number}
        if number % 4 == 0:
            answer = client.chat.completions.create(response_format=FORMAT, max_tokens=128, **request)
            return str(answer.choices[0].message.content)
        pattern = "[a-d]{1,20}" if number % 4 < 3 else "(a|aa)*(b?.){60}c"
        try:
            answer = client.chat.completions.create(extra_body={"guided_regex": pattern}, max_tokens=32, **request)
        except openai.UnprocessableEntityError as error:
            return str(error)
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(16) as pool:
        for number, text in enumerate(pool.map(ask, range(count))):
            if number % 4 == 0:
                assert_matches_schema(text)
            else:
                assert re.fullmatch("[a-d]{1,20}", text) if number % 4 < 3 else "more than 65536 states" in text
    assert (server.engine.batch.occupied, server.engine.batch.waiting) == (0, 0)


def test_a_schema_that_compiles_too_long_is_refused_and_delays_no_request(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("paradec.integrations.server.answers.Compiler", functools.partial(Compiler, seconds=0.1))
    inner: dict[str, Any] = {"type": "string", "maxLength": 20}
    for _ in range(2):  # this schema takes more than a second to compile
        inner = {"type": "object", "properties": {f"key_{number}": inner for number in range(4)}}
    with running(model, request={"block_length": 32}) as server, ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(server.post, chat("x", max_tokens=40, **format_of_schema(inner))) for _ in range(2)]
        assert server.post(chat("x", max_tokens=8))[0] == 200
        for answer in slow:
            status, _, text = answer.result()
            assert status == 422 and "takes more than 0.1 s" in json.loads(text)["error"]["message"], text
        assert server.post(chat("x", max_tokens=40, guided_regex="[ab]{3}"))[0] == 200
