"""DiffusionGemma's sampler gives the tokens of transformers' `generate`, and those of a plain loop."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import renoising as plain_canvas
from recorded import Refused, find_checkpoint, golden, read_json, read_json_unrecorded, replay
from small_models import CANVAS, GEMMA_END, GEMMA_PAD, GEMMA_VOCAB, tiny_gemma
from torch import Tensor

import paradec
from paradec import samplers
from paradec.models.adapter import Model

RECORDED = [
    pytest.param(path, number, marks=[pytest.mark.full] if number % 5 else [])
    for path in sorted(golden("gemma").glob("*.json"))
    for number, case in enumerate(read_json_unrecorded(path).get("cases", []))
    if case.get("asked", {}).get("method") == "diffusion_gemma"
]
"""Recorded answers of transformers' `generate`: (file, index of the case)."""
SHORT = {"max_denoising_steps": 12, "confidence_threshold": 0.35}
ENDS = [11, 12, 13]


def prompts(case: str, seed: int, length: int = 9) -> tuple[Tensor, Tensor]:
    """Return ids and mask of "one" row, of three "equal" rows, or of three rows with two "padded" on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(14, GEMMA_VOCAB, (1 if case == "one" else 3, length), generator=generator)
    mask = torch.ones_like(ids)
    if case == "padded":
        mask[0, :4], mask[1, :1] = 0, 0
    return ids.masked_fill(mask == 0, GEMMA_PAD), mask


def decode_with_both(
    module: Any, case: str, seed: int, ends: list[int] | None, stop: bool, new: int = 48, pad: int | None = GEMMA_PAD
):
    """Return transformers' new tokens and its tokens per forward, and paradec's output."""
    ids, mask = prompts(case, seed)
    options = {"eos_token_id": ends, "pad_token_id": pad, "stability_threshold": 1 if stop else None}
    before = module.generation_config.pad_token_id
    module.generation_config.pad_token_id = pad
    try:
        torch.manual_seed(seed)
        theirs = module.generate(ids, attention_mask=mask, max_new_tokens=new, **SHORT, **options)
        model = paradec.wrap(module, eos_token_id=ends or [])
    finally:
        module.generation_config.pad_token_id = before
    sampler = samplers.create("diffusion_gemma", early_stop=stop, **SHORT)
    request = {"max_new_tokens": new, "sampler": sampler, "rng": "reference", "seed": seed}
    ours = paradec.generate(model, ids, attention_mask=mask, **request)
    model.unwrap()
    return theirs.sequences[:, ids.shape[1] :], theirs.tokens_per_forward, ours


@functools.cache
def load_model(folder: Path) -> Model:
    return paradec.load(folder)


@pytest.mark.parametrize(("path", "number"), RECORDED)
def test_recorded_answers(path: Path, number: int) -> None:
    case = read_json(path)["cases"][number]
    recorded_request = case["asked"]
    with replay(case["name"]):
        model = load_model(find_checkpoint(recorded_request["checkpoint"], "gemma"))
        sampler = samplers.create(recorded_request["method"], **recorded_request["settings"])
        request = {"max_new_tokens": recorded_request["max_new_tokens"], "seed": recorded_request["seed"]}
        if recorded_request["draws"] != "torch":
            raise Refused(f"draws={recorded_request['draws']!r}: only torch's stream can be drawn again")
        out = paradec.generate(model, recorded_request["prompts"], sampler=sampler, rng="reference", **request)
        assert out.sequences.tolist() == case["ids"]


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("num_seeds", "case", "stop", "ends"),
    [  # without `full`, every pair of values of case, stop and ends occurs
        pytest.param(count, case, stop, ends, marks=[pytest.mark.full] if count == 8 or (i + stop + j) % 2 else [])
        for count in (3, 8)
        for i, case in enumerate(["one", "equal", "padded"])
        for stop in (True, False)
        for j, ends in enumerate([None, ENDS])
    ],
)
def test_equals_transformers_generate(num_seeds: int, case: str, stop: bool, ends: list[int] | None) -> None:
    early = finished = 0
    for seed in range(num_seeds):
        answer, per_call, out = decode_with_both(tiny_gemma(), case, seed, ends, stop)
        width = answer.shape[1]  # transformers stops once all rows have ended
        assert torch.equal(out.new_tokens[:, :width], answer), seed
        assert (out.new_tokens[:, width:] == GEMMA_PAD).all()
        counted = (out.new_tokens != GEMMA_PAD).sum(1) / torch.tensor(out.denoising_calls)
        assert torch.equal(counted, per_call)
        early += any(calls % 12 for calls in out.denoising_calls)
        finished += sum(out.finished)
    if num_seeds == 8:  # 3 seeds may be too few for an early stop or an end token
        assert ends is not None or (early > 0) == stop  # with end tokens, rows may end before the early stop
        assert (finished > 0) == (ends is not None)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equals_transformers_generate_in_other_dtypes(dtype: torch.dtype) -> None:
    for case in ("one", "equal"):
        for seed in range(2):
            answer, _, out = decode_with_both(tiny_gemma(dtype=dtype), case, seed, None, True, new=32)
            assert torch.equal(out.new_tokens, answer)


def test_equals_transformers_generate_without_a_padding_token() -> None:
    """transformers continues after a row's end; paradec cuts this part off."""
    module, finished = tiny_gemma(), 0
    for seed in range(4):
        answer, _, out = decode_with_both(module, "equal", seed, ENDS, True, pad=None)
        for row, (ours, theirs) in enumerate(zip(out.new_tokens.tolist(), answer.tolist(), strict=True)):
            stop = next((i + 1 for i, token in enumerate(theirs) if token in ENDS), len(theirs))
            assert ours[:stop] == theirs[:stop]
            assert out.tokens[row] == stop
            finished += out.finished[row]
    assert finished


