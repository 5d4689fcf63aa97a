"""`paradec caches`: what each keeps, and which samplers and models it works with (`paradec.caches.table`)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import paradec
from paradec.caches.table import MODELS, summary, verdict
from paradec.cli import options, show, tables

Name = Annotated[str | None, typer.Argument(help="A cache to describe: its effect, settings and paper.")]
Sampler = Annotated[
    str | None, typer.Option(help="Whether each cache works with this sampler or combination, and why.")
]
Model = Annotated[
    str | None,
    typer.Option(help="For this checkpoint alone: a folder or a hub id, of which config.json is read."),
]


@dataclass(frozen=True)
class Facts:
    """What decides of a model whether it works with a cache."""

    topology: str
    prediction: str
    name: str = "this model"
    whole_blocks: bool = False

    @property
    def label(self) -> str:
        """ "bidirectional", "block-causal, shifted"."""
        return self.topology.replace("_", "-") + (", shifted" if self.prediction == "shifted" else "")


def caches(name: Name = None, sampler: Sampler = None, model: Model = None, as_json: options.AsList = False) -> None:
    """List the caches, and which samplers and models each works with, or say all about one."""
    if name is not None:
        paradec.caches.registry.check(name)
    if sampler is not None:
        paradec.samplers.registry.check(sampler)
    with show.waiting("reading the caches"):
        facts = None if model is None else facts_of(model)
        pairs = summary(paradec.samplers.registry, paradec.caches.registry) if name is None and sampler is None else []
        found = [] if sampler is None else verdicts(sampler, [facts] if facts else [Facts(*each) for each in MODELS])
    if name is not None:
        if sampler is not None or model is not None:
            raise ValueError(f"give a cache's name ({name!r}), or --sampler and --model for all of them")
        tables.sheet("cache", name, paradec.caches.get(name), as_json, {})
    elif sampler is not None:
        _print_verdicts(found, as_json)
    elif facts is not None:
        _print_for(pairs, facts, as_json)
    else:
        _print_all(pairs, as_json)


def facts_of(source: str) -> Facts:
    """What config.json says of a checkpoint; its weights are not read.

    Raises:
        CheckpointError: no checkpoint that `paradec.load` reads as a language model.
    """
    from paradec.models.checkpoint import CheckpointError, read_json
    from paradec.models.loading import FAMILIES

    config = read_json(source, "config.json", None, required=True)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{source!r} has model_type={model_type!r}; caches are for {', '.join(map(repr, FAMILIES))}"
        )
    family = FAMILIES[model_type]
    return Facts(family.topology, family.prediction, source, config.get("expert_capacity") is not None)


def verdicts(sampler: str, models: list[Facts]) -> list[dict[str, str]]:
    """What becomes of each cache with a sampler, one entry per kind of model."""
    method, found = paradec.samplers.create(sampler), []
    for cache in paradec.caches.names():
        for facts in models:
            said = verdict(method, paradec.caches.create(cache), facts)
            found.append({"cache": cache, "model": facts.label, "verdict": said.status, "why": said.why})
    return found


def _print_verdicts(found: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    if not sys.stdout.isatty():
        tables.table(tuple(found[0]), [tuple(entry.values()) for entry in found])
        return
    kinds = list(dict.fromkeys(entry["model"] for entry in found))
    reasons = list(dict.fromkeys(entry["why"] for entry in found if entry["why"]))
    rows: dict[str, list[str]] = {}
    for entry in found:  # the kinds of model beside each other, and every reason once
        number = f" {reasons.index(entry['why']) + 1}" if entry["why"] else ""
        rows.setdefault(entry["cache"], [entry["cache"]]).append(entry["verdict"] + number)
    tables.table(("cache", *kinds), rows.values())
    tables.described([(str(number), why) for number, why in enumerate(reasons, 1)], indent=1)


def _print_for(pairs: list[dict[str, str]], facts: Facts, as_json: bool) -> None:
    """The table of all caches, for one kind of model."""
    found = []
    for pair in pairs:
        status = _of_prediction(pair[facts.topology], facts.prediction)
        found.append({"cache": pair["cache"], "samplers": pair["samplers"], "verdict": status})
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        tables.table(tuple(found[0]), [tuple(entry.values()) for entry in found])


def _of_prediction(status: str, prediction: str) -> str:
    """A verdict of the table, "exact" or "exact (same), refused (shifted)", for one prediction."""
    for part in status.split(", "):
        verdict, _, where = part.partition(" (")
        if not where or where == f"{prediction})":
            return verdict
    return status


def _print_all(pairs: list[dict[str, str]], as_json: bool) -> None:
    works: dict[str, dict[str, Any]] = {
        name: {"works_with": [pair for pair in pairs if pair["cache"] == name]} for name in paradec.caches.names()
    }
    found = tables.entries(paradec.caches, works)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    tables.listing(found, "`paradec caches NAME` says all about one, `paradec caches --sampler NAME` what goes with it")
    typer.echo("")
    if not sys.stdout.isatty():
        tables.table(tuple(pairs[0]), [tuple(pair.values()) for pair in pairs])
        return
    rows = []
    for name in works:  # what most samplers have in common, and who differs: --sampler says how and why
        groups = works[name]["works_with"]
        most = next((pair for pair in groups if pair["samplers"].startswith("all")), groups[0])
        others = ", ".join(pair["samplers"] for pair in groups if pair is not most)
        rows.append((name, most["bidirectional"], most["block_causal"], others or "-"))
    tables.table(("result", "bidirectional", "block-causal", "otherwise with"), rows)
