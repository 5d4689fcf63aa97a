"""Models that call their blocks in special ways, and loops without scheduler steps."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import covering, refuses
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    QwenImage21Pipeline,
    SkyReelsV2DiffusionForcingPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    models,
)
from diffusers.models.transformers import (
    transformer_bria_fibo2,
    transformer_cosmos3,
    transformer_flux3,
    transformer_qwenimage21,
    transformer_rfd4_proteina,
)
from PIL import Image
from pipelines import flux_pipeline, loop_pipeline, run_flux
from torch import Tensor, nn

import paradec
from paradec import (
    AccumulatedChange,
    DBCache,
    DiCache,
    EasyCache,
    Every,
    FirstBlock,
    MagCache,
    SeaCache,
    TaylorSeer,
    accelerate,
)
from paradec.integrations.diffusers.calibration import calibrate_magcache
from paradec.integrations.diffusers.hooks.blocks import order_axes

Make = Callable[[], tuple[nn.Module, dict[str, Any], str, tuple[int, ...]]]
"""A function that returns a transformer, the inputs of a call, the name of the latent input, and its shape."""


def _kandinsky() -> Any:
    module = models.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=32, ff_dim=64, num_text_blocks=2, num_visual_blocks=4, axes_dims=(4, 6, 6), visual_cond=False,
    )  # fmt: skip
    rope = [torch.arange(1), torch.arange(4), torch.arange(4)]
    inputs: dict[str, Any] = {"encoder_hidden_states": torch.randn(1, 7, 12), "pooled_projections": torch.randn(1, 8)}
    inputs |= {"visual_rope_pos": rope, "text_rope_pos": torch.arange(7)}
    return module, inputs, "hidden_states", (1, 1, 8, 8, 4)


def _flux3() -> Any:
    module = transformer_flux3.Flux3Transformer2DModel(
        in_channels=4, cond_in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4), torch.arange(1)).float()
    inputs = {"encoder_hidden_states": torch.randn(1, 6, 12), "img_ids": ids, "txt_ids": torch.zeros(6, 4)}
    return module, inputs, "hidden_states", (1, 16, 4)


def _lumina2() -> Any:
    module = models.Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=3, num_refiner_layers=2,
        num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64),
        cap_feat_dim=8,
    )  # fmt: skip
    mask = torch.ones(1, 6, dtype=torch.bool)
    inputs = {"encoder_hidden_states": torch.randn(1, 6, 8), "encoder_attention_mask": mask}
    return module, inputs, "hidden_states", (1, 4, 8, 8)


def _cosmos3() -> Any:
    module = transformer_cosmos3.Cosmos3OmniTransformer(
        head_dim=6, hidden_act="relu2", hidden_size=12, intermediate_size=24, latent_channel=2, latent_patch_size=1,
        num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=1, patch_latent_dim=2, qk_norm_for_text=False,
        rms_norm_eps=1e-5, rope_axes_dim=[1, 1, 1], rope_theta=1e8, vocab_size=32,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.tensor([1, 2]), "text_indexes": torch.tensor([0, 1]), "und_len": 2, "sequence_length": 3,
        "position_ids": torch.zeros(3, 3, dtype=torch.long), "vision_token_shapes": [(1, 1, 1)],
        "vision_sequence_indexes": torch.tensor([2]), "vision_mse_loss_indexes": torch.tensor([2]),
        "vision_timesteps": torch.ones(1), "vision_noisy_frame_indexes": [torch.tensor([0])],
    }  # fmt: skip
    return module, inputs, "vision_tokens", (1, 2, 1, 1, 1)


def _ltx2() -> Any:
    module = models.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, patch_size=1, patch_size_t=1, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
        audio_attention_head_dim=4, audio_cross_attention_dim=8, num_layers=2, qk_norm="rms_norm_across_heads",
        caption_channels=16, rope_double_precision=False,
    )  # fmt: skip
    inputs = {
        "audio_hidden_states": torch.randn(1, 3, 4), "encoder_hidden_states": torch.randn(1, 5, 16),
        "audio_encoder_hidden_states": torch.randn(1, 5, 16), "num_frames": 2, "height": 2, "width": 2, "fps": 25.0,
        "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool), "audio_num_frames": 3,
    }  # fmt: skip
    return module, inputs, "hidden_states", (1, 8, 4)


def _vace() -> Any:
    module = models.WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True, rope_max_seq_len=32, vace_layers=[0, 2],
        vace_in_channels=8,
    )  # fmt: skip
    inputs = {"encoder_hidden_states": torch.randn(1, 6, 16), "control_hidden_states": torch.randn(1, 8, 2, 4, 4)}
    return module, inputs, "hidden_states", (1, 4, 2, 4, 4)


def _latte() -> Any:
    module = models.LatteTransformer3DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, caption_channels=8,
        in_channels=4, cross_attention_dim=16, out_channels=4, attention_bias=True, video_length=3,
        norm_type="ada_norm_single", num_embeds_ada_norm=1000, norm_elementwise_affine=False,
        activation_fn="gelu-approximate",
    )  # fmt: skip
    return module, {"encoder_hidden_states": torch.randn(1, 5, 8)}, "hidden_states", (1, 4, 3, 8, 8)


def _cosmos() -> Any:
    module = models.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), concat_padding_mask=False,
    )  # fmt: skip
    inputs = {"encoder_hidden_states": torch.randn(1, 12, 16), "attention_mask": torch.ones(1, 12), "fps": 30}
    return module, inputs, "hidden_states", (1, 4, 1, 16, 16)


def _fibo2() -> Any:
    module = transformer_bria_fibo2.BriaFibo2Transformer2DModel(
        in_channels=4, dim=32, n_layers=3, n_refiner_layers=1, n_heads=2, cap_feat_dim=8, injection_layer_ids=(1,),
        perceiver_num_layers=1, min_num_gist_tokens=4, max_num_gist_tokens=8, gist_step=4, gist_min_text_len=4,
        gist_max_text_len=16, axes_dims=(4, 6, 6), axes_lens=(64, 64, 64),
    )  # fmt: skip
    return module, {"encoder_hidden_states": torch.randn(1, 2, 6, 8)}, "hidden_states", (1, 4, 8, 8)


def _rfd4() -> Any:
    module = transformer_rfd4_proteina.RFD4ProteinaTransformer(
        nlayers=2, token_dim=16, nheads=2, dim_cond=8, pair_repr_dim=8, latent_dim=4, token_type_emb_dim=4,
        cath_emb_dim=4, t_emb_dim=8, seq_sep_dim=8, xt_pair_dist_dim=6, feats_seq=("xt_bb_ca", "xt_local_latents"),
        feats_cond_seq=("time_emb_bb_ca",), feats_pair_repr=("xt_bb_ca_pair_dists",), tri_mult_c=8,
    )  # fmt: skip
    conditioning = {"is_in_context_conditioning": torch.zeros(1, 6), "supports_local_latent": torch.ones(1, 6)}
    inputs = {
        "local_latents": torch.randn(1, 6, 4), "local_latents_time": torch.ones(1), "conditioning": conditioning,
        "padding_mask": torch.ones(1, 6, dtype=torch.bool),
    }  # fmt: skip
    return module, inputs, "bb_ca", (1, 6, 3)


MAKE: dict[str, Make] = {
    "Kandinsky5": _kandinsky, "Flux3": _flux3, "Lumina2": _lumina2, "Cosmos3": _cosmos3, "LTX2": _ltx2, "VACE": _vace,
    "Latte": _latte, "Cosmos": _cosmos, "BriaFibo2": _fibo2, "RFD4": _rfd4,
}  # fmt: skip


class Loop:
    """A pipeline that draws its latents, with a scale that grows in every step, instead of denoising them."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.transformer, self.inputs, self.latent, self.shape = MAKE[name]()
        for parameter in self.transformer.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.12)
        self.transformer.eval().requires_grad_(False)
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def __call__(self, steps: int = 6) -> list[Tensor]:
        draw, outputs = torch.Generator().manual_seed(2), []
        self.scheduler.set_timesteps(steps)
        for i, time in enumerate(self.scheduler.timesteps):
            latent = torch.randn(self.shape, generator=draw) * (1 + 5 * i)
            inputs = self.inputs | {self.latent: [latent] if self.latent == "vision_tokens" else latent}
            if self.latent != "vision_tokens":
                inputs["bb_ca_time" if self.latent == "bb_ca" else "timestep"] = time[None]
            output = self.transformer(**inputs, return_dict=False)[0]
            outputs.append(output[0] if isinstance(output, list) else output)
            self.scheduler.step(torch.zeros(1), time, torch.zeros(1))
        return outputs


