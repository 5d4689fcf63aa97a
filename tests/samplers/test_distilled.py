"""Distilled students of LlamaGen and VAR: replays of the public code, plain loops, and checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from images import tiny_llamagen, tiny_student, tiny_var, tiny_var_student
from oracles.pictures import distilled_stage
from recorded import assert_checksum, find_weights, image_case, image_cases, image_file, replays
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec.core import rng
from paradec.core.protocol import decode
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.distilled import Stages
from paradec.models.images.distilled_llamagen import (
    DistilledLlamaGen,
    DistilledLlamaGenConfig,
    DistilledLlamaGenModel,
    load_distilled_llamagen,
)
from paradec.models.images.distilled_var import SECOND_STAGES, load_distilled_var
from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig, LlamaGenModel
from paradec.models.images.multi_scale_vq import PUBLISHED_SCALES, load_multi_scale_vq
from paradec.models.images.var import load_var, scale_ends
from paradec.models.images.vq import VQConfig, VQModel
from paradec.samplers.pictures.distilled import Distilled

SYSTEM = "dd-llamagen"
LLAMAGEN = image_cases(SYSTEM, "steps")


def golden_vq() -> VQModel:
    folder = find_weights(SYSTEM, "next-image")
    (name,) = (path.stem for path in folder.glob("*.config.json") if "codebook_l2_norm" in path.read_text())
    record, weights = image_case(SYSTEM, name)
    config = VQConfig(
        codebook_size=record["codebook_size"], codebook_embed_dim=record["codebook_embed_dim"], channels=record["ch"],
        l2_norm=record["codebook_l2_norm"], channel_mult=record["decoder_ch_mult"], res_blocks=record["num_res_blocks"],
        z_channels=record["z_channels"], norm_groups=record["group_norm_groups"],
    )  # fmt: skip
    vq = VQModel(config)
    vq.load_state_dict({name: weights[name] for name in vq.state_dict()})
    return vq


def golden_sizes(model_name: str, grid: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration of a recorded network, and its weights."""
    record, weights = image_case(SYSTEM, f"{model_name}.config")
    names = ("dim", "n_layer", "n_head", "vocab_size", "num_classes", "rope_base", "norm_eps")
    sizes = {name: record[name] for name in names}
    return sizes | {"ffn_dim": record["ffn_hidden"], "grid": grid}, weights


def replay_steps(
    model: Any, recorded: dict[str, Any], arrays: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch,
    assert_teacher_call: Callable[[Any, Any, dict[str, Any]], None], teacher: dict[str, Any], **sampling: Any,
) -> Any:  # fmt: skip
    """Decode, compare every recorded step, and return the final state."""
    settings, calls = recorded["settings"], 0
    if recorded["margin"] < 1e-4:  # in float32 the order of a sum could change a token
        model.module.double()
        model.vq.double()
    if teacher:
        teacher["teacher"].module.to(model.dtype)
    sampler = paradec.samplers.create("distilled", t_list=settings["t_list"], split=settings["split"], **teacher)
    state = sampler.start(model, settings["labels"], noise=arrays["noise"], seed=0, **sampling)
    for step in recorded["steps"]:
        tokens = torch.tensor(step["tokens"])
        if step["kind"] == "quantised":
            assert torch.equal(state.ids[:, : tokens.shape[1]], tokens)
            assert state.ids.shape == tokens.shape or isinstance(model, DistilledLlamaGenModel)
            continue
        if "u" in step:
            u = torch.tensor(step["u"], dtype=torch.float64).view(state.batch, -1, 1)
            monkeypatch.setattr(rng, "uniform", lambda *args, u=u: u)
        (query,) = sampler.query(state)
        proposal = sampler.step(model, state)
        assert torch.equal(proposal.ids.view(tokens.shape), tokens)
        if step["kind"] == "teacher":
            assert_teacher_call(state, query, step)
            assert_checksum(proposal.logits, step["guided_logits"])
        else:
            assert state.plan[state.index] == ("student", step["t"])
            if "kept" in step:
                assert (query.num_data, state.split) == (step["kept"], step["discrete"])
            assert_checksum(query.tokens, step["input"])
            outputs = {"continuous": proposal.continuous, "logits": proposal.logits, "result": proposal.values}
            for key, value in outputs.items():
                assert_checksum(value, step[key])
                if f"{key}.{calls}" in arrays:
                    torch.testing.assert_close(value.float(), arrays[f"{key}.{calls}"], atol=1e-4, rtol=0)
            calls += 1
        sampler.commit(state, proposal)
    assert state.done and calls == recorded["calls"] and state.teacher_nfe == recorded.get("teacher_calls", 0)
    return state


