"""Tasks with checkable answers, and the prompts shipped for them (see :mod:`.tasks`)."""

from paradec.evaluation.tasks import TASKS, Example, Task, get_task, load_prompts

__all__ = ["TASKS", "Example", "Task", "get_task", "load_prompts"]
