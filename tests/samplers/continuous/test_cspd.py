"""CSpD: replays of the public code on small models, comparison of the rule with a plain loop, and properties."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from images import random_mar
from oracles.pictures import cspd_token
from recorded import checksum, image_case, image_cases, replays
from torch import Tensor

import paradec
from paradec.core.protocol import Sampler, decode
from paradec.models.images.continuous import ContinuousQuery, TokenDistribution, solver
from paradec.models.images.mar import MAR, MARModel
from paradec.samplers.pictures.cspd import CSpD, parse_head_steps, verify_drafts

ABSOLUTE, RELATIVE = 2e-4, 1e-3


def recorded_model(name: str) -> MARModel:
    sizes, weights = image_case("cspd", f"{name}.config")
    module = MAR(
        side=sizes["img_size"] // sizes["vae_stride"], channels=sizes["vae_embed_dim"],
        width=sizes["encoder_embed_dim"], depth=sizes["encoder_depth"], decoder_depth=sizes["decoder_depth"],
        heads=sizes["encoder_num_heads"], classes=sizes["class_num"], buffer=sizes["buffer_size"],
        head_depth=sizes["diffloss_d"], head_width=sizes["diffloss_w"], eps=sizes["layer_norm_eps"],
    )  # fmt: skip
    module.load_state_dict(weights)
    return MARModel(module, name=name)


@dataclass
class RecordedDraws:
    """The random numbers of a recorded run."""

    initial_noise: Tensor
    step_noise: Tensor  # of the diffusion steps
    first_verified: int  # index of the first commit with a verification
    uniform: list[Tensor]  # for each verification, the numbers that decide acceptance
    redraws: list[list[tuple[Tensor, Tensor]]]  # for each verification and round, noise and uniform numbers

    @staticmethod
    def from_case(case: dict[str, Any], arrays: dict[str, Tensor]) -> RecordedDraws:
        numbers = iter(arrays[name] for name, _, _ in case["draws"])
        initial_noise, step_noise = next(numbers), next(numbers)
        uniform, redraws = [], []
        for step in case["steps"]:
            if step["kind"] == "verify":
                uniform.append(next(numbers))
                redraws.append([(next(numbers), next(numbers)) for _ in range(step["verified"]["redraw_rounds"])])
        assert next(numbers, None) is None
        num_unverified = sum(step["kind"] == "target" for step in case["steps"])
        return RecordedDraws(initial_noise, step_noise, num_unverified, uniform, redraws)

    def chain(self, positions: Tensor, steps: int, channels: int) -> Tensor:
        # entry i of the third dimension is used at diffusion step i
        noise = torch.cat((self.initial_noise.unsqueeze(2), self.step_noise.flip(2)), 2)
        assert noise.shape[2:] == (steps + 1, channels)
        return noise[torch.arange(len(positions)).unsqueeze(1), positions]

    def accept(self, commit: int, at: Tensor) -> Tensor:
        return self.uniform[commit - self.first_verified].view_as(at)

    def redraw(self, commit: int, number: int, rows: Tensor, at: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        return self.redraws[commit - self.first_verified][number]  # for all tokens, row by row


@pytest.mark.parametrize("name", image_cases("cspd", "steps"))
@replays("name", "cspd/")
def test_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arrays = image_case("cspd", name)
    settings = case["settings"]
    target, draft = (recorded_model(case[role]) for role in ("target", "draft"))
    same_names = {name: settings[name] for name in ("num_draft", "ratio", "inner_temperature", "temperature")}
    head_steps, schedule = settings["num_sampling_steps"], settings["cfg_schedule"]
    sampler = CSpD(draft, mended=False, head_steps=head_steps, guidance_schedule=schedule, **same_names)
    diverges = float(arrays["latent"].abs().max()) > 100  # latents of random networks can diverge

    def assert_near(actual: Tensor, expected: Tensor) -> None:
        atol = max(1.0, float(expected.abs().max())) * RELATIVE if diverges else ABSOLUTE
        torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=0)

    def assert_sum(actual: Tensor, expected: list[float]) -> None:
        atol = RELATIVE * max(1.0, expected[2]) if diverges else ABSOLUTE
        assert checksum(actual) == pytest.approx(expected, abs=atol)

    assert solver(parse_head_steps(settings["num_sampling_steps"]))[0] == case["timestep_map"]
    draft_calls: list[tuple[ContinuousQuery, Tensor]] = []
    original_call = MARModel.__call__

    def record_draft(self: MARModel, query: ContinuousQuery) -> Any:
        output = original_call(self, query)
        if self is draft:
            draft_calls.append((query, output.tokens))
        return output

    monkeypatch.setattr(MARModel, "__call__", record_draft)
    request = {"steps": settings["num_iter"], "guidance_scale": settings["cfg"], "order": torch.tensor(case["orders"])}
    state = sampler.start(target, settings["labels"], draws=RecordedDraws.from_case(case, arrays), **request)
    steps = iter(enumerate(case["steps"]))
    while not state.done:
        draft_calls.clear()
        tokens = state.tokens
        (query,) = sampler.query(state)
        output = target(query)
        proposal = sampler.propose(state, [output], [query])
        index, step = next(steps)
        for call, values in draft_calls:
            assert step["kind"] == "draft" and call.wanted.tolist() == step["positions"]
            num_known = call.tokens.shape[1] + call.wanted.shape[1]
            assert max(state.order.shape[1] - num_known, 1) == step["unknown_after"]
            tokens = tokens.scatter(1, call.wanted.unsqueeze(-1).expand_as(values), values.to(tokens.dtype))
            assert_sum(values, step["values"])
            assert_sum(tokens, step["tokens"])
            index, step = next(steps)
        assert step["kind"] == ("verify" if draft_calls else "target")
        assert query.wanted.tolist() == step["positions"]
        assert_sum(output.tokens, step["values"])
        if f"step.{index}.values" in arrays:
            assert_near(output.tokens.flatten(0, 1), arrays[f"step.{index}.values"])
        sampler.commit(state, proposal)
        if draft_calls:
            assert proposal.draft is not None and proposal.verdict is not None
            for side, distribution in (("x1", proposal.draft), ("x2", proposal.target)):
                assert_near(distribution.mean.flatten(0, 1), arrays[f"verify.{index}.{side}_mean"])
                assert_near(distribution.std.flatten(0, 1), arrays[f"verify.{index}.{side}_std"])
                assert_near(distribution.half_log_variance.flatten(0, 1), arrays[f"verify.{index}.{side}_log_var"])
            verdict, expected = proposal.verdict, step["verified"]
            assert verdict.ratio.tolist() == pytest.approx(expected["ratio"], rel=2e-3, abs=1e-6)
            assert verdict.log_sigma.exp().tolist() == pytest.approx(expected["Sigma"], rel=2e-3)
            assert verdict.rounds == expected["redraw_rounds"]
            assert_near(verdict.values, arrays[f"verify.{index}.result"])
        else:
            positions = query.wanted.unsqueeze(-1).expand_as(output.tokens)
            assert_near(state.tokens, tokens.scatter(1, positions, output.tokens))
            assert_sum(state.tokens, step["tokens"])
    assert next(steps, None) is None
    assert_near(target.image(state.tokens), arrays["latent"])
    assert_sum(target.image(state.tokens), case["latent"])
    assert state.nfe.tolist() == [case["target_calls"]] * len(settings["labels"])
    assert state.draft_nfe.tolist() == [case["draft_calls"]] * len(settings["labels"])


@pytest.mark.parametrize("name", image_cases("cspd", "accepted"))
@replays("name", "cspd/")
def test_replays_the_rule(name: str) -> None:
    case, arrays = image_case("cspd", name)
    draft, target = (
        TokenDistribution(arrays[f"{side}_mean"], arrays[f"{side}_std"], arrays[f"{side}_log_var"])
        for side in ("x1", "x2")
    )

    def redraw(number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return arrays["normal.redraw"][number][tokens], arrays["uniform.redraw"][number][tokens]

    temperature, settings = case["settings"]["inner_temperature"], case["settings"]
    assert list(draft.mean.shape) == [settings["tokens"], settings["dim"]]
    arguments = (arrays["uniform.accept"], redraw, temperature, 100)
    result = verify_drafts(draft.mean, draft, target, *arguments, mended=False)
    assert result.ratio.tolist() == pytest.approx(case["ratio"], rel=1e-4, abs=1e-6)
    assert result.accepted.tolist() == [bool(entry) for entry in case["accepted"]] and result.rounds == case["rounds"]
    assert [not resolved for resolved in result.resolved.tolist()] == [bool(entry) for entry in case["zero"]]
    torch.testing.assert_close(result.values.float(), arrays["result"], atol=ABSOLUTE, rtol=0)
    # mended=True: accepted tokens keep the draft's value, unresolved ones take the target's
    mended = verify_drafts(draft.mean, draft, target, *arguments, mended=True)
    assert torch.equal(mended.accepted, result.accepted) and torch.equal(mended.resolved, result.resolved)
    assert torch.equal(mended.values[mended.accepted], draft.mean[mended.accepted].double())
    assert torch.equal(mended.values[~mended.resolved], target.mean[~mended.resolved].double())


@pytest.mark.parametrize(("inner", "spread"), [(42.0, 1.0), (4.0, 0.3), (1.0, 0.3)])
def test_every_token_follows_the_formulas(inner: float, spread: float) -> None:
    draw = torch.Generator().manual_seed(int(inner))
    count, channels, rounds = 60, 3, 6

    def normals(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    means = normals(count, channels)
    draft = TokenDistribution(means, normals(count, channels).mul(0.2).exp(), normals(count, channels) * 0.2)
    target = TokenDistribution(
        means + spread * normals(count, channels), draft.std * normals(count, channels).mul(0.2).exp(),
        draft.half_log_variance + normals(count, channels) * 0.2,
    )  # fmt: skip
    noise = normals(rounds, count, channels)
    redraw_uniform = torch.rand(rounds, count, generator=draw, dtype=torch.float64)
    uniform = torch.rand(count, generator=draw, dtype=torch.float64)
    num_redrawn: list[int] = []

    def redraw(number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        num_redrawn.append(len(tokens))
        return noise[number][tokens], redraw_uniform[number][tokens]

    result = verify_drafts(draft.mean, draft, target, uniform, redraw, inner, rounds, mended=True)
    assert num_redrawn == sorted(num_redrawn, reverse=True) and num_redrawn[0] == (~result.accepted).sum()
    kinds = set()
    for token in range(count):
        values, accepted = cspd_token(token, draft, target, float(uniform[token]), redraw, inner, rounds)
        assert result.values[token].tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
        assert bool(result.accepted[token]) == accepted
        kinds.add("accepted" if accepted else "redrawn" if result.resolved[token] else "unresolved")
    assert kinds >= {"redrawn", "unresolved"} and result.values.isfinite().all()


def cdf(y: Tensor, mean: float, std: float) -> Tensor:
    return 0.5 * (1 + torch.erf((y - mean) / (std * math.sqrt(2))))


def distance(values: Tensor, expected: Tensor) -> float:
    """Return the Kolmogorov-Smirnov distance of sorted values. expected: the distribution function at the values."""
    share = torch.arange(1, len(values) + 1) / len(values)
    return float(torch.maximum((share - expected).abs(), (share - 1 / len(values) - expected).abs()).max())


MQ, SQ, MP, SP = 0.0, 1.0, 0.8, 0.7  # mean and standard deviation of the draft (q) and of the target (p)


def verify_one_dimension(x: Tensor, sigma: float, mended: bool = True) -> Any:
    """Apply the rule with inner temperature 1 to many tokens with one channel."""
    count = len(x)
    draw = torch.Generator().manual_seed(3)
    ones = torch.ones(count, 1, dtype=torch.float64)
    draft = TokenDistribution(ones * MQ, ones * SQ, ones * 0)
    target = TokenDistribution(ones * MP, ones * SP, ones * math.log(sigma))

    def redraw(number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(len(tokens), 1, generator=draw, dtype=torch.float64)
        return noise, torch.rand(len(tokens), generator=draw, dtype=torch.float64)

    uniform = torch.rand(count, generator=draw, dtype=torch.float64)
    return verify_drafts(x, draft, target, uniform, redraw, 1.0, 200, mended)


def test_one_dimension_has_the_target_s_distribution() -> None:
    count = 40_000
    x = MQ + SQ * torch.randn(count, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = verify_one_dimension(x, 1.0)
    values = result.values[:, 0].sort().values
    assert distance(values, cdf(values, MP, SP)) < 1.63 / math.sqrt(count)
    assert result.resolved.all() and 0.3 < result.accepted.double().mean() < 0.7
    for is_part in (result.accepted, ~result.accepted):
        values = result.values[is_part, 0].sort().values
        assert distance(values, cdf(values, MP, SP)) > 0.05


@pytest.mark.parametrize("sigma", [1.0, 0.6, 1.2])
def test_redraws_in_one_dimension_have_the_residual_distribution(sigma: float) -> None:
    count = 40_000
    result = verify_one_dimension(torch.full((count, 1), MQ, dtype=torch.float64), sigma)
    ratio = sigma * SQ / SP * math.exp(-(((MQ - MP) / SP) ** 2) / 2)
    assert result.ratio.tolist() == pytest.approx([ratio] * count)
    share = min(ratio, 1)
    tolerance = 3 * math.sqrt(share * (1 - share) / count)
    assert float(result.accepted.double().mean()) == pytest.approx(share, abs=tolerance + 1e-12)
    grid = torch.linspace(-6, 7, 20_001, dtype=torch.float64)
    p = torch.exp(-(((grid - MP) / SP) ** 2) / 2) / SP
    q = torch.exp(-(((grid - MQ) / SQ) ** 2) / 2) / SQ
    cumulated = (p - q / sigma).clamp(min=0).cumsum(0)
    redrawn = result.values[~result.accepted & result.resolved, 0].sort().values
    expected = (cumulated / cumulated[-1])[torch.searchsorted(grid, redrawn).clamp(max=len(grid) - 1)]
    assert len(redrawn) > 3000 and distance(redrawn, expected) < 1.63 / math.sqrt(len(redrawn))


@pytest.fixture(scope="module")
def model() -> MARModel:
    return random_mar(0)


@pytest.fixture(scope="module")
def draft() -> MARModel:
    return random_mar(1, width=8, head_width=8)


@pytest.fixture(scope="module")
def near(model: MARModel) -> MARModel:
    """The model with so little noise on its weights that its distributions overlap with the model's."""
    noisy = copy.deepcopy(model)
    torch.manual_seed(5)
    for parameter in noisy.module.parameters():
        parameter.data += 0.0001 * torch.randn_like(parameter)
    return noisy


