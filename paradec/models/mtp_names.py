"""What checkpoints call the weights of their heads for multi-token prediction (MTP)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paradec.core.checks import shown
from paradec.models.checkpoint import CheckpointError

PLACE = re.compile(
    r"(?:model\.)?(?:layers\.(?P<after>\d+)|mtp_layers\.(?P<own>\d+)|mtp(?:\.layers\.(?P<inner>\d+))?)\."
)
"""After the model's own layers (DeepSeek-V3, GLM-4 MoE), in a list of their own (MiMo, speculators), or under one name
(Qwen3-Next, Mellum)."""
PARTS = {
    **{"enorm": "enorm", "pre_fc_norm_embedding": "enorm", "token_layernorm": "enorm"},
    **{"hnorm": "hnorm", "pre_fc_norm_hidden": "hnorm", "hidden_layernorm": "hnorm"},
    **{"eh_proj": "eh_proj", "fc": "eh_proj", "input_proj": "eh_proj"},
    **{"shared_head.norm": "norm", "norm": "norm", "final_layernorm": "norm"},
}
"""What is beside the decoder layer, and what it is called here."""
SHARED = ("embed_tokens", "shared_head.head")
"""Copies of what the model has."""
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields of config.json that say how many layers there are."""


class MtpNames(NamedTuple):
    """The weights of the heads among those of a checkpoint."""

    own: dict[str, str]
    """What the weights are called here, by the checkpoint's names."""
    prefixes: tuple[str, ...]
    """How the checkpoint's names of the heads' weights begin, copies of the model's included."""


def mtp_names(stored: Collection[str], config: Mapping[str, Any]) -> MtpNames:
    """Which of the `stored` weights are those of heads.

    A layer after the model's own is one only if config.json counts it and it has the matrix that heads have: else the
    model would lose a layer.
    """
    first, count = config.get("num_hidden_layers"), stated_layers(config)
    own, prefixes = {}, set()
    for name in stored:
        found = PLACE.match(name)
        if found is None:
            continue
        at = int(found["own"] or found["inner"] or 0)
        if found["after"] is not None:
            if not isinstance(first, int) or not 0 <= int(found["after"]) - first < count:
                continue
            if f"{found.group()}eh_proj.weight" not in stored:
                continue
            at = int(found["after"]) - first
        prefixes.add(found.group())
        part, _, kind = name[found.end() :].rpartition(".")
        if part not in SHARED:
            block = f"block.{part}" if part not in PARTS or found["inner"] is not None else PARTS[part]
            own[name] = f"layers.{at}.{block}.{kind}"
    return MtpNames(own, tuple(sorted(prefixes)))


def stated_layers(config: Mapping[str, Any]) -> int:
    """How many layers of heads config.json says that there are; 0 where it says nothing.

    Raises:
        CheckpointError: no such number.
    """
    name = next((name for name in COUNTS if config.get(name) is not None), "")
    value = config.get(name, 0)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"config.json: {name}={shown(value)} must be a number of layers")
    return value
