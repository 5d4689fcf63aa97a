"""What is read of the rows of a batch: outputs of those that end in one step, and what streamers are given."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paradec.api.generate import output_of
from paradec.api.output import Output
from paradec.batching.slots import Group, RowState, Ticket, rows_of
from paradec.caches.cost import CacheCost
from paradec.core.prompts import Prompts

__all__ = ["Seen", "each_read", "read"]

TENSORS = ("sequences", "attention_mask", "filled")
LISTS = ("row_nfe", "tokens", "finished", "draft_nfe", "encoder_calls", "denoising_calls", "log_weight")


@torch.inference_mode(False)
@torch.no_grad()
def read(
    model: Any, state: RowState, slots: Sequence[int], tickets: Sequence[Ticket], error: Exception | None
) -> list[Output]:
    """The outputs of rows of a state, each as if the row had been alone."""
    hole = model.facts.hole_id
    if len(slots) > 1 and any(hole in ticket.prompts.rows[0] for ticket in tickets):  # their text begins elsewhere
        return [read(model, state, [slot], [ticket], error)[0] for slot, ticket in zip(slots, tickets)]
    rows = rows_of(state, slots)
    if len(slots) == 1:
        if not isinstance(getattr(type(rows), "max_new_tokens", None), property):
            rows.max_new_tokens = tickets[0].new
        output = output_of(model, rows, tickets[0].prompts, time.perf_counter() - tickets[0].began)
        return [replace(output, error=error, rollout=output.rollout and output.rollout.of_request(tickets[0].request))]
    prompts = Prompts(
        [ticket.prompts.rows[0] for ticket in tickets], False, [ticket.prompts.starts[0] for ticket in tickets]
    )
    found = output_of(model, rows, prompts, 0.0)
    now = time.perf_counter()
    return [
        replace(
            _row(found, rows, at, ticket),
            seconds=now - ticket.began,
            error=error,
            rollout=found.rollout and found.rollout.row(at).of_request(ticket.request),
        )
        for at, ticket in enumerate(tickets)
    ]


def _row(found: Output, rows: Any, at: int, ticket: Ticket) -> Output:
    """One row's part, in memory of its own."""
    width, row = int(rows.asked[at]), slice(at, at + 1)
    changes: dict[str, Any] = {name: getattr(found, name)[row, -width:].clone() for name in TENSORS}
    changes |= {name: value[row] for name in LISTS if (value := getattr(found, name)) is not None}
    if found.logprobs is not None:
        changes["logprobs"] = found.logprobs.row(at).placed(lambda tensor, fill: tensor[:, -width:].clone())
    return replace(
        found,
        **changes,
        text=None if found.text is None else found.text[at],
        new_tokens=changes["sequences"][:, width - ticket.new :],
        row_forwards=int(rows.row_forwards[at]),
        forwarded_tokens=int(rows.forwarded_tokens[at]),
        cost=CacheCost.of(rows, row),
    )


def each_read(
    read_rows: Callable[..., list[Any]],
    failed: Callable[[Any, Exception], Any],
    state: RowState,
    slots: Sequence[int],
    tickets: Sequence[Any],
    error: Exception | None,
) -> list[Any]:
    """What `read_rows` gives; where it raises, each row is read by itself, and one that raises then has `failed`."""
    try:
        return read_rows(state, slots, tickets, error)
    except Exception as unread:
        if len(slots) == 1:
            return [failed(tickets[0], error or unread)]
        pairs = zip(slots, tickets, strict=True)
        return [each_read(read_rows, failed, state, [slot], [ticket], error)[0] for slot, ticket in pairs]


@dataclass
class Seen:
    """A group's rows, read from the device once for all of them."""

    state: RowState
    canvas: Tensor
    """[B, L] int64, on the host."""
    final: np.ndarray
    """[B] int64, of `State.final`."""

    @classmethod
    def of(cls, group: Group) -> Self:
        slots = np.arange(len(group.tickets))
        group.told(slots)
        return cls(group.state, group.state.canvas.cpu(), group.state.final(slots))

    def feed(self, slot: int, ticket: Ticket) -> None:
        """Give a ticket's streamer what has become final; what it raises is raised."""
        streamer, row, final = ticket.streamer, self.canvas[slot], int(self.final[slot])
        if ticket.sent is None:
            ticket.sent = int(self.state.prompt_length[slot])
            streamer.put(row[: ticket.sent].unsqueeze(0).clone())
        if final > ticket.sent:
            scores = getattr(streamer, "put_logprobs", None)
            if scores is not None and self.state.logprobs is not None:
                part = slice(ticket.sent, final)
                scores(self.state.logprobs.row(slot).placed(lambda tensor, _: tensor[:, part].cpu()))
            streamer.put(row[ticket.sent : final].unsqueeze(0).clone())
            ticket.sent = final
        stop = int(self.state.end[slot])
        drafts = getattr(streamer, "put_draft", None)
        if drafts is not None and self.state.facts.hole_id is not None and final < stop:
            drafts(row[final:stop].unsqueeze(0).clone())
