"""Verification of drafts: recorded cases, chi-square tests, rules of trees, and initial drafts on image grids."""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import GRID, RecordingModel, TableModel, exactness
from recorded import distance_to_bounds, golden, near_tie_or_refused, read_json, read_json_unrecorded, replays
from torch import Tensor

import paradec
from paradec.core.protocol import Commit, Proposal, decode
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.gsd import GSD
from paradec.samplers.causal.lantern import LanternRule, relaxed_probability
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.sjd import SJD, verify
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import RULES, Tree, TreeRule, WithoutReplacement, normalize, walk
from paradec.samplers.causal.window import INITS, ONE_HOT, REFRESHES, DraftDistributions, DraftWindow, read_drafts


def cases(*families: str) -> list[Any]:
    """Return the recorded verifications of these methods as parameters. "scd_maximal" belongs to "scd"."""
    return [
        pytest.param(path, id=path.stem)
        for family in families
        for path in sorted(golden(family).rglob("*.json"))
        if read_json_unrecorded(path)["method"].partition("_")[0] == family
    ]


def sampler_of(case: dict[str, Any]) -> SJD:
    if case["method"] == "gsd":
        names = {"group_half_width": "half_width", "p_threshold": "p_thr", "d_threshold": "d_thr"}
        return GSD(**{name: case["settings"][published_name] for name, published_name in names.items()})
    return SCD(refresh="maximal") if case["method"].startswith("scd") else SJD()


@pytest.mark.parametrize("path", cases("sjd", "gsd", "scd"))
@replays("path")
def test_reference_verification(path: Path) -> None:
    """Verify with the recorded random numbers. In the public code all rows of a batch commit as many tokens as the row
    with the fewest accepted drafts; in paradec the rows commit independently."""
    case = read_json(path)
    sampler, expected, settings = sampler_of(case), case["expected"], case["settings"]
    p = torch.tensor(case["p"], dtype=torch.float64)
    rows, width, size = p.shape
    assert [rows, width, size] == [settings["batch"], settings["window"], settings["V"]]
    assert int((p > 0).sum(-1).max()) <= (settings.get("top_k") or size)  # top_k 0 means no limit
    # the distribution of slot i - 1 verifies the recorded draft i
    q, tokens, u_accept = (torch.tensor(case[name]).roll(-1, dims=1) for name in ("q", "drafts", "u_accept"))
    q, u_accept = q.double(), u_accept.double()
    drafts = DraftDistributions(tokens, q, torch.arange(width).expand(rows, -1), torch.full((size,), 1 / size))
    drafted = (torch.arange(width) < width - 1).expand(rows, -1)
    fresh = draw(p, torch.tensor(case["u_fresh"], dtype=torch.float64))
    embed = torch.tensor(case["embed"], dtype=torch.float64) if "embed" in case else None
    window = DraftWindow(p, drafts, fresh, embed)
    chance = sampler.accept(window)
    # `u_residual` lists numbers of rejected drafts, row by row; without the maximal coupling only of a row's first
    is_rejected = drafted & (u_accept >= chance)
    is_first = is_rejected & (is_rejected.int().cumsum(1) == 1)
    has_number = is_rejected if sampler.refresh == "maximal" else is_first
    u_residual = torch.full((rows, width), 0.5, dtype=torch.float64)
    u_residual[has_number] = torch.tensor(case["u_residual"][: int(has_number.sum())], dtype=torch.float64)
    uniform = torch.stack((u_accept, u_residual), -1)
    result = verify(window, drafted, chance, uniform, sampler.refresh, sampler.resamples)
    acceptance_gap = (chance - u_accept)[drafted].abs().min().item()
    with near_tie_or_refused(lambda: min(acceptance_gap, distance_to_bounds(p, case["u_fresh"]))):
        assert result.tokens.tolist() == expected["tokens"]
        assert (result.accepted.squeeze(1) + 1).tolist() == expected["first_reject_slot"]
        matched = int(result.accepted.min()) + 1
        assert matched == expected["matched"]
        assert result.tokens[:, :matched].tolist() == expected["commit"]
        assert result.tokens[:, matched:].tolist() == expected["next_drafts"]


