"""A masked diffusion model of full width on a CPU: paradec's int8 compared with llama.cpp's `llama-diffusion-cli`.

    python benchmarks/laptop.py --cli build/bin/llama-diffusion-cli --layers 32 --folder big/

Writes a random LLaDA-8B of `--layers` layers (hidden size 4,096, intermediate size 12,288, vocabulary 126,464) as GGUF
Q8_0, and converts it to Q4_0 with the `llama-quantize` in the cli's folder; `--model FILE.gguf` takes a real Q8_0 LLaDA
instead. paradec loads the Q8_0 file as int8 weights. The programs run in turns, each in a separate process. Measured:

- a forward: all logits of 96, 192 and 512 positions. The cli gets only three masks, at the end, so that it samples
  little; its first step, which maps the file, is left out.
- an answer of 64 and 128 tokens to a prompt of 64, in blocks of 32, one token per step. paradec also runs with
  `cache="dual"`, at one and at 2.5 tokens per step; 2.5 is an assumption, since random weights are never confident.
- seconds until the first step, and the peak of memory without mapped files (RssAnon in /proc/PID/status).
- with `--save`: paradec writes the model as bfloat16 files, and loads them.

Writes CPU seconds and wall time of every turn, and the machine's load, to benchmarks/results/laptop.json. Prints a
table of the least CPU seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import RESULTS, read_result, write_result

WIDTH, INNER, HEADS, WORDS = 4096, 12_288, 32, 126_464
PROMPT, BLOCK, FAST = 64, 32, 2.5
SHAPES = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
SHAPES |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
SHAPES |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
STEP = re.compile(rb"diffusion step: (\d+)/")
TICKS = os.sysconf("SC_CLK_TCK")
WAYS = {
    "no cache": {"sampler": "low_confidence"},
    "dual": {"sampler": "low_confidence", "cache": "dual"},
    "dual, 2.5 tokens a step": {"sampler": "low_confidence", "cache": "dual", "per_step": FAST},
}


def write_gguf(path: Path, layers: int) -> None:
    """Write a random LLaDA: matrices in Q8_0 with standard deviation 1 / sqrt(inputs), norms in float32."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from tokenizers.pre_tokenizers import ByteLevel

    torch.manual_seed(0)
    tokens = sorted(ByteLevel.alphabet())  # 256
    tokens += [f"word{index}" for index in range(len(tokens), WORDS - 3)] + ["\u0100\u0100", "<|end|>", "<|mask|>"]
    writer = GGUFWriter(path, "llada")
    writer.add_vocab_size(WORDS)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_diffusion_shift_logits(False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (WORDS - 2) + [3, 3])
    writer.add_token_merges(["\u0100 \u0100"])  # two zero bytes: all other bytes are tokens
    writer.add_eos_token_id(WORDS - 2)
    writer.add_mask_token_id(WORDS - 1)
    writer.add_chat_template("{{ messages[-1]['content'] }}")
    shapes = {"token_embd": (WORDS, WIDTH), "output_norm": (WIDTH,), "output": (WORDS, WIDTH)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in SHAPES.items()}
    packed, plain = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
    for name, shape in shapes.items():
        size, kind = (4 * shape[0], plain) if len(shape) == 1 else (shape[0] * shape[1] // 32 * 34, packed)
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for shape in shapes.values():
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
            continue
        parts = [(torch.randn(rows, shape[1]) / shape[1] ** 0.5).numpy() for rows in chunks(shape[0])]
        writer.write_tensor_data(np.concatenate([quantize(part, packed) for part in parts]))
    writer.close()


def save_bfloat16(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a bfloat16 checkpoint, with one tensor in memory at a time."""
    from paradec.models.gguf import read_gguf
    from paradec.models.saving import write_safetensors

    header = read_gguf(str(file.parent), file.name, None)
    weights = header.read_weights(torch.bfloat16)
    sizes = {name: torch.empty(weight.shape, dtype=torch.bfloat16, device="meta") for name, weight in weights.items()}
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", sizes, lambda name: weights[name][...])
    (folder / "config.json").write_text(json.dumps(header.build_config()))
    header.build_tokenizer().save_pretrained(folder)


def chunks(rows: int, size: int = 4096) -> Iterator[int]:
    """Yield the lengths of parts of `rows` rows: `size`, and what remains."""
    yield from (min(size, rows - first) for first in range(0, rows, size))


# ---- processes ------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class MemoryWatch(threading.Thread):
    """Thread that records the peak RssAnon of a process, in bytes, 20 times a second."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.peak = pid, 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, TypeError):  # the process has ended
            while True:
                status = Path(f"/proc/{self.pid}/status").read_text()
                self.peak = max(self.peak, 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1]))  # type: ignore[index]
                time.sleep(0.05)


