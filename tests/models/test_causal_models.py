"""Plain causal language models of transformers."""

import functools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoding import TensorRecorder, refuses
from safetensors.torch import load_file, save_file
from tokenized_models import byte_level_bpe
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, StopStringCriteria

import paradec
from paradec import samplers

SIZES = {
    "hidden_size": 32, "n_embd": 32, "num_hidden_layers": 3, "n_layer": 3, "num_attention_heads": 4, "n_head": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "sliding_window": 6, "initializer_range": 0.4,
}  # fmt: skip
ROWS = [[3, 5, 7, 9, 11, 13, 15], [4], [20, 21, 22]]


def train_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level_bpe(["<s>", "<|end|>", "<|turn|>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")


WORDS = train_tokenizer()
CHAT = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
VOCAB, END = len(WORDS), 1


def module_of(kind: str, seed: int = 0, **changes: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    config_class = transformers.CONFIG_MAPPING[kind]
    sizes = {name: value for name, value in SIZES.items() if hasattr(config_class(), name)}
    if kind == "llama":
        sizes.pop("sliding_window", None)
    ids = {"vocab_size": VOCAB, "eos_token_id": END, "pad_token_id": 0, "bos_token_id": 0}
    torch.manual_seed(seed)
    return getattr(transformers, CLASSES[kind])(config_class(**(sizes | ids | changes))).double().eval()


def save_model(folder: Path, kind: str = "llama", tokenizer: Any = None, seed: int = 0, **changes: Any) -> Path:
    module_of(kind, seed, **changes).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def greedy_tokens(module: Any, row: list[int], new: int = 12) -> list[int]:
    if hasattr(module.config, "_experts_implementation"):
        module.config._experts_implementation = "eager"  # the others do not support float64
    out = module.generate(
        torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.int64), max_new_tokens=new,
        do_sample=False, use_cache=False,
    )  # fmt: skip
    return out[0, len(row) :].tolist()


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "mamba"])
def test_folders_decode_like_transformers(tmp_path: Path, kind: str) -> None:
    model = paradec.load(save_model(tmp_path, kind), dtype="float64")
    module = getattr(transformers, type(model.module).__name__).from_pretrained(tmp_path, dtype=torch.float64)
    expected = [greedy_tokens(module, row, 8) for row in ROWS]
    assert (model.facts.topology, model.facts.prediction) == ("causal", "shifted")
    assert model.facts.eos_token_ids == (END,) and model.facts.pad_token_id == 0
    assert model.supports_store == (kind in ("llama", "gpt2", "qwen3_moe"))
    for sampler in ("sjd", "jacobi", "scd", samplers.create("speculative", drafter=model, window=4)):
        output = paradec.generate(model, ROWS, sampler=sampler, max_new_tokens=8)
        assert [row[: len(ids)] for row, ids in zip(output.new_tokens.tolist(), expected)] == expected
        alone = paradec.generate(model, [ROWS[1]], sampler=sampler, max_new_tokens=8)
        assert alone.new_tokens[0].tolist() == output.new_tokens[1].tolist()
    assert output.draft_nfe is not None and output.nfe < 8 and min(output.draft_nfe) > 0


