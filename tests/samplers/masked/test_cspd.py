"""CSpD: replay of the public code on small models, its rule against plain loops, and what must hold for any models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from next_image import FOLDER, cases, checksum, read
from safetensors.torch import load_file
from torch import Tensor

import paradec
from paradec.models.images.continuous import ContinuousQuery, TokenLaw
from paradec.models.images.mar import MAR, MARModel, solver
from paradec.protocol import decode
from paradec.samplers.masked.cspd import CounterDraws, CSpD, sections_of, verified

ABSOLUTE, RELATIVE = 2e-4, 1e-3


# ---- recorded runs --------------------------------------------------------------------------------------------------


def recorded_model(name: str) -> MARModel:
    sizes = json.loads((FOLDER / "cspd" / f"{name}.config.json").read_text())
    module = MAR(
        side=sizes["img_size"] // sizes["vae_stride"],
        channels=sizes["vae_embed_dim"],
        width=sizes["encoder_embed_dim"],
        depth=sizes["encoder_depth"],
        decoder_depth=sizes["decoder_depth"],
        heads=sizes["encoder_num_heads"],
        classes=sizes["class_num"],
        buffer=sizes["buffer_size"],
        head_depth=sizes["diffloss_d"],
        head_width=sizes["diffloss_w"],
        eps=sizes["layer_norm_eps"],
    )
    module.load_state_dict(load_file(FOLDER / "cspd" / f"{name}.safetensors"))
    return MARModel(module, name=name)


@dataclass
class Recorded:
    """The numbers of a recorded run: noise, and those of every verification in turn."""

    start: Tensor
    steps: Tensor
    first: int
    """The commit that is verified first."""
    uniform: list[Tensor]
    again: list[list[tuple[Tensor, Tensor]]]

    @staticmethod
    def of(case: dict[str, Any], arrays: dict[str, Tensor]) -> Recorded:
        numbers = iter(arrays[name] for name, _, _ in case["draws"])
        start, steps = next(numbers), next(numbers)
        uniform, again = [], []
        for step in case["steps"]:
            if step["kind"] == "verify":
                uniform.append(next(numbers))
                again.append([(next(numbers), next(numbers)) for _ in range(step["verified"]["redraw_rounds"])])
        assert next(numbers, None) is None
        return Recorded(start, steps, sum(step["kind"] == "target" for step in case["steps"]), uniform, again)

    def chain(self, at: Tensor, steps: int, channels: int) -> Tensor:
        noise = torch.cat((self.start.unsqueeze(2), self.steps.flip(2)), 2)  # entry i is used at diffusion step i
        assert noise.shape[2:] == (steps + 1, channels)
        return noise[torch.arange(len(at)).unsqueeze(1), at]

    def accept(self, commit: int, at: Tensor) -> Tensor:
        return self.uniform[commit - self.first].view_as(at)

    def redraw(self, commit: int, number: int, rows: Tensor, at: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        return self.again[commit - self.first][number]  # of all tokens, row by row


def sampler_of(settings: dict[str, Any], draft: MARModel) -> CSpD:
    return CSpD(
        draft=draft,
        num_draft=settings["num_draft"],
        ratio=settings["ratio"],
        inner_temperature=settings["inner_temperature"],
        mended=False,
        head_steps=settings["num_sampling_steps"],
        temperature=settings["temperature"],
        guidance_schedule=settings["cfg_schedule"],
    )


@pytest.mark.parametrize("name", cases("cspd", "cspd-"))
def test_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of both models, what the heads say, every decision, and the final latent."""
    case, arrays = read("cspd", name)
    settings = case["settings"]
    target, draft = (recorded_model(case[which]) for which in ("target", "draft"))
    sampler = sampler_of(settings, draft)
    wild = float(arrays["latent"].abs().max()) > 100  # a chain of random networks that begins at the last step

    def near(found: Tensor, expected: Tensor) -> None:
        scale = max(1.0, float(expected.abs().max())) * RELATIVE if wild else ABSOLUTE
        torch.testing.assert_close(found.double(), expected.double(), atol=scale, rtol=0)

    def summed(found: Tensor, expected: list[float]) -> None:
        atol = RELATIVE * max(1.0, expected[2]) if wild else ABSOLUTE
        assert checksum(found) == pytest.approx(expected, abs=atol)

    assert solver(sections_of(settings["num_sampling_steps"]))[0] == case["timestep_map"]
    drafted: list[tuple[ContinuousQuery, Tensor]] = []
    real = MARModel.__call__

    def noted(self: MARModel, query: ContinuousQuery) -> Any:
        answer = real(self, query)
        if self is draft:
            drafted.append((query, answer.tokens))
        return answer

    monkeypatch.setattr(MARModel, "__call__", noted)
    state = sampler.start(
        target,
        settings["labels"],
        steps=settings["num_iter"],
        guidance_scale=settings["cfg"],
        order=torch.tensor(case["orders"]),
        draws=Recorded.of(case, arrays),
    )
    steps = iter(enumerate(case["steps"]))
    while not state.done:
        drafted.clear()
        before = state.tokens
        (query,) = sampler.query(state)
        answer = target(query)
        proposal = sampler.propose(state, [answer], [query])
        index, step = next(steps)
        for place, values in drafted:
            assert step["kind"] == "draft" and place.wanted.tolist() == step["positions"]
            known = place.tokens.shape[1] + place.wanted.shape[1]
            assert max(state.order.shape[1] - known, 1) == step["unknown_after"]
            before = before.scatter(1, place.wanted.unsqueeze(-1).expand_as(values), values.to(before.dtype))
            summed(values, step["values"])
            summed(before, step["tokens"])
            index, step = next(steps)
        assert step["kind"] == ("verify" if drafted else "target")
        assert query.wanted.tolist() == step["positions"]
        summed(answer.tokens, step["values"])
        sampler.commit(state, proposal)
        if drafted:
            assert proposal.draft is not None and proposal.verdict is not None
            for number, law in (("x1", proposal.draft), ("x2", proposal.target)):
                near(law.mean.flatten(0, 1), arrays[f"verify.{index}.{number}_mean"])
                near(law.std.flatten(0, 1), arrays[f"verify.{index}.{number}_std"])
                near(law.half_log_variance.flatten(0, 1), arrays[f"verify.{index}.{number}_log_var"])
            verdict, expected = proposal.verdict, step["verified"]
            assert verdict.ratio.tolist() == pytest.approx(expected["ratio"], rel=2e-3, abs=1e-6)
            assert verdict.log_sigma.exp().tolist() == pytest.approx(expected["Sigma"], rel=2e-3)
            assert verdict.rounds == expected["redraw_rounds"]
            near(verdict.values, arrays[f"verify.{index}.result"])
        else:
            near(state.tokens, before.scatter(1, query.wanted.unsqueeze(-1).expand_as(answer.tokens), answer.tokens))
            summed(state.tokens, step["tokens"])
    assert next(steps, None) is None
    near(target.image(state.tokens), arrays["latent"])
    assert state.nfe.tolist() == [case["target_calls"]] * len(settings["labels"])
    assert state.draft_nfe.tolist() == [case["draft_calls"]] * len(settings["labels"])


