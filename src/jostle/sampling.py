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
from typing import Any

import torch
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
from jostle.checks import check_gradient, check_neighbours, side_by_side_failure
from jostle.config import Config, Keep, Precision, describe, require_whole
from jostle.data import Collate, Data, fingerprint_tensors, fingerprint_text
from jostle.errors import ChainFailedWarning, ChainsFailedError, InputError, SamplerWarning
from jostle.execution import Execution, choose, prepare
from jostle.functional import FunctionalModel, Observable, SideBySide, eval_mode
from jostle.in_place import InPlace
from jostle.layout import create_run, execution_of, new_manifest, open_run, place_for, write_manifest
from jostle.losses import FACTORIES, Loss
from jostle.losses import classification as classification_loss
from jostle.observing import Observer
from jostle.posterior import Posterior
from jostle.run import Run
from jostle.samplers import SGLD, Sampler
from jostle.traces import Traces
from jostle.weights import MovingWeights

log = logging.getLogger("jostle")

SIDE_BY_SIDE_WEIGHTS = 32_000_000
"""Chains run side by side, by default, while their moving weights together are fewer than this."""

SIDE_BY_SIDE_SCORES = 256_000_000
"""The same for the scores that ``keep="covariance"`` holds for every chain."""

CHECKED_EXAMPLES = 16_384
"""Of the sampling data, at most this many examples are evaluated at w*, evenly spaced."""


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
    thin: int = 10,
    batch_size: int = 1024,
    control_variates: bool = False,
    out: str | Path | None = None,
    seed: int = 0,
    keep: Keep = "traces",
    collate: Collate | None = None,
    observation_batch_size: int | None = None,
    chains_at_once: int | None = None,
    precision: Precision = "model",
    compile: bool | None = None,
    checkpoint_seconds: float = 60.0,
    progress: bool = True,
    source: Mapping[str, Any] | None = None,
    examples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Run:
    """Sample weights around a checkpoint, and record every example's loss at each draw.

    The model is left as it was: its own parameters are w*. Everything is evaluated in eval mode, so dropout is off and
    batch statistics are frozen. If ``out`` holds an unfinished run of the same model, data and settings, it goes on
    where it stood; if it holds the finished one, that is returned.

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
        draws: T, the number of draws from each chain.
        burn_in: steps before the first draw. Chains start at w*, and leave it within a few times 2/(εγ) steps.
        thin: steps between draws. Consecutive steps are nearly copies of each other, and a step costs far less than
            observing every example: raise this before ``draws``.
        batch_size: m, the size of a minibatch; the whole of the sampling data where that is smaller.
        control_variates: take from every minibatch gradient what it is at w*, and add the whole data's there. That is
            two gradients a step and one pass over the sampling data beforehand, and leaves the less of the minibatches'
            noise the closer the draws stay to w*.
        out: the directory of the run. Default: a temporary one that goes with the process.
        seed: the only source of randomness.
        keep: ``"traces"`` (everything can be asked of them later) or ``"covariance"`` (train × query alone, for
            memory that does not grow with draws; per-token losses are averaged over their sequence).
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

    Returns:
        The finished run.

    Raises:
        InputError: something passed cannot be used. Nothing has been written then.
        ChainsFailedError: every chain left the finite numbers.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint; call again with the same arguments to go on.
    """
    loss = loss or classification_loss()
    observables = dict(observables or {})
    _check_kinds(model, loss, potential_loss, posterior, sampler)
    config = Config(
        posterior=posterior or Posterior(n_beta=200.0, localization=1e4),
        sampler=sampler or SGLD(step_size=1e-5),
        loss=describe(loss),
        potential_loss=describe(potential_loss or loss),
        observables=tuple(observables),
        chains=chains,
        draws=draws,
        burn_in=burn_in,
        thin=thin,
        batch_size=batch_size,
        keep=keep,
        seed=seed,
        precision=precision,
        control_variates=control_variates,
    )
    if query is None and not observables:
        raise InputError("query", got="neither a query set nor observables", expected="something to be influenced")
    if keep == "covariance" and query is None:
        raise InputError("keep", got="'covariance' without a query set", expected="a query set, or keep='traces'")
    if observation_batch_size is not None:
        require_whole("observation_batch_size", observation_batch_size, at_least=1)
    if chains_at_once is not None:
        require_whole("chains_at_once", chains_at_once, at_least=1)
    directory = place_for(out)
    began = time.perf_counter()
    moving = MovingWeights(model, config.posterior.weights)
    fingerprints = {
        "config": config.fingerprint(),
        "weights": fingerprint_tensors(dict(model.state_dict())),
        "choice of weights": fingerprint_text(" ".join(moving.names)),
    }
    with eval_mode(model), InPlace(model, moving, bfloat16=precision == "bfloat16") as in_place:
        device = next(model.parameters()).device
        sets = {"train": Data(train, "train", collate=collate, device=device)}
        if query is not None:
            sets["query"] = Data(query, "query", collate=collate, device=device)
        if sampling_data is None:
            drawn_from = sets["train"]
        else:
            drawn_from = Data(sampling_data, "sampling_data", collate=collate, device=device)
        _check_examples(examples or {}, sets)
        driving_loss = potential_loss or loss
        for data in sets.values():
            check_neighbours(in_place, loss, data)
        if potential_loss is not None or sampling_data is not None:
            check_neighbours(in_place, driving_loss, drawn_from)
        center = moving.center[None]
        at_center = {f"observable {name}": in_place.evaluate(phi, center)[0] for name, phi in observables.items()}
        sizes = {name: _observable_size(name, at_center[f"observable {name}"]) for name in observables}
        execution = execution_of(directory)
        batch_sizes = execution.batch_sizes if execution else dict.fromkeys(sets, observation_batch_size)
        observers = {name: Observer(in_place, loss, data, batch_sizes[name]) for name, data in sets.items()}
        at_center |= {f"loss on {name}": observer.center_losses for name, observer in observers.items()}
        if potential_loss is not None or sampling_data is not None:
            driving = Observer(in_place, driving_loss, drawn_from, observers["train"].batch_size, most=CHECKED_EXAMPLES)
            at_center["potential loss"] = driving.center_losses
        if config.posterior.n_beta:
            check_gradient(in_place, driving_loss, drawn_from)

        def dynamics_of(functional: FunctionalModel) -> Dynamics:
            return Dynamics(
                functional,
                config,
                sampling_data=drawn_from,
                potential_loss=driving_loss,
                observers=observers,
                observables=observables,
            )

        alone, together = dynamics_of(in_place), None
        at_once = _most_at_once(config, moving, observers, chains_at_once)
        if at_once > 1:
            reason = side_by_side_failure(
                in_place,
                observed=[(loss, data) for data in sets.values()],
                driven=(driving_loss, drawn_from),
                observables=list(observables.values()),
            )
            if reason is not None and chains_at_once is not None:
                raise InputError("chains_at_once", got=chains_at_once, expected=f"1 for this model ({reason})")
            if reason is None:
                together = dynamics_of(SideBySide(model, moving, bfloat16=in_place.bfloat16))
            else:
                log.info("chains run one after another (%s)", reason)
        fingerprints |= {name: data.fingerprint() for name, data in sets.items()}
        fingerprints["sampling_data"] = drawn_from.fingerprint()
        log.info("%s weights of %d parameters move", f"{moving.total:,}", len(moving.names))

        # From here on an interruption waits for the next step: neither a layout nor a step is left half done.
        with _interruptible() as interrupted:
            settings = config.to_dict() | ({"source": dict(source)} if source else {})
            manifest = open_run(directory, fingerprints, config.to_dict(), at_center, in_place.tolerance)
            if manifest is None:
                manifest = new_manifest(fingerprints, moving)
                # The potential holds nβ/n of each example's loss, where what drives the chain is what is recorded.
                manifest["scale"] = None if potential_loss else config.posterior.n_beta / len(drawn_from)
                create_run(directory, config, settings, manifest, observers, sizes, at_center, examples or {})
            if manifest["status"] != "complete":
                if config.control_variates and config.posterior.n_beta:
                    # Before anything is compiled, so that a resumed run has the same one to the last bit.
                    alone.center_gradient = full_gradient(in_place, driving_loss, drawn_from, batch_size)
                    if together is not None:
                        together.center_gradient = alone.center_gradient
                if execution is None:
                    asked = chains_at_once is not None and together is not None
                    execution = (
                        Execution(chains_at_once=at_once)
                        if asked
                        else choose(config, alone, together, at_once=at_once, compile=compile)
                    )
                    execution.batch_sizes = {name: observer.batch_size for name, observer in observers.items()}
                    manifest["execution"] = execution.to_dict()
                    write_manifest(directory, manifest)
                dynamics = alone if together is None or execution.chains_at_once == 1 else together
                prepare(execution, dynamics)
                recorder: Recorder
                if keep == "traces":
                    recorder = TraceRecorder(Traces(directory / "traces.zarr", writable=True))
                else:
                    recorder = CovarianceRecorder(directory / "covariance.safetensors", observers, draws)
                sampling_since = time.perf_counter()
                try:
                    with _bar(progress, config, observers) as report:
                        failures, remarks = run_chains(
                            dynamics,
                            recorder,
                            Checkpoints(directory / "state"),
                            chains=list(range(chains)),
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
                ended = time.perf_counter()
                manifest["seconds"] = {"preparing": sampling_since - began, "sampling": ended - sampling_since}
                manifest["status"] = "complete"
                manifest["failed_chains"] = [dataclasses.asdict(failure) for failure in failures]
                manifest["remarks"] = list(dict.fromkeys(remarks))
                write_manifest(directory, manifest)
                shutil.rmtree(directory / "state", ignore_errors=True)
    run = Run(directory)
    _tell(run)
    return run


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
            f"chain {failure['chain']} failed at step {failure['step']}: {failure['reason']}; it is left out of "
            "every estimate",
            ChainFailedWarning,
            stacklevel=3,
        )
    for remark in run.manifest["remarks"]:
        warnings.warn(remark, SamplerWarning, stacklevel=3)


