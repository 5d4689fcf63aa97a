"""Chi-square tests against full enumeration: do samplers that verify drafts keep the model's distribution?

    python benchmarks/exactness.py [--rows 100000] [--only TEXT] [--out benchmarks/results/exactness.json]

The model is a table: it looks up the logits of the next token by the two tokens before it, and reads these through the
same key/value store, masks and queries as other models. So all answers of a few tokens can be enumerated, and sampling
is cheap; every row of a batch is one answer. Prompts of two lengths alternate in a batch, and each is tested
separately. For lossy methods (GSD, LANTERN, S2D2) the total variation distance is reported. For GSD and LANTERN an
upper bound is added: the share of rows in which the exact rule, with the same random number, would have decided
differently about a draft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import paradec
from paradec.caches.store import KeyValueStore
from paradec.core.facts import ModelFacts
from paradec.core.prompts import Prompts
from paradec.core.protocol import Commit, Proposal, decode
from paradec.core.query import Query
from paradec.models.images.grid import Grid
from paradec.models.self_drafting import SelfDrafting
from paradec.request import Request
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.causal.drafts.text import TokenRecycling
from paradec.samplers.causal.loop import CausalSampler
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import DynamicTree
from paradec.samplers.causal.window import INITS, REFRESHES, read_window
from paradec.samplers.distributions import probability, token_distribution

PROMPTS = ([2, 0], [4, 1, 3, 3])
NEGATIVE = ([1], [3, 2, 1])
FEWEST = 8
"""Expected count below which answers are pooled into one cell of the chi-square test."""


def seen_token(tokens: Tensor, sees: Tensor) -> Tensor:
    """Find the token that each column sees: [R, W], -1 for none, from `tokens` [R, T] and `sees` [R, W, T] bool. Raises
    RuntimeError if a column sees several tokens."""
    if (sees.sum(-1) > 1).any():
        raise RuntimeError("a column sees two tokens at one position")
    return torch.where(sees, tokens.unsqueeze(1), -1).amax(-1)


class TableModel:
    """Causal model of order two: the logits of the next token depend only on the last two tokens.

    Args:
        table: logits [V + 1, V, V] by (token before the last, V if there is none; last token; next token).
        embedding: [V, d], for methods that compare tokens by their embeddings.
    """

    tokenizer, default_max_new_tokens, default_block_length = None, 4, None
    pads = supports_store = supports_visibility = True

    def __init__(self, table: Tensor, embedding: Tensor | None = None):
        self.table, self.embedding = table, embedding
        self.facts = ModelFacts(table.shape[-1], topology="causal", prediction="shifted", name="table")
        self.device, self.dtype = table.device, table.dtype

    @classmethod
    def random(cls, vocab: int, seed: int, sharpness: float = 1.0, near: TableModel | None = None) -> TableModel:
        """Build a model with normally distributed logits. With `near`, they are averaged with that model's logits, as
        for a drafter."""
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(vocab + 1, vocab, vocab, generator=generator, dtype=torch.float64) * sharpness
        embedding = torch.rand(vocab, 3, generator=generator, dtype=torch.float64)
        return cls(table if near is None else (table + near.table) / 2, embedding)

    def token_embeddings(self) -> Tensor | None:
        """Return the embedding [V, d], or None."""
        return self.embedding

    codebook = token_embeddings

    def make_store(self, rows: int, length: int) -> KeyValueStore:
        """Make a store; this model uses only the tokens recorded in it."""
        return KeyValueStore(rows, length, self.device)

    def __call__(self, query: Query, store: KeyValueStore | None = None) -> Tensor:
        """Compute logits [R, W, V] of the columns `query.wanted` [R, W]."""
        if store is None:
            tokens, keys = query.tokens, query.positions
            mask = torch.ones(1, 1, 1, tokens.shape[1], dtype=torch.bool) if query.valid is None else query.valid
            mask = mask.view(len(mask), 1, 1, -1)
        else:
            mask, keys = store.bind(query).visible(query)
            tokens = store.token_at_write[query.store_rows, : min(query.store.visible_length, store.length)]
            if query.visible is not None:
                tokens = torch.cat((tokens, query.tokens), 1)
        sees = (keys.unsqueeze(-2) == query.positions.unsqueeze(-1) - 1).expand(-1, -1, tokens.shape[1])
        if mask is not None:
            sees = sees & mask.squeeze(1)
        if query.valid is not None:
            sees = sees & query.valid.unsqueeze(-1)
        before = seen_token(tokens, sees)
        logits = self.table[torch.where(before < 0, len(self.table) - 1, before), query.tokens]
        return logits.take_along_dim(query.wanted.unsqueeze(-1), 1)


class OwnDrafter(TableModel):
    """Causal model that drafts for itself: it fills a block of mask tokens from the token before the block. The mask
    token is the last of the vocabulary.

    Args:
        drafts: logits [V, W, V] by (token before the block; index in the block; drafted token).
        blocks: make the model block-causal. Its queries then hold masks next to the tokens that are verified.
    """

    def __init__(self, table: Tensor, drafts: Tensor, blocks: bool = False):
        super().__init__(table)
        self.drafts = drafts
        mask: dict[str, Any] = {"mask_token_id": table.shape[-1] - 1}
        if blocks:
            mask |= {"topology": "block_causal", "prediction": "same", "block_length": drafts.shape[1]}
        else:
            self.self_drafting = SelfDrafting(drafts.shape[1] + 1)
        self.facts = replace(self.facts, **mask)

    @classmethod
    def near(cls, model: TableModel, seed: int, blocks: bool = False) -> OwnDrafter:
        """Build a drafter whose draft logits are similar to the model's."""
        vocab, generator = model.facts.vocab_size, torch.Generator().manual_seed(seed)
        noise = torch.randn(vocab, 4, vocab, generator=generator, dtype=torch.float64)
        return cls(model.table, (model.table[:vocab].mean(0).unsqueeze(1) + noise) / 2, blocks)

    def __call__(self, query: Query, store: KeyValueStore | None = None) -> Tensor:
        assert store is not None and query.store is not None and query.wanted is not None
        if query.store.slots is None:
            first = query.tokens[:, :1]
            return self.drafts[first, torch.arange(query.wanted.shape[1])]
        if query.visible is None:
            return super().__call__(query, store)
        mask, keys = store.bind(query).visible(query)
        stored = store.token_at_write[query.store.rows, : query.store.visible_length]
        tokens, positions = torch.cat((stored, query.tokens), 1), query.positions.unsqueeze(-1)
        context = [seen_token(tokens, (keys.unsqueeze(-2) == positions - back) & mask.squeeze(1)) for back in (2, 1)]
        before = torch.where(context[0] < 0, len(self.table) - 1, context[0])
        return self.table[before, context[1].clamp(min=0)].take_along_dim(query.wanted.unsqueeze(-1), 1)


