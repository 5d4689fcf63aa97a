"""Configurations of speculators' block drafters (DFlash 2, DSpark), as one flat object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.checks import shown
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError, flag
from paradec.models.drafter import read_inputs


def flat_config(source: str, config: Mapping[str, Any], base: Model) -> dict[str, Any]:
    """Sizes and settings side by side; layers as `CausalQuery.keep_layers` counts them, `is_causal` of sliding layers.

    Raises:
        CheckpointError: a field of another type, or a drafter of a model of another size.
    """
    where, sizes = f"config.json of {source!r}", config.get("transformer_layer_config")
    if not isinstance(sizes, dict):
        raise CheckpointError(f"{where}: transformer_layer_config={shown(sizes)} must be an object")
    if flag(sizes, "attention_bias", False):
        raise CheckpointError(f"{where}: attention_bias={shown(sizes['attention_bias'])}; these layers have none")
    if config.get("target_hidden_size") not in (None, base.hidden_size):
        raise CheckpointError(
            f"{source!r} has target_hidden_size={shown(config['target_hidden_size'])}, {base.facts.name} "
            f"{base.hidden_size}: it drafts for another model"
        )
    name, count = "aux_hidden_state_layer_ids", base.text_config.num_hidden_layers
    inputs = config.get(name)
    if not isinstance(inputs, list) or not inputs or not all(type(n) is int and 0 < n <= count for n in inputs):
        raise CheckpointError(
            f"{where}: {name}={shown(inputs)} must be a list of integers from 1 to {count}, the layers of "
            f"{base.facts.name}; l is what layer l reads"
        )
    stated = {key: value for key, value in config.items() if value is not None and key != "transformer_layer_config"}
    sees_all = flag(stated, "sliding_window_non_causal", stated["speculators_model_type"] == "dflash2")
    own = {key: value for key, value in sizes.items() if value is not None}
    return {**own, **stated, "target_layer_ids": list(read_inputs(inputs, count)), "is_causal": not sees_all}
