"""`Forecast` and `TaylorSeer`: recorded schedules and forecasts, bases, refresh rules, and cache-dit's step masks."""

import copy
import json
import pickle
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
)
from oracles.forecast import denoise, forecast_loop
from pipelines import dit_pipeline, flux_pipeline, noise, run_flux, tiny_dit
from recorded import golden, is_packaged, read_json, read_json_unrecorded, replay, replays
from torch import Tensor

import paradec
from paradec.core.protocol import decode
from paradec.integrations.diffusers.calibration import adaptive_schedule, bubbling_union
from paradec.models.images.diffusion import DiffusionModel
from paradec.samplers.forecast.base import ForecastState
from paradec.samplers.forecast.bases import BASES, DMD, Basis, FoCa, Hermite, History, Newton, Reuse, Taylor
from paradec.samplers.forecast.forecast import RULES, Forecast
from paradec.samplers.forecast.methods import TaylorSeer
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Rule, RunProgress, Verification
from paradec.samplers.forecast.rules import SeaCache
from paradec.samplers.forecast.step_schedule import MASKS, BlockSchedule, StepMask, StepSchedule, step_mask
from paradec.samplers.forecast.targets import Modules

LABELS = [1, 2, 7]


def recorded_with(field: str) -> list[Path]:
    """Return the recorded files whose case (or first case) has this field."""
    paths = []
    for path in sorted(golden("diffusion").glob("*.json")):
        cases = read_json_unrecorded(path)
        paths += [path] if cases and field in (cases[0] if isinstance(cases, list) else cases) else []
    return paths


def full_steps(rule: Rule, total: int) -> list[int]:
    return [i for i in range(total) if rule.is_full(RunProgress(total, i))]


def decode_latent(sampler: TaylorSeer, model: DiffusionModel, latent: Tensor, **request: object) -> ForecastState:
    state = sampler.start(model, latent, **{"scheduler": DDIMScheduler(), "num_inference_steps": 20} | request)
    decode(sampler, model, state)
    return state


@pytest.mark.parametrize("path", recorded_with("scheme"), ids=lambda path: path.stem)
def test_schedules(path: Path) -> None:
    cases = read_json(path)
    if is_packaged("diffusion"):
        assert len(cases) >= 62 and {case["scheme"] for case in cases} == {"reference", "diffusers"}
    for number, case in enumerate(cases):
        with replay(f"{path.stem}, case {number}"):
            first = case["first_enhance"] if case["scheme"] == "reference" else case["before"]
            rule = Every(case["N"], first, case["scheme"], case.get("after"))
            assert full_steps(rule, case["T"]) == case["full"]


def forecasts_of(basis: Basis, case: dict, dtype: torch.dtype) -> list[tuple[History, dict, Tensor | None]]:
    """List (history, record, forecast) for every step of a case."""
    features, history, steps = torch.tensor(case["features"], dtype=dtype), None, []
    assert len(features) == case["num_steps"]
    assert [record["index"] for record in case["records"] if record["type"] == "full"] == case["full_steps"]
    for record in case["records"]:
        index, forecast = record["index"], None
        if record["type"] == "full":
            history = basis.update(history, features[index : index + 1], index)
        else:
            forecast = basis.forecast(history, index)
            history = basis.roll(history, forecast)
        steps.append((history, record, forecast))
    return steps


@pytest.mark.parametrize("path", recorded_with("variant"), ids=lambda path: path.stem)
@replays("path")
def test_states_and_forecasts(path: Path) -> None:
    case = read_json(path)
    dtype = getattr(torch, case["dtype"])
    basis = Taylor(case["max_order"], last_warmup_step=case["first_enhance"] - 2)
    for history, record, forecast in forecasts_of(basis, case, dtype):
        if forecast is not None:
            assert torch.equal(forecast[0], torch.tensor(record["prediction"], dtype=dtype))
            continue
        expected = torch.tensor(record["factors"], dtype=dtype)
        assert len(expected) <= case["max_order"] + 1
        if case["variant"] == "dit":  # the public code for DiT counts steps down, which negates odd derivatives
            expected[1::2] *= -1
        assert torch.equal(torch.cat(history.tensors), expected)