@pytest.mark.parametrize("path", cases("lantern"))
@replays("path")
def test_reference_tree_verification(path: Path) -> None:
    case = read_json(path)
    settings, expected = case["settings"], case["expected"]
    paths = [tuple(choice) for choice in case["tree_choices"]]
    tree = Tree(tuple(paths))
    order = [0, *(1 + paths.index(node) for node in tree.paths)]
    p, q = (torch.tensor(case[name], dtype=torch.float64)[order].unsqueeze(0) for name in ("p", "q"))
    drafts = torch.tensor([case["node_tokens"]])[:, order]
    embed = torch.tensor(case["embed"], dtype=torch.float64)
    additive = settings["delta"] <= 1  # in the public code a delta above 1 means lambda
    near = settings["k"] if settings["lantern"] else 0
    rule = LanternRule(embed, near, additive, settings["delta"], settings["mode"] == "static")
    numbers, used, node = case["u_accept"], 0, 0
    uniform = torch.full((1, tree.depth + 1, tree.children.shape[1] + 1), case["u_final"], dtype=torch.float64)
    for depth in range(tree.depth + 1):  # the accepted path determines which draft the next number belongs to
        children = [child for child in tree.children[node].tolist() if child >= 0]
        ids = drafts[0, children].tolist()
        tried = [i for i, token_id in enumerate(ids) if token_id not in ids[:i]]
        for i, number in zip(tried, numbers[used:], strict=False):
            uniform[0, depth, i] = number
        result = walk(tree, drafts, p, q, rule, uniform, accepts_matching_draw=False)
        if int(result.accepted) == depth:
            used += len(tried)
            break
        node = int(result.nodes[0, depth + 1])
        used += tried.index(children.index(node)) + 1
    accepted = int(result.accepted)
    assert used == case["n_u_used"] and accepted == expected["accept_length"]
    assert [int(drafts[0, 0]), *result.tokens[0, :accepted].tolist()] == expected["accepted"]
    assert case["candidates"][expected["best_candidate"]][: accepted + 1] == expected["accepted"]
    leaves = {(0, *(1 + paths.index(node[: depth + 1]) for depth in range(len(node)))) for node in paths}
    routes = {tuple(case["node_tokens"][node] for node in route) for route in leaves}
    assert all(tuple(token for token in row if token >= 0) in routes for row in case["candidates"])
    assert p.shape == (1, 1 + len(paths), settings["V"])
    if settings["mode"] == "static":  # q of the parent gives the probability of a first child
        parents = [0 if len(node) == 1 else 1 + paths.index(node[:-1]) for node in paths]
        q_of_drafts = [case["q"][parent][token] for parent, token in zip(parents, case["node_tokens"][1:], strict=True)]
        for index, node in enumerate(paths):
            if node[-1] == 0:
                assert case["draft_cond_prob"][1 + index] == pytest.approx(q_of_drafts[index], rel=1e-5)
    distribution = torch.tensor(expected["final_law"], dtype=torch.float64)
    torch.testing.assert_close(normalize(result.weights)[0], distribution, rtol=0, atol=1e-7)
    assert int(result.tokens[0, accepted]) == expected["final_token"]


