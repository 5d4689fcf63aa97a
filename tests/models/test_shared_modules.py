"""One module under several wraps, in several threads, and in its owner's hands all the while."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from every_model import EVERY, decoded, expected, shared
from shared_modules import TOPOLOGIES, Dropping, wrapping
from side_by_side import together
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from wrapped_models import IDS, ROWS, decoder, encoder, random_ids

import paradec
from paradec.core.query import Query
from paradec.models.adapter import Model

IDS9 = random_ids(2, 9)


def users_own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """A causal attention of the owner's, which no other gives the numbers of; like flash attention's it reads its name
    from the config."""
    assert module.config._attn_implementation == "users_own"
    return sdpa_attention_forward(module, -query, key, value, mask, **kwargs)


AttentionInterface.register("users_own", users_own)
AttentionMaskInterface.register("users_own", sdpa_mask)


def plain(module: Any, ids: Tensor = IDS9) -> Tensor:
    """What the module computes in its owner's hands."""
    with torch.inference_mode():
        return module(input_ids=ids).logits


def logits(model: Model, ids: Tensor = IDS9) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return model(Query(rows=torch.arange(len(ids)).numpy(), tokens=ids, positions=positions))


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each work returns, all begun at once, each in a thread of its own that gives way all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        found = together(*works)
    finally:
        sys.setswitchinterval(before)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


@lru_cache
def alone(topology: str, implementation: str) -> Tensor:
    """Logits of a wrap that has its module for itself."""
    module = decoder()
    module.set_attn_implementation(implementation)
    return logits(paradec.wrap(module, **TOPOLOGIES[topology], **IDS))


def orders() -> Iterator[tuple[str, ...]]:
    """Every order of wrapping by A and B, and of unwrapping both."""
    for order in set(itertools.permutations(("A", "B", "A", "B"))):
        if order[0] == "A":
            yield order


@pytest.mark.thinned
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "users_own"])
@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(TOPOLOGIES, 2)), ids="+".join)
def test_two_wraps_in_every_order(pair: tuple[str, str], implementation: str) -> None:
    """After each wrap and unwrap every live wrap computes what it computes alone, and the module what it did."""
    module = decoder().eval()
    module.set_attn_implementation(implementation)
    own, topologies = plain(module), dict(zip("AB", pair, strict=True))
    for order in orders():
        live: dict[str, Model] = {}
        for name in order:
            if name in live:
                assert live.pop(name).unwrap() is module
            else:
                live[name] = paradec.wrap(module, **TOPOLOGIES[topologies[name]], **IDS)
            assert torch.equal(plain(module), own)
            assert module.config._attn_implementation == implementation
            for wrap, model in live.items():
                assert torch.equal(logits(model), alone(topologies[wrap], implementation)), (order, name, wrap)
        assert sum(len(part._forward_hooks) for part in module.modules()) == 0
        configs = {id(part.config) for part in module.modules() if hasattr(part, "config")}
        assert configs == {id(module.config)}


def test_an_unwrapped_model_says_so() -> None:
    model = paradec.wrap(decoder(), **TOPOLOGIES["bidirectional"], **IDS)
    model.unwrap()
    with pytest.raises(RuntimeError, match="LlamaForCausalLM was unwrapped"):
        logits(model)


def test_what_runs_past_the_attention_is_an_error() -> None:
    """A module whose layers choose their attention in another way would decode with its causal mask."""
    module = decoder().eval()
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    for layer in module.model.layers:
        layer.self_attn.config = copy.copy(module.config)
    with pytest.raises(RuntimeError, match="does not attend through transformers' AttentionInterface"):
        logits(model)
    model.unwrap()


@pytest.mark.thinned
@pytest.mark.parametrize("kind", EVERY)
def test_two_threads_on_one_model(kind: str) -> None:
    model = shared(kind)
    found = in_threads(lambda: decoded(model, kind, 0), lambda: decoded(model, kind, 1))
    assert all(map(torch.equal, found, (expected(kind), expected(kind, seed=1))))


WITH_DROPOUT: dict[str, Callable[[], Any]] = {
    "encoder": lambda: encoder(hidden_dropout_prob=0.5),
    "decoder": lambda: decoder(attention_dropout=0.5),
    "opaque": lambda: Dropping(),
}


@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_modes_are_the_owners(kind: str) -> None:
    """Whatever the owner sets and when: decoding is without dropout, and his modes stay."""
    module = WITH_DROPOUT[kind]().eval()
    expected = paradec.generate(wrapping(kind, module), ROWS, max_new_tokens=6).new_tokens
    child = list(module.children())[0]

    def modes() -> list[bool]:
        return [part.training for part in module.modules()]

    first, second = wrapping(kind, module), wrapping(kind, module)
    changes: list[Callable[[], Any]] = [module.train, module.eval, child.train, first.unwrap, module.train, child.eval]
    live, steps = first, []
    for change in changes:
        change()
        live = second if change == first.unwrap else live
        before = modes()
        steps.clear()
        out = paradec.generate(live, ROWS, max_new_tokens=6, callback=lambda *_: steps.append(modes()))
        assert torch.equal(out.new_tokens, expected)
        assert modes() == before
        assert steps and all(found == before for found in steps)
    before = modes()
    second.unwrap()
    assert modes() == before


def test_a_call_that_fails_gives_the_modes_back() -> None:
    module = Dropping()
    model = wrapping("opaque", module)
    module.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        paradec.generate(model, [[8]], max_new_tokens=2)
    assert module.training and module.drop.training
