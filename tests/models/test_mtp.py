"""Multi-token prediction heads: recorded calls, file layouts, several layers over a store, answers, errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import covering
from drafters import NEGATIVE, decode_answers, pair_p_value
from oracles.causal import greedy
from places import GOLDEN
from recorded import golden, read_arrays, read_json, replay
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import paradec
from paradec.cli import app
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError
from paradec.models.mtp import MtpDrafter
from paradec.samplers.causal.trees import DynamicTree

RECORDED = golden("drafters")
NAMES = sorted(path.parent.name for path in RECORDED.glob("*/cases.json") if (path.parent / "model").exists())
PACKAGED = GOLDEN / "drafters"
PROMPTS = [[3, 1], [5, 9, 2, 40, 7], [11, 12, 13], [6]]
SAMPLES = [(1500, 1.0), *(pytest.param(20_000, each, marks=pytest.mark.full) for each in (1.0, 0.7, 1.3))]


def load(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Model, MtpDrafter]:
    base = paradec.load(folder, dtype=dtype)
    drafter = paradec.load_drafter(base, kind="mtp")
    assert isinstance(drafter, MtpDrafter)
    return base, drafter


@pytest.fixture(scope="module", params=["mtp-1", "mtp-2"])
def heads(request: pytest.FixtureRequest) -> tuple[Model, MtpDrafter]:
    return load(PACKAGED / request.param / "model")


class RecordingDrafter(MtpDrafter):
    def __call__(self, query: Any, features: Tensor, store: Any, layer: int = 0) -> tuple[Tensor, Tensor]:
        result = super().__call__(query, features, store, layer)
        if not layer:
            self.calls.append((query, features[0], []))
        self.calls[-1][2].append(result[0][0, -1])
        return result


@pytest.mark.parametrize("name", NAMES)
def test_calls_equal_the_recorded_ones(name: str) -> None:
    base, drafter = load(RECORDED / name / "model", torch.float32)
    drafter.__class__ = RecordingDrafter
    tensors = read_arrays(RECORDED / name / "cases.safetensors")
    layers = len(drafter.module.layers)
    sampler = paradec.samplers.Speculative(drafter=drafter, **({} if drafter.slots else {"window": layers + 1}))
    for number, case in enumerate(read_json(RECORDED / name / "cases.json")):
        with replay(f"{name}, case {number}"):
            drafter.calls = []
            new = len(case["sequence"]) - len(case["prompt"])
            out = paradec.generate(base, [case["prompt"]], sampler=sampler, max_new_tokens=new, temperature=0)
            assert out.new_tokens[0].tolist() == case["sequence"][-new:] and out.nfe == case["model_forwards"]
            rounds = [
                f"{number}/{call}"
                for call in range(case["mtp_calls"])
                if len(case["sequence"]) - int(tensors[f"{number}/{call}/position_ids"][-1]) > 2
            ]
            assert len(drafter.calls) == len(rounds) == out.draft_nfe[0]
            for key, (query, features, logits) in zip(rounds, drafter.calls, strict=True):
                inputs = {part: tensors[f"{key}/{part}"] for part in ("input_ids", "position_ids", "hidden")}
                query_inputs = {"input_ids": query.tokens[0], "position_ids": query.positions[0], "hidden": features}
                shared = min(len(features), len(inputs["hidden"]))  # only the last positions are in both calls
                for part, recorded in inputs.items():
                    torch.testing.assert_close(query_inputs[part][-shared:], recorded[-shared:], rtol=0, atol=1e-4)
                actual = torch.stack(logits)
                torch.testing.assert_close(actual, tensors[f"{key}/logits"][: len(actual)], rtol=0, atol=1e-4)
                assert actual.argmax(-1).tolist() == tensors[f"{key}/drafts"][: len(actual)].tolist()


def draft_logits_without_store(drafter: MtpDrafter, tokens: list[int], drafts: Tensor) -> Tensor:
    """Compute the logits [n, vocabulary] of the n drafts after `tokens`, with one call per layer."""
    module, ids = drafter.base.module, torch.tensor([[*tokens, *drafts.tolist()]])
    last: list[Tensor] = []
    handle = module.model.norm.register_forward_hook(lambda *given: last.append(given[-1]))
    result, count = [], len(tokens) - 1
    with torch.no_grad():
        module(ids[:, :count])
        handle.remove()
        states, mask = last[0], torch.ones(1, 1, count, count, dtype=torch.bool).tril()
        for layer in range(len(drafts)):
            inputs, positions = ids[:, 1 + layer : 1 + layer + count], torch.arange(count)[None] + 1 + layer
            arguments = {"position_ids": positions, "attention_mask": mask}
            rotation = module.model.rotary_emb(states, positions)
            states = drafter.module.layers[layer](
                module.model.embed_tokens(inputs), states, False, position_embeddings=rotation, **arguments
            )
            result.append(module.lm_head(states[0, -1]))
    return torch.stack(result)


def repeat_layers(folder: Path, layers: int) -> Path:
    source = PACKAGED / "mtp-2" / "model"
    weights, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    generator = torch.Generator().manual_seed(layers)
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.4."):
            for layer in range(5, 3 + layers):
                permuted = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
                weights[name.replace("layers.4.", f"layers.{layer}.")] = permuted
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": layers}))
    return folder


@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.further)])
def test_draft_distributions_over_a_store_equal_those_without(layers: int, tmp_path: Path) -> None:
    _, drafter = load(repeat_layers(tmp_path, layers))
    sampler = paradec.samplers.Speculative(drafter=drafter)
    state = sampler.start(drafter.base, PROMPTS, max_new_tokens=14, seed=3, temperature=0.7)
    accepted: set[int] = set()
    while not state.done:
        before = state.committed.copy()
        sampler.commit(state, sampler.step(drafter.base, state))
        for row in state.rows:
            accepted.add(int(state.committed[row] - before[row]) - 1)
            count = min(int(state.end[row] - state.committed[row]) - 1, layers)
            drafts = state.memory["drafts"][row, :count]
            if count:
                tokens = state.context[row, : state.committed[row]].tolist()
                q = torch.softmax(draft_logits_without_store(drafter, tokens, drafts) / 0.7, -1)
                torch.testing.assert_close(state.memory["draft_distribution"][row, :count], q, rtol=0, atol=1e-6)
    assert {0, 1} <= accepted


@pytest.mark.parametrize(("kind", "scale"), covering(["chain", "static", "dynamic"], [1.0, 1.6]))
def test_greedy_answers_equal_greedy_decoding(kind: str, scale: float, heads: tuple[Model, MtpDrafter]) -> None:
    base, drafter = heads
    tree = {"chain": None, "static": (3, 2, 1), "dynamic": DynamicTree(8, 3, 3)}[kind]
    if tree is not None and drafter.slots:
        with pytest.raises(ValueError, match="has no meaning with drafter='model .MTP.'"):
            paradec.samplers.Speculative(drafter=drafter, tree=tree, rule="naive")
        return
    sampler = paradec.samplers.Speculative(drafter=drafter, tree=tree, rule="naive")
    guidance = {"guidance_scale": scale, "negative_prompt": NEGATIVE} if scale != 1 else {}
    for new in (2, 12):
        expected = greedy(base.module, PROMPTS, new, scale, NEGATIVE)
        assert decode_answers(sampler, base, PROMPTS, max_new_tokens=new, temperature=0, **guidance)[0] == expected


@pytest.mark.parametrize(("rows", "temperature"), SAMPLES)
def test_answers_have_the_distribution_of_the_model(
    rows: int, temperature: float, heads: tuple[Model, MtpDrafter]
) -> None:
    assert pair_p_value(heads[1], heads[0], rows, temperature=temperature) > 0.001


def rewrite(folder: Path, rename: Callable[[str], str | None], change: Any = None, config: Any = None) -> Path:
    source = PACKAGED / "mtp-1" / "model"
    weights = load_file(source / "model.safetensors")
    actual = {new: tensor for old, tensor in weights.items() if (new := rename(old)) is not None}
    stated = json.loads((source / "config.json").read_text()) | (config or {})
    if change is not None:
        change(stated, actual)
    folder.mkdir(exist_ok=True)
    save_file(actual, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def rename_under_mtp(name: str) -> str | None:
    return to_layout(name, "mtp.", "mtp.layers.0.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))


def rename_in_list(name: str) -> str | None:
    parts = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    return to_layout(name, "model.mtp_layers.0.", "model.mtp_layers.0.", parts)


def to_layout(name: str, outer: str, inner: str, parts: tuple[str, ...]) -> str | None:
    """Return a weight's name in another layout of the heads, or None for weights that the layout lacks."""
    result = name.removeprefix("model.layers.3.")
    if result == name:
        return name
    part = result.rpartition(".")[0]
    if part in ("embed_tokens", "shared_head.head"):
        return None
    renamed = dict(zip(("eh_proj", "enorm", "hnorm", "shared_head.norm"), parts, strict=True))
    return f"{outer}{renamed[part]}.weight" if part in renamed else inner + result


