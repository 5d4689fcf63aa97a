"""One transformer of a session: the taps on its modules, and what it remembers of the run that they serve.

The pipeline owns the loop: it calls the transformer, guides, and takes the solver's steps. What the sampler decides in
our own loop it decides here too, asked from inside the pipeline's calls (docs/architecture.md has the table):

- once per solver step, the first hooked module that is called asks `TaylorSeer.evaluates`, and the answer holds for all
  modules and both guidance branches. (BAC's schedule is a table of steps by module, and is looked up.)
- every tap updates and expands the histories of its module with `TaylorSeer.forecaster`, when the module is called.
- the course goes on at the first call of the next step, since nobody says which call of a step is the last.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paradec.integrations.diffusers.hooks.blocks import Place, hooked
from paradec.integrations.diffusers.hooks.clock import Clock, Run, timestep_of
from paradec.integrations.diffusers.hooks.memory import Size, fitting, megabytes
from paradec.integrations.diffusers.hooks.report import CallRecord, Stopwatch
from paradec.integrations.diffusers.hooks.spared import Idle, Once, embeddings, feeders
from paradec.integrations.diffusers.hooks.stack import Kept as KeptStack
from paradec.integrations.diffusers.hooks.stack import Stack, StackTap
from paradec.integrations.diffusers.hooks.stand_in import StandIn
from paradec.integrations.diffusers.hooks.taps import Kept, Patch, Tap, parameters_of
from paradec.integrations.diffusers.hooks.watched import Hidden, Modulated, is_feature, latent_of, unpacked
from paradec.integrations.diffusers.runs import guidance_above
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.probes import Probe
from paradec.samplers.forecast.refresh import AccumulatedChange, RunProgress, StepRule, Verification
from paradec.samplers.forecast.step_schedule import StepSchedule
from paradec.samplers.forecast.targets import Modules
from paradec.samplers.forecast.taylorseer import TaylorSeer

logger = logging.getLogger("paradec")


@dataclass(eq=False)
class RunState:
    """What one transformer remembers of one run: what `ForecastState` is in our own loop."""

    settings: TaylorSeer
    """As used in this run: `max_memory` may have chosen another target or order than was asked for."""
    course: RunProgress
    decision: bool | None = None
    """Whether this step evaluates; None until its first module was called."""
    watched: Tensor | None = None
    """What `TaylorSeer.watch` compares the next step's input with."""
    branches: dict[str, dict[str, Kept | KeptStack]] = field(default_factory=dict)
    signatures: dict[str, list[Any]] = field(default_factory=dict)
    counts: dict[str | None, int] = field(default_factory=dict)
    """Calls in this step, by the pipeline's name for them."""
    records: list[CallRecord] = field(default_factory=list)
    levels: Sequence[float] = ()
    """Noise levels of the steps, where a rule reads them."""
    deciding: bool = False
    """Whether the present call decided for its step."""

    def come_to(self, index: int) -> None:
        """A call at this solver step begins; if it is the step's first, the step before it is over."""
        if self.decision is not None:
            if self.course.index == index:
                return
            self.course.finished(self.decision)
        self.course.index = index
        self.decision, self.counts = None, {}

    def forget(self) -> None:
        """Drop everything but the records."""
        self.branches, self.signatures, self.watched, self.course.kept = {}, {}, None, {}

    @property
    def nbytes(self) -> int:
        """Bytes of all histories."""
        return sum(kept.nbytes for branch in self.branches.values() for kept in branch.values())


