"""`paradec.Grammar` with a nested language: distribution of answers, copies, errors, and comparison with automata."""

import copy
import pickle
import sys
from functools import partial
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
from paradec.constraints.values import parse_constraint, token_automaton
from paradec.core.protocol import decode
from paradec.integrations.server.limits import ApiError
from paradec.integrations.server.request_body import TextBody, read_constraint
from paradec.models.adapter import Model
from paradec.samplers.causal.trees import DynamicTree

llguidance = pytest.importorskip("llguidance", reason='needs the extra "grammar"')

NESTED = paradec.Grammar('start: "a" start "b" | "x" | "y" start "z"')


def is_prefix(text: str) -> bool:
    """Return whether `text` is a prefix of a text of NESTED, without a grammar library."""
    expected_end: list[str] = []
    for index, character in enumerate(text):
        if character in "ay":
            expected_end.append("b" if character == "a" else "z")
        elif character == "x":
            return "".join(reversed(expected_end)).startswith(text[index + 1 :])
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


METHODS: dict[str, dict[str, Any]] = {
    "sjd": {"sampler": "sjd", "window": 4},
    "one by one": {"sampler": "sjd", "window": 1},
    "chain": {"sampler": "speculative", "window": 4},
    "lookup": {"sampler": "speculative", "drafter": "prompt_lookup"},
    "tree": {"sampler": "speculative", "tree": (3, 2, 1)},
    "dynamic": {"sampler": "speculative", "tree": DynamicTree(5, 2, 2), "rule": "naive"},
}


def sampler_of(method: str) -> Any:
    settings = dict(METHODS[method])
    if method in ("chain", "tree", "dynamic"):
        settings["drafter"] = drafter()
    return samplers.create(settings.pop("sampler"), **settings)


def mark_full_except(*default: str) -> list[Any]:
    return [pytest.param(method, marks=() if method in default else pytest.mark.full) for method in METHODS]


@pytest.mark.parametrize("method", mark_full_except("sjd"))
def test_answers_have_the_distribution_of_token_by_token_decoding(method: str, causal: Model) -> None:
    text_of = {token: causal.tokenizer.decode([token], skip_special_tokens=True) for token in range(38)}
    expected: dict[tuple[int, ...], float] = {}

    def extend(tokens: tuple[int, ...], mass: float) -> None:
        text = "".join(text_of.get(token, "") for token in tokens)
        if len(tokens) == 4:
            expected[tokens] = mass
            return
        allowed = [token for token, piece in text_of.items() if piece and is_prefix(text + piece)]
        allowed = [39] if is_complete(text) else allowed
        with torch.no_grad():
            row = causal.module(torch.tensor([[1, 2, *tokens]])).logits[0, -1].softmax(-1)
        total = float(row[allowed].sum())
        for token in allowed:
            extend((*tokens, token), mass * float(row[token]) / total)

    extend((), 1.0)
    request: dict[str, Any] = {"constraint": NESTED, "max_new_tokens": 4, "eos_early_stop": False, "temperature": 1.0}
    request |= {"sampler": sampler_of(method), "seed": [*range(1000)]}
    out = paradec.generate(causal, input_ids=[[1, 2]] * 1000, **request)
    assert_frequencies(torch.stack(list(out.new_tokens)), expected)


@pytest.mark.parametrize("method", mark_full_except("sjd", "lookup"))
def test_finished_answers_are_texts_of_the_grammar(method: str, causal: Model) -> None:
    request: dict[str, Any] = {"constraint": NESTED, "max_new_tokens": 14}
    sampling = {"sampler": sampler_of(method), "temperature": 1.0, "seed": [*range(16)]}
    out = paradec.generate(causal, [[1, 2, 3], [4]] * 8, **request, **sampling)
    for text, finished in zip(out.text, out.finished, strict=True):
        assert is_complete(text) if finished else is_prefix(text), text
    assert sum(out.finished) > 4
    greedy = [paradec.generate(causal, [[1, 2, 3], [4]], sampler=sampler_of(m), **request) for m in (method, "sjd")]
    assert greedy[0].text == greedy[1].text


