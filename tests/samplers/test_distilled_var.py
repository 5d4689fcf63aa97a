"""Distilled Decoding of VAR: the reference's cases, the teacher's prefix, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import tiny_llamagen, tiny_var, tiny_var_student
from next_image import assert_checksum, case, cases, file
from recorded import replays
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec.core import rng
from paradec.core.protocol import decode
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.distilled import Stages
from paradec.models.images.distilled_var import SECONDS, DistilledVARModel, load_distilled_var
from paradec.models.images.multi_scale_vq import PUBLISHED_SCALES, MultiScaleVQ, load_multi_scale_vq
from paradec.models.images.var import VARModel, ends_of, load_var
from paradec.samplers.pictures.distilled import Distilled

SYSTEM = "dd-var"


def golden_vq(name: str) -> MultiScaleVQ:
    """`name`: "var/vae"."""
    said, _ = case("", f"{name}.config")
    return load_multi_scale_vq(file("", f"{name}.safetensors"), norm_groups=said["group_norm_groups"])


def golden_student(name: str) -> DistilledVARModel:
    said, _ = case(SYSTEM, f"{name}.config")
    path, vq = file(SYSTEM, f"{name}.safetensors"), golden_vq(said["vae"])
    return load_distilled_var(path, scales=said["patch_nums"], heads=said["num_heads"], vq=vq)


def golden_teacher(name: str, vq: MultiScaleVQ) -> VARModel:
    said, _ = case("var", f"{name}.config")
    return load_var(file("var", f"{name}.safetensors"), scales=said["patch_nums"], heads=said["num_heads"], vq=vq)


@pytest.mark.parametrize("name", cases(SYSTEM, "steps"))
@replays("name", "dd-var/")
def test_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, arrays = case(SYSTEM, name)
    settings = said["settings"]
    model = golden_student(said["model"])
    if said["margin"] < 1e-4:  # a summation's order may decide in float32
        model.module.double()
        model.vq.double()
    given, taught = {}, {}
    if "teacher" in said:
        given = {"teacher": golden_teacher(said["teacher"], model.vq), "teacher_start": settings["teacher_start"]}
        given["teacher"].module.to(model.dtype)
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
            if settings["cfg"]:  # the reference evaluates the half without weight at 0 too
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
                    torch.testing.assert_close(found.float(), arrays[f"{key}.{calls}"], atol=1e-4, rtol=0)
            if f"result.{calls}" in arrays:
                torch.testing.assert_close(proposal.values.float(), arrays[f"result.{calls}"], atol=1e-4, rtol=0)
            assert proposal.ids.tolist() == step["tokens"]
            calls += 1
        sampler.commit(state, proposal)
    assert state.done and calls == said["calls"] and state.teacher_nfe == said.get("teacher_calls", 0)
    if "f_hat" in arrays:
        torch.testing.assert_close(model.latent(state.tokens).float(), arrays["f_hat"], atol=1e-4, rtol=0)
    images = model.decode(state.tokens)
    assert list(images.shape) == said["image_shape"]
    assert_checksum(images, said["image"], 1e-4)
    if "image" in arrays:
        torch.testing.assert_close(images, arrays["image"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_the_teacher_s_prefix(masked: bool) -> None:
    teacher = tiny_var()
    student = tiny_var_student(teacher)
    scales = teacher.module.scales
    last = len(scales) - 1
    sampler = Distilled(t_list=(0, last + 1), teacher=teacher, teacher_start=last - 1, masked_prefix=masked)
    state = sampler.start(student, [3, 1], temperature=0, guidance_scale=2.5, seed=0)
    found = {}
    while not state.done:
        kind, at = state.plan[state.index]
        proposal = sampler.step(student, state)
        if kind == "teacher":
            found[at] = proposal.logits
        sampler.commit(state, proposal)
    assert list(found) == [last - 1, last]
    with torch.no_grad():
        inputs = teacher.vq.inputs(student.codes()[state.ids], scales)[0]
        halves = [teacher.module(torch.tensor(labels), inputs) for labels in ([3, 1], [5, 5])]
    for at, logits in found.items():
        weight = 1 + 1.5 * at / last
        where = slice(teacher.module.begin(at), teacher.module.ends[at])
        said = weight * halves[0][:, where] + (1 - weight) * halves[1][:, where]
        assert torch.allclose(logits, said, atol=1e-9) == masked


def test_a_drawn_picture_is_the_teacher_s() -> None:
    teacher = tiny_var()
    student = tiny_var_student(teacher)
    count = len(teacher.module.scales)
    given: dict[str, Any] = {"class_labels": [3, 1], "temperature": 0, "seed": 0, "output_type": "pt"}
    states: list[Any] = []
    for scale, branches in ((1.0, 1), (2.5, 2)):
        sampler = Distilled(t_list=(0, count), teacher=teacher)
        states.clear()
        out = paradec.generate_images(
            student, sampler=sampler, guidance_scale=scale, callback=lambda state, _: states.append(state), **given
        )
        expected = paradec.generate_images(teacher, guidance_scale=scale, **given)
        torch.testing.assert_close(out.images, expected.images)
        assert out.row_nfe == [count] * 2 and out.row_forwards == 2 * branches * count
        # every scale is read once, and what was read of all but the last one is given back
        assert out.forwarded_tokens == 2 * branches * teacher.module.ends[-1] and len(states) == count
        assert states[0].teaching.store.data is None


@torch.no_grad()
def test_one_call_is_the_network_s() -> None:
    student = tiny_var_student()
    stages = student.facts.stages
    state = decode(Distilled(), student, Distilled().start(student, [3], seed=0))
    x, book = state.noise, student.codes()
    for stage in (0, stages.second):
        kept, split = stages.kept[stage], stages.kept[stages.split]
        inputs = torch.cat((x[:, :kept], state.noise[:, kept:]), 1)
        continuous, logits = student.module(torch.tensor([3]), inputs, kept)
        ids = logits.argmax(-1)
        ids[:, :kept] = torch.cdist(inputs[0, :kept], book).argmin(-1)
        continuous[:, :kept] = inputs[:, :kept]
        x = torch.cat((book[ids[:, :split]], continuous[:, split:]), 1)
    torch.testing.assert_close(state.tokens, x, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_token_sees_coarser_scales_and_itself() -> None:
    student = tiny_var_student()
    ends = student.facts.stages.kept
    noise = torch.randn(1, ends[-1], 4, dtype=torch.float64)
    plain = torch.cat(student.module(torch.tensor([3]), noise, 0), -1)
    scale = 1
    at = ends[scale]
    other = noise.clone()
    other[0, at] += 1
    changed = (torch.cat(student.module(torch.tensor([3]), other, 0), -1) - plain).abs().amax(-1)[0] > 1e-9
    expected = torch.arange(ends[-1]) >= ends[scale + 1]
    expected[at] = True
    assert torch.equal(changed, expected)


def test_rows_traces_and_types() -> None:
    teacher = tiny_var()
    student = tiny_var_student(teacher)
    sampler = Distilled(teacher=teacher, teacher_start=1)
    given: dict[str, Any] = {"sampler": sampler, "guidance_scale": 2.0, "output_type": "latent"}
    together = paradec.generate_images(student, class_labels=[1, 2, 4], seed=[4, 5, 6], **given, trace=True)
    for row, label in enumerate([1, 2, 4]):
        alone = paradec.generate_images(student, class_labels=label, seed=4 + row, **given)
        torch.testing.assert_close(alone.tokens[0], together.tokens[row], atol=1e-12, rtol=0)
    first, last = student.facts.stages.kept[1], student.facts.stages.kept[2]
    assert last - first == 4 and together.steps.shape == (3, 4, 4) and (together.steps == 2).all()
    assert together.images.shape == (3, 4, 4, 4) and together.trace is not None
    replay = torch.tensor(together.trace.replay(), dtype=torch.float64)
    torch.testing.assert_close(replay, together.tokens)
    student.module.bfloat16()
    out = paradec.generate_images(student, class_labels=[1], steps=1, seed=0, output_type="pt")
    assert torch.isfinite(out.images).all() and out.row_nfe == [1]


def test_other_teachers_are_refused() -> None:
    student = tiny_var_student()
    with pytest.raises(TypeError, match="must be a VAR"):
        Distilled(teacher=tiny_llamagen()).start(student, [1])
    with pytest.raises(ValueError, match="has classes=7; .* has 5"):
        Distilled(teacher=tiny_var(classes=7)).start(student, [1])
    with pytest.raises(ValueError, match="other codes than its student"):
        Distilled(teacher=tiny_var(vq_seed=3)).start(student, [1])
    with pytest.raises(ValueError, match="split=9"):
        tiny_var_student(split=9)
    with pytest.raises(TypeError, match="a distilled student"):
        paradec.samplers.create("var").start(student, [1])


def test_checkpoints_load(tmp_path: Path) -> None:
    student = tiny_var_student()
    weights, module = student.module.state_dict(), student.module
    expected = paradec.generate_images(student, class_labels=[1, 2], seed=0, output_type="latent").tokens
    given: dict[str, Any] = {"scales": module.scales, "heads": 2, "vq": student.vq, "dtype": "float64"}
    worse: dict[str, Tensor] = {name: tensor + 1 for name, tensor in weights.items()}
    buffers = {"lvl_1L": torch.zeros(1, 3, dtype=torch.int64), "attn_bias_for_masking": torch.zeros(1)}
    without = {name: tensor for name, tensor in weights.items() if not name.endswith("zero_k_bias")}
    for nested in ({"trainer": {"ema_parameters": weights | buffers, "var_wo_ddp": worse}}, without):
        torch.save(nested, tmp_path / "var-d16.pth")
        loaded = paradec.load(tmp_path / "var-d16.pth", **given)
        assert isinstance(loaded, DistilledVARModel)
        tokens = paradec.generate_images(loaded, class_labels=[1, 2], seed=0, output_type="latent").tokens
        torch.testing.assert_close(tokens, expected, atol=1e-9, rtol=0)
    folder = tmp_path / "folder"
    folder.mkdir()
    fields = {"model_type": "distilled_var", "scales": list(module.scales), "heads": 2, "second": 1, "split": 2}
    (folder / "config.json").write_text(json.dumps(fields | {"defaults": {"steps": 1}}))
    save_file(weights, folder / "model.safetensors")
    loaded = paradec.load(folder, vq=student.vq, dtype="float64")
    assert (loaded.facts.stages.second, loaded.facts.stages.split, loaded.defaults["steps"]) == (1, 2, 1)
    with pytest.raises(CheckpointError, match="needs its multi-scale VQ"):
        load_distilled_var(folder)
    torch.save({"trainer": {"var_wo_ddp": weights}}, tmp_path / "var-d16.pth")
    with pytest.raises(CheckpointError, match="holds no weights by name"):  # these are not the averaged ones
        load_distilled_var(tmp_path / "var-d16.pth", **(given | {"dtype": None}))
    for gone in ("n_d_embed.weight", "layerwise_n_d_embed.2.bias", "final_layer_conti.scale_shift_table"):
        torch.save({name: tensor for name, tensor in weights.items() if name != gone}, tmp_path / "var-d16.pth")
        with pytest.raises(CheckpointError, match=gone.replace(".", r"\.")):
            paradec.load(tmp_path / "var-d16.pth", **given)


def test_published_stages() -> None:
    assert SECONDS == {1024: 5, 1280: 4, 1536: 4}
    for name, calls in (("var_d16_3", 3), ("var_d16_4", 4), ("var_d16_6", 6)):
        sampler = paradec.samplers.create("distilled", preset=name, teacher=tiny_var())
        stages = Stages((0, *ends_of(PUBLISHED_SCALES[256])), 5, 5, scales=True)
        assert len(sampler.plan(stages, None)) == calls


def test_the_command_takes_a_teacher(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from paradec.cli import app

    teacher = tiny_var()
    student = tiny_var_student(teacher)
    folder, vq = tmp_path / "student", tmp_path / "vq.safetensors"
    folder.mkdir()
    fields = {"model_type": "distilled_var", "scales": [1, 2, 3, 4], "heads": 2, "second": 2, "split": 2}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(student.module.float().state_dict(), folder / "model.safetensors")
    save_file(teacher.vq.float().state_dict(), vq, metadata={"config": '{"norm_groups": 4}'})
    metadata = {"config": '{"scales": [1, 2, 3, 4], "heads": 2}'}
    save_file(teacher.module.float().state_dict(), tmp_path / "teacher.safetensors", metadata=metadata)
    asked = ["image", "--model", str(folder), "--vq", str(vq), "--class", "1", "--out", str(tmp_path / "x.png")]
    taught = ["--drafter", str(tmp_path / "teacher.safetensors"), "--set", "teacher_start=1"]
    for options, forwards in (([], "2 forwards"), (taught, "3 forwards")):
        done = CliRunner().invoke(app, [*asked, *options])
        assert done.exit_code == 0 and forwards in done.output, done.output
