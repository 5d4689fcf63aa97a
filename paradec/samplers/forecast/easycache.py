"""EasyCache: how much the output changes for a change of the latent says when to evaluate.

"Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching", arXiv 2507.02860. The rule is
that of the authors' code for Wan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.samplers.forecast.refresh import RunProgress, StepRule


@dataclass(frozen=True)
class EasyCache(StepRule):
    """Sum the change of the latent, rescaled to that of the output, and evaluate when the sum is enough.

    With x the transformer's input and v its output, K = mean|v - v_before| / mean|x - x_before| from one evaluation to
    the next. Since the latest evaluation K mean|x - x of the step before| / mean|v_latest| is summed; below `threshold`
    the transformer is skipped as a whole, and its output is x + (v_latest - x_latest). The first call of a step
    measures and decides for all of them (guidance may take two); each has its own v - x. Beside these differences
    three tensors of the latent's size are kept.

    Args:
        threshold: of the sum; 0 always evaluates. 0.05 and 0.06 are the public code's for Wan.
        ret_steps: steps at the start that are all evaluated. The last step always is.
        num_inference_steps: solver steps, where no scheduler tells them (a transformer by itself).

    Raises:
        ValueError: a setting out of its range; at the start of a run whose steps nobody tells.
    """

    threshold: float = 0.05
    ret_steps: int = 7
    num_inference_steps: int | None = None

    name = "easycache"
    how = "reuse"
    where = "output"
    measures = True
    from_input = True

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0)
        check_int("ret_steps", self.ret_steps, low=0)
        check_int("num_inference_steps", self.num_inference_steps, low=1, none=True)

    def check_run(self, total: int | None, **run: Any) -> None:
        if self.num_inference_steps is None and total is None:
            raise ValueError(
                "num_inference_steps=None: EasyCache evaluates the last step, and a transformer by itself does not "
                "tell which one that is; give their number"
            )

    def is_full(self, course: RunProgress) -> bool:
        last = (self.num_inference_steps or course.total or 0) - 1
        if course.index < self.ret_steps or course.index == last or "rate" not in course.kept:
            return True
        return not course.change < self.threshold  # also where it is no number

    def changed(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        kept = course.kept
        if "rate" in kept:
            course.change += kept["rate"] * float((now - before).abs().mean()) / kept["size"]

    def evaluated(self, course: RunProgress, given: Tensor, output: Tensor) -> None:
        if given.shape != output.shape:
            raise ValueError(
                f"when='easycache' forecasts how the output differs from the input, and the transformer is given "
                f"{tuple(given.shape)} and returns {tuple(output.shape)}; use another rule"
            )
        kept = course.kept
        if "output" in kept:
            moved = (given - kept["input"]).abs().mean().clamp(min=1e-12)
            kept["rate"] = float((output - kept["output"]).abs().mean() / moved)
        size = float(output.abs().mean().clamp(min=1e-12))
        kept |= {"input": given, "output": output.detach().clone(), "size": size}
