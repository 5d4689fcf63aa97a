"""Base classes of the adapters around modules."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from paradec.core.checks import MODELS
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.core.weights import WeightsLock, get_lock
from paradec.models.saving import PublishedCheckpoint, plan_writes, save


class Adapter:
    """Base of all adapters. module: the network; it is put into evaluation mode."""

    module: nn.Module

    def __init__(self, module: nn.Module):
        self.module = module.eval()

    @property
    def device(self) -> torch.device:
        """Device of the module's inputs."""
        parameter = next(self.module.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        dtypes = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(dtypes, torch.get_default_dtype())

    def unwrap(self) -> nn.Module:
        """Undo the adapter's changes to the module, except its evaluation mode, and return it."""
        return self.module

    def evaluation_context(self) -> torch.no_grad:
        """Return a context without gradients. Raises RuntimeError if the module is in training mode."""
        if self.module.training:
            raise RuntimeError(
                f"the module of {self!r} is in training mode, which applies dropout: call module.eval() before decoding"
            )
        return torch.no_grad()

    def __repr__(self) -> str:
        module = self.__dict__.get("module")
        if module is None:  # during __init__
            return object.__repr__(self)
        from paradec.kernels.int8 import Int8Module

        facts, dtype = self.__dict__.get("facts"), str(self.dtype).removeprefix("torch.")
        dtype = f"int8 and {dtype}" if any(isinstance(part, Int8Module) for part in module.modules()) else dtype
        parts = [f"makes {getattr(self, 'makes', 'nothing')}"]
        if isinstance(facts, ModelFacts):
            blocks = f" in blocks of {facts.block_length}" if facts.block_length else ""
            parts += [f"{facts.topology}{blocks}", f"{facts.vocab_size} tokens"]
            parts += [] if facts.mask_token_id is None else [f"mask id {facts.mask_token_id}"]
        parts += [f"{count_text(sum(p.numel() for p in module.parameters()))} parameters", f"{dtype} on {self.device}"]
        return f"{type(self).__name__}({getattr(facts, 'name', type(module).__name__)!r}: {', '.join(parts)})"


class Model(Adapter):
    """Base of token models, which samplers query. Subclasses implement `_logits`. Copies and pickles have no engines.

    Args:
        module: the network; its attention function is `attn_implementation` until `unwrap()`.
        tokenizer: a transformers tokenizer, or None (then prompts are ids).
        default_max_new_tokens, default_block_length, default_attention: values for requests that set none. A block
            length of None makes the canvas one block; an attention (`paradec.attention`) of None is full attention.
        attn_implementation: registered name of the attention function; None is the module's own."""

    kind: ClassVar[str] = ""
    """"decoder", "encoder", "opaque" or "canvas"."""
    makes: ClassVar[str] = "text"
    """A name of `paradec.core.checks.MODELS`."""
    reads_order: bool = False
    """Whether logits depend on the order of the decisions (`WindowQuery.decided_at`)."""
    any_order: bool = False
    """Whether a prediction depends only on the positions decided before it. Samplers of causal models can then decode
    in any order (`AnyOrderQuery`)."""
    first_position: int = 0
    """For any-order models: the position of index 0 in a request's order."""
    published: PublishedCheckpoint | None = None
    """The checkpoint's files as `load` read them, for `save_pretrained` and `update_weights`."""
    self_drafting: Any = None
    """Settings for drafts by the model itself (`paradec.models.self_drafting.SelfDrafting`); None if it makes none."""
    module: Any

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
        """Engines that run the steps of masked samplers on the device; the most recently used one is last."""
        self.attn_implementation = attn_implementation
        self._previous_attention = [] if attn_implementation is None else set_attention(module, attn_implementation)

    @property
    def _has_paradec_attention(self) -> bool:
        return self.attn_implementation is not None and self.attn_implementation.startswith("paradec_")

    @cached_property
    def weights_lock(self) -> WeightsLock:
        """Lock between running requests and weight updates."""
        return get_lock(self.module)

    @property
    def _accepts_masks(self) -> bool:
        return False

    @property
    def pads(self) -> bool:
        """Whether rows of different lengths may share a call."""
        return self._accepts_masks

    @property
    def supports_store(self) -> bool:
        """Whether the module can run over a key/value store."""
        return self._accepts_masks

    @property
    def supports_visibility(self) -> bool:
        """Whether queries may state which columns see each other (`Query.visible`)."""
        return self._accepts_masks

    @property
    def shares_prefix(self) -> bool:
        """Whether the rows of a store may share their prefix."""
        return self.supports_store and self.attn_implementation in ("paradec_sdpa", "paradec_eager")

    def keep_decided(self, rows: int, length: int) -> Any:
        """Make the store of an any-order model's decided positions; None if every call evaluates all positions."""
        return None

    def unwrap(self) -> nn.Module:
        self.engines.clear()
        for config, name in self._previous_attention:
            if config._attn_implementation == self.attn_implementation:  # else the user has changed it since
                config._attn_implementation = name
        self._previous_attention = []
        return self.module

    def save_pretrained(self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> None:
        """Write the model into a folder, which `paradec.load` reads. A failed call leaves the folder unchanged.

        A loaded model keeps its published format (names, config fields, tokenizer, dtypes), as safetensors. A wrapped
        causal or masked language model of transformers is written in transformers' format.

        Args:
            folder: created if missing; a checkpoint in it is replaced, other files stay.
            max_shard_size: bytes in one file, or a text like "5GB"; a single weight may be larger.

        Raises:
            ValueError: a path that is a file, a module of unknown format, weights that the format cannot store
                (adapters, quantised or resized ones). OSError: the folder cannot be written."""
        save(self, folder, max_shard_size)

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        """Compute logits [R, W, V] of the query's R rows and W `wanted` columns (None: all), in the module's dtype."""
        if isinstance(query, str):
            self.generate(query)
        with self.evaluation_context():
            return self.evaluate(query, store)

    def generate(self, *prompts: Any, **request: Any) -> NoReturn:
        """Raise a TypeError that names the function to call."""
        raise TypeError(f"a model is decoded by a function: write {MODELS[self.makes][1]}(model, prompt, ...)")

    def evaluate(self, query: Query, store: Any = None) -> Tensor:
        """Compute logits as `__call__`, but allow gradients. Raises RuntimeError if the attention has changed."""
        name = self.attn_implementation
        if name is not None and (current := self.module.config._attn_implementation) != name:
            raise RuntimeError(
                f"{self.facts.name} was unwrapped, wrapped anew or changed: its attention is {current!r}, and this "
                f"adapter needs {name!r}; wrap the module again"
            )
        return self._logits(query, store)

    def _logits(self, query: Query, store: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement _logits")

    @property
    def weights_version(self) -> int:
        """Weights version. A read increases it if `update_weights`, an optimizer or peft has changed them since."""
        return self.weights_lock.version(self.module)

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> int:
        """Write new values into the weights in place, and return the new `weights_version`. Waits for other threads'
        requests, except those that a caller runs step by step. Prefixes and prompt pools made before become invalid.

        Args:
            state_dict: tensors by the names in the checkpoint's files, or in the module's `state_dict`; other weights
                stay. Values are converted to the weights' dtype and device.

        Raises:
            TypeError, ValueError: values that are not tensors, unknown names, wrong shapes, or weights that are
                distributed, offloaded or quantised; nothing is written then. RuntimeError: a running request of this
                thread, or a batch with rows."""
        writes = plan_writes(self, state_dict)
        with self.weights_lock.update(self.facts.name):
            self.weights_lock.version(self.module)
            for parameter, value in writes:
                # tensors made in inference mode can be written only in inference mode
                with torch.inference_mode(parameter.is_inference()), torch.no_grad():
                    parameter.copy_(value)
        return self.weights_version

    @property
    def text_config(self) -> Any:
        """Configuration of the module's language model."""
        config = self.module.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states that `CausalQuery.keep_hidden` requests; None for modules without them."""
        return getattr(self.text_config, "hidden_size", None)

    def token_embeddings(self) -> Tensor | None:
        """[vocab_size, d]: the input embeddings of the vocabulary; None for modules without them."""
        return getattr(_call_accessor(self.module, "get_input_embeddings"), "weight", None)

    @property
    def has_head(self) -> bool:
        """Whether `head` can apply the output matrix."""
        return _call_accessor(self.module, "get_output_embeddings") is not None

    def head(self, hidden: Tensor) -> Tensor:
        """Apply the output matrix: [..., d] -> [..., vocab_size]. Raises ValueError unless `has_head`."""
        if not self.has_head:
            raise ValueError(f"{self.facts.name} has no output matrix that `head` can apply")
        return self.module.get_output_embeddings()(hidden)

    def __getstate__(self) -> dict[str, Any]:
        # engines hold graphs and stores; the lock belongs to the module in memory
        state = {name: value for name, value in self.__dict__.items() if name != "weights_lock"}
        return state | {"engines": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._has_paradec_attention:
            import paradec.models.attention  # noqa: F401  (registers the function in a new process)


def set_attention(module: nn.Module, name: str) -> list[tuple[Any, str | None]]:
    """Set the attention function in all parts of a transformers module. Returns their configs and previous names."""
    previous = {}
    for submodule in module.modules():
        config: Any = submodule.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            previous[id(config)] = config, config._attn_implementation
    for config, _ in previous.values():
        config._attn_implementation = name
    return [*previous.values()]


def _call_accessor(module: nn.Module, name: str) -> Any:
    try:
        return getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None


def count_text(number: int) -> str:
    """Format a count with three significant digits: 1.86M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
