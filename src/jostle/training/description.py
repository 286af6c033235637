"""How a model was trained: the optimizer, its rates and decay, and how much weight each example's loss had."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor, nn

from jostle.errors import InputError
from jostle.models.weights import MovingWeights
from jostle.training.checkpoints import read_checkpoint
from jostle.training.optimizers import KINDS, OptimizerNumbers, numbers_of, spread_rates, unknown_optimizer

Count = Literal["tokens", "sequences"]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that share a learning rate and a weight decay.

    Args:
        parameters: their names, as in ``model.named_parameters()``.
        total_rate: Σ of the learning rates of all steps.
        weight_decay: as the optimizer was given it.
    """

    parameters: Sequence[str]
    total_rate: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.parameters, str) or not all(isinstance(name, str) for name in self.parameters):
            raise InputError("parameters", got=repr(self.parameters), expected="a list of names")
        object.__setattr__(self, "parameters", tuple(self.parameters))
        _require_rate(self.total_rate)
        _require_number("weight_decay", self.weight_decay)


@dataclass(frozen=True)
class Diagonals:
    """Two numbers for each weight that moves; the precision of training's local posterior is hold + 1 / reach.

    Attributes:
        reach: how far training moves a weight against a gradient of the mean loss, per unit of it, over all steps. 0
            where it never moved.
        hold: the curvature that weight decay adds to the mean loss.
    """

    reach: Float[Tensor, " weight"]
    hold: Float[Tensor, " weight"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """How a model was trained, as far as it decides what a training example did.

    A step moves weights against the gradient of the mean loss, clipped by a factor c, in the optimizer's metric M. With
    τ = Σ rates, a weight decay λ and second moments v̂:

        SGD     reach = c·τ·m·(1 − dampening)/(1 − momentum),   hold = λ/c
        Adam    reach = c·τ/(√v̂ + ε),                         hold = λ/c
        AdamW   reach = c·τ/(√v̂ + ε),                         hold = λ·(√v̂ + ε)/c

    Gradients are clipped before an optimizer adds its decay, and v̂ is of clipped gradients: hence c, which turns both
    into units of the mean loss. Momentum builds up from nothing: m is how much of it there was on average, which is 1
    but for short trainings (Adam corrects for that by itself). Without momentum, dampening does nothing, as in PyTorch;
    Nesterov's momentum has the same sum. A weight whose v̂ is 0 never had a gradient, and has reach 0.

    Args:
        optimizer: ``"sgd"``, ``"adam"`` (decay is added to the gradient) or ``"adamw"`` (decay is decoupled).
        total_rate: Σ of the learning rates of all steps, for every parameter that is in none of ``groups``; None if
            these were not trained.
        weight_decay: of the same.
        groups: parameters with a rate or decay of their own.
        momentum: of SGD.
        momentum_factor: m (`built_up` finds it from the rates, as `from_optimizer` does).
        dampening: of SGD.
        nesterov: of SGD.
        eps: ε, of Adam and AdamW.
        clip_factor: c, the mean of min(1, max_norm / norm) over the steps, weighted by their rates.
        batch_size: examples in an optimizer step, over all devices and gradient accumulation. Adam and AdamW need it:
            second moments are of gradients of such batches.
        second_moments: v̂ by name of parameter, bias-corrected. None: they are estimated at the checkpoint.
        count_alike: whose losses have the same weight in training: all ``"tokens"``, as where a batch's loss is the
            mean over its tokens, or all ``"sequences"``. An image is a sequence of one.
        total: how many of these there were in all of training, where those asked about are only a part.
        times_seen: how often each example was seen, relative to the mean over all that was trained on.

    References:
        Sutskever et al. 2013 (momentum); Kingma & Ba 2015 (Adam); Loshchilov & Hutter 2019 (AdamW).
    """

    optimizer: str
    total_rate: float | None = None
    weight_decay: float = 0.0
    groups: Sequence[ParameterGroup] = ()
    momentum: float = 0.0
    momentum_factor: float = 1.0
    dampening: float = 0.0
    nesterov: bool = False
    eps: float = 1e-8
    clip_factor: float = 1.0
    batch_size: int | None = None
    second_moments: Mapping[str, Tensor] | None = None
    count_alike: Count = "tokens"
    total: float | None = None
    times_seen: ArrayLike | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.times_seen is not None:
            object.__setattr__(self, "times_seen", np.asarray(self.times_seen, dtype=np.float64))
        if self.optimizer not in KINDS:
            raise unknown_optimizer(repr(self.optimizer))
        if self.total_rate is not None:
            _require_rate(self.total_rate)
        elif not self.groups:
            raise InputError("total_rate", got="None", expected="the sum of the learning rates of all steps")
        for name in ("weight_decay", "momentum", "momentum_factor", "dampening", "eps", "clip_factor"):
            _require_number(name, getattr(self, name))
        self._require_factors()
        self._require_separate_groups()
        self._require_loss_weights()

    def _require_factors(self) -> None:
        for name in ("momentum", "dampening"):
            if self.optimizer != "sgd" and getattr(self, name):
                raise InputError(name, got=getattr(self, name), expected="it of SGD alone; Adam's sums are the same")
            if getattr(self, name) >= 1:
                raise InputError(name, got=getattr(self, name), expected="a number below 1")
        if not 0 < self.clip_factor <= 1:
            raise InputError(
                "clip_factor",
                got=self.clip_factor,
                expected="the mean of min(1, max_norm / norm), above 0 and at most 1",
            )
        size = self.batch_size
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0
        if not (whole or (size is None and self.optimizer == "sgd")):
            raise InputError(
                "batch_size",
                got=repr(self.batch_size),
                expected="the examples in an optimizer step, over all devices and gradient accumulation",
            )

    def _require_separate_groups(self) -> None:
        names = [name for group in self.groups for name in group.parameters]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError("groups", got=f"{twice!r} in two of them", expected="each parameter in one group")

    def _require_loss_weights(self) -> None:
        if self.count_alike not in ("tokens", "sequences"):
            raise InputError("count_alike", got=repr(self.count_alike), expected="'tokens' or 'sequences'")
        if self.total is not None:
            _require_number("total", self.total, positive=True)
        if self.times_seen is not None:
            seen = np.asarray(self.times_seen)
            if seen.ndim != 1 or not (np.isfinite(seen) & (seen >= 0)).all() or not seen.any():
                raise InputError("times_seen", got="other values", expected="a number for each example, none negative")

    @classmethod
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        total_rate: float | Sequence[float] | None = None,
        rates: Sequence[float] | Sequence[Sequence[float]] | None = None,
        batch_size: int | None = None,
        clip_factor: float = 1.0,
        count_alike: Count = "tokens",
        total: float | None = None,
        times_seen: ArrayLike | None = None,
    ) -> Training:
        """Read a `torch.optim` SGD, Adam or AdamW as it is after training.

        Args:
            optimizer: it, or what accelerate made of it.
            model: the model that it trained.
            total_rate: Σ of the learning rates of all steps, which an optimizer does not know; one number, or one for
                each of its groups.
            rates: instead, the rates themselves, by step; a row of them for each step where groups differ.
            batch_size: as for `Training`, like all that follow.
            clip_factor: c.
            count_alike: whose losses have the same weight.
            total: how many of these there were.
            times_seen: how often each example was seen.

        Example:
            >>> training = Training.from_optimizer(optimizer, model, rates=rates, batch_size=32)
        """
        numbers = numbers_of(optimizer, model)
        if (total_rate is None) == (rates is None):
            raise InputError(
                "total_rate",
                got="neither it nor rates" if rates is None else "both it and rates",
                expected="the sum of the learning rates of all steps, or the rates: an optimizer knows only the last",
            )
        sums = np.asarray(rates, dtype=np.float64).sum(axis=0).tolist() if total_rate is None else total_rate
        return cls._of(
            numbers,
            spread_rates(sums, numbers.rates, "total_rate" if rates is None else "rates"),
            batch_size=batch_size,
            clip_factor=clip_factor,
            momentum_factor=1.0
            if rates is None
            else built_up(rates, numbers.momentum, dampening=numbers.dampening, nesterov=numbers.nesterov),
            count_alike=count_alike,
            total=total,
            times_seen=times_seen,
        )

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        model: nn.Module | None = None,
        *,
        total_rate: float | Sequence[float] | None = None,
        batch_size: int | None = None,
        examples: int | None = None,
        max_grad_norm: float | None = 1.0,
        clip_factor: float | None = None,
        count_alike: Count = "tokens",
        total: float | None = None,
        times_seen: ArrayLike | None = None,
    ) -> Training:
        """Read a directory ``checkpoint-N`` of the Hugging Face Trainer. No code in its files is run.

        The rates are rebuilt from those that were logged, if a constant, linear or cosine schedule with warm-up agrees
        with all of them and they determine its sum. The clip factor is estimated from logged gradient norms.

        Args:
            directory: it, with ``optimizer.pt`` and ``trainer_state.json``.
            model: the model as it was trained, with gradients required of the same parameters; with its adapter, where
                a LoRA was trained. Loaded from the directory by default.
            total_rate: Σ of the learning rates of all steps, where the log does not determine it; one number, or one
                for each group.
            batch_size: examples in an optimizer step: those on a device, times devices, times accumulation.
            examples: instead, how many examples were trained on, from which the batch size is inferred.
            max_grad_norm: to which gradients were clipped, which is not recorded: the Trainer's default. 0 or None:
                they were not.
            clip_factor: c, instead of its estimate.
            count_alike: as for `Training`, like all that follow. Tokens count alike in the Trainer's batches.
            total: how many of these there were.
            times_seen: how often each example was seen.

        Example:
            >>> training = Training.from_checkpoint("out/checkpoint-1500", examples=12_000)
        """
        read = read_checkpoint(
            directory,
            model,
            total_rate=total_rate,
            batch_size=batch_size,
            examples=examples,
            max_grad_norm=max_grad_norm,
            clip_factor=clip_factor,
        )
        return cls._of(
            read.optimizer,
            read.total_rates,
            batch_size=read.batch_size,
            clip_factor=read.clip_factor,
            count_alike=count_alike,
            total=total,
            times_seen=times_seen,
        )

    @classmethod
    def _of(cls, numbers: OptimizerNumbers, total_rates: Sequence[float], **others: Any) -> Training:
        """From an optimizer's groups; those that are empty, or had a rate of 0 all along, trained nothing."""
        given = zip(numbers.parameters, numbers.rates, total_rates, numbers.weight_decay, strict=True)
        return cls(
            optimizer=numbers.optimizer,
            groups=[
                ParameterGroup(parameters=names, total_rate=total, weight_decay=decay)
                for names, rate, total, decay in given
                if names and (rate or total)
            ],
            momentum=numbers.momentum,
            dampening=numbers.dampening,
            nesterov=numbers.nesterov,
            eps=numbers.eps,
            second_moments=numbers.second_moments,
            **others,
        )

    def check(self, model: nn.Module) -> None:
        """Refuse a training of other parameters than the model's."""
        shapes = {name: value.shape for name, value in model.named_parameters()}
        aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(shapes)
        moments = self.second_moments or {}
        for name in (*(name for group in self.groups for name in group.parameters), *moments):
            if name not in shapes:
                tied = name in aliases
                raise InputError(
                    "training",
                    got=f"a parameter {name!r}, which {'has another name as well' if tied else 'the model has not'}",
                    expected="names of list(dict(model.named_parameters()))",
                    fix="name tied weights once, as there" if tied else "",
                )
        for name, moment in moments.items():
            if moment.dim() and moment.shape != shapes[name]:
                raise InputError(
                    f"second moments of {name!r}",
                    got=f"shape {tuple(moment.shape)}",
                    expected=f"{tuple(shapes[name])}, the parameter's",
                )

    def diagonals(self, moving: MovingWeights, second_moments: Float[Tensor, " weight"] | None = None) -> Diagonals:
        """Return reach and hold of the weights that move, in their order.

        Args:
            moving: the weights. All of them must have been trained.
            second_moments: v̂ in the same order; by default, the training's own.
        """
        rate, decay = self.rates_and_decay(moving)
        if self.optimizer == "sgd":
            slowed = 1.0
            if self.momentum:
                slowed = self.momentum_factor * (1 - self.dampening) / (1 - self.momentum)
            return Diagonals(self.clip_factor * slowed * rate, decay / self.clip_factor)
        moments = self._checked_moments(moving, second_moments)
        inverse_metric = (moments.sqrt() + self.eps) / self.clip_factor
        return Diagonals(
            torch.where(moments > 0, rate / inverse_metric, 0.0),
            decay * inverse_metric if self.optimizer == "adamw" else decay / self.clip_factor,
        )

    def rates_and_decay(self, moving: MovingWeights) -> tuple[Float[Tensor, " weight"], Float[Tensor, " weight"]]:
        """Return Σ rates and the weight decay of each weight that moves, in their order."""
        own = {name: group for group in self.groups for name in group.parameters}
        rates = [own[name].total_rate if name in own else self.total_rate for name in moving.names]
        decays = [own[name].weight_decay if name in own else self.weight_decay for name in moving.names]
        still = [name for name, rate in zip(moving.names, rates, strict=True) if rate is None]
        if still:
            some = ", ".join(map(repr, still[:4])) + (", ..." if len(still) > 4 else "")
            raise InputError(
                "weights",
                got=f"{len(still)} parameters that training never moved: {some}",
                expected="weights that were trained",
                fix="choose weights among these, or give total_rate for the rest",
            )
        device = moving.center.device
        sizes = torch.tensor(moving.sizes, device=device)
        rate, decay = (
            torch.repeat_interleave(torch.tensor(values, dtype=moving.dtype, device=device), sizes)
            for values in (rates, decays)
        )
        return rate, decay

    def _checked_moments(self, moving: MovingWeights, given: Tensor | None) -> Float[Tensor, " weight"]:
        moments = self.flat_second_moments(moving) if given is None else given
        if moments is None:
            raise InputError("second_moments", got="None", expected="those of the optimizer, or an estimate of them")
        if moments.shape != (moving.total,) or not (torch.isfinite(moments) & (moments >= 0)).all():
            raise InputError(
                "second_moments",
                got=f"shape {tuple(moments.shape)}, or values that are negative or not finite",
                expected=f"a mean of squares for each of the {moving.total:,} weights",
            )
        return moments.to(moving.center.device, moving.dtype)

    def flat_second_moments(self, moving: MovingWeights) -> Float[Tensor, " weight"] | None:
        """Return the training's own v̂ in the order of the weights that move, or None where it has none."""
        if self.second_moments is None:
            return None
        parts: list[Tensor] = []
        for name, shape, kept in zip(moving.names, moving.whole.shapes, moving.kept, strict=True):
            moment = self.second_moments.get(name)
            if moment is None or (moment.dim() and moment.shape != shape):
                raise InputError(
                    f"second moments of {name!r}",
                    got="none" if moment is None else f"shape {tuple(moment.shape)}",
                    expected=f"shape {tuple(shape)}",
                )
            parts.append(moment.expand(shape).reshape(-1)[kept].to(moving.center.device, moving.dtype))
        return torch.cat(parts)

    def shares(self, token_counts: ArrayLike) -> Float[np.ndarray, " example"]:
        """Return ωᵢ, each example's share of all loss weight in training.

        ωᵢ = sᵢaᵢ / Σ sₖaₖ, or sᵢaᵢ / total where that is given, with sᵢ how often it was seen and aᵢ its scored
        tokens, or 1 where sequences count alike.

        Args:
            token_counts: scored tokens of each example; ones for what has no tokens.
        """
        counts = np.asarray(token_counts, dtype=np.float64)
        if counts.ndim != 1 or not (np.isfinite(counts) & (counts >= 0)).all() or not counts.any():
            raise InputError("token_counts", got="other values", expected="the number of scored tokens of each example")
        weights = counts if self.count_alike == "tokens" else np.ones_like(counts)
        if self.times_seen is not None:
            seen = np.asarray(self.times_seen)
            if len(seen) != len(counts):
                raise InputError("times_seen", got=f"{len(seen)} numbers", expected=f"{len(counts)}, as examples")
            weights = weights * seen
        shares = weights / (weights.sum() if self.total is None else self.total)
        if shares.sum() > 1 + 1e-6:
            raise InputError(
                "total",
                got=f"{self.total:g} {self.count_alike}, for examples that are {weights.sum():g} of them",
                expected=f"the {self.count_alike} of all of training",
            )
        return shares

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; of tensors and arrays, what they are of."""
        names = (
            "optimizer", "total_rate", "weight_decay", "momentum", "momentum_factor", "dampening", "nesterov", "eps",
            "clip_factor",
        )  # fmt: skip
        plain = {name: getattr(self, name) for name in (*names, "batch_size", "count_alike", "total")}
        plain["groups"] = [
            {"parameters": list(group.parameters), "total_rate": group.total_rate, "weight_decay": group.weight_decay}
            for group in self.groups
        ]
        moments = self.second_moments
        plain["second_moments"] = "estimated" if moments is None else f"given for {len(moments)} parameters"
        if self.optimizer == "sgd":
            plain["second_moments"] = "none"
        seen = None if self.times_seen is None else np.asarray(self.times_seen)
        plain["times_seen"] = None if seen is None else f"{seen.min():g} to {seen.max():g}, of {len(seen)} examples"
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in plain.items()}

    def __str__(self) -> str:
        name = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[self.optimizer]
        rates = [
            f"rates that sum to {group.total_rate:.4g} and weight decay {group.weight_decay:g} for "
            f"{len(group.parameters)} parameters"
            for group in self.groups
        ]
        if self.total_rate is not None:
            rest = " for all others" if rates else ""
            rates.append(f"rates that sum to {self.total_rate:.4g} and weight decay {self.weight_decay:g}{rest}")
        parts = [f"Trained by {name}, with {', '.join(rates)}."]
        if self.momentum:
            parts.append(f"Momentum {self.momentum:g}, dampening {self.dampening:g}.")
        if self.clip_factor < 1:
            parts.append(f"Gradients were clipped to {self.clip_factor:.3g} of their length on average.")
        if self.batch_size is not None:
            parts.append(f"A step saw {self.batch_size} examples.")
        if self.optimizer != "sgd":
            own = "estimated at the checkpoint" if self.second_moments is None else "the optimizer's own"
            parts.append(f"Second moments are {own}.")
        whole = "" if self.total is None else f", of {self.total:g} in all"
        parts.append(f"All {self.count_alike} had the same weight{whole}.")
        return " ".join(parts)

    __repr__ = __str__


def built_up(rates: ArrayLike, momentum: float, *, dampening: float = 0.0, nesterov: bool = False) -> float:
    """Return m, how much of its momentum SGD had on average over its steps, weighted by their rates.

    Of a gradient that never changes, step s = 1, 2, … takes 1 − momentumˢ⁻¹·(1 − (1 − momentum)/(1 − dampening)) of
    what steps take in the end: the first one is not dampened. Nesterov's is one step ahead.

    Args:
        rates: of each step; a row for each, where groups differ.
        momentum: of SGD.
        dampening: of SGD.
        nesterov: of SGD.
    """
    by_step = np.asarray(rates, dtype=np.float64)
    if not by_step.size:
        raise InputError("rates", got="none", expected="the learning rate of each step")
    by_step = by_step.reshape(len(by_step), -1).sum(1)
    if not momentum:
        return 1.0
    before = np.arange(len(by_step)) + nesterov
    missing = 1 - (1 - momentum) / (1 - dampening)
    return float(np.average(1 - momentum**before * missing, weights=by_step))


def _require_rate(rate: float) -> None:
    if not (isinstance(rate, float | int | np.number) and math.isfinite(rate) and rate > 0):
        raise InputError(
            "total_rate",
            got=repr(rate),
            expected="the sum of the learning rates of all steps, finite and above 0",
            fix="sum what the schedule gave: sum(rates)",
        )


def _require_number(name: str, value: float, *, positive: bool = False) -> None:
    finite = isinstance(value, float | int | np.number) and math.isfinite(value)
    if not finite or value < 0 or (positive and value == 0):
        expected = "a finite number above 0" if positive else "a finite number that is not negative"
        raise InputError(name, got=repr(value), expected=expected)
