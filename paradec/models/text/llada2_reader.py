"""How transformers reads LLaDA2's files onto its Glm4Moe: `query_key_value` becomes three matrices.

Imported when such a checkpoint is loaded, since it imports the model's code. `register_checkpoint_conversion_mapping`
goes by the name of a class, so there is one of our own while the files are read; the module is of transformers' class
afterwards. (On that class itself, it would be registered for the owner's other models as well.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Glm4MoeForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter


class SplitRows(ConversionOps):
    """Cut one matrix into several with as many rows as the module's own have. (transformers' operation of this kind is
    newer than 5.18.)"""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **others: Any,
    ) -> dict[str, Tensor]:
        (found,) = input_dict.values()
        whole = found[0] if isinstance(found, list) else found
        names = [full_layer_name.replace(target_patterns[0], target) for target in target_patterns]
        rows = [model.get_parameter(name).shape[0] for name in names]
        # copies, so that none keeps the whole matrix in memory
        return {target: part.clone() for target, part in zip(target_patterns, whole.split(rows), strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(0)


class LLaDA2MoeReader(Glm4MoeForCausalLM):
    """Glm4Moe under a name of its own, with routers of the dtype that is loaded.

    transformers 5.24 reads routers as float32 whatever the others are: the numbers of a float64 file would be rounded,
    and a saved bfloat16 file would not be the published one.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._keep_in_fp32_modules_strict = {"e_score_correction_bias"}
        for router in self.modules():
            if isinstance(router, Glm4MoeTopkRouter):
                router.weight = nn.Parameter(router.weight.to(torch.get_default_dtype()))

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts in the file of the class


def reading(fused: Mapping[str, tuple[str, ...]]) -> type:
    """The class that reads the files. fused: as in `paradec.models.family.Family`."""
    stacking = get_checkpoint_conversion_mapping("glm4_moe")
    splitting = [WeightConverter(whole, list(parts), [SplitRows()]) for whole, parts in fused.items()]
    register_checkpoint_conversion_mapping(LLaDA2MoeReader.__name__, [*stacking, *splitting], overwrite=True)
    return LLaDA2MoeReader
