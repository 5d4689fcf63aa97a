"""`paradec samplers`, `caches` and `tasks`: list samplers, caches (also by sampler or model), and packaged tasks."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import paradec
from paradec.caches.table import MODELS, summary, verdict
from paradec.cli import options, show, tables
from paradec.core import packaged
from paradec.core.checks import plain_name

SAMPLER_NAME = typer.Argument(help="A sampler to describe, or FILE.py:CLASS: its effect, settings and paper.")
MODEL = typer.Option(help="Only for this checkpoint, a folder or a hub id; reads its config.json.")


def samplers(name: Annotated[str | None, SAMPLER_NAME] = None, as_json: options.AsList = False) -> None:
    """List the samplers and what each does, or describe one in full."""
    if name is not None:
        name = options.import_classes("NAME", name, "sampler")
        if name not in paradec.samplers.registry and (method := pipeline_methods().get(plain_name(name))) is not None:
            print_method(method, as_json)
            return
        paradec.samplers.registry.check(name)
    with show.waiting("reading the samplers"):
        cls = None if name is None else paradec.samplers.get(name)
        entries = tables.list_entries(paradec.samplers) if name is None else []
    if cls is not None:
        tables.print_component("sampler", cls.name, cls, as_json, {"decodes": ", ".join(getattr(cls, "models", ()))})
    elif as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        tables.print_entries(entries, "`paradec samplers NAME` describes one in full; `paradec compare` measures them")
        typer.echo("")
        methods = pipeline_methods().values()
        tables.table(("method for pipelines", "summary"), [(entry["name"], entry["summary"]) for entry in methods])


def pipeline_methods() -> dict[str, dict[str, Any]]:
    """Describe the methods for diffusers pipelines that are not samplers, by `plain_name`."""
    from paradec.core.registry import to_data
    from paradec.samplers.forecast.methods import METHODS

    entries = {}
    for name, make in METHODS.items():
        if name in paradec.samplers.registry or name == "forecast":
            continue
        about, texts = tables.split_docstring(make)
        settings = {key: to_data(entry.default) for key, entry in inspect.signature(make).parameters.items()}
        call = f" (approximate; for pipelines: paradec.accelerate(pipe, {name!r}))"
        entry = {"name": name, "family": "pipelines", "summary": about.partition("\n")[0].rstrip(".") + call}
        entries[plain_name(name)] = entry | {"settings": settings, "about": about, "texts": texts}
    return entries


def print_method(entry: dict[str, Any], as_json: bool) -> None:
    """Print all facts of a method for pipelines."""
    if as_json:
        typer.echo(json.dumps(entry, indent=2, ensure_ascii=False))
        return
    call = f"approximate, for pipelines of diffusers: paradec.accelerate(pipe, {entry['name']!r}, ...)"
    tables.echo(f"{entry['name']}: {call}\n\n{entry['about']}\n")
    settings = entry["settings"].items()
    tables.table(("", ""), [(f"{key}={value}", entry["texts"].get(key, "")) for key, value in settings], heads=False)


def tasks(as_json: options.AsList = False) -> None:
    """List what the packaged text model can do: its prompts, its words, and the allowed lengths of lists."""
    if as_json:
        entries = [
            {
                "task": task,
                "template": template,
                "example": packaged.example_prompt(task),
                "lengths": packaged.describe_lengths(task),
            }
            for task, template in packaged.TEMPLATES.items()
        ]
        typer.echo(json.dumps({"tasks": entries, "words": packaged.WORDS, "symbols": packaged.SYMBOLS}, indent=2))
        return
    rows = [(packaged.example_prompt(task), packaged.describe_lengths(task), task) for task in packaged.TEMPLATES]
    tables.table(("prompt", "words in the list", "task"), rows)
    tables.echo("words\t" + " ".join(packaged.WORDS))


@dataclass(frozen=True)
class Facts:
    """Properties of a model that decide which caches work with it."""

    topology: str
    prediction: str
    name: str = "this model"
    whole_blocks: bool = False

    @property
    def label(self) -> str:
        """Name of this kind of model, e.g. "bidirectional" or "block-causal, shifted"."""
        return self.topology.replace("_", "-") + (", shifted" if self.prediction == "shifted" else "")


def caches(
    name: str | None = typer.Argument(None, help="A cache, or FILE.py:CLASS: its effect, settings and paper."),
    sampler: str | None = typer.Option(None, help="Check all caches with this sampler, combination or FILE.py:CLASS."),
    model: Annotated[str | None, MODEL] = None,
    as_json: options.AsList = False,
) -> None:
    """List the caches, and which samplers and models each works with, or describe one in full."""
    if name is not None and (sampler is not None or model is not None):
        raise ValueError(f"give a cache's name ({name!r}), or --sampler and --model for all of them")
    if name is not None:
        name = options.import_classes("NAME", name, "cache")
        paradec.caches.registry.check(name)
        tables.print_component("cache", name, paradec.caches.get(name), as_json, {})
        return
    if sampler is not None:
        sampler = options.import_classes("--sampler", sampler, "sampler")
        paradec.samplers.registry.check(sampler)
    entries: list[dict[str, Any]]
    with show.waiting("reading the caches"):
        model_facts = None if model is None else read_facts(model)
        if sampler is not None:
            entries = list_verdicts(sampler, [model_facts] if model_facts else [Facts(*fields) for fields in MODELS])
        else:
            entries = pairs = summary(paradec.samplers.registry, paradec.caches.registry)
    if sampler is None and model_facts is not None:
        entries = [
            {"cache": pair["cache"], "samplers": pair["samplers"], "verdict": _model_verdict(pair, model_facts)}
            for pair in pairs
        ]
    elif sampler is None:
        groups = {name: [pair for pair in pairs if pair["cache"] == name] for name in paradec.caches.names()}
        rows = tables.list_entries(paradec.caches, {name: {"works_with": group} for name, group in groups.items()})
        if as_json:
            entries = rows
        else:
            hint = "`paradec caches NAME` describes one in full, `paradec caches --sampler NAME` shows which fit it"
            tables.print_entries(rows, hint)
            typer.echo("")
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        tables.table(tuple(entries[0]), [tuple(entry.values()) for entry in entries])


def read_facts(source: str) -> Facts:
    """Read a language model's facts from config.json, without its weights."""
    from paradec.models.checkpoint import CheckpointError, read_json
    from paradec.models.loading import FAMILIES

    config = read_json(source, "config.json", None, required=True)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"{source!r} has model_type={model_type!r}; allowed: {', '.join(map(repr, FAMILIES))}")
    family = FAMILIES[model_type]
    return Facts(family.topology, family.prediction, source, config.get("expert_capacity") is not None)


def list_verdicts(sampler: str, models: list[Facts]) -> list[dict[str, str]]:
    """Check each cache with a sampler: one entry per cache and kind of model."""
    method, rows = paradec.samplers.create(sampler), []
    for cache in paradec.caches.names():
        for facts in models:
            result = verdict(method, paradec.caches.create(cache), facts)
            rows.append({"cache": cache, "model": facts.label, "verdict": result.status, "why": result.why})
    return rows


def _model_verdict(pair: dict[str, str], facts: Facts) -> str:
    """Select a model's verdict from a text such as "exact" or "exact (same), refused (shifted)"."""
    for part in pair[facts.topology].split(", "):
        status, _, detail = part.partition(" (")
        if not detail or detail == f"{facts.prediction})":
            return status
    return pair[facts.topology]
