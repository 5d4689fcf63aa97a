"""Infill: masks anywhere in the prompt are filled; other tokens stay."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from decoding import MASKED, fits, refuses, supported_fields, topology_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import tiny
from tokenized_models import TOKENIZER, encode, reciting_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

import paradec
from paradec.models.adapter import Model

_ = -1  # a hole; `with_mask_ids` replaces it with the model's mask id
HOLES = [[1, 2, _, 3, 4, _, _, 5], [_, 6, 7, _], [8, 9, 10, _, _, 11, 12, 13, 14, _]]


@pytest.fixture(params=["llada64", "dream64"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def with_mask_ids(model: Model, row: list[int]) -> list[int]:
    return [model.facts.mask_token_id if token == _ else token for token in row]


def check_filled(model: Model, out: paradec.Output, rows: list[list[int]], new: int = 0) -> None:
    width = max(map(len, rows)) + new
    assert out.sequences.shape == out.filled.shape == out.attention_mask.shape == (len(rows), width)
    assert (out.sequences != model.facts.mask_token_id).all()
    for index, row in enumerate(rows):
        start = width - new - len(row)
        assert out.attention_mask[index].tolist() == [0] * start + [1] * (width - start)
        actual = out.sequences[index, start : start + len(row)].tolist()
        assert [a for a, b in zip(actual, row, strict=True) if b != _] == [b for b in row if b != _]
        assert out.filled[index].tolist() == [False] * start + ([token == _ for token in row] + [True] * new)


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_every_sampler_fills_holes(name: str, model: Model) -> None:
    if not fits(name, model):
        pytest.skip("refused by name")
    arguments = {"sampler": name, "seed": 0, "temperature": 0.7, "trace": True}
    out = paradec.infill(model, [with_mask_ids(model, row) for row in HOLES], **arguments)
    check_filled(model, out, HOLES)
    assert out.tokens == [row.count(_) for row in HOLES]
    assert out.new_tokens.shape == (3, 0)
    assert [len(row) for row in out.trace.replay()] == [len(row) for row in HOLES]
    for index, row in enumerate(HOLES):
        assert out.row_nfe[index] <= row.count(_) or paradec.samplers.get(name).needs.revises
        if index != MASKED.index(name) % len(HOLES):
            continue
        alone = paradec.infill(model, with_mask_ids(model, row), **arguments)
        assert alone.sequences[0].tolist() == out.sequences[index, -len(row) :].tolist()
        assert alone.nfe == out.row_nfe[index]


@pytest.mark.thinned
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.lists(st.one_of(st.just(_), st.integers(0, 40)), min_size=1, max_size=12).filter(lambda row: _ in row),
        min_size=1,
        max_size=3,
    ),
    cache=st.sampled_from([name for name in paradec.caches.names() if name in ("none", "prefix", "dual")]),
    new=st.sampled_from([0, 0, 5]),
    request_=st.fixed_dictionaries(
        {
            "block_length": st.sampled_from([None, 2, 5]),
            "guidance_scale": st.sampled_from([1.0, 1.5]),
            "eos_early_stop": st.booleans(),
            "sampler": st.sampled_from(["low_confidence", "threshold", "entropy"]),
        }
    ),
)
@pytest.mark.filterwarnings("ignore:cache=")
def test_random_holes(model: Model, rows: list[list[int]], cache: str, new: int, request_: dict[str, Any]) -> None:
    ids = [with_mask_ids(model, row) for row in rows]
    out = paradec.infill(model, ids, cache=cache, max_new_tokens=new, **request_)
    check_filled(model, out, rows, new)
    assert all(nfe <= row.count(_) + new for nfe, row in zip(out.row_nfe, rows, strict=True))
    request_ = request_ | {"holes_eos_inf": True}
    repeated = paradec.generate(model, input_ids=ids, cache=cache, max_new_tokens=new, **request_)
    assert torch.equal(repeated.sequences, out.sequences)


def test_blocks_run_from_the_first_mask(model: Model) -> None:
    """Blocks of three positions: 2 to 4, 5 to 7 (skipped, because it has no mask), 8 to 10."""
    row = with_mask_ids(model, [1, 2, _, 3, _, 4, 5, 6, _, 7, _, 8])
    out = paradec.infill(model, row, sampler="random", block_length=3, seed=0, trace=True)
    order = [commit[1] for step in out.trace.steps for commit in step.commits]
    assert sorted(order[:2]) == [2, 4] and sorted(order[2:]) == [8, 10]
    orders = []
    for seed in range(8):
        steps = paradec.infill(model, row, sampler="random", seed=seed, trace=True).trace.steps
        orders.append([commit[1] for step in steps for commit in step.commits])
    assert any(max(order[:2]) > 4 for order in orders)  # by default one block contains all holes


class ConstantModule(nn.Module):
    def __init__(self, token: int):
        super().__init__()
        self.config = type("Config", (), {"vocab_size": 8, "max_position_embeddings": 50})()
        self.token = token

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, 8)
        logits[..., self.token] = 9
        return logits


def constant_model(token: int) -> Model:
    tokens = {"mask_token_id": 7, "eos_token_id": 6, "pad_token_id": 5}
    return paradec.wrap(ConstantModule(token), prediction="same", topology="bidirectional", **tokens)


@pytest.mark.parametrize("sampler", ["threshold", "low_confidence"])
def test_end_tokens_in_holes_do_not_end_the_row(sampler: str) -> None:
    model = constant_model(6)
    request = {"sampler": sampler, "holes_eos_inf": False}
    out = paradec.infill(model, [1, 7, 7, 2, 7, 3], **request)
    assert out.sequences.tolist() == [[1, 6, 6, 2, 6, 3]]
    assert (out.tokens, out.finished) == ([3], [False])
    # end tokens of the prompt do not end the row either
    out = paradec.infill(model, [6, 7, 6, 7, 3], **request)
    assert out.sequences.tolist() == [[6, 6, 6, 6, 3]]
    # after the prompt, an end token ends the row
    out = paradec.infill(model, [1, 7, 2], max_new_tokens=4, block_length=2, **request)
    assert out.sequences.tolist() == [[1, 6, 2, 6, 5, 5, 5]]
    assert (out.tokens, out.finished) == ([2], [True])
    assert out.new_tokens.tolist() == [[6, 5, 5, 5]]
    # a hole at the end of the row may end it too
    assert paradec.infill(model, [1, 7, 7, 7], sampler=sampler).sequences.tolist() == [[1, 6, 5, 5]]
    assert paradec.infill(model, [1, 7, 2], logits_eos_inf=True).sequences[0, 1] != 6


@pytest.mark.parametrize("sampler", ["threshold", "low_confidence"])
def test_end_tokens_are_excluded_from_holes_only(sampler: str) -> None:
    model = constant_model(6)  # all other tokens tie, so token 0 is chosen
    assert paradec.infill(model, [1, 7, 7, 2, 7, 3], sampler=sampler).sequences.tolist() == [[1, 0, 0, 2, 0, 3]]
    # end tokens of the prompt stay; appended tokens, or a hole at the end, may end the row
    out = paradec.infill(model, [[1, 7, 6, 7, 2], [3, 7]], max_new_tokens=2, sampler=sampler, block_length=3)
    assert out.sequences.tolist() == [[1, 0, 6, 0, 2, 6, 5], [5, 5, 5, 3, 6, 5, 5]]
    assert (out.tokens, out.finished) == ([3, 1], [True, True])
    # `generate` with masks in the ids allows end tokens by default
    assert paradec.generate(model, input_ids=[1, 7, 2], sampler=sampler).sequences.tolist() == [[1, 6, 2]]
    repeated = paradec.generate(model, input_ids=[1, 7, 2], sampler=sampler, holes_eos_inf=True)
    assert repeated.sequences.tolist() == [[1, 0, 2]]
    everything = {"suppress_tokens": range(6), "sampler": sampler}
    refuses(lambda: paradec.infill(model, [1, 7, 2], **everything), "holes_eos_inf=True also exclude")
    assert paradec.infill(model, [1, 7], **everything).sequences.tolist() == [[1, 6]]
    refuses(lambda: paradec.infill(model, [1, 7, 2], holes_eos_inf=None), "holes_eos_inf=None must be True or False")


ROWS = [[1, 2, _, 3, 4, _, _, 5], [_, 6, 7, _, 8], [8, 9, 10, _, _, 11, 12, 13, 14, _, _, _, 15]]


def with_even_end_tokens(model: Model) -> Model:
    tokens = {*range(0, model.facts.vocab_size, 2), *model.facts.eos_token_ids}
    ends = tuple(sorted(tokens - {model.facts.mask_token_id}))
    copied = copy.copy(model)
    copied.facts = dataclasses.replace(model.facts, eos_token_ids=ends)
    return copied


def check_no_ends_inside(model: Model, **request: Any) -> None:
    ending, rows = with_even_end_tokens(model), [with_mask_ids(model, row) for row in ROWS]
    ends = torch.tensor(ending.facts.eos_token_ids)
    request = supported_fields(request.get("sampler", "threshold"), {"seed": 0, "temperature": 0.7, **request})
    out = paradec.infill(ending, rows, **request)
    expected = paradec.infill(model, rows, suppress_tokens=ends, **request)
    assert torch.equal(out.sequences, expected.sequences) and out.row_nfe == expected.row_nfe
    assert not torch.isin(out.sequences[out.filled], ends).any()
    free = paradec.infill(ending, rows, holes_eos_inf=False, **request)
    assert torch.isin(free.sequences[free.filled], ends).any()
    # appended tokens may be end tokens
    if "temperature" not in request:
        return
    request["temperature"] = 4.0
    out = paradec.infill(ending, rows, max_new_tokens=6, eos_early_stop=False, **request)
    filled = out.filled[:, :-6]
    assert not torch.isin(out.sequences[:, :-6][filled], ends).any() and torch.isin(out.new_tokens, ends).any()


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_every_sampler_keeps_end_tokens_out_of_holes(name: str, llada64: Model, dream64: Model) -> None:
    blocks = tiny(2, topology_of(name), ends=())
    blocks.facts = dataclasses.replace(blocks.facts, pad_token_id=38)
    models = [model for model in (llada64, dream64) if fits(name, model)] or [blocks]
    check_no_ends_inside(models[MASKED.index(name) % len(models)], sampler=name)  # models alternate


@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:cache=")
@pytest.mark.parametrize("cache", paradec.caches.names())
def test_every_cache_keeps_end_tokens_out_of_holes(cache: str, llada64: Model) -> None:
    try:
        check_no_ends_inside(llada64, sampler="low_confidence", cache=cache, block_length=5)
    except ValueError as error:
        assert f"cache={cache!r} does not work with" in str(error)
        pytest.skip("refused by name")


@pytest.mark.thinned
@pytest.mark.parametrize(
    "request_",
    [
        {"sampler": paradec.samplers.create("freedave", base="threshold", draft_mode="tree")},
        {"sampler": "credit+localleap"},
        {"guidance_scale": 1.5},
        {"top_p": 0.9, "sampler": "entropy"},
        {"stop": paradec.Prophet(), "sampler": "low_confidence"},
    ],
    ids=str,
)
def test_other_requests_keep_end_tokens_out_of_holes(request_: dict[str, Any], dream64: Model) -> None:
    check_no_ends_inside(dream64, **request_)


def test_reference_draws_keep_end_tokens_out_of_holes(model: Model) -> None:
    ending = with_even_end_tokens(model)
    out = paradec.infill(ending, with_mask_ids(model, ROWS[0]), temperature=1.0, seed=0, rng="reference")
    assert not torch.isin(out.sequences[out.filled], torch.tensor(ending.facts.eos_token_ids)).any()


def test_guidance_masks_the_given_tokens(llada64: Model) -> None:
    seen = []
    record = lambda module, args, kwargs: seen.append(kwargs["input_ids"].clone())  # noqa: E731
    handle = llada64.module.register_forward_pre_hook(record, with_kwargs=True)
    row = with_mask_ids(llada64, HOLES[0])
    paradec.infill(llada64, row, guidance_scale=2.0, sampler="low_confidence")
    handle.remove()
    assert seen[0].tolist() == [row, [llada64.facts.mask_token_id] * len(row)]


def test_the_packaged_model_completes_an_answer(packaged: Model) -> None:
    def chat(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    out = paradec.infill(packaged, chat("Sort: pear fig apple", "apple <mask> pear"))
    assert (out.text, out.fills, out.tokens) == ("apple fig pear", ["fig"], [1])
    out = paradec.infill(
        packaged,
        [chat("Reverse: pear fig apple kiwi", "<mask:2> fig <mask>"), chat("Sort: pear fig apple", "<mask> fig pear")],
        sampler="low_confidence",
    )
    assert out.text == ["kiwi apple fig pear", "apple fig pear"]
    assert out.fills == [["kiwi apple", "pear"], ["apple"]]
    # the hole may be in the question
    out = paradec.infill(packaged, chat("<mask>: pear fig apple kiwi", "kiwi apple fig pear"))
    assert len(out.fills) == 1 and out.text == "kiwi apple fig pear"
    # a turn without an answer is answered too
    out = paradec.infill(packaged, chat("Reverse: pear fig <mask>", "")[:1], max_new_tokens=6)
    assert len(out.fills) == 2 and out.finished == [True]


def test_texts_that_stand_for_masks(packaged: Model) -> None:
    mask = packaged.facts.mask_token_id
    word = {text: packaged.tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in ("fox", "cow")}

    def pattern(text: str, **arguments: Any) -> list[int]:
        out = paradec.infill(packaged, text, **arguments)
        return torch.where(out.filled, mask, out.sequences)[0].tolist()

    fox, cow = word["fox"], word["cow"]
    assert pattern("fox <mask> cow") == [fox, mask, cow]
    assert pattern("<mask> <mask> fox<mask>cow") == [mask, mask, fox, mask, cow]
    assert pattern("fox <mask:3> cow") == pattern("fox <mask><mask> <mask> cow") == [fox, mask, mask, mask, cow]
    assert pattern("fox ___ cow", mask="___") == [fox, mask, cow]
    assert pattern("fox [?:2] cow", mask="[?]") == [fox, mask, mask, cow]
    assert pattern("fox <|mdm_mask|> cow") == [fox, mask, cow]  # the tokenizer's mask token
    assert pattern("fox <mask> cow", max_new_tokens=2) == [fox, mask, cow, mask, mask]
    request = {"num_return_sequences": 2, "temperature": 1.0, "seed": 0}
    several = paradec.infill(packaged, ["fox <mask>", "<mask:2> cow fox"], **request)
    assert several.sequences.shape == (4, 4) and len(several.text) == len(several.fills) == 4
    assert [len(row) for row in several.fills] == [1, 1, 1, 1]


def test_a_space_before_a_hole_belongs_to_it() -> None:
    """In byte-level vocabularies a space is part of the next token, so the space before a hole is not encoded."""
    one, two, three = (encode(text) for text in ("one", " two", " three"))
    for text in ("one <mask> three", "one<mask> three"):
        out = paradec.infill(reciting_model([*three], [*two]), text, logits_eos_inf=True)
        ids, mask = out.sequences[0].tolist(), TOKENIZER.mask_token_id
        masked = [mask if hole else i for i, hole in zip(ids, out.filled[0].tolist(), strict=True)]
        assert masked == [*one, mask, *three]


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        ("fox cow", {}, "the prompt of row 0 has nothing to fill; put '<mask>' or the mask id in it"),
        (["fox <mask>", "cow"], {}, "the prompt of row 1 has nothing to fill"),
        ("fox <mask>", {"mask": "___"}, "nothing to fill; put '___'|outside the model's vocabulary"),
        ("fox <mask:0>", {}, "count of '<mask:0>'=0 must be an integer from 1 to 512"),
        ("fox <mask:511> cow cow", {}, r"prompt of 514 tokens \+ max_new_tokens=0 = 514 is longer"),
        ("fox <mask>", {"mask": ""}, "mask='' must be the text that represents a token to fill"),
        ("fox <mask>", {"max_new_tokens": -1}, "max_new_tokens=-1 must be an integer from 1"),
        ("zebu <mask>", {}, "words outside the model's vocabulary: .*zebu"),
        ([1, 2], {}, "the prompt of row 0 has nothing to fill"),
    ],
)
def test_wrong_infills_are_refused(packaged: Model, prompt: Any, arguments: dict[str, Any], message: str) -> None:
    refuses(lambda: paradec.infill(packaged, prompt, **arguments), message)


def test_generate_takes_masks_as_ids_only(packaged: Model) -> None:
    mask = packaged.facts.mask_token_id
    with pytest.raises(ValueError, match=f"row 0 holds the mask id {mask} at position .*; paradec.infill fills masks"):
        paradec.generate(packaged, "Sort: <|mdm_mask|> fig")
    out = paradec.generate(packaged, input_ids=[1, mask, 2])
    assert out.sequences.shape == (1, 3) and out.sequences[0, [0, 2]].tolist() == [1, 2]
    refuses(lambda: paradec.generate(packaged, input_ids=[[1, mask], [2, 3]]), "the prompt of row 1 has no mask")
    out = paradec.generate(packaged, input_ids=[[1, mask], [2, 3]], max_new_tokens=2)
    assert out.filled.tolist() == [[False, True, True, True], [False, False, True, True]]


def test_tokenizer_without_a_text_for_the_mask(packaged: Model) -> None:
    facts = packaged.facts
    config = transformers.LlamaConfig(
        vocab_size=facts.vocab_size + 1, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    ids = {"mask_token_id": facts.vocab_size, "tokenizer": packaged.tokenizer}
    module = transformers.LlamaForCausalLM(config)
    unnamed = paradec.wrap(module, **ids, prediction="same", topology="bidirectional")
    refuses(lambda: paradec.infill(unnamed, "fox <mask>"), "LlamaForCausalLM has no text for the mask id 123")
    assert paradec.infill(unnamed, [1, facts.vocab_size, 2]).tokens == [1]
    causal = paradec.wrap(unnamed.unwrap(), prediction="shifted", topology="causal")
    refuses(lambda: paradec.infill(causal, [1, 2]), "infill needs a model with a mask token")


SMALL = {
    "vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32,
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "cls", "sep", "eos"))},
}  # fmt: skip


def wordpiece_tokenizer() -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "on", "mat", "##s", "."]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "ConvBert"])
def test_masked_language_models(kind: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**SMALL)
    module = getattr(transformers, kind + "ForMaskedLM")(config).double().eval()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model = paradec.wrap(module, tokenizer=wordpiece_tokenizer())
    texts = ["The cat <mask> on the <mask>.", "the dogs <mask>"]
    out = paradec.infill(model, texts, sampler="low_confidence", suppress_tokens=[0, 1, 2, 3])
    assert out.sequences[0].tolist()[:3] == [2, 5, 6] and out.sequences[0, -1] == 3
    assert out.sequences[1, -6:-2].tolist() == [2, 5, 7, 11] and out.sequences[1, -1] == 3
    assert [len(fills) for fills in out.fills] == [2, 1]
    assert out.text[0].startswith("the cat ") and "[" not in "".join(out.text)
    # with one mask the token is the module's likeliest one
    ids = torch.tensor([[2, 5, 7, 11, 4, 3]])
    with torch.inference_mode():
        logits = module(ids).logits[0, 4]
    assert out.sequences[1, -2] == 5 + logits[5:].argmax()
