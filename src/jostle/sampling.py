"""`attribute`: checks what it was given, lays out the run's directory, and samples; resumes what was interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from jostle.chains import (
    Checkpoints,
    CovarianceRecorder,
    Dynamics,
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
from jostle.functional import Observable, eval_mode
from jostle.in_place import InPlace
from jostle.layout import (
    ADDING_QUERIES,
    create_run,
    execution_of,
    finish_run,
    go_on,
    new_manifest,
    open_run,
    place_for,
    thin_of,
    write_manifest,
    writing,
)
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.observing import Observer
from jostle.planning import describe_plan, make_plan
from jostle.posterior import Posterior
from jostle.preparing import DataSets, Functions, Prepared, check_examples, check_kinds, prepare
from jostle.replaying import Replay
from jostle.run import Run, healthy_chains, place_of_traces
from jostle.samplers import SGLD, Sampler
from jostle.stopping import measure, next_round, reached
from jostle.stores import check_url
from jostle.thinning import PROBED_EXAMPLES, choose_thin
from jostle.traces import Traces
from jostle.weights import MovingWeights

log = logging.getLogger("jostle")


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
        precision: ``"model"`` computes in the precision of the model's own weights; ``"bfloat16"`` has matrix products
            in bfloat16 (autocast), which a GPU does many times faster. Chains, losses and scores are float32 all the
            same.
        compile: whether to compile the model with `torch.compile`; changes the numbers by rounding. Default: on a GPU,
            where the run is much longer than compiling takes.
        checkpoint_seconds: the least time between two checkpoints; 0 checkpoints at every step.
        progress: show a progress bar, where stderr is a terminal or a notebook.
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
    began = time.perf_counter()
    moving = MovingWeights(model, config.posterior.weights)
    fingerprints = {
        "weights": fingerprint_tensors(dict(model.state_dict())),
        "choice of weights": fingerprint_text(" ".join(moving.names)),
    }
    with eval_mode(model), InPlace(model, moving, bfloat16=precision == "bfloat16") as in_place:
        data = DataSets.of(train, query, sampling_data, collate=collate, device=in_place.device)
        check_examples(examples or {}, data.observed)
        execution = execution_of(directory)
        batch_sizes = execution.batch_sizes if execution else dict.fromkeys(data.observed, observation_batch_size)
        prepared = prepare(in_place, config, functions, data, batch_sizes=batch_sizes, chains_at_once=chains_at_once)
        fingerprints |= data.fingerprints()
        plan = make_plan(config, prepared, directory, pilot=pilot, keep_weights=keep_weights, elsewhere=traces)
        plan.check()
        if dry_run is not None:
            dry_run(describe_plan(plan, prepared))
        prepared_in = time.perf_counter() - began

        # From here on an interruption waits for the next step: neither a layout nor a step is left half done.
        with _interruptible() as interrupted, writing(directory):
            known = {"config": config.fingerprint(), **fingerprints}
            queries = data.observed.get("query")
            manifest = open_run(
                directory, known, config, prepared.at_center, in_place.tolerance, queries, keep_weights=keep_weights
            )
            if manifest is not None and (
                manifest["status"] != "complete"
                or any(manifest["fingerprints"].get(name) != known.get(name) for name in ("config", "query"))
            ):
                asked = None if queries is None else (known["query"], prepared.observers["query"])
                go_on(directory, config, source, manifest, asked, examples or {})
            if manifest is None or manifest["status"] != "complete":
                if config.control_variates and config.posterior.n_beta:
                    # Before anything is compiled, so that a resumed run has the same one to the last bit.
                    gradient = full_gradient(in_place, functions.driving_loss, data.drawn_from, batch_size)
                    prepared.control(gradient)
                if execution is None:
                    execution = _choose(prepared, config, chains_at_once=chains_at_once, compile=compile)
                dynamics = prepared.together if prepared.together and execution.chains_at_once > 1 else prepared.alone
                make_ready(execution, dynamics)
                if manifest is None:
                    thinning = None
                    if pilot:
                        probes = {
                            name: Observer(in_place, functions.loss, data.observed[name], size, most=PROBED_EXAMPLES)
                            for name, size in execution.batch_sizes.items()
                        }
                        thinning = choose_thin(
                            dynamics, probes, at_once=execution.chains_at_once, interrupted=interrupted
                        )
                        config = dynamics.config = dataclasses.replace(config, thin=thinning.thin)
                    manifest = new_manifest(fingerprints, config, moving) | {
                        # The potential holds nβ/n of each example's loss, if what drives the chain is what is recorded.
                        "scale": None if potential_loss else config.posterior.n_beta / len(data.drawn_from),
                        "execution": execution.to_dict(),
                        "thinning": thinning and dataclasses.asdict(thinning),
                        **({} if traces is None else {"traces": check_url(traces)}),
                    }
                    weights = (
                        (moving.total, np.dtype(str(moving.dtype).removeprefix("torch."))) if keep_weights else None
                    )
                    create_run(
                        directory,
                        config,
                        source,
                        manifest,
                        prepared.observers,
                        prepared.at_center,
                        examples or {},
                        weights,
                    )
                try:
                    if "replay" in manifest:
                        assert queries is not None
                        added = queries.part(range(manifest["replay"]["queries"], len(queries)))
                        _replay(
                            directory,
                            manifest,
                            dynamics,
                            Observer(in_place, functions.loss, added, prepared.observers["query"].batch_size),
                            prepared.observers["train"],
                            at_once=execution.chains_at_once,
                            checkpoint_seconds=checkpoint_seconds,
                            progress=progress,
                            interrupted=interrupted,
                        )
                    if manifest["status"] != ADDING_QUERIES:
                        with _bar(progress, config, prepared.observers) as report:
                            _sample(
                                directory,
                                manifest,
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
                manifest["seconds"]["preparing"] = prepared_in
                finish_run(directory, config, manifest)
    run = Run(directory)
    _tell(run)
    return run


def _choose(prepared: Prepared, config: Config, *, chains_at_once: int | None, compile: bool | None) -> Execution:
    """How the chains will run: as asked, or as is quickest."""
    if chains_at_once is not None and prepared.together is not None:
        execution = Execution(chains_at_once=prepared.at_once)
    else:
        execution = choose(config, prepared.alone, prepared.together, at_once=prepared.at_once, compile=compile)
    execution.batch_sizes = {name: observer.batch_size for name, observer in prepared.observers.items()}
    return execution


def _replay(
    directory: Path,
    manifest: dict[str, Any],
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
    with _bar(progress, replay.config, {"query": added}) as report:
        failures, _ = run_chains(
            replay,
            TraceRecorder(traces, first_column=there["columns"]),
            Checkpoints(directory / "replay"),
            chains=[chain for chain in range(there["chains"]) if chain not in failed],
            at_once=at_once,
            checkpoint_seconds=checkpoint_seconds,
            report=report,
            interrupted=interrupted,
        )
    manifest["failed_chains"] += [dataclasses.asdict(failure) for failure in failures]
    del manifest["replay"]
    shutil.rmtree(directory / "replay", ignore_errors=True)  # before it is said: no later replay may begin with these
    write_manifest(directory, manifest)


def _sample(
    directory: Path,
    manifest: dict[str, Any],
    dynamics: Dynamics,
    observers: Mapping[str, Observer],
    *,
    at_once: int,
    checkpoint_seconds: float,
    report: Callable[[Progress], None],
    interrupted: Callable[[], bool],
) -> None:
    """Run the chains from where they stand to their end, round by round, and put into the manifest what came of it."""
    config, traces = dynamics.config, None
    recorder: Recorder
    if config.keep == "traces":
        traces = Traces(place_of_traces(directory, manifest), writable=True)
        dynamics.keeps_weights = traces.keeps_weights
        recorder = TraceRecorder(traces)
    else:
        recorder = CovarianceRecorder(directory / "covariance.safetensors", observers, config.draws)
    before, started = manifest["seconds"]["sampling"], time.perf_counter()
    remarks: list[str] = list(manifest["remarks"])
    whole = manifest.get("recorded", {"chains": 0, "draws": 0})
    while (draws := next_round(config, manifest["draws"], seconds=manifest["seconds"]["sampling"])) > manifest["draws"]:
        if traces is not None:
            traces.extend(config.chains, config.steps[:draws])
        failed = {failure["chain"] for failure in manifest["failed_chains"]}
        for chains, first_draw in (
            (range(whole["chains"]), whole["draws"]),
            (range(whole["chains"], config.chains), 0),
        ):
            if first_draw >= draws:
                continue
            failures, remarked = run_chains(
                dynamics,
                recorder,
                Checkpoints(directory / "state"),
                chains=[chain for chain in chains if chain not in failed],
                at_once=at_once,
                draws=draws,
                first_draw=first_draw,
                checkpoint_seconds=checkpoint_seconds,
                report=report,
                interrupted=interrupted,
            )
            manifest["failed_chains"] += [dataclasses.asdict(failure) for failure in failures]
            failed |= {failure.chain for failure in failures}
            remarks += remarked
        manifest["draws"] = draws
        manifest["seconds"]["sampling"] = before + time.perf_counter() - started
        healthy = healthy_chains(config.chains, failed, antithetic=config.antithetic)
        if not len(healthy):
            break
        if traces is not None and config.until:
            manifest["measured"] = measure(config, traces, healthy)
            log.info("%d draws: %s", draws, manifest["measured"])
            manifest["reached"] = reached(config, manifest["measured"])
            if manifest["reached"]:
                break
        if draws < config.draws:
            write_manifest(directory, manifest)
    if getattr(config.sampler, "independent", False) and config.thin > 1:
        rule, wasted = type(config.sampler).__name__, config.thin - 1
        remarks.append(
            f"every step of {rule} is a new draw, and {wasted} of {config.thin} are not looked at: use thin=1"
        )
    manifest["remarks"] = list(dict.fromkeys(remarks))


def _tell(run: Run) -> None:
    """Warn of failed chains and of what the sampler remarks; raise where no chain is left."""
    failed = run.manifest["failed_chains"]
    if len(failed) == run.config["chains"]:
        first = failed[0]
        raise ChainsFailedError(
            f"all {len(failed)} chains failed, the first at step {first['step']} ({first['reason']}): lower "
            f"step_size or n_beta, or raise localization"
        )
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
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop between two steps; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _bar(show: bool, config: Config, observers: Mapping[str, Observer]) -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the mean training loss, beside its value at w*."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (show and (console.is_terminal or console.is_jupyter)):
        yield lambda progress: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    center = float(next(iter(observers.values())).center_losses.mean())
    columns = (
        TextColumn("sampling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps,"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left,"),
        TextColumn("{task.fields[loss]}"),
    )
    with RichProgress(*columns, console=console) as bar:
        task = bar.add_task("", total=config.chains * config.steps[-1], loss=f"loss {center:.4f} at w*")

        def report(progress: Progress) -> None:
            if progress.mean_loss is not None:
                bar.update(task, loss=f"loss {progress.mean_loss:.4f} ({center:.4f} at w*)")
            bar.update(task, completed=progress.steps_done)

        yield report
