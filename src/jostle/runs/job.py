"""One call of `attribute`, step by step: prepare, plan, open, choose, lay out, sample, finish."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jostle.chains.chain import full_gradient
from jostle.chains.execution import Execution, choose, make_ready, tell_of_contention
from jostle.chains.observing import Observer
from jostle.chains.progress import progress_bar, telling
from jostle.chains.running import Pace
from jostle.chains.thermometer import Thermometer, how_many
from jostle.chains.thinning import PROBED_EXAMPLES, USUAL_THIN, Thinning, choose_thin
from jostle.config import Config, require_whole
from jostle.models.in_place import InPlace
from jostle.ranks import EnoughError, Ranks
from jostle.runs.examples import write_examples
from jostle.runs.integrity import require_undamaged
from jostle.runs.layout import (
    ADDING_QUERIES,
    await_run,
    create_run,
    execution_of,
    finish_run,
    go_on,
    new_manifest,
    open_run,
    require_same_randomness,
    url_of_traces,
)
from jostle.runs.manifest import place_of_traces
from jostle.runs.planning import describe_plan, make_plan
from jostle.runs.preparing import DataSets, Functions, Prepared, check_ranks, check_sharded, prepare
from jostle.runs.rounds import Rounds
from jostle.runs.widening import try_widening, widen
from jostle.traces.store import Traces
from jostle.traces.stores import check_url

log = logging.getLogger("jostle")


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How the run is to be carried out, as `attribute` was told; none of it changes a number beyond rounding."""

    observation_batch_size: int | None
    chains_at_once: int | None
    shards: int
    compile: bool | None
    checkpoint_seconds: float
    progress: bool

    def check(self, config: Config) -> None:
        """Refuse what cannot be."""
        for name in ("observation_batch_size", "chains_at_once", "shards"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), at_least=1)
        if self.shards > 1:
            check_sharded(config, chains_at_once=self.chains_at_once, compile=self.compile)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept beside losses, and where: as `attribute` was told."""

    traces: str | None
    weights: bool
    source: Mapping[str, Any] | None
    examples: Mapping[str, Sequence[Mapping[str, Any]]]


class Job:
    """The steps of one call, taken in the order in which they stand here; each leaves what the next ones need.

    Where there are several ranks each has a job, rank 0 decides and alone writes to the directory itself.

    Args:
        directory: of the run.
        config: what is sampled.
        functions: what is evaluated.
        data: what it is evaluated on.
        in_place: the model.
        ranks: the processes that share the run.
        fingerprints: of the model's weights.
        manner: how it is carried out.
        kept: what is kept.
        pilot: whether one is to choose the steps between draws.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        functions: Functions,
        data: DataSets,
        in_place: InPlace,
        ranks: Ranks,
        *,
        fingerprints: Mapping[str, str],
        manner: Manner,
        kept: Kept,
        pilot: bool,
    ) -> None:
        self._directory, self._config, self._pilot = directory, config, pilot
        self._functions, self._data, self._in_place, self._ranks = functions, data, in_place, ranks
        self._manner, self._kept = manner, kept
        self._fingerprints = dict(fingerprints)
        self._queries = data.observed.get("query")

    def prepare(self) -> None:
        """Evaluate everything at w*; as the run that is there does it, if there is one."""
        before = self._shared(lambda: execution_of(self._directory))
        if self._manner.shards > 1 and before:
            before = dataclasses.replace(before, chains_at_once=1, compiled=False, shares_passes=False)
        sizes = dict.fromkeys(self._data.observed, self._manner.observation_batch_size)
        most = before.chains_at_once if before else -(-self._config.chains // self._ranks.crews)

        def ready(batch_sizes: Mapping[str, int | None]) -> Prepared:
            return prepare(
                self._in_place,
                self._config,
                self._functions,
                self._data,
                batch_sizes=batch_sizes,
                chains_at_once=1 if self._manner.shards > 1 else self._manner.chains_at_once,
                most_at_once=most,
                threads=before.threads if before else torch.get_num_threads(),
            )

        with telling(self._shown) as tell:
            tell("observing every example at w*")
            # Rank 0 is ready first, since the others observe in batches of the sizes that it found.
            prepared = ready(before.batch_sizes if before else sizes) if self._ranks.first_crew else None
            found = self._ranks.share(lambda: prepared.batch_sizes if prepared else {})
            self._execution, self._prepared = before, prepared or ready(found)
            self._fingerprints |= self._data.fingerprints()

    @property
    def _shown(self) -> bool:
        """Whether this process says how far it has come."""
        return self._manner.progress and self._ranks.leads

    @property
    def _known(self) -> dict[str, str]:
        """All that a run is recognized by."""
        return {"config": self._config.fingerprint(), **self._fingerprints}

    def plan(self, dry_run: Callable[[list[str]], None] | None) -> None:
        """Refuse what does not fit and ranks that do not agree; tell whoever asks what the run will take."""
        plan = make_plan(
            self._config,
            self._prepared,
            self._directory,
            pilot=self._pilot,
            crews=self._ranks.crews,
            keep_weights=self._kept.weights,
            elsewhere=url_of_traces(self._directory) or self._kept.traces,
        )
        plan.check()
        check_ranks(self._ranks, self._known, self._prepared.at_center, self._in_place.tolerance)
        if dry_run is not None:
            self._control()  # it times some steps
            try:
                dry_run(describe_plan(plan, self._prepared))
            except Exception as error:
                raise EnoughError from error

    def open(self) -> bool:
        """Read the manifest of the run that is there, if it is this one; return whether anything is left to do."""

        def opened() -> dict[str, Any] | None:
            manifest = open_run(
                self._directory,
                self._known,
                self._config,
                self._prepared.at_center,
                self._in_place.tolerance,
                self._queries,
                keep_weights=self._kept.weights,
            )
            if manifest is not None and (manifest["status"] == "sampling" or "config" in self._changes(manifest)):
                require_same_randomness(self._directory, manifest)
            # One that was cut off while it was made ready for more is between two configs, which is no damage.
            if manifest is not None and manifest["status"] == "complete" and self._changes(manifest):
                require_undamaged(self._directory)
            if manifest is not None:
                self._keep_examples(manifest)
            return manifest

        self._manifest = self._ranks.share(opened)
        return self._manifest is None or self._manifest["status"] != "complete" or bool(self._changes(self._manifest))

    def _keep_examples(self, manifest: dict[str, Any]) -> None:
        """What there is to show may come after the draws, which do not depend on it."""
        missing = {
            name: shown
            for name, shown in self._kept.examples.items()
            if name not in self._changes(manifest) and not (self._directory / "examples" / f"{name}.jsonl").is_file()
        }
        write_examples(self._directory, missing)

    def _changes(self, manifest: dict[str, Any]) -> list[str]:
        """What of a run is more now than what is there: its config, with more chains or draws, or its queries."""
        return [name for name, ours in self._known.items() if manifest["fingerprints"].get(name) != ours]

    def choose(self) -> None:
        """Choose how the chains run, unless that was done when the run began, and make them ready."""
        prepared = self._prepared
        # Before anything is compiled, so that a resumed run has the same one to the last bit.
        self._control()
        if self._in_place.device.type == "cpu" and self._ranks.leads:
            tell_of_contention()
        with telling(self._shown) as tell:
            tell("trying which way the chains run fastest")
            self._execution = self._execution or self._shared(self._chosen)
        self._dynamics = prepared.way(self._execution)
        if self._dynamics is prepared.alone:  # which may be asked of a run that began with several side by side
            self._execution.chains_at_once = 1
        make_ready(self._execution, self._dynamics, self._in_place)

    def _control(self) -> None:
        """Take the gradient at w* that steps need, once."""
        alone, loss, data = self._prepared.alone, self._functions.driving_loss, self._data.drawn_from
        if alone.needs_center_gradient and alone.center_gradient is None:
            self._prepared.control(full_gradient(self._in_place, loss, data, self._config.batch_size))

    def _chosen(self) -> Execution:
        """As asked, or as is quickest."""
        config, prepared, manner = self._config, self._prepared, self._manner
        if self._pilot:  # which comes after this
            config = dataclasses.replace(config, thin=USUAL_THIN)
        if self._in_place.crew.count > 1:
            execution = Execution()
        elif manner.chains_at_once is not None and prepared.together is not None:
            execution = Execution(chains_at_once=prepared.at_once)
        else:
            execution = choose(
                config,
                prepared.alone,
                prepared.together,
                prepared.spread,
                at_once=prepared.at_once,
                compile=manner.compile,
                interrupted=self._ranks.interrupted,
            )
        execution.batch_sizes = prepared.batch_sizes
        return execution

    def lay_out(self, interrupted: Callable[[], bool]) -> None:
        """Lay out a new run, or make the one that is there ready to go on."""
        if self._manifest is None:
            self._begin(interrupted)
        else:
            self._go_on(self._manifest)
        self._manifest = self._ranks.share(lambda: self._manifest)
        await_run(self._directory, self._ranks.rank)
        self._ranks.laid_out = True
        groups = -(-self._config.chains // self._execution.chains_at_once)
        if self._ranks.leads and groups < self._ranks.crews:
            idle = (self._ranks.crews - groups) * self._manner.shards
            log.warning("%d of %d ranks have no chain to run", idle, self._ranks.count)

    def _begin(self, interrupted: Callable[[], bool]) -> None:
        thinning = self._thinning(interrupted) if self._pilot and self._ranks.first_crew else None
        thin = self._ranks.share(lambda: thinning.thin if thinning else self._config.thin)
        config = self._config = self._dynamics.config = dataclasses.replace(self._config, thin=thin)
        moving, functions, kept = self._in_place.moving.whole, self._functions, self._kept
        scale = config.posterior.n_beta / len(self._data.drawn_from)
        self._manifest = new_manifest(self._fingerprints, config, moving, self._in_place.device) | {
            # The potential holds nβ/n of each example's loss, if what drives the chain is what is recorded.
            "scale": None if functions.potential_loss else scale,
            "execution": self._execution.to_dict(),
            "thinning": thinning and dataclasses.asdict(thinning),
            **({} if kept.traces is None else {"traces": check_url(kept.traces)}),
        }
        if self._ranks.leads:
            weights = (moving.total, np.dtype(str(moving.dtype).removeprefix("torch.")))
            create_run(
                self._directory,
                config,
                kept.source,
                self._manifest,
                self._prepared.observers,
                self._prepared.at_center,
                kept.examples,
                weights if kept.weights else None,
            )

    def _thinning(self, interrupted: Callable[[], bool]) -> Thinning:
        """A pilot's choice of the steps between draws."""
        probes = {
            name: Observer(self._in_place, self._functions.loss, self._data.observed[name], size, most=PROBED_EXAMPLES)
            for name, size in self._execution.batch_sizes.items()
        }
        at_once = self._execution.chains_at_once
        with telling(self._shown) as tell:
            return choose_thin(self._dynamics, probes, at_once=at_once, interrupted=interrupted, tell=tell)

    def _go_on(self, manifest: dict[str, Any]) -> None:
        if "query" in self._changes(manifest) and self._ranks.first_crew:
            train, at_once = self._prepared.observers["train"], self._execution.chains_at_once
            try_widening(self._directory, manifest, self._dynamics, train, at_once=at_once)

        def continued() -> dict[str, Any]:
            observers = self._prepared.observers
            asked = None if self._queries is None else (self._fingerprints["query"], observers["query"])
            go_on(self._directory, self._config, self._kept.source, manifest, asked, self._kept.examples)
            return manifest

        self._manifest = self._ranks.share(continued)

    def sample(self, interrupted: Callable[[], bool]) -> None:
        """Observe queries that were added at the draws that are there; then go on to the last draw."""
        manifest, ranks, shown = self._manifest, self._ranks, self._shown
        assert manifest is not None
        pace = Pace(
            at_once=self._execution.chains_at_once,
            checkpoint_seconds=self._manner.checkpoint_seconds,
            interrupted=interrupted,
        )
        if "widening" in manifest:
            assert self._queries is not None
            added = self._queries.part(range(manifest["widening"]["queries"], len(self._queries)))
            size = self._prepared.observers["query"].batch_size
            observer = Observer(self._in_place, self._functions.loss, added, size)
            train = self._prepared.observers["train"]
            widen(self._directory, manifest, ranks, self._dynamics, observer, train, pace=pace, shown=shown)
        if manifest["status"] != ADDING_QUERIES:
            observers = self._prepared.observers
            own = ranks.chains(self._config.chains, pace.at_once)
            self._dynamics.thermometer = self._thermometer(manifest)
            with progress_bar(shown, len(own) * self._config.steps[-1], observers) as report:
                Rounds(self._directory, manifest, ranks, self._dynamics, observers, pace).sample(report)

    def _thermometer(self, manifest: Mapping[str, Any]) -> Thermometer | None:
        """One for the chains of this run; None where it keeps no temperatures."""
        config = self._config
        if config.keep == "traces" and not Traces(place_of_traces(self._directory, manifest)).keeps_temperature:
            return None  # it was begun shorter, or by a version without
        with telling(self._shown) as tell:
            tell("looking for the directions in which chains would be heated")
            try:
                return self._prepared.alone.new_thermometer(how_many(config))
            except torch.OutOfMemoryError:
                if self._in_place.crew.count > 1:  # the others would wait for this one
                    raise
                log.warning("no memory is left to measure the temperature of the chains, which goes unknown")
        return None

    def finish(self, prepared_in: float) -> None:
        """Say that the run is complete."""
        if self._ranks.leads:
            assert self._manifest is not None
            self._manifest["seconds"]["preparing"] = prepared_in
            finish_run(self._directory, self._config, self._manifest)

    def _shared(self, choose: Callable[[], Execution | None]) -> Any:
        """What rank 0 has or chooses of how to run, on every rank."""

        def plain() -> dict[str, Any] | None:
            chosen = choose()
            return chosen and chosen.to_dict()

        chosen = self._ranks.share(plain)
        return chosen and Execution(**chosen)