MEASURES = {
    "first_block": FirstBlock(1e-6),
    "dbcache": DBCache(1, residual_diff_threshold=1e-6, max_warmup_steps=1),
    "dicache": DiCache(1e-6, retention_ratio=0.0),
    "change": AccumulatedChange(1e-6),
    "hidden": AccumulatedChange(1e-6, watch="hidden"),
    "teacache": paradec.TeaCache(1e-6),
}


@pytest.mark.parametrize(("name", "rule"), covering(MAKE, MEASURES))
def test_rules_measure_the_denoised_stream(name: str, rule: str) -> None:
    loop = Loop(name)
    plain = loop()
    with accelerate(loop, MEASURES[rule]) as session:
        assert all(map(torch.equal, loop(), plain))
        report = session.report()
    assert report.full_steps == list(range(6)), report
    assert "nothing was skipped: " in str(report) and "at each of 6 steps; a larger threshold skips" in str(report)
    assert report.evaluated_share == 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (FirstBlock, "first_block"),
        (lambda threshold: DBCache(1, residual_diff_threshold=threshold, max_warmup_steps=1), "dbcache"),
        (paradec.TeaCache, "teacache"),
        (lambda threshold: EasyCache(threshold, ret_steps=2), "easycache"),
        (lambda threshold: DiCache(threshold, retention_ratio=0.4), "dicache"),
        (SeaCache, "seacache"),
    ],
)
def test_the_report_names_a_threshold_that_skips(make: Callable[[float], Any], name: str) -> None:
    loop, threshold = Loop("Latte"), 1e-6
    for skips in (False, True):
        with accelerate(loop, make(threshold)) as session:
            loop()
            report = session.report()
        assert (report.full_steps != list(range(6))) is skips, report
        if not skips:
            match = re.search(r"the smallest change was (\S+), so a threshold of (\S+) would", str(report))
            assert match is not None and 0 < float(match[1]) < float(match[2]) < 1.02 * float(match[1])
            threshold = float(match[2])
            assert f"nothing was skipped: {name} " in str(report) and min(report.changes) > 0


