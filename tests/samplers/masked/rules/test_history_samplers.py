"""Samplers that remember: credit, ccd, ccd_agree, klass, persistence and threshold's carry against plain loops written
from the papers' formulas, the settings at which they are other samplers, and what becomes of their memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.core.protocol import Sampler
from paradec.samplers.masked.loop import Stage

VOCAB, MASK, ENDS = 7, 6, (4, 5)
ROWS, BLOCK, BLOCKS = 3, 6, 2
Step = set[tuple[int, int, int]]


class Script:
    """A model that answers step t with the logits [rows, positions, V] of `table[t]`, whatever it is asked."""

    facts = ModelFacts(vocab_size=VOCAB, mask_token_id=MASK, eos_token_ids=ENDS)
    device = torch.device("cpu")
    tokenizer, default_block_length, default_max_new_tokens = None, None, BLOCK * BLOCKS
    pads, supports_store, supports_visibility = True, False, False

    def __init__(self, seed: int, scale: float):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(BLOCK * BLOCKS, ROWS, 1 + BLOCK * BLOCKS, VOCAB, dtype=torch.float64, generator=generator)
        table = [noise[0]]
        for fresh in noise[1:]:  # favourites last for a while, and change
            table.append(0.9 * table[-1] + 0.4 * fresh)
        self.table = scale * torch.stack(table)
        # positions that a step leaves out, as a cache would
        self.keep = torch.rand(len(noise), ROWS, BLOCK, generator=generator) < (1.0 if seed % 2 else 0.7)
        self.at = 0

    def __call__(self, query: object) -> Tensor:
        logits = self.table[self.at][torch.as_tensor(query.rows)]
        return logits.gather(1, query.wanted.unsqueeze(-1).expand(-1, -1, VOCAB)).clone()


def kept(script: Script, at: int, row: int, undecided: list[int], start: int) -> set[int]:
    """Undecided positions of a row's block that step `at` evaluates; one of them at least."""
    found = {i for i in undecided if script.keep[at, row, i - start]}
    return found or set(undecided)


def played(sampler: Sampler, script: Script, **request: object) -> list[Step]:
    """What the sampler commits at every step of a script."""
    prompts = [[row] for row in range(ROWS)]
    state = sampler.start(
        script, prompts, max_new_tokens=BLOCK * BLOCKS, block_length=BLOCK, eos_early_stop=False, seed=0, **request
    )
    steps = []
    script.at = 0
    with torch.inference_mode():
        while not state.done:
            queries = sampler.query(state)
            (query,) = queries
            available = torch.zeros(len(query.rows), BLOCK, dtype=torch.bool)
            for n, row in enumerate(query.rows.tolist()):
                start = int(state.block_start[row])
                undecided = [i for i in range(start, start + BLOCK) if state.undecided[row, i]]
                available[n, [i - start for i in kept(script, script.at, row, undecided, start)]] = True
            queries = [query.with_fields(window=query.window.with_fields(available=available))]
            commit = sampler.commit(state, sampler.propose(state, [script(query)], queries))
            steps.append({(r, p, t) for r, p, t, _ in commit.to_list()})
            script.at += 1
    return steps


# The rules as loops over one row's block: z [positions][V], the positions evaluated, and n, what the schedule grants.


def softmax(z: list[float]) -> list[float]:
    z = [-math.inf if v == MASK else x for v, x in enumerate(z)]
    weights = [math.exp(x - max(z)) for x in z]
    return [w / sum(weights) for w in weights]


def argmax(p: list[float]) -> int:
    return max(range(len(p)), key=lambda v: (p[v], -v))


def entropy(p: list[float], inside: float = 0.0) -> float:
    return -sum(q * math.log(q + inside) for q in p if q > 0)


def top(scores: dict[int, float], n: int) -> set[int]:
    return set(sorted(scores, key=lambda i: (-scores[i], i))[:n])


class Loop:
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
            best = argmax(p)
            if self.storage == "slots" and best not in credit and len(credit) == self.slots:
                del credit[min(credit, key=credit.get)]
            credit[best] = credit.get(best, 0.0) + p[best] ** self.exponent
            self.credit[i] = credit
            fused = softmax([x + self.fusion * math.log(1 + credit.get(v, 0.0)) for v, x in enumerate(z[i])])
            token[i] = argmax(fused)
            confidence[i] = fused[token[i]]
        chosen = {i for i in z if confidence[i] >= self.threshold} | top(confidence, 1)
        return {i: token[i] for i in chosen}


