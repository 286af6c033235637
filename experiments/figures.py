"""Figures of the retraining experiments: LDS and seconds of every method."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.retraining import DAMPINGS, READ, TOLD

BEST, OF_THE_TRAINING = "EK-FAC, best damping", ", κ of the training"
"""Lines of which each bank has a point by another name."""

AT_ZERO = {"gradient cosine": "correlation", "GradSim": "covariance"}
"""What the first order is where nothing is held."""

REFERENCE = "EK-FAC, default damping"
"""What all others are compared with, on the same seeds."""

COLOURS = {
    "BIF": ("plasma", 0.0, 0.55),
    "EK-FAC": ("Oranges", 0.5, 0.8),
    "gradient": ("Greens", 0.5, 0.8),
    "GradSim": ("GnBu", 0.5, 0.75),
    "first": ("Greys", 0.7, 1.0),
    "TRAK": ("Wistia", 0.5, 0.9),
}
"""Of methods, by the first word of their names: a part of one of matplotlib's maps."""
CONTROL, OTHER = "#999999", ("Reds", 0.6, 0.9)
STYLES: Sequence[Any] = ("-", "--", ":", "-.")
MARKERS = "os^DvPX"
LOWEST = -0.1
"""What is farther below EK-FAC is not compared with it at a glance, and would press all others together."""


def best_ekfac(methods: Mapping[str, Any], metric: str = "per_query") -> str | None:
    """EK-FAC at whichever damping does best."""
    tried = [name for name in methods if name.startswith("EK-FAC")]
    return max(tried, key=lambda name: methods[name][metric], default=None)


def shown_methods(settings: Sequence[Mapping[str, Any]], leave_out: str = "(?!)") -> list[str]:
    """What a figure has room for: correlations, no dampings that were only tried, one run that is read twice, and
    what is read as each bank's training says; nothing whose name has in it what matches ``leave_out``.

    Of several seeds, what was measured on all of them: seeds are easier and harder, so that others cannot be compared.
    Of a family that has none such, all its lines.
    """
    first = list(dict.fromkeys(name for setting in settings for name in next(iter(setting.values()))["methods"]))
    told = dict.fromkeys(
        f"{name.partition(', correlation')[0]}{OF_THE_TRAINING}" for name in first if _told(name, "correlation")
    )
    tried = {f"EK-FAC, damping {damping:g}" for damping in DAMPINGS}
    twice = [name for name in first if name.endswith(f"no gradient, correlation{READ}")][:1]
    left_out = (", seed", "sweep", "covariance", "read at κ")
    plain = [name for name in first if name not in tried and not any(part in name for part in left_out)]
    best = [BEST] if any(name.startswith("EK-FAC") for name in first) else []
    chosen = [name for name in (*plain, *twice, *told, *best) if not re.search(leave_out, name)]
    everywhere = [name for name in chosen if _count(name, settings) == len(settings)]
    families = {_family(name) for name in everywhere}
    return [name for name in chosen if name in everywhere or _family(name) not in families]


def _count(name: str, settings: Sequence[Mapping[str, Any]]) -> int:
    """On how many seeds it was measured."""
    return sum(
        any(row_of(name, bank, found["methods"]) is not None for bank, found in setting.items()) for setting in settings
    )


def _family(name: str) -> str:
    return re.split("[ ,]", name)[0]


def looks(methods: Sequence[str], controls: Collection[str]) -> dict[str, dict[str, Any]]:
    """How each is drawn: a family has its colours, and its members differ in them, and in lines and marks."""
    from matplotlib import colormaps

    families: dict[str, list[str]] = {}
    for name in methods:
        families.setdefault("control" if name in controls else _family(name), []).append(name)
    found = {}
    for family, members in families.items():
        colours, first, last = COLOURS.get(family, OTHER)
        for number, name in enumerate(members):
            place = first + (last - first) * number / max(1, len(members) - 1)
            found[name] = {
                "color": CONTROL if family == "control" else colormaps[colours](place),
                "marker": MARKERS[number % len(MARKERS)], "linestyle": STYLES[number % len(STYLES)],
            }  # fmt: skip
    return {name: found[name] for name in methods}


