"""Pictures of a run's diagnostics."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from jostle.diagnose import Sample, effective_sizes, half_scores, moving
from jostle.errors import InputError, require_folder
from jostle.estimate import FEWEST_DRAWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")

# Okabe and Ito's palette, without its yellow, which is too light on white; failed chains and w* have no colour of it.
CHAIN_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
LEVEL_COLOURS = {"good": "#009E73", "doubtful": "#B07A00", "unreliable": "#D55E00"}
BLUE, GREY = "#0072B2", "dimgray"

LARGEST = 1e30
"""Losses beyond this are on their way out of the finite numbers, and no axis needs to reach them."""

SHOWN_CHAINS = 12
"""More lines than this hide each other."""


def check(path: str | Path) -> None:
    """Refuse, before any work is done for it, a picture that cannot be drawn."""
    if Path(path).suffix not in FORMATS:
        raise InputError("plot", got=Path(path).name, expected=f"a name ending in {', '.join(FORMATS)}")
    require_folder("plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plot",
            got="no matplotlib",
            expected="the packages of the extra 'plots'",
            fix="pip install 'jostle[plots]'",
        )


def draw(found: Mapping[str, Any], sample: Sample, config: Mapping[str, Any], path: Path) -> None:
    """Draw losses along the chains, their autocorrelation, effective draws by example, and scores from two halves."""
    from matplotlib.figure import Figure

    # `Figure` itself, without pyplot: no window, no global state.
    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[1.1, 1])
    verdict = found["verdict"]
    figure.suptitle(_wrapped(verdict["summary"]), color=LEVEL_COLOURS[verdict["level"]], fontsize=12, fontweight="bold")
    _losses(figure.add_subplot(grid[0, :]), sample, config, found)
    panels = [figure.add_subplot(grid[1, column]) for column in range(3)]
    if len(sample.chains) and sample.train.shape[1] >= FEWEST_DRAWS:
        _autocorrelation(panels[0], sample, config, found)
        _effective(panels[1], sample, found)
        _halves(panels[2], sample, found)
    else:
        for axes in panels:
            axes.set_axis_off()
        reason = "too few draws to show more" if len(sample.chains) else "no chain is left of which to show more"
        panels[1].text(0.5, 0.5, reason, ha="center", va="center", color=GREY)
    figure.savefig(path, dpi=120)


def _wrapped(text: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, 115))


def _losses(axes: Axes, sample: Sample, config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    steps = config["burn_in"] + config["thin"] * np.arange(config["draws"])
    failed = {failure["chain"]: failure for failure in found["failed_chains"]}
    picked = np.unique(np.linspace(0, len(sample.mean_loss) - 1, SHOWN_CHAINS).astype(int))
    marked = [*failed][:SHOWN_CHAINS] + found.get("runaway", {}).get("chains", [])[:SHOWN_CHAINS]
    shown = sorted({*picked.tolist(), *marked})
    for row, chain in enumerate(shown):
        lost = chain in failed
        finite = np.abs(sample.mean_loss[chain]) < LARGEST
        colour = "black" if lost else CHAIN_COLOURS[row % len(CHAIN_COLOURS)]
        label = f"chain {chain}" + (f", failed at step {failed[chain]['step']}" if lost else "")
        axes.plot(
            steps[finite], sample.mean_loss[chain][finite], color=colour, linewidth=1.0, alpha=0.9, label=label,
            linestyle="--" if lost else "-",
        )  # fmt: skip
    axes.axhline(
        sample.center_loss, color="black", linestyle=":", linewidth=1.5, label=f"at w*: {sample.center_loss:.4g}"
    )
    values = sample.mean_loss[np.abs(sample.mean_loss) < LARGEST]
    above = values - sample.center_loss
    # A chain that explodes would press everything else flat.
    if values.size and above.max() > 100 * max(np.median(np.abs(above)), 1e-12) and values.min() > 0:
        axes.set_yscale("log")
    if not values.size:
        axes.set(xlim=(0, steps[-1]), yticks=[sample.center_loss])
        axes.text(0.5, 0.6, "no chain lived to its first draw", ha="center", color=GREY, transform=axes.transAxes)
    more = len(sample.mean_loss) - len(shown)
    axes.set_title(
        "mean training loss along the chains" + (f" ({len(shown)} of {len(sample.mean_loss)} shown)" if more else "")
    )
    axes.set(xlabel="step", ylabel="mean loss (nats)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    _plain(axes)


def autocorrelation_bands(sample: Sample) -> Float[np.ndarray, "quantile lag"] | None:
    """Return the autocorrelation of losses at every lag: its 10th, 50th and 90th percentile over examples."""
    from arviz_stats.base.array import array_stats

    series = moving(sample.train)[:, :, :64]
    if not series.size:
        return None
    lags = min(series.shape[1] // 2, 60)
    # Of each chain around its own mean, then averaged over chains: bands are over examples.
    curves = np.asarray(array_stats.autocorr(series, axis=1))[:, : lags + 1].mean(0)
    return np.quantile(curves, (0.1, 0.5, 0.9), axis=1)


def _autocorrelation(axes: Axes, sample: Sample, config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    bands = autocorrelation_bands(sample)
    if bands is None:
        return
    low, middle, high = bands
    lags = len(middle) - 1
    axes.fill_between(np.arange(lags + 1), low, high, color=BLUE, alpha=0.25, linewidth=0, label="80 % of the examples")
    axes.plot(middle, color=BLUE, label="median")
    axes.axhline(0, color="black", linewidth=0.8)
    time = found["autocorrelation_time"]
    _title(axes, "autocorrelation of losses", f"{time:.1f} draws for each effective one" if time else "")
    thin = config["thin"]
    axes.set(
        xlabel=f"lag in draws ({thin} step{'s' if thin > 1 else ''} each)", ylabel="autocorrelation", ylim=(-0.35, 1.05)
    )
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)


def _effective(axes: Axes, sample: Sample, found: Mapping[str, Any]) -> None:
    series = moving(sample.train)
    if not series.size:
        return
    total = series.shape[0] * series.shape[1]
    sizes = np.minimum(effective_sizes(series, "bulk"), 1.2 * total)
    axes.hist(sizes, bins=30, range=(0, 1.2 * total), color=BLUE, edgecolor="white", linewidth=0.5)
    axes.axvline(total, color="black", linestyle=":", linewidth=1.5)
    told = f"median {np.median(sizes):.0f}; dotted: all {total} draws"
    whole = found["effective_draws"]
    if whole is not None:  # it is of the products that scores average, too
        axes.axvline(whole, color="black", linewidth=1.5)
        told += f"\nline: {whole:.0f}, the verdict's effective draws"
    _title(axes, "effective draws by training example", told)
    axes.set(xlabel="bulk ESS", ylabel="examples")
    _plain(axes)


def _halves(axes: Axes, sample: Sample, found: Mapping[str, Any]) -> None:
    scores = half_scores(sample)["halves"]
    first, second = (half.ravel() for half in scores)
    picked = np.unique(np.linspace(0, len(first) - 1, 4000).astype(int))
    axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
    axes.scatter(first[picked], second[picked], s=6, color=BLUE, alpha=0.35, linewidth=0, rasterized=True)
    reach = 1.05 * max(np.abs(first).max(), np.abs(second).max(), 0.05)
    rank = found["agreement"]["halves"]["spearman"]
    _title(axes, "scores from halves of the draws", "" if rank is None else f"Spearman {rank:.2f}")
    axes.set(
        xlabel="posterior correlation, first half", ylabel="last half", xlim=(-reach, reach), ylim=(-reach, reach),
        aspect="equal",
    )  # fmt: skip
    _plain(axes)


def _title(axes: Axes, title: str, number: str) -> None:
    axes.set_title(f"{title}\n{number}" if number else title, fontsize=11)


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
