"""A session's hooks on the modules of one transformer, and the state of the transformer's run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paradec.core.checks import short_repr
from paradec.core.other_names import SESSION_LOST
from paradec.integrations.diffusers.hooks.blocks import (
    ONE_TENSOR_TRANSFORMERS,
    Place,
    bind_arguments,
    find_latent,
    find_main_stream,
    find_places,
    is_feature,
    match_patterns,
    order_axes,
)
from paradec.integrations.diffusers.hooks.clock import Clock, Run
from paradec.integrations.diffusers.hooks.hook import Hook
from paradec.integrations.diffusers.hooks.report import CallRecord, read_clock
from paradec.integrations.diffusers.hooks.stack import Stack, StackHistory
from paradec.integrations.diffusers.hooks.taps import ModuleHistory, Tap
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import FEW_STEPS, WATCH_INPUTS, RunProgress, StepRule, Verification
from paradec.samplers.forecast.step_schedule import BlockSchedule
from paradec.samplers.forecast.targets import PLACES, Modules

logger = logging.getLogger("paradec")
WATCH = "paradec_watch"  # name of hooks that read inputs; their modules may also have a forecast hook


class _InputReached(Exception):
    """Leaves a block's forward early; its argument is the watched tensor."""


@dataclass(eq=False)
class RunState:
    """The state of one transformer in one run."""

    run_progress: RunProgress
    decision: bool | None = None  # whether modules are evaluated at this step; None before the first module is called
    watched_input: Tensor | None = None  # the tensor whose changes the rule measures, at the previous step
    branches: dict[str, dict[str, ModuleHistory | StackHistory]] = field(default_factory=dict)  # by branch and module
    signatures: dict[str, list[Any]] = field(default_factory=dict)  # by branch, `_signature` of the arguments
    last_calls: dict[str | None, int] = field(default_factory=dict)  # by `cache_context`, index of its latest call
    records: list[CallRecord] = field(default_factory=list)
    levels: Sequence[float] = ()  # noise levels of the steps, if the rule uses them
    is_deciding: bool = False  # whether the current call made the decision of its step
    changes: list[float] = field(default_factory=list)  # see `Report.changes`
    exceeds_memory: bool = False  # whether all histories, with this call's, exceed `max_memory`

    def advance_to_step(self, index: int) -> None:
        """Begin a call at this solver step. The first call of a step also ends the previous step."""
        if self.decision is not None:
            if self.run_progress.index == index:
                return
            self.run_progress.finish_step(self.decision)
        self.run_progress.index = index
        self.decision, self.last_calls = None, {}

    def forget(self) -> None:
        self.branches, self.signatures, self.watched_input, self.run_progress.memory = {}, {}, None, {}

    def count_bytes(self, slots: int = 0) -> int:
        """Count the bytes of all histories. slots: if not 0, count this number of tensors for each history."""
        return sum(history.count_bytes(slots) for branch in self.branches.values() for history in branch.values())