def run(sampler: CSpD, model: MARModel, labels: Any = (3, 1), **request: Any) -> Any:
    request = {"steps": 8, "guidance_scale": 2.0, "seed": 4} | request
    return decode(sampler, model, sampler.start(model, list(labels), **request))


def test_all_drafts_of_the_model_itself_are_accepted(model: MARModel) -> None:
    plain = run(CSpD(ratio=1, head_steps="4,1"), model)
    with_drafts = run(CSpD(model, num_draft=1, ratio=0, head_steps="4,1", inner_temperature=1), model)
    torch.testing.assert_close(with_drafts.tokens, plain.tokens, atol=1e-10, rtol=1e-10)
    assert plain.nfe.tolist() == with_drafts.nfe.tolist() == [8, 8]
    assert plain.draft_nfe.tolist() == [0, 0] and with_drafts.draft_nfe.tolist() == [7, 7]
    assert plain.row_forwards.tolist() == [16, 16] and plain.forwarded_tokens.tolist() == [16 * 16] * 2


def test_rejecting_every_draft_equals_the_model_with_fewer_steps(model: MARModel, draft: MARModel) -> None:
    sampler = CSpD(draft, num_draft=3, head_steps="4,1", inner_temperature=1e-9, max_rounds=0)
    state = sampler.start(model, [3, 1], steps=8, guidance_scale=2.0, seed=4)
    order, draws, tokens = state.order, state.draws, torch.zeros(2, 16, 4, dtype=torch.float64)
    unknown = [16, 15, 14, 13, 11, 8, 6, 3, 0]
    labels = torch.tensor([3, 1, 10, 10])
    for begin, stop in ((0, 1), (1, 2), (2, 4), (4, 7), (7, 8)):
        known = order[:, unknown[begin] :].sort(-1).values
        positions = order[:, unknown[stop] : unknown[begin]].sort(-1).values
        known_tokens = tokens.gather(1, known.unsqueeze(-1).expand(-1, -1, 4))
        all_positions = torch.arange(16).expand(4, 16)
        with torch.no_grad():
            encoded, _ = model.module.encode(known_tokens.repeat(2, 1, 1), known.repeat(2, 1), labels)
            decoded, _ = model.module.decode(encoded, known.repeat(2, 1), all_positions)
            z = decoded.gather(1, positions.repeat(2, 1).unsqueeze(-1).expand(-1, -1, 16)).flatten(0, 1)
            scale = 1 + (2.0 - 1) * (16 - max(unknown[stop], 1)) / 16
            noise = draws.chain(positions, 5, 4).flatten(0, 1)
            values = model.module.diffloss.distribution(z, noise, 1.0, scale, (4, 1)).mean
        tokens.scatter_(1, positions.unsqueeze(-1).expand(-1, -1, 4), values.view(2, -1, 4))
    decode(sampler, model, state)
    torch.testing.assert_close(state.tokens, tokens, atol=1e-10, rtol=1e-10)
    assert state.nfe.tolist() == [5, 5] and state.draft_nfe.tolist() == [6, 6]


