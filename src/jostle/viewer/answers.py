"""What the page asks, and what it is told: plain data, and arrays as the bytes of their numbers.

The server and the report give the same answers, one on demand and the other beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jostle.diagnose import Sample, effective_sizes, half_scores, moving
from jostle.diagnose.plots import LARGEST, autocorrelation_bands
from jostle.errors import InputError
from jostle.estimate import FEWEST_DRAWS
from jostle.viewer.places import best_layout, place
from jostle.viewer.reading import Reading, Table, UnreadableError, finite, in_words
from jostle.viewer.sources import RunSource, Source

Parameters = Mapping[str, str]
Answer = dict[str, Any] | bytes

STATIC = Path(__file__).parent / "static"
"""The files of the page."""

MOST_COLUMNS = 512
"""How many errors or images one question may ask for."""

MOST_POINTS = 400
"""How many draws of a chain are drawn, and how many points of a scatter for each of these."""

MOST_PLACED = 3000
"""How many examples a map shows."""

MOST_QUERIES = 64
"""How many queries the agreement of two methods is the median of."""

AGREEMENT_TOP = 10
"""How many of the most helpful, and of the most harmful, two methods may have in common."""


class Answers:
    """Answers about some runs and other scores, by the name of the question."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.questions: dict[str, Callable[[Parameters], Answer]] = {
            "runs": self.runs,
            "examples": self.examples,
            "images": self.images,
            "influence": self.influence,
            "errors": self.errors,
            "health": self.health,
            "map": self.map,
            "compare": self.compare,
        }

    def runs(self, parameters: Parameters) -> Answer:
        """Everything that was opened, with what is wrong with it where something is."""
        return {"runs": [self._describe(number, source) for number, source in enumerate(self._sources)]}

    def _describe(self, number: int, source: Source) -> dict[str, Any]:
        about: dict[str, Any] = {"run": number, "name": source.name}
        try:
            reading = source.read()
            if isinstance(reading, Table):
                return about | {"kind": "scores", "method": reading.method, "sizes": reading.sizes}
            images = {name: None if pixels is None else pixels.shape[1:] for name, pixels in reading.images.items()}
            return finite(
                about
                | {
                    "kind": "tokens" if reading.per_token else "examples",
                    "method": "bif",
                    "status": reading.run.manifest["status"],
                    "has_traces": reading.has_traces,
                    "sizes": reading.sizes,
                    "images": images,
                    "chains": len(reading.chains),
                    "draws": reading.draws,
                    "kappa": reading.kappa,
                }
            )
        except UnreadableError as problem:
            return about | {"kind": "problem", "problem": str(problem)}
        except (KeyError, TypeError, AttributeError) as error:
            return about | {"kind": "problem", "problem": f"{source.name} lacks {error}; is it of another version?"}

    def examples(self, parameters: Parameters) -> Answer:
        """What to show of a set."""
        return {"examples": finite(self._reading(parameters).examples[_set(parameters)])}

    def images(self, parameters: Parameters) -> Answer:
        """The pixels of some images, one after another."""
        images = self._reading(parameters).images[_set(parameters)]
        if images is None:
            raise InputError("images", got="a run without images", expected="one that was given some")
        wanted = _numbers(parameters, "indices")
        if any(not 0 <= index < len(images) for index in wanted):
            raise InputError("indices", got="one that is not there", expected=f"numbers from 0 to {len(images) - 1}")
        with in_words("the images cannot be read"):
            return np.ascontiguousarray(images[wanted]).tobytes()

    def influence(self, parameters: Parameters) -> Answer:
        """Posterior correlations of an example, or a span of its tokens, with all of the other set.

        First those of the examples, then those of their tokens, as little-endian float32.
        """
        name, sample = _set(parameters), _number(parameters, "sample")
        by_example, by_token = self._source(parameters).read().correlations(name, sample, _span(parameters))
        parts = [by_example] if by_token is None else [by_example, by_token]
        return np.concatenate(parts).astype("<f4").tobytes()

    def errors(self, parameters: Parameters) -> Answer:
        """Monte Carlo standard errors of some of these correlations."""
        name, sample = _set(parameters), _number(parameters, "sample")
        reading = self._source(parameters).read()
        level = parameters.get("level", "example")
        if level not in ("example", "token"):
            raise InputError("level", got=repr(level), expected="'example' or 'token'")
        columns = _numbers(parameters, "columns")
        found = reading.errors(name, sample, _span(parameters), columns, tokens=level == "token")
        if found is None:
            return {"errors": None, "batches": None}
        return {"errors": finite(found[0].tolist()), "batches": found[1]}

    def health(self, parameters: Parameters) -> Answer:
        """The diagnostics and their curves; of the draws so far, and how many are to come, while sampling."""
        source, reading = self._source(parameters), self._reading(parameters)
        assert isinstance(source, RunSource)
        config = reading.run.config
        answer = {
            "status": reading.run.manifest["status"],
            "progress": source.progress(reading),
            "diagnostics": reading.diagnostics,
            "kappa": reading.kappa,
            "curves": None if reading.sample is None else _curves(reading.sample, reading),
            "settings": {name: config[name] for name in ("chains", "draws", "burn_in", "thin", "batch_size", "seed")}
            | {"sampler": config["sampler"], "posterior": config["posterior"]},
            "seconds": reading.run.manifest.get("seconds"),
            "device": reading.run.manifest.get("device"),
        }
        return finite(answer)

    def map(self, parameters: Parameters) -> Answer:
        """Training examples in the plane, near each other where their losses move together."""
        reading = self._reading(parameters)
        if not reading.has_traces:
            raise UnreadableError("a map needs the traces; this run kept the covariance alone")
        count = reading.columns("train").samples
        picked = np.unique(np.linspace(0, count - 1, MOST_PLACED).astype(int))
        layout = parameters.get("layout", best_layout(len(picked)))
        if layout not in ("neighbours", "principal"):
            raise InputError("layout", got=repr(layout), expected="'neighbours' or 'principal'")
        table = reading.table("train", tokens=False)
        with in_words("the map cannot be drawn"):
            places, share = reading.remember(f"map {layout}", lambda: place(table.unit(picked.tolist()), layout))
        answer = {
            "indices": picked,
            "places": places.round(4).tolist(),
            "variance": share,
            "of": count,
            "layout": layout,
        }
        return finite(answer)

    def compare(self, parameters: Parameters) -> Answer:
        """Two methods' scores for one query, and how far their rankings agree, for it and over all queries."""
        query = _number(parameters, "query")
        first, second = (self._source(parameters, name).read() for name in ("run", "other"))
        columns = [reading.correlations("query", query, None)[0] for reading in (first, second)]
        if len(columns[0]) != len(columns[1]):
            raise UnreadableError(
                f"they score {len(columns[0])} and {len(columns[1])} training examples: not the same data"
            )
        overall = [
            _spearman(*(reading.correlations("query", number, None)[0] for reading in (first, second)))
            for number in range(min(first.sizes["query"], second.sizes["query"], MOST_QUERIES))
        ]
        known = [value for value in overall if value is not None]
        return finite(
            {
                "first": columns[0].tolist(),
                "second": columns[1].tolist(),
                "spearman": _spearman(*columns),
                "top": AGREEMENT_TOP,
                "helpful_in_common": _common(columns[0], columns[1]),
                "harmful_in_common": _common(-columns[0], -columns[1]),
                "median_spearman": float(np.median(known)) if known else None,
                "queries": len(overall),
            }
        )

    def warm(self) -> None:
        """Read what the first click will need."""
        for source in self._sources:
            with contextlib.suppress(UnreadableError):
                reading = source.read()
                if isinstance(reading, Reading) and reading.has_traces:
                    reading.table("train", tokens=reading.columns("train").per_token)
                    reading.table("query", tokens=reading.columns("query").per_token)
                    _ = reading.batch_length

    def _source(self, parameters: Parameters, name: str = "run") -> Source:
        number = _number(parameters, name)
        if not 0 <= number < len(self._sources):
            raise InputError(name, got=number, expected=f"a number from 0 to {len(self._sources) - 1}")
        return self._sources[number]

    def _reading(self, parameters: Parameters) -> Reading:
        reading = self._source(parameters).read()
        if isinstance(reading, Table):
            raise InputError("run", got="a file of scores", expected="a run")
        return reading


