"""DiffusionGemma as a model: checkpoints, images, soft embeddings."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from small_models import CANVAS, GEMMA_VOCAB, tiny_gemma
from tokenized_models import byte_level_tokenizer
from torch import Tensor

import paradec
from paradec import samplers
from paradec.models.cache_argument import cache_keyword

SHORT = {"max_denoising_steps": 8, "confidence_threshold": 0.35}
PROMPT = [9, 10, 11, 12, 20, 21, 22, 23, 24]


def decode(model: Any, prompt: Any = PROMPT, **request: Any) -> Tensor:
    sampler = samplers.create("diffusion_gemma", **SHORT)
    return paradec.generate(
        model, prompt, **{"sampler": sampler, "seed": 1, "max_new_tokens": 2 * CANVAS} | request
    ).new_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level_tokenizer()
    path = tmp_path_factory.mktemp("diffusiongemma")
    copy.deepcopy(tiny_gemma(vocab=len(tokenizer))).save_pretrained(path)
    tokenizer.save_pretrained(path)
    generation = json.loads((path / "generation_config.json").read_text())
    generation |= {"max_new_tokens": 40, "max_denoising_steps": 7, "t_min": 0.3}
    generation |= {"eos_token_id": [1, 2], "pad_token_id": 0}
    generation |= {"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.25}}
    (path / "generation_config.json").write_text(json.dumps({k: v for k, v in generation.items() if v is not None}))
    return path


def copy_checkpoint(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    data = json.loads((target / file).read_text()) | changes
    (target / file).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return target


def test_defaults_come_from_the_checkpoint(folder: Path) -> None:
    model = paradec.load(folder)
    facts = model.facts
    assert (facts.topology, facts.block_length, facts.mask_token_id) == ("canvas", CANVAS, None)
    assert (facts.eos_token_ids, facts.pad_token_id, facts.max_length) == ((1, 2), 0, 4096)
    assert model.default_max_new_tokens == 40 and model.tokenizer is not None
    state = samplers.create("diffusion_gemma").start(model, "one two", seed=0)
    assert (state.steps, state.temperatures, state.rule.gamma) == (7, (0.3, 0.8), 0.25)
    assert state.max_new_tokens == 40
    module = tiny_gemma(vocab=facts.vocab_size)
    sampler = samplers.create("diffusion_gemma", entropy_bound=0.2, t_min=0.4, **SHORT)
    assert torch.equal(
        decode(model, sampler=sampler), decode(paradec.wrap(module, eos_token_id=[1, 2]), sampler=sampler)
    )
    assert isinstance(paradec.generate(model, "one two", seed=0).text, str)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_loaded_models_decode_in_each_dtype(folder: Path, dtype: str) -> None:
    model = paradec.load(folder, dtype=dtype)
    assert model.dtype == model.soft_dtype == getattr(torch, dtype)
    assert decode(model).shape == (1, 2 * CANVAS)


def test_eager_attention_gives_the_same_tokens(folder: Path) -> None:
    rows = [PROMPT, [30], [*range(40, 60)]]
    plain = paradec.load(folder, dtype="float64")
    eager = paradec.load(folder, dtype="float64", attn_implementation="eager")
    assert torch.equal(decode(plain, rows), decode(eager, rows))


def test_saved_models_decode_alike(folder: Path, tmp_path: Path) -> None:
    model = paradec.load(folder)
    model.save_pretrained(tmp_path / "again")
    repeated = paradec.load(tmp_path / "again")
    assert repeated.facts.eos_token_ids == model.facts.eos_token_ids and repeated.denoising == model.denoising
    assert repeated.default_max_new_tokens == 40
    assert torch.equal(decode(model), decode(repeated))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("generation_config.json", {"t_min": -1.0}, "t_min"),
        ("generation_config.json", {"sampler_config": {"_cls_name": "Other"}}, "Other"),
        ("generation_config.json", {"eos_token_id": 9999}, "eos_token_id=9999"),
        ("config.json", {"canvas_length": 0}, "block_length=0"),
    ],
    ids=str,
)
def test_wrong_values_in_files_are_refused(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(paradec.CheckpointError, match=message) as error:
        paradec.load(copy_checkpoint(folder, tmp_path / "wrong", file, **changes))
    assert "\n" not in str(error.value)


def test_text_models_without_causal_context_are_refused(folder: Path, tmp_path: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"] | {"use_bidirectional_attention": "all"}
    with pytest.raises(paradec.CheckpointError, match="use_bidirectional_attention='all' is not supported"):
        paradec.load(copy_checkpoint(folder, tmp_path / "wrong", "config.json", text_config=text))


@pytest.mark.parametrize(
    "argument", [{"mask_token_id": 3}, {"block_length": 4}, {"attn_implementation": "sparsed"}, {"vq": "x"}], ids=str
)
def test_inapplicable_arguments_of_load_are_refused(folder: Path, argument: dict[str, Any]) -> None:
    refuses(lambda: paradec.load(folder, **argument), next(iter(argument)), (ValueError, TypeError))


@pytest.mark.parametrize("argument", [{"mask_token_id": 3}, {"prediction": "same"}, {"topology": "canvas"}], ids=str)
def test_facts_of_wrapped_modules_cannot_be_set(argument: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(argument))}=.* has no meaning for DiffusionGemmaForBlockDiffusion"
    ):
        paradec.wrap(tiny_gemma(), **argument)


def test_attention_without_masks_is_refused() -> None:
    module = copy.deepcopy(tiny_gemma())
    module.set_attn_implementation("flex_attention")
    refuses(lambda: paradec.wrap(module), "attn_implementation='flex_attention' accepts no masks")


IMAGE = 5


def pictures() -> dict[str, Tensor]:
    """Return two images in the processor's format: 6 x 3 patches, two image tokens each."""
    grid = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(3), indexing="ij"), -1).reshape(1, 18, 2)
    return {
        "pixel_values": torch.rand(2, 18, 768, generator=torch.Generator().manual_seed(0)),
        "image_position_ids": grid.repeat(2, 1, 1),
    }


