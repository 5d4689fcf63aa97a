"""Wrong arguments: an error of one line names the argument before the model is called."""

import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import fits, refuses
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import GOLDEN
from torch import Tensor, nn

import paradec
from paradec import samplers
from paradec.caches.stored import RangeCache
from paradec.core.protocol import Sampler
from paradec.samplers.masked import MaskedSampler, Needs
from paradec.samplers.masked.blocks import WholeCanvas

MASKED = [name for name in paradec.samplers.names() if paradec.samplers.get(name).family == "masked"]
PROMPT = [1, 2, 3]


class CallCounter:
    def __init__(self, model: Any):
        self.model = model
        self.calls = 0
        model.module.register_forward_pre_hook(self.count)

    def count(self, module: nn.Module, args: Any) -> None:
        self.calls += 1


@pytest.fixture(scope="module")
def llada() -> CallCounter:
    return CallCounter(paradec.load(GOLDEN / "llada-tiny"))


def assert_refused(counted: CallCounter, call: Any, *fragments: str, error: Any = (ValueError, TypeError)) -> None:
    """Check that `call` raises an error of one line with all fragments, before a forward of the model."""
    before = counted.calls
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    for fragment in fragments:
        assert fragment in text
    assert "\n" not in text
    assert len(text) < 250
    assert counted.calls == before


# for each argument: a part of the message that states the allowed values, then wrong values
WRONG: dict[str, tuple[Any, ...]] = {
    "sampler": ("", "treshold", object(), None, "sjd", "taylorseer"),
    "cache": ("prefix", "prefx"),
    "blocks": ("paradec.FixedBlocks(32)", 32),
    "block_length": ("an integer from 1 to", 0, 8.0, True, "8"),
    "steps": ("an integer from 1 to 1000000", 0),
    "max_new_tokens": ("", 0, 510),
    "temperature": ("1e+06]", -0.1, 1e-7, float("nan"), float("inf"), "hot", None, True),
    "top_p": ("(0, 1]", 0),
    "top_k": ("an integer from 1", 0),
    "guidance_scale": ("[0, 1e+06]", -1),
    "seed": ("", -1, 2**63, 1.5, "x", True, [1, 2], [None], np.array(-3)),
    "generator": ("a torch.Generator", np.random.default_rng(0)),
    "rng": ("counter", "refrence", None),
    "eos_early_stop": ("True or False", 1),
    "suppress_tokens": ("", [64], 7, range(64)),
    "callback": ("callable", 3),
    "streamer": ("", SimpleNamespace(put=print), SimpleNamespace(put=print, end=print, _takes_logits=True)),
    "stop_strings": ("", "a", "", ["a", 3], [""], 3, [["a"]]),
    "num_return_sequences": ("an integer from 1 to 1000000", 0),
    "attention_mask": ("", torch.ones(2, 3), torch.tensor([[0, 1, 0]]), torch.tensor([[0.5, 1, 1]]), [[1, 1], [1]]),
}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [(name, value, allowed) for name, (allowed, *values) in WRONG.items() for value in values],
)
def test_wrong_arguments_of_generate_are_refused(llada: CallCounter, name: str, value: Any, allowed: str) -> None:
    arguments = {"max_new_tokens": 8, "sampler": "low_confidence", "input_ids": torch.tensor([PROMPT]), name: value}
    text = repr(value) if isinstance(value, int | float | str | None) else name
    assert_refused(llada, lambda: paradec.generate(llada.model, **arguments), name, text, allowed)


