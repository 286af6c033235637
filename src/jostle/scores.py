"""A labelled matrix with its method, sign and provenance."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float

from jostle.errors import InputError, require_folder

FORMAT = 1


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
        safetensors.numpy.save_file(tensors, path, metadata={"jostle.scores": json.dumps(about)})

    def export(self, path: str | Path) -> None:
        """Write the matrix in the format that the name ends in: npy, safetensors, csv or parquet.

        The last two have a row a pair: ``train``, ``query``, ``score``, its ``standard_error`` where there is one, and
        in every row the ``kappa`` that the scores of a run are read at.
        """
        path = Path(path)
        require_folder("file", path)
        match path.suffix:
            case ".npy":
                np.save(path, self.values)
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
                if path.suffix == ".csv":
                    frame.to_csv(path, index=False)
                    return
                try:
                    frame.to_parquet(path, index=False)
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
        except safetensors.SafetensorError as error:
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