def test_copied_states_and_refilled_batches_decode_alike(causal: Model) -> None:
    sampler = sampler_of("sjd")
    request: dict[str, Any] = {"constraint": NESTED, "max_new_tokens": 8, "temperature": 1.0, "seed": [1, 2, 3]}
    state = sampler.start(causal, torch.tensor([[1, 2], [3, 4], [5, 6]]), **request)
    sampler.commit(state, sampler.step(causal, state))
    for copied in (state, *[copy.deepcopy(state), pickle.loads(pickle.dumps(state))]):
        decode(sampler, causal, copied)
        assert copied.canvas.equal(state.canvas)
    entries = [{"seed": seed, **({"constraint": NESTED} if seed % 2 else {})} for seed in range(6)]
    prompts, request = [{"prompt": [1, 2]} | entry for entry in entries], {"temperature": 1.0, "max_new_tokens": 6}
    outs = list(paradec.generate_many(causal, prompts, batch_size=2, sampler=sampler, **request))
    for entry, out in zip(entries, outs, strict=True):
        expected = paradec.generate(causal, input_ids=[[1, 2]], sampler=sampler, **request, **entry)
        assert out.text == expected.text[0]  # type: ignore[index]


def test_grammars_can_be_saved_and_wrong_ones_are_refused(causal: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_constraint("constraint", NESTED.to_dict()) == NESTED == pickle.loads(pickle.dumps(NESTED))
    for text, message in (
        ('start: "a', "lexer error"),
        ("start: foo", 'unknown name: "foo"'),
        ("", "Empty"),
        (3, "text"),
    ):
        refuses(partial(paradec.Grammar, text), f"grammar=.*{message}")
    refuses(lambda: paradec.generate(tiny_with_texts(), [[1, 2]], constraint=NESTED), "is for causal models")
    refuses(lambda: GrammarTexts(NESTED.grammar, paradec.load().tokenizer, 123, (1,)), "depends on its position")
    refuses(lambda: GrammarTexts(NESTED.grammar, TOKENIZER, len(TOKENIZER), ()), "needs an end token")

    def read(model: Any, **form: Any) -> Any:
        return read_constraint(TextBody.model_validate({"prompt": "x", **form}), [], None, model, None)

    constraint, texts = read(causal, structured_outputs={"grammar": NESTED.grammar})
    assert constraint == NESTED and isinstance(texts, GrammarTexts)
    message = "guided_grammar: .* is for causal models"
    refuses(lambda: read(tiny_with_texts(), guided_grammar=NESTED.grammar), message, ApiError)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refuses(lambda: paradec.Grammar("start: /a/"), "paradec.Grammar needs llguidance.*'grammar'", ModuleNotFoundError)
    refuses(lambda: read(causal, guided_grammar="start: /a/"), "needs llguidance", ApiError)


PATTERNS = [
    "[0-9]{4}-[0-9]{2}-[0-9]{2}", "(one|two|three|four)( (five|six|seven))*", r"[a-z]+@[a-z]+\.(com|org)",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", "a(ba)*", r"1+(\.1+)?", "[a-zé]{1,12}", '"([^"\\\\\n]|\\\\["\\\\nt])*"',
    "the (then|there|three)?",
]  # fmt: skip


def test_llguidance_allows_a_subset_of_the_automata() -> None:
    """The sets are equal unless only one text can follow, of which llguidance allows only one tokenization."""
    size, ends, draw = len(TOKENIZER), (TOKENIZER.eos_token_id,), np.random.default_rng(0)
    num_equal = num_states = 0
    for pattern in PATTERNS:
        automaton = token_automaton(paradec.Regex(pattern), TOKENIZER, size, ends, ())
        escaped = pattern.replace("/", r"\/").replace("\n", r"\n")
        texts = GrammarTexts(f"start: /{escaped}/", TOKENIZER, size, ends)
        for _ in range(12):
            state, grammar_state = 0, texts.begin
            for _ in range(12):
                expected = np.zeros(size, bool)
                for index in automaton.transitions(state)[0]:
                    expected[automaton.members[index]] = True
                actual = texts.fits(grammar_state)
                assert not (actual & ~expected).any(), (pattern, grammar_state)
                assert (actual == expected).all() or actual.sum() == 1, (pattern, grammar_state)
                num_equal, num_states = num_equal + bool((actual == expected).all()), num_states + 1
                token = int(draw.choice(np.flatnonzero(actual)))
                if token in ends:
                    break
                state, grammar_state = automaton.step(state, token), texts.after(grammar_state, token)  # type: ignore[assignment]
                assert grammar_state is not None and state >= 0
    assert num_states > 400 and num_equal > 0.85 * num_states, (num_equal, num_states)
