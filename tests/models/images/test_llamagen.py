"""LlamaGen and VQ decoders: numbers of the public code, checkpoints in the published formats, and errors."""

import json
import math
import os
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from decoding import refuses
from images import CODES, LLAMAGEN, TINY_VQ, last_logits, tiny_llamagen, tiny_vq
from recorded import golden, read_arrays, replay
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec.core.query import Query, StoreCall
from paradec.models.images.base import ImageRequest
from paradec.models.images.llamagen import PRESETS, LlamaGen, LlamaGenConfig, LlamaGenModel
from paradec.models.images.vq import PUBLISHED, VQConfig, VQModel, from_taming, load_vq

RECORDED = sorted(golden("llamagen").glob("*.safetensors"))


def list_recordings(part: str, key: str) -> list[Any]:
    """List the recordings that have the array "part.key", for example "c2i.ids"."""
    paths = [path for path in RECORDED if f"{part}.{key}" in read_arrays(path)]
    return [pytest.param(path, part, id=f"{path.stem}-{part}") for path in paths]


def weights_of(recorded: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = f"{part}.sd."
    return {k.removeprefix(prefix): recorded[k] for k in recorded if k.startswith(prefix) and "kv_cache" not in k}


def recorded_model(recorded: dict[str, Tensor], condition: str) -> tuple[LlamaGenModel, ImageRequest]:
    """Build the recorded model and its request."""
    state = weights_of(recorded, condition)
    _, heads, slots, _ = recorded[f"{condition}.sd.layers.0.attention.kv_cache.k_cache"].shape
    if condition == "c2i":
        prefix = 1
        sizes = {"num_classes": len(state["cls_embedding.embedding_table.weight"]) - 1}
    else:
        prefix = len(state["cls_embedding.uncond_embedding"])
        sizes = {"caption_dim": state["cls_embedding.cap_proj.fc1.weight"].shape[1], "caption_length": prefix}
    vocab, dim = state["output.weight"].shape
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    grid = math.isqrt(slots - prefix)  # the cache is as long as prompt and picture, rounded up to a multiple of 8
    sizes |= {"dim": dim, "n_layer": layers, "n_head": heads, "vocab_size": vocab, "grid": grid}
    network = LlamaGen(LlamaGenConfig(**sizes, condition=condition))
    network.load_state_dict(state)
    model = LlamaGenModel(network)
    conditions = recorded[f"{condition}.cond"]
    if condition == "c2i":
        request = model.request([0] * len(conditions), model.grid())
        request.prompts.rows = [[vocab + int(label)] for label in conditions]
        return model, request
    masks = recorded["t2i.emb_mask"].bool()
    return model, model.request([row[mask] for row, mask in zip(conditions, masks, strict=True)], model.grid())


def window(prompts: list[list[int]], ids: Tensor, start: int, stop: int, step: int = 0) -> Query:
    """Build a query over a store for image tokens `start` to `stop`. start=-1: also the prompts, of equal lengths."""
    first = len(prompts[0])
    rows = torch.cat((torch.tensor(prompts), ids), 1)
    begin, end = (0 if start < 0 else first + start), first + stop
    positions = torch.arange(begin, end).expand(len(rows), -1)
    return Query(
        rows=np.arange(len(rows)), tokens=rows[:, begin:end], positions=positions,
        store=StoreCall(torch.arange(len(rows)), positions, np.arange(len(rows)), end, step=step),
        forwarded=np.full(len(rows), end - begin), kind="full" if begin == 0 else "window",
    )  # fmt: skip


@pytest.mark.parametrize(("path", "condition"), [*list_recordings("c2i", "ids"), *list_recordings("t2i", "ids")])
def test_logits_equal_the_public_code(path: Path, condition: str) -> None:
    with replay(f"{path.stem}, {condition}"):
        expected = read_arrays(path)
        model, request = recorded_model(expected, condition)
        ids, prompts = expected[f"{condition}.ids"], request.prompts.rows
        rows, first, vocab = len(ids), len(prompts[0]), model.facts.vocab_size
        prefix = f"{condition}.logits_"
        names = [name.removeprefix(prefix) for name in expected if name.startswith(prefix)]
        windows = sorted(tuple(map(int, name.split("_"))) for name in names if name != "prefill")
        full = torch.cat((torch.tensor(prompts), ids), 1)
        query = Query(rows=np.arange(rows), tokens=full, positions=torch.arange(full.shape[1]).expand(rows, -1))
        logits = request.model(query)
        actual = {"prefill": logits[:, :first]}
        actual |= {f"{start}_{stop}": logits[:, first + start : first + stop] for start, stop in windows}
        for name, part in actual.items():
            # the public code pads captions on the left; outputs at padding are ignored
            assert (part - expected[f"{prefix}{name}"][:, -part.shape[1] :]).abs().max() < 1e-5

        store = model.make_store(rows, full.shape[1])
        repeated = [request.model(window(prompts, ids, -1, 0), store)]
        for step, (start, stop) in enumerate(windows[:-1], start=1):
            repeated.append(request.model(window(prompts, ids, start, stop, step), store))
        wrong, (start, stop), step = (ids + 1) % vocab, windows[-1], len(windows)
        discarded = request.model(window(prompts, wrong, start, stop, step), store)
        store.clear_from(np.arange(rows), np.full(rows, first + start))
        repeated.append(request.model(window(prompts, ids, start, stop, step + 1), store))
        for part, name in zip(repeated, actual, strict=True):
            assert (part - expected[f"{prefix}{name}"][:, -part.shape[1] :]).abs().max() < 1e-5
        assert (discarded - repeated[-1]).abs().max() > 0.1


def test_ragged_captions_do_not_see_each_other() -> None:
    model = tiny_llamagen("t2i")
    torch.manual_seed(3)
    captions = [torch.randn(length, 16).double() for length in (6, 2)]
    request = model.request(captions, model.grid())
    for row, caption in enumerate(captions):
        alone = model.request(caption, model.grid())
        tokens = torch.tensor([alone.prompts.rows[0] + [5, 9, 30]])
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        query = Query(rows=np.array([0]), tokens=tokens, positions=positions)
        assert torch.allclose(request.model(query.with_fields(rows=np.array([row]))), alone.model(query), atol=1e-12)


def test_unconditional_captions_are_the_last_learned_features() -> None:
    """The public code pads captions on the left to the full length and masks the padding in both branches."""
    model = tiny_llamagen("t2i")
    network, full, ids = model.module, 6, [5, 9, 30]
    torch.manual_seed(4)
    captions = [torch.randn(length, 16).double() for length in (2, 6, 1)]
    request = model.request(captions, model.grid())
    for row, caption in enumerate(captions):
        column = torch.arange(full + len(ids))
        seen = (column <= column[:, None]) & (column >= full - len(caption)) | torch.eye(len(column), dtype=torch.bool)
        with torch.no_grad():
            learned = network.cls_embedding.cap_proj(network.cls_embedding.uncond_embedding)
            columns = torch.cat((learned, network.tok_embeddings(torch.tensor(ids)))).unsqueeze(0)
            expected = network.head(network.backbone(columns, column.unsqueeze(0) - full, seen[None, None]))[0, -1]
        actual = last_logits(request.model, row, request.unconditional.rows[row] + ids, branch=1)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("path", "part"), list_recordings("vq", "code"))