def test_facts_come_from_the_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tokenizer=WORDS)
    config = {"eos_token_id": [1, 2], "pad_token_id": 5, "max_new_tokens": 7, "bos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    model = paradec.load(folder)
    assert model.dtype == torch.float64
    assert model.facts.eos_token_ids == (1, 2) and model.facts.pad_token_id == 5
    assert model.default_max_new_tokens == 7 and model.facts.name == folder.name
    assert model.facts.max_length == 128 and model.facts.mask_token_id is None
    output = paradec.generate(model, "one two", sampler="sjd")
    # texts are encoded with the tokenizer's first token, <s>
    assert output.sequences[0, : -output.new_tokens.shape[1]].tolist() == WORDS("one two")["input_ids"]
    assert WORDS("one two")["input_ids"][0] == 0
    model.save_pretrained(tmp_path / "again")
    repeated = paradec.load(tmp_path / "again")
    assert repeated.facts.eos_token_ids == (1, 2)
    assert torch.equal(paradec.generate(repeated, "one two", sampler="sjd").sequences, output.sequences)


def test_shards_load_in_any_dtype(tmp_path: Path) -> None:
    module = module_of("qwen3")
    module.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert paradec.load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    assert torch.equal(paradec.load(tmp_path).module.lm_head.weight, module.lm_head.weight)
    next(tmp_path.glob("model-00002*.safetensors")).unlink()
    refuses(lambda: paradec.load(tmp_path), r"has no model-00002-of-.*, which its index names", paradec.CheckpointError)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({}, {"mask_token_id": 3}, "mask_token_id=3 is for masked models; .* holds a causal language model"),
        ({}, {"block_length": 4}, "block_length=4 is for masked models"),
        ({}, {"attn_implementation": "sparsed"}, "needs a bidirectional transformers decoder"),
        ({"mask_token_id": 3}, {}, "mask_token_id=3 means a masked model.*paradec.wrap"),
        ({"architectures": ["MyForCausalLM"]}, {}, "which is not a class of transformers; .*paradec.wrap"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, "architectures=.'LlamaForSequenceClassification'."),
        ({"is_causal": False}, {}, "written by a module's save_pretrained"),
        ({"num_hidden_layers": 4}, {}, r"missing weights: model.layers.3"),
        ({"num_hidden_layers": 2}, {}, r"unexpected weights: model.layers.2"),
        ({"vocab_size": VOCAB + 1}, {}, r"mismatched weights: .*embed_tokens"),
        ({"quantization_config": {"quant_method": "none"}}, {}, "has no quant_method that transformers knows"),
    ],
)
def test_unsuitable_folders_give_one_line(tmp_path: Path, config: dict, arguments: dict, message: str) -> None:
    folder = save_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    assert "\n" not in refuses(lambda: paradec.load(folder, **arguments), message)


def test_integer_weights_and_adapters_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refuses(lambda: paradec.load(folder), "lm_head.weight is int8", paradec.CheckpointError)
    (folder / "adapter_config.json").write_text("{}")
    refuses(lambda: paradec.load(folder), "adapter_config.json; merge", paradec.CheckpointError)


def test_wrapped_causal_models_need_no_facts() -> None:
    module = module_of("llama")
    model = paradec.wrap(module)
    assert (model.facts.topology, model.facts.prediction, model.facts.eos_token_ids) == ("causal", "shifted", (END,))
    expected = greedy_tokens(module, ROWS[0])
    assert paradec.generate(model, ROWS[0], sampler="sjd", max_new_tokens=12).new_tokens[0].tolist() == expected
    module.generation_config.eos_token_id = [expected[2], 290]
    assert paradec.wrap(module).facts.eos_token_ids == (expected[2], 290)
    assert paradec.wrap(module, eos_token_id=7).facts.eos_token_ids == (7,)
    assert paradec.wrap(module, topology="causal").facts.eos_token_ids == ()
    assert paradec.wrap(module_of("gpt2")).supports_store
    assert paradec.wrap(module, tokenizer=WORDS).facts.mask_token_id is None


def test_ambiguous_modules_need_a_prediction() -> None:
    message = "prediction is needed to wrap LlamaForCausalLM: 'same' or 'shifted'"
    module = module_of("llama")
    with_mask = train_tokenizer()
    with_mask.mask_token = "<|turn|>"
    for facts in ({"mask_token_id": 3}, {"tokenizer": with_mask}):
        refuses(partial(paradec.wrap, module, **facts), message)
    module.config.mask_token_id = 3
    refuses(lambda: paradec.wrap(module), message)
    module = module_of("llama")
    module.config.is_causal = False  # like after paradec.load
    refuses(lambda: paradec.wrap(module), message)
    refuses(lambda: paradec.wrap(module_of("llama"), prediction="shifted"), "topology is needed")


