"""What the README and the documentation show: commands and code that need nothing but the package are run, and what
they are said to print is compared."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_models import tiny_llama
from page_stand_ins import NOW, SUBSTITUTES, StandIn, loosely, runnable
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
    r"custom_generate|logits\)|\.\.\.|questions|generate\(\s*model,\s*(prompt|chat)\b"
)
"""Code with one of these needs a checkpoint, a GPU, or something that only the text around it names."""
WHOLE = ("README.md", "diffusion.md", "images.md", "index.md", "schedulers.md", "text.md")
"""Pages of which every block runs; tiny models are in the places of checkpoints (`page_stand_ins`)."""
SLOW = ("images.md", "schedulers.md")
"""Of these, pages that take long; they run in `.ci/full`."""
LONG = ("bench", "compare", "eval", "learn2pd", "serve", "tune")
"""Commands that take minutes, do not end, or need an extra; they have tests of their own."""
SECONDS = re.compile(r"\d+\.\d+ s$")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def transcripts() -> Iterator[tuple[str, str, str]]:
    """Every command that is shown with what it prints: page, command, output."""
    for page in PAGES:
        for block in (re.sub(r" \\\n *", " ", text) for text in blocks(page, "console")):
            for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, printed = entry.partition("\n")
                yield page.name, command, printed


def commands() -> Iterator[tuple[str, str]]:
    """Every command that is shown without, and that can be run anywhere: page, command."""
    for page in PAGES:
        joined = re.sub(r" \\\n *", " ", "\n".join(blocks(page, "bash")))
        for line in joined.splitlines():
            if line.startswith("paradec ") and not ELSEWHERE.search(line) and line.split()[1] not in LONG:
                yield page.name, line


def run(command: str) -> str:
    """What a terminal shows: what an answer took is on standard error."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "paradec"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "warning: " not in done.stderr, done.output
    return done.output


