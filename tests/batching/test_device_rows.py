"""Batches that are refilled on the device (`compile=True`): answers and counts equal those of `generate`."""

from typing import Any

import pytest
import torch
from decoding import REQUEST, ROWS, Failing, Recorder, drain, refuses, ticket_ids
from small_models import tiny

import paradec
from paradec import samplers
from paradec.batching.batch import Batch
from paradec.batching.slots import Cancelled, DeviceGroup
from paradec.models.adapter import Model
from paradec.samplers.masked.device import engine as device_engine
from paradec.samplers.masked.device import graphs as device_graphs
from paradec.samplers.masked.device.graphs import NotCapturable

SAMPLERS = [name for name in samplers.names() if getattr(samplers.get(name), "device_step", False)]
MODELS = {prediction: tiny(2, prediction=prediction) for prediction in ("same", "shifted")}
NEW = [6, 3, 9, 1, 7, 12]


class UncapturedBatch(Batch):
    capture = False


@pytest.fixture(autouse=True)
def short_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad to multiples of 8 positions, to save time."""
    monkeypatch.setattr(device_graphs, "COLUMN_MULTIPLE", 8)
    monkeypatch.setattr(device_engine, "WIDTH_MULTIPLE", 8)


@pytest.fixture
def model() -> Model:
    return tiny(1)


def is_on_device(batch: Batch) -> bool:
    return all(isinstance(group, DeviceGroup) for group in batch._groups)


def assert_equals_generate(model: Model, batch: Batch, count: int = 6, **changes: Any) -> None:
    pairs = list(zip(ROWS, NEW, strict=True))[:count]
    tickets = [batch.add(row, max_new_tokens=new, seed=7 + new) for row, new in pairs]
    ended: list[Any] = []
    while batch.occupied or batch.waiting:
        ended += batch.step()
        assert is_on_device(batch)
    assert sorted(ticket.number for ticket in ended) == [ticket.number for ticket in tickets]
    for ticket, (row, new) in zip(tickets, pairs, strict=True):
        request = {**REQUEST, **changes, "max_new_tokens": new, "seed": 7 + new}
        out, expected = ticket.output, paradec.generate(model, input_ids=[row], **request)
        assert out is not None and out.error is None and torch.equal(out.new_tokens, expected.new_tokens)
        for name in ("row_nfe", "tokens", "finished", "row_forwards", "forwarded_tokens"):
            assert getattr(out, name) == getattr(expected, name), name


def assert_rows_equal_generate(model: Model, tickets: list[Any], rows: list[list[int]] = ROWS, **changes: Any) -> None:
    for ticket, row in zip(tickets, rows, strict=True):
        expected = paradec.generate(model, input_ids=[row], **{**REQUEST, **changes})
        assert ticket.output.error is None and ticket_ids(ticket) == expected.new_tokens[0].tolist()
        assert ticket.output.row_nfe == expected.row_nfe


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("sampler", "prediction", "cache"),
    [(name, *pair) for name in SAMPLERS for pair in (("same", "none"), ("shifted", "dual"))]
    + [("threshold", "same", "prefix"), ("low_confidence", "shifted", "prefix")],
)
def test_answers_and_counts_equal_those_of_generate(sampler: str, prediction: str, cache: str) -> None:
    changes = {"sampler": sampler, "cache": cache}
    batch = UncapturedBatch(MODELS[prediction], batch_size=3, **{**REQUEST, **changes}, compile=True)
    assert_equals_generate(MODELS[prediction], batch, **changes)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_any_number_of_slots(model: Model, size: int) -> None:
    changes = {"cache": "dual", "sampler": "threshold", "block_length": 5}
    batch = UncapturedBatch(model, batch_size=size, **{**REQUEST, **changes}, compile=True)
    assert_equals_generate(model, batch, **changes)


def test_a_row_that_needs_more_columns_moves_all_rows_into_a_larger_engine(model: Model) -> None:
    changes = {"sampler": "low_confidence", "cache": "dual", "block_length": 8, "eos_early_stop": False}
    request = {**REQUEST, **changes}
    batch = UncapturedBatch(model, batch_size=3, **request, compile=True)
    first = [batch.add(row, max_new_tokens=8) for row in ROWS[:2]]
    for _ in range(3):
        batch.step()
    before = batch._groups[0].rows.engine  # type: ignore[attr-defined]
    assert all(ticket.output is None for ticket in first)
    later = batch.add(ROWS[2] * 3, max_new_tokens=40)
    batch.step()
    group = batch._groups[0]
    assert isinstance(group, DeviceGroup) and group.rows is not None and group.rows.engine is not before
    assert group.rows.engine.columns > before.columns and group.rows.engine.blocks.shape[1] > before.blocks.shape[1]
    drain(batch)
    for ticket, row, new in zip([*first, later], [*ROWS[:2], ROWS[2] * 3], [8, 8, 40]):
        expected = paradec.generate(model, input_ids=[row], **{**request, "max_new_tokens": new})
        assert ticket_ids(ticket) == expected.new_tokens[0].tolist() and ticket.output.row_nfe == expected.row_nfe


def test_an_engine_is_reused_by_later_batches(model: Model) -> None:
    request = {**REQUEST, "cache": "dual", "compile": True}
    for _ in range(2):
        assert_equals_generate(model, UncapturedBatch(model, batch_size=4, **request), cache="dual")
    assert len(model.engines) == 1
    engine = next(iter(model.engines.values()))
    assert_equals_generate(model, UncapturedBatch(model, batch_size=4, **request), cache="dual")
    assert next(iter(model.engines.values())) is engine


def test_the_next_row_uses_new_weights(model: Model) -> None:
    batch = UncapturedBatch(model, batch_size=2, **REQUEST, compile=True)
    first = batch.add(ROWS[0])
    drain(batch)
    head = model.module.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().flip(0))
    second = batch.add(ROWS[0], alone=True)
    drain(batch)
    assert_rows_equal_generate(model, [second], ROWS[:1])
    assert ticket_ids(second) != ticket_ids(first)


def test_a_streamer_gets_final_tokens_and_drafts(model: Model) -> None:
    streamers = [Recorder() for _ in ROWS]
    with UncapturedBatch(model, batch_size=2, **REQUEST, compile=True) as batch:
        tickets = [batch.add(row, streamer=streamer) for row, streamer in zip(ROWS, streamers, strict=True)]
        drain(batch)
    for ticket, row, streamer in zip(tickets, ROWS, streamers):
        assert streamer.ends == 1 and streamer.drafts and streamer.pieces[0] == row
        assert sum(streamer.pieces[1:], []) == ticket_ids(ticket)[: ticket.output.tokens[0]]
        expected = paradec.generate(model, input_ids=[row], **REQUEST)
        assert ticket.output.forwarded_tokens == expected.forwarded_tokens and ticket.output.row_nfe == expected.row_nfe


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_nan_logits_end_their_row_alone(model: Model, cache: str) -> None:
    failing = Failing(model, token=35)
    batch = UncapturedBatch(failing, batch_size=3, **{**REQUEST, "cache": cache}, compile=True)
    rows = [[3 if token == 35 else token for token in row] for row in ROWS[:5]]
    rows[1] = [35, 1, 2]
    tickets = [batch.add(row) for row in rows]
    drain(batch)
    error = tickets.pop(1).output.error
    assert isinstance(error, FloatingPointError) and "its step 0" in str(error)
    assert_rows_equal_generate(model, tickets, [rows[0], *rows[2:]], cache=cache)


def test_cancelled_rows_keep_their_decoded_tokens(model: Model) -> None:
    request = {**REQUEST, "max_new_tokens": 9, "eos_early_stop": False}
    batch = UncapturedBatch(model, batch_size=1, **request, compile=True)
    cancelled, second = batch.add(ROWS[0]), batch.add(ROWS[1])
    for _ in range(4):
        batch.step()
    assert batch.cancel(cancelled)
    drain(batch)
    expected = paradec.generate(model, input_ids=[ROWS[0]], **request).new_tokens[0]
    assert isinstance(cancelled.output.error, Cancelled) and cancelled.output.row_nfe == [4]
    token_ids = cancelled.output.sequences[0, cancelled.output.filled[0]]
    is_mask = token_ids == model.facts.mask_id
    assert 0 < int((~is_mask).sum()) < 9 and torch.equal(token_ids[~is_mask], expected[: len(token_ids)][~is_mask])
    assert_rows_equal_generate(model, [second], [ROWS[1]], **request)


def test_rows_with_different_suppressed_tokens_are_in_different_groups(model: Model) -> None:
    batch = UncapturedBatch(model, batch_size=4, **REQUEST, compile=True)
    tickets = [batch.add(ROWS[0], suppress_tokens=excluded, alone=True) for excluded in ((1, 2), (1, 2), (3,), None)]
    batch.step()
    assert len(batch._groups) == 3 and is_on_device(batch)
    drain(batch)
    for ticket, excluded in zip(tickets, ((1, 2), (1, 2), (3,), None)):
        assert_rows_equal_generate(model, [ticket], ROWS[:1], suppress_tokens=excluded)


def test_out_of_memory_restarts_with_fewer_rows(model: Model) -> None:
    failing = Failing(model, calls=3, error=torch.OutOfMemoryError("CUDA out of memory"))
    batch = UncapturedBatch(failing, batch_size=4, **REQUEST, compile=True)
    tickets = [batch.add(row) for row in ROWS]
    max_occupied = 0
    while batch.occupied or batch.waiting:
        batch.step()
        if failing.calls_left < -1:
            max_occupied = max(max_occupied, batch.occupied)
            assert is_on_device(batch)
    assert 0 < max_occupied <= 2
    assert_rows_equal_generate(model, tickets)


def test_a_step_that_cannot_be_captured_runs_in_the_plain_loop(model: Model) -> None:
    failing = Failing(model, calls=2, error=NotCapturable("a step of tiny cannot be captured: it waits"))
    batch = UncapturedBatch(failing, batch_size=4, **REQUEST, compile=True)
    tickets = [batch.add(row) for row in ROWS]
    with pytest.warns(UserWarning, match="compile=True has no effect: a step of tiny cannot be captured"):
        drain(batch)
    assert_rows_equal_generate(model, tickets)


def test_no_answer_is_lost_after_an_interrupt(model: Model) -> None:
    failing = Failing(model, calls=4, error=KeyboardInterrupt())
    batch = UncapturedBatch(failing, batch_size=3, **{**REQUEST, "cache": "dual"}, compile=True)
    tickets = [batch.add(row) for row in ROWS]
    with pytest.raises(KeyboardInterrupt):
        drain(batch)
    drain(batch)
    assert_rows_equal_generate(model, tickets, cache="dual")


def test_unsupported_requests_run_in_the_plain_loop_with_a_warning(model: Model) -> None:
    batch = UncapturedBatch(model, batch_size=2, **{**REQUEST, "sampler": "credit"}, compile=True)
    ticket = batch.add(ROWS[0])
    with pytest.warns(UserWarning, match="compile=True has no effect: sampler 'credit'"):
        batch.step()
    assert not is_on_device(batch)
    drain(batch)
    assert_rows_equal_generate(model, [ticket], ROWS[:1], sampler="credit")


def test_max_memory_limits_the_slots(model: Model) -> None:
    row_bytes = model.store_bytes(1, 16, None) + 32 * 16
    batch = UncapturedBatch(model, batch_size=8, max_memory=3 * row_bytes, **{**REQUEST, "cache": "dual"}, compile=True)
    tickets = [batch.add(prompt) for prompt in ROWS]
    max_bytes = 0
    while batch.occupied or batch.waiting:
        batch.step()
        for group in batch._groups:
            assert isinstance(group, DeviceGroup) and group.rows is not None
            max_bytes = max(max_bytes, group.rows.engine.nbytes)
    assert 0 < max_bytes <= 3 * row_bytes
    assert_rows_equal_generate(model, tickets, cache="dual")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_captured_steps_give_the_answers_of_generate(cache: str) -> None:
    model = tiny(2)
    model.module.to("cuda")
    assert_equals_generate(model, Batch(model, batch_size=3, **{**REQUEST, "cache": cache}, compile=True), cache=cache)


def test_compile_is_refused_on_a_cpu(model: Model) -> None:
    refuses(lambda: Batch(model, **REQUEST, compile=True), "compile=True .* captures CUDA graphs")
    refuses(lambda: Batch(model, **REQUEST).add(ROWS[0], compile=True), "compile=True in a batch that is refilled")
    with pytest.raises(ValueError, match="compile=True in a batch that is refilled captures CUDA graphs"):
        next(iter(paradec.generate_many(model, [{"input_ids": ROWS[0]}], **REQUEST, compile=True)))
