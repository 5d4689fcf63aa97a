"""Rules that decide inside a call and treat all blocks as one stack: FBCache, DBCache, MagCache, DiCache."""

import copy
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from diffusers.hooks.mag_cache import nearest_interp
from pipelines import (
    TRANSFORMERS,
    attributes,
    check_bound,
    denoise,
    flux_pipeline,
    run_flux,
    run_wan,
    tiny_transformer,
    wan_pipeline,
)
from torch import Tensor, nn

from paradec import Forecast, TaylorSeer, accelerate
from paradec.integrations.diffusers.calibration import calibrate_magcache
from paradec.samplers.forecast.bases import Newton
from paradec.samplers.forecast.forecast import DBCache, DiCache, FirstBlock, MagCache, rule_from
from paradec.samplers.forecast.refresh import RunProgress
from paradec.samplers.forecast.rules import MagRatios

RATIOS = (1.0, 1.06, 0.97, 1.03, 0.99, 1.02, 0.96, 1.08, 1.01, 0.95)
RUN = {"flux": run_flux, "wan": run_wan}


@pytest.fixture(scope="module")
def flux() -> Any:
    return flux_pipeline()


@pytest.fixture(scope="module")
def wan() -> Any:
    return wan_pipeline()


@pytest.fixture
def pipe(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


def call_pattern(session: Any) -> str:
    """Return the calls of the latest run: "F" if the stack was evaluated, "." if it was forecast."""
    return "".join(".F"[call.evaluated > 0] for call in session.report().calls)


@pytest.mark.thinned
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("name", RUN)
def test_first_block_equals_diffusers(name: str, threshold: float, pipe: Any) -> None:
    run = RUN[name]
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    expected = run(pipe)
    pipe.transformer.disable_cache()
    with accelerate(pipe, FirstBlock(threshold)) as session:
        assert torch.equal(run(pipe), expected)
    assert ("." in call_pattern(session)) == (threshold > 0), call_pattern(session)
    if threshold == 0:
        assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize(("max_skip_steps", "retention_ratio"), [(3, 0.2), (2, 0.0)])
@pytest.mark.parametrize("name", RUN)
def test_magcache_equals_diffusers(name: str, max_skip_steps: int, retention_ratio: float, pipe: Any) -> None:
    run = RUN[name]
    settings = {"threshold": 0.2, "max_skip_steps": max_skip_steps, "retention_ratio": retention_ratio}
    pipe.transformer.enable_cache(MagCacheConfig(mag_ratios=list(RATIOS), num_inference_steps=8, **settings))
    expected = run(pipe, 8)
    pipe.transformer.disable_cache()
    with accelerate(pipe, MagCache(RATIOS, **settings)) as session:
        assert torch.equal(run(pipe, 8), expected)
    assert "." in call_pattern(session)


@pytest.mark.parametrize(("name", "runs"), [("flux", 1), ("wan", 3)])
def test_calibration_equals_diffusers(name: str, runs: int, pipe: Any, capsys: Any, tmp_path: Path) -> None:
    run = RUN[name]
    run(pipe, 1)  # diffusers adds a hook to the transformer at its first run
    before, seeds = attributes(pipe.transformer), iter(range(runs))
    draw = torch.Generator().manual_seed
    actual = calibrate_magcache(pipe, lambda: run(pipe, 6, generator=draw(next(seeds))), runs=runs)
    assert attributes(pipe.transformer) == before and next(seeds, None) is None
    for seed in range(runs):
        pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=6))
        run(pipe, 6, generator=draw(seed))
        pipe.transformer.disable_cache()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    assert len(printed) == runs * (1 + (name == "wan")) == len(set(map(tuple, printed)))
    assert actual.values == pytest.approx([sum(step) / len(printed) for step in zip(*printed, strict=True)], rel=1e-5)
    assert actual.values[0] == 1 and len(set(actual.values)) > 3
    actual.save(tmp_path / "ratios.json")
    assert MagRatios.load(tmp_path / "ratios.json") == actual
    values = torch.tensor(actual.values, dtype=torch.float64)
    assert MagCache(tmp_path / "ratios.json") == MagCache(actual) == MagCache(values)


@pytest.mark.parametrize("length", [1, 2, 5, 10, 28])
def test_resized_ratios_equal_diffusers(length: int) -> None:
    source = torch.linspace(1, 2, length, dtype=torch.float64)
    for steps in range(1, 60):
        assert MagRatios(tuple(source.tolist())).resample(steps) == tuple(nearest_interp(source, steps).tolist())


