"""Reading a checkpoint folder or hub repository."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paradec.core.checks import is_finite, short_repr
from paradec.models.tensor_parallel import distributed_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
FLOATS = ("float64", "float32", "bfloat16", "float16")
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""safetensors' names of dtypes -> torch's."""
INT8 = "paradec_int8"
"""`quant_method` in the config.json of a model with int8 weights (`paradec.models.int8`)."""
LFS = b"version https://git-lfs"
"""First bytes of a pointer file, which git without git-lfs writes instead of a large file."""
FRACTIONS = ("rope_theta", "rms_norm_eps", "mlp_ratio", "partial_rotary_factor", "routed_scaling_factor")
"""Positive fields of config.json that need not be integers."""
NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "attention_dropout": 0.0,
    "use_cache": False,
}
"""Fields of a configuration without effect on the maths."""
COUNTERS = ("position_ids", "num_batches_tracked")
"""Endings of the names of integer buffers in image models."""
MIN_PROGRESS_BYTES = 2**28
REACH_SECONDS = 5
"""Timeout of the hub's first answer."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: missing, corrupt, of an unknown format, or with unsupported maths."""


@contextmanager
def checkpoint_errors(prefix: str, *error_types: type[Exception]) -> Iterator[None]:
    """Convert errors of `error_types` (default: ValueError) to CheckpointError with the message "prefix: reason"."""
    error_types = error_types or (ValueError,)
    try:
        yield
    except CheckpointError:
        raise
    except error_types as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
        raise CheckpointError(f"{prefix}: {reason}") from error


def check_path(name: str, value: Any, allowed: str = "a folder or a hub repository id") -> None:
    """Raise ValueError unless `value` is a path or a text that is not empty."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name}={short_repr(value)} must be {allowed}")


def check_object(name: str, value: Any, file: str = "config.json") -> dict[str, Any]:
    """Return a JSON object. Raises CheckpointError for anything else."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {name}={short_repr(value)} must be an object")
    return value


class StoredTensor(NamedTuple):
    """Shape and dtype of a stored tensor, from the file's header."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name."""


def fetch(source: str, filename: str, revision: str | None) -> Path | None:
    """Local path of one file of a folder or hub repository; None if the file is missing. Raises CheckpointError unless
    `source` is a folder or a reachable repository."""
    if os.path.isdir(source):
        path = Path(source, filename)
        return path if path.is_file() else None
    if os.path.isfile(source):
        folder = os.path.dirname(source) or "."
        raise CheckpointError(f"{source!r} is a file, not a folder with a checkpoint; give its folder, {folder!r}")
    if os.path.exists(source) or source.startswith((".", "/", "~")):
        raise CheckpointError(f"{source!r} is not a folder with a checkpoint")
    from transformers.utils import cached_file

    if filename == "config.json" and not _can_reach(source, filename, revision):
        raise CheckpointError(f"{source!r} is not a folder here, and the hub cannot be reached")
    with checkpoint_errors(f"{source!r} is neither a folder here nor a reachable hub repository", OSError, ValueError):
        cached = cached_file(source, filename, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if cached is None else Path(cached)


def _can_reach(source: str, filename: str, revision: str | None) -> bool:
    """Whether the file is cached or the hub answers within `REACH_SECONDS` (downloads retry for half a minute)."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, get_session

    try:
        if isinstance(try_to_load_from_cache(source, filename, revision=revision), str):
            return True
    except HFValidationError:
        return True  # not a repository's name; the download raises that error without the network
    if constants.is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_SECONDS)
    except Exception:  # the HTTP client and its kinds of errors depend on the hub library's version
        return False
    return True


def read_json(source: str, filename: str, revision: str | None, required: bool = False) -> dict[str, Any]:
    """Read a file with a JSON object; {} if it is absent and not required. Raises CheckpointError for other content."""
    path = fetch(source, filename, revision)
    if path is None:
        if required:
            raise CheckpointError(f"{source!r} has no {filename}")
        return {}
    with checkpoint_errors(f"{filename} of {source!r} is not valid JSON", OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{filename} of {source!r} holds a {type(content).__name__}, not an object")
    return content


def read_positive(config: Mapping[str, Any], name: str) -> Any:
    """A positive integer from the config, or a positive number for `FRACTIONS`. Raises CheckpointError otherwise."""
    value = config.get(name)
    is_integer = name not in FRACTIONS
    types = int if is_integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not is_finite(value) or value <= 0:
        kind = "integer" if is_integer else "number"
        raise CheckpointError(f"config.json: {name}={short_repr(value)} must be a positive {kind}")
    return value


def read_flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    """True, False or None (null) from the config. Raises CheckpointError for anything else."""
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name}={short_repr(value)} must be true or false")
    return value


def require_fields(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise CheckpointError for a field that config.json does not have."""
    for name in names:
        if config.get(name) is None:
            raise CheckpointError(f"config.json has no {name!r}")


def check_supported(
    config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], file: str = "config.json", hint: str = ""
) -> None:
    """Raise CheckpointError for a field that changes the maths and has an unsupported value.

    file: name of the config in the message. hint: end of the message."""
    for name, allowed in supported.items():
        value = config.get(name, allowed[0])
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[allowed.index(value)], bool):
            raise CheckpointError(
                f"{file}: {name}={short_repr(value)} is not supported; supported: {', '.join(map(repr, allowed))}{hint}"
            )


