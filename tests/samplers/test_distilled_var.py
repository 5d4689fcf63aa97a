"""Distilled Decoding of VAR: the reference's cases, the teacher's prefix, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import tiny_llamagen, tiny_var, tiny_var_student
from next_image import FOLDER, assert_checksum, case, cases
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec import rng
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.distilled_var import DistilledVARModel, load_distilled_var
from paradec.models.images.multi_scale_vq import MultiScaleVQ, load_multi_scale_vq
from paradec.models.images.var import VARModel, load_var
from paradec.protocol import decode
from paradec.samplers.distilled.distilled import Distilled

SYSTEM = "dd-var"


def golden_vq(name: str) -> MultiScaleVQ:
    """`name`: "var/vae"."""
    return load_multi_scale_vq(FOLDER / f"{name}.safetensors", norm_groups=4)


def golden_student(name: str) -> DistilledVARModel:
    said, _ = case(SYSTEM, f"{name}.config")
    path, vq = FOLDER / SYSTEM / f"{name}.safetensors", golden_vq(said["vae"])
    return load_distilled_var(path, scales=said["patch_nums"], heads=said["num_heads"], vq=vq)


def golden_teacher(name: str, vq: MultiScaleVQ) -> VARModel:
    said, _ = case("var", f"{name}.config")
    return load_var(
        FOLDER / "var" / f"{name}.safetensors", scales=said["patch_nums"], heads=said["num_heads"], vq=vq
    )


@pytest.mark.parametrize("name", cases(SYSTEM, "ddvar"))
def test_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, arrays = case(SYSTEM, name)
    settings = said["settings"]
    model = golden_student(said["model"])
    given, taught = {}, {}
    if "teacher" in said:
        given = {"teacher": golden_teacher(said["teacher"], model.vq), "teacher_start": settings["teacher_start"]}
        # the scale of guidance is the public code's and one
        taught = {"guidance_scale": settings["cfg"] + 1, "top_k": settings["top_k"] or None}
        taught |= {"top_p": settings["top_p"] or None}
    sampler = paradec.samplers.create("distilled", t_list=settings["t_list"], split=settings["split"], **given)
    state = sampler.start(model, settings["labels"], noise=arrays["noise"], seed=0, **taught)
    calls = 0
    for step in said["steps"]:
        if step["kind"] == "quantised":
            assert state.ids.tolist() == step["tokens"]
            continue
        if "u" in step:
            u = torch.tensor(step["u"], dtype=torch.float64).unsqueeze(-1)
            monkeypatch.setattr(rng, "uniform", lambda *args, u=u: u)
        (query,) = sampler.query(state)
        proposal = sampler.step(model, state)
        if step["kind"] == "teacher":
            assert query.positions.shape[1] == step["evaluated"]
            assert query.branches * state.batch == step["rows"]
            assert state.teaching is not None
            raw = state.teaching.answer(query)
            if raw.numel() == step["raw_logits"][0]:  # not of the prefix, nor of a half without weight
                assert_checksum(raw, step["raw_logits"])
            assert_checksum(proposal.logits, step["guided_logits"])
            assert proposal.ids.tolist() == step["tokens"]
        else:
            assert state.plan[state.index] == ("student", step["t"])
            assert (query.kept, state.split) == (step["kept"], step["discrete"])
            assert_checksum(query.tokens, step["input"])
            assert_checksum(proposal.continuous, step["continuous"])
            assert_checksum(proposal.logits, step["logits"])
            assert_checksum(proposal.values, step["result"])
            for key, found in (("continuous", proposal.continuous), ("logits", proposal.logits)):
                if f"{key}.{calls}" in arrays:
                    torch.testing.assert_close(found, arrays[f"{key}.{calls}"], atol=1e-4, rtol=0)
            if f"result.{calls}" in arrays:
                torch.testing.assert_close(proposal.values, arrays[f"result.{calls}"], atol=1e-4, rtol=0)
            assert proposal.ids.tolist() == step["tokens"]
            calls += 1
        sampler.commit(state, proposal)
    assert state.done and calls == said["calls"] and state.teacher_nfe == said.get("teacher_calls", 0)
    if "f_hat" in arrays:
        torch.testing.assert_close(model.latent(state.tokens), arrays["f_hat"], atol=1e-4, rtol=0)
    images = model.decode(state.tokens)
    assert list(images.shape) == said["image_shape"]
    assert_checksum(images, said["image"], 1e-4)
    if "image" in arrays:
        torch.testing.assert_close(images, arrays["image"], atol=1e-4, rtol=0)
