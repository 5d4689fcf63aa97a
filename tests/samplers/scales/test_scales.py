"""VAR and CoDe: replays of both public implementations, and comparisons with plain loops."""

import copy
import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from decoding import refuses
from images import SCALES, tiny_var
from places import GOLDEN
from recorded import assert_checksum, image_case, image_cases, image_file, replays
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.protocol import decode
from paradec.models.images.multi_scale_vq import MultiScaleVQ, MultiScaleVQConfig, load_multi_scale_vq
from paradec.models.images.var import VARModel, load_var
from paradec.samplers.pictures.scales import VAR, CoDe

LABELS = [1, 3, 1]


def tokens_of(sampler: Any, model: VARModel, labels: Any = LABELS, **request: Any) -> Tensor:
    request = {"seed": 0, "guidance_scale": 2.0} | request
    return decode(sampler, model, sampler.start(model, labels, **request)).tokens


@pytest.mark.parametrize("shared_adaln", [False, True])
@pytest.mark.parametrize("l2_norm", [False, True])
def test_steps_with_a_store_equal_a_teacher_forced_forward(shared_adaln: bool, l2_norm: bool) -> None:
    model = tiny_var(shared_adaln=shared_adaln, l2_norm=l2_norm)
    module, labels = model.module, torch.tensor([1, 4, 2])
    ends, last = module.ends, len(SCALES) - 1
    codes = torch.randint(model.facts.vocab_size, (3, ends[-1]), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        inputs, _ = model.vq.inputs(model.codes[codes], SCALES)
        expected = module(labels, inputs)
        store = model.store(3, last)
        for scale, stop in enumerate(ends):
            begin = module.begin(scale)
            part = module(labels, inputs[:, max(begin - 1, 0) : stop - 1], scale, scale, store)
            torch.testing.assert_close(part, expected[:, begin:stop], atol=1e-10, rtol=0)
        second_store = model.store(3, last)
        module(labels, inputs[:, : ends[1] - 1], 0, 1, second_store)
        part = module(labels, inputs[:, ends[1] - 1 :], 2, last, second_store, wanted=2)
    torch.testing.assert_close(part, expected[:2, ends[-2] :], atol=1e-10, rtol=0)
    assert store.data is not None and second_store.data is not None
    assert store.nbytes == store.data.nbytes == 2 * 2 * 3 * module.width * ends[-2] * 8
    stop = ends[1]
    torch.testing.assert_close(store.data[..., :stop, :], second_store.data[..., :stop, :], atol=1e-12, rtol=0)


def test_scales_equal_plain_loops() -> None:
    model = tiny_var()
    module, vq = model.module, model.vq
    scale, total = 2.5, torch.zeros(1, 4, SCALES[-1], SCALES[-1], dtype=torch.float64)
    inputs, tokens = torch.zeros(1, 0, 4, dtype=torch.float64), []
    with torch.no_grad():
        for index, side in enumerate(SCALES):
            labels = torch.tensor([3, module.classes])  # the class, and no class
            logits = module(labels, inputs.expand(2, -1, -1), 0, index)[:, -(side**2) :]
            weight = (scale - 1) * index / (len(SCALES) - 1)
            best = ((1 + weight) * logits[0] - weight * logits[1]).argmax(-1)
            tokens += best.tolist()
            grid = vq.codes[best].T.reshape(1, 4, side, side)
            if index < len(SCALES) - 1:
                grid = torch.nn.functional.interpolate(grid, size=(SCALES[-1],) * 2, mode="bicubic")
            total = total + vq.quantize.quant_resi(grid, index / (len(SCALES) - 1))
            if index < len(SCALES) - 1:
                small = torch.nn.functional.interpolate(total, size=(SCALES[index + 1],) * 2, mode="area")
                inputs = torch.cat((inputs, small.flatten(2).mT), 1)
    actual = tokens_of(samplers.create("var"), model, [3], guidance_scale=scale, temperature=0)
    assert actual[0].tolist() == tokens
    torch.testing.assert_close(model.features(actual), total)


def test_the_code_sampler_with_one_model_equals_var() -> None:
    model = tiny_var()
    large = tiny_var(seed=5, width=12, depth=3, vq=model.vq)
    plain = samplers.create("var", temperatures=(1.1, 1.1, 1.1, 1.0))
    for split, alone in ((0, model), (len(SCALES), large)):
        code = samplers.create("code", drafter=large, split=split)
        state = decode(code, model, code.start(model, LABELS, seed=0, guidance_scale=2.0))
        assert torch.equal(state.tokens, tokens_of(plain, alone, top_k=600))
        calls = len(SCALES)
        assert (state.nfe[0], state.draft_nfe[0]) == ((calls, 0) if split == 0 else (0, calls))


@pytest.mark.parametrize("split", [1, 2, 3])
def test_every_split_equals_a_plain_loop(split: int) -> None:
    model = tiny_var()
    large = tiny_var(seed=5, width=12, depth=3, vq=model.vq)
    tokens = torch.zeros(1, 0, dtype=torch.int64)
    with torch.no_grad():
        for index in range(len(SCALES)):
            module = (large if index < split else model).module
            inputs = model.vq.inputs(model.codes[tokens], SCALES)[0]
            best = module(torch.tensor([2]), inputs, 0, index)[:, module.begin(index) :].argmax(-1)
            tokens = torch.cat((tokens, best), 1)
    code = samplers.create("code", drafter=large, split=split)
    state = code.start(model, [2], temperature=0)
    assert state.next_store is not None and state.next_store.data is None
    assert torch.equal(decode(code, model, state).tokens, tokens)
    assert (state.nfe[0], state.draft_nfe[0]) == (len(SCALES) - split, split)
    assert state.store is None and state.next_store is None
    # the first call of the small model evaluates the drafted scales again; nothing else is evaluated twice
    ends = model.module.ends
    assert state.forwarded_tokens[0] == ends[-1] and state.draft_counts[2, 0] == ends[split - 1]


def test_guidance_of_one_is_off() -> None:
    model = tiny_var()
    sampler = samplers.create("var")
    state = sampler.start(model, LABELS, seed=0)
    (query,) = sampler.query(state)
    assert query.branches == 1 and state.store.shape[2] == len(LABELS)
    decode(sampler, model, state)
    assert state.row_forwards[0] == len(SCALES)
    constant = samplers.create("var", guidance_schedule="constant")
    assert not torch.equal(tokens_of(sampler, model, temperature=0), tokens_of(constant, model, temperature=0))


def test_filters_and_temperatures() -> None:
    model = tiny_var()
    var = samplers.create("var")
    assert torch.equal(tokens_of(var, model, top_k=1), tokens_of(var, model, temperature=0))
    assert torch.equal(tokens_of(samplers.create("var", top_ks=(1, 1, 1, 1)), model), tokens_of(var, model, top_k=1))


def test_checkpoints_load_or_are_refused(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    model = tiny_var()
    weights, vq = model.module.state_dict(), model.vq.state_dict()
    save_file(vq, tmp_path / "vq.safetensors", metadata={"config": '{"norm_groups": 4}'})
    buffers = {"lvl_1L": torch.zeros(1, 30), "attn_bias_for_masking": torch.zeros(1, 1, 30, 30)}
    torch.save(weights | buffers, tmp_path / "var_tiny.pth")
    read = load_var(tmp_path / "var_tiny.pth", vq=tmp_path / "vq.safetensors", scales=SCALES, heads=2)
    loaded, var = VARModel(read.module.double(), read.vq.double()), samplers.create("var")
    assert torch.equal(tokens_of(var, loaded, temperature=0), tokens_of(var, model, temperature=0))
    incomplete = {name: value for name, value in weights.items() if "blocks.1.ffn" not in name}
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        (weights, {}, "30 tokens, unlike any published model's; give scales"),
        (weights, {"scales": (1, 2, 3, 5)}, "are 4 maps of 39 tokens; the weights have 4 maps of 30"),
        (incomplete, {"scales": SCALES}, "missing weights: blocks.1.ffn"),
        (weights | {"extra": torch.zeros(2)}, {"scales": SCALES}, "unexpected weights: extra"),
        (weights, {"scales": (2, 1)}, "must ascend"),
        ({"pos_1LC": torch.zeros(1, 30, 8)}, {"scales": SCALES}, "is missing"),
    ]
    for index, (content, options, message) in enumerate(cases):
        save_file(content, tmp_path / f"{index}.safetensors")
        with pytest.raises(ValueError, match=message) as raised:
            load_var(tmp_path / f"{index}.safetensors", vq=model.vq, **options)
        assert "\n" not in str(raised.value)
    refuses(lambda: load_var(tmp_path / "var_tiny.pth"), "needs its multi-scale VQ")
    smaller_vq = MultiScaleVQ(dataclasses.replace(model.vq.config, codebook_size=31))
    with pytest.raises(ValueError, match="the codebook has 31 entries; var_tiny predicts 32 codes"):
        load_var(tmp_path / "var_tiny.pth", vq=smaller_vq, scales=SCALES)
    save_file({k: v for k, v in vq.items() if "quant_resi" not in k}, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match="missing weights: quantize.quant_resi"):
        load_multi_scale_vq(tmp_path / "part.safetensors", norm_groups=4)
    refuses(lambda: MultiScaleVQConfig(codebook_embed_dim=4, z_channels=8), "z_channels=8 must be codebook_embed_dim=4")


def test_encode_equals_a_plain_loop() -> None:
    model = tiny_var()
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    tokens = model.encode(images)
    assert tokens.shape == (2, model.facts.ends[-1])
    residual = model.vq.features(images * 2 - 1)
    for index, side in enumerate(SCALES):
        reduced = torch.nn.functional.adaptive_avg_pool2d(residual, side).flatten(2).mT
        nearest = (reduced.unsqueeze(2) - model.codes).square().sum(-1).argmin(-1)
        begin = model.module.begin(index)
        assert torch.equal(tokens[:, begin : begin + side**2], nearest)
        residual = residual - model.vq.smooth_codes(model.codes[nearest], index, SCALES)
    refuses(lambda: model.encode(torch.rand(1, 3, 9, 8)), r"expected \[batch, channels, 8, 8\]")


def test_tokens_of_one_image_draw_independently() -> None:
    model = copy.deepcopy(tiny_var())
    with torch.no_grad():
        model.module.head.weight.zero_()
        model.module.head.bias.zero_()
    tokens = tokens_of(samplers.create("var"), model, [1] * 200)
    counts = torch.bincount(tokens.flatten(), minlength=32).double()
    expected = tokens.numel() / 32
    assert ((counts - expected).square() / expected).sum() < 66.6  # 31 degrees of freedom: p = 2e-4
    assert (tokens[:, 1:] == tokens[:, :-1]).double().mean() < 0.05
    assert (tokens[1:] == tokens[:-1]).double().mean() < 0.05


def test_the_image_command(tmp_path: Any) -> None:
    from safetensors.torch import save_file
    from typer.testing import CliRunner

    from paradec.cli import app

    vq = tmp_path / "vq.safetensors"
    small, large = tiny_var(), tiny_var(seed=5, width=12, depth=3)
    save_file(small.vq.float().state_dict(), vq, metadata={"config": '{"norm_groups": 4}'})
    for name, model in (("small", small), ("large", large)):
        metadata = {"config": '{"scales": [1, 2, 3, 4], "heads": 2}'}
        save_file(model.module.float().state_dict(), tmp_path / f"{name}.safetensors", metadata=metadata)
    arguments = ["image", "--model", str(tmp_path / "small.safetensors"), "--vq", str(vq), "--class", "1,2"]
    out = ["--seed", "0", "--out", str(tmp_path / "out.png")]
    result = CliRunner().invoke(app, [*arguments, *out])
    assert result.exit_code == 0 and ": 4 forwards (" in result.output, result.output
    code = ["--sampler", "code", "--set", "split=3", "--drafter", str(tmp_path / "large.safetensors")]
    result = CliRunner().invoke(app, [*arguments, *code, *out])
    assert result.exit_code == 0 and ": 1 forward (" in result.output, result.output
    result = CliRunner().invoke(app, [*arguments, *code[:-1], "digits-ar", *out])
    assert result.exit_code != 0
    assert "'digits-ar' is an autoregressive image model; small is a VAR model" in result.output
    result = CliRunner().invoke(app, [*arguments, "--sampler", "code", *out])
    assert result.exit_code != 0 and "--sampler code needs --drafter" in result.output


@lru_cache
def vae(name: str, dtype: torch.dtype = torch.float32) -> MultiScaleVQ:
    """Load a recorded model. name: such as "var/vae"."""
    return load_multi_scale_vq(image_file("", f"{name}.safetensors")).to(dtype)


@lru_cache
def model(system: str, name: str, dtype: torch.dtype = torch.float32) -> VARModel:
    record, _ = image_case(system, f"{name}.config")
    return load_var(image_file(system, f"{name}.safetensors"), vq=vae(record["vae"], dtype), dtype=dtype)


def dtype_of(record: dict[str, Any]) -> torch.dtype:
    """Return float64 if near-ties need it. Draws of a PyTorch generator stay in float32: in float64 they differ."""
    return torch.float32 if record["margin"] >= 1e-4 or "manual_seed" in record["draws"] else torch.float64


class RecordedDraws:
    """Draws the tokens of a recorded run, with its uniform numbers or its generator."""

    def __init__(self, record: dict[str, Any], arrays: dict[str, Tensor]):
        self.steps, self.arrays = record["steps"], arrays
        self.settings, self.draws = record["settings"], record["draws"]
        self.generator: torch.Generator | None = None
        if "manual_seed(" in self.draws:
            self.seed = int(self.draws.split("manual_seed(")[1].split(")")[0])
            self.generator = torch.Generator().manual_seed(self.seed)

    def tokens(self, index: int, logits: Tensor) -> Tensor:
        if self.generator is None:
            u = torch.tensor(self.steps[index]["u"], dtype=torch.float64).unsqueeze(-1)
            return (logits.double().softmax(-1).cumsum(-1) <= u).sum(-1)
        return torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=self.generator).view(logits.shape[:2])


