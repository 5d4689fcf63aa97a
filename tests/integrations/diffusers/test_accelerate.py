"""`paradec.accelerate` on diffusers' pipelines: recorded latents, forecasts, schedules, memory, detaching, errors."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from decoding import refuses
from diffusers import DDPMScheduler, FirstBlockCacheConfig, HeunDiscreteScheduler, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks import apply_group_offloading
from pipelines import (
    TRANSFORMERS,
    attributes,
    check_bound,
    denoise,
    dit_pipeline,
    flux_pipeline,
    run_dit,
    run_flux,
    run_wan,
    tiny_transformer,
    wan_pipeline,
)
from recorded import find_weights, golden, read_arrays, read_json, read_json_unrecorded, replays
from torch import Tensor, nn

import paradec
from paradec import Forecast, TaylorSeer, accelerate
from paradec.core.protocol import decode
from paradec.integrations.diffusers.calibration import METRICS, calibrate_bac
from paradec.integrations.diffusers.hooks.blocks import find_places
from paradec.models.images.diffusion import DiffusionModel
from paradec.samplers import create
from paradec.samplers.forecast.bases import Taylor
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Verification
from paradec.samplers.forecast.step_schedule import BlockSchedule
from paradec.samplers.forecast.targets import Modules

LATENTS = [
    p for p in sorted(golden("diffusion").glob("*.json")) if {"dit", "flux"} <= set(map(str, read_json_unrecorded(p)))
]
"""Recorded runs. The arrays of each are in an npz file of the same name."""
TARGETS = ("module", "block", "output")


@pytest.fixture(scope="module")
def dit() -> Any:
    return dit_pipeline()


@pytest.fixture(scope="module")
def flux() -> Any:
    return flux_pipeline()


@pytest.fixture(scope="module")
def wan() -> Any:
    return wan_pipeline()


@pytest.fixture(scope="module")
def plain(dit: Any, flux: Any, wan: Any) -> dict[str, Tensor]:
    return {"dit": run_dit(dit), "flux": run_flux(flux), "wan": run_wan(wan)}


def count_calls(module: nn.Module, names: list[str]) -> dict[str, int]:
    calls = dict.fromkeys(names, 0)
    modules = dict(module.named_modules())
    for name in names:

        def forward(*args: Any, name: str = name, original: Any = modules[name].forward, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        modules[name].forward = forward
    return calls


DEFAULT_MODULES = "(single_)?transformer_blocks.*attn"
"""Modules that diffusers' hook forecasts by default."""


def recorded_settings(facts: dict[str, Any]) -> dict[str, Any]:
    """Return settings of `Forecast` for a recorded run: of TaylorSeer, of diffusers' hook, or without forecasts."""
    if "interval" in facts:
        return {"when": Every(facts["interval"], facts["first_enhance"]), "order": facts["max_order"]}
    if "config" not in facts:
        return {"when": Every(1)}
    config = facts["config"]
    modules = Modules(config.get("cache_identifiers", DEFAULT_MODULES))
    bounds = config["disable_cache_before_step"], "diffusers", config.get("disable_cache_after_step")
    return {
        "when": Every(config["cache_interval"], *bounds),
        "how": Taylor(config["max_order"], config["taylor_factors_dtype"]),
        "where": "output" if config.get("use_lite_mode") else modules,
    }


