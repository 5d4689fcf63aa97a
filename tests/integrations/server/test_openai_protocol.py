"""The protocol of OpenAI's endpoints, on causal models that answer with a fixed text."""

import json
import urllib.request
from collections.abc import Sequence
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel
from serving import BEGIN, CALL, NAME, SCRIPT_TEMPLATE, chat, running, scripted, token_ids

import paradec

TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat_twice(client: openai.OpenAI, **more: Any) -> list[tuple[str, str, list[str], str]]:
    """Return (content, reasoning, arguments of calls, finish reason) of a plain answer and of a streamed answer."""
    body = {"model": NAME, **chat("hi"), "max_tokens": 200, **more}
    choice = client.chat.completions.create(**body).choices[0]
    calls = [call.function.arguments for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning_content", "")
    plain = (choice.message.content or "", reasoning, calls, choice.finish_reason)
    content, reasoning, calls, reason, indices = "", "", [], "", []
    for chunk in client.chat.completions.create(**body, stream=True):
        assert chunk.usage is None
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        content, reasoning = content + (delta.content or ""), reasoning + getattr(delta, "reasoning_content", "")
        calls += [call.function.arguments for call in delta.tool_calls or []]
        indices += [call.index for call in delta.tool_calls or []]
    assert indices == [*range(len(calls))]
    return [plain, (content, reasoning, calls, reason)]


@pytest.mark.thinned
@pytest.mark.parametrize("text", ["  indented\n    code\n", "\n\nhello", "text \n", "naïve 😀 \t", f" {CALL} \n"])
def test_text_is_returned_unchanged(text: str) -> None:
    with scripted(text) as (_, client, _):
        assert chat_twice(client) == [(text, "", [], "stop")] * 2
        assert chat_twice(client, tools=[TOOL], tool_choice="none") == [(text, "", [], "stop")] * 2
        assert client.completions.create(model=NAME, prompt=BEGIN, max_tokens=200).choices[0].text == text


@pytest.mark.thinned
@pytest.mark.parametrize("stop", [" fox", "fo", "ox ju", ["zebra", "q"]])
def test_stop_sequences_cut_plain_and_streamed_answers_alike(stop: Any) -> None:
    text = "the quick brown fox jumps"
    expected = text[: min(text.find(word) for word in ([stop] if isinstance(stop, str) else stop) if word in text)]
    with scripted(text) as (_, client, _):
        assert chat_twice(client, stop=stop) == [(expected, "", [], "stop")] * 2
        assert client.completions.create(model=NAME, prompt=BEGIN, stop=stop, max_tokens=99).choices[0].text == expected


def test_complete_calls_survive_truncated_answers() -> None:
    with scripted(f"Well.\n{CALL}\n{CALL}\n") as (server, client, ids):
        arguments = ['{"x": "é"}']
        assert chat_twice(client, tools=[TOOL]) == [("Well.", "", arguments * 2, "tool_calls")] * 2
        for size in (12, len(ids) - 12, len(ids)):
            cut = server.engine.model.tokenizer.decode(ids[:size])
            plain, streamed = chat_twice(client, tools=[TOOL], max_tokens=size)
            num_calls, tail = cut.count(CALL), cut.rpartition("</tool_call>\n")[2]
            content = "Well.\n" + tail.removeprefix("Well.\n") if num_calls == 0 else "Well." + tail
            assert plain == streamed == (content, "", arguments * num_calls, "length")
        body = {"model": NAME, **chat("hi"), "tools": [TOOL], "n": 3}
        answer = client.chat.completions.create(**body, max_tokens=200)
        ids_of_calls = [call.id for choice in answer.choices for call in choice.message.tool_calls]
        assert len({*ids_of_calls}) == 6 and answer.choices[0].message.content == "Well."
        for empty in ("", None, "{}", {}):
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": empty}}
            history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
            result = {"role": "tool", "tool_call_id": "a", "content": "x"}
            assert server.post(chat(messages=[*history, result]))[0] == 200


GEMMA_MARKERS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
FAMILIES: list[Any] = [
    (SCRIPT_TEMPLATE, ("<tool_call>", "</tool_call>"), CALL, {"x": "é"}),
    (SCRIPT_TEMPLATE, (), CALL, {"x": "é"}),
    (
        SCRIPT_TEMPLATE.replace("<tool_call>", "<tool_call><function=f>"), (),
        "<tool_call>\n<function=f>\n<parameter=x>\né 1\n</parameter>\n</function>\n</tool_call>", {"x": "é 1"},
    ),
    (
        SCRIPT_TEMPLATE.replace("<tool_call>", "<|tool_call>"), GEMMA_MARKERS,
        '<|tool_call>call:f{x:<|"|>é, {"a": b}:\n<|"|>,list:[1,{a:true}]}<tool_call|>',
        {"x": 'é, {"a": b}:\n', "list": [1, {"a": True}]},
    ),
]  # fmt: skip
"""Chat template, special tokens, a call in the family's format, and its arguments."""


@pytest.mark.thinned
@pytest.mark.parametrize(("template", "markers", "call", "arguments"), FAMILIES)
def test_calls_of_each_family_are_read(template: str, markers: Sequence[str], call: str, arguments: Any) -> None:
    text = f"Well <|turn|>é.\n{call}{call}"
    with scripted(text, markers, template) as (server, client, ids):
        for size, count, reason in ((200, 2, "tool_calls"), (len(ids) - 2, 1, "length")):
            plain, streamed = chat_twice(client, tools=[TOOL], max_tokens=size)
            assert plain == streamed and plain[3] == reason and len(plain[2]) == count
            assert [json.loads(entry) for entry in plain[2]] == [arguments] * count
            assert plain[0].startswith("Well é.") and ("call" in plain[0]) == (count == 1)
        text_of_call = server.engine.model.tokenizer.decode(ids, skip_special_tokens=True)
        assert chat_twice(client) == [(text_of_call, "", [], "stop")] * 2  # without tools
        more: Any = {"tools": [TOOL], "logprobs": True, "max_tokens": 200, "messages": chat("hi")["messages"]}
        choice = client.chat.completions.create(model=NAME, **more).choices[0]
        chunks = client.chat.completions.create(model=NAME, **more, stream=True)
        scores = [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
        assert bytes(sum((e.bytes for e in scores), [])).decode() == text.replace("<|turn|>", "")
        assert scores == choice.logprobs.content


def test_reasoning_can_end_at_a_special_token() -> None:
    opened: Any = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
    with scripted("I <|turn|>think </think> Yes.", ("<think>", "</think>")) as (server, client, _):
        server.engine.model.unwrap().begin = token_ids(server.engine.model.tokenizer, f"{BEGIN}<think>\n")
        assert chat_twice(client, **opened) == [(" Yes.", "I think ", [], "stop")] * 2


def test_reasoning_is_separated_only_if_the_template_opens_it() -> None:
    text = "I think <b>\n</think>\n\nYes."
    opened: Any = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
    with scripted(text) as (server, client, ids):
        assert chat_twice(client) == [(text, "", [], "stop")] * 2
        server.engine.model.unwrap().begin = token_ids(server.engine.model.tokenizer, f"{BEGIN}<think>\n")
        assert chat_twice(client, **opened) == [("\n\nYes.", "I think <b>\n", [], "stop")] * 2
        assert chat_twice(client, **opened, max_tokens=3)[0][:2] == ("", server.engine.model.tokenizer.decode(ids[:3]))
        opened["extra_body"] |= {"guided_choice": ["yes"]}
        assert chat_twice(client, **opened) == [("yes", "I think <b>\n", [], "stop")] * 2


@pytest.mark.thinned
@pytest.mark.parametrize("markers", [(), ("<think>", "</think>")])
def test_reasoning_precedes_constrained_answers(markers: tuple[str, ...]) -> None:
    """The constraint applies after the reasoning, which ends at a marker or after a budget of tokens."""
    text, opened = "I think.</think>no way", {"chat_template_kwargs": {"thinks": True}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["no", "yes"]}}}
    with scripted(text, markers) as (server, client, _):
        assert chat_twice(client, extra_body={"response_format": form})[0][:2] in (('"no"', ""), ('"yes"', ""))
        constraint = {"choice": ["no", "yes"], "after": "</think>"}
        for more in ({}, {"thinking_budget": 200}):
            request: Any = {"extra_body": {"paradec": {"constraint": constraint | more}}}
            assert chat_twice(client, **request) == [("no", "I think.", [], "stop")] * 2
        plain = client.completions.create(model=NAME, prompt=BEGIN, max_tokens=200, **request).choices[0].text
        assert plain == ("I think.</think>no" if not markers else "I think.no")
        request["extra_body"]["paradec"]["constraint"] |= {"thinking_budget": 2}
        cut = server.engine.model.tokenizer.decode(token_ids(server.engine.model.tokenizer, text)[:2])
        content, reasoning, _, _ = chat_twice(client, **request)[0]
        assert reasoning.startswith(cut) and content in ("no", "yes") and "think>" not in reasoning
        server.engine.model.unwrap().begin = token_ids(server.engine.model.tokenizer, f"{BEGIN}<think>\n")
        for extra in ({"guided_choice": ["no", "yes"]}, {"structured_outputs": {"regex": "no|yes"}}):
            assert chat_twice(client, extra_body=opened | extra) == [("no", "I think.", [], "stop")] * 2
        request = {"extra_body": opened, "tools": [TOOL], "tool_choice": "required"}
        (content, reasoning, calls, reason), streamed = chat_twice(client, **request)
        assert (content, reasoning, len(calls), reason) == ("", "I think.", 1, "tool_calls") == (
            *streamed[:2], len(streamed[2]), streamed[3]
        )  # fmt: skip
        status, _, answer = server.post(chat(paradec={"constraint": {"choice": ["a"], "after": ""}}))
        assert status == 422 and json.loads(answer)["error"]["param"] == "paradec"


