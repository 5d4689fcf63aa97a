"""ReCAP: replays of the public code on a small MaskGIT-r with its recorded random numbers, and properties.

Two of the reference's schedules are wrong, and paradec's differ on purpose (`test_corrected_schedules`)."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from images import random_uvit
from places import GOLDEN
from recorded import Refused, find_weights, golden, read_json, read_json_unrecorded, replay, replays
from safetensors.torch import load_file, save_file

import paradec
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.uvit import UViTModel, load_uvit
from paradec.samplers.masked.rules.maskgit import commit_counts
from paradec.samplers.masked.rules.recap import Recap

TRACES = GOLDEN / "recap"
FILES = sorted(golden("recap").glob("*.json"))
CASES = [path for path in FILES if "schedule" in read_json_unrecorded(path)]
SCHEDULES = [
    path
    for path in FILES
    if isinstance(read_json_unrecorded(path), list) and all("nc" in row for row in read_json_unrecorded(path))
]
pytestmark = pytest.mark.filterwarnings("ignore:cache=")  # "not worthwhile on a small model"


def prompts(model: UViTModel, *labels: int) -> list[list[int]]:
    return [[model.class_token(label)] for label in labels]


@dataclass
class Group:
    """The reference's record of one group of steps."""

    first_tokens: torch.Tensor
    noise: torch.Tensor
    scale: float
    confidence: torch.Tensor
    calls: list[list[dict[str, Any]]]
    draws: list[torch.Tensor]


def groups_of(log: list[dict[str, Any]], positions: int) -> list[Group]:
    """Split the reference's log of calls and draws into groups of steps. positions: number of image positions."""
    groups: list[Group] = []
    calls: list[dict[str, Any]] = []
    pending = None
    for entry in log:
        if entry["op"] == "net":
            calls.append(entry)
        elif entry["op"] == "gumbel":
            values = [[-torch.inf if c is None else c for c in row] for row in entry["confidence"]]
            confidence = torch.tensor(values, dtype=torch.float64)
            groups.append(Group(pending, torch.tensor(entry["noise"]).double(), entry["temp"], confidence, [calls], []))
            calls = []
        elif calls and calls[0]["kind"] == "full" and len(entry["out"][0]) == positions and pending is None:
            pending = torch.tensor(entry["out"])
        else:
            if calls:
                groups[-1].calls.append(calls)
            groups[-1].draws.append(torch.tensor(entry["out"]))
            calls, pending = [], None
    return groups


@dataclass(frozen=True)
class ReplayedRecap(Recap):
    """ReCAP with the recorded random numbers."""

    groups: Any = ()

    def group_and_index(self, state: Any) -> tuple[Group, int]:
        step = state.block_step[:1]
        return self.groups[int(self.group_index(step)[0])], int(self.index_in_group(step)[0])

    def draw_tokens(self, state: Any, logits: torch.Tensor, query: Any, generator: Any) -> torch.Tensor:
        group, place = self.group_and_index(state)
        return group.first_tokens if place == 0 else logits.argmax(-1)

    def _redraw(self, state: Any, logits: torch.Tensor, query: Any, generator: Any) -> torch.Tensor:
        group, place = self.group_and_index(state)
        order = group.confidence.argsort(dim=-1, descending=True)[:, : group.draws[place].shape[1]]
        return torch.zeros_like(group.first_tokens).scatter_(1, order, group.draws[place])

    def position_noise(self, state: Any, generator: Any) -> torch.Tensor:
        group, place = self.group_and_index(state)
        return torch.exp(-torch.exp(-group.noise)) if place == 0 else torch.full_like(group.noise, 0.5)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
