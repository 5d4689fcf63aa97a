"""Schedulers in diffusers' pipelines: the tokens of `paradec.generate`, configs and presets."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses, run_in_threads
from diffusers import AmusedPipeline, AmusedScheduler, BlockRefinementScheduler, LLaDA2Pipeline, UVit2DModel, VQModel
from pipelines import BLOCK, TEXT_SCHEDULERS, BlockCausal, run_text
from small_models import END, MASK, VOCAB, tiny
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import paradec
from paradec import samplers, schedulers
from paradec.integrations.diffusers.hooks.block_cache import BlockCausalModule
from paradec.models.adapter import Decoder, Model
from paradec.samplers.masked.rules.learn2pd_filter import FilterFacts, save_filter


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2, "block_causal")


@pytest.fixture
def pipe(model: Model) -> LLaDA2Pipeline:
    return LLaDA2Pipeline(BlockCausal(model), BlockRefinementScheduler(block_length=BLOCK))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, END, (2, 6), generator=torch.Generator().manual_seed(3))


IMAGE_SCHEDULERS = [
    schedulers.MaskGITScheduler, schedulers.HaltonScheduler, schedulers.LPDScheduler, schedulers.RecapScheduler,
]  # fmt: skip
EQUAL_TO_GENERATE = [cls for cls in TEXT_SCHEDULERS if cls is not schedulers.RandomScheduler]
"""Schedulers with the tokens of `generate`: all but RandomScheduler, because `generate` draws positions with keys that
depend on the prompt, which a scheduler does not see."""


@pytest.fixture(scope="module")
def filter_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    facts = FilterFacts("block", "tiny", VOCAB, BLOCK, ("none",), 0.5)
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("filter") / "filter.safetensors"
    save_filter(path, facts, facts.network())
    return str(path)


def required_settings(cls: type, filter_path: str) -> dict[str, Any]:
    learned = {"filter": filter_path, "model_name": "tiny", "filter_threshold": 0.5}
    return learned if cls is schedulers.Learn2PDScheduler else {}


@pytest.mark.thinned
@pytest.mark.parametrize("cls", EQUAL_TO_GENERATE, ids=lambda cls: cls.__name__)
def test_tokens_equal_those_of_generate(cls: type, pipe: Any, model: Model, ids: Tensor, filter_path: str) -> None:
    pipe.scheduler = cls.from_config(pipe.scheduler.config, **required_settings(cls, filter_path))
    sampler = pipe.scheduler.sampler
    named_model = Decoder(model.module, paradec.core.facts.ModelFacts(**{**vars(model.facts), "name": "tiny"}))
    request = {"max_new_tokens": 10, "steps": 6 if sampler.uses_steps else None, "eos_early_stop": False}
    try:
        out = run_text(pipe, ids)
        expected = paradec.generate(named_model, input_ids=ids, sampler=sampler, **request)
    finally:
        named_model.unwrap()
    assert torch.equal(out, expected.new_tokens)
    pipe.model.calls = 0
    assert torch.equal(run_text(pipe, ids[:1]), out[:1])  # the previous run leaves no state
    assert pipe.model.calls == expected.row_nfe[0]


@pytest.mark.parametrize("cls", TEXT_SCHEDULERS, ids=lambda cls: cls.__name__)
def test_no_mask_is_left(cls: type, pipe: Any, ids: Tensor, filter_path: str) -> None:
    pipe.scheduler = cls.from_config(pipe.scheduler.config, **required_settings(cls, filter_path))
    sampling = {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "num_inference_steps": 1, "gen_length": 6}
    out, repeated = (run_text(pipe, ids, generator=torch.Generator().manual_seed(5), **sampling) for _ in range(2))
    assert out.shape == (2, 6) and not (out == MASK).any()
    assert torch.equal(out, repeated)


def test_filters_of_the_call_are_applied(pipe: Any, ids: Tensor) -> None:
    pipe.scheduler = scheduler = schedulers.ThresholdScheduler.from_config(pipe.scheduler.config)
    greedy = run_text(pipe, ids)
    for filters in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(run_text(pipe, ids, temperature=5.0, **filters), greedy)
    assert not torch.equal(run_text(pipe, ids, temperature=5.0), greedy)
    logits = torch.randn(1, 200, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[..., MASK] = -100
    best = logits.topk(3, -1).indices
    scheduler.set_timesteps(1, block_length=200)
    step = {"mask_token_id": MASK, "temperature": 5.0, "generator": torch.Generator().manual_seed(1)}
    tokens = scheduler.step(logits, 0, torch.full((1, 200), MASK), top_k=3, **step).sampled_tokens
    counts = (best == tokens.unsqueeze(-1)).sum((0, 1))
    assert counts.sum() == 200 and (counts > 30).all()  # the three best tokens are drawn, and only these


@pytest.mark.thinned
@pytest.mark.parametrize("cls", [schedulers.ThresholdScheduler, schedulers.EditingScheduler])
@pytest.mark.parametrize("seed", range(4))
def test_rows_end_where_generate_ends_them(cls: type, seed: int, pipe: Any, model: Model) -> None:
    """Rows are equal up to and including the end token. The pipeline freezes the rest of the row."""
    prompts = torch.randint(0, END, (2, 6), generator=torch.Generator().manual_seed(seed))
    plain = paradec.generate(model, input_ids=prompts, max_new_tokens=10, eos_early_stop=False, sampler="threshold")
    end = int(plain.new_tokens[0, 5])  # any token that occurs
    ending = Decoder(model.module, paradec.core.facts.ModelFacts(**{**vars(model.facts), "eos_token_ids": (end,)}))
    pipe.scheduler = cls.from_config(pipe.scheduler.config)
    try:
        out = run_text(pipe, prompts, eos_token_id=end, eos_early_stop=True)
        expected = paradec.generate(ending, input_ids=prompts, sampler=pipe.scheduler.sampler, max_new_tokens=10)
    finally:
        ending.unwrap()
    num_ended = 0
    for row, expected_row in zip(out.tolist(), expected.new_tokens.tolist(), strict=True):
        stop = expected_row.index(end) + 1 if end in expected_row else len(expected_row)
        assert row[:stop] == expected_row[:stop]
        num_ended += end in expected_row
    assert num_ended


def test_changes_by_a_callback_take_effect(pipe: Any, ids: Tensor) -> None:
    pipe.scheduler = schedulers.LocalLeapScheduler.from_config(pipe.scheduler.config)
    steps = []

    def edit_first_block(_: Any, step: int, timestep: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        block = tensors["block_x"].clone()
        if not steps:
            block[:, -1], block[:, -2] = 7, MASK
        steps.append(step)
        return {"block_x": block}

    out = run_text(pipe, ids, gen_length=6, callback_on_step_end=edit_first_block)
    assert not (out == MASK).any() and out[:, 1].tolist() == [7, 7]


def test_values_of_the_call_that_have_no_effect_are_named(pipe: Any, ids: Tensor) -> None:
    pipe.scheduler = schedulers.LocalLeapScheduler.from_config(pipe.scheduler.config)
    with pytest.warns(UserWarning, match="threshold=0.3 given to the pipeline has no effect with") as caught:
        out = run_text(pipe, ids, threshold=0.3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run_text(pipe, ids), out)


@pytest.mark.parametrize("cls", [BlockRefinementScheduler, schedulers.CreditDecodingScheduler])
def test_block_cache_is_exact(cls: type, pipe: Any, ids: Tensor) -> None:
    pipe.scheduler = cls.from_config(pipe.scheduler.config)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    requests = [{}, {"attention_mask": padded}, {"block_length": 8, "gen_length": 2}]
    plain = [run_text(pipe, ids, **request) for request in requests]
    forward = pipe.model.forward
    with paradec.accelerate(pipe, cache="block") as session:
        cached = [run_text(pipe, ids, **request) for request in requests]
        report = session.report()
        pipe.scheduler = BlockRefinementScheduler(block_length=BLOCK)  # replaced while attached
        after_exchange = run_text(pipe, ids)
    assert all(map(torch.equal, cached, plain))
    assert 0 < report.evaluated < 0.6 * report.whole and report.bytes > 0
    assert "positions evaluated" in str(report)
    assert pipe.model.forward == forward and "forward" not in vars(pipe.model)
    assert torch.equal(run_text(pipe, ids), after_exchange)


def test_block_cache_evaluates_each_finished_block_once_more(pipe: Any, ids: Tensor) -> None:
    pipe.scheduler = schedulers.LowConfidenceScheduler(block_length=BLOCK)
    with paradec.accelerate(pipe, cache="block") as session:
        run_text(pipe, ids[:1], num_inference_steps=2)
        # first the prompt's full block and the open one; then the open block, plus the previous one when a block opens
        assert session.report().evaluated == (8 + 4) + (8 + 4) + (8 + 4)
        assert session.report().whole == 2 * (8 + 12 + 16) and session.report().calls == 6


def test_block_cache_distinguishes_attention_masks(pipe: Any, ids: Tensor) -> None:
    """The same prompt with different padding needs new keys. Each answer has one block, so old keys would fit."""
    requests = [{}, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])}, {}]
    plain = [run_text(pipe, ids, gen_length=2, **request) for request in requests]
    with paradec.accelerate(pipe, cache="block"):
        assert all(torch.equal(run_text(pipe, ids, gen_length=2, **r), p) for r, p in zip(requests, plain, strict=True))
    assert not torch.equal(plain[0], plain[1])


def test_block_cache_recovers_from_an_error_in_the_model(pipe: Any, ids: Tensor) -> None:
    """Raise after the first layer has stored its keys and before the second one has."""
    plain, calls = run_text(pipe, ids), 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the model failed")

    with paradec.accelerate(pipe, cache="block"):
        handle = pipe.model.model.model.layers[-1].register_forward_pre_hook(fail)
        try:
            refuses(lambda: run_text(pipe, ids), "the model failed", RuntimeError)
        finally:
            handle.remove()
        assert torch.equal(run_text(pipe, ids), plain)


def test_block_causal_modules_attend_like_their_model() -> None:
    model = tiny(2, "block_causal")
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    facts = {"topology": "block_causal", "prediction": "same", "block_length": 4, "mask_token_id": MASK}
    ids = torch.arange(1, 12)[None]
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(11)[None]}
    with torch.inference_mode():
        expected = BlockCausalModule(model)(**arguments).logits
        actual = BlockCausalModule(paradec.wrap(module, **facts))(**arguments).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    model.facts = dataclasses.replace(model.facts, whole_blocks=True)
    refuses(lambda: BlockCausalModule(model)(**arguments), "11 positions splits a block of 4")
    BlockCausalModule(model)(**{name: value[:, :8] for name, value in arguments.items()})


def test_logits_of_other_shapes_than_the_block_are_refused() -> None:
    scheduler, sample = schedulers.ThresholdScheduler(), torch.full((2, 4), MASK)
    for logits in (torch.zeros(2, 3, VOCAB), torch.zeros(1, 4, VOCAB), torch.zeros(2, VOCAB)):
        with pytest.raises(ValueError, match=r"takes the logits of sample .batch, block., here .2, 4"):
            scheduler.step(logits, 0, sample, mask_token_id=MASK)


def test_row_memory_survives_ended_rows() -> None:
    """Saber averages the confidence over all blocks, even those in which other rows have no masks."""
    draws = torch.Generator().manual_seed(0)
    first, second = (torch.randn(3, 4, VOCAB, generator=draws) for _ in range(2))
    blocks = [torch.full((3, 4), MASK) for _ in range(2)]
    blocks[1][1] = 5  # row 1 is full in the second block

    def run(rows: list[int]) -> Any:
        scheduler = schedulers.SaberScheduler()
        scheduler.set_timesteps(4)
        for logits, block in zip((first, second), blocks, strict=True):
            sample, index = block[rows].clone(), 0
            while (sample == MASK).any():
                sample = scheduler.step(logits[rows], index, sample, mask_token_id=MASK).prev_sample
                index += 1
        return scheduler._state.memory["total"]

    together, alone = run([0, 1, 2]), [run([row]) for row in (0, 2)]
    assert torch.equal(together, torch.cat(alone)) and (together > 0).all()


def test_block_cache_is_refused_where_it_is_not_exact(pipe: Any, ids: Tensor, amused: Any, llada: Model) -> None:
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    for module, message in (
        (BertForMaskedLM(config), "needs a model that takes a key/value cache; BertForMaskedLM does not"),
        (copy.deepcopy(llada.module), "exact only for block-causal models: in LlamaForCausalLM a block's logits de"),
    ):
        with pytest.raises(ValueError, match=message):
            paradec.accelerate(LLaDA2Pipeline(module, BlockRefinementScheduler(block_length=BLOCK)), cache="block")
        assert "forward" not in vars(module)
    with pytest.raises(TypeError, match="cache='block' is for LLaDA2Pipeline.*not for AmusedPipeline"):
        paradec.accelerate(amused, cache="block")
    refuses(lambda: paradec.accelerate(pipe, cache="blok"), "unknown cache: 'blok'")
    refuses(lambda: paradec.accelerate(pipe, paradec.TaylorSeer(), cache="block"), "give one")
    refuses(lambda: BlockCausalModule(tiny(1)), "is bidirectional.*LLaDA2Pipeline needs block_causal")
    with paradec.accelerate(pipe, cache="block"):
        refuses(lambda: paradec.accelerate(pipe, cache="block"), "has a block cache already")
        for length in (2, 6):  # no multiples of the model's block: stored keys would depend on later positions
            refuses(partial(run_text, pipe, ids, block_length=length), f"to its right at block_length={length}")


def test_block_cache_affects_only_its_pipeline(pipe: Any, ids: Tensor) -> None:
    model = pipe.model
    plain = [run_text(pipe, row) for row in (ids, ids.flip(0))]
    other_pipe = LLaDA2Pipeline(model, BlockRefinementScheduler(block_length=BLOCK))
    mask = torch.ones(2, 6, dtype=torch.int64)
    positions = torch.arange(6).expand(2, 6)
    direct = model(ids, attention_mask=mask, position_ids=positions).logits
    results: list[Any] = []

    def nested() -> None:
        actual = model(ids, attention_mask=mask, position_ids=positions).logits
        results.append(torch.equal(actual, direct) and torch.equal(run_text(other_pipe, ids.flip(0)), plain[1]))

    with paradec.accelerate(pipe, cache="block") as session:
        assert torch.equal(run_text(other_pipe, ids), plain[0]) and session.report().calls == 0
        assert torch.equal(run_text(pipe, ids, callback_on_step_end=callback_after(3, nested)), plain[0])
        assert results == [True]
        evaluated, calls = session.report().evaluated, session.report().calls
        assert torch.equal(run_text(pipe, ids), plain[0])
        assert session.report().evaluated == 2 * evaluated and session.report().calls == 2 * calls
        assert pipe.model.config is model.config
    assert pipe.model is model


def callback_after(step: int, function: Any) -> Any:
    """Create a callback of LLaDA2Pipeline that calls `function` after step `step`."""

    def callback(_: Any, index: int, timestep: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if index == step:
            function()
        return {"block_x": tensors["block_x"]}

    return callback


@pytest.mark.thinned
@pytest.mark.parametrize("cls", EQUAL_TO_GENERATE, ids=lambda cls: cls.__name__)
def test_a_new_run_ends_the_previous_one(cls: type, pipe: Any, ids: Tensor, filter_path: str) -> None:
    """If another thread starts a run, the next step of the first run raises."""
    pipe.scheduler = cls.from_config(pipe.scheduler.config, **required_settings(cls, filter_path))
    request = {"gen_length": 6}
    plain = [run_text(pipe, row, **request) for row in (ids, ids.flip(0))]
    second_pipe = LLaDA2Pipeline(pipe.model, cls.from_config(pipe.scheduler.config))
    run_in_thread = lambda: actual.extend(run_in_threads(lambda: run_text(pipe, ids.flip(0), **request)))  # noqa: E731
    run_nested = lambda: actual.append(run_text(second_pipe, ids.flip(0), **request))  # noqa: E731
    actual: list[Any] = []
    with pytest.raises(RuntimeError, match=f"{cls.__name__} has a run in another thread"):
        run_text(pipe, ids, **request, callback_on_step_end=callback_after(1, run_in_thread))
    assert torch.equal(run_text(pipe, ids, **request, callback_on_step_end=callback_after(1, run_nested)), plain[0])
    assert torch.equal(actual[0], plain[1]) and torch.equal(actual[1], plain[1])
    runs = (partial(run_text, pipe, ids, **request), partial(run_text, second_pipe, ids.flip(0), **request))
    actual = run_in_threads(*runs)
    assert all(map(torch.equal, actual, plain))


def test_a_scheduler_is_usable_after_a_failed_run(pipe: Any, ids: Tensor) -> None:
    pipe.scheduler = schedulers.CreditDecodingScheduler.from_config(pipe.scheduler.config)
    plain = run_text(pipe, ids)

    def fail() -> None:
        raise RuntimeError("mid-run")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="mid-run"):
            run_text(pipe, ids.flip(0), callback_on_step_end=callback_after(1, fail))
        assert torch.equal(run_in_threads(lambda: run_text(pipe, ids))[0], plain)
        (error,) = run_in_threads(lambda: run_text(pipe, ids.flip(0), callback_on_step_end=callback_after(1, fail)))
        assert str(error) == "mid-run" and torch.equal(run_text(pipe, ids), plain)


CODES, IMAGE_MASK = 32, 31


@pytest.fixture(scope="module")
def amused() -> AmusedPipeline:
    torch.manual_seed(0)
    transformer = UVit2DModel(
        hidden_size=8, cond_embed_dim=8, micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=8,
        vocab_size=CODES, codebook_size=CODES, in_channels=8, block_out_channels=8, num_res_blocks=1, downsample=True,
        upsample=True, block_num_heads=1, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    )  # fmt: skip
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.4)
    vqvae = VQModel(
        act_fn="silu", block_out_channels=[8], down_block_types=["DownEncoderBlock2D"], in_channels=3,
        latent_channels=8, layers_per_block=1, norm_num_groups=8, num_vq_embeddings=CODES, out_channels=3,
        sample_size=4, up_block_types=["UpDecoderBlock2D"], mid_block_add_attention=False, lookup_from_codebook=True,
    )  # fmt: skip
    scheduler = AmusedScheduler(mask_token_id=IMAGE_MASK)
    return AmusedPipeline(vqvae, None, None, transformer.eval(), scheduler)  # without tokenizer and text encoder


class OneImage(nn.Module):
    """The pipeline's transformer with a fixed condition, as a model over token ids [B, T]."""

    def __init__(self, pipeline: AmusedPipeline, condition: dict[str, Tensor]):
        super().__init__()
        self.transformer, self.condition = pipeline.transformer, condition
        self.config = type("Config", (), {"vocab_size": CODES})()

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = len(input_ids)
        condition = {name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in self.condition.items()}
        return self.transformer(input_ids.view(rows, 4, 4), **condition).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("cls", "steps"), [*((cls, 5) for cls in IMAGE_SCHEDULERS), (schedulers.MaskGITScheduler, 18)])
