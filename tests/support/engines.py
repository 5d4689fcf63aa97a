"""Inference engines that decode blocks with paradec's samplers: a minimal engine, and SGLang's loop."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from small_models import MASK
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.query import Query
from paradec.models.adapter import Model


def block_logits(model: Model, ids: list[int], start: int) -> Tensor:
    """Return logits [len(ids) - start, vocabulary] that predict the tokens of `ids` from index `start` on."""
    tokens = torch.tensor([ids])
    logits = model(Query(rows=np.zeros(1, np.int64), tokens=tokens, positions=torch.arange(len(ids)).unsqueeze(0)))[0]
    return logits[(torch.arange(start, len(ids)) - model.facts.shift).clamp(min=0)]


class HostEngine:
    """A minimal engine that calls the model and holds the final ids of each request, which grow by blocks."""

    def __init__(self, model: Model, hosted: Any):
        self.model, self.hosted = model, hosted
        self.ids: dict[Any, list[int]] = {}
        self.calls = 0

    def add(self, key: Any, prompt: list[int], new: int, **fields: Any) -> None:
        self.hosted.open(key, prompt, new, **fields)
        self.ids[key] = prompt[: self.hosted.window(key)[0]]

    def round(self, keys: list[Any]) -> dict[Any, Any]:
        logits = {}
        for key in keys:
            start, window = self.hosted.window(key)
            assert start == len(self.ids[key]), "the window does not begin where the last window ended"
            logits[key] = block_logits(self.model, self.ids[key] + window.tolist(), start)
            self.calls += 1
        done = self.hosted.step(logits)
        for key, stepped in done.items():
            if stepped.closed:
                self.ids[key] += stepped.tokens.tolist()
        return done


BLOCK = 4


@dataclass(frozen=True)
class EngineSampler:
    """A sampler under test. covers: what the case tests. config: settings of the algorithm in the engine."""

    covers: str
    make: Callable[[], Any]
    config: dict[str, Any] = field(default_factory=dict)


EDITS = {"threshold": 0.5, "editing_threshold": 0.2, "max_post_steps": 3}
ENGINE_SAMPLERS = {
    "ParadecThreshold": EngineSampler(
        "no memory", lambda: samplers.create("threshold", threshold=0.5), {"threshold": 0.5}
    ),
    "ParadecEntropyBound": EngineSampler("several positions at once", lambda: samplers.create("entropy_bound")),
    "ParadecCredit": EngineSampler("remembers within a block", lambda: samplers.create("credit")),
    "ParadecSaber": EngineSampler("remembers from block to block, remasks", lambda: samplers.create("saber")),
    "ParadecEditing": EngineSampler("edits", lambda: samplers.create("editing", **EDITS), EDITS),
    "ParadecLowConfidence": EngineSampler("has a schedule", lambda: samplers.create("low_confidence"), {"steps": 2}),
    "ParadecCombination": EngineSampler(
        "two rules", lambda: samplers.create("credit+localleap"), {"combination": "credit+localleap"}
    ),
}


def dllm_config(block: int = BLOCK, mask: int = MASK, fdfo: bool = False, **settings: Any) -> Any:
    return SimpleNamespace(
        block_size=block, mask_id=mask, algorithm_config=settings, first_done_first_out_mode=fdfo, algorithm=""
    )


def forward_batch(
    rows: list[list[int]],
    names: list[str] | None = None,
    starts: list[int] | None = None,
    prompt_mask: Tensor | None = None,
) -> Any:
    size = len(rows[0])
    return SimpleNamespace(
        batch_size=len(rows),
        input_ids=torch.tensor(rows).flatten(),
        dllm_prompt_mask=prompt_mask,
        rids=names,
        positions=None if starts is None else torch.tensor([s + i for s in starts for i in range(size)]),
    )


class Requests:
    """Requests of SGLang's loop. A round of the asynchronous loop is one forward, of the synchronous loop one block."""

    def __init__(self, model: Model, prompts: dict[str, list[int]], blocks: int):
        self.model, self.blocks, self.prompts = model, blocks, prompts
        self.ids: dict[str, list[int]] = {name: [] for name in prompts}
        self.incomplete: dict[str, list[int]] = {}
        self.states: dict[str, Any] = dict.fromkeys(prompts)
        self.forwards = dict.fromkeys(prompts, 0)
        self.canvases: dict[str, list[list[int]]] = {name: [] for name in prompts}
        """Request -> its ids up to the end of the open block, after each step that changed them."""

    def logits(self, batch: Any) -> Tensor:
        """Return logits [batch * block length, vocabulary]. Also records the ids, which the last step has changed."""
        batch_logits = []
        for name, row in zip(batch.rids, batch.input_ids.view(batch.batch_size, -1).tolist(), strict=True):
            self.record_canvas(name, self.ids[name] + row)
            self.forwards[name] += 1
            batch_logits.append(block_logits(self.model, self.ids[name] + row, len(self.ids[name])))
        return torch.cat(batch_logits)

    def record_canvas(self, name: str, canvas: list[int]) -> None:
        recorded = self.canvases[name]
        if len(canvas) > len(self.prompts[name]) and (not recorded or recorded[-1] != canvas):
            recorded.append(canvas)

    def decode(self, algorithm: Any, runner: Callable[[Any], Any], draw: random.Random) -> None:
        while unfinished := [name for name in self.prompts if len(self.ids[name]) < self.blocks * BLOCK]:
            names = [name for name in unfinished if draw.random() < 0.7] or unfinished
            starts = [len(self.ids[name]) for name in names]
            rows = []
            for name, begin in zip(names, starts, strict=True):
                prompt_part = self.prompts[name][begin : begin + BLOCK]
                rows.append(self.incomplete.pop(name, prompt_part + [MASK] * (BLOCK - len(prompt_part))))
            batch = forward_batch(rows, names, starts)
            _, _, accepted, states, _ = algorithm.run(runner(self.logits), batch, [self.states[name] for name in names])
            for index, (name, row) in enumerate(zip(names, batch.input_ids.view(len(names), -1).tolist())):
                if accepted is None or accepted[index]:
                    self.record_canvas(name, self.ids[name] + row)
                    self.ids[name], self.states[name] = self.ids[name] + row, None
                else:
                    self.incomplete[name], self.states[name] = row, states[index]


