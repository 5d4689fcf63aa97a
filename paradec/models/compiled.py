"""Decoder layers in compiled code, for calls on a CPU (`generate(compile=True)`).

What stands around a layer's matrix products (norms, rotary angles, activations, residuals) is fused by torch.compile;
the products and the attention run as they do uncompiled, but for that with the output matrix (`packed_head`). Only
attention mixes positions, so the code sees all rows' positions in one line [1, N, d] with N left open: one graph serves
all layers, every number of rows and every length.

The attention leaves the graph through an operator of ours, which takes the lines apart again, asks the store, and calls
the function that the layer would have called.

The module itself stays untouched: calls run on a second tree of module objects, whose parameters, buffers and hooks are
the very dicts of the first. So weights that are changed in place or exchanged are seen at once, and other callers,
in other threads too, notice nothing. Where the tree of the module has changed, a new one is made.
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paradec import compiling
from paradec.compiling import CompiledFunction
from paradec.kernels.token_stats.compiled import CompiledSums, serving
from paradec.models.calls import Call, Calling, current_call, every_part, take_columns
from paradec.models.packed_head import HeadForward, packing

if TYPE_CHECKING:
    from paradec.protocol import Query

LAYERS = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
}
"""Layers of transformers that mix positions by attention alone, through its AttentionInterface: by their module there,
their class."""
ATTENTION = "paradec_compiled"
"""The name that the operator is registered with as an attention function."""
EVERY_WINDOW = -1
"""Stands for no sliding window."""


class Compiled:
    """What a model keeps of compiled code, in `Model.compiled`: that of its layers, and that of the statistics."""

    def __init__(self) -> None:
        self.layers: Layers | None = None
        self.sums = CompiledSums()
        self.failed: str | None = None
        """Why the layers cannot be compiled, where that showed."""
        self._past = 0.0

    @property
    def seconds(self) -> float:
        """Spent compiling so far: the wall time of the calls that did."""
        return self._past + self.sums.seconds + (0.0 if self.layers is None else self.layers.seconds)

    def of(self, model: Any) -> Layers | None:
        """The layers as the module has them now; None where they cannot be compiled, which a warning has said."""
        if self.failed is not None:
            return None
        if self.layers is None or not self.layers.stand_for(model):
            if reason := refusal(model):
                self.give_up(model, reason)
                return None
            if self.layers is not None:
                self._past += self.layers.seconds
            self.layers = Layers(model)
        return self.layers

    def give_up(self, model: Any, reason: str) -> None:
        """Leave the layers as they are from now on, with one warning."""
        self.failed = reason
        warnings.warn(f"compile=True leaves the layers of {model.facts.name} uncompiled: {reason}", stacklevel=2)


def refusal(model: Any) -> str | None:
    """Why the layers of a model cannot be compiled, in words that follow its name; None where nothing is known."""
    name = type(model).__name__
    if getattr(model, "kind", None) != "decoder":
        return f"{name} runs no decoder layers of transformers"
    layers = getattr(model.module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return f"{type(model.module).__name__} has no list of layers"
    for layer in layers:
        known = {(f"transformers.models.{key}.modeling_{key}", value) for key, value in LAYERS.items()}
        if (type(layer).__module__, type(layer).__name__) not in known:
            return f"{type(layer).__name__} is none of {', '.join(LAYERS.values())}"
    if model.ranks is not None:
        return "they are spread over several processes"
    if len({parameter.device for parameter in model.module.parameters()}) > 1:
        return "they are spread over several devices"
    for part in every_part(model.module):
        if "forward" in part.__dict__ or part._compiled_call_impl is not None:
            return f"a {type(part).__name__} has a forward of its owner's"
    for part in every_part(layers):
        if part._forward_hooks or part._forward_pre_hooks:
            return f"a hook is on a {type(part).__name__}"
    try:
        _attention_of(model)
    except (KeyError, ValueError):
        return "they do not attend through a function of transformers' AttentionInterface"
    return None


class Layers:
    """A module whose layers are compiled, beside the one that it was made of.

    Args:
        model: with a module that `refusal` has nothing against.
    """

    def __init__(self, model: Any):
        _register()
        self._stamp = _stamp(model)
        self.module = _second(model.module, {})
        base: Any = self.module.base_model
        self.wrap = _Seen(base)
        self.attend = _attention_of(model)
        self._functions: dict[Any, CompiledFunction] = {}
        own: Any = model.module.base_model
        for layer, first in zip(base.layers, own.layers, strict=True):
            config = copy.copy(getattr(first.self_attn.config, "_own", first.self_attn.config))
            config._attn_implementation = ATTENTION
            layer.self_attn.__dict__["config"] = config
            layer.__dict__["forward"] = _Forward(self, layer, first.self_attn)
        head: Any = self.module.get_output_embeddings()
        if type(head) is nn.Linear:
            head.__dict__["forward"] = HeadForward(head)

    @property
    def seconds(self) -> float:
        """Spent compiling so far."""
        return sum(function.seconds for function in list(self._functions.values()))

    def stand_for(self, model: Any) -> bool:
        """Whether the module is still made of the same parts."""
        return self._stamp == _stamp(model)

    def function(self, layer: nn.Module, hidden: Tensor) -> CompiledFunction:
        """The compiled forward for a layer's class and what torch compiles anew for."""
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        key = type(layer), hidden.dtype, hidden.shape[1] == 1, torch.is_inference_mode_enabled(), autocast
        if key not in self._functions:
            self._functions.setdefault(key, CompiledFunction(type(layer).forward, dynamic=True))
        return self._functions[key]

    def logits(self, model: Any, query: Query, store: Any) -> Tensor:
        """Answer a query, as `Model.__call__` does."""
        call = Call(self.wrap, query.wanted, query if query.keep_hidden else None, self.module)  # type: ignore[arg-type]
        with Calling(self.module, call):
            logits = model._logits(query, store, call)
            return logits if call.columns is None else take_columns(logits, call.columns)


