"""EAGLE drafters: their file format, their maths against a plain computation, exactness, LANTERN's trees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from drafters import (
    NEGATIVE,
    PROMPTS,
    VOCAB,
    decode_answers,
    eagle_weights,
    exactness,
    p_values,
    tiny_base,
    write_drafter,
)
from images import CODES, tiny_llamagen
from oracles.causal import greedy
from oracles.lantern import plain_node
from torch import Tensor
from torch.nn.functional import silu
from transformers import BertConfig, BertForMaskedLM

import paradec
from paradec.core.family_queries import CausalQuery
from paradec.models.adapter import Model
from paradec.models.checkpoint import CheckpointError
from paradec.models.eagle import EagleDrafter
from paradec.request import Request
from paradec.samplers.causal.speculative import Speculative
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import DynamicTree, Tree
from paradec.samplers.distributions import token_distribution

TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


@pytest.fixture
def loader(tmp_path: Path) -> Callable[..., EagleDrafter]:
    def load(base: Model, **sizes: Any) -> EagleDrafter:
        return paradec.load_drafter(write_drafter(tmp_path / "drafter", *eagle_weights(**sizes)), base=base)

    return load


def plain_head(weights: dict[str, Tensor], tokens: Tensor, features: Tensor, rotate: Callable[..., Tensor]) -> Tensor:
    """Compute EAGLE's head for one row by the paper: tokens [Q] from position 1, features [Q, D] from position 0.
    rotate: the rotary embedding of x [heads, Q, head_dim]. Returns features [Q, D]."""
    names = {key.split(".")[-2]: tensor for key, tensor in weights.items() if key.endswith("weight")}
    bias = {key.split(".")[-2]: tensor for key, tensor in weights.items() if key.endswith("bias")}
    length = len(tokens)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ names[name].T + bias.get(name, 0)

    x = linear("fc", torch.cat((names["embed_tokens"][tokens], features), -1))
    q, k, v = (linear(f"{name}_proj", x).view(length, -1, x.shape[-1] // 4).transpose(0, 1) for name in "qkv")
    q, k = rotate(q), rotate(k).repeat_interleave(len(q) // len(k), 0)
    v = v.repeat_interleave(len(q) // len(v), 0)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    x = x + linear("o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * names["post_attention_layernorm"]
    return x + linear("down_proj", silu(linear("gate_proj", y)) * linear("up_proj", y))


def rotate_halves(x: Tensor) -> Tensor:
    width = x.shape[-1]
    angle = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    cos, sin = (part(angle).double().repeat(1, 2) for part in (torch.cos, torch.sin))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def rotation_by_cells(first: int, side: int) -> Callable[[Tensor], Tensor]:
    """Return LlamaGen's rotation by rows and columns of cells. Position `first` is cell 0; earlier ones become 0."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = 10000 ** -(torch.arange(0, half, 2) / half)
        out = torch.zeros_like(x)
        for column in range(x.shape[1]):
            cell = column + 1 - first
            if cell < 0:
                continue
            angle = torch.cat((cell // side * frequency, cell % side * frequency))
            turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
            pairs = torch.view_as_complex(x[:, column].unflatten(-1, (-1, 2)).contiguous())
            out[:, column] = torch.view_as_real(pairs * turn).flatten(-2)
        return out

    return rotate


def check_distributions(
    state: CausalState,
    tree: Tree,
    weights: dict[str, Tensor],
    features_of: Callable[[int, int, Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    rotation_of: Callable[[int, int], Callable[[Tensor], Tensor]],
    is_chain: bool,
) -> int:
    """Compare the draft distribution at each inner node with an uncached computation; return the number of nodes."""
    checked = 0
    drafts = state.memory["drafts"].roll(1, 1) if is_chain else state.memory["drafts"]
    for row in state.rows.tolist():
        for node, path in enumerate([(), *tree.paths]):
            if (tree.children[node] < 0).all() or len(path) >= state.end[row] - state.committed[row] - 1:
                continue
            branches = []
            for branch in range(state.branches):
                length = int(state.committed[row] + state.shift[branch, row])
                ids = state.context[branch * state.batch + row, :length]
                features = features_of(branch, row, ids)[: length - 1]
                tokens = ids[1:].clone()
                for depth in range(len(path) + 1):  # inputs: a draft's token and its parent's output
                    token_ids = tokens.where(tokens < len(weights["embed_tokens.weight"]), 0)
                    output = plain_head(weights, token_ids, features, rotation_of(branch, row))
                    if depth == len(path):
                        branches.append(head(output[-1:]))
                        break
                    child = [(), *tree.paths].index(path[: depth + 1])
                    tokens = torch.cat((tokens, drafts[row, child : child + 1]))
                    features = torch.cat((features, output[-1:]))
            scale = state.request.guidance_scale
            logits = branches[0] if len(branches) == 1 else branches[1] + scale * (branches[0] - branches[1])
            expected = token_distribution(logits, state.request)[0]
            # transformers computes norms and angles in float32; guidance and temperature multiply the rounding errors
            atol = 5e-6 * (abs(scale) + abs(1 - scale)) / state.request.temperature
            torch.testing.assert_close(state.memory["draft_distribution"][row, node], expected, rtol=0, atol=atol)
            checked += 1
    return checked


@pytest.mark.thinned
@pytest.mark.parametrize("settings", [{"window": 4}, {"tree": TREE}])
@pytest.mark.parametrize("request_", [{}, {"guidance_scale": 1.7, "negative_prompt": NEGATIVE, "temperature": 0.8}])
def test_drafts_follow_the_paper(loader: Any, settings: dict[str, Any], request_: dict[str, Any]) -> None:
    base = tiny_base()
    sampler = paradec.samplers.create("speculative", drafter=loader(base, qkv_bias=bool(request_)), **settings)
    weights = eagle_weights(qkv_bias=bool(request_))[1]
    state = sampler.start(base, PROMPTS, max_new_tokens=9, seed=3, **request_)
    tree = Tree.from_setting(settings.get("tree", (1, 1, 1)))
    checked, accept_lengths = 0, set()

    def features_of(branch: int, row: int, ids: Tensor) -> Tensor:
        return base.module.model(ids[None]).last_hidden_state[0]

    with torch.inference_mode():
        for _ in range(4):
            sampler.commit(state, sampler.step(base, state))
            accept_lengths |= set(state.accepted[-1].tolist())
            checked += check_distributions(
                state, tree, weights, features_of, base.module.lm_head, lambda *_: rotate_halves, "window" in settings
            )
    assert checked >= 20 and {1, 2} <= accept_lengths


@pytest.mark.thinned
@pytest.mark.parametrize("condition", ["c2i", "t2i"])
def test_llamagen_drafts_follow_the_paper(loader: Any, condition: str) -> None:
    model = tiny_llamagen(condition)
    sizes = {"hidden": 48, "vocab": CODES, "kv_heads": 4}
    sampler = paradec.samplers.create("speculative", drafter=loader(model, **sizes), tree=(2, 1, 1))
    grid, inputs = model.grid(), [3, 7]
    if condition == "t2i":
        inputs = [torch.randn(n, 16, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (2, 5)]
    request = model.request(inputs, grid)
    state = sampler.start(
        request.model, request.prompts, grid=grid, seed=5, guidance_scale=2.0, negative_prompt=request.unconditional
    )
    positions = torch.arange(state.context.shape[1]).expand_as(state.context)

    def features_of(branch: int, row: int, ids: Tensor) -> Tensor:
        """Return the base's features, computed over whole rows. Other tests compare the base with the public code."""
        full = CausalQuery(np.arange(state.batch), state.context, positions, branches=2, keep_hidden=True)
        request.model(full)
        return full.hidden[branch * state.batch + row]

    def rotation_of(branch: int, row: int) -> Callable[[Tensor], Tensor]:
        return rotation_by_cells(int(state.prompt_length[row]), 4)

    with torch.inference_mode():
        for _ in range(3):
            sampler.commit(state, sampler.step(request.model, state))
            assert len(state.rows) == 2
            weights, tree = eagle_weights(**sizes)[1], Tree.from_setting((2, 1, 1))
            assert check_distributions(state, tree, weights, features_of, model.module.head, rotation_of, False) == 10


@pytest.mark.parametrize("paths", [((1,),), ((0,), (2,)), ((0, 0),), ((0,), (0, 1)), ((0,), (1, 0))])
def test_trees_with_gaps_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    refuses(lambda: Tree(paths), "without its parent or previous sibling")


def grow_tree(q_of: Callable[[tuple[int, ...]], Tensor], tree: DynamicTree, room: int) -> set[tuple[int, ...]]:
    """Build the paths of EAGLE-2's tree by a plain loop. q_of: distribution after a path. room: maximum depth."""
    probabilities: dict[tuple[int, ...], float] = {}
    beams: list[tuple[int, ...]] = [()]
    for _ in range(min(tree.depth, room)):
        level = {}
        for path in beams:
            best = q_of(path).topk(tree.top_k)
            for token_id, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                level[(*path, token_id)] = probabilities.get(path, 1.0) * probability
        probabilities |= level
        beams = sorted(level, key=level.get, reverse=True)[: tree.top_k]
    return set(sorted(probabilities, key=probabilities.get, reverse=True)[: tree.nodes - 1])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_dynamic_trees_follow_eagle_2(loader: Any, temperature: float) -> None:
    base, tree = tiny_base(), DynamicTree(nodes=9, depth=3, top_k=3)
    drafter, weights = loader(base), eagle_weights()[1]
    sampler = paradec.samplers.create("speculative", drafter=drafter, tree=tree, rule="naive")
    assert Speculative.from_dict({**sampler.to_dict(), "drafter": drafter}) == sampler
    state = sampler.start(base, PROMPTS, max_new_tokens=12, seed=3, temperature=temperature)
    request, shapes, rooms = Request(temperature=temperature or 1.0), set(), set()
    with torch.inference_mode():
        for _ in range(3):
            sampler.commit(state, sampler.step(base, state))
            layout = sampler.tree_layout(state)
            for row in state.rows.tolist():
                ids = state.context[row, : state.committed[row]]
                room = int(state.end[row] - state.committed[row]) - 1
                hidden = base.module.model(ids[None]).last_hidden_state[0, :-1]

                def q_of(path: tuple[int, ...], ids: Tensor = ids, hidden: Tensor = hidden) -> Tensor:
                    tokens, features = ids[1:], hidden
                    for token_id in (*path, -1):
                        output = plain_head(weights, tokens, features, rotate_halves)[-1:]
                        tokens, features = torch.cat((tokens, torch.tensor([token_id]))), torch.cat((features, output))
                    return token_distribution(base.module.lm_head(output), request)[0]

                i = state.rows.tolist().index(row)
                drafts, ancestors = state.memory["drafts"][row], layout.ancestors[i]
                paths = {
                    tuple(drafts[ancestors[node]][1:].tolist()) for node in range(1, tree.nodes) if drafts[node] >= 0
                }
                if room:  # else there is nothing to draft
                    assert paths == grow_tree(q_of, tree, room)
                    rooms.add(room)
                shapes.add(tuple(layout.parents[i].tolist()))
                for node in range(1, tree.nodes):
                    assert node in layout.children[i, layout.parents[i, node]] and layout.depths[i, node] <= 3
    assert len(shapes) > 1 and max(rooms) > 3  # trees differ, and some have room for more than their depth


SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"window": 4}, "long chain": {"window": 9}, "token by token": {"window": 1}, "tree": {"tree": TREE},
    "published tree": {"tree": "mc_sim_7b_63"}, "naive tree": {"tree": (3, 1), "rule": "naive"},
    "dynamic tree": {"tree": DynamicTree(nodes=9, depth=3, top_k=3), "rule": "naive"},
}  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize("name", SETTINGS)
def test_temperature_0_is_greedy_decoding(loader: Any, name: str) -> None:
    base = tiny_base()
    sampler = paradec.samplers.create("speculative", drafter=loader(base), **SETTINGS[name])
    tokens, state = decode_answers(sampler, base, PROMPTS, max_new_tokens=10, temperature=0, seed=0)
    assert tokens == greedy(base.module, PROMPTS, 10)
    assert np.sum(state.accepted, 0).tolist() == [10] * 4 and (state.accepted[0] == 1).all()
    assert (state.draft_nfe > 0).all() == (name != "token by token")
    if name in ("long chain", "published tree"):
        return
    assert decode_answers(
        sampler, base, PROMPTS, max_new_tokens=8, temperature=0, **{"guidance_scale": 2.0, "negative_prompt": NEGATIVE}
    )[0] == greedy(base.module, PROMPTS, 8, 2.0, NEGATIVE)


EXACT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"window": 3}, {}),
    ({"window": 4}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "guidance_scale": 1.5}),
    ({"tree": (2, 2)}, {"top_k": 3}),
    ({"tree": (3, 1), "rule": "recursive"}, {"guidance_scale": 2.0}),
    ({"tree": (2, 1), "rule": "naive"}, {"temperature": 0.7}),
    ({"tree": DynamicTree(nodes=6, depth=2, top_k=2), "rule": "naive"}, {"temperature": 0.7, "guidance_scale": 1.5}),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("settings", "request_"), EXACT)
