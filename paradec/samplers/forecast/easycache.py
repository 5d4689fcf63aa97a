"""EasyCache: how much the output changes for a change of the latent says when to evaluate.

"Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching", arXiv 2507.02860. The rule is
that of the authors' code for Wan.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.samplers.forecast.refresh import RunProgress, StepRule, integer, number


@dataclass(frozen=True)
class EasyCache(StepRule):
    """Sum the change of the latent, rescaled to that of the output, and evaluate when the sum is enough.

    With x the transformer's input and v its output, K = mean|v - v_before| / mean|x - x_before| from one evaluation to
    the next. Since the latest evaluation K mean|x - x of the step before| / mean|v_latest| is summed; below `threshold`
    the transformer is skipped as a whole, and its output is x + (v_latest - x_latest). The first call of a step
    measures and decides for all of them (guidance may take two); each has its own v - x. Three more tensors of the
    latent's size are kept.

    Args:
        threshold: of the sum; 0 always evaluates. 0.05 and 0.06 are the public code's for Wan.
        ret_steps: steps at the start that are all evaluated. The last step always is.
        num_inference_steps: solver steps, where no scheduler tells them (a transformer by itself).

    Raises:
        ValueError: a setting out of its range; at the start of a run of an unknown number of steps.
    """

    threshold: float = number(0.05, low=0)
    ret_steps: int = integer(7, low=0)
    num_inference_steps: int | None = integer(None, low=1, none=True)

    name = "easycache"
    how = "reuse"
    where = "output"
    measures = True
    from_input = True
    counted = "the last step"

    def is_full(self, course: RunProgress) -> bool:
        last = (self.num_inference_steps or course.total or 0) - 1
        if course.index < self.ret_steps or course.index == last or "rate" not in course.memory:
            return True
        return not course.change < self.threshold  # also where it is no number

    def changed(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        memory = course.memory
        if "rate" in memory:
            course.change += memory["rate"] * float((now - before).abs().mean()) / memory["size"]

    def evaluated(self, course: RunProgress, latent: Tensor, output: Tensor) -> None:
        if latent.shape != output.shape:
            raise ValueError(
                f"when='easycache' forecasts how the output differs from the input, and the transformer is given "
                f"{tuple(latent.shape)} and returns {tuple(output.shape)}; use another rule"
            )
        memory = course.memory
        if "output" in memory:
            moved = (latent - memory["input"]).abs().mean().clamp(min=1e-12)
            memory["rate"] = float((output - memory["output"]).abs().mean() / moved)
        size = float(output.abs().mean().clamp(min=1e-12))
        memory |= {"input": latent, "output": output.detach().clone(), "size": size}
