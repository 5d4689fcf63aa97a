"""What the README and the documentation show: commands and code that need nothing but the package are run, and what
they are said to print is compared."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import GOLDEN, ROOT
from scripts import load_script
from typer.testing import CliRunner

import paradec
from paradec import caches, samplers
from paradec.cli import app

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
ELSEWHERE = re.compile(
    r"path|folder|cuda|\bpipe\b|pipe\.|\.ckpt|\.pth|\.pt\b|\.safetensors|mar_large|amused/|black-forest|BAAI|mine\.jsonl|"
    r"custom_generate|logits\)|\.\.\.|questions|generate\(model, (prompt|chat)\b"
)
"""Code with one of these needs a checkpoint, a GPU, or something that only the text around it names."""
LONG = ("bench", "compare", "eval", "learn2pd", "serve", "tune", "verify")
"""Commands that take minutes, do not end, or need an extra; they have tests of their own."""
SECONDS = re.compile(r"\d+\.\d+ s$")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def transcripts() -> Iterator[tuple[str, str, str]]:
    """Every command that is shown with what it prints: page, command, output."""
    for page in PAGES:
        for block in blocks(page, "console"):
            for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, printed = entry.partition("\n")
                yield page.name, command, printed


def commands() -> Iterator[tuple[str, str]]:
    """Every command that is shown without, and that can be run anywhere: page, command."""
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).splitlines():
            if line.startswith("paradec ") and not ELSEWHERE.search(line) and line.split()[1] not in LONG:
                yield page.name, line


def run(command: str) -> str:
    name, *arguments = shlex.split(command, comments=True)
    assert name == "paradec"
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


@pytest.mark.parametrize(("page", "command", "printed"), list(transcripts()))
def test_commands_print_what_they_are_said_to(page: str, command: str, printed: str) -> None:
    found = [SECONDS.sub("", line) for line in run(command).splitlines()]
    assert found == [SECONDS.sub("", line) for line in printed.splitlines()]


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_commands_run(page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if "digits-dit" in command:
        command = command.replace("0-9", "0,1")  # ten pictures in twenty steps take long
    assert run(command)
    files = re.findall(r"--(?:out|trace) (\S+)", command)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_prints_what_it_is_said_to(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a page run one after the other, as a reader would run them. "# -> " is what a line prints."""
    monkeypatch.chdir(tmp_path)
    for registry in (samplers.registry, caches.registry):  # what a page registers goes with it
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        if ELSEWHERE.search(block):
            assert "# -> " not in block, "this block is not run"
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), names)
        said = re.findall(r"# -> (.*)$", block, flags=re.MULTILINE)
        assert not said or printed.getvalue().splitlines() == said


def test_the_examples_are_found() -> None:
    """A pattern above that matched everything would leave nothing to run."""
    assert len(list(transcripts())) >= 5 and len(list(commands())) >= 6
    runnable = [page.name for page in PAGES if any(not ELSEWHERE.search(block) for block in blocks(page, "python"))]
    assert {"README.md", "index.md", "images.md"} <= set(runnable)


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- [^:]+: (\S+\.md)$", text.partition("nav:")[2], flags=re.MULTILINE)


REPLAYED = (
    *(("llada",), ("dream",), ("fastdllm", "fastdllm-jun25"), ("fastdllm-dream",), ("dkv", "dkv-dream")),
    *(("adablock", "adablock-dream"), ("fastdllm-plusplus",), ("dpad",), ("d2cache",), ("d2cache prior",), ("dinfer",)),
    *(("freedave", "freedave-dream"), ("d3llm",), ("d2f",), ("lopa",)),
    *(("llada20_generate", "llada21_generate", "llada20_batch"), ("llada_moe_generate", "sdar_generate")),
    ("diffusers_pipeline",),
)
"""The folders of traces that each row of the table in fidelity.md is of."""


