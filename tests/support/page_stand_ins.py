"""What code on pages runs with in tests: tiny models in the places of published checkpoints, which are not at hand.

Everything else of a page's code stays as it is written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import eagle_drafters
import text_families
from image_models import tiny_emu3, tiny_llamagen, tiny_nar, tiny_student
from places import GOLDEN
from scripts import load_script
from tiny_pipelines import glm_image_pipeline

CUDA = ', dtype="bfloat16", device="cuda")'
NOW = "stand_in"
"""The name that substitutes have in the code."""
KNOWN = {"Natalia sold 48 clips in April and half as many in May. How many in all?": "Sort: pear fig apple"}
"""The packaged model has words of its own."""
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
        # no tokenizer, and a smaller picture
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
"""By page: what is written, and what is run in its place."""


class StandIn:
    """The tiny models, made when they are asked for; `folder` is for those that are read from files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.asked = {"gen_length": 8, "num_inference_steps": 8, "block_length": 4}
        self.asked |= {"mask_token_id": 3, "eos_token_id": 2, "use_chat_template": False}

    def __getattr__(self, name: str) -> Any:
        made = getattr(self, f"_{name}")()
        vars(self).update(made)
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
        return {"blocks": text_families.write(self.folder / "sdar", "sdar")}

    def _drafter(self) -> dict[str, Any]:
        config, weights = eagle_drafters.checkpoint(hidden=32, vocab=64, kv_heads=4)
        return {"drafter": eagle_drafters.write(self.folder / "drafter", config, weights)}


def runnable(page: str, block: str) -> str:
    """A block of a page as it can be run."""
    for written, run in SUBSTITUTES.get(page, {}).items():
        block = loosely(written).sub(lambda _, run=run: run, block)
    return block


def loosely(written: str) -> re.Pattern[str]:
    """Code as it is written on one line, wherever a page breaks it."""
    parts = re.findall(r"\w+|\s+|.", written)
    gap = r"\s*,?\s*"
    joined = [re.escape(part) if part.strip() else r"\s+" for part in parts]
    joined = [r"\(\s*" if part == r"\(" else gap + r"\)" if part == r"\)" else part for part in joined]
    return re.compile("".join(joined))
