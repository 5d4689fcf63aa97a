"""What a model consists of, as far as its cost goes: read from a configuration, never from weights.

The arithmetic is that of gated transformers (Llama, Qwen2, Qwen3, Glm4Moe, Qwen3Moe), which all language models that
`paradec.load` reads by its own names run on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_int, shown

GATED = ("llama", "ministral3", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")
"""transformers' names of the classes whose layers `Shape` describes."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Args:
        name: what reports call it.
        layers, hidden, heads, kv_heads, head_dim: of the transformer.
        intermediate: width of the dense layers' gated MLP.
        vocab: rows of the output matrix.
        tied: whether the output matrix is the embedding.
        dense_layers: layers with a dense MLP; the others are mixtures of experts.
        experts, experts_per_token, expert_width: of a mixture's layers; 0 where there are none.
        expert_capacity: how many experts a block may choose, where they are chosen for whole blocks; else 0.
        shared_width: width of what every token takes in a mixture's layer beside its experts.
        prediction, topology, block_length, max_length: as in `paradec.core.facts.ModelFacts`.
        default_block_length: how answers are cut where a request does not say; None leaves them whole.
        dtype: what the weights are kept in; None where the configuration does not say.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    dense_layers: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    expert_capacity: int = 0
    prediction: str = "same"
    topology: str = "bidirectional"
    block_length: int | None = None
    max_length: int | None = None
    default_block_length: int | None = None
    dtype: str | None = None

    @property
    def whole_blocks(self) -> bool:
        """As in `paradec.core.facts.ModelFacts`."""
        return self.expert_capacity > 0

    @property
    def dense(self) -> int:
        """Layers with a dense MLP."""
        return self.layers if self.dense_layers is None else self.dense_layers

    @property
    def mixtures(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's queries, keys, values and output."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def always_weights(self) -> int:
        """Weights of all layers that every token goes through: all but the experts that are chosen."""
        mlp = 3 * self.hidden * self.intermediate * self.dense
        mixture = self.hidden * (self.experts + 3 * self.shared_width) * self.mixtures
        return self.layers * self.attention_weights + mlp + mixture

    @property
    def expert_weights(self) -> int:
        """Weights of one expert in one layer."""
        return 3 * self.hidden * self.expert_width

    @property
    def head_weights(self) -> int:
        """Weights of the output matrix."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All of them, but for norms and biases, which are a ten-thousandth."""
        tables = self.head_weights * (1 if self.tied else 2)
        return self.always_weights + self.mixtures * self.experts * self.expert_weights + tables

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied with, the output matrix among it."""
        chosen = self.mixtures * self.experts_per_token * self.expert_weights
        return self.always_weights + chosen + self.head_weights

    def covered(self, tokens: float) -> float:
        """How many experts of a layer so many tokens choose, on average: each takes its own evenly and at random.

        Routers send like tokens to like experts, and masks are alike: this is the most that is to be expected.
        """
        if not self.experts:
            return 0.0
        if self.expert_capacity and self.block_length:
            left_out = (1 - self.experts_per_token / self.expert_capacity) ** min(tokens, self.block_length)
            of_block = self.expert_capacity * (1 - left_out)
            return self.experts * (1 - (1 - of_block / self.experts) ** max(1.0, tokens / self.block_length))
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)


BUILT_IN = {
    "LLaDA-8B": Shape(
        name="LLaDA-8B",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        intermediate=12288,
        vocab=126464,
        max_length=4096,
        default_block_length=32,
        dtype="bfloat16",
    ),
    "Dream-7B": Shape(
        name="Dream-7B",
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        vocab=152064,
        prediction="shifted",
        max_length=131072,
        dtype="bfloat16",
    ),
    "LLaDA2.0-mini": Shape(
        name="LLaDA2.0-mini",
        layers=20,
        hidden=2048,
        heads=16,
        kv_heads=4,
        head_dim=128,
        intermediate=5120,
        vocab=157184,
        dense_layers=1,
        experts=256,
        experts_per_token=8,
        expert_width=512,
        shared_width=512,
        topology="block_causal",
        block_length=32,
        max_length=32768,
        default_block_length=32,
        dtype="bfloat16",
    ),
}
"""Published models by name, as their configurations state them; nothing is asked of a hub."""


def shape_of(source: Any) -> Shape:
    """The shape of a model, a configuration, or what one is found by.

    Args:
        source: a `Shape`; a name of `BUILT_IN`; a folder with config.json, or that file; a model of `paradec.load` or
            `paradec.wrap`; a configuration of transformers, or a module that has one.

    Raises:
        CheckpointError, ValueError: no such name or file, or a configuration of another kind of model.
        TypeError: something else.
    """
    if isinstance(source, Shape):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _of_name(os.fspath(source))
    from paradec.core.checks import check_model

    if hasattr(source, "facts") and hasattr(source, "module"):
        check_model("estimate", source, ("text",))
        config, facts = getattr(source.module, "config", None), source.facts
        if config is None:
            raise ValueError(f"{facts.name} has no configuration to read its sizes from; give estimate a config.json")
        dtype = str(source.dtype).removeprefix("torch.")
        block = source.default_block_length
        return _of_config(source.text_config, facts.name, facts, block, dtype)
    config = getattr(source, "config", source)
    if not hasattr(config, "model_type"):
        raise TypeError(
            "estimate takes a config.json or the folder of a checkpoint, a model, a configuration of transformers, or "
            f"one of {', '.join(map(repr, BUILT_IN))}; not {shown(source)}"
        )
    return _of_config(config, config.model_type, _causal_facts(config), None, _dtype_of(config))


def _of_name(name: str) -> Shape:
    built_in = {known.lower(): shape for known, shape in BUILT_IN.items()}
    if name.lower() in built_in and not os.path.exists(name):
        return built_in[name.lower()]
    from paradec.models.checkpoint import CheckpointError, read_json

    if not os.path.exists(name):
        raise CheckpointError(
            f"{shown(name)} is no folder or config.json here, and none of {', '.join(map(repr, BUILT_IN))}; estimate "
            "asks no hub"
        )
    folder, file = (name, "config.json") if os.path.isdir(name) else os.path.split(name)
    folder = os.path.abspath(folder)
    called = os.path.basename(folder) if file == "config.json" else os.path.splitext(file)[0]
    return _of_json(read_json(folder, file, None, required=True), called, folder)


def _of_json(config: Mapping[str, Any], name: str, source: str) -> Shape:
    """The shape that a checkpoint's config.json says, read as `paradec.load` reads it."""
    from paradec.models.causal import is_causal
    from paradec.models.checkpoint import CheckpointError
    from paradec.models.loading import known_family

    family = known_family(config)
    dtype = _stated_dtype(config.get("dtype", config.get("torch_dtype")))
    if family is None:
        if not is_causal(config):
            raise CheckpointError(
                f"{source!r} has model_type={shown(config.get('model_type'))}; estimates are for the masked and causal "
                "language models that load reads (not for canvases of noise or image models)"
            )
        from transformers import AutoConfig

        known = AutoConfig.for_model(**config)
        return _of_config(known, name, _causal_facts(known), None, dtype)
    known = family.config(config)
    block = None
    if family.block_length is not None:
        block = family.block_length(config, source)
        if block is None:
            raise CheckpointError(
                f"neither config.json nor the name of {source!r} says how long its blocks are; load it with "
                "paradec.load(..., block_length=...), and give estimate the model"
            )
    facts = _Facts(family.prediction, family.topology, block, getattr(known, "max_position_embeddings", None))
    return _of_config(known, name, facts, family.default_block_length or block, dtype)


@dataclass(frozen=True)
class _Facts:
    """What else than its configuration says how a model is evaluated; a part of `ModelFacts`."""

    prediction: str
    topology: str
    block_length: int | None = None
    max_length: int | None = None


def _causal_facts(config: Any) -> _Facts:
    """Of a plain configuration of transformers."""
    topology = "causal" if getattr(config, "is_causal", True) is not False else "bidirectional"
    return _Facts("same", topology, None, getattr(config, "max_position_embeddings", None))


def _of_config(config: Any, name: str, facts: Any, block: int | None, dtype: str | None) -> Shape:
    """The shape of a configuration of transformers."""
    if config.model_type not in GATED:
        raise ValueError(
            f"{name} runs on model_type={config.model_type!r}; estimates know the layers of "
            f"{', '.join(map(repr, GATED))}"
        )
    heads = config.num_attention_heads
    sizes: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
    }
    for field, value in sizes.items():
        check_int(f"{name}'s {field}", value, low=1)
    return Shape(
        name=name,
        **sizes,
        **_mixture(config),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        prediction=facts.prediction,
        topology=facts.topology,
        block_length=facts.block_length,
        max_length=facts.max_length,
        default_block_length=block,
        dtype=dtype,
    )


def _mixture(config: Any) -> dict[str, int]:
    """The sizes of a mixture of experts; {} for dense models."""
    if config.model_type == "glm4_moe":
        width = config.moe_intermediate_size
        return {
            "dense_layers": min(config.first_k_dense_replace, config.num_hidden_layers),
            "experts": config.n_routed_experts,
            "expert_capacity": getattr(config, "expert_capacity", None) or 0,
            "experts_per_token": config.num_experts_per_tok,
            "expert_width": width,
            "shared_width": width * config.n_shared_experts,
        }
    if config.model_type == "qwen3_moe":
        plain = {*(config.mlp_only_layers or ())}
        every = config.decoder_sparse_step
        mixed = [at for at in range(config.num_hidden_layers) if at not in plain and (at + 1) % every == 0]
        return {
            "dense_layers": config.num_hidden_layers - len(mixed),
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_width": config.moe_intermediate_size,
        }
    return {}


def _dtype_of(config: Any) -> str | None:
    return _stated_dtype(getattr(config, "dtype", None))


def _stated_dtype(stated: Any) -> str | None:
    from paradec.tools.estimation.devices import ITEM_BYTES

    name = str(stated).removeprefix("torch.")
    return name if name in ITEM_BYTES else None
