"""Inputs and attention of a forward, for vLLM's second model runner.

Attention is block-causal, but for vLLM a request is either causal or not. So the attention gets each block of a prompt
as a separate, non-causal request. A block attends to itself and to the earlier blocks, even of the same batch, because
every layer writes the keys and values of the whole batch before it reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from paradec.integrations.engines.vllm.sampler import BlockSampler
from paradec.integrations.engines.vllm.settings import settings_of
from paradec.integrations.engines.vllm.slots import Slot, cut_at_blocks, read_model


class BlockModelState(DefaultModelState):
    """Model state with block-causal attention; vLLM gets this class from the model class (`models.py`)."""

    supports_prompt_embeds = False
    num_new_sampled_tokens_per_step = 0

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device):
        super().__init__(vllm_config, model, encoder_cache, device)
        self.served = read_model(self.model_config)
        self.slots: dict[int, Slot | None] = {}
        """Requests by vLLM's slot numbers; None for a request that could not be started."""
        self.numbers: dict[str, int] = {}
        """Slot numbers by request id."""
        self.shifts = bool(self.served.facts.shift)
        if self.shifts:
            model.make_shift(self.max_num_reqs, self.max_num_tokens, device)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Return the sampler that replaces vLLM's, and None instead of a rejection sampler."""
        mask, width = self.served.facts.mask_id, self.served.block
        return BlockSampler(sampler, self.slots, width, mask, self.shifts, SamplerOutput), None

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Start a request, or resume a preempted one."""
        name = new_req_data.req_id
        self.numbers[name] = req_index
        tokens, prompt = list(new_req_data.prefill_token_ids), list(new_req_data.prompt_token_ids or ())
        self.slots[req_index] = None
        try:
            settings = settings_of(new_req_data.sampling_params, self.served.defaults, name)
            hosted = self.served.open_row(prompt, settings, tokens[len(prompt) :], self.device)
        except (ValueError, TypeError):
            return  # the scheduler reports the reason (`BlockScheduler`)
        self.slots[req_index] = Slot(self.served, hosted, len(tokens))

    def remove_request(self, req_id: str) -> None:
        """Remove a request that has ended, was aborted or preempted."""
        super().remove_request(req_id)
        self.slots.pop(self.numbers.pop(req_id, -1), None)

    # ---- a forward --------------------------------------------------------------------------------------------------

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Prepare inputs. For models with shifted logits, also set the index of each position's left neighbour."""
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.shifts:
            self._set_shift(input_batch)
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        if self.shifts:
            self.model.shift.set_indices(np.arange(num_tokens), {}, num_tokens)
        return super().prepare_dummy_inputs(num_reqs, num_tokens)

    def _set_shift(self, input_batch: Any) -> None:
        count, total = input_batch.num_reqs, input_batch.num_tokens_after_padding
        begins = input_batch.query_start_loc_np[: count + 1]
        source = np.arange(-1, total - 1)
        columns = {}
        for index, row_id in enumerate(input_batch.idx_mapping_np[:count].tolist()):
            slot = self.slots.get(row_id)
            source[begins[index]] = total + row_id
            computed = int(input_batch.num_computed_tokens_np[index])
            end = computed + int(begins[index + 1] - begins[index])
            # a prompt's last, incomplete block is evaluated again with its canvas, so its hidden state is not stored
            if slot is not None and (slot.is_storing or end <= slot.begin) and end % self.served.block == 0:
                columns[row_id] = int(begins[index + 1]) - 1
            elif slot is not None and computed < slot.begin < end:
                columns[row_id] = int(begins[index]) + slot.begin - computed - 1
        self.model.shift.set_indices(source, columns, total)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """Build the attention metadata of the batch, with one request for each block."""
        from vllm.config.compilation import CUDAGraphMode

        padded = cudagraph_mode == CUDAGraphMode.FULL
        count = input_batch.num_reqs_after_padding if padded else input_batch.num_reqs
        tokens = input_batch.num_tokens_after_padding if padded else input_batch.num_tokens
        begins = input_batch.query_start_loc_np[: count + 1]
        seq_lens, upper = input_batch.seq_lens, input_batch.seq_lens_cpu_upper_bound
        begins_on_device, longest = input_batch.query_start_loc[: count + 1], int(np.diff(begins).max())
        # vLLM's memory profiling passes rows that are not requests
        is_real = len(self.numbers) > 0 and self.slots.keys() >= {*input_batch.idx_mapping_np[: input_batch.num_reqs]}
        if longest > self.served.block and is_real:
            rows, begins, ends = cut_at_blocks(begins, input_batch.num_computed_tokens_np, self.served.block)
            count, longest = len(rows), int(np.diff(begins).max())
            index = torch.as_tensor(rows, device=self.device)
            block_tables = [table[index] for table in block_tables]
            upper = torch.as_tensor(ends, dtype=torch.int32)
            seq_lens = upper.to(self.device)
            begins_on_device = torch.as_tensor(begins, dtype=torch.int32, device=self.device)
        metadata: dict[str, Any] = build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=count,
            num_tokens=tokens,
            query_start_loc_gpu=begins_on_device,
            query_start_loc_cpu=torch.as_tensor(begins, dtype=torch.int32),
            max_query_len=longest,
            seq_lens=seq_lens,
            max_seq_len=self.max_model_len if for_capture or upper is None else int(upper[:count].max()),
            block_tables=block_tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            seq_lens_cpu_upper_bound=upper,
            positions=input_batch.positions,
            for_cudagraph_capture=for_capture,
            causal=False,
            ubatch_idx=ubatch_idx,
        )
        return metadata
