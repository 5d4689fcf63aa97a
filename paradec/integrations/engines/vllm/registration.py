"""What vLLM is told of the checkpoints, and how an engine for one of them is configured."""

from __future__ import annotations

import logging
from typing import Any

from paradec.integrations.engines.vllm.configs import ARCHITECTURES, CONFIGS

logger = logging.getLogger("vllm.plugins.paradec")

MODELS = {
    "SDARForCausalLM": "paradec.integrations.engines.vllm.models:SDAR",
    "SDARMoeForCausalLM": "paradec.integrations.engines.vllm.models:SDARMoe",
    "Fast_dLLM_QwenForCausalLM": "paradec.integrations.engines.vllm.models:FastDLLM",
    "LLaDA2MoeModelLM": "paradec.integrations.engines.vllm.models:LLaDA2",
}
"""Where the model class of an architecture is; imported when one is loaded."""
SCHEDULER = "paradec.integrations.engines.vllm.scheduler.BlockScheduler"
ADMISSION = "paradec.integrations.engines.vllm.admission:Admission"
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters of requests that give none, in place of generation_config.json's: vLLM refuses another
temperature for a diffusion model."""


def register() -> None:
    """Tell vLLM and transformers of the checkpoints. What vLLM has of its own under the same name is left alone."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    supported = ModelRegistry.get_supported_archs()
    for architecture, target in MODELS.items():
        if architecture not in supported:
            ModelRegistry.register_model(architecture, target)
            MODELS_CONFIG_MAP[architecture] = EngineConfig  # type: ignore[assignment]
    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)


class EngineConfig:
    """The configuration hooks of these models, as vLLM calls them."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Called when the model's part of the configuration is made. Raises ValueError: neither config.json nor its
        folder's name says the block."""
        canvas = getattr(model_config.hf_config, "canvas_length", None)
        if isinstance(canvas, bool) or not isinstance(canvas, int) or canvas < 1:
            raise ValueError(
                f"neither config.json nor the name of {model_config.model!r} says how long its blocks are; give "
                "--hf-overrides '{\"canvas_length\": N}' as it was trained"
            )
        for name, value in NEUTRAL.items():
            model_config.override_generation_config.setdefault(name, value)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Called when the whole configuration is made, before its last checks. Raises ValueError: a part of it that
        these models cannot have."""
        from vllm.config.diffusion import DiffusionConfig

        from paradec.integrations.engines.vllm import admission

        model, scheduler, cache = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.cache_config
        parallel, block = vllm_config.parallel_config, model.hf_config.canvas_length
        diffusion = vllm_config.diffusion_config
        if diffusion is None:
            vllm_config.diffusion_config = DiffusionConfig(canvas_length=block)
        elif diffusion.canvas_length != block:
            raise ValueError(
                f"canvas_length={diffusion.canvas_length} of --diffusion-config must be the block of "
                f"{model.model!r}, {block}; a shorter inner block is `block_length` of a request"
            )
        elif diffusion.max_denoising_steps is not None:
            raise ValueError(
                f"max_denoising_steps={diffusion.max_denoising_steps} of --diffusion-config has no meaning here: give "
                "`steps` of a request, which are those of all its blocks"
            )
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("these models cannot be cut into a pipeline: leave --pipeline-parallel-size at 1")
        if getattr(parallel, "enable_batch_sharded_sampling", False):
            raise ValueError("a sampler of paradec sees all rows of a step: leave batch-sharded sampling off")
        if vllm_config.speculative_config is not None:
            raise ValueError("a block of masks takes the place of speculative tokens: leave --speculative-config out")
        if not vllm_config.use_v2_model_runner:
            raise ValueError(
                "diffusion models take vLLM's second model runner: set VLLM_USE_V2_MODEL_RUNNER=1, with a Triton that "
                "is usable here"
            )
        if scheduler.max_num_batched_tokens < block:
            raise ValueError(
                f"max_num_batched_tokens={scheduler.max_num_batched_tokens} holds no block of {block}: give more"
            )
        if scheduler.scheduler_cls not in (None, SCHEDULER):
            raise ValueError(f"scheduler_cls={scheduler.scheduler_cls!r} knows no blocks; leave --scheduler-cls out")
        scheduler.scheduler_cls = SCHEDULER
        if scheduler.async_scheduling:
            raise ValueError("a step's tokens are the next one's input: leave --async-scheduling out")
        scheduler.async_scheduling = False
        scheduler.long_prefill_token_threshold = 0
        if cache.enable_prefix_caching and cache.block_size is not None and cache.block_size % block:
            logger.warning(
                "prefix caching is off: pages of %d tokens are no whole blocks of %d; give --block-size a multiple",
                cache.block_size,
                block,
            )
            cache.enable_prefix_caching = False
        processors = list(model.logits_processors or ())
        if ADMISSION not in processors:
            model.logits_processors = [*processors, ADMISSION]
        admission.serve(model)


assert MODELS.keys() == set(ARCHITECTURES.values())
