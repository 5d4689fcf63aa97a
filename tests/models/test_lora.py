"""LoRA adapters in peft's format over LLaDA and Dream checkpoints."""

import copy
import json
import pickle
import re
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.prompt_blocks import commits, plain_loop
from places import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec import CheckpointError, PipelinedBlocks, samplers
from paradec.models.lora import SUPPORTED

CONFIG = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "base_model_name_or_path": "Dream-org/Dream-v0-Base-7B",
    "bias": "none", "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 6,
    "lora_bias": False, "lora_dropout": 0.1, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_type": "LORA", "r": 4, "rank_pattern": {}, "revision": None, "task_type": None, "use_dora": False,
    "use_rslora": False,
}  # fmt: skip
"""adapter_config.json of peft. D2F's config has rank and alpha 32, and the modules in `TARGETS`."""
TARGETS = {
    "dream-tiny": ["q_proj", "v_proj", "k_proj", "o_proj"],
    "llada-tiny": ["q_proj", "v_proj", "k_proj", "attn_out"],
}
BASES = sorted(TARGETS)


def random_adapter(base: str, rank: int = 4, targets: Any = None) -> dict[str, tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    result = {}
    for name, weight in load_file(GOLDEN / base / "model.safetensors").items():
        if name.removesuffix(".weight").endswith(tuple(targets or TARGETS[base])) and weight.ndim == 2:
            down, up = (torch.randn(size, generator=rng) for size in ((rank, weight.shape[1]), (len(weight), rank)))
            result[name.removesuffix(".weight")] = down * 0.1, up * 0.5
    return result


def write(folder: Path, base: str, pairs: dict | None = None, **fields: Any) -> Path:
    pairs = random_adapter(base) if pairs is None else pairs
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": TARGETS[base]} | fields))
    tensors = {}
    for name, (down, up) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.clone()
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.clone()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_merged(folder: Path, base: str, pairs: dict, scale: Any) -> Path:
    shutil.copytree(GOLDEN / base, folder)
    weights = load_file(folder / "model.safetensors")
    for name, (down, up) in pairs.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale(name) * (up @ down)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_weights(a: Any, b: Any) -> bool:
    pairs = zip(a.module.state_dict().items(), b.module.state_dict().items(), strict=True)
    return all(n == m and torch.allclose(x, y, rtol=0, atol=1e-6) for (n, x), (m, y) in pairs)


@pytest.mark.thinned
@pytest.mark.parametrize("base", BASES)
def test_merged_weights_equal_a_manual_merge(base: str, tmp_path: Path) -> None:
    pairs = random_adapter(base)
    first = next(iter(pairs))
    cases: list[tuple[dict, Any]] = [
        ({}, lambda name: 6 / 4),
        ({"use_rslora": True}, lambda name: 6 / 2),
        ({"alpha_pattern": {"q_proj": 3}}, lambda name: (3 if name.endswith("q_proj") else 6) / 4),
        ({"target_modules": rf".*\.({'|'.join(TARGETS[base])})"}, lambda name: 6 / 4),
        ({"target_modules": "all-linear"}, lambda name: 6 / 4),
    ]
    plain = paradec.load(GOLDEN / base)
    for number, (fields, scale) in enumerate(cases):
        by_hand = paradec.load(write_merged(tmp_path / f"hand{number}", base, pairs, scale))
        ours = paradec.load(GOLDEN / base, adapter=write(tmp_path / f"adapter{number}", base, pairs, **fields))
        assert same_weights(ours, by_hand) and not same_weights(ours, plain)
        assert ours.facts == plain.facts and ours.facts.topology == "bidirectional"
    # one matrix has another rank, and the adapter folder is loaded alone, because it names its base
    pairs[first] = random_adapter(base, rank=2)[first]
    by_hand = paradec.load(write_merged(tmp_path / "hand", base, pairs, lambda name: 6 / (2 if name == first else 4)))
    fields = {"rank_pattern": {first: 2}, "base_model_name_or_path": str(GOLDEN / base)}
    assert same_weights(paradec.load(write(tmp_path / "ranks", base, pairs, **fields)), by_hand)


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    base = "llada-tiny"
    adapter = write(tmp_path / "adapter", base)
    wide, half = (paradec.load(GOLDEN / base, dtype=dtype, adapter=adapter) for dtype in ("float64", "bfloat16"))
    name = "model.layers.0.self_attn.q_proj.weight"
    original = paradec.load(GOLDEN / base, dtype="bfloat16").module.state_dict()[name].double()
    down, up = random_adapter(base)["model.transformer.blocks.0.q_proj"]
    expected = (original + 1.5 * (up.double() @ down.double())).bfloat16()
    assert (half.module.state_dict()[name] == expected).double().mean() > 0.999
    assert torch.allclose(wide.module.state_dict()[name], half.module.state_dict()[name].double(), atol=0.02)


@pytest.mark.thinned
@pytest.mark.parametrize("base", BASES)
def test_d2f_decodes_like_its_plain_loop(base: str, tmp_path: Path) -> None:
    name = "D2F_Dream_Base_7B_Lora" if base == "dream-tiny" else "D2F_LLaDA_Instruct_8B_Lora"
    adapter = write(tmp_path / name, base, base_model_name_or_path=str(GOLDEN / base))
    model = paradec.load(adapter)
    assert (model.facts.topology, model.facts.block_length, model.facts.block_align) == ("block_causal", 32, "prompt")
    assert paradec.load(adapter, topology="bidirectional").facts.block_align == "absolute"
    model = paradec.load(GOLDEN / base, adapter=adapter, dtype="float64", block_length=4)
    rows = [[37, 5, 0, 2, 41], [1], [3, 9, 2, 7, 7, 1, 0]]
    request: dict[str, Any] = {"sampler": samplers.create("threshold", threshold=0.5), "max_new_tokens": 12}
    for cache in ("none", "block", "delayed"):
        blocks = PipelinedBlocks(4, add=0.5)
        out = paradec.generate(model, rows, blocks=blocks, cache=cache, trace=True, eos_early_stop=False, **request)
        for row, prompt in enumerate(rows):
            assert commits(out, row) == plain_loop(model, prompt, 12, 0.5, 0.5)


def test_saved_block_causal_models_keep_their_blocks(tmp_path: Path) -> None:
    adapter = write(tmp_path / "some-adapter", "dream-tiny")
    with pytest.raises(CheckpointError, match="topology='block_causal' needs a block length for .*block_length="):
        paradec.load(GOLDEN / "dream-tiny", topology="block_causal")
    model = paradec.load(GOLDEN / "dream-tiny", adapter=adapter, topology="block_causal", block_length=16)
    ids = [[37, 5, 0, 2, 41]]
    before = paradec.generate(model, ids, max_new_tokens=20).sequences.tolist()
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "adapter_config.json").exists()
    for repeated in (paradec.load(tmp_path / "saved"), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert repeated.facts.block_length == 16 and repeated.facts.block_align == "prompt"
        assert paradec.generate(repeated, ids, max_new_tokens=20).sequences.tolist() == before
    assert paradec.load(tmp_path / "saved", topology="bidirectional").facts.topology == "bidirectional"
    shorter = paradec.load(tmp_path / "saved", block_length=4)
    assert paradec.generate(shorter, ids, max_new_tokens=20).sequences.tolist() != before


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = GOLDEN / "llada-tiny"
    pairs = random_adapter("llada-tiny")
    name = next(iter(pairs))
    down, up = pairs[name]
    cases: list[tuple[dict | None, dict, str]] = [
        ({k: v for k, v in pairs.items() if k != name}, {}, f"missing weights: {name}.lora_A"),
        (pairs | {"model.layers.0.self_attn.q_proj": pairs[name]}, {}, "unexpected weights: model.layers.0"),
        (pairs | {name: (down[:, :-1], up)}, {}, "mismatched weights: .* instead of"),
        (None, {"r": 8}, r"mismatched weights: .*lora_A.weight \[4, 128\] instead of \[8, 128\]"),
        (None, {"target_modules": []}, r"target_modules=\[\] must be names of matrices, a pattern of names or"),
        (None, {"rank_pattern": {"(?i)Q_PROJ": 2}}, r"a pattern \(.*rank_pattern.*\) is wrong: global"),
        (None, {"target_modules": "nothing"}, "select none of its matrices: model.transformer.blocks.0"),
        (None, {"layers_to_transform": 0, "target_modules": "x"}, "`layers_to_transform` cannot be used when"),
        (None, {"layers_pattern": "blocks"}, "`layers_to_transform` must also be specified"),
        (None, {"use_dora": True}, "use_dora=True is not supported; supported: False, None. Merge it with peft"),
        (None, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({}, {}, "holds no matrices"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr("paradec.models.masked._read_pretrained", None)  # errors come before the base is read
        for number, (held, fields, message) in enumerate(cases):
            folder = write(tmp_path / str(number), "llada-tiny", held, **fields)
            with pytest.raises(CheckpointError, match=message):
                paradec.load(base, adapter=folder)
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(ModuleNotFoundError, match="needs peft: install paradec's extra 'lora'"):
            paradec.load(base, adapter=write(tmp_path / "without", "llada-tiny"))
    folder = write(tmp_path / "infinite", "llada-tiny", pairs | {name: (down * float("inf"), up)})
    with pytest.raises(CheckpointError, match=f"{name} with the adapter .* has values that are not finite"):
        paradec.load(base, adapter=folder)
    folder = write(tmp_path / "halves", "llada-tiny")
    weights = load_file(folder / "adapter_model.safetensors")
    missing = f"base_model.model.{name}.lora_B.weight"
    save_file({k: v for k, v in weights.items() if k != missing}, folder / "adapter_model.safetensors")
    refuses(lambda: paradec.load(base, adapter=folder), f"missing weights: {name}.lora_B.weight", CheckpointError)
    save_file(weights | {"base_model.model.lm_head.weight": up}, folder / "adapter_model.safetensors")
    refuses(lambda: paradec.load(base, adapter=folder), r"holds base_model.model.lm_head.weight .*", CheckpointError)
    (folder / "adapter_model.safetensors").unlink()
    refuses(lambda: paradec.load(base, adapter=folder), r"has no adapter_model.safetensors", CheckpointError)
    refuses(lambda: paradec.load(base, adapter=base), "has no adapter_config.json", CheckpointError)


def layer_of(name: str) -> int:
    return int(name.split(".blocks." if ".blocks." in name else ".layers.")[1].split(".")[0])


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("fields", "merged"),
    [
        ({"layers_to_transform": [1, 5]}, lambda name: layer_of(name) == 1),
        ({"layers_to_transform": 0, "layers_pattern": ["h", "blocks"]}, lambda name: layer_of(name) == 0),
        ({"layers_to_transform": [], "target_modules": ["q_proj"]}, lambda name: name.endswith("q_proj")),
        ({"target_modules": r"(?!.*(k|v)_proj).*\.([a-z]_proj|attn_out)"}, lambda name: name[-6] not in "kv"),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"}, lambda name: layer_of(name) != 0),
        ({"exclude_modules": ["q_proj"]}, lambda name: not name.endswith("q_proj")),
    ],
)
def test_matrices_outside_target_modules_are_not_merged(fields: dict, merged: Any, tmp_path: Path) -> None:
    base = "llada-tiny"
    pairs = random_adapter(base)
    merged_pairs = {name: pair for name, pair in pairs.items() if merged(name)}
    assert 0 < len(merged_pairs) < len(pairs)
    by_hand = paradec.load(write_merged(tmp_path / "hand", base, merged_pairs, lambda name: 6 / 4))
    with pytest.warns(UserWarning, match="does not name model.transformer.blocks.*: left out, as by peft"):
        ours = paradec.load(GOLDEN / base, adapter=write(tmp_path / "adapter", base, pairs, **fields))
    assert same_weights(ours, by_hand)


class Raw(str):
    """The text of a JSON value that json.dumps cannot write."""


ATOMS = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats()
ATOMS |= st.text("aq_.*+?|()[]{}^$\\019,", max_size=12)
KEYS = st.sampled_from(["q_proj", "(", ".*", ""])
ANYTHING = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2))
ANYTHING |= st.sampled_from([100, 500, 900, 950, 980, 5000]).map(lambda depth: Raw("[" * depth + "]" * depth))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted({*CONFIG, *SUPPORTED, "target_modules"})), value=ANYTHING)
def test_every_field_value_is_merged_or_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", "llada-tiny", **{field: "AT"})
    text = (folder / "adapter_config.json").read_text()
    value = value if isinstance(value, Raw) else json.dumps(value)
    (folder / "adapter_config.json").write_text(text.replace(f'"{field}": "AT"', f'"{field}": {value}'))
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = paradec.load(GOLDEN / "llada-tiny", adapter=folder)
    except (ValueError, TypeError) as error:
        assert re.search(rf"\b{field}\b|not valid JSON", str(error)), error
    else:
        assert all(weight.isfinite().all() for weight in model.module.parameters())
    assert time.process_time() - began < 5


@pytest.mark.thinned
@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True, "alpha_pattern": {r"layers\.0\..*": 3, "v_proj": 5}},
        {"target_modules": r".*\.[01]\..*[qv]_proj", "exclude_modules": ["model.layers.1.self_attn.v_proj"]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
    ],
)
@pytest.mark.filterwarnings("ignore:.*left out, as by peft", "ignore::UserWarning:peft", "ignore::FutureWarning")
def test_merged_weights_equal_peft(fields: dict, tmp_path: Path) -> None:
    from peft import PeftModel

    base = GOLDEN / "dream-tiny"
    adapter = write(tmp_path, "dream-tiny", **fields)
    ours = paradec.load(base, adapter=adapter, dtype="float64")
    plain = type(ours.module)(ours.module.config).double()
    plain.load_state_dict(paradec.load(base, dtype="float64").module.state_dict())
    merged = PeftModel.from_pretrained(plain, adapter, autocast_adapter_dtype=False).merge_and_unload()
    for (name, mine), (other, peft) in zip(ours.module.state_dict().items(), merged.state_dict().items(), strict=True):
        assert name == other and torch.allclose(mine, peft, rtol=0, atol=1e-12), name
