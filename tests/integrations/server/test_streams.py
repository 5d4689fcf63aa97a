"""Text from ids, and stop sequences in pieces of text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import serving  # noqa: F401 - skips all where the server was not tried
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import paradec
from paradec.integrations.server.streams import Cut, TextStream, cut_off


@example(["a", "b"], ["ab"])
@example(["abb"], ["abb", "b"])
@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_cut_is_that_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    cut, given_out = Cut(stops), ""
    whole = "".join(pieces)
    # letter by letter: the stop sequence that is complete first ends it, the longest of those complete at once
    read = (whole[: count + 1] for count in range(len(whole)))
    ended = next((text for text in read if any(text.endswith(stop) for stop in stops)), None)
    expected = whole if ended is None else ended[: -max(len(stop) for stop in stops if ended.endswith(stop))]
    for piece in pieces:
        given_out += cut.feed(piece)
        assert expected.startswith(given_out)  # nothing is taken back
    assert given_out + cut.rest() == expected == cut_off(whole, stops)


def test_nothing_is_held_back_without_need() -> None:
    cut = Cut(["END"])
    assert [cut.feed(piece) for piece in ("one ", "E", "NX", "EEN", "D two", "END")] == ["one ", "", "ENX", "E", "", ""]
    assert cut.rest() == "" and cut.over


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return paradec.load().tokenizer


def read(stream: TextStream) -> list[Any]:
    found = []
    while not stream.queue.empty():
        found.append(stream.queue.get_nowait())
    return found


def test_a_stream_gives_the_text_of_its_ids(tokenizer: Any) -> None:
    ids = tokenizer("kiwi apple fig", add_special_tokens=False)["input_ids"]

    async def run() -> None:
        first: list[int] = []
        stream = TextStream(tokenizer, on_first=lambda: first.append(1))
        stream.put(torch.tensor([[5, 6, 7]]))  # the prompt
        assert read(stream) == [] and first == [] and stream.total_tokens == 0
        stream.put(torch.tensor([ids[:1]]))
        stream.put(torch.tensor([[*ids[1:], tokenizer.eos_token_id]]))
        stream.end()
        assert stream.total_tokens == 4 and first == [1]
        stream.finish("kiwi apple fig!")  # what a decoder had held back
        assert read(stream) == ["kiwi", " apple fig", "!", None]

    asyncio.run(run())


def test_drafts_wait_for_their_reader(tokenizer: Any) -> None:
    mask = tokenizer.convert_tokens_to_ids("[MASK]") if tokenizer.mask_token_id is None else tokenizer.mask_token_id

    async def run() -> None:
        assert not hasattr(TextStream(tokenizer), "put_draft")
        stream = TextStream(tokenizer, mask=mask)
        for _ in range(9):
            stream.put_draft(torch.tensor([[mask, *tokenizer("fig", add_special_tokens=False)["input_ids"]]]))
        assert [str(draft) for draft in read(stream)] == ['{"draft": [null, "fig"]}'] * 4

    asyncio.run(run())
