"""What is kept of decided residues from call to call: their letters, their places in the order, and their states.

In ProteinMPNN's decoder a residue's states depend on residues before it in the order alone, and not on its own letter.
So they are final as soon as all residues before it are, and calls from then on evaluate the others alone (and
those that took another letter than the one they were evaluated with, for the letter's sake).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import AnyOrderQuery
from paradec.core.rows import row_layout


@dataclass(init=False, eq=False)
class DecidedStates:
    """A store for `B` rows of `L` columns: the structure's own token, then its residues.

    A call writes what it evaluates, decided or not; the states of residues that were not final are written again before
    they are read, so that nothing has to be given back.

    Args:
        layers: of the decoder, but the last one, whose states nothing reads.
        width: D, of a state.
        more: residues that a row has beside its columns, at most, where residues are tied.
    """

    tokens: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: -1 after a row's end."""
    decided_at: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: as in the query that said it last."""
    states: tuple[Tensor, ...] = field(metadata=row_layout(columns=1))
    """[B, L - 1 + more, D] for each layer."""

    def __init__(
        self, rows: int, length: int, layers: int, width: int, device: torch.device, dtype: torch.dtype, more: int = 0
    ) -> None:
        self.tokens, self.decided_at = (torch.full((rows, length), -1, device=device) for _ in range(2))
        shape = (rows, length - 1 + more, width)
        self.states = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers))

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
        return sum(tensor.nbytes for tensor in (self.tokens, self.decided_at, *self.states))

    # ---- as the state of a request uses stores --------------------------------------------------------------------

    def forget(self, rows: np.ndarray, start: np.ndarray) -> None:
        """Nothing: see the class."""

    def release(self) -> None:
        """Give the memory back."""
        self.states = ()
