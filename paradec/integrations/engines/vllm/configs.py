"""Configuration classes of the published checkpoints for vLLM. They read config.json as `paradec.load` does.

transformers does not know the `model_type` of these checkpoints, and their own configuration classes are remote code.
Each class has the field names of transformers' configuration for the same layers. Its additional field
`canvas_length`, the block length of the training, tells vLLM that this is a diffusion model.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

ARCHITECTURES = {
    "sdar": "SDARForCausalLM",
    "sdar_moe": "SDARMoeForCausalLM",
    "Fast_dLLM_Qwen": "Fast_dLLM_QwenForCausalLM",
    "llada2_moe": "LLaDA2MoeModelLM",
}
"""Name of the architecture in config.json, by `model_type`."""


class _BlockConfig(PretrainedConfig):
    """Base class. Fields: those of `Family.config`, token ids, `canvas_length`, `published` (all of config.json)."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a config.json. Raises CheckpointError: a field is missing, or has an unsupported value."""
        from paradec.models.loading import FAMILIES  # which imports torch

        fields = dict(config_dict)
        family = FAMILIES[cls.model_type]
        source = str(kwargs.get("name_or_path") or fields.get("_name_or_path") or "")
        canvas = fields.get("canvas_length")
        if canvas is None:
            canvas = family.block_length(fields, source)
        built = family.config(fields)
        # add the alternative field names that vLLM's classes read
        values = built.to_dict() | {name: getattr(built, name) for name in built.attribute_map}
        for name in ("architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype"):
            values.pop(name, None)
        ids = {name: fields.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")}
        return super().from_dict(
            {
                **values,
                **ids,
                "architectures": [ARCHITECTURES[cls.model_type]],
                "dtype": fields.get("dtype", fields.get("torch_dtype")),
                "canvas_length": canvas,
                "published": fields,
            },
            **kwargs,
        )


class SDARConfig(_BlockConfig):
    """SDAR and TraDo."""

    model_type = "sdar"


class SDARMoeConfig(_BlockConfig):
    """SDAR's mixtures of experts."""

    model_type = "sdar_moe"


class FastDLLMConfig(_BlockConfig):
    """Fast-dLLM v2."""

    model_type = "Fast_dLLM_Qwen"


class LLaDA2Config(_BlockConfig):
    """LLaDA2.0 and 2.1."""

    model_type = "llada2_moe"


CONFIGS = (SDARConfig, SDARMoeConfig, FastDLLMConfig, LLaDA2Config)
