"""DSpark drafters (DeepSpec, MIT; speculators' format): DFlash's network, with logits biased by the previous token.

A block is the last accepted token and `block_size - 1` masks. Column j predicts the token at position j + 1 of the
block, so the last accepted token's column drafts too. (If `sample_from_anchor` is false, a mask predicts its own token,
as in DFlash.) A low-rank Markov head computes the bias from the previous token (vanilla), from this token and the
column's state (gated), or from token, state and a recurrent memory (rnn). Drafts have the distribution softmax(logits +
bias). A confidence head predicts the acceptance of a draft before the draft is drawn.

R requests, n columns that draft, D width, r rank, V and Vd: number of the model's and of the drafter's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from paradec.core.checks import check_choice
from paradec.models.base import Model
from paradec.models.checkpoint import (
    CheckpointError,
    checkpoint_errors,
    read_flag,
    read_positive,
    read_tensors,
    read_weight_headers,
)
from paradec.models.dflash import BlockSettings, WalkDrafter, flatten_config, read_network, read_settings
from paradec.models.drafter import TABLES, flatten_speculators_config, make_drafter, read_token_map

HEADS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """The bias of a column's logits; parameters are named as in published checkpoints.

    kind: one of `HEADS`. rank: r. width: D. vocab: V. rows: Vd."""

    def __init__(self, kind: str, rank: int, width: int, vocab: int, rows: int):
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, rows, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(width + 2 * rank, 3 * rank) if kind == "rnn" else None

    def forward(self, embedded: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The bias [R, Vd] of one column of the block, and the memory [R, r] for the next column.

        embedded: [R, r]: the previous token's row of `markov_w1`. state: [R, D], of the column. memory: [R, r]."""
        if self.joint_proj is not None:
            gates = self.joint_proj(torch.cat((memory, embedded, state), -1)).chunk(3, -1)
            gate = gates[0].sigmoid()
            memory = gate * memory + (1 - gate) * gates[1].tanh()
            embedded = gates[2].tanh()
        elif self.gate_proj is not None:
            embedded = self.gate_proj(torch.cat((state, embedded), -1)).sigmoid() * embedded
        return self.markov_w2(embedded), memory


