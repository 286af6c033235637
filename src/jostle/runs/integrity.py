"""`jostle check`: whether everything that a run directory should hold is there, and is what was written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from jostle.chains.checkpoints import Checkpoints
from jostle.chains.recording import load_sums
from jostle.errors import InputError, StorageError
from jostle.runs.layout import ADDING_QUERIES, read_metric
from jostle.runs.manifest import check_config, place_of_traces, read_config, read_manifest
from jostle.runs.run import Run
from jostle.traces.store import Traces
from jostle.traces.tensor_files import read_tensors

Kind = Literal["damaged", "unfinished", "failed chain"]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def require_undamaged(directory: Path) -> None:
    """Refuse a run that is damaged before anything is added to it; kept weights are looked at where they are read."""
    damaged = [finding.what for finding in examine(directory, kept_weights=False) if finding.kind == "damaged"]
    if damaged:
        raise InputError("out", got=f"{directory}, which is damaged", expected="a whole run to add to", fix=damaged[0])


def so_far(run: Run) -> str:
    """How many draws there are of a run that is not finished, at its last checkpoint, and of how many."""
    chains, draws, whole = run.config["chains"], run.config["draws"], run.manifest.get("recorded", {})
    if run.manifest["status"] == ADDING_QUERIES:
        return f"all {chains} × {run.draws} draws, and not yet all queries at them"
    checkpoints, there = Checkpoints(run.directory / "state"), 0
    for chain, step in checkpoints.steps(range(chains)).items():
        done = checkpoints.draws(chain)
        if done is None:  # an older version's: as many as are before its step
            done = min(draws, max(0, -((run.config["burn_in"] - step) // run.config["thin"])))
        there += max(done, whole.get("draws", 0) if chain < whole.get("chains", 0) else 0)
    most = "at most " if run.config.get("until") or run.config.get("minutes") else ""
    return f"{there} of {most}{chains} × {draws} draws"


def examine(directory: Path, *, kept_weights: bool = True) -> list[Finding]:
    """Read a whole run, every byte of it, and return what is wrong; an empty list where all is well.

    ``kept_weights`` may be many times all the rest.

    Raises:
        InputError: there is no run in this directory.
        StorageError: its traces are elsewhere, and cannot be reached.
    """
    if not (directory / "manifest.json").is_file():
        read_manifest(directory)
    findings: list[Finding] = []

    def attempt(check: Any, *arguments: Any) -> Any:
        """What a check returns; what it says where it fails becomes a finding."""
        try:
            return check(*arguments)
        except StorageError:
            raise
        except InputError as error:
            findings.append(Finding("damaged", str(error)))
        except Exception as error:  # whatever else damage may lead to is damage, too
            findings.append(Finding("damaged", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        return None

    manifest, config = attempt(read_manifest, directory), attempt(read_config, directory)
    if manifest is None or config is None:
        return findings
    attempt(check_config, config, manifest)
    complete = manifest["status"] == "complete"
    if not complete:
        there = attempt(lambda: so_far(Run(directory)))
        if there is not None:
            findings.append(Finding("unfinished", f"{there}; jostle resume {directory} goes on"))
    for failure in manifest["failed_chains"]:
        where = f"chain {failure['chain']} at step {failure.get('step')}"
        findings.append(Finding("failed chain", f"{where}: {failure.get('reason')}"))
    center = attempt(_check_tensors, directory / "center.safetensors")
    attempt(read_metric, directory)
    if config["keep"] == "traces":
        traces = attempt(lambda: Traces(place_of_traces(directory, manifest)))
        for name in [] if traces is None else attempt(lambda: traces.arrays) or []:
            if name == "weights" and not kept_weights:
                continue
            whole = complete and name != "temperature"  # which goes unknown where memory is short
            attempt(_check_trace, traces, name, config, manifest, Run(directory).healthy_chains, whole)
        if traces is not None and center is not None and "widening" not in manifest:  # both are being widened
            attempt(_check_names, traces, center)
            for name in traces.sets:
                attempt(_check_center, traces, name, center)
    elif complete:
        attempt(_check_sums, directory / "covariance.safetensors", config, manifest)
    for path in sorted(path for place in ("state", "widening") for path in (directory / place).glob("*.safetensors")):
        attempt(_check_tensors, path)
    for path in sorted((directory / "examples").glob("*.jsonl")):
        attempt(_check_examples, path)
    return findings


def _damaged(what: str, got: str, expected: str) -> InputError:
    return InputError(what, got=got, expected=expected)


def _check_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors, _ = read_tensors(path)
    for name, value in tensors.items():
        # A chain that failed may stand at a checkpoint that is not finite: it is not used.
        if path.parent.name not in ("state", "widening") and not torch.isfinite(value).all():
            raise _damaged(str(path), f"{name} with values that are not finite", "finite values")
    return tensors


def _check_trace(
    traces: Traces,
    name: str,
    config: dict[str, Any],
    manifest: dict[str, Any],
    chains: np.ndarray,
    complete: bool,
) -> None:
    trace = traces.trace(name)
    damaged = trace.damaged_chunks()
    if damaged:
        raise _damaged("traces", f"damaged chunks {', '.join(damaged)}", "chunks with their checksums")
    if not complete:
        return
    expected = (config["chains"], manifest["draws"])
    if trace.shape[:2] != expected:
        raise _damaged(name, f"{trace.shape[:2]} chains and draws", f"{expected}")
    missing = trace.missing_chunks(chains)
    if missing:
        raise _damaged("traces", f"no {', '.join(missing)}", "every chunk")
    for chain in chains:
        for first in range(0, trace.shape[1], trace.chunks[1]):
            finite = np.isfinite(trace[int(chain), first : first + trace.chunks[1]]).all(1)
            if not finite.all():
                raise _damaged(
                    name, f"chain {chain}, draw {first + int(np.argmin(finite))}, not finite", "finite values"
                )


def _check_names(traces: Traces, center: dict[str, torch.Tensor]) -> None:
    """Everything that was evaluated at w* and is observed has a trace."""
    prefixes = {"loss on ": "{}/losses", "observable ": "observables/{}"}
    wanted = [
        path.format(name.removeprefix(prefix))
        for name in center
        for prefix, path in prefixes.items()
        if name.startswith(prefix)
    ]
    missing = sorted(set(wanted) - set(traces.arrays))
    if missing:
        raise _damaged("traces", f"no {', '.join(missing)}", "a trace of everything that is observed")


def _check_center(traces: Traces, name: str, center: dict[str, torch.Tensor]) -> None:
    for axis in ("chain", "step"):
        traces.trace(f"{name}/{axis}")[:]
    recorded, expected = traces.center_losses(name), center[f"loss on {name}"].numpy()
    if recorded.shape != expected.shape or not np.array_equal(recorded, expected):
        raise _damaged(f"{name}/center_losses", "other losses at w* than those in center.safetensors", "the same")
    columns = traces.columns(name)
    if columns.total != traces.losses(name).shape[2] or columns.total != len(expected):
        raise _damaged(name, f"{traces.losses(name).shape[2]} columns", f"{columns.total}")


def _check_sums(path: Path, config: dict[str, Any], manifest: dict[str, Any]) -> None:
    _check_tensors(path)
    _, finished = load_sums(path)
    failed = {failure["chain"] for failure in manifest["failed_chains"]}
    expected = set(range(config["chains"])) - failed
    if set(finished) != expected:
        raise _damaged(path.name, f"chains {sorted(finished)}", f"{sorted(expected)}")


def _check_examples(path: Path) -> None:
    try:
        lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    except ValueError as error:
        raise _damaged(str(path), f"a line that is not JSON ({error})", "one object a line") from error
    if not all(isinstance(line, dict) for line in lines):
        raise _damaged(str(path), "a line that is no object", "one object a line")
