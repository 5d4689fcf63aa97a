"""`wrap`: a model from a module that is already in memory."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paradec import attention
from paradec.core.checks import check_type, short_repr
from paradec.core.facts import ModelFacts
from paradec.models.adapter import Encoder, Opaque
from paradec.models.base import Model
from paradec.models.cache_argument import cache_argument
from paradec.models.decoder import Decoder
from paradec.models.family import tokenizer_size
from paradec.models.tensor_parallel import join_ranks
from paradec.models.text import diffusion_gemma
from paradec.models.visibility import special_attention

CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of transformers' causal language models."""
NOT_CAUSAL = {"cpmant": "its prompt sees in both directions", "xlm": "it predicts at a mask that its generate appends"}
"""`model_type` of classes with causal names -> why they are not causal."""
DECODER_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "use_cache")
"""Arguments of a `Decoder`'s module besides a store."""


def wrap(
    module: nn.Module,
    *,
    mask_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    prediction: str | None = None,
    topology: str | None = None,
    block_length: int | None = None,
    block_align: str = "absolute",
    tokenizer: Any = None,
    max_length: int | None = None,
    attn_implementation: str = "sdpa",
) -> Model:
    """Adapt a module in memory: a transformers masked or causal language model, or any module that maps ids to logits.

    A masked language model (BERT-like) needs only its mask id. A transformers causal language model is decoded as a
    causal model if no mask id is given and its tokenizer has none; end and padding ids are then those of the module's
    `generate`. With a mask id, `prediction` and `topology` are required; any topology other than "causal" removes the
    causal mask. A custom class is treated as the transformers class that it extends. Any other module is called with
    ids only, without padding or a store. The module is put into evaluation mode. Until `Model.unwrap()`, it has the
    attention function that the model needs.

    Args:
        mask_token_id: the id of undecided tokens; by default the tokenizer's; not needed for topology="causal".
        eos_token_id: ids that end an answer; by default the tokenizer's.
        prediction: "same" (logits row i predicts token i) or "shifted" (row i - 1 does; a causal LM's default).
        topology: "bidirectional", "block_causal" (with `block_length`), "causal", or "causal_context" (with
            `block_length` and `block_align="prompt"`). A custom module gets no mask; it must implement the topology.
        block_align: "absolute": blocks begin at position 0. "prompt": the prompt is one block, and blocks begin at its
            end (D2F); only for transformers' causal language models.
        max_length: number of positions that the model accepts; by default the config's.

    Raises:
        ValueError: an argument that is missing or out of its range (the message names it). TypeError: not a module."""
    check_type("module", module, nn.Module)
    if (base := _transformers_class(module)) is not None and base.__name__ == diffusion_gemma.CLASS:
        mask_options = {"mask_token_id": mask_token_id, "prediction": prediction, "topology": topology}
        for argument, value in {**mask_options, "block_length": block_length}.items():
            if value is not None:
                raise ValueError(
                    f"{argument}={short_repr(value)} has no meaning for {diffusion_gemma.CLASS}: leave it out"
                )
        model = diffusion_gemma.adapt_module(
            module,
            tokenizer,
            name=diffusion_gemma.CLASS,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            max_length=max_length,
        )
        return join_ranks(model)
    registered = registered_attention(attn_implementation)
    name, adapter = type(module).__name__, _select_adapter(module)
    if topology is None and _is_causal_lm(module) and _is_plain_causal(module, prediction, mask_token_id, tokenizer):
        topology = "causal"
        module_ids = generation_ids(module, tokenizer)
        eos_token_id = module_ids[0] if eos_token_id is None else eos_token_id
        pad_token_id = module_ids[1] if pad_token_id is None else pad_token_id
    prediction, topology = _resolve_conventions(module, adapter, prediction, topology)
    if mask_token_id is None and tokenizer is not None and topology != "causal":
        mask_token_id = tokenizer.mask_token_id
    if mask_token_id is None and topology != "causal":
        raise ValueError(f"mask_token_id is needed to wrap {name}, or a tokenizer that has one")
    if eos_token_id is None and tokenizer is not None:
        eos_token_id = tokenizer.eos_token_id
    config: Any = getattr(module, "config", None)
    _check_module(module, config, adapter, topology)
    vocab = getattr(config, "vocab_size", None)
    if vocab is None:
        raise ValueError(f"{name} has no config.vocab_size; give the module a config with one")
    facts = ModelFacts(
        vocab_size=vocab,
        mask_token_id=mask_token_id,
        eos_token_ids=_end_ids(eos_token_id),
        pad_token_id=pad_token_id,
        max_length=_max_length(module, config, adapter) if max_length is None else max_length,
        prediction=prediction,
        topology=topology,
        block_length=block_length,
        block_align=block_align,
        name=name,
        tokenizer_size=tokenizer_size(tokenizer),
    )
    if adapter is not Decoder and facts.prompt_aligned:
        raise ValueError(f"block_align='prompt' does not work with {name}, whose calls do not mark a prompt's end")
    attention_method = default_attention(attn_implementation, name, topology if adapter is Decoder else None)
    current_attention: str | None = None
    if adapter is Decoder and topology != "causal":
        current_attention = module.get_correct_attn_implementation(registered)  # type: ignore[operator]
    elif adapter is Decoder and config._attn_implementation.startswith("paradec_"):  # from `load`
        current_attention = "sdpa"
    _check_experts(module, config)
    attention_options = {"default_attention": attention_method, "attn_implementation": current_attention}
    return join_ranks(adapter(module, facts, tokenizer=tokenizer, **attention_options))


