"""MAR, and ReCAP with it: replays of the public code on a small model, and properties.

The recorded runs drew the head's noise from torch's generator, so the tests can draw the same noise. Their local steps
used 5 of the head's 10 steps although their settings state a ratio of 0.4; the tests use a ratio of 0.5.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from images import randomize
from recorded import find_weights, golden, read_json, read_json_unrecorded, replays
from safetensors.torch import load_file
from torch import Tensor

from paradec.core.orders import remaining_counts
from paradec.core.protocol import decode
from paradec.models.images.mar import MAR, MARModel
from paradec.samplers.pictures.continuous import MAR as Sampler

SIZES = {"side": 6, "channels": 4, "width": 16, "depth": 2, "heads": 2, "classes": 10, "buffer": 4}
HEAD = {"head_depth": 2, "head_width": 16, "eps": 1e-5}
RECORDED = [path for path in sorted(golden("recap").glob("*.json")) if "orders" in read_json_unrecorded(path)]


@pytest.fixture(scope="module")
def model() -> MARModel:
    torch.manual_seed(0)
    module = randomize(MAR(**{**SIZES, "side": 4}, **HEAD), 0.3)
    # with small weights, the head's output stays close to its noise
    torch.nn.init.zeros_(module.diffloss.net.final_layer.linear.weight)
    torch.nn.init.normal_(module.diffloss.net.final_layer.linear.weight, std=0.05)
    return MARModel(module)


@dataclass(frozen=True)
class ReplayingSampler(Sampler):
    """Draw the reference's noise: for the start, then at each step for both branches; only the first half is used."""

    channels: int = 4

    def _noise(self, state: Any, positions: Tensor, local: bool) -> Tensor:
        steps = self.head_steps // 2 if local else self.head_steps
        rows, width = positions.numel(), self.channels
        num_drawn = rows * (2 if state.guidance_scale != 1.0 else 1)
        noise = [torch.randn(rows, width)] + [torch.randn(num_drawn, width)[:rows] for _ in range(steps)]
        return torch.stack(noise, 1).unflatten(0, positions.shape).double()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@replays("path")
