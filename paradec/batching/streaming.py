"""What the streamers of a batch are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from paradec.batching.slots import Group, RowState, Ticket

__all__ = ["Seen"]


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
