"""`attribute`: checks what it was given, lays out the run's directory, and samples; resumes what was interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from jostle.chains import (
    Checkpoints,
    CovarianceRecorder,
    Dynamics,
    NoRecorder,
    Progress,
    Recorder,
    TraceRecorder,
    full_gradient,
    run_chains,
)
from jostle.config import Config, Criterion, Keep, Precision, describe, require_whole
from jostle.data import Collate, fingerprint_tensors, fingerprint_text
from jostle.errors import ChainFailedWarning, ChainsFailedError, InputError, SamplerWarning
from jostle.execution import Execution, choose
from jostle.execution import prepare as make_ready
from jostle.float8 import Float8, require_float8
from jostle.functional import Observable, eval_mode
from jostle.in_place import InPlace
from jostle.layout import (
    ADDING_QUERIES,
    await_run,
    create_run,
    execution_of,
    finish_run,
    go_on,
    new_manifest,
    open_run,
    place_for,
    thin_of,
    url_of_traces,
    write_manifest,
    writing,
)
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.observing import Observer
from jostle.planning import describe_plan, make_plan
from jostle.posterior import Posterior
from jostle.preparing import DataSets, Functions, Prepared, check_examples, check_kinds, check_sharded, prepare
from jostle.ranks import BEAT_SECONDS, Crew, EnoughError, Ranks
from jostle.replaying import Replay, try_replay
from jostle.run import Run, healthy_chains, place_of_traces
from jostle.samplers import SGLD, Sampler
from jostle.stopping import measure, next_round, reached
from jostle.stores import check_url
from jostle.thinning import PROBED_EXAMPLES, choose_thin
from jostle.traces import Traces
from jostle.weights import MovingWeights

log = logging.getLogger("jostle")

SECONDS_BETWEEN_LINES = 60.0
"""How often a log is told of progress."""


def attribute(
    model: nn.Module,
    train: Any,
    query: Any = None,
    *,
    sampling_data: Any = None,
    loss: Loss | None = None,
    potential_loss: Loss | None = None,
    observables: Mapping[str, Observable] | None = None,
    posterior: Posterior | None = None,
    sampler: Sampler | None = None,
    chains: int = 4,
    draws: int = 100,
    burn_in: int = 0,
    thin: int | Literal["auto"] = 10,
    batch_size: int = 1024,
    control_variates: bool = False,
    antithetic: bool = False,
    until: Mapping[Criterion, float] | None = None,
    minutes: float | None = None,
    out: str | Path | None = None,
    traces: str | None = None,
    seed: int = 0,
    keep: Keep = "traces",
    keep_weights: bool = False,
    collate: Collate | None = None,
    observation_batch_size: int | None = None,
    chains_at_once: int | None = None,
    shards: int = 1,
    precision: Precision = "model",
    compile: bool | None = None,
    checkpoint_seconds: float = 60.0,
    progress: bool = True,
    source: Mapping[str, Any] | None = None,
    examples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    dry_run: Callable[[list[str]], None] | None = None,
) -> Run:
    """Sample weights around a checkpoint, and record every example's loss at each draw.

    The model is left as it was: its own parameters are w*. Everything is evaluated in eval mode, so dropout is off and
    batch statistics are frozen. If ``out`` holds an unfinished run of the same model, data and settings, it goes on
    where it stood; if it holds the finished one, that is returned; if it holds the same with fewer chains or draws, or
    with only the first of the queries, these are kept and the rest is added.

    Under torchrun, or in a process group of torch.distributed, every rank makes this call, and the chains are spread
    over the ranks (docs/many-gpus.md).

    Args:
        model: the trained model, at w*, on the device where sampling is to run.
        train: the training examples whose influence is asked for; observed at every draw. A data set, a list of
            samples, or a tuple of tensors.
        query: the examples on which influence is measured; observed at every draw.
        sampling_data: what minibatch gradients are drawn from. Default: ``train``. The paper samples with all n
            examples while it scores a subset.
        loss: what is recorded: ``f(model, batch) -> (B,)`` or ``(B, S)``. Default: ``losses.classification()``.
        potential_loss: what drives the chain, where it differs from what is recorded (label smoothing, weighting).
        observables: any other φ: ``{"name": f(model) -> (p,)}``.
        posterior: nβ, γ, and which weights move. Default: ``Posterior(n_beta=200, localization=1e4)``.
        sampler: the update rule and its step size. Default: ``SGLD(step_size=1e-5)``.
        chains: C, the number of chains.
        draws: T, the number of draws from each chain; the most there may be where ``until`` or ``minutes`` is given.
        burn_in: steps before the first draw. Chains start at w*, and leave it within a few times 2/(εγ) steps.
        thin: steps between draws. Consecutive steps are nearly copies of each other, and a step costs far less than
            observing every example: raise this before ``draws``. ``"auto"`` chooses what gives the most effective draws
            a second, by a short pilot (see `jostle.thinning`); the choice is kept with the run.
        batch_size: m, the size of a minibatch; the whole of the sampling data where that is smaller.
        control_variates: take from every minibatch gradient what it is at w*, and add the whole data's there. That is
            two gradients a step and one pass over the sampling data beforehand, and leaves the less of the minibatches'
            noise the closer the draws stay to w*.
        antithetic: chains are mirrored pairs: 2k + 1 has the minibatches of 2k, and its noise with the opposite sign.
            ``run.influence(part="odd")`` is then the first-order part of the influence; no more scores a second.
        until: stop at the first round in which all of these hold: ``{"ess": 400}``, so many effective draws in all;
            ``{"error": 0.05}``, so small a standard error (root mean square) of each query's ten strongest normalized
            scores. The same draw whenever it is asked for.
        minutes: stop when they are over, but not before the first 20 draws. Depends on the machine.
        out: the directory of the run. Default: a temporary one that goes with the process.
        traces: the URL of a store for the traces (``"s3://bucket/prefix"``), instead of the run's directory, where all
            the rest stays. Any that fsspec has the package for; credentials are those of the environment.
        seed: the only source of randomness.
        keep: ``"traces"`` (everything can be asked of them later) or ``"covariance"`` (train × query alone, for
            memory that does not grow with draws; per-token losses are averaged over their sequence).
        keep_weights: also keep the moving weights of every draw, so that queries can be added to the run later without
            the chains walking again; takes their size on disk for each draw of each chain.
        collate: makes a batch of a list of samples.
        observation_batch_size: examples in one forward pass of an observation; does not change the numbers. Default:
            on a GPU, grown until it no longer pays.
        chains_at_once: how many chains move side by side; does not change the numbers. Default: chosen by size.
        shards: over how many ranks each model is spread (FSDP2), where no GPU has room for it; does not change the
            numbers. The model stays whole where it is passed, in the memory of the host, say.
        precision: ``"model"`` computes in the precision of the model's own weights; ``"bfloat16"`` has matrix products
            in bfloat16 (autocast), which a GPU does many times faster; ``"float8"`` observes with linear layers in
            float8 besides, on GPUs that have it, and ``"float8-emulated"`` rounds like it anywhere, slowly
            (docs/speed.md has what it does to scores). Chains, losses and scores are float32 all the same.
        compile: whether to compile the model with `torch.compile`; changes the numbers by rounding. Default: on a GPU,
            where the run is much longer than compiling takes.
        checkpoint_seconds: the least time between two checkpoints; 0 checkpoints at every step.
        progress: show a progress bar where stderr is a terminal or a notebook, and a line a minute elsewhere.
        source: where model and data came from, kept in ``config.yaml`` for whoever runs it again.
        examples: what to show of the ``"train"`` and ``"query"`` examples (texts, tokens, labels), kept in
            ``examples/``.
        dry_run: is told the plan, a line for each part of it, after a few timed steps and before anything is written;
            whoever wants no more than that raises from it.

    Returns:
        The finished run.

    Raises:
        InputError: something passed cannot be used. Nothing has been written then.
        ChainsFailedError: every chain left the finite numbers.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint; call again with the same arguments to go on.
        StorageError: the directory cannot be written to; what was recorded is kept, and the same call goes on.
        RankLostError: another rank is gone, after a checkpoint; the same holds.
    """
    check_kinds(model, loss, potential_loss, posterior, sampler)
    if keep == "covariance" and traces is not None:
        raise InputError("traces", got="keep='covariance', which keeps none", expected="keep='traces'")
    directory = place_for(out, traces)
    sampler = sampler or SGLD(step_size=1e-5)
    pilot = thin == "auto" and not getattr(sampler, "independent", False)
    functions = Functions(
        loss=loss or classification_loss(), potential_loss=potential_loss, observables=dict(observables or {})
    )
    config = Config(
        posterior=posterior or Posterior(n_beta=200.0, localization=1e4),
        sampler=sampler,
        loss=describe(functions.loss),
        potential_loss=describe(functions.driving_loss),
        observables=tuple(functions.observables),
        chains=chains,
        draws=draws,
        burn_in=burn_in,
        thin=(thin_of(directory) if pilot else 1) if thin == "auto" else thin,
        batch_size=batch_size,
        keep=keep,
        seed=seed,
        precision=precision,
        control_variates=control_variates,
        antithetic=antithetic,
        until=until,
        minutes=minutes,
    )
    if query is None and not observables:
        raise InputError("query", got="neither a query set nor observables", expected="something to be influenced")
    if keep == "covariance" and query is None:
        raise InputError("keep", got="'covariance' without a query set", expected="a query set, or keep='traces'")
    if keep == "covariance" and keep_weights:
        raise InputError("keep_weights", got="keep='covariance', which keeps no draws", expected="keep='traces'")
    if observation_batch_size is not None:
        require_whole("observation_batch_size", observation_batch_size, at_least=1)
    if chains_at_once is not None:
        require_whole("chains_at_once", chains_at_once, at_least=1)
    require_whole("shards", shards, at_least=1)
    if shards > 1:
        check_sharded(config, chains_at_once=chains_at_once, compile=compile)
    began = time.perf_counter()
    moving = MovingWeights(model, config.posterior.weights)
    fingerprints = {
        "weights": fingerprint_tensors(dict(model.state_dict())),
        "choice of weights": fingerprint_text(" ".join(moving.names)),
    }
    with (
        _unwrapping_enough(),
        Ranks(shards) as ranks,
        ranks.watching_the_crew(),
        eval_mode(model),
        _functional(model, moving, ranks.crew, precision) as in_place,
    ):
        if ranks.count > 1 and (out is None or keep == "covariance"):
            got = "no place that all ranks see" if out is None else "keep='covariance'"
            expected = "out=" if out is None else "keep='traces'"
            raise InputError("ranks", got=f"{ranks.count} with {got}", expected=expected)
        data = DataSets.of(train, query, sampling_data, collate=collate, device=in_place.device)
        check_examples(examples or {}, data.observed)
        execution = _shared(ranks, lambda: execution_of(directory))
        if shards > 1 and execution:
            execution = dataclasses.replace(execution, chains_at_once=1, compiled=False)
        batch_sizes = execution.batch_sizes if execution else dict.fromkeys(data.observed, observation_batch_size)

        def ready(batch_sizes: Mapping[str, int | None]) -> Prepared:
            most = execution.chains_at_once if execution else -(-chains // ranks.crews)
            return prepare(
                in_place,
                config,
                functions,
                data,
                batch_sizes=batch_sizes,
                chains_at_once=1 if shards > 1 else chains_at_once,
                most_at_once=most,
                threads=execution.threads if execution else torch.get_num_threads(),
            )

        # Rank 0 is ready first, since the others observe in batches of the sizes that it found.
        prepared = ready(batch_sizes) if ranks.first_crew else None
        batch_sizes = ranks.share(lambda: prepared.batch_sizes if prepared else {})
        prepared = prepared or ready(batch_sizes)
        fingerprints |= data.fingerprints()
        plan = make_plan(
            config,
            prepared,
            directory,
            pilot=pilot,
            crews=ranks.crews,
            keep_weights=keep_weights,
            elsewhere=url_of_traces(directory) or traces,
        )
        plan.check()
        known = {"config": config.fingerprint(), **fingerprints}
        _check_ranks(ranks, known, prepared.at_center, in_place.tolerance)
        if dry_run is not None:
            try:
                dry_run(describe_plan(plan, prepared))
            except Exception as error:
                raise EnoughError from error
        prepared_in = time.perf_counter() - began
        queries = data.observed.get("query")

        def opened() -> dict[str, Any] | None:
            return open_run(
                directory, known, config, prepared.at_center, in_place.tolerance, queries, keep_weights=keep_weights
            )

        def continued(manifest: dict[str, Any]) -> dict[str, Any]:
            asked = None if queries is None else (known["query"], prepared.observers["query"])
            go_on(directory, config, source, manifest, asked, examples or {})
            return manifest

        # From here on an interruption waits for the next step: neither a layout nor a step is left half done.
        with (
            _interruptible(ranks) as interrupted,
            ranks.watching_the_crew(),
            writing(directory, lock=ranks.leads),
        ):
            manifest = ranks.share(opened)
            changed = manifest and [name for name, ours in known.items() if manifest["fingerprints"].get(name) != ours]
            if manifest is None or manifest["status"] != "complete" or changed:
                if config.control_variates and config.posterior.n_beta:
                    # Before anything is compiled, so that a resumed run has the same one to the last bit.
                    gradient = full_gradient(in_place, functions.driving_loss, data.drawn_from, batch_size)
                    prepared.control(gradient)
                execution = execution or _shared(
                    ranks, lambda: _choose(prepared, config, chains_at_once=chains_at_once, compile=compile)
                )
                dynamics = prepared.way(execution)
                make_ready(execution, dynamics, in_place)
                if manifest is not None:
                    if "query" in (changed or ()) and ranks.first_crew:
                        traces_there = Traces(place_of_traces(directory, manifest))
                        failed = {failure["chain"] for failure in manifest["failed_chains"]}
                        healthy = [chain for chain in range(manifest["planned"]["chains"]) if chain not in failed]
                        first = healthy[: execution.chains_at_once]
                        train_observer = prepared.observers["train"]
                        try_replay(dynamics, traces_there, train_observer, chains=first, draws=manifest["draws"])
                    manifest = ranks.share(functools.partial(continued, manifest))
                else:
                    thinning = None
                    if pilot and ranks.first_crew:
                        probes = {
                            name: Observer(in_place, functions.loss, data.observed[name], size, most=PROBED_EXAMPLES)
                            for name, size in execution.batch_sizes.items()
                        }
                        thinning = choose_thin(
                            dynamics, probes, at_once=execution.chains_at_once, interrupted=interrupted
                        )
                    thin = ranks.share(lambda: thinning.thin if thinning else config.thin)
                    config = dynamics.config = dataclasses.replace(config, thin=thin)
                    manifest = new_manifest(fingerprints, config, moving, in_place.device) | {
                        # The potential holds nβ/n of each example's loss, if what drives the chain is what is recorded.
                        "scale": None if potential_loss else config.posterior.n_beta / len(data.drawn_from),
                        "execution": execution.to_dict(),
                        "thinning": thinning and dataclasses.asdict(thinning),
                        **({} if traces is None else {"traces": check_url(traces)}),
                    }
                    if ranks.leads:
                        weights = (moving.total, np.dtype(str(moving.dtype).removeprefix("torch.")))
                        create_run(
                            directory,
                            config,
                            source,
                            manifest,
                            prepared.observers,
                            prepared.at_center,
                            examples or {},
                            weights if keep_weights else None,
                        )
                manifest = ranks.share(lambda: manifest)
                assert manifest is not None
                await_run(directory, ranks.rank)
                groups = -(-config.chains // execution.chains_at_once)
                if ranks.leads and groups < ranks.crews:
                    idle = (ranks.crews - groups) * shards
                    log.warning("%d of %d ranks have no chain to run", idle, ranks.count)
                try:
                    if "replay" in manifest:
                        assert queries is not None
                        added = queries.part(range(manifest["replay"]["queries"], len(queries)))
                        _replay(
                            directory,
                            manifest,
                            ranks,
                            dynamics,
                            Observer(in_place, functions.loss, added, prepared.observers["query"].batch_size),
                            prepared.observers["train"],
                            at_once=execution.chains_at_once,
                            checkpoint_seconds=checkpoint_seconds,
                            progress=progress,
                            interrupted=interrupted,
                        )
                    if manifest["status"] != ADDING_QUERIES:
                        own = ranks.chains(config.chains, execution.chains_at_once)
                        with _bar(progress and ranks.leads, len(own) * config.steps[-1], prepared.observers) as report:
                            _sample(
                                directory,
                                manifest,
                                ranks,
                                dynamics,
                                prepared.observers,
                                at_once=execution.chains_at_once,
                                checkpoint_seconds=checkpoint_seconds,
                                report=report,
                                interrupted=interrupted,
                            )
                except KeyboardInterrupt as error:
                    if out is None:
                        raise
                    raise KeyboardInterrupt(
                        f"stopped at a checkpoint; the same call with out={str(out)!r} goes on"
                    ) from error
                if ranks.leads:
                    manifest["seconds"]["preparing"] = prepared_in
                    finish_run(directory, config, manifest)
    run = Run(directory)
    _tell(run, warn=ranks.leads)
    return run


@contextlib.contextmanager
def _unwrapping_enough() -> Iterator[None]:
    """Raise what a caller raised to have no more than the plan, once every rank has left in peace."""
    try:
        yield
    except EnoughError as enough:
        raise enough.__cause__ or enough from None


def _functional(model: nn.Module, moving: MovingWeights, crew: Crew, precision: Precision) -> InPlace:
    """The model on this rank, or this rank's part of it."""
    if crew.count == 1:
        wide = any(value.dtype == torch.float32 for value in model.parameters())
        bfloat16 = precision == "bfloat16" or (precision == "float8" and wide)
        return InPlace(model, moving, bfloat16=bfloat16, float8=_float8(model, precision))
    from jostle.sharding import Sharded  # which takes a second to import

    return Sharded(model, moving, crew, bfloat16=precision == "bfloat16")


