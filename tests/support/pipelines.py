"""Small pipelines and transformers of diffusers, and functions that run them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from places import GOLDEN
from safetensors.torch import load_file
from small_models import END, MASK
from torch import Tensor, nn

import paradec
from paradec import schedulers
from paradec.integrations.diffusers.hooks.block_cache import BlockCausalModule

TRACES = GOLDEN / "diffusion"
FACTS = json.loads((TRACES / "golden_latents.json").read_text())


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the `id` of every attribute of a module and its submodules, to detect changes."""
    return {name: {key: id(value) for key, value in vars(child).items()} for name, child in module.named_modules()}


def tiny_dit(dtype: torch.dtype = torch.float32) -> DiTTransformer2DModel:
    module = DiTTransformer2DModel(**FACTS["dit"]["transformer"])
    module.load_state_dict(load_file(TRACES / "golden_tiny_dit.safetensors"))
    return module.to(dtype).eval()


def noise(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 4, 8, 8, generator=torch.Generator().manual_seed(3)).to(dtype)


def dit_pipeline(facts: dict[str, Any] = FACTS, weights: Path = TRACES / "golden_tiny_dit.safetensors") -> DiTPipeline:
    module = DiTTransformer2DModel(**facts["dit"]["transformer"])
    module.load_state_dict(load_file(weights))
    torch.manual_seed(facts["dit"]["vae_seed"])
    return DiTPipeline(module.eval(), AutoencoderKL(**facts["dit"]["vae"]).eval(), DDIMScheduler())


def run_dit(pipe: DiTPipeline, steps: int = 20, **options: Any) -> Tensor:
    """Run the pipeline, and return the latent that the VAE gets, multiplied by the scaling factor."""
    latents: list[Tensor] = []
    decode = pipe.vae.decode
    pipe.vae.decode = lambda latent: latents.append(latent * pipe.vae.config.scaling_factor) or decode(latent)
    try:
        call = {"class_labels": [1, 2], "guidance_scale": 4.0, "num_inference_steps": steps, "output_type": "np"}
        pipe(**call | {"generator": torch.Generator("cpu").manual_seed(42)} | options)
    finally:
        del pipe.vae.decode
    return latents[0]


def flux_pipeline(
    facts: dict[str, Any] = FACTS, weights: Path = TRACES / "golden_tiny_flux.safetensors"
) -> FluxPipeline:
    module = FluxTransformer2DModel(**facts["flux"]["transformer"])
    module.load_state_dict(load_file(weights))
    torch.manual_seed(facts["flux"]["vae_seed"])
    vae = AutoencoderKL(**facts["flux"]["vae"]).eval()
    absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, transformer=module.eval(), **absent)


def run_flux(pipe: FluxPipeline, steps: int = 16, **options: Any) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(7)
    prompt = {"prompt_embeds": torch.randn(1, 8, 32, generator=draw)}
    prompt["pooled_prompt_embeds"] = torch.randn(1, 32, generator=draw)
    call = {"height": 16, "width": 16, "num_inference_steps": steps, "guidance_scale": 3.5, "output_type": "latent"}
    return pipe(**prompt | call | {"generator": torch.Generator("cpu").manual_seed(42)} | options).images


def _sd3() -> tuple[nn.Module, dict[str, Tensor]]:
    from diffusers import SD3Transformer2DModel

    module = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return module, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "pooled_projections": torch.randn(2, 16),
    }


def _pixart() -> tuple[nn.Module, dict[str, Tensor]]:
    from diffusers import PixArtTransformer2DModel

    module = PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, caption_channels=16,
        in_channels=4, cross_attention_dim=16, out_channels=8, num_embeds_ada_norm=1000,
        use_additional_conditions=False,
    )  # fmt: skip
    return module, {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 7, 16)}


def _sana() -> tuple[nn.Module, dict[str, Tensor]]:
    from diffusers import SanaTransformer2DModel

    module = SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16,
        sample_size=8, patch_size=1,
    )  # fmt: skip
    return module, {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 7, 16)}


def _wan() -> tuple[nn.Module, dict[str, Tensor]]:
    from diffusers import WanTransformer3DModel

    module = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    return module, {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 16)}


