"""GGUF files against the folders from which they were made: logits, tokens, tokenizers, int8; damaged files."""

import importlib.util
import json
import random
import struct
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import LLADA, random_weights, write_checkpoint
from commands import ok
from decoding import covering, refuses
from places import GOLDEN
from safetensors.torch import load_file, save_file
from tokenized_models import TEMPLATE, TEXT, byte_level_tokenizer
from tokenizers import AddedToken, Regex, pre_tokenizers
from torch import Tensor, nn

import paradec
from paradec.core.query import Query
from paradec.kernels.int8 import Int8Experts, Int8Linear
from paradec.models.checkpoint import CheckpointError
from paradec.models.int8 import Int8Config

pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
import transformers  # noqa: E402
from gguf_files import write_gguf  # noqa: E402

from paradec.models import gguf  # noqa: E402

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {  # (folder of tests/golden, changes of config.json)
    "llada": ("llada-tiny", {}),
    "dream": ("dream-tiny", {}),
    "llada-moe": ("moe/llada-moe-tiny", {"mask_token_id": 95}),
    "rnd1": ("moe/sdar-moe-tiny", {"model_type": "rnd1"}),
}
SPECIAL = "<|turn|>"
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ("one two  three", "seven\n\n12'll <think>x", f"{SPECIAL}nine <|end|>...\n", "Ünïcode é 7.5", "")


def copy_checkpoint(name: str, tmp_path: Path) -> Path:
    """Copy a golden checkpoint to `tmp_path`, with the changes that CHECKPOINTS has for it."""
    source, changes = GOLDEN / CHECKPOINTS[name][0], CHECKPOINTS[name][1]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changes))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder


def wide_folder(folder: Path, weights: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write a random LLaDA or Dream, by default of width 256: some quantization types need a multiple of 256."""
    sizes = {"vocab_size": 300, "mask_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "rms_norm_eps": 1e-5}
    config = LLADA | {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 256} | sizes
    if changes.get("model_type") == "Dream":
        config = json.loads((GOLDEN / "dream-tiny" / "config.json").read_text()) | sizes
        config |= {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= changes
    if "embedding_size" in config:
        config["embedding_size"] = config["vocab_size"]
    if weights is None:  # small weights, so that rounding errors do not grow from layer to layer
        weights_by_name = random_weights(config).items()
        weights = {name: (0.3 * weight if weight.ndim > 1 else weight).float() for name, weight in weights_by_name}
    folder.mkdir(exist_ok=True)
    write_checkpoint(folder, config, weights)
    return folder


def tokenizer() -> Any:
    result = byte_level_tokenizer()
    result.bos_token, result.pad_token, result.chat_template = (SPECIAL, result.eos_token, TEMPLATE)
    result.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return result


def logits(model: Any) -> Tensor:
    tokens = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    return model(Query(np.arange(2), tokens, torch.arange(16).expand(2, 16)))


def decode(model: Any) -> list[list[int]]:
    """Return the new tokens of two short prompts."""
    arguments = {"sampler": "jacobi"} if model.facts.topology == "causal" else {}
    output = paradec.generate(model, [[5, 6, 7, 8, 9], [11, 12]], max_new_tokens=16, **arguments)
    return [row[:count].tolist() for row, count in zip(output.new_tokens, output.tokens, strict=True)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_float32_files_answer_like_the_folder(name: str, tmp_path: Path) -> None:
    folder, file = copy_checkpoint(name, tmp_path), tmp_path / "model.gguf"
    write_gguf(file, folder)
    expected, model = paradec.load(folder), paradec.load(file)
    assert model.facts == replace(expected.facts, name="model")
    assert model.facts.prediction == ("shifted" if name in ("dream", "rnd1") else "same")
    assert model.dtype == torch.float32
    assert torch.equal(logits(model), logits(expected))
    assert decode(model) == decode(expected)
    model.save_pretrained(tmp_path / "saved")
    saved, original = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key].float()) for key in saved)
    repeated = paradec.load(tmp_path / "saved")
    assert repeated.facts == replace(model.facts, name="saved")
    assert decode(repeated) == decode(expected)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    covering(["llada", "Dream"], ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"]),
)
def test_packed_kinds_equal_their_unpacked_weights(kind: str, model_type: str, tmp_path: Path) -> None:
    folder, file = wide_folder(tmp_path / "folder", model_type=model_type), tmp_path / "model.gguf"
    stored = write_gguf(file, folder, kind)
    unpacked = wide_folder(tmp_path / "unpacked", stored, model_type=model_type)
    expected = logits(paradec.load(unpacked))
    assert torch.equal(logits(paradec.load(file)), expected)
    assert 0 < relative_error(logits(paradec.load(file, dtype="bfloat16")), expected) < 0.06
    model = paradec.load(file, dtype="float32", quantization=Int8Config(min_weights=64))
    assert not any(type(part) is nn.Linear for part in model.module.modules())
    assert 0 < relative_error(logits(model), expected) < 0.06
    if kind == "Q8_0":
        assert 0 < relative_error(logits(paradec.load(folder)), expected) < 0.05


def test_packed_experts(tmp_path: Path) -> None:
    folder, file = copy_checkpoint("rnd1", tmp_path), tmp_path / "model.gguf"
    config = json.loads((folder / "config.json").read_text()) | {"moe_intermediate_size": 32}
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".experts." in name:
            rows, columns = (32, 64) if "down" not in name else (64, 32)
            weights[name] = weight.repeat(2, 2)[:rows, :columns].contiguous()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    save_file(write_gguf(file, folder, "Q8_0"), folder / "model.safetensors")
    expected = logits(paradec.load(folder))
    assert torch.equal(logits(paradec.load(file)), expected)
    model = paradec.load(file, dtype="float32", quantization=Int8Config(min_weights=64))
    assert sum(isinstance(part, Int8Experts) for part in model.module.modules()) == 3


def test_tied_outputs_and_scaled_angles(tmp_path: Path) -> None:
    folder = wide_folder(tmp_path / "folder", weight_tying=True)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.transformer.ff_out.weight", None)
    save_file(weights, folder / "model.safetensors")
    write_gguf(tmp_path / "tied.gguf", folder)
    assert torch.equal(logits(paradec.load(tmp_path / "tied.gguf")), logits(paradec.load(folder)))
    folder = wide_folder(tmp_path / "dream", model_type="Dream")
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    extra = {"type": "yarn", "factor": 2.0, "original_context_length": 256}
    write_gguf(tmp_path / "a.gguf", folder, extra={f"dream.rope.scaling.{key}": value for key, value in extra.items()})
    config = json.loads((folder / "config.json").read_text()) | {"rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(paradec.load(tmp_path / "a.gguf")), logits(paradec.load(folder)))


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_the_file_states_whether_logits_are_shifted(name: str, tmp_path: Path) -> None:
    """The field diffusion.shift_logits decides, and saved models keep it."""
    folder, file = copy_checkpoint(name, tmp_path), tmp_path / "model.gguf"
    for is_shifted in (True, False):
        field = {"diffusion.shift_logits": is_shifted}
        if name == "llada":
            write_gguf(file, folder)
            data = file.read_bytes()
            value = data.index(b"diffusion.shift_logits") + len("diffusion.shift_logits") + 4
            file.write_bytes(data[:value] + bytes([is_shifted]) + data[value + 1 :])
        else:
            write_gguf(file, folder, extra=field)
        model = paradec.load(file)
        assert model.facts.prediction == ("shifted" if is_shifted else "same")
        model.save_pretrained(tmp_path / "saved")
        repeated = paradec.load(tmp_path / "saved")
        assert repeated.facts.prediction == model.facts.prediction
        assert decode(repeated) == decode(model)


# ---- int8 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a GGUF file of one kind. Its MLP matrices have a million weights."""
    root = tmp_path_factory.mktemp("large")
    folder = wide_folder(root / "folder", n_layers=1, mlp_hidden_size=2**12)

    def get(kind: str) -> Path:
        file = root / f"{kind}.gguf"
        if not file.exists():
            write_gguf(file, folder, kind)
        return file

    return get


def test_packed_weights_become_int8_on_a_cpu(large: Callable[..., Path], tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q4_0"):
        model = paradec.load(large(kind))
        layers = [part for part in model.module.modules() if isinstance(part, Int8Linear)]
        assert [layer.weight.numel() for layer in layers] == [2**20] * 3
        assert model.dtype == torch.bfloat16
        plain = paradec.load(large(kind), dtype="float32")
        assert not any(isinstance(part, Int8Linear) for part in plain.module.modules())
        assert 0 < relative_error(logits(model).float(), logits(plain)) < 0.06
    assert paradec.load(large("Q8_0"), dtype="bfloat16").module.lm_head.weight.dtype == torch.bfloat16
    assert paradec.load(large("BF16")).dtype == torch.float32
    assert isinstance(paradec.load(large("BF16"), quantization="int8").module.model.layers[0].mlp.up_proj, Int8Linear)
    model.save_pretrained(tmp_path)
    repeated = paradec.load(tmp_path)
    assert torch.equal(logits(repeated), logits(model))
    assert decode(repeated) == decode(model)


def test_layers_are_unpacked_one_at_a_time(large: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a large layer is rounded, no other large layer is unpacked in memory."""
    references: list[Any] = []
    alive_counts: list[int] = []
    unpack = gguf.GgufTensor.__getitem__

    def count_unpacked(self: Any, index: Any) -> Tensor:
        tensor = unpack(self, index)
        if tensor.numel() >= 2**20:
            references.append(weakref.ref(tensor))
        alive_counts.append(sum(reference() is not None for reference in references))
        return tensor

    monkeypatch.setattr(gguf.GgufTensor, "__getitem__", count_unpacked)
    paradec.load(large("Q8_0"))
    assert (len(references), max(alive_counts)) == (3, 1)


# ---- causal models --------------------------------------------------------------------------------------------------


def causal_folder(folder: Path, model_type: str, **fields: Any) -> Path:
    config_class = {
        "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }[model_type]  # fmt: skip
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    sizes |= {"head_dim": 128 if model_type.startswith("qwen3") else 16}  # 128 is transformers' default for Qwen3
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 1, "rms_norm_eps": 1e-6}
    torch.manual_seed(0)
    config = config_class(**sizes | ids | (experts if model_type == "qwen3_moe" else {}) | fields)
    module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    module.save_pretrained(folder)
    return folder


@pytest.mark.thinned
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_causal_models_decode_like_the_folder(model_type: str, tmp_path: Path) -> None:
    folder, file = causal_folder(tmp_path / "folder", model_type), tmp_path / "model.gguf"
    write_gguf(file, folder, tokenizer=tokenizer())
    expected, model = paradec.load(folder), paradec.load(file)
    assert model.facts.eos_token_ids == expected.facts.eos_token_ids == (1,)
    assert relative_error(logits(model), logits(expected)) < 1e-6
    assert decode(model) == decode(expected)
    assert model.tokenizer("one two")["input_ids"][-2:] == tokenizer()("one two")["input_ids"][-2:]
    rounded = paradec.load(file, dtype="float32", quantization=Int8Config(min_weights=64))
    assert isinstance(rounded.module.model.layers[0].self_attn.q_proj, Int8Linear)
    model.save_pretrained(tmp_path / "saved")
    rounded.save_pretrained(tmp_path / "rounded")
    assert decode(paradec.load(tmp_path / "saved")) == decode(expected)
    assert decode(paradec.load(tmp_path / "rounded")) == decode(rounded)
    save_file(write_gguf(file, folder, "Q8_0", tokenizer=tokenizer()), folder / "model.safetensors")
    assert relative_error(logits(paradec.load(file)), logits(paradec.load(folder))) < 1e-6


def test_scaled_angles_of_llama(tmp_path: Path) -> None:
    """Stored factors scale the angles like those in config.json. Other scalings than Llama's are refused."""
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = causal_folder(tmp_path / "folder", "llama", rope_parameters=scaling)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain = 5e5 ** (-torch.arange(8) / 8)
    factors = (plain / module.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 7
    write_gguf(tmp_path / "a.gguf", folder, tokenizer=tokenizer(), extra={gguf.ROPE_FACTORS: factors})
    model = paradec.load(tmp_path / "a.gguf")
    assert relative_error(logits(model), logits(paradec.load(folder))) < 1e-6
    write_gguf(tmp_path / "b.gguf", folder, tokenizer=tokenizer(), extra={gguf.ROPE_FACTORS: factors[::-1].copy()})
    refuses(lambda: paradec.load(tmp_path / "b.gguf"), "b.gguf' holds rope_freqs.weight", CheckpointError)


# ---- tokenizers and sources -----------------------------------------------------------------------------------------


@pytest.mark.thinned
@pytest.mark.parametrize(("pre", "split"), [("gpt-2", None), ("qwen2", QWEN_SPLIT), ("bailingmoe", None)])
def test_tokenizers_equal_the_original(pre: str, split: str | None, tmp_path: Path) -> None:
    original = tokenizer()
    if split is not None:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), byte_level]
        original.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    folder = wide_folder(tmp_path / "folder")
    write_gguf(tmp_path / "a.gguf", folder, tokenizer=original, pre=pre, vocab_size=300)
    model = paradec.load(tmp_path / "a.gguf")
    assert model.facts.tokenizer_size == len(original) < model.facts.vocab_size
    texts = TEXTS if pre != "bailingmoe" else ("one two three", SPECIAL)
    for text in (*texts, TEXT):
        ids = original(text)["input_ids"]
        assert model.tokenizer(text)["input_ids"] == ids
        assert model.tokenizer.decode(ids) == original.decode(ids) == text
        assert model.tokenizer.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
    chat = {"conversation": [{"role": "user", "content": "one two"}], "add_generation_prompt": True, "tokenize": False}
    assert model.tokenizer.apply_chat_template(**chat) == original.apply_chat_template(**chat)
    for name in ("bos_token", "eos_token", "pad_token", "mask_token"):
        expected = original.eos_token if name == "pad_token" else getattr(original, name)
        assert name == "bos_token" or getattr(model.tokenizer, name) == expected
    assert paradec.generate(model, "one two", max_new_tokens=4).text
    model.save_pretrained(tmp_path / "saved")
    repeated = paradec.load(tmp_path / "saved")
    assert repeated.tokenizer(TEXT)["input_ids"] == original(TEXT)["input_ids"]


def test_texts_begin_with_the_bos_token_except_llada(tmp_path: Path) -> None:
    """The converter sets add_bos_token for every LLaDA, but LLaDA's tokenizer adds no token."""
    for name, count in (("llada", 0), ("Dream", 1)):
        folder, file = wide_folder(tmp_path / name, model_type=name), tmp_path / f"{name}.gguf"
        extra = {} if name == "llada" else {"tokenizer.ggml.add_bos_token": True}
        write_gguf(file, folder, tokenizer=tokenizer(), extra=extra, bos_token_id=2)
        ids = paradec.load(file).tokenizer("one two")["input_ids"]
        assert ids == [2] * count + tokenizer()("one two")["input_ids"]


def test_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    folder, file = wide_folder(tmp_path / "folder"), tmp_path / "a.gguf"
    write_gguf(file, folder, tokenizer=tokenizer(), pre="other")
    message = "a.gguf': a tokenizer with tokenizer.ggml.model='gpt2' and tokenizer.ggml.pre='other' is not supported"
    refuses(lambda: paradec.load(file), message, CheckpointError)
    write_gguf(file, folder, tokenizer=tokenizer())
    file.write_bytes(file.read_bytes().replace("Ġ t".encode(), "Ġ \x01".encode(), 1))
    refuses(lambda: paradec.load(file), "the tokenizer of .*a.gguf' cannot be read", CheckpointError)


def test_repositories_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = wide_folder(tmp_path / "folder"), tmp_path / "a.gguf"
    write_gguf(file, folder, tokenizer=tokenizer())
    expected = paradec.generate(paradec.load(file), "one two", max_new_tokens=4, chat=False)
    answer = ok("generate", "one two", "--raw", "--model", file, "--max-new-tokens", 4, "--json")
    assert json.loads(answer)["text"] == expected.text
    fetched: list[tuple[str, str, str | None]] = []

    def fetch(source: str, name: str, revision: str | None) -> Path:
        fetched.append((source, name, revision))
        return file

    monkeypatch.setattr(gguf, "fetch", fetch)
    for source, options in (("owner/name/a.gguf", {}), ("owner/name", {"gguf_file": "a.gguf"})):
        model = paradec.load(source, revision="main", **options)
        assert torch.equal(logits(model), logits(paradec.load(file, revision="main")))
    assert fetched.count(("owner/name", "a.gguf", "main")) == 2


# ---- wrong files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file that consists mostly of its header."""
    root = tmp_path_factory.mktemp("small")
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "mlp_hidden_size": 8, "vocab_size": 12}
    folder = wide_folder(root / "folder", **sizes, mask_token_id=0, eos_token_id=1, pad_token_id=1)
    write_gguf(root / "a.gguf", folder)
    return root / "a.gguf"


def data_start(file: Path) -> int:
    """Return the offset of the tensors' data, which ends the file. Each tensor is padded to a multiple of 32 bytes."""
    tensors = gguf.read_gguf(str(file.parent), file.name, None).tensors.values()
    return file.stat().st_size - sum(-(-tensor.blocks.nbytes // 32) * 32 for tensor in tensors)


@pytest.mark.parametrize("count", [12, pytest.param(None, marks=pytest.mark.full)], ids=["some", "all"])
def test_files_that_are_cut_short_are_refused(count: int | None, small: Path, tmp_path: Path) -> None:
    data, start = small.read_bytes(), data_start(small)
    assert 800 < start < len(data)
    file = tmp_path / "cut.gguf"
    draw = random.Random(0)
    cuts = [*range(start), *draw.sample(range(start, len(data) - 32), 30)]
    for cut in cuts if count is None else draw.sample(cuts, count):
        file.write_bytes(data[:cut])
        message = refuses(lambda: paradec.load(file), "cut.gguf' cannot be read as a GGUF file", CheckpointError)
        assert ("it is cut short" in message or cut < 8) and "\n" not in message


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.full)])
def test_files_with_wrong_bytes(count: int, small: Path, tmp_path: Path) -> None:
    """A file with a wrong byte in its header loads, or the error has the file's name."""
    data, start, draw = small.read_bytes(), data_start(small), random.Random(0)
    file = tmp_path / "wrong.gguf"
    loaded = 0
    for _ in range(count):
        offset = draw.randrange(start)
        file.write_bytes(data[:offset] + bytes([draw.randrange(256)]) + data[offset + 1 :])
        try:
            paradec.load(file)
            loaded += 1
        except CheckpointError as error:
            assert "wrong.gguf" in str(error)
    assert 0 < loaded < count / 2