def basis_of(case: dict) -> tuple[Basis, float]:
    """Return the basis of a case, and the relative tolerance."""
    kind, order = case["kind"], case.get("order")
    if kind == "diffusers_state":
        return Taylor(order), 0
    if kind == "cachedit_taylor":
        return Taylor(order, last_warmup_step=1), 0  # cache-dit computes differences only after step 1
    if kind == "hermite":
        return Hermite(order, sigma=case["sigma"]), 1e-12
    if kind == "foca":
        return FoCa(), 0
    assert kind == "dmd"
    return DMD(order, window=case["history"]), 1e-8  # the matrix of its eigenvectors is nearly singular


@pytest.mark.parametrize("path", recorded_with("kind"), ids=lambda path: path.stem)
@replays("path")
def test_variants(path: Path) -> None:
    case = read_json(path)
    basis, tolerance = basis_of(case)
    for history, record, forecast in forecasts_of(basis, case, torch.float64):
        if forecast is not None:
            expected = torch.tensor(record["prediction"], dtype=torch.float64)
            torch.testing.assert_close(forecast[0], expected, rtol=tolerance, atol=tolerance)
        elif "factors" in record:
            assert torch.equal(torch.cat(history.tensors), torch.tensor(record["factors"], dtype=torch.float64))


def largest_error(basis: Basis, degree: int, nodes: list[int], dtype: torch.dtype = torch.float64) -> float:
    """Return the largest error of forecasts of a random polynomial that is evaluated at the steps `nodes`."""
    coefficients = torch.randn(degree + 1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def feature(step: int) -> Tensor:
        return sum(c * (step / 10) ** i for i, c in enumerate(coefficients)).to(dtype)

    history = None
    for node in nodes:
        history = basis.update(history, feature(node), node)
    errors = []
    for step in range(nodes[-1] + 1, nodes[-1] + 6):
        forecast = basis.forecast(history, step)
        assert forecast.dtype == dtype
        errors.append(float((forecast.double() - feature(step).double()).abs().max()))
    return max(errors)


def test_polynomials_that_a_basis_forecasts_exactly() -> None:
    for nodes in ([0, 1, 2, 7, 12], [0, 1, 3, 4, 9]):
        assert largest_error(Taylor(1), 1, nodes) < 1e-12
        assert largest_error(Newton(2), 2, nodes) < 1e-12 and largest_error(Newton(4), 4, nodes) < 1e-11
        assert largest_error(Taylor(2), 2, nodes) > 1e-2 and largest_error(Newton(2), 3, nodes) > 1e-3
        assert largest_error(Hermite(1, sigma=0.5**0.5), 1, nodes) < 1e-12
        for basis in (Taylor(0), Newton(0), Reuse(5)):
            assert largest_error(basis, 0, nodes) == 0
    assert largest_error(DMD(1, window=6), 1, [0, 4, 8, 12, 16]) < 1e-6  # a line is a mode of DMD


def test_several_consecutive_forecasts_of_foca() -> None:
    """FoCa equals its definition: a forecast depends on the previous one; from the fourth on, the slope weighs less."""
    features = torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    basis, history, longest = FoCa(), None, 0
    full = full_before = used = used_before = torch.zeros(2, 3, dtype=torch.float64)
    last = 0
    for step, feature in enumerate(features):
        if step in (0, 1, 8, 10):
            history = basis.update(history, feature, step)
            full, full_before, used, used_before, last = feature, full, feature, used, step
            continue
        since = step - last
        slope = (full - full_before) + (used - used_before)
        if since <= 3:
            expected = full + since / 2 * slope
        else:
            expected = 3 / since * (full + 1.5 * slope) + (1 - 3 / since) * full
        forecast = basis.forecast(history, step)
        torch.testing.assert_close(forecast, expected, rtol=1e-12, atol=1e-12)
        history = basis.roll(history, forecast)
        used, used_before, longest = expected, used, max(longest, since)
    assert longest == 6


def test_the_history_has_the_dtype_of_the_derivatives() -> None:
    for name, basis in BASES.items():
        history = None
        for step in (0, 1, 2, 3):
            feature = torch.full((2, 4), 1.0 + step).bfloat16()
            history = basis(order=2, dtype=torch.float32).update(history, feature, step)
        assert {tensor.dtype for tensor in history.tensors} == {torch.float32}, name
        assert len(history.tensors) <= basis(order=2).slots and history.count_bytes() == 32 * len(history.tensors)
        assert basis(order=2).forecast(history, 4).dtype == torch.bfloat16
    # derivatives in bfloat16 are rounded, derivatives in float64 are not
    narrow, wide = (
        largest_error(Taylor(1, dtype), 1, [0, 3], torch.float32) for dtype in (torch.bfloat16, torch.float64)
    )
    assert wide < 1e-5 < 1e-3 < narrow


def test_a_feature_with_a_new_shape_resets_the_history() -> None:
    basis = Taylor(2)
    history = basis.update(basis.update(None, torch.ones(2, 3), 0), torch.ones(2, 5), 1)
    assert len(history.tensors) == 1 and history.tensors[0].shape == (2, 5)


def evaluated_steps(sampler: TaylorSeer, total: int, change: float = 0.0, error: float | None = None) -> list[int]:
    """Return the evaluated steps of a run whose input changes by `change` per step. error: the error of forecasts."""
    progress, full = RunProgress(total), []
    for index in range(total):
        progress.change += sampler.when.rescale(change) if isinstance(sampler.when, AccumulatedChange) else 0
        evaluated = sampler.evaluates(progress)
        if not evaluated:
            progress.error = error
        progress.finish_step(evaluated)
        full += [index] * evaluated
    return full


VERIFIED = Verification(base_threshold=0.5, decay_rate=0.1, min_forecasts=2, max_forecasts=4)
AT_ONCE = Verification(base_threshold=0.5, decay_rate=1.0, max_forecasts=4)
CHANGED = AccumulatedChange(threshold=0.3)


@pytest.mark.parametrize(
    ("rule", "total", "change", "error", "full"),
    [
        (CHANGED, 10, 0.125, None, [0, 3, 6, 9]),
        (replace(CHANGED, first_enhance=3), 10, 0.125, None, [0, 1, 2, 5, 8]),
        (AccumulatedChange(threshold=0.3, coefficients=(2.0, 0.0)), 8, 0.125, None, [0, 2, 4, 6]),
        (AccumulatedChange(threshold=9, max_forecasts=2), 8, 0.1, None, [0, 3, 6]),
        (AccumulatedChange(threshold=0.25), 7, 0.125, None, [0, 2, 4, 6]),  # a change equal to the threshold is enough
        (VERIFIED, 12, 0, 0.01, [0, 5, 10]),
        (VERIFIED, 12, 0, 0.6, [0, 3, 6, 9]),
        # the allowed error decreases during the run: 0.34 at step 2, 0.28 at step 3
        (VERIFIED, 12, 0, 0.3, [0, 4, 7, 10]),
        (replace(VERIFIED, first_enhance=4), 12, 0, 0.09, [0, 2, 7]),
        (AT_ONCE, 12, 0, 0.5, [0, 5, 10]),  # an error equal to the threshold is allowed
        (AT_ONCE, 6, 0, 0.5000001, [0, 2, 4]),
        (Verification(base_threshold=0.01, max_forecasts=4), 12, 0, 0.1, [0, 5, 10]),
    ],
)
def test_rules_evaluate_the_expected_steps(rule: Rule, total: int, change: float, error: Any, full: list[int]) -> None:
    assert evaluated_steps(Forecast(when=rule), total, change, error) == full


def test_memory_limits_are_read_from_text() -> None:
    expected_by_text = {99: 99, "12": 12, "4kb": 4_000, "3 MB": 3_000_000, "2GB": 2_000_000_000, "7KiB": 7 * 1024}
    expected_by_text |= {"0.5MiB": 512 * 1024, "1gib": 1024**3, "1.5GB": 1_500_000_000}
    assert {text: TaylorSeer(max_memory=text).max_memory for text in expected_by_text} == expected_by_text
    for text in ("-1GB", "2TB", "nanGB", "9" * 400):
        refuses(partial(TaylorSeer, max_memory=text), "max_memory='.* must be bytes, as a number or as text")


def test_adaptive_schedule_finds_the_best_schedule() -> None:
    rng = np.random.default_rng(0)
    for total in range(1, 8):
        for updates in range(1, total + 1):
            scores = rng.random((total, total))

            def total_score(steps: list[int], scores: np.ndarray = scores, total: int = total) -> float:
                ends = [*steps[1:], total]
                return sum(scores[a, t] for a, end in zip(steps, ends) for t in range(a, end))

            totals = [total_score([0, *steps]) for steps in combinations(range(1, total), updates - 1)]
            for maximise, best in ((True, max(totals)), (False, min(totals))):
                steps = adaptive_schedule(scores, updates, maximise)
                assert len(steps) == updates and steps[0] == 0 and steps == sorted(set(steps))
                assert total_score(steps) == pytest.approx(best, abs=1e-12)
    assert adaptive_schedule(np.ones((6, 6)), 3) == [0, 1, 2]  # of equal schedules, the earliest
    refuses(lambda: adaptive_schedule(np.ones((6, 6)), 7), "updates=7")


def test_bubbling_union_only_adds() -> None:
    steps = {"0.attn": [0, 3], "0.ff": [0, 4], "1.attn": [0, 5], "1.ff": [0, 6]}
    errors = {"0.attn": 1.0, "0.ff": 2.0, "1.attn": 4.0, "1.ff": 3.0}
    united = bubbling_union(steps, errors, ["0.ff", "1.ff"], 3)
    assert united == {"0.attn": [0, 3], "0.ff": [0, 4, 6], "1.attn": [0, 5, 6], "1.ff": [0, 6]}
    assert bubbling_union(steps, errors, ["0.ff", "1.ff"], 4)["0.attn"] == [0, 3, 4, 6]
    assert bubbling_union(steps, errors, ["0.ff", "1.ff"], 1) == steps


def test_block_schedule_files(tmp_path: Path) -> None:
    schedule = BlockSchedule(8, (("a.attn", (0, 2)), ("a.ff", (0, 5))))
    schedule.save(tmp_path / "bac.json")
    assert BlockSchedule.load(tmp_path / "bac.json") == schedule
    sampler = Forecast(when=str(tmp_path / "bac.json"))
    assert sampler.when == schedule and sampler.forecaster == Reuse()
    for data in ({"steps": 8}, {"steps": 8, "modules": {"a": [1, 2]}}, {"steps": 2, "modules": {"a": [0, 2]}}, [1]):
        refuses(partial(BlockSchedule.from_dict, data), "refresh|step")
    refuses(lambda: BlockSchedule.load(tmp_path / "nowhere.json"), "nowhere")


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(
    "scheduler", [DDIMScheduler(), EulerDiscreteScheduler(), DPMSolverMultistepScheduler(), HeunDiscreteScheduler()]
)
def test_interval_one_equals_the_loop_without_forecasts(scheduler: object, scale: float) -> None:
    module, latent = tiny_dit(), noise(3)
    request = {"scheduler": scheduler, "num_inference_steps": 10, "guidance_scale": scale, "class_labels": LABELS}
    state = decode_latent(TaylorSeer(interval=1, order=2), DiffusionModel(module), latent, **request)
    assert torch.equal(state.latent, denoise(module, latent, LABELS, scheduler, 10, scale))
    branches = 1 if scale == 1.0 else 2
    assert state.nfe.tolist() == [state.total] * 3
    assert state.row_forwards.tolist() == [state.total * branches] * 3
    assert state.forwarded_tokens.tolist() == [state.total * branches * 16] * 3


RISING = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)


