"""One model over several processes (tensor parallel): each holds some heads of every layer, and a part of its matrices.

transformers cuts the weights by the plan of the class (`base_model_tp_plan`) and sums or gathers where layers need it,
as in Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3. The output matrix is cut by tokens and its logits are
gathered, so that every process ("rank") has the same logits, draws the same tokens by the same counters and keeps keys
and values of its own heads.

For that all ranks must ask for the same. They meet before each request, in the store of the process group, and go on
once it is known that nobody was given anything else, or has failed: a different prompt is an error on every rank, and
no wait without end in the middle of a layer.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paradec.core.checks import check_number, shown

__all__ = ["Plan", "RankError", "Ranks", "asked", "of_module", "processes"]

DEFAULT_TIMEOUT = 600.0
"""Seconds that a rank waits for the others in a request."""
LOAD_TIMEOUT = 7200.0
"""Seconds that a rank waits for the others to have read their weights."""
LOOK = 1.0
"""Seconds between two looks whether a rank that is waited for has failed."""
SHORTEST, LONGEST = 0.0005, 0.02
"""Seconds between two looks whether it has come."""
KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""How the names of matrices end that make attention's keys."""
LIVE = ("streamer", "callback", "prefix", "generator", "progress", "trace", "seed")
"""Fields of a request that a rank may have by itself, or that are compared otherwise."""

Result = TypeVar("Result")


class RankError(ConnectionError):
    """A process of a model that is spread over several has ended, waits elsewhere or has other tokens. The model cannot
    be used any more: end all processes, and start again."""


