"""First Finish Search: the first of several copies to end, and what all of them cost."""

from __future__ import annotations

from typing import Any

import pytest

import paradec
from paradec.models.adapter import Model

PROMPT = [38, 0, 1, 2, 3, 4, 5, 6, 41]
REQUEST = {"max_new_tokens": 32, "block_length": 8, "temperature": 2.0}


@pytest.mark.thinned
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cache", [None, "dual"])
def test_the_first_to_end(llada64: Model, seed: int, cache: str | None) -> None:
    """The copy that takes the fewest steps when all are decoded to their end, the lowest of several."""
    request = REQUEST | {"seed": seed, "cache": cache}
    race = paradec.generate(llada64, PROMPT, race=5, trace=True, **request)
    everyone = paradec.generate(llada64, PROMPT, num_return_sequences=5, trace=True, **request)
    steps = everyone.row_nfe
    winner = steps.index(min(steps))
    assert race.race_winner == winner and len(set(steps)) > 1
    assert race.sequences.tolist() == everyone.sequences[winner : winner + 1].tolist()
    assert race.new_tokens.tolist() == everyone.new_tokens[winner : winner + 1].tolist()
    assert race.filled.shape == race.attention_mask.shape == race.sequences.shape
    assert (race.row_nfe, race.tokens, race.finished) == (
        [steps[winner]],
        [everyone.tokens[winner]],
        [everyone.finished[winner]],
    )
    # all copies ran as long as the winner did
    assert race.nfe == steps[winner] and race.row_forwards == 5 * steps[winner]
    assert race.forwarded_tokens == sum(sum(step.forwarded) for step in everyone.trace.steps[: steps[winner]])
    assert len(race.cost.forwarded_tokens) == 5 and sum(race.cost.forwarded_tokens) == race.forwarded_tokens
    assert [step.commits for step in race.trace.steps] == [step.commits for step in everyone.trace.steps[: race.nfe]]
    again = paradec.generate(llada64, PROMPT, race=5, **request)
    assert again.sequences.tolist() == race.sequences.tolist() and again.race_winner == winner


def test_a_race_of_one_is_the_request(llada64: Model) -> None:
    alone = paradec.generate(llada64, PROMPT, seed=3, **REQUEST)
    race = paradec.generate(llada64, PROMPT, seed=3, race=1, **REQUEST)
    assert alone.sequences.tolist() == race.sequences.tolist() and alone.row_forwards == race.row_forwards
    assert alone.race_winner is None and race.race_winner == 0


def test_text_and_fills_are_those_of_one_prompt() -> None:
    model = paradec.load()
    out = paradec.generate(model, "Shuffle: pear fig apple kiwi", race=2, temperature=1.0, seed=0, block_length=8)
    assert isinstance(out.text, str) and set(out.text.split()) <= {"pear", "fig", "apple", "kiwi"}
    filled = paradec.infill(model, "apple <mask> <mask>", race=2, temperature=5.0, seed=0)
    assert isinstance(filled.text, str) and len(filled.fills) == 1 and isinstance(filled.fills[0], str)


def test_a_tie_goes_to_the_lowest_copy(llada64: Model) -> None:
    with pytest.warns(UserWarning, match="race=3 ran equal copies"):
        out = paradec.generate(llada64, PROMPT, race=3, max_new_tokens=8)
    assert out.race_winner == 0


def test_callback_and_interrupt(llada64: Model) -> None:
    seen = []

    def stop(state: Any, commit: Any) -> bool:
        seen.append(state.batch)
        return len(seen) == 2

    out = paradec.generate(llada64, PROMPT, race=3, seed=0, callback=stop, **REQUEST)
    assert seen == [3, 3] and out.nfe == 2 and out.row_forwards == 6 and len(out.sequences) == 1

    def interrupt(state: Any, commit: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paradec.generate(llada64, PROMPT, race=3, seed=0, callback=interrupt, **REQUEST)
    assert len(caught.value.output.sequences) == 1 and caught.value.output.row_forwards == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"race": 0}, "race=0 must be an integer from 1 to 1000000"),
        ({"race": True}, "race=True"),
        ({"race": 2, "prompt": [PROMPT, PROMPT]}, "race=2 takes one prompt; this request has 2"),
        ({"race": 2, "num_return_sequences": 2}, "race=2 returns one answer; num_return_sequences=2"),
        ({"race": 2, "streamer": object()}, "race=2 .* streamer has to be None"),
    ],
)
def test_refusals(llada64: Model, arguments: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        paradec.generate(llada64, **{"prompt": PROMPT} | arguments)
