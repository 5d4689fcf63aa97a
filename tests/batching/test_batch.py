"""`Batch`: the order in which prompts get rows, failures of single rows, and recovery from errors."""

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from decoding import REQUEST, ROWS, Failing, Recorder, drain, nested_values, refuses, ticket_ids
from small_models import END, MASK, tiny
from torch import Tensor

import paradec
from paradec import samplers
from paradec.batching import Batch, BatchClosed, Cancelled, Ticket
from paradec.models.adapter import Model
from paradec.samplers.masked.rules.low_confidence import LowConfidence


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(1)


pytestmark = pytest.mark.filterwarnings("ignore:cache=")


@pytest.fixture(scope="module")
def causal() -> Model:
    return paradec.wrap(tiny(1).unwrap(), topology="causal", prediction="shifted", eos_token_id=END)


def decode_rows(model: Any, rows: list[list[int]], batch_size: int, **request: Any) -> list[Ticket]:
    with Batch(model, batch_size=batch_size, **request) as batch:
        tickets = [batch.add(row) for row in rows]
        drain(batch)
    return tickets


def decode_alone(model: Model, row: list[int], **request: Any) -> list[int]:
    return paradec.generate(model, row, **request).new_tokens[0].tolist()


class CountsRows(Failing):
    """A model that records the number of rows of each call."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.calls: list[int] = []

    def __call__(self, query: Any, *store: Any) -> Tensor:
        self.calls.append(len(query.rows))
        return self.model(query, *store)


def test_free_rows_go_to_the_oldest_prompt_and_kinds_are_decoded_in_parallel(model: Model) -> None:
    with Batch(model, batch_size=2, **REQUEST) as batch:
        tickets = [batch.add(row, **({"top_k": 3} if n % 2 else {})) for n, row in enumerate(ROWS[:6])]
        began: list[int] = []
        max_occupied = 0
        while not all(ticket.done for ticket in tickets):
            batch.step()
            max_occupied = max(max_occupied, batch.occupied)
            started = sorted((t for t in tickets if t.start_time), key=lambda t: t.start_time)
            began += [t.number for t in started if t.number not in began]
        assert max_occupied == 2 and began == list(range(6))
    for kind in (0, 1):
        expected = paradec.generate(model, ROWS[:6], **REQUEST, **({"top_k": 3} if kind else {}))
        for number in range(kind, 6, 2):
            assert ticket_ids(tickets[number]) == expected.new_tokens[number].tolist()


def test_prompts_with_different_seeds_lengths_and_suppressed_tokens_share_calls(model: Model, causal: Model) -> None:
    for adapter, settings in ((model, {"block_length": 4, "cache": "dual"}), (causal, {"sampler": "sjd"})):
        counting = CountsRows(adapter)
        request = {"temperature": 0.8, "seed": 2, "max_new_tokens": 8, **settings}
        suppressed = [{"suppress_tokens": [1, 2, 3]}, {"suppress_tokens": range(20)}] if adapter is model else [{}, {}]
        changes_of_rows = [{}, {"seed": 7}, {"max_new_tokens": 4}, *suppressed]
        with Batch(counting, batch_size=5, **request) as batch:
            tickets = [batch.add(row, **changes) for row, changes in zip(ROWS, changes_of_rows)]
            batch.step()
            assert sum(counting.calls) == 5 and len(batch._groups) == 1
            drain(batch)
        for row, changes, ticket in zip(ROWS, changes_of_rows, tickets):
            assert ticket_ids(ticket) == decode_alone(adapter, row, **{**request, **changes}), changes


def test_equal_prompts_draw_as_in_one_list(model: Model) -> None:
    rows = [ROWS[0], ROWS[1], ROWS[0], ROWS[0], ROWS[1]]
    expected = paradec.generate(model, rows, **REQUEST)
    with Batch(model, batch_size=1, **REQUEST) as batch:
        tickets, alone = zip(*[(batch.add(row), batch.add(row, alone=True)) for row in rows])
        drain(batch)
    assert [ticket_ids(ticket) for ticket in tickets] == expected.new_tokens.tolist()
    assert [ticket_ids(ticket) for ticket in alone] == [ticket_ids(tickets[n]) for n in (0, 1, 0, 0, 1)]
    assert ticket_ids(tickets[0]) != ticket_ids(tickets[2]) != ticket_ids(tickets[3])


def test_longer_prompts_widen_the_canvas_until_they_end(model: Model) -> None:
    rows = [[1], [2, 3], list(range(30)), [4], list(range(36)) * 2, [5, 6]]
    request = {**REQUEST, "cache": "dual"}
    with Batch(model, batch_size=2, **request) as batch:
        tickets = [batch.add(row) for row in rows]
        widths = []
        while not all(ticket.done for ticket in tickets):
            batch.step()
            widths += [group.width for group in batch._groups]
        assert widths[0] == 8 and 78 <= max(widths) <= 96 and widths[-1] < 32
    assert [ticket_ids(ticket) for ticket in tickets] == [decode_alone(model, row, **request) for row in rows]


class WordTokenizer:
    def decode(self, ids: Any, **options: Any) -> str:
        return " ".join(f"w{int(n)}" for n in ids)


@dataclass(frozen=True)
class StartRecorder(LowConfidence):
    """A rule that records how many rows start together and refuses prompts with token 38."""

    num_started: ClassVar[list[int]] = []

    def start(self, model: Any, prompt: Any, request: Any = None, **options: Any) -> Any:
        self.num_started.append(len(prompt.rows))
        if any(38 in row for row in prompt.rows):
            raise ValueError("no 38")
        return super().start(model, prompt, request, **options)


def fields_of(output: Any) -> dict[str, Any]:
    fields = {name: value for name, value in output.to_dict().items() if name not in ("seconds", "index", "id")}
    fields["cost"]["store_bytes"] = None
    del fields["logprobs"]["best"]  # follows from the compared fields
    return fields | {name: fields["logprobs"][name].tolist() for name in ("best_tokens", "step")}


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_rows_that_start_together_have_the_answers_of_generate(cache: str) -> None:
    model = tiny(1)
    model.tokenizer = WordTokenizer()
    shared = {**REQUEST, "cache": cache, "temperature": 0.8, "logprobs": 2, "stop_strings": ["w9"]}
    requests: list[tuple[list[int], dict[str, Any]]] = [
        *(([n + 1] * (1 + n % 3), {"seed": n // 2}) for n in range(5)),
        ([1, 38], {}),
        ([1, MASK, 2], {}),
        ([5, 6], {"max_new_tokens": 4}),
        ([5, 6], {"max_new_tokens": 4, "seed": 9}),
    ]
    method = StartRecorder()

    def check(pairs: Any) -> None:
        for (row, changes), ticket in pairs:
            if 38 in row:
                assert str(ticket.output.error) == "no 38" and not ticket.output.new_tokens.numel()
                continue
            assert ticket.output.error is None
            output = paradec.generate(model, row, **{**shared, **changes, "sampler": "low_confidence"})
            actual, expected = fields_of(ticket.output), fields_of(output)
            logprobs = [fields.pop("logprobs")["chosen"] for fields in (actual, expected)]
            torch.testing.assert_close(*logprobs, equal_nan=True)
            assert actual == expected
            assert ticket.output.sequences.untyped_storage().nbytes() == ticket.output.sequences.nbytes

    method.num_started.clear()
    with Batch(model, batch_size=9, **shared, sampler=method) as batch:
        tickets = [batch.add(row, alone=True, **changes) for row, changes in requests]
        drain(batch)
    # the common start of the five similar prompts and the refused one fails, so each of them starts alone
    assert method.num_started == [6, *[1] * 9]
    check(zip(requests, tickets, strict=True))
    method.num_started.clear()
    valid = requests[:5] + requests[-2:]
    with Batch(model, batch_size=9, **shared, sampler=method) as batch:
        tickets = [batch.add(row, alone=True, **changes) for row, changes in valid]
        batch.step()
        batch.add([7])
        batch.add([8])
        drain(batch)
    assert method.num_started == [5, 2, 2]
    check(zip(valid, tickets, strict=True))


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_nan_logits_end_their_prompt_alone(model: Model, cache: str) -> None:
    rows = [*ROWS[:3], [37, 1, 2], *ROWS[3:6], [1, 37], *ROWS[6:]]
    request = {**REQUEST, "cache": cache, "suppress_tokens": [37]}
    tickets = decode_rows(Failing(model, token=37), rows, 3, **request)
    expected = paradec.generate(model, rows, **request)
    for index, ticket in enumerate(tickets):
        if 37 in rows[index]:
            assert isinstance(ticket.output.error, FloatingPointError) and "NaN" in str(ticket.output.error)
            assert ticket.output.sequences[0, : len(rows[index])].tolist() == rows[index]
        else:
            assert ticket.output.error is None and ticket_ids(ticket) == expected.new_tokens[index].tolist()


def test_nan_logits_end_their_prompt_alone_in_causal_models(causal: Model) -> None:
    plain = tiny(1, topology="causal", prediction="shifted", seed=1)
    rows = [*ROWS[:3], [37, 1, 2], *ROWS[3:6], [1, 36, 3], *ROWS[6:]]
    request = {"seed": 3, "max_new_tokens": 8, "suppress_tokens": [36, 37]}
    sampler = samplers.create("speculative", drafter=Failing(plain, token=36), window=4)
    tickets = decode_rows(Failing(causal, token=37), rows, 3, sampler=sampler, **request)
    valid = [row for row in rows if not {36, 37} & {*row}]
    sampler = samplers.create("speculative", drafter=plain, window=4)
    expected = paradec.generate(causal, valid, sampler=sampler, **request)
    assert [ticket_ids(t) for t, row in zip(tickets, rows) if row in valid] == expected.new_tokens.tolist()
    errors = [t.output.error for t, row in zip(tickets, rows) if row not in valid]
    assert all(isinstance(error, FloatingPointError) for error in errors)
    assert ["drafter" in str(error) for error in errors] == [False, True]


@pytest.mark.parametrize("cache", ["none", "prefix"])
def test_a_row_whose_steps_raise_fails_alone(model: Model, cache: str) -> None:
    request = {**REQUEST, "cache": cache}
    rows = [[1, 2], [1, 38, 3], [4], [38], [5, 6, 7]]
    with Batch(Failing(model, token=38, error=RuntimeError("fails at 38")), batch_size=4, **request) as batch:
        recorder = Recorder()
        tickets = [batch.add(row, streamer=recorder if row == [4] else None) for row in rows]
        later = []
        while not all(ticket.done for ticket in tickets):
            batch.step()
            if not later:
                later = [batch.add([9, 9])]
                assert [ticket.number for ticket in batch._pending.waiting] == list(range(6))  # in order of arrival
        drain(batch)
        assert batch.occupied == batch.waiting == 0
    for row, ticket in zip(rows, tickets):
        if 38 in row:
            assert ticket.output is not None and "fails at 38" in str(ticket.output.error)
            assert "in step" in ticket.output.error.__notes__[0]  # the step in which it was raised, without its frames
            assert ticket.output.error.__traceback__ is None
        else:
            assert ticket_ids(ticket) == decode_alone(model, row, **request)
    assert ticket_ids(later[0]) == decode_alone(model, [9, 9], **request)
    streamed = [token for piece in recorder.pieces[1:] for token in piece]
    assert streamed == ticket_ids(tickets[2])[: len(streamed)] and recorder.ends == 1  # nothing was streamed twice


@pytest.mark.parametrize("error", [RuntimeError("once"), torch.OutOfMemoryError("CUDA out of memory")])
def test_no_answer_is_lost_after_one_error(model: Model, error: Exception) -> None:
    for rows, calls in ((ROWS[:4], 2), (ROWS[:3], 1)):
        kinds = [{"top_k": 3} if len(rows) == 3 and n == 1 else {} for n in range(len(rows))]
        with Batch(Failing(model, calls=calls, error=error), batch_size=4, calls_per_step=1, **REQUEST) as batch:
            tickets = [batch.add(row, **kind) for row, kind in zip(rows, kinds)]
            drain(batch)
        for row, kind, ticket in zip(rows, kinds, tickets):
            assert ticket_ids(ticket) == decode_alone(model, row, **REQUEST, **kind)


def test_an_error_at_the_start_ends_only_its_prompt(model: Model) -> None:
    with Batch(model, batch_size=2, **REQUEST) as batch:
        too_long, valid = batch.add([1] * 600), batch.add(ROWS[0])
        refuses(lambda: batch.add([99]), "input id 99 .* outside the vocabulary")
        refuses(lambda: batch.add([1], temperature=-1), "temperature=-1")
        refuses(lambda: batch.add([[1], [2]]), "2 rows; add them one by one")
        drain(batch)
        assert too_long.output.error is not None and "longer than" in str(too_long.output.error)
        assert too_long.output.tokens == [0] and too_long.output.row_nfe == [0]
        assert valid.output.error is None and valid.number == 1


def test_outputs_of_cancelled_prompts_have_the_tokens_committed_so_far(model: Model) -> None:
    request = {**REQUEST, "sampler": "low_confidence"}
    with Batch(model, batch_size=2, **request) as batch:
        tickets = [batch.add(row) for row in ROWS[:4]]
        batch.step()
        assert batch.cancel(tickets[0]) and batch.cancel(tickets[3])
        drain(batch)
        assert not batch.cancel(tickets[0]) and not batch.cancel(tickets[1])
    assert [type(ticket.output.error) for ticket in tickets] == [Cancelled, type(None), type(None), Cancelled]
    expected = paradec.generate(model, ROWS[:4], **request)
    assert [ticket_ids(ticket) for ticket in tickets[1:3]] == expected.new_tokens[1:3].tolist()
    assert tickets[0].output.tokens == [1] and tickets[3].output.tokens == [0]


def test_a_cancelled_row_is_not_evaluated_any_more(model: Model) -> None:
    counting = CountsRows(model)
    request = {**REQUEST, "sampler": "low_confidence", "eos_early_stop": False}
    with Batch(counting, batch_size=3, **request) as batch:
        tickets = [batch.add([number, 1]) for number in range(3)]
        batch.step()
        batch.cancel(tickets[1])
        drain(batch)
    assert counting.calls == [3, *[2] * 5]


def test_a_closed_batch_ends_its_prompts_and_accepts_no_more(model: Model) -> None:
    recorder, ended = Recorder(), []
    batch = Batch(model, batch_size=1, **REQUEST)
    tickets = [batch.add(ROWS[0], streamer=recorder, on_done=ended.append), batch.add(ROWS[1], on_done=ended.append)]
    batch.step()
    batch.close()
    assert all(isinstance(ticket.output.error, Cancelled) for ticket in tickets)
    assert recorder.ends == 1 and sorted(ticket.number for ticket in ended) == [0, 1]
    assert batch.occupied == batch.waiting == 0
    refuses(lambda: batch.add(ROWS[2]), "closed", RuntimeError)


def test_on_done_may_use_the_batch(model: Model) -> None:
    with Batch(model, batch_size=2, **REQUEST) as batch:
        events: list[Any] = []

        def add_or_close(ticket: Ticket) -> None:
            events.append(ticket.number)
            if ticket.number == 0:
                events.append(batch.add([7], on_done=lambda ticket: events.append(ticket_ids(ticket))))
                while not events[1].done:
                    batch.step()
            else:
                batch.close()

        batch.add([1], on_done=add_or_close, max_new_tokens=3)
        drain(batch)
        assert events[0] == 0 and ticket_ids(events[1]) in events
        last = [batch.add([number], on_done=add_or_close) for number in (2, 3, 4)]
        drain(batch)
        assert all(ticket.done for ticket in last)
        with pytest.raises(BatchClosed):
            batch.add([1])
    refuses(lambda: Batch(model).add([1], on_done=3), "on_done=3 must be callable", TypeError)


def test_on_done_is_called_for_every_ticket_even_if_one_raises(model: Model) -> None:
    called = []

    def on_done(ticket: Ticket) -> None:
        called.append(ticket.number)
        if ticket.number != 1:
            raise RuntimeError(f"refused ticket {ticket.number}")

    with Batch(model, batch_size=4, **REQUEST) as batch:
        tickets = [batch.add([number], on_done=on_done) for number in range(3)]
        with pytest.raises(ExceptionGroup) as caught:
            drain(batch)
        assert [str(error) for error in caught.value.exceptions] == ["refused ticket 0", "refused ticket 2"]
        assert sorted(called) == [0, 1, 2] and batch.ended() == tickets  # and no ticket is lost
        batch.add([5], on_done=on_done)
        refuses(lambda: drain(batch), "refused ticket 3", RuntimeError)


@pytest.mark.parametrize("call", ["step", "close"])
def test_a_streamer_may_call_back(model: Model, call: str) -> None:
    class CallsBack(Recorder):
        def put(self, ids: Tensor) -> None:
            super().put(ids)
            if len(self.pieces) == 2:
                getattr(batch, call)()

    with Batch(model, batch_size=2, **REQUEST) as batch:
        streamed, plain = batch.add([1], streamer=CallsBack()), batch.add([2])
        drain(batch)
    assert streamed.output is not None and plain.output is not None
    if call == "step":
        assert "a streamer called step" in str(streamed.output.error) and plain.output.error is None
    else:
        assert isinstance(streamed.output.error, Cancelled) and isinstance(plain.output.error, Cancelled)


@pytest.mark.parametrize("name", ["threshold", "wino", "sjd"])
def test_streamers_get_final_tokens_in_order(model: Model, causal: Model, name: str) -> None:
    adapter = causal if name == "sjd" else model
    request = {key: value for key, value in REQUEST.items() if name != "sjd" or key != "block_length"}
    recorders = [Recorder() for _ in ROWS]
    with Batch(adapter, batch_size=3, sampler=name, **request) as batch:
        tickets = [batch.add(row, streamer=recorder) for row, recorder in zip(ROWS, recorders)]
        drain(batch)
    for row, recorder, ticket in zip(ROWS, recorders, tickets):
        prompt, *pieces = recorder.pieces
        assert prompt == row and recorder.ends == 1 and bool(recorder.drafts) == (name != "sjd")
        flat = sum(pieces, [])
        assert flat == ticket_ids(ticket)[: len(flat)] and len(flat) == ticket.output.tokens[0] and all(pieces)


def test_a_streamer_that_fails_ends_its_prompt_alone(model: Model) -> None:
    class FailingRecorder(Recorder):
        def __init__(self, failing_call: int):
            super().__init__()
            self.failing_call = failing_call

        def put(self, ids: Tensor) -> None:
            super().put(ids)
            if len(self.pieces) == self.failing_call:
                raise OSError("the client went away")

    with Batch(model, batch_size=3, **REQUEST) as batch:
        tickets = [batch.add(row, streamer=FailingRecorder(call)) for row, call in zip(ROWS, (1, 2))]
        tickets += [batch.add(row) for row in ROWS[2:5]]
        drain(batch)
    assert [str(ticket.output.error) for ticket in tickets[:2]] == ["the client went away"] * 2
    expected = paradec.generate(model, ROWS[:5], **REQUEST)
    assert [ticket_ids(ticket) for ticket in tickets[2:]] == expected.new_tokens[2:].tolist()


@pytest.mark.parametrize("call", [0, 9])
def test_out_of_memory_makes_batches_smaller_and_loses_no_answer(model: Model, call: int) -> None:
    class TwoRowModel(Failing):
        def __call__(self, query: Any, *store: Any) -> Tensor:
            self.calls_left += 1
            if self.calls_left > call and len(query.rows) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return self.model(query, *store)

    expected = paradec.generate(model, ROWS, **REQUEST, cache="dual")
    recorders = [Recorder() for _ in ROWS]
    with Batch(TwoRowModel(model), batch_size=8, **REQUEST, cache="dual") as batch:
        tickets = [batch.add(row, streamer=recorder) for row, recorder in zip(ROWS, recorders)]
        drain(batch)
    assert [ticket_ids(ticket) for ticket in tickets] == expected.new_tokens.tolist()
    with Batch(TwoRowModel(model), batch_size=8, **REQUEST, sampler="low_confidence", eos_early_stop=False) as batch:
        short_tickets = [batch.add([number]) for number in range(6)]
        assert drain(batch) == short_tickets  # prompts that lost their rows are decoded again
    for recorder, ticket in zip(recorders, tickets):
        assert recorder.ends == 1 and sum(recorder.pieces[1:], []) == ticket_ids(ticket)[: ticket.output.tokens[0]]


def test_a_row_that_never_fits_fails_alone(model: Model) -> None:
    class ShortCanvasModel(Failing):
        def __call__(self, query: Any, *store: Any) -> Tensor:
            if query.tokens.shape[1] > 40:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.model(query, *store)

    rows = [ROWS[0], [1] * 50, ROWS[1], ROWS[2]]
    tickets = decode_rows(ShortCanvasModel(model), rows, 3, **REQUEST)
    assert isinstance(tickets[1].output.error, torch.OutOfMemoryError)
    for index in (0, 2, 3):
        assert ticket_ids(tickets[index]) == decode_alone(model, rows[index], **REQUEST)


def test_max_memory_limits_the_rows(model: Model) -> None:
    request = {**REQUEST, "cache": "dual", "temperature": 0.0}
    row_bytes = model.store_bytes(1, 14) + 32 * 14
    for rows_that_fit in (1, 3):
        with Batch(model, batch_size=8, max_memory=int((rows_that_fit + 0.9) * row_bytes), **request) as batch:
            # two groups share the memory
            tickets = [batch.add([index + 1] * 8, temperature=index % 2 / 2) for index in range(6)]
            max_occupied = 0
            while not all(ticket.done for ticket in tickets):
                batch.step()
                max_occupied = max(max_occupied, batch.occupied)
                assert sum(group.state.store.nbytes for group in batch._groups) <= batch.max_memory
        assert max_occupied == rows_that_fit
    (ticket,) = decode_rows(model, [[1] * 8], 8, max_memory=row_bytes // 2, **request)
    assert "more than max_memory" in str(ticket.output.error)


@pytest.mark.parametrize("lengths", [(8, 27, 8, 8, 27, 8), (8, 8, 8, 27, 27, 8)])
def test_rows_of_different_widths_fit_into_max_memory(model: Model, lengths: tuple[int, ...]) -> None:
    request = {**REQUEST, "cache": "dual", "temperature": 0.0, "eos_early_stop": False}
    row_bytes = model.store_bytes(1, max(lengths) + 6) + 32 * (max(lengths) + 6)
    for rows_that_fit in (1, 2, 3):
        with Batch(model, batch_size=8, max_memory=int((rows_that_fit + 0.9) * row_bytes), **request) as batch:
            tickets = [batch.add([n + 1] * size, max_new_tokens=6 if n else 12) for n, size in enumerate(lengths)]
            while not all(ticket.done for ticket in tickets):
                batch.step()
                assert sum(group.state.store.nbytes for group in batch._groups) <= batch.max_memory
                if rows_that_fit == 1 and not tickets[0].done:
                    batch.cancel(tickets[0])
        assert all(ticket.output.error is None for ticket in tickets if not ticket.cancelled)


def test_memory_does_not_grow_with_the_number_of_prompts(causal: Model, model: Model) -> None:
    for adapter, settings in ((model, {"cache": "dkv_decode", "block_length": 4}), (causal, {"sampler": "sjd"})):
        with Batch(adapter, batch_size=2, max_new_tokens=4, seed=0, **settings) as batch:
            sizes = []
            for index in range(16):
                batch.add([index % 36, index % 7 + 1])
                while batch.waiting:
                    batch.step()
                for group in batch._groups:
                    sizes.append(sum(getattr(value, "nbytes", 0) for _, value in nested_values(group.state)))
            assert max(sizes[:8]) >= max(sizes[8:])


def test_prompts_are_added_and_cancelled_from_many_threads(model: Model) -> None:
    rows = [[index % 36, index // 36 + 1, 3] for index in range(24)]
    expected = paradec.generate(model, rows, **REQUEST).new_tokens.tolist()
    answers: dict[int, list[int]] = {}
    with Batch(model, batch_size=4, **REQUEST) as batch:

        def submit(part: int) -> None:
            for index in range(part, 24, 4):
                done = threading.Event()
                ticket = batch.add(rows[index], on_done=lambda ticket, done=done: done.set())
                if index % 6 == 5:
                    batch.cancel(ticket)
                assert done.wait(60)
                if ticket.output.error is None:
                    answers[index] = ticket_ids(ticket)

        threads = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if batch.wait(0.05):
                batch.step()
    assert answers and all(token_ids == expected[index] for index, token_ids in answers.items())
    assert set(range(24)) - set(answers) <= {5, 11, 17, 23}


UNSUPPORTED: dict[str, Any] = {
    "num_return_sequences": 2, "generator": torch.Generator(), "keep_prefix": True, "share_prefix": True,
    "attention": "sparsed", "callback": print, "streamer": Recorder(), "trace": True, "progress": True,
    "rng": "reference",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_requests_are_refused_by_name(model: Model, name: str) -> None:
    argument, message = {name: UNSUPPORTED[name]}, f"^{name}=.* does not work with batches that are refilled: "
    refuses(lambda: Batch(model, **argument), message)
    batch = Batch(model)
    if name != "streamer":
        refuses(lambda: batch.add([1], **argument), message)
    assert batch.waiting == 0


def test_stop_rules_with_custom_row_state_are_refused_by_name(model: Model) -> None:
    (ticket,) = decode_rows(model, [[1]], 8, max_new_tokens=4, stop=lambda state, tokens: None)
    assert "has no field with rows" in str(ticket.output.error)
    request = {**REQUEST, "stop": paradec.Prophet(gaps=(0, 0, 0))}  # Prophet has no state
    tickets = decode_rows(model, ROWS[:5], 2, **request)
    assert [ticket_ids(t) for t in tickets] == paradec.generate(model, ROWS[:5], **request).new_tokens.tolist()