def _float8(model: nn.Module, precision: Precision) -> Float8 | None:
    """What observes in float8, where that was asked for."""
    if not precision.startswith("float8"):
        return None
    if precision == "float8":
        require_float8(next(model.parameters()).device)
    return Float8(model, emulated=precision == "float8-emulated")


def _shared(ranks: Ranks, choose: Callable[[], Execution | None]) -> Any:
    """What rank 0 has or chooses of how to run, on every rank."""

    def plain() -> dict[str, Any] | None:
        chosen = choose()
        return chosen and chosen.to_dict()

    chosen = ranks.share(plain)
    return chosen and Execution(**chosen)


def _check_ranks(
    ranks: Ranks, fingerprints: Mapping[str, str], at_center: Mapping[str, Tensor], tolerance: float
) -> None:
    """Refuse ranks that have other weights, data or functions than rank 0, before anything is written."""
    norms = {name: float(value.norm()) for name, value in at_center.items()}
    for rank, (theirs, their_norms) in enumerate(ranks.gather((dict(fingerprints), norms))):
        for name, ours in fingerprints.items():
            if theirs[name] != ours:
                raise InputError(
                    name, got=f"fingerprint {theirs[name]} on rank {rank}", expected=f"{ours}, as on rank 0"
                )
        for name, norm in norms.items():
            if abs(their_norms[name] - norm) > max(1e-3, tolerance) * norm + 1e-6:
                raise InputError(
                    name, got=f"norm {their_norms[name]:.6g} at w* on rank {rank}", expected=f"{norm:.6g}, as on rank 0"
                )


