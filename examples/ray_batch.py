"""Answer prompts with several workers of Ray Data; after an interruption the same command answers the missing prompts.

    pip install -e ".[ray]"
    python examples/ray_batch.py prompts.jsonl answers --model GSAI-ML/LLaDA-8B-Instruct --workers 4 --gpus 1
    python examples/ray_batch.py --tiny                # the small model inside the package: no download, no GPU

Every line of the file is {"id": ..., "prompt": ...}; the answers are Parquet files in a folder.
"""

from __future__ import annotations

import argparse
import tempfile

import paradec.integrations.ray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="?")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--model", default=None, help="hub id or folder; by default the packaged model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker")
    parser.add_argument("--batch", type=int, default=8, help="rows that a worker decodes together")
    parser.add_argument("--sampler", default="threshold")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    paradec.integrations.ray.check_installed()

    import ray

    # each worker uses one CPU; reading and writing need some, too
    ray.init(num_cpus=args.workers + 2 if args.tiny else None)

    job = {"workers": args.workers, "num_gpus": args.gpus, "batch_size": args.batch, "sampler": args.sampler}
    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            texts = ["Sort: pear fig apple", "Reverse: pear fig apple kiwi", "Copy: plum lime fig", "Sort: owl ant bee"]
            rows = [{"id": number, "prompt": text} for number, text in enumerate(texts)]
            for count in (2, 4):  # the second call answers only the two missing prompts
                paradec.integrations.ray.answer(ray.data.from_items(rows[:count]), folder, rows_per_part=1, **job)
            for row in ray.data.read_parquet(folder).sort("id").take_all():
                print(row["id"], row["prompt"], "->", row["text"])
    elif args.prompts is None or args.folder is None:
        parser.error("give the file of prompts and the folder of answers, or --tiny")
    else:
        paradec.integrations.ray.answer(
            ray.data.read_json(args.prompts, lines=True), args.folder, source=args.model, **job
        )
        print(len(paradec.integrations.ray.answered_ids(args.folder)), "prompts have answers")


if __name__ == "__main__":
    main()
