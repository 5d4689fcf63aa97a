"""One transformer of a session: the taps on its modules, and what it remembers of the run that they serve.

The pipeline owns the loop: it calls the transformer, guides, and takes the solver's steps. What the sampler decides in
our own loop it decides here too, asked from inside the pipeline's calls (docs/architecture.md has the table):

- once per solver step, the first hooked module that is called asks the sampler, and the answer holds for all modules
  and both guidance branches. (BAC's schedule is a table of steps by module, and is looked up.)
- every tap updates and expands the histories of its module when the module is called.
- the course goes on at the first call of the next step, since nobody says which call of a step is the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paradec.integrations.diffusers.hooks.blocks import (
    Place,
    hooked,
    is_feature,
    latent_of,
    main_stream,
    parameters_of,
)
from paradec.integrations.diffusers.hooks.clock import Clock, Run, timestep_of
from paradec.integrations.diffusers.hooks.hook import Hook
from paradec.integrations.diffusers.hooks.report import CallRecord, Stopwatch
from paradec.integrations.diffusers.hooks.stack import Stack, StackHistory
from paradec.integrations.diffusers.hooks.taps import ModuleHistory, Tap
from paradec.integrations.diffusers.hooks.watched import Hidden, Modulated, unpacked
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.probes import Probe
from paradec.samplers.forecast.refresh import FEW_STEPS, RunProgress, StepRule, Verification
from paradec.samplers.forecast.step_schedule import StepSchedule
from paradec.samplers.forecast.targets import Modules

logger = logging.getLogger("paradec")


@dataclass(eq=False)
class RunState:
    """What one transformer remembers of one run: what `ForecastState` is in our own loop."""

    settings: Forecast
    """As used in this run: `max_memory` may have chosen another place or order than was asked for."""
    course: RunProgress
    decision: bool | None = None
    """Whether this step evaluates; None until its first module was called."""
    watched: Tensor | None = None
    """What the rule compares the next step's input with."""
    branches: dict[str, dict[str, ModuleHistory | StackHistory]] = field(default_factory=dict)
    signatures: dict[str, list[Any]] = field(default_factory=dict)
    counts: dict[str | None, int] = field(default_factory=dict)
    """Calls in this step, by the pipeline's name for them."""
    records: list[CallRecord] = field(default_factory=list)
    levels: Sequence[float] = ()
    """Noise levels of the steps, where a rule reads them."""
    is_deciding: bool = False
    """Whether the present call decided for its step."""

    def advance_to_step(self, index: int) -> None:
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
        return sum(history.nbytes for branch in self.branches.values() for history in branch.values())


