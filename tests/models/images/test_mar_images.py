"""MAR through `paradec.load` and `generate_images`, and the decoder of its latents."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from decoding import refuses
from images import MAR_DECODER, MAR_SIZES, randomize
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec.core.protocol import decode
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.mar import MAR, PRESETS, MARModel, read_sizes
from paradec.models.images.vq import KLDecoder, VQConfig, load_kl

SIZES = MAR_SIZES | {"head_depth": 1, "head_width": 16}


@pytest.fixture(scope="module")
def model() -> MARModel:
    torch.manual_seed(0)
    module = randomize(MAR(**SIZES), 0.1)
    return MARModel(module, KLDecoder(VQConfig(**MAR_DECODER)), {"steps": 5, "guidance_scale": 2.0}, "tiny")


def paint(model: MARModel, **request: Any) -> Any:
    sampler = paradec.samplers.create("mar", head_steps=3)
    settings = {"class_labels": [1, 2], "sampler": sampler, "seed": 0, "output_type": "latent"}
    return paradec.generate_images(model, **(settings | request))


def ldm_names(state: dict[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Rename the decoder weights of diffusers' KL autoencoder as in latent diffusion's files."""
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    result = {}
    for name, tensor in state.items():
        if not name.startswith(("decoder.", "post_quant_conv.")):
            continue
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        for index in range(2):
            name = name.replace(f"mid_block.resnets.{index}", f"mid.block_{index + 1}")
        for theirs, ours in attention.items():
            if f"mid_block.attentions.0.{theirs}." in name:
                name = name.replace(f"mid_block.attentions.0.{theirs}", f"mid.attn_1.{ours}")
                tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
        for level in range(levels):
            name = name.replace(f"up_blocks.{level}.resnets", f"up.{levels - 1 - level}.block")
            name = name.replace(f"up_blocks.{level}.upsamplers.0", f"up.{levels - 1 - level}.upsample")
        result[name] = tensor.clone()
    return result


def test_decoder_equals_diffusers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    theirs = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, latent_channels=4,
        block_out_channels=(32, 32, 64), layers_per_block=2,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    weights = ldm_names(theirs.state_dict(), 3)
    torch.save({"model": weights | {"encoder.conv_in.weight": torch.zeros(1)}}, tmp_path / "kl.ckpt")
    ours = load_kl(tmp_path / "kl.ckpt").double()
    assert ours.config.scale == 4 and ours.config.channel_mult == (1, 1, 2)
    latents = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs.double().decode(latents / 0.2325).sample
        torch.testing.assert_close(ours.decode(latents), expected, atol=1e-10, rtol=1e-10)
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, tmp_path / "no.safetensors")
    refuses(lambda: load_kl(tmp_path / "no.safetensors"), "holds no decoder of a KL autoencoder", CheckpointError)
    del weights["decoder.mid.block_1.conv1.weight"]
    torch.save(weights, tmp_path / "part.ckpt")
    refuses(lambda: load_kl(tmp_path / "part.ckpt"), "missing weights: decoder.mid.0.conv1.weight", CheckpointError)


@pytest.mark.parametrize("preset", PRESETS)
def test_sizes_are_read_from_the_weights(preset: str) -> None:
    with torch.device("meta"):
        actual = read_sizes(MAR(**PRESETS[preset]).state_dict())
    assert {**PRESETS[preset], **actual} == {**actual, "heads": PRESETS[preset]["heads"]}
    assert (actual["side"], actual["channels"], actual["classes"], actual["buffer"]) == (16, 16, 1000, 64)


