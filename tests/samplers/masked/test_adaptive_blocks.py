"""Block policies that read logits: AdaBlock's rule equals a plain loop; delimiters; custom policies."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles.masked import adaptive_length
from places import GOLDEN
from tokenized_models import tokenizer_of
from torch import Tensor

import paradec
from paradec import AdaptiveBlocks, FixedBlocks, samplers
from paradec.models.adapter import Model
from paradec.samplers.features.adaptive_blocks import Opening

LINES = [[40, 11, 10, 18, 12, 19, 44, 13, 41], [48, 48, 40, 19, 44, 16, 10, 12, 19, 17, 41]]  # answers: several lines
ROWS = [*LINES, [38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18]]
NEWLINE, END = 45, 61
MANY_DELIMITERS = tuple(range(0, 64, 3))  # a third of the vocabulary


def test_cut_equals_a_plain_loop() -> None:
    generator = np.random.default_rng(0)
    lengths = set()
    for _ in range(300):
        new = int(generator.integers(1, 60))
        decided = generator.integers(0, new, 5)
        policy = AdaptiveBlocks(
            length=int(generator.integers(1, 20)),
            delimiter_threshold=float(generator.choice([0.0, 0.3, 0.6])),
            delimiters=(2, 5),
            window=float(generator.choice([0.1, 0.25, 1.0])),
        )
        policy = AdaptiveBlocks(**{**vars(policy), "min_length": int(generator.integers(1, policy.length + 1))})
        prompt = generator.integers(1, 9, 5)
        start, length = prompt + decided, prompt + new
        read = policy.open(start, prompt, length) - start
        width = int(read.max())
        tokens = generator.integers(0, 8, (5, width))
        confidence = generator.integers(0, 5, (5, width)) / 5
        available = (np.arange(width) < read[:, None]) & (generator.random((5, width)) < 0.9)
        opening = Opening(*(torch.as_tensor(a) for a in (tokens, confidence, available)), start, prompt, length)
        sizes = policy.cut(opening).tolist()
        for r in range(5):
            remaining = new - int(decided[r])
            row = tokens[r].tolist(), confidence[r].tolist()
            expected = adaptive_length(*row, new, remaining, policy, available[r].tolist())
            assert sizes[r] == expected <= read[r]
            lengths.add((expected > policy.length) - (expected < policy.length))
    assert lengths == {-1, 0, 1}


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "cache"), [("adablock", "none"), ("low_confidence", "dual")])
def test_blocks_end_where_the_model_predicts_a_delimiter(name: str, cache: str, llada64: Model, dream64: Model) -> None:
    sizes = set()
    for model in (llada64, dream64):
        facts = model.facts
        policy = AdaptiveBlocks(8, delimiters=(NEWLINE, facts.eos_token_ids[0]), window=0.5)
        sampler = samplers.create(name)
        state = sampler.start(model, ROWS, max_new_tokens=24, blocks=policy, cache=cache, eos_early_stop=False)
        with torch.inference_mode():
            while not state.done:
                start, before = state.block_start.copy(), state.canvas.clone()
                opening = np.flatnonzero(state.features["adaptive_blocks"].is_opening & state.running)
                sampler.commit(state, sampler.step(model, state))
                for row in opening:
                    length = int(state.length[row])
                    logits = model.module(input_ids=before[row : row + 1, :length], use_cache=False).logits[0]
                    logits[:, facts.mask_token_id] = -math.inf
                    p, tokens = logits.softmax(-1).roll(facts.shift, 0)[start[row] :].max(-1)
                    size = adaptive_length(tokens.tolist(), p.tolist(), 24, len(p), policy, [True] * len(p))
                    end = state.block_end[row] if state.block_start[row] == start[row] else state.block_start[row]
                    assert end - start[row] == size
                    sizes.add(size)
    assert len(sizes) >= 4


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "cache"), [("threshold", "dual"), ("random", "none")])
def test_without_a_delimiter_blocks_are_fixed(name: str, cache: str, llada64: Model) -> None:
    for policy in (
        AdaptiveBlocks(8, delimiters=(59,)),  # a token that the model never predicts
        AdaptiveBlocks(8, delimiters=(NEWLINE, END), delimiter_threshold=1.0),
    ):
        arguments = {"sampler": name, "cache": cache, "max_new_tokens": 24, "seed": 3, "trace": True}
        fixed = paradec.generate(llada64, ROWS, blocks=FixedBlocks(8), **arguments)
        adaptive = paradec.generate(llada64, ROWS, blocks=policy, **arguments)
        assert torch.equal(fixed.sequences, adaptive.sequences)
        assert [step.commits for step in fixed.trace.steps] == [step.commits for step in adaptive.trace.steps]
        assert fixed.row_nfe == adaptive.row_nfe and fixed.forwarded_tokens == adaptive.forwarded_tokens


def test_adablock_sets_the_block_policy_unless_the_request_does(llada64: Model) -> None:
    settings = {"delimiters": (NEWLINE, END), "init_block_length": 16, "delimiter_threshold": 0.2}
    sampler_with_blocks = samplers.create("adablock", **settings)
    arguments = {"max_new_tokens": 24, "trace": True}

    def run(sampler: object, **more: object) -> list:
        return paradec.generate(llada64, ROWS, sampler=sampler, **arguments, **more).trace.steps

    default, with_length_8 = run(sampler_with_blocks), run(sampler_with_blocks, block_length=8)
    assert default == run("threshold", blocks=sampler_with_blocks.blocks(None))
    assert with_length_8 == run("threshold", blocks=sampler_with_blocks.blocks(8)) != default
    assert run(sampler_with_blocks, blocks=FixedBlocks(8)) == run("threshold", block_length=8) != with_length_8


@dataclass
class ModelStub:
    """The attributes of a model that a policy reads."""

    facts: paradec.core.facts.ModelFacts
    tokenizer: object


def test_delimiters_are_looked_up_in_the_tokenizer() -> None:
    words = ["?", "a", "\n", ";\n", "\n\n", "b\n", "\nc", ".", "<m\n>", "x\n"]
    facts = paradec.core.facts.ModelFacts(vocab_size=9, mask_token_id=8, name="words")
    model = ModelStub(facts, tokenizer_of(words))
    assert AdaptiveBlocks().for_model(model).delimiters == (2,)
    assert AdaptiveBlocks(delimiters=["\n", ".", np.int64(1)]).for_model(model).delimiters == (1, 2, 7)
    # the tenth token is outside of the model's vocabulary
    assert AdaptiveBlocks(delimiter_match="ends").for_model(model).delimiters == (2, 3, 4, 5)
    message = "match no token, since words has no such token; blocks have the fixed length 32"
    with pytest.warns(UserWarning, match=message):
        assert AdaptiveBlocks(delimiters=("§",)).for_model(model) == FixedBlocks(32)
    with pytest.raises(ValueError, match="delimiters=9 must be an integer from 0 to 8"):
        AdaptiveBlocks(delimiters=(9,)).for_model(model)


def test_without_a_tokenizer_adablock_uses_fixed_blocks_with_a_warning(llada64: Model) -> None:
    with pytest.warns(UserWarning, match="llada-tiny has no tokenizer; blocks have the fixed length 8: give token ids"):
        out = paradec.generate(llada64, ROWS, sampler="adablock", block_length=8, max_new_tokens=24)
    assert torch.equal(out.sequences, paradec.generate(llada64, ROWS, block_length=8, max_new_tokens=24).sequences)


def test_adaptive_blocks_do_not_cross_the_blocks_of_a_block_causal_model(llada64: Model) -> None:
    facts = {"mask_token_id": llada64.facts.mask_token_id, "eos_token_id": END, "prediction": "same"}
    module = paradec.load(GOLDEN / "llada-tiny").unwrap()
    model = paradec.wrap(module, topology="block_causal", block_length=8, **facts)
    sampler = samplers.create("adablock", delimiters=MANY_DELIMITERS, window=1.0, delimiter_threshold=0.1)
    state = sampler.start(model, ROWS, max_new_tokens=24, eos_early_stop=False)
    lengths = set()
    with torch.inference_mode():
        while not state.done:
            running = state.running
            assert (state.block_start[running] // 8 == (state.block_end[running] - 1) // 8).all()
            is_open = running & ~state.features["adaptive_blocks"].is_opening
            lengths |= set((state.block_end - state.block_start)[is_open].tolist())
            sampler.commit(state, sampler.step(model, state))
    assert len(lengths) > 1


class ConfidentPrefix:
    """A custom policy: the block ends before the first candidate with a confidence below a half."""

    reads_logits = True
    extra_length = 0

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return length

    def count(self, prompt_length: int, length: int) -> None:
        return None

    def cut(self, opening: Opening) -> Tensor:
        is_confident = (opening.confidence >= 0.5) & opening.available
        return is_confident.int().cumprod(1).sum(1).clamp(min=1) + self.extra_length


def test_a_custom_policy(llada64: Model) -> None:
    commits_all = samplers.create("threshold", threshold=0.0)
    request = {"blocks": ConfidentPrefix(), "max_new_tokens": 24, "eos_early_stop": False, "trace": True}
    out = paradec.generate(llada64, ROWS, sampler=commits_all, **request)
    # every step commits one block, which begins where the block before it ends
    ends = [len(row) for row in ROWS]
    for step in out.trace.steps:
        for row, position, *_ in step.commits:
            assert position == ends[row]
            ends[row] += 1
    assert ends == [len(row) + 24 for row in ROWS] and 1 < out.nfe < 24


def test_an_error_names_a_wrong_policy(llada64: Model) -> None:
    policy = ConfidentPrefix()
    policy.extra_length = 24
    with pytest.raises(RuntimeError, match="blocks=.*ConfidentPrefix.*: cut returned more positions than it read"):
        paradec.generate(llada64, [LINES[0]], blocks=policy, max_new_tokens=24)
