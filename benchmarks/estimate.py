"""How far `paradec.estimate` is from measured steps, and where published figures lie in its bounds.

    python benchmarks/estimate.py steps [--turns 7] [--dtypes float32 bfloat16]
    python benchmarks/estimate.py published
    python benchmarks/estimate.py daily

`steps`: models of LLaDA's form with random weights on this machine's processor, one thread. For each shape a step that
evaluates whole rows and one that evaluates the open block over the store (cache "dual", sampler "low_confidence") is
timed: the forward and all that the sampler does with its logits. The probe's pieces and the steps take turns; seconds
are the process's own (`time.process_time`), so that what else the machine does cancels; medians over the turns, with
quartiles. Writes benchmarks/results/estimate.json.

`published`: tokens per second that others have published, beside the bound of the device's peaks for what is known of
their runs; what is not known is assumed, and said. Writes benchmarks/results/estimate_published.json.

`daily`: how many devices 10^9 tokens a day take. Writes benchmarks/results/estimate_daily.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from provenance import write_result

import paradec
from paradec.models.adapter import Model
from paradec.models.layout import lay_columns_first
from paradec.tools.estimation.devices import PUBLISHED
from paradec.tools.estimation.probe import Prober
from paradec.tools.estimation.shapes import BUILT_IN, Shape

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES: tuple[dict[str, int], ...] = (
    {"hidden": 256, "layers": 12, "kv_heads": 4, "vocab": 8192, "rows": 8, "prompt": 64, "answer": 32, "block": 16},
    {"hidden": 512, "layers": 8, "kv_heads": 8, "vocab": 16384, "rows": 1, "prompt": 224, "answer": 32, "block": 32},
    {"hidden": 512, "layers": 8, "kv_heads": 8, "vocab": 16384, "rows": 4, "prompt": 96, "answer": 32, "block": 32},
    {"hidden": 768, "layers": 6, "kv_heads": 12, "vocab": 32768, "rows": 1, "prompt": 224, "answer": 64, "block": 32},
    {"hidden": 1024, "layers": 4, "kv_heads": 4, "vocab": 32768, "rows": 1, "prompt": 64, "answer": 64, "block": 64},
    {"hidden": 1024, "layers": 4, "kv_heads": 16, "vocab": 8192, "rows": 2, "prompt": 48, "answer": 16, "block": 8},
)
"""LLaDA's form: heads of 64, an MLP of three times the hidden width."""
DTYPES = ("float32", "bfloat16")
ALLOWED = 0.25
"""Error that is aimed at."""


# ---- steps of this machine -----------------------------------------------------------------------------------------


def model_of(size: dict[str, int], dtype: str) -> Model:
    """A random model of LLaDA's form."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=3 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["hidden"] // 64,
        num_key_value_heads=size["kv_heads"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    module = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    lay_columns_first(module)  # as `paradec.load(weight_layout="columns")` does
    mask = size["vocab"] - 1
    return paradec.wrap(
        module,
        mask_token_id=mask,
        eos_token_id=0,
        topology="bidirectional",
        prediction="same",
        attn_implementation="sdpa",
    )


class Steps:
    """A shape's model, and two states of one request: before its first step, and before its second."""

    def __init__(self, size: dict[str, int], dtype: str):
        self.size, self.model = size, model_of(size, dtype)
        self.sampler = paradec.samplers.create("low_confidence")
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, size["vocab"] - 1, (size["rows"], size["prompt"]), generator=generator).tolist()
        self.states = {kind: self._start(prompts) for kind in ("whole", "part")}
        second = self.states["part"]
        with torch.inference_mode():
            self.sampler.commit(second, self.sampler.step(self.model, second))
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def _start(self, prompts: list[list[int]]) -> Any:
        return self.sampler.start(
            self.model,
            prompts,
            cache="dual",
            max_new_tokens=self.size["answer"],
            block_length=self.size["block"],
            eos_early_stop=False,
        )

    def turn(self, count: bool = True) -> None:
        """Take each step once. It is not committed: a step that is repeated is the same step."""
        for kind, state in self.states.items():
            begin = time.process_time()
            with torch.inference_mode():
                self.sampler.step(self.model, state)
            if count:
                self.seconds[kind].append(time.process_time() - begin)