class Transformer:
    """One transformer of a session.

    Args:
        choose: `memory.choose_fitting`, where the settings have a `max_memory`.

    Raises:
        ValueError: it is accelerated already, has a cache of diffusers' own, is compiled as a whole (unless `where` is
            "output"), or has not what the settings name. Nothing is changed then.
    """

    def __init__(self, name: str, module: nn.Module, settings: Forecast, clock: Clock, choose: Any = None):
        self.name, self.module, self.asked, self.clock = name, module, settings, clock
        self.base = getattr(module, "_orig_mod", module)
        self.notes: dict[str, str] = {}
        self.logged: set[str] = set()
        self.choose = choose
        self.sizes: dict[str, dict[str | Modules | None, Any]] = {}
        """What `choose` measured, by signature and place."""
        self.is_inside = False
        """Whether the module is being called for a run."""
        self.course = RunProgress()
        self.state = RunState(settings, self.course)
        """Of the run that is served."""
        self.latent: Tensor | None = None
        """The latent of the present call."""
        self.level = 0.0
        """The noise level of its step."""
        self.histories: dict[str, Any] = {}
        """Of the branch that is being called."""
        self.evaluated: list[str] = []
        self.forecast: list[str] = []
        self.call_counts: dict[str, int] = {}
        self.hooks: list[Hook] = []
        """On modules inside."""
        self.taps: list[Tap] = []
        self.stack: Stack | None = None
        """Of where="stack"."""
        self.watcher: Hidden | Modulated | None = None
        """Of a rule that watches something else than what the module that decides is given."""
        self.compiled: list[tuple[nn.Module, Any]] = []
        """Compiled blocks that run eagerly while modules inside them are hooked."""
        self._check()
        try:
            self._tap(settings)
        except BaseException:
            self._untap()
            raise
        self.root = Hook(module, self.call, on_reset=clock.end)
        self.base._paradec_session = self

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
            self._check_compiled()
        if isinstance(self.asked.rule, Probe):
            self.asked.rule.check_model(self.base)

    def _check_compiled(self) -> None:
        if self.asked.where != "output":
            raise ValueError(
                f"{self.name} is compiled as a whole, so that nothing inside it can be forecast; use "
                "where='output', or compile its blocks: transformer.compile_repeated_blocks()"
            )

    def _tap(self, settings: Forecast) -> None:
        """Hook what these settings name."""
        self._untap()
        found, rule = hooked(self.base, settings), settings.rule
        schedule = rule.as_dict() if isinstance(rule, BlockSchedule) else None
        if schedule is not None:
            names = {place.name for place in found if place.kind == "forecast"}
            if set(schedule) != names:
                odd = sorted(set(schedule) ^ names)
                side = "does not have" if odd[0] in schedule else "has, but the schedule does not"
                raise ValueError(f"refresh: {type(self.base).__name__} {side} {', '.join(odd[:6])}")
        is_verified = isinstance(rule, Verification)
        if is_verified and found[0].kind in ("output", "stack"):
            raise ValueError(
                f"when=Verification(...) evaluates the last block to measure the error, and "
                f"where={found[0].kind!r} leaves it out; use where='module' or 'block'"
            )
        last = next((place.block for place in reversed(found)), "")
        modules = dict(self.base.named_modules(remove_duplicate=False))
        first = {id(module): name for name, module in reversed(modules.items())}
        self.settings, self.basis, self.schedule = settings, settings.forecaster, schedule
        self.measures = rule.measures and isinstance(rule, StepRule)
        if found[0].kind == "stack":
            self.stack = Stack(self, rule, found, modules)
            self.hooks += self.stack.hooks
            found = self.stack.forecasts
        found = [place for place in found if first[id(modules[place.name])] == place.name]  # shared ones once
        self._run_eagerly(found, modules)
        if self.stack is None:
            self.taps = [Tap(self, place, modules[place.name], is_verified and place.block == last) for place in found]
            self.hooks += [tap.hook for tap in self.taps if tap.hook is not None]
        self._watch(rule, modules)
        self.names = [place.name for place in found]
        self.parents = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in self.names if name]
        self.children = [modules[name] for name in self.names if name]
        self.unprobed = any(place.kind == "skip" and not place.narrow for place in found)
        covered = {id(p): p.numel() for place in found for p in modules[place.name].parameters()}
        total = sum({id(p): p.numel() for p in self.base.parameters()}.values())
        self.coverage = sum(covered.values()) / max(total, 1)

    def _watch(self, rule: Any, modules: dict[str, nn.Module]) -> None:
        """Hook what the rule watches, where that is not what the module that decides is given."""
        watch, where = getattr(rule, "watch", None), self.settings.where
        if watch == "hidden" and where == "module":
            self.watcher = Hidden(self.base, modules)
            self.hooks.append(self.watcher.hook)
        elif watch == "modulated" and where in ("block", "stack"):
            self.watcher = Modulated(self.base, modules)

    def _run_eagerly(self, found: list[Place], modules: dict[str, nn.Module]) -> None:
        """Let what holds a hooked module run eagerly: a compiled graph would hold the taps."""
        inner = [place for place in found if place.kind not in ("residual", "stack", "output")]
        holders = {place.name[:i] for place in inner for i, letter in enumerate(place.name) if letter == "."}
        self.holders = [modules[name] for name in sorted(holders)]
        for holder in self.holders:
            if holder._compiled_call_impl is not None:
                self.compiled.append((holder, holder._compiled_call_impl))
                holder._compiled_call_impl = None
        if self.compiled:
            self._note(
                "compiled",
                f"{len(self.compiled)} compiled blocks run eagerly while modules inside them are hooked; "
                "where='block' or 'output' keeps them compiled",
            )

    def _untap(self) -> None:
        for hook in reversed(self.hooks):
            hook.remove()
        self.hooks, self.taps, self.stack, self.watcher = [], [], None, None
        for module, compiled in self.compiled:
            module._compiled_call_impl = compiled
        self.compiled = []

    @property
    def _is_stale(self) -> bool:
        """Whether another module has taken the place of one that is hooked (a LoRA), or was compiled since."""
        return (
            any(holder._compiled_call_impl is not None for holder in self.holders)
            or any(hook.is_overtaken for hook in self.hooks)
            or any(
                parent._modules.get(key) is not child
                for (parent, key), child in zip(self.parents, self.children, strict=True)
            )
        )

    def remove(self) -> None:
        """Leave the transformer as it was."""
        self._untap()
        if vars(self.base).get("_paradec_session") is self:
            del self.base._paradec_session
            self.root.remove()
        self.histories = {}

    # ---- calls ------------------------------------------------------------------------------------------------------

    def call(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace the transformer's forward."""
        clock = self.clock
        with clock.lock:
            if self.is_inside:
                return inner(*args, **kwargs)
            run = clock.see(timestep_of(args, kwargs, parameters_of(self.base)), self.root.context)
            # not detached while we waited
            if run is not None and vars(self.base).get("_paradec_session") is self:
                return self._serve(run, inner, args, kwargs)
        return inner(*args, **kwargs)

    def _serve(self, run: Run, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that is a run's."""
        if self.root.is_overtaken:
            self._check_compiled()
        state = run.states.get(self.name) or self._begin(run)
        if self._is_stale:
            self._tap(self.settings)
            state.branches = {}
        self.state, self.course = state, state.course
        state.advance_to_step(run.index)
        leaves = tree_leaves((args, kwargs))
        branch = self._branch(leaves, args, kwargs)
        self.histories = state.branches.setdefault(branch, {})
        filters = isinstance(self.asked.rule, Probe) and self.asked.rule.filters
        self.latent = unpacked(self.clock.pipe, args, kwargs) if filters else latent_of(args, kwargs)
        self.level = state.levels[run.index] if run.index < len(state.levels) else 0.0
        state.is_deciding = False
        self.evaluated, self.forecast, self.call_counts = [], [], {}
        stopwatch, self.is_inside = Stopwatch(leaves), True
        try:
            if self.settings.where == "output":
                output = self.taps[0].answer(inner, args, kwargs)
                rule = self.settings.rule
                if state.is_deciding and self.evaluated and isinstance(rule, StepRule) and state.watched is not None:
                    rule.evaluated(state.course, state.watched, latent_of((output,), {}))
            else:
                output = inner(*args, **kwargs)
            if self.stack is not None:
                self.stack.finish()
        except BaseException:
            self.clock.end()  # what was remembered belongs to a run that did not end
            raise
        finally:
            self.is_inside, self.latent = False, None
            if self.stack is not None:
                self.stack.walk = None
        evaluated, forecast = len(self.evaluated), len(self.forecast)
        if not evaluated and not forecast:
            raise RuntimeError(f"{self.name} called none of the hooked modules: {', '.join(self.names[:6])}")
        self._probe(output)
        kind = "full" if not forecast else "mixed" if evaluated else "forecast"
        state.records.append(
            CallRecord(self.name, run.index, branch, kind, evaluated, forecast, state.nbytes, stopwatch.stop())
        )
        return output

    def _begin(self, run: Run) -> RunState:
        """A run starts: nothing of the one before is left."""
        rule, clock = self.asked.rule, self.clock
        facts = {"scheduler": clock.scheduler, "guidance": guidance_of(clock.pipe)}
        rule.check_run(clock.total, **facts)
        if isinstance(rule, StepSchedule) and (untold := rule.untold(clock.total, **facts)):
            self._note(
                "schedule", f"the run does not tell its {', '.join(untold)}, so that the steps may be those of another"
            )
        self.notes.pop("steps", None)
        if clock.total is not None and clock.total <= FEW_STEPS and rule.name in ("every", "step_mask"):
            self._note(
                "steps",
                f"a run of {clock.total} steps: models distilled to a few steps bear few forecasts; compare pictures",
            )
        if self.settings is not self.asked:
            self.notes.pop("memory", None)
            self._tap(self.asked)
        course = RunProgress(clock.total, run.index, clock.first)
        state = run.states[self.name] = RunState(self.settings, course)
        if isinstance(rule, Probe):
            state.levels = rule.noise_levels(clock.scheduler)
        return state

    def _branch(self, leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> str:
        """The branch that is called: calls of a step keep histories of their own, and other shapes begin them anew."""
        state, context = self.state, self.root.context
        count = state.counts[context] = state.counts.get(context, -1) + 1
        branch = f"{context or 'call'} {count}"
        signature = [_signature(leaf) for leaf in leaves]
        if state.signatures.get(branch) != signature:
            state.branches.pop(branch, None)
        state.signatures[branch] = signature
        if branch not in state.branches and self.asked.max_memory is not None:
            self._fit(str(signature), args, kwargs)
        return branch

    def call_index(self, name: str) -> str:
        """What tells a module's calls within one call of the transformer apart: blocks may share it."""
        count = self.call_counts[name] = self.call_counts.get(name, -1) + 1
        return f"#{count}" if count else ""

    def decide(self, place: Place, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a module is evaluated in this call. The first module of a step decides for all and every branch."""
        state = self.state
        if self.schedule is not None:
            state.decision = True
            return self.course.index in self.schedule[place.sink or place.name]
        if state.decision is None:
            if self.measures:
                seen = self._watched_input(place, inner, args, kwargs)
                if state.watched is not None and state.watched.shape == seen.shape:
                    self.settings.watch(self.course, state.watched, seen)
                else:
                    self.course.kept = {}
                state.watched = seen if place.name else seen.clone()
            state.decision, state.is_deciding = self.settings.evaluates(self.course), True
        return state.decision

    def _watched_input(self, place: Place, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """What the rule watches: unless it says, what the module that decides is given."""
        if self.watcher is not None:
            return self.watcher(inner, args, kwargs)
        assert self.latent is not None
        if not place.name:
            return self.latent.detach()
        if getattr(self.settings.rule, "watch", None) == "latent":
            return self.latent.detach().clone()
        return main_stream(self.base.get_submodule(place.name), args, kwargs).detach()

    def record_decision(self, full: bool) -> None:
        """What a rule has said inside a call; the step is evaluated if any of its calls is."""
        self.state.decision = full or bool(self.state.decision)

    def _probe(self, output: Any) -> None:
        """Once per attachment: what the skipped modules feed must have been replaced by a forecast."""
        skipped = [tap.place.name for tap in self.taps if tap.place.kind == "skip"]
        if not self.unprobed or not set(skipped).intersection(self.forecast):
            return
        self.unprobed = False
        if not all(leaf.isfinite().all() for leaf in tree_leaves(output) if is_feature(leaf)):
            self.clock.end()
            self.unprobed = True
            raise RuntimeError(
                f"skip: what {', '.join(skipped[:6])} would have returned reached the output of {self.name}; a skipped "
                "module must feed nothing but modules that are forecast"
            )

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the histories of the run that is served."""
        return self.state.nbytes

    def _fit(self, signature: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a branch is called for the first time: choose what fits into `max_memory`."""
        branches, known = len(self.state.branches) + 1, self.sizes.setdefault(signature, {})
        chosen, choice = self.choose(self.base, self.asked, branches, args, kwargs, known)
        order = chosen.forecaster.order
        if (chosen.where, order) == (self.settings.where, self.settings.forecaster.order):
            return
        if chosen.where != self.settings.where:  # at the first step, when guidance makes its second call
            self.state.branches = {branch: {} for branch in self.state.branches}
        self._tap(chosen)
        self.state.settings = chosen
        self._note("memory", f"max_memory={self.asked.max_memory} chose where={chosen.where}, order {order} {choice}")

    def _note(self, topic: str, text: str) -> None:
        """Say what was decided for the user: in the report, and once in the log."""
        text = f"{self.name}: {text}"
        if text not in self.logged:
            self.logged.add(text)
            logger.warning(text)
        self.notes[topic] = text


def guidance_of(pipe: Any) -> float | None:
    """The guidance scale that a pipeline keeps for its run (also in a guider), or None where it keeps none."""
    for owner, name in ((pipe, "_guidance_scale"), (getattr(pipe, "guider", None), "guidance_scale")):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _signature(leaf: Any) -> Any:
    """What must be equal for a history to go on: shapes and types of tensors, switches; not what numbers say."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (bool, str)) or leaf is None else type(leaf)
