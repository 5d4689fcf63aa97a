"""Write a checkpoint folder, completely or not at all, in the format that `load` read or in transformers' format."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import LARGEST_INT64, check_int, short_repr
from paradec.models.checkpoint import (
    DTYPES,
    INDEX,
    CheckpointError,
    StoredTensor,
    check_dtypes,
    check_fit,
    check_path,
    checkpoint_errors,
    rename_weight,
)
from paradec.models.family import Family, read_end_ids

SAVED_CLASSES = ("ForCausalLM", "ForMaskedLM", "ForBlockDiffusion")
"""Endings of the names of transformers' classes that `wrap` accepts."""
CHECKPOINT_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|"
    r"tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|"
    r"merges\.txt|chat_template\.(jinja|json)|additional_chat_templates"
)
"""Names of a checkpoint's files. Files of an earlier checkpoint are removed, since loading would read them."""
FOREIGN_FILES = ("adapter_config.json", "model_index.json")
"""Files that mark the folder of an adapter or a pipeline."""
STAGING_PREFIX = ".saving-"
DTYPE_CODES = {getattr(torch, dtype): code for code, dtype in DTYPES.items() if hasattr(torch, dtype)}
"""safetensors' names of torch's dtypes."""
_replacing_files = threading.Lock()


@dataclass(frozen=True)
class PublishedCheckpoint:
    """The checkpoint that a module was loaded from, as far as saving needs it.

    source: the folder or hub repository. config: config.json. generation: generation_config.json, {} if missing.
    names: the module's names of weights -> the file's names (see `check_weights`)."""

    source: str
    family: Family
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    names: Mapping[str, str]


def save(model: Any, folder: str | os.PathLike[str], max_shard_size: int | str) -> None:
    """Implement `Model.save_pretrained`."""
    check_path("folder", folder, "the path of a folder")
    path = Path(os.fspath(folder))
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder={str(path)!r} is a file; give the path of a folder")
    for name in FOREIGN_FILES:
        if (path / name).exists():
            raise ValueError(f"folder={str(path)!r} holds {name}: it is the folder of an adapter or a pipeline")
    if not isinstance(max_shard_size, str):
        check_int("max_shard_size", max_shard_size, low=1, high=LARGEST_INT64)
    _split_shards({}, max_shard_size)  # raises ValueError for an invalid text
    if model.tokenizer is not None and not hasattr(model.tokenizer, "save_pretrained"):
        raise ValueError(f"tokenizer={short_repr(model.tokenizer)} of {model.facts.name} has no save_pretrained")
    source = getattr(getattr(model.module, "config", None), "_name_or_path", "")
    source = source if model.published is None else model.published.source
    # a device_map may leave weights on the disk, in the files that they were loaded from
    on_disk = "disk" in (getattr(model.module, "hf_device_map", None) or {}).values()
    if on_disk and path.is_dir() and os.path.realpath(path) == os.path.realpath(source):
        raise ValueError(f"folder={str(path)!r} holds the weights that the model still reads from disk; give another")
    from paradec.models.int8 import stored_config

    quantization = stored_config(model)
    if model.published is None and quantization is None:
        _save_wrapped(model, path, max_shard_size)
    else:
        _save_published(model, path, max_shard_size, quantization)


def _save_wrapped(model: Any, path: Path, max_shard_size: int | str) -> None:
    module, name = model.module, type(model.module).__name__
    if not type(module).__module__.startswith("transformers.") or not name.endswith(SAVED_CLASSES):
        raise ValueError(
            f"{model.facts.name} is not a text model from paradec.load, and {name} is not a causal or masked language "
            "model of transformers. Its format is unknown: save it with the code that it comes from"
        )
    with _staging_folder(path) as staging:
        module.save_pretrained(staging, max_shard_size=max_shard_size)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(staging)