@dataclass(frozen=True)
class ReplayedVAR(VAR):
    draws: Any = field(default=None, compare=False)

    def draw(self, state: Any, logits: Tensor) -> Tensor:
        return self.draws.tokens(state.index, logits)

    def noise(self, state: Any, logits: Tensor) -> Tensor:
        return -self.draws.arrays[f"exponential.{state.index}"].log()


@dataclass(frozen=True)
class ReplayedCoDe(CoDe):
    draws: Any = field(default=None, compare=False)

    def draw(self, state: Any, logits: Tensor) -> Tensor:
        draws = self.draws
        if draws.generator is not None and state.index == self.split and state.tokens[0, 0] >= 0:
            # the reference seeds the generator again for the refiner, which first draws the drafter's scales too
            draws.generator.manual_seed(draws.seed)
            for side in state.scales[: self.split]:
                draws.tokens(-1, torch.zeros(state.batch, side**2, logits.shape[-1]))
        return self.draws.tokens(state.index, logits)


def run(sampler: Any, network: VARModel, record: dict[str, Any], arrays: dict[str, Tensor], **request: Any) -> Any:
    """Decode, compare every recorded step and the image, and return the final state."""
    settings = record["settings"]
    request |= {"guidance_scale": 1 + settings["cfg"], "top_p": settings["top_p"] or None}
    state = sampler.start(network, settings["labels"], **request)
    smooth = settings.get("more_smooth", False)
    atol = 1e-3 if smooth else 1e-4
    with torch.inference_mode():
        for index, step in enumerate(record["steps"]):
            before, state_before = state.index, copy.copy(state)
            branches = state.branches
            (query,) = sampler.query(state)
            is_drafting = isinstance(sampler, CoDe) and sampler.is_drafting(state)
            source = sampler.drafter if is_drafting else network
            if "model" in step and step["model"]:
                assert is_drafting == (step["model"] == "draft")
            assert step["scale"] == state.index
            assert query.forwarded.tolist() == [step["evaluated"]] * state.batch
            answer = source(query)
            guided = sampler.apply_guidance(state, answer.logits)
            assert_checksum(guided, step["guided_logits"], 2e-5)
            if f"guided_logits.{index}" in arrays:
                torch.testing.assert_close(guided.float(), arrays[f"guided_logits.{index}"], atol=1e-4, rtol=0)
            if answer.logits.numel() == step["raw_logits"][0]:  # a guidance branch without weight is not evaluated
                assert_checksum(answer.logits, step["raw_logits"])
            assert step["rows"] == 2 * state.batch
            if branches == 2:  # without guidance the reference evaluates an unused branch
                stop = state.ends[state.index]
                assert step["cached"] == stop
                if query.store.data is not None and query.store.shape[4] >= stop:  # the last scale is not stored
                    for layer, pair in zip(query.store.data, step["kv"], strict=True):
                        for values, checksum in zip(layer, pair, strict=True):
                            assert_checksum(values[:, :, :stop], checksum)
            proposal = sampler.step(network, state)
            assert proposal.values.tolist() == step["tokens"]
            sampler.commit(state, proposal)
            assert state.index == before + 1
            if not smooth:
                assert_checksum(state.feature_map, step["f_hat"])
            if proposal.next_inputs is not None and not smooth:
                side = state.scales[state.index]
                assert_checksum(proposal.next_inputs.mT.unflatten(-1, (side, side)), step["next_input"])
            if "soft_codes" in step:
                filtered = sampler.apply_filters(state_before, guided)
                distribution = sampler.blend_codes(state_before, filtered, torch.eye(filtered.shape[-1]))
                assert_checksum(distribution, step["soft_codes"], 1e-3)
    assert state.done and state.store is None
    torch.testing.assert_close(state.feature_map.float(), arrays["f_hat"], atol=atol, rtol=0)
    images = network.decode(state.tokens if state.codes is None else state.codes)
    assert list(images.shape) == record["image_shape"]
    assert_checksum(images, record["image"], 1e-3 if smooth else 1e-4)
    if "image" in arrays:
        torch.testing.assert_close(images[:1].float(), arrays["image"], atol=atol, rtol=0)
    return state


