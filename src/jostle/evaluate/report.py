"""Methods beside each other on one bank, with the controls: as a table and as a figure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jostle.attributors import bm25, query_difficulty, random_scores, subset_size
from jostle.conditioning import Kappa
from jostle.diagnose import plots
from jostle.errors import EstimateWarning, InputError, warn
from jostle.evaluate.bank import Bank, require_bank
from jostle.evaluate.inputs import Given, named_scores
from jostle.evaluate.metrics import (
    BOOTSTRAP,
    CONTROL_MARK,
    NORMAL_95,
    Detection,
    Measured,
    Removal,
    aligned,
    lds_of,
    mislabel_detection,
    predicted_losses,
    real_losses,
    removal,
    repeatability,
    self_influence,
    slopes_of,
)
from jostle.evaluate.subsets import DROPS
from jostle.runs.run import Run, load
from jostle.scores import Scores

DODGED_WIDTH, LARGEST_DODGE = 0.5, 0.08
"""How much of the way from one number to the next all methods take, and one at most."""
METHOD_COLOUR, CONTROL_COLOUR = plots.BLUE, "#999999"

SLOPES = "slope", "pooled slope"


@dataclass(frozen=True)
class Row:
    """One method on one bank.

    Attributes:
        method: its name.
        control: whether it is one of the controls, which know nothing of training.
        per_query: the LDS per query over subsets: the headline.
        per_subset: the LDS of the paper's equation, per subset over queries; None for "all but one", where
            a correlation over queries is of no single example.
        seconds: what the scores took, where that is known.
        mislabels: what self-influence finds, where mislabelled examples were given.
        more: by how much its headline is above that of the method it is compared with, where there is one.
        slopes: of drops, how much a loss really changes for each unit of predicted change: the median over queries,
            and pooled (`jostle.evaluate.slope`); None for controls, which have no unit.
    """

    method: str
    control: bool
    per_query: Measured
    per_subset: Measured | None
    seconds: float | None = None
    mislabels: Detection | None = None
    more: Measured | None = None
    slopes: tuple[Measured, Measured] | None = None

    @property
    def name(self) -> str:
        """The method, marked where it is a control."""
        return self.method + CONTROL_MARK if self.control else self.method

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return {
            "method": self.method,
            "control": self.control,
            "per_query": self.per_query.to_dict(),
            "per_subset": None if self.per_subset is None else self.per_subset.to_dict(),
            "seconds": self.seconds,
            "mislabels": None if self.mislabels is None else self.mislabels.auroc.to_dict(),
            "more": None if self.more is None else self.more.to_dict(),
            "slopes": None
            if self.slopes is None
            else dict(zip(SLOPES, map(Measured.to_dict, self.slopes), strict=True)),
        }


@dataclass(frozen=True)
class Report:
    """All methods on one bank.

    Attributes:
        rows: methods, then controls.
        kind: of the bank's subsets.
        summary: of the bank, with its failures.
        repeatability: of the retrained losses themselves; see `jostle.evaluate.repeatability`.
        removed: of a bank of removals, what they did.
        remarks: what looks like a mistake.
        against: the method that the others are compared with.
    """

    rows: list[Row]
    kind: str
    summary: Mapping[str, Any]
    repeatability: float | None = None
    removed: Removal | None = None
    remarks: Sequence[str] = ()
    against: str | None = None

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self.about), *map(aligned, self.tables), "\n".join(self.notes)])

    @property
    def about(self) -> list[str]:
        """Of what bank it is."""
        text = [str(self.summary["text"])]
        if self.repeatability is not None:
            text.append(f"repeatability of their losses: {self.repeatability:.2f}")
        return text

    @property
    def headline(self) -> str:
        """What the number by which methods are compared is called."""
        own = "leave-one-out" if self.kind == "leave-one-out" else "LDS per query"
        return own if self.summary.get("predicted") is None else f"{own}, of predicted drops"

    @property
    def notes(self) -> list[str]:
        """How its tables are read."""
        headline = "per query is the headline; per subset is the paper's, where knowing how hard a query is suffices"
        read = ["± is a 95 % interval", *([headline] if self.kind == "random" else [])]
        if self.kind == DROPS:
            read.append("slope: real on predicted change, the median over queries and pooled; 1 for scores in nats")
        if self.against is not None:
            what = "correlation" if self.kind == "leave-one-out" else self.headline
            read.append(f"difference: how far the {what} is above that of {self.against}, on the same resamples")
        return [*read, *self.remarks]

    @property
    def tables(self) -> list[list[list[str]]]:
        """What is printed: rows of cells, the first of them a heading."""
        if self.removed is not None:
            return self.removed.tables
        columns = [["method", *(row.name for row in self.rows)]]
        columns.append([self.headline, *(str(row.per_query) for row in self.rows)])
        if self.against is not None:
            differences = ("" if row.more is None else f"{row.more:+}" for row in self.rows)
            columns.append(["difference", *differences])
        if self.kind == "random":
            columns.append(["LDS per subset", *(str(row.per_subset) for row in self.rows)])
        for place, name in enumerate(SLOPES if self.kind == DROPS else ()):
            columns.append([name, *("" if row.slopes is None else str(row.slopes[place]) for row in self.rows)])
        if any(row.mislabels is not None for row in self.rows):
            found = ("" if row.mislabels is None else str(row.mislabels.auroc) for row in self.rows)
            columns.append(["AUROC of mislabels", *found])
        if any(row.seconds is not None for row in self.rows):
            columns.append(["seconds", *("" if row.seconds is None else f"{row.seconds:.1f}" for row in self.rows)])
        return [[list(row) for row in zip(*columns, strict=True)]]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        plain: dict[str, Any] = {
            "kind": self.kind,
            "bank": dict(self.summary),
            "repeatability": self.repeatability,
            "against": self.against,
            "methods": [row.to_dict() for row in self.rows],
        }
        if self.removed is not None:
            plain["removal"] = {
                "counts": self.removed.counts,
                "rise": {name: [one.to_dict() for one in all_] for name, all_ in self.removed.rise.items()},
                "brittle": self.removed.brittle
                and {
                    name: [None if np.isnan(share) else share for share in shares]
                    for name, shares in self.removed.brittle.items()
                },
                "right": self.removed.right,
            }
        return plain

    def draw(self, path: str | Path) -> None:
        """Draw it into a file whose name ends in .png, .svg or .pdf (needs the extra ``plots``)."""
        plots.check(path)
        from matplotlib.figure import Figure

        if self.removed is not None:
            figure = Figure(figsize=(11, 4.2), layout="constrained")
            draw_removal(figure, self.removed)
        else:
            panels = 1 + any(row.per_subset is not None for row in self.rows) + (self.against is not None)
            figure = Figure(figsize=(1.6 + 4.2 * panels, 1.3 + 0.32 * len(self.rows)), layout="constrained")
            draw_rows(figure, self.rows, self.kind, self.against)
        figure.savefig(path, dpi=140)


def compare(
    bank: Bank,
    scores: Mapping[str, Given],
    *,
    texts: tuple[Sequence[Any], Sequence[Any]] | None = None,
    against: str | None = None,
    controls: bool = True,
    seconds: Mapping[str, float] | None = None,
    mislabels: Mapping[str, Detection] | None = None,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> Report:
    """Measure every method on a bank, with the controls beside them.

    Args:
        bank: the retrainings.
        scores: the methods, by name: `Scores`, or bare arrays of them.
        texts: the words or tokens of every training text and of every query, for the control BM25; it is left out
            where they have none in common.
        against: the method that all others are compared with: each has its difference from it in the headline, whose
            error is that of the difference (`Measured.__sub__`): for methods that err alike, smaller than theirs.
        controls: random scores, the difficulty of queries alone (their mean losses in the bank itself, the best that
            such a control can know), and the size of the subset alone.
        seconds: what each method took, where scores do not say it themselves.
        mislabels: what each method's self-influence finds.
        bootstrap: how many times queries and subsets are resampled.
        seed: of the bootstrap and the controls.
    """
    require_bank(bank)
    methods = named_scores(scores)
    if against is not None and against not in list(methods):  # which also looks for what cannot be a key
        raise InputError(
            "against", got=repr(against), expected=f"one of the methods: {', '.join(methods) or 'there are none'}"
        )
    if bank.subsets.kind == "removal":
        if methods:
            raise InputError(
                "bank",
                got="a bank of removals together with scores",
                expected="no scores: the bank was made from them",
            )
        return Report([], "removal", bank.summary(), removed=removal(bank, bootstrap=bootstrap, seed=seed))
    train, query = bank.about["train"], bank.about["queries"]
    blind: dict[str, Callable[[], Scores]] = {}  # made one after another: each may take gigabytes
    if controls:
        difficulty = np.nanmean(bank.values(), axis=(0, 1))
        blind = {
            "random": lambda: random_scores(train, query, seed=seed),
            "query difficulty": lambda: query_difficulty(difficulty, train, seed=seed + 1),
            "subset size": lambda: subset_size(train, query, seed=seed + 2),
        }
        if texts is not None:
            overlap = bm25(*texts)
            if np.ptp(overlap.values, axis=0).any():  # no word in common is no rank
                blind["BM25"] = lambda: overlap
    for name in filter(blind.__contains__, methods):
        raise InputError("scores", got=f"a method called {name!r}", expected="another name: that is a control's")
    for name, given in methods.items():
        bank.check(given, name)
    everything = itertools.chain(methods.values(), (make() for make in blind.values()))
    predictions, named = [predicted_losses(bank, given) for given in everything], [*methods, *blind]
    losses = real_losses(bank)
    per_query = lds_of(predictions, losses, per="query", bootstrap=bootstrap, seed=seed)
    per_subset: list[Measured | None] = [None] * len(named)
    if bank.subsets.kind == "random":
        per_subset = [*lds_of(predictions, losses, per="subset", bootstrap=bootstrap, seed=seed)]
    slopes: list[tuple[Measured, Measured] | None] = [None] * len(named)
    if bank.subsets.kind == DROPS and methods:
        both = (
            slopes_of(predictions[: len(methods)], losses, pooled=pooled, bootstrap=bootstrap, seed=seed)
            for pooled in (False, True)
        )
        slopes[: len(methods)] = zip(*both, strict=True)
    other = None if against is None else per_query[named.index(against)]
    taken = {name: given.provenance.get("seconds") for name, given in methods.items()} | dict(seconds or {})
    rows = [
        Row(
            name, name in blind, headline, papers, taken.get(name), (mislabels or {}).get(name),
            None if other is None or name == against else headline - other, own,
        )
        for name, headline, papers, own in zip(named, per_query, per_subset, slopes, strict=True)
    ]  # fmt: skip
    remarks = _remarks(losses, methods)
    return Report(rows, bank.subsets.kind, bank.summary(), repeatability(bank), remarks=remarks, against=against)


def _remarks(losses: Float[np.ndarray, "subset seed query"], methods: Mapping[str, Scores]) -> list[str]:
    """What is likely to be a mistake of the training, and which queries a method says nothing of."""
    found = []
    finished = losses[np.isfinite(losses).all((1, 2))]
    if len(finished) > 1 and losses.shape[1] > 1 and (finished == finished[:, :1]).all():
        found.append("all seeds of a subset have the same losses: does the training use its seed?")
    if len(finished) > 1 and (finished == finished[:1]).all():
        found.append("the losses are the same whatever the subset is: does the training use its indices?")
    for name, scores in methods.items():
        constant = int((np.ptp(scores.values, axis=0) == 0).sum())
        if constant:
            every = "queries have one score for every training example, and count as an LDS of 0"
            found.append(f"{name}: {constant} of {scores.values.shape[1]} {every}")
    return found


def read_scores(
    sources: Sequence[str], mislabelled: Bool[np.ndarray, " train"] | None = None, kappa: Kappa = 0.0
) -> tuple[dict[str, Scores], dict[str, Detection], tuple[list[Any], list[Any]] | None]:
    """Read runs and files of scores, each ``[NAME=]PATH``: scores, detections, and texts where a run has any.

    A run gives two rows, covariance and correlation, and two more where it is to be read at a ``kappa`` as well.
    Without a run, ``kappa`` and ``mislabelled`` are refused: files have neither draws nor self-influence.
    """
    scores: dict[str, Scores] = {}
    detections: dict[str, Detection] = {}
    texts = None
    named = [_named(source) for source in sources]
    runs = sum(path.is_dir() for _, path in named)
    files = {path: Scores.load(path) for _, path in named if path.suffix == ".safetensors" and path.is_file()}
    for name, given in (("mislabelled", mislabelled is not None), ("kappa", bool(kappa))):
        if given and not runs:
            got = "files of scores" if named else "nothing"
            raise InputError(name, got=f"{got} to apply it to", expected="a run", fix=f"leave --{name} out")

    def add(name: str, given: Scores) -> None:
        if name in scores:
            raise InputError(
                "scores", got=f"two methods called {name!r}", expected="a name for each", fix=f"write NAME={path}"
            )
        scores[name] = given

    for given, path in named:
        if path.is_dir():
            run = load(path)
            name = given or ("BIF" if runs == 1 else f"BIF {path.name}")
            drawn = run.config["keep"] == "traces"
            if kappa and not drawn:
                warn(f"{path} has no traces to read at a κ, and is read as it is", EstimateWarning)
            read_at: tuple[Kappa, ...] = (0.0, kappa) if kappa and drawn else (0.0,)
            for held, kind in itertools.product(read_at, ("covariance", "correlation")):
                influence = run.influence(normalize=kind == "correlation", kappa=held)
                at = f", κ = {influence.provenance['kappa']:g}" if held else ""
                at += " (auto)" if held == "auto" else ""
                add(f"{name} {kind}{at}", influence)
            texts = texts or _tokens(run)
            if mislabelled is not None:
                detections[f"{name} covariance"] = mislabel_detection(self_influence(run), mislabelled)
        elif path in files:
            read = files[path]
            alone = [one.method for one in files.values()].count(read.method) == 1
            name = given or (read.method if alone else f"{read.method} {path.stem}")
            add(name, read)
        elif path.suffix == ".npy" and path.is_file():
            name = given or path.stem
            add(name, Scores(values=read_array(path), method=name))
        else:
            raise InputError(
                "scores",
                got=str(path) if path.exists() else f"{path}, which does not exist",
                expected="the directory of a run, or a file of scores ending in .safetensors or .npy (negative helps)",
            )
    return scores, detections, texts


def _named(source: str) -> tuple[str, Path]:
    """A name and a path; a path may have an = in it, too."""
    name, separator, rest = source.partition("=")
    return (name, Path(rest)) if separator and not Path(source).exists() else ("", Path(source))


def read_array(path: Path) -> np.ndarray:
    """Read an .npy file; nothing that it could execute."""
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError("file", got=f"{path}, which cannot be read ({error})", expected="an .npy file") from error


def _tokens(run: Run) -> tuple[list[Any], list[Any]] | None:
    train, query = ([one.get("tokens") for one in run.examples(name)] for name in ("train", "query"))
    return (train, query) if train and query and all(train) and all(query) else None


def draw_rows(figure: Any, rows: Sequence[Row], kind: str = "random", against: str | None = None) -> None:
    """Draw each method's number with its 95 % interval; the headline on the left, and what it is above another's."""
    over = {"random": "LDS per query, over subsets", DROPS: "LDS per query, over drops"}
    headline = over.get(kind, "leave-one-out correlation per query")
    metrics = [("per_query", headline)]
    if against is not None:
        metrics.append(("more", f"the same, less that of {against}"))
    if any(row.per_subset is not None for row in rows):
        metrics.append(("per_subset", "LDS per subset, over queries (the paper's)"))
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for panel, (name, title) in zip(axes, metrics, strict=True):
        for place, row in enumerate(rows):
            found = getattr(row, name)
            if found is not None:
                colour = CONTROL_COLOUR if row.control else METHOD_COLOUR
                half = NORMAL_95 * found.standard_error
                panel.errorbar(found.value, place, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_title(title, fontsize=11)
        panel.grid(axis="x", alpha=0.3)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].invert_yaxis()


def draw_removal(figure: Any, found: Removal) -> None:
    """Draw the rise in loss, and the share of queries that turn wrong, against the number of removed examples."""
    panels = figure.subplots(1, 1 + (found.brittle is not None), squeeze=False)[0]
    # A place for each number, since they often double, and beside it one for each method: equal ones hide each other.
    places = np.arange(len(found.counts))
    apart = min(LARGEST_DODGE, DODGED_WIDTH / max(1, len(found.rise)))
    for index, (method, rises) in enumerate(found.rise.items()):
        at = places + apart * (index - (len(found.rise) - 1) / 2)
        colour = CONTROL_COLOUR if method == "random" else plots.CHAIN_COLOURS[index % len(plots.CHAIN_COLOURS)]
        errors = [NORMAL_95 * one.standard_error for one in rises]
        panels[0].errorbar(
            at, [one.value for one in rises], yerr=errors, color=colour, marker="o", capsize=3, label=method
        )
        if found.brittle is not None:
            panels[1].plot(at, found.brittle[method], color=colour, marker="o", label=method)
    titles = ("rise in the query's loss (nats)", f"share of n = {found.right} right answers turned wrong")
    for panel, title in zip(panels, titles, strict=False):
        panel.set(xlabel="training examples removed", ylabel=title)
        panel.set_xticks(places, [f"{count:,}" for count in found.counts])
        panel.grid(axis="y", alpha=0.3)
        panel.legend(frameon=False)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
