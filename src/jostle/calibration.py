"""Hyperparameters from measurements: how far to go, how much the losses count, and how long a step may be.

`calibrate` chooses, in this order, and gives a reason for each:

1. the localization γ at which Gaussian perturbations raise the mean loss by a chosen number of nats: the resolution at
   which influence is read;
2. nβ from the largest curvature λmax of the mean loss, nβ·λmax = κγ;
3. the step size, stable for both under the sampler in use;
4. burn-in and steps between draws, from how long the chain remembers;

and tries them in a short pilot; a step from which chains diverge, or which heats them, is halved.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from jostle import ranks
from jostle._version import __version__
from jostle.chains.progress import part_of_more, telling
from jostle.config import Precision, describe, require_whole
from jostle.data.datasets import Collate, Data, fingerprint_tensors
from jostle.diagnose import diagnose, read_sample
from jostle.diagnose.thresholds import HOT
from jostle.errors import ChainsFailedError, InputError, JostleWarning
from jostle.losses import Loss
from jostle.losses import classification as classification_loss
from jostle.models.checks import check_neighbours
from jostle.models.functional import eval_mode
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights, WeightSelection
from jostle.posterior import Posterior
from jostle.presets import KAPPA, RISE
from jostle.probing import (
    PROBED_EXAMPLES,
    Curvature,
    Measured,
    Probe,
    in_float32,
    kept_curvature,
    kept_gradient_size,
    kept_rises,
    noise,
    standard_error,
)
from jostle.runs.sampling import attribute
from jostle.samplers import (
    BAOAB,
    SGNHT,
    Gaussian,
    LeimkuhlerMatthews,
    OrnsteinUhlenbeck,
    RMSpropSGLD,
    Sampler,
)
from jostle.samplers.protocol import require_positive, steps_to_forget

PAIRS = (1, 8, 32)
"""The rise is averaged over so many Gaussian perturbations, each with its mirror image: over one to begin with, then
over more of them until its standard error is small. With many weights every perturbation raises the loss alike."""

RISE_TOLERANCE, RISE_ERROR, MOST_TRIALS = 0.05, 0.18, 40
"""How near the measured rise has to come to the chosen one, how large its standard error may be, both relatively; and
how often to try. Scores hardly change with the rise (docs/calibration.md), and a smaller error takes many passes."""

WIDEST = 30.0
"""Perturbations that are so many times the weights' own size and still do not raise the loss never will."""

TOO_WIDE = 0.1
"""SGLD's variance at a step of this share of the stable limit is 1/(1 − share) of what it should be."""

SHARE = 0.25
"""The share of the stable limit for rules whose variance is right at any stable step: losses are not quadratic, and
minibatches are not all alike."""

LONGEST_PULL = 4.0
"""ε(γ + λ) of the Ornstein–Uhlenbeck rule where nothing limits it: a step that forgets 86 % of the last draw."""

MEMORIES_OF_BURN_IN = 3

PILOT_CHAINS, PILOT_DRAWS, PILOT_EXAMPLES = 2, 80, 64
PILOT_FAULTS = ("failed chain", "runaway")
"""What a pilot is rejected for, of what diagnostics say of a run: what a smaller step mends. And for its heat:"""

PILOT_ERRORS = 2.0
"""So sure it has to be that it is too hot: less than of a run, which is not to be called so by chance."""

MOST_TIMES_THE_STEPS = 8
"""Between draws, of what the longest step would take: where smaller steps do not help by then, larger batches do."""


