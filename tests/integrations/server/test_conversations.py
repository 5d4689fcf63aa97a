"""The server with OpenAI's client: several choices, log-probabilities, cached prompt prefixes, and tool calls."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from serving import NAME, SORT, Running, chat, running
from tokenized_models import byte_level_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.integrations.server.chat import HERMES, AnswerParser, response_template_of

SHUFFLE = "Shuffle: pear fig apple kiwi"  # every order of the words is right
SAMPLING: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
AGENT = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<tool_call><|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ '<tool_response>\n' + m.content + '\n</tool_response>' if m.role == 'tool' else m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""Tools, calls and results in the format of Hermes' and Qwen's chat templates."""
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": "}"}]}}\n</tool_call>'


@pytest.fixture(scope="module")
def model() -> Any:
    return paradec.load(dtype="float64")


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[openai.OpenAI]:
    with running(model) as server:
        yield client_of(server)


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)


def generate_with_logprobs(model: Any, seed: int) -> Any:
    return paradec.generate(model, SHUFFLE, temperature=1.5, seed=seed, max_new_tokens=12, logprobs=2)


@pytest.mark.thinned
@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_independent_and_have_log_probabilities(client: openai.OpenAI, model: Any, stream: bool) -> None:
    more = {**SAMPLING, "n": 3, "logprobs": True, "top_logprobs": 2, "stream": stream}
    more |= {"stream_options": {"include_usage": True}} if stream else {}
    completion = client.chat.completions.create(model=NAME, messages=chat(SHUFFLE)["messages"], **more)
    texts, scores = [""] * 3, [[], [], []]
    if stream:
        chunks = list(completion)
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += choice.logprobs.content if choice.logprobs else []
        (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
        assert sorted(choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason) == [0, 1, 2]
    else:
        texts = [choice.message.content for choice in completion.choices]
        scores, usage = [choice.logprobs.content for choice in completion.choices], completion.usage
    outputs = [generate_with_logprobs(model, seed) for seed in (7, 8, 9)]
    assert texts == [output.text for output in outputs] and len(set(texts)) > 1
    assert usage.completion_tokens == sum(output.tokens[0] for output in outputs)
    for text, entries, output in zip(texts, scores, outputs, strict=True):
        assert "".join(entry.token for entry in entries) == text == bytes(sum((e.bytes for e in entries), [])).decode()
        expected = output.logprobs.chosen[0][~output.logprobs.chosen[0].isnan()].tolist()
        assert all(entry.token for entry in entries)  # the end token, which has no text, is not listed
        assert [entry.logprob for entry in entries] == pytest.approx(expected[: len(entries)]) and entries
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert all(a.logprob >= b.logprob for a, b in (entry.top_logprobs for entry in entries))


def test_log_probabilities_of_completions(client: openai.OpenAI, model: Any) -> None:
    request: dict[str, Any] = {"model": NAME, "prompt": SORT, "extra_body": {"paradec": {"chat": True}}}
    (choice,) = client.completions.create(logprobs=1, stop=["pear"], **request).choices
    assert choice.text == "apple fig " and choice.logprobs.tokens == ["apple", " fig", " pear"]
    assert choice.logprobs.text_offset == [0, 5, 9] and list(choice.logprobs.top_logprobs[1]) == [" fig"]
    choices = [chunk.choices[0] for chunk in client.completions.create(logprobs=0, stream=True, **request)]
    scores = [choice.logprobs for choice in choices if choice.logprobs]
    assert [token for entry in scores for token in entry.tokens] == ["apple", " fig", " pear"]
    assert all(top == {} for entry in scores for top in entry.top_logprobs)
    (choice,) = client.completions.create(**request).choices
    assert choice.logprobs is None and choice.text == "apple fig pear"


def test_cached_tokens_are_counted_and_salts_separate_caches(model: Any) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(model.tokenizer), "hidden_size": 16, "intermediate_size": 16}
    module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).double()
    causal = paradec.wrap(module, tokenizer=model.tokenizer, topology="causal", prediction="shifted", eos_token_id=0)
    with running(causal, request={"sampler": "sjd", "prefix_memory": 10**6}) as server:
        client, cached_tokens = client_of(server), []
        messages = chat("Copy: " + "fig " * 40)["messages"]
        for salt in (None, None, "a", "a", "b"):
            extra = {} if salt is None else {"cache_salt": salt}
            answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4, extra_body=extra)
            cached_tokens.append(answer.usage.prompt_tokens_details.cached_tokens)
        more: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4, **more)
        cached_tokens.append(last.usage.prompt_tokens_details.cached_tokens)
        assert cached_tokens == [0, 32, 0, 32, 0, 32]
        text = client.completions.create(model=NAME, prompt="fig " * 40, max_tokens=4)
        assert text.usage.prompt_tokens_details.cached_tokens == 0
        with urllib.request.urlopen(f"{server.address}/metrics") as page:
            lines = page.read().decode().splitlines()
        actual = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert (float(actual["paradec_prefix_rows"]), float(actual["paradec_prefix_tokens"])) == (3, 96)
        assert float(actual["paradec_prefix_bytes"]) > 0
        for salt in ("", 3, "x" * 257):
            status, _, response = server.post(chat(cache_salt=salt))
            assert status == 422 and json.loads(response)["error"]["param"] == "cache_salt"


