"""The examples run offline with `--tiny`, in a fresh process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from places import ROOT
from scripts import load_script

EXAMPLES = ROOT / "examples"
IMAGES = ["llamagen_images", "emu3_images", "chameleon_images", "janus_images"]
DIFFUSION = ["dit_taylorseer", "flux_taylorseer", "wan_taylorseer"]
DIGITS = ["maskgit_recap", "digits_dit"]
GROUPS = ["amused_recap", "mar_recap", "lpd_images", "cspd_images"]
FEW = ["nar_images", "distilled_images"]
SCALES = ["var_images", "code_images"]
CANVASES = ["diffusion_gemma"]
TEXT = ["llada_generate", "dream_generate", "infill", "watch_a_run", "llada2_swap_in"]
NEW = ["own_sampler", "batch_file", "chat_loop", "transformers_generate", "accelerate_batch"]
NAMES = [*TEXT, *DIFFUSION, *DIGITS, *GROUPS, *CANVASES, *NEW, *FEW, *SCALES, *IMAGES]
# one process for all of them: most of their time is the import of transformers. The limit is CPU time, of each: how
# long they wait for a busy machine says nothing
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


def test_an_example_says_which_extra_it_needs() -> None:
    code = "import runpy, sys; sys.modules['accelerate'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    path = str(EXAMPLES / "accelerate_batch.py")
    done = subprocess.run([sys.executable, "-c", code, path, "--tiny"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "this needs paradec's extra 'accelerate', e.g. pip install -e '.[accelerate]'\n"


@pytest.mark.full
def test_examples_run_offline() -> None:
    files = [str(EXAMPLES / f"{name}.py") for name in NAMES]
    done = subprocess.run([sys.executable, "-c", RUN_EACH, *files], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    _, *printed = done.stdout.split("=" * 9)
    llada, dream, infill, watch, swap_in, dit, flux, wan, recap, digits, amused, mar, lpd, cspd, *rest = printed
    canvases, own, batch, chat, stock, shares, nar, students, var, code, *images = rest
    # the packaged model solves these: both runs of the first example, and the hole of the last
    assert llada.count("kiwi apple fig pear") == 2
    assert "low_confidence" in llada and "threshold" in llada
    assert "noise" in dream and "16 forwards" in dream
    assert "kiwi apple fig pear" in infill and "hole 1: 'apple fig'" in infill
    assert watch.strip().splitlines()[0::2] == ["one token per step: 8 forwards", "threshold: 4 forwards"]
    # diffusers' threshold of 0.7 is faster here than 0.9, and wrong
    assert "ThresholdScheduler: 16 forwards, a right answer\nF K I A\nK F A I\nA I F K\nI A K F" in swap_in
    found = re.findall(r"(\w+)Scheduler.*: (\d+) forwards, a (\w+) answer", swap_in)
    assert [(int(forwards), answer) for _, forwards, answer in found] == [
        (8, "wrong"), (16, "right"), (13, "wrong"), (16, "right")
    ]  # fmt: skip
    assert own.lstrip().startswith("apple fig pear\n") and re.search(r"largest_gap +4 of 8 right, 2.6 forwards", own)
    assert "2 answered, 1 failed\n0 answered, 0 failed" in batch and batch.count('"line"') == 3
    assert "kiwi apple fig pear\n(5 tokens" in chat and re.search(r"[1-9]\d* positions of the turns before", chat)
    assert stock.count("kiwi apple fig pear") == 2 and "(threshold: 1 forward," in stock
    assert "1 processes" in shares and '"line": 1, "text": "kiwi apple fig pear", "error": null' in shares
    assert "50 calls, 14 full, 36 forecast, 0 mixed" in dit and "difference of the pixels" in dit
    assert "50 calls, 9 full, 41 forecast, 0 mixed" in flux and "difference of the latents" in flux
    assert wan.count("25% of the modules evaluated") == 2 and "bac: " in wan
    assert recap.count("4 forwards that read [100, 100, 100, 100]") == 2  # of maskgit and halton; ReCAP reads fewer
    assert re.search(r"recap: 4 forwards that read \[100, \d\d, 100, \d\d\]", recap)
    assert "10 calls, 2 full, 8 forecast, 0 mixed" in digits and digits.count("away from the full run's") == 3
    read = {name: json.loads(cells) for name, cells in re.findall(r"(\w+): .* step by step: (\[.*\])", amused)}
    assert [read[name] for name in ("AmusedScheduler", "MaskGITScheduler", "HaltonScheduler")] == [[64] * 12] * 3
    assert [some < 64 for some in read["ReCAP"]] == [False] * 5 + [True, False, True, False, True, False, True]
    assert "12 calls, 4 local" in amused
    assert mar.count("full 36") == 8 + 6 and mar.count("local") == 2 and "recap: 8 forwards" in mar
    assert "one code per forward: 64 forwards" in lpd and "diagonal: 15 forwards" in lpd
    assert nar.count("11 forwards for 36 tokens") == 2 and re.findall(r"(\d+) rows", nar) == ["22", "16"]
    assert re.findall(r"(\d+) forwards? for 36 tokens", students) == ["1", "2", "5"]
    assert "cspd: 5 forwards and 13 of the draft model" in cspd and "as many forwards: 5 forwards, " in cspd
    assert lpd.count(": 10 forwards") == 2 and lpd.count("groups of [1, 2, 4,") == 2  # lpd and halton
    assert "var: 5 forwards for scales of 1, 2, 3, 5, 7; 88 tokens a picture" in var
    splits = re.findall(r"split (\d): forwards: (\d) large, (\d) small", code)
    assert splits == [(str(split), str(split), str(5 - split)) for split in range(6)]
    # drafts of a step are not what the canvas closes with; infill leaves alone what was given
    assert canvases.count("canvas ") == 3 and canvases.count("step    4 .") == 3
    assert len(re.findall(r"20 tokens: \d+ denoising calls, 3 encoder calls", canvases)) == 2
    assert re.search(r"^kiwi \S+ \S+ pear$", canvases, flags=re.MULTILINE)
    assert "the same tokens as transformers' generate: True" in canvases
    # tokens of the pictures: token by token, then fewer forwards with the same tokens in all
    for output, tokens in zip(images, (49, 33, 38, 16), strict=True):
        forwards = [int(count) for count in re.findall(r": (\d+) forwards", output)]
        assert len(forwards) == 2 and forwards[1] < forwards[0] == tokens


def trained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What `train_rollouts` prints."""
    monkeypatch.setattr(sys, "argv", ["train_rollouts.py", *options])
    load_script("examples/train_rollouts.py").main()
    return capsys.readouterr().out.splitlines()


@pytest.mark.full
def test_rollouts_are_replayed_before_the_weights_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first step of the optimizer all ratios are 1, at the second they are not."""
    lines = trained(monkeypatch, capsys, "--tiny")
    found = [re.search(r"ratios off 1 by (\S+), (\S+), weights (\d)", line) for line in lines]
    assert [int(each[3]) for each in found if each] == [1, 2]
    assert all(float(each[1]) < 1e-5 < float(each[2]) for each in found if each)


@pytest.mark.full
def test_training_on_rollouts_raises_the_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trained(monkeypatch, capsys, "--rounds", "12")
    before, after = (
        [float(share) for share in re.findall(r"\d\.\d+", line)] for line in lines if line[:6] in ("before", "after:")
    )
    assert before[0] < 0.1 and after[0] > before[0] + 0.1
