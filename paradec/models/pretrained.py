"""Reading a module of transformers from a checkpoint, strictly: what all loaders of language share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paradec.models.checkpoint import PROGRESS_BAR_FROM, WEIGHTS, CheckpointError, fetch, listed
from paradec.models.tensor_parallel import distributed_config


def read_module(
    cls: Any,
    source: str,
    revision: str | None,
    *,
    gguf_file: str | None = None,
    computed: Sequence[str] = (),
    beside: tuple[str, ...] = (),
    tp_plan: Any = None,
    **given: Any,
) -> Any:
    """`cls.from_pretrained`, where no weight may be missing, left over or of another size.

    Args:
        computed: how the names of stored tensors end that modules compute for themselves: these may be left over.
        beside: how the names of stored tensors begin that others read: these may be left over, too.
        tp_plan: as in `paradec.load`: this process reads a part of each matrix.
        given: arguments of `from_pretrained`; None leaves one out.

    Raises:
        CheckpointError: weights that cannot be read, or that do not fit. ImportError, ValueError: as transformers has
            them, of arguments that it cannot follow.
    """
    from safetensors import SafetensorError

    files = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    given = {name: value for name, value in given.items() if value is not None} | files
    if tp_plan is not None:
        given["distributed_config"] = distributed_config(tp_plan, given["config"], source)
    try:
        with quietly(source, gguf_file or WEIGHTS, revision):
            # strict below: sizes that differ are reported by name instead of raised by the first
            module, info = cls.from_pretrained(
                source, revision=revision, output_loading_info=True, ignore_mismatched_sizes=True, **given
            )
    except (SafetensorError, OSError, KeyError, RuntimeError, AttributeError, TypeError, IndexError) as error:
        raise CheckpointError(f"the weights of {source!r} cannot be read: {reason(error)}") from error
    problems = {
        kind: [str(key[0] if isinstance(key, tuple) else key) for key in info[f"{kind}_keys"]]
        for kind in ("missing", "unexpected", "mismatched")
    }
    problems["unexpected"] = [
        name for name in problems["unexpected"] if not name.endswith(tuple(computed)) and not name.startswith(beside)
    ]
    if any(problems.values()):
        raise CheckpointError(f"the weights of {source!r} do not fit config.json: {listed(problems)}")
    return module


@contextmanager
def quietly(source: str, weights: str, revision: str | None) -> Iterator[None]:
    """Without transformers' table of keys, which is replaced by an error, and without a bar for what is soon loaded."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    found = fetch(source, weights, revision)
    if found is not None and found.stat().st_size < PROGRESS_BAR_FROM:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """The first line of an error."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
