"""What a module follows while one of our calls runs on it: its attention, its modes, and the columns that are wanted.

A module may carry several wraps, and its owner goes on using it, in other threads as well. So a wrap changes nothing
that shows: what it puts on a module asks whether the thread that runs it is inside a call of ours, and otherwise does
nothing. Wraps of one module are counted, and the last that comes off takes it along.

The thread's call is kept in a `threading.local`, not in a context variable: that would pass to other threads with their
context, and torch.compile cannot trace it.
"""

from __future__ import annotations

import copy
import operator
import os
import threading
import weakref
from typing import Any

from torch import Tensor, nn

from paradec.core.query import Query


class _Thread(threading.local):
    def __init__(self) -> None:  # once per thread; torch.compile guards no default of the class
        self.call: ModuleCall | None = None


_thread = _Thread()
_lock = threading.RLock()
"""Held while modes are changed and wraps are counted; never while anything is computed. A signal's handler may come in
between, and decode."""
_evaluated: dict[nn.Module, int] = {}
"""Parts that their owner has in training mode, and the calls that need them in evaluation mode just now."""
_configs: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Parts with a `CallConfig`, and how many wraps need it."""
_hooks: weakref.WeakKeyDictionary[nn.Module, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""Parts with a hook of ours, base models that gather hidden states or self-conditionings: its handle, and how many
wraps need it."""


class Evaluation:
    """A context in which no part of a module is in training mode; their owner's modes come back after it.

    Modes are flags of the module, for all threads alike: where parts are in training mode, what another thread computes
    with them meanwhile is computed in evaluation mode, too.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._held: list[nn.Module] = []

    def __enter__(self) -> Evaluation:
        # the lock is needed to look, too: a part in evaluation mode may be so for another thread's call alone
        with _lock:
            parts = every_part(self.module)
            held = [part for part in parts if part.training]
            if held or _evaluated:
                self._held = held = [part for part in dict.fromkeys(parts) if part.training or part in _evaluated]
                for part in held:
                    _evaluated[part] = _evaluated.get(part, 0) + 1
                    _set_training(part, False)
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._held:
            return
        with _lock:
            for part in self._held:
                _evaluated[part] -= 1
                if not _evaluated[part]:
                    del _evaluated[part]
                    _set_training(part, True)
        self._held = []


class ModuleCall:
    """What one of our calls asks of what was put on the module, and what that answers.

    (No context itself: torch.compile loses what compiled code writes to a context.)

    Args:
        wrap: what was put on the module; None for modules that nothing was put on.
        columns: [R, W] int64, the hidden states that the output matrix shall see; None is all.
        keeper: the query that the hidden states are left in.
    """

    def __init__(self, wrap: Wrap | SoftWrap | None = None, columns: Tensor | None = None, keeper: Query | None = None):
        self.wrap, self.columns, self.keeper = wrap, columns, keeper
        self.attended = False
        """Whether an attention of ours has run."""
        self.soft: Tensor | None = None
        """[R, Q, D]: soft embeddings that a canvas is conditioned on, in the place of those that the module makes."""


class Calling(Evaluation):
    """The context that a call of a module runs in."""

    def __init__(self, module: nn.Module, call: ModuleCall):
        # without the base's own, since this runs at every call
        self.module, self.call = module, call
        self._held = []
        self._before: ModuleCall | None = None

    def __enter__(self) -> Calling:
        super().__enter__()
        self._before, _thread.call = _thread.call, self.call
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.call = self._before
        super().__exit__(*error)


def note_attention() -> None:
    """Called by our attention functions: the call under way in this thread, if any, attends through them."""
    call = _thread.call
    if call is not None:
        call.attended = True


class Wrap:
    """What one wrap puts on a module, until `release`.

    Args:
        module: a model of transformers, or of its form: with a `base_model` whose output has `last_hidden_state`.
        attention: the registered attention function that calls run with; None leaves the choice to the module.
    """

    def __init__(self, module: nn.Module, attention: str | None = None):
        self.attention = attention
        base: Any = module.base_model
        self.base: nn.Module = base
        self._parts: list[nn.Module] = []
        self.configs: dict[int, Any] = {}
        """The configs that choose for the module's parts, by their ids."""
        with _lock:
            _add_hook(self.base)
            if attention is not None:
                self._parts = [part for part in dict.fromkeys(every_part(module)) if _chooses(part)]
                own = [_add_config(part) for part in self._parts]
                self.configs = {id(config): config for config in own}

    def release(self) -> None:
        """Take off what no other wrap needs. Once."""
        with _lock:
            _remove_hook(self.base)
            for part in self._parts:
                _remove_config(part)


