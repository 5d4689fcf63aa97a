"""EAGLE-3 drafters: recorded drafts and draft distributions, both formats, greedy decoding, wrong checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import covering
from drafters import drafts_after
from recorded import distance_to_bounds, golden, near_tie_or_refused, read_arrays, read_json, replay
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError
from paradec.models.eagle3 import Eagle3Drafter
from paradec.request import Request
from paradec.samplers.causal.trees import DynamicTree

RECORDED = golden("drafters") / "drafters"
CASES: dict[str, Any] = {
    key: case for path in sorted(RECORDED.glob("cases.json")) for key, case in read_json(path).items()
}
NAMES = sorted({case["drafter"] for case in CASES.values() if case["drafter"].startswith("eagle3")})


@pytest.fixture(scope="module")
def base() -> Model:
    return paradec.load(RECORDED / "base")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return read_arrays(RECORDED / "cases.safetensors")


class RecordingDrafter(Eagle3Drafter):
    def __call__(self, query: Any, features: Tensor, store: Any) -> tuple[Tensor, Tensor]:
        result = super().__call__(query, features, store)
        self.calls.append((result[0][0, -1], result[1][0, -1]))
        return result


@pytest.mark.skipif(not RECORDED.is_dir(), reason="no drafters were recorded")
def test_the_base_gives_the_recorded_logits_and_layers(base: Model, tensors: dict[str, Tensor]) -> None:
    with replay("base"), torch.no_grad():
        out = base.module(tensors["ids"][None], output_hidden_states=True)
        torch.testing.assert_close(out.logits[0], tensors["logits"].float(), rtol=0, atol=1e-4)
        layers = [name for name in tensors if name.startswith("layer_")]
        for number in range(len(layers) - 1):  # transformers returns the last layer's states after the norm
            torch.testing.assert_close(
                out.hidden_states[1 + number][0], tensors[f"layer_{number}"].float(), rtol=0, atol=1e-4
            )


@pytest.mark.thinned
@pytest.mark.parametrize("name", NAMES)
def test_recorded_drafts_and_their_distributions(name: str, base: Model, tensors: dict[str, Tensor]) -> None:
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    drafter.__class__ = RecordingDrafter
    cases = {key: case for key, case in CASES.items() if case["drafter"] == name}
    assert cases
    for key, case in cases.items():
        with replay(key):
            drafter.calls = []
            features = torch.cat([tensors[f"layer_{layer}"] for layer in drafter.keep_layers], -1)
            fused = drafter.fuse(features[None, : case["anchor"]])[0]
            torch.testing.assert_close(fused, tensors[f"{key}/fused"].float(), rtol=0, atol=1e-4)
            drafts, q = drafts_after(drafter, base, tensors["ids"], case, len(case["drafts"]) + 1)
            with near_tie_or_refused(lambda case=case, q=q: distance_to_bounds(q, case["uniform"][: len(q)])):
                assert drafts.tolist() == case["drafts"]
            torch.testing.assert_close(q, tensors[f"{key}/q"].float(), rtol=0, atol=1e-5)
            logits, hidden = (torch.stack(part)[: len(q)] for part in zip(*drafter.calls, strict=True))
            logits = logits if drafter.tokens is None else logits[:, drafter.tokens]
            torch.testing.assert_close(logits, tensors[f"{key}/logits"].float(), rtol=0, atol=1e-4)
            torch.testing.assert_close(hidden, tensors[f"{key}/made"].float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "tree"), covering(NAMES, [None, (3, 2, 1), DynamicTree(8, 3, 3)]))
def test_greedy_answers_equal_greedy_decoding(name: str, tree: Any, base: Model) -> None:
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    rule = {"rule": "naive"} if isinstance(tree, DynamicTree) else {}
    sampler = paradec.samplers.create("speculative", drafter=drafter, tree=tree, **rule)
    prompts = [[3], [5, 9, 2, 40, 7], [11, 12, 13]]
    plain = paradec.generate(base, input_ids=prompts, sampler="sjd", max_new_tokens=12)
    assert paradec.generate(base, prompts, sampler=sampler, max_new_tokens=12).new_tokens.equal(plain.new_tokens)
    if drafter.tokens is not None:
        state = sampler.start(base, prompts, Request(max_new_tokens=12, temperature=1.0))
        while not state.done:
            queries = sampler.query(state)
            sampler.commit(state, sampler.propose(state, [base(query, state.store) for query in queries], queries))
            q = state.memory["draft_distribution"]
            missing = torch.ones(q.shape[-1], dtype=torch.bool).index_fill(0, drafter.tokens, False)
            drafted = q[q.sum(-1) > 0] if tree is not None else q[:, : sampler.window - 1].flatten(0, 1)
            assert not drafted[:, missing].any()


WRONG: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = [
    (lambda c, w: c.update(draft_vocab_size=3) or w.update({"lm_head.weight": torch.ones(3, 32)}), "d2t must be 3"),
    (lambda c, w: w.update(d2t=torch.full((40,), 60)), "40 different ids from 0 to 63"),
    (lambda c, w: w.pop("d2t"), "40 rows of lm_head.weight for 64 tokens"),
    (lambda c, w: w["d2t"].zero_(), r"d2t leads to id \d+, and t2d.\d+. is False"),
    (lambda c, w: w.update(t2d=torch.ones(64, dtype=torch.bool)), r"contradict each other for 24 ids: d2t does not"),
    (lambda c, w: w.update(t2d=torch.ones(40, dtype=torch.bool)), "t2d must have a bool or integer for each of 64 ids"),
    (lambda c, w: c["transformer_layer_config"].update(num_hidden_layers=2), "num_hidden_layers=2"),
    (lambda c, w: c["transformer_layer_config"].update(vocab_size=65), "vocab_size=65"),
    (lambda c, w: c.update(target_hidden_size=64), "target_hidden_size=64"),
    (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[0, 3, 5]), "integers from 1 to 6"),
    (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[2, 3]), r"fc.weight \[32, 96\] instead of \[32, 64\]"),
    (lambda c, w: c.update(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm=True"),
    (lambda c, w: c.update(speculators_model_type="medusa"), "speculators_model_type='medusa'.* 'eagle3', 'dflash2'"),
    (lambda c, w: w.pop("layers.0.hidden_norm.weight"), "missing weights: midlayer.hidden_norm"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_checkpoints_are_refused(change: Any, message: str, base: Model, tmp_path: Path) -> None:
    folder = RECORDED / "eagle3-speculators"
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        paradec.load_drafter(tmp_path, base=base)


def test_missing_embeddings_come_from_the_model(base: Model, tmp_path: Path) -> None:
    """The paper's code stores no embeddings when the drafter uses the model's. It may prefix names with "model."."""
    folder = RECORDED / "eagle3-original"
    shutil.copy(folder / "config.json", tmp_path)
    weights = load_file(folder / "model.safetensors")
    assert "embed_tokens.weight" not in weights
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    answers = []
    for source in (folder, tmp_path):
        sampler = paradec.samplers.create("speculative", drafter=paradec.load_drafter(source, base=base))
        request = {"sampler": sampler, "max_new_tokens": 9, "temperature": 1.0, "seed": 3}
        answers.append(paradec.generate(base, input_ids=[[1, 2, 3]], **request))
    assert answers[0].new_tokens.equal(answers[1].new_tokens) and answers[0].nfe == answers[1].nfe
