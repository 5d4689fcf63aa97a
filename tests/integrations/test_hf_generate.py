"""`model.generate(..., custom_generate=paradec.hf_generate)`: paradec's decoding through transformers' generate."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import refuses
from places import GOLDEN
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM, Qwen2ForCausalLM, TextStreamer

import paradec
from paradec.models.adapter import Model
from paradec.models.cache_argument import cache_argument

PREDICTION = {"llada": "same", "dream": "shifted"}
PADDED = torch.tensor([[9, 9, 1, 2, 3], [9, 4, 5, 6, 7]])
ATTENTION = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])


def module_of(kind: str) -> tuple[Any, Model]:
    """Return a checkpoint as a module of transformers and as paradec's model."""
    loaded = paradec.load(GOLDEN / f"{kind}-tiny", dtype="float64")
    config = loaded.module.config.__class__.from_dict(loaded.module.config.to_dict())
    config._attn_implementation = "sdpa"
    plain = (LlamaForCausalLM if kind == "llada" else Qwen2ForCausalLM)(config).double()
    plain.load_state_dict(loaded.module.state_dict())
    ends, pad = list(loaded.facts.eos_token_ids), loaded.facts.pad_token_id
    plain.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    return plain.eval(), loaded


@pytest.fixture(scope="module", params=["llada", "dream"])
def case(request: pytest.FixtureRequest) -> tuple[Any, Model, dict[str, Any]]:
    plain, loaded = module_of(request.param)
    arguments = {"custom_generate": paradec.hf_generate, "prediction": PREDICTION[request.param]}
    return plain, loaded, arguments | {"mask_token_id": loaded.facts.mask_token_id}


SETTINGS = [{}, {"kv_cache": "dual", "block_length": 4}, {"sampler": "low_confidence", "steps": 6}]


@pytest.mark.thinned
@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_paradec_generate(case: Any, settings: dict[str, Any]) -> None:
    plain, loaded, arguments = case
    blocks = {} if "block_length" in settings else {"block_length": 12}
    paradec_settings = {name.removeprefix("kv_"): value for name, value in settings.items()}
    expected = paradec.generate(
        loaded, input_ids=PADDED, attention_mask=ATTENTION, max_new_tokens=12, **blocks, **paradec_settings
    )
    request = {"attention_mask": ATTENTION, **arguments, **blocks, **settings}
    out = plain.generate(PADDED, max_new_tokens=12, return_dict_in_generate=True, **request)
    longest = max(expected.tokens)
    assert out.sequences.shape == (2, 5 + longest)
    assert torch.equal(out.sequences[:, 5:], expected.new_tokens[:, :longest])
    assert torch.equal(out.sequences[:, :5][ATTENTION.bool()], PADDED[ATTENTION.bool()])
    assert (out.nfe, out.tokens_per_forward) == (expected.nfe, expected.tokens_per_forward)
    # max_length counts the prompt
    assert torch.equal(plain.generate(PADDED, max_length=17, **request), out.sequences)


def test_sampling_settings_have_the_meaning_of_transformers(case: Any) -> None:
    plain, loaded, arguments = case
    ids = torch.tensor([[1, 2, 3]])
    shared = {"max_new_tokens": 8, "seed": 4, "suppress_tokens": [5], "guidance_scale": 1.5}
    shared |= {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "num_return_sequences": 3}
    shared |= {"min_p": 0.05, "repetition_penalty": 1.2, "min_new_tokens": 3}
    out = plain.generate(ids, do_sample=True, bad_words_ids=[[8], [9]], **shared, **arguments)
    expected = paradec.generate(loaded, input_ids=ids, block_length=8, bad_words=[[8], [9]], **shared)
    assert torch.equal(out, expected.sequences[:, : out.shape[1]]) and out.shape[1] == 3 + max(expected.tokens)
    # without do_sample the temperature is ignored, like in transformers; the default top_k is 50
    request = {"input_ids": ids, "max_new_tokens": 8, "block_length": 8}
    greedy = plain.generate(ids, max_new_tokens=8, **arguments)
    assert torch.equal(greedy, paradec.generate(loaded, **request).sequences[:, : greedy.shape[1]])
    sampled = plain.generate(ids, max_new_tokens=8, seed=1, do_sample=True, **arguments)
    expected = paradec.generate(loaded, **request, seed=1, temperature=1.0, top_k=50)
    assert torch.equal(sampled, expected.sequences[:, : sampled.shape[1]])
    # the generation config may have the mask id
    without_mask = {key: value for key, value in arguments.items() if key != "mask_token_id"}
    fields = {"max_new_tokens": 8, "eos_token_id": 61, "pad_token_id": 61, "mask_token_id": arguments["mask_token_id"]}
    assert torch.equal(plain.generate(ids, generation_config=GenerationConfig(**fields), **without_mask), greedy)