def test_equals_transformers_generate_with_a_long_prompt() -> None:
    module = tiny_gemma()
    model = paradec.wrap(module)
    ids, _ = prompts("one", 5, length=70)
    torch.manual_seed(5)
    theirs = module.generate(ids, max_new_tokens=32, **SHORT).sequences
    sampler = samplers.create("diffusion_gemma", **SHORT)
    ours = paradec.generate(model, ids, max_new_tokens=32, sampler=sampler, rng="reference", seed=5).sequences
    assert torch.equal(ours, theirs)


GEMMA = samplers.create("diffusion_gemma", entropy_bound=0.5, **SHORT)
THRESHOLD = samplers.create("canvas", rule="threshold(threshold=0.6)", stability_threshold=2, **SHORT)
SAMPLERS = {
    "diffusion_gemma": (GEMMA, plain_canvas.entropy_bound(0.5)),
    "threshold": (THRESHOLD, plain_canvas.threshold(0.6)),
    "low_confidence": (samplers.create("canvas", rule="low_confidence", **SHORT), plain_canvas.most_confident(12)),
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("holes", [False, True], ids=["answer", "holes"])
def test_a_row_equals_a_plain_loop(name: str, holes: bool) -> None:
    module = tiny_gemma(dtype=torch.float64)
    sampler, keep = SAMPLERS[name]
    model = paradec.wrap(module, eos_token_id=ENDS)
    ids = prompts("one", 3, length=40)[0][0].tolist()
    prompt = [token if i not in (5, 6, 9, 10, 11, 30) else -1 for i, token in enumerate(ids)] if holes else ids[:9]
    plain = {"steps": 12, "confidence": 0.35, "ends": tuple(ENDS), "stability": sampler.stability_threshold or 1}
    num_early = 0
    for seed in range(3):
        request = {"max_new_tokens": 3 if holes else 40, "sampler": sampler, "seed": seed}
        out = paradec.generate(model, prompt, **request)
        tokens, counts = plain_canvas.row(module, prompt, request["max_new_tokens"], keep, seed=seed, **plain)
        assert out.sequences[0, : len(tokens)].tolist() == tokens
        assert out.denoising_calls == [sum(counts)] and out.encoder_calls == [len(counts)]
        assert out.row_nfe == [sum(counts) + len(counts)]
        num_early += any(count < 12 for count in counts)
    assert num_early or name != "threshold"  # some canvases end before the last step


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_a_filtered_row_equals_a_plain_loop(filters: dict[str, float]) -> None:
    def filter_logits(logits: Tensor) -> Tensor:
        order = logits.argsort(-1, descending=True)
        mass_before = logits.gather(-1, order).softmax(-1).cumsum(-1) - logits.gather(-1, order).softmax(-1)
        rank = order.argsort(-1)
        is_allowed = rank < filters.get("top_k", GEMMA_VOCAB)
        is_allowed &= (mass_before < filters.get("top_p", 1.0)).gather(-1, rank)
        return logits.masked_fill(~is_allowed, -torch.inf)

    module = tiny_gemma(dtype=torch.float64)
    sampler, keep = SAMPLERS["diffusion_gemma"]
    prompt = prompts("one", 3)[0][0].tolist()
    request = {"max_new_tokens": 20, "sampler": sampler, "seed": 0, **filters}
    out = paradec.generate(paradec.wrap(module, eos_token_id=()), prompt, **request)
    tokens, counts = plain_canvas.row(module, prompt, 20, keep, seed=0, steps=12, confidence=0.35, cut=filter_logits)
    assert out.sequences[0].tolist() == tokens and out.denoising_calls == [sum(counts)]


def test_unset_settings_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model_settings = {"max_denoising_steps": 3, "t_max": 0.6, "t_min": None, "stability_threshold": 0}
    request = {"max_new_tokens": 20, "seed": 0}

    def decode(model: Model, **settings: Any) -> tuple[list[list[int]], list[int]]:
        out = paradec.generate(model, [9, 10], sampler=samplers.create("diffusion_gemma", **settings), **request)
        return out.new_tokens.tolist(), out.denoising_calls

    plain, module = paradec.wrap(tiny_gemma()), tiny_gemma()
    for name, value in model_settings.items():
        monkeypatch.setattr(module.generation_config, name, value)
    model, sampler_settings = paradec.wrap(module), {"max_denoising_steps": 7, "t_min": 0.1}
    # t_min=None means transformers' default, 0.4
    assert decode(model) == decode(plain, **model_settings | {"t_min": 0.4}) != decode(plain)
    assert decode(model, **sampler_settings) == decode(plain, **model_settings | sampler_settings) != decode(model)


def test_steps_are_divided_by_the_largest_number_of_canvases() -> None:
    model, sampler = paradec.wrap(tiny_gemma()), samplers.create("diffusion_gemma", early_stop=False)
    request = {"sampler": sampler, "seed": 0, "eos_early_stop": False}
    out = paradec.generate(model, [9, 10], steps=10, max_new_tokens=2 * CANVAS, **request)
    assert out.denoising_calls == [2 * 5]
    out = paradec.generate(model, [[9, 10], [9, -1, *range(10, 30)]], steps=5, max_new_tokens=CANVAS, **request)
    assert out.denoising_calls == [3, 2 * 3]


def test_end_and_padding_of_the_module_are_the_models() -> None:
    model = paradec.wrap(tiny_gemma(), eos_token_id=GEMMA_END)
    assert model.facts.eos_token_ids == (GEMMA_END,) and model.facts.pad_token_id == GEMMA_PAD
    assert (model.facts.topology, model.facts.block_length, model.facts.mask_token_id) == ("canvas", CANVAS, None)