class BlockTable(TableModel):
    """Block-causal masked model. A column that sees the token right before it gets the table's logits. Other columns
    get `drafts` [V, W, V], by (nearest visible token before the column; its distance - 2; drafted token)."""

    def __init__(self, table: Tensor, drafts: Tensor):
        super().__init__(table)
        self.drafts = drafts
        facts = {"topology": "block_causal", "block_length": drafts.shape[1], "mask_token_id": len(table) - 2}
        self.facts = ModelFacts(table.shape[-1], prediction="same", name="table", **facts)

    def __call__(self, query: Query, store: KeyValueStore | None = None) -> Tensor:
        assert query.visible is not None and query.wanted is not None
        tokens, place = query.tokens, query.positions
        seen = query.visible & (tokens != self.facts.mask_id).unsqueeze(1)
        if query.valid is not None:
            seen = seen & query.valid.unsqueeze(1)
        distances = range(1, self.drafts.shape[1] + 2)
        before = [seen_token(tokens, seen & (place.unsqueeze(1) == place.unsqueeze(2) - back)) for back in distances]
        logits = self.table[torch.where(before[1] < 0, len(self.table) - 1, before[1]), before[0].clamp(min=0)]
        known = before[0] >= 0
        for back, token in enumerate(before[1:]):
            logits = torch.where((~known & (token >= 0)).unsqueeze(-1), self.drafts[token.clamp(min=0), back], logits)
            known = known | (token >= 0)
        return logits.take_along_dim(query.wanted.unsqueeze(-1), 1)


