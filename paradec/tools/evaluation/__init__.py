"""Tasks with checkable answers, the prompts shipped for them, and the comparison of samplers on them."""

from paradec.tools.evaluation.compare import Comparison, compare
from paradec.tools.evaluation.configuration import Configuration, configurations
from paradec.tools.evaluation.questions import packaged_questions, read_questions
from paradec.tools.evaluation.tasks import TASKS, Example, Task, get_task, load_prompts

__all__ = [
    "TASKS",
    "Comparison",
    "Configuration",
    "Example",
    "Task",
    "compare",
    "configurations",
    "get_task",
    "load_prompts",
    "packaged_questions",
    "read_questions",
]
