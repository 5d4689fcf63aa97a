"""Schedulers for diffusers' pipelines of discrete tokens, over the samplers of `paradec.samplers`.

>>> from paradec.schedulers import LocalLeapScheduler
>>> pipe.scheduler = LocalLeapScheduler.from_config(pipe.scheduler.config)    # doctest: +SKIP

A pipeline saved with one of them records this module: import it before `from_pretrained`. `import paradec` does not, to
stay light.
"""

from diffusers import ConfigMixin, SchedulerMixin  # noqa: F401 - pipelines look them up here to load a scheduler

from paradec.schedulers.image import (
    HaltonScheduler,
    ImageScheduler,
    ImageSchedulerOutput,
    MaskGITScheduler,
    RecapScheduler,
)
from paradec.schedulers.text import (
    BlockScheduler,
    BlockSchedulerOutput,
    CCDAgreeScheduler,
    CCDScheduler,
    CombinationScheduler,
    CreditDecodingScheduler,
    EditingScheduler,
    EntropyBoundScheduler,
    EntropyThresholdScheduler,
    FactorScheduler,
    HierarchyScheduler,
    KLASSScheduler,
    Learn2PDScheduler,
    LocalLeapScheduler,
    LowConfidenceScheduler,
    MarginScheduler,
    PersistenceScheduler,
    RandomScheduler,
    SaberScheduler,
    ThresholdScheduler,
)


class _Refused:
    """A method that no scheduler can carry."""

    why = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError(f"{type(self).__name__}: {self.why}; use paradec.generate")

    @classmethod
    def from_config(cls, *args: object, **kwargs: object) -> None:
        """Raise ValueError: why there is no such scheduler."""
        cls()

    from_pretrained = from_config


class FreeDaveScheduler(_Refused):
    """Refused: FreeDave (arXiv 2510.00294) evaluates several drafts at once."""

    why = "FreeDave evaluates drafts of later steps beside the block, and a pipeline evaluates the block alone"


class WinoScheduler(_Refused):
    """Refused: WINO (arXiv 2507.18578) evaluates a shadow of the block."""

    why = "WINO evaluates a shadow of the block beside it, and a pipeline evaluates the block alone"


class AdaBlockScheduler(_Refused):
    """Refused: AdaBlock (arXiv 2509.26432) decides where blocks end, as length trimming decides where rows do."""

    why = "AdaBlock decides where blocks end, and a pipeline fixes their length beforehand"


class LengthTrimScheduler(_Refused):
    """Refused: cutting a row off at a predicted end (Learn2PD's, Prophet's) changes its length."""

    why = "trimming changes the length of the canvas, and a pipeline fixes it beforehand"


__all__ = [
    "AdaBlockScheduler",
    "BlockScheduler",
    "BlockSchedulerOutput",
    "CCDAgreeScheduler",
    "CCDScheduler",
    "CombinationScheduler",
    "CreditDecodingScheduler",
    "EditingScheduler",
    "EntropyBoundScheduler",
    "EntropyThresholdScheduler",
    "FactorScheduler",
    "FreeDaveScheduler",
    "HaltonScheduler",
    "HierarchyScheduler",
    "ImageScheduler",
    "ImageSchedulerOutput",
    "KLASSScheduler",
    "Learn2PDScheduler",
    "LengthTrimScheduler",
    "LocalLeapScheduler",
    "LowConfidenceScheduler",
    "MarginScheduler",
    "MaskGITScheduler",
    "PersistenceScheduler",
    "RandomScheduler",
    "RecapScheduler",
    "SaberScheduler",
    "ThresholdScheduler",
    "WinoScheduler",
]
