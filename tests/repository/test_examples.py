"""The scripts in examples/ run, most of them offline with `--tiny`; the training scripts write the packaged files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from places import ROOT, load_script
from safetensors.torch import load_file

EXAMPLES = ROOT / "examples"
ROLLOUTS = "rollouts"  # has separate tests
NEEDS_RAY = "ray_batch"
PACKAGED = {"digits_dit": "digits-dit", "digits_lpd": "digits-lpd", "digits_masked": "digits-maskgit"}
PACKAGED |= {"tiny_llada": "tiny-llada"}
"""Training script -> the folder of paradec/assets that it writes, for scripts that write only one."""
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in (ROLLOUTS, NEEDS_RAY))
# One process runs all examples, because the import of transformers takes most of the time. The time limit of each
# example is in CPU seconds, which do not depend on the load of the machine.
RUN_EACH = """
import runpy, sys, time
try:
    import resource
except ImportError:  # Windows
    resource = None
for path in sys.argv[1:]:
    print("=" * 9)
    print(path, file=sys.stderr, flush=True)
    if resource is not None:
        limit = int(time.process_time()) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    sys.argv = [path, "--tiny"]
    runpy.run_path(path, run_name="__main__")
""".replace("CPU_SECONDS", "300")


def test_an_example_names_the_missing_extra() -> None:
    code = "import runpy, sys; sys.modules['accelerate'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    path = str(EXAMPLES / "accelerate_batch.py")
    done = subprocess.run([sys.executable, "-c", code, path, "--tiny"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "this needs paradec's extra 'accelerate', e.g. pip install -e '.[accelerate]'\n"


@pytest.mark.full
def test_examples_run_offline() -> None:
    """Every example prints something. For some, the printed answers and numbers of forwards are checked."""
    files = [str(EXAMPLES / f"{name}.py") for name in NAMES]
    done = subprocess.run([sys.executable, "-c", RUN_EACH, *files], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    printed = dict(zip(NAMES, done.stdout.split("=" * 9)[1:], strict=True))
    assert all(text.strip() for text in printed.values())
    for name in ("llada_generate", "infill", "chat_loop", "transformers_generate", "accelerate_batch"):
        assert "kiwi apple fig pear" in printed[name]
    # diffusers' threshold of 0.7 takes fewer forwards than 0.9, but its answers are wrong
    actual = re.findall(r"(\w+)Scheduler.*: (\d+) forwards, a (\w+) answer", printed["llada2_swap_in"])
    assert [(int(forwards), answer) for _, forwards, answer in actual] == [
        (8, "wrong"), (16, "right"), (13, "wrong"), (16, "right")
    ]  # fmt: skip
    assert "0 answered, 0 failed" in printed["batch_file"] and "largest_gap" in printed["own_sampler"]
    assert "50 calls, 14 full, 36 forecast" in printed["dit_taylorseer"]
    assert "the same tokens as generate()'s: True" in printed["diffusion_gemma"]
    # 49 forwards token by token, then fewer forwards for as many tokens
    forwards = [int(count) for count in re.findall(r": (\d+) forwards", printed["sjd_images"])]
    assert len(forwards) == 2 and forwards[1] < forwards[0] == 49


@pytest.mark.full
@pytest.mark.parametrize("name", ["digits_ar", "digits_dit", "digits_lpd", "digits_masked", "digits_var", "tiny_llada"])
def test_packaged_weights_can_be_trained_again(tmp_path: Path, name: str) -> None:
    """After two steps of every stage, the script writes files with the names and shapes of the packaged ones."""
    data = np.random.default_rng(0).integers(0, 256, (1100, 785))  # 1100 images (1000 held out) of 784 pixels
    data[:, -1] %= 10  # labels
    np.savetxt(tmp_path / "digits.csv", data, fmt="%d", delimiter=",")
    options = [] if name == "tiny_llada" else ["--csv", str(tmp_path / "digits.csv")]
    script = EXAMPLES / "training" / f"{name}.py"
    command = [sys.executable, str(script), "--out", str(tmp_path / "run"), "--steps", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    written = sorted((tmp_path / "run" / "export").rglob("*.safetensors"))
    assert written
    for file in written:
        packaged = ROOT / "paradec" / "assets" / PACKAGED.get(name, "") / file.relative_to(tmp_path / "run" / "export")
        shapes, expected = ({k: tuple(v.shape) for k, v in load_file(path).items()} for path in (file, packaged))
        assert shapes == expected


@pytest.fixture
def train_rollouts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that runs the example `rollouts` with options and returns the lines that it prints."""

    def run(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["rollouts.py", *options])
        load_script("examples/rollouts.py").main()
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.full
def test_probability_ratios_are_1_before_the_weights_change(train_rollouts: Callable[..., list[str]]) -> None:
    """All ratios are 1 at the first step of the optimizer, but not at the second."""
    lines = train_rollouts("--tiny")
    matches = [re.search(r"ratios off 1 by (\S+), (\S+), weights (\d)", line) for line in lines]
    assert [int(match[3]) for match in matches if match] == [1, 2]
    assert all(float(match[1]) < 1e-5 < float(match[2]) for match in matches if match)


@pytest.mark.full
def test_training_on_rollouts_raises_the_reward(train_rollouts: Callable[..., list[str]]) -> None:
    lines = train_rollouts("--rounds", "12")
    before, after = (
        [float(share) for share in re.findall(r"\d\.\d+", line)] for line in lines if line[:6] in ("before", "after:")
    )
    assert before[0] < 0.1 and after[0] > before[0] + 0.1
