"""Shared prefixes of prompts in a batch: the same answers with fewer evaluations, also after errors."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from decoding import Failing, drain, refuses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.helpers import rescale_adapter_scale
from peft.tuners.tuners_utils import BaseTunerLayer
from small_models import END, MASK, tiny

import paradec
from paradec.batching import Batch, Cancelled
from paradec.models.adapter import Model

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:seed=")
BLOCKS = {"topology": "block_causal"}
REQUESTS: dict[str, dict[str, Any]] = {
    "causal": {"sampler": "sjd", "max_new_tokens": 9},
    "pool": {"sampler": paradec.samplers.create("jacobi", pool=4), "max_new_tokens": 9},
    "tree": {"sampler": "tree", "max_new_tokens": 9},
    "block": {"cache": "block", "max_new_tokens": 8},
    "smaller": {"cache": "block", "block_length": 2, "sampler": "credit", "max_new_tokens": 8},
    "prefix": {"cache": "prefix", "max_new_tokens": 8},
    "s2d2": {"cache": "block", "sampler": "s2d2", "max_new_tokens": 8},
    "pipelined": {"cache": "block", "blocks": paradec.PipelinedBlocks(4), "max_new_tokens": 8},
}


def model_of(name: str) -> Model:
    if name in ("causal", "pool", "tree"):
        return paradec.wrap(tiny(2).unwrap(), topology="causal", prediction="shifted", eos_token_id=END)
    return tiny(2, **BLOCKS)


Case = tuple[Model, dict[str, Any]]


@pytest.fixture(scope="module", params=REQUESTS)
def case(request: pytest.FixtureRequest) -> Case:
    request_ = dict(REQUESTS[request.param])
    if request.param == "tree":
        drafter = tiny(1, topology="causal", prediction="shifted", seed=1)
        request_["sampler"] = paradec.samplers.create("speculative", drafter=drafter, tree=(2, 1))
    return model_of(request.param), request_


def random_ids(seed: int, count: int) -> list[int]:
    return torch.randint(0, min(MASK, END), (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CONVERSATIONS = st.fixed_dictionaries({
    "turns": st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 12)), min_size=2, max_size=8),
    "temperature": st.sampled_from([0.0, 0.7]), "memory": st.sampled_from([400, 6000, 10**6]),
    "batch_size": st.integers(1, 3), "cancelled": st.sets(st.integers(0, 7), max_size=2),
})  # fmt: skip


@pytest.mark.thinned
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversation=CONVERSATIONS)
def test_answers_do_not_depend_on_shared_prefixes(case: Case, conversation: dict[str, Any]) -> None:
    check_equal(case, **conversation)


@pytest.mark.full
@pytest.mark.parametrize("name", ["causal", "block"])
@settings(max_examples=250, deadline=None)
@given(conversation=CONVERSATIONS)
def test_answers_of_500_conversations_do_not_depend_on_shared_prefixes(name: str, conversation: Any) -> None:
    check_equal((model_of(name), REQUESTS[name]), **conversation)


def check_equal(case: Case, turns: Any, temperature: float, memory: int, batch_size: int, cancelled: set[int]) -> None:
    """Assert that stored prefixes change no answer. A prompt continues the beginning of an earlier one."""
    model, request_ = case
    prompts = [random_ids(99, 20)]
    for index, (parent, prefix_length, num_new) in enumerate(turns):
        prompts.append(prompts[parent % len(prompts)][:prefix_length] + random_ids(index, num_new + 1))
    request = {**request_, "temperature": temperature, "seed": 5, "logprobs": 1, "batch_size": batch_size}
    outputs = []
    for prefix_memory in (0, memory):
        with Batch(model, prefix_memory=prefix_memory, **request) as batch:
            tickets = [batch.add(prompt) for prompt in prompts]
            for _ in range(2):
                batch.step()
            for index in cancelled:
                batch.cancel(tickets[index % len(tickets)])
            drain(batch)
            assert batch.prefixes is None or batch.prefixes.nbytes <= memory
        outputs.append([ticket.output for ticket in tickets])
    for plain, output in zip(*outputs, strict=True):
        assert isinstance(output.error, Cancelled) == isinstance(plain.error, Cancelled)
        if plain.error is None:
            assert torch.equal(output.sequences, plain.sequences)
            torch.testing.assert_close(output.logprobs.chosen, plain.logprobs.chosen, equal_nan=True)
            assert output.forwarded_tokens <= plain.forwarded_tokens or not sum(output.reused)


def run_conversation(batch: Batch) -> list[Any]:
    prompt, outputs = random_ids(1, 12), []
    for turn in range(3):
        ticket = batch.add(prompt)
        drain(batch)
        assert ticket.output is not None and ticket.output.error is None
        outputs.append(ticket.output)
        prompt = ticket.output.sequences[0].tolist() + random_ids(10 + turn, 3)
    return outputs


def test_a_conversation_evaluates_each_turn_once(case: Case) -> None:
    model, request_ = case
    request = {**request_, "logprobs": 1, "temperature": 0.8, "seed": 3}
    plain, outputs = (run_conversation(Batch(model, prefix_memory=memory, **request)) for memory in (0, 10**6))
    for expected, output in zip(plain, outputs, strict=True):
        assert torch.equal(output.sequences, expected.sequences)
        torch.testing.assert_close(output.logprobs.chosen, expected.logprobs.chosen, equal_nan=True)
    block = 4 if model.facts.topology == "block_causal" else 16
    for before, after in zip(outputs, outputs[1:], strict=False):
        length = before.sequences.shape[1]
        assert length - 2 * block < after.reused[0] <= length, (length, after.reused)


def test_prompts_that_start_together_evaluate_their_shared_prefix_once() -> None:
    model, shared = model_of("block"), random_ids(3, 24)
    prompts = [shared + random_ids(index, 2) for index in range(4)]
    with Batch(model, batch_size=4, prefix_memory=10**6, cache="block", max_new_tokens=4) as batch:
        tickets = [batch.add(prompt) for prompt in prompts]
        drain(batch)
        assert [ticket.output.reused for ticket in tickets] == [[24]] * 4 and batch.prefixes is not None
        assert (batch.prefixes.hits, batch.prefixes.saved_positions) == (4, 96)
        counts = [ticket.output.forwarded_tokens for ticket in tickets]
        assert counts[0] - counts[1] == 24


@pytest.mark.parametrize("name", ["causal", "block"])
def test_running_and_cancelled_rows_share_their_prefix(name: str) -> None:
    model, prompt = model_of(name), random_ids(3, 34)
    with Batch(model, batch_size=3, prefix_memory=10**6, **REQUESTS[name]) as batch:
        first = batch.add(prompt, max_new_tokens=40)
        batch.step()
        second = batch.add(prompt + random_ids(1, 2))
        batch.step()
        assert not first.done and batch.prefixes is not None and batch.prefixes.saved_positions == 32
        drain(batch)
        third, nbytes = batch.add(random_ids(4, 34), max_new_tokens=40), batch.prefixes.nbytes
        batch.step()
        assert batch.prefixes.nbytes == nbytes  # a running row without a shared prefix copies nothing
        batch.cancel(third)
        drain(batch)
        assert second.output.reused == [32] and batch.prefixes.nbytes > nbytes
    assert batch.prefixes.nbytes == 0  # the batch is closed


def test_other_salts_and_new_weights_reuse_no_prefix() -> None:
    model, prompt = model_of("block"), random_ids(3, 24)
    with Batch(model, prefix_memory=10**6, cache="block", max_new_tokens=4) as batch:
        reused = []
        for salt in (None, "a", "b", "a", None):
            ticket = batch.add(prompt, cache_salt=salt)
            drain(batch)
            reused.append(sum(ticket.output.reused))
        assert reused == [0, 0, 0, 24, 24]
        with torch.no_grad():
            next(model.module.parameters()).mul_(1.5)
        ticket = batch.add(prompt)
        drain(batch)
        assert ticket.output.reused == [0]
        assert torch.equal(ticket.output.sequences, paradec.generate(model, [prompt], max_new_tokens=4).sequences)


def test_a_row_stores_no_prefix_if_the_weights_change_meanwhile() -> None:
    model, prompt = model_of("causal"), random_ids(3, 34)
    with Batch(model, batch_size=2, prefix_memory=10**6, sampler="sjd", max_new_tokens=12) as batch:
        first = batch.add(prompt)
        batch.step()
        with torch.no_grad():
            next(model.module.parameters()).mul_(2.0)
        second = batch.add(random_ids(4, 34), max_new_tokens=1)
        while not first.done:
            batch.step()
        repeated = batch.add(prompt)
        drain(batch)
        assert second.output.reused == repeated.output.reused == [0]


@pytest.mark.thinned
@pytest.mark.parametrize("first", [{"cache": "none"}, {"cache": "dkv_decode"}, {"sampler": "self_speculative"}])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_rows_with_and_without_shared_prefixes_are_decoded_together(first: Any, is_reversed: bool) -> None:
    model, shared, pair = model_of("block"), random_ids(3, 24), (first, {"cache": "block"})
    with Batch(model, batch_size=2, prefix_memory=10**6, max_new_tokens=12, seed=1) as batch:
        tickets = []
        for index, request in enumerate(reversed(pair) if is_reversed else pair):
            tickets.append((batch.add(shared + random_ids(index, 2), alone=True, **request), request))
            batch.step()
        drain(batch)
    for ticket, request in tickets:
        plain = paradec.generate(model, ticket.prompts.rows, max_new_tokens=12, seed=1, **request)
        assert ticket.output.error is None and torch.equal(ticket.output.sequences, plain.sequences)


def test_changes_of_adapters_dtype_and_attention_drop_all_prefixes() -> None:
    module = tiny(2).unwrap()
    model = paradec.wrap(module, topology="causal", prediction="shifted", eos_token_id=END)
    request: dict[str, Any] = {"sampler": "sjd", "max_new_tokens": 4}

    def reused() -> int:
        ticket = batch.add(random_ids(3, 33))
        drain(batch)
        assert torch.equal(ticket.output.sequences, paradec.generate(model, [random_ids(3, 33)], **request).sequences)
        return sum(ticket.output.reused)

    with Batch(model, prefix_memory=10**6, **request) as batch:
        assert [reused(), reused()] == [0, 32]
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, module)  # transformers 5.24's load_adapter needs peft 0.22
        layers = [part for part in module.modules() if isinstance(part, BaseTunerLayer)]
        assert [reused(), reused()] == [0, 32]
        changes: list[Callable[[Any], Any]] = [
            lambda layer: layer.enable_adapters(False),
            lambda layer: layer.enable_adapters(True),
            lambda layer: layer.scale_layer(4.0),
            lambda layer: layer.set_scale("default", 6.0),
            lambda layer: layer.scaling.update(default=torch.tensor(2.0, dtype=torch.float64)),
            lambda layer: layer.scaling["default"].fill_(3.0),
        ]
        for change in changes:
            for layer in layers:
                change(layer)
            assert [reused(), reused()] == [0, 32]
        with rescale_adapter_scale(module, 0.5):
            assert [reused(), reused()] == [0, 32]
        assert [reused(), reused()] == [0, 32]
        for layer in layers:
            layer.merge()
        assert [reused(), reused()] == [0, 32]
        module.set_attn_implementation("eager")  # eager attention has no store
        assert [reused(), reused()] == [0, 0]
    module.set_attn_implementation("sdpa")
    module.float()
    with Batch(model, prefix_memory=10**6, **request) as batch:
        assert [reused(), reused()] == [0, 32]
        module.double()
        assert reused() == 0


def test_a_row_with_nan_logits_stores_no_prefix() -> None:
    model, prompt = model_of("block"), random_ids(3, 16)
    with Batch(Failing(model, token=prompt[-1]), prefix_memory=10**6, cache="block", max_new_tokens=4) as batch:
        ticket = batch.add(prompt)
        drain(batch)
        assert isinstance(ticket.output.error, FloatingPointError)
        assert batch.prefixes is not None and len(batch.prefixes.tree) == 0


@pytest.mark.parametrize("request_", [{}, {"cache": "block", "guidance_scale": 2.0}], ids=["no store", "guidance"])
def test_requests_without_shared_prefixes_store_nothing(request_: dict[str, Any]) -> None:
    with Batch(tiny(1, **BLOCKS), max_new_tokens=4, **request_) as batch:
        for _ in range(2):
            ticket = batch.add(random_ids(3, 24))
            drain(batch)
        assert ticket.output.reused == [0] and batch.prefixes.nbytes == 0


def test_bidirectional_models_store_no_prefixes() -> None:
    assert Batch(tiny(1), cache="prefix", max_new_tokens=4).prefixes is None
    refuses(lambda: Batch(tiny(1), prefix_memory=5, max_new_tokens=4), "prefix_memory=5 has nothing to keep")
