"""Lock between requests and weight updates, and a fingerprint of weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

ADAPTERS = ("disable_adapters", "active_adapters", "merged_adapters")
"""Properties of peft's layers that name the applied adapters."""


class WeightsLock:
    """Re-entrant lock of one module's weights. A request holds it while it runs, a batch only during a step."""

    def __init__(self) -> None:
        self.batches: weakref.WeakSet[Any] = weakref.WeakSet()
        """Batches (`paradec.batching`) that decode with the weights."""
        self.updates = 0
        self._lock = threading.Lock()
        # one thread waits at a time, so that a stream of requests cannot starve an update
        self._queue = threading.Lock()
        self._owner: int | None = None
        self._depth, self._version = 0, 0
        self._fingerprint: int | None = None

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._queue:
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
        """Wait until no request runs, and block new requests. Raises RuntimeError inside a request, or while a batch
        has rows."""
        with self:
            if self._depth > 1:
                raise RuntimeError(f"a request of {name} runs in this thread: update the weights after it has ended")
            if rows := sum(batch.occupied for batch in self.batches):
                raise RuntimeError(
                    f"{rows} rows of {name} are being decoded in a batch: take its steps until they have ended"
                )
            yield
            self.updates += 1

    def version(self, module: nn.Module) -> int:
        """Return the version of the weights: a number that increases if they changed since the last call."""
        fingerprint = fingerprint_weights(module)
        self._version += self._fingerprint not in (None, fingerprint)
        self._fingerprint = fingerprint
        return self._version


_locks: weakref.WeakKeyDictionary[nn.Module, WeightsLock] = weakref.WeakKeyDictionary()


def get_lock(module: nn.Module) -> WeightsLock:
    return _locks.setdefault(module, WeightsLock())


def weights_lock(model: Any) -> WeightsLock:
    """Return the lock of a model's weights; a new lock for models without one."""
    return getattr(model, "weights_lock", None) or WeightsLock()


def fingerprint_weights(module: nn.Module) -> int:
    """Compute a fingerprint of the weights. It changes with every `WeightsLock.update`; when a parameter is exchanged,
    moved or written in place (except through its `data`); and when a peft adapter is added, removed, switched, merged
    or scaled."""
    states: list[Any] = [get_lock(module).updates]
    seen, parts = {module}, [module]
    for part in parts:  # `module.parameters()` is slower, since it builds every parameter's name
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
        states += [_fingerprint_value(parameter) for parameter in part._parameters.values() if parameter is not None]
        if isinstance(getattr(type(part), ADAPTERS[0], None), property):
            states += [str(getattr(part, name)) for name in ADAPTERS]
            layer: Any = part
            for name in layer.other_param_names:  # rank, alpha, scaling, ... by adapter; the list depends on the type
                if isinstance(settings := vars(layer).get(name), dict):
                    states += [(name, adapter, _fingerprint_value(value)) for adapter, value in settings.items()]
    return hash(tuple(states))


def _fingerprint_value(value: Any) -> Any:
    """Return a hashable value that changes when a number changes, or when a tensor is moved or written."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str) else id(value)
    write_count = 0 if value.is_inference() else value._version
    try:
        return value.data_ptr(), value.get_device(), write_count
    except RuntimeError:  # sharded or offloaded: no storage
        return id(value), value.device, write_count