@dataclass(frozen=True)
class Choice:
    """A hyperparameter or a measurement, its value, and why it is what it is."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was chosen, and why: ``attribute(model, train, query, **calibration.settings)`` samples with it."""

    posterior: Posterior
    sampler: Sampler
    burn_in: int
    thin: int
    batch_size: int
    rise: float
    """Of the mean loss over w* under Gaussian perturbations at this localization, in nats, as measured."""
    rise_error: float
    """Its standard error over perturbations."""
    curvature: Curvature | None
    """At w*; None where no gradient is taken."""
    curvature_nearby: float | None
    """λmax at a perturbation: what a chain meets on its way."""
    pilot: dict[str, Any] | None
    choices: tuple[Choice, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `jostle.attribute` that were chosen."""
        names = ("posterior", "sampler", "burn_in", "thin", "batch_size")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured and why each value was chosen, as plain data."""
        return {
            "rise": self.rise,
            "rise_standard_error": self.rise_error,
            "largest_curvature": self.curvature and self.curvature.largest,
            "largest_curvature_nearby": self.curvature_nearby,
            "pilot": self.pilot,
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
        }


def localization_for(probe: Probe, rise: float, *, seed: int = 0) -> tuple[float, np.ndarray]:
    """The localization at which Gaussian perturbations raise the mean loss by so many nats, and the rises it gives.

    The same noise at every trial makes the rise a smooth function of γ; between one that is too low and one that is too
    high, log rise is interpolated in log γ.
    """
    typical = probe.model.moving.center.square().mean().sqrt().item() or 1.0
    scale, rises = 1e-2 * typical, np.empty(0)
    for count in PAIRS:
        scale, rises = _search(probe, rise, scale, typical, seed, count)
        if standard_error(rises) <= RISE_ERROR * rise:
            break
    return scale**-2, rises


def _search(probe: Probe, rise: float, scale: float, typical: float, seed: int, count: int) -> tuple[float, np.ndarray]:
    """The standard deviation of perturbations that raise the mean loss so far, from a first guess of it."""
    tried: dict[float, np.ndarray] = {}
    (lower, low), (upper, high) = (0.0, 0.0), (math.inf, math.inf)
    probe.doing = asked = f"seeking a rise of {rise:g}"
    while len(tried) < MOST_TRIALS and lower < upper / (1 + 1e-4):
        rises = tried[scale] = kept_rises(probe, scale**-2, seed, count)
        mean = float(rises.mean()) if np.isfinite(rises).all() else math.inf
        probe.doing = f"{asked}: {mean:.3g} at localization {scale**-2:.3g}"
        if abs(mean / rise - 1) <= RISE_TOLERANCE:
            break
        if mean < rise:
            lower, low = scale, mean
        else:
            upper, high = scale, mean
        if lower > WIDEST * typical:
            raise InputError(
                "rise",
                got=f"{rise:g} nats, but perturbations of {lower / typical:.0f} times the weights' own size raise the "
                f"mean loss by {mean:.3g}",
                expected="a rise that the loss can reach",
                fix="ask for a smaller one",
            )
        if lower and upper < math.inf:
            # Between two trials a loss of any order is a power of the distance; neither end may stay for ever.
            share = math.log(rise / low) / math.log(high / low) if low > 0 and high < math.inf else 0.5
            scale = lower * (upper / lower) ** min(0.9, max(0.1, share))
        else:  # a quadratic loss would be there with the next guess
            scale *= min(10.0, max(0.1, math.sqrt(rise / max(mean, 1e-30))))
    best = min(tried, key=lambda one: abs(_finite(tried[one].mean()) - rise))
    return best, tried[best]


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 1e300


def longest_step(sampler: Sampler, curvature: float, pull: float, preconditioner: float = 1.0) -> tuple[float, float]:
    """The step to take under a rule, and the limit of its stability, where nβλmax = ``curvature`` and γ + λ = ``pull``.

    Limits are those of docs/samplers.md. Rules whose variance grows with the step stop where it is a tenth too wide
    along the steepest direction; the others at a quarter of the limit. ``preconditioner`` is what G of `RMSpropSGLD`
    comes to.
    """
    total = preconditioner * (curvature + pull)
    if isinstance(sampler, OrnsteinUhlenbeck):
        # Its variance is 1/(1 − r·tanh(εκ/4)) of what it should be, r = nβλ/κ.
        ratio = curvature / pull
        limit = 4 / pull * math.atanh(1 / ratio) if ratio > 1 else math.inf
        unlimited = ratio * math.tanh(LONGEST_PULL / 4) <= TOO_WIDE
        return (LONGEST_PULL if unlimited else 4 * math.atanh(TOO_WIDE / ratio)) / pull, limit
    exact = isinstance(sampler, LeimkuhlerMatthews | BAOAB | SGNHT)
    return (SHARE if exact else TOO_WIDE) * 4 / total, 4 / total


def _step_of(sampler: Any) -> float:
    return sampler.step_size


def memory(sampler: Sampler, pull: float, preconditioner: float = 1.0) -> float:
    """In how many steps, one at the least, such a rule forgets where nothing but the pull holds."""
    if isinstance(sampler, Gaussian):
        return 1.0
    friction = sampler.friction if isinstance(sampler, BAOAB | SGNHT) else None
    return max(1.0, steps_to_forget(preconditioner * _step_of(sampler), pull, friction))


def rule_for(
    sampler: Sampler,
    *,
    rise: float | None = None,
    kappa: float | None = None,
    localization: float | None = None,
    n_beta: float | None = None,
) -> Sampler:
    """The rule that is asked for, `Gaussian` where no gradient is; refuses what nothing would heed."""
    control = isinstance(sampler, Gaussian) or kappa == 0 or n_beta == 0
    if control and kappa:
        raise InputError(
            "kappa",
            got=f"{kappa:g} for draws without a gradient, which have none",
            expected="it when they are read",
            fix=f"leave it out here, and then: jostle top OUT --kappa {kappa:g}",
        )
    for name, value, other, given in (("rise", rise, "localization", localization), ("kappa", kappa, "n_beta", n_beta)):
        if value is not None and given is not None:
            raise InputError(
                name,
                got=f"{value:g} beside {other} {given:g}, which follows from it",
                expected="only one of the two",
                fix=f"leave {other} out to have it chosen, or {name} to keep {other}",
            )
    if control and n_beta:
        raise InputError(
            "n_beta",
            got=f"{n_beta:g} for draws without a gradient",
            expected="none: it is 0 there",
            fix="leave it out, or ask for another sampler",
        )
    return Gaussian() if control else sampler


def calibrate(
    model: nn.Module,
    train: Any,
    query: Any = None,
    *,
    sampling_data: Any = None,
    loss: Loss | None = None,
    potential_loss: Loss | None = None,
    weights: WeightSelection = "all",
    sampler: Sampler | None = None,
    rise: float | None = None,
    kappa: float | None = None,
    localization: float | None = None,
    n_beta: float | None = None,
    step_size: float | None = None,
    batch_size: int = 1024,
    control_variates: bool = False,
    precision: Precision = "model",
    collate: Collate | None = None,
    seed: int = 0,
    pilot: bool = True,
    keep: str | Path | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Choose the posterior, the step size, the burn-in and the thinning for a model, with a reason for each.

    Costs some hundred passes over 256 examples and a short pilot; without a gradient, some tens of passes. The model is
    left as it was.

    Args:
        model: the trained model, at w*.
        train: as for `jostle.attribute`, as are ``query``, ``sampling_data``, ``loss``, ``potential_loss``,
            ``collate``, ``precision``, ``control_variates`` and ``batch_size``.
        query: nothing is measured on it: a calibration takes the data of the run that it is for.
        sampling_data: what rise and curvature are measured on, and minibatches drawn from. Default: ``train``.
        loss: what is recorded.
        potential_loss: what drives the chain, where it differs.
        weights: which weights move (see `jostle.Posterior`).
        sampler: the rule; its step size is replaced. Default: `jostle.BAOAB`.
        rise: the resolution: by how many nats Gaussian perturbations are to raise the mean loss over w*. Default: 0.3.
        kappa: κ = nβ·λmax/γ, how much the losses count beside the pull. 0 is the control without a gradient. Default:
            10.
        localization: γ, in the place of a rise.
        n_beta: nβ, in the place of a κ.
        step_size: ε, where it is given; the pilot may still halve it.
        batch_size: m, the size of a minibatch.
        control_variates: whether chains are to use them.
        precision: what chains are to compute in; measurements are in float32.
        collate: makes a batch of a list of samples.
        seed: of perturbations, and of the pilot.
        pilot: whether to try the settings.
        keep: a file (JSON) for what is measured: the same call, after an interruption, goes on with what is in it.
        progress: show what is being done where stderr is a terminal or a notebook, and a line a minute elsewhere.
        say: is told each choice as it is made.

    Raises:
        InputError: something passed cannot be used, or no setting was found that is stable.
    """
    for name, value in (("rise", rise), ("localization", localization)):
        if value is not None:
            require_positive(name, value)
    for name, value in (("kappa", kappa), ("n_beta", n_beta)):
        if value is not None and not (isinstance(value, numbers.Real) and 0 <= float(value) < math.inf):
            raise InputError(name, got=repr(value), expected="a finite number that is not negative")
    require_whole("batch_size", batch_size, at_least=1)
    loss = loss or classification_loss()
    sampler = rule_for(
        sampler or BAOAB(step_size=1.0), rise=rise, kappa=kappa, localization=localization, n_beta=n_beta
    )
    rise, kappa = (RISE if rise is None else rise), (KAPPA if kappa is None else kappa)
    chosen: list[Choice] = []

    def note(name: str, value: float | str, reason: str) -> None:
        chosen.append(Choice(name, value if isinstance(value, str) else f"{value:.4g}", reason))
        say(f"{name} {chosen[-1].value}: {reason}")

    measured_on = in_float32(model)
    moving = MovingWeights(measured_on, weights)
    with eval_mode(measured_on), InPlace(measured_on, moving) as in_place, telling(progress) as tell:
        device = next(measured_on.parameters()).device
        name, source = ("train", train) if sampling_data is None else ("sampling_data", sampling_data)
        data = Data(source, name, collate=collate, device=device)
        check_neighbours(in_place, potential_loss or loss, data)
        probe = Probe(in_place, potential_loss or loss, data, batch_size, PROBED_EXAMPLES, tell)
        if not math.isfinite(probe.at_center):
            raise InputError(
                f"loss at w* on {name}", got=probe.at_center, expected="finite losses at the checkpoint itself"
            )
        if keep is not None:
            sets = {"train": train, "query": query, "sampling data": sampling_data}
            about = {"jostle": __version__, "weights": fingerprint_tensors(dict(model.state_dict()))}
            about |= {
                name: Data(source, name, collate=collate, device=device).fingerprint()
                for name, source in sets.items()
                if source is not None
            }
            # Functions have no fingerprint; their values at w* stand for one.
            about |= {"losses": [describe(loss), describe(potential_loss)], "mean loss at w*": probe.at_center}
            about |= {"moving": list(moving.names), "batch size": batch_size, "seed": seed}
            probe.measured = Measured(Path(keep), about)
        if localization is None:
            localization, rises = localization_for(probe, rise, seed=seed)
            reason = f"Gaussian perturbations of this precision raise the mean loss of {probe.at_center:.3g} by"
        else:
            probe.doing = f"the rise at localization {localization:.3g}"
            rises = kept_rises(probe, localization, seed, PAIRS[1])
            reason = "given; it raises the mean loss by"
        found = float(rises.mean())
        error = standard_error(rises)
        reason += f" {found:.3g} ± {error:.1g} nats ({probe.examples} examples)"
        if not isinstance(sampler, Gaussian):  # losses hold a chain that has their gradient where they are steep
            reason += " without a gradient; the run's own rise is lower"
        note("localization", localization, reason)
        curvature, nearby, steepest = None, None, 0.0
        if not isinstance(sampler, Gaussian):
            curvature = kept_curvature(probe, "at w*", moving.center, seed)
            jolted = moving.center + noise(in_place, seed, 1) / math.sqrt(localization)
            nearby = kept_curvature(probe, f"at localization {localization!r}", jolted, seed).largest
            steepest = max(curvature.largest, nearby)
            note(
                "curvature",
                steepest,
                f"the largest of the mean loss: {curvature.largest:.3g} at w*, {nearby:.3g} at such a perturbation",
            )
        preconditioner = 1.0
        if isinstance(sampler, RMSpropSGLD):
            size = kept_gradient_size(probe, localization, batch_size, seed)
            preconditioner = 1 / (size + sampler.stabilizer)
            note(
                "preconditioner",
                preconditioner,
                f"1/({size:.3g} + the stabilizer), by the root mean square of minibatches' gradients at perturbations",
            )
    if isinstance(sampler, Gaussian):
        n_beta = 0.0
        note("n_beta", 0.0, "no gradient was asked for: draws are independent, and can be read at a larger one")
    elif n_beta is None:
        if not steepest > 0:
            raise InputError("curvature", got=f"{steepest:.3g}", expected="a loss that curves upwards somewhere")
        n_beta = kappa * localization / steepest
        note("n_beta", n_beta, f"n_beta · curvature is {kappa:g} times the localization")
    else:
        note("n_beta", n_beta, f"given; n_beta · curvature is {n_beta * steepest / localization:.3g} · localization")
    posterior = Posterior(n_beta=n_beta, localization=localization, weights=weights)
    limit, step, at_the_longest = math.inf, 0.0, 1.0
    if not isinstance(sampler, Gaussian):
        longest, limit = longest_step(sampler, max(0.0, n_beta * steepest), localization, preconditioner)
        at_the_longest = memory(_with_step(sampler, longest), localization, preconditioner)
        step = longest if step_size is None else step_size
        sampler = _with_step(sampler, step)
    tried, halvings = None, 0
    if pilot and not isinstance(sampler, Gaussian):  # whose draws are those that the rise was measured with

        def tried_out(sampler: Sampler) -> dict[str, Any]:
            def measure() -> dict[str, Any]:
                return _pilot(
                    model, source, loss=potential_loss or loss, collate=collate, posterior=posterior, sampler=sampler,
                    lengths=_lengths(sampler, localization, preconditioner), brief=not halvings,
                    batch_size=batch_size, seed=seed, control_variates=control_variates, precision=precision,
                    progress=progress,
                )  # fmt: skip

            about = {"n_beta": n_beta, "localization": localization}
            return probe.measured(f"pilot of {sampler}, {about}, {control_variates=}, {precision=}", measure)

        while True:
            say(f"a pilot of {PILOT_CHAINS} chains and {PILOT_DRAWS} draws")
            tried = tried_out(sampler)
            if tried["fault"] is None:
                break
            say(f"step_size {step:.3g} is rejected: {tried['fault']}")
            halvings, step = halvings + 1, step / 2
            sampler = _with_step(sampler, step)
            times = memory(sampler, localization, preconditioner) / at_the_longest
            if times > MOST_TIMES_THE_STEPS:
                raise InputError(
                    "step_size",
                    got=f"a pilot that fails at {2 * step:.3g} still: {tried['fault']}",
                    expected=f"chains that stay, without {times:.0f} times the steps between draws",
                    fix="raise --batch-size, or lower --kappa" if batch_size < len(data) else "lower --kappa",
                )
    if not isinstance(sampler, Gaussian):
        stable = "stable at any length" if limit == math.inf else f"stable below {limit:.3g}"
        reason = "given; " if step_size is not None else f"{type(sampler).__name__} is "
        reason += f"{stable} for both"
        if halvings:
            reason += f"; halved {halvings} time{'s' if halvings > 1 else ''}, as the pilot was not stable or too hot"
        note("step_size", step, reason)
    forgets = memory(sampler, localization, preconditioner)
    burn_in, thin = _lengths(sampler, localization, preconditioner)
    if isinstance(sampler, Gaussian):
        note("thin", str(thin), "every step is a new draw")
    else:
        note("burn_in", str(burn_in), f"{MEMORIES_OF_BURN_IN} times the {forgets:.1f} steps in which the pull forgets")
        note("thin", str(thin), "those steps, rounded up")
    if tried is not None:
        note(
            "pilot",
            f"{tried['rise']:+.3g} nats",
            f"rise of the mean loss over {PILOT_CHAINS} chains of {PILOT_DRAWS} draws; none failed",
        )
    return Calibration(
        posterior=posterior,
        sampler=sampler,
        burn_in=burn_in,
        thin=thin,
        batch_size=batch_size,
        rise=found,
        rise_error=error,
        curvature=curvature,
        curvature_nearby=nearby,
        pilot=tried,
        choices=tuple(chosen),
    )


def _with_step(sampler: Any, step_size: float) -> Sampler:
    return dataclasses.replace(sampler, step_size=step_size)


def _lengths(sampler: Sampler, pull: float, preconditioner: float) -> tuple[int, int]:
    """Burn-in and steps between draws."""
    forgets = math.ceil(memory(sampler, pull, preconditioner))
    return (1, 1) if isinstance(sampler, Gaussian) else (MEMORIES_OF_BURN_IN * forgets, forgets)


def _pilot(
    model: nn.Module,
    data: Any,
    *,
    collate: Collate | None,
    lengths: tuple[int, int],
    brief: bool,
    **settings: Any,
) -> dict[str, Any]:
    """Sample for a short while, and say what is wrong with it, if anything, as diagnostics do.

    Where a step was rejected already it takes its time.
    """
    whole = Data(data, "sampling_data", collate=collate, device=next(model.parameters()).device)
    probed = [whole.sample(index) for index in whole.spread(PILOT_EXAMPLES)]
    burn_in, thin = lengths
    if brief:  # directions that may be hot forget sooner than those that the pull alone holds
        thin = math.ceil(thin / 4)
    started = time.perf_counter()
    fault, rise, heat = None, None, None
    with warnings.catch_warnings(), ranks.alone(), part_of_more():
        warnings.simplefilter("ignore", JostleWarning)
        try:
            run = attribute(
                model, probed, probed[:1], sampling_data=data, chains=PILOT_CHAINS, draws=PILOT_DRAWS, burn_in=burn_in,
                thin=thin, collate=collate, compile=False, **settings,
            )  # fmt: skip
        except ChainsFailedError:
            fault = "every chain left the finite numbers"
        else:
            found = diagnose(run.config, run.manifest, read_sample(run.traces, run.healthy_chains))
            rise, heat = found["rise"], found["temperature"]
            faults = [one["finding"] for one in found["verdict"]["reasons"] if one["kind"] in PILOT_FAULTS]
            hot, error = heat["value"], heat["standard_error"]
            if hot is not None and error is not None and hot > max(HOT, 1 + PILOT_ERRORS * error):
                larger = " (a larger --batch-size helps more)" if settings["batch_size"] < len(whole) else ""
                faults.append(f"its chains are {hot:.3g} ± {error:.1g} times as hot as they should be{larger}")
            fault = faults[0] if faults else None
    return {"fault": fault, "rise": rise, "temperature": heat, "seconds": time.perf_counter() - started}
