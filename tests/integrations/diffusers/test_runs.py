"""Whose run it is: threads, pipelines that share a transformer, callbacks, broken runs, direct calls, and copies."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from side_by_side import together
from tiny_pipelines import (
    MODELS,
    LoopPipeline,
    denoise,
    dit_pipeline,
    flux_pipeline,
    loop_pipeline,
    model,
    run_flux,
    run_wan,
    wan_pipeline,
)
from torch import Tensor

import paradec
from paradec import Every, TaylorSeer, accelerate

SAMPLER = TaylorSeer(refresh=Every(3, 2))
"""Of 5 steps, 0, 1 and 4 are evaluated."""
STEPS = 5
TWO_CALLS = ("Wan", "FLUX")
"""Loops whose guidance makes two calls a step; `WanPipeline` names them."""


class Case:
    """An accelerated pipeline, and what it gives by itself, plain and accelerated."""

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

        def keep(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            self.call = {"args": args, "kwargs": kwargs | {"return_dict": False}}

        handle = self.pipe.transformer.register_forward_hook(keep, with_kwargs=True)
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

    def beside(self) -> Any:
        """A second pipeline with the same modules and a scheduler of its own."""
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        pipe = type(self.pipe)(**self.pipe.components | {"scheduler": scheduler})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def direct(self) -> Tensor:
        """A call of the transformer by itself, as the pipeline would make it."""
        return self.pipe.transformer(*self.call["args"], **self.call["kwargs"])[0].detach()

    def gradient(self) -> Tensor:
        """Of a loss on such a call."""
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
    if request.param not in MADE:
        MADE[request.param] = Case(request.param)
    return MADE[request.param]


MADE: dict[str, Case] = {}
EVERY = pytest.mark.parametrize("case", [*MODELS, "FluxPipeline", "WanPipeline"], indirect=True)
OTHERS = pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in ("SD3", "FluxPipeline", "WanPipeline") else [pytest.mark.full])
        for name in [*MODELS, "FluxPipeline", "WanPipeline"]
    ],
    indirect=True,
)
"""What is the session's: by default with three of them."""
SOME = pytest.mark.parametrize("case", ["SD3", "FluxPipeline", "WanPipeline"], indirect=True)
LOOPS = pytest.mark.parametrize("case", [name for name in MODELS if name not in TWO_CALLS], indirect=True)


@pytest.fixture
def session(case: Case) -> Iterator[Any]:
    with accelerate(case.pipe, SAMPLER) as session:
        yield session


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function gives in another thread: its result, or its exception."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert found, "the thread hangs"
    return found[0]


