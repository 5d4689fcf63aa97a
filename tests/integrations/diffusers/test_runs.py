"""Which calls belong to a run: threads, shared transformers, callbacks, broken runs, direct calls, other modules."""

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from diffusers import FluxImg2ImgPipeline, FluxPipeline
from pipelines import (
    TRANSFORMERS,
    denoise,
    flux_pipeline,
    loop_pipeline,
    run_flux,
    run_wan,
    tiny_transformer,
    wan_pipeline,
)
from torch import Tensor

from paradec import Every, Forecast, TaylorSeer, accelerate

SAMPLER = Forecast(when=Every(3, 2))
"""Evaluates steps 0, 1 and 4 of 5."""
STEPS = 5
TWO_CALLS = ("Wan", "FLUX")
"""Transformers that the test's loop calls twice per step, for guidance."""


class Case:
    """A pipeline and the results of a plain run (`plain`), an accelerated run (`fast`), a direct call (`expected`)."""

    def __init__(self, name: str):
        self.name = name
        if name == "FluxPipeline":
            self.pipe = flux_pipeline()
        elif name == "WanPipeline":
            self.pipe = wan_pipeline()
        else:
            self.pipe, self.inputs = loop_pipeline(name)
        self.call: dict[str, Any] = {}
        """The last call of the transformer in a run."""

        def record_call(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            self.call = {"args": args, "kwargs": kwargs | {"return_dict": False}}

        handle = self.pipe.transformer.register_forward_hook(record_call, with_kwargs=True)
        self.plain = self.run(self.pipe)
        handle.remove()
        self.expected = self.direct()
        with accelerate(self.pipe, SAMPLER):
            self.fast = self.run(self.pipe)
        assert not torch.equal(self.plain, self.fast)

    def run(self, pipe: Any, callback: Callable[..., Any] | None = None) -> Tensor:
        options = {} if callback is None else {"callback_on_step_end": callback}
        if self.name == "FluxPipeline":
            return run_flux(pipe, STEPS, **options)
        if self.name == "WanPipeline":
            return run_wan(pipe, STEPS, **options)
        return pipe(self.inputs, STEPS, calls=1 + (self.name in TWO_CALLS), **options)

    def with_new_scheduler(self) -> Any:
        """Return a pipeline with the same transformer and a scheduler of the same configuration."""
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        return type(self.pipe)(**self.pipe.components | {"scheduler": scheduler})

    def with_same_components(self) -> Any:
        if self.name == "FluxPipeline":
            return FluxPipeline.from_pipe(FluxImg2ImgPipeline.from_pipe(self.pipe))
        return type(self.pipe)(**self.pipe.components)

    def direct(self) -> Tensor:
        """Repeat the recorded call of the transformer, outside of the pipeline."""
        return self.pipe.transformer(*self.call["args"], **self.call["kwargs"])[0].detach()

    def gradient(self) -> Tensor:
        parameter = next(p for p in self.pipe.transformer.parameters() if p.ndim > 1)
        before = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            output = self.pipe.transformer(*self.call["args"], **self.call["kwargs"])[0]
            return torch.autograd.grad(output.square().sum(), parameter)[0]
        finally:
            parameter.requires_grad_(before)


@pytest.fixture
def case(request: Any) -> Case:
    if request.param not in CASES:
        CASES[request.param] = Case(request.param)
    return CASES[request.param]


CASES: dict[str, Case] = {}  # cases that earlier tests have created
THREE = ["SD3", "FluxPipeline", "WanPipeline"]
ALL_CASES = [*TRANSFORMERS, "FluxPipeline", "WanPipeline"]
MARKED = [pytest.param(name, marks=[] if name in THREE else pytest.mark.full) for name in ALL_CASES]
WITH_ALL = pytest.mark.parametrize("case", ALL_CASES, indirect=True)
WITH_THREE = pytest.mark.parametrize("case", THREE, indirect=True)
WITH_THREE_BY_DEFAULT = pytest.mark.parametrize("case", MARKED, indirect=True)


@pytest.fixture
def session(case: Case) -> Iterator[Any]:
    with accelerate(case.pipe, SAMPLER) as session:
        yield session


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in another thread and return its result or its error."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert result, "the thread hangs"
    return result[0]


def callback_at(step: int, function: Callable[[], Any], results: list[Any]) -> Callable[..., Any]:
    def callback(pipe: Any, i: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if i == step:
            results.append(function())
        return tensors

    return callback


@pytest.mark.thinned
@WITH_THREE_BY_DEFAULT
def test_a_run_stops_when_another_thread_starts_a_run(case: Case, session: Any) -> None:
    results: list[Any] = []
    run = lambda: case.run(case.pipe)  # noqa: E731
    with pytest.raises(RuntimeError, match=f"accelerated {type(case.pipe).__name__} is used by another thread"):
        case.run(case.pipe, callback_at(2, lambda: in_thread(run), results))
    assert torch.equal(results[0], case.fast)
    assert torch.equal(run(), case.fast) and torch.equal(in_thread(run), case.fast)


@pytest.mark.thinned
@WITH_THREE_BY_DEFAULT
def test_pipelines_with_one_transformer(case: Case, session: Any) -> None:
    plain_pipe = case.with_new_scheduler()
    for _ in range(2):
        assert torch.equal(case.run(plain_pipe), case.plain)
        assert torch.equal(case.run(case.pipe), case.fast)
    shared = case.with_same_components()
    assert torch.equal(case.run(shared), case.fast)
    session.detach()
    assert torch.equal(case.run(shared), case.plain)


@pytest.mark.thinned
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_bare_transformers_in_two_threads(name: str) -> None:
    module, inputs = tiny_transformer(name)
    run = lambda: denoise(module, inputs, STEPS)  # noqa: E731
    call = inputs | {"timestep": torch.full((len(inputs["hidden_states"]),), 100)}
    with accelerate(module, SAMPLER) as session:
        expected = run()
        assert torch.equal(in_thread(run), expected) and torch.equal(run(), expected)
        session.clock.run.is_open, session.clock.run.timestep = True, 900.0
        error = in_thread(lambda: module(**call))
        assert isinstance(error, RuntimeError) and "used by another thread" in str(error)
        assert torch.equal(run(), expected)


@pytest.mark.thinned
@WITH_THREE_BY_DEFAULT
def test_a_failed_run_leaves_no_state(case: Case, session: Any) -> None:
    def run_and_fail(error: BaseException) -> None:
        def fail() -> None:
            raise error

        with pytest.raises(type(error)):
            case.run(case.pipe, callback_at(2, fail, []))

    run_and_fail(KeyboardInterrupt())
    assert torch.equal(case.run(case.pipe), case.fast)
    run_and_fail(RuntimeError("out of memory"))
    assert torch.equal(in_thread(lambda: case.run(case.pipe)), case.fast)
    in_thread(lambda: run_and_fail(KeyboardInterrupt()))
    assert torch.equal(case.run(case.pipe), case.fast)
    run_and_fail(KeyboardInterrupt())
    session.reset()
    assert session.transformers[0].state.count_bytes() == 0 and torch.equal(case.direct(), case.expected)


@pytest.mark.thinned
@WITH_ALL
def test_direct_calls_are_plain(case: Case, session: Any) -> None:
    direct, expected = case.direct, case.expected
    calls = len(session.report().calls)
    for _ in range(3):
        assert torch.equal(direct(), expected) and torch.equal(in_thread(direct), expected)
    assert len(session.report().calls) == calls and session.transformers[0].state.count_bytes() == 0
    assert torch.equal(case.run(case.pipe), case.fast) and torch.equal(direct(), expected)
    assert "1 calls of a transformer did not belong to the run" in str(session.report())
    if "Pipeline" in case.name:  # pipelines name their calls (`cache_context`): others are not part of the run
        results: list[Any] = []
        assert torch.equal(case.run(case.pipe, callback_at(2, direct, results)), case.fast)
        assert torch.equal(results[0], expected)
    gradients = case.gradient(), in_thread(case.gradient)
    session.detach()
    assert all(torch.equal(gradient, case.gradient()) for gradient in gradients)


@pytest.mark.parametrize(
    "case", ["FluxPipeline", "WanPipeline"], indirect=True
)  # they read `_interrupt`, `_guidance_scale`
def test_callbacks_may_change_a_run(case: Case, session: Any) -> None:

    def interrupt(pipe: Any, i: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = i >= 1
        return tensors

    stopped = case.run(case.pipe, interrupt)
    assert len({call.step for call in session.report().calls}) == 2
    assert torch.equal(case.run(case.pipe), case.fast)

    def change(pipe: Any, i: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 1.0 if i >= 2 else pipe._guidance_scale
        return {"latents": tensors["latents"] * 0.5} if i == 1 else tensors

    first = case.run(case.pipe, change)
    assert torch.equal(case.run(case.pipe, change), first) and not torch.equal(first, case.fast)
    session.detach()
    assert torch.equal(case.run(case.pipe, interrupt), stopped)  # both of its steps are evaluated
    full = case.run(case.pipe, change)
    with accelerate(case.pipe, TaylorSeer(interval=1)):
        assert torch.equal(case.run(case.pipe, change), full)


@WITH_THREE
def test_a_second_session_is_refused(case: Case, session: Any) -> None:
    for pipe in (case.pipe, case.with_new_scheduler(), case.pipe.transformer):
        refuses(partial(accelerate, pipe, SAMPLER), "is accelerated already; detach that session first")
    assert torch.equal(case.run(case.pipe), case.fast)


@pytest.mark.thinned
@WITH_THREE
def test_detach_in_the_middle(case: Case) -> None:
    for call in (lambda function: function(), in_thread):
        with accelerate(case.pipe, SAMPLER) as session:
            output = case.run(case.pipe, callback_at(1, partial(call, session.detach), []))
        assert torch.equal(output, case.plain)  # nothing was forecast so far
        assert torch.equal(case.run(case.pipe), case.plain)
        assert "forward" not in vars(case.pipe.transformer)


def copy_by_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.thinned
@WITH_THREE
def test_copies_are_refused(case: Case, session: Any) -> None:
    weights = {name: value.clone() for name, value in case.pipe.transformer.state_dict().items()}
    case.run(case.pipe)
    for copy_module in (copy.deepcopy, copy_by_pickle, lambda module: torch.save(module, io.BytesIO())):
        refuses(partial(copy_module, case.pipe.transformer), r"cannot be copied or pickled", TypeError)
    refuses(lambda: copy.deepcopy(case.pipe), "cannot be copied", TypeError)
    runs, scheduler = session.clock.runs, copy.deepcopy(case.pipe.scheduler)
    scheduler.set_timesteps(3)
    assert session.clock.runs == runs and len(scheduler.timesteps) == 3 != len(case.pipe.scheduler.timesteps)
    assert torch.equal(case.run(case.pipe), case.fast)
    after = case.pipe.transformer.state_dict()
    assert after.keys() == weights.keys() and all(torch.equal(after[name], weights[name]) for name in after)
    session.detach()
    for copy_module in (copy.deepcopy, copy_by_pickle):
        copied = case.with_new_scheduler()
        copied.transformer = copy_module(case.pipe.transformer)
        assert torch.equal(case.run(copied), case.plain)
        with accelerate(copied, SAMPLER):
            assert torch.equal(case.run(copied), case.fast) and torch.equal(case.run(case.pipe), case.plain)


@pytest.mark.thinned
@WITH_THREE
def test_saving_while_accelerated(case: Case, session: Any, tmp_path: Path) -> None:
    case.run(case.pipe)
    case.pipe.transformer.save_pretrained(tmp_path / "transformer")
    module = type(case.pipe.transformer).from_pretrained(tmp_path / "transformer")
    loaded = case.with_new_scheduler()
    loaded.transformer = module.eval()
    torch.testing.assert_close(case.run(loaded), case.plain)  # not bitwise: some layers stay in float32
    if case.name not in TRANSFORMERS:
        case.pipe.save_pretrained(tmp_path / "pipe")
        missing = {name: None for name, value in case.pipe.components.items() if value is None}
        loaded = type(case.pipe).from_pretrained(tmp_path / "pipe", **missing)
        torch.testing.assert_close(case.run(loaded), case.plain)
    assert torch.equal(case.run(case.pipe), case.fast)


def lora_weights(pipe: Any, targets: list[str]) -> dict[str, Tensor]:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    module = copy.deepcopy(pipe.transformer)
    module.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    draw = torch.Generator().manual_seed(5)
    weights = get_peft_model_state_dict(module)
    return {f"transformer.{name}": torch.randn(value.shape, generator=draw) * 0.3 for name, value in weights.items()}


@pytest.mark.thinned
@pytest.mark.parametrize("targets", [["to_q"], ["proj_out"], ["proj_mlp"]], ids="".join)
@pytest.mark.parametrize("sampler", [SAMPLER, Forecast(when=Every(3, 2), where="block")], ids=["module", "block"])
def test_loras_are_loaded_and_removed_while_accelerated(targets: list[str], sampler: Any) -> None:
    pipe = flux_pipeline()
    weights = lora_weights(pipe, targets)
    with accelerate(pipe, sampler):
        plain = run_flux(pipe, STEPS)
    pipe.load_lora_weights(dict(weights), adapter_name="a")
    with accelerate(pipe, sampler) as session:
        expected, calls = run_flux(pipe, STEPS), [call.kind for call in session.report().calls]
        pipe.unload_lora_weights()
        torch.testing.assert_close(run_flux(pipe, STEPS), plain)
        assert [call.kind for call in session.report().calls] == calls
        pipe.load_lora_weights(dict(weights), adapter_name="a")
        torch.testing.assert_close(run_flux(pipe, STEPS), expected)
        assert [call.kind for call in session.report().calls] == calls
    assert not torch.allclose(plain, expected)
    assert not [name for name, module in pipe.transformer.named_modules() if "_diffusers_hook" in vars(module) and name]


def test_each_run_may_set_another_lora() -> None:
    pipe = flux_pipeline()
    pipe.load_lora_weights(lora_weights(pipe, ["to_q"]), adapter_name="a")
    pipe.load_lora_weights(lora_weights(pipe, ["proj_out"]), adapter_name="b")
    requests = [("a", 1.0), ("b", 1.0), ("a", 0.3), (["a", "b"], [0.5, 0.5])]
    expected = []
    for names, scales in requests:
        pipe.set_adapters(names, scales)
        with accelerate(pipe, SAMPLER):
            expected.append(run_flux(pipe, STEPS))
    with accelerate(pipe, SAMPLER) as session:
        for (names, scales), latents in zip(requests, expected, strict=True):
            pipe.set_adapters(names, scales)
            assert torch.equal(run_flux(pipe, STEPS), latents) and session.report().full_steps == [0, 1, 4]
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(expected, 2))


def test_replaced_transformers() -> None:
    pipe, replacement = flux_pipeline(), copy.deepcopy(flux_pipeline().transformer)
    with torch.no_grad():
        replacement.proj_out.weight.mul_(2)
    before = pipe.transformer
    pipe.transformer = replacement
    with accelerate(pipe, SAMPLER):
        expected = run_flux(pipe, STEPS)
    pipe.transformer = before
    with accelerate(pipe, SAMPLER) as session:
        run_flux(pipe, STEPS)
        pipe.transformer = replacement
        assert torch.equal(run_flux(pipe, STEPS), expected)
        assert session.report().full_steps == [0, 1, 4] and len(session.report().calls) == STEPS
        assert "_paradec_session" not in vars(before)
        with pytest.raises(RuntimeError):  # a text of another width
            run_flux(pipe, 3, prompt_embeds=torch.randn(1, 8, 31))
        assert session.report().calls == [] and session.report().runs == 3
    assert not {"_paradec_session", "forward"} & set(vars(replacement))