CONFLICTS = [
    ({"blocks": paradec.FixedBlocks(8), "block_length": 8}, "blocks=FixedBlocks(length=8", "block_length=8", "one of"),
    ({"steps": 3, "block_length": 4}, "steps=3 must be a multiple of the number of blocks (2)"),
    ({"prompt": [[1, 2], [1]], "steps": 1, "blocks": paradec.FixedBlocks(4, "absolute")}, "steps=1"),
    ({"seed": 1, "generator": torch.Generator()}, "seed or generator, not both"),
    ({"prompt": [[1, 2], [3]], "rng": "reference"}, "rng='reference' needs rows of one length"),
    ({"prompt": [[1, 2], [3, 4]], "rng": "reference", "seed": [1, 2]}, "rng='reference'", "one seed"),
    ({"prompt": [[1, 2], [3, 4]], "seed": [1, None]}, "seed=None"),
    ({"prompt": [[1, 2], [3, 4]], "seed": [1, 2, 3], "num_return_sequences": 2}, "seed has 3 entries for 4 rows"),
    ({"prompt": [[1, 63], [3, 4]], "max_new_tokens": 0}, "the prompt of row 1 has no mask to fill"),
    ({"prompt": [1, 63] * 257, "max_new_tokens": None}, "prompt of 514 tokens + max_new_tokens=0 = 514 is longer"),
    ({"prompt": PROMPT, "input_ids": PROMPT}, "either prompt or input_ids, not both"),
    ({"prompt": None}, "either prompt or input_ids"),
    ({"max_new_tokens": None, "prompt": [1] * 400}, "prompt of 400 tokens + max_new_tokens=128 = 528"),
    ({"suppress_tokens": [*range(61), 62], "logits_eos_inf": True}, "suppress_tokens excludes all 64 tokens"),
    ({"prompt": "text"}, "llada-tiny has no tokenizer; give input ids"),
    ({"attention_mask": [[1, 1, 1]]}, "attention_mask goes with a 2-D tensor of input ids"),
    ({"prompt": [[1, 2], [1]], "attention_mask": [[1, 1], [1, 0]]}, "attention_mask goes with rows of one length"),
]


@pytest.mark.parametrize(("arguments", "fragments"), [(arguments, rest) for arguments, *rest in CONFLICTS])
def test_conflicting_arguments_are_refused(llada: CallCounter, arguments: dict, fragments: list[str]) -> None:
    request = {"prompt": PROMPT, "max_new_tokens": 8, "sampler": "low_confidence"} | arguments
    assert_refused(llada, lambda: paradec.generate(llada.model, **request), *fragments)


PROMPTS = [
    ([], "prompt is empty"), ("", "llada-tiny has no tokenizer"), ([[1], []], "prompt of row 1 is empty"),
    ([[1], [2, 64]], "input id 64 in row 1 is outside the vocabulary (0 to 63)"),
    ([10**40], "in row 0 is outside the vocabulary"), ([1, "a"], "prompt holds items of types ['int', 'str']"),
    ([True, False], "['bool']"), ([None], "['NoneType']"),
    (5, "prompt must be text, chat messages or input ids, not int"), ({1, 2}, "not set"),
    (iter([1, 2]), "not list_iterator"), (torch.zeros(0, 3, dtype=torch.long), "shape (0, 3)"),
    (torch.zeros(1, 1, 3, dtype=torch.long), "shape (1, 1, 3)"), (torch.tensor(3), "shape ()"),
    (torch.tensor([1.0, 2.0]), "input ids have dtype torch.float32; they must be integers"),
    (np.array(["a"]), "input ids of type ndarray"), ([torch.tensor([1.5])], "['Tensor']"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "fragment"), PROMPTS)
def test_wrong_prompts_are_refused(llada: CallCounter, prompt: Any, fragment: str) -> None:
    assert_refused(llada, lambda: paradec.generate(llada.model, prompt, max_new_tokens=4), fragment)


@pytest.mark.parametrize(
    "prompt",
    [
        torch.tensor(PROMPT), torch.tensor([PROMPT], dtype=torch.uint8), np.array(PROMPT, dtype=np.int32),
        tuple(PROMPT), range(1, 4), [torch.tensor(PROMPT)], [np.array(PROMPT)], [np.int64(1), np.int16(2), 3],
    ],
)  # fmt: skip
def test_ids_of_every_type_are_accepted(llada: CallCounter, prompt: Any) -> None:
    expected = paradec.generate(llada.model, PROMPT, max_new_tokens=4).new_tokens
    assert torch.equal(paradec.generate(llada.model, prompt, max_new_tokens=4).new_tokens, expected)


