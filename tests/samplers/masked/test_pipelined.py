"""Several open blocks: equality with plain loops and `FixedBlocks`; caches, streams, traces, the command line."""

import json
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles.masked import delayed_positions, remembering_loop
from small_models import MASK, VOCAB, tiny
from torch import Tensor, nn
from typer.testing import CliRunner

import paradec
from paradec import FixedBlocks, PipelinedBlocks, cli, samplers
from paradec.caches.delayed import DelayedCache
from paradec.core.trace import Trace
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import MaskedSampler, View, make_view
from paradec.tools.traces.payload import run_data

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
pytestmark = pytest.mark.filterwarnings("ignore:cache=")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2)


def commits(out: Any) -> list[list[tuple]]:
    return [sorted(entry[:3] for entry in step.commits) for step in out.trace.steps]


def decode(model: Model, rows: Any = ROWS, **request: Any) -> Any:
    defaults = {"max_new_tokens": 12, "eos_early_stop": False, "trace": True, "seed": 3}
    return paradec.generate(model, rows, **defaults | request)


@pytest.mark.thinned
@pytest.mark.parametrize("forced", ["first", "active"])
@pytest.mark.parametrize("cache", ["none", "dual", "delayed"])
@pytest.mark.parametrize("sampler", ["threshold", "credit", "factor", "klass", "persistence", "klass+persistence"])
def test_pipelined_blocks_without_overlap_equal_fixed_blocks(
    sampler: str, cache: str, forced: str, model: Model
) -> None:
    for request in ({"temperature": 0.7}, {"eos_early_stop": True}):
        ours, theirs = (
            decode(model, sampler=sampler, cache=cache, blocks=blocks, **request)
            for blocks in (PipelinedBlocks(4, add=1, full=1, forced=forced), FixedBlocks(4))
        )
        assert commits(ours) == commits(theirs)
        assert ours.row_nfe == theirs.row_nfe and torch.equal(ours.sequences, theirs.sequences)
        assert [step.blocks for step in ours.trace.steps] == [step.blocks for step in theirs.trace.steps]


