"""What each process of a model that is spread over several holds, beside one process that has it whole.

    python benchmarks/tensor_parallel.py                # 1, 2 and 4 processes on this machine's CPU, about a minute

A random LLaDA checkpoint is written in the published format and read by torchrun's processes. Reported for each rank:
bytes of its weights and of its store, and by how much loading and decoding raised the process's peak resident memory
(which counts mapped pages of the file that it reads from as well); and what a meeting of the ranks takes. The tokens
must be those of one process: exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from safetensors.torch import save_file

import paradec

SIZES = {"d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 1536, "vocab_size": 4096}
REQUEST: dict[str, Any] = {"max_new_tokens": 64, "block_length": 32, "sampler": "low_confidence", "steps": 8}
PROMPT = list(range(100, 356))
ROWS = 8
MEETINGS = 100


def write_checkpoint(folder: Path) -> None:
    """A random LLaDA with `SIZES`, float32."""
    width, inner, vocab = SIZES["d_model"], SIZES["mlp_hidden_size"], SIZES["vocab_size"]
    place = "model.transformer."
    shapes: dict[str, tuple[int, ...]] = {f"{place}wte.weight": (vocab, width), f"{place}ln_f.weight": (width,)}
    shapes[f"{place}ff_out.weight"] = (vocab, width)
    for layer in range(SIZES["n_layers"]):
        block = f"{place}blocks.{layer}."
        shapes |= {f"{block}{name}.weight": (width, width) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        shapes |= {f"{block}{name}.weight": (inner, width) for name in ("ff_proj", "up_proj")}
        shapes[f"{block}ff_out.weight"] = (width, inner)
        shapes |= {f"{block}{name}.weight": (width,) for name in ("attn_norm", "ff_norm")}
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.06 * torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    fixed = {
        "model_type": "llada", "block_type": "llama", "layer_norm_type": "rms", "layer_norm_with_affine": True,
        "activation_type": "silu", "include_bias": False, "rope": True, "rope_theta": 500000.0,
        "embedding_size": SIZES["vocab_size"], "max_sequence_length": 1024, "weight_tying": False,
        "mask_token_id": 5, "eos_token_id": 6, "pad_token_id": 6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(SIZES | fixed))


def peak() -> int:
    """Bytes that were resident at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(folder: str, cache: str) -> dict[str, Any]:
    """What one process finds."""
    torch.set_num_threads(1)
    from transformers import LlamaForCausalLM  # noqa: F401 (its import is no part of the model)

    before = peak()
    model = paradec.load(folder, tp_plan="auto")
    rows = [[*PROMPT, 400 + row] for row in range(ROWS)]
    out = paradec.generate(model, rows, cache=cache, **REQUEST)
    assert out.cost is not None
    local = [getattr(weight, "_local_tensor", weight) for weight in model.module.parameters()]
    found: dict[str, Any] = {
        "weights": sum(tensor.nbytes for tensor in local),
        "store": out.cost.store_bytes,
        "peak": peak() - before,
        "tokens": out.new_tokens.tolist(),
    }
    if model.ranks is not None:
        seconds = []
        for _ in range(MEETINGS):
            begin = time.perf_counter()
            model.ranks.meet("a measurement")
            seconds.append(time.perf_counter() - begin)
        found["meeting_ms"] = round(1e3 * statistics.median(seconds), 3)
    return found


def spread(size: int, folder: Path, cache: str) -> list[dict[str, Any]]:
    """What each of so many processes found, by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), __file__]
    command += ["--worker", str(folder), "--cache", cache]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cache", default="prefix")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tensor_parallel.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        found = measure(given.worker, given.cache)
        name = f"{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.json"
        Path(given.worker, name).write_text(json.dumps(found))
        return 0
    runs, tokens = [], None
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_checkpoint(folder)
        stored = (folder / "model.safetensors").stat().st_size
        for size in given.processes:
            ranks = spread(size, folder, given.cache)
            tokens = ranks[0]["tokens"] if tokens is None else tokens
            same = all(rank.pop("tokens") == tokens for rank in ranks)
            runs.append({"processes": size, "same_tokens": same, "ranks": ranks})
            print(json.dumps(runs[-1]))
    machine = {"device": "cpu", "torch": torch.__version__, "cores": os.cpu_count()}
    result = {"checkpoint_bytes": stored, "sizes": SIZES, "cache": given.cache, "rows": ROWS, "prompt": len(PROMPT) + 1}
    write_result(given.out, result | {"machine": machine, "request": REQUEST, "runs": runs})
    return 0 if all(run["same_tokens"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
