"""Quality with fewer evaluations on the packaged digit models: a masked transformer and a diffusion transformer.

    python benchmarks/digits_masked.py --part masked             # 500 images of each setting
    python benchmarks/digits_masked.py --part dit --images 300   # 300 images, of the diffusion transformer
    python benchmarks/digits_masked.py --draw        # only the plots and the images, from the result file

Masked transformer (`digits-maskgit`): MaskGIT, Halton, ReCAP and adaptive rules. A full evaluation reads a class token
and 49 codes; ReCAP's local steps read fewer, so the cost is counted in positions: evaluations = positions / 50.

Diffusion transformer (`digits-dit`): DDIM with fewer steps as the baseline; TaylorSeer on 20 and on 50 DDIM steps, with
7 or 5 full evaluations; and rules that decide by a measurement when to evaluate. All settings start from the same
noise. "pixel error" is the mean absolute difference (range 0 to 1) to the images of DDIM with the same number of steps,
all evaluated; plain DDIM runs are compared with DDIM of 20 and of 50 steps. If a rule evaluates a part of the
transformer at forecast steps, this part is counted. A rule decides for a batch
of 100 images, so its counts are means over batches.

Class accuracy and Frechet distance are those of `benchmarks/digits.py`, with 95 % intervals (Wilson's; bootstrap).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digit_quality import load_classifier
from digits import batches, evaluate_images
from provenance import RESULTS, read_result, write_result
from tables import evaluations_table, even_steps_table
from torch import Tensor

import paradec
from paradec import Every, Forecast, TaylorSeer
from paradec.api.images import contact_sheet, to_pil
from paradec.models.images.pixel_dit import PixelDiTPipeline
from paradec.samplers.forecast.refresh import AccumulatedChange, Verification

ROOT = Path(__file__).resolve().parent.parent
FILE = RESULTS / "digits_masked.json"
FIGURES = ROOT / "docs" / "figures"
PARTS = ("masked", "dit")
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
    ("halton, 16 steps", "halton", "halton", {}, 16),
    ("maskgit-r, 16 steps", "maskgit-r", "recap", {"local_steps": 0}, 16),
    ("recap, 8 steps, l=3", "recap, l=3", "recap", {"local_steps": 3}, 8),
    ("recap, 16 steps, l=3", "recap, l=3", "recap", {"local_steps": 3}, 16),
    ("recap, 6 steps, l=2", "recap, l=2", "recap", {"local_steps": 2}, 6),
]
"""(label, curve in the plot, sampler, settings, steps); other settings have their defaults."""
BASES: dict[str, dict[str, Any]] = {
    "taylor 1": {},
    "reuse": {"how": "reuse"},
    "hermite 2": {"how": "hermite", "order": 2},
    "newton 2": {"how": "newton", "order": 2},
    "taylor 2": {"order": 2},
    "foca": {"how": "foca"},
    "dmd": {"how": "dmd", "order": 2},
}
INTERVALS = {20: {7: 3, 5: 4}, 50: {7: 8, 5: 10}}
"""{number of DDIM steps: {number of evaluated steps, including the first: interval}}."""
LEFT_OUT = {
    20: [("dmd", "module"), *((basis, "block") for basis in BASES if basis not in ("taylor 1", "reuse"))],
    50: [(basis, "module") for basis in ("dmd", "hermite 2", "taylor 2", "foca")]
    + [(basis, "output") for basis in ("hermite 2", "taylor 2", "foca")]
    + [(basis, "block") for basis in BASES],
}
"""{number of DDIM steps: [(basis, target) that is not measured]}: `dmd` needs an SVD per row and feature and is meant
for outputs; the other pairs are left out to save time."""
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "taylor 1, module, 7 of 20, first_enhance=3": (20, {"when": Every(4, 3)}),
    "taylor 1, module, 7 of 20, diffusers' style": (20, {"when": Every(4, 3, "diffusers")}),
    "taylor 4, module, 14 of 50, first_enhance=2": (50, TaylorSeer.presets["dit"]),
    "taylor 1, module, change 0.25 of 20": (20, {"when": AccumulatedChange(0.25)}),
    "taylor 1, module, change 0.4 of 20": (20, {"when": AccumulatedChange(0.4)}),
    "taylor 1, module, verified 3 of 20": (20, {"when": Verification(3.0)}),
}
"""{label: (DDIM steps, settings of `Forecast`)}: schedules with more evaluations at the start (the third is the public
code's for DiT), and rules that decide by a measurement."""


def dit_settings() -> list[tuple[str, str, int, dict[str, Any] | None]]:
    """List (label, curve in the plot, DDIM steps, settings of `Forecast`; None is plain DDIM)."""
    entries: list[tuple[str, str, int, dict[str, Any] | None]] = []
    for steps in (20, 50, 14, 10, 7, 5, 4):
        entries.append((f"ddim, {steps} steps", "ddim", steps, None))
    for steps, counts in INTERVALS.items():
        for count, interval in counts.items():
            for basis, settings in BASES.items():
                for target in ("module", "output", "block"):
                    if (basis, target) not in LEFT_OUT[steps]:
                        curve, chosen = f"{basis}, {target}", settings | {"when": Every(interval), "where": target}
                        entries.append((f"{curve}, {count} of {steps}", curve, steps, chosen))
        entries += [(name, "others", *rule) for name, rule in OTHERS.items() if rule[0] == steps]
    return entries


@torch.inference_mode()
def run_masked(model: Any, setting: tuple, images: int, seed: int) -> dict[str, Any]:
    _, _, name, settings, steps = setting
    pictures, evaluations, full = [], [], []
    for start, labels in batches(images):
        out = paradec.generate_images(
            model,
            class_labels=labels,
            sampler=paradec.samplers.create(name, **settings),
            steps=steps,
            seed=seed + start,
            output_type="pt",
        )
        read = np.array([step.forwarded for step in out.trace.steps])  # [steps, B]
        # positions of a full evaluation, in all guidance branches
        full_positions = (1 + out.grid.length) * out.row_forwards / sum(out.row_nfe)
        pictures.append(out.images)
        evaluations += (read.sum(0) / full_positions).tolist()
        full += (read == full_positions).sum(0).tolist()
    return {"pictures": torch.cat(pictures), "forwards": np.array(evaluations), "full": float(np.mean(full))}


@torch.inference_mode()
def run_dit(pipe: Any, setting: tuple, images: int, seed: int) -> dict[str, Any]:
    _, _, steps, settings = setting
    session = None
    if settings is not None:
        session = paradec.accelerate(pipe, Forecast(**settings))
    pictures, full, evaluations = [], [], []
    for start, labels in batches(images):
        draw = torch.Generator().manual_seed(seed + start)
        pictures.append(pipe(labels, num_inference_steps=steps, generator=draw, output_type="pt").images)
        full += [steps if session is None else len(session.report().full_steps)] * len(labels)
        verified = settings is not None and isinstance(settings.get("when"), Verification)
        share = 1 / pipe.transformer.config.num_layers if verified else 0.0  # the last block is always evaluated
        evaluations += [full[-1] + share * (steps - full[-1])] * len(labels)
    if session is not None:
        session.detach()
    return {"pictures": torch.cat(pictures), "forwards": np.array(evaluations), "full": float(np.mean(full))}


REFERENCES = {f"ddim, {steps} steps": steps for steps in INTERVALS}
"""Numbers of steps of the DDIM runs to which pixel errors refer, by label."""


def measure(part: str, images: int, classifier: Any) -> list[dict[str, Any]]:
    """Measure every setting of a part; return a row for each."""
    if part == "masked":
        model, settings, run = paradec.load("digits-maskgit"), MASKED, run_masked
    else:
        model, settings, run = PixelDiTPipeline.digits(), dit_settings(), run_dit
        model.set_progress_bar_config(disable=True)
    rows, references, plain = [], {}, {}
    for index, setting in enumerate(settings):
        label, curve, steps = setting[:3]
        # each masked setting has different seeds; all diffusion settings start from the same noise
        drawn = run(model, setting, images, 1_000_000 * index if part == "masked" else 0)
        judgement = evaluate_images(drawn, classifier)[0]
        row = {"label": label, "curve": curve, "full": drawn["full"], "evaluations": judgement.pop("forwards")}
        rows.append(row | judgement)
        print(rows[-1], flush=True)
        if label in REFERENCES:
            references[REFERENCES[label]] = drawn["pictures"]
        if part == "dit":
            if setting[3] is None:
                plain[label] = drawn["pictures"]
            rows[-1] |= {"steps": steps, "pixel_error": errors(drawn["pictures"], references, [steps])}
    for row in rows:
        if row["label"] in plain:
            row["pixel_error"] = errors(plain[row["label"]], references, [*INTERVALS])
    return rows


def errors(pictures: Tensor, references: dict[int, Tensor], aims: list[int]) -> dict[str, float]:
    """Compute the mean absolute difference to the DDIM images in `references`, for each number of steps in `aims`."""
    return {str(aim): float((pictures - references[aim]).abs().mean()) for aim in aims if aim in references}


def plot(panels: list[tuple[str, list[dict[str, Any]]]], file: Path) -> None:
    """Plot accuracy, distance and pixel error over evaluations: a row of plots for each (title, rows of results), a
    line for each curve. Curves are shifted sideways a little, so that they do not hide each other."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    from paradec.tools.evaluation.plot import save

    keys = {"accuracy": "right class, %", "distance": "Frechet distance", "pixel_error": "pixel error"}
    keys = {key: name for key, name in keys.items() if key in panels[0][1][0]}
    size = (5 * len(keys), 4.4 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), len(keys), squeeze=False)
    curves = list(dict.fromkeys(entry["curve"] for _, entries in panels for entry in entries))
    for row, (title, entries) in enumerate(panels):
        for column, (key, name) in enumerate(keys.items()):
            axis, scale = axes[row, column], 100 if key == "accuracy" else 1
            for place, curve in enumerate(curves):
                points = sorted((e for e in entries if e["curve"] == curve), key=lambda e: e["evaluations"][0])
                if not points:
                    continue
                x = [entry["evaluations"][0] + 0.03 * place for entry in points]
                y = scale * np.array([np.broadcast_to(entry[key], 3) for entry in points])  # [points, 3]
                spread = np.abs(y[:, 1:] - y[:, :1]).T if key != "pixel_error" else None
                line = {"ddim": "-", "others": ""}.get(curve, ":" if "output" in curve else "--")
                style = {"marker": "o", "ms": 4, "lw": 1, "elinewidth": 0.5, "ls": line}
                axis.errorbar(x, y[:, 0], spread, color=colormaps["tab20"](place % 20), label=curve, **style)
            axis.set(xlabel="evaluations of the transformer", ylabel=name, title=title)
            axis.grid(alpha=0.3)
        axes[row, -1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, file)


def draw(result: dict[str, Any]) -> None:
    """Draw the plots of the two models, and images."""
    plot([("masked transformer", result["masked"])], FIGURES / "digits_masked.svg")
    panels = []
    for steps in INTERVALS:
        rows = [row for row in result["dit"] if row["steps"] == steps or row["curve"] == "ddim"]
        rows = [row | {"pixel_error": row["pixel_error"][str(steps)]} for row in rows if row["evaluations"][0] <= 20]
        panels.append((f"forecasts on {steps} DDIM steps", rows))
    plot(panels, FIGURES / "digits_dit.svg")
    pictures(FIGURES / "digits_masked_pictures.png")


def pictures(file: Path) -> None:
    """Draw a row of ten digits for each of seven settings: four of the masked transformer, three of diffusion."""
    model, rows = paradec.load("digits-maskgit"), []
    for name, settings, steps in (("maskgit", {}, 8), ("maskgit", {}, 4), ("halton", {}, 4), ("recap", {}, 8)):
        sampler = paradec.samplers.create(name, **settings)
        rows += paradec.generate_images(model, class_labels=range(10), sampler=sampler, steps=steps, seed=3).images
    pipe = PixelDiTPipeline.digits()
    pipe.set_progress_bar_config(disable=True)

    def paint(steps: int) -> Tensor:
        return pipe(range(10), num_inference_steps=steps, generator=torch.Generator().manual_seed(3), output_type="pt")

    rows += [image for steps in (20, 5) for image in to_pil(paint(steps).images)]
    with paradec.accelerate(pipe, TaylorSeer(interval=4, order=1)):
        rows += to_pil(paint(20).images)
    contact_sheet(rows, columns=10, enlarge=2).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--part", choices=PARTS, default="masked")
    parser.add_argument("--draw", action="store_true", help="only draw the plots and the images")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if args.draw:
        draw(read_result(FILE))
        return
    result = read_result(FILE) if FILE.exists() else {}  # keep the result of the other part
    result[args.part] = rows = measure(args.part, args.images, load_classifier())
    result.pop("commit", None)
    write_result(FILE, result)
    print(evaluations_table(rows))
    if args.part == "dit":
        print(even_steps_table(rows))


if __name__ == "__main__":
    main()