def row_of(name: str, bank: str, methods: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a bank says of a method, or of whichever one has that name there."""
    if name == BEST:
        name = best_ekfac(methods) or ""
    elif name.endswith(OF_THE_TRAINING):
        name = f"{name.removesuffix(OF_THE_TRAINING)}, correlation, read at κ = {TOLD}{bank}"
    return methods.get(name) or _at_zero(name, methods)


def _at_zero(name: str, methods: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The same scores as the first order has them, which took another time."""
    kind, _, unit = name.partition(", ")
    pattern = f"first order, [0-9.]+ labels?{unit and ', '}{unit}, {AT_ZERO.get(kind)}, read at κ = 0"
    found = (row for other, row in methods.items() if kind in AT_ZERO and re.fullmatch(pattern, other))
    return next(({key: value for key, value in row.items() if key != "seconds"} for row in found), None)


def _told(name: str, kind: str) -> bool:
    """Whether scores of that kind are read at the κ that the training says."""
    return f"{kind}, read at κ = {TOLD}" in name


def draw(
    path: Path,
    measured: Mapping[str, Mapping[str, Any]],
    xlabel: str,
    among: Sequence[Mapping[str, Any]] = (),
    leave_out: str = "(?!)",
) -> None:
    """LDS of every method against what the banks of a setting differ in, and how far from EK-FAC as it ships; error
    bars over settings (seeds), or by bootstrap where there is one setting. Beside it, seconds.

    Of one seed ``among`` others, what is shown of all of them; see `shown_methods` for what to ``leave_out``.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    settings = list(measured.values())
    banks = list(settings[0])
    if len(settings) == len(banks) == 1:
        draw_one_bank(path, settings[0][banks[0]]["methods"])
        return
    figure = Figure(figsize=(19, 7), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=[1, 1, 1, 0.7])
    chosen = shown_methods(among or settings, leave_out)
    rows_of_all = [row for setting in settings for found in setting.values() for row in found["methods"].items()]
    controls = {name for name, row in rows_of_all if row["control"]}
    for name, look in looks(chosen, controls).items():
        rows, beside = (
            [[row_of(of, bank, setting.get(bank, {}).get("methods", {})) for bank in banks] for setting in settings]
            for of in (name, REFERENCE)
        )
        measured_on = _count(name, settings)
        if not measured_on:
            continue
        look |= {"capsize": 3, "markersize": 4}
        look["label"] = name if measured_on == len(settings) else f"{name} ({measured_on} of {len(settings)})"
        for panel, metric in ((panels[0], "per_query"), (panels[2], "per_subset")):
            _line(panel, [_over_seeds(column, metric) for column in zip(*rows, strict=True)], look)
        if name != REFERENCE and name not in controls:
            pairs = zip(zip(*rows, strict=True), zip(*beside, strict=True), strict=True)
            _line(panels[1], [_difference(ours, theirs) for ours, theirs in pairs], look)
        seconds = [row["seconds"] for line in rows for row in line if row and "seconds" in row]
        if name == REFERENCE:
            seconds = [taken for setting in settings for found in setting.values() if (taken := _with_the_fit(found))]
        if seconds and (name == REFERENCE or not name.startswith("EK-FAC")):
            panels[3].barh(name, np.median(seconds), color=look["color"])  # of seeds, some beside other work
    titles = ("LDS per query", f"less {REFERENCE}", "LDS per subset (the paper's; mind the controls)")
    for panel, title in zip(panels, titles, strict=False):
        panel.set_xticks(range(len(banks)), banks)
        panel.set(xlabel=xlabel)
        panel.set_title(title, fontsize=10)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.grid(alpha=0.3)
    panels[1].set_ylim(bottom=max(panels[1].get_ylim()[0], LOWEST))
    figure.suptitle("± standard error, where it is known", fontsize=9)
    panels[3].set(xlabel="seconds (EK-FAC: with its fit)")
    panels[3].set_title("time", fontsize=10)
    panels[3].set_xscale("log")
    panels[3].set_xlim(left=min([1.0, *(bar.get_width() / 2 for bar in panels[3].patches)]))  # all begin at one place
    panels[3].tick_params("y", labelsize=8)
    panels[3].xaxis.set(
        major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=StrMethodFormatter("{x:g}"),
        minor_formatter=NullFormatter(),
    )  # fmt: skip
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


PLACE_LINES = {
    "first order, covariances": (f"first order, [0-9.]+ labels?, covariance{OF_THE_TRAINING}", "black"),
    "first order, correlations": (f"first order, [0-9.]+ labels?, correlation{OF_THE_TRAINING}", "0.6"),
    "EK-FAC, best damping": ("EK-FAC, [^,]*", "tab:orange"),
}
"""Their names, and how they are drawn."""


def draw_places(path: Path, panels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], xlabel: str) -> None:
    """LDS of scores that are taken at several places, a panel for each data set, a style of line for each place.

    Args:
        path: where the figure goes.
        panels: settings by title and place, one for each seed; of all places the same seeds.
        xlabel: what the banks of a setting differ in.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(1 + 4 * len(panels), 4.6), layout="constrained")
    places = list(next(iter(panels.values())))
    styles = {place: STYLES[number % len(STYLES)] for number, place in enumerate(places)}
    for axes, (title, by_place) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        banks = list(by_place[places[0]][0])
        # What was asked at the first place: elsewhere more was tried.
        first = [{name for one in by_place[places[0]] for name in _rows(one, bank)} for bank in banks]
        for place, (pattern, colour) in itertools.product(places, PLACE_LINES.values()):
            columns = [
                [_best(pattern, bank, _rows(one, bank), asked) for one in by_place[place]]
                for bank, asked in zip(banks, first, strict=True)
            ]
            look = {"color": colour, "linestyle": styles[place], "marker": "o", "markersize": 3, "capsize": 2}
            _line(axes, [_over_seeds(column, "per_query") for column in columns], look)
        axes.set_xticks(range(len(banks)), banks)
        axes.set_yscale("log")
        axes.yaxis.set(
            major_locator=LogLocator(subs=(1, 2, 3, 5, 7)), major_formatter=StrMethodFormatter("{x:g}"),
            minor_formatter=NullFormatter(),
        )  # fmt: skip
        axes.grid(alpha=0.3, which="both")
        axes.set(xlabel=xlabel)
        axes.set_title(title, fontsize=10)
    figure.axes[0].set_ylabel("LDS per query, ± standard error")
    lines = {name: Line2D([], [], color=colour) for name, (_, colour) in PLACE_LINES.items()}
    lines |= {place: Line2D([], [], color="0.3", linestyle=style) for place, style in styles.items()}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _rows(setting: Mapping[str, Any], bank: str) -> Mapping[str, Any]:
    return setting.get(bank, {}).get("methods", {})


