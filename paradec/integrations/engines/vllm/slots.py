"""A request inside vLLM: its row, and which block of it the engine is at. Nothing here imports vLLM."""

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
"""A slot's row has one state, under this key."""


@dataclass(frozen=True)
class Served:
    """The model of an engine, and what its server says for requests."""

    facts: ModelFacts
    defaults: dict[str, Any]

    @property
    def block(self) -> int:
        """Positions of a block, which is vLLM's canvas."""
        return self.facts.block_unit

    def opened(
        self, prompt: Sequence[int], settings: Settings, written: Sequence[int] = (), device: Any = "cpu"
    ) -> Hosted:
        """The row of a request. written: the answer so far, where vLLM had taken the request out for a while. Raises
        ValueError, TypeError: what this model, or this prompt, cannot have."""
        facts = self.facts
        if facts.mask_id in prompt:
            raise ValueError(
                f"the prompt holds the mask id {facts.mask_id}, and vLLM never writes to a prompt: begin the answer "
                "with a template instead"
            )
        if not prompt:
            raise ValueError("the prompt is empty")
        ends = tuple(end for end in settings.stop_ids if end != facts.mask_id) or facts.eos_token_ids
        fields = dict(settings.fields)
        if not settings.stop_ids:
            fields["eos_early_stop"] = False  # vLLM would not end the request
        template = settings.template[len(written) :]
        new = settings.max_new_tokens - max(0, len(written) - len(settings.template))
        hosted = Hosted(settings.sampler, dataclasses.replace(facts, eos_token_ids=ends), device)
        hosted.open(ROW, [*prompt, *written, *template], new, **fields)
        return hosted

    def refusal(self, prompt: Sequence[int], params: Any) -> str:
        """Why a request could not be begun."""
        try:
            self.opened(prompt, settings_of(params, self.defaults))
        except (ValueError, TypeError) as error:
            return str(error)
        return "the model returned NaN or infinite logits"


def served_by(model: Any) -> Served:
    """The model of an engine, by its checkpoint's own files. model: vLLM's `ModelConfig`. Raises CheckpointError: files
    that do not say what is needed."""
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
    return Served(dataclasses.replace(facts, max_length=longest), server_defaults(hf_config))


class Slot:
    """One request of the batch. `block` is forwarded next, from `begin` on; `storing`: it is final, and this forward's
    keys and values stay. `known` are vLLM's tokens of the request: the prompt and the emitted part of the answer."""

    def __init__(self, served: Served, hosted: Hosted, known: int):
        self.served, self.hosted, self.known = served, hosted, known
        self.begin = known - known % served.block
        self.storing = False
        self.prefilling = True
        self.failed = False
        self._arrive()

    @property
    def stop(self) -> int:
        """The position after the block."""
        return min(self.begin + self.served.block, int(self.state.canvas.shape[1]))

    @property
    def state(self) -> Any:
        """The row's state."""
        return self.hosted.state(ROW)

    def canvas(self) -> Tensor:
        """[n] int64: the tokens of the block that are not the prompt's, as they are forwarded next."""
        ids: Tensor = self.state.canvas[0, self.known : self.stop]
        return ids

    def step(self, logits: Tensor, again: bool) -> list[int]:
        """Step a canvas with its logits [n, V]; return the tokens to emit, usually none. `again`: whether tokens that a
        step leaves unchanged must be forwarded once more to be stored."""
        if self.storing:
            return self._emitted()
        tail = self.known - self.begin
        if tail:  # the given ones are not read
            logits = torch.cat((logits.new_zeros((tail, logits.shape[1])), logits))
        result = self.hosted.step({ROW: logits})[ROW]
        if result.error is not None:
            self.failed = True
            return [self.served.facts.mask_id]
        if result.done and min(int(self.state.end[0]), int(self.state.requested_end[0])) <= self.stop:
            return self._emitted()  # vLLM ends the request: nothing reads what would be stored
        if result.closed:
            self.storing = True
            if not result.changed and not again:
                return self._emitted()
        return []

    def _emitted(self) -> list[int]:
        """The canvas as it is; the next block is open then."""
        state = self.state
        tokens = state.canvas[0, self.known : min(self.stop, int(state.end[0]))].tolist()
        if state.done and int(state.end[0]) < int(state.requested_end[0]):
            ends = state.facts.eos_token_ids
            if not tokens or tokens[-1] not in ends:
                tokens.append(ends[0])  # the sampler cut the row off, and vLLM must hear of it
        self.known = self.begin = self.stop
        self._arrive()
        return tokens

    def _arrive(self) -> None:
        """At a block: is there anything to decide in it?"""
        self.storing = self.hosted.done(ROW) or self.hosted.window(ROW)[0] > self.begin


def pieces_of(begins: np.ndarray, computed: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each row's query where its blocks end.

    begins: [R + 1] int: where the rows' queries begin in the batch, and where the last one ends.
    computed: [R] int: positions left of each row's query.
    Returns rows [P], begins [P + 1] and ends [P], int32: whose piece it is, where it begins in the batch, and the
    position after it in its row."""
    rows, cuts, ends = [], [int(begins[0])], []
    for row in range(len(begins) - 1):
        first, position = int(begins[row]), int(computed[row])
        stop = position + int(begins[row + 1]) - first
        start = position
        while start < stop:
            start = min(stop, start - start % block + block)
            rows.append(row)
            cuts.append(first + start - position)
            ends.append(start)
    return tuple(np.array(entries, np.int32) for entries in (rows, cuts, ends))  # type: ignore[return-value]