def test_images_equal_those_of_generate(cls: type, steps: int, amused: AmusedPipeline) -> None:
    amused.scheduler = cls.from_config(AmusedScheduler(mask_token_id=IMAGE_MASK).config)
    embeds, states = torch.ones(1, 8), torch.ones(1, 8, 8)
    out = amused(
        prompt_embeds=embeds, encoder_hidden_states=states, num_inference_steps=steps, guidance_scale=0.0, height=4,
        width=4, generator=torch.Generator().manual_seed(2), output_type="latent",
    ).images  # fmt: skip
    micro = torch.tensor([[4.0, 4.0, 0.0, 0.0, 6.0]])
    condition = {"encoder_hidden_states": states, "pooled_text_emb": embeds, "micro_conds": micro}
    facts = {"mask_token_id": IMAGE_MASK, "prediction": "same", "topology": "bidirectional"}
    model, ids = paradec.wrap(OneImage(amused, condition), **facts), torch.full((1, 16), IMAGE_MASK)
    request = {"blocks": "whole", "steps": steps, "temperature": 1.0, "generator": torch.Generator().manual_seed(2)}
    expected = paradec.generate(model, input_ids=ids, sampler=amused.scheduler.sampler_of_image, **request)
    assert torch.equal(out.flatten(1), expected.sequences)
    assert len(set(out.flatten().tolist())) > 3


