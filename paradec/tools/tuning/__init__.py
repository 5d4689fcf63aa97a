"""Search for settings that suit a model and its prompts. One half of the prompts chooses, the other is for reports."""

from paradec.tools.tuning.prompts import read_prompts
from paradec.tools.tuning.result import Tuning
from paradec.tools.tuning.run import tune

__all__ = ["Tuning", "read_prompts", "tune"]