def assert_image(images: Tensor, recorded: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    assert_checksum(images, recorded["image"], 1e-4)
    assert list(images.shape) == recorded["image_shape"]
    if "image" in arrays:
        torch.testing.assert_close(images.float(), arrays["image"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", LLAMAGEN)
@replays("name", "dd-llamagen/")
def test_llamagen_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record, arrays = image_case(SYSTEM, name)
    settings = record["settings"]
    sizes, weights = golden_sizes(record["model"], settings["grid"])
    module = DistilledLlamaGen(DistilledLlamaGenConfig(**sizes, codebook_dim=weights["tok_embeddings.weight"].shape[1]))
    module.load_state_dict(weights)
    model = DistilledLlamaGenModel(module, golden_vq())
    teacher: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    if "teacher" in record:
        sizes, weights = golden_sizes(record["teacher"], settings["grid"])
        teacher_module = LlamaGen(LlamaGenConfig(**sizes))
        teacher_module.load_state_dict(weights)
        teacher = {"teacher": LlamaGenModel(teacher_module), "teacher_start": settings["teacher_start"]}
        sampling = {"guidance_scale": settings["cfg"], "temperature": settings["temperature"]}
        sampling |= {"top_k": settings["top_k"] or None, "top_p": settings["top_p"]}
        assert settings["t_list"][-1] == settings["teacher_end"]

    def assert_teacher_call(state: Any, query: Any, step: dict[str, Any]) -> None:
        assert query.positions[0].tolist() == step["positions"]
        assert_checksum(state.teacher.answer(query), step["raw_logits"])

    state = replay_steps(model, record, arrays, monkeypatch, assert_teacher_call, teacher, **sampling)
    assert state.nfe.tolist() == [record["calls"] + state.teacher_nfe] * state.batch
    if "codes" in record:
        assert state.ids[:, : settings["t_list"][-1]].tolist() == record["codes"]
    # the reference's images are not clamped
    vq = model.vq
    with torch.no_grad():
        images = vq.decoder(vq.post_quant_conv(model.latent(state.tokens, model.grid()))) / 2 + 0.5
    assert_image(images, record, arrays)
    torch.testing.assert_close(model.decode(state.tokens), images.clamp(0, 1).float())


@pytest.mark.thinned
@pytest.mark.parametrize(("scale", "sampling"), [(1.0, {}), (3.0, {}), (3.0, {"temperature": 0.7, "top_k": 5})])
@pytest.mark.parametrize(("start", "split"), [(0, 9), (2, 9), (4, 1), (2, 0)])
@torch.no_grad()
def test_decoding_with_a_teacher_equals_a_plain_loop(start: int, split: int, scale: float, sampling: dict) -> None:
    """The plain loop evaluates the teacher's whole sequence for every token."""
    student, teacher = tiny_student(), tiny_llamagen()
    sampler = Distilled(t_list=(0, 6), split=split, teacher=teacher, teacher_start=start)
    state = sampler.start(student, [3, 9], guidance_scale=scale, seed=0, **{"temperature": 0} | sampling)
    decode(sampler, student, state)
    calls = 6 - start + 1 + (start > 0)
    assert state.nfe.tolist() == [calls] * 2 and state.teacher_nfe == 6 - start
    branches = 1 if scale == 1 else 2
    assert state.row_forwards.tolist() == [calls + (branches - 1) * (6 - start)] * 2
    # a student call evaluates all 16 tokens; the teacher evaluates the class and the first 5 tokens once
    assert state.forwarded_tokens.tolist() == [16 * (1 + (start > 0)) + 6 * branches] * 2
    codes, network = student.codes(), teacher.module
    for row, label in enumerate([3, 9]):
        x = noise = state.noise[row]
        if start:
            x = distilled_stage(student, label, x, noise, 0, split)
            x = codes[torch.cdist(x, codes).argmin(-1)]
        ids = torch.cdist(x[:start], codes).argmin(-1).tolist()
        for position in range(start, 6):
            branch_logits = []
            for condition in (label, 10):
                first = network.cls_embedding.embedding_table(torch.tensor([[condition]]))
                hidden = torch.cat((first, network.tok_embeddings(torch.tensor([ids], dtype=torch.int64))), 1)
                out = network.backbone(hidden, torch.arange(-1, len(ids)).unsqueeze(0))
                branch_logits.append(network.head(out)[0, -1])
            guided = branch_logits[1] + scale * (branch_logits[0] - branch_logits[1])
            likely = guided.topk(sampling.get("top_k", 1)).indices.sort().values
            sums = (guided[likely] / sampling.get("temperature", 1)).softmax(-1).cumsum(-1)
            u = rng.uniform(state.keys[[row]], torch.tensor([0]), torch.tensor([[position]]), 1, rng.TOKEN_STREAM)
            ids.append(int(likely[(sums <= u.item() * sums[-1]).sum()]))
        x = torch.cat((codes[ids], x[6:]))
        expected = distilled_stage(student, label, x, noise, 6, split)
        torch.testing.assert_close(state.tokens[row], expected, atol=1e-10, rtol=0)


def test_rows_begin_with_different_noise() -> None:
    noise = Distilled().start(tiny_student(), [1] * 400, seed=0).noise.flatten()
    assert abs(float(noise.mean())) < 0.02 and abs(float(noise.std()) - 1) < 0.02
    assert len(noise.unique()) == len(noise)  # copies of a row differ


def test_an_image_decoded_by_the_teacher_alone_equals_the_teacher_s() -> None:
    student, teacher = tiny_student(), tiny_llamagen()
    sampler, states = Distilled(t_list=(0, 16), teacher=teacher), []

    def record_state(state: Any, commit: Any) -> None:
        states.append((state, state.teacher.store.nbytes, state.teacher_nfe, state.progress))

    request = {"class_labels": [3, 9], "temperature": 0, "guidance_scale": 2.0, "seed": 0, "output_type": "latent"}
    out = paradec.generate_images(student, sampler=sampler, callback=record_state, **request)
    expected = paradec.generate_images(teacher, sampler=paradec.samplers.create("sjd", window=1), **request)
    assert torch.equal(out.tokens, student.codes()[expected.tokens])
    assert out.row_nfe == [16, 16]
    config = teacher.module.config
    num_bytes = 2 * config.n_layer * config.dim * 8 * 2 * 2 * (1 + 16 + 1)  # class, picture, and a slot for padding
    assert [entry[1:] for entry in states] == [(num_bytes, step, (2 * step, 32)) for step in range(1, 17)]
    assert states[0][0].teacher.store.nbytes == 0  # freed after the last step


def test_images_and_their_traces() -> None:
    student = tiny_student()
    out = paradec.generate_images(student, class_labels=[1, 2], seed=0, output_type="pt", trace=True)
    assert out.images.shape == (2, 3, 8, 8) and out.row_nfe == [2, 2] and out.codes is None
    assert out.accepted.tolist() == [[5, 5], [11, 11]]  # 5/16 of the tokens are data at the second call
    assert [len(step.commits) for step in out.trace.steps] == [10, 22]
    assert torch.allclose(torch.tensor(out.trace.replay(), dtype=torch.float64), out.tokens)
    one_step = paradec.generate_images(student, class_labels=[1, 2], seed=0, steps=1, output_type="pt")
    assert one_step.row_nfe == [1, 1] and not torch.equal(one_step.images, out.images)


def assert_loads(path: Path, content: Any, student: Any, rtol: float, atol: float, **arguments: Any) -> None:
    torch.save(content, path)
    loaded = paradec.load(path, **arguments)
    assert type(loaded) is type(student)
    request: dict[str, Any] = {"class_labels": [1, 2], "seed": 0, "output_type": "latent"}
    tokens, expected = (paradec.generate_images(model, **request).tokens for model in (loaded, student))
    torch.testing.assert_close(tokens, expected, rtol=rtol, atol=atol)


def assert_missing(path: Path, weights: dict[str, Tensor], missing: str, **arguments: Any) -> None:
    torch.save({name: tensor for name, tensor in weights.items() if name != missing}, path)
    refuses(lambda: paradec.load(path, **arguments), missing.replace(".", r"\."), CheckpointError)


def test_checkpoints_load(tmp_path: Path) -> None:
    student = tiny_student()
    weights, config = student.module.state_dict(), student.module.config
    arguments: dict[str, Any] = {"n_head": 4, "grid": 4, "vq": student.vq, "dtype": "float64"}
    without_ema = {name: tensor + 1 for name, tensor in weights.items()}
    for nested in ({"ema": weights, "model": without_ema}, {"model": weights}, weights):
        assert_loads(tmp_path / "llamagen-B.pt", nested, student, rtol=0, atol=0, **arguments)
    folder = tmp_path / "folder"
    folder.mkdir()
    sizes = {name: getattr(config, name) for name in config.__dataclass_fields__}
    fields = {"model_type": "distilled_llamagen", "defaults": {"steps": 1, "guidance_scale": 1.5}}
    (folder / "config.json").write_text(json.dumps(sizes | fields))
    save_file(weights, folder / "model.safetensors")
    vq_metadata = {"config": json.dumps(student.vq.config.to_dict())}
    save_file(student.vq.state_dict(), folder / "vq.safetensors", metadata=vq_metadata)
    loaded = paradec.load(folder, dtype="float64")
    assert loaded.defaults["steps"] == 1 and loaded.module.config == config
    assert paradec.generate_images(loaded, class_labels=1, seed=0, output_type="latent").row_nfe == [1]
    small = load_distilled_llamagen(tmp_path / "llamagen-B.pt", n_head=4, grid=4, vq=student.vq, second=3, split=2)
    assert (small.facts.stages.second, small.facts.stages.split) == (3, 2)
    with pytest.raises(CheckpointError, match="needs LlamaGen's VQ autoencoder"):
        load_distilled_llamagen(tmp_path / "llamagen-B.pt", n_head=4, grid=4)
    for name in ("n_d_embed.weight", "final_layer_conti.linear.weight", "final_layer_conti.scale_shift_table"):
        assert_missing(tmp_path / "llamagen-B.pt", weights, name, **arguments)


def test_codes_are_not_rounded_with_the_network() -> None:
    student = tiny_student()
    student.module.bfloat16()
    out = paradec.generate_images(student, class_labels=[1], seed=0, output_type="pt")
    assert out.tokens.dtype == torch.float32
    assert torch.cdist(out.tokens[0, :5].double(), student.codes()).amin(-1).max() < 1e-6


SYSTEM_VAR = "dd-var"


@pytest.mark.parametrize("name", image_cases(SYSTEM_VAR, "steps"))
@replays("name", "dd-var/")
def test_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record, arrays = image_case(SYSTEM_VAR, name)
    settings = record["settings"]
    student, _ = image_case(SYSTEM_VAR, f"{record['model']}.config")
    norm_groups = image_case("", f"{student['vae']}.config")[0]["group_norm_groups"]
    vq = load_multi_scale_vq(image_file("", f"{student['vae']}.safetensors"), norm_groups=norm_groups)
    path = image_file(SYSTEM_VAR, f"{record['model']}.safetensors")
    model = load_distilled_var(path, scales=student["patch_nums"], heads=student["num_heads"], vq=vq)
    teacher, sampling = {}, {}
    if "teacher" in record:
        config, _ = image_case("var", f"{record['teacher']}.config")
        path = image_file("var", f"{record['teacher']}.safetensors")
        teacher = {"teacher": load_var(path, scales=config["patch_nums"], heads=config["num_heads"], vq=vq)}
        teacher |= {"teacher_start": settings["teacher_start"]}
        # paradec's guidance scale is the public code's `cfg` plus one
        sampling = {"guidance_scale": settings["cfg"] + 1, "top_k": settings["top_k"] or None}
        sampling |= {"top_p": settings["top_p"] or None}

    def assert_teacher_call(state: Any, query: Any, step: dict[str, Any]) -> None:
        assert query.positions.shape[1] == step["evaluated"]
        if settings["cfg"]:  # at 0 the reference evaluates an unused half too
            assert query.branches * state.batch == step["rows"]
        raw = state.teacher.answer(query)
        if raw.numel() == step["raw_logits"][0]:  # the reference may include the prefix or an unused half
            assert_checksum(raw, step["raw_logits"])

    state = replay_steps(model, record, arrays, monkeypatch, assert_teacher_call, teacher, **sampling)
    if "f_hat" in arrays:
        torch.testing.assert_close(model.latent(state.tokens).float(), arrays["f_hat"], atol=1e-4, rtol=0)
    assert_image(model.decode(state.tokens), record, arrays)


@pytest.mark.parametrize("masked", [False, True])
def test_the_teacher_s_prefix(masked: bool) -> None:
    teacher = tiny_var()
    student = tiny_var_student(teacher)
    scales = teacher.module.scales
    last = len(scales) - 1
    sampler = Distilled(t_list=(0, last + 1), teacher=teacher, teacher_start=last - 1, masked_prefix=masked)
    state = sampler.start(student, [3, 1], temperature=0, guidance_scale=2.5, seed=0)
    logits_by_scale = {}
    while not state.done:
        kind, scale = state.plan[state.index]
        proposal = sampler.step(student, state)
        if kind == "teacher":
            logits_by_scale[scale] = proposal.logits
        sampler.commit(state, proposal)
    assert list(logits_by_scale) == [last - 1, last]
    with torch.no_grad():
        inputs = teacher.vq.inputs(student.codes()[state.ids], scales)[0]
        halves = [teacher.module(torch.tensor(labels), inputs) for labels in ([3, 1], [5, 5])]
    for scale, logits in logits_by_scale.items():
        weight = 1 + 1.5 * scale / last
        positions = slice(teacher.module.begin(scale), teacher.module.ends[scale])
        guided_logits = weight * halves[0][:, positions] + (1 - weight) * halves[1][:, positions]
        assert torch.allclose(logits, guided_logits, atol=1e-9) == masked


def test_an_image_decoded_in_scales_by_the_teacher_alone_equals_the_teacher_s() -> None:
    teacher = tiny_var()
    student = tiny_var_student(teacher)
    count = len(teacher.module.scales)
    arguments: dict[str, Any] = {"class_labels": [3, 1], "temperature": 0, "seed": 0, "output_type": "pt"}
    states: list[Any] = []
    for scale, branches in ((1.0, 1), (2.5, 2)):
        sampler = Distilled(t_list=(0, count), teacher=teacher)
        states.clear()
        out = paradec.generate_images(
            student, sampler=sampler, guidance_scale=scale, callback=lambda state, _: states.append(state), **arguments
        )
        expected = paradec.generate_images(teacher, guidance_scale=scale, **arguments)
        torch.testing.assert_close(out.images, expected.images)
        assert out.row_nfe == [count] * 2 and out.row_forwards == 2 * branches * count
        # every scale is evaluated once, and its keys and values are freed
        assert out.forwarded_tokens == 2 * branches * teacher.module.ends[-1] and len(states) == count
        assert states[0].teacher.store.data is None


@torch.no_grad()
def test_var_students_equal_a_plain_loop() -> None:
    student = tiny_var_student()
    stages = student.facts.stages
    state = decode(Distilled(), student, Distilled().start(student, [3], seed=0))
    x, book = state.noise, student.codes()
    for stage in (0, stages.second):
        num_kept, split = stages.data_counts[stage], stages.data_counts[stages.split]
        inputs = torch.cat((x[:, :num_kept], state.noise[:, num_kept:]), 1)
        continuous, logits = student.module(torch.tensor([3]), inputs, num_kept)
        ids = logits.argmax(-1)
        ids[:, :num_kept] = torch.cdist(inputs[0, :num_kept], book).argmin(-1)
        continuous[:, :num_kept] = inputs[:, :num_kept]
        x = torch.cat((book[ids[:, :split]], continuous[:, split:]), 1)
    torch.testing.assert_close(state.tokens, x, atol=1e-10, rtol=0)


def test_checkpoints_of_var_students_load(tmp_path: Path) -> None:
    student = tiny_var_student()
    weights, module = student.module.state_dict(), student.module
    arguments: dict[str, Any] = {"scales": module.scales, "heads": 2, "vq": student.vq, "dtype": "float64"}
    without_ema: dict[str, Tensor] = {name: tensor + 1 for name, tensor in weights.items()}
    buffers = {"lvl_1L": torch.zeros(1, 3, dtype=torch.int64), "attn_bias_for_masking": torch.zeros(1)}
    unbiased = {name: tensor for name, tensor in weights.items() if not name.endswith("zero_k_bias")}
    for nested in ({"trainer": {"ema_parameters": weights | buffers, "var_wo_ddp": without_ema}}, unbiased):
        assert_loads(tmp_path / "var-d16.pth", nested, student, rtol=0, atol=1e-9, **arguments)
    folder = tmp_path / "folder"
    folder.mkdir()
    fields = {"model_type": "distilled_var", "scales": list(module.scales), "heads": 2, "second": 1, "split": 2}
    (folder / "config.json").write_text(json.dumps(fields | {"defaults": {"steps": 1}}))
    save_file(weights, folder / "model.safetensors")
    loaded = paradec.load(folder, vq=student.vq, dtype="float64")
    assert (loaded.facts.stages.second, loaded.facts.stages.split, loaded.defaults["steps"]) == (1, 2, 1)
    refuses(lambda: load_distilled_var(folder), "needs its multi-scale VQ", CheckpointError)
    torch.save({"trainer": {"var_wo_ddp": weights}}, tmp_path / "var-d16.pth")
    with pytest.raises(CheckpointError, match="holds no weights by name"):  # "var_wo_ddp" is not the EMA
        load_distilled_var(tmp_path / "var-d16.pth", **(arguments | {"dtype": None}))
    for name in ("n_d_embed.weight", "layerwise_n_d_embed.2.bias", "final_layer_conti.scale_shift_table"):
        assert_missing(tmp_path / "var-d16.pth", weights, name, **arguments)


def test_published_stages() -> None:
    assert SECOND_STAGES == {1024: 5, 1280: 4, 1536: 4}
    sizes = {"n_layer": 1, "n_head": 16, "vocab_size": 8, "num_classes": 2, "ffn_dim": 8}
    published = [DistilledLlamaGenConfig(dim=dim, **sizes) for dim in (768, 1024)]
    assert [(config.second, config.split) for config in published] == [(80, 80), (80, 130)]
    scales = Stages((0, *scale_ends(PUBLISHED_SCALES[256])), 5, 5, scales=True)
    tokens = tiny_student(grid=16).facts.stages
    for name, calls in (("llamagen_l_", (22, 42, 81)), ("var_d16_", (3, 4, 6))):
        teacher, stages = (tiny_llamagen(), tokens) if name.startswith("llamagen") else (tiny_var(), scales)
        for count in calls:
            sampler = paradec.samplers.create("distilled", preset=f"{name}{count}", teacher=teacher)
            assert len(sampler.plan(stages, None)) == count


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
    arguments = ["image", "--model", str(folder), "--vq", str(vq), "--class", "1", "--out", str(tmp_path / "x.png")]
    with_teacher = ["--drafter", str(tmp_path / "teacher.safetensors"), "--set", "teacher_start=1"]
    for options, forwards in (([], "2 forwards"), (with_teacher, "3 forwards")):
        result = CliRunner().invoke(app, [*arguments, *options])
        assert result.exit_code == 0 and forwards in result.output, result.output
