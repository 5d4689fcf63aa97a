"""Recorded cases of constrained decoding: vocabularies of a few texts, and models that are tables of numbers."""

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from recorded import golden, read_head, read_json
from small_models import VOCAB, tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import paradec
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.values import constraint_of, token_automaton
from paradec.models.adapter import Model

CASES: dict[str, dict[str, Any]] = {path.stem: read_json(path) for path in sorted(golden("structured").glob("*.json"))}
SETTINGS = {path.stem: read_head(path) for path in sorted(golden("structured").glob("*.json"))}
"""The same, to choose what is replayed."""
Canvas = list[int | None]


def nested_objects(depth: int, **fields: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": fields | {"b": schema}}
    return schema


def nested_arrays(depth: int, **limits: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, **limits}
    return schema


def named(*kinds: str) -> list[str]:
    return [name for name, case in SETTINGS.items() if case["kind"] in kinds]


def tokenizer_of(vocab: list[str], end: int) -> PreTrainedTokenizerFast:
    """Tokens that read their texts, one after the other; then a mask, and what prompts are made of."""
    words = {text: token for token, text in enumerate([*vocab, "<mask>", "<prompt>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<prompt>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="<mask>", eos_token=vocab[end], extra_special_tokens=["<prompt>"]
    )


def automaton_of(case: dict[str, Any], regex: str | None = None, ends: bool | None = None) -> TokenAutomaton:
    vocab, end = case["vocab"], case["end"]
    value = constraint_of("constraint", case["constraint"] if regex is None else {"regex": regex})
    ids = (end,) if (case["ends"] if ends is None else ends) else ()
    return token_automaton(value, tokenizer_of(vocab, end), len(vocab) + 2, ids, (len(vocab), len(vocab) + 1))


class Table(nn.Module):
    """Logits of a position: a bias, and a number for each decided position. The first token of a row is a prompt."""

    def __init__(self, bias: Any, pair: Any, extra: int = 2):
        super().__init__()
        self.bias, self.pair = torch.tensor(bias, dtype=torch.float64), torch.tensor(pair, dtype=torch.float64)
        self.extra = extra
        self.config = SimpleNamespace(vocab_size=self.bias.shape[1] + extra, max_position_embeddings=64)

    def of(self, canvas: Canvas) -> Tensor:
        """[n, V]."""
        found = self.bias.clone()
        for other, token in enumerate(canvas):
            if token is not None:
                own = found[other].clone()
                found += self.pair[:, other, token]
                found[other] = own
        return found

    def forward(self, ids: Tensor) -> Tensor:
        size = self.bias.shape[1]
        logits = torch.zeros(*ids.shape, size + self.extra, dtype=torch.float64)
        logits[:, 1:, size:] = -torch.inf
        for row, tokens in enumerate(ids[:, 1:].tolist()):
            known = [token if token < size else None for token in tokens[: len(self.bias)]]
            logits[row, 1 : 1 + len(known), :size] = self.of(known)[: len(known)]
        return logits


class CausalTable(Table):
    """The same, where a position sees what is to its left; row i of the logits predicts token i + 1."""

    def forward(self, ids: Tensor) -> Tensor:
        size = self.bias.shape[1]
        logits = torch.zeros(*ids.shape, size + self.extra, dtype=torch.float64)
        logits[:, :, size:] = -torch.inf
        for place in range(min(ids.shape[1], len(self.bias))):
            found = self.bias[place].expand(len(ids), -1)
            for other in range(place):
                found = found + self.pair[place, other][ids[:, 1 + other].clamp(max=size - 1)]
            logits[:, place, :size] = found
        return logits


def causal_model_of(case: dict[str, Any], noise: float = 0.0) -> Model:
    """noise: how far its numbers are from the case's."""
    vocab, module = case["vocab"], CausalTable(**case["model"])
    module.bias += noise * torch.randn(module.bias.shape, generator=torch.Generator().manual_seed(0))
    facts = {"eos_token_id": case["end"], "tokenizer": tokenizer_of(vocab, case["end"])}
    return paradec.wrap(module, prediction="shifted", topology="causal", **facts)


def model_of(case: dict[str, Any], topology: str = "bidirectional") -> Model:
    ids = {"mask_token_id": len(case["vocab"]), "eos_token_id": case["end"]}
    tokenizer = tokenizer_of(case["vocab"], case["end"])
    return paradec.wrap(Table(**case["model"]), **ids, prediction="same", topology=topology, tokenizer=tokenizer)


def accepts(automaton: TokenAutomaton, text: Any, state: int = 0) -> bool:
    for token in text:
        state = automaton.step(state, token)
    return state >= 0 and bool(automaton.accept[state])


def texts_of(automaton: TokenAutomaton, canvas: Canvas) -> Iterator[tuple[int, ...]]:
    """All texts of the language that agree with a canvas, in order."""
    everything = sorted(automaton.runs.tokens.tolist())
    for text in itertools.product(*(everything if token is None else [token] for token in canvas)):
        if accepts(automaton, text):
            yield text


def texts_behind_a_marker(case: dict[str, Any]) -> list[tuple[int, ...]]:
    """All sequences of a case whose tokens each read one letter, by its constraint's letters alone."""
    pattern, after, end = case["constraint"]["regex"], case["constraint"]["after"], case["end"]
    budget = case["constraint"].get("thinking_budget")
    found = []
    for text in itertools.product(range(len(case["vocab"])), repeat=case["slots"]):
        tokens = [*text]
        while tokens and tokens[-1] == end:
            tokens.pop()
        free, marker, answer = "".join(case["vocab"][token] for token in tokens).partition(after)
        is_timely = budget is None or len(free) <= budget
        if end not in tokens and marker and is_timely and re.fullmatch(pattern, answer):
            found.append(text)
    return found


def distribution(automaton: TokenAutomaton, p: Any, canvas: Canvas) -> tuple[dict[tuple[int, ...], float], float]:
    """The product of p [n, V] over undecided positions, conditioned on the language; and its probability."""
    masses = {
        text: math.prod(p[at][token] for at, token in enumerate(text) if canvas[at] is None)
        for text in texts_of(automaton, canvas)
    }
    total = math.fsum(masses.values())
    return {text: mass / total for text, mass in masses.items()}, total


def softmax(logits: Tensor) -> list[list[float]]:
    return logits.softmax(-1).tolist()


def masked_distribution(
    automaton: TokenAutomaton, p_after: Callable[[tuple[int, ...]], list[float]], slots: int
) -> dict[tuple[int, ...], float]:
    """Of token-by-token decoding, by recursion over prefixes. p_after: the distribution after a prefix."""
    found: dict[tuple[int, ...], float] = {}

    def ends_well(state: int, left: int) -> bool:
        if left == 0:
            return bool(automaton.accept[state])
        after = {automaton.step(state, token) for token in range(automaton.vocab_size)} - {-1}
        return any(ends_well(state, left - 1) for state in after)

    def go(prefix: tuple[int, ...], state: int, mass: float) -> None:
        if len(prefix) == slots:
            found[prefix] = mass
            return
        row = p_after(prefix)
        after = {token: automaton.step(state, token) for token in range(len(row))}
        fits = [t for t, q in after.items() if q >= 0 and ends_well(q, slots - len(prefix) - 1)]
        total = sum(row[token] for token in fits)
        for token in fits:
            go((*prefix, token), after[token], mass * row[token] / total)

    go((), 0, 1.0)
    return found


def assert_drawn(texts: Tensor, expected: dict[tuple[int, ...], float]) -> None:
    """Whether texts [N, n] occur as often as a distribution says."""
    counts, rows = collections.Counter(map(tuple, texts.tolist())), len(texts)
    assert counts.keys() <= expected.keys()
    for text, mass in expected.items():
        deviation = (rows * mass * (1 - mass)) ** 0.5
        assert abs(counts[text] - rows * mass) < 4.5 * deviation + 1, (text, mass, counts[text])


def reading_letters(model: Model, end: int) -> Model:
    """The model, whose tokens read different letters, but for the last two; `end` is the end token."""
    letters = [chr(97 + token) if token < 26 else chr(256 + token) for token in range(model.facts.vocab_size - 2)]
    model.tokenizer = tokenizer_of(letters, end)
    model.facts = dataclasses.replace(model.facts, eos_token_ids=(end,))
    return model


def assert_masked(sampler: Any, model: Model, pattern: str, slots: int, rows: int, **request: Any) -> Any:
    """Check a causal model's answers under a pattern against token-by-token decoding; return the output."""
    prompt, value = [3, 1, 2], paradec.Regex(pattern)
    ends, size = model.facts.eos_token_ids, model.facts.vocab_size

    def p_after(text: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            return model.module(torch.tensor([[*prompt, *text]])).logits[0, -1].double().softmax(-1).tolist()

    automaton = token_automaton(value, model.tokenizer, size, ends, ())
    asked: dict[str, Any] = {"sampler": sampler, "constraint": value, "max_new_tokens": slots, "eos_early_stop": False}
    out = paradec.generate(model, input_ids=[prompt] * rows, temperature=1.0, seed=[*range(rows)], **asked | request)
    assert_drawn(torch.stack(list(out.new_tokens)), masked_distribution(automaton, p_after, slots))
    greedy = [
        paradec.generate(model, input_ids=[prompt], **asked | {"sampler": each}).new_tokens.tolist()
        for each in (sampler, paradec.samplers.create("sjd", window=1))
    ]
    assert greedy[0] == greedy[1]
    return out


TEXTS = [*'0123456789abcdexyz"{}:, -.', "ab", "12", '": ', '"a', "true", "null", "[", "]", "yes", "no", 'x"']
KINDS: dict[str, tuple[Any, Any]] = {
    "choice": (paradec.Choice(("yes", "no", "ab")), lambda text: text in ("yes", "no", "ab")),
    "regex": (
        paradec.Regex(r"[0-9]{1,3}\.[0-9]{2}|ab+x"),
        lambda text: re.fullmatch(r"[0-9]{1,3}\.[0-9]{2}|ab+x", text, re.ASCII),
    ),
    "schema": (
        paradec.JsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 50}, "minItems": 1}),
        lambda text: all(isinstance(item, int) and 0 <= item <= 50 for item in json.loads(text)) and json.loads(text),
    ),
    "behind a marker": (
        paradec.JsonSchema({"enum": [7, 50, "ab", None]}, after="yes,", thinking_budget=3),
        lambda text: json.loads(text) in (7, 50, "ab", None),
    ),
}
"""A constraint of each kind, and what says whether a text is in it."""


def lettered(topology: str = "bidirectional") -> Model:
    """`small_models.tiny` with a tokenizer whose tokens read `TEXTS`."""
    model = tiny(2, topology)
    names = {39: "<end>", 40: "<mask>"}
    words = {text: token for token, text in enumerate(TEXTS)}
    words |= {names.get(token, f"<{token}>"): token for token in range(len(TEXTS), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<38>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("yes|no|ab|."), "isolated")
    others = [f"<{token}>" for token in range(len(TEXTS), 39)]
    model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="<mask>", eos_token="<end>", extra_special_tokens=others
    )
    return model
