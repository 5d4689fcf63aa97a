"""Properties of the samplers that renoise a canvas, with every rule, with and without constraints."""

import copy
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from decoding import Recorder, refuses, same_values, state_values
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import replays
from small_models import CANVAS, GEMMA_VOCAB, tiny_gemma
from structured import CASES, KINDS, automaton_of, case_names, tiny_with_texts, tokenizer_of
from structured import VOCAB as VOCAB_CONSTRAINTS
from tokenized_models import byte_level_tokenizer

import paradec
from paradec import samplers
from paradec.caches.canvas_store import canvas_store_bytes
from paradec.core.protocol import NotFinite
from paradec.core.trace import Trace, TraceStep
from paradec.kernels.token_stats import draw
from paradec.kernels.token_stats.draws import SEGMENT
from paradec.models.adapter import Model
from paradec.samplers.features.constraints import CanvasConstraint
from paradec.samplers.renoising import base, rules

ENDS = (11, 12, 13)
SHORT = {"max_denoising_steps": 8, "confidence_threshold": 0.5}
GENERATOR = torch.Generator().manual_seed(0)
ROWS = [torch.randint(14, GEMMA_VOCAB, (size,), generator=GENERATOR).tolist() for size in (9, 1, 23, 5)]
PROMPTS_WITH_HOLES = [[20, 21, -1, -1, 24, *range(25, 45), -1, 46], [30, -1, 32]]
MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
CANVAS_RULES = [name for name in MASKED if rules.why_unsupported(samplers.create(name)) is None]
"""Every masked sampler that can be the rule of a canvas."""
METHODS = ["diffusion_gemma", *CANVAS_RULES, "low_confidence+threshold"]


def create_sampler(name: str, **more: Any) -> Any:
    if name == "diffusion_gemma":
        return samplers.create(name, **SHORT | more)
    return samplers.create("canvas", rule=name, **SHORT | more)


def create_model(dtype: torch.dtype = torch.float64, ends: tuple[int, ...] = ENDS) -> Any:
    return paradec.wrap(tiny_gemma(dtype=dtype), eos_token_id=ends)


def test_samplers_that_cannot_be_canvas_rules_are_refused() -> None:
    assert {"threshold", "entropy_threshold", "entropy_bound", "low_confidence", "random", "factor"} <= {*CANVAS_RULES}
    for name in {*MASKED} - {*CANVAS_RULES}:
        message = f"sampler '{name}' cannot be the rule of sampler 'canvas' on a canvas: .+"
        with pytest.raises(ValueError, match=message):
            samplers.create("canvas", rule=name)
    refuses(lambda: samplers.create("canvas", rule="klass"), "'klass'.*256 MiB for a row")


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, ROWS) for name in METHODS), (METHODS[0], [ROWS[1], *PROMPTS_WITH_HOLES])]
)
def test_rows_do_not_depend_on_the_batch(name: str, rows: list[list[int]]) -> None:
    wrapped, method = create_model(), create_sampler(name)
    request = {"sampler": method, "seed": [1, 2, 3, 4][: len(rows)], "max_new_tokens": 40}
    out = paradec.generate(wrapped, rows, **request)
    for row, prompt in enumerate(rows):
        alone = paradec.generate(wrapped, prompt, **request | {"seed": row + 1})
        assert torch.equal(alone.new_tokens[0], out.new_tokens[row])
        for counts in ("denoising_calls", "encoder_calls", "tokens"):
            assert getattr(alone, counts) == [getattr(out, counts)[row]]


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
def test_steps_have_no_side_effects_and_commits_write_their_positions(name: str) -> None:
    wrapped, method = create_model(), create_sampler(name)
    state = method.start(wrapped, PROMPTS_WITH_HOLES, seed=3, max_new_tokens=20, trace=True)
    is_prompt, before = state.is_prompt.clone(), state.canvas.clone()
    steps, column = np.zeros(state.batch, int), torch.arange(state.canvas.shape[1])
    total = int((~is_prompt & (column < torch.as_tensor(state.length).unsqueeze(1))).sum())
    while not state.done:
        start, final = state.block_start.copy(), ~state.undecided
        assert state.progress[0] < state.progress[1] == total
        values_before = copy.deepcopy(state_values(state))
        proposal = method.step(wrapped, state)
        second = method.step(wrapped, state)
        assert torch.equal(proposal.values, second.values) and torch.equal(proposal.logits, second.logits)
        assert same_values(state_values(state), values_before)
        commit = method.commit(state, proposal)
        state.trace.steps.append(TraceStep(commit.to_list(), proposal.cost.forwarded.tolist(), commit.kind))
        assert torch.equal(state.canvas[final], before[final])
        assert torch.equal(state.canvas[is_prompt], before[is_prompt])
        assert not (commit.selected & ~proposal.available).any()
        steps[proposal.rows] += 1
        for index, row in enumerate(proposal.rows):
            is_finished = bool(commit.selected[index].any())
            assert is_finished == bool((commit.selected[index] == proposal.available[index]).all())
            assert is_finished == (state.block_start[row] != start[row] or not state.running[row])
            place = slice(start[row], start[row] + CANVAS)
            if state.end[row] >= start[row] + CANVAS:
                assert torch.equal(state.canvas[row, place], proposal.values[index])
            assert steps[row] <= 8
            steps[row] = 0 if is_finished else steps[row]
        with pytest.raises(ValueError, match="made from an earlier state"):
            method.commit(state, proposal)
        before = state.canvas.clone()
    assert state.progress[0] == state.progress[1]  # also if rows ended early
    replayed = state.trace.replay()
    for row in range(state.batch):
        end = int(state.end[row])
        assert replayed[row][:end] == state.canvas[row, :end].tolist()


