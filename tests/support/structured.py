"""Recorded cases of constrained decoding, their table models, and distributions under a constraint by enumeration."""

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
from recorded import golden, read_json, read_json_unrecorded
from small_models import VOCAB, tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import paradec
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.values import parse_constraint, token_automaton
from paradec.models.adapter import Model

CASES: dict[str, dict[str, Any]] = {path.stem: read_json(path) for path in sorted(golden("structured").glob("*.json"))}
SETTINGS = {path.stem: read_json_unrecorded(path) for path in sorted(golden("structured").glob("*.json"))}
"""The same cases, for choosing which to replay: reading a field here does not count as a use by a test."""
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


def case_names(*kinds: str) -> list[str]:
    """Return the names of the cases of these kinds."""
    return [name for name, case in SETTINGS.items() if case["kind"] in kinds]


def tokenizer_of(vocab: list[str], end: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids have the texts `vocab`, followed by a mask token and a prompt token."""
    words = {text: token for token, text in enumerate([*vocab, "<mask>", "<prompt>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<prompt>"))
    tokenizer.decoder = decoders.Fuse()
    special = {"mask_token": "<mask>", "eos_token": vocab[end], "extra_special_tokens": ["<prompt>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def automaton_of(case: dict[str, Any], regex: str | None = None, ends: bool | None = None) -> TokenAutomaton:
    """Return a case's token automaton. regex: replaces its constraint. ends: replaces its field `ends`."""
    vocab, end = case["vocab"], case["end"]
    value = parse_constraint("constraint", case["constraint"] if regex is None else {"regex": regex})
    ids = (end,) if (case["ends"] if ends is None else ends) else ()
    return token_automaton(value, tokenizer_of(vocab, end), len(vocab) + 2, ids, (len(vocab), len(vocab) + 1))


class Table(nn.Module):
    """A bidirectional model from tables, for one prompt token and n slots with V tokens.

    Logits are bias [n, V] plus, for each other decided slot, a vector of pair [n, n, V, V], which is indexed by
    (slot, decided slot, decided token). extra: number of ids after the V tokens, for mask and prompt."""

    def __init__(self, bias: Any, pair: Any, extra: int = 2):
        super().__init__()
        self.bias, self.pair = torch.tensor(bias, dtype=torch.float64), torch.tensor(pair, dtype=torch.float64)
        self.extra = extra
        self.config = SimpleNamespace(vocab_size=self.bias.shape[1] + extra, max_position_embeddings=64)

    def canvas_logits(self, canvas: Canvas) -> Tensor:
        """Return logits [n, V] for a canvas."""
        logits = self.bias.clone()
        for position, token in enumerate(canvas):
            if token is not None:
                unchanged = logits[position].clone()  # a slot's own token does not change its logits
                logits += self.pair[:, position, token]
                logits[position] = unchanged
        return logits

    def forward(self, ids: Tensor) -> Tensor:
        size = self.bias.shape[1]
        logits = torch.zeros(*ids.shape, size + self.extra, dtype=torch.float64)
        logits[:, 1:, size:] = -torch.inf
        for row, tokens in enumerate(ids[:, 1:].tolist()):
            known = [token if token < size else None for token in tokens[: len(self.bias)]]
            logits[row, 1 : 1 + len(known), :size] = self.canvas_logits(known)[: len(known)]
        return logits


class CausalTable(Table):
    """A causal table model: logits depend only on earlier slots, and logits at position i predict token i + 1."""

    def forward(self, ids: Tensor) -> Tensor:
        size = self.bias.shape[1]
        logits = torch.zeros(*ids.shape, size + self.extra, dtype=torch.float64)
        logits[:, :, size:] = -torch.inf
        for slot in range(min(ids.shape[1], len(self.bias))):
            slot_logits = self.bias[slot].expand(len(ids), -1)
            for earlier in range(slot):
                slot_logits = slot_logits + self.pair[slot, earlier][ids[:, 1 + earlier].clamp(max=size - 1)]
            logits[:, slot, :size] = slot_logits
        return logits


def causal_model_of(case: dict[str, Any], noise: float = 0.0) -> Model:
    """Return the causal model of a case. noise: standard deviation of the noise added to its biases."""
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
    """Yield all token sequences that the automaton accepts and that agree with a canvas, in lexicographic order."""
    all_tokens = sorted(automaton.runs.tokens.tolist())
    for text in itertools.product(*(all_tokens if token is None else [token] for token in canvas)):
        if accepts(automaton, text):
            yield text


def texts_behind_a_marker(case: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return all allowed token sequences of a case with a regex, marker and thinking budget. Tokens are letters."""
    pattern, after, end = case["constraint"]["regex"], case["constraint"]["after"], case["end"]
    budget = case["constraint"].get("thinking_budget")
    texts = []
    for text in itertools.product(range(len(case["vocab"])), repeat=case["slots"]):
        tokens = [*text]
        while tokens and tokens[-1] == end:
            tokens.pop()
        free, marker, answer = "".join(case["vocab"][token] for token in tokens).partition(after)
        is_timely = budget is None or len(free) <= budget
        if end not in tokens and marker and is_timely and re.fullmatch(pattern, answer):
            texts.append(text)
    return texts


def distribution(automaton: TokenAutomaton, p: Any, canvas: Canvas) -> tuple[dict[tuple[int, ...], float], float]:
    """Return the probabilities of allowed texts if slots are independent (p [slots, vocabulary]), and their mass."""
    masses = {
        text: math.prod(p[slot][token] for slot, token in enumerate(text) if canvas[slot] is None)
        for text in texts_of(automaton, canvas)
    }
    total = math.fsum(masses.values())
    return {text: mass / total for text, mass in masses.items()}, total


def softmax(logits: Tensor) -> list[list[float]]:
    return logits.softmax(-1).tolist()


def constrained_distribution(
    automaton: TokenAutomaton, p_after: Callable[[tuple[int, ...]], list[float]], slots: int
) -> dict[tuple[int, ...], float]:
    """Return the distribution of texts decoded in order under a constraint. p_after: prefix -> next token's p."""
    masses: dict[tuple[int, ...], float] = {}

    def can_complete(state: int, num_tokens: int) -> bool:
        if num_tokens == 0:
            return bool(automaton.accept[state])
        after = {automaton.step(state, token) for token in range(automaton.vocab_size)} - {-1}
        return any(can_complete(state, num_tokens - 1) for state in after)

    def extend(prefix: tuple[int, ...], state: int, mass: float) -> None:
        if len(prefix) == slots:
            masses[prefix] = mass
            return
        row = p_after(prefix)
        after = {token: automaton.step(state, token) for token in range(len(row))}
        allowed = [t for t, q in after.items() if q >= 0 and can_complete(q, slots - len(prefix) - 1)]
        total = sum(row[token] for token in allowed)
        for token in allowed:
            extend((*prefix, token), after[token], mass * row[token] / total)

    extend((), 0, 1.0)
    return masses


def assert_frequencies(texts: Tensor, expected: dict[tuple[int, ...], float]) -> None:
    """Assert that texts [samples, tokens] have the expected frequencies, within 4.5 standard deviations."""
    counts, rows = collections.Counter(map(tuple, texts.tolist())), len(texts)
    assert counts.keys() <= expected.keys()
    for text, mass in expected.items():
        deviation = (rows * mass * (1 - mass)) ** 0.5
        assert abs(counts[text] - rows * mass) < 4.5 * deviation + 1, (text, mass, counts[text])


def add_letter_tokenizer(model: Model, end: int) -> Model:
    """Give the model a tokenizer whose ids, except the last two, are different letters. end: the end token."""
    letters = [chr(97 + token) if token < 26 else chr(256 + token) for token in range(model.facts.vocab_size - 2)]
    model.tokenizer = tokenizer_of(letters, end)
    model.facts = dataclasses.replace(model.facts, eos_token_ids=(end,))
    return model


def assert_constrained_decoding(sampler: Any, model: Model, pattern: str, slots: int, rows: int, **request: Any) -> Any:
    """Assert that greedy answers and the samples' distribution equal token-by-token decoding; return the samples."""
    prompt, value = [3, 1, 2], paradec.Regex(pattern)
    ends, size = model.facts.eos_token_ids, model.facts.vocab_size

    def p_after(text: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            return model.module(torch.tensor([[*prompt, *text]])).logits[0, -1].double().softmax(-1).tolist()

    automaton = token_automaton(value, model.tokenizer, size, ends, ())
    fields: dict[str, Any] = {"sampler": sampler, "constraint": value, "max_new_tokens": slots, "eos_early_stop": False}
    out = paradec.generate(model, input_ids=[prompt] * rows, temperature=1.0, seed=[*range(rows)], **fields | request)
    assert_frequencies(torch.stack(list(out.new_tokens)), constrained_distribution(automaton, p_after, slots))
    greedy = [
        paradec.generate(model, input_ids=[prompt], **fields | {"sampler": method}).new_tokens.tolist()
        for method in (sampler, paradec.samplers.create("sjd", window=1))
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
"""Kind -> (a constraint, a function that returns whether a text satisfies it)."""


def tiny_with_texts(topology: str = "bidirectional") -> Model:
    """Return `small_models.tiny` with a tokenizer whose first ids have the texts `TEXTS`."""
    model = tiny(2, topology)
    names = {39: "<end>", 40: "<mask>"}
    words = {text: token for token, text in enumerate(TEXTS)}
    words |= {names.get(token, f"<{token}>"): token for token in range(len(TEXTS), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<38>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("yes|no|ab|."), "isolated")
    special = {"mask_token": "<mask>", "eos_token": "<end>"}
    special |= {"extra_special_tokens": [f"<{token}>" for token in range(len(TEXTS), 39)]}
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return model
