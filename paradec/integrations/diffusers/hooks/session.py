"""Attachment of a sampler of the forecast family to a diffusers pipeline (`accelerate`, `Session`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from paradec.core.checks import MODELS, check_choice, short_repr, wrong_model_error
from paradec.integrations.diffusers.hooks.clock import Clock
from paradec.integrations.diffusers.hooks.hook import PipelineSession
from paradec.integrations.diffusers.hooks.report import CallRecord, Report
from paradec.integrations.diffusers.hooks.transformer import Transformer
from paradec.samplers.forecast.forecast import FeatureForecast
from paradec.samplers.forecast.methods import sampler_from

TRANSFORMERS = ("transformer", "transformer_2", "unet")  # the components of a pipeline that denoise, if it has them


class Session(PipelineSession):
    """Sampler on a pipeline, from `paradec.accelerate`. A context manager that detaches at its end."""

    def __init__(self, pipe: Any, method: FeatureForecast):
        sampler = method.to_forecast()
        if sampler.where is None:
            sampler = replace(sampler, where=sampler.rule.where or "module")
        self.pipe, self.sampler = pipe, sampler
        find_transformers(pipe)  # raises TypeError before the scheduler is checked
        observed = pipe if hasattr(pipe, "scheduler") and not isinstance(pipe, nn.Module) else None
        sampler.rule.noise_levels(getattr(observed, "scheduler", None))
        self.transformers: list[Transformer] = []
        self.clock = Clock(self._attach)
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise
        if observed is not None:
            self.clock.observe(observed)

    def _attach(self) -> None:
        """Attach to the transformers, unless the session is attached to them already."""
        components = find_transformers(self.pipe)
        if list(components.values()) != [transformer.module for transformer in self.transformers]:
            for transformer in self.transformers:
                transformer.remove()
            self.transformers = []
            for name, module in components.items():
                self.transformers.append(Transformer(name, module, self.sampler, self.clock))
                self.transformers[-1].detach = self.detach

    def report(self) -> Report:
        """Return the report of the latest or current run; `print` shows a table, `.short` is one line."""
        run, transformers = self.clock.run, self.transformers
        calls: list[CallRecord] = [record for state in run.states.values() for record in state.records]
        notes = [note for transformer in transformers for note in transformer.notes.values()]
        if run.foreign_calls:
            notes.append(f"{run.foreign_calls} calls of a transformer did not belong to the run, and were not changed")
        return Report(
            settings={t.name: t.settings for t in transformers},
            modules={t.name: list(t.names) for t in transformers},
            coverage={t.name: t.coverage for t in transformers},
            runs=self.clock.runs,
            calls=sorted(calls, key=lambda call: call.step),
            notes=notes,
            changes=[change for state in run.states.values() for change in state.changes],
        )

    def reset(self) -> None:
        """End the run and free its histories. Needed if a custom loop was interrupted."""
        self.clock.end()

    def detach(self) -> None:
        """Restore the pipeline; the report stays available. A second call does nothing."""
        with self.clock.lock:
            self.clock.end()
            self.clock.release()
            for transformer in self.transformers:
                transformer.remove()


def accelerate(pipe: Any, sampler: Any = None, *, cache: str | None = None, prior: Any = None, **settings: Any) -> Any:
    """Attach a sampler or a cache to a diffusers pipeline, in place. Returns a session with `report` and `detach`.

    >>> session = paradec.accelerate(pipe, "taylorseer", interval=5, order=1)    # doctest: +SKIP
    >>> pipe("a tiger"); print(session.report()); session.detach()               # doctest: +SKIP

    Args:
        pipe: a diffusers pipeline with a `transformer`, `transformer_2` or `unet`; or a transformer alone. Steps of a
            transformer alone are counted by its argument `timestep`: a run begins when timesteps change direction.
        sampler: a method (`TaylorSeer`, the default, `TeaCache`, ...), a `Forecast`, a rule (`Forecast(when=rule)`), a
            config of diffusers (`TaylorSeerCacheConfig(...)`), or a name: "taylorseer(interval=3)". For AmusedPipeline,
            `ReCAP`.
        cache: "block" for LLaDA2Pipeline (`hooks.block_cache.BlockCache`); not together with `sampler` or `prior`.
        prior: the sampler of GlmImagePipeline's prior, or a mapping with more settings (`hooks.prior.PriorSession`).
            `sampler` is then for the pipeline's DiT, and may be left out.
        settings: settings of a sampler that is given by its name, or of the default sampler.

    Raises:
        TypeError: `pipe` cannot be accelerated. ValueError: an unknown name or module, or a pipeline that is already
            accelerated or has a diffusers cache. After an error the pipeline is unchanged.
    """
    if getattr(pipe, "makes", None) in MODELS:
        raise wrong_model_error("accelerate", pipe, "a diffusers pipeline, or a transformer of one")
    has_sampler = sampler is not None or bool(settings)
    if cache is not None:
        check_choice("cache", cache, ("block",))
        if has_sampler or prior is not None:
            conflict = f"sampler={short_repr(sampler)}" if has_sampler else f"prior={short_repr(prior)}"
            raise ValueError(f"cache={cache!r} and {conflict} attach to different pipelines; give one")
        from paradec.integrations.diffusers.hooks.block_cache import BlockCache

        return BlockCache(pipe)
    if prior is not None:
        from paradec.integrations.diffusers.hooks.prior import PriorSession

        session = PriorSession(pipe, prior)
        try:
            session.forecast = accelerate(pipe, sampler, **settings) if has_sampler else None
        except BaseException:
            session.detach()
            raise
        return session
    find_transformers(pipe)  # raises TypeError for an unsuitable `pipe`, before errors of the sampler
    method = sampler_from(sampler, settings)
    if isinstance(method, FeatureForecast):
        return Session(pipe, method)
    from paradec.integrations.diffusers.hooks.recap import RecapSession

    return RecapSession(pipe, method)


def find_transformers(pipe: Any) -> dict[str, nn.Module]:
    """Return the modules to attach to, by name. Raises TypeError if `pipe` has none, or no scheduler."""
    if isinstance(pipe, nn.Module):
        return {type(getattr(pipe, "_orig_mod", pipe)).__name__: pipe}
    components = {name: getattr(pipe, name, None) for name in TRANSFORMERS}
    modules = {name: module for name, module in components.items() if isinstance(module, nn.Module)}
    if not modules or not hasattr(pipe, "scheduler"):
        raise TypeError(
            f"pipe={short_repr(pipe)} must be a diffusers pipeline with a scheduler and a component called "
            f"{', '.join(TRANSFORMERS)}, or such a transformer itself"
        )
    return modules


def check_every_step(module: str, steps: list[int], num_steps: int) -> None:
    """Raise ValueError unless `steps` are 0, 1, ..., `num_steps` - 1. num_steps: that of the first run; 0: unknown."""
    if not steps or steps != list(range(len(steps))):
        raise ValueError(f"run must evaluate {module} at every step of one run; it was evaluated at steps {steps}")
    if num_steps not in (0, len(steps)):
        raise ValueError(f"run: one run has {num_steps} steps, another {len(steps)}")
