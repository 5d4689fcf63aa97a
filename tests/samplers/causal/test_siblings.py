"""SJD-PAC: recorded verifications, the distribution of a plain version by enumeration, and full decoding."""

import functools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import NEGATIVE, PROMPTS, TableModel, decode_answers, exactness, tiny_base
from oracles.causal import Coin, Draw, Weights, draw, outcomes, siblings_of, sjd_pac_step, toss
from recorded import golden, read_json, replays

from paradec.core import rng
from paradec.samplers.causal.jacobi import Jacobi
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.siblings import RULE, make_sibling_tree
from paradec.samplers.causal.sjd_pac import SJDPAC
from paradec.samplers.causal.state import DRAFT_STREAM

RECORDED = [pytest.param(path, id=path.stem) for path in sorted(golden("drafters").glob("sjd_pac/*.json"))]


@pytest.mark.parametrize("path", RECORDED)
@replays("path")
def test_the_plain_step_replays_a_recorded_verification(path: Path) -> None:
    case = read_json(path)
    expected, vocab = case["expected"], case["vocab"]
    next_probabilities = lambda path: case["laws"][",".join(map(str, path))]  # noqa: E731
    final, next_drafts = sjd_pac_step(case, next_probabilities, draw, toss, last=False)
    assert (final, len(next_drafts)) == (expected["committed"], expected["kept"])
    next_drafts += [
        (int(case["g"][slot] * vocab), [1 / vocab] * vocab) for slot in range(len(next_drafts), case["window"] - 1)
    ]
    counts = [case["siblings"] - 1 if slot < case["branching"] else 0 for slot in range(len(next_drafts))]
    drafts = [siblings_of(q, x, draw, case["t"][slot][: counts[slot]]) for slot, (x, q) in enumerate(next_drafts)]
    assert drafts == expected["drafts"]
    old_firsts = [slot[0] for slot in case["drafts"][len(expected["committed"]) :]]
    pairs = zip(old_firsts, drafts[: expected["kept"]], strict=False)
    assert expected["same"] == [old == slot[0] for old, slot in pairs]
    torch.testing.assert_close(torch.tensor([q for _, q in next_drafts]), torch.tensor(expected["q"]))


@pytest.mark.parametrize("path", RECORDED)
@replays("path")
def test_replays_a_recorded_verification(path: Path) -> None:
    case = read_json(path)
    vocab, width, count, depth = (case[name] for name in ("vocab", "window", "siblings", "branching"))
    expected, model = case["expected"], TableModel.random(case["vocab"], seed=0)
    sampler = SCD(window=width, refresh="maximal", siblings=count, branching=depth)
    state = sampler.start(model, [[0, 1]], max_new_tokens=3 * width)
    num_committed = len(expected["committed"])

    def uniform(rows: Any, positions: torch.Tensor, size: int, stream: Any, ahead: Any = None) -> torch.Tensor:
        result = torch.full((*positions.shape, size), 0.5, dtype=torch.float64)
        streams = torch.as_tensor(stream).expand(positions.shape[1])
        for column, (position, kind) in enumerate(zip(positions[0].tolist(), streams.tolist(), strict=True)):
            slot = position - 2
            if kind == rng.TOKEN_STREAM and slot < width:
                numbers = [case["v"][slot], case["u"][slot][0], case["v"][slot], *case["u"][slot][1:]]
            elif kind == DRAFT_STREAM and 0 <= slot - num_committed < width:
                numbers = [case["g"][slot - num_committed], *case["t"][slot - num_committed]]
            else:
                continue
            result[0, column, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)[:size]
        return result

    state.uniform = uniform  # type: ignore[method-assign]
    firsts = [slot[0] for slot in case["drafts"]]
    state.memory["drafts"][0, : width - 1] = torch.tensor(firsts)
    state.memory["draft_distribution"][0, : width - 1] = torch.tensor(case["q"], dtype=torch.float64)
    state.memory["draft_source"][0] = torch.arange(width)
    paths = [(0,) * slot for slot in range(width)]
    depth = min(depth, width - 1)
    if count > 1:
        others = torch.tensor([slot[1:] for slot in case["drafts"][:depth]])
        state.memory["siblings"][0, :depth] = others
        paths += [path for path in make_sibling_tree(width, count, depth).top.paths if any(path)]
    laws = [case["laws"].get(",".join(map(str, path)), [1 / vocab] * vocab) for path in paths]
    queries = sampler.query(state)
    proposal = sampler.propose(state, [torch.tensor([laws], dtype=torch.float64).log()], queries)
    commit = sampler.commit(state, proposal)
    assert commit.values[commit.selected].tolist() == expected["committed"]
    num_kept, firsts = expected["kept"], [slot[0] for slot in expected["drafts"]]
    drafts, source = state.memory["drafts"][0].tolist(), state.memory["draft_source"][0].tolist()
    assert drafts[:num_kept] == firsts[:num_kept] and drafts[num_kept + 1 : width - 1] == firsts[num_kept + 1 :]
    if num_committed < width:
        assert drafts[num_kept] == draw(case["laws"][",".join("0" * (width - 1))], case["v"][-1])
    for slot in range(num_kept):
        torch.testing.assert_close(
            state.memory["draft_distribution"][0, source[slot]], torch.tensor(expected["q"][slot], dtype=torch.float64)
        )
    for slot in range(depth if count > 1 else 0):
        others = expected["drafts"][slot][1:]
        if slot != num_kept or num_committed == width:
            assert state.memory["siblings"][0, slot].tolist() == others
        remaining_q = torch.tensor([expected["q"][slot]], dtype=torch.float64)
        remaining_q[0, firsts[slot]] = 0
        assert RULE.children(remaining_q, count - 1, torch.tensor([case["t"][slot]])).tolist() == [others]