@pytest.mark.thinned
@pytest.mark.parametrize("name", CANVAS_RULES)
def test_the_name_of_a_masked_sampler_selects_it_as_canvas_rule(name: str) -> None:
    wrapped = create_model()
    request = {"seed": 5, "max_new_tokens": CANVAS, "steps": 4}
    by_name = paradec.generate(wrapped, ROWS[0], sampler=name, **request)
    as_rule = paradec.generate(wrapped, ROWS[0], sampler=samplers.create("canvas", rule=name), **request)
    assert torch.equal(by_name.new_tokens, as_rule.new_tokens) and by_name.denoising_calls == as_rule.denoising_calls


@pytest.mark.parametrize("vocab", [1, 5, 4 * SEGMENT, 4 * SEGMENT + 1, 6 * SEGMENT + 7])
def test_draw_inverts_the_distribution_function(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(50, vocab, generator=generator).double() * 3
    logits[:, ::3] = -torch.inf if vocab > 3 else 0
    uniform = torch.rand(50, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 2.0**-54, 1 - 2.0**-54
    sums = logits.softmax(-1).cumsum(-1).numpy()
    indices = [np.searchsorted(row, u * row[-1], side="right") for row, u in zip(sums, uniform.tolist())]
    expected = np.minimum(indices, vocab - 1).tolist()
    tokens = draw(logits.softmax(-1), uniform)
    assert tokens.tolist()[2:] == expected[2:]
    assert (logits.gather(-1, tokens.unsqueeze(-1)) > -torch.inf).all()  # also for uniform[0] and uniform[1]
    assert tokens[0] == (logits[0] > -torch.inf).int().argmax()


@pytest.mark.thinned
@pytest.mark.parametrize("wait", [0, 1, 4])
def test_waiting_for_other_rows_changes_neither_tokens_nor_calls_of_a_row(wait: int) -> None:
    wrapped = create_model(ends=())
    rows = ROWS * 2
    methods = (create_sampler("diffusion_gemma", encode_wait=steps) for steps in (0, wait))
    first, waiting = (paradec.generate(wrapped, rows, sampler=m, seed=7, max_new_tokens=48) for m in methods)
    assert torch.equal(first.new_tokens, waiting.new_tokens)
    assert first.denoising_calls == waiting.denoising_calls and first.encoder_calls == waiting.encoder_calls == [3] * 8


def test_waiting_makes_fewer_encoder_calls_for_the_batch() -> None:
    wrapped, rows = create_model(ends=()), ROWS * 2
    calls, longest = [], []
    for wait in (0, 2, 50):
        method, encodings = create_sampler("entropy_threshold", max_denoising_steps=24, encode_wait=wait), 0
        state, waited = method.start(wrapped, rows, seed=7, max_new_tokens=32), [np.zeros(8, int)]
        while not state.done:
            queries = method.query(state)
            encodings += queries[0].kind == "encode"
            absent = state.running & ~np.isin(np.arange(8), queries[-1].rows)
            waited.append((waited[-1] + 1) * absent)
            method.commit(state, method.step(wrapped, state))
        calls.append(encodings)
        longest.append(np.max(waited))
    assert calls[0] > calls[1] >= calls[2] == 2
    assert longest[:2] == [0, 2] and longest[2] > 2


@pytest.mark.thinned
@pytest.mark.parametrize("new", [1, 5, CANVAS, CANVAS + 1])
def test_shorter_answers_are_prefixes_of_longer_answers(new: int) -> None:
    wrapped, method = create_model(ends=()), create_sampler("diffusion_gemma")
    longer = paradec.generate(wrapped, ROWS, sampler=method, seed=4, max_new_tokens=2 * CANVAS).new_tokens
    out = paradec.generate(wrapped, ROWS, sampler=method, seed=4, max_new_tokens=new)
    assert torch.equal(out.new_tokens, longer[:, :new])
    assert out.tokens == [new] * 4 and out.finished == [False] * 4
    request = {"sampler": method, "seed": 4, "max_new_tokens": new, "eos_early_stop": False}
    full = paradec.generate(create_model(), ROWS, **request)
    assert torch.equal(full.new_tokens, out.new_tokens)


def test_reading_logits_in_pieces_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, method = create_model(), create_sampler("diffusion_gemma")
    request = {"sampler": method, "seed": 6, "max_new_tokens": 40, "top_k": 20}
    expected = paradec.generate(wrapped, ROWS, **request)
    monkeypatch.setattr(base, "PIECE", 3 * GEMMA_VOCAB)
    assert torch.equal(paradec.generate(wrapped, ROWS, **request).new_tokens, expected.new_tokens)


def test_infill_keeps_prompt_tokens_and_fills_holes_without_end_tokens() -> None:
    ends = range(1, GEMMA_VOCAB, 2)  # every other token
    model, method = create_model(ends=tuple(ends)), create_sampler("diffusion_gemma")
    out = paradec.infill(model, input_ids=PROMPTS_WITH_HOLES, sampler=method, seed=0)
    for row, prompt in enumerate(PROMPTS_WITH_HOLES):
        tokens = out.sequences[row, -len(prompt) :].tolist()
        assert [a for a, b in zip(tokens, prompt, strict=True) if b >= 0] == [b for b in prompt if b >= 0]
        assert not {*ends} & {a for a, b in zip(tokens, prompt, strict=True) if b < 0}  # holes have no end tokens
    assert out.tokens == [3, 1]


def test_infill_of_holes_in_text() -> None:
    tokenizer = byte_level_tokenizer()
    wrapped = paradec.wrap(tiny_gemma(vocab=len(tokenizer)), tokenizer=tokenizer)
    out = paradec.infill(wrapped, "one <mask:2> three<mask>", sampler=create_sampler("diffusion_gemma"), seed=0)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", " three"))
    ids = out.sequences[0].tolist()
    assert ids[: len(before)] == before and ids[len(before) + 2 : -1] == after
    assert out.filled[0].sum() == 3 and len(out.fills) == 2
    refuses(lambda: paradec.infill(wrapped, "<mask> three"), "begins with a hole")


def test_reusing_a_kept_prefix_changes_no_token() -> None:
    wrapped, method = create_model(), create_sampler("diffusion_gemma")
    first = paradec.generate(wrapped, ROWS, sampler=method, seed=2, max_new_tokens=40, keep_prefix=True)
    assert first.prefix.exact
    for row, prompt in enumerate(ROWS):  # all canvases except the last, which is not encoded
        stored = [*prompt, *first.new_tokens[row].tolist()][: len(prompt) + CANVAS * (first.encoder_calls[row] - 1)]
        assert first.prefix.tokens[row] == stored
    assert max(first.encoder_calls) == 3
    prompts = [[*row, *answer[:20].tolist(), 30, 31] for row, answer in zip(ROWS, first.new_tokens, strict=True)]
    request = {"sampler": method, "seed": 8, "max_new_tokens": 20}
    plain, reusing = (paradec.generate(wrapped, prompts, prefix=prefix, **request) for prefix in (None, first.prefix))
    assert torch.equal(plain.new_tokens, reusing.new_tokens)
    assert any(reusing.cost.reused_tokens)
    assert plain.forwarded_tokens - reusing.forwarded_tokens == sum(reusing.cost.reused_tokens)
    with pytest.raises(ValueError, match="was kept with another model"):
        paradec.generate(paradec.wrap(tiny_gemma(1)), prompts, prefix=first.prefix, **request)


@pytest.mark.parametrize("pad", [0, None])
def test_a_prefix_kept_with_rng_reference_ends_where_its_rows_end(pad: int | None, monkeypatch: Any) -> None:
    module, method = tiny_gemma(dtype=torch.float64), create_sampler("diffusion_gemma")
    monkeypatch.setattr(module.generation_config, "pad_token_id", pad)
    wrapped = paradec.wrap(module, eos_token_id=tuple(range(11, 20)))
    request = {"sampler": method, "seed": 2, "max_new_tokens": 40}
    first = paradec.generate(wrapped, ROWS, rng="reference", keep_prefix=True, **request)
    ends = [[*prompt, *new[:count]] for prompt, new, count in zip(ROWS, first.new_tokens.tolist(), first.tokens)]
    assert first.encoder_calls == [2] * 4 and len({min(count, CANVAS) for count in first.tokens}) > 2
    assert first.prefix.tokens == [row[: len(prompt) + CANVAS] for row, prompt in zip(ends, ROWS)]
    prompts = [[*row, 30, 31] for row in ends]
    plain, reusing = (paradec.generate(wrapped, prompts, prefix=prefix, **request) for prefix in (None, first.prefix))
    assert torch.equal(plain.new_tokens, reusing.new_tokens)
    assert reusing.cost.reused_tokens == [*map(len, first.prefix.tokens)]


def test_stop_strings_end_a_row() -> None:
    tokenizer = byte_level_tokenizer()
    wrapped = paradec.wrap(tiny_gemma(vocab=len(tokenizer)), tokenizer=tokenizer, eos_token_id=())
    request = {"sampler": create_sampler("diffusion_gemma"), "seed": 0, "max_new_tokens": 60}
    ids = paradec.generate(wrapped, ROWS[0], **request).new_tokens[0].tolist()
    text = tokenizer.decode(ids[20:22])
    stop = next(n for n in range(1, 61) if text in tokenizer.decode(ids[:n]))
    for new in (60, stop, stop - 1):  # with stop - 1 the stop string ends in the part of the canvas that is cut off
        ends: list[int] = []
        out = paradec.generate(
            wrapped, ROWS[0], stop_strings=text, callback=lambda state, _, ends=ends: ends.append(int(state.end[0])),
            **request | {"max_new_tokens": new},
        )  # fmt: skip
        assert out.tokens == [min(stop, new)] and out.finished == [stop <= new]
        assert ends[-1] == len(ROWS[0]) + min(stop, new)
        assert out.new_tokens[0, : out.tokens[0]].tolist() == ids[: out.tokens[0]]


def test_streamers_get_drafts_and_final_text() -> None:
    streamer = Recorder()
    request = {"sampler": create_sampler("diffusion_gemma"), "seed": 0, "max_new_tokens": 20, "streamer": streamer}
    out = paradec.generate(create_model(ends=()), ROWS[0], **request)
    assert sum(streamer.pieces, []) == out.sequences[0].tolist() and streamer.ends == 1
    first = [draft for draft in streamer.drafts if len(draft) == CANVAS]
    assert len(first) > 1 and first[0] != first[-1]  # the drafts of the first canvas change
    assert {len(draft) for draft in streamer.drafts} <= {CANVAS, 20 - CANVAS}


def test_if_a_callback_stops_decoding_the_output_has_the_draft() -> None:
    wrapped, states = create_model(ends=()), []

    def stop(state: Any, commit: Any) -> bool:
        states.append((state, state.store.nbytes))
        return True

    request = {"sampler": create_sampler("diffusion_gemma"), "seed": 0, "max_new_tokens": 20}
    out = paradec.generate(wrapped, ROWS[0], callback=stop, **request)
    ((state, num_bytes),) = states
    length = len(ROWS[0]) + 2 * CANVAS
    assert num_bytes == canvas_store_bytes(wrapped.module.config.text_config, 1, length, torch.float64)
    assert state.store.nbytes == 0  # the store is freed
    assert out.denoising_calls == [1] and out.tokens == [0] and out.text is None
    assert (out.new_tokens[0, :CANVAS] != wrapped.facts.fill_token_id).any()


@pytest.mark.parametrize("rng", ["counter", "reference"])
def test_failed_commits_do_not_change_the_state(rng: str) -> None:
    wrapped, method = create_model(), create_sampler("diffusion_gemma")
    state = method.start(wrapped, ROWS, seed=0, rng=rng, max_new_tokens=20)
    method.commit(state, method.step(wrapped, state))
    before = copy.deepcopy(state_values(state))
    proposal = method.step(wrapped, state)
    queries = method.query(state)
    outputs = [wrapped(query, state.store) for query in queries]
    outputs[-1][2, 3, 4] = torch.nan
    with pytest.raises(NotFinite, match=r"NaN or infinite logits for row 2 at its step 1") as caught:
        method.commit(state, method.propose(state, outputs, queries))
    assert caught.value.rows.tolist() == [2]
    assert same_values(state_values(state), before)
    soften, proposal.soften = proposal.soften, None
    with pytest.raises(TypeError):
        method.commit(state, proposal)
    assert same_values(state_values(state), before)
    proposal.soften = soften
    method.commit(state, proposal)


@settings(max_examples=8, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.sampled_from([1, 3, 17, 33, None, 0, -1, "4"]),
            "steps": st.sampled_from([1, 2, 6, 7, 0, 1.5]), "seed": st.sampled_from([0, [1, 2], [1], -1, None]),
            "top_p": st.sampled_from([0.5, 1.0, 0.0, 2]), "top_k": st.sampled_from([1, 3, 1000, 0]),
            "rng": st.sampled_from(["counter", "reference", "other"]),
            "suppress_tokens": st.sampled_from([(), [3], range(14, 60), [-1]]), "logits_eos_inf": st.booleans(),
            "holes_eos_inf": st.booleans(), "eos_early_stop": st.booleans(),
            "num_return_sequences": st.sampled_from([1, 2, 0]), "keep_prefix": st.booleans(), "trace": st.booleans(),
            "temperature": st.sampled_from([0.0, 0.1]),
            "sampler": st.sampled_from(["diffusion_gemma", "threshold", "random", "credit", "sjd", "canvas"]),
        },
    )
)  # fmt: skip
def test_any_request_is_decoded_or_refused_in_one_line(request_: dict[str, Any]) -> None:
    wrapped = create_model(torch.float32)
    try:
        out = paradec.generate(wrapped, ROWS[:2], **{"max_new_tokens": 9} | request_)
    except (ValueError, TypeError) as error:
        assert "\n" not in str(error) and str(error)
        return
    banned = {*request_.get("suppress_tokens", ())} | ({*ENDS} if request_.get("logits_eos_inf") else set())
    for row, size in zip(out.new_tokens.tolist(), out.tokens, strict=True):
        assert not banned & {*row[:size]}