@pytest.mark.parametrize(
    ("interval", "order", "first_enhance", "scheduler"),
    [
        *((3, 1, 2, DDIMScheduler()), (3, 1, 3, DDIMScheduler()), (4, 2, 1, DDIMScheduler())),
        *((5, 4, 3, DDIMScheduler()), (2, 0, 1, DDIMScheduler()), (1, 1, 2, RISING), (3, 1, 2, RISING)),
    ],
)
def test_forecasts_equal_a_plain_loop(interval: int, order: int, first_enhance: int, scheduler: Any) -> None:
    module, latent = tiny_dit(torch.float64), noise(3, torch.float64)
    sampler = Forecast(when=Every(interval, first_enhance), order=order)
    request = {"class_labels": LABELS, "scheduler": scheduler}
    state = decode_latent(sampler, DiffusionModel(module), latent, trace=True, **request)
    expected, kinds = forecast_loop(module, latent, LABELS, scheduler, 20, interval, order, first_enhance)
    assert (scheduler.timesteps.diff() > 0).all() == (scheduler is RISING)
    torch.testing.assert_close(state.latent, expected, rtol=1e-10, atol=1e-10)
    assert [step.kind for step in state.trace.steps] == kinds
    full = kinds.count("full")
    assert full == len(full_steps(sampler.rule, 20)) == first_enhance + (20 - first_enhance) // interval
    assert state.nfe.tolist() == [full] * 3 and state.progress == (60, 60)
    assert [step.forwarded for step in state.trace.steps] == [[16 * (kind == "full")] * 3 for kind in kinds]