@pytest.mark.parametrize(("name", "where"), covering(MAKE, ["module", "block", "stack", "output"]))
def test_forecasts_of_every_part(name: str, where: str) -> None:
    loop = Loop(name)
    plain = loop()
    with accelerate(loop, TaylorSeer(3, where=where)) as session:
        outputs = loop()
        assert session.report().full_steps == [0, 3] and session.report().evaluated_share == 1 / 3
    assert all(torch.equal(outputs[i], plain[i]) for i in (0, 3)) and all(o.isfinite().all() for o in outputs)
    assert all(map(torch.equal, loop(), plain))


@pytest.mark.parametrize("text_length", [100, 230], ids=["unequal", "equal"])
def test_text_and_image_of_the_same_padded_length(text_length: int) -> None:
    torch.manual_seed(0)
    module = models.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=3, n_refiner_layers=2, n_heads=2,
        n_kv_heads=2, qk_norm=True, cap_feat_dim=16, rope_theta=256.0, t_scale=1000.0, axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )  # fmt: skip
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    module.eval().requires_grad_(False)
    inputs = {"x": [torch.randn(4, 1, 32, 32)], "cap_feats": [torch.randn(text_length, 16)], "return_dict": False}
    full = module(**inputs, t=torch.tensor([0.5]))[0][0]
    for sampler in (TaylorSeer(3, where="stack"), FirstBlock(0.1), DBCache(1, max_warmup_steps=1)):
        pipe = SimpleNamespace(transformer=module, scheduler=FlowMatchEulerDiscreteScheduler())
        with accelerate(pipe, sampler) as session:
            pipe.scheduler.set_timesteps(4)
            for time in pipe.scheduler.timesteps:
                torch.testing.assert_close(module(**inputs, t=torch.tensor([0.5]))[0][0], full)
                pipe.scheduler.step(torch.zeros(1), time, torch.zeros(1))
            assert session.report().evaluated_share < 1