@pytest.mark.parametrize("seed", range(6))
def test_open_blocks_equal_those_of_a_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    model = tiny(1, seed=seed)
    size, align, add = draw.choice((2, 3, 4)), draw.choice(("prompt", "absolute")), draw.choice((0, 0.3, 0.5, 1))
    full, forced = draw.choice((0, 0.5, 1)), draw.choice(("first", "active"))
    policy = PipelinedBlocks(size, align=align, add=add, full=full, forced=forced)
    rows = [[draw.choice((MASK, 5)) if i > 2 else 7 for i in range(draw.randint(3, 12))] for _ in range(3)]
    sampler = samplers.create("threshold", threshold=0.3)
    state = sampler.start(model, rows, max_new_tokens=9, blocks=policy, eos_early_stop=False)
    initial_canvas = state.canvas.clone()
    last: dict[int, int] = {}
    has_several = False
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(model, state)
            view = make_view(sampler, state, proposal)
            for at, row in enumerate(state.window.rows.tolist()):
                first, length = int(state.prompt_length[row]), int(state.length[row])
                origin = first if policy.align == "prompt" else 0
                cells: dict[int, list[int]] = {}
                for position in range(first, length):
                    cells.setdefault((position - origin) // policy.length, []).append(position)
                masks = {b: [p for p in positions if state.canvas[row, p] == MASK] for b, positions in cells.items()}
                is_hole = (initial_canvas[row] == MASK).tolist()
                total = {b: sum(is_hole[p] for p in positions) for b, positions in cells.items()}
                opened = last.get(row, -1)
                is_full = all(not masks[b] for b in cells if b <= opened)
                added = {p for b in cells if b <= opened for p in cells[b]}
                if is_full or len(masks[opened]) <= (1 - policy.add) * total[opened]:
                    opened = next((b for b in cells if b > opened and total[b]), max(cells))
                last[row] = opened
                start = next(b for b in cells if masks[b])
                assert state.block_start[row] == cells[start][0]
                assert state.block_end[row] == cells[opened][-1] + 1
                has_several |= opened > start and bool(added)
                leading = {start}
                if policy.forced == "active":
                    share = {b: 1 - len(masks[b]) / total[b] if total[b] else 1.0 for b in cells}
                    leading |= {b for b in cells if start < b <= opened and share[b - 1] >= policy.full}
                leading_positions = {int(p) for p in state.window.positions[at][view.leading[at] >= 0]}
                assert leading_positions == {p for b in leading for p in cells[b]}
            sampler.commit(state, proposal)
    assert has_several == (policy.add < 1)


def test_nothing_opens_after_an_end() -> None:
    ends = tuple(range(0, 40, 4))
    model = tiny(1, ends=ends)
    num_ended = 0
    sampler = samplers.create("threshold", threshold=0.9)
    rows = [[i, i + 1] for i in range(12)]
    state = sampler.start(model, rows, max_new_tokens=24, blocks=PipelinedBlocks(4, add=0.2))
    with torch.inference_mode():
        while not state.done:
            before, running = state.block_end.copy(), state.running.copy()
            sampler.commit(state, sampler.step(model, state))
            for row in np.flatnonzero(running & state.running):
                answer = state.canvas[row, state.prompt_length[row] : before[row]]
                if any(int(token) in ends for token in answer):
                    num_ended += 1
                    assert state.block_end[row] == before[row]
    assert num_ended > 5 and state.stopped.all()


class SlopeModule(nn.Module):
    """A module whose confidence grows with the position, or is equal at all positions if `slope` is 0."""

    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope
        self.config = SimpleNamespace(vocab_size=VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, VOCAB, dtype=torch.float64)
        logits[..., 7] = self.slope * torch.arange(1, input_ids.shape[1] + 1)
        return logits


def test_the_first_block_commits_first_and_ties_go_to_the_first_position() -> None:
    for slope, order in ((0.0, [1, 2, 3, 4, 5, 6, 7, 8]), (0.01, [4, 3, 2, 1, 8, 7, 6, 5])):
        model = paradec.wrap(SlopeModule(slope), mask_token_id=MASK, prediction="same", topology="bidirectional")
        out = decode(model, [[3]], sampler="threshold", blocks=PipelinedBlocks(4, add=0.25), max_new_tokens=8)
        assert [position for step in out.trace.steps for _, position, *_ in step.commits] == order


class StabilizingModule(nn.Module):
    """A module whose distributions become stable and confident as more of the row is decided."""

    def __init__(self, seed: int):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        generator = torch.Generator().manual_seed(seed)
        self.stable = torch.randn(64, VOCAB, generator=generator, dtype=torch.float64)
        self.noise = torch.randn(64, 64, VOCAB, generator=generator, dtype=torch.float64)

    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.shape[1]
        decided = (input_ids != MASK).sum(1)
        return self.stable[:size] * (decided / 4)[:, None, None] + self.noise[decided, :size] * 0.3


@pytest.mark.thinned
@pytest.mark.parametrize(
    "rule",
    [
        samplers.create("klass", confidence_threshold=0.3, kl_threshold=0.3, history=2),
        samplers.create("klass", confidence_threshold=0.3, kl_threshold=0.2, history=1),
        samplers.create("persistence", threshold=0.5, persist=2, end_threshold=0),
        samplers.create("persistence", threshold=0.4, persist=3, end_threshold=0),
    ],
    ids=lambda rule: f"{rule.name}-{getattr(rule, 'history', getattr(rule, 'persist', 0))}",
)
def test_rules_with_memory_equal_a_plain_loop(rule: Any) -> None:
    num_parallel = 0
    for seed in range(4):
        module = StabilizingModule(seed)
        model = paradec.wrap(module, mask_token_id=MASK, prediction="same", topology="bidirectional")
        for policy in (PipelinedBlocks(4, add=0.25), PipelinedBlocks(3, add=0.6)):
            out = decode(model, ROWS, sampler=rule, blocks=policy)
            for row, prompt in enumerate(ROWS):
                expected = remembering_loop(rule, module, prompt, policy)
                ours = [sorted(e[1:3] for e in step.commits if e[0] == row) for step in out.trace.steps]
                assert [entries for entries in ours if entries] == expected
                num_parallel += sum(len(entries) > 1 for entries in expected)
    assert num_parallel > 10


@dataclass(frozen=True)
class ScheduledSampler(MaskedSampler):
    """Commit position i in step `when[i]`, or in the first later step in which its block is open."""

    when: tuple[int, ...] = ()

    name = "scripted"

    def quota(self, state: Any, rows: Any) -> Any:
        return torch.as_tensor(state.row_step[rows])

    def select(self, view: View) -> Tensor:
        return torch.tensor(self.when)[view.positions] <= view.quota[:, None]


def counts_and_commits(
    model: Model, rows: list[list[int]], new: int, when: Any, size: int, cache: DelayedCache
) -> list[tuple]:
    """Return for each row the number of evaluated positions and the committed positions of each step."""
    blocks = PipelinedBlocks(size, add=0)
    out = decode(model, rows, sampler=ScheduledSampler(tuple(when)), blocks=blocks, cache=cache, max_new_tokens=new)
    counts = []
    for row in range(len(rows)):
        steps = [step for step in out.trace.steps if step.forwarded[row]]
        filled = [{entry[1] for entry in step.commits if entry[0] == row} for step in steps]
        counts.append(([step.forwarded[row] for step in steps], filled))
    return counts


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_the_default_order_in_which_blocks_wait_depends_on_the_prediction(prediction: str) -> None:
    """As in d3LLM's code, full blocks wait before they are cached: on LLaDA one by one, on Dream all together."""
    draw, num_different = random.Random(0), 0
    model = tiny(1, prediction=prediction)
    default, reverse = ("first", "all") if prediction == "same" else ("all", "first")
    for _ in range(12):
        size, new = draw.choice((2, 3)), draw.randint(10, 16)
        rows = [[1] * draw.randint(1, 4) for _ in range(2)]
        when = [draw.randint(0, 6) for _ in range(20)]
        delay, interval = draw.choice((1, 2, 3)), draw.choice((3, 5, 10000))
        for waiting in (None, default, reverse):
            cache = DelayedCache(delay, interval, waiting=waiting)
            for row, (ours, filled) in zip(rows, counts_and_commits(model, rows, new, when, size, cache), strict=True):
                prompt, length = len(row), len(row) + new
                expected = delayed_positions(prompt, length, size, cache, waiting or default, filled)
                if prediction == "shifted":
                    first = [min(set(range(prompt, length)).difference(*filled[:step])) for step in range(len(ours))]
                    starts = [at - (at - prompt) % size for at in first]
                    expected = [max(n, length - at + 1) for n, at in zip(expected, starts, strict=True)]
                assert ours == expected
                counts = [delayed_positions(prompt, length, size, cache, w, filled) for w in (default, reverse)]
                num_different += counts[0] != counts[1]
    assert num_different > 10


def test_caches_that_are_exact_on_block_causal_models() -> None:
    for length in (2, 4, 8):
        model, blocks = tiny(2, "block_causal"), PipelinedBlocks(length, add=0.3)
        plain, *others = (
            decode(model, cache=cache, blocks=blocks, sampler=samplers.create("threshold", threshold=0.3))
            for cache in ("none", "block", "dual", "prefix", "delayed")
        )
        assert any(len({entry[1] // length for entry in step.commits}) > 1 for step in plain.trace.steps)
        for out in others:
            assert commits(out) == commits(plain)


def test_streamed_ids_are_in_order_and_final(model: Model) -> None:
    streamed_ids: list[int] = []
    streamer = SimpleNamespace(put=lambda ids: streamed_ids.extend(ids.flatten().tolist()), end=lambda: None)
    out = decode(model, [[1, 2, 3]], blocks=PipelinedBlocks(3, add=0.3), streamer=streamer)
    assert streamed_ids == out.sequences[0].tolist()
    committed = [position for step in out.trace.steps for _, position, *_ in step.commits]
    assert committed != sorted(committed)


def test_rows_of_generate_many_equal_those_of_generate(model: Model) -> None:
    request = {"blocks": PipelinedBlocks(3, add=0.3), "max_new_tokens": 10, "seed": 4, "sampler": "credit"}
    rows = [[i + 1, *[2] * (i % 3)] for i in range(7)]
    for cache in ("none", "delayed"):
        together = paradec.generate(model, rows, cache=cache, **request)
        outputs = list(paradec.generate_many(model, rows, batch_size=2, cache=cache, **request))
        assert [out.new_tokens[0].tolist() for out in outputs] == [ids.tolist() for ids in together.new_tokens]
        assert [out.nfe for out in outputs] == together.row_nfe


def test_traces_have_the_starts_of_open_blocks(model: Model, tmp_path: Any) -> None:
    for align in ("prompt", "absolute"):
        out = decode(model, sampler="threshold", blocks=PipelinedBlocks(4, align=align, add=0.25))
        max_starts = 0
        for step in out.trace.steps:
            for row, (span, starts) in enumerate(zip(step.blocks, step.starts, strict=True)):
                if span is None:
                    assert starts is None
                    continue
                first = len(ROWS[row]) if align == "prompt" else 0
                inside = [p for p in range(span[0] + 1, span[1]) if (p - first) % 4 == 0]
                assert starts == [span[0], *inside]
                max_starts = max(max_starts, len(starts))
        assert max_starts > 1
        out.trace.save(tmp_path / "run.json")
        loaded = Trace.load(tmp_path / "run.json")
        assert [step.starts for step in loaded.steps] == [step.starts for step in out.trace.steps]
        payload_steps = run_data(out.trace, "run")["steps"]
        assert [step["o"] for step in payload_steps] == [step.starts for step in out.trace.steps]
    fixed = decode(model, sampler="threshold", blocks=FixedBlocks(4))
    assert all(step.starts is None for step in fixed.trace.steps)
    assert all("o" not in step for step in run_data(fixed.trace, "run")["steps"])


def test_requests_with_pipelined_blocks_can_be_saved(tmp_path: Any) -> None:
    request = paradec.Request(blocks=PipelinedBlocks(8, add=0.5, full=0.9, forced="active"))
    request.save(tmp_path / "request.preset")
    assert paradec.Request.load(tmp_path / "request.preset") == request
    assert paradec.Request(**paradec.Request.from_dict(json.loads(json.dumps(request.to_dict())))) == request


def test_pipelined_blocks_on_the_command_line() -> None:
    arguments = ["generate", "Sort: pear fig apple", "--blocks", "pipelined", "--block-length", "4", "--json"]
    for more in ([], ["--block-add", "0.5", "--block-full", "0.9"]):
        result = CliRunner().invoke(cli.app, arguments + more)
        assert result.exit_code == 0 and "apple fig pear" in result.stdout
    result = CliRunner().invoke(cli.app, ["generate", "Sort: pear fig apple", "--block-add", "0.5"])
    assert result.exit_code != 0 and "--block-add goes with --blocks pipelined --block-length N" in result.output