def test_log_probabilities_come_from_the_last_step_of_a_canvas() -> None:
    wrapped, method = create_model(), create_sampler("diffusion_gemma")
    state = method.start(wrapped, PROMPTS_WITH_HOLES, seed=1, max_new_tokens=20, logprobs=3)
    expected: dict[tuple[int, int], list[float]] = {}
    while not state.done:
        proposal = method.step(wrapped, state)
        distribution = (proposal.logits / state.temperature(proposal.rows)[:, None, None]).double().log_softmax(-1)
        for row, position, token, _ in method.commit(state, proposal).to_list():
            index = proposal.rows.tolist().index(row)
            column = proposal.positions[index].tolist().index(position)
            best = distribution[index, column].topk(3)
            expected[row, position] = [float(distribution[index, column, token]), *best.values.tolist()]
            assert token == best.indices[0]
    for (row, position), values in expected.items():
        tokens = [float(state.logprobs.chosen[row, position]), *state.logprobs.best[row, position].tolist()]
        assert tokens == pytest.approx(values, abs=1e-5)
    assert int((~state.logprobs.chosen.isnan()).sum()) == len(expected)
    out = paradec.generate(wrapped, ROWS, sampler=method, seed=1, max_new_tokens=20, logprobs=0)
    assert (~out.logprobs.chosen.isnan()).sum(1).tolist() == out.tokens


