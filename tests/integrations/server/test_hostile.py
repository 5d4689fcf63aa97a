"""No request may stop the server, allocate much memory or read files."""

import functools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import load_script
from serving import NAME, SORT, Running, chat, running
from small_models import END, tiny

import paradec
from paradec.batching.batch import Batch
from paradec.integrations.server.limits import ApiError
from paradec.integrations.server.request_body import FIELDS, OWN, ChatBody, read_changes

hostile = load_script("benchmarks/hostile.py")
MAX_BYTES = 100 * 2**20
"""Limit of the memory that a request of a few tokens may allocate."""


def allocated_bytes() -> int:
    """Return the peak memory of this process since the last call, beyond its current memory."""
    result = re.findall(r"Vm(?:HWM|RSS):\s+(\d+)", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return (int(result[0]) - int(result[1])) * 1024


def decode(model: Any, request: Any) -> None:
    """Decode three prompt tokens with `request` as a body's field "paradec", and raise the error of the row, if any."""
    body = json.loads(json.dumps({"messages": [{"role": "user", "content": "x"}], OWN: request}))
    try:
        changes = read_changes(ChatBody.model_validate(body), {})
    except ApiError as error:
        raise ValueError(str(error)) from error
    max_new_tokens = changes.setdefault("max_new_tokens", 12)
    if max_new_tokens is None or isinstance(max_new_tokens, int) and max_new_tokens > 100:
        return  # the server sets a default and a limit
    with Batch(model, batch_size=2, seed=1) as batch:
        ticket = batch.add([[1, 2, 3]], alone=True, **changes)
        for _ in range(100):
            batch.step()
            if ticket.done:
                break
        assert ticket.output is not None
        if ticket.output.error is not None:
            raise ticket.output.error


MODELS = {
    "masked": lambda: tiny(1),
    "causal": lambda: paradec.wrap(tiny(1).unwrap(), topology="causal", prediction="shifted", eos_token_id=END),
    "block_causal": lambda: tiny(1, "block_causal"),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from Linux")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.full), 36])
@pytest.mark.parametrize("kind", MODELS)
def test_every_setting_is_served_or_refused_in_one_line(kind: str, share: int) -> None:
    model, failures = MODELS[kind](), []
    allocated_bytes()
    for request in list(hostile.settings())[5 % share :: share]:
        try:
            decode(model, request)
        except (ValueError, TypeError) as error:
            if "\n" in str(error) or len(str(error)) > 3000:
                failures.append((request, error))
        except Exception as error:
            failures.append((request, error))
        if (num_bytes := allocated_bytes()) > MAX_BYTES:
            failures.append((request, num_bytes))
    assert not failures, [(str(request)[:100], repr(error)[:200]) for request, error in failures[:5]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(hostile.VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.sampled_from([*FIELDS, "drafts", "window", "history", "sampler", "x"])


@settings(max_examples=150, deadline=None)
@given(request=JSON | st.dictionaries(FIELD, JSON | st.dictionaries(FIELD, JSON, max_size=3), max_size=3))
@pytest.mark.filterwarnings("ignore")
def test_any_json_is_served_or_refused(request: Any) -> None:
    try:
        decode(shared_model(), request)
    except (ValueError, TypeError) as error:
        assert str(error)


@functools.cache
def shared_model() -> Any:
    return tiny(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(paradec.load(), batch_size=4) as instance:
        yield instance


def health_status(server: Running) -> int:
    try:
        return urllib.request.urlopen(f"{server.address}/health").status
    except urllib.error.HTTPError as error:
        return error.code


STOPPED_THE_SERVER = [
    {"sampler": {"sampler": "klass", "history": 2**64 - 1}},
    {"sampler": {"sampler": "wino", "cap_high": 2**64 - 1}},
    {"sampler": {"sampler": "ccd", "buffer": 2**31 - 1}},
    {"cache": {"cache": "vicinity", "cache_update_freq": 2**64 - 1}},
    {"cache": {"cache": "dkv_decode", "refresh_interval": 2**64 - 1}},
]


@pytest.mark.parametrize("fields", STOPPED_THE_SERVER, ids=lambda fields: json.dumps(next(iter(fields.values())))[:40])
def test_a_request_that_once_stopped_the_server_is_refused(server: Running, fields: dict[str, Any]) -> None:
    ((_, (name, value)),) = (settings.items() for settings in fields.values())
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=rf"{name}={str(value)[:20]}.* must be an integer from [01] to"):
        client.chat.completions.create(model=NAME, messages=chat()["messages"], extra_body={"paradec": fields})
    assert health_status(server) == 200


def test_no_body_stops_the_server(server: Running) -> None:
    for body in hostile.bodies(120, SORT, seed=3):
        status, _, text = server.post(body)
        assert status in (200, 400, 404, 422), (status, body[:200], text[:300])
        if status != 200:
            assert json.loads(text)["error"]["message"]
    assert health_status(server) == 200 and "apple fig pear" in server.post(chat())[2]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"chat_template": "{{ 'fig ' * 2000 }}"}, 422, "chat_template is set by the server"),
        ({"add_generation_prompt": False}, 422, "add_generation_prompt is set by the server"),
        ({"max_length": 3}, 422, "max_length is set by the server"),
        ({"raise_exception": 3, "enable_thinking": False}, 200, "apple fig pear"),
        ({"documents": [{"title": "t", "text": "x"}]}, 200, "apple fig pear"),
    ],
)
def test_clients_cannot_set_the_chat_template(server: Running, options: dict, status: int, message: str) -> None:
    actual, _, text = server.post(chat(chat_template_kwargs=options))
    assert actual == status and message in text, text