class KLASSLoop(Loop):
    name = "klass"

    def open(self, positions: list[int]) -> None:
        self.previous = {i: [0.0] * VOCAB for i in positions}
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
            and all(d < self.kl_threshold for d in self.divergences[i][-self.history :])
        }
        return {i: argmax(p[i]) for i in ready or top(confidence, n)}


class PersistenceLoop(Loop):
    name = "persistence"

    def open(self, positions: list[int]) -> None:
        self.seen: dict[int, list[int]] = {i: [] for i in positions}

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        best = {i: argmax(p[i]) for i in z}
        for i in z:
            self.seen[i].append(best[i])
        free = {i: max(p[i]) for i in z if best[i] not in ENDS or max(p[i]) >= self.end_threshold}
        lasting = {
            i for i in free if free[i] >= self.threshold and self.seen[i][-self.persist :] == [best[i]] * self.persist
        }
        chosen = top(free, n) | lasting or {min(z)}
        return {i: best[i] for i in chosen}


class CCDLoop(Loop):
    name = "ccd"

    def open(self, positions: list[int]) -> None:
        self.buffers: list[dict[int, list[float]]] = []

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        mean = {}
        for i in z:
            found = [p[i]] + [b[i] for b in self.buffers[: self.history - 1] if i in b]
            mean[i] = [sum(q) / len(found) for q in zip(*found, strict=True)]
        buffer = top({i: max(p[i]) for i in z}, self.buffer)
        self.buffers.insert(0, {i: p[i] for i in buffer})
        most_confident = {i: -entropy(mean[i]) for i in z}
        chosen = top(most_confident, n)
        if self.entropy_threshold is not None:
            chosen |= {i for i in buffer if most_confident[i] >= -self.entropy_threshold}
        return {i: argmax(mean[i]) for i in chosen}


class CCDAgreeLoop(Loop):
    name = "ccd_agree"

    def open(self, positions: list[int]) -> None:
        self.at, self.masks, self.buffer, self.previous, self.n = 0, 0, [], {}, 1

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        best = {i: argmax(p[i]) for i in z}
        self.masks = self.masks or len(z)
        if self.at >= self.warmup - 1:
            self.n += 1
        width = min(self.n, int(n + n * self.expand_ratio))
        if len(z) <= self.tail * self.masks:
            width = 2
        order = sorted(z, key=lambda i: (entropy(p[i], 1e-10), i))
        first, wide = order[:n], order[:width]
        commit = first
        if self.at >= self.warmup and set(first) & set(self.buffer):
            agreed = [i for i in wide if i in self.buffer and best[i] == self.previous.get(i)]
            if len(agreed) >= n:
                commit = agreed if self.adaptive else agreed[:n]
        self.buffer = [i for i in order if i not in commit][:width]
        self.previous |= best
        self.at += 1
        return {i: best[i] for i in commit}


