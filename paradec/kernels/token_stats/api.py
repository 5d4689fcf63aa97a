"""`token_stats`: statistics of any logits, with checked arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_number, check_temperature, short_repr
from paradec.kernels import has_triton, interpreting
from paradec.kernels.token_stats.draws import TokenDraws
from paradec.kernels.token_stats.read import IN_ONE_READ, read_stats
from paradec.kernels.token_stats.reference import FIELDS, TokenStats

PATHS = ("float64", "chunked", "triton")


def token_stats(
    logits: Tensor,
    *,
    fields: Sequence[str] | None = None,
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: TokenDraws | None = None,
    path: str | None = None,
) -> TokenStats:
    """Statistics of each row's distribution softmax(logits / temperature).

    Args:
        logits: [..., V] for a vocabulary of V tokens, of any float dtype and strides; -inf excludes a token.
        fields: names from `FIELDS`; None: all. `token` and `prob` are always computed.
        temperature: divides the logits for all fields except `gap`.
        ids: int64 tokens for `ids_prob`, one or K per row: [...] or [..., K], from 0 to V - 1 (unchecked on GPUs).
        draws: random numbers for `sample`; None: no sample. path: one of `PATHS`; None uses `path_for`.

    Raises TypeError if logits are not a float tensor, ValueError for any other wrong argument or an unavailable path.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(
            f"logits must be a float tensor [..., V], not {short_repr(getattr(logits, 'dtype', type(logits)))}"
        )
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no tokens; expected [..., V]")
    wanted_fields = frozenset(FIELDS) if fields is None else frozenset(fields)
    for name in wanted_fields:
        check_choice("fields", name, FIELDS)
    check_number("temperature", temperature, low=1e-6, high=1e6)
    if ids is not None:
        _check_ids(ids, logits)
    if draws is not None:
        _check_draws(draws, logits)
    if path is not None:
        check_choice("path", path, PATHS)
        if path == "triton":
            _check_triton(logits, wanted_fields)
    return read_stats(logits, wanted_fields, float(temperature), ids, draws, path)


def _check_ids(ids: Tensor, logits: Tensor) -> None:
    lead = logits.shape[:-1]
    if ids.dtype != torch.int64 or ids.shape[: len(lead)] != lead or ids.dim() > logits.dim():
        raise ValueError(
            f"ids must be int64 of shape {tuple(lead)} or {(*lead, 'K')}, not {ids.dtype} {tuple(ids.shape)}"
        )
    if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
        raise ValueError(f"ids from {int(ids.min())} to {int(ids.max())} must be from 0 to {logits.shape[-1] - 1}")


def _check_draws(draws: TokenDraws, logits: Tensor) -> None:
    if logits.dim() not in (2, 3):
        raise ValueError(f"draws take logits [R, V] or [R, W, V], not {tuple(logits.shape)}")
    rows, lead = logits.shape[0], tuple(logits.shape[:-1])
    for name, shape in (("keys", (rows, 2)), ("steps", (rows,)), ("positions", lead)):
        tensor = getattr(draws, name)
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
            raise ValueError(f"draws.{name} must be int64 {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
    check_temperature("draws.temperature", draws.temperature)
    if draws.temperature == 0:
        raise ValueError("draws.temperature=0 must be above 0: leave draws out; the likeliest token is `token`")


def _check_triton(logits: Tensor, fields: frozenset[str]) -> None:
    unsupported = sorted(fields - IN_ONE_READ)
    if unsupported:
        raise ValueError(f"path='triton' has no {unsupported[0]}, which needs a second read; use path='chunked'")
    if logits.dtype == torch.float64:
        raise ValueError("path='triton' computes in float32; for float64 logits use path='float64'")
    if not logits.is_cuda and not interpreting():
        raise ValueError(f"path='triton' takes logits on a CUDA device, not on {logits.device}; use path='chunked'")
    if not has_triton():
        raise ValueError("path='triton' needs the package triton; install it, or use path='chunked'")