def test_traces_contain_drafts_and_final_tokens() -> None:
    request = {"seed": 1, "max_new_tokens": 20, "trace": True, "logprobs": 1}
    out = paradec.generate(create_model(), ROWS[:2], sampler=create_sampler("diffusion_gemma"), **request)
    loaded = Trace.from_json(out.trace.to_json())
    assert loaded.steps == out.trace.steps and loaded.family == "renoising"
    assert [len(row) for row in loaded.canvas] == [len(prompt) + 2 * CANVAS for prompt in ROWS[:2]]
    for row, prompt in enumerate(ROWS[:2]):
        answer = out.new_tokens[row, : out.tokens[row]].tolist()
        assert loaded.replay()[row][: len(prompt) + len(answer)] == prompt + answer
        assert loaded.to_fill(row)[0][0] == len(prompt)
    assert sum(len(step.rejected) for step in loaded.steps) > 0
    assert [step.blocks for step in loaded.steps][:1] == [[(9, 9 + CANVAS), (1, 1 + CANVAS)]]
    assert all(len(step.logprobs or []) == len(step.commits) for step in loaded.steps)
    assert [step.nfe for step in loaded.steps][0] == [2, 2]
    assert "<script" in out.trace.to_html()


@pytest.mark.parametrize("name", case_names("canvas"))
@replays("name")
def test_recorded_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    size, settings, end = len(case["vocab"]), dict(case["settings"]), case["end"]
    width, vocab = settings.pop("canvas"), max(size + 2, 16)
    module, tokenizer = tiny_gemma(dtype=torch.float64, vocab=vocab, canvas=width), tokenizer_of(case["vocab"], end)
    model = paradec.wrap(module, eos_token_id=end, tokenizer=tokenizer)
    sampler = samplers.create("diffusion_gemma", **settings)
    monkeypatch.setattr(
        CanvasConstraint, "uniform", lambda self, state, part: np.array(numbers)[np.array(part.open_positions) - start]
    )
    prompt = torch.tensor([[size + 1]])
    value = paradec.Regex(case["constraint"]["regex"])
    state = sampler.start(model, prompt, constraint=value, max_new_tokens=case["slots"])
    automaton, automaton_state, tokens = automaton_of(case), 0, list[int]()
    for number, (logits, expected) in enumerate(zip(case["logits"], case["expected"]["canvases"], strict=False)):
        start = 1 + number * width
        for step, (rows, recorded) in enumerate(zip(logits, expected["steps"], strict=False)):
            numbers = case["uniforms"][number][step]
            queries = sampler.query(state)
            queries[-1].soften = lambda logits: logits.new_zeros(*logits.shape[:-1], model.hidden_size)
            logits_of_canvas = torch.full((1, width, vocab), -torch.inf, dtype=torch.float64)
            logits_of_canvas[0, :, :size] = torch.tensor(rows, dtype=torch.float64)
            assert float(state.temperature(np.zeros(1, int))[0]) == pytest.approx(recorded["temperature"], rel=1e-6)
            proposal = sampler.propose(state, [logits_of_canvas], queries)
            assert proposal.values[0].tolist() == recorded["best"]
            entropy = -proposal.quantities["minus_entropy"][0]
            assert entropy.tolist() == pytest.approx(recorded["entropy"], rel=2e-5, abs=1e-7)
            assert entropy.mean().item() == pytest.approx(recorded["mean_entropy"], rel=2e-5, abs=1e-7)
            assert math.exp(state.constraint._parts[0][3].log_z()) == pytest.approx(recorded["z"], rel=2e-5)
            selected = sampler._select(state, proposal)
            drawn = sampler._draw_tokens(state, proposal, selected, None)
            columns = selected[0].nonzero()[:, 0].tolist()
            assert [[place, int(drawn[0, place])] for place in columns] == recorded["kept"]
            before = int(state.canvas_index[0])
            sampler.commit(state, proposal)
            is_finished = state.done or int(state.canvas_index[0]) > before
            assert is_finished == (step == len(expected["steps"]) - 1)
        text = state.canvas[0, start : start + width].tolist()
        text = text[: text.index(end) + 1] if end in text else text
        assert text == expected["tokens"][: len(text)]
        for token in expected["tokens"]:
            automaton_state = automaton.step(automaton_state, token)
        tokens += expected["tokens"]
    assert state.done and tokens == case["expected"]["tokens"] and automaton_state >= 0


