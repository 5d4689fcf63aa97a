"""Public names of `paradec` and their modules. Type checkers read it; so does `paradec.__getattr__` at run time."""

from typing import Any

from paradec import attention as attention
from paradec import caches as caches
from paradec import samplers as samplers
from paradec.api.decide import Decision as Decision
from paradec.api.decide import Decisions as Decisions
from paradec.api.decide import Pick as Pick
from paradec.api.decide import Score as Score
from paradec.api.decide import Span as Span
from paradec.api.decide import YesNo as YesNo
from paradec.api.decide import decide as decide
from paradec.api.decide import fit_temperature as fit_temperature
from paradec.api.generate import generate as generate
from paradec.api.images import generate_images as generate_images
from paradec.api.infill import infill as infill
from paradec.api.output import Output as Output
from paradec.attention.sparsed import SparseD as SparseD
from paradec.batching.many import generate_many as generate_many
from paradec.caches.suffix import Suffix as Suffix
from paradec.constraints.values import Choice as Choice
from paradec.constraints.values import Grammar as Grammar
from paradec.constraints.values import JsonSchema as JsonSchema
from paradec.constraints.values import Regex as Regex
from paradec.core.protocol import Interrupted as Interrupted
from paradec.core.protocol import decode as decode
from paradec.core.rollouts import Rollout as Rollout
from paradec.integrations.diffusers.hooks.session import accelerate as accelerate
from paradec.integrations.diffusers.step_tuning import tune_steps as tune_steps
from paradec.integrations.transformers import hf_generate as hf_generate
from paradec.models.checkpoint import CheckpointError as CheckpointError
from paradec.models.images.pixel_dit import PixelDiTPipeline as PixelDiTPipeline
from paradec.models.load_drafter import load_drafter as load_drafter
from paradec.models.loading import load as load
from paradec.models.proteins.mpnn import load_protein_mpnn as load_protein_mpnn
from paradec.models.proteins.rules import DesignRules as DesignRules
from paradec.models.proteins.structure import Structure as Structure
from paradec.models.proteins.structure import read_structure as read_structure
from paradec.models.wrapping import wrap as wrap
from paradec.request import Request as Request
from paradec.samplers.features.adaptive_blocks import AdaptiveBlocks as AdaptiveBlocks
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks as PipelinedBlocks
from paradec.samplers.forecast.forecast import Forecast as Forecast
from paradec.samplers.forecast.methods import FoCa as FoCa
from paradec.samplers.forecast.methods import ReCAP as ReCAP
from paradec.samplers.forecast.methods import SpeCa as SpeCa
from paradec.samplers.forecast.methods import TaylorSeer as TaylorSeer
from paradec.samplers.forecast.methods import TeaCache as TeaCache
from paradec.samplers.forecast.refresh import AccumulatedChange as AccumulatedChange
from paradec.samplers.forecast.refresh import Every as Every
from paradec.samplers.forecast.refresh import Verification as Verification
from paradec.samplers.forecast.rules import DBCache as DBCache
from paradec.samplers.forecast.rules import DiCache as DiCache
from paradec.samplers.forecast.rules import EasyCache as EasyCache
from paradec.samplers.forecast.rules import FirstBlock as FirstBlock
from paradec.samplers.forecast.rules import MagCache as MagCache
from paradec.samplers.forecast.rules import SeaCache as SeaCache
from paradec.samplers.masked.blocks import FixedBlocks as FixedBlocks
from paradec.samplers.masked.rules.prophet import Prophet as Prophet
from paradec.tools.training.replay import replay as replay
from paradec.tools.tuning.run import tune as tune

__version__: str

def __getattr__(name: str) -> Any:  # modules, as if they had been imported by their names
    ...
