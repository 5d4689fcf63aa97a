"""What wraps put on modules. Wraps of one module are counted, and the last that comes off takes it along."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from paradec.models import modes
from paradec.models.calls import CallConfig, every_part, feed_soft, gather_wanted

_configs: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Parts with a `CallConfig`, and how many wraps need it."""
_hooks: weakref.WeakKeyDictionary[nn.Module, tuple[Any, int]] = weakref.WeakKeyDictionary()
"""Parts with a hook of ours, base models that gather hidden states or self-conditionings: its handle, and how many
wraps need it."""


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
        with modes.lock:
            _add_hook(self.base)
            if attention is not None:
                self._parts = [part for part in dict.fromkeys(every_part(module)) if _chooses(part)]
                own = [_add_config(part) for part in self._parts]
                self.configs = {id(config): config for config in own}

    def release(self) -> None:
        """Take off what no other wrap needs. Once."""
        with modes.lock:
            _remove_hook(self.base)
            for part in self._parts:
                _remove_config(part)


class SoftWrap(Wrap):
    """What the wrap of a model with canvases puts on its self-conditioning, until `release`: inside a call of ours that
    has soft embeddings, the part is given these.

    Args:
        part: called with the canvas' embeddings and the soft ones.
    """

    def __init__(self, part: nn.Module):
        self.base, self.attention = part, None
        self._parts, self.configs = [], {}
        with modes.lock:
            _add_hook(part, feed_soft)


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


def _add_hook(base: nn.Module, hook: Any = gather_wanted) -> None:
    handle, count = _hooks.get(base, (None, 0))
    if handle is None:
        before = hook is feed_soft
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
