"""Decoder layers in compiled code, for calls on a CPU (`generate(compile=True)`).

What stands around a layer's matrix products (norms, rotary angles, activations, residuals) is fused; the products and
the attention run as they do uncompiled, but for that with the output matrix (`packed_head`). A layer is compiled in two
halves (`Halves`): up to its attention, and from there on. The attention between them is the one that the layer would
have called, over the store that it was given.

Only attention mixes positions, so the halves see all rows' positions in one line [1, N, d] with N left open: the same
code serves all layers, every number of rows and every length. The weights are inputs of it. In the last layer only the
positions that the output matrix shall see go through the second half.

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
from paradec.kernels.token_stats.compiled import CompiledSums, serving
from paradec.models.calls import Call, Calling, current_call, every_part, take_columns
from paradec.models.packed_head import HeadForward, packing

if TYPE_CHECKING:
    from paradec.protocol import Query

Angles = tuple[Tensor, Tensor]
TABLES = ("_parameters", "_buffers")
"""Where a module keeps its tensors."""
LAYERS = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
}
"""Layers of transformers that mix positions by attention alone, through its AttentionInterface: by their module there,
their class."""
ATTENTION = "paradec_seam"
"""The name of the attention function that layers are traced with."""


class CompiledModel:
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
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, which chooses types while a layer runs"
    if len({parameter.device for parameter in model.module.parameters()}) > 1:
        return "they are spread over several devices"
    for part in every_part(model.module):
        if "forward" in part.__dict__ or part._compiled_call_impl is not None:
            return f"a {type(part).__name__} has a forward of its owner's"
    for part in every_part(layers):
        if part._forward_hooks or part._forward_pre_hooks:
            return f"a hook is on a {type(part).__name__}"
        for weight in part._parameters.values():
            if weight is not None and type(weight) not in (nn.Parameter, Tensor):
                return f"a weight of a {type(part).__name__} is a {type(weight).__name__}"
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
        self._stamp = _stamp(model)
        self.module = _second(model.module, {})
        base: Any = self.module.base_model
        self.wrap = _Seen(base)
        self.attend = _attention_of(model)
        self.seconds = 0.0
        """Spent compiling so far."""
        self._halves: dict[Any, Halves] = {}
        own: Any = model.module.base_model
        for layer, first in zip(base.layers, own.layers, strict=True):
            layer.__dict__["forward"] = _Forward(self, first, last=first is own.layers[-1])
        head: Any = self.module.get_output_embeddings()
        if type(head) is nn.Linear:
            head.__dict__["forward"] = HeadForward(head)

    def stand_for(self, model: Any) -> bool:
        """Whether the module is still made of the same parts."""
        return self._stamp == _stamp(model)

    def halves(self, layer: nn.Module, kind: Any, line: Tensor, angles: Angles, weights: list[Tensor]) -> Halves:
        """The compiled code of a layer, for what these tensors are like."""
        like = [(weight.dtype, weight.shape, weight.stride()) for weight in weights]
        key = kind, line.dtype, angles[0].dtype, tuple(like), torch.get_num_threads()
        found = self._halves.get(key)
        if found is None:
            found = self._halves.setdefault(key, Halves(layer, line, angles, weights))
            self.seconds += found.seconds
        return found

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


class Halves:
    """A layer of transformers in compiled code, up to its attention and from there on. Both are the layer's own
    `forward`, traced with an attention that keeps what it gets, or gives what it got.

    Args:
        layer: a copy of it is traced.
        line: hidden states as they will come, [1, N, d].
        angles: cosines and sines, [1, N, head_dim].
        weights: its parameters and buffers (`_tables`).

    Raises:
        paradec.compiling.Uncompilable: see there.
    """

    def __init__(self, layer: nn.Module, line: Tensor, angles: Angles, weights: list[Tensor]):
        _register()
        traced = _second(layer, {}, apart=True)
        tables = _tables(traced)
        attention = traced.self_attn
        config = copy.copy(getattr(attention.config, "_own", attention.config))
        config._attn_implementation = ATTENTION
        attention.__dict__["config"] = config
        self.scaling: float = 1.0
        self.window: int | None = None

        def run(line: Tensor, angles: Angles, given: tuple[Tensor, ...]) -> Tensor:
            for (table, name), weight in zip(tables, given, strict=True):
                table[name] = weight
            found: Tensor = traced(line, position_embeddings=angles)
            return found

        def before(line: Tensor, cos: Tensor, sin: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            kept: list[Tensor] = []

            def keep(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
                kept.extend((query, key, value))
                self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
                self.window = window
                return query.transpose(1, 2)

            attention.__dict__["seam"] = keep
            run(line, (cos, sin), given)
            return tuple(each[0].transpose(0, 1).contiguous() for each in kept)

        def after(attended: Tensor, line: Tensor, *given: Tensor) -> Tensor:
            attention.__dict__["seam"] = lambda *asked: attended
            unread = line.new_zeros(1, line.shape[1], angles[0].shape[2])
            return run(line, (unread, unread), given)

        fixed = [None] * len(weights)
        self.before = compiling.Compiled(before, [line, *angles, *weights], [1, 1, 1, *fixed])
        attended = line.new_empty(1, line.shape[1], config.num_attention_heads, attention.head_dim)
        self.after = compiling.Compiled(after, [attended, line, *weights], [1, 1, *fixed])
        self.seconds = self.before.seconds + self.after.seconds


class _Forward:
    """The forward of a layer of the second tree."""

    def __init__(self, layers: Layers, layer: Any, last: bool):
        self.layers = weakref.ref(layers)
        self.layer = layer
        self.last = last
        self.kind = _kind(layer)
        self.tables = _tables(layer)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Angles | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        layers, call = self.layers(), current_call()
        assert layers is not None and call is not None and position_embeddings is not None
        attention = self.layer.self_attn
        rows = hidden_states.shape[0]
        line = _line(hidden_states)
        cos, sin = (_line(each.expand(rows, -1, -1)) for each in position_embeddings)
        weights = [table[name] for table, name in self.tables]
        halves = layers.halves(self.layer, self.kind, line, (cos, sin), weights)
        query, key, value = (
            each.unflatten(0, (rows, -1)).transpose(1, 2) for each in halves.before(line, cos, sin, *weights)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        windowed = {} if halves.window is None else {"sliding_window": halves.window}
        attended: Tensor = (
            layers.attend(
                attention, query, key, value, attention_mask, dropout=0.0, scaling=halves.scaling, **windowed, **kwargs
            )[0]
            .to(line.dtype)
            .flatten(2)
        )
        columns = call.columns
        if self.last and columns is not None and columns.shape[1] < hidden_states.shape[1] and call.keeper is None:
            call.columns = None
            hidden_states, attended = take_columns(hidden_states, columns), take_columns(attended, columns)
            line = _line(hidden_states)
        heads = _line(attended).unflatten(2, (query.shape[1], -1))
        (line,) = halves.after(heads, line, *weights)
        return line.view(hidden_states.shape)


def _line(rows: Tensor) -> Tensor:
    """[R, Q, d] -> [1, R x Q, d], as dense as compiled code reads it."""
    return rows.reshape(1, -1, rows.shape[2]).contiguous()


# ---- which calls run compiled ---------------------------------------------------------------------------------------


class _Thread(threading.local):
    running: tuple[Any, CompiledModel] | None = None


_thread = _Thread()


@contextmanager
def compiled_calls(model: Any, layers: bool, statistics: bool) -> Iterator[CompiledModel]:
    """In here calls of this thread to `model` run on compiled layers, and statistics are read by compiled code."""
    if model.compiled is None:
        model.compiled = CompiledModel()
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
    except compiling.Uncompilable as error:
        own.give_up(model, str(error))
        return None


# ---- the second tree ------------------------------------------------------------------------------------------------


def _second(part: nn.Module, made: dict[int, nn.Module], apart: bool = False) -> Any:
    """A tree of new module objects over the same parameters, buffers and hooks, in evaluation mode; `apart`: with
    dicts of their own, so that what is put into them shows in the new tree alone."""
    if id(part) not in made:
        new = object.__new__(type(part))
        made[id(part)] = new
        new.__dict__.update(part.__dict__)
        below = {name: None if child is None else _second(child, made, apart) for name, child in part._modules.items()}
        new.__dict__["_modules"] = below
        new.__dict__["training"] = False
        if apart:
            new.__dict__ |= {table: dict(new.__dict__[table]) for table in TABLES}
    return made[id(part)]


def _tables(part: nn.Module) -> list[tuple[dict[str, Tensor], str]]:
    """Where the parameters and buffers of a module and all below it stand: dicts, and names in them."""
    tables = [getattr(each, name) for each in every_part(part) for name in TABLES]
    return [(table, name) for table in tables for name, value in table.items() if value is not None]


def _kind(layer: nn.Module) -> Any:
    """What layers have in common that one trace serves, beside the shapes of their weights: their parts, and what else
    is set on them. Its own config is the model's."""
    own = {*nn.Module().__dict__, "config", "layer_idx"}
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, type(part))
        + tuple(
            (key, value if isinstance(value, plain) else id(value))
            for key, value in part.__dict__.items()
            if key not in own
        )
        for name, part in layer.named_modules()
    )


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


# ---- the seam -------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_registered = False


def _register() -> None:
    """Make the attention function known that layers are traced with, once."""
    global _registered
    with _lock:
        if not _registered:
            from transformers import AttentionInterface

            AttentionInterface.register(ATTENTION, _function)
            _registered = True


def _function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, heads, N, head_dim] -> [1, N, heads, head_dim], whatever the half that is traced makes of
    them."""
    return module.seam(query, key, value, scaling, sliding_window), None
