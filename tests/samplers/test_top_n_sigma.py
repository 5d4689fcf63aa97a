"""Top-n-sigma: what is kept, that every entry point and sampler applies it, and that verification stays exact under
it."""

from __future__ import annotations

import math
from typing import Any

import next_image
import numpy as np
import pytest
import torch
from canvases import tiny_module
from jacobi_runs import exactness
from tiny_models import MASK, tiny
from torch import Tensor

import paradec
from paradec import samplers, schedulers
from paradec.kernels.token_stats import draw
from paradec.request import Request, request_for
from paradec.samplers.causal.trees import DynamicTree
from paradec.samplers.causal.verification import (
    DraftDistributions,
    DraftWindow,
    residual,
    token_distribution,
    verify,
)
from paradec.samplers.filters import filter_logits, near_the_best

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def kept(logits: Tensor, count: float) -> list[bool]:
    """A plain loop over one row, by Python's own sums."""
    values = [value for value in logits.tolist() if math.isfinite(value)]
    mean = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    least = max(values) - count * sigma
    return [value >= least for value in logits.tolist()]


# ---- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", next_image.cases("lumina-sjd", "kept"))
def test_the_public_code_s_filter_where_nothing_was_filtered_and_the_mended_one_elsewhere(name: str) -> None:
    case, arrays = next_image.case("lumina-sjd", name)
    logits, count = arrays["logits"], case["settings"]["n"]
    found = near_the_best(logits, count)
    for row, out, sigma, ids in zip(logits, found, case["sigma"], case["kept"], strict=True):
        own = [i for i, value in enumerate(out.tolist()) if value > -math.inf]
        assert own == [i for i, keep in enumerate(kept(row, count)) if keep]
        assert torch.equal(out[own], row[own])
        some = row[row.isfinite()].double()
        deviation = float(some.std(correction=0))
        if len(some) == len(row):
            assert own == ids and abs(deviation - sigma) < 1e-5
        else:
            # the root mean square about zero: an offset of all logits changes what the public code keeps
            assert abs(float(some.square().mean().sqrt()) - sigma) < 1e-5
            shifted = some + 100
            wide = float(shifted.square().mean().sqrt())
            assert (shifted >= shifted.max() - count * wide).sum() == len(some) >= len(ids)
    offset = near_the_best(logits.double() + 100, count) > -math.inf
    assert torch.equal(offset, near_the_best(logits.double(), count) > -math.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 7, 300, 5000):
        logits = (3 * torch.randn(4, 3, size, generator=generator)).to(dtype)
        logits[0, 0, 1:] = -torch.inf
        logits[0, 1] = 2.5
        logits[1, :, ::3] = -torch.inf
        logits[1, :, size - 1] = 0.5
        before = logits.clone()
        for count in (1e-9, 0.5, 1.0, 2.3, 1e9):
            found = near_the_best(logits, count)
            assert found.dtype == dtype and torch.equal(logits, before)
            for row, out in zip(logits.flatten(0, 1), found.flatten(0, 1), strict=True):
                expected = row.masked_fill(~torch.tensor(kept(row.double(), count)), -torch.inf)
                assert torch.equal(out, expected)
        assert torch.equal(near_the_best(logits, 1e9), logits)
        assert torch.equal(near_the_best(logits[2, 1], 1.0), near_the_best(logits, 1.0)[2, 1])


