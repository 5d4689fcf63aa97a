"""New weights for a model between requests (`Model.update_weights`), and their version."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paradec.caches.kept import note_update
from paradec.core.checks import shown
from paradec.core.facts import ModelFacts
from paradec.models.requests import Requests, Use
from paradec.models.saving import Published, published_state
from paradec.models.stacked import StackedWeight


class Updated:
    """A model whose weights can be replaced in place."""

    module: Any
    facts: ModelFacts
    published: Published | None

    @cached_property
    def requests(self) -> Requests:
        """What its requests hold while they run, so that no update comes in between."""
        return Requests(Use.of(self.module))

    @property
    def weights_version(self) -> int:
        """How often the weights have changed, as far as it was asked: from 0, by `update_weights`, or in place by an
        optimizer. `Rollout.version` is that of its beginning."""
        return self.requests.use.version(self.module)

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> int:
        """Write new values into the weights, in place and between requests: it waits for those of `paradec.generate`
        and its like that other threads run, and theirs wait for it. What was kept of the old weights (prefixes, pools
        of a batch's prompts) is refused or dropped afterwards; rollouts have the version that they are of. Requests
        that are stepped by hand are not waited for.

        Args:
            state_dict: tensors by the names that the checkpoint's files have, or those of the module's own
                `state_dict`; weights that it does not name stay. Values are converted to the weights' dtype and device.

        Returns:
            The new `weights_version`.

        Raises:
            TypeError, ValueError: no tensors by names, unknown names, other shapes, weights that are spread over
                processes, offloaded or quantised; nothing is written then. RuntimeError: a request that runs in this
                thread, or rows of a batch that are being decoded.
        """
        writes = _writes(self, state_dict)
        use = self.requests.use
        with use.alone(self.requests.slot, self.facts.name):
            use.version(self.module)
            for own, value in writes:
                # tensors that were made in inference mode are written in it alone
                with torch.inference_mode(own.is_inference()), torch.no_grad():
                    own.copy_(value)
            note_update(self.module)
            return use.version(self.module)


def _writes(model: Any, state_dict: Any) -> list[tuple[Tensor, Tensor]]:
    """What is written where, all of it checked."""
    name = model.facts.name
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict={shown(state_dict)} must be a mapping of names to tensors")
    state = model.module.state_dict()
    known = {own: StackedWeight((own,)) for own in state}
    if model.published is not None:
        known |= published_state(model.module, model.published)
    found = list[tuple[Tensor, Tensor]]()
    for given, value in state_dict.items():
        if given not in known:
            near = get_close_matches(str(given), known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"state_dict has {given!r}, which is no weight of {name}{hint}")
        if not isinstance(value, Tensor):
            raise TypeError(f"state_dict[{given!r}]={shown(value)} must be a tensor")
        part = known[given]
        own = [state[each][part.index] if part.index else state[each] for each in part.own]
        if any(type(state[each]) is not Tensor or state[each].device.type == "meta" for each in part.own):
            raise ValueError(f"{given} of {name} is offloaded or quantised, and cannot be replaced: load it again")
        shape = [sum(len(each) for each in own), *own[0].shape[1:]] if own[0].ndim else []
        if list(value.shape) != shape or value.is_floating_point() != own[0].is_floating_point():
            raise ValueError(
                f"state_dict[{given!r}] is {value.dtype} {list(value.shape)}; {name} has {own[0].dtype} {shape} there"
            )
        sizes = [len(each) for each in own] if own[0].ndim else []
        found += zip(own, value.detach().split(sizes) if sizes else [value.detach()], strict=True)
    return found
