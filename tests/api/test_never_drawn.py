"""Tokens that are never drawn: tokens with a logit of -inf, the mask, and ids without a text.

Models with logits of -inf must decode like models with logits so low that the probability is exactly 0. Models with
mask id 0 must decode like the same weights with a `pad_token_id`: only the padding may differ.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import MASKED as READY_MASKED
from decoding import fits, supported_fields, topology_of
from engines import HostEngine
from images import tiny_llamagen
from small_models import END, MASK, VOCAB, tiny, tiny_gemma, tiny_llama
from tokenized_models import tokenizer_of
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.facts import ModelFacts
from paradec.core.protocol import State
from paradec.integrations.engines.hosted import Hosted
from paradec.models.adapter import Model
from paradec.models.self_drafting import SelfDrafting
from paradec.samplers.distributions import apply_guidance

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=", "ignore:steps=")

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
OPAQUE = [name for name in MASKED if not samplers.get(name).needs.topologies and name not in ("learn2pd", "wino")]
REFERENCE = [s.name for s in map(samplers.get, MASKED) if not s.needs.multi_step and "rng" not in s.unsupported]
CAUSAL = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]
PROMPTS = [[1, 3, 5], [7, 9]]
INF, LOW = torch.inf, -1e4
HALF, MOST = list(range(0, END, 2)), list(range(4, MASK))
ALL_BUT_7 = [token_id for token_id in range(VOCAB) if token_id not in (7, MASK)]
PLAIN = [({"temperature": 0.0}, HALF), ({"temperature": 0.1, "top_k": 12, "top_p": 0.9}, MOST)]
PLAIN += [({"temperature": 1.3}, ALL_BUT_7)]
GUIDED = [
    ({"temperature": 0.8, "guidance_scale": 2.0}, HALF),
    ({"temperature": 0.0, "guidance_scale": 0.0, "top_k": 3}, MOST),
    ({"temperature": 0.9, "guidance_scale": 0.5, "top_p": 0.9}, ALL_BUT_7),
]


def with_logits(model: Model, change: Any) -> Model:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits.clone()
        change(output.logits)
        return output

    model.module.register_forward_hook(hook)
    return model


def model_pair(token_ids: list[int], topology: str) -> list[Model]:
    def make_model(value: float) -> Model:
        model = tiny(1, "bidirectional" if topology == "causal" else topology)
        if topology == "causal":
            facts = {"topology": "causal", "prediction": "shifted", "eos_token_id": END, "mask_token_id": MASK}
            model = paradec.wrap(model.unwrap(), **facts)
            model.self_drafting = SelfDrafting(4)
        return with_logits(model, lambda logits: logits.index_fill_(-1, torch.tensor(token_ids), value))

    return [make_model(-INF), make_model(LOW)]


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, int], list[Model]]:
    sets = (HALF, MOST, ALL_BUT_7)
    return {
        (topology, len(token_ids)): model_pair(token_ids, topology)
        for topology in {"causal", *map(topology_of, MASKED)}
        for token_ids in sets
    }


def decode_commits(model: Model, name: str, request: dict[str, Any]) -> tuple[Any, ...]:
    settings = {"drafter": model} if name == "speculative" else {}
    out = paradec.generate(
        model, PROMPTS, sampler=samplers.create(name, **settings), max_new_tokens=4, seed=2, trace=True,
        eos_early_stop=False, **supported_fields(name, request),
    )  # fmt: skip
    scores = [[round(entry[3], 9) for entry in step.commits] for step in out.trace.steps]
    return out.new_tokens.tolist(), out.row_nfe, scores


def assert_equal_answers(models: list[Model], name: str, request: dict[str, Any], token_ids: list[int]) -> None:
    actual, expected = (decode_commits(model, name, request) for model in models)
    assert actual == expected
    assert not {*token_ids} & {token for row in actual[0] for token in row}


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("cases", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_masked_samplers_exclude_tokens(pairs: Any, name: str, cases: list[tuple[dict[str, Any], list[int]]]) -> None:
    for request, token_ids in cases:
        assert_equal_answers(pairs[topology_of(name), len(token_ids)], name, request, token_ids)


@pytest.mark.thinned
@pytest.mark.parametrize("name", REFERENCE)
def test_masked_samplers_exclude_tokens_with_reference_draws(pairs: Any, name: str) -> None:
    for temperature, token_ids in ((0.0, HALF), (0.8, MOST)):
        outputs = [
            paradec.generate(
                model, [[1, 2], [3, 4]], sampler=name, max_new_tokens=5, seed=2, rng="reference",
                temperature=temperature, top_p=0.95,
            ).new_tokens.tolist()
            for model in pairs[topology_of(name), len(token_ids)]
        ]  # fmt: skip
        assert outputs[0] == outputs[1]
        assert not {*token_ids} & {token for row in outputs[0] for token in row}


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in ("zipar", "lantern", "lantern++")])
@pytest.mark.parametrize("cases", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_causal_samplers_exclude_tokens(pairs: Any, name: str, cases: list[tuple[dict[str, Any], list[int]]]) -> None:
    for request, token_ids in cases:
        assert_equal_answers(pairs["causal", len(token_ids)], name, request, token_ids)


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in ("speculative", "self_speculative")])
def test_image_samplers_exclude_tokens(name: str) -> None:
    token_ids, outputs = list(range(0, 32, 2)), []
    for value in (-INF, LOW):
        model = tiny_llamagen()
        head = model.module.head
        model.module.head = lambda hidden, head=head, value=value: head(hidden).index_fill_(
            -1, torch.tensor(token_ids), value
        )
        request = {"class_labels": 1, "sampler": name, "seed": 1, "guidance_scale": 3.0, "temperature": 0.9}
        out = paradec.generate_images(model, **request, output_type="latent")
        outputs.append((out.tokens.tolist(), out.row_nfe))
    assert outputs[0] == outputs[1]
    assert not {*token_ids} & {token for row in outputs[0][0] for token in row}


class LargeVocabulary(nn.Module):
    """A model with 9,000 tokens, whose statistics are float32. The excluded tokens depend on position and step."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=9000)
        self.table = nn.Parameter(4 * torch.randn(60, 9000, generator=torch.Generator().manual_seed(0)))
        self.value = value

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        logits = self.table[(ids.cumsum(1) + 7 * positions) % 60].clone()
        token_id = torch.arange(9000)
        out = (token_id + positions.unsqueeze(1) + (ids == 8999).sum()) % 3 > 0
        return logits.masked_fill_(out & (token_id != 1234), self.value)


