"""Stop sequences in text that arrives in pieces."""

from hypothesis import example, given
from hypothesis import strategies as st

from paradec.integrations.server.chat import StopCutter


@example(["a", "b"], ["ab"])
@example(["abb"], ["abb", "b"])
@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_in_pieces_is_cut_where_the_full_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    cutter, output = StopCutter(stops), ""
    full = "".join(pieces)
    # The stop sequence that ends first counts. If several end at the same letter, the longest counts.
    prefixes = (full[: count + 1] for count in range(len(full)))
    stopped = next((text for text in prefixes if any(text.endswith(stop) for stop in stops)), None)
    expected = full if stopped is None else stopped[: -max(len(stop) for stop in stops if stopped.endswith(stop))]
    for piece in pieces:
        output += cutter.feed(piece)
        assert expected.startswith(output)
    assert output + cutter.feed("", is_last=True) == expected == StopCutter(stops).feed(full, is_last=True)


def test_text_is_delayed_only_for_possible_stops() -> None:
    cutter, pieces = StopCutter(["END"]), ("one ", "E", "NX", "EEN", "D two", "END")
    assert [cutter.feed(piece) for piece in pieces] == ["one ", "", "ENX", "E", "", ""]
    assert cutter.feed("", is_last=True) == "" and cutter.is_over