@pytest.mark.parametrize("name", cases("cspd", "rule-"))
def test_replays_the_rule(name: str) -> None:
    case, arrays = read("cspd", name)
    draft, target = (
        TokenLaw(arrays[f"{side}_mean"], arrays[f"{side}_std"], arrays[f"{side}_log_var"]) for side in ("x1", "x2")
    )

    def redraw(number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return arrays["normal.redraw"][number][tokens], arrays["uniform.redraw"][number][tokens]

    temperature = case["settings"]["inner_temperature"]
    rest = (arrays["uniform.accept"], redraw, temperature, 100)
    found = verified(draft.mean, draft, target, *rest, mended=False)
    assert found.ratio.tolist() == pytest.approx(case["ratio"], rel=1e-4, abs=1e-6)
    assert found.accepted.tolist() == [bool(entry) for entry in case["accepted"]] and found.rounds == case["rounds"]
    assert [not settled for settled in found.settled.tolist()] == [bool(entry) for entry in case["zero"]]
    torch.testing.assert_close(found.values.float(), arrays["result"], atol=ABSOLUTE, rtol=0)
    # mended, tokens that settled keep their first value, and zeros are the target's own values
    mended = verified(draft.mean, draft, target, *rest, mended=True)
    assert torch.equal(mended.accepted, found.accepted) and torch.equal(mended.settled, found.settled)
    assert torch.equal(mended.values[mended.accepted], draft.mean[mended.accepted].double())
    assert torch.equal(mended.values[~mended.settled], target.mean[~mended.settled].double())