@pytest.mark.thinned
@pytest.mark.parametrize("name", OPAQUE)
def test_large_vocabularies_in_float32(name: str) -> None:
    outputs = []
    for value in (-INF, LOW):
        model = paradec.wrap(LargeVocabulary(value), mask_token_id=8999, prediction="same", topology="bidirectional")
        for request in ({}, {"temperature": 0.7, "guidance_scale": 2.0}):
            out = paradec.generate(model, [[1, 2, 3]], sampler=name, max_new_tokens=3, seed=0, **request)
            outputs.append((out.new_tokens.tolist(), out.row_nfe))
    assert outputs[:2] == outputs[2:]


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 1.5, 7.0])
def test_guidance_with_excluded_tokens_is_the_limit_of_the_formula(scale: float) -> None:
    # each branch excludes a third of the tokens, but never token 0
    draw = torch.Generator().manual_seed(0)
    conditional, unconditional = torch.randn(2, 2, 40, 12, generator=draw, dtype=torch.float64)
    for logits in (conditional, unconditional):
        logits[..., 1:][torch.rand(logits[..., 1:].shape, generator=draw) < 0.33] = -INF
    actual = apply_guidance(torch.cat((conditional, unconditional)), scale).softmax(-1)
    low = torch.full((), -1e6, dtype=torch.float64)
    c, u = (logits.maximum(low) for logits in (conditional, unconditional))
    torch.testing.assert_close(actual, (u + scale * (c - u)).softmax(-1), rtol=1e-8, atol=1e-12)
    assert (actual[conditional.isinf() & unconditional.isinf()] == 0).all()


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["threshold", "credit", "klass", "maskgit", "sjd", "gsd", "scd"])
@pytest.mark.parametrize("broken", [float("nan"), INF])
@pytest.mark.parametrize("branch", [0, 1])
def test_broken_logits_are_reported_under_guidance(name: str, broken: float, branch: int) -> None:
    model = tiny(1)
    if name in CAUSAL:
        model = paradec.wrap(model.unwrap(), topology="causal", prediction="shifted", eos_token_id=END)

    def change(logits: Tensor) -> None:
        logits[..., HALF] = -INF
        rows = len(logits) // 2
        logits[branch * rows, -1, 3] = broken

    with_logits(model, change)
    with pytest.raises(FloatingPointError, match="NaN or infinite logits for row 0 at its step 0"):
        decode_commits(model, name, {"guidance_scale": 2.0, "temperature": 0.5})


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["low_confidence", "credit", "ccd", "sjd"])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_guidance_where_one_branch_excludes_tokens(name: str, scale: float) -> None:
    outputs = []
    for value in (-INF, -1e5):
        model = tiny(1)
        if name in CAUSAL:
            model = paradec.wrap(model.unwrap(), topology="causal", prediction="shifted", eos_token_id=END)

        def change(logits: Tensor, value: float = value) -> None:
            rows = len(logits) // 2
            logits[:rows, :, [1, 2, 3, 20]] = value
            logits[rows:, :, [3, 4, 21]] = value

        with_logits(model, change)
        outputs.append(decode_commits(model, name, {"guidance_scale": scale, "temperature": 0.6}))
    assert outputs[0][:2] == outputs[1][:2]
    token_ids = {token for row in outputs[0][0] for token in row}
    assert token_ids <= {4, 21} if scale > 1 else not token_ids & {1, 2, 3, 4, 20, 21}