def test_answers_have_the_distribution_of_the_model(
    loader: Any, settings: dict[str, Any], request_: dict[str, Any]
) -> None:
    base = tiny_base(layers=1)
    sampler = paradec.samplers.create("speculative", drafter=loader(base), **settings)
    assert min(p_values(sampler, base, **request_)) > 0.01 / (2 * len(EXACT))


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [TREE, DynamicTree(7, 2, 3)], ids=["static", "dynamic"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", ["lantern", "lantern++"])
def test_lantern_counts_k_neighbours_in_trees(name: str, k: int, shape: Any) -> None:
    model = exactness.TableModel.random(9, seed=0)
    drafter = exactness.TableModel.random(9, seed=1, sharpness=2.0)  # differs from the model: some drafts are rejected
    settings: dict[str, Any] = {"delta": 1.0} if name == "lantern" else {"lam": 100.0}
    sampler = paradec.samplers.create(name, drafter=drafter, tree=shape, k=k, **settings)
    codes, accepted, rejected = model.codebook().numpy(), 0, 0
    state = sampler.start(model, [[1, 2], [3]] * 10, max_new_tokens=6, seed=2)
    while not state.done:
        rows, remaining = state.rows, state.end - state.committed
        queries = sampler.query(state)
        outputs = [model(query, state.store) for query in queries]
        proposal = sampler.propose(state, outputs, queries)
        tree = sampler.tree_layout(state)
        p, q = outputs[0].softmax(-1).numpy(), state.memory["draft_distribution"][torch.as_tensor(rows)].numpy()
        uniform = state.uniform(rows, proposal.positions, tree.widest + 1, 0).numpy()
        for i, row in enumerate(rows):
            parents = tree.parents[i if len(tree.parents) > 1 else 0].tolist()
            drafts, node, depth, expected = state.memory["drafts"][row].tolist(), 0, 0, []
            while True:
                children = [child for child, parent in enumerate(parents) if parent == node]
                children = children if depth + 1 < remaining[row] else []  # no draft lies after the answer's end
                token_ids = [drafts[child] for child in children]
                numbers = uniform[i, depth][: len(children)].tolist()
                limit = 1.0 if name == "lantern" else 100.0
                child, distribution = plain_node(
                    p[i, node], q[i, node], token_ids, numbers, codes, k, limit, shape == TREE
                )
                if child < 0:
                    number = uniform[i, depth, -1] * distribution.sum()
                    expected.append(int(np.searchsorted(distribution.cumsum(), number, "right")))
                    rejected += len(children) > 0
                    break
                accepted += 1
                expected.append(token_ids[child])
                node, depth = children[child], depth + 1
            assert [token_id for token_id in proposal.values[i].tolist() if token_id >= 0] == expected
        sampler.commit(state, proposal)
    assert accepted > 10 and rejected > 3


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "settings"), [("lantern", {"tree": (3, 2, 1)}), ("lantern++", {"window": 5})])
def test_lantern_draws_pictures_with_a_drafter(loader: Any, name: str, settings: dict[str, Any]) -> None:
    model = tiny_llamagen("c2i")
    sampler = paradec.samplers.create(name, drafter=loader(model, hidden=48, vocab=CODES, kv_heads=4), **settings)
    out = paradec.generate_images(model, class_labels=[3, 7], sampler=sampler, seed=0, output_type="pt")
    assert out.codes.shape == (2, 4, 4) and out.nfe <= 16
    greedy, plain = (
        paradec.generate_images(model, class_labels=[3, 7], sampler=each, temperature=0, output_type="latent")
        for each in (sampler, paradec.samplers.create("sjd", window=1))
    )
    assert torch.equal(greedy.codes, plain.codes)


