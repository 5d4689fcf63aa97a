"""`update_weights`: names, waiting for requests, versions, and prefixes stored with older weights."""

import copy
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from checkpoints import golden_moe
from decoding import refuses
from places import GOLDEN
from safetensors.torch import load_file
from small_models import tiny
from torch import Tensor

import paradec
from paradec.batching import Batch
from paradec.models.adapter import Model

ROWS = [[3, 5, 7, 9, 11], [2], [20, 21, 22]]
REQUEST: dict[str, Any] = {"max_new_tokens": 8, "sampler": "low_confidence"}


def perturb(model: Model, std: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + std * torch.randn(tensor.shape, generator=generator).to(tensor)
        for name, tensor in model.module.state_dict().items()
    }


def decode_tokens(model: Model, **request: Any) -> Tensor:
    return paradec.generate(model, ROWS, **REQUEST, **request).sequences


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "llada2-tiny", "sdar-moe-tiny"])
def test_weights_with_published_names_restore_the_model(name: str) -> None:
    folder = GOLDEN / "moe" / name if (GOLDEN / "moe" / name).exists() else GOLDEN / name
    model = copy.deepcopy(golden_moe(name)) if folder.parent.name == "moe" else paradec.load(folder, dtype="float32")
    before = decode_tokens(model)
    original = {key: tensor.clone() for key, tensor in model.module.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in model.module.parameters()]
    assert model.update_weights(perturb(model, 0.05)) == 1
    assert not torch.equal(model.module.state_dict()[next(iter(original))], original[next(iter(original))])
    files = {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}
    published = {key: tensor for key, tensor in files.items() if key in model.published.names.values()}
    assert model.update_weights({key: tensor.double() for key, tensor in published.items()}) == 2
    assert all(torch.equal(tensor, original[key]) for key, tensor in model.module.state_dict().items())
    assert torch.equal(decode_tokens(model), before)
    assert addresses == [parameter.data_ptr() for parameter in model.module.parameters()]


def test_versions_count_updates() -> None:
    model = tiny(2)
    first = paradec.generate(model, ROWS, rollout=True, **REQUEST).rollout
    twin = paradec.wrap(model.module, mask_token_id=40, topology="bidirectional", prediction="same")
    assert (first.version, model.weights_version, twin.weights_version) == (0, 0, 0)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    paradec.replay(model, first).nansum().backward()
    optimizer.step()
    assert model.weights_version == 1  # the optimizer's step is an update
    assert twin.update_weights(perturb(model)) == model.weights_version == 2
    second = paradec.generate(model, ROWS, rollout=True, **REQUEST).rollout
    assert (first.version, second.version) == (0, 2) and second.exact
    assert (paradec.replay(model, first) - first.logp).nan_to_num().abs().max() > 0.01
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.weights_version == 0 and other.update_weights({}) == 1
    assert model.weights_version == 2


def test_updates_during_a_request_are_reported() -> None:
    model = tiny(2)

    def change_weights(state: Any, commit: Any) -> None:
        with torch.no_grad():
            model.module.lm_head.weight.mul_(1.01)

    output = paradec.generate(model, ROWS, rollout=True, callback=change_weights, **REQUEST).rollout
    assert output.approximation == "weights that changed while decoding" and output.version == 0


@pytest.mark.parametrize("mode", ["normally", "in inference mode"])
def test_prefixes_and_states_of_older_weights_are_refused(mode: str) -> None:
    with torch.inference_mode(mode != "normally"):
        model = tiny(2, "block_causal")
    assert model.module.lm_head.weight.is_inference() == (mode != "normally")
    arguments: dict[str, Any] = {**REQUEST, "cache": "block"}
    prefix = paradec.generate(model, [list(range(20))], keep_prefix=True, **arguments).prefix
    batch = Batch(model, batch_size=2, prefix_memory=2**20, **arguments)

    def decode() -> tuple[Any, int]:
        ticket = batch.add(list(range(20)))
        while not ticket.done:
            batch.step()
        return ticket.output.sequences, batch.prefixes.hits

    assert torch.equal(decode()[0], decode()[0]) and decode()[1] == 2
    model.update_weights(perturb(model))
    refuses(
        lambda: paradec.generate(model, [list(range(20))], prefix=prefix, **arguments), "was kept before the weights"
    )
    fresh = paradec.generate(model, [list(range(20))], **arguments).sequences
    repeated, hits = decode()
    assert torch.equal(repeated, fresh) and hits == 2