class _Seen:
    """What a call on the second tree asks of a wrap: where the wanted columns are gathered."""

    configs: dict[int, Any] = {}
    attention = None

    def __init__(self, base: nn.Module):
        self.base = base


class _Forward:
    """The forward of a layer of the second tree."""

    def __init__(self, layers: Layers, layer: nn.Module, attention: nn.Module):
        self.layers = weakref.ref(layers)
        self.layer = weakref.ref(layer)
        self.attention = attention

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        layers, layer, call = self.layers(), self.layer(), current_call()
        assert layers is not None and layer is not None and call is not None and position_embeddings is not None
        shape = hidden_states.shape
        call.attention = _Attention(layers, self.attention, attention_mask, past_key_values, kwargs, shape[0])
        line = hidden_states.reshape(1, -1, shape[2])
        angles = tuple(each.expand(shape[0], -1, -1).reshape(1, -1, each.shape[-1]) for each in position_embeddings)
        function: Any = layers.function(layer, line)
        return function(layer, line, position_embeddings=angles).view(shape)


class _Attention:
    """The attention of one layer's call, as the layer itself would ask for it."""

    def __init__(self, layers: Layers, module: nn.Module, mask: Any, store: Any, kwargs: dict[str, Any], rows: int):
        self.layers, self.module, self.mask, self.store, self.kwargs, self.rows = (
            layers, module, mask, store, kwargs, rows,
        )  # fmt: skip

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
        """query, key, value: [1, heads, N, head_dim], row by row -> [1, N, heads, head_dim]."""
        module: Any = self.module
        query, key, value = (each[0].unflatten(1, (self.rows, -1)).transpose(0, 1) for each in (query, key, value))
        if self.store is not None:
            key, value = self.store.update(key, value, module.layer_idx)
        windowed = {} if window == EVERY_WINDOW else {"sliding_window": window}
        out: Tensor = self.layers.attend(
            module, query, key, value, self.mask, dropout=0.0, scaling=scaling, **windowed, **self.kwargs
        )[0]
        return out.flatten(0, 1).unsqueeze(0).contiguous()


# ---- which calls run compiled ---------------------------------------------------------------------------------------


class _Thread(threading.local):
    running: tuple[Any, Compiled] | None = None


_thread = _Thread()


@contextmanager
def compiled_calls(model: Any, layers: bool, statistics: bool) -> Iterator[Compiled]:
    """In here calls of this thread to `model` run on compiled layers, and statistics are read by compiled code."""
    if model.compiled is None:
        model.compiled = Compiled()
    own = model.compiled
    before, _thread.running = _thread.running, (model, own) if layers else None
    try:
        with compiling.kept(), serving(own.sums if statistics else None), packing():
            yield own
    finally:
        _thread.running = before


def answered(model: Any, query: Query, store: Any) -> Tensor | None:
    """The answer of compiled layers; None where this call is to run without."""
    if _thread.running is None or _thread.running[0] is not model:
        return None
    own = _thread.running[1]
    layers = own.of(model)
    if layers is None:
        return None
    try:
        return layers.logits(model, query, store)
    except compiling.failures() as error:
        own.give_up(model, compiling.first_line(error))
        return None


# ---- the second tree ------------------------------------------------------------------------------------------------


def _second(part: nn.Module, made: dict[int, nn.Module]) -> Any:
    """A tree of new module objects over the same parameters, buffers and hooks, in evaluation mode."""
    if id(part) not in made:
        new = object.__new__(type(part))
        made[id(part)] = new
        new.__dict__.update(part.__dict__)
        below = {name: None if child is None else _second(child, made) for name, child in part._modules.items()}
        new.__dict__["_modules"] = below
        new.__dict__["training"] = False
    return made[id(part)]


def _stamp(model: Any) -> tuple[Any, ...]:
    """What the second tree has copied of the module: its parts, and what was put on them."""
    parts: list[Any] = every_part(model.module)
    hooked = [bool(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__) for part in parts]
    return [id(part) for part in parts], hooked, model.attn_implementation, parts[0].config._attn_implementation


def _attention_of(model: Any) -> Any:
    """The registered function that the module's layers attend with."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.attn_implementation or model.module.config._attn_implementation
    return ALL_ATTENTION_FUNCTIONS[name]


# ---- the operator ---------------------------------------------------------------------------------------------------

_library: Any = None
_lock = threading.Lock()


def _register() -> None:
    """Make the operator and the attention function known, once."""
    global _library
    with _lock:
        if _library is not None:
            return
        from transformers import AttentionInterface

        library = torch.library.Library("paradec", "FRAGMENT")
        library.define("attend(Tensor query, Tensor key, Tensor value, float scaling, int window) -> Tensor")
        library.impl("attend", _attend, "CPU")
        torch.library.register_fake("paradec::attend", _attended, lib=library)
        AttentionInterface.register(ATTENTION, _function)
        _library = library


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
    call = current_call()
    assert call is not None and call.attention is not None  # only layers of a second tree have this attention
    found: Tensor = call.attention(query, key, value, scaling, window)
    return found


def _attended(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
    """The shape and dtype of what `_attend` returns."""
    one, heads, count, size = query.shape
    return value.new_empty((one, count, heads, size))


def _function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that compiled layers call."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    window = EVERY_WINDOW if sliding_window is None else sliding_window
    return torch.ops.paradec.attend(query, key, value, scaling, window), None
