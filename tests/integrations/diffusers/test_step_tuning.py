"""`tune_steps`: steps are searched on some seeds, reported on others, and refused in runs with other settings."""

import itertools
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from pipelines import attributes, dit_pipeline, loop_pipeline, run_dit, run_wan, wan_pipeline

import paradec
from paradec import Forecast, TaylorSeer, accelerate, tune_steps
from paradec.integrations.diffusers.step_tuning import StepTuning, paired_interval
from paradec.samplers.forecast.step_schedule import StepSchedule


@pytest.fixture(scope="module")
def digits() -> Any:
    return paradec.PixelDiTPipeline.digits()


def run_digits(pipe: Any, seed: int, steps: int = 5) -> Any:
    noise = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(seed))
    return pipe(seed % 10, num_inference_steps=steps, latents=noise, output_type="pt").images


def test_searched_steps_and_their_report(digits: Any, tmp_path: Path) -> None:
    before, seeds_of_runs = attributes(digits.transformer), []

    def run(seed: int) -> None:
        seeds_of_runs.append(seed)
        run_digits(digits, seed)

    call = {"budget": 2, "seeds": 2, "report": [5, 9], "runs": 4, "sampler": TaylorSeer(where="output")}
    study, shares = tmp_path / "study.json", []
    tuned = tune_steps(digits, run, **call, study=study, progress=lambda what, share: shares.append(share))
    assert attributes(digits.transformer) == before and not {"step", "set_timesteps"} & set(vars(digits.scheduler))
    assert set(seeds_of_runs) == {0, 1, 5, 9} and tuned.seeds == (0, 1) and shares == sorted(shares)
    for name, schedule in (("even", tuned.even), ("best", tuned.best)):
        assert len(schedule.steps) == 2 and schedule.total == 5 and schedule.scheduler == "DDIMScheduler"
        for half, seeds in (("choose", tuned.seeds), ("report", tuned.report)):
            for seed, error in zip(seeds, tuned.errors[name][half], strict=True):
                assert error == pytest.approx(measure_error(digits, seed, schedule.steps), rel=1e-6)
    choose = {name: statistics.fmean(tuned.errors[name]["choose"]) for name in tuned.errors}
    assert choose["best"] <= choose["even"] and tuned.num_sets <= 4 + 3
    # resumed: only the full runs are repeated
    seeds_of_runs.clear()
    repeated = tune_steps(digits, run, **call, study=study)
    assert repeated.to_dict() == tuned.to_dict() and seeds_of_runs == [0, 1, 5, 9]
    # interrupted: earlier measurements remain, and the resumed search has the same result
    count = itertools.count()

    def stop(what: str, share: float) -> None:
        if next(count) == 2:
            raise KeyboardInterrupt

    part = tmp_path / "part.json"
    with pytest.raises(KeyboardInterrupt):
        tune_steps(digits, run, **call, study=part, progress=stop)
    assert attributes(digits.transformer) == before and "step" not in vars(digits.scheduler)
    assert 0 < len(json.loads(part.read_text())["errors"]) < 6
    assert tune_steps(digits, run, **call, study=part).best == tuned.best
    for changed, message in (({"sampler": TaylorSeer(order=2)}, "sampler"), ({"seeds": 3}, "noise")):
        refuses(partial(tune_steps, digits, run, **call | changed, study=part), f"another {message}")


def measure_error(pipe: Any, seed: int, steps: Any) -> float:
    """Return the relative error of the final latent if only `steps` are evaluated."""
    latents = []
    for settings in (None, Forecast(when=steps, where="output")):
        plain_step = pipe.scheduler.step
        steps_of_run: list[Any] = []

        def step(
            output: Any, t: Any, sample: Any, plain: Any = plain_step, steps_of_run: list = steps_of_run, **options: Any
        ) -> Any:
            result = plain(output, t, sample, **options)
            steps_of_run.append((sample.double(), result[0].double()))
            return result

        pipe.scheduler.step = step
        try:
            if settings is None:
                run_digits(pipe, seed)
            else:
                with accelerate(pipe, settings):
                    run_digits(pipe, seed)
        finally:
            del pipe.scheduler.step
        latents.append((steps_of_run[0][0], steps_of_run[-1][1]))
    (noise, full), (_, actual) = latents
    return float((actual - full).norm() / (full - noise).norm())


def test_a_budget_of_all_steps_has_no_error(digits: Any) -> None:
    tuned = tune_steps(digits, lambda seed: run_digits(digits, seed, 4), budget=4, seeds=1, report=2, runs=9)
    assert tuned.best == tuned.even and tuned.errors["even"] == {"choose": [0.0], "report": [0.0, 0.0]}
    assert tuned.chosen == "even" and tuned.difference == (0, 0, 0) and "chosen: even" in str(tuned)


