"""`differential.py`, which compares two versions: its requests can be repeated, and no difference escapes it."""

from __future__ import annotations

import copy
import json
from typing import Any

import differential
import pytest

from paradec import caches, samplers

KNOWN = {
    "samplers": {name: {"family": samplers.get(name).family, "uses_steps": False} for name in samplers.names()},
    "caches": list(caches.names()),
}
ANSWER = {
    "ok": {
        "sequences": [[5, 6, 7], [8, 9, 10]],
        "row_nfe": [3, 4],
        "kinds": ["full", "window"],
        "commits": [[[0, 2, 7]], [[1, 2, 10]]],
        "images": [{"shape": [28, 28], "dtype": "uint8", "sha": "0123"}],
        "tokens_per_forward": float("nan"),
        "finished": [True, False],
    },
    "warnings": ["UserWarning: a"],
}
REFUSED = {"error": "ValueError", "message": "steps=3", "warnings": []}


def test_requests_are_repeatable_and_plain_json() -> None:
    first, again, other = (differential.requests_of(seed, 300, KNOWN) for seed in (3, 3, 4))
    assert first == again != other
    assert json.loads(json.dumps(first)) == first
    assert first[:50] == differential.requests_of(3, 50, KNOWN)  # a request of a longer run can be asked again alone
    assert {request["family"] for request in first} == set(differential.FAMILIES)
    text = json.dumps(differential.requests_of(0, 2000, KNOWN))
    missing = [name for name in [*samplers.names(), *caches.names()] if f'"{name}"' not in text]
    # the forecast family has a entry point of its own; models with canvases, scales and groups have no version before
    assert set(missing) <= {"taylorseer", "diffusion_gemma", "canvas", "var", "code", "groups", "nar", "distilled"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("ok", "sequences", 1, 2), 11),
        (("ok", "row_nfe", 0), 4),
        (("ok", "kinds", 1), "full"),
        (("ok", "commits", 0, 0, 1), 1),
        (("ok", "images", 0, "sha"), "0124"),
        (("ok", "images", 0, "shape"), [28, 29]),
        (("ok", "finished", 1), 0),
        (("ok", "commits"), [[[0, 2, 7]]]),
        (("ok", "tokens_per_forward"), 1.0),
        (("ok", "added"), None),
    ],
)
def test_every_difference_is_noticed(path: tuple[Any, ...], value: Any) -> None:
    after: Any = copy.deepcopy(ANSWER)
    assert differential.verdict(ANSWER, after) == "equal"
    place = after
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert differential.verdict(ANSWER, after) == differential.verdict(after, ANSWER) == "different"
    assert [found[0] for found in differential.differences(ANSWER, after)][0].startswith(".".join(map(str, path)))


def test_refusals_are_compared_by_kind_and_on_request_by_text() -> None:
    assert differential.verdict(REFUSED, REFUSED) == "refused"
    assert differential.verdict(REFUSED, REFUSED | {"message": "steps=4"}) == "refused"
    assert differential.verdict(REFUSED, REFUSED | {"message": "steps=4"}, messages=True) == "different"
    assert differential.verdict(ANSWER, ANSWER | {"warnings": []}, messages=True) == "different"
    assert differential.verdict(REFUSED, REFUSED | {"error": "TypeError"}) == "different"
    assert differential.verdict(ANSWER, REFUSED) == differential.verdict(REFUSED, ANSWER) == "different"
    broken = {"broken": "no answer in 60 s"}  # a request that hangs under both is no proof of anything
    assert differential.verdict(broken, broken) == "different"
