"""`paradec.wrap`: masked and causal language models of transformers, and custom modules."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoding import fits, refuses, supported_fields
from places import GOLDEN, TESTS
from small_models import (
    ENCODERS,
    ROWS,
    UNPADDED_ENCODERS,
    WRAP_END,
    WRAP_IDS,
    WRAP_MASK,
    Opaque,
    decoder,
    encoder,
    random_ids,
    wrap_kind,
)
from torch import Tensor, nn

import paradec
from paradec import samplers
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.models.cache_argument import cache_argument, cache_keyword


def call(model: Model, ids: Tensor, wanted: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    rows, length = ids.shape
    positions = torch.arange(length).expand(rows, length)
    query = Query(rows=torch.arange(rows).numpy(), tokens=ids, positions=positions, wanted=wanted, valid=valid)
    with torch.inference_mode():
        return model(query)


@pytest.mark.parametrize("name", ENCODERS + UNPADDED_ENCODERS)
def test_wrapped_encoders_return_the_module_logits(name: str) -> None:
    module, ids = encoder(name).eval(), random_ids(2, 9)
    with torch.inference_mode():
        expected = module(input_ids=ids).logits
    model = paradec.wrap(module, **WRAP_IDS)
    assert model.kind == "encoder"
    assert (model.facts.prediction, model.facts.topology) == ("same", "bidirectional")
    torch.testing.assert_close(call(model, ids), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("topology", ["bidirectional", "block_causal", "causal"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_topologies_set_the_attention_of_decoders(name: str, topology: str, attn_implementation: str) -> None:
    module, ids = decoder(name).eval(), random_ids(2, 10)
    query, key = torch.arange(10).unsqueeze(1), torch.arange(10)
    masks = {"bidirectional": query >= 0, "causal": key <= query, "block_causal": key // 4 <= query // 4}
    mask = torch.zeros(10, 10, dtype=torch.float64).masked_fill(~masks[topology], -torch.inf)
    module.set_attn_implementation("eager")  # accepts an additive mask
    with torch.inference_mode():
        expected = module(input_ids=ids, attention_mask=mask[None, None], use_cache=False).logits
    extra = {"block_length": 4} if topology == "block_causal" else {}
    options = {"prediction": "same", "topology": topology, "attn_implementation": attn_implementation}
    model = paradec.wrap(module, **options, **extra, **WRAP_IDS)
    torch.testing.assert_close(call(model, ids), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["llada", "Llama bidirectional", "Qwen2 block_causal"])
def test_padding_columns_see_themselves(kind: str) -> None:
    """A position that may see only padding attends to itself: a softmax over no keys is undefined."""
    model, seen, pair = wrap_kind(kind), [], torch.arange(6) // 2
    masks = {"valid": torch.arange(6) < torch.tensor([[6], [4]]), "visible": (pair[:, None] == pair).expand(2, -1, -1)}
    query = Query(np.arange(2), random_ids(2, 6), torch.arange(6).expand(2, 6), **masks)
    hook = model.module.register_forward_pre_hook(
        lambda *call: seen.append(call[2]["attention_mask"]), with_kwargs=True
    )
    model(query)
    hook.remove()
    assert seen[0].any(-1).all() and not seen[0].all()


@pytest.mark.parametrize("kind", ["llada", "Bert", "ModernBert", "Llama bidirectional", "Qwen3 causal", "Opaque"])
def test_the_output_matrix_runs_on_wanted_positions_only(kind: str) -> None:
    model, ids = wrap_kind(kind), random_ids(2, 9)
    wanted = torch.tensor([[3, 4, 8], [0, 2, 7]])
    head = model.module.head if kind == "Opaque" else model.module.get_output_embeddings()
    seen: list[int] = []
    head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    selected = call(model, ids, wanted)
    everything = call(model, ids)
    expected = everything.gather(1, wanted.unsqueeze(-1).expand(-1, -1, everything.shape[-1]))
    torch.testing.assert_close(selected, expected, rtol=0, atol=1e-12)
    assert seen == ([18, 18] if kind == "Opaque" else [6, 18])


def test_heads_that_bypass_the_base_model() -> None:
    # OPT's head reads a submodule of its base model
    config = transformers.OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )
    torch.manual_seed(0)
    module = transformers.OPTForCausalLM(config).double()
    model = paradec.wrap(module, prediction="shifted", topology="bidirectional", **WRAP_IDS)
    wanted = torch.tensor([[1, 2]])
    torch.testing.assert_close(call(model, random_ids(1, 6), wanted), call(model, random_ids(1, 6))[:, 1:3])


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("remote") / "llada"
    shutil.copytree(GOLDEN / "llada-tiny", folder)
    for file in (TESTS / "remote_code").glob("*.py"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_llada.LLaDAModelLM"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
        module = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
    assert type(module).__module__.startswith("transformers_modules.")
    return module


@pytest.fixture
def wrapped_remote(remote: Any) -> Model:
    remote.calls.clear()
    return paradec.wrap(
        remote, mask_token_id=63, eos_token_id=61, pad_token_id=61, prediction="same", topology="bidirectional"
    )


def test_remote_code_returns_the_loader_logits(wrapped_remote: Model, remote: Any) -> None:
    assert wrapped_remote.kind == "opaque"
    assert not wrapped_remote.supports_store
    assert wrapped_remote.facts.max_length == 512  # max_sequence_length in LLaDA's config
    ids = random_ids(2, 9)
    loaded = paradec.load(GOLDEN / "llada-tiny", dtype="float64")
    torch.testing.assert_close(call(wrapped_remote, ids), call(loaded, ids), rtol=0, atol=1e-5)
    wanted = torch.tensor([[1, 8], [0, 3]])
    selected = call(wrapped_remote, ids, wanted)
    assert torch.equal(selected, torch.stack([call(wrapped_remote, ids)[row, wanted[row]] for row in (0, 1)]))


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in samplers.names() if samplers.get(name).family == "masked"])
def test_remote_code_decodes_like_the_loaded_checkpoint(
    wrapped_remote: Model, remote: Any, llada64: Model, name: str
) -> None:
    request = {"sampler": name, "max_new_tokens": 8, "block_length": 4, "temperature": 0.5, "seed": 5}
    request = supported_fields(name, request)
    prompts = [[3, 14, 15], [9, 26, 5, 35, 8], [9, 7, 9]]
    if not fits(name, wrapped_remote):  # some samplers need attention masks, which opaque modules do not accept
        refuses(lambda: paradec.generate(wrapped_remote, prompts, **request), f"sampler {name!r}.* LLaDAModelLM is ")
        return
    output = paradec.generate(wrapped_remote, prompts, **request)
    expected = paradec.generate(llada64, prompts, **request)
    assert output.new_tokens.tolist() == expected.new_tokens.tolist()
    assert output.row_nfe == expected.row_nfe
    assert {length for _, length in remote.calls} == {11, 13}  # never padded: rows of one length share a call


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda ids: None, "returned no logits"),
        (lambda ids: (torch.zeros(*ids.shape, 10),), "returned no logits"),
        (lambda ids: torch.zeros(*ids.shape, 11), r"returned logits of shape \(1, 4, 11\); expected shape"),
        (lambda ids: torch.zeros(ids.shape[0], 10), r"returned logits of shape \(1, 10\)"),
    ],
)
def test_wrong_outputs_of_modules_are_refused(output: Any, message: str) -> None:
    class Odd(nn.Module):
        config = SimpleNamespace(vocab_size=10)

        def forward(self, ids: Tensor) -> Any:
            return output(ids)

    model = paradec.wrap(Odd(), prediction="same", topology="bidirectional", mask_token_id=9)
    refuses(lambda: paradec.generate(model, [1], max_new_tokens=3), f"module Odd {message}")


KINDS = [
    "llada", "dream", *ENCODERS, *UNPADDED_ENCODERS, "Llama bidirectional", "Qwen2 block_causal", "Qwen3 bidirectional",
    "Opaque", "OpaqueWithOutput",
]  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_equal_rows_alone(kind: str, side: str) -> None:
    model = wrap_kind(kind)
    width = max(map(len, ROWS))
    ids, mask = torch.full((len(ROWS), width), 30), torch.zeros(len(ROWS), width, dtype=torch.long)
    for row, prompt in enumerate(ROWS):
        columns = slice(width - len(prompt), width) if side == "left" else slice(len(prompt))
        ids[row, columns], mask[row, columns] = torch.tensor(prompt), 1
    request = {"max_new_tokens": 6, "sampler": "low_confidence", "trace": True}
    batch = paradec.generate(model, input_ids=ids, attention_mask=mask, **request)
    for row, prompt in enumerate(ROWS):
        alone = paradec.generate(model, [prompt], **request)
        assert batch.new_tokens[row].tolist() == alone.new_tokens[0].tolist()
        assert batch.row_nfe[row] == alone.row_nfe[0]
        ours, theirs = (
            [entry[1:] for step in out.trace.steps for entry in step.commits if entry[0] == row_id]
            for out, row_id in ((batch, row), (alone, 0))
        )
        assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
        confidences = ([entry[2] for entry in entries] for entries in (ours, theirs))
        assert next(confidences) == pytest.approx(next(confidences), abs=1e-6)


def test_roberta_positions_start_after_the_padding_id() -> None:
    model = wrap_kind("Roberta")
    assert model.facts.max_length == 46  # two of the 48 position embeddings are never used
    assert paradec.generate(model, [[8, 9, 10]], max_new_tokens=43, sampler="threshold").new_tokens.shape == (1, 43)
    refuses(lambda: paradec.generate(model, [[8, 9, 10]], max_new_tokens=44), r"= 47 is longer than RobertaForMaskedLM")
    assert wrap_kind("Bert").facts.max_length == 48


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (encoder, {}),
        (decoder, {"prediction": "same", "topology": "bidirectional"}),
        (decoder, {"prediction": "shifted", "topology": "block_causal", "block_length": 4}),
        (decoder, {"prediction": "shifted", "topology": "causal"}),
        (Opaque, {"prediction": "same", "topology": "bidirectional"}),
    ],
)
def test_unwrap_leaves_the_module_as_it_was(make: Any, facts: dict[str, Any]) -> None:
    module, ids = make(), random_ids(2, 9)
    module.train()
    state = {name: value.clone() for name, value in module.state_dict().items()}

    def plain() -> Tensor:
        module.eval()
        with torch.inference_mode():
            output = module(ids)
        return output if isinstance(output, Tensor) else output.logits

    before = plain()
    attention = getattr(module.config, "_attn_implementation", None)
    model = paradec.wrap(module.train(), **facts, **WRAP_IDS)
    assert not any(part.training for part in module.modules())
    call(model, ids, wanted=torch.tensor([[1], [2]]))
    if facts.get("topology") != "causal":
        paradec.generate(model, ROWS, max_new_tokens=4)
    assert model.unwrap() is module
    assert getattr(module.config, "_attn_implementation", None) == attention
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()) == 0
    assert torch.equal(plain(), before)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    model.unwrap()  # a second call does nothing


FACTS = {"prediction": "same", "topology": "bidirectional"}


def without_vocabulary(module: Any) -> Any:
    module.config.vocab_size = None
    return module


def gpt2() -> Any:
    ids = {"vocab_size": 40, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **ids))


@pytest.mark.parametrize(
    ("make", "facts", "message"),
    [
        (decoder, {}, "prediction is needed to wrap LlamaForCausalLM: 'same' or 'shifted'"),
        (decoder, {"prediction": "same"}, "topology is needed to wrap LlamaForCausalLM: 'bidirectional',"),
        (decoder, FACTS | {"mask_token_id": None}, "mask_token_id is needed to wrap LlamaForCausalLM"),
        (decoder, {"prediction": "same", "topology": "block_causal"}, "block_length=None must be an integer"),
        (decoder, FACTS | {"block_length": 4}, "block_length=4 is only for topology='block_causal', 'causal_context'"),
        (decoder, FACTS | {"topology": "diagonal"}, "unknown topology: 'diagonal'"),
        (decoder, FACTS | {"mask_token_id": WRAP_END}, "mask_token_id=7 is also an end-of-text id"),
        (decoder, FACTS | {"pad_token_id": WRAP_MASK}, "pad_token_id=5 is also the mask id"),
        (decoder, FACTS | {"eos_token_id": [7, 40]}, "eos_token_id=40"),
        (decoder, FACTS | {"attn_implementation": "flash_attention_2"}, "attn_implementation='flash_attention_2'"),
        (encoder, {"mask_token_id": None}, "mask_token_id is needed to wrap BertForMaskedLM"),
        (encoder, {"prediction": "shifted"}, "prediction='shifted', topology='bidirectional' do not fit"),
        (lambda: encoder(is_decoder=True), {}, "config.is_decoder=True makes BertForMaskedLM causal"),
        (lambda: encoder(return_dict=False), {}, "config.return_dict=False of BertForMaskedLM"),
        (lambda: without_vocabulary(Opaque()), FACTS, "Opaque has no config.vocab_size"),
        (lambda: decoder("Mistral"), FACTS, "config.sliding_window=4096 of MistralForCausalLM"),
        (lambda: decoder("Gemma2"), FACTS, "config.layer_types=.'sliding_attention'. of Gemma2ForCausalLM"),
        (gpt2, FACTS, "topology='bidirectional' is not available for GPT2LMHeadModel"),
        (lambda: decoder().model, FACTS, "module LlamaModel has no language-model head"),
    ],
)
def test_missing_and_wrong_facts_are_named(make: Any, facts: dict[str, Any], message: str) -> None:
    module = make()
    attention = getattr(module.config, "_attn_implementation", None)
    assert "\n" not in refuses(lambda: paradec.wrap(module, **(WRAP_IDS | facts)), message)
    assert getattr(module.config, "_attn_implementation", None) == attention
    assert module.training


def test_ids_come_from_the_tokenizer() -> None:
    tokenizer = SimpleNamespace(mask_token_id=WRAP_MASK, eos_token_id=WRAP_END)
    facts = paradec.wrap(encoder(), tokenizer=tokenizer).facts
    assert (facts.mask_token_id, facts.eos_token_ids) == (WRAP_MASK, (WRAP_END,))
    facts = paradec.wrap(encoder(), tokenizer=tokenizer, mask_token_id=6, eos_token_id=[8, 9], max_length=20).facts
    assert (facts.mask_token_id, facts.eos_token_ids, facts.max_length) == (6, (8, 9), 20)


@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias", "indices"])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_refuses_what_it_does_not_compute(name: str, extra: str) -> None:
    from paradec.models import attention

    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"attention with {extra} is not supported"):
        attention.IMPLEMENTATIONS[name](nn.Module(), q, q, q, None, **{extra: torch.ones(1)})
    with pytest.raises(ValueError, match="sliding_window=2 is shorter than the 3 positions"):
        attention.IMPLEMENTATIONS[name](nn.Module(), q, q, q, None, sliding_window=2)
    # a window as long as the input hides nothing
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    module = nn.Module()
    full, wide = (attention.IMPLEMENTATIONS[name](module, q, q, q, None, sliding_window=size)[0] for size in (None, 3))
    assert torch.equal(full, wide)


def test_the_cache_keyword_matches_the_module() -> None:
    """transformers 5.24 renamed past_key_values to cache. Custom classes may have either name or **kwargs."""

    class NewName(nn.Module):
        def forward(self, input_ids: Tensor, cache: Any = None) -> Any:
            return cache

    class OldName(NewName):
        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
            return past_key_values

    class Forwarding(NewName):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Uncached(nn.Module):
        def forward(self, input_ids: Tensor) -> None:
            return None

    for module in (NewName(), OldName(), Forwarding()):
        assert module(torch.tensor([1]), **cache_keyword(module, "it")) == "it"
    assert cache_argument(Uncached()) is None
    assert cache_argument(decoder()) in type(decoder()).forward.__annotations__
