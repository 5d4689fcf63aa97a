"""Samplers that commit a whole scale of a picture at a step: VAR (Tian et al., arXiv 2404.02905), and CoDe (Chen et
al., arXiv 2411.17787), which makes scales with two models; and their public codes. Rows are in step and independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_bool, check_choice, check_int, check_model, check_number, short_repr
from paradec.core.memory import Memory
from paradec.core.protocol import Commit, Proposal, Sampler, State, check_finite
from paradec.core.query import Cost
from paradec.core.trace import Notes
from paradec.kernels.token_stats import argmax, draw
from paradec.models.images.base import check_alike
from paradec.models.images.var import ScaleAnswer, ScaleQuery, ScaleStore, scale_ends
from paradec.request import Request, request_for
from paradec.samplers.distributions import apply_temperature, filter_logits
from paradec.samplers.pictures.start import guidance_at, labels_of, trace_of_labels, unsupported_for_pictures
from paradec.samplers.start import make_row_keys

SMOOTH_STREAM = 2
"""Of `paradec.core.rng`: noise of the blended codes, apart from the draws of tokens."""


@dataclass
class ScaleState(State):
    """What changes while pictures are decoded. `B` rows, `L` tokens of all scales, `C` numbers in a code."""

    scales: tuple[int, ...]
    """Sides of the code maps."""
    tokens: Tensor
    """[B, L] int64: the scales one after the other, each row by row; -1 where nothing is decided."""
    feature_map: Tensor
    """[B, C, s, s]: the sum of what is decided."""
    inputs: Tensor
    """[B, L - 1, C]: inputs of all scales but the first; zeros where nothing is decided."""
    labels: Tensor
    """[B] int64."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    request: Request
    index: int = 0
    """The scale that comes next."""
    codes: Tensor | None = None
    """[B, L, C]: what was added for every token, where that is not its code (`smooth`)."""
    store: ScaleStore | None = None
    """Keys and values of the model that makes the next scale."""
    stored: int = 0
    """Scales that the store holds."""
    after: ScaleStore | None = None
    """The store of a second model, which makes the scales after those of the first."""
    draft_counts: np.ndarray = field(init=False)
    """[4, B] int64: as `counts`, of the model that drafts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_counts = np.zeros((4, self.batch), np.int64)

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64: forwards of the model that drafts."""
        return self.draft_counts[0]

    @property
    def ends(self) -> list[int]:
        """Tokens of all scales up to each."""
        return scale_ends(self.scales)

    @property
    def done(self) -> bool:
        return self.index == len(self.scales)

    @property
    def progress(self) -> tuple[int, int]:
        return self.begin(self.index) * self.batch, self.ends[-1] * self.batch

    def begin(self, scale: int) -> int:
        """Tokens before a scale."""
        return self.ends[scale - 1] if scale else 0

    def stores(self) -> tuple[ScaleStore | None, ...]:
        return self.store, self.after

    @property
    def positions(self) -> Tensor:
        """[B, n] int64: of the next scale's tokens."""
        device = self.tokens.device
        return torch.arange(self.begin(self.index), self.ends[self.index], device=device).expand(self.batch, -1)

    def uniform(self, count: int, stream: int) -> Tensor:
        """[B, n, count] float64 draws for the next scale's tokens."""
        step = torch.zeros(self.batch, dtype=torch.int64, device=self.keys.device)
        return rng.uniform(self.keys, step, self.positions, count, stream)

    @property
    def branches(self) -> int:
        """2 under guidance."""
        return 1 if self.request.guidance_scale == 1 else 2


@dataclass
class ScaleProposal(Proposal):
    """The tokens of a scale, and what they add to the features. `n` tokens."""

    features: Tensor | None = None
    """[B, C, s, s]: with this scale."""
    following: Tensor | None = None
    """[B, n', C]: the next scale's input; None after the last."""
    codes: Tensor | None = None
    """[B, n, C]: what was added for every token."""
    last: ScaleQuery | None = None
    """The call that was read."""