def _save_published(
    model: Any, path: Path, max_shard_size: int | str, quantization: Mapping[str, Any] | None = None
) -> None:
    """Write the published or the int8 format. quantization: settings of int8 weights; None: no weights are int8."""
    published, module = model.published, model.module
    if quantization is None:
        state = published_weights(module, published)
    else:
        state = _int8_weights(module, {} if published is None else published.names)
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in module.state_dict().items()
    }
    sizes = {name: torch.empty_like(weight.assemble(empty.__getitem__)) for name, weight in state.items()}
    config, generation = _build_configs(model)
    if quantization is not None:
        config["quantization_config"] = quantization
    else:
        headers = {name: StoredTensor(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in sizes.items()}
        try:
            check_weights(str(path), headers, published.family.config(config), published.family)
        except ValueError as error:
            raise ValueError(f"{model.facts.name} no longer fits the format that it was loaded from: {error}") from None
    split = _split_shards(sizes, max_shard_size)
    with _staging_folder(path) as staging:
        for file, tensor_names in split.filename_to_tensors.items():
            write_safetensors(staging / file, {name: sizes[name] for name in tensor_names}, _make_reader(module, state))
        if split.is_sharded:
            _write_json(staging / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        if generation:
            _write_json(staging / "generation_config.json", generation)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(staging)
        # copy the code that config.json names; paradec does not run it
        if published is not None and "auto_map" in config and os.path.isdir(published.source):
            for code in Path(published.source).glob("*.py"):
                shutil.copyfile(code, staging / code.name)
        adapter_folder = None if published is None else published.family.draft_adapter
        if adapter_folder is not None and model.self_drafting.adapter is not None:
            model.self_drafting.adapter.save(staging / adapter_folder)
        _write_json(staging / "config.json", config)


# ---- config.json ----------------------------------------------------------------------------------------------------


def _build_configs(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build config.json and generation_config.json from the files that were read. Arguments of `load` may have changed
    the model's facts, so entries are replaced until a reader of these files and the tokenizer finds the same facts."""
    published, facts, tokenizer = model.published, model.facts, model.tokenizer
    if published is None:  # a causal model of transformers
        generation = json.loads(model.module.generation_config.to_json_string())
        return json.loads(model.module.config.to_json_string()), generation
    config, generation = dict(published.config), dict(published.generation)
    config.pop("quantization_config", None)  # that of the file that was read
    for name in ("torch_dtype", "dtype"):
        if name in config:
            config[name] = str(model.dtype).removeprefix("torch.")
    name = published.family.block_name
    if name is not None and facts.block_length is not None and config.get(name) != facts.block_length:
        config[name] = facts.block_length
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    id_sources = {
        "mask_token_id": (
            config,
            generation,
            tokenizer,
            {"mask_token_id": vocabulary.get(published.family.mask_token)},
        ),
        "pad_token_id": (config, tokenizer),
    }
    for name, id_places in id_sources.items():
        values = [p.get(name) if isinstance(p, Mapping) else getattr(p, name, None) for p in id_places]
        value_read = next((value for value in values if value is not None), None)
        if value_read != getattr(facts, name):
            config[name] = getattr(facts, name)
    end_ids = set(read_end_ids(config, generation, tokenizer, published.family))
    if end_ids != set(facts.eos_token_ids):
        config["eos_token_id"] = list(facts.eos_token_ids)
        generation.pop("eos_token_id", None)
    if isinstance(config.get("auto_map"), dict) and not os.path.isdir(published.source):
        config["auto_map"] = {
            name: f"{published.source}--{value}" if isinstance(value, str) and "--" not in value else value
            for name, value in config["auto_map"].items()
        }
    return config, generation


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- weights --------------------------------------------------------------------------------------------------------


GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"
"""Endings of the names of a module's stacked experts. Checkpoint files have one matrix per expert."""
EXPERT = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(\d+)\.")
STACKED = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate|up|down|gate_up)_proj(\.weight)?")


@dataclass(frozen=True)
class FileWeight:
    """One weight of a file, assembled from the module's weights.

    sources: names of the module's weights, whose rows are concatenated. index: selects a part of each; () is all."""

    sources: tuple[str, ...]
    index: tuple[Any, ...] = ()

    def assemble(self, get: Callable[[str], Tensor]) -> Tensor:
        """Build the file's weight. get: returns a weight of the module by name."""
        tensors = [get(name)[self.index] if self.index else get(name) for name in self.sources]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def file_weights(state: Mapping[str, Tensor], fused: Mapping[str, tuple[str, ...]] | None) -> dict[str, FileWeight]:
    """The weights of a module's checkpoint file by name. Fused weights and single experts, which the module lacks, have
    the file's names after `key_mapping`; all other weights have the module's names.
    state: the module's `state_dict`, of which only sizes are read. fused: as in `paradec.models.family.Family`."""
    weights: dict[str, FileWeight] = {}
    for name, tensor in state.items():
        if name.endswith(GATE_UP):
            experts, inner = tensor.shape[0], tensor.shape[1] // 2
            prefix = name.removesuffix("gate_up_proj")
            for index in range(experts):
                weights[f"{prefix}{index}.gate_proj.weight"] = FileWeight((name,), (index, slice(0, inner)))
                weights[f"{prefix}{index}.up_proj.weight"] = FileWeight((name,), (index, slice(inner, None)))
        elif name.endswith(DOWN):
            prefix = name.removesuffix("down_proj")
            for index in range(tensor.shape[0]):
                weights[f"{prefix}{index}.down_proj.weight"] = FileWeight((name,), (index,))
        elif (fused_weight := _find_fused(name, fused)) is not None:
            weights[fused_weight[0]] = FileWeight(fused_weight[1])
        else:
            weights[name] = FileWeight((name,))
    return weights


def _find_fused(module_name: str, fused: Mapping[str, tuple[str, ...]] | None) -> tuple[str, tuple[str, ...]] | None:
    """Name of the file's fused weight that contains `module_name`, and names of all weights in it; or None."""
    for name, parts in (fused or {}).items():
        for part in parts:
            if module_name.endswith(f".{part}"):
                prefix = module_name.removesuffix(part)
                return prefix + name, tuple(prefix + fused_part for fused_part in parts)
    return None


def check_weights(source: str, headers: Mapping[str, StoredTensor], config: Any, family: Family) -> dict[str, str]:
    """Compare the stored weights with those of a module of this config, before memory is allocated. Returns the
    checkpoint's name of each weight, by the module's name (stacked or split weights: the name after `key_mapping`).
    Raises CheckpointError for weights that do not fit; the message names them.

    headers: by the checkpoint's names. config: transformers' configuration."""
    check_dtypes(source, {name: header.dtype for name, header in headers.items()})
    expected = _needed_weights(source, headers, config, family)
    names = {rename_weight(name, family.key_mapping or {}): name for name in headers}
    check_fit(
        {names.get(module_name, module_name): weight for module_name, weight in expected.items()},
        headers,
        source,
        "config.json",
    )
    return names


def _needed_weights(source: str, stored_names: Collection[str], config: Any, family: Family) -> dict[str, Tensor]:
    """The weights that a family's files must have, as meta tensors, named as by `file_weights`. Raises CheckpointError
    if config.json asks for more layers than there are stored weights, or for sizes that are too large."""
    import transformers

    where, layers = f"the weights of {source!r} do not fit config.json:", config.num_hidden_layers
    if layers > len(stored_names):
        raise CheckpointError(f"{where} {layers} layers, but only {len(stored_names)} weights")
    with checkpoint_errors(f"{where} its sizes are too large", RuntimeError), torch.device("meta"):
        module = getattr(transformers, family.module)(copy.deepcopy(config))
    state, tied = module.state_dict(), getattr(module, "all_tied_weights_keys", None) or {}
    if family.experts:
        _check_experts(source, stored_names, state)
    parts = file_weights({name: tensor for name, tensor in state.items() if name not in tied}, family.fused)
    return {name: part.assemble(state.__getitem__) for name, part in parts.items()}


def _check_experts(source: str, stored_names: Collection[str], state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the number of experts differs from the module's, or weights have an unsupported form."""
    expert_indices: dict[str, set[int]] = {}
    for name in stored_names:
        if "language_model." in name or name.startswith("model.lm_head."):
            raise CheckpointError(
                f"the weights of {source!r} are those of a model with pictures ({name}), which load does not read"
            )
        if stacked := STACKED.fullmatch(name):
            raise CheckpointError(
                f"the weights of {source!r} are in the training form, with all experts of a layer in "
                f"{stacked.group()}; load reads the published form, with a matrix for each expert"
            )
        if expert := EXPERT.match(name):
            expert_indices.setdefault(expert.group(1), set()).add(int(expert.group(2)))
    for name, tensor in state.items():
        indices = expert_indices.get(name.removesuffix(DOWN))
        if indices and (len(indices), max(indices)) != (len(tensor), len(tensor) - 1):
            layer = name.removesuffix(DOWN).rpartition(".")[2]
            raise CheckpointError(
                f"the weights of {source!r} do not fit config.json: {len(tensor)} experts, but layer {layer} holds "
                f"{len(indices)}" + (f" (up to {max(indices)})" if len(indices) <= max(indices) else "")
            )


def published_weights(module: nn.Module, published: PublishedCheckpoint) -> dict[str, FileWeight]:
    """The weights of the published file, by its names. A weight that is an alias of another is left out unless the file
    has it. Raises ValueError for quantised weights."""
    state, names = module.state_dict(), published.names
    parts = file_weights(state, published.family.fused)
    file_sources = {source for name in names if name in parts for source in parts[name].sources}
    storage = {_storage_key(state[source]) for source in file_sources}
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    weights = {}
    for name, part in parts.items():
        for source in part.sources:
            if type(state[source]) is not Tensor:
                raise ValueError(f"{source} is quantised ({type(state[source]).__name__}); save before quantising")
        tensor = state[part.sources[0]]
        is_offloaded = tensor.device.type == "meta"
        is_alias = tied.get(name) in names if is_offloaded else _storage_key(tensor) in storage
        if name in names or not is_alias:
            weights[names.get(name, name)] = part
    return weights


def _int8_weights(module: nn.Module, names: Mapping[str, str]) -> dict[str, FileWeight]:
    """The weights of an int8 file by name: stacked or split weights as in the module, others as published (`names`)."""
    tied, weights = getattr(module, "all_tied_weights_keys", None) or {}, {}
    for name in module.state_dict():
        if name not in tied:
            published = names.get(name.removesuffix("scale") + "weight", name) if name.endswith(".scale") else name
            published = names.get(name, published.removesuffix("weight") + "scale" if published != name else name)
            weights[published] = FileWeight((name,))
    return weights


def _storage_key(tensor: Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.shape


def _make_reader(module: nn.Module, state: Mapping[str, FileWeight]) -> Callable[[str], Tensor]:
    module_state = module.state_dict()

    @lru_cache(maxsize=1)  # consecutive calls read parts of the same stacked weight
    def read_tensor(name: str) -> Tensor:
        if module_state[name].device.type != "meta":
            return module_state[name].detach().cpu()
        from accelerate.utils import align_module_device  # accelerate's hooks load the tensor

        parent, _, attribute = name.rpartition(".")
        part = module.get_submodule(parent)
        with align_module_device(part, torch.device("cpu")):
            return getattr(part, attribute).detach().clone()

    return lambda name: state[name].assemble(read_tensor)


def _split_shards(weights: Mapping[str, Tensor], max_shard_size: int | str) -> Any:
    from huggingface_hub import split_torch_state_dict_into_shards

    try:
        return split_torch_state_dict_into_shards(
            dict(weights), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise ValueError(
            f"max_shard_size={short_repr(max_shard_size)} must be bytes or a text like '5GB': {error}"
        ) from None


def write_safetensors(path: Path, sizes: Mapping[str, Tensor], get_tensor: Callable[[str], Tensor]) -> None:
    """Write the same bytes as `safetensors.torch.save_file(..., metadata={"format": "pt"})`, with one tensor in memory
    at a time.

    sizes: meta tensors by name. get_tensor: returns the tensor of a name, on the CPU; called once for each name.
    Raises ValueError if a tensor's size differs from `sizes`, OSError if the file cannot be written."""
    names = sorted(sizes, key=lambda name: (-sizes[name].itemsize, name))  # aligns every tensor
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        size = sizes[name]
        begin, end = end, end + size.nbytes
        header[name] = {"dtype": DTYPE_CODES[size.dtype], "shape": list(size.shape), "data_offsets": [begin, end]}
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name in names:
            tensor = get_tensor(name)
            if (tensor.shape, tensor.dtype) != (sizes[name].shape, sizes[name].dtype):
                raise ValueError(
                    f"{name} was {list(sizes[name].shape)} of {sizes[name].dtype} and became {list(tensor.shape)} of "
                    f"{tensor.dtype} while the model was saved"
                )
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def plan_writes(model: Any, state_dict: Any) -> list[tuple[Tensor, Tensor]]:
    """Check an update of weights, and return (target, value) pairs. Raises the errors of `Model.update_weights`."""
    name = model.facts.name
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict={short_repr(state_dict)} must be a mapping of names to tensors")
    state = model.module.state_dict()
    known_weights = {module_name: FileWeight((module_name,)) for module_name in state}
    if model.published is not None:
        known_weights |= published_weights(model.module, model.published)
    writes = list[tuple[Tensor, Tensor]]()
    for key, value in state_dict.items():
        if key not in known_weights:
            matches = get_close_matches(str(key), known_weights, 1)
            hint = f" (did you mean {matches[0]!r}?)" if matches else ""
            raise ValueError(f"state_dict has {key!r}, which is not a weight of {name}{hint}")
        if not isinstance(value, Tensor):
            raise TypeError(f"state_dict[{key!r}]={short_repr(value)} must be a tensor")
        weight = known_weights[key]
        parts = [state[source] for source in weight.sources]
        if any(type(part) is not Tensor or part.is_meta or part.dtype == torch.int8 for part in parts):
            raise ValueError(f"{key} of {name} is offloaded or quantised, and cannot be replaced: load it again")
        targets = [state[source][weight.index] if weight.index else state[source] for source in weight.sources]
        first_target = targets[0]
        sizes = [len(target) for target in targets] if first_target.ndim else []
        shape = [sum(sizes), *first_target.shape[1:]] if sizes else []
        if list(value.shape) != shape or value.is_floating_point() != first_target.is_floating_point():
            raise ValueError(
                f"state_dict[{key!r}] is {value.dtype} {list(value.shape)}; this weight of {name} "
                f"has {first_target.dtype} {shape}"
            )
        writes += zip(targets, value.detach().split(sizes) if sizes else [value.detach()], strict=True)
    return writes


# ---- files ----------------------------------------------------------------------------------------------------------


@contextmanager
def _staging_folder(folder: Path) -> Iterator[Path]:
    """Context with an empty folder inside `folder`. At its end, the files in it replace the old checkpoint by renames.

    An error leaves `folder` unchanged. The old config.json is moved out first, the new one in last. A process that is
    killed in between thus leaves no loadable mixture of old and new, and all old files are in the staging folder."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder))
    new_files, old_files = staging / "new", staging / "old"
    try:
        new_files.mkdir()
        old_files.mkdir()
        yield new_files
        for path in new_files.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        with _replacing_files:
            _replace_files(folder, new_files, old_files)
    except BaseException:
        if not old_files.is_dir() or not any(old_files.iterdir()):
            shutil.rmtree(staging, ignore_errors=True)
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
        raise
    shutil.rmtree(staging, ignore_errors=True)


def _replace_files(folder: Path, new_files: Path, old_files: Path) -> None:
    """Move the old checkpoint's files to `old_files`, then the new ones in. On an error, move all back."""
    incoming = sorted((path.name for path in new_files.iterdir()), key=lambda name: (name == "config.json", name))
    names = [path.name for path in folder.iterdir()]
    outgoing = [name for name in names if name in incoming or CHECKPOINT_FILES.fullmatch(name)]
    try:
        for name in sorted(outgoing, key=lambda name: (name != "config.json", name)):
            os.replace(folder / name, old_files / name)
        for name in incoming:
            os.replace(new_files / name, folder / name)
    except BaseException:
        for name in reversed(incoming):
            if not (new_files / name).exists() and (folder / name).exists():
                os.replace(folder / name, new_files / name)
        for name in sorted((path.name for path in old_files.iterdir()), key=lambda name: (name == "config.json", name)):
            os.replace(old_files / name, folder / name)
        raise
