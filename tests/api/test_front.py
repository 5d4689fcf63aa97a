"""Lazy imports, classes by name, kinds of prompts, the progress bar, `accelerate` by name, the silent logger."""

import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import dit_pipeline

import paradec
from paradec import caches, samplers
from paradec.models.adapter import Model

PROMPT = "Sort: pear fig apple"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).parents[1])}


def run_python(code: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1]


def test_importing_paradec_does_not_import_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'diffusers', 'rich', 'typer'}"
    code = f"""
import sys, paradec
from paradec import samplers, caches
samplers.names(), caches.names(), dir(paradec), dir(samplers)
print(sorted({heavy} & {{*sys.modules}}) + sorted({{*paradec.__all__}} - {{*dir(paradec)}}))
import paradec.cli
print(sorted({heavy} - {{'typer'}} & {{*sys.modules}}))
"""
    # listing the names does not import plugins of other packages, which may import torch
    assert run_python(code) == ["[]", "[]"]


@pytest.mark.thinned
@pytest.mark.parametrize("line", ["--help", "--version", "generate --help", "serve --help", "tasks", "generate"])
def test_commands_that_need_no_torch(line: str) -> None:
    arguments = line.split()
    code = f"""
import sys
sys.modules["torch"] = None  # importing it is an error
from paradec.cli import app
try:
    app({arguments!r})
except SystemExit as end:
    print(end.code)
"""
    assert run_python(code)[-1] == ("2" if arguments == ["generate"] else "0")


@pytest.mark.parametrize("package", [samplers, caches])
def test_classes_are_found_by_their_names(package: Any) -> None:
    for name in package.names():
        cls = package.get(name)
        assert cls.name == name or not cls.__module__.startswith("paradec.")
        assert getattr(package, cls.__name__) is cls and cls.__name__ in dir(package)
        if all(value is not None for value in cls.settings().values()) and name != "freedave":
            assert getattr(package, cls.__name__)() == package.create(name)
    assert samplers.Threshold(threshold=0.8) == samplers.create("threshold", threshold=0.8)
    assert inspect.signature(samplers.Threshold).parameters["threshold"].default == 0.9
    with pytest.raises(AttributeError, match="has no attribute 'Treshold'"):
        package.Treshold  # noqa: B018


@pytest.mark.thinned
@pytest.mark.parametrize("tensors", [None, "pt", "np"])
@pytest.mark.parametrize("single", [True, False])
def test_tokenizer_outputs_are_prompts(tensors: str | None, single: bool, packaged: Model) -> None:
    prompts = [PROMPT] if single else [PROMPT, "Reverse: pear fig apple kiwi"]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    expected = paradec.generate(packaged, prompts).text
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": tensors}
    for padding in [False, True] if tensors is None or single else [True]:
        encoding = packaged.tokenizer.apply_chat_template(chats, padding=padding, **options)
        assert paradec.generate(packaged, encoding).text == expected
        if padding:
            assert paradec.generate(packaged, **encoding).text == expected
        assert paradec.generate(packaged, dict(encoding)).text == expected
    encoding = packaged.tokenizer.apply_chat_template(chats[0], **options)
    texts = paradec.generate(packaged, encoding).text  # lists of ids have no batch dimension, tensors have one
    assert texts == (expected[0] if tensors is None else expected[:1])


def test_other_mappings_are_refused(packaged: Model) -> None:
    with pytest.raises(TypeError, match="mapping without 'input_ids'.*a message of a chat must be in a list"):
        paradec.generate(packaged, {"role": "user", "content": PROMPT})
    with pytest.raises(TypeError, match=r"mapping without 'input_ids' \(it has \['ids'\]\)$"):
        paradec.generate(packaged, {"ids": [1]})
    encoding = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 1]])}
    with pytest.raises(ValueError, match="attention_mask is in the tokenizer's output too"):
        paradec.generate(packaged, encoding, attention_mask=encoding["attention_mask"])


