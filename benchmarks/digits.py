"""Measure cost and quality of samplers on the packaged digit generator: forwards, class accuracy, Frechet distance.

    python benchmarks/digits.py                    # 500 images of each setting; writes results/digits.json
    python benchmarks/digits.py --figure docs/figures/digits.png    # only the figure
    python benchmarks/tables.py                    # run afterwards: updates the tables of docs/results.md

Class accuracy is the share of images in which the packaged classifier (98 % right on held-out digits) sees the
requested class. The distance is between the features of the images and those of a thousand held-out real digits.
Intervals are 95 %: Wilson's for accuracy, normal with the standard error of 200 bootstrap samples for the distance.
A permutation test compares each setting's images with those of token-by-token decoding. p is the share of random splits
of the united images, class by class, whose halves are at least as far apart as the two sets. For lossless samplers, p
is uniform in [0, 1]. `speculative` drafts with `digits-ar-drafter`, whose forwards are counted separately.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digit_quality import frechet_distance, load_classifier, moments
from provenance import RESULTS, write_result
from tables import digits_table
from torch import Tensor

import paradec
from paradec.api.images import contact_sheet, step_pictures
from paradec.tools.evaluation.metrics import wilson

ROOT = Path(__file__).resolve().parent.parent
MODEL, DRAFTER = "digits-ar", "digits-ar-drafter"
WINDOWS = (4, 8, 32)
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("ar", "sjd", {"window": 1}),
    ("sjd", "sjd", {}),
    ("scd", "scd", {}),
    ("gsd", "gsd", {}),
    ("lantern", "lantern", {"guess_distribution": "one_hot"}),
    ("lantern++", "lantern++", {}),
    ("speculative", "speculative", {"drafter": DRAFTER}),
    ("zipar, window 3", "zipar", {"window": 3}),
    ("jacobi", "jacobi", {}),
    ("speculative, window 4", "speculative", {"drafter": DRAFTER, "window": 4}),
    ("speculative, tree of 3, 2, 1", "speculative", {"drafter": DRAFTER, "tree": (3, 2, 1)}),
    *((f"sjd, window {window}", "sjd", {"window": window}) for window in WINDOWS),
    *((f"scd, window {window}", "scd", {"window": window}) for window in WINDOWS),
    *((f"gsd, window {window}", "gsd", {"window": window}) for window in WINDOWS),
    *((f"lantern++, window {window}", "lantern++", {"window": window}) for window in WINDOWS),
    *((f"jacobi, window {window}", "jacobi", {"window": window}) for window in WINDOWS),
    *((f"speculative, window {window}", "speculative", {"drafter": DRAFTER, "window": window}) for window in (8, 16)),
    ("scd, maximal", "scd", {"refresh": "maximal"}),
    ("sjd, one-hot q", "sjd", {"guess_distribution": "one_hot"}),
    ("sjd, repeat_vertical", "sjd", {"init": "repeat_vertical"}),
    ("sjd, keep", "sjd", {"refresh": "keep"}),
    ("lantern, uniform q", "lantern", {"guess_distribution": "uniform"}),
]
"""(label, sampler, settings). Other settings have their defaults; that of `window` is 16, or 5 with a drafter."""
PICTURED = 7
"""The figure shows this many settings, the first ones."""
BATCH = 100
PERMUTATIONS = 999
BOOTSTRAPS = 200


def create(name: str, settings: dict[str, Any]) -> Any:
    """Create a sampler; if `settings` name a drafter, it is loaded."""
    loaded = {"drafter": paradec.load(settings["drafter"])} if "drafter" in settings else {}
    return paradec.samplers.create(name, **(settings | loaded))


def batches(images: int) -> Iterator[tuple[int, list[int]]]:
    """Yield for every batch the index of its first image, and the images' classes (0 to 9, repeating)."""
    for start in range(0, images, BATCH):
        yield start, [index % 10 for index in range(start, min(start + BATCH, images))]


@torch.inference_mode()
def run(model: Any, sampler: Any, images: int, seed: int, guidance: float) -> dict[str, Any]:
    """Generate `images` images, all classes equally often: "pictures" [images, 1, 28, 28] and forwards."""
    pictures, forwards, drafted = [], [], []
    for start, labels in batches(images):
        out = paradec.generate_images(
            model, class_labels=labels, sampler=sampler, seed=seed + start, guidance_scale=guidance, output_type="pt"
        )
        pictures.append(out.images)
        forwards += out.row_nfe
        drafted += out.draft_nfe
    return {"pictures": torch.cat(pictures), "forwards": np.array(forwards), "draft_forwards": sum(drafted) / images}