@pytest.mark.parametrize(
    ("vocab", "length", "siblings", "branching", "window"),
    [
        (3, 4, 1, 1, 3),
        (3, 4, 2, 1, 3),
        (3, 4, 3, 1, 4),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(3, 5, 2, 2, 3), (4, 4, 2, 1, 3), (4, 4, 3, 2, 3)]),
    ],
)
def test_the_plain_steps_have_the_model_s_distribution(
    vocab: int, length: int, siblings: int, branching: int, window: int
) -> None:
    table = TableModel.random(vocab, seed=vocab, sharpness=1.5).table.softmax(-1)

    def after(text: tuple[int, ...]) -> Weights:
        return table[(vocab, *text)[-2] if len(text) > 1 else vocab, text[-1]].tolist()

    guess = tuple([1 / vocab] * vocab)
    numbers = {"u": [[0.0] * siblings] * window, "v": [0.0] * window, "branching": branching}

    def next_windows(next_drafts: list[Any], slots: int) -> list[tuple[float, Any]]:
        """Return all (probability, next window): the remaining drafts, then guesses, each with its siblings."""

        def draw_window(draw: Draw, coin: Coin) -> Any:
            window_drafts = [*next_drafts[:slots]]
            window_drafts += [(draw(list(guess), 0.0), guess) for _ in range(slots - len(window_drafts))]
            counts = [siblings - 1 if slot < branching else 0 for slot in range(slots)]
            return tuple(
                (tuple(siblings_of(list(q), x, draw, [0.0] * count)), tuple(q))
                for (x, q), count in zip(window_drafts, counts, strict=True)
            )

        return outcomes(draw_window)

    states: dict[Any, float] = defaultdict(float)
    for chance, drafts in next_windows([], min(window, length) - 1):
        states[(0,), drafts] += chance
    distribution: dict[Any, float] = defaultdict(float)
    while states:
        (text, drafts), weight = states.popitem()
        case = numbers | {"drafts": [list(slot) for slot, _ in drafts], "q": [list(q) for _, q in drafts]}

        def after_path(path: tuple[int, ...], text: Any = text, case: Any = case) -> Weights:
            return after((*text, *(case["drafts"][slot][child] for slot, child in enumerate(path))))

        for chance, (final, next_drafts) in outcomes(functools.partial(sjd_pac_step, case, after_path, last=True)):
            longer = (*text, *final)
            if len(longer) == length + 1:
                distribution[longer] += weight * chance
                continue
            for window_chance, next_window in next_windows(next_drafts, min(window, length + 1 - len(longer)) - 1):
                states[longer, next_window] += weight * chance * window_chance
    max_difference = 0.0
    for text, chance in distribution.items():
        expected = 1.0
        for end in range(1, length + 1):
            expected *= after(text[:end])[text[end]]
        max_difference = max(max_difference, abs(chance - expected))
    assert len(distribution) == vocab**length and max_difference < 1e-12


MODEL = TableModel.random(5, seed=0)
SHAPES = [(2, 1, 6), (3, 2, 4), (4, 1, 3), (2, 3, 4), (6, 2, 3)]
"""(drafts per branching slot, number of branching slots, window)"""


