"""`paradec eval`: run lm-evaluation-harness on a model, as a recipe or options say (`paradec.tools.evaluation`)."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options, show, tables
from paradec.core.interrupts import EXIT_CODE, restore_interrupt
from paradec.core.other_names import COMPONENTS
from paradec.core.text_files import write_bytes
from paradec.request import FIELDS

RECIPE = typer.Argument(metavar="[RECIPE.yaml]", exists=True, dir_okay=False, help="A recipe; options override it.")
TASKS = typer.Option(help="Tasks of the harness, separated by commas; 'paradec' has the packaged prompts.")
REQUEST = typer.Option(metavar="NAME=VALUE", help="A field of the request or a setting of its sampler; repeated.")
UNSAFE = typer.Option("--confirm-run-unsafe-code", help="Let tasks run the code that the model writes.")
USE_CACHE = typer.Option(metavar="FILE", help="Store every answer; a run with the same options continues from it.")


@options.include("model limit dtype device block_length steps max_new_tokens preset as_json")
def evaluate(
    context: typer.Context,
    recipe: Annotated[Path | None, RECIPE] = None,
    tasks: Annotated[list[str] | None, TASKS] = None,
    revision: str | None = typer.Option(None, help="Branch, tag or commit of a hub id."),
    sampler: str | None = typer.Option(None, help="A name that `paradec samplers` lists, or FILE.py:CLASS."),
    cache: str | None = typer.Option(None, "--cache", help="A name that `paradec caches` lists, or FILE.py:CLASS."),
    request: Annotated[list[str] | None, REQUEST] = None,
    shots: int | None = typer.Option(None, help="Examples before each prompt; by default the task's."),
    chat: bool | None = typer.Option(None, help="Apply the chat template; by default if there is one."),
    multiturn: bool = typer.Option(True, "--multiturn/--one-turn", help="A turn for each example, or one for all."),
    until: bool = typer.Option(True, help="Whether the tasks' stop strings end answers."),
    likelihood: str | None = typer.Option(None, help="How masked models score continuations: monte_carlo or chain."),
    mc_num: int = typer.Option(128, "--mc-num", help="Number of random maskings for monte_carlo."),
    check_greedy: bool = typer.Option(True, help="Also report whether greedy decoding gives the continuation."),
    choices: str = typer.Option("score", help="How choices are answered: score every choice, or decode one."),
    batch: int = typer.Option(1, help="Prompts decoded together."),
    seed: options.Seed = 0,
    include: Path | None = typer.Option(None, metavar="FOLDER", help="Tasks of your own, as YAML."),
    unsafe_code: Annotated[bool, UNSAFE] = False,
    use_cache: Annotated[Path | None, USE_CACHE] = None,
    log_samples: bool = typer.Option(False, "--log-samples", help="Add all prompts and answers."),
    out: Path | None = typer.Option(None, metavar="FILE.json", help="Write the result and the recipe."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would run and its memory; load no weights."),
    **shared: Any,
) -> None:
    """Run lm-evaluation-harness on a paradec model; report scores and forwards."""
    options.check_writable("--out", out)
    merged, changed = merge_recipe(recipe, {name: context.params[name] for name in options.explicit_options(context)})
    from paradec.tools.evaluation import evaluate as evaluation

    if dry_run:
        plan = evaluation.plan(merged)
        typer.echo(json.dumps(plan, indent=1, ensure_ascii=False) if shared["as_json"] else plan_text(plan))
        return
    for sentence in evaluation.describe_version_changes(merged):
        print(f"warning: {sentence}", file=sys.stderr)
    with show.waiting("loading the harness"):
        evaluation.build_task_manager(merged)
    show.quiet_loading()
    restore_interrupt()
    stored = None if use_cache is None else str(use_cache)
    try:
        result = evaluation.evaluate(merged, device=shared["device"], use_cache=stored, log_samples=log_samples)
    except KeyboardInterrupt:
        hint = f"; the answers so far are in {stored!r}" if stored is not None else ""
        print(f"interrupted: no score{hint}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    result["changed"] = changed
    text = json.dumps(result, indent=1, ensure_ascii=False, default=str)
    if out is not None:
        write_bytes(out, f"{text}\n".encode("utf-8", "backslashreplace"))
    if shared["as_json"]:
        typer.echo(text)
        return
    tables.table(("task", "metric", "value", "standard error", "prompts"), scores(result))
    for line in summary(result, changed):
        typer.echo(line)


def merge_recipe(file: Path | None, arguments: dict[str, Any]) -> tuple[Any, list[str]]:
    """Merge a recipe file with options; return the recipe, and the fields that options changed."""
    from paradec.tools.evaluation.recipe import Recipe

    field_names = {entry.name for entry in dataclasses.fields(Recipe)}
    changes = {name: value for name, value in arguments.items() if name in field_names and name != "request"}
    for name in ("include", "preset"):
        if changes.get(name) is not None:
            changes[name] = str(changes[name])
    if "tasks" in changes:
        changes["tasks"] = tuple(options.split_names(changes["tasks"]) or ())
    fields = {name: value for name, value in arguments.items() if name in FIELDS and name not in field_names}
    fields |= {kind: options.import_classes(f"--{kind}", fields[kind], kind) for kind in fields.keys() & COMPONENTS}
    fields |= options.read_settings(arguments.get("request"), "--request")
    if file is None:
        if "tasks" not in changes:
            raise ValueError("give a recipe, or --tasks; `lm-eval ls tasks` lists the harness' own")
        return Recipe(**changes, request=fields), []
    recipe = Recipe.load(file)
    if fields:
        changes["request"] = {**recipe.request, **fields}
    return dataclasses.replace(recipe, **changes), sorted(changes)


def scores(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """List task, metric, value, standard error and number of prompts for each metric of a result."""
    lines: list[tuple[str, ...]] = []
    for task, metrics in {**result["results"], **(result.get("groups") or {})}.items():
        for name, value in metrics.items():
            metric, comma, filter_name = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{metric}_stderr,{filter_name}")
            label = metric if filter_name == "none" else f"{metric} ({filter_name})"
            num_samples = metrics.get("sample_len", "")
            lines.append(
                (task, label, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "-", str(num_samples))
            )
    return lines


def summary(result: dict[str, Any], changed: list[str]) -> list[str]:
    """Describe cost, log-likelihoods and the published score, in lines."""
    config, lines = result["config"], []
    if cost := config.get("spent"):
        lines.append(
            f"{cost['answers']} answers, {cost['nfe']:.1f} forwards each, {cost['tokens_per_forward']:.2f} tokens "
            f"per forward, {cost['tokens_per_second']:.1f} tokens per second"
        )
    if counts := config.get("log_likelihoods"):
        error = counts["median_standard_error"]
        precision = "unknown (one draw each)" if error is None else f"{error:.4f} nats in the median"
        lines.append(
            f"{counts['judged']} log-likelihoods, {counts['forwards']} rows evaluated, standard error {precision}"
        )
    lines.append(f"chat template {'applied' if result['met']['chat'] else 'not applied'}")
    if published := result["recipe"]["published"]:
        changes = f"; {', '.join(changed)} changed here" if changed else ""
        lines.append(f"published: {published['metric']} {published['value']} ({published['source']}{changes})")
    return lines


def plan_text(plan: dict[str, Any]) -> str:
    """Format the plan of a dry run."""

    def join_items(value: Any) -> Any:
        return ", ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else value

    fields = dict(plan["recipe"])
    about, memory = fields.pop("about"), plan["memory"]
    if "unknown" not in memory:
        sizes = {part: f"{memory[part] / 1e9:.2f} GB" for part in ("total", "weights", "store", "logits")}
        memory = sizes | {part: memory[part] for part in ("prompt_tokens", "max_new_tokens")}
    fields |= {"tasks": ", ".join(fields["tasks"]), "model": fields["model"] or "packaged"}
    fields |= {"sampler": plan["sampler"], "versions": plan["versions"], "memory": memory}
    text = [f"{name:<14}{join_items(value)}" for name, value in fields.items() if value not in (None, "", {}, [], ())]
    return "\n".join([*textwrap.wrap(about, 80), *text, *(f"note: {sentence}" for sentence in plan["missing"])])
