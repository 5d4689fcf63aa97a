"""Build the outputs of ended rows and failed prompts, and feed streamers."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.api.generate import build_output
from paradec.api.output import Output
from paradec.batching.slots import RowState, Ticket
from paradec.caches.cost import CacheCost
from paradec.core.prompts import Prompts
from paradec.core.protocol import Memory
from paradec.core.rows import select_rows

TENSORS = ("sequences", "attention_mask", "filled")  # fields of `Output` of shape [B, L]
COUNTS = ("draft_nfe", "encoder_calls", "denoising_calls", "reasoning_tokens")
LISTS = ("row_nfe", "tokens", "finished", "log_weight", *COUNTS)  # fields of `Output` with an entry per row


def copy_rows(state: RowState, slots: Sequence[int]) -> Any:
    """Copy rows of a state to build outputs. The copy shares the key/value store, and lacks memory and draft store."""
    reduced: Any = copy.copy(state)
    reduced.store, reduced.memory = None, Memory()
    if drafting := getattr(state, "drafting", None):
        reduced.drafting = replace(drafting, store=None, broken=None, parents=None)
    rows = select_rows(reduced, np.array(slots, np.int64))
    rows.store = state.store
    return rows


@torch.inference_mode(False)
@torch.no_grad()
def build_outputs(
    model: Any, state: RowState, slots: Sequence[int], tickets: Sequence[Ticket], error: Exception | None
) -> list[Output]:
    """Build one output per row of the `slots`, as if the row had been decoded alone."""
    hole_id = model.facts.hole_id
    if len(slots) > 1 and any(hole_id in ticket.prompts.rows[0] for ticket in tickets):
        # one prompt with holes would make the texts of all rows include their prompts
        return [build_outputs(model, state, [slot], [ticket], error)[0] for slot, ticket in zip(slots, tickets)]
    rows, prompts = copy_rows(state, slots), [ticket.prompts for ticket in tickets]
    all_prompts = Prompts([prompt.rows[0] for prompt in prompts], False, [prompt.starts[0] for prompt in prompts])
    output, counts, end_time = build_output(model, rows, all_prompts, 0.0), rows.counts, time.perf_counter()
    return [
        replace(_select_row(output, rows, counts, index, ticket), seconds=end_time - ticket.start_time, error=error)
        for index, ticket in enumerate(tickets)
    ]


def _select_row(output: Output, rows: Any, counts: np.ndarray, index: int, ticket: Ticket) -> Output:
    """Copy one row of an output. counts: `State.counts` of all rows."""
    width, row = int(rows.requested_end[index]), slice(index, index + 1)
    changes: dict[str, Any] = {name: getattr(output, name)[row, -width:].clone() for name in TENSORS}
    changes |= {name: value[row] for name in LISTS if (value := getattr(output, name)) is not None}
    texts = {name: getattr(output, name) for name in ("text", "fills", "reasoning")}
    changes |= {name: value[index] for name, value in texts.items() if value is not None}
    if output.logprobs is not None:
        changes["logprobs"] = output.logprobs.row(index).map_columns(lambda tensor, fill: tensor[:, -width:].clone())
    return replace(
        output,
        **changes,
        new_tokens=changes["sequences"][:, width - ticket.num_new_tokens :],
        row_forwards=int(counts[1, index]),
        forwarded_tokens=int(counts[2, index]),
        cost=CacheCost.from_state(rows, counts, row),
        rollout=output.rollout and output.rollout.row(index).with_request(ticket.request),
    )


def failed_output(model: Any, ids: Sequence[int], error: Exception) -> Output:
    """Build an output with the prompt's ids and the error, without an answer."""
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


def detach_error(error: Exception) -> Exception:
    """Remove an error's traceback, which keeps tensors alive. Unexpected errors get the traceback's text as a note."""
    if not isinstance(error, (ValueError, TypeError, FloatingPointError)) and not is_out_of_memory(error):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    return error.with_traceback(None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports a lack of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def feed_streamer(ticket: Ticket, state: RowState, slot: int, row: Tensor, final: int) -> None:
    """Pass tokens that have become final to a ticket's streamer, and the rest of the row to the streamer's `put_draft`.
    Raises the streamer's exceptions.

    row: [L] int64, on the host: the canvas of the slot. final: number of its leading final tokens."""
    streamer = ticket.streamer
    if ticket.sent is None:
        ticket.sent = int(state.prompt_length[slot])
        streamer.put(row[: ticket.sent].unsqueeze(0).clone())
    if final > ticket.sent:
        put_logprobs = getattr(streamer, "put_logprobs", None)
        if put_logprobs is not None and state.logprobs is not None:
            columns = slice(ticket.sent, final)
            put_logprobs(state.logprobs.row(slot).map_columns(lambda tensor, _: tensor[:, columns].cpu()))
        streamer.put(row[ticket.sent : final].unsqueeze(0).clone())
        ticket.sent = final
    stop = int(state.end[slot])
    put_draft = getattr(streamer, "put_draft", None)
    if put_draft is not None and state.facts.hole_id is not None and final < stop:
        put_draft(row[final:stop].unsqueeze(0).clone())
