"""Gradients of single examples, and products of many of them with each other."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad, vmap

from jostle.config import fingerprint_names
from jostle.data.datasets import Data, fingerprint_tensors, map_tensors
from jostle.losses import Batch, Loss
from jostle.models.checks import check_unchanged
from jostle.models.functional import FunctionalModel, free_memory
from jostle.models.in_place import InPlace
from jostle.models.weights import MovingWeights

BUFFER_BYTES = 2 << 30
"""What the gradients that are held at once may take; those of more queries are taken block after block. Of a GPU's
memory they may take a quarter of what is free."""

PARTS = 16
"""In which squares of gradients are summed."""

SLICE = 1 << 16
"""Weights over which products of rounded gradients are summed by one call: a GPU's matrix units cut off digits while
they add, which over millions of weights would be seen."""

TF32_TOLERANCE = 0.03
"""How far a gradient may differ from the same one by another kernel: of convolutions, a GPU rounds operands to TF32
unless it is told otherwise. A gradient of something else differs by far more."""

log = logging.getLogger("jostle")


def examples_at_once(device: torch.device) -> int:
    """A GPU is idle between small computations."""
    return 128 if device.type == "cuda" else 16


class Gradients:
    """Gradients of losses, one after another: those of all examples of a first set, of a second, ...

    Args:
        parts: the sets, and what takes their gradients.
        unit: each gradient divided by its length.
        rounded: in bfloat16.

    Attributes:
        squares: of their lengths, as they are given; known of those that were.
    """

    def __init__(self, parts: Sequence[tuple[PerExample, Data]], *, unit: bool = False, rounded: bool = False) -> None:
        self.parts, self._unit = parts, unit
        self._bounds = list(itertools.accumulate((len(data) for _, data in parts), initial=0))
        first, _ = parts[0]
        self.dtype = torch.bfloat16 if rounded else first.moving.dtype
        self.squares = torch.full((len(self),), torch.nan, dtype=torch.float64, device=first.device)

    def __len__(self) -> int:
        return self._bounds[-1]

    def __call__(self, rows: range) -> Iterator[tuple[range, Float[Tensor, "example weight"]]]:
        """Give blocks of these rows."""
        for (each, data), (start, stop) in zip(self.parts, itertools.pairwise(self._bounds), strict=True):
            some = range(max(rows.start, start) - start, min(rows.stop, stop) - start)
            for chosen, gradients in each(data, some):
                if self._unit:
                    gradients = gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1e-30)
                gradients = gradients.to(self.dtype)
                places = slice(start + chosen.start, start + chosen.stop)
                # Part by part: in double precision they would take twice their room again.
                parts = gradients.chunk(PARTS, dim=1)
                self.squares[places] = sum(part.double().square().sum(1) for part in parts)
                yield range(places.start, places.stop), gradients

    def begins(self, other: Gradients) -> bool:
        """Whether the other has all of these first."""
        alike = (self.dtype, self._unit) == (other.dtype, other._unit)
        return alike and list(other.parts[: len(self.parts)]) == list(self.parts)


def products(
    left: Gradients, right: Gradients, buffer_bytes: int, *, tell: Callable[[str], None] = lambda what: None
) -> Float[np.ndarray, "left right"]:
    """Return the products of gradients of both sides; where the right one begins with the left, each pair taken once.

    Products of rounded ones are in single precision too: of one side with itself they stay products of some vectors,
    whose matrix has no negative eigenvalue beyond rounding of sums. ``tell`` hears how far it is.
    """
    first, _ = left.parts[0]
    moving, device, dtype = first.moving, first.device, left.dtype
    # Beside those that are held there are some in the making, and rounded, some of these twice.
    making = first.at_once * (moving.dtype.itemsize + (dtype.itemsize if dtype != moving.dtype else 0)) * moving.total
    block = max(1, int((buffer_bytes - making) / (moving.total * dtype.itemsize)))

    def passes(held: Gradients, passing: Gradients) -> int:
        return len(held) + -(-len(held) // block) * len(passing)

    values = np.empty((len(left), len(right)), np.float32)
    shared = left.begins(right)
    held, passing = (left, right) if shared else min(((right, left), (left, right)), key=lambda sides: passes(*sides))
    table = values.T if held is left else values  # of those that pass by those that are held
    # Made once and filled: put together from parts, they would take twice the buffer.
    room = torch.empty(min(block, len(held)), moving.total, dtype=dtype, device=device)
    starts = range(0, len(held), block)
    taken, total = 0, sum(len(passing) - start for start in starts) if shared else passes(held, passing)
    for start in starts:
        stop = min(start + block, len(held))
        kept = room[: stop - start]
        for some, part in held(range(start, stop)):
            kept[some.start - start : some.stop - start] = part
            taken += len(some)
            tell(f"{taken:,} of {total:,} gradients")
        if shared:
            values[start:stop, start:stop] = _matrix(kept, kept).cpu().numpy()
        for rows, part in passing(range(stop if shared else 0, len(passing))):
            table[rows.start : rows.stop, start:stop] = _matrix(part, kept).cpu().numpy()
            taken += len(rows)
            tell(f"{taken:,} of {total:,} gradients")
        if shared:
            values[stop:, start:stop] = values[start:stop, stop : len(left)].T
    return values


def _matrix(left: Float[Tensor, "left weight"], right: Float[Tensor, "right weight"]) -> Float[Tensor, "left right"]:
    """Products of the rows of both, in single precision."""
    if left.dtype != torch.bfloat16:
        return (left @ right.T).float()
    total = torch.zeros(len(left), len(right), device=left.device)
    for start in range(0, left.shape[1], SLICE):
        one, other = left[:, start : start + SLICE], right[:, start : start + SLICE].T
        # Only a GPU can multiply in half precision and add in single.
        total += torch.mm(one, other, out_dtype=torch.float32) if left.is_cuda else one.float() @ other.float()
    return total


def fingerprints_of(model: nn.Module, moving: MovingWeights) -> dict[str, str]:
    """What tells a model, and which of its weights gradients were taken of."""
    return {
        "weights": fingerprint_tensors(dict(model.state_dict())),
        "moving": fingerprint_names(moving.names),
    }


class PerExample:
    """Gradients of single examples, several at once through `vmap` where the model allows it.

    Attributes:
        scale: every gradient is multiplied by this, where it is set.
    """

    def __init__(self, model: InPlace, loss: Loss, buffer_bytes: int | None = None) -> None:
        self._model, self._loss = model, loss
        self.moving, self.device = model.moving, model.device
        self._mapped, self._tried = True, list[Data]()
        self.scale: Float[Tensor, " weight"] | None = None
        row_bytes = model.moving.total * model.moving.dtype.itemsize
        if buffer_bytes is None:
            buffer_bytes = max(BUFFER_BYTES, (free_memory(model.device) or 0) // 4)
        # A quarter of the buffer for those that are being made, the rest for those that are held.
        self.at_once = min(examples_at_once(model.device), max(1, buffer_bytes // (4 * row_bytes)))

    def __call__(self, data: Data, indices: range) -> Iterator[tuple[range, Float[Tensor, "example weight"]]]:
        """Give blocks of gradients."""
        start = indices.start
        while start < indices.stop:
            chosen = range(start, min(start + self.at_once, indices.stop))
            start = chosen.stop
            # Products and squares of them would not survive the half precision that a model may compute in.
            rows = self._gradients(data, chosen).to(self._model.moving.dtype)
            if self.scale is not None:
                rows = rows.mul_(self.scale)
            yield chosen, rows

    @torch.no_grad()
    def _gradients(self, data: Data, chosen: range) -> Float[Tensor, "example weight"]:
        new = not any(data is one for one in self._tried)
        if not self._tried:
            check_unchanged(self._model, self._loss, data)
        try:
            if self._mapped and new:
                self._mapped = self._several_are_each(data)
                self._tried.append(data)
            if self._mapped:
                return self._mapped_gradients(data, chosen)
        except torch.OutOfMemoryError:
            if len(chosen) == 1:
                raise
            self.at_once = max(1, len(chosen) // 2)
            log.info("gradients of %d examples at once have no room; going on with %d", len(chosen), self.at_once)
            half = len(chosen) // 2
            return torch.cat([self._gradients(data, part) for part in (chosen[:half], chosen[half:])])
        except Exception as error:  # any model may hit any limit of vmap; the loop remains
            log.info("gradients are taken one by one (%s)", str(error).partition("\n")[0][:100])
            self._mapped = False
        return self._one_by_one(data, chosen)

    def _several_are_each(self, data: Data) -> bool:
        """Whether gradients of several at once are those of single examples; believed after one look at each data set.

        Looked at are its ends, and the smallest and the largest: of these, all but one are padded.
        """
        chosen = data.spread(2)[: None if self.at_once > 1 else 1]
        with _all_digits():
            # First, since it also teaches a loss what it tries once for each model, and cannot try within vmap.
            singles = self._one_by_one(data, chosen)
            rows = self._mapped_gradients(data, chosen)
        tolerance = max(self._model.tolerance, TF32_TOLERANCE if rows.is_cuda else 0.0)
        same = bool((rows - singles).norm() <= tolerance * singles.norm())
        if not same:
            log.info("gradients are taken one by one (several at once give other numbers)")
        return same

    def _one_by_one(self, data: Data, chosen: Sequence[int]) -> Float[Tensor, "example weight"]:
        center = self._model.moving.center[None]
        return torch.cat(
            [self._model.mean_loss_gradient(self._loss, center, data, [np.array([index])]) for index in chosen]
        ).to(center.dtype)

    def _mapped_gradients(self, data: Data, chosen: Sequence[int]) -> Float[Tensor, "example weight"]:
        plain = FunctionalModel(self._model.model, self._model.moving)

        def loss_of_one(flat: Tensor, batch: Batch) -> Tensor:
            return plain.sample_losses(self._loss, flat, batch)[0]

        singles = map_tensors(data.batch(chosen), lambda tensor: tensor[:, None])
        with warnings.catch_warnings():
            # Of what torch takes one by one within, which is still far quicker than all of it so.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return vmap(grad(loss_of_one), in_dims=(None, 0))(self._model.moving.center, singles)


def mean_squares(each: PerExample, data: Data) -> Float[Tensor, " weight"]:
    """v, the mean square of each weight's gradient over the examples, in double precision."""
    total = torch.zeros(each.moving.total, dtype=torch.float64, device=each.device)
    for _, rows in each(data, range(len(data))):
        total += torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64).square_()
    return total / len(data)


@contextlib.contextmanager
def _all_digits() -> Iterator[None]:
    """Products in full precision for a while: in TF32, two ways to one gradient may differ by far."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
