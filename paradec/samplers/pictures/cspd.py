"""Continuous speculative decoding (CSpD; Wang et al., arXiv 2411.11925, and its public code for MAR): a smaller MAR
drafts tokens of several steps, the model judges them at once. The rule is `verified`."""

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
from paradec.samplers.pictures.continuous import ContinuousSampler, ContinuousState, normal
from paradec.samplers.pictures.start import guidance_at

ACCEPT_STREAM, REDRAW_STREAM = 2, 3
"""Draws that accept drafts, and those that take the place of rejected ones; the heads' noise is TOKEN_STREAM's."""
TRAINED_STEPS = 1000
"""Of the diffusion heads."""


# ---- the rule -------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What became of the drafts of `n` tokens."""

    values: Tensor
    """[n, channels]: the tokens."""
    ratio: Tensor
    """[n] float64: what the uniform number of each was compared with."""
    log_sigma: Tensor
    """[n] float64: of Sigma."""
    accepted: Tensor
    """[n] bool."""
    settled: Tensor
    """[n] bool: accepted or drawn again; the others are zero, or the target's own value."""
    rounds: int
    """In which tokens were drawn again."""


def verified(
    x: Tensor,
    draft: TokenDistribution,
    target: TokenDistribution,
    uniform: Tensor,
    redraw: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    inner_temperature: float,
    max_rounds: int,
    mended: bool,
) -> Verdict:
    """Accept drafts, or draw other tokens in their place.

    With q = N(mq, sq^2) of the draft model, p = N(mp, sp^2) of the target, L their half log-variances and Sigma =
    exp(sum over channels of Lp - Lq), a draft x is accepted where

        Sigma prod(sq / sp) exp(-|(x - mp) / sp|^2 / (2 T^2)) / exp(-|(x - mq) / sq|^2 / (2 T^2)) > u.

    A rejected one is drawn again, y ~ p, and y is taken where another u < (p(y) - q(y) / Sigma)+ / p(y), else it waits
    for the next round. With T = 1, Sigma = 1 and x ~ q the result is distributed as p.

    x: [n, channels]. draft, target: distributions, each [n, channels]. uniform: [n], of acceptance.
    redraw: (round, tokens [m] int64) -> standard normal [m, channels] and uniform [m] numbers of these tokens.
    inner_temperature: T. max_rounds: of redrawing. mended: see `CSpD`."""
    x, mq, sq, mp, sp = (tensor.double() for tensor in (x, draft.mean, draft.std, target.mean, target.std))
    log_sigma = (target.half_log_variance.double() - draft.half_log_variance.double()).sum(-1)
    log_scales = (sq.log() - sp.log()).sum(-1)

    def exponents(y: Tensor, at: Tensor | slice) -> Tensor:
        """Of p(y) / q(y), without the factors in front."""
        return 0.5 * (((y - mq[at]) / sq[at]) ** 2 - ((y - mp[at]) / sp[at]) ** 2).sum(-1)

    ratio = (log_sigma + log_scales + exponents(x, slice(None)) / inner_temperature**2).exp()
    ratio = ratio.nan_to_num(nan=0.0, posinf=torch.inf)  # of deviations that are 0
    accepted = ratio > uniform
    values, rounds = x.clone(), 0
    # in the published form accepted tokens are drawn again as well, for nothing, and must be taken before it ends
    is_final = accepted if mended else accepted & accepted.all()
    while rounds < max_rounds and not is_final.all():
        tokens = (~is_final).nonzero().squeeze(-1) if mended else torch.arange(len(x), device=x.device)
        noise, accept_uniform = redraw(rounds, tokens)
        y = mp[tokens] + sp[tokens] * noise.double()
        q_to_p = (-log_scales[tokens] - exponents(y, tokens) - log_sigma[tokens]).exp()  # q(y) / (Sigma p(y))
        redrawn = tokens[accept_uniform < 1 - q_to_p]
        values[redrawn] = y[accept_uniform < 1 - q_to_p]
        is_final = is_final.index_fill(0, redrawn, True)
        rounds += 1
    settled = accepted | is_final
    values = torch.where(settled.unsqueeze(-1), values, mp if mended else torch.zeros_like(mp))
    values = torch.where(accepted.unsqueeze(-1), x, values)
    return Verdict(values, ratio, log_sigma, accepted, settled, rounds)


