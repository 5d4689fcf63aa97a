"""A tokenizer whose words are given."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=words[-1])