class Transformer:
    """One transformer of a session.

    Raises:
        ValueError: it is accelerated already, has a cache of diffusers' own, is compiled as a whole (unless `target` is
            "output"), or has not what the settings name. Nothing is changed then.
    """

    def __init__(self, name: str, module: nn.Module, settings: TaylorSeer, clock: Clock):
        self.name, self.module, self.asked, self.clock = name, module, settings, clock
        self.notes: dict[str, str] = {}
        self.sizes: dict[str, dict[str | Modules | None, Size]] = {}
        """What `fitting` measured, by signature and target."""
        self.said: set[str] = set()
        self.lock = threading.RLock()
        """Held during a run's call: the taps serve one at a time, and do not come off in the middle of it."""
        self.inside: int | None = None
        self.course = RunProgress()
        self.state = RunState(settings, self.course)
        """Of the run that was served last."""
        self.given: Tensor | None = None
        """The latent of the present call."""
        self.level = 0.0
        """The noise level of its step."""
        self.histories: dict[str, Any] = {}
        """Of the branch that is being called."""
        self.evaluated: list[str] = []
        self.forecast: list[str] = []
        self.called: dict[str, int] = {}
        self.computed: dict[Any, tuple[Any, Any]] = {}
        self.taps: list[Tap | StackTap] = []
        self.stack: Stack | None = None
        """Of target "stack"."""
        self.watcher: Hidden | Modulated | None = None
        """Of a rule that watches something else than what the module that decides is given."""
        self.spared: list[Idle | Once] = []
        self.set_aside: list[tuple[nn.Module, Any]] = []
        """Compiled blocks that run eagerly while modules inside them are hooked."""
        self.contexts: dict[int, str] = {}
        """What the pipeline calls the branch that it is about to call, by thread."""
        self.base = getattr(module, "_orig_mod", module)
        self.parameters = parameters_of(self.base)
        self._check()
        self._tap(settings)
        self.patch = Patch(module, self.call)
        self.old_context = getattr(self.base, "cache_context", None)
        self.stand_ins = [StandIn(self.base, "_paradec_session", self)]
        if self.old_context is not None:
            self.stand_ins.append(StandIn(self.base, "cache_context", self._cache_context))

    # ---- attaching --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if getattr(self.base, "is_cache_enabled", False):
            raise ValueError(
                f"{self.name} has a cache of diffusers' own enabled ({type(self.base._cache_config).__name__}); "
                "call disable_cache() first"
            )
        if hasattr(self.base, "_paradec_session"):
            raise ValueError(f"{self.name} is accelerated already; detach that session first")
        if self.module is not self.base or self.base._compiled_call_impl is not None:
            if self.asked.target != "output":
                raise ValueError(
                    f"{self.name} is compiled as a whole, so that nothing inside it can be forecast; use "
                    "target='output', or compile its blocks: transformer.compile_repeated_blocks()"
                )
        if isinstance(self.asked.rule, Probe):
            self.asked.rule.check_model(self.base)

    def _tap(self, settings: TaylorSeer) -> None:
        """Hook what these settings name."""
        self._untap()
        found = hooked(self.base, settings)
        rule = settings.rule
        schedule = rule.as_dict() if isinstance(rule, BlockSchedule) else None
        if schedule is not None:
            named = {place.name for place in found if place.kind == "forecast"}
            if set(schedule) != named:
                odd = sorted(set(schedule) ^ named)
                side = "does not have" if odd[0] in schedule else "has, but the schedule does not"
                raise ValueError(f"refresh: {type(self.base).__name__} {side} {', '.join(odd[:6])}")
        verifies = isinstance(rule, Verification)
        if verifies and found[0].kind in ("output", "stack"):
            raise ValueError(
                f"refresh=Verification(...) evaluates the last block to measure the error, and "
                f"target={found[0].kind!r} leaves it out; use target='module' or 'block'"
            )
        last = next((place.block for place in reversed(found)), "")
        modules = dict(self.base.named_modules(remove_duplicate=False))
        first = {id(module): name for name, module in reversed(modules.items())}
        self.settings, self.basis, self.schedule = settings, settings.forecaster, schedule
        self.stack = Stack(self, found, modules) if found[0].kind == "stack" else None
        if self.stack is not None:
            found = self.stack.forecasts
        found = [place for place in found if first[id(modules[place.name])] == place.name]  # shared ones once
        self._set_aside(found, modules)
        if self.stack is not None:
            self.taps += self.stack.taps
        else:
            for place in found:
                self.taps.append(Tap(self, place, modules[place.name], verifies and place.block == last))
        self.measures = rule.measures
        watch = rule.watch if isinstance(rule, AccumulatedChange) else None
        if watch == "hidden" and settings.target == "module":
            self.watcher = Hidden(self.base, modules)
        elif watch == "modulated" and settings.target in ("block", "stack"):
            self.watcher = Modulated(self.base, modules)
        self._spare(found, modules, last if verifies else None)
        self.names = [place.name for place in found]
        self.unprobed = any(place.kind == "skip" and not place.narrow for place in found)
        covered = {id(p): p.numel() for place in found for p in modules[place.name].parameters()}
        total = sum({id(p): p.numel() for p in self.base.parameters()}.values())
        self.coverage = sum(covered.values()) / max(total, 1)

    def _set_aside(self, found: list[Place], modules: dict[str, nn.Module]) -> None:
        """Let what holds a hooked module run eagerly: a compiled graph would hold the taps."""
        inner = [place for place in found if place.kind not in ("residual", "stack", "output")]
        holders = {place.name[:i] for place in inner for i, letter in enumerate(place.name) if letter == "."}
        self.holders = [modules[name] for name in sorted(holders)]
        for holder in self.holders:
            if holder._compiled_call_impl is not None:
                self.set_aside.append((holder, holder._compiled_call_impl))
                holder._compiled_call_impl = None
        if self.set_aside:
            self._note(
                "compiled",
                f"{len(self.set_aside)} compiled blocks run eagerly while modules inside them are hooked; "
                "target='block' or 'output' keeps them compiled",
            )

    def _spare(self, found: list[Place], modules: dict[str, nn.Module], verified: str | None) -> None:
        """Leave out what only feeds these places, and what was computed before."""
        if not any(place.kind == "forecast" for place in found):
            return
        whole = not isinstance(self.settings.target, Modules)
        for feeder in feeders(self.base, found, verified, whole):
            self.spared.append(
                Idle(self, feeder, modules[feeder.name], modules[feeder.block] if feeder.block else None)
            )
        self.spared += [Once(self, module) for module in embeddings(self.base)]

    def _untap(self) -> None:
        for tap in self.taps:
            tap.remove()
        for spared in self.spared:
            spared.patch.remove()
        if self.watcher is not None:
            self.watcher.remove()
        self.taps, self.spared, self.stack, self.watcher = [], [], None, None
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
    def _cache_context(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
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
        """Replace the transformer's call."""
        run = self.clock.see(timestep_of(args, kwargs, self.parameters), sys._getframe())
        if run is not None:
            with self.lock:
                if self.patch.active:  # not detached while we waited
                    return self._serve(run, args, kwargs)
        return self.patch.inner(*args, **kwargs)

    def _serve(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that is a run's."""
        state = run.states.get(self.name) or self._begin(run)
        if self.settings is not state.settings:  # another thread's run has others
            self._tap(state.settings)
        self.state, self.course = state, state.course
        state.come_to(run.index)
        leaves = tree_leaves((args, kwargs))
        branch = self._branch(leaves, args, kwargs)
        self.histories = state.branches.setdefault(branch, {})
        filters = isinstance(self.asked.rule, Probe) and self.asked.rule.filters
        self.given = unpacked(self.clock.owner, args, kwargs) if filters else latent_of(args, kwargs)
        self.level = state.levels[run.index] if run.index < len(state.levels) else 0.0
        state.deciding = False
        self.evaluated, self.forecast, self.called = [], [], {}
        if self.stack is not None:
            self.stack.begin()
        stopwatch, self.inside = Stopwatch(leaves), threading.get_ident()
        try:
            if self.settings.target == "output":
                whole = self.taps[0]
                assert isinstance(whole, Tap)
                output = whole.answer(self.patch.inner, args, kwargs)
                rule = self.settings.rule
                if state.deciding and self.evaluated and isinstance(rule, StepRule) and state.watched is not None:
                    rule.evaluated(state.course, state.watched, latent_of((output,), {}))
            else:
                output = self.patch.inner(*args, **kwargs)
            if self.stack is not None:
                self.stack.finish()
        except BaseException:
            self.clock.end(run)  # what was remembered belongs to a run that did not end
            raise
        finally:
            self.inside, self.computed, self.given = None, {}, None
        evaluated, forecast = len(self.evaluated), len(self.forecast)
        if not evaluated and not forecast:
            raise RuntimeError(f"{self.name} called none of the hooked modules: {', '.join(self.names[:6])}")
        self._probe(output, run)
        kind = "full" if not forecast else "mixed" if evaluated else "forecast"
        state.records.append(
            CallRecord(self.name, run.index, branch, kind, evaluated, forecast, state.nbytes, stopwatch.stop())
        )
        return output

    def _begin(self, run: Run) -> RunState:
        """A run starts: nothing of the one before is left."""
        rule, total = self.asked.rule, self.clock.total
        run_facts = {"scheduler": self.clock.scheduler, "guidance": guidance_above(sys._getframe())}
        rule.check_run(total, **run_facts)
        if isinstance(rule, StepSchedule) and (untold := rule.untold(total, **run_facts)):
            self._note(
                "schedule", f"the run does not tell its {', '.join(untold)}, so that the steps may be those of another"
            )
        if self.settings is not self.asked:
            self.notes.pop("memory", None)
            self._tap(self.asked)
        elif any(holder._compiled_call_impl is not None for holder in self.holders) or any(
            tap.patch is not None and tap.patch.overtaken for tap in self.taps
        ):  # blocks were compiled after we attached
            self._tap(self.settings)
        state = run.states[self.name] = RunState(self.settings, RunProgress(total=total, index=run.index))
        if isinstance(rule, Probe):
            state.levels = rule.noise_levels(self.clock.scheduler)
        return state

    def _branch(self, leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> str:
        """The branch that is called: calls of a step keep histories of their own, and other shapes begin them anew."""
        state, context = self.state, self.contexts.get(threading.get_ident())
        count = state.counts[context] = state.counts.get(context, -1) + 1
        branch = f"{context or 'call'} {count}"
        signature = [_signature(leaf) for leaf in leaves]
        if state.signatures.get(branch) != signature:
            state.branches.pop(branch, None)
        state.signatures[branch] = signature
        if branch not in state.branches and self.asked.max_memory is not None:
            self._fit(str(signature), args, kwargs)
        return branch

    def again(self, name: str) -> str:
        """What tells a module's calls within one call of the transformer apart: blocks may share it."""
        count = self.called[name] = self.called.get(name, -1) + 1
        return f"#{count}" if count else ""

    def rests(self, sinks: Sequence[str], again: str) -> bool:
        """Whether all these modules will be forecast in this call; each decision is that of `decide`."""
        state = self.state
        if self.schedule is not None:
            if any(self.course.index in self.schedule[sink] for sink in sinks):
                return False
        elif state.decision is None:
            if self.measures:  # what it watches has not been seen yet
                return False
            state.decision = self.settings.evaluates(self.course)
        if state.decision and self.schedule is None:
            return False
        return all(sink + again in self.histories for sink in sinks)

    def decide(self, place: Place, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a module is evaluated in this call. The first module of a step decides for all and every branch."""
        state = self.state
        if self.schedule is not None:
            state.decision = True
            return self.course.index in self.schedule[place.sink or place.name]
        if state.decision is None:
            if self.measures:
                seen = self._watched(place, args, kwargs)
                if state.watched is not None and state.watched.shape == seen.shape:
                    self.settings.watch(self.course, state.watched, seen)
                else:
                    self.course.kept = {}
                state.watched = seen if place.name else seen.clone()
            state.decision, state.deciding = self.settings.evaluates(self.course), True
        return state.decision

    def _watched(self, place: Place, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """What the rule watches: unless it says, what the module that decides is given."""
        if self.watcher is not None:
            return self.watcher(args, kwargs)
        rule = self.settings.rule
        if isinstance(rule, AccumulatedChange) and rule.watch == "latent" and place.name:
            assert self.given is not None
            return self.given.detach().clone()
        return latent_of(args, kwargs).detach()

    def decided(self, full: bool) -> None:
        """What a rule has said inside a call; the step is evaluated if any of its calls is."""
        self.state.decision = full or bool(self.state.decision)

    def _probe(self, output: Any, run: Run) -> None:
        """Once per attachment: what the skipped modules feed must have been replaced by a forecast."""
        if not self.unprobed or not any(
            tap.place.kind == "skip" and tap.place.name in self.forecast for tap in self.taps
        ):
            return
        self.unprobed = False
        if not all(leaf.isfinite().all() for leaf in tree_leaves(output) if is_feature(leaf)):
            skipped = [tap.place.name for tap in self.taps if tap.place.kind == "skip"]
            self.clock.end(run)
            self.unprobed = True
            raise RuntimeError(
                f"skip: what {', '.join(skipped[:6])} would have returned reached the output of {self.name}; a skipped "
                "module must feed nothing but modules that are forecast"
            )

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def branches(self) -> dict[str, dict[str, Kept | KeptStack]]:
        """Histories of the run that was served last, by branch."""
        return self.state.branches

    @property
    def nbytes(self) -> int:
        """Bytes of these histories."""
        return self.state.nbytes

    def _fit(self, signature: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a branch is called for the first time: choose what fits into `max_memory`."""
        branches, known = len(self.state.branches) + 1, self.sizes.setdefault(signature, {})
        chosen, needed, tried = fitting(self.base, self.asked, branches, args, kwargs, known)
        order = chosen.forecaster.order
        if (chosen.target, order) == (self.settings.target, self.settings.forecaster.order):
            return
        if chosen.target != self.settings.target:  # at the first step, when guidance makes its second call
            self.state.branches = {branch: {} for branch in self.state.branches}
        self._tap(chosen)
        self.state.settings = chosen
        self._note(
            "memory",
            f"max_memory={self.asked.max_memory} chose target {chosen.target}, order {order} "
            f"({megabytes(needed)} for {branches} calls a step): {'; '.join(tried)}",
        )

    def _note(self, topic: str, text: str) -> None:
        """Say what was decided for the user: in the report, and once in the log."""
        text = f"{self.name}: {text}"
        if text not in self.said:
            self.said.add(text)
            logger.warning(text)
        self.notes[topic] = text


def _signature(leaf: Any) -> Any:
    """What must be equal for a history to go on: shapes and types of tensors, switches; not what numbers say."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (bool, str)) or leaf is None else type(leaf)
