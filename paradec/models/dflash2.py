"""DFlash 2 drafters (z-lab/dflash): DFlash's network with convolutions inside the block, and a selector of drafts.

A short convolution over the block precedes and follows every attention and MLP; its kernel is computed from the
sublayer's normed input. At each position the model's output matrix proposes `selector_top_k` candidates; a low-rank
table scores them given the previous draft. Other tokens are never drafted. Two formats are read: z-lab's
(`architectures` "DFlash2DraftModel"), where layer number l means the output of layer l, and speculators'
(`speculators_model_type` "dflash2"), where it means the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantDecoderLayer,
    MuseGlimmerAssistantModel,
)

from paradec.core.checks import check_divides
from paradec.models.base import Model
from paradec.models.checkpoint import check_object, checkpoint_errors, read_flag, read_positive
from paradec.models.dflash import FIELDS, WalkDrafter, flatten_config, read_network, read_settings
from paradec.models.drafter import flatten_speculators_config, make_drafter

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class Convolution(nn.Module):
    """Two short convolutions over a block's n positions, around a sublayer whose input determines the kernels."""

    def __init__(self, width: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def kernels(self, x: Tensor) -> Tensor:
        """x [R, n, D] -> [R, n, 2, taps, D]."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self.base_kernel + dynamic.repeat_interleave(self.group, -1)

    def forward(self, y: Tensor, kernel: Tensor) -> Tensor:
        """Convolve each position and the `taps - 1` before it: y [R, n, D], kernel [R, n, taps, D] -> [R, n, D]."""
        terms = (kernel[:, tap:, tap] * y[:, : y.shape[1] - tap] for tap in range(min(self.taps, y.shape[1])))
        return sum(nn.functional.pad(term, (0, 0, y.shape[1] - term.shape[1], 0)) for term in terms)  # type: ignore[return-value]


class ConvolvedLayer(MuseGlimmerAssistantDecoderLayer):  # type: ignore[misc, no-any-unimported]
    """The decoder layer with convolutions over the block; keys and values of the context are not convolved."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv, self.mlp_conv = Convolution(*sizes), Convolution(*sizes)

    def forward(self, hidden_states: Tensor, context_hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [R, n, D], the block -> [R, n, D]."""

        def attention(x: Tensor) -> Tensor:
            return self.self_attn(hidden_states=x, context_hidden_states=context_hidden_states, **kwargs)[0]

        for norm, convolution, sublayer in (
            (self.input_layernorm, self.attention_conv, attention),
            (self.post_attention_layernorm, self.mlp_conv, self.mlp),
        ):
            x = norm(hidden_states)
            before, after = convolution.kernels(x).unbind(2)
            hidden_states = hidden_states + convolution(sublayer(convolution(x, before)), after)
        return hidden_states


class Selector(nn.Module):
    """Scores of candidates given the previous draft; parameters are named as in published checkpoints."""

    def __init__(self, vocab: int, width: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class DFlash2Network(MuseGlimmerAssistantModel):  # type: ignore[misc, no-any-unimported]
    def __init__(self, config: Any):
        super().__init__(config)
        self.layers = nn.ModuleList(ConvolvedLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.candidate_selector = Selector(config.model_vocab_size, config.hidden_size, config.selector_rank)
        self.post_init()


@dataclass(frozen=True)
class SelectorWalk:
    """The scores of a block's candidates, token by token.

    unary, candidates: [R, n, K]: logits and ids of the K candidates at each of n positions of R rows.
    projected: [R, n, rank]: the states after `hidden_projection`. vocab: V, the number of the model's tokens."""

    selector: Selector
    unary: Tensor
    candidates: Tensor
    projected: Tensor
    vocab: int

    def slot_candidates(self, slot: int) -> Tensor:
        """[R, K] int64: the possible tokens of a slot's draft, the likeliest first."""
        return self.candidates[:, slot]

    def scores(self, slot: int, previous: Tensor) -> Tensor:
        """Scores [R, K] of a slot's candidates after the tokens `previous` [R]; unknown ids are read as id 0."""
        previous = torch.where(previous < self.vocab, previous, 0)
        pair = self.selector.predecessor_codebook[previous] * self.projected[:, slot]
        gains = self.selector.successor_codebook[self.candidates[:, slot]] @ pair.unsqueeze(-1).to(pair.dtype)
        return self.unary[:, slot] + gains.squeeze(-1)

    def logits(self, slot: int, previous: Tensor) -> Tensor:
        """[R, V]: the scores, and minus infinity for all other tokens."""
        scores = self.scores(slot, previous)
        expanded = scores.new_full((len(scores), self.vocab), -torch.inf)
        return expanded.scatter_(1, self.candidates[:, slot], scores)


class DFlash2Drafter(WalkDrafter):
    """A DFlash 2 network over the model that it was trained for, as `drafter` of the sampler "speculative". Under
    guidance, conditional and unconditional logits and scores are mixed before candidates are chosen."""

    def walk(self, states: Tensor, guide: Callable[[Tensor], Tensor], allowed: Tensor | None) -> SelectorWalk:
        """Choose the candidates, and return their scores.

        states: [branches * R, n, D]. guide: mixes the guidance branches of a tensor: [branches * R, n, X] -> [R, n, X].
        allowed: [V] bool: tokens that may be drawn; None for all."""
        selector, vocab = self.module.candidate_selector, self.facts.vocab_size
        unary = guide(self.logits(states))
        if allowed is not None:
            unary = unary.masked_fill(~allowed, -torch.inf)
        best = unary.topk(min(self.module.config.selector_top_k, vocab), -1)
        projected = guide(selector.hidden_projection(states)).to(states.dtype)
        return SelectorWalk(selector, best.values, best.indices, projected, vocab)


def load_dflash2(
    source: str, config: Mapping[str, Any], base: Model, dtype: torch.dtype | None, revision: str | None
) -> DFlash2Drafter:
    """Load a DFlash 2 drafter, as `load_drafter` does."""
    is_speculators = config.get("speculators_model_type") is not None
    if is_speculators:
        fields = flatten_speculators_config(source, config, base)
    else:
        check_object("dflash_config", config.get("dflash_config"), f"config.json of {source!r}")
        fields = flatten_config(source, config, (*FIELDS, *SIZES, "causal"))
        fields = {"is_causal": fields.get("causal", True), **fields}
    sizes: dict[str, Any] = {name: read_positive(fields, name) for name in SIZES}
    width = fields.get("hidden_size")
    if isinstance(width, int):
        with checkpoint_errors(f"config.json of {source!r}"):
            check_divides("conv_group_size", sizes["conv_group_size"], "hidden_size", width)
    network_fields, settings = read_settings(source, fields, base)
    changes = {"first_draft": 0 if read_flag(fields, "sample_from_anchor", False) else 1, "anchored": is_speculators}
    settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    sizes["model_vocab_size"] = base.facts.vocab_size
    module = read_network(source, DFlash2Network, network_fields, settings, base, dtype, revision, **sizes)
    return make_drafter(DFlash2Drafter, source, module, base, settings)
