"""Search for settings that suit a model and its prompts: chosen on one half of the prompts, reported on the other."""

from paradec.tools.tuning.prompts import read_prompts
from paradec.tools.tuning.result import Tuning
from paradec.tools.tuning.run import tune

__all__ = ["Tuning", "read_prompts", "tune"]
