"""Write pages of traces into a folder, with the expected content of each page for `look.mjs`.

    python tests/browser/write_pages.py FOLDER

Expected texts come from `Trace.replay`, which does not depend on the page.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS.parent)]

import torch  # noqa: E402
from traces import hostile_trace, scripts_trace  # noqa: E402

import paradec  # noqa: E402
from paradec.core.trace import Notes, Trace  # noqa: E402
from paradec.models.images.diffusion import DiffusionModel  # noqa: E402
from paradec.models.images.pixel_dit import PixelDiTPipeline  # noqa: E402
from paradec.tools.traces.files import page  # noqa: E402

PROMPTS = ["Sort: wolf fig otter zebra deer orange", "Latin square: Q Z S U"]


def long_trace(steps: int, rows: int = 2, length: int = 300, drafts: int = 4) -> Trace:
    """Create the trace of a run of many steps in which every kind of mark occurs."""
    draw = random.Random(0)
    canvas = [[1, 2, *[0] * length] for _ in range(rows)]
    trace = Trace(canvas, {"sampler": "by hand"}, family="masked", mask_id=0)
    trace.texts = {token: f"t{token}" for token in range(50)}
    for _ in range(steps):
        row, place = draw.randrange(rows), draw.randrange(2, length + 2)
        spans = [[(at, at + 1) for at in sorted(draw.sample(range(length), 20))] for _ in range(rows)]
        commits = [(row, place, draw.choice((0, 3, 4, 5)), draw.random())]
        notes = Notes([1] * rows, spans, [(2, 34)] * rows)
        trace.add(commits, [20] * rows, "window", notes, 0.01)
        trace.steps[-1].rejected = [(row, draw.randrange(2, length), draw.randrange(1, 50)) for _ in range(drafts)]
    return trace


def texts() -> dict[str, list[Trace]]:
    """Record traces of the packaged model, and create some by hand: name of the page -> its traces."""
    model, traces = paradec.load(), {}
    request: dict[str, Any] = {"max_new_tokens": 32, "trace": True}
    for name, more in {
        "threshold": {},
        "wino": {},
        "freedave": {},
        "union": {"sampler": "credit+localleap", "cache": "dual", "block_length": 8},
    }.items():
        traces[name] = [paradec.generate(model, PROMPTS, **({"sampler": name} | request | more)).trace]
    one_per_step = paradec.generate(model, PROMPTS[0], sampler="low_confidence", **request).trace
    several_per_step = paradec.generate(model, PROMPTS[0], **request).trace
    return traces | {
        "both": [one_per_step, several_per_step],
        "hostile": [hostile_trace()],
        "scripts": [scripts_trace()],
        "long": [long_trace(2000)],
    }


def pictures() -> dict[str, list[Trace]]:
    """Record traces of image models, and of a diffusion model in `paradec.decode` and in a pipeline of diffusers."""
    traces = {}
    for name, sampler, more in (("digits-maskgit", "recap", {"steps": 8}), ("digits-ar", "sjd", {})):
        output = paradec.generate_images(
            paradec.load(name), class_labels=[3, 8], sampler=sampler, seed=0, trace=True, **more
        )
        traces[sampler] = [output.trace]
    pipe = PixelDiTPipeline.digits()
    pipe.set_progress_bar_config(disable=True)
    sampler = paradec.TaylorSeer(interval=5, order=1, where="output")
    model = DiffusionModel(pipe.transformer)
    side = pipe.transformer.config.sample_size
    noise = torch.randn(2, model.channels, side, side, generator=torch.Generator().manual_seed(0))
    request = {"scheduler": pipe.scheduler, "num_inference_steps": 30, "class_labels": [3, 8], "trace": True}
    state = sampler.start(model, noise, **request)
    paradec.decode(sampler, model, state)
    with paradec.accelerate(pipe, paradec.TaylorSeer(interval=5)) as session:
        images = pipe([3, 8], num_inference_steps=30, generator=torch.Generator().manual_seed(0)).images
    return traces | {"forecast": [state.trace], "pipeline": [session.report().trace(images)]}


def expected_content(trace: Trace) -> dict[str, Any]:
    """Return what the page of a run must show: its counts and, for texts, the ids of every row after some steps."""
    expected: dict[str, Any] = {"steps": len(trace.steps), "forwards": max(trace.row_nfe), "mask": trace.mask_id}
    expected["rows"], expected["grid"] = trace.batch, trace.grid
    expected["kinds"] = sorted({step.kind for step in trace.steps})
    if trace.canvas and trace.grid is None:
        expected["texts"] = {str(token): text for token, text in trace.texts.items()}
        expected["filled"] = [[i for a, b in trace.to_fill(r) for i in range(a, b)] for r in range(trace.batch)]
        compared_steps = {0, 1, 2, len(trace.steps) // 2, len(trace.steps)}
        expected["canvas"] = {str(k): trace.replay(k) for k in compared_steps if k <= len(trace.steps)}
        expected["back"] = {
            str(k): [[r, p] for r, p, token, _ in trace.steps[k - 1].commits if token == trace.mask_id]
            for k in compared_steps
            if 0 < k <= len(trace.steps)
        }
    return expected


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, traces in (texts() | pictures()).items():
        (folder / f"{name}.html").write_text(page(traces), encoding="utf-8")
        expected = json.dumps([expected_content(trace) for trace in traces])
        (folder / f"{name}.expected.json").write_text(expected, encoding="utf-8")
    output = paradec.generate(paradec.load(), PROMPTS, max_new_tokens=32, trace=True)
    html = "<!DOCTYPE html><meta charset=utf-8>" + output._repr_html_()
    (folder / "notebook.html").write_text(html, encoding="utf-8")


if __name__ == "__main__":
    main()