def test_with_the_published_rule_rows_depend_on_their_batch(model: MARModel, near: MARModel) -> None:
    labels, seeds = [2, 4, 2], [5, 6, 7]
    published = CSpD(near, num_draft=4, head_steps="4,1", inner_temperature=0.5, mended=False)
    together = run(published, model, labels, seed=seeds)
    alone = [run(published, model, [label], seed=[seed]).tokens for label, seed in zip(labels, seeds)]
    assert (torch.cat(alone) - together.tokens).abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [0, 0.1])
def test_low_temperatures(model: MARModel, near: MARModel, temperature: float) -> None:
    """Tokens are finite. At temperature 0 they equal those of rejecting every draft."""
    sampler = CSpD(near, num_draft=3, head_steps="4,1", temperature=temperature)
    state = run(sampler, model)
    assert state.tokens.isfinite().all() and not (state.tokens == 0).all(-1).any()
    rejecting = run(replace(sampler, inner_temperature=1e-9, max_rounds=0), model)
    assert torch.equal(state.tokens, rejecting.tokens) == (temperature == 0)


def test_samplers_are_saved_without_the_draft_model(near: MARModel) -> None:
    sampler = CSpD(near, head_steps="10,1", mended=False)
    data = json.loads(json.dumps(sampler.to_dict()))
    assert data.pop("draft") == near.facts.name
    assert Sampler.from_dict(data) == replace(sampler, draft=None)
    with pytest.raises(ValueError, match="sampler='cspd' has a draft, .*, which cannot be saved"):
        paradec.Request(sampler=sampler).save("nowhere.json")


