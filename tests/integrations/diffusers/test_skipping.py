"""Rules that skip the transformer: SeaCache against recordings of diffusers, EasyCache and TeaCache against loops."""

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    SeaCacheConfig,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
)
from pipelines import (
    TRANSFORMERS,
    check_bound,
    denoise,
    flux_pipeline,
    loop_pipeline,
    run_wan,
    tiny_transformer,
    wan_pipeline,
)
from recorded import golden, read_arrays, read_json, replay
from torch import Tensor

import paradec
from paradec import AccumulatedChange, EasyCache, Forecast, SeaCache, accelerate
from paradec.integrations.diffusers.hooks.blocks import find_blocks
from paradec.integrations.diffusers.hooks.transformer import unpack_latent
from paradec.models.images.diffusion import DiffusionModel
from paradec.samplers.forecast import rules

SEACACHE = golden("images-autumn") / "seacache"
CASES = [case for path in sorted(SEACACHE.glob("cases.json")) for case in read_json(path)]


def full_steps(session: Any) -> list[list[int]]:
    """Return the evaluated steps of each branch."""
    calls = session.report().calls
    return [[c.step for c in calls if c.branch == name and c.evaluated] for name in sorted({c.branch for c in calls})]


@pytest.fixture(scope="module")
def wan() -> Any:
    pipe = wan_pipeline()
    pipe.transformer = WanTransformer3DModel.from_pretrained(SEACACHE / "transformer").eval()
    return pipe


def run_recorded_call(pipe: Any, number: int) -> Tensor:
    """Run the recorded call `number` with its scheduler, noise and texts; return the latents."""
    case, arrays = CASES[number], read_arrays(SEACACHE / "arrays.npz")
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    euler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe.scheduler = {"euler": euler, "unipc": UniPCMultistepScheduler(**flow)}[case["scheduler"]]
    noise, prompt, negative = (torch.from_numpy(arrays[f"{number}/{k}"]) for k in ("noise", "prompt", "negative"))
    call = {"height": case["side"] * 8, "width": case["side"] * 8, "num_frames": (case["frames"] - 1) * 4 + 1}
    call |= {"num_inference_steps": case["steps"], "guidance_scale": case["guidance"], "output_type": "latent"}
    return pipe(prompt_embeds=prompt, negative_prompt_embeds=negative, latents=noise, **call).frames