@pytest.mark.parametrize("bias", [True, False])
def test_both_file_formats(tmp_path: Path, bias: bool) -> None:
    base = tiny_base()
    config, weights = eagle_weights(bias=bias, qkv_bias=bias)
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)  # an unused buffer of old files
    a, b = (
        paradec.load_drafter(write_drafter(tmp_path / file, config, weights, file), base=base)
        for file in ("model.safetensors", "pytorch_model.bin")
    )
    for (name, first), second in zip(a.module.state_dict().items(), b.module.state_dict().values(), strict=True):
        assert torch.equal(first, second) and torch.equal(first, weights[name])
    assert a.dtype == torch.float64 and a.facts.name == "model.safetensors" and a.facts.vocab_size == VOCAB
    narrow = paradec.load_drafter(tmp_path / "pytorch_model.bin", base=base, dtype=torch.float32)
    assert narrow.dtype == torch.float32
    sampler = paradec.samplers.create("speculative", drafter=narrow)
    out = paradec.generate(base, input_ids=PROMPTS, sampler=sampler, max_new_tokens=6, temperature=0)
    assert out.new_tokens.tolist() == greedy(base.module, PROMPTS, 6)


WRONG: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = [
    (lambda c, w: c.update(hidden_size=32), "hidden_size=32, LlamaForCausalLM has 16"),
    (lambda c, w: c.update(vocab_size=9), "vocab_size=9, LlamaForCausalLM has 5"),
    (lambda c, w: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    (lambda c, w: c.update(hidden_act="square"), "hidden_act: 'square'"),
    (lambda c, w: c.update(num_key_value_heads=3), "num_key_value_heads=3"),
    (lambda c, w: c.update(rope_scaling={"type": "spiral"}), "rope_scaling"),
    (lambda c, w: c.update(rope_theta=9.0, rope_parameters={"rope_theta": 8.0}), "two bases of the rotary"),
    (lambda c, w: w.pop("fc.weight"), "missing weights: fc.weight"),
    (lambda c, w: w.update({"layers.0.input_layernorm.weight": torch.ones(16)}), "unexpected weights: layers"),
    (lambda c, w: w.update({"fc.weight": torch.ones(16, 16)}), r"fc.weight \[16, 16\] instead of \[16, 32\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_checkpoints(tmp_path: Path, change: Any, message: str) -> None:
    config, weights = eagle_weights()
    change(config, weights)
    with pytest.raises(CheckpointError, match=message):
        paradec.load_drafter(write_drafter(tmp_path / "drafter", config, weights), base=tiny_base())


def test_wrong_sources_and_bases(tmp_path: Path) -> None:
    base, folder = tiny_base(), write_drafter(tmp_path / "drafter", *eagle_weights())
    refuses(lambda: paradec.load_drafter(3, base=base), "source=3")
    refuses(lambda: paradec.load_drafter(folder, base=None), "base=None")
    (folder / "model.safetensors").unlink()
    refuses(lambda: paradec.load_drafter(folder, base=base), "neither model.safetensors", CheckpointError)
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    refuses(lambda: paradec.load_drafter(folder, base=base), "code in it is not run", CheckpointError)
    write_drafter(folder, *eagle_weights())
    bert = BertForMaskedLM(BertConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    refuses(lambda: paradec.load_drafter(folder, base=paradec.wrap(bert, mask_token_id=1)), "must be causal")
    eager = tiny_base()
    eager.module.set_attn_implementation("eager")
    refuses(lambda: paradec.load_drafter(folder, base=eager), "does not run over a key/value store")
    sampler = paradec.samplers.create("speculative", drafter=paradec.load_drafter(folder, base=base))
    refuses(lambda: sampler.start(tiny_base(seed=4), [1, 2], max_new_tokens=4), "reads features of LlamaForCausalLM")
