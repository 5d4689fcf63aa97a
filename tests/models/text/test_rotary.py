"""Scaled rotary angles in every family against transformers' tables; errors and warnings."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import DREAM, LLADA, changed, write_checkpoint
from checkpoints import random_weights as masked_weights
from checkpoints import write_family as write_blocks
from decoding import refuses
from places import GOLDEN
from recorded import Refused, golden, read_json, replays

import paradec
from paradec.core.query import Query
from paradec.models.rotary import BY_CALL, rope_parameters

PACKAGED = json.loads((GOLDEN / "autumn" / "rope" / "tables.json").read_text())["cases"]
TABLES = {
    name: case
    for path in sorted(golden("autumn").glob("rope/*.json"))
    for name, case in read_json(path)["cases"].items()
}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("name", TABLES)
@replays("name")
def test_angles_equal_the_recorded_tables(name: str) -> None:
    """Modules built from config.json have the recorded angles. Scalings that depend on other rows are refused."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    case = TABLES[name]
    if "rope_parameters" not in case:  # the scale of Nemotron's queries, by position
        positions, original = np.array(case["positions"]), case["original_max_position_embeddings"]
        np.testing.assert_allclose(1 + case["beta"] * np.log1p(positions // original), case["scale"], rtol=1e-6)
        return
    kind = case["rope_parameters"]["rope_type"]
    if kind in BY_CALL:
        with pytest.raises(
            paradec.CheckpointError, match=f"rope_type='{kind}' chooses .* depend on others .* stored keys"
        ):
            rope_parameters(case)
        raise Refused(f"rope_type={kind!r} ties a row to its neighbours")
    fields = {"head_dim": case["head_dim"], "hidden_size": case["head_dim"], "num_attention_heads": 1}
    length = case["max_position_embeddings"]
    config = LlamaConfig(**fields, max_position_embeddings=length, rope_parameters=rope_parameters(case))
    module, positions = LlamaRotaryEmbedding(config), torch.tensor(case["positions"])
    torch.testing.assert_close(module.inv_freq, torch.tensor(case["inv_freq"]), rtol=1e-6, atol=0)
    assert module.attention_scaling == pytest.approx(case["attention_factor"], rel=1e-6)
    # processors round powers differently, which changes the last bit of a frequency
    rounding = 1e-6 + positions[:, None] * module.inv_freq * 2.0**-23
    for actual, expected in zip(module(torch.zeros(1), positions[None]), (case["cos"], case["sin"]), strict=True):
        assert ((actual[0, :, : case["head_dim"] // 2] - torch.tensor(expected)).abs() < rounding).all()


def checkpoint(folder: Path, family: str, **fields: Any) -> Path:
    if family in ("llada", "dream"):
        config = changed(LLADA if family == "llada" else DREAM, **fields)
        return write_checkpoint(folder, config, masked_weights(config))
    folder = write_blocks(folder, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(12)[None] % 5
    return model(Query(rows=torch.zeros(1).numpy(), tokens=ids, positions=torch.arange(12)[None]))


@pytest.mark.thinned
@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "fast_dllm_v2"])
@pytest.mark.parametrize("kind", SCALED)
def test_families_scale_their_angles(family: str, kind: str, tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = paradec.load(checkpoint(tmp_path / "plain", family), dtype="float64")
    model = paradec.load(checkpoint(tmp_path / "scaled", family, rope_scaling=SCALED[kind]), dtype="float64")
    expected, _ = ROPE_INIT_FUNCTIONS[kind](model.module.config)
    assert torch.equal(model.module.model.rotary_emb.inv_freq, expected)
    assert not torch.equal(expected, plain.module.model.rotary_emb.inv_freq)
    assert not torch.allclose(logits(model), logits(plain))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(paradec.load(tmp_path / "saved")), logits(model))


def test_rope_theta_replaces_the_base(tmp_path: Path) -> None:
    """`rope_theta=` replaces the value of config.json and allows rows beyond the trained length, with a warning."""
    folder = checkpoint(tmp_path / "plain", "llada", max_sequence_length=12)
    raised = paradec.load(folder, rope_theta=77.0, dtype="float64")
    stated = paradec.load(checkpoint(tmp_path / "stated", "llada", rope_theta=77.0), dtype="float64")
    assert torch.equal(logits(raised), logits(stated))
    request: dict[str, Any] = {"max_new_tokens": 4, "block_length": 4}
    refuses(lambda: paradec.generate(paradec.load(folder), [1] * 9, **request), "longer than plain takes")
    with pytest.warns(UserWarning, match=r"13 positions is longer than plain was trained for \(12\)"):
        paradec.generate(raised, [1] * 9, **request)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paradec.generate(raised, [1] * 8, **request)
    raised.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(paradec.load(tmp_path / "saved")), logits(stated))
    for wrong in (0, -1.0, "10", float("inf")):
        with pytest.raises(ValueError, match="rope_theta="):
            paradec.load(folder, rope_theta=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_causal_models_with_length_dependent_angles_cache_no_keys(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    angles = {
        key: value for key, value in PACKAGED[f"{name}4" if name == "dynamic" else name]["rope_parameters"].items()
    }
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, max_position_embeddings=64, rope_parameters=angles))
    assert not paradec.wrap(module).supports_store
    with pytest.raises(ValueError, match="rope_parameters"):
        paradec.wrap(module, mask_token_id=3, prediction="same", topology="bidirectional")


@pytest.mark.parametrize(
    "fields",
    [{"block_size": 1}, {"block_size": 3}, {"architectures": ["IDLMForCausalLM"]}, {"_name_or_path": "x/I-DLM-8B"}],
)
def test_i_dlm_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "some", "sdar", **fields)
    refuses(lambda: paradec.load(folder), "means I-DLM", paradec.CheckpointError)
    folder_by_name = checkpoint(tmp_path / "I-DLM-8B-Instruct", "sdar")
    refuses(lambda: paradec.load(folder_by_name, block_length=4), "means I-DLM", paradec.CheckpointError)
    if "block_size" in fields:
        assert paradec.load(folder, block_length=3).facts.block_length == 3
