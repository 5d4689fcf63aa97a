"""Mixtures of experts: loading, and the logits of their published code."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import (
    MOE,
    MOE_CHECKPOINTS,
    MOE_NAMES,
    golden_moe,
    moe_facts,
    moe_format,
    moe_forwards,
    small_config,
    small_weights,
)
from decoding import refuses
from places import GOLDEN
from recorded import is_packaged, read_arrays, read_json_unrecorded, replay
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec import caches
from paradec.core.query import Query, StoreCall
from paradec.models.adapter import Model

TOLERANCE = 2e-4
"""Tolerance of the golden logits in float32. Deliberate mistakes changed them by 4e-2 or more."""
MODULES = {
    "llada2-tiny": "Glm4MoeForCausalLM",
    "llada-moe-tiny": "Qwen3MoeForCausalLM",
    "sdar-moe-tiny": "Qwen3MoeForCausalLM",
}
BLOCK_CAUSAL = ("llada2-tiny", "sdar-moe-tiny")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 20], [21]]
EXACT = sorted({"prefix", "dual", "block"} & set(caches.names()))
"""Caches that are exact for block-causal models decoded in blocks of the model's length."""


@pytest.fixture(params=MOE_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=MOE_CHECKPOINTS, ids=lambda folder: folder.name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.param


def tensors(name: str | Path) -> dict[str, Tensor]:
    return read_arrays(MOE / name / "forwards.safetensors")


def cases(name: str | Path, *kinds: str) -> list[dict[str, Any]]:
    return [case for case in moe_forwards(name)["cases"] if case["kind"] in kinds]


def edit_copy(folder: Path, name: str, weights: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """Copy a golden checkpoint with other fields in config.json (`...` removes a field) or other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MOE / name / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    if weights is None:
        (folder / "model.safetensors").symlink_to(MOE / name / "model.safetensors")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def block_causal_mask(case: dict[str, Any], length: int) -> Tensor:
    """Return the attention mask [1, length, length]. Blocks are counted from column 0, not by position ids."""
    block = torch.arange(length) // case["block_length"]
    return (block[:, None] >= block[None, :]).unsqueeze(0)


def logits_of(model: Model, case: dict[str, Any]) -> Tensor:
    ids = torch.tensor(case["input_ids"])
    rows, length = ids.shape
    positions = torch.tensor(case["position_ids"]) if "position_ids" in case else torch.arange(length).expand_as(ids)
    valid = visible = None
    if case["kind"] == "block_causal":
        visible = None if "position_ids" not in case else block_causal_mask(case, length).expand(rows, -1, -1)
    elif case["kind"] == "padded":
        valid = torch.tensor(case["attention_mask"]).bool()
    elif model.facts.topology == "block_causal":
        visible = torch.ones(rows, length, length, dtype=torch.bool)
    return model(Query(rows=np.arange(rows), tokens=ids, positions=positions, valid=valid, visible=visible))


def test_facts_equal_the_recorded_ones(checkpoint: Path) -> None:
    model, facts, name = golden_moe(checkpoint), moe_forwards(checkpoint)["facts"], moe_format(checkpoint)
    with replay(f"{checkpoint.name}, facts"):
        assert type(model.module) is getattr(transformers, MODULES[name])
        assert (model.facts.mask_token_id, model.facts.eos_token_ids) == (facts["mask"], (facts["eos"],))
        assert model.facts.prediction == "same"
        assert model.facts.topology == ("block_causal" if name in BLOCK_CAUSAL else "bidirectional")
        assert model.facts.block_length == (facts["block"] if name in BLOCK_CAUSAL else None)
        assert model.facts.pad_token_id in (None, facts["pad"])
        assert model.supports_store and model.pads
        assert model.module.config._experts_implementation == "grouped_mm"  # not transformers' loop over the experts


def parametrize_kinds(*kinds: str) -> list[Any]:
    return [
        pytest.param(folder, kind, id=f"{folder.name}-{kind}")
        for folder in MOE_CHECKPOINTS
        for kind in kinds
        if any(case["kind"] == kind for case in read_json_unrecorded(folder / "forwards.json")["cases"])
    ]


@pytest.mark.parametrize(("checkpoint", "kind"), parametrize_kinds("full", "block_causal", "padded"))
def test_logits_equal_the_recorded_ones(checkpoint: Path, kind: str) -> None:
    expected = tensors(checkpoint)
    for case in cases(checkpoint, kind):
        with replay(f"{checkpoint.name}, {case['name']}"):
            block = case["block_length"] if kind == "block_causal" else None
            difference = (logits_of(golden_moe(checkpoint, block_length=block), case) - expected[case["name"]]).abs()
            if kind == "padded":
                difference = difference[torch.tensor(case["attention_mask"]).bool()]
            assert difference.max() < TOLERANCE, case["name"]


def test_padded_batches_give_the_recorded_logits(checkpoint: Path) -> None:
    expected, mask = tensors(checkpoint), moe_forwards(checkpoint)["facts"]["mask"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases(checkpoint, "full", "block_causal"):
        if "group" in case:
            groups.setdefault(case["group"], []).append(case)
    assert groups or not is_packaged("moe")
    for members in groups.values():
        rows = [case["input_ids"][0] for case in members]
        lengths, width = [len(row) for row in rows], max(map(len, rows))
        ids = torch.full((len(rows), width), mask)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        valid = torch.arange(width) < torch.tensor(lengths)[:, None]
        block = members[0].get("block_length")
        model = golden_moe(checkpoint, block_length=block)
        visible = None
        if block is None and model.facts.topology == "block_causal":
            visible = torch.ones(len(rows), width, width, dtype=torch.bool)
        positions = torch.arange(width).expand_as(ids)
        actual = model(Query(rows=np.arange(len(rows)), tokens=ids, positions=positions, valid=valid, visible=visible))
        for row, case in enumerate(members):
            with replay(f"{checkpoint.name}, {case['name']}"):
                assert (actual[row, : lengths[row]] - expected[case["name"]][0]).abs().max() < TOLERANCE, case["name"]


@pytest.mark.parametrize(("checkpoint", "kind"), parametrize_kinds("cached"))
def test_logits_over_a_store_equal_the_recorded_ones(checkpoint: Path, kind: str) -> None:
    expected = tensors(checkpoint)
    for case in cases(checkpoint, kind):
        with replay(f"{checkpoint.name}, {case['name']}"):
            model = golden_moe(checkpoint, block_length=case["block_length"])
            length = max(call["start"] + len(call["input_ids"][0]) for call in case["calls"])
            rows = len(case["calls"][0]["input_ids"])
            store = model.make_store(rows, length)
            for call in case["calls"]:
                ids = torch.tensor(call["input_ids"])
                positions = (call["start"] + torch.arange(ids.shape[1])).expand_as(ids)
                slots = positions if call["stored"] else None
                call_store = StoreCall(torch.arange(rows), slots, visible_length=length)
                actual = model(Query(np.arange(rows), ids, positions, kind="window", store=call_store), store)
                assert (actual - expected[call["logits"]]).abs().max() < TOLERANCE, call["logits"]


def test_hidden_states_and_routing_equal_the_recorded_ones(checkpoint: Path) -> None:
    model, expected = golden_moe(checkpoint), tensors(checkpoint)
    close = {"rtol": 0, "atol": 5e-5}
    for hidden in cases(checkpoint, "hidden"):
        with replay(f"{checkpoint.name}, {hidden['name']}"):
            seen = inputs_and_outputs(model, hidden, dict(enumerate(model.module.model.layers)))
            names = hidden["tensors"]
            for index, key in enumerate(names[:-1]):
                torch.testing.assert_close(seen[index][0], expected[key], **close)
            torch.testing.assert_close(seen["norm"][1], expected[names[-1]], **close)
    for router in cases(checkpoint, "router"):
        with replay(f"{checkpoint.name}, {router['name']}"):
            block: Any = model.module.model.layers[router["layer"]].mlp
            source = router if "input_ids" in router else cases(checkpoint, "hidden")[0]
            seen = inputs_and_outputs(model, source, {"gate": block.gate, "block": block})
            wanted = {key.split("router_")[-1]: expected[key] for key in router["tensors"]}
            logits, weights, indices = seen["gate"][1]
            width = wanted["input"].shape[-1]
            torch.testing.assert_close(seen["block"][0].view(-1, width), wanted["input"], **close)
            torch.testing.assert_close(seen["block"][1].view(-1, width), wanted["output"], **close)
            torch.testing.assert_close(block.gate.weight.float() @ wanted["input"].T, wanted["logits"].T, **close)
            order = indices.argsort(-1)
            assert torch.equal(indices.gather(-1, order).long(), wanted["indices"].long())
            torch.testing.assert_close(weights.gather(-1, order), wanted["weights"], **close)


def inputs_and_outputs(model: Model, case: dict[str, Any], modules: dict[Any, Any]) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}

    def record(name: Any) -> Any:
        return lambda module, args, output: seen.update({name: (args[0], output)})

    modules = modules | {"norm": model.module.model.norm}
    hooks = [module.register_forward_hook(record(name)) for name, module in modules.items()]
    try:
        logits_of(model, case | {"kind": "full"})
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "sampler"), [*((name, "threshold") for name in MOE_NAMES), ("llada2-tiny", "editing")]
)
def test_batches_and_exact_caches_do_not_change_the_tokens(name: str, sampler: str) -> None:
    model = golden_moe(name, "float64")
    width = max(map(len, PROMPTS))
    ids, mask = torch.full((len(PROMPTS), width), 30), torch.zeros(len(PROMPTS), width, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    new = 11 if sampler == "threshold" else 6
    request: dict[str, Any] = {"sampler": sampler, "max_new_tokens": new, "eos_early_stop": False}
    out = paradec.generate(model, ids, attention_mask=mask, trace=True, **request)
    for row, prompt in enumerate(PROMPTS):
        alone = paradec.generate(model, [prompt], **request)
        assert out.new_tokens[row].tolist() == alone.new_tokens[0].tolist()
    if name in BLOCK_CAUSAL:
        for cache in EXACT:
            other = paradec.generate(model, ids, attention_mask=mask, cache=cache, **request)
            assert other.new_tokens.tolist() == out.new_tokens.tolist(), cache
            assert other.forwarded_tokens < out.forwarded_tokens, cache


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_dtype_decodes(name: str, dtype: str) -> None:
    model = golden_moe(name, dtype)
    assert model.dtype == getattr(torch, dtype)
    assert model.module.config._experts_implementation == ("eager" if dtype == "float64" else "grouped_mm")
    case = cases(name, "full")[0]
    difference = (logits_of(model, case).double() - tensors(name)[case["name"]].double()).abs().mean()
    assert difference < {"bfloat16": 0.3, "float16": 0.03}.get(dtype, 5e-5)
    out = paradec.generate(model, PROMPTS, max_new_tokens=5, cache="prefix", eos_early_stop=False)
    assert out.new_tokens.shape == (len(PROMPTS), 5)


def test_sizes_without_a_grouped_matrix_product(tmp_path: Path) -> None:
    """If rows of the weights are not multiples of 16 bytes, transformers' loop over the experts is used."""
    config = small_config("sdar-moe-tiny")
    folder = edit_copy(tmp_path, "sdar-moe-tiny", small_weights("sdar-moe-tiny", config), **config)
    answers = []
    for dtype in ("float32", "float64"):
        model = paradec.load(folder, dtype=dtype, mask_token_id=3)
        assert model.module.config._experts_implementation == "eager"
        answers.append(paradec.generate(model, PROMPTS, max_new_tokens=6, eos_early_stop=False).new_tokens.tolist())
    assert answers[0] == answers[1]


REFUSED: list[tuple[str, str, Any]] = [
    *(("llada2-tiny", *entry) for entry in (
        ("use_qkv_bias", True), ("use_bias", True), ("use_qk_norm", False), ("norm_topk_prob", False),
        ("score_function", "softmax"), ("moe_router_enable_expert_bias", False), ("router_dtype", "bf16"),
        ("use_sliding_window", True), ("hidden_act", "gelu"), ("norm_head", True), ("n_group", 3), ("n_group", 16),
        ("topk_group", 5), ("topk_group", 0), ("num_experts_per_tok", 17), ("num_experts_per_tok", 9),
        ("num_shared_experts", 0), ("num_shared_experts", None), ("routed_scaling_factor", 0),
        ("first_k_dense_replace", 4), ("first_k_dense_replace", -1), ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.2), ("rotary_dim", 16), ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("num_key_value_heads", 3), ("head_dim", "16"),
        ("quantization_config", {"quant_method": "fp8"}), ("block_length", 0), ("rms_norm_eps", ...),
        ("num_experts", ...), ("mask_token_id", 96),
    )),
    *(("llada-moe-tiny", *entry) for entry in (
        ("norm_topk_prob", True), ("moe_router_enable_expert_bias", True), ("moe_router_score_function", "sigmoid"),
        ("routed_scaling_factor", 2.5), ("router_num_group", 4), ("router_topk_group", 2), ("qk_layernorm", False),
        ("qk_layernorm", ...), ("clip_qkv", 8.0), ("attention_bias", True), ("partial_rotary_factor", 0.5),
        ("shared_expert_intermediate_size", 24), ("moe_layer_freq", [1, 1]), ("moe_layer_freq", [1, 2, 1]),
        ("moe_layer_freq", 1), ("num_experts_per_tok", 9), ("num_experts", 0), ("hidden_size", 66), ("head_dim", 32),
        ("rope_scaling", {"type": "linear"}), ("expert_intermediate_size", ...),
    )),
    *(("sdar-moe-tiny", *entry) for entry in (
        ("norm_topk_prob", ...), ("norm_topk_prob", "yes"), ("num_experts_per_tok", 9), ("mlp_only_layers", [3]),
        ("mlp_only_layers", "0"), ("decoder_sparse_step", 0), ("moe_intermediate_size", ...), ("attention_bias", True),
        ("use_sliding_window", True), ("head_dim", 31), ("rope_scaling", {"type": "yarn", "factor": 4.0}),
    )),
]  # fmt: skip
"""Fields that change the result, with unsupported or invalid values."""


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "field", "value"), REFUSED)
def test_unsupported_fields_are_refused(tmp_path: Path, name: str, field: str, value: Any) -> None:
    folder = edit_copy(tmp_path, name, **{field: value})
    with pytest.raises(paradec.CheckpointError, match=field) as error:
        paradec.load(folder, **{key: given for key, given in moe_facts(name).items() if key != field})
    assert "\n" not in str(error.value)