def test_amused_with_guidance_and_pictures(amused: AmusedPipeline) -> None:
    amused.scheduler = schedulers.MaskGITScheduler.from_config(AmusedScheduler(mask_token_id=IMAGE_MASK).config)
    arguments = {
        "prompt_embeds": torch.ones(1, 8), "encoder_hidden_states": torch.ones(1, 8, 8),
        "negative_prompt_embeds": -torch.ones(1, 8), "negative_encoder_hidden_states": torch.zeros(1, 8, 8),
        "num_inference_steps": 4, "height": 4, "width": 4, "output_type": "np", "num_images_per_prompt": 2,
    }  # fmt: skip
    images = amused(generator=torch.Generator().manual_seed(1), **arguments).images
    assert images.shape == (2, 4, 4, 3) and (images[0] != images[1]).any()
    with pytest.warns(UserWarning, match=r"temperature=\(3, 1\) given to the pipeline has no effect"):
        amused(temperature=(3, 1), **arguments)


def capture_latents(pipeline: AmusedPipeline, seed: int = 2, **arguments: Any) -> Tensor:
    result = pipeline(
        prompt_embeds=torch.ones(1, 8), encoder_hidden_states=torch.ones(1, 8, 8),
        negative_prompt_embeds=-torch.ones(1, 8), negative_encoder_hidden_states=torch.zeros(1, 8, 8),
        num_inference_steps=6, height=8, width=8, num_images_per_prompt=2,
        generator=torch.Generator().manual_seed(seed), output_type="latent", **arguments,
    )  # fmt: skip
    return result.images