class Transformer:
    """One transformer of a session, with its hooks.

    Raises ValueError if the module is accelerated already, has a diffusers cache, lacks a module of the settings, or is
    compiled as a whole and `where` is not "output". After an error the module is unchanged.
    """

    def __init__(self, name: str, module: nn.Module, settings: Forecast, clock: Clock):
        self.name, self.module, self.settings, self.clock = name, module, settings, clock
        self.base = getattr(module, "_orig_mod", module)
        self.notes: dict[str, str] = {}
        self.logged: set[str] = set()
        self.is_inside = False  # whether a call that belongs to a run is in progress; if not, hooks do nothing
        self.run_progress = RunProgress()
        self.state = RunState(self.run_progress)
        self.latent: Tensor | None = None  # the latent of the current call
        self.level = 0.0  # the noise level of the current step
        self.histories: dict[str, Any] = {}  # the current branch's histories, by module
        self.evaluated: list[str] = []  # modules that the current call has evaluated
        self.forecast: list[str] = []  # modules that the current call has forecast or skipped
        self.last_calls: dict[str, int] = {}  # by module, index of its latest call in the transformer's current call
        self.hooks: list[Hook] = []
        self.compiled: list[tuple[nn.Module, Any]] = []  # compiled modules that run eagerly, and their compiled calls
        self._check()
        try:
            self._hook_modules()
        except BaseException:
            self._unhook_modules()
            raise
        self.root = Hook(module, self.call, on_reset=clock.end)
        self.detach = self.remove  # `Session` replaces it by `Session.detach`
        self.base._paradec_session = self

    def _check_no_cache(self) -> None:
        if getattr(self.base, "is_cache_enabled", False):
            raise ValueError(f"{self.name} has a cache of diffusers' own enabled; call its disable_cache() first")

    def _check(self) -> None:
        self._check_no_cache()
        if hasattr(self.base, "_paradec_session"):
            raise ValueError(f"{self.name} is accelerated already; {SESSION_LOST.format(f'pipe.{self.name}')}")
        if self.module is not self.base or self.base._compiled_call_impl is not None:
            self._check_compiled()
        self.settings.rule.check_model(self.base)

    def _check_compiled(self) -> None:
        if self.settings.where != "output":
            raise ValueError(
                f"{self.name} is compiled as a whole, so nothing inside it can be forecast; use where='output', or "
                "compile its blocks: transformer.compile_repeated_blocks()"
            )

    def _hook_modules(self) -> None:
        settings = self.settings
        self._unhook_modules()
        self.taps: list[Tap] = []
        self.stack: Stack | None = None
        self.attention: nn.Module | None = None  # the module whose input is watched, if blocks are hooked
        rule, where = settings.rule, settings.where or "module"
        if isinstance(where, Modules):
            places = match_patterns(self.base, where.modules, where.skip)
        else:
            places = find_places(self.base, where, rule.measures)
        if rule.from_input:
            places = [Place("", "residual", "")]
        schedule = rule.as_dict() if isinstance(rule, BlockSchedule) else None
        forecast_names = {place.name for place in places if place.kind == "forecast"}
        if schedule is not None and (differing := sorted(set(schedule) ^ forecast_names)):
            side = "does not have" if differing[0] in schedule else "has, but the schedule does not"
            raise ValueError(f"when: {type(self.base).__name__} {side} {', '.join(differing[:6])}")
        is_verified, kind, last = isinstance(rule, Verification), places[0].kind, places[-1].block
        if is_verified and kind in ("output", "stack"):
            raise ValueError(
                f"when=Verification(...) evaluates the last block to measure the error, and where={kind!r} skips it; "
                "use where='module' or 'block'"
            )
        modules = dict(self.base.named_modules(remove_duplicate=False))
        names = {id(module): name for name, module in reversed(modules.items())}  # shared modules: the first name
        self.basis, self.schedule = settings.forecaster, schedule
        if kind == "stack":
            self.stack = Stack(self, rule, places, modules)
            self.hooks += self.stack.hooks
            places = self.stack.forecast_places
        places = [place for place in places if names[id(modules[place.name])] == place.name]
        self._run_eagerly(places, modules)
        if self.stack is None:
            self.taps = [Tap(self, place, modules[place.name], is_verified and place.block == last) for place in places]
            self.hooks += [tap.hook for tap in self.taps if tap.hook is not None]
        self._watch(getattr(rule, "watch", None), modules)
        self.names = [place.name for place in places]
        paths = [(name.rpartition("."), modules[name]) for name in self.names if name]
        self.children = [(modules[parent], key, child) for (parent, _, key), child in paths]
        self.must_check_skipped = any(place.kind == "skip" and not place.narrow for place in places)
        covered = {id(p): p.numel() for place in places for p in modules[place.name].parameters()}
        total = sum({id(p): p.numel() for p in self.base.parameters()}.values())
        self.coverage = sum(covered.values()) / max(total, 1)

    def _watch(self, watch: str | None, modules: dict[str, nn.Module]) -> None:
        """Prepare `_read_watched` for a tensor that is not the input of the first hooked module."""
        if watch == "hidden" and self.settings.where == "module":
            place = find_places(self.base, "block", True)[0]
            self.hooks.append(Hook(modules[place.name], partial(self._decide_before, place), WATCH))
        elif watch == "modulated" and self.settings.where in ("block", "stack"):
            self.attention = modules[find_places(self.base, "module", True)[0].name]

    def _decide_before(self, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.is_inside:
            self.decide(place, forward, args, kwargs)
        return forward(*args, **kwargs)

    def _run_eagerly(self, places: list[Place], modules: dict[str, nn.Module]) -> None:
        """Disable the compiled graphs of modules that contain hooked modules: the hooks would be compiled into them."""
        inside = [place for place in places if place.kind not in ("residual", "stack", "output")]
        parents = {place.name[:i] for place in inside for i, letter in enumerate(place.name) if letter == "."}
        self.parents = [modules[name] for name in sorted(parents)]
        for parent in self.parents:
            if parent._compiled_call_impl is not None:
                self.compiled.append((parent, parent._compiled_call_impl))
                parent._compiled_call_impl = None
        if self.compiled:
            self._add_note(
                "compiled",
                f"{len(self.compiled)} compiled blocks run eagerly while modules inside them are hooked; "
                "where='block' or 'output' keeps them compiled",
            )

    def _unhook_modules(self) -> None:
        for hook in reversed(self.hooks):
            hook.remove()
        self.hooks = []
        for module, compiled in self.compiled:
            module._compiled_call_impl = compiled
        self.compiled = []

    def remove(self) -> None:
        self._unhook_modules()
        if vars(self.base).get("_paradec_session") is self:
            del self.base._paradec_session
            self.root.remove()
        self.histories = {}

    def call(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        clock = self.clock
        with clock.lock:
            if self.is_inside:
                return forward(*args, **kwargs)
            arguments = bind_arguments(self.base, args, kwargs)
            timestep = next((arguments[name] for name in ("timestep", "timesteps", "t") if name in arguments), None)
            run = clock.locate_call(timestep, self.root.context)
            # the session may have been detached while this call waited for the lock
            if run is not None and vars(self.base).get("_paradec_session") is self:
                return self._call_in_run(run, forward, args, kwargs)
        return forward(*args, **kwargs)

    def _call_in_run(self, run: Run, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.root.was_compiled_later:
            self._check_compiled()
        state = run.states.get(self.name) or self._begin(run)
        if (  # a hooked module was replaced (by a LoRA), or it or its parent was compiled later
            any(parent._compiled_call_impl is not None for parent in self.parents)
            or any(hook.was_compiled_later for hook in self.hooks)
            or any(parent._modules.get(key) is not child for parent, key, child in self.children)
        ):
            self._hook_modules()
            state.branches, state.signatures = {}, {}
        self.state, self.run_progress = state, state.run_progress
        state.advance_to_step(run.index)
        leaves = tree_leaves((args, kwargs))
        branch = self._find_branch(leaves)
        self.histories = state.branches[branch]
        self.latent = find_latent(args, kwargs)
        if self.settings.rule.filters:
            self.latent = unpack_latent(self.clock.pipe, order_axes(self.base, self.latent), kwargs)
        self.level = state.levels[run.index] if run.index < len(state.levels) else 0.0
        state.is_deciding = False
        self.evaluated, self.forecast, self.last_calls = [], [], {}
        start, self.is_inside = read_clock(leaves), True
        try:
            if self.settings.where == "output":
                output = self.taps[0].call(forward, args, kwargs)
            else:
                output = forward(*args, **kwargs)
            rule, latent = self.settings.rule, state.watched_input
            if isinstance(rule, StepRule) and rule.from_input and state.is_deciding and self.evaluated:
                assert latent is not None  # rules with `from_input` watch the latent
                returned = find_latent((output,), {})
                if type(self.base).__name__ in ONE_TENSOR_TRANSFORMERS:  # text rows come first
                    returned = returned[:, -latent.shape[1] :]
                rule.observe_output(self.run_progress, latent, returned)
            if self.stack is not None:
                self.stack.finish()
            if state.exceeds_memory:
                raise self._memory_error()
        except BaseException:
            self.clock.end()
            raise
        finally:
            self.is_inside, self.latent = False, None
            if self.stack is not None:
                self.stack.call = None
        evaluated, forecast = len(self.evaluated), len(self.forecast)
        if not evaluated and not forecast:
            raise RuntimeError(f"{self.name} called none of the hooked modules: {', '.join(self.names[:6])}")
        self._check_placeholders(output)
        kind = "full" if not forecast else "mixed" if evaluated else "forecast"
        values = (self.name, run.index, branch, kind, evaluated, forecast, state.count_bytes())
        state.records.append(CallRecord(*values, start, read_clock(leaves)))
        return output

    def _begin(self, run: Run) -> RunState:
        self._check_no_cache()
        rule, clock = self.settings.rule, self.clock
        if unknown := rule.check_run(clock.total, clock.scheduler, read_guidance(clock.pipe)):
            self._add_note("schedule", f"the run's {', '.join(unknown)} is unknown, so the schedule may not fit it")
        self.notes.pop("steps", None)
        if clock.total is not None and clock.total <= FEW_STEPS and rule.name in ("every", "step_mask"):
            note = f"a run of {clock.total} steps: models distilled to few steps allow few forecasts; compare pictures"
            self._add_note("steps", note)
        progress = RunProgress(clock.total, run.index, clock.first)
        run.states[self.name] = RunState(progress, levels=rule.noise_levels(clock.scheduler))
        return run.states[self.name]

    def _find_branch(self, leaves: list[Any]) -> str:
        """Name the branch by the call's context and number in its step. A new `_signature` clears its histories."""
        state, context = self.state, self.root.context
        call_index = state.last_calls[context] = state.last_calls.get(context, -1) + 1
        branch = f"{context or 'call'} {call_index}"
        signature = [_signature(leaf) for leaf in leaves]
        if state.signatures.get(branch) != signature:
            state.signatures[branch], state.branches[branch] = signature, {}
        return branch

    def check_memory(self, histories: Any) -> Any:
        """Return new histories. If all together exceed `max_memory`, return meta tensors; `call` raises at its end."""
        limit: Any = self.settings.max_memory
        if limit is None or self.state.count_bytes(self.basis.slots) <= limit:
            return histories
        self.state.exceeds_memory = True
        return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), histories)

    def _memory_error(self) -> ValueError:
        settings, rule, needed = self.settings, self.settings.rule, self.state.count_bytes(self.basis.slots)
        begin = PLACES.index(settings.where) + 1 if isinstance(settings.where, str) else 3
        end = 2 if isinstance(rule, Verification) else 3 if getattr(rule, "watch", None) in WATCH_INPUTS[:2] else 4
        places = () if rule.where is not None or self.schedule is not None else PLACES[begin:end]
        smaller = [f"where={place!r}" for place in places] + ["a lower order"] * (self.basis.slots > 1)
        hint = f"; {', '.join(smaller)} needs less" if smaller else ""
        return ValueError(
            f"max_memory={settings.max_memory}: where={short_repr(settings.where)} at order {self.basis.order} needs "
            f"{needed / 1e6:.3g} MB for {len(self.state.branches)} calls of a step so far{hint}"
        )

    def call_suffix(self, name: str) -> str:
        """Return a suffix that distinguishes a module's calls in one call of the transformer: "", "#1", "#2", ..."""
        call_index = self.last_calls[name] = self.last_calls.get(name, -1) + 1
        return f"#{call_index}" if call_index else ""

    def decide(self, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Decide whether a module is evaluated in this call. The first module called in a step decides for all modules
        and branches; a `BlockSchedule` decides for each module separately."""
        state = self.state
        if self.schedule is not None:
            state.decision = True
            return self.run_progress.index in self.schedule[place.sink or place.name]
        if state.decision is None:
            rule, progress = self.settings.rule, self.run_progress
            if isinstance(rule, StepRule) and rule.measures:
                watched = self._read_watched(place, forward, args, kwargs)
                if state.watched_input is not None and state.watched_input.shape == watched.shape:
                    rule.observe_change(progress, state.watched_input, watched)
                else:
                    progress.memory = {}
                state.watched_input = watched.detach().clone()  # later modules may write into the tensor
                is_compared = progress.change and hasattr(rule, "threshold")
                if is_compared and not replace(rule, threshold=1e300).is_full(progress):  # type: ignore[call-arg]
                    state.changes.append(progress.change)
            state.changes += [] if progress.error is None else [progress.error]
            state.decision, state.is_deciding = self.settings.evaluates(progress), True
        return state.decision

    def _read_watched(self, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if self.attention is not None:
            return read_modulated_input(self.attention, forward, args, kwargs)
        assert self.latent is not None
        if not place.name or getattr(self.settings.rule, "watch", None) == "latent":
            return self.latent
        return find_main_stream(self.base.get_submodule(place.name), args, kwargs)

    def _check_placeholders(self, output: Any) -> None:
        """Check once that no placeholder of a skipped module has reached the output."""
        skipped = [tap.place.name for tap in self.taps if tap.place.kind == "skip"]
        if not self.must_check_skipped or not set(skipped).intersection(self.forecast):
            return
        if not all(leaf.isfinite().all() for leaf in tree_leaves(output) if is_feature(leaf)):
            self.clock.end()
            raise RuntimeError(
                f"skip: the placeholder of {', '.join(skipped[:6])} reached the output of {self.name}; the output of a "
                "skipped module must only be used by modules that are forecast"
            )
        self.must_check_skipped = False

    def _add_note(self, topic: str, text: str) -> None:
        """Record an automatic decision in the report, and once in the log."""
        text = f"{self.name}: {text}"
        if text not in self.logged:
            self.logged.add(text)
            logger.warning(text)
        self.notes[topic] = text


def read_guidance(pipe: Any) -> float | None:
    """Read the guidance scale of a pipeline or its guider."""
    for owner, name in ((pipe, "_guidance_scale"), (getattr(pipe, "guider", None), "guidance_scale")):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _signature(leaf: Any) -> Any:
    """Return the part of an argument whose change clears the histories: shape and dtype, or a switch's value."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (bool, str)) or leaf is None else type(leaf)


def read_modulated_input(
    attention: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """Run a block up to its attention, and return the attention's input [B, ...]."""

    def leave(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        raise _InputReached(find_main_stream(attention, args, kwargs).detach())

    hook = Hook(attention, leave, WATCH)
    try:
        forward(*args, **kwargs)
    except _InputReached as reached:
        tensor: Tensor = reached.args[0]
        return tensor
    finally:
        hook.remove()
    raise RuntimeError("watch='modulated': the first block did not call its attention; use watch='hidden'")


def unpack_latent(pipe: Any, latent: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return a transformer's latent as [B, C, (frames,) rows, columns].

    The pipeline unpacks cells [B, cells, C] (FLUX, Qwen-Image). Raises ValueError if the cells' positions are unknown.
    """
    if latent.ndim != 3:
        return latent
    rows, columns = _find_grid(kwargs)
    unpack_latents, scale = getattr(pipe, "_unpack_latents", None), getattr(pipe, "vae_scale_factor", None)
    if unpack_latents is not None and scale is not None and rows * columns == latent.shape[1]:
        try:
            picture: Tensor = unpack_latents(latent, rows * 2 * scale, columns * 2 * scale, scale)
        except TypeError:  # this pipeline's `_unpack_latents` has other parameters
            picture = latent
        except RuntimeError:  # cells without 2 x 2 packing (Qwen-Image 2.1)
            return latent.transpose(1, 2).unflatten(2, (rows, columns))
        config = getattr(getattr(pipe, "vae", None), "config", {})
        channels = config.get("latent_channels", config.get("z_dim", picture.shape[1]))
        if picture.ndim in (4, 5) and picture.shape[1] == channels:
            return picture
    raise ValueError(
        f"a rule that filters the latent needs its rows and columns, and {type(pipe).__name__} passes cells of shape "
        f"{tuple(latent.shape)} without their positions; use another rule"
    )


def _find_grid(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and columns of the cells, or (0, 0) if unknown."""
    ids, shapes = kwargs.get("img_ids"), kwargs.get("img_shapes")
    if isinstance(ids, Tensor) and ids.shape[-1] == 3 and not ids[..., 0].any():  # [(B,) cells, (picture, row, column)]
        return int(ids[..., 1].max()) + 1, int(ids[..., 2].max()) + 1
    if shapes:  # for every row of the batch: [(frames, rows, columns), ...]
        shape = shapes[0] if isinstance(shapes[0], tuple) else shapes[0][0]
        return int(shape[-2]), int(shape[-1])
    return 0, 0
