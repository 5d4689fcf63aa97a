"""Small tokenizers, and models that give a fixed answer."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from small_models import random_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import paradec
from paradec.models.adapter import Model

TEXT = "one two. three\n\nfour five; six\n\nseven one two\n eight. nine the then there three"


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token=words[-1])


def byte_level_bpe(special_tokens: list[str], text: str = TEXT) -> Tokenizer:
    """Train a byte-level BPE with 300 entries: special tokens, words of a text, parts of words, and bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"special_tokens": special_tokens, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, show_progress=False, **settings))
    return tokenizer


def byte_level_tokenizer(end: str = "<|end|>", text: str = TEXT) -> PreTrainedTokenizerFast:
    """A tokenizer with `byte_level_bpe` and a mask token. end: text of the end token."""
    special = {"mask_token": "<|mask|>", "eos_token": end, "extra_special_tokens": ["<|turn|>"]}
    tokenizer = byte_level_bpe(["<|mask|>", end, "<|turn|>"], text)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


TOKENIZER = byte_level_tokenizer()
VOCAB = len(TOKENIZER)
PROMPT_LENGTH = 2


class RecitingModule(nn.Module):
    """Predict the text that `texts` has for a prompt's first token, with a fixed random confidence at each position."""

    def __init__(self, texts: dict[int, list[int]]):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=200)
        self.texts = texts
        self.confidence = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, VOCAB, dtype=torch.float64)
        for row, first in enumerate(ids[:, 0].tolist()):
            token_ids = torch.tensor(self.texts.get(first, []), dtype=torch.int64)
            positions = torch.arange(PROMPT_LENGTH, min(ids.shape[1], PROMPT_LENGTH + len(token_ids)))
            logits[row, positions, token_ids[: len(positions)]] = 8 + 8 * self.confidence[positions]
        return logits


def reciting_model(*texts: list[int], tokenizer: Any = TOKENIZER) -> Model:
    """A model that answers the prompt [10 + i, 10 + i] with text number i."""
    module = RecitingModule({10 + number: ids for number, ids in enumerate(texts)})
    ids = {"mask_token_id": TOKENIZER.mask_token_id, "eos_token_id": TOKENIZER.eos_token_id}
    return paradec.wrap(module, **ids, prediction="same", topology="bidirectional", tokenizer=tokenizer)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer(text="Yes Yes Yes No No No level level Answer only.\n" * 9)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


CHAT_TOKENIZER = chat_tokenizer()
CHAT_VOCAB = len(CHAT_TOKENIZER)
CHAT_MASK, CHAT_END = CHAT_TOKENIZER.mask_token_id, CHAT_TOKENIZER.eos_token_id


def chat_network(seed: int = 0, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    sizes = {"vocab_size": CHAT_VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    positions = {"max_position_embeddings": 1024, "initializer_range": 0.3}
    return random_llama(seed, dtype, **sizes, **positions, eos_token_id=CHAT_END)


def chat_model(topology: str, prediction: str = "same", module: nn.Module | None = None, **more: Any) -> Model:
    is_causal = topology == "causal"
    facts = {"topology": topology, "prediction": "shifted" if is_causal else prediction, "eos_token_id": CHAT_END}
    facts |= {} if is_causal else {"mask_token_id": CHAT_MASK}
    return paradec.wrap(module or chat_network(), tokenizer=CHAT_TOKENIZER, **facts | more)


class ConstantLogits(nn.Module):
    """Return the same logits at every position. logits: token -> logit; other tokens have -inf."""

    def __init__(self, logits: Mapping[int, float], vocab: int = CHAT_VOCAB):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=4096)
        self.logits = torch.full((vocab,), -torch.inf, dtype=torch.float64)
        for token, value in logits.items():
            self.logits[token] = value

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits.expand(*ids.shape, -1).clone()


def chat_ids(text: str) -> list[int]:
    return CHAT_TOKENIZER(text, add_special_tokens=False)["input_ids"]
