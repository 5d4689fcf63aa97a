"""Sums and maxima over all texts of an automaton, in time proportional to its edges.

A step's distribution is a product of one distribution p_i for each of n slots, conditioned on the language. Let a_i(q)
be the forward sum over paths from `first` to a state q, and b_i(q) the backward sum over paths from q to acceptance.
The probability of token v in slot i is then

    r_i(v) = p_i(v) g_i(v) / Z,    g_i(v) = sum over q of a_i(q) b_{i+1}(next state of q after v),    Z = b_0(first).

g depends only on the class of a token. All sums are computed with logarithms, in float64.

Shapes: `n` slots, `C` classes, `S` states. `first` is the state before the first slot. `last` has the allowed states:
[S] bool after the last slot, or [n + 1, S] bool before each slot and after the last one. The distribution of a decided
slot is `certain`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paradec.constraints.automaton import KeyGroups, TokenAutomaton

LOG_ZERO = -np.inf
LOWEST = np.finfo(np.float64).min


def certain(automaton: TokenAutomaton, token: int) -> np.ndarray:
    """[C] float64: log-masses of the classes in a slot whose decided token is `token`."""
    masses = np.full(automaton.classes, LOG_ZERO)
    if (index := automaton.class_of[token]) >= 0:
        masses[index] = 0
    return masses


def logsumexp(ordered: np.ndarray, group: KeyGroups, size: int) -> np.ndarray:
    """Log-sum-exp [..., size] float64 of the entries of each key; `ordered` [..., E], sorted by key, is overwritten."""
    top = np.maximum.reduceat(ordered, group.starts, axis=-1)
    np.maximum(top, LOWEST, out=top)
    ordered -= top.take(group.owner, axis=-1)
    sums = np.add.reduceat(np.exp(ordered, out=ordered), group.starts, axis=-1)
    return _scatter(np.log(sums, out=sums) + top, group, size)


def maximum(ordered: np.ndarray, group: KeyGroups, size: int) -> np.ndarray:
    """Maximum [..., size] float64 of the entries of each key; arguments as for `logsumexp`."""
    return _scatter(np.maximum.reduceat(ordered, group.starts, axis=-1), group, size)


def _scatter(values: np.ndarray, group: KeyGroups, size: int) -> np.ndarray:
    if values.shape[-1] == size:
        return values
    scattered = np.full((*values.shape[:-1], size), LOG_ZERO)
    scattered[..., group.keys] = values
    return scattered


Sums = Callable[[np.ndarray, KeyGroups, int], np.ndarray]


def backward_sums(
    automaton: TokenAutomaton, masses: np.ndarray, last: np.ndarray, reduce: Sums = logsumexp
) -> np.ndarray:
    """Compute ln b [n + 1, S] float64. reduce: `logsumexp`, or `maximum` for the likeliest text."""
    _, index, target = np.ascontiguousarray(automaton.edges.T)  # in the order of `by_state`
    backward = np.full((len(masses) + 1, automaton.states), LOG_ZERO)
    backward[-1, np.atleast_2d(last)[-1]] = 0
    with np.errstate(divide="ignore"):
        for slot in range(len(masses) - 1, -1, -1):
            values = masses[slot].take(index)
            values += backward[slot + 1].take(target)
            backward[slot] = reduce(values, automaton.by_state, automaton.states)
            if last.ndim > 1:
                backward[slot, ~last[slot]] = LOG_ZERO
    return backward


def condition(
    automaton: TokenAutomaton, masses: np.ndarray, first: int, last: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Compute ln Z, ln(g / Z) [n, C] and ln b [n + 1, S]. masses: [n, C] float64, the classes' log-probabilities."""
    backward = backward_sums(automaton, masses, last)
    total = float(backward[0, first])
    if total == LOG_ZERO:
        return total, np.full((len(masses), automaton.classes), LOG_ZERO), backward
    by_class, by_next, edges = automaton.by_class, automaton.by_next, np.ascontiguousarray(automaton.edges.T)
    (source, _, target), (previous, index, _) = edges[:, by_class.order], edges[:, by_next.order]
    forward = np.full(automaton.states, LOG_ZERO)
    forward[first] = -total  # divides the result by Z
    log_g = np.empty((len(masses), automaton.classes))
    with np.errstate(divide="ignore"):
        for slot in range(len(masses)):
            values = forward.take(source)
            values += backward[slot + 1].take(target)
            log_g[slot] = logsumexp(values, by_class, automaton.classes)
            values = forward.take(previous)
            values += masses[slot].take(index)
            forward = logsumexp(values, by_next, automaton.states)
            if last.ndim > 1:
                forward[~last[slot + 1]] = LOG_ZERO
    return total, log_g, backward


