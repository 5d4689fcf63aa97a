"""What a change costs: processor time of a step at the commit before and in this tree, in alternate turns.

    python benchmarks/versions.py --base COMMIT [--processes 5] [--pairs 5]

The cases are masked models with two rules, two lengths of block and two batch sizes, and a causal model. A pair is one
decode by a process of each version, the first in turn. Two processes of one and the same version differ by up to 6 %
for as long as they live (how their memory lies), so each version has several processes, one after the other, with so
many pairs each. Exit status 1 if the interval of a ratio (95 %, by bootstrap over the processes' medians) is wholly
above 1.03.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEW = 64
LIMIT = 1.03


def cases() -> list[dict[str, Any]]:
    masked = itertools.product(("llada-tiny", "dream-tiny"), ("threshold", "low_confidence"), (32, 8), (1, 8))
    found: list[dict[str, Any]] = [
        {"model": model, "sampler": sampler, "block": block, "batch": batch} for model, sampler, block, batch in masked
    ]
    return found + [{"model": "causal", "sampler": "sjd", "block": 0, "batch": batch} for batch in (1, 8)]


# ---- one version -----------------------------------------------------------------------------------------------------


def serve(home: str) -> None:
    """Decode the case that each line of the input names, and answer with processor seconds per step."""
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import paradec

    assert Path(paradec.__file__).is_relative_to(home), paradec.__file__
    torch.set_num_threads(1)
    golden = ROOT / "tests" / "golden"
    models: dict[str, Any] = {name: paradec.load(golden / name) for name in ("llada-tiny", "dream-tiny")}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    causal = LlamaForCausalLM(config).eval()
    models["causal"] = paradec.wrap(causal, topology="causal", prediction="shifted", eos_token_id=255)
    for line in sys.stdin:
        case = json.loads(line)
        ids = torch.randint(0, 30, (case["batch"], 9), generator=torch.Generator().manual_seed(0))
        sampler, model = paradec.samplers.create(case["sampler"]), models[case["model"]]
        more = {"block_length": case["block"]} if case["block"] else {"seed": 0}
        state = sampler.start(model, ids, max_new_tokens=NEW, eos_early_stop=False, **more)
        begin = time.process_time()
        paradec.decode(sampler, model, state)
        spent = time.process_time() - begin
        print(json.dumps([spent / int(state.nfe.max()), state.canvas.tolist()]), flush=True)


class Version:
    """A process that decodes with one version of the package."""

    def __init__(self, home: Path):
        environment = os.environ | {"PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--serve", str(home)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def decode(self, case: dict[str, Any]) -> tuple[float, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        seconds, tokens = json.loads(self.process.stdout.readline())
        return seconds, tokens

    def end(self) -> None:
        self.process.communicate()


# ---- both ------------------------------------------------------------------------------------------------------------


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The middle 95 % of the medians of resampled ratios, one of each process."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD~1", help="the commit before")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5, help="of each process")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    with tempfile.TemporaryDirectory() as base:
        command = ["git", "archive", arguments.base, "paradec"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", base], input=archive.stdout, check=True)
        return compare((Path(base), ROOT), arguments)


def compare(homes: tuple[Path, Path], arguments: argparse.Namespace) -> int:
    """Decode all cases in turns with the packages in two folders; return 1 if the second is slower."""
    slower = 0
    print(f"{'model':12} {'sampler':16} {'block':>5} {'batch':>5} {'before, ms':>11} {'now / before':>13}  95 %")
    ratios: dict[int, list[float]] = {}
    before: dict[int, list[float]] = {}
    for _ in range(arguments.processes):
        versions = [Version(home) for home in homes]
        own: list[list[float]] = [[] for _ in cases()]
        for pair in range(arguments.pairs + 2):
            for index, case in enumerate(cases()):
                order = (0, 1) if (pair + index) % 2 else (1, 0)
                found = {version: versions[version].decode(case) for version in order}
                assert found[0][1] == found[1][1], f"the versions decode different tokens: {case}"
                if pair >= 2:  # the first two warm up
                    own[index].append(found[1][0] / found[0][0])
                    before.setdefault(index, []).append(found[0][0])
        for index, pairs in enumerate(own):
            ratios.setdefault(index, []).append(statistics.median(pairs))
        for version in versions:
            version.end()
    for index, case in enumerate(cases()):
        low, high = interval(ratios[index])
        middle, was = statistics.median(ratios[index]), 1e3 * statistics.median(before[index])
        slower += low > LIMIT
        names = f"{case['model']:12} {case['sampler']:16} {case['block']:5d} {case['batch']:5d}"
        print(f"{names} {was:11.3f} {middle:13.3f}  {low:.3f} .. {high:.3f}{'  slower' if low > LIMIT else ''}")
    print(f"{slower} of {len(ratios)} intervals lie wholly above {LIMIT}")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