@pytest.mark.thinned
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    module, inputs = tiny_transformer(name)
    before, plain = attributes(module), denoise(module, inputs, 5)
    with accelerate(module, FirstBlock(0)):
        assert torch.equal(denoise(module, inputs, 5), plain)
    latents, sizes = {}, {}
    for target in ("block", "stack"):
        with accelerate(module, TaylorSeer(interval=3, where=target)) as session:
            latents[target] = denoise(module, inputs, 6)
        sizes[target] = session.report().bytes
        assert call_pattern(session) == "F..F.."
    # equal up to the order of summation, with fewer histories
    torch.testing.assert_close(latents["stack"], latents["block"], rtol=1e-4, atol=1e-4)
    assert not torch.equal(latents["stack"], denoise(module, inputs, 6)) and sizes["stack"] < sizes["block"]
    # the bound on memory includes a probe's residual and all orders
    for refresh in ([0, 1], FirstBlock(0), DiCache(0, "delta_minus", num_inference_steps=2)):
        sampler = Forecast(when=refresh, how="taylor", where="stack")
        with accelerate(module, sampler) as session:
            denoise(module, inputs, 2)
        check_bound(module, sampler, session.report().bytes, partial(denoise, module, inputs, 2))
    assert attributes(module) == before


class Toy(nn.Module):
    """Residual blocks that depend on the step. The first `count` are called. `control` adds features after each."""

    def __init__(self, blocks: int = 5, control: bool = False):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList([ToyBlock(draw) for _ in range(blocks)])
        self.control, self.count = control, blocks

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        step = timestep.flatten()[0].to(hidden_states.dtype)
        for block in list(self.blocks)[: self.count]:
            hidden_states = block(hidden_states, step)
            if self.control:
                hidden_states = hidden_states + 0.1 * step
        return hidden_states


class ToyBlock(nn.Module):
    def __init__(self, draw: torch.Generator):
        super().__init__()
        self.attn = nn.Linear(4, 4, dtype=torch.float64)
        self.attn.weight.data = torch.randn(4, 4, generator=draw, dtype=torch.float64)
        self.attn.bias.data = 0.3 * torch.randn(4, generator=draw, dtype=torch.float64)

    def forward(self, hidden_states: Tensor, step: Tensor) -> Tensor:
        return hidden_states + 0.3 * torch.tanh(self.attn(hidden_states) + step)


def toy(blocks: int = 5, **options: Any) -> tuple[Toy, Tensor]:
    module = Toy(blocks, **options).eval().requires_grad_(False)
    return module, torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


TIMES = [step**2 / 40 for step in range(10)]


def toy_run(module: Toy, latent: Tensor, times: list[float] = TIMES) -> list[Tensor]:
    outputs = []
    for time in times:
        latent = module(latent, torch.full((2,), time, dtype=latent.dtype))
        outputs.append(latent)
    return outputs


def run_plain_loop(
    module: Toy, latent: Tensor, head: int, tail: int, skips: Callable[..., bool]
) -> tuple[list[Tensor], str]:
    """Run the first blocks, then the middle blocks or add their last residual, then the last blocks."""
    outputs, pattern, last_probe, residual = [], "", None, None
    last = len(module.blocks) - tail
    for step, time in enumerate(TIMES):
        x, time = latent, torch.tensor(time, dtype=latent.dtype)
        for block in module.blocks[:head]:
            x = block(x, time)
        probe, middle = x - latent, x
        change = None if last_probe is None else float((probe - last_probe).abs().mean() / last_probe.abs().mean())
        if residual is not None and skips(step, change, pattern):
            x, pattern = middle + residual, pattern + "."
        else:
            for block in module.blocks[head:last]:
                x = block(x, time)
            residual, last_probe, pattern = x - middle, probe, pattern + "F"
        for block in module.blocks[last:]:
            x = block(x, time)
        latent = x
        outputs.append(x)
    return outputs, pattern


CASES: dict[str, tuple[Any, int, int, Callable[..., bool]]] = {
    "FirstBlock": (FirstBlock(0.3), 1, 0, lambda i, change, calls: change <= 0.3),
    "FirstBlock, first steps": (FirstBlock(9.0, first_enhance=3), 1, 0, lambda i, change, calls: i >= 3),
    "DBCache": (DBCache(2, 1, 0.3, 3), 2, 1, lambda i, change, calls: i >= 3 and change < 0.3),
    "DBCache, in a row": (DBCache(1, 0, 1.0, 2, -1, 2), 1, 0, lambda i, change, calls: i >= 2 and calls[-2:] != ".."),
    "DBCache, in a run": (DBCache(1, 2, 1.0, 1, 3), 1, 2, lambda i, change, calls: calls.count(".") < 3),
    "DBCache, off": (DBCache(1, 0, 0.0, 0), 1, 0, lambda i, change, calls: False),
}
"""Rule, number of first and of last blocks, and whether step i is skipped, by the probe's change and past calls."""