def _choose(prepared: Prepared, config: Config, *, chains_at_once: int | None, compile: bool | None) -> Execution:
    """How the chains will run: as asked, or as is quickest."""
    if prepared.alone.model.crew.count > 1:
        execution = Execution()
    elif chains_at_once is not None and prepared.together is not None:
        execution = Execution(chains_at_once=prepared.at_once)
    else:
        execution = choose(
            config, prepared.alone, prepared.together, prepared.spread, at_once=prepared.at_once, compile=compile
        )
    execution.batch_sizes = prepared.batch_sizes
    return execution


def _replay(
    directory: Path,
    manifest: dict[str, Any],
    ranks: Ranks,
    dynamics: Dynamics,
    added: Observer,
    train: Observer,
    *,
    at_once: int,
    checkpoint_seconds: float,
    progress: bool,
    interrupted: Callable[[], bool],
) -> None:
    """Observe queries that were added at the draws that are recorded."""
    there = manifest["replay"]
    log.info("%d queries are added to %d", added.columns.samples, there["queries"])
    traces = Traces(place_of_traces(directory, manifest), writable=True)
    replay = Replay(dynamics, traces, draws=there["draws"], added=added, train=train)
    failed = {failure["chain"] for failure in manifest["failed_chains"]}
    own = [chain for chain in ranks.chains(there["chains"], at_once) if chain not in failed]
    with _bar(progress and ranks.leads, len(own) * replay.config.steps[-1], {"query": added}) as report:
        failures, _ = run_chains(
            replay,
            TraceRecorder(traces, first_column=there["columns"]) if ranks.crew.leads else NoRecorder(),
            Checkpoints(directory / "replay"),
            chains=own,
            at_once=at_once,
            checkpoint_seconds=checkpoint_seconds,
            report=report,
            interrupted=interrupted,
        )
    gathered = ranks.gather([dataclasses.asdict(failure) for failure in failures] if ranks.crew.leads else [])
    manifest["failed_chains"] += [failure for theirs in gathered for failure in theirs]
    del manifest["replay"]
    if ranks.leads:
        # Before it is said: no later replay may begin with these.
        shutil.rmtree(directory / "replay", ignore_errors=True)
        write_manifest(directory, manifest)