def _hunyuan_video() -> tuple[nn.Module, dict[str, Tensor]]:
    from diffusers import HunyuanVideoTransformer3DModel

    module = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=False,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return module, {
        "hidden_states": torch.randn(1, 4, 1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "encoder_attention_mask": torch.ones(1, 7),
        "pooled_projections": torch.randn(1, 8),
    }


def _qwen_image() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import QwenImageTransformer2DModel

    module = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return module, {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 16, 16),  # as long as the image, so that shapes do not identify it
        "encoder_hidden_states_mask": torch.ones(1, 16, dtype=torch.long),
        "img_shapes": [(1, 4, 4)],
    }


def _dit() -> tuple[nn.Module, dict[str, Tensor]]:
    module = DiTTransformer2DModel(**FACTS["dit"]["transformer"])
    return module, {"hidden_states": torch.randn(2, 4, 8, 8), "class_labels": torch.tensor([1, 1000])}


def _flux() -> tuple[nn.Module, dict[str, Tensor]]:
    return FluxTransformer2DModel(**FACTS["flux"]["transformer"]), {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 16, 32),  # as long as the image
        "pooled_projections": torch.randn(1, 32),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(16, 3),
    }


TRANSFORMERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "DiT": _dit, "FLUX": _flux, "SD3": _sd3, "PixArt": _pixart, "Sana": _sana, "Wan": _wan,
    "HunyuanVideo": _hunyuan_video, "QwenImage": _qwen_image,
}  # fmt: skip


def tiny_transformer(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """Return a transformer with random nonzero weights, and the inputs of one call except the timestep."""
    torch.manual_seed(seed)
    module, inputs = TRANSFORMERS[name]()
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return module.eval().requires_grad_(False), inputs


def denoise(module: nn.Module, inputs: dict[str, Any], steps: int = 12, calls: int = 1) -> Tensor:
    """Denoise by Euler steps, each on the mean output of `calls` calls; all but the first get the negated text."""
    latent = inputs["hidden_states"].clone()
    with torch.no_grad():
        for i in range(steps):
            time = torch.full((len(latent),), 1000.0 * (steps - i) / steps)
            time = time.long() if isinstance(module, DiTTransformer2DModel) else time
            total = torch.zeros_like(latent)
            for call in range(calls):
                arguments = inputs | {"hidden_states": latent, "timestep": time}
                if call:
                    arguments["encoder_hidden_states"] = -inputs["encoder_hidden_states"]
                output = module(**arguments, return_dict=False)[0]
                if output.shape != latent.shape:  # a learned variance
                    output = output[:, : latent.shape[1]]
                total = total + output / calls
            latent = latent - total / steps
    return latent


def check_bound(pipe: Any, sampler: paradec.Forecast, size: int, run: Callable[[], Any]) -> None:
    """Assert that `max_memory=size` is enough for a run, and that one byte less raises an error."""
    with paradec.accelerate(pipe, dataclasses.replace(sampler, max_memory=size)) as session:
        run()
        assert session.report().bytes == size
    bound = dataclasses.replace(sampler, max_memory=size - 1)
    with paradec.accelerate(pipe, bound), pytest.raises(ValueError, match=f"max_memory={size - 1}: where=.* needs "):
        run()


def wan_pipeline() -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    module, _ = tiny_transformer("Wan")
    torch.manual_seed(1)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=module)


def run_wan(pipe: Any, steps: int = 12, **options: Any) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(7)
    texts = {"prompt_embeds": torch.randn(1, 7, 16, generator=draw)}
    texts["negative_prompt_embeds"] = torch.randn(1, 7, 16, generator=draw)
    call = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": steps, "output_type": "latent"}
    call |= {"guidance_scale": 3.0, "generator": torch.Generator("cpu").manual_seed(42)}
    return pipe(**texts | call | options).frames


