"""What a module follows while one of our calls runs on it: its attention, its modes, and the columns that are wanted.

A module may carry several wraps (`paradec.models.wraps`), and its owner goes on using it, in other threads as well. So
a wrap changes nothing that shows: what it puts on a module asks whether the thread that runs it is inside a call of
ours, and otherwise does nothing.

The thread's call is kept in a `threading.local`, not in a context variable: that would pass to other threads with their
context, and torch.compile cannot trace it.
"""

from __future__ import annotations

import copy
import operator
import os
import threading
from typing import Any

from torch import Tensor, nn

from paradec.core.family_queries import CausalQuery
from paradec.core.query import Query
from paradec.models import modes


class _Thread(threading.local):
    def __init__(self) -> None:  # once per thread; torch.compile guards no default of the class
        self.call: ModuleCall | None = None


thread = _Thread()


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
        with modes.lock:
            parts = every_part(self.module)
            if [part for part in parts if part.training] or modes.needed:
                self._held = modes.evaluate(parts)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._held:
            modes.give_back(self._held)
            self._held = []


class ConfigStandIn:
    """A config in everything but what a subclass says otherwise. Copies and pickles of it are copies of the config.

    Args:
        own: the config.
    """

    def __init__(self, own: Any):
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._own, name)

    def __repr__(self) -> str:
        return repr(self._own)

    def __eq__(self, other: object) -> bool:
        return self._own == (other._own if isinstance(other, ConfigStandIn) else other)

    def __hash__(self) -> int:
        return hash(self._own)

    def __copy__(self) -> Any:
        return copy.copy(self._own)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self._own,), 0)  # the config itself, and nothing of ours


class ModuleCall:
    """What one of our calls asks of what was put on the module, and what that answers.

    (No context itself: torch.compile loses what compiled code writes to a context.)

    Args:
        wrap: what was put on the module (`paradec.models.wraps`); None for modules that nothing was put on.
        columns: [R, W] int64, the hidden states that the output matrix shall see; None is all.
        keeper: the query that the hidden states are left in.
    """

    def __init__(self, wrap: Any = None, columns: Tensor | None = None, keeper: CausalQuery | None = None):
        self.wrap, self.columns, self.keeper = wrap, columns, keeper
        self.attended = False
        """Whether an attention of ours has run."""
        self.blocks: tuple[Tensor, Tensor | None] | None = None
        """[R, Q] int64 and bool, for experts that are chosen for blocks: those of the columns, and which are real."""
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
        self._before, thread.call = thread.call, self.call
        return self

    def __exit__(self, *error: Any) -> None:
        thread.call = self._before
        super().__exit__(*error)


def note_attention() -> None:
    """Called by our attention functions: the call under way in this thread, if any, attends through them."""
    call = thread.call
    if call is not None:
        call.attended = True


class CallConfig(ConfigStandIn):
    """Replaces the config that a part of a module reads its attention from. It is that config in everything but
    the attention's name inside a call of ours."""

    @property
    def _attn_implementation(self) -> str | None:
        own, call = self._own, thread.call
        if call is not None and call.wrap is not None and id(own) in call.wrap.configs:
            return call.wrap.attention
        return own._attn_implementation


def gather_wanted(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of base models: only the hidden states that are wanted go on to the output matrix."""
    call = thread.call
    if call is None or call.wrap is None or call.wrap.base is not module:
        return None
    if call.keeper is not None:
        call.keeper.hidden, call.keeper = output.last_hidden_state, None
    if call.columns is not None:
        output.last_hidden_state = take_columns(output.last_hidden_state, call.columns)
        call.columns = None
    return output


def feed_soft(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a self-conditioning: the call's soft embeddings in the place of the module's."""
    call = thread.call
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: modes.after_fork(thread.call is None))


def with_gradients(model: Any, query: Query) -> Tensor:
    """What a call of a model answers, in evaluation mode, with gradients where they are enabled."""
    call = ModuleCall(model._wrap, query.wanted)
    with Calling(model.module, call):
        logits: Tensor = model._logits(query, None, call)
    return logits if call.columns is None else take_columns(logits, call.columns)