def _check_kinds(
    model: Any, loss: Any, potential_loss: Any, posterior: Posterior | None, sampler: Sampler | None
) -> None:
    """Refuse what is not the kind of thing it should be, before it fails somewhere inside."""
    if not isinstance(model, nn.Module):
        raise InputError("model", got=f"a {type(model).__name__}", expected="an instance of torch.nn.Module, at w*")
    for name, function in (("loss", loss), ("potential_loss", potential_loss)):
        if function in FACTORIES:
            raise InputError(name, got=f"losses.{function.__name__} itself", expected="what it returns", fix="call it")
        if function is not None and (not callable(function) or isinstance(function, nn.Module)):
            raise InputError(
                name,
                got=f"a {type(function).__name__}",
                expected="a function f(model, batch) that returns one loss a sample",
                fix="jostle.losses has classification(), regression() and next_token()",
            )
    if posterior is not None and not isinstance(posterior, Posterior):
        raise InputError("posterior", got=f"a {type(posterior).__name__}", expected="a jostle.Posterior")
    if isinstance(sampler, type) or not all(hasattr(sampler or SGLD, name) for name in ("init", "step", "check")):
        got = f"the class {sampler.__name__}" if isinstance(sampler, type) else f"a {type(sampler).__name__}"
        raise InputError("sampler", got=got, expected="an update rule such as jostle.SGLD(step_size=1e-5)")


