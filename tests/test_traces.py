"""Token-for-token traces of the public reference implementations, replayed through `load` and `generate`.

Compared are the cases that are the same in float64 (`fp64_same`): always the final tokens and the number of forwards;
what each step committed, exactly, for threshold, factor and random rules. Quota rules (the k most confident) hang on
near-ties: some end-of-text positions are equally sure to the last bits, which differ between processors. For those the
share of equal steps is reported (more than 99 % here), and a floor is asserted. That the mask's own probability counts,
as it does in the public code, decides many of these steps (`paradec.samplers.reference.read`).

What differs from the references, and why:
- `dream/origin_*`: the reference runs all its steps even when nothing is masked any more; we stop there. Its remaining
  steps are checked to be empty.
- `*_batch*`: the reference moves all rows to the next block together; our rows move on alone. A row's commits come in
  the same order, and the number of forwards is the same where rows take equally many.
- `fastdllm/nocache_factor*`: the reference commits the last masked position when it alone fails the rule. Replayed with
  `reference_last_rank=True`; `test_factor_quirk` says which cases need it.
"""

from __future__ import annotations

import pytest
import torch
from replay import GOLDEN, compare, load_trace, request_of, trace_names
from safetensors.torch import load_file

from paradec import samplers

NAMES = trace_names("llada", "dream", "fastdllm", "fastdllm-dream")
SHARES: dict[str, tuple[int, int]] = {}


def is_quota_rule(trace: dict) -> bool:
    settings = trace["settings"]
    if trace["method"] == "fastdllm-dream" or settings.get("alg") in ("maskgit_plus", "topk_margin", "entropy"):
        return True
    by_rule = settings.get("threshold") is not None or settings.get("factor") is not None
    return settings.get("remasking") == "low_confidence" and not by_rule


def test_all_traces_are_there() -> None:
    assert len(NAMES) == 56


def in_groups(names: list[str]) -> list[object]:
    """Quota rules run in one process, which reports their share of equal steps."""
    quota = pytest.mark.xdist_group("quota")
    return [pytest.param(name, marks=[quota] if is_quota_rule(load_trace(name)) else []) for name in names]


@pytest.mark.parametrize("name", in_groups(NAMES))
def test_trace(name: str, request: pytest.FixtureRequest) -> None:
    trace = load_trace(name)
    model = request.getfixturevalue(trace["model"].removesuffix("-tiny"))
    sampler, arguments = request_of(trace)
    cases = [case for case in trace["cases"] if case["fp64_same"]]
    assert cases
    found = [compare(model, case, name, sampler, **arguments) for case in cases]
    assert all(c.tokens_equal for c in found)
    if trace["settings"].get("alg") == "origin":
        assert all(c.nfe <= c.reference_nfe and c.only_empty_left for c in found)
    else:
        assert [c.nfe for c in found] == [c.reference_nfe for c in found]
    if is_quota_rule(trace):
        share = sum(c.steps_equal for c in found), sum(c.steps for c in found)
        SHARES[name] = share
        assert share[0] >= 0.9 * share[1]
    else:
        assert all(c.rows_equal for c in found)


@pytest.mark.xdist_group("quota")
def test_report_share_of_equal_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how many steps of the quota rules committed exactly the reference's positions."""
    if not SHARES:
        pytest.skip("the traces of quota rules did not run in this process")
    equal, steps = (sum(values) for values in zip(*SHARES.values(), strict=True))
    with capsys.disabled():
        print(f"\nquota rules: {equal} of {steps} steps ({equal / steps:.1%}) commit exactly the reference's positions")
    assert equal >= 0.97 * steps


def test_factor_quirk(llada: object) -> None:
    """The rule as published differs from the reference's code only where the last masked position alone fails."""
    differing = {}
    for name in [n for n in NAMES if "factor" in n]:
        trace = load_trace(name)
        _, arguments = request_of(trace)
        cases = [case for case in trace["cases"] if case["fp64_same"]]
        found = [compare(llada, c, name, samplers.create("factor", factor=1.0), **arguments) for c in cases]
        differing[name] = sum(not c.rows_equal for c in found)
        # the published rule never commits more in a step, so it never takes fewer forwards
        assert all(c.nfe >= c.reference_nfe for c in found)
    assert any(differing.values())


@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize("part", ["full", "half"])
def test_logits(name: str, part: str, request: pytest.FixtureRequest) -> None:
    """Within 1e-5 of the reference's logits, relative to their largest magnitude (about 11).

    Absolute differences stay below 1e-5 for llada-tiny; one position of dream-tiny amplifies float32 rounding so much
    that the reference itself is 2e-4 from its float64 value, and processors differ there by 3e-5.
    """
    model = request.getfixturevalue(name)
    check = load_file(GOLDEN / f"{name}-tiny" / "logits_check.safetensors")
    with torch.inference_mode():
        logits = model.module(input_ids=check[f"ids_{part}"], use_cache=False).logits
    difference = (logits - check[f"logits_{part}"]).abs().max()
    assert difference <= 1e-5 * check[f"logits_{part}"].abs().max()
    if name == "llada":
        assert difference <= 1e-5