class ParadecProcess:
    """Process of `work`, which loads the model with paradec and runs tasks."""

    def __init__(self, model: Path, threads: int):
        command = [sys.executable, __file__, "--worker", str(model), "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.memory = MemoryWatch(self.process.pid)
        self.loaded = self._read()

    def run(self, **task: Any) -> dict[str, float]:
        """Run a task of `work`; return wall and CPU seconds, and forwards."""
        self.process.stdin.write(json.dumps(task) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self._read()

    def close(self) -> dict[str, float]:
        """End the process. Returns the seconds that loading took, and the peak memory in bytes."""
        self.process.communicate()
        return self.loaded | {"memory": self.memory.peak}

    def _read(self) -> dict[str, float]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"the process of paradec ended with {self.process.wait()}")
        return json.loads(line)


def work(source: str, threads: int) -> None:
    """Load a model, then run one task per line of standard input: {"positions": n} evaluates n positions, {"tokens": n,
    "way": key of `WAYS`} decodes n tokens. Prints the seconds of the load and of each task as JSON."""
    import paradec
    from paradec.core.query import Query

    torch.set_num_threads(threads)
    start, cpu_start = time.monotonic(), time.process_time()
    model = paradec.load(source, quantization=None if source.endswith(".gguf") else "int8")

    def report(**counts: int) -> None:
        times = {"wall": time.monotonic() - start, "cpu": time.process_time() - cpu_start}
        print(json.dumps(times | counts), flush=True)

    report()
    for line in sys.stdin:
        task = json.loads(line)
        length = task.get("positions", PROMPT)
        ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))
        start, cpu_start = time.monotonic(), time.process_time()
        if "positions" in task:
            model(Query(np.array([0]), ids.unsqueeze(0), torch.arange(length).unsqueeze(0)))
            report(forwards=1)
        else:
            tokens, request = task["tokens"], dict(WAYS[task["way"]])
            steps = -(-tokens // request.pop("per_step", 1))
            settings = {"max_new_tokens": tokens, "block_length": BLOCK, "steps": int(steps), "eos_early_stop": False}
            report(forwards=int(paradec.generate(model, ids.tolist(), **settings, **request).nfe))


def run_cli(
    cli: Path, model: Path, threads: int, prompt: int, length: int, steps: int, last: int, *schedule: str
) -> dict[str, Any]:
    """Run llama-diffusion-cli until step `last` begins. Returns "points", (wall, CPU) seconds at the beginning of each
    step; "load", those of step 0; and the peak "memory" in bytes."""
    command: list[Any] = [cli, "-m", model, "-p", "a" * prompt, "-t", threads, "-tb", threads, "--temp", 0]
    command += ["-ub", length, "-b", length, "-c", length, "--diffusion-steps", steps, *schedule]
    start = time.monotonic()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    memory, text, points = MemoryWatch(process.pid), b"", dict[int, tuple[float, float]]()
    while last not in points and (piece := os.read(process.stdout.fileno(), 65536)):  # type: ignore[union-attr]
        text += piece
        for match in STEP.finditer(text):
            points.setdefault(int(match[1]), (time.monotonic() - start, cpu_seconds(process.pid)))
    process.kill()
    if process.wait() and last not in points:
        raise RuntimeError(f"{command} ended with {process.returncode}: {text[-2000:].decode(errors='replace')}")
    return {"points": points, "memory": memory.peak, "load": points[0]}


def time_cli(cli: Path, model: Path, threads: int, **task: Any) -> dict[str, Any]:
    """Time a task of `work` with llama-diffusion-cli."""
    if length := task.get("positions"):
        first, last, forwards = 1, 2, 1
        result = run_cli(cli, model, threads, length - 3, length, 3, last, "--diffusion-eps", "0.001")
    else:  # the cli also plans a step for each token of the prompt; it is stopped after the steps of the answer
        forwards, length = task["tokens"], PROMPT + task["tokens"]
        first, last = 0, forwards
        result = run_cli(cli, model, threads, PROMPT, length, length, last, "--diffusion-block-length", str(BLOCK))
    wall, cpu = (result["points"][last][index] - result["points"][first][index] for index in (0, 1))
    load = dict(zip(("load_wall", "load_cpu"), result["load"], strict=True))
    return {"wall": wall, "cpu": cpu, "forwards": forwards, "memory": result["memory"]} | load


# ---- the run --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, files: dict[str, Path]) -> list[dict[str, Any]]:
    """Run all tasks in turns; return a row for each run of each program."""
    tasks: list[dict[str, Any]] = [{"positions": length} for length in arguments.positions]
    tasks += [{"tokens": tokens} for tokens in arguments.answers]
    rows: list[dict[str, Any]] = []

    def record(program: str, threads: int, **values: Any) -> None:
        rows.append({"program": program, "threads": threads, "machine_load": os.getloadavg()[0]} | values)
        print(rows[-1], file=sys.stderr, flush=True)

    for threads in arguments.threads:
        worker = ParadecProcess(files["Q8_0"], threads)
        for turn in range(arguments.turns):
            for task in tasks:
                runs = [("paradec", {"way": way}) for way in (WAYS if "tokens" in task else ["forward"])]
                runs += [(f"llama.cpp {kind}", {}) for kind in arguments.kinds]
                for program, way in runs if turn % 2 == 0 else reversed(runs):
                    if program == "paradec":
                        times = worker.run(**task, **way)
                    else:
                        times = time_cli(arguments.cli, files[program.split()[1]], threads, **task)
                    record(program, threads, turn=turn, **task, **way, **times)
        loaded = worker.close()
        record("paradec", threads, load_wall=loaded["wall"], load_cpu=loaded["cpu"], memory=loaded["memory"])
    if arguments.save:
        save_bfloat16(files["Q8_0"], arguments.folder / "bfloat16")
        loaded = ParadecProcess(arguments.folder / "bfloat16", 1).close()
        record("paradec from bfloat16", 1, load_wall=loaded["wall"], load_cpu=loaded["cpu"], memory=loaded["memory"])
    return rows


def build_table(rows: list[dict[str, Any]]) -> str:
    """Format a Markdown table: the least CPU seconds of each task by program, and the peak memory in GB."""
    table: dict[tuple[int, str], dict[str, str]] = {}

    def add(threads: int, name: str, column: str, chosen: list[dict[str, Any]], field: str) -> None:
        table.setdefault((threads, name), {})[column] = f"{min(row[field] for row in chosen):.3g}"

    for row in rows:
        way = row.get("way")
        name = row["program"] if way in (None, "forward") else f"{row['program']}, {way}"
        same = [other for other in rows if all(other.get(key) == row.get(key) for key in ("program", "threads"))]
        for field in ("positions", "tokens"):
            if row.get(field) is not None:
                turns = [other for other in same if other.get(field) == row[field] and other.get("way") == way]
                add(row["threads"], name, f"{row[field]} {field}", turns, "cpu")
        if loads := [other for other in same if other.get("load_cpu") is not None]:
            add(row["threads"], row["program"], "load", loads, "load_cpu")
            table[row["threads"], row["program"]]["GB"] = f"{max(other['memory'] for other in loads) / 1e9:.2f}"
    columns = list(
        dict.fromkeys(column for cells in table.values() for column in cells if column not in ("load", "GB"))
    )
    columns += ["load", "GB"]
    lines = [f"| threads | program | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for (threads, name), cells in sorted(table.items()):
        lines.append(f"| {threads} | {name} | {' | '.join(cells.get(column, '') for column in columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("laptop"), help="folder of the model files; they are kept")
    parser.add_argument("--model", type=Path, help="a Q8_0 file instead of a random one")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    for name, default in (("threads", [1, 2]), ("positions", [96, 192, 512]), ("answers", [64, 128])):
        parser.add_argument(f"--{name}", type=int, nargs="*", default=default)
    parser.add_argument("--kinds", nargs="*", default=["Q4_0", "Q8_0"])
    parser.add_argument("--save", action="store_true", help="write bfloat16 files and load them as int8, too")
    parser.add_argument("--name", default="laptop", help="file name of the result")
    parser.add_argument("--extend", action="store_true", help="add the runs to an existing result")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.worker, arguments.threads[0])
    arguments.folder.mkdir(exist_ok=True)
    files = {"Q8_0": arguments.model or arguments.folder / f"llada-{arguments.layers}.Q8_0.gguf"}
    if not files["Q8_0"].exists():
        write_gguf(files["Q8_0"], arguments.layers)
    files["Q4_0"] = arguments.folder / files["Q8_0"].name.replace("Q8_0", "Q4_0")
    if "Q4_0" in arguments.kinds and not files["Q4_0"].exists():
        quantize = [
            arguments.cli.with_name("llama-quantize"),
            "--allow-requantize",
            files["Q8_0"],
            files["Q4_0"],
            "Q4_0",
        ]
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL)
    rows = measure(arguments, files)
    settings = {"layers": arguments.layers, "model": arguments.model and arguments.model.name, "turns": arguments.turns}
    settings |= {"sizes": {kind: file.stat().st_size for kind, file in files.items() if file.exists()}}
    file = RESULTS / f"{arguments.name}.json"
    rows = [*(read_result(file)["runs"] if arguments.extend else []), *rows]
    write_result(file, {"settings": settings, "runs": rows})
    print(build_table(rows))


if __name__ == "__main__":
    main()