class CarryLoop(Loop):
    """What a step grants and does not commit is granted to the next one, however often it was refused before."""

    name = "threshold"
    planned = 2

    def open(self, positions: list[int]) -> None:
        self.at, self.left, self.masks = 0, 0, len(positions)

    def step(self, z: dict[int, list[float]], n: int) -> dict[int, int]:
        p = {i: softmax(z[i]) for i in z}
        granted = self.left + (self.masks // self.planned if self.at < self.planned else 0)
        order = sorted(z, key=lambda i: (-max(p[i]), i))[: max(granted, 1)]
        chosen = order[:1] + [i for i in order[1:] if max(p[i]) >= self.threshold]
        self.left = max(granted, 1) - len(chosen)
        self.at += 1
        return {i: argmax(p[i]) for i in chosen}


class SlowCarryLoop(CarryLoop):
    planned = 3


def looped(loop: Loop, script: Script, steps: int | None) -> list[Step]:
    """What a rule's loops commit at every step of a script, all rows together."""
    per_row = []
    for row in range(ROWS):
        at, found = 0, []
        for start in range(1, 1 + BLOCK * BLOCKS, BLOCK):
            undecided = list(range(start, start + BLOCK))
            loop.open(undecided)
            planned = BLOCK if steps is None else steps // BLOCKS
            begin = at
            while undecided:
                n = max(1, BLOCK // planned + (at - begin < BLOCK % planned))
                z = {i: script.table[at, row, i].tolist() for i in sorted(kept(script, at, row, undecided, start))}
                chosen = loop.step(z, n)
                found.append({(row, i, token) for i, token in chosen.items()})
                undecided = [i for i in undecided if i not in chosen]
                at += 1
        per_row.append(found)
    return [set().union(*(found[at] for found in per_row if at < len(found))) for at in range(max(map(len, per_row)))]


CASES: list[tuple[type[Loop], dict, int | None]] = [
    (CreditLoop, {"threshold": 0.8}, None),
    (CreditLoop, {"threshold": 0.8, "storage": "dense"}, None),
    (CreditLoop, {"threshold": 0.95, "decay": 0.9, "exponent": 0.5, "fusion": 2.0, "storage": "dense"}, None),
    (CreditLoop, {"threshold": 0.95, "decay": 0.9, "exponent": 0.5, "fusion": 2.0, "slots": 1}, None),
    (CreditLoop, {"threshold": 0.9, "decay": 1.0, "fusion": 2.0, "slots": 2}, None),
    (KLASSLoop, {"confidence_threshold": 0.5, "kl_threshold": 0.1}, None),
    (KLASSLoop, {"confidence_threshold": 0.4, "kl_threshold": 0.3, "history": 1}, 4),
    (KLASSLoop, {"confidence_threshold": 0.3, "kl_threshold": 0.2, "history": 3}, 10),
    (PersistenceLoop, {"threshold": 0.7}, None),
    (PersistenceLoop, {"threshold": 0.6, "persist": 3, "end_threshold": 0.95}, None),
    (PersistenceLoop, {"threshold": 0.7, "persist": 1, "end_threshold": 0.5}, 4),
    (CCDLoop, {"entropy_threshold": None}, None),
    (CCDLoop, {"entropy_threshold": 0.8}, None),
    (CCDLoop, {"entropy_threshold": 0.6, "history": 2, "buffer": 2}, None),
    (CCDLoop, {"entropy_threshold": 0.9, "history": 4, "buffer": 9}, 6),
    (CCDAgreeLoop, {"warmup": 1}, None),
    (CCDAgreeLoop, {"warmup": 0, "expand_ratio": 2.0, "tail": 0.5}, None),
    (CCDAgreeLoop, {"warmup": 1, "adaptive": False}, 6),
    (CCDAgreeLoop, {"warmup": 2, "expand_ratio": 9.0}, None),
    (CarryLoop, {"threshold": 0.8, "quota_per_step": "carry"}, 4),
    (SlowCarryLoop, {"threshold": 0.7, "quota_per_step": "carry"}, 6),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("loop", "settings", "steps"), CASES)
def test_sampler_equals_loops(loop: type[Loop], settings: dict, steps: int | None) -> None:
    sampler, sizes = samplers.create(loop.name, **settings), set()
    for seed in range(8):
        script = Script(seed, scale=2.5 if seed < 6 else 1.0)
        ours, theirs = played(sampler, script, steps=steps), looped(loop(**settings), script, steps)
        assert ours == theirs
        sizes |= {sum(row == r for row, *_ in step) for step in ours for r in range(ROWS)}
    assert len(sizes) > 2 or settings.get("entropy_threshold", 0) is None or not settings.get("adaptive", True)


@pytest.mark.parametrize(
    ("loop", "settings", "steps"), [case for case in CASES if case[0] in (CreditLoop, KLASSLoop, CCDLoop)]
)
def test_sampler_equals_loops_in_float32(
    loop: type[Loop], settings: dict, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Single(Script):
        def __call__(self, query: object) -> Tensor:
            return super().__call__(query).float()

    monkeypatch.setattr("paradec.kernels.token_stats.read.SMALL_VOCABULARY", 0)
    monkeypatch.setattr("paradec.samplers.distributions.CPU_CHUNK", 2 * VOCAB)
    for seed in range(4):
        script = Single(seed, scale=2.5 if seed < 3 else 1.0)
        ours = played(samplers.create(loop.name, **settings), script, steps=steps)
        assert ours == looped(loop(**settings), script, steps)


def test_credit_survives_bfloat16() -> None:
    """In bfloat16 a logit of 20 has steps of 0.125: credit must be added in more."""
    logits = torch.zeros(1, 1, VOCAB, dtype=torch.bfloat16)
    logits[..., 2], logits[..., 3] = 20.0, 19.875
    for storage in ("dense", "slots"):
        sampler = samplers.create("credit", storage=storage)
        memory = {k: torch.full((1, 1, *(VOCAB if d == "vocab" else d for d in s.dims[1:])), s.fill, dtype=s.dtype)
                  for k, s in sampler.memory().items()}  # fmt: skip
        fused, _ = sampler.process_logits(
            logits, Stage(torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1).long(), memory)
        )
        p = logits.double().softmax(-1)[0, 0, 2].item()
        assert fused[0, 0, 2].item() - 20 == pytest.approx(0.65 * math.log(1 + p**0.2), rel=1e-4)
        assert logits[0, 0, 2] == 20