def _sample(
    directory: Path,
    manifest: dict[str, Any],
    ranks: Ranks,
    dynamics: Dynamics,
    observers: Mapping[str, Observer],
    *,
    at_once: int,
    checkpoint_seconds: float,
    report: Callable[[Progress], None],
    interrupted: Callable[[], bool],
) -> None:
    """Run the chains from where they stand to their end, round by round, and put into the manifest what came of it.

    Rank 0 decides how long a round is and whether it was the last, and makes room for its draws before anyone writes.
    """
    config, traces = dynamics.config, None
    recorder: Recorder
    if config.keep == "traces":
        traces = Traces(place_of_traces(directory, manifest), writable=True)
        dynamics.keeps_weights = traces.keeps_weights
        recorder = TraceRecorder(traces) if ranks.crew.leads else NoRecorder()
    else:
        recorder = CovarianceRecorder(directory / "covariance.safetensors", observers, config.draws)
    before, started = manifest["seconds"]["sampling"], time.perf_counter()
    remarks: list[str] = list(manifest["remarks"])
    whole = manifest.get("recorded", {"chains": 0, "draws": 0})

    def healthy() -> np.ndarray:
        failed = {failure["chain"] for failure in manifest["failed_chains"]}
        return healthy_chains(config.chains, failed, antithetic=config.antithetic)

    def plan() -> tuple[int, list[int]] | None:
        """At how many draws the next round ends, and which chains have failed; None where there is none."""
        draws = next_round(config, manifest["draws"], seconds=manifest["seconds"]["sampling"])
        if manifest.get("reached") or draws <= manifest["draws"] or not len(healthy()):
            return None
        if traces is not None:
            traces.extend(config.chains, config.steps[:draws])
        return draws, [failure["chain"] for failure in manifest["failed_chains"]]

    while (planned := ranks.share(plan)) is not None:
        draws, failed = planned
        own = [chain for chain in ranks.chains(config.chains, at_once) if chain not in failed]
        failures: list[dict[str, Any]] = []
        remarked: list[str] = []
        for chains, first_draw in (
            (range(whole["chains"]), whole["draws"]),
            (range(whole["chains"], config.chains), 0),
        ):
            if first_draw >= draws:
                continue
            new_failures, new_remarks = run_chains(
                dynamics,
                recorder,
                Checkpoints(directory / "state"),
                chains=[chain for chain in own if chain in chains],
                at_once=at_once,
                draws=draws,
                first_draw=first_draw,
                checkpoint_seconds=checkpoint_seconds,
                report=report,
                interrupted=interrupted,
            )
            failures += [dataclasses.asdict(failure) for failure in new_failures]
            remarked += new_remarks
        gathered = ranks.gather((failures, remarked) if ranks.crew.leads else ([], []))
        if not ranks.leads:
            continue
        failures = [failure for theirs, _ in gathered for failure in theirs]
        manifest["failed_chains"] += sorted(failures, key=lambda failure: (failure["step"], failure["chain"]))
        manifest["draws"] = draws
        manifest["seconds"]["sampling"] = before + time.perf_counter() - started
        remarks += [remark for _, theirs in gathered for remark in theirs]
        if traces is not None and config.until and len(healthy()):
            manifest["measured"] = measure(config, traces, healthy())
            log.info("%d draws: %s", draws, manifest["measured"])
            manifest["reached"] = reached(config, manifest["measured"])
        if draws < config.draws and not manifest.get("reached") and len(healthy()):
            write_manifest(directory, manifest)
    if getattr(config.sampler, "independent", False) and config.thin > 1:
        rule, wasted = type(config.sampler).__name__, config.thin - 1
        remarks.append(
            f"every step of {rule} is a new draw, and {wasted} of {config.thin} are not looked at: use thin=1"
        )
    manifest["remarks"] = list(dict.fromkeys(remarks))