@pytest.mark.parametrize(("page", "command", "printed"), list(transcripts()))
def test_commands_print_what_they_are_said_to(page: str, command: str, printed: str) -> None:
    found, said = ([SECONDS.sub("", line) for line in text.splitlines()] for text in (run(command), printed))
    assert sorted(found) == sorted(said) if " -n " in command else found == said  # answers come as they end


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_commands_run(page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if "digits-dit" in command:
        command = command.replace("0-9", "0,1")  # ten pictures in twenty steps take long
    assert run(command)
    files = re.findall(r"--(?:out|trace) (\S+)", command)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def executed(page: Path, blocks: list[str], names: dict[str, Any], tmp_path: Path) -> None:
    """Run blocks one after the other, as a reader would run them. "# -> " is what a line prints."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tiny models in the places of others
        patch.chdir(tmp_path)
        for registry in (samplers.registry, caches.registry):  # what a page registers goes with it
            patch.setattr(registry, "_targets", dict(registry._targets))
        for block in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, str(page), "exec"), names)
            said = re.findall(r"# -> (.*)$", block, flags=re.MULTILINE)
            assert not said or printed.getvalue().splitlines() == said


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in WHOLE], ids=lambda page: page.name)
def test_code_prints_what_it_is_said_to(page: Path, tmp_path: Path) -> None:
    """What needs nothing but the package."""
    found = [block for block in blocks(page, "python") if not ELSEWHERE.search(block)]
    assert all("# -> " not in block for block in blocks(page, "python") if block not in found), "this block is not run"
    executed(page, found, {}, tmp_path)


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in WHOLE]
)
def test_every_block_of_the_first_pages_runs(page: str, tmp_path: Path) -> None:
    path = next(each for each in PAGES if each.name == page)
    written = blocks(path, "python")
    for text in SUBSTITUTES.get(page, {}):
        assert any(loosely(text).search(block) for block in written), f"{page} does not have {text}"
    executed(path, [runnable(page, block) for block in written], {NOW: StandIn(tmp_path)}, tmp_path)


# ---- parts of one's own ---------------------------------------------------------------------------------------------

PARTS = {
    "AboveMean": lambda sure: [one >= sum(sure) / len(sure) or one == max(sure) for one in sure],
    "NearBest": lambda sure: [one >= 0.95 * max(sure) for one in sure],
    "LargestGap": lambda sure: above_largest_gap(sure),
    "LookBack": None,
    "Unsettled": None,
}
"""Every class of a sampler or cache that a page, a notebook or an example shows, and its rule in plain Python: which of
a block's undecided positions are written, by how sure their tokens are."""
ROWS = [[37, 5, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
NEW, BLOCK = 12, 4


def above_largest_gap(sure: list[float]) -> list[bool]:
    ordered = [*sorted(sure, reverse=True), 0.0]
    gaps = [high - low for high, low in zip(ordered, ordered[1:])]
    least = max(ordered[gaps.index(max(gaps))], 0.5)
    return [one >= least or one == max(sure) for one in sure]


def shown() -> dict[str, str]:
    """The classes that pages, notebooks and examples show, and the code that each stands in."""
    codes = [block for page in PAGES for block in blocks(page, "python")]
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    codes += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    codes += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))]
    part = re.compile(r"^class (\w+)\(\w*(?:Sampler|Cache|Policy|Order|Drafter)\):$", flags=re.MULTILINE)
    return {found[1]: code for code in codes for found in part.finditer(code)}


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """The classes themselves, each from its page's code as it stands."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for registry in (samplers.registry, caches.registry):
            patch.setattr(registry, "_targets", dict(registry._targets))
        for name, code in shown().items():
            module = types.ModuleType(name)
            patch.setitem(sys.modules, name, module)  # where dataclasses look
            vars(module).update(paradec=paradec, model=paradec.load(), prompt="Sort: pear fig")  # cells before it
            exec(compile(code, name, "exec", dont_inherit=True), vars(module))
            found[name] = getattr(module, name)
    return found


def test_every_part_that_is_shown_is_tested() -> None:
    assert sorted(shown()) == sorted(PARTS)


def plain(model: Any, prompt: list[int], rule: Any) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """One row's ids, and what every step wrote."""
    mask, ids = model.facts.mask_token_id, prompt + [model.facts.mask_token_id] * NEW
    steps = []
    for start in range(len(prompt), len(ids), BLOCK):
        while undecided := [at for at in range(start, start + BLOCK) if ids[at] == mask]:
            logits = model.module(torch.tensor([ids])).logits[0]
            logits[:, mask] = -torch.inf
            sure, tokens = logits.softmax(-1).max(-1)
            chosen = [at for at, taken in zip(undecided, rule(sure[undecided].tolist()), strict=True) if taken]
            steps.append([(at, int(tokens[at])) for at in chosen])
            for at in chosen:
                ids[at] = int(tokens[at])
    return ids, steps


@pytest.mark.parametrize("name", [name for name, rule in PARTS.items() if rule is not None])
def test_samplers_that_are_shown_are_a_plain_loop(name: str, own: dict[str, Any]) -> None:
    """Of several blocks and steps, in a batch of unequal rows."""
    model = paradec.load(GOLDEN / "llada-tiny", dtype="float64")
    model.module.lm_head.weight.data.mul_(0.7)  # else it is confident of all
    request = {"sampler": own[name](), "max_new_tokens": NEW, "block_length": BLOCK, "eos_early_stop": False}
    out = paradec.generate(model, ROWS, trace=True, **request)
    for row, prompt in enumerate(ROWS):
        with torch.no_grad():
            ids, steps = plain(model, prompt, PARTS[name])
        said = [sorted(tuple(entry[1:3]) for entry in step.commits if entry[0] == row) for step in out.trace.steps]
        assert out.sequences[row, -len(ids) :].tolist() == ids and [step for step in said if step] == steps
        assert NEW // BLOCK < len(steps) < NEW


def decoded(model: Any, cache: Any, rows: list[list[int]], **request: Any) -> Any:
    """The output, and what every step wrote: row, position, token, confidence."""
    out = paradec.generate(model, rows, cache=cache, trace=True, max_new_tokens=NEW, eos_early_stop=False, **request)
    steps = [[(*entry[:3], pytest.approx(entry[3], abs=1e-9)) for entry in step.commits] for step in out.trace.steps]
    return out, steps


