"""Continuous speculative decoding (CSpD; Wang et al., arXiv 2411.11925, and its public code for MAR): a smaller MAR
drafts the tokens of several steps, and the model verifies them in one call, by the rule `verify_drafts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_bool, check_choice, check_int, check_model, check_number, short_repr
from paradec.core.family_queries import LatentProposal
from paradec.core.protocol import Commit, check_finite
from paradec.core.query import Cost
from paradec.models.images.continuous import ContinuousAnswer, ContinuousQuery, TokenDistribution
from paradec.request import Request
from paradec.samplers.pictures.continuous import ContinuousSampler, ContinuousState, to_normal
from paradec.samplers.pictures.start import scheduled_guidance

ACCEPT_STREAM, REDRAW_STREAM = 2, 3
"""Random streams for accepting drafts, and for redrawing rejected drafts; the heads' noise is from TOKEN_STREAM."""
TRAINED_STEPS = 1000
"""Number of diffusion steps with which the heads were trained."""


# ---- the rule -------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """Result of the verification of `n` tokens."""

    values: Tensor
    """[n, channels]: the tokens."""
    ratio: Tensor
    """[n] float64: acceptance ratio, which was compared with a uniform number."""
    log_sigma: Tensor
    """[n] float64: logarithm of Sigma (see `verify_drafts`)."""
    accepted: Tensor
    """[n] bool."""
    resolved: Tensor
    """[n] bool: accepted or redrawn; `values` of the other tokens are the target's mean, or zero if not `mended`."""
    rounds: int
    """Number of rounds in which tokens were redrawn."""


def verify_drafts(
    x: Tensor,
    draft: TokenDistribution,
    target: TokenDistribution,
    uniform: Tensor,
    redraw: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    inner_temperature: float,
    max_rounds: int,
    mended: bool,
) -> Verdict:
    """Accept drafts, or redraw them.

    Let q = N(mq, sq^2) be the draft model's and p = N(mp, sp^2) the target's distribution, Lq and Lp their half
    log-variances, and Sigma = exp(sum over channels of Lp - Lq). A draft x is accepted if

        Sigma prod(sq / sp) exp(-|(x - mp) / sp|^2 / (2 T^2)) / exp(-|(x - mq) / sq|^2 / (2 T^2)) > u.

    In every round, each rejected draft gets a candidate y ~ p and another uniform number u. The candidate replaces the
    draft if u < (p(y) - q(y) / Sigma)+ / p(y). With T = 1, Sigma = 1 and x ~ q the result is distributed as p.

    x: [n, channels]. draft, target: distributions, each [n, channels]. uniform: [n], the numbers u for the drafts.
    redraw: (round, token indices [m] int64) -> standard normal [m, channels] and uniform [m] numbers for these tokens.
    inner_temperature: T. max_rounds: limit of rounds. mended: see `CSpD`."""
    x, mq, sq, mp, sp = (tensor.double() for tensor in (x, draft.mean, draft.std, target.mean, target.std))
    log_sigma = (target.half_log_variance.double() - draft.half_log_variance.double()).sum(-1)
    log_scales = (sq.log() - sp.log()).sum(-1)

    def exponents(y: Tensor, index: Tensor | slice) -> Tensor:
        """Exponents of p(y) / q(y), without the factors in front."""
        return 0.5 * (((y - mq[index]) / sq[index]) ** 2 - ((y - mp[index]) / sp[index]) ** 2).sum(-1)

    ratio = (log_sigma + log_scales + exponents(x, slice(None)) / inner_temperature**2).exp()
    ratio = ratio.nan_to_num(nan=0.0, posinf=torch.inf)  # if a standard deviation is 0
    accepted = ratio > uniform
    values, rounds = x.clone(), 0
    # the public code also redraws accepted tokens, until each has a redrawn value; it then discards these values
    is_final = accepted if mended else accepted & accepted.all()
    while rounds < max_rounds and not is_final.all():
        index = (~is_final).nonzero().squeeze(-1) if mended else torch.arange(len(x), device=x.device)
        noise, accept_uniform = redraw(rounds, index)
        y = mp[index] + sp[index] * noise.double()
        q_to_p = (-log_scales[index] - exponents(y, index) - log_sigma[index]).exp()  # q(y) / (Sigma p(y))
        redrawn = index[accept_uniform < 1 - q_to_p]
        values[redrawn] = y[accept_uniform < 1 - q_to_p]
        is_final = is_final.index_fill(0, redrawn, True)
        rounds += 1
    resolved = accepted | is_final
    values = torch.where(resolved.unsqueeze(-1), values, mp if mended else torch.zeros_like(mp))
    values = torch.where(accepted.unsqueeze(-1), x, values)
    return Verdict(values, ratio, log_sigma, accepted, resolved, rounds)


