"""SJD: exact in distribution, equal to greedy decoding at temperature 0, and the public code's verification cases."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.protocol import Commit, Proposal, decode
from paradec.samplers.draft_verify import DraftState, inverse_cdf, judge, token_law
from paradec.samplers.request import Request
from paradec.samplers.sjd import SJD

GOLDEN = sorted((Path(__file__).parent / "golden" / "sjd").glob("*.json"))
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8, 9, 7, 9]]


def tiny_llama(vocab: int, sharpness: float, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """A random causal Llama; a higher sharpness makes its laws more peaked."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LlamaForCausalLM(config)
    module.lm_head.weight.data *= sharpness
    return module.to(dtype).eval()


def wrapped(vocab: int, sharpness: float = 1.0, dtype: torch.dtype = torch.float64) -> paradec.models.adapter.Model:
    return paradec.wrap(tiny_llama(vocab, sharpness, dtype), topology="causal", prediction="shifted")


def answers(sampler: SJD, model: object, prompt: object, **request: object) -> tuple[list[list[int]], DraftState]:
    """The new tokens of every row, and the final state."""
    state = sampler.start(model, prompt, **request)
    decode(sampler, model, state)
    spans = zip(state.canvas.tolist(), state.prompt_length, state.length, strict=True)
    return [row[start:stop] for row, start, stop in spans], state


