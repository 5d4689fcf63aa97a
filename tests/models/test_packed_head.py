"""The packed output matrix: the products of the plain one, of the weights as they are, for one request and thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec import compiling
from paradec.models import packed_head
from paradec.models.packed_head import SMALLEST, HeadForward, PackedHead, packing, packs


def head(words: int = SMALLEST, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, words, bias=bias).requires_grad_(False)


def packed_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the products that a packed matrix made, as they are made."""
    seen: list[int] = []
    own = PackedHead.logits

    def logits(self: PackedHead, hidden: Tensor, matrix: nn.Linear) -> Tensor | None:
        found = own(self, hidden, matrix)
        if found is not None:
            seen.append(hidden.shape[:-1].numel())
        return found

    monkeypatch.setattr(PackedHead, "logits", logits)
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (7,), (2, 32), (3, 5), (1, 0)])
def test_products_are_those_of_the_plain_matrix(shape: tuple[int, ...], bias: bool) -> None:
    matrix, hidden = head(bias=bias), torch.randn(*shape, 24)
    forward, expected = HeadForward(matrix), matrix(hidden)
    assert torch.equal(forward(hidden), expected)  # outside of a request
    with packing():
        assert torch.equal(forward(hidden), expected)  # a request of one step
        found = forward(hidden)
    exact = nn.functional.linear(hidden.double(), matrix.weight.double(), None if not bias else matrix.bias.double())
    torch.testing.assert_close(found.double(), exact, atol=2e-6, rtol=0)
    assert found.shape == expected.shape and found.dtype == torch.float32


def test_weights_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed in place, exchanged, or filled with other values between requests by `.data`, which leaves no trace."""
    used = packed_used(monkeypatch)
    matrix, hidden = head(), torch.randn(3, 24)
    forward = HeadForward(matrix)

    def check() -> None:
        torch.testing.assert_close(forward(hidden), nn.functional.linear(hidden, matrix.weight))

    with packing():
        check(), check()
        matrix.weight.mul_(2)
        check()
        matrix.weight = nn.Parameter(torch.randn(SMALLEST, 24), requires_grad=False)
        check()
    matrix.weight.data.copy_(torch.randn(SMALLEST, 24))
    with packing():
        check(), check()
    assert used == [3] * 4


def test_what_is_not_packed() -> None:
    assert packs(head())
    assert not packs(head(SMALLEST - 1))
    assert not packs(head().double()) and not packs(head().bfloat16())

    class Own(nn.Linear):
        pass

    assert not packs(Own(24, SMALLEST)) and not packs(nn.Identity())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not packs(head())


def test_a_processor_that_cannot_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Tensor:
        raise RuntimeError("needs other instructions")

    monkeypatch.setattr(packed_head.torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    matrix, hidden = head(), torch.randn(3, 24)
    forward = HeadForward(matrix)
    with packing():
        assert all(torch.equal(forward(hidden), matrix(hidden)) for _ in range(3))


def test_threads_pack_for_themselves() -> None:
    matrix, hidden = head(), torch.randn(3, 24)
    forward, seen = HeadForward(matrix), {}

    def work(name: str) -> None:
        with packing():
            for _ in range(2):
                forward(hidden)
            seen[name] = packed_head._thread.packed

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen["a"] is not seen["b"] and packed_head._thread.packed is None


def test_a_compiled_request_packs_and_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    used = packed_used(monkeypatch)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=SMALLEST, num_key_value_heads=2, **sizes))  # type: ignore[arg-type]
    model = paradec.wrap(module, topology="bidirectional", prediction="same", mask_token_id=SMALLEST - 1)
    request: dict[str, Any] = {"input_ids": [[5, 6, 7]], "max_new_tokens": 8, "block_length": 4, "cache": "dual"}
    plain = paradec.generate(model, **request)
    found = paradec.generate(model, compile=True, **request)
    assert torch.equal(plain.sequences, found.sequences)
    assert len(used) == found.nfe - 1 and packed_head._thread.packed is None
    torch._dynamo.reset()
