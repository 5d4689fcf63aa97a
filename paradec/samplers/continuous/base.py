"""What the samplers of continuous tokens share: a request's rows, a random order, and the schedule over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_int
from paradec.core.memory import Memory
from paradec.core.orders import Cosine, keyed, left_after
from paradec.core.protocol import Sampler, State
from paradec.request import Request, request_for
from paradec.samplers.starting import labels_of, trace_of_labels, unsupported_for_pictures

DEFAULT_STEPS = 64


@dataclass
class ContinuousState(State):
    """What changes while images are decoded. `B` rows, `S` positions of `channels` numbers each, row by row."""

    tokens: Tensor
    """[B, S, channels]: zeros where nothing is decided."""
    order: Tensor
    """[B, S] int64: the positions, from the last one that is decided to the first."""
    labels: Tensor
    """[B] int64."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    left: np.ndarray
    """[commits + 1] int64 on the host: undecided positions of each row before every commit, and 0 after the last."""
    guidance_scale: float
    index: int = 0
    """Which commit is next."""

    @property
    def done(self) -> bool:
        return self.index == len(self.left) - 1

    @property
    def progress(self) -> tuple[int, int]:
        return int(self.left[0] - self.left[self.index]) * self.batch, int(self.left[0]) * self.batch

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64 on the host: forward calls of a draft model for each row."""
        return np.zeros(self.batch, np.int64)


@dataclass(frozen=True)
class ContinuousSampler(Sampler):
    """Base of the samplers of continuous tokens: a subclass says how a request's fields become its state (`_state`)."""

    family = "continuous"
    models = ("continuous image",)
    uses_steps = True
    unsupported = unsupported_for_pictures("steps")  # `temperature` is a setting

    def _state(self, left: np.ndarray, fields: dict[str, Any]) -> Any:
        """The state of a request.

        Args:
            left: [T + 1] int64, of `left_after`. fields: of `ContinuousState`, all but `left`.
        """
        raise NotImplementedError

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(
        self,
        model: Any,
        prompt: Sequence[int] | int,
        request: Request | None = None,
        *,
        order: Tensor | None = None,
        **arguments: Any,
    ) -> Any:
        """Make the state of one request.

        Args:
            model: a `paradec.models.images.mar.MARModel`.
            prompt: the class labels, one per image.
            request: a `paradec.Request`; or its fields by name instead. All but `unsupported` count: `steps` is T,
                1 to S, 64 by default as in the paper's fast setting (256 in its best one); `guidance_scale` of the
                published models is 2.9, 3.0 and 3.2; in a trace a token is its numbers, None where undecided.
            order: [B, S] int64, the random order to use, last position first; None draws it.

        Raises:
            TypeError: a model of another kind. ValueError: an argument out of its range; the message names it.
        """
        self.check_model(model)
        if "temperature" in arguments:
            raise ValueError(f"temperature is a setting of sampler {self.name!r}: leave it out of the request")
        request = request_for(self, request, arguments)
        module = model.module
        size, labels = module.positions, labels_of(prompt, module.classes - 1)
        steps = DEFAULT_STEPS if request.steps is None else request.steps
        check_int("steps", steps, low=1, high=size)
        seed, generator = request.seed, request.generator
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(labels)
        if len(seeds) != len(labels):
            raise ValueError(f"seed has {len(seeds)} entries for {len(labels)} images; give one int, or one per image")
        drawn = 0
        if None in seeds:
            owner = None if generator is None else generator.device
            drawn = int(torch.randint(2**62, (1,), generator=generator, device=owner))
        seeds = [drawn if entry is None else int(entry) for entry in seeds]
        device, dtype = model.device, torch.promote_types(module.mask_token.dtype, torch.float32)
        keys = torch.as_tensor(rng.row_keys(seeds, [[label] for label in labels]), device=device)
        if order is None:
            groups = Cosine(steps).groups(module.side, module.side, keyed(keys))
            order = torch.as_tensor(groups.order[:, ::-1].copy())
        order = torch.as_tensor(order, device=device)
        if order.shape != (len(labels), size) or not (order.sort(-1).values == torch.arange(size, device=device)).all():
            raise ValueError(f"order has shape {tuple(order.shape)}; it must permute {size} positions for each image")
        fields = {
            "batch": len(labels),
            "memory": Memory({}, len(labels), {}, device),
            "tokens": torch.zeros(len(labels), size, module.channels, dtype=dtype, device=device),
            "order": order,
            "labels": torch.tensor(labels, device=device),
            "keys": keys,
            "guidance_scale": request.guidance_scale,
        }
        state = self._state(left_after(size, steps), fields)
        asked = {"steps": steps, "guidance_scale": request.guidance_scale, "seed": seeds}
        state.trace = trace_of_labels(self, request, labels, size, **asked)
        return state


def normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers from uniform draws in (0, 1)."""
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)