def test_an_encoder_in_a_causal_class_is_refused() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ElectraConfig(**sizes, intermediate_size=24, embedding_size=16)
    module = transformers.ElectraForCausalLM(config)
    refuses(lambda: paradec.wrap(module), "config.is_decoder=False makes ElectraForCausalLM bidirectional")
    refuses(lambda: paradec.wrap(module, prediction="shifted", topology="causal"), "config.is_decoder=False")


def test_a_class_that_is_causal_by_name_alone_is_refused() -> None:
    sizes = {"vocab_size": 40, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "n_langs": 1}
    module = transformers.XLMWithLMHeadModel(transformers.XLMConfig(**sizes))
    refuses(lambda: paradec.wrap(module, topology="causal"), "XLMWithLMHeadModel does not decode token by token")


def test_expert_implementations_that_do_not_fit() -> None:
    module = module_of("qwen3_moe")
    assert module.config._experts_implementation == "grouped_mm"
    refuses(lambda: paradec.wrap(module), "'grouped_mm' of Qwen3MoeForCausalLM has no float64; call module.set_experts")
    module.set_experts_implementation("eager")
    paradec.wrap(module)

    class Custom(transformers.Qwen3MoeForCausalLM):
        pass

    module.config._experts_implementation = "eager"
    with pytest.warns(UserWarning, match="Custom computes its experts one after the other"):
        paradec.wrap(Custom(module.config).float())


def test_modules_of_transformers_can_draft() -> None:
    module, small = module_of("llama"), module_of("qwen3", seed=3)
    model = paradec.wrap(module)
    for drafter in (small, module):
        for tree in (None, (2, 1)):
            sampler = samplers.create("speculative", drafter=drafter, tree=tree)
            output = paradec.generate(model, ROWS, sampler=sampler, max_new_tokens=12)
            expected = [greedy_tokens(module, row) for row in ROWS]
            assert [row[: len(answer)] for row, answer in zip(output.new_tokens.tolist(), expected)] == expected
    assert output.nfe <= 7 and samplers.create("speculative", drafter=small).to_dict()["drafter"] == "Qwen3ForCausalLM"


def test_drafters_with_another_vocabulary_are_refused() -> None:
    module = module_of("llama")
    larger = samplers.create("speculative", drafter=module_of("llama", vocab_size=VOCAB + 1))
    refuses(lambda: paradec.generate(paradec.wrap(module), ROWS, sampler=larger), "drafter LlamaForCausalLM")
    size = len(WORDS)
    backwards = Tokenizer(models.WordLevel({WORDS.convert_ids_to_tokens(size - 1 - i): i for i in range(size)}, "a"))
    strange = paradec.wrap(module, tokenizer=PreTrainedTokenizerFast(tokenizer_object=backwards))
    sampler, model = samplers.create("speculative", drafter=strange), paradec.wrap(module, tokenizer=WORDS)
    message = "has another vocabulary than .*: token 0 is .*, not '<s>'; the"
    assert "\n" not in refuses(lambda: paradec.generate(model, ROWS, sampler=sampler), message)
    same = samplers.create("speculative", drafter=paradec.wrap(module, tokenizer=train_tokenizer()))
    paradec.generate(model, ROWS, sampler=same, max_new_tokens=2)


@pytest.fixture(scope="module")
def chat_model() -> Any:
    tokenizer = train_tokenizer()
    tokenizer.chat_template = CHAT
    return paradec.wrap(module_of("llama"), tokenizer=tokenizer)


DRAWN: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 1}
ASCII = {"suppress_tokens": [token for token in range(VOCAB) if not WORDS.decode([token]).isascii()]}
"""Suppress tokens that are parts of characters: their text depends on the neighbouring tokens."""


