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
    """Column by column, as few as possible but an odd number of lines of 16 numbers apart."""
    apart = weight.stride(1) // 16
    return weight.stride(0) == 1 and weight.stride(1) % 32 == 16 and 0 <= 16 * apart - weight.shape[0] < 32


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


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (16, 3), (17, 1030), (1024, 513), (1040, 512), (3, 0)])
def test_every_number_is_where_it_was(shape: tuple[int, int]) -> None:
    matrix = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    lying = layout.columns_first(matrix)
    assert torch.equal(lying, matrix) and by_columns(lying)
    assert torch.equal(layout.columns_first(lying), matrix)  # from any order


def test_matrices_that_two_layers_share() -> None:
    module = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6)])
    module[1].weight = module[0].weight
    lay_columns_first(module)
    assert module[0].weight is module[1].weight and module[0].weight.is_contiguous()


def test_others_write_what_lies_by_columns(tmp_path: Path) -> None:
    """transformers, and torch."""
    module = paradec.load(dtype="float32").module
    module.save_pretrained(tmp_path)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    again = type(module).from_pretrained(tmp_path).state_dict()
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, tensor in module.state_dict().items():
        assert torch.equal(again[name], tensor) and torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("name", ["digits-ar", "digits-var"])
def test_image_models(name: str) -> None:
    module = paradec.load(name).module
    laid = [part.weight for part in module.modules() if type(part) is nn.Linear]
    assert laid and all(by_columns(weight) for weight in laid)


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
        again_head = again.module.get_output_embeddings().weight
        assert again_head.stride(0) == 1  # deepcopy leaves out what lies between columns
    assert paradec.load(dtype="float64").module.get_output_embeddings().weight.is_contiguous()