def read_weight_headers(source: str, revision: str | None) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of the stored weights, from the files' headers alone. Weights on the hub are downloaded.
    Raises CheckpointError if there are no safetensors files, or for a wrong index or header."""
    single = fetch(source, WEIGHTS, revision)
    if single is not None:
        return dict(_read_header(single))
    if fetch(source, INDEX, revision) is None:
        raise CheckpointError(f"{source!r} has no model.safetensors or index of shards; pickled weights are not read")
    weight_map = read_json(source, INDEX, revision).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} of {source!r} has no 'weight_map'")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or os.path.basename(shard) != shard:
            raise CheckpointError(
                f"{INDEX} of {source!r}: {short_repr(name)} is in {short_repr(shard)}; expected a .safetensors file "
                "in the same folder"
            )
    files = sorted(set(weight_map.values()))
    if not os.path.isdir(source):  # download in parallel; `fetch` below reports missing files
        from transformers.utils.hub import cached_files

        with checkpoint_errors(f"the weights of {source!r} cannot be downloaded", OSError, ValueError):
            cached_files(source, files, revision=revision, _raise_exceptions_for_missing_entries=False)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in files:
        path = fetch(source, shard, revision)
        if path is None:
            raise CheckpointError(f"{source!r} has no {shard}, which its index names")
        shards[shard] = dict(_read_header(path))
    weights = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{shard} of {source!r} does not hold {name}, which its index expects there")
        weights[name] = shards[shard].pop(name)
    for shard, unlisted in shards.items():
        if unlisted:
            raise CheckpointError(f"{shard} of {source!r} holds {min(unlisted)}, which its index does not name")
    return weights


def read_tensors(source: str, names: Collection[str], revision: str | None) -> dict[str, Any]:
    """Read tensors by name; `read_weight_headers` must list the names. Raises CheckpointError for wrong files."""
    from safetensors import SafetensorError, safe_open

    single = fetch(source, WEIGHTS, revision)
    shards = {} if single is not None else read_json(source, INDEX, revision)["weight_map"]
    loaded: dict[str, Any] = {}
    for file in sorted({shards.get(name, WEIGHTS) for name in names}):
        with checkpoint_errors(f"{file} of {source!r} cannot be read", SafetensorError, OSError, ValueError):
            with safe_open(fetch(source, file, revision), framework="pt") as tensors:
                loaded |= {name: tensors.get_tensor(name) for name in names if shards.get(name, WEIGHTS) == file}
    return loaded


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    from safetensors import SafetensorError, safe_open

    where = f"the weights of {str(path.parent)!r} cannot be read: {path.name}"
    with path.open("rb") as start:
        if start.read(len(LFS)) == LFS:
            raise CheckpointError(f"{where} is a pointer of git-lfs, without the weights: run git lfs pull")
    with checkpoint_errors(where, SafetensorError, OSError, ValueError), safe_open(path, framework="pt") as file:
        for name in file.keys():
            tensor = file.get_slice(name)
            code = tensor.get_dtype()
            yield name, StoredTensor(tuple(tensor.get_shape()), DTYPES.get(code, code))


def check_dtypes(source: str, dtypes: Mapping[str, Any]) -> None:
    """Raise CheckpointError if weights are not floating-point numbers, such as the integers of a quantised file.

    source: name of the file in the message. dtypes: {name of a weight: torch's dtype or its name}."""
    dtype_names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    unsupported = [f"{name} is {dtype}" for name, dtype in sorted(dtype_names.items()) if dtype not in FLOATS]
    if unsupported:
        suffix = f" and {len(unsupported) - 4} more" if len(unsupported) > 4 else ""
        raise CheckpointError(
            f"the weights of {source!r} are not floating-point numbers: "
            f"{', '.join(unsupported[:4])}{suffix}; they must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
        )


def is_quantised(source: str, config: Mapping[str, Any]) -> bool:
    """Whether config.json has a `quantization_config`. Raises CheckpointError if transformers does not know it."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return False
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        is_known = isinstance(quantization, dict) and AutoHfQuantizer.supports_quant_method(quantization)
    except (TypeError, ValueError):
        is_known = False
    if not is_known:
        raise CheckpointError(
            f"config.json of {source!r}: quantization_config={short_repr(quantization)} has no quant_method "
            "that transformers knows"
        )
    return True


def is_int8(config: Mapping[str, Any]) -> bool:
    """Whether config.json states int8 weights of paradec's `save_pretrained`."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == INT8


def check_stored_dtypes(
    source: str, config: Mapping[str, Any], revision: str | None, unused_suffixes: tuple[str, ...] = ()
) -> None:
    """Apply `check_dtypes` to a checkpoint's weights. If config.json has a `quantization_config`, do nothing:
    transformers checks the weights.

    unused_suffixes: endings of the names of further tensors that are not checked."""
    if config.get("quantization_config") is None:
        headers = read_weight_headers(source, revision)
        dtypes = {
            name: header.dtype for name, header in headers.items() if not name.endswith((*COUNTERS, *unused_suffixes))
        }
        check_dtypes(source, dtypes)


def rename_weight(name: str, patterns: Mapping[str, str]) -> str:
    """The module's name for a weight of the checkpoint, by the first pattern that matches."""
    for pattern, replacement in patterns.items():
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def check_fit(
    expected: Mapping[str, Any],
    weights: Mapping[str, Any],
    source: str,
    target: str = "",
    optional: Collection[str] = (),
    unused: tuple[str, ...] = (),
) -> None:
    """Raise CheckpointError unless `weights` have the names and shapes of `expected`.

    source, target: names for the message: of the weights' file, and of the module or file that they must fit.
    optional: names that may be missing. unused: prefixes of names that may be unexpected."""
    problems = {
        "missing": [name for name in expected if name not in weights and name not in optional],
        "unexpected": [name for name in weights if name not in expected and not name.startswith(unused)],
        "mismatched": [
            f"{name} {list(tensor.shape)} instead of {list(expected[name].shape)}"
            for name, tensor in weights.items()
            if name in expected and tensor.shape != expected[name].shape
        ],
    }
    if any(problems.values()):
        raise CheckpointError(
            f"the weights of {source!r} do not fit{target and ' '}{target}: {format_problems(problems)}"
        )


def format_problems(problems: Mapping[str, list[str]]) -> str:
    """{"missing": [...], ...} as one line, with a few names of each kind."""
    parts = []
    for kind, names in problems.items():
        if names:
            suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{kind} weights: {', '.join(sorted(names)[:4])}{suffix}")
    return "; ".join(parts)


# ---- reading a module of transformers, for all loaders of text models ----------------------------------------------


def read_module(
    cls: Any,
    source: str,
    revision: str | None,
    *,
    gguf_file: str | None = None,
    state_dict: Mapping[str, Any] | None = None,
    computed: Sequence[str] = (),
    read_elsewhere: tuple[str, ...] = (),
    tp_plan: Any = None,
    **options: Any,
) -> Any:
    """Run `cls.from_pretrained`. No weight may be missing, unused or of another size.

    state_dict: weights by the class's names, which replace the files; transformers reads each with `weight[...]`.
    computed: endings of names of stored tensors that may be unused. read_elsewhere: prefixes of such names.
    tp_plan: as in `paradec.load`. options: arguments of `from_pretrained`; those that are None are not passed.
    Raises CheckpointError for weights that cannot be read or do not fit, and transformers' ImportError and ValueError
    for arguments."""
    from safetensors import SafetensorError

    path = Path(source) if os.path.isfile(source) else fetch(source, gguf_file or WEIGHTS, revision)
    weights_options: dict[str, Any] = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    if state_dict is not None:
        weights_options = {"state_dict": dict(state_dict)}
    options = {name: value for name, value in options.items() if value is not None} | weights_options
    stored_config: dict[str, Any] = {"quantization_config": getattr(options.get("config"), "quantization_config", None)}
    if is_int8(stored_config) and options.get("dtype") == "auto":  # "auto" would find the float32 of the scales
        options["dtype"] = stored_config["quantization_config"].get("dtype") or "auto"
    if tp_plan is not None:
        options["distributed_config"] = distributed_config(tp_plan, options["config"], source)
    error_types = (SafetensorError, OSError, LookupError, RuntimeError, AttributeError, TypeError)
    unreadable = checkpoint_errors(f"the weights of {source!r} cannot be read", *error_types)
    with unreadable, silence_loading(path):
        # `problems` reports all wrong sizes; transformers would raise for the first one
        location = source if state_dict is None else None
        module, loading_info = cls.from_pretrained(
            location, revision=revision, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    problems = {
        kind: [str(key[0] if isinstance(key, tuple) else key) for key in loading_info[f"{kind}_keys"]]
        for kind in ("missing", "unexpected", "mismatched")
    }
    problems["unexpected"] = [
        name
        for name in problems["unexpected"]
        if not name.endswith(tuple(computed)) and not name.startswith(read_elsewhere)
    ]
    if any(problems.values()):
        raise CheckpointError(f"the weights of {source!r} do not fit config.json: {format_problems(problems)}")
    return module


@contextmanager
def silence_loading(path: Path | None) -> Iterator[None]:
    """Hide transformers' table of wrong weights (`read_module` raises an error with their names), and the progress bar
    of small files. path: the weights' file, if known."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if path is not None and path.stat().st_size < MIN_PROGRESS_BYTES:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
