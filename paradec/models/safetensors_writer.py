"""Writing a safetensors file one tensor after the other, so that no second copy of all weights is held.

The library's own `save_file` takes all tensors of a file at once, contiguous and each alone in its memory: of weights
that share memory or are on another device, these are copies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paradec.models.checkpoint import DTYPES

CODES = {getattr(torch, dtype): code for code, dtype in DTYPES.items() if hasattr(torch, dtype)}


def write_safetensors(path: Path, sizes: Mapping[str, Tensor], tensor_of: Callable[[str], Tensor]) -> None:
    """Write a file, byte for byte as `safetensors.torch.save_file(..., metadata={"format": "pt"})` does.

    Args:
        sizes: names of the tensors -> tensors of their shapes and dtypes, without numbers.
        tensor_of: gives the tensor of a name, on the CPU; called once for each.

    Raises:
        ValueError: a tensor of another size than `sizes` says. OSError: the file cannot be written.
    """
    names = sorted(sizes, key=lambda name: (-sizes[name].itemsize, name))  # every tensor begins aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        size = sizes[name]
        begin, end = end, end + size.nbytes
        header[name] = {"dtype": CODES[size.dtype], "shape": list(size.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensor_of(name)
            if (tensor.shape, tensor.dtype) != (sizes[name].shape, sizes[name].dtype):
                raise ValueError(
                    f"{name} was {list(sizes[name].shape)} of {sizes[name].dtype} and became {list(tensor.shape)} of "
                    f"{tensor.dtype} while the model was saved"
                )
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