def test_wrong_texts_and_chats_are_refused() -> None:
    model = paradec.wrap(Zeros(), mask_token_id=3, prediction="same", topology="bidirectional", tokenizer=Words())
    for prompt in ("", "  \n", ["a", ""]):
        refuses(partial(paradec.generate, model, prompt), "prompt=.* is empty; give at least one word")
    refuses(lambda: paradec.generate(model, "a zebra b"), "words outside the model's vocabulary: 'zebra'")
    refuses(lambda: paradec.generate(model, "a b", chat=True), "chat=True needs a tokenizer with a chat template")
    chat = [{"role": "user", "content": "a"}]
    refuses(lambda: paradec.generate(model, chat), "chat messages need a tokenizer with a chat template")
    model.tokenizer.chat_template = "present"
    refuses(lambda: paradec.generate(model, [{"role": "system", "content": "a"}]), "chat template does not take these")
    wrong = [{"role": "user"}, {"content": "a"}, {"role": 1, "content": "a"}, {"role": "user", "content": ["a"]}]
    for message in wrong:
        refuses(partial(paradec.generate, model, [message]), "must have a text 'role' and a text 'content'")
    assert paradec.generate(model, chat, max_new_tokens=2, eos_early_stop=False).tokens == [2]
    assert model.module.calls > 0


class Zeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=4)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return torch.zeros(*ids.shape, 4)


class Words:
    unk_token_id, mask_token_id, eos_token_id, chat_template = 2, None, None, None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [{"a": 0, "b": 1}.get(word, 2) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        from jinja2 import TemplateError

        if messages[0]["role"] == "system":
            raise TemplateError("no system turn, please")
        return " ".join(message["content"] for message in messages)

    def decode(self, ids: Tensor, skip_special_tokens: bool) -> str:
        return " ".join("abu?"[i] for i in ids.tolist())


@pytest.mark.parametrize("name", MASKED)
def test_every_setting_of_every_masked_sampler_is_checked(name: str) -> None:
    for setting in paradec.samplers.get(name).settings():
        for value in ("no such value", [], {}, object()):
            if setting == "stages" and value == []:
                continue  # valid: a combination without a logits stage
            refuses(partial(paradec.samplers.create, name, **{setting: value}), setting, (ValueError, TypeError))


@pytest.mark.parametrize("name", paradec.samplers.names())
def test_unknown_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting of sampler '{re.escape(name)}': 'tresh_old'.*allowed: "):
        paradec.samplers.create(name, tresh_old=0.5)
    with pytest.raises(ValueError, match=f"unknown preset of sampler '{re.escape(name)}': 'fastest'.*allowed: "):
        paradec.samplers.create(name, preset="fastest")


def test_unknown_names_are_refused_with_a_hint(llada: CallCounter) -> None:
    listed = "; paradec.{}.names() lists all".format
    near = "(did you mean 'low_confidence'?)" + listed("samplers")
    assert_refused(llada, lambda: paradec.samplers.create("confidence"), "unknown sampler: 'confidence'", near)
    assert_refused(llada, lambda: paradec.caches.create("kv"), "unknown cache: 'kv'" + listed("caches"))
    rastr = "'rastr' (did you mean 'raster'?)" + listed("orders")
    assert_refused(llada, lambda: paradec.core.orders.create("rastr"), rastr)
    assert_refused(llada, lambda: paradec.attention.create("sparse"), "unknown attention: 'sparse'", "allowed: sparsed")
    assert_refused(llada, lambda: paradec.caches.create("none", size=3), "unknown setting of cache 'none': 'size'")
    assert_refused(llada, lambda: Sampler.from_dict({"threshold": 0.9}), "no key 'sampler'", "threshold")
    assert_refused(llada, lambda: Sampler.from_dict({"sampler": "threshold", "x": 1}), "unknown setting", "'x'")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [*(((8, align), "align") for align in ("left", None)), *(((n,), "length") for n in (0, 1.5, None, True))],
)
def test_wrong_blocks_are_refused(arguments: tuple[Any, ...], name: str) -> None:
    refuses(lambda: paradec.FixedBlocks(*arguments), name)


def custom(**declared: Any) -> Any:
    """Create a sampler class as in docs/write_a_sampler.md."""
    space = {"name": "own", "summary": "x", "select": lambda self, view: view.candidates} | declared
    return dataclass(frozen=True)(type("Own", (MaskedSampler,), space))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"reads": ("entrpy",)}, "reads=('entrpy',): unknown quantity: 'entrpy' (did you mean"),
        ({"reads": "entropy"}, "reads='entropy' must be a tuple of confidence, margin"),
        ({"score": "margn"}, "score='margn': unknown quantity: 'margn' (did you mean 'margin'?)"),
        ({"score_from": "sample"}, "unknown score_from: 'sample' (did you mean 'sampled'?); allowed: raw, sampled"),
        ({"reference_draws": "mask"}, "unknown reference_draws: 'mask' (did you mean 'masked'?)"),
    ],
)
def test_unknown_quantities_are_refused(declared: dict[str, Any], message: str) -> None:
    refuses(lambda: custom(needs=Needs(**declared)), re.escape(message))


