"""Every registered sampler at every temperature: no warning, no excluded token, greedy in the limit."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import facts_of, supported_fields
from drafters import exactness
from images import IMAGE_MODELS, image_model, tiny_llamagen
from small_models import similar_model, tiny_llama, wrap_causal
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.kernels.token_stats import draw
from paradec.models.images.base import ImageModel
from paradec.models.self_drafting import SelfDrafting
from paradec.request import Request
from paradec.samplers.causal.trees import DynamicTree
from paradec.samplers.distributions import token_distribution
from paradec.samplers.masked.rules.learn2pd_filter import BlockFilter, FilterFacts, save_filter

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
TEMPERED = [name for name in MASKED if "temperature" not in samplers.get(name).unsupported]
DRAFTING = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]
PICTURES = [name for name in DRAFTING if "image" in samplers.get(name).models]
TEMPERATURES = (0.05, 0.2, 1.0, 2.0)
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.8}, {"top_k": 3}, {"top_p": 0.9, "top_k": 4})
COLD = 1e-6
NEW = 4


class Table:
    """A masked model whose logits are rows of a random table. Requests exclude `suppressed`, the even token ids."""

    tokenizer, pads, supports_store, supports_visibility = None, True, False, True
    default_max_new_tokens, default_block_length = NEW, None
    device = torch.device("cpu")

    def __init__(self, vocab: int, dtype: torch.dtype, scale: float, **facts: Any) -> None:
        self.facts = ModelFacts(**{"vocab_size": vocab, "mask_token_id": vocab - 1, "name": "the table"} | facts)
        self.dtype = dtype
        uniform = torch.rand(31, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
        self.table = ((2 * uniform - 1) * scale).to(dtype)
        self.suppressed = list(range(0, vocab, 2))

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        rows, count = query.wanted.shape
        context = ((query.tokens + 1) * (query.positions + 3)).unsqueeze(1).expand(rows, query.tokens.shape[1], -1)
        if query.visible is not None:
            context = context * query.visible
        sums = context.sum(-1).gather(1, query.wanted)
        return self.table[(sums + query.positions.gather(1, query.wanted)) % len(self.table)]


@lru_cache
def table(vocab: int = 50, dtype: torch.dtype = torch.float64, scale: float = 8.0, name: str = "threshold") -> Table:
    return Table(vocab, dtype, scale, **facts_of(name, 4))


@pytest.fixture(scope="module")
def filter_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("filter") / "filter.safetensors"
    torch.manual_seed(0)
    save_filter(path, FilterFacts("block", "the table", 50, 4, ("none",), threshold=0.5), BlockFilter(4))
    return str(path)


def constant_temperature(name: str) -> dict[str, Any]:
    return {"final_temperature": None} if "final_temperature" in samplers.get(name).settings() else {}


def decode_tokens(name: str, model: Table, filter_file: str, block: int, **request: Any) -> Tensor:
    """Return the new tokens [2, NEW] of two rows. Warnings are errors."""
    settings = {"filter": filter_file, "allow_mismatch": True} if name == "learn2pd" else constant_temperature(name)
    arguments = {"max_new_tokens": NEW, "seed": 3, "suppress_tokens": model.suppressed} | request
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* no effect at temperature 0")
        arguments |= {"sampler": samplers.create(name, **settings), "blocks": paradec.FixedBlocks(block)}
        out = paradec.generate(model, [[1, 2, 3], [4, 5, 6]], **arguments)
    tokens = out.new_tokens
    assert (tokens % 2 == 1).all() and (tokens != model.facts.mask_token_id).all(), "an excluded token was drawn"
    return tokens


DISTRIBUTION_FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.8}, {"top_k": 6})
DRAWS = 100_000
CASES = len(DISTRIBUTION_FILTERS) * 3 * len(MASKED + DRAFTING)


def filtered_distribution(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 10**9) -> Tensor:
    """Return softmax(logits / temperature) [V] after top-k and top-p, by a plain loop."""
    weights = [math.exp((float(x) - float(logits.max())) / temperature) for x in logits]
    order, before = sorted(range(len(weights)), key=lambda token: -weights[token]), 0.0
    result = torch.zeros(len(weights), dtype=torch.float64)
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p * math.fsum(weights):
            result[token] = weights[token]
        before += weights[token]
    return result / result.sum()


class ConstantTable(Table):
    embedding = torch.rand(50, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def __init__(self, **facts: Any) -> None:
        super().__init__(50, torch.float64, 3.0, **facts)

    def token_embeddings(self) -> Tensor:
        return self.embedding

    codebook = token_embeddings

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        return self.table[0].repeat(*query.wanted.shape, 1)


UNCHANGED: dict[str, dict[str, Any]] = {
    "credit": {"fusion": 0.0},
    "union": {"rules": ("threshold", "localleap")},
    **{name: {"window": 1} for name in ("gsd", "lantern", "lantern++")},
}
"""Settings with which lossy methods keep the model's distribution."""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:delimiters=")
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("name", TEMPERED + [name for name in PICTURES if name != "zipar"])  # zipar needs a grid
def test_draws_have_the_filtered_distribution(name: str, temperature: float, filter_file: str) -> None:
    """Masked samplers use blocks of one position. The other samplers draft and verify."""
    causal = {"mask_token_id": None, "topology": "causal", "prediction": "shifted"}
    model: Any = ConstantTable(**(facts_of(name, 1) if name in MASKED else causal))
    settings = {"filter": filter_file, "allow_mismatch": True} if name == "learn2pd" else constant_temperature(name)
    sampler = with_drafter(name, lambda: table_drafter(causal), **settings, **UNCHANGED.get(name, {}))
    logits = model.table[0].clone()
    if name == "sjd_pac":  # needs a store: a Llama whose logits do not depend on the tokens
        module = tiny_llama(layers=1)
        module.get_input_embeddings().weight.data[:] = module.get_input_embeddings().weight.data[0]
        model, logits = wrap_causal(module), module(torch.tensor([[0]])).logits[0, 0].detach()
    if name in MASKED:
        logits[model.facts.mask_token_id] = -torch.inf
    request: dict[str, Any] = {"sampler": sampler, "temperature": temperature, "max_new_tokens": 50, "seed": 3}
    request |= {"block_length": 1} if name in MASKED else {}
    rows = DRAWS // 50 // (20 if name == "lpd" else 1)  # lpd is slow: it orders positions row by row
    for filters in DISTRIBUTION_FILTERS:
        tokens = paradec.generate(model, [[1, 2]] * rows, **request, **filters).new_tokens
        p = filtered_distribution(logits, temperature, **filters)
        assert exactness.p_value(tokens.flatten().bincount(minlength=len(p)).numpy(), p.numpy()) > 0.01 / CASES, filters
        assert torch.equal(paradec.generate(model, [1, 2], **request, **filters).new_tokens[0], tokens[0])


