"""`Request`, the arguments of every entry point in one object: files, presets, checks and unknown fields."""

import json
import warnings
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import pytest
import torch
from arguments_stub import STUB, arguments_stub
from decoding import refuses
from small_models import tiny

import paradec
from paradec import caches, samplers
from paradec.api import images
from paradec.core.other_names import REQUEST_FIELDS
from paradec.core.version import DRAWS
from paradec.models.adapter import Model
from paradec.request import FIELDS, LIVE, Arguments, Request
from paradec.samplers.features.adaptive_blocks import AdaptiveBlocks
from paradec.samplers.masked.blocks import FixedBlocks

NON_DEFAULT_VALUES: dict[str, Any] = {
    "sampler": samplers.create("localleap", radius=2), "cache": caches.create("dual", shape_multiple=4),
    "keep_prefix": True, "share_prefix": True, "attention": paradec.SparseD(select=0.4),
    "suffix": paradec.Suffix(32, "gaussian", scale=1.6), "blocks": FixedBlocks(4, align="absolute"), "block_length": 8,
    "steps": 6, "max_new_tokens": 7, "temperature": 0.3, "top_p": 0.9, "top_k": 5, "guidance_scale": 1.5,
    "seed": (1, 2), "rng": "reference", "eos_early_stop": False, "logits_eos_inf": True, "holes_eos_inf": True,
    "confidence_eos_eot_inf": True, "suppress_tokens": (3, 4), "min_p": 0.1,
    "logit_bias": {3: 1.5}, "bad_words": ((3,),), "min_new_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.2,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop_strings": ("a", "b"), "num_return_sequences": 2,
    "chat": False, "trace": True, "compile": True, "progress": True, "logprobs": 3, "rollout": True,
    "constraint": paradec.JsonSchema({"type": "object", "properties": {"b": {"type": "null"}}}, depth=2),
    "order": (2, 0, 1),
}  # fmt: skip


def test_the_table_of_values_has_every_field() -> None:
    assert {*NON_DEFAULT_VALUES} == {*FIELDS} - {*LIVE, "stop"}


def test_the_stub_and_the_entry_points_have_the_fields_of_a_request() -> None:
    """If the stub differs, run `python tests/arguments_stub.py`."""
    assert arguments_stub() == STUB.read_text(encoding="utf-8")
    for entry in (paradec.generate, paradec.infill, paradec.generate_many):
        assert get_type_hints(entry)["arguments"] == Unpack[Arguments]
    assert get_type_hints(paradec.generate_images)["arguments"] == Unpack[images.ImageArguments]
    assert Arguments.__annotations__.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", NON_DEFAULT_VALUES)
def test_saved_fields_are_loaded_unchanged(name: str, tmp_path: Path) -> None:
    request = Request(**{name: NON_DEFAULT_VALUES[name]})
    request.save(tmp_path / "mine.json")
    assert [*json.loads((tmp_path / "mine.json").read_text())] == [name]
    loaded = Request.load(tmp_path / "mine.json")
    assert loaded == request and getattr(loaded, name) == NON_DEFAULT_VALUES[name]


def test_a_seed_saved_with_another_version_of_the_random_numbers_warns(tmp_path: Path) -> None:
    """There is no warning without a seed, without sampling, or without a saved version."""
    path = tmp_path / "mine.json"
    Request(temperature=0.5, seed=3).save(path)
    assert json.loads(path.read_text()) == {"temperature": 0.5, "seed": 3, "draws": DRAWS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Request.load(path) == Request(temperature=0.5, seed=3)
        for fields in ({"seed": 3, "draws": 1}, {"temperature": 0.5, "draws": 1}, {"temperature": 0.5, "seed": 3}):
            path.write_text(json.dumps(fields))
            Request.load(path)
    path.write_text(json.dumps({"temperature": 0.5, "seed": 3, "draws": DRAWS - 1}))
    with pytest.warns(UserWarning, match=f"version {DRAWS - 1} of the draws: its seed draws other tokens"):
        Request.load(path)


def test_all_fields_together_are_loaded_unchanged(tmp_path: Path) -> None:
    request = Request(**NON_DEFAULT_VALUES)
    request.save(tmp_path / "mine.json")
    assert Request.load(tmp_path / "mine.json") == request
    fields = json.loads((tmp_path / "mine.json").read_text())
    assert fields.pop("draws") == DRAWS and Request.from_arguments({}, fields) == request


@pytest.mark.parametrize("blocks", ["whole", AdaptiveBlocks(length=8, delimiters=(";", 3)), FixedBlocks(2)])
def test_block_policies_are_loaded_unchanged(blocks: Any, tmp_path: Path) -> None:
    Request(blocks=blocks).save(tmp_path / "mine.json")
    assert Request.load(tmp_path / "mine.json").blocks == blocks


class CustomBlocks:
    reads_logits = False

    def open(self, start: Any, prompt_length: Any, length: Any) -> Any: ...

    def count(self, prompt_length: int, length: int) -> int: ...


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generator", torch.Generator()), ("callback", print), ("streamer", object()), ("prefix", object()),
        ("stop", paradec.Prophet()), ("blocks", CustomBlocks()),
        ("sampler", samplers.create("speculative", drafter=tiny(1, topology="causal", prediction="shifted"))),
    ],
)  # fmt: skip
def test_fields_with_unsavable_objects_are_refused_and_no_file_is_written(
    name: str, value: Any, tmp_path: Path
) -> None:
    request = Request(**{name: value}, temperature=0.5)
    refuses(lambda: request.save(tmp_path / "mine.json"), rf"{name}=.*cannot be saved")
    assert not any(tmp_path.iterdir())