def steps(turns: int, dtypes: list[str]) -> None:
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    devices = {}
    for dtype in dtypes:
        prober, measured = Prober(dtype, time.process_time), [Steps(size, dtype) for size in SHAPES]
        prober.turn()
        prober.seconds.clear()
        for each in measured:
            each.turn(count=False)
        for turn in range(turns):
            prober.turn()
            for each in measured[:: -1 if turn % 2 else 1]:
                each.turn()
            prober.turn()
            print(f"{dtype}: turn {turn + 1} of {turns}", flush=True)
        device = prober.device()
        devices[dtype] = {"products": device.products[dtype], "attention": device.attention[dtype]} | {
            "activations": device.activations[dtype],
            "statistics": device.statistics[dtype],
            "bandwidth": device.bandwidth,
            "overhead": device.overhead,
        }
        for each in measured:
            size = each.size
            said = paradec.estimate(
                each.model,
                device=device,
                batch=size["rows"],
                prompt=size["prompt"],
                answer=size["answer"],
                block=size["block"],
                cache="dual",
            )
            for step in said.steps:
                low, middle, high = statistics.quantiles(each.seconds[step.kind], n=4, method="inclusive")
                error = step.parts.total / middle - 1
                parts = dataclasses.asdict(step.parts)
                found.append(
                    {**size, "dtype": dtype, "step": step.kind, "positions": step.positions, "seconds": middle}
                    | {"quartiles": [low, high], "estimate": step.parts.total, "error": error, "parts": parts}
                )
                print(
                    f"{dtype:9} {size['hidden']:5} x {size['layers']:<3} {size['rows']} x {step.positions:<4.0f} "
                    f"{step.kind:6} {1e3 * middle:8.1f} ms [{1e3 * low:.1f} {1e3 * high:.1f}]  estimate "
                    f"{1e3 * step.parts.total:8.1f}  {error:+.0%}"
                )
        del measured
        gc.collect()
    errors = [abs(row["error"]) for row in found]
    within = sum(error <= ALLOWED for error in errors)
    worst, usual = max(errors), statistics.median(errors)
    print(f"{within} of {len(errors)} within {ALLOWED:.0%}; median {usual:.0%}, {worst:.0%} at most")
    device = f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}), 1 thread"
    result = {"device": device, "torch": torch.__version__, "turns": turns, "allowed": ALLOWED, "probe": devices}
    write_result(RESULTS / "estimate.json", result | {"rows": found})


# ---- published figures ---------------------------------------------------------------------------------------------

QWEN = dataclasses.replace(
    BUILT_IN["Dream-7B"], name="Qwen2.5-7B", topology="causal", prediction="same", default_block_length=None
)
"""Dream's sizes are Qwen2.5-7B's, which it was made from."""
SHORT, SHOTS = 128, 900
"""Tokens of a prompt that are assumed: a question alone, and five examples before it. No source states them."""
FIGURES: tuple[dict[str, Any], ...] = (
    *(
        {"system": f"d3LLM, {engine}", "model": "LLaDA-8B", "device": name, "published": rate, "cache": "dual"}
        | {"tokens_per_forward": 9.91, "prompt": SHORT, "answer": 256, "task": "GSM8K, no examples"}
        for engine, name, rate in (
            ("SGLang", "h100", 545),
            ("SGLang", "a100", 252),
            ("transformers", "h100", 288.9),
            ("transformers", "a100", 183.3),
        )
    ),
    *(
        {"system": "d3LLM, SGLang", "model": "Dream-7B", "device": name, "published": rate, "cache": "dual"}
        | {"tokens_per_forward": 4.89, "prompt": SHORT, "answer": 256, "block": 32, "task": "GSM8K, no examples"}
        for name, rate in (("h100", 280), ("a100", 126))
    ),
    *(
        {"system": f"autoregressive, {engine}", "model": "Qwen2.5-7B", "device": name, "published": rate}
        | {"tokens_per_forward": 1.0, "prompt": SHORT, "answer": 256, "task": "GSM8K, no examples"}
        for engine, name, rate in (
            ("SGLang", "h100", 108.6),
            ("SGLang", "a100", 96.8),
            ("transformers", "h100", 57.3),
            ("transformers", "a100", 50.4),
        )
    ),
    *(
        {"system": f"Fast-dLLM, {what}", "model": "LLaDA-8B", "device": "a100", "published": rate, "cache": cache}
        | {"tokens_per_forward": accepted, "prompt": prompt, "answer": answer, "task": task}
        for task, prompt, answer, what, cache, accepted, rate in (
            ("GSM8K, 5 examples", SHOTS, 256, "one token a step", "none", 1.0, 6.73),
            ("GSM8K, 5 examples", SHOTS, 512, "one token a step", "none", 1.0, 3.23),
            ("GSM8K, 5 examples", SHOTS, 256, "cache", "prefix", 1.0, 21.23),
            ("GSM8K, 5 examples", SHOTS, 256, "cache and threshold", "prefix", 16.5 / 6.73, 54.4),
            ("HumanEval", SHORT, 256, "one token a step", "none", 1.0, 30.5),
            ("HumanEval", SHORT, 256, "cache", "prefix", 1.0, 40.7),
            ("HumanEval", SHORT, 256, "cache and threshold", "prefix", 101.5 / 30.5, 114.1),
        )
    ),
)
"""One row each. Tokens per forward of Fast-dLLM are what its threshold alone made faster; the device is not stated with
its figures and taken to be an A100. Those of d3LLM through transformers are taken to be those through SGLang."""


