"""Measure JSON schemas: how many can be compiled, whether their automata accept the right instances, and the costs.

    python benchmarks/schemas.py FOLDER [--limit N]
    python benchmarks/schemas.py --steps

FOLDER contains `real.jsonl.gz` (a schema per line: name, schema, tests with data and valid) and optionally
`suite.jsonl.gz` (a test per line: file, group, schema, test, data, valid). Every instance is tried as two texts, with
and without spaces; a valid instance is missed if either text (in the suite: each) is rejected. Those of `real` are
counted by `missed_reason`. `--steps` measures CPU time per decoding step instead.
"""

import argparse
import gzip
import json
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

import paradec
from paradec.constraints.dfa import ByteAutomaton, byte_automaton
from paradec.constraints.json_schema import MAX_LENGTHS
from paradec.constraints.schema_document import SchemaDocument
from paradec.constraints.schema_shapes import NO_VALUE, Goal, Goals

LIMIT_S = 60
DEEPER = 8


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compile_schema(schema: Any, depth: int = 3) -> ByteAutomaton:
    return byte_automaton(paradec.JsonSchema(schema, depth).node())


def accepts(automaton: ByteAutomaton, value: Any, escaped: bool = True) -> list[bool]:
    """Whether the automaton accepts the value's text with spaces, and without."""
    texts = [json.dumps(value, ensure_ascii=escaped, separators=signs) for signs in ((", ", ": "), (",", ":"))]
    return [automaton.accepts(text.encode()) for text in texts]


def rewrite(goals: Goals, goal: Goal, value: Any, drop: bool) -> Iterator[Any]:
    """Yield the value with its keys in the order of each alternative of the schema; with `drop`, unlisted keys are left
    out."""
    for shape in goals.shapes(goal):
        if isinstance(value, dict) and shape.kind == "object":
            order = [name for name in shape.listed_names() if name in value]
            order += [] if drop else [name for name in value if name not in order]
            parts = [[*rewrite_key(goals, goals.key_goal(shape, name), value[name], drop)] for name in order]
            yield from (dict(zip(order, choice, strict=True)) for choice in islice(product(*parts), 64))
        elif isinstance(value, list) and shape.kind == "array":
            parts = [[*rewrite_key(goals, goals.item_goal(shape, i), part, drop)] for i, part in enumerate(value)]
            yield from map(list, islice(product(*parts), 64))
    if not isinstance(value, (dict, list)):
        yield value


def rewrite_key(goals: Goals, goal: Goal, value: Any, drop: bool) -> Iterator[Any]:
    is_free = NO_VALUE <= goal or not goal
    yield from ([] if is_free else [*islice(rewrite(goals, goal, value, drop), 8)]) or [value]


def missed_reason(schema: Any, value: Any) -> str:
    """Find why a valid instance is not accepted: the first reason whose change makes it accepted, or "other"."""

    def accepts_rewritten(automaton: ByteAutomaton, drop: bool) -> bool:
        goals = Goals(SchemaDocument(schema), MAX_LENGTHS[0])
        return any(all(accepts(automaton, v, False)) for v in rewrite(goals, goals.goal(schema), value, drop))

    def without_lengths(part: Any) -> Any:
        if isinstance(part, list):
            return [without_lengths(entry) for entry in part]
        if not isinstance(part, dict):
            return part
        return {
            key: without_lengths(entry)
            for key, entry in part.items()
            if not (key == "maxLength" and isinstance(entry, int) and entry > MAX_LENGTHS[-1])
        }

    automaton = compile_schema(schema)
    reasons: dict[str, Callable[[], bool]] = {
        "characters beyond U+FFFF as escapes": lambda: all(accepts(automaton, value, False)),
        "keys in another order": lambda: accepts_rewritten(automaton, False),
        "unlisted keys": lambda: accepts_rewritten(automaton, True),
        f"a maxLength above {MAX_LENGTHS[-1]}, which is not counted": lambda: accepts_rewritten(
            compile_schema(without_lengths(schema)), True
        ),
        f"deeper than depth=3, within {DEEPER}": lambda: all(accepts(compile_schema(schema, DEEPER), value, False)),
        f"order, unlisted keys and depth up to {DEEPER}": lambda: accepts_rewritten(
            compile_schema(schema, DEEPER), True
        ),
    }
    for reason, holds in reasons.items():
        try:
            if holds():
                return reason
        except ValueError:
            continue
    return "other"


def compile_timed(schema: Any) -> tuple[ByteAutomaton | None, str, float]:
    """Compile a schema. Returns its automaton or None, the error's message or "", and CPU seconds."""
    begin = time.process_time()
    signal.alarm(LIMIT_S)
    try:
        return compile_schema(schema), "", time.process_time() - begin
    except ValueError as error:
        return None, str(error), time.process_time() - begin
    finally:
        signal.alarm(0)


def short_reason(message: str) -> str:
    """Shorten an error's message to the part that is the same for all schemas."""
    message = re.sub(r"^schema: \S*?([\w$]+(\[\d+\])?) (is|names|regex|and|may)", r"\1 \3", message)
    return re.sub(r"'[^']*'|\d+|=\{.*?(?= allows)", "_", message)[:70]


