"""Emu3, Chameleon, Anole, Lumina-mGPT and Janus with random weights: transformers' generation, SJD at temperature 0."""

import itertools
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from images import CODES, IMAGE_MODELS, LUMINA, greedy, image_model, last_logits, tiny_chameleon
from torch import Tensor

import paradec
from paradec.core.query import Query, StoreCall
from paradec.models.images.base import ImageModel
from paradec.models.images.chameleon import LUMINA_MGPT, ChameleonLayout, ChameleonModel
from paradec.models.images.emu3 import Emu3Model
from paradec.models.images.grid import Grid
from paradec.models.images.janus import JanusModel
from paradec.samplers.causal.sjd import SJD


def small_grid(name: str) -> tuple[ImageModel, Grid, Any, dict[str, Any]]:
    model, request = image_model(name)
    grid = model.grid(request.get("height"), request.get("width"))
    image_request = model.request(request[model.conditions], grid, negative_prompt=request.get("negative_prompt"))
    return model, grid, image_request, request


@pytest.mark.thinned
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_sjd_at_temperature_0_is_greedy(name: str, scale: float) -> None:
    model, grid, image_request, request = small_grid(name)
    expected = greedy(image_request, grid, scale)
    request = request | {"sampler": SJD(window=5), "guidance_scale": scale, "temperature": 0, "output_type": "latent"}
    out = paradec.generate_images(model, **request, seed=0)
    assert torch.equal(out.tokens, expected)
    assert (out.accepted.sum(0) == grid.length).all()
    # forced structure tokens never end a window
    assert max(out.row_nfe) <= grid.height * grid.width + 1
    assert torch.equal(out.images, grid.codes(expected))


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_store_after_rollback_equals_a_fresh_prefill(name: str) -> None:
    _, grid, image_request, _ = small_grid(name)
    sampler = SJD(window=4)
    guidance = {"guidance_scale": 2.0, "negative_prompt": image_request.unconditional}
    state = sampler.start(image_request.model, image_request.prompts, grid=grid, seed=1, **guidance)
    with torch.inference_mode():
        for _ in range(4):
            sampler.commit(state, sampler.step(image_request.model, state))
        assert (np.array(state.accepted) < 4).any()  # drafts were rejected
        for branch, row in itertools.product(range(2), range(state.batch)):
            index, length = branch * state.batch + row, int(state.committed[row] + state.shift[branch, row]) - 1
            assert state.store.valid[index].nonzero().squeeze(1).tolist() == list(range(length))
            positions = torch.arange(length).repeat(2, 1)
            fresh = image_request.model.make_store(2, length)
            query = Query(
                rows=np.array([row]), tokens=state.context[index, :length].repeat(2, 1), positions=positions,
                store=StoreCall(torch.arange(2), positions, visible_length=length), branches=2,
                forwarded=np.array([length]),
            )  # fmt: skip
            image_request.model(query, fresh)
            for layer, kind in itertools.product(range(2), ("layer_keys", "layer_values")):
                actual, expected = getattr(state.store, kind)[layer][index], getattr(fresh, kind)[layer][branch]
                assert (actual[:length] - expected[:length]).abs().max() < 1e-5


def test_janus_equals_transformers() -> None:
    model, grid, image_request, request = small_grid("janus")
    actual = greedy(image_request, grid, 5.0)
    arguments = {"generation_mode": "image", "do_sample": False, "guidance_scale": 5.0}
    for row, prompt in enumerate(request["prompts"]):
        ids = torch.tensor([prompt])
        expected = model.module.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        assert torch.equal(actual[row : row + 1], expected)
    pixels = (model.module.decode_image_tokens(actual).permute(0, 3, 1, 2) / 2 + 0.5).clamp(0, 1)
    assert torch.allclose(model.decode(actual, grid).double(), pixels, atol=1e-6)


