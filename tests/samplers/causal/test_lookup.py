"""Prompt lookup: transformers' candidates, its tokens and forwards, the model's distribution, rows, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eagle_drafters import VOCAB, answers, exactness, greedy, tiny_base
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import paradec
from paradec.samplers.causal.drafts.text import PromptLookup, look_up
from paradec.samplers.causal.speculative import Speculative

PROMPTS = [[3, 1, 4, 1, 0, 3, 1], [2, 2], [4], [0, 3, 1, 3, 2, 4, 2, 0, 3]]


def sampler(count: int = 5, size: int = 2) -> Speculative:
    return paradec.samplers.create("speculative", drafter=PromptLookup(count, size))


class Suppress:
    """A logits processor of transformers' kind."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.tokens] = -torch.inf
        return scores


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("ends", "forbidden"), [([], []), ([3], []), ([3, 0], [1])])
def test_candidates_are_those_of_transformers(size: int, ends: list[int], forbidden: list[int]) -> None:
    generator = torch.Generator().manual_seed(size)
    length = torch.randint(1, 24, (200, 1), generator=generator)
    tokens = torch.randint(0, 5, (200, 24), generator=generator)
    usable = ~torch.isin(tokens, torch.tensor(forbidden, dtype=torch.int64))
    drafts, count = look_up(tokens, length, usable, torch.tensor(ends, dtype=torch.int64), size, 6)
    theirs = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(ends) if ends else None,
        num_output_tokens=6,
        max_matching_ngram_size=size,
        max_length=100,
        logits_processor=Suppress(forbidden),  # type: ignore[arg-type]
        vocab_size=5,
    )
    for row in range(200):
        ids = tokens[row : row + 1, : int(length[row])]
        expected = theirs.get_candidates(ids)[0][0, ids.shape[1] :].tolist()
        assert drafts[row, : count[row]].tolist() == expected and not drafts[row, count[row] :].any()
    assert 0 < int((count == 0).sum()) < 150 and int((count > 1).sum()) > 20


def test_tokens_and_forwards_are_those_of_transformers() -> None:
    base, calls = tiny_base(), []
    hook = base.module.model.register_forward_pre_hook(lambda *_: calls.append(0))
    saved = 0
    for prompt in PROMPTS:
        calls.clear()
        settings = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2, "do_sample": False}
        ids = torch.tensor([prompt])
        expected = base.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **settings)
        count = len(calls)
        out = paradec.generate(base, [prompt], sampler=sampler(), max_new_tokens=20, temperature=0)
        assert out.new_tokens[0].tolist() == expected[0, len(prompt) :].tolist() and out.nfe == count
        saved += 20 - count
    hook.remove()
    assert saved > 8


def test_temperature_0_is_greedy_decoding() -> None:
    base = tiny_base()
    found, state = answers(sampler(), base, PROMPTS, max_new_tokens=14, temperature=0)
    assert found == greedy(base.module, PROMPTS, 14)
    assert len(set(state.nfe.tolist())) > 1 and state.nfe.sum() < 4 * 14 and not state.draft_nfe.any()


@pytest.mark.parametrize("request_name", ["temperature 1", "all"])
def test_answers_have_the_model_s_distribution(request_name: str) -> None:
    model = exactness.TableModel.random(5, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "PROMPTS", ([2, 0, 2, 0], [4, 1, 3, 1, 4, 1]))
        found = exactness.test_case(sampler(3), model, 4000, seed=5, **exactness.REQUESTS[request_name])
    assert min(found["p_values"]) > 0.01 / 4 and found["nfe"] < 4


def test_nothing_is_drafted_that_may_not_be_drawn() -> None:
    base = tiny_base()
    given = {"max_new_tokens": 12, "suppress_tokens": (1,), "temperature": 0}
    found = paradec.generate(base, PROMPTS, sampler=sampler(), **given)
    plain = paradec.generate(base, PROMPTS, sampler=paradec.samplers.create("sjd", window=1), **given)
    assert found.new_tokens.tolist() == plain.new_tokens.tolist()
    state = sampler().start(base, [[VOCAB - 1, 0, VOCAB - 1, 0]], max_new_tokens=6)
    state.canvas[0, 0] = VOCAB + 3
    state.canvas[0, 2] = VOCAB + 3
    PromptLookup(5, 1).fill(state, np.arange(1))
    assert state.drafted.tolist() == [0]  # what follows the last 0 is no token


def test_settings_travel() -> None:
    short = paradec.samplers.create("speculative", drafter="prompt_lookup")
    assert short.drafter == PromptLookup(10, 2) and short == Speculative(drafter=PromptLookup())
    data = sampler(7, 3).to_dict()
    assert data["drafter"]["max_matching_ngram_size"] == 3 and Speculative.from_dict(data) == sampler(7, 3)