def test_a_custom_sampler_may_read_the_margin(llada: CallCounter) -> None:
    margin = custom(needs=Needs(score="margin"), select=lambda self, view: view.scores >= view.scores.amax(1, True))
    out = paradec.generate(llada.model, PROMPT, sampler=margin(), max_new_tokens=4, block_length=4)
    expected = paradec.generate(llada.model, PROMPT, sampler="margin", max_new_tokens=4, block_length=4)
    assert out.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("declared", "message"),
    [
        *(
            ({"process_logits": function}, f"process_logits of 'own' returned {what}; it must return (logits, {{}}) .*")
            for what, function in {
                "torch.float32 [1, 4, V]": lambda self, logits, stage: logits,
                "a NoneType": lambda self, logits, stage: None,
                "torch.float32 [1, 4, V], a NoneType": lambda self, logits, stage: (logits, None),
                "torch.float32 [1, 1, V], a dict": lambda self, logits, stage: (logits[:, :1], {}),
                "torch.int64 [1, 4], a dict": lambda self, logits, stage: (logits.argmax(-1), {}),
            }.items()
        ),
        ({"process_logits": lambda self, step, x, logits: logits}, "class Own must take (self, logits, stage)"),
        ({"uses_steps": True, "select": lambda self, view: view.scheduled()}, "'own' .* no quota: .*LowConfidence"),
        ({"select": lambda self, view: view.scheduled()}, "uses_steps = True and define quota"),
    ],
)
def test_wrong_methods_of_samplers(llada: CallCounter, declared: dict[str, Any], message: str, joined: bool) -> None:
    pattern = re.escape(message).replace(r"\.\*", ".*").replace("V", r"\d+")
    with pytest.raises((ValueError, TypeError), match=pattern):
        sampler = custom(**declared)()
        sampler = samplers.Union(rules=("threshold", sampler)) if joined else sampler
        paradec.generate(llada.model, [[1, 2]], sampler=sampler, max_new_tokens=4, block_length=4)


@pytest.mark.parametrize("rng", ["counter", "reference"])
@pytest.mark.parametrize("method", ["top", "choose"])
def test_a_count_for_all_rows_may_be_an_int(llada: CallCounter, method: str, rng: str) -> None:
    sampler = custom(select=lambda self, view: getattr(view, method)(view.scores, 2), draws=method == "choose")()
    arguments = {"max_new_tokens": 4, "block_length": 4, "rng": rng, "generator": torch.Generator()}
    assert paradec.generate(llada.model, [[1, 2], [3, 4]], sampler=sampler, **arguments).row_nfe == [2, 2]


