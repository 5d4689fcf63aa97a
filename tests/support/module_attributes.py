"""What hangs on a module."""

from __future__ import annotations

from typing import Any

from torch import nn


def attributes(module: nn.Module) -> dict[str, Any]:
    """Everything that hangs on a module and those inside it, but for buffers of values."""
    return {name: {key: id(value) for key, value in vars(child).items()} for name, child in module.named_modules()}