def test_recap_session_is_exact_where_everything_is_a_target(amused: AmusedPipeline) -> None:
    """With one group, local steps evaluate all cells anew."""
    amused.scheduler = original = AmusedScheduler(mask_token_id=IMAGE_MASK)
    plain = capture_latents(amused)
    amused.scheduler = schedulers.RecapScheduler.from_config(original.config, local_steps=5)
    expected = capture_latents(amused)
    amused.scheduler = original
    with paradec.accelerate(amused, paradec.samplers.create("recap", local_steps=5)) as session:
        assert isinstance(amused.scheduler, schedulers.RecapScheduler)
        assert torch.equal(capture_latents(amused), expected)
        assert session.report().cells == [(16, 16)] * 6
    assert amused.scheduler is original and torch.equal(capture_latents(amused), plain)
    processors = {type(layer.attn1.processor).__name__ for layer in amused.transformer.transformer_layers}
    assert "_CachingProcessor" not in processors


def test_recap_session_evaluates_every_target_of_every_image(amused: AmusedPipeline) -> None:
    """Each image evaluates its 2 x 2 cells that contain targets. The number of cells is the maximum over images."""
    amused.scheduler = AmusedScheduler(mask_token_id=IMAGE_MASK)
    expected, num_uneven, cells = [16], 0, []

    def record_cells(step: int, timestep: Tensor, codes: Tensor) -> None:
        nonlocal num_uneven, cells
        if session.local is not None:
            evaluated = [{divmod(cell, 4) for cell in row} for row in session.local.tolist()]
            assert len(evaluated) == 4 and all(cells[row % 2] <= row_cells for row, row_cells in enumerate(evaluated))
        targets = session.scheduler.targets()  # for the next call
        if targets is None:
            expected.append(16)
            return
        cells = [{(at // 8 // 2, at % 8 // 2) for at in row.nonzero().flatten().tolist()} for row in targets]
        expected.append(max(map(len, cells)))
        num_uneven += len(cells[0]) != len(cells[1])

    with paradec.accelerate(amused, paradec.samplers.create("recap", full_groups=2)) as session:
        for seed in range(3):
            before = len(session.report().cells)
            capture_latents(amused, seed, callback=record_cells)
            assert [count for count, _ in session.report().cells[before:]] == expected[:-1]
            expected[:] = [16]
    assert num_uneven


@pytest.mark.parametrize("cls", [AmusedScheduler, *IMAGE_SCHEDULERS], ids=lambda cls: cls.__name__)
def test_forecasts_in_amused(cls: type, amused: AmusedPipeline) -> None:
    """A run is refused once another thread has started one. Other pipelines with the transformer stay unaccelerated."""
    config = AmusedScheduler(mask_token_id=IMAGE_MASK).config
    amused.scheduler = cls.from_config(config)
    other_pipe = AmusedPipeline(**amused.components | {"scheduler": cls.from_config(config)})
    plain = capture_latents(amused)
    actual: list[Any] = []

    def nested(step: int, timestep: Tensor, codes: Tensor) -> None:
        if step == 3:
            actual.extend(run_in_threads(lambda: capture_latents(amused)))

    with paradec.accelerate(amused, paradec.TaylorSeer(interval=3)) as session:
        fast = capture_latents(amused)
        assert session.report().full_steps == [0, 3]
        assert torch.equal(capture_latents(other_pipe), plain)
        with pytest.raises(RuntimeError, match="in another thread|used by another thread"):
            capture_latents(amused, callback=nested)
        assert torch.equal(actual[0], fast) and torch.equal(capture_latents(amused), fast)
    assert torch.equal(capture_latents(amused), plain)


def test_given_image_tokens_stay() -> None:
    for cls in IMAGE_SCHEDULERS:
        scheduler = cls(mask_token_id=8)
        scheduler.set_timesteps(6)
        generator = torch.Generator().manual_seed(0)
        sample = torch.randint(0, 8, (2, 3, 5), generator=generator)
        sample = scheduler.add_noise(sample, scheduler.timesteps[2], generator=generator)
        is_given = sample != 8
        assert is_given.any() and not is_given.all()
        start = sample.clone()
        for timestep in scheduler.timesteps[3:]:
            logits = torch.randn(2, 8, 3, 5, generator=generator)  # no logit for the mask
            sample = scheduler.step(logits, timestep, sample, generator=[generator, generator]).prev_sample
        assert torch.equal(sample[is_given], start[is_given]) and (sample < 8).all()


@pytest.mark.parametrize("cls", IMAGE_SCHEDULERS, ids=lambda cls: cls.__name__)
def test_add_noise_masks_the_share_of_the_schedule(cls: type) -> None:
    """After step t of T, a share of cos(pi / 2 (t + 1) / T) of the tokens is masked: none after the last step."""
    scheduler = cls(mask_token_id=8)
    scheduler.set_timesteps(6)
    generator = torch.Generator().manual_seed(0)
    for index, timestep in enumerate(scheduler.timesteps):
        noisy = scheduler.add_noise(torch.zeros(2, 100, 100, dtype=torch.int64), timestep, generator=generator)
        assert set(noisy.unique().tolist()) <= {0, 8}
        share = math.cos(math.pi / 2 * (index + 1) / 6)
        assert (noisy == 8).double().mean() == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("cls", IMAGE_SCHEDULERS, ids=lambda cls: cls.__name__)
def test_every_image_draws_from_its_own_generator(cls: type) -> None:
    def fill(sample: Tensor, seeds: list[int]) -> Tensor:
        scheduler = cls(mask_token_id=8)
        scheduler.set_timesteps(3)
        for timestep in scheduler.timesteps:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            logits = torch.zeros(len(sample), 8, 4, 4)
            sample = scheduler.step(logits, timestep, sample, generator=generators).prev_sample
        return sample

    masks, full = torch.full((1, 4, 4), 8), torch.ones(1, 4, 4, dtype=torch.int64)
    first, second = fill(masks, [5]), fill(masks, [6])
    assert not torch.equal(first, second)
    assert torch.equal(fill(torch.cat((full, masks)), [6, 5]), torch.cat((full, first)))


def test_rules_that_fill_masks_need_a_mask_id() -> None:
    logits, sample = torch.zeros(1, 4, 9), torch.zeros(1, 4, dtype=torch.int64)
    for cls in TEXT_SCHEDULERS:
        if cls not in (schedulers.EntropyBoundScheduler, schedulers.Learn2PDScheduler):
            with pytest.raises(ValueError, match=f"mask_token_id=None: {cls.__name__} fills masks"):
                cls().step(logits, 0, sample, mask_token_id=None)


@pytest.mark.parametrize("cls", [*TEXT_SCHEDULERS, *IMAGE_SCHEDULERS], ids=lambda cls: cls.__name__)
def test_config_round_trips(cls: type, tmp_path: Path, filter_path: str) -> None:
    base = required_settings(cls, filter_path) if cls in TEXT_SCHEDULERS else {"mask_token_id": 9}
    scheduler = cls(**base)
    names = CHANGED_VALUES.keys() & scheduler.config.keys() - ({"threshold"} if cls in IMAGE_SCHEDULERS else set())
    scheduler = cls(**base, **{name: CHANGED_VALUES[name] for name in names})
    scheduler.save_pretrained(tmp_path)
    json.loads((tmp_path / "scheduler_config.json").read_text())
    repeated = cls.from_pretrained(tmp_path)
    assert type(repeated) is cls and repeated.sampler == scheduler.sampler
    original = (BlockRefinementScheduler if cls in TEXT_SCHEDULERS else AmusedScheduler).from_config(scheduler.config)
    assert cls.from_config(original.config).sampler == scheduler.sampler
    assert cls.__module__ == "paradec.schedulers"
    assert all(value == scheduler.config[name] for name, value in base.items())


CHANGED_VALUES = {
    "block_length": 8, "threshold": 0.8, "decay": 0.5, "anchor_threshold": 0.85, "gamma": 0.3, "radius": 2,
    "minimum": 3, "kl_threshold": 0.02, "history": 4, "combination": "credit(decay=0.5)+factor", "local_steps": 3,
    "height": 2, "width": 3,
}  # fmt: skip


def test_from_config_takes_explicit_values_and_class_defaults() -> None:
    original = BlockRefinementScheduler(block_length=8, threshold=0.6)
    assert schedulers.ThresholdScheduler.from_config(original.config).config.threshold == 0.6
    assert schedulers.ThresholdScheduler.from_config(BlockRefinementScheduler().config).config.threshold == 0.9
    loaded = dict(original.config) | {"_use_default_values": [], "editing_threshold": None}
    assert schedulers.EditingScheduler.from_config(loaded).config.editing_threshold == 0.5
    changed = schedulers.ThresholdScheduler.from_config(original.config, threshold=0.75)
    assert changed.sampler.threshold == 0.75 and changed.config.block_length == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.LocalLeapScheduler(radios=3), "unknown config key of LocalLeapScheduler: 'radios'"),
        (lambda s: s.LocalLeapScheduler.from_config({}, radios=3), "'radios' .did you mean 'radius'"),
        (lambda s: s.LocalLeapScheduler.from_config({"nonsense": 3}), "unknown config key of .*: 'nonsense'"),
        (lambda s: s.ThresholdScheduler(threshold=2), r"threshold=2 must be a number in \[0, 1\]"),
        (lambda s: s.ThresholdScheduler(block_length=0), "block_length=0 must be an integer from 1"),
        (lambda s: s.ThresholdScheduler().set_timesteps(0), "num_inference_steps=0 must be"),
        (lambda s: s.EntropyBoundScheduler(t_min=0), "t_min=0 must be a number in"),
        (lambda s: s.MaskGITScheduler(), "mask_token_id=None: MaskGITScheduler needs the mask's id"),
        (lambda s: s.MaskGITScheduler(mask_token_id=3).set_timesteps(-1), "num_inference_steps=-1 must be"),
        (lambda s: s.CombinationScheduler(combination="wino"), "combination='wino' cannot be a scheduler"),
        (lambda s: s.FreeDaveScheduler(), "FreeDave evaluates drafts.*use paradec.generate"),
        (lambda s: s.WinoScheduler.from_config({}), "WINO evaluates a shadow.*use paradec.generate"),
        (lambda s: s.LengthTrimScheduler(), "trimming changes the length.*use paradec.generate"),
        (lambda s: s.AdaBlockScheduler(), "AdaBlock decides where blocks end.*use paradec.generate"),
    ],
)  # fmt: skip
def test_bad_configs(call: Any, message: str) -> None:
    refuses(lambda: call(schedulers), message)


