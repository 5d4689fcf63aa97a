"""Token statistics on the CPU: the chunked path compared with float64, and the costs of draws and steps.

    python benchmarks/token_stats.py [--repeats 15]

Statistics are the best token, its probability, the probability of a requested token, and the entropy. They are computed
on one thread from float32 logits [32, V], with V of LLaDA (126,464) and of Dream (152,064). "float64" does this like
the public codes of the threshold rule: softmax in float64, argmax, gather, entropy, all rows at once. The chunked path
also reads these logits at temperature 0.2, after top-k 50 and after top-p 0.95; none may take more than 1.5 times as
long as the unchanged logits ("as is"). The filtering itself is measured separately.

With logits [16, 126,464] three more things are measured. "draws": a step's draws compared with the greedy read and with
the draws of LLaDA's and Dream's public codes, which this file implements from their formulas; `MOST_GREEDY` and
`MOST_PUBLIC` are bounds. "steps": the third step of a block of 16 positions, without the model's forward, of several
samplers compared with `threshold`. "over_softmax": statistics (also of 8 positions) compared with a softmax.

All functions take turns in one run. Times are medians over the turns with quartiles, as CPU time of the process
(`time.process_time`, which other work on the machine influences little) and wall time; factors are medians of ratios of
CPU times within a turn. Prints tables and writes benchmarks/results/token_stats.json, with the measured commit; exits
with an error if a bound does not hold.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from timing import processor, time_call
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.kernels.token_stats import TokenDraws, token_stats
from paradec.samplers.distributions import _filter_by_rank, draw_filtered, filter_logits

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 9
ROWS, VOCABULARIES = 32, (126_464, 152_064)
FIELDS = ("token", "prob", "entropy")
DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "as is": lambda logits: logits,
    "temperature 0.2": lambda logits: logits / 0.2,
    "top-k 50": lambda logits: filter_logits(logits, None, 50),
    "top-p 0.95": lambda logits: filter_logits(logits, 0.95, None),
}
MOST = 1.5
"""Maximum time for the statistics of a distribution, as a multiple of "as is"."""
MOST_GREEDY = {"temperature 0.7": 2.5, "top-p 0.95": 7.0}
"""Maximum times of draws, as multiples of the greedy read's time."""
MOST_PUBLIC = 0.3
"""Maximum time of a draw, as a multiple of the public codes' time."""


def plain(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Compute the statistics in float64, as the public codes do."""
    p = logits.double().softmax(-1)
    token = logits.argmax(-1)
    prob = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    ids_prob = p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return token, prob, ids_prob, torch.special.entr(p).sum(-1)


def chunked(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    stats = token_stats(logits, fields=FIELDS, ids=ids)
    return stats.token, stats.prob, stats.ids_prob, stats.entropy


def inputs(vocabulary: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


def difference(logits: Tensor, ids: Tensor) -> float:
    """Compute the largest difference of `plain` and `chunked`: relative for values above 1, otherwise absolute."""
    expected, result = plain(logits, ids), chunked(logits, ids)
    assert torch.equal(expected[0], result[0]), "the two paths take different tokens"
    return max(float(((a - b).abs() / a.clamp(min=1)).max()) for a, b in zip(expected[1:], result[1:]))


def gumbel_loop(logits: Tensor, temperature: float) -> Tensor:
    """Draw as LLaDA does, in float64 with a random u per token: argmax of exp(logits) / (-log u) ** temperature."""
    logits = logits.to(torch.float64)
    noise = (-torch.rand_like(logits).log()) ** temperature
    return (logits.exp() / noise).argmax(-1)


def softmax_multinomial(logits: Tensor, temperature: float, top_p: float | None) -> Tensor:
    """Draw as Dream does: logits over the temperature, filtered by top-p, softmax, one multinomial draw per row."""
    return torch.multinomial(_filter_by_rank(logits / temperature, top_p, None).softmax(-1), 1).squeeze(-1)


def draw_functions(vocabulary: int) -> dict[str, Callable[[], Any]]:
    """Build functions that read a step's logits as a sampler does, greedily and with draws, and public codes' draws."""
    logits = inputs(vocabulary, 16)[0].unsqueeze(0)
    keys, positions = torch.tensor([[1, 2]]), torch.arange(16).unsqueeze(0)
    draws = TokenDraws(keys, torch.tensor([3]), positions, 0.7)

    def filtered(top_p: float | None, top_k: int | None) -> Any:
        drawn = draw_filtered(logits, draws.uniform(), 0.7, top_p, top_k)
        return token_stats(logits, fields=(), ids=drawn)

    return {
        "greedy": lambda: token_stats(logits, fields=()),
        "temperature 0.7": lambda: token_stats(logits, fields=(), draws=draws),
        "temperature 0.7, with its entropy": lambda: token_stats(
            logits, fields=("entropy",), temperature=0.7, draws=draws
        ),
        "top-p 0.95": lambda: filtered(0.95, None),
        "top-k 50": lambda: filtered(None, 50),
        "LLaDA's draw": lambda: gumbel_loop(logits, 0.7),
        "Dream's draw": lambda: softmax_multinomial(logits[0], 0.7, None),
        "Dream's draw, top-p 0.95": lambda: softmax_multinomial(logits[0], 0.7, 0.95),
        "softmax": lambda: logits.softmax(-1),
    }


def step_functions(vocabulary: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """Build functions that propose and commit the third step of a request, greedily, and return CPU and wall seconds
    without the model's call."""
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    module.lm_head.weight.data.mul_(50)
    causal = paradec.wrap(copy.deepcopy(module), topology="causal", prediction="shifted")
    masked = paradec.wrap(module, mask_token_id=vocabulary - 1, prediction="same", topology="bidirectional")
    block = {"max_new_tokens": 16, "block_length": 16}
    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "threshold": (masked, "threshold", block),
        "threshold, logprobs=5": (masked, "threshold", block | {"logprobs": 5}),
        "klass": (masked, "klass", block),
        "ccd": (masked, "ccd", block),
        "jacobi": (causal, "jacobi", {"max_new_tokens": 60}),
    }

    def step(case: tuple[Any, str, dict[str, Any]]) -> tuple[float, float]:
        model, sampler, request = case
        third_step(model, paradec.samplers.create(sampler), request)  # warm up
        return third_step(model, paradec.samplers.create(sampler), request)

    return {name: partial(step, case) for name, case in cases.items()}


