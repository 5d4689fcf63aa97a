"""Search for settings that suit a model and its prompts. Settings are chosen on one half, and reported on the other."""

from paradec.tools.tuning.prompts import read_prompts
from paradec.tools.tuning.result import Tuning
from paradec.tools.tuning.run import tune

__all__ = ["Tuning", "read_prompts", "tune"]
