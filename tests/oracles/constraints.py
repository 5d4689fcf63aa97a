"""Orders and distributions of decoding under a constraint, by enumeration."""

import math
from typing import Any

from structured import Canvas, automaton_of, distribution, model_of, softmax

from paradec.constraints import passes


def surest(case: dict[str, Any], canvas: Canvas) -> int:
    nu, _ = distribution(automaton_of(case), softmax(model_of(case).module.of(canvas)), canvas)
    best = {}
    for at in [at for at, token in enumerate(canvas) if token is None]:
        of_tokens: dict[int, float] = {}
        for text, mass in nu.items():
            of_tokens[text[at]] = of_tokens.get(text[at], 0.0) + mass
        best[at] = max(of_tokens.values())
    return max(best, key=lambda at: (best[at], -at))


def masked_law(case: dict[str, Any], where: Any, canvas: Canvas) -> dict[tuple[int, ...], float]:
    """Token by token in an order, each from the model's distribution without what no completion has."""
    if None not in canvas:
        return {tuple(canvas): 1.0}
    automaton, at, masses = automaton_of(case), where(canvas), dict[tuple[int, ...], float]()
    p = softmax(model_of(case).module.of(canvas))[at]
    trials = {token: [*canvas[:at], token, *canvas[at + 1 :]] for token in range(len(case["vocab"]))}
    fits = [token for token, t in trials.items() if passes.completions(automaton, t, automaton.accept)[0, 0]]
    for token in fits:
        for text, mass in masked_law(case, where, trials[token]).items():
            masses[text] = mass * p[token] / math.fsum(p[other] for other in fits)
    return masses