# ---- random numbers -------------------------------------------------------------------------------------------------


@dataclass
class CounterDraws:
    """Counter-based random numbers of a request (`paradec.core.rng`): repeated calls return the same numbers."""

    keys: Tensor
    """[B, 2] int64."""
    size: int
    """Number of positions of an image."""

    def chain(self, positions: Tensor, steps: int, channels: int) -> Tensor:
        """Draw standard normal numbers [B, W, steps + 1, channels] for the diffusion heads at `positions` [B, W]: the
        initial noise, then the noise of every step. Both models use the same numbers."""
        zero = torch.zeros(len(positions), dtype=torch.int64, device=positions.device)
        uniform = rng.uniform(self.keys, zero, positions, (steps + 1) * channels, rng.TOKEN_STREAM)
        return to_normal(uniform).unflatten(-1, (steps + 1, channels))

    def accept(self, commit: int, positions: Tensor) -> Tensor:
        """Draw uniform numbers [B, W] in (0, 1) for the `positions` [B, W] that this commit verifies."""
        step = torch.full((len(positions),), commit, device=positions.device)
        return rng.uniform(self.keys, step, positions, 1, ACCEPT_STREAM).squeeze(-1)

    def redraw(
        self, commit: int, round_index: int, rows: Tensor, positions: Tensor, channels: int
    ) -> tuple[Tensor, Tensor]:
        """Draw standard normal [m, channels] and uniform [m] numbers for a round of a commit.

        rows, positions: [m] int64."""
        step = torch.full_like(positions, commit)
        counter = (positions + round_index * self.size).unsqueeze(-1)
        uniform = rng.uniform(self.keys[rows], step, counter, channels + 1, REDRAW_STREAM).squeeze(1)
        return to_normal(uniform[:, :channels]), uniform[:, channels]


# ---- the sampler ----------------------------------------------------------------------------------------------------


@dataclass
class CSpDState(ContinuousState):
    """State of a request. A commit decides the tokens of one step of the model, or of several drafted steps."""

    schedule: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """[T + 1] int64 on the host: number of undecided positions of a row before every step; 0 after the last."""
    calls: tuple[range, ...] = ()
    """Range of steps of each commit."""
    num_target_steps: int = 0
    """Number of steps that the model makes alone, one per commit, before the first drafts."""
    draws: CounterDraws | None = None
    num_draft_calls: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[B] int64 on the host: forwards of the draft model."""

    @property
    def draft_nfe(self) -> np.ndarray:
        return self.num_draft_calls.copy()


@dataclass(kw_only=True)
class CSpDProposal(LatentProposal):
    """Tokens of a commit: `values` [B, W, channels] are the model's own, or verified drafts if there is a `verdict`."""

    positions: Tensor
    """[B, W] int64, ascending: positions of the values."""
    target: TokenDistribution
    """[B, W, channels]."""
    draft: TokenDistribution | None = None
    """[B, W, channels]; None for a step of the model alone."""
    verdict: Verdict | None = None
    """Verdict on the B * W tokens, row by row."""
    draft_cost: Cost | None = None


