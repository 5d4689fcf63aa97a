"""Properties of every image sampler outside the causal and masked families."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import same_values, state_values
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from images import random_mar, tiny_llamagen, tiny_student, tiny_var, tiny_var_student
from pipelines import noise, tiny_dit
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.protocol import decode
from paradec.models.images.diffusion import DiffusionModel

LABELS, SEEDS = [2, 4, 2], [7, 8, 7]


def code_sampler() -> Any:
    return samplers.create("code", drafter=tiny_var(seed=5, width=12, depth=3, vq=tiny_var().vq))


def cspd() -> Any:
    return samplers.create("cspd", draft=random_mar(noise=1e-4), num_draft=3, head_steps="3,1", inner_temperature=0.5)


def distilled(teacher: Any, start: int) -> Any:
    return samplers.create("distilled", teacher=teacher, teacher_start=start)


METHODS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
    "var": (lambda: samplers.create("var"), tiny_var, {}),
    "var, smooth": (lambda: samplers.create("var", smooth=True), tiny_var, {"top_k": 20}),
    "code": (code_sampler, tiny_var, {"temperature": 0.7}),
    "mar": (lambda: samplers.create("mar", head_steps=3), random_mar, {"steps": 5}),
    "cspd": (cspd, random_mar, {"steps": 8}),
    "distilled": (lambda: samplers.create("distilled"), tiny_student, {"guidance_scale": 1.0}),
    "distilled, taught": (lambda: distilled(tiny_llamagen(), 2), tiny_student, {}),
    "distilled var": (lambda: samplers.create("distilled"), tiny_var_student, {"guidance_scale": 1.0}),
    "distilled var, taught": (lambda: distilled(tiny_var(), 1), lambda: tiny_var_student(tiny_var()), {}),
    **{
        f"taylorseer, {type(scheduler).__name__}": (
            lambda: samplers.create("taylorseer", interval=3, order=2),
            lambda: DiffusionModel(tiny_dit(torch.float64)),
            {"num_inference_steps": 9, "scheduler": scheduler},
        )
        for scheduler in (DDIMScheduler(), DDPMScheduler(), DPMSolverMultistepScheduler())
    },
}
"""Name -> sampler, model and request."""
PICTURES = [name for name in METHODS if not name.startswith("taylorseer")]
"""Methods that `generate_images` supports."""


def start_method(name: str, rows: list[int] | None = None) -> tuple[Any, Any, Any]:
    make, load, fields = METHODS[name]
    sampler, model, rows = make(), load(), [0, 1, 2] if rows is None else rows
    labels, request = [LABELS[row] for row in rows], {"guidance_scale": 2.0} | fields
    if name.startswith("taylorseer"):
        state = sampler.start(model, noise(3, torch.float64)[rows], class_labels=labels, seed=5, **request)
    else:
        state = sampler.start(model, labels, seed=[SEEDS[row] for row in rows], **request)
    return sampler, model, state


def result_of(state: Any) -> Tensor:
    return state.latent if hasattr(state, "latent") else state.tokens


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
def test_a_row_does_not_depend_on_the_batch(name: str) -> None:
    sampler, model, state = start_method(name)
    together = result_of(decode(sampler, model, state))
    for row in (0, 1):
        sampler, model, state = start_method(name, [row])
        torch.testing.assert_close(result_of(decode(sampler, model, state))[0], together[row], atol=1e-9, rtol=1e-9)
    assert not torch.equal(together[0], together[2]), "rows with the same label and seed must draw differently"


@pytest.mark.parametrize("name", METHODS)
def test_steps_have_no_side_effects_and_commits_write_their_positions(name: str) -> None:
    sampler, model, state = start_method(name)
    stream = torch.get_rng_state()
    with torch.inference_mode():
        while not state.done:
            before = copy.deepcopy(state_values(state))
            first, second = sampler.step(model, state), sampler.step(model, state)
            assert torch.equal(first.values, second.values) and first.kind == second.kind
            assert same_values(before, state_values(state)) and torch.equal(torch.get_rng_state(), stream)
            old = result_of(state).clone()
            commit = sampler.commit(state, second)
            if not name.startswith(("taylorseer", "distilled")):  # these methods rewrite every position
                changed = (result_of(state) != old).flatten(2).any(-1) if old.ndim > 2 else result_of(state) != old
                assert torch.equal(changed, torch.zeros_like(changed).scatter(1, commit.positions, True))
            with pytest.raises(ValueError, match="earlier state"):
                sampler.commit(state, first)


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_copies_are_independent(name: str, copied: Callable[[Any], Any]) -> None:
    sampler, model, state = start_method(name)
    sampler.commit(state, sampler.step(model, state))
    copies = copied(sampler), copied(model), copied(state)
    before = result_of(state).clone()
    tokens = result_of(decode(*copies))
    assert torch.equal(result_of(state), before)
    assert torch.equal(tokens, result_of(decode(sampler, model, state)))


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        ("var", "model", "at scale 1"),
        ("code", "model", "row 0"),
        ("mar", "model", "row 0"),
        ("cspd", "model", "the model returned NaN.* for row 0"),
        ("cspd", "draft", "the draft model returned NaN.* for row 0"),
        ("distilled", "model", "the student returned NaN.* for row 0"),
        ("distilled, taught", "teacher", "the teacher returned NaN.* for row 0"),
        ("distilled var, taught", "teacher", "the teacher returned NaN.* for row 0"),
        ("taylorseer, DDIMScheduler", "model", "row 0 at step"),
    ],
)
def test_errors_of_non_finite_values_name_the_row_and_change_no_state(name: str, broken: str, message: str) -> None:
    sampler, model, state = copy.deepcopy(start_method(name))
    if broken == "model":
        sampler.commit(state, sampler.step(model, state))
    part = model if broken == "model" else getattr(sampler, broken)
    for parameter in part.module.parameters():
        parameter.data.fill_(torch.nan)
    for _ in range(4):
        before, index = result_of(state).clone(), state.index
        try:
            sampler.commit(state, sampler.step(model, state))
        except FloatingPointError as error:
            assert pytest.raises(type(error), match=message).matches(error)
            break
    else:
        pytest.fail("no error was raised")
    assert torch.equal(result_of(state), before) and state.index == index


@pytest.mark.parametrize("name", [name for name in PICTURES if name != "var, smooth"])  # smooth VAR returns features
def test_traces_and_interrupts_give_the_tokens_of_the_image(name: str) -> None:
    make, load, fields = METHODS[name]
    sampler, model, written = make(), load(), torch.zeros(3, 0, dtype=torch.int64)
    request = {"class_labels": LABELS, "seed": SEEDS, "sampler": sampler, "output_type": "latent"}
    request |= {"guidance_scale": 2.0} | fields
    full = paradec.generate_images(model, **request, trace=True)
    replayed = torch.tensor(full.trace.replay(), dtype=torch.float64)
    torch.testing.assert_close(replayed, full.tokens.double(), atol=1e-12, rtol=0)

    def stop(state: Any, commit: Any) -> None:
        nonlocal written
        written = torch.cat((written, commit.positions), 1)
        raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paradec.generate_images(model, **request, callback=stop)
    rows = torch.arange(3).unsqueeze(1)
    assert written.shape[1] > 0 and torch.equal(caught.value.output.tokens[rows, written], full.tokens[rows, written])


@pytest.mark.parametrize("name", ["mar", "cspd", *(name for name in PICTURES if name.startswith("distilled"))])
def test_models_in_bfloat16_decode(name: str) -> None:
    sampler, model, _ = copy.deepcopy(start_method(name))
    model.module.bfloat16()
    for part in ("teacher", "drafter", "draft"):
        if getattr(sampler, part, None) is not None:
            getattr(sampler, part).module.bfloat16()
    state = sampler.start(model, LABELS, seed=SEEDS, **({"guidance_scale": 2.0} | METHODS[name][2]))
    tokens = decode(sampler, model, state).tokens
    assert tokens.dtype in (torch.int64, torch.float32, torch.float64) and tokens.isfinite().all()
