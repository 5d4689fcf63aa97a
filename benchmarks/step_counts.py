"""How many Python calls and torch operations a step takes, of one tree or of two beside each other.

    python benchmarks/step_counts.py [--tree FOLDER]

The cases are those of benchmarks/overhead.py (every model, sampler, block length and batch size), each without a cache
and with `cache="dual"`. Counts do not depend on the machine's load: what a change adds to the hot path shows on a busy
machine as well. A step is counted outside of the model's call ("calls": Python functions entered, C functions called
from Python; "operations": what torch dispatches); "model" has the operations inside of it, which queries with needless
masks or positions make more of. The first decode of a case warms up and is not counted.

With --tree another checkout's `paradec` is counted as well, in a process of its own, and the table says before -> now.
How much time a change costs is measured by benchmarks/versions.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("llada-tiny", "dream-tiny")
CASES = tuple(itertools.product(MODELS, ("threshold", "low_confidence"), ("none", "dual"), (32, 8), (1, 8)))
NAMES = ("python calls", "c calls", "operations", "model")
NEW = 32


def counts(tree: Path) -> list[list[float]]:
    """What a step takes in every case, in the order of `NAMES`, by the package of this process."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import paradec
    from paradec.core.protocol import decode

    assert Path(paradec.__file__).resolve().is_relative_to(tree), paradec.__file__
    torch.set_num_threads(1)

    class Operations(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.total += 1
            return func(*args, **(kwargs or {}))

    class Aside:
        """A model whose calls are not profiled: the profile pauses, and their operations are counted apart."""

        def __init__(self, model: Any, operations: Operations):
            self.model, self.operations, self.inside, self.profile = model, operations, 0, None

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def __call__(self, *arguments: Any) -> Any:
            sys.setprofile(None)
            before = self.operations.total
            logits = self.model(*arguments)
            self.inside += self.operations.total - before
            sys.setprofile(self.profile)
            return logits

    models = {name: paradec.load(ROOT / "tests" / "golden" / name) for name in MODELS}
    prompts = {n: torch.randint(0, 30, (n, 9), generator=torch.Generator().manual_seed(0)) for n in (1, 8)}
    found = []
    for folder, name, cache, block, batch in CASES:
        sampler = paradec.samplers.create(name)
        request = {"max_new_tokens": NEW, "block_length": block, "cache": cache, "eos_early_stop": False}
        operations = Operations()
        model = Aside(models[folder], operations)
        decode(sampler, model, sampler.start(model, prompts[batch], **request))
        model.inside = operations.total = 0
        state = sampler.start(model, prompts[batch], **request)
        with operations:
            decode(sampler, model, state)
        steps = int(state.commits)
        outside, inside = operations.total - model.inside, model.inside
        state = sampler.start(model, prompts[batch], **request)
        calls = {"call": 0, "c_call": 0}

        def note(frame: Any, event: str, argument: Any, calls: dict[str, int] = calls) -> None:
            if event in calls:
                calls[event] += 1

        model.profile = note
        sys.setprofile(note)
        decode(sampler, model, state)
        sys.setprofile(None)
        found.append([count / steps for count in (*calls.values(), outside, inside)])
    return found


def of_tree(tree: Path) -> list[list[float]]:
    """`counts` of a checkout's package, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--json", "--tree", str(tree)]
    environment = os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="another checkout, to compare with")
    parser.add_argument("--json", action="store_true", help="print the counts of --tree alone, as JSON")
    arguments = parser.parse_args()
    if arguments.tree is not None and not (arguments.tree / "paradec" / "__init__.py").is_file():
        parser.error(f"--tree {arguments.tree} is no checkout of paradec")
    if arguments.json:
        print(json.dumps(counts((arguments.tree or ROOT).resolve())))
        return
    now = of_tree(ROOT)
    before = now if arguments.tree is None else of_tree(arguments.tree.resolve())
    heads = [name if arguments.tree is None else f"{name}: before -> now" for name in NAMES]
    print(f"{'model':11}{'sampler':15}{'cache':6}{'block':>6}{'batch':>6}  " + "  ".join(heads))
    for case, old, new in zip(CASES, before, now, strict=True):
        cells = [f"{n:.1f}" if arguments.tree is None else f"{o:.1f} -> {n:.1f}" for o, n in zip(old, new)]
        folder, name, cache, block, batch = case
        print(
            f"{folder:11}{name:15}{cache:6}{block:6}{batch:6}  "
            + "  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True))
        )


if __name__ == "__main__":
    main()