def _spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    from scipy.stats import rankdata

    a, b = (rankdata(side) for side in (first, second))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _common(first: np.ndarray, second: np.ndarray) -> int:
    top = min(AGREEMENT_TOP, len(first))
    return len({*np.argsort(-first, kind="stable")[:top]} & {*np.argsort(-second, kind="stable")[:top]})


def _set(parameters: Parameters) -> str:
    name = parameters.get("set", "query")
    if name not in ("train", "query"):
        raise InputError("set", got=repr(name), expected="'train' or 'query'")
    return name


def _number(parameters: Parameters, name: str) -> int:
    return _whole(parameters.get(name, "0"), name)


def _whole(text: str, name: str) -> int:
    # Not int() alone: it reads the digits of every script, and takes its time over a million of them.
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InputError(name, got=repr(text[:20]), expected="a whole number")
    return int(text)


def _numbers(parameters: Parameters, name: str) -> list[int]:
    parts = [part for part in parameters.get(name, "").split(",") if part]
    if not 1 <= len(parts) <= MOST_COLUMNS:
        raise InputError(name, got=f"{len(parts)} numbers", expected=f"1 to {MOST_COLUMNS}, with commas between")
    return [_whole(part, name) for part in parts]


def _span(parameters: Parameters) -> tuple[int, int] | None:
    if "from" not in parameters:
        return None
    first = _number(parameters, "from")
    return first, _number(parameters, "to") if "to" in parameters else first


def _curves(sample: Sample, reading: Reading) -> dict[str, Any]:
    """What the pictures of the diagnostics show, as numbers."""
    config = reading.run.config
    recorded = reading.draws
    picked = np.unique(np.linspace(0, recorded - 1, MOST_POINTS).astype(int))
    losses = np.where(np.abs(sample.mean_loss) < LARGEST, sample.mean_loss, np.nan)
    curves: dict[str, Any] = {
        "steps": (config["burn_in"] + config["thin"] * picked).tolist(),
        "mean_loss": losses[:, picked].tolist(),
        "center_loss": sample.center_loss,
        "chains": reading.chains.tolist(),
    }
    if not len(reading.chains) or recorded < FEWEST_DRAWS:
        return curves
    train = moving(sample.train)
    if train.size:
        curves["autocorrelation"] = autocorrelation_bands(sample)
        sizes = effective_sizes(train, "bulk")
        counts, edges = np.histogram(np.minimum(sizes, 1.2 * train[..., 0].size), bins=24)
        curves["effective"] = {"counts": counts, "edges": edges, "draws": train[..., 0].size}
        first, second = (half.ravel() for half in half_scores(sample)["halves"])
        some = np.unique(np.linspace(0, len(first) - 1, 3 * MOST_POINTS).astype(int))
        curves["halves"] = [first[some].round(4), second[some].round(4)]
    return curves
