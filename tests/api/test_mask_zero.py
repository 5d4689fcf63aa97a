"""Models whose mask has id 0 and that name neither an end nor a pad id: what they pad with is no mask.

Everything is compared with the same weights under an explicit `pad_token_id`, which may change the padding alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.facts import ModelFacts
from paradec.core.protocol import State
from paradec.models.adapter import Model

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
PAD, NEW = 7, 6
RAGGED = [[3, 4, 5, 6, 8], [9], [10, 11]]
pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")


def works(sampler: str, cache: str) -> bool:
    facts = ModelFacts(vocab_size=41, mask_token_id=0)
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


PAIRS = [(name, cache) for name in MASKED for cache in ("none", "dual", "dkv_decode") if works(name, cache)]
CACHES = [name for name in caches.names() if works("threshold", name)]


def module(seed: int = 0) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)).double()


def wrapped(**ids: Any) -> Model:
    return paradec.wrap(module(), mask_token_id=0, prediction="same", topology="bidirectional", **ids)


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    """Without an end and a pad id, and with a pad id."""
    return wrapped(), wrapped(pad_token_id=PAD)


def test_what_follows_an_answer_is_never_the_mask() -> None:
    for size in (2, 5):
        for mask in (None, *range(size)):
            fill = ModelFacts(vocab_size=size, mask_token_id=mask).fill_token_id
            assert fill != mask
            assert 0 <= fill < size


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "cache"), PAIRS)
def test_the_padding_of_unequal_rows_is_decided(models: tuple[Model, Model], name: str, cache: str) -> None:
    found = []
    for model in models:
        seen: list[tuple[int, int]] = []

        def note(state: State, commit: Any, seen: list = seen) -> None:
            seen.append(state.progress)

        state = samplers.create(name).start(model, RAGGED, max_new_tokens=NEW, cache=cache, seed=1)
        assert state.progress == (0, NEW * len(RAGGED))
        assert int(state.undecided.sum()) == NEW * len(RAGGED)
        out = paradec.generate(
            model, RAGGED, max_new_tokens=NEW, sampler=name, cache=cache, seed=1, callback=note, trace=True
        )
        assert seen[-1] == (NEW * len(RAGGED),) * 2
        padding = ~out.attention_mask.bool()
        assert (out.sequences[padding] == model.facts.fill_token_id).all()
        assert not (out.sequences == 0).any()
        commits = [(step.commits, step.forwarded) for step in out.trace.steps]
        found.append((out.new_tokens.tolist(), out.row_nfe, out.tokens, out.tokens_per_forward, commits, seen))
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", CACHES)
def test_what_was_decoded_can_go_on(models: tuple[Model, Model], cache: str) -> None:
    model = models[0]
    keep = caches.create(cache).facts.uses_store
    first = paradec.generate(model, RAGGED, max_new_tokens=NEW, cache=cache, keep_prefix=keep)
    assert not (first.sequences == 0).any()
    rows = [[*row, *new] for row, new in zip(RAGGED, first.new_tokens.tolist())]
    once = paradec.generate(model, rows, max_new_tokens=2, cache=cache)
    padded = paradec.generate(
        model, first.sequences, attention_mask=first.attention_mask, max_new_tokens=2, cache=cache
    )
    assert torch.equal(padded.new_tokens, once.new_tokens)
    assert padded.tokens == [2, 2, 2]
    if keep:
        assert all(0 not in tokens for tokens in first.prefix.tokens)
        paradec.generate(model, rows, max_new_tokens=2, cache=cache, prefix=first.prefix)


def test_holes_of_unequal_rows(models: tuple[Model, Model]) -> None:
    rows = [[3, 0, 5, 0, 0, 8, 9], [4, 0, 6]]
    outs = [paradec.infill(model, rows, block_length=2) for model in models]
    for out in outs:
        assert out.tokens == [3, 1]
        assert out.filled.sum(1).tolist() == [3, 1]
        assert not (out.sequences == 0).any()
    width = max(map(len, rows))
    for at, row in enumerate(rows):
        ends = [out.sequences[at, width - len(row) :] for out in outs]
        assert torch.equal(*ends)


class Words:
    """A tokenizer of one's own: word n is "n "."""

    unk_token_id = mask_token_id = eos_token_id = chat_template = None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(f"{int(i)} " for i in ids)


class Recorder:
    def __init__(self) -> None:
        self.puts: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.puts.append(value.clone())

    def end(self) -> None:
        pass


def test_a_row_that_a_stop_string_ends_holds_no_masks() -> None:
    found = []
    for ids in ({}, {"pad_token_id": PAD}):
        model = wrapped(tokenizer=Words(), **ids)
        free = paradec.generate(model, RAGGED, max_new_tokens=8, sampler="low_confidence", block_length=2)
        stop = f"{int(free.new_tokens[1, 1])} "  # ends row 1 after two tokens, or a row that says it earlier
        streamer, seen = Recorder(), []
        out = paradec.generate(
            model, RAGGED, max_new_tokens=8, sampler="low_confidence", block_length=2, stop_strings=stop,
            streamer=streamer, callback=lambda state, commit, seen=seen: seen.append(state.progress),
        )  # fmt: skip
        assert min(out.tokens) <= 2 < max(out.tokens)
        assert not (out.sequences == 0).any()
        assert seen[-1][0] == seen[-1][1] == 8 * len(RAGGED)
        streamed = torch.cat(streamer.puts, 1)
        # columns in which nothing was final any more are not sent
        assert torch.equal(streamed, out.sequences[:, : streamed.shape[1]])
        assert streamed.shape[1] == max(map(len, RAGGED)) + max(out.tokens)
        assert len(streamer.puts) > 2
        found.append((out.tokens, out.finished, out.text, [put.shape for put in streamer.puts]))
    assert found[0] == found[1]


def test_transformers_own_generate_pads_with_no_mask() -> None:
    plain = module()
    plain.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=None, bos_token_id=None)
    ids = torch.tensor([[0, 0, 3, 4, 5], [0, 9, 8, 7, 6]])
    attention = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    arguments = {"custom_generate": paradec.hf_generate, "prediction": "same", "mask_token_id": 0}
    out = plain.generate(ids, attention_mask=attention, max_new_tokens=NEW, return_dict_in_generate=True, **arguments)
    assert out.sequences.shape == (2, 5 + NEW)
    assert not (out.sequences == 0).any()
    expected = paradec.generate(wrapped(), input_ids=ids, attention_mask=attention, max_new_tokens=NEW)
    assert torch.equal(out.sequences[:, 5:], expected.new_tokens)
    assert out.tokens_per_forward == expected.tokens_per_forward