def test_files_and_folders_load(model: MARModel, tmp_path: Path) -> None:
    weights = {name: tensor.float() for name, tensor in model.module.state_dict().items()}
    vae = model.vae.state_dict()
    folder = tmp_path / "my-mar"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    save_file(vae, folder / "vae.safetensors")
    fields = {"model_type": "mar", "heads": 2, "defaults": {"steps": 6, "guidance_scale": 2.5}}
    (folder / "config.json").write_text(json.dumps(fields))
    torch.save({"model": {}, "model_ema": weights, "epoch": 1}, tmp_path / "checkpoint-last.pth")
    torch.save({"model": weights, "epoch": 1}, tmp_path / "without-averages.pth")
    torch.save(weights, tmp_path / "bare.pth")
    loaded = paradec.load(folder)
    files = [folder / "model.safetensors"]
    files += [tmp_path / name for name in ("checkpoint-last.pth", "without-averages.pth", "bare.pth")]
    for mar in (loaded, *(paradec.load(file, heads=2, vae=folder / "vae.safetensors") for file in files)):
        assert isinstance(mar, MARModel) and mar.module.side == 4
        assert all(torch.equal(tensor, weights[name]) for name, tensor in mar.module.state_dict().items())
        assert all(torch.equal(tensor, vae[name]) for name, tensor in mar.vae.state_dict().items())
    assert loaded.facts.name == "my-mar" and loaded.defaults == fields["defaults"]
    assert paradec.load(folder, dtype="float64").module.mask_token.dtype == torch.float64
    refuses(lambda: paradec.load(tmp_path / "checkpoint-last.pth"), "MAR has the width 16", CheckpointError)
    refuses(lambda: paradec.load(folder, vq="x"), "unknown option of 'mar' models: 'vq'.*allowed: device, dtype, heads")
    refuses(lambda: MARModel(model.module, defaults={"temperature": 1.0}), "unknown default of requests: 'temperature'")
    decoder = KLDecoder(VQConfig(**MAR_DECODER | {"z_channels": 8}))
    refuses(lambda: MARModel(model.module, decoder), "vae decodes 8 channels; the tokens have 4")


def test_pictures_equal_a_plain_loop(model: MARModel) -> None:
    sampler = paradec.samplers.create("mar", preset="recap", head_steps=3)
    out = paint(model, sampler=sampler, num_images=2)
    state = sampler.start(model, [1, 1, 2, 2], steps=5, guidance_scale=2.0, seed=0)
    decode(sampler, model, state)
    assert torch.equal(out.tokens, state.tokens) and torch.equal(out.images, model.image(state.tokens))
    assert out.codes is None and out.images.shape == (4, 4, 4, 4) and len(set(out.tokens[:, 0, 0].tolist())) == 4
    assert (out.nfe, out.row_forwards, out.tokens_per_forward) == (5, 40, 16 / 5)
    assert out.accepted.shape == (5, 4) and (out.accepted.sum(0) == 16).all()
    alone = paint(model, sampler=sampler, class_labels=2, num_images=2)
    torch.testing.assert_close(alone.tokens, out.tokens[2:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_request_temperature_overrides_the_sampler(model: MARModel, temperature: float) -> None:
    sampler = paradec.samplers.create("mar", head_steps=3, temperature=temperature)
    tokens = paint(model, temperature=temperature).tokens
    assert torch.equal(tokens, paint(model, sampler=sampler).tokens) and not torch.equal(tokens, paint(model).tokens)


def test_output_types_steps_and_trace(model: MARModel) -> None:
    latent, pt, pil = (paint(model, output_type=kind, trace=True) for kind in ("latent", "pt", "pil"))
    assert pt.images.shape == (2, 3, 8, 8) and pt.images.dtype == torch.float32
    assert 0 <= pt.images.min() and pt.images.max() <= 1
    assert torch.equal(pt.images, model.decode(latent.tokens)) and [image.size for image in pil.images] == [(8, 8)] * 2
    for index in range(5):
        assert ((latent.steps == index).sum((1, 2)) == latent.accepted[index]).all()
    assert latent.trace.replay() == latent.tokens.tolist()
    with pytest.raises(ValueError, match="not written in order: make the pictures with trace=True"):
        _ = paint(model).steps


def test_a_generator_can_replace_the_seed(model: MARModel) -> None:
    draws = [torch.Generator().manual_seed(seed) for seed in (4, 4, 5)]
    first, repeated, other = (paint(model, seed=None, generator=draw).tokens for draw in draws)
    assert torch.equal(first, repeated) and not torch.equal(first, other)
