"""Run commands and code of the README and docs/, and compare the output with the shown output.

Tiny models replace checkpoints on some pages; other code that needs a checkpoint or a GPU is not run."""

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
MODELS = "tiny_models"
"""The variable that holds the `TinyModels` in substituted code."""
SUBSTITUTES: dict[str, dict[str, str]] = {
    "text.md": {
        'paradec.load("GSAI-ML/LLaDA-8B-Instruct"' + CUDA: "paradec.load()",
        'paradec.load("Dream-org/Dream-v0-Instruct-7B"' + CUDA: "paradec.load()",
        # the packaged model's vocabulary lacks these prompts
        "Natalia sold 48 clips in April and half as many in May. How many in all?": "Sort: pear fig apple",
        "Write a haiku about rain.": "Sort: pear fig apple",
    },
    "images.md": {
        'paradec.load("c2i_XL_384.pt", vq="vq_ds16_c2i.pt"' + CUDA: f"{MODELS}.teacher",
        'paradec.load("BAAI/Emu3-Gen-hf"' + CUDA: f"{MODELS}.emu3",
        # the tiny model has no tokenizer and makes smaller images
        '"a portrait of a young girl", negative_prompt="lowres, blurry", height=720, width=720': f"**{MODELS}.portrait",
        'paradec.load("c2i_XL_256.pt", vq="vq_ds16_c2i.pt")': f"{MODELS}.nar",
        'paradec.load("llamagen-L.pt", vq="vq_ds16_c2i.pt")': f"{MODELS}.student",
        'paradec.load("c2i_L_256.pt")': f"{MODELS}.teacher",
        'preset="llamagen_l_22", teacher=teacher': "teacher=teacher, teacher_start=2",  # the preset is for 256 tokens
        'paradec.load("c2i_L_256.pt", vq="vq_ds16_c2i.pt")': f"{MODELS}.teacher",
        '"path/to/llamagen_drafter"': f"{MODELS}.drafter",
        'GlmImagePipeline.from_pretrained("zai-org/GLM-Image")': f"{MODELS}.glm_image",
        '"a fox in the snow", height=1024, width=1024': '"a fox", height=64, width=64, num_inference_steps=2',
    },
    "diffusion.md": {
        'paradec.load("inclusionAI/LLaDA2.0-mini"' + CUDA: f"paradec.load({MODELS}.blocks)",
        'pipe("Why is the sky blue?", gen_length=64)': f'pipe("w1 w2 w3", **{MODELS}.blocks_options)',
        'AmusedPipeline.from_pretrained("amused/amused-256")': f"{MODELS}.amused",
        'pipe("a red bicycle", num_inference_steps=12)': f"pipe(**{MODELS}.bicycle, num_inference_steps=12)",
    },
}
"""Page -> {code on the page: code to run instead}."""


