"""ReCAP on AmusedPipeline (arXiv 2505.19089).

In a local step the layers evaluate only the scheduler's target cells. These attend to the stored keys of all cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paradec.core.other_names import SESSION_LOST
from paradec.integrations.diffusers.hooks.hook import Hook, PipelineSession
from paradec.samplers.masked.rules.recap import Recap


@dataclass
class RecapReport:
    """Counts since a `RecapSession` was attached."""

    cells: list[tuple[int, int]] = field(default_factory=list)  # per call: evaluated and all cells of each row
    bytes: int = 0  # maximum size of keys, values and hidden states

    short = property(str, doc="The report in one line, as `str`.")

    def __str__(self) -> str:
        num_local = sum(evaluated < total for evaluated, total in self.cells)
        evaluated, total = (sum(counts) for counts in zip(*self.cells)) if self.cells else (0, 0)
        return (
            f"{len(self.cells)} calls, {num_local} local; the layers evaluated {evaluated} of {total} cells "
            f"({evaluated / max(total, 1):.0%}); at most {self.bytes / 1e6:.1f} MB stored"
        )


class RecapSession(PipelineSession):
    """ReCAP on an AmusedPipeline, from `paradec.accelerate(pipe, paradec.ReCAP(...))`. A context manager.

    It replaces the scheduler by a `RecapScheduler`. A cell is one token, or 2 x 2 if the transformer downsamples.
    Raises TypeError for another pipeline, ValueError if it is accelerated already or has a custom attention processor.
    """

    def __init__(self, pipe: Any, sampler: Recap):
        from diffusers import UVit2DModel
        from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

        from paradec.schedulers import RecapScheduler

        transformer = getattr(pipe, "transformer", None)
        if not isinstance(transformer, UVit2DModel):
            raise TypeError(
                "the sampler 'recap' accelerates AmusedPipeline, whose transformer is a UVit2DModel, not "
                f"{type(pipe).__name__} ({type(transformer).__name__}); other models: paradec.generate(cache='recap')"
            )
        layers = transformer.transformer_layers
        if hasattr(transformer, "_paradec_session"):
            raise ValueError(f"the pipeline is accelerated already; {SESSION_LOST.format('pipe.transformer')}")
        for layer in layers:
            if type(layer.attn1.processor) not in (AttnProcessor, AttnProcessor2_0):
                name = type(layer.attn1.processor).__name__
                raise ValueError(f"attention processor {name} cannot be replaced; call set_default_attn_processor()")
        settings = {name: getattr(sampler, name) for name in sampler.settings()}
        scheduler = RecapScheduler.from_config(pipe.scheduler.config, **settings)
        self.pipe, self.scheduler, self.original_scheduler = pipe, scheduler, pipe.scheduler
        self._report = RecapReport()
        self.cell_size = 2 if transformer.down_block.downsample is not None else 1  # tokens along a side
        self.local: Tensor | None = None  # [R, M] int64: M evaluated cells of each row; None in a full step
        self.hidden: Tensor | None = None  # [R, N, D]: the last layer's output at all N cells
        self.run: object | None = None
        pipe.scheduler = scheduler
        self.processors = [_CachingProcessor(self, layer.attn1) for layer in layers]
        self.transformer = transformer
        transformer._paradec_session = self
        self.hooks = [
            Hook(transformer, self._call),
            Hook(layers[0], self._call_first_layer, "paradec_first"),
            Hook(layers[-1], self._call_last_layer, "paradec_last"),  # with a single layer, wraps the previous hook
        ]

    def report(self) -> RecapReport:
        return self._report

    def detach(self) -> None:
        for hook in reversed(self.hooks):
            hook.remove()
        for processor in self.processors:
            if processor.attention.processor is processor:
                processor.attention.processor = processor.original
        if vars(self.transformer).get("_paradec_session") is self:
            del self.transformer._paradec_session
        self._forget()
        if self.pipe.scheduler is self.scheduler:
            self.pipe.scheduler = self.original_scheduler

    def _forget(self) -> None:
        self.hidden = self.local = None
        for processor in self.processors:
            processor.key = processor.value = None

    def _call(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Choose the cells that the layers evaluate, and call the transformer."""
        if self.run is not self.scheduler.run:
            self._forget()
            self.run = self.scheduler.run
        input_ids = args[0] if args else kwargs["input_ids"]
        targets = self.scheduler.targets()
        self.local = None
        height, width = input_ids.shape[1:]
        size = self.cell_size
        num_cells = (height // size) * (width // size)
        if targets is not None and self.hidden is not None and len(self.hidden) == len(input_ids):
            is_target = targets.view(-1, height // size, size, width // size, size).any(4).any(2).flatten(1)
            is_target = is_target.repeat(len(input_ids) // len(is_target), 1)  # guidance branches
            # a row with fewer targets evaluates some other cells, too
            max_cells = int(is_target.sum(1).max())
            self.local = (~is_target).int().argsort(dim=1, stable=True)[:, :max_cells]
        output = forward(*args, **kwargs)
        self._report.cells.append((num_cells if self.local is None else self.local.shape[1], num_cells))
        tensors = [self.hidden, *(tensor for entry in self.processors for tensor in (entry.key, entry.value))]
        self._report.bytes = max(self._report.bytes, sum(tensor.nbytes for tensor in tensors if tensor is not None))
        return output

    def _call_first_layer(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.local is None:
            return forward(*args, **kwargs)
        hidden_states, *others = args
        index = self.local.unsqueeze(-1).expand(-1, -1, hidden_states.shape[-1])
        return forward(hidden_states.gather(1, index), *others, **kwargs)

    def _call_last_layer(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        output: Tensor = forward(*args, **kwargs)
        if self.local is not None:
            assert self.hidden is not None  # a full step precedes local steps
            index = self.local.unsqueeze(-1).expand(-1, -1, output.shape[-1])
            output = self.hidden.scatter(1, index, output)
        self.hidden = output.detach()
        return output


class _CachingProcessor:
    """diffusers' attention, with stored keys and values of all cells. A local step updates the entries of its cells."""

    def __init__(self, session: RecapSession, attention: Any):
        self.session, self.attention, self.original = session, attention, attention.processor
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        attention.processor = self

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def split_heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        query, key, value = (split_heads(projection(hidden_states)) for projection in (attn.to_q, attn.to_k, attn.to_v))
        local = self.session.local
        if local is not None:
            assert self.key is not None and self.value is not None
            index = local[:, None, :, None].expand_as(key)
            key, value = self.key.scatter(2, index, key), self.value.scatter(2, index, value)
        self.key, self.value = key.detach(), value.detach()
        output = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](output)) / attn.rescale_output_factor
