"""What the loader must know of a checkpoint family: one value per `model_type`, defined in the family's own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paradec.models.checkpoint import positive


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` become a transformers module and facts.

    Args:
        module: the transformers class that has the same blocks.
        config: the content of config.json -> that class's configuration; raises CheckpointError for maths it lacks.
        prediction: "same" (logits row i predicts token i) or "shifted" (row i - 1 does).
        key_mapping: patterns of the file's weight names -> the class's names; None where they are equal.
        block_name: for block-causal families: the field of config.json that states the block.
        published_block: (config.json, source) -> the block where that field does not state it, by the published name.
        block_align: where blocks are counted from, as in `paradec.core.facts.ModelFacts`.
        default_block_length: how requests of a bidirectional family are cut when they do not say; None leaves the
            answer whole.
        mask_token: the mask's name in the vocabulary, for checkpoints that state its id nowhere.
        qwen2_tokenizer: whether vocab.json and merges.txt are Qwen2's and serve where tokenizer.json is missing (the
            checkpoint's own tokenizer class is remote code over the same files).
        float32_angles: whether `rope_full_precision` (on by default) keeps rotary angles in float32.
        experts: whether it is a mixture of experts: files have a matrix for each, the module stacks of them.
        fused: what follows the layer in a weight's name, after `key_mapping` -> the module's weights whose rows it
            holds, one after the other.
        reader: gives the class that reads the files, where `module` itself cannot; what it reads becomes a `module`.
        modes: the topologies that one checkpoint may be loaded with, its default first; none for those with one.
        draft_adapter: the folder beside the weights of an adapter that calls which draft are made with.
        decoder: gives the `Decoder` of a configuration, where that is not the plain one.
        padding_ends: whether the tokenizer's end token, else the padding, ends answers where the checkpoint states no
            end.
    """

    module: str
    config: Callable[[Mapping[str, Any]], Any]
    prediction: str
    key_mapping: Mapping[str, str] | None = None
    block_name: str | None = None
    published_block: Callable[[Mapping[str, Any], str], int | None] | None = None
    block_align: str = "absolute"
    default_block_length: int | None = None
    mask_token: str | None = None
    qwen2_tokenizer: bool = False
    float32_angles: bool = False
    experts: bool = False
    fused: Mapping[str, tuple[str, ...]] | None = None
    reader: Callable[[], Any] | None = None
    padding_ends: bool = False
    modes: tuple[str, ...] = ()
    draft_adapter: str | None = None
    decoder: Callable[[Any], Any] | None = None

    @property
    def topology(self) -> str:
        """The attention it was trained with: the first of its modes, "bidirectional" or "block_causal"."""
        if self.modes:
            return self.modes[0]
        return "bidirectional" if self.block_name is None else "block_causal"

    def block_length(self, config: Mapping[str, Any], source: str) -> int | None:
        """The block that a block-causal checkpoint was trained with, None where neither config.json nor its name says.

        Raises:
            CheckpointError: config.json states something else than a positive integer.
        """
        stated = None if self.block_name is None else stated_block(config, self.block_name)
        return self.published_block(config, source) if stated is None and self.published_block else stated


def stated_block(config: Mapping[str, Any], name: str) -> int | None:
    """The block length that config.json states under this name, None where it does not.

    Raises:
        CheckpointError: something else than a positive integer is there.
    """
    return None if config.get(name) is None else positive(config, name)