@torch.no_grad()
def third_step(model: Any, sampler: Any, request: dict[str, Any]) -> tuple[float, float]:
    """Make three steps; return CPU and wall seconds of the third one's `propose` and `commit`."""
    state = sampler.start(model, torch.arange(5, 21).unsqueeze(0), temperature=0.0, **request)
    for _ in range(3):
        queries = sampler.query(state)
        store = getattr(state, "store", None)
        outputs = [model(query) if store is None else model(query, store) for query in queries]
        wall, cpu = time.perf_counter(), time.process_time()
        sampler.commit(state, sampler.propose(state, outputs, queries))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu, wall


def statistics_functions(vocabulary: int, rows: int) -> dict[str, Callable[[], Any]]:
    """Build functions that compute statistics, and one that computes a softmax of the same logits."""
    logits, ids = inputs(vocabulary, rows)
    return {
        f"softmax, {rows} positions": lambda: logits.softmax(-1),
        f"token and probability, {rows} positions": lambda: token_stats(logits, fields=()),
        f"with entropy and a requested token, {rows} positions": lambda: chunked(logits, ids),
    }


def measure_parts(vocabulary: int, repeats: int) -> dict[str, Any]:
    """Measure steps, statistics and draws as multiples of the first function of each part. The parts alternate in
    rounds, since other load on the machine changes within seconds."""
    parts: dict[str, tuple[dict[str, Callable[[], Any]], Callable[[Any], tuple[Any, ...]], int]] = {
        "steps": (step_functions(vocabulary), lambda step: step(), 1),
        "8 positions": (statistics_functions(vocabulary, 8), time_call, 2),
        "16 positions": (statistics_functions(vocabulary, 16), time_call, 2),
        "draws": (draw_functions(vocabulary), time_call, 1),
    }
    times: dict[str, dict[str, list[tuple[float, float]]]] = {part: {} for part in parts}
    for _ in range(ROUNDS):
        for part, (functions, clock, often) in parts.items():
            for name, turns in in_turns(functions, often * max(1, repeats // ROUNDS), clock).items():
                times[part].setdefault(name, []).extend(turns)
    summaries: dict[str, dict[str, Any]] = {}
    for part, by_name in times.items():
        summaries[part] = {name: summary(turns, next(iter(by_name.values()))) for name, turns in by_name.items()}
    over_softmax = summaries.pop("8 positions") | summaries.pop("16 positions")
    return summaries | {"over_softmax": over_softmax, "load": max(os.getloadavg())}


def list_exceeded_bounds(draws: dict[str, Any]) -> list[str]:
    """List the bounds `MOST_GREEDY` and `MOST_PUBLIC` that the draws' times exceed."""
    greedy, public = draws["greedy"]["cpu_ms"], {"top-p 0.95": ("Dream's draw, top-p 0.95",)}
    problems = [
        f"{name} takes more than {most} times the greedy read"
        for name, most in MOST_GREEDY.items()
        if draws[name]["cpu_ms"] > most * greedy
    ]
    for name in MOST_GREEDY:
        for other in public.get(name, ("LLaDA's draw", "Dream's draw")):
            if draws[name]["cpu_ms"] > MOST_PUBLIC * draws[other]["cpu_ms"]:
                problems.append(f"{name} takes more than {MOST_PUBLIC} of {other}")
    return problems


def show(summaries: dict[str, Any], base: str) -> None:
    for name, entry in summaries.items():
        low, high = entry["cpu_ms_quartiles"]
        least, most = entry["times_base_quartiles"]
        print(
            f"{name:44} {entry['cpu_ms']:7.2f} ms {low:7.2f} {high:7.2f} "
            f"{entry['times_base']:6.2f}x {base} ({least:.2f} to {most:.2f})"
        )


def in_turns(
    functions: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[Any], tuple[Any, ...]] = time_call
) -> dict[str, list[tuple[float, float]]]:
    """Measure (CPU, wall) milliseconds of every function in every turn; odd turns run in reverse order."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for turn in range(-1, repeats):  # turn -1 warms up
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            *_, cpu, wall = clock(functions[name])
            if turn >= 0:
                times[name].append((1e3 * cpu, 1e3 * wall))
    return times


def summary(times: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, Any]:
    """Compute medians and quartiles of the times, and of their ratios to the base's times."""
    cpu, wall = (sorted(values) for values in zip(*times, strict=True))
    ratios = sorted(a / b for (a, _), (b, _) in zip(times, base, strict=True))
    result: dict[str, Any] = {}
    for name, values in (("cpu_ms", cpu), ("wall_ms", wall), ("times_base", ratios)):
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        result |= {name: middle, f"{name}_quartiles": [low, high]}
    return result


def measure(vocabulary: int, repeats: int) -> dict[str, Any]:
    logits, ids = inputs(vocabulary)
    filtered = {name: change(logits) for name, change in DISTRIBUTIONS.items()}
    differences = {name: difference(changed, ids) for name, changed in filtered.items()}
    worst = max(differences.values())
    assert worst < 1e-5, "the two paths differ"
    functions: dict[str, Callable[[], Any]] = {
        name: lambda changed=changed: chunked(changed, ids)  # type: ignore[misc]
        for name, changed in filtered.items()
    }
    functions["float64"] = lambda: plain(logits, ids)
    functions["filtering, top-k 50"] = lambda: DISTRIBUTIONS["top-k 50"](logits)
    functions["filtering, top-p 0.95"] = lambda: DISTRIBUTIONS["top-p 0.95"](logits)
    times = in_turns(functions, repeats)
    summaries = {name: summary(turns, times["as is"]) for name, turns in times.items()}
    return {
        "vocabulary": vocabulary,
        "rows": ROWS,
        "float64_ms": summaries["float64"]["cpu_ms"],
        "chunked_ms": summaries["as is"]["cpu_ms"],
        "speed_up": summaries["float64"]["times_base"],
        "largest_difference": worst,
        "laws": summaries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = measure_parts(VOCABULARIES[0], arguments.repeats)
    for part, base in (("steps", "threshold"), ("over_softmax", "softmax"), ("draws", "greedy")):
        show(parts[part], base)
    print(f"load {parts['load']}\n")
    rows = [measure(vocabulary, arguments.repeats) for vocabulary in VOCABULARIES]
    print(f"{'vocabulary':>10} {'float64':>10} {'chunked':>10} {'speed-up':>9}")
    for row in rows:
        print(
            f"{row['vocabulary']:10,d} {row['float64_ms']:7.1f} ms {row['chunked_ms']:7.1f} ms {row['speed_up']:8.1f}x"
        )
        show(row["laws"], "as is")
    device = f"cpu ({platform.machine()}), 1 thread"
    result = {"device": device, "processor": processor(), "torch": torch.__version__, "repeats": arguments.repeats}
    ratios = [{name: entry["times_base"] for name, entry in row["laws"].items()} for row in rows]
    path = ROOT / "benchmarks" / "results" / "token_stats.json"
    rows_result = [row | {"laws": laws} for row, laws in zip(rows, ratios, strict=True)]
    write_result(path, result | parts | {"rows": rows_result})
    print(f"written to {path.relative_to(ROOT)}")
    slow = [name for row in rows for name in DISTRIBUTIONS if row["laws"][name]["times_base"] > MOST]
    failures = [f"{name}: more than {MOST} times as long as logits as they are" for name in slow]
    if failures := failures + list_exceeded_bounds(parts["draws"]):
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