@pytest.mark.parametrize(("siblings", "branching", "window"), SHAPES)
def test_every_step_of_a_batch_equals_the_plain_step(siblings: int, branching: int, window: int) -> None:
    sampler = SCD(window=window, refresh="maximal", siblings=siblings, branching=branching)
    prompts, answer, lengths = [[2, 0], [4, 1, 3], [1, 2, 2, 0]], 9, set()
    state = sampler.start(MODEL, prompts, max_new_tokens=answer, seed=5)
    while not state.done:
        rows, width = state.rows, state.width
        before = {name: state.memory[name].clone() for name in ("drafts", "draft_source", "siblings")}
        q_before, start = state.memory["draft_distribution"].clone(), state.committed.copy()
        uniform = state.uniform(rows, state.positions(rows), 2 + siblings, rng.TOKEN_STREAM)
        commit = sampler.commit(state, sampler.step(MODEL, state))
        for index, row in enumerate(rows.tolist()):
            slots = min(width, int(state.length[row] - start[row]))
            depth = min(branching, slots - 1)
            case: dict[str, Any] = {"branching": min(branching, width - 1), "v": uniform[index, :, 2].tolist()}
            case["u"] = [[numbers[1], *numbers[3:]] for numbers in uniform[index].tolist()]
            sources, guess = before["draft_source"][row].tolist(), [1 / 5] * 5
            case["q"] = [q_before[row, source].tolist() if source >= 0 else guess for source in sources[: slots - 1]]
            firsts, others = before["drafts"][row].tolist(), before["siblings"][row].tolist()
            case["drafts"] = [[firsts[slot], *(others[slot] if slot < depth else [])] for slot in range(slots - 1)]
            text = state.canvas[row, : start[row]].tolist()

            def next_probabilities(path: tuple[int, ...], text: Any = text, case: Any = case) -> Weights:
                tokens = [*text, *(case["drafts"][slot][child] for slot, child in enumerate(path))]
                return MODEL.table[tokens[-2], tokens[-1]].softmax(-1).tolist()

            case["end"] = float(uniform[index, slots - 1, 0])
            committed, next_drafts = sjd_pac_step(case, next_probabilities, draw, toss, last=True)
            assert commit.values[index][commit.selected[index]].tolist() == committed
            assert state.memory["drafts"][row, : len(next_drafts)].tolist() == [x for x, _ in next_drafts]
            if len(committed) > 1 and case["drafts"][0].index(committed[0]) > 0:
                lengths.add(min(len(committed), 3))
            if state.committed[row] < state.end[row]:
                t = state.uniform(np.array([row]), state.positions(np.array([row])), siblings, DRAFT_STREAM)[0, :, 1:]
                for slot, (x, q) in enumerate(next_drafts[: min(branching, width - 1)]):
                    expected = siblings_of(q, x, draw, t[slot].tolist())
                    assert state.memory["siblings"][row, slot].tolist() == expected[1:]
    assert lengths  # at least one accepted path leaves the chain of first drafts


@pytest.mark.parametrize("request_", [{"temperature": 0.8, "top_k": 3}, {"guidance_scale": 1.7, "logprobs": 2}])
@pytest.mark.parametrize(("siblings", "branching"), [(2, 1), (4, 2)])
def test_siblings_change_no_token_and_save_forwards(siblings: int, branching: int, request_: dict[str, Any]) -> None:
    """A token is argmax(log p + g) with the position's Gumbel noise g, so it does not depend on the drafts."""
    base, request = tiny_base(), {"max_new_tokens": 24, "seed": 3} | request_
    request |= {"negative_prompt": NEGATIVE} if "guidance_scale" in request_ else {}
    expected, alone = decode_answers(Jacobi(window=6), base, PROMPTS, **request)
    tokens, state = decode_answers(SCD(window=6, siblings=siblings, branching=branching), base, PROMPTS, **request)
    assert tokens == expected and state.nfe.sum() < alone.nfe.sum()
    if state.logprobs is not None:
        for name in ("chosen", "best"):
            values, expected_values = (getattr(run.logprobs, name) for run in (state, alone))
            torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("refresh", ["maximal", "gumbel"])
@pytest.mark.parametrize(
    ("siblings", "branching", "window"), [(3, 2, 4), pytest.param(8, 1, 4, marks=pytest.mark.full)]
)
def test_answers_have_the_model_s_distribution(refresh: str, siblings: int, branching: int, window: int) -> None:
    sampler = SCD(window=window, refresh=refresh, siblings=siblings, branching=branching)
    long = TableModel.random(3, seed=4, sharpness=2.0)
    image = TableModel.random(6, seed=2)
    for model, request in ((long, {"new": 7}), (image, {"grid": exactness.GRID}), (MODEL, exactness.REQUESTS["all"])):
        result = exactness.test_case(sampler, model, 2000, seed=4, **request)
        assert min(result["p_values"]) > 0.01 / 12 and result["nfe"] < 6


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("sampler", [SJDPAC(window=4), SJDPAC(window=4, siblings=4, branching=3), SCD(4, siblings=4)])
def test_twenty_thousand_answers_have_the_model_s_distribution(sampler: SCD, temperature: float) -> None:
    result = exactness.test_case(sampler, MODEL, 20_000, seed=9, temperature=temperature)
    assert min(result["p_values"]) > 0.01 / 12
