"""Check of a Ray Data job: a worker is killed, then the whole job is killed, and then it is continued.

    python benchmarks/ray_jobs.py --rows 2000          # needs ray[data]; some minutes on two cores

Checked: every prompt is answered exactly once, with the answer of a single process. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import write_result

import paradec
import paradec.integrations.ray
from paradec.core.packaged import WORDS

TASKS = ("Sort", "Reverse", "Copy")
REQUEST: dict[str, Any] = {"temperature": 0.3, "seed": 5, "batch_size": 8, "max_new_tokens": 16}
ROWS_PER_PART = 25


def rows_of(count: int) -> list[dict[str, Any]]:
    """Make rows with prompts of the packaged model's tasks; every tenth prompt repeats the one before it."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        words = " ".join(draw.sample(WORDS, draw.randint(3, 6)))
        prompt = rows[-1]["prompt"] if number % 10 == 9 else f"{draw.choice(TASKS)}: {words}"
        rows.append({"id": number, "prompt": prompt})
    return rows


def load_model(folder: str) -> Any:
    """Load the packaged model, and create a file in `folder` that is named after this process's id."""
    import torch

    torch.set_num_threads(1)
    model = paradec.load()
    (Path(folder) / str(os.getpid())).touch()
    return model


def job(answers: str, workers: str, count: int) -> None:
    """Run the job, or continue it from the answers that are already in the folder `answers`."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    dataset = ray.data.from_items(rows_of(count))
    paradec.integrations.ray.answer(
        dataset,
        answers,
        workers=2,
        rows_per_part=ROWS_PER_PART,
        model=functools.partial(load_model, workers),
        **REQUEST,
    )


def running(workers: Path) -> list[int]:
    """List the process ids of the workers that still run."""
    return [int(file.name) for file in workers.iterdir() if Path(f"/proc/{file.name}").exists()]


def wait(what: str, holds: Any, seconds: float = 600) -> None:
    """Wait until `holds()` is true; raise TimeoutError if it is still false after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come within {seconds} s")
        time.sleep(0.2)


def count_parts(folder: Path) -> int:
    """Count the files of answers."""
    return len(list(folder.rglob("*.parquet")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="file of the result, as JSON")
    args = parser.parse_args()
    if args.job:
        job(*args.job, args.rows)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as away:
        answers, workers = Path(away) / "answers", Path(away) / "workers"
        answers.mkdir(), workers.mkdir()
        command = [sys.executable, __file__, "--rows", str(args.rows), "--job", str(answers), str(workers)]
        first = subprocess.Popen(command, start_new_session=True)
        wait("two workers", lambda: first.poll() is not None or len(running(workers)) == 2)
        wait("the first parts", lambda: first.poll() is not None or count_parts(answers) >= 2)
        if first.poll() is not None:
            sys.exit("the job ended before a worker could be killed")
        killed = running(workers)[0]
        os.kill(killed, signal.SIGKILL)
        wait("a worker to replace it", lambda: first.poll() is not None or len(list(workers.iterdir())) >= 3)
        num_parts = count_parts(answers)
        wait("further parts", lambda: first.poll() is not None or count_parts(answers) >= num_parts + 3)
        ended_early = first.poll() is not None
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        wait("the end of the workers", lambda: not running(workers), 60)
        half = len(paradec.integrations.ray.answered_ids(answers))
        print(f"a worker killed, then the job: {half} of {args.rows} answered", flush=True)
        subprocess.run(command, check=True)
        texts_by_id = collect(answers)
    alone = single(args.rows)
    result = {
        "rows": args.rows,
        "answered_when_stopped": half,
        "answered": len(texts_by_id),
        "twice": sum(len(texts) - 1 for texts in texts_by_id.values()),
        "differ": sum(texts_by_id.get(number) != [text] for number, text in alone.items()),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    if args.out:
        write_result(args.out, result)
    right = result["answered"] == args.rows and not result["twice"] and not result["differ"]
    sys.exit(0 if right and not ended_early and 0 < half < args.rows else 1)


def collect(folder: Path) -> dict[int, list[str]]:
    """Read the texts of all answers, by the row's id."""
    import pyarrow.parquet

    texts_by_id: dict[int, list[str]] = {}
    for part in folder.rglob("*.parquet"):
        table = pyarrow.parquet.read_table(part, columns=["id", "text", "error"]).to_pydict()
        for number, text, error in zip(table["id"], table["text"], table["error"], strict=True):
            assert error == "", error
            texts_by_id.setdefault(number, []).append(text)
    return texts_by_id


def single(count: int) -> dict[int, str]:
    """Answer the prompts in this process with `paradec.generate`; return texts by the row's id."""
    import torch

    torch.set_num_threads(1)
    model, rows, text_by_id = paradec.load(), rows_of(count), {}
    request = {name: value for name, value in REQUEST.items() if name not in ("seed", "batch_size")}
    for first in range(0, count, 16):
        share = rows[first : first + 16]
        seeds = [paradec.integrations.ray.seed_of(REQUEST["seed"], row["id"]) for row in share]
        texts = paradec.generate(model, [row["prompt"] for row in share], seed=seeds, **request).text
        text_by_id |= {row["id"]: text for row, text in zip(share, texts, strict=True)}
    return text_by_id


if __name__ == "__main__":
    main()
