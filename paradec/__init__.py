"""paradec: fast sampling from models that need not decode one token at a time.

>>> import paradec
>>> model = paradec.load()                                       # the small model inside the package
>>> paradec.generate(model, "Sort: pear fig apple").text        # doctest: +SKIP
'apple fig pear'

Importing it imports neither torch nor transformers: what is below is imported when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

import paradec.core.interrupts as _interrupts  # noqa: F401 - first: the libraries below take seconds to import
from paradec import attention, caches, samplers  # noqa: F401 - which register what they have
from paradec.core.version import __version__  # noqa: F401
from paradec.tools import traces  # noqa: F401 - which register what they have

if TYPE_CHECKING:
    from paradec.api.decisions.answers import Decision, Decisions, fit_temperature
    from paradec.api.decisions.decide import decide
    from paradec.api.decisions.questions import Pick, Score, Span, YesNo
    from paradec.api.generate import generate
    from paradec.api.images import generate_images
    from paradec.api.infill import infill
    from paradec.api.output import Output
    from paradec.attention.sparsed import SparseD
    from paradec.batching.many import generate_many
    from paradec.caches.suffix import Suffix
    from paradec.constraints.values import Choice, Grammar, JsonSchema, Regex
    from paradec.core.adaptive_blocks import AdaptiveBlocks
    from paradec.core.blocks import FixedBlocks
    from paradec.core.pipelined_blocks import PipelinedBlocks
    from paradec.core.protocol import Interrupted, decode
    from paradec.core.rollouts import Rollout
    from paradec.integrations.diffusers.hooks.session import accelerate
    from paradec.integrations.diffusers.step_tuning import tune_steps
    from paradec.integrations.transformers import hf_generate
    from paradec.models.checkpoint import CheckpointError
    from paradec.models.images.pixel_dit import PixelDiTPipeline
    from paradec.models.load_drafter import load_drafter
    from paradec.models.loading import load
    from paradec.models.proteins.mpnn import load_protein_mpnn
    from paradec.models.wrapping import wrap
    from paradec.request import Request
    from paradec.samplers.forecast.dicache import DiCache
    from paradec.samplers.forecast.easycache import EasyCache
    from paradec.samplers.forecast.first_block import DBCache, FirstBlock
    from paradec.samplers.forecast.magcache import MagCache
    from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Verification
    from paradec.samplers.forecast.seacache import SeaCache
    from paradec.samplers.forecast.taylorseer import TaylorSeer
    from paradec.samplers.masked.rules.prophet import Prophet
    from paradec.tools.training.replay import replay
    from paradec.tools.tuning.run import tune


# what the logger "paradec" says is for those who ask for it
logging.getLogger("paradec").addHandler(logging.NullHandler())

__all__ = [
    "AccumulatedChange",
    "AdaptiveBlocks",
    "CheckpointError",
    "Choice",
    "DBCache",
    "Decision",
    "Decisions",
    "DiCache",
    "EasyCache",
    "Every",
    "FirstBlock",
    "FixedBlocks",
    "Grammar",
    "Interrupted",
    "JsonSchema",
    "MagCache",
    "Output",
    "Pick",
    "PipelinedBlocks",
    "PixelDiTPipeline",
    "Prophet",
    "Regex",
    "Request",
    "Rollout",
    "Score",
    "SeaCache",
    "Span",
    "SparseD",
    "Suffix",
    "TaylorSeer",
    "Verification",
    "YesNo",
    "accelerate",
    "attention",
    "caches",
    "decide",
    "decode",
    "fit_temperature",
    "generate",
    "generate_images",
    "generate_many",
    "hf_generate",
    "infill",
    "load",
    "load_drafter",
    "load_protein_mpnn",
    "replay",
    "samplers",
    "tune",
    "tune_steps",
    "wrap",
]


LATER = {
    "AccumulatedChange": "paradec.samplers.forecast.refresh",
    "AdaptiveBlocks": "paradec.core.adaptive_blocks",
    "CheckpointError": "paradec.models.checkpoint",
    "Choice": "paradec.constraints.values",
    "DBCache": "paradec.samplers.forecast.first_block",
    "Decision": "paradec.api.decisions.answers",
    "Decisions": "paradec.api.decisions.answers",
    "DiCache": "paradec.samplers.forecast.dicache",
    "EasyCache": "paradec.samplers.forecast.easycache",
    "Every": "paradec.samplers.forecast.refresh",
    "FirstBlock": "paradec.samplers.forecast.first_block",
    "FixedBlocks": "paradec.core.blocks",
    "Grammar": "paradec.constraints.values",
    "Interrupted": "paradec.core.protocol",
    "JsonSchema": "paradec.constraints.values",
    "MagCache": "paradec.samplers.forecast.magcache",
    "Output": "paradec.api.output",
    "Pick": "paradec.api.decisions.questions",
    "PipelinedBlocks": "paradec.core.pipelined_blocks",
    "PixelDiTPipeline": "paradec.models.images.pixel_dit",
    "Prophet": "paradec.samplers.masked.rules.prophet",
    "Regex": "paradec.constraints.values",
    "Request": "paradec.request",
    "Rollout": "paradec.core.rollouts",
    "Score": "paradec.api.decisions.questions",
    "SeaCache": "paradec.samplers.forecast.seacache",
    "Span": "paradec.api.decisions.questions",
    "SparseD": "paradec.attention.sparsed",
    "Suffix": "paradec.caches.suffix",
    "TaylorSeer": "paradec.samplers.forecast.taylorseer",
    "Verification": "paradec.samplers.forecast.refresh",
    "YesNo": "paradec.api.decisions.questions",
    "accelerate": "paradec.integrations.diffusers.hooks.session",
    "decide": "paradec.api.decisions.decide",
    "decode": "paradec.core.protocol",
    "fit_temperature": "paradec.api.decisions.answers",
    "generate": "paradec.api.generate",
    "generate_images": "paradec.api.images",
    "generate_many": "paradec.batching.many",
    "hf_generate": "paradec.integrations.transformers",
    "infill": "paradec.api.infill",
    "load": "paradec.models.loading",
    "load_drafter": "paradec.models.load_drafter",
    "load_protein_mpnn": "paradec.models.proteins.mpnn",
    "replay": "paradec.tools.training.replay",
    "tune": "paradec.tools.tuning.run",
    "tune_steps": "paradec.integrations.diffusers.step_tuning",
    "wrap": "paradec.models.wrapping",
}
"""Imported when they are first asked for: all of them import torch, some of them transformers or diffusers."""


def __getattr__(name: str) -> Any:
    if name in LATER:
        globals()[name] = found = getattr(importlib.import_module(LATER[name]), name)  # asked for here once
        return found
    # a module, as if it had been imported by its name: `paradec.api.images.contact_sheet`
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"paradec.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"paradec.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __reduce_ex__(protocol: int) -> Any:
    """What `pickle` asks this module for: functions of a script are pickled with what they refer to."""
    return importlib.import_module, (__name__,)
