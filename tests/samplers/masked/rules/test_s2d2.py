"""S2D2: recorded runs of its public code on SDAR (`tests/golden/autumn/s2d2`), and properties.

With the recorded random numbers, each step commits the recorded tokens, and verifies its draft exactly if the
recorded step did; in float32, as recorded. The public code includes the mask token in the softmax and applies top-p
among the top-k tokens. paradec's S2D2 does neither, but the replay imitates it."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import find_checkpoint, golden, read_json, read_json_unrecorded, replay_with_margin
from small_models import tiny
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.samplers.distributions import filter_logits
from paradec.samplers.masked.rules.s2d2 import S2D2, VerifyLogits

ROUTES = {"mask_span_length": "span", "score_threshold": "score", "score_hysteresis": "hysteresis"}
ESTIMATORS = {"soft_entropy_negexp": "entropy", "hard_margin_threshold": "margin"}
PUBLISHED_NAMES = {
    "min_span": "min_ssd_span_length", "tau": "do_verify_score_threshold", "on": "hysteresis_threshold_on",
    "off": "hysteresis_threshold_off", "cost": "score_penalty_coef", "threshold": "confidence_threshold",
    "block_steps": "denoising_steps", "confident_too": "always_check_high_confidence", "causal": "cache_ver",
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:seed=")


@dataclass(frozen=True)
class ReplayedS2D2(S2D2):
    """S2D2 with the mask token in the softmax and the recorded uniform numbers, in the reference's order."""

    def weighs_mask(self, state: Any) -> bool:
        return True

    def draw_uniform(self, state: Any, query: Any, positions: Tensor, count: int) -> Tensor:
        width, block, fed = positions.shape[1], state.facts.block_length, state.fed
        numbers = torch.tensor([*fed["numbers"][fed["used"] :], *[0.5] * (block + 2)], dtype=torch.float64)
        if not isinstance(query.window, VerifyLogits):  # a number for every position of the block, prompt included
            fed["used"] += block
            return numbers[block - width : block].view(1, -1, 1)
        masks = (state.window.read(state.canvas) == state.mask_id)[0].tolist()
        first = masks.index(True)
        span = next((at for at in range(first, width) if not masks[at]), width) - first
        uniform = torch.full((1, width, 2), 0.5, dtype=torch.float64)
        uniform[0, first : first + span, 0] = numbers[:span]
        uniform[0, :, 1] = numbers[span]  # for the residual, if a draft is rejected
        fed["used"] += span
        return uniform


def filter_top_k_first(logits: Tensor, top_p: float | None, top_k: int | None, min_p: float | None) -> Tensor:
    """Keep the top-k tokens, then the nucleus among them, as the reference does."""
    return filter_logits(filter_logits(logits, None, top_k), top_p, None)


def settings_of(trace: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "do_verify_policy": "mask_span_length", "min_ssd_span_length": 1, "do_verify_score_threshold": 0.0,
        "hysteresis_threshold_on": 0.0, "hysteresis_threshold_off": -5.0, "score_penalty_coef": 2.0,
        "do_verify_score_type": "difference_dynamic", "token_acceptance_estimator": "hard_margin_threshold",
        "confidence_threshold": 0.85, "always_check_high_confidence": False, "cache_ver": False, **trace["settings"],
    }  # fmt: skip
    return {
        "route": ROUTES[settings["do_verify_policy"]],
        "dynamic": settings["do_verify_score_type"] == "difference_dynamic",
        "estimator": ESTIMATORS[settings["token_acceptance_estimator"]],
    } | {name: settings[published_name] for name, published_name in PUBLISHED_NAMES.items()}


@functools.cache
def load_model(folder: Path, block: int, mask: int) -> Model:
    return paradec.load(folder, dtype="float32", block_length=block, mask_token_id=mask)


def recorded_files() -> list[Any]:
    parameters = []
    for path in sorted(golden("autumn").glob("s2d2/*.json")):
        if any("steps" in case for case in read_json_unrecorded(path)["cases"]):
            parameters.append(pytest.param(path, id=path.stem))
    return parameters


