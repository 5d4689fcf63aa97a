"""DFlash 2 and DSpark drafters: recorded drafts, draft distributions q and hidden states; answers; wrong files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import covering
from drafters import NEGATIVE, decode_answers, drafts_after, pair_p_value
from oracles.causal import greedy
from places import GOLDEN
from recorded import golden, read_arrays, read_json, replay
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError

pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")

RECORDED = golden("drafters") / "drafters"
PACKAGED = GOLDEN / "drafters" / "drafters"
CASES: dict[str, Any] = {
    key: case for path in sorted(RECORDED.glob("cases.json")) for key, case in read_json(path).items()
}
NAMES = sorted({case["drafter"] for case in CASES.values() if case["drafter"].startswith(("dflash2", "dspark"))})


@pytest.fixture(scope="module")
def base() -> Model:
    return paradec.load(RECORDED / "base", dtype=torch.float64)  # like the recording


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return read_arrays(RECORDED / "cases.safetensors")


def assert_close_to_recorded(actual: Tensor, recorded: Tensor, largest: float = 1.0) -> None:
    """Compare within 1e-5 * largest: the reference computes norms and angles in float32."""
    torch.testing.assert_close(actual.double(), recorded.double(), rtol=0, atol=1e-5 * largest)


@pytest.mark.thinned
@pytest.mark.parametrize("name", NAMES)
def test_recorded_drafts_and_their_distributions(
    name: str, base: Model, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    walks: list[tuple[Any, Tensor]] = []

    def walk(states: Tensor, *arguments: Any) -> Any:
        walks.append((type(drafter).walk(drafter, states, *arguments), states))
        return walks[-1][0]

    monkeypatch.setattr(drafter, "walk", walk)
    cases = {key: case for key, case in CASES.items() if case["drafter"] == name}
    assert cases
    for key, case in cases.items():
        with replay(key):
            drafts, q = drafts_after(drafter, base, tensors["ids"], case)
            assert drafts.tolist() == case["drafts"], key
            assert_close_to_recorded(q, tensors[f"{key}/q"])
            walked, states = walks.pop()
            # recordings may include the first row although the drafter skips it
            assert_close_to_recorded(states[0], tensors[f"{key}/hidden"][-states.shape[1] :])
            before = torch.cat((tensors["ids"][case["anchor"]][None], drafts))
            if f"{key}/candidates" in tensors:
                assert_close_to_recorded(walked.unary[0], tensors[f"{key}/unary"].gather(1, walked.candidates[0]))
                assert walked.candidates[0].sort().values.equal(tensors[f"{key}/candidates"].sort().values)
                scores = torch.cat([walked.scores(slot, before[slot][None]) for slot in range(len(drafts))])
                draft_scores = torch.zeros_like(q).scatter(1, walked.candidates[0], scores)
                largest = max(1.0, float(tensors[f"{key}/scores"].abs().max()))
                assert_close_to_recorded(
                    draft_scores,
                    torch.zeros_like(q).scatter(1, tensors[f"{key}/candidates"], tensors[f"{key}/scores"].to(q)),
                    largest,
                )
                continue
            assert_close_to_recorded(walked.base_logits[0], tensors[f"{key}/base_logits"])
            repeated = type(walked)(drafter, states, walked.guide)
            logits = torch.cat([repeated.draft_logits(slot, before[slot][None]) for slot in range(len(drafts))])
            assert_close_to_recorded(logits, tensors[f"{key}/logits"])
            if f"{key}/confidence_logit" in tensors:
                confidence = torch.cat([repeated.confidence(slot, before[slot][None]) for slot in range(len(drafts))])
                assert_close_to_recorded(confidence, tensors[f"{key}/confidence_logit"].flatten())


@pytest.mark.parametrize(("name", "scale"), covering(NAMES, [1.0, 1.6]))
def test_greedy_answers_equal_greedy_decoding(name: str, scale: float, base: Model) -> None:
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    prompts = [[3, 1], [5, 9, 2, 40, 7], [11, 12, 13], [6]]
    guidance = {"guidance_scale": scale, "negative_prompt": NEGATIVE} if scale != 1 else {}
    sampler = paradec.samplers.create("speculative", drafter=drafter)
    for new in (2, 12):
        expected = greedy(base.module, prompts, new, scale, NEGATIVE)
        assert decode_answers(sampler, base, prompts, max_new_tokens=new, temperature=0, **guidance)[0] == expected


QUICK = [(next(n for n in NAMES if n.startswith(kind)), 1500, 1.0) for kind in ("dflash2", "dspark")]
LONG = [pytest.param(name, 20_000, t, marks=pytest.mark.full) for name in NAMES for t in (1.0, 0.8, 1.3)]


@pytest.mark.parametrize(("name", "rows", "temperature"), [*QUICK, *LONG])
def test_answers_have_the_distribution_of_the_model(name: str, rows: int, temperature: float, base: Model) -> None:
    assert pair_p_value(paradec.load_drafter(RECORDED / name, base=base), base, rows, temperature=temperature) > 0.001


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["dspark-speculators", "eagle3-speculators"])
def test_allowed_tokens_outside_the_drafter_vocabulary(name: str, base: Model) -> None:
    """Answers have the model's distribution if the drafter can propose none, or two, of the six allowed tokens."""
    drafter = paradec.load_drafter(PACKAGED / name, base=base)
    vocabulary = set(drafter.tokens.tolist())
    missing = [token for token in range(64) if token not in vocabulary][:6]
    assert pair_p_value(drafter, base, 1500, allowed_ids=missing) > 0.001
    assert pair_p_value(drafter, base, 1500, allowed_ids=sorted([*missing[:4], *[*vocabulary][:2]])) > 0.001