ROWS = 4000
MODEL = TableModel.random(5, seed=0)
DRAFTER = TableModel.random(5, seed=1, near=MODEL)
EXACT = [
    ("sjd, window 4", "temperature 1"), ("sjd, window 2", "all"), ("sjd, one-hot q", "top-p 0.8"),
    ("sjd, keep", "temperature 0.7"), ("sjd, sample", "top-k 3"), ("scd, gumbel", "temperature 1"),
    ("scd, gumbel", "all"), ("scd, maximal", "temperature 1"), ("scd, maximal", "guidance 2"),
    ("jacobi", "temperature 0.7"), ("speculative, window 4", "all"), ("speculative, recursive tree", "temperature 1"),
    ("speculative, without_replacement tree", "guidance 2"), ("speculative, k_seq tree", "top-k 3"),
    ("speculative, naive tree", "temperature 0.7"), ("speculative, greedy tree", "top-p 0.8"),
]  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "request_name"), EXACT)
def test_answers_have_the_model_s_distribution(name: str, request_name: str) -> None:
    sampler, request = exactness.samplers(DRAFTER)[name], exactness.REQUESTS[request_name]
    result = exactness.test_case(sampler, MODEL, ROWS, seed=EXACT.index((name, request_name)), **request)
    assert min(result["p_values"]) > 0.01 / (2 * len(EXACT))
    assert result["nfe"] < 4


LONG_MODEL = TableModel.random(3, seed=4, sharpness=2.0)
LONG_SETTINGS = list(itertools.product(REFRESHES, [init for init in INITS if not init.endswith("vertical")]))


@pytest.mark.thinned
@pytest.mark.parametrize(("refresh", "init"), LONG_SETTINGS)
def test_answers_longer_than_the_window_have_the_model_s_distribution(refresh: str, init: str) -> None:
    sampler = SJD(window=3, refresh=refresh, init=init)
    result = exactness.test_case(sampler, LONG_MODEL, 8000, seed=LONG_SETTINGS.index((refresh, init)), new=7)
    assert min(result["p_values"]) > 0.01 / (2 * len(LONG_SETTINGS))
    assert result["nfe"] < 7


