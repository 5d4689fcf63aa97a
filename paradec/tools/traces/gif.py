"""A trace as an animation, drawn with Pillow: a panel for each run, all of them forward by forward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paradec.core.checks import check_int, check_number, count, shown
from paradec.core.thumbnails import RAMP, from_uri, pillow
from paradec.core.trace import Trace
from paradec.tools.traces.payload import check_runs

PAD, GAP, SIZE = 14, 3, 15
"""Pixels around a panel and between tokens, and of the letters."""
PADDING = 7
"""Pixels along a token after the end."""
CAPTION = "small boxes: padding after the answer"
MOST_HEIGHT = 1200
"""Pixels; what a text does not have room for is left out below."""
MOST_PICTURES = 8
"""Rows of pictures that are drawn."""
PICTURE_SIDE = 168
COLOURS = 96
HOLD = 2.5
"""Seconds that the last frame stays."""
LIGHT = {"back": (255, 255, 255), "ink": (27, 27, 31), "soft": (110, 110, 120), "wait": (226, 226, 234)}
DARK = {"back": (22, 22, 26), "ink": (236, 236, 241), "soft": (150, 150, 160), "wait": (52, 52, 62)}
FORECAST = (176, 168, 216)
EVALUATED = (21, 101, 192)


def write(
    traces: Sequence[Trace],
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    row: int = 0,
    width: int = 720,
    seconds: float = 0.3,
    most_frames: int = 120,
    font: str | os.PathLike[str] | None = None,
    dark: bool = False,
) -> None:
    """Draw runs side by side, a frame after every step of all of them.

    Args:
        traces: up to 4. names: what to call them; by default their samplers.
        row: of a text; of pictures the first rows are drawn together.
        width: of all panels, in pixels.
        seconds: that a frame stays.
        most_frames: of longer runs only so many moments are drawn, evenly spread.
        font: a TrueType file; by default Pillow's own font, which has Latin letters only.
        dark: whether letters are bright.

    Raises:
        ImportError: pillow is missing. TypeError: something else than traces. ValueError: an argument out of its range,
            or a file that is no font. OSError: the file cannot be written.
    """
    library = pillow()
    called = check_runs(traces, names)
    check_int("width", width, low=160, high=4000)
    check_int("most_frames", most_frames, low=2, high=1000)
    check_number("seconds", seconds, low=0.02, high=60)
    for trace in traces:
        check_int("row", row, low=0, high=max(0, trace.batch - 1))
    colours = DARK if dark else LIGHT
    letters, heading = _fonts(font)
    each = (width - PAD * (len(traces) + 1)) // len(traces)
    panels = [
        _panel(library, trace, name, row, each, letters, heading, colours)
        for trace, name in zip(traces, called, strict=True)
    ]
    height = min(MOST_HEIGHT, 2 * PAD + max(panel.height for panel in panels))
    last = max(len(trace.steps) for trace in traces)
    moments = sorted({round(i * last / (most_frames - 1)) for i in range(most_frames)})
    frames = []
    for moment in moments:
        image = library.new("RGB", (width, height), colours["back"])
        for index, panel in enumerate(panels):
            panel.draw(image, PAD + index * (each + PAD), PAD, moment)
        frames.append(image)
    _save(library, frames, path, seconds)


def _fonts(font: Any) -> tuple[Any, Any]:
    from PIL import ImageFont

    if font is None:
        return ImageFont.load_default(SIZE), ImageFont.load_default(SIZE + 2)
    try:
        return ImageFont.truetype(os.fspath(font), SIZE), ImageFont.truetype(os.fspath(font), SIZE + 2)
    except (OSError, TypeError) as error:
        raise ValueError(f"font={shown(font)} is no font file that can be read: {error}") from None


def _save(library: Any, frames: list[Any], path: str | os.PathLike[str], seconds: float) -> None:
    # one palette for all frames: only then is a frame stored as what differs from the one before
    step = max(1, (len(frames) - 1) // 3)
    samples = [*frames[::step][:4], frames[-1]]
    together = library.new("RGB", (frames[0].width, frames[0].height * len(samples)))
    for index, frame in enumerate(samples):
        together.paste(frame, (0, index * frame.height))
    palette = together.quantize(COLOURS)
    drawn = [frame.quantize(palette=palette, dither=library.Dither.NONE) for frame in frames]
    times = [round(seconds * 1000)] * (len(drawn) - 1) + [round(HOLD * 1000)]
    drawn[0].save(path, format="GIF", save_all=True, append_images=drawn[1:], duration=times, loop=0)


@dataclass
class _Panel:
    """One run. Subclasses draw what is below the heading and the bar."""

    library: Any
    trace: Trace
    name: str
    row: int
    width: int
    letters: Any
    heading: Any
    colours: dict[str, tuple[int, int, int]]
    top: int = field(init=False, default=0)
    side: int = field(init=False, default=PICTURE_SIDE)
    height: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.line = SIZE + 8
        self.top = 3 * self.line + 14
        self.height = self.top + self.lay()

    def lay(self) -> int:
        """Find the places of things; returns the height that they take."""
        return 0

    def draw(self, image: Any, x: int, y: int, moment: int) -> None:
        """Draw the panel as it is after `moment` steps, at (x, y)."""
        from PIL import ImageDraw

        pen = ImageDraw.Draw(image)
        steps = self.trace.steps[:moment]
        nfe = [0] * max(1, self.trace.batch)
        for step in steps:
            for row, forwarded in enumerate(step.forwarded):
                nfe[row] += step.nfe[row] if step.nfe is not None else int(forwarded > 0)
        over = moment >= len(self.trace.steps)
        pen.text((x, y), self.fitted(self.name, self.heading), font=self.heading, fill=self.colours["ink"])
        told = count(max(nfe), "forward") + (", done" if over else "")
        pen.text((x, y + self.line), told, font=self.letters, fill=self.colours["ink" if over else "soft"])
        self.bar(pen, x, y + 2 * self.line + 2, len(steps))
        self.body(image, pen, x, y + self.top, min(moment, len(self.trace.steps)))

    def fitted(self, text: str, font: Any) -> str:
        """As much of a text as there is room for."""
        text = text.replace("\n", " ")
        while text and font.getlength(text) > self.width:
            text = text[:-1]
        return text

    def enlarged(self, uri: str) -> Any:
        """A picture as large as it is drawn; None where there is none in the text."""
        found = from_uri(uri)
        return None if found is None else found.resize((self.side, self.side), self.library.Resampling.NEAREST)

    def bar(self, pen: Any, x: int, y: int, done: int) -> None:
        """What the steps cost, and how many are done."""
        steps = self.trace.steps
        costs = [sum(step.forwarded) for step in steps]
        most, each = max([1, *costs]), self.width / max(1, len(steps))
        for index, (step, cost) in enumerate(zip(steps, costs, strict=True)):
            tall = max(3, cost / most * 16)
            colour = FORECAST if step.kind == "forecast" else EVALUATED
            left = x + index * each
            right = max(left, left + each - (1 if each > 3 else 0))
            pen.rectangle((left, y + 16 - tall, right, y + 16), fill=colour if index < done else self.colours["wait"])

    def body(self, image: Any, pen: Any, x: int, y: int, moment: int) -> None:
        """What is below the bar."""


def _panel(library: Any, trace: Trace, *rest: Any) -> _Panel:
    if any(step.pictures for step in trace.steps):
        return _Latent(library, trace, *rest)
    if trace.grid is not None and trace.cells is not None:
        return _Pictures(library, trace, *rest)
    return _Text(library, trace, *rest) if trace.canvas else _Latent(library, trace, *rest)


def _ramp(share: float) -> tuple[int, int, int]:
    at = min(1.0, max(0.0, share)) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    mixed = (round(a + (at - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    red, green, blue = mixed
    return red, green, blue


def _written(trace: Trace, row: int, moment: int) -> dict[int, tuple[int, int]]:
    """(step, token) of every position of a row that is decided after so many steps."""
    found: dict[int, tuple[int, int]] = {}
    for index, step in enumerate(trace.steps[:moment]):
        for at, position, token, _ in step.commits:
            if at == row and token == trace.mask_id:
                found.pop(position, None)
            elif at == row:
                found[position] = (index, token)
    return found


class _Text(_Panel):
    """Tokens in their final places, from the prompt's last line on."""

    caption_at: int | None = None

    def lay(self) -> int:
        final = [token if isinstance(token, int) else -1 for token in self.trace.replay()[self.row]]
        stop = len(final)
        end = stop if self.trace.ends is None else min(stop, self.trace.ends[self.row])
        self.fill = {i for start, last in self.trace.to_fill(self.row) for i in range(start, min(last, stop))}
        written = _written(self.trace, self.row, len(self.trace.steps))
        self.places: dict[int, tuple[int, int, int]] = {}
        x = y = 0
        first = min(self.fill, default=0)
        for position in range(max(0, first - 60), stop):
            if position >= end:  # padding: small, and none where it was left as it is
                if position in written and y + self.line + self.top <= MOST_HEIGHT - 2 * PAD:
                    if x + PADDING > self.width:
                        x, y = 0, y + self.line + GAP
                    self.places[position] = (x, y, PADDING)
                    x += PADDING + GAP
                continue
            given = position not in self.fill
            if given and final[position] in self.trace.special:
                continue
            text = self.text(final[position])
            if given and not text.strip():
                continue
            wide = min(self.width, max(14, round(self.letters.getlength(text)) + 10))
            if position == first and x:
                x, y = 0, y + self.line + GAP + 4
            if x + wide > self.width:
                x, y = 0, y + self.line + GAP
            if y + self.line + self.top > MOST_HEIGHT - 2 * PAD:
                break
            self.places[position] = (x, y, wide)
            x += wide + GAP
            if "\n" in self.trace.texts.get(final[position], ""):
                x, y = 0, y + self.line + GAP
        if any(wide == PADDING for _, _, wide in self.places.values()):
            y += self.line
            self.caption_at = y
        return y + self.line + 4

    def text(self, token: Any) -> str:
        """Of a token, as one line; of a continuous one nothing."""
        if not isinstance(token, int) or token < 0:
            return " "
        found = self.trace.texts.get(token, str(token))
        if token in self.trace.special:
            return found.strip("<|>[]")[:3]
        return found.replace("\n", "\N{PILCROW SIGN}").strip(" ") or " "

    def body(self, image: Any, pen: Any, x: int, y: int, moment: int) -> None:
        written, canvas = _written(self.trace, self.row, moment), self.trace.canvas[self.row]
        if self.caption_at is not None:
            text = self.fitted(CAPTION, self.letters)
            pen.text((x, y + self.caption_at), text, font=self.letters, fill=self.colours["soft"])
        last = max(1, len(self.trace.steps) - 1)
        for position, (left, top, wide) in self.places.items():
            box = (x + left, y + top, x + left + wide - 1, y + top + self.line - 3)
            colour = self.colours["soft"]
            if position not in self.fill:
                text = self.text(canvas[position])
            elif position in written:
                step, token = written[position]
                back = _ramp(step / last)
                pen.rounded_rectangle(box, 3, fill=back)
                if step == moment - 1:
                    pen.rounded_rectangle(box, 3, outline=self.colours["ink"], width=2)
                text = self.text(token)
                colour = (17, 17, 17) if 0.3 * back[0] + 0.59 * back[1] + 0.11 * back[2] > 140 else (255, 255, 255)
            else:
                pen.rounded_rectangle(box, 3, fill=self.colours["wait"])
                continue
            if wide == PADDING:
                continue
            while text and self.letters.getlength(text) > wide - 6:
                text = text[:-1]
            pen.text((box[0] + 5, box[1] + 2), text, font=self.letters, fill=colour)