class Ranks:
    """The processes that a model is spread over, as one of them sees them.

    Args:
        module: a module of transformers that was read with a plan.
        timeout: seconds that others are waited for; None is `DEFAULT_TIMEOUT`.
    """

    def __init__(self, module: nn.Module, timeout: float | None = None):
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        self.heads = cuts_heads(getattr(module, "_tp_plan", None) or {})
        """Whether attention's heads are cut, so that a rank keeps keys and values of its own ones alone."""
        self.calls = 0
        """Model calls that have begun here."""
        self.broken: str | None = None
        """Why this rank left a call in its middle, where it did: the others may wait there."""
        self._board = Board(_next(1))
        self._answers = hashlib.blake2b(digest_size=16)
        self._thread: weakref.ref[threading.Thread] | None = None

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    # ---- one call ---------------------------------------------------------------------------------------------------

    def together(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        """A model call, which all ranks make.

        Raises:
            RankError: another rank has ended, or did not come within the timeout. RuntimeError: a second thread.
        """
        self._check_usable()
        self.calls += 1
        try:
            return compute(*args)
        except BaseException as error:
            self._leave(error)
            if is_of_the_group(error):
                why = self._board.failure(self.rank, self.size) or _line(error)
                raise RankError(f"{self!r} lost the others in model call {self.calls}: {why}") from error
            raise

    def _leave(self, error: BaseException) -> None:
        """Remember and say that this rank has left a call in its middle."""
        self.broken = f"call {self.calls} of the model ended in its middle: {_line(error)}"
        if not is_of_the_group(error):
            self._board.leave(self.rank, error, for_good=True)

    @contextmanager
    def request(self) -> Iterator[None]:
        """What decodes a request: an error between two model calls is left for those who will wait for this rank."""
        try:
            yield
        except BaseException as error:
            if self.broken is None:
                self._board.leave(self.rank, error, for_good=False)
            raise

    def _check_usable(self) -> None:
        """Raises RankError: this rank has left a call. RuntimeError: another thread uses the model."""
        if self.broken is not None:
            raise RankError(f"{self!r} cannot go on: {self.broken}; end all processes and start again")
        thread = threading.current_thread()
        owner = None if self._thread is None else self._thread()
        if owner is None or not owner.is_alive():
            self._thread = weakref.ref(thread)
        elif owner is not thread:
            raise RuntimeError(
                f"a model spread over processes is used by one thread, here {owner.name!r}, not {thread.name!r}: its "
                "calls must have one order on all ranks"
            )

    # ---- meeting ----------------------------------------------------------------------------------------------------

    def meet(self, what: str, parts: Mapping[str, str] | None = None, value: Any = None) -> list[Any]:
        """Wait for all ranks, and see that they have come for the same.

        Args:
            what: the occasion, for messages.
            parts: what must be the same on all ranks, by name: texts, or digests of what is long.
            value: anything that JSON can hold.

        Returns:
            The values of all ranks, by rank.

        Raises:
            ValueError: a part that is another one elsewhere; all ranks raise it. RankError: a rank that has failed, did
                not come within the timeout, or has made other calls before. RuntimeError: a second thread.
        """
        self._check_usable()
        return self._met(what, parts, value, self.timeout)

    def _met(self, what: str, parts: Mapping[str, str] | None, value: Any, timeout: float) -> list[Any]:
        mine = {"what": what, "parts": dict(parts or {}), "calls": self.calls, "value": value}
        mine["answers"] = self._answers.hexdigest()
        found = self._board.exchange(what, mine, self.rank, self.size, timeout)
        first = found[0]
        for rank, each in enumerate(found):
            if each["what"] != what or each["calls"] != self.calls:
                raise RankError(
                    f"ranks are out of step: rank {self.rank} came to {what} after {self.calls} model calls, rank "
                    f"{rank} to {each['what']} after {each['calls']}; end all processes and start again"
                )
        for rank, each in enumerate(found):
            if each["answers"] != first["answers"]:
                raise RankError(f"rank {rank} has decoded other tokens than rank 0; end all processes and start again")
        for rank, each in enumerate(found):
            different = [name for name, text in each["parts"].items() if first["parts"].get(name) != text]
            if different or each["parts"].keys() != first["parts"].keys():
                names = ", ".join(different) or "arguments"
                raise ValueError(
                    f"rank {rank} was given another {names} than rank 0 for {what}: a model spread over processes "
                    "needs the same on all of them"
                )
        return [each["value"] for each in found]

    def first(self, what: str, value: Any) -> Any:
        """Rank 0's value of something that each rank has by chance."""
        return self.meet(what, value=value)[0]

    def least(self, what: str, value: int) -> int:
        """The least of all ranks' values."""
        return min(self.meet(what, value=value))

    def check_all(self, what: str, error: Exception | None) -> None:
        """Raise ValueError on all ranks where one has an error, which says why in one line."""
        for rank, text in enumerate(self.meet(what, value=None if error is None else _line(error))):
            if text is not None:
                raise ValueError(text if rank == self.rank else f"rank {rank}: {text}") from error

    def note(self, ids: Tensor) -> None:
        """Remember tokens that were decoded: the next meeting compares them."""
        self._answers.update(ids.cpu().contiguous().numpy().tobytes() + b";")

    def agreed(self, what: str, request: Any, prompts: Any = None) -> Any:
        """A request with what it leaves to chance decided as on rank 0, once all ranks have it, and these prompts.

        Args:
            what: as in `meet`.
            request: a `paradec.Request`. prompts: `paradec.core.prompts.Prompts`, or None where they come later.

        Raises:
            as `meet`.
        """
        parts = {"request": digest(_plain_request(request))}
        if prompts is not None:
            parts["prompt"] = digest([prompts.rows, prompts.before, prompts.starts])
        seed = None if request.seed is None else [int(entry) for entry in _listed(request.seed)]
        parts["seed"] = "drawn" if seed is None else digest(seed)
        if request.prefix is not None:
            parts["prefix"] = digest(request.prefix.tokens)
        generator = request.generator
        if generator is not None:
            parts["generator"] = digest(generator.get_state().tolist())
        if seed is not None or (generator is not None and request.rng == "reference"):
            self.meet(what, parts)
            return request
        device = None if generator is None else generator.device
        drawn = int(torch.randint(2**63 - 1, (1,), generator=generator, device=device))
        drawn = self.meet(what, parts, drawn)[0]
        return replace(request, seed=drawn, generator=None)


class Board:
    """Short texts that ranks leave for each other in the store of the process group.

    Args:
        name: of the model, the same on all ranks.
    """

    def __init__(self, name: str):
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self._store = PrefixStore(f"paradec/{name}", _get_default_store())
        self._number = 0

    def exchange(self, what: str, mine: Any, rank: int, size: int, timeout: float) -> list[Any]:
        """What all ranks have brought, by rank.

        Raises:
            RankError: one has failed, or did not come within `timeout` seconds.
        """
        number, self._number = self._number, self._number + 1
        keys = [f"{number}/{each}" for each in range(size)]
        self._put(keys[rank], mine)
        deadline = time.monotonic() + timeout
        while not self._wait(keys, min(LOOK, max(0.01, deadline - time.monotonic()))):
            late = time.monotonic() >= deadline
            if (failure := self.failure(rank, size, for_good=not late, number=number)) is not None:
                raise RankError(f"rank {rank} waits in vain for {what}: {failure}")
            if late:
                missing = [str(each) for each, key in enumerate(keys) if not self._store.check([key])]
                raise RankError(
                    f"rank {rank} waited {timeout:g} s for {what}, and rank {', '.join(missing)} did not come: it may "
                    "have ended, or been given something else"
                )
        found = [json.loads(self._store.get(key)) for key in keys]
        if number:  # all have read the one before, since all have come to this one
            self._store.delete_key(f"{number - 1}/{rank}")
        return found

    def leave(self, rank: int, error: BaseException, for_good: bool) -> None:
        """Record that this rank has failed, and whether it will come to no meeting again. Never raises: another
        error is under way."""
        try:
            self._put(f"left/{rank}", {"why": _line(error), "for_good": for_good, "number": self._number})
        except Exception:
            return

    def failure(self, rank: int, size: int, for_good: bool = False, number: int | None = None) -> str | None:
        """Which other rank has said that it failed since the meeting before, and why.

        Args:
            for_good: leave out those that may come again. number: of the meeting; None is the next one.
        """
        number = self._number if number is None else number
        try:
            for other in range(size):
                if other == rank or not self._store.check([f"left/{other}"]):
                    continue
                left = json.loads(self._store.get(f"left/{other}"))
                if left["for_good"] or (not for_good and left["number"] >= number):
                    return f"rank {other} failed: {left['why']}"
        except RuntimeError:
            return "the store of the process group is gone, and with it the process that holds it"
        return None

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all keys are there, within so many seconds. (The store's own `wait` logs what it waits for.)"""
        deadline, pause = time.monotonic() + seconds, SHORTEST
        try:
            while not self._store.check(list(keys)):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
        except RuntimeError as error:
            raise RankError(f"the store of the process group cannot be reached: {_line(error)}") from error
        return True


# ---- loading --------------------------------------------------------------------------------------------------------


def processes() -> int:
    """How many processes this one was started among (torchrun and its kin say so), 1 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    if "RANK" not in os.environ:
        return 1
    try:
        return max(1, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError:
        return 1


def asked(styles: Any, timeout: Any, others: Mapping[str, Any]) -> Plan | None:
    """What `load` was told of tensor parallelism; None for nothing.

    Args:
        styles, timeout: `tp_plan` and `tp_timeout` as given. others: arguments of `load` that go with no plan, by name.

    Raises:
        ValueError: a plan or a timeout that cannot be followed.
    """
    check_number("tp_timeout", timeout, low=0, high=86400, none=True, open_low=True)
    if styles is None:
        if timeout is not None:
            raise ValueError(f"tp_timeout={shown(timeout)} goes with tp_plan='auto'")
        return None
    named = isinstance(styles, dict) and all(isinstance(text, str) for pair in styles.items() for text in pair)
    if styles != "auto" and not (named and styles):
        raise ValueError(f"tp_plan={shown(styles)} must be 'auto' or a mapping of module names to transformers' styles")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"tp_plan={shown(styles)} does not go with {name}={shown(value)}; give one of them")
    return Plan(styles, DEFAULT_TIMEOUT if timeout is None else float(timeout))


class Plan:
    """How one checkpoint is read by several processes.

    Args:
        styles: "auto", or transformers' styles by the names of modules. timeout: as in `Ranks`.
    """

    def __init__(self, styles: Any, timeout: float):
        self.styles, self.timeout = styles, timeout
        self._board: Board | None = None

    def read(self, read: Callable[[], Any]) -> Any:
        """Read a model of which each process gets its part, and wait for the others.

        Args:
            read: gives the model; called in every process, once.

        Raises:
            RankError: another process could not read its part. ValueError: another one has read something else. And
                what `read` raises.
        """
        if processes() == 1:
            return read()
        start_group(self.timeout)
        self._board = Board(_next(0))
        try:
            model = read()
            ranks = of_module(model.module)
            if ranks is None:
                raise ValueError(f"{model.facts.name} was read whole: nothing in it follows tp_plan")
            ranks.timeout = self.timeout
            facts = repr(replace(model.facts, name="model"))  # folders may be called otherwise elsewhere
            self._meet("the model", digest([facts, model.default_max_new_tokens, _shapes(model.module)]))
        except BaseException as error:
            self._board.leave(torch.distributed.get_rank(), error, for_good=True)
            raise
        return model

    def layout(self, config: Any, name: str) -> Any:
        """What `from_pretrained` takes for it: transformers' `DistributedConfig`. Called once all has been checked that
        can be without the weights.

        Args:
            config: of the model, of transformers. name: for messages.

        Raises:
            ValueError: the process is alone, transformers has no plan for it, or its heads cannot be shared out. As
                `read`.
        """
        from transformers.distributed import DistributedConfig

        size = processes()
        if size == 1 and "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"tp_plan={shown(self.styles)} spreads {name!r} over processes, and this one is alone: start them with "
                "torchrun --nproc-per-node N, or leave tp_plan out"
            )
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        known = dict(getattr(text, "base_model_tp_plan", None) or {})
        if not known and self.styles == "auto":
            raise ValueError(
                f"tp_plan='auto' does not work for {name!r}: transformers has no plan for {text.model_type!r}"
            )
        if cuts_heads(known | (self.styles if isinstance(self.styles, dict) else {})):
            for field in ("num_key_value_heads", "num_attention_heads"):
                heads = getattr(text, field, None)
                if heads is not None and heads % size:
                    fitting = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
                    raise ValueError(
                        f"tp_plan={shown(self.styles)} cannot share out {field}={heads} of {name!r} among {size} "
                        f"processes; it can among {fitting}"
                    )
        if self._board is not None:
            said = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
            self._meet("the weights", digest([said, self.styles]))
        return DistributedConfig(tp_plan=self.styles, tp_size=size)

    def _meet(self, what: str, mine: str) -> None:
        assert self._board is not None
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        found = self._board.exchange(what, mine, rank, size, LOAD_TIMEOUT)
        for other, each in enumerate(found):
            if each != found[0]:
                raise ValueError(
                    f"rank {other} reads another checkpoint than rank 0: a model spread over processes needs the same "
                    "files on all of them"
                )


def start_group(timeout: float) -> None:
    """Begin the process group, where the program has not: NCCL on GPUs, each process with its own, else gloo. One that
    was begun here waits so long from now on."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    wait = timedelta(seconds=timeout)
    if dist.is_initialized():
        if _begun and dist.group.WORLD is _begun[-1]():
            _set_pg_timeout(wait)
        return
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != "cuda":
        dist.init_process_group("gloo", timeout=wait)
        _begun.append(weakref.ref(dist.group.WORLD))
        return
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    dist.init_process_group("nccl", timeout=wait, device_id=torch.device("cuda", index))
    _begun.append(weakref.ref(dist.group.WORLD))


def cuts_heads(plan: Mapping[str, str]) -> bool:
    """Whether a plan gives each rank some of attention's heads."""
    return any(name.rsplit(".", 1)[-1] in KEYS and style == "colwise" for name, style in plan.items())


_known: weakref.WeakKeyDictionary[nn.Module, Ranks] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_begun: list[Any] = []
"""The process groups that were begun here."""
_made = [0, 0]
"""How often a model was read, and how many modules were met since: the same on all ranks, also where one has failed."""


def of_module(module: nn.Module) -> Ranks | None:
    """The ranks that a module is spread over, the same for all its wraps; None for one that is whole.

    Raises:
        ValueError: it is spread over some of the processes, and the others have more of it, or another copy.
    """
    size = getattr(module, "_tp_size", None) or 1
    if size < 2:
        return None
    if size != processes():
        raise ValueError(
            f"{type(module).__name__} is spread over {size} of {processes()} processes (tp_size): spread it over all, "
            "or start a program for each copy"
        )
    with _lock:
        found = _known.get(module)
        if found is None:
            found = _known[module] = Ranks(module)
    return found


def _next(kind: int) -> str:
    """A name for what ranks make in the same order: 0 for a model that is read, 1 for a module that is met."""
    _made[kind:] = [_made[kind] + 1, *[0] * (1 - kind)]
    return ".".join(map(str, _made))


def is_of_the_group(error: BaseException) -> bool:
    """Whether an exception says that the other processes cannot be reached, or were waited for too long."""
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text))


def whole(weight: Any) -> Any:
    """A weight that may be spread, as one tensor; all ranks ask for it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def digest(data: Any) -> str:
    """A short text that represents data."""
    return hashlib.blake2b(json.dumps(data, default=str, sort_keys=True).encode(), digest_size=16).hexdigest()


def _shapes(module: nn.Module) -> list[Any]:
    return [[name, list(weight.shape), str(weight.dtype)] for name, weight in module.named_parameters()]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


def _plain_request(request: Any) -> dict[str, Any]:
    """What two ranks' requests are compared by."""
    return {name: _plain(value) for name, value in request.changes().items() if name not in LIVE}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def _line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
