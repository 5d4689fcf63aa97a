"""paradec's masked samplers as diffusion algorithms of SGLang 0.5.23: `--dllm-algorithm ParadecThreshold`.

For each step, SGLang calls the algorithm with the open blocks and their logits. The algorithm writes tokens and returns
which blocks are final. SGLang loads this file through the entry point group "sglang.srt.plugins". The file can be
imported without SGLang.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.core.checks import check_int, short_repr, unknown_name
from paradec.core.facts import ModelFacts
from paradec.core.memory import MemorySpec
from paradec.integrations.engines.hosted import Hosted, StepResult, why_unsupported
from paradec.request import Request
from paradec.samplers.masked.loop import MaskedSampler

PREFIX = "Paradec"
"""Prefix of the samplers' class names in SGLang's list of algorithms."""
REQUEST = (
    *("block_length", "steps", "temperature", "top_p", "top_k", "seed"),
    *("logits_eos_inf", "confidence_eos_eot_inf", "suppress_tokens"),
)
"""Keys of SGLang's algorithm configuration (a YAML file) that are fields of `paradec.Request`."""
FACTS = {"eos_token_ids": (), "model_name": "model", "tokenizer_size": None}
"""Keys of the configuration that describe the model, which SGLang does not pass to algorithms; with defaults."""
ENGINE = ("block_size", "capture_input_preparation")
"""Keys of the configuration that SGLang reads itself."""
UNSUPPORTED = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}
"""SGLang's sampling parameters that are not supported, with their neutral values."""
MAX_MEMORIES = 65536
"""Maximum number of requests whose sampler memory is stored until their next block. The oldest is dropped first."""

log = logging.getLogger(__name__)


def register() -> None:
    """Add the algorithms to SGLang's list. SGLang calls this entry point in each process, before it reads arguments."""
    from sglang.srt.dllm.algorithm import algo_name_to_cls
    from sglang.srt.dllm.algorithm.base import DllmAlgorithm

    for name, algorithm in algorithms(DllmAlgorithm).items():
        algo_name_to_cls.setdefault(name, algorithm)


def algorithms(base: type) -> dict[str, type]:
    """Create a subclass of `base` (SGLang's `DllmAlgorithm`) for each registered masked sampler of text, by class name,
    and "ParadecCombination" (`combination: credit+localleap`). Constructors raise ValueError for unsupported ones."""
    classes = {PREFIX + "Combination": _make_algorithm(PREFIX + "Combination", None, base)}
    for name in samplers.names():
        try:
            cls = samplers.get(name)
        except ImportError as error:  # the sampler of a plugin that cannot be imported
            log.warning("%s", error)
            continue
        if issubclass(cls, MaskedSampler) and "text" in cls.models:
            classes[PREFIX + cls.__name__] = _make_algorithm(PREFIX + cls.__name__, name, base)
    return classes


def _make_algorithm(name: str, sampler: str | None, base: type) -> type:
    return type(name, (BlockSteps, base), {"sampler_name": sampler, "__module__": __name__})


