"""`load` reads checkpoints in their published formats; `wrap` takes a transformers module that is already in memory."""

from __future__ import annotations

import importlib.resources
import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paradec.checks import check_int, shown
from paradec.models.adapter import Model
from paradec.models.checkpoint import (
    CheckpointError,
    check_weights,
    fetch,
    listed,
    read_json,
    stored_shapes,
    token_id,
)
from paradec.models.facts import ModelFacts

PACKAGED = "tiny-llada"
DEFAULT_NEW_TOKENS = 128
"""Answer length where neither the request nor generation_config.json names one."""
LLADA_DEFAULT_BLOCK = 32
"""Block length of LLaDA requests that name none."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PROGRESS_BAR_FROM = 2**28
"""Bytes of weights from which loading shows a progress bar."""
CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
"""How transformers ends the names of its causal language models."""
TURN_ENDS = ("<|eot_id|>", "<|im_end|>")
"""Tokens that end a turn; looked up in the checkpoint's tokenizer."""


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    tp_plan: Any = None,
    quantization_config: Any = None,
    revision: str | None = None,
    mask_token_id: int | None = None,
) -> Model:
    """Load a masked diffusion language model from its published file format.

    LLaDA checkpoints (`model_type` "llada") run on transformers' `LlamaForCausalLM`, Dream checkpoints ("Dream") on
    `Qwen2ForCausalLM`, both without a causal mask. Weights must be safetensors (one file or sharded); remote code is
    never executed.

    Args:
        source: a folder, a hub repository id, or None for the small model inside the package.
        dtype: parameters' dtype (a torch dtype or its name); None takes the checkpoint's.
        device: where to put the model; None is the CPU, or what `device_map`/`tp_plan` say.
        device_map, tp_plan, quantization_config, revision: as in transformers' `from_pretrained`.
        attn_implementation: "sdpa" or "eager".
        mask_token_id: overrides the checkpoint's; needed where it names none.

    Raises:
        CheckpointError (a ValueError): not a checkpoint of these formats, corrupt or truncated files, missing or
            unexpected weights, a configuration whose maths is not supported, no mask id.
        ValueError: an argument out of its range.
    """
    if source is None:
        packaged = importlib.resources.files("paradec") / "assets" / PACKAGED
        with importlib.resources.as_file(packaged) as folder:
            return load(
                folder,
                dtype=dtype,
                device=device,
                device_map=device_map,
                attn_implementation=attn_implementation,
                tp_plan=tp_plan,
                quantization_config=quantization_config,
                mask_token_id=mask_token_id,
            )
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise ValueError(f"source={shown(source)} must be a folder or a hub repository id")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"revision={shown(revision)} must be a text: a branch, tag or commit of a hub repository")
    check_int("mask_token_id", mask_token_id, low=0, none=True)
    dtype = _dtype(dtype)
    device = _device(device)
    if device is not None and (device_map is not None or tp_plan is not None):
        raise ValueError(f"device={device!s} goes with neither device_map nor tp_plan; give one of them")
    implementation = _implementation(attn_implementation)
    source = os.fspath(source)
    config = read_json(source, "config.json", revision, required=True)
    model_type = config.get("model_type")
    if model_type == "llada":
        from paradec.models.llada import KEY_MAPPING, llama_config

        hf_config, key_mapping, prediction = llama_config(config), KEY_MAPPING, "same"
    elif model_type == "Dream":
        from paradec.models.dream import qwen2_config

        hf_config, key_mapping, prediction = qwen2_config(config), None, "shifted"
    else:
        raise CheckpointError(
            f"{source!r} has model_type={shown(model_type)}; load reads 'llada' and 'Dream'. Load another model "
            "with transformers and give it to paradec.wrap"
        )
    if fetch(source, "adapter_config.json", revision) is not None:
        raise CheckpointError(f"{source!r} holds an adapter_config.json; merge the adapter into its base model first")
    check_weights(source, stored_shapes(source, revision), hf_config, key_mapping or {})
    generation = read_json(source, "generation_config.json", revision)
    tokenizer = _tokenizer(source, model_type, revision)
    facts = _facts(source, config, generation, tokenizer, hf_config, prediction, mask_token_id)

    module = _pretrained(
        source,
        hf_config,
        key_mapping,
        prediction,
        config,
        dtype=dtype,
        device_map=device_map,
        attn_implementation=implementation,
        tp_plan=tp_plan,
        quantization_config=quantization_config,
        revision=revision,
    )
    if device is not None:
        module = module.to(device)
    default_new = generation.get("max_new_tokens")
    if isinstance(default_new, bool) or not isinstance(default_new, int) or default_new < 1:
        default_new = DEFAULT_NEW_TOKENS
    return Model(
        module,
        facts,
        kind="decoder",
        tokenizer=tokenizer,
        default_max_new_tokens=default_new,
        default_block_length=LLADA_DEFAULT_BLOCK if model_type == "llada" else None,
    )