def test_an_agent_calls_a_tool_and_sends_its_result_back() -> None:
    tokenizer = byte_level_tokenizer("<|im_end|>")
    tokenizer.chat_template = AGENT
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32}
    module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).double()
    facts = {"topology": "causal", "prediction": "shifted", "eos_token_id": tokenizer.eos_token_id}
    causal = paradec.wrap(module, tokenizer=tokenizer, **facts)
    schema = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    with running(causal, request={"sampler": "sjd", "prefix_memory": 10**6}) as server:
        client, messages = client_of(server), chat("Where is it warm?")["messages"]
        request: dict[str, Any] = {"model": NAME, "tools": [tool], "max_tokens": 90}
        answer = client.chat.completions.create(messages=messages, tool_choice="required", **request)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        town = json.loads(call.function.arguments)["town"]
        assert choice.finish_reason == "tool_calls" and call.function.name == "weather" and town in ("Rome", "Oslo")
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
        answer = client.chat.completions.create(messages=messages, temperature=0.7, seed=3, **request)
    prompt = (
        f"<|im_start|>system\n{json.dumps([tool])}<tool_call><|im_end|>\n"
        "<|im_start|>user\nWhere is it warm?<|im_end|>\n"
        f'<|im_start|>assistant\n<tool_call>\n{{"name": "weather", "arguments": {{"town": "{town}"}}}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    expected = paradec.generate(causal, [ids], sampler="sjd", temperature=0.7, seed=3, max_new_tokens=90)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == expected.text[0]
    assert answer.usage.prompt_tokens_details.cached_tokens >= len(ids) // 2  # the prompt of the first turn is cached


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("invalid_call", ["", "{bad}", '{"name": "f"}', "3", "[" * 5000])
def test_calls_are_parsed_from_pieces(size: int, invalid_call: str) -> None:
    """Valid calls in pieces of `size` characters are parsed; an invalid call before them remains text."""

    class Tokenizer:
        chat_template = "{% if tools %}<tool_call>{% endif %}<|im_start|>"

    assert response_template_of(Tokenizer()) is HERMES
    text = f" Hi <tool_call>{invalid_call}</tool_call> more \n" if invalid_call else " Well."
    full = f"{text}\n{CALL}\n{CALL}\n"
    parser = AnswerParser(None, HERMES, None)
    actual = [parser.feed(full[begin : begin + size]) for begin in range(0, len(full), size)]
    actual.append(parser.feed("", is_last=True))
    assert "".join(parts.content for parts in actual) == text.rstrip()
    calls = [call for parts in actual for call in parts.calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": [1, {"y": "}"}]})] * 2
