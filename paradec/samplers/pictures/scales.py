"""Samplers that commit a whole scale of a picture per step: VAR (Tian et al., arXiv 2404.02905), and CoDe (Chen et al.,
arXiv 2411.17787), which uses two models; as in their public codes. Rows are independent, but all at the same scale."""

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
from paradec.models.images.base import check_same_fields
from paradec.models.images.var import ScaleAnswer, ScaleQuery, ScaleStore, scale_ends
from paradec.request import Request, request_for
from paradec.samplers.distributions import apply_temperature, filter_logits
from paradec.samplers.pictures.start import check_labels, make_label_trace, scheduled_guidance, unsupported_for_pictures
from paradec.samplers.start import make_row_keys

SMOOTH_STREAM = 2
"""Random stream (`paradec.core.rng`) of the noise of blended codes."""


@dataclass
class ScaleState(State):
    """State of a request. `B` rows, `L` tokens of all scales, `C` numbers of a code, `s` the side of the last scale."""

    scales: tuple[int, ...]
    """Sides of the code maps."""
    tokens: Tensor
    """[B, L] int64: the scales one after the other, each row by row; -1 at undecided positions."""
    feature_map: Tensor
    """[B, C, s, s]: sum of the features of all decided scales."""
    inputs: Tensor
    """[B, L - 1, C]: inputs of all scales but the first; 0 where the previous scale is undecided."""
    labels: Tensor
    """[B] int64."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    request: Request
    index: int = 0
    """Index of the next scale."""
    codes: Tensor | None = None
    """[B, L, C]: the blended code of every token; None without `smooth`."""
    store: ScaleStore | None = None
    """Key/value store of the model that makes the next scale."""
    stored: int = 0
    """Number of scales in the store."""
    next_store: ScaleStore | None = None
    """Store of `CoDe`'s small model while the drafter makes scales, else None."""
    draft_counts: np.ndarray = field(init=False)
    """[4, B] int64: the drafter's counts, as `State.counts`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_counts = np.zeros((4, self.batch), np.int64)

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64: forwards of the drafter."""
        return self.draft_counts[0]

    @property
    def ends(self) -> list[int]:
        """Number of tokens up to the end of each scale."""
        return scale_ends(self.scales)

    @property
    def done(self) -> bool:
        return self.index == len(self.scales)

    @property
    def progress(self) -> tuple[int, int]:
        return self.begin(self.index) * self.batch, self.ends[-1] * self.batch

    def begin(self, scale: int) -> int:
        """Return the number of tokens before a scale."""
        return self.ends[scale - 1] if scale else 0

    def stores(self) -> tuple[ScaleStore | None, ...]:
        return self.store, self.next_store

    @property
    def positions(self) -> Tensor:
        """[B, n] int64: positions of the next scale's tokens."""
        device = self.tokens.device
        return torch.arange(self.begin(self.index), self.ends[self.index], device=device).expand(self.batch, -1)

    def uniform(self, count: int, stream: int) -> Tensor:
        """Draw uniform numbers [B, n, count] float64 for the next scale's tokens."""
        step = torch.zeros(self.batch, dtype=torch.int64, device=self.keys.device)
        return rng.uniform(self.keys, step, self.positions, count, stream)

    @property
    def branches(self) -> int:
        """2 with guidance, else 1."""
        return 1 if self.request.guidance_scale == 1 else 2


@dataclass
class ScaleProposal(Proposal):
    """Proposal of a scale with `n` tokens."""

    features: Tensor | None = None
    """[B, C, s, s]: sum of the features of all scales up to this one."""
    next_inputs: Tensor | None = None
    """[B, n', C]: inputs of the next scale; None for the last scale."""
    codes: Tensor | None = None
    """[B, n, C]: the blended code of every token; None without `smooth`."""
    query: ScaleQuery | None = None
    """The query of this scale."""


