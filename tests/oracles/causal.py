"""Plain loops that decode with a causal module, and SJD-PAC's step in plain Python."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from paradec.models.adapter import Model
from paradec.models.images.grid import Grid


def greedy(
    module: Any, prompts: list[list[int]], new: int, scale: float = 1.0, negative: list[list[int]] | None = None
) -> list[list[int]]:
    """Decode `new` tokens greedily. scale: guidance scale. negative: prompts of the unconditional call."""
    answers = []
    for prompt, negative_prompt in zip(prompts, prompts if negative is None else negative, strict=True):
        ids: list[int] = []
        for _ in range(new):
            with torch.inference_mode():
                logits = module(torch.tensor([prompt + ids])).logits[0, -1]
                if scale != 1:
                    unconditional = module(torch.tensor([negative_prompt + ids])).logits[0, -1]
                    logits = unconditional + scale * (logits - unconditional)
            ids.append(int(logits.argmax()))
        answers.append(ids)
    return answers


def zipar_by_hand(module: LlamaForCausalLM, prompt: list[int], grid: Grid, window: int) -> tuple[list[int], int]:
    """Decode an image greedily with ZipAR, with one forward per token; return the tokens and the number of steps.

    A forward contains only the tokens known at its step. This is exact for modules of one layer, whose keys and
    values depend only on the token."""
    layout, first = grid.layout.tolist(), len(grid.head)
    known = dict(enumerate(layout[:first]))  # offset -> evaluated token
    proxies: dict[int, int] = {}  # offset of an undecided token -> a token of the row above in its place
    done, steps = [0] * grid.height, 0
    while done[-1] < grid.width:
        steps, before, tokens = steps + 1, list(done), {}
        for row in range(grid.height):
            if row and before[row - 1] < min(window, grid.width):
                break
            if before[row] == grid.width:
                continue
            cell = first + row * grid.stride + before[row]
            if row and not before[row]:
                if grid.row_end is not None:
                    known[cell - 1] = grid.row_end
                elif before[row - 1] < grid.width:
                    proxies[cell - 1] = known[cell - grid.width - 1 + before[row - 1]]
            done[row] += 1
            tokens[cell] = None
        for cell in tokens:
            visible = {offset: token_id for offset, token_id in (proxies | known).items() if offset < cell}
            order = sorted(visible)
            ids = torch.tensor([[*prompt, *(visible[offset] for offset in order)]])
            positions = torch.tensor([[*range(len(prompt)), *(len(prompt) + offset for offset in order)]])
            with torch.inference_mode():
                logits = module(ids, position_ids=positions).logits[0, -1]
            tokens[cell] = max(grid.image_ids, key=lambda token_id: float(logits[token_id]))
        known |= tokens
        for row in range(grid.height):
            if done[row] == grid.width and grid.row_end is not None:
                known[first + (row + 1) * grid.stride - 1] = grid.row_end
    return [known.get(offset, token_id) for offset, token_id in enumerate(layout)], steps


def token_by_token(model: Model, prompt: list[int], new: int, ends: tuple[int, ...]) -> list[int]:
    """Decode greedily up to `new` tokens or an end token, without a KV cache."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + new and (len(tokens) == len(prompt) or tokens[-1] not in ends):
            tokens.append(int(model.module(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def next_logits(model: Model, row: list[int]) -> torch.Tensor:
    """Return logits [vocabulary] of the token after `row`, with causal attention and without a KV cache.

    For an unshifted model, a mask token is appended, whose own logits are returned."""
    tokens = row if model.facts.prediction == "shifted" else [*row, model.facts.mask_id]
    causal = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).tril()
    arguments = {"attention_mask": causal, "position_ids": torch.arange(len(tokens))[None], "use_cache": False}
    with torch.no_grad():
        return model.module(input_ids=torch.tensor([tokens]), **arguments).logits[0, -1].clone()


def blocks_of_one(model: Model, row: list[int], new: int) -> list[int]:
    """Decode greedily in blocks of one token, without a KV cache."""
    tokens = list(row)
    for _ in range(new):
        logits = next_logits(model, tokens)
        logits[model.facts.mask_id] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(row) :]


def next_token(model: Model, row: list[int], ids: list[int], temperature: float) -> np.ndarray:
    """Return the distribution of the next token, restricted to `ids`; computed without a KV cache."""
    p: np.ndarray = (next_logits(model, row)[ids].double() / temperature).softmax(-1).numpy()
    return p


Weights = list[float]
Draw = Callable[[Weights, float], int]
Coin = Callable[[float, float], bool]


def draw(weights: Weights, number: float) -> int:
    """Return the index that a uniform number in [0, 1) selects."""
    return int((np.cumsum(weights) > number * sum(weights)).argmax())


def normalized(weights: Weights) -> Weights:
    return [weight / sum(weights) for weight in weights]


def residual_distribution(p: Weights, q: Weights) -> Weights:
    """Return the unnormalized residual max(p - q, 0), or p if that is zero."""
    residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return residual if sum(residual) > 0 else p


def sjd_pac_step(
    case: dict[str, Any], law: Callable[[tuple[int, ...]], Weights], draw: Draw, coin: Coin, last: bool
) -> Any:
    """Do one step of SJD-PAC; return the tokens that become final, and (first draft, q) of each remaining slot.

    Args:
        case: for a window of W slots, K drafts per branching slot and V tokens: "drafts" [W - 1][K or 1], "q"
            [W - 1][V], "branching" (number of slots with K drafts), uniform numbers "u" [W][K] and "v" [W], and
            optionally "end", which replaces "v" in the last slot of the chain of first drafts.
        law: returns p after a path of child indices. draw: returns an index drawn with these weights.
        coin: returns whether an event of this probability happens. draw and coin get a uniform number.
        last: whether a token drawn from the last slot becomes a draft of the next window.
    """
    width, branching, path, final = len(case["drafts"]) + 1, case["branching"], [], []
    end = case.get("end", case["v"][width - 1])
    for slot in range(width):
        p, chosen = law(tuple(path)), -1
        has_drafts = slot < width - 1 and (slot < branching or not any(path))
        q = case["q"][slot] if has_drafts else []
        for child, x in enumerate(case["drafts"][slot] if has_drafts else []):
            if x < 0:
                break
            if coin(min(1.0, p[x] / q[x]), case["u"][slot][child]):
                chosen = child
                break
            p = normalized(residual_distribution(p, q))
            remaining = [0.0 if token == x else weight for token, weight in enumerate(q)]
            q = normalized(remaining) if sum(remaining) > 0 else q
        if chosen < 0:
            chain = slot >= branching and not any(path)
            final.append(draw(p, end if slot == width - 1 and chain else case["v"][slot]))
            break
        final.append(case["drafts"][slot][chosen])
        path.append(chosen)
    next_drafts = []
    for slot in range(len(final), width if last else width - 1):
        p = law(tuple((path + [0] * slot)[:slot]) if slot < branching else (0,) * slot)
        if slot == width - 1:
            next_drafts.append((draw(p, end), p))
            continue
        x, q = case["drafts"][slot][0], case["q"][slot]
        accepted = coin(min(1.0, p[x] / q[x]), case["u"][slot][0])
        next_drafts.append((x if accepted else draw(residual_distribution(p, q), case["v"][slot]), p))
    return final, next_drafts


def siblings_of(q: Weights, first: int, draw: Draw, numbers: Weights) -> list[int]:
    """Return a slot's drafts: `first`, and a sibling per number, drawn without replacement (-1: q is exhausted)."""
    drafts, q = [first], [*q]
    for number in numbers:
        q[drafts[-1]] = 0.0
        if sum(q) <= 0:
            return drafts + [-1] * (len(numbers) + 1 - len(drafts))
        drafts.append(draw(q, number))
    return drafts


def toss(chance: float, number: float) -> bool:
    return number < chance


def outcomes(act: Callable[[Draw, Coin], Any]) -> list[tuple[float, Any]]:
    """Return all (probability, result) pairs of a function that makes random choices, by enumerating the choices."""
    results, pending = [], [((), 1.0)]
    while pending:
        choices, chance = pending.pop()
        fixed_choices, branches = iter(choices), []

        def choose(weights: Weights, fixed_choices: Any = fixed_choices, branches: Weights = branches) -> int:
            if branches:
                return 0
            if (choice := next(fixed_choices, None)) is not None:
                return choice
            branches.extend(weights)
            return 0

        result = act(
            lambda weights, _, choose=choose: choose(normalized(weights)),
            lambda p, _, choose=choose: choose([1 - p, p]) == 1,
        )
        if not branches:
            results.append((chance, result))
        pending += [((*choices, index), chance * weight) for index, weight in enumerate(branches) if weight > 0]
    return results
