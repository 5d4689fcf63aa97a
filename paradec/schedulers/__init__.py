"""Schedulers for diffusers' pipelines of discrete tokens, over the samplers of `paradec.samplers`.

>>> from paradec.schedulers import LocalLeapScheduler
>>> pipe.scheduler = LocalLeapScheduler.from_config(pipe.scheduler.config)    # doctest: +SKIP

A pipeline saved with one of them records this module: import it before `from_pretrained`. `import paradec` does not, to
stay light.
"""

from typing import Any

from diffusers import ConfigMixin, SchedulerMixin  # noqa: F401 - pipelines look them up here to load a scheduler

from paradec.schedulers.image import HaltonScheduler as HaltonScheduler
from paradec.schedulers.image import ImageScheduler as ImageScheduler
from paradec.schedulers.image import ImageSchedulerOutput as ImageSchedulerOutput
from paradec.schedulers.image import LPDScheduler as LPDScheduler
from paradec.schedulers.image import MaskGITScheduler as MaskGITScheduler
from paradec.schedulers.image import RecapScheduler as RecapScheduler
from paradec.schedulers.preset import call_arguments as call_arguments
from paradec.schedulers.preset import from_preset as from_preset
from paradec.schedulers.text import BlockScheduler as BlockScheduler
from paradec.schedulers.text import BlockSchedulerOutput as BlockSchedulerOutput
from paradec.schedulers.text import CCDAgreeScheduler as CCDAgreeScheduler
from paradec.schedulers.text import CCDScheduler as CCDScheduler
from paradec.schedulers.text import CombinationScheduler as CombinationScheduler
from paradec.schedulers.text import CreditDecodingScheduler as CreditDecodingScheduler
from paradec.schedulers.text import EditingScheduler as EditingScheduler
from paradec.schedulers.text import EntropyBoundScheduler as EntropyBoundScheduler
from paradec.schedulers.text import EntropyThresholdScheduler as EntropyThresholdScheduler
from paradec.schedulers.text import FactorScheduler as FactorScheduler
from paradec.schedulers.text import HierarchyScheduler as HierarchyScheduler
from paradec.schedulers.text import KLASSScheduler as KLASSScheduler
from paradec.schedulers.text import Learn2PDScheduler as Learn2PDScheduler
from paradec.schedulers.text import LocalLeapScheduler as LocalLeapScheduler
from paradec.schedulers.text import LowConfidenceScheduler as LowConfidenceScheduler
from paradec.schedulers.text import MarginScheduler as MarginScheduler
from paradec.schedulers.text import PersistenceScheduler as PersistenceScheduler
from paradec.schedulers.text import RandomScheduler as RandomScheduler
from paradec.schedulers.text import SaberScheduler as SaberScheduler
from paradec.schedulers.text import ThresholdScheduler as ThresholdScheduler

NONE = {
    "FreeDaveScheduler": "FreeDave evaluates drafts of later steps, and a pipeline evaluates the block alone",
    "WinoScheduler": "WINO evaluates a shadow of the block, and a pipeline evaluates the block alone",
    "AdaBlockScheduler": "AdaBlock decides where blocks end, and a pipeline fixes their length beforehand",
    "LengthTrimScheduler": "trimming changes the length of the canvas, and a pipeline fixes it beforehand",
}
"""Methods that no scheduler can carry, and why."""


def __getattr__(name: str) -> Any:
    if name in NONE:
        raise ValueError(f"there is no {name}: {NONE[name]}; use paradec.generate")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# type checkers read the aliases above
globals()["__all__"] = sorted(
    name for name, value in vars().items() if isinstance(value, type) and value.__module__.startswith(__name__)
)
