"""TaylorSeer on the model's output: the plain solver at interval 1; the public code's schedules, states, forecasts."""

from __future__ import annotations

import copy
import json
from math import factorial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
)
from safetensors.torch import load_file
from torch import Tensor

import paradec
from paradec.models.diffusion import DiffusionModel
from paradec.protocol import decode
from paradec.samplers.forecast import ForecastState
from paradec.samplers.taylorseer import TaylorSeer, differences, expand

GOLDEN = Path(__file__).parent / "golden" / "taylorseer"
LABELS = [1, 2, 7]


def tiny_dit(dtype: torch.dtype = torch.float32) -> DiTTransformer2DModel:
    module = DiTTransformer2DModel(**json.loads((GOLDEN / "tiny_dit.json").read_text())["transformer"])
    module.load_state_dict(load_file(GOLDEN / "tiny_dit.safetensors"))
    return module.to(dtype).eval()


def noise(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 4, 8, 8, generator=torch.Generator().manual_seed(3)).to(dtype)


def decoded(sampler: TaylorSeer, model: DiffusionModel, latent: Tensor, **request: object) -> ForecastState:
    state = sampler.start(model, latent, **{"scheduler": DDIMScheduler(), "num_inference_steps": 20} | request)
    decode(sampler, model, state)
    return state


def plain(
    module: DiTTransformer2DModel, latent: Tensor, labels: list[int], scheduler: object, steps: int, scale: float = 1.0
) -> Tensor:
    """The loop of diffusers' DiTPipeline, up to the VAE."""
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps)
    classes = torch.tensor(labels + ([1000] * len(labels) if scale != 1.0 else []))
    with torch.inference_mode():
        for t in scheduler.timesteps:
            given = torch.cat([latent, latent]) if scale != 1.0 else latent
            if hasattr(scheduler, "scale_model_input"):
                given = scheduler.scale_model_input(given, t)
            output = module(given, timestep=t.expand(len(given)), class_labels=classes).sample
            output = output[:, :4]
            if scale != 1.0:
                conditional, unconditional = output.chunk(2)
                output = unconditional + scale * (conditional - unconditional)
            latent = scheduler.step(output, t, latent).prev_sample
    return latent


# ---- the public code's cases ----------------------------------------------------------------------------------------


def test_schedules() -> None:
    cases = json.loads((GOLDEN / "schedules.json").read_text())
    assert len(cases) == 32
    for case in cases:
        sampler = TaylorSeer(interval=case["N"], first_enhance=case["first_enhance"])
        assert [i for i in range(case["T"]) if sampler.is_full(i)] == case["full"]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("taylor-*.json")), ids=lambda path: path.stem)
def test_states_and_forecasts(path: Path) -> None:
    case = json.loads(path.read_text())
    dtype = getattr(torch, case["dtype"])
    features = torch.tensor(case["features"], dtype=dtype)
    factors = torch.zeros(1, case["max_order"] + 1, *features.shape[1:], dtype=dtype)
    orders, last = torch.zeros(1, dtype=torch.int64), -1
    for record in case["records"]:
        index = record["index"]
        if record["type"] == "full":
            assert index in case["full_steps"]
            if index <= case["first_enhance"] - 2:
                orders = torch.zeros_like(orders)
            factors, orders = differences(features[index : index + 1], factors, orders, index - last)
            last = index
            expected = torch.tensor(record["factors"], dtype=dtype)
            if case["variant"] == "dit":  # the public code for DiT counts steps down: odd orders change their sign
                expected[1::2] *= -1
            assert orders.tolist() == [len(expected)] and not factors[0, len(expected) :].any()
            assert torch.equal(factors[0, : len(expected)], expected)
        else:
            expected = torch.tensor(record["prediction"], dtype=dtype)
            assert torch.equal(expand(factors, index - last)[0], expected)


# ---- the solver's loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(
    "scheduler", [DDIMScheduler(), EulerDiscreteScheduler(), DPMSolverMultistepScheduler(), HeunDiscreteScheduler()]
)
def test_interval_one_is_the_plain_loop(scheduler: object, scale: float) -> None:
    module, latent = tiny_dit(), noise(3)
    state = decoded(
        TaylorSeer(interval=1, max_order=2),
        DiffusionModel(module),
        latent,
        scheduler=scheduler,
        num_inference_steps=10,
        guidance_scale=scale,
        class_labels=LABELS,
    )
    assert torch.equal(state.latent, plain(module, latent, LABELS, scheduler, 10, scale))
    branches = 1 if scale == 1.0 else 2
    assert state.nfe.tolist() == [state.total] * 3
    assert state.row_forwards.tolist() == [state.total * branches] * 3
    assert state.forwarded_tokens.tolist() == [state.total * branches * 16] * 3