def table_drafter(causal: dict[str, Any]) -> ConstantTable:
    drafter = ConstantTable(**causal)
    drafter.table = (drafter.table + drafter.table.roll(1, 1)) / 2
    return drafter


@pytest.mark.thinned
@pytest.mark.parametrize("name", TEMPERED)
def test_masked_samplers_decode_at_every_temperature(name: str, filter_file: str) -> None:
    drawn = [
        decode_tokens(name, table(name=name), filter_file, 4, temperature=temperature, **filters)
        for temperature, chosen in zip(TEMPERATURES, FILTERS, strict=True)
        for filters in ([{}, chosen] if chosen else [{}])
    ]
    assert any(not torch.equal(drawn[0], other) for other in drawn[1:])
    # above 8,192 tokens, float32 logits take the chunked float32 path of the token statistics
    large = table(9001, torch.float32, 40.0, name)
    decode_tokens(name, large, filter_file, 2, temperature=0.2, max_new_tokens=2, **FILTERS[3])


@pytest.mark.thinned
@pytest.mark.parametrize("name", TEMPERED)
def test_masked_samplers_are_greedy_near_temperature_0(name: str, filter_file: str) -> None:
    blocks = (1, 4) if samplers.get(name).needs.score_from == "raw" and name != "s2d2" else (1,)  # s2d2 draws
    for block, filters in itertools.product(blocks, FILTERS[::3]):
        greedy, cold = (
            decode_tokens(name, table(name=name), filter_file, block, temperature=temperature, **filters)
            for temperature in (0.0, COLD)
        )
        assert torch.equal(greedy, cold), (block, filters)


