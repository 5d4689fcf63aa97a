"""Traces as an animated GIF, drawn with Pillow: a panel for each run, a frame for each step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from paradec.core.checks import check_int, check_number, format_count, short_repr
from paradec.core.thumbnails import RAMP, from_uri, import_pillow
from paradec.core.trace import Trace
from paradec.tools.traces.payload import check_runs

MARGIN, LINE, SIDE, MAX_HEIGHT, MAX_PICTURES, MAX_FRAMES = 14, 23, 168, 1200, 8, 120  # the first four in pixels
INK, WAITING = (27, 27, 31), (226, 226, 234)  # colours of text and of undecided positions


def write(
    traces: Sequence[Trace],
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    row: int = 0,
    width: int = 720,
    seconds: float = 0.3,
    font: str | os.PathLike[str] | None = None,
) -> None:
    """Draw runs side by side: a frame for the start and for each step, or 120 evenly spaced frames if there are more.

    traces: 1 to 4 traces. names: names of the runs; by default their samplers. row: the row of text runs to draw (of
    image runs, the first 8 rows are drawn). width: width of the animation in pixels. seconds: duration of a frame.
    font: a TrueType file; by default Pillow's font, which has only Latin letters.
    Raises ImportError: pillow is missing. TypeError: values that are not traces. ValueError: an argument out of its
    range, or an invalid font file. OSError: the file cannot be written."""
    pillow, names = import_pillow(), check_runs(traces, names)
    from PIL import ImageFont

    check_int("width", width, low=160, high=4000)
    check_number("seconds", seconds, low=0.02, high=60)
    for trace in traces:
        check_int("row", row, low=0, high=max(0, trace.batch - 1))
    try:
        typeface = ImageFont.load_default(15) if font is None else ImageFont.truetype(os.fspath(font), 15)
    except (OSError, TypeError) as error:
        raise ValueError(f"font={short_repr(font)} is not a readable font file: {error}") from None
    panel = (width - MARGIN * (len(traces) + 1)) // len(traces)
    layouts = [_lay_out(trace, row, panel, typeface) for trace in traces]
    bottom = max((box[3] for boxes in layouts for box in boxes.values()), default=0)
    max_steps, frames = max(len(trace.steps) for trace in traces), []
    for num_steps in sorted({round(i * max_steps / (MAX_FRAMES - 1)) for i in range(MAX_FRAMES)}):
        frames.append(pillow.new("RGB", (width, min(MAX_HEIGHT, 2 * MARGIN + 2 * LINE + bottom)), "white"))
        for index, (trace, name, boxes) in enumerate(zip(traces, names, layouts, strict=True)):
            _draw(frames[-1], MARGIN + index * (panel + MARGIN), trace, name, boxes, num_steps, typeface)
    sample = pillow.new("RGB", (width, 2 * frames[0].height))
    sample.paste(frames[0])
    sample.paste(frames[-1], (0, frames[0].height))
    palette = sample.quantize(96)  # one palette for all frames, so that only changed pixels are stored
    quantized = [frame.quantize(palette=palette, dither=pillow.Dither.NONE) for frame in frames]
    times = [round(seconds * 1000)] * (len(quantized) - 1) + [2500]
    quantized[0].save(path, format="GIF", save_all=True, append_images=quantized[1:], duration=times, loop=0)


def _lay_out(trace: Trace, row: int, width: int, typeface: Any) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """Return the corners of boxes by (row, position), relative to the panel. Position -1 is a row's complete image."""
    boxes, x, y = {}, 0, 0
    if trace.cells is not None or trace.images or any(step.pictures for step in trace.steps) or not trace.canvas:
        side, num_columns, (high, wide) = min(SIDE, width), max(1, width // (SIDE + 6)), trace.grid or (1, 1)
        for i in range(min(trace.batch, MAX_PICTURES)):
            x, y = i % num_columns * (side + 6), i // num_columns * (side + 6)
            boxes[i, -1] = (x, y, x + side, y + side)
            for cell, position in enumerate(trace.cells[i] if trace.cells is not None else ()):
                left, top = x + cell % wide * side // wide, y + cell // wide * side // high
                boxes[i, position] = (left, top, left + side // wide - 1, top + side // high - 1)
        return boxes
    final, to_fill = trace.replay()[row], {i for span in trace.to_fill(row) for i in range(*span)}
    first = min(to_fill, default=0)
    for position in range(max(0, first - 60), len(final) if trace.ends is None else min(trace.ends[row], len(final))):
        if (position in to_fill or final[position] not in trace.special) and y < MAX_HEIGHT - 5 * LINE:
            size = min(width, round(typeface.getlength(_text(trace, final[position]))) + 10)
            x, y = (0, y + LINE) if x + size > width or position == first and x else (x, y)
            boxes[row, position] = (x, y, x + size, y + LINE - 3)
            x += size + 3
    return boxes


def _text(trace: Trace, token: Any) -> str:
    text = trace.texts.get(token, str(token)) if isinstance(token, int) else " "
    return (text.strip("<|>[]")[:3] if token in trace.special else text.strip(" ").replace("\n", "¶")) or " "


def _draw(image: Any, left: int, trace: Trace, name: str, boxes: Any, num_steps: int, typeface: Any) -> None:
    """Draw one run in its state after `num_steps` steps."""
    from PIL import ImageDraw

    pen, steps, is_last = ImageDraw.Draw(image), trace.steps[:num_steps], num_steps >= len(trace.steps)
    calls = [sum(step.nfe[i] if step.nfe else step.forwarded[i] > 0 for step in steps) for i in range(trace.batch)]
    title = f"{name}\n{format_count(max(calls, default=0), 'forward')}{', done' * is_last}"
    pen.text((left, MARGIN), title, font=typeface, fill=INK, spacing=5)
    recorded = next((step.pictures for step in reversed(steps) if step.pictures), [])
    pictures = [from_uri(uri) for uri in (trace.images if is_last or trace.cells is not None else None) or recorded]
    commit_of_cell = {commit[:2]: (index, commit[2]) for index, step in enumerate(steps) for commit in step.commits}
    for (i, position), corners in boxes.items():
        box = [value + (left, MARGIN + 2 * LINE)[index % 2] for index, value in enumerate(corners)]
        picture = pictures[i] if i < len(pictures) else None
        if position < 0 and picture is not None:
            image.paste(picture.resize((box[2] - box[0], box[3] - box[1]), 0), box[:2])
        if position < 0:
            continue
        step, token = commit_of_cell.get((i, position), (-1, trace.canvas[i][position]))
        share, waiting = step / max(1, len(trace.steps) - 1) * (len(RAMP) - 1), token == trace.mask_id
        if waiting or step >= 0 and (picture is None or step == num_steps - 1 and not is_last):
            pen.rectangle(box, fill=WAITING if waiting else RAMP[round(share)])
        if trace.cells is None and not waiting:
            colour = "white" if 0 <= share < 3 else INK
            pen.text((box[0] + 4, box[1] + 1), _text(trace, token), font=typeface, fill=colour)
