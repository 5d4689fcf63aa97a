"""Helpers of decoding tests: parameters, supported requests, streamers, failing models, states, threads and errors."""

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
from paradec import samplers
from paradec.batching.batch import Batch
from paradec.batching.slots import Ticket
from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import View
from paradec.samplers.masked.view import Needs
from paradec.samplers.statistics import top_by_rank

UNREADY = {"learn2pd"}
"""Samplers that need a component trained for the model."""
MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked" and name not in UNREADY]


def covering(*parameters: Iterable[Any]) -> list[Any]:
    """Return all combinations of parameters' values. A few cover every value; the others have the mark `further`."""
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
    """Return whether the model has what the sampler needs: its topology, a deletion token, mask probes."""
    needs = getattr(samplers.get(name), "needs", Needs())
    if needs.why_unsupported(model.facts) is not None or needs.moves and model.facts.delete_token_id is None:
        return False
    return not needs.mask_probes or (model.supports_visibility and model.facts.prediction == "same")


def topology_of(name: str) -> str:
    """Return "bidirectional" if the sampler supports it, else the first topology that it supports."""
    topologies = samplers.get(name).needs.topologies
    return "bidirectional" if not topologies or "bidirectional" in topologies else topologies[0]


def facts_of(name: str, block_length: int) -> dict[str, object]:
    """Return arguments of `paradec.wrap` for a model that the sampler supports."""
    topology = topology_of(name)
    if topology == "bidirectional":
        return {}
    return {"topology": topology, "block_length": block_length, "delete_token_id": 5, "split_token_id": 7}


def supported_fields(sampler: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the request without the fields that the sampler does not support. sampler: an object or a name."""
    method = samplers.create(sampler) if isinstance(sampler, str) else sampler
    return {key: value for key, value in request.items() if key not in method.unsupported}


INF = math.inf


def view_from_scores(scores: Tensor) -> View:
    """Return a view of scores [rows, positions], in which scores above -inf are candidates. Other fields are None."""
    rows, width = scores.shape
    used_fields = {
        "scores": scores,
        "candidates": scores > -INF,
        "tokens": torch.zeros(rows, width, dtype=torch.int64),
        "positions": torch.arange(width).expand(rows, width) + 7,
        "quantities": {"confidence": scores},
        "top": top_by_rank,
    }
    return View(**{field.name: None for field in fields(View)} | used_fields)


def read_last_writes(output: Any, mask: int = MASK) -> list[dict[int, tuple[int, int]]]:
    """Return, for each row, position -> (token, step) of the last write in the trace, without remasked positions."""
    last_writes: list[dict[int, tuple[int, int]]] = [{} for _ in output.trace.canvas]
    steps = [0] * len(last_writes)
    for step in output.trace.steps:
        for row, position, token, _ in step.commits:
            last_writes[row][position] = (token, steps[row])
            if token == mask:
                del last_writes[row][position]
        steps = [count + (evaluated > 0) for count, evaluated in zip(steps, step.forwarded, strict=True)]
    return last_writes


def assert_same(a: Rollout, b: Rollout) -> None:
    for name in ("tokens", "step_map", "length", "prompt_length", "suppressed"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("logp", "logp_drawn", "writes", "writes_logp", "writes_logp_drawn"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), equal_nan=True, rtol=0, atol=1e-12)
    assert (a.settings, a.version, a.approximation) == (b.settings, b.version, b.approximation)


def assert_replayed(model: Model, rollout: Rollout, atol: float = 1e-10, **how: Any) -> None:
    """Assert that `paradec.replay` with the options `how` computes the recorded log-probabilities."""
    with torch.no_grad():
        replayed = paradec.replay(model, rollout, **how).double()
    torch.testing.assert_close(replayed, rollout.logp, equal_nan=True, rtol=0, atol=atol)


ROWS = [[draw.randrange(36) for _ in range(draw.randint(1, 9))] for draw in map(random.Random, range(6))]
REQUEST: dict[str, Any] = {"max_new_tokens": 6, "block_length": 3, "temperature": 0.8, "seed": 2}


def drain(batch: Batch) -> list[Ticket]:
    """Step a batch until it is empty; return the tickets of its requests in the order in which they ended."""
    ended = []
    while batch.occupied or batch.waiting:
        ended += batch.step()
    return ended + batch.step()


def ticket_ids(ticket: Ticket) -> list[int]:
    assert ticket.output is not None
    return ticket.output.new_tokens[0].tolist()


class Recorder:
    """A streamer that records the ids of one row."""

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
    """A streamer that records every tensor."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert self.ends == 0
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


class Failing:
    """A model that raises `error` (None: returns NaN) for rows with `token`. Call number `calls` + 1 raises it too."""

    def __init__(self, model: Model, token: int = -1, calls: int = -1, error: BaseException | None = None):
        self.model, self.token, self.calls_left, self.error = model, token, calls, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, query: Any, *store: Any) -> Tensor:
        self.calls_left -= 1
        if self.calls_left == -1 and self.error is not None:
            raise self.error
        poisoned = (query.tokens == self.token).any(1)
        if poisoned.any() and self.error is not None:
            raise self.error
        logits = self.model(query, *store)
        if store and poisoned.any():
            for layers in (store[0].layer_keys, store[0].layer_values):
                for tensor in layers.values():
                    tensor[query.store_rows[poisoned]] = torch.nan
        return logits.masked_fill(poisoned.view(-1, 1, 1), torch.nan)


def nested_values(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of lists, arrays and tensors in a nested value, without facts, request, cache and model."""
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
            yield from nested_values(entry, f"{path}.{name}", depth + 1)


def state_values(state: Any) -> dict[str, Any]:
    """Return the fields of a state that change in commits only: neither stores (calls write them) nor constants."""
    excluded = {"request", "facts", "store", "after"}
    excluded |= {name for name in vars(state) if isinstance(getattr(type(state), name, None), cached_property)}
    return {name: value for name, value in vars(state).items() if name not in excluded}


def same_values(a: Any, b: Any) -> bool:
    """Return whether two values, which may contain tensors, arrays and generators, are equal."""
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
    """Run functions at the same time, each in its own thread; return their results or exceptions."""
    results: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def start(i: int) -> None:
        barrier.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=start, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return results


def refuses(call: Callable[[], Any], message: str, error: Any = ValueError) -> str:
    """Assert that the call raises `error` with a text that matches the pattern `message`; return the text."""
    with pytest.raises(error, match=message) as raised:
        call()
    return str(raised.value)
