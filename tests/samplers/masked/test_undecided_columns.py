"""Logits of undecided positions alone: the decoding of whole windows' logits, and where windows stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor

from paradec import samplers
from paradec.core.protocol import decode
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.samplers.masked import loop

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 9]
NEW = 12


class Asked:
    """A model that notes how many columns it was asked for, and of how many rows."""

    def __init__(self, model: Model):
        self.model, self.widths = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Query, *store: Any) -> Tensor:
        self.widths.append(query.wanted.shape[1])
        logits = self.model(query, *store)
        assert logits.shape[1] == self.widths[-1]
        return logits


def decoded(model: Model, sampler: Any, rows: list[list[int]] = ROWS, **request: Any) -> tuple[Any, list[int]]:
    """The state after decoding, and the widths that were asked for."""
    asked = Asked(model)
    state = sampler.start(asked, rows, max_new_tokens=NEW, **{"seed": 3, **request})
    return decode(sampler, asked, state), asked.widths


CASES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"block_length": 6}),
    ("low_confidence", {"cache": "dual"}),
    ("margin", {"temperature": 0.7, "cache": "prefix", "block_length": 4}),
    ("entropy", {"temperature": 0.5, "top_k": 9}),
    ("random", {"temperature": 1.0, "guidance_scale": 1.5, "cache": "dual"}),
    ("klass", {}),
    ("persistence", {"block_length": 6}),
    ("maskgit", {"temperature": 1.0, "steps": 5}),
]


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize(("name", "request_"), CASES, ids=[name for name, _ in CASES])
def test_the_same_decoding(
    name: str, request_: dict[str, Any], prediction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(2, prediction=prediction)
    sampler = samplers.create(name, **({"final_temperature": 0.5} if name == "maskgit" else {}))
    whole, wide = decoded(model, sampler, **request_)
    monkeypatch.setattr(loop, "MIN_SAVED_LOGITS", 0)
    spared, narrow = decoded(model, sampler, **request_)
    assert torch.equal(whole.canvas, spared.canvas) and (whole.nfe == spared.nfe).all()
    if name == "klass":  # its stage reads whole windows
        assert wide == narrow
    else:
        assert len(wide) == len(narrow) and sum(narrow) < 0.8 * sum(wide)


def test_rows_do_not_depend_on_how_much_their_neighbours_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MIN_SAVED_LOGITS", 0)
    model, sampler = tiny(2), samplers.create("threshold", threshold=0.35)
    request: dict[str, Any] = {"temperature": 0.8, "cache": "dual", "block_length": 6}
    together, _ = decoded(model, sampler, **request)
    for index, row in enumerate(ROWS):
        alone, _ = decoded(model, sampler, [row], **request)
        length = int(alone.length[0])
        assert torch.equal(alone.canvas[0, :length], together.canvas[index, :length])