def test_wrong_presets_are_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    refuses(lambda: Request.load(path), "mine.json.* does not exist", FileNotFoundError)
    for text, message in {
        "{": "is no JSON",
        "[1]": "must be a mapping",
        '{"temprature": 1}': "temprature.*did you mean 'temperature'",
        '{"callback": 1}': "unknown argument in a preset: 'callback'",
        '{"sampler": {"sampler": "threshold", "tau": 1}}': "unknown setting of sampler 'threshold': 'tau'",
        '{"sampler": {"sampler": "gone", "tau": 1}}': "unknown sampler: 'gone'.*samplers.register",
        '{"blocks": {"blocks": "fixed"}}': "blocks=.*length",
        '{"blocks": {"blocks": "other"}}': "unknown blocks: 'other'",
    }.items():
        path.write_text(text)
        refuses(lambda: Request.load(path), message)
    path.write_text('{"temperature": -1}')
    refuses(lambda: Request.load(path), "temperature=-1")
    with pytest.raises(ValueError, match="preset=3 must be a Request"):
        Request.from_arguments({}, 3)  # type: ignore[arg-type]


def test_arguments_override_presets_and_presets_override_defaults(llada: Model, tmp_path: Path) -> None:
    request = Request(temperature=0.7, seed=3, max_new_tokens=6, block_length=3)
    request.save(tmp_path / "mine.json")
    arguments = {"input_ids": [5, 6], "seed": 4}
    expected = paradec.generate(llada, **arguments, temperature=0.7, max_new_tokens=6, block_length=3)
    for preset in (tmp_path / "mine.json", str(tmp_path / "mine.json"), request, request.to_dict()):
        assert torch.equal(paradec.generate(llada, **arguments, preset=preset).sequences, expected.sequences)
    unknown = {"sampler": {"sampler": "gone", "tau": 1}, "cache": "gone"}  # overridden, so not an error
    (tmp_path / "unknown.json").write_text(json.dumps(request.to_dict() | unknown))
    for preset in (tmp_path / "unknown.json", request.to_dict() | unknown):
        output = paradec.generate(llada, **arguments, preset=preset, sampler="threshold", cache=None)
        assert torch.equal(output.sequences, expected.sequences)
    masked_prompt = [5, llada.facts.mask_id, 6]
    assert paradec.infill(llada, input_ids=masked_prompt, seed=0).new_tokens.shape[1] == 0
    assert paradec.infill(llada, input_ids=masked_prompt, preset=request).new_tokens.shape[1] == 6


def test_samplers_start_from_a_request_or_from_arguments(llada: Model) -> None:
    method = samplers.create("threshold")
    from_arguments = method.start(llada, [[5, 6]], max_new_tokens=4, temperature=0.5, seed=1)
    from_request = method.start(llada, [[5, 6]], Request(max_new_tokens=4, temperature=0.5, seed=1))
    assert torch.equal(from_arguments.keys, from_request.keys) and from_arguments.request == from_request.request
    refuses(lambda: method.start(llada, [[5, 6]], Request(), seed=1), "not both: seed", TypeError)
    refuses(lambda: method.start(llada, [[5, 6]], {"seed": 1}), "must be a paradec.Request", TypeError)


@pytest.mark.parametrize("name", samplers.names())
def test_samplers_refuse_unsupported_fields(name: str) -> None:
    cls = samplers.get(name)
    if not cls.unsupported:
        return
    from paradec.request import request_for

    method = cls(drafter=tiny(1, topology="causal", prediction="shifted")) if cls.__name__ == "Speculative" else cls()
    request_for(method, Request(), {})
    for field in cls.unsupported:
        value = paradec.Prophet() if field == "stop" else object() if field in LIVE else NON_DEFAULT_VALUES[field]
        message = f"{field}=.* has no meaning for sampler '{method.name}'".replace("+", r"\+")
        with pytest.raises(ValueError, match=message):
            request_for(method, Request(**{field: value}), {})


@pytest.mark.parametrize("entry", ["generate", "infill", "start"])
def test_unknown_arguments_raise_type_errors_with_a_suggestion(entry: str, llada: Model) -> None:
    def call(**arguments: Any) -> Any:
        if entry == "start":
            return samplers.create("threshold").start(llada, [[5, 6]], **arguments)
        return getattr(paradec, entry)(llada, input_ids=[5, llada.facts.mask_id], **arguments)

    refuses(lambda: call(temprature=1), "'temprature' .did you mean 'temperature'", TypeError)
    for name, field in [(name, field) for field, names in REQUEST_FIELDS.items() for name in names]:
        with pytest.raises(TypeError, match=f"'{name}'; it is called '{field}' here"):
            call(**{name: 1})
    refuses(lambda: call(cfg_scale=0.5), r"'cfg_scale'.* guidance_scale = cfg_scale \+ 1", TypeError)
    refuses(lambda: call(do_sample=True), "do_sample.*temperature", TypeError)
    refuses(lambda: call(threshold=0.9), r"'threshold'; it is a setting of a sampler: .*create\('threshold'", TypeError)
    refuses(lambda: call(alg_temp=0.1), "alg_temp", TypeError)


def test_a_state_has_no_reference_to_callbacks_or_generators(llada: Model) -> None:
    generator = torch.Generator()
    state = samplers.create("threshold").start(llada, [[5, 6]], Request(callback=print, generator=generator))
    assert all(getattr(state.request, name) is None for name in LIVE)


@pytest.mark.parametrize("name", sorted({*FIELDS} - {"stop", "streamer", "prefix", "attention", "blocks"}))
def test_every_field_is_checked_when_a_request_is_made(name: str) -> None:
    refuses(lambda: Request(**{name: object()}), f"^{name}=<object", (ValueError, TypeError))
