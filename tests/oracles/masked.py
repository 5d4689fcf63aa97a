"""Samplers of masked models as plain loops over one row, without batches or a KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from decoding import INF
from small_models import MASK, VOCAB, full_mask
from torch import Tensor, nn

from paradec import AdaptiveBlocks, PipelinedBlocks, samplers
from paradec.caches.delayed import DelayedCache
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import LAST


def most_confident(row: list[float]) -> int:
    """Return the index of the first largest number."""
    return max(range(len(row)), key=lambda i: (row[i], -i))


def hierarchy(row: list[float], threshold: float | None, low_threshold: float | None) -> set[int]:
    chosen, run = {most_confident(row)}, []
    for i, score in enumerate([*row, -INF]):
        if score > -INF:
            run.append(i)
            continue
        if run:
            top = max(row[j] for j in run)
            chosen |= {j for j in run if row[j] == top and (low_threshold is None or top > low_threshold)}
        run = []
    return chosen | {i for i, score in enumerate(row) if threshold is not None and score > threshold}


def localleap(row: list[float], anchor_threshold: float, relaxed_threshold: float, radius: int) -> set[int]:
    anchors = [i for i, score in enumerate(row) if score >= anchor_threshold]
    chosen = {most_confident(row)}
    for i, score in enumerate(row):
        theta = relaxed_threshold if any(abs(i - a) <= radius for a in anchors) else anchor_threshold
        if score >= theta:
            chosen.add(i)
    return chosen


def entropy_bound(row: list[float], gamma: float) -> set[int]:
    order = sorted((i for i, score in enumerate(row) if score > LAST), key=lambda i: (-row[i], i))
    chosen = {most_confident(row)}
    for k in range(1, len(order) + 1):
        entropies = [-row[i] for i in order[:k]]
        if math.fsum(entropies) - max(entropies) <= gamma:
            chosen |= set(order[:k])
    return chosen


def entropy_threshold(row: list[float], threshold: float) -> set[int]:
    return {most_confident(row)} | {i for i, score in enumerate(row) if -score <= threshold}


def factor_profile(row: list[float], margin: float) -> set[int]:
    """Choose positions by decreasing confidence p while their sum of 1 - p, with the last term twice, is < 1 - margin.

    The most confident position is always chosen."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    chosen, total = {order[0]}, 1 - row[order[0]]
    for i in order[1:]:
        total += 1 - row[i]
        if not total + (1 - row[i]) < 1 - margin:
            break
        chosen.add(i)
    return chosen


HOLE = 8
"""The mask id in `wino`, `editing` and `saber`, which yield after every step and count remasked or edited tokens."""


def wino(model: Any, row: list[int], block: range, memory: dict, settings: dict) -> Iterator[None]:
    accepted = 0
    while masks := [i for i in block if row[i] == HOLE]:
        columns = list(enumerate(row))
        p = {i: model.read(i, columns) for i in masks}
        confidence = {i: p[i][most_confident(p[i])] for i in masks}
        cap = min(max(int(settings["cap_share"] * len(masks)), settings["cap_low"]), settings["cap_high"])
        ranked = sorted(masks, key=lambda i: (-confidence[i], i))
        chosen = [i for i in ranked if confidence[i] > settings["threshold"]][:cap] or ranked[:1]
        shadows = [(i, HOLE) for i in block]
        decided = [i for i in block if row[i] != HOLE]
        verified = {i: model.read(i, columns[:i] + columns[i + 1 :] + shadows)[row[i]] for i in decided}
        doubtful = [i for i in decided if verified[i] < settings["threshold_back"]]
        num_remasked = max(0, accepted - 1) if len(chosen) > 1 else 0
        remasked = sorted(doubtful, key=lambda i: (verified[i], i))[:num_remasked]
        for i in chosen:
            row[i] = most_confident(p[i])
        for i in remasked:
            row[i] = HOLE
        memory["num_remasked"] += len(remasked)
        accepted = len(chosen)
        yield


