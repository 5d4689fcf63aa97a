"""Checkpoint folders: loaded models equal the published code, and unsupported fields and files are refused by name."""

import hashlib
import json
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import DREAM, IDS, LLADA, changed, logits, random_weights, shard, write_checkpoint, write_index
from decoding import refuses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.llada_dream import Net
from places import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec

NAMES = ("llada-tiny", "dream-tiny")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_recorded_ones(name: str, attn_implementation: str) -> None:
    model = paradec.load(GOLDEN / name, attn_implementation=attn_implementation)
    stored = load_file(GOLDEN / name / "logits_check.safetensors")
    for part in ("full", "half"):
        with torch.inference_mode():
            actual = model.module(input_ids=stored[f"ids_{part}"].long()).logits
        # In float32 the stored logits have errors of up to 2e-4, and processors differ by 6e-5.
        expected = stored[f"logits_{part}"]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.thinned
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(changed(LLADA), id="llada"),
        pytest.param(changed(LLADA, n_kv_heads=2), id="llada-gqa"),
        pytest.param(changed(LLADA, n_kv_heads=1, multi_query_attention=True), id="llada-mqa-stated"),
        pytest.param(changed(LLADA, n_kv_heads=None, multi_query_attention=True), id="llada-mqa"),
        pytest.param(changed(LLADA, n_kv_heads=4, multi_query_attention=False), id="llada-no-mqa"),
        pytest.param(changed(LLADA, mlp_hidden_size=None, mlp_ratio=2.5), id="llada-mlp-ratio"),
        pytest.param(changed(LLADA, mlp_hidden_size=12, mlp_ratio=4), id="llada-mlp-size-wins"),
        pytest.param(changed(LLADA, weight_tying=True), id="llada-tied"),
        pytest.param(changed(LLADA, weight_tying=...), id="llada-tied-by-default"),
        pytest.param(changed(LLADA, rope_theta=500000), id="llada-theta"),
        pytest.param(changed(LLADA, rms_norm_eps=0.1), id="llada-eps"),
        pytest.param(changed(LLADA, embedding_size=24), id="llada-embedding-size"),
        pytest.param(changed(LLADA, embedding_size=None, block_group_size=1, scale_logits=False), id="llada-stated"),
        pytest.param(changed(DREAM), id="dream"),
        pytest.param(changed(DREAM, num_key_value_heads=4), id="dream-no-gqa"),
        pytest.param(changed(DREAM, tie_word_embeddings=True), id="dream-tied"),
        pytest.param(changed(DREAM, rope_theta=1e6, rms_norm_eps=0.1), id="dream-theta-eps"),
    ],
)
def test_fields_that_change_the_maths_are_honoured(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, config)
    for attn_implementation in ("sdpa", "eager"):
        model = paradec.load(folder, dtype="float64", attn_implementation=attn_implementation)
        expected = Net(config, load_file(folder / "model.safetensors"))(torch.tensor(IDS))
        torch.testing.assert_close(logits(model, IDS), expected, **CLOSE)
        assert model.facts.vocab_size == (config.get("embedding_size") or config["vocab_size"])