def pipeline_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with generators and embeddings in the place of the recorded expressions that create them."""

    def read_generator(code: str) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(int(re.findall(r"\d+", code)[-1]))

    result = call | {"generator": read_generator(call["generator"])}
    if "prompt_embeds" in call:
        code, generator = call["prompt_embeds"], read_generator(call["prompt_embeds"])
        shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"randn\(([\d,]+)\)", code)]
        full, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
        result |= {"prompt_embeds": full, "pooled_prompt_embeds": pooled}
    return result


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    result = {}
    for path in LATENTS:
        facts = read_json(path)
        weights = {kind: find_weights(f"golden_tiny_{kind}.safetensors", "diffusion") for kind in ("dit", "flux")}
        result[path] = {"dit": dit_pipeline(facts, weights["dit"]), "flux": flux_pipeline(facts, weights["flux"])}
    return result


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in LATENTS for name in read_json_unrecorded(path)["cases"]]
)
@replays("name")
def test_latents_of_the_traces(path: Path, name: str, recorded: dict[Path, Any]) -> None:
    record, pipelines = read_json(path), recorded[path]
    arrays = read_arrays(path.with_suffix(".npz"))
    facts, expected = record["cases"][name], arrays[name]
    kind = "dit" if expected.ndim == 4 else "flux"
    settings, run = recorded_settings(facts), run_dit if kind == "dit" else run_flux
    with accelerate(pipelines[kind], Forecast(**settings)) as session:
        latents = run(pipelines[kind], **pipeline_arguments(record[kind]["call"])).numpy()
    # machines differ by 7e-5 for the plain DiT; factors rounded to bfloat16 increase the difference
    narrow = Forecast(**settings).forecaster.dtype == torch.bfloat16
    np.testing.assert_allclose(latents, expected, rtol=0, atol=1e-2 if narrow else 3e-4 if kind == "dit" else 2e-6)
    if "full_indices" in facts:
        assert session.report().full_steps == facts["full_indices"]
    if "mse_vs_baseline" in facts and f"{kind}_baseline" in arrays:
        error = np.square(expected - arrays[f"{kind}_baseline"]).mean()
        np.testing.assert_allclose(error, facts["mse_vs_baseline"], rtol=1e-4, atol=1e-9)
    if "calls" in facts:
        assert {len(session.report().full_steps)} == {facts["calls"][key] for key in facts["calls"] if "attn" in key}


@pytest.mark.thinned
@pytest.mark.parametrize(
    "config",
    [
        TaylorSeerCacheConfig(),
        TaylorSeerCacheConfig(4, 2, max_order=2, taylor_factors_dtype=torch.float32, cache_identifiers=[".*attn"]),
        FirstBlockCacheConfig(0.2),
        MagCacheConfig(mag_ratios=[1.0] * 12, num_inference_steps=12),
    ],
    ids=lambda config: type(config).__name__,
)
def test_diffusers_configs_give_the_latents_of_diffusers(config: Any) -> None:
    pipe = flux_pipeline()
    with accelerate(pipe, config):
        ours = run_flux(pipe, 12)
    pipe.transformer.enable_cache(config)
    assert torch.equal(run_flux(pipe, 12), ours)


@pytest.mark.thinned
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_forecasts_on_every_transformer(name: str) -> None:
    module, inputs = tiny_transformer(name)
    before, expected = attributes(module), denoise(module, inputs, 5)
    for target in TARGETS:
        with accelerate(module, TaylorSeer(interval=1, order=2, where=target)):
            assert torch.equal(denoise(module, inputs, 5), expected)
        settings = {"when": Every(3, 2), "where": target}
        latents = {}
        for order, basis in ((0, "taylor"), (3, "reuse"), (1, "taylor")):
            with accelerate(module, Forecast(**settings, order=order, how=basis)) as session:
                latents[order, basis] = denoise(module, inputs, 5)
            report = session.report()
            assert [call.kind for call in report.calls] == ["full", "full", "forecast", "forecast", "full"]
            assert {call.evaluated + call.forecast for call in report.calls} == {len(find_places(module, target))}
        assert torch.equal(latents[0, "taylor"], latents[3, "reuse"])
        assert not torch.equal(latents[1, "taylor"], latents[0, "taylor"])
        check_bound(module, Forecast(**settings), report.bytes, partial(denoise, module, inputs, 5))
    assert torch.equal(denoise(module, inputs, 5), expected) and attributes(module) == before


TARGET_MODULES = {
    "DiT": {"attn1", "ff"}, "FLUX": {"attn", "ff", "ff_context", "proj_mlp", "proj_out"},
    "SD3": {"attn", "attn2", "ff", "ff_context"}, "PixArt": {"attn1", "attn2", "ff"}, "Sana": {"attn1", "attn2", "ff"},
    "Wan": {"attn1", "attn2", "ffn"}, "HunyuanVideo": {"attn", "ff", "ff_context", "proj_mlp", "proj_out"},
    "QwenImage": {"attn", "img_mlp", "txt_mlp"},
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_targets_are_the_modules_of_the_papers(name: str) -> None:
    """Targets are attention and feed-forward outputs before their gates; in single-stream blocks, their sum."""
    module, inputs = tiny_transformer(name)
    actual = find_places(module, "module")
    assert {place.name.split(".")[-1] for place in actual} == TARGET_MODULES[name]
    singles = {place.block for place in actual if place.name.endswith("proj_out")}
    assert len(singles) == (2 if name in ("FLUX", "HunyuanVideo") else 0)
    assert all((place.kind == "skip") == (place.sink is not None) for place in actual)
    calls = count_calls(module, [place.name for place in actual])
    with accelerate(module, Forecast(when=[0, 2], order=1)):
        denoise(module, inputs, 5)
    assert set(calls.values()) == {2}, calls


class Drift(nn.Module):
    """A transformer whose modules return polynomials of the step."""

    def __init__(self, degree: int):
        super().__init__()
        self.degree, self.step = degree, 0
        self.blocks = nn.ModuleList([DriftBlock(self) for _ in range(2)])

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        self.step = int(timestep[0])
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


class DriftBlock(nn.Module):
    def __init__(self, owner: Drift):
        super().__init__()
        self.attn, self.ff = Polynomial(owner), Polynomial(owner)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + 0.5 * self.attn(hidden_states)
        return hidden_states + 0.25 * self.ff(hidden_states)


class InPlaceBlock(DriftBlock):
    def forward(self, hidden_states: Tensor) -> Tensor:
        for branch, gate in ((self.attn, 0.5), (self.ff, 0.25)):
            hidden_states = branch(hidden_states).mul_(gate) + hidden_states
        return hidden_states


class Polynomial(nn.Module):
    def __init__(self, owner: Drift):
        super().__init__()
        self.owner = [owner]
        self.weight = nn.Parameter(torch.randn(owner.degree + 1, 4, dtype=torch.float64))

    def forward(self, hidden_states: Tensor) -> Tensor:
        step = self.owner[0].step / 10
        return sum(w * step**i for i, w in enumerate(self.weight)).repeat(*hidden_states.shape[:-1], 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("degree", "order", "basis"), [(1, 1, "taylor"), (2, 2, "newton"), (3, 3, "newton")])
def test_polynomial_trajectories_are_forecast_exactly(target: str, degree: int, order: int, basis: str) -> None:
    torch.manual_seed(0)
    module, latent = Drift(degree).requires_grad_(False), torch.randn(2, 3, 4, dtype=torch.float64)
    sampler = Forecast(when=[0, 1, 2, 3, 7, 9], order=order, how=basis, where=target)
    times = [torch.full((2,), step) for step in range(20)]
    expected = [module(latent, time) for time in times]
    with accelerate(module, sampler) as session:
        for step, time in enumerate(times):
            torch.testing.assert_close(module(latent, time), expected[step], rtol=1e-10, atol=1e-10)
    assert [call.kind for call in session.report().calls].count("forecast") == 14


@pytest.mark.parametrize("is_rising", [True, False])
def test_a_transformer_without_pipeline_detects_new_runs(is_rising: bool) -> None:
    torch.manual_seed(0)
    module, latent = Drift(1).requires_grad_(False), torch.randn(2, 3, 4, dtype=torch.float64)
    times = [torch.full((2,), step) for step in (range(8) if is_rising else range(7, -1, -1))]
    with accelerate(module, Forecast(when=Every(3, 2))) as session:
        for run in range(1, 4):
            module.blocks[0].attn.weight.add_(1)  # forecasts from the previous run would be wrong
            for time in times:
                actual = module(latent, time)
            report = session.report()
            assert [call.kind for call in report.calls] == ["full", "full", *["forecast", "forecast", "full"] * 2]
            assert [call.step for call in report.calls] == list(range(8)) and report.runs == run
    torch.testing.assert_close(actual, module(latent, times[-1]), rtol=1e-10, atol=1e-10)


@pytest.mark.thinned
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("basis", "order"), [("taylor", 1), ("taylor", 0), ("reuse", 1), ("foca", 1), ("newton", 2)])
@pytest.mark.parametrize("writer", ["caller", "block"])
def test_inputs_may_be_modified_in_place(writer: str, target: str, basis: str, order: int) -> None:
    runs = []
    for writes in (False, True):
        torch.manual_seed(0)
        module, latent, outputs = Drift(2), torch.randn(2, 3, 4, dtype=torch.float64), []
        torch.manual_seed(1)
        block = InPlaceBlock if writes and writer == "block" else DriftBlock
        module.blocks = nn.ModuleList([block(module) for _ in range(2)])
        module.requires_grad_(False)
        with accelerate(module, Forecast(when=Every(4, 2), where=target, how=basis, order=order)):
            for step in range(12):
                output = module(latent, torch.full((2,), step))
                outputs.append(output.clone())
                if writes and writer == "caller":
                    output.mul_(7).add_(3)
        runs.append(torch.stack(outputs))
    assert torch.equal(*runs)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["dit", "flux", "wan"])
def test_runs_are_repeatable_and_leave_no_state(name: str, request: Any, plain: dict[str, Tensor]) -> None:
    pipe = request.getfixturevalue(name)
    run = {"dit": run_dit, "flux": run_flux, "wan": run_wan}[name]
    before = attributes(pipe.transformer), set(vars(pipe.scheduler))
    session = accelerate(pipe, Forecast(when=Every(4, 2)))
    first = run(pipe)
    assert not torch.equal(first, plain[name]) and torch.equal(run(pipe), first)
    assert session.report().bytes > 0 == sum(transformer.state.count_bytes() for transformer in session.transformers)
    calls = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise RuntimeError("out of memory")

    handle = pipe.transformer.register_forward_pre_hook(fail)
    refuses(lambda: run(pipe), "out of memory", RuntimeError)
    handle.remove()
    assert torch.equal(run(pipe), first)
    if name != "dit":  # DiTPipeline has no callbacks

        def interrupt(pipe: Any, step: int, timestep: Any, tensors: dict) -> dict:
            if step == 2:
                raise KeyboardInterrupt
            return tensors

        with pytest.raises(KeyboardInterrupt):
            run(pipe, callback_on_step_end=interrupt)
        assert torch.equal(run(pipe), first)
    session.detach()
    session.detach()
    assert torch.equal(run(pipe), plain[name])
    assert "full" in str(session.report())  # readable after detach
    after = attributes(pipe.transformer), set(vars(pipe.scheduler))
    for child in (*before[0].values(), *after[0].values()):
        child.pop("_diffusers_hook", None)  # created by diffusers' cache_context
    assert after == before


def test_guidance_branches_in_two_calls_are_forecast_separately(wan: Any, plain: dict[str, Tensor]) -> None:
    with accelerate(wan, TaylorSeer(interval=3)) as session:
        run_wan(wan)
        calls = session.report().calls
        assert [call.branch for call in calls[:2]] == ["cond 0", "uncond 0"] and len(calls) == 24
        for cond, uncond in zip(calls[::2], calls[1::2]):
            assert (cond.step, cond.kind) == (uncond.step, uncond.kind)
        assert session.report().full_steps == [0, 3, 6, 9]
        names = {transformer.name: set(transformer.state.branches) for transformer in session.transformers}
        assert names == {"transformer": set()}  # deleted when the run ended
    # the two calls of a step are averaged, so swapping their texts must not change the result
    module, inputs = tiny_transformer("Wan")
    with accelerate(module, Forecast(when=Every(3, 2))):
        expected = denoise(module, inputs, 8, calls=2)
    swapped = inputs | {"encoder_hidden_states": -inputs["encoder_hidden_states"]}
    with accelerate(module, Forecast(when=Every(3, 2))):
        torch.testing.assert_close(denoise(module, swapped, 8, calls=2), expected)


def test_guidance_branches_in_one_batch_are_forecast_separately(dit: Any) -> None:
    module = dit.transformer
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "class_labels": torch.tensor([1, 1000])}
    with accelerate(module, Forecast(when=Every(3, 2))):
        batched = denoise(module, inputs, 8)
        alone = denoise(module, {key: value[:1] for key, value in inputs.items()}, 8)
    torch.testing.assert_close(batched[:1], alone, rtol=1e-5, atol=1e-5)


def test_calls_with_a_new_shape_are_evaluated(flux: Any) -> None:
    sizes = {size: run_flux(flux, 8, height=size, width=size) for size in (16, 32)}
    with accelerate(flux, TaylorSeer(interval=1)):
        for size, expected in sizes.items():
            assert torch.equal(run_flux(flux, 8, height=size, width=size), expected)
    module, inputs = tiny_transformer("FLUX")
    small = inputs | {"hidden_states": inputs["hidden_states"][:, :9], "img_ids": inputs["img_ids"][:9]}
    with torch.no_grad(), accelerate(module, Forecast(when=Every(8, 2))) as session:
        for step in range(8):
            module(**inputs if step < 4 else small, timestep=torch.tensor([1.0 - step / 8]))
    # the schedule has no full step at step 4, but the shape changes there
    assert "".join(call.kind[:2] for call in session.report().calls) == "fufufofofufofofo"


def test_the_scheduler_may_be_replaced(dit: Any) -> None:
    scheduler = dit.scheduler
    try:
        with accelerate(dit, Forecast(when=Every(4, 2))) as session:
            run_dit(dit, 6)
            dit.scheduler = HeunDiscreteScheduler()
            first = run_dit(dit, 6)
            assert session.report().full_steps == [0, 1, 5, 9] and len(session.report().calls) == 11
            assert torch.equal(run_dit(dit, 6), first)
        assert not {"step", "set_timesteps"} & {*vars(scheduler), *vars(dit.scheduler)}
        dit.scheduler = DDPMScheduler()
        torch.manual_seed(0)  # the pipeline does not pass its generator to the scheduler
        expected = run_dit(dit, 6)
        with accelerate(dit, TaylorSeer(interval=1)):
            torch.manual_seed(0)
            assert torch.equal(run_dit(dit, 6), expected)
    finally:
        dit.scheduler = scheduler


SCHEDULES = {
    "reference": Every(4), "diffusers": Every(5, style="diffusers", full_after=17), "steps": [0, 3, 4, 11],
    "change": AccumulatedChange(0.2, first_enhance=2),
}  # fmt: skip


@pytest.mark.parametrize("rule", SCHEDULES)
def test_paradec_loop_and_pipeline_evaluate_the_same_steps(rule: str, dit: Any) -> None:
    sampler = Forecast(when=SCHEDULES[rule], where="output")
    with accelerate(dit, sampler) as session:
        latents = run_dit(dit, guidance_scale=1.0)
    steps = session.report().full_steps
    assert 3 < len(steps) < 20
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator("cpu").manual_seed(42))
    model = DiffusionModel(dit.transformer)
    request = {"scheduler": dit.scheduler, "num_inference_steps": 20, "class_labels": [1, 2], "trace": True}
    state = sampler.start(model, noise, **request)
    decode(sampler, model, state)
    assert [i for i, step in enumerate(state.trace.steps) if step.kind == "full"] == steps
    torch.testing.assert_close(state.latent, latents, rtol=1e-5, atol=1e-5)


def test_verification_evaluates_the_last_block_and_uses_the_forecast(flux: Any) -> None:
    block = flux.transformer.single_transformer_blocks[-1].attn.to_q
    calls = []
    handle = block.register_forward_hook(lambda *call: calls.append(1))
    with accelerate(flux, Forecast(when=Verification(base_threshold=1e6, decay_rate=1.0, max_forecasts=6))) as session:
        verified = run_flux(flux)
        report = session.report()
    assert len(calls) == 16
    assert report.full_steps == [0, 7, 14] and "0 mixed; 19% evaluated" in report.short
    assert len(report.changes) == 12 and min(report.changes) > 0
    calls.clear()
    with accelerate(flux, Forecast(when=[0, 7, 14])):
        assert torch.equal(run_flux(flux), verified)
    assert len(calls) == 3
    handle.remove()


def test_schedules_of_bac_are_calibrated_saved_and_followed(flux: Any, plain: dict, tmp_path: Path) -> None:
    before = attributes(flux.transformer)
    schedule = calibrate_bac(flux, lambda: run_flux(flux), 5, bubbling=3)
    assert attributes(flux.transformer) == before and not {"step", "set_timesteps"} & set(vars(flux.scheduler))
    names = [place.name for place in find_places(flux.transformer, "module") if place.kind == "forecast"]
    assert [name for name, _ in schedule.modules] == names and schedule.steps == 16
    without_bubbling = calibrate_bac(flux, lambda: run_flux(flux), 5, bubbling=0).as_dict()
    assert {len(steps) for steps in without_bubbling.values()} == {5}
    assert all(without_bubbling[name] <= steps for name, steps in schedule.as_dict().items())
    assert sum(len(steps) for steps in schedule.as_dict().values()) > 5 * len(names)
    schedule.save(tmp_path / "bac.json")

    calls = count_calls(flux.transformer, names)
    with accelerate(flux, Forecast(when=str(tmp_path / "bac.json"), how="reuse")) as session:
        first = run_flux(flux)
        assert calls == {name: len(steps) for name, steps in schedule.as_dict().items()}
        assert {call.kind for call in session.report().calls} == {"full", "mixed", "forecast"}
        assert torch.equal(run_flux(flux), first)
        refuses(lambda: run_flux(flux, 8), "made for runs of 16 steps; this one has 8")
    for name in names:
        del dict(flux.transformer.named_modules())[name].forward
    with accelerate(flux, Forecast(when=calibrate_bac(flux, lambda: run_flux(flux), 16, metric="l1"), how="reuse")):
        assert torch.equal(run_flux(flux), plain["flux"])
    misnamed = BlockSchedule(16, (("transformer_blocks.0.mlp", (0,)), *schedule.modules[1:]))
    refuses(lambda: accelerate(flux, Forecast(when=misnamed)), r"when: .*transformer_blocks\.0\.attn")
    for wrong in ({"updates": 0}, {"updates": 17}, {"metric": "l3"}, {"samples": 0}, {"runs": 0}):
        refuses(partial(calibrate_bac, flux, lambda: run_flux(flux, 16), **{"updates": 5} | wrong), next(iter(wrong)))


class TableBranch(nn.Module):
    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def forward(self, hidden_states: Tensor, step: int) -> Tensor:
        return self.table[step].view_as(hidden_states)


class TableTransformer(nn.Module):
    """One block with two branches whose outputs are read from tables [steps, features]."""

    def __init__(self, attention: Tensor, feed_forward: Tensor):
        super().__init__()
        branches = {"attn": TableBranch(attention), "ff": TableBranch(feed_forward)}
        self.transformer_blocks = nn.ModuleList([nn.ModuleDict(branches)])

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            for branch in block.values():
                hidden_states = hidden_states + branch(hidden_states, 6 - int(timestep))
        return hidden_states


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("samples", "runs"), [(65536, 1), (40, 1), (9, 1), (40, 3)])
def test_bac_finds_the_best_schedule(metric: str, samples: int, runs: int) -> None:
    tables = torch.randn(runs, 2, 7, 40, generator=torch.Generator().manual_seed(1)).cumsum(2)
    module, tables_of_runs = TableTransformer(*tables[0]), iter(tables)

    def run() -> None:
        for branch, table in zip(module.transformer_blocks[0].values(), next(tables_of_runs), strict=True):
            branch.table = table
        for step in range(7):
            module(torch.zeros(1, 40), timestep=torch.tensor(6 - step))

    actual = calibrate_bac(module, run, 3, runs=runs, metric=metric, samples=samples, bubbling=0)
    for index, (name, steps) in enumerate(actual.modules):
        stride = next(stride for stride in range(1, 41) if len(range(0, 40, stride)) <= samples)
        sampled = [[[row[i] for i in range(0, 40, stride)] for row in table] for table in tables[:, index].tolist()]

        def loss(a: list[float], b: list[float]) -> float:
            if metric == "cosine":
                inner = sum(x * y for x, y in zip(a, b, strict=True))
                return -inner / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
            distances = [abs(x - y) for x, y in zip(a, b, strict=True)]
            return sum(x if metric == "l1" else x * x for x in distances) / len(distances)

        def total_loss(updates: tuple[int, ...], sampled: list[list[list[float]]] = sampled) -> float:
            sources = [max(update for update in updates if update <= step) for step in range(7)]
            return sum(loss(table[sources[step]], table[step]) for table in sampled for step in range(7))

        best = min(((0, a, b) for a in range(1, 7) for b in range(a + 1, 7)), key=total_loss)
        assert (name.split(".")[-1], steps) == (("attn", "ff")[name.endswith("ff")], best)


def test_memory_is_limited_to_a_budget() -> None:
    """With two calls per step, a limit equal to their memory is enough. One byte less raises in the second call."""
    module, inputs = tiny_transformer("Wan")
    requested = Forecast(when=Every(3, 3), order=2)
    with accelerate(module, requested) as session:
        expected = denoise(module, inputs, 6, calls=2)
        needed = session.report().bytes
    with accelerate(module, replace(requested, max_memory=needed)) as session:
        for _ in range(2):
            assert torch.equal(denoise(module, inputs, 6, calls=2), expected)
        assert session.report().bytes == needed
    for bound, calls in ((needed - 1, 2), (1000, 1)):
        with accelerate(module, replace(requested, max_memory=bound)) as session:
            message = f"max_memory={bound}: where='module' at order 2 needs .*{calls} calls"
            refuses(lambda: denoise(module, inputs, 6, calls=2), message)
            assert len(session.report().calls) == calls - 1


@pytest.mark.parametrize(
    ("settings", "smaller"),
    [
        ({"where": "module"}, "where='block', where='stack', where='output', a lower order needs less"),
        ({"where": "block", "order": 0}, "where='stack', where='output' needs less"),
        ({"where": "output"}, "a lower order needs less"),
        ({"when": AccumulatedChange(0.1, watch="modulated"), "how": "reuse", "where": "stack"}, ""),
        ({"when": AccumulatedChange(0.1), "where": "stack"}, "where='output', a lower order needs less"),
        ({"when": "verification"}, "where='block', a lower order needs less"),
        ({"when": "first_block"}, ""),
    ],
)
def test_errors_of_a_budget_name_the_needed_memory_and_smaller_targets(settings: dict[str, Any], smaller: str) -> None:
    module, inputs = tiny_transformer("FLUX")

    def read_error(budget: int) -> str:
        with accelerate(module, Forecast(**settings, max_memory=budget)):
            return refuses(lambda: denoise(module, inputs, 8), "calls of a step so far")

    def read_need(budget: int) -> float:
        return float(re.findall(r"needs (\S+) MB", read_error(budget))[0])

    need = read_need(1)
    assert [read_need(int(share * 1e6 * need)) for share in (0.2, 0.5, 0.8)] == [need] * 3
    assert read_error(int(0.98e6 * need)).partition("so far")[2] == (smaller and f"; {smaller}")
    with accelerate(module, Forecast(**settings, max_memory=int(1.02e6 * need))) as session:
        denoise(module, inputs, 8)
    assert session.report().bytes <= 1.02e6 * need


def test_a_method_with_other_settings(dit: Any) -> None:
    """Arguments that `Forecast(when=METHOD, ...)` omits are those of the method."""
    method = paradec.TeaCache(0.3)
    assert method.forecaster.slots == 1  # the property is cached, which must not affect the copies below
    assert Forecast(when=method, max_memory="1GB") == replace(method, max_memory=10**9)
    assert Forecast(when=method, how="newton") == replace(method, how="newton")
    assert Forecast(when=TaylorSeer(3, order=2), where="stack") == Forecast(Every(3), Taylor(2), "stack")
    with accelerate(dit, Forecast(when=method, max_memory="1GB")):
        limited = run_dit(dit)
    with accelerate(dit, method):
        assert torch.equal(run_dit(dit), limited)


def test_the_error_of_a_second_session_names_a_call_that_detaches_the_first(dit: Any, plain: dict[str, Tensor]) -> None:
    for _ in range(2):
        accelerate(dit, TaylorSeer(2))
        text = refuses(lambda: accelerate(dit, TaylorSeer()), "accelerated already")
        eval(text.rpartition(": ")[2], {"pipe": dit})
        assert torch.equal(run_dit(dit), plain["dit"])
    assert not any("_paradec_session" in vars(module) for module in dit.transformer.modules())


@pytest.mark.thinned
@pytest.mark.parametrize(("kind", "attach_first"), [("block_level", True), ("leaf_level", False)])
def test_group_offloading(kind: str, attach_first: bool) -> None:
    module, inputs = tiny_transformer("FLUX")
    cpu = torch.device("cpu")
    with accelerate(module, Forecast(when=Every(3, 2))):
        expected = denoise(module, inputs, 5)
    plain = denoise(module, inputs, 5)
    options = {"onload_device": cpu, "offload_device": cpu, "offload_type": kind}
    options |= {"num_blocks_per_group": 1} if kind == "block_level" else {}
    if not attach_first:
        apply_group_offloading(module, **options)
    for target in TARGETS:
        if attach_first:
            module, inputs = tiny_transformer("FLUX")
        session = accelerate(module, Forecast(when=Every(3, 2), where=target))
        if attach_first:
            apply_group_offloading(module, **options)
        first = denoise(module, inputs, 5)
        assert torch.equal(denoise(module, inputs, 5), first)
        assert target != "module" or torch.equal(first, expected)
        assert session.report().full_steps == [0, 1, 4]
        session.detach()  # works also if other hooks were added later
        assert torch.equal(denoise(module, inputs, 5), plain)


def test_hooks_of_accelerate_added_and_removed() -> None:
    module, inputs = tiny_transformer("Wan")
    plain = denoise(module, inputs, 5)
    with accelerate(module, Forecast(when=Every(3, 2))):
        expected = denoise(module, inputs, 5)
    add_hook_to_module(module, ModelHook())
    with accelerate(module, Forecast(when=Every(3, 2))) as session:
        for _ in range(2):
            assert torch.equal(denoise(module, inputs, 5), expected)
            assert session.report().full_steps == [0, 1, 4]
            remove_hook_from_module(module, recurse=True)
            add_hook_to_module(module, ModelHook())
    assert torch.equal(denoise(module, inputs, 5), plain)


@pytest.mark.parametrize("target", ["stack", *(pytest.param(t, marks=pytest.mark.full) for t in ("module", "block"))])
def test_compiled_blocks(target: str) -> None:
    sampler = TaylorSeer(interval=3, where=target)
    module, inputs = tiny_transformer("PixArt")
    plain = denoise(module, inputs, 3)
    with accelerate(module, sampler):
        expected = denoise(module, inputs, 3)
    for compiles_first in (True, False):
        module, inputs = tiny_transformer("PixArt")
        session = None if compiles_first else accelerate(module, sampler)
        for block in module.transformer_blocks:
            block.compile(backend="eager", fullgraph=True)
        before = attributes(module)
        with session or accelerate(module, sampler) as session:
            torch.testing.assert_close(denoise(module, inputs, 3), expected)
            assert len(session.report().notes) == (target == "module")
        if compiles_first:
            assert attributes(module) == before
        assert all(block._compiled_call_impl is not None for block in module.transformer_blocks)
    torch.testing.assert_close(denoise(module, inputs, 3), plain)


@pytest.mark.further
def test_a_transformer_compiled_as_a_whole() -> None:
    module, inputs = tiny_transformer("DiT")
    with accelerate(module, TaylorSeer(interval=3, where="output")):
        expected = denoise(module, inputs, 3)
    compiled = torch.compile(module, backend="eager")
    refuses(lambda: accelerate(compiled, TaylorSeer()), "compiled as a whole.*where='output'")
    with accelerate(compiled, TaylorSeer(interval=3, where="output")):
        latent = inputs["hidden_states"]
        with torch.no_grad():
            for i in range(3):
                call = inputs | {"hidden_states": latent, "timestep": torch.full((2,), 1000.0 * (3 - i) / 3).long()}
                latent = latent - compiled(**call, return_dict=False)[0][:, :4] / 3
    torch.testing.assert_close(latent, expected)


def test_half_precision_is_preserved() -> None:
    module, inputs = tiny_transformer("FLUX")
    module = module.bfloat16()
    inputs = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    for target in TARGETS:
        wide = Forecast(when=Every(3), how=Taylor(dtype="float32"), where=target)
        sizes = []
        for sampler in (wide, Forecast(when=Every(3), how="taylor", where=target)):
            with accelerate(module, sampler) as session:
                assert denoise(module, inputs, 6).dtype == torch.bfloat16
            sizes.append(session.report().bytes)
            check_bound(module, sampler, sizes[-1], partial(denoise, module, inputs, 6))
        assert sizes[0] == 2 * sizes[1] > 0


def test_patterns_that_cannot_work(flux: Any, dit: Any, plain: dict[str, Tensor]) -> None:
    before = attributes(dit.transformer), attributes(flux.transformer)
    for pipe, target, message in (
        (dit, "blocks.*attn", r"modules: pattern 'blocks.\*attn' matches no module.*transformer_blocks.0.attn1"),
        (dit, Modules("proj_out_2", "layers.*"), "skip: pattern 'layers"),
        # diffusers' lite mode on DiT skips blocks without a forecast after them
        (dit, Modules(r"transformer_blocks\.0\.attn1", r"transformer_blocks\.1"), "no forecast.*blocks.1"),
        (dit, [r".*\.0\.attn1", r"transformer_blocks\.0"], "which contains it"),
        (flux, Modules("proj_out", "proj_out"), "modules and skip both match 'proj_out'"),
    ):
        refuses(partial(accelerate, pipe, TaylorSeer(where=[target] if isinstance(target, str) else target)), message)
    refuses(lambda: accelerate(flux, Forecast("verification", where="output")), "when=Verification.*where='output'")
    assert (attributes(dit.transformer), attributes(flux.transformer)) == before
    # ff of block 1 is forecast, but the output of the skipped attention is also added to the residual stream
    with accelerate(dit, TaylorSeer(where=Modules(r"transformer_blocks\.1\.ff", skip=r"transformer_blocks\.0\.attn1"))):
        for _ in range(2):
            refuses(lambda: run_dit(dit), r"skip: .*transformer_blocks\.0\.attn1.*reached the output", RuntimeError)
    flux.transformer.spare = nn.Linear(1, 1)
    with accelerate(flux, TaylorSeer(where=["spare"])):
        refuses(lambda: run_flux(flux, 4), "called none of the hooked modules: spare", RuntimeError)
    del flux.transformer.spare
    # the patterns of diffusers' lite mode correspond to where="output"
    with accelerate(flux, TaylorSeer(where={"modules": "proj_out", "skip": r"[^.]*blocks\.\d+"}, interval=5)):
        expected = run_flux(flux)
    with accelerate(flux, TaylorSeer(interval=5, where="output")):
        assert torch.equal(run_flux(flux), expected)
    assert torch.equal(run_dit(dit), plain["dit"])


def test_unsupported_objects_are_refused(flux: Any, wan: Any) -> None:
    refuses(lambda: accelerate(wan, TaylorSeerCacheConfig()), r"matches no module of Wan.*TaylorSeer\(interval=5\)")
    for pipe in (3, "flux", object(), type("Pipe", (), {"scheduler": None})()):
        refuses(partial(accelerate, pipe), "must be a diffusers pipeline", TypeError)
    for sampler, text in ((create("threshold"), "Threshold"), (3, "3")):
        message = f"^sampler={text}.*'taylorseer'.*TaylorSeerCacheConfig.*cache='block'"
        refuses(partial(accelerate, flux, sampler), message, TypeError)
    for name, settings, message in (
        ("threshold", {}, "unknown sampler: 'threshold'.*first_block"),
        ("taylorseer", {"cache_interval": 3}, "taylorseer has no setting 'cache_interval'; it is called 'interval'"),
        ("first_block(residual_diff_threshold=0.1)", {}, "it is called 'threshold' here"),
        ("teacache", {"thresh": 1}, "unknown setting of teacache: 'thresh'.*threshold"),
        ("teacache", {"coefficients": "flux"}, "coefficients='flux' must be a list"),
    ):
        refuses(partial(accelerate, flux, name, **settings), message)
    refuses(lambda: accelerate(flux, TaylorSeer(), interval=3), "interval=... needs a method's name", TypeError)
    refuses(lambda: accelerate(nn.Linear(2, 2), TaylorSeer()), "Linear has no list of blocks")
    odd = nn.Module()
    odd.blocks = nn.ModuleList([DriftBlock(Drift(1)), nn.Linear(2, 2)])
    refuses(lambda: accelerate(odd, TaylorSeer()), r"block blocks.1 \(Linear\)")
    with accelerate(flux, TaylorSeer()):
        refuses(lambda: accelerate(flux, TaylorSeer()), "accelerated already")
    flux.transformer.enable_cache(TaylorSeerCacheConfig())
    refuses(lambda: accelerate(flux, TaylorSeer()), "diffusers' own enabled")
    flux.transformer.disable_cache()
    with accelerate(flux, TaylorSeer()):
        flux.transformer.enable_cache(FirstBlockCacheConfig(0.5))
        refuses(lambda: run_flux(flux), "disable_cache")
        flux.transformer.disable_cache()
        run_flux(flux)
    with accelerate(nn.Sequential(nn.Linear(2, 2)), TaylorSeer(where=["0"])) as session:
        refuses(lambda: session.transformers[0].module(torch.ones(1, 2)), "argument timestep")


@pytest.mark.parametrize("sampler", [TaylorSeer(interval=3), Forecast("first_block", where="stack")])
def test_wrong_ways_to_saved_settings_lead_to_a_right_one(sampler: Any, flux: Any, tmp_path: Path) -> None:
    request, data = tmp_path / "request.json", tmp_path / "data.json"
    paradec.Request(sampler=sampler).save(request)
    data.write_text(json.dumps(sampler.to_dict()))
    saved = paradec.Request(sampler=sampler)
    for settings in (str(request), data, sampler.to_dict(), saved.to_dict(), Every(3).to_dict()):
        text = refuses(partial(accelerate, flux, settings), "; write paradec", (TypeError, ValueError))
        # the error recommends a call in which "..." stands for the settings
        call = text.rpartition("; write ")[2].replace("...", "settings")
        assert eval(call, {"paradec": paradec, "json": json, "settings": settings}) in (sampler, Forecast(Every(3)))
    refuses(lambda: accelerate(flux, saved), "request.sampler", TypeError)
    refuses(lambda: accelerate(flux, preset=str(request)), r"paradec.Request.load\(FILE\).sampler")
    refuses(lambda: accelerate(flux, "none.json"), "none.json")
    refuses(lambda: paradec.Request(sampler=sampler.to_forecast().when), r"paradec.Forecast\(when=", TypeError)


def test_report(flux: Any) -> None:
    with accelerate(flux) as session:  # by default the full steps are spread evenly
        run_flux(flux)
        report = session.report()
    assert report.full_steps == [0, 5, 10, 15]
    full = median(call.seconds for call in report.calls if call.kind == "full")
    assert report.speedup == pytest.approx(full * len(report.calls) / sum(call.seconds for call in report.calls))
    assert f"{report.speedup:.2f} times as fast as with only full calls" in str(report)
    with accelerate(flux, create("taylorseer", preset="paper")) as session:
        run_flux(flux)
        report = session.report()
    assert report.full_steps == [0, 1, 2, 8, 14] and report.runs == 1 and len(report.calls) == 16
    assert 0.5 < report.coverage["transformer"] < 1
    assert all(call.seconds > 0 for call in report.calls)
    assert [call.bytes for call in report.calls[:3]] == [report.bytes // 2, report.bytes // 2, report.bytes]
    assert "5 full, 11 forecast, 0 mixed" in str(report)
