"""The directory of a run: where it may be, how it is laid out, and whether one that is there is the same run."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import safetensors
import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from jostle._version import __version__
from jostle.chains import randomness
from jostle.chains.execution import Execution
from jostle.chains.observing import Observer
from jostle.chains.stopping import next_round
from jostle.chains.thermometer import how_many
from jostle.config import Config
from jostle.data.datasets import Data, fingerprint_tensors
from jostle.errors import InputError, StorageError
from jostle.files import is_leftover, replace_file, to_disk
from jostle.models.weights import MovingWeights
from jostle.runs.examples import images_of, write_examples
from jostle.runs.manifest import FORMAT, manifest_checksum, place_of_traces, read_config, read_manifest
from jostle.traces.store import Traces
from jostle.traces.stores import Place, check_url, require_free
from jostle.traces.tensor_files import read_tensors, write_tensors

log = logging.getLogger("jostle")

BEGUN = ".begun"
"""Marks a directory whose layout was begun and not finished."""

LOCK = ".lock"
"""Locked by whoever writes to the run; the lock goes with its process, the empty file stays."""

CALIBRATION = "calibration.json"
"""What was measured for a run before it began, and is not measured again."""

BESIDE = (LOCK, CALIBRATION)
"""What may be in the directory of a run that has not begun, and stays when one is begun again."""

ADDING_QUERIES = "adding queries"
"""The status of a run that has all its draws, and of these not yet the losses of queries that came later."""

KEPT_STATE_BYTES = 1 << 30
"""Where the chains of a finished run stand is kept up to this size, for those who want more draws of them; without it,
chains walk again from w* and arrive at the same place."""

METRIC = "metric.safetensors"
"""The metric of the posterior, where it has one: with it, the run can go on."""

SAYS_WHICH_QUERIES = (
    "center.safetensors",
    "examples/query.jsonl",
    "examples/query.images.npy",
    "manifest.json",
    "config.yaml",
)
"""Beside the traces. Withdrawn in this order: while the manifest has more queries, or the config, they are added."""

VISIBLE_SECONDS = 60.0
"""How long a network file system may take to show to one machine what another has written."""


def place_for(out: str | Path | None, traces: str | None = None) -> Path:
    """Where the run goes; refuses places that cannot hold it or its traces before any work is done for it."""
    directory = _directory_for(out)
    if traces is not None:
        url = check_url(traces)
        if (directory / "manifest.json").is_file():
            there = place_of_traces(directory, read_manifest(directory))
            if there != url:
                raise InputError("traces", got=f"{url} for {directory}, whose traces are in {there}", expected="those")
        elif not _begun_at(directory, url):
            require_free(url)
    return directory


def _begun_at(directory: Path, place: Place) -> bool:
    """Whether a run was begun here, and not finished being laid out, whose traces are at this place."""
    begun = directory / BEGUN
    return begun.is_file() and begun.read_text() == str(place)


def _directory_for(out: str | Path | None) -> Path:
    if out is None:
        # Kept to the end of the process, not of the returned object: arrays are read lazily.
        temporary = Path(tempfile.mkdtemp(prefix="jostle-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
    directory = Path(out).resolve()
    if directory.is_dir():
        own = any((directory / name).is_file() for name in ("manifest.json", BEGUN))
        if not own and not all(_is_beside(entry) for entry in directory.iterdir()):
            raise InputError(
                "out", got=f"{out}, which exists and holds something else", expected="a new or empty directory"
            )
        place = directory
    elif directory.exists():
        raise InputError("out", got=f"{out}, which is a file", expected="a new or empty directory")
    else:
        place = next(parent for parent in directory.parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise InputError("out", got=f"{out} under {place}, which cannot be written to", expected="another place")
    return directory


@contextlib.contextmanager
def writing(directory: Path, *, lock: bool = True) -> Iterator[None]:
    """Be the only writer of a run, and say in one line what its disk refuses; what is recorded by then is whole.

    Of several ranks the first has the lock for all of them.
    """
    try:
        if not lock:
            yield
            return
        directory.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(directory / LOCK, timeout=0, fallback_to_soft=False):
            yield
    except filelock.Timeout as error:
        raise InputError(
            "out",
            got=f"{directory}, which another process is writing to",
            expected="one writer a run",
            fix="wait for it or end it, and do the same again",
        ) from error
    except StorageError:
        raise
    except (OSError, safetensors.SafetensorError) as error:
        # The text of an error that came through another language is all there is of its number.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        reason = "no space left" if full else getattr(error, "strerror", None) or str(error).partition("\n")[0]
        fix = "make room" if full else "see that it can be written to"
        kept = (directory / "manifest.json").exists()
        then = f"what was recorded is kept: {fix}, and the same command or call goes on"
        gone = f"no run is there: {fix}, and begin again"
        raise StorageError(f"out: got {reason} in {directory}; {then if kept else gone}") from error


OTHER = {
    "weights": "a model with other weights",
    "choice of weights": "other moving weights",
    "train": "other training data",
    "query": "other queries",
    "sampling_data": "other sampling data",
    "config": "other settings",
}
"""What a run is said to be of, by the name of the fingerprint that differs."""


def differences(there: Mapping[str, Any], now: Mapping[str, Any], *, absent: str = "None") -> list[str]:
    """Which settings were others, in words."""
    before, after = _flat(there), _flat(now)
    return [
        f"{key} {before.get(key, absent)} there, {after.get(key, absent)} now"
        for key in dict.fromkeys([*after, *before])
        if before.get(key) != after.get(key)
    ]


def other_run(directory: Path, differ: Sequence[str], of: str = "other settings") -> InputError:
    """Return the refusal of a run that is not the one that is asked for."""
    return InputError(
        "out",
        got=f"{directory}, a run of {of} ({'; '.join(differ)})",
        expected="what it began with",
        fix="choose another directory, or delete this one",
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def open_run(
    directory: Path,
    fingerprints: dict[str, str],
    config: Config,
    at_center: Mapping[str, Tensor],
    tolerance: float,
    query: Data | None,
    *,
    keep_weights: bool,
) -> dict[str, Any] | None:
    """The manifest of the run that is there already, None where there is none; refuses that of another run.

    The same run with more chains, draws or queries is not another: it is extended.
    """
    if not (directory / "manifest.json").is_file():
        return None
    manifest = read_manifest(directory)
    more_queries = _has_more_queries(directory, fingerprints, config, manifest, query)
    for name in fingerprints | manifest["fingerprints"]:  # in this order, so that the same thing is named each time
        theirs, ours = manifest["fingerprints"].get(name), fingerprints.get(name)
        extended = (name == "config" and _extends(config, manifest)) or (name == "query" and more_queries)
        if theirs != ours and not extended:
            both = [f"{'none' if one is None else f'fingerprint {one}'} {when}"
                    for one, when in ((theirs, "there"), (ours, "now"))]  # fmt: skip
            changed = []
            if name == "config":
                settings, before = config.to_dict(), read_config(directory)
                changed = differences({key: before[key] for key in settings if key in before}, settings)
                _require_same_metric(directory, before, settings)
            raise other_run(directory, changed or [", ".join(both)], OTHER.get(name, f"another {name}"))
    if keep_weights and not Traces(place_of_traces(directory, manifest)).keeps_weights:
        raise InputError(
            "keep_weights",
            got=f"True for {directory}, a run begun without",
            expected="it from the first draw on",
            fix="choose another directory; queries can be added to this one all the same",
        )
    # Functions have no fingerprint; their values at w* stand for one.
    stored, _ = read_tensors(directory / "center.safetensors")
    for name, now in at_center.items():
        then = stored.get(name, torch.empty(0))
        if name == "loss on query" and (more_queries or "widening" in manifest):
            now = now[: len(then)]
        same_shape = then.shape == now.shape
        if not same_shape or (then - now.cpu()).norm() > max(1e-3, tolerance) * then.norm() + 1e-6:
            raise InputError(
                name,
                got=f"other values at w* than those of the run in {directory}",
                expected="the function that the run began with",
                fix="choose another directory, or delete this one",
            )
    return manifest


def _require_same_metric(directory: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse another metric than that of the run, which may be nowhere but in its directory."""
    before, after = (settings["posterior"].get("metric") for settings in (there, now))
    if before is not None and before != after:
        raise InputError(
            "metric",
            got=f"{'none' if after is None else f'one of fingerprint {after}'} for {directory}, a run in a metric",
            expected=f"that of fingerprint {before}",
            fix=f"call jostle.attribute with Posterior(metric=jostle.runs.layout.read_metric({str(directory)!r})) and "
            "the run's other arguments, and it goes on",
        )