def check_sampler(name: str, algorithm: Any, runner: Callable[[Any], Any], model: Model, fdfo: bool) -> None:
    """Assert that the tokens after every step equal those of `paradec.generate`.

    fdfo: whether the loop is asynchronous (first done, first out), which takes one more forward per stored block."""
    rule, draw, blocks = ENGINE_SAMPLERS[name], random.Random(f"{name} {fdfo}"), 3
    prompts = {key: [draw.randrange(36) for _ in range(length)] for key, length in {"a": 3, "b": 6, "c": 4}.items()}
    requests = Requests(model, prompts, blocks)
    requests.decode(algorithm, runner, draw)
    for key, prompt in prompts.items():
        decoded = blocks - len(prompt) // BLOCK
        steps = {"steps": 2 * decoded} if "steps" in rule.config else {}
        request = {"sampler": rule.make(), "max_new_tokens": blocks * BLOCK - len(prompt)} | steps
        out = paradec.generate(model, prompt, eos_early_stop=False, trace=True, **request)
        assert requests.ids[key] == out.sequences[0].tolist()
        expected: list[list[int]] = []
        canvas = list(out.trace.canvas[0])
        for step in out.trace.steps:
            positions = [position for _, position, _, _ in step.commits]
            stop = max(positions, default=-1) // BLOCK * BLOCK + BLOCK
            before = list(canvas)
            for _, position, token, _ in step.commits:
                canvas[position] = token
            for changed in (before[:stop], canvas[:stop]) if positions else ():
                expected += [changed] if not expected or expected[-1] != changed else []
        assert requests.canvases[key] == expected
        idle = sum(not step.commits for step in out.trace.steps)
        if fdfo:
            assert requests.forwards[key] == out.nfe + (decoded - idle) + len(prompt) // BLOCK
