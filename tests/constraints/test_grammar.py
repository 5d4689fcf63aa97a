"""Grammars on causal models: a nested language, the distribution of constrained decoding, copies, errors."""

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from small_models import tiny_llama, wrap_causal
from structured import VOCAB, assert_frequencies, tiny_with_texts
from tokenized_models import TOKENIZER

import paradec
from paradec import samplers
from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.values import constraint_of, token_automaton
from paradec.core.protocol import decode
from paradec.integrations.server.limits import ApiError
from paradec.integrations.server.request_body import TextBody, read_constraint
from paradec.models.adapter import Model
from paradec.samplers.causal.trees import DynamicTree

llguidance = pytest.importorskip("llguidance", reason='needs the extra "grammar"')

NESTED = paradec.Grammar('start: "a" start "b" | "x" | "y" start "z"')


def is_prefix(text: str) -> bool:
    """Return whether `text` is a prefix of a text of NESTED, without a grammar library."""
    rest: list[str] = []
    for place, sign in enumerate(text):
        if sign in "ay":
            rest.append("b" if sign == "a" else "z")
        elif sign == "x":
            return "".join(reversed(rest)).startswith(text[place + 1 :])
        else:
            return False
    return True


def is_complete(text: str) -> bool:
    return "x" in text and is_prefix(text) and 2 * text.index("x") + 1 == len(text)


@pytest.fixture(scope="module")
def causal() -> Model:
    module = wrap_causal(tiny_llama(vocab=VOCAB).double()).module
    tokenizer = tiny_with_texts().tokenizer
    return paradec.wrap(module, eos_token_id=39, topology="causal", prediction="shifted", tokenizer=tokenizer)


def drafter() -> Model:
    return wrap_causal(tiny_llama(seed=3, layers=1, vocab=VOCAB).double())


WAYS: dict[str, dict[str, Any]] = {
    "sjd": {"sampler": "sjd", "window": 4},
    "one by one": {"sampler": "sjd", "window": 1},
    "chain": {"sampler": "speculative", "window": 4},
    "lookup": {"sampler": "speculative", "drafter": "prompt_lookup"},
    "tree": {"sampler": "speculative", "tree": (3, 2, 1)},
    "dynamic": {"sampler": "speculative", "tree": DynamicTree(5, 2, 2), "rule": "naive"},
}


def sampler_of(way: str) -> Any:
    settings = dict(WAYS[way])
    if way in ("chain", "tree", "dynamic"):
        settings["drafter"] = drafter()
    return samplers.create(settings.pop("sampler"), **settings)


@pytest.mark.parametrize("way", [way if way == "sjd" else pytest.param(way, marks=pytest.mark.full) for way in WAYS])
def test_draws_have_the_distribution_of_masked_decoding(way: str, causal: Model) -> None:
    reads = {token: causal.tokenizer.decode([token], skip_special_tokens=True) for token in range(38)}
    expected: dict[tuple[int, ...], float] = {}

    def go(tokens: tuple[int, ...], mass: float) -> None:
        text = "".join(reads.get(token, "") for token in tokens)
        if len(tokens) == 4:
            expected[tokens] = mass
            return
        fits = [token for token, read in reads.items() if read and is_prefix(text + read)]
        fits = [39] if is_complete(text) else fits
        with torch.no_grad():
            row = causal.module(torch.tensor([[1, 2, *tokens]])).logits[0, -1].softmax(-1)
        total = float(row[fits].sum())
        for token in fits:
            go((*tokens, token), mass * float(row[token]) / total)

    go((), 1.0)
    out = paradec.generate(
        causal,
        input_ids=[[1, 2]] * 1000,
        sampler=sampler_of(way),
        constraint=NESTED,
        temperature=1.0,
        seed=[*range(1000)],
        max_new_tokens=4,
        eos_early_stop=False,
    )
    assert_frequencies(torch.stack(list(out.new_tokens)), expected)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("sjd", "lookup") else pytest.mark.full) for way in WAYS]
)
def test_answers_that_end_are_texts_of_the_grammar(way: str, causal: Model) -> None:
    request: dict[str, Any] = {"constraint": NESTED, "max_new_tokens": 14}
    drawn = paradec.generate(
        causal, [[1, 2, 3], [4]] * 8, sampler=sampler_of(way), temperature=1.0, seed=[*range(16)], **request
    )
    for text, finished in zip(drawn.text, drawn.finished, strict=True):
        assert is_complete(text) if finished else is_prefix(text), text
    assert sum(drawn.finished) > 4
    greedy = [paradec.generate(causal, [[1, 2, 3], [4]], sampler=sampler_of(each), **request) for each in (way, "sjd")]
    assert greedy[0].text == greedy[1].text