def test_interval_one_is_the_diffusers_pipeline() -> None:
    from diffusers import AutoencoderKL, DiTPipeline

    module, fed = tiny_dit(), []
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=2, sample_size=8
    )
    decoder = vae.decode
    vae.decode = lambda latent: fed.append(latent * vae.config.scaling_factor) or decoder(latent)
    pipe = DiTPipeline(module, vae, DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(42)
    pipe(LABELS, guidance_scale=4.0, num_inference_steps=20, generator=generator, output_type="pt")
    latent = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(42))
    state = decoded(TaylorSeer(interval=1), DiffusionModel(module), latent, guidance_scale=4.0, class_labels=LABELS)
    torch.testing.assert_close(state.latent, fed[0], rtol=1e-6, atol=1e-6)  # the scaling factor is divided out


@pytest.mark.parametrize(
    ("interval", "max_order", "first_enhance"), [(3, 1, 2), (3, 1, 3), (4, 2, 1), (5, 4, 3), (2, 0, 1)]
)
def test_equals_a_naive_loop(interval: int, max_order: int, first_enhance: int) -> None:
    module, latent = tiny_dit(torch.float64), noise(3, torch.float64)
    sampler = TaylorSeer(interval=interval, max_order=max_order, first_enhance=first_enhance)
    state = decoded(sampler, DiffusionModel(module), latent, class_labels=LABELS, trace=True)

    scheduler, sample, counter, known, last, kinds = DDIMScheduler(), latent, 0, [], 0, []
    scheduler.set_timesteps(20)
    with torch.inference_mode():
        for step, t in enumerate(scheduler.timesteps):
            if step < first_enhance or counter == interval - 1:
                counter = 0
                output = module(sample, timestep=t.expand(3), class_labels=torch.tensor(LABELS)).sample[:, :4]
                new = [output]
                for order in range(max_order):
                    if order < len(known) and step > first_enhance - 2:
                        new.append((new[order] - known[order]) / (step - last))
                known, last = new, step
                kinds.append("full")
            else:
                counter += 1
                output = sum(term * (step - last) ** i / factorial(i) for i, term in enumerate(known))
                kinds.append("forecast")
            sample = scheduler.step(output, t, sample).prev_sample
    torch.testing.assert_close(state.latent, sample, rtol=1e-10, atol=1e-10)
    assert [step.kind for step in state.trace.steps] == kinds
    full = kinds.count("full")
    assert full == sum(map(sampler.is_full, range(20))) == first_enhance + (20 - first_enhance) // interval
    assert state.nfe.tolist() == [full] * 3 and state.progress == (20, 20)
    assert [step.forwarded for step in state.trace.steps] == [[16] * 3 if kind == "full" else [0] * 3 for kind in kinds]


def test_a_linear_output_is_forecast_exactly() -> None:
    class Linear:
        """A model whose output is linear in the solver step."""

        device = torch.device("cpu")

        def conditions(self, latent: Tensor, given: dict, branches: int) -> dict:
            return {}

        def positions(self, latent: Tensor) -> int:
            return 1

        def __call__(self, query: object) -> Tensor:
            return torch.full_like(query.latent, 2.0 + 0.25 * float(query.timestep))

    sampler = {n: TaylorSeer(interval=n, max_order=1) for n in (1, 4)}
    ends = [
        decoded(sampler[n], Linear(), noise(2, torch.float64), scheduler=FlowMatchEulerDiscreteScheduler()).latent
        for n in (1, 4)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-3)


# ---- contracts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [DDIMScheduler(), EulerDiscreteScheduler(), DPMSolverMultistepScheduler()])
def test_a_step_repeated_equals_the_step(scheduler: object) -> None:
    model, sampler = DiffusionModel(tiny_dit()), TaylorSeer(interval=3, max_order=2)
    before = dict(vars(scheduler))
    latent = noise(3)
    state = sampler.start(model, latent, scheduler=scheduler, num_inference_steps=9, class_labels=LABELS)
    with torch.inference_mode():
        while not state.done:
            kept = copy.deepcopy((state.latent, state.memory.tensors, vars(state.scheduler)))
            first, again = sampler.step(model, state), sampler.step(model, state)
            assert torch.equal(first.values, again.values) and first.kind == again.kind
            assert _same(kept, (state.latent, state.memory.tensors, vars(state.scheduler)))
            sampler.commit(state, again)
            with pytest.raises(ValueError, match="earlier state"):
                sampler.commit(state, first)
    assert vars(scheduler).keys() == before.keys()
    assert all(vars(scheduler)[name] is value for name, value in before.items())
    assert torch.equal(latent, noise(3))


