"""What is asked of continuous models, and what could become of their latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paradec.core.query import Cost


@dataclass
class LatentQuery:
    """One call of a continuous model. `N` rows of the state, `R = branches * N` rows in the call.

    Under guidance (`branches == 2`) the first N rows of the call are conditional, the rest are not.
    """

    rows: np.ndarray
    """[N] int64, on the host: the state's rows that this call evaluates."""
    latent: Tensor
    """[R, ...] float."""
    timestep: Tensor
    """Scalar or [R]."""
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    """What else the model reads, by name, each [R, ...]: class labels, say."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: positions (patches) evaluated for each row in one branch, as in `Query`."""
    kind: str = "full"


@dataclass
class LatentProposal:
    """What a continuous model's latent could become, of the forecast family."""

    rows: np.ndarray
    """[R] int64, on the host: rows of the state that this proposal speaks of."""
    values: Tensor
    """[R, ...] float: the model's output, or its forecast."""
    cost: Cost
    made_at: int = 0
    """As for `Proposal`."""
    kind: str = "full"
    """What was evaluated: "full", "window", or "forecast" (nothing)."""