def test_decoding_equals_the_recorded_run(path: Path) -> None:
    case = read_json(path)
    settings, log, sizes = case["settings"], case["log"], case["model"]
    tokens = {"side": sizes["img_size"] // sizes["vae_stride"], "channels": sizes["vae_embed_dim"]}
    coder = {"width": sizes["encoder_embed_dim"], "depth": sizes["encoder_depth"], "heads": sizes["encoder_num_heads"]}
    counts = {"decoder_depth": sizes["decoder_depth"], "classes": sizes["class_num"], "buffer": sizes["buffer_size"]}
    head = {"head_depth": sizes["diffloss_d"], "head_width": sizes["diffloss_w"], "eps": HEAD["eps"]}
    module = MAR(**tokens, **coder, **counts, **head)
    module.load_state_dict(load_file(find_weights(case["weights"], "recap")))
    model = MARModel(module)
    local = {"local_steps": settings["num_cache_iters"], "full_groups": settings["pre_full_iters"]}
    head = {"head_steps": int(sizes["num_sampling_steps"]), "channels": sizes["vae_embed_dim"]}
    sampling = {"temperature": settings["temperature"], "guidance_schedule": settings["cfg_schedule"]}
    sampler = ReplayingSampler(**local, **head, **sampling, fast_ratio=0.5, keep_buffer=settings["cache_buffer"])
    request = {"steps": settings["num_iter"], "guidance_scale": settings["cfg"]}
    state = sampler.start(model, settings["labels"], **request, order=torch.tensor(case["orders"]))
    torch.manual_seed(settings["seed"])
    calls = [log[index : index + 3] for index in range(0, len(log), 3)]
    for encoder, decoder, head in calls:
        (query,) = sampler.query(state)
        assert encoder["kind"] == decoder["kind"] == ("local" if query.kind == "window" else "full")
        if query.reused_keys is not None:
            assert query.reused_keys.encoder[0][0].shape[2] == encoder["n_cached"]
            assert query.reused_keys.decoder[0][0].shape[2] == decoder["n_cached"]
        assert (query.guidance or 1.0) == pytest.approx(head["cfg"], abs=1e-6)
        answer = model(query)
        torch.testing.assert_close(answer.conditions.flatten(0, 1), torch.tensor(head["z"]), atol=1e-5, rtol=0)
        tokens = answer.tokens.flatten(0, 1)
        torch.testing.assert_close(tokens, torch.tensor(head["out"])[: len(tokens)], atol=0.05, rtol=1e-5)
        sampler.commit(state, sampler.propose(state, [answer], [query]))
    assert state.done
    torch.testing.assert_close(model.image(state.tokens), torch.tensor(case["final"]), atol=0.05, rtol=1e-5)
    assert state.nfe.tolist() == [len(calls)] * len(settings["labels"])


@pytest.mark.parametrize(("size", "steps"), [(36, 6), (256, 64), (256, 256), (16, 1)])
def test_every_step_decides_something(size: int, steps: int) -> None:
    counts = remaining_counts(size, steps)
    assert counts[0] == size and counts[-1] == 0 and len(counts) == steps + 1 and (counts[:-1] > counts[1:]).all()


@pytest.mark.thinned
@pytest.mark.parametrize("keep_buffer", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_local_steps_over_all_positions_are_exact(model: MARModel, guidance: float, keep_buffer: bool) -> None:
    """Nothing is cached except, with `keep_buffer`, the keys of the class tokens, which then miss later decisions."""
    settings = {"full_groups": 0, "head_steps": 3, "fast_ratio": 1, "chunk_order": "order"}
    plain = Sampler(local_steps=0, keep_buffer=False, **settings)
    grouped = Sampler(local_steps=4, keep_buffer=keep_buffer, **settings)
    states = [s.start(model, [3, 1], steps=5, guidance_scale=guidance, seed=7) for s in (plain, grouped)]
    for step in range(5):
        proposals = [s.step(model, state) for s, state in zip((plain, grouped), states, strict=True)]
        assert [proposal.kind for proposal in proposals] == ["full", "window" if step else "full"]
        same = torch.allclose(proposals[0].values, proposals[1].values, atol=1e-10, rtol=1e-9)
        assert same or (keep_buffer and step)
        for s, state, proposal in zip((plain, grouped), states, proposals, strict=True):
            s.commit(state, proposal)
    assert torch.allclose(states[0].tokens, states[1].tokens, atol=1e-10) != keep_buffer
    assert states[1].forwarded_tokens.tolist() == [5 * 16 * (1 if guidance == 1 else 2)] * 2


@pytest.mark.parametrize("chunk_order", ["raster", "order"])
def test_recap_evaluates_its_targets(model: MARModel, chunk_order: str) -> None:
    sampler = Sampler(local_steps=1, full_groups=2, head_steps=4, chunk_order=chunk_order)
    state = sampler.start(model, [0, 5, 5], steps=6, guidance_scale=2.0, seed=1)
    kinds, forwarded, decided = [], [], torch.zeros(3, 16, dtype=torch.bool)

    def record(_: Any, commit: Any) -> None:
        kinds.append(commit.kind)
        assert not decided.gather(1, commit.positions).any()
        decided.scatter_(1, commit.positions, True)
        forwarded.append(int(state.forwarded_tokens[0]) // 2 - sum(forwarded))

    decode(sampler, model, state, record)
    remaining = remaining_counts(16, 6)
    assert kinds == ["full", "full", "full", "window", "full", "window"] and decided.all()
    assert forwarded == [16, 16, 16, remaining[2] - remaining[4], 16, remaining[4]]
    assert state.nfe.tolist() == [6] * 3 and state.row_forwards.tolist() == [12] * 3
    assert not torch.equal(state.tokens[1], state.tokens[2])  # rows of one class draw different numbers


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_local_steps_are_guided(model: MARModel, schedule: str) -> None:
    """The scale is 1 + (s - 1) (S - m) / S, with m of S positions masked after the step, or s if constant."""
    sampler = Sampler(local_steps=2, full_groups=0, head_steps=4, fast_ratio=1, guidance_schedule=schedule)
    plain = Sampler(local_steps=0, head_steps=4, guidance_schedule=schedule)
    remaining, scale, kinds = remaining_counts(16, 6), 3.0, []
    state = sampler.start(model, [0, 5], steps=6, guidance_scale=scale, seed=1)
    unguided = plain.start(model, [0, 5], steps=6, guidance_scale=1.0, seed=1)
    while not state.done:
        (query,) = sampler.query(state)
        linear = 1 + (scale - 1) * (16 - remaining[state.index + 1]) / 16
        assert query.guidance == pytest.approx(linear if schedule == "linear" else scale, rel=1e-12)
        assert query.branches == 2
        kinds.append(query.kind)
        sampler.commit(state, sampler.step(model, state))
        plain.commit(unguided, plain.step(model, unguided))
    assert kinds == ["full", "window", "window"] * 2
    assert (state.tokens - unguided.tokens).abs().amax() > 1e-3  # guidance has an effect
