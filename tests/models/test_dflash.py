"""DFlash drafters: transformers' generator, both file formats, a plain implementation, exactness, rows, errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from drafters import NEGATIVE, PROMPTS, VOCAB, decode_answers, p_values, random_weights, tiny_base, write_drafter
from images import CODES, tiny_llamagen
from oracles.causal import greedy
from structured import add_letter_tokenizer, assert_constrained_decoding
from torch import Tensor
from torch.nn.functional import silu

import paradec
from paradec.models.adapter import Model
from paradec.models.checkpoint import CheckpointError
from paradec.models.dflash import DFlashDrafter
from paradec.request import Request
from paradec.samplers.causal.lantern import Lantern
from paradec.samplers.distributions import token_distribution

pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")

BLOCK = 4
TARGETS = [0, 2]


def checkpoint(
    hidden: int = 16, targets: list[int] = TARGETS, block: int = BLOCK, mask: int = 4, seed: int = 1, **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and weights in z-lab's format. `inner` updates `dflash_config`."""
    inner = {"mask_token_id": mask, "target_layer_ids": targets} | changes.pop("inner", {})
    config = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "block_size": block, "dflash_config": inner,
        "head_dim": 8, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention"], "max_position_embeddings": 64, "model_type": "qwen3",
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 5, **changes,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(targets) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(2):
        part = f"layers.{layer}."
        shapes |= {f"{part}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"{part}self_attn.{name}_proj.weight": (16, hidden) for name in "kv"}
        shapes |= {f"{part}self_attn.q_proj.weight": (32, hidden), f"{part}self_attn.o_proj.weight": (hidden, 32)}
        shapes |= {f"{part}mlp.{name}_proj.weight": (24, hidden) for name in ("gate", "up")}
        shapes |= {f"{part}mlp.down_proj.weight": (hidden, 24)}
        shapes |= {f"{part}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return config, random_weights(shapes, seed)


def to_transformers(config: Any, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    config = dict(config)
    config |= config.pop("dflash_config") | {"model_type": "muse_glimmer_assistant"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    config["architectures"] = ["MuseGlimmerAssistantModel"]
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return config, {names.get(name, name): tensor for name, tensor in weights.items()}


@pytest.fixture
def loader(tmp_path: Path) -> Callable[..., DFlashDrafter]:
    def load(base: Model, transformers_format: bool = False, **sizes: Any) -> DFlashDrafter:
        files = checkpoint(**sizes)
        folder = write_drafter(tmp_path / "d", *(to_transformers(*files) if transformers_format else files))
        return paradec.load_drafter(folder, base=base)

    return load


def speculative(drafter: DFlashDrafter) -> Any:
    return paradec.samplers.create("speculative", drafter=drafter)


def test_drafts_tokens_and_forwards_equal_transformers(loader: Any, tmp_path: Path) -> None:
    """transformers 5.23 runs with eager attention, because its sdpa attention ignores the window."""
    base = tiny_base(layers=4)
    drafter = loader(base, transformers_format=True)
    options = {"attn_implementation": "eager", "dtype": torch.float64}
    theirs_eager = type(drafter.module).from_pretrained(tmp_path / "d", **options)
    head, calls, drafts = base.module.lm_head, [], []
    base.module.model.register_forward_pre_hook(lambda *_: calls.append(0))
    for module in (drafter.module, theirs_eager):
        module.register_forward_hook(lambda _, __, out: drafts.append(head(out[0][:, 1:]).argmax(-1).tolist()))
    accepted = 0
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        assistant = {"assistant_model": theirs_eager, "speculation_type": "dflash", "do_sample": False}
        theirs = base.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **assistant)
        expected_calls, expected_drafts = len(calls), drafts[:]
        calls.clear(), drafts.clear()
        out = paradec.generate(base, [prompt], sampler=speculative(drafter), max_new_tokens=20, temperature=0)
        assert out.new_tokens[0].tolist() == theirs[0, len(prompt) :].tolist()
        assert out.nfe == len(calls) == expected_calls
        assert drafts == expected_drafts and out.draft_nfe == [len(drafts)]
        accepted += 20 - out.nfe
        calls.clear(), drafts.clear()
    assert accepted > 8


def test_constrained_answers_have_the_right_distribution(loader: Any) -> None:
    base = add_letter_tokenizer(tiny_base(layers=4), 2)
    assert max(assert_constrained_decoding(speculative(loader(base)), base, "(ab|b)a?", 4, 600).row_nfe) < 4


def plain_block(config: dict, weights: dict[str, Tensor], block: Tensor, features: Tensor, causal: bool) -> Tensor:
    """Return the outputs [B, D] of one row's block [B, D] after C context positions with features [C, layers * D]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [heads, Q, 8] to positions [Q]."""
        angle = positions[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = (part(angle).double().repeat(1, 2) for part in (torch.cos, torch.sin))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    context = norm(features @ weights["fc.weight"].T, "hidden_norm")
    positions = torch.arange(len(context) + len(block))
    block_positions = positions[len(context) :]
    x = block
    for layer in range(2):
        part = f"layers.{layer}."

        def heads(y: Tensor, name: str, part: str = part) -> Tensor:
            return (y @ weights[f"{part}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(0, 1)

        y = norm(x, f"{part}input_layernorm")
        context_and_block = torch.cat((context, y))
        q = rotate(norm(heads(y, "q"), f"{part}self_attn.q_norm"), block_positions)
        k = rotate(norm(heads(context_and_block, "k"), f"{part}self_attn.k_norm"), positions).repeat_interleave(2, 0)
        v = heads(context_and_block, "v").repeat_interleave(2, 0)
        scores = q @ k.mT / 8**0.5
        if config["layer_types"][layer] == "sliding_attention":
            distance = block_positions[:, None] - positions
            hidden = (distance < 0) | (distance >= 5) if causal else distance.abs() > 5
            scores = scores.masked_fill(hidden, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ weights[f"{part}self_attn.o_proj.weight"].T
        y = norm(x, f"{part}post_attention_layernorm")
        up = silu(y @ weights[f"{part}mlp.gate_proj.weight"].T) * (y @ weights[f"{part}mlp.up_proj.weight"].T)
        x = x + up @ weights[f"{part}mlp.down_proj.weight"].T
    return norm(x, "norm")


INNER = {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 3.0}


@pytest.mark.thinned
@pytest.mark.parametrize("transformers_format", [False, True])
@pytest.mark.parametrize("request_", [{}, {"guidance_scale": 1.7, "negative_prompt": NEGATIVE, "temperature": 0.8}])
def test_drafts_follow_the_paper(loader: Any, request_: dict[str, Any], transformers_format: bool) -> None:
    base = tiny_base(layers=4)
    inner = {} if transformers_format else INNER
    config, weights = checkpoint(inner=inner)
    method = speculative(loader(base, transformers_format, inner=inner))
    state = method.start(base, PROMPTS, max_new_tokens=16, seed=3, **request_)
    request = Request(temperature=request_.get("temperature", 1.0))
    checked, accepted = 0, set()
    with torch.inference_mode():
        for _ in range(5):
            method.commit(state, method.step(base, state))
            accepted |= set(state.accepted[-1].tolist())
            for row in state.rows.tolist():
                branches = []
                for branch in range(state.branches):
                    length = int(state.committed[row] + state.shift[branch, row])
                    ids = state.context[branch * state.batch + row, :length]
                    hidden_states = base.module(ids[None, :-1], output_hidden_states=True).hidden_states
                    features = torch.cat([hidden_states[index + 1][0] for index in TARGETS], -1)
                    embedded = base.module.model.embed_tokens.weight[torch.cat((ids[-1:], torch.full((BLOCK - 1,), 4)))]
                    embedded = embedded * inner.get("input_embedding_scale", 1.0)
                    hidden = plain_block(config, weights, embedded, features, not transformers_format)[1:]
                    logits = base.module.lm_head(hidden)
                    if inner:
                        logits = 3 * torch.tanh(0.7 * logits / 3)
                    branches.append(logits)
                scale = request_.get("guidance_scale", 1)
                logits = branches[0] if len(branches) == 1 else branches[1] + scale * (branches[0] - branches[1])
                expected = token_distribution(logits, request)
                if int(state.end[row] - state.committed[row]) - 1:
                    # transformers computes norms and angles in float32
                    draft_probs = state.memory["draft_distribution"][row, : BLOCK - 1]
                    torch.testing.assert_close(draft_probs, expected, rtol=0, atol=5e-6)
                    checked += 1
    assert checked > 12 and {1, 2} <= accepted


def test_temperature_0_is_greedy_decoding(loader: Any) -> None:
    base = tiny_base(layers=4)
    method = speculative(loader(base))
    actual, state = decode_answers(method, base, PROMPTS, max_new_tokens=20, temperature=0, seed=0)
    assert actual == greedy(base.module, PROMPTS, 20)
    assert (state.accepted[0] == 1).all() and len(set(state.nfe.tolist())) > 1 and (state.nfe < 20).all()
    assert (state.draft_nfe <= state.nfe).all() and (state.draft_nfe > 0).all()
    request: dict[str, Any] = {"guidance_scale": 2.0, "negative_prompt": NEGATIVE, "temperature": 0}
    actual, _ = decode_answers(method, base, PROMPTS, max_new_tokens=8, **request)
    assert actual == greedy(base.module, PROMPTS, 8, 2.0, NEGATIVE)
    for new in (1, 2, 3):  # shorter than the block
        actual, _ = decode_answers(method, base, PROMPTS, max_new_tokens=new, temperature=0)
        assert actual == greedy(base.module, PROMPTS, new)


@pytest.mark.parametrize("request_", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "guidance_scale": 1.5}])
def test_answers_have_the_distribution_of_the_model(loader: Any, request_: dict[str, Any]) -> None:
    base = tiny_base(layers=1)
    assert min(p_values(speculative(loader(base, targets=[0], block=3, seed=2)), base, **request_)) > 0.01 / 4


def test_greedy_images_equal_undrafted_ones(loader: Any) -> None:
    model = tiny_llamagen()
    drafter = loader(model, hidden=48, targets=[0, 1], mask=CODES - 1, block=6)
    arguments = {"class_labels": [3, 7], "temperature": 0, "guidance_scale": 2.0, "output_type": "latent"}
    output = paradec.generate_images(model, sampler=speculative(drafter), **arguments)
    plain = paradec.generate_images(model, sampler=paradec.samplers.create("sjd", window=1), **arguments)
    assert torch.equal(output.tokens, plain.tokens)


WRONG: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = [
    (lambda c, w: c.pop("hidden_size"), "hidden_size"),
    (lambda c, w: c.update(hidden_size=32), "hidden_size=32, LlamaForCausalLM has 16"),
    (lambda c, w: c.update(attention_bias=True), "attention_bias=True"),
    (lambda c, w: c.update(hidden_act="square"), "hidden_act: 'square'"),
    (lambda c, w: c.update(layer_types=["full_attention"]), "layer_types=.* must be a list of num_hidden_layers=2"),
    (lambda c, w: c.update(block_size=1), "block_size=1 must be an integer from 2 to 64"),
    (lambda c, w: c["dflash_config"].pop("mask_token_id"), "mask_token_id=None must be"),
    (lambda c, w: c["dflash_config"].update(mask_token_id=5), "mask_token_id=5 must be"),
    (lambda c, w: c["dflash_config"].update(target_layer_ids=[0, 4]), "target_layer_ids=4 must be"),
    (lambda c, w: c["dflash_config"].update(selector_rank=8), "has selector_rank, of an unsupported variant"),
    (lambda c, w: c.update(num_hidden_layers=3, layer_types=None), "num_hidden_layers=3 .*layers.2.self_attn.q_"),
    (lambda c, w: c.update(intermediate_size=7), "intermediate_size=7 need 7 rows of .*gate_proj.* which has 24"),
    (lambda c, w: c.update(rope_scaling={"type": "linear", "factor": 0}), "cannot be computed: they are not finite"),
    (lambda c, w: c["dflash_config"].update(is_causal="no"), "is_causal='no' must be true or false"),
    (lambda c, w: c["dflash_config"].update(final_logit_softcapping=-1), "final_logit_softcapping=-1 must be"),
    (lambda c, w: w.pop("fc.weight"), "missing .*encoder.fc.weight"),
    (lambda c, w: w.update({"layers.0.conv.weight": torch.ones(2)}), "unexpected .*layers.0.conv"),
    (lambda c, w: w.update({"fc.weight": torch.ones(16, 16)}), "mismatched .*encoder.fc.weight"),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_checkpoints_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    config, weights = checkpoint()
    change(config, weights)
    folder = write_drafter(tmp_path / "drafter", config, weights)
    refuses(lambda: paradec.load_drafter(folder, base=tiny_base(layers=4)), message, CheckpointError)


def test_unsuitable_bases_are_refused(loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base(layers=4)
    drafter = loader(base)
    create = paradec.samplers.create
    refuses(lambda: create("speculative", drafter=drafter, window=7), "window=7 has no meaning")
    refuses(lambda: create("speculative", drafter=drafter, tree=(2, 1)), "has no meaning with drafter='d'")
    refuses(lambda: Lantern(drafter=drafter), "drafter='d' must be a causal model")
    sampler, other_base = speculative(drafter), tiny_base(layers=4)
    refuses(lambda: sampler.start(other_base, [1, 2], max_new_tokens=4), "reads features of LlamaForCausalLM")
    monkeypatch.setitem(__import__("sys").modules, "transformers.models.muse_glimmer_assistant", None)
    refuses(lambda: loader(base), "needs transformers 5.23 or newer; this is", CheckpointError)


assert VOCAB == 5  # the mask id of the checkpoints, 4, is in the vocabulary
