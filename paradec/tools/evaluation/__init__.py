"""Tasks with checkable answers, packaged prompts for them, and the comparison of samplers on them."""

from paradec.tools.evaluation.compare import Comparison as Comparison
from paradec.tools.evaluation.compare import compare as compare
from paradec.tools.evaluation.configuration import Configuration as Configuration
from paradec.tools.evaluation.configuration import configurations as configurations
from paradec.tools.evaluation.questions import packaged_questions as packaged_questions
from paradec.tools.evaluation.questions import read_questions as read_questions
from paradec.tools.evaluation.tasks import TASKS as TASKS
from paradec.tools.evaluation.tasks import Example as Example
from paradec.tools.evaluation.tasks import Task as Task
from paradec.tools.evaluation.tasks import get_task as get_task
from paradec.tools.evaluation.tasks import load_prompts as load_prompts