# ---- random numbers -------------------------------------------------------------------------------------------------


@dataclass
class CounterDraws:
    """The random numbers of one request, counter-based (`paradec.core.rng`): repeated calls return the same numbers."""

    keys: Tensor
    """[B, 2] int64."""
    size: int
    """Positions of an image."""

    def chain(self, positions: Tensor, steps: int, channels: int) -> Tensor:
        """[B, W, steps + 1, channels] standard normal numbers for the heads at `positions` [B, W]: the start, then
        a row per step in the order of their execution. Both models ask for the same."""
        zero = torch.zeros(len(positions), dtype=torch.int64, device=positions.device)
        uniform = rng.uniform(self.keys, zero, positions, (steps + 1) * channels, rng.TOKEN_STREAM)
        return normal(uniform).unflatten(-1, (steps + 1, channels))

    def accept(self, commit: int, positions: Tensor) -> Tensor:
        """[B, W] uniform numbers in (0, 1), at `positions` [B, W] that this commit verifies."""
        step = torch.full((len(positions),), commit, device=positions.device)
        return rng.uniform(self.keys, step, positions, 1, ACCEPT_STREAM).squeeze(-1)

    def redraw(
        self, commit: int, round_index: int, rows: Tensor, positions: Tensor, channels: int
    ) -> tuple[Tensor, Tensor]:
        """Standard normal [m, channels] and uniform [m] numbers of a commit's round `round_index`.

        rows, positions: [m] int64."""
        step = torch.full_like(positions, commit)
        counter = (positions + round_index * self.size).unsqueeze(-1)
        uniform = rng.uniform(self.keys[rows], step, counter, channels + 1, REDRAW_STREAM).squeeze(1)
        return normal(uniform[:, :channels]), uniform[:, channels]


# ---- the sampler ----------------------------------------------------------------------------------------------------


@dataclass
class CSpDState(ContinuousState):
    """What changes while images are decoded: a commit is a step of the target, or several drafted steps."""

    schedule: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """[T + 1] int64 on the host: undecided positions of each row before every step, and 0 after the last."""
    calls: tuple[range, ...] = ()
    """Per commit, the steps that it decides."""
    targets: int = 0
    """How many of the first commits are steps of the target alone."""
    draws: CounterDraws | None = None
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[B] int64 on the host: forward calls of the draft model."""

    @property
    def draft_nfe(self) -> np.ndarray:
        return self.drafted.copy()


@dataclass(kw_only=True)
class CSpDProposal(LatentProposal):
    """Tokens [B, W, channels] of a step of the target; or drafts, the target's distributions, and the verdict."""

    positions: Tensor
    """[B, W] int64, ascending: where the values would be written."""
    target: TokenDistribution
    """[B, W, channels]."""
    draft: TokenDistribution | None = None
    """[B, W, channels]; None for a step of the target."""
    verdict: Verdict | None = None
    """Of the B * W tokens, row by row."""
    draft_cost: Cost | None = None


