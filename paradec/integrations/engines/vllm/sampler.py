"""Replacement of vLLM's sampler.

For each request, `BlockSampler` writes the next canvas to `draft_tokens`, which vLLM evaluates in the next forward.
Of each request, `num_sampled` tokens are emitted, and `num_rejected` tokens must be evaluated again. This file does not
import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paradec.integrations.engines.vllm.slots import Slot


class BlockSampler:
    """Sampler that steps all rows of a batch.

    base: vLLM's own sampler, whose request buffers are used.
    slots: the engine's requests by vLLM's slot numbers; None for a request that could not be started.
    width: W, positions of a canvas. mask: the mask id, which is emitted if a request has failed.
    forwards_twice: see `Slot.step`. output: vLLM's `SamplerOutput`."""

    compute_nans = False
    penalties_state = SimpleNamespace(output_bin_counts=None)
    """vLLM reads this attribute of its samplers. None: there are no token counts."""

    def __init__(
        self,
        base: Any,
        slots: Mapping[int, Slot | None],
        width: int,
        mask: int,
        forwards_twice: bool,
        output: Callable[..., Any],
    ):
        self.sampling_states, self.req_states = base.sampling_states, base.req_states
        self.slots, self.width, self.mask = slots, width, mask
        self.forwards_twice, self.output = forwards_twice, output

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Add a request to vLLM's buffers; the model state has already started it."""
        self.sampling_states.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Apply the staged writes of vLLM's buffers."""
        self.sampling_states.apply_staged_writes()

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None) -> Any:
        """Step all rows. logits: [N, V] for the N canvas positions of the batch, in the order of its requests."""
        count = input_batch.num_reqs
        begins = np.zeros(count + 1, np.int64) if input_batch.num_draft_tokens == 0 else input_batch.cu_num_logits_np
        evaluated = np.diff(input_batch.query_start_loc_np[: count + 1])
        sampled = np.zeros((count, self.width), np.int64)
        num_sampled, rejected = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for index, row_id in enumerate(input_batch.idx_mapping_np[:count].tolist()):
            if row_id not in self.slots:
                continue  # vLLM's memory profiling passes rows that are not requests
            slot = self.slots[row_id]
            first, last = int(begins[index]), int(begins[index + 1])
            if first == last:  # a part of a prompt, without a canvas
                num_prefill = int(input_batch.prefill_len_np[index])
                num_computed = int(input_batch.num_computed_tokens_np[index] + evaluated[index])
                if num_computed < num_prefill:
                    continue
                tokens: list[int] = [self.mask] if slot is None else []
                rejected[index] = 0 if slot is None else num_computed - slot.begin
            elif slot is None:
                tokens = [self.mask]
            else:
                tokens = slot.step(logits[first:last], self.forwards_twice)
                rejected[index] = 0 if tokens else evaluated[index]
            sampled[index, : len(tokens)], num_sampled[index] = tokens, len(tokens)
            if slot is not None and not slot.failed:
                canvas = slot.canvas()
                self.req_states.draft_tokens[row_id, : len(canvas)] = canvas
        device = self.req_states.draft_tokens.device
        return self.output(
            sampled_token_ids=torch.as_tensor(sampled, device=device),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=torch.as_tensor(num_sampled, device=device),
            num_rejected=torch.as_tensor(rejected, device=device),
        )


class LeftShift(nn.Module):
    """Shift of hidden states to the next position, for models whose logits predict the next position's token.

    The left neighbour of a block's first position was evaluated in an earlier forward. So `last_hidden` stores for
    each request the hidden state of its latest final block's last position. Buffers keep their addresses (CUDA graphs).

    requests: S, number of vLLM's slots. tokens: N, maximum number of tokens of a batch. hidden: D, hidden size."""

    last_hidden: Tensor  # [S, D]
    source: Tensor
    last_columns: Tensor

    def __init__(self, requests: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.requests = requests
        last_hidden = torch.zeros((requests, hidden), dtype=dtype, device=device)
        self.register_buffer("last_hidden", last_hidden, persistent=False)
        self.register_buffer("source", torch.zeros(tokens, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("last_columns", torch.zeros(requests, dtype=torch.int64, device=device), persistent=False)

    def set_indices(self, source: np.ndarray, columns: Mapping[int, int], total: int) -> None:
        """Set the indices for the next forward. They index the concatenation of its hidden states and `last_hidden`.
        source: [total] int64, left neighbour of each position. columns: by slot, index of its next `last_hidden`."""
        last_columns = total + np.arange(self.requests)
        for row_id, column in columns.items():
            last_columns[row_id] = column
        self.source[:total].copy_(torch.from_numpy(np.maximum(source, 0)))
        self.last_columns.copy_(torch.from_numpy(last_columns))

    def forward(self, hidden: Tensor) -> Tensor:
        """Shift hidden states [N, D], and update `last_hidden`."""
        combined = torch.cat((hidden, self.last_hidden))
        self.last_hidden.copy_(combined.index_select(0, self.last_columns))
        return combined.index_select(0, self.source[: len(hidden)])