def generation_ids(module: Any, tokenizer: Any = None) -> tuple[tuple[int, ...], int | None]:
    """The end ids and the padding id of a module's `generate`, each from the first of generation config, config and
    tokenizer that states it."""
    configs = (getattr(module, "generation_config", None), getattr(module, "config", None), tokenizer)
    ids = {}
    for name in ("eos_token_id", "pad_token_id"):
        values = (getattr(config, name, None) for config in configs)
        ids[name] = next((value for value in values if value is not None), None)
    pad = ids["pad_token_id"]
    return _end_ids(ids["eos_token_id"]), pad if isinstance(pad, int) and pad >= 0 else None


def _select_adapter(module: nn.Module) -> type[Model]:
    base = _transformers_class(module)
    if base is None:
        return Opaque
    parameters = inspect.signature(module.forward).parameters
    accepts_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if base.__name__.endswith("ForMaskedLM") and "attention_mask" in parameters:
        return Encoder
    has_backend = _is_causal_lm(module) and getattr(module, "_supports_attention_backend", False)
    cache = cache_argument(module)
    if has_backend and (
        accepts_kwargs or cache is not None and all(name in parameters for name in (*DECODER_ARGUMENTS, cache))
    ):
        return Decoder
    return Opaque


def _transformers_class(module: nn.Module) -> type | None:
    """The transformers class that a module instantiates or extends; None for other modules, such as remote code."""
    from transformers import PreTrainedModel

    for cls in type(module).__mro__:
        is_abstract = cls.__name__.endswith("PreTrainedModel") or not issubclass(cls, PreTrainedModel)
        if cls.__module__.startswith("transformers.") and not is_abstract:
            return cls
    return None


def _is_causal_lm(module: nn.Module) -> bool:
    base = _transformers_class(module)
    return base is not None and base.__name__.endswith(CAUSAL_HEADS)


def _is_plain_causal(module: Any, prediction: Any, mask_token_id: Any, tokenizer: Any) -> bool:
    """Whether nothing indicates that a causal language model was trained on masks or runs without a causal mask."""
    values = (prediction, mask_token_id, getattr(tokenizer, "mask_token_id", None))
    config_mask = getattr(module.config, "mask_token_id", None)
    has_no_masks = all(value is None for value in (*values, config_mask))
    return has_no_masks and getattr(module.config, "is_causal", True) is not False


def _resolve_conventions(
    module: nn.Module, adapter: type[Model], prediction: str | None, topology: str | None
) -> tuple[str, str]:
    """Prediction and topology, by default those of the module's kind. Raises ValueError for wrong or missing ones."""
    name = type(module).__name__
    if topology == "causal" and prediction is None and _is_causal_lm(module):
        prediction = "shifted"
    if adapter is Encoder:
        prediction, topology = prediction or "same", topology or "bidirectional"
        if (prediction, topology) != ("same", "bidirectional"):
            raise ValueError(
                f"prediction={prediction!r}, topology={topology!r} do not fit the masked language model {name}; it "
                "predicts in place ('same') and is 'bidirectional'"
            )
    if prediction is None:
        raise ValueError(f"prediction is needed to wrap {name}: 'same' or 'shifted'")
    if topology is None:
        raise ValueError(f"topology is needed to wrap {name}: 'bidirectional', 'block_causal' or 'causal'")
    return prediction, topology


def _end_ids(eos_token_id: Any) -> tuple[Any, ...]:
    if eos_token_id is None:
        return ()
    if isinstance(eos_token_id, Sequence) and not isinstance(eos_token_id, str):
        return tuple(eos_token_id)
    return (eos_token_id,)


