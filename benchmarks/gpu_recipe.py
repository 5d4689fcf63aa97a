"""A recipe on published weights, for `benchmarks/gpu.py`: right answers, forwards and tokens per second.

Nothing is downloaded: where the recipe's weights are not on this disk, a line says so and nothing else happens. First
the waiting lines and Latin squares of `paradec bench parallel` (their prompts are drawn here), under the recipe's
request and, on the same prompts, one token per forward. Then the recipe's own tasks, a few prompts of each, if
lm-evaluation-harness is installed and their data is on this disk.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import Section

import paradec
from paradec.tools.evaluation.parallel import parallel_questions
from paradec.tools.evaluation.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "recipes" / "fast-dllm-gsm8k-256-prefix-parallel.yaml"


@dataclass(frozen=True)
class Scale:
    """How much is asked; `DRY` asks the packaged model."""

    batch: int = 8
    batches: int = 6
    limit: int = 8
    """Prompts of each of the recipe's tasks."""
    packaged: bool = False


DRY = Scale(batch=4, batches=1, limit=1, packaged=True)


def weights_of(recipe: Recipe, given: Path | None) -> Path | None:
    """The folder of a recipe's weights on this disk: the one that was given, or the hub's cache; None if not here."""
    from huggingface_hub import try_to_load_from_cache

    if given is not None:
        return given
    if recipe.model is None or os.path.isdir(recipe.model):
        return None if recipe.model is None else Path(recipe.model)
    found = try_to_load_from_cache(recipe.model, "config.json", revision=recipe.revision)
    folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def answered(model: Any, request: Mapping[str, Any], questions: list[Any]) -> dict[str, float]:
    """What one batch of answers took; the seconds are the decoding's."""
    output = paradec.generate(model, [question.prompt for question in questions], **request)
    right = sum(question.right(text) for question, text in zip(questions, output.text, strict=True))
    return {
        "asked": len(questions),
        "right": right,
        "forwards": sum(output.row_nfe),
        "tokens": sum(output.tokens),
        "seconds": output.seconds,
    }


def lines(section: Section, model: Any, recipe: Recipe, scale: Scale) -> list[dict[str, Any]]:
    """The prompts that are drawn here, with the recipe's request and one token per forward."""
    asked = {name: value for name, value in recipe.asked().items() if name not in ("preset", "sampler", "cache")}
    asked = {name: value for name, value in asked.items() if name in paradec.request.FIELDS}
    new = asked.get("max_new_tokens", 256)
    asked |= {"seed": recipe.seed, "max_new_tokens": new, "block_length": min(asked.get("block_length") or new, new)}
    questions = parallel_questions(limit=max(1, scale.batch * scale.batches // 11 + 1))
    requests = {
        "the recipe": {"sampler": recipe.method(), "cache": recipe.asked().get("cache")},
        "one token per forward": {"sampler": "low_confidence"},
    }
    section.attempt("warm-up", lambda: answered(model, asked | requests["the recipe"], questions[: scale.batch]))
    found: dict[str, list[dict[str, float]]] = {what: [] for what in requests}
    for number in range(scale.batches):  # in turns: what stops in the middle has as much of both
        part = questions[number * scale.batch : (number + 1) * scale.batch]
        for what, own in requests.items():
            done = section.attempt(
                f"{what}, batch {number}", lambda own=own, part=part: answered(model, asked | own, part)
            )
            if done is not None:
                found[what].append(done)
    rows = []
    for what, parts in found.items():
        if parts:
            total = {name: sum(part[name] for part in parts) for name in parts[0]}
            rows.append(
                {
                    "prompts": "waiting lines and squares",
                    "decoded by": what,
                    "asked": total["asked"],
                    "right": total["right"],
                    "forwards_per_answer": total["forwards"] / total["asked"],
                    "tokens_per_forward": total["tokens"] / total["forwards"],
                    "tokens_per_second": total["tokens"] / total["seconds"],
                }
            )
    return rows


def harness(model: Any, recipe: Recipe, scale: Scale) -> list[dict[str, Any]]:
    """A few prompts of the recipe's own tasks."""
    from paradec.tools.evaluation.evaluate import evaluate

    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    few = recipe.but(limit=scale.limit, batch=scale.batch, unsafe_code=False)
    found = evaluate(few, model=model, bootstrap_iters=0)
    spent = found["config"].get("spent", {})
    scores = {
        f"{task} {name}": value
        for task, of_task in found["results"].items()
        for name, value in of_task.items()
        if isinstance(value, float) and "stderr" not in name
    }
    return [
        {"prompts": ", ".join(few.tasks), "decoded by": "the recipe", "asked": spent.get("answers")} | scores | spent
    ]


def run(
    section: Section, device: torch.device, scale: Scale, file: Path = DEFAULT, weights: Path | None = None
) -> dict[str, Any]:
    """The section's result: rows, and under "skipped" what was left out and why."""
    recipe = Recipe.load(file)
    if scale.packaged:
        short = {**recipe.request, "max_new_tokens": 24, "block_length": 24}  # what it was trained for
        recipe = recipe.but(model=None, dtype="float32", tasks=("paradec_copy",), shots=None, request=short)
    folder = None if scale.packaged else weights_of(recipe, weights)
    skipped: list[str] = []
    rows: list[dict[str, Any]] = []
    if folder is None and not scale.packaged:
        skipped.append(f"no weights of {recipe.model} on this disk (--weights FOLDER names them): recipe not run")
    else:
        begin = time.monotonic()
        load = lambda: paradec.load(folder, dtype=recipe.dtype, device=device)  # noqa: E731
        model = section.attempt(f"loading {folder or 'the packaged model'}", load)
        loading = time.monotonic() - begin
        if model is not None:
            rows += [row | {"loading_seconds": loading} for row in lines(section, model, recipe, scale)]
            if importlib.util.find_spec("lm_eval") is None:
                skipped.append(f"lm-evaluation-harness is not installed: {', '.join(recipe.tasks)} not asked")
            elif recipe.unsafe_code:
                skipped.append(f"{', '.join(recipe.tasks)} runs the model's code: not asked here")
            else:
                rows += section.attempt("the recipe's own tasks", lambda: harness(model, recipe, scale)) or []
    for sentence in skipped:
        print(f"recipe: {sentence}", flush=True)
    return section.close(recipe=recipe.to_dict(), weights=None if folder is None else str(folder.name), rows=rows) | {
        "skipped": skipped
    }
