"""Whose run it is: threads, pipelines that share a transformer, callbacks, broken runs, direct calls, and copies."""

from __future__ import annotations

import copy
import functools
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


def test_calibration_measures_the_runs_calls_alone() -> None:
    from paradec.integrations.diffusers.hooks import bac

    pipe, inputs = loop_pipeline("PixArt")
    beside = LoopPipeline(pipe.transformer, FlowMatchEulerDiscreteScheduler())
    alone = bac.calibrate(pipe, lambda: pipe(inputs), 3)
    shifted = {key: -value for key, value in inputs.items()}
    disturbed = bac.calibrate(pipe, lambda: pipe(inputs, callback_on_step_end=at(2, lambda: beside(shifted), [])), 3)
    assert alone == disturbed
    assert paradec.TaylorSeer(refresh=alone).rule == alone
