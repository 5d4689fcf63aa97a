"""Bytes that a request needs, by arithmetic beside what is allocated."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decoding import refuses
from places import GOLDEN
from torch import Tensor, nn

import paradec
from paradec.models.checkpoint import CheckpointError
from paradec.models.int8 import Int8Config
from paradec.models.request_memory import request_memory


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "moe/llada2-tiny", "moe/sdar-moe-tiny"])
def test_a_folder_needs_what_its_loaded_model_takes(name: str) -> None:
    unstated = {"block_length": 4, "mask_token_id": 1} if name == "moe/llada2-tiny" else {}
    model = paradec.load(GOLDEN / name, dtype="float32", **unstated)
    needed = request_memory(GOLDEN / name, 2, 24, wanted=8, dtype=torch.float32)
    store = model.make_store(2, 24)
    assert needed.weights == sum(weight.nbytes for weight in model.module.parameters())
    assert needed.store == model.store_bytes(2, 24) and store.rows == 2
    assert needed.logits == 2 * 8 * model.facts.vocab_size * 4
    assert needed == request_memory(model, 2, 24, wanted=8)
    assert needed.total == needed.weights + needed.store + needed.logits
    assert request_memory(model, 2, 24, stores=False, store_dtype=torch.bfloat16).store == 0


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "moe/sdar-moe-tiny"])
def test_int8_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Config, "min_weights", 256)
    model = paradec.load(GOLDEN / name, dtype="float32", quantization=Int8Config(min_weights=256))
    needed = request_memory(GOLDEN / name, 2, 24, dtype=torch.float32, quantization="int8")
    assert needed.weights == sum(weight.nbytes for weight in model.module.parameters())
    assert needed == request_memory(model, 2, 24)
    exact = request_memory(GOLDEN / name, 2, 24, dtype=torch.float32)
    assert needed.weights < exact.weights and needed.store == exact.store
    refuses(lambda: request_memory(GOLDEN / name, 2, 24, quantization="int4"), "unknown quantization: 'int4'")


def test_what_is_no_text_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    refuses(lambda: request_memory(tmp_path, 1, 8), "model_type='vit'", CheckpointError)
    refuses(lambda: request_memory(GOLDEN / "llada-tiny", 0, 8), "rows=0")


class Uncalled(nn.Module):
    config = SimpleNamespace(vocab_size=10**9, max_position_embeddings=1024)

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("no forward may run")


def test_logits_beyond_the_machine_are_refused_before_any_forward() -> None:
    model = paradec.wrap(Uncalled(), mask_token_id=0, eos_token_id=1, prediction="same", topology="bidirectional")
    refuses(lambda: paradec.generate(model, [[2]], max_new_tokens=512, block_length=512), r"the logits of 1 x 512")