OTHER_MATHS = ["bias_for_layer_norm", "attention_layer_norm", "include_bias", "include_qkv_bias", "alibi"]
MISSING = ["block_type", "rope_theta", "d_model", "n_heads", "mlp_hidden_size", "max_sequence_length", "mask_token_id"]
"""Required fields. (The published class and the published files have different values of `block_type`.)"""


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        *(("llada", field, True) for field in (*OTHER_MATHS, "input_emb_norm", "scale_logits")),
        *(("llada", field, False) for field in ("layer_norm_with_affine", "rope")),
        *(("llada", field, ...) for field in MISSING),
        *(("llada", field, 20) for field in ("mask_token_id", "pad_token_id")),
        ("llada", "block_type", "sequential"),
        ("llada", "block_group_size", 2),
        ("llada", "layer_norm_type", "default"),
        ("llada", "activation_type", "swiglu"),
        ("llada", "sliding_window", 16),
        ("llada", "clip_qkv", 8.0),
        ("llada", "quantization_config", {"bits": 4}),
        ("llada", "rms_norm_eps", 0),
        ("llada", "d_model", 18),
        ("llada", "n_kv_heads", 3),
        ("llada", "embedding_size", 19),
        ("llada", "weight_tying", "false"),
        ("llada", "model_type", "llada_moe"),
        *(("dream", field, True) for field in ("use_sliding_window", "use_mrope")),
        ("dream", "hidden_act", "gelu"),
        ("dream", "rope_parameters", {"rope_type": "linear", "factor": 0, "rope_theta": 1000.0}),
        ("dream", "hidden_size", ...),
        ("dream", "num_key_value_heads", 3),
        ("dream", "mask_token_id", None),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(tmp_path: Path, base: str, field: str, value: Any) -> None:
    config = LLADA if base == "llada" else DREAM
    folder = write_checkpoint(tmp_path, changed(config, **{field: value}), random_weights(config))
    assert "\n" not in refuses(lambda: paradec.load(folder), field, paradec.CheckpointError)


def test_the_mask_id_is_read_from_generation_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, changed(LLADA, mask_token_id=None))
    (folder / "generation_config.json").write_text('{"mask_token_id": 7, "eos_token_id": [17, 18]}')
    facts = paradec.load(folder).facts
    assert facts.mask_token_id == 7
    assert facts.eos_token_ids == (18, 17)


@pytest.mark.thinned
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float64, "auto", None])
def test_dtypes_load_and_decode(name: str, dtype: Any) -> None:
    model = paradec.load(GOLDEN / name, dtype=dtype)
    default = dtype if isinstance(dtype, torch.dtype) else torch.float32
    assert model.dtype == {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, default)
    assert paradec.generate(model, [1, 2, 3], max_new_tokens=4, block_length=4).new_tokens.shape == (1, 4)


def test_rope_full_precision_keeps_half_precision_close(tmp_path: Path) -> None:
    ids = [i % 40 for i in range(400)]
    exact = logits(paradec.load(GOLDEN / "llada-tiny", dtype="float64"), ids)
    half = paradec.load(GOLDEN / "llada-tiny", dtype="bfloat16")
    with torch.inference_mode():
        cos, _ = half.module.model.rotary_emb(torch.zeros(1, 1, dtype=torch.bfloat16), torch.arange(9)[None])
    assert cos.dtype == torch.float32
    folder = shutil.copytree(GOLDEN / "llada-tiny", tmp_path / "low")
    config = json.loads((folder / "config.json").read_text()) | {"rope_full_precision": False}
    (folder / "config.json").write_text(json.dumps(config))
    low = paradec.load(folder, dtype="bfloat16")
    errors = [(logits(model, ids).double() - exact).abs().mean() for model in (half, low)]
    assert errors[0] < errors[1]


