"""Adapters around modules: they answer a `Query` with the logits that were asked for. Here is what all kinds share."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.family_queries import CausalQuery
from paradec.core.query import Query
from paradec.models.calls import Calling, ModuleCall, take_columns
from paradec.models.layers import answer_with_layers
from paradec.models.saving import Published, save
from paradec.models.updating import Updated
from paradec.models.wraps import Wrap


class Adapter:
    """What answers queries with a module, of whichever kind both are.

    Args:
        module: the network.
    """

    module: nn.Module

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
        """What it makes, its tokens, size, dtype and device."""
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
        return f"{type(self).__name__}({getattr(facts, 'name', type(module).__name__)!r}: {', '.join(said)})"


class Model(Updated, Adapter):
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
    """Whether answers depend on the order in which tokens were decided (`decided_at` of the query) as well."""
    any_order: bool = False
    """Whether a call says of every position what it is given those that were decided before it, and nothing else:
    samplers of causal models decode such a model in any order (`AnyOrderQuery`)."""
    first_place: int = 0
    """On these, the position that orders count from."""
    published: Published | None = None
    """What `load` read of the checkpoint's files, for `save_pretrained`; None for other models."""
    own_drafts: Any = None
    """How it drafts for itself (`paradec.models.own_drafts.OwnDrafts`); None for models that do not."""
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

    def keep_decided(self, rows: int, length: int) -> Any:
        """For models of any order: a store of what was decided, over which a call evaluates the other positions alone,
        for so many rows and positions; None where every call evaluates all."""
        return None

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
        keeper = query if isinstance(query, CausalQuery) and (query.keep_hidden or query.keep_layers) else None
        if keeper is not None and keeper.keep_layers is not None:
            return answer_with_layers(self, keeper, store)
        call = ModuleCall(self._wrap, query.wanted, keeper)
        with Calling(self.module, call):
            logits = self._logits(query, store, call)
            # nothing has gathered them where there is no hook, or a module calls a part of its base model
            return logits if call.columns is None else take_columns(logits, call.columns)

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        """Call the module: logits of the wanted columns where a hook gathers these, else of all."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it calls its module")

    # ---- parts of the module, by transformers' names --------------------------------------------------------------

    @property
    def text_config(self) -> Any:
        """The module's configuration, or of several the one of its language model."""
        config = self.module.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states that `CausalQuery.keep_hidden` asks for; None for modules that give none."""
        return getattr(self.text_config, "hidden_size", None)

    def token_embeddings(self) -> Tensor | None:
        """[vocab_size, d]: the input embeddings of the vocabulary; None where the module names none."""
        return getattr(_part(self.module, "get_input_embeddings"), "weight", None)

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

    # ---- copies and pickles --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # engines hold graphs and stores; the wrap is replaced by a flag that says whether there is one; the copy's own
        # requests are made when it has some
        kept = {name: value for name, value in self.__dict__.items() if name != "requests"}
        return kept | {"engines": OrderedDict(), "_wrap": self._wrap is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wrapped = state["_wrap"]
        self.__dict__.update(state | {"_wrap": None})
        if self._unmasked:
            import paradec.models.attention  # noqa: F401  (a new process does not know the function yet)
        if wrapped:
            self._wrap = self._wrapped()


def _part(module: nn.Module, name: str) -> Any:
    """What transformers' accessor of that name gives; None where the module has none, or none that answers."""
    try:
        return getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None


def count_text(number: int) -> str:
    """A count in three digits: 1.86M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
