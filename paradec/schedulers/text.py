"""Schedulers for diffusers' pipelines that decode text in blocks: LLaDA2Pipeline, and (only `EntropyBoundScheduler`)
DiffusionGemmaPipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from paradec import samplers
from paradec.core.checks import LARGEST_INT64, check_choice, check_int, check_number, check_temperature, short_repr
from paradec.core.facts import ModelFacts
from paradec.core.protocol import Sampler
from paradec.core.registry import to_data
from paradec.kernels.token_stats import token_statistics
from paradec.request import Preset, Request
from paradec.samplers.distributions import divide_logits
from paradec.samplers.masked.blocks import FixedBlocks
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.policies import check_steps
from paradec.samplers.masked.rules.combination import Combination
from paradec.samplers.renoising.state import anneal_temperature
from paradec.schedulers.base import PipelineModel, SamplerScheduler

CALL_DEFAULTS = {"threshold": 0.7, "editing_threshold": 0.5, "minimal_topk": 1, "max_post_steps": 16}
"""LLaDA2Pipeline's default arguments."""


@dataclass
class BlockSchedulerOutput(BaseOutput):
    """Result of a step. The fields are those of diffusers' `BlockRefinementSchedulerOutput`. Shapes: `B` rows, `L`
    positions of the block, `V` tokens of the vocabulary."""

    prev_sample: Tensor
    """[B, L] int64: the block after the step."""
    transfer_index: Tensor
    """[B, L] bool: masks that the step has filled."""
    editing_transfer_index: Tensor
    """[B, L] bool: tokens that the step has replaced or masked again."""
    sampled_tokens: Tensor
    """[B, L] int64: the candidates."""
    sampled_probs: Tensor
    """[B, L] float64: the candidates' probabilities."""
    pred_logits: Tensor
    """[B, L, V]: logits from which the candidates were drawn."""


