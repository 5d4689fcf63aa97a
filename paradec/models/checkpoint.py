"""Reading a checkpoint folder (or hub repository) with errors that say what is wrong with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paradec.checks import is_finite, shown

INDEX = "model.safetensors.index.json"
REACH_SECONDS = 5
"""How long the hub may take to answer before it counts as out of reach."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: missing, corrupt, of another format, or asking for unsupported maths."""


def fetch(source: str, filename: str, revision: str | None) -> Path | None:
    """Local path of one file of a folder or hub repository; None when it does not have that file.

    Raises:
        CheckpointError: neither a folder nor a reachable repository.
    """
    if os.path.isdir(source):
        path = Path(source, filename)
        return path if path.is_file() else None
    if os.path.exists(source) or source.startswith((".", "/", "~")):
        raise CheckpointError(f"{source!r} is not a folder with a checkpoint")
    from transformers.utils import cached_file

    if filename == "config.json" and not _cached_or_reachable(source, filename, revision):
        raise CheckpointError(f"{source!r} is no folder here, and the hub cannot be reached to look for it there")
    try:
        found = cached_file(source, filename, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{source!r} is neither a folder here nor a hub repository in reach: {reason}") from error
    return None if found is None else Path(found)


def _cached_or_reachable(source: str, filename: str, revision: str | None) -> bool:
    """Ask once, with a short timeout: hub downloads retry for half a minute when there is no network."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, get_session

    try:
        if isinstance(try_to_load_from_cache(source, filename, revision=revision), str):
            return True
    except HFValidationError:
        return True  # no name of a repository: the look-up says so, without the network
    if constants.is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_SECONDS)
    except Exception:  # whichever client library the hub's uses, with its own kinds of errors
        return False
    return True


def read_json(source: str, filename: str, revision: str | None, required: bool = False) -> dict[str, Any]:
    """A JSON object from the checkpoint; {} when it is absent and not required.

    Raises:
        CheckpointError: absent but required, or no JSON object.
    """
    path = fetch(source, filename, revision)
    if path is None:
        if required:
            raise CheckpointError(f"{source!r} has no {filename}")
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{filename} of {source!r} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{filename} of {source!r} holds a {type(data).__name__}, not an object")
    return data


def positive(config: Mapping[str, Any], name: str) -> Any:
    """A positive number from the config (an int stays one).

    Raises:
        CheckpointError: something else stands there.
    """
    value = config.get(name)
    integral = name not in ("rope_theta", "rms_norm_eps", "mlp_ratio")
    kinds = int if integral else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not is_finite(value) or value <= 0:
        kind = "integer" if integral else "number"
        raise CheckpointError(f"config.json: {name}={shown(value)} must be a positive {kind}")
    return value


def flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    """True, False or None (null) from the config.

    Raises:
        CheckpointError: something else stands there.
    """
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={shown(value)} must be true or false")
    return value


def refuse_unless(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError for a field that changes the maths and has a value that is not supported."""
    for name, allowed in only.items():
        value = config.get(name, allowed[0])
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[allowed.index(value)], bool):
            raise CheckpointError(
                f"config.json: {name}={shown(value)} is not supported; supported: {', '.join(map(repr, allowed))}"
            )


def token_id(name: str, value: Any, vocab_size: int) -> int | None:
    """Check an optional token id.

    Raises:
        CheckpointError: not an id of the vocabulary.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(f"{name}={shown(value)} is not a token id (0 to {vocab_size - 1})")
    return value


def stored_shapes(source: str, revision: str | None) -> dict[str, tuple[int, ...] | None]:
    """Names and shapes of the stored weights, read from the headers alone; a shape is None for shards on the hub.

    Raises:
        CheckpointError: no safetensors here, an index that is wrong, or a header that cannot be read.
    """
    single = fetch(source, "model.safetensors", revision)
    if single is not None:
        return dict(_header(single))
    if fetch(source, INDEX, revision) is None:
        raise CheckpointError(f"{source!r} has no model.safetensors or index of shards; pickled weights are not read")
    names = read_json(source, INDEX, revision).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{INDEX} of {source!r} has no 'weight_map'")
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, shard in names.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or os.path.basename(shard) != shard:
            raise CheckpointError(
                f"{INDEX} of {source!r}: {shown(name)} is in {shown(shard)}; expected a .safetensors file beside it"
            )
        if not os.path.isdir(source):  # left to from_pretrained, which downloads shards side by side
            shapes[name] = None
            continue
        if shard not in shards:
            path = fetch(source, shard, revision)
            if path is None:
                raise CheckpointError(f"{source!r} has no {shard}, which its index names")
            shards[shard] = dict(_header(path))
        if name not in shards[shard]:
            raise CheckpointError(f"{shard} of {source!r} does not hold {name}, as its index says")
        shapes[name] = shards[shard].pop(name)
    for shard, rest in shards.items():
        if rest:
            raise CheckpointError(f"{shard} of {source!r} holds {min(rest)}, which its index does not name")
    return shapes


def _header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, tuple(file.get_slice(name).get_shape())
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(f"the weights of {str(path.parent)!r} cannot be read: {path.name}: {reason}") from error


def check_weights(
    source: str, stored: Mapping[str, tuple[int, ...] | None], config: Any, names: Mapping[str, str]
) -> None:
    """Compare what is stored with what a Llama, Qwen2 or Qwen3 of this config needs, before anything is built.

    Args:
        stored: names in the checkpoint and their shapes.
        names: the checkpoint's name patterns -> the model's names, as given to `from_pretrained(key_mapping=)`.

    Raises:
        CheckpointError: weights that are missing, left over, or of another shape, by name.
    """
    if config.num_hidden_layers > len(stored):
        raise CheckpointError(
            f"the weights of {source!r} do not fit config.json: {config.num_hidden_layers} layers, but only "
            f"{len(stored)} weights"
        )
    found: dict[str, tuple[int, ...] | None] = {}
    original: dict[str, str] = {}
    twice = []
    for name, shape in stored.items():
        renamed = next((re.sub(old, new, name) for old, new in names.items() if re.search(old, name)), name)
        if renamed in found:
            twice.append(name)
        found[renamed], original[renamed] = shape, name
    needed = _needed_shapes(config)
    wrong = {
        "missing": [name for name in needed if name not in found],
        "unexpected": twice + [original[name] for name in found if name not in needed],
        "mismatched": [
            f"{original[name]} {list(shape)} instead of {list(needed[name])}"
            for name, shape in found.items()
            if shape is not None and name in needed and shape != needed[name]
        ],
    }
    if any(wrong.values()):
        raise CheckpointError(f"the weights of {source!r} do not fit config.json: {listed(wrong)}")


def listed(wrong: Mapping[str, list[str]]) -> str:
    """{"missing": [...], ...} in one line, a few names of each kind."""
    parts = []
    for kind, names in wrong.items():
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{kind} weights: {', '.join(sorted(names)[:4])}{more}")
    return "; ".join(parts)


def _needed_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights: Qwen2 has biases on q, k and v, Qwen3 has norms on q and k."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    wide, width = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (wide, hidden),
        "self_attn.k_proj.weight": (width, hidden),
        "self_attn.v_proj.weight": (width, hidden),
        "self_attn.o_proj.weight": (hidden, wide),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.model_type == "qwen2":
        for name, size in (("q", wide), ("k", width), ("v", width)):
            layer[f"self_attn.{name}_proj.bias"] = (size,)
    if config.model_type == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    needed = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        needed["lm_head.weight"] = (vocab, hidden)
    for index in range(config.num_hidden_layers):
        needed |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return needed
