"""The server with OpenAI's client, with wrong requests, disconnects and failing models."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from decoding import refuses
from places import load_script
from prometheus_client.parser import text_string_to_metric_families
from serving import LONG, NAME, SORT, Running, chat, running, wait

import paradec
from paradec.batching.slots import BatchClosed, Cancelled
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import CALL, Limits
from paradec.integrations.server.request_body import read_presets

PROMPTS = [
    SORT, "Reverse: pear fig apple kiwi", "Copy: plum lime fig", "Sort: owl ant bee cat", "Reverse: rose seal mole",
    "Sort: zebra ant wolf bee newt",
]  # fmt: skip
SHUFFLE = "Shuffle: pear fig apple kiwi"  # every order of the words is right
SLOW = {"sampler": "low_confidence"}  # one token per step


@pytest.fixture(scope="module")
def model() -> Any:
    return paradec.load(dtype="float64")


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("presets")
    paradec.Request(sampler="low_confidence", max_new_tokens=12).save(folder / "slowly.json")
    (folder / "warm.json").write_text('{"temperature": 1.5, "max_new_tokens": 12}')
    narrow = '{"temperature": 1.5, "max_new_tokens": 12, "min_p": 1.0, "top_k": 1}'
    (folder / "warm_narrow.json").write_text(narrow)
    with running(model, presets=read_presets(folder)) as instance:
        yield instance


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)


def chat_text(client: openai.OpenAI, text: str, **fields: Any) -> str:
    answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **fields)
    return answer.choices[0].message.content or ""


def chat_pieces(client: openai.OpenAI, text: str, **fields: Any) -> list[str]:
    messages: Any = [{"role": "user", "content": text}]
    chunks = client.chat.completions.create(model=NAME, messages=messages, stream=True, **fields)
    return [text for chunk in chunks if (text := chunk.choices[0].delta.content)]


def test_concurrent_answers_equal_generate(server: Running, client: openai.OpenAI, model: Any) -> None:
    expected = paradec.generate(model, PROMPTS).text
    with ThreadPoolExecutor(12) as pool:
        plain = pool.map(lambda text: chat_text(client, text), PROMPTS * 2)
        streamed = pool.map(lambda text: "".join(chat_pieces(client, text)), PROMPTS * 2)
        assert list(plain) == expected * 2 and list(streamed) == expected * 2
    assert (server.engine.batch.occupied, server.engine.batch.waiting) == (0, 0)


def test_streams_send_final_text_in_order(server: Running, client: openai.OpenAI) -> None:
    actual = chat_pieces(client, PROMPTS[1], extra_body={"paradec": {**SLOW, "block_length": 1}})
    assert "".join(actual) == "kiwi apple fig pear" and len(actual) == 4
    options: Any = {"stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=NAME, messages=chat(PROMPTS[1])["messages"], **options))
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].model == NAME
    _, _, text = server.post(chat(stream=True))
    assert text.rstrip("\r\n0").endswith("data: [DONE]")


def test_drafts_are_sent_only_on_request_as_stream_comments(server: Running, client: openai.OpenAI) -> None:
    body = {"paradec": {**SLOW, "drafts": True, "block_length": 32}}
    assert "".join(chat_pieces(client, SORT, max_tokens=32, extra_body=body)) == "apple fig pear"
    _, _, text = server.post(chat(stream=True, max_tokens=32, **body))
    lines = text.splitlines()
    drafts = [json.loads(line[2:])["draft"] for line in lines if line.startswith(": ")]
    assert drafts and any(word is not None for draft in drafts for word in draft)
    assert all(word is None or isinstance(word, str) for draft in drafts for word in draft)
    _, _, text = server.post(chat(stream=True, paradec=SLOW))
    assert not any(line.startswith(":") for line in text.splitlines())


def test_stop_sequences_are_cut_off(server: Running, client: openai.OpenAI) -> None:
    full = client.chat.completions.create(model=NAME, messages=chat()["messages"], stop=[" pear", "zebra"])
    assert (full.choices[0].message.content, full.choices[0].finish_reason) == ("apple fig", "stop")
    actual = chat_pieces(client, SORT, stop=["fig p"], extra_body={"paradec": {**SLOW, "block_length": 1}})
    assert "".join(actual) == "apple "
    short = client.chat.completions.create(model=NAME, messages=chat()["messages"], max_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("apple fig", "length")
    assert short.usage is not None and (short.usage.prompt_tokens, short.usage.completion_tokens) == (8, 2)
    ended = client.chat.completions.create(model=NAME, messages=chat()["messages"], max_tokens=64)
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("apple fig pear", "stop")
    assert ended.usage is not None and ended.usage.completion_tokens == 4  # the end token, and nothing after it
    long = client.chat.completions.create(model=NAME, messages=chat("Copy: " + "fig " * 490)["messages"])
    assert long.usage is not None and long.usage.prompt_tokens == 495 and long.usage.completion_tokens <= 17  # 512 fit


def test_seeded_answers_do_not_depend_on_earlier_requests(client: openai.OpenAI, model: Any) -> None:
    drawn = {"temperature": 1.0, "max_tokens": 12}
    actual = [chat_text(client, SHUFFLE, seed=7, **drawn) for _ in range(3)]
    assert actual == [paradec.generate(model, SHUFFLE, seed=7, temperature=1.0, max_new_tokens=12).text] * 3
    assert len({chat_text(client, SHUFFLE, **drawn) for _ in range(6)}) > 1  # without a seed the draws differ


def test_fields_of_the_body_override_its_preset(client: openai.OpenAI, model: Any) -> None:
    settings = {"max_new_tokens": 12}
    slowly = paradec.generate(model, SHUFFLE, sampler="low_confidence", temperature=2.0, seed=3, **settings).text
    assert chat_text(client, SHUFFLE, temperature=2.0, seed=3, extra_body={"preset": "slowly"}) == slowly
    cold = paradec.generate(model, SHUFFLE, temperature=0, **settings).text
    assert chat_text(client, SHUFFLE, temperature=0.0, extra_body={"preset": "warm"}) == cold
    warm = {paradec.generate(model, SHUFFLE, temperature=1.5, seed=seed, **settings).text for seed in range(3)}
    assert {chat_text(client, SHUFFLE, seed=seed, extra_body={"preset": "warm"}) for seed in range(3)} == warm != {cold}


CONTROLS: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, {"frequency_penalty": -1.0}, {"min_p": 0.9}, {}]
CONTROLS += [{"presence_penalty": 1.5, "frequency_penalty": 0.5}]


def test_answers_with_penalties_equal_generate(model: Any, client: openai.OpenAI) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    with ThreadPoolExecutor(len(CONTROLS)) as pool:
        texts = list(pool.map(lambda more: chat_text(client, SHUFFLE, **sampling, extra_body=more), CONTROLS))
    settings = {"sampler": "threshold", "max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    assert texts == [paradec.generate(model, SHUFFLE, **settings, **more).text for more in CONTROLS]
    assert len({*texts}) > 2


def test_a_body_can_turn_off_filters_of_its_preset(model: Any, client: openai.OpenAI) -> None:
    settings = {"sampler": "threshold", "max_new_tokens": 12, "temperature": 1.5}
    unfiltered = [paradec.generate(model, SHUFFLE, seed=seed, **settings).text for seed in range(3)]
    preset = {"preset": "warm_narrow"}
    body = preset | {"min_p": 0, "top_k": -1}
    assert [chat_text(client, SHUFFLE, seed=seed, extra_body=body) for seed in range(3)] == unfiltered
    filtered = {chat_text(client, SHUFFLE, seed=seed, extra_body=preset) for seed in range(3)}
    assert len(filtered) == 1 < len({*unfiltered})


def test_completions_use_no_chat_template_by_default(client: openai.OpenAI, model: Any) -> None:
    raw = client.completions.create(model=NAME, prompt=SORT, max_tokens=16)
    assert raw.choices[0].text == paradec.generate(model, SORT, chat=False, max_new_tokens=16).text
    body = {"paradec": {"chat": True}}
    assert client.completions.create(model=NAME, prompt=SORT, extra_body=body).choices[0].text == "apple fig pear"
    chunks = client.completions.create(model=NAME, prompt=SORT, stream=True, extra_body=body)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "apple fig pear"


def test_tools_and_options_reach_the_template(client: openai.OpenAI, server: Running) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert chat_text(client, SORT, tools=[tool], tool_choice="none") == "apple fig pear"
    assert chat_text(client, SORT, extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == "apple fig pear"
    assert server.post(chat(chat_template_kwargs=3))[0] == 422


def test_the_server_benchmark_reports_times_and_failed_requests(
    server: Running, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    benchmark = load_script("benchmarks/server.py")
    arguments = ["server.py", "--url", f"{server.address}/v1", "--requests", "6", "--at-once", "3"]
    arguments += ["--out", str(tmp_path / "out.json")]
    for options, lost in ((["--model", "another"], 6), ([], 0)):
        monkeypatch.setattr("sys.argv", [*arguments, *options])
        with pytest.raises(SystemExit) as ended:
            benchmark.main()
        actual = json.loads(capsys.readouterr().out)
        assert (ended.value.code, actual["requests"], actual["lost"]) == (bool(lost), 6, lost)
        assert actual.items() <= json.loads((tmp_path / "out.json").read_text()).items()
    assert 0 < actual["p50_first_token_seconds"] <= actual["p50_seconds"] <= actual["p95_seconds"] <= actual["seconds"]
    assert actual["tokens_per_second"] > actual["requests_per_second"] > 0
    monkeypatch.setattr("sys.argv", ["server.py", "--url", "http://127.0.0.1:1/v1"])
    refuses(lambda: benchmark.main(), "2", SystemExit)
    assert "--url http://127.0.0.1:1/v1: Connection error" in capsys.readouterr().err


def test_only_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [NAME]


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEPLY_NESTED_CALL = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
REFUSED: list[tuple[Any, int, str]] = [
    (b'{"messages": [', 400, "not JSON"),
    (b"[1, 2]", 422, "JSON object"),
    ({}, 422, "messages: Field required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "must be of type text"),
    (chat("Hello"), 400, "outside the model's vocabulary: 'Hello'"),
    (chat(colour="red"), 422, "unknown field: 'colour'"),
    (chat(temprature=1), 422, "did you mean 'temperature'?"),
    (chat(sampler="credit"), 422, '"paradec": {"sampler": ...}'),
    ({"messages": [{"role": "usr", "content": SORT}]}, 422, "messages[0].role='usr'"),
    (chat(tools=[TOOL]), 422, "tools are not supported"),
    (chat(n="2"), 422, "n='2': Input should be a valid integer"),
    (chat(top_logprobs=3), 422, "top_logprobs=3 needs logprobs=true"),
    (chat(logprobs=True, top_logprobs=21), 422, "top_logprobs=21: Input should be less than or equal to 20"),
    (chat(tools=[TOOL | {"x": json.loads("[" * 300 + "]" * 300)}]), 422, "Recursion error"),
    (chat(tool_choice="maybe"), 422, "'maybe': Input should be 'none', 'auto' or 'required'"),
    (chat(tool_choice="required", tools=[TOOL]), 422, "tool_choice='required' is not supported with this model"),
    (chat(tool_choice={"type": "function", "function": {"name": "g"}}, tools=[TOOL]), 422, "'g' is not one of"),
    ({"messages": [{"role": "assistant", "tool_calls": [DEEPLY_NESTED_CALL]}]}, 422, "Invalid JSON"),
    (chat(response_format={"type": "json_object"}), 422, "has no text that the tokenizer can write"),
    (chat(temperature="hot"), 400, "temperature='hot' must be a number"),
    (chat(max_tokens=5000), 400, "max_tokens=5000 exceeds --max-answer=4096"),
    (chat(max_tokens=510), 400, f"longer than {NAME} takes (512)"),
    (chat(max_tokens=8, max_completion_tokens=9), 400, "set the same field"),
    (chat(stop=[3]), 422, "stop="),
    (chat(stop=float("nan")), 422, "stop=nan"),
    (chat(stop=["x"] * 17), 400, "at most 16"),
    (chat(preset="fast"), 400, "preset='fast' must be one of slowly, warm"),
    (chat(paradec={"sampler": "nosuch"}), 400, "nosuch"),
    (chat(paradec={"rollout": True}), 422, "unknown field of paradec: 'rollout'"),
    (chat(paradec={"temperature": 1}, temperature=1), 400, "set the same field"),
    (chat(paradec={"drafts": True}), 400, "needs stream=true"),
    (chat(paradec={"sampler": {"sampler": "learn2pd", "filter": "/etc/passwd"}}), 422, "must be a number here"),
    (chat(paradec={"sampler": "learn2pd(filter='/etc/passwd')"}), 422, "must be a number here"),
    (chat(paradec={"sampler": " learn2pd(filter='passwd')+ccd_agree(filter=1)"}), 422, "filter='passwd'"),
    (chat(paradec={"sampler": "credit(threshold=(((" + "[" * 500}), 400, "cannot be read"),
    (chat(paradec={"cache": "d2(max_memory=" + "9" * 30 + ")"}), 400, "max_memory="),
    (chat(paradec={"chat": True}), 422, "chat is for /v1/completions"),
    (chat(model="another"), 404, "is not served here"),
    (chat("x" * 1_100_000), 413, "longer than 1048576 bytes"),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED, ids=[entry[2] for entry in REFUSED])
def test_wrong_bodies_are_refused(server: Running, body: Any, status: int, message: str) -> None:
    actual, _, text = server.post(body)
    error = json.loads(text)["error"]
    assert actual == status and message in error["message"] and error["type"] and "\n" not in error["message"]


@pytest.mark.parametrize("kind", ["sampler", "cache"])
def test_a_body_imports_no_file(server: Running, kind: str, tmp_path: Path) -> None:
    marker, file = tmp_path / "imported", tmp_path / "custom.py"
    file.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Mine: pass\n")
    mine = f"{file}:Mine"
    for value in (mine, f"{mine}(threshold=1)", f"threshold+{mine}", {kind: mine}, f"union(rules=[{mine!r}])"):
        status, _, text = server.post(chat(paradec={kind: value}))
        assert status in (400, 422) and json.loads(text)["error"]["message"]
    assert not marker.exists()


def test_wrong_bodies_of_completions_are_refused(server: Running) -> None:
    for body, message in [({"prompt": [["a"]]}, "prompt"), ({"prompt": SORT, "suffix": "x"}, "suffix")]:
        status, _, text = server.post(body, "/v1/completions")
        assert status == 422 and message in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/responses", "/v1/audio/transcriptions", "/docs"])
def test_unknown_paths_are_404(server: Running, path: str) -> None:
    status, _, text = server.post({}, path)
    assert status == 404 and json.loads(text)["error"]["message"] == "Not Found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(server: Running, stream: bool) -> None:
    assert not server.engine.batch._pending.copies
    wire = server.send(json.dumps(chat(stream=stream, **LONG)).encode())
    wait(lambda: server.engine.batch.occupied == 1)
    steps = server.engine.num_steps
    wire.close()
    wait(lambda: server.engine.batch.occupied == 0)
    assert server.engine.num_steps - steps < 300  # the full answer takes 400
    assert not server.engine.batch._pending.copies  # the prompt is deleted


def test_an_error_within_a_stream_is_json(server: Running, client: openai.OpenAI, monkeypatch: Any) -> None:
    def fail(self: Any, ids: Any) -> None:
        raise ValueError('a "quoted"\nmessage')

    monkeypatch.setattr("paradec.integrations.server.answers.Answer.put", fail)
    refuses(lambda: chat_pieces(client, SORT), 'a "quoted"\nmessage', openai.APIError)
    wait(lambda: server.engine.batch.occupied == 0)


def test_metrics_count_requests_tokens_and_seconds(model: Any) -> None:
    with running(model) as server:
        server.post(chat())
        server.post(b"{")
        import urllib.request

        with urllib.request.urlopen(f"{server.address}/metrics") as answer:
            text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    actual = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}
    assert actual["paradec_requests_total", "/v1/chat/completions", "200"] == 1
    assert actual["paradec_requests_total", "/v1/chat/completions", "400"] == 1
    assert (actual["paradec_tokens_total", "prompts"], actual["paradec_tokens_total", "answers"]) == (8, 4)
    assert actual["paradec_answers_total", "whole"] == 1 and actual["paradec_rows_occupied",] == 0
    for name in ("waiting", "first_token", "token"):
        assert actual[f"paradec_{name}_seconds_count",] == 1, name
    assert 0 < actual["paradec_waiting_seconds_sum",] < actual["paradec_first_token_seconds_sum",]
    assert actual["paradec_alive",] == 1 and actual["paradec_steps",] >= 1 and actual["paradec_row_calls_total",] >= 1


def test_wrong_api_keys_and_too_many_requests_are_refused(model: Any) -> None:
    with running(model, batch_size=1, api_key="secret", max_requests=1) as server:
        for wrong in ({}, {"Authorization": "Bearer another"}, {"Authorization": "secret"}):
            status, headers, text = server.post(chat(), **wrong)
            assert status == 401 and headers["www-authenticate"] == "Bearer" and "API key" in text
        key = {"Authorization": "Bearer secret"}
        assert server.post(chat(), **key)[0] == 200
        wire = server.send(json.dumps(chat(**LONG)).encode(), **key)
        wait(lambda: server.engine.batch.occupied == 1)
        server.engine.seconds_per_answer = 7.5
        status, headers, text = server.post(chat(), **key)
        assert status == 429 and headers["retry-after"] == "8" and "rate_limit_error" in text
        wire.close()
        wait(lambda: server.post(chat(), **key)[0] == 200)


def test_the_total_tokens_of_open_requests_are_limited(model: Any) -> None:
    with running(model, batch_size=2, max_work=450) as server:
        status, _, text = server.post(chat(max_tokens=450))
        assert status == 400 and "458 tokens of prompts and answers exceed this server's limit of 450" in text
        status, _, text = server.post(chat(max_tokens=92, n=5))
        assert status == 400 and "500 tokens of prompts and answers exceed" in text and "--max-work" in text
        wire = server.send(json.dumps(chat(**LONG)).encode())
        wait(lambda: server.engine.batch.occupied == 1)
        status, headers, text = server.post(chat(max_tokens=40, stream=True))
        assert status == 429 and int(headers["retry-after"]) >= 1 and "408 tokens are in progress" in text
        assert server.post(chat(max_tokens=20, n=2))[0] == 429  # the second answer does not fit
        assert server.post(chat(max_tokens=20))[0] == 200
        wire.close()
        wait(lambda: server.post(chat(max_tokens=440))[0] == 200)


def test_a_stopped_engine_answers_503(model: Any) -> None:
    import urllib.error
    import urllib.request

    with running(model) as server:
        wire = server.send(json.dumps(chat(**LONG)).encode())
        wait(lambda: server.engine.batch.occupied == 1)
        assert urllib.request.urlopen(f"{server.address}/health").status == 200
        server.engine.close()
        assert b"503" in wire.recv(64)
        wire.close()
        refuses(lambda: urllib.request.urlopen(f"{server.address}/health"), "503", urllib.error.HTTPError)
        assert server.post(chat())[0] == 503
        refuses(lambda: server.engine.submit(SORT, on_done=print), "the batch was closed", BatchClosed)


class FailingModel:
    """Raises an error for rows that contain `token`, and for all rows once `is_lost` is set."""

    def __init__(self, model: Any, token: int):
        self.model, self.token, self.is_lost = model, token, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, query: Any, *store: Any) -> Any:
        if self.is_lost:
            raise RuntimeError("the device is lost")
        if (query.tokens == self.token).any():
            raise IndexError("an error of one row")
        return self.model(query, *store)


@pytest.mark.thinned
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_row_fails_only_that_row(model: Any, stream: bool) -> None:
    failing = FailingModel(model, model.tokenizer("kiwi", add_special_tokens=False)["input_ids"][0])
    with running(failing, batch_size=4) as server, ThreadPoolExecutor(4) as pool:
        texts = [SORT, "Sort: kiwi fig apple", "Reverse: pear fig", "Copy: fig pear"] * 2
        answers = list(pool.map(lambda text: server.post(chat(text, stream=stream)), texts))
        for text, (status, _, answer) in zip(texts, answers):
            assert ("an error of one row" in answer) == ("kiwi" in text)
            assert status == (500 if "kiwi" in text and not stream else 200)
        assert server.engine.alive and server.engine.batch.occupied == 0


@pytest.mark.thinned
@pytest.mark.parametrize("stream", [False, True])
def test_open_requests_get_the_error_that_stopped_the_engine(model: Any, stream: bool) -> None:
    failing = FailingModel(model, -1)
    with running(failing, batch_size=4) as server, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(server.post, chat(**LONG, stream=stream)) for _ in range(6)]  # four run, two wait
        wait(lambda: server.engine.batch.occupied == 4 and server.engine.batch.waiting == 2)
        failing.is_lost = True
        for answer in answers:
            status, _, text = answer.result()
            assert "the device is lost" in text and (stream or status in (500, 503))
        assert "the device is lost" in server.post(chat())[2] and not server.engine.alive


def test_single_failed_steps_do_not_stop_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model)
    step, calls = engine.batch.step, []

    def fail_every_other_step() -> Any:
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("once")
        return step()

    monkeypatch.setattr(engine.batch, "step", fail_every_other_step)
    ended: list[Any] = []
    engine.submit(SORT, on_done=ended.append, sampler="low_confidence", max_new_tokens=8)
    wait(lambda: len(ended) == 1)
    assert len(calls) > 6 and ended[0].output.error is None and engine.alive
    engine.close()


def test_requests_of_clients_that_do_not_read_are_cancelled(model: Any) -> None:
    """The middleware is called directly, because with a socket megabytes of buffers would have to be filled first."""
    engine = Engine(model)
    ended: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        scope[CALL].submit(SORT, on_done=ended.append, sampler="low_confidence", max_new_tokens=400)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def drive() -> None:
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        limits = Limits(app, engine=engine, timeout=0.05)
        await limits({"type": "http", "method": "POST", "path": "/x", "headers": []}, receive, send)
        assert not limits.calls

    asyncio.run(asyncio.wait_for(drive(), 30))
    wait(lambda: len(ended) == 1)
    assert isinstance(ended[0].output.error, Cancelled) and engine.batch.occupied == 0
    engine.close()


def test_presets_of_a_folder_are_checked(tmp_path: Path) -> None:
    refuses(lambda: read_presets(tmp_path / "none"), "must be a folder")
    refuses(lambda: read_presets(tmp_path), "must be a folder with .json files")
    (tmp_path / "bad.json").write_text('{"colour": 1}')
    refuses(lambda: read_presets(tmp_path), "bad.json")