def shape_named(name: str) -> Shape:
    return QWEN if name == QWEN.name else BUILT_IN[name]


def published() -> None:
    rows = []
    for figure in FIGURES:
        names = ("device", "prompt", "answer", "cache", "tokens_per_forward", "block")
        request = {name: figure[name] for name in names if name in figure}
        found = paradec.estimate(shape_named(figure["model"]), **request)
        ratio = figure["published"] / found.tokens_per_second
        rows.append(figure | {"device": found.device, "bound": found.tokens_per_second, "ratio": ratio})
        print(
            f"{figure['system']:34} {figure['model']:10} {found.device:16} {figure['task']:20} "
            f"{figure['published']:7.1f} of {found.tokens_per_second:7.1f}  {ratio:.0%}"
        )
    write_result(RESULTS / "estimate_published.json", {"rows": rows})


# ---- a billion tokens a day ----------------------------------------------------------------------------------------

TOKENS, DAY = 1e9, 86400
BATCH, PROMPT, ANSWER, REACHED = 64, 512, 256, 0.5
THRESHOLD = 16.5 / 6.73
"""Tokens per forward of Fast-dLLM's threshold of 0.9 with LLaDA-8B on GSM8K, as above."""
PLANS = (
    ("LLaDA-8B", "one token a step, no cache", "none", 1.0),
    ("LLaDA-8B", "`dual`", "dual", 1.0),
    ("LLaDA-8B", "`threshold`", "none", THRESHOLD),
    ("LLaDA-8B", "`threshold`, `dual`", "dual", THRESHOLD),
    ("LLaDA2.0-mini", "one token a step, no cache", "none", 1.0),
    ("LLaDA2.0-mini", "`block`", "block", 1.0),
    ("LLaDA2.0-mini", "`threshold`, `block`", "block", THRESHOLD),
)


def daily() -> None:
    rows = []
    for model, what, cache, accepted in PLANS:
        for name in ("h100", "h200", "mi300x"):
            found = paradec.estimate(
                model,
                device=name,
                batch=BATCH,
                prompt=PROMPT,
                answer=ANSWER,
                cache=cache,
                tokens_per_forward=accepted,
                efficiency=REACHED,
            )
            needed = TOKENS / DAY / found.tokens_per_second
            rows.append(
                {"model": model, "what": what, "device": PUBLISHED[name].name, "devices": needed}
                | {"tokens_per_second": found.tokens_per_second, "tokens_per_forward": found.tokens_per_forward}
                | {"fits": found.memory.fits, "device_hours_per_million": 1e6 / found.tokens_per_second / 3600}
            )
            print(f"{model:14} {what:28} {name:8} {found.tokens_per_second:9.0f} tokens/s {needed:7.2f} devices")
    setup = {"tokens": TOKENS, "batch": BATCH, "prompt": PROMPT, "answer": ANSWER, "efficiency": REACHED}
    write_result(RESULTS / "estimate_daily.json", setup | {"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("steps")
    measuring.add_argument("--turns", type=int, default=7)
    measuring.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    commands.add_parser("published")
    commands.add_parser("daily")
    arguments = parser.parse_args()
    if arguments.command == "steps":
        steps(arguments.turns, arguments.dtypes)
    else:
        {"published": published, "daily": daily}[arguments.command]()


if __name__ == "__main__":
    main()
