"""Adapters around modules: they answer a `Query` with the logits that were asked for.

- `Decoder`: a transformers causal language model (Llama, Qwen2, ...) that runs with any attention mask and over a
  key/value store; LLaDA and Dream checkpoints are loaded as these.
- `Encoder`: a transformers masked language model (BERT-like) with a 2-D padding mask and no store.
- `Opaque`: anything else that maps input ids to logits, a user's own remote-code model, say. It is never padded:
  rows of different lengths go in separate calls.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.models.calls import Calling, ModuleCall, Wrap, take_columns
from paradec.models.layers import answer_with_layers
from paradec.models.saving import Published, save
from paradec.models.tensor_parallel import Ranks, of_module, whole

PADDED_ENCODERS = frozenset(
    "albert bert camembert deberta deberta-v2 distilbert electra megatron-bert mobilebert modernbert mpnet nomic_bert "
    "roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl".split()
)
"""Masked language models whose padding changes nothing for the other positions. Others (ConvBERT convolves over it,
Nystromformer averages it in) are evaluated without: rows of different lengths go in separate calls."""
EVERYTHING = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask that hides nothing. transformers hands a mask of four dimensions on as it is; without one it makes its own."""


class Adapter:
    """What answers queries with a module, of whichever kind both are.

    Args:
        module: the network.
    """

    module: nn.Module
    ranks: Ranks | None = None
    """The processes that the module is spread over (tensor parallel); None for one that is whole."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def device(self) -> torch.device:
        """Where the module's inputs go."""
        first = next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        found = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(found, torch.get_default_dtype())

    def unwrap(self) -> nn.Module:
        """Take everything off the module that was put on it for this adapter, and return it."""
        return self.module

    def __repr__(self) -> str:
        module = self.__dict__.get("module")
        if module is None:  # asked for in the middle of its making
            return object.__repr__(self)
        facts, kind = self.__dict__.get("facts"), str(self.dtype).removeprefix("torch.")
        said = [f"makes {getattr(self, 'makes', 'nothing')}"]
        if isinstance(facts, ModelFacts):
            blocks = f" in blocks of {facts.block_length}" if facts.block_length else ""
            said += [f"{facts.topology}{blocks}", f"{facts.vocab_size} tokens"]
            said += [] if facts.mask_token_id is None else [f"mask id {facts.mask_token_id}"]
        said += [f"{count_text(sum(p.numel() for p in module.parameters()))} parameters", f"{kind} on {self.device}"]
        said += [] if self.ranks is None else [repr(self.ranks)]
        return f"{type(self).__name__}({getattr(facts, 'name', type(module).__name__)!r}: {', '.join(said)})"


