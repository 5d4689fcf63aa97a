"""Drafters in EAGLE's format, models with known distributions, and p-values of sampled answers."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from places import load_script
from safetensors.torch import save_file
from small_models import tiny_llama, wrap_causal
from torch import Tensor

import paradec
from paradec.core.prompts import Prompts
from paradec.core.protocol import decode
from paradec.models.adapter import Model
from paradec.models.images.grid import Grid
from paradec.request import Request
from paradec.samplers.causal.state import CausalState
from paradec.samplers.distributions import probability, token_distribution

PROMPTS = [[3, 1, 4, 1, 0], [2, 2], [4], [0, 3, 1, 3, 2, 4, 2]]
NEGATIVE = [[1, 2, 3], [4], [0, 1], [2, 3, 4, 0]]
VOCAB = 5
exactness = load_script("benchmarks/exactness.py")


def tiny_base(layers: int = 2, seed: int = 0) -> Model:
    return wrap_causal(tiny_llama(seed, layers, VOCAB, inner=24))


def eagle_weights(
    hidden: int = 16, vocab: int = VOCAB, kv_heads: int = 2, bias: bool = True, qkv_bias: bool = False, seed: int = 1
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 24,
        "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "torch_dtype": "float16", "vocab_size": vocab,
    }  # fmt: skip
    narrow = hidden // 4 * kv_heads
    shapes = {
        "embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden), "layers.0.self_attn.k_proj.weight": (narrow, hidden),
        "layers.0.self_attn.v_proj.weight": (narrow, hidden), "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (24, hidden), "layers.0.mlp.up_proj.weight": (24, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 24), "layers.0.post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    if bias:
        shapes["fc.bias"] = (hidden,)
    for name, size in (("q", hidden), ("k", narrow), ("v", narrow)) if qkv_bias else ():
        shapes[f"layers.0.self_attn.{name}_proj.bias"] = (size,)
    return config, random_weights(shapes, seed)


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def write_drafter(folder: Path, config: Any, weights: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    """Write config.json and the weights of a drafter. If `file` is not a safetensors file, the weights are pickled."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(weights, folder / file, metadata={"format": "pt"})
    else:
        torch.save(weights, folder / file)
    return folder


def decode_answers(sampler: Any, model: Any, prompt: Any, **request: Any) -> tuple[list[list[int]], CausalState]:
    """Decode a prompt; return the new tokens of each row, and the final state."""
    state = sampler.start(model, prompt, **request)
    decode(sampler, model, state)
    spans = zip(state.canvas.tolist(), state.prompt_length, state.end, strict=True)
    return [row[start:stop] for row, start, stop in spans], state


ROWS, NEW = 2000, 3


def p_values(sampler: Any, base: Model, **request: Any) -> list[float]:
    """Sample `ROWS` answers of `NEW` tokens to each of two prompts; return each prompt's p-value under the base."""
    guided = request.get("guidance_scale", 1) != 1
    rows = [PROMPTS[:2][i % 2] for i in range(2 * ROWS)]
    if guided:
        request["negative_prompt"] = Prompts([NEGATIVE[:2][i % 2] for i in range(2 * ROWS)], False, [0] * len(rows))
    state = sampler.start(base, Prompts(rows, False, [0] * len(rows)), seed=len(request), max_new_tokens=NEW, **request)
    decode(sampler, base, state)
    answer_ids = state.canvas.gather(1, torch.as_tensor(state.prompt_length)[:, None] + torch.arange(NEW))
    possible = torch.tensor(list(itertools.product(range(VOCAB), repeat=NEW)))
    values = []
    for first in range(2):
        logits = []
        for prompt in (PROMPTS[first], NEGATIVE[first]):
            ids = torch.cat((torch.tensor(prompt).expand(len(possible), -1), possible), 1)
            logits.append(base.module(ids).logits[:, len(prompt) - 1 : -1])
        mixed = logits[1] + request["guidance_scale"] * (logits[0] - logits[1]) if guided else logits[0]
        settings = {name: value for name, value in request.items() if name != "negative_prompt"}
        tokens = token_distribution(mixed, Request(**{"temperature": 1.0} | settings))
        counts = exactness.count_answers(answer_ids[first::2], possible, VOCAB)
        values.append(exactness.p_value(counts, probability(tokens, possible).prod(1).detach().numpy()))
    return values


TableModel = exactness.TableModel
GRID = Grid(3, 3, image_ids=range(2, 8), row_end=8, head=(0,), tail=(9, 1))


class RecordingModel:
    """A table model that records the positions and tokens of its calls."""

    def __init__(self) -> None:
        self.model, self.calls = TableModel.random(10, seed=4), []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Any, store: Any = None) -> Tensor:
        self.calls.append((query.positions, query.tokens))
        return self.model(query, store)


def drafts_after(
    drafter: Any, base: Model, ids: Tensor, case: dict[str, Any], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the drafts [n] after the token at the case's `anchor`, and their distributions q [n, vocabulary].

    window: needed by drafters that draft token by token; other drafters fix it by their number of slots."""
    settings = {} if window is None else {"window": window}
    anchor, sampler = case["anchor"], paradec.samplers.create("speculative", drafter=drafter, **settings)
    width = window or drafter.slots
    state = sampler.start(base, ids[None, :anchor], Request(max_new_tokens=width + 1, temperature=case["temperature"]))
    queries = sampler.query(state)
    outputs = [base(query, state.store) for query in queries]
    certain = [torch.full_like(logits, -1e4).index_fill(-1, ids[anchor : anchor + 1], 0.0) for logits in outputs]
    proposal = sampler.propose(state, certain, queries)
    numbers = iter(case["uniform"])

    def uniform(rows: Any, positions: Tensor, *_: Any) -> Tensor:
        return torch.tensor([next(numbers) for _ in range(positions.shape[1])], dtype=torch.float64)[None, :, None]

    object.__setattr__(state, "uniform", uniform)
    sampler.commit(state, proposal)
    return state.memory["drafts"][0, : width - 1], state.memory["draft_distribution"][0, : width - 1]


def pair_p_value(
    drafter: Any, base: Model, rows: int, allowed_ids: Sequence[int] = (1, 7, 20, 33, 45, 60), **request: Any
) -> float:
    """Return the p-value of tokens 2 and 3 of sampled answers, under the base model limited to six allowed tokens."""
    prompt = [3, 14, 15]
    request = {"temperature": 1.0, **request, "suppress_tokens": [i for i in range(64) if i not in allowed_ids]}
    sampler = paradec.samplers.create("speculative", drafter=drafter)
    out = paradec.generate(base, [prompt] * rows, sampler=sampler, max_new_tokens=3, seed=5, **request)
    answer_pairs = torch.stack([row[1:] for row in out.new_tokens])
    triples = torch.cartesian_prod(*[torch.tensor([*allowed_ids])] * 3)
    with torch.no_grad():
        logits = base.module(torch.cat((torch.tensor(prompt).expand(len(triples), -1), triples), 1)).logits[:, 2:-1]
    allowed = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor([*allowed_ids]), True)
    p = probability(token_distribution(logits, Request(temperature=request["temperature"]), allowed), triples).prod(1)
    p = p.reshape(6, 36).sum(0)  # over the first token
    pairs = torch.cartesian_prod(*[torch.tensor([*allowed_ids])] * 2)
    return float(exactness.p_value(exactness.count_answers(answer_pairs, pairs, 64), p.double().numpy()))
