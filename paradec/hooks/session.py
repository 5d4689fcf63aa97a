"""`accelerate`: attach a sampler of the forecast family to a diffusers pipeline, see what it did, take it off again.

Kept free of diffusers' own hook system: it needs no `CacheMixin` and no `cache_context`, and nothing outlives `detach`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paradec.checks import MODELS, check_choice, shown, wrong_model
from paradec.hooks.blocks import Place, matched, places
from paradec.hooks.clock import Clock, Run, timestep_of
from paradec.hooks.guard import Guard
from paradec.hooks.stand_in import StandIn
from paradec.hooks.taps import Kept, Patch, Tap, parameters_of
from paradec.samplers.forecast.refresh import AccumulatedChange, Course, Verification, relative_change
from paradec.samplers.forecast.taylorseer import TARGETS, TaylorSeer

logger = logging.getLogger("paradec")

TRANSFORMERS = ("transformer", "transformer_2", "unet")
"""Components of a pipeline that denoise."""


@dataclass
class CallRecord:
    """One call of a transformer."""

    transformer: str
    step: int
    branch: str
    """The pipeline's name for the call ("cond", "uncond"), where it gives one, and its number within the step."""
    kind: str
    """"full" (all hooked modules evaluated), "forecast" (none), or "mixed"."""
    evaluated: int
    """Hooked modules that were evaluated."""
    forecast: int
    """Hooked modules that were forecast or left out."""
    bytes: int
    """What all histories of this transformer took after the call."""
    clocked: Any = field(repr=False, default=None)

    @property
    def seconds(self) -> float:
        """How long the call took; on a GPU, waits for it."""
        if isinstance(self.clocked, float):
            return self.clocked
        start, end = self.clocked
        end.synchronize()
        return start.elapsed_time(end) / 1000


@dataclass
class Report:
    """What a session did in its latest run."""

    settings: dict[str, TaylorSeer]
    """Of each transformer, as used: `max_memory` may have chosen another target or order."""
    modules: dict[str, list[str]]
    """Names of the hooked modules of each transformer."""
    coverage: dict[str, float]
    """Share of each transformer's parameters that a forecast step leaves out."""
    runs: int
    calls: list[CallRecord]
    notes: list[str]
    """What was decided for the user: the target, say."""

    @property
    def full_steps(self) -> list[int]:
        """Steps at which a transformer was evaluated."""
        return sorted({call.step for call in self.calls if call.kind == "full"})

    @property
    def bytes(self) -> int:
        """The most that all histories took at once."""
        peak: dict[str, int] = {}
        for call in self.calls:
            peak[call.transformer] = max(peak.get(call.transformer, 0), call.bytes)
        return sum(peak.values())

    @property
    def summary(self) -> str:
        """The lines above the table of calls."""
        lines = []
        for name, settings in self.settings.items():
            target = "named modules" if settings.modules else settings.target
            lines.append(
                f"{name}: target {target}, basis {settings.basis}, order {settings.order}; {len(self.modules[name])} "
                f"modules hooked, {self.coverage[name]:.0%} of the parameters left out at a forecast step"
            )
        lines += self.notes
        kinds = [call.kind for call in self.calls]
        lines.append(
            f"run {self.runs}: {len(kinds)} calls, {kinds.count('full')} full, {kinds.count('forecast')} forecast, "
            f"{kinds.count('mixed')} mixed; histories took {self.bytes / 1e6:.1f} MB at most"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.summary]
        lines.append(f"{'step':>4} {'branch':<10} {'kind':<9} {'evaluated':>9} {'forecast':>8} {'MB':>9} {'ms':>9}")
        for call in self.calls:
            lines.append(
                f"{call.step:>4} {call.branch:<10} {call.kind:<9} {call.evaluated:>9} {call.forecast:>8} "
                f"{call.bytes / 1e6:>9.2f} {call.seconds * 1000:>9.2f}"
            )
        return "\n".join(lines)


@dataclass(eq=False)
class Memory:
    """What one transformer remembers of one run."""

    settings: TaylorSeer
    """As used in this run: `max_memory` may have chosen another target or order than was asked for."""
    course: Course
    branches: dict[str, dict[str, Kept]] = field(default_factory=dict)
    signatures: dict[str, Any] = field(default_factory=dict)
    counts: dict[str | None, int] = field(default_factory=dict)
    """Calls in this step, by the pipeline's name for them."""
    decision: bool | None = None
    """Whether this step evaluates."""
    watched: Tensor | None = None
    records: list[CallRecord] = field(default_factory=list)

    def forget(self) -> None:
        """Drop everything but the records."""
        self.branches, self.signatures, self.watched = {}, {}, None

    @property
    def nbytes(self) -> int:
        """Bytes of all histories."""
        return sum(kept.nbytes for branch in self.branches.values() for kept in branch.values())


