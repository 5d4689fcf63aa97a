"""Hooks around a module's forward, in diffusers' hook registry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from diffusers.hooks.hooks import BaseState, HookRegistry, ModelHook, StateManager
from torch import nn

NAME = "paradec"
Around = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]
"""Function (forward, args, kwargs) -> output, which replaces a call of the module's forward."""


class Hook(ModelHook):
    """Hook that calls `around(forward, args, kwargs)` instead of a module's forward or compiled code, until `remove`.

    name: name in the module's hook registry; unique there. on_reset: function, called at the end of a pipeline's run.
    """

    def __init__(self, module: nn.Module, around: Around, name: str = NAME, on_reset: Callable[[], None] | None = None):
        super().__init__()
        self.module, self.name, self.on_reset = module, name, on_reset
        self.around: Around = torch.compiler.disable(around)
        self._is_stateful = on_reset is not None
        self.states = StateManager(BaseState)  # only its context is used; states are in `clock.Run`
        self.attribute = "forward" if hasattr(module, "_orig_mod") else None  # to replace; None: use the registry
        if module._compiled_call_impl is not None:
            self.attribute = "_compiled_call_impl"
        self.original_attributes = vars(module).copy()
        if self.attribute is not None:
            self.compiled = getattr(module, self.attribute)
            self.wrapper = functools.partial(self.new_forward, module)
            setattr(module, self.attribute, self.wrapper)
            return
        with beneath_offloading(module):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(self, name)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.compiled if self.attribute else self.fn_ref.original_forward, args, kwargs)

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.states.reset()
        if self.on_reset is not None:
            self.on_reset()
        return module

    @property
    def context(self) -> str | None:
        """The name of the open `cache_context`, or None."""
        context = getattr(self.states, "_context", None) or getattr(self.states, "_current_context", None)
        return getattr(context, "name", context)

    @property
    def was_compiled_later(self) -> bool:
        """Whether the module was compiled in place after it was hooked."""
        return self.attribute is None and self.module._compiled_call_impl is not None

    def remove(self) -> None:
        """Restore the module. Hooks that were registered after this one stay."""
        module = self.module
        if self.attribute is not None:
            if vars(module).get(self.attribute) is self.wrapper:
                setattr(module, self.attribute, self.compiled)
            return
        registry = vars(module).get("_diffusers_hook")
        if registry is None or registry.get_hook(self.name) is not self:
            return
        with beneath_offloading(module):
            registry.remove_hook(self.name, recurse=False)
            forward = vars(module).get("forward")
            if "forward" not in self.original_attributes and getattr(forward, "__func__", None) is type(module).forward:
                del module.forward
        if not registry.hooks and "_diffusers_hook" not in self.original_attributes:
            del module._diffusers_hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an accelerated transformer cannot be copied or pickled; call session.detach() first (save_pretrained and "
            "state_dict leave the hooks out)"
        )


class PipelineSession:
    """Base of the sessions on a pipeline. As a context manager, a session detaches at the end."""

    def report(self) -> Any:
        """Return the report of the latest or current run; `.short` is one line."""
        raise NotImplementedError

    def detach(self) -> None:
        """Restore the pipeline. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.report().short})"


@contextmanager
def beneath_offloading(module: nn.Module) -> Iterator[None]:
    """In this context, `module.forward` is the forward that an offloading hook of Hugging Face's accelerate wraps."""
    attributes = vars(module)
    outer, inner = attributes.get("forward"), attributes.get("_old_forward")
    if inner is None:
        yield
        return
    attributes["forward"] = inner
    yield
    attributes |= {"_old_forward": module.forward, "forward": outer}