def test_the_progress_bar_counts_tokens_and_forwards(packaged: Model, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    request: dict[str, Any] = {"sampler": "low_confidence", "max_new_tokens": 8, "block_length": 8}
    plain = paradec.generate(packaged, PROMPT, **request)
    assert capsys.readouterr().err == ""
    out = paradec.generate(packaged, PROMPT, **request, progress=True, callback=lambda s, c: seen.append(1))
    drawn = capsys.readouterr().err
    last = drawn.split("\r")[-1]
    assert "100%" in last and f"forwards={out.nfe}" in last and "decoding" in last
    assert torch.equal(out.sequences, plain.sequences) and len(seen) == out.nfe
    stopped = paradec.generate(packaged, PROMPT, **request, progress=True, callback=lambda s, c: True)
    assert stopped.nfe == 1 and "1/8" in capsys.readouterr().err.split("\r")[-1]
    rows = paradec.generate(packaged, [PROMPT, "Copy: fig"], **request, progress=True)
    drawn = capsys.readouterr().err.split("\r")[-1]
    assert f"forwards={rows.nfe}" in drawn and sum(rows.row_nfe) > rows.nfe  # calls, not the sum over rows
    digits = paradec.load("digits-ar")
    output = paradec.generate_images(digits, class_labels=3, seed=0, progress=True, output_type="latent")
    drawn = capsys.readouterr().err
    assert "49/49" in drawn and f"forwards={output.nfe}" in drawn


def test_accelerate_by_name() -> None:
    pipe = dit_pipeline()
    with paradec.accelerate(pipe, "taylorseer") as session:
        pipe([1], num_inference_steps=6, generator=torch.Generator().manual_seed(0), output_type="np")
        report = session.report()
    assert [*report.settings.values()][0].rule == paradec.TaylorSeer().rule
    assert report.short == str(report.summary).splitlines()[-1] and report.short.startswith("run 1: 6 calls, ")
    assert "\n" not in report.short
    for text, rule in {
        "first_block": paradec.FirstBlock(),
        "first_block(threshold=0.2)": paradec.FirstBlock(0.2),
        "dbcache(Fn_compute_blocks=1)": paradec.DBCache(1),
        "dicache(threshold=0.1)": paradec.DiCache(0.1),
        "magcache(mag_ratios=[1.0, 0.9])": paradec.MagCache([1.0, 0.9]),
        "verification": paradec.Verification(),
        "easycache(ret_steps=3)": paradec.EasyCache(ret_steps=3),
        "accumulated_change": paradec.AccumulatedChange(),
    }.items():
        with paradec.accelerate(pipe, text) as session:
            assert [t.settings.rule for t in session.transformers] == [rule]
    with paradec.accelerate(pipe, "taylorseer(interval=3)") as session:
        assert session.transformers[0].settings.rule == paradec.Every(3)
    wrong = {"taylorser": "'taylorseer'", "magcache": "mag_ratios=None", "first_block(": "be read"}
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            paradec.accelerate(pipe, text)
    for text in ("TeaCache", "tea_cache", "SpeCa", "foca", "First-Block", "forecast"):
        with paradec.accelerate(pipe, text) as session:
            assert session.transformers
    with paradec.accelerate(pipe, "taylorseer", interval=3, order=2) as session:
        assert session.sampler == paradec.Forecast(paradec.Every(3), "taylor(order=2)", "module")
    assert paradec.TeaCache(0.1).rule == paradec.AccumulatedChange(0.1, watch="modulated", last_steps=1)
    assert paradec.SpeCa(0.5).rule == paradec.Verification(0.5) and paradec.FoCa(4).forecaster.name == "foca"
    assert paradec.ReCAP(full_groups=2) == paradec.samplers.create("recap", full_groups=2)


def test_the_logger_is_silent_by_default() -> None:
    code = """
import logging, paradec
logging.getLogger("paradec").warning("before")
logging.basicConfig(format="%(message)s")
logging.getLogger("paradec").warning("after")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (result.returncode, result.stderr) == (0, "after\n")
    assert logging.getLogger("paradec").level == logging.NOTSET