def test_fidelity_counts_the_traces_that_are_there() -> None:
    """Files, and the cases that are the same in float64 and have no region that is attended to twice."""
    counts: dict[str, list[int]] = {}
    for path in [*GOLDEN.glob("traces/*/*.json"), *GOLDEN.glob("moe/traces/*/*.json")]:
        trace = json.loads(path.read_text(encoding="utf-8"))
        name = path.parent.name + " prior" * ("prior_sigma" in trace["settings"])
        kept = sum(
            case.get("fp64_same", True) and not case.get("extra", {}).get("duplicated_keys") for case in trace["cases"]
        )
        found = counts.setdefault(name, [0, 0, 0])
        counts[name] = [found[0] + 1, found[1] + kept, found[2] + len(trace["cases"])]
    said = re.findall(r"^\| [^|]+ \| (\d+) \| ([\d of]+) \| `", (DOCS / "fidelity.md").read_text("utf-8"), re.MULTILINE)
    expected = []
    for folders in REPLAYED:
        files, kept, every = map(sum, zip(*(counts.pop(name) for name in folders), strict=True))
        expected.append((str(files), str(kept) if kept == every else f"{kept} of {every}"))
    assert said == expected and not counts


def test_every_page_is_in_the_navigation() -> None:
    """A notebook's page is made of it when the site is built."""
    files = [*DOCS.rglob("*.md"), *(path.with_suffix(".md") for path in NOTEBOOKS)]
    pages = sorted(path.relative_to(DOCS).as_posix() for path in files)
    assert sorted(navigation()) == pages and navigation()[0] == "index.md"


def test_the_home_page_leads_to_every_page() -> None:
    home = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w/]+\.md)\)", home)) == set(navigation()) - {"index.md"}


def referenced(folder: str = "api") -> set[Any]:
    """What the reference describes, as objects; each must be there."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / folder).glob("*.md")))
    paths = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    assert len(paths) == len(set(paths))
    parts = [path.rpartition(".") for path in paths]
    return {getattr(importlib.import_module(module), name) for module, _, name in parts}


def test_the_reference_has_all_that_is_public() -> None:
    """The package's own names, and every sampler and cache of the registries."""
    public = {getattr(paradec, name) for name in paradec.__all__ if name not in ("attention", "caches", "samplers")}
    public |= {registry.get(name) for registry in (samplers, caches) for name in registry.names()}
    missing = public - referenced()
    assert not missing, sorted(thing.__name__ for thing in missing)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_show_what_they_did(path: Path) -> None:
    """`.ci/full` runs them. No numbers of executions, no pages of traces, and an output for what prints."""
    assert path.stat().st_size < 100_000
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            kinds = {kind for output in cell["outputs"] for kind in output.get("data", {})}
            assert cell["execution_count"] is None and kinds <= {"text/plain", "image/png"}
            assert cell["outputs"] or "print(" not in "".join(cell["source"])
            compile("".join(cell["source"]), str(path), "exec")


@pytest.mark.full  # .ci/run builds it by itself
@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason='needs the extra "docs"')
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "api" / "samplers" / "index.html").read_text(encoding="utf-8")
    assert "probability that a token must reach" in reference  # of Threshold's docstring
    for path in NOTEBOOKS:
        assert (tmp_path / "notebooks" / path.stem / "index.html").is_file()
        assert (tmp_path / "notebooks" / path.name).is_file()


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://cdn.example/x.js">', 1),
        ("<script src=//cdn.example/x.js>", 1),
        ('<link rel="stylesheet" href="https://fonts.googleapis.com/css">', 1),
        ('<link href="https://fonts.gstatic.com" rel="preconnect">', 1),
        ('<img alt="a" src="http://example/a.png">', 1),
        ('<a href="https://example">', 0),
        ('<link rel="canonical" href="https://example">', 0),
        ('<img src="data:image/png;base64,AA//BB"><script src="../x.js"></script>', 0),
    ],
)
def test_pages_that_need_the_network_are_found(html: str, found: int) -> None:
    assert len(site_hook().ELSEWHERE.findall(html)) == found


def test_a_notebook_becomes_a_page() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [{"text": ["1\n"]}, {"data": {"image/png": "AA\nBB", "text/plain": "<Image>"}}],
        },
    ]
    page = site_hook().markdown(cells, "x.ipynb")
    assert page.startswith("# Title\nwords\n\n[") and "](x.ipynb)" in page
    shown = '<img alt="what the cell shows" src="data:image/png;base64,AABB">\n'
    assert page.endswith("```python\nprint(1)\n```\n\n```text\n1\n```\n\n" + shown)


def site_hook() -> Any:
    """What mkdocs runs; it needs mkdocs only to be run."""
    return load_script("docs/notebooks/hook.py")
