"""Samplers with memory (credit, ccd, ccd_agree, klass, persistence, threshold with carry) equal plain loops."""

import itertools
import math
from typing import Any

import pytest
import torch
from oracles.masked import (
    SCRIPT_ENDS,
    SCRIPT_MASK,
    SCRIPT_VOCAB,
    CarryLoop,
    CCDAgreeLoop,
    CCDLoop,
    CreditLoop,
    KLASSLoop,
    Loop,
    PersistenceLoop,
    SlowCarryLoop,
)
from torch import Tensor

from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.core.protocol import Sampler
from paradec.samplers.masked.loop import Stage

ROWS, BLOCK, BLOCKS = 3, 6, 2
Step = set[tuple[int, int, int]]


class Script:
    """A model whose logits [rows, positions, vocabulary] in step t are `table[t]`, for any input."""

    facts = ModelFacts(vocab_size=SCRIPT_VOCAB, mask_token_id=SCRIPT_MASK, eos_token_ids=SCRIPT_ENDS)
    device = torch.device("cpu")
    tokenizer, default_block_length, default_max_new_tokens = None, None, BLOCK * BLOCKS
    pads, supports_store, supports_visibility = True, False, False

    def __init__(self, seed: int, scale: float):
        generator = torch.Generator().manual_seed(seed)
        shape = (BLOCK * BLOCKS, ROWS, 1 + BLOCK * BLOCKS, SCRIPT_VOCAB)
        noise = torch.randn(shape, dtype=torch.float64, generator=generator)
        table = [noise[0]]
        for fresh in noise[1:]:  # the most likely token changes slowly
            table.append(0.9 * table[-1] + 0.4 * fresh)
        self.table = scale * torch.stack(table)
        # which positions each step evaluates, as with a cache
        self.is_evaluated = torch.rand(len(noise), ROWS, BLOCK, generator=generator) < (1.0 if seed % 2 else 0.7)
        self.step_index = 0

    def __call__(self, query: object) -> Tensor:
        logits = self.table[self.step_index][torch.as_tensor(query.rows)]
        return logits.gather(1, query.wanted.unsqueeze(-1).expand(-1, -1, SCRIPT_VOCAB)).clone()


def evaluated_positions(script: Script, step_index: int, row: int, undecided: list[int], start: int) -> set[int]:
    """Return the undecided positions of a row's block that a step evaluates; if it evaluates none, return all."""
    positions = {i for i in undecided if script.is_evaluated[step_index, row, i - start]}
    return positions or set(undecided)


def run_sampler(sampler: Sampler, script: Script, **request: object) -> list[Step]:
    """Return the (row, position, token) entries that a sampler commits in each step of a script."""
    prompts = [[row] for row in range(ROWS)]
    state = sampler.start(
        script, prompts, max_new_tokens=BLOCK * BLOCKS, block_length=BLOCK, eos_early_stop=False, seed=0, **request
    )
    steps = []
    script.step_index = 0
    with torch.inference_mode():
        while not state.done:
            queries = sampler.query(state)
            (query,) = queries
            available = torch.zeros(len(query.rows), BLOCK, dtype=torch.bool)
            for n, row in enumerate(query.rows.tolist()):
                start = int(state.block_start[row])
                undecided = [i for i in range(start, start + BLOCK) if state.undecided[row, i]]
                available[
                    n, [i - start for i in evaluated_positions(script, script.step_index, row, undecided, start)]
                ] = True
            queries = [query.with_fields(window=query.window.with_fields(available=available))]
            commit = sampler.commit(state, sampler.propose(state, [script(query)], queries))
            steps.append({(r, p, t) for r, p, t, _ in commit.to_list()})
            script.step_index += 1
    return steps