@pytest.mark.parametrize("basis", list(BASES))
def test_decoding_with_every_basis_equals_a_plain_loop(basis: str) -> None:
    module, latent = tiny_dit(torch.float64), noise(2, torch.float64)
    sampler = Forecast(when=Every(3, 2), order=2, how=basis)
    state = decode_latent(sampler, DiffusionModel(module), latent, class_labels=[1, 2], num_inference_steps=20)
    scheduler, history, forecaster = DDIMScheduler(), None, sampler.forecaster
    scheduler.set_timesteps(20)
    with torch.inference_mode():
        for step, t in enumerate(scheduler.timesteps):
            if step in full_steps(sampler.rule, 20):
                output = module(latent, timestep=t.expand(2), class_labels=torch.tensor([1, 2])).sample[:, :4]
                history = forecaster.update(history, output, step)
            else:
                output = forecaster.forecast(history, step)
                history = forecaster.roll(history, output)
            latent = scheduler.step(output, t, latent).prev_sample
    assert torch.equal(state.latent, latent)


def test_stochastic_schedulers_draw_from_the_seed() -> None:
    model, sampler = DiffusionModel(tiny_dit()), TaylorSeer(interval=3)
    latent = noise(1).expand(2, -1, -1, -1)
    latents = [
        decode_latent(sampler, model, latent, scheduler=DDPMScheduler(), class_labels=1, **source).latent
        for source in ({"seed": 1}, {"seed": 2}, {"generator": torch.Generator().manual_seed(1)})
    ]
    assert not torch.equal(latents[0][0], latents[0][1])  # copies of a row draw different noise
    assert not torch.equal(latents[0], latents[1]) and not torch.equal(latents[0], latents[2])