def test_schedules_are_refused_in_other_runs(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    actual = StepSchedule((0, 2, 5), 6, "UniPCMultistepScheduler", 3.0, "stack")
    actual.save(tmp_path / "steps.json")
    sampler = Forecast(when=str(tmp_path / "steps.json"))
    assert sampler.when == actual and sampler.rule.where == "stack"
    assert TaylorSeer.from_dict(json.loads(json.dumps(sampler.to_dict()))) == sampler
    with accelerate(pipe, sampler) as session:
        run_wan(pipe, 6)
        assert session.report().full_steps == [0, 2, 5]
        refuses(lambda: run_wan(pipe, 7), "runs with steps=6; this run has steps=7")
        refuses(lambda: run_wan(pipe, 6, guidance_scale=2.0), "guidance_scale=3.0; this run has guidance_scale=2.0")
    dit = dit_pipeline()
    with accelerate(dit, sampler), pytest.raises(ValueError, match="scheduler=UniPCM.*this run has scheduler=DDIM"):
        dit([1], num_inference_steps=6, output_type="np")
    # the guidance of DiTPipeline and of custom loops cannot be read
    with accelerate(dit, StepSchedule((0, 2), 4, "DDIMScheduler", 4.0)) as session:
        run_dit(dit, 4)
        assert session.report().full_steps == [0, 2]
        assert "the run's guidance_scale is unknown, so" in str(session.report())
    loop, inputs = loop_pipeline("SD3")
    with accelerate(loop, StepSchedule((0, 2), 4, None, 4.0)) as session:
        loop(inputs, 4)
        assert "the run's guidance_scale is unknown, so" in str(session.report())
    refuses(lambda: Forecast(when=actual, where="module"), "leave where='module' out")
    (tmp_path / "other.json").write_text('{"steps": [0]}')
    for wrong, message in (("other.json", "is not a schedule of"), ("none.json", "is not a schedule file")):
        refuses(partial(Forecast, when=tmp_path / wrong), message)
    for fields in ({"steps": (1, 2)}, {"steps": (0, 6)}, {"total": 0}):
        refuses(partial(StepSchedule, **({"steps": (0,), "total": 6} | fields)), r"when|total")


def test_even_steps_remain_unless_searched_ones_are_significantly_better() -> None:
    even, best = StepSchedule((0, 2), 4), StepSchedule((0, 1), 4)
    for new, chosen in (([0.1, 0.12, 0.09], "best"), ([0.1, 0.9, 0.1], "even"), ([0.5, 0.52, 0.5], "even")):
        errors = {"even": {"choose": [1.0], "report": [0.5, 0.52, 0.5]}, "best": {"choose": [0.5], "report": new}}
        tuned = StepTuning(even, best, (0,), (1, 2, 3), errors, 5, TaylorSeer())
        assert tuned.chosen == chosen and tuned.schedule == (best if chosen == "best" else even)
    mean, low, high = paired_interval([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    half_width = pytest.approx(4.303 * 1.527525 / 3**0.5, rel=1e-4)  # Student's t * standard deviation / sqrt(n)
    assert mean == pytest.approx(7 / 3) and high - mean == mean - low == half_width


def test_arguments_are_checked(digits: Any) -> None:
    def never(seed: int) -> None:
        raise AssertionError("nothing runs before the arguments are checked")

    for wrong, message in (
        ({"budget": 0}, "budget=0"),
        ({"runs": -1}, "runs=-1"),
        ({"seeds": [1, 2], "report": [2, 3]}, r"seeds=\[1, 2\], report=\[2, 3\]"),
        ({"report": 1}, "two reporting seeds"),
        ({"seeds": 0}, "seeds=0"),
        ({"sampler": Forecast(when="first_block")}, "sampler has when"),
        ({"sampler": TaylorSeer(where=["nothing"])}, "nothing"),
        ({"sampler": "teacache"}, "sampler has when=AccumulatedChange"),
        ({"sampler": "taylorseer(interval=3)"}, "sampler has when=Every"),
    ):
        refuses(partial(tune_steps, digits, never, **wrong), message)
    refuses(lambda: tune_steps(digits, never, sampler=3), "sampler=3 is not for pipelines", TypeError)
    refuses(lambda: tune_steps(digits.transformer, never), "must be a diffusers pipeline", TypeError)
    with accelerate(digits, "taylorseer"), pytest.raises(ValueError, match="accelerated already"):
        tune_steps(digits, never)
    guided = partial(digits, 1, num_inference_steps=2)
    for budget, run, message in (
        (9, lambda seed: run_digits(digits, seed, 4), "budget=9 is more than the 4 steps"),
        (2, lambda seed: run_digits(digits, seed, 3 + seed), "one run has 3 steps, another 4"),
        (1, lambda seed: guided(guidance_scale=2.0 + seed), "one run has 2.0 guidance, another 3.0"),
        (2, lambda seed: None, "no step of the pipeline"),
    ):
        refuses(partial(tune_steps, digits, run, budget=budget, seeds=1, report=2), message)
    loop, inputs = loop_pipeline("SD3")
    with pytest.warns(UserWarning, match="the guidance scale is unknown"):
        actual = tune_steps(loop, lambda seed: loop(inputs, 2), budget=2, seeds=1, report=2)
    assert actual.schedule.guidance is None