@dataclass(frozen=True)
class CSpD(ContinuousSampler):
    """A smaller MAR draws the tokens of up to `num_draft` steps; the model then evaluates all their positions in one
    call, and accepts or replaces each token independently. Both heads use the same noise at a position, so that their
    tokens are close.

    Lossy, for two reasons. The model verifies all tokens of a call from the context before the call. The heads' last
    step adds no noise, so that a draft is always the mean of its distribution; `inner_temperature` widens both
    distributions to compare them. `nfe` counts the model's calls, `draft_nfe` the draft model's. As a baseline,
    `ratio=1` with `steps=nfe` makes as many calls of the model alone, with the same noise.

    Of T steps the model makes the first 1 + floor(ratio T) alone. Then drafts are verified at every step whose index
    (from 0) is a multiple of `num_draft`, and at the last step.

    `mended` (the default) changes two parts of the public code's rule. Accepted tokens are not redrawn (the code
    redraws all tokens until each has a redrawn value), so that rows do not depend on each other. A token that is never
    accepted gets the mean of the model's chain (the code writes zeros). Under both rules, redrawn tokens have the noise
    of the last step; without this noise their distribution would have no density.

    Random numbers are counter-based: an image depends only on its seed and class, except with `mended=False`. The
    preset "demo" has the settings of the code's demonstration, which has 256 steps and a guidance scale of 4.

    Args:
        draft: the smaller `paradec.models.images.mar.MARModel`, with the same positions, channels, classes and latents;
            needed unless the model makes all steps alone. `to_dict` has only its name.
        num_draft: largest number of steps between two verifications.
        ratio: share of the steps that the model makes alone, at the start; 0 to 1.
        inner_temperature: the temperature T in `verify_drafts`, above 0.
        mended: see above.
        max_rounds: limit of the rounds that redraw rejected tokens.
        head_steps: number of steps of both diffusion heads, 1 to 1000. Several numbers, such as (10, 1) or "10,1", are
            the steps in equal sections of the training steps. Steps are evenly spaced within a section.
        temperature: factor of the noise that the heads' steps add. At 0, which needs `mended`, no draft is accepted,
            and all tokens are the means of the model's chains.
        guidance_schedule: "linear" grows from 1 towards the request's scale: 1 + (scale - 1) (S - m) / S, where m of S
            positions are undecided after the step (as in the code, m is 1 at the last step); or "constant". A call
            that verifies several steps has the scale of the last of these steps.

    Raises:
        ValueError: a setting out of its range. TypeError: a draft model of another kind.
    """

    draft: Any = None
    num_draft: int = 8
    ratio: float = 0.15
    inner_temperature: float = 42.0
    mended: bool = True
    max_rounds: int = 100
    head_steps: int | str | tuple[int, ...] = 100
    temperature: float = 1.0
    guidance_schedule: str = "linear"

    name = "cspd"
    paper = "Continuous speculative decoding"
    arxiv = "2411.11925"
    summary = "a smaller MAR drafts the tokens of several steps, which the model verifies in one forward; lossy"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "demo": {"num_draft": 4, "ratio": 0.05, "guidance_schedule": "constant"}
    }

    def __post_init__(self) -> None:
        if self.draft is not None:
            if not callable(self.draft) or not hasattr(self.draft, "facts"):
                raise ValueError(f"draft={short_repr(self.draft)} must be a smaller MAR, for example from paradec.load")
            check_model(f"draft of {self.name!r}", self.draft, self.models)
        check_int("num_draft", self.num_draft, low=1, high=2**16)
        check_number("ratio", self.ratio, low=0, high=1)
        check_number("inner_temperature", self.inner_temperature, low=0, open_low=True)
        check_bool("mended", self.mended)
        check_int("max_rounds", self.max_rounds, low=0, high=10_000)
        parse_head_steps(self.head_steps)
        if isinstance(self.head_steps, list):
            object.__setattr__(self, "head_steps", tuple(self.head_steps))
        check_number("temperature", self.temperature, low=0)
        if self.temperature == 0 and not self.mended:
            raise ValueError("temperature=0 needs mended=True: the published rule divides by the temperature")
        check_choice("guidance_schedule", self.guidance_schedule, ("linear", "constant"))

    @torch.inference_mode(False)
    def start(
        self,
        model: Any,
        prompt: Sequence[int] | int,
        request: Request | None = None,
        *,
        order: Tensor | None = None,
        draws: CounterDraws | None = None,
        **arguments: Any,
    ) -> CSpDState:
        """As `ContinuousSampler.start`. Also raises ValueError without a draft model, or for one that does not match.

        Args:
            draws: source of random numbers; None: `CounterDraws` of the seeds.
        """
        self.check_model(model)
        if self.draft is not None:
            model.check_draft(self.draft)
        state: CSpDState = super().start(model, prompt, request, order=order, **arguments)
        if self.draft is None and state.num_target_steps < len(state.calls):
            raise ValueError(f"draft is needed: paradec.samplers.create({self.name!r}, draft=a smaller MAR)")
        state.draws = CounterDraws(state.keys, state.order.shape[1]) if draws is None else draws
        return state

    def _state(self, num_left: np.ndarray, fields: dict[str, Any]) -> CSpDState:
        steps = len(num_left) - 1
        calls, begin, num_target_steps = [], 0, 0
        for step in range(steps):
            is_target_step = step <= self.ratio * steps
            if is_target_step or step % self.num_draft == 0 or step == steps - 1:
                calls.append(range(begin, step + 1))
                begin = step + 1
            num_target_steps += is_target_step
        return CSpDState(
            num_left=num_left[[*(call.start for call in calls), steps]],
            schedule=num_left,
            calls=tuple(calls),
            num_target_steps=num_target_steps,
            num_draft_calls=np.zeros(fields["batch"], np.int64),
            **fields,
        )

    # ---- steps ------------------------------------------------------------------------------------------------------

    def query(self, state: CSpDState) -> list[ContinuousQuery]:
        return [self._make_query(state, state.tokens, state.calls[state.index])]

    def guidance(self, state: CSpDState, step: int) -> float | None:
        """Return the guidance scale of a step; None without guidance."""
        if state.guidance_scale == 1.0:
            return None
        size = int(state.num_left[0])
        num_decided = size - max(int(state.schedule[step + 1]), 1)
        return float(scheduled_guidance(self.guidance_schedule, state.guidance_scale, num_decided, size))

    def _make_query(self, state: CSpDState, tokens: Tensor, steps: range) -> ContinuousQuery:
        """Make the query that draws all tokens of `steps`, given the tokens [B, S, channels] of earlier steps."""
        known = state.order[:, state.schedule[steps.start] :].sort(-1).values
        wanted = state.order[:, state.schedule[steps.stop] : state.schedule[steps.start]].sort(-1).values
        sections, size = parse_head_steps(self.head_steps), state.order.shape[1]
        guidance = self.guidance(state, steps[-1])
        assert state.draws is not None  # `start` sets them
        return ContinuousQuery(
            rows=state.rows,
            tokens=_gather_tokens(tokens, known),
            known=known,
            targets=torch.arange(size, device=known.device).expand_as(state.order),
            columns=known,
            wanted=wanted,
            labels=state.labels,
            noise=state.draws.chain(wanted, sum(sections), tokens.shape[-1]),
            temperature=self.temperature,
            guidance=guidance,
            branches=1 if guidance is None else 2,
            forwarded=np.full(state.batch, size),
            sections=sections,
        )

    def propose(
        self, state: CSpDState, outputs: list[ContinuousAnswer], queries: list[ContinuousQuery]
    ) -> CSpDProposal:
        """Return the model's tokens, or verified drafts, which are drawn here because the model does not read them."""
        (answer,), (query,) = outputs, queries
        assert answer.distribution is not None
        proposal = CSpDProposal(
            rows=query.rows,
            values=answer.tokens,
            cost=Cost(queries, state.batch),
            positions=query.wanted,
            made_at=state.commits,
            target=answer.distribution,
        )
        if state.index >= state.num_target_steps:
            proposal.draft, proposal.draft_cost = self._draft_tokens(state, query.wanted)
            proposal.verdict = self._verify_drafts(state, proposal.draft, answer.distribution, query.wanted)
            proposal.values = proposal.verdict.values.view_as(answer.tokens)
        return proposal

    def _draft_tokens(self, state: CSpDState, positions: Tensor) -> tuple[TokenDistribution, Cost]:
        """Draw drafts at `positions` [B, W] step by step; return their distributions and the cost."""
        tokens, queries = state.tokens, []
        distributions = [torch.zeros_like(tokens) for _ in range(3)]
        for step in state.calls[state.index]:
            query = self._make_query(state, tokens, range(step, step + 1))
            distribution = self.draft(query).distribution
            index = query.wanted.unsqueeze(-1).expand_as(distribution.mean)
            step_values = (distribution.mean, distribution.std, distribution.half_log_variance)
            distributions = [
                canvas.scatter(1, index, values.to(canvas.dtype))
                for canvas, values in zip(distributions, step_values, strict=True)
            ]
            tokens = tokens.scatter(1, index, distribution.mean.to(tokens.dtype))
            queries.append(query)
        return TokenDistribution(*(_gather_tokens(canvas, positions) for canvas in distributions)), Cost(
            queries, state.batch
        )

    def _verify_drafts(
        self, state: CSpDState, draft: TokenDistribution, target: TokenDistribution, positions: Tensor
    ) -> Verdict:
        draws, channels = state.draws, state.tokens.shape[-1]
        assert draws is not None
        rows = torch.arange(state.batch, device=positions.device).unsqueeze(-1).expand_as(positions).flatten()
        flat_positions = positions.flatten()

        def redraw(round_index: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return draws.redraw(state.index, round_index, rows[tokens], flat_positions[tokens], channels)

        return verify_drafts(
            draft.mean.flatten(0, 1),
            _flatten(draft),
            _flatten(target),
            draws.accept(state.index, positions).flatten(),
            redraw,
            self.inner_temperature,
            self.max_rounds if self.temperature else 0,
            self.mended,
        )

    def commit(self, state: CSpDState, proposal: CSpDProposal) -> Commit:
        """Write the tokens. Raises FloatingPointError for NaN or infinite numbers (then nothing is written)."""
        state.check_current(proposal)
        for name, distribution in (("model", proposal.target), ("draft model", proposal.draft)):
            if distribution is not None:
                steps = f"steps {state.calls[state.index].start} to {state.calls[state.index][-1]}"
                message = f"the {name} returned NaN or infinite tokens at {steps} for row {{row}}"
                check_finite(distribution.mean.flatten(1).isfinite().all(1), proposal.rows, message)
        values = proposal.values.to(state.tokens.dtype)
        index = proposal.positions.unsqueeze(-1).expand_as(values)
        state.tokens = state.tokens.scatter(1, index, values)
        state.count(proposal.cost)
        if proposal.draft_cost is not None:
            state.num_draft_calls = state.num_draft_calls + proposal.draft_cost.nfe
        state.commits += 1
        state.index += 1
        selected = torch.ones_like(proposal.positions, dtype=torch.bool)
        scores = None
        if proposal.verdict is not None:
            scores = proposal.verdict.ratio.clamp(max=1).view_as(proposal.positions)
        return Commit(proposal.rows, values, proposal.positions, selected, scores, proposal.kind)


def parse_head_steps(head_steps: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return the number of steps in each of n equal sections of a diffusion head's training steps. Raises ValueError if
    `head_steps` is not one or more positive integers, or has more steps than a section."""
    if isinstance(head_steps, str):
        entries = [entry.strip() for entry in head_steps.split(",")]
        counts: tuple[Any, ...] = tuple(int(entry) if entry.isdecimal() else 0 for entry in entries)
    elif isinstance(head_steps, Sequence):
        counts = tuple(head_steps)
    else:
        check_int("head_steps", head_steps, low=1, high=TRAINED_STEPS)
        return (head_steps,)
    max_count = TRAINED_STEPS // max(len(counts), 1)
    if not counts or not all(type(count) is int and 1 <= count <= max_count for count in counts):
        raise ValueError(
            f"head_steps={short_repr(head_steps)} must be n integers separated by commas, each from 1 to "
            f"{TRAINED_STEPS} / n"
        )
    return counts


def _gather_tokens(tokens: Tensor, positions: Tensor) -> Tensor:
    """Select tokens [B, W, channels] at positions [B, W] of tokens [B, S, channels]."""
    return tokens.gather(1, positions.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def _flatten(distribution: TokenDistribution) -> TokenDistribution:
    """Reshape a distribution [B, W, channels] to [B * W, channels]."""
    return TokenDistribution(
        distribution.mean.flatten(0, 1), distribution.std.flatten(0, 1), distribution.half_log_variance.flatten(0, 1)
    )