def editing(model: Any, row: list[int], block: range, memory: dict, settings: dict) -> Iterator[None]:
    post_steps = 0
    while True:
        masks = [i for i in block if row[i] == HOLE]
        post_steps += not masks
        p = {i: model.read(i, list(enumerate(row))) for i in block}
        best = {i: most_confident(p[i]) for i in block}
        confidence = {i: p[i][best[i]] for i in block}
        chosen = [i for i in masks if confidence[i] > settings["threshold"]] or sorted(
            masks, key=lambda i: (-confidence[i], i)
        )[:1]
        edits = [i for i in block if row[i] not in (HOLE, best[i]) and confidence[i] > settings["editing_threshold"]]
        for i in chosen + edits:
            row[i] = best[i]
        memory["num_remasked"] += len(edits)
        yield
        if all(row[i] != HOLE for i in block):
            if not masks and not edits:
                memory["num_stable"] += 1
                return
            if post_steps == settings["max_post_steps"]:
                return


def saber(model: Any, row: list[int], block: range, memory: dict, settings: dict) -> Iterator[None]:
    last: dict[int, float] = {}
    while masks := [i for i in block if row[i] == HOLE]:
        decided = [i for i in block if row[i] != HOLE]
        p = {i: model.read(i, list(enumerate(row))) for i in block}
        confidence = {i: p[i][most_confident(p[i])] for i in block}
        history = memory["confidence"].values()  # of all blocks
        tau = math.fsum(history) / len(history) if history else 1.0
        chosen = [i for i in masks if confidence[i] > tau]
        if len(chosen) < settings["minimum"]:
            chosen = sorted(masks, key=lambda i: (-confidence[i], i))[: settings["minimum"]]
        k = len(chosen)
        count = min(max(settings["minimum"] // 2, math.ceil(k * settings["remask_share"])), k - 1)
        if k == len(masks) or not settings["remask_share"]:
            count = 0
        remasked = sorted(decided, key=lambda i: (-(last[i] - confidence[i]), i))[:count]
        for i in chosen:
            row[i] = most_confident(p[i])
            memory["confidence"][i] = confidence[i]
        for i in remasked:
            row[i] = HOLE
        memory["num_remasked"] += len(remasked)
        last = confidence
        yield


SCRIPT_VOCAB, SCRIPT_MASK, SCRIPT_ENDS = 7, 6, (4, 5)


def softmax(z: list[float]) -> list[float]:
    z = [-math.inf if v == SCRIPT_MASK else x for v, x in enumerate(z)]
    weights = [math.exp(x - max(z)) for x in z]
    return [w / sum(weights) for w in weights]


def entropy(p: list[float], epsilon: float = 0.0) -> float:
    return -sum(q * math.log(q + epsilon) for q in p if q > 0)


def top(scores: dict[int, float], n: int) -> set[int]:
    return set(sorted(scores, key=lambda i: (-scores[i], i))[:n])


class Loop:
    """A sampler's rule in plain Python. `open(positions)` begins a block.

    `step(z, n)` returns position -> committed token. z: undecided position -> logits. n: the step's quota."""

    def __init__(self, **settings: object):
        self.__dict__ |= samplers.create(self.name).to_dict() | settings


class CreditLoop(Loop):
    name = "credit"

    def open(self, positions: list[int]) -> None:
        self.credit: dict[int, dict[int, float]] = {i: {} for i in positions}

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        confidence, token = {}, {}
        for i in z:
            credit = {v: c * self.decay for v, c in self.credit[i].items()}
            p = softmax(z[i])
            best = most_confident(p)
            if self.storage == "slots" and best not in credit and len(credit) == self.slots:
                del credit[min(credit, key=credit.get)]
            credit[best] = credit.get(best, 0.0) + p[best] ** self.exponent
            self.credit[i] = credit
            fused = softmax([x + self.fusion * math.log(1 + credit.get(v, 0.0)) for v, x in enumerate(z[i])])
            token[i] = most_confident(fused)
            confidence[i] = fused[token[i]]
        chosen = {i for i in z if confidence[i] >= self.threshold} | top(confidence, 1)
        return {i: token[i] for i in chosen}


class KLASSLoop(Loop):
    name = "klass"

    def open(self, positions: list[int]) -> None:
        self.previous = {i: [0.0] * SCRIPT_VOCAB for i in positions}
        self.divergences: dict[int, list[float]] = {i: [] for i in positions}

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        for i in z:
            pairs = zip(p[i], self.previous[i], strict=True)
            self.divergences[i].append(sum(a * (math.log(a + 1e-12) - math.log(b + 1e-12)) for a, b in pairs))
            self.previous[i] = p[i]
        confidence = {i: max(p[i]) for i in z}
        ready = {
            i
            for i in z
            if confidence[i] > self.confidence_threshold
            and len(self.divergences[i]) >= self.history
            and all(divergence < self.kl_threshold for divergence in self.divergences[i][-self.history :])
        }
        return {i: most_confident(p[i]) for i in ready or top(confidence, n)}


class PersistenceLoop(Loop):
    name = "persistence"

    def open(self, positions: list[int]) -> None:
        self.past_tokens: dict[int, list[int]] = {i: [] for i in positions}

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        best = {i: most_confident(p[i]) for i in z}
        for i in z:
            self.past_tokens[i].append(best[i])
        allowed = {i: max(p[i]) for i in z if best[i] not in SCRIPT_ENDS or max(p[i]) >= self.end_threshold}
        is_persistent = {i: self.past_tokens[i][-self.persist :] == [best[i]] * self.persist for i in z}
        persistent = {i for i in allowed if allowed[i] >= self.threshold and is_persistent[i]}
        chosen = top(allowed, n) | persistent or {min(z)}
        return {i: best[i] for i in chosen}


class CCDLoop(Loop):
    name = "ccd"

    def open(self, positions: list[int]) -> None:
        self.buffers: list[dict[int, list[float]]] = []

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        mean = {}
        for i in z:
            distributions = [p[i]] + [b[i] for b in self.buffers[: self.history - 1] if i in b]
            mean[i] = [sum(q) / len(distributions) for q in zip(*distributions, strict=True)]
        buffer = top({i: max(p[i]) for i in z}, self.buffer)
        self.buffers.insert(0, {i: p[i] for i in buffer})
        minus_entropy = {i: -entropy(mean[i]) for i in z}
        chosen = top(minus_entropy, n)
        if self.entropy_threshold is not None:
            chosen |= {i for i in buffer if minus_entropy[i] >= -self.entropy_threshold}
        return {i: most_confident(mean[i]) for i in chosen}


class CCDAgreeLoop(Loop):
    name = "ccd_agree"

    def open(self, positions: list[int]) -> None:
        self.step_index, self.masks, self.buffer, self.previous, self.n = 0, 0, [], {}, 1

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        best = {i: most_confident(p[i]) for i in z}
        self.masks = self.masks or len(z)
        if self.step_index >= self.warmup - 1:
            self.n += 1
        width = min(self.n, int(n + n * self.expand_ratio))
        if len(z) <= self.tail * self.masks:
            width = 2
        order = sorted(z, key=lambda i: (entropy(p[i], 1e-10), i))
        commit = order[:n]
        if self.step_index >= self.warmup and set(commit) & set(self.buffer):
            agreed = [i for i in order[:width] if i in self.buffer and best[i] == self.previous.get(i)]
            if len(agreed) >= n:
                commit = agreed if self.adaptive else agreed[:n]
        self.buffer = [i for i in order if i not in commit][:width]
        self.previous |= best
        self.step_index += 1
        return {i: best[i] for i in commit}


class CarryLoop(Loop):
    """Threshold rule in which the unused part of a step's quota is added to the quota of the next step."""

    name = "threshold"
    planned = 2

    def open(self, positions: list[int]) -> None:
        self.step_index, self.unused, self.masks = 0, 0, len(positions)

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        quota = self.unused + (self.masks // self.planned if self.step_index < self.planned else 0)
        order = sorted(z, key=lambda i: (-max(p[i]), i))[: max(quota, 1)]
        chosen = order[:1] + [i for i in order[1:] if max(p[i]) >= self.threshold]
        self.unused = max(quota, 1) - len(chosen)
        self.step_index += 1
        return {i: most_confident(p[i]) for i in chosen}


class SlowCarryLoop(CarryLoop):
    planned = 3


def score_of(p: Tensor, name: str) -> float:
    """Return the score that a rule gives to a position with these probabilities [vocabulary]."""
    ordered = sorted(p.tolist(), reverse=True)
    if name == "margin":
        return ordered[0] - ordered[1]
    if name.startswith("entropy"):
        return sum(q * math.log(q + (1e-10 if name == "entropy" else 0.0)) for q in ordered if q)
    return ordered[0]


def select_by_rule(name: str, settings: dict, scores: dict[int, float], step: int, steps: int, masks: int) -> set[int]:
    """Return the positions that one rule commits. masks: number of masks in the block when it was opened."""
    order = sorted(scores, key=lambda i: (-scores[i], i))
    if name == "threshold":
        return {i for i in order if scores[i] >= settings["threshold"]} | {order[0]}
    if name == "entropy_threshold":
        return {i for i in order if -scores[i] <= settings["threshold"]} | {order[0]}
    if name == "margin":
        return set(order[: masks // steps + (step < masks % steps)])
    # Dream's time grid
    t, next_t = (1 - (1 - 1e-3) * (step + k) / steps for k in (0, 1))
    return set(order[: len(order) if step == steps - 1 else int(len(order) * (1 - next_t / t))])


def decode_combination(
    model: Model, prompt: list[int], union: bool, rules: list[tuple[str, dict]], new: int, steps: int
) -> list[set[tuple[int, int, float]]]:
    """Return each step's (position, token, first rule's score). union: commit the rules' union, else intersection."""
    canvas, commits = prompt + [MASK] * new, []
    while MASK in canvas:
        with torch.inference_mode():
            logits = model.module(torch.tensor([canvas]), full_mask(len(canvas)), use_cache=False).logits[0, :, :MASK]
        p, masks = logits.softmax(-1), [i for i, token in enumerate(canvas) if token == MASK]
        scores = [{i: score_of(p[i], name) for i in masks} for name, _ in rules]
        sets = [
            select_by_rule(name, settings, score, len(commits), steps, new)
            for (name, settings), score in zip(rules, scores, strict=True)
        ]
        chosen = set.union(*sets) if union else set.intersection(*sets)
        if not union and not chosen:
            chosen = {max(masks, key=lambda i: (scores[0][i], -i))}
        commits.append({(i, int(p[i].argmax()), round(scores[0][i], 9)) for i in chosen})
        for i in chosen:
            canvas[i] = int(p[i].argmax())
    return commits


def adaptive_length(
    tokens: list[int], confidence: list[float], new: int, remaining: int, policy: AdaptiveBlocks, available: list[bool]
) -> int:
    """Return a block's length by AdaBlock's formula. Lists begin at the block. remaining: positions left for it."""
    best = None
    for i in range(min(int(policy.window * new), remaining)):
        if available[i] and tokens[i] in policy.delimiters and (best is None or confidence[i] > confidence[best]):
            best = i
    is_sure = best is not None and confidence[best] >= policy.delimiter_threshold
    return min(max(best + 1 if is_sure else policy.length, policy.min_length), remaining)


def logits_of(model: Model, canvas: list[int]) -> torch.Tensor:
    """Return the model's logits [row length, vocabulary] of a row, with -inf for the mask token."""
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([canvas]), use_cache=False).logits[0].clone()
    if model.facts.shift:
        logits = torch.cat((logits[:1], logits[:-1]))
    return logits.index_fill(1, torch.tensor(model.facts.mask_token_id), -torch.inf)


def prophet(model: Model, prompt: list[int], gaps: tuple, answer: range | None, new: int) -> tuple[list[int], int]:
    """Decode one token per step in blocks of 4 with Prophet's early stop; return the answer and number of forwards.

    gaps: thresholds of the early, middle and late phase. answer: span of new tokens whose mean gap between the two
    largest logits is compared; None for all masks."""
    mask = model.facts.mask_token_id
    canvas, start = prompt + [mask] * new, len(prompt)
    for step in range(new):
        logits = logits_of(model, canvas)
        best = logits.topk(2).values
        masked = [i for i in range(start, len(canvas)) if canvas[i] == mask]
        block = (masked[0] - start) // 4
        if answer is None:
            span = masked
        else:  # positions of finished blocks are ignored
            span = [i for i in (start + a for a in answer) if i >= start + 4 * block]
        percent = 100 * step / new
        min_gap = gaps[0] if percent < 33 else gaps[1] if percent < 67 else gaps[2]
        if not span or float((best[span, 0] - best[span, 1]).mean()) >= min_gap:
            for i in masked:
                canvas[i] = int(logits[i].argmax())
            return canvas[start:], step + 1
        confidence = logits.softmax(-1).amax(-1)
        chosen = max((i for i in masked if i < start + 4 * block + 4), key=lambda i: (float(confidence[i]), -i))
        canvas[chosen] = int(logits[chosen].argmax())
    return canvas[start:], new


class StaleKeysModule:
    """A module whose keys and values are recomputed only at the positions `fresh`, as with a cache."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.stored, self.fresh = module, {}, slice(None)
        self.hooks = [
            part.register_forward_hook(partial(self.exchange, name))
            for name, part in module.named_modules()
            if name.endswith(("k_proj", "v_proj"))
        ]

    def exchange(self, name: str, part: Any, inputs: Any, output: Tensor) -> Tensor:
        if self.fresh != slice(None):
            output, computed = self.stored[name].clone(), output
            output[:, self.fresh] = computed[:, self.fresh]
        self.stored[name] = output
        return output

    def read(self, row: list[int], fresh: slice, shift: int) -> tuple[list[float], list[int]]:
        """Return confidence and best token of every position, which are valid if the predicting position is fresh."""
        self.fresh = fresh
        logits = self.module(torch.tensor([row]), full_mask(len(row)), use_cache=False).logits[0, :, :MASK]
        logits = logits if not shift else torch.cat((logits[:1], logits[:-1]))
        p, best = logits.softmax(-1).max(-1)
        return p.tolist(), best.tolist()

    def __enter__(self) -> StaleKeysModule:
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()


def select_by_hand(sampler: str, p: dict[int, float], masks: int, step: int, steps: int | None) -> list[int]:
    """Return the positions that a rule commits. p: undecided position -> confidence."""
    order = sorted(p, key=lambda i: (-p[i], i))
    if sampler == "threshold":
        return order[:1] + [i for i in order[1:] if p[i] >= 0.3]
    if sampler == "factor":
        return order[: max([1] + [n for n in range(1, len(order) + 1) if (n + 1) * (1 - p[order[n - 1]]) <= 2.0])]
    steps = masks if steps is None else steps
    if sampler == "maskgit_plus":  # Dream's time grid, whose first steps may be idle
        t, next_t = (1 - (1 - 1e-3) * (step + k) / steps for k in (0, 1))
        return order if step == steps - 1 else order[: int(len(order) * (1 - next_t / t))]
    return order[: masks // steps + (step < masks % steps)]


def decode_by_hand(
    model: Model, prompt: list[int], sampler: str, cache: str, new: int, size: int, steps: int | None
) -> dict[str, Any]:
    """Decode a row in blocks of `size` with cache "none", "prefix" or "dual"; return the final row and counts."""
    row, length, shift = prompt + [MASK] * new, len(prompt) + new, model.facts.shift
    counts = {"row_step": 0, "decided": 0, "evaluated": 0, "full_forwards": 0, "end": length, "stopped": False}
    with StaleKeysModule(model.module) as module, torch.inference_mode():
        for start in range(len(prompt), length, size):
            block, step = range(start, min(start + size, length)), 0
            while masks := [i for i in block if row[i] == MASK]:
                fresh = slice(None)
                if cache != "none" and step:
                    fresh = slice(start - shift, length if cache == "prefix" else block[-1] + 1)
                confidence, best = module.read(row, fresh, shift)
                chosen = select_by_hand(sampler, {i: confidence[i] for i in masks}, len(block), step, steps)
                for i in chosen:
                    row[i] = best[i]
                step += 1
                counts["row_step"] += 1
                counts["decided"] += len(chosen)
                counts["evaluated"] += len(range(length)[fresh])
                counts["full_forwards"] += fresh == slice(None)
                first = next((i for i in block if row[i] == MASK or row[i] in model.facts.eos_token_ids), None)
                if first is not None and row[first] != MASK:
                    return counts | {"row": row[: first + 1], "end": first + 1, "stopped": True}
    return counts | {"row": row}


def learn2pd_records(model: Model, prompt: list[int], new: int, length: int) -> list[tuple[Tensor, list, list]]:
    """Return Learn2PD's training records of one row, decoded in blocks of `length`.

    A record of a step has three values per position of the block: the confidence, whether the best token equals the
    final token, and whether the position is undecided."""
    mask = model.facts.mask_token_id

    def forward(canvas: list[int]) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            full_mask = torch.ones(1, 1, len(canvas), len(canvas), dtype=torch.bool)
            logits = model.module(torch.tensor([canvas]), attention_mask=full_mask, use_cache=False).logits[0]
        return logits.index_fill(1, torch.tensor(mask), -torch.inf).softmax(-1).max(-1)

    start = len(prompt)
    canvas = prompt + [mask] * new
    for begin in range(start, start + new, length):
        for _ in range(length):
            confidence, tokens = forward(canvas)
            undecided = [i for i in range(begin, begin + length) if canvas[i] == mask]
            best = max(undecided, key=lambda i: (float(confidence[i]), -i))
            canvas[best] = int(tokens[best])
    target, records = canvas, []
    canvas = prompt + [mask] * new
    for begin in range(start, start + new, length):
        block, previous_guess = slice(begin, begin + length), None
        for step in range(length):
            confidence, tokens = forward(canvas)
            guess = tokens[block].tolist()
            is_final = [a == b for a, b in zip(guess, target[block], strict=True)]
            records.append((confidence[block], is_final, [token == mask for token in canvas[block]]))
            if guess == previous_guess or step == length - 1:
                canvas[block] = target[block]
            else:
                pairs = zip(is_final, target[block], canvas[block], strict=True)
                canvas[block] = [target_token if ok else token for ok, target_token, token in pairs]
            previous_guess = guess
            if mask not in canvas[block]:
                break
    return records


def remembering_loop(rule: Any, module: nn.Module, prompt: list[int], policy: PipelinedBlocks) -> list[list[tuple]]:
    """Decode with KLASS or persistence in several open blocks; return each forward's (position, token) pairs."""
    ids, new = [*prompt, *[MASK] * 12], range(len(prompt), len(prompt) + 12)
    before: dict[int, Any] = {}
    run: dict[int, int] = {}
    num_open, calls, size = 1, [], policy.length

    def masks_of(block: int) -> list[int]:
        return [i for i in new if (i - len(prompt)) // size == block and ids[i] == MASK]

    while MASK in ids:
        logits = module(torch.tensor([ids]))[0]
        logits[:, MASK] = -torch.inf
        p = logits.softmax(-1)
        open_ = [i for block in range(num_open) for i in masks_of(block)]
        for i in open_:
            if rule.name == "klass":
                current = p[i].float()
                previous = before.get(i, torch.zeros(VOCAB))
                divergence = float((current * ((current + 1e-12) / (previous + 1e-12)).log()).sum())
                run[i] = run.get(i, 0) + 1 if divergence < rule.kl_threshold else 0
            else:
                current = int(p[i].argmax())
                run[i] = run.get(i, 0) + 1 if before.get(i) == current else 1
            before[i] = current
        confidence = {i: float(p[i].max()) for i in open_}
        if rule.name == "klass":
            chosen = {i for i in open_ if confidence[i] > rule.confidence_threshold and run[i] >= rule.history}
        else:
            chosen = {i for i in open_ if confidence[i] >= rule.threshold and run[i] >= rule.persist}
        masks = next(masks_of(block) for block in range(num_open) if masks_of(block))
        best = max(masks, key=lambda i: (confidence[i], -i))
        if rule.name == "persistence" or not chosen & set(masks):
            chosen.add(best)
        calls.append(sorted((i, int(p[i].argmax())) for i in chosen))
        for i, token in calls[-1]:
            ids[i] = token
        is_full = not any(masks_of(block) for block in range(num_open))
        if is_full or size - len(masks_of(num_open - 1)) >= policy.add * size:
            num_open = min(num_open + 1, -(-len(new) // size))
    return calls


def delayed_positions(
    prompt: int, length: int, size: int, cache: DelayedCache, waiting: str, commits: list[set[int]]
) -> list[int]:
    """Return the number of positions that each step of one row evaluates under a delayed cache.

    A block is stored `cache_delay_iter` steps after it is full. waiting: "first" if a full block starts to wait only
    when the block before it is stored. commits: the positions that each step fills."""
    undecided = set(range(prompt, length))
    blocks = [range(prompt), *(range(start, min(start + size, length)) for start in range(prompt, length, size))]
    since, num_stored, sizes = {0: -1}, 0, []
    for step, filled in enumerate(commits):
        is_waiting, stored = False, num_stored
        for index in range(num_stored, len(blocks)):
            if undecided & set(blocks[index]):
                break
            since.setdefault(index, step)
            if step - since[index] >= cache.cache_delay_iter:
                stored += 1
                continue
            is_waiting = True
            if waiting == "first":
                break
        is_full = stored == num_stored and (not num_stored or is_waiting or (step + 1) % cache.refresh_interval == 0)
        sizes.append(length - (blocks[num_stored].start if num_stored < len(blocks) and not is_full else 0))
        num_stored, undecided = stored, undecided - filled
    return sizes


@dataclass
class FreeDaveLoop:
    """FreeDave over the threshold rule, for one row, after the paper. `decode` returns commits and counts."""

    module: nn.Module
    threshold: float
    count: int
    subset: bool
    mask: int
    end: int

    def read(self, row: list[int]) -> tuple[list[float], list[int]]:
        """Return the confidence and the best token of every position."""
        logits = self.module(torch.tensor([row]))[0].index_fill(1, torch.tensor(self.mask), -torch.inf)
        p, token_ids = logits.softmax(-1).max(-1)
        return p.tolist(), token_ids.tolist()

    def apply_rule(self, row: list[int], block: range, confidence_and_best: tuple[list[float], list[int]]) -> list[int]:
        """Return the row after one step of the threshold rule."""
        confidence, best_tokens = confidence_and_best
        masks = [i for i in block if row[i] == self.mask]
        best = max(masks, key=lambda i: (confidence[i], -i), default=None)
        chosen = {i for i in masks if confidence[i] >= self.threshold or i == best}
        return [best_tokens[i] if i in chosen else token_id for i, token_id in enumerate(row)]

    def accept(self, drafts: list[list[int]], after: list[list[int]]) -> list[tuple[list[int], int]]:
        """Return the accepted rows, each with the index of the draft it follows. after: drafts after one more step."""
        path, index = [], 0
        while True:
            row, later = after[index], range(index + 1, len(drafts) if self.subset else min(index + 2, len(drafts)))
            matches = [i for i in later if drafts[i] == row or self.subset and self.is_part(drafts[i], row)]
            if not matches:
                return [*path, (row, index)]
            path += [(drafts[i], index) for i in range(index + 1, matches[-1] + 1)]
            index = matches[-1]

    def is_part(self, draft: list[int], row: list[int]) -> bool:
        """Return whether all decided tokens of a draft equal those of the row."""
        return all(d in (self.mask, token_id) for d, token_id in zip(draft, row, strict=True))

    def decode(self, prompt: list[int], new: int, size: int) -> dict[str, Any]:
        row, length = prompt + [self.mask] * new, len(prompt) + new
        commits, steps = [], 0
        for block in [range(start, start + size) for start in range(len(prompt), length, size)]:
            carried = None
            while masks := [i for i in block if row[i] == self.mask]:
                drafts = [row]
                if carried is not None:
                    for _ in range(1, min(self.count, len(masks))):
                        drafts.append(self.apply_rule(drafts[-1], block, carried))
                reads = [self.read(draft) for draft in drafts]
                path = self.accept(drafts, [self.apply_rule(d, block, f) for d, f in zip(drafts, reads, strict=True)])
                commits.append(set())
                for number, (after, judge) in enumerate(path):
                    changed = [i for i in block if after[i] != row[i]]
                    commits[-1] |= {(i, after[i], round(reads[judge][0][i], 9)) for i in changed}
                    row, steps, carried = after, steps + 1, reads[number]
                    first = next((i for i in block if row[i] in (self.mask, self.end)), None)
                    if first is not None and row[first] == self.end:
                        beyond = len(path) - number - 1  # number of accepted steps after the end token
                        return self.result(commits, steps, row[: first + 1], True) | {"beyond": beyond}
                    if all(row[i] != self.mask for i in block):
                        break
        return self.result(commits, steps, row, False)

    def result(self, commits: list, steps: int, row: list[int], stopped: bool) -> dict[str, Any]:
        decided = sum(map(len, commits))
        return {"commits": commits, "steps": steps, "row": row, "stopped": stopped, "decided": decided, "beyond": 0}


def decided_share(decided: list[bool], center: int, sigma: float) -> float:
    """Return the Gaussian-weighted share of decided positions around `center`.

    Positions before the row count as decided; positions after it count like its last position."""
    reach, share, total = math.ceil(6 * sigma), 0.0, 0.0
    for j in range(center - reach, center + reach + 1):
        weight = math.exp(-((j - center) ** 2) / (2 * sigma**2))
        total += weight
        share += weight * (True if j < 0 else decided[-1] if j >= len(decided) else decided[j])
    return share / total


def d2_positions(state: Any, row: int, confidence: dict, last: set[int], k: int, sigma: float, w: int) -> set[int]:
    """Return the positions of a row that the next step evaluates, by D2Cache's rule.

    confidence: position -> confidence, by default 1. last: positions that are always evaluated. k: number of masks to
    evaluate. sigma: as in `decided_share`. w: positions between two that are at most w apart are evaluated too."""
    canvas, length = state.canvas[row].tolist(), int(state.length[row])
    canvas, start, end = canvas[:length], int(state.block_start[row]), int(state.block_end[row])
    masks = [p for p in range(length) if canvas[p] == MASK]
    kth = masks[k - 1] if len(masks) >= k else length - 1
    stop = next(stop for stop in range(end, length + end, end - start) if stop > kth)
    decided = [token != MASK for token in canvas]
    rank = {p: confidence.get(p, 1.0) * decided_share(decided, p, sigma) + 2 * (p < end) for p in masks if p < stop}
    chosen = set(sorted(rank, key=lambda p: (-rank[p], p))[:k])
    chosen = {max(p - state.facts.shift, 0) for p in chosen} | last
    ordered = sorted(chosen)
    for left, right in zip(ordered[:-1], ordered[1:], strict=True):
        if right - left <= w:
            chosen |= set(range(left, right))
    return chosen
