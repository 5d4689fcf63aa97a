"""A module's weights: whether they have changed, and one lock between requests and updates."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ADAPTERS = ("disable_adapters", "active_adapters", "merged_adapters")
"""Properties of peft's layers that name the adapters they apply."""


class WeightsLock:
    """The lock of one module's weights. A context manager, held by each request while it runs and taken again by the
    requests within it."""

    def __init__(self) -> None:
        self.batches: weakref.WeakSet[Any] = weakref.WeakSet()
        """Batches (`paradec.batching`), whose rows wait between steps."""
        self.updates = 0
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held while waiting: a thread that makes request after request lets an update in
        self._owner: int | None = None
        self._depth, self._version = 0, 0
        self._fingerprint: int | None = None

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._turn:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Wait until no request runs, and let none begin. name: of the model.

        Raises:
            RuntimeError: this thread is inside a request; a batch has rows that are being decoded.
        """
        with self:
            if self._depth > 1:
                raise RuntimeError(
                    f"a request of {name} that runs in this thread asks for new weights: wait for its end"
                )
            rows = sum(batch.occupied for batch in self.batches)
            if rows:
                raise RuntimeError(
                    f"{rows} rows of {name} are being decoded in a batch: take its steps until they have ended"
                )
            yield
            self.updates += 1

    def version(self, module: nn.Module) -> int:
        """How often the weights were seen to have changed."""
        fingerprint = weights_of(module)
        self._version += self._fingerprint not in (None, fingerprint)
        self._fingerprint = fingerprint
        return self._version


_locks: weakref.WeakKeyDictionary[nn.Module, WeightsLock] = weakref.WeakKeyDictionary()


def lock_of(module: nn.Module) -> WeightsLock:
    """The lock of a module's weights, the same for all models of it."""
    return _locks.setdefault(module, WeightsLock())


def weights_lock(model: Any) -> WeightsLock:
    """The lock of a model's weights; a new one for models whose weights nothing replaces."""
    return getattr(model, "weights_lock", None) or WeightsLock()


def weights_of(module: nn.Module) -> int:
    """A number that changes when a parameter is exchanged, moves, is written in place (but through its `data`), or an
    update was made, and when an adapter of peft comes, goes, is switched, merged or scaled."""
    states: list[Any] = [lock_of(module).updates]
    seen, parts = {module}, [module]
    for part in parts:  # `module.parameters()` spells every name on the way, for each request
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
        states += [_state_of(parameter) for parameter in part._parameters.values() if parameter is not None]
        if isinstance(getattr(type(part), ADAPTERS[0], None), property):
            states += [str(getattr(part, name)) for name in ADAPTERS]
            layer: Any = part
            for name in layer.other_param_names:  # rank, alpha, scaling, ... by adapter, as each kind of layer has them
                if isinstance(settings := vars(layer).get(name), dict):
                    states += [(name, adapter, _state_of(value)) for adapter, value in settings.items()]
    return hash(tuple(states))


def _state_of(value: Any) -> Any:
    """Something hashable that changes with a number, or when a tensor moves or is written."""
    if isinstance(value, Tensor):
        return _place(value), 0 if value.is_inference() else value._version
    return value if isinstance(value, int | float | str) else id(value)


def _place(parameter: Tensor) -> tuple[int, int | torch.device]:
    try:
        return parameter.data_ptr(), parameter.get_device()
    except RuntimeError:  # sharded or offloaded: no storage of its own
        return id(parameter), parameter.device
