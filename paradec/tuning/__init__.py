"""Settings for one's own model and prompts: searched on one half of the prompts, reported on the other."""

from paradec.tuning.prompts import Asked, read_prompts
from paradec.tuning.result import Tuning
from paradec.tuning.run import tune

__all__ = ["Asked", "Tuning", "read_prompts", "tune"]
