"""`Model.save_pretrained` writes the published format, atomically."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import (
    CONFIGS,
    DREAM,
    FAMILY_WORDS,
    IDS,
    LLADA,
    SDAR,
    family_weights,
    logits,
    random_weights,
    small_config,
    small_weights,
    write_tokenizer,
)
from decoding import refuses, run_in_threads
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from images import tiny_llamagen
from safetensors.torch import load_file, save_file
from small_models import END, MASK, tiny
from torch import Tensor, nn

import paradec
from paradec.integrations.diffusers.hooks.block_cache import BlockCausalModule
from paradec.models.adapter import Model
from paradec.models.loading import FAMILIES

GENERATION = {"max_new_tokens": 9, "temperature": 0.2}
MIXTURES = {"sdar_moe": "sdar-moe-tiny", "llada2_moe": "llada2-tiny", "rnd1": "sdar-moe-tiny"}
NEMOTRON = {
    "model_type": "nemotron_labs_diffusion", "architectures": ["NemotronLabsDiffusionModel"],
    "auto_map": {"AutoConfig": "code.Config"}, "torch_dtype": "float64", "dlm_paradigm": "bidirectional", "head_dim": 4,
    "mask_token_id": 3, "vocab_size": len(FAMILY_WORDS),
}  # fmt: skip
WIDE = "mlp.gate.expert_bias"
"""The one weight that transformers keeps in float32 when the model has another dtype."""
NAMES_OF_MASKS = {
    "llada": "<|mdm_mask|>",
    "Dream": "<|mask|>",
    "rnd1": "<|mask|>",
    "nemotron_labs_diffusion": "<mask>",
} | {name: family.mask_token for name, family in FAMILIES.items() if family.mask_token}


def published_weights(model_type: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and float64 weights in the family's published format, with blocks of 4."""
    if model_type in MIXTURES:
        common_fields = {"auto_map": {"AutoConfig": "code.Config"}, "torch_dtype": "float64", "model_type": model_type}
        config = small_config(MIXTURES[model_type], **common_fields)
        return config | fields, small_weights(MIXTURES[model_type], config | fields)
    if model_type == "nemotron_labs_diffusion":
        config = {name: value for name, value in SDAR.items() if name != "max_window_layers"} | NEMOTRON | fields
        weights = family_weights("nemotron", config | {"tie_word_embeddings": True})
        names = {name: name.replace("model.", "encoder.", 1) for name in weights}
        result = {names[name]: weight for name, weight in weights.items()}
        if not config["tie_word_embeddings"]:
            result["diffusion_head.weight"] = 0.4 * torch.randn_like(result["encoder.embed_tokens.weight"])
        return config, result
    by_type = {"llada": LLADA, "Dream": DREAM} | {config["model_type"]: config for config in CONFIGS.values()}
    config = by_type[model_type] | {"vocab_size": len(FAMILY_WORDS), "auto_map": {"AutoConfig": "code.Config"}} | fields
    if model_type in ("llada", "Dream"):
        config |= {"mask_token_id": 3, "eos_token_id": 0, "torch_dtype": "float64"}
        return config, random_weights(config)
    family = next(name for name, known in CONFIGS.items() if known["model_type"] == model_type)
    return config | {"torch_dtype": "float64"}, family_weights(family, config)


def write(folder: Path, model_type: str, tokenizer: bool = True, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    config, weights = published_weights(model_type, **fields)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "code.py").write_text("raise SystemExit('remote code was run')")
    save_file(weights, folder / "model.safetensors")
    if tokenizer:
        write_tokenizer(folder, NAMES_OF_MASKS[model_type])
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sources")

    def get(model_type: str) -> Path:
        return root / model_type if (root / model_type).is_dir() else write(root / model_type, model_type)

    return get


@pytest.fixture(params=[name for name in FAMILIES if name != "mmada"])  # mmada has LLaDA's format
def model_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(model_type: str, sources: Callable[[str], Path]) -> Path:
    return sources(model_type)


