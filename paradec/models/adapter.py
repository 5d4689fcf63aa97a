"""Kinds of models: transformers' decoders, transformers' encoders, and any other module that maps ids to logits."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.query import Query, take_columns
from paradec.models.base import Adapter, Model
from paradec.models.decoder import Decoder

__all__ = ["Adapter", "Decoder", "Encoder", "Model", "Opaque"]

PADDED_ENCODERS = frozenset(
    "albert bert camembert deberta deberta-v2 distilbert electra megatron-bert mobilebert modernbert mpnet nomic_bert "
    "roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl".split()
)
"""Masked language models whose padding leaves other positions unchanged. (ConvBERT, for example, convolves over it.)"""
HEADS = (("cls",), ("lm_head",), ("predictions",), ("head", "decoder"), ("generator_predictions", "generator_lm_head"))
"""For each kind of encoder, transformers' names of the parts that compute logits from hidden states, in order."""


class Encoder(Model):
    """A transformers masked language model (BERT-like); it predicts in place, with a padding mask, without a store."""

    kind = "encoder"

    def __init__(self, module: nn.Module, facts: ModelFacts, *args: Any, **kwargs: Any):
        super().__init__(module, facts, *args, **kwargs)
        parts = ((name, part) for name, part in module.named_children() if part is not module.base_model)
        names = tuple(name for name, part in parts if next(part.parameters(), None) is not None)
        is_transformers = type(module).forward.__module__.startswith("transformers.")
        self._head = names if names in HEADS and is_transformers else ()
        """Names of the parts after the base model; () for modules that are called as a whole."""

    @property
    def pads(self) -> bool:
        return self.module.config.model_type in PADDED_ENCODERS

    def _logits(self, query: Query, store: Any) -> Tensor:
        mask = None if query.valid is None else query.valid.long()
        if not self._head:
            logits = self.module(input_ids=query.tokens, attention_mask=mask).logits
            return logits if query.wanted is None else take_columns(logits, query.wanted)
        states = self.module.base_model(input_ids=query.tokens, attention_mask=mask)[0]
        states = states if query.wanted is None else take_columns(states, query.wanted)
        for name in self._head:
            states = getattr(self.module, name)(states)
        return states


class Opaque(Model):
    """Any module that maps ids to logits. It is called with ids alone; all rows of a call have one length."""

    kind = "opaque"
    hidden_size = None
    has_head = False

    def __init__(self, module: nn.Module, facts: ModelFacts, *args: Any, **kwargs: Any):
        super().__init__(module, facts, *args, **kwargs)
        self._accepts = frozenset(inspect.signature(module.forward).parameters)

    def _logits(self, query: Query, store: Any) -> Tensor:
        if query.valid is not None:
            raise ValueError("an opaque module is called without padding; all rows of a call must have one length")
        kwargs = {"use_cache": False} if "use_cache" in self._accepts else {}
        output = self.module(query.tokens, **kwargs)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        expected = (*query.tokens.shape, self.facts.vocab_size)
        if logits is None or tuple(logits.shape) != expected:
            got = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
            raise ValueError(f"module {type(self.module).__name__} returned {got}; expected shape {expected}")
        return logits if query.wanted is None else take_columns(logits, query.wanted)
