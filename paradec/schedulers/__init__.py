"""Schedulers for diffusers' pipelines of discrete tokens. Each wraps a sampler of `paradec.samplers`.

>>> from paradec.schedulers import LocalLeapScheduler
>>> pipe.scheduler = LocalLeapScheduler.from_config(pipe.scheduler.config)    # doctest: +SKIP

Saved pipelines refer to this module: import it before `from_pretrained`. `import paradec` does not import it.
"""

from typing import Any

from diffusers import ConfigMixin, SchedulerMixin  # noqa: F401 - pipelines look these up in this module

from paradec.schedulers.image import *  # noqa: F403
from paradec.schedulers.text import *  # noqa: F403

UNSUPPORTED = {
    "FreeDaveScheduler": "FreeDave evaluates drafts of later steps, and a pipeline evaluates only the block",
    "WinoScheduler": "WINO evaluates a shadow of the block, and a pipeline evaluates only the block",
    "AdaBlockScheduler": "AdaBlock decides where blocks end, and a pipeline fixes their length beforehand",
    "LengthTrimScheduler": "trimming changes the length of the canvas, and a pipeline fixes it beforehand",
}
"""By name of a scheduler that does not exist: the reason."""


def __getattr__(name: str) -> Any:
    if name in UNSUPPORTED:
        raise ValueError(f"there is no {name}: {UNSUPPORTED[name]}; use paradec.generate")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


MODULES = (__name__, f"{__name__}.image", f"{__name__}.text")
globals()["__all__"] = sorted(
    name for name, value in vars().items() if isinstance(value, type) and value.__module__ in MODULES
)