def test_nan_outputs_raise_an_error_that_names_the_row() -> None:
    module = tiny_dit()
    module.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight.data[LABELS[1]] = torch.nan
    with pytest.raises(FloatingPointError, match="row 1 at step 0"):
        decode_latent(TaylorSeer(), DiffusionModel(module), noise(3), class_labels=LABELS)


def test_equivalent_forms_make_the_same_sampler(tmp_path: Path) -> None:
    """Objects, texts, short forms and plain data make the same sampler; copies and pickles are equal."""
    (tmp_path / "rule.json").write_text(json.dumps(Every(3, 2).to_dict()))
    for forms in (
        [Every(3, 2), "every(interval=3, first_enhance=2)", {"when": "every", "interval": 3, "first_enhance": 2}],
        [Every(3, 2), tmp_path / "rule.json", str(tmp_path / "rule.json")],
        [StepSchedule((0, 4)), [0, 4], (0, 4), {"schema": "paradec-steps/1", "steps": [0, 4], "total": None}],
        [StepMask("slow"), "slow", "step_mask(mask='slow')"],
        [SeaCache(), "seacache", {"when": "seacache"}],
    ):
        assert {Forecast(form) for form in forms} == {Forecast(forms[0])}
    assert TaylorSeer(interval=3).rule == Forecast("every(interval=3)").rule == Every(3)
    assert TaylorSeer(4, 2, first_enhance=3).rule == Every(4, 3) and TaylorSeer(4, 2).forecaster == Taylor(2)
    assert Forecast(how="newton", order=2).forecaster == Forecast(how=Newton(2)).forecaster
    assert Forecast("seacache").forecaster == Taylor() and Forecast("dbcache").forecaster == Reuse()
    for sampler in (
        *(TaylorSeer(), TaylorSeer(interval=3, order=2), Forecast(Every(5, 3, "diffusers"), "dmd(window=4)", "block")),
        *(Forecast([0, 2], Taylor(2, "bfloat16"), Modules("a", "b")), TaylorSeer(where=["a"], max_memory="1KB")),
        *(Forecast(rule) for rule in RULES if rule not in ("magcache", "step_mask")),
        Forecast(BlockSchedule(4, (("a.attn", (0, 2)), ("a.ff", (0,)))), "reuse", max_memory="1.5GB"),
        Forecast(AccumulatedChange(coefficients=(1, 2, 3))),
    ):
        assert TaylorSeer.from_dict(json.loads(json.dumps(sampler.to_dict()))) == sampler
        for copied in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler)), replace(sampler)):
            assert copied == sampler and copied.forecaster == sampler.forecaster and copied.rule == sampler.rule


