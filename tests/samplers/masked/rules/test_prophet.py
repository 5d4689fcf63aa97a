"""Prophet's early stop: thresholds on the gap of the two largest logits, the compared positions, refused samplers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import topology_of
from oracles.masked import logits_of, prophet
from small_models import tiny

import paradec
from paradec import samplers
from paradec.models.adapter import Model

PROMPTS = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [1, 2]]
NEVER = paradec.Prophet(gaps=(1e6, 1e6, 1e6))
AT_ONCE = paradec.Prophet(gaps=(0, 0, 0))
NEW = 16


def decode(model: Model, prompts: Any, **request: Any) -> paradec.Output:
    request = {"sampler": "low_confidence", "max_new_tokens": NEW, "block_length": 4, "eos_early_stop": False} | request
    return paradec.generate(model, prompts, trace=True, **request)


@pytest.mark.thinned
@pytest.mark.parametrize("answer", [None, range(2, 7)])
@pytest.mark.parametrize("gaps", [(7.3, 8.5, 9.2), (6.7, 4.6, 5.3)])
@pytest.mark.parametrize("name", ["llada64", "dream64"])
def test_prophet_equals_the_oracle(request: Any, name: str, gaps: tuple, answer: range | None) -> None:
    model = request.getfixturevalue(name)
    out = decode(model, PROMPTS, stop=paradec.Prophet(gaps=gaps, answer=answer))
    expected = [prophet(model, prompt, gaps, answer, NEW) for prompt in PROMPTS]
    assert out.new_tokens.tolist() == [tokens for tokens, _ in expected]
    assert out.row_nfe == [nfe for _, nfe in expected]


def test_a_gap_equal_to_the_threshold_is_enough() -> None:
    class ConstantGap(torch.nn.Module):
        config = SimpleNamespace(vocab_size=10)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*ids.shape, 10, dtype=torch.float64)
            logits[..., 3] = 2.5
            return logits

    model = paradec.wrap(ConstantGap(), prediction="same", topology="bidirectional", mask_token_id=9)
    for threshold, nfe in ((2.5, 1), (2.5 + 2**-40, NEW)):
        assert decode(model, [[1]], stop=paradec.Prophet(gaps=(threshold,) * 3)).row_nfe == [nfe]


MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
NEEDS = {name: samplers.get(name).needs for name in MASKED}
REFUSED = [name for name, needs in NEEDS.items() if needs.multi_step or needs.mask_probes]


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("sampler", "cache"),
    [(n, ("none", "dual")[i % 2]) for i, n in enumerate(MASKED) if n not in REFUSED and not NEEDS[n].topologies],
)
def test_an_unreachable_threshold_changes_nothing(llada64: Model, sampler: str, cache: str) -> None:
    request = {
        "sampler": sampler, "cache": cache, "max_new_tokens": 8, "seed": 1, "temperature": 0.5, "eos_early_stop": True,
    }  # fmt: skip
    plain, with_rule = (decode(llada64, PROMPTS, stop=stop, **request) for stop in (None, NEVER))
    assert plain.new_tokens.tolist() == with_rule.new_tokens.tolist() and plain.row_nfe == with_rule.row_nfe
    assert plain.forwarded_tokens == with_rule.forwarded_tokens


def test_a_threshold_of_zero_commits_everything_at_once(llada64: Model) -> None:
    out = decode(llada64, PROMPTS, stop=AT_ONCE)
    assert out.row_nfe == [1, 1, 1]
    for prompt, tokens in zip(PROMPTS, out.new_tokens.tolist(), strict=True):
        logits = logits_of(llada64, prompt + [llada64.facts.mask_token_id] * NEW)
        assert tokens == logits.argmax(-1)[len(prompt) :].tolist()


def test_an_end_token_still_ends_the_text(llada64: Model) -> None:
    end = llada64.facts.eos_token_ids[0]
    unstopped = decode(llada64, PROMPTS[0], stop=AT_ONCE).new_tokens[0].tolist()
    stopped = decode(llada64, PROMPTS[0], stop=AT_ONCE, eos_early_stop=True)
    assert end in unstopped[:-1] and stopped.finished == [True]
    assert stopped.tokens == [unstopped.index(end) + 1]
    assert stopped.new_tokens[0].tolist()[: stopped.tokens[0]] == unstopped[: stopped.tokens[0]]


def test_prophet_works_with_adaptive_blocks(llada64: Model) -> None:
    blocks = paradec.AdaptiveBlocks(length=4, delimiters=(5, 17), delimiter_threshold=0.05, window=0.5)
    options: dict[str, Any] = {"block_length": None, "blocks": blocks}
    plain, with_rule = (decode(llada64, PROMPTS, stop=stop, **options) for stop in (None, NEVER))
    assert plain.new_tokens.tolist() == with_rule.new_tokens.tolist() and plain.row_nfe == with_rule.row_nfe
    assert decode(llada64, PROMPTS, block_length=None, blocks=blocks, stop=AT_ONCE).row_nfe == [1, 1, 1]


def test_prophet_stops_only_in_steps_that_evaluate_the_full_row(llada64: Model) -> None:
    late = paradec.Prophet(gaps=(1e6, 0, 0))  # after a third of the steps, inside the second block
    out = decode(llada64, PROMPTS[0], cache="dual", stop=late)
    assert out.trace.steps[-1].kind == "full" and out.nfe == 9
    assert decode(llada64, PROMPTS[0], stop=late).nfe == 7


def test_a_function_can_locate_the_answer(llada64: Model) -> None:
    calls = []

    def answer(ids: np.ndarray, start: int) -> range | None:
        calls.append((len(ids), start, int((ids == llada64.facts.mask_token_id).sum())))
        return None if calls[-1][2] > NEW - 3 else range(2)

    out = decode(llada64, PROMPTS[2], stop=paradec.Prophet(gaps=(0, 0, 0), answer=answer))
    assert calls == [(2 + NEW, 2, NEW - step) for step in range(4)] and out.nfe == 4
    beyond = paradec.Prophet(gaps=(0, 0, 0), answer=[NEW])
    assert decode(llada64, PROMPTS[2], stop=beyond).nfe == NEW


def test_a_custom_stopping_rule(llada64: Model) -> None:
    def at_five(state: Any, tokens: np.ndarray) -> np.ndarray | None:
        decided = state.decided[state.window.rows] >= 5
        return np.where(decided, state.prompt_length[state.window.rows] + 4, np.iinfo(np.int64).max)

    out = decode(llada64, PROMPTS, stop=[at_five, NEVER])
    assert out.row_nfe == [5, 5, 5] and out.tokens == [4, 4, 4]


def test_unsupported_samplers_are_refused(llada64: Model) -> None:
    assert REFUSED
    for name in REFUSED:
        model = llada64 if topology_of(name) == "bidirectional" else tiny(2, topology_of(name))
        with pytest.raises(ValueError, match=f"'{name}' does not work with stop=Prophet"):
            decode(model, [[1, 2]], sampler=name, stop=NEVER)