def test_pipelines_that_cannot_use_a_scheduler(amused: AmusedPipeline, pipe: Any, ids: Tensor) -> None:
    with pytest.raises(AttributeError, match="LocalLeapScheduler has no 'mask_token_id': it works in LLaDA2Pipeline"):
        amused.scheduler = schedulers.LocalLeapScheduler()
        embeds, states = torch.ones(1, 8), torch.ones(1, 8, 8)
        amused(prompt_embeds=embeds, encoder_hidden_states=states, height=4, width=4, guidance_scale=0.0)
    with pytest.raises(AttributeError, match="MaskGITScheduler has no 'block_length': it works in AmusedPipeline"):
        pipe.scheduler = schedulers.MaskGITScheduler(mask_token_id=MASK)
        run_text(pipe, ids)
    with pytest.raises(ValueError, match="sample is torch.float32.*takes int64 token ids"):
        schedulers.ThresholdScheduler().step(torch.zeros(1, 4, 9), 0, torch.zeros(1, 4), mask_token_id=3)


RELOAD = """
import sys, torch, diffusers, paradec
try:
    diffusers.LLaDA2Pipeline.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "paradec.schedulers" in str(error) and "has not been imported" in str(error), error
else:  # earlier releases look for the module themselves
    assert diffusers.__version__ < "0.42", "loaded without the import"
import paradec.schedulers
pipe = diffusers.LLaDA2Pipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
ids = torch.tensor([[1, 2, 3]])
out = pipe(input_ids=ids, gen_length=13, block_length=8, mask_token_id=40, output_type="seq").sequences
print(type(pipe.scheduler).__name__, pipe.scheduler.sampler.radius, out.tolist())
"""


