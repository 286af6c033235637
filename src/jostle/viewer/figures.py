"""Figures for a paper: a query and training texts with coloured tokens, or a query and its training images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jostle.diagnose.plots import LEVEL_COLOURS, check
from jostle.errors import InputError
from jostle.viewer.reading import Reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELPS, HARMS = np.array((31, 119, 180)) / 255, np.array((217, 95, 2)) / 255
FULL = 0.62
"""How much of its colour the strongest token has: black text stays readable on it."""

WIDTH, MARGIN = 7.0, 0.1
"""Inches."""

FONT, LINE = 9.0, 0.21
"""Points, and inches from a line to the next."""


def draw_figure(reading: Reading, path: Path, *, query: int, train: Sequence[int], token: int | None, k: int) -> None:
    """Draw one query with some training examples, the ``k`` most helpful where none are named.

    Raises:
        InputError: no such example or token, or matplotlib is missing.
    """
    check(path)
    if token is not None and not reading.columns("query").per_token:
        raise InputError("token", got=token, expected="none: these queries have one loss each, not one a token")
    for index in train:
        reading.sample_of("train", index)
    span = None if token is None else (token, token)
    by_example, by_token = reading.correlations("query", query, span)
    if reading.per_token and by_token is not None:
        chosen = list(train) or _strongest(by_example, k)
        _draw_texts(reading, path, query, span, chosen, by_example, by_token)
    else:
        _draw_images(reading, path, query, train, by_example, k)


def _draw_texts(
    reading: Reading,
    path: Path,
    query: int,
    span: tuple[int, int] | None,
    chosen: Sequence[int],
    by_example: np.ndarray,
    by_token: np.ndarray,
) -> None:
    reach = max(float(np.quantile(np.abs(by_token), 0.995, method="lower")), 1e-12)
    asked = reading.examples["query"][query]
    marked = set(asked["positions"]) if span is None else set(range(span[0], span[1] + 1))
    blocks: list[tuple[str, list[str], dict[int, float], set[int]]] = [(f"query {query}", asked["tokens"], {}, marked)]
    for index in chosen:
        example, columns = reading.examples["train"][index], reading.columns("train").of(index)
        values = dict(zip(example["positions"], by_token[columns].tolist(), strict=True))
        blocks.append((f"train {index}:  {by_example[index]:+z.2f}", example["tokens"], values, set()))
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(WIDTH, 1), dpi=400)  # fine enough that letters are measured to a hair
    laid_out = [_lines(figure, tokens) for _, tokens, _, _ in blocks]
    height = sum(len(lines) + 1.35 for lines in laid_out) * LINE + 3.2 * LINE
    figure.set_size_inches(WIDTH, height)
    # Inches from the lower left corner, whatever the height came to.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, height))
    axes.set_axis_off()
    y = height - LINE
    for (title, tokens, values, underlined), lines in zip(blocks, laid_out, strict=True):
        axes.text(MARGIN, y, title, fontsize=FONT, fontweight="bold")
        y -= LINE
        for line in lines:
            for word in line:
                value, mark = values.get(word.position), word.position in underlined
                if value is not None:
                    strength = FULL * min(1.0, abs(value) / reach)
                    colour = 1 - (1 - (HELPS if value > 0 else HARMS)) * strength
                    box = Rectangle((word.x, y - 0.28 * LINE), word.width, 0.95 * LINE, facecolor=tuple(colour))
                    axes.add_patch(box)
                if mark:
                    axes.plot((word.x + word.lead, word.x + word.width), (y - 0.2 * LINE,) * 2, color="black")
                colour = "dimgray" if value is None and not mark else "black"
                text = _drawn(tokens[word.position]).strip()
                axes.text(word.x + word.lead, y, text, fontsize=FONT, color=colour, parse_math=False)
            y -= LINE
        y -= 0.35 * LINE
    note = f"{_what(reading)}, full colour at ±{reach:.2f}: blue, the losses move together (helps); orange, harms"
    axes.text(MARGIN, 1.5 * LINE, note, fontsize=FONT - 1.5, color="dimgray")
    verdict, colour = _verdict(reading, WIDTH)
    axes.text(MARGIN, 0.5 * LINE, verdict, fontsize=FONT - 1.5, color=colour)
    figure.savefig(path, dpi=200)


def _strongest(correlations: np.ndarray, k: int) -> list[int]:
    """The ``k`` largest correlations, but for those that are shown as 0 or have the other sign."""
    return [index for index in np.argsort(-correlations, kind="stable")[:k].tolist() if correlations[index] >= 0.005]


def _what(reading: Reading) -> str:
    """What the numbers are, and at which κ they were read where that is not as the draws were sampled."""
    return "posterior correlation" + (f" at κ = {reading.kappa:g}" if reading.kappa else "")


def _verdict(reading: Reading, width: float) -> tuple[str, str]:
    """What the diagnostics say of the run, on one line of so many inches, and its colour."""
    if reading.diagnostics is None:
        return "too few draws yet to judge", "dimgray"
    verdict = reading.diagnostics["verdict"]
    return shorten(verdict["summary"], int(16 * width), placeholder=" …"), LEVEL_COLOURS[verdict["level"]]


class Placed(NamedTuple):
    """Where a token stands on its line, in inches; ``lead`` is the space before its first letter."""

    position: int
    x: float
    lead: float
    width: float


def _lines(figure: Figure, tokens: Sequence[str]) -> list[list[Placed]]:
    """Break a text into lines between tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.font_manager import FontProperties

    renderer: Any = FigureCanvasAgg(figure).get_renderer()
    font = FontProperties(size=FONT)

    def inches(text: str) -> float:
        return renderer.get_text_width_height_descent(text, font, False)[0] / renderer.dpi

    # A space alone has no ink, and so no width of its own.
    space = inches("n n") - inches("nn")
    lines: list[list[Placed]] = [[]]
    x = MARGIN
    for position, token in enumerate(tokens):
        text = _drawn(token)
        ink = inches(text.strip()) if text.strip() else 0.0
        lead = space * (len(text) - len(text.lstrip()))
        width = ink + space * (len(text) - len(text.strip()))
        if x + width > WIDTH - MARGIN and lines[-1]:
            lines.append([])
            x = MARGIN
        lines[-1].append(Placed(position, x, lead if text.strip() else 0.0, width))
        x += width
    return lines


