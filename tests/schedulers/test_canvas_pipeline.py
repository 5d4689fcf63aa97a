"""DiffusionGemmaPipeline with either EntropyBoundScheduler (diffusers' or paradec's) equals transformers' generate and
paradec.generate, except for canvases that reach the last step."""

import inspect
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from small_models import CANVAS, GEMMA_PAD, tiny_gemma
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

import paradec
from paradec import schedulers


def gemma_pipeline(module: Any, scheduler: Any, processor: Any) -> Any:
    """Create a DiffusionGemmaPipeline. Rename an argument for transformers 5.24; diffusers passes the name of 5.23."""
    decoder = module.model.decoder
    build = type(decoder).create_diffusion_decoder_attention_mask
    if "cache" in inspect.signature(build).parameters:

        def build_mask(**arguments: Any) -> Any:
            if "past_key_values" in arguments:
                arguments["cache"] = arguments.pop("past_key_values")
            return build(**arguments)

        decoder.create_diffusion_decoder_attention_mask = build_mask
    return diffusers.DiffusionGemmaPipeline(module, scheduler, processor)


class PromptProcessor:
    eos_token_id = None

    def __init__(self, rows: list[list[int]]):
        width = max(map(len, rows))
        self.ids = torch.tensor([[GEMMA_PAD] * (width - len(row)) + row for row in rows])
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask}


pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # of the pipeline
CONFIDENCE, BOUND = 0.2, 1.5
STEPS = 24


class Step(NamedTuple):
    timestep: int
    canvas: Tensor
    best: Tensor


def run_pipeline(
    module: Any, scheduler: Any, rows: list[list[int]], seed: int, **call: Any
) -> tuple[Tensor, list[Step]]:
    """Return the tokens of two canvases from DiffusionGemmaPipeline, and its steps."""
    pipeline = gemma_pipeline(module, scheduler, PromptProcessor(rows))
    steps: list[Step] = []

    def record_step(pipe: Any, step: int, timestep: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        steps.append(Step(timestep, tensors["canvas"], tensors["logits"].argmax(-1)))
        return {}

    settings = {"num_inference_steps": STEPS, "confidence_threshold": CONFIDENCE, **call}
    generator = torch.Generator().manual_seed(seed)
    out = pipeline(
        prompt=["x"] * len(rows), gen_length=2 * CANVAS, generator=generator, output_type="seq", eos_early_stop=False,
        callback_on_step_end=record_step, callback_on_step_end_tensor_inputs=["canvas", "logits"], **settings,
    )  # fmt: skip
    return out.sequences, steps


def run_transformers(module: Any, rows: list[list[int]], seed: int, **settings: Any) -> Tensor:
    prompts = PromptProcessor(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out = module.generate(
            prompts.ids, attention_mask=prompts.mask, max_new_tokens=2 * CANVAS, pad_token_id=GEMMA_PAD,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=BOUND),
            **{"max_denoising_steps": STEPS, "confidence_threshold": CONFIDENCE, **settings},
        )  # fmt: skip
    return out.sequences[:, prompts.ids.shape[1] :]


ROWS = [[9, 20, 31], [40, 41, 42, 43, 44], [50, 51, 52, 53]]
SCHEDULERS = {
    "paradec": lambda: schedulers.EntropyBoundScheduler(gamma=BOUND),
    "diffusers": lambda: diffusers.EntropyBoundScheduler(entropy_bound=BOUND),
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", SCHEDULERS)
def test_converged_rows_equal_transformers(name: str) -> None:
    module, model = tiny_gemma(), paradec.wrap(tiny_gemma(), pad_token_id=GEMMA_PAD)
    num_converged = 0
    for seed in range(3):
        actual, steps = run_pipeline(module, SCHEDULERS[name](), ROWS, seed)
        if any(step.timestep == STEPS - 1 for step in steps):  # the next test has rows that do not converge
            continue
        num_converged += 1
        assert torch.equal(actual, run_transformers(module, ROWS, seed))
        settings = {"entropy_bound": BOUND, "confidence_threshold": CONFIDENCE, "max_denoising_steps": STEPS}
        request = {"sampler": paradec.samplers.create("diffusion_gemma", **settings), "rng": "reference", "seed": seed}
        out = paradec.generate(model, ROWS, max_new_tokens=2 * CANVAS, eos_early_stop=False, **request)
        assert torch.equal(actual, out.new_tokens)
    model.unwrap()
    assert num_converged


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("confidence", [1e-9, None])
def test_at_the_last_step_the_pipeline_returns_the_noisy_canvas(name: str, confidence: float | None) -> None:
    """transformers and `diffusion_gemma` return the likeliest tokens of the last step, the pipeline a noisy canvas."""
    module, row = tiny_gemma(), ROWS[:1]
    actual, steps = run_pipeline(
        module, SCHEDULERS[name](), row, 0, num_inference_steps=2, confidence_threshold=confidence
    )
    assert [step.timestep for step in steps] == [0, 1, 0, 1]
    assert torch.equal(actual[:, :CANVAS], steps[1].canvas)
    reference = run_transformers(module, row, 0, max_denoising_steps=2, confidence_threshold=1e-9)[:, :CANVAS]
    assert torch.equal(reference, steps[1].best) and not torch.equal(reference, steps[1].canvas)
    model = paradec.wrap(module, pad_token_id=GEMMA_PAD)
    sampler = paradec.samplers.create(
        "diffusion_gemma", entropy_bound=BOUND, max_denoising_steps=2, early_stop=confidence is not None,
        confidence_threshold=confidence,
    )  # fmt: skip
    out = paradec.generate(model, row, max_new_tokens=CANVAS, sampler=sampler, rng="reference", seed=0)
    model.unwrap()
    assert torch.equal(out.new_tokens, reference)


def test_steps_equal_diffusers_scheduler() -> None:
    diffusers_scheduler = diffusers.EntropyBoundScheduler(entropy_bound=0.8)
    paradec_scheduler = schedulers.EntropyBoundScheduler.from_config(diffusers_scheduler.config)
    for scheduler in (diffusers_scheduler, paradec_scheduler):
        scheduler.set_timesteps(8)
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    for timestep in range(8):
        logits = 4 * torch.randn(3, 10, 20, generator=torch.Generator().manual_seed(timestep))
        sample = torch.randint(0, 20, (3, 10))
        expected = diffusers_scheduler.step(logits, timestep, sample, generator=generators[0])
        actual = paradec_scheduler.step(logits, timestep, sample, generator=generators[1])
        for names in (("prev_sample",) * 2, ("sampled_tokens",) * 2, ("accepted_index", "transfer_index")):
            assert torch.equal(getattr(expected, names[0]), getattr(actual, names[1])), (timestep, names)
        assert not actual.editing_transfer_index.any()
        p = actual.pred_logits.softmax(-1).gather(-1, actual.sampled_tokens.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(actual.sampled_probs, p.double())
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
