"""Decoders: transformers' causal language models, with any attention mask, and with a key/value store."""

from __future__ import annotations

import inspect
import warnings
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.family_queries import CausalQuery
from paradec.core.memory import check_memory
from paradec.core.query import Query, WindowQuery, take_columns
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword, thread
from paradec.models.layers import LayerOutputs, require_decoder_layers
from paradec.models.visibility import special_attention, visible_keys

SEE_ALL = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask that hides nothing; without a mask, transformers would make a causal mask."""
PLAIN_CLASSES = frozenset(
    f"{name}ForCausalLM" for name in "Llama Mistral Ministral3 Qwen2 Qwen3 Qwen3Moe Glm4Moe SmolLM3 GptOss".split()
)
"""Classes of transformers whose logits are `lm_head` of the output of `model`."""


class Decoder(Model):
    """A transformers causal language model, or a module of that form, with any mask and with a key/value store."""

    kind = "decoder"

    def __init__(self, module: nn.Module, facts: ModelFacts, *args: Any, **kwargs: Any):
        super().__init__(module, facts, *args, **kwargs)
        self._makes_causal_mask = getattr(getattr(module, "config", None), "is_causal", True) is not False
        """Whether the module itself makes a causal mask; modules of masked models from `load` do not."""

    @cached_property
    def _slices_logits(self) -> bool:
        """Whether the forward accepts columns [R, W] as `logits_to_keep` (transformers from 5.23 on). False with
        layers on several devices, since the device that the columns must be on is then unknown."""
        from transformers import modeling_utils

        forward = type(self.module).forward
        return (
            hasattr(modeling_utils, "slice_logits_to_keep")
            and forward.__module__.startswith("transformers.")
            and "logits_to_keep" in inspect.signature(forward).parameters
            and len({*(getattr(self.module, "hf_device_map", None) or {}).values()}) < 2
        )

    @property
    def _accepts_masks(self) -> bool:
        if self.facts.topology != "causal":
            return True
        # a causal module keeps its attention function; masks work only with plain sdpa
        name = self.attn_implementation or self.module.config._attn_implementation
        return name == "sdpa" and not special_attention(self.module)

    def _logits(self, query: Query, store: Any) -> Tensor:
        if not isinstance(query, CausalQuery) or query.keep_layers is None:
            return self._call(query, store)
        with LayerOutputs(require_decoder_layers(self), query.keep_layers) as outputs:
            logits = self._call(query, store)
        assert query.hidden is not None  # set by `_evaluate`
        query.hidden = outputs.concatenate(query.hidden)
        return logits

    def _call(self, query: Query, store: Any) -> Tensor:
        arguments: dict[str, Any] = {}
        if store is not None or getattr(query, "attention", None) is not None:
            arguments = store_arguments(self.module, query, store)
        mask = self._visible(query, store)
        if mask is None and self._has_paradec_attention:
            mask = SEE_ALL
        flag = thread.attention_flag
        flag.value = False
        logits = self._evaluate(
            query,
            input_ids=query.tokens,
            attention_mask=mask,
            position_ids=query.positions,
            use_cache=store is not None,
            **arguments,
        )
        if self._has_paradec_attention and not flag.value:
            raise RuntimeError(
                f"{self.facts.name} does not attend through transformers' AttentionInterface, and cannot be evaluated "
                f"with topology={self.facts.topology!r}"
            )
        if (shared := arguments.get("shared_prefix")) is not None:
            shared.check_read(self.facts.name)
        if (plan := arguments.get("attention_plan")) is not None and not plan.attended:
            raise RuntimeError(
                f"{self.facts.name} does not pass keyword arguments on to its attention, which a request with "
                "attention=... needs; leave attention out"
            )
        return logits

    def _evaluate(self, query: Query, **arguments: Any) -> Tensor:
        module = self.module
        if can_call_parts(module):
            # embedding, layers and norm for all columns, then the output matrix for the wanted columns
            hidden = module.model(**arguments).last_hidden_state
            if needs_hidden(query):
                query.hidden = hidden
            logits = module.lm_head(hidden if query.wanted is None else take_columns(hidden, query.wanted))
            return logits.to(query.tokens.device)
        if self._slices_logits and query.wanted is not None:
            arguments["logits_to_keep"] = query.wanted
        if needs_hidden(query):
            arguments["output_hidden_states"] = True
        output = module(**arguments)
        if needs_hidden(query):
            query.hidden = output.hidden_states[-1]
        if query.wanted is None or self._slices_logits:
            return output.logits
        return take_columns(output.logits, query.wanted)

    def _visible(self, query: Query, store: Any = None) -> Tensor | None:
        """[R, 1, Q or 1, K] bool: which keys of the call or the store each column sees; None for all keys."""
        if self.facts.topology == "bidirectional" and store is None and query.valid is None and query.visible is None:
            return None
        return visible_keys(self.facts, query, store, self._makes_causal_mask)

    def store_bytes(self, rows: int, length: int, store_dtype: str | None = None) -> int:
        """Bytes of a store of `rows` rows and `length` positions, in this process."""
        from paradec.caches.store import store_bytes

        dtype = self.dtype if store_dtype is None else getattr(torch, store_dtype)
        return store_bytes(self.text_config, rows, length, dtype)

    def make_store(
        self, rows: int, length: int, store_dtype: str | None = None, max_memory: int | None = None, start: int = 0
    ) -> Any:
        """Make an empty key/value store of `rows` rows and `length` positions; rows share the positions before `start`.
        Raises ValueError if it exceeds `max_memory` bytes or the device's memory."""
        from paradec.caches.store import KeyValueStore

        dtype = None if store_dtype is None else getattr(torch, store_dtype)
        num_bytes = self.store_bytes(rows, length - start, store_dtype)
        description = f"the key/value store of {rows} x {length - start} positions"
        if start:
            num_bytes += self.store_bytes(1, start - 1, store_dtype)
            description += f" and {start} that all rows share"
        try:
            check_memory(num_bytes, self.device, max_memory, description)
        except ValueError:
            if max_memory is not None or not self.engines:
                raise
            self.engines.clear()  # engines reserve memory for later requests
            check_memory(num_bytes, self.device, max_memory, description)
        return KeyValueStore(rows, length, self.device, dtype, start)


def needs_hidden(query: Query) -> TypeGuard[CausalQuery]:
    return isinstance(query, CausalQuery) and (query.keep_hidden or query.keep_layers is not None)


def can_call_parts(module: Any) -> bool:
    """Whether calling `module.model` and `module.lm_head` equals calling the module: its class is in `PLAIN_CLASSES`,
    and it has no hooks, compiled code or replaced forward. (accelerate's forward, which aligns devices, is allowed.)"""
    return (
        type(module).__name__ in PLAIN_CLASSES
        and type(module).__module__.startswith("transformers.")
        and not (module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl)
        and ("forward" not in vars(module) or hasattr(module, "_hf_hook"))
    )


def store_arguments(module: nn.Module, query: Query, store: Any) -> dict[str, Any]:
    """The module's keyword arguments for a store and for the query's attention plan."""
    arguments: dict[str, Any] = {}
    if store is not None:
        arguments = cache_keyword(module, store.bind(query))
        if store.shared is not None:
            arguments["shared_prefix"] = store.shared.begin()
    plan = query.attention if isinstance(query, WindowQuery) else None
    if plan is not None:
        plan.attended = False
        if query.visible is None:
            arguments["attention_plan"] = plan
        else:
            warnings.warn("attention=... has no effect in calls with a mask per position", stacklevel=4)
    return arguments