def test_copied_and_single_rows_are_equal(causal: Model) -> None:
    sampler = sampler_of("sjd")
    request: dict[str, Any] = {"constraint": NESTED, "max_new_tokens": 8, "temperature": 1.0, "seed": [1, 2, 3]}
    state = sampler.start(causal, torch.tensor([[1, 2], [3, 4], [5, 6]]), **request)
    sampler.commit(state, sampler.step(causal, state))
    for each in (state, *[copy.deepcopy(state), pickle.loads(pickle.dumps(state))]):
        decode(sampler, causal, each)
        assert each.canvas.equal(state.canvas)
    entries = [{"prompt": [1, 2], "seed": seed, **({"constraint": NESTED} if seed % 2 else {})} for seed in range(6)]
    many = [*paradec.generate_many(causal, entries, batch_size=2, sampler=sampler, temperature=1.0, max_new_tokens=6)]
    for entry, out in zip(entries, many, strict=True):
        alone = paradec.generate(
            causal, input_ids=[entry["prompt"]], sampler=sampler, temperature=1.0, max_new_tokens=6,
            seed=entry["seed"], constraint=entry.get("constraint"),
        )  # fmt: skip
        assert out.text == alone.text[0]  # type: ignore[index]


def test_values_and_refusals(causal: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert constraint_of("constraint", NESTED.to_dict()) == NESTED == pickle.loads(pickle.dumps(NESTED))
    for text, part in (('start: "a', "lexer error"), ("start: foo", 'unknown name: "foo"'), ("", "Empty"), (3, "text")):
        with pytest.raises(ValueError, match=f"grammar=.*{part}"):
            paradec.Grammar(text)  # type: ignore[arg-type]
    refuses(
        lambda: paradec.generate(tiny_with_texts(), [[1, 2]], constraint=NESTED, max_new_tokens=6),
        "is for causal models",
    )
    refuses(lambda: GrammarTexts(NESTED.grammar, paradec.load().tokenizer, 123, (1,)), "depends on its position")
    refuses(lambda: GrammarTexts(NESTED.grammar, TOKENIZER, len(TOKENIZER), ()), "needs an end token")

    def read(model: Any, **form: Any) -> Any:
        return read_constraint(TextBody.model_validate({"prompt": "x", **form}), [], None, model, None)

    constraint, texts = read(causal, structured_outputs={"grammar": NESTED.grammar})
    assert constraint == NESTED and isinstance(texts, GrammarTexts)
    with pytest.raises(ApiError, match="guided_grammar: .* is for causal models"):
        read(tiny_with_texts(), guided_grammar=NESTED.grammar)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refuses(lambda: paradec.Grammar("start: /a/"), "paradec.Grammar needs llguidance.*'grammar'", ModuleNotFoundError)
    refuses(lambda: read(causal, guided_grammar="start: /a/"), "needs llguidance", ApiError)


PATTERNS = [
    "[0-9]{4}-[0-9]{2}-[0-9]{2}", "(one|two|three|four)( (five|six|seven))*", r"[a-z]+@[a-z]+\.(com|org)",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", "a(ba)*", r"1+(\.1+)?", "[a-zé]{1,12}", '"([^"\\\\\n]|\\\\["\\\\nt])*"',
    "the (then|there|three)?",
]  # fmt: skip


def test_llguidance_allows_a_subset_of_the_automata() -> None:
    """Both allow the same tokens unless one continuation is left; then llguidance allows one tokenization."""
    size, ends, draw, alike, states = len(TOKENIZER), (TOKENIZER.eos_token_id,), np.random.default_rng(0), 0, 0
    for pattern in PATTERNS:
        automaton = token_automaton(paradec.Regex(pattern), TOKENIZER, size, ends, ())
        escaped = pattern.replace("/", r"\/").replace("\n", r"\n")
        texts = GrammarTexts(f"start: /{escaped}/", TOKENIZER, size, ends)
        for _ in range(12):
            state, theirs = 0, texts.begin
            for _ in range(12):
                ours = np.zeros(size, bool)
                for index in automaton.transitions(state)[0]:
                    ours[automaton.members[index]] = True
                actual = texts.fits(theirs)
                assert not (actual & ~ours).any(), (pattern, theirs)
                assert (actual == ours).all() or actual.sum() == 1, (pattern, theirs)
                alike, states = alike + bool((actual == ours).all()), states + 1
                token = int(draw.choice(np.flatnonzero(actual)))
                if token in ends:
                    break
                state, theirs = automaton.step(state, token), texts.after(theirs, token)  # type: ignore[assignment]
                assert theirs is not None and state >= 0
    assert states > 400 and alike > 0.85 * states, (alike, states)
