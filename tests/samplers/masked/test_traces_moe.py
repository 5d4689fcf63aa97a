"""Recorded runs of public decoding loops on mixtures of experts, replayed in float64.

They are LLaDA2.0, LLaDA2.1, a batched sampler for LLaDA2.0, LLaDA on LLaDA-MoE, SDAR on SDAR-MoE, and the pipeline of
diffusers. Calls commit the same tokens as the reference's; `rng="reference"` includes the mask token in the softmax.
The references differ from paradec in these points:
- LLaDA2.0 stops after a block with an end token, and 2.1 decodes all blocks. paradec runs without early stop and is
  compared up to the reference's stop. `test_ends` checks that early stop gives the same answers. With an end token in
  the prompt, LLaDA2.0's early stop returns an empty answer.
- With a threshold above 1 a step commits only its quota, like paradec's `low_confidence`. With an editing threshold
  above 1 nothing is edited, and the reference's empty calls are ignored.
- With a temperature, the reference's sampled tokens replace paradec's.
- In a batch, paradec's rows are independent; the reference's rows open their next block together.
- In a padded batch the pipeline masks attention from positions after the answer to themselves. Only the blocks before
  them are compared.
- SDAR's static and sequential rules overwrite decided tokens if fewer masks remain than they fill; paradec does not.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import MOE_RECORDED, golden_moe
from recorded import find_checkpoint, is_packaged, read_json, read_json_unrecorded, replay_with_margin
from traces import select_covering_traces

import paradec
from paradec import samplers
from paradec.integrations.diffusers.hooks.block_cache import BlockCausalModule
from paradec.models.adapter import Model

TRACES = MOE_RECORDED / "traces"


def model_of(trace: dict[str, Any], block_length: int | None) -> Model:
    return golden_moe(find_checkpoint(trace["model"], "moe"), "float64", block_length, trace["mask_id"])


def names(method: str) -> list[str]:
    return sorted(f"{method}/{path.stem}" for path in (TRACES / method).glob("*.json"))


def covering_cases(file_names: list[str], among: str = "") -> list[Any]:
    """Return (file, slice of its cases) as parameters. The first cases of a few files, which cover every setting, run
    by default; the rest is marked `full`. among: a text that the names of these few files contain."""
    first = select_covering_traces([name for name in file_names if among in name], together=1, load=head_of)
    others = [(name, slice(1, None)) if name in first else (name, slice(None)) for name in file_names]
    return [(name, slice(1)) for name in first] + [pytest.param(*entry, marks=pytest.mark.full) for entry in others]


def trace_of(name: str) -> dict[str, Any]:
    return read_json(TRACES / f"{name}.json")


def head_of(name: str) -> dict[str, Any]:
    return read_json_unrecorded(TRACES / f"{name}.json")


def cases(trace: dict[str, Any], numbers: slice) -> list[tuple[int, dict[str, Any]]]:
    return [*enumerate(trace["cases"])][numbers]


@contextlib.contextmanager
def replay_case(trace: dict[str, Any], name: str, case: dict[str, Any]) -> Iterator[None]:
    with replay_with_margin(name, case):
        yield
        assert case["nfe"] == len(case["steps"])
        assert trace.get("batch_size") in (None, len(case["prompt_ids"]))


def cut(answer: list[int], end: int) -> list[int]:
    """Return the answer up to and including the first end token, as the references do."""
    return answer[: answer.index(end) + 1] if end in answer else answer


Calls = list[tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]]
"""For each call of one row: the (position, token) pairs that replace masks, and those that replace other tokens."""


def their_calls(case: dict[str, Any], row: int = 0) -> Calls:
    calls = []
    for step in case["steps"]:
        edited = {(at, new) for other_row, at, _, new in step.get("edit", []) if other_row == row}
        committed = {(at, token) for other_row, at, token in step["commit"] if other_row == row}
        calls.append((frozenset(committed - edited), frozenset(edited)))
    return calls


def run(
    model: Model, sampler: Any, prompts: list[list[int]], new: int, max_calls: int | None = None, draws: Any = None,
    **request: Any,
) -> Iterator[tuple[Calls, list[int]]]:  # fmt: skip
    """Decode; yield each row's calls and final canvas. draws: for each call, tokens and probabilities that replace
    paradec's at the last positions of the open block (`replace_draws`)."""
    state = sampler.start(model, prompts, max_new_tokens=new, eos_early_stop=False, rng="reference", seed=0, **request)
    calls: list[Calls] = [[] for _ in prompts]
    turn = 0
    while not state.done and turn != max_calls:
        before = state.canvas.clone()
        proposal = sampler.step(model, state)
        if draws is not None:
            replace_draws(proposal, *draws[turn], end=int(state.block_end[0]))
        running = proposal.rows.tolist()
        sampler.commit(state, proposal)
        for row in running:
            changed = (state.canvas[row] != before[row]).nonzero()[:, 0].tolist()
            entries = [(at, int(state.canvas[row, at])) for at in changed]
            filled = frozenset(entry for entry in entries if before[row, entry[0]] == state.mask_id)
            calls[row].append((filled, frozenset(entries) - filled))
        turn += 1
    for row in range(len(prompts)):
        yield calls[row], state.canvas[row].tolist()


