"""Rotary angles of checkpoints: their base and scaling.

`linear`, `yarn` and `llama3` give every position fixed angles. `dynamic` and `longrope` are not supported. They choose
angles by the largest position in a call: a row would depend on other rows, and stored keys would not fit later calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.checks import check_bool, check_int, check_number, short_repr
from paradec.models.checkpoint import CheckpointError, check_object, checkpoint_errors, read_positive

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""Supported types -> their required fields, including fields that transformers would fill in."""
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
}
BY_CALL = ("dynamic", "longrope")
"""Types that choose angles by the largest position in a call."""
ROPE_FIELDS = ("rope_parameters", "rope_scaling")
"""Fields of config.json in transformers 5, and in earlier releases."""


def rope_parameters(
    config: Mapping[str, Any], rotated_share: float | None = None, extra_fields: tuple[str, ...] = ()
) -> dict[str, Any]:
    """transformers' `rope_parameters` for a config.json. Raises CheckpointError for a missing base, two different
    bases, an unknown type, or wrong fields.

    rotated_share: rotated fraction of a head's width, if another field states it; None is 1.
    extra_fields: further fields of `rope_parameters` that the family reads."""
    bases = {} if config.get("rope_theta") is None else {"rope_theta": float(read_positive(config, "rope_theta"))}
    scalings: dict[str, dict[str, Any]] = {}
    for name in ROPE_FIELDS:
        fields = config.get(name)
        if fields is None:
            continue
        check_object(name, fields)
        if fields.get("rope_theta") is not None:
            bases[name] = float(read_positive(fields, "rope_theta"))
        scalings[name] = _read_scaling(name, fields, extra_fields)
    if not bases:
        raise CheckpointError("config.json has no 'rope_theta', nor 'rope_parameters' with one")
    if len(set(bases.values())) > 1:
        raise CheckpointError(f"config.json states two bases of the rotary angles: rope_theta is {bases}")
    if len({str(sorted(scaling.items())) for scaling in scalings.values()}) > 1:
        raise CheckpointError(f"config.json has two scalings of the rotary angles: {short_repr(scalings)}")
    parameters = next(iter(scalings.values()), {"rope_type": "default"}) | {"rope_theta": next(iter(bases.values()))}
    return parameters if rotated_share is None else parameters | {"partial_rotary_factor": rotated_share}


def _read_scaling(name: str, fields: Mapping[str, Any], extra_fields: tuple[str, ...]) -> dict[str, Any]:
    kinds = {fields[key] for key in ("rope_type", "type") if isinstance(fields.get(key), str)}
    kind = next(iter(kinds), "default")
    if len(kinds) > 1 or any(not isinstance(fields.get(key, kind), (str, type(None))) for key in ("rope_type", "type")):
        raise CheckpointError(f"config.json: {name}={short_repr(fields)} must name one rope_type")
    if kind in BY_CALL:
        raise CheckpointError(
            f"config.json: {name}={short_repr(fields)} is not supported: rope_type={kind!r} chooses the rotary angles "
            "by the largest position in a call, so that a row would depend on others and stored keys would not fit "
            f"later calls; supported: {', '.join(map(repr, REQUIRED))}"
        )
    if kind not in REQUIRED:
        raise CheckpointError(
            f"config.json: {name}={short_repr(fields)} is not supported: rope_type={short_repr(kind)} is not known; "
            f"supported: {', '.join(map(repr, REQUIRED))}"
        )
    allowed = (*REQUIRED[kind], *OPTIONAL.get(kind, ()), *extra_fields)
    scaling: dict[str, Any] = {"rope_type": kind}
    for field, value in fields.items():
        is_neutral = field == "partial_rotary_factor" and value == 1
        if value is None or is_neutral or field in ("rope_type", "type", "rope_theta"):
            continue
        if field not in allowed:
            raise CheckpointError(
                f"config.json: {name}={short_repr(fields)} is not supported: {short_repr(field)}={short_repr(value)} "
                f"has no meaning for rope_type={kind!r}; supported: {', '.join(map(repr, ('rope_theta', *allowed)))}"
            )
        with checkpoint_errors("config.json"):
            if field == "truncate":
                check_bool(f"{name}[{field!r}]", value)
            elif field == "original_max_position_embeddings":
                check_int(f"{name}[{field!r}]", value, low=1)
            else:
                check_number(f"{name}[{field!r}]", value, low=0, open_low=field != "llama_4_scaling_beta")
                value = float(value)
        scaling[field] = value
    for field in REQUIRED[kind]:
        if field not in scaling:
            raise CheckpointError(f"config.json: {name}={short_repr(fields)} of rope_type={kind!r} has no {field!r}")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CheckpointError(
            f"config.json: {name}: low_freq_factor={scaling['low_freq_factor']} must be below "
            f"high_freq_factor={scaling['high_freq_factor']}"
        )
    return scaling


def replace_base(config: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    """Set the rotary angles' base to `theta` wherever `config` states it, or else in `rope_theta`; None: no change."""
    if theta is None:
        return dict(config)
    bases: dict[str, Any] = {
        name: {**config[name], "rope_theta": theta}
        for name in ROPE_FIELDS
        if isinstance(config.get(name), dict) and config[name].get("rope_theta") is not None
    }
    if not bases or config.get("rope_theta") is not None:
        bases["rope_theta"] = theta
    return {**config, **bases}


def read_max_lengths(config: Any, has_new_base: bool) -> tuple[int | None, int]:
    """Length of the longest row that a model accepts (None for any length), and of the longest in training. config:
    transformers'. has_new_base: whether `load` replaced the base of the angles."""
    trained = config.max_position_embeddings
    if has_new_base:
        return None, trained
    fields = config.rope_parameters
    if not {"factor", "original_max_position_embeddings"} <= fields.keys():
        return trained, trained
    # a config may scale the angles but not max_position_embeddings
    return max(trained, int(fields["factor"] * fields["original_max_position_embeddings"])), trained