def evaluate_images(drawn: dict[str, Any], classifier: Any) -> tuple[dict[str, Any], Tensor]:
    """Compute accuracy, distance and forwards of the output of `run`, and the features [n, d] of its images."""
    with torch.inference_mode():
        features = classifier.features(drawn["pictures"])
        right = (classifier.output(features).argmax(-1) == torch.arange(len(features)) % 10).numpy()
    held_out = (classifier.held_out_mean, classifier.held_out_covariance)
    rng = np.random.default_rng(0)
    samples = [
        frechet_distance(moments(features[rng.integers(len(features), size=len(features))]), held_out)
        for _ in range(BOOTSTRAPS)
    ]
    distance, forwards = frechet_distance(moments(features), held_out), drawn["forwards"]
    row = {
        "accuracy": [float(right.mean()), *wilson(int(right.sum()), len(right))],
        "distance": [distance, distance - 1.96 * np.std(samples), distance + 1.96 * np.std(samples)],
        "forwards": [float(forwards.mean()), float(1.96 * forwards.std() / len(forwards) ** 0.5)],
    }
    return row, features


def permutation_p_value(tested: Tensor, base: Tensor) -> float:
    """Run a permutation test: the share of random splits of the united features [n, d] whose halves are at least as far
    apart as the two sets."""
    features = torch.cat([tested, base])

    def split_distance(in_first: Tensor) -> float:
        return frechet_distance(moments(features[in_first]), moments(features[~in_first]))

    # each set has equally many images of every class; so must the halves of every split
    generator = torch.Generator().manual_seed(0)
    in_tested = torch.arange(len(features)) < len(tested)
    classes = [torch.arange(label, len(features), 10) for label in range(10)]
    observed, num_larger = split_distance(in_tested), 0
    for _ in range(PERMUTATIONS):
        split = in_tested.clone()
        for places in classes:
            split[places] = in_tested[places[torch.randperm(len(places), generator=generator)]]
        num_larger += split_distance(split) >= observed
    return (1 + num_larger) / (1 + PERMUTATIONS)


def figure(model: Any, file: Path) -> None:
    """Draw two images of every digit for each setting, and below each row of images the step that made each code."""
    rows = []
    for label, name, settings in SETTINGS[:PICTURED]:
        sampler = create(name, settings)
        out = paradec.generate_images(model, class_labels=[*range(10)] * 2, sampler=sampler, seed=1, trace=True)
        print(f"{label}: {out.nfe} forwards")
        rows += [image.convert("RGB").resize((56, 56)) for image in out.images]
        rows += step_pictures(out, pixels=8)
    contact_sheet(rows, columns=20).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS / "digits.json")
    parser.add_argument("--figure", type=Path, help="only draw the figure into this file")
    args = parser.parse_args()

    if args.images < 10 or args.images % 10:
        parser.error(f"--images {args.images} must be a multiple of 10: all classes equally often")
    torch.set_num_threads(1)
    model, classifier = paradec.load(MODEL), load_classifier()
    guidance = model.defaults["guidance_scale"]
    if args.figure is not None:
        figure(model, args.figure)
        return
    rows: list[dict[str, Any]] = []
    base = torch.empty(0)
    for index, (label, name, settings) in enumerate(SETTINGS):
        sampler = create(name, settings)
        # every setting has different seeds: lossless samplers must agree in distribution, not image by image
        drawn = run(model, sampler, args.images, 1_000_000 * index, guidance)
        judgement, features = evaluate_images(drawn, classifier)
        row: dict[str, Any] = {"label": label, "lossless": bool(getattr(sampler, "lossless", False)), **judgement}
        row["draft_forwards"] = drawn["draft_forwards"]
        row["tokens_per_forward"] = 49 * args.images / float(drawn["forwards"].sum())
        base = base if rows else features
        row["permutation_p"] = permutation_p_value(features, base) if rows else None
        rows.append(row)
        print(row, flush=True)
    real = frechet_distance(
        (classifier.train_mean, classifier.train_covariance), (classifier.held_out_mean, classifier.held_out_covariance)
    )
    result = {"images": args.images, "guidance_scale": guidance, "distance_of_training_digits": real}
    write_result(args.out, result | {"settings": rows})
    print(digits_table(result | {"settings": rows}, short=False))


if __name__ == "__main__":
    main()