def read(folder: Path, name: str = "config.json") -> Any:
    return json.loads((folder / name).read_text())


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def file_hashes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def use_plain_experts(module: Any) -> None:
    """Switch a module of transformers to the "eager" experts, which support float64, unlike the default ones."""
    if getattr(module.config, "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation("eager")


def are_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def assert_models_equal(model: Model, other: Model) -> None:
    for each in (model, other):  # copies, because a weight's offset in its mapped file changes the last bit
        for parameter in each.module.parameters():
            if parameter.device.type != "meta":
                parameter.data = parameter.data.clone()
    assert replace(other.facts, name=model.facts.name) == model.facts
    assert other.dtype == model.dtype
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    assert torch.equal(logits(model, ids), logits(other, ids))
    answers = [
        paradec.generate(each, [5, 6, 7], max_new_tokens=8, block_length=4).new_tokens for each in (model, other)
    ]
    assert torch.equal(*answers)
    assert other.default_max_new_tokens == model.default_max_new_tokens


class Quantised(torch.Tensor):
    """A tensor subclass like torchao's quantised tensors."""


def test_quantised_tensors_are_refused(source: Path, tmp_path: Path) -> None:
    model = paradec.load(source)
    model.module.lm_head.weight = nn.Parameter(model.module.lm_head.weight.detach().as_subclass(Quantised))
    refuses(lambda: model.save_pretrained(tmp_path / "saved"), r"lm_head.weight is quantised \(Quantised\)")
    assert not (tmp_path / "saved").exists()


@pytest.mark.thinned
@pytest.mark.parametrize("max_shard_size", ["50GB", 3000, "1KB"])
def test_saved_models_equal_the_published_files(source: Path, tmp_path: Path, max_shard_size: int | str) -> None:
    model = paradec.load(source)
    model.save_pretrained(tmp_path / "new" / "saved", max_shard_size=max_shard_size)
    saved = tmp_path / "new" / "saved"
    assert are_equal(weights_of(saved), load_file(source / "model.safetensors"))
    assert read(saved) == read(source) and read(saved, "generation_config.json") == GENERATION
    assert (saved / "model.safetensors").exists() == (max_shard_size == "50GB")
    limit = {"50GB": 10**9, "1KB": 1000}.get(str(max_shard_size), max_shard_size)
    for file in saved.glob("*.safetensors"):
        assert sum(t.nbytes for t in load_file(file).values()) <= limit or len(load_file(file)) == 1
        plain = safetensors.torch.save(load_file(file), metadata={"format": "pt"})  # transformers needs this metadata
        assert file.read_bytes() == plain
    other = paradec.load(saved)
    assert_models_equal(model, other)
    assert (saved / "code.py").exists() and not list(saved.glob(".saving*"))
    for text in ["w1 w2 <|im_end|>", NAMES_OF_MASKS[read(source)["model_type"]]]:
        assert other.tokenizer(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "w5 w6"}]
    assert other.tokenizer.apply_chat_template(messages) == model.tokenizer.apply_chat_template(messages)


@pytest.mark.thinned
def test_trained_weights_are_saved(source: Path, tmp_path: Path) -> None:
    model = paradec.load(source)
    with torch.no_grad():
        for weight in {value.data_ptr(): value for value in model.module.state_dict().values()}.values():
            weight.mul_(1.25)
    model.save_pretrained(tmp_path)
    original = load_file(source / "model.safetensors")
    assert are_equal(weights_of(tmp_path), {name: value * 1.25 for name, value in original.items()})
    assert_models_equal(model, paradec.load(tmp_path))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_kept(source: Path, tmp_path: Path, dtype: str) -> None:
    model = paradec.load(source, dtype=dtype)
    model.save_pretrained(tmp_path)
    stored = weights_of(tmp_path)
    assert {str(value.dtype) for name, value in stored.items() if not name.endswith(WIDE)} == {f"torch.{dtype}"}
    assert read(tmp_path)["torch_dtype"] == dtype
    other = paradec.load(tmp_path)
    assert_models_equal(model, other)
    assert type(other.module.model.rotary_emb) is type(model.module.model.rotary_emb)


