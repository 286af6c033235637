"""A labelled matrix with its method, sign and provenance."""

from __future__ import annotations

import functools
import json
import numbers
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float

from jostle.errors import EstimateWarning, InputError, require_folder, warn
from jostle.files import replacing

FORMAT = 1

ASKED = {"kappa": 0.0, "train": None, "query": None, "on": "query", "part": "all", "reduction": "mean"}
"""What scores were asked for, in their provenance, and what goes without saying."""

UNITS = {"metric": None, "damping": None, "spread": False, "dimension": None, "ridge": None}
"""What else, of one method, decides how large its scores are."""


Arguments = ParamSpec("Arguments")


def timed(make: Callable[Arguments, Scores]) -> Callable[Arguments, Scores]:
    """Have a function that makes scores say in their provenance how many seconds that took."""

    @functools.wraps(make)
    def call(*given: Arguments.args, **named: Arguments.kwargs) -> Scores:
        started = time.perf_counter()
        scores = make(*given, **named)
        return replace(scores, provenance={**scores.provenance, "seconds": time.perf_counter() - started})

    return call


@dataclass(frozen=True)
class Entry:
    """One training example in a ranking."""

    index: int
    score: float
    standard_error: float | None = None

    def __repr__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.1g}"
        return f"Entry({self.index}: {self.score:.4g}{error})"