@dataclass(frozen=True)
class VAR(Sampler):
    """Per step, evaluate the next scale with the keys and values of earlier scales, and draw each of its tokens
    independently from the guided, filtered distribution.

    Guidance grows with the scale: that of scale i of n is 1 + (s - 1) i / (n - 1) for the request's `guidance_scale` s
    (the public code's cfg is s - 1). Then come `top_k` (of equal logits all stay), `top_p` of what is left, and the
    temperature, which divides what the filters left, as in CoDe's public code. The authors' figures:
    guidance_scale=2.5, top_k=900, top_p=0.96; their demo: 5, 900 and 0.95. Without guidance the unconditional half is
    not evaluated (in the public code always).

    Args:
        guidance_schedule: "linear", the paper's, or "constant".
        top_ks: one for each scale, 0 is all; None takes the request's `top_k` at all scales.
        temperatures: one for each scale, which multiply the request's; None is 1.
        smooth: inputs are codes blended by the distribution with fresh noise, the sharper the finer the scale (the
            public code's `more_smooth`: for looks, never for measures). Tokens are drawn all the same.
    """

    guidance_schedule: str = "linear"
    top_ks: tuple[int, ...] | None = None
    temperatures: tuple[float, ...] | None = None
    smooth: bool = False

    name = "var"
    paper = "VAR"
    arxiv = "2404.02905"
    summary = "a whole scale of the picture per forward, the coarsest first"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"smooth": {"smooth": True}}
    family: ClassVar[str] = "scales"
    models: ClassVar[tuple[str, ...]] = ("scale image",)
    request_defaults: ClassVar[Mapping[str, Any]] = {"temperature": 1.0}
    unsupported: ClassVar[tuple[str, ...]] = unsupported_for_pictures("temperature", "top_p", "top_k")

    def __post_init__(self) -> None:
        check_choice("guidance_schedule", self.guidance_schedule, ("linear", "constant"))
        check_bool("smooth", self.smooth)
        for name in ("top_ks", "temperatures"):
            given = getattr(self, name)
            if given is None:
                continue
            if not isinstance(given, (tuple, list)) or not given:
                raise ValueError(f"{name}={short_repr(given)} must be a list with one entry for each scale")
            object.__setattr__(self, name, tuple(given))
            for entry in given:
                if name == "top_ks":
                    check_int(name, entry, low=0)
                else:
                    check_number(name, entry, low=0, high=1e6)

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(
        self, model: Any, prompt: Sequence[int] | int, request: Request | None = None, /, **arguments: Any
    ) -> ScaleState:
        """As `Sampler.start`. prompt: class labels, one per picture; the number of classes itself is no class."""
        self.check_model(model)
        request = request_for(self, request, arguments)
        facts = model.facts
        for name in ("top_ks", "temperatures"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(facts.scales):
                raise ValueError(f"{name} has {len(entries)} entries; the model has {len(facts.scales)} scales")
        labels = labels_of(prompt, facts.classes)
        keys, seeds = make_row_keys(request, [[label] for label in labels], model.device)
        device, length, side = model.device, facts.ends[-1], facts.scales[-1]
        dtype = torch.promote_types(model.dtype, torch.float32)
        state = ScaleState(
            batch=len(labels),
            memory=Memory(),
            scales=facts.scales,
            tokens=torch.full((len(labels), length), -1, device=device),
            feature_map=torch.zeros(len(labels), facts.code_dim, side, side, dtype=dtype, device=device),
            inputs=torch.zeros(len(labels), length - 1, facts.code_dim, dtype=dtype, device=device),
            labels=torch.tensor(labels, device=device),
            keys=keys,
            request=request,
            codes=torch.zeros(len(labels), length, facts.code_dim, dtype=dtype, device=device) if self.smooth else None,
        )
        state.store = model.store(state.branches * state.batch, len(facts.scales) - 1)
        trace_settings = {"guidance_scale": request.guidance_scale, "seed": seeds}
        state.trace = trace_of_labels(self, request, labels, length, **trace_settings)
        return state

    # ---- a step -----------------------------------------------------------------------------------------------------

    def query(self, state: ScaleState) -> list[ScaleQuery]:
        """The call for the next scale, over a store that holds some of the scales before."""
        first, store = state.stored, state.store
        assert store is not None  # until the state is done
        begin, stop = state.begin(first), state.ends[state.index]
        positions = torch.arange(begin, stop, device=state.tokens.device).expand(state.batch, -1)
        query = ScaleQuery(
            rows=state.rows,
            inputs=state.inputs[:, max(begin - 1, 0) : stop - 1],
            labels=state.labels,
            first=first,
            last=state.index,
            store=store,
            branches=state.branches,
            # the unconditional half of a scale that it has no weight in is there for its keys and values alone
            wanted=state.branches if self.guidance(state) != 1 else 1,
            forwarded=np.full(state.batch, stop - begin),
            kind="full" if first == 0 else "window",
            positions=positions,
        )
        return [query]

    def guidance(self, state: ScaleState) -> float:
        """The guidance scale of the next scale."""
        last = max(len(state.scales) - 1, 1)
        return guidance_at(self.guidance_schedule, state.request.guidance_scale, state.index, last)

    def propose(self, state: ScaleState, outputs: list[ScaleAnswer], queries: list[ScaleQuery]) -> ScaleProposal:
        answer, query = outputs[-1], queries[-1]
        guided = self.guided(state, answer.logits)
        filtered = self.filtered(state, guided)
        temperature = self.temperature(state)
        logits = None if temperature == 0 else apply_temperature(filtered, temperature)
        tokens = argmax(filtered) if logits is None else self.draw(state, logits)
        p = (guided if logits is None else logits).softmax(-1)
        scores = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        codes = answer.codes[tokens] if not self.smooth else self.blended(state, filtered, answer.codes)
        features, following = answer.add_scale(state.feature_map, codes, state.index)
        return ScaleProposal(
            rows=query.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=state.positions,
            scores=scores,
            available=torch.ones_like(tokens, dtype=torch.bool),
            made_at=state.commits,
            kind=query.kind,
            features=features,
            following=following,
            codes=codes if self.smooth else None,
            last=query,
        )

    def guided(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Logits [wanted * B, n, V] -> [B, n, V], float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scale = self.guidance(state)
        if scale == 1:
            return logits[: state.batch]
        conditional, unconditional = logits.chunk(2)
        return scale * conditional - (scale - 1) * unconditional

    def filtered(self, state: ScaleState, logits: Tensor) -> Tensor:
        """[B, n, V]: -inf for what the filters exclude."""
        top_k = state.request.top_k if self.top_ks is None else self.top_ks[state.index] or None
        return filter_logits(filter_logits(logits, None, top_k), state.request.top_p, None)

    def temperature(self, state: ScaleState) -> float:
        """The temperature of the next scale."""
        return state.request.temperature * (1.0 if self.temperatures is None else self.temperatures[state.index])

    def draw(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Tokens [B, n] of the distributions softmax(logits) [B, n, V]."""
        return draw(logits.softmax(-1), state.uniform(1, rng.TOKEN_STREAM).squeeze(-1))

    def blended(self, state: ScaleState, logits: Tensor, codes: Tensor) -> Tensor:
        """Codes [B, n, C], blended by filtered logits [B, n, V] (`smooth`)."""
        ratio = state.index / max(len(state.scales) - 1, 1)
        tau = max(0.27 * (1 - 0.95 * ratio), 0.005)
        noisy = logits * (1 + ratio)
        if self.temperature(state) > 0:
            noisy = noisy + self.noise(state, logits)
        return (noisy / tau).softmax(-1).to(codes.dtype) @ codes

    def noise(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Gumbel noise of the blended codes, as the logits [B, n, V]: each token has a number."""
        return rng.gumbel(state.uniform(logits.shape[-1], SMOOTH_STREAM)).to(logits.dtype)

    def commit(self, state: ScaleState, proposal: ScaleProposal) -> Commit:
        """Write the scale. Raises FloatingPointError for NaN or infinite logits; nothing is written then."""
        state.check_current(proposal)
        assert proposal.features is not None and proposal.last is not None
        sound = proposal.scores.isfinite().all(1) & proposal.features.flatten(1).isfinite().all(1)
        message = f"the model returned NaN or infinite logits for row {{row}} at scale {state.index}"
        check_finite(sound, proposal.rows, message)
        begin, stop = state.begin(state.index), state.ends[state.index]
        state.tokens = torch.cat((state.tokens[:, :begin], proposal.values, state.tokens[:, stop:]), 1)
        state.feature_map = proposal.features
        if proposal.following is not None:
            after = stop + proposal.following.shape[1] - 1
            state.inputs = torch.cat((state.inputs[:, : stop - 1], proposal.following, state.inputs[:, after:]), 1)
        if state.codes is not None and proposal.codes is not None:
            state.codes = torch.cat((state.codes[:, :begin], proposal.codes, state.codes[:, stop:]), 1)
        self.count(state, proposal.cost)
        state.commits += 1
        state.index += 1
        state.stored = proposal.last.last + 1
        if state.done:
            state.store = None
        selected = torch.ones_like(proposal.values, dtype=torch.bool)
        return Commit(proposal.rows, proposal.values, proposal.positions, selected, proposal.scores, proposal.kind)

    def count(self, state: ScaleState, cost: Cost) -> None:
        """Add what a step spent to the state's counts."""
        state.count(cost)


WARM, WARM_SHARE = 1.1, 0.7
"""The temperature of the first scales in the public code, 7 of 10; it is 1 at the others."""
SPLIT_SHARE = 0.8


@dataclass(frozen=True)
class CoDe(VAR):
    """`drafter`, the large model, makes the first `split` scales with its own store. The small model rebuilds its
    context from their features and inputs in one call, which also gives the logits of scale `split`, and makes the
    other scales. Nothing is verified. `nfe` counts the small model's forwards, `state.draft_nfe` the large one's.

    The public code draws tokens for the drafted scales once more, from the small model's unguided logits, and discards
    them; that is left out. With one seed for both models the small one repeats the large one's random numbers there;
    here each scale has its own.

    Args:
        drafter: a model of scales with the same scales, classes and codes, the larger one. `to_dict` names it only.
        split: scales that the drafter makes, 0 to all of them; None is 8 of 10, or the same share. The paper's are 6 to
            9.
        temperatures: as for `var`; None is 1.1 at the first 7 of 10 scales and 1 at the others, as published.
        guidance_schedule, top_ks, smooth: as for `var`. The public code has top_k=600 at all scales.
    """

    drafter: Any = None
    split: int | None = None

    name = "code"
    paper = "CoDe"
    arxiv = "2411.17787"
    summary = "a large model makes the first scales, a small one the rest"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    request_defaults: ClassVar[Mapping[str, Any]] = {"temperature": 1.0, "top_k": 600}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("split", self.split, low=0, high=2**10, none=True)
        if self.drafter is not None:
            check_model(f"drafter of {self.name!r}", self.drafter, self.models)

    def split_of(self, scales: int) -> int:
        """Scales that the drafter makes of so many."""
        return round(SPLIT_SHARE * scales) if self.split is None else self.split

    @torch.inference_mode(False)
    def start(self, model: Any, prompt: Any, request: Request | None = None, /, **arguments: Any) -> ScaleState:
        """As for `var`. ValueError also without a drafter, for one that does not fit, or a split out of range."""
        self.check_model(model)
        if self.drafter is None:
            raise ValueError(f"sampler 'code' needs drafter=..., a larger model than {model.facts.name}")
        fields = ("scales", "classes", "vocab_size", "code_dim")
        check_alike("drafter", self.drafter, model, self.drafter.facts, model.facts, fields)
        if not torch.equal(model.codes.cpu(), self.drafter.codes.to("cpu", model.codes.dtype)):
            raise ValueError(f"drafter={self.drafter.facts.name} has another codebook than {model.facts.name}")
        if self.split_of(len(model.facts.scales)) > len(model.facts.scales):
            raise ValueError(f"split={self.split} must be an integer from 0 to {len(model.facts.scales)}, the scales")
        state = super().start(model, prompt, request, **arguments)
        split = self.split_of(len(state.scales))
        if split:  # neither has memory before its first call
            state.after, state.store = state.store, self.drafter.store(state.branches * state.batch, split - 1)
        return state

    def query(self, state: ScaleState) -> list[ScaleQuery]:
        return [replace(query, drafting=self.drafts(state)) for query in super().query(state)]

    def drafts(self, state: ScaleState) -> bool:
        """Whether the drafter makes the next scale."""
        return state.index < self.split_of(len(state.scales))

    def step(self, model: Callable[..., Any], state: ScaleState) -> ScaleProposal:
        return super().step(self.drafter if self.drafts(state) else model, state)

    def temperature(self, state: ScaleState) -> float:
        if self.temperatures is not None:
            return super().temperature(state)
        warm = state.index < math.ceil(WARM_SHARE * len(state.scales))
        return state.request.temperature * (WARM if warm else 1.0)

    def commit(self, state: ScaleState, proposal: ScaleProposal) -> Commit:
        drafted = self.drafts(state)
        commit = super().commit(state, proposal)
        if drafted and not self.drafts(state) and not state.done:
            state.store, state.after, state.stored = state.after, None, 0
        return commit

    def count(self, state: ScaleState, cost: Cost) -> None:
        if self.drafts(state):
            state.draft_counts = state.draft_counts + cost.counts
        else:
            super().count(state, cost)

    def observe(self, state: ScaleState, proposal: ScaleProposal) -> Notes:
        drafted = self.drafts(state)
        notes = super().observe(state, proposal)
        notes.draft_nfe = (state.draft_nfe + drafted).tolist()
        return replace(notes, nfe=[0] * state.batch) if drafted else notes