def _best(pattern: str, bank: str, methods: Mapping[str, Any], among: Collection[str]) -> Row:
    """The row of most LDS of those of such a name."""
    pattern = pattern.replace(OF_THE_TRAINING, f", read at κ = {TOLD}{re.escape(bank)}")
    rows = [row for name, row in methods.items() if name in among and re.fullmatch(pattern, name)]
    return max(rows, key=lambda row: row["per_query"], default=None)


def _with_the_fit(bank: Mapping[str, Any]) -> float:
    """EK-FAC's seconds at whichever damping was first: the others have its factors at hand."""
    rows = [row for name, row in bank["methods"].items() if name.startswith("EK-FAC")]
    return max((row.get("seconds", 0.0) for row in rows), default=0.0)


Row = Mapping[str, Any] | None


def _over_seeds(rows: Sequence[Row], metric: str) -> tuple[float, float] | None:
    """Their mean and its error; of one, the error that it has by itself."""
    there = [row for row in rows if row]
    if not there:
        return None
    return _mean([row[metric] for row in there]) or (there[0][metric], there[0][f"{metric}_error"])


def _difference(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[float, float] | None:
    """Of the same seeds; of one, resampled alike, or its error is not known."""
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one and other]
    if not pairs:
        return None
    differences = [one["per_query"] - other["per_query"] for one, other in pairs]
    mine, others = (row.get("per_query_replicates", []) for row in pairs[0])
    alike = len(mine) == len(others) > 0
    return _mean(differences) or (differences[0], float(np.subtract(mine, others).std()) if alike else np.nan)


def _mean(values: Sequence[float]) -> tuple[float, float] | None:
    """With its error, which a single one does not tell."""
    return (float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))) if values[1:] else None


def _line(panel: Any, points: Sequence[tuple[float, float] | None], look: Mapping[str, Any]) -> None:
    there = [(place, *point) for place, point in enumerate(points) if point]
    if there:
        places, values, errors = zip(*there, strict=True)
        panel.errorbar(places, values, yerr=errors, **look)


def draw_one_bank(path: Path, methods: Mapping[str, Any]) -> None:
    """LDS and seconds of every method, one below another; runs that differ in their seed as their mean."""
    from matplotlib.figure import Figure

    grouped: dict[str, list[Mapping[str, Any]]] = {}
    shown = {
        name: row
        for name, row in methods.items()
        if _told(name, "covariance") or not re.search("sweep|read at κ", name)
    }
    for name, row in shown.items():
        grouped.setdefault(re.sub(r", seed \d+", "", name), []).append(row)
    names = sorted(grouped, key=lambda name: np.mean([row["per_query"] for row in grouped[name]]))
    figure = Figure(figsize=(14, 1.6 + 0.28 * len(names)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=[1, 1, 0.6])
    styles = looks(names, {name for name in names if grouped[name][0]["control"]})
    for place, (name, look) in enumerate(styles.items()):
        rows, colour = grouped[name], look["color"]
        for panel, metric in zip(panels, ("per_query", "per_subset"), strict=False):
            value, error = (np.mean([row[key] for row in rows]) for key in (metric, f"{metric}_error"))
            panel.errorbar(value, place, xerr=error, fmt="o", color=colour, capsize=3, markersize=5)
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        if seconds:
            panels[2].barh(place, np.median(seconds), color=colour, height=0.6)  # some took a machine's first time
    short = [re.sub(f", covariance, read at κ = {TOLD}.*", OF_THE_TRAINING, name) for name in names]
    seeds = [f" ({len(grouped[name])} seeds)" if grouped[name][1:] else "" for name in names]
    panels[0].set_yticks(range(len(names)), [f"{name}{told}" for name, told in zip(short, seeds, strict=True)])
    for panel, title in zip(panels, ("LDS per query", "LDS per subset (the paper's; mind the controls)"), strict=False):
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set(title=title, xlabel="± standard error")
    panels[2].set(xlabel="seconds, all included", title="time")
    for panel in panels:
        panel.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
