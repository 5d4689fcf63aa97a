"""Registration of the checkpoints with vLLM, and the configuration of an engine for them."""

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
"""Model class of each architecture, imported when a model is loaded."""
SCHEDULER = "paradec.integrations.engines.vllm.scheduler.BlockScheduler"
ADMISSION = "paradec.integrations.engines.vllm.admission:Admission"
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Default sampling parameters of requests. They override generation_config.json, as vLLM requires temperature 1 for
diffusion models."""


def register() -> None:
    """Register the configurations with transformers, and with vLLM the architectures that it lacks."""
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
    """Hooks that vLLM calls to configure these models."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Check the model's configuration and set defaults. Raises ValueError: the block length is neither in
        config.json nor in the folder's name."""
        canvas = getattr(model_config.hf_config, "canvas_length", None)
        if isinstance(canvas, bool) or not isinstance(canvas, int) or canvas < 1:
            raise ValueError(
                f"neither config.json nor the name of {model_config.model!r} has the block length; give that of "
                "training: --hf-overrides '{\"canvas_length\": N}'"
            )
        for name, value in NEUTRAL.items():
            model_config.override_generation_config.setdefault(name, value)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check and complete the engine's configuration. Raises ValueError: a setting that these models do not
        support."""
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
                f"max_denoising_steps={diffusion.max_denoising_steps} of --diffusion-config is not supported: give "
                "`steps` of a request, for all its blocks together"
            )
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("pipeline parallelism is not supported: leave --pipeline-parallel-size at 1")
        if getattr(parallel, "enable_batch_sharded_sampling", False):
            raise ValueError("paradec's samplers need all rows of a step: leave batch-sharded sampling off")
        if vllm_config.speculative_config is not None:
            raise ValueError("blocks of masks replace speculative tokens: leave --speculative-config out")
        if not vllm_config.use_v2_model_runner:
            raise ValueError(
                "diffusion models need vLLM's second model runner, which needs Triton: set VLLM_USE_V2_MODEL_RUNNER=1"
            )
        if scheduler.max_num_batched_tokens < block:
            raise ValueError(
                f"max_num_batched_tokens={scheduler.max_num_batched_tokens} must be at least a block of {block}"
            )
        if scheduler.scheduler_cls not in (None, SCHEDULER):
            raise ValueError(f"scheduler_cls={scheduler.scheduler_cls!r} is not supported; leave --scheduler-cls out")
        scheduler.scheduler_cls = SCHEDULER
        if scheduler.async_scheduling:
            raise ValueError("a step needs the tokens of the step before: leave --async-scheduling out")
        scheduler.async_scheduling = False
        scheduler.long_prefill_token_threshold = 0
        if cache.enable_prefix_caching and cache.block_size is not None and cache.block_size % block:
            logger.warning(
                "prefix caching is off: the page size %d must be a multiple of the model's block %d; set --block-size",
                cache.block_size,
                block,
            )
            cache.enable_prefix_caching = False
        processors = list(model.logits_processors or ())
        if ADMISSION not in processors:
            model.logits_processors = [*processors, ADMISSION]
        admission.record_model(model)


assert MODELS.keys() == set(ARCHITECTURES.values())