def _drawn(token: str) -> str:
    return token.replace("\r", "").replace("\n", "↵").replace("\t", " ")


def _draw_images(
    reading: Reading, path: Path, query: int, train: Sequence[int], by_example: np.ndarray, k: int
) -> None:
    """The paper's figure: the query, and its most helpful and most harmful training images, or those that are named."""
    from matplotlib.figure import Figure

    if reading.images["train"] is None or reading.images["query"] is None:
        raise InputError(
            "report",
            got="a run without texts or images",
            expected="one that was given some to show",
            fix="write an .html report, or pass examples= to attribute",
        )
    ranked = [("most helpful", _strongest(by_example, k)), ("most harmful", _strongest(-by_example, k))]
    rows = [("", list(train))] if train else [(title, row) for title, row in ranked if row] or [("", [])]
    wide = max(len(row) for _, row in rows)
    size = (0.85 * (wide + 1.3), 1.15 * len(rows) + 0.45 + (LINE if reading.kappa else 0.0))
    figure = Figure(figsize=size, layout="constrained")
    if reading.kappa:
        figure.suptitle(_what(reading), fontsize=FONT - 1.5, color="dimgray")
    verdict, level = _verdict(reading, size[0])
    figure.supxlabel(verdict, fontsize=FONT - 1.5, color=level)
    panels = figure.subplots(len(rows), wide + 1, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    _image(panels[0, 0], reading, "query", query, "query", (0.0, 0.0, 0.0))
    for line, (title, row) in zip(panels, rows, strict=True):
        for axes, index in zip(line[1:], row, strict=False):
            value = float(by_example[index])
            colour = tuple((HELPS if value > 0 else HARMS).tolist())
            _image(axes, reading, "train", index, f"{value:+z.2f}".replace("-", "−"), colour)
        if row and title:
            first = by_example[row[0]] > 0
            line[1].set_title(title, fontsize=FONT, loc="left", color=tuple((HELPS if first else HARMS).tolist()))
    figure.savefig(path, dpi=200)


def _image(axes: Axes, reading: Reading, name: str, index: int, caption: str, colour: tuple[float, ...]) -> None:
    images = reading.images[name]
    assert images is not None
    pixels = np.asarray(images[index])
    axes.set_axis_on()
    axes.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    label = reading.examples[name][index]["fields"].get("label")
    axes.set_xlabel(caption if label is None else f"{label}:  {caption}", fontsize=FONT, color=colour)
    for spine in axes.spines.values():
        spine.set(color=colour, linewidth=1.2)