class _Pictures(_Panel):
    """Token grids: of what is decided the picture's own pixels, where there is one, else the step's colour."""

    def lay(self) -> int:
        rows = min(self.trace.batch, MOST_PICTURES)
        self.columns = max(1, min(rows, self.width // (PICTURE_SIDE + 6)))
        self.side = min(PICTURE_SIDE, self.width)
        images = self.trace.images or []
        self.pictures = [self.enlarged(uri) for uri in images[:rows]] or [None] * rows
        return -(-rows // self.columns) * (self.side + 6)

    def body(self, image: Any, pen: Any, x: int, y: int, moment: int) -> None:
        assert self.trace.grid is not None and self.trace.cells is not None
        height, width = self.trace.grid
        last = max(1, len(self.trace.steps) - 1)
        for row, picture in enumerate(self.pictures):
            left, top = x + row % self.columns * (self.side + 6), y + row // self.columns * (self.side + 6)
            if picture is not None:
                image.paste(picture, (left, top))
            written = _written(self.trace, row, moment)
            for cell, position in enumerate(self.trace.cells[row]):
                box = (
                    left + cell % width * self.side // width,
                    top + cell // width * self.side // height,
                    left + (cell % width + 1) * self.side // width - 1,
                    top + (cell // width + 1) * self.side // height - 1,
                )
                if position not in written:
                    pen.rectangle(box, fill=self.colours["wait"])
                elif picture is None or written[position][0] == moment - 1 < len(self.trace.steps) - 1:
                    pen.rectangle(box, fill=_ramp(written[position][0] / last))


class _Latent(_Panel):
    """What a latent, or the picture of a model of scales, looks like after each step, where that was recorded, and in
    the end the picture."""

    def lay(self) -> int:
        self.rows = min(self.trace.batch, MOST_PICTURES)
        drawn = any(step.pictures for step in self.trace.steps) or self.trace.images
        self.columns = max(1, min(self.rows, self.width // (PICTURE_SIDE + 6)))
        self.side = min(PICTURE_SIDE, self.width)
        return -(-self.rows // self.columns) * (self.side + 6) if drawn else 0

    def body(self, image: Any, pen: Any, x: int, y: int, moment: int) -> None:
        over = moment >= len(self.trace.steps)
        pictures = self.trace.images if over else None
        for step in reversed(self.trace.steps[:moment]):
            pictures = pictures or step.pictures
        for row, uri in enumerate((pictures or [])[: self.rows]):
            if (drawn := self.enlarged(uri)) is not None:
                place = (x + row % self.columns * (self.side + 6), y + row // self.columns * (self.side + 6))
                image.paste(drawn, place)
