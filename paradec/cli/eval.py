"""`paradec eval`: lm-evaluation-harness with a paradec model, by a recipe or by options (`evaluation.evaluate`)."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options, show, tables
from paradec.core.interrupts import EXIT_CODE, raise_again
from paradec.core.text_files import write_bytes

RecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE.yaml]", help="A recipe; given options override it."),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help="Tasks of the harness, separated by commas; 'paradec' has the packaged prompts."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Shots = Annotated[int | None, typer.Option(help="Examples before each prompt; by default the task's number.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Whether prompts go through the chat template; by default if there is one."),
]
Multiturn = Annotated[
    bool, typer.Option("--multiturn/--one-turn", help="Examples as turns of the chat, or in one turn.")
]
Request = Annotated[
    list[str] | None,
    typer.Option(
        "--request", metavar="NAME=VALUE", help="A field of the request, or a setting of its sampler; may be repeated."
    ),
]
Sampler = Annotated[str | None, typer.Option("--sampler", help="A name that `paradec samplers` lists.")]
Cache = Annotated[
    str | None, typer.Option("--cache", help="A name that `paradec caches` lists, with settings in parentheses.")
]
Until = Annotated[bool, typer.Option("--until/--no-until", help="Whether the tasks' stop strings end answers.")]
Judge = Annotated[
    str | None, typer.Option("--likelihood", help="How masked models score continuations: monte_carlo or chain.")
]
Samples = Annotated[int, typer.Option("--mc-num", help="Maskings of monte_carlo.")]
Greedy = Annotated[
    bool,
    typer.Option(
        "--check-greedy/--no-check-greedy", help="Also report whether greedy decoding gives the continuation."
    ),
]
Choices = Annotated[
    str, typer.Option("--choices", help="How tasks with choices are answered: score each one, or decode one of them.")
]
Batch = Annotated[int, typer.Option(help="Prompts decoded together.")]
Seed = Annotated[int, typer.Option(help="Seed of the random draws.")]
Limit = Annotated[int | None, typer.Option(help="Prompts of each task; by default all.")]
Include = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Tasks of your own, as YAML.")]
Unsafe = Annotated[
    bool, typer.Option("--confirm-run-unsafe-code", help="Let tasks run the code that the model writes.")
]
UseCache = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Store every answer; a run with the same options continues from the file."),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the result, with the whole recipe.")]
LogSamples = Annotated[bool, typer.Option("--log-samples", help="Add all prompts and answers to the result.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would run and the memory that it needs; load no weights.")
]


@options.takes("model dtype device block_length steps max_new_tokens preset as_json")
def evaluate(
    context: typer.Context,
    recipe: RecipeFile = None,
    tasks: Tasks = None,
    revision: Revision = None,
    sampler: Sampler = None,
    cache: Cache = None,
    request: Request = None,
    shots: Shots = None,
    chat: Chat = None,
    multiturn: Multiturn = True,
    until: Until = True,
    likelihood: Judge = None,
    mc_num: Samples = 128,
    check_greedy: Greedy = True,
    choices: Choices = "score",
    batch: Batch = 1,
    seed: Seed = 0,
    limit: Limit = None,
    include: Include = None,
    unsafe_code: Unsafe = False,
    use_cache: UseCache = None,
    log_samples: LogSamples = False,
    out: Out = None,
    dry_run: DryRun = False,
    **shared: Any,
) -> None:
    """Run lm-evaluation-harness on a paradec model; report scores and forwards."""
    options.check_readable("the recipe", recipe)
    options.check_readable("--preset", shared["preset"])
    options.check_writable("--out", out)
    given = options.given(context)
    values = {name: context.params[name] for name in given}
    wanted, changed = recipe_of(recipe, values)

    from paradec.tools.evaluation import evaluate as running

    if dry_run:
        said = running.plan(wanted)
        typer.echo(json.dumps(said, indent=1, ensure_ascii=False) if shared["as_json"] else plan_text(said))
        return
    for sentence in running.other_versions(wanted):
        print(f"warning: {sentence}", file=sys.stderr)
    with show.waiting("loading the harness"):
        running.tasks_of(wanted)
    show.quiet_loading()
    raise_again()
    try:
        found = running.evaluate(
            wanted,
            device=shared["device"],
            use_cache=None if use_cache is None else str(use_cache),
            log_samples=log_samples,
        )
    except KeyboardInterrupt:
        kept = f"; what was answered is in {str(use_cache)!r}" if use_cache is not None else ""
        print(f"interrupted: no score{kept}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    found["changed"] = changed
    text = json.dumps(found, indent=1, ensure_ascii=False, default=str)
    if out is not None:
        write_bytes(out, f"{text}\n".encode("utf-8", "backslashreplace"))
    if shared["as_json"]:
        typer.echo(text)
        return
    tables.table(("task", "metric", "value", "standard error", "prompts"), scores(found))
    for line in summary(found, changed):
        typer.echo(line)


OF_REQUEST = ("sampler", "cache", "block_length", "steps", "max_new_tokens")
"""Options that are fields of the request."""
OF_RECIPE = (
    *("tasks", "model", "revision", "dtype", "shots", "chat", "multiturn", "until", "likelihood", "mc_num"),
    *("check_greedy", "choices", "batch", "seed", "limit", "unsafe_code", "include", "preset"),
)
"""Options that are fields of the recipe."""


def recipe_of(file: Path | None, given: dict[str, Any]) -> tuple[Any, list[str]]:
    """The recipe of a file and of the options that were given, and the fields of the file that these changed.

    Raises:
        ValueError: neither a file nor tasks; and as `Recipe`.
    """
    from paradec.tools.evaluation.recipe import Recipe

    changes = {name: given[name] for name in OF_RECIPE if name in given}
    for name in ("include", "preset"):
        if changes.get(name) is not None:
            changes[name] = str(changes[name])
    if "tasks" in changes:
        changes["tasks"] = tuple(options.names(changes["tasks"]) or ())
    fields = {name: given[name] for name in OF_REQUEST if given.get(name) is not None}
    fields |= options.settings(given.get("request"), "--request")
    if file is None:
        if "tasks" not in changes:
            raise ValueError("give a recipe, or --tasks; `lm-eval ls tasks` lists the harness' own")
        return Recipe(**changes, request=fields), []
    recipe = Recipe.load(file)
    if fields:
        changes["request"] = {**recipe.request, **fields}
    return recipe.but(**changes), sorted(changes)


def scores(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each task and metric of a result."""
    lines: list[tuple[str, ...]] = []
    for task, of_task in {**found["results"], **(found.get("groups") or {})}.items():
        for name, value in of_task.items():
            metric, comma, way = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = of_task.get(f"{metric}_stderr,{way}")
            label = metric if way == "none" else f"{metric} ({way})"
            asked = of_task.get("sample_len", "")
            lines.append((task, label, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "-", str(asked)))
    return lines


