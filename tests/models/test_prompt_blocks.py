"""Models whose blocks are counted from the end of the prompt (D2F)."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from decoding import covering, refuses
from oracles.prompt_blocks import BLOCK, commits, plain_logits, plain_loop
from small_models import END, MASK, tiny
from torch import Tensor

import paradec
from paradec import FixedBlocks, PipelinedBlocks, caches, samplers
from paradec.caches.table import EXACT, verdict
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.tools.evaluation.likelihood import log_likelihoods

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
KINDS = ("same", "shifted")
pytestmark = pytest.mark.filterwarnings("ignore:cache=")


def prompt_aligned_model(layers: int = 2, prediction: str = "same", **other: Any) -> Model:
    model = tiny(layers, "block_causal", prediction, **other)
    model.facts = dataclasses.replace(model.facts, block_align="prompt")
    return model


def decode(model: Model, rows: Any = ROWS, **request: Any) -> Any:
    return paradec.generate(model, rows, **{"max_new_tokens": 10, "eos_early_stop": False, "trace": True} | request)


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", KINDS)
@pytest.mark.parametrize("cache", ["none", "block", "prefix", "dual", "delayed", "dkv_prefill", "vicinity"])
@pytest.mark.parametrize("add", [0.0, 0.5, 1.0])
def test_decoding_equals_a_plain_loop(add: float, cache: str, prediction: str) -> None:
    model = prompt_aligned_model(2, prediction)
    assert verdict(samplers.create("threshold"), caches.create(cache), model.facts).status == EXACT
    several = False
    for threshold in (0.2, 0.6):
        sampler = samplers.create("threshold", threshold=threshold)
        # as in `plain_loop`, confidences are probabilities without the mask token
        out = decode(model, sampler=sampler, cache=cache, blocks=PipelinedBlocks(BLOCK, add=add))
        for row, prompt in enumerate(ROWS):
            expected = plain_loop(model, prompt, 10, threshold, add)
            ours = commits(out, row)
            assert ours == expected
            several |= any(len({(i - len(prompt)) // BLOCK for i, _ in step}) > 1 for step in ours)
    assert several == (add < 1)


BLOCK_POLICIES = [FixedBlocks(2), FixedBlocks(8), FixedBlocks(3), FixedBlocks(4, align="absolute"), "whole"]


@pytest.mark.parametrize(("prediction", "blocks"), covering(KINDS, BLOCK_POLICIES))
def test_caches_and_batches_with_custom_blocks(prediction: str, blocks: Any) -> None:
    model = prompt_aligned_model(2, prediction)
    plain, *others = (decode(model, blocks=blocks, cache=c, sampler="threshold") for c in ("none", "block", "dual"))
    for out in others:
        assert [commits(out, row) for row in range(3)] == [commits(plain, row) for row in range(3)]
    for row, prompt in enumerate(ROWS):
        alone = decode(model, [prompt], blocks=blocks, cache="block", sampler="threshold")
        assert commits(alone, 0) == commits(plain, row)
    assert decode(model).sequences.tolist() == decode(model, block_length=4).sequences.tolist()


def test_the_last_block_is_decoded_whole_and_cut() -> None:
    model = prompt_aligned_model()
    for new in (1, 3, 4, 5):
        short, long = (decode(model, [[1, 2, 3]], max_new_tokens=n, sampler="threshold") for n in (new, 8))
        assert short.sequences.shape[1] == 3 + new
        assert short.new_tokens[0].tolist() == long.new_tokens[0].tolist()[:new]


def test_blocks_begin_at_the_first_hole() -> None:
    model = prompt_aligned_model()
    row = [1, 2, MASK, 3, MASK, 5, 6, 7, MASK]
    outs = [decode(model, [row, [9, MASK]], max_new_tokens=2, cache=c) for c in ("none", "block")]
    assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
    filled = outs[0].sequences[0].tolist()
    assert MASK not in filled and all(old in (new, MASK) for old, new in zip(row, filled, strict=False))
    first = outs[0].trace.steps[0].commits
    assert {position for r, position, *_ in first if r == 0} <= {2, 4}  # the first block is [2, 6)
    p = plain_logits(model, row + [MASK] * 5, 2)
    p[:, MASK] = -torch.inf
    assert all(token == int(p[position].argmax()) for r, position, token, _ in first if r == 0)


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", KINDS)
def test_guidance_and_drafts_with_every_cache(prediction: str) -> None:
    model = prompt_aligned_model(2, prediction)
    guided = [decode(model, guidance_scale=1.7, cache=c, sampler="threshold") for c in ("none", "block", "dual")]
    for out in guided[1:]:
        assert out.sequences.tolist() == guided[0].sequences.tolist()
    prompt, ids = ROWS[0], [*ROWS[0], *[MASK] * BLOCK]
    conditional, unconditional = (plain_logits(model, each, 3) for each in (ids, [MASK] * len(ids)))
    logits = unconditional + 1.7 * (conditional - unconditional)
    logits[:, MASK] = -torch.inf
    first = commits(guided[0], 0)[0]
    assert all(token == int(logits[position].argmax()) for position, token in first) and len(prompt) == 3
    base = decode(model, sampler="low_confidence", steps=12)
    for cache in ("none", "block", "dual"):
        for mode in ("batch", "tree"):
            drafted = decode(model, sampler=samplers.create("freedave", draft_mode=mode), steps=12, cache=cache)
            assert drafted.sequences.tolist() == base.sequences.tolist()
    branched = [decode(model, sampler=samplers.create("lopa", branches=2), cache=c) for c in ("none", "dual")]
    assert branched[0].row_forwards > sum(branched[0].row_nfe)
    if prediction == "same":
        shadowed = [decode(model, sampler="wino", cache=c) for c in ("none", "dual")]
        assert shadowed[0].sequences.tolist() == shadowed[1].sequences.tolist()


def test_adaptive_blocks_stay_inside_model_blocks() -> None:
    model = prompt_aligned_model()
    policy = paradec.AdaptiveBlocks(length=6, delimiters=(7,), window=1.0).for_model(model)
    starts, prompts, ends = np.array([3, 4, 9]), np.array([3, 3, 5]), np.array([40, 40, 40])
    assert policy.open(starts, prompts, ends).tolist() == [7, 7, 13]


@pytest.mark.parametrize("prediction", KINDS)
def test_likelihoods_by_a_plain_loop(prediction: str) -> None:
    model = prompt_aligned_model(2, prediction)
    pairs = [([1, 2, 3], [5, 6, 7, 8, 9, 1]), ([4], [3, 2]), ([5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15])]
    actual = list(log_likelihoods(model, pairs, method="chain", order="left_to_right"))
    for (context, continuation), ours in zip(pairs, actual, strict=True):
        total = 0.0
        for number, token in enumerate(continuation):
            ids = context + continuation[:number] + [MASK] * ((-(-(number + 1) // BLOCK) * BLOCK) - number)
            total += float(plain_logits(model, ids, len(context))[len(context) + number].log_softmax(-1)[token])
        assert ours.value == pytest.approx(total, abs=1e-9)


def test_callers_without_a_prompt_end_are_refused() -> None:
    model = prompt_aligned_model()
    for request in ({"share_prefix": True}, {"keep_prefix": True}):
        with pytest.raises(ValueError, match="does not work with LlamaForCausalLM: its prompt is one block"):
            decode(model, cache="block", **request)
    query = Query(np.array([0]), torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))
    refuses(lambda: model(query), "counts its blocks from the prompt's end: the query needs `origin`")
    refuses(lambda: ModelFacts(8, 0, block_align="prompt"), "block_align='prompt' is not for topology='bidirectional'")
    with pytest.raises(ValueError, match="unknown block_align: 'left'; allowed: absolute, prompt"):
        ModelFacts(8, 0, topology="block_causal", block_length=2, block_align="left")


def test_wrapped_modules_count_blocks_from_the_prompt() -> None:
    inner = tiny(2).module
    facts: dict[str, Any] = {"mask_token_id": MASK, "eos_token_id": END, "prediction": "same"}
    facts["topology"] = "block_causal"
    wrapped = paradec.wrap(inner, **facts, block_length=BLOCK, block_align="prompt")
    assert decode(wrapped).sequences.tolist() == decode(prompt_aligned_model()).sequences.tolist()
    absolute = paradec.wrap(inner, **facts, block_length=BLOCK)
    assert decode(wrapped).sequences.tolist() != decode(absolute).sequences.tolist()

    class Custom(torch.nn.Module):
        config = inner.config

        def forward(self, input_ids: Tensor) -> Tensor:
            return inner(input_ids).logits

    refuses(lambda: paradec.wrap(Custom(), **facts, block_length=BLOCK, block_align="prompt"), "block_align='prompt'")
