"""Evaluation of a recipe with lm-evaluation-harness (`paradec eval`), and a description of the run in advance."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import paradec
from paradec.core.checks import check_int, short_repr
from paradec.core.version import DRAWS
from paradec.models.loading import PACKAGED
from paradec.models.request_memory import request_memory
from paradec.tools.evaluation.recipe import Recipe

SCHEMA = "paradec-eval/1"
PACKAGES = ("lm_eval", "torch", "transformers", "datasets", "triton")
"""Packages whose versions influence scores."""
HARNESS_FIELDS = ("seed", "until", "likelihood", "mc_num", "mc_batch", "order", "check_greedy", "choices")
"""Fields of a recipe that are passed to `ParadecLM`."""


def evaluate(
    recipe: Recipe,
    *,
    model: Any = None,
    device: str | None = None,
    use_cache: str | None = None,
    log_samples: bool = False,
    bootstrap_iters: int = 1000,
) -> dict[str, Any]:
    """Run the harness on a recipe's tasks.

    Args:
        recipe: the evaluation.
        model: a loaded model, which replaces the recipe's.
        device: as in `paradec.load`.
        use_cache: prefix of the harness' file of answers. "answers" gives `answers_draws2_rank0.db`, where 2 is the
            version of random numbers. If the file exists, a run of an equal recipe continues from it.
        log_samples: whether the result includes all prompts and answers.
        bootstrap_iters: number of resamples for standard errors that have no formula; 0 leaves these errors out.

    Returns:
        JSON data: "schema", "recipe", "met" (versions, the weights' commit, device, dtype, chat, seconds), the harness'
        "results" and "groups", "config" with the costs of decoding, and, with `log_samples`, "samples".

    Raises:
        ModuleNotFoundError: the extra `eval` is missing. ValueError: the recipe cannot be run.
        Interrupted (a KeyboardInterrupt): Ctrl-C; the file of `use_cache` has the finished answers.
    """
    from paradec.tools.evaluation.harness import ParadecLM

    check_int("bootstrap_iters", bootstrap_iters, low=0)
    import lm_eval

    manager = build_task_manager(recipe)  # before loading weights, as it raises for an unknown task
    arguments = recipe.to_arguments()
    start = time.time()
    loading: dict[str, Any] = (
        {"device": device, "dtype": recipe.dtype, "revision": recipe.revision} if model is None else {}
    )
    lm = ParadecLM(
        recipe.model if model is None else model,
        batch_size=recipe.batch,
        **{name: getattr(recipe, name) for name in HARNESS_FIELDS},
        **loading,
        **arguments,
    )
    chat = bool(getattr(lm.tokenizer, "chat_template", None)) if recipe.chat is None else recipe.chat
    scores = lm_eval.simple_evaluate(
        lm,
        tasks=[*recipe.tasks],
        num_fewshot=recipe.shots,
        use_cache=None if use_cache is None else f"{use_cache}_draws{DRAWS}",
        limit=recipe.limit,
        log_samples=log_samples,
        bootstrap_iters=bootstrap_iters,
        system_instruction=recipe.system,
        apply_chat_template=chat,
        fewshot_as_multiturn=recipe.multiturn and chat,
        task_manager=manager,
        **{f"{prefix}random_seed": recipe.seed for prefix in ("", "numpy_", "torch_", "fewshot_")},
        confirm_run_unsafe_code=recipe.unsafe_code,
    )
    assert scores is not None  # None on ranks other than 0
    met = {
        "versions": versions(),
        "weights": find_commit(recipe) if model is None else None,
        "device": str(lm.model.device),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "chat": chat,
        "seconds": round(time.time() - start, 1),
    }
    keys = ("results", "groups", "n-shot", "n-samples", "higher_is_better", "config", *(["samples"] * log_samples))
    result = {"schema": SCHEMA, "recipe": recipe.to_dict(), "met": met}
    return result | {name: scores[name] for name in keys if name in scores}


def build_task_manager(recipe: Recipe) -> Any:
    """Build the harness' task manager, with the packaged tasks and those of `recipe.include`. Raises
    ModuleNotFoundError: the extra `eval` is missing; ValueError: an unknown task, or `include` is not a folder."""
    from paradec.tools.evaluation.harness import TASKS

    if recipe.include is not None and not Path(recipe.include).is_dir():
        raise ValueError(f"include={short_repr(recipe.include)} is not a folder")
    from lm_eval.tasks import TaskManager

    folders = [str(TASKS), *([recipe.include] if recipe.include else [])]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if all(manager.match_tasks([task]) for task in recipe.tasks):
        return manager  # do not read the thousands of files of the harness' own tasks: it takes seconds
    manager = TaskManager(include_path=folders)
    for task in recipe.tasks:
        if not manager.match_tasks([task]):
            raise ValueError(f"tasks: the harness has no task {task!r}; `lm-eval ls tasks` lists its tasks")
    return manager


def versions() -> dict[str, str]:
    """List the installed versions of paradec and of `PACKAGES`."""
    releases = {"paradec": paradec.__version__}
    for package in PACKAGES:
        try:
            releases[package] = version(package)
        except PackageNotFoundError:
            continue
    return releases


def describe_version_changes(recipe: Recipe) -> list[str]:
    """Describe each package whose installed version differs from the recipe's `versions`."""
    installed = versions()
    return [
        f"the recipe was written for {package} {expected}; the installed version is {installed.get(package, 'none')}"
        for package, expected in recipe.versions.items()
        if installed.get(package) != expected
    ]


def find_commit(recipe: Recipe) -> str | None:
    """Find the commit of the recipe's downloaded weights; None for a folder, or if nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if recipe.model is None or os.path.exists(recipe.model):
        return None
    try:
        file = try_to_load_from_cache(recipe.model, "config.json", revision=recipe.revision)
    except ValueError:  # not a hub id
        return None
    return Path(file).parent.name if isinstance(file, str) else None


def plan(recipe: Recipe, prompt_tokens: int = 512) -> dict[str, Any]:
    """Describe a recipe's run without loading weights. Returns JSON data: the recipe, the sampler with its settings,
    "tasks_known" (None: not checked), the commit of the downloaded weights, versions, missing parts, and "memory": the
    bytes of a batch with prompts of `prompt_tokens` tokens. Raises the ValueError of `build_task_manager`."""
    method = recipe.method()
    missing: list[str] = []
    try:
        build_task_manager(recipe)
        tasks_known: bool | None = True
    except ModuleNotFoundError as error:
        tasks_known = None
        missing.append(f"tasks were not checked: {error}")
    if recipe.model is not None and not os.path.isdir(recipe.model) and find_commit(recipe) is None:
        missing.append(f"the weights of {recipe.model} are not on this disk: a run downloads them")
    missing += describe_version_changes(recipe)
    return {
        "recipe": recipe.to_dict(),
        "sampler": method.to_dict(),
        "tasks_known": tasks_known,
        "weights": find_commit(recipe),
        "versions": versions(),
        "missing": missing,
        "memory": _memory(recipe, prompt_tokens),
    }


def _memory(recipe: Recipe, prompt_tokens: int) -> dict[str, Any]:
    """Estimate the bytes of a batch of answers; {"unknown": reason} if config.json is not on this disk."""
    request: Mapping[str, Any] = recipe.to_arguments()
    folder = str(Path(paradec.__file__).parent / "assets" / PACKAGED) if recipe.model is None else recipe.model
    if not os.path.isdir(folder):
        commit = find_commit(recipe)
        if commit is None:
            return {"unknown": "the model's config.json is not on this disk"}
        from huggingface_hub import snapshot_download

        folder = snapshot_download(recipe.model or "", revision=commit, local_files_only=True)
    new = request.get("max_new_tokens") or 256
    branches = 1 if request.get("guidance_scale", 1) == 1 else 2
    needed = request_memory(
        folder,
        recipe.batch * branches,
        prompt_tokens + new,
        wanted=min(request.get("block_length") or new, new),
        stores=(request.get("cache") or "none") != "none",
        dtype=None if recipe.dtype is None else getattr(torch, recipe.dtype),
    )
    return {"prompt_tokens": prompt_tokens, "max_new_tokens": new, **asdict(needed), "total": needed.total}