def swap_projection_halves(config: Any, weights: dict[str, Tensor]) -> None:
    name = next(name for name in weights if name.endswith("input_proj.weight"))
    weights[name] = torch.cat(weights[name].chunk(2, 1)[::-1], 1)


def test_all_layouts_load_the_same_heads(tmp_path: Path) -> None:
    published = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    sizes = json.loads((PACKAGED / "mtp-1" / "model" / "config.json").read_text())

    def to_speculators(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        swap_projection_halves(config, weights)
        config.clear()
        config.update(published, transformer_layer_config=sizes)
        for name in [name for name in weights if "mtp_layers" not in name]:
            del weights[name]

    folders = {
        "mtp": rewrite(tmp_path / "mtp", rename_under_mtp),
        "list": rewrite(tmp_path / "list", rename_in_list, swap_projection_halves),
        "speculators": rewrite(
            tmp_path / "own", lambda name: (rename_in_list(name) or "lm_head").removeprefix("model."), to_speculators
        ),
        "shards": tmp_path / "shards",
    }
    weights = load_file(PACKAGED / "mtp-1" / "model" / "model.safetensors")
    folders["shards"].mkdir()
    files = {name: f"model-{1 + ('proj' in name)}.safetensors" for name in weights}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in weights.items() if files[name] == file}
        save_file(part, folders["shards"] / file, metadata={"format": "pt"})
    (folders["shards"] / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    shutil.copy(PACKAGED / "mtp-1" / "model" / "config.json", folders["shards"])
    base, drafter = load(PACKAGED / "mtp-1" / "model")
    reloaded = [load(folders[name])[1] for name in ("mtp", "list", "shards")]
    reloaded.append(paradec.load_drafter(folders["speculators"], base=base))
    for other in reloaded:
        mine, theirs = (
            paradec.samplers.Speculative(drafter=each).start(each.base, PROMPTS, max_new_tokens=9, seed=1)
            for each in (drafter, other)
        )
        for each, state in ((drafter, mine), (other, theirs)):
            sampler = paradec.samplers.Speculative(drafter=each)
            for _ in range(2):
                sampler.commit(state, sampler.step(each.base, state))
        for name in ("drafts", "draft_distribution"):
            torch.testing.assert_close(mine.memory[name], theirs.memory[name], rtol=0, atol=1e-12)


WRONG: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = [
    (lambda c, w: w.pop("model.layers.3.hnorm.weight"), "missing weights: layers.0.hnorm.weight"),
    (lambda c, w: w.pop("model.layers.3.mlp.experts.2.up_proj.weight"), "missing weights: .*experts.2.up_proj"),
    (lambda c, w: c.update(num_nextn_predict_layers=2), "states 2 MTP layers; the weights have 1"),
    (lambda c, w: c.update(num_nextn_predict_layers=1.5), "num_nextn_predict_layers=1.5 must be"),
    (lambda c, w: w.update({"model.layers.3.eh_proj.weight": torch.zeros(32, 65)}), "mismatched weights"),
    (lambda c, w: w.update({"model.layers.3.enorm.weight": torch.zeros(32, dtype=torch.int8)}), "is int8"),
    (lambda c, w: c.update(vocab_size=65), "vocab_size=65"),
    (lambda c, w: c.update(rms_norm_eps=1e-3), "rms_norm_eps=0.001"),
    (lambda c, w: c["rope_parameters"].update(rope_theta=1e6), "rope_theta=1000000.0"),
    (lambda c, w: w.clear() or w.update(a=torch.zeros(1)), "no weights of MTP heads .model.layers.3.eh_proj"),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_files_are_refused(change: Any, message: str, tmp_path: Path, heads: tuple[Model, MtpDrafter]) -> None:
    rewrite(tmp_path, lambda name: name, change)
    with pytest.raises(CheckpointError, match=message):
        paradec.load_drafter(tmp_path, base=heads[0], kind="mtp")


def test_layers_beyond_the_config_are_refused(tmp_path: Path) -> None:
    """Loading the model drops only layers that are MTP heads. Any other extra layer is an error."""
    rewrite(tmp_path / "a", lambda name: name, lambda config, weights: config.pop("num_nextn_predict_layers"))
    plain_layer = rewrite(tmp_path / "b", lambda name: None if "layers.3.eh_proj" in name else name)
    for folder in (tmp_path / "a", plain_layer):
        with pytest.raises(CheckpointError, match="unexpected weights: model.layers.3"):
            paradec.load(folder)


def test_the_command_line_uses_the_heads_of_the_model(tmp_path: Path) -> None:
    source = PACKAGED / "mtp-2" / "model"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path)
    words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    flags = ["generate", "w5 w9 w2", "--model", str(tmp_path), "--raw", "--max-new-tokens", "6", "--temperature", "0"]
    actual = [
        CliRunner().invoke(app, [*flags, "--sampler", *method])
        for method in (["sjd"], ["speculative", "--drafter", "mtp"])
    ]
    assert [each.exit_code for each in actual] == [0, 0], actual[1].output
    assert actual[0].stdout.splitlines()[0] == actual[1].stdout.splitlines()[0]
    assert "of the drafter" in actual[1].output