@pytest.mark.thinned
@pytest.mark.parametrize("number", range(len(CASES)))
def test_seacache_replays_diffusers(number: int, wan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arrays = CASES[number], read_arrays(SEACACHE / "arrays.npz")
    with replay(f"seacache, case {number}"):
        filtered: list[Tensor] = []

        def observe(*arguments: Any, filter_latent: Any = rules.filter_latent) -> Tensor:
            filtered.append(filter_latent(*arguments))
            return filtered[-1]

        with monkeypatch.context() as patch:
            patch.setattr(rules, "filter_latent", observe)
            with accelerate(wan, SeaCache(**case["config"])) as session:
                latents = run_recorded_call(wan, number)
        branches = len(filtered) // case["steps"]
        assert branches and len(filtered) == branches * case["steps"] and case["changes"][0] is None
        for branch in range(branches):
            rows = [zip(new, old, strict=True) for old, new in itertools.pairwise(filtered[branch::branches])]
            actual = [np.mean([rules.relative_change(new, old) for new, old in pairs]) for pairs in rows]
            np.testing.assert_allclose(actual, case["changes"][1:], atol=1e-5)
        assert full_steps(session) == case["full_steps"]
        expected, plain, noise = (arrays[f"{number}/{part}"] for part in ("latents", "plain", "noise"))
        np.testing.assert_allclose(latents.numpy(), expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(run_recorded_call(wan, number).numpy(), plain, atol=1e-4, rtol=0)
        error = np.linalg.norm(expected - plain) / np.linalg.norm(plain - noise)
        np.testing.assert_allclose(error, case["error"], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(wan.scheduler.sigmas[: len(case["sigmas"])], case["sigmas"], atol=1e-5)
        assert case["branches_alike"] == all(steps == case["full_steps"][0] for steps in case["full_steps"])
        assert len(noise) == case["batch"]


def test_seacache_bounds_and_settings_as_text(wan: Any) -> None:
    rule = SeaCache(1e9, max_consecutive_cached=4, retention_steps=3, cache_end_steps=2)
    with accelerate(wan, Forecast(when=rule, how="reuse")) as session:
        first = run_recorded_call(wan, 0)
        steps = CASES[0]["steps"]
        expected = sorted({0, 1, *range(2, steps - 2, 5), steps - 2, steps - 1})
        assert full_steps(session)[0] == expected and session.transformers[0].basis.name == "reuse"
        assert torch.equal(run_recorded_call(wan, 0), first)
    pipe, inputs = loop_pipeline("SD3")
    with accelerate(pipe, "seacache(threshold=0)") as session:
        plain = loop_pipeline("SD3")[0](inputs, 4)
        assert torch.equal(pipe(inputs, 4), plain) and full_steps(session) == [[0, 1, 2, 3]]
    with accelerate(pipe, "seacache(threshold=9, residual_order=0)") as session:
        assert not torch.equal(pipe(inputs, 4), plain) and full_steps(session) == [[0, 3]]
    sampler = Forecast(when=SeaCache(), where="stack")
    with accelerate(pipe, sampler) as session:
        pipe(inputs, 4)
    check_bound(pipe, sampler, session.report().bytes, partial(pipe, inputs, 4))  # includes the filtered latent


def test_seacache_config_of_diffusers() -> None:
    pipe, config = wan_pipeline(), SeaCacheConfig(0.3)
    with accelerate(pipe, config) as session:
        actual = run_wan(pipe, 12)
        assert 2 < len(session.report().full_steps) < 12
    pipe.transformer.enable_cache(config)
    torch.testing.assert_close(run_wan(pipe, 12), actual, atol=1e-4, rtol=0)


def unpack_cells(cells: Tensor, rows: int, columns: int) -> np.ndarray:
    """Unpack cells [1, rows columns, 4 C] of 2 x 2 into an image [C, 2 rows, 2 columns] by a plain loop."""
    result = np.zeros((cells.shape[2] // 4, 2 * rows, 2 * columns))
    for cell, row, column in itertools.product(range(cells.shape[1]), range(2), range(2)):
        y, x = 2 * (cell // columns) + row, 2 * (cell % columns) + column
        result[:, y, x] = cells[0, cell, 2 * row + column :: 4]
    return result


def seacache_indicator(picture: np.ndarray, level: float) -> np.ndarray:
    """Return SeaCache's indicator of an image [C, rows, columns] with a noise level."""
    gain = np.ones(())
    for length in picture.shape[1:]:
        power = 1 / (np.abs(np.fft.fftfreq(length)) ** 3 + 1e-16)
        gain = gain[..., None] * ((1 - level) * power / ((1 - level) ** 2 * power + level**2 + 1e-16))
    return np.fft.ifft2(np.fft.fft2(picture) * (gain / gain.mean())).real


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_seacache_unpacks_cells(name: str) -> None:
    prompt = {"prompt_embeds": torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(7))}
    rows, columns = 3, 5
    if name == "flux":
        pipe, cell_pixels = flux_pipeline(), 2
        prompt |= {"pooled_prompt_embeds": torch.randn(1, 32), "guidance_scale": 3.5}
    else:
        module, _ = tiny_transformer("QwenImage")
        pipe, cell_pixels = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, module), 16
        prompt = {"prompt_embeds": torch.randn(1, 8, 16), "prompt_embeds_mask": torch.ones(1, 8), "true_cfg_scale": 1.0}
    cells = torch.randn(1, rows * columns, pipe.transformer.config.in_channels)
    call = prompt | {"height": rows * cell_pixels, "width": columns * cell_pixels, "num_inference_steps": 12}
    call |= {"latents": cells, "output_type": "latent"}
    inputs = [cells]

    def record_latent(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        inputs.append(tensors["latents"])
        return {}

    with accelerate(pipe, SeaCache(0.3)) as session:
        latents = pipe(**call, callback_on_step_end=record_latent).images
    [evaluated] = full_steps(session)
    indicators = [
        seacache_indicator(unpack_cells(latent.double(), rows, columns), min(max(float(sigma), 1e-6), 1 - 1e-6))
        for latent, sigma in zip(inputs[:12], pipe.scheduler.sigmas, strict=False)
    ]
    expected, total = [0], 0.0
    for step in range(1, 12):
        total += np.abs(indicators[step] - indicators[step - 1]).mean() / np.abs(indicators[step - 1]).mean()
        if step == 11 or total >= 0.3 or step - expected[-1] > 2:
            expected, total = [*expected, step], 0.0
    assert evaluated == expected and 2 < len(evaluated) < 11
    with accelerate(pipe, Forecast(evaluated, where="stack")):
        assert torch.equal(pipe(**call).images, latents)


def test_seacache_is_refused(wan: Any) -> None:
    module, _ = tiny_transformer("Wan")
    flux, inputs = loop_pipeline("FLUX")
    wan.scheduler = DDIMScheduler()
    for pipe, message in ((wan, "DDIMScheduler"), (module, "a transformer by itself has no scheduler")):
        refuses(partial(accelerate, pipe, "seacache"), f"flow matching.*{message}")
    wan.scheduler = UniPCMultistepScheduler()
    refuses(lambda: accelerate(wan, "seacache"), "flow matching.*UniPC")
    with accelerate(flux, SeaCache()):
        refuses(lambda: flux(inputs), r"LoopPipeline passes cells of shape \(1, 16, 4\)")
    # images of 2 x 1 and 1 x 2 cells side by side, like in FLUX Kontext, are not an image of 2 x 2 cells
    ids, cells = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]), torch.randn(1, 4, 4)
    arguments = {"img_ids": ids, "hidden_states": cells}
    refuses(lambda: unpack_latent(flux_pipeline(), cells, arguments), r"FluxPipeline passes cells")
    conditioned, _ = loop_pipeline("Wan")
    conditioned.transformer.register_to_config(in_channels=36)
    refuses(lambda: accelerate(conditioned, SeaCache()), "given 36 channels and returns 4")
    for settings in ({"threshold": -1}, {"residual_order": 2}, {"retention_steps": -1}, {"cache_end_steps": 1.5}):
        refuses(partial(SeaCache, **settings), next(iter(settings)))
    refuses(lambda: Forecast(when="seacache", where="output"), "leave where='output' out")


@torch.no_grad()
@pytest.mark.parametrize("begin", [0, 3])
def test_runs_that_start_at_a_later_step(begin: int) -> None:
    pipe, inputs = loop_pipeline("SD3")
    levels = []

    @dataclass(frozen=True)
    class Recorder(SeaCache):
        def is_full(self, progress: Any, *arguments: Any) -> bool:
            levels.append(progress.level)
            return super().is_full(progress, *arguments)

    seacache = Recorder(1e9, max_consecutive_cached=0)
    for rule in (seacache, AccumulatedChange(1e9, last_steps=1), EasyCache(1e9, ret_steps=2)):
        with accelerate(pipe, rule) as session:
            pipe.scheduler.set_timesteps(9)
            pipe.scheduler.set_begin_index(begin)
            latent = inputs["hidden_states"]
            for t in pipe.scheduler.timesteps[begin:]:
                arguments = inputs | {"hidden_states": latent, "timestep": t.expand(len(latent))}
                latent = pipe.scheduler.step(pipe.transformer(**arguments).sample, t, latent).prev_sample
            first = [0, 1] if rule.name == "easycache" else [0]
            assert full_steps(session) == [[*first, 8 - begin]], rule
    assert levels == pipe.scheduler.sigmas[begin:-1].tolist()


def run_easycache_loop(
    pipe: Any, inputs: Any, steps: int, calls: int, threshold: float, ret_steps: int
) -> tuple[Tensor, list]:
    """Return EasyCache's final latent and its evaluated steps."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    latent, last_latent, full, total, rate, residuals = inputs["hidden_states"], None, [], 0.0, None, {}
    x_full = v_full = None
    for i, t in enumerate(scheduler.timesteps):
        if rate is not None:
            total += rate * float((latent - last_latent).abs().mean() / v_full.abs().mean())
        evaluated = i < ret_steps or i == steps - 1 or rate is None or total >= threshold
        summed = torch.zeros_like(latent)
        for call in range(calls):
            arguments = inputs | {"hidden_states": latent, "timestep": t.expand(len(latent))}
            arguments["encoder_hidden_states"] = inputs["encoder_hidden_states"] * (1 - 2 * call)
            if evaluated:
                v = pipe.transformer(**arguments, return_dict=False)[0]
                residuals[call] = v - latent
                if call == 0:
                    if v_full is not None:
                        rate = float((v - v_full).abs().mean() / (latent - x_full).abs().mean())
                    v_full, x_full, total = v, latent, 0.0
            summed = summed + (latent + residuals[call]) / calls
        if evaluated:
            full.append(i)
        last_latent, latent = latent, scheduler.step(summed, t, latent, return_dict=False)[0]
    return latent, full


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "calls"), [("FLUX", 1), ("Wan", 2), ("SD3", 2)])
@torch.no_grad()
def test_easycache_equals_a_plain_loop(name: str, calls: int) -> None:
    pipe, inputs = loop_pipeline(name)
    schedules = set()
    for threshold, ret_steps in ((0.0, 1), (0.3, 3), (1.0, 2), (1e9, 0), (0.6, 7)):
        with accelerate(pipe, EasyCache(threshold, ret_steps=ret_steps)) as session:
            latent = pipe(inputs, 14, calls)
            assert torch.equal(pipe(inputs, 14, calls), latent)
        expected, full = run_easycache_loop(pipe, inputs, 14, calls, threshold, ret_steps)
        assert full_steps(session) == [full] * calls and session.transformers[0].run_progress.memory == {}
        torch.testing.assert_close(latent, expected, rtol=1e-4, atol=1e-5)
        schedules.add(tuple(full))
    assert len(schedules) > 3 and (0, 1, 13) in schedules, schedules


def test_easycache_is_refused() -> None:
    module, inputs = tiny_transformer("FLUX")
    with accelerate(module, EasyCache()):
        refuses(lambda: denoise(module, inputs, 2), "num_inference_steps=None: EasyCache")
    with accelerate(module, EasyCache(9.0, 2, num_inference_steps=6)) as session:
        denoise(module, inputs, 6)
    assert full_steps(session) == [[0, 1, 5]]
    dit, inputs = loop_pipeline("DiT")  # returns a learned variance too
    with accelerate(dit, "easycache"):
        refuses(lambda: dit(inputs), r"given \(2, 4, 8, 8\) and returns \(2, 8, 8, 8\)")
    for settings in ({"threshold": -1}, {"ret_steps": -1}, {"num_inference_steps": 0}):
        refuses(partial(EasyCache, **settings), next(iter(settings)))
    refuses(lambda: Forecast(when="easycache", where="stack"), "leave where='stack' out")
    digits = paradec.PixelDiTPipeline.digits()
    network, latent = DiffusionModel(digits.transformer), torch.randn(1, 1, 28, 28)
    start = partial(Forecast(when="easycache").start, network, latent)
    refuses(lambda: start(scheduler=digits.scheduler, class_labels=[1]), "when=.*paradec.accelerate")


@dataclass(frozen=True)
class ChangeRecorder(AccumulatedChange):
    changes: list = field(default_factory=list, compare=False)

    def observe_change(self, progress: Any, before: Tensor, after: Tensor) -> None:
        self.changes.append((after - before).double().abs().sum().item())
        super().observe_change(progress, before, after)


@pytest.mark.thinned
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_watched_tensor_does_not_depend_on_the_target(name: str) -> None:
    module, inputs = tiny_transformer(name)
    first = next(iter(find_blocks(module).values()))

    def record_changes(watch: str | None, target: str) -> list[float]:
        rule = ChangeRecorder(1e-9, watch=watch)
        with accelerate(module, Forecast(when=rule, where=target)) as session:
            denoise(module, inputs, 4)
            assert session.report().full_steps == [0, 1, 2, 3]
        assert "_call_impl" not in vars(first)
        return rule.changes

    for watch, target_of_paper in (("modulated", "module"), ("hidden", "block"), ("latent", "output")):
        expected = record_changes(None, target_of_paper)
        assert len(expected) == 3 and min(expected) > 0
        for target in ("module", "block", "stack", "output"):
            if target != "output" or watch == "latent":
                assert record_changes(watch, target) == expected, (watch, target)


@torch.no_grad()
def test_teacache_equals_a_plain_loop() -> None:
    pipe, inputs = loop_pipeline("DiT")
    module, steps, threshold = pipe.transformer, 12, 0.15
    rule = AccumulatedChange(threshold, (0.5, 0.1, 0), watch="modulated", last_steps=1)
    with accelerate(pipe, Forecast(when=rule, where="stack", how="reuse")) as session:
        latent = pipe(inputs, steps)
    [evaluated] = full_steps(session)
    blocks, state = list(module.transformer_blocks), {"step": 0, "sum": 0.0, "full": []}

    def forward(hidden: Tensor, *, index: int, plain: Any, **options: Any) -> Tensor:
        if index == 0:
            modulated = blocks[0].norm1(
                hidden, options["timestep"], options["class_labels"], hidden_dtype=hidden.dtype
            )[0]
            if state["step"]:
                last = state["modulated"]
                change = float((modulated - last).abs().mean() / last.abs().mean())
                state["sum"] += 0.5 * change**2 + 0.1 * change
            full = state["step"] in (0, steps - 1) or state["sum"] >= threshold
            state.update(modulated=modulated, first=hidden, evaluated=full)
            if full:
                state["full"].append(state["step"])
                state["sum"] = 0.0
            state["step"] += 1
        if not state["evaluated"]:
            return hidden + state["residual"] if index == len(blocks) - 1 else hidden
        output = plain(hidden, **options)
        if index == len(blocks) - 1:
            state["residual"] = output - state["first"]
        return output

    for index, block in enumerate(blocks):
        block.forward = partial(forward, index=index, plain=block.forward)
    expected = pipe(inputs, steps)
    assert evaluated == state["full"] and 3 < len(evaluated) < steps - 2 and evaluated[-1] == steps - 1
    torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-5)


def test_wrong_settings_of_accumulated_change_are_refused() -> None:
    module, inputs = tiny_transformer("DiT")
    with accelerate(module, AccumulatedChange(last_steps=2)):
        refuses(lambda: denoise(module, inputs, 2), "last_steps=2 needs")
    refuses(lambda: AccumulatedChange(watch="block"), "unknown watch: 'block'")
    refuses(lambda: AccumulatedChange(last_steps=-1), "last_steps=-1")
    for watch in ("modulated", "hidden"):
        rule = AccumulatedChange(watch=watch)
        refuses(partial(Forecast, when=rule, where="output"), f"watch='{watch}'.*use 'latent'")
    refuses(lambda: Forecast(when=AccumulatedChange(watch="latent"), where=["a"]), "watch='latent' does not go")