@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_loop(case: str) -> None:
    rule, head, tail, skips = CASES[case]
    module, latent = toy()
    expected, pattern = run_plain_loop(module, latent, head, tail, skips)
    assert ("." in pattern) == (case != "DBCache, off") and pattern.count("F") > 1
    with accelerate(module, rule) as session:
        for _ in range(2):  # a run does not depend on the previous run
            torch.testing.assert_close(toy_run(module, latent), expected, rtol=1e-12, atol=1e-12)
            assert call_pattern(session) == pattern
            session.reset()
    assert session.report().modules["Toy"] == [f"blocks.{i}" for i in range(head, 5 - tail)]


DICACHE: dict[str, tuple[DiCache, str | None]] = {
    "delta_y": (DiCache(0.5, num_inference_steps=10), None),
    "delta_y, not warmed up": (DiCache(0.35, retention_ratio=0.0, num_inference_steps=10), None),
    "delta_minus": (DiCache(0.1, "delta_minus", 1, 0.0, 10), None),
    "two blocks": (DiCache(0.5, "delta_y", 2, 0.3, 10), None),
    "reuse": (DiCache(0.5, num_inference_steps=10), "reuse"),
}


def run_dicache_loop(module: Toy, latent: Tensor, rule: DiCache, aligned: bool) -> tuple[list[Tensor], str]:
    """Run DiCache like its public code, with residuals of all blocks and the probe of the previous step."""
    outputs, pattern, total = [], "", 0.0
    residuals: list[Tensor] = []
    probes: list[Tensor] = []
    before: tuple[Tensor, Tensor] | None = None
    for step, time in enumerate(TIMES):
        x, time = latent, torch.tensor(time, dtype=latent.dtype)
        for block in module.blocks[: rule.probe_depth]:
            x = block(x, time)
        probe = x
        if before is not None:
            change, drift = ((new - old).abs().mean() / old.abs().mean() for new, old in zip((probe, latent), before))
            total += float(change if rule.error == "delta_y" else (change - drift).abs())
        before = (probe, latent)
        if 0 < step < 9 and step >= int(10 * rule.retention_ratio) and total < rule.threshold:
            residual = residuals[-1]
            if len(residuals) > 1 and aligned:
                gain = ((probe - latent) - probes[-2]).abs().mean() / (probes[-1] - probes[-2]).abs().mean()
                residual = residuals[-2] + gain.clamp(1, 1.5) * (residuals[-1] - residuals[-2])
            x, pattern = latent + residual, pattern + "."
        else:
            for block in module.blocks[rule.probe_depth :]:
                x = block(x, time)
            total, pattern = 0.0, pattern + "F"
            residuals.append(x - latent)
            probes.append(probe - latent)
        latent = x
        outputs.append(x)
    return outputs, pattern


@pytest.mark.parametrize("case", DICACHE)
def test_dicache_equals_a_plain_loop(case: str) -> None:
    rule, basis = DICACHE[case]
    module, latent = toy()
    expected, pattern = run_dicache_loop(module, latent, rule, basis is None)
    assert "." in pattern[3:] and pattern.count("F") > 2 and pattern[-1] == "F"
    with accelerate(module, Forecast(when=rule, how=basis)) as session:
        for _ in range(2):
            torch.testing.assert_close(toy_run(module, latent), expected, rtol=1e-12, atol=1e-12)
            assert call_pattern(session) == pattern
            session.reset()


@pytest.mark.parametrize(("probe", "step"), [(1.5, 7.0), (2.0, 7.0), (2.25, 8.25), (2.5, 9.5), (9.0, 9.5)])
def test_the_gain_of_dicache_is_clamped(probe: float, step: float) -> None:
    """At the evaluated steps 2 and 7 the probe added 1 and 2. The gain is its current addition minus 1, in [1, 1.5]."""
    rule, state, first = DiCache(99.0, retention_ratio=0.0), RunProgress(total=20), torch.zeros(1, 2)
    for index, added, forced in ((2, 1.0, True), (7, 2.0, True), (8, probe, False)):
        state.index = index
        full = rule.is_full(state, first, first + added, forced)
        state.finish_step(full)
        assert full == forced
    assert rule.forecast_at(state) == pytest.approx(step)


