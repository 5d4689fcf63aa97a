"""Commands and code in the README and docs/ that need only the package are run, and their output is compared."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import drafters
import pytest
from images import tiny_emu3, tiny_llamagen, tiny_nar, tiny_student
from pipelines import glm_image_pipeline
from places import GOLDEN, ROOT, load_script
from typer.testing import CliRunner

from paradec import caches, samplers
from paradec.cli import app

CUDA = ', dtype="bfloat16", device="cuda")'
NOW = "stand_in"
"""The variable that holds the `StandIn` in substituted code."""
KNOWN = {"Natalia sold 48 clips in April and half as many in May. How many in all?": "Sort: pear fig apple"}
"""Prompts of the pages that the packaged model's vocabulary lacks, and their substitutes."""
SUBSTITUTES: dict[str, dict[str, str]] = {
    "text.md": {
        'paradec.load("GSAI-ML/LLaDA-8B-Instruct"' + CUDA: "paradec.load()",
        'paradec.load("Dream-org/Dream-v0-Instruct-7B"' + CUDA: "paradec.load()",
        **KNOWN,
        "Write a haiku about rain.": "Sort: pear fig apple",
    },
    "images.md": {
        'paradec.load("c2i_XL_384.pt", vq="vq_ds16_c2i.pt"' + CUDA: f"{NOW}.teacher",
        'paradec.load("BAAI/Emu3-Gen-hf"' + CUDA: f"{NOW}.emu3",
        # no tokenizer, and a smaller image
        '"a portrait of a young girl", negative_prompt="lowres, blurry", height=720, width=720': f"**{NOW}.portrait",
        'paradec.load("c2i_XL_256.pt", vq="vq_ds16_c2i.pt")': f"{NOW}.nar",
        'paradec.load("llamagen-L.pt", vq="vq_ds16_c2i.pt")': f"{NOW}.student",
        'paradec.load("c2i_L_256.pt")': f"{NOW}.teacher",
        'preset="llamagen_l_22", teacher=teacher': "teacher=teacher, teacher_start=2",  # of 256 tokens
        'paradec.load("c2i_L_256.pt", vq="vq_ds16_c2i.pt")': f"{NOW}.teacher",
        '"path/to/llamagen_drafter"': f"{NOW}.drafter",
        'GlmImagePipeline.from_pretrained("zai-org/GLM-Image")': f"{NOW}.glm_image",
        '"a fox in the snow", height=1024, width=1024': '"a fox", height=64, width=64, num_inference_steps=2',
    },
    "diffusion.md": {
        'paradec.load("inclusionAI/LLaDA2.0-mini"' + CUDA: f"paradec.load({NOW}.blocks)",
        'pipe("Why is the sky blue?", gen_length=64)': f'pipe("w1 w2 w3", **{NOW}.asked)',
        'AmusedPipeline.from_pretrained("amused/amused-256")': f"{NOW}.amused",
        'pipe("a red bicycle", num_inference_steps=12)': f"pipe(**{NOW}.bicycle, num_inference_steps=12)",
    },
}
"""For every page: code as written, and the code to run instead."""