def test_a_complete_answer_of_max_tokens_has_the_finish_reason_stop() -> None:
    class Reply(BaseModel):
        answer: Literal["yes", "no"]

    with scripted("x") as (server, client, _):
        ids = token_ids(server.engine.model.tokenizer, "yes")
        for size in (len(ids), len(ids) + 1):
            answers = chat_twice(client, max_tokens=size, extra_body={"guided_choice": ["yes"]})
            assert answers == [("yes", "", [], "stop")] * 2
        messages: Any = [{"role": "user", "content": "hi"}]
        parsed = client.chat.completions.parse(model=NAME, messages=messages, response_format=Reply, max_tokens=60)
        assert parsed.choices[0].message.parsed.answer in ("yes", "no")
        pytest.importorskip("llguidance", reason='needs the extra "grammar"')
        grammar: Any = {"structured_outputs": {"grammar": 'start: "a" "b"*'}}
        assert chat_twice(client, max_tokens=1, extra_body=grammar)[0][3] == "stop"
        grammar["structured_outputs"]["grammar"] = 'start: "a" "b" "c"'
        assert chat_twice(client, max_tokens=1, extra_body=grammar)[0][3] == "length"


def test_tokens_with_a_part_of_a_character_are_named_by_their_bytes() -> None:
    text = "ok 😀!"
    with scripted(text) as (server, client, ids):
        body: Any = {"model": NAME, **chat("hi"), "logprobs": True, "top_logprobs": 3}
        entries = client.chat.completions.create(**body).choices[0].logprobs.content
        assert bytes(byte for entry in entries for byte in entry.bytes) == text.encode() and len(entries) == len(ids)
        chunks = client.chat.completions.create(**body, stream=True)
        streamed = [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
        assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]
        part = next(entry for entry in entries if entry.bytes[0] >= 128)
        assert part.token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in part.bytes)
        actual = client.completions.create(model=NAME, prompt=BEGIN, logprobs=5, max_tokens=20).choices[0].logprobs
        assert all(len(top) == 5 and token in top for token, top in zip(actual.tokens, actual.top_logprobs))
        smile = text.index("😀")
        assert sorted({*actual.text_offset}) == [n for n in range(len(text)) if n <= smile or n == smile + 1]