def tiny_wan(seed: int, cls: Any = models.WanTransformer3DModel, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    module = cls(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32, **options,
    )  # fmt: skip
    return module.eval().requires_grad_(False)


def tiny_wan_vae() -> nn.Module:
    return AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip


def flow_scheduler() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


@pytest.mark.parametrize("is_custom", [False, True], ids=["pipeline", "loop"])
def test_loops_that_do_not_step_the_scheduler(is_custom: bool) -> None:
    module = tiny_wan(0, models.SkyReelsV2Transformer3DModel, inject_sample_info=False)
    pipe = SkyReelsV2DiffusionForcingPipeline(None, None, module, tiny_wan_vae(), flow_scheduler())
    text = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(5))

    def run() -> Tensor:
        draw = torch.Generator().manual_seed(1)
        if not is_custom:
            return pipe(
                prompt=None, prompt_embeds=text, negative_prompt_embeds=-text, height=32, width=32, num_frames=9,
                num_inference_steps=10, guidance_scale=3.0, output_type="latent", generator=draw,
            ).frames  # fmt: skip
        pipe.scheduler.set_timesteps(10)
        latent = torch.randn(1, 4, 3, 4, 4, generator=draw)
        for sigma, next_sigma, time in zip(pipe.scheduler.sigmas, pipe.scheduler.sigmas[1:], pipe.scheduler.timesteps):
            speed = module(hidden_states=latent, timestep=time[None], encoder_hidden_states=text, return_dict=False)[0]
            latent = latent + (next_sigma - sigma) * speed
        return latent

    plain = run()
    with accelerate(pipe, TaylorSeer(4)) as session:
        first = run()
        assert session.report().full_steps == [0, 4, 8]
        assert len(session.report().calls) == (10 if is_custom else 20)
        peak = session.report().bytes
        assert torch.equal(run(), first) and session.report().bytes == peak
    with accelerate(pipe, TaylorSeer(1)):
        assert torch.equal(run(), plain)
    pipe.scheduler.set_timesteps(5)
    with accelerate(pipe, TaylorSeer(4)) as session:
        module(hidden_states=plain[:, :4], timestep=torch.ones(1), encoder_hidden_states=text)
        assert "nothing was skipped: no transformer was called in a run" in str(session.report())


def test_two_transformers_are_calibrated_and_reported() -> None:
    pipe = WanPipeline(None, None, tiny_wan_vae(), flow_scheduler(), tiny_wan(0), tiny_wan(1), boundary_ratio=0.8)
    text = torch.randn(1, 7, 16)

    def run(steps: int) -> None:
        pipe(
            prompt_embeds=text, negative_prompt_embeds=-text, height=16, width=16, num_frames=5, guidance_scale=3.0,
            num_inference_steps=steps, output_type="latent", generator=torch.Generator().manual_seed(1),
        )  # fmt: skip

    with accelerate(pipe, TaylorSeer(interval=4)) as session:
        run(12)
        full = [(call.transformer, call.step) for call in session.report().calls if call.kind == "full"]
    first_full = dict(reversed(full))  # the first full step of each transformer, before which it cannot forecast
    assert first_full["transformer"] == 0 < first_full["transformer_2"] and len(full) < 24
    ratios = calibrate_magcache(pipe, lambda: run(12))
    assert len(ratios.values) == 12
    with accelerate(pipe, MagCache(ratios, threshold=0.5)) as session:
        run(12)
        calls = session.report().calls
        assert {call.transformer for call in calls} == {"transformer", "transformer_2"} and len(calls) == 24
        assert session.report().evaluated_share < 1
        pipe.register_to_config(boundary_ratio=0.0)
        run(6)  # uses only the first transformer
        assert len(session.report().calls) == 12
        assert {call.transformer for call in session.report().calls} == {"transformer"}


def test_magcache_uses_the_end_of_its_table() -> None:
    pipe = flux_pipeline()
    torch.manual_seed(0)
    vae = AutoencoderKL(
        sample_size=32, block_out_channels=(4,), latent_channels=1, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5,
    ).eval()  # fmt: skip
    pipe = FluxImg2ImgPipeline.from_pipe(pipe, vae=vae)
    image = Image.fromarray((np.random.RandomState(0).rand(16, 16, 3) * 255).astype("uint8"))
    with accelerate(pipe, MagCache([1.0] * 10 + [0.5] * 10, retention_ratio=0.0)) as session:
        for strength, kinds in ((1.0, "F---F---F-" + "F" * 10), (0.5, "F" * 10)):
            pipe(
                image=image, strength=strength, prompt_embeds=torch.randn(1, 8, 32), height=16, width=16,
                pooled_prompt_embeds=torch.randn(1, 32), num_inference_steps=20, output_type="latent",
            )  # fmt: skip
            assert "".join("F" if call.kind == "full" else "-" for call in session.report().calls) == kinds