@dataclass(frozen=True)
class VAR(Sampler):
    """Each step evaluates the next scale with the keys and values of earlier scales, and draws its tokens independently
    from the guided, filtered distribution.

    The guidance scale at scale i (from 0) of n is 1 + (s - 1) i / (n - 1), where s is the request's `guidance_scale`
    (the public code's cfg is s - 1). Filters are applied in the order top-k (tokens tied with the k-th stay), top-p,
    temperature, as in CoDe's public code. The authors' figures have guidance_scale=2.5, top_k=900, top_p=0.96; their
    demo has 5, 900 and 0.95. Without guidance the unconditional half is not evaluated (in the public code it is).

    Args:
        guidance_schedule: "linear", as in the paper, or "constant".
        top_ks: top-k of each scale; 0: all tokens. None: the request's `top_k` at all scales.
        temperatures: factors of the request's temperature, one for each scale; None: 1.
        smooth: whether the next scale's inputs are made from blends of codes instead of the drawn codes. The weights of
            a blend are the distribution with new noise, sharper at finer scales. This is the public code's
            `more_smooth`, for visual quality and not for benchmarks.
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
            entries = getattr(self, name)
            if entries is None:
                continue
            if not isinstance(entries, (tuple, list)) or not entries:
                raise ValueError(f"{name}={short_repr(entries)} must be a list with one entry for each scale")
            object.__setattr__(self, name, tuple(entries))
            for entry in entries:
                if name == "top_ks":
                    check_int(name, entry, low=0)
                else:
                    check_number(name, entry, low=0, high=1e6)

    @torch.inference_mode(False)  # else the state could be used in inference mode only
    @torch.no_grad()
    def start(
        self, model: Any, prompt: Sequence[int] | int, request: Request | None = None, /, **arguments: Any
    ) -> ScaleState:
        """As `Sampler.start`. prompt: class labels, one per picture; label `facts.classes` means no class."""
        self.check_model(model)
        request = request_for(self, request, arguments)
        facts = model.facts
        for name in ("top_ks", "temperatures"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(facts.scales):
                raise ValueError(f"{name} has {len(entries)} entries; the model has {len(facts.scales)} scales")
        labels = check_labels(prompt, facts.classes)
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
        state.trace = make_label_trace(self, request, labels, length, **trace_settings)
        return state

    # ---- a step -----------------------------------------------------------------------------------------------------

    def query(self, state: ScaleState) -> list[ScaleQuery]:
        """Make the query of the next scale, and of the scales before it that are not in the store."""
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
            # at guidance scale 1 the unconditional half is evaluated only for its keys and values
            wanted=state.branches if self.guidance(state) != 1 else 1,
            forwarded=np.full(state.batch, stop - begin),
            kind="full" if first == 0 else "window",
            positions=positions,
        )
        return [query]

    def guidance(self, state: ScaleState) -> float:
        """Return the guidance scale of the next scale."""
        last = max(len(state.scales) - 1, 1)
        return scheduled_guidance(self.guidance_schedule, state.request.guidance_scale, state.index, last)

    def propose(self, state: ScaleState, outputs: list[ScaleAnswer], queries: list[ScaleQuery]) -> ScaleProposal:
        answer, query = outputs[-1], queries[-1]
        guided = self.apply_guidance(state, answer.logits)
        filtered = self.apply_filters(state, guided)
        temperature = self.temperature(state)
        logits = None if temperature == 0 else apply_temperature(filtered, temperature)
        tokens = argmax(filtered) if logits is None else self.draw(state, logits)
        p = (guided if logits is None else logits).softmax(-1)
        scores = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        codes = answer.codes[tokens] if not self.smooth else self.blend_codes(state, filtered, answer.codes)
        features, next_inputs = answer.add_scale(state.feature_map, codes, state.index)
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
            next_inputs=next_inputs,
            codes=codes if self.smooth else None,
            query=query,
        )

    def apply_guidance(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Apply guidance to logits [wanted * B, n, V]; return [B, n, V], float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scale = self.guidance(state)
        if scale == 1:
            return logits[: state.batch]
        conditional, unconditional = logits.chunk(2)
        return scale * conditional - (scale - 1) * unconditional

    def apply_filters(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Set logits [B, n, V] of tokens that top-k and top-p exclude to -inf."""
        top_k = state.request.top_k if self.top_ks is None else self.top_ks[state.index] or None
        return filter_logits(filter_logits(logits, None, top_k), state.request.top_p, None)

    def temperature(self, state: ScaleState) -> float:
        """Return the temperature of the next scale."""
        return state.request.temperature * (1.0 if self.temperatures is None else self.temperatures[state.index])

    def draw(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Draw tokens [B, n] from softmax(logits) [B, n, V]."""
        return draw(logits.softmax(-1), state.uniform(1, rng.TOKEN_STREAM).squeeze(-1))

    def blend_codes(self, state: ScaleState, logits: Tensor, codes: Tensor) -> Tensor:
        """Blend codes [V, C] by filtered logits [B, n, V] to [B, n, C] (`smooth`)."""
        ratio = state.index / max(len(state.scales) - 1, 1)
        tau = max(0.27 * (1 - 0.95 * ratio), 0.005)
        noisy = logits * (1 + ratio)
        if self.temperature(state) > 0:
            noisy = noisy + self.noise(state, logits)
        return (noisy / tau).softmax(-1).to(codes.dtype) @ codes

    def noise(self, state: ScaleState, logits: Tensor) -> Tensor:
        """Draw the Gumbel noise of blended codes, in the shape of the logits [B, n, V]."""
        return rng.gumbel(state.uniform(logits.shape[-1], SMOOTH_STREAM)).to(logits.dtype)

    def commit(self, state: ScaleState, proposal: ScaleProposal) -> Commit:
        """Write the scale. Raises FloatingPointError for NaN or infinite logits (then nothing is written)."""
        state.check_current(proposal)
        assert proposal.features is not None and proposal.query is not None
        is_finite = proposal.scores.isfinite().all(1) & proposal.features.flatten(1).isfinite().all(1)
        message = f"the model returned NaN or infinite logits for row {{row}} at scale {state.index}"
        check_finite(is_finite, proposal.rows, message)
        begin, stop = state.begin(state.index), state.ends[state.index]
        state.tokens = torch.cat((state.tokens[:, :begin], proposal.values, state.tokens[:, stop:]), 1)
        state.feature_map = proposal.features
        if proposal.next_inputs is not None:
            end = stop + proposal.next_inputs.shape[1] - 1
            state.inputs = torch.cat((state.inputs[:, : stop - 1], proposal.next_inputs, state.inputs[:, end:]), 1)
        if state.codes is not None and proposal.codes is not None:
            state.codes = torch.cat((state.codes[:, :begin], proposal.codes, state.codes[:, stop:]), 1)
        self.count(state, proposal.cost)
        state.commits += 1
        state.index += 1
        state.stored = proposal.query.last + 1
        if state.done:
            state.store = None
        selected = torch.ones_like(proposal.values, dtype=torch.bool)
        return Commit(proposal.rows, proposal.values, proposal.positions, selected, proposal.scores, proposal.kind)

    def count(self, state: ScaleState, cost: Cost) -> None:
        """Add the cost of a step to the state's counts."""
        state.count(cost)


WARM, WARM_SHARE = 1.1, 0.7
"""Temperature of the first scales in the public code, and the share of these scales (7 of 10). Other scales have 1."""
SPLIT_SHARE = 0.8
"""Share of scales that the drafter makes by default."""


@dataclass(frozen=True)
class CoDe(VAR):
    """The large model `drafter` makes the first `split` scales with a separate store, and the small model makes the
    others. The small model's first call evaluates the inputs of scales 0 to `split`, and returns logits of scale
    `split`. Drafts are not verified. `nfe` counts the small model's forwards, `state.draft_nfe` the large model's.

    The public code also draws tokens of the drafted scales from the small model's unguided logits, and discards them;
    this class does not. If the public code has one seed for both models, the small model repeats the large model's
    random numbers; in this class each scale has different numbers.

    Args:
        drafter: the larger model of scales, with the same scales, classes and codes. `to_dict` has only its name.
        split: number of scales that the drafter makes, from 0 to all; None: 80 %, rounded. The paper has 6 to 9 of 10.
        temperatures: as for `var`; None: 1.1 at the first 7 of 10 scales and 1 at the others, as published.
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

    def num_drafted(self, num_scales: int) -> int:
        """Return the number of scales, of `num_scales`, that the drafter makes."""
        return round(SPLIT_SHARE * num_scales) if self.split is None else self.split

    @torch.inference_mode(False)
    def start(self, model: Any, prompt: Any, request: Request | None = None, /, **arguments: Any) -> ScaleState:
        """As for `var`. Also raises ValueError without a drafter, or for a drafter or a split that does not match."""
        self.check_model(model)
        if self.drafter is None:
            raise ValueError(f"sampler 'code' needs drafter=..., a larger model than {model.facts.name}")
        fields = ("scales", "classes", "vocab_size", "code_dim")
        check_same_fields("drafter", self.drafter, model, self.drafter.facts, model.facts, fields)
        if not torch.equal(model.codes.cpu(), self.drafter.codes.to("cpu", model.codes.dtype)):
            raise ValueError(f"drafter={self.drafter.facts.name} has another codebook than {model.facts.name}")
        if self.num_drafted(len(model.facts.scales)) > len(model.facts.scales):
            raise ValueError(f"split={self.split} must be an integer from 0 to {len(model.facts.scales)}, the scales")
        state = super().start(model, prompt, request, **arguments)
        split = self.num_drafted(len(state.scales))
        if split:  # stores allocate memory at their first call
            state.next_store, state.store = state.store, self.drafter.store(state.branches * state.batch, split - 1)
        return state

    def query(self, state: ScaleState) -> list[ScaleQuery]:
        return [replace(query, is_draft=self.is_drafting(state)) for query in super().query(state)]

    def is_drafting(self, state: ScaleState) -> bool:
        """Whether the drafter makes the next scale."""
        return state.index < self.num_drafted(len(state.scales))

    def step(self, model: Callable[..., Any], state: ScaleState) -> ScaleProposal:
        return super().step(self.drafter if self.is_drafting(state) else model, state)

    def temperature(self, state: ScaleState) -> float:
        if self.temperatures is not None:
            return super().temperature(state)
        is_warm = state.index < math.ceil(WARM_SHARE * len(state.scales))
        return state.request.temperature * (WARM if is_warm else 1.0)

    def commit(self, state: ScaleState, proposal: ScaleProposal) -> Commit:
        was_drafting = self.is_drafting(state)
        commit = super().commit(state, proposal)
        if was_drafting and not self.is_drafting(state) and not state.done:
            state.store, state.next_store, state.stored = state.next_store, None, 0
        return commit

    def count(self, state: ScaleState, cost: Cost) -> None:
        if self.is_drafting(state):
            state.draft_counts = state.draft_counts + cost.counts
        else:
            super().count(state, cost)

    def observe(self, state: ScaleState, proposal: ScaleProposal) -> Notes:
        is_drafting = self.is_drafting(state)
        notes = super().observe(state, proposal)
        notes.draft_nfe = (state.draft_nfe + is_drafting).tolist()
        return replace(notes, nfe=[0] * state.batch) if is_drafting else notes