def best(
    automaton: TokenAutomaton, tops: np.ndarray, likeliest: Callable[[int, int], int], first: int, last: np.ndarray
) -> list[int]:
    """Find the likeliest text [n]; ties are resolved from the left, by the lowest id.

    Args:
        tops: [n, C] float64: log-probability of the likeliest token of each class in each slot.
        likeliest: called with a slot and a class; returns the class's likeliest token, the lowest id of equal ones.
    """
    backward, state, tokens = backward_sums(automaton, tops, last, maximum), first, []
    for slot in range(len(tops)):
        classes, following = automaton.transitions(state)
        values = tops[slot, classes] + backward[slot + 1, following]
        ties = np.flatnonzero(values == values.max()).tolist()
        token, edge = min((likeliest(slot, int(classes[edge])), edge) for edge in ties)
        tokens.append(token)
        state = int(following[edge])
    return tokens


def sample(
    automaton: TokenAutomaton,
    sums: Callable[[int], np.ndarray],
    logs: Callable[[int, np.ndarray], np.ndarray],
    backward: np.ndarray,
    fixed: list[int | None],
    first: int,
    uniform: list[float],
) -> list[int]:
    """Draw one text [n] from the product of the slots' distributions, conditioned on the language.

    Slots are drawn from the left, with weights p_i(v) b_{i+1}(next state): the token is the first, in order of ids,
    whose running sum exceeds `uniform[i]` times the total. First a stretch of ids is chosen, then a token in it.

    Args:
        sums: called with a slot; returns the log-probabilities of the runs [P] (`Runs`), up to a constant of the slot.
        logs: called with a slot and ids [k]; returns the log-probabilities of these tokens, up to the same constant.
        backward: [n + 1, S]: ln b, from `condition`.
        fixed: the tokens of decided slots, None for undecided ones.
    """
    state, tokens, runs = first, [], automaton.runs
    for slot, token in enumerate(fixed):
        if token is None:
            classes, following = automaton.transitions(state)
            weight = np.full(automaton.classes, LOG_ZERO)
            weight[classes] = backward[slot + 1, following]
            shares = sums(slot) + weight.take(runs.classes)
            top = shares.max()
            running = np.add.reduceat(np.exp(shares - top), runs.stretches[:-1]).cumsum()
            goal = uniform[slot] * running[-1]
            stretch = _first_above(running, goal)
            ids = np.sort(runs.tokens[slice(*runs.begins[runs.stretches[stretch : stretch + 2]])])
            inside = np.exp(logs(slot, ids) + weight.take(automaton.class_of[ids]) - top).cumsum()
            token = int(ids[_first_above(inside, goal - (running[stretch - 1] if stretch else 0.0))])
        tokens.append(token)
        state = automaton.step(state, token)
    return tokens


def _first_above(running: np.ndarray, goal: float) -> int:
    """Find the index of the first running sum [k] above `goal`; if rounding leaves none, of the first largest sum."""
    return min(int(np.searchsorted(running, goal, side="right")), int(np.searchsorted(running, running[-1])))


# ---- sets of reachable states, without probabilities -----------------------------------------------------------------


def completions(automaton: TokenAutomaton, tokens: list[int | None], last: np.ndarray) -> np.ndarray:
    """[n + 1, S] bool: states before slot i from which slots i to n - 1 can be filled. tokens: [n]; None: undecided."""
    source, index, target = automaton.edges.T
    reachable = np.zeros((len(tokens) + 1, automaton.states), bool)
    reachable[-1] = np.atleast_2d(last)[-1]
    for slot in range(len(tokens) - 1, -1, -1):
        live = reachable[slot + 1, target]
        if (token := tokens[slot]) is not None:
            live = live & (index == automaton.class_of[token])
        reachable[slot, source[live]] = True
        if last.ndim > 1:
            reachable[slot] &= last[slot]
    return reachable


def possible_classes(automaton: TokenAutomaton, tokens: list[int | None], first: int, last: np.ndarray) -> np.ndarray:
    """[n, C] bool: whether a token of a class fits into a slot, given `tokens` [n] (None: undecided)."""
    source, index, target = automaton.edges.T
    completable = completions(automaton, tokens, last)
    allowed, states = np.zeros((len(tokens), automaton.classes), bool), np.zeros(automaton.states, bool)
    states[first] = True
    for slot, token in enumerate(tokens):
        live = states[source] & completable[slot + 1, target]
        if token is not None:
            live &= index == automaton.class_of[token]
        allowed[slot, index[live]] = True
        states = np.zeros(automaton.states, bool)
        states[target[live]] = True
    return allowed


def lengths(automaton: TokenAutomaton, max_length: int) -> np.ndarray:
    """[max_length + 1] bool: whether the language has a text of 0, 1, ... tokens."""
    reachable = np.zeros(max_length + 1, bool)
    if not automaton.states:
        return reachable
    source, _, target = automaton.edges.T
    states = np.arange(automaton.states) == 0
    for count in range(max_length + 1):
        reachable[count] = states[automaton.accept].any()
        next_states = np.zeros_like(states)
        next_states[target[states[source]]] = True
        states = next_states
    return reachable