def samplers_by_name(model: Any) -> dict[str, Any]:
    shapes = {"speculative": {"window": 4}, "tree": {"tree": (2, 2)}}
    result = {name: samplers.create("speculative", drafter=model, **shape) for name, shape in shapes.items()}
    return result | {"sjd": "sjd", "gsd": "gsd", "scd": "scd", "token by token": samplers.create("sjd", window=1)}


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["sjd", "gsd", "scd", "token by token", "speculative", "tree"])
def test_stop_strings_end_rows_like_transformers(chat_model: Any, name: str) -> None:
    sampler = samplers_by_name(chat_model)[name]
    free = paradec.generate(chat_model, ROWS, sampler=sampler, **DRAWN, **ASCII)
    answers = [row[:count] for row, count in zip(free.new_tokens.tolist(), free.tokens)]
    texts = [chat_model.tokenizer.decode(row) for row in answers]
    stops = [texts[0][9:11], texts[2][5:7]]
    output = paradec.generate(chat_model, ROWS, sampler=sampler, stop_strings=stops, **DRAWN, **ASCII)
    criterion = StopStringCriteria(chat_model.tokenizer, stops)
    for index, answer in enumerate(answers):
        ends = (size for size in range(1, len(answer) + 1) if criterion(torch.tensor([answer[:size]]), None)[0])
        expected = next(ends, len(answer))
        assert output.tokens[index] == expected
        assert output.new_tokens[index, :expected].tolist() == answer[:expected]
        assert (output.new_tokens[index, expected:] == chat_model.facts.fill_token_id).all()
    assert output.finished[0] and output.finished[2] and sum(output.tokens) < sum(free.tokens)
    assert sum(output.row_nfe) <= sum(free.row_nfe)
    row = free.finished.index(False)
    for more, finished in (("", True), ("a", False)):  # the stop string ends at the last token, or one later
        cut = paradec.generate(chat_model, ROWS, sampler=sampler, stop_strings=texts[row] + more, **DRAWN, **ASCII)
        assert cut.finished[row] == finished and cut.tokens[row] == 24


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["sjd", "speculative", "tree"])
def test_streamers_get_every_token_once(chat_model: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    streamer, sampler = TensorRecorder(), samplers_by_name(chat_model)[name]
    output = paradec.generate(chat_model, ROWS, sampler=sampler, streamer=streamer, **DRAWN)
    sent = torch.cat(streamer.puts, 1)
    assert torch.equal(sent, output.sequences[:, : sent.shape[1]]) and len(streamer.puts) > 2
    assert sent.shape[1] == output.sequences.shape[1] - 24 + max(output.tokens)
    assert streamer.ends == 1
    text_streamer = transformers.TextStreamer(chat_model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = paradec.generate(chat_model, ROWS[0], sampler=sampler, streamer=text_streamer, **DRAWN)
    assert capsys.readouterr().out.rstrip("\n") == output.text.rstrip("\n")


def test_custom_generate_equals_generate_of_transformers(chat_model: Any) -> None:
    module = module_of("llama")
    ids = torch.tensor([[0, 0, *ROWS[2]], ROWS[0][:5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = module.generate(ids, **arguments)
    for sampler in ("sjd", samplers.create("speculative", drafter=module)):
        actual = module.generate(ids, **arguments, custom_generate=paradec.hf_generate, sampler=sampler)
        assert torch.equal(actual, expected)
    bound = functools.partial(paradec.hf_generate, tokenizer=WORDS)
    text = WORDS.decode(expected[1, 5:9].tolist())
    cut = module.generate(ids[1:], max_new_tokens=12, custom_generate=bound, sampler="sjd", stop_strings=text)
    assert cut.shape[1] <= 9 and torch.equal(cut[0], expected[1, : cut.shape[1]])
    arguments = {"max_new_tokens": 4, "custom_generate": paradec.hf_generate, "mask_token_id": 3}
    refuses(lambda: module.generate(ids, **arguments), "prediction is needed")