def summary(found: dict[str, Any], changed: list[str]) -> list[str]:
    """What decoding took, how certain log-likelihoods are, and what was published."""
    config, lines = found["config"], []
    if spent := config.get("spent"):
        lines.append(
            f"{spent['answers']} answers, {spent['nfe']:.1f} forwards each, {spent['tokens_per_forward']:.2f} tokens "
            f"per forward, {spent['tokens_per_second']:.1f} tokens per second"
        )
    if judged := config.get("log_likelihoods"):
        error = judged["median_standard_error"]
        known = "unknown (one draw each)" if error is None else f"{error:.4f} nats in the median"
        lines.append(f"{judged['judged']} log-likelihoods, {judged['forwards']} rows evaluated, standard error {known}")
    lines.append(f"chat template {'applied' if found['met']['chat'] else 'not applied'}")
    if published := found["recipe"]["published"]:
        other = f"; {', '.join(changed)} changed here" if changed else ""
        lines.append(f"published: {published['metric']} {published['value']} ({published['source']}{other})")
    return lines


def plan_text(said: dict[str, Any]) -> str:
    """A dry run in words."""
    recipe, sampler = said["recipe"], dict(said["sampler"])
    name = sampler.pop("sampler", "")
    settings = ", ".join(f"{key}={value}" for key, value in sampler.items())
    shots = "the task's own number of" if recipe["shots"] is None else recipe["shots"]
    chat = {None: "where the tokenizer has a template", True: "yes", False: "no"}[recipe["chat"]]
    lines = [
        *textwrap.wrap(recipe["about"], 80),
        f"model     {recipe['model'] or 'the packaged model'}"
        + (f" @ {recipe['revision']}" if recipe["revision"] else "")
        + (f", {recipe['dtype']}" if recipe["dtype"] else ""),
        f"tasks     {', '.join(recipe['tasks'])}, {shots} shots, chat: {chat}",
        f"sampler   {name}{f' ({settings})' if settings else ''}",
        "request   " + (", ".join(f"{key}={value}" for key, value in recipe["request"].items()) or "the defaults"),
        f"batch     {recipe['batch']}, seed {recipe['seed']}, "
        + (f"{recipe['limit']} prompts of each task" if recipe["limit"] else "all prompts"),
        "versions  " + ", ".join(f"{package} {release}" for package, release in said["versions"].items()),
    ]
    if recipe["published"]:
        lines.append("published {metric} {value} ({source})".format(**recipe["published"]))
    memory = said["memory"]
    if "unknown" in memory:
        lines.append(f"memory    unknown: {memory['unknown']}")
    else:
        sizes = ", ".join(f"{memory[part] / 1e9:.2f} {part}" for part in ("weights", "store", "logits"))
        lines.append(
            f"memory    {memory['total'] / 1e9:.2f} GB ({sizes}) for a batch of {memory['prompt_tokens']} + "
            f"{memory['max_new_tokens']} tokens"
        )
    return "\n".join([*lines, *(f"note: {sentence}" for sentence in said["missing"])])
