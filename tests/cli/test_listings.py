"""`paradec samplers`, `caches` and `tasks`."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ok, refused
from places import ROOT

import paradec
from paradec import cli
from paradec.caches.table import MODELS, verdict
from paradec.core import packaged
from paradec.samplers.forecast.methods import METHODS
from paradec.tools.evaluation.tasks import TASKS, load_prompts

WIDTHS = [50, 200]
TINY = ROOT / "paradec" / "assets" / "tiny-llada"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *arguments: str) -> str:
    """Return the output of a command on a terminal `width` columns wide, without colours."""
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        assert cli.app([*arguments], standalone_mode=False) in (None, 0)
    text = re.sub(r"\033\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    return text


def word_set(text: str) -> set[str]:
    return set(re.findall(r"[\w.:=+-]+", text))


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["samplers", "caches"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_terminal_lists_names_and_summaries(kind: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_on_terminal(monkeypatch, width, kind)
    registry = getattr(paradec, kind)
    for name in registry.names():
        assert re.search(rf"^ +{re.escape(name)}( |$)", text, re.MULTILINE), name
        assert word_set(registry.get(name).summary) <= word_set(text), name
    assert f"paradec {kind} NAME" in " ".join(text.split())


@pytest.mark.thinned
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["sampler", "cache"])
def test_a_name_shows_all_its_settings(kind: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = getattr(paradec, f"{kind}s")
    for name in registry.names():
        cls = registry.get(name)
        full = re.sub(r"\s", "", run_on_terminal(monkeypatch, width, f"{kind}s", name))
        assert re.sub(r"\s", "", cls.summary) in full
        assert not cls.arxiv or cls.arxiv in full
        for setting in cls.settings():
            assert f"{setting}=" in full, (name, setting)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["samplers", "caches"])
def test_json_lists_every_name(kind: str) -> None:
    registry, entries = getattr(paradec, kind), json.loads(ok(kind, "--json"))
    lines = [line.split("\t") for line in ok(kind).partition("\n\n")[0].splitlines()]
    assert lines[0] == ["name", "family", "settings", "paper", "summary"]
    assert [line[0] for line in lines[1:]] == [entry["name"] for entry in entries] == registry.names()
    for entry in entries:
        cls = registry.get(entry["name"])
        data = json.loads(ok(kind, entry["name"], "--json"))
        assert [*entry["settings"]] == [*data["settings"]] == [*cls.settings()] and data["summary"] == cls.summary
        assert data["about"] and all(setting["about"] for setting in data["settings"].values()), entry["name"]


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["wino", "credit+localleap", "sjd"])
def test_caches_of_a_sampler(sampler: str) -> None:
    entries = json.loads(ok("caches", "--sampler", sampler, "--json"))
    assert len(entries) == len(MODELS) * len(paradec.caches.names())
    lines = ok("caches", "--sampler", sampler).splitlines()
    assert [line.split("\t") for line in lines[1:]] == [list(entry.values()) for entry in entries]
    for_model = json.loads(ok("caches", "--sampler", sampler, "--model", TINY, "--json"))
    facts = paradec.load().facts
    for entry in for_model:
        expected = verdict(paradec.samplers.create(sampler), paradec.caches.create(entry["cache"]), facts)
        assert (entry["model"], entry["verdict"]) == ("bidirectional", expected.status)


OWN = """
from dataclasses import dataclass
import paradec
from paradec.samplers.masked.rules.threshold import Threshold

@dataclass(frozen=True)
class MySampler(Threshold):
    '''Commit what is surer than most.

    Args:
        share: of the positions.
    '''

    share: float = 0.5
    name = "sampler_of_a_listing"
    summary = "commits a share"

class MyCache(paradec.caches.get("dual")):
    '''Another dual.'''

    name = "cache_of_a_listing"
    summary = "stores much"
"""


def test_custom_classes_are_described_like_built_in_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (paradec.samplers.registry, paradec.caches.registry):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    file = tmp_path / "own.py"
    file.write_text(OWN)
    text = ok("samplers", f"{file}:MySampler")
    assert text.startswith("sampler_of_a_listing: commits a share\n\nCommit what is surer than most.")
    assert "share=0.5\tof the positions." in text and "in Python\tMySampler(threshold=...)" in text
    data = json.loads(ok("caches", f"{file}:MyCache", "--json"))
    assert (data["name"], data["summary"], data["about"]) == ("cache_of_a_listing", "stores much", "Another dual.")
    assert f"NAME '{file}:MyCache' must be a class of a sampler" in refused("samplers", f"{file}:MyCache")


def test_caches_of_a_model(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    actual = json.loads(ok("caches", "--model", tmp_path, "--json"))
    block = [entry["verdict"] for entry in actual if entry["cache"] == "block"]
    assert set(block) == {"refused"} and {"exact"} <= {entry["verdict"] for entry in actual}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "model_type='gpt2'" in refused("caches", "--model", tmp_path)


@pytest.mark.parametrize("width", WIDTHS)
def test_tasks_lists_words_and_examples(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_on_terminal(monkeypatch, width, "tasks")
    assert word_set(" ".join(packaged.WORDS)) <= word_set(text)
    flat = " ".join(text.split())
    for task in TASKS:
        assert packaged.example_prompt(task) in flat or width == 50  # at width 50 prompts are wrapped
    assert json.loads(ok("tasks", "--json"))["words"] == [*packaged.WORDS]
    assert len(ok("tasks").splitlines()) == 1 + len(TASKS) + 1


def test_the_packaged_model_solves_its_tasks() -> None:
    model = paradec.load()
    vocabulary = model.tokenizer.get_vocab()
    assert {*packaged.WORDS, *packaged.SYMBOLS} <= {*vocabulary}
    assert {task: packaged.TEMPLATES[task] for task in TASKS} == {name: task.template for name, task in TASKS.items()}
    for task in TASKS.values():
        assert packaged.TEMPLATES[task.name].startswith(packaged.VERBS)
        assert packaged.describe_lengths(task.name) == f"{min(task.sizes)} to {max(task.sizes)}"
        out = paradec.generate(model, packaged.example_prompt(task.name))
        example = next(e for e in load_prompts(task.name, 1))
        entry: dict[str, Any] = packaged.EXAMPLE if task.name != "latin_square" else {"items": "A B C"}
        fields = {name: entry[name] for name in ("word", "target", "index") if "{" + name + "}" in task.template}
        question = type(example)(task.name, packaged.example_prompt(task.name), tuple(entry["items"].split()), **fields)
        assert task.check(question, out.text), (question.prompt, out.text)


def test_methods_for_pipelines_are_listed() -> None:
    """Every method has a line, "approximate" unless it is a sampler too. Its name in any spelling shows settings."""
    rows = {row.split("\t")[0]: row for row in ok("samplers").splitlines()}
    for name in METHODS:
        assert name in rows, name
        if name not in paradec.samplers.registry:
            assert "approximate" in rows[name] and f"paradec.accelerate(pipe, '{name}')" in rows[name]
    text = ok("samplers", "TeaCache")
    assert "threshold=0.2\t" in text and "approximate" in text and "limit of consecutive skipped steps" in text
    assert json.loads(ok("samplers", "first-block", "--json"))["settings"] == {"threshold": 0.05, "first_enhance": 1}
    assert ok("samplers", "ReCAP") == ok("samplers", "recap")
