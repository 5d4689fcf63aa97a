"""The loop of a request with `compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from paradec.core.protocol import decode
from paradec.samplers.masked.device import step as device_step
from paradec.samplers.masked.state import MaskedState


def device_loop(
    method: Any, model: Any, state: Any, callback: Any, streamer: Any, progress: bool = False
) -> Callable[..., Any]:
    """The loop of a request with `compile`: on the device, or with one warning the plain one."""
    reason = device_step.refusal(method, model, state)
    looking = {"a callback": callback, "a streamer": streamer, "a trace": state.trace, "a bar": progress or None}
    for name, given in looking.items():
        if reason is None and given is not None:
            reason = f"{name} looks at every step"
    if reason is not None:
        warnings.warn(f"compile=True has no effect: {reason}", stacklevel=4)
        return decode

    def on_the_device(method: Any, model: Any, state: MaskedState, after_commit: Any) -> None:
        try:
            device_step.decode(method, model, state)
        except device_step.NotCapturable as error:
            warnings.warn(f"compile=True has no effect: {error}", stacklevel=5)
            decode(method, model, state, after_commit)

    return on_the_device