def test_presets_set_the_rule_and_wrong_short_forms_are_refused() -> None:
    sampler = paradec.samplers.create("taylorseer", preset="dit", order=2)
    assert (sampler.rule, sampler.forecaster) == (Every(4, 2), Taylor(2, last_warmup_step=0))
    refuses(lambda: Forecast(5), r"when=5.*Every\(5\)")
    for settings, text in (
        ({"when": "seacache", "where": "stack"}, r"write paradec.Forecast\(when=..., how=...\)"),
        ({"interval": 3, "how": "foca"}, r"write paradec.Forecast\(when=..., how=...\)"),
    ):
        refuses(partial(TaylorSeer, **settings), text, TypeError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("latent", value) for value in (noise(2).long(), noise(2)[0], noise(2) * torch.nan, noise(2)[..., :4])),
        *(("class_labels", value) for value in ([1], [1, 2000], 1.5)),
        *(("seed", value) for value in ([1], -1)),
        *(("scheduler", object()), ("num_inference_steps", 0), ("guidance_scale", -1.0), ("generator", "one")),
        ("encoder_hidden_states", noise(2)),
    ],
)
def test_wrong_requests_are_refused_with_the_field(name: str, value: Any) -> None:
    request = {"latent": noise(2), "scheduler": DDIMScheduler(), "class_labels": [1, 2]} | {name: value}
    with pytest.raises((ValueError, TypeError), match=name):
        TaylorSeer().start(DiffusionModel(tiny_dit()), request.pop("latent"), **request)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(({"where": "block"}, "where"), ({"where": ["a"]}, "where"), ({"when": "verification"}, "when")),
        *(({"max_memory": 1000}, "max_memory"), ({"when": StepSchedule((0, 2), 20, where="stack")}, "where")),
    ],
)
def test_settings_for_parts_of_the_model_are_refused_for_outputs(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*paradec.accelerate"):
        decode_latent(Forecast(**settings), DiffusionModel(tiny_dit()), noise(1), class_labels=1)


def test_other_models_are_refused() -> None:
    refuses(lambda: TaylorSeer().start(torch.nn.Linear(1, 1), noise(2), scheduler=DDIMScheduler()), "Linear", TypeError)
    refuses(lambda: DiffusionModel(torch.nn.Linear(1, 1)), "DiTTransformer2DModel", TypeError)
    refuses(lambda: DiffusionModel(tiny_dit().train()), "eval")


MASK_FILES = [path for path in sorted(golden("diffusion").glob("*.json")) if "masks" in read_json_unrecorded(path)]
"""Recorded files with masks[name][number of steps], a text with one digit per step: 1 if the step is evaluated."""


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in MASK_FILES for name in read_json_unrecorded(path)["masks"]]
)
def test_equals_cache_dit(path: Path, name: str) -> None:
    masks = read_json(path)["masks"]
    if is_packaged("diffusion"):
        assert set(masks) == set(MASKS) and len(masks[name]) == 22
    for steps in masks[name]:
        with replay(f"{path.stem}, {name}, {steps} steps"):
            flags = masks[name][steps]
            assert step_mask(name, int(steps)) == tuple(i for i, flag in enumerate(flags) if flag == "1")


