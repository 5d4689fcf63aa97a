"""Weights of loaded models lie column by column on CPUs, and nothing else about them changes."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLADA, random_weights
from safetensors.torch import load_file, save_file
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


# ---- files ----------------------------------------------------------------------------------------------------------

LARGE: dict[str, Any] = LLADA | {"d_model": 512, "n_layers": 5, "n_heads": 8, "mlp_hidden_size": 2048}
"""More than `SHARED_FROM` bytes of matrices in float32."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    save_file({name: tensor.float() for name, tensor in random_weights(LARGE).items()}, folder / "model.safetensors")
    return folder


def mapped(folder: Path) -> bool:
    """Whether this process holds a file of the folder in its memory."""
    return str(folder) in Path("/proc/self/maps").read_text()


def resident(line: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = dict(each.split(":", 1) for each in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[line].split()[0])


def matrices(model: Any) -> list[torch.Tensor]:
    return [part.weight for part in model.module.modules() if type(part) is nn.Linear]


def forward(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.module(torch.arange(8).unsqueeze(0)).logits


ON_LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory is read from Linux's /proc")


@ON_LINUX
def test_large_weights_stay_in_the_file(large: Path, tmp_path: Path) -> None:
    """Until columns are asked for; then nothing keeps the file, and one copy is all that there is."""
    size = (large / "model.safetensors").stat().st_size
    assert size > layout.SHARED_FROM
    before = resident("RssAnon")
    shared = paradec.load(large)
    forward(shared)
    assert resident("RssAnon") - before < 0.1 * size
    assert mapped(large) and all(weight.is_contiguous() for weight in matrices(shared))
    expected = forward(shared)
    again = pickle.loads(pickle.dumps(shared))
    del shared
    assert not mapped(large) and torch.equal(forward(again), expected)
    del again
    before = resident("RssAnon"), resident("RssFile")
    own = paradec.load(large, weight_layout="columns")
    assert not mapped(large) and all(by_columns(weight) for weight in matrices(own))
    torch.testing.assert_close(forward(own), expected, rtol=1e-4, atol=1e-4)
    assert resident("RssAnon") - before[0] < 1.1 * size and resident("RssFile") - before[1] < 0.1 * size
    Path("/proc/self/clear_refs").write_text("5")  # the most that was resident begins anew
    before = resident("VmHWM")
    own.save_pretrained(tmp_path)
    assert resident("VmHWM") - before < 0.3 * size
    original = load_file(large / "model.safetensors")
    assert all(torch.equal(value, original[name]) for name, value in load_file(tmp_path / "model.safetensors").items())


@ON_LINUX
@pytest.mark.parametrize(
    ("arguments", "by_column", "kept"),
    [
        ({}, True, False),
        ({"weight_layout": "columns"}, True, False),
        ({"weight_layout": "rows"}, False, True),
        ({"dtype": "float64"}, False, False),
        ({"weight_layout": "columns", "dtype": "float64"}, False, False),
    ],
)
def test_small_weights(tmp_path: Path, arguments: dict[str, Any], by_column: bool, kept: bool) -> None:
    """Tied ones among them."""
    config = LLADA | {"weight_tying": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.float() for name, tensor in random_weights(config).items()}, tmp_path / "model.safetensors")
    model = paradec.load(tmp_path, **arguments)
    *others, head = matrices(model)
    assert all(by_columns(weight) == by_column for weight in others) and mapped(tmp_path) == kept
    assert head is model.module.get_input_embeddings().weight and head.is_contiguous()


def test_converted_weights_are_laid(large: Path) -> None:
    """They are a copy of the process's own already."""
    folder = large / "float16"
    paradec.load(large, dtype="float16").save_pretrained(folder)
    assert all(by_columns(weight) for weight in matrices(paradec.load(folder, dtype="float32")))


def test_weights_that_change_in_memory_leave_the_file(large: Path, tmp_path: Path) -> None:
    """A file that is replaced, or gone, is still there for those who read it."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((large / name).read_bytes())
    file = tmp_path / "model.safetensors"
    digest, model = hashlib.sha256(file.read_bytes()).digest(), paradec.load(tmp_path)
    expected = forward(model)
    with torch.no_grad():
        model.module.model.norm.weight.mul_(2)
    assert hashlib.sha256(file.read_bytes()).digest() == digest
    model.save_pretrained(tmp_path)  # over the file that it lies in
    torch.testing.assert_close(forward(model), 2 * expected)
    assert torch.equal(forward(paradec.load(tmp_path)), forward(model))
    file.unlink()
    torch.testing.assert_close(forward(model), 2 * expected)


def test_parameters_of_one_memory_stay_so() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(4), nn.LayerNorm(4)])
    memory = torch.frombuffer(bytearray(torch.ones(4).numpy().tobytes()), dtype=torch.float32)
    for part in module[1:]:
        part.weight = nn.Parameter(memory)
    layout.lay(module)
    assert module[1].weight.data_ptr() == module[2].weight.data_ptr() != memory.data_ptr()


def test_layouts_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="unknown weight_layout: 'file'; allowed: columns, rows"):
        paradec.load(weight_layout="file")