def _same(first: object, second: object) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second or type(first) is type(second)


@pytest.mark.parametrize("scheduler", [DDIMScheduler(), DDPMScheduler()])
def test_rows_are_independent(scheduler: object) -> None:
    model, latent = DiffusionModel(tiny_dit(torch.float64)), noise(3, torch.float64)
    sampler = TaylorSeer(interval=3, max_order=1)
    request = {"scheduler": scheduler, "guidance_scale": 2.0, "seed": 5}
    together = decoded(sampler, model, latent, class_labels=LABELS, **request).latent
    for row, label in enumerate(LABELS):
        alone = decoded(sampler, model, latent[row : row + 1], class_labels=label, **request).latent
        torch.testing.assert_close(alone[0], together[row], rtol=1e-9, atol=1e-9)
    assert torch.equal(together, decoded(sampler, model, latent, class_labels=LABELS, **request).latent)


def test_stochastic_schedulers_draw_from_the_seed() -> None:
    model, sampler = DiffusionModel(tiny_dit()), TaylorSeer(interval=3)
    latent = noise(1).expand(2, -1, -1, -1)
    ends = [
        decoded(sampler, model, latent, scheduler=DDPMScheduler(), class_labels=1, **given).latent
        for given in ({"seed": 1}, {"seed": 2}, {"generator": torch.Generator().manual_seed(1)})
    ]
    assert not torch.equal(ends[0][0], ends[0][1])  # copies of a row draw different noise
    assert not torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_memory_can_be_gathered_and_reset() -> None:
    model, sampler = DiffusionModel(tiny_dit()), TaylorSeer(interval=3, max_order=2)
    state = decoded(sampler, model, noise(3), class_labels=LABELS)
    assert state.memory["factors"].shape == (3, 3, 4, 8, 8) and state.memory["orders"].tolist() == [3, 3, 3]
    assert torch.equal(state.memory.gather(torch.tensor([2]))["factors"][0], state.memory["factors"][2])
    assert state.memory.fork(2)["factors"].shape[0] == 6
    state.memory.reset(np.array([1]), "sequence")
    assert state.memory["orders"].tolist() == [3, 0, 3] and not state.memory["factors"][1].any()


def test_nan_outputs_are_refused() -> None:
    module = tiny_dit()
    model, sampler = DiffusionModel(module), TaylorSeer()
    state = sampler.start(model, noise(3), scheduler=DDIMScheduler(), class_labels=LABELS)
    module.proj_out_2.bias.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="row 0 at step 0"):
        decode(sampler, model, state)
    assert torch.equal(state.latent, noise(3)) and not state.nfe.any() and state.index == 0


def test_settings_are_checked() -> None:
    sampler = paradec.samplers.create("taylorseer", preset="dit", max_order=2)
    assert (sampler.interval, sampler.max_order, sampler.first_enhance) == (4, 2, 2)
    assert type(sampler).from_dict(sampler.to_dict()) == sampler
    for preset in TaylorSeer.presets:
        paradec.samplers.create("taylorseer", preset=preset)
    for settings in ({"interval": 0}, {"max_order": -1}, {"first_enhance": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            TaylorSeer(**settings)
    model = DiffusionModel(tiny_dit())
    good = {"latent": noise(2), "scheduler": DDIMScheduler(), "class_labels": [1, 2]}
    wrong = {
        "latent": [noise(2).long(), noise(2)[0], noise(2) * torch.nan, noise(2)[..., :4]],
        "scheduler": [object()],
        "num_inference_steps": [0],
        "guidance_scale": [-1.0],
        "class_labels": [[1], [1, 2000], 1.5],
        "seed": [[1], -1],
        "generator": ["one"],
        "encoder_hidden_states": [noise(2)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name):
                given = good | {name: value}
                sampler.start(model, given.pop("latent"), **given)
    with pytest.raises(TypeError, match="Linear"):
        sampler.start(torch.nn.Linear(1, 1), noise(2), scheduler=DDIMScheduler())
    with pytest.raises(TypeError, match="DiTTransformer2DModel"):
        DiffusionModel(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="eval"):
        DiffusionModel(tiny_dit().train())
