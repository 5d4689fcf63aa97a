"""Tokens that a model itself excludes (logits of -inf): nobody proposes them, and they break nothing.

The oracle is the same model with so low a finite logit in their place that their probability is exactly 0.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fitting import taken, topology_of
from image_models import tiny_llamagen
from tiny_models import END, MASK, VOCAB, tiny
from torch import Tensor, nn

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.models.own_drafts import OwnDrafts
from paradec.samplers.distributions import guided

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
OPAQUE = [name for name in MASKED if not samplers.get(name).needs.topologies and name not in ("learn2pd", "wino")]
REFERENCE = [
    name for name in MASKED if not samplers.get(name).needs.multi_step and "rng" not in samplers.get(name).unsupported
]
CAUSAL = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]
PROMPTS = [[1, 3, 5], [7, 9]]
INF, LOW = torch.inf, -1e4
HALF, MOST = list(range(0, END, 2)), list(range(4, MASK))
ONE = [token_id for token_id in range(VOCAB) if token_id not in (7, MASK)]
pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=", "ignore:steps=")

PLAIN = [
    ({"temperature": 0.0}, HALF),
    ({"temperature": 0.1, "top_k": 12, "top_p": 0.9}, MOST),
    ({"temperature": 1.3}, ONE),
]
GUIDED = [
    ({"temperature": 0.8, "guidance_scale": 2.0}, HALF),
    ({"temperature": 0.0, "guidance_scale": 0.0, "top_k": 3}, MOST),
    ({"temperature": 0.9, "guidance_scale": 0.5, "top_p": 0.9}, ONE),
]


def with_logits(model: Model, change: Any) -> Model:
    """The model with `change(logits)` called on a copy of all that it says."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits.clone()
        change(output.logits)
        return output

    model.module.register_forward_hook(hook)
    return model


def pair(token_ids: list[int], topology: str) -> list[Model]:
    """A model that excludes the tokens, and one that finds them impossible."""

    def made(value: float) -> Model:
        model = tiny(1, "bidirectional" if topology == "causal" else topology)
        if topology == "causal":
            facts = {"topology": "causal", "prediction": "shifted", "eos_token_id": END, "mask_token_id": MASK}
            model = paradec.wrap(model.unwrap(), **facts)
            model.own_drafts = OwnDrafts(4)
        return with_logits(model, lambda logits: logits.index_fill_(-1, torch.tensor(token_ids), value))

    return [made(-INF), made(LOW)]


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, int], list[Model]]:
    sets = (HALF, MOST, ONE)
    return {
        (topology, len(token_ids)): pair(token_ids, topology)
        for topology in {"causal", *map(topology_of, MASKED)}
        for token_ids in sets
    }


def decoded(model: Model, name: str, request: dict[str, Any]) -> tuple[Any, ...]:
    settings = {"drafter": model} if name == "speculative" else {}
    out = paradec.generate(
        model, PROMPTS, sampler=samplers.create(name, **settings), max_new_tokens=4, seed=2, trace=True,
        eos_early_stop=False, **taken(name, request),
    )  # fmt: skip
    scores = [[round(entry[3], 9) for entry in step.commits] for step in out.trace.steps]
    return out.new_tokens.tolist(), out.row_nfe, scores


def alike(models: list[Model], name: str, request: dict[str, Any], token_ids: list[int]) -> None:
    found, expected = (decoded(model, name, request) for model in models)
    assert found == expected
    assert not {*token_ids} & {token for row in found[0] for token in row}


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("cases", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_every_masked_sampler(pairs: Any, name: str, cases: list[tuple[dict[str, Any], list[int]]]) -> None:
    for request, token_ids in cases:
        alike(pairs[topology_of(name), len(token_ids)], name, request, token_ids)


@pytest.mark.thinned
@pytest.mark.parametrize("name", REFERENCE)
def test_every_masked_sampler_with_the_references_draws(pairs: Any, name: str) -> None:
    for temperature, token_ids in ((0.0, HALF), (0.8, MOST)):
        found = [
            paradec.generate(
                model, [[1, 2], [3, 4]], sampler=name, max_new_tokens=5, seed=2, rng="reference",
                temperature=temperature, top_p=0.95,
            ).new_tokens.tolist()
            for model in pairs[topology_of(name), len(token_ids)]
        ]  # fmt: skip
        assert found[0] == found[1]
        assert not {*token_ids} & {token for row in found[0] for token in row}


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in ("zipar", "lantern", "lantern++")])
@pytest.mark.parametrize("cases", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_every_sampler_of_drafts(pairs: Any, name: str, cases: list[tuple[dict[str, Any], list[int]]]) -> None:
    for request, token_ids in cases:
        alike(pairs["causal", len(token_ids)], name, request, token_ids)


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in ("speculative", "self_speculative")])
def test_every_sampler_of_drafts_makes_pictures(name: str) -> None:
    token_ids, found = list(range(0, 32, 2)), []
    for value in (-INF, LOW):
        model = tiny_llamagen()
        head = model.module.head
        model.module.head = lambda hidden, head=head, value=value: head(hidden).index_fill_(
            -1, torch.tensor(token_ids), value
        )
        out = paradec.generate_images(
            model, class_labels=1, sampler=name, seed=1, guidance_scale=3.0, temperature=0.9, output_type="latent"
        )
        found.append((out.tokens.tolist(), out.row_nfe))
    assert found[0] == found[1]
    assert not {*token_ids} & {token for row in found[0][0] for token in row}