def run_loop(loop: Loop, script: Script, steps: int | None) -> list[Step]:
    """Return the (row, position, token) entries that a plain loop commits in each step of a script."""
    per_row = []
    for row in range(ROWS):
        step_index, row_steps = 0, []
        for start in range(1, 1 + BLOCK * BLOCKS, BLOCK):
            undecided = list(range(start, start + BLOCK))
            loop.open(undecided)
            planned = BLOCK if steps is None else steps // BLOCKS
            first_step = step_index
            while undecided:
                quota = max(1, BLOCK // planned + (step_index - first_step < BLOCK % planned))
                evaluated = sorted(evaluated_positions(script, step_index, row, undecided, start))
                z = {i: script.table[step_index, row, i].tolist() for i in evaluated}
                chosen = loop.step(z, quota)
                row_steps.append({(row, i, token) for i, token in chosen.items()})
                undecided = [i for i in undecided if i not in chosen]
                step_index += 1
        per_row.append(row_steps)
    return [set().union(*step) for step in itertools.zip_longest(*per_row, fillvalue=set())]


# (loop, settings, steps)
CASES: list[tuple[type[Loop], dict, int | None]] = [
    (CreditLoop, {"threshold": 0.8}, None), (CreditLoop, {"threshold": 0.8, "storage": "dense"}, None),
    (CreditLoop, {"threshold": 0.95, "decay": 0.9, "exponent": 0.5, "fusion": 2.0, "storage": "dense"}, None),
    (CreditLoop, {"threshold": 0.95, "decay": 0.9, "exponent": 0.5, "fusion": 2.0, "slots": 1}, None),
    (CreditLoop, {"threshold": 0.9, "decay": 1.0, "fusion": 2.0, "slots": 2}, None),
    (KLASSLoop, {"confidence_threshold": 0.5, "kl_threshold": 0.1}, None),
    (KLASSLoop, {"confidence_threshold": 0.4, "kl_threshold": 0.3, "history": 1}, 4),
    (KLASSLoop, {"confidence_threshold": 0.3, "kl_threshold": 0.2, "history": 3}, 10),
    (PersistenceLoop, {"threshold": 0.7}, None),
    (PersistenceLoop, {"threshold": 0.6, "persist": 3, "end_threshold": 0.95}, None),
    (PersistenceLoop, {"threshold": 0.7, "persist": 1, "end_threshold": 0.5}, 4),
    (CCDLoop, {"entropy_threshold": None}, None), (CCDLoop, {"entropy_threshold": 0.8}, None),
    (CCDLoop, {"entropy_threshold": 0.6, "history": 2, "buffer": 2}, None),
    (CCDLoop, {"entropy_threshold": 0.9, "history": 4, "buffer": 9}, 6), (CCDAgreeLoop, {"warmup": 1}, None),
    (CCDAgreeLoop, {"warmup": 0, "expand_ratio": 2.0, "tail": 0.5}, None),
    (CCDAgreeLoop, {"warmup": 1, "adaptive": False}, 6), (CCDAgreeLoop, {"warmup": 2, "expand_ratio": 9.0}, None),
    (CarryLoop, {"threshold": 0.8, "quota_per_step": "carry"}, 4),
    (SlowCarryLoop, {"threshold": 0.7, "quota_per_step": "carry"}, 6),
]  # fmt: skip


class Float32Script(Script):
    def __call__(self, query: object) -> Tensor:
        return super().__call__(query).float()


def sizes_of_steps(loop: type[Loop], settings: dict, steps: int | None, script: type, seeds: int) -> set[int]:
    """Assert that the sampler equals the loop on several scripts; return how many tokens steps commit per row."""
    sampler, sizes = samplers.create(loop.name, **settings), set()
    for seed in range(seeds):
        table = script(seed, scale=2.5 if seed < 0.75 * seeds else 1.0)
        commits = run_sampler(sampler, table, steps=steps)
        assert commits == run_loop(loop(**settings), table, steps)
        sizes |= {sum(row == r for row, *_ in step) for step in commits for r in range(ROWS)}
    return sizes


@pytest.mark.thinned
@pytest.mark.parametrize(("loop", "settings", "steps"), CASES)
def test_sampler_equals_loops(loop: type[Loop], settings: dict, steps: int | None) -> None:
    sizes = sizes_of_steps(loop, settings, steps, Script, 8)
    assert len(sizes) > 2 or settings.get("entropy_threshold", 0) is None or not settings.get("adaptive", True)


@pytest.mark.thinned
@pytest.mark.parametrize("case", [case for case in CASES if case[0] in (CreditLoop, KLASSLoop, CCDLoop)])
def test_sampler_equals_loops_in_float32(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paradec.kernels.token_stats.read.SMALL_VOCABULARY", 0)
    monkeypatch.setattr("paradec.samplers.distributions.CPU_CHUNK", 2 * SCRIPT_VOCAB)
    sizes_of_steps(*case, Float32Script, 4)


def test_credit_survives_bfloat16() -> None:
    """Near 20, bfloat16 has a resolution of 0.125: credit must be added in higher precision."""
    logits = torch.zeros(1, 1, SCRIPT_VOCAB, dtype=torch.bfloat16)
    logits[..., 2], logits[..., 3] = 20.0, 19.875
    for storage in ("dense", "slots"):
        sampler = samplers.create("credit", storage=storage)
        memory = {}
        for name, spec in sampler.memory().items():
            shape = [1, 1, *(SCRIPT_VOCAB if dim == "vocab" else dim for dim in spec.dims[1:])]
            memory[name] = torch.full(shape, spec.fill).to(spec.dtype)
        stage = Stage(torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1).long(), memory)
        fused, _ = sampler.process_logits(logits, stage)
        p = logits.double().softmax(-1)[0, 0, 2].item()
        assert fused[0, 0, 2].item() - 20 == pytest.approx(0.65 * math.log(1 + p**0.2), rel=1e-4)
        assert logits[0, 0, 2] == 20