def test_usage_is_sent_in_a_separate_last_chunk_on_request() -> None:
    with scripted("hello") as (_, client, ids):
        body: Any = {"model": NAME, **chat("hi"), "stream": True}
        for options in ({}, {"include_usage": False}, {"include_obfuscation": True}):
            assert not any(c.usage for c in client.chat.completions.create(**body, stream_options=options))
        *chunks, last = client.chat.completions.create(**body, n=2, stream_options={"include_usage": True})
        assert last.choices == [] and last.usage.completion_tokens == 2 * (len(ids) + 1)
        assert not any(chunk.usage for chunk in chunks) and len({chunk.id for chunk in [*chunks, last]}) == 1


def test_lists_of_prompts_and_echo() -> None:
    with scripted("hello") as (server, client, ids):
        model = server.engine.model
        first, second = BEGIN, f"x{BEGIN}"
        rows = [token_ids(model.tokenizer, text) for text in (first, second)]
        for prompts in ([first, second], rows):
            answer = client.completions.create(model=NAME, prompt=prompts, n=2, max_tokens=9)
            assert [(choice.index, choice.text) for choice in answer.choices] == [(n, "hello") for n in range(4)]
            assert answer.usage.prompt_tokens == len(rows[0]) + len(rows[1])
        assert client.completions.create(model=NAME, prompt=rows[0], max_tokens=9).choices[0].text == "hello"
        body: Any = {"model": NAME, "prompt": ["x y", rows[1]], "echo": True, "max_tokens": 0, "logprobs": 2}
        for choice, row in zip(client.completions.create(**body).choices, (token_ids(model.tokenizer, "x y"), rows[1])):
            scores = model.unwrap()(torch.tensor([row]))[0].double().log_softmax(-1)
            expected = [float(scores[index, token]) for index, token in enumerate(row[1:])]
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-6)
            assert choice.finish_reason == "length"
            assert choice.text == model.tokenizer.decode(row, skip_special_tokens=True)
        body |= {"prompt": first, "max_tokens": 9, "stream": True}
        pieces = [choice for chunk in client.completions.create(**body) for choice in chunk.choices]
        text = model.tokenizer.decode(rows[0], skip_special_tokens=True)
        assert "".join(piece.text for piece in pieces) == f"{text}hello"
        assert [n for piece in pieces if piece.logprobs for n in piece.logprobs.text_offset][-1] >= len(text)


WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"repetition_penalty": 1, "min_p": 0.0, "ignore_eos": False, "min_tokens": 0, "presence_penalty": 0},
    {"bad_words": [], "frequency_penalty": 0.0, "logit_bias": {}, "top_k": -1, "user": "x"},
    {"skip_special_tokens": True},
    {"stream": True, "stream_options": {"include_obfuscation": False}, "prompt_cache_retention": "24h"},
    {"max_tokens": 8, "max_completion_tokens": 8, "top_k": 20, "temperature": 0.7},
    {"stop_token_ids": [], "prompt_logprobs": None, "use_beam_search": False, "length_penalty": 1.0, "priority": 0},
    {"include_stop_str_in_output": False, "early_stopping": False, "truncate_prompt_tokens": None, "audio": None},
]


def test_values_without_effect_are_accepted_and_unsupported_ones_refused() -> None:
    with scripted("hello") as (server, _, _):
        for more in WITHOUT_EFFECT:
            assert server.post(chat(**more))[0] == 200, more
        unsupported = {"best_of": 2, "suffix": "x", "priority": 1, "stop_token_ids": [3], "prompt_logprobs": 1}
        for name, value in (unsupported | {"reasoning_effort": "none"}).items():
            status, _, text = server.post(chat(**{name: value}))
            assert status == 422 and json.loads(text)["error"]["param"] == name
        assert "(none: this server has no --presets)" in server.post(chat(preset="fast"))[2]
        for name, value in {"stop": "", "seed": -1, "temperature": "0.5", "top_p": 0, "max_tokens": 0}.items():
            status, _, text = server.post(chat(**{name: value}))
            error = json.loads(text)["error"]
            assert status == 400 and error["param"] == name and error["message"].startswith(f"{name}={value!r}"), text