@pytest.mark.thinned
def test_tied_embeddings_are_stored_once(model_type: str, tmp_path: Path) -> None:
    field = "weight_tying" if model_type == "llada" else "tie_word_embeddings"
    source = write(tmp_path / "tied", model_type, **{field: True})
    model = paradec.load(source)
    model.save_pretrained(tmp_path / "saved")
    assert are_equal(weights_of(tmp_path / "saved"), weights_of(source))
    other = paradec.load(tmp_path / "saved")
    assert_models_equal(model, other)
    assert other.module.get_output_embeddings().weight is other.module.get_input_embeddings().weight
    # the format with tied embeddings has no place for an output matrix
    model.module.get_output_embeddings().weight = nn.Parameter(model.token_embeddings().detach() * 2)
    before = file_hashes(tmp_path / "saved")
    refuses(lambda: model.save_pretrained(tmp_path / "saved"), "no longer fits the format.*unexpected weights:")
    assert file_hashes(tmp_path / "saved") == before


def test_views_of_one_tensor_are_stored_separately(tmp_path: Path) -> None:
    model = paradec.load(write(tmp_path / "source", "Dream"))
    stacked = torch.cat([model.token_embeddings().detach(), model.module.lm_head.weight.detach()])
    rows = len(stacked) // 2
    model.module.get_input_embeddings().weight = nn.Parameter(stacked[:rows])
    model.module.lm_head.weight = nn.Parameter(stacked[rows:])
    model.module.model.layers[0].mlp.up_proj.weight = model.module.model.layers[0].mlp.gate_proj.weight
    model.save_pretrained(tmp_path / "saved")
    assert_models_equal(model, paradec.load(tmp_path / "saved"))


@pytest.mark.thinned
def test_arguments_of_load_are_saved(model_type: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", model_type)
    block = {"block_length": 2} if FAMILIES[model_type].block_name is not None else {}
    model = paradec.load(source, mask_token_id=9, **block)
    model.save_pretrained(tmp_path / "saved")
    other = paradec.load(tmp_path / "saved")
    assert other.facts.mask_token_id == 9
    assert_models_equal(model, other)


def test_a_block_size_from_the_folder_name_is_saved(tmp_path: Path) -> None:
    paradec.load(write(tmp_path / "SDAR-8B-Chat-b16", "sdar", block_size=None)).save_pretrained(tmp_path / "mine")
    assert paradec.load(tmp_path / "mine").facts.block_length == 16


@pytest.mark.thinned
def test_models_without_a_tokenizer_are_saved_without_one(model_type: str, tmp_path: Path) -> None:
    source = write(tmp_path / "bare", model_type, tokenizer=False, mask_token_id=3)
    model = paradec.load(source)
    assert model.tokenizer is None
    model.save_pretrained(tmp_path / "saved")
    assert read(tmp_path / "saved") == read(source)
    with_tokenizer = paradec.load(write(tmp_path / "whole", model_type))
    with_tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    with_tokenizer.tokenizer, with_tokenizer.facts = None, replace(with_tokenizer.facts, tokenizer_size=None)
    with_tokenizer.save_pretrained(tmp_path / "saved")
    other = paradec.load(tmp_path / "saved")
    assert other.tokenizer is None
    assert sorted(other.facts.eos_token_ids) == sorted(with_tokenizer.facts.eos_token_ids)
    with_tokenizer.facts = replace(with_tokenizer.facts, eos_token_ids=other.facts.eos_token_ids)  # order may differ
    assert_models_equal(with_tokenizer, other)


def test_models_from_the_hub_are_saved(hub: Path) -> None:
    snapshot = hub / "models--some--model" / "snapshots" / ("a" * 40)
    source = write(hub / "source", "llada")
    paradec.load(source).save_pretrained(snapshot, max_shard_size=3000)
    (hub / "models--some--model" / "refs").mkdir()
    (hub / "models--some--model" / "refs" / "main").write_text("a" * 40)
    paradec.load("some/model").save_pretrained(hub / "saved")
    assert_models_equal(paradec.load(source), paradec.load(hub / "saved"))
    assert read(hub / "saved")["auto_map"] == {"AutoConfig": "some/model--code.Config"}
    last = sorted(snapshot.glob("*.safetensors"))[-1]
    save_file({name: value.to(torch.int8) for name, value in load_file(last).items()}, last, {"format": "pt"})
    refuses(lambda: paradec.load("some/model"), "is int8", paradec.CheckpointError)
    last.unlink()
    refuses(lambda: paradec.load("some/model"), last.name, paradec.CheckpointError)


def test_modified_modules_are_refused(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    def check_refused(message: str, change: Callable[[Any], Any]) -> None:
        model = paradec.load(sources("llada"))
        change(model.module)
        with pytest.raises(ValueError, match=f"llada no longer fits the format.*{message}") as error:
            model.save_pretrained(tmp_path / "never")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "never").exists()

    def add_adapter(module: Any) -> None:
        module.model.layers[0].mlp.up_proj.lora_A = nn.Linear(16, 2, bias=False)

    def convert_to_integers(module: Any) -> None:
        weight = module.model.layers[0].mlp.up_proj.weight
        module.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)

    check_refused("unexpected weights: model.layers.0.mlp.up_proj.lora_A.weight", add_adapter)
    check_refused("blocks.0.up_proj.weight is int8", convert_to_integers)
    check_refused("mismatched weights: .*wte.weight", lambda module: module.resize_token_embeddings(40))
    check_refused("2 layers|missing weights: model.layers.1", lambda module: module.model.layers.__delitem__(1))


