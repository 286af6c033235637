"""Figures of the retraining experiments: LDS and seconds of every method."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.retraining import DAMPINGS, READ, TOLD
from jostle.diagnose.plots import CHAIN_COLOURS

BEST, OF_THE_TRAINING = "EK-FAC, best damping", ", κ of the training"
"""Lines of which each bank has a point by another name."""

PALE = 0.35
"""How much is seen of a line that not all seeds are in: seeds are easier and harder, so it may not be compared."""


def best_ekfac(methods: Mapping[str, Any], metric: str = "per_query") -> str | None:
    """EK-FAC at whichever damping does best."""
    tried = [name for name in methods if name.startswith("EK-FAC")]
    return max(tried, key=lambda name: methods[name][metric], default=None)


def shown_methods(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a figure has room for: correlations, no dampings that were only tried, one run that is read twice, and
    what is read as each bank's training says."""
    first = list(dict.fromkeys(name for setting in settings for name in next(iter(setting.values()))["methods"]))
    told = dict.fromkeys(f"{name.partition(', covariance')[0]}{OF_THE_TRAINING}" for name in first if _told(name))
    tried = {f"EK-FAC, damping {damping:g}" for damping in DAMPINGS}
    twice = [name for name in first if name.endswith(f"no gradient, correlation{READ}")][:1]
    left_out = (", seed", "sweep", "covariance", "read at κ")
    plain = [name for name in first if name not in tried and not any(part in name for part in left_out)]
    best = [BEST] if any(name.startswith("EK-FAC") for name in first) else []
    return [*plain, *twice, *told, *best]


def row_of(name: str, bank: str, methods: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a bank says of a method, or of whichever one has that name there."""
    if name == BEST:
        name = best_ekfac(methods) or ""
    elif name.endswith(OF_THE_TRAINING):
        name = f"{name.removesuffix(OF_THE_TRAINING)}, covariance, read at κ = {TOLD}{bank}"
    return methods.get(name)


def _told(name: str) -> bool:
    """Whether scores are read at the κ that the training says."""
    return f"covariance, read at κ = {TOLD}" in name


def draw(path: Path, measured: Mapping[str, Mapping[str, Any]], xlabel: str) -> None:
    """LDS of every method against what the banks of a setting differ in; error bars over settings (seeds), or by
    bootstrap where there is one setting. Below it, seconds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    settings = list(measured.values())
    banks = list(settings[0])
    if len(settings) == len(banks) == 1:
        draw_one_bank(path, settings[0][banks[0]]["methods"])
        return
    methods = shown_methods(settings)
    figure = Figure(figsize=(16, 6), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[1, 1, 0.6])
    styles = ["-", "--", ":"]
    for index, name in enumerate(methods):
        rows = []
        for setting in settings:
            for place, bank in enumerate(banks):
                row = row_of(name, bank, setting.get(bank, {}).get("methods", {}))
                if row:
                    rows.append((place, row))
        if not rows:
            continue
        colour = "#999999" if rows[0][1]["control"] else CHAIN_COLOURS[index % len(CHAIN_COLOURS)]
        marker = "sv^D"[index % 4] if rows[0][1]["control"] else "o"
        style = styles[index // len(CHAIN_COLOURS) % len(styles)]
        places = sorted({place for place, _ in rows})
        seeds = max(sum(at == place for at, _ in rows) for place in places)
        label = name if seeds == len(settings) else f"{name} ({seeds} of {len(settings)})"
        for panel, metric in zip(panels, ("per_query", "per_subset"), strict=False):
            values = [[row[metric] for at, row in rows if at == place] for place in places]
            alone = [next(row[f"{metric}_error"] for at, row in rows if at == place) for place in places]
            errors = [
                np.std(group, ddof=1) / np.sqrt(len(group)) if len(group) > 1 else one
                for group, one in zip(values, alone, strict=True)
            ]
            panel.errorbar(
                places, [np.mean(group) for group in values], yerr=errors, label=label, color=colour, marker=marker,
                linestyle=style, capsize=3, markersize=4, alpha=1 if seeds == len(settings) else PALE,
            )  # fmt: skip
        seconds = [row["seconds"] for _, row in rows if "seconds" in row]
        if seconds and name != BEST:  # which takes another one's factors
            panels[2].barh(name, np.median(seconds), color=colour)  # of seeds, some beside other work
    for panel, title in zip(panels, ("LDS per query", "LDS per subset (the paper's)"), strict=False):
        panel.set_xticks(range(len(banks)), banks)
        panel.set(xlabel=xlabel, title=f"{title}, ± standard error")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.grid(alpha=0.3)
    panels[2].set(xlabel="seconds, all included", title="time")
    panels[2].set_xscale("log")
    panels[2].xaxis.set(
        major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=StrMethodFormatter("{x:g}"),
        minor_formatter=NullFormatter(),
    )  # fmt: skip
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_one_bank(path: Path, methods: Mapping[str, Any]) -> None:
    """LDS and seconds of every method, one below another; runs that differ in their seed as their mean."""
    from matplotlib.figure import Figure

    grouped: dict[str, list[Mapping[str, Any]]] = {}
    shown = {name: row for name, row in methods.items() if _told(name) or not re.search("sweep|read at κ", name)}
    for name, row in shown.items():
        grouped.setdefault(re.sub(r", seed \d+", "", name), []).append(row)
    names = sorted(grouped, key=lambda name: np.mean([row["per_query"] for row in grouped[name]]))
    figure = Figure(figsize=(14, 1.6 + 0.28 * len(names)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=[1, 1, 0.6])
    for place, name in enumerate(names):
        rows = grouped[name]
        kind = "control" if rows[0]["control"] else name.split(",")[0].split()[0]
        colour = {"control": "#999999", "BIF": "#0072B2", "EK-FAC": "#D55E00"}.get(kind, "#009E73")
        for panel, metric in zip(panels, ("per_query", "per_subset"), strict=False):
            value, error = (np.mean([row[key] for row in rows]) for key in (metric, f"{metric}_error"))
            panel.errorbar(value, place, xerr=error, fmt="o", color=colour, capsize=3, markersize=5)
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        if seconds:
            panels[2].barh(place, np.median(seconds), color=colour, height=0.6)  # some took a machine's first time
    short = [re.sub(f", covariance, read at κ = {TOLD}.*", OF_THE_TRAINING, name) for name in names]
    seeds = [f" ({len(grouped[name])} seeds)" if grouped[name][1:] else "" for name in names]
    panels[0].set_yticks(range(len(names)), [f"{name}{told}" for name, told in zip(short, seeds, strict=True)])
    for panel, title in zip(panels, ("LDS per query", "LDS per subset (the paper's)"), strict=False):
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set(title=title, xlabel="± standard error")
    panels[2].set(xlabel="seconds, all included", title="time")
    for panel in panels:
        panel.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