def test_dicache_keeps_separate_state_per_call() -> None:
    module, latent = toy()
    rule = DiCache(0.5, retention_ratio=0.0, num_inference_steps=10)
    latents = (latent, 3 * latent.flip(0))
    expected = [run_dicache_loop(module, start, rule, True) for start in latents]
    assert expected[0][1] != expected[1][1]
    with accelerate(module, rule) as session, torch.no_grad():
        current = list(latents)
        for step, time in enumerate(TIMES):
            for branch, (outputs, _) in enumerate(expected):
                current[branch] = module(current[branch], torch.full((2,), time, dtype=latent.dtype))
                torch.testing.assert_close(current[branch], outputs[step], rtol=1e-12, atol=1e-12)
        calls = session.report().calls
    for branch, (_, pattern) in enumerate(expected):
        assert "".join(".F"[call.evaluated > 0] for call in calls if call.branch == f"call {branch}") == pattern


@pytest.mark.parametrize("name", RUN)
def test_dicache_in_pipelines(name: str, pipe: Any) -> None:
    run = RUN[name]
    plain = run(pipe, 8)
    with accelerate(pipe, DiCache(9.0, retention_ratio=0.25)) as session:
        actual = run(pipe, 8)
        pattern = call_pattern(session)
        assert torch.equal(run(pipe, 8), actual) and call_pattern(session) == pattern
    branches = len(pattern) // 8
    assert pattern == "F" * 2 * branches + "." * 5 * branches + "F" * branches
    assert not torch.equal(actual, plain) and torch.equal(run(pipe, 8), plain)


def test_a_residual_is_forecast_by_any_basis() -> None:
    module, latent = toy()
    with accelerate(module, Forecast(when=DBCache(1, 0, 1.0, 2), how="taylor")):
        outputs = toy_run(module, latent)
    residuals: list[Tensor] = []
    for step, time in enumerate(TIMES[:5]):
        x = middle = module.blocks[0](latent, torch.tensor(time, dtype=latent.dtype))
        if step < 2:
            for block in module.blocks[1:]:
                x = block(x, torch.tensor(time, dtype=latent.dtype))
            residuals.append(x - middle)
            latent = x
        else:
            latent = middle + residuals[1] + (step - 1) * (residuals[1] - residuals[0])
        torch.testing.assert_close(outputs[step], latent, rtol=1e-12, atol=1e-12)


