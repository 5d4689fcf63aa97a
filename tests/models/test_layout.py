"""Weights of loaded models lie column by column on CPUs, and nothing else about them changes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import paradec
from paradec.models import layout
from paradec.models.layout import lay_columns_first


class Tiny(nn.Module):
    """A product of its own, and one with the embedding's weights."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.own = nn.Linear(4, 6, dtype=dtype)
        self.tied = nn.Linear(4, 7, dtype=dtype)
        self.tied.weight = self.embed.weight


def by_columns(weight: torch.Tensor) -> bool:
    return weight.stride() == (1, weight.shape[0])


@torch.no_grad()
def test_which_matrices() -> None:
    module = Tiny()
    before, identity = copy.deepcopy(module.state_dict()), module.own.weight
    lay_columns_first(module)
    assert by_columns(module.own.weight) and module.own.weight is identity
    assert module.tied.weight is module.embed.weight and module.embed.weight.is_contiguous()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    lay_columns_first(module)
    assert by_columns(module.own.weight)
    inputs = torch.randn(3, 4)
    torch.testing.assert_close(module.own(inputs), inputs @ before["own.weight"].T + before["own.bias"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    module = Tiny(dtype)
    lay_columns_first(module)
    assert module.own.weight.is_contiguous()


def test_large_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST", 24)
    module = Tiny()
    lay_columns_first(module)
    assert module.own.weight.is_contiguous()


def test_loaded_models(tmp_path: Path) -> None:
    model = paradec.load(dtype="float32")
    head = model.module.get_output_embeddings().weight
    assert by_columns(head)
    plain = copy.deepcopy(model.module)
    for part in plain.modules():
        if type(part) is nn.Linear:
            part.weight.data = part.weight.data.contiguous()
    with torch.inference_mode():
        ids = torch.arange(5, 25).unsqueeze(0)
        torch.testing.assert_close(model.module(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    for again in (paradec.load(tmp_path), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, tensor in again.module.state_dict().items():
            assert torch.equal(tensor, model.module.state_dict()[name]), name
        assert by_columns(again.module.get_output_embeddings().weight)
    assert paradec.load(dtype="float64").module.get_output_embeddings().weight.is_contiguous()