def replace_draws(proposal: Any, tokens: list[int], probabilities: list[float], end: int) -> None:
    """Replace a proposal's tokens and probabilities at the last positions before `end`."""
    for token, probability, at in zip(tokens, probabilities, range(end - len(tokens), end), strict=True):
        is_position = proposal.positions[0] == at
        proposal.values[0, is_position] = token
        for quantity in (proposal.scores, *proposal.quantities.values()):
            quantity[0, is_position] = probability


def draws_of(case: dict[str, Any]) -> Any:
    """Return the (tokens, probabilities) of each call, or None if they were not recorded."""
    steps = [step for step in case["steps"] if not step.get("store")]
    if not all("sampled" in step for step in steps):
        return None
    return [(step["sampled"][0], step["sampled_p"][0]) for step in steps]


def assert_same_calls(ours: Calls, theirs: Calls, where: str) -> None:
    """Assert that calls are equal up to the reference's last call."""
    for number, (our_call, their_call) in enumerate(zip(ours, theirs)):
        assert our_call == their_call, f"{where}, call {number}"
    assert len(ours) >= len(theirs), where


def assert_decided(canvas: list[int], final: list[int], mask: int) -> None:
    """Assert that `canvas` has all tokens that the reference decided (`final`)."""
    assert all(token in (mask, ours) for ours, token in zip(canvas, final, strict=False))


def without_idle_calls(calls: Calls) -> Calls:
    return [call for call in calls if call[0] or call[1]]