def test_a_saved_pipeline_loads_in_a_fresh_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, initializer_range=0.4,
    )  # fmt: skip
    pipeline = LLaDA2Pipeline(BertForMaskedLM(config).eval(), BlockRefinementScheduler())
    pipeline.scheduler = schedulers.LocalLeapScheduler.from_config(pipeline.scheduler.config, radius=3)
    ids = torch.tensor([[1, 2, 3]])
    out = pipeline(input_ids=ids, gen_length=13, block_length=8, mask_token_id=MASK, output_type="seq")
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["scheduler"] == ["paradec.schedulers", "LocalLeapScheduler"]
    process = subprocess.run([sys.executable, "-c", RELOAD, str(tmp_path)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == f"LocalLeapScheduler 3 {out.sequences.tolist()}"


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.create("threshold", threshold=0.4),
        samplers.create("hierarchy", threshold=0.6, low_threshold=0.2),
        samplers.create("credit(threshold=0.5)+localleap"),
        samplers.Union(rules=("localleap",), stages=("credit",)),
        samplers.Intersection(rules=("threshold", "entropy_threshold")),
        "factor",
    ],
    ids=str,
)
def test_a_pipeline_decodes_like_generate(model: Model, sampler: Any, tmp_path: Path) -> None:
    paradec.Request(sampler=sampler, block_length=BLOCK, max_new_tokens=8).save(tmp_path / "p.json")
    ids = torch.randint(0, 30, (2, 8), generator=torch.Generator().manual_seed(2))
    pipe = LLaDA2Pipeline(BlockCausal(model), BlockRefinementScheduler(block_length=BLOCK))
    pipe.scheduler = schedulers.from_preset(tmp_path / "p.json")
    arguments = schedulers.call_arguments(tmp_path / "p.json")
    assert arguments == {"gen_length": 8}
    expected = paradec.generate(model, input_ids=ids, preset=tmp_path / "p.json", eos_early_stop=False)
    assert torch.equal(run_text(pipe, ids, **arguments), expected.new_tokens)
    assert pipe.model.calls == expected.nfe


