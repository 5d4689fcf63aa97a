"""Tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3): a model over several processes.

transformers splits the weights. All ranks have the same logits, and decode rank 0's prompts and request."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
from torch import distributed

from paradec.core.checks import short_repr

FAILURE_WAIT = timedelta(seconds=10)
"""Time for which a failed rank waits for the other ranks to leave the request."""
OBJECTS = ("prefix", "generator", "streamer", "callback")
"""Fields of a request that are not sent: each rank uses its own."""
_numbers, _failures = itertools.count(), list[str]()


class TensorParallelModel:
    """Mixin with the methods of a model that is distributed over processes."""

    def check_use(self: Any, use: str, *_: Any, **__: Any) -> Any:
        """Raise ValueError for a use that does not run on all ranks together."""
        if use not in ("generate", "infill") and not use.startswith("sampler "):
            raise ValueError(f"{use} does not work with {self.facts.name}, which is spread over processes (tp_plan)")

    update_weights = partialmethod(check_use, "update_weights")
    save_pretrained = partialmethod(check_use, "save_pretrained")
    __getstate__ = partialmethod(check_use, "a copy or pickle")

    def store_bytes(self: Any, *args: Any) -> int:
        """Bytes of a key/value store for this rank's heads; arguments of `Decoder.store_bytes`."""
        shares = self.module._tp_size if splits_heads(self.module.tp_plan) else 1
        return int(super().store_bytes(*args)) // shares  # type: ignore[misc]

    def share_request(self: Any, prompts: Any, request: Any) -> tuple[Any, Any]:
        """Return rank 0's prompts and request, with this rank's `OBJECTS` and drafter. Raises ConnectionError after an
        earlier failure, RuntimeError in a second thread, SystemExit if rank 0 ends (it then sends None)."""
        if self.__dict__.setdefault("_thread", threading.get_ident()) != threading.get_ident():
            raise RuntimeError("a model that is spread over processes must be used in one thread: call order matters")
        if _failures:
            raise ConnectionError(f"this process cannot continue after {_failures[0]}: end all processes and restart")
        self.check_use("compile=True" if request.compile else "generate")
        local_fields, generator = {name: getattr(request, name) for name in OBJECTS}, request.generator
        if request.seed is None and generator is None:
            request = replace(request, seed=int(torch.randint(2**63 - 1, (1,))))
        shared = replace(request, **dict.fromkeys(OBJECTS))
        if hasattr(getattr(request.sampler, "drafter", None), "facts"):
            local_fields["sampler"], shared = request.sampler, replace(shared, sampler="threshold")  # placeholder
        message = (prompts, shared, None if generator is None else generator.get_state())
        if (message := exchange(message if distributed.get_rank() == 0 else None)[0]) is None:
            raise SystemExit
        prompts, request, state = message
        if state is not None:
            local_fields["generator"] = generator or torch.Generator(self.device)
            local_fields["generator"].set_state(state)
        return prompts, replace(request, **local_fields, progress=request.progress and distributed.get_rank() == 0)


def exchange(value: Any, wait: timedelta | None = None) -> list[Any]:
    """Send a value to all ranks, and return the values of all ranks. All ranks must make these calls in the same order.
    Raises RuntimeError if a rank is late, or without a distributed store."""
    store, rank, number = distributed.distributed_c10d._get_default_store(), distributed.get_rank(), next(_numbers)
    keys = [f"paradec/{number}/{rank_index}" for rank_index in range(distributed.get_world_size())]
    store.set(keys[rank], pickle.dumps(value))  # type: ignore[arg-type]
    store.wait(keys, *[] if wait is None else [wait])
    store.delete_key(f"paradec/{number - 1}/{rank}")  # all ranks are in this call, so they have read the previous value
    return [pickle.loads(store.get(key)) for key in keys]


@contextmanager
def fail_together() -> Iterator[None]:
    """Context that all ranks leave together. Raises ConnectionError with the error of another rank that failed."""
    failure, failures = None, list[str]()
    try:
        yield
    except BaseException as error:
        failure = error
    line = "" if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    try:
        if distributed.is_initialized():
            lines = exchange(line, None if failure is None else FAILURE_WAIT)
            failures = [f"rank {rank} failed: {text}" for rank, text in enumerate(lines) if text not in ("", line)]
    except RuntimeError as error:  # other ranks are in the middle of a call
        failure = failure or error
        _failures.append(line or str(error))
    if isinstance(failure, (RuntimeError, KeyboardInterrupt)):  # this rank may be in the middle of a call
        _failures.append(line)
    if failures and (failure is None or isinstance(failure, RuntimeError)):
        raise ConnectionError(failures[0]) from failure
    if failure is not None:
        raise failure


def load_on_all_ranks(load: Callable[[], Any]) -> Any:
    """Load a part of a model on each rank. Raises ConnectionError if another rank failed, ValueError if ranks read
    different checkpoints."""
    if not distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group(timeout=timedelta(hours=2))  # weights may take long
    with fail_together():
        model = join_ranks(load())
    if distributed.is_initialized():
        checkpoints = exchange(
            repr((replace(model.facts, name=""), model.module.config.to_dict() | {"_name_or_path": ""}))
        )
        if (different_rank := next((rank for rank, text in enumerate(checkpoints) if text != checkpoints[0]), 0)) > 0:
            raise ValueError(
                f"rank {different_rank} reads another checkpoint than rank 0: all processes need the same files"
            )
    return model


def join_ranks(model: Any) -> Any:
    """Return the model. If its module is distributed over ranks, it gets the methods of `TensorParallelModel`."""
    if (getattr(model.module, "_tp_size", None) or 1) > 1 and not isinstance(model, TensorParallelModel):
        model.__class__ = type(type(model).__name__, (TensorParallelModel, type(model)), {})
    return model


def splits_heads(plan: Any) -> bool:
    """Whether a plan divides the attention heads among the ranks."""
    return any(
        name.endswith(("k_proj", "qkv_proj", "_key_value")) and style == "colwise" for name, style in plan.items()
    )


def distributed_config(plan: Any, config: Any, name: str) -> Any:
    """Build transformers' `DistributedConfig` for a plan and a model's configuration. Raises ValueError outside
    torchrun, for a model without a plan, or for heads that cannot be divided among the processes."""
    from transformers.distributed import DistributedConfig

    text_config, description = config.get_text_config(), f"tp_plan={short_repr(plan)} for {name!r}"
    size = distributed.get_world_size() if distributed.is_initialized() else int(os.environ.get("WORLD_SIZE", "0"))
    if size == 0:
        raise ValueError(f"{description} needs several processes: start them with torchrun --nproc-per-node N")
    styles = (text_config.base_model_tp_plan or {}) | ({} if plan == "auto" else plan)
    if not styles:
        raise ValueError(f"{description} does not work: transformers has no plan for {text_config.model_type!r}")
    for field in ("num_key_value_heads", "num_attention_heads") if splits_heads(styles) else ():
        if (heads := getattr(text_config, field, None) or size) % size:
            raise ValueError(
                f"{description} cannot divide {field}={heads} among {size} processes: give a number that divides it"
            )
    return DistributedConfig(tp_plan=plan, tp_size=size)