def test_vq_decodes_like_the_public_code(path: Path, part: str) -> None:
    with replay(f"{path.stem}, {part}"):
        recorded = read_arrays(path)
        state = weights_of(recorded, part)
        channels = state["decoder.conv_out.weight"].shape[1]
        levels = len({name.split(".")[2] for name in state if name.startswith("decoder.conv_blocks.")})
        widths = [len(state[f"decoder.conv_blocks.{level}.res.0.conv2.weight"]) for level in reversed(range(levels))]
        codes, width = state["quantize.embedding.weight"].shape
        sizes = {"codebook_size": codes, "codebook_embed_dim": width, "channels": channels}
        sizes |= {"z_channels": len(state["post_quant_conv.weight"])}
        config = VQConfig(**sizes, channel_mult=tuple(width // channels for width in widths))
        model, ids = VQModel(config), recorded["vq.code"]
        model.load_state_dict(state)
        side = math.isqrt(ids.shape[-1])
        with torch.no_grad():
            image = model.decode(ids.view(-1, side, side))
        assert (image - recorded["vq.image"]).abs().max() < 1e-5


def test_configs_have_the_published_sizes() -> None:
    inner = {"B": 2048, "L": 2816, "XL": 3584, "XXL": 4096, "3B": 8704}
    assert {name: LlamaGenConfig(**PRESETS[name]).inner for name in inner} == inner
    with torch.device("meta"):
        for config in PUBLISHED.values():
            VQModel(config)
    assert [config.scale for config in PUBLISHED.values()] == [16, 8, 16]


def diffusers_names(model: VQModel) -> dict[str, Tensor]:
    attention = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
    levels = len(model.config.channel_mult)
    middle = {"mid.0": "resnets.0", "mid.1": "attentions.0", "mid.2": "resnets.1"}
    result = {}
    for full_name, tensor in model.state_dict().items():
        half, _, name = full_name.partition(".")
        if half == "encoder":
            for ours, theirs in middle.items():
                name = re.sub(f"^{ours}\\.", f"mid_block.{theirs}.", name)
            for ours, theirs in attention.items():
                if f"attentions.0.{ours}." in name:
                    name = name.replace(f"attentions.0.{ours}.", f"attentions.0.{theirs}.")
                    tensor = tensor[:, :, 0, 0] if tensor.ndim == 4 else tensor
            for level in range(levels):
                name = name.replace(f"conv_blocks.{level}.res.", f"down_blocks.{level}.resnets.")
                name = name.replace(f"conv_blocks.{level}.downsample.", f"down_blocks.{level}.downsamplers.0.")
            name = name.replace("nin_shortcut", "conv_shortcut").replace("norm_out", "conv_norm_out")
        result[f"{half}.{name}"] = tensor
    return {name: tensor for name, tensor in result.items() if name.startswith(("encoder.", "quant_conv."))}


def test_vq_encodes_like_diffusers() -> None:
    model = tiny_vq(encoder=True, attention=False, channel_mult=(1, 2, 2))
    theirs = diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, latent_channels=8,
        block_out_channels=(8, 16, 16), layers_per_block=1, num_vq_embeddings=CODES, norm_num_groups=4, vq_embed_dim=4,
    ).double().eval()  # fmt: skip
    missing, unexpected = theirs.load_state_dict(diffusers_names(model), strict=False)
    assert not unexpected and not any(name.startswith(("encoder.", "quant_conv.")) for name in missing)
    images = torch.rand(2, 3, 16, 24, dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        expected = theirs.encode(images).latents.permute(0, 2, 3, 1)
        torch.testing.assert_close(model.latents(images), expected, atol=1e-10, rtol=1e-10)
        normalized = torch.nn.functional.normalize(expected, dim=-1)
        assert torch.equal((normalized @ model.quantize.codes.T).argmax(-1), model.encode(images))
    refuses(lambda: tiny_vq().encode(images), "no encoder")


def test_gradients_pass_the_vq_codes() -> None:
    model = tiny_vq(encoder=True, image_channels=1)
    decoded, loss, _ = model(torch.rand(2, 1, 8, 8).double())
    (decoded.square().mean() + loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.encoder.conv_in.weight.grad.abs().sum() > 0 and model.quantize.embedding.weight.grad.abs().sum() > 0


def taming_names(model: VQModel) -> dict[str, Tensor]:
    levels = len(model.config.channel_mult)
    middle = {"mid.0": "mid.block_1", "mid.1": "mid.attn_1", "mid.2": "mid.block_2"}
    renamed = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in middle.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        for level in range(levels):
            name = name.replace(f"decoder.conv_blocks.{level}.", f"decoder.up.{levels - 1 - level}.")
            name = name.replace(f"encoder.conv_blocks.{level}.", f"encoder.down.{level}.")
        renamed[name.replace(".res.", ".block.")] = tensor
    return renamed


def test_weights_with_the_names_of_taming_load(tmp_path: Path) -> None:
    model = tiny_vq(l2_norm=False, attention=False, encoder=True)
    theirs = taming_names(model)
    assert "decoder.up.1.block.0.conv1.weight" in theirs and "encoder.down.0.downsample.conv.weight" in theirs
    renamed, expected = from_taming(theirs), model.state_dict()
    assert {name: tensor.shape for name, tensor in renamed.items()} == {name: t.shape for name, t in expected.items()}
    file = tmp_path / "vqgan.ckpt"
    torch.save({"state_dict": theirs | {"loss.discriminator.main.0.weight": torch.zeros(1)}}, file)
    actual = load_vq(file, model.config).double()
    codes = torch.randint(CODES, (1, 3, 2))
    assert torch.allclose(actual.decode(codes), model.decode(codes), atol=1e-5)
    # files without an encoder load too
    half = load_vq(file, VQConfig(**{**model.config.to_dict(), "encoder": False}))
    assert torch.allclose(half.decode(codes), actual.float().decode(codes), atol=1e-5)


def save_pt(wrapping: str | None) -> Callable[[Path, dict[str, Tensor]], Path]:
    def save(folder: Path, state: dict[str, Tensor]) -> Path:
        file = folder / "c2i_B_256.pt"
        torch.save(state if wrapping is None else {wrapping: state, "steps": 3, "args": Namespace(lr=1e-4)}, file)
        return file

    return save


def save_safetensors(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, folder / "c2i_B_256.safetensors")
    return folder / "c2i_B_256.safetensors"


@pytest.mark.parametrize(
    "save", [save_pt(None), save_pt("model"), save_pt("module"), save_pt("state_dict"), save_safetensors]
)
def test_published_file_formats_load(tmp_path: Path, save: Callable[[Path, dict[str, Tensor]], Path]) -> None:
    original = tiny_llamagen(grid=16, vq=False).module
    state = {name: tensor.float() for name, tensor in original.state_dict().items()}
    vq = tmp_path / "vq.safetensors"
    save_file({k: v.float() for k, v in tiny_vq().state_dict().items()}, vq, {"config": json.dumps(TINY_VQ.to_dict())})
    # files of the public code contain a table of angles
    file = save(tmp_path, state | {"freqs_cis": torch.zeros(257, 6, 2)})
    model = paradec.load(file, n_head=4, vq=vq, dtype="float64")
    changes = {"ffn_dim": 256, "n_kv_head": 4, "caption_dim": 2048, "caption_length": 120}
    assert model.facts.name == "c2i_B_256" and model.module.config == replace(original.config, **changes)
    assert all(torch.allclose(p.float(), state[name]) for name, p in model.module.state_dict().items())
    assert model.grid().length == 256 and model.vq.config == TINY_VQ


def test_folders_load_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    state = tiny_llamagen().module.state_dict()
    save_file({name: tensor.float().contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    fields = {"model_type": "llamagen", **LLAMAGEN, "grid": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert paradec.load(tmp_path).grid().length == 16
    (tmp_path / "config.json").write_text(json.dumps(fields | {"n_layer": 3}))
    refuses(lambda: paradec.load(tmp_path), "missing weights: layers.2", paradec.CheckpointError)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"n_head": 5}))
    refuses(lambda: paradec.load(tmp_path), "n_head=5 must divide dim=48", paradec.CheckpointError)


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


def test_code_in_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"output.weight": torch.zeros(1)}, "extra": Payload()}, tmp_path / "c2i_B_256.pt")
    refuses(lambda: paradec.load(tmp_path / "c2i_B_256.pt"), "as plain tensors", paradec.CheckpointError)
    assert not (tmp_path / "harm").exists()


def test_wrong_files_are_described(tmp_path: Path) -> None:
    state = {name: tensor.float() for name, tensor in tiny_llamagen().module.state_dict().items()}
    file = tmp_path / "network.pt"
    torch.save(state, file)
    refuses(lambda: paradec.load(file), "no published size has the width 48", paradec.CheckpointError)
    refuses(lambda: paradec.load(file, n_head=4), "does not state the size of its pictures", paradec.CheckpointError)
    refuses(lambda: paradec.load(file, vqgan="x"), "unknown option of 'llamagen' models: 'vqgan'.*allowed: .*vq")
    refuses(lambda: paradec.load(file, device_map="auto"), "device_map='auto' is not for image models")
    refuses(lambda: paradec.load(vq="x"), "unknown argument: 'vq'", TypeError)
    torch.save({"something": torch.zeros(2)}, file)
    refuses(lambda: paradec.load(file), "holds no LlamaGen", paradec.CheckpointError)
    refuses(lambda: load_vq(tmp_path / "vq_ds16_c2i.pt"), "there is no file", paradec.CheckpointError)