CHANGING = [
    ("llada2-tiny", "rope_theta", 10000),
    ("llada-moe-tiny", "rms_norm_eps", 1e-2),
    ("sdar-moe-tiny", "norm_topk_prob", False),
]


@pytest.mark.parametrize(("name", "field", "value"), CHANGING)
def test_fields_that_change_the_logits(tmp_path: Path, name: str, field: str, value: Any) -> None:
    model = paradec.load(edit_copy(tmp_path, name, **{field: value}), **moe_facts(name))
    case = cases(name, "full")[0]
    assert (logits_of(model, case) - tensors(name)[case["name"]]).abs().max() > 1e-2


def naive_mixture(name: str, config: dict[str, Any], weights: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """Compute a layer of experts by the published rule, token by token, in float64. x: [N, hidden] -> same shape."""

    def expert(path: str, token: Tensor) -> Tensor:
        gate, up, down = (weights[f"{prefix}{path}.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ token) * (up @ token))

    num_selected, rows = config["num_experts_per_tok"], []
    for token in x.double():
        logits = weights[f"{prefix}gate.weight"].double() @ token
        if name == "llada2-tiny":
            scores = logits.sigmoid()
            ranked = scores + weights[f"{prefix}gate.expert_bias"].double()
            groups = ranked.view(config["n_group"], -1)
            best = groups.sort(-1, descending=True).values[:, :2].sum(-1).argsort(descending=True)
            for group in best[config["topk_group"] :].tolist():
                groups[group] = -torch.inf
        else:
            ranked = scores = logits.softmax(-1)
        selected = ranked.argsort(descending=True)[:num_selected].tolist()
        shares = scores[selected]
        if name == "llada2-tiny":
            shares = shares * config["routed_scaling_factor"] / (shares.sum() if num_selected > 1 else 1)
        elif name == "sdar-moe-tiny" and config["norm_topk_prob"]:
            shares = shares / shares.sum()
        row = sum(weight * expert(f"experts.{index}", token) for weight, index in zip(shares, selected, strict=True))
        rows.append(row + expert("shared_experts", token) if name == "llada2-tiny" else row)
    return torch.stack(rows)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llada2-tiny", {}),
        ("llada2-tiny", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 5, "routed_scaling_factor": 1.5}),
        ("llada2-tiny", {"num_experts_per_tok": 1}),
        ("llada2-tiny", {"n_group": 1, "topk_group": 1}),
        ("llada-moe-tiny", {"num_experts_per_tok": 5}),
        ("sdar-moe-tiny", {}),
        ("sdar-moe-tiny", {"norm_topk_prob": False, "num_experts_per_tok": 4}),
    ],
)
def test_routing_follows_config_json(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    folder = edit_copy(tmp_path, name, **fields)
    model = paradec.load(folder, dtype="float64", **moe_facts(name))
    config = json.loads((folder / "config.json").read_text())
    layer = 2
    x = torch.randn(12, config["hidden_size"], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.inference_mode():
        routed = model.module.model.layers[layer].mlp(x.unsqueeze(0))[0]
    expected = naive_mixture(name, config, load_file(folder / "model.safetensors"), f"model.layers.{layer}.mlp.", x)
    torch.testing.assert_close(routed, expected, rtol=0, atol=1e-5)  # routers use float32


@pytest.mark.parametrize("architectures", [["LLaDAMoEModel"], ["LLaDAMoEModelLM"], None])
def test_llada_moe_is_distinguished_from_llada(tmp_path: Path, architectures: Any) -> None:
    folder = edit_copy(tmp_path, "llada-moe-tiny", architectures=architectures)
    assert type(paradec.load(folder, mask_token_id=95).module).__name__ == "Qwen3MoeForCausalLM"


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("release", "block"),
    [
        ("LLaDA2.0-mini", 32),
        ("LLaDA2.0-flash-preview", 32),
        ("LLaDA2.1-flash", 32),
        ("LLaDA2.2-mini", None),
        ("mine", None),
    ],
)
def test_the_block_length_follows_the_release_name(tmp_path: Path, release: str, block: int | None) -> None:
    folder = edit_copy(tmp_path / release, "llada2-tiny", mask_token_id=95)
    if block is None:
        refuses(lambda: paradec.load(folder), r"states its block length", paradec.CheckpointError)
    else:
        assert paradec.load(folder).facts.block_length == block
    assert paradec.load(folder, block_length=16).facts.block_length == 16


def test_end_tokens_of_llada2(tmp_path: Path) -> None:
    """Without eos_token_id in config.json: the end token of the tokenizer (or the padding token), and <|role_end|>."""

    def end_ids(folder: Path) -> tuple[int, ...]:
        return paradec.load(folder, **moe_facts("llada2-tiny")).facts.eos_token_ids

    folder = edit_copy(tmp_path / "bare", "llada2-tiny")
    assert end_ids(folder) == (92,)
    assert end_ids(edit_copy(tmp_path / "stated", "llada2-tiny", eos_token_id=[7, 8])) == (7, 8)
    assert end_ids(edit_copy(tmp_path / "none", "llada2-tiny", pad_token_id=...)) == ()
    words = {f"w{index}": index for index in range(96)} | {"<|endoftext|>": 93, "<|role_end|>": 94, "<|mask|>": 95}
    words = {word: index for word, index in words.items() if word not in ("w93", "w94", "w95")}
    table = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert end_ids(folder) == (93, 94)
    assert paradec.load(folder, block_length=8).facts.mask_token_id == 95  # the id of <|mask|>


@pytest.mark.thinned
def test_expert_counts_that_do_not_fit_the_files_are_refused(name: str, tmp_path: Path) -> None:
    stored = json.loads((MOE / name / "config.json").read_text())["num_experts"]

    def check(folder: Path, message: str) -> None:
        with pytest.raises(paradec.CheckpointError, match=message) as error:
            paradec.load(folder, **moe_facts(name))
        assert "\n" not in str(error.value) and len(str(error.value)) < 300

    for count in (2 * stored, 10**9 // stored * stored):
        folder = edit_copy(tmp_path / str(count), name, num_experts=count)
        check(folder, f"do not fit config.json: {count} experts, but layer . holds {stored}$")
    weights = load_file(MOE / name / "model.safetensors")
    reduced = {key: value for key, value in weights.items() if "layers.2.mlp.experts.3." not in key}
    check(edit_copy(tmp_path / "hole", name, reduced), f"{stored} experts, but layer 2 holds {stored - 1}")
    reduced = {key: value for key, value in weights.items() if "layers.2.mlp.experts.3.up_proj" not in key}
    check(edit_copy(tmp_path / "part", name, reduced), "missing weights: model.layers.2.mlp.experts.3.up_proj.weight$")
    key = "model.layers.1.mlp.experts.0.gate_proj.weight"
    wrong = weights | {key: weights[key][:-1].clone()}
    check(edit_copy(tmp_path / "shape", name, wrong), rf"mismatched weights: {key} \[")
    stacked = torch.stack([weights[f"model.layers.1.mlp.experts.{index}.up_proj.weight"] for index in range(stored)])
    trained = weights | {"model.layers.1.mlp.experts.up_proj": stacked}
    check(edit_copy(tmp_path / "trained", name, trained), "in the training form.*layers.1.mlp.experts.up_proj")
    multimodal = weights | {"model.language_model.norm.weight": weights["model.norm.weight"].clone()}
    check(edit_copy(tmp_path / "seeing", name, multimodal), "of a model with pictures")


LLAMA = {
    "model_type": "llama", "architectures": ["StableDiffcoderForCausalLM"], "vocab_size": 32, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "rope_scaling": None,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float64",
}  # fmt: skip


def write_diffcoder(folder: Path, **fields: Any) -> tuple[Path, Any]:
    config = transformers.LlamaConfig(
        **{key: LLAMA[key] for key in LLAMA if key not in ("architectures", "rope_theta")}
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": LLAMA["rope_theta"]}
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config).double().eval()
    folder.mkdir(parents=True)
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, folder / "model.safetensors")
    stated = {key: value for key, value in (LLAMA | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder, module


def test_stable_diffcoder_is_block_causal(tmp_path: Path) -> None:
    folder, module = write_diffcoder(tmp_path / "Stable-DiffCoder-8B-Instruct")
    model = paradec.load(folder, mask_token_id=5)
    facts = model.facts
    assert (facts.topology, facts.block_length, facts.prediction) == ("block_causal", 4, "same")
    assert (facts.eos_token_ids, facts.pad_token_id) == ((2,), 1)
    ids = torch.tensor([[7, 8, 9, 10, 11, 5, 5, 5, 5, 5]])
    block = torch.arange(10) // 4
    mask = torch.zeros(10, 10, dtype=torch.float64).masked_fill(block[:, None] < block[None, :], -torch.inf)
    with torch.inference_mode():
        expected = module(input_ids=ids, attention_mask=mask[None, None], use_cache=False).logits
    actual = model(Query(rows=np.arange(1), tokens=ids, positions=torch.arange(10).unsqueeze(0)))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    request: dict[str, Any] = {"max_new_tokens": 9, "sampler": "threshold", "eos_early_stop": False}
    plain = paradec.generate(model, PROMPTS, **request)
    assert torch.equal(paradec.generate(model, PROMPTS, cache="block", **request).new_tokens, plain.new_tokens)
    model.save_pretrained(tmp_path / "saved")
    repeated = paradec.load(tmp_path / "saved")
    assert (repeated.facts.block_length, repeated.facts.mask_token_id) == (4, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("attention_bias", True), ("mlp_bias", True),
        ("hidden_act", "gelu"), ("rms_norm_eps", ...), ("block_length", "4"),
    ],
)  # fmt: skip
def test_fields_of_stable_diffcoder_that_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    folder, _ = write_diffcoder(tmp_path / "Stable-DiffCoder-8B-Base", **{field: value})
    assert "\n" not in refuses(lambda: paradec.load(folder, mask_token_id=5), field, paradec.CheckpointError)


def test_multimodal_llada_checkpoints_decode_like_llada(tmp_path: Path) -> None:
    """MMaDA and Lumina-DiMOO are LLaDA with image codes in a longer vocabulary."""
    source = GOLDEN / "llada-tiny"
    expected = paradec.generate(paradec.load(source), [5, 6, 7], max_new_tokens=8).new_tokens
    config = json.loads((source / "config.json").read_text())
    names = {
        "MMaDA-8B-Base": {"model_type": "mmada", "architectures": ["MMadaModelLM"], "codebook_size": 8192},
        "Lumina-DiMOO": {"architectures": ["LLaDAForMultiModalGeneration"]},
    }
    for name, fields in names.items():
        shutil.copytree(source, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | fields))
        model = paradec.load(tmp_path / name)
        assert torch.equal(paradec.generate(model, [5, 6, 7], max_new_tokens=8).new_tokens, expected)