@dataclass(frozen=True)
class Ranking:
    """The training examples that matter most for one query; the strongest first in both lists.

    Scores keep the sign of `Scores`: negative helps. Where they are normalized they are minus a correlation.
    """

    query: int
    method: str
    normalized: bool
    helpful: list[Entry]
    harmful: list[Entry]
    kappa: float = 0.0
    """What the scores were read at."""

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as plain data, for JSON."""

        def plain(entry: Entry) -> dict[str, Any]:
            return {key: value for key, value in vars(entry).items() if value is not None}

        return {
            "query": self.query,
            "method": self.method,
            "normalized": self.normalized,
            "helpful": [plain(entry) for entry in self.helpful],
            "harmful": [plain(entry) for entry in self.harmful],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Influence of training examples (rows) on queries (columns): ``values[train, query]``.

    The sign is the same for every method: **negative means that training on the example lowers the query's loss**
    (it helps). For the Bayesian influence function a value is −Cov(ℓᵢ, φⱼ) or, normalized, −correlation.

    Attributes:
        values: the matrix.
        method: which attributor made it: ``"bif"``, ``"exact"``, ...
        normalized: whether values are −correlations, in [−1, 1].
        scale: the change of E[φⱼ] for each unit of extra weight on example i is ``scale * values[i, j]``; n_beta/n
            for the BIF. None where the method has no such reading (normalized scores, for one).
        standard_error: the Monte Carlo standard error of each value, where it was asked for.
        degrees_of_freedom: of the standard error, for Student's t.
        provenance: what the scores were made from: settings, fingerprints, diagnostics.
    """

    values: Float[np.ndarray, "train query"]
    method: str
    normalized: bool = False
    scale: float | None = None
    standard_error: Float[np.ndarray, "train query"] | None = None
    degrees_of_freedom: float | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        kind = "−correlation" if self.normalized else "influence"
        rows, columns = self.values.shape
        kappa = self.provenance.get("kappa")
        # As sampled is not worth a word, unless somebody asked for what the draws support.
        read = f" at κ = {kappa:g}" if kappa or "kappa_chosen" in self.provenance else ""
        return f"Scores({self.method} {kind}{read}, {rows} train × {columns} query, negative = helps)"

    @property
    def shape(self) -> tuple[int, ...]:
        """(train, query)."""
        return self.values.shape

    @property
    def posterior_correlation(self) -> Float[np.ndarray, "train query"]:
        """The correlation of losses with a plus sign, which is what people look at."""
        if not self.normalized:
            raise InputError(
                "posterior_correlation",
                got="covariance scores",
                expected="normalized scores",
                fix="call influence(normalize=True)",
            )
        return -self.values

    def toward(self, steady: Scores) -> Scores:
        """Return these scores, drawn toward steadier ones of the same pairs as far as their own noise says.

        Draws know all orders of the influence, with noise; gradients at w* know the first, without any. Of all
        mixtures a·steady + b·these with a, b ≥ 0, the same for all pairs, this is the one that comes nearest to what
        these would be without their noise. For that nobody has to know it: noise is in no product with the other
        scores, and how much of it is in the squares, the standard errors say. The fewer the draws, the nearer to
        ``steady`` it is; with many, these are left as they are. It has no standard errors: how far the other scores are
        from what these tend to is known for all pairs together, but not for each.

        Args:
            steady: what these tend to without noise, or nearly so, and not made from the same draws. For draws without
                a gradient (`jostle.Gaussian`) `gradient_similarity` with ``cosine=True``, or `FirstOrder` at the same
                κ; normalized as these are.

        Raises:
            InputError: without standard errors, for scores of other pairs, or where nothing but noise is left.
        """
        if self.standard_error is None:
            fix = "call influence(standard_error=True)"
            raise InputError("scores", got="no standard errors", expected="them, to know the noise by", fix=fix)
        noisy = _noise_in(steady.provenance)
        if noisy:
            raise InputError("steady", got=f"{noisy}, which has noise", expected="scores without any, as of FirstOrder")
        self._require_alike(steady, "steady")
        squares, noise = (_sum_of_products(one, one) for one in (self.values, self.standard_error))
        steady_squares, both = (_sum_of_products(steady.values, one.values) for one in (steady, self))
        if not np.isfinite([squares, noise, steady_squares, both]).all():
            raise InputError("scores", got="values or errors that are not finite", expected="finite ones")
        clean = max(0.0, squares - noise)
        a, b = _mixture(steady_squares, both, squares, clean)
        if not a and not b:
            got = f"noise as large as they are, and nothing in common with those of {steady.method}"
            raise InputError("scores", got=got, expected="scores that are more than noise", fix="take more draws")
        if not b:
            told = "there is no more in them than noise and what those say; take more draws, or farther from w*"
            warn(f"nothing is left of scores drawn toward {steady.method}: {told}", EstimateWarning)
        about = {"method": steady.method, "weights": {"steady": a, "own": b}, "share_of_noise": noise / squares}
        values = steady.values * np.float32(a)
        for mixed, own in zip(values, self.values, strict=True):  # there may be no room for a copy
            mixed += np.float32(b) * own
        return replace(
            self,
            values=values,
            method=f"{self.method}, toward {steady.method}",
            standard_error=None,
            degrees_of_freedom=None,
            provenance={**self.provenance, "toward": about},
        )

    @classmethod
    def mean_of(cls, several: Sequence[Scores]) -> Scores:
        """Return the mean of scores of the same pairs, as of several checkpoints of one training.

        What an example does to a model, it does all along the training. Where checkpoints from the way are at hand, the
        mean of what they say predicts retraining about as well as the best of them, which nobody knows beforehand
        (docs/reading.md). They count as much as their scores are large, so leave out those of the first tenth, where
        gradients are; covariances of draws should be of one localization. It has no standard errors: runs of one seed
        share their noise.

        Raises:
            InputError: without scores, or for those of other pairs, weights, methods, units or kinds.
        """
        several = [several] if isinstance(several, Scores) else list(several)
        if not several:
            raise InputError("scores", got="none", expected="those of one checkpoint or more")
        first, own = several[0], ("weights", "config", "kappa")
        for number, other in enumerate(several):
            name = f"scores[{number}]"
            if not isinstance(other, Scores):
                raise InputError(name, got=f"a {type(other).__name__}", expected="Scores, as run.influence() gives")
            if other.method != first.method:
                raise InputError(name, got=f"scores of {other.method}", expected=f"those of {first.method}")
            for before in several[:number]:  # not the first alone: it may not know what it is of
                before._require_alike(other, name, but=own)
            for key, usual in UNITS.items():
                ours, theirs = (one.provenance.get(key, usual) for one in (first, other))
                if ours != theirs:
                    raise InputError(name, got=f"{key} {theirs}", expected=f"{key} {ours}, as the first")
        values = np.zeros(first.values.shape, np.result_type(np.float32, *(one.values for one in several)))
        for one in several:
            values += one.values
        values /= len(several)
        scales = {one.scale for one in several}
        fingerprints: dict[str, set[str]] = {}
        for one in several:
            for key, value in one.provenance.get("fingerprints", {}).items():
                fingerprints.setdefault(key, set()).add(value)
        known = [{key: one.provenance[key] for key in ASKED | UNITS if key in one.provenance} for one in several]
        taken = [one.provenance["seconds"] for one in several if "seconds" in one.provenance]
        return cls(
            values=values,
            method=f"{first.method}, mean of {len(several)}",
            normalized=first.normalized,
            scale=scales.pop() if len(scales) == 1 else None,
            provenance={
                **{key: value for key, value in known[0].items() if all(one.get(key) == value for one in known)},
                "fingerprints": {key: "+".join(sorted(those)) for key, those in fingerprints.items()},
                **({"seconds": sum(taken)} if len(taken) == len(several) else {}),
                "mean_of": [dict(one.provenance) for one in several],
            },
        )

    def _require_alike(self, other: Scores, name: str, *, but: Collection[str] = ()) -> None:
        """Refuse scores of other pairs or of another kind; ``but`` says what they may differ in."""
        if other.values.shape != self.values.shape:
            got, expected = (" × ".join(map(str, one.values.shape)) for one in (other, self))
            raise InputError(name, got=f"{got} scores (train × query)", expected=f"{expected}, as these")
        if other.normalized != self.normalized:
            kinds = ["covariances", "correlations"]
            got, expected = kinds[other.normalized], kinds[self.normalized]
            fix = f"make them with normalize={self.normalized}"
            raise InputError(name, got=got, expected=f"{expected}, as these", fix=fix)
        ours, theirs = (one.provenance.get("fingerprints", {}) for one in (self, other))
        told = {"weights": "another model", "moving": "other weights of the model"}
        for key in sorted(ours.keys() & theirs.keys(), reverse=True):  # another model may have other weights, too
            if key not in but and ours[key] != theirs[key]:
                what = told.get(key, f"other {key} data")
                raise InputError(name, got=f"scores of {what}", expected="scores of the same, as these")
        for key in [key for key in ASKED if key not in but]:
            here, there = (one.provenance.get(key, ASKED[key]) for one in (self, other))
            # A correlation of sums is that of means.
            if here != there and not (key == "reduction" and self.normalized):
                told = [str(value) if len(str(value)) < 40 else "other ones" for value in (there, here)]
                raise InputError(name, got=f"{key} {told[0]}", expected=f"{told[1]}, as these")

    def top(self, query: int, k: int = 10) -> Ranking:
        """Return the ``k`` most helpful (most negative first) and most harmful (most positive first) examples."""
        queries = self.values.shape[1]
        if not isinstance(query, numbers.Integral) or not -queries <= query < queries:
            raise InputError("query", got=repr(query), expected=f"an index below {queries}")
        if k < 1:
            raise InputError("k", got=k, expected="a positive number of examples")
        column = self.values[:, query]
        order = np.argsort(column, kind="stable")

        def entry(index: int) -> Entry:
            error = None if self.standard_error is None else float(self.standard_error[index, query])
            return Entry(int(index), float(column[index]), error)

        return Ranking(
            query=query % queries,
            method=self.method,
            normalized=self.normalized,
            helpful=[entry(index) for index in order[:k] if column[index] < 0],
            harmful=[entry(index) for index in order[::-1][:k] if column[index] > 0],
            kappa=self.provenance.get("kappa", 0.0),
        )

    def save(self, path: str | Path) -> None:
        """Write the scores as one safetensors file, with everything else in its metadata; `load` reads it.

        Other formats: `export`.
        """
        if Path(path).suffix not in ("", ".safetensors"):
            raise InputError("path", got=Path(path).name, expected="a name ending in .safetensors", fix="use export")
        require_folder("path", path)
        tensors = {"values": np.ascontiguousarray(self.values)}
        if self.standard_error is not None:
            tensors["standard_error"] = np.ascontiguousarray(self.standard_error)
        about = {
            "format": FORMAT,
            "method": self.method,
            "sign": "negative = helps",
            "normalized": self.normalized,
            "scale": self.scale,
            "degrees_of_freedom": self.degrees_of_freedom,
            "provenance": dict(self.provenance),
        }
        metadata = {"jostle.scores": json.dumps(about)}
        with replacing(Path(path)) as temporary:
            safetensors.numpy.save_file(tensors, temporary, metadata=metadata)

    def export(self, path: str | Path) -> None:
        """Write the matrix in the format that the name ends in: npy, safetensors, csv or parquet.

        The last two have a row a pair: ``train``, ``query``, ``score``, its ``standard_error`` where there is one, and
        in every row the ``kappa`` that the scores of a run are read at.
        """
        path = Path(path)
        require_folder("file", path)
        match path.suffix:
            case ".npy":
                with replacing(path) as temporary, open(temporary, "wb") as file:
                    np.save(file, self.values)
            case ".safetensors":
                self.save(path)
            case ".csv" | ".parquet":
                import pandas

                train, query = np.indices(self.values.shape)
                columns = {"train": train.ravel(), "query": query.ravel(), "score": self.values.ravel()}
                if self.standard_error is not None:
                    columns["standard_error"] = self.standard_error.ravel()
                if "kappa" in self.provenance:
                    columns["kappa"] = np.full(self.values.size, self.provenance["kappa"])
                frame = pandas.DataFrame(columns)
                with replacing(path) as temporary:
                    if path.suffix == ".csv":
                        frame.to_csv(temporary, index=False)
                        return
                    try:
                        frame.to_parquet(temporary, index=False)
                    except ImportError as error:
                        raise InputError(
                            "file",
                            got="no pyarrow",
                            expected="it, to write .parquet",
                            fix="pip install pyarrow, or write .csv",
                        ) from error
            case _:
                raise InputError(
                    "file", got=path.name, expected="a name ending in .npy, .safetensors, .csv or .parquet"
                )

    @classmethod
    def load(cls, path: str | Path) -> Scores:
        """Read what `save` wrote."""
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(
                "scores", got=f"{path}, which cannot be read ({error})", expected="a file that save() wrote"
            ) from error
        if "jostle.scores" not in metadata:
            raise InputError("scores", got=f"{path} without Jostle's metadata", expected="a file that save() wrote")
        about = json.loads(metadata["jostle.scores"])
        return cls(
            values=tensors["values"],
            method=about["method"],
            normalized=about["normalized"],
            scale=about["scale"],
            standard_error=tensors.get("standard_error"),
            degrees_of_freedom=about["degrees_of_freedom"],
            provenance=about["provenance"],
        )


def _noise_in(provenance: Mapping[str, Any]) -> str:
    """What of draws is in scores, or in those that they are the mean of."""
    if provenance.get("spread"):
        return "the spread of a run"
    if "between_chain_share" in provenance:
        return "scores of draws"
    return next(filter(None, map(_noise_in, provenance.get("mean_of", ()))), "")


def _mixture(steady_squares: float, both: float, squares: float, clean: float) -> tuple[float, float]:
    """The weights a, b ≥ 0 with the least mean square of a·steady + b·noisy − clean, from sums of products."""
    determinant = steady_squares * squares - both**2
    if determinant > 1e-9 * steady_squares * squares:
        a, b = both * (squares - clean) / determinant, (steady_squares * clean - both**2) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # Otherwise one of the two alone is best: that which explains more.
    if both > 0 and both**2 * squares > clean**2 * steady_squares:
        return both / steady_squares, 0.0
    return 0.0, clean / squares if squares else 0.0


def _sum_of_products(left: Float[np.ndarray, "train query"], right: Float[np.ndarray, "train query"]) -> float:
    """In double precision, one row at a time: there may be no room for a copy."""
    return sum(float(np.dot(a.astype(np.float64), b)) for a, b in zip(left, right, strict=True))