@pytest.fixture(scope="module")
def canvases() -> Model:
    module = tiny_gemma(dtype=torch.float64, vocab=VOCAB_CONSTRAINTS, canvas=4)
    return paradec.wrap(module, tokenizer=tiny_with_texts().tokenizer, eos_token_id=39)


QUICK = {("diffusion_gemma", "choice"), ("canvas", "schema")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.full)
        for name in ("diffusion_gemma", "canvas")
        for kind in KINDS
    ],
)
def test_every_answer_satisfies_the_constraint(name: str, kind: str, canvases: Model) -> None:
    value, is_allowed = KINDS[kind]
    for seed, more in enumerate(({}, {"top_k": 2}, {"steps": 6}, {"top_p": 0.4}, {"max_new_tokens": 9})):
        request = {"sampler": name, "constraint": value, "seed": seed, "max_new_tokens": 12} | more
        out = paradec.generate(canvases, torch.tensor([[11, 12, 13], [14, 15, 16]]), **request)
        assert all(is_allowed(text) for text in out.text), (more, out.text)


def test_holes_with_constraints(canvases: Model) -> None:
    hole = canvases.facts.hole_id
    ids = torch.tensor([[11, hole, hole, hole, 12, hole, hole]])
    patterns = ("yes[0-9]{2}|[ab]{3}", "(no|[01])*")
    out = paradec.infill(canvases, input_ids=ids, constraints=[paradec.Regex(pattern) for pattern in patterns])
    assert out.fills is not None
    assert all(re.fullmatch(pattern, text) for text, pattern in zip(out.fills[0], patterns, strict=True))