def greedy(module: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# ---- temperature 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["uniform", "repeat"])
@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_greedy_equals_token_by_token(window: int, init: str) -> None:
    model = wrapped(12)
    expected = [greedy(model.module, prompt, 11) for prompt in PROMPTS]
    sampler = SJD(window=window, init=init)
    together, state = answers(sampler, model, PROMPTS, max_new_tokens=11, temperature=0, seed=0)
    assert together == expected
    for row, prompt in enumerate(PROMPTS):
        alone, own = answers(sampler, model, prompt, max_new_tokens=11, temperature=0, seed=0)
        assert alone == [expected[row]]
        assert own.nfe[0] == state.nfe[row]
    assert (state.nfe <= 11).all() and (window > 1 or (state.nfe == 11).all())


def test_top_k_of_one_is_greedy() -> None:
    model = wrapped(12)
    found, _ = answers(SJD(window=4), model, PROMPTS, max_new_tokens=9, temperature=0.7, top_k=1, seed=3)
    assert found == [greedy(model.module, prompt, 9) for prompt in PROMPTS]


# ---- the law --------------------------------------------------------------------------------------------------------

VOCAB, NEW, COPIES = 5, 4, 6000


def exact_law(module: LlamaForCausalLM, prompt: list[int], request: Request) -> np.ndarray:
    """[V ** NEW]: probability of every answer, in order of its digits to the base V."""
    every = torch.tensor(list(itertools.product(range(VOCAB), repeat=NEW)))
    ids = torch.cat((torch.tensor(prompt).expand(len(every), -1), every), dim=1)
    with torch.inference_mode():
        law = token_law(module(ids).logits[:, len(prompt) - 1 : -1], request)
    return law.gather(-1, every.unsqueeze(-1)).prod(1).squeeze(-1).numpy()


def p_value(found: list[list[int]], law: np.ndarray) -> float:
    """Chi-square test of answers against a law; cells that expect fewer than 8 are pooled."""
    counts = np.bincount(np.array(found) @ VOCAB ** np.arange(NEW)[::-1], minlength=len(law))
    expected = law * len(found)
    assert counts[expected == 0].sum() == 0
    small = expected < 8
    cells = [np.append(values[~small], values[small].sum()) for values in (counts, expected)]
    if cells[1][-1] == 0:
        cells = [values[:-1] for values in cells]
    return stats.chisquare(*cells).pvalue


@pytest.fixture(scope="module")
def small() -> paradec.models.adapter.Model:
    return wrapped(VOCAB, 0.5)


@pytest.mark.parametrize(
    ("window", "init"), [(1, "uniform"), (2, "uniform"), (4, "uniform"), (2, "repeat"), (4, "repeat")]
)
def test_exact_in_distribution(small: paradec.models.adapter.Model, window: int, init: str) -> None:
    found, state = answers(SJD(window=window, init=init), small, [[2, 0]] * COPIES, max_new_tokens=NEW, seed=1)
    assert p_value(found, exact_law(small.module, [2, 0], Request(temperature=1.0))) > 1e-3
    assert window == 1 or state.nfe.mean() < NEW


def test_exact_in_distribution_with_filters(small: paradec.models.adapter.Model) -> None:
    """The residual is not filtered again: temperature, nucleus and top-k leave the law exact."""
    request = {"temperature": 0.7, "top_p": 0.9, "top_k": 4}
    found, _ = answers(SJD(window=3), small, [[2, 0]] * COPIES, max_new_tokens=NEW, seed=1, **request)
    assert p_value(found, exact_law(small.module, [2, 0], Request(**request))) > 1e-3


def test_exact_in_distribution_in_ragged_batches(small: paradec.models.adapter.Model) -> None:
    prompts = [[2, 0], [4, 1, 3, 3]] * (COPIES // 2)
    found, _ = answers(SJD(window=3), small, prompts, max_new_tokens=NEW, seed=2)
    for first, prompt in enumerate(prompts[:2]):
        assert p_value(found[first::2], exact_law(small.module, prompt, Request(temperature=1.0))) > 1e-3


@dataclass(frozen=True)
class WrongGuessLaw(SJD):
    """Records a law that the first drafts were not drawn from."""

    def draft(self, noise: Tensor, last: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        return super().draft(noise**2, last, vocab)


@dataclass(frozen=True)
class StaleLaw(SJD):
    """Judges drafts that were drawn anew against the law of the first drafts."""

    def commit(self, state: DraftState, proposal: Proposal) -> Commit:
        commit = super().commit(state, proposal)
        state.memory["draft_law"] = torch.full_like(state.memory["draft_law"], 1 / VOCAB)
        return commit


@pytest.mark.parametrize(
    ("sampler", "temperature"), [(WrongGuessLaw(window=4), 1.0), (StaleLaw(window=4), 1.0), (SJD(window=4), 1.2)]
)
def test_the_chi_square_test_has_power(small: paradec.models.adapter.Model, sampler: SJD, temperature: float) -> None:
    law = exact_law(small.module, [2, 0], Request(temperature=1.0))
    found, _ = answers(sampler, small, [[2, 0]] * COPIES, max_new_tokens=NEW, seed=1, temperature=temperature)
    assert p_value(found, law) < 1e-6


# ---- contracts ------------------------------------------------------------------------------------------------------


def test_fewer_forwards_on_a_peaked_model() -> None:
    model = wrapped(12, 8.0)
    _, state = answers(SJD(), model, PROMPTS, max_new_tokens=24, seed=0)
    assert (state.nfe < 24).all() and (state.row_forwards == state.nfe).all()


def test_a_step_repeated_equals_the_step() -> None:
    model, sampler = wrapped(12), SJD(window=4)
    state = sampler.start(model, PROMPTS, max_new_tokens=10, seed=4)
    with torch.inference_mode():
        while not state.done:
            kept = [state.canvas.clone(), *(tensor.clone() for tensor in state.memory.tensors.values())]
            first, again = sampler.step(model, state), sampler.step(model, state)
            assert torch.equal(first.values, again.values) and torch.equal(first.scores, again.scores)
            for name, value in first.quantities.items():
                assert torch.equal(value, again.quantities[name])
            now = [state.canvas, *state.memory.tensors.values()]
            assert all(torch.equal(before, after) for before, after in zip(kept, now, strict=True))
            before = state.committed.copy()
            sampler.commit(state, again)
            moved = state.committed - before
            assert (moved[first.rows] >= 1).all() and (moved <= sampler.window).all()
            with pytest.raises(ValueError, match="earlier state"):
                sampler.commit(state, first)
    assert state.progress == (40, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_independent(dtype: torch.dtype) -> None:
    model, sampler = wrapped(12, dtype=dtype), SJD(window=4)
    together, state = answers(sampler, model, PROMPTS, max_new_tokens=12, seed=[1, 2, 3, 4])
    for row, prompt in enumerate(PROMPTS):
        alone, own = answers(sampler, model, prompt, max_new_tokens=12, seed=row + 1)
        assert alone == [together[row]]
        assert own.forwarded_tokens[0] == state.forwarded_tokens[row]


def test_modules_that_take_no_padding_are_called_by_length() -> None:
    class Plain(torch.nn.Module):
        def __init__(self, module: LlamaForCausalLM):
            super().__init__()
            self.module, self.config = module, module.config

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.module(input_ids).logits

    module = tiny_llama(12, 1.0)
    plain = paradec.wrap(Plain(module), topology="causal", prediction="shifted")
    padded = paradec.wrap(module, topology="causal", prediction="shifted")
    found = [answers(SJD(window=4), model, PROMPTS, max_new_tokens=9, seed=5)[0] for model in (plain, padded)]
    assert found[0] == found[1]


def test_the_trace_replays() -> None:
    model, sampler = wrapped(12), SJD(window=4)
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5, trace=True)
    decode(sampler, model, state)
    finals = [row[:stop] for row, stop in zip(state.canvas.tolist(), state.length, strict=True)]
    assert state.trace.replay() == finals
    written = [entry[:2] for step in state.trace.steps for entry in step.commits]
    assert len(written) == len(set(written)) == 36
    assert len(state.trace.steps) == state.nfe.max()


def test_nan_logits_are_refused() -> None:
    model, sampler = wrapped(12), SJD(window=4)
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5)
    before = state.canvas.clone()
    model.module.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="row 0 at its step 0"):
        decode(sampler, model, state)
    assert torch.equal(state.canvas, before) and not state.nfe.any()


def test_settings_are_checked() -> None:
    sampler = paradec.samplers.create("sjd", window=8)
    assert type(sampler).from_dict(sampler.to_dict()) == sampler
    for settings in ({"window": 0}, {"window": 2.0}, {"init": "random"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            SJD(**settings)
    model = wrapped(12)
    wrong = {"max_new_tokens": 0, "temperature": -1, "top_p": 2, "top_k": 0, "seed": [1, 2]}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            SJD().start(model, [1, 2], **{"max_new_tokens": 8, name: value})
    with pytest.raises(ValueError, match="max_new_tokens=70"):
        SJD().start(model, [1, 2], max_new_tokens=70)
    same = paradec.wrap(tiny_llama(12, 1.0), topology="causal", prediction="same")
    with pytest.raises(ValueError, match="prediction='shifted'"):
        SJD().start(same, [1, 2])


# ---- the public code's cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_reference_verification(path: Path) -> None:
    """Every draw supplied. In a batch the public code commits the fewest of all rows; here each row commits its own."""
    case = json.loads(path.read_text())
    p = torch.tensor(case["p"], dtype=torch.float64)
    # the case's draft i is judged by the law of slot i - 1
    q, drafts, u_accept = (torch.tensor(case[name]).roll(-1, dims=1) for name in ("q", "drafts", "u_accept"))
    drafted = (torch.arange(p.shape[1]) < p.shape[1] - 1).expand(drafts.shape)
    fresh = inverse_cdf(p, torch.tensor(case["u_fresh"], dtype=torch.float64))
    chance = SJD().accept(p, q.double(), drafts)
    expected = case["expected"]
    fell = [slot < p.shape[1] for slot in expected["first_reject_slot"]]
    residual = iter(case["u_residual"])
    u_residual = torch.tensor([next(residual) if one else 0.5 for one in fell]).view(-1, 1).expand(drafts.shape)
    uniform = torch.stack((u_accept.double(), u_residual.double()), dim=-1)
    tokens, standing = judge(p, q.double(), drafts, drafted, chance, fresh, uniform)
    assert tokens.tolist() == expected["tokens"]
    assert (standing.squeeze(1) + 1).tolist() == expected["first_reject_slot"]
    matched = int(standing.min()) + 1
    assert matched == expected["matched"]
    assert tokens[:, :matched].tolist() == expected["commit"]
    assert tokens[:, matched:].tolist() == expected["next_drafts"]


def test_the_inverse_cdf_never_draws_a_word_without_weight() -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64).expand(4, 5)
    noise = torch.tensor([2.0**-54, 0.2999, 0.3001, 1.0], dtype=torch.float64)
    assert inverse_cdf(weights, noise).tolist() == [1, 1, 3, 3]