def pack_text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pack_field(name: str, kind: int, value: bytes) -> bytes:
    return pack_text(name) + struct.pack("<I", kind) + value


def pack_header(*fields: bytes, tensors: tuple[bytes, ...] = (), architecture: str = "dream") -> bytes:
    """Return a file that consists of its header: the architecture, and encoded fields and tensors."""
    fields = (pack_field("general.architecture", 8, pack_text(architecture)), *fields)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join((*fields, *tensors))


def pack_tensor(name: str, kind: int, *sizes: int) -> bytes:
    return pack_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot mmap an empty file"),
        (b"PK\3\4" + bytes(60), "it does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it has version 50331648; versions 2 and 3 of little-endian files"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it has version 1; versions 2 and 3 of little-endian files"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "it states 1,099,511,627,776 fields"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "it states 1,152,921,504,606,846,976 tensors"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40), "it is cut short: its header goes beyond its 32 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "it has no 'general.architecture'"),
        (pack_header(pack_field("a", 9, struct.pack("<IQ", 8, 2**60))), "it states .* texts in 'a'"),
        (pack_header(pack_field("a", 9, struct.pack("<IQ", 6, 2**60))), "it is cut short"),
        (pack_header(pack_field("a", 9, struct.pack("<IQ", 9, 1))), "'a' has values of the unknown kind 9"),
        (pack_header(pack_field("a", 13, b"")), "'a' has values of the unknown kind 13"),
        (pack_header(pack_field("a", 0, b"1"), pack_field("a", 0, b"1")), "it has 'a' twice"),
        (pack_header(pack_field("split.count", 2, b"\3\0")), "it is one of 3 parts; join them"),
        (pack_header(pack_field("general.alignment", 4, bytes(4))), "general.alignment=0 must be a positive integer"),
        (
            pack_header(pack_field("dream.block_count", 4, b"\377" * 4)),
            "it states 4,294,967,295 layers, but only 0 tensors",
        ),
        *(
            (
                pack_header(tensors=(pack_tensor("x", k, 4),)),
                f"the tensor 'x' is of kind {k}, which the package gguf does not",
            )
            for k in (999, 26)
        ),
        (pack_header(tensors=(pack_tensor("x", 8, 4),)), r"the tensor 'x' is \[4\], which Q8_0 cannot hold"),
        (pack_header(tensors=(pack_tensor("x", 0, 2**40, 2**40),)), "it is cut short: 'x' ends at byte"),
        (pack_header(tensors=(pack_tensor("x", 0),)), "the tensor 'x' has 0 sizes"),
        (pack_header(tensors=(pack_tensor("x", 0, 1),) * 2) + bytes(64), "it has the tensor 'x' twice"),
    ],
)
def test_wrong_headers_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    file, message = tmp_path / "a.gguf", f"a.gguf' cannot be read as a GGUF file: {message}"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        assert "\n" not in refuses(lambda: paradec.load(file), message, CheckpointError)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_wrong_contents_are_refused(small: Path, tmp_path: Path) -> None:
    folder, file = small.parent / "folder", tmp_path / "a.gguf"

    def check(message: str, extra: dict[str, Any] | None = None, **changes: Any) -> None:
        write_gguf(file, folder, extra=extra, **changes)
        assert "a.gguf" in refuses(lambda: paradec.load(file), message, CheckpointError)

    check("holds other.weight, which is not a weight of 'llada'", {"other.weight": np.zeros(4, np.float32)})
    check("unexpected weights: model.transformer.blocks.7.attn_norm", {"blk.7.attn_norm.weight": np.zeros(16, "f4")})
    check("mismatched weights: .*attn_norm", d_model=32)
    check("embedding_length=0 must be a positive number", d_model=0)
    check("mask_token_id", mask_token_id=None)
    write_gguf(file, folder)
    data = file.read_bytes()
    value = data.index(b"attention.head_count_kv") + len("attention.head_count_kv") + 4
    file.write_bytes(data[:value] + struct.pack("<I", 5) + data[value + 4 :])
    message = r"a.gguf': n_kv_heads=5 must divide|a.gguf': config.json: n_kv_heads=5"
    refuses(lambda: paradec.load(file), message, CheckpointError)


def test_unsupported_architectures_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    sources: tuple[tuple[Path, dict[str, Any]], ...] = ((file, {}), (tmp_path, {"gguf_file": "a.gguf"}))
    for architecture in ("bert", "diffusion-gemma", "unheard-of", "whisper"):
        file.write_bytes(pack_header(architecture=architecture))
        message = f"a.gguf' holds '{architecture}', which load cannot read from GGUF; it reads llada, dream, .*qwen3"
        for source, options in sources:
            assert "\n" not in refuses(partial(paradec.load, source, **options), message, CheckpointError)
    file.write_bytes(pack_header())
    for source, options in sources:
        refuses(partial(paradec.load, source, **options), "a.gguf' holds no token_embd.weight", CheckpointError)
    file.write_bytes(pack_header(architecture="phi3"))
    message = "quantization='int8' does not work for .*a.gguf', which holds 'phi3'; it works for llada, .*qwen3moe"
    refuses(lambda: paradec.load(file, quantization="int8"), message, CheckpointError)


def test_a_missing_gguf_package_is_named(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    message = "a.gguf' needs the package gguf: install paradec's extra 'gguf', e.g. pip install -e '.\\[gguf\\]'"
    refuses(lambda: paradec.load(small), message, CheckpointError)