def read_metric(directory: str | Path) -> Float[Tensor, " weight"] | None:
    """Return the metric of the run in a directory, as one vector; None where it has none."""
    directory = Path(directory)
    expected = read_config(directory).get("posterior", {}).get("metric")
    if expected is None:
        return None
    metric = read_tensors(directory / METRIC)[0].get("metric", torch.empty(0))
    found = fingerprint_tensors({"": metric})
    if found != expected:
        raise InputError(METRIC, got=f"fingerprint {found}", expected=f"{expected}, as config.yaml has it")
    return metric


def require_same_randomness(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse to go on with chains whose seed has another meaning now."""
    there = manifest.get("randomness", "Philox")
    if there != randomness.KIND:
        raise InputError(
            "out",
            got=f"{directory}, a run whose random numbers come from {there}",
            expected=randomness.KIND,
            fix="go on with it in the version of Jostle that began it, or choose another directory",
        )


def _has_more_queries(
    directory: Path, fingerprints: dict[str, str], config: Config, manifest: dict[str, Any], query: Data | None
) -> bool:
    """Whether the queries are those of the run that is there, and more after them."""
    theirs = manifest["fingerprints"].get("query")
    if query is None or theirs in (None, fingerprints["query"]) or config.keep != "traces":
        return False
    there = Traces(place_of_traces(directory, manifest)).columns("query").samples
    if there >= len(query) or query.part(range(there)).fingerprint() != theirs:
        return False
    if manifest["status"] != "complete":
        raise InputError(
            "query",
            got=f"{len(query) - there} more for {directory}, which is not finished",
            expected="a complete run to add queries to",
            fix="go on with what it was given before, and add them then",
        )
    return True


def _extends(config: Config, manifest: dict[str, Any]) -> bool:
    """Whether this is the run that is there, with more chains or draws."""
    there = manifest.get("planned")
    if there is None or config.chains < there["chains"] or config.draws < there["draws"]:
        return False
    # A run that stops by itself stops where its rounds end, and sums do not remember which draws are in them.
    if config.stops_early or (config.draws > there["draws"] and config.keep == "covariance"):
        return False
    return dataclasses.replace(config, **there).fingerprint() == manifest["fingerprints"]["config"]


def go_on(
    directory: Path,
    config: Config,
    source: Mapping[str, Any] | None,
    manifest: dict[str, Any],
    query: tuple[str, Observer] | None,
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Make what is there ready to go on: clear away what a crash left, and make room for what is asked for now.

    ``recorded`` in the manifest says what was complete when the run was extended, and ``widening`` which of its queries
    were there at so many draws of its chains; ``query`` is their fingerprint now, and who observes them.
    """
    for leftover in directory.rglob("*.partial"):
        leftover.unlink()
    source = source or read_config(directory).get("source")
    fingerprint, before = config.fingerprint(), manifest["fingerprints"].copy()
    if query is not None and before["query"] != query[0]:
        _require_examples(directory, examples)
        _set_aside(directory)
        columns = Traces(place_of_traces(directory, manifest)).columns("query")
        recorded = {"chains": manifest["planned"]["chains"], "draws": manifest["draws"]}
        manifest["widening"] = {"queries": columns.samples, "columns": columns.total, **recorded}
        # What names the queries comes first: whoever resumes after a crash from here on adds them.
        settings = read_config(directory) | ({"source": dict(source)} if source else {})
        replace_file(directory / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        manifest["fingerprints"]["query"] = query[0]
    if before["config"] != fingerprint:
        if manifest["status"] in ("complete", ADDING_QUERIES):
            manifest["recorded"] = manifest["planned"]
        manifest |= {"status": "sampling", "draws": 0}
    elif manifest["status"] == "complete":
        manifest["status"] = ADDING_QUERIES
    if before != manifest["fingerprints"] or before["config"] != fingerprint:
        write_manifest(directory, manifest)  # first of all, so that nobody takes what follows for a finished run
    if query is not None and "widening" in manifest:
        _make_room(directory, manifest, query[1], examples)
    _write_config(directory, config, source)
    manifest["fingerprints"]["config"] = fingerprint
    manifest["planned"] = {"chains": config.chains, "draws": config.draws}
    write_manifest(directory, manifest)


def _require_examples(directory: Path, examples: Mapping[str, Any]) -> None:
    """Refuse queries without what is shown of them, where the run has that of its first ones."""
    if "query" not in examples and (directory / "examples" / "query.jsonl").is_file():
        raise InputError("examples", got="none of the queries", expected=f"all of them: {directory} keeps those it has")


def _make_room(
    directory: Path,
    manifest: dict[str, Any],
    observer: Observer,
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Make room for more queries, after the columns that are there; done twice, it is the same."""
    old = manifest["widening"]["columns"]
    center, about = read_tensors(directory / "center.safetensors")
    now = observer.center_losses.cpu()
    center["loss on query"] = torch.cat([center["loss on query"][:old], now[old:]])
    traces = Traces(place_of_traces(directory, manifest), writable=True)
    traces.widen("query", observer.columns, center["loss on query"].numpy())
    write_tensors(directory / "center.safetensors", center, about)
    write_examples(directory, {name: shown for name, shown in examples.items() if name == "query"})


def _set_aside(directory: Path) -> None:
    """Keep copies of what will say that there are more queries, until these are observed everywhere."""
    shutil.rmtree(directory / "widening", ignore_errors=True)
    for name in filter(lambda name: (directory / name).exists(), SAYS_WHICH_QUERIES):
        copy = directory / "widening" / "before" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, copy)
        to_disk(copy)


def withdraw_queries(directory: Path, manifest: dict[str, Any]) -> None:
    """Put a run back to what it was before queries were added; cut off in this, it is one that they are added to."""
    before = directory / "widening" / "before"
    center, _ = read_tensors(before / "center.safetensors")
    traces = Traces(place_of_traces(directory, manifest), writable=True)
    columns = traces.columns("query").first(manifest["widening"]["queries"])
    traces.widen("query", columns, center["loss on query"].numpy())
    for name in SAYS_WHICH_QUERIES:
        if (before / name).exists():
            replace_file(directory / name, (before / name).read_bytes())
        else:
            (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / "widening", ignore_errors=True)


def finish_run(directory: Path, config: Config, manifest: dict[str, Any]) -> None:
    """Say that a run is complete; keep where its chains stand if that is small, and of use to whoever extends it."""
    manifest["status"] = "complete"
    write_manifest(directory, manifest)
    extensible = config.keep == "traces" and not config.stops_early
    size = sum(path.stat().st_size for path in (directory / "state").glob("*"))
    if not extensible or size > KEPT_STATE_BYTES:
        shutil.rmtree(directory / "state", ignore_errors=True)


def _write_config(directory: Path, config: Config, source: Mapping[str, Any] | None) -> None:
    settings = config.to_dict() | ({"source": dict(source)} if source else {})
    replace_file(directory / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def new_manifest(
    fingerprints: dict[str, str], config: Config, moving: MovingWeights, device: torch.device
) -> dict[str, Any]:
    """Return what is known of a run before its first step."""
    return {
        "format": FORMAT,
        "jostle": __version__,
        "status": "sampling",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "platform": platform.platform(),
        "device": str(device),
        "randomness": randomness.KIND,
        "fingerprints": {"config": config.fingerprint(), **fingerprints},
        "planned": {"chains": config.chains, "draws": config.draws},
        "moving_weights": moving.total,
        "moving_parameters": list(moving.names),
        "draws": 0,
        "seconds": {"sampling": 0.0},
        "failed_chains": [],
        "remarks": [],
    }


def create_run(
    directory: Path,
    config: Config,
    source: Mapping[str, Any] | None,
    manifest: dict[str, Any],
    observers: Mapping[str, Observer],
    at_center: Mapping[str, Tensor],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    weights: tuple[int, np.dtype] | None,
) -> None:
    """Lay out a run; the manifest is written last, and a start that was cut off is cleared away by the next one."""
    for name, shown in examples.items():
        images_of(name, shown)  # refused before anything is written
    begun, place = directory / BEGUN, place_of_traces(directory, manifest)
    overwrite = _begun_at(directory, place)
    try:
        if begun.exists():
            _clear(directory)
        begun.write_text(str(place))
        _write_config(directory, config, source)
        write_examples(directory, examples)
        write_tensors(directory / "center.safetensors", at_center, {})
        if isinstance(config.posterior.metric, Tensor):
            write_tensors(directory / METRIC, {"metric": config.posterior.metric}, {})
        if config.keep == "traces":
            dtype = np.dtype(str(next(iter(observers.values())).center_losses.dtype).removeprefix("torch."))
            traces = Traces.create(
                place,
                chains=config.chains,
                steps=config.steps[: next_round(config, 0)],
                dtype=dtype,
                sets={name: observer.columns for name, observer in observers.items()},
                observables={name: len(at_center[f"observable {name}"]) for name in config.observables},
                weights=weights,
                temperature=how_many(config) > 0,
                overwrite=overwrite,
            )
            for name, observer in observers.items():
                traces.record_center(name, observer.center_losses.cpu().numpy())
        write_manifest(directory, manifest)
        begun.unlink()
    except Exception as error:
        _clear(directory)
        if isinstance(place, str) and not isinstance(error, InputError):
            begun.write_text(str(place))  # what was begun there is the next start's to overwrite
        raise


def await_run(directory: Path, rank: int) -> None:
    """Wait until a run that rank 0 has laid out is seen here; refuse a place that other ranks do not see."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (directory / "manifest.json").is_file():
        if time.monotonic() > deadline:
            raise InputError(
                "out",
                got=f"{directory}, where rank {rank} on {platform.node()} does not see what rank 0 has written",
                expected="a directory on a file system that all ranks share",
            )
        time.sleep(0.1)


def _is_beside(entry: Path) -> bool:
    return entry.name in BESIDE or is_leftover(entry, CALIBRATION)


def _clear(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif not _is_beside(entry):
            entry.unlink()


def execution_of(directory: Path) -> Execution | None:
    """How the unfinished run in a directory is carried out, so that it goes on in the same way."""
    if not (directory / "manifest.json").is_file():
        return None
    chosen = read_manifest(directory).get("execution")
    if chosen is None:
        return None
    known = {field.name for field in dataclasses.fields(Execution)}
    if chosen.keys() - known:
        log.warning("%s runs in a way of another version of Jostle: last digits may differ", directory)
    return Execution(**{name: value for name, value in chosen.items() if name in known})


def url_of_traces(directory: Path) -> str | None:
    """Where the traces of the run in a directory are, if that is elsewhere."""
    if not (directory / "manifest.json").is_file():
        return None
    place = place_of_traces(directory, read_manifest(directory))
    return place if isinstance(place, str) else None


def thin_of(directory: Path) -> int:
    """The steps between draws of the run in a directory, whoever chose them; 1 where there is none yet."""
    return read_config(directory)["thin"] if (directory / "manifest.json").is_file() else 1


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Replace a run's manifest, whole or not at all."""
    replace_file(
        directory / "manifest.json", json.dumps(manifest | {"checksum": manifest_checksum(manifest)}, indent=2)
    )