def test_step_masks_are_schedules_ordered_by_speed() -> None:
    """Every mask includes the first and last step; a mask with a faster name never has more steps."""
    for steps in (4, 6, *range(8, 120)):
        masks = {name: step_mask(name, steps) for name in MASKS}
        for mask in masks.values():
            assert mask[0] == 0 and mask[-1] == steps - 1 and list(mask) == sorted(set(mask))
            assert paradec.Forecast(when=mask).when.steps == mask
        counts = [len(masks[name]) for name in ("slow", "medium", "fast", "ultra")]
        assert counts == sorted(counts, reverse=True)


def test_a_pipeline_follows_a_named_step_mask() -> None:
    pipe = flux_pipeline()
    with paradec.accelerate(pipe, paradec.Forecast(when="fast")) as session:
        for steps in (9, 16):
            latents = run_flux(pipe, steps)
            assert tuple(session.report().full_steps) == step_mask("fast", steps)
        refuses(lambda: run_flux(pipe, 5), "when='fast': there is no mask for 5 steps")
        assert torch.equal(run_flux(pipe, 16), latents)
    with paradec.accelerate(pipe, paradec.Forecast(when=step_mask("fast", 16))):
        assert torch.equal(run_flux(pipe, 16), latents)


def test_unsupported_requests_are_refused() -> None:
    for wrong in ("fastest", "", "Slow"):
        refuses(partial(paradec.Forecast, when=wrong), f"when.*{wrong}")
    for steps in (0, -1, 2.5, True, None):
        refuses(partial(step_mask, "slow", steps), "steps=")
    for steps in (1, 2, 3, 5, 7):
        refuses(partial(step_mask, "slow", steps), f"no mask for {steps} steps")
    module = dit_pipeline().transformer
    calls = []
    module.transformer_blocks[0].register_forward_hook(lambda *call: calls.append(1))
    with (
        paradec.accelerate(module, paradec.Forecast(when="slow")),
        pytest.raises(ValueError, match=r"step_mask\('slow', "),
    ):
        module(torch.zeros(1, 4, 8, 8), torch.tensor([5]), class_labels=torch.tensor([1]))
    assert not calls