def exact_distribution(
    model: TableModel, prompt: list[int], new: int, request: Request, negative: list[int], grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """Enumerate all N answers [N, L] int64 and compute their probabilities [N] float64. L is `new`, or the grid's
    length."""
    vocab = model.facts.vocab_size
    layout = [-1] * new if grid is None else grid.layout.tolist()
    cells = range(vocab) if grid is None else grid.image_ids
    possible = torch.tensor(list(itertools.product(*[cells if forced < 0 else [forced] for forced in layout])))
    probabilities = torch.ones(len(possible), dtype=torch.float64)
    branches = [prompt] if request.guidance_scale == 1 else [prompt, negative]
    for index in (i for i, forced in enumerate(layout) if forced < 0):
        logits = []
        for start in branches:
            tokens = torch.cat((torch.tensor(start).expand(len(possible), -1), possible), 1)[:, : len(start) + index]
            before = tokens[:, -2] if tokens.shape[1] > 1 else torch.full((len(possible),), vocab)
            logits.append(model.table[before, tokens[:, -1]])
        mixed = logits[0]
        if len(branches) == 2:
            mixed = logits[1] + request.guidance_scale * (logits[0] - logits[1])
        allowed = None if grid is None else grid.allowed(vocab)
        if request.suppress_tokens:
            allowed = torch.ones(vocab, dtype=torch.bool)
            allowed[list(request.suppress_tokens)] = False
        probabilities *= probability(token_distribution(mixed, request, allowed), possible[:, index])
    return possible, probabilities


def fit_to_vocab(prompt: list[int], model: TableModel) -> list[int]:
    """Map a prompt into a model's vocabulary, by token ids modulo its size."""
    return [token % model.facts.vocab_size for token in prompt]


def sample(
    sampler: CausalSampler, model: TableModel, rows: int, seed: int, new: int = 4, **request: Any
) -> tuple[Tensor, CausalState]:
    """Sample answers [rows, L] int64 to alternating prompts; also return the final state."""
    prompts = [fit_to_vocab(PROMPTS[i % 2], model) for i in range(rows)]
    if request.get("guidance_scale", 1) != 1:
        request["negative_prompt"] = Prompts(
            [fit_to_vocab(NEGATIVE[i % 2], model) for i in range(rows)], False, [0] * rows
        )
    grid = request.get("grid")
    request |= {} if grid is not None else {"max_new_tokens": new}
    state = sampler.start(model, Prompts(prompts, False, [0] * rows), seed=seed, **request)
    decode(sampler, model, state)
    column = torch.as_tensor(state.prompt_length)[:, None] + torch.arange(new if grid is None else grid.length)
    return state.canvas.gather(1, column), state


def count_answers(answers: Tensor, possible: Tensor, base: int) -> np.ndarray:
    """Count how often each answer in `possible` [N, L] occurs in `answers` [n, L]: [N] int64. Raises AssertionError if
    an answer is not possible."""
    digits = base ** torch.arange(possible.shape[1])
    known, order = (possible * digits).sum(1).sort()
    numbers = (answers * digits).sum(1)
    places = torch.searchsorted(known, numbers).clamp(max=len(known) - 1)
    if (known[places] != numbers).any():
        raise AssertionError("a sampled answer is not among the possible answers")
    return np.bincount(order[places].numpy(), minlength=len(possible))


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Compute the chi-square test's p-value. Cells that expect fewer than `FEWEST` answers are pooled. If an impossible
    answer occurs, p is 0."""
    expected = distribution * counts.sum()
    if counts[distribution == 0].any():
        return 0.0
    small = expected < FEWEST
    cells = [np.append(values[~small], values[small].sum()) for values in (counts, expected)]
    if cells[1][-1] < FEWEST:  # the pool itself is too small: merge it into the smallest cell
        smallest = cells[1][:-1].argmin()
        for values in cells:
            values[smallest] += values[-1]
        cells = [values[:-1] for values in cells]
    return float(stats.chisquare(*cells).pvalue) if len(cells[0]) > 1 else 1.0


def test_case(
    sampler: CausalSampler, model: TableModel, rows: int, seed: int = 0, target: float | None = None, **request: Any
) -> dict[str, Any]:
    """Sample `rows` answers to each of the two prompts and test them: p-values, total variation, forwards per answer.

    Args:
        target: temperature of the distribution to compare with; None: the request's temperature.
    """
    new = request.pop("new", 4)
    answers, state = sample(sampler, model, 2 * rows, seed, new, **request)
    grid, settings = request.get("grid"), {key: value for key, value in request.items() if key != "grid"}
    result: dict[str, Any] = {"p_values": [], "total_variation": [], "nfe": round(float(state.nfe.mean()), 4)}
    for first in range(2):
        possible, distribution = exact_distribution(
            model,
            fit_to_vocab(PROMPTS[first], model),
            new,
            Request(**{"temperature": 1.0} | settings | ({} if target is None else {"temperature": target})),
            fit_to_vocab(NEGATIVE[first], model),
            grid,
        )
        counts = count_answers(answers[first::2], possible, model.facts.vocab_size)
        result["p_values"].append(p_value(counts, distribution.numpy()))
        result["total_variation"].append(float(np.abs(counts / counts.sum() - distribution.numpy()).sum() / 2))
    return result


REQUESTS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 3": {"top_k": 3},
    "top-p 0.8": {"top_p": 0.8},
    "guidance 2": {"guidance_scale": 2.0},
    "all": {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "guidance_scale": 1.5},
}
GRID = Grid(2, 2, image_ids=(0, 1, 2, 3), row_end=4, tail=(5,))
TREES: dict[str, Any] = {
    "recursive": (2, 2),
    "without_replacement": (3, 1, 1),
    "k_seq": (2, 2),
    "naive": ((0,), (1,), (0, 0), (0, 1), (0, 0, 0)),
    "greedy": (3, 2),
}


def samplers(drafter: TableModel) -> dict[str, CausalSampler]:
    """Create every exact method, with each setting that changes how it drafts or verifies."""
    create = paradec.samplers.create
    by_name = {"token by token": create("sjd", window=1)}
    for window in (2, 4):
        by_name[f"sjd, window {window}"] = create("sjd", window=window)
    by_name["sjd, one-hot q"] = create("sjd", window=4, guess_distribution="one_hot")
    by_name["sjd, keep"] = create("sjd", window=4, refresh="keep")
    by_name["sjd, repeat"] = create("sjd", window=4, init="repeat_horizontal")
    by_name["sjd, sample"] = create("sjd", window=4, init="sample_horizontal")
    for coupling in ("gumbel", "maximal"):
        by_name[f"scd, {coupling}"] = create("scd", window=4, refresh=coupling)
    by_name["jacobi"] = create("jacobi", window=4)
    for window in (2, 4):
        by_name[f"speculative, window {window}"] = create("speculative", window=window, drafter=drafter)
    for rule, tree in TREES.items():
        by_name[f"speculative, {rule} tree"] = create("speculative", drafter=drafter, tree=tree, rule=rule)
    grown = DynamicTree(nodes=8, depth=3, top_k=3)
    by_name["speculative, dynamic tree"] = create("speculative", drafter=drafter, tree=grown, rule="naive")
    return by_name


def branching_samplers(drafter: TableModel) -> dict[str, CausalSampler]:
    """Create samplers with several drafts per slot, drafts from earlier answers, and chains that end early."""
    create = paradec.samplers.create
    return {
        "sjd_pac": create("sjd_pac", window=4, siblings=3, branching=2),
        "speculative, token recycling": create(
            "speculative", drafter=TokenRecycling(k=3, tree=(3, 2, 1)), rule="naive"
        ),
        "speculative, stop": create("speculative", window=4, drafter=drafter, stop=Unsure(0.5)),
    }


def cases() -> Iterator[tuple[str, CausalSampler, TableModel, dict[str, Any]]]:
    """Yield (name, sampler, model, request) of the whole grid."""
    model = TableModel.random(5, seed=0)
    drafter = TableModel.random(5, seed=1, near=model)
    for (name, sampler), (what, request) in itertools.product(samplers(drafter).items(), REQUESTS.items()):
        yield f"{name}; {what}", sampler, model, request
    # answers of 7 tokens with a window of 3: drafts survive several steps, and only then does a wrong q show
    long = TableModel.random(3, seed=4, sharpness=2.0)
    for refresh, init in itertools.product(REFRESHES, INITS[:3]):
        sampler = paradec.samplers.create("sjd", window=3, refresh=refresh, init=init)
        yield f"sjd, {refresh}, {init}; seven words", sampler, long, {"new": 7}
    image = TableModel.random(6, seed=2)
    small = TableModel.random(6, seed=3, near=image)
    for init, what in itertools.product(INITS, ("temperature 1", "guidance 2")):
        sampler = paradec.samplers.create("sjd", window=4, init=init)
        yield f"sjd, {init}; image, {what}", sampler, image, REQUESTS[what] | {"grid": GRID}
    for name in ("scd, gumbel", "speculative, window 4", "speculative, without_replacement tree"):
        yield f"{name}; image, temperature 1", samplers(small)[name], image, {"grid": GRID}
    causal, block_causal = (OwnDrafter.near(TableModel.random(6, seed=6), seed=7, blocks=b) for b in (False, True))
    for (what, request), rule in itertools.product(REQUESTS.items(), ("ratio", "match", "threshold")):
        settings = {"rule": "match", "threshold": 0.4} if rule == "threshold" else {"rule": rule}
        sampler = paradec.samplers.create("self_speculative", **settings)
        request = request | {"suppress_tokens": [5]}  # the last token is the mask, which is never drawn
        yield f"self_speculative, {rule}; {what}", sampler, causal, request
        if request.get("guidance_scale", 1) == 1:
            yield f"self_speculative, {rule}, blocks of one; {what}", sampler, block_causal, request
    for what, request in REQUESTS.items():
        if request.get("guidance_scale", 1) == 1:
            sampler = paradec.samplers.create("s2d2", route="span")
            yield (
                f"s2d2, always verified; {what}",
                sampler,
                block_table(),
                {"temperature": 1.0, "suppress_tokens": [5]} | request,
            )
    for (name, sampler), (what, request) in itertools.product(branching_samplers(drafter).items(), REQUESTS.items()):
        yield f"{name}; {what}", sampler, model, request


def block_table() -> BlockTable:
    """Build a model of five tokens and the mask; its drafts have logits similar to the table's."""
    table, generator = TableModel.random(6, seed=8).table, torch.Generator().manual_seed(9)
    noise = torch.randn(6, 4, 6, generator=generator, dtype=torch.float64)
    return BlockTable(table, (table[:6].mean(0).unsqueeze(1) + noise) / 2)


def watch_deviations(sampler: CausalSampler) -> tuple[CausalSampler, list[np.ndarray]]:
    """Wrap a sampler so that every step appends to a list the rows in which it decided about a draft differently than
    the exact rule p / q. Returns the wrapped sampler and the list."""
    deviating: list[np.ndarray] = []

    class Watched(type(sampler)):  # type: ignore[misc]
        def commit(self, state: CausalState, proposal: Proposal) -> Commit:
            window, _ = read_window(state, proposal)
            drafted = torch.nn.functional.pad(proposal.available[:, 1:], (0, 1))
            noise = proposal.quantities["uniform"][..., 0]
            accepted, exact = noise < self.accept(window), noise < window.ratio().clamp(max=1)
            verified = (accepted & drafted).long().cumprod(1).roll(1, 1)
            verified[:, 0] = 1  # a draft is only looked at if all drafts before it were accepted
            deviating.append(proposal.rows[((accepted != exact) & drafted & verified.bool()).any(1).numpy()])
            return super().commit(state, proposal)

    return Watched(**{key: getattr(sampler, key) for key in sampler.settings()}), deviating


def lossy() -> Iterator[tuple[str, CausalSampler, TableModel]]:
    """Yield (name, sampler, model) of GSD and LANTERN."""
    model = TableModel.random(5, seed=0)
    create = paradec.samplers.create
    yield "gsd, half width 1", create("gsd", window=4, group_half_width=1), model
    yield "gsd, half width 2", create("gsd", window=4, group_half_width=2), model
    yield (
        "gsd, half width 2, uniform q",
        create("gsd", window=4, group_half_width=2, guess_distribution="uniform"),
        model,
    )
    for distribution in ("one_hot", "uniform"):
        for delta in (0.0, 0.02, 0.1):
            sampler = create("lantern", window=4, k=2, delta=delta, guess_distribution=distribution)
            yield f"lantern, {distribution} q, delta {delta}", sampler, model
        for lam in (1.0, 1.5, 5.0):
            sampler = create("lantern++", window=4, k=2, lam=lam, guess_distribution=distribution)
            yield f"lantern++, {distribution} q, lambda {lam}", sampler, model


def partly_verified() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (name, sampler, request) of S2D2, with its presets and with drafts that are always or never verified. It
    verifies with the probabilities of temperature 1 even at temperature 0; answers are compared with temperature 1."""
    create = paradec.samplers.create
    for temperature, name in itertools.product((0, 1), paradec.samplers.get("s2d2").presets):
        request = {"temperature": float(temperature)}
        yield f"s2d2, preset {name}, temperature {temperature}", create("s2d2", preset=name), request
    yield "s2d2, always verified, one step a block", create("s2d2", route="span", block_steps=1), {"temperature": 1.0}
    yield "s2d2, never verified", create("s2d2", route="span", min_span=99), {"temperature": 1.0}


def bias(sampler: CausalSampler, model: TableModel, rows: int, seed: int = 0) -> dict[str, Any]:
    """Measure the total variation distance of a lossy method's answers, and an upper bound of it."""
    method, deviating = watch_deviations(sampler)
    result = test_case(method, model, rows, seed)
    share = len(np.unique(np.concatenate(deviating))) / (2 * rows)
    return result | {"total_variation_bound": share}


def summary(exact: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the p-values: the smallest, with Bonferroni's correction, and a test that they are uniform."""
    p_values = [p for case in exact for p in case["p_values"]]
    return {
        "tests": len(p_values),
        "cases": f"{len(exact)} of {sum(1 for _ in cases())}",
        "fewest_answers_per_test": min((case["answers_per_test"] for case in exact), default=None),
        "smallest_p": min(p_values, default=None),
        "smallest_p_corrected": min(1.0, min(p_values, default=1.0) * max(1, len(p_values))),
        "kolmogorov_smirnov_p": float(stats.kstest(p_values, "uniform").pvalue) if p_values else None,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run all cases and write the result."""
    from provenance import write_result

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000, help="answers per prompt and case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "exactness.json")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    exact: list[dict[str, Any]] = []
    biased: list[dict[str, Any]] = []

    def record(name: str, group: list[dict[str, Any]], case: dict[str, Any]) -> None:
        group.append({"case": name} | case | {"answers_per_test": options.rows})
        print(group[-1], flush=True)
        # write after every case, as a run may be interrupted
        write_result(options.out, {"summary": summary(exact), "exact": exact, "lossy": biased})

    for number, (name, sampler, model, request) in enumerate(cases()):
        if options.only in name:
            record(name, exact, test_case(sampler, model, options.rows, seed=number, **request))
    for name, sampler, model in lossy():
        if options.only in name:
            record(name, biased, bias(sampler, model, options.rows))
    for name, sampler, request in partly_verified():
        if options.only in name:
            request = request | {"suppress_tokens": [5]}
            record(name, biased, test_case(sampler, block_table(), options.rows, target=1.0, **request))
    print(json.dumps(summary(exact), indent=1))
    if summary(exact)["smallest_p_corrected"] < 0.01:
        raise SystemExit("a sampler that should be exact is not")


if __name__ == "__main__":
    main()