def _pretrained(
    source: str,
    hf_config: Any,
    key_mapping: dict[str, str] | None,
    prediction: str,
    config: dict[str, Any],
    revision: str | None,
    **options: Any,
) -> nn.Module:
    """Load the weights, strictly."""
    from safetensors import SafetensorError
    from transformers import GenerationConfig, LlamaForCausalLM, Qwen2ForCausalLM
    from transformers.utils import logging

    cls = LlamaForCausalLM if prediction == "same" else Qwen2ForCausalLM
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # its table of keys is replaced by the error below
    weights = fetch(source, "model.safetensors", revision)
    if weights is not None and weights.stat().st_size < PROGRESS_BAR_FROM:
        logging.disable_progress_bar()
    try:
        module, info = cls.from_pretrained(
            source,
            config=hf_config,
            key_mapping=key_mapping,
            use_safetensors=True,
            generation_config=GenerationConfig(),  # read above; the file's own may hold anything
            output_loading_info=True,
            revision=revision,
            # strict below: sizes that differ are reported by name instead of raised by the first
            ignore_mismatched_sizes=True,
            **{key: value for key, value in options.items() if value is not None},
        )
    except (SafetensorError, OSError, KeyError, RuntimeError, AttributeError, TypeError, IndexError) as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CheckpointError(f"the weights of {source!r} cannot be read: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    problems = {
        kind: [str(key[0] if isinstance(key, tuple) else key) for key in info[f"{kind}_keys"]]
        for kind in ("missing", "unexpected", "mismatched")
    }
    if any(problems.values()):
        raise CheckpointError(f"the weights of {source!r} do not fit config.json: {listed(problems)}")
    half = module.dtype in (torch.bfloat16, torch.float16)
    if half and prediction == "same" and config.get("rope_full_precision", True):
        module.model.rotary_emb = _Float32Angles(module.model.rotary_emb)
    return module.eval()


class _Float32Angles(nn.Module):
    """Rotary angles in float32 for a half-precision LLaDA (`rope_full_precision`): the products with q and k are then
    float32 too, and the attention function casts them back."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x.new_empty((), dtype=torch.float32), position_ids=position_ids)


def _facts(
    source: str,
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: Any,
    hf_config: Any,
    prediction: str,
    mask_token_id: int | None,
) -> ModelFacts:
    """Ids from the checkpoint's own files: config.json first, then generation_config.json, then the tokenizer."""
    vocab = hf_config.vocab_size
    stated = (mask_token_id, config.get("mask_token_id"), generation.get("mask_token_id"))
    mask = next((value for value in stated if value is not None), getattr(tokenizer, "mask_token_id", None))
    if mask is None:
        raise CheckpointError(f"config.json of {source!r} has no 'mask_token_id'; give load(..., mask_token_id=...)")
    ends: list[int] = []
    for data in (config, generation):
        stated = data.get("eos_token_id")
        ends += stated if isinstance(stated, list) else [] if stated is None else [stated]
    if tokenizer is not None:
        known = tokenizer.get_vocab()
        ends += [known[token] for token in TURN_ENDS if token in known]
    pad = config.get("pad_token_id")
    for name, value in (("mask_token_id", mask), ("pad_token_id", pad), *(("eos_token_id", end) for end in ends)):
        token_id(name, value, vocab)
    try:
        return ModelFacts(
            vocab_size=vocab,
            mask_token_id=mask,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            pad_token_id=pad,
            max_length=hf_config.max_position_embeddings,
            prediction=prediction,
            name=os.path.basename(source.rstrip("/")) or source,
        )
    except ValueError as error:
        raise CheckpointError(f"{source!r}: {error}") from error


