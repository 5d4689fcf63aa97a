"""Sums and maxima over all texts of an automaton, in time proportional to its edges.

A step's distribution is a product of one distribution p_i for each of n slots, conditioned on the language: with the
forward sums a_i(q) over what leads to a state and the backward sums b_i(q) over what leads from it to acceptance,

    r_i(v) = p_i(v) g_i(v) / Z,    g_i(v) = sum over q of a_i(q) b_{i+1}(next state of q after v),    Z = b_0(first).

g depends on the class of a token alone. All sums are of logarithms, in float64: no product is too small for a number.

Shapes: `n` slots, `C` classes, `S` states. `first` is the state before the first slot, `last` [S] bool the states that
the last slot may lead to. What is decided is certain (`certain`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paradec.constraints.automaton import Grouped, TokenAutomaton

NOTHING = -np.inf
LEAST = np.finfo(np.float64).min


def certain(automaton: TokenAutomaton, token: int) -> np.ndarray:
    """[C] float64: the logarithms of the masses of a slot that holds a token."""
    found = np.full(automaton.classes, NOTHING)
    if (index := automaton.class_of[token]) >= 0:
        found[index] = 0
    return found


def summed(ordered: np.ndarray, group: Grouped, size: int) -> np.ndarray:
    """Log-sum-exp [..., size] float64 of the entries of each key; `ordered` [..., E], by key, is overwritten."""
    top = np.maximum.reduceat(ordered, group.starts, axis=-1)
    np.maximum(top, LEAST, out=top)
    ordered -= top.take(group.owner, axis=-1)
    sums = np.add.reduceat(np.exp(ordered, out=ordered), group.starts, axis=-1)
    return _placed(np.log(sums, out=sums) + top, group, size)


def highest(ordered: np.ndarray, group: Grouped, size: int) -> np.ndarray:
    """The largest of the entries of each key, [..., size] float64; as for `summed`."""
    return _placed(np.maximum.reduceat(ordered, group.starts, axis=-1), group, size)


def _placed(values: np.ndarray, group: Grouped, size: int) -> np.ndarray:
    if values.shape[-1] == size:
        return values
    found = np.full((*values.shape[:-1], size), NOTHING)
    found[..., group.keys] = values
    return found


Sums = Callable[[np.ndarray, Grouped, int], np.ndarray]


def ahead(automaton: TokenAutomaton, masses: np.ndarray, last: np.ndarray, among: Sums = summed) -> np.ndarray:
    """[n + 1, S] float64: b of every slot, and of the states after the last one. among: `summed`, or `highest` for the
    likeliest text instead."""
    _, index, target = np.ascontiguousarray(automaton.edges.T)  # in the order of `by_state`
    found = np.full((len(masses) + 1, automaton.states), NOTHING)
    found[-1, last] = 0
    with np.errstate(divide="ignore"):
        for slot in range(len(masses) - 1, -1, -1):
            values = masses[slot].take(index)
            values += found[slot + 1].take(target)
            found[slot] = among(values, automaton.by_state, automaton.states)
    return found


def conditioned(
    automaton: TokenAutomaton, masses: np.ndarray, first: int, last: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """ln Z, ln(g / Z) [n, C] and b [n + 1, S] (`ahead`), from log-probabilities of classes, masses [n, C] float64."""
    backward = ahead(automaton, masses, last)
    total = float(backward[0, first])
    if total == NOTHING:
        return total, np.full((len(masses), automaton.classes), NOTHING), backward
    by_class, by_next, edges = automaton.by_class, automaton.by_next, np.ascontiguousarray(automaton.edges.T)
    (source, _, target), (before, index, _) = edges[:, by_class.order], edges[:, by_next.order]
    forward = np.full(automaton.states, NOTHING)
    forward[first] = -total  # so that what is found is divided by Z
    found = np.empty((len(masses), automaton.classes))
    with np.errstate(divide="ignore"):
        for slot in range(len(masses)):
            values = forward.take(source)
            values += backward[slot + 1].take(target)
            found[slot] = summed(values, by_class, automaton.classes)
            values = forward.take(before)
            values += masses[slot].take(index)
            forward = summed(values, by_next, automaton.states)
    return total, found, backward


def best(
    automaton: TokenAutomaton, tops: np.ndarray, lowest: Callable[[int, int], int], first: int, last: np.ndarray
) -> list[int]:
    """The likeliest text [n]; of equally likely ones that with the lowest ids, from the left.

    Args:
        tops: [n, C] float64: the logarithm of the probability of the likeliest token of each class in each slot.
        lowest: called with a slot and a class: that token, the lowest of several.
    """
    backward, state, found = ahead(automaton, tops, last, highest), first, []
    for slot in range(len(tops)):
        classes, following = automaton.after(state)
        values = tops[slot, classes] + backward[slot + 1, following]
        best = np.flatnonzero(values == values.max()).tolist()
        token, at = min((lowest(slot, int(classes[at])), at) for at in best)
        found.append(token)
        state = int(following[at])
    return found


def drawn(
    automaton: TokenAutomaton,
    sums: Callable[[int], np.ndarray],
    logs: Callable[[int, np.ndarray], np.ndarray],
    backward: np.ndarray,
    fixed: list[int | None],
    first: int,
    uniform: list[float],
) -> list[int]:
    """Tokens [n] of one text, drawn from the product of the slots' distributions conditioned on the language.

    From the left, with weights p_i(v) b_{i+1}(next state): of tokens in ascending order the first whose running sum
    exceeds `uniform[i]` times the whole. Stretches of ids are looked at first, and the tokens of one alone.

    Args:
        sums: called with a slot: the logarithms of the probabilities of runs [P] (`Runs`), up to a constant of the
            slot. logs: called with a slot and ids [k]: those of tokens.
        backward: [n + 1, S]: the b of `conditioned`. fixed: what slots hold that are decided, or None.
    """
    state, found, runs = first, [], automaton.runs
    for slot, token in enumerate(fixed):
        if token is None:
            classes, following = automaton.after(state)
            weight = np.full(automaton.classes, NOTHING)
            weight[classes] = backward[slot + 1, following]
            shares = sums(slot) + weight.take(runs.classes)
            top = shares.max()
            running = np.add.reduceat(np.exp(shares - top), runs.stretches[:-1]).cumsum()
            goal = uniform[slot] * running[-1]
            at = _reaching(running, goal)
            ids = np.sort(runs.tokens[slice(*runs.begins[runs.stretches[at : at + 2]])])
            inside = np.exp(logs(slot, ids) + weight.take(automaton.class_of[ids]) - top).cumsum()
            token = int(ids[_reaching(inside, goal - (running[at - 1] if at else 0.0))])
        found.append(token)
        state = automaton.step(state, token)
    return found


def _reaching(running: np.ndarray, goal: float) -> int:
    """The first entry of running sums [k] that exceeds a number, the first of the largest where rounding keeps it
    from that."""
    return min(int(np.searchsorted(running, goal, side="right")), int(np.searchsorted(running, running[-1])))


# ---- what is possible at all: sets of states, whatever the probabilities ---------------------------------------------


def completions(automaton: TokenAutomaton, given: list[int | None], last: np.ndarray) -> np.ndarray:
    """States [n + 1, S] from which the slots can still be filled; `given` is the token of each slot, or None."""
    source, index, target = automaton.edges.T
    found = np.zeros((len(given) + 1, automaton.states), bool)
    found[-1] = last
    for slot in range(len(given) - 1, -1, -1):
        live = found[slot + 1, target]
        if (token := given[slot]) is not None:
            live = live & (index == automaton.class_of[token])
        found[slot, source[live]] = True
    return found


def possible(automaton: TokenAutomaton, held: list[int | None], first: int, last: np.ndarray) -> np.ndarray:
    """[n, C] bool: the classes of which a token fits in each slot, given what the slots hold."""
    source, index, target = automaton.edges.T
    after = completions(automaton, held, last)
    found, now = np.zeros((len(held), automaton.classes), bool), np.zeros(automaton.states, bool)
    now[first] = True
    for slot, token in enumerate(held):
        live = now[source] & after[slot + 1, target]
        if token is not None:
            live &= index == automaton.class_of[token]
        found[slot, index[live]] = True
        now = np.zeros(automaton.states, bool)
        now[target[live]] = True
    return found


def lengths(automaton: TokenAutomaton, most: int) -> np.ndarray:
    """[most + 1] bool: the numbers of tokens that some text has."""
    reachable = np.zeros(most + 1, bool)
    if not automaton.states:
        return reachable
    source, _, target = automaton.edges.T
    now = np.arange(automaton.states) == 0
    for count in range(most + 1):
        reachable[count] = now[automaton.accept].any()
        after = np.zeros_like(now)
        after[target[now[source]]] = True
        now = after
    return reachable