WRONG: list[tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = [
    ("dflash2-zlab", lambda c, w: c["dflash_config"].update(conv_group_size=5), "conv_group_size=5 must divide"),
    ("dflash2-zlab", lambda c, w: c["dflash_config"].update(block_size=1), "block_size=1 must be"),
    ("dflash2-zlab", lambda c, w: c["dflash_config"].update(target_layer_ids=[1, 3, 9]), "target_layer_ids=9"),
    ("dflash2-zlab", lambda c, w: c.pop("dflash_config"), "dflash_config=None must be an object"),
    ("dflash2-zlab", lambda c, w: w.pop("candidate_selector.hidden_projection.weight"), "missing .*hidden_projection"),
    ("dflash2-speculators", lambda c, w: c.update(aux_hidden_state_layer_ids=[0, 3, 5]), "integers from 1 to 6"),
    ("dflash2-speculators", lambda c, w: c.update(target_hidden_size=64), "target_hidden_size=64"),
    ("dflash2-zlab", lambda c, w: c.update(num_target_layers=7), "num_target_layers=7, base has 6"),
    ("dspark-rnn", lambda c, w: c.update(markov_head_type="lstm"), "unknown markov_head_type: 'lstm'"),
    ("dspark-rnn", lambda c, w: c.update(target_layer_ids=[0, 2, 5]), "the last layer of base"),
    ("dspark-rnn", lambda c, w: c.update(markov_head_type="gated"), "markov_head.gate_proj"),
    ("dspark-speculators", lambda c, w: w.pop("d2t"), "40 rows of lm_head.weight for 64 tokens"),
    ("dspark-speculators", lambda c, w: w.update(d2t=torch.full((40,), 60)), "40 different ids from 0 to 63"),
    ("dspark-speculators", lambda c, w: w["d2t"].zero_(), r"d2t leads to id \d+, and t2d.\d+. is False"),
    ("dspark-vanilla", lambda c, w: c.update(vocab_size=65), "vocab_size=65"),
    ("dspark-vanilla", lambda c, w: c.update(architectures=[], model_type="deepseek_v4"), "built-in DSpark is not"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_checkpoints_are_refused(name: str, change: Any, message: str, tmp_path: Path, base: Model) -> None:
    rewrite_checkpoint(name, tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        paradec.load_drafter(tmp_path, base=base)


def rewrite_checkpoint(name: str, folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Path:
    source = PACKAGED / name
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


def edit_flat(fields: dict[str, Any], dflash_fields: dict[str, Any] | None = None) -> Callable[..., None]:
    """Return a function that sets sliding windows and fields of a flat config, and drops its is_causal."""

    def change(config: dict[str, Any], weights: Any) -> None:
        config.pop("is_causal", None)
        config.update(SLIDING | fields)
        config.get("dflash_config", {}).update(dflash_fields or {})

    return change


def edit_nested(fields: dict[str, Any]) -> Callable[..., None]:
    """Return a function that sets sliding windows in transformer_layer_config, and outer fields (by default absent)."""

    def change(config: dict[str, Any], weights: Any) -> None:
        config.pop("sliding_window_non_causal")
        config.pop("sample_from_anchor")
        config["transformer_layer_config"].update(SLIDING)
        config.update(fields)

    return change


OPPOSITE = {"sliding_window_non_causal": True, "sample_from_anchor": False}  # of the defaults
VARIANTS = [
    ("dflash2-zlab", edit_flat({}), True, False, 1),
    ("dflash2-zlab", edit_flat({"is_causal": False}), False, False, 1),
    ("dflash2-zlab", edit_flat({}, {"causal": False}), False, False, 1),
    ("dflash2-zlab", edit_flat({"is_causal": True}, {"causal": False}), True, False, 1),
    ("dflash2-speculators", edit_nested({}), False, True, 1),
    ("dflash2-speculators", edit_nested({"sliding_window_non_causal": False}), True, True, 1),
    ("dspark-rnn", edit_flat({}), False, False, 0),
    ("dspark-speculators", edit_nested({}), True, True, 0),
    ("dspark-speculators", edit_nested(OPPOSITE), False, True, 1),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "change", "is_causal", "is_anchored", "first"), VARIANTS)
def test_windows_causality_and_the_first_row(
    name: str, change: Any, is_causal: bool, is_anchored: bool, first: int, tmp_path: Path, base: Model
) -> None:
    """Missing fields have the public code's defaults. first: index within a block of the first slot with a draft."""
    drafter = paradec.load_drafter(rewrite_checkpoint(name, tmp_path, change), base=base)
    settings = drafter.settings
    assert (settings.causal, settings.anchored, settings.first_draft) == (is_causal, is_anchored, first)
    assert drafter.slots == drafter.block_size + 1 - first
    seen = []

    class MaskChecking(type(drafter)):  # type: ignore[misc]
        def _masks(self, query: Any, store: Any, count: int) -> dict[str, Tensor]:
            masks = super()._masks(query, store, count)
            keys = store.visible(query)[1].expand(len(query.tokens), -1)
            full, near = masks["full_attention"][:, 0], masks["sliding_attention"][:, 0]
            for row, column, key in torch.cartesian_prod(*(torch.arange(n) for n in full.shape)).tolist():
                position, anchor = (int(query.positions[row, count + index]) for index in (column, 0))
                key_position = int(keys[row, key])
                inside = anchor - key_position <= 3 if is_anchored else abs(position - key_position) < 3
                expected = bool(full[row, column, key]) and inside and (position >= key_position or not is_causal)
                assert bool(near[row, column, key]) == expected
                seen.append((bool(full[row, column, key]), expected))
            return masks

    drafter.__class__ = MaskChecking
    prompts = [[3, 1], [5, 9, 2, 40, 7]]
    sampler = paradec.samplers.create("speculative", drafter=drafter)
    expected = greedy(base.module, prompts, 6)
    assert decode_answers(sampler, base, prompts, max_new_tokens=6, temperature=0)[0] == expected
    assert {(True, False), (True, True)} <= set(seen)