class BlockScheduler(SamplerScheduler):
    """A masked sampler with the methods of `BlockRefinementScheduler`.

    Config: the sampler's settings, `block_length`, and `num_inference_steps` (only for samplers with a schedule; others
    take as many steps as they need). Thresholds among the pipeline's arguments only cause a warning.

    The sampler's state covers the open block. It restarts at `timestep` 0, the first step of each block, and when a
    callback has changed the block. Masks that a callback writes into a full block stay. Rows with an end token, which
    the pipeline has frozen, do not change. If temperature > 0, each block draws a seed from `generator`; so random
    draws differ from those of `paradec.generate`, whose seeds depend on the prompt.
    """

    family_settings: ClassVar[Mapping[str, Any]] = {"block_length": 32, "num_inference_steps": 32}
    pipelines = "LLaDA2Pipeline"

    def _setup(self) -> None:
        super()._setup()
        self._prepare(self.config.num_inference_steps, None, None)

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None, block_length: int | None = None
    ) -> None:
        """Begin a run. num_inference_steps: steps per block, at least 1, for samplers with a schedule. block_length:
        None takes the config's. Raises ValueError for a value out of its range."""
        self._start_run()
        self._prepare(num_inference_steps, device, block_length)

    def _prepare(self, num_inference_steps: int, device: str | torch.device | None, block_length: int | None) -> None:
        """Set the timesteps of a run, and clear the state."""
        block_length = self.config.block_length if block_length is None else block_length
        check_int("num_inference_steps", num_inference_steps, low=1)
        check_int("block_length", block_length, low=1)
        self.num_inference_steps, self.block_length = num_inference_steps, block_length
        self.timesteps = torch.arange(num_inference_steps - 1, -1, -1, device=device)
        self.sampler = self.make_sampler()
        self._state = self._last_tokens = None
        self._finished: Tensor | None = None
        self._rows = torch.arange(0)
        self._warned_arguments = set()

    @torch.no_grad()
    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        sampling_method: str = "auto",
        threshold: float | None = None,
        editing_threshold: float | None = None,
        minimal_topk: int | None = None,
        prompt_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> BlockSchedulerOutput | tuple[Tensor, ...]:
        """Take one step of the sampler.

        Args:
            model_output: [B, L, V] logits of the block; logits [:, i] predict token i.
            timestep: 0 in a block's first step.
            sample: [B, L] int64, the block with its masks.
            mask_token_id: None for models without a mask token, which only `EntropyBoundScheduler` supports.
            temperature, top_p, top_k: as in `paradec.generate`; they are read in a block's first step.
            sampling_method: "greedy" is temperature 0.
            threshold, editing_threshold, minimal_topk: only cause a warning; set thresholds in the config.
            prompt_mask: has no effect: all tokens that are not masks at the start of a block stay.
            generator: source of the block's seed, if temperature > 0.

        Raises ValueError for an argument out of its range, FloatingPointError for NaN or infinite logits, RuntimeError
        if the run belongs to another thread.
        """
        self._check_thread()
        self._check_tokens(model_output, sample, "[batch, block]", 2)
        if mask_token_id is None:
            values = self._step_without_mask(model_output, int(timestep), sample, generator)
            return BlockSchedulerOutput(*values) if return_dict else values
        check_choice("sampling_method", sampling_method, ("auto", "greedy", "multinomial"))
        thresholds = {"threshold": threshold, "editing_threshold": editing_threshold, "minimal_topk": minimal_topk}
        self._warn_ignored(CALL_DEFAULTS, thresholds)
        if int(timestep) == 0 or not self._is_unchanged(sample):
            temperature = 0.0 if sampling_method == "greedy" else temperature
            self._open(model_output, sample, mask_token_id, temperature, top_p, top_k, generator)
        block, tokens, probabilities = self._advance(model_output, sample)
        filled = (sample == mask_token_id) & (block != mask_token_id)
        changed = (sample != block) & ~filled
        self._last_tokens = block
        values = (block, filled, changed, tokens, probabilities, model_output)
        return BlockSchedulerOutput(*values) if return_dict else values

    def _step_without_mask(
        self, model_output: Tensor, timestep: int, sample: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """Take a step for a model without a mask token; return the fields of a `BlockSchedulerOutput`."""
        raise ValueError(
            f"mask_token_id=None: {type(self).__name__} fills masks, and this pipeline's model has none (it starts "
            "from random tokens); of paradec's schedulers only EntropyBoundScheduler supports this"
        )

    def _is_unchanged(self, sample: Tensor) -> bool:
        """Whether the block is the result of the last step, in all rows that the pipeline has not frozen."""
        if self._last_tokens is None or self._last_tokens.shape != sample.shape:
            return False
        is_changed = (self._last_tokens != sample).any(1)
        return not bool((is_changed if self._finished is None else is_changed & ~self._finished).any())

    def _open(
        self,
        model_output: Tensor,
        sample: Tensor,
        mask_token_id: int,
        temperature: float,
        top_p: float | None,
        top_k: int | None,
        generator: torch.Generator | None,
    ) -> None:
        """Start the sampler on the rows that have masks in the block."""
        state_before, rows_before = self._state, self._rows
        self._rows = (sample == mask_token_id).any(1).nonzero().squeeze(1)
        self._state = None
        if not len(self._rows):
            return
        facts = ModelFacts(model_output.shape[-1], mask_token_id, name=self.facts_name())
        self._model = PipelineModel(facts, sample.device)
        self._state = self.sampler.start(
            self._model,
            sample[self._rows],
            blocks=FixedBlocks(sample.shape[1], align="absolute"),
            steps=self.num_inference_steps if self.sampler.uses_steps else None,
            temperature=temperature,
            top_p=None if top_p is None or top_p >= 1 else top_p,
            top_k=None if top_k is None or top_k <= 0 else top_k,
            generator=generator,
            eos_early_stop=False,
        )
        if state_before is not None:
            new_index, old_index = (self._rows.unsqueeze(1) == rows_before).nonzero(as_tuple=True)
            for name, spec in self._state.memory.specs.items():
                if spec.reset == "sequence":
                    self._state.memory[name][new_index] = state_before.memory[name][old_index]

    def facts_name(self) -> str:
        """Return the model's name for the sampler."""
        return "the pipeline's model"

    def _advance(self, model_output: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step; return the block, its candidates and their probabilities, each [B, L]."""
        state = self._state
        if state is None or state.done:
            tokens, stats = token_statistics(model_output, ("confidence",))
            return sample, tokens, stats["confidence"]
        proposal, rows = self._commit(self.sampler, state, model_output)
        block, tokens = sample.clone(), sample.clone()
        probabilities = torch.zeros(sample.shape, dtype=torch.float64, device=sample.device)
        block[self._rows] = state.canvas
        tokens[rows, proposal.positions] = torch.where(proposal.available, proposal.values, proposal.current)
        confidence = proposal.quantities["confidence"]
        probabilities[rows, proposal.positions] = torch.where(proposal.available, confidence, 0.0)
        return block, tokens, probabilities

    def _running(self, batch: int) -> Tensor:
        """Return [B] bool: the rows whose block is unfinished."""
        running = torch.zeros(batch, dtype=torch.bool, device=self._rows.device)
        if self._state is not None:
            running[self._rows] = torch.as_tensor(self._state.running, device=running.device)
        return running

    def check_eos_finished(
        self,
        cur_x: Tensor,
        sampled_tokens: Tensor,
        final_transfer: Tensor,
        finished: Tensor,
        eos_token_id: int,
        mask_token_id: int,
        prompt_length: int,
    ) -> Tensor:
        """Find the rows that have an end token after the prompt, and nothing undecided between the two: [B] bool. The
        pipeline calls this method after every step.

        In diffusers' scheduler, end tokens in the prompt, or committed early, prevent the end of a row; here they do
        not. If the sampler revises tokens, the tokens of this step count as undecided unless the block is done.

        cur_x: [B, n] int64, all tokens up to the block's end. final_transfer: [B, L] bool, the step's changes.
        finished: [B] bool, rows that ended earlier."""
        undecided = cur_x == mask_token_id
        if self.sampler.needs.revises:
            undecided = undecided.clone()
            open_rows = self._running(len(cur_x)).to(cur_x.device)
            undecided[:, -final_transfer.shape[1] :] |= final_transfer & open_rows.unsqueeze(1)
        answer, undecided = cur_x[:, prompt_length:], undecided[:, prompt_length:]
        has_end = ((answer == eos_token_id) & (undecided.int().cumsum(1) == 0)).any(1)
        self._finished = finished | has_end
        return self._finished

    def check_block_should_continue(
        self,
        step_idx: int,
        masks_remaining: bool | Tensor,
        editing_enabled: bool,
        editing_transfer_index: Tensor,
        post_steps: int,
        max_post_steps: int,
        finished: Tensor,
    ) -> bool:
        """Whether a row that is not `finished` ([B] bool) has an unfinished block. Other arguments have no effect. A
        full block ends at once, without the extra evaluation of diffusers' scheduler."""
        self._warn_ignored(CALL_DEFAULTS, {"max_post_steps": max_post_steps})
        if self._state is None:
            return False
        return bool((self._running(len(finished)) & ~finished.to(self._rows.device)).any())


class LowConfidenceScheduler(BlockScheduler, sampler="low_confidence"):
    """LLaDA: the most confident tokens, in equal numbers per step (arXiv 2502.09992)."""


class RandomScheduler(BlockScheduler, sampler="random"):
    """LLaDA: random positions, in equal numbers per step (arXiv 2502.09992)."""


class MarginScheduler(BlockScheduler, sampler="margin"):
    """Plan for the Best: the tokens with the largest margin between the best two candidates (arXiv 2502.06768)."""


class ThresholdScheduler(BlockScheduler, sampler="threshold"):
    """Fast-dLLM: all tokens with confidence >= threshold, and the best one (arXiv 2505.22618)."""


class FactorScheduler(BlockScheduler, sampler="factor"):
    """Fast-dLLM: as many tokens as their confidences jointly allow (arXiv 2505.22618)."""


class HierarchyScheduler(BlockScheduler, sampler="hierarchy"):
    """dInfer: the most confident token of every run of masks, and all tokens above a confidence (arXiv 2510.08666)."""


class EntropyThresholdScheduler(BlockScheduler, sampler="entropy_threshold"):
    """dParallel: all tokens below an entropy, and the best one (arXiv 2509.26488)."""


class LocalLeapScheduler(BlockScheduler, sampler="localleap"):
    """LocalLeap: all tokens above a confidence threshold, which is lower near such tokens (arXiv 2510.07081)."""


class CreditDecodingScheduler(BlockScheduler, sampler="credit"):
    """CreditDecoding: the threshold rule on logits with credit for tokens that stay likely (arXiv 2510.06133)."""


class CCDScheduler(BlockScheduler, sampler="ccd"):
    """CCD: the tokens whose average distribution over the last steps has the lowest entropy (arXiv 2512.02044)."""


class CCDAgreeScheduler(BlockScheduler, sampler="ccd_agree"):
    """CCD's public code: several tokens on which two steps agree (arXiv 2512.02044)."""


class KLASSScheduler(BlockScheduler, sampler="klass"):
    """KLASS: all confident tokens whose distribution has stopped changing (arXiv 2511.05664)."""


class PersistenceScheduler(BlockScheduler, sampler="persistence"):
    """CORA-Diff: the most confident tokens by a schedule, and nearly certain tokens that were also the best earlier."""


class SaberScheduler(BlockScheduler, sampler="saber"):
    """Saber: all tokens above the mean confidence so far; masks those whose confidence fell most (arXiv 2510.18165)."""


class EditingScheduler(BlockScheduler, sampler="editing"):
    """LLaDA2.1: all tokens above a confidence. Replaces tokens that the model rejects (arXiv 2602.08676). `threshold`,
    `editing_threshold` and `max_post_steps` are read from the config, not from the pipeline's arguments."""


class Learn2PDScheduler(BlockScheduler, sampler="learn2pd"):
    """Learn2PD: all tokens that a trained filter accepts, and the best one (arXiv 2509.25188). Answers are not trimmed.
    Config: `filter`, path of a filter trained for the pipeline's model; `model_name`, the model's name in the filter's
    file (for models that paradec wrapped, their class)."""

    family_settings = {**BlockScheduler.family_settings, "model_name": "model"}

    def facts_name(self) -> str:
        return self.config.model_name


class CombinationScheduler(BlockScheduler, sampler="union"):
    """Combined samplers. Config: `combination`, a sampler's `to_dict` or text: "credit(threshold=0.95)+localleap"."""

    family_settings = {**BlockScheduler.family_settings, "combination": "credit+localleap"}

    @classmethod
    def sampler_settings(cls) -> dict[str, Any]:
        return {}

    def make_sampler(self) -> MaskedSampler:
        setting = self.config.combination
        sampler: Any = Sampler.from_dict(setting) if isinstance(setting, Mapping) else samplers.create(setting)
        if sampler.family != "masked" or sampler.needs.multi_step or sampler.needs.mask_probes:
            raise ValueError(f"combination={short_repr(setting)} cannot be a scheduler: use paradec.generate")
        return sampler


class EntropyBoundScheduler(BlockScheduler, sampler="entropy_bound"):
    """EB-Sampler: as many tokens as their entropies jointly allow (arXiv 2505.24857). For DiffusionGemmaPipeline, whose
    model has no mask token, it does the same as diffusers' `EntropyBoundScheduler`: each step decides all tokens again,
    rejected ones become random, and the temperature falls from `t_max` to `t_min`. diffusers' `entropy_bound` is called
    `gamma`. paradec's sampler `diffusion_gemma` is the same loop."""

    family_settings = {**BlockScheduler.family_settings, "t_max": 0.8, "t_min": 0.4}
    renamed_keys = {"entropy_bound": "gamma"}
    pipelines = "LLaDA2Pipeline and DiffusionGemmaPipeline"

    def _setup(self) -> None:
        for name in ("t_max", "t_min"):
            check_temperature(name, self.config[name])
            check_number(name, self.config[name], low=0, open_low=True)
        super()._setup()

    def _step_without_mask(
        self, model_output: Tensor, timestep: int, sample: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """Decide the whole block again. Candidates and random tokens are drawn from `generator` in the same order and
        shapes as in diffusers' scheduler."""
        vocab = model_output.shape[-1]
        remaining = (self.num_inference_steps - timestep) / self.num_inference_steps
        pred_logits = divide_logits(model_output, anneal_temperature(remaining, self.config.t_min, self.config.t_max))
        masks = torch.full_like(sample, vocab)  # a token that the model does not have
        logits = torch.nn.functional.pad(pred_logits, (0, 1), value=-torch.inf)
        self._open(logits, masks, vocab, 0.0, None, None, None)  # temperature 0: candidates are drawn below
        block, _, _ = self._advance(logits, masks)
        accepted = block != vocab
        device = sample.device if generator is None else generator.device
        p = pred_logits.softmax(-1, dtype=torch.float32)
        draws = torch.multinomial(p.flatten(0, 1).to(device), 1, generator=generator).to(sample.device)
        tokens = draws.view_as(sample)
        probabilities = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        noise = torch.randint(vocab, sample.shape, generator=generator, device=device)
        block = torch.where(accepted, tokens, noise.to(sample.device))
        return block, accepted, torch.zeros_like(accepted), tokens, probabilities, pred_logits


CALL_ARGUMENTS = {"max_new_tokens": "gen_length", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
"""Fields of `paradec.Request` that are arguments of LLaDA2Pipeline, with the arguments' names."""
CONFIG_FIELDS = ("sampler", "block_length", "steps")


def from_preset(preset: Preset, **config: Any) -> BlockScheduler:
    """Make the scheduler of a preset for LLaDA2Pipeline. `call_arguments` returns the pipeline's arguments.

    Args:
        preset: a file of `paradec tune` or `Request.save`, or a `Request`.
        config: more config keys, which have precedence. Give the model's `block_length` if the preset has none.

    Raises ValueError for a sampler without a scheduler, or a field that pipelines do not support; FileNotFoundError.
    """
    request = Request.from_arguments({}, preset)
    for name, value in request.changes().items():
        if name not in (*CONFIG_FIELDS, *CALL_ARGUMENTS, "seed"):
            raise ValueError(
                f"{name}={short_repr(value)} of the preset is not supported in a pipeline: use paradec.generate"
            )
    method: Any = samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler
    blocks = {} if request.block_length is None else {"block_length": request.block_length}
    config = blocks | _block_steps(request) | config
    if isinstance(method, Combination):
        return CombinationScheduler(**{"combination": request.to_dict()["sampler"], **config})
    for cls in BlockScheduler.__subclasses__():
        if cls.sampler_name == method.name:
            return cls(**{name: to_data(getattr(method, name)) for name in cls.sampler_settings()} | config)
    raise ValueError(f"sampler {method.name!r} of the preset has no scheduler: use paradec.generate")


def call_arguments(preset: Preset) -> dict[str, Any]:
    """Convert a preset to arguments of LLaDA2Pipeline, its seed to `generator`. Raises ValueError for several seeds."""
    request = Request.from_arguments({}, preset)
    changes = request.changes()
    arguments: dict[str, Any] = {CALL_ARGUMENTS[name]: changes[name] for name in changes if name in CALL_ARGUMENTS}
    seed: Any = request.seed
    if seed is not None:
        check_int("seed of the preset", seed, low=0, high=LARGEST_INT64)
        arguments["generator"] = torch.Generator().manual_seed(seed)
    return arguments | _block_steps(request)


def _block_steps(request: Request) -> dict[str, int]:
    """Convert the request's `steps`, which are those of the whole answer, to steps of one block."""
    if request.steps is None:
        return {}
    if request.block_length is None or request.max_new_tokens is None:
        raise ValueError(f"steps={request.steps} of the preset needs block_length and max_new_tokens too")
    num_blocks = -(-request.max_new_tokens // request.block_length)
    check_steps(request.steps, np.array([num_blocks]), "blocks")
    return {"num_inference_steps": request.steps // num_blocks}
