"""Small models of every image family."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from places import GOLDEN
from torch import Tensor, nn
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    GlmImageForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
)

from paradec.core.query import Query
from paradec.models.images.base import ImageModel, ImageRequest
from paradec.models.images.chameleon import ChameleonLayout, ChameleonModel
from paradec.models.images.diffusion import DiffusionModel
from paradec.models.images.distilled_llamagen import DistilledLlamaGen, DistilledLlamaGenConfig, DistilledLlamaGenModel
from paradec.models.images.distilled_var import DistilledVAR, DistilledVARModel
from paradec.models.images.emu3 import Emu3Model
from paradec.models.images.glm_image import GlmImageModel
from paradec.models.images.grid import Grid
from paradec.models.images.janus import JanusModel
from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig, LlamaGenModel
from paradec.models.images.lpd import LPD, LPDConfig, LPDModel
from paradec.models.images.mar import MAR, MARModel
from paradec.models.images.multi_scale_vq import MultiScaleVQ, MultiScaleVQConfig
from paradec.models.images.nar import NAR, NARConfig, NARModel
from paradec.models.images.uvit import MaskedImageModel, UViT, UViTModel
from paradec.models.images.var import VAR, VARModel
from paradec.models.images.vq import KLDecoder, VQConfig, VQModel

CODES = 32
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT["initializer_range"] = 0.5  # type: ignore[assignment]  # with the default all distributions are nearly uniform
VQ_SIZES = {"channels": 8, "channel_mult": (1, 2), "res_blocks": 1, "norm_groups": 4}
TINY_VQ = VQConfig(**VQ_SIZES, codebook_size=CODES, codebook_embed_dim=4, z_channels=8)
LLAMAGEN = {"dim": 48, "n_layer": 2, "n_head": 4, "vocab_size": CODES, "num_classes": 10}
CAPTIONED = {"caption_dim": 16, "caption_length": 6}


def randomize(module: nn.Module, std: float, vectors: bool = True) -> Any:
    """Convert the module to float64 and fill it with random weights. vectors: also fill weights of one dimension."""
    for parameter in module.double().parameters():
        if vectors or parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return module


def tiny_vq(**changes: object) -> VQModel:
    torch.manual_seed(1)
    return VQModel(VQConfig(**{**TINY_VQ.to_dict(), **changes})).double().eval()


def tiny_llamagen(condition: str = "c2i", vq: bool = True, grid: int = 4, seed: int = 0) -> LlamaGenModel:
    torch.manual_seed(seed)
    config = LlamaGenConfig(**LLAMAGEN, **CAPTIONED, grid=grid, condition=condition)
    network = randomize(LlamaGen(config), 0.3, vectors=False)
    return LlamaGenModel(network, tiny_vq() if vq else None)


def tiny_nar(condition: str = "c2i", grid: int = 4) -> NARModel:
    torch.manual_seed(0)
    config = NARConfig(**LLAMAGEN, **CAPTIONED, grid=grid, condition=condition)
    network = randomize(NAR(config), 0.3, vectors=False)
    return NARModel(network, tiny_vq())


def tiny_student(grid: int = 4, **stages: int) -> DistilledLlamaGenModel:
    torch.manual_seed(0)
    config = DistilledLlamaGenConfig(**LLAMAGEN, grid=grid, codebook_dim=4, **stages)
    network = randomize(DistilledLlamaGen(config), 0.3, vectors=False)
    return DistilledLlamaGenModel(network, tiny_vq())


def tiny_emu3() -> Emu3Model:
    vocabulary = {"<|extra_200|>": 5, "<image>": 6, "<|extra_201|>": 7, "<|image end|>": 8}
    vocabulary |= {f"<|visual token {code:06d}|>": 20 + code for code in range(CODES)}
    vq = {
        "codebook_size": CODES, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32,
        "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [],
        "temporal_downsample_factor": 1,
    }  # fmt: skip
    text = TEXT | {"num_key_value_heads": 2, "attention_dropout": 0.0}
    torch.manual_seed(0)
    config = Emu3Config(text_config=text, vq_config=vq, vocabulary_map=vocabulary)
    return Emu3Model(Emu3ForConditionalGeneration(config).double())


def tiny_chameleon(layout: ChameleonLayout, vq: bool = True) -> ChameleonModel:
    letters = {str(digit): chr(ord("A") + digit) for digit in range(10)}
    vocabulary = {"<image>": 3}
    # ids are not in the order of the codes, so that tests notice a wrong map
    vocabulary |= {f"IMGIMG{''.join(letters[d] for d in str(c))}Z": 4 + (c * 5 + 3) % CODES for c in range(CODES)}
    sizes = {
        "embed_dim": 4, "num_embeddings": CODES, "latent_channels": 8, "resolution": 16, "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    config = ChameleonConfig(**TEXT, num_key_value_heads=4, vq_config=sizes, vocabulary_map=vocabulary)
    module = ChameleonForConditionalGeneration(config).double()
    return ChameleonModel(module, layout, tiny_vq(l2_norm=False, channel_mult=[1, 1, 1, 1]) if vq else None)


def tiny_janus() -> JanusModel:
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
        "num_image_tokens": 16, "projection_dim": 32, "mlp_ratio": 2.0,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": CODES, "latent_channels": 16, "base_channels": 32, "num_res_blocks": 1,
        "channel_multiplier": [1, 1], "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4,
    }  # fmt: skip
    text = TEXT | {"model_type": "llama", "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=7)
    module = JanusForConditionalGeneration(config)
    for name in ("generation_embeddings", "generation_head", "generation_aligner"):
        for parameter in getattr(module.model, name).parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.5)
    module.generation_config.generation_kwargs = {"boi_token_id": 9}
    module.generation_config.bos_token_id, module.generation_config.pad_token_id = 1, 0
    return JanusModel(module.double())


def tiny_uvit() -> UViTModel:
    torch.manual_seed(0)
    return UViTModel(UViT(size=4, codebook_size=CODES, classes=5, width=32, depth=2, heads=2).double())


def random_uvit(depth: int = 2, seed: int = 0) -> UViTModel:
    """A U-ViT for 4 x 4 cells of 12 codes and five classes, with distributions that are far from uniform."""
    torch.manual_seed(seed)
    return UViTModel(randomize(UViT(size=4, codebook_size=12, classes=5, width=16, depth=depth, heads=2), 0.3))


def tiny_masked_image() -> MaskedImageModel:
    return MaskedImageModel(tiny_uvit().unwrap(), tiny_vq(), name="tiny-maskgit")


MAR_SIZES = {"side": 4, "channels": 4, "width": 16, "depth": 2, "heads": 2, "classes": 10, "buffer": 4}
MAR_DECODER = {"channels": 32, "channel_mult": (1, 2), "res_blocks": 1, "attention": False, "z_channels": 4}


def tiny_mar() -> MARModel:
    torch.manual_seed(0)
    module = MAR(**MAR_SIZES | {"depth": 1}, head_depth=1, head_width=16).double()
    return MARModel(module, KLDecoder(VQConfig(**MAR_DECODER)), name="tiny-mar")


def random_mar(seed: int = 0, noise: float = 0.0, **sizes: int) -> MARModel:
    """A MAR without a decoder, whose head changes its input little. noise: deviation of noise on all its weights."""
    torch.manual_seed(seed)
    module = randomize(MAR(**MAR_SIZES | {"depth": 1, "head_depth": 1, "head_width": 16} | sizes), 0.3)
    torch.nn.init.normal_(module.diffloss.net.final_layer.linear.weight, std=0.05)
    for parameter in module.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return MARModel(module, name=f"mar-{seed}")


SCALES = (1, 2, 3, 4)


def tiny_var(
    seed: int = 0,
    width: int = 8,
    depth: int = 2,
    heads: int = 2,
    scales: tuple[int, ...] = SCALES,
    classes: int = 5,
    vq: MultiScaleVQ | None = None,
    vq_seed: int = 0,
    shared_adaln: bool = False,
    l2_norm: bool = True,
) -> VARModel:
    """A VAR for images of 8 x 8 pixels, with 32 codes."""
    if vq is None:
        torch.manual_seed(vq_seed)
        sizes = VQ_SIZES | {"attention": False, "codebook_size": 32, "codebook_embed_dim": 4, "z_channels": 4}
        vq = MultiScaleVQ(MultiScaleVQConfig(**sizes)).double()
    torch.manual_seed(seed)
    book = {"codebook_size": 32, "code_dim": 4}
    module = VAR(scales, depth, width, heads, classes, **book, shared_adaln=shared_adaln, l2_norm=l2_norm)
    return VARModel(randomize(module, 0.5), vq, {"guidance_scale": 2.0}, name="tiny-var")


def tiny_lpd() -> LPDModel:
    """An LPD for 4 x 4 cells of 32 codes and five classes."""
    torch.manual_seed(0)
    module = randomize(LPD(LPDConfig(dim=16, n_layer=2, n_head=2, grid=4, vocab_size=CODES, num_classes=5)), 0.3)
    return LPDModel(module.requires_grad_(False), tiny_vq())


def tiny_var_student(teacher: VARModel | None = None, **stages: int) -> DistilledVARModel:
    teacher = tiny_var() if teacher is None else teacher
    torch.manual_seed(1)
    sizes = {"codebook_size": 32, "code_dim": 4, "depth": 2, "width": 8, "heads": 2}
    module = DistilledVAR(teacher.module.scales, classes=teacher.module.classes, **sizes)
    return DistilledVARModel(randomize(module, 0.5), teacher.vq, "tiny-var-student", **stages)


def tiny_glm_image() -> GlmImageModel:
    source = GOLDEN / "images-autumn" / "glm_image" / "model"
    module = GlmImageForConditionalGeneration.from_pretrained(source, dtype=torch.float64)
    module.config.text_config.max_position_embeddings = 2048  # enough for the default image size
    return GlmImageModel(module)


def tiny_diffusion() -> DiffusionModel:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    module = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    return DiffusionModel(module.double().eval())


FAMILIES = {
    "llamagen": tiny_llamagen, "llamagen of captions": lambda: tiny_llamagen("t2i"), "nar": tiny_nar,
    "distilled llamagen": tiny_student, "emu3": tiny_emu3,
    "chameleon": lambda: tiny_chameleon(ChameleonLayout(start=40, end=41, side=4)), "janus": tiny_janus,
    "glm_image": tiny_glm_image, "uvit": tiny_uvit, "masked image": tiny_masked_image, "mar": tiny_mar, "var": tiny_var,
    "lpd": tiny_lpd, "distilled var": tiny_var_student, "diffusion": tiny_diffusion,
}  # fmt: skip
"""A maker of a small model for every adapter of image models."""


def greedy(request: ImageRequest, grid: Grid, scale: float) -> Tensor:
    """Decode greedily token by token, without a KV cache: [batch, grid.length] int64. scale: guidance scale."""
    model, answers = request.model, []
    allowed = grid.allowed(model.facts.vocab_size)
    for row, prompts in enumerate(zip(request.prompts.rows, request.unconditional.rows, strict=True)):
        answer: list[int] = []
        for token in grid.layout.tolist():
            if token < 0:
                logits = [last_logits(model, row, prompt + answer, branch) for branch, prompt in enumerate(prompts)]
                token = int((logits[1] + scale * (logits[0] - logits[1])).masked_fill(~allowed, -torch.inf).argmax())
            answer.append(token)
        answers.append(answer)
    return torch.tensor(answers)


def last_logits(model: object, row: int, tokens: list[int], branch: int = 0) -> Tensor:
    """Return logits [vocabulary] of the next token of a row. branch: 0 with, 1 without the condition."""
    ids = torch.tensor([tokens])
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    if branch == 0:
        return model(Query(rows=np.array([row]), tokens=ids, positions=positions))[0, -1]
    # a call evaluates both branches, in its two halves; only the second half is used
    query = Query(rows=np.array([row]), tokens=ids.repeat(2, 1), positions=positions.repeat(2, 1), branches=2)
    return model(query)[1, -1]


ANOLE = ChameleonLayout(start=40, end=41, side=3)
LUMINA = ChameleonLayout(start=40, end=41, side=2, row_end=42, end_of_text=2, first_size=50)
"""Lumina-mGPT's layout, which has tokens for the image's size. 32 pixels are 4 tokens of the tiny model."""
CAPTIONS = [torch.linspace(-1, 1, length * 16).view(length, 16) for length in (5, 2)]
EMU3_REQUEST = {"prompts": [[1, 12, 13, 9], [1, 11, 9]], "negative_prompt": [[1, 9]], "height": 24, "width": 32}
LUMINA_REQUEST = {"prompts": [[1, 45, 2, 40, 51, 52], [1, 2, 40, 51, 52]], "height": 32, "width": 64}
IMAGE_MODELS: dict[str, tuple[Callable[[], ImageModel], dict[str, Any]]] = {
    "llamagen-c2i": (tiny_llamagen, {"class_labels": [3, 9]}),
    "llamagen-t2i": (lambda: tiny_llamagen("t2i"), {"prompts": CAPTIONS}),
    "emu3": (tiny_emu3, EMU3_REQUEST),
    "anole": (lambda: tiny_chameleon(ANOLE), {"prompts": [[1, 45, 46, 40], [1, 40]]}),
    "lumina-mgpt": (lambda: tiny_chameleon(LUMINA), LUMINA_REQUEST),
    "janus": (tiny_janus, {"prompts": [[1, 20, 21, 9], [1, 30, 9]]}),
}


@lru_cache
def image_model(name: str) -> tuple[ImageModel, dict[str, Any]]:
    make, request = IMAGE_MODELS[name]
    return make(), request