@pytest.mark.thinned
def test_holes_do_not_count_as_new_tokens(case: Any) -> None:
    plain, loaded, arguments = case
    mask, end = loaded.facts.mask_token_id, loaded.facts.eos_token_ids[0]
    ids, num_early = torch.tensor([[1, mask, 2, mask, 3]]), 0
    for token_id in range(5, 20):
        suppressed = [token for token in range(loaded.facts.vocab_size) if token not in (end, token_id)]
        request = {"max_new_tokens": 6, "suppress_tokens": suppressed, "holes_eos_inf": True}
        out = plain.generate(ids, **request, **arguments)[0].tolist()
        assert out[:5] == [1, token_id, 2, token_id, 3]
        answer = out[5:]
        assert answer.index(end) == len(answer) - 1 if end in answer else len(answer) == 6
        num_early += end in answer[:4]
    assert num_early


def test_generate_does_not_change_the_model(case: Any) -> None:
    plain, _, arguments = case
    ids = torch.tensor([[1, 2, 3, 4]])
    plain.train()

    def state_of_model() -> tuple[Any, ...]:
        hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in plain.modules()]
        return plain.config._attn_implementation, [part.training for part in plain.modules()], hooks

    before, logits = state_of_model(), plain(ids).logits
    plain.generate(ids, max_new_tokens=6, **arguments)
    assert state_of_model() == before
    assert torch.equal(plain(ids).logits, logits)
    message = "unknown sampler: 'treshold'"
    refuses(lambda: plain.generate(ids, max_new_tokens=6, sampler="treshold", **arguments), message)

    def fail(state: Any, commit: Any) -> None:
        raise RuntimeError("callback failed")

    refuses(lambda: plain.generate(ids, max_new_tokens=6, callback=fail, **arguments), "callback failed", RuntimeError)
    assert state_of_model() == before
    assert torch.equal(plain(ids).logits, logits)
    # generate of transformers still works
    assert plain.eval().generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 4


def test_masks_in_the_ids_are_filled(case: Any) -> None:
    plain, loaded, arguments = case
    mask = loaded.facts.mask_token_id
    ids = torch.tensor([[1, mask, 3, mask, 5]])
    out = plain.generate(ids, max_new_tokens=4, **arguments)
    expected = paradec.generate(loaded, input_ids=ids, max_new_tokens=4)
    assert (out != mask).all() and out[0, [0, 2, 4]].tolist() == [1, 3, 5]
    assert torch.equal(out, expected.sequences[:, : out.shape[1]])
    # end tokens, which the model would choose, are excluded from holes
    ends = {"eos_token_id": [int(out[0, 1]), int(out[0, 3])], "max_new_tokens": 4}
    allowed, excluded = (plain.generate(ids, holes_eos_inf=value, **ends, **arguments) for value in (False, True))
    assert torch.equal(allowed[0, :5], out[0, :5]) and torch.equal(excluded[0, [0, 2, 4]], ids[0, [0, 2, 4]])
    assert not torch.isin(excluded[0, [1, 3]], torch.tensor([mask, *ends["eos_token_id"]])).any()