def _tell(run: Run, *, warn: bool) -> None:
    """Warn of failed chains and of what the sampler remarks; raise where no chain is left."""
    failed = run.manifest["failed_chains"]
    if len(failed) == run.config["chains"]:
        first = failed[0]
        raise ChainsFailedError(
            f"all {len(failed)} chains failed, the first at step {first['step']} ({first['reason']}): lower "
            f"step_size or n_beta, or raise localization"
        )
    if not warn:
        return
    for failure in failed:
        warnings.warn(
            f"chain {failure['chain']} failed at step {failure['step']}: {failure['reason']}; it "
            f"{'and its mirror image are' if run.antithetic else 'is'} left out of every estimate",
            ChainFailedWarning,
            stacklevel=3,
        )
    for remark in run.manifest["remarks"]:
        warnings.warn(remark, SamplerWarning, stacklevel=3)


@contextlib.contextmanager
def _interruptible(ranks: Ranks) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop between two steps; a second one stops at once.

    The loss of another rank is such a request, too.
    """
    asked = threading.Event()
    ranks.interrupted = asked.is_set
    if threading.current_thread() is not threading.main_thread():
        yield lambda: ranks.lost
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked.is_set() or ranks.lost
    except KeyboardInterrupt:
        if not asked.is_set():  # but another rank of the crew was, or knows of one that is lost
            ranks.raise_if_lost(within=3 * BEAT_SECONDS)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _bar(show: bool, steps: int, observers: Mapping[str, Observer]) -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the mean training loss, beside its value at w*; in a log, a line a minute."""
    from rich.console import Console

    console = Console(stderr=True)
    if not show:
        yield lambda progress: None
        return
    if not (console.is_terminal or console.is_jupyter):
        yield _minutely(steps)
        return
    from rich.progress import (
        BarColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    center = float(next(iter(observers.values())).center_losses.mean())
    columns = (
        BarColumn(10),  # all of it fits into 80 columns
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeElapsedColumn(),
        TextColumn("gone"),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.fields[loss]}"),
    )
    with RichProgress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, loss=f"loss {center:.4g} at w*")

        def report(progress: Progress) -> None:
            if progress.mean_loss is not None:
                bar.update(task, loss=f"loss {progress.mean_loss:.4g} ({center:.4g} at w*)")
            bar.update(task, completed=progress.steps_done)

        yield report


def _minutely(steps: int) -> Callable[[Progress], None]:
    """Say once a minute, on stderr, how far the chains have come."""
    began = last = time.monotonic()
    first: int | None = None

    def report(progress: Progress) -> None:
        nonlocal last, first
        now, first = time.monotonic(), progress.steps_done if first is None else first
        if now - last >= SECONDS_BETWEEN_LINES and progress.steps_done > first:
            last = now
            left = (steps - progress.steps_done) * (now - began) / (progress.steps_done - first)
            done = f"{progress.steps_done:,} of {steps:,} steps"
            print(f"jostle: {done}, about {left / 60:.0f} min left", file=sys.stderr, flush=True)

    return report
