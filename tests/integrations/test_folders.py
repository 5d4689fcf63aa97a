"""Folders that transformers and diffusers load: their files, and their answers in new processes."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT, SUPPORT
from small_models import tiny_llama

import paradec
from paradec.cli.app import app
from paradec.integrations.folders.export import export_folder

DIGITS = ROOT / "paradec" / "assets" / "digits-dit"


def module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


def test_export_for_transformers(tmp_path: Path) -> None:
    files = export_folder("generate", tmp_path / "mine")
    names = ["README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"]
    assert [str(file.relative_to(tmp_path / "mine")) for file in files] == names
    assert files[2].read_text() == f"parallel-decoding>={paradec.__version__}\n"
    readme = files[0].read_text()
    assert 'custom_generate="mine"' in readme and "- custom_generate" in readme and "{" not in readme
    assert f"paradec {paradec.__version__}, torch {torch.__version__}" in readme
    text = files[1].read_text()
    assert text.index("try:") < text.index("import paradec")  # otherwise transformers advises a wrong package
    generate, model = module_of(files[1]).generate, tiny_llama().double()
    ids = torch.tensor([[5, 6, 7]])
    plain = model.generate(ids, max_new_tokens=9, do_sample=False)
    for sampler in (None, "scd"):
        request = {"model": model, "max_new_tokens": 9, "do_sample": False, "sampler": sampler, "top_k": None}
        assert torch.equal(generate(ids, **request), plain) and torch.equal(generate(inputs=ids, **request), plain)
    with pytest.raises(ValueError, match="did you mean 'scd'"):
        generate(ids, model=model, max_new_tokens=9, sampler="scdd")


def test_export_of_the_packaged_pipeline(tmp_path: Path) -> None:
    export_folder("pipeline", tmp_path / "out", model="digits-dit", sampler="taylorseer(interval=4)")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["_class_name"][0] == "pipeline" and (tmp_path / "out" / "pipeline.py").is_file()


def test_export_of_a_pipeline(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_folder("pipeline", out, model=str(DIGITS), sampler="easycache(threshold=0.1)")
    index = json.loads((out / "model_index.json").read_text())
    assert index["_class_name"] == ["pipeline", "AcceleratedPipeline"] and index["transformer"]
    assert "PixelDiTPipeline with paradec" in (out / "README.md").read_text()
    pipe = module_of(out / "pipeline.py").AcceleratedPipeline(**paradec.PixelDiTPipeline.digits().components)
    assert pipe.paradec.transformers[0].settings.when == paradec.EasyCache(0.1)
    pipe(3, num_inference_steps=3)
    assert pipe.paradec.report().short.startswith("run 1: 3 calls")
    pipe.paradec.detach()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline"}))
    export_folder("pipeline", tmp_path / "dit", model=str(tmp_path))
    text = (tmp_path / "dit" / "pipeline.py").read_text()
    assert "class AcceleratedPipeline(diffusers.DiTPipeline)" in text and '"taylorseer")' in text


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NoPipeline"}))
    for arguments, message in (
        (("vllm", "new"), "unknown kind: 'vllm'"),
        (("generate", "full"), "is not empty"),
        (("generate", "new", "--model", str(DIGITS)), "is for the kind 'pipeline'"),
        (("pipeline", "new"), "needs a pipeline's folder"),
        (("pipeline", "new", "--model", "full"), "has no model_index.json"),
        (("pipeline", "new", "--model", "."), "'NoPipeline', which is not a diffusers pipeline"),
        (("pipeline", "new", "--model", str(DIGITS), "--sampler", "seecache"), "did you mean 'seacache'"),
    ):
        before = os.getcwd()
        os.chdir(tmp_path)
        try:
            with pytest.raises(SystemExit) as ended:
                app(["export-folder", *arguments])
        finally:
            os.chdir(before)
        assert ended.value.code == 2 and message in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def run_in_new_process(code: str, folder: Path) -> list[str]:
    """Run Python code in a new process and return the lines that it prints."""
    variables = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, "-c", code]
    process = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.splitlines()


@pytest.mark.full
def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    export_folder("generate", tmp_path / "mine")
    tiny_llama().save_pretrained(tmp_path / "weights")
    code = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("weights", dtype=torch.float64)
ids, call = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 9, "do_sample": False}
plain = model.generate(ids, **call)
folder = {"custom_generate": "mine", "trust_remote_code": True}
print(torch.equal(model.generate(ids, **call, **folder), plain))
print(torch.equal(model.generate(ids, **call, **folder, sampler="scd", seed=3), plain))
for wrong in ({"sampler": "scdd"}, {"num_beams": 3}, {"trust_remote_code": False}, {"smapler": "sjd"}):
    try:
        model.generate(ids, **call | folder | wrong)
    except ValueError as error:
        print(str(error).splitlines()[0])
"""
    default_equal, scd_equal, *errors = run_in_new_process(code, tmp_path)
    assert default_equal == scd_equal == "True" and len(errors) == 4
    for error, message in zip(errors, ("did you mean 'scd'", "num_beams=3 is not supported", "mine", "smapler")):
        assert message in error
    shutil.copytree(tmp_path / "mine" / "custom_generate", tmp_path / "weights" / "custom_generate")
    code = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("weights", trust_remote_code=True)
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, sampler="scd").shape[1] > 3)
"""
    assert run_in_new_process(code, tmp_path) == ["True"]


@pytest.mark.full
def test_diffusers_loads_the_pipeline(tmp_path: Path) -> None:
    export_folder("pipeline", tmp_path / "mine", model=str(DIGITS), sampler="taylorseer(interval=3)")
    for part in ("transformer", "scheduler"):
        shutil.copytree(DIGITS / part, tmp_path / "mine" / part)
    code = f"""
from diffusers import DiffusionPipeline
for source, options in (({str(DIGITS)!r}, {{"custom_pipeline": "mine"}}), ("mine", {{}})):
    pipe = DiffusionPipeline.from_pretrained(source, trust_remote_code=True, **options)
    pipe(3, num_inference_steps=9)
    print(type(pipe).__name__, pipe.paradec.report().full_steps)
try:
    DiffusionPipeline.from_pretrained("mine")
except ValueError as error:
    print("trust_remote_code" in str(error))
"""
    assert run_in_new_process(code, tmp_path) == ["AcceleratedPipeline [0, 3, 6]"] * 2 + ["True"]