class TinyModels:
    """Tiny models and their requests, created on first access. `folder` receives those that are loaded from files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.blocks_options = {"gen_length": 32, "num_inference_steps": 8, "block_length": 32}
        self.blocks_options |= {"mask_token_id": 3, "eos_token_id": 2, "use_chat_template": False}

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
    """Replace the parts of a block of code that need checkpoints."""
    for code, substitute in SUBSTITUTES.get(page, {}).items():
        block = loose_pattern(code).sub(lambda _, substitute=substitute: substitute, block)
    return block


def loose_pattern(code: str) -> re.Pattern[str]:
    """Compile a pattern that matches `code`, which is on one line, also where a page breaks it into several lines."""
    parts = [re.escape(part) if part.strip() else r"\s+" for part in re.findall(r"\w+|\s+|.", code)]
    before_bracket = r"\s*,?\s*"
    parts = [r"\(\s*" if part == r"\(" else before_bracket + r"\)" if part == r"\)" else part for part in parts]
    return re.compile("".join(parts))


DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NOT_RUN = re.compile(
    r"path|folder|cuda|\bpipe\b|pipe\.|\.ckpt|\.pth|\.pt\b|\.safetensors|mar_large|amused/|black-forest|BAAI|mine\.jsonl|"
    r"custom_generate|vllm|logits\)|\.\.\.|questions|generate\(\s*model,\s*(prompt|chat)\b"
)
"""Code that matches is not run: it needs a checkpoint, a GPU, or variables that the page does not define."""
SUBSTITUTED_PAGES = ("README.md", "diffusion.md", "images.md", "index.md", "text.md")
"""Pages whose blocks of code all run, with tiny models in place of checkpoints (`TinyModels`)."""
NO_SUBSTITUTE = re.compile(r"\.pth|maskgit-r")
"""Checkpoints that no tiny model replaces; blocks that name them are not run."""
SLOW_PAGES = ("images.md",)
"""The pages of `SUBSTITUTED_PAGES` that run only in `.ci/full`."""
SKIPPED_COMMANDS = ("bench", "compare", "eval", "learn2pd", "serve", "tune")
"""Commands that take minutes, do not end, or need an extra; other tests cover them."""
SECONDS = re.compile(r"\d+\.\d+ s$")


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands_with_output() -> Iterator[tuple[str, str, str]]:
    """Yield (page, command, output) of every command that is shown with its output."""
    for page in PAGES:
        for block in (re.sub(r" \\\n *", " ", text) for text in code_blocks(page, "console")):
            for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = entry.partition("\n")
                yield page.name, command, output


def commands_without_output() -> Iterator[tuple[str, str]]:
    """Yield (page, command) of every command that is shown without output and needs no checkpoint or GPU."""
    for page in PAGES:
        joined = re.sub(r" \\\n *", " ", "\n".join(code_blocks(page, "bash")))
        for line in joined.splitlines():
            if line.startswith("paradec ") and not NOT_RUN.search(line) and line.split()[1] not in SKIPPED_COMMANDS:
                yield page.name, line


def run_command(command: str) -> str:
    """Run a command, assert that it succeeds without warnings, and return its standard output and standard error."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "paradec"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "warning: " not in done.stderr, done.output
    return done.output


@pytest.mark.parametrize(("page", "command", "output"), list(commands_with_output()))
def test_commands_print_the_shown_output(page: str, command: str, output: str) -> None:
    texts = (run_command(command), output)
    actual, expected = ([SECONDS.sub("", line) for line in text.splitlines()] for text in texts)
    assert actual == expected


@pytest.mark.parametrize(("page", "command"), list(commands_without_output()))
def test_commands_succeed_and_write_only_the_named_files(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if "digits-dit" in command:
        command = command.replace("0-9", "0,1")  # ten images in twenty steps take long
    assert run_command(command)
    files = re.findall(r"--(?:out|trace) (\S+)", command)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def execute_blocks(page: Path, blocks: list[str], names: dict[str, Any], tmp_path: Path) -> None:
    """Run blocks in order with shared variables (`names`). The text after "# -> " is the expected output of a block."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the tiny models
        patch.chdir(tmp_path)
        for registry in (samplers.registry, caches.registry):  # samplers and caches of a page are removed after it
            patch.setattr(registry, "_targets", dict(registry._targets))
        for block in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, str(page), "exec"), names)
            expected = re.findall(r"# -> (.*)$", block, flags=re.MULTILINE)
            assert not expected or printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in SUBSTITUTED_PAGES], ids=lambda p: p.name)
def test_code_prints_the_shown_output(page: Path, tmp_path: Path) -> None:
    blocks = code_blocks(page, "python")
    runnable = [block for block in blocks if not NOT_RUN.search(block)]
    assert all("# -> " not in block for block in blocks if block not in runnable), "a block with output is not run"
    execute_blocks(page, runnable, {}, tmp_path)


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW_PAGES)) for name in SUBSTITUTED_PAGES]
)
def test_every_block_runs_with_tiny_models(page: str, tmp_path: Path) -> None:
    path = next(path for path in PAGES if path.name == page)
    blocks = code_blocks(path, "python")
    for text in SUBSTITUTES.get(page, {}):
        assert any(loose_pattern(text).search(block) for block in blocks), f"{page} does not have {text}"
    code = [make_runnable(page, block) for block in blocks if not NO_SUBSTITUTE.search(block)]
    execute_blocks(path, code, {MODELS: TinyModels(tmp_path)}, tmp_path)
