"""One module under several wraps, in several threads, and in its owner's hands all the while."""

from __future__ import annotations

import copy
import itertools
import pickle
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
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from wrapped_models import IDS, ROWS, decoder, encoder, random_ids

import paradec
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.models.calls import Calling, Evaluation, ModuleCall

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


# ---- several wraps --------------------------------------------------------------------------------------------------


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


def test_a_module_that_load_made_wrapped_as_causal(llada64: Model) -> None:
    """It has no causal mask by itself; the wrap gives it one, and the loaded model goes on without."""
    module, before = llada64.module, logits(llada64)
    config = type(module.config).from_dict(module.config.to_dict())
    config._attn_implementation, config.is_causal = "sdpa", True
    same = LlamaForCausalLM(config).double().eval()
    same.load_state_dict(module.state_dict())
    causal = paradec.wrap(module, **TOPOLOGIES["causal"])
    torch.testing.assert_close(logits(causal), plain(same), rtol=0, atol=1e-6)
    assert torch.equal(logits(llada64), before)
    assert causal.supports_store
    causal.unwrap()
    assert torch.equal(logits(llada64), before)


def test_the_owner_may_choose_another_attention() -> None:
    module = decoder().eval()
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    before = logits(model)
    module.set_attn_implementation("users_own")
    chosen = plain(module)
    assert torch.equal(logits(model), before)
    model.unwrap()
    assert torch.equal(plain(module), chosen)
    fresh = decoder().eval()
    assert not torch.equal(plain(fresh), chosen)
    fresh.set_attn_implementation("users_own")
    assert torch.equal(plain(fresh), chosen)


def test_two_modules_with_one_config_and_one_body() -> None:
    """Only what is called through a wrap attends as the wrap says."""
    module, other = decoder().eval(), decoder().eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other = type(module)(module.config).double().eval()
    second = type(module)(module.config).double().eval()
    second.model = module.model
    assert other.config is module.config
    own = [plain(part) for part in (module, other, second)]
    first, both = (paradec.wrap(part, **TOPOLOGIES["bidirectional"], **IDS) for part in (module, second))
    expected = [logits(first), logits(both)]
    assert torch.equal(expected[0], alone("bidirectional", "sdpa"))
    assert [torch.equal(plain(part), before) for part, before in zip((module, other, second), own)] == [True] * 3
    first.unwrap()
    assert torch.equal(logits(both), expected[1])
    both.unwrap()
    assert [torch.equal(plain(part), before) for part, before in zip((module, other, second), own)] == [True] * 3
    assert sum(len(part._forward_hooks) for part in second.modules()) == 0


def test_a_call_inside_a_call() -> None:
    """What a hook of the owner's calls meanwhile is none of the outer call's business."""
    module, other = decoder().eval(), decoder("Qwen2").eval()
    outer = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    inner = paradec.wrap(other, **TOPOLOGIES["bidirectional"], **IDS)
    own, expected, seen = plain(other), logits(inner), []
    handle = module.model.layers[0].register_forward_hook(
        lambda *_: seen.append((plain(other), logits(inner), plain(other)))
    )
    assert torch.equal(logits(outer), alone("bidirectional", "sdpa"))
    handle.remove()
    (before, middle, after) = seen[0]
    assert torch.equal(before, own) and torch.equal(middle, expected) and torch.equal(after, own)


def test_an_unwrapped_model_says_so() -> None:
    model = paradec.wrap(decoder(), **TOPOLOGIES["bidirectional"], **IDS)
    model.unwrap()
    with pytest.raises(RuntimeError, match="LlamaForCausalLM was unwrapped"):
        logits(model)


def test_a_refused_attention_leaves_nothing_behind() -> None:
    module = decoder("GptOss", num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
    module.config.sliding_window = None
    with pytest.raises(ValueError, match="GptOssForCausalLM does not support an attention implementation"):
        paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    assert sum(len(part._forward_hooks) for part in module.modules()) == 0


def test_what_runs_past_the_attention_is_an_error() -> None:
    """A module whose layers choose their attention in another way would decode with its causal mask."""
    module = decoder().eval()
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    for layer in module.model.layers:
        layer.self_attn.config = copy.copy(module.config)
    with pytest.raises(RuntimeError, match="does not attend through transformers' AttentionInterface"):
        logits(model)
    model.unwrap()


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize("kind", EVERY)
def test_two_threads_on_one_model(kind: str) -> None:
    model = shared(kind)
    found = in_threads(lambda: decoded(model, kind, 0), lambda: decoded(model, kind, 1))
    assert all(map(torch.equal, found, (expected(kind), expected(kind, seed=1))))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "users_own"])
