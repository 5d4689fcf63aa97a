"""Combinations of parameters, samplers that fit a model, batches stepped by hand, threads, and refusals."""

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from small_models import MASK
from torch import Tensor

import paradec
from paradec.batching.batch import Batch
from paradec.batching.slots import Ticket
from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import View
from paradec.samplers.masked.view import Needs
from paradec.samplers.statistics import top_by_rank

UNREADY = {"learn2pd"}
"""They need something that was trained for the model."""
MASKED = [
    name for name in paradec.samplers.names() if paradec.samplers.get(name).family == "masked" and name not in UNREADY
]


def covering(*parameters: Iterable[Any]) -> list[Any]:
    """The product of the values of several parameters, marked `further` but for a few that hold every value."""
    columns = [list(values) for values in parameters]
    default = {tuple(row % len(column) for column in columns) for row in range(max(map(len, columns)))}
    return [
        pytest.param(
            *(column[index] for column, index in zip(columns, indices, strict=True)),
            marks=[] if indices in default else pytest.mark.further,
        )
        for indices in itertools.product(*(range(len(column)) for column in columns))
    ]


def fits(name: str, model: Model) -> bool:
    """Whether the model can give what the sampler needs: calls with `mask_probes`, or a topology."""
    needs = getattr(paradec.samplers.get(name), "needs", Needs())
    if needs.why_unsupported(model.facts) is not None or needs.moves and model.facts.delete_token_id is None:
        return False
    return not needs.mask_probes or (model.supports_visibility and model.facts.prediction == "same")


def topology_of(name: str) -> str:
    """The topology of models that a sampler is tested with: bidirectional, where it takes these."""
    topologies = paradec.samplers.get(name).needs.topologies
    return "bidirectional" if not topologies or "bidirectional" in topologies else topologies[0]


def facts_of(name: str, block_length: int) -> dict[str, object]:
    """The facts of a model of that topology, beside its defaults."""
    topology = topology_of(name)
    if topology == "bidirectional":
        return {}
    return {"topology": topology, "block_length": block_length, "delete_token_id": 5, "split_token_id": 7}


def supported(sampler: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What of a request the sampler, or the one of that name, takes: some are for temperature 0."""
    method = paradec.samplers.create(sampler) if isinstance(sampler, str) else sampler
    return {key: value for key, value in request.items() if key not in method.unsupported}


INF = math.inf


def view_of(scores: Tensor) -> View:
    """A view of scores [R, W] whose candidates are those above -inf."""
    rows, width = scores.shape
    seen = {
        "scores": scores,
        "candidates": scores > -INF,
        "tokens": torch.zeros(rows, width, dtype=torch.int64),
        "positions": torch.arange(width).expand(rows, width) + 7,
        "quantities": {"confidence": scores},
        "top": top_by_rank,
    }
    # of the rest a rule without memory, schedule and draws has no use
    return View(**{field.name: None for field in fields(View)} | seen)


def by_trace(output: Any, mask: int = MASK) -> list[dict[int, tuple[int, int]]]:
    """Of each row, token and step by position: what the trace says was written last, and not taken back."""
    found: list[dict[int, tuple[int, int]]] = [{} for _ in output.trace.canvas]
    steps = [0] * len(found)
    for step in output.trace.steps:
        for row, position, token, _ in step.commits:
            found[row][position] = (token, steps[row])
            if token == mask:
                del found[row][position]
        steps = [count + (evaluated > 0) for count, evaluated in zip(steps, step.forwarded, strict=True)]
    return found


def assert_same(a: Rollout, b: Rollout) -> None:
    for name in ("tokens", "step_map", "length", "prompt_length", "suppressed"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("logp", "logp_drawn", "writes", "writes_logp", "writes_logp_drawn"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), equal_nan=True, rtol=0, atol=1e-12)
    assert (a.settings, a.version, a.approximation) == (b.settings, b.version, b.approximation)


def assert_replayed(model: Model, rollout: Rollout, atol: float = 1e-10, **how: Any) -> None:
    """What `paradec.replay` finds is what was recorded."""
    with torch.no_grad():
        replayed = paradec.replay(model, rollout, **how).double()
    torch.testing.assert_close(replayed, rollout.logp, equal_nan=True, rtol=0, atol=atol)


ROWS = [[draw.randrange(36) for _ in range(draw.randint(1, 9))] for draw in map(random.Random, range(6))]
REQUEST: dict[str, Any] = {"max_new_tokens": 6, "block_length": 3, "temperature": 0.8, "seed": 2}


def drain(batch: Batch) -> list[Ticket]:
    ended = []
    while batch.occupied or batch.waiting:
        ended += batch.step()
    return ended + batch.step()


def ticket_ids(ticket: Ticket) -> list[int]:
    assert ticket.output is not None
    return ticket.output.new_tokens[0].tolist()


class Recorder:
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.ends = 0

    def put(self, ids: Tensor) -> None:
        assert ids.shape[0] == 1 and not self.ends
        self.pieces.append(ids[0].tolist())

    def put_draft(self, ids: Tensor) -> None:
        self.drafts.append(ids[0].tolist())

    def end(self) -> None:
        self.ends += 1


class TensorRecorder:
    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert self.ends == 0
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


class Failing:
    """A model that raises `error`, or returns NaN, for rows with a token or after some calls."""

    def __init__(self, model: Model, token: int = -1, calls: int = -1, error: BaseException | None = None):
        self.model, self.token, self.left, self.error = model, token, calls, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, query: Any, *store: Any) -> Tensor:
        self.left -= 1
        if self.left == -1 and self.error is not None:
            raise self.error
        poisoned = (query.tokens == self.token).any(1)
        if poisoned.any() and self.error is not None:
            raise self.error
        if store and poisoned.any():  # what it writes is no better
            found = self.model(query, *store)
            for layers in (store[0].layer_keys, store[0].layer_values):
                for tensor in layers.values():
                    tensor[query.store_rows[poisoned]] = torch.nan
        else:
            found = self.model(query, *store)
        return found.masked_fill(poisoned.view(-1, 1, 1), torch.nan)


def values_below(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every list, array and tensor below a state, by path."""
    if isinstance(value, (list, np.ndarray, Tensor)):
        yield path, value
    if isinstance(value, dict):
        entries: Any = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    elif type(value).__module__.startswith("paradec") and hasattr(value, "__dict__"):
        entries = vars(value).items()
    else:
        return
    for name, entry in entries:
        if depth < 5 and name not in ("facts", "request", "cache", "blocks", "model"):
            yield from values_below(entry, f"{path}.{name}", depth + 1)


def state_values(state: Any) -> dict[str, Any]:
    """All that may change in a state but its stores, whose entries calls write, and what it derives and caches."""
    fixed = {"request", "facts", "store", "after"}
    fixed |= {name for name in vars(state) if isinstance(getattr(type(state), name, None), cached_property)}
    return {name: value for name, value in vars(state).items() if name not in fixed}


def same_values(a: Any, b: Any) -> bool:
    """Whether two values are equal, with all tensors, arrays and generators below them."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return type(a) is type(b) and same_values(state_values(a), state_values(b))
    return a == b


def run_in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What functions give that begin at once, each in a thread of its own: results, or exceptions."""
    found: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def start(i: int) -> None:
        barrier.wait()
        try:
            found[i] = functions[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=start, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return found


def refuses(call: Callable[[], Any], message: str, error: Any = ValueError) -> str:
    """The text of the error that the call raises, in which `message` is found."""
    with pytest.raises(error, match=message) as raised:
        call()
    return str(raised.value)
