"""`paradec image` over every family of image models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel
from PIL import Image, ImageChops
from places import GOLDEN
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer
from typer.testing import CliRunner

import paradec
from paradec import TaylorSeer
from paradec.cli import app
from paradec.cli.image_job import enlargement
from paradec.models.images.mar import MAR
from paradec.models.images.pixel_dit import PixelDiTPipeline
from paradec.models.images.vq import KLDecoder, VQConfig

RUNNER = CliRunner()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def run(folder: Path, *arguments: str) -> tuple[dict[str, Any], Path]:
    sheet = folder / "sheet.png"
    result = RUNNER.invoke(app, ["image", "--out", str(sheet), "--seed", "3", "--json", "--enlarge", "1", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), sheet


def count_colours(file: Path) -> int:
    return len(Image.open(file).getcolors())


def make_clip(cls: type) -> tuple[CLIPTokenizer, Any]:
    """Create a tokenizer of letters and a text encoder with random weights."""
    vocab = {letter: index for index, letter in enumerate([*LETTERS, *(f"{letter}</w>" for letter in LETTERS)])}
    vocab |= {"<|startoftext|>": 52, "<|endoftext|>": 53}
    config = CLIPTextConfig(
        vocab_size=54, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        max_position_embeddings=12, projection_dim=8, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=12), cls(config).eval()


@pytest.fixture(scope="module")
def amused(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    transformer = UVit2DModel(
        hidden_size=8, cond_embed_dim=8, micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=8,
        vocab_size=32, codebook_size=32, in_channels=8, block_out_channels=8, num_res_blocks=1, block_num_heads=1,
        num_hidden_layers=2, num_attention_heads=1, intermediate_size=8, sample_size=8,
    )  # fmt: skip
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    sizes = {"block_out_channels": [8], "latent_channels": 8, "norm_num_groups": 8, "num_vq_embeddings": 32}
    vqvae = VQModel(**sizes, lookup_from_codebook=True)
    tokenizer, encoder = make_clip(CLIPTextModelWithProjection)
    pipe = AmusedPipeline(vqvae, tokenizer, encoder, transformer, AmusedScheduler(mask_token_id=31))
    folder = str(tmp_path_factory.mktemp("amused"))
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mar(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mar")
    torch.manual_seed(0)
    module = MAR(side=4, channels=4, width=16, depth=1, heads=2, classes=10, buffer=2, head_depth=1, head_width=16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    vae = KLDecoder(VQConfig(channels=32, channel_mult=(1,), res_blocks=1, attention=False, z_channels=4))
    save_file(module.state_dict(), folder / "model.safetensors")
    save_file(vae.state_dict(), folder / "vae.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mar", "heads": 2, "defaults": {"steps": 6}}))
    return str(folder)


def test_packaged_dit(tmp_path: Path) -> None:
    arguments = ["--model", "digits-dit", "--class", "3,8", "--steps", "6", "--compare"]
    actual, sheet = run(tmp_path, *arguments, "--sampler", "taylorseer", "--interval", "3")
    assert actual["full_steps"] == [0, 3] and len(actual["calls"]) == 6 and actual["sampler"]["interval"] == 3
    assert 0 < actual["pixel_difference"] < 0.2 and actual["class_labels"] == [3, 8]
    picture = Image.open(sheet)
    assert picture.size == (2 * 28 + 2, 2 * 28 + 2)
    pipe = PixelDiTPipeline.digits()
    draw = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    with paradec.accelerate(pipe, TaylorSeer(interval=3)):
        expected = pipe([3, 8], num_inference_steps=6, generator=draw).images
    for column, image in enumerate(expected):
        box = (30 * column, 30, 30 * column + 28, 58)
        assert ImageChops.difference(picture.crop(box), image).getbbox() is None
    same, _ = run(tmp_path, *arguments, "--interval", "1")
    assert same["pixel_difference"] == 0 and same["full_steps"] == list(range(6))
    preset = tmp_path / "set.json"
    for sampler in ("taylorseer(interval=3)", paradec.TaylorSeer(interval=3)):
        paradec.Request(sampler=sampler, steps=6).save(preset)
        report, _ = run(tmp_path, "--model", "digits-dit", "--class", "3", "--preset", str(preset))
        assert report["full_steps"] == [0, 3] and len(report["calls"]) == 6


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["maskgit", "halton", "recap"])
def test_masked_digits(sampler: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.png"
    arguments = ["--model", "digits-maskgit", "--class-labels", "3,8", "--steps", "4", "--trace", str(trace)]
    report, sheet = run(tmp_path, *arguments, "--sampler", sampler)
    assert report["nfe"] == 4 and report["sampler"]["sampler"] == sampler
    assert report["forwarded_tokens"] < 4 * 2 * 100 if sampler == "recap" else report["forwarded_tokens"] == 4 * 2 * 100
    assert count_colours(trace) == 4 + 1  # one colour per step, and one for the gap


def test_mar_folder(mar: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.png"
    arguments = ["--model", mar, "--class", "1-3", "--set", "head_steps=2"]
    actual, sheet = run(tmp_path, *arguments, "--sampler", "recap", "--trace", str(trace))
    assert actual["nfe"] == 6 and actual["codes"] is None and actual["sampler"]["local_steps"] == 1
    assert run(tmp_path, *arguments, "--sampler", "ReCAP")[0]["sampler"] == actual["sampler"]
    assert Image.open(sheet).size == (2 * 4 + 2, 2 * 4 + 2) and count_colours(trace) == 6 + 1
    assert run(tmp_path, *arguments)[0]["sampler"]["local_steps"] == 0  # the default sampler is mar


def test_mar_drafts_for_mar(mar: str, tmp_path: Path) -> None:
    arguments = ["--model", mar, "--class", "1-3", "--set", "head_steps=2,1", "--steps", "8", "--sampler", "cspd"]
    arguments += ["--set", "num_draft=3", "--drafter", mar]
    actual, _ = run(tmp_path, *arguments)
    assert actual["row_nfe"] == [5] * 3 and actual["draft_nfe"] == [6] * 3
    assert actual["sampler"]["draft"] == Path(mar).name and actual["sampler"]["head_steps"] == [2, 1]
    result = RUNNER.invoke(app, ["image", "--out", str(tmp_path / "sheet.png"), *arguments])
    assert ": 5 forwards (15 row calls), 6 forwards (18 row calls) of the drafter, " in result.stdout


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["maskgit", "halton", "recap"])
def test_amused_folder(sampler: str, amused: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.png"
    flags = ["--model", amused, "--prompt", "a fox", "-n", "2", "--steps", "5", "--guidance-scale", "3"]
    flags += ["--sampler", sampler, "--temperature", "1.5", "--negative-prompt", "b", "--height", "8", "--width", "8"]
    report, sheet = run(tmp_path, *flags, "--trace", str(trace))
    assert report["pictures"] == 2 and report["sampler"]["sampler"] == sampler and Image.open(sheet).size == (18, 8)
    assert count_colours(trace) == 5 + 1
    cells = report.get("cells")
    assert cells is None if sampler != "recap" else [some < full for some, full in cells] == [0, 1, 0, 1, 0]
    pixels = Image.open(sheet).tobytes()
    flags = [sampler.upper() if flag == sampler else flag for flag in flags]  # names ignore case
    assert Image.open(run(tmp_path, *flags)[1]).tobytes() == pixels  # equal seeds give equal pixels


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits-dit", "--class", "1", "--sampler", "maskgit"], "not work in PixelDiTPipeline; it takes taylorseer"),
        (["digits-dit", "--class", "1", "--order", "2", "--set", "order=2"], "--order and --set order=... set the"),
        (["digits-dit", "--prompt", "a"], "PixelDiTPipeline does not take prompts; give --class"),
        (["digits-dit", "--class", "1", "--cache", "dual"], "--cache is not for diffusers pipelines"),
        (["digits-dit", "--class", "1", "--preset", "TMP/set.json"], "cache in --preset is not for diffusers"),
        (["digits-dit", "--class", "1", "--temperature", "1"], "--temperature is for models of tokens"),
        (["digits-dit", "--class", "1", "--trace", "TMP/t.png"], "--trace FILE.png draws the step of each token"),
        (["digits-dit", "--class", "1", "--height", "32"], "--height is not an argument of PixelDiTPipeline"),
        (["AMUSED", "--class", "1"], "AmusedPipeline does not take class_labels; give --prompt"),
        (["digits-ar"], "either --prompt or --class"),
        (["digits-ar", "--class", "1", "--compare"], "--compare is for diffusion pipelines"),
        (["digits-ar", "--class", "1", "--steps", "4"], "--steps is not for 'digits-ar', which has samplers of family"),
        (["MAR", "--class", "1", "--sampler", "sjd"], "is of family 'draft_verify'; MAR (mar, recap or cspd) takes"),
        (["MAR", "--class", "1", "--sampler", "cspd"], "--sampler cspd needs --drafter: a smaller MAR"),
        (["MAR", "--class", "1", "--drafter", "x"], "--drafter is for speculative, lantern, lantern++, cspd"),
        (["MAR", "--class", "1", "--sampler", "cspd", "--drafter", "digits-ar"], "is an autoregressive image model; "),
        (["TEXT", "--prompt", "a"], "model_type='llada', which makes no pictures; types that do: llamagen"),
        (["EMPTY", "--prompt", "a"], "has neither config.json nor model_index.json"),
        (["WAN", "--prompt", "a"], "WanPipeline makes no pictures; give it to paradec.accelerate in Python"),
        (["ODD", "--prompt", "a"], "model_index.json names 'NoPipeline', which is not a pipeline of diffusers"),
        (["BROKEN", "--class", "1"], "cannot be loaded as DiTPipeline"),
    ],
)
def test_wrong_commands_are_refused(arguments: list[str], message: str, amused: str, mar: str, tmp_path: Path) -> None:
    parts = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    for name, index in (
        ("EMPTY", None),
        ("WAN", parts),
        ("ODD", parts | {"_class_name": "NoPipeline"}),
        ("BROKEN", {"_class_name": "DiTPipeline", "transformer": ["diffusers", "DiTTransformer2DModel"]}),
    ):
        (tmp_path / name).mkdir()
        if index is not None:
            (tmp_path / name / "model_index.json").write_text(json.dumps(index))
    paradec.Request(cache="dual").save(tmp_path / "set.json")
    text = str(GOLDEN / "llada-tiny")
    folders = {"AMUSED": amused, "MAR": mar, "TEXT": text} | {path.name: str(path) for path in tmp_path.iterdir()}
    model, *rest = (part.replace("TMP", str(tmp_path)) for part in arguments)
    command = ["image", "--out", str(tmp_path / "sheet.png"), "--model", folders.get(model, model), *rest]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("error: ")
    assert not (tmp_path / "sheet.png").exists()


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["speculative", "lantern++"])
def test_drafters_are_used(tmp_path: Path, sampler: str) -> None:
    arguments = ("--model", "digits-ar", "--class", "3,4", "--sampler", sampler, "--drafter", "digits-ar-drafter")
    report, sheet = run(tmp_path, *arguments, *(("--set", "tree=(2, 1)") if sampler == "speculative" else ()))
    assert sheet.exists() and report["sampler"]["drafter"] and report["nfe"] < 49
    assert all(drafts >= forwards - 1 for drafts, forwards in zip(report["draft_nfe"], report["row_nfe"], strict=True))


def test_presets_apply_to_images(tmp_path: Path) -> None:
    path, sheet = tmp_path / "mine.json", tmp_path / "sheet.png"
    sampler = paradec.samplers.create("sjd", window=3)
    paradec.Request(sampler=sampler, seed=5, temperature=0.8, top_k=40).save(path)
    model = paradec.load("digits-ar")
    for options, changes in [([], {}), (["--seed", "6", "--top-k", "0"], {"seed": 6, "top_k": 0})]:
        arguments = ["image", "--class", "3", "--out", str(sheet), "--preset", str(path), "--json", *options]
        arguments += ["--enlarge", "1"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        expected = paradec.generate_images(model, class_labels=3, preset=path, **changes)
        assert json.loads(result.stdout)["nfe"] == expected.nfe
        assert Image.open(sheet).convert("L").tobytes() == expected.images[0].convert("L").tobytes()
    path.write_text('{"chat": true}')
    result = CliRunner().invoke(app, ["image", "--class", "3", "--out", str(sheet), "--preset", str(path)])
    assert result.exit_code == 2 and "chat=True has no meaning for pictures" in result.stderr


def test_small_pictures_are_enlarged(tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    for options, side in (((), 252), (("--enlarge", "2"), 56)):
        result = RUNNER.invoke(app, ["image", "--class", "3", "--out", str(sheet), "--seed", "3", *options])
        assert result.exit_code == 0 and Image.open(sheet).size == (side, side)
        pixels = np.asarray(Image.open(sheet)).reshape(28, side // 28, 28, side // 28)
        assert (pixels == pixels[:, :1, :, :1]).all()
    assert [enlargement(size) for size in ((28, 28), (127, 4), (128, 128), (512, 64), (300, 300))] == [9, 2, 1, 1, 1]
