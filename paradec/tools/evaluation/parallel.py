"""Accuracy against parallelism on ParallelBench's tasks (arXiv 2510.04767), for several settings of each sampler.

Every sampler has the same number of settings, because the area under its curve (AUP, d3LLM) grows with this number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import paradec
from paradec import samplers
from paradec.caches.suffix import Suffix
from paradec.core.checks import check_choice, check_int
from paradec.models.base import Model
from paradec.tools.evaluation.compare import Comparison, compare
from paradec.tools.evaluation.configuration import BASELINE, Configuration
from paradec.tools.evaluation.questions import Question, packaged_questions

Changes = Mapping[str, Any]

MAX_SETTINGS = 5
SCHEDULE: tuple[Changes, ...] = ({}, {"steps": 1 / 4}, {"steps": 1 / 2}, {"steps": 1 / 8}, {"steps": 1 / 16})
"""1, 4, 2, 8 and 16 tokens per step, for samplers with a fixed number of steps."""
SWEEPS: dict[str, tuple[Changes, ...]] = {
    "threshold": ({}, {"threshold": 0.5}, {"threshold": 1.0}, {"threshold": 0.75}, {"threshold": 0.6}),
    "factor": ({}, {"factor": 1.9}, {"factor": 0.7}, {"factor": 1.6}, {"factor": 1.3}),
    "random": SCHEDULE,
    "low_confidence": SCHEDULE,
    "margin": SCHEDULE,
    "entropy": SCHEDULE,
}
"""Settings of ParallelBench's samplers; the first is the default. The thresholds are in the benchmark's range, 0.5 to
1; the factors are its five. A sweep of n settings uses the first n."""
TASK_NAMES = (
    *("copy", "reverse", "sort", "shuffle", "insert_at", "insert_random", "remove_at", "remove_random", "replace_at"),
    *("replace_random", "latin_square"),
)
"""The tasks of `paradec.tools.evaluation.TASKS` that are ParallelBench's waiting-line tasks and Latin squares."""


def sweep(name: str, settings: int = MAX_SETTINGS) -> list[Configuration]:
    """List `settings` configurations (2 to 5) of a sampler. The first is its default.

    They come from `SWEEPS`. For samplers that are not in `SWEEPS`, they come from the class attribute `sweep`: if it
    varies only `steps`, from `SCHEDULE` instead; if it varies only `threshold`, more thresholds are added.

    Raises ValueError: an unknown name, another family, or too few known settings."""
    check_int("settings", settings, low=2, high=MAX_SETTINGS)
    cls = samplers.get(name)
    if cls.family != "masked":
        raise ValueError(f"sampler {name!r} is of family {cls.family!r}; the bench takes the 'masked' family")
    changes: tuple[Changes, ...] = SWEEPS.get(name, ({}, *cls.sweep))
    varied = {key for change in cls.sweep for key in change}
    if name not in SWEEPS and varied == {"steps"}:
        changes = SCHEDULE
    if name not in SWEEPS and varied == {"threshold"}:
        default = cls().threshold  # type: ignore[attr-defined]
        values = [*(change["threshold"] for change in cls.sweep), 0.75, 1.0, 0.6]
        changes = ({}, *({"threshold": value} for value in dict.fromkeys(values) if value != default))
    if len(changes) < settings:
        raise ValueError(f"settings={settings} must be at most {len(changes)}, the settings of sampler {name!r}")
    return [Configuration(name, change) for change in changes[:settings]]


def parallel_questions(tasks: str | Iterable[str] | None = None, limit: int | None = None) -> list[Question]:
    """Read the packaged prompts of `tasks` (names in `TASK_NAMES`; None: all), at most `limit` of each. Raises
    ValueError: an argument out of its range."""
    task_names = list(TASK_NAMES) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    for name in task_names:
        check_choice("task", name, TASK_NAMES)
    return packaged_questions(task_names, limit)


def parallel(
    model: Model | None = None,
    *,
    names: Iterable[str] | None = None,
    settings: int = MAX_SETTINGS,
    tasks: str | Iterable[str] | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    block_length: int | None = None,
    cache: str = "none",
    suffix: Suffix | int | str | None = None,
    **options: Any,
) -> Comparison:
    """Compare samplers on ParallelBench's tasks, with several settings each, at temperature 0.
    `paradec.tools.evaluation.plot.frontier` draws the result.

    Args:
        model: a masked language model; None is the packaged one.
        names: samplers; None is ParallelBench's samplers (`SWEEPS`).
        settings: number of settings of each sampler, 2 to 5.
        tasks, limit: as in `parallel_questions`.
        max_new_tokens: length of an answer; by default the model's.
        block_length, cache, suffix, options: as in `paradec.tools.evaluation.compare`.

    Raises:
        ValueError: an argument out of its range, or a sampler that the model does not support, before any decoding.
        Interrupted: at Ctrl-C, as in `compare`.
    """
    configurations = [entry for name in (SWEEPS if names is None else names) for entry in sweep(name, settings)]
    questions = parallel_questions(tasks, limit)
    model = paradec.load() if model is None else model
    arguments: dict[str, Any] = {"cache": cache, "suffix": suffix, "block_length": block_length}
    arguments["max_new_tokens"] = max_new_tokens or model.default_max_new_tokens
    for configuration in configurations:  # raise errors before hours of decoding
        with configuration.make().start(model, questions[0].prompt, **arguments).release_stores_on_exit():
            pass
    if all(configuration.sampler != BASELINE for configuration in configurations):
        # `compare` also measures the baseline, so add its other settings
        configurations = [*sweep(BASELINE, settings), *configurations]
    arguments["max_new_tokens"] = max_new_tokens
    return compare(model, questions=questions, names=configurations, **arguments, **options)
