"""How hot the chains are, by the gradients that they take anyway.

Under the target p(w) ∝ exp(−U(w)), whatever the loss, integrating by parts gives for any fixed direction v

    E[(v·(w − w*))·(v·∇U(w))] = ‖v‖²,

and a minibatch's gradient will do, since its noise knows nothing of w. A chain that a long step or the noise of small
batches heats has more than that. In most directions nothing but the localization holds the weights, and nothing heats
them; so v are gradients at draws of that localization alone, which lean towards the directions of large curvature and
of much gradient noise, orthogonal to each other. The temperature is the mean over them, and 1 at the target.

Reference: the configurational temperature, with the vector field w − w*; Rugh, *Dynamical approach to temperature*,
1997, and Butler et al., *Configurational temperature: verification of Monte Carlo simulations*, 1998.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from jostle.config import Config
from jostle.posterior import Posterior
from jostle.ranks import Crew

DIRECTIONS, STEPS_FOR_ONE = 8, 25
"""More would lean less and less towards where chains are heated; and each takes a gradient when the run begins."""

MOST_IN_ONE, MOST_TOGETHER = 1 << 30, 1 << 28
"""Numbers in one direction, in bfloat16, and in several together: large models have one, the largest of their first
weights."""

BLOCKS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""So many numbers are looked at at once, which caches have room for: nothing is copied as a whole."""

COMPILED_BLOCK = 1 << 26
"""The same where it is compiled, and copies nothing; still blocks, for where the compiler gives up."""

SAME = 0.05
"""What is left of a gradient along no direction so far, relatively: if less, it is mostly rounding."""


class Thermometer:
    """Directions, and the temperature of weights along them.

    Args:
        directions: each gives ‖v‖² by itself; orthogonal ones tell the most.
        center: w*.
        posterior: what the chains sample, in units of the metric.
        crew: the processes that hold the weights.
        unit: of the metric, where there is one: everything is then read in u = (w − w*)/unit, directions as well.
        compiled: whether to read in one pass over memory.
    """

    def __init__(
        self,
        directions: Float[Tensor, "direction some_weight"],
        center: Float[Tensor, " weight"],
        posterior: Posterior,
        crew: Crew,
        *,
        unit: Float[Tensor, " weight"] | None = None,
        compiled: bool = False,
    ) -> None:
        self.directions, self._center, self._posterior, self._crew = directions, center, posterior, crew
        self._unit = unit
        self._along, self._block = _along, None
        if compiled:
            self._along, self._block = torch.compile(_along, dynamic=False), COMPILED_BLOCK
        wide = ((directions[:, part].double(), center[part].double()) for part in _blocks(directions))
        found = [torch.stack([vectors.square().sum(1), vectors @ at]) for vectors, at in wide]
        squares, self._center_along = crew.sum(torch.stack(found).sum(0))
        self._squares = squares.sum()

    def read(
        self, weights: Float[Tensor, "chain weight"], mean_loss_gradient: Float[Tensor, "chain weight"]
    ) -> Float[Tensor, "chain 1"]:
        """Return the temperature of each chain at these weights, by the gradient of its minibatch there."""
        rows = len(weights) * len(self.directions) if weights.is_cuda else 1
        both = weights.new_zeros(2, len(weights), len(self.directions))
        for part in _blocks(self.directions, rows, self._block):
            center, gradient = self._center[part], mean_loss_gradient[:, part]
            unit = None if self._unit is None else self._unit[part]
            both += self._along(self.directions[:, part], weights[:, part], center, unit, gradient)
        moved, slope = self._crew.sum(both).double()
        # The potential's gradient is linear in all of these, and so it is along a direction what it is as a whole.
        along = self._posterior.potential(self._center_along).gradient(self._center_along + moved, slope)
        return ((moved * along).sum(1, keepdim=True) / self._squares).to(weights.dtype)


def _along(
    directions: Float[Tensor, "direction some_weight"],
    weights: Float[Tensor, "chain some_weight"],
    center: Float[Tensor, " some_weight"],
    unit: Float[Tensor, " some_weight"] | None,
    gradient: Float[Tensor, "chain some_weight"],
) -> Float[Tensor, "2 chain direction"]:
    """How far from w* the weights are along each direction, and what the gradient is along it."""
    away = weights - center
    both = (away, gradient.to(away)) if unit is None else (away / unit, unit * gradient.to(away))
    if weights.is_cuda:  # where a product of matrices takes far longer, as narrow as these are; a CPU is the other way
        return torch.stack([(directions * vectors[:, None]).sum(2) for vectors in both])
    return torch.stack([vectors @ directions.to(vectors).T for vectors in both])


def how_many(config: Config) -> int:
    """In how many directions a run of this config is worth measuring; 0 where it is too short, or has no gradient."""
    return min(DIRECTIONS, config.chains * config.steps[-1] // STEPS_FOR_ONE) if config.posterior.n_beta else 0


def directions_of(
    gradient: Callable[[int], Float[Tensor, " weight"]], most: int, weights: int, crew: Crew
) -> Float[Tensor, "direction some_weight"] | None:
    """Return orthogonal directions that span the gradients of draws number 0, 1, ...; None where there is none.

    Args:
        gradient: at a draw of this number; what it returns is written over.
        most: so many of them.
        weights: how many there are of these.
        crew: the processes that hold them.
    """
    some, kept, found = min(weights, MOST_IN_ONE), 0, None
    count = max(1, min(most, weights, MOST_TOGETHER // weights))
    for number in range(count):
        new = gradient(number)[:some]
        if found is None:
            found = torch.zeros(count, len(new), dtype=torch.bfloat16, device=new.device)
        before = _size(crew, new)
        if kept:
            overlap = _sum(crew, (found[:kept, part].float() @ new[part].float() for part in _blocks(new)))
            for part in _blocks(new):
                new[part] -= (overlap @ found[:kept, part].float()).to(new.dtype)
        size = _size(crew, new)
        if SAME * before < size < math.inf:
            for part in _blocks(new):
                found[kept, part] = new[part] / size
            kept += 1
    return None if found is None or not kept else found[:kept]


def _size(crew: Crew, vector: Float[Tensor, " weight"]) -> float:
    return math.sqrt(_sum(crew, (vector[part].double().square().sum() for part in _blocks(vector))))


def _sum(crew: Crew, parts: Iterator[Tensor]) -> Tensor:
    return crew.sum(torch.stack(list(parts)).sum(0))


def _blocks(vectors: Float[Tensor, "*some weight"], rows: int = 1, size: int | None = None) -> Iterator[slice]:
    total, size = vectors.shape[-1], size or BLOCKS.get(vectors.device.type, BLOCKS["cuda"])
    length = max(1, size // rows)
    return (slice(start, min(start + length, total)) for start in range(0, max(1, total), length))