def test_emu3_equals_transformers() -> None:
    model, grid, image_request, request = small_grid("emu3")
    actual, negative = greedy(image_request, grid, 3.0), torch.tensor(request["negative_prompt"])
    for row, prompt in enumerate(request["prompts"]):
        ids = torch.tensor([prompt])

        def allowed(batch: int, tokens: Tensor, start: int = len(prompt)) -> list[int]:
            forced = int(grid.layout[min(len(tokens) - start, grid.length - 1)])
            return list(grid.image_ids) if forced < 0 else [forced]

        guidance = {"negative_prompt_ids": negative, "negative_prompt_attention_mask": torch.ones_like(negative)}
        arguments = guidance | {"guidance_scale": 3.0, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
        arguments |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": grid.length}
        expected = model.module.generate(ids, **arguments)
        assert torch.equal(actual[row : row + 1], expected[:, len(prompt) :])
    pixels = model.module.decode_image_tokens(image_tokens=actual, height=grid.height, width=grid.width) / 2 + 0.5
    assert torch.allclose(model.decode(actual, grid).double(), pixels.clamp(0, 1), atol=1e-6)


def test_chameleon_gives_finite_logits_of_image_tokens() -> None:
    """transformers' forward sets logits of image tokens to the lowest finite number. Other logits are equal."""
    model, _, _, _ = small_grid("anole")
    tokens = [1, 45, 40, 7, 9]
    theirs = model.module(torch.tensor([tokens])).logits[0, -1]
    ours = last_logits(model, 0, tokens)
    is_image = torch.zeros(len(ours), dtype=torch.bool)
    is_image[torch.tensor(model.image_ids)] = True
    assert torch.allclose(ours[~is_image], theirs[~is_image], atol=1e-12)
    assert (theirs[is_image] == torch.finfo(theirs.dtype).min).all() and (ours[is_image].abs() < 1e3).all()


def test_chameleon_maps_tokens_to_codes() -> None:
    model, grid, _, _ = small_grid("lumina-mgpt")
    assert len(model.image_ids) == CODES and model.image_ids[0] == 7 and model.image_ids[1] == 12
    tokens = grid.layout.clone().unsqueeze(0)
    tokens[tokens < 0] = 12
    assert (grid.codes(tokens) == 1).all()
    codebook = model.codebook()
    assert codebook[:4].isnan().all() and codebook[40:].isnan().all()
    assert torch.equal(codebook[12], model.vq.quantize.embedding.weight[1])


def test_lumina_has_the_published_layout() -> None:
    model = tiny_chameleon(LUMINA)
    grid = model.grid(32, 64)
    assert (grid.row_end, grid.tail) == (42, (41, 2))
    assert model.opening(grid) == [40, 51, 52]
    refuses(lambda: model.grid(24, 64), "height=24 must be a multiple of 32")
    # the published model has 2357 tokens from start to end for 768 x 768 pixels
    rows = Grid(48, 48, image_ids=range(4, 8196), row_end=LUMINA_MGPT.row_end, tail=(LUMINA_MGPT.end, 8710))
    assert 3 + rows.length == 2357


@pytest.mark.parametrize("name", ["emu3", "anole", "lumina-mgpt", "janus"])
def test_prompts_up_to_the_longest_are_accepted(name: str) -> None:
    model, grid, _, request = small_grid(name)
    sizes = {key: request[key] for key in ("height", "width") if key in request}
    prompt = request["prompts"][0]
    max_prompt = model.facts.max_length - grid.length
    longest = [prompt[0]] * (max_prompt - len(prompt)) + prompt
    assert len(model.request([longest], grid, negative_prompt=[longest]).prompts.rows[0]) == max_prompt
    message = f"a prompt of {max_prompt + 1} tokens and a picture of {grid.length} are longer than .* allows"
    generate = partial(paradec.generate_images, model, output_type="latent", **sizes)
    for prompts in ([prompt, [1, *longest]], [[1, *longest]] * 2):
        refuses(partial(generate, prompts, negative_prompt=[prompt]), message)
        refuses(partial(generate, [prompt], negative_prompt=prompts[1:]), message)


class WordTokenizer:
    bos_token = "<s>"
    ids = {"<s>": 1, "fox": 50, "no": 51, "fog": 52, "3*4": 53, "<|image start|>": 54, "<|image token|>": 55}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        result = re.findall("|".join(map(re.escape, self.ids)), text)
        return {"input_ids": [1] * add_special_tokens + [self.ids[word] for word in result]}

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def test_prompt_templates_of_the_models() -> None:
    tokenizer = WordTokenizer()
    emu3 = Emu3Model(image_model("emu3")[0].module, tokenizer)
    grid = emu3.grid(24, 32)
    image_request = emu3.request(["a fox", "fog"], grid, num_images=2, negative_prompt="no fog")
    assert image_request.prompts.rows == [[1, 50, 54, 53, 55]] * 2 + [[1, 52, 54, 53, 55]] * 2
    assert image_request.unconditional.rows == [[1, 51, 52, 54, 53, 55]] * 4
    assert emu3.request("fox", grid).unconditional.rows == [[1, 54, 53, 55]]

    janus = JanusModel(image_model("janus")[0].module, tokenizer)
    image_request = janus.request("a fox", janus.grid())
    assert image_request.prompts.rows == [[CODES + token for token in (1, 50, 9)]]
    assert image_request.unconditional.rows == [[CODES + token for token in (1, 0, 9)]]

    sizes = {"start": 40, "end": 41, "side": 4, "turn_end": 2, "first_size": 50}
    layout = ChameleonLayout(**sizes, instruction="no {width} {height} fog ")
    lumina = ChameleonModel(image_model("anole")[0].module, layout, tokenizer=tokenizer)
    image_request = lumina.request("fox", lumina.grid(32, 64))
    assert image_request.prompts.rows == [[1, 51, 52, 50, 2, 40, 51, 52]]
    assert image_request.unconditional.rows == [[40, 51, 52]]
