"""The tree of prefixes alone, beside a dictionary of all beginnings."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paradec.caches.prefix_tree import Layers, PrefixTree

BLOCK = 3
ROW = 2 * 2 * 4  # bytes of a token: keys and values of two float32 each


def layers(tokens: list[int], salt: int = 0) -> Layers:
    """Keys and values that say which tokens are before them."""
    sums = [hash((salt, *tokens[: at + 1])) % 1000 for at in range(len(tokens))]
    values = torch.tensor(sums, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    return {0: (values, -values)}


WORDS = st.lists(st.integers(0, 1), max_size=14)


@given(
    st.lists(st.tuples(st.sampled_from(("add", "find", "clear")), WORDS, st.integers(0, 1)), max_size=40),
    st.integers(0, 12),
)
def test_it_is_a_dictionary_of_beginnings_that_forgets_the_oldest(
    calls: list[tuple[str, list[int], int]], most: int
) -> None:
    tree, budget = PrefixTree(BLOCK, most * BLOCK * ROW), most
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # beginnings of whole blocks, and when they were used
    clock = 0

    def path(tokens: list[int], salt: int) -> list[tuple[int, tuple[int, ...]]]:
        found = [(salt, tuple(tokens[:at])) for at in range(BLOCK, len(tokens) + 1, BLOCK)]
        return found[: next((at for at, each in enumerate(found) if each not in known), len(found))]

    for what, tokens, salt in calls:
        if what == "clear":
            tree.clear()
            known.clear()
            continue
        before = len(path(tokens, salt)) * BLOCK
        assert tree.count(tokens, salt) == before
        if what == "find":
            count, found = tree.find(tokens, salt)
            assert count == before
            for layer, (keys, values) in found.items():
                expected = layers(tokens, salt)[layer]
                assert torch.equal(keys, expected[0][:count]) and torch.equal(values, expected[1][:count])
        else:
            whole = len(tokens) // BLOCK * BLOCK
            own = {at: (k[before:], v[before:]) for at, (k, v) in layers(tokens, salt).items()}
            assert tree.add(tokens, own, before, salt) == max(min(whole, budget * BLOCK) - before, 0)
            known |= {(salt, tuple(tokens[:at])): 0 for at in range(BLOCK, whole + 1, BLOCK) if at > before}
        for each in reversed(path(tokens, salt)):
            clock += 1
            known[each] = clock
        while len(known) > budget:
            leaves = [
                (s, t) for s, t in known if not any(o == s and len(u) > len(t) and u[: len(t)] == t for o, u in known)
            ]
            del known[min(leaves, key=known.__getitem__)]
        assert len(tree) == len(known) * BLOCK and tree.nbytes == len(known) * BLOCK * ROW


def test_what_is_not_finite_is_not_kept() -> None:
    tree = PrefixTree(BLOCK, 10_000)
    keys = torch.zeros(9, 1, 2)
    keys[4, 0, 1] = float("nan")
    assert tree.add([1] * 9, {0: (keys, torch.zeros(9, 1, 2))}) == BLOCK and len(tree) == BLOCK
