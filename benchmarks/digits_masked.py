"""What fewer evaluations cost on the packaged digit models: a masked transformer and a diffusion transformer.

    python benchmarks/digits_masked.py               # 500 pictures of each setting; results/digits_masked.json
    python benchmarks/digits_masked.py --part dit    # one of the two models; what was done before is kept
    python benchmarks/digits_masked.py --draw        # only the plot and the pictures, from what was done

Masked transformer (`digits-maskgit`): MaskGIT, Halton, ReCAP and adaptive rules. An evaluation reads a class token and
49 codes; ReCAP's local ones read fewer, so that cost is counted in positions: evaluations = positions / 50.

Diffusion transformer (`digits-dit`): DDIM with fewer steps, the cheap baseline, beside TaylorSeer on 20 DDIM steps, at
equal numbers of full evaluations. All settings start from the same noise; "pixel error" is the mean absolute difference
to the pictures of all 20 evaluations (range 0 to 1).

Class accuracy and Frechet distance are those of `benchmarks/digits.py`, with 95 % intervals (Wilson's; bootstrap).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import BATCH, judged
from torch import Tensor

import paradec
from paradec import TaylorSeer
from paradec.evaluation.digits import frechet_distance, load_classifier
from paradec.images import contact_sheet, to_pil
from paradec.models.pixel_dit import PixelDiTPipeline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "digits_masked.json"
FIGURES = ROOT / "docs" / "figures"
PARTS = ("masked", "dit")
STEPS = 20
"""Of the full diffusion run."""
MASKED: list[tuple[str, str, str, dict[str, Any], int | None]] = [
    ("maskgit, 8 steps", "maskgit", "maskgit", {}, 8),
    ("recap, 8 steps, l=1", "recap, l=1", "recap", {}, 8),
    ("maskgit, 4 steps", "maskgit", "maskgit", {}, 4),
    ("halton, 8 steps", "halton", "halton", {}, 8),
    ("halton, 4 steps", "halton", "halton", {}, 4),
    ("recap, 16 steps, l=1", "recap, l=1", "recap", {}, 16),
    ("recap, 12 steps, l=2", "recap, l=2", "recap", {"local_steps": 2}, 12),
    ("maskgit-r, 8 steps", "maskgit-r", "recap", {"local_steps": 0}, 8),
    ("maskgit-r, 4 steps", "maskgit-r", "recap", {"local_steps": 0}, 4),
    ("threshold 0.4", "threshold", "threshold", {"threshold": 0.4}, None),
    ("maskgit, 16 steps", "maskgit", "maskgit", {}, 16),
]
"""(label, curve, sampler, settings, steps); what is left out is the sampler's default."""
BASES: dict[str, dict[str, Any]] = {
    "taylor 1": {},
    "reuse": {"basis": "reuse"},
    "newton 2": {"basis": "newton", "order": 2},
    "taylor 1, output": {"target": "output"},
    "hermite 2": {"basis": "hermite", "order": 2},
    "taylor 2": {"order": 2},
}
DIT: list[tuple[str, str, int, dict[str, Any] | None]] = [
    (f"ddim, {STEPS} steps", "ddim", STEPS, None),
    *(
        setting
        for interval in (3, 5)
        for setting in (
            (f"ddim, {-(-STEPS // interval)} steps", "ddim", -(-STEPS // interval), None),
            *(
                (f"{curve}, {-(-STEPS // interval)} of {STEPS}", curve, STEPS, {"interval": interval} | settings)
                for curve, settings in BASES.items()
            ),
        )
    ),
]
"""(label, curve, DDIM steps, settings of TaylorSeer); first_enhance is 1."""


@torch.inference_mode()
def run_masked(model: Any, setting: tuple, images: int, seed: int) -> dict[str, Any]:
    _, _, name, settings, steps = setting
    pictures, labels, evaluations, full, seconds = [], [], [], [], 0.0
    for start in range(0, images, BATCH):
        wanted = [(start + index) % 10 for index in range(min(BATCH, images - start))]
        out = paradec.generate_images(
            model,
            class_labels=wanted,
            sampler=paradec.samplers.create(name, **settings),
            steps=steps,
            seed=seed + start,
            output_type="pt",
        )
        read = np.array([step.forwarded for step in out.trace.steps])  # [steps, B]
        whole = (1 + out.grid.length) * out.row_forwards / sum(out.row_nfe)  # of all guidance branches
        pictures.append(out.images)
        labels += wanted
        evaluations += (read.sum(0) / whole).tolist()
        full += (read == whole).sum(0).tolist()
        seconds += out.seconds
    return {
        "pictures": torch.cat(pictures),
        "labels": torch.tensor(labels),
        "forwards": np.array(evaluations),
        "full": float(np.mean(full)),
        "seconds": seconds,
    }


@torch.inference_mode()
def run_dit(pipe: Any, setting: tuple, images: int, seed: int) -> dict[str, Any]:
    _, _, steps, settings = setting
    session = None
    if settings is not None:
        session = paradec.accelerate(pipe, TaylorSeer(**{"order": 1, "first_enhance": 1} | settings))
    pictures, labels, full, begin = [], [], 0, time.perf_counter()
    for start in range(0, images, BATCH):
        wanted = [(start + index) % 10 for index in range(min(BATCH, images - start))]
        draw = torch.Generator().manual_seed(seed + start)
        pictures.append(pipe(wanted, num_inference_steps=steps, generator=draw, output_type="pt").images)
        labels += wanted
        full = steps if session is None else len(session.report().full_steps)
    if session is not None:
        session.detach()
    return {
        "pictures": torch.cat(pictures),
        "labels": torch.tensor(labels),
        "forwards": np.full(images, full),
        "full": float(full),
        "seconds": time.perf_counter() - begin,
    }


def kept_file(part: str) -> Path:
    """What was done, with the pictures' features; not for the repository."""
    file = ROOT / "runs" / f"digits_masked.{part}.json"
    file.parent.mkdir(exist_ok=True)
    return file


def kept(part: str) -> dict[str, dict[str, Any]]:
    return json.loads(kept_file(part).read_text()) if kept_file(part).exists() else {}


def measure(part: str, images: int, seed: int, classifier: Any) -> None:
    results = kept(part)
    if part == "masked":
        model, settings, run = paradec.load("digits-maskgit"), MASKED, run_masked
    else:
        model, settings, run = PixelDiTPipeline.digits(), DIT, run_dit
        model.set_progress_bar_config(disable=True)
    full_run = kept_file(part).with_suffix(".pt")
    for index, setting in enumerate(settings):
        label, curve = setting[:2]
        if label in results:
            continue
        # masked settings draw other numbers each; diffusion ones begin with the same noise
        found = run(model, setting, images, seed + (1_000_000 * index if part == "masked" else 0))
        results[label] = {"curve": curve, "full": found["full"], **judged(found, classifier)}
        if part == "dit":
            if index == 0:
                torch.save(found["pictures"], full_run)
            error = (found["pictures"] - torch.load(full_run, weights_only=True)).abs().mean()
            results[label]["pixel_error"] = float(error)
        kept_file(part).write_text(json.dumps(results))
        row = results[label]
        print(
            f"{label}: {row['full']:.1f} full, {row['forwards'][0]:.2f} evaluations, accuracy "
            f"{row['accuracy'][0]:.3f}, distance {row['distance'][0]:.2f}, {row['seconds']:.0f} s",
            flush=True,
        )
        save(images, classifier)


def save(images: int, classifier: Any) -> dict[str, Any]:
    """Write what both parts have, without the features."""
    real = frechet_distance(
        (classifier.train_mean, classifier.train_covariance),
        (classifier.held_out_mean, classifier.held_out_covariance),
    )
    found: dict[str, Any] = {"images": images, "distance_of_training_digits": real}
    for part in PARTS:
        found[part] = []
        for label, result in kept(part).items():
            row = {
                key: value for key, value in result.items() if key not in ("right", "features", "tokens_per_forward")
            }
            row["evaluations"] = row.pop("forwards")
            found[part].append({"label": label, **row})
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    errors = any("pixel_error" in row for row in rows)
    lines = [
        "| setting | full evaluations | evaluations | right class, % | Frechet distance |"
        + (" pixel error |" if errors else ""),
        "|---|---|---|---|---|" + ("---|" if errors else ""),
    ]
    for row in rows:
        percent, distance = [100 * share for share in row["accuracy"]], row["distance"]
        lines.append(
            f"| {row['label']} | {row['full']:.1f} | {row['evaluations'][0]:.2f} | "
            f"{percent[0]:.1f} ({percent[1]:.1f}-{percent[2]:.1f}) | "
            f"{distance[0]:.1f} ({distance[1]:.1f}-{distance[2]:.1f}) |"
            + (f" {row['pixel_error']:.4f} |" if errors else "")
        )
    return "\n".join(lines)


def plot(found: dict[str, Any], file: Path) -> None:
    """Accuracy and distance over evaluations, both models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex="row", layout="constrained")
    names = {"masked": "masked transformer", "dit": "diffusion transformer"}
    for row, part in enumerate(PARTS):
        for column, (key, scale) in enumerate((("accuracy", 100), ("distance", 1))):
            axis = axes[row, column]
            for curve in dict.fromkeys(entry["curve"] for entry in found[part]):
                entries = [entry for entry in found[part] if entry["curve"] == curve]
                entries.sort(key=lambda entry: entry["evaluations"][0])
                x = [entry["evaluations"][0] for entry in entries]
                middle, low, high = (scale * np.array([entry[key][i] for entry in entries]) for i in range(3))
                axis.errorbar(x, middle, (middle - low, high - middle), marker="o", capsize=2, lw=1, label=curve)
            axis.set_xlabel("evaluations of the transformer")
            axis.set_ylabel("right class, %" if key == "accuracy" else "Frechet distance")
            axis.set_title(names[part])
            axis.grid(alpha=0.3)
        axes[row, 1].legend(fontsize=7)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def pictures(file: Path) -> None:
    """One of every digit in a row, a setting in every row: masked ones above, diffusion below."""
    model, rows = paradec.load("digits-maskgit"), []
    for name, settings, steps in (
        ("maskgit", {}, 8),
        ("maskgit", {}, 4),
        ("halton", {}, 4),
        ("recap", {}, 8),
    ):
        sampler = paradec.samplers.create(name, **settings)
        rows += paradec.generate_images(model, class_labels=range(10), sampler=sampler, steps=steps, seed=3).images
    pipe = PixelDiTPipeline.digits()
    pipe.set_progress_bar_config(disable=True)

    def paint(steps: int) -> Tensor:
        return pipe(range(10), num_inference_steps=steps, generator=torch.Generator().manual_seed(3), output_type="pt")

    rows += [image for steps in (STEPS, -(-STEPS // 3)) for image in to_pil(paint(steps).images)]
    with paradec.accelerate(pipe, TaylorSeer(interval=3, order=1, first_enhance=1)):
        rows += to_pil(paint(STEPS).images)
    contact_sheet(rows, columns=10, enlarge=2).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--part", choices=PARTS, help="by default both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="forget what was done")
    parser.add_argument("--draw", action="store_true", help="only the plot and the pictures")
    args = parser.parse_args()

    torch.set_num_threads(1)
    classifier = load_classifier()
    parts = PARTS if args.part is None else (args.part,)
    if args.fresh:
        for part in parts:
            kept_file(part).unlink(missing_ok=True)
    if not args.draw:
        for part in parts:
            measure(part, args.images, args.seed, classifier)
    found = save(args.images, classifier)
    for part in PARTS:
        print(table(found[part]))
    if args.draw or args.part is None:
        plot(found, FIGURES / "digits_masked.png")
        pictures(FIGURES / "digits_masked_pictures.png")


if __name__ == "__main__":
    main()
