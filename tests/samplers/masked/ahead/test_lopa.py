"""LoPA: without branches it equals its base; with branches it equals a plain loop that selects the best branch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import MASK, VOCAB, tiny
from torch import Tensor, nn

import paradec
from paradec import FixedBlocks, PipelinedBlocks
from paradec.models.adapter import Model
from paradec.samplers.masked.ahead.lopa import LoPA
from paradec.samplers.masked.rules.threshold import Threshold

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
pytestmark = pytest.mark.filterwarnings("ignore:cache=")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2)


def commits(out: Any) -> list[list[tuple]]:
    return [sorted(entry[:3] for entry in step.commits) for step in out.trace.steps]


def decode(model: Model, rows: Any = ROWS, **request: Any) -> Any:
    defaults = {"max_new_tokens": 12, "eos_early_stop": False, "trace": True, "seed": 3, "block_length": None}
    return paradec.generate(model, rows, **defaults | request)


@pytest.mark.thinned
@pytest.mark.parametrize("base", ["threshold", "credit"])
@pytest.mark.parametrize("cache", ["none", "dual", "prefix"])
def test_lopa_without_branches_equals_its_base(base: str, cache: str, model: Model) -> None:
    for request in ({"block_length": 6, "temperature": 0.7}, {"blocks": PipelinedBlocks(3, add=0.3)}):
        ours, theirs = (decode(model, sampler=s, cache=cache, **request) for s in (LoPA(base, branches=0), base))
        assert commits(ours) == commits(theirs)
        assert ours.row_nfe == theirs.row_nfe and ours.row_forwards == theirs.row_forwards
        assert ours.forwarded_tokens == theirs.forwarded_tokens


@pytest.mark.parametrize(
    "policies",
    [
        (FixedBlocks(12), FixedBlocks(6)),
        (PipelinedBlocks(3, add=0.3), PipelinedBlocks(2, add=0.5)),
        (PipelinedBlocks(3, add=0.3, full=0.6, forced="active"), PipelinedBlocks(2, add=0, forced="active")),
    ],
    ids=["fixed", "first", "active"],
)
def test_lopa_equals_a_plain_loop(policies: tuple[FixedBlocks, FixedBlocks]) -> None:
    selected_branches, num_filled = set(), 0
    for seed, (tail, alpha, policy_index) in enumerate(((1.0, 0.0, 0), (0.3, 0.1, 1), (0.5, 0.0, 0), (0.4, 0.0, 1))):
        model, policy = tiny(2, seed=seed), policies[policy_index]
        size, add = policy.length, getattr(policy, "add", 1)
        sampler = LoPA(Threshold(0.5), branches=3, alpha=alpha, tail=tail)
        out = decode(model, [[1, 2, 3]], sampler=sampler, blocks=policy)
        canvas, expected, branch_entries, end = [1, 2, 3, *[MASK] * 12], [], [], 3 + size

        def blocks_that_commit(ids: list[int], end: int, policy: Any = policy, size: int = size) -> list[range]:
            """Return the unfinished open blocks that must commit at least one position."""
            blocks = [range(start, start + size) for start in range(3, end, size)]
            masks = [sum(ids[i] == MASK for i in block) for block in blocks]
            first = next((index for index, count in enumerate(masks) if count), len(masks))
            if getattr(policy, "forced", "first") == "first":
                return blocks[first : first + 1]
            is_active = [b <= first or 1 - masks[b - 1] / size >= policy.full for b in range(len(blocks))]
            return [blocks[b] for b in range(len(blocks)) if masks[b] and is_active[b]]

        while MASK in canvas:
            open_ = range(3, end)
            rows = [(canvas, 1.0)]
            for score, position, token in sorted(branch_entries, key=lambda entry: (-entry[0], entry[1]))[:3]:
                rows.append(([*canvas[:position], token, *canvas[position + 1 :]], score))
            evaluated = []
            for ids, draft_score in rows:
                with torch.no_grad():
                    visible = torch.ones(1, 1, 15, 15, dtype=torch.bool)
                    logits = model.module(torch.tensor([ids]), attention_mask=visible, use_cache=False).logits[0]
                logits[:, MASK] = -torch.inf
                p = logits.softmax(-1)
                minus_entropy = {
                    i: float((p[i][p[i] > 0] * p[i][p[i] > 0].log()).sum()) for i in open_ if ids[i] == MASK
                }
                lowest = sorted(minus_entropy.values())[: max(1, int(len(minus_entropy) * tail))]
                future = sum(lowest) / len(lowest) if lowest else 1.0
                evaluated.append((alpha * draft_score + (1 - alpha) * future, ids, p, minus_entropy))
            best = max(range(len(rows)), key=lambda at: (evaluated[at][0], -((at - 1) % len(rows))))
            selected_branches.add(best)
            _, ids, p, minus_entropy = evaluated[best]
            chosen = {i for i in minus_entropy if p[i].max() >= 0.5}
            for block in blocks_that_commit(ids, end):
                masks = [i for i in block if ids[i] == MASK]
                if not chosen & set(masks):
                    chosen.add(max(masks, key=lambda i: (float(p[i].max()), -i)))
            num_filled += blocks_that_commit(ids, end)[:1] not in ([], blocks_that_commit(canvas, end)[:1])
            after = [int(p[i].argmax()) if i in chosen else token for i, token in enumerate(ids)]
            expected.append([(0, i, after[i]) for i in open_ if after[i] != canvas[i]])
            branch_entries = [(minus_entropy[i], i, int(p[i].argmax())) for i in minus_entropy if i not in chosen]
            canvas = after
            remaining = sum(canvas[i] == MASK for i in range(end - size, end))
            if (MASK not in canvas[:end] or size - remaining >= add * size) and end < 15:
                end += size
        assert commits(out) == expected
    is_pipelined = isinstance(policies[0], PipelinedBlocks)
    assert selected_branches >= ({0, 1} if is_pipelined else {0, 1, 2, 3})
    assert (num_filled > 0) == is_pipelined  # number of branches that filled a block


class UniformModule(nn.Module):
    config = SimpleNamespace(vocab_size=VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.zeros(*input_ids.shape, VOCAB, dtype=torch.float64)


def test_ties_go_to_the_first_branch() -> None:
    model = paradec.wrap(UniformModule(), mask_token_id=MASK, prediction="same", topology="bidirectional")
    out = decode(model, [[5]], sampler="lopa", block_length=12, max_new_tokens=7)
    assert [[p for _, p, _ in step] for step in commits(out)] == [[1], [2, 3], [4, 5], [6, 7]]


def test_branches_are_counted_as_row_forwards(model: Model) -> None:
    out = decode(model, [[1, 2, 3]], sampler=LoPA(Threshold(1.0), branches=2), block_length=12)
    remaining, rows = [12], 0
    for step in commits(out):
        rows += 1 + min(2, remaining[-1]) * (len(remaining) > 1)
        remaining.append(remaining[-1] - len(step))
    assert out.nfe == len(out.trace.steps) and out.row_forwards == rows
    assert out.forwarded_tokens == 15 * rows
    num_rejected = [len(step.rejected) for step in out.trace.steps[1:]]
    assert all(number <= min(2, n) for number, n in zip(num_rejected, remaining[1:], strict=False))
    assert sum(num_rejected) > 3


def test_caches_that_are_exact_on_block_causal_models() -> None:
    model = tiny(2, "block_causal")
    outs = [decode(model, sampler="lopa", cache=cache, block_length=4) for cache in ("none", "block", "dual", "prefix")]
    assert all(commits(out) == commits(outs[0]) for out in outs)


def test_nan_logits_of_a_branch_raise_an_error_and_write_nothing(model: Model) -> None:
    # the row of each evaluated canvas: the rows themselves, their first branches, second branches of rows 0 and 2
    sampler, owners = LoPA(Threshold(1.0), branches=2), [0, 1, 2, 0, 1, 2, 0, 2]
    rows = [[1, MASK, MASK, MASK, 2, 3], [4, MASK, MASK, 5, 6, 7], [8, *[MASK] * 4, 9]]
    state = sampler.start(model, rows, max_new_tokens=0, eos_early_stop=False)
    with torch.inference_mode():
        sampler.commit(state, sampler.step(model, state))
        before = state.canvas.clone()
        for index, row in enumerate(owners):
            (query,) = sampler.query(state)
            logits = model(query).clone()
            assert len(logits) == len(owners)
            logits[index] = torch.nan
            with pytest.raises(FloatingPointError, match=f"for row {row} at its step 1") as caught:
                sampler.commit(state, sampler.propose(state, [logits], [query]))
            assert caught.value.rows.tolist() == [row]
            assert torch.equal(state.canvas, before)