class Wide(nn.Module):
    """A vocabulary that is read in float32; what it excludes differs from position to position and step to step."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=6000)
        draw = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(4 * torch.randn(60, 6000, generator=draw))
        self.value = value

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        logits = self.table[(ids.cumsum(1) + 7 * at) % 60].clone()
        token_id = torch.arange(6000)
        out = (token_id + at.unsqueeze(1) + (ids == 5999).sum()) % 3 > 0
        return logits.masked_fill_(out & (token_id != 1234), self.value)


@pytest.mark.thinned
@pytest.mark.parametrize("name", OPAQUE)
def test_large_vocabularies_in_float32(name: str) -> None:
    found = []
    for value in (-INF, LOW):
        model = paradec.wrap(Wide(value), mask_token_id=5999, prediction="same", topology="bidirectional")
        for request in ({}, {"temperature": 0.7, "guidance_scale": 2.0}):
            out = paradec.generate(model, [[1, 2, 3]], sampler=name, max_new_tokens=3, seed=0, **request)
            found.append((out.new_tokens.tolist(), out.row_nfe))
    assert found[:2] == found[2:]


SCALES = [0.0, 0.3, 1.0, 1.5, 7.0]


def branches(positions: int = 40, vocab: int = 12) -> tuple[Tensor, Tensor]:
    """Logits of which a third is excluded in each branch; the first token is excluded in neither."""
    draw = torch.Generator().manual_seed(0)
    conditional, unconditional = torch.randn(2, 2, positions, vocab, generator=draw, dtype=torch.float64)
    for logits in (conditional, unconditional):
        logits[..., 1:][torch.rand(logits[..., 1:].shape, generator=draw) < 0.33] = -INF
    return conditional, unconditional


@pytest.mark.parametrize("scale", SCALES)
def test_excluded_tokens_have_the_formulas_limit(scale: float) -> None:
    """The distribution is the one that ever lower finite logits lead to."""
    conditional, unconditional = branches()
    found = guided(torch.cat((conditional, unconditional)), scale).softmax(-1)
    low = torch.full((), -1e6, dtype=torch.float64)
    c, u = (logits.maximum(low) for logits in (conditional, unconditional))
    expected = (u + scale * (c - u)).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    assert (found[conditional.isinf() & unconditional.isinf()] == 0).all()


def test_scales_of_their_own_for_every_row() -> None:
    conditional, unconditional = branches()
    logits = torch.cat((conditional, unconditional))
    for pair_of in itertools.product(SCALES, repeat=2):
        found = guided(logits, torch.tensor(pair_of, dtype=torch.float64).view(-1, 1, 1))
        for row, scale in enumerate(pair_of):
            assert torch.equal(found[row], guided(logits, scale)[row])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    draw = torch.Generator().manual_seed(1)
    conditional, unconditional = torch.randn(2, 3, 5, 9, generator=draw, dtype=torch.float64)
    alone = guided(torch.cat((conditional[:1], unconditional[:1])), 2.5)
    conditional[1, :, 3], unconditional[1, :, 3], unconditional[2, 2, 4] = -INF, -INF, -INF
    assert torch.equal(guided(torch.cat((conditional, unconditional)), 2.5)[:1], alone)


@pytest.mark.parametrize("name", ["threshold", "credit", "klass", "maskgit", "sjd", "gsd", "scd"])
@pytest.mark.parametrize("broken", [float("nan"), INF])
@pytest.mark.parametrize("branch", [0, 1])
def test_what_is_broken_is_reported_under_guidance(name: str, broken: float, branch: int) -> None:
    model = tiny(1)
    if name in CAUSAL:
        model = paradec.wrap(model.unwrap(), topology="causal", prediction="shifted", eos_token_id=END)

    def change(logits: Tensor) -> None:
        logits[..., HALF] = -INF
        rows = len(logits) // 2
        logits[branch * rows, -1, 3] = broken

    with_logits(model, change)
    with pytest.raises(FloatingPointError, match="NaN or infinite logits for row 0 at its step 0"):
        decoded(model, name, {"guidance_scale": 2.0, "temperature": 0.5})


@pytest.mark.parametrize("name", ["low_confidence", "credit", "ccd", "sjd"])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_tokens_that_one_branch_excludes(name: str, scale: float) -> None:
    found = []
    for value in (-INF, -1e5):
        model = tiny(1)
        if name in CAUSAL:
            model = paradec.wrap(model.unwrap(), topology="causal", prediction="shifted", eos_token_id=END)

        def change(logits: Tensor, value: float = value) -> None:
            rows = len(logits) // 2
            logits[:rows, :, [1, 2, 3, 20]] = value
            logits[rows:, :, [3, 4, 21]] = value

        with_logits(model, change)
        found.append(decoded(model, name, {"guidance_scale": scale, "temperature": 0.6}))
    assert found[0][:2] == found[1][:2]
    token_ids = {token for row in found[0][0] for token in row}
    assert token_ids <= {4, 21} if scale > 1 else not token_ids & {1, 2, 3, 4, 20, 21}
