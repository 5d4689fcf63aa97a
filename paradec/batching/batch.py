"""A batch that stays full: when a row ends, its slot goes to the next waiting prompt.

Iteration-level scheduling (Yu et al., "Orca", OSDI 2022). Each prompt gets the tokens that one call of
`paradec.generate` with all prompts, in order of arrival, would give it, since no row depends on its neighbours.
`Sampler.start` makes new rows, which are copied into free slots of a running state (`paradec.core.rows`).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar, Unpack

import numpy as np
import torch

from paradec.api.generate import make_sampler, prepare_request
from paradec.api.output import Output
from paradec.api.streaming import check_streamer
from paradec.batching.outputs import build_outputs, detach_error, failed_output, feed_streamer, is_out_of_memory
from paradec.batching.prefixes import Prefixes
from paradec.batching.slots import (
    KINDS,
    BatchClosed,
    Cancelled,
    DeviceGroup,
    Group,
    Queue,
    RowState,
    Ticket,
    call_on_done,
    can_run_on_device,
    estimate_row_bytes,
    group_key,
    why_unsupported,
)
from paradec.core.checks import check_bytes, check_int, check_model, short_repr
from paradec.core.interrupts import hold_interrupt
from paradec.core.prompts import Prompts, encode
from paradec.core.protocol import NotFinite
from paradec.core.weights import weights_lock
from paradec.request import Arguments, Preset, Request
from paradec.samplers.masked.device import step as device_step

__all__ = ["Batch", "BatchClosed", "Cancelled", "Ticket"]

T = TypeVar("T", bound=Ticket)


class Batch:
    """Decode prompts that arrive at any time, up to `batch_size` at once.

    >>> batch = Batch(model, batch_size=8, cache="dual", temperature=0.5, seed=1)     # doctest: +SKIP
    >>> ticket = batch.add("Sort: pear fig apple", max_new_tokens=16)                 # doctest: +SKIP
    >>> while not ticket.done: batch.step()                                           # doctest: +SKIP

    Prompts whose requests differ only in `slots.ROW_FIELDS` (with masked samplers also in `suppress_tokens`) form a
    group that shares model calls. `step` runs one step of each group. A free slot goes to the oldest waiting prompt.

    Any thread may call any method, but only one `step` runs at a time. Ctrl-C leaves the batch at its last commit.

    A prompt that raises before its first step fails alone: its output has the error. When a step of several rows
    raises, each row starts again alone, with the same result; a row whose steps raise again fails.

    When a group runs out of memory, its younger half (with `compile`, all of it) starts again once there is room, with
    the same result. From then on, fewer positions are evaluated together. A row fails if it runs out of memory alone.

    Args:
        model: from `paradec.load` or `paradec.wrap`; its kind must be in `slots.KINDS`.
        batch_size: maximum number of rows.
        max_memory: limit in bytes, or a text like "2GB", for keys, values and the samplers' memory together; None sets
            no limit.
        calls_per_step: maximum number of model calls, 1 to 3, in a step of masked rows with unequal lengths. 3 pads
            little; 1 pads all rows to the longest, for devices on which a further call costs more than padding.
        prefix_memory: limit in bytes for copies of rows' keys and values, which prompts with the same beginning reuse;
            None is a quarter of the rows' bytes. Only for causal models and, with an exact cache, block-causal models.
            Answers are the same, up to near-ties in narrow types. `Output.reused` counts the reused positions.
        preset, arguments: fields of `paradec.Request` for all prompts, except those in `slots.REFUSED`. Without a
            `seed`, one seed is drawn for all.

    Raises:
        TypeError: the model's kind is not supported. ValueError: an argument is out of range, or not for batches.
    """

    capture: ClassVar[bool] = True  # whether compile=True captures CUDA graphs; False runs the same steps on any device

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int = 8,
        max_memory: int | str | None = None,
        calls_per_step: int = 3,
        prefix_memory: int | str | None = None,
        preset: Preset | None = None,
        **arguments: Unpack[Arguments],
    ):
        self._check_model(model)
        check_int("batch_size", batch_size, low=1)
        check_int("calls_per_step", calls_per_step, low=1, high=3)
        self.model, self.batch_size, self.max_memory = model, batch_size, check_bytes("max_memory", max_memory)
        prefix_bytes = check_bytes("prefix_memory", prefix_memory, low=0)
        self.calls_per_step = calls_per_step
        self.request, self.sampler = self._prepare(model, arguments, preset)
        self._check(self.request, self.sampler)
        if isinstance(self.request.seed, tuple):
            raise ValueError(
                f"seed={short_repr(self.request.seed)} must be one int here; give each prompt its own seed in `add`"
            )
        seed = int(torch.randint(2**63 - 1, (1,))) if self.request.seed is None else self.request.seed
        self._seeded_request = replace(self.request, seed=seed)
        self.prefixes: Prefixes | None = None
        if model.facts.topology in ("causal", "block_causal"):
            self.prefixes = None if prefix_bytes == 0 else Prefixes(model, prefix_bytes)
        elif prefix_bytes:
            raise ValueError(
                f"prefix_memory={prefix_memory} has nothing to keep: every key of {model.facts.name} depends on the "
                "whole row; generate(share_prefix=True) shares prefixes approximately"
            )
        self._pending = Queue()
        self._groups, self._ended = list[Group](), list[Ticket]()
        self._max_positions: int | None = None  # limit of rows times columns, set when memory runs out
        self._uncapturable = ""  # reason of the last failed graph capture
        self._unnotified: deque[Any] = deque()  # ended tickets whose on_done was not called yet
        self._step_thread: int | None = None  # the thread that runs a step
        self._step_lock = threading.Lock()
        weights_lock(model).batches.add(self)

    # ---- any thread -----------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Any,
        *,
        streamer: Any = None,
        on_done: Callable[[Ticket], None] | None = None,
        id: Any = None,
        alone: bool = False,
        cache_salt: str | None = None,
        preset: Preset | None = None,
        **changes: Any,
    ) -> Ticket:
        """Put a prompt into the queue.

        Args:
            prompt: one prompt as in `generate`: text, a chat, ids, or the output of a tokenizer.
            streamer: an object with transformers' `put(ids)` and `end()`, and optionally `put_draft` (`api.streaming`).
                `put` gets the prompt, then ids [1, n] once they and all ids before them are final. `step` calls the
                streamer; an exception of the streamer ends only this prompt.
            on_done: called with the ended ticket, after the step and in its thread. It may call all methods of the
                batch, including `step` and `close`. `step` raises its error after calling the other tickets' `on_done`.
            id: the caller's name of the prompt, for `Ticket.id` and `Output.id`.
            cache_salt: a text; only prompts with the same salt share keys and values.
            alone: True draws the same numbers as `generate` with only this prompt, even if equal prompts came before.
            preset, changes: fields of `paradec.Request` for this prompt; they override those of the batch.

        Raises:
            ValueError, TypeError: a prompt or an argument that cannot be used. BatchClosed: the batch is closed.
        """
        request, sampler = self._prepare_prompt(changes, preset)
        prompts = encode(self.model, prompt, None, request.chat)
        if streamer is not None:
            check_streamer(streamer, 1)
        return self._enqueue(Ticket(0, id, prompts, request, sampler, streamer, on_done, cache_salt=cache_salt), alone)

    def _prepare_prompt(self, changes: Mapping[str, Any], preset: Preset | None) -> tuple[Request, Any]:
        if preset is None and not changes:
            return self._seeded_request, self.sampler
        request, sampler = self._change_request(changes, preset)
        self._check(request, sampler)
        seed: Any = request.seed
        if isinstance(seed, tuple):
            if len(seed) != 1:
                raise ValueError(f"seed={short_repr(seed)} has {len(seed)} entries for one prompt")
            (seed,) = seed
        return replace(request, seed=self._seeded_request.seed if seed is None else seed), sampler

    def _enqueue(self, ticket: T, alone: bool) -> T:
        if ticket.on_done is not None and not callable(ticket.on_done):
            raise TypeError(f"on_done={short_repr(ticket.on_done)} must be callable")
        if len(ticket.prompts.rows) != 1:
            raise ValueError(f"prompt holds {len(ticket.prompts.rows)} rows; add them one by one")
        self._pending.add(ticket, alone)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a prompt: the next step ends it with the error `Cancelled`. Returns False if it has already ended."""
        with self._pending.changed:
            if ticket.done:
                return False
            ticket.cancelled = True
            self._pending.changed.notify_all()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `step` has work, at most `timeout` seconds. Returns whether there is work."""
        with self._pending.changed:
            self._pending.changed.wait_for(lambda: self._pending.closed or self._has_work(), timeout)
            return self._has_work()

    def _has_work(self) -> bool:
        return bool(self._pending.waiting or self._groups or self._ended)

    @property
    def occupied(self) -> int:
        """Number of rows that are being decoded."""
        return sum(group.occupied for group in self._groups)

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for a slot."""
        return len(self._pending.waiting)

    @property
    def closed(self) -> bool:
        """Whether `add` raises BatchClosed."""
        return self._pending.closed

    def check_open(self) -> None:
        """Raise BatchClosed with the cause if the batch is closed."""
        self._pending.check_open()

    def close(self, error: Exception | None = None) -> None:
        """End all waiting and running prompts with `error`, by default `Cancelled`, and free the memory.

        Waits for a running step. If a streamer calls `close`, the running step ends all prompts.
        """
        self._pending.close(error)
        if self._step_thread != threading.get_ident():
            with self._exclusive_step():
                self._end_all()
            call_on_done(self._unnotified)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    # ---- one thread at a time -------------------------------------------------------------------------------------

    def step(self) -> list[Ticket]:
        """Start the prompts that fit, run one step of every group, and return the tickets that ended."""
        if self._step_thread == threading.get_ident():
            raise RuntimeError("a streamer called step of its own batch, inside a step")
        with self._exclusive_step(), torch.inference_mode():
            with hold_interrupt():
                self._cancel()
            self._admit()
            for group in list(self._groups):
                self._advance(group)
            self._close_empty()
            with hold_interrupt():
                if self._pending.closed:
                    self._end_all()
                elif not self.waiting:
                    for group in self._groups:
                        group.compact()
        call_on_done(self._unnotified)
        return self.ended()

    def ended(self) -> list[Ticket]:
        """Return the ended tickets that an interrupted `step` did not return."""
        tickets, self._ended = self._ended, []
        return tickets

    @contextmanager
    def _exclusive_step(self) -> Iterator[None]:
        with self._step_lock, weights_lock(self.model):
            self._step_thread = threading.get_ident()
            try:
                yield
            finally:
                self._step_thread = None

    def _end_all(self) -> None:
        with self._pending.changed:
            tickets = [*self._pending.waiting, *(ticket for group in self._groups for ticket in group.tickets)]
        for ticket in tickets:
            if ticket is not None:
                ticket.cancelled = True
        self._cancel()
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._drop_prefixes()

    # ---- hooks for text models; `ImageBatch` overrides them ---------------------------------------------------------

    _prepare = staticmethod(prepare_request)
    _check_model = staticmethod(partial(check_model, "Batch", allowed=KINDS))

    def _check(self, request: Request, sampler: Any) -> None:
        """Raise ValueError if rows of this request cannot be put into a running batch."""
        why, device = why_unsupported(self.model, request, sampler), self.model.device
        if why is None and request.compile and self.capture and device.type != "cuda":
            why = "compile=True in a batch that is refilled captures CUDA graphs, "
            why += f"and the model is on {device}: leave compile out"
        if why is not None:
            raise ValueError(why)

    def _change_request(self, changes: Mapping[str, Any], preset: Preset | None) -> tuple[Request, Any]:
        """Make the request and the sampler of a prompt whose fields differ from the batch's."""
        request = replace(self.request, **Request.merge_arguments(changes, preset))
        is_same = request.sampler is self.request.sampler
        return request, self.sampler if is_same else make_sampler(self.model, request.sampler)

    def _can_start_together(self, first: Ticket, second: Ticket) -> bool:
        """Whether two prompts may start as rows of one request: they must differ only in ids and seeds.

        Prompts with holes (`facts.hole_id`) or images, isolated prompts and prompts with `compile` start alone.
        """
        for ticket in (first, second):
            if ticket.isolated or ticket.request.compile or ticket.prompts.images is not None:
                return False
            if self.model.facts.hole_id in ticket.prompts.rows[0]:
                return False
        if first.request is second.request:
            return True
        return first.request.changes() | {"seed": None} == second.request.changes() | {"seed": None}

    def _make_state(self, tickets: Sequence[Any]) -> Any:
        """Make the state of prompts that can start together."""
        request, sampler, prompts = tickets[0].request, tickets[0].sampler, tickets[0].prompts
        if len(tickets) > 1:
            parts = [ticket.prompts for ticket in tickets]
            starts = [start for part in parts for start in part.starts]
            copies = [copy_index for part in parts for copy_index in part.copy_indices or ()]
            prompts = Prompts([part.rows[0] for part in parts], False, starts, copies, joins_batch=True)
            seeds: Any = tuple(ticket.request.seed for ticket in tickets)
            request = request if len({*seeds}) == 1 else replace(request, seed=seeds)
        return sampler.start(self.model, prompts, request)

    def _ticket_model(self, ticket: Any) -> Any:
        """Return the model that decodes a prompt: the batch's, or a copy that stores the prompt."""
        return self.model

    def _build_outputs(self, state: RowState, slots: Sequence[int], tickets: Sequence[Any], error: Any) -> list[Any]:
        return build_outputs(self.model, state, slots, tickets, error)

    def failed_output(self, error: Exception, ids: Sequence[int] = ()) -> Any:
        """Build an output with an error and without decoded tokens. ids: the prompt's ids."""
        return failed_output(self.model, ids, error)

    def finish(self, output: Any) -> None:
        """Complete an output before it is returned."""

    # ---- admission --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        max_tickets = self.batch_size if self.max_memory is None and self._max_positions is None else 1
        while self.occupied < self.batch_size and not self._pending.closed:
            tickets = self._pending.peek(min(max_tickets, self.batch_size - self.occupied), self._can_start_together)
            if not tickets:
                return
            try:
                if not self._insert(tickets, self._start(tickets)):
                    return  # a later step has room, once other rows have ended
            except Exception as error:
                if len(tickets) > 1:
                    max_tickets = 1  # perhaps only one ticket fails, or memory suffices for fewer rows
                    continue
                if is_out_of_memory(error) and self.occupied:
                    return
                with hold_interrupt():
                    if not tickets[0].done:
                        self._pending.remove(tickets[0])
                        self._fail(tickets[0], detach_error(error))

    def _start(self, tickets: Sequence[Ticket]) -> RowState:
        state, sampler = self._make_state(tickets), tickets[0].sampler
        if sampler.family == "masked":
            state.max_calls = self.calls_per_step
        if why := state.why_rows_fixed():
            raise ValueError(f"sampler {sampler.name!r} with this request cannot be refilled: {why}")
        if self.prefixes is not None:
            row_bytes = estimate_row_bytes(self.model, state, state.num_columns(np.arange(len(tickets))))
            self.prefixes.raise_budget(row_bytes * self.batch_size if self.max_memory is None else self.max_memory)
            self.prefixes.begin(state, tickets, self._pending.peek(self.batch_size, lambda *_: True), self._groups)
        return state

    def _insert(self, tickets: Sequence[Ticket], state: RowState) -> bool:
        """Put the rows of a new state into slots of their group. Returns False if not all rows have room now."""
        first, count = tickets[0], len(tickets)
        on_device = can_run_on_device(first.sampler, self.model, first.request, state, self._uncapturable)
        key = group_key(first, state, on_device)
        self._close_empty()  # so that a new group is only as wide as its rows
        group = next((group for group in self._groups if group.key == key), None)
        width = state.num_columns(np.arange(count))
        if group is not None:
            width = group.columns_for(width)
        row_bytes = estimate_row_bytes(self.model, state, width)
        reserved = sum(len(g.tickets) * g.row_bytes for g in self._groups if g is not group)
        reserved += 0 if self.prefixes is None else self.prefixes.nbytes
        max_slots = self.batch_size - sum(g.occupied for g in self._groups if g is not group)
        if self.max_memory is not None:
            max_slots = min(max_slots, (self.max_memory - reserved) // row_bytes)
        if self._max_positions is not None:
            max_slots = min(max_slots, max(1, self._max_positions // width))
        occupied = 0 if group is None else group.occupied
        if max_slots < occupied + count:
            if self.occupied:
                return False
            if self.max_memory is not None and row_bytes > self.max_memory:
                raise ValueError(f"the prompt needs {row_bytes} bytes, more than max_memory={self.max_memory}")
            self._drop_prefixes()
            max_slots = 1
        try:
            with hold_interrupt():
                for ticket in tickets:
                    ticket.num_new_tokens = state.max_new_tokens
                    ticket.start_time = ticket.start_time or time.perf_counter()
                if group is None:
                    make_group: Any = partial(DeviceGroup, capture=self.capture) if on_device else Group
                    group = make_group(key, first.sampler, state, row_bytes, self._ticket_model(first), self.model)
                    self._groups.append(group)
                group.make_room(max_slots, self.waiting, width, count)
                slots = group.insert_rows(tickets, state, self._ticket_model(first))
                group.row_bytes = row_bytes
                for ticket in tickets:
                    self._pending.remove(ticket)
                self._feed_streamers(group, slots)
        except Exception as error:
            if group in self._groups and not (is_out_of_memory(error) and group.occupied):
                self._requeue(group)  # the error may have interrupted a change of the group
            raise
        return True

    def _drop_prefixes(self) -> None:
        if self.prefixes is not None:
            self.prefixes.tree.clear()

    def _close_empty(self) -> None:
        with hold_interrupt():
            for group in [group for group in self._groups if not group.occupied]:
                group.close()
                self._groups.remove(group)

    # ---- stepping -------------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        """Run one step of a group, and end its finished rows."""
        while not group.state.done:
            is_between_commits = True
            error: Exception
            try:
                proposal = group.propose()
                with hold_interrupt():
                    is_between_commits = False
                    group.commit(proposal)
                    self._end_finished(group)
                return
            except NotFinite as raised:
                error = raised.with_traceback(None)  # the traceback would keep the step's tensors alive
            except device_step.NotCapturable as raised:
                with hold_interrupt():
                    self._uncapturable = str(raised)
                    self._requeue(group)  # rows start again, without graphs
                return
            except Exception as raised:
                error = detach_error(raised)
            with hold_interrupt():
                if isinstance(error, NotFinite):
                    cause = str(error).replace(" for row ", " for slot ")
                    for slot in error.rows.tolist():
                        self._end_slots(group, [slot], FloatingPointError(cause))
                    group.stop_rows(error.rows, wipe=True)
                    continue
                if is_out_of_memory(error):
                    self._drop_prefixes()
                    failed = self._shrink(group, is_between_commits and not isinstance(group, DeviceGroup))
                else:
                    failed = self._isolate(group)
                for ticket in failed:
                    self._fail(ticket, error)
                return
        if group.occupied:  # a constraint determined the whole answer, so no step was needed
            with hold_interrupt():
                self._end_finished(group)

    def _requeue(self, group: Group) -> list[Ticket]:
        """Remove a group and put its tickets back into the queue; return them."""
        self._groups.remove(group)
        tickets = [ticket for ticket in group.tickets if ticket is not None and ticket not in self._pending.waiting]
        self._pending.requeue(tickets)
        return tickets

    def _isolate(self, group: Group) -> list[Ticket]:
        """Requeue the rows of a failed group to decode each alone; return the tickets that were alone already."""
        tickets = self._requeue(group)
        failed = [ticket for ticket in tickets if ticket.isolated]
        for ticket in failed:
            self._pending.remove(ticket)
        for ticket in tickets:
            ticket.isolated = True
        return failed

    def _shrink(self, group: Group, keep_older: bool) -> list[Ticket]:
        """Requeue the younger half of a group that ran out of memory, and limit the positions evaluated together.
        keep_older: False requeues all rows. Returns the ticket that has failed, if the row was alone in the batch."""
        tickets = sorted((ticket for ticket in group.tickets if ticket is not None), key=lambda ticket: ticket.number)
        self._max_positions, failed = max(1, len(tickets) // 2) * group.width, list[Ticket]()
        if len(tickets) == 1 and self.occupied == 1:
            group.tickets = [None] * len(group.tickets)
            self._groups.remove(group)
            failed = tickets
        else:
            remaining = tickets[: len(tickets) // 2] if keep_older else []
            try:
                group.keep_slots([group.tickets.index(ticket) for ticket in remaining])
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                remaining = []
            if not remaining:
                self._groups.remove(group)
            self._pending.requeue([ticket for ticket in tickets if ticket not in remaining])
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return failed

    def _end_finished(self, group: Group) -> None:
        """Stream final tokens, and end finished rows."""
        time_now = time.perf_counter()
        for ticket in group.tickets:
            if ticket is not None:
                ticket.first_commit_time = ticket.first_commit_time or time_now
        self._feed_streamers(group, range(len(group.tickets)))
        running = group.state.running
        if finished := [slot for slot, ticket in enumerate(group.tickets) if ticket is not None and not running[slot]]:
            self._end_slots(group, finished, None)

    def _feed_streamers(self, group: Group, slots: Sequence[int]) -> None:
        """Pass newly final tokens to streamers; a streamer that raises ends its ticket."""
        if not any(ticket is not None and ticket.streamer is not None for ticket in group.tickets):
            return
        all_slots = np.arange(len(group.tickets))
        group.sync(all_slots)
        canvas, final = group.state.canvas.cpu(), group.state.final_ends(all_slots)  # one copy for all slots
        for slot in slots:
            ticket = group.tickets[slot]
            if ticket is None or ticket.streamer is None:
                continue
            try:
                feed_streamer(ticket, group.state, slot, canvas[slot], int(final[slot]))
            except Exception as error:
                (output,) = self._build_outputs(group.state, [slot], [ticket], error)
                group.tickets[slot] = None
                self._end(ticket, output)
                group.stop_rows(np.array([slot]))

    def _end_slots(self, group: Group, slots: Sequence[int], error: Exception | None) -> None:
        """End the tickets of slots; their outputs have the tokens decoded so far."""
        tickets: Any = [group.tickets[slot] for slot in slots]
        if self.prefixes is not None and not isinstance(error, FloatingPointError) and not self._pending.closed:
            self.prefixes.store_rows(group, slots)
        group.sync(np.array(slots))
        for slot in slots:
            group.tickets[slot] = None
        for ticket, output in zip(tickets, self._read_outputs(group.state, slots, tickets, error), strict=True):
            self._end(ticket, output)

    def _read_outputs(
        self, state: RowState, slots: Sequence[int], tickets: Sequence[Ticket], error: Exception | None
    ) -> list[Any]:
        """Build the outputs of rows. If that raises, build each separately; a row that raises again fails."""
        try:
            return self._build_outputs(state, slots, tickets, error)
        except Exception as raised:
            if len(slots) == 1:
                return [self.failed_output(error or raised, tickets[0].prompts.rows[0])]
            pairs = zip(slots, tickets, strict=True)
            return [self._read_outputs(state, [slot], [ticket], error)[0] for slot, ticket in pairs]

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a prompt with an error and without decoded tokens."""
        self._end(ticket, self.failed_output(error, ticket.prompts.rows[0]))

    def _end(self, ticket: Ticket, output: Output) -> None:
        output.index, output.id = ticket.number, ticket.id
        if self.prefixes is not None:
            self.prefixes.forget(ticket)
        if ticket.streamer is not None and ticket.sent is not None:
            try:
                ticket.streamer.end()
            except Exception as error:  # the row has ended nevertheless
                output.error = output.error or error
        ticket.output = output
        self._ended.append(ticket)
        if ticket.on_done is not None:
            self._unnotified.append(ticket)

    def _cancel(self) -> None:
        """End the prompts that were cancelled."""

        def cause(ticket: Ticket) -> Exception:
            return self._pending.cause or Cancelled(f"prompt {ticket.number} was cancelled")

        with self._pending.changed:
            cancelled = [ticket for ticket in self._pending.waiting if ticket.cancelled]
        for waiting in cancelled:
            self._pending.remove(waiting)
            self._fail(waiting, cause(waiting))
        for group in self._groups:
            for slot, ticket in enumerate(group.tickets):
                if ticket is not None and ticket.cancelled:
                    self._end_slots(group, [slot], cause(ticket))
                    group.stop_rows(np.array([slot]))