INEFFECTIVE: tuple[dict[str, Any], ...] = ({}, {"seed": 2}, {"top_p": 0.3}, {"top_k": 2})
DRAWING = ("random", "origin", "maskgit", "recap", "lpd", "s2d2")
"""Samplers that also draw at temperature 0: positions, or the acceptance of drafts."""


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_fields_without_effect_at_temperature_0_are_warned_of(name: str, filter_file: str) -> None:
    settings = {"filter": filter_file, "allow_mismatch": True} if name == "learn2pd" else {}
    sampler, outputs = samplers.create(name, **settings), []
    rows = [[1, 2], [4, 5, 6]]
    for changes in INEFFECTIVE:
        arguments = {"seed": 1} | changes
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = paradec.generate(
                table(name=name), rows, sampler=sampler, max_new_tokens=8, block_length=4, **arguments
            )
        filters = {} if sampler.needs.score_from == "sampled" else changes
        ineffective = [f"{field}={value}" for field, value in filters.items() if field != "seed"]
        ineffective += [f"seed={arguments['seed']}"] * (name not in DRAWING)
        messages = [str(warning.message) for warning in caught if "temperature 0" in str(warning.message)]
        assert [message.split(" ha")[0] for message in messages] == [", ".join(ineffective)] * bool(ineffective)
        outputs.append((out.sequences.tolist(), out.nfe))
        is_drawn = "seed" in changes and name in DRAWING
        assert is_drawn == (outputs[-1] != outputs[0]) or sampler.needs.score_from == "sampled"


def test_each_request_warns_once() -> None:
    arguments = {"top_p": 0.9, "seed": 3, "max_new_tokens": 2}
    many = [{"prompt": [1, 2]}] * 3
    entries: list[Callable[[], Any]] = [
        lambda: paradec.generate(table(), [1, 2], **arguments),
        lambda: list(paradec.generate_many(table(), many, batch_size=2, **arguments)),
        lambda: paradec.generate(table(), [1, 2], preset=paradec.Request(temperature=0.0, top_k=3), **arguments),
    ]
    for entry in entries:
        with pytest.warns(UserWarning, match="^top_p=0.9, seed=3 have no effect at temperature 0") as caught:
            entry()
        assert len(caught) == 1
    custom = type("Own", (samplers.get("threshold"),), {})()
    quiet: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"top_p": 1.0, "seed": None},
        {"sampler": custom, "top_p": None},
    ]
    quiet.append({"sampler": "entropy_bound", "seed": None})  # its scores use the filtered distribution
    for changes in quiet:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            paradec.generate(table(), [1, 2], **arguments | changes)
    drawn = {"suffix": "uniform:2:1", "block_length": 1, "max_new_tokens": 4, "seed": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paradec.generate(paradec.load(), "Sort: pear fig", **drawn)
    causal = wrap_causal(tiny_llama())
    with pytest.warns(UserWarning, match="^top_k=3 has no effect at temperature 0") as caught:
        paradec.generate(causal, [1, 2], sampler="sjd", temperature=0, top_k=3, seed=1, max_new_tokens=2)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("vocab", "dtype", "scale"),
    [(50, torch.float32, 3e38), (9001, torch.float32, 3e38), (50, torch.float64, 1.7e308)],
    ids=["float32", "float32, large", "float64"],
)
@pytest.mark.parametrize("name", TEMPERED)
def test_masked_samplers_take_extreme_logits(name: str, vocab: int, dtype: Any, scale: float, filter_file: str) -> None:
    model = table(vocab, dtype, scale, name)
    decode_tokens(name, model, filter_file, 2, temperature=0.5, max_new_tokens=2, **FILTERS[3])
    greedy, cold = (decode_tokens(name, model, filter_file, 1, temperature=t, max_new_tokens=2) for t in (0.0, COLD))
    assert torch.equal(greedy, cold)


@pytest.mark.parametrize("name", [name for name in MASKED if hasattr(samplers.get(name), "alg_temp")])
@pytest.mark.parametrize("alg_temp", [COLD, 1e-3, 5.0])
def test_positions_are_drawn_within_the_steps(name: str, alg_temp: float) -> None:
    prompts, request = [[1, 2, 3]], {"max_new_tokens": 16, "steps": 4, "block_length": 16, "seed": 0}
    out = paradec.generate(table(), prompts, sampler=samplers.create(name, alg_temp=alg_temp), **request)
    assert out.nfe <= 4
    if alg_temp == COLD:
        top = paradec.generate(table(), prompts, sampler=samplers.create(name), **request)
        assert torch.equal(out.sequences, top.sequences)
    model = Table(50, torch.float64, 8.0)
    model.facts = dataclasses.replace(model.facts, eos_token_ids=tuple(range(0, 49, 2)))
    options = {"confidence_eos_eot_inf": True, "eos_early_stop": False}
    out = paradec.generate(model, prompts, sampler=samplers.create(name, alg_temp=alg_temp), **options, **request)
    assert out.nfe <= 4


