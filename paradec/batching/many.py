"""`generate_many`: decode any number of prompts with a batch that stays full (`paradec.batching`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Self, Unpack

from paradec.api.images import ImageOutput
from paradec.api.output import Output
from paradec.batching.batch import Batch
from paradec.batching.images import ImageBatch, check_refillable
from paradec.batching.outputs import detach_error
from paradec.batching.slots import KINDS, Cancelled, Ticket
from paradec.core.checks import check_choice, check_int, check_model, short_repr
from paradec.core.interrupts import hold_interrupt
from paradec.core.protocol import Interrupted
from paradec.models.images.base import PictureModel
from paradec.request import Arguments, Preset, Request

__all__ = ["Many", "generate_many"]

ORDERS = ("input", "completed")
ERRORS = ("output", "raise")
LOOK_AHEAD = 8  # default of `look_ahead`, in multiples of the batch size


def generate_many(  # type: ignore[misc]  # `order` is not the request's field
    model: Any,
    prompts: Iterable[Any],
    *,
    batch_size: int = 8,
    order: str = "input",
    errors: str = "output",
    look_ahead: int | None = None,
    max_memory: int | str | None = None,
    calls_per_step: int = 3,
    prefix_memory: int | str | None = None,
    height: int | None = None,
    width: int | None = None,
    negative_prompt: Any = None,
    output_type: str | None = None,
    preset: Preset | None = None,
    **arguments: Unpack[Arguments],
) -> Many:
    """Decode answers to any number of prompts, `batch_size` at a time. When a row ends, the next prompt gets its slot.

    >>> for out in paradec.generate_many(model, prompts, batch_size=16, seed=0):     # doctest: +SKIP
    ...     print(out.index, out.error or out.text)

    Each prompt gets the tokens that one call of `generate` (image models: `generate_images`) with the whole list and
    the same arguments would give it: exactly in float64, up to near-ties in narrower types.

    Args:
        model: from `paradec.load` or `paradec.wrap`. Image models must be autoregressive or masked.
        prompts: any iterable, even an endless one; read as rows become free. An entry is a prompt as in `generate`; or
            a mapping {"prompt": ...} with fields of `paradec.Request` for this prompt and an "id" for its `Output`; or
            a pair (prompt, Request), whose non-default fields apply. Entries that differ only in seed, max_new_tokens,
            stop_strings and, with masked samplers, suppress_tokens share their model calls.
        batch_size: maximum number of rows decoded at once.
        order: "input" returns answers in the order of the prompts, "completed" in the order in which they end. (To set
            the field `order` of `paradec.Request`, use an entry or the preset.)
        errors: "output" returns an `Output` with `error` for a prompt that fails. "raise" raises the error instead;
            the iteration can be continued. Other prompts are not affected.
        look_ahead: maximum number of answers that wait for an earlier one; by default 8 times the batch size. A larger
            number keeps the batch full when answers differ much in length.
        max_memory, calls_per_step, prefix_memory: as in `paradec.batching.Batch`; `prefix_memory` only for text models.
        height, width, negative_prompt, output_type: for image models, as in `generate_images`. A prompt is then a text
            or a class label; its mapping may have "height", "width" and "negative_prompt".
        preset, arguments: the fields of `paradec.Request`, as in `generate` and `generate_images`, except those of
            `paradec.batching.REFUSED`.

    Returns:
        An iterator of one-row `Output`s, whose `text` is a string, or of `ImageOutput`s of one picture. Their `index`
        is the number of the prompt. The iterator's `cancel` cancels one prompt; its `close` cancels all.

    Raises:
        ValueError, TypeError: an argument out of its range, before any prompt is read.
        Interrupted (a KeyboardInterrupt): Ctrl-C. The error's `output` lists the complete answers that were not
            returned yet (pictures as codes: `images` is None). Further iteration returns these answers.
    """
    batch_arguments: dict[str, Any] = {"batch_size": batch_size, "max_memory": max_memory, "preset": preset}
    batch_arguments |= {"calls_per_step": calls_per_step, **arguments}
    picture_arguments = {"height": height, "width": width, "negative_prompt": negative_prompt}
    picture_arguments["output_type"] = output_type
    picture_arguments = {name: value for name, value in picture_arguments.items() if value is not None}
    if isinstance(model, PictureModel):
        check_refillable(model)
        if prefix_memory:
            raise ValueError(
                f"prefix_memory={short_repr(prefix_memory)} is for text models; {model.facts.name} makes pictures"
            )
        make_batch: Callable[[], Batch] = partial(ImageBatch, model, **batch_arguments, **picture_arguments)
    else:
        check_model("generate_many", model, KINDS)
        for name, value in picture_arguments.items():
            raise ValueError(f"{name}={short_repr(value)} is for image models; {model.facts.name} makes none")
        make_batch = partial(Batch, model, prefix_memory=prefix_memory, **batch_arguments)
    return Many(make_batch, prompts, order, errors, look_ahead)


class Many(Iterator[Any]):
    """Iterator of `Output`s or `ImageOutput`s that `generate_many` returns."""

    def __init__(
        self, make_batch: Callable[[], Batch], prompts: Iterable[Any], order: str, errors: str, look_ahead: int | None
    ):
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise TypeError(
                f"prompts={short_repr(prompts)} must be an iterable of prompts; for one prompt, use paradec.generate"
            )
        check_choice("order", order, ORDERS)
        check_choice("errors", errors, ERRORS)
        check_int("look_ahead", look_ahead, low=0, none=True)
        self.batch = make_batch()
        self._source, self._exhausted = iter(prompts), False
        self._in_order, self._raise_errors = order == "input", errors == "raise"
        size = self.batch.batch_size
        self._max_read_ahead = size + (LOOK_AHEAD * size if look_ahead is None else look_ahead)
        self._num_read = self._num_returned = 0
        self._tickets: dict[int, Ticket] = {}
        self._outputs: dict[int, Output | ImageOutput] = {}  # in the order in which they ended
        self._cancelled: set[int] = set()
        self._index_lock = threading.Lock()  # so that `cancel` sees a prompt either unread or in the batch

    def __next__(self) -> Any:
        try:
            while (index := self._next_index()) is None:
                self._fill()
                if self._exhausted and self._num_returned == self._num_read:
                    self.batch.close()
                    raise StopIteration
                self._collect(self.batch.step())
            self.batch.finish(self._outputs[index])
        except KeyboardInterrupt as interrupt:
            self._collect(self.batch.ended())
            stopped = Interrupted("decoding was interrupted; answers that were not returned yet are in .output")
            stopped.output = [self._outputs[i] for i in (sorted(self._outputs) if self._in_order else self._outputs)]
            raise stopped from interrupt
        output = self._outputs.pop(index)
        self._num_returned += 1
        if self._raise_errors and output.error is not None and not isinstance(output.error, Cancelled):
            output.error.add_note(f"prompt {index} of generate_many")
            raise output.error
        return output

    def cancel(self, index: int) -> bool:
        """Cancel the prompt with this number, from any thread. Returns False if it has ended.

        The prompt's output has the error `Cancelled` and the tokens decoded so far. An unread prompt is not decoded.
        """
        check_int("index", index, low=0)
        with self._index_lock:
            if index >= self._num_read:
                self._cancelled.add(index)
                return True
            ticket = self._tickets.get(index)
        return ticket is not None and self.batch.cancel(ticket)

    def close(self) -> None:
        """End the iteration without decoding the remaining prompts, and free the memory."""
        self.batch.close()
        self.batch.ended()
        self._exhausted, self._num_returned = True, self._num_read
        self._outputs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    def _next_index(self) -> int | None:
        """Return the index of the next output to return; None if that row has not ended yet."""
        if self._in_order:
            return self._num_returned if self._num_returned in self._outputs else None
        return next(iter(self._outputs), None)

    def _fill(self) -> None:
        batch = self.batch
        while (
            not self._exhausted
            and batch.occupied + batch.waiting < batch.batch_size
            and self._num_read - self._num_returned < self._max_read_ahead
        ):
            try:
                entry = next(self._source)
            except StopIteration:
                self._exhausted = True
                return
            with hold_interrupt():
                self._add(entry)

    def _add(self, entry: Any) -> None:
        ticket, output = None, None
        try:
            ticket = self.batch.add(**to_add_arguments(entry))
        except Exception as error:
            self.batch.check_open()
            output = self.batch.failed_output(detach_error(error))
            output.id = entry.get("id") if isinstance(entry, Mapping) else None
        with self._index_lock:
            index, self._num_read = self._num_read, self._num_read + 1
            is_cancelled = index in self._cancelled
            self._cancelled.discard(index)
            if ticket is not None:
                self._tickets[index] = ticket
        if output is not None:
            self._store_output(index, output)
        if ticket is not None and is_cancelled:
            self.batch.cancel(ticket)

    def _collect(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            index = next(index for index, candidate in self._tickets.items() if candidate is ticket)
            del self._tickets[index]
            assert ticket.output is not None  # it has ended
            self._store_output(index, ticket.output)

    def _store_output(self, index: int, output: Output | ImageOutput) -> None:
        output.index = index
        self._outputs[index] = output


def to_add_arguments(entry: Any) -> dict[str, Any]:
    """Convert an entry of the prompts to arguments of `Batch.add`. Raises TypeError for keys that are not strings."""
    if isinstance(entry, Mapping) and "prompt" in entry:
        for name in entry:
            if not isinstance(name, str):
                raise TypeError(f"a prompt's mapping has the key {short_repr(name)}; keys must be names of arguments")
        return dict(entry)
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Request):
        return {"prompt": entry[0], "preset": entry[1]}
    return {"prompt": entry}
