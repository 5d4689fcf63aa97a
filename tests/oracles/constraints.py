"""Decoding under a constraint: the next position and the distribution of texts, by enumeration."""

import math
from typing import Any

from structured import Canvas, automaton_of, distribution, model_of, softmax

from paradec.constraints import passes


def surest(case: dict[str, Any], canvas: Canvas) -> int:
    """Return the first undecided slot whose most likely token has the largest probability under the constraint."""
    probabilities, _ = distribution(automaton_of(case), softmax(model_of(case).module.canvas_logits(canvas)), canvas)
    best = {}
    for slot in [slot for slot, token in enumerate(canvas) if token is None]:
        marginal: dict[int, float] = {}
        for text, mass in probabilities.items():
            marginal[text[slot]] = marginal.get(text[slot], 0.0) + mass
        best[slot] = max(marginal.values())
    return max(best, key=lambda slot: (best[slot], -slot))


def masked_law(case: dict[str, Any], where: Any, canvas: Canvas) -> dict[tuple[int, ...], float]:
    """Return the distribution of texts that are decoded token by token.

    Tokens after which no completion is allowed are excluded. where: maps a canvas to the slot to decode next."""
    if None not in canvas:
        return {tuple(canvas): 1.0}
    automaton, slot, masses = automaton_of(case), where(canvas), dict[tuple[int, ...], float]()
    p = softmax(model_of(case).module.canvas_logits(canvas))[slot]
    trials = {token: [*canvas[:slot], token, *canvas[slot + 1 :]] for token in range(len(case["vocab"]))}
    allowed = [token for token, t in trials.items() if passes.completions(automaton, t, automaton.accept)[0, 0]]
    for token in allowed:
        for text, mass in masked_law(case, where, trials[token]).items():
            masses[text] = mass * p[token] / math.fsum(p[allowed_token] for allowed_token in allowed)
    return masses