@pytest.mark.parametrize(
    ("select", "what"),
    [
        (lambda self, view: view.candidates[:, :1], "torch.bool [2, 1]"),
        (lambda self, view: view.candidates[0], "torch.bool [4]"),
        (lambda self, view: view.scores.argmax(1), "torch.int64 [2]"),
        (lambda self, view: view.scores, "torch.float64 [2, 4]"),
        (lambda self, view: None, "a NoneType"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_select_must_return_a_mask_over_the_window(llada: CallCounter, select: Any, what: str, joined: bool) -> None:
    sampler = custom(select=select)()
    sampler = samplers.Union(rules=("threshold", sampler)) if joined else sampler
    message = f"select of 'own' returned {what}; it must return torch.bool [R, W], here [2, 4]"
    with pytest.raises(ValueError, match=re.escape(message)):
        paradec.generate(llada.model, [[1, 2], [3, 4, 5]], sampler=sampler, max_new_tokens=4, block_length=4)


def test_incomplete_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, base in ((samplers.registry, MaskedSampler), (paradec.caches.registry, RangeCache)):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
        kind = registry.kind
        nameless = dataclass(frozen=True)(type("Own", (base,), {}))
        plain = type("Own", (base,), {"name": "own", "__annotations__": {"share": "float"}, "share": 1.0})
        bare = type("Own", (base,), {"name": "own", "__annotations__": {"kind": "ClassVar[str]"}})
        for make in (nameless, lambda: registry.register("own", nameless)):  # noqa: B023
            refuses(make, f"^{kind} class Own has no name; give it one", TypeError)
        message = f"^{kind} class Own is not a dataclass, so share cannot be set; put @dataclass.frozen=True. before it"
        for make in (plain, lambda: plain(share=2.0), lambda: registry.register("own", plain)):  # noqa: B023
            refuses(make, message, TypeError)
        assert bare().name == "own"  # a class without settings needs no dataclass
    bare = type("Own", (MaskedSampler,), {"name": "own"})
    with pytest.raises(TypeError, match="sampler class Own has no select"):
        paradec.generate(paradec.load(), "Sort: fig", sampler=bare(), max_new_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_one_broken_logit_is_named(broken: float, temperature: float) -> None:
    model = paradec.load(GOLDEN / "llada-tiny")
    calls = []

    def break_logit(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            output.logits[1, 2, 5] = broken
        return output

    model.module.register_forward_hook(break_logit)
    sampler = paradec.samplers.create("low_confidence")
    request = {"max_new_tokens": 6, "block_length": 6, "temperature": temperature, "seed": 0, "eos_early_stop": False}
    state = sampler.start(model, [[1, 2, 3], [4, 5, 6]], **request)
    for _ in range(2):
        sampler.commit(state, sampler.step(model, state))
    before = state.canvas.clone()
    refuses(lambda: sampler.commit(state, sampler.step(model, state)), "row 1 at its step 2", FloatingPointError)
    assert torch.equal(state.canvas, before)
    assert state.nfe.tolist() == [2, 2]
    paradec.decode(sampler, model, state)  # the error left the state usable
    assert state.done


FUZZ = settings(max_examples=40, deadline=5_000, derandomize=True, suppress_health_check=list(HealthCheck))
NUMBERS = st.one_of(
    st.integers(-3, 80),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 10**30, -(2**31), -(10**30)]),
    st.floats(-2, 3),
    st.floats(),
    st.sampled_from([None, True, "1", 0, 1, 1.0, 1e-300, 1e300, 10**400, np.float32(0.5), np.int64(3), 1 + 1j]),
)
REQUEST = ["temperature", "top_p", "top_k", "guidance_scale", "steps", "max_new_tokens", "block_length", "seed"]


def assert_works_or_explains(llada: CallCounter, names: Any, **arguments: Any) -> None:
    try:
        out = paradec.generate(llada.model, PROMPT, **({"max_new_tokens": 4, "seed": 0} | arguments))
    except (ValueError, TypeError) as error:
        text = str(error)
        assert any(name in text for name in names)
        assert "\n" not in text
    else:
        tokens = out.new_tokens
        assert ((tokens >= 0) & (tokens < 63)).all()


@pytest.mark.thinned
@pytest.mark.filterwarnings("ignore:steps=")
@pytest.mark.parametrize("sampler", ["low_confidence", "threshold", "maskgit_plus"])
@FUZZ
@given(fields=st.dictionaries(st.sampled_from(REQUEST), NUMBERS, min_size=1, max_size=3))
@example(fields={"temperature": 1e-300})
@example(fields={"temperature": 1e-6, "top_p": 1e-300})
@example(fields={"temperature": 1e6, "guidance_scale": 1e6})
@example(fields={"temperature": 1e300, "top_p": 0.5})
@example(fields={"top_k": 10**30, "temperature": 1.0})
def test_random_requests_work_or_are_explained(llada: CallCounter, sampler: str, fields: dict[str, Any]) -> None:
    assert_works_or_explains(llada, fields, sampler=sampler, **fields)


DECODED: set[Sampler] = set()
"""Samplers that have decoded once: equal samplers of later examples are not decoded again."""


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
@FUZZ
@given(data=st.data())
def test_random_settings_work_or_are_explained(llada: CallCounter, name: str, data: st.DataObject) -> None:
    allowed = list(paradec.samplers.get(name).settings())
    fields = data.draw(st.dictionaries(st.sampled_from([*allowed, "other"]), NUMBERS, max_size=2))
    try:
        sampler = paradec.samplers.create(name, **fields)
    except (ValueError, TypeError) as error:
        assert any(field in str(error) for field in fields)
    else:
        assert Sampler.from_dict(sampler.to_dict()) == sampler
        if sampler not in DECODED:
            why = () if fits(name, llada.model) else (name,)
            assert_works_or_explains(llada, why, sampler=sampler, blocks=WholeCanvas())
            DECODED.add(sampler)
