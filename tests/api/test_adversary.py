"""Random checkpoints and settings against independent, plain implementations of the published loops.

Checkpoints have the published file formats and random sizes (grouped heads, tied matrices, rows beyond the vocabulary,
other ids and angles). They are decoded in float64. The positions that every call evaluates and commits must equal those
of a plain loop over a plain module. Draft-verify cases are checked draft by draft.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import DREAM, LLADA, changed, random_weights, write_checkpoint
from oracles.lantern import plain_node
from oracles.llada_dream import Net
from torch import Tensor

import paradec
from paradec import caches, samplers
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.gsd import GSD
from paradec.samplers.causal.lantern import LanternRule
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.sjd import SJD, verify
from paradec.samplers.causal.trees import Tree, normalize, walk
from paradec.samplers.causal.window import DraftDistributions, DraftWindow

Calls = list[tuple[int, list[int]]]
"""For every model call: the number of evaluated positions, and the positions committed after it."""

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:steps=")


def write_random_checkpoint(kind: str, folder: Path, rng: random.Random) -> tuple[dict[str, Any], dict[str, Tensor]]:
    heads, vocab = rng.choice([2, 4]), rng.choice([12, 20, 33])
    kv_heads, hidden = rng.choice([n for n in (1, 2, 4) if heads % n == 0]), heads * rng.choice([4, 6])
    mask, end = rng.sample(range(vocab), 2)
    common = {"vocab_size": vocab, "mask_token_id": mask, "eos_token_id": end}
    common["rope_theta"] = rng.choice([5e5, 1e4, 100])
    if kind == "llada":
        fields = {"d_model": hidden, "n_layers": rng.choice([1, 2, 3]), "n_heads": heads, "n_kv_heads": kv_heads}
        fields |= {"mlp_hidden_size": rng.choice([None, 20]), "mlp_ratio": 1.5, "weight_tying": rng.random() < 0.4}
        fields |= {"embedding_size": rng.choice([None, vocab + 4]), "max_sequence_length": 200}
        config = changed(LLADA, **common, **fields)
    else:
        fields = {"hidden_size": hidden, "num_hidden_layers": rng.choice([1, 2]), "num_attention_heads": heads}
        fields |= {"num_key_value_heads": kv_heads, "intermediate_size": 20, "max_position_embeddings": 200}
        config = changed(DREAM, **common, **fields, tie_word_embeddings=rng.random() < 0.4)
    weights = random_weights(config, seed=rng.randrange(10**6))
    write_checkpoint(folder, config, weights)
    return config, weights


def likeliest_tokens(logits: Tensor, mask: int) -> Tensor:
    """Return the likeliest tokens except the mask. (Probabilities are normalised with the mask.)"""
    return logits.index_fill(-1, torch.tensor(mask), -torch.inf).argmax(-1)


def token_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def assert_decodes(model: Any, prompt: list[int], new: int, sampler: Any, expected: Any, **request: Any) -> None:
    """Decode and compare tokens. For calls that committed tokens, also compare evaluated and committed positions."""
    request |= {"sampler": sampler, "max_new_tokens": new, "rng": "reference", "eos_early_stop": False, "trace": True}
    out = paradec.generate(model, input_ids=[prompt], **request)
    canvas, calls = expected
    assert out.sequences[0].tolist() == canvas.tolist()
    branches = 2 if request.get("guidance_scale", 1.0) != 1.0 else 1
    steps = [step for step in out.trace.steps if step.commits]
    actual = [(step.forwarded[0], sorted(commit[1] for commit in step.commits)) for step in steps]
    assert actual == [(width * branches, sorted(positions)) for width, positions in calls if positions]


def step_quotas(masks: int, steps: int) -> list[int]:
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def plain_llada(
    net: Net,
    mask: int,
    prompt: list[int],
    blocks: int,
    length: int,
    steps: int,
    remasking: str,
    seed: int,
    **request: Any,
) -> tuple[Tensor, Calls]:
    """LLaDA's generate.py. It draws Gumbel noise first, then the scores of `random`."""
    generator = torch.Generator().manual_seed(seed)
    x, calls = torch.tensor(prompt + [mask] * (blocks * length)), []
    is_prompt, temperature, scale = x != mask, request["temperature"], request["guidance_scale"]
    for block in range(blocks):
        end = len(prompt) + (block + 1) * length
        for count in step_quotas(length, steps // blocks):
            logits = net(x)
            if scale != 1:
                unconditional = net(torch.where(is_prompt, mask, x))
                logits = unconditional + scale * (logits - unconditional)
            tokens = likeliest_tokens(logits, mask)
            if temperature:
                noise = torch.rand(logits.shape, dtype=torch.float64, generator=generator)
                tokens = likeliest_tokens(logits.exp() / (-noise.log()) ** temperature, mask)
            scores = token_probabilities(logits, tokens)
            if remasking == "random":
                scores = torch.rand((1, len(x)), generator=generator)[0].double()
            scores[end:], scores[x != mask] = -torch.inf, -torch.inf
            chosen = scores.topk(count).indices
            x[chosen] = tokens[chosen]
            calls.append((len(x), chosen.tolist()))
    return x, calls


def plain_fast_dllm(
    net: Net, mask: int, prompt: list[int], blocks: int, length: int, steps: int, rule: str, value: float, cache: str
) -> tuple[Tensor, Calls]:
    """Fast-dLLM. After a block's first forward, "prefix" evaluates the block and all after it, "dual" the block."""
    x, calls = torch.tensor(prompt + [mask] * (blocks * length)), []
    for block in range(blocks):
        start, end, step, store = len(prompt) + block * length, len(prompt) + (block + 1) * length, 0, {}
        while (x[start:end] == mask).any():
            positions, visible = torch.arange(len(x)), None
            if step and cache != "none":
                positions = torch.arange(start, len(x) if cache == "prefix" else end)
                visible = torch.arange(len(x)) < (start if cache == "prefix" else len(x))
            logits = torch.zeros(len(x), net.head.shape[0], dtype=torch.float64)
            logits[positions] = net(x[positions], positions, store, visible)
            tokens = likeliest_tokens(logits, mask)
            scores = token_probabilities(logits, tokens)
            scores[:start], scores[end:], scores[x != mask] = -torch.inf, -torch.inf, -torch.inf
            order = scores.argsort(descending=True)[: int((x[start:end] == mask).sum())].tolist()
            if rule == "fixed":
                count = step_quotas(length, steps // blocks)[step]
            elif rule == "threshold":
                count = max(1, int((scores >= value).sum()))
            else:
                count = 1
                while count < len(order) and scores[order[count]] >= 1 - value / (count + 2):
                    count += 1
            committed = order[:count]
            x[committed] = tokens[committed]
            calls.append((len(positions), committed))
            step += 1
    return x, calls


def plain_dkv(
    net: Net, mask: int, prompt: list[int], blocks: int, length: int, steps: int, interval: int
) -> tuple[Tensor, Calls]:
    """dKV-Cache-Decode: tokens decided before the previous call stay cached until the next full forward."""
    x, calls = torch.tensor(prompt + [mask] * (blocks * length)), []
    for block in range(blocks):
        end, known, store = len(prompt) + (block + 1) * length, x != mask, {}
        for step, count in enumerate(step_quotas(length, steps // blocks)):
            full = step <= 1 or step % interval == 0
            positions = torch.arange(len(x)) if full else (~known).nonzero()[:, 0]
            logits = torch.zeros(len(x), net.head.shape[0], dtype=torch.float64)
            logits[positions] = net(x[positions], positions, store, None if full else known)
            known = x != mask
            tokens = likeliest_tokens(logits, mask)
            scores = token_probabilities(logits, tokens)
            scores[end:], scores[x != mask] = -torch.inf, -torch.inf
            chosen = scores.topk(count).indices
            x[chosen] = tokens[chosen]
            calls.append((len(positions), chosen.tolist()))
    return x, calls


@pytest.mark.thinned
@pytest.mark.parametrize("seed", range(5))
def test_llada_checkpoints_equal_plain_loops(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config, weights = write_random_checkpoint("llada", tmp_path, rng)
    model, net, mask = paradec.load(tmp_path, dtype="float64"), Net(config, weights), config["mask_token_id"]
    token_ids = [token_id for token_id in range(config["vocab_size"]) if token_id != mask]
    prompt = rng.choices(token_ids, k=rng.choice([1, 2, 7]))
    blocks, length = rng.choice([1, 2, 3]), rng.choice([1, 3, 5, 8])
    steps = blocks * rng.choice([1, length, max(1, length - 1)])
    cut = {"block_length": length}
    for remasking in ("low_confidence", "random"):
        request = {"temperature": rng.choice([0.0, 0.7]), "guidance_scale": rng.choice([1.0, 1.25, 2.5])}
        expected = plain_llada(net, mask, prompt, blocks, length, steps, remasking, seed, **request)
        sampler = samplers.create(remasking)
        assert_decodes(model, prompt, blocks * length, sampler, expected, seed=seed, steps=steps, **cut, **request)
    for cache in ("none", "prefix", "dual"):
        rules = [("fixed", 0.0), ("threshold", 0.3), ("threshold", 0.9), ("factor", 1.0), ("factor", 2.5)]
        rule, value = rng.choice(rules)
        expected = plain_fast_dllm(net, mask, prompt, blocks, length, steps, rule, value, cache)
        settings = {"fixed": {}, "threshold": {"threshold": value}, "factor": {"factor": value}}[rule]
        sampler = samplers.create("low_confidence" if rule == "fixed" else rule, **settings)
        planned = {"steps": steps} if rule == "fixed" else {}
        assert_decodes(model, prompt, blocks * length, sampler, expected, cache=cache, **cut, **planned)
    interval = rng.choice([1, 2, 4, 100])
    expected = plain_dkv(net, mask, prompt, blocks, length, steps, interval)
    cache, sampler = caches.create("dkv_decode", refresh_interval=interval), samplers.create("low_confidence")
    assert_decodes(model, prompt, blocks * length, sampler, expected, cache=cache, steps=steps, **cut)


def plain_dream(
    net: Net, mask: int, prompt: list[int], new: int, steps: int, alg: str, seed: int, eps: float, **request: Any
) -> tuple[Tensor, Calls]:
    """Dream's generation_utils: shifted logits, a time grid, filters. `origin` chooses positions before it samples."""
    generator, times = torch.Generator().manual_seed(seed), torch.linspace(1, eps, steps + 1)
    x, calls = torch.tensor(prompt + [mask] * new), []
    temperature, top_p, top_k = (request[name] for name in ("temperature", "top_p", "top_k"))

    def filtered(logits: Tensor) -> Tensor:
        if top_p is not None:
            ordered, order = logits.sort(descending=True)
            probs = ordered.softmax(-1)
            out = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs > top_p)
            logits = logits.masked_fill(out, -torch.inf)
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
        return logits

    def sample(logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = likeliest_tokens(logits, mask)
        if temperature:
            probs = filtered(logits.index_fill(-1, torch.tensor(mask), -torch.inf) / temperature).softmax(-1)
            tokens = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
        probs = filtered(logits / temperature if temperature else logits).softmax(-1)
        if alg == "topk_margin":
            first, second = probs.topk(2).values.unbind(-1)
            return tokens, first - second
        if alg == "entropy":
            return tokens, (probs * (probs + 1e-10).log()).sum(-1)
        return tokens, probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    for step in range(steps):
        masked, logits = x == mask, net(x)
        num_masked, last = int(masked.sum()), step == steps - 1
        if not num_masked:
            break
        logits = torch.cat((logits[:1], logits[:-1]))[masked]
        part = 1 if last else 1 - times[step + 1] / times[step]
        if alg == "origin":
            final = torch.rand(num_masked, generator=generator) < part
            chosen = masked.nonzero()[final, 0]
            if len(chosen):
                x[chosen] = sample(logits[final])[0]
        else:
            tokens, scores = sample(logits)
            count = num_masked if last else int(torch.tensor(float(num_masked)) * part)
            full = torch.full(x.shape, -torch.inf, dtype=torch.float64)
            full[masked] = scores
            chosen = full.topk(count).indices
            if count and request["alg_temp"]:
                chosen = torch.multinomial((full / request["alg_temp"]).softmax(-1).float(), count, generator=generator)
            x[chosen] = torch.full_like(x, mask).masked_scatter(masked, tokens)[chosen]
        calls.append((len(x), chosen.tolist()))
    return x, calls


@pytest.mark.thinned
@pytest.mark.parametrize("seed", range(4))
def test_dream_checkpoints_equal_plain_loops(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config, weights = write_random_checkpoint("dream", tmp_path, rng)
    model, net, mask = paradec.load(tmp_path, dtype="float64"), Net(config, weights), config["mask_token_id"]
    token_ids = [token_id for token_id in range(config["vocab_size"]) if token_id != mask]
    prompt, new = rng.choices(token_ids, k=rng.choice([1, 2, 7])), rng.choice([1, 3, 7, 16])
    for alg in ("origin", "maskgit_plus", "topk_margin", "entropy"):
        request = {"temperature": rng.choice([0.0, 0.3, 1.0]), "top_p": rng.choice([None, 0.5, 0.9])}
        request |= {"top_k": rng.choice([None, 1, 5, 1000]), "steps": rng.choice([1, 3, 5, new, 2 * new])}
        settings: dict[str, Any] = {"eps": rng.choice([1e-3, 0.1])}
        if alg != "origin":
            settings["alg_temp"] = rng.choice([None, 0.0, 0.5])
        expected = plain_dream(net, mask, prompt, new, alg=alg, seed=seed, **{"alg_temp": None} | settings, **request)
        assert_decodes(model, prompt, new, samplers.create(alg, **settings), expected, seed=seed, **request)


def inverse(weights: np.ndarray, number: float) -> int:
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def group_ratio(p: np.ndarray, q: np.ndarray, x: int, embed: np.ndarray, half: int, near: float, far: float) -> float:
    """Return GSD's acceptance probability of draft x, which may exceed 1. Ranks below `half` have no group."""
    order = np.argsort(p, kind="stable")
    rank = int(np.flatnonzero(order == x)[0])
    if rank < half:
        return p[x] / q[x]
    group = order[rank - half : rank + half]
    is_close = (abs(p[group] - p[x]) < near) & (((embed[group] - embed[x]) ** 2).sum(-1) < far)
    group = group[(group == x) | is_close]
    return p[group].sum() / q[group].sum()


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["sjd", "gsd", "scd"])
def test_draft_windows_equal_a_plain_loop(kind: str) -> None:
    rng = np.random.default_rng(0)
    best_drafts = 0
    for _ in range(100):
        width, size = int(rng.integers(2, 9)), int(rng.choice([4, 14, 16, 24]))
        logits = rng.normal(size=(width, size)) * rng.choice([0.5, 2, 5])
        p, q = softmax(logits), softmax(rng.random() * logits + rng.normal(size=(width, size)))
        # draft i is verified with the distribution of slot i; the last slot has no draft
        drafts = np.array([inverse(probs, rng.random()) for probs in q])
        best_drafts += int((drafts == p.argmax(-1))[:-1].sum())
        accept, fresh, redraw = rng.random(width), rng.random(width), rng.random(width)
        embed, half = rng.normal(size=(size, 3)) * rng.choice([0.2, 1]), int(rng.choice([1, 3, 7]))
        near, far = float(rng.choice([0.02, 0.15, 1])), float(rng.choice([0.2, 0.5, 100]))
        expected, first = [inverse(probs, number) for probs, number in zip(p, fresh, strict=True)], width - 1
        for i in range(width - 1):
            x = drafts[i]
            ratio = group_ratio(p[i], q[i], x, embed, half, near, far) if kind == "gsd" else p[i][x] / q[i][x]
            if first == width - 1 or kind == "scd":
                if accept[i] < ratio:
                    expected[i] = int(x)
                else:
                    expected[i] = inverse(np.maximum(p[i] - q[i], 0), redraw[i])
                    first = min(first, i)
        sampler: Any = {"sjd": SJD(), "scd": SCD(refresh="maximal")}.get(kind)
        sampler = sampler or GSD(group_half_width=half, p_threshold=near, d_threshold=far)
        probs, tokens = torch.tensor(p).unsqueeze(0), torch.tensor(drafts).unsqueeze(0)
        support = torch.full((size,), 1 / size, dtype=torch.float64)
        proposed = DraftDistributions(tokens, torch.tensor(q).unsqueeze(0), torch.arange(width).unsqueeze(0), support)
        drafted = (torch.arange(width) < width - 1).unsqueeze(0)
        window = DraftWindow(probs, proposed, draw(probs, torch.tensor(fresh).unsqueeze(0)), torch.tensor(embed))
        numbers = torch.tensor(np.stack((accept, redraw), -1)).unsqueeze(0)
        verified = verify(window, drafted, sampler.accept(window), numbers, sampler.refresh, sampler.resamples)
        assert verified.tokens[0].tolist() == expected and int(verified.accepted) == first
    assert best_drafts > 20


TREES = [
    [(0,) * depth for depth in range(1, 5)],
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)],
    [(i,) for i in range(6)] + [(i, j) for i in range(3) for j in range(4)],
]


def test_draft_trees_equal_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    ended = {"empty": 0, "leaf": 0, "rejected": 0}
    for case in range(120):
        size, paths, drawn = int(rng.choice([4, 8, 16])), TREES[case % 3], case % 2 == 0
        tree = Tree(tuple(paths))
        nodes = [(), *tree.paths]
        p, q = (softmax(rng.normal(size=(len(nodes), size)) * rng.choice([0.5, 3, 6])) for _ in range(2))
        if case % 5 == 0:  # zeros, like after a top-k filter
            p = np.where(p >= np.sort(p, -1)[:, -2:-1], p, 0)
            p /= p.sum(-1, keepdims=True)
        tokens = rng.integers(size, size=len(nodes))
        embed, k = rng.normal(size=(size, 3)), int(rng.choice([0, 1, 2, 4, size, 1000]))
        limit = float(rng.choice([0, 0.05, 0.4, 1, 2, 5]))
        uniform = rng.random((tree.depth + 1, tree.children.shape[1] + 1))
        node, probs, expected = 0, p[0], [int(tokens[0])]
        for depth in range(tree.depth + 1):
            children = [child for child in tree.children[node].tolist() if child >= 0]
            token_ids = tokens[children].tolist()
            numbers = uniform[depth][: len(children)].tolist()
            child, probs = plain_node(p[node], q[node], token_ids, numbers, embed, k, limit, drawn)
            if child < 0:
                ended["leaf" if not children else "empty" if np.allclose(probs, 1 / size) else "rejected"] += 1
                break
            node = children[child]
            expected.append(token_ids[child])
        rule = LanternRule(torch.tensor(embed), k, limit <= 1, limit, drawn)
        rows = [torch.tensor(x).unsqueeze(0) for x in (tokens, p, q)]
        actual = walk(tree, *rows, rule, torch.tensor(uniform).unsqueeze(0), accepts_matching_draw=False)
        accepted = int(actual.accepted)
        assert [int(tokens[0]), *actual.tokens[0, :accepted].tolist()] == expected
        np.testing.assert_allclose(normalize(actual.weights)[0].numpy(), probs, atol=1e-9)
        assert int(actual.tokens[0, accepted]) == inverse(probs, uniform[accepted, -1])
    assert all(ended.values())
