"""Properties of every masked sampler, without a cache and with some cache, in float64."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from decoding import fits, supported_fields, topology_of
from small_models import MASK, full_mask, tiny

import paradec
from paradec import AdaptiveBlocks, PipelinedBlocks, caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.facts import ModelFacts
from paradec.core.protocol import Proposal
from paradec.models.adapter import Model
from paradec.samplers.features.pipelined_blocks import check_pipelined
from paradec.samplers.masked.state import MaskedState

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
MODELS: dict[str, dict[str, Any]] = {
    "llada64": {"prediction": "same", "topology": "bidirectional"},
    "dream64": {"prediction": "shifted", "topology": "bidirectional"},
    "blocks64": {"prediction": "same", "topology": "block_causal", "block_length": 4},
}
"""Fixture -> facts of the model. "blocks64" is for samplers that do not support bidirectional models."""
CACHES_FOR = {
    topology: [name for name in caches.names()[1:] if topology in caches.get(name).facts.topologies]
    for topology in ("bidirectional", "block_causal")
}


def pairs() -> list[tuple[str, str, str]]:
    """Return (sampler, cache, model): each sampler on both bidirectional models without a cache, and with one cache."""
    bidirectional = list(MODELS)[:2]
    triples = [(name, "none", model) for model in bidirectional for name in MASKED if is_supported(name, "none", model)]
    triples += [(name, "none", "blocks64") for name in MASKED if topology_of(name) == "block_causal"]
    for index, sampler in enumerate(MASKED):
        supported = [model for model in bidirectional if is_supported(sampler, "none", model)] or ["blocks64"]
        model = supported[-(index % 2)]
        names = [name for name in CACHES_FOR[MODELS[model]["topology"]] if is_supported(sampler, name, model)]
        triples.append((sampler, names[index // 2 % len(names)], model))
    delayed = [(name, "delayed", model) for name, model in zip(("credit", "threshold"), bidirectional, strict=True)]
    return [*triples, ("random", "dkv_greedy", "llada64"), ("threshold", "dkv_decode", "dream64"), *delayed]


def is_supported(sampler: str, cache: str, model: str) -> bool:
    facts = ModelFacts(vocab_size=2, **MODELS[model])
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


def supports_pipelined_blocks(name: str) -> bool:
    """Whether a sampler supports several open blocks."""
    try:
        check_pipelined(samplers.create(name), PipelinedBlocks(3))
    except ValueError:
        return False
    return True


COMBINATIONS = pairs()
pytestmark = pytest.mark.filterwarnings("ignore:cache=")
NEW = 8


def cases(name: str, cache: str, model: str) -> list[tuple[list[list[int]], dict]]:
    """Return (distinct prompts, request) of a greedy, a sampled and, if supported, a pipelined case."""
    draw = random.Random(f"{name} {cache} {model}")
    requests = []
    guided_temperature = draw.choice((0.0, 0.8))
    for temperature in (0.0, 0.8):
        rows: list[list[int]] = []
        for _ in range(draw.randint(2, 3)):
            row = [draw.randrange(36) for _ in range(draw.randint(1, 9))]
            rows += [row] if row not in rows else []
        request: dict[str, Any] = {"block_length": draw.choice((3, 4, NEW)), "temperature": temperature}
        request |= {"guidance_scale": 1.5 if temperature == guided_temperature else 1.0, "seed": draw.randrange(2**31)}
        request |= {"eos_early_stop": draw.random() < 0.5}
        if name == "adablock":  # its default delimiters need a tokenizer
            policy = AdaptiveBlocks(6, delimiters=tuple(range(0, 64, 3)), window=0.5, delimiter_threshold=0.2)
            request |= {"blocks": policy, "block_length": None}
        requests.append((rows, supported_fields(name, request)))
    if supports_pipelined_blocks(name) and (cache, model) != ("none", "dream64"):
        rows, request = requests[draw.randrange(2)]
        policy = PipelinedBlocks(
            draw.choice((2, 3)), add=draw.choice((0, 0.3, 0.6)), full=0.5, forced=draw.choice(("first", "active"))
        )
        requests.append((rows, request | {"blocks": policy, "block_length": None}))
    for _, request in requests if model == "blocks64" else []:
        request["block_length"] = request["block_length"] and {3: 2, 4: 4, NEW: 8}[request["block_length"]]
    return requests


@pytest.fixture(scope="module")
def blocks64() -> Model:
    return tiny(2, "block_causal")


@pytest.fixture(params=["llada64", "dream64"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def tensors_of(state: MaskedState) -> dict[str, torch.Tensor]:
    tensors = {"canvas": state.canvas, "undecided": state.undecided, **state.memory.tensors}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def numbers_of(state: MaskedState) -> dict[str, list]:
    return {name: value.tolist() for name, value in vars(state).items() if isinstance(value, np.ndarray)}


def assert_same_proposal(a: Proposal, b: Proposal) -> None:
    for name in ("values", "positions", "scores", "available"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.quantities.keys() == b.quantities.keys()
    assert all(torch.equal(a.quantities[name], b.quantities[name]) for name in a.quantities)
    assert (a.cost.nfe == b.cost.nfe).all()


def every_case() -> list[Any]:
    """Return all cases. By default the greedy or the sampled case runs, and with a cache also the pipelined case."""
    parameters = []
    for name, cache, model in COMBINATIONS:
        turn = (MASKED.index(name) + (model == "dream64")) % 2 if cache == "none" else MASKED.index(name) // 4 % 2
        quick = {turn} if cache == "none" else {turn, 2}
        for case in range(len(cases(name, cache, model))):
            marks = [] if case in quick else [pytest.mark.full]
            parameters.append(pytest.param(name, cache, model, case, marks=marks))
    return parameters


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "cache", "model_name", "case"), every_case())
def test_steps_have_no_side_effects_and_rows_do_not_depend_on_the_batch(
    name: str, cache: str, model_name: str, case: int, request: pytest.FixtureRequest
) -> None:
    """`step` has no side effects. A commit writes only undecided positions; samplers that revise write only to the open
    block. The number of steps is bounded. A row's tokens, forwards and commits do not depend on the batch."""
    model: Model = request.getfixturevalue(model_name)
    rows, fields = cases(name, cache, model_name)[case]
    sampler = samplers.create(name)
    state = sampler.start(model, rows, max_new_tokens=NEW, cache=cache, **fields)
    mask = model.facts.mask_token_id
    total = int(state.total.max())
    assert total == NEW or model_name == "blocks64"  # a block-causal model decodes whole blocks
    max_forwards = 2 * total if sampler.needs.may_wait and sampler.needs.mask_probes else total
    if sampler.needs.revises:
        length = fields["block_length"]
        if model_name == "blocks64":
            counts = [state.blocks.count(*lengths_) for lengths_ in zip(state.prompt_length, state.length, strict=True)]
            max_forwards = max(counts) * sampler.max_steps(np.array([length]))[0]
        else:
            max_forwards = sampler.max_steps(np.array([length] * (NEW // length) + [NEW % length])).sum()
    steps, evaluated_counts = [], []
    with torch.inference_mode():
        while not state.done:
            before, numbers = tensors_of(state), numbers_of(state)
            proposal, second = sampler.step(model, state), sampler.step(model, state)
            assert_same_proposal(proposal, second)
            assert all(torch.equal(tensor, before[key]) for key, tensor in tensors_of(state).items())
            assert numbers_of(state) == numbers
            running, start, end = state.running.copy(), state.block_start.copy(), state.block_end.copy()
            entries = sampler.commit(state, second).to_list()
            is_written = torch.zeros_like(before["undecided"])
            for row, position, token, _ in entries:
                if sampler.needs.revises:
                    assert start[row] <= position < end[row] and not state.is_prompt[row, position] and running[row]
                    assert before["undecided"][row, position] or token != before["canvas"][row, position]
                    assert not (before["undecided"][row, position] and token == mask)
                else:
                    assert before["undecided"][row, position] and token != mask and running[row]
                assert state.canvas[row, position] == token or state.facts.fill_token_id == state.canvas[row, position]
                is_written[row, position] = True
            outside = ~is_written & (state.canvas != before["canvas"])
            # changes without a commit are padding after an end token
            assert (state.canvas[outside] == state.facts.fill_token_id).all()
            opened = state.undecided & ~before["undecided"]
            assert not (opened & ~is_written if sampler.needs.revises else opened).any()
            if not sampler.needs.may_wait and not sampler.needs.revises:
                assert {row for row, *_ in entries} == set(np.flatnonzero(running).tolist())
            steps.append(entries)
            evaluated_counts.append(second.cost.forwarded)
            assert len(steps) <= max_forwards
    assert not state.undecided.any()
    assert (state.nfe <= max_forwards).all()
    assert state.progress[0] == state.progress[1] == state.total.sum() >= NEW * len(rows)
    states: list[MaskedState] = []
    fields |= {"max_new_tokens": NEW, "trace": True, "callback": lambda state, commit: states.append(state)}
    for index, prompt in enumerate(rows):
        assert state.canvas[index, : len(prompt)].tolist() == prompt
        alone = paradec.generate(model, [prompt], sampler=sampler, cache=cache, **fields)
        assert state.canvas[index, : len(prompt) + NEW].tolist() == alone.sequences[0].tolist()
        assert state.nfe[index] == alone.nfe
        assert (state.end[index], state.stopped[index]) == (states[-1].end[0], states[-1].stopped[0])
        ours = [[entry[1:3] for entry in entries if entry[0] == index] for entries in steps]
        theirs = [[entry[1:3] for entry in step.commits] for step in alone.trace.steps]
        assert ours[: len(theirs)] == theirs and not any(ours[len(theirs) :])
        assert sum(counts[index] for counts in evaluated_counts) == alone.forwarded_tokens
        replayed = alone.trace.replay()[0]
        end = int(states[-1].end[0])  # padding after the end is not in the commits
        assert replayed[:end] == alone.sequences[0, :end].tolist()
        assert alone.nfe == sum(step.forwarded[0] > 0 for step in alone.trace.steps)
        assert alone.forwarded_tokens == sum(step.forwarded[0] for step in alone.trace.steps)


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in MASKED if "temperature" not in samplers.get(name).unsupported])
def test_seeds_determine_tokens_and_rows_of_one_prompt_differ(name: str, llada64: Model, blocks64: Model) -> None:
    arguments = {"sampler": name, "max_new_tokens": NEW, "temperature": 4.0, "eos_early_stop": False}
    model = llada64 if fits(name, llada64) else blocks64
    alone = paradec.generate(model, [1, 2, 3], seed=5, **arguments)
    out = paradec.generate(model, [[1, 2, 3]] * 9, seed=[5, 6, 7, 8, 9, 5, 5, 5, 5], **arguments)
    first, *others = out.new_tokens
    assert torch.equal(first, alone.new_tokens[0]) and out.row_nfe[0] == alone.nfe
    assert any(not torch.equal(first, other) for other in others[:4])
    assert any(not torch.equal(first, copy) for copy in others[4:])


MAY_LAG = {"klass", "persistence"}
"""Samplers that may commit fewer positions than scheduled: `klass` commits only stable positions, `persistence` delays
uncertain end tokens."""
MAY_DEVIATE = MAY_LAG | {"ccd", "ccd_agree"}
"""Samplers that may commit fewer or more positions than scheduled."""


@pytest.mark.thinned
@pytest.mark.parametrize("name", [n for n in MASKED if samplers.get(n).uses_steps is True])
@pytest.mark.parametrize("steps", [2, 4, 6])
def test_steps_bound_the_forwards(name: str, steps: int, model: Model) -> None:
    request = {"max_new_tokens": NEW, "block_length": NEW // 2, "eos_early_stop": False, "seed": 1}
    out = paradec.generate(model, [1, 2, 3], sampler=name, steps=steps, **request)
    if name not in MAY_LAG:
        assert out.nfe <= steps
    if not samplers.get(name).needs.may_wait and name not in MAY_DEVIATE:
        assert out.nfe == steps


def test_guidance_costs_two_row_forwards_and_one_nfe(llada64: Model) -> None:
    arguments = {"sampler": "low_confidence", "max_new_tokens": NEW, "steps": 4, "block_length": NEW}
    plain = paradec.generate(llada64, [1, 2, 3], eos_early_stop=False, **arguments)
    guided = paradec.generate(llada64, [1, 2, 3], eos_early_stop=False, guidance_scale=2.0, trace=True, **arguments)
    assert plain.nfe == guided.nfe == 4
    assert guided.row_forwards == 2 * plain.row_forwards == 8
    assert guided.forwarded_tokens == 2 * plain.forwarded_tokens == sum(sum(s.forwarded) for s in guided.trace.steps)


def test_guidance_formula(llada64: Model) -> None:
    """Guided logits are uncond + scale * (cond - uncond), where uncond is from a canvas with a masked prompt."""
    sampler = samplers.create("threshold")
    state = sampler.start(llada64, [1, 2, 3], max_new_tokens=4, block_length=4, guidance_scale=1.7)
    canvas = state.canvas.clone()
    masked = canvas.clone()
    masked[:, :3] = llada64.facts.mask_token_id
    with torch.inference_mode():
        conditional, unconditional = (llada64.module(input_ids=ids, use_cache=False).logits for ids in (canvas, masked))
        expected = unconditional + 1.7 * (conditional - unconditional)
        expected[..., llada64.facts.mask_token_id] = -torch.inf
        proposal = sampler.step(llada64, state)
    probabilities = expected[:, 3:].softmax(-1)
    assert torch.equal(proposal.values, probabilities.argmax(-1))
    torch.testing.assert_close(proposal.scores, probabilities.amax(-1), rtol=1e-9, atol=1e-12)


def test_suppressed_tokens_are_never_proposed(model: Model) -> None:
    unrestricted = paradec.generate(model, [1, 2, 3], max_new_tokens=NEW, eos_early_stop=False)
    banned = sorted(set(unrestricted.new_tokens[0].tolist()))
    out = paradec.generate(model, [1, 2, 3], max_new_tokens=NEW, suppress_tokens=banned, temperature=1.0, seed=0)
    assert not set(out.new_tokens[0, : out.tokens[0]].tolist()) & set(banned)


def test_logits_eos_inf_proposes_no_end(model: Model) -> None:
    out = paradec.generate(model, [1, 2, 3], max_new_tokens=NEW, logits_eos_inf=True)
    assert not set(out.new_tokens[0].tolist()) & set(model.facts.eos_token_ids)
    assert out.tokens == [NEW] and out.finished == [False]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_confidence_eos_eot_inf_commits_ends_last(model: Model, temperature: float) -> None:
    """No end token is committed while another position has a different candidate."""
    sampler = samplers.create("low_confidence")
    request = {"max_new_tokens": NEW, "block_length": NEW, "confidence_eos_eot_inf": True, "seed": 3}
    state = sampler.start(model, [1, 2, 3], temperature=temperature, **request)
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(model, state)
            ends = torch.isin(proposal.values, torch.tensor(model.facts.eos_token_ids))
            has_other_candidates = (proposal.available & ~ends).any()
            commit = sampler.commit(state, proposal)
            if has_other_candidates:
                assert not (commit.selected & ends).any()


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_confidence_eos_eot_inf_equals_a_plain_loop(threshold: float | None) -> None:
    """A step commits end tokens only if no undecided position predicts another token."""
    ends = tuple(range(14))  # a third of the tokens
    model, num_delayed = tiny(1, ends=ends), 0
    name, settings = ("low_confidence", {}) if threshold is None else ("threshold", {"threshold": threshold})
    for prompt in ([1, 2, 3], [20, 30], [7] * 5):
        canvas, expected = prompt + [MASK] * 12, []
        for block in (range(len(prompt), len(prompt) + 6), range(len(prompt) + 6, len(prompt) + 12)):
            while masks := [i for i in block if canvas[i] == MASK]:
                with torch.inference_mode():
                    logits = model.module(torch.tensor([canvas]), full_mask(len(canvas)), use_cache=False).logits[0]
                p, tokens = logits[:, :MASK].softmax(-1).max(-1)
                others = [i for i in masks if tokens[i] not in ends]
                chosen = sorted(others or masks, key=lambda i: (-float(p[i]), i))[:1]
                if threshold is not None:
                    chosen += [i for i in others if p[i] >= threshold and i not in chosen]
                num_delayed += max(masks, key=lambda i: float(p[i])) not in chosen
                expected.append({(i, int(tokens[i])) for i in chosen})
                for i in chosen:
                    canvas[i] = int(tokens[i])
        request = {"max_new_tokens": 12, "block_length": 6, "eos_early_stop": False, "trace": True}
        sampler = samplers.create(name, **settings)
        out = paradec.generate(model, prompt, sampler=sampler, confidence_eos_eot_inf=True, **request)
        assert [{(i, token) for _, i, token, _ in step.commits} for step in out.trace.steps] == expected
    assert num_delayed  # in some steps the most confident position predicts an end token


def test_eos_early_stop_ends_each_row_and_counts_no_padding(llada64: Model) -> None:
    rows = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [1, 2]]
    stopped = paradec.generate(llada64, rows, max_new_tokens=32, block_length=8)
    unstopped = paradec.generate(llada64, rows, max_new_tokens=32, block_length=8, eos_early_stop=False)
    end = llada64.facts.eos_token_ids[0]
    for index in range(len(rows)):
        assert stopped.row_nfe[index] <= unstopped.row_nfe[index]
        if not stopped.finished[index]:
            continue
        count = stopped.tokens[index]
        answer = stopped.new_tokens[index].tolist()
        assert answer.index(end) == count - 1
        assert answer[count:] == [llada64.facts.fill_token_id] * (32 - count)
        # up to the end, the answer equals the one without early stop
        assert answer[:count] == unstopped.new_tokens[index, :count].tolist()
    assert any(stopped.finished) and sum(stopped.row_nfe) < sum(unstopped.row_nfe)
    assert stopped.tokens_per_forward == sum(stopped.tokens) / sum(stopped.row_nfe)


def test_left_padded_right_padded_and_listed_prompts_are_equivalent(model: Model) -> None:
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    left = torch.tensor([[1, 2, 3, 4, 5], [9, 9, 9, 6, 7]])
    right = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]])
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    as_list = paradec.generate(model, rows, max_new_tokens=NEW)
    as_left = paradec.generate(model, input_ids=left, attention_mask=keep, max_new_tokens=NEW)
    as_right = paradec.generate(model, input_ids=right, attention_mask=keep.flip(1), max_new_tokens=NEW)
    assert torch.equal(as_list.sequences, as_left.sequences) and torch.equal(as_list.sequences, as_right.sequences)
    assert torch.equal(as_left.sequences[:, 5:], as_left.new_tokens)
    assert as_left.attention_mask.tolist() == [[1] * (5 + NEW), [0] * 3 + [1] * (2 + NEW)]


def test_a_callback_can_stop_decoding_and_keeps_committed_tokens(llada64: Model) -> None:
    progress = []

    def callback(state: MaskedState, commit: object) -> bool:
        progress.append(state.progress)
        return len(progress) == 3

    out = paradec.generate(llada64, [1, 2, 3], sampler="low_confidence", max_new_tokens=NEW, callback=callback)
    assert progress == [(1, NEW), (2, NEW), (3, NEW)] and out.nfe == 3
    assert (out.new_tokens == llada64.facts.mask_token_id).sum() == NEW - 3


def test_an_interrupt_keeps_committed_tokens(llada64: Model) -> None:
    def callback(state: MaskedState, commit: object) -> None:
        if state.progress[0] == 4:
            raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paradec.generate(
            llada64, [1, 2, 3], sampler="low_confidence", max_new_tokens=NEW, callback=callback, trace=True
        )
    out = caught.value.output
    assert out.nfe == 4 and len(out.trace.steps) == 4
    assert (out.new_tokens != llada64.facts.mask_token_id).sum() == 4
