"""Stop sequences in pieces of text."""

from hypothesis import example, given
from hypothesis import strategies as st

from paradec.integrations.server.chat import StopCutter


@example(["a", "b"], ["ab"])
@example(["abb"], ["abb", "b"])
@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_are_cut_like_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    cut, given_out = StopCutter(stops), ""
    full = "".join(pieces)
    # letter by letter: the stop sequence that is complete first ends it, the longest of those complete at once
    read = (full[: count + 1] for count in range(len(full)))
    ended = next((text for text in read if any(text.endswith(stop) for stop in stops)), None)
    expected = full if ended is None else ended[: -max(len(stop) for stop in stops if ended.endswith(stop))]
    for piece in pieces:
        given_out += cut.feed(piece)
        assert expected.startswith(given_out)  # nothing is taken back
    assert given_out + cut.feed("", is_last=True) == expected == StopCutter(stops).feed(full, is_last=True)


def test_text_is_delayed_only_for_possible_stops() -> None:
    cut = StopCutter(["END"])
    assert [cut.feed(piece) for piece in ("one ", "E", "NX", "EEN", "D two", "END")] == ["one ", "", "ENX", "E", "", ""]
    assert cut.feed("", is_last=True) == "" and cut.is_over
