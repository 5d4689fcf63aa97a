"""FreeDave gives the base sampler's tokens in fewer forwards, with every base, cache and draft mode."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles.masked import FreeDaveLoop
from small_models import tiny
from torch import Tensor, nn

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.samplers.masked.ahead.freedave import FreeDave

CARRY = {"sampler": "threshold", "threshold": 0.3, "quota_per_step": "carry"}
FACTS = {"prediction": "same", "topology": "bidirectional"}
ROWS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 9]


def is_same_output(first: Any, second: Any) -> bool:
    has_same_fields = all(getattr(first, name) == getattr(second, name) for name in ("tokens", "finished", "text"))
    return torch.equal(first.sequences, second.sequences) and has_same_fields


VOCAB, DIGITS, NUM_PROMPTS = 14, 8, 500
MASK, END = 12, 13


class Denoisers(nn.Module):
    """512 random denoisers in one module. The first three tokens of a row, read as octal digits, select a denoiser."""

    def __init__(self, width: int = 8, longest: int = 16):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        generator = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.embeddings, self.position_embeddings = normal(VOCAB, width), normal(longest, width)
        self.mix = normal(DIGITS**3, width, width) / width**0.5
        self.readout = normal(DIGITS**3, width, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        task = (input_ids[:, :3] * torch.tensor([64, 8, 1])).sum(1)
        hidden = self.embeddings[input_ids] + self.position_embeddings[: input_ids.shape[1]]
        # near tokens have more weight, so that a step changes only some predictions
        positions = torch.arange(input_ids.shape[1])
        weights = torch.exp(-(positions[:, None] - positions).abs().double())
        hidden = torch.tanh(weights @ hidden @ self.mix[task])
        return hidden @ self.readout[task]


@pytest.fixture(scope="module")
def denoisers() -> tuple[Model, list[list[int]]]:
    model = paradec.wrap(Denoisers(), mask_token_id=MASK, eos_token_id=END, **FACTS)
    prompts = [[i // 64, i // 8 % 8, i % 8] + [7] * (i % 3) for i in range(NUM_PROMPTS)]
    return model, prompts


# (base sampler, fields of the request)
BASES = [
    ("low_confidence", {}),
    ("threshold", {}),
    ("factor", {}),
    ("maskgit_plus", {"steps": 8}),
    ("entropy", {"steps": 6}),
    (CARRY, {"steps": 4, "block_length": 8}),
    ({"sampler": "klass", "confidence_threshold": 0.3, "kl_threshold": 0.5}, {"block_length": 8}),
    ({"sampler": "credit", "threshold": 0.95}, {"block_length": 8}),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("base", "request_"), BASES, ids=lambda value: str(getattr(value, "name", value)))
def test_freedave_gives_the_tokens_of_its_base_on_500_denoisers(
    denoisers: tuple[Model, list[list[int]]], base: Any, request_: dict
) -> None:
    model, prompts = denoisers
    arguments = {"max_new_tokens": 8, "block_length": 4, "seed": 1} | request_
    method = FreeDave(base).base
    expected = paradec.generate(model, prompts, sampler=method, **arguments)
    forwards = []
    for count in (1, 2, 4, 8):
        output = paradec.generate(model, prompts, sampler=FreeDave(base, draft_steps=count), **arguments)
        assert is_same_output(output, expected)
        assert all(ours <= theirs for ours, theirs in zip(output.row_nfe, expected.row_nfe, strict=True))
        if count == 1:
            assert output.row_nfe == expected.row_nfe and output.forwarded_tokens == expected.forwarded_tokens
        forwards.append(sum(output.row_nfe))
    sampled, sampled_with_drafts = (
        paradec.generate(model, prompts, sampler=sampler, temperature=0.6, **arguments)
        for sampler in (method, FreeDave(base))
    )
    assert is_same_output(sampled, sampled_with_drafts) and not is_same_output(sampled, expected)
    assert forwards[0] > forwards[1] >= forwards[2] >= forwards[3]
    assert len({tuple(row) for row in expected.new_tokens.tolist()}) > NUM_PROMPTS // 2  # the denoisers differ


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in samplers.names() if samplers.get(name).family == "masked"])
def test_every_masked_sampler_as_base(denoisers: tuple[Model, list[list[int]]], name: str) -> None:
    model, prompts = denoisers
    try:
        sampler = FreeDave(name, draft_steps=3)
    except ValueError as error:
        assert re.search(f"base='{name}'", str(error))
        return
    arguments = {"max_new_tokens": 8, "block_length": 8, "seed": 1} | ({"steps": 6} if sampler.uses_steps else {})
    for temperature in (0.0, 0.6):
        expected, output = (
            paradec.generate(model, prompts[:60], sampler=method, temperature=temperature, **arguments)
            for method in (sampler.base, sampler)
        )
        assert is_same_output(output, expected) and sum(output.row_nfe) < sum(expected.row_nfe)


CASES = [
    ("bidirectional", "same", "none"), ("bidirectional", "same", "prefix"), ("bidirectional", "same", "dual"),
    ("bidirectional", "shifted", "dual"), ("block_causal", "same", "none"), ("block_causal", "same", "block"),
    ("block_causal", "shifted", "block"),
]  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize(("topology", "prediction", "cache"), CASES)
@pytest.mark.parametrize(("base", "temperature"), [("low_confidence", 0.0), ("random", 0.3)])
def test_every_topology_and_cache(topology: str, prediction: str, cache: str, base: Any, temperature: float) -> None:
    model = tiny(2, topology, prediction)
    arguments = {"max_new_tokens": 8, "block_length": 4, "cache": cache, "temperature": temperature, "seed": 2}
    expected = paradec.generate(model, ROWS, sampler=base, eos_early_stop=False, **arguments)
    batch, tree = (
        paradec.generate(model, ROWS, sampler=FreeDave(base, draft_mode=mode), eos_early_stop=False, **arguments)
        for mode in ("batch", "tree")
    )
    assert is_same_output(batch, expected) and is_same_output(tree, expected)
    assert batch.row_nfe == tree.row_nfe and sum(batch.row_nfe) < sum(expected.row_nfe)
    assert (batch.row_forwards, batch.forwarded_tokens) == (tree.row_forwards, tree.forwarded_tokens)


@pytest.mark.thinned
@pytest.mark.parametrize("base", ["learn2pd", "learn2pd+margin"])
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_bases_that_cut_rows_at_an_end_token(base: str, cache: str, llada64: Model) -> None:
    rows = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [37, 5, 0, 2, 3, 0, 5, 7, 41]]
    num_evaluated = {}
    for eot in ("greedy", "none"):
        method = samplers.create(base.replace("learn2pd", f"learn2pd(eot={eot})"))
        arguments = {"max_new_tokens": 32, "block_length": 16, "cache": cache}
        expected = paradec.generate(llada64, rows, sampler=method, **arguments)
        output = paradec.generate(llada64, rows, sampler=FreeDave(method), **arguments)
        assert is_same_output(output, expected) and sum(output.row_nfe) < sum(expected.row_nfe)
        num_evaluated[eot] = output.forwarded_tokens
    assert num_evaluated["greedy"] < num_evaluated["none"]


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("mode", ["batch", "tree"])
def test_freedave_with_guidance_gives_the_tokens_of_its_base(mode: str, cache: str) -> None:
    arguments = {"max_new_tokens": 12, "block_length": 6, "cache": cache, "guidance_scale": 1.6}
    base = paradec.generate(tiny(2), ROWS, sampler="low_confidence", **arguments)
    assert is_same_output(paradec.generate(tiny(2), ROWS, sampler=FreeDave(draft_mode=mode), **arguments), base)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("threshold", "count", "subset"), [(1.0, 4, False), (0.8, 3, False), (0.7, 4, True), (1.0, 6, True)]
)
def test_every_forward_equals_the_oracle(
    denoisers: tuple[Model, list[list[int]]], threshold: float, count: int, subset: bool
) -> None:
    model, prompts = denoisers
    oracle = FreeDaveLoop(model.module, threshold, count, subset, MASK, END)
    sampler = FreeDave(
        {"sampler": "threshold", "threshold": threshold}, draft_steps=count, agreement="subset" if subset else "exact"
    )
    num_inside, num_beyond = 0, 0
    for size, chosen in ((5, prompts[160:190]), (10, prompts[100:160])):
        state = sampler.start(model, chosen, max_new_tokens=10, block_length=size)
        commits: list[list[set]] = [[] for _ in chosen]
        with torch.inference_mode():
            while not state.done:
                running = np.flatnonzero(state.running)
                entries = sampler.commit(state, sampler.step(model, state)).to_list()
                for row in running:
                    commits[row].append({(i, token, round(score, 9)) for r, i, token, score in entries if r == row})
            expected = [oracle.decode(prompt, 10, size) for prompt in chosen]
        for row, reference in enumerate(expected):
            assert commits[row] == reference["commits"]
            assert state.canvas[row, : state.end[row]].tolist() == reference["row"]
            assert state.row_step[row] == reference["steps"] and state.stopped[row] == reference["stopped"]
            assert state.decided[row] == reference["decided"] and state.nfe[row] == len(commits[row])
            num_inside += reference["stopped"] and reference["steps"] > len(commits[row])
            num_beyond += reference["beyond"] > 0
    assert num_inside and num_beyond  # some rows end in an accepted draft, and some have accepted drafts after the end
