"""`MaskedSampler` against the loop in the docstring of its module."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from tiny_models import END, MASK, everything, tiny

import paradec
from paradec import FixedBlocks
from paradec.samplers.masked import loop

(TEXTBOOK,) = re.findall(r"```python\n(.*?)```", loop.__doc__ or "", re.DOTALL)
SETTINGS: list[dict[str, Any]] = [
    {"threshold": 0.9, "block_length": 4},
    {"threshold": 0.2, "block_length": 32},
    {"threshold": 0.5, "block_length": 5, "end_ids": (END, 3, 17)},
    {"block_length": 3},
    {"block_length": 4, "end_ids": (END, 8, 20)},
    {"block_length": 4, "steps": 2},
    {"block_length": 6, "steps": 4, "end_ids": (END, 11)},
]


def test_the_textbook_fits_a_page() -> None:
    assert len(TEXTBOOK.splitlines()) <= 60


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_family_is_the_textbook(settings: dict[str, Any], shift: int, cache: str | None) -> None:
    draw, names = random.Random(str(settings)), dict[str, Any]()
    exec(TEXTBOOK, names)
    ends, length = settings.get("end_ids", (END,)), settings["block_length"]
    model = tiny(1, prediction="shifted" if shift else "same", seed=length, ends=ends)
    rows = [[draw.randrange(MASK) for _ in range(draw.randint(1, 9))] for _ in range(5)]
    rows = [
        [MASK if i % 3 == 2 and index % 2 else token for i, token in enumerate(row)] for index, row in enumerate(rows)
    ]
    rows.append([MASK] * 4)
    request: dict[str, Any] = {"max_new_tokens": 13, "blocks": FixedBlocks(length), "cache": cache}
    if "threshold" in settings:
        request["sampler"] = paradec.samplers.create("threshold", threshold=settings["threshold"])
    else:
        request["sampler"] = "low_confidence"

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model.module(ids, attention_mask=everything(ids.shape[1])).logits

    for row in rows:
        ids = row + [MASK] * 13
        if "steps" in settings:
            starts = ids.index(MASK)
            request["steps"] = settings["steps"] * -(-(len(ids) - starts) // length)
        out = paradec.generate(model, [row], holes_eos_inf=False, **request)
        with torch.inference_mode():
            expected = names["decode"](logits, ids, MASK, shift=shift, **{"end_ids": ends} | settings)
        assert out.sequences[0, : len(expected)].tolist() == expected
        assert out.finished == [len(expected) < len(ids) or expected[-1] in ends]
