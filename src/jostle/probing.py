"""What is measured around w*: how far perturbations raise the mean loss, and how much it curves.

`jostle.calibration` chooses by it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import eigh_tridiagonal
from torch import Tensor, nn

from jostle.chains import randomness
from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.files import replace_file
from jostle.losses import Loss
from jostle.models.checks import unchanged
from jostle.models.functional import FunctionalModel, sample_means
from jostle.runs.layout import writing

PROBED_EXAMPLES = 256
"""Rise and curvature are measured on so many examples of the sampling data, evenly spaced."""

NUDGE = 1e-3
"""Gradients are differenced over a distance that costs about so many nats along the steepest direction: far above
rounding, and well within the quadratic neighbourhood."""

CURVATURE_TOLERANCE, MOST_LANCZOS = 0.01, 40

GRADIENTS = 4
"""How many minibatches their size is measured with: it is a mean over all weights."""


@dataclass(frozen=True)
class Curvature:
    """λmax of a Hessian, and how far from an eigenvalue it may be."""

    largest: float
    residual: float


class Measured:
    """What has been measured so far, kept in a file: a calibration that was interrupted does not begin again.

    A file about something else is written over.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path, self._about = path, dict(about)
        try:
            there = json.loads(path.read_text())
            self._known: dict[str, Any] = there["measured"] if there["about"] == self._about else {}
        except (OSError, ValueError, KeyError, TypeError):
            self._known = {}

    def __call__(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return what was measured under this name, or measure it."""
        if name not in self._known:
            self._known[name] = measure()
            with writing(self._path.parent, lock=False):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._path, json.dumps({"about": self._about, "measured": self._known}, indent=1))
        return self._known[name]


class Probe:
    """The mean loss over a part of the data, and its gradient, as functions of the moving weights.

    Attributes:
        examples: how many they are.
        doing: what it is asked for, in words, for whoever waits.
    """

    def __init__(
        self,
        model: FunctionalModel,
        loss: Loss,
        data: Data,
        batch_size: int,
        most: int,
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        chosen = np.asarray(data.spread(most))
        self.model, self.examples, self.doing = model, len(chosen), "the mean loss at w*"
        self.measured: Callable[[str, Callable[[], Any]], Any] = lambda name, measure: measure()
        self._loss, self._data, self._tell, self._passes = loss, data, tell, 0
        self._batches = np.array_split(chosen, math.ceil(len(chosen) / batch_size))

    def _parts(self) -> Iterator[np.ndarray]:
        """The batches of one pass."""
        self._passes += 1
        for chosen in self._batches:
            self._tell(f"{self.doing}, pass {self._passes:,}")
            yield chosen

    @cached_property
    def at_center(self) -> float:
        """L̄(w*)."""
        return self.mean_loss(self.model.moving.center)

    @torch.no_grad()
    def mean_loss(self, weights: Float[Tensor, " weight"]) -> float:
        """L̄(w)."""
        total = 0.0
        for chosen in self._parts():
            batch = self._data.batch(chosen)
            with unchanged(batch, f"loss on {self._data.name}"):
                losses = self.model.evaluate(self._loss, weights[None], batch)[0]
            total += sample_means(losses, self._loss, batch).double().sum().item()
        return total / self.examples

    def gradient(self, weights: Float[Tensor, " weight"]) -> Float[Tensor, " weight"]:
        """∇L̄(w)."""
        total = torch.zeros_like(weights)
        for chosen in self._parts():
            part = self.model.mean_loss_gradient(self._loss, weights[None], self._data, [chosen])[0]
            total += len(chosen) / self.examples * part
        return total

    def minibatch_gradient(
        self, weights: Float[Tensor, " weight"], batch_size: int, seed: int
    ) -> Float[Tensor, " weight"]:
        """∇ of the mean loss over as many examples of all the data as a chain draws for a step."""
        count = len(self._data)
        chosen = np.random.default_rng(seed).choice(count, min(batch_size, count), replace=False)
        self._tell(self.doing)
        return self.model.mean_loss_gradient(self._loss, weights[None], self._data, [chosen])[0]

    def hessian_times(
        self, weights: Float[Tensor, " weight"], direction: Float[Tensor, " weight"], distance: float
    ) -> Float[Tensor, " weight"]:
        """Hv = (∇L̄(w + hv) − ∇L̄(w − hv))/2h: no second derivative is asked of the model.

        Many fast kernels (attention, our own cross-entropy) have none.
        """
        for _ in range(20):
            ahead = self.gradient(weights + distance * direction)
            difference = (ahead - self.gradient(weights - distance * direction)) / (2 * distance)
            if torch.isfinite(difference).all():
                return difference
            distance /= 4
        raise InputError(
            "curvature", got="gradients that are not finite beside w*", expected="a loss that is smooth around w*"
        )


def largest_curvature(probe: Probe, weights: Float[Tensor, " weight"], *, seed: int = 0) -> Curvature:
    """λmax of the Hessian of the mean loss, by Lanczos iteration on Hessian-vector products.

    A few power iterations first find how far apart gradients are to be taken: √(2·NUDGE/λ).

    Reference: Lanczos, *An iteration method for the solution of the eigenvalue problem*, 1950; without
    reorthogonalization, which the end of a spectrum does not need.
    """
    probe.doing = asked = "seeking the largest curvature"
    direction = noise(probe.model, seed, 0)
    distance = 1e-3 * (weights.norm().item() or math.sqrt(len(weights)))
    for _ in range(3):
        direction = direction / direction.norm()
        image = probe.hessian_times(weights, direction, distance)
        size = image.norm().item()
        if not size:
            return Curvature(0.0, 0.0)
        distance, direction = math.sqrt(2 * NUDGE / size), image
    direction, before, beta = direction / direction.norm(), torch.zeros_like(direction), 0.0
    alphas: list[float] = []
    betas: list[float] = []
    while True:
        image = probe.hessian_times(weights, direction, distance) - beta * before
        alphas.append(torch.dot(image, direction).item())
        image -= alphas[-1] * direction
        beta = image.norm().item()
        values, vectors = eigh_tridiagonal(np.array(alphas), np.array(betas))
        largest, residual = float(values[-1]), beta * abs(float(vectors[-1, -1]))
        probe.doing = f"{asked}: {largest:.3g} so far"
        scale = max(abs(values[0]), abs(values[-1]))
        done = residual <= CURVATURE_TOLERANCE * largest or beta <= 1e-5 * scale
        if done or len(alphas) in (MOST_LANCZOS, len(weights)):
            return Curvature(largest, residual)
        distance = math.sqrt(2 * NUDGE / scale)
        betas.append(beta)
        before, direction = direction, image / beta


def kept_curvature(probe: Probe, where: str, weights: Float[Tensor, " weight"], seed: int) -> Curvature:
    """Measured now or before."""
    found = probe.measured(
        f"curvature {where}", lambda: dataclasses.asdict(largest_curvature(probe, weights, seed=seed))
    )
    return Curvature(**found)


def noise(model: FunctionalModel, seed: int, number: int) -> Float[Tensor, " weight"]:
    """Standard normal numbers for every moving weight, the same whenever they are asked for."""
    moving = model.moving
    values = torch.empty_like(moving.center)
    for part, block in randomness.noise(seed, [number], 0, moving, model.device):
        values[part] = block[0]
    return values


def measured_rises(probe: Probe, localization: float, *, count: int, seed: int = 0) -> Float[np.ndarray, " pair"]:
    """The mean of L̄(w* + ξ/√γ) − L̄(w*) and L̄(w* − ξ/√γ) − L̄(w*), in which is nothing of the gradient at w*."""
    center = probe.model.moving.center
    rises = []
    for number in range(count):
        jolt = noise(probe.model, seed, number + 1) / math.sqrt(localization)
        rises.append(np.mean([probe.mean_loss(center + sign * jolt) for sign in (1, -1)]) - probe.at_center)
    return np.array(rises)


def kept_rises(probe: Probe, localization: float, seed: int, count: int) -> Float[np.ndarray, " pair"]:
    """Measured now or before."""
    name = f"rises at localization {localization!r}, {count} pairs"
    return np.array(probe.measured(name, lambda: measured_rises(probe, localization, seed=seed, count=count).tolist()))


def kept_gradient_size(probe: Probe, localization: float, batch_size: int, seed: int) -> float:
    """√(mean of ḡ² over weights) of minibatches at Gaussian perturbations, measured now or before."""
    probe.doing = f"the size of gradients at localization {localization:.3g}"

    def measure() -> float:
        squares = 0.0
        for number in range(GRADIENTS):
            jolted = probe.model.moving.center + noise(probe.model, seed, number + 1) / math.sqrt(localization)
            squares += probe.minibatch_gradient(jolted, batch_size, seed + number).square().mean().item()
        return math.sqrt(squares / GRADIENTS)

    return probe.measured(f"size of gradients at localization {localization!r}", measure)


def standard_error(rises: Float[np.ndarray, " pair"]) -> float:
    """Of their mean, such that (mean − truth)/error has a variance of 1: that of a Student's t is (n − 1)/(n − 3)."""
    count = len(rises)
    if count <= 3:
        return math.inf
    return float(rises.std(ddof=1) * math.sqrt((count - 1) / (count - 3) / count))


def in_float32(model: nn.Module) -> nn.Module:
    """The model, or a copy of it in float32: differences of bfloat16 gradients are rounding and little else."""
    narrow = any(value.dtype in (torch.bfloat16, torch.float16) for value in model.parameters())
    return copy.deepcopy(model).float() if narrow else model