@replays("path")
def test_replays_the_reference(path: Path) -> None:
    case = read_json(path)
    settings, guidance = case["settings"], case["schedule"]["local_cfg"] or [[0.0]]
    positions, vocab = settings["seq_len"], case["model"]["codebook_size"]
    groups = groups_of(case["log"], positions)
    model = load_uvit(find_weights(case["weights"], "recap"), heads=case["model"]["num_heads"])
    sampler = ReplayedRecap(
        local_steps=settings["num_cache_iters"], full_groups=settings["pre_full_iters"], groups=groups,
        choice_temperature=settings["conf_temp"], final_temperature=settings["samp_temp"],
        guidance_start=1 + guidance[0][0] if settings["cfg"] else None,
    )  # fmt: skip
    labels = [label for (label,) in case["labels"]]
    assert settings["mask_id"] == vocab == model.module.codebook_size
    assert settings["null_class"] == model.module.classes - 1
    step, total = np.arange(settings["gen_step"]), np.full(settings["gen_step"], settings["gen_step"])
    recorded_schedule = case["schedule"]
    sizes, group_of_step = np.array(commit_counts("power", positions, settings["gen_step"])), sampler.group_index(step)
    local = [sizes[group_of_step == group].tolist() for group in range(group_of_step[-1] + 1)]
    assert recorded_schedule["local_tokens"] == local
    assert recorded_schedule["group_tokens"] == [sum(group_sizes) for group_sizes in local]
    noises = sampler.noise_at(step, total)[sampler.index_in_group(step) == 0]
    np.testing.assert_allclose(noises, recorded_schedule["conf_temps"], atol=1e-12)
    if settings["cfg"]:
        assert_guidance(sampler, recorded_schedule["local_cfg"])
    temperatures = sum(recorded_schedule["local_sample_temps"], [])
    np.testing.assert_allclose(sampler.temperature_at(step, total), temperatures, atol=1e-12)
    request = {"cache": "recap", "steps": settings["gen_step"], "temperature": 1.0, "seed": 0}
    state = sampler.start(model, prompts(model, *labels), guidance_scale=1 + guidance[-1][-1], **request)
    while not state.done:
        group, place = sampler.group_and_index(state)
        calls = group.calls[place]
        queries = sampler.query(state)
        (query,) = queries
        with torch.no_grad():
            outputs = [model(query, state.store)]
        for call, logits in zip(calls, outputs[0].chunk(len(calls)), strict=True):
            expected = torch.tensor(call["logits"])
            if place == 0:
                assert query.kind == "full" and call["kind"] == "full"
                assert state.canvas[:, 1:].tolist() == call["ids"]
            else:
                at = torch.tensor(call["position_ids"])
                assert query.kind == "window" and positions - at.shape[1] == call["n_cached"]
                # class token, then targets
                evaluated = query.positions.chunk(len(calls))[0]
                assert evaluated.tolist() == [[0, *sorted(p + 1 for p in row)] for row in at.tolist()]
                assert state.canvas[:, 1:].gather(1, at).tolist() == call["ids"]
                logits = logits.gather(1, at.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
            torch.testing.assert_close(logits[..., :vocab], expected, atol=1e-4, rtol=0)
        proposal = sampler.propose(state, outputs, queries)
        if place == 0:
            noise = proposal.quantities["noise_scale"]
            assert noise.flatten()[0].item() == pytest.approx(group.scale)
            ours = proposal.scores.log() + noise * group.noise
            available = proposal.available
            torch.testing.assert_close(ours[available], group.confidence[available], atol=1e-3, rtol=0)
        sampler.commit(state, proposal)
    assert state.canvas[:, 1:].tolist() == case["final"]


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_schedules_are_the_reference_s(path: Path) -> None:
    for number, row in enumerate(read_json(path)):
        with replay(f"{path.stem}, row {number}"):
            if "error" in row:
                raise Refused(f"the reference stops: {row['error']}")
            assert_schedule(row)


def assert_guidance(sampler: Recap, scales: list[list[float]]) -> None:
    """Assert the guidance scales of all steps. scales: the public code's, by group; paradec's are larger by 1."""
    expected = np.array(sum(scales, []))
    step, request = np.arange(len(expected)), SimpleNamespace(guidance_scale=1 + expected[-1])
    state = SimpleNamespace(request=request, canvas=torch.empty(0))
    ours = sampler.guidance_at(state, step, np.full(len(step), len(step)))
    np.testing.assert_allclose(np.asarray(ours).flatten() - 1, expected, atol=1e-9)


def assert_schedule(row: dict[str, Any]) -> None:
    step, total = np.arange(row["T"]), np.full(row["T"], row["T"])
    final, start = row["sample_temps"][-1][-1], 1 + row["cfg"][0][0]
    sampler = Recap(local_steps=row["nc"], full_groups=row["pre"], final_temperature=final, guidance_start=start)
    group = sampler.group_index(step)
    assert_guidance(sampler, row["cfg"])
    if min(map(min, row["local_tokens"])) > 0:
        sizes = np.array(commit_counts("power", row["seq_len"], row["T"]))
        assert [sizes[group == g].tolist() for g in range(group[-1] + 1)] == row["local_tokens"]
    assert [int((group == g).sum()) for g in range(group[-1] + 1)] == list(map(len, row["local_tokens"]))
    noises = sampler.noise_at(step, total)[sampler.index_in_group(step) == 0]
    np.testing.assert_allclose(noises, row["conf_temps"], atol=1e-12)
    np.testing.assert_allclose(sampler.temperature_at(step, total), sum(row["sample_temps"], []), atol=1e-12)


@pytest.mark.parametrize(("masks", "steps", "full", "local"), [(64, 32, 12, 1), (64, 15, 3, 2), (256, 15, 3, 2)])
def test_corrected_schedules(masks: int, steps: int, full: int, local: int) -> None:
    """paradec's counts are positive and sum to all masks where the reference has a negative count or loses tokens."""
    sizes = commit_counts("power", masks, steps)
    assert sum(sizes) == masks and min(sizes) >= 1 and len(sizes) == steps
    lengths = np.bincount(Recap(local_steps=local, full_groups=full).group_index(np.arange(steps)))
    assert lengths.tolist() == [1] * full + [local + 1] * ((steps - full) // (local + 1))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("cache", ["none", "recap"])
def test_without_local_steps_recap_equals_maskgit(cache: str, guidance: float) -> None:
    model = random_uvit(2)
    request = {"steps": 5, "temperature": 1.0, "guidance_scale": guidance, "seed": 3, "trace": True}
    rows = prompts(model, 0, 3)
    settings = {"schedule": "power", "choice_temperature": 5.5, "final_temperature": 0.65, "guidance_start": 1.0}
    recap = paradec.generate(model, rows, sampler=Recap(local_steps=0, guidance_start=1.0), cache=cache, **request)
    maskgit = paradec.generate(model, rows, sampler=paradec.samplers.create("maskgit", **settings), **request)
    assert torch.equal(recap.sequences, maskgit.sequences)
    assert [step.commits for step in recap.trace.steps] == [step.commits for step in maskgit.trace.steps]


@pytest.mark.parametrize("order", ["confidence", "halton"])
@pytest.mark.parametrize(("depth", "local"), [(4, 4), (0, 1), (0, 2)])
def test_local_steps_give_the_scores_of_full_steps(depth: int, local: int, order: str) -> None:
    model = random_uvit(depth)
    sampler = Recap(local_steps=local, order=order)
    states = [
        sampler.start(model, prompts(model, 1, 2), cache=cache, steps=5, temperature=1.0, seed=4)
        for cache in ("none", "recap")
    ]
    local_calls = 0
    while not states[0].done:
        proposals = [sampler.step(model, state) for state in states]
        undecided = proposals[1].available
        assert undecided.any(1).all()
        for name in ("values", "scores"):
            plain, cached = (getattr(proposal, name)[undecided] for proposal in proposals)
            torch.testing.assert_close(cached, plain, atol=1e-12, rtol=1e-10)
        local_calls += proposals[1].kind == "window"
        for state, proposal in zip(states, proposals, strict=True):
            sampler.commit(state, proposal)
        assert torch.equal(states[0].canvas, states[1].canvas)
    assert states[1].done and local_calls >= 2


@pytest.mark.parametrize("cache", ["none", "recap"])
@pytest.mark.parametrize("start", [None, 1.5])
def test_local_steps_are_guided(cache: str, start: float | None) -> None:
    """Guidance is uncond + w (cond - uncond), also in steps that evaluate only the targets."""
    model, steps, last = random_uvit(0), 6, 4.0
    sampler = Recap(local_steps=2, final_temperature=None, guidance_start=start)
    rows = prompts(model, 1, 3)
    state = sampler.start(model, rows, cache=cache, steps=steps, temperature=1.0, guidance_scale=last, seed=4)
    for step in range(steps):
        proposal = sampler.step(model, state)
        assert proposal.kind == ("window" if cache == "recap" and step % 3 else "full")
        full_step = step - 1 if step % 3 else step
        scale = last if start is None else start + (last - start) * full_step / (steps - 1)
        null_canvas = state.canvas.clone()
        null_canvas[:, 0] = model.facts.mask_token_id
        with torch.no_grad():
            cond, uncond = (model.module(tokens).logits[..., :12] for tokens in (state.canvas, null_canvas))
        distribution = (uncond + scale * (cond - uncond)).softmax(-1)
        at = proposal.positions.unsqueeze(-1).expand(-1, -1, 12)
        expected = distribution.gather(1, at).gather(-1, proposal.values.unsqueeze(-1).clamp(max=11)).squeeze(-1)
        chosen = proposal.available
        assert chosen.any(1).all()
        torch.testing.assert_close(proposal.scores[chosen], expected[chosen], atol=1e-12, rtol=1e-10)
        sampler.commit(state, proposal)
    assert state.done


def test_local_steps_evaluate_only_their_targets() -> None:
    model = random_uvit(2)
    sampler = Recap(local_steps=1, full_groups=1)
    request = {"sampler": sampler, "steps": 5, "temperature": 1.0, "trace": True}
    out = paradec.generate(model, prompts(model, 1), cache="recap", **request)
    sizes = commit_counts("power", 16, 5)
    expected = [17, 17, 1 + sizes[1] + sizes[2], 17, 1 + sizes[3] + sizes[4]]
    assert [step.forwarded for step in out.trace.steps] == [[n] for n in expected]
    assert [len(step.commits) for step in out.trace.steps] == list(sizes)
    assert out.nfe == 5 and out.forwarded_tokens == sum(expected)
    cache = paradec.caches.create("recap", recompute_prompt=False)
    out = paradec.generate(model, prompts(model, 1), cache=cache, **request)
    evaluated = [step.forwarded[0] for step in out.trace.steps if step.kind == "window"]
    assert evaluated == [expected[2] - 1, expected[4] - 1]


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    weights = load_file(TRACES / "golden_recap_uvit.safetensors")
    save_file({**weights, "mid_block.attn.proj.bias": torch.zeros(3)}, tmp_path / "broken.safetensors")
    with pytest.raises(CheckpointError, match="do not fit a U-ViT: .*mid_block.attn.proj.bias"):
        load_uvit(tmp_path / "broken.safetensors", heads=4)
    save_file({"norm.weight": weights["norm.weight"]}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="'token_emb.position_embeddings.weight' is missing"):
        load_uvit(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="heads=5 must divide width=32"):
        load_uvit(TRACES / "golden_recap_uvit.safetensors", heads=5)
