"""The algorithms for SGLang over a base of our own that has its two loops; `test_sglang_released.py` runs them over the
released one."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tomllib
from blocks import BLOCK, RULES, Requests, batch_of, check_rule, config
from places import ROOT
from tiny_models import END, MASK, VOCAB, tiny

import paradec
from paradec import samplers
from paradec.engines.hosted import refusal
from paradec.engines.sglang import PREFIX, algorithms
from paradec.models.adapter import Model


class Base:
    """The loops that SGLang's documentation of an algorithm promises."""

    def __init__(self, config: Any):
        self.block_size, self.mask_id = config.block_size, config.mask_id
        self.fdfo = config.first_done_first_out_mode

    def run(self: Any, evaluate: Any, batch: Any, states: list[Any]) -> tuple[Any, ...]:
        fresh = self.init_step_state(batch)
        if self.fdfo:
            states = [carried or new for carried, new in zip(states, fresh, strict=True)]
            done = self.step(batch, evaluate(batch), states)
            return None, None, [self.block_size * flag for flag in done], states, False
        for _ in range(self.max_steps(self.block_size)):
            if all(self.step(batch, evaluate(batch), fresh)):
                return None, None, None, None, False
        raise AssertionError("a block is not done after the most steps that it takes")


ALGORITHMS = algorithms(Base)


def made(name: str, fdfo: bool = False, **settings: Any) -> Any:
    return ALGORITHMS[name](config(fdfo=fdfo, **settings))


def logits_of(*rows: list[int], sure: float = 9.0) -> torch.Tensor:
    """[B * W, V]: the tokens of `rows` with much logit."""
    return torch.nn.functional.one_hot(torch.tensor(rows).flatten(), VOCAB).double() * sure


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2, "block_causal")


@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
@pytest.mark.parametrize("name", RULES)
def test_steps_of_generate(name: str, fdfo: bool, model: Model) -> None:
    algorithm = made(name, fdfo, **RULES[name].config)
    check_rule(name, algorithm, lambda logits: logits, model, fdfo)
    gc.collect()
    assert len(algorithm._hosted) == 0
