"""The module of a model: evaluation mode, attention, threads, devices, quantised weights, adapters, memory."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import covering, refuses, run_in_threads
from every_model import EVERY, decode_briefly, expected, shared_model
from places import GOLDEN
from small_models import ROWS, WRAP_IDS, Opaque, decoder, encoder, random_ids
from torch import Tensor, nn

import paradec
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.models.checkpoint import CheckpointError
from paradec.models.int8 import Int8Config
from paradec.models.request_memory import request_memory

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "bidirectional": {"topology": "bidirectional", "prediction": "same"},
    "block_causal": {"topology": "block_causal", "prediction": "shifted", "block_length": 4},
    "causal": {"topology": "causal", "prediction": "shifted"},
    "eager": {"topology": "bidirectional", "prediction": "same", "attn_implementation": "eager"},
}


class OpaqueWithDropout(Opaque):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.drop(torch.ones((), dtype=torch.float64))


IDS9 = random_ids(2, 9)


def logits(model: Model, **fields: Any) -> Tensor:
    positions = torch.arange(9).expand(2, 9)
    return model(Query(rows=torch.arange(2).numpy(), tokens=IDS9, positions=positions, **fields))


def plain_logits(module: Any) -> Tensor:
    with torch.inference_mode():
        return module(input_ids=IDS9).logits


def test_models_of_one_module() -> None:
    """Models of one module work side by side if their attention is equal. Otherwise only the newest works."""
    module = decoder()
    first, second = (paradec.wrap(module, **TOPOLOGIES[name], **WRAP_IDS) for name in ("bidirectional", "block_causal"))
    assert not torch.equal(logits(first), logits(second))
    expected, causal = logits(first), paradec.wrap(module, **TOPOLOGIES["causal"], **WRAP_IDS)
    assert torch.equal(logits(causal), plain_logits(module))
    refuses(lambda: logits(first), "wrapped anew or changed: its attention is 'sdpa'", RuntimeError)
    causal.unwrap()
    assert torch.equal(logits(first), expected)
    module.set_attn_implementation("eager")
    refuses(lambda: logits(second), "its attention is 'eager'", RuntimeError)
    second.unwrap()
    assert module.config._attn_implementation == "eager"  # as the user set it above


WITH_DROPOUT: dict[str, Callable[[], Any]] = {
    "encoder": lambda: encoder(hidden_dropout_prob=0.5),
    "decoder": lambda: decoder(attention_dropout=0.5),
    "opaque": lambda: OpaqueWithDropout(),
}


@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_a_module_in_training_mode_is_refused(kind: str) -> None:
    module = WITH_DROPOUT[kind]()
    model = paradec.wrap(module, **({} if kind == "encoder" else TOPOLOGIES["bidirectional"]), **WRAP_IDS)
    tokens = paradec.generate(model, ROWS, max_new_tokens=6).new_tokens
    module.train()
    refuses(lambda: paradec.generate(model, ROWS, max_new_tokens=6), r"is in training mode", RuntimeError)
    module.eval()
    assert torch.equal(paradec.generate(model, ROWS, max_new_tokens=6).new_tokens, tokens)


def test_layers_that_bypass_the_attention_are_refused() -> None:
    """Without this error, such a module would decode with its causal mask."""
    module = decoder()
    model = paradec.wrap(module, **TOPOLOGIES["bidirectional"], **WRAP_IDS)
    for layer in module.model.layers:
        layer.self_attn.config = copy.copy(module.config)
        layer.self_attn.config._attn_implementation = "sdpa"
    refuses(lambda: logits(model), "does not attend through transformers' AttentionInterface", RuntimeError)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", EVERY)
def test_two_threads_on_one_model(kind: str) -> None:
    model, interval = shared_model(kind), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        outputs = run_in_threads(lambda: decode_briefly(model, kind, 0), lambda: decode_briefly(model, kind, 1))
    finally:
        sys.setswitchinterval(interval)
    assert all(map(torch.equal, outputs, (expected(kind), expected(kind, seed=1)))), outputs


def offload(module: Any) -> Any:
    from accelerate import dispatch_model

    device_map = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    return dispatch_model(module, {**device_map, "lm_head": "cpu"}, main_device="cpu", force_hooks=True)


def quantise(module: Any) -> Any:
    """Quantise all weights but the output matrix, whose rounded inputs would depend on the evaluated columns."""
    head = module.lm_head.float()
    module = torch.ao.quantization.quantize_dynamic(module.float(), {nn.Linear}, dtype=torch.qint8)
    module.lm_head = head
    return module


def adapt(module: Any) -> Any:
    from peft import LoraConfig

    try:
        module.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    except ValueError as error:
        pytest.skip(str(error))  # transformers needs another version of peft
    return module.double()


def compile_module(module: Any) -> Any:
    module.compile(backend="eager")
    return module


def override(module: Any) -> Any:
    class Capped(type(module)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.tanh()
            return output

    module.__class__ = Capped
    return module


EDITS = {"device_map": offload, "quantised": quantise, "peft": adapt, "compiled": compile_module, "own": override}


@pytest.mark.filterwarnings("ignore")  # torch's quantisation is deprecated
@pytest.mark.parametrize(("edit", "topology"), covering(EDITS, ["bidirectional", "causal"]))
def test_logits_equal_those_of_the_module(edit: str, topology: str) -> None:
    torch.manual_seed(0)
    module = EDITS[edit](decoder().eval()).eval()
    plain_module = decoder().eval()
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask = (mask if topology == "bidirectional" else mask.tril())[None, None]
    module.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected, of_plain = (part(input_ids=IDS9, attention_mask=mask).logits for part in (module, plain_module))
    model = paradec.wrap(module, **TOPOLOGIES[topology], **WRAP_IDS)
    assert model.kind == "decoder"
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
    assert (edit in ("device_map", "compiled")) == torch.allclose(expected.double(), of_plain, atol=1e-4)
    wanted = torch.tensor([[1, 8], [0, 3]])
    columns = wanted.unsqueeze(-1).expand(-1, -1, expected.shape[-1])
    torch.testing.assert_close(logits(model, wanted=wanted), expected.gather(1, columns), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "moe/llada2-tiny", "moe/sdar-moe-tiny"])
def test_memory_needed_by_a_folder_matches_the_loaded_model(name: str) -> None:
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
def test_memory_counts_int8_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Config, "min_weights", 256)
    model = paradec.load(GOLDEN / name, dtype="float32", quantization=Int8Config(min_weights=256))
    needed = request_memory(GOLDEN / name, 2, 24, dtype=torch.float32, quantization="int8")
    assert needed.weights == sum(weight.nbytes for weight in model.module.parameters())
    assert needed == request_memory(model, 2, 24)
    exact = request_memory(GOLDEN / name, 2, 24, dtype=torch.float32)
    assert needed.weights < exact.weights and needed.store == exact.store
    refuses(lambda: request_memory(GOLDEN / name, 2, 24, quantization="int4"), "unknown quantization: 'int4'")


def test_memory_of_other_kinds_of_models_is_refused(tmp_path: Path) -> None:
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