REQUESTS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]
REQUESTS += [{"temperature": 0.7, "guidance_scale": 1.5}]
MODELS = {
    "bidirectional": ("bidirectional", "same"),
    "bidirectional shifted": ("bidirectional", "shifted"),
    "block_causal": ("block_causal", "same"),
    "block_causal shifted": ("block_causal", "shifted"),
    "causal_context": ("causal_context", "same"),
    "causal": ("causal", "shifted"),
}
CAUSAL_TEXT = [name for name in samplers.names() if samplers.get(name).family == "draft_verify" and name != "zipar"]
"""All but ZipAR, which decodes only images."""


@functools.cache
def model_of(kind: str) -> Model:
    topology, prediction = MODELS[kind]
    model = tiny(1, topology, prediction)
    if topology.startswith("causal"):
        model.self_drafting = SelfDrafting(4)
    model.codebook = lambda: torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]

    def prefer_mask(module: nn.Module, args: Any, output: Any) -> None:
        output.logits = output.logits + 20.0 * (torch.arange(VOCAB) == MASK)

    model.module.register_forward_hook(prefer_mask)
    return model


def assert_no_mask(model: Model, sampler: Any, prompts: Any = PROMPTS, **request: Any) -> None:
    out = paradec.generate(model, prompts, sampler=sampler, seed=1, eos_early_stop=False, **request)
    assert not (out.sequences == model.facts.mask_id).any(), request


def masked_pairs() -> list[tuple[str, str]]:
    pairs = []
    for index, name in enumerate(READY_MASKED):
        needs = samplers.get(name).needs
        kinds = [kind for kind in MODELS if kind != "causal" and fits(name, model_of(kind))]
        if needs.multi_step or needs.mask_probes:  # causal_context models refuse these samplers
            kinds = [kind for kind in kinds if kind != "causal_context"]
        pairs.append((name, kinds[index % len(kinds)]))
    return pairs


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "kind"), masked_pairs())
def test_masked_samplers_never_write_the_mask(name: str, kind: str) -> None:
    for request in REQUESTS:
        assert_no_mask(model_of(kind), name, max_new_tokens=6, **supported_fields(name, request))
    if "rng" not in samplers.get(name).unsupported and not samplers.get(name).needs.multi_step:
        assert_no_mask(model_of(kind), name, [[1, 3], [7, 9]], max_new_tokens=6, rng="reference")