@dataclass(frozen=True)
class CSpD(ContinuousSampler):
    """A smaller MAR draws the tokens of up to `num_draft` steps; the model then evaluates all their positions in one
    call, and accepts or replaces each token on its own. Both heads use the same noise at a position, so that their
    tokens are close.

    Lossy: the model judges all tokens of a call from the context before them, and the heads' last step adds no noise,
    so that the compared distributions are points, which `inner_temperature` makes comparable. `nfe` counts the model's
    calls, `draft_nfe` the draft model's. The model alone, with `ratio=1` at `steps=nfe`, makes as many calls under the
    same noise: compare with it.

    Of T steps the first 1 + floor(ratio T) are the model's own. A verification follows step s if `num_draft` divides s,
    and after the last step.

    `mended` (the default) changes three things in the public code's rule. An accepted token is not drawn again (the
    code draws for all tokens until each was accepted once). A token that no round accepts is the value of the model's
    own chain (the code writes zeros). So a row does not depend on its neighbours, as it does in the code. Redrawn
    tokens have the noise of the last step in both, without which their distribution would have no density.

    Random numbers are counter-based: an image depends only on its seed and class, except with `mended=False`. The
    preset "demo" is the code's demonstration, with 256 steps and a guidance scale of 4.

    Args:
        draft: the smaller `paradec.models.images.mar.MARModel`, with the same positions, channels, classes and latents;
            needed unless all steps are the model's own. `to_dict` names it only.
        num_draft: steps between two verifications, at most.
        ratio: share of the steps that the model makes at the start, 0 to 1.
        inner_temperature: T of the acceptance rule (`verified`), above 0.
        mended: see above.
        max_rounds: how often rejected tokens are drawn again, at most.
        head_steps: steps of both diffusion heads: 1 to 1000; or section counts, (10, 1) or "10,1": so many steps,
            evenly spaced, in each of as many equal parts of the training steps.
        temperature: scales the noise that the heads' steps add. At 0, which needs `mended`, no draft is accepted, and
            all tokens are the values of the model's own chains.
        guidance_schedule: "linear" grows from 1 towards the request's scale; with m undecided positions of S it is 1 +
            (scale - 1) (S - m) / S, and m is 1 at the last step, as in the code; or "constant". A verification takes
            the scale of its last step.

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
    summary = "a smaller MAR drafts the tokens of several steps, which the model judges in one forward; lossy"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "demo": {"num_draft": 4, "ratio": 0.05, "guidance_schedule": "constant"}
    }

    def __post_init__(self) -> None:
        if self.draft is not None:
            if not callable(self.draft) or not hasattr(self.draft, "facts"):
                raise ValueError(f"draft={short_repr(self.draft)} must be a smaller MAR, from paradec.load say")
            check_model(f"draft of {self.name!r}", self.draft, self.models)
        check_int("num_draft", self.num_draft, low=1, high=2**16)
        check_number("ratio", self.ratio, low=0, high=1)
        check_number("inner_temperature", self.inner_temperature, low=0, open_low=True)
        check_bool("mended", self.mended)
        check_int("max_rounds", self.max_rounds, low=0, high=10_000)
        sections_of(self.head_steps)
        if isinstance(self.head_steps, list):
            object.__setattr__(self, "head_steps", tuple(self.head_steps))
        check_number("temperature", self.temperature, low=0)
        if self.temperature == 0 and not self.mended:
            raise ValueError("temperature=0 needs mended=True: the published rule divides by it")
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
        """As `ContinuousSampler.start`. ValueError also without a draft model, or for one that does not fit.

        Args:
            draws: source of random numbers in the place of those that belong to the seeds.
        """
        self.check_model(model)
        if self.draft is not None:
            model.check_draft(self.draft)
        state: CSpDState = super().start(model, prompt, request, order=order, **arguments)
        if self.draft is None and state.targets < len(state.calls):
            raise ValueError(f"draft is needed: paradec.samplers.create({self.name!r}, draft=a smaller MAR)")
        state.draws = CounterDraws(state.keys, state.order.shape[1]) if draws is None else draws
        return state

    def _state(self, num_left: np.ndarray, fields: dict[str, Any]) -> CSpDState:
        steps = len(num_left) - 1
        calls, begin, targets = [], 0, 0
        for step in range(steps):
            is_target_step = step <= self.ratio * steps
            if is_target_step or step % self.num_draft == 0 or step == steps - 1:
                calls.append(range(begin, step + 1))
                begin = step + 1
            targets += is_target_step
        return CSpDState(
            left=num_left[[*(call.start for call in calls), steps]],
            schedule=num_left,
            calls=tuple(calls),
            targets=targets,
            drafted=np.zeros(fields["batch"], np.int64),
            **fields,
        )

    # ---- steps ------------------------------------------------------------------------------------------------------

    def query(self, state: CSpDState) -> list[ContinuousQuery]:
        return [self._evaluation(state, state.tokens, state.calls[state.index])]

    def guidance(self, state: CSpDState, step: int) -> float | None:
        """The guidance scale of a step; None where it is off."""
        if state.guidance_scale == 1.0:
            return None
        size = int(state.left[0])
        num_decided = size - max(int(state.schedule[step + 1]), 1)
        return float(guidance_at(self.guidance_schedule, state.guidance_scale, num_decided, size))

    def _evaluation(self, state: CSpDState, tokens: Tensor, steps: range) -> ContinuousQuery:
        """Draw the positions of some steps together, from the tokens [B, S, channels] that were there before them."""
        known = state.order[:, state.schedule[steps.start] :].sort(-1).values
        wanted = state.order[:, state.schedule[steps.stop] : state.schedule[steps.start]].sort(-1).values
        sections, size = sections_of(self.head_steps), state.order.shape[1]
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
        """Read the model's answer. Drafts are drawn here: the model evaluates their positions without knowing them."""
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
        if state.index >= state.targets:
            proposal.draft, proposal.draft_cost = self._draft_tokens(state, query.wanted)
            proposal.verdict = self._verify_drafts(state, proposal.draft, answer.distribution, query.wanted)
            proposal.values = proposal.verdict.values.view_as(answer.tokens)
        return proposal

    def _draft_tokens(self, state: CSpDState, positions: Tensor) -> tuple[TokenDistribution, Cost]:
        """What the draft model draws at `positions` [B, W], step by step, and what that cost."""
        tokens, queries = state.tokens, []
        distributions = [torch.zeros_like(tokens) for _ in range(3)]
        for step in state.calls[state.index]:
            query = self._evaluation(state, tokens, range(step, step + 1))
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
        self, state: CSpDState, draft: TokenDistribution, target: TokenDistribution, at: Tensor
    ) -> Verdict:
        draws, channels = state.draws, state.tokens.shape[-1]
        assert draws is not None
        rows = torch.arange(state.batch, device=at.device).unsqueeze(-1).expand_as(at).flatten()
        positions = at.flatten()

        def redraw(round_index: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return draws.redraw(state.index, round_index, rows[tokens], positions[tokens], channels)

        return verified(
            draft.mean.flatten(0, 1),
            _flat(draft),
            _flat(target),
            draws.accept(state.index, at).flatten(),
            redraw,
            self.inner_temperature,
            self.max_rounds if self.temperature else 0,
            self.mended,
        )

    def commit(self, state: CSpDState, proposal: CSpDProposal) -> Commit:
        """Write the tokens. Raises FloatingPointError for NaN or infinite numbers; nothing is written then."""
        state.check_current(proposal)
        for who, distribution in (("model", proposal.target), ("draft model", proposal.draft)):
            if distribution is not None:
                steps = f"steps {state.calls[state.index].start} to {state.calls[state.index][-1]}"
                message = f"the {who} returned NaN or infinite tokens at {steps} for row {{row}}"
                check_finite(distribution.mean.flatten(1).isfinite().all(1), proposal.rows, message)
        values = proposal.values.to(state.tokens.dtype)
        index = proposal.positions.unsqueeze(-1).expand_as(values)
        state.tokens = state.tokens.scatter(1, index, values)
        state.count(proposal.cost)
        if proposal.draft_cost is not None:
            state.drafted = state.drafted + proposal.draft_cost.nfe
        state.commits += 1
        state.index += 1
        selected = torch.ones_like(proposal.positions, dtype=torch.bool)
        scores = None
        if proposal.verdict is not None:
            scores = proposal.verdict.ratio.clamp(max=1).view_as(proposal.positions)
        return Commit(proposal.rows, values, proposal.positions, selected, scores, proposal.kind)


def sections_of(head_steps: int | str | Sequence[int]) -> tuple[int, ...]:
    """Steps of a diffusion head in each of as many equal parts of its training steps. Raises ValueError for neither an
    integer nor several, or more steps than there are."""
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
            f"head_steps={short_repr(head_steps)} must be an integer, or several by commas, each from 1 to "
            f"{TRAINED_STEPS} divided by how many there are"
        )
    return counts


def _gather_tokens(tokens: Tensor, positions: Tensor) -> Tensor:
    """[B, W, channels] of tokens [B, S, channels]."""
    return tokens.gather(1, positions.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def _flat(distribution: TokenDistribution) -> TokenDistribution:
    """A distribution of [B, W, channels] as one of [B * W, channels]."""
    return TokenDistribution(
        distribution.mean.flatten(0, 1), distribution.std.flatten(0, 1), distribution.half_log_variance.flatten(0, 1)
    )