def test_wrong_weights_are_refused_before_anything_is_written() -> None:
    model = tiny(2)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    good, head = perturb(model), "lm_head.weight"
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"not a weight of Llama.* \(did you mean 'lm_head.weight'\?", {"lm_head.weigth": good[head]}),
        (ValueError, r"is torch.float64 \[3\]; .* has torch.float64 \[41, 32\]", {head: good[head][0, :3]}),
        (ValueError, r"is torch.int64 \[41, 32\]", {head: good[head].long()}),
        (TypeError, "must be a tensor", {head: [1.0]}),
    ]
    for kind, message, entry in wrong:
        with pytest.raises(kind, match=message):
            model.update_weights({name: tensor for name, tensor in good.items() if name != head} | entry)
    with pytest.raises(TypeError, match="state_dict=None must be a mapping"):
        model.update_weights(None)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert model.weights_version == 0


def test_updates_in_the_thread_of_a_request_are_refused() -> None:
    model = tiny(1)

    def update(state: Any, commit: Any) -> None:
        model.update_weights({})

    with pytest.raises(RuntimeError, match="a request of LlamaForCausalLM runs in this thread"):
        paradec.generate(model, ROWS, callback=update, **REQUEST)
    assert model.update_weights({}) == 1  # the failed request has ended


def test_updates_during_a_batch_are_refused() -> None:
    model = tiny(1)
    outputs = paradec.generate_many(model, ROWS, batch_size=1, **REQUEST)
    next(outputs)
    batch = Batch(model, batch_size=2, **REQUEST)
    tickets = [batch.add(row) for row in ROWS]
    batch.step()
    refuses(lambda: model.update_weights({}), "rows of LlamaForCausalLM are being decoded in a batch", RuntimeError)
    list(outputs)
    while not all(ticket.done for ticket in tickets):
        batch.step()
    assert model.update_weights({}) == 1


def test_threads_decode_with_one_version_or_the_other() -> None:
    model = tiny(2)
    states = model.module.state_dict(), perturb(model)
    old, new = ({name: tensor.clone() for name, tensor in state.items()} for state in states)
    expected = []
    for weights in (new, old):
        model.update_weights(weights)
        expected.append(decode_tokens(model).tolist())
    actual, over = list[Any](), threading.Event()

    def decode() -> None:
        while not over.is_set():
            actual.append(paradec.generate(model, ROWS, rollout=True, **REQUEST))

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(6):
        time.sleep(0.02)
        model.update_weights((new, old)[number % 2])
    over.set()
    for thread in threads:
        thread.join()
    assert actual and all(output.rollout.exact for output in actual)
    assert {str(output.sequences.tolist()) for output in actual} <= {str(each) for each in expected}
    for output in actual:
        assert output.sequences.tolist() == expected[1 - output.rollout.version % 2]


def test_an_update_waits_while_nested_requests_continue() -> None:
    model, order = tiny(1), list[str]()
    inside, requested = threading.Event(), threading.Event()

    def update() -> None:
        inside.wait()
        requested.set()
        model.update_weights({})
        order.append("update")

    def nested(state: Any, commit: Any) -> None:
        if state.commits == 1:
            inside.set()
            requested.wait()
            time.sleep(0.05)  # the update is waiting now
            decode_tokens(model)
            order.append("nested")

    thread = threading.Thread(target=update)
    thread.start()
    paradec.generate(model, ROWS, callback=nested, **REQUEST)
    thread.join(10)
    assert order == ["nested", "update"]