def _check_examples(examples: Mapping[str, Any], sets: Mapping[str, Data]) -> None:
    if not isinstance(examples, Mapping):
        raise InputError("examples", got=f"a {type(examples).__name__}", expected='{"train": [...], "query": [...]}')
    for name, shown in examples.items():
        if name not in sets or len(shown) != len(sets[name]):
            expected = " and ".join(f"{len(data)} of {key!r}" for key, data in sets.items())
            raise InputError("examples", got=f"{len(shown)} of {name!r}", expected=expected)


def _most_at_once(config: Config, moving: MovingWeights, observers: Mapping[str, Observer], wanted: int | None) -> int:
    """How many chains may move side by side, if they can: as asked, or as many as are small enough."""
    if wanted is not None:
        return min(config.chains, wanted)
    most = min(config.chains, max(1, SIDE_BY_SIDE_WEIGHTS // moving.total))
    if config.keep == "covariance":  # every open chain has a matrix of its own
        entries = observers["train"].columns.samples * observers["query"].columns.samples
        most = min(most, max(1, SIDE_BY_SIDE_SCORES // entries))
    return most


def _observable_size(name: str, value: torch.Tensor) -> int:
    if value.ndim != 1 or not torch.isfinite(value).all():
        raise InputError(
            f"observable {name!r}",
            got=f"shape {tuple(value.shape)}" if value.ndim != 1 else "values that are not finite at w*",
            expected="finite values of shape (p,)",
        )
    return len(value)


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

    center = float(observers["train"].center_losses.mean())
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
