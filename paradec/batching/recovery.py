"""Steps of a batch that raise: which rows begin anew, which go on, and which fail."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from paradec.api.generate import Output
from paradec.batching.slots import Group, Queue, Ticket

__all__ = ["begin_anew", "detached", "fit", "isolate", "nothing", "out_of_memory"]


def begin_anew(group: Group, groups: list[Group], queue: Queue) -> list[Ticket]:
    """Let the rows of a group wait, to be decoded from their beginning; they are returned."""
    groups.remove(group)
    tickets = [ticket for ticket in group.tickets if ticket is not None and ticket not in queue.waiting]
    queue.again(tickets)
    return tickets


def isolate(group: Group, groups: list[Group], queue: Queue) -> list[Ticket]:
    """A step of a group raised: each of its rows begins anew by itself. Those that were by themselves are returned, out
    of the queue: they fail."""
    tickets = begin_anew(group, groups, queue)
    failed = [ticket for ticket in tickets if ticket.isolated]
    for ticket in tickets:
        if ticket.isolated:
            queue.leave(ticket)
        ticket.isolated = True
    return failed


def fit(group: Group, groups: list[Group], queue: Queue, keep: bool) -> tuple[int, list[Ticket]]:
    """Memory was too small for the rows of a group: the younger half waits again, all of them where the state is
    between two commits (`keep` False).

    Returns:
        How many positions (rows times columns) may be evaluated together from now on; and the row that fails, where it
        was alone in the batch.
    """
    tickets = sorted((ticket for ticket in group.tickets if ticket is not None), key=lambda ticket: ticket.number)
    most, failed = max(1, len(tickets) // 2) * group.width, list[Ticket]()
    if len(tickets) == 1 and sum(each.occupied for each in groups) == 1:
        group.tickets = [None] * len(group.tickets)
        groups.remove(group)
        failed = tickets
    else:
        stay = tickets[: len(tickets) // 2] if keep else []
        try:
            group.keep([group.tickets.index(ticket) for ticket in stay])
        except Exception as again:
            if not out_of_memory(again):
                raise
            stay = []
        if not stay:
            groups.remove(group)
        queue.again([ticket for ticket in tickets if ticket not in stay])
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return most, failed


def nothing(model: Any, ids: Sequence[int], error: Exception) -> Output:
    """An output without an answer: the prompt's ids, if there are any, and the error."""
    sequence = torch.tensor([list(ids)], dtype=torch.int64)
    return Output(
        text=None if model.tokenizer is None else "",
        sequences=sequence,
        new_tokens=sequence[:, :0],
        attention_mask=torch.ones_like(sequence),
        filled=torch.zeros_like(sequence, dtype=torch.bool),
        row_nfe=[0],
        row_forwards=0,
        forwarded_tokens=0,
        tokens=[0],
        finished=[False],
        seconds=0.0,
        error=error.with_traceback(None),
    )


def detached(error: Exception) -> Exception:
    """An error without its traceback, which would hold on to a step's tensors. One that no check raised, and that is
    none of memory, has the traceback as a note."""
    if not isinstance(error, (ValueError, TypeError, FloatingPointError)) and not out_of_memory(error):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    return error.with_traceback(None)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was too small."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