@pytest.mark.thinned
@pytest.mark.parametrize("name", CAUSAL_TEXT)
def test_causal_samplers_never_write_the_mask(name: str) -> None:
    model = model_of("causal")
    sampler = samplers.create(name, **({"drafter": model} if name == "speculative" else {}))
    for request in REQUESTS:
        assert_no_mask(model, sampler, max_new_tokens=6, **supported_fields(sampler, request))


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["block_causal", "block_causal shifted", "causal", "causal_context"])
@pytest.mark.parametrize("settings", [{}, {"rule": "match", "threshold": 0.5}], ids=str)
def test_self_speculation_never_writes_the_mask(kind: str, settings: dict[str, Any]) -> None:
    sampler = samplers.create("self_speculative", **settings)
    for request in REQUESTS[: 2 if kind.startswith("block_causal") else 3]:
        assert_no_mask(model_of(kind), sampler, max_new_tokens=6, **request)


SIZE = 24
END_TEXTLESS, MASK_TEXTLESS = SIZE - 2, SIZE - 1
TOKENIZER = tokenizer_of([*(f"w{number} " for number in range(END_TEXTLESS)), "<end>", "<mask>"])
PROMPTS_TEXTLESS = [[1, 3, 5], [7, 9], [2]]
DRAWN: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3, "eos_early_stop": False}


def textless_model(kind: str, tokenizer: Any = TOKENIZER) -> Model:
    facts: dict[str, Any] = {"tokenizer": tokenizer, "eos_token_id": (END_TEXTLESS,)}
    if kind == "causal":
        return paradec.wrap(tiny_llama(vocab=40), topology="causal", prediction="shifted", **facts)
    if kind == "canvas":
        return paradec.wrap(tiny_gemma(), **facts)
    block = 4 if kind == "block_causal" else None
    facts |= {"mask_token_id": MASK_TEXTLESS, "prediction": "same"}
    return paradec.wrap(tiny(2).module, topology=kind, block_length=block, **facts)


def draw_tokens(model: Model, **request: Any) -> torch.Tensor:
    """Return the ids [N] that `generate` draws. `generate_many`, which refuses canvas models, must draw the same."""
    request = DRAWN | request
    if model.facts.topology == "causal":
        request["sampler"] = "sjd"
    if model.facts.topology == "canvas":  # canvases have a temperature schedule instead
        del request["temperature"]
    ids = paradec.generate(model, input_ids=PROMPTS_TEXTLESS, **request).new_tokens.reshape(-1)
    if model.facts.topology == "canvas":
        return ids
    many = paradec.generate_many(model, PROMPTS_TEXTLESS, batch_size=2, **request)
    assert torch.equal(torch.cat([output.new_tokens.reshape(-1) for output in many]), ids)
    return ids


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["bidirectional", "block_causal", "causal", "canvas"])
def test_ids_without_text_are_drawn_only_on_request(kind: str) -> None:
    model = textless_model(kind)
    assert draw_tokens(model).max() < SIZE
    assert draw_tokens(model, suppress_tokens=()).max() >= SIZE
    text = draw_tokens(model, suppress_tokens=range(SIZE))  # suppressing all ids with text requests those without
    assert text.min() >= SIZE
    assert draw_tokens(model, suppress_tokens=[3]).max() >= SIZE
    assert draw_tokens(textless_model(kind, None)).max() >= SIZE


def test_the_text_has_a_word_for_every_token() -> None:
    out = paradec.generate(textless_model("bidirectional"), input_ids=PROMPTS_TEXTLESS[0], **DRAWN, logits_eos_inf=True)
    assert isinstance(out.text, str) and out.text.count("w") == 12


def test_end_tokens_beyond_the_tokenizer_are_drawn() -> None:
    facts: dict[str, Any] = {"mask_token_id": MASK_TEXTLESS, "prediction": "same", "topology": "bidirectional"}
    ends = tuple(range(SIZE, 41, 2))
    model = paradec.wrap(tiny(2).module, tokenizer=TOKENIZER, eos_token_id=ends, **facts)
    beyond = {*draw_tokens(model, max_new_tokens=60).tolist()} - {*range(SIZE)}
    assert beyond and beyond <= {*ends}


