"""What is kept of decided residues from call to call: their letters, their places in the order, and their states.

In ProteinMPNN's decoder a residue's states depend on residues before it in the order alone, and not on its own letter.
So they are final as soon as all residues before it are, and calls from then on evaluate the others alone (and
those that took another letter than the one they were evaluated with, for the letter's sake).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paradec.core import rows as of_rows
from paradec.core.family_queries import AnyOrderQuery


class DecidedStates:
    """A store for `B` rows of `L` columns: the structure's own token, then its residues.

    A call writes what it evaluates, decided or not; the states of residues that were not final are written again before
    they are read, so that nothing has to be given back.

    Args:
        layers: of the decoder, but the last one, whose states nothing reads.
        width: D, of a state.
        more: residues that a row has beside its columns, at most, where residues are tied.
    """

    def __init__(
        self, rows: int, length: int, layers: int, width: int, device: torch.device, dtype: torch.dtype, more: int = 0
    ) -> None:
        self.more = more
        self.tokens = torch.full((rows, length), -1, device=device)
        """[B, L] int64: -1 after a row's end."""
        self.decided_at = torch.full((rows, length), -1, device=device)
        """[B, L] int64: as in the query that said it last."""
        self.states = [
            torch.zeros((rows, self._residues(length), width), device=device, dtype=dtype) for _ in range(layers)
        ]
        """[B, L - 1 + more, D] for each layer."""

    def _residues(self, length: int) -> int:
        return length - 1 + self.more

    def update(self, query: AnyOrderQuery) -> tuple[Tensor, Tensor, Tensor]:
        """Note what a query says, and return the whole rows that it is about: tokens and `decided_at` [R, L] int64, and
        [R, L] bool where it evaluates."""
        assert query.store_rows is not None
        valid = torch.ones_like(query.tokens, dtype=torch.bool) if query.valid is None else query.valid
        index, column = valid.nonzero(as_tuple=True)
        place, rows = query.positions[index, column], query.store_rows
        self.tokens[rows[index], place] = query.tokens[index, column]
        self.decided_at[rows[index], place] = query.decided_at[index, column]
        tokens = self.tokens[rows]
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        asked[index, place] = True
        return tokens, self.decided_at[rows], asked

    def keep(self, query: AnyOrderQuery, states: list[Tensor]) -> None:
        """Keep the states [R, L - 1 + more, D] of each layer of a query's rows."""
        for own, new in zip(self.states, states, strict=True):
            own[query.store_rows] = new

    @property
    def peak_bytes(self) -> int:
        """Bytes that it takes, from the beginning on."""
        return sum(tensor.nbytes for tensor, _ in self._tensors)

    # ---- as the state of a request uses stores --------------------------------------------------------------------

    @property
    def _tensors(self) -> list[tuple[Tensor, int]]:
        """Each, and what it holds where there is nothing."""
        return [(self.tokens, -1), (self.decided_at, -1), *((each, 0) for each in self.states)]

    def _of(self, tensors: list[Tensor]) -> DecidedStates:
        other = object.__new__(DecidedStates)
        other.more = self.more
        other.tokens, other.decided_at, *other.states = tensors
        return other

    def forget(self, rows: np.ndarray, start: np.ndarray) -> None:
        """Nothing: see the class."""

    def taken(self, rows: np.ndarray, length: int | None = None) -> DecidedStates:
        """A copy of the `rows` [N] alone, with so many columns."""
        found = [(of_rows.taken(tensor, rows), fill) for tensor, fill in self._tensors]
        if length is None:
            return self._of([tensor for tensor, _ in found])
        sizes = (length, length, *(self._residues(length) for _ in self.states))
        pairs = zip(found, sizes, strict=True)
        return self._of([of_rows.fitted(tensor, size, fill) for (tensor, fill), size in pairs])

    def put(self, slots: np.ndarray, other: DecidedStates) -> None:
        """Replace the rows `slots` [N] by those of another one, which has as many columns at most."""
        wide = other.taken(np.arange(len(slots)), self.tokens.shape[1])
        for (own, _), (new, _) in zip(self._tensors, wide._tensors, strict=True):
            of_rows.put(own, slots, new)

    def wipe(self, rows: np.ndarray) -> None:
        """Nothing that the `rows` [N] have stored is left."""
        for tensor, fill in self._tensors:
            tensor.index_fill_(0, torch.as_tensor(rows, device=tensor.device), fill)

    def release(self) -> None:
        """Give the memory back."""
        self.states = []