@pytest.mark.parametrize("init", INITS)
def test_images_have_the_model_s_distribution(init: str) -> None:
    image = TableModel.random(6, seed=2)
    result = exactness.test_case(SJD(window=4, init=init), image, ROWS // 2, seed=7, grid=exactness.GRID)
    assert min(result["p_values"]) > 0.01 / (2 * len(INITS))
    assert result["nfe"] < 4  # an image has seven tokens, three of which the grid prescribes


@dataclass(frozen=True)
class OldDistribution(SCD):
    """Wrong: retained drafts get the old q, like in the public code of the maximal coupling."""

    refresh: str = "maximal"

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        drafts = read_drafts(state, proposal.rows)
        commit = super().commit(state, proposal)
        count = commit.selected.sum(1, keepdim=True)
        slot = torch.arange(state.width)
        old_slot = (slot + count).clamp(max=state.width - 1)
        is_retained = (commit.values == drafts.tokens).gather(1, old_slot) & (slot + count < state.width - 1)
        all_q = state.memory["draft_distribution"].clone()
        old_q = drafts.distributions(old_slot)
        rows = torch.as_tensor(proposal.rows)
        source = state.memory["draft_source"][rows]
        for i in range(state.width):  # slot i of the next window is slot i + count of this window
            slot_q = torch.where(is_retained[:, i, None], old_q[:, i], all_q[rows, source[:, i].clamp(min=0)])
            all_q[rows, source[:, i].clamp(min=0)] = torch.where(source[:, i, None] >= 0, slot_q, all_q[rows, 0])
        state.memory["draft_distribution"] = all_q
        return commit


@dataclass(frozen=True)
class WrongGuessDistribution(SJD):
    """Wrong: guesses are drawn from another distribution than the reported q."""

    def guess(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        guess, source = super().guess(*arguments)
        return guess.minimum(guess.roll(1, 1)), source


@dataclass(frozen=True)
class FilteredResidual(SJD):
    """Wrong: the residual of a rejected draft is sharpened, as if logits processors ran twice."""

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        with pytest.MonkeyPatch.context() as patch:
            residual = sys.modules["paradec.samplers.causal.sjd"].residual
            patch.setattr("paradec.samplers.causal.sjd.residual", lambda p, q: residual(p, q) ** 2)
            return super().commit(state, proposal)


@dataclass(frozen=True)
class NewDistribution(SJD):
    """Wrong: the reported q of retained drafts is this step's distribution, but they were drawn from an older one."""

    refresh: str = "keep"

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paradec.samplers.causal.sjd.verify", lambda *a: verify(*a)._replace(keeps_draft=None))
            return super().commit(state, proposal)


class UnchangedQ(WithoutReplacement):
    """Wrong: drafts that were drawn without replacement are verified with an unchanged q."""

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chance, next_p, _ = super().step(p, q, x)
        return chance, next_p, q


@pytest.mark.thinned
@pytest.mark.parametrize("wrong_sampler", [OldDistribution, WrongGuessDistribution, FilteredResidual])
def test_chi_square_tests_detect_wrong_samplers(wrong_sampler: type[SJD]) -> None:
    settings = {"guess_distribution": "one_hot"} if wrong_sampler is FilteredResidual else {}
    sampler = wrong_sampler(window=4, **settings)
    assert min(exactness.test_case(sampler, MODEL, 10_000, seed=1)["p_values"]) < 1e-5


@pytest.mark.thinned
@pytest.mark.parametrize("init", ["random", "sample_horizontal"])
def test_chi_square_tests_of_long_answers_detect_a_wrong_q_of_retained_drafts(init: str) -> None:
    result = exactness.test_case(NewDistribution(window=3, init=init), LONG_MODEL, 8000, seed=1, new=7)
    assert max(result["p_values"]) < 1e-10


@pytest.mark.parametrize("name", [*RULES, "wrong"])
def test_the_output_of_a_node_has_the_distribution_p(name: str) -> None:
    rule: TreeRule = UnchangedQ() if name == "wrong" else RULES[name]
    generator = torch.Generator().manual_seed(3)
    tree, rows, p_values = Tree.from_setting((3,)), 20_000, []
    for size, support in ((4, 4), (7, 7), (5, 2)):
        p, q = (torch.randn(size, generator=generator, dtype=torch.float64).exp() for _ in range(2))
        q[q.topk(size - support, largest=False).indices] = 0
        p, q = (normalize(distribution).expand(rows, -1) for distribution in (p, q))
        noise = torch.rand(rows, 2, 4, generator=generator, dtype=torch.float64)
        drafts = torch.cat((torch.zeros(rows, 1, dtype=torch.int64), rule.children(q, 3, noise[:, 0, :3])), 1)
        uniform = torch.rand(rows, 2, 4, generator=generator, dtype=torch.float64)
        distributions = [distribution.unsqueeze(1).expand(-1, 4, -1) for distribution in (p, q)]
        result = walk(tree, drafts, *distributions, rule, uniform)
        counts = np.bincount(result.tokens[:, 0].numpy(), minlength=size)
        p_values.append(exactness.p_value(counts, p[0].numpy()))
        # an accepted draft continues below the matching child
        is_accepted = result.accepted > 0
        accepted_drafts = drafts.gather(1, result.nodes[:, 1:2].clamp(min=0)).squeeze(1)
        assert (accepted_drafts == result.tokens[:, 0])[is_accepted].all()
        assert (result.tokens[is_accepted, 1] >= 0).all() and (result.tokens[~is_accepted, 1] < 0).all()
        assert is_accepted.double().mean() > 0.2
    assert (min(p_values) < 1e-5) if name == "wrong" else (min(p_values) > 1e-3)


@pytest.mark.parametrize("name", RULES)
def test_a_node_is_verified_alike_in_a_wider_tree(name: str) -> None:
    rule, generator, rows = RULES[name], torch.Generator().manual_seed(5), 500
    p, q = (torch.randn(rows, 6, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    for count in (1, 2, 3):
        noise, uniform, more = torch.rand(3, rows, 3, generator=generator, dtype=torch.float64)
        drafts = rule.children(q, count, noise[:, :count])
        chosen, residual = rule.verify(p, q, drafts, uniform[:, :count])
        wide = torch.cat((drafts, torch.full((rows, 2), -1)), 1)
        wide_result = rule.verify(p, q, wide, torch.cat((uniform[:, :count], more[:, :2]), 1))
        assert torch.equal(wide_result[0], chosen) and torch.equal(wide_result[1], residual)
        assert (chosen >= 0).any()


def test_the_bias_of_lossy_methods_stays_below_their_bound() -> None:
    exact = exactness.bias(SJD(window=4), MODEL, 3000)
    sampling_noise = np.mean(exact["total_variation"])
    assert exact["total_variation_bound"] == 0
    for name, sampler, model in exactness.lossy():
        if sampler.guess_distribution == "one_hot" and not name.endswith(("width 2", "delta 0.1", "lambda 5.0")):
            continue
        result = exactness.bias(sampler, model, 3000)
        assert np.mean(result["total_variation"]) <= sampling_noise + 1.2 * result["total_variation_bound"]
        if sampler.guess_distribution == "one_hot":
            continue
        if name.endswith(("delta 0.0", "lambda 1.0")):
            assert result["total_variation_bound"] == 0 and result["nfe"] == exact["nfe"]
        elif name.endswith(("delta 0.1", "lambda 5.0")):
            assert result["nfe"] < exact["nfe"] and np.mean(result["total_variation"]) > 1.2 * sampling_noise


def test_acceptance_and_sampling_with_numbers_at_their_bounds() -> None:
    """A draft is accepted if its uniform number is below the acceptance probability. In sampling, a uniform
    number selects the first token with a larger cumulative probability."""
    distribution = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    drafts = DraftDistributions(
        torch.tensor([[0, 0]]), distribution, torch.tensor([[ONE_HOT, ONE_HOT]]), torch.tensor([0.5, 0.5])
    )
    for number, accepted in ((0.25, 0), (np.nextafter(0.25, 0), 1)):
        uniform = torch.tensor([[[number, 0.9], [0.9, 0.9]]], dtype=torch.float64)
        chance, drafted = torch.tensor([[0.25, 0.5]], dtype=torch.float64), torch.tensor([[True, False]])
        result = verify(DraftWindow(distribution, drafts, torch.tensor([[1, 1]])), drafted, chance, uniform)
        assert int(result.accepted) == accepted
        for rule, q in (("recursive", [1.0, 0.0]), ("naive", [0.5, 0.5])):
            numbers = torch.tensor([[number]], dtype=torch.float64)
            every_q = torch.tensor([q], dtype=torch.float64)
            chosen, _ = RULES[rule].verify(distribution[:, 0], every_q, torch.tensor([[0]]), numbers)
            assert int(chosen) == accepted - 1, rule
    weights = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).expand(4, 3)
    assert draw(weights, torch.tensor([0.2, 0.25, 0.5, 0.75], dtype=torch.float64)).tolist() == [0, 1, 2, 2]


def test_groups_of_gsd_and_neighbours_of_lantern_at_their_bounds() -> None:
    """GSD's thresholds are exclusive. A draft with exactly `group_half_width` less likely tokens has a group."""
    distribution = torch.tensor([[[0.0625, 0.25, 0.5, 0.1875]]], dtype=torch.float64)
    drafts = DraftDistributions(torch.tensor([[2]]), distribution, torch.tensor([[ONE_HOT]]), distribution[0, 0])
    latents = torch.tensor([[9.0], [0.5], [0.0], [-9.0]], dtype=torch.float64)  # token 1 is near the draft
    more = float(np.nextafter(0.25, 1))
    for p_threshold, d_threshold, expected in ((0.25, 1, 0.5), (more, 1, 0.75), (1, 0.25, 0.5), (1, more, 0.75)):
        sampler = GSD(group_half_width=1, p_threshold=p_threshold, d_threshold=d_threshold)
        assert float(sampler.accept(DraftWindow(distribution, drafts, drafts.tokens, latents))) == expected
    for half, expected in ((3, 1.0), (4, 0.5)):
        sampler = GSD(group_half_width=half, p_threshold=1, d_threshold=None)
        assert float(sampler.accept(DraftWindow(distribution, drafts, drafts.tokens))) == expected
    distribution, near = torch.tensor([[0.25, 0.25, 0.125, 0.375]], dtype=torch.float64), torch.tensor([[1, 2, 3]])
    for additive, bound, expected in ((True, 0.25, 0.5), (False, 2.0, 0.5), (True, 0.375, 0.625), (True, 0.24, 0.25)):
        assert float(relaxed_probability(distribution, torch.tensor([0]), near, additive, bound)[0]) == expected


def test_the_layout_of_a_grid_and_its_codes() -> None:
    assert GRID.stride == 4 and GRID.length == 15
    assert GRID.layout.tolist() == [0, *[-1, -1, -1, 8] * 3, 9, 1]
    tokens = torch.tensor([[0, 2, 3, 4, 8, 5, 6, 7, 8, 2, 2, 2, 8, 9, 1]])
    assert GRID.codes(tokens).tolist() == [[[0, 1, 2], [3, 4, 5], [0, 0, 0]]]
    tokens[0, 1] = 9
    with pytest.raises(ValueError, match="not in the grid's image_ids"):
        GRID.codes(tokens)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("window", [3, 6])
def test_drafts_keep_the_grid_s_structure_and_inits_copy_neighbours(init: str, window: int) -> None:
    model, sampler = RecordingModel(), SJD(window=window, init=init)
    state = sampler.start(model, [[3, 1], [2], [7, 7, 7]], grid=GRID, seed=0)
    start = torch.tensor([[2], [1], [3]])
    num_copied = 0
    while not state.done:
        drafts, source = state.memory["drafts"], state.memory["draft_source"]
        positions = state.positions(np.arange(3))
        prescribed = state.prescribed_tokens(np.arange(3), positions)
        is_inside = positions - start < GRID.length
        # the grid prescribes some tokens; all other guesses are image tokens
        assert torch.equal(drafts[(prescribed >= 0) & is_inside], prescribed[(prescribed >= 0) & is_inside])
        assert ((drafts >= 2) & (drafts < 8))[(prescribed < 0) & is_inside].all()
        if init != "random":
            is_copied = (source == ONE_HOT) & (prescribed < 0) & is_inside
            committed = torch.as_tensor(state.committed)[:, None]
            for row, slot in is_copied.nonzero().tolist():
                position = int(positions[row, slot])
                column = (position - int(start[row]) - 1) % GRID.stride
                if init == "repeat_vertical":
                    known_end = committed[row] + int((source[row] >= 0).sum())
                    above = position - GRID.stride
                    while above >= known_end:
                        above -= GRID.stride
                    is_committed = above < committed[row]
                    token_id = state.canvas[row, above] if is_committed else drafts[row, above - committed[row]]
                    assert above > int(start[row]) and drafts[row, slot] == token_id
                elif init.endswith("horizontal"):
                    assert column > 0
                num_copied += 1
        sampler.commit(state, sampler.step(model, state))
    answers = state.canvas.gather(1, start + torch.arange(GRID.length))
    layout = GRID.layout.expand(3, -1)
    assert torch.equal(answers[layout >= 0], layout[layout >= 0])
    assert GRID.codes(answers).shape == (3, 3, 3)
    assert (init == "random") == (num_copied == 0)


def test_images_are_greedy_at_temperature_0() -> None:
    model = TableModel.random(10, seed=4)
    expected = SJD(window=1).start(model, [[3, 1], [2]], grid=GRID, temperature=0)
    decode(SJD(window=1), model, expected)
    for name, init in itertools.product(("sjd", "scd"), INITS):
        sampler = paradec.samplers.create(name, window=6, init=init)
        state = sampler.start(model, [[3, 1], [2]], grid=GRID, temperature=0, seed=1)
        decode(sampler, model, state)
        assert torch.equal(state.canvas, expected.canvas) and (state.nfe < expected.nfe).all()
