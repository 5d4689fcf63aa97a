"""Every block policy by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paradec.core.adaptive_blocks import AdaptiveBlocks
from paradec.core.blocks import FixedBlocks, WholeCanvas
from paradec.core.checks import check_choice, shown
from paradec.core.pipelined_blocks import PipelinedBlocks
from paradec.core.protocol import plain

POLICIES = {
    "fixed": FixedBlocks,
    "whole": WholeCanvas,
    "adaptive": AdaptiveBlocks,
    "pipelined": PipelinedBlocks,
}
"""Names of policies, for `blocks="adaptive"` and the command line."""


def policy_of(name: str, value: Any) -> Any:
    """Check the field `blocks` of a request; what `policy_data` makes becomes a policy.

    Raises:
        ValueError: an unknown name, or settings that the policy does not have; the message begins with `name`.
    """
    if isinstance(value, Mapping):
        settings = dict(value)
        policy = settings.pop(name, None)
        check_choice(name, policy, POLICIES)
        try:
            return POLICIES[policy](**{key: tuple(s) if isinstance(s, list) else s for key, s in settings.items()})
        except TypeError as error:
            raise ValueError(f"{name}={shown(dict(value))}: {error}") from None
    if isinstance(value, str):
        check_choice(name, value, POLICIES)
    return value


def policy_data(value: Any) -> Any:
    """Turn a policy into data that JSON can hold; a name stays one.

    Raises:
        ValueError: a custom policy.
    """
    for name, kind in POLICIES.items():
        if type(value) is kind:
            return {"blocks": name} | {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if not isinstance(value, str):
        raise ValueError(f"blocks={shown(value)} is no data and cannot be saved: leave it out")
    return value