def test_steps_are_counted_per_block(model: Model) -> None:
    preset = paradec.Request(sampler="low_confidence", block_length=BLOCK, max_new_tokens=8, steps=4, temperature=0.5)
    arguments = schedulers.call_arguments(preset)
    assert arguments == {"gen_length": 8, "temperature": 0.5, "num_inference_steps": 2}
    scheduler = schedulers.from_preset(preset)
    assert isinstance(scheduler, schedulers.LowConfidenceScheduler) and scheduler.config.num_inference_steps == 2
    assert schedulers.from_preset(preset, block_length=2).config.block_length == 2
    ids = torch.randint(0, MASK - 1, (1, 8), generator=torch.Generator().manual_seed(2))
    pipe = LLaDA2Pipeline(BlockCausal(model), scheduler)
    greedy = {**arguments, "temperature": 0.0}
    expected = paradec.generate(model, input_ids=ids, preset=preset, temperature=0.0, eos_early_stop=False)
    assert torch.equal(run_text(pipe, ids, **greedy), expected.new_tokens) and pipe.model.calls == 4


def test_a_seed_becomes_a_generator(model: Model) -> None:
    preset = paradec.Request(sampler="threshold", block_length=BLOCK, max_new_tokens=8, temperature=0.8, seed=3)
    pipe = LLaDA2Pipeline(BlockCausal(model), schedulers.from_preset(preset))
    ids = torch.randint(0, MASK - 1, (2, 8), generator=torch.Generator().manual_seed(2))
    first, repeated = (run_text(pipe, ids, **schedulers.call_arguments(preset)) for _ in range(2))
    arguments = {**schedulers.call_arguments(preset), "generator": torch.Generator().manual_seed(3)}
    assert torch.equal(first, repeated) and torch.equal(first, run_text(pipe, ids, **arguments))
    refuses(lambda: schedulers.call_arguments(paradec.Request(seed=(1, 2))), "seed of the preset=.1, 2.")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ({"cache": "dual"}, "cache='dual' of the preset is not supported"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"sampler": "wino"}, "'wino' of the preset has no scheduler"),
        ({"sampler": "freedave"}, "'freedave'"),
        ({"steps": 4, "sampler": "low_confidence"}, "steps=4 of the preset"),
        ({"steps": 10, "block_length": 4, "max_new_tokens": 12}, "steps=10 must be a multiple .* blocks .3"),
        ({"smapler": "x"}, "did you mean 'sampler'"),
    ],
)
def test_presets_that_no_pipeline_supports_are_refused(preset: dict[str, Any], message: str) -> None:
    refuses(lambda: schedulers.from_preset(preset), message)