@pytest.mark.thinned
@pytest.mark.parametrize(
    "placement", [{"device": "cpu"}, {"device": torch.device("cpu")}, {"device_map": "cpu"}, {"device_map": "auto"}]
)
def test_devices_and_device_maps(placement: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    model, plain = paradec.load(GOLDEN / "dream-tiny", **placement), paradec.load(GOLDEN / "dream-tiny")
    new_tokens, expected = (paradec.generate(m, [1, 2, 3], max_new_tokens=4).new_tokens for m in (model, plain))
    assert model.device.type == "cpu" and torch.equal(new_tokens, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8'"), ({"dtype": "float7"}, "dtype='float7'"),
        ({"dtype": torch.int64}, "dtype=torch.int64"), ({"dtype": 3}, "dtype=3"),
        ({"device": "nowhere"}, "device='nowhere'"), ({"device": "meta"}, "device='meta'"),
        ({"device": 3.5}, "device=3.5"),
        ({"device": "cpu", "device_map": "auto"}, "device=cpu goes with neither device_map"),
        ({"attn_implementation": "flash_attention_9"}, "attn_implementation='flash_attention_9'.*eager, sdpa"),
        ({"attn_implementation": None}, "attn_implementation=None"), ({"revision": 3}, "revision=3"),
        ({"offload_folder": 3}, "offload_folder=3 must be the path of a folder"),
        ({"mask_token_id": "x"}, "mask_token_id='x'"), ({"mask_token_id": -1}, "mask_token_id=-1"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_load_are_refused(arguments: dict[str, Any], message: str) -> None:
    assert "\n" not in refuses(lambda: paradec.load(GOLDEN / "llada-tiny", **arguments), message)


def test_wrong_shards_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    weight_map = shard(write_checkpoint(tmp_path / "whole", LLADA), folder)
    first, second = sorted(set(weight_map.values()))
    norm = "model.transformer.ln_f.weight"

    def check_refused(message: str) -> None:
        refuses(lambda: paradec.load(folder), message, paradec.CheckpointError)

    for wrong in (None, [], {}, "model.safetensors"):
        write_index(folder, wrong)
        check_refused("index.json of .* has no 'weight_map'")
    write_index(folder, weight_map | {norm: "pytorch_model.bin"})
    check_refused(f"{norm}.* is in 'pytorch_model.bin'; expected a .safetensors file")
    write_index(folder, weight_map | {norm: f"../whole/{first}"})
    check_refused("expected a .safetensors file in the same folder")
    write_index(folder, weight_map | {norm: 3})
    check_refused("is in 3; expected a .safetensors file")
    write_index(folder, weight_map | {norm: "model-3.safetensors"})
    check_refused("has no model-3.safetensors")
    write_index(folder, weight_map | {norm: second if weight_map[norm] == first else first})
    check_refused(f"does not hold {norm}")
    write_index(folder, {name: file for name, file in weight_map.items() if name != norm})
    check_refused(f"holds {norm}, which its index does not name")
    write_index(folder, weight_map)
    (folder / second).write_bytes((folder / second).read_bytes()[:-8])
    check_refused("cannot be read: model-00002")
    (folder / second).unlink()
    check_refused("has no model-00002-of-00002.safetensors")


def test_revisions_of_a_cached_repository(hub: Path) -> None:
    commits = {"main": "a" * 40, "trained": "b" * 40}
    for seed, (revision, commit) in enumerate(commits.items()):
        write_checkpoint(hub / "models--some--model" / "snapshots" / commit, LLADA, random_weights(LLADA, seed))
        ref = hub / "models--some--model" / "refs" / revision
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(commit)
    for seed, revision in enumerate(commits):
        actual = logits(paradec.load("some/model", revision=revision, dtype="float64"), IDS)
        torch.testing.assert_close(actual, Net(LLADA, random_weights(LLADA, seed))(torch.tensor(IDS)), **CLOSE)
    refuses(lambda: paradec.load("some/model", revision="nowhere"), "some/model", paradec.CheckpointError)


@pytest.mark.parametrize(
    "name", ["some/model", "model", "a/b/c", "not a name", "../x", "./x", "/no/such/folder", "~/x"]
)
def test_unknown_repositories_are_refused(hub: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(hub)
    begin = time.perf_counter()
    assert "\n" not in refuses(lambda: paradec.load(name), name, paradec.CheckpointError)
    assert time.perf_counter() - begin < 5


def test_an_unreachable_hub_is_contacted_once(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # a closed port
    begin = time.perf_counter()
    refuses(lambda: paradec.load("some/model"), "'some/model' is not a folder here", paradec.CheckpointError)
    assert time.perf_counter() - begin < 8


WEIGHTS, TIED = random_weights(DREAM), changed(LLADA, weight_tying=True)
HEAD = WEIGHTS["lm_head.weight"]
TWICE = random_weights(LLADA)
TWICE["model.norm.weight"] = TWICE["model.transformer.ln_f.weight"].clone()
EXTRA = WEIGHTS | {"model.layers.0.mlp.extra.weight": HEAD.clone()}
GQA = random_weights(changed(LLADA, n_kv_heads=2))
SHAPE = r"mismatched weights: model\.transformer\..*|do not fit config.json"
UNFIT: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
    (DREAM, {name: value for name, value in WEIGHTS.items() if value is not HEAD}, "missing weights: lm_head.weight"),
    (DREAM, {name: value for name, value in WEIGHTS.items() if "layers" not in name}, "missing weights: .* more"),
    (DREAM, EXTRA, "unexpected weights: model.layers.0.mlp.extra.weight"),
    (TIED, random_weights(LLADA), "unexpected weights: model.transformer.ff_out.weight"),
    (LLADA, random_weights(TIED), "missing weights: lm_head.weight"),
    (LLADA, TWICE, "unexpected weights: model"),
    *((changed(LLADA, **fields), random_weights(LLADA), SHAPE) for fields in (
        {"d_model": 32}, {"vocab_size": 10**9}, {"n_kv_heads": 2}, {"d_model": 2**40},
    )),
    (changed(LLADA, n_layers=10**9), random_weights(LLADA), "1000000000 layers"),
    (changed(LLADA, multi_query_attention=True, n_kv_heads=2), GQA, "multi_query_attention=.* contradicts n_kv_heads"),
    (changed(LLADA, multi_query_attention=False, n_kv_heads=2), GQA, "multi_query_attention=.* contradicts n_kv_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "weights", "message"), UNFIT)
def test_unfitting_weights_are_refused(tmp_path: Path, config: dict, weights: dict[str, Tensor], message: str) -> None:
    refuses(lambda: paradec.load(write_checkpoint(tmp_path, config, weights)), message, paradec.CheckpointError)


NO_JSON = (b"", b"{", b"model_type: llada", "\ufeff{}".encode(), b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000 + b"}")
FILES: list[tuple[dict[str, bytes | None], str]] = [
    *(({"config.json": text}, "config.json of .* is not valid JSON") for text in NO_JSON),
    *(({"config.json": text}, "config.json of .* holds a") for text in (b"[]", b"null", b"3", b'"llada"')),
    ({"config.json": b'{"model_type": "t5"}'}, "model_type='t5'; load reads 'llada', 'Dream'"),
    ({"config.json": None}, "has no config.json"),
    ({"config.json": None, "adapter_config.json": b'{"base_model_name_or_path": null}'}, "names no base_model_name_or"),
    ({"adapter_config.json": b"{}"}, "holds both adapter_config.json and config.json"),
    ({"model.safetensors": None, "pytorch_model.bin": b""}, "no model.safetensors or index of shards; pickled"),
    ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "a pointer of git-lfs"),
    *(({"model.safetensors": bytes(size)}, "cannot be read: model.safetensors") for size in (0, 4, 8, 100)),
]


@pytest.mark.parametrize(("files", "message"), FILES)
def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path, files: dict[str, bytes | None], message: str) -> None:
    folder = write_checkpoint(tmp_path, LLADA)
    for name, data in files.items():
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(data)
    refuses(lambda: paradec.load(folder), message, paradec.CheckpointError)


@pytest.mark.parametrize("source", ["", 3, b"folder", ["a"], GOLDEN / "llada-tiny" / "config.json"])
def test_sources_that_are_no_folder_are_refused(source: Any) -> None:
    refuses(lambda: paradec.load(source), "source=.* must be a folder|is a file, not a folder")


def test_max_new_tokens_comes_from_generation_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLADA)
    for stated, expected in ((12, 12), (True, 128), ("12", 128), (-1, 128), (None, 128)):
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": stated}))
        assert paradec.load(folder).default_max_new_tokens == expected
    (folder / "generation_config.json").write_text("[]")
    refuses(lambda: paradec.load(folder), "generation_config.json of .* holds a list", paradec.CheckpointError)


def test_tokenizers_are_read_and_corrupt_ones_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, changed(LLADA, mask_token_id=...))
    words = ["<unk>", "<mask>", "<|eot_id|>", *(f"w{i}" for i in range(17))]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": w, "special": True, **plain} for i, w in enumerate(words) if w.startswith("<")]
    vocab = {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": words[0]}
    fields = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": vocab}
    good = json.dumps(fields)
    (folder / "tokenizer.json").write_text(good)
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<mask>"}')
    model = paradec.load(folder)
    assert model.facts.mask_token_id == 1
    assert model.facts.eos_token_ids == (18, 2)
    assert isinstance(paradec.generate(model, "w1 w2", max_new_tokens=2).text, str)
    for bad in (good[:-20], "[]", '{"version": "1.0"}', "\x00"):
        (folder / "tokenizer.json").write_text(bad)
        assert "\n" not in refuses(lambda: paradec.load(folder), "the tokenizer of .* cannot", paradec.CheckpointError)
    (folder / "tokenizer.json").unlink()
    refuses(lambda: paradec.load(folder), "has no tokenizer.json", paradec.CheckpointError)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([0, 1, 2, 10**30]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FUZZ = settings(max_examples=60, deadline=10_000, derandomize=True, suppress_health_check=CHECKS)


def assert_loads_or_explains(folder: Path) -> None:
    try:
        model = paradec.load(folder)
    except ValueError as error:  # the base class of CheckpointError
        assert str(error)
        assert "\n" not in str(error)
    else:
        assert logits(model, [0, 1]).shape == (2, model.facts.vocab_size)


@pytest.mark.thinned
@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
@FUZZ
@given(data=st.data())
def test_random_fields_load_or_are_refused(tmp_path: Path, config: dict[str, Any], data: st.DataObject) -> None:
    write_checkpoint(tmp_path, config)
    field = st.sampled_from(sorted(config)) | st.text(max_size=8)
    fields = data.draw(st.dictionaries(field, st.just(...) | JSON_VALUES, min_size=1, max_size=3))
    (tmp_path / "config.json").write_text(json.dumps(changed(config, **fields)))
    assert_loads_or_explains(tmp_path)


@FUZZ
@given(data=st.data())
def test_random_bytes_load_or_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    write_checkpoint(tmp_path, LLADA)
    file = tmp_path / "model.safetensors"
    stored = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(stored[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        stored[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(stored[: data.draw(st.integers(0, len(stored)) | st.just(len(stored)))])
    assert_loads_or_explains(tmp_path)


LARGE: dict[str, Any] = LLADA | {"d_model": 512, "n_layers": 10, "n_heads": 8, "mlp_hidden_size": 2048}
"""A size at which the weights dominate the memory of a load."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    save_file({name: tensor.bfloat16() for name, tensor in random_weights(LARGE).items()}, folder / "model.safetensors")
    return folder


def is_mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text()


def private_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])


def forward(model: Any) -> Tensor:
    with torch.inference_mode():
        return model.module(torch.arange(8).unsqueeze(0)).logits


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory is read from Linux's /proc")
def test_weights_are_memory_mapped(large: Path) -> None:
    size, before = (large / "model.safetensors").stat().st_size, private_bytes()
    model = paradec.load(large)
    expected = forward(model)
    assert is_mapped(large) and private_bytes() - before < 0.1 * size
    repeated = pickle.loads(pickle.dumps(model))
    del model
    assert not is_mapped(large) and torch.equal(forward(repeated), expected)


def test_changes_in_memory_do_not_change_the_file(large: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((large / name).read_bytes())
    file = tmp_path / "model.safetensors"
    digest, model = hashlib.sha256(file.read_bytes()).digest(), paradec.load(tmp_path)
    expected = forward(model)
    with torch.no_grad():
        model.module.model.norm.weight.mul_(2)
    assert hashlib.sha256(file.read_bytes()).digest() == digest
    model.save_pretrained(tmp_path)  # overwrites the mapped file
    torch.testing.assert_close(forward(model), 2 * expected)
    assert torch.equal(forward(paradec.load(tmp_path)), forward(model))
    file.unlink()
    torch.testing.assert_close(forward(model), 2 * expected)
