"""No request may stop the server, allocate much memory or read files."""

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
MOST = 100 * 2**20
"""Limit of the memory of a request of a few tokens, in bytes."""


def allocated() -> int:
    result = re.findall(r"Vm(?:HWM|RSS):\s+(\d+)", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return (int(result[0]) - int(result[1])) * 1024


def decoded(model: Any, request: Any) -> None:
    body = json.loads(json.dumps({"messages": [{"role": "user", "content": "x"}], OWN: request}))
    try:
        changes = read_changes(ChatBody.model_validate(body), {})
    except ApiError as error:
        raise ValueError(str(error)) from error
    new = changes.setdefault("max_new_tokens", 12)
    if new is None or isinstance(new, int) and new > 100:
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
def test_every_setting_is_served_or_refused_by_name(kind: str, share: int) -> None:
    model, wrong = MODELS[kind](), []
    allocated()
    for request in list(hostile.settings())[5 % share :: share]:
        try:
            decoded(model, request)
        except (ValueError, TypeError) as error:
            if "\n" in str(error) or len(str(error)) > 3000:
                wrong.append((request, error))
        except Exception as error:
            wrong.append((request, error))
        if (taken := allocated()) > MOST:
            wrong.append((request, taken))
    assert not wrong, [(str(request)[:100], repr(error)[:200]) for request, error in wrong[:5]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(hostile.VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.sampled_from([*FIELDS, "drafts", "window", "history", "sampler", "x"])


@settings(max_examples=150, deadline=None)
@given(own=JSON | st.dictionaries(FIELD, JSON | st.dictionaries(FIELD, JSON, max_size=3), max_size=3))
@pytest.mark.filterwarnings("ignore")
def test_any_json_is_served_or_refused(own: Any) -> None:
    try:
        decoded(shared_server(), own)
    except (ValueError, TypeError) as error:
        assert str(error)


def shared_server(made: list[Any] = []) -> Any:  # noqa: B006 (made once)
    if not made:
        made.append(tiny(1))
    return made[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(paradec.load(), batch_size=4) as found:
        yield found


def health(server: Running) -> int:
    try:
        return urllib.request.urlopen(f"{server.address}/health").status
    except urllib.error.HTTPError as error:
        return error.code


STOPPED_IT = [
    {"sampler": {"sampler": "klass", "history": 2**64 - 1}},
    {"sampler": {"sampler": "wino", "cap_high": 2**64 - 1}},
    {"sampler": {"sampler": "ccd", "buffer": 2**31 - 1}},
    {"cache": {"cache": "vicinity", "cache_update_freq": 2**64 - 1}},
    {"cache": {"cache": "dkv_decode", "refresh_interval": 2**64 - 1}},
]


@pytest.mark.parametrize("own", STOPPED_IT, ids=lambda own: json.dumps(next(iter(own.values())))[:40])
def test_a_request_that_stopped_the_server_is_refused(server: Running, own: dict[str, Any]) -> None:
    (kind, (_, (name, value))) = next((kind, tuple(actual.items())) for kind, actual in own.items())
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=rf"{name}={str(value)[:20]}.* must be an integer from [01] to"):
        client.chat.completions.create(model=NAME, messages=chat()["messages"], extra_body={"paradec": own})
    assert health(server) == 200


def test_no_body_stops_the_server(server: Running) -> None:
    for body in hostile.bodies(120, SORT, seed=3):
        status, _, text = server.post(body)
        assert status in (200, 400, 404, 422), (status, body[:200], text[:300])
        if status != 200:
            assert json.loads(text)["error"]["message"]
    assert health(server) == 200 and "apple fig pear" in server.post(chat())[2]


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
def test_clients_send_no_templates(server: Running, options: dict[str, Any], status: int, message: str) -> None:
    actual, _, text = server.post(chat(chat_template_kwargs=options))
    assert actual == status and message in text, text
