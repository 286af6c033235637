"""`attribute`: checks what it was given, lays out the run's directory, and samples; resumes what was interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from jostle.chains.progress import say_at_the_end
from jostle.chains.signals import interruptible
from jostle.chains.thinning import USUAL_THIN
from jostle.config import Config, Criterion, Keep, Precision, describe
from jostle.data.datasets import Collate, fingerprint_tensors, fingerprint_text
from jostle.diagnose import in_python
from jostle.errors import ChainFailedWarning, ChainsFailedError, InputError, SamplerWarning, warn
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.functional import Observable, eval_mode
from jostle.models.weights import MovingWeights
from jostle.posterior import Posterior
from jostle.ranks import Ranks, leaving_with_enough
from jostle.runs.integrity import so_far
from jostle.runs.job import Job, Kept, Manner
from jostle.runs.layout import place_for, thin_of, writing
from jostle.runs.preparing import DataSets, Functions, check_examples, check_kinds, functional
from jostle.runs.run import Run
from jostle.samplers import SGLD, Gaussian, Sampler


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
    burn_in: int | None = None,
    thin: int | Literal["auto"] | None = None,
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
        posterior: nβ, γ, which weights move, and in which metric. Default: ``Posterior(n_beta=200, localization=1e4)``,
            of `Gaussian` with ``n_beta=0``.
        sampler: the update rule and its step size. Default: ``SGLD(step_size=1e-5)``.
        chains: C, the number of chains.
        draws: T, the number of draws from each chain; the most there may be where ``until`` or ``minutes`` is given.
        burn_in: steps before the first draw. Chains start at w*, and leave it within a few times 2/(εγ) steps. Default:
            0, or 1 where every step is a new draw (`Gaussian`).
        thin: steps between draws. Consecutive steps are nearly copies of each other, and a step costs far less than
            observing every example: raise this before ``draws``. ``"auto"`` chooses what gives the most effective draws
            a second, by a short pilot (see `jostle.chains.thinning`); the choice is kept with the run. Default: 10, or
            1 where every step is a new draw.
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
        progress: show a progress bar where stderr is a terminal or a notebook, and a line a minute elsewhere; at the
            end, the verdict of `Run.diagnostics` in a line.
        source: where model and data came from, kept in ``config.yaml`` for whoever runs it again.
        examples: what to show of the ``"train"`` and ``"query"`` examples (texts, tokens, labels), kept in
            ``examples/``.
        dry_run: is told the plan, a line for each part of it, after a few timed steps and before anything is written;
            whoever wants no more than that raises from it.

    Returns:
        The finished run.

    Raises:
        InputError: something passed cannot be used. Nothing has been written then.
        ChainsFailedError: every chain left the finite numbers, or one of every antithetic pair did.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint; call again with the same arguments to go on.
        StorageError: the directory cannot be written to; what was recorded is kept, and the same call goes on.
        RankLostError: another rank failed or is gone; what was recorded is kept.
    """
    began = time.perf_counter()
    check_kinds(model, loss, potential_loss, posterior, sampler)
    if keep == "covariance" and traces is not None:
        raise InputError("traces", got="keep='covariance', which keeps none", expected="keep='traces'")
    directory = place_for(out, traces)
    sampler = sampler or SGLD(step_size=1e-5)
    independent = getattr(sampler, "independent", False)
    burn_in = int(independent) if burn_in is None else burn_in
    thin = (1 if independent else USUAL_THIN) if thin is None else thin
    pilot = thin == "auto" and not independent
    functions = Functions(
        loss=loss or classification_loss(), potential_loss=potential_loss, observables=dict(observables or {})
    )
    config = Config(
        posterior=posterior or Posterior(n_beta=0.0 if isinstance(sampler, Gaussian) else 200.0, localization=1e4),
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
    manner = Manner(
        observation_batch_size=observation_batch_size,
        chains_at_once=chains_at_once,
        shards=shards,
        compile=compile,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
    )
    manner.check(config)
    moving = MovingWeights(model, config.posterior.weights)
    config = replace(config, posterior=config.posterior.laid_out(moving))
    fingerprints = {
        "weights": fingerprint_tensors(dict(model.state_dict())),
        "choice of weights": fingerprint_text(" ".join(moving.names)),
    }
    with (
        leaving_with_enough(),
        Ranks(shards) as ranks,
        ranks.watching_the_crew(),
        eval_mode(model),
        functional(model, moving, ranks.crew, precision) as in_place,
    ):
        if ranks.count > 1 and (out is None or keep == "covariance"):
            got = "no place that all ranks see" if out is None else "keep='covariance'"
            expected = "out=" if out is None else "keep='traces'"
            raise InputError("ranks", got=f"{ranks.count} with {got}", expected=expected)
        data = DataSets.of(train, query, sampling_data, collate=collate, device=in_place.device)
        check_examples(examples or {}, data.observed)
        kept = Kept(traces=traces, weights=keep_weights, source=source, examples=examples or {})
        job = Job(
            directory,
            config,
            functions,
            data,
            in_place,
            ranks,
            fingerprints=fingerprints,
            manner=manner,
            kept=kept,
            pilot=pilot,
        )
        job.prepare()
        job.plan(dry_run)
        prepared_in = time.perf_counter() - began
        # From here on an interruption waits for the next step: neither a layout nor a step is left half done.
        with (
            interruptible(ranks) as interrupted,
            ranks.watching_the_crew(),
            writing(directory, lock=ranks.leads),
        ):
            if job.open():
                job.choose()
                job.lay_out(interrupted)
                try:
                    job.sample(interrupted)
                except KeyboardInterrupt as error:
                    if out is None:
                        raise
                    again = "command or call" if source is None else f"command, or jostle resume {out},"
                    raise KeyboardInterrupt(
                        f"stopped with {so_far(Run(directory))}; the same {again} goes on"
                    ) from error
                job.finish(prepared_in)
    run = Run(directory)
    _tell(run, leads=ranks.leads)
    if progress and ranks.leads:
        say_at_the_end(lambda: in_python(run.diagnostics(support=False)["verdict"]["summary"]))
    return run


def _tell(run: Run, *, leads: bool) -> None:
    """Warn of failed chains and of what the sampler remarks; raise where no chain is left."""
    failed = run.manifest["failed_chains"]
    if not len(run.healthy_chains):
        first = failed[0]
        raise ChainsFailedError(
            f"{run.why_no_chain}, the first at step {first['step']} ({first['reason']}): lower "
            f"step_size or n_beta, or raise localization"
        )
    if not leads:
        return
    for failure in failed:
        warn(
            f"chain {failure['chain']} failed at step {failure['step']}: {failure['reason']}; it "
            f"{'and its mirror image are' if run.antithetic else 'is'} left out of every estimate",
            ChainFailedWarning,
        )
    for remark in run.manifest["remarks"]:
        warn(remark, SamplerWarning)
