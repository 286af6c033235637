"""The chains of a run from where they stand to their last draw, round by round."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jostle.chains.chain import Dynamics
from jostle.chains.checkpoints import Checkpoints
from jostle.chains.observing import Observer
from jostle.chains.progress import Progress
from jostle.chains.recording import CovarianceRecorder, NoRecorder, Recorder, TraceRecorder
from jostle.chains.running import Pace, run_chains
from jostle.chains.stopping import measure, next_round, reached
from jostle.ranks import Ranks
from jostle.runs.layout import write_manifest
from jostle.runs.manifest import healthy_chains, place_of_traces
from jostle.traces.store import Traces

log = logging.getLogger("jostle")


class Rounds:
    """Rounds of draws, and what came of them in the manifest; a run that does not stop early has one.

    Rank 0 decides how long a round is and whether it was the last, and makes room for its draws before anyone writes.
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        ranks: Ranks,
        dynamics: Dynamics,
        observers: Mapping[str, Observer],
        pace: Pace,
    ) -> None:
        self._directory, self._manifest, self._ranks, self._dynamics = directory, manifest, ranks, dynamics
        self._pace, self._config = pace, dynamics.config
        self._traces: Traces | None = None
        self._recorder: Recorder
        if self._config.keep == "traces":
            self._traces = Traces(place_of_traces(directory, manifest), writable=True)
            dynamics.keeps_weights = self._traces.keeps_weights
            self._recorder = TraceRecorder(self._traces) if ranks.crew.leads else NoRecorder()
        else:
            self._recorder = CovarianceRecorder(directory / "covariance.safetensors", observers, self._config.draws)
        self._checkpoints = Checkpoints(directory / "state")
        self._checkpoints.go_on_from(manifest["seconds"]["sampling"])

    def sample(self, report: Callable[[Progress], None]) -> None:
        """Run the chains until there is no other round."""
        manifest, config = self._manifest, self._config
        remarks: list[str] = list(manifest["remarks"])
        while (planned := self._ranks.share(self._next)) is not None:
            draws, failed = planned
            gathered = self._ranks.gather(self._round(draws, failed, report))
            if not self._ranks.leads:
                continue
            failures = [failure for theirs, _ in gathered for failure in theirs]
            manifest["failed_chains"] += sorted(failures, key=lambda failure: (failure["step"], failure["chain"]))
            manifest["draws"] = draws
            manifest["seconds"]["sampling"] = self._checkpoints.seconds
            remarks += [remark for _, theirs in gathered for remark in theirs]
            if self._traces is not None and config.until and len(self._healthy):
                manifest["measured"] = measure(config, self._traces, self._healthy)
                log.info("%d draws: %s", draws, manifest["measured"])
                manifest["reached"] = reached(config, manifest["measured"])
            if draws < config.draws and not manifest.get("reached") and len(self._healthy):
                write_manifest(self._directory, manifest)
        if getattr(config.sampler, "independent", False) and config.thin > 1:
            rule, wasted = type(config.sampler).__name__, config.thin - 1
            remarks.append(
                f"every step of {rule} is a new draw, and {wasted} of {config.thin} are not looked at: use thin=1"
            )
        manifest["remarks"] = list(dict.fromkeys(remarks))

    @property
    def _healthy(self) -> np.ndarray:
        failed = {failure["chain"] for failure in self._manifest["failed_chains"]}
        return healthy_chains(self._config.chains, failed, antithetic=self._config.antithetic)

    def _next(self) -> tuple[int, list[int]] | None:
        """At how many draws the next round ends, and which chains have failed; None where there is none."""
        manifest, config = self._manifest, self._config
        draws = next_round(config, manifest["draws"], seconds=manifest["seconds"]["sampling"])
        if manifest.get("reached") or draws <= manifest["draws"] or not len(self._healthy):
            return None
        if self._traces is not None:
            self._traces.extend(config.chains, config.steps[:draws])
        return draws, [failure["chain"] for failure in manifest["failed_chains"]]

    def _round(
        self, draws: int, failed: list[int], report: Callable[[Progress], None]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Run this rank's chains to so many draws; what is recorded already is not looked at again."""
        whole = self._manifest.get("recorded", {"chains": 0, "draws": 0})
        failures: list[dict[str, Any]] = []
        remarks: list[str] = []
        own = [chain for chain in self._ranks.chains(self._config.chains, self._pace.at_once) if chain not in failed]
        for chains, first_draw in (
            ([chain for chain in own if chain < whole["chains"]], whole["draws"]),
            ([chain for chain in own if chain >= whole["chains"]], 0),
        ):
            if first_draw >= draws:
                continue
            new_failures, new_remarks = run_chains(
                self._dynamics,
                self._recorder,
                self._checkpoints,
                self._pace,
                chains=chains,
                draws=draws,
                first_draw=first_draw,
                report=report,
            )
            failures += [dataclasses.asdict(failure) for failure in new_failures]
            remarks += new_remarks
        # Of those that move a chain together, one tells.
        return (failures, remarks) if self._ranks.crew.leads else ([], [])