def test_unsuitable_targets_are_refused(llada: Model, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    refuses(lambda: llada.save_pretrained(file), "folder=.*file' is a file; give the path of a folder")
    assert file.read_text() == "kept"
    for name in ("adapter_config.json", "model_index.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        refuses(partial(llada.save_pretrained, folder), f"holds {name}")
        assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "many", "5 parsecs", None, []])
def test_invalid_shard_sizes_are_refused(llada: Model, tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size=") as error:
        llada.save_pretrained(tmp_path / "never", max_shard_size=size)
    assert "\n" not in str(error.value) and not (tmp_path / "never").exists()


@pytest.mark.thinned
def test_saving_over_the_source_folder(model_type: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "source", model_type)
    (folder / "README.md").write_text("mine")
    original = weights_of(folder)
    for size, files in (("50GB", 1), (3000, 5), (100000, 1), (1500, 9)):
        model = paradec.load(folder)
        model.save_pretrained(folder, max_shard_size=size)
        stored = sorted(folder.glob("*.safetensors"))
        assert len(stored) >= files and (files > 1) == (folder / "model.safetensors.index.json").exists()
        assert are_equal(weights_of(folder), original)
        assert_models_equal(model, paradec.load(folder))
    assert (folder / "README.md").read_text() == "mine" and not list(folder.glob(".saving*"))


class Stopped(BaseException):
    """A BaseException, like KeyboardInterrupt."""


def raise_at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, permanent: bool = False) -> None:
    real, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number or (permanent and calls[0] > number):
            raise Stopped
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.fixture
def saved_and_changed(tmp_path: Path, sources: Callable[[str], Path]) -> tuple[Model, Path]:
    folder = tmp_path / "folder"
    model = paradec.load(sources("Dream"))
    model.save_pretrained(folder, max_shard_size=15000)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(1)
    return model, folder