def broken_table(vocab: int, dtype: torch.dtype, kind: str, **facts: Any) -> Table:
    """Create a table with invalid logits: nan or inf for token 5, or -inf for all tokens or all allowed ones."""
    model = Table(vocab, dtype, 8.0, **facts)
    if kind == "allowed":
        model.table[:, 1::2] = -torch.inf
    elif kind == "-inf":
        model.table[:] = -torch.inf
    else:
        model.table[:, 5] = float(kind)
    return model


KINDS = ("nan", "inf", "-inf", "allowed")
SIZES = ((50, torch.float64), (9001, torch.float32))


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_broken_logits_are_reported_at_every_temperature(name: str, filter_file: str) -> None:
    for index, (kind, (vocab, dtype)) in enumerate(itertools.product(KINDS, SIZES)):
        model = broken_table(vocab, dtype, kind, **facts_of(name, 4))
        request = {"temperature": (0.0, 0.2, 1.0)[index % 3], "max_new_tokens": 2} | FILTERS[index % 4]
        with pytest.raises(FloatingPointError, match="NaN or infinite logits for row 0 at its step 0"):
            decode_tokens(name, model, filter_file, 2, **supported_fields(name, request))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [60, 9001])
def test_token_distributions_at_every_temperature(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(3, 2, vocab, generator=generator)).to(dtype)
    logits[0, 0, 3:] = -torch.inf
    allowed = torch.rand(vocab, generator=generator) < 0.7
    allowed[:2] = True
    uniform = torch.tensor([1e-300, 0.3, 0.7, 1 - 2**-53], dtype=torch.float64)
    temperatures = (COLD, *TEMPERATURES) if vocab == 60 else (0.05, 2.0)
    for temperature, filters in itertools.product(temperatures, FILTERS):
        request = Request(**{"temperature": temperature} | filters)
        for tokens_allowed in (None, allowed):
            distribution = token_distribution(logits, request, tokens_allowed)
            for row, probabilities in zip(logits.double().flatten(0, 1), distribution.flatten(0, 1), strict=True):
                z = row if tokens_allowed is None else row.masked_fill(~tokens_allowed, -torch.inf)
                z = (z - z.max()) / temperature
                keep = probabilities > 0
                # tokens that tie with the k-th are not filtered
                assert not (keep & (z == -torch.inf)).any() and (z > z[keep].min()).sum() < filters.get("top_k", vocab)
                p = z.masked_fill(~keep, -torch.inf).exp()
                rel = 1e-12 if dtype == torch.float64 else 2e-5
                torch.testing.assert_close(probabilities.double(), p / p.sum(), rtol=rel, atol=1e-33)
                p = z.exp() / z.exp().sum()
                # rounding at the end of the nucleus may add or remove one token
                if "top_p" in filters and "top_k" not in filters:
                    assert p[keep].sum() > filters["top_p"] - 1e-6
                    assert p[keep].sum() - p[keep].min() <= filters["top_p"] + 1e-6
                elif not filters:
                    assert p[~keep].sum() < 1e-30
                assert keep[draw(probabilities.expand(len(uniform), -1), uniform)].all()


def with_drafter(name: str, make: Callable[[], Any], **settings: Any) -> Any:
    if getattr(samplers.get(name), "needs_drafter", False):
        settings["drafter"] = make()
    return samplers.create(name, **settings)


class CausalTable(Table):
    def __call__(self, query: Query, store: Any = None) -> Tensor:
        return self.table[query.positions.gather(1, query.wanted) % len(self.table)]


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in PICTURES if samplers.get(name).lossless and name != "sjd_pac"])
def test_broken_distributions_are_reported_at_every_temperature(name: str) -> None:
    causal = {"mask_token_id": None, "topology": "causal", "prediction": "shifted"}
    for index, (kind, (vocab, dtype), temperature) in enumerate(itertools.product(KINDS, SIZES, (0.0, 0.2))):
        model = CausalTable(vocab, dtype, 8.0, **causal)
        sampler = with_drafter(name, lambda model=model: model)
        request = {"max_new_tokens": 3, "temperature": temperature, "seed": 0, "suppress_tokens": model.suppressed}
        request |= FILTERS[index % 4]
        paradec.generate(model, [1, 2], sampler=sampler, **request)
        model.table = broken_table(vocab, dtype, kind).table
        with pytest.raises(FloatingPointError, match="NaN or infinite logits for row 0 at its step 0"):
            paradec.generate(model, [1, 2], sampler=sampler, **request)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [None, (2, 1), DynamicTree(5, 2, 3)], ids=["chain", "tree", "dynamic tree"])
