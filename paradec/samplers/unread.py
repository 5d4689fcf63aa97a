"""What a logits stage may leave in the place of logits, for it knows what is read of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from paradec.samplers.statistics import Unread


@dataclass(frozen=True)
class Read(Unread):
    """Logits of which a stage has read what it leaves, so that they are not read again."""

    logits: Tensor
    """[..., V]."""
    best: Tensor
    """[...] int64: the best token."""
    found: Mapping[str, Tensor]
    """Quantities by name, as of `token_statistics`."""

    def written(self) -> Tensor:
        return self.logits

    def statistics(self, reads: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]] | None:
        if not all(name in self.found for name in reads):
            return None
        return self.best, {name: self.found[name] for name in reads}
