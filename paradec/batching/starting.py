"""Prompts of a batch that begin in one step, as one request of several rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paradec.batching.slots import Ticket
from paradec.core.prompts import Prompts
from paradec.request import Request

__all__ = ["alike", "prefixes_of", "together"]


def alike(model: Any, first: Ticket, other: Ticket) -> bool:
    """Whether two prompts may begin as rows of one request: they differ in nothing but their ids and seeds, and
    neither has what is laid out for all rows of a request (holes, pictures), is decoded alone, or steps on the
    device."""
    if not all(_plain(model, ticket) for ticket in (first, other)):
        return False
    if first.request is other.request:
        return True
    changes = [ticket.request.changes() | {"seed": None} for ticket in (first, other)]
    return changes[0] == changes[1]


def _plain(model: Any, ticket: Ticket) -> bool:
    if ticket.isolated or ticket.request.compile or ticket.prompts.images is not None:
        return False
    return model.facts.hole_id not in ticket.prompts.rows[0]


def together(tickets: Sequence[Ticket]) -> tuple[Prompts, Request]:
    """The prompts of tickets that are alike as those of one request, and this request."""
    first = tickets[0]
    if len(tickets) == 1:
        return first.prompts, first.request
    seeds = tuple(ticket.request.seed for ticket in tickets)
    each = [ticket.prompts for ticket in tickets]
    starts = [start for prompts in each for start in prompts.starts]
    before = [number for prompts in each for number in prompts.before or ()]
    prompts = Prompts([prompts.rows[0] for prompts in each], False, starts, before, among=True)
    return prompts, first.request if len({*seeds}) == 1 else replace(first.request, seed=seeds)  # type: ignore[arg-type]


def prefixes_of(model: Any, budget: int | None) -> Any:
    """What rows of a batch leave for each other (`paradec.batching.prefixes`); None where nothing is kept.

    Raises:
        ValueError: a budget for a model whose rows have nothing to share.
    """
    facts = model.facts
    if facts.topology not in ("causal", "block_causal"):
        if budget:
            raise ValueError(
                f"prefix_memory={budget} has nothing to keep: every key of {facts.name} depends on the whole row; "
                "share_prefix=True of generate approximates it"
            )
        return None
    if budget == 0:
        return None
    from paradec.batching.prefixes import Prefixes

    return Prefixes(model, budget)