def test_control_features_are_added_once() -> None:
    """The residual includes a control network's features, except those that the module adds after the last block."""
    module, latent = toy(control=True)
    with accelerate(module, MagCache([1.0] * 10, retention_ratio=0, max_skip_steps=1)) as session:
        outputs = toy_run(module, latent, TIMES[:2])
    assert call_pattern(session) == "F."
    residual = outputs[0] - 0.1 * TIMES[0] - latent
    torch.testing.assert_close(outputs[1], outputs[0] + residual + 0.1 * TIMES[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("rule", [FirstBlock(9.0), DBCache(1, 0, 1.0), MagCache(RATIOS), DiCache(9.0)])
def test_short_runs(rule: Any, steps: int, flux: Any) -> None:
    plain = run_flux(flux, steps)
    with accelerate(flux, rule) as session:
        actual = run_flux(flux, steps)
    assert torch.equal(actual, plain) == (call_pattern(session) == "F" * steps)
    assert call_pattern(session)[0] == "F" and (rule.name != "first_block" or call_pattern(session) == "F."[:steps])


class UnusualStack(nn.Module):
    """A module that calls its blocks in another order than listed, or (`doubles`) has one that doubles the tokens."""

    def __init__(self, doubles: bool):
        super().__init__()
        self.blocks, self.doubles = nn.ModuleList([ToyBlock(torch.Generator()) for _ in range(3)]), doubles
        if doubles:
            self.blocks[1].forward = lambda hidden_states, step: hidden_states.repeat(1, 2, 1)

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        for i in (0, 1, 2) if self.doubles else (0, 2, 1):
            hidden_states = self.blocks[i](hidden_states, timestep[0])
        return hidden_states


def test_modules_that_are_no_stack_are_refused() -> None:
    latent, time = toy()[1], torch.zeros(2, dtype=torch.float64)
    with accelerate(UnusualStack(True), FirstBlock()) as session:
        refuses(lambda: session.transformers[0].module(latent, time), "updates none of its inputs", RuntimeError)
    single, _ = toy(1)
    for rule in (FirstBlock(), DBCache()):
        refuses(partial(accelerate, single, rule), f"when='{rule.name}' always evaluates .* has 1,")
    with accelerate(single, MagCache([1.0] * 10, retention_ratio=0)) as session:
        toy_run(single, latent)
    assert call_pattern(session) == "F...F...F."


def test_blocks_are_ordered_by_their_calls() -> None:
    latent, time = toy()[1], torch.zeros(2, dtype=torch.float64)
    module = UnusualStack(False)
    expected = [module(latent, time + i) for i in range(2)]
    with accelerate(module, DBCache(1, 1, residual_diff_threshold=0.0, max_warmup_steps=0)) as session:
        assert all(torch.equal(module(latent, time + i), expected[i]) for i in range(2))
    with accelerate(module, DBCache(1, 1, residual_diff_threshold=1.0, max_warmup_steps=0)) as session:
        assert torch.equal(module(latent, time), expected[0])
        torch.testing.assert_close(module(latent, time + 1e-9), expected[0])  # the first and last block are evaluated
        assert call_pattern(session) == "F." and session.report().calls[1].forecast == 1


def test_changing_sets_of_called_blocks_are_refused() -> None:
    latent, time = toy()[1], torch.zeros(2, dtype=torch.float64)
    for first, second in ((5, 4), (4, 5)):
        module = Toy(5)
        with accelerate(module, FirstBlock(9.0)):
            module.count = first
            module(latent, timestep=time)
            module.count = second
            refuses(partial(module, latent, timestep=time + 1), "blocks.4.*session.reset", RuntimeError)


def test_settings_are_checked() -> None:
    wrong: dict[Any, dict[str, tuple[Any, ...]]] = {
        FirstBlock: {"threshold": (-0.1,)},
        DBCache: dict.fromkeys(("Fn_compute_blocks", "max_warmup_steps"), (-1, 1.5)),
        MagCache: {"mag_ratios": (None, (1.0, 0.0), "nowhere.json")},
        partial(DBCache, 1): {"Bn_compute_blocks": (-1,), "max_continuous_cached_steps": (-2,)},
        partial(MagCache, RATIOS): dict.fromkeys(("threshold", "max_skip_steps"), (-1,)),
        partial(MagCache, RATIOS): {"retention_ratio": (1.5,), "num_inference_steps": (0,)},
        DiCache: {"threshold": (-0.1,), "error": ("delta_x",), "probe_depth": (0,)},
    }
    for rule, settings in wrong.items():
        for name, value in ((name, value) for name, values in settings.items() for value in values):
            refuses(partial(rule, **{name: value}), name)
    for target in ("module", ["a"], "output"):
        refuses(partial(Forecast, when=FirstBlock(), where=target), "when='first_block' .* leave where=")
    module, inputs = tiny_transformer("DiT")
    refuses(lambda: accelerate(module, Forecast(where="stack", when="verification")), "where='stack' skips it")
    with accelerate(module, DiCache()), pytest.raises(ValueError, match="num_inference_steps=None"):
        denoise(module, inputs, 2)
    refuses(lambda: calibrate_magcache(module, lambda: None, runs=0), "runs")
    refuses(lambda: calibrate_magcache(module, lambda: None), "run must evaluate the transformer at every step")
    lengths = iter((3, 4))
    run = lambda: denoise(module, inputs, next(lengths))  # noqa: E731
    refuses(lambda: calibrate_magcache(module, run, runs=2), "one run has 3 steps, another 4")


def test_rules_are_equal_after_a_round_trip_through_json_and_pickle() -> None:
    rules = (FirstBlock(0.1), DBCache(2, 1, max_cached_steps=4), MagCache(RATIOS, threshold=0.1), DiCache(0.2))
    for rule in (*rules, "first_block", "dicache"):
        sampler = Forecast(when=rule)
        assert TaylorSeer.from_dict(json.loads(json.dumps(sampler.to_dict()))) == sampler
        assert pickle.loads(pickle.dumps(copy.deepcopy(sampler))) == sampler
        assert sampler.forecaster.name == ("taylor" if sampler.when.name == "dicache" else "reuse")
        assert Forecast(when=rule, order=2, how="newton").forecaster == Newton(2)
    assert rule_from({"when": "dbcache", "Fn_compute_blocks": 1}) == DBCache(1)
    refuses(lambda: rule_from({"when": "first_block", "treshold": 1}), "threshold")