def count_text(number: int) -> str:
    """A count in three digits: 1.86M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


class Model(Adapter):
    """Base of the models of tokens, which samplers query. A kind of them says how it calls its module (`_logits`);
    adapters of other families say in `makes` what they are for.

    The module stays its owner's: calls evaluate it in evaluation mode and with their own attention, and leave its modes
    and its choice of an attention alone. It may carry several wraps, and be used without them at the same time, in
    other threads as well (`paradec.models.calls`). Copies and pickles hold a module of their own, and no engines.

    Args:
        module: the network. For decoders and encoders a forward hook on the base model gathers the hidden states of
            the wanted positions, so that the output matrix runs on those only; `unwrap()` takes it off.
        facts: ids and conventions.
        tokenizer: a transformers tokenizer, or None (then prompts are ids).
        default_max_new_tokens: the answer length when the request names none.
        default_block_length: the block length when the request names none; None decodes the whole canvas at once.
        default_attention: the attention method (`paradec.attention`) when the request names none; None is full.
        attn_implementation: the attention function, by the name it is registered with, that calls run with; None is the
            module's own.
    """

    kind: ClassVar[str] = ""
    """"decoder", "encoder", "opaque" or "canvas"."""
    makes: ClassVar[str] = "text"
    """What it is for, one of `paradec.core.checks.MODELS`."""
    default_sampler: ClassVar[str | None] = None
    """The sampler when a request names none; None is the request's default."""
    gathers: ClassVar[bool] = True
    """Whether a hook on the base model gathers the wanted columns; families that run the parts themselves need none."""
    reads_order: bool = False
    """Whether answers depend on the order in which tokens were decided (`Query.decided_at`), not on tokens alone."""
    published: Published | None = None
    """What `load` read of the checkpoint's files, for `save_pretrained`; None for other models."""
    module: Any
    """Typed by families whose network is ours; of the others nothing is known here."""

    def __init__(
        self,
        module: nn.Module,
        facts: ModelFacts,
        tokenizer: Any = None,
        default_max_new_tokens: int = 128,
        default_block_length: int | None = None,
        default_attention: Any = None,
        attn_implementation: str | None = None,
    ):
        super().__init__(module)
        self.ranks = of_module(module)
        self.facts = facts
        self.tokenizer = tokenizer
        self.default_max_new_tokens = default_max_new_tokens
        self.default_block_length = default_block_length
        self.default_attention = default_attention
        self.engines: OrderedDict[Any, Any] = OrderedDict()
        """What the device step of masked samplers keeps from one request to the next, the one used last at the end."""
        self.attn_implementation = attn_implementation
        self._unmasked = attn_implementation is not None and attn_implementation.startswith("paradec_")
        """Whether calls run with an attention function of paradec's, which sees whatever no mask hides."""
        self._wrap = self._wrapped()

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks is not None:
            raise TypeError(f"{self.facts.name} is spread over processes, and can be neither copied nor pickled")
        # engines hold graphs and stores; the wrap is replaced by a flag that says whether there is one
        return self.__dict__ | {"engines": OrderedDict(), "_wrap": self._wrap is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind = state.pop("kind", None)
        if type(self) is Model:  # pickled before there was a class for each kind
            self.__class__ = {"decoder": Decoder, "encoder": Encoder, "opaque": Opaque}[kind]
        wrapped = state["_wrap"]
        self.__dict__.update(state | {"_wrap": None})
        if self._unmasked:
            import paradec.models.attention  # noqa: F401  (a new process does not know the function yet)
        if wrapped:
            self._wrap = self._wrapped()

    def _wrapped(self) -> Any:
        """What is put on the module for this model; None where nothing is."""
        return Wrap(self.module, self.attn_implementation) if self.gathers else None

    @property
    def _takes_masks(self) -> bool:
        """Whether the module attends to what a mask of ours says, and to nothing else."""
        return False

    @property
    def pads(self) -> bool:
        """Whether rows of different lengths may share a call."""
        return self._takes_masks

    @property
    def supports_store(self) -> bool:
        """Whether the module can run over a key/value store."""
        return self._takes_masks

    @property
    def supports_visibility(self) -> bool:
        """Whether queries may say which columns see which (`Query.visible`)."""
        return self._takes_masks

    @property
    def shares_prefix(self) -> bool:
        """Whether the rows of a store may read what they begin with from one place."""
        return self.supports_store and self.attn_implementation in ("paradec_sdpa", "paradec_eager")

    @property
    def text_config(self) -> Any:
        """The module's configuration, or of several the one of its language model."""
        config = self.module.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states that `Query.keep_hidden` asks for; None for modules that give none."""
        return getattr(self.text_config, "hidden_size", None)

    def token_embeddings(self) -> Tensor | None:
        """[vocab_size, d]: the input embeddings of the vocabulary; None where the module names none."""
        return whole(getattr(_part(self.module, "get_input_embeddings"), "weight", None))

    @property
    def has_head(self) -> bool:
        """Whether the output matrix can be run by itself (`head`)."""
        return _part(self.module, "get_output_embeddings") is not None

    def head(self, hidden: Tensor) -> Tensor:
        """The output matrix alone: hidden states [..., d] -> [..., vocab_size].

        Raises:
            ValueError: the module names none (`has_head`).
        """
        if not self.has_head:
            raise ValueError(f"{self.facts.name} names no output matrix that could be run by itself")
        return self.module.get_output_embeddings()(hidden)

    def unwrap(self) -> nn.Module:
        """Take everything off the module that was put on it for this model, and return it. Other wraps of it go on."""
        self.engines.clear()
        if self._wrap is not None:
            self._wrap.release()
            self._wrap = None
        return self.module

    def save_pretrained(self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> None:
        """Write the model as it is now into a folder, which `paradec.load` reads.

        A loaded model is written in the format that it was read in: the published names of the weights and fields of
        config.json, generation_config.json and the tokenizer where it has them, safetensors with the weights' own
        dtypes and values, in shards beyond `max_shard_size`. A wrapped causal or masked language model of
        transformers is written in transformers' format, for its own `from_pretrained` and `paradec.wrap`.

        All files are written before any old one goes: what fails or is interrupted leaves the folder as it was. Other
        files in it stay.

        Args:
            folder: made where there is none; a checkpoint in it, the model's own too, is replaced.
            max_shard_size: bytes in one file, or a text like "5GB"; a single weight may be larger.

        Raises:
            ValueError: a path that is a file, an image model or another module whose format is not known here, weights
                that the format has no place for (adapters, quantised or resized ones). OSError: it cannot be written.
        """
        save(self, folder, max_shard_size)

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        """Evaluate one query.

        Returns:
            Logits [R, W, V] of the wanted columns ([R, Q, V] when none are named), in the module's dtype.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(query, store)
        if query.keep_layers is not None:
            return answer_with_layers(self, query, store)
        call = ModuleCall(self._wrap, query.wanted, query if query.keep_hidden else None)
        with Calling(self.module, call):
            if self.ranks is None:
                logits = self._logits(query, store, call)
            else:
                logits = self.ranks.together(self._logits, query, store, call)
            # nothing has gathered them where there is no hook, or a module calls a part of its base model
            return logits if call.columns is None else take_columns(logits, call.columns)

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        """Call the module: logits of the wanted columns where a hook gathers these, else of all."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it calls its module")


class Decoder(Model):
    """A transformers causal language model, or a module of its form: it may run with any mask, and over a store."""

    kind = "decoder"

    def __init__(self, module: nn.Module, facts: ModelFacts, *others: Any, **named: Any):
        super().__init__(module, facts, *others, **named)
        self._masks_itself = getattr(getattr(module, "config", None), "is_causal", True) is not False
        """Whether a causal module needs no mask of ours to be so (the modules that `load` makes do)."""

    @property
    def _takes_masks(self) -> bool:
        if self.facts.topology != "causal":
            return True
        # causal modules keep their own attention, of which only the plain one is what such a mask replaces
        config = self.module.config
        plain = not {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
        if getattr(config, "layer_types", None) is None:
            plain = getattr(config, "sliding_window", None) is None
        name = self.attn_implementation or config._attn_implementation
        return plain and not getattr(self.module, "_is_stateful", False) and name == "sdpa"

    def store_bytes(self, rows: int, length: int, store_dtype: str | None = None) -> int:
        """Bytes that a store of `rows` rows and `length` positions will take, in this process."""
        from paradec.caches.store import store_bytes

        dtype = self.dtype if store_dtype is None else getattr(torch, store_dtype)
        parts = self.ranks.size if self.ranks is not None and self.ranks.heads else 1
        return store_bytes(self.text_config, rows, length, dtype) // parts

    def make_store(
        self,
        rows: int,
        length: int,
        store_dtype: str | None = None,
        max_memory: int | None = None,
        start: int = 0,
    ) -> Any:
        """An empty key/value store of `rows` rows and `length` positions, of which all rows share those before `start`.

        Raises:
            ValueError: it would not fit into `max_memory` bytes, or into what the device has.
        """
        from paradec.caches.store import KeyValueStore, check_memory

        dtype = None if store_dtype is None else getattr(torch, store_dtype)
        needed = self.store_bytes(rows, length - start, store_dtype)
        what = f"the key/value store of {rows} x {length - start} positions"
        if start:
            needed += self.store_bytes(1, start - 1, store_dtype)
            what += f" and {start} that all rows share"
        refused = None
        try:
            check_memory(needed, self.device, max_memory, what)
        except ValueError as error:
            if self.ranks is not None:
                refused = error
            elif max_memory is not None or not self.engines:
                raise
            else:
                self.engines.clear()  # these hold memory for requests that may never come
                check_memory(needed, self.device, max_memory, what)
        if self.ranks is not None and max_memory is None:  # each may have other memory free
            self.ranks.check_all(what, refused)
        elif refused is not None:
            raise refused
        return KeyValueStore(rows, length, self.device, dtype, start)

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        extra = {} if store is None else {"past_key_values": store.bind(query)}
        shared = None if store is None else store.shared
        if shared is not None:
            extra["shared_prefix"] = shared.begin()
        plan = None if query.attention is None else self._plan(query)
        if plan is not None:
            extra["attention_plan"] = plan
        mask = self._visible(query, store)
        if mask is None and self._unmasked:
            mask = EVERYTHING
        logits = self.module(
            input_ids=query.tokens,
            attention_mask=mask,
            position_ids=query.positions,
            use_cache=store is not None,
            **extra,
        ).logits
        if self._unmasked and not call.attended:
            raise RuntimeError(self._unattended())
        if shared is not None:
            shared.check_read(self.facts.name)
        if plan is not None and not plan.attended:
            raise RuntimeError(
                f"{self.facts.name} does not pass its keyword arguments on to its attention, which a request "
                "with attention=... needs; leave that out"
            )
        return logits

    def _unattended(self) -> str:
        if self._wrap is None:
            return f"{self.facts.name} was unwrapped, and attends as its module does; wrap the module again"
        return (
            f"{self.facts.name} does not attend through transformers' AttentionInterface, and cannot be evaluated with "
            f"topology={self.facts.topology!r}"
        )

    def _origin(self, query: Query) -> Tensor | None:
        """[R, 1] int64: where the rows' blocks are counted from; None is position 0."""
        if not self.facts.prompt_aligned:
            return None
        if query.origin is None:
            raise ValueError(f"{self.facts.name} counts its blocks from the prompt's end: the query needs `origin`")
        return query.origin

    def _plan(self, query: Query) -> Any:
        """What the attention follows: the query's plan, unless the query says which column sees which as well."""
        query.attention.attended = False
        if query.visible is None:
            return query.attention
        warnings.warn("a call with a mask per position attends to everything the mask allows", stacklevel=4)
        return None

    def _visible(self, query: Query, store: Any = None) -> Tensor | None:
        """[R, 1, Q or 1, K] bool: which keys each column sees, or None when it sees all.

        Keys are the call's own columns (K = Q), or what a store says.
        """
        if store is None:
            mask = None if query.valid is None else query.valid[:, None, None, :]
            keys, structure = query.positions, query.visible
        else:
            mask, keys = store.visible(query)
            structure = None  # the store's mask has it
        if structure is None and self.facts.topology == "block_causal":
            origin = self._origin(query)
            own = self.facts.block_numbers(query.positions, origin)
            structure = own[:, :, None] >= self.facts.block_numbers(keys, origin)[:, None, :]
        elif structure is None and self.facts.topology == "causal":
            if mask is not None or store is not None or not self._masks_itself:
                structure = query.positions[:, :, None] >= keys[:, None, :]
        if structure is None or mask is None:
            return mask if structure is None else structure[:, None]
        visible = structure[:, None] & mask
        # a padding column sees itself, so that its softmax is defined (over a store it has its row's own blocks)
        return visible | _diagonal(query) if store is None else visible


class Encoder(Model):
    """A transformers masked language model: it predicts in place, and takes no mask but for padding."""

    kind = "encoder"

    @property
    def pads(self) -> bool:
        return self.module.config.model_type in PADDED_ENCODERS

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        mask = None if query.valid is None else query.valid.long()
        return self.module(input_ids=query.tokens, attention_mask=mask).logits


class Opaque(Model):
    """Any module of ids -> logits, called with ids alone."""

    kind = "opaque"
    gathers = False
    hidden_size = None
    has_head = False

    def __init__(self, module: nn.Module, facts: ModelFacts, *others: Any, **named: Any):
        super().__init__(module, facts, *others, **named)
        self._accepts = frozenset(inspect.signature(module.forward).parameters)

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        if query.valid is not None:
            raise ValueError("an opaque module is called without padding; its rows must come in buckets of one length")
        kwargs = {"use_cache": False} if "use_cache" in self._accepts else {}
        output = self.module(query.tokens, **kwargs)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        expected = (*query.tokens.shape, self.facts.vocab_size)
        if logits is None or tuple(logits.shape) != expected:
            got = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
            raise ValueError(f"module {type(self.module).__name__} returned {got}; expected shape {expected}")
        return logits


def _part(module: nn.Module, name: str) -> Any:
    """What transformers' accessor of that name gives; None where the module has none, or none that answers."""
    try:
        return getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None


def _diagonal(query: Query) -> Tensor:
    return torch.eye(query.tokens.shape[1], dtype=torch.bool, device=query.tokens.device)[None, None]