def test_wraps_hf_generate_and_the_owner_at_once(implementation: str, training: bool) -> None:
    """Two wraps of other topologies, `hf_generate` twice, and transformers' own calls, on one module in five threads.
    Where the module is in training mode its owner waits: modes are the module's, and no thread's."""
    module = decoder(attention_dropout=0.5 if training else 0.0)
    module.generation_config.pad_token_id = 1
    module.set_attn_implementation(implementation)
    module.train(training)
    ids = torch.tensor([[8, 9, 10, 11]])
    request = {"max_new_tokens": 6, "do_sample": False, "prediction": "same", "mask_token_id": 5}

    def hf(seed: int) -> Tensor:
        return module.generate(ids + seed, custom_generate=paradec.hf_generate, **request)

    def as_wrap(topology: str, live: bool) -> Tensor:
        model = paradec.wrap(module, **TOPOLOGIES[topology], **IDS)
        kind = "Llama causal" if topology == "causal" else "Llama"
        try:
            return decoded(model, kind)
        finally:
            if not live:
                model.unwrap()

    works: list[Callable[[], Any]] = [
        lambda: as_wrap("bidirectional", live=True),
        lambda: as_wrap("causal", live=False),
        lambda: hf(0),
        lambda: hf(1),
    ]
    if not training:
        works += [lambda: plain(module), lambda: module.generate(ids, max_new_tokens=6, do_sample=False)]
    expected = [work() for work in works]
    for _ in range(3):
        assert all(map(torch.equal, in_threads(*works), expected))
    assert module.config._attn_implementation == implementation
    assert all(part.training == training for part in module.modules())


# ---- modes ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("kind", ["llamagen-t2i", "emu3", "mar", "dit"])
def test_image_models_put_into_training_mode(kind: str) -> None:
    model = shared(kind)
    seen: list[bool] = []
    leaf = [part for part in model.module.modules() if isinstance(part, torch.nn.Linear)][-1]
    handle = leaf.register_forward_hook(lambda *_: seen.append(any(part.training for part in model.module.modules())))
    model.module.train()
    try:
        assert torch.equal(decoded(model, kind), expected(kind))
        assert all(part.training for part in model.module.modules())
        assert seen and not any(seen)
    finally:
        model.module.eval()
        handle.remove()


def test_calls_that_overlap_share_the_evaluation() -> None:
    """The modes come back with the last call that needs them away, whichever that is."""
    module = Dropping()
    for order in ((0, 1), (1, 0)):
        contexts = [Evaluation(module), Calling(module, ModuleCall())]
        for context in contexts:
            context.__enter__()
        assert not module.drop.training
        contexts[order[0]].__exit__()
        assert not module.drop.training
        contexts[order[1]].__exit__()
        assert module.drop.training


# ---- copies of a module that is wrapped ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("take", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_wrapped_module_is_not_wrapped(kind: str, take: Callable[[Any], Any]) -> None:
    module = (encoder() if kind == "encoder" else decoder()).eval()
    own = plain(module)
    model = wrapping(kind, module)
    expected = logits(model)
    copied = take(module)
    assert torch.equal(plain(copied), own)
    assert all(type(part.config) is type(module.config) for part in copied.modules() if hasattr(part, "config"))
    if kind == "decoder":
        assert {id(part.config) for part in copied.modules() if hasattr(part, "config")} == {id(copied.config)}
    again = wrapping(kind, copied)
    model.unwrap()
    assert torch.equal(logits(again), expected)
    assert torch.equal(plain(module), own) and torch.equal(plain(copied), own)
    again.unwrap()
    assert sum(len(part._forward_hooks) for part in copied.modules()) == 0
    assert torch.equal(plain(copied), own)


def test_the_config_of_a_wrapped_part_is_a_config() -> None:
    module = decoder().eval()
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    config = module.model.layers[0].self_attn.config
    assert config == module.config and module.config == config and repr(config) == repr(module.config)
    config.some_field = 3
    assert module.config.some_field == 3
    del config.some_field
    assert not hasattr(module.config, "some_field") and not hasattr(config, "some_field")
    assert type(copy.copy(config)) is type(module.config) and copy.copy(config) is not module.config
    model.unwrap()
    assert module.model.layers[0].self_attn.config is module.config


def test_compiled_attention() -> None:
    """torch.compile's guards see whether their thread is inside a call."""
    module = decoder(num_hidden_layers=1).eval()
    own = plain(module)
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    ours = logits(model)
    model.unwrap()
    module.model.layers[0].self_attn.compile(backend="eager")
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    for _ in range(2):
        assert torch.equal(plain(module), own)
        assert torch.equal(logits(model), ours)
    assert all(map(torch.equal, in_threads(lambda: logits(model), lambda: plain(module)), (ours, own)))


@pytest.mark.full
@pytest.mark.slow
def test_a_compiled_module() -> None:
    """The hook and the counters of a call work from inside compiled code as well."""
    module = decoder(num_hidden_layers=1).eval()
    own, model = plain(module), paradec.wrap(module, **TOPOLOGIES["bidirectional"], **IDS)
    tokens = paradec.generate(model, ROWS, max_new_tokens=4, block_length=2).new_tokens
    module.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(plain(module), own)
        found = paradec.generate(model, ROWS, max_new_tokens=4, block_length=2).new_tokens
        assert torch.equal(found, tokens)
