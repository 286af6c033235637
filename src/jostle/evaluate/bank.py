"""The retraining bank: what really happens to every query's loss when a model is trained on a part of the data.

A bank is a directory::

    bank.json            what it was made from: fingerprints of the data, subsets, shapes of models and observables
    subsets.npy          which examples each subset holds, as bits
    retrainings/         one file for each (subset, seed) that is done: the losses of all queries
    failures/            one file for each that failed, with the reason

Every retraining is stored when it is done, whole or not at all, and is never done again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from jaxtyping import Float

from jostle._version import __version__
from jostle.errors import InputError
from jostle.evaluate.inputs import Given, require_ranks, scores_of
from jostle.evaluate.subsets import Subsets
from jostle.files import is_leftover, replace_file, replacing, to_disk

log = logging.getLogger("jostle")

FORMAT = 1
LOSS = "loss"
DATA = {"train": "training data", "query": "queries"}
"""What data are called that have a fingerprint."""


class Bank:
    """Losses of queries after retraining on subsets: a directory that can be filled from several places and times."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.about: dict[str, Any] = json.loads((self.directory / "bank.json").read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                "bank", got=f"no readable bank.json in {directory}", expected="the directory of a retraining bank"
            ) from error
        if self.about.get("format") != FORMAT:
            raise InputError("bank", got=f"format {self.about.get('format')}", expected=f"format {FORMAT}")
        packed, labels = np.load(self.directory / "subsets.npy"), self.about["labels"]
        # As many as are labelled: another process may have written more of them since.
        members = np.unpackbits(packed[: len(labels) or None], axis=1, count=self.about["train"]).astype(bool)
        self.subsets = Subsets(members, self.about["kind"], labels)

    @classmethod
    def create(
        cls,
        directory: str | Path,
        subsets: Subsets,
        *,
        queries: int,
        fingerprints: Mapping[str, str],
        dtype: Literal["float32", "float16"] = "float32",
        shapes: Mapping[str, list[int]] | None = None,
    ) -> Bank:
        """Make a bank, or open the one that is there: of the same data, and of these subsets or the first of them.

        Args:
            directory: where it goes.
            subsets: what is trained on. A bank that has the first of them takes the others in addition.
            queries: the number of queries.
            fingerprints: of the ``train`` and ``query`` data; scores of other data are refused.
            dtype: what losses are stored in; half precision halves the space and keeps three digits.
            shapes: the shapes of the model's parameters; default: those of the first model that comes back.
        """
        directory = Path(directory)
        about = {
            "format": FORMAT, "jostle": __version__, "kind": subsets.kind, "train": subsets.members.shape[1],
            "queries": queries, "fingerprints": dict(fingerprints), "dtype": dtype, "shapes": shapes,
            "labels": [dict(label) for label in subsets.labels],
        }  # fmt: skip
        json.dumps(about)  # what cannot be written is found out before anything is
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            if (directory / "bank.json").exists():
                there = cls(directory)
                there._require_same(about, subsets)
                if len(subsets) <= len(there.subsets):
                    return there
                about = there.about | {"labels": about["labels"], "shapes": there.about["shapes"] or shapes}
            elif not _is_new(directory):
                raise InputError("bank", got=f"{directory}, which holds something else", expected="a new directory")
            for name in ("retrainings", "failures"):
                (directory / name).mkdir(exist_ok=True)
            packed = np.packbits(subsets.members, axis=1)
            with replacing(directory / "subsets.npy") as temporary, open(temporary, "wb") as file:
                np.save(file, packed)
            replace_file(directory / "bank.json", json.dumps(about))
            to_disk(directory.parent)
            return cls(directory)

    def _require_same(self, about: Mapping[str, Any], subsets: Subsets) -> None:
        fix = "choose another directory, or delete this one"
        for key, of in (("train", "training examples"), ("queries", "queries"), ("kind", "subsets")):
            if self.about[key] != about[key]:
                got = f"{about[key]} {of} for {self.directory}"
                raise InputError("bank", got=got, expected=f"{self.about[key]}, as in the bank", fix=fix)
        ours, theirs = self.about["fingerprints"], about["fingerprints"]
        differing: list[str] = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing:
            which = " and ".join(DATA.get(name, name) for name in differing)
            raise InputError(
                "bank",
                got=f"other data for {self.directory}: the {which} differ from those of the bank",
                expected="the same examples, in the same order",
                fix=fix,
            )
        both = min(len(subsets), len(self.subsets))
        same_labels = list(self.about["labels"])[:both] == about["labels"][:both]
        if not same_labels or not np.array_equal(self.subsets.members[:both], subsets.members[:both]):
            raise InputError(
                "bank",
                got=f"{self.directory}, a bank of other subsets",
                expected="the same ones, or more of them from the same seed",
                fix=fix,
            )

    def __len__(self) -> int:
        return len(self.subsets)

    def __repr__(self) -> str:
        return f"Bank({str(self.directory)!r}: {self.summary()['text']})"

    def require_manner(self, argument: str, what: str, about: Mapping[str, Any]) -> None:
        """Refuse to go on otherwise than retrainings were made, or measured, as far as is known."""
        known = self.about.get(what)
        if known is None or not self._pairs("retrainings"):
            return
        differs = self._differs(what, {name: value for name, value in about.items() if name in known})
        if differs is not None:
            got, _, expected = differs.partition(", expected ")
            got = f"another {what} than the bank's: {got}"
            raise InputError(argument, got=got, expected=expected, fix="choose another directory")

    def keep_manner(self, **about: Mapping[str, Any]) -> None:
        """Keep how retrainings are made and measured, before there are any: of others nobody knows it."""
        with _alone(self.directory):
            if not self._pairs("retrainings"):
                path = self.directory / "bank.json"
                replace_file(path, json.dumps(json.loads(path.read_text()) | about))
                self.about |= about

    def todo(self, seeds: int, *, subsets: int | None = None, retry: bool = False) -> list[tuple[int, int]]:
        """Return the (subset, seed) pairs that are neither done nor, unless ``retry``, failed; one seed of all first.

        ``subsets`` restricts them to the first so many subsets.
        """
        known = self._pairs("retrainings") | (set() if retry else self._pairs("failures"))
        rows = len(self) if subsets is None else min(subsets, len(self))
        return [(subset, seed) for seed in range(seeds) for subset in range(rows) if (subset, seed) not in known]

    def store(self, subset: int, seed: int, values: Mapping[str, Float[np.ndarray, " query"]]) -> bool:
        """Keep what one retraining gave: ``"loss"``, one number a query, and any other observables.

        What is not finite, or of another shape than that of the first one, is recorded as a failure.

        Returns:
            Whether it was kept.
        """
        tensors = {}
        for name, value in values.items():
            value = np.asarray(value, np.float32)
            if name == LOSS and value.shape != (self.about["queries"],):
                self.fail(subset, seed, f"losses of shape {value.shape} for {self.about['queries']} queries")
                return False
            with np.errstate(over="ignore"):
                tensors[name] = value.astype(self.about["dtype"])
            if not np.isfinite(tensors[name]).all():
                self.fail(subset, seed, f"a {name} that is not finite in {self.about['dtype']}")
                return False
        differs = self._differs("observables", {name: list(value.shape) for name, value in tensors.items()})
        if differs is not None:
            self.fail(subset, seed, f"other observables: {differs}")
            return False
        path = self._path("retrainings", subset, seed)
        with replacing(path) as temporary:
            safetensors.numpy.save_file(tensors, temporary)
        self._path("failures", subset, seed).unlink(missing_ok=True)
        return True

    def fail(self, subset: int, seed: int, reason: str, where: str = "") -> None:
        """Record that one retraining failed, and why; ``where`` is a traceback."""
        text = json.dumps({"subset": subset, "seed": seed, "reason": reason, "traceback": where})
        replace_file(self._path("failures", subset, seed), text)

    def why(self, subset: int, seed: int) -> str:
        """Return why a retraining failed; nothing where it did not, or has succeeded since in another process."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self._path("failures", subset, seed).read_text())["reason"]
        return ""

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The retrainings that failed, with their reasons, and the tracebacks of what they raised."""
        return [json.loads(path.read_text()) for path in sorted((self.directory / "failures").glob("*.json"))]

    @property
    def observables(self) -> list[str]:
        """What was kept of every retraining: ``"loss"``, and others that were asked for."""
        return sorted(self._kept_shapes() or {})

    def _kept_shapes(self) -> dict[str, list[int]] | None:
        """Of the first in order, which speaks for all; None before there is one."""
        done = sorted(self._pairs("retrainings"))
        if not done:
            return None
        found = safetensors.numpy.load_file(self._path("retrainings", *done[0]))
        return {name: list(value.shape) for name, value in found.items()}

    def values(self, name: str = LOSS) -> Float[np.ndarray, "subset seed query"]:
        """Return what retrainings gave, NaN where one is missing; losses unless another observable is named."""
        pairs = sorted(self._pairs("retrainings"))
        if not pairs:
            failures = self.failures
            why = f"; the first of {len(failures)} failures: {failures[0]['reason']}" if failures else ""
            raise InputError("bank", got=f"{self.directory} without a finished retraining{why}", expected="some")
        if name not in self.observables:
            raise InputError("observable", got=repr(name), expected=f"one of {', '.join(self.observables)}")
        first = safetensors.numpy.load_file(self._path("retrainings", *pairs[0]))[name]
        result = np.full((len(self), 1 + max(seed for _, seed in pairs), *first.shape), np.nan, np.float32)
        for subset, seed in pairs:
            found = safetensors.numpy.load_file(self._path("retrainings", subset, seed))
            if name not in found or found[name].shape != first.shape:
                raise InputError(
                    "bank",
                    got=f"no {name} of shape {first.shape} of subset {subset}, seed {seed}",
                    expected="the same observables of every retraining",
                    fix="fill another directory",
                )
            result[subset, seed] = found[name]
        return result

    def summary(self) -> dict[str, Any]:
        """Say how far the bank is, and what failed."""
        done, failures = self._pairs("retrainings"), self.failures
        seeds = 1 + max((seed for _, seed in done), default=-1)
        text = f"{len(done)} retrainings of {len({subset for subset, _ in done})} of {len(self)} subsets"
        text += f", up to {seeds} seeds each" if seeds > 1 else ""
        check = self.predicted
        if check is not None:
            text = f"{len(done)} of {len(self)} drops, predicted by a replay; nothing was trained for them. {check}"
        if failures:
            first = failures[0]
            text += f"; {len(failures)} failed, the first (subset {first['subset']}, seed {first['seed']}): "
            text += first["reason"]
        return {
            "finished": len(done), "subsets": len(self), "seeds": seeds, "failures": failures, "text": text,
            "predicted": check,
        }  # fmt: skip

    @property
    def predicted(self) -> str | None:
        """How a replay that predicted its losses was checked; None where they are of trainings."""
        training = self.about.get("training") or {}
        return training["check"] if training.get("by") == "a replay" else None

    def check(self, scores: Given, name: str = "") -> None:
        """Refuse scores of other data, of another size, that are not finite, or that are constant, by their name."""
        scores = scores_of(scores, name)
        called = f"scores of {name or scores.method}"
        expected = (self.about["train"], self.about["queries"])
        if scores.shape != expected:
            raise InputError(
                called,
                got=f"{' × '.join(map(str, scores.shape))} numbers",
                expected=f"{expected[0]} train × {expected[1]} query, as in the bank",
            )
        theirs = scores.provenance.get("fingerprints", {})
        for name, ours in self.about["fingerprints"].items():
            if name in theirs and theirs[name] != ours:
                raise InputError(
                    called,
                    got=f"those of other data: the {DATA.get(name, name)} differ from those of the bank",
                    expected="those of the examples that the bank was retrained on, in the same order",
                )
        require_ranks(scores, called)

    def require_shapes(self, shapes: dict[str, list[int]]) -> str | None:
        """Say how a model differs in shape from those before it; None where it does not. The first one decides."""
        differs = self._differs("shapes", shapes)
        return None if differs is None else f"a model of another shape: {differs}"

    def _differs(self, key: str, shapes: Mapping[str, Any]) -> str | None:
        """Compare shapes, or what else all have alike, with those of bank.json.

        The first to come, in whatever process, writes them there.
        """
        if self.about.get(key) is None:
            with _alone(self.directory):
                path = self.directory / "bank.json"
                about = json.loads(path.read_text())
                if about.get(key) is None:
                    # An older bank.json knows nothing of observables, though the bank may have some.
                    about[key] = (self._kept_shapes() if key == "observables" else None) or shapes
                    replace_file(path, json.dumps(about))
            self.about[key] = about[key]
        for name in [*self.about[key], *shapes]:
            expected, got = self.about[key].get(name), shapes.get(name)
            if got is None:
                return f"it has no {name}, expected one of shape {expected}"
            if expected is None:
                return f"it has a {name}, expected none"
            if expected != got:
                return f"{name} is {got}, expected {expected}"
        return None

    def _pairs(self, kind: str) -> set[tuple[int, int]]:
        names = (path.stem.split("-") for path in (self.directory / kind).glob("[0-9]*-[0-9]*.*"))
        return {(int(subset), int(seed)) for subset, seed in names}

    def _path(self, kind: str, subset: int, seed: int) -> Path:
        suffix = "safetensors" if kind == "retrainings" else "json"
        return self.directory / kind / f"{subset:05d}-{seed}.{suffix}"


def require_bank(bank: Any) -> None:
    """Refuse what is no bank: the path of one, above all."""
    if not isinstance(bank, Bank):
        is_path = isinstance(bank, str | Path)
        raise InputError(
            "bank",
            got=repr(str(bank)) if is_path else f"a {type(bank).__name__}",
            expected="a Bank",
            fix=f"open it with Bank({str(bank)!r})" if is_path else "open one with Bank(path)",
        )


def _is_new(directory: Path) -> bool:
    """Whether nothing is there but what an interrupted beginning of a bank leaves."""
    for path in directory.iterdir():
        if path.name in ("retrainings", "failures") and path.is_dir():
            if any(path.iterdir()):
                return False
        elif path.name != "subsets.npy" and not any(is_leftover(path, name) for name in ("subsets.npy", "bank.json")):
            return False
    return True


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold off other processes that read bank.json to write it again; where a file system cannot, go on without."""
    descriptor = None
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(directory, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
