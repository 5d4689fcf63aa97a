"""Scheduler for models whose first block begins at the prompt's first token.

It differs from vLLM's `DiffusionScheduler` in three ways. Prompts are evaluated in chunks of whole blocks, because the
tokens of a block attend to each other. If a prompt ends within a block, the first canvas is the rest of this block; its
steps evaluate the block's prompt tokens again, so `num_computed_tokens` is always the start of a block. A canvas is
never scheduled in parts."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler
from vllm.v1.request import RequestStatus

from paradec.integrations.engines.vllm import slots

logger = logging.getLogger("vllm.plugins.paradec")


class BlockScheduler(DiffusionScheduler):
    """Scheduler of whole blocks. vLLM creates it for the models of this package (`registration.EngineConfig`)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.served = slots.read_model(self.vllm_config.model_config)
        page = self.cache_config.block_size
        if self.cache_config.enable_prefix_caching and page % self.served.block:
            raise ValueError(
                f"--block-size {page} must be a multiple of {self.served.block}, the model's block, with prefix "
                "caching; change it, or give --no-enable-prefix-caching"
            )

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Round `num_new_tokens` (to schedule) down to whole blocks, except at the end of the tokens or the context."""
        new = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        end, block = num_computed_tokens + new, self.served.block
        num_known = request.num_tokens + len(request.spec_token_ids)
        if end % block == 0 or end == num_known or end >= self.max_model_len:
            return new
        return max(0, end - end % block - num_computed_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Update as vLLM does, and set `num_computed_tokens` of unfinished requests to the start of their block."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and not request.is_finished():
                request.num_computed_tokens -= request.num_computed_tokens % self.served.block
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Cut each next canvas at the end of its block: the first canvas of a prompt may begin within a block."""
        for index, name in enumerate(draft_token_ids.req_ids):
            if (request := self.requests.get(name)) is not None:
                stop = request.num_computed_tokens + self.served.block
                del draft_token_ids.draft_token_ids[index][max(0, stop - request.num_tokens) :]
        super().update_draft_token_ids(draft_token_ids)

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Finish failed requests with an error status. A failed request has emitted the mask id; answers never do."""
        if new_token_ids and new_token_ids[0] == self.served.facts.mask_id:
            request.status = RequestStatus.FINISHED_ERROR
            request.stop_reason = self.served.why_unsupported(request.prompt_token_ids, request.sampling_params)
            logger.error("request %s: %s", request.request_id, request.stop_reason)
            new_token_ids.clear()
            return new_token_ids, True
        output: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, is_stale)
        return output