def test_a_full_disk_leaves_the_old_files(saved_and_changed: tuple[Model, Path], tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    model, folder = saved_and_changed
    before, limits = file_hashes(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    for target in (folder, tmp_path / "new"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # a larger file is cut off
        try:
            with pytest.raises(OSError):
                model.save_pretrained(target, max_shard_size=15000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file_hashes(folder) == before and not (tmp_path / "new").exists()


@pytest.mark.thinned
@pytest.mark.parametrize("size", [15000, 9000])  # 15000: the shards have the same names as before
def test_an_interrupt_while_files_are_replaced_restores_the_old_ones(
    saved_and_changed: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    model, folder = saved_and_changed
    before, entries = file_hashes(folder), sorted(path.name for path in folder.iterdir())
    number, is_saved = 0, False
    while not is_saved:
        number += 1
        with monkeypatch.context() as patch:
            raise_at_call(patch, os, "replace", number)
            try:
                model.save_pretrained(folder, max_shard_size=size)
                is_saved = True
            except Stopped:
                assert file_hashes(folder) == before and sorted(path.name for path in folder.iterdir()) == entries
    assert number > 2 * len(list(folder.glob("*.safetensors"))) > 4
    assert_models_equal(model, paradec.load(folder))


def test_a_process_killed_while_files_are_replaced_loses_none(
    saved_and_changed: tuple[Model, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end at any rename, without cleanup: no old file is lost, and no mixture of files loads."""
    model, folder = saved_and_changed
    old = {name: digest for name, digest in file_hashes(folder).items() if name.endswith((".safetensors", ".json"))}
    for index in range(1, 100):
        shutil.copytree(folder, tmp_path / str(index))
        with monkeypatch.context() as patch:
            raise_at_call(patch, os, "replace", index, permanent=True)
            try:
                model.save_pretrained(tmp_path / str(index), max_shard_size=15000)
                break
            except Stopped:
                assert set(old.values()) <= set(file_hashes(tmp_path / str(index)).values())
        if index > 1:
            refuses(partial(paradec.load, tmp_path / str(index)), "has no config.json", paradec.CheckpointError)
    assert index > 10
    # the next save succeeds, and the interrupted save's folder with the old files remains
    model.save_pretrained(tmp_path / str(index - 1), max_shard_size=15000)
    assert_models_equal(model, paradec.load(tmp_path / str(index - 1)))
    assert len(list((tmp_path / str(index - 1)).glob(".saving-*"))) == 1


def test_threads_can_save_into_one_folder(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    models = [paradec.load(sources(name)) for name in ("llada", "Dream", "llada", "Dream")]

    def save(model: Model, size: int) -> None:
        for _ in range(3):
            model.save_pretrained(tmp_path / "shared", max_shard_size=size)

    each = zip(models, (1500, 3000, 100000, 4000), strict=True)
    assert run_in_threads(*(partial(save, model, size) for model, size in each)) == [None] * 4
    actual = paradec.load(tmp_path / "shared")
    expected = next(model for model in models if type(model.module) is type(actual.module))
    assert torch.equal(logits(actual, IDS), logits(expected, IDS))
    assert not list((tmp_path / "shared").glob(".saving*"))


@pytest.mark.thinned
@pytest.mark.parametrize("times", [1, 2])
def test_modules_saved_by_transformers_load_in_transformers(source: Path, tmp_path: Path, times: int) -> None:
    model = paradec.load(source)
    model.module.save_pretrained(tmp_path)
    if times == 2:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    module, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and module.config._attn_implementation == "sdpa"
    use_plain_experts(module)
    expected = logits(model, IDS)
    assert torch.equal(module(input_ids=torch.tensor([IDS]), use_cache=False).logits[0], expected)
    facts = model.facts
    same_facts = {name: getattr(facts, name) for name in ("mask_token_id", "pad_token_id", "prediction", "topology")}
    same_facts |= {"eos_token_id": facts.eos_token_ids, "block_length": facts.block_length}
    repeated = paradec.wrap(module, **same_facts, block_align="prompt" if facts.prompt_aligned else "absolute")
    answers = [
        paradec.generate(each, [5, 6, 7], max_new_tokens=8, block_length=4).new_tokens for each in (model, repeated)
    ]
    assert torch.equal(*answers)
    refuses(lambda: paradec.load(tmp_path), "it was written by a module's save_pretrained", paradec.CheckpointError)
    repeated.unwrap().set_attn_implementation("eager")
    refuses(lambda: paradec.wrap(repeated.module, topology="causal", prediction="shifted"), "config.is_causal=False")


@pytest.mark.parametrize("topology", ["bidirectional", "block_causal", "causal"])
def test_saved_wrapped_decoders_load_in_transformers(tmp_path: Path, topology: str) -> None:
    model = tiny(2, topology)
    model.save_pretrained(tmp_path, max_shard_size=20000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    module = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert are_equal(dict(module.state_dict()), dict(model.module.state_dict()))
    block = {"block_length": 4} if topology == "block_causal" else {}
    repeated = paradec.wrap(module, mask_token_id=MASK, eos_token_id=END, topology=topology, prediction="same", **block)
    assert repeated.facts == replace(model.facts, **{"delete_token_id": None, "split_token_id": None})
    if topology != "causal":
        assert torch.equal(*[paradec.generate(each, [5, 6], max_new_tokens=8).new_tokens for each in (model, repeated)])


def test_saved_wrapped_encoders_load_in_transformers(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    tokenizer = paradec.load(sources("Dream")).tokenizer
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, initializer_range=0.4)
    model = paradec.wrap(transformers.BertForMaskedLM(config).double(), tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    module = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    repeated = paradec.wrap(module, tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert repeated.facts == model.facts
    texts = [paradec.generate(each, "w1 w2", max_new_tokens=4).text for each in (repeated, model)]
    assert texts[0] == texts[1]


class CustomModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.PreTrainedConfig(vocab_size=8)
        self.table = nn.Embedding(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def test_modules_of_unknown_formats_are_refused(tmp_path: Path) -> None:
    custom = paradec.wrap(CustomModule(), mask_token_id=7, prediction="same", topology="bidirectional")
    for model in (custom, tiny_llamagen(), paradec.load("digits-maskgit"), paradec.load("digits-ar")):
        with pytest.raises(ValueError, match=f"{type(model.module).__name__} is not a causal.*format is unknown"):
            model.save_pretrained(tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.thinned
@pytest.mark.parametrize("tied", [True, False])
def test_saving_modules_that_are_partly_on_disk(model_type: str, tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("accelerate")
    field = "weight_tying" if model_type == "llada" else "tie_word_embeddings"
    source = write(tmp_path / "source", model_type, **{field: tied})
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offload = {"offload_folder": str(tmp_path / "offload")}
    model = paradec.load(source, device_map=device_map, **offload)
    assert any(p.device.type == "meta" for p in model.module.parameters())
    model.save_pretrained(tmp_path / "saved", max_shard_size=3000)
    assert are_equal(weights_of(tmp_path / "saved"), weights_of(source))
    assert_models_equal(paradec.load(source), paradec.load(tmp_path / "saved"))
    before = file_hashes(source)
    (tmp_path / "link").symlink_to(source)
    for folder in (source, tmp_path / "link"):
        refuses(partial(model.save_pretrained, folder), "holds the weights that the model still reads from disk")
    assert file_hashes(source) == before
    model.module.save_pretrained(tmp_path / "bare")
    wrapped = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bare", device_map=device_map, **offload)
    use_plain_experts(wrapped)
    with pytest.raises(ValueError, match="holds the weights that the model still reads from disk"):
        paradec.wrap(wrapped, mask_token_id=3, prediction="same", topology="bidirectional").save_pretrained(
            tmp_path / "bare"
        )
    module, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert not any(info.values())
    use_plain_experts(module)
    assert torch.equal(module(input_ids=torch.tensor([IDS])).logits[0], logits(paradec.load(source), IDS))


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_parameters_instead_of_rope_theta(source: Path, tmp_path: Path, name: str) -> None:
    expected = {}
    for theta in (777.0, 50000):
        folder = tmp_path / str(theta)
        shutil.copytree(source, folder)
        config = read(source) | {"rope_theta": theta, "rope_scaling": None}
        (folder / "config.json").write_text(json.dumps(config))
        expected[theta] = logits(paradec.load(folder), IDS)
        del config["rope_theta"]
        config[name] = {"rope_type": "default", "rope_theta": theta}
        (folder / "config.json").write_text(json.dumps(config))
        model = paradec.load(folder)
        assert torch.equal(logits(model, IDS), expected[theta])
        model.save_pretrained(folder)
        assert read(folder) == config
        assert torch.equal(logits(paradec.load(folder), IDS), expected[theta])
    assert not torch.equal(*expected.values())


INVALID_PARAMETERS = [
    ({"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0}, "rope_parameters=.*'yarn'"),
    ({"rope_type": "default", "rope_theta": 10.0, "factor": 4.0}, "'factor'=4.0"),
    ({"rope_type": "default"}, "no 'rope_theta', nor 'rope_parameters' with one"),
    ([10.0], "rope_parameters=.* must be an object"),
    ({"rope_theta": "10"}, "rope_theta='10' must be a positive number"),
]
INVALID_SCALINGS = [
    ({"type": "dynamic", "factor": 2.0}, "rope_scaling=.*'dynamic'.*depend on others"),
    ({"type": "longrope", "factor": 2.0}, "rope_type='longrope'.*stored"),
    ({"type": "spiral"}, "rope_type='spiral' is not known"),
    ({"type": "linear", "factor": "x"}, r"\['factor'\]='x' must be"),
    ({"type": "linear", "factor": 2.0, "beta_fast": 3}, "'beta_fast'=3 has no"),
    ({"rope_type": "yarn", "type": "linear"}, "must name one rope_type"),
]
YARN = {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}
INVALID_ROPE_FIELDS = [
    ({"rope_parameters": {"rope_theta": 10.0}, "rope_theta": 20.0}, "two bases of the rotary angles"),
    ({"rope_parameters": YARN, "rope_scaling": {"factor": 2.0}}, "original_max_position_embeddings'"),
    *(({"rope_parameters": angles}, message) for angles, message in INVALID_PARAMETERS),
    *(({"rope_theta": 10.0, "rope_scaling": scaling}, message) for scaling, message in INVALID_SCALINGS),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("fields", "message"), INVALID_ROPE_FIELDS)
def test_invalid_rope_fields_are_refused(source: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    config = {name: value for name, value in read(source).items() if name not in ("rope_theta", "rope_scaling")}
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | fields))
    assert "\n" not in refuses(lambda: paradec.load(tmp_path / "copy"), message, paradec.CheckpointError)


def test_models_of_diffusers_pipelines_are_saved(sources: Callable[[str], Path], tmp_path: Path) -> None:
    model = paradec.load(sources("sdar"))
    pipe = LLaDA2Pipeline(BlockCausalModule(model), BlockRefinementScheduler(block_length=4), model.tokenizer)
    pipe.save_pretrained(tmp_path)
    with paradec.accelerate(pipe, cache="block"):  # the hooks must not be saved
        model.save_pretrained(tmp_path / "model")
    loaded = paradec.load(tmp_path / "model")
    repeated = LLaDA2Pipeline.from_pretrained(tmp_path, model=BlockCausalModule(loaded), tokenizer=loaded.tokenizer)
    request = {"gen_length": 8, "num_inference_steps": 8, "mask_token_id": 3, "eos_token_id": 2}
    texts = [pipeline("w1 w2 w3", use_chat_template=False, **request).texts for pipeline in (pipe, repeated)]
    assert texts[0] == texts[1]
    refuses(lambda: LLaDA2Pipeline.from_pretrained(tmp_path, tokenizer=loaded.tokenizer), "expected .*model")
