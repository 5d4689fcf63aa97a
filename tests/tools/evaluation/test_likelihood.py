"""Log-likelihoods against plain loops over all maskings, over all orders, and from left to right."""

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from small_models import MASK, tiny, wrap_kind

import paradec
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.tools.evaluation import likelihood
from paradec.tools.evaluation.likelihood import Likelihood, check_greedy_decoding, log_likelihoods

CONTEXT, CONTINUATION = [3, 17, 8, 30, 2], [5, 21, 9, 33]


def distributions(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities [L, V] of all positions from one call without padding."""
    row = torch.tensor([tokens])
    query = Query(rows=np.arange(1), tokens=row, positions=torch.arange(len(tokens))[None])
    logits = model(query)[0].double()
    return logits.roll(1 if model.facts.topology == "causal" else model.facts.shift, 0).log_softmax(-1)


def mask_positions(row: list[int], positions: Any, mask: int) -> list[int]:
    return [mask if position in positions else token for position, token in enumerate(row)]


def expectation(model: Model, row: list[int], begin: int) -> float:
    """Return the likelihood bound, by a plain loop over all numbers and positions of masks."""
    length, total = len(row) - begin, 0.0
    for size in range(1, length + 1):
        subsets = list(itertools.combinations(range(begin, len(row)), size))
        for positions in subsets:
            log_p = distributions(model, mask_positions(row, positions, model.facts.mask_id))
            total += sum(log_p[i, row[i]].item() for i in positions) * length / size / len(subsets) / length
    return total


def score(model: Model, context: list[int] = CONTEXT, continuation: list[int] = CONTINUATION, **how: Any) -> Likelihood:
    return next(log_likelihoods(model, [(context, continuation)], **how))


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_all_maskings_give_the_expectation(prediction: str) -> None:
    model = tiny(1, prediction=prediction)
    actual = score(model, samples=15)
    assert (actual.variance, actual.samples, actual.forwards) == (0.0, 15, 15)
    assert actual.value == pytest.approx(expectation(model, CONTEXT + CONTINUATION, len(CONTEXT)), abs=1e-9)


def test_all_orders_have_the_expectation_as_their_mean() -> None:
    model = tiny(1)
    row, chains = CONTEXT + CONTINUATION, []
    for order in itertools.permutations(range(len(CONTEXT), len(row))):
        total = 0.0
        for step, position in enumerate(order):
            log_p = distributions(model, mask_positions(row, order[step:], MASK))
            total += log_p[position, row[position]].item()
        chains.append(total)
    assert np.mean(chains) == pytest.approx(score(model, samples=15).value, abs=1e-9)
    assert score(model, method="chain").value == pytest.approx(chains[0], abs=1e-9)
    backwards = score(model, method="chain", order="right_to_left")
    assert backwards.value == pytest.approx(chains[-1], abs=1e-9)
    assert (backwards.variance, backwards.forwards, backwards.samples) == (0.0, 4, 1)
    drawn = score(model, method="chain", order="random", samples=64)
    assert drawn.value == pytest.approx(np.mean(chains), abs=4 * drawn.error) and 0 < drawn.error < np.std(chains)


def test_random_maskings_estimate_the_bound_and_their_variance() -> None:
    model = tiny(1)
    truth = expectation(model, CONTEXT + CONTINUATION, len(CONTEXT))
    actual = [score(model, samples=12, stratum=2, seed=seed) for seed in range(60)]
    values, variances = np.array([f.value for f in actual]), np.array([f.variance for f in actual])
    assert abs(values.mean() - truth) < 4 * values.std(ddof=1) / math.sqrt(len(values))
    assert 0.6 < variances.mean() / values.var(ddof=1) < 1.6
    # Student's t with 5 degrees of freedom: 95 % lie within 2.57 standard errors
    assert (abs(values - truth) < 2.57 * np.sqrt(variances)).mean() >= 0.85
    assert math.isnan(score(model, samples=4, stratum=4).variance), "one stratum has no spread"


@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
@pytest.mark.parametrize("method", ["chain", "monte_carlo"])
def test_standard_errors_match_single_draws(method: str, topology: str) -> None:
    """The error follows from the single draws. Variances of blocks add up; without draws there is no error."""
    model, continuation = tiny(1, topology), CONTINUATION * 2
    row = CONTEXT + continuation
    if method == "chain":
        parts = likelihood.build_chain_maskings(model.facts, CONTEXT, continuation, "random", 6, 2)
    else:
        parts = likelihood.draw_maskings(model.facts, CONTEXT, continuation, 6, 2, 2)
    value = variance = 0.0
    for part in parts:
        strata = [0.0] * (part.rows[-1].stratum_index + 1)
        for masking in part.rows:
            log_p = distributions(model, masking.tokens)
            strata[masking.stratum_index] += masking.weight * sum(log_p[i, row[i]].item() for i in masking.positions)
        value += statistics.mean(strata)
        variance += statistics.variance(strata) / len(strata) if part.is_random else 0
    assert [part.is_random for part in parts] == ([True] if topology == "bidirectional" else [True, True, False])
    actual = score(model, continuation=continuation, method=method, order="random", samples=6, stratum=2, seed=2)
    assert actual.value == pytest.approx(value, abs=1e-9) and actual.variance == pytest.approx(variance, abs=1e-9)
    assert actual.error == math.sqrt(actual.variance) > 0


@pytest.mark.parametrize(("length", "stratum"), [(8, 16), (24, 16), (5, 16), (40, 16), (7, 1)])
def test_every_number_of_masks_is_equally_likely(length: int, stratum: int) -> None:
    # at lengths 8 and 24 rounding to even would favour even numbers
    key = likelihood._row_key(0, [length])
    sizes = np.array(likelihood._draw_sizes(key, 3, length, 4000 * stratum, stratum)).reshape(-1, stratum)
    assert {sizes.min(), sizes.max()} == {1, length}
    assert np.isin(sizes, range(2, length + 1, 2)).mean() == pytest.approx((length // 2) / length, abs=0.03)
    for column in sizes.T:
        counts = np.bincount(column, minlength=length + 1)[1:]
        assert abs(counts - 4000 / length).max() < 5 * math.sqrt(4000 / length)
    if stratum > length:
        spread = [np.bincount(row, minlength=length + 1)[1:] for row in sizes[:20]]
        assert all(counts.max() - counts.min() <= 1 for counts in spread), "spread evenly within a stratum"


@pytest.mark.parametrize("longest", [512, 10, 9])
def test_blocks_are_scored_in_order(longest: int) -> None:
    facts = {"mask_token_id": MASK, "topology": "block_causal", "block_length": 4, "prediction": "same"}
    model = paradec.wrap(tiny(2).module, max_length=longest, eos_token_id=(), **facts)
    row = CONTEXT + CONTINUATION  # the last 4 of 9 tokens: three in the second block of 4, one in the third
    expected = 0.0
    for begin, end, width in ((5, 8, 8), (8, 9, min(12, longest))):
        for k in range(begin, end):
            expected += distributions(model, row[:k] + [MASK] * (width - k))[k, row[k]].item()
    if longest == len(row):
        with pytest.raises(ValueError, match=f"= 10 is longer than .* takes .{longest}"):
            score(model, [1, *CONTEXT])
    assert score(model, method="chain").value == pytest.approx(expected, abs=1e-9)
    parts = [score(model, CONTEXT, row[5:8], samples=7), score(model, row[:8], row[8:], samples=1)]
    actual = score(model, samples=7)
    assert actual.value == pytest.approx(sum(part.value for part in parts), abs=1e-9) and actual.forwards == 8
    assert score(model, row[:3], row[3:7], samples=7).samples == 7  # of two blocks the larger number: the second's
    assert actual.samples == 7  # here the first block's


def test_causal_models_are_exact() -> None:
    model = wrap_kind("Llama causal")
    row = [3, 17, 8, 30, 2, 6, 21]
    log_p = distributions(model, row)
    actual = score(model, row[:3], row[3:])
    assert actual.value == pytest.approx(sum(log_p[i, row[i]].item() for i in range(3, 7)), abs=1e-9)
    assert (actual.variance, actual.samples, actual.forwards, actual.greedy) == (0.0, 1, 1, False)
    likeliest = paradec.generate(model, input_ids=row[:3], max_new_tokens=4, sampler="jacobi", eos_early_stop=False)
    assert score(model, row[:3], likeliest.new_tokens[0].tolist()).greedy


def test_guidance_masks_the_context() -> None:
    model, scale = tiny(1), 1.5
    row = CONTEXT + [5]
    conditional = distributions(model, mask_positions(row, [5], MASK))[5]
    without = distributions(model, mask_positions(row, range(6), MASK))[5]
    expected = (without + scale * (conditional - without)).log_softmax(-1)[5].item()
    actual = score(model, continuation=[5], guidance_scale=scale)
    assert actual.value == pytest.approx(expected, abs=1e-9) and actual.forwards == 2
    off = score(model, continuation=[5], guidance_scale=1)
    assert off.forwards == 1 and off.value == pytest.approx(conditional[5].item(), abs=1e-9)


@pytest.mark.parametrize("kind", ["Bert", "ConvBert", "Opaque", "Qwen2 causal", "Qwen3 bidirectional"])
def test_pairs_do_not_depend_on_each_other(kind: str) -> None:
    model = wrap_kind(kind)
    pairs = [([3, 9, 4], [8, 2]), ([11], [20, 21, 22]), ([3, 9, 4, 8, 2, 6], [1])]
    how = {} if model.facts.topology == "causal" else {"samples": 4, "stratum": 2}
    expected = [next(log_likelihoods(model, [pair], batch_size=1, **how)) for pair in pairs]
    for batch_size in (2, 16):
        together = list(log_likelihoods(model, pairs, batch_size=batch_size, **how))
        assert [f.value for f in together] == pytest.approx([f.value for f in expected], abs=1e-9)
        assert [f.variance for f in together] == pytest.approx([f.variance for f in expected], abs=1e-9)
    assert list(log_likelihoods(model, [], **how)) == []


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_greedy_decoding_of_a_suffix(prediction: str) -> None:
    model = tiny(2, prediction=prediction)
    row, masked = CONTEXT + [MASK] * 4, {5, 6, 7, 8}
    while masked:  # the most confident of the masked positions, one per forward
        log_p = distributions(model, row)
        log_p[:, MASK] = -torch.inf
        most_confident = max(masked, key=lambda i: (log_p[i].max().item(), -i))
        row[most_confident] = int(log_p[most_confident].argmax())
        masked.discard(most_confident)
    wrong = row[5:8] + [(row[8] + 1) % MASK]
    pairs = [(CONTEXT, row[5:]), (CONTEXT, wrong), (CONTEXT[:3], row[5:6])]
    assert check_greedy_decoding(model, pairs)[:2] == [True, False]
    ending = tiny(2, prediction=prediction, ends=(row[5],))
    assert check_greedy_decoding(ending, pairs)[:2] == [True, False]  # end tokens do not end the continuation


def test_nan_logits_are_an_error() -> None:
    model = tiny(1)
    model.module.lm_head.weight.data[7] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        score(model)