class ConfidenceHead(nn.Module):
    """The logit of a draft's probability of acceptance."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkNetwork(MuseGlimmerAssistantModel):  # type: ignore[misc, no-any-unimported]
    """transformers' DFlash network, with the parts of DSpark that the config's `dspark` lists."""

    def __init__(self, config: Any):
        super().__init__(config)
        parts, width = config.dspark, config.hidden_size
        self.embed_tokens = nn.Embedding(parts["vocab"], width) if parts["has_embeddings"] else None
        self.lm_head = nn.Linear(width, parts["rows"], bias=False) if parts["has_lm_head"] else None
        rank = parts["rank"]
        self.markov_head = MarkovHead(parts["kind"], rank, width, parts["vocab"], parts["rows"]) if rank else None
        num_inputs = width + (rank if parts["confidence_with_markov"] else 0)
        self.confidence_head = ConfidenceHead(num_inputs) if parts["confidence"] else None
        self.post_init()


@dataclass
class MarkovWalk:
    """The logits of a block's columns, token by token. states, guide: see `DSparkDrafter.walk`."""

    drafter: DSparkDrafter
    states: Tensor
    guide: Callable[[Tensor], Tensor]
    base_logits: Tensor = field(init=False)
    """[branches * R, n, Vd]: logits without the bias."""
    memory: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.base_logits = self.drafter.logits(self.states)
        head = self.drafter.module.markov_head
        rank = 0 if head is None else head.markov_w1.embedding_dim
        self.memory = self.states.new_zeros(len(self.states), rank)

    def slot_candidates(self, slot: int) -> None:
        """Return None: a draft may be any token."""

    def _embed_previous(self, previous: Tensor) -> Tensor:
        """[branches * R, r]: embeddings of the tokens `previous` [R]; unknown ids are read as id 0."""
        head = self.drafter.module.markov_head
        if head is None:
            return self.memory
        token_ids = torch.where(previous < self.drafter.facts.vocab_size, previous, 0)
        return head.markov_w1(token_ids.repeat(len(self.states) // len(previous)))

    def confidence(self, slot: int, previous: Tensor) -> Tensor:
        """[R]: logits of acceptance, from the conditional branch. Raises ValueError without a confidence head."""
        head = self.drafter.module.confidence_head
        if head is None:
            raise ValueError(f"drafter {self.drafter.facts.name} has no confidence head")
        state, embedded = self.states[:, slot], self._embed_previous(previous)
        inputs = torch.cat((state, embedded), -1) if head.proj.in_features > state.shape[-1] else state
        return head.proj(inputs)[: len(previous), 0]

    def draft_logits(self, slot: int, previous: Tensor) -> Tensor:
        """Logits [R, Vd] of a slot. Calls must visit the slots in order, since each updates `memory`."""
        logits, head = self.base_logits[:, slot], self.drafter.module.markov_head
        if head is not None:
            bias, self.memory = head(self._embed_previous(previous), self.states[:, slot], self.memory)
            logits = logits + bias.to(logits.dtype)
        return self.guide(logits.unsqueeze(1)).squeeze(1)

    def logits(self, slot: int, previous: Tensor) -> Tensor:
        """Logits [R, V] of a slot after the tokens `previous` [R]; minus infinity for tokens that the drafter lacks."""
        return self.drafter.expand_logits(self.draft_logits(slot, previous))


class DSparkDrafter(WalkDrafter):
    """A DSpark network over the model that it was trained for, as `drafter` of the sampler "speculative". It makes
    `block_size` drafts in one forward (one fewer if `sample_from_anchor` is false).

    module, base, settings: as for `DFlashDrafter`.
    tokens: [Vd] int64: the model's id of each of the drafter's tokens; None if it has all of the model's tokens."""

    def __init__(self, module: Any, base: Model, settings: BlockSettings, tokens: Tensor | None, name: str = "DSpark"):
        super().__init__(module, base, settings, name)
        self.tokens = None if tokens is None else tokens.to(self.device)

    def walk(self, states: Tensor, guide: Callable[[Tensor], Tensor], allowed: Tensor | None) -> MarkovWalk:
        """Start a walk over states [branches * R, n, D]. guide: mixes guidance branches:
        [branches * R, n, Vd] -> [R, n, Vd]."""
        return MarkovWalk(self, states, guide)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, n, Vd] of states [R, n, D], without a bias."""
        if self.module.lm_head is None:
            return super().logits(states)
        return self.module.lm_head(states).to(self.base.dtype)

    def _embed(self, ids: Tensor) -> Tensor:
        table = self.module.embed_tokens
        return super()._embed(ids) if table is None else table(ids)


def load_dspark(
    source: str, config: Mapping[str, Any], base: Model, dtype: torch.dtype | None, revision: str | None
) -> DSparkDrafter:
    """Load a DSpark drafter, as `load_drafter` does."""
    is_speculators, num_layers = config.get("speculators_model_type") is not None, base.text_config.num_hidden_layers
    fields = (
        flatten_speculators_config(source, config, base)
        if is_speculators
        else {"is_causal": False, **flatten_config(source, config)}
    )
    network_fields, settings = read_settings(source, fields, base)
    if not is_speculators and num_layers - 1 in settings.target_layer_ids:
        raise CheckpointError(
            f"config.json of {source!r}: target_layer_ids={list(settings.target_layer_ids)} has {num_layers - 1}, the "
            f"last layer of {base.facts.name}, which DSpark does not read"
        )
    first_draft = 0 if read_flag(fields, "sample_from_anchor", True) else 1
    settings = dataclasses.replace(settings, first_draft=first_draft, anchored=is_speculators)
    headers = read_weight_headers(source, revision)
    rows = next(iter(headers["lm_head.weight"].shape), 0) if "lm_head.weight" in headers else None
    tables = read_tensors(source, [name for name in TABLES if name in headers], revision)
    tokens = read_token_map(source, tables, rows, base)
    rank = read_positive(fields, "markov_rank") if fields.get("markov_rank", 0) != 0 else 0
    kind = fields.get("markov_head_type", "vanilla")
    with checkpoint_errors(f"config.json of {source!r}"):
        check_choice("markov_head_type", kind, HEADS)
    parts = {
        "rank": rank,
        "kind": kind,
        "confidence": bool(read_flag(fields, "enable_confidence_head", False)),
        "confidence_with_markov": bool(read_flag(fields, "confidence_head_with_markov", False) and rank),
        "vocab": base.facts.vocab_size,
        "rows": base.facts.vocab_size if rows is None else rows,
        "has_embeddings": "embed_tokens.weight" in headers,
        "has_lm_head": rows is not None,
    }
    module = read_network(
        source, DSparkNetwork, network_fields, settings, base, dtype, revision, unused_suffixes=TABLES, dspark=parts
    )
    return make_drafter(DSparkDrafter, source, module, base, settings, tokens)