def test_a_broken_drafter_is_reported(kind: str, tree: Any) -> None:
    model, drafter = wrap_causal(), wrap_causal(tiny_llama(1))
    value = float("-inf" if kind == "allowed" else kind)
    stride = {"allowed": 2, "-inf": 1}.get(kind, 12)

    def break_logits(module: Any, args: Any, output: Any) -> None:
        output.logits[..., ::stride] = value

    drafter.module.register_forward_hook(break_logits)
    rule = {"rule": "naive"} if isinstance(tree, DynamicTree) else {}
    sampler = samplers.create("speculative", drafter=drafter, tree=tree, **rule)
    for temperature in (0.0, 1.0):
        request = {"max_new_tokens": 5, "temperature": temperature, "suppress_tokens": [1, 3, 5, 7, 9, 11]}
        with pytest.raises(FloatingPointError, match="the drafter returned NaN or infinite logits"):
            paradec.generate(model, [3, 1], sampler=sampler, seed=0, **request)


@lru_cache
def llamagen(seed: int = 0) -> ImageModel:
    return tiny_llamagen(seed=seed, grid=2)


def decode_codes(name: str, **request: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        request |= {"sampler": with_drafter(name, lambda: llamagen(1)), "seed": 0, "output_type": "latent"}
        return paradec.generate_images(llamagen(), class_labels=[3], **request).codes


@pytest.mark.thinned
@pytest.mark.parametrize("name", PICTURES)
def test_image_samplers_at_every_temperature(name: str) -> None:
    for temperature, filters in zip(TEMPERATURES, FILTERS, strict=True):
        assert decode_codes(name, temperature=temperature, **({"top_k": 0} | filters)).shape == (1, 2, 2)
    assert torch.equal(decode_codes(name, temperature=COLD), decode_codes(name, temperature=0.0))


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in DRAFTING if samplers.get(name).lossless])
def test_causal_samplers_at_every_temperature(name: str) -> None:
    def tokens(temperature: float, **request: Any) -> Tensor:
        arguments = {"max_new_tokens": 5, "seed": 1, "suppress_tokens": [0, 3, 4, 5, 6, 7]}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = paradec.generate(
                model, [[3, 1], [4, 2]], sampler=sampler, temperature=temperature, **arguments, **request
            )
        assert not torch.isin(out.new_tokens, torch.tensor(arguments["suppress_tokens"])).any()
        return out.new_tokens

    model, sampler = wrap_causal(mask_token_id=0), with_drafter(name, similar_model, window=4)
    model.self_drafting = SelfDrafting(4)
    for temperature, filters in zip(TEMPERATURES, FILTERS, strict=True):
        tokens(temperature), tokens(temperature, **filters)
    assert torch.equal(tokens(COLD), tokens(0.0)) and torch.equal(tokens(COLD, **FILTERS[3]), tokens(0.0))


@pytest.mark.thinned
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_families_at_every_temperature(name: str) -> None:
    model, request = image_model(name)
    codes_by_temperature = {}
    for temperature, filters in ((0.0, {}), (COLD, {}), (0.05, FILTERS[3])):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = paradec.generate_images(
                model, **request, seed=0, temperature=temperature, output_type="latent", **({"top_k": 0} | filters)
            )
        codes_by_temperature[temperature] = out.codes
    assert torch.equal(codes_by_temperature[0.0], codes_by_temperature[COLD])


def test_masked_images_at_every_temperature() -> None:
    model = paradec.load("digits-maskgit", dtype="float64")
    for name in ("maskgit", "halton", "recap"):
        request = {"class_labels": [3], "steps": 3, "seed": 0, "output_type": "latent", "cache": "none"}
        sampler = samplers.create(name, **constant_temperature(name))
        drawn = {
            temperature: paradec.generate_images(model, sampler=sampler, temperature=temperature, **request).codes
            for temperature in (0.0, COLD, *TEMPERATURES[::3])
        }
        assert torch.equal(drawn[0.0], drawn[COLD]) and not torch.equal(drawn[0.0], drawn[2.0])
