"""What loading and saving a float32 checkpoint takes on a CPU: `paradec.load` beside transformers' `from_pretrained`.

    python benchmarks/loading.py [--turns 5]

A random Llama of 517 MiB is written once. Every measurement is a process of its own, all take turns: processor time of
load, of two forwards of 32 positions and of save, and how far resident memory has grown since before load, its own and
the file's pages apart (RssAnon and RssFile of /proc/self/status: Linux alone). Medians with quartiles. Writes
benchmarks/results/loading.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import write_result

RESULT = Path(__file__).resolve().parent / "results" / "loading.json"
SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 16000, "tie_word_embeddings": False,
}  # fmt: skip
WHO = ("transformers", "paradec", "paradec, columns")


def memory() -> tuple[float, float]:
    """MiB of the process's own, and of files' pages."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, file = (int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return own, file


def measure(who: str, folder: str) -> dict[str, float]:
    """One process's figures."""
    import transformers

    import paradec

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    cls = transformers.LlamaForCausalLM  # the class's import is no part of load
    with tempfile.TemporaryDirectory() as small:  # nor is what a first load imports
        cls(transformers.LlamaConfig(**SIZES | {"hidden_size": 32, "num_hidden_layers": 1})).save_pretrained(small)
        cls.from_pretrained(small)
        paradec.load(small)
    found: dict[str, float] = {}
    before = memory()

    def timed(name: str, run: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = run()
        found[f"{name}_seconds"] = time.process_time() - begin
        found[f"{name}_own_mib"], found[f"{name}_file_mib"] = (
            now - then for now, then in zip(memory(), before, strict=True)
        )
        return result

    if who == "transformers":
        model = timed("load", lambda: cls.from_pretrained(folder))
        module = model
    else:
        layout = "columns" if who.endswith("columns") else None
        model = timed("load", lambda: paradec.load(folder, weight_layout=layout))
        module = model.module
    ids = torch.arange(32).unsqueeze(0)
    with torch.inference_mode():
        timed("first_forward", lambda: module(ids))
        timed("forward", lambda: module(ids))
    with tempfile.TemporaryDirectory() as saved:
        timed("save", lambda: model.save_pretrained(saved))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("WHO", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one)))
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    taken: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
        mib = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 2**20
        for turn in range(given.turns):
            for who in WHO[:: -1 if turn % 2 else 1]:
                command = [sys.executable, "-W", "ignore", __file__, "--one", who, folder]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                taken[who].append(json.loads(done.stdout.splitlines()[-1]))
            load.append(os.getloadavg()[0])
    rows = {
        who: {name: statistics.quantiles([each[name] for each in turns], n=4, method="inclusive") for name in turns[0]}
        for who, turns in taken.items()
    }
    for who, row in rows.items():
        print(who, {name: round(middle, 3) for name, (_, middle, _) in row.items()})
    about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "turns": given.turns}
    about |= {"weights_mib": mib, "load_average": [min(load), max(load)]}
    write_result(RESULT, {**about, "rows": rows})


if __name__ == "__main__":
    main()
