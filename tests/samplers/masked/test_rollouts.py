"""`generate(rollout=True)` for masked models: step and log-probability of every decision."""

import copy
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import assert_replayed, assert_same, read_last_writes, refuses
from small_models import MASK, tiny
from structured import KINDS, TEXTS, tiny_with_texts

import paradec
from paradec import samplers
from paradec.batching import Batch
from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model

ROWS = [[3, 5, 7, 9, 11], [2], [20, 21, 22, 1, 6, 8, 4]]
ROLLOUT: dict[str, Any] = {"max_new_tokens": 10, "rollout": True}
SAMPLED_ROLLOUT = ROLLOUT | {"temperature": 0.7, "seed": 3}
REVISING = ["wino", "saber", "editing"]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2)


@pytest.fixture(scope="module")
def block_causal() -> Model:
    return tiny(2, "block_causal")


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["threshold", "low_confidence", "credit", "klass", "random", *REVISING])
@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
def test_rollouts_contain_every_write(name: str, topology: str, model: Model, block_causal: Model) -> None:
    wrapped = model if topology == "bidirectional" else block_causal
    more: dict[str, Any] = {"temperature": 1.0, "seed": 4} | ({} if wrapped is block_causal else {"block_length": 5})
    num_remasked = 0

    def check_state(state: Any, commit: Any) -> None:
        nonlocal num_remasked
        is_decided = state.rollout.steps >= 0
        assert torch.equal(is_decided | (state.rollout.steps == -1), state.rollout.tokens != MASK)
        num_remasked += int((commit.values[commit.selected] == MASK).sum())

    output = paradec.generate(wrapped, ROWS, sampler=name, trace=True, callback=check_state, **ROLLOUT, **more)
    rollout = output.rollout
    assert num_remasked or name != "saber" or wrapped is block_causal
    assert rollout.tokens.shape[1] == (20 if wrapped is block_causal else 17)  # the last block is complete
    for row, decided in enumerate(read_last_writes(output)):
        begin, end = len(ROWS[row]), int(rollout.length[row])
        assert end == (-(-(begin + 10) // 4) * 4 if wrapped is block_causal else begin + 10)
        assert rollout.tokens[row, :begin].tolist() == ROWS[row]
        for position in range(rollout.tokens.shape[1]):
            is_outside = position < begin or position >= end
            token, step = decided.get(position, (MASK, -1 if is_outside else -2))
            assert rollout.step_map[row, position] == step
            assert is_outside or rollout.tokens[row, position] == token
    assert (rollout.settings["sampler"], rollout.settings["temperature"]) == (name, 1.0)
    if samplers.create(name).needs.revises:
        writes = []
        for row, (index, step) in itertools.product(range(len(ROWS)), enumerate(output.trace.steps)):
            row_step = sum(step.forwarded[row] > 0 for step in output.trace.steps[:index])
            writes += [[row, row_step, *entry] for entry in sorted(c[1:3] for c in step.commits if c[0] == row)]
        assert rollout.writes.tolist() == writes and rollout.writes_logp.shape == (len(writes),)
        assert (rollout.writes_logp.isnan() >= (rollout.writes[:, 3] == MASK)).all()
        assert torch.equal(rollout.writes_logp_drawn.isnan(), rollout.writes_logp.isnan())
    else:
        assert rollout.writes is None and torch.equal(rollout.logp.isnan(), ~rollout.decided)


def test_rollouts_contain_tokens_after_an_end_token() -> None:
    ending = tiny(2, ends=tuple(range(0, MASK, 3)))
    output = paradec.generate(ending, ROWS, logprobs=2, sampler="threshold(threshold=0.01)", trace=True, **ROLLOUT)
    rollout, row = output.rollout, output.finished.index(True)
    is_decided, is_in_answer = rollout.decided[row], output.logprobs.step[row] >= 0
    decided = read_last_writes(output)[row]
    assert {place: (int(rollout.tokens[row, place]), int(rollout.step_map[row, place])) for place in decided} == decided
    assert is_decided.sum() > is_in_answer.sum()
    assert (rollout.logp[row][is_decided] < 0).all() and not rollout.logp[row][is_decided].isnan().any()
    chosen = output.logprobs.chosen[row, -10:]
    actual = rollout.logp[row, len(ROWS[row]) :][: len(chosen)]
    torch.testing.assert_close(actual[is_in_answer[-10:]], chosen[is_in_answer[-10:]])
    assert output.logprobs.best.shape[-1] == 2
    assert paradec.generate(ending, ROWS, **ROLLOUT).logprobs.count == 0


@pytest.mark.parametrize("name", ["threshold", "saber"])
def test_rollouts_of_generate_many_equal_those_of_generate(name: str, model: Model) -> None:
    together = paradec.generate(model, ROWS * 2, sampler=name, **SAMPLED_ROLLOUT).rollout
    many = paradec.generate_many(model, ROWS * 2, batch_size=2, sampler=name, **SAMPLED_ROLLOUT)
    outputs = sorted(many, key=lambda output: output.index)
    for row, output in enumerate(outputs):
        assert_same(output.rollout, together.row(row))
    assert_same(Rollout.concatenate([output.rollout for output in outputs]), together)
    changed = copy.copy(together)
    changed.version += 1
    refuses(lambda: Rollout.concatenate([together, changed]), "rollouts differ in version: 0 and 1")
    refuses(lambda: Rollout.concatenate([]), "rollouts is empty")


def test_rollouts_have_the_settings_of_each_prompt(model: Model) -> None:
    with Batch(model, batch_size=3, **SAMPLED_ROLLOUT) as batch:
        tickets = [batch.add(row, seed=seed, suppress_tokens=[seed]) for seed, row in enumerate(ROWS)]
        while not all(ticket.done for ticket in tickets):
            batch.step()
    for seed, ticket in enumerate(tickets):
        rollout = ticket.output.rollout
        assert rollout.settings.get("seed") == seed and rollout.settings["suppress_tokens"] == [seed]
        assert set(rollout.suppressed[0].tolist()) == {MASK, seed}


@pytest.mark.parametrize("name", ["threshold", "saber"])
def test_rollouts_can_be_saved_copied_and_converted(name: str, model: Model, tmp_path: Path) -> None:
    rollout = paradec.generate(model, ROWS, sampler=name, **SAMPLED_ROLLOUT).rollout
    rollout.save(tmp_path / "rollout.safetensors")
    loaded, unpickled = Rollout.load(tmp_path / "rollout.safetensors"), pickle.loads(pickle.dumps(rollout))
    for equal in (loaded, copy.deepcopy(rollout), unpickled, rollout.to("cpu")):
        assert_same(equal, rollout)
    data = json.loads(json.dumps(rollout.to_dict(), allow_nan=False))
    assert data["tokens"] == rollout.tokens.tolist() and data["logp"][0][0] is None
    assert repr(rollout) == f"Rollout(3 rows, {int(rollout.decided.sum())} decisions, version 0)"
    (tmp_path / "other.safetensors").write_bytes(b"no tensors")
    refuses(lambda: Rollout.load(tmp_path / "other.safetensors"), r"other\.safetensors' holds no rollout")
    with pytest.raises(FileNotFoundError):
        Rollout.load(tmp_path / "nowhere")


def test_an_interrupted_rollout_keeps_the_decided_tokens(model: Model) -> None:
    def stop(state: Any, commit: Any) -> None:
        if state.commits == 2:
            raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paradec.generate(model, ROWS, sampler="low_confidence", callback=stop, **ROLLOUT)
    rollout = caught.value.output.rollout
    assert rollout.decided.sum() == 6 and (rollout.step_map == -2).sum() == 24
    assert (rollout.tokens[rollout.step_map == -2] == MASK).all()
    stopped = paradec.generate(model, ROWS, sampler="low_confidence", callback=lambda state, _: True, **ROLLOUT)
    assert stopped.rollout.decided.sum() == 3


CONSTRAINTS = {**{kind: value for kind, (value, _) in KINDS.items()}, "template": paradec.Regex(r"x[0-9]\.x[0-9]ab")}


@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:seed=3 has no effect")
@pytest.mark.parametrize("name", ["threshold", "random", "origin"])
@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
def test_rollouts_contain_tokens_written_without_a_forward(name: str, topology: str) -> None:
    model, has_later_forced = tiny_with_texts(topology), False
    fields: dict[str, Any] = {"sampler": name, "max_new_tokens": 10, "temperature": 1.0, "seed": 3, "rollout": True}
    fields |= {"block_length": 3} if topology == "bidirectional" else {"cache": "block"}
    more = [{"temperature": 0.0}, {"temperature": 0.0, "guidance_scale": 1.5}, {}]
    for at, value in enumerate(CONSTRAINTS.values()):
        request = fields | {"constraint": value} | more[at % len(more)]
        outputs = paradec.generate_many(model, ROWS, batch_size=2, **request)
        rollouts = [output.rollout for output in sorted(outputs, key=lambda output: output.index)]
        together = paradec.generate(model, ROWS, **request).rollout
        for row, rollout in enumerate(rollouts):
            assert_same(rollout, together.row(row))
        assert together.exact and torch.equal(together.logp.isnan(), ~together.decided)
        has_later_forced |= bool((together.step_map < -3).any())
        for one_forward in (None, False):
            assert_replayed(model, together, one_forward=one_forward)
    assert has_later_forced  # tokens without a forward occur also after the first block
    if topology == "block_causal":
        with torch.no_grad():
            paradec.replay(model, together, one_forward=True)


def test_holes_with_constraints_are_replayed() -> None:
    model = tiny_with_texts()
    prompt, value = [[3, MASK, MASK, 4, MASK, MASK, MASK, 5]], paradec.Regex("x[0-9]")
    request: dict[str, Any] = {"constraint": [value, paradec.Regex("[0-9]{3}")], "holes_eos_inf": False}
    rollout = paradec.infill(model, prompt, rollout=True, **request).rollout
    assert rollout.step_map[0, 1] == -3 and rollout.tokens[0, 1] == TEXTS.index("x")
    assert_replayed(model, rollout)


APPROXIMATE: dict[str, dict[str, Any]] = {
    "cache='dual'": {"cache": "dual", "block_length": 5},
    "suffix=": {"suffix": 5, "block_length": 5},
    "sparse attention": {"attention": "sparsed", "steps": 10},
    "keys and values of a prefix": {"share_prefix": True, "cache": "dkv_decode(refresh_interval=1)"},
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_rollouts_state_their_approximation(name: str, model: Model) -> None:
    rows = [[3, 5, 7, 9], [3, 5, 7, 1]]
    rollout = paradec.generate(model, rows, sampler="low_confidence", **ROLLOUT, **APPROXIMATE[name]).rollout
    assert rollout.approximation is not None and rollout.approximation.startswith(name) and not rollout.exact
    assert f"with {rollout.approximation}" in repr(rollout)
    assert paradec.generate(model, rows, **ROLLOUT).rollout.exact


def test_rollouts_of_infill_contain_the_filled_masks(model: Model) -> None:
    rollout = paradec.infill(model, [[3, MASK, 4, MASK]], rollout=True, holes_eos_inf=False).rollout
    assert (rollout.step_map[0] >= 0).tolist() == [False, True, False, True]


def test_rollouts_are_optional_and_change_no_output(model: Model) -> None:
    output = paradec.generate(model, ROWS, max_new_tokens=6)
    assert output.rollout is None
    with_rollout = paradec.generate(model, ROWS, max_new_tokens=6, rollout=True)
    assert torch.equal(output.sequences, with_rollout.sequences) and with_rollout.nfe == output.nfe