@pytest.mark.thinned
@pytest.mark.parametrize("sees", ["vision", None])
def test_images_are_encoded_like_transformers(sees: str | None) -> None:
    module = tiny_gemma(use_bidirectional_attention=sees)
    ids = torch.tensor([[9, 10, 6, IMAGE, IMAGE, 7, 20, 21, 22], [9, 6, IMAGE, IMAGE, 7, 30, 31, 32, 33]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
    inputs |= pictures()
    torch.manual_seed(3)
    theirs = module.generate(**inputs, max_new_tokens=2 * CANVAS, **SHORT).sequences
    model = paradec.wrap(module)
    ours = decode(model, inputs, rng="reference", seed=3)
    assert torch.equal(ours, theirs[:, 9:])
    torch.manual_seed(3)
    assert not torch.equal(ours, module.generate(ids, max_new_tokens=2 * CANVAS, **SHORT).sequences[:, 9:])

    rows = [ids[0].tolist(), [6, IMAGE, IMAGE, 7, 30]]
    batch = decode(model, {"input_ids": rows, **pictures()})
    second = {name: value[1:] for name, value in pictures().items()}
    assert torch.equal(decode(model, {"input_ids": rows[1], **second})[0], batch[1])
    padded = [rows[0], [30, IMAGE, IMAGE]]  # row 1 ends with an image, then padding
    assert torch.equal(
        decode(model, {"input_ids": padded[1], **second})[0], decode(model, {"input_ids": padded, **pictures()})[1]
    )
    assert torch.equal(decode(model, {"input_ids": rows, **pictures()}, num_return_sequences=2)[[0, 2]], batch)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"input_ids": [9, IMAGE]}, "row 0 has image tokens"),
        ({"input_ids": [9, 10], **pictures()}, "make 4 image tokens, and the prompts have 0"),
        ({"ids": [9]}, "without 'input_ids'"),
        ({"input_ids": [9], "audio": 1}, "holds 'audio'"),
    ],
    ids=["no images", "no tokens", "no ids", "unknown"],
)
def test_prompts_that_do_not_fit_their_images_are_refused(prompt: dict[str, Any], message: str) -> None:
    refuses(lambda: decode(paradec.wrap(tiny_gemma()), prompt), message, (ValueError, TypeError))


def test_models_of_text_alone_refuse_images() -> None:
    from small_models import tiny

    refuses(lambda: paradec.generate(tiny(1), {"input_ids": [9], **pictures()}), "prompt holds pixel_values")


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_embeddings_equal_those_of_the_module(dtype: torch.dtype) -> None:
    """Self-conditioning on soft embeddings of logits gives bitwise the output of the module, which gets the logits."""
    module = tiny_gemma(dtype=dtype)
    model = paradec.wrap(module)
    sampler = samplers.create("diffusion_gemma")
    state = sampler.start(model, PROMPT, seed=0, max_new_tokens=CANVAS)
    sampler.commit(state, sampler.step(model, state))
    query = sampler.query(state)[0]
    logits = torch.randn(1, CANVAS, GEMMA_VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        ours = model(query.with_fields(soft_embeddings=model.soften(logits)), state.store)
        state.store.bind(query)
        theirs = module(
            decoder_input_ids=query.tokens,
            **cache_keyword(module, state.store),
            self_conditioning_logits=logits,
            decoder_attention_mask={"full_attention": None, "sliding_attention": None},
            decoder_position_ids=query.positions,
        ).logits
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, model(query.with_fields(soft_embeddings=None), state.store))
