"""A request inside vLLM: its hosted row, and the block that the engine evaluates. Does not import vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.facts import ModelFacts
from paradec.integrations.engines.hosted import Hosted
from paradec.integrations.engines.vllm.settings import Settings, server_defaults, settings_of

ROW = 0
"""Key of a request's row: each request has a `Hosted` with this row only."""


@dataclass(frozen=True)
class ServedModel:
    """The model of an engine, and the server's defaults for requests."""

    facts: ModelFacts
    defaults: dict[str, Any]

    @property
    def block(self) -> int:
        """Number of positions of a block, which vLLM calls a canvas."""
        return self.facts.block_unit

    def open_row(
        self, prompt: Sequence[int], settings: Settings, answer: Sequence[int] = (), device: Any = "cpu"
    ) -> Hosted:
        """Open the row of a request. answer: the tokens emitted before vLLM preempted the request. Raises ValueError,
        TypeError: the model or the prompt does not support the settings."""
        facts = self.facts
        if facts.mask_id in prompt:
            raise ValueError(
                f"the prompt contains the mask id {facts.mask_id}, and vLLM never writes to a prompt: put the masks "
                "into the template, the beginning of the answer"
            )
        if not prompt:
            raise ValueError("the prompt is empty")
        ends = tuple(end for end in settings.stop_ids if end != facts.mask_id) or facts.eos_token_ids
        fields = dict(settings.fields)
        if not settings.stop_ids:
            fields["eos_early_stop"] = False  # without stop ids, vLLM does not end the request
        template = settings.template[len(answer) :]
        max_new_tokens = settings.max_new_tokens - max(0, len(answer) - len(settings.template))
        hosted = Hosted(settings.sampler, dataclasses.replace(facts, eos_token_ids=ends), device)
        hosted.open(ROW, [*prompt, *answer, *template], max_new_tokens, **fields)
        return hosted

    def why_unsupported(self, prompt: Sequence[int], params: Any) -> str:
        """Return why a request has failed."""
        try:
            self.open_row(prompt, settings_of(params, self.defaults))
        except (ValueError, TypeError) as error:
            return str(error)
        return "the model returned NaN or infinite logits"


def read_model(model: Any) -> ServedModel:
    """Read an engine's model from its checkpoint. model: vLLM's `ModelConfig`. Raises CheckpointError: missing data."""
    from paradec.models.checkpoint import read_json
    from paradec.models.family import read_facts, read_tokenizer
    from paradec.models.loading import FAMILIES

    hf_config, source, revision = model.hf_config, model.model, model.revision
    family = FAMILIES[hf_config.model_type]
    fields = dict(hf_config.published)
    generation = read_json(source, "generation_config.json", revision)
    tokenizer = read_tokenizer(source, family, revision)
    mask = getattr(hf_config, "mask_token_id", None)
    facts = read_facts(source, fields, generation, tokenizer, hf_config, family, mask, hf_config.canvas_length)
    longest = min(model.max_model_len, facts.max_length or model.max_model_len)
    return ServedModel(dataclasses.replace(facts, max_length=longest), server_defaults(hf_config))


class Slot:
    """One request of the batch. begin: position of the block that the next forward evaluates. is_storing: whether this
    block's tokens are final, so that the forward stores their keys and values. known: number of its ids in vLLM."""

    def __init__(self, served: ServedModel, hosted: Hosted, known: int):
        self.served, self.hosted, self.known = served, hosted, known
        self.begin = known - known % served.block
        self.is_storing = False
        self.failed = False
        self._update_storing()

    @property
    def stop(self) -> int:
        """The position after the block's last one."""
        return min(self.begin + self.served.block, int(self.state.canvas.shape[1]))

    @property
    def state(self) -> Any:
        """The row's state."""
        return self.hosted.state(ROW)

    def canvas(self) -> Tensor:
        """[n] int64: the current tokens of the block from position `known` on."""
        ids: Tensor = self.state.canvas[0, self.known : self.stop]
        return ids

    def step(self, logits: Tensor, forwards_twice: bool) -> list[int]:
        """Step a canvas with logits [n, V]. Returns tokens to emit: none until the block is final; on error, the mask.
        forwards_twice: whether a final block needs one more forward, even if its last step changed no token."""
        if self.is_storing:
            return self._emit()
        num_prompt = self.known - self.begin
        if num_prompt:  # the sampler does not read logits of prompt tokens
            logits = torch.cat((logits.new_zeros((num_prompt, logits.shape[1])), logits))
        result = self.hosted.step({ROW: logits})[ROW]
        if result.error is not None:
            self.failed = True
            return [self.served.facts.mask_id]
        if result.done and min(int(self.state.end[0]), int(self.state.requested_end[0])) <= self.stop:
            return self._emit()  # vLLM ends the request, so the block's keys and values need not be stored
        if result.closed:
            self.is_storing = True
            if not result.changed and not forwards_twice:
                return self._emit()
        return []

    def _emit(self) -> list[int]:
        """Return the block's tokens from `known` on, and continue with the next block."""
        state = self.state
        tokens = state.canvas[0, self.known : min(self.stop, int(state.end[0]))].tolist()
        if state.done and int(state.end[0]) < int(state.requested_end[0]):
            ends = state.facts.eos_token_ids
            if not tokens or tokens[-1] not in ends:
                tokens.append(ends[0])  # tells vLLM that the sampler has ended the answer
        self.known = self.begin = self.stop
        self._update_storing()
        return tokens

    def _update_storing(self) -> None:
        """Set `is_storing` to whether all tokens of the current block are final."""
        self.is_storing = self.hosted.done(ROW) or self.hosted.window(ROW)[0] > self.begin


def cut_at_blocks(begins: np.ndarray, computed: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each row's query where its blocks end.

    begins: [R + 1] int: start of each row's query in the batch, and the end of the last query.
    computed: [R] int: position of the first token of each row's query.
    Returns int32 arrays for the P pieces: the row of each [P]; its start in the batch [P + 1], with the end of the last
    piece; the position after its last token [P]."""
    rows, cuts, ends = [], [int(begins[0])], []
    for row in range(len(begins) - 1):
        first, position = int(begins[row]), int(computed[row])
        stop = position + int(begins[row + 1]) - first
        end = position
        while end < stop:
            end = min(stop, end - end % block + block)
            rows.append(row)
            cuts.append(first + end - position)
            ends.append(end)
    return tuple(np.array(entries, np.int32) for entries in (rows, cuts, ends))  # type: ignore[return-value]