class StandIn:
    """Tiny models, created on first access. Those that load from files are written to `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.asked = {"gen_length": 32, "num_inference_steps": 8, "block_length": 32}
        self.asked |= {"mask_token_id": 3, "eos_token_id": 2, "use_chat_template": False}

    def __getattr__(self, name: str) -> Any:
        created = getattr(self, f"_{name}")()
        vars(self).update(created)
        return vars(self)[name]

    def _nar(self) -> dict[str, Any]:
        return {"nar": tiny_nar()}

    def _student(self) -> dict[str, Any]:
        return {"student": tiny_student(), "teacher": tiny_llamagen()}

    _teacher = _student

    def _emu3(self) -> dict[str, Any]:
        request = {"prompts": [[1, 12, 9]], "negative_prompt": [[1, 9]], "height": 40, "width": 40}
        return {"emu3": tiny_emu3(), "portrait": request}

    _portrait = _emu3

    def _amused(self) -> dict[str, Any]:
        pipe, request = load_script("examples/amused_recap.py").tiny()
        return {"amused": pipe, "bicycle": request}

    _bicycle = _amused

    def _glm_image(self) -> dict[str, Any]:
        return {"glm_image": glm_image_pipeline(GOLDEN / "images-autumn" / "glm_image")}

    def _blocks(self) -> dict[str, Any]:
        return {"blocks": checkpoints.write_family(self.folder / "sdar", "sdar")}

    def _drafter(self) -> dict[str, Any]:
        config, weights = drafters.eagle_weights(hidden=32, vocab=64, kv_heads=4)
        return {"drafter": drafters.write_drafter(self.folder / "drafter", config, weights)}


def make_runnable(page: str, block: str) -> str:
    """Replace the parts of a block that need other models."""
    for written, run in SUBSTITUTES.get(page, {}).items():
        block = loose_pattern(written).sub(lambda _, run=run: run, block)
    return block


def loose_pattern(code: str) -> re.Pattern[str]:
    """Compile a pattern for code that a page may break into several lines. written: the code on one line."""
    parts = re.findall(r"\w+|\s+|.", code)
    gap = r"\s*,?\s*"
    joined = [re.escape(part) if part.strip() else r"\s+" for part in parts]
    joined = [r"\(\s*" if part == r"\(" else gap + r"\)" if part == r"\)" else part for part in joined]
    return re.compile("".join(joined))


DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
ELSEWHERE = re.compile(
    r"path|folder|cuda|\bpipe\b|pipe\.|\.ckpt|\.pth|\.pt\b|\.safetensors|mar_large|amused/|black-forest|BAAI|mine\.jsonl|"
    r"custom_generate|vllm|logits\)|\.\.\.|questions|generate\(\s*model,\s*(prompt|chat)\b"
)
"""Code that matches needs a checkpoint, a GPU, or names that only the text of the page explains."""
WHOLE = ("README.md", "diffusion.md", "images.md", "index.md", "text.md")
"""Pages of which every block runs, with tiny models in place of checkpoints (`StandIn`)."""
NO_STAND_IN = re.compile(r"\.pth|maskgit-r")
"""Checkpoints on these pages that no tiny model replaces."""
SLOW = ("images.md",)
"""Slow ones of these pages; they run in `.ci/full`."""
LONG = ("bench", "compare", "eval", "learn2pd", "serve", "tune")
"""Commands that take minutes, do not end, or need an extra; other tests cover them."""
SECONDS = re.compile(r"\d+\.\d+ s$")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def transcripts() -> Iterator[tuple[str, str, str]]:
    """Yield (page, command, output) of every command that is shown with its output."""
    for page in PAGES:
        for block in (re.sub(r" \\\n *", " ", text) for text in blocks(page, "console")):
            for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, printed = entry.partition("\n")
                yield page.name, command, printed


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) of every command that is shown without output and runs anywhere."""
    for page in PAGES:
        joined = re.sub(r" \\\n *", " ", "\n".join(blocks(page, "bash")))
        for line in joined.splitlines():
            if line.startswith("paradec ") and not ELSEWHERE.search(line) and line.split()[1] not in LONG:
                yield page.name, line


def run(command: str) -> str:
    """Run a command. Return its standard output, and the cost of an answer from standard error."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "paradec"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "warning: " not in done.stderr, done.output
    return done.output


@pytest.mark.parametrize(("page", "command", "printed"), list(transcripts()))
def test_commands_print_the_shown_output(page: str, command: str, printed: str) -> None:
    actual, expected = ([SECONDS.sub("", line) for line in text.splitlines()] for text in (run(command), printed))
    assert actual == expected


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_commands_run(page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if "digits-dit" in command:
        command = command.replace("0-9", "0,1")  # ten pictures in twenty steps take long
    assert run(command)
    files = re.findall(r"--(?:out|trace) (\S+)", command)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def execute_blocks(page: Path, blocks: list[str], names: dict[str, Any], tmp_path: Path) -> None:
    """Run blocks in order, like a reader would. Lines after "# -> " are the expected output."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the tiny models
        patch.chdir(tmp_path)
        for registry in (samplers.registry, caches.registry):  # what a page registers goes with it
            patch.setattr(registry, "_targets", dict(registry._targets))
        for block in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, str(page), "exec"), names)
            expected = re.findall(r"# -> (.*)$", block, flags=re.MULTILINE)
            assert not expected or printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in WHOLE], ids=lambda page: page.name)
def test_code_prints_the_shown_output(page: Path, tmp_path: Path) -> None:
    actual = [block for block in blocks(page, "python") if not ELSEWHERE.search(block)]
    assert all("# -> " not in block for block in blocks(page, "python") if block not in actual), "this block is not run"
    execute_blocks(page, actual, {}, tmp_path)


@pytest.mark.parametrize("page", [pytest.param(n, marks=pytest.mark.full) if n in SLOW else n for n in WHOLE])
def test_every_block_of_the_first_pages_runs(page: str, tmp_path: Path) -> None:
    path = next(each for each in PAGES if each.name == page)
    written = blocks(path, "python")
    for text in SUBSTITUTES.get(page, {}):
        assert any(loose_pattern(text).search(block) for block in written), f"{page} does not have {text}"
    code = [make_runnable(page, block) for block in written if not NO_STAND_IN.search(block)]
    execute_blocks(path, code, {NOW: StandIn(tmp_path)}, tmp_path)