def measure_real(entries: list[dict[str, Any]]) -> None:
    seconds, refused, missed, before = list[float](), Counter[str](), Counter[str](), peak_mib()
    counts: Counter[str] = Counter()
    for entry in entries:
        automaton, why, used = compile_timed(entry["schema"])
        seconds.append(used)
        if automaton is None:
            refused[short_reason(why)] += 1
            continue
        counts["accepted"] += 1
        for test in entry["tests"]:
            results = accepts(automaton, test["data"])
            counts["valid" if test["valid"] else "invalid"] += 1
            if not test["valid"] and any(results):
                counts["wrong"] += 1
                print(f"  INVALID ACCEPTED: {entry['name']}: {json.dumps(test['data'])[:200]}")
            if test["valid"] and not all(results):
                reason = missed_reason(entry["schema"], test["data"])
                missed[reason] += 1
                if reason == "other":
                    print(f"  MISSED: {entry['name']}: {json.dumps(test['data'])[:200]}")
    print(f"schemas {len(entries)}, accepted {counts['accepted']} ({counts['accepted'] / len(entries):.1%})")
    print(f"invalid instances {counts['invalid']}, accepted {counts['wrong']}")
    share = missed.total() / max(counts["valid"], 1)
    print(f"valid instances {counts['valid']}, missed {missed.total()} ({share:.1%})")
    for reason, count in missed.most_common():
        print(f"  {count:4} {reason}")
    print("refused:")
    for reason, count in refused.most_common(40):
        print(f"  {count:4} {reason}")
    p50, p95, worst = (float(np.quantile(seconds, share)) for share in (0.5, 0.95, 1))
    print(f"compile: p50 {p50:.4f} s, p95 {p95:.3f} s, worst {worst:.2f} s of CPU time; "
          f"peak memory {peak_mib() - before:.0f} MiB above {before:.0f}")  # fmt: skip


def measure_suite(tests: list[dict[str, Any]]) -> None:
    """Print the numbers of tests by file and verdict: right, missed (valid but not accepted), wrong (invalid but
    accepted), refused (the schema cannot be compiled)."""
    automata: dict[str, ByteAutomaton | None] = {}
    verdicts: dict[str, Counter[str]] = {}
    for test in tests:
        key = json.dumps(test["schema"])
        if key not in automata:
            automata[key] = compile_timed(test["schema"])[0]
        automaton, counts = automata[key], verdicts.setdefault(test["file"], Counter())
        if automaton is None:
            counts["refused"] += 1
            continue
        accepted = any(accepts(automaton, test["data"]))
        verdict = "right" if accepted == test["valid"] else "missed" if test["valid"] else "wrong"
        counts[verdict] += 1
        if verdict == "wrong":
            print(f"  WRONG: {test['file']}: {test['group']}: {test['test']}")
    for name, counts in sorted(verdicts.items()):
        print(f"  {name:50}" + "".join(f"{counts[v]:5} {v}" for v in ("right", "missed", "wrong", "refused")))
    total = sum(verdicts.values(), Counter())
    print("suite: " + ", ".join(f"{verdict} {count}" for verdict, count in total.most_common()))


CALL = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
}


def measure_steps(vocab_size: int = 32_000) -> None:
    """Print the CPU time per step without and with a schema, for random models with `vocab_size` BPE tokens."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    files = sorted(str(path) for path in Path(os.__file__).parent.glob("*.py"))
    trained = ByteLevelBPETokenizer()
    trained.train(files, vocab_size, show_progress=False, special_tokens=["<mask>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, mask_token="<mask>", eos_token="<end>")
    shape = {"vocab_size": vocab_size, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    ways: dict[str, dict[str, Any]] = {
        "threshold": {"mask_token_id": 0, "prediction": "same", "topology": "bidirectional"},
        "sjd": {"prediction": "shifted", "topology": "causal"},
    }
    for sampler, ids in ways.items():
        module = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))
        model = paradec.wrap(module, eos_token_id=1, tokenizer=tokenizer, **ids)
        seconds = list[float]()
        for constraint in (None, paradec.JsonSchema(CALL)):
            for seed in (0, 1):  # the first run compiles the automaton
                begin = time.process_time()
                out = paradec.generate(model, [5, 6, 7], sampler=sampler, max_new_tokens=64, temperature=1.0,
                                       seed=seed, constraint=constraint)  # fmt: skip
                used = (time.process_time() - begin) / out.nfe
            seconds.append(used)
        print(f"{sampler}: {1000 * seconds[0]:.1f} ms per step, with a schema {1000 * seconds[1]:.1f} ms "
              f"({seconds[1] / seconds[0]:.2f} times; {len(tokenizer)} tokens)")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", action="store_true", help="measure the cost of a step instead")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if options.steps or options.folder is None:
        sys.exit(measure_steps())
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(ValueError(f"takes more than {LIMIT_S} s")))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    measure_real(read_lines(options.folder / "real.jsonl.gz")[: options.limit])
    if (suite := options.folder / "suite.jsonl.gz").exists():
        measure_suite(read_lines(suite))