def images(model: MARModel, **request: Any) -> Any:
    defaults = {"class_labels": [1, 2], "steps": 8, "seed": 0, "output_type": "latent", "guidance_scale": 2.0}
    return paradec.generate_images(model, **(defaults | request))


def test_generate_images(model: MARModel, near: MARModel) -> None:
    sampler = paradec.samplers.create("cspd", draft=near, num_draft=3, head_steps="3,1")
    out = images(model, sampler=sampler, trace=True)
    state = run(sampler, model, [1, 2], seed=0)
    assert torch.equal(out.tokens, state.tokens) and out.images.shape == (2, 4, 4, 4)
    assert (out.nfe, out.row_nfe, out.draft_nfe, out.row_forwards) == (5, [5, 5], [6, 6], 20)
    assert out.accepted.shape == (5, 2) and out.accepted[:, 0].tolist() == [1, 1, 3, 8, 3]
    assert out.trace.replay() == out.tokens.tolist() and (out.steps >= 0).all()
    for index in range(5):
        assert ((out.steps == index).sum((1, 2)) == out.accepted[index]).all()
    cooled = images(model, sampler=sampler, temperature=0.5).tokens
    assert torch.equal(cooled, images(model, sampler=replace(sampler, temperature=0.5)).tokens)
    assert not torch.equal(cooled, out.tokens)


@pytest.mark.parametrize("sections", [(4,), (1,), (3, 1), (10, 1), (2, 2, 3), (1000,)])
def test_sections_of_the_head_s_steps(sections: tuple[int, ...]) -> None:
    times, table = solver(sections)
    assert times == sorted(set(times)) and all(len(column) == len(times) for column in table.values())
    edges = [round(1000 * part / len(sections)) for part in range(len(sections) + 1)]
    if 1000 % len(sections):
        edges = [0, 334, 667, 1000]
    for low, high, count in zip(edges, edges[1:], sections, strict=False):
        inside = [time for time in times if low <= time < high]
        assert len(inside) == count and inside[0] == low and (count == 1 or inside[-1] == high - 1)
    assert parse_head_steps(",".join(map(str, sections))) == parse_head_steps(sections) == sections
    assert CSpD(head_steps=list(sections)) == CSpD(head_steps=sections)
