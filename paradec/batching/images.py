"""`Batch` of image models, used by `paradec.generate_many`. Each row's output is an `ImageOutput` of one picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paradec.api.images import ImageOutput, build_output, check_output_type, make_images, picture_request
from paradec.batching.batch import Batch
from paradec.batching.outputs import copy_rows
from paradec.batching.slots import RowState, Ticket
from paradec.core.prompts import encode
from paradec.core.rows import has_rows
from paradec.models.images.base import ImageRequest, PictureModel
from paradec.models.images.grid import Grid
from paradec.request import Preset, Request

__all__ = ["ImageBatch", "ImageTicket", "check_refillable"]


def check_refillable(model: PictureModel) -> None:
    """Raise TypeError for an image model whose batches cannot be refilled."""
    if model.family not in ("masked", "draft_verify"):
        raise TypeError(
            f"generate_many takes autoregressive and masked image models; rows of {model.facts.name} (family "
            f"{model.family!r}) all end together: give it to paradec.generate_images"
        )


@dataclass(eq=False)
class ImageTicket(Ticket):
    """A prompt in an `ImageBatch`, with its `ImageRequest`."""

    image_request: Any = None
    grid: Any = None
    accepted: list[int] = field(default_factory=list, repr=False)
    """Per step, the number of tokens that became final, minus the number of tokens that were masked again."""


class ImageBatch(Batch):
    """Decode a stream of pictures, up to `batch_size` at once; see `paradec.batching.Batch`.

    model: an autoregressive or a masked image model.
    height, width, negative_prompt, output_type: as in `paradec.generate_images`; `add` may change the first three.
    arguments: batch_size, max_memory, calls_per_step as in `Batch`; preset and the fields of a request as in
        `paradec.generate_images`.
    Raises TypeError: a model of another kind. ValueError: an argument out of range, or not supported in batches.
    ImportError: output_type="pil" without pillow."""

    def __init__(
        self,
        model: PictureModel,
        *,
        height: int | None = None,
        width: int | None = None,
        negative_prompt: Any = None,
        output_type: str = "pil",
        **arguments: Any,
    ):
        check_refillable(model)
        check_output_type(model, output_type)
        self.grid, self._size = model.grid(height, width), (height, width)
        self.output_type, self.negative_prompt = output_type, negative_prompt
        super().__init__(model, prefix_memory=0, **arguments)

    def add(  # type: ignore[override]  # nothing is streamed
        self,
        prompt: Any,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        id: Any = None,
        alone: bool = False,
        height: int | None = None,
        width: int | None = None,
        negative_prompt: Any = None,
        preset: Preset | None = None,
        **changes: Any,
    ) -> ImageTicket:
        """Put a prompt into the queue.

        prompt: one class label, text, or other prompt that `generate_images` accepts for this model.
        height, width, negative_prompt: override those of the batch; pictures of equal size share calls.
        on_done, id, alone, preset, changes: as in `Batch.add`.
        Raises ValueError, TypeError: a prompt or an argument that cannot be used. BatchClosed: the batch is closed."""
        request, sampler = self._prepare_prompt(changes, preset)
        negative_prompt = self.negative_prompt if negative_prompt is None else negative_prompt
        height = self._size[0] if height is None else height
        width = self._size[1] if width is None else width
        grid = self.model.grid(height, width)
        image_request = self._build_image_request(self.model, prompt, negative_prompt, grid)
        drafter = getattr(sampler, "drafter", None)
        if isinstance(drafter, PictureModel):  # the drafter must accept the same prompt
            self._build_image_request(drafter, prompt, negative_prompt, grid)
        prompts = encode(self.model, image_request.prompts)
        ticket = ImageTicket(0, id, prompts, request, sampler, on_done=on_done, image_request=image_request, grid=grid)
        return self._enqueue(ticket, alone)

    def _build_image_request(self, model: PictureModel, prompt: Any, negative_prompt: Any, grid: Grid) -> ImageRequest:
        """Build the request of one prompt. Raises ValueError if the model cannot take a new prompt in a single row."""
        image_request = model.request(prompt, grid, 1, negative_prompt)
        if image_request.model is not model and not (model is self.model and has_rows(image_request.model)):
            reason = "needs all prompts of a batch at its start; use paradec.generate_images"
            raise ValueError(f"{model.facts.name} {reason}")
        return image_request

    # ---- hooks of Batch ---------------------------------------------------------------------------------------------

    _check_model = staticmethod(check_refillable)

    def _prepare(self, model: Any, arguments: Mapping[str, Any], preset: Preset | None = None) -> Any:  # type: ignore[override]
        self._arguments = Request.merge_arguments(arguments, preset)
        request = picture_request(model, self._arguments)
        return request, request.sampler

    def _change_request(self, changes: Mapping[str, Any], preset: Preset | None) -> tuple[Request, Any]:
        request = picture_request(self.model, {**self._arguments, **Request.merge_arguments(changes, preset)})
        return request, request.sampler

    def _ticket_model(self, ticket: ImageTicket) -> Any:
        return ticket.image_request.model

    def _can_start_together(self, first: Ticket, second: Ticket) -> bool:
        return False  # a prompt may have its own copy of the model

    def _make_state(self, tickets: Sequence[Any]) -> Any:
        (ticket,) = tickets
        image_request: ImageRequest = replace(ticket.image_request, prompts=ticket.prompts)
        state = self.model.begin(ticket.sampler, image_request, ticket.grid, ticket.request)
        state.trace = None  # a trace would record only this row
        ticket.accepted = []
        return state

    def _end_finished(self, group: Any) -> None:
        decided = group.state.decided
        for slot, ticket in enumerate(group.tickets):
            if ticket is not None:
                ticket.accepted.append(int(decided[slot]) - sum(ticket.accepted))
        super()._end_finished(group)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _build_outputs(self, state: RowState, slots: Sequence[int], tickets: Sequence[Any], error: Any) -> list[Any]:
        outputs = []
        for slot, ticket in zip(slots, tickets, strict=True):
            seconds = time.perf_counter() - ticket.start_time
            output, _ = build_output(self.model, copy_rows(state, [slot]), ticket.grid, seconds)
            output.accepted = np.array(ticket.accepted, np.int64).reshape(-1, 1)
            output.in_order, output.error = self.model.family != "masked", error
            outputs.append(output)
        return outputs

    def failed_output(self, error: Exception, ids: Sequence[int] = ()) -> ImageOutput:
        return ImageOutput(
            images=None,
            codes=None,
            tokens=torch.empty(1, 0, dtype=torch.int64),
            grid=self.grid,
            row_nfe=[0],
            row_forwards=0,
            forwarded_tokens=0,
            accepted=np.zeros((0, 1), np.int64),
            seconds=0.0,
            prompt_lengths=[0],
            draft_nfe=[0],
            error=error.with_traceback(None),
        )

    def finish(self, output: ImageOutput) -> None:
        """Decode the picture of a completed output, in place."""
        if output.codes is None or output.images is not None:
            return
        if self.output_type == "latent":
            output.images = output.codes
        else:
            output.images = make_images(self.model, output.tokens, output.grid, self.output_type)