def test_streamer_and_tokenizer_are_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers passes no streamer and no tokenizer to a callable; functools.partial binds both."""
    packaged = paradec.load()
    facts, tokenizer, module = packaged.facts, packaged.tokenizer, packaged.module
    chat = [{"role": "user", "content": "Sort: pear fig apple"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    custom_generate = functools.partial(paradec.hf_generate, streamer=streamer, tokenizer=tokenizer)
    arguments = {"custom_generate": custom_generate, "prediction": "same", "eos_token_id": list(facts.eos_token_ids)}
    out = module.generate(ids, max_new_tokens=8, pad_token_id=facts.pad_token_id, **arguments)
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == "apple fig pear"
    assert capsys.readouterr().out == tokenizer.decode(out[0, ids.shape[1] :]) + "\n"
    out = module.generate(ids, max_new_tokens=8, stop_strings=["fig"], **arguments)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "apple fig"
    # the module's earlier adapter still works
    assert paradec.generate(packaged, "Sort: pear fig apple").text == "apple fig pear"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor expects one next token"),
        ({"max_time": 9.0}, "MaxTimeCriteria expects one next token"),
        ({"num_beams": 2}, "num_beams=2 is not supported; it must be 1"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported; it must be None"),
        ({"assistant_model": object()}, "assistant_model=.*object.* is not supported; a causal model takes sampler="),
        ({"streamer": SimpleNamespace(put=len)}, "streamer=.*Namespace.* is not passed to .* bind it: .*partial"),
        ({"position_ids": torch.tensor([[3, 4, 5]])}, "position_ids=.* must count each row's tokens from 0"),
        ({"negative_prompt_ids": torch.tensor([[1]]), "guidance_scale": 2.0}, "negative_prompt_ids is not supported"),
        ({"prediction": None}, "prediction is needed to wrap"),
        ({"mask_token_id": None}, "mask_token_id is needed to wrap"),
        ({"temperatur": 1.0}, "temperatur"),
    ],
)
def test_unsupported_settings_are_refused(case: Any, settings: dict[str, Any], message: str) -> None:
    plain, _, arguments = case
    calls: list[int] = []
    handle = plain.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            plain.generate(torch.tensor([[1, 2, 3]]), **{"max_new_tokens": 6, **arguments, **settings})
    finally:
        handle.remove()
    assert calls == []


def test_a_filled_cache_is_refused(case: Any) -> None:
    plain, _, arguments = case
    ids = torch.tensor([[1, 2, 3]])
    name = cache_argument(plain)
    filled = getattr(plain(ids[:, :2], use_cache=True), name)
    refuses(lambda: plain.generate(ids, max_new_tokens=4, **{name: filled}, **arguments), f"{name} already has tokens")
    empty = plain.generate(ids, max_new_tokens=4, **{name: DynamicCache()}, **arguments)
    assert torch.equal(empty, plain.generate(ids, max_new_tokens=4, **arguments))


def test_a_kv_cache_passed_as_cache_is_refused(case: Any) -> None:
    """transformers 5.24 passes its own `cache` argument, so a bound `cache` must raise instead of being replaced."""
    plain, _, arguments = case
    ids, config = torch.tensor([[1, 2, 3]]), GenerationConfig(max_new_tokens=4)
    request = {name: value for name, value in arguments.items() if name != "custom_generate"}
    message = "cache='dual' must be a cache of transformers; give kv_cache='dual'"
    refuses(lambda: paradec.hf_generate(plain, ids, generation_config=config, cache="dual", **request), message)
    custom = functools.partial(paradec.hf_generate, cache="dual")
    refuses(lambda: plain.generate(ids, generation_config=config, custom_generate=custom, **request), "cache='dual'")


def test_either_length_field_is_accepted(case: Any) -> None:
    plain, loaded, arguments = case
    request = {name: value for name, value in arguments.items() if name != "custom_generate"}
    ids = torch.tensor([[1, 2, 3]])
    ends = {"eos_token_id": list(loaded.facts.eos_token_ids), "pad_token_id": loaded.facts.pad_token_id}
    expected = plain.generate(ids, max_new_tokens=6, **arguments)
    for length in ({"max_new_tokens": 6}, {"max_length": 9}):
        actual = paradec.hf_generate(plain, ids, generation_config=GenerationConfig(**length, **ends), **request)
        assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="generation_config has neither max_new_tokens nor max_length"):
        paradec.hf_generate(plain, ids, generation_config=GenerationConfig(**ends), **request)


def test_direct_calls_are_refused() -> None:
    refuses(lambda: paradec.hf_generate(None, torch.tensor([[1]])), "generation_config is missing")