class SoftWrap:
    """What the wrap of a model with canvases puts on its self-conditioning, until `release`: inside a call of ours that
    has soft embeddings, the part is given these.

    Args:
        part: called with the canvas' embeddings and the soft ones.
    """

    def __init__(self, part: nn.Module):
        self.base = part
        self.configs: dict[int, Any] = {}
        self.attention = None
        with _lock:
            _add_hook(part, _feed_soft)

    def release(self) -> None:
        """Take off what no other wrap needs. Once."""
        with _lock:
            _remove_hook(self.base)


class CallConfig:
    """Replaces the config that a part of a module reads its attention from. It is that config in everything but
    the attention's name inside a call of ours. Copies and pickles of it are copies of the config."""

    def __init__(self, own: Any):
        object.__setattr__(self, "_own", own)

    @property
    def _attn_implementation(self) -> str | None:
        own, call = self._own, _thread.call
        if call is not None and call.wrap is not None and id(own) in call.wrap.configs:
            return call.wrap.attention
        return own._attn_implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._own, name)

    def __repr__(self) -> str:
        return repr(self._own)

    def __eq__(self, other: object) -> bool:
        return self._own == (other._own if type(other) is CallConfig else other)

    def __hash__(self) -> int:
        return hash(self._own)

    def __copy__(self) -> Any:
        return copy.copy(self._own)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self._own,), 0)  # the config itself, and nothing of ours


def _gather_wanted(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of base models: only the hidden states that are wanted go on to the output matrix."""
    call = _thread.call
    if call is None or call.wrap is None or call.wrap.base is not module:
        return None
    if call.keeper is not None:
        call.keeper.hidden, call.keeper = output.last_hidden_state, None
    if call.columns is not None:
        output.last_hidden_state = take_columns(output.last_hidden_state, call.columns)
        call.columns = None
    return output


def _feed_soft(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a self-conditioning: the call's soft embeddings in the place of the module's."""
    call = _thread.call
    if call is None or call.soft is None or call.wrap is None or call.wrap.base is not module:
        return None
    return args[0], call.soft


def take_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """tensor [R, Q, D] and columns [R, W] -> [R, W, D]."""
    index = columns.to(tensor.device).unsqueeze(-1).expand(-1, -1, tensor.shape[-1])
    return tensor.gather(1, index)


def every_part(module: nn.Module) -> list[nn.Module]:
    """A module and all below it; parts that are in several places several times. (`Module.modules` is several times
    slower, and this runs at every call.)"""
    found = [module]
    try:
        for part in found:
            if below := part._modules:
                found += below.values()  # type: ignore[arg-type]
    except AttributeError:  # None is registered in the place of a part
        return list(module.modules())
    return found


def _set_training(part: nn.Module, mode: bool) -> None:
    if type(part).__setattr__ is nn.Module.__setattr__:
        part.__dict__["training"] = mode  # many times faster
    else:
        part.training = mode


def _chooses(part: nn.Module) -> bool:
    """Whether a part may read its attention from a config of its own. Whole models are left out, so that their owner
    finds no config but his: these pass a mask on, and it is made already."""
    from transformers import PreTrainedConfig, PreTrainedModel

    config = part.__dict__.get("config")
    return isinstance(config, (PreTrainedConfig, CallConfig)) and not isinstance(part, PreTrainedModel)


def _add_config(part: Any) -> Any:
    """Returns the part's own config."""
    config: Any = part.config
    if type(config) is not CallConfig:
        part.config = CallConfig(config)
    else:
        config = config._own
    _configs[part] = _configs.get(part, 0) + 1
    return config


def _remove_config(part: nn.Module) -> None:
    _configs[part] -= 1
    if not _configs[part]:
        del _configs[part]
        if type(config := part.config) is CallConfig:  # else its owner gave it another one
            part.config = config._own


def _add_hook(base: nn.Module, hook: Any = _gather_wanted) -> None:
    handle, count = _hooks.get(base, (None, 0))
    if handle is None:
        before = hook is _feed_soft
        own: Any = base._forward_pre_hooks if before else base._forward_hooks
        for key in [key for key, other in own.items() if other is hook]:
            del own[key]  # the module is a copy of one that was wrapped
        handle = base.register_forward_pre_hook(hook) if before else base.register_forward_hook(hook)
    _hooks[base] = handle, count + 1


def _remove_hook(base: nn.Module) -> None:
    handle, count = _hooks[base]
    if count > 1:
        _hooks[base] = handle, count - 1
    else:
        del _hooks[base]
        handle.remove()


def _after_fork() -> None:
    """In a child process other threads' calls have no end: give their parts back, and the lock."""
    global _lock
    _lock = threading.RLock()
    if _thread.call is None:
        for part in _evaluated:
            _set_training(part, True)
        _evaluated.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
