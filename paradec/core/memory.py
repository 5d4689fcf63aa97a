"""Tensors that samplers keep between steps, and a check of device memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice
from paradec.core.rows import RowLayout, resize_axis


@dataclass(frozen=True)
class MemorySpec:
    """Declaration of a tensor that a sampler keeps between steps.

    dims: the dimensions after the rows, each an int or a name: "position" (positions of the canvas), "window"
        (positions of the widest open block), "vocab", "hidden" (width of hidden states, for models with canvases),
        "slot" (positions of a window of drafts), "steps" (steps of a block).
    dtype: None is the model's dtype, for distributions or soft embeddings. fill: initial value.
    reset: "block" refills a row's values when the row opens a block; "sequence" never refills them within a request."""

    dims: tuple[str | int, ...] = ()
    dtype: torch.dtype | None = torch.float32
    fill: float = 0.0
    reset: str = "block"

    def __post_init__(self) -> None:
        check_choice("reset", self.reset, ("block", "sequence"))

    @property
    def layout(self) -> RowLayout:
        columns = self.dims.index("position") + 1 if "position" in self.dims else None
        return RowLayout(columns=columns, fill=self.fill, shared=True)


Specs: TypeAlias = Mapping[str, MemorySpec]


@dataclass(eq=False)
class Memory:
    """Declared tensors by name, each [B, *dims]. Only `Sampler.commit` may write to them."""

    specs: dict[str, MemorySpec] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(
        default_factory=dict, metadata={"rows": lambda memory, name: memory.specs[name].layout}
    )

    @classmethod
    def allocate(
        cls,
        specs: Specs,
        batch: int,
        sizes: Mapping[str, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Make the tensors of `specs`, filled, for `batch` rows; `sizes` are the sizes of named dimensions."""
        memory = cls(dict(specs))
        for name, spec in specs.items():
            shape = [batch, *(sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims)]
            memory.tensors[name] = torch.full(shape, spec.fill, dtype=spec.dtype or dtype, device=device)
        return memory

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name not in self.specs:
            raise KeyError(f"memory {name!r} was not declared; declared: {sorted(self.specs)}")
        self.tensors[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, rows: np.ndarray, width: int | None = None) -> dict[str, Tensor]:
        """Read the tensors [R, *dims] of `rows` [R] int64, ascending; "window" dimensions are cut to `width`. Callers
        must not write to the result, which may share memory with the stored tensors."""
        tensors = {}
        for name, tensor in self.tensors.items():
            for axis, dim in enumerate(self.specs[name].dims, start=1):
                if dim == "window" and width is not None:
                    tensor = tensor.narrow(axis, 0, width)
            is_all = len(rows) == len(tensor)
            tensors[name] = tensor if is_all else tensor.index_select(0, torch.as_tensor(rows, device=tensor.device))
        return tensors

    def write(self, name: str, rows: np.ndarray, value: Tensor) -> None:
        """Write `value` [R, *dims] to `rows` [R] int64, ascending; its "window" dimensions may be narrower. Earlier
        results of `read` keep their values."""
        if value.shape == self[name].shape:
            self[name] = value.to(self[name].dtype)
            return
        self[name] = tensor = part = self[name].clone()  # proposals and copies may still hold the old tensor
        for axis, dim in enumerate(self.specs[name].dims, start=1):
            if dim == "window":
                part = part.narrow(axis, 0, value.shape[axis])
        if len(rows) == len(tensor):
            part.copy_(value)
        else:
            part.index_copy_(0, torch.as_tensor(rows, device=tensor.device), value.to(tensor.dtype))

    def reset(self, rows: np.ndarray, scope: str) -> None:
        """Refill `rows` of every tensor whose `MemorySpec.reset` is `scope`."""
        for name, spec in self.specs.items():
            if spec.reset == scope and len(rows):
                self.tensors[name] = self.tensors[name].clone()
                self.tensors[name][torch.as_tensor(rows, device=self.tensors[name].device)] = spec.fill

    def grow(self, dim: str, size: int) -> None:
        """Widen every dimension with the name `dim` to at least `size`."""
        for name, spec in self.specs.items():
            for axis, dim_name in enumerate(spec.dims, start=1):
                tensor = self.tensors[name]
                if dim_name == dim and tensor.shape[axis] < size:
                    self.tensors[name] = resize_axis(tensor, size, spec.fill, axis)

    def shift(self, dim: str, rows: np.ndarray, offsets: np.ndarray) -> None:
        """Shift `rows` [N] by `offsets` [N] entries towards index 0 along every dimension `dim`; refill the end."""
        for name, spec in self.specs.items():
            for axis, dim_name in enumerate(spec.dims, start=1):
                if dim_name == dim and len(rows):
                    self.tensors[name] = _shift_rows(self.tensors[name], axis, rows, offsets, spec.fill)

    def before_row_change(self, other: Memory | None) -> None:
        """Add the specs that only `other` has, since some specs are declared during a step."""
        if other is not None:
            self.specs = other.specs | self.specs

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _shift_rows(tensor: Tensor, axis: int, rows: np.ndarray, offsets: np.ndarray, fill: float) -> Tensor:
    index = torch.as_tensor(rows, device=tensor.device)
    selected = tensor.index_select(0, index).movedim(axis, 1)  # [N, W, ...]
    columns = torch.arange(selected.shape[1], device=tensor.device)
    source = columns + torch.as_tensor(offsets, device=tensor.device).unsqueeze(1)
    shape = (*source.shape, *(1,) * (selected.ndim - 2))
    is_inside = (source < selected.shape[1]).view(shape)
    source = source.clamp(max=selected.shape[1] - 1).view(shape).expand_as(selected)
    shifted = torch.where(is_inside, selected.gather(1, source), selected.new_full((), fill))
    return tensor.index_copy(0, index, shifted.movedim(1, axis))


def check_memory(nbytes: int, device: Any, max_memory: int | None, what: str) -> None:
    """Raise ValueError if `nbytes` is more than `max_memory` (None: the device's memory). what: noun for messages."""
    if max_memory is not None:
        limit, source = max_memory, "max_memory"
    elif device.type == "cuda":
        unused_reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit, source = torch.cuda.mem_get_info(device)[0] + unused_reserved, f"the free memory of {device}"
    elif device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limit, source = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine's memory"
    else:
        return
    if nbytes > limit:
        raise ValueError(
            f"{what} would take {_format_bytes(nbytes)}, more than {source} ({_format_bytes(limit)}): use fewer "
            "or shorter rows or blocks; for a store, a narrower store_dtype or cache='none'"
        )


def _format_bytes(count: float) -> str:
    exponent = next((exponent for exponent in (3, 2, 1) if count >= 1024**exponent), 0)
    return f"{count / 1024**exponent:.{min(exponent, 1)}f} {('bytes', 'KiB', 'MiB', 'GiB')[exponent]}"