class BlockSteps:
    """Methods of SGLang's `DllmAlgorithm` for any sampler. Subclasses also inherit `DllmAlgorithm`, with its loops.

    Each block is a hosted row: its prompt tokens stay, the masks after them are filled. SGLang stores the keys and
    values of the forward after which `step` reports the block as final. This forward must have evaluated the final
    tokens: either the last step changed nothing, or one more forward follows.

    config: SGLang's `DllmConfig`: block_size, mask_id, algorithm_config (the YAML file as a mapping).
    Raises ValueError: a sampler that engines cannot host, an unknown key, a value out of its range, no mask token."""

    sampler_name: ClassVar[str | None]
    """Registered name of the sampler; None if the configuration names samplers under "combination"."""
    block_size: int
    mask_id: int

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        settings = {} if config.algorithm_config is None else config.algorithm_config
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"the configuration of {type(self).__name__} must be a mapping, not {short_repr(settings)}"
            )
        if self.mask_id < 0:
            raise ValueError(
                f"{type(self).__name__} fills masks; mask_id={self.mask_id} means that this model denoises without them"
            )
        self.sampler = self._make_sampler(settings)
        if why := why_unsupported(self.sampler):
            raise ValueError(f"sampler {self.sampler.name!r} cannot run inside SGLang: {why}; use paradec.generate")
        self.fields = {name: settings[name] for name in REQUEST if name in settings}
        self.fields.setdefault("seed", 0)  # the same in all processes of a tensor-parallel group
        check_int("seed", self.fields["seed"], low=0, high=2**63 - 1)
        Request(sampler=self.sampler, **self.fields)  # raises for values out of range
        self._check_steps()
        self.eos_token_ids = _parse_ids(settings.get("eos_token_ids", FACTS["eos_token_ids"]))
        self.model_name = settings.get("model_name", FACTS["model_name"])
        if not isinstance(self.model_name, str):
            raise ValueError(f"model_name={short_repr(self.model_name)} must be text")
        self.tokenizer_size = settings.get("tokenizer_size", FACTS["tokenizer_size"])
        check_int("tokenizer_size", self.tokenizer_size, low=1, none=True)
        self._hosted: Hosted | None = None
        self._num_opened = 0
        specs = self.sampler.memory().values()
        self._has_memory = any(isinstance(spec, MemorySpec) and spec.reset == "sequence" for spec in specs)
        self._memories: OrderedDict[str, tuple[int, Mapping[str, Tensor]]] = OrderedDict()
        """By request id: the position of its next block, and the sampler's memory after the previous blocks."""

    def _make_sampler(self, configuration: Mapping[str, Any]) -> Any:
        """Create the sampler; its settings are keys of the configuration."""
        name = self.sampler_name
        allowed = {"combination"} if name is None else {"preset", *samplers.get(name).settings()}
        for key in configuration:
            if key not in allowed and key not in (*REQUEST, *FACTS, *ENGINE):
                raise ValueError(unknown_name(f"key for {type(self).__name__}", key, [*allowed, *REQUEST, *FACTS]))
        settings = {key: value for key, value in configuration.items() if key in allowed}
        if name is not None:
            return samplers.create(name, **settings)
        if not isinstance(settings.get("combination"), str):
            raise ValueError(
                f"combination={short_repr(settings.get('combination'))} must be text, e.g. 'credit+localleap'"
            )
        return samplers.create(settings["combination"])

    def _check_steps(self) -> None:
        """Set `num_parts`, the number of the sampler's blocks in a block of the engine. Raises ValueError if
        block_length does not divide the engine's block, or `steps` is set but unused or not a multiple of num_parts."""
        length, steps = self.fields.get("block_length"), self.fields.get("steps")
        if self.block_size % (length or self.block_size):
            raise ValueError(f"block_length={length} must divide the engine's block of {self.block_size}")
        self.num_parts = self.block_size // (length or self.block_size)
        if steps is None:
            return
        if not self.sampler.uses_steps:
            raise ValueError(f"steps={steps} has no effect: sampler {self.sampler.name!r} has no schedule")
        if steps % self.num_parts:
            raise ValueError(f"steps={steps} must be a multiple of the parts of a block ({self.num_parts})")

    # ---- methods that SGLang calls ----------------------------------------------------------------------------------

    @classmethod
    def validate_request(cls, req: Any) -> str | None:
        """Return why a request cannot be served, or None. The request's temperature, top_p and top_k are ignored: the
        configuration sets them, as for SGLang's own algorithms."""
        params = req.sampling_params
        unsupported = [
            name for name, neutral in UNSUPPORTED.items() if (getattr(params, name, neutral) or neutral) != neutral
        ]
        unsupported += [name for name in ("return_logprob", "custom_logit_processor") if getattr(req, name, None)]
        return f"{cls.__name__} does not support {', '.join(unsupported)}" if unsupported else None

    def init_step_state(self, forward_batch: Any) -> list[Any]:
        """Create the state of each row's block. `step` opens the hosted rows, as it has logits."""
        return [_Block() for _ in range(forward_batch.batch_size)]

    def max_steps(self, block_size: int) -> int:
        """Maximum number of steps of a block, including a last step that changes nothing."""
        part_size = part_steps = block_size // self.num_parts
        if self.sampler.needs.revises:
            part_steps = int(self.sampler.max_steps(np.array([part_size]))[0])
        elif self.sampler.needs.may_wait:
            part_steps = max(part_size, (self.fields.get("steps") or 0) // self.num_parts)
        return part_steps * self.num_parts + 1

    def step(self, forward_batch: Any, full_logits: Tensor, states: list[Any]) -> list[bool]:
        """Step all blocks and write their tokens to `forward_batch.input_ids`. Returns for each block whether its
        tokens are final and were evaluated by this forward. Raises FloatingPointError, with the request's id, for NaN
        or infinite logits."""
        size = self.block_size
        ids = forward_batch.input_ids.view(-1, size)
        logits = full_logits.view(len(states), size, -1)
        hosted = self._get_hosted(logits)
        tokens = ids.tolist()
        is_prompt = self._prompt_flags(forward_batch, tokens)
        for index, block in enumerate(states):
            if block.tokens is not None and block.tokens != tokens[index]:
                block.reset()  # the engine has restarted the block
            if block.tokens is None:
                self._open(hosted, block, forward_batch, index, tokens[index], is_prompt[index])
        stepping = {block.key: index for index, block in enumerate(states) if not block.final}
        is_done = [block.final for block in states]
        results = hosted.step({key: logits[index] for key, index in stepping.items()})
        for key, result in results.items():
            if result.error is not None:
                for block in states:
                    block.reset()  # input_ids is unchanged: a retry starts from the same tokens
                request_id, start = self._find_block(forward_batch, stepping[key])
                raise FloatingPointError(f"{result.error}: request {request_id!r}, block at position {start}")
        new_ids = ids
        if results:
            rows = torch.tensor(list(stepping.values()), device=ids.device)
            new_ids = ids.index_copy(0, rows, torch.stack([result.tokens for result in results.values()]).to(ids.dtype))
            if forward_batch.dllm_prompt_mask is not None:  # mask tokens of the prompt stay
                new_ids = torch.where(forward_batch.dllm_prompt_mask.view(-1, size), ids, new_ids)
            tokens = new_ids.tolist()
        for key, index in stepping.items():
            self._close_done(hosted, states[index], results[key], forward_batch, index)
            states[index].tokens = tokens[index]
            is_done[index] = states[index].final and not results[key].changed
        # in place: CUDA graphs read this tensor
        forward_batch.input_ids.copy_(new_ids.reshape(-1))
        return is_done

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _get_hosted(self, logits: Tensor) -> Hosted:
        """Return the hosted rows; the first call creates them, with the vocabulary size and device of the logits."""
        if self._hosted is None:
            facts = ModelFacts(
                vocab_size=logits.shape[-1],
                mask_token_id=self.mask_id,
                eos_token_ids=self.eos_token_ids,
                topology="block_causal",
                block_length=self.block_size,
                name=self.model_name,
                tokenizer_size=self.tokenizer_size,
            )
            self._hosted = Hosted(self.sampler, facts, logits.device)
        return self._hosted

    def _prompt_flags(self, forward_batch: Any, ids: list[list[int]]) -> list[list[bool]]:
        """For each block, whether each position holds a prompt token. Other positions are to be decoded."""
        mask = forward_batch.dllm_prompt_mask
        if mask is not None:
            flags: list[list[bool]] = mask.view(-1, self.block_size).tolist()
            return [[a or b != self.mask_id for a, b in zip(*row)] for row in zip(flags, ids)]
        return [[token != self.mask_id for token in row] for row in ids]

    def _open(
        self, hosted: Hosted, block: _Block, forward_batch: Any, index: int, ids: list[int], is_prompt: list[bool]
    ) -> None:
        """Open the hosted row of a block with ids [W], which stay where `is_prompt` [W]. A block that has only prompt
        tokens is final without a row."""
        block.tokens = ids
        if all(is_prompt):
            block.final = True
            return
        request_id, start = self._find_block(forward_batch, index)
        filler = hosted.facts.fill_token_id  # replaces mask tokens of the prompt
        prompt = [filler if stays and token == self.mask_id else token for token, stays in zip(ids, is_prompt)]
        text = f"{self.fields['seed']} {start} {request_id}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        previous = self._memories.pop(request_id, None)
        fields = self.fields | {"seed": seed}
        if "steps" in fields:  # the prompt fills some parts, which need no steps
            num_prompt_parts = sum(is_prompt) * self.num_parts // self.block_size
            fields["steps"] = fields["steps"] // self.num_parts * (self.num_parts - num_prompt_parts)
        self._num_opened += 1
        block.key = self._num_opened
        hosted.open(block.key, prompt, 0, **fields)
        # SGLang does not report aborted requests; their blocks are garbage-collected
        block.release = weakref.finalize(block, hosted.discard, block.key)
        block.release.atexit = False
        if previous is not None and previous[0] == start:
            hosted.set_sequence_memory(block.key, previous[1])

    def _close_done(self, hosted: Hosted, block: _Block, result: StepResult, forward_batch: Any, index: int) -> None:
        """If the row is done, close it and store the sampler's memory for the request's next block."""
        if not result.done:
            return
        block.final = True
        if self._has_memory:
            request_id, start = self._find_block(forward_batch, index)
            self._memories[request_id] = start + self.block_size, hosted.copy_sequence_memory(block.key)
            if len(self._memories) > MAX_MEMORIES:
                self._memories.popitem(last=False)
        block.close()

    def _find_block(self, forward_batch: Any, index: int) -> tuple[str, int]:
        """Return the request's id and the position of its block; "" and 0 if SGLang does not pass them."""
        ids, positions = getattr(forward_batch, "rids", None), getattr(forward_batch, "positions", None)
        request_id = "" if ids is None else str(ids[index])
        return request_id, 0 if positions is None else int(positions[index * self.block_size])


def _parse_ids(value: Any) -> tuple[int, ...]:
    """Return one id, or a list of ids, as a tuple."""
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        check_int("eos_token_ids", token, low=0)
    return ids


@dataclass(eq=False)
class _Block:
    """State of a block; SGLang passes it from step to step."""

    key: int | None = None
    """Key of the hosted row; None if no row is open."""
    tokens: list[int] | None = None
    """[W]: tokens after the last step; None before the first."""
    final: bool = False
    release: Any = None
    """Finalizer that discards the hosted row; also called when the block is garbage-collected."""

    def close(self) -> None:
        """Close the hosted row."""
        if self.release is not None:
            self.release()
            self.release, self.key = None, None

    def reset(self) -> None:
        """Close the hosted row, and return to the state before the first step."""
        self.close()
        self.tokens, self.final = None, False