class Transformer:
    """One transformer of a session: its taps, and the run that they serve."""

    def __init__(self, name: str, module: nn.Module, settings: TaylorSeer, clock: Clock):
        self.name, self.module, self.asked, self.clock = name, module, settings, clock
        self.notes: dict[str, str] = {}
        self.sizes: dict[Any, int] = {}
        self.said: set[str] = set()
        self.lock = threading.RLock()
        """Held during a run's call: the taps serve one at a time, and do not come off in the middle of it."""
        self.inside: int | None = None
        self.index = 0
        self.course = Course()
        self.memory = Memory(settings, self.course)
        """Of the run that was served last."""
        self.histories: dict[str, Kept] = {}
        """Of the branch that is being called."""
        self.evaluated: list[str] = []
        self.forecast: list[str] = []
        self.called: dict[str, int] = {}
        self.taps: list[Tap] = []
        self.set_aside: list[tuple[nn.Module, Any]] = []
        self.contexts: dict[int, str] = {}
        """What the pipeline calls the branch that it is about to call, by thread."""
        base = getattr(module, "_orig_mod", module)
        self.parameters = parameters_of(base)
        self._check(base)
        self._tap(settings)
        self.patch = Patch(module, self.call)
        self.old_context = getattr(base, "cache_context", None)
        self.stand_ins = [StandIn(base, "_paradec_session", self)]
        if self.old_context is not None:
            self.stand_ins.append(StandIn(base, "cache_context", self._cache_context))

    # ---- attaching --------------------------------------------------------------------------------------------------

    def _check(self, base: nn.Module) -> None:
        if getattr(base, "is_cache_enabled", False):
            raise ValueError(
                f"{self.name} has a cache of diffusers' own enabled ({type(base._cache_config).__name__}); "
                "call disable_cache() first"
            )
        if hasattr(base, "_paradec_session"):
            raise ValueError(f"{self.name} is accelerated already; detach that session first")
        if self.module is not base or base._compiled_call_impl is not None:
            if self.asked.target != "output":
                raise ValueError(
                    f"{self.name} is compiled as a whole, so that nothing inside it can be forecast; use "
                    "target='output', or compile its blocks: transformer.compile_repeated_blocks()"
                )

    def _tap(self, settings: TaylorSeer) -> None:
        """Hook what these settings name."""
        self._untap()
        base = getattr(self.module, "_orig_mod", self.module)
        if settings.modules is not None:
            found = matched(base, settings.modules, settings.skip or ())
        else:
            found = places(base, settings.target or "module")
        schedule = settings.schedule.as_dict() if settings.schedule is not None else None
        if schedule is not None:
            named = {place.name for place in found if place.kind == "forecast"}
            if set(schedule) != named:
                odd = sorted(set(schedule) ^ named)
                side = "does not have" if odd[0] in schedule else "has, but the schedule does not"
                raise ValueError(f"schedule: {type(base).__name__} {side} {', '.join(odd[:6])}")
        last = next((place.block for place in reversed(found)), "")
        if isinstance(settings.refresh, Verification) and found[0].kind == "output":
            raise ValueError(
                "refresh=Verification(...) evaluates the last block to measure the error, and target='output' leaves "
                "it out; use target='module' or 'block'"
            )
        modules = dict(base.named_modules(remove_duplicate=False))
        first = {id(module): name for name, module in reversed(modules.items())}
        found = [place for place in found if first[id(modules[place.name])] == place.name]  # shared ones once
        self.settings, self.basis, self.schedule = settings, settings.forecaster, schedule
        inner = [place for place in found if place.kind not in ("residual", "output")]
        holders = {place.name[:i] for place in inner for i, letter in enumerate(place.name) if letter == "."}
        self.holders = [modules[name] for name in sorted(holders)]
        for holder in self.holders:
            if holder._compiled_call_impl is not None:  # its graph would hold the taps
                self.set_aside.append((holder, holder._compiled_call_impl))
                holder._compiled_call_impl = None
        if self.set_aside:
            self._note(
                "compiled",
                f"{len(self.set_aside)} compiled blocks run eagerly while modules inside them are hooked; "
                "target='block' or 'output' keeps them compiled",
            )
        for place in found:
            verified = isinstance(settings.refresh, Verification) and place.block == last
            self.taps.append(Tap(self, place, modules[place.name], verified))
        self.names = [place.name for place in found]
        self.unprobed = any(place.kind == "skip" and not place.narrow for place in found)
        covered = {id(p): p.numel() for place in found for p in modules[place.name].parameters()}
        total = sum({id(p): p.numel() for p in base.parameters()}.values())
        self.coverage = sum(covered.values()) / max(total, 1)

    def _untap(self) -> None:
        for tap in self.taps:
            tap.remove()
        self.taps = []
        for module, compiled in self.set_aside:
            module._compiled_call_impl = compiled
        self.set_aside = []

    def remove(self) -> None:
        """Leave the transformer as it was, once a call in another thread is over."""
        with self.lock:
            self.patch.remove()
            self._untap()
            for stand_in in self.stand_ins:
                stand_in.remove()
            self.histories = {}

    @contextmanager
    def _cache_context(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The transformer's own `cache_context`, which also tells us the branch's name."""
        assert self.old_context is not None
        thread = threading.get_ident()
        before, self.contexts[thread] = self.contexts.get(thread), name
        try:
            with self.old_context(name, *args, **kwargs):
                yield
        finally:
            if before is None:
                del self.contexts[thread]
            else:
                self.contexts[thread] = before

    # ---- calls ------------------------------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for the transformer's call."""
        run = self.clock.see(timestep_of(args, kwargs, self.parameters), sys._getframe())
        if run is not None:
            with self.lock:
                if self.patch.active:  # not detached while we waited
                    return self._serve(run, args, kwargs)
        return self.patch.inner(*args, **kwargs)

    def _serve(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that is a run's."""
        memory = run.states.get(self.name) or self._begin(run)
        if self.settings is not memory.settings:  # another thread's run has others
            self._tap(memory.settings)
        self.memory, self.index, self.course = memory, run.index, memory.course
        if memory.course.index != run.index or memory.decision is None:
            self._next_step()
        context = self.contexts.get(threading.get_ident())
        count = memory.counts[context] = memory.counts.get(context, -1) + 1
        branch = f"{context or 'call'} {count}"
        signature = [_signature(leaf) for leaf in tree_leaves((args, kwargs))]
        if memory.signatures.get(branch) != signature:
            memory.branches.pop(branch, None)
        memory.signatures[branch] = signature
        if branch not in memory.branches:
            self._fit(signature, args, kwargs)
        self.histories = memory.branches.setdefault(branch, {})
        self.evaluated, self.forecast, self.called = [], [], {}
        stamp, self.inside = _Stamp(args, kwargs), threading.get_ident()
        try:
            if self.settings.target == "output":
                output = self.taps[0].answer(self.patch.inner, args, kwargs)
            else:
                output = self.patch.inner(*args, **kwargs)
        except BaseException:
            self.clock.end(run)  # what was remembered belongs to a run that did not end
            raise
        finally:
            self.inside = None
        if not self.evaluated and not self.forecast:
            raise RuntimeError(f"{self.name} called none of the hooked modules: {', '.join(self.names[:6])}")
        self._probe(output, run)
        kind = "full" if not self.forecast else "mixed" if self.evaluated else "forecast"
        memory.records.append(
            CallRecord(
                self.name,
                run.index,
                branch,
                kind,
                len(self.evaluated),
                len(self.forecast),
                memory.nbytes,
                stamp.stop(),
            )
        )
        return output

    def again(self, name: str) -> str:
        """What tells a module's calls within one call of the transformer apart: blocks may share it."""
        count = self.called[name] = self.called.get(name, -1) + 1
        return f"#{count}" if count else ""

    @property
    def branches(self) -> dict[str, dict[str, Kept]]:
        """Histories of the run that was served last, by branch."""
        return self.memory.branches

    @property
    def nbytes(self) -> int:
        """Bytes of these histories."""
        return self.memory.nbytes

    def _begin(self, run: Run) -> Memory:
        """A run starts: nothing of the one before is left."""
        schedule, total = self.asked.schedule, self.clock.total
        if schedule is not None and total not in (None, schedule.steps):
            raise ValueError(f"schedule was made for runs of {schedule.steps} steps; this one has {total}")
        if self.settings is not self.asked:
            self.notes.pop("memory", None)
            self._tap(self.asked)
        elif any(holder._compiled_call_impl is not None for holder in self.holders) or any(
            tap.patch is not None and tap.patch.overtaken for tap in self.taps
        ):  # blocks were compiled after we attached
            self._tap(self.settings)
        memory = run.states[self.name] = Memory(self.settings, Course(total=total, index=run.index))
        return memory

    def _next_step(self) -> None:
        if self.memory.decision is not None:
            self.course.finished(self.memory.decision)
        self.course.index = self.index
        self.memory.decision, self.memory.counts = None, {}

    def decide(self, place: Place, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a module is evaluated in this call. The first module of a step decides for all and every branch."""
        if self.schedule is not None:
            self.memory.decision = True
            return self.index in self.schedule[place.sink or place.name]
        if self.memory.decision is None:
            rule = self.settings.refresh
            if isinstance(rule, AccumulatedChange):
                seen = kwargs.get("hidden_states")
                if not _is_feature(seen):
                    seen = next(leaf for leaf in tree_leaves((args, kwargs)) if _is_feature(leaf))
                seen = seen.detach()
                if self.memory.watched is not None and self.memory.watched.shape == seen.shape:
                    self.course.change += rule.rescale(relative_change(seen, self.memory.watched))
                self.memory.watched = seen.clone() if place.kind == "output" else seen
            self.memory.decision = self.settings.evaluates(self.course)
        return self.memory.decision

    def _probe(self, output: Any, run: Run) -> None:
        """Once per attachment: what the skipped modules feed must have been replaced by a forecast."""
        if not self.unprobed or not any(
            tap.place.kind == "skip" and tap.place.name in self.forecast for tap in self.taps
        ):
            return
        self.unprobed = False
        if not all(leaf.isfinite().all() for leaf in tree_leaves(output) if _is_feature(leaf)):
            skipped = [tap.place.name for tap in self.taps if tap.place.kind == "skip"]
            self.clock.end(run)
            self.unprobed = True
            raise RuntimeError(
                f"skip: what {', '.join(skipped[:6])} would have returned reached the output of {self.name}; a skipped "
                "module must feed nothing but modules that are forecast"
            )

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _fit(self, signature: list[Any], args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a branch is called for the first time: choose what fits into `max_memory`."""
        budget = self.asked.max_memory
        if budget is None:
            return
        from paradec.hooks.memory import sizes

        branches = len(self.memory.branches) + 1
        base = getattr(self.module, "_orig_mod", self.module)
        first = TARGETS.index(self.asked.target or "module")
        tried = []
        for target in TARGETS[first:] if self.asked.modules is None and self.asked.schedule is None else [None]:
            chosen = self.asked if target is None else replace(self.asked, target=target)
            if target == "output" and isinstance(self.asked.refresh, Verification):
                continue
            found = (
                matched(base, chosen.modules, chosen.skip or ()) if chosen.modules else places(base, target or "module")
            )
            if (target, str(signature)) not in self.sizes:
                self.sizes[target, str(signature)] = sizes(base, found, chosen, args, kwargs)
            each = self.sizes[target, str(signature)]
            for order in range(self.asked.order, min(self.asked.order, 1) - 1, -1):
                candidate = replace(chosen, order=order)
                needed = each * candidate.forecaster.slots * branches
                if needed <= budget:
                    if (candidate.target, order) != (self.settings.target, self.settings.order):
                        self._choose(candidate, needed, branches, tried)
                    return
                tried.append(f"{target or 'modules'} at order {order} needs {_size(needed)}")
        raise ValueError(f"max_memory={budget}: nothing fits; {'; '.join(tried)}")

    def _choose(self, candidate: TaylorSeer, needed: int, branches: int, tried: list[str]) -> None:
        if candidate.target != self.settings.target:  # at the first step, when guidance makes its second call
            self.memory.branches = {branch: {} for branch in self.memory.branches}
        self._tap(candidate)
        self.memory.settings = candidate
        self._note(
            "memory",
            f"max_memory={self.asked.max_memory} chose target {candidate.target}, order {candidate.order} "
            f"({_size(needed)} for {branches} calls a step): {'; '.join(tried)}",
        )

    def _note(self, topic: str, text: str) -> None:
        """Say what was decided for the user: in the report, and once in the log."""
        text = f"{self.name}: {text}"
        if text not in self.said:
            self.said.add(text)
            logger.warning(text)
        self.notes[topic] = text


class Session:
    """What `accelerate` returns. A context manager: leaving it detaches."""

    def __init__(self, pipe: Any, sampler: TaylorSeer):
        if not isinstance(sampler, TaylorSeer):
            raise TypeError(f"sampler={shown(sampler)} must be a paradec.TaylorSeer")
        if sampler.target is None:
            sampler = replace(sampler, target="module")
        found = transformers_of(pipe)
        watched = pipe if hasattr(pipe, "scheduler") and not isinstance(pipe, nn.Module) else None
        self.clock = Clock(None, self._finished)
        self.guard: Guard | None = None
        self.transformers: list[Transformer] = []
        try:
            for name, module in found.items():
                self.transformers.append(Transformer(name, module, sampler, self.clock))
        except BaseException:
            self.detach()
            raise
        if watched is not None:
            self.clock.owner = watched
            self.clock.watch(watched.scheduler)
            self.guard = Guard(watched, lambda: self.clock.running, self.clock.returned)

    def report(self) -> Report:
        """What the latest run did so far; `print` shows it as a table."""
        calls = [record for transformer in self.transformers for record in transformer.memory.records]
        notes = [note for t in self.transformers for note in t.notes.values()]
        if self.clock.latest.strays:
            notes.append(f"{self.clock.latest.strays} calls of a transformer were not the run's, and left alone")
        return Report(
            settings={t.name: t.settings for t in self.transformers},
            modules={t.name: list(t.names) for t in self.transformers},
            coverage={t.name: t.coverage for t in self.transformers},
            runs=self.clock.run,
            calls=sorted(calls, key=lambda call: call.step),
            notes=notes,
        )

    def reset(self) -> None:
        """End the runs that are going on, and drop what is remembered of them.

        A pipeline's runs begin and end by themselves; a loop of one's own that was broken off may need this.
        """
        self.clock.end_all()

    def detach(self) -> None:
        """Restore the pipeline as it was. The last report stays readable; detaching twice does nothing."""
        self.clock.release()
        if self.guard is not None:
            self.guard.remove()
        for transformer in self.transformers:
            transformer.remove()
        self.clock.end_all()

    def _finished(self, run: Run) -> None:
        for memory in run.states.values():
            memory.forget()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self.detach()


def accelerate(pipe: Any, sampler: Any = None, *, cache: str | None = None) -> Any:
    """Attach a sampler of the forecast family, ReCAP, or a cache to a diffusers pipeline, in place.

    >>> session = paradec.accelerate(pipe, paradec.TaylorSeer(interval=5, order=1))    # doctest: +SKIP
    >>> pipe("a tiger"); print(session.report()); session.detach()                     # doctest: +SKIP

    Args:
        pipe: a diffusers pipeline with a `transformer` (`transformer_2` and `unet` too, where there), or a transformer
            alone: then steps are told by its argument `timestep`, and a run begins when timesteps turn around.
        sampler: `TaylorSeer`, by default with its own defaults; or `paradec.samplers.create("recap", ...)`, for
            AmusedPipeline (`paradec.hooks.recap.RecapSession`).
        cache: "block", for LLaDA2Pipeline (`paradec.hooks.block_cache.BlockCache`), without a sampler.

    Returns:
        The session. The pipeline is used as before; all calls of a step (guidance in two calls) keep their own history,
        every run starts without one, and other shapes start it anew.

    Raises:
        TypeError: nothing that could be accelerated. ValueError: what the settings name is not in the transformer, it
            is accelerated already, or diffusers' own cache is enabled. Nothing is changed then.
    """
    if getattr(pipe, "makes", None) in MODELS:
        raise wrong_model("accelerate", pipe, "a diffusers pipeline, or a transformer of one")
    if cache is not None:
        check_choice("cache", cache, ("block",))
        if sampler is not None:
            raise ValueError(f"cache={cache!r} and sampler={shown(sampler)} attach to different pipelines; give one")
        from paradec.hooks.block_cache import BlockCache

        return BlockCache(pipe)
    if getattr(sampler, "name", None) == "recap":
        from paradec.hooks.recap import RecapSession

        return RecapSession(pipe, sampler)
    return Session(pipe, TaylorSeer() if sampler is None else sampler)


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """The modules to attach to, by name."""
    if isinstance(pipe, nn.Module):
        return {type(getattr(pipe, "_orig_mod", pipe)).__name__: pipe}
    found = {name: getattr(pipe, name, None) for name in TRANSFORMERS}
    found = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not found or not hasattr(pipe, "scheduler"):
        raise TypeError(
            f"pipe={shown(pipe)} must be a diffusers pipeline with a scheduler and a component called "
            f"{', '.join(TRANSFORMERS)}, or such a transformer itself"
        )
    return found


class _Stamp:
    """Time of a call: CUDA events where its inputs are there, so that nothing waits."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        tensor = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        self.cuda = tensor is not None and tensor.is_cuda
        self.start: Any = time.perf_counter()
        if self.cuda:
            self.start, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.start.record()

    def stop(self) -> Any:
        if not self.cuda:
            return time.perf_counter() - self.start
        self.end.record()
        return self.start, self.end


def _size(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def _is_feature(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1


def _signature(leaf: Any) -> Any:
    """What must be equal for a history to go on: shapes and types of tensors, switches; not what numbers say."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (bool, str)) or leaf is None else type(leaf)