def llada2(name: str, settings: dict[str, Any], prompt_length: int) -> tuple[Any, dict[str, Any]]:
    """Return paradec's sampler and request for LLaDA2.0's or LLaDA2.1's loop."""
    length, new = settings["block_length"], settings["gen_length"]
    if name.startswith("llada21"):
        edit = settings["editing_threshold"]
        changes = {"max_post_steps": settings["max_post_steps"]} if "max_post_steps" in settings else {}
        changes |= {"threshold": settings["threshold"], "editing_threshold": min(edit, 1.0)}
        least = settings.get("num_to_transfer", 1)
        return samplers.create("editing", preset="llada2.1", least=least, **changes), {"block_length": length}
    steps = min(settings["steps"], new // settings.get("minimal_topk", 1))
    blocks = -(-(prompt_length + new) // length) - prompt_length // length
    request = {"block_length": length}
    if settings["threshold"] > 1:
        return samplers.create("low_confidence"), request
    if steps >= length:  # at least one token per step
        return samplers.create("threshold", preset="llada2.0", threshold=settings["threshold"]), request
    sampler = samplers.create("threshold", threshold=settings["threshold"], quota_per_step="least")
    return sampler, request | {"steps": steps * blocks}


@pytest.mark.parametrize(
    ("name", "numbers"), [*covering_cases(names("llada20_generate")), *covering_cases(names("llada21_generate"))]
)
def test_llada2(name: str, numbers: slice) -> None:
    trace = trace_of(name)
    settings, edits, is_editing = trace["settings"], 0, name.startswith("llada21")
    model, end = model_of(trace, settings["block_length"]), trace["eos_id"]
    for number, case in cases(trace, numbers):
        with replay_case(trace, f"{name}, case {number}", case):
            prompt, where = case["prompt_ids"][0], f"{name}, case {number}"
            new, theirs = settings["gen_length"], their_calls(case)
            sampler, request = llada2(name, settings, len(prompt))
            ((calls, canvas),) = run(model, sampler, [prompt], new, len(case["steps"]), draws_of(case), **request)
            if is_editing and settings["editing_threshold"] > 1:
                assert all(call in theirs for call in calls)
                theirs = without_idle_calls(theirs)
            assert_same_calls(calls, theirs, where)
            assert_decided(canvas, case["final_ids"][0], trace["mask_id"])
            answer = cut(canvas[len(prompt) : len(prompt) + new], end)
            if not is_editing and settings.get("eos_early_stop") and end in prompt:
                assert case["returned"] == [[]], where
                assert end in answer
            else:
                assert answer == case["returned"][0], where
            edits += sum(len(edited) for _, edited in calls)
    if is_editing and is_packaged("moe"):
        assert edits or settings["editing_threshold"] > 0.8 or settings.get("max_post_steps") == 0


@pytest.mark.parametrize(
    ("name", "numbers"), covering_cases(names("llada20_generate") + names("llada21_generate"), "early")
)
def test_ends(name: str, numbers: slice) -> None:
    """With early stop, the default, answers equal the references' answers up to the end token, without more calls."""
    trace = trace_of(name)
    settings = trace["settings"]
    model, end = model_of(trace, settings["block_length"]), trace["eos_id"]
    if "temperature" in settings or settings["threshold"] > 1:
        return
    for number, case in cases(trace, numbers):
        with replay_case(trace, f"{name}, case {number}", case):
            prompt, new = case["prompt_ids"][0], settings["gen_length"]
            sampler, request = llada2(name, settings, len(prompt))
            out = paradec.generate(model, prompt, sampler=sampler, max_new_tokens=new, rng="reference", **request)
            if case["returned"] != [[]]:
                assert cut(out.new_tokens[0].tolist(), end) == case["returned"][0], f"{name}, case {number}"
            assert out.nfe <= case["nfe"] or end in prompt, f"{name}, case {number}"


@pytest.mark.parametrize(("name", "numbers"), covering_cases(names("llada20_batch")))
def test_batches(name: str, numbers: slice) -> None:
    """Decode three prompts of equal length. In the reference, rows wait for each other at the end of a block."""
    trace = trace_of(name)
    settings = trace["settings"]
    model = model_of(trace, settings["block_size"])
    for number, case in cases(trace, numbers):
        with replay_case(trace, f"{name}, case {number}", case):
            prompts, new = case["prompt_ids"], settings["max_new_tokens"]
            single = {"block_length": settings["block_size"], "steps": settings["steps_per_block"], "gen_length": new}
            sampler, request = llada2(name, single | {"threshold": settings["threshold"]}, len(prompts[0]))
            for row, (calls, canvas) in enumerate(run(model, sampler, prompts, new, **request)):
                assert calls == without_idle_calls(their_calls(case, row)), f"{name}, case {number}, row {row}"
                assert canvas == case["final_ids"][row]


@pytest.mark.parametrize(("name", "numbers"), covering_cases(names("diffusers_pipeline")))
@pytest.mark.parametrize("cache", [None, "block"])
def test_in_a_pipeline(name: str, numbers: slice, cache: str | None) -> None:
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    trace = trace_of(name)
    settings, length = trace["settings"], trace["settings"]["block_length"]
    model = model_of(trace, length)
    pipe = LLaDA2Pipeline(BlockCausalModule(model), BlockRefinementScheduler(block_length=length))
    for number, case in cases(trace, numbers):
        with replay_case(trace, f"{name}, case {number}", case):
            ids, mask = torch.tensor(case["prompt_ids"]), torch.tensor(case["attention_mask"])
            request = settings | {"mask_token_id": trace["mask_id"], "eos_token_id": trace["eos_id"]}
            with contextlib.nullcontext() if cache is None else paradec.accelerate(pipe, cache=cache):
                sequences = pipe(input_ids=ids, attention_mask=mask, output_type="seq", **request).sequences.tolist()
            begin = ids.shape[1]
            assert sequences == [row[begin : begin + settings["gen_length"]] for row in case["final_ids"]]


@pytest.mark.parametrize(("name", "numbers"), covering_cases(names("llada_moe_generate")))
def test_llada_moe(name: str, numbers: slice) -> None:
    trace = trace_of(name)
    settings, model = trace["settings"], model_of(trace, None)
    request = {"block_length": settings["block_length"], "steps": settings["steps"]}
    sampler = samplers.create("low_confidence")
    for number, case in cases(trace, numbers):
        with replay_case(trace, f"{name}, case {number}", case):
            runs = run(model, sampler, case["prompt_ids"], settings["gen_length"], **request)
            for row, (calls, canvas) in enumerate(runs):
                assert calls == their_calls(case, row), f"{name}, case {number}, row {row}"
                assert canvas == case["final_ids"][row]


@pytest.mark.parametrize(("name", "numbers"), covering_cases(names("sdar_generate")))
def test_sdar_moe(name: str, numbers: slice) -> None:
    """SDAR's rules and paradec's fill the same positions, if paradec's tokens and probabilities are replaced."""
    trace = trace_of(name)
    settings = trace["settings"]
    length, rule = settings["block_length"], settings["remasking_strategy"]
    model, mask = model_of(trace, length), trace["mask_id"]
    for number, case in cases(trace, numbers):
        with replay_case(trace, f"{name}, case {number}", case):
            prompt, where = case["prompt_ids"][0], f"{name}, case {number}"
            theirs = [step for step in case["steps"] if not step["store"]]
            blocks = -(-(len(prompt) + settings["gen_length"]) // length) - len(prompt) // length
            steps = settings["denoising_steps"]
            threshold = settings.get("confidence_threshold", 1.0)
            sampler = samplers.create("threshold", threshold=threshold, quota_per_step="least")
            request = {"block_length": length, "steps": steps * blocks, "eos_early_stop": False}
            state = sampler.start(model, [prompt], max_new_tokens=settings["gen_length"], **request)
            for call, step in enumerate(theirs):
                assert int(state.block_start[0]) // length * length == step["start"], where
                proposal = sampler.step(model, state)
                end = int(state.block_end[0])
                tokens, probabilities = step["sampled"][0], step["sampled_p"][0]
                if rule != "sequential":
                    replace_draws(proposal, tokens, probabilities, end)
                else:  # scores that fall from left to right
                    replace_draws(proposal, tokens, [1 - 0.01 * at for at in range(length)], end)
                before = state.canvas.clone()
                sampler.commit(state, proposal)
                filled = (before[0] != state.canvas[0]).nonzero()[:, 0].tolist()
                expected = [at for _, at, _ in step["commit"] if before[0, at] == mask]
                assert filled == expected, f"{where}, call {call}"
                for _, at, token in step["commit"]:  # also tokens that the static rules overwrite
                    state.canvas[0, at] = token
                    assert all(mask not in row for row in case["final_ids"]) or settings.get("stop")