def test_pieces_and_rows_that_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 4, 30, generator=torch.Generator().manual_seed(2))
    logits[1, 1, 3], logits[2, 2, 4] = torch.nan, torch.inf
    logits[3, 3] = -torch.inf
    whole = near_the_best(logits, 1.0)
    # these rows are an error of the model, which a commit names: they stay as they are
    for row, column in ((1, 1), (2, 2), (3, 3)):
        torch.testing.assert_close(whole[row, column], logits[row, column], rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr("paradec.samplers.distributions.CPU_CHUNK", 70)
    torch.testing.assert_close(near_the_best(logits, 1.0), whole, rtol=0, atol=0, equal_nan=True)
    assert near_the_best(logits[:0], 1.0).shape == (0, 4, 30)
    wide = torch.tensor([0.0, -1e300, -1e300, -3e300], dtype=torch.float64)
    assert (near_the_best(wide, 1.0) > -torch.inf).tolist() == kept(wide / 1e300, 1.0)


def test_the_filter_comes_last() -> None:
    """After the nucleus and after top-k: the deviation is that of what these leave."""
    logits = torch.tensor([[4.0, 3.5, 3.0, 1.0, -9.0, -20.0]])
    assert (filter_logits(logits, None, None, 1.0) > -torch.inf).tolist() == [[True] * 4 + [False] * 2]
    assert (filter_logits(logits, None, 3, 1.0) > -torch.inf).tolist() == [[True] + [False] * 5]
    assert (filter_logits(logits, None, 3, 1.3) > -torch.inf).tolist() == [[True, True] + [False] * 4]
    assert (filter_logits(logits, 0.7, None, 1.0) > -torch.inf).tolist() == [[True] + [False] * 5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_tokens_at_every_temperature(dtype: torch.dtype) -> None:
    """Also where a low one leaves tokens without a float32 probability: the deviation counts them all the same."""
    logits = (6 * torch.randn(3, 2, 400, generator=torch.Generator().manual_seed(3))).to(dtype)
    logits[..., 0] = 60  # far from all others
    logits[..., 1:5] = torch.tensor([59, 55, 50, 45], dtype=dtype)
    expected = [kept(row.double(), 1.5) for row in logits.flatten(0, 1)]
    assert all(1 < sum(row) < 20 for row in expected)
    for temperature in (0.1, 0.5, 1.0, 3.0):
        distribution = token_distribution(logits, Request(temperature=temperature, top_n_sigma=1.5))
        # float32 may hold no probability for what is kept
        possible = (logits.double() - 60) / temperature > -80
        for row, found, some in zip(expected, distribution.flatten(0, 1), possible.flatten(0, 1), strict=True):
            assert ((found > 0) == (torch.tensor(row) & some))[some].all()
            assert not (found > 0)[~torch.tensor(row)].any()
    # at temperature 0 the best token is drawn, whatever is kept
    assert torch.equal(
        token_distribution(logits, Request(temperature=0.0, top_n_sigma=1.5)),
        token_distribution(logits, Request(temperature=0.0)),
    )


# ---- every sampler and entry point -----------------------------------------------------------------------------------

BEST = 1e-9
"""So few deviations leave the best token alone, as top_k=1 does."""
SAME = tiny(1)
CAUSAL = tiny(1, topology="causal", prediction="shifted")
ROWS = [[5, 6, 7, 8], [9], [3, 1, 4]]


def pair(model: Any, **request: Any) -> list[Tensor]:
    """Tokens with the best one alone by either filter, and with neither."""
    given = {"max_new_tokens": 8, "temperature": 1.3, "seed": 4} | request
    return [
        paradec.generate(model, input_ids=ROWS, **given, **filters).new_tokens
        for filters in ({"top_n_sigma": BEST}, {"top_k": 1}, {})
    ]


SERVED = ["threshold", "low_confidence", "entropy", "credit", "localleap", "wino", "editing", "freedave", "maskgit"]


@pytest.mark.parametrize("name", SERVED)
def test_masked_samplers_draw_from_what_is_left(name: str) -> None:
    first, second, free = pair(SAME, sampler=name, block_length=4)
    assert torch.equal(first, second) and not torch.equal(first, free)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["sjd", "scd", "gsd", "jacobi", "jacobi, group", "speculative", "dynamic"])
def test_causal_samplers_draw_from_what_is_left(name: str) -> None:
    """The model that drafts, too: drafts of its best token alone."""
    method: Any = name
    if name == "jacobi, group":
        method = samplers.create("jacobi", group=4)
    elif name in ("speculative", "dynamic"):
        drafter = tiny(1, topology="causal", prediction="shifted", seed=1)
        tree = {"tree": DynamicTree(nodes=5, depth=2, top_k=2), "rule": "naive"} if name == "dynamic" else {}
        method = samplers.create("speculative", drafter=drafter, **tree)
    first, second, free = pair(CAUSAL, sampler=method)
    greedy = paradec.generate(CAUSAL, input_ids=ROWS, max_new_tokens=8, sampler="sjd", seed=4).new_tokens
    assert torch.equal(first, second) and torch.equal(first, greedy) and not torch.equal(first, free)


def test_canvases_draw_from_what_is_left() -> None:
    model = paradec.wrap(tiny_module(dtype=torch.float64), eos_token_id=(11, 12, 13))
    method = samplers.create("diffusion_gemma", max_denoising_steps=6, confidence_threshold=0.5)
    first, second, free = (
        paradec.generate(
            model, input_ids=[[20, 21, 22]], sampler=method, max_new_tokens=8, seed=2, **filters
        ).new_tokens
        for filters in ({"top_n_sigma": BEST}, {"top_k": 1}, {})
    )
    assert torch.equal(first, second) and not torch.equal(first, free)


def test_confidence_is_that_of_what_is_left() -> None:
    """Methods that rank by the distribution that tokens are drawn from do so at temperature 0 as well, as with
    top-k."""
    found = [
        paradec.generate(
            SAME, input_ids=ROWS, sampler="entropy", steps=4, block_length=8, max_new_tokens=8, trace=True, **filters
        ).trace
        for filters in ({"top_n_sigma": 0.8}, {})
    ]
    assert found[0].settings["top_n_sigma"] == 0.8 and found[1].settings["top_n_sigma"] is None
    scores = [[commit for step in trace.steps for commit in step.commits] for trace in found]
    assert scores[0] != scores[1]


def test_log_probabilities_are_those_of_the_documented_distribution() -> None:
    """Of causal models those of p after the filters, at temperature 0 those without; of masked ones before them."""
    given: dict[str, Any] = {"input_ids": ROWS, "max_new_tokens": 6, "seed": 1, "logprobs": 3}
    out = paradec.generate(CAUSAL, sampler="sjd", temperature=1.0, top_n_sigma=BEST, **given)
    chosen = out.logprobs.chosen
    assert (chosen[chosen.isfinite()] == 0).all() and chosen.isfinite().any()
    cold = [paradec.generate(CAUSAL, sampler="sjd", **given, **f).logprobs.chosen for f in ({"top_n_sigma": 1.0}, {})]
    torch.testing.assert_close(*cold, equal_nan=True)
    masked = paradec.generate(SAME, sampler="threshold", temperature=1.0, top_n_sigma=BEST, **given).logprobs.chosen
    assert (masked[masked.isfinite()] < 0).any()


def test_the_reference_s_draws_have_no_such_filter() -> None:
    with pytest.raises(ValueError, match=r"top_n_sigma=1.0: the public codes of rng='reference' do not have it"):
        paradec.generate(SAME, input_ids=ROWS, rng="reference", top_n_sigma=1.0)


def test_schedulers_take_it_in_a_step() -> None:
    logits = torch.randn(1, 6, 41, generator=torch.Generator().manual_seed(5))
    logits[..., MASK] = -100
    given: dict[str, Any] = {"mask_token_id": MASK, "temperature": 3.0}
    drawn = []
    for filters in ({"top_n_sigma": BEST}, {}):
        scheduler = schedulers.ThresholdScheduler()
        scheduler.set_timesteps(1, block_length=6)
        generator = torch.Generator().manual_seed(1)
        step = scheduler.step(logits, 0, torch.full((1, 6), MASK), generator=generator, **given, **filters)
        drawn.append(step.sampled_tokens)
    assert torch.equal(drawn[0], logits.argmax(-1)) and not torch.equal(drawn[1], drawn[0])
    scheduler = schedulers.EntropyBoundScheduler()
    scheduler.set_timesteps(2, block_length=6)
    with pytest.raises(ValueError, match="top_n_sigma=1.0 has no meaning without a mask"):
        scheduler.step(logits, 0, torch.zeros(1, 6, dtype=torch.int64), top_n_sigma=1.0)


def test_pictures_and_presets(tmp_path: Any) -> None:
    given: dict[str, Any] = {"class_labels": [1, 2], "output_type": "latent", "seed": 3}
    for kind, more in (("digits-ar", {}), ("digits-maskgit", {"steps": 3})):
        model = paradec.load(kind)
        first, second, free = (
            paradec.generate_images(model, **given, **more, **filters).tokens
            for filters in ({"top_n_sigma": BEST}, {"top_k": 1}, {})
        )
        assert torch.equal(first, second) and not torch.equal(first, free)
        Request(top_n_sigma=BEST).save(tmp_path / "sigma.json")
        saved = paradec.generate_images(model, **given, **more, preset=tmp_path / "sigma.json")
        assert torch.equal(saved.tokens, first)
        with pytest.raises(ValueError, match=r"top_n_sigma=0 must be a number in \(0, inf\]"):
            paradec.generate_images(model, **given, top_n_sigma=0)


def test_samplers_of_continuous_tokens_refuse_it() -> None:
    with pytest.raises(ValueError, match="top_n_sigma=1.0 has no meaning for sampler 'mar'"):
        request_for(samplers.create("mar"), Request(top_n_sigma=1.0), {})


# ---- verification ---------------------------------------------------------------------------------------------------

TABLE = exactness.TableModel.random(5, seed=0)


def plain_distribution(model: Any, prompt: list[int], new: int, count: float) -> tuple[Tensor, np.ndarray]:
    """All answers and their probabilities, the filter by the plain loop above."""
    every = torch.cartesian_prod(*[torch.arange(model.facts.vocab_size)] * new).reshape(-1, new)
    found = []
    for answer in every.tolist():
        tokens, probability = list(prompt), 1.0
        for token in answer:
            before = tokens[-2] if len(tokens) > 1 else model.facts.vocab_size
            logits = model.table[before, tokens[-1]]
            weights = [
                math.exp(v) if keep else 0.0 for v, keep in zip(logits.tolist(), kept(logits, count), strict=True)
            ]
            probability *= weights[token] / math.fsum(weights)
            tokens.append(token)
        found.append(probability)
    return every, np.array(found)


@pytest.mark.parametrize("name", ["sjd", "sjd, one-hot q", "scd, maximal", "jacobi", "speculative", "tree"])
def test_verified_answers_have_the_filtered_distribution(name: str) -> None:
    """Chi-square against full enumeration, in ragged batches: p is filtered before drafts are verified."""
    drafter = exactness.TableModel.random(5, seed=1, near=TABLE)
    method = {
        "sjd": samplers.create("sjd", window=3),
        "sjd, one-hot q": samplers.create("sjd", window=3, guess_distribution="one_hot"),
        "scd, maximal": samplers.create("scd", window=3, refresh="maximal"),
        "jacobi": samplers.create("jacobi", group=2),
        "speculative": samplers.create("speculative", window=3, drafter=drafter),
        "tree": samplers.create("speculative", drafter=drafter, tree=(2, 2)),
    }[name]
    answers, state = exactness.sample(method, TABLE, 6000, seed=3, new=3, top_n_sigma=1.2)
    for first in range(2):
        every, distribution = plain_distribution(TABLE, exactness.PROMPTS[first], 3, 1.2)
        assert 1 < (distribution > 0).sum() < len(distribution)
        counts = exactness.counted(answers[first::2], every, 5)
        assert exactness.p_value(counts, distribution) > 0.01 / 12


def redrawn_once_more(p: Tensor, count: float | None) -> Tensor:
    """What the public code redraws a rejected draft from: p itself, filtered again by the root mean square about zero
    of the logarithms that are left."""
    if count is None:
        return p
    logits = p.log()
    some = logits[logits.isfinite()]
    sigma = some.std(correction=0) if len(some) == len(logits) else some.square().mean().sqrt()
    return logits.masked_fill(logits < logits.max() - count * sigma, -torch.inf).softmax(-1)


@pytest.mark.parametrize("name", next_image.cases("lumina-sjd", "drafts"))
def test_the_public_code_s_redraw_changes_the_distribution_and_ours_keeps_it(name: str) -> None:
    """A warning. A plain loop repeats the case, so that this is the public rule; the distribution of the token that it
    makes of a draft is not p. Ours, from max(0, p - q), is, by formula and in draws of `verify`."""
    case, arrays = next_image.case("lumina-sjd", name)
    p, q, count = arrays["p"].double(), arrays["q"].double(), case["settings"]["top_n_sigma"]
    drafts, tokens = case["drafts"], []
    for slot, number in enumerate(case["uniforms"], start=1):
        token_id, target = drafts[slot], p[slot - 1]
        if number < float(target[token_id] / q[slot][token_id]):
            tokens.append(token_id)
            continue
        left = residual(target, q[slot])
        assert abs(float(left.sum()) - case["residual_mass"]) < 1e-5
        number = torch.tensor(case["redraw_uniform"], dtype=torch.float64)
        tokens.append(int(draw(redrawn_once_more(target, count), number)))
        assert tokens[-1] == case["redrawn"]
        break
    else:
        slot = len(drafts)
        tokens.append(case["fresh"][-1])
    assert len(tokens) == case["committed"]
    assert tokens + case["fresh"][len(tokens) :] == case["tokens"]

    distances = []
    for target, source in zip(p[:-1], q[1:], strict=True):
        accepted = target.minimum(source)
        rejected = 1 - accepted.sum() / source.sum()
        left = residual(target, source)
        torch.testing.assert_close(accepted + rejected * left / left.sum(), target, rtol=0, atol=1e-6)
        public = accepted + rejected * redrawn_once_more(target, count)
        distances.append(float((public - target).abs().sum() / 2))
    worst = int(np.argmax(distances))
    assert distances[worst] > 0.01
    # that slot, in draws
    rows, size = 20_000, p.shape[1]
    generator = torch.Generator().manual_seed(7)
    uniform = torch.rand(rows, 2, 3, generator=generator, dtype=torch.float64)
    target, source = p[worst] / p[worst].sum(), q[worst + 1] / q[worst + 1].sum()
    drafted = draw(source.expand(rows, -1), uniform[:, 0, 2]).unsqueeze(1).expand(-1, 2)
    distributions = source.expand(rows, 2, -1)
    window = DraftWindow(
        target.expand(rows, 2, -1),
        DraftDistributions(
            drafted, distributions, torch.zeros(rows, 2, dtype=torch.int64), torch.full((size,), 1 / size)
        ),
        draw(target.expand(rows, 2, -1), uniform[..., 2]),
    )
    has_draft = torch.tensor([[True, False]]).expand(rows, -1)
    found = verify(window, has_draft, window.ratio().clamp(max=1), uniform[..., :2])
    counts = np.bincount(found.tokens[:, 0].numpy(), minlength=size)
    assert exactness.p_value(counts, target.numpy()) > 1e-3
    if distances[worst] > 0.05:  # else these are too few draws to see it
        wrong = torch.where(
            uniform[:, 0, 0] < window.ratio()[:, 0], drafted[:, 0], draw(target.expand(rows, -1), uniform[:, 0, 1])
        )
        assert exactness.p_value(np.bincount(wrong.numpy(), minlength=size), target.numpy()) < 1e-6