def at(step: int, function: Callable[[], Any], results: list[Any]) -> Callable[..., Any]:
    """A callback that calls a function after this step, and keeps what it gives."""

    def callback(pipe: Any, i: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if i == step:
            results.append(function())
        return tensors

    return callback


# ---- two runs at once -----------------------------------------------------------------------------------------------


@OTHERS
def test_a_second_run_of_one_pipeline_is_refused(case: Case, session: Any) -> None:
    """In another thread and in a callback; the first one goes on as if nothing had been."""
    results: list[Any] = []
    run = lambda: case.run(case.pipe)  # noqa: E731
    assert torch.equal(case.run(case.pipe, at(2, lambda: in_thread(run), results)), case.fast)
    assert isinstance(results[0], RuntimeError)
    assert f"accelerated {type(case.pipe).__name__} is in the middle of a run, in another thread" in str(results[0])

    def nested() -> None:
        with pytest.raises(RuntimeError, match="is in the middle of a run, and this call comes from inside of it"):
            run()

    assert torch.equal(case.run(case.pipe, at(2, nested, results)), case.fast)
    assert torch.equal(run(), case.fast) and torch.equal(in_thread(run), case.fast)


@pytest.mark.parametrize("case", ["FluxPipeline"], indirect=True)
def test_a_pipeline_that_calls_itself_before_its_run_begins(case: Case) -> None:
    class Again(type(case.pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, again: bool = True, **kwargs: Any) -> Any:
            return self(*args, again=False, **kwargs) if again else super().__call__(*args, **kwargs)

    pipe = Again(**case.beside().components)
    pipe.set_progress_bar_config(disable=True)
    with accelerate(pipe, SAMPLER):
        assert torch.equal(case.run(pipe), case.fast) and torch.equal(case.run(pipe), case.fast)
    assert torch.equal(case.run(pipe), case.plain)


@OTHERS
def test_two_pipelines_with_one_transformer(case: Case, session: Any) -> None:
    """One accelerated, one plain, each with its scheduler: a whole run of one between two steps of the other."""
    other, results = case.beside(), []  # type: ignore[var-annotated]
    nested = lambda: case.run(other)  # noqa: E731
    assert torch.equal(case.run(case.pipe, at(2, nested, results)), case.fast)
    assert [call.kind for call in session.report().calls].count("full") == 3 * len(session.report().calls) // STEPS
    assert torch.equal(case.run(case.pipe, at(1, lambda: in_thread(nested), results)), case.fast)
    assert torch.equal(results[0], case.plain) and torch.equal(results[1], case.plain)
    accelerated = lambda: case.run(case.pipe)  # noqa: E731
    assert torch.equal(case.run(other, at(2, accelerated, results)), case.plain)
    assert torch.equal(results[2], case.fast)


@SOME
def test_pipelines_with_one_transformer_at_the_same_time(case: Case, session: Any) -> None:
    """Step by step in any order; a run of the accelerated pipeline in a third thread is right or refused."""
    others = [case.beside(), case.beside()]
    for _ in range(2):
        found = together(*(lambda pipe=pipe: case.run(pipe) for pipe in (case.pipe, *others, case.pipe)))
        assert torch.equal(found[1], case.plain) and torch.equal(found[2], case.plain)
        mine = [result for result in (found[0], found[3]) if isinstance(result, Tensor)]
        refused = [result for result in (found[0], found[3]) if not isinstance(result, Tensor)]
        assert mine and all(torch.equal(result, case.fast) for result in mine)
        assert all(type(error) is RuntimeError and "in the middle of a run" in str(error) for error in refused)


@SOME
def test_calls_while_the_transformer_is_in_a_forecast_step(case: Case, session: Any) -> None:
    """A direct call in another thread, begun and ended inside a call of the run."""
    direct, expected = case.direct, case.expected
    found: list[Any] = []
    block = case.pipe.transformer.get_submodule(session.transformers[0].taps[-1].place.block)

    def meanwhile(module: Any, args: tuple) -> None:
        if session.transformers[0].inside == threading.get_ident():
            found.append(in_thread(direct))

    handle = block.register_forward_pre_hook(meanwhile)
    assert torch.equal(case.run(case.pipe), case.fast)
    handle.remove()
    assert len(found) >= STEPS and all(torch.equal(result, expected) for result in found)


@pytest.mark.thinned
@pytest.mark.parametrize("name", MODELS)
def test_bare_transformers_in_two_threads(name: str) -> None:
    """Without a pipeline every thread has its own run; one after the other too."""
    module, inputs = model(name)
    run = lambda: denoise(module, inputs, STEPS)  # noqa: E731
    with accelerate(module, SAMPLER):
        expected = run()
        assert all(torch.equal(result, expected) for result in together(run, run))
        assert torch.equal(in_thread(run), expected) and torch.equal(run(), expected)


def test_budgets_in_two_threads() -> None:
    """Runs of unequal sizes, which the same budget gives unequal targets."""
    module, inputs = model("PixArt")
    small = {key: value[:1] for key, value in inputs.items()}
    with accelerate(module, SAMPLER) as session:
        denoise(module, inputs, STEPS)
        budget = session.report().bytes // 2
    with accelerate(module, TaylorSeer(refresh=Every(3, 2), max_memory=budget)) as session:
        expected, chosen = [], []
        for given in (inputs, small):
            expected.append(denoise(module, given, STEPS))
            chosen.append(session.report().settings["PixArtTransformer2DModel"])
        assert (chosen[0].target, chosen[0].order) != (chosen[1].target, chosen[1].order)
        for _ in range(3):
            found = together(lambda: denoise(module, inputs, STEPS), lambda: denoise(module, small, STEPS))
            assert all(map(torch.equal, found, expected))


# ---- runs that break off, and calls that are no run's ---------------------------------------------------------------


@OTHERS
def test_a_broken_run_leaves_nothing(case: Case, session: Any) -> None:
    """Neither to the next run, in this thread or another, nor to direct calls or other pipelines."""
    direct, expected = case.direct, case.expected

    def broken(error: BaseException) -> None:
        def fail() -> None:
            raise error

        with pytest.raises(type(error)):
            case.run(case.pipe, at(2, fail, []))

    broken(KeyboardInterrupt())
    assert torch.equal(direct(), expected) and torch.equal(in_thread(direct), expected)
    assert session.transformers[0].nbytes == 0
    assert torch.equal(case.run(case.beside()), case.plain)
    broken(RuntimeError("say"))
    assert torch.equal(in_thread(lambda: case.run(case.pipe)), case.fast)
    in_thread(lambda: broken(KeyboardInterrupt()))
    assert torch.equal(case.run(case.pipe), case.fast)


@SOME
def test_a_run_that_breaks_off_before_its_first_step(case: Case, session: Any) -> None:
    direct, expected = case.direct, case.expected

    def fail(module: Any, args: tuple) -> None:
        raise ValueError("in the first call")

    handle = case.pipe.transformer.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the first call"):
        case.run(case.pipe)
    handle.remove()
    assert torch.equal(direct(), expected) and torch.equal(case.run(case.pipe), case.fast)
    set_timesteps = case.pipe.scheduler.set_timesteps

    @functools.wraps(set_timesteps)
    def and_fail(*args: Any, **kwargs: Any) -> None:
        set_timesteps(*args, **kwargs)
        raise ValueError("after set_timesteps")

    case.pipe.scheduler.set_timesteps = and_fail
    try:
        with pytest.raises(ValueError, match="after set_timesteps"):
            case.run(case.pipe)
    finally:
        case.pipe.scheduler.set_timesteps = set_timesteps
    for _ in range(3):
        assert torch.equal(direct(), expected)
    assert session.transformers[0].nbytes == 0
    assert torch.equal(case.run(case.pipe), case.fast)


@pytest.mark.thinned
@EVERY
def test_direct_calls_are_plain(case: Case, session: Any) -> None:
    """Before, between, in callbacks of and after runs, with gradients; and nothing is remembered of them."""
    direct, expected = case.direct, case.expected
    results: list[Any] = []
    calls = len(session.report().calls)
    for _ in range(3):
        assert torch.equal(direct(), expected)
    assert len(session.report().calls) == calls and session.transformers[0].nbytes == 0
    assert torch.equal(case.run(case.pipe, at(2, direct, results)), case.fast)
    assert torch.equal(case.run(case.pipe, at(0, direct, results)), case.fast)
    assert all(torch.equal(result, expected) for result in results)
    assert "1 calls of a transformer were not the run's" in str(session.report())
    gradients = case.gradient(), in_thread(case.gradient)
    session.detach()
    assert all(torch.equal(gradient, case.gradient()) for gradient in gradients)


@pytest.mark.thinned
@LOOPS
def test_loops_of_ones_own(case: Case, session: Any) -> None:
    """A function, and generators whose steps alternate: over the accelerated pipeline, and over one beside it."""

    @torch.no_grad()
    def loop(pipe: Any) -> Iterator[Tensor]:
        latent = case.inputs["hidden_states"]
        pipe.scheduler.set_timesteps(STEPS)
        yield latent
        for t in pipe.scheduler.timesteps:
            time = t.expand(len(latent))
            given = case.inputs | {"hidden_states": latent, "timestep": time.long() if case.name == "DiT" else time}
            output = pipe.transformer(**given, return_dict=False)[0][:, : latent.shape[1]]
            latent = pipe.scheduler.step(output, t, latent, return_dict=False)[0]
            yield latent

    ending = loop(case.pipe)
    for _ in range(STEPS + 1):  # all steps; the function that drives them is still there
        last = next(ending)
    assert torch.equal(last, case.fast) and session.transformers[0].nbytes == 0
    *_, last = loop(case.beside())
    assert torch.equal(last, case.plain)
    for first, second in ((case.pipe, case.beside()), (case.beside(), case.pipe)):
        pairs = list(zip(loop(first), loop(second), strict=True))
        expected = (case.fast, case.plain) if first is case.pipe else (case.plain, case.fast)
        assert all(map(torch.equal, pairs[-1], expected))
    left = loop(case.pipe)  # left in the middle
    for _ in range(3):
        next(left)
    assert torch.equal(case.run(case.pipe), case.fast)


def test_a_loop_prepared_in_another_thread() -> None:
    """The steps tell whose run it is."""
    pipe, inputs = loop_pipeline("PixArt")

    @torch.no_grad()
    def loop() -> Tensor:
        latent = inputs["hidden_states"]
        for t in pipe.scheduler.timesteps:
            output = pipe.transformer(**inputs | {"hidden_states": latent, "timestep": t.expand(2)}).sample[:, :4]
            latent = pipe.scheduler.step(output, t, latent, return_dict=False)[0]
        return latent

    with accelerate(pipe, TaylorSeer(interval=1)) as session:
        pipe.scheduler.set_timesteps(STEPS)
        assert torch.equal(in_thread(loop), pipe(inputs, STEPS))
        pipe.scheduler.set_timesteps(STEPS)
        assert in_thread(loop).isfinite().all()
        assert len(session.report().calls) == STEPS - 1  # all but the one before the first step


# ---- a second session, and detaching --------------------------------------------------------------------------------


@SOME
def test_a_second_session_is_refused(case: Case, session: Any) -> None:
    for pipe in (case.pipe, case.beside(), case.pipe.transformer):
        with pytest.raises(ValueError, match="is accelerated already; detach that session first"):
            accelerate(pipe, SAMPLER)
    assert torch.equal(case.run(case.pipe), case.fast)


@SOME
def test_detach_in_the_middle(case: Case) -> None:
    """Of a run, in a callback or another thread: the rest is evaluated, and the next run is plain."""
    for how in (lambda f: f(), in_thread):
        with accelerate(case.pipe, SAMPLER) as session:
            found = case.run(case.pipe, at(1, functools.partial(how, session.detach), []))
        assert torch.equal(found, case.plain)  # nothing was forecast so far
        assert torch.equal(case.run(case.pipe), case.plain)
        assert not [key for key in vars(case.pipe.transformer) if key in ("_call_impl", "__getstate__")]


@pytest.mark.parametrize("case", ["FLUX", "FluxPipeline"], indirect=True)
def test_detach_waits_for_a_call(case: Case) -> None:
    """A block's modules must not change sides within one call: a stand-in would meet the real module that it feeds."""
    between = case.pipe.transformer.single_transformer_blocks[-1].act_mlp
    threads: list[threading.Thread] = []

    def meanwhile(module: Any, args: tuple) -> None:
        if session.clock.index == 2 and not threads:
            threads.append(threading.Thread(target=session.detach))
            threads[0].start()
            threads[0].join(0.05)

    handle = between.register_forward_pre_hook(meanwhile)
    try:
        with accelerate(case.pipe, SAMPLER) as session:
            found = case.run(case.pipe)
            threads[0].join(60)
    finally:
        handle.remove()
    assert found.isfinite().all() and session.report().calls[-1].step == 2
    assert torch.equal(case.run(case.pipe), case.plain)


@SOME
def test_sessions_of_two_pipelines_come_off_in_any_order(case: Case) -> None:
    other = copy.deepcopy(case.pipe)
    for order in ((0, 1), (1, 0)):
        sessions = [accelerate(case.pipe, SAMPLER), accelerate(other, SAMPLER)]
        found = together(lambda: case.run(case.pipe), lambda: case.run(other))
        assert all(torch.equal(result, case.fast) for result in found)
        pipes = [case.pipe, other]
        sessions[order[0]].detach()
        assert torch.equal(case.run(pipes[order[0]]), case.plain)
        assert torch.equal(case.run(pipes[order[1]]), case.fast)
        sessions[order[1]].detach()
        assert torch.equal(case.run(pipes[order[1]]), case.plain)


# ---- copies ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def blank(module: Any) -> None:
    """Other weights."""
    for parameter in module.parameters():
        parameter.zero_()


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("how", "when"),
    [(copy.deepcopy, "within"), (pickled, "between"), (saved, "within")],
    ids=["deepcopy", "pickle", "save"],
)
@SOME
def test_a_copy_is_plain(how: Callable[[Any], Any], when: str, case: Case, session: Any) -> None:
    """And by itself: with weights, sessions and runs of its own, also where it is made in the middle of a run."""
    results: list[Any] = []
    if when == "within":
        case.run(case.pipe, at(2, lambda: how(case.pipe.transformer), results))
    module = results[0] if results else how(case.pipe.transformer)
    ours = {"_call_impl", "_paradec_session", "__getstate__"}
    for child in module.modules():
        assert not ours & set(vars(child)), set(vars(child))
    components = {key: copy.deepcopy(value) for key, value in case.pipe.components.items() if key != "transformer"}
    other = type(case.pipe)(transformer=module, **components)
    other.set_progress_bar_config(disable=True)
    assert torch.equal(case.run(other), case.plain) and torch.equal(case.run(case.pipe), case.fast)
    runs = session.clock.run
    with accelerate(other, SAMPLER):
        assert torch.equal(case.run(other), case.fast) and session.clock.run == runs
        assert torch.equal(case.run(case.pipe), case.fast)
    blank(module)
    assert not torch.equal(case.run(other), case.plain) and torch.equal(case.run(case.pipe), case.fast)


@pytest.mark.thinned
@EVERY
def test_a_copied_pipeline_is_plain(case: Case, session: Any) -> None:
    results: list[Any] = []
    assert torch.equal(case.run(case.pipe, at(2, lambda: copy.deepcopy(case.pipe), results)), case.fast)
    runs, other = session.clock.run, results[0]
    assert type(other) in type(case.pipe).__bases__ and torch.equal(case.run(other), case.plain)
    blank(other.transformer)
    assert not torch.equal(case.run(other), case.plain) and session.clock.run == runs
    session.detach()
    assert torch.equal(case.run(case.pipe), case.plain) and type(case.pipe) is type(other)


@SOME
def test_shallow_copies_and_pickles_of_what_a_pipeline_is_made_of(case: Case, session: Any) -> None:
    runs, shallow = session.clock.run, case.beside()
    shallow.transformer, shallow.scheduler = copy.copy(case.pipe.transformer), copy.copy(case.pipe.scheduler)
    assert torch.equal(case.run(shallow), case.plain)
    for scheduler in (pickled(case.pipe.scheduler), saved(case.pipe.scheduler)):
        shallow.scheduler = scheduler
        assert torch.equal(case.run(shallow), case.plain)
    other = pickled(case.pipe)
    assert type(other) in type(case.pipe).__bases__ and torch.equal(case.run(other), case.plain)
    assert session.clock.run == runs and torch.equal(case.run(case.pipe), case.fast)


def test_copies_do_not_keep_the_original_alive() -> None:
    pipe, inputs = loop_pipeline("DiT")
    session = accelerate(pipe, SAMPLER)
    pipe(inputs)
    other = copy.deepcopy(pipe)
    seen = [id(thing) for thing in (pipe.transformer, session)]
    reached, left = set(), [other]
    while left:
        thing = left.pop()
        if id(thing) in reached or isinstance(thing, type) or type(thing).__name__ in ("module", "function"):
            continue
        reached.add(id(thing))
        left += gc.get_referents(thing)
    assert not reached.intersection(seen)


@SOME
def test_saving_while_accelerated(case: Case, session: Any, tmp_path: Path) -> None:
    """The weights, and a pipeline that loads as a plain one."""
    case.run(case.pipe)
    case.pipe.transformer.save_pretrained(tmp_path / "transformer")
    module = type(case.pipe.transformer).from_pretrained(tmp_path / "transformer")
    other = case.beside()
    other.transformer = module.eval()
    torch.testing.assert_close(case.run(other), case.plain)  # layers that keep float32 are joined otherwise
    if case.name not in MODELS:
        case.pipe.save_pretrained(tmp_path / "pipe")
        missing = {name: None for name, value in case.pipe.components.items() if value is None}
        other = type(case.pipe).from_pretrained(tmp_path / "pipe", **missing)
        other.set_progress_bar_config(disable=True)
        torch.testing.assert_close(case.run(other), case.plain)
    assert torch.equal(case.run(case.pipe), case.fast)


@SOME
def test_pipelines_made_of_an_accelerated_one(case: Case, session: Any) -> None:
    """With its scheduler they are accelerated with it, with one of their own they are plain; detaching ends both."""
    made = [type(case.pipe)(**case.pipe.components)]
    if case.name not in MODELS:
        made.append(type(case.pipe).from_pipe(case.pipe))
    results: list[Any] = []
    for other in made:
        other.set_progress_bar_config(disable=True)
        assert torch.equal(case.run(other), case.fast)
        found = case.run(case.pipe, at(2, lambda other=other: in_thread(lambda: case.run(other)), results))
        assert torch.equal(found, case.fast)
        assert isinstance(results[-1], RuntimeError) and "in the middle of a run" in str(results[-1])
    assert torch.equal(case.run(case.beside()), case.plain)
    session.detach()
    assert all(torch.equal(case.run(other), case.plain) for other in made)


def test_another_dtype_while_accelerated() -> None:
    pipe, inputs = loop_pipeline("SD3")
    fast = {}
    wide = {key: value.double() for key, value in inputs.items()}
    expected = copy.deepcopy(pipe).to(torch.float64)(wide, STEPS)
    with accelerate(pipe, SAMPLER):
        fast[torch.float32] = pipe(inputs, STEPS)
        pipe.to(torch.float64)
        fast[torch.float64] = pipe(wide, STEPS)
        assert torch.equal(pipe.to("cpu")(wide, STEPS), fast[torch.float64])
    torch.testing.assert_close(fast[torch.float64].float(), fast[torch.float32], rtol=1e-4, atol=1e-4)
    with accelerate(pipe, TaylorSeer(interval=1)):
        assert torch.equal(pipe(wide, STEPS), expected)


def test_a_pipeline_without_callbacks() -> None:
    """Two threads over diffusers' DiT: pictures that are right, or the one error."""
    pipe = dit_pipeline()
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other = type(pipe)(**pipe.components | {"scheduler": scheduler})
    other.set_progress_bar_config(disable=True)

    def run(pipe: Any) -> Tensor:
        draw = torch.Generator().manual_seed(3)
        return torch.as_tensor(pipe([1, 2], num_inference_steps=8, generator=draw, output_type="np").images)

    plain = run(pipe)
    with accelerate(pipe, TaylorSeer(interval=3)) as session:
        fast = run(pipe)
        assert not torch.equal(fast, plain)
        for _ in range(4):
            found = together(*(lambda pipe=pipe: run(pipe) for pipe in (pipe, pipe, other)))
            assert torch.equal(found[2], plain) and any(isinstance(result, Tensor) for result in found[:2])
            for result in found[:2]:
                if isinstance(result, Tensor):
                    assert torch.equal(result, fast)
                else:
                    assert "the accelerated DiTPipeline is in the middle of a run" in str(result)
        assert "DiTPipeline" not in str(session.report())
    assert torch.equal(run(copy.deepcopy(pipe)), plain)


def test_calibration_measures_the_runs_calls_alone() -> None:
    from paradec.integrations.diffusers.hooks import bac

    pipe, inputs = loop_pipeline("PixArt")
    beside = LoopPipeline(pipe.transformer, FlowMatchEulerDiscreteScheduler())
    alone = bac.calibrate(pipe, lambda: pipe(inputs), 3)
    shifted = {key: -value for key, value in inputs.items()}
    disturbed = bac.calibrate(pipe, lambda: pipe(inputs, callback_on_step_end=at(2, lambda: beside(shifted), [])), 3)
    assert alone == disturbed
    assert paradec.TaylorSeer(refresh=alone).rule == alone