@pytest.mark.thinned
@pytest.mark.parametrize("path", recorded_files())
@pytest.mark.parametrize("cache", ["none", "block"])
def test_recorded_steps(path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paradec.samplers.masked.rules.s2d2.filter_logits", filter_top_k_first)
    trace = read_json(path)
    settings, block = trace["settings"], trace["settings"]["block_length"]
    model = load_model(find_checkpoint(trace["model"], "autumn"), block, trace["mask_id"])
    sampler = ReplayedS2D2(**settings_of(trace))
    request: dict[str, Any] = {"temperature": 0.0, "cache": cache, "eos_early_stop": False}
    if settings.get("do_sample"):
        request["temperature"] = settings.get("temperature", 1.0)
        request |= {name: settings[name] for name in ("top_k", "top_p") if name in settings}
    for number, case in enumerate(trace["cases"]):
        with replay_with_margin(f"{path.stem}, case {number}", case):
            state = sampler.start(model, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"], **request)
            state.fed = {"numbers": case["uniforms"], "used": 0}  # type: ignore[attr-defined]
            theirs = [(step["verified"], {(at, id) for at, id, _ in step["commit"]}) for step in case["steps"]]
            ours = list[Any]()
            while not state.done and len(ours) < len(theirs):
                before, verifies = state.canvas[0].clone(), bool(state.memory["verifies"][0])
                sampler.commit(state, sampler.step(model, state))
                written = (state.canvas[0] != before).nonzero()[:, 0].tolist()
                if written:
                    ours.append((verifies, {(at, int(state.canvas[0, at])) for at in written}))
                    # a rejected draft uses one more number
                    state.fed["used"] += verifies and case["steps"][len(ours) - 1]["rejected"] is not None
            assert ours == theirs
            text = [(at, token) for at, token in enumerate(case["canvas"]) if token != trace["mask_id"]]
            assert all(int(state.canvas[0, at]) == token for at, token in text if at < state.canvas.shape[1])
            verified = [step for step in case["steps"] if step["verified"]]
            assert case["accepted"] == [sum(kind == "accepted" for _, _, kind in step["commit"]) for step in verified]
            # calls: a prefill, a draft in each step, the verifications, and a call for each block, which stores it
            prefill = len(case["prompt_ids"]) >= block
            num_blocks = len({step["block"] for step in case["steps"]})
            assert case["calls"] == prefill + len(theirs) + len(verified) + num_blocks


def test_the_recorded_runs_cover_every_route() -> None:
    routes = [settings_of(read_json_unrecorded(param.values[0]))["route"] for param in recorded_files()]
    assert set(routes) == set(ROUTES.values())


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.8])
def test_rows_do_not_depend_on_the_batch(temperature: float) -> None:
    model, rows = tiny(2, "block_causal"), [[3, 1, 2, 5], [4], [2, 6, 1, 7, 9, 8, 3]]
    for settings in ({}, {"route": "span", "causal": False}, {"route": "hysteresis", "on": 0.5, "off": 0.0}):
        request: dict[str, Any] = {"sampler": S2D2(**settings), "temperature": temperature, "seed": 1}
        request |= {"max_new_tokens": 9}
        together = [paradec.generate(model, rows, cache=cache, **request) for cache in ("none", "block")]
        assert together[0].new_tokens.tolist() == together[1].new_tokens.tolist()
        for row, output in enumerate(paradec.generate_many(model, rows, cache="block", batch_size=2, **request)):
            alone = paradec.generate(model, [rows[row]], **request)
            assert output.new_tokens.tolist() == alone.new_tokens.tolist() == [together[0].new_tokens[row].tolist()]
            assert output.row_nfe == alone.row_nfe == [together[0].row_nfe[row]]


def test_with_verification_in_every_step_s2d2_equals_token_by_token_decoding() -> None:
    model, request = tiny(2, "block_causal"), {"max_new_tokens": 8, "eos_early_stop": False}
    verified = paradec.generate(model, [[3, 1, 2, 5]], sampler=S2D2(route="span"), temperature=1e-4, seed=0, **request)
    expected = paradec.generate(model, [[3, 1, 2, 5]], sampler="self_speculative", temperature=0, **request)
    assert verified.new_tokens.tolist() == expected.new_tokens.tolist()
