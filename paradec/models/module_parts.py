"""The parts of a module that transformers names: its configuration, embeddings and output matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paradec.core.facts import ModelFacts


class NamedParts:
    """A model whose module names its parts as those of transformers do."""

    module: Any
    facts: ModelFacts

    @property
    def text_config(self) -> Any:
        """The module's configuration, or of several the one of its language model."""
        config = self.module.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states that `CausalQuery.keep_hidden` asks for; None for modules that give none."""
        return getattr(self.text_config, "hidden_size", None)

    def token_embeddings(self) -> Tensor | None:
        """[vocab_size, d]: the input embeddings of the vocabulary; None where the module names none."""
        return getattr(_part(self.module, "get_input_embeddings"), "weight", None)

    @property
    def has_head(self) -> bool:
        """Whether the output matrix can be run by itself (`head`)."""
        return _part(self.module, "get_output_embeddings") is not None

    def head(self, hidden: Tensor) -> Tensor:
        """The output matrix alone: hidden states [..., d] -> [..., vocab_size].

        Raises:
            ValueError: the module names none (`has_head`).
        """
        if not self.has_head:
            raise ValueError(f"{self.facts.name} names no output matrix that could be run by itself")
        return self.module.get_output_embeddings()(hidden)


def _part(module: nn.Module, name: str) -> Any:
    """What transformers' accessor of that name gives; None where the module has none, or none that answers."""
    try:
        return getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None