def test_rows_inside_an_engine_draw_what_generate_draws() -> None:
    model = textless_model("block_causal")
    engine = HostEngine(model, Hosted("threshold", model.facts))
    request = {name: value for name, value in DRAWN.items() if name != "max_new_tokens"}
    engine.add("row", PROMPTS_TEXTLESS[0], 12, **request)
    while not engine.hosted.done("row"):
        engine.round(["row"])
    answer = engine.hosted.answer("row")
    assert answer == paradec.generate(model, input_ids=PROMPTS_TEXTLESS[0], **DRAWN).new_tokens[0].tolist()
    assert max(answer) < SIZE


PAD, NEW = 7, 6
RAGGED = [[3, 4, 5, 6, 8], [9], [10, 11]]


def is_supported(sampler: str, cache: str) -> bool:
    facts = ModelFacts(vocab_size=41, mask_token_id=0)
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


PAIRS = [(name, cache) for name in MASKED for cache in ("none", "dual", "dkv_decode") if is_supported(name, cache)]


def make_module(seed: int = 0) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)).double()


def wrap_module(**ids: Any) -> Model:
    return paradec.wrap(make_module(), mask_token_id=0, prediction="same", topology="bidirectional", **ids)


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    return wrap_module(), wrap_module(pad_token_id=PAD)


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "cache"), PAIRS)
def test_padding_with_the_mask_id_is_not_undecided(models: tuple[Model, Model], name: str, cache: str) -> None:
    outputs = []
    for model in models:
        seen: list[tuple[int, int]] = []

        def record(state: State, commit: Any, seen: list = seen) -> None:
            seen.append(state.progress)

        request = {"max_new_tokens": NEW, "cache": cache, "seed": 1}
        state = samplers.create(name).start(model, RAGGED, **request)
        assert state.progress == (0, NEW * len(RAGGED))
        assert int(state.undecided.sum()) == NEW * len(RAGGED)
        out = paradec.generate(model, RAGGED, sampler=name, callback=record, trace=True, **request)
        assert seen[-1] == (NEW * len(RAGGED),) * 2
        assert (out.sequences[(~out.attention_mask.bool())] == model.facts.fill_token_id).all()
        assert not (out.sequences == 0).any()
        commits = [(step.commits, step.forwarded) for step in out.trace.steps]
        outputs.append((out.new_tokens.tolist(), out.row_nfe, out.tokens, out.tokens_per_forward, commits, seen))
    assert outputs[0] == outputs[1]


@pytest.mark.thinned
@pytest.mark.parametrize("cache", [name for name in caches.names() if is_supported("threshold", name)])
def test_decoded_rows_can_be_continued(models: tuple[Model, Model], cache: str) -> None:
    model = models[0]
    keep = caches.create(cache).facts.uses_store
    first = paradec.generate(model, RAGGED, max_new_tokens=NEW, cache=cache, keep_prefix=keep)
    assert not (first.sequences == 0).any()
    rows = [[*row, *new] for row, new in zip(RAGGED, first.new_tokens.tolist())]
    request = {"max_new_tokens": 2, "cache": cache}
    unpadded = paradec.generate(model, rows, **request)
    padded = paradec.generate(model, first.sequences, attention_mask=first.attention_mask, **request)
    assert torch.equal(padded.new_tokens, unpadded.new_tokens)
    assert padded.tokens == [2, 2, 2]
    if keep:
        assert all(0 not in tokens for tokens in first.prefix.tokens)
        paradec.generate(model, rows, max_new_tokens=2, cache=cache, prefix=first.prefix)


def test_transformers_own_generate_pads_with_no_mask() -> None:
    plain = make_module()
    plain.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=None, bos_token_id=None)
    ids = torch.tensor([[0, 0, 3, 4, 5], [0, 9, 8, 7, 6]])
    attention = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    arguments = {"custom_generate": paradec.hf_generate, "prediction": "same", "mask_token_id": 0}
    out = plain.generate(ids, attention_mask=attention, max_new_tokens=NEW, return_dict_in_generate=True, **arguments)
    assert out.sequences.shape == (2, 5 + NEW)
    assert not (out.sequences == 0).any()
    expected = paradec.generate(wrap_module(), input_ids=ids, attention_mask=attention, max_new_tokens=NEW)
    assert torch.equal(out.sequences[:, 5:], expected.new_tokens)
    assert out.tokens_per_forward == expected.tokens_per_forward