@pytest.mark.thinned
@pytest.mark.parametrize("name", image_cases("var", "steps"))
@replays("name", "var/")
def test_var_replays(name: str) -> None:
    record, arrays = image_case("var", name)
    settings = record["settings"]
    sampler = ReplayedVAR(smooth=settings["more_smooth"], draws=RecordedDraws(record, arrays))
    if sampler.draws.generator is not None and settings["more_smooth"]:
        # the reference draws tokens and noise from one generator; use the recorded tokens and noise
        sampler.draws.tokens = lambda index, logits: torch.tensor(record["steps"][index]["tokens"])
    network = model("var", record["model"], dtype_of(record))
    state = run(sampler, network, record, arrays, top_k=settings["top_k"] or None)
    assert state.nfe.tolist() == [record["calls"]] * state.batch


@pytest.mark.thinned
@pytest.mark.parametrize("name", image_cases("code", "steps"))
@replays("name", "code/")
def test_code_sampler_replays(name: str) -> None:
    record, arrays = image_case("code", name)
    settings = record["settings"]
    refiner = model("var", record["refiner"], dtype_of(record))
    top_ks, temperatures = tuple(settings["top_k"]), tuple(settings["temperature"])
    fields = {"split": settings["draft_steps"], "top_ks": top_ks, "temperatures": temperatures}
    drafter = model("code", record["drafter"], dtype_of(record))
    sampler = ReplayedCoDe(drafter=drafter, draws=RecordedDraws(record, arrays), **fields)
    state = run(sampler, refiner, record, arrays)
    assert state.draft_nfe.tolist() == [record["draft_calls"]] * state.batch
    assert state.nfe.tolist() == [record["refine_calls"]] * state.batch
    split = settings["draft_steps"]
    if 0 < split < len(state.scales):
        inputs = state.inputs[:, : state.ends[split] - 1]
        assert_checksum(inputs, record["handed_over_inputs"])
        if "handed_over.inputs" in arrays:
            torch.testing.assert_close(inputs.float(), arrays["handed_over.inputs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", image_cases("var", "reconstruction"))
@replays("name", "var/")
def test_pictures_become_codes(name: str) -> None:
    record, arrays = image_case("var", name)
    vq, scales = vae(f"var/{record['model']}"), tuple(record["patch_nums"])
    with torch.no_grad():
        features = vq.features(arrays["picture"])
        codes = vq.quantise(features, scales)
        inputs, total = vq.inputs(torch.cat([vq.codes[ids] for ids in codes], 1), scales)
        decoded = vq.decode(total).clamp(-1, 1)
    torch.testing.assert_close(features, arrays["features"], atol=1e-4, rtol=0)
    assert [ids.tolist() for ids in codes] == record["codes"]
    torch.testing.assert_close(inputs, arrays["teacher_inputs"], atol=1e-4, rtol=0)
    assert_checksum(inputs, record["teacher_inputs"], 1e-4)
    assert_checksum(decoded, record["reconstruction"], 1e-4)
    torch.testing.assert_close(decoded, arrays["reconstruction"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", image_cases("var", "logits"))
@replays("name", "var/")
def test_all_scales_at_once(name: str) -> None:
    record, arrays = image_case("var", name)
    network = model("var", record["model"])
    ids = torch.cat([torch.tensor(scale) for scale in record["codes"]], 1)
    with torch.no_grad():
        inputs, _ = network.vq.inputs(network.vq.codes[ids], network.module.scales)
        torch.testing.assert_close(inputs, arrays["inputs"], atol=1e-4, rtol=0)
        logits = network.module(torch.tensor(record["labels"]), arrays["inputs"])
    torch.testing.assert_close(logits, arrays["logits"], atol=1e-4, rtol=0)


def test_load_recognises_a_var_checkpoint() -> None:
    folder = GOLDEN / "next-image" / "var"
    assert isinstance(paradec.load(folder / "model-c.safetensors", vq=folder / "vae.safetensors"), VARModel)