def _check_module(module: nn.Module, config: Any, adapter: type[Model], topology: str) -> None:
    """Raise ValueError for a transformers module that would not compute what `topology` states."""
    name, base = type(module).__name__, _transformers_class(module)
    if base is not None and module.base_model is module:
        raise ValueError(f"module {name} has no language-model head over its base model")
    if getattr(config, "return_dict", True) is False:
        raise ValueError(f"config.return_dict=False of {name} is not supported; set it to True")
    if adapter is Encoder:
        if getattr(config, "is_decoder", False):
            raise ValueError(f"config.is_decoder=True makes {name} causal; a masked language model needs False")
        return
    if _is_causal_lm(module) and topology == "causal" and getattr(config, "model_type", None) in NOT_CAUSAL:
        raise ValueError(f"{name} does not decode token by token: {NOT_CAUSAL[config.model_type]}")
    if _is_causal_lm(module) and topology == "causal" and _is_encoder(config):
        raise ValueError(
            f"config.is_decoder=False makes {name} bidirectional; a causal language model of its kind needs True"
        )
    accepts_masks = adapter is Decoder and base is not None and base.__name__.endswith("ForCausalLM")
    if topology != "causal" and _is_causal_lm(module) and not accepts_masks:
        raise ValueError(f"topology={topology!r} is not available for {name}: its causal mask cannot be removed")
    if adapter is Opaque:
        return
    if topology == "causal":
        if getattr(config, "is_causal", True) is False:
            implementation = config._attn_implementation
            if implementation != "sdpa" and not implementation.startswith("paradec_"):
                raise ValueError(
                    f"config.is_causal=False removes the causal mask of {name}, and its attention {implementation!r} "
                    "does not apply paradec's; call module.set_attn_implementation('sdpa') first"
                )
        return
    fields = {"layer_types": None, "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None)}
    for field, value in (fields | special_attention(module)).items():
        if value is not None:
            raise ValueError(
                f"config.{field}={short_repr(value)} of {name} is not available with topology={topology!r}; only plain "
                "attention runs without its causal mask"
            )


def _is_encoder(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    model_type = getattr(config, "model_type", None)
    return getattr(config, "is_decoder", True) is False and model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _check_experts(module: nn.Module, config: Any) -> None:
    """Raise ValueError for float64 experts whose kernel does not support float64. Warn if a subclass's experts run one
    by one, because transformers looks for kernels in the subclass's file."""
    name, kernel = type(module).__name__, getattr(config, "_experts_implementation", None)
    experts = [part for part in module.modules() if hasattr(part, "has_gate") and hasattr(part, "is_transposed")]
    if not experts or kernel is None:
        return
    dtype = next(experts[0].parameters()).dtype
    if kernel == "grouped_mm" and dtype == torch.float64:
        raise ValueError(
            f"config._experts_implementation='grouped_mm' of {name} has no float64; call "
            "module.set_experts_implementation('eager') first"
        )
    if kernel == "eager" and _transformers_class(module) not in (None, type(module)) and dtype != torch.float64:
        warnings.warn(
            f"{name} computes its experts one after the other: transformers chooses a faster kernel only for its own "
            "classes; choose it with module.config._experts_implementation = 'grouped_mm'",
            stacklevel=4,
        )


def _max_length(module: nn.Module, config: Any, adapter: type[Model]) -> int | None:
    """Number of positions that the config allows. RoBERTa's padding_idx + 1 unused positions do not count."""
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        length = getattr(config, "max_sequence_length", None)  # LLaDA's remote code
    if adapter is Encoder and isinstance(length, int):
        table = getattr(getattr(module.base_model, "embeddings", None), "position_embeddings", None)
        padding_index = getattr(table, "padding_idx", None)
        length -= 0 if padding_index is None else padding_index + 1
    return length


# ---- shared with loading --------------------------------------------------------------------------------------------


def registered_attention(attn_implementation: str) -> str:
    """The name under which an attention function without a causal mask is registered in transformers. Raises ValueError
    for an unknown function."""
    from paradec.models.attention import IMPLEMENTATIONS, PREFIX

    name = attn_implementation.removeprefix(PREFIX) if isinstance(attn_implementation, str) else None
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation={short_repr(attn_implementation)} is not available without a causal mask; allowed: "
            f"{', '.join(sorted(IMPLEMENTATIONS))} (sdpa dispatches to flash kernels where the GPU has them)"
        )
    return PREFIX + name


def default_attention(attn_implementation: str, name: str, topology: str | None) -> Any:
    """The attention method (`paradec.attention`) for an `attn_implementation`, or None. Raises ValueError for a model
    that cannot use it. name: the model's, for the message. topology: a decoder's; None for other models."""
    if attn_implementation.removeprefix("paradec_") != "sparsed":
        return None
    if topology != "bidirectional":
        raise ValueError(
            f"attn_implementation={attn_implementation!r} needs a bidirectional transformers decoder; {name} is "
            f"{'of another kind' if topology is None else topology.replace('_', '-')}: use 'sdpa'"
        )
    return attention.create("sparsed")