def test_token_biases_bans_and_minimum_lengths_change_the_answer() -> None:
    with scripted("hello") as (server, client, _):
        (token,) = token_ids(server.engine.model.tokenizer, "#")
        assert chat_twice(client, logit_bias={str(token): 100}, max_tokens=3) == [("###", "", [], "length")] * 2
        assert chat_twice(client, extra_body={"bad_words": ["h", "l"]}) == [("eo", "", [], "stop")] * 2
        assert chat_twice(client, extra_body={"ignore_eos": True}, max_tokens=6)[0] == ("hello", "", [], "length")
        end_bias = {"logit_bias": {str(server.engine.model.tokenizer.eos_token_id): 100}}
        assert chat_twice(client, **end_bias) == [("", "", [], "stop")] * 2
        for body in ({"min_tokens": 4}, {"paradec": {"min_new_tokens": 4}}):
            assert chat_twice(client, **end_bias, extra_body=body) == [("hell", "", [], "stop")] * 2


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("min_tokens", -1, "min_tokens=-1 must be an integer from 0"),
        ("min_tokens", "3", "min_tokens='3' must be an integer"),
        ("min_p", 1.5, "min_p=1.5 must be a number in"),
        ("ignore_eos", 1, "ignore_eos=1 must be True or False"),
        ("repetition_penalty", 0, "repetition_penalty=0 must be"),
        ("presence_penalty", 2.5, "presence_penalty=2.5 must be"),
        ("frequency_penalty", [1], "frequency_penalty=\\[1\\] must be"),
        ("logit_bias", {"5": 101}, "logit_bias=101 must be"),
        ("logit_bias", {"x": 1}, "must have token ids as keys"),
        ("logit_bias", {"9" * 30: 1}, "logit_bias=9+ must be an integer from 0"),
        ("logit_bias", {"9" * 5000: 1}, "must have token ids as keys"),
        ("logit_bias", {"999999": 1}, "logit_bias=999999 must be an integer from 0"),
        ("logit_bias", {"1": {"a": [1]}}, "must be a number"),
        ("logit_bias", {str(token): 1 for token in range(2000)}, "logit_bias must have at most 1024"),
        ("bad_words", "h", "bad_words='h' must be a sequence"),
        ("bad_words", [""], "has an empty word"),
        ("bad_words", [[999999]], "bad_words=999999 must be"),
        ("bad_words", ["a"] * 2000, "bad_words must have at most 256"),
        ("bad_words", ["a" * 300], "of at most 256 characters"),
    ],
)
def test_wrong_token_biases_bans_and_minimum_lengths_are_refused(field: str, value: Any, reason: str) -> None:
    with scripted("hello") as (server, client, _):
        for body in ({field: value}, {"paradec": {field.replace("min_tokens", "min_new_tokens"): value}}):
            with pytest.raises(openai.BadRequestError, match=reason) as raised:
                chat_twice(client, extra_body=body)
            assert raised.value.param == field
        assert server.engine.alive and server.post(chat())[0] == 200


def test_min_tokens_and_constraints_exclude_each_other() -> None:
    with scripted("hello") as (_, client, _):
        for field, value in {"min_tokens": 3, "ignore_eos": True}.items():
            with pytest.raises(openai.BadRequestError, match=f"{field}={value}: constraint") as raised:
                chat_twice(client, extra_body={field: value, "guided_choice": ["yes"]})
            assert raised.value.param == field
        with pytest.raises(openai.BadRequestError, match="min_tokens and paradec set the same field"):
            chat_twice(client, extra_body={"min_tokens": 3, "paradec": {"min_new_tokens": 3}})


@pytest.mark.thinned
@pytest.mark.parametrize(
    "schema", [{"properties": [1]}, {"allOf": {"a": 1}}, {"type": None}, {"type": "object", "required": True}, 3]
)
def test_malformed_schemas_are_refused(schema: Any) -> None:
    with scripted("x") as (server, _, _):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, _, text = server.post(chat(response_format=form, max_tokens=20))
        assert status == 422 and json.loads(text)["error"]["param"] == "response_format", text


def test_model_lookup_and_cross_origin_requests() -> None:
    with scripted("x") as (server, client, _):
        assert client.models.retrieve(NAME).id == NAME
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.models.retrieve("other/model")
    with running(paradec.load(), cors=True, api_key="secret") as server:
        headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        request = urllib.request.Request(f"{server.address}/v1/chat/completions", headers=headers, method="OPTIONS")
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["access-control-allow-origin"] == "*"
        status, actual, _ = server.post(chat(), Origin="http://page")
        assert status == 401 and actual["access-control-allow-origin"] == "*"
