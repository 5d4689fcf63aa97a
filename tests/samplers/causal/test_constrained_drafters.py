"""Constraints on causal models whose drafter reads hidden states: EAGLE-3, DFlash 2, DSpark."""

from typing import Any

import pytest
import torch
from places import GOLDEN
from structured import add_letter_tokenizer, assert_constrained_decoding

import paradec
from paradec.models.base import Model
from paradec.samplers.causal.trees import DynamicTree

pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")

RECORDED = GOLDEN / "drafters" / "drafters"
NAMES = sorted(folder.name for folder in RECORDED.iterdir() if folder.is_dir() and folder.name != "base")
TREES: dict[str, dict[str, Any]] = {
    "chain": {},
    "static": {"tree": (3, 2, 1)},
    "dynamic": {"tree": DynamicTree(8, 3, 3), "rule": "naive"},
}
CASES = [(name, tree) for name in NAMES for tree in (TREES if name.startswith("eagle") else ["chain"])]
QUICK = [("eagle3-original", "static"), ("eagle3-speculators", "chain"), ("dflash2-zlab", "chain")]
PATTERN = "(a|bx)yz[cd](efg)?"
"""A constraint with answers of different lengths, and with positions where only one token is allowed."""


@pytest.fixture(scope="module")
def base() -> Model:
    return add_letter_tokenizer(paradec.load(RECORDED / "base", dtype=torch.float64), 60)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "tree"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES]
)
def test_answers_have_the_distribution_of_token_by_token_decoding(name: str, tree: str, base: Model) -> None:
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    sampler = paradec.samplers.create("speculative", drafter=drafter, **TREES[tree])
    out = assert_constrained_decoding(sampler, base, PATTERN, 8, 600)
    assert max(out.row_nfe) < 8  # drafts are accepted where only one token is allowed


@pytest.mark.thinned
@pytest.mark.parametrize("tree", TREES)
def test_constraints_may_require_tokens_that_the_drafter_lacks(tree: str, base: Model) -> None:
    drafter = paradec.load_drafter(RECORDED / "eagle3-speculators", base=base)
    assert drafter.tokens is not None
    missing = [token for token in range(26) if token not in drafter.tokens.tolist()][:3]
    letters = "".join(chr(97 + token) for token in missing)
    sampler = paradec.samplers.create("speculative", drafter=drafter, **TREES[tree])
    assert max(assert_constrained_decoding(sampler, base, f"[{letters}]{{2}}{letters[0]}{{3}}", 6, 300).row_nfe) < 6