@pytest.mark.filterwarnings("ignore:cache=")
@pytest.mark.parametrize(
    ("name", "look", "block", "as_"),
    [
        ("llada-tiny", 64, NEW, "none"),  # evaluates all of the row
        ("dream-tiny", 64, NEW, "none"),
        ("llada-tiny", 0, 1, "none"),  # one step a block: it only refreshes
        ("dream-tiny", 0, 1, "none"),
        ("block_causal", 64, BLOCK, "none"),  # what is left out comes after the block
        ("one layer", 0, BLOCK, "none"),  # its keys are of tokens alone
        ("llada-tiny", 0, BLOCK, "dual"),  # the block alone
        ("dream-tiny", 0, BLOCK, "dual"),
    ],
)
def test_the_cache_that_is_shown(name: str, look: int, block: int, as_: str, own: dict[str, Any]) -> None:
    """Where it should be exact it is, over several steps of several blocks, in rows of unequal length; and it evaluates
    as many positions as it says."""
    if name == "one layer":
        one, more = tiny_llama(layers=1), {"prediction": "same", "topology": "bidirectional"}
        model = paradec.wrap(one, mask_token_id=one.config.vocab_size - 1, **more)
    else:
        causal = {"topology": name, "block_length": BLOCK} if name == "block_causal" else {}
        model = paradec.load(GOLDEN / ("llada-tiny" if causal else name), dtype="float64", **causal)
    rows = [[token % (model.facts.vocab_size - 1) for token in row] for row in ROWS]
    request = {"sampler": "low_confidence", "block_length": block}
    out, found = decoded(model, own["LookBack"](look=look), rows, **request)
    expected, same = decoded(model, as_, rows, **request)
    assert torch.equal(out.sequences, expected.sequences) and found == same
    asked = 0
    for row, step in itertools.product(rows, range(NEW)):
        before = min(max(look, model.facts.shift), len(row) + step // block * block)
        asked += len(row) + NEW if step % block == 0 else before + block
    assert out.forwarded_tokens == asked


@pytest.mark.filterwarnings("ignore:cache=")
@pytest.mark.parametrize("block", [1, BLOCK])
def test_the_set_of_positions_that_is_shown(block: int, own: dict[str, Any]) -> None:
    """Of a model with one layer it is exact, and a step evaluates what is undecided and the latest token."""
    one = tiny_llama(layers=1)
    mask = one.config.vocab_size - 1
    model = paradec.wrap(one, mask_token_id=mask, prediction="same", topology="bidirectional")
    rows = [[token % mask for token in row] for row in ROWS]
    request = {"sampler": "low_confidence", "block_length": block}
    out, found = decoded(model, own["Unsettled"](), rows, **request)
    expected, same = decoded(model, "none", rows, **request)
    assert torch.equal(out.sequences, expected.sequences) and found == same
    steps = itertools.product(rows, (step % block for step in range(NEW)))
    assert out.forwarded_tokens == sum(block - step + 1 if step else len(row) + NEW for row, step in steps)


@pytest.mark.parametrize(("name", "settings"), [("LookBack", {"look": 2}), ("Unsettled", {})])
def test_the_caches_that_are_shown_are_approximate_elsewhere(
    name: str, settings: dict[str, Any], own: dict[str, Any]
) -> None:
    """Else the tests above would not see a cache that evaluates everything."""
    model = paradec.load(GOLDEN / "llada-tiny", dtype="float64")
    request = {"sampler": "low_confidence", "block_length": BLOCK}
    exact, few = (decoded(model, cache, ROWS, **request)[1] for cache in ("none", own[name](**settings)))
    assert exact != few


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- [^:]+: (\S+\.md)$", text.partition("nav:")[2], flags=re.MULTILINE)


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


def site_hook() -> Any:
    """What mkdocs runs; it needs mkdocs only to be run."""
    return load_script("docs/notebooks/hook.py")