def _tokenizer(source: str, model_type: str, revision: str | None) -> Any:
    """The checkpoint's tokenizer, or None when it ships none. Dream's own class is remote code over Qwen2's files."""
    if not any(fetch(source, name, revision) for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    has_json = fetch(source, "tokenizer.json", revision) is not None
    cls = PreTrainedTokenizerFast if has_json else Qwen2Tokenizer if model_type == "Dream" else None
    if cls is None:
        raise CheckpointError(f"{source!r} has no tokenizer.json")
    try:
        return cls.from_pretrained(source, revision=revision)
    except Exception as error:  # the tokenizers library raises bare Exception for a corrupt file
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"the tokenizer of {source!r} cannot be read: {reason}") from error


def wrap(
    module: nn.Module,
    *,
    mask_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    prediction: str | None = None,
    topology: str | None = None,
    block_length: int | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    attn_implementation: str = "sdpa",
) -> Model:
    """Adapt a module in memory: a transformers masked or causal language model, or any module of ids -> logits.

    A masked LM (BERT-like) predicts in place and sees both ways, so only its mask id is asked for. A transformers
    causal LM must be told its `prediction` and `topology`; unless the topology is "causal", its attention function is
    replaced by one without a causal mask until `Model.unwrap()`. Any other module is called with ids alone, without
    padding and without a key/value store.

    Args:
        mask_token_id: the undecided token; read from the tokenizer when left out; not needed for topology="causal".
        eos_token_id: ids that end an answer; read from the tokenizer when left out.
        prediction: "same" (logits row i predicts token i) or "shifted" (row i - 1 does).
        topology: "bidirectional", "block_causal" (with `block_length`) or "causal".
        max_length: positions the model can take; read from its config when left out.

    Raises:
        ValueError: a fact that is missing, by name, or out of its range. TypeError: not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    implementation = _implementation(attn_implementation)
    kind = _kind(module)
    if kind == "encoder":
        prediction, topology = prediction or "same", topology or "bidirectional"
        if (prediction, topology) != ("same", "bidirectional"):
            raise ValueError(
                f"prediction={prediction!r}, topology={topology!r} do not fit the masked language model "
                f"{type(module).__name__}; it predicts in place ('same') and is 'bidirectional'"
            )
    for name, value in (("prediction", prediction), ("topology", topology)):
        if value is None:
            allowed = "'same' or 'shifted'" if name == "prediction" else "'bidirectional', 'block_causal' or 'causal'"
            raise ValueError(f"{name} is needed to wrap {type(module).__name__}: {allowed}")
    if mask_token_id is None and tokenizer is not None:
        mask_token_id = tokenizer.mask_token_id
    if mask_token_id is None and topology != "causal":
        raise ValueError(f"mask_token_id is needed to wrap {type(module).__name__}, or a tokenizer that has one")
    if eos_token_id is None and tokenizer is not None:
        eos_token_id = tokenizer.eos_token_id
    config = getattr(module, "config", None)
    _refuse_unfit(module, config, kind, topology)
    vocab = getattr(config, "vocab_size", None)
    if vocab is None:
        raise ValueError(f"{type(module).__name__} has no config.vocab_size; give the module a config with one")
    facts = ModelFacts(
        vocab_size=vocab,
        mask_token_id=mask_token_id,
        eos_token_ids=_ends(eos_token_id),
        pad_token_id=pad_token_id,
        max_length=_max_length(module, config, kind) if max_length is None else max_length,
        prediction=prediction,
        topology=topology,
        block_length=block_length,
        name=type(module).__name__,
    )
    before = getattr(config, "_attn_implementation", None)
    model = Model(module, facts, kind=kind, tokenizer=tokenizer)
    training = [part for part in module.modules() if part.training]
    if training:  # dropout would make every evaluation another one
        module.eval()
        model._undo.append(lambda: [setattr(part, "training", True) for part in training])
    if kind == "decoder" and topology != "causal":
        module.set_attn_implementation(implementation)
        model._undo.append(lambda: module.set_attn_implementation(before))
    return model


def _ends(eos_token_id: Any) -> tuple[Any, ...]:
    """End ids as a tuple; whether they are ids is for `ModelFacts` to check."""
    if eos_token_id is None:
        return ()
    if isinstance(eos_token_id, Sequence) and not isinstance(eos_token_id, str):
        return tuple(eos_token_id)
    return (eos_token_id,)


def _refuse_unfit(module: nn.Module, config: Any, kind: str, topology: str | None) -> None:
    """Raise ValueError for a transformers module that would compute something else than was asked for."""
    name = type(module).__name__
    if _is_transformers(module) and module.base_model is module:
        raise ValueError(f"module {name} has no language-model head over its base model")
    if getattr(config, "return_dict", True) is False:
        raise ValueError(f"config.return_dict=False of {name} is not supported; set it to True")
    if kind == "encoder" and getattr(config, "is_decoder", False):
        raise ValueError(f"config.is_decoder=True makes {name} causal; a masked language model needs False")
    if kind == "opaque" and topology != "causal" and _is_transformers(module) and name.endswith(CAUSAL_HEADS):
        raise ValueError(f"topology={topology!r} is not available for {name}: its causal mask cannot be taken off")
    if kind == "decoder" and topology != "causal":
        odd = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
        fields = {"layer_types": odd or None, "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None)}
        if getattr(config, "layer_types", None) is None:
            fields["sliding_window"] = getattr(config, "sliding_window", None)
        if getattr(module, "_is_stateful", False):
            fields["model_type"] = config.model_type
        for field, value in fields.items():
            if value is not None:
                raise ValueError(
                    f"config.{field}={shown(value)} of {name} is not available with topology={topology!r}; only plain "
                    "attention runs without its causal mask"
                )


def _max_length(module: nn.Module, config: Any, kind: str) -> int | None:
    """Positions that the config allows. RoBERTa and kin count from padding_idx + 1, inside a table of that size."""
    length = getattr(config, "max_position_embeddings", None)
    if kind == "encoder" and isinstance(length, int):
        table = getattr(getattr(module.base_model, "embeddings", None), "position_embeddings", None)
        first = getattr(table, "padding_idx", None)
        length -= 0 if first is None else first + 1
    return length


def _kind(module: nn.Module) -> str:
    if not _is_transformers(module):
        return "opaque"
    name, takes = type(module).__name__, inspect.signature(module.forward).parameters
    if name.endswith("ForMaskedLM") and "attention_mask" in takes:
        return "encoder"
    if name.endswith("ForCausalLM") and getattr(module, "_supports_attention_backend", False):
        return "decoder"
    return "opaque"


def _is_transformers(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and type(module).__module__.startswith("transformers.")


def _implementation(name: str) -> str:
    """Raises ValueError: no attention function of that name without a causal mask."""
    from paradec.models import attention

    return attention.implementation(name)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """Raises ValueError: not a floating dtype."""
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)} must be one of 'float32', 'bfloat16', 'float16', 'float64', 'auto'")
    return found


def _device(device: str | torch.device | None) -> torch.device | None:
    """Raises ValueError: no such device here."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"device={shown(device)} is not available here: {reason}") from error
    if found.type == "meta":
        raise ValueError(f"device={shown(device)} holds no numbers; give a device that computes, e.g. 'cpu'")
    return found
