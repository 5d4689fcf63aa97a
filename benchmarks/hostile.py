"""Hostile request bodies, which must not stop a server: every setting of every sampler and cache with extreme,
wrong-typed, nested and non-finite values. `benchmarks/server.py` sends them, and the tests decode them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from paradec import caches, samplers
from paradec.caches.suffix import DENSITIES
from paradec.integrations.server.request_body import FIELDS
from paradec.samplers.masked.policies import POLICIES

HUGE = (2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 10**400, 1e308, -1e308)
VALUES: tuple[Any, ...] = (
    *HUGE,
    *(-1, 0, 1, 10**6, 0.5, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("x", "x" * 5000, "\ud800", "", True, None),
    *([], {}, [[[]]], {"a": {"b": []}}, [2**63], ["x"], {"sampler": "threshold"}),
)
"""Values of settings. Python's `json` also reads and writes NaN and infinities."""


def settings() -> Iterator[dict[str, Any]]:
    """Yield values of a body's field "paradec": each setting and each field with each of `VALUES`."""
    owners = [("sampler", name, samplers.registry.get(name)) for name in samplers.names()]
    owners += [("cache", name, caches.registry.get(name)) for name in caches.names()]
    owners += [("blocks", name, policy) for name, policy in POLICIES.items()]
    for kind, name, owner in owners:
        for setting in dataclasses.fields(owner):
            if setting.init:
                for value in VALUES:
                    yield {kind: {kind: name, setting.name: value}}
    for field, value in itertools.product(FIELDS, VALUES):
        yield {field: value}
    windows = ("2147483647", "2147483647:2147483647", "9" * 400, "-1", "")
    for density, window in itertools.product(DENSITIES, windows):
        yield {"suffix": f"{density}:{window}"}


def nested(depth: int, name: str = "threshold") -> bytes:
    """Encode sampler settings in which `name` is a list nested `depth` levels deep."""
    return b'{"sampler": "threshold", "%s": %s%s}' % (name.encode(), b"[" * depth, b"]" * depth)


def bodies(count: int, prompt: str, seed: int = 0) -> list[bytes]:
    """Draw `count` chat bodies with hostile `settings` or other fields, eight of them nested deeply or malformed."""
    draw = random.Random(seed)
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
    requests = [{**chat, "paradec": fields} for fields in settings()]
    for name, value in itertools.product((*chat, "temperature", "top_p", "seed", "stop", "stream", "tools"), VALUES):
        requests.append({**chat, name: value})
    for name in ("chat_template", "add_generation_prompt", "tokenize", "messages", "max_length", "raise_exception"):
        requests += [{**chat, "chat_template_kwargs": {name: value}} for value in (*VALUES, "{{ 'fig ' * 20000000 }}")]
    for value in VALUES:
        requests += [{**chat, "messages": [{"role": value, "content": prompt}]}]
        requests += [{**chat, "messages": [{"role": "user", "content": value}]}]
        requests += [{**chat, "messages": [{"role": "user", "content": [{"type": "text", "text": value}]}]}]
        requests += [{**chat, "messages": [{"role": "user", "content": prompt, "tool_calls": value}]}]
    whole = [json.dumps(body).encode() for body in draw.sample(requests, count - 8)]
    text = json.dumps({**chat, "paradec": {"sampler": 0}}).encode()
    whole += [text.replace(b"0}", nested(depth) + b"}") for depth in (50, 300, 900, 100_000)]
    whole += [text.replace(b"0}", b"1" * 5000 + b"}"), b"[" * 500_000, b"{" * 10, b'"\\ud800"']
    draw.shuffle(whole)
    return whole
