"""What a rule costs: token statistics and selection of every sampler, as a multiple of the threshold rule's.

    python benchmarks/rules.py [--rows 8] [--window 32] [--vocabulary 126464] [--steps 21]

No model: a step reads random float32 logits [rows, window, vocabulary] (some positions sure, most not) through the
sampler's own `propose` and `commit`. One thread, one run. Every sampler takes its steps in turns with the threshold
rule, so that both see the same machine; times are the process's own, the factor is the median over the turns (memory
that is shared with other machines' work makes single steps differ by a half). Samplers that keep
something between steps are listed with its bytes per row. Those that evaluate the model differently (drafts, mask
probes, a trained filter) are left out. Prints a table and writes benchmarks/results/rules.json.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from statistics import median

import torch
from provenance import write_result

from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.core.protocol import Sampler
from paradec.samplers.masked.base import MaskedSampler

ROOT = Path(__file__).resolve().parent.parent
MORE = ("credit(storage=dense)", "credit>>localleap", "threshold&entropy_threshold")


class Answers:
    """A model that gives one of a few random answers, whatever it is asked."""

    device = torch.device("cpu")
    tokenizer, default_block_length, default_max_new_tokens = None, None, 32
    pads, supports_store, supports_visibility = True, False, False

    def __init__(self, rows: int, window: int, vocabulary: int):
        self.facts = ModelFacts(vocab_size=vocabulary, mask_token_id=vocabulary - 1, eos_token_ids=(vocabulary - 2,))
        generator = torch.Generator().manual_seed(0)
        self.answers = []
        for _ in range(2):
            logits = 2 * torch.randn(rows, window, vocabulary, generator=generator)
            sure = torch.rand(rows, window, generator=generator) ** 4 * 25  # of the best token: p from 0 to nearly 1
            logits[..., 7] += sure
            self.answers.append(logits)
        self.calls = 0

    def __call__(self, query: object) -> torch.Tensor:
        self.calls += 1
        return self.answers[self.calls % len(self.answers)]


def measured() -> list[str]:
    """Samplers that differ from `threshold` in what they make of the logits only."""
    found = []
    for name in samplers.names():
        cls = samplers.get(name)
        if (
            cls.family != "masked"
            or cls.needs.multi_step
            or cls.needs.revises
            or cls.needs.decided_logits
            or cls.propose is not MaskedSampler.propose
        ):
            continue
        found.append(name)
    return [*found, *MORE]


class Steps:
    """One sampler's steps, one at a time; a finished decoding is started again, outside the measurement."""

    def __init__(self, sampler: Sampler, model: Answers, rows: int, window: int):
        self.sampler, self.model, self.rows, self.window = sampler, model, rows, window
        self.state = self.fresh()

    def fresh(self) -> object:
        prompts = [[row] for row in range(self.rows)]
        return self.sampler.start(
            self.model, prompts, max_new_tokens=self.window, block_length=self.window, eos_early_stop=False, seed=0
        )

    def take(self) -> float:
        """Seconds of one step without the model."""
        if self.state.done or self.state.running.sum() < self.rows:
            self.state = self.fresh()
        queries = self.sampler.query(self.state)
        outputs = [self.model(query) for query in queries]
        begin = time.process_time()
        self.sampler.commit(self.state, self.sampler.propose(self.state, outputs, queries))
        return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=126464)
    parser.add_argument("--steps", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = Answers(arguments.rows, arguments.window, arguments.vocabulary)
    baseline = Steps(samplers.create("threshold"), model, arguments.rows, arguments.window)
    results = []
    print(f"{'sampler':30} {'ms/step':>8} {'x threshold':>12} {'kept, MB/row':>13}")
    with torch.inference_mode():
        for name in measured():
            steps = Steps(samplers.create(name), model, arguments.rows, arguments.window)
            steps.take(), baseline.take()  # warm up
            pairs = [(steps.take(), baseline.take()) for _ in range(arguments.steps)]
            own = median(own for own, _ in pairs)
            factor = median(own / other for own, other in pairs)
            tensors = steps.state.memory.tensors.values()
            kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // arguments.rows
            results.append(
                {"sampler": name, "ms_per_step": 1e3 * own, "times_threshold": factor, "bytes_per_row": kept}
            )
            print(f"{name:30} {1e3 * own:8.1f} {factor:11.2f}x {kept / 1e6:13.3f}")
    report = {
        "device": f"cpu ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        **vars(arguments),
        "rows_of_results": results,
    }
    path = ROOT / "benchmarks" / "results" / "rules.json"
    path.parent.mkdir(exist_ok=True)
    write_result(path, report)
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
