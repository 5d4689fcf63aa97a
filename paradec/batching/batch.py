"""A batch that stays full: the slot of a row that has ended goes to the next prompt that waits.

`Batch` is what `paradec.generate_many` and servers decode with. Prompts come in at any time and from any thread; every
`step` lets in what fits, takes one step of the protocol and gives back what has ended. Each prompt's tokens are those
of `paradec.generate` on the list of all prompts in the order in which they came: a row begins as the sampler's `start`
makes it, takes a slot in the canvas, the memory and the store of the state (`State.put`), and depends on no neighbour.

Continuous batching is Yu et al., "Orca" (OSDI 2022): iteration-level scheduling.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, Unpack

import numpy as np
import torch

from paradec.api.generate import own_defaults
from paradec.api.output import Output
from paradec.api.streaming import check_streamer
from paradec.batching.device import DeviceGroup, steps_on_device
from paradec.batching.reading import Seen, each_read, read
from paradec.batching.recovery import begin_anew, detached, fit, isolate, nothing, out_of_memory
from paradec.batching.slots import (
    MADE,
    BatchClosed,
    Cancelled,
    Group,
    Queue,
    RowState,
    Ticket,
    bytes_of_row,
    check_request,
    key_of,
    method_of,
    tell,
)
from paradec.batching.starting import alike, prefixes_of, together
from paradec.core.checks import LARGEST_INT64, check_int, check_model, shown
from paradec.core.interrupts import held_back
from paradec.core.prompts import encode
from paradec.core.protocol import NotFinite
from paradec.models.requests import UNSHARED
from paradec.request import Arguments, Preset, Request, warn_of_unused
from paradec.samplers.masked.device import step as device_step

__all__ = ["Batch", "BatchClosed", "Cancelled", "Ticket"]

T = TypeVar("T", bound=Ticket)


class Batch:
    """Decode prompts that come and go, up to `batch_size` of them at once.

    >>> batch = Batch(model, batch_size=8, cache="dual", temperature=0.5, seed=1)     # doctest: +SKIP
    >>> ticket = batch.add("Sort: pear fig apple", max_new_tokens=16)                 # doctest: +SKIP
    >>> while not ticket.done: batch.step()                                           # doctest: +SKIP

    Prompts that differ in nothing but `OWN` (masked samplers: `suppress_tokens` too) share their model calls. Others
    are decoded beside them in groups of their own, of which every step takes one step each. Groups share the rows: one
    that is free goes to the prompt that has waited longest, so that none starves.

    `add`, `cancel`, `wait`, `close` and the counts may be used from any thread; `step` runs in one at a time. Ctrl-C
    leaves the batch at its last commit: call `step` again.

    A prompt that raises while it is let in fails alone: its output has the error. Where a step of several rows raises,
    they begin anew, each by itself and with the same result, and a row whose steps raise again fails alone.

    Out of memory: of the rows that were being evaluated the younger half begins anew once there is room, with the same
    result, and as many positions are not evaluated together again. A row that does not fit alone fails.

    Args:
        model: from `paradec.load` or `paradec.wrap`; of the kinds `MADE`.
        batch_size: rows at most.
        max_memory: bytes that keys, values and the methods' memory may take together; None leaves it to `batch_size`
            and to what the device has.
        calls_per_step: how many calls a step of masked rows of unequal lengths may be split into: 3 pads little, which
            counts where a call costs what its positions cost; 1 pads all rows to the longest, which counts where it
            costs its launch. (Rows that a cache evaluates whole and those that it evaluates in part never share one.)
        prefix_memory: bytes of keys and values that ended rows leave for prompts that begin with the same tokens, on
            causal models and, with a cache that is exact, on block-causal ones; None is a quarter of what the rows
            take, 0 keeps nothing. Answers are the same (in narrow types up to near-ties); `Output.reused` counts.
        preset, arguments: the fields of `paradec.Request` that prompts begin from, as in `generate`. Without a `seed`
            one is drawn for all. Those of `REFUSED` have no meaning here.

    Raises:
        TypeError: a model of another kind. ValueError: an argument out of its range, or one that no batch can be
            refilled with; the message names it.
    """

    capture: ClassVar[bool] = True
    """False takes the steps of `compile=True` uncaptured, on any device."""

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int = 8,
        max_memory: int | None = None,
        calls_per_step: int = 3,
        prefix_memory: int | None = None,
        preset: Preset | None = None,
        **arguments: Unpack[Arguments],
    ):
        self._check_kind(model)
        check_int("batch_size", batch_size, low=1)
        check_int("calls_per_step", calls_per_step, low=1, high=3)
        check_int("max_memory", max_memory, low=1, high=LARGEST_INT64, none=True)
        check_int("prefix_memory", prefix_memory, low=0, high=LARGEST_INT64, none=True)
        self.model, self.batch_size, self.max_memory = model, batch_size, max_memory
        self.calls_per_step = calls_per_step
        self.request = self._requested(arguments, preset)
        self._check(self.request)
        if isinstance(self.request.seed, tuple):
            raise ValueError(f"seed={shown(self.request.seed)} must be one int here; give each prompt its own with it")
        self._seed = int(torch.randint(2**63 - 1, (1,))) if self.request.seed is None else self.request.seed
        self.prefixes = prefixes_of(model, prefix_memory)
        """What rows leave for each other; None where nothing is kept."""
        self._waits = Queue()
        self._groups, self._ended = list[Group](), list[Ticket]()
        self._most_positions: int | None = None  # rows times columns, once memory was too small for more
        self._uncapturable = ""  # why no graph could be captured
        self._untold: deque[Any] = deque()  # tickets whose on_done is to be called
        self._stepper: int | None = None  # the thread that takes a step
        self._stepping = threading.Lock()
        getattr(model, "requests", UNSHARED).use.batches.add(self)

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
        """Let a prompt wait for a row.

        Args:
            prompt: one of what `generate` takes: text, a chat, ids, or what a tokenizer returns.
            streamer: `put(ids)` and `end()`, as transformers' streamers: ids [1, n] that are final with everything left
                of them final, the prompt's at first; `put_draft` as in `paradec.api.streaming`. Called from `step`; an
                exception from it ends this prompt alone.
            on_done: called with the ticket once its output is there, by the thread that takes the step, after the step:
                it may use the batch, `step` and `close` too. `step` raises what it raises, once every other ticket's
                was called.
            id: whatever names the prompt for the caller, in `Ticket.id` and `Output.id`.
            cache_salt: a text; only prompts with an equal one share keys and values.
            alone: draw as `generate` does for this prompt alone, whatever equal ones came before.
            preset, changes: fields of `paradec.Request` for this prompt, over those of the batch.

        Raises:
            ValueError, TypeError: a prompt or an argument that cannot be used; it takes no number then.
            BatchClosed: the batch is closed.
        """
        request = self._own_request(changes, preset)
        prompts = encode(self.model, prompt, None, request.chat)
        if streamer is not None:
            check_streamer(streamer, 1)
        return self._queue(Ticket(0, id, prompts, request, streamer, on_done, cache_salt=cache_salt), alone)

    def _own_request(self, changes: Mapping[str, Any], preset: Preset | None) -> Request:
        """What one prompt is decoded with."""
        request = self.request
        if preset is not None or changes:
            request = self._changed_request(changes, preset)
            self._check(request)
        if isinstance(request.seed, tuple):
            if len(request.seed) != 1:
                raise ValueError(f"seed={shown(request.seed)} has {len(request.seed)} entries for one prompt")
            request = replace(request, seed=request.seed[0])
        return replace(request, seed=self._seed) if request.seed is None else request

    def _queue(self, ticket: T, alone: bool) -> T:
        """Give a ticket its number, and let it wait."""
        if ticket.on_done is not None and not callable(ticket.on_done):
            raise TypeError(f"on_done={shown(ticket.on_done)} must be callable")
        if len(ticket.prompts.rows) != 1:
            raise ValueError(f"prompt holds {len(ticket.prompts.rows)} rows; add them one by one")
        self._waits.add(ticket, alone)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Take a prompt back; the next step ends it with the error `Cancelled`. False if it has ended already."""
        with self._waits.changed:
            if ticket.done:
                return False
            ticket.cancelled = True
            self._waits.changed.notify_all()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until there is something to step, for `timeout` seconds at most; whether there is."""
        with self._waits.changed:
            self._waits.changed.wait_for(lambda: self._waits.closed or self._busy(), timeout)
            return self._busy()

    def _busy(self) -> bool:
        return bool(self._waits.waiting or self._groups or self._ended)

    @property
    def occupied(self) -> int:
        """Rows that are being decoded."""
        return sum(group.occupied for group in self._groups)

    @property
    def waiting(self) -> int:
        """Prompts that wait for a row."""
        return len(self._waits.waiting)

    def close(self, error: Exception | None = None) -> None:
        """End what is not done with `error`, by default `Cancelled`, and give the memory back. Waits for a step that
        runs; where a streamer calls it, that step ends everything."""
        self._waits.close(error)
        if self._stepper != threading.get_ident():
            with self._turn():
                self._end_all()
            tell(self._untold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    # ---- one thread at a time -------------------------------------------------------------------------------------

    def step(self) -> list[Ticket]:
        """Let in the prompts that fit, take one step of every group, and return the tickets that have ended since."""
        if self._stepper == threading.get_ident():
            raise RuntimeError("a streamer called step of the batch that it is called by")
        with self._turn(), torch.inference_mode():
            with held_back():
                self._cancel()
            self._admit()
            for group in list(self._groups):
                self._advance(group)
            self._close_empty()
            with held_back():
                if self._waits.closed:
                    self._end_all()
                elif not self.waiting:
                    for group in self._groups:
                        group.compact()
        tell(self._untold)
        return self.ended()

    def ended(self) -> list[Ticket]:
        """The tickets that have ended and were not returned yet, as after a step that was interrupted."""
        found, self._ended = self._ended, []
        return found

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread's turn to step."""
        with self._stepping, getattr(self.model, "requests", UNSHARED).slot.lock:
            self._stepper = threading.get_ident()
            try:
                yield
            finally:
                self._stepper = None

    def _end_all(self) -> None:
        """End everything, once the batch is closed."""
        with self._waits.changed:
            left = [*self._waits.waiting, *(ticket for group in self._groups for ticket in group.tickets)]
        for ticket in left:
            if ticket is not None:
                ticket.cancelled = True
        self._cancel()
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._drop_prefixes()

    # ---- what is text's own -----------------------------------------------------------------------------------------

    def _check_kind(self, model: Any) -> None:
        """Raise TypeError for another kind of model."""
        check_model("Batch", model, MADE)

    def _check(self, request: Request) -> None:
        """Raise ValueError where the batch cannot be refilled with such a request."""
        check_request(self.model, request)
        if request.compile and self.capture and self.model.device.type != "cuda":
            raise ValueError(
                f"compile=True in a batch that is refilled captures CUDA graphs, and the model is on "
                f"{self.model.device}: leave compile out"
            )

    def _requested(self, arguments: Mapping[str, Any], preset: Preset | None) -> Request:
        """What prompts are decoded with that say nothing else."""
        request = Request.of(arguments, preset, **own_defaults(self.model))
        warn_of_unused(request, method_of(self.model, request), arguments)
        return request

    def _changed_request(self, changes: Mapping[str, Any], preset: Preset | None) -> Request:
        """The same for a prompt that says more."""
        return Request.of({**self.request.changes(), **Request.merge_arguments(changes, preset)})

    def _alike(self, first: Ticket, other: Ticket) -> bool:
        """Whether two prompts may begin together."""
        return alike(self.model, first, other)

    def _begin(self, tickets: Sequence[Any]) -> tuple[Any, Any]:
        """The sampler of prompts that are alike, and what they start from."""
        method = method_of(self.model, tickets[0].request)
        return method, method.start(self.model, *together(tickets))

    def _model_of(self, ticket: Any) -> Any:
        """What a prompt is decoded with: the model, or a copy that knows this prompt alone
        (`paradec.core.rows`)."""
        return self.model

    def _read(self, state: RowState, slots: Sequence[int], tickets: Sequence[Any], error: Any) -> list[Any]:
        """The outputs of some rows of a state."""
        return read(self.model, state, slots, tickets, error)

    def _failed(self, ticket: Any, error: Exception) -> Any:
        """The output of a prompt that nothing was decoded of."""
        return nothing(self.model, ticket.prompts.rows[0], error)

    def refused(self, error: Exception) -> Any:
        """The output of a prompt that `add` did not take."""
        return nothing(self.model, (), error)

    def finish(self, output: Any) -> None:
        """What is left to do when an output is handed out: nothing for text."""

    # ---- letting in -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        most = self.batch_size if self.max_memory is None and self._most_positions is None else 1
        while self.occupied < self.batch_size and not self._waits.closed:
            tickets = self._waits.first(min(most, self.batch_size - self.occupied), self._alike)
            if not tickets:
                return
            try:
                if not self._enter(tickets, *self._start(tickets)):
                    return  # once other rows have ended there is room
            except Exception as error:
                if len(tickets) > 1:
                    most = 1  # what one of them raises is its own, and there may be memory for some
                    continue
                if out_of_memory(error) and self.occupied:
                    return
                with held_back():
                    if not tickets[0].done:
                        self._waits.leave(tickets[0])
                        self._end(tickets[0], self._failed(tickets[0], detached(error)))

    def _start(self, tickets: Sequence[Ticket]) -> tuple[Any, RowState]:
        """The sampler of prompts that are alike, and the state of a request that has these rows alone."""
        method, state = self._begin(tickets)
        if method.family == "masked":
            state.most_calls = self.calls_per_step
        if why := state.fixed():
            raise ValueError(f"sampler {method.name!r} with this request cannot be refilled: {why}")
        if self.prefixes is not None:
            rows = bytes_of_row(self.model, state, state.extent(np.arange(len(tickets)))) * self.batch_size
            self.prefixes.allow(rows if self.max_memory is None else self.max_memory)
            self.prefixes.begin(state, tickets, self._waits.first(self.batch_size, lambda *_: True), self._groups)
        return method, state

    def _enter(self, tickets: Sequence[Ticket], method: Any, state: RowState) -> bool:
        """Give the rows slots in the group of their kind. False: there is no room for all of them now."""
        first, count = tickets[0], len(tickets)
        on_device = steps_on_device(method, self.model, first.request, state, self._uncapturable)
        key = key_of(method, first, state, on_device)
        self._close_empty()  # a new one is no wider than the row
        group = next((group for group in self._groups if group.key == key), None)
        width = state.extent(np.arange(count))
        if group is not None:
            width = group.columns(width)
        row = bytes_of_row(self.model, state, width)
        others = sum(g.nbytes for g in self._groups if g is not group)
        others += 0 if self.prefixes is None else self.prefixes.nbytes
        most = self.batch_size - sum(g.occupied for g in self._groups if g is not group)
        if self.max_memory is not None:
            most = min(most, (self.max_memory - others) // row)
        if self._most_positions is not None:
            most = min(most, max(1, self._most_positions // width))
        occupied = 0 if group is None else group.occupied
        if most < occupied + count:
            if self.occupied:
                return False
            if self.max_memory is not None and row > self.max_memory:
                raise ValueError(f"the prompt needs {row} bytes, more than max_memory={self.max_memory}")
            self._drop_prefixes()
            most = 1
        try:
            with held_back():
                for ticket in tickets:
                    ticket.new, ticket.began = state.max_new_tokens, ticket.began or time.perf_counter()
                if group is None:
                    group = self._group(key, method, state, row, self._model_of(first))
                    self._groups.append(group)
                group.make_room(most, self.waiting, width, count)
                slots = group.enter(tickets, state, self._model_of(first))
                group.row_bytes = row
                for ticket in tickets:
                    self._waits.leave(ticket)
                self._feed(group, slots)
        except Exception as error:
            if group in self._groups and not (out_of_memory(error) and group.occupied):
                begin_anew(group, self._groups, self._waits)  # another error may have come between two of its changes
            raise
        return True

    def _drop_prefixes(self) -> None:
        """Give back what ended rows have left."""
        if self.prefixes is not None:
            self.prefixes.tree.clear()

    def _group(self, key: tuple[Any, ...], method: Any, state: RowState, row_bytes: int, model: Any) -> Group:
        """A group that begins with a row of this kind."""
        if key[-1]:
            return DeviceGroup(key, method, state, row_bytes, model, self.model, capture=self.capture)
        return Group(key, method, state, row_bytes, model, self.model)

    def _close_empty(self) -> None:
        """Let go of the groups whose rows have all ended."""
        with held_back():
            for group in [group for group in self._groups if not group.occupied]:
                group.close()
                self._groups.remove(group)

    # ---- stepping -------------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        """One step of a group, and the end of the rows that have ended with it."""
        while not group.state.done:
            between = True
            error: Exception
            try:
                proposal = group.propose()
                with held_back():
                    between = False
                    group.commit(proposal)
                    self._harvest(group)
                return
            except NotFinite as found:
                error = found.with_traceback(None)  # else it would hold on to the step's tensors
            except device_step.NotCapturable as found:
                with held_back():
                    self._uncapturable = str(found)  # in the plain loop, from their beginning
                    begin_anew(group, self._groups, self._waits)
                return
            except Exception as found:
                error = detached(found)
            with held_back():
                if isinstance(error, NotFinite):
                    for slot in error.rows.tolist():
                        self._let_go(group, [slot], FloatingPointError(str(error).replace(" for row ", " for slot ")))
                    group.stop_rows(error.rows, wipe=True)
                    continue
                if out_of_memory(error):
                    self._drop_prefixes()
                    keep = between and not isinstance(group, DeviceGroup)
                    self._most_positions, failed = fit(group, self._groups, self._waits, keep)
                else:
                    failed = isolate(group, self._groups, self._waits)
                for ticket in failed:
                    self._end(ticket, self._failed(ticket, error))
                return
        if group.occupied:  # by rows that a constraint wrote whole as they began
            with held_back():
                self._harvest(group)

    def _harvest(self, group: Group) -> None:
        """Hand on what is final, and let go of the rows that have ended."""
        group.clock()
        self._feed(group, range(len(group.tickets)))
        running = group.state.running
        if ended := [slot for slot, ticket in enumerate(group.tickets) if ticket is not None and not running[slot]]:
            self._let_go(group, ended, None)

    def _feed(self, group: Group, slots: Sequence[int]) -> None:
        """Give streamers what has become final; one that raises ends its ticket."""
        if not group.heard:
            return
        seen = Seen.of(group)
        for slot in slots:
            ticket = group.tickets[slot]
            if ticket is None or ticket.streamer is None:
                continue
            try:
                seen.feed(slot, ticket)
            except Exception as error:
                (output,) = self._read(group.state, [slot], [ticket], error)
                group.tickets[slot] = None
                self._end(ticket, output)
                group.stop_rows(np.array([slot]))

    def _let_go(self, group: Group, slots: Sequence[int], error: Exception | None) -> None:
        """End the tickets of slots, with what was decoded."""
        tickets: Any = [group.tickets[slot] for slot in slots]
        if self.prefixes is not None and not isinstance(error, FloatingPointError) and not self._waits.closed:
            self.prefixes.keep(group, slots)
        group.told(np.array(slots))
        for slot in slots:
            group.tickets[slot] = None
        outputs = each_read(self._read, self._failed, group.state, slots, tickets, error)
        for ticket, output in zip(tickets, outputs, strict=True):
            self._end(ticket, output)

    def _end(self, ticket: Ticket, output: Output) -> None:
        output.index, output.id = ticket.number, ticket.id
        if self.prefixes is not None:
            self.prefixes.forget(ticket)
        if ticket.streamer is not None and ticket.sent is not None:
            try:
                ticket.streamer.end()
            except Exception as error:  # the row is over all the same
                output.error = output.error or error
        ticket.output = output
        self._ended.append(ticket)
        if ticket.on_done is not None:
            self._untold.append(ticket)

    def _cancel(self) -> None:
        """End what was taken back."""
        for ticket in self._waits.cancelled():
            cause = self._waits.cause or Cancelled(f"prompt {ticket.number} was cancelled")
            self._end(ticket, self._failed(ticket, cause))
        for group in self._groups:
            for slot, running in enumerate(group.tickets):
                if running is not None and running.cancelled:
                    cause = self._waits.cause or Cancelled(f"prompt {running.number} was cancelled")
                    self._let_go(group, [slot], cause)
                    group.stop_rows(np.array([slot]))
