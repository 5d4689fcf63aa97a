"""Modules that moved into rooms: their old names work for one version, with a warning that says the new one.

Imports, pickles and pipelines' config files name modules; a finder answers for the old names with the module itself,
so that there is one of each. Names that moved alone are found by the module that had them (`names_of`).

Methods that subclasses override and that have another name now: of `ForecastSampler`, `refreshes(state)` is
`evaluates(course)` with `state.course`, and `watched_change(state, before)` is `watch(course, before, now)`, which
adds to `course.change` itself. Of masked samplers, `announces`, `fuses` and `revises` follow from what a class
overrides, and need not be said; in the place of `targets = True` with `announce` stands a method `targets`, which
`told` asks; `shadows` alone evaluates nothing any more: `query_part` and `fuse` do (`wino.py`). `device_step.SAMPLERS`
and `CACHES` are the attribute `device_step` of samplers and caches.

What only scripts used has left the package, and has no new name in it: `paradec.evaluation.antiberty` is
benchmarks/antibody_model.py, `paradec.evaluation.digits` is benchmarks/digit_quality.py, and
`paradec.evaluation.forecasts` is examples/forecast_cost.py.

Modules that were cut in several: what `paradec.decode_command` printed is in `paradec.cli.show` and what it checked
in `paradec.cli.generate`; questions left `paradec.evaluation.compare` for `paradec.evaluation.questions`; `wrap`
stands in `paradec.models.wrapping`, and `paradec.models.loading` still names it. `paradec.models.adapter.Model` is a
base: what it was with a `kind` is `Decoder`, `Encoder` or `Opaque`, and old pickles find these.

In `paradec.samplers.causal` methods were renamed in the field's words. `accept(law, drafts, fresh, latents)` is
`accept(window)`: `window.p`, `window.drafts`, `window.fresh`, `window.embeddings`. `DraftLaws` is `DraftDistributions`,
`judge` `verify`, `leftover` `residual`, `token_law` `token_distribution`, `laws_at` `at_slots`, a rule's `judge` its
`verify`, `redraws` `resamples`, and `JacobiState.laws` is `CausalState.distribution`.

`generate_masked_images`, `generate_continuous_images` and `continuous_sampler` are no more: `generate_images` takes
every kind of image model, and asks its adapter (`paradec.models.images.base`).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "paradec.cli.decode": "paradec.cli.batches",
    "paradec.cli.live": "paradec.cli.watch",
    "paradec.continuous_images": "paradec.images",
    "paradec.decode_command": "paradec.cli.batches",
    "paradec.engine": "paradec.samplers.masked.device_step",
    "paradec.image_command": "paradec.cli.image",
    "paradec.kernels.sparsed": "paradec.kernels.block_sparse",
    "paradec.live": "paradec.cli.watch",
    "paradec.masked_images": "paradec.images",
    "paradec.models.chameleon": "paradec.models.images.chameleon",
    "paradec.models.continuous": "paradec.models.images.continuous",
    "paradec.models.diffusion": "paradec.models.images.diffusion",
    "paradec.models.dream": "paradec.models.text.dream",
    "paradec.models.emu3": "paradec.models.images.emu3",
    "paradec.models.fast_dllm_v2": "paradec.models.text.fast_dllm_v2",
    "paradec.models.grid": "paradec.models.images.grid",
    "paradec.models.image": "paradec.models.images.adapter",
    "paradec.models.image_loading": "paradec.models.images.loading",
    "paradec.models.janus": "paradec.models.images.janus",
    "paradec.models.kl": "paradec.models.images.kl",
    "paradec.models.llada": "paradec.models.text.llada",
    "paradec.models.llamagen": "paradec.models.images.llamagen",
    "paradec.models.mar": "paradec.models.images.mar",
    "paradec.models.masked_image": "paradec.models.images.masked",
    "paradec.models.pixel_dit": "paradec.models.images.pixel_dit",
    "paradec.models.qwen": "paradec.models.text.qwen",
    "paradec.models.sdar": "paradec.models.text.sdar",
    "paradec.models.text_to_image": "paradec.models.images.text_to_image",
    "paradec.models.uvit": "paradec.models.images.uvit",
    "paradec.models.vq": "paradec.models.images.vq",
    "paradec.pipeline_command": "paradec.cli.pipeline",
    "paradec.samplers.adablock": "paradec.samplers.masked.adablock",
    "paradec.samplers.bases": "paradec.samplers.forecast.bases",
    "paradec.samplers.block_schedule": "paradec.samplers.forecast.bac",
    "paradec.samplers.ccd": "paradec.samplers.masked.ccd",
    "paradec.samplers.ccd_agree": "paradec.samplers.masked.ccd_agree",
    "paradec.samplers.combination": "paradec.samplers.masked.combination",
    "paradec.samplers.credit": "paradec.samplers.masked.credit",
    "paradec.samplers.draft_layout": "paradec.samplers.masked.draft_layout",
    "paradec.samplers.draft_verify": "paradec.samplers.causal.verification",
    "paradec.samplers.drafting": "paradec.samplers.causal.drafting",
    "paradec.samplers.dream": "paradec.samplers.masked.dream",
    "paradec.samplers.editing": "paradec.samplers.masked.editing",
    "paradec.samplers.entropy": "paradec.samplers.masked.entropy",
    "paradec.samplers.entropy_bound": "paradec.samplers.masked.entropy_bound",
    "paradec.samplers.entropy_threshold": "paradec.samplers.masked.entropy_threshold",
    "paradec.samplers.factor": "paradec.samplers.masked.factor",
    "paradec.samplers.freedave": "paradec.samplers.masked.freedave",
    "paradec.samplers.gsd": "paradec.samplers.causal.gsd",
    "paradec.samplers.halton": "paradec.samplers.masked.halton",
    "paradec.samplers.hierarchy": "paradec.samplers.masked.hierarchy",
    "paradec.samplers.jacobi": "paradec.samplers.causal.window",
    "paradec.samplers.jacobi_state": "paradec.samplers.causal.state",
    "paradec.samplers.klass": "paradec.samplers.masked.klass",
    "paradec.samplers.lantern": "paradec.samplers.causal.lantern",
    "paradec.samplers.learn2pd": "paradec.samplers.masked.learn2pd",
    "paradec.samplers.learn2pd_filter": "paradec.samplers.masked.learn2pd_filter",
    "paradec.samplers.localleap": "paradec.samplers.masked.localleap",
    "paradec.samplers.low_confidence": "paradec.samplers.masked.low_confidence",
    "paradec.samplers.mar": "paradec.samplers.masked.mar",
    "paradec.samplers.margin": "paradec.samplers.masked.margin",
    "paradec.samplers.masked_state": "paradec.samplers.masked.state",
    "paradec.samplers.maskgit": "paradec.samplers.masked.maskgit",
    "paradec.samplers.maskgit_plus": "paradec.samplers.masked.maskgit_plus",
    "paradec.samplers.multi_draft": "paradec.samplers.causal.trees",
    "paradec.samplers.origin": "paradec.samplers.masked.origin",
    "paradec.samplers.persistence": "paradec.samplers.masked.persistence",
    "paradec.samplers.prophet": "paradec.samplers.masked.prophet",
    "paradec.samplers.random": "paradec.samplers.masked.random",
    "paradec.samplers.recap": "paradec.samplers.masked.recap",
    "paradec.samplers.reference": "paradec.samplers.masked.reference",
    "paradec.samplers.refresh": "paradec.samplers.forecast.refresh",
    "paradec.samplers.saber": "paradec.samplers.masked.saber",
    "paradec.samplers.scd": "paradec.samplers.causal.scd",
    "paradec.samplers.schedules": "paradec.samplers.masked.schedules",
    "paradec.samplers.request": "paradec.request",
    "paradec.samplers.sjd": "paradec.samplers.causal.sjd",
    "paradec.samplers.speculative": "paradec.samplers.causal.speculative",
    "paradec.samplers.stopping": "paradec.samplers.masked.stopping",
    "paradec.samplers.taylorseer": "paradec.samplers.forecast.taylorseer",
    "paradec.samplers.threshold": "paradec.samplers.masked.threshold",
    "paradec.samplers.topk_margin": "paradec.samplers.masked.topk_margin",
    "paradec.samplers.wino": "paradec.samplers.masked.wino",
    "paradec.samplers.zipar": "paradec.samplers.causal.zipar",
}
"""Old name to new name. `paradec.samplers.masked` and `paradec.samplers.forecast` were modules; the packages of these
names give what their base modules hold."""

MOVED_NAMES = {
    "paradec.samplers.causal.base": dict.fromkeys(
        ("INITS", "REFRESHES", "Jacobi", "JacobiSampler"), "paradec.samplers.causal.window"
    ),
}
"""By module: names that it had, and where they are now."""


def names_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of `MOVED_NAMES`."""

    def find(name: str) -> Any:
        if name not in MOVED_NAMES[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(MOVED_NAMES[module][name]), name)

    return find


class _Forward(Loader):
    """Gives the module that an old name stands for."""

    def __init__(self, new: str) -> None:
        self.new = new
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has put the old name's in its place


class OldNames(MetaPathFinder):
    """Finds modules under the names that they had before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname)
        if new is None:
            return None
        warnings.warn(f"{fullname} is now {new}", FutureWarning, stacklevel=2)
        return ModuleSpec(fullname, _Forward(new))


def install() -> None:
    """Answer for old names from now on; once per process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