def test_compiling_while_accelerated() -> None:
    for where in ("module", "stack", "output"):
        pipe = flux_pipeline()
        with accelerate(pipe, TaylorSeer(3, where=where)):
            first = run_flux(pipe, 4)
            pipe.transformer.compile(backend="eager")
            if where == "output":
                torch.testing.assert_close(run_flux(pipe, 4), first)
            else:
                refuses(partial(run_flux, pipe, 4), "compiled as a whole.*where='output'")


@pytest.mark.parametrize("rule", ["seacache", EasyCache(1e9, ret_steps=2)])
def test_rules_of_latents_on_qwen_image_21(rule: Any) -> None:
    """The pipeline has a method for cells of 2 x 2, but packs no latents. Text tokens precede image tokens."""

    class Processor:
        tokenizer = SimpleNamespace(encode=lambda text: [5], convert_tokens_to_ids=lambda text: 5)

        def apply_chat_template(self, *args: Any, **options: Any) -> list[list[int]]:
            return [[1, 2]]

    Processor.__module__ = "transformers"
    torch.manual_seed(0)
    module = transformer_qwenimage21.QwenImage21Transformer2DModel(
        in_channels=8, out_channels=8, num_layers=3, attention_head_dim=16, num_attention_heads=2, context_in_dim=12,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    module.eval().requires_grad_(False)
    pipe = QwenImage21Pipeline(FlowMatchEulerDiscreteScheduler(), None, None, Processor(), module)
    pipe.latent_channels = 8
    call = {"prompt_embeds": torch.ones(1, 5, 12), "height": 64, "width": 64, "num_inference_steps": 12}
    with accelerate(pipe, rule) as session:
        for use_kv_cache in (True, False):
            pipe(**call, output_type="latent", use_kv_cache=use_kv_cache)
            assert session.report().evaluated_share < 1


def test_seacache_filters_frames_rows_and_columns() -> None:
    """Kandinsky's latents are [B, frames, rows, columns, C], with conditions behind the latent's channels."""
    loop, latents, steps, total = Loop("Kandinsky5"), [], [0], 0.0
    record = lambda module, args, kwargs: latents.append(kwargs["hidden_states"][0].double().numpy())  # noqa: E731
    handle = loop.transformer.register_forward_pre_hook(record, with_kwargs=True)
    with accelerate(loop, SeaCache(3.0)) as session:
        loop(9)
    handle.remove()
    filtered = []
    for latent, level in zip(latents, loop.scheduler.sigmas.double().clamp(1e-6, 1 - 1e-6).tolist(), strict=False):
        gain = np.ones(())
        for length in latent.shape[:3]:
            power = 1 / (np.abs(np.fft.fftfreq(length)) ** 3 + 1e-16)
            gain = gain[..., None] * ((1 - level) * power / ((1 - level) ** 2 * power + level**2 + 1e-16))
        spectrum = np.fft.fftn(latent, axes=(0, 1, 2)) * (gain / gain.mean())[..., None]
        filtered.append(np.fft.ifftn(spectrum, axes=(0, 1, 2)).real)
    for step in range(1, 9):
        total += np.abs(filtered[step] - filtered[step - 1]).mean() / np.abs(filtered[step - 1]).mean()
        if step == 8 or total >= 3 or step - steps[-1] > 2:
            steps, total = [*steps, step], 0.0
    assert session.report().full_steps == steps == [0, 2, 4, 6, 8]
    assert order_axes(loop.transformer, torch.ones(1, 2, 6, 8, 9)).shape == (1, 4, 2, 6, 8)
    cogvideo = models.CogVideoXTransformer3DModel(2, 8, 4, num_layers=1, text_embed_dim=4, time_embed_dim=4)
    assert order_axes(cogvideo, torch.ones(1, 3, 4, 6, 8)).shape == (1, 4, 3, 6, 8)


def test_every_without_an_interval() -> None:
    loop, inputs = loop_pipeline("SD3")
    for steps, full in ((8, [0, 2, 4, 6]), (9, [0, 5])):
        with accelerate(loop, Every()) as session:
            loop(inputs, steps)
            assert session.report().full_steps == full
