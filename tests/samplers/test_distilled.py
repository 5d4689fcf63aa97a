"""Distilled Decoding: the reference's cases of LlamaGen's students, and what a student and its teacher must keep."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import tiny_llamagen, tiny_student
from next_image import FOLDER, assert_checksum, case, cases
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec import rng
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.distilled_llamagen import (
    DistilledLlamaGen,
    DistilledLlamaGenConfig,
    DistilledLlamaGenModel,
    load_distilled_llamagen,
)
from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig, LlamaGenModel
from paradec.models.images.vq import VQConfig, VQModel
from paradec.protocol import decode
from paradec.samplers.distilled.distilled import Distilled

SYSTEM = "dd-llamagen"
LLAMAGEN = cases(SYSTEM, "ddlg")


def golden_vq() -> VQModel:
    said, _ = case(SYSTEM, "vq.config")
    config = VQConfig(
        codebook_size=said["codebook_size"], codebook_embed_dim=said["codebook_embed_dim"], channels=said["ch"],
        l2_norm=said["codebook_l2_norm"], channel_mult=said["decoder_ch_mult"], res_blocks=said["num_res_blocks"],
        z_channels=said["z_channels"], norm_groups=said["group_norm_groups"],
    )  # fmt: skip
    vq = VQModel(config)
    weights = load_file(FOLDER / SYSTEM / "vq.safetensors")
    vq.load_state_dict({name: weights[name] for name in vq.state_dict()})
    return vq


def golden_sizes(name: str, grid: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    said, _ = case(SYSTEM, f"{name}.config")
    sizes = {key: said[key] for key in ("dim", "n_layer", "n_head", "vocab_size", "num_classes", "rope_base", "norm_eps")}
    return sizes | {"ffn_dim": said["ffn_hidden"], "grid": grid}, load_file(FOLDER / SYSTEM / f"{name}.safetensors")


def golden_student(name: str, grid: int) -> DistilledLlamaGenModel:
    sizes, weights = golden_sizes(name, grid)
    module = DistilledLlamaGen(DistilledLlamaGenConfig(**sizes, codebook_dim=weights["tok_embeddings.weight"].shape[1]))
    module.load_state_dict(weights)
    return DistilledLlamaGenModel(module, golden_vq())


def golden_teacher(name: str, grid: int) -> LlamaGenModel:
    sizes, weights = golden_sizes(name, grid)
    module = LlamaGen(LlamaGenConfig(**sizes))
    module.load_state_dict(weights)
    return LlamaGenModel(module)


@pytest.mark.parametrize("name", LLAMAGEN)
def test_llamagen_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, arrays = case(SYSTEM, name)
    settings = said["settings"]
    model, given = golden_student(said["model"], settings["grid"]), {}
    taught: dict[str, Any] = {}
    if "teacher" in said:
        given = {"teacher": golden_teacher(said["teacher"], settings["grid"])}
        given |= {"teacher_start": settings["teacher_start"]}
        taught = {"guidance_scale": settings["cfg"], "temperature": settings["temperature"]}
        taught |= {"top_k": settings["top_k"] or None, "top_p": settings["top_p"]}
        assert settings["t_list"][-1] == settings["teacher_end"]
    sampler = paradec.samplers.create("distilled", t_list=settings["t_list"], split=settings["split"], **given)
    state = sampler.start(model, settings["labels"], noise=arrays["noise"], seed=0, **taught)
    calls = 0
    for step in said["steps"]:
        if step["kind"] == "quantised":
            tokens = torch.tensor(step["tokens"])
            assert torch.equal(state.ids[:, : tokens.shape[1]], tokens)
            continue
        if "u" in step:
            u = torch.tensor(step["u"], dtype=torch.float64).view(state.batch, -1, 1)
            monkeypatch.setattr(rng, "uniform", lambda *args, u=u: u)
        (query,) = sampler.query(state)
        proposal = sampler.step(model, state)
        if step["kind"] == "teacher":
            assert query.positions[0].tolist() == step["positions"]
            assert state.teaching is not None
            assert_checksum(state.teaching.answer(query), step["raw_logits"])
            assert_checksum(proposal.logits, step["guided_logits"])
            assert proposal.ids.squeeze(1).tolist() == step["tokens"]
        else:
            assert state.plan[state.index] == ("student", step["t"])
            assert_checksum(query.tokens, step["input"])
            assert_checksum(proposal.continuous, step["continuous"])
            assert_checksum(proposal.logits, step["logits"])
            assert_checksum(proposal.values, step["result"])
            for key in ("continuous", "logits"):
                torch.testing.assert_close(getattr(proposal, key), arrays[f"{key}.{calls}"], atol=1e-4, rtol=0)
            torch.testing.assert_close(proposal.values, arrays[f"result.{calls}"], atol=1e-4, rtol=0)
            assert proposal.ids.tolist() == step["tokens"]
            calls += 1
        sampler.commit(state, proposal)
    assert state.done and calls == said["calls"] and state.teacher_nfe == said.get("teacher_calls", 0)
    assert state.nfe.tolist() == [calls + state.teacher_nfe] * state.batch
    if "codes" in said:
        assert state.ids[:, : settings["t_list"][-1]].tolist() == said["codes"]
    # the reference's pictures are not clamped
    vq = model.vq
    with torch.no_grad():
        images = vq.decoder(vq.post_quant_conv(model.latent(state.tokens, model.grid()))) / 2 + 0.5
    assert_checksum(images, said["image"], 1e-4)
    assert list(images.shape) == said["image_shape"]
    if "image" in arrays:
        torch.testing.assert_close(images, arrays["image"], atol=1e-4, rtol=0)
    torch.testing.assert_close(model.decode(state.tokens), images.clamp(0, 1))