def glm_image_pipeline(folder: Path) -> Any:
    """Return a GlmImagePipeline with the prior and DiT of the recording in `folder`, and a tokenizer of a few words."""
    from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        ByT5Tokenizer,
        GlmImageForConditionalGeneration,
        GlmImageProcessor,
        PreTrainedTokenizerFast,
        T5Config,
        T5EncoderModel,
    )
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    prior = GlmImageForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float64).eval()
    ids, text = prior.config, prior.config.text_config
    unused_ids = [i for i in range(text.vision_vocab_size, text.vocab_size) if i != ids.image_token_id]
    words = ["[UNK]", "[PAD]", "<sop>", "<eop>", "a", "fox", "cat", *map(str, range(30))]
    vocabulary = dict(zip(words, unused_ids, strict=False)) | {"<|image|>": ids.image_token_id}
    vocabulary |= {"<start>": ids.image_start_token_id, "<end>": ids.image_end_token_id}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    extra = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "<start>", "eos_token": "<end>"}
    special |= {"extra_special_tokens": extra}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, padding_side="left", **special)
    template = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<start><|image|><end>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    image_processor = GlmImageImageProcessorPil(patch_size=16, merge_size=1, temporal_patch_size=1)
    processor = GlmImageProcessor(image_processor, tokenizer, chat_template=template)

    def target_shape(height: int, width: int) -> tuple[int, int, int, int]:
        # the preview has about 16 cells instead of 256
        rows, columns = height // 32, width // 32
        return rows, columns, int((rows / columns) ** 0.5 * 4), int((columns / rows) ** 0.5 * 4)

    processor._get_target_shape = target_shape
    transformer = GlmImageTransformer2DModel.from_pretrained(folder / "dit").eval()
    torch.manual_seed(0)
    t5_sizes = {"d_model": transformer.config.text_embed_dim, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    pipe = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=processor,
        text_encoder=T5EncoderModel(T5Config(**t5_sizes, vocab_size=384)).eval(),
        vision_language_encoder=prior,
        vae=AutoencoderKL(
            block_out_channels=(4, 4, 4, 4), down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=1,
            up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, base_image_seq_len=256, time_shift_type="linear"
        ),
    )  # fmt: skip
    return pipe


class LoopPipeline(DiffusionPipeline):
    """A pipeline for the transformers in `TRANSFORMERS`, with callbacks, and one or more calls per step."""

    def __init__(self, transformer: Any, scheduler: Any):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, inputs: dict, steps: int = 6, calls: int = 1, callback_on_step_end: Any = None) -> Tensor:
        latent = inputs["hidden_states"].to(self.transformer.dtype)
        self.scheduler.set_timesteps(steps)
        for i, t in enumerate(self.progress_bar(self.scheduler.timesteps)):
            time = t.expand(len(latent))
            time = time.long() if isinstance(self.transformer, DiTTransformer2DModel) else time.to(latent.dtype)
            total = torch.zeros_like(latent)
            for call in range(calls):
                arguments = inputs | {"hidden_states": latent, "timestep": time}
                if call:
                    arguments["encoder_hidden_states"] = -inputs["encoder_hidden_states"]
                total = total + self.transformer(**arguments, return_dict=False)[0][:, : latent.shape[1]] / calls
            latent = self.scheduler.step(total, t, latent, return_dict=False)[0]
            if callback_on_step_end is not None:
                callback_on_step_end(self, i, t, {"latents": latent})
        return latent


def loop_pipeline(name: str) -> tuple[LoopPipeline, dict[str, Any]]:
    module, inputs = tiny_transformer(name)
    return LoopPipeline(module, FlowMatchEulerDiscreteScheduler()), inputs


TEXT_SCHEDULERS = [
    getattr(schedulers, name)
    for name in schedulers.__all__
    if issubclass(getattr(schedulers, name), schedulers.BlockScheduler) and name != "BlockScheduler"
]
BLOCK = 4


class BlockCausal(BlockCausalModule):
    """A block-causal Llama with LLaDA2's interface. It counts its calls."""

    calls = 0

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        self.calls += 1
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)


def run_text(pipe: Any, ids: Tensor, **arguments: Any) -> Tensor:
    defaults = {"gen_length": 10, "num_inference_steps": 2, "mask_token_id": MASK, "eos_token_id": END}
    return pipe(input_ids=ids, **{**defaults, "output_type": "seq", "eos_early_stop": False, **arguments}).sequences
