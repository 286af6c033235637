"""Products with the Gauss–Newton matrix of the mean loss, without the matrix.

    H = Σᵢ ωᵢ Σₜ JᵢₜᵀΛᵢₜJᵢₜ / Tᵢ,

with J the Jacobian of the model's outputs by the weights that move, Λ the Hessian of the loss by the outputs, and ωᵢ
the share of example i in the mean loss (its T scored tokens share it). A product takes one pass in forward mode, J·v,
and one backward, Jᵀ(ΛJv); the forward pass of the model itself is shared by all vectors of a block.

Of a language model whose head is known, Λ is applied a few positions at a time: logits are never there as a whole.

Reference: Schraudolph, *Fast curvature matrix-vector products for second-order gradient descent*, 2002.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from jostle.curvature.compiled import Compiled
from jostle.curvature.jacobians import WAYS, ForwardMode
from jostle.curvature.layers import Layers
from jostle.curvature.stand_ins import recorder, replayer
from jostle.data.datasets import Data
from jostle.errors import InputError
from jostle.losses import OURS, Batch, LanguageHead, Loss, at_least_float32, described, plain_operations
from jostle.models.functional import (
    FunctionalModel,
    eval_mode,
    free_memory,
    real_tokens,
    sample_means,
    token_mask,
)
from jostle.models.weights import MovingWeights, WeightSelection

log = logging.getLogger("jostle")

PASS_TOKENS = {"cuda": 16_384, "cpu": 2_048}
"""Tokens that go through the model at once: a GPU is idle between small computations."""

INPUTS = 64
"""Numbers of an input (of an image, say) that are worked at as long as a token."""

BLOCK = {"cuda": 8, "cpu": 16}
"""Vectors that go through the model together: enough to share its own forward pass. More where there are fewer tokens
than `PASS_TOKENS`."""

HEAD_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}
"""What the tangents of logits may take that are there at once; of a GPU's memory, an eighth of the free."""

ALIGNED = {"cuda": 8, "cpu": 1}
"""Texts are padded to a multiple of so many tokens, or to one of their length in eighths: a GPU multiplies matrices of
other sizes at a fraction of its speed, and every length compiles anew."""

PROBES, PROBED = 8, 32
"""Directions in which a loss of the user's own must curve upwards, for each of so many examples."""


class GaussNewton:
    """The Gauss–Newton matrix of the mean loss of a data set, known by its products; a context manager.

    Within the context the model is in eval mode, and works by operations that have a forward mode.

    Args:
        model: the model, at w*; it is left as it was.
        weights: which of its weights move.
        loss: one loss a sample or a token, that sees the model only through its outputs.
        data: the examples of the mean loss.
        shares: ωᵢ, what each of them counts; default: all alike.
        dtype: what passes through the model are computed in; default: the model's own. Sums are in float32 or wider.

    Raises:
        InputError: the loss reads weights that do not go through the model's outputs, or is not convex in them.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: WeightSelection,
        loss: Loss,
        data: Data,
        *,
        shares: Float[np.ndarray, " sample"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None:
            model = _in_precision(model, dtype)
        self.moving = MovingWeights(model, weights)
        self.model = FunctionalModel(model, self.moving)
        self.device, self.loss, self.data = self.model.device, loss, data
        count = len(data)
        self.shares = np.full(count, 1 / count) if shares is None else np.asarray(shares, np.float64)
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        self._pass_tokens, self._block = PASS_TOKENS[kind], BLOCK[kind]
        free = free_memory(self.device)
        self._head_bytes = HEAD_BYTES[kind] if free is None else min(HEAD_BYTES[kind], free // 8)
        self._most = self._block * self._pass_tokens  # of tokens times vectors at once
        self._context = contextlib.ExitStack()
        self._view: _View | None = None

    def __enter__(self) -> Self:
        self._context.enter_context(warnings.catch_warnings())
        # Of what torch takes one by one within vmap, which is still right.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        network = self.model.model
        for context in (eval_mode(network), plain_operations(), self.model.plain_kernels(), padding_kept(network)):
            self._context.enter_context(context)
        if any(isinstance(module, nn.RNNBase) for module in self.model.model.modules()):
            # Fused on a CPU, an LSTM has no forward mode; of switching that off, torch says something about GPUs.
            warnings.filterwarnings("ignore", "TF32 acceleration", UserWarning)
            self._context.enter_context(torch.backends.mkldnn.flags(enabled=False))
        try:
            self._view = self._view or _view_of(self.model, self.loss, self.data, self._head_bytes)
        except BaseException:
            self._context.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def expect(self, products: int) -> None:
        """Be told how many products alike come now: what takes long is worth compiling."""
        if isinstance(self.view, _LanguageModel):
            self.view.compiled.expect(products)

    @torch.no_grad()
    def __call__(
        self, vectors: Float[Tensor, "vector weight"], *, rows: Int[np.ndarray, " row"] | None = None
    ) -> Float[Tensor, "vector weight"]:
        """Return H·v of every vector; of some ``rows`` alone, each counts for more by as much as there are fewer."""
        chosen = np.arange(len(self.data)) if rows is None else np.asarray(rows)
        shares = self.shares * (len(self.data) / len(chosen))
        inner, scale = vectors.to(self.moving.center.dtype), None
        if inner.dtype == torch.float16:  # has no numbers as small as a step's
            scale = vectors.abs().amax(1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)
            inner = (vectors / scale).to(inner.dtype)
        products = (self._product(inner, shares, part) for part in self.parts(chosen))
        total = next(products).to(vectors.dtype)
        for found in products:
            total += found
        return total if scale is None else total.mul_(scale)

    def _product(self, inner: Tensor, shares: np.ndarray, part: np.ndarray) -> Float[Tensor, "vector weight"]:
        """The product of some examples; in halves where they have no room, of them or of the vectors."""
        tokens = len(part) * tokens_of(self.data)
        block = max(self._block, self._most // tokens)
        try:
            batch, each = self.data.batch(part), torch.from_numpy(shares[part]).to(self.device)
            found = [self.view.products(some, batch, each) for some in inner.split(block)]
            return found[0] if len(found) == 1 else torch.cat(found)
        except torch.OutOfMemoryError:
            if len(part) == 1 and min(block, len(inner)) == 1:
                raise
        # Only here: an error that is being handled holds on to the memory of what failed.
        self.model.free_memory()
        self._most = max(1, tokens * min(block, len(inner)) // 2)
        if len(part) == 1:
            self._block = min(self._block, max(1, min(block, len(inner)) // 2))
            log.info("products of %d vectors at once have no room; going on with half", min(block, len(inner)))
            return self._product(inner, shares, part)
        self._pass_tokens = max(1, self._pass_tokens // 2)
        log.info("products of %d examples at once have no room; going on with half", len(part))
        first, second = (self._product(inner, shares, half) for half in np.array_split(part, 2))
        return first.add_(second)

    @torch.no_grad()
    def tangents(
        self, vectors: Float[Tensor, "vector weight"], indices: Sequence[int] | np.ndarray
    ) -> tuple[Float[Tensor, "vector sample ..."], Tensor | None]:
        """Return ∇ℓ·v of each sample, or each of its tokens, and which of these are scored (None: all)."""
        batch = self.data.batch(indices)
        inner = vectors.to(self.moving.center.dtype)
        found = [
            self.view.loss_tangents(inner[start : start + self._block], batch)
            for start in range(0, len(inner), self._block)
        ]
        return torch.cat(found), token_mask(self.loss, batch)

    def parts(self, chosen: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Give the examples, or those chosen, as many at once as go through the model together."""
        yield from _parts_of(self.data, np.arange(len(self.data)) if chosen is None else chosen, self._pass_tokens)

    def dense(self) -> Float[Tensor, "weight weight"]:
        """Return the matrix itself, of small models alone."""
        identity = torch.eye(self.moving.total, dtype=self.moving.dtype, device=self.device)
        found = torch.cat([self(some) for some in identity.split(max(self._block, 256))])
        return (found + found.T) / 2

    @property
    def is_convex(self) -> bool:
        """Whether the loss is known to be convex in the model's outputs: then what is negative is rounding."""
        return isinstance(self.view, _LanguageModel) or type(self.loss) in OURS

    @property
    def view(self) -> _View:
        """How the loss sees the model; known within the context."""
        assert self._view is not None, "products are taken within the context"
        return self._view


def tokens_of(data: Data, *, mean: bool = False) -> int:
    """How many tokens the longest example has, or the mean one, or as many as the first has numbers to work at."""
    if data.lengths is not None:
        return int(data.lengths.mean() if mean else data.lengths.max())
    batch = data.batch(range(1))
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if isinstance(batch, dict) and "input_ids" in batch:
        return batch["input_ids"].numel()
    return max(1, sum(leaf.numel() for leaf in tensors) // INPUTS)


def _parts_of(data: Data, chosen: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Examples of about one length together, so many that they have about so many tokens."""
    if data.lengths is None:
        size = max(1, tokens // tokens_of(data))
        for start in range(0, len(chosen), size):
            yield chosen[start : start + size]
        return
    ordered = chosen[np.argsort(data.lengths[chosen], kind="stable")]
    start = 0
    while start < len(ordered):
        stop = start + 1
        while stop < len(ordered) and (stop + 1 - start) * int(data.lengths[ordered[stop]]) <= tokens:
            stop += 1
        yield ordered[start:stop]
        start = stop


def _in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model whose parameters have another type; its buffers (rotary angles, statistics) keep theirs."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return copied


class _View(ABC):
    """How a loss sees a model: through outputs z, with the Hessian Λ of the loss by them.

    Attributes:
        way: in which Jacobians are taken.
    """

    way: ForwardMode

    @abstractmethod
    def directions_agree(self, vector: Float[Tensor, "1 weight"], batch: Batch) -> bool:
        """Return whether ‖Jv‖² is v·Jᵀ(Jv): forward mode goes on where a model has cut the way back."""

    @abstractmethod
    def products(
        self, vectors: Float[Tensor, "vector weight"], batch: Batch, shares: Float[Tensor, " sample"]
    ) -> Float[Tensor, "vector weight"]:
        """Σᵢ ωᵢJᵢᵀΛᵢJᵢ·v of each vector."""

    @abstractmethod
    def loss_tangents(
        self, vectors: Float[Tensor, "vector weight"], batch: Batch
    ) -> Float[Tensor, "vector sample ..."]:
        """∇ℓ·v of each loss."""


def _view_of(model: FunctionalModel, loss: Loss, data: Data, head_bytes: int) -> _View:
    first = data.batch(range(1))
    with torch.no_grad():
        model.evaluate(loss, model.moving.center[None], first)  # what a loss tries once for each model, it tries here
    head = LanguageHead.of(loss, model.model, first)
    if head is not None:
        language = _LanguageModel(model, loss, head, head_bytes)
        _choose_way(language, model, loss, data)
        language.go_by_layers(data)
        return language
    view = _Outputs(model, loss)
    _choose_way(view, model, loss, data)
    if type(loss) not in OURS:
        _require_curvature(view, data)
    return view


def _choose_way(view: _View, model: FunctionalModel, loss: Loss, data: Data) -> None:
    """Take Jacobians in the quickest way that a model and its loss go through, and that is the same both ways."""
    vectors = _directions(model)
    few = min(2, len(data))  # of one alone, or one vector, operations are at times others
    batch, shares = data.batch(range(few)), torch.full((few,), 1 / few, device=model.device)
    failed = ""
    for way in WAYS:
        view.way = way()
        try:
            view.products(vectors, batch, shares)
            view.loss_tangents(vectors, batch)
            if view.directions_agree(vectors[:1], batch):
                return
            failed = f"{way.name}: what moves forwards does not come back"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of operations without a derivative, and of what `torch.func` cannot do
            failed = f"{way.name}: {str(error).partition(chr(10))[0][:150]}"
        log.info("curvature of %s not in %s", described(loss), failed)
    raise InputError(
        "model",
        got=f"operations without derivatives that curvature needs ({failed})",
        expected="operations with a forward mode, or a backward pass that can be differentiated again",
        fix="jostle.sample asks for first derivatives alone",
    )


def _directions(model: FunctionalModel) -> Float[Tensor, "2 weight"]:
    """Two random directions, of a length between that of a step and that of the weights: float16 has neither."""
    generator, total = torch.Generator().manual_seed(0), model.moving.total
    return (torch.randn(2, total, generator=generator) / total**0.25).to(model.moving.center)


@contextlib.contextmanager
def padding_kept(model: nn.Module) -> Iterator[None]:
    """Within, what embeddings give for padding does not change with their weights: no gradient reaches it.

    Forward mode would read the row. It is the lookup that is kept, not the row: a head may share the weights.
    """

    def kept(module: Any, inputs: Any, named: Any, found: Tensor) -> Tensor:
        tokens = inputs[0] if inputs else named["input"]
        return torch.where((tokens == module.padding_idx)[..., None], rows[module], found)

    padded = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.padding_idx is not None]
    rows: dict[nn.Module, Tensor] = {one: one.weight[one.padding_idx].detach().clone() for one in padded}
    hooks = [one.register_forward_hook(kept, with_kwargs=True) for one in padded]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Outputs(_View):
    """Any loss of the model's outputs, which are recorded, and given back in the model's place."""

    model: FunctionalModel
    loss: Loss

    def network(self, flat: Tensor, batch: Batch) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Any]]]:
        """The outputs that have gradients, and how to put them back into the form in which the model gave them."""
        form: dict[str, Any] = {}

        def outputs(model: nn.Module, batch: Batch) -> Any:
            calls: list[Any] = []
            self.loss(recorder(model, calls), batch)
            form["leaves"], form["spec"] = pytree.tree_flatten(calls)
            return [leaf for leaf in form["leaves"] if _differentiable(leaf)]

        found: Any = self.model.call(outputs, flat, batch)
        if not found:
            self.refuse(f"{described(self.loss)}, which does not call the model, or takes no numbers from it")

        def put_back(values: Sequence[Tensor]) -> list[Any]:
            given = iter(values)
            leaves = [next(given) if _differentiable(leaf) else leaf for leaf in form["leaves"]]
            return pytree.tree_unflatten(leaves, form["spec"])

        return found, put_back

    def losses(self, calls: list[Any], batch: Batch) -> Tensor:
        """The losses of recorded outputs."""
        return self.loss(replayer(self.model.model, calls), batch)

    def products(self, vectors: Tensor, batch: Batch, shares: Tensor) -> Tensor:
        center = self.model.moving.center
        values, back = self.network(center, batch)

        def network(flat: Tensor) -> list[Tensor]:
            return self.network(flat, batch)[0]

        def weighted(values: list[Tensor]) -> Tensor:
            losses = sample_means(self.losses(back(values), batch), self.loss, batch)
            return losses @ shares.to(losses.dtype)

        moved = self.way.pushed(network, center, vectors)
        return self.way.pulled(network, center, self.way.curved(weighted, values, moved))

    def loss_tangents(self, vectors: Tensor, batch: Batch) -> Tensor:
        def losses(flat: Tensor) -> Tensor:
            # As in the products, the model is called as a whole.
            return self.model.call(lambda model, batch: self.loss(recorder(model, []), batch), flat, batch)

        return self.way.pushed(losses, self.model.moving.center, vectors)

    def directions_agree(self, vector: Tensor, batch: Batch) -> bool:
        center = self.model.moving.center

        def network(flat: Tensor) -> list[Tensor]:
            return self.network(flat, batch)[0]

        moved = self.way.pushed(network, center, vector)
        squares = torch.stack([one.double().square().sum() for one in moved]).sum()
        return _agree(squares, vector, self.way.pulled(network, center, moved), self.model)

    def refuse(self, got: str) -> None:
        raise InputError(
            "loss",
            got=got,
            expected="a loss that sees the model only through its outputs, and is convex in them",
            fix="jostle.sample asks nothing of a loss",
        )


class _LanguageModel(_View):
    """Next tokens of a model whose head is applied apart from its body, a few positions at a time."""

    def __init__(
        self,
        model: FunctionalModel,
        loss: Loss,
        head: LanguageHead,
        head_bytes: int,
    ) -> None:
        self._model, self._loss, self._head, self._bytes = model, loss, head, head_bytes
        self.compiled = Compiled(model.device)
        self._aligned = ALIGNED["cuda" if model.device.type == "cuda" else "cpu"]
        self._layers: Layers | None = None
        moving, named = model.moving, {id(value): name for name, value in model.model.named_parameters()}
        self._weight, self._bias = (
            moving.slices.get(named.get(id(value), "")) for value in (head.linear.weight, head.linear.bias)
        )

    @torch.no_grad()
    def go_by_layers(self, data: Data) -> None:
        """Take the body layer by layer, where it is a chain of them, and that gives the same."""
        if type(self.way) is not ForwardMode:
            return
        model = self._model
        vectors = _directions(model)
        batch = data.batch(range(min(2, len(data))))
        moved = self._moved(vectors, batch)[1]
        pulled = self._pulled(moved, batch)
        try:
            layers = Layers(model, self._head.states, Layers.found_in(model.model), self.compiled)
            found = layers.moved(vectors, batch)[1], layers.pulled(moved, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # layers may be anything
            log.info("the model is not taken layer by layer (%s)", str(error).partition("\n")[0][:150])
            return
        tolerance = 1e-3 if model.tolerance < 1e-3 else model.tolerance
        pairs = zip(found, (moved, pulled), strict=True)
        if all((one - whole).norm() <= tolerance * whole.norm() for one, whole in pairs):
            self._layers = layers
        else:
            log.info("the model is not taken layer by layer (that gives other numbers)")

    def _body(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        return lambda flat: self._model.call(lambda model, batch: self._head.states(model, batch), flat, batch)

    def _moved(self, vectors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The states that the head reads, and how they change along each vector."""
        if self._layers is not None:
            return self._layers.moved(vectors, batch)

        def passes(vectors: Tensor, center: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            body = self._body(batch)
            return body(center), self.way.pushed(body, center, vectors)

        return self.compiled("moved", passes, vectors, self._model.moving.center, batch)

    def _pulled(self, curved: Float[Tensor, "vector sample token width"], batch: Batch) -> Tensor:
        """What changes of the states weigh in the weights: their transposed Jacobian."""
        if self._layers is not None:
            return self._layers.pulled(curved, batch)

        def passes(curved: Tensor, center: Tensor, batch: Batch) -> Tensor:
            return self.way.pulled(self._body(batch), center, curved)

        return self.compiled("pulled", passes, curved, self._model.moving.center, batch)

    def directions_agree(self, vector: Tensor, batch: Batch) -> bool:
        moved = self._moved(vector, batch)[1]
        pulled = self._pulled(moved, batch)
        return _agree(moved.double().square().sum(), vector, pulled, self._model)

    def _of_head(self, vectors: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What vectors have of the head's weight and bias."""
        weight = None if self._weight is None else vectors[:, self._weight].unflatten(1, self._head.linear.weight.shape)
        return weight, None if self._bias is None else vectors[:, self._bias]

    def _padded(self, batch: Batch) -> Batch:
        if self._aligned == 1:
            return batch
        eighth = 1 << max(0, (batch["input_ids"].shape[1] - 1).bit_length() - 4)
        return self._head.padded(batch, max(self._aligned, eighth))

    def products(self, vectors: Tensor, batch: Batch, shares: Tensor) -> Tensor:
        batch = self._padded(batch)
        self.compiled.next_round()
        states, moved = self._moved(vectors, batch)
        mask = real_tokens(batch["input_ids"], self._loss, batch)
        counts = torch.where(mask, shares[:, None] / mask.sum(1, keepdim=True).clamp(min=1), 0.0)[:, 1:].flatten()
        weight, bias = self._of_head(vectors)
        flat, flat_moved = states.flatten(0, 1), moved.flatten(1, 2)
        beside, curved = self._head.beside(weight), torch.zeros_like(flat_moved)
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        kept = counts.nonzero()[:, 0]
        every = len(kept) == len(counts)
        for places in kept.split(self._chunk(len(vectors))) if len(kept) else ():
            where: Any = slice(int(places[0]), int(places[-1]) + 1) if every else places
            some = flat[where]
            change = self.compiled(
                "curved", self._curved, some, flat_moved[:, where], beside, bias, counts[where].to(flat.dtype)
            )
            curved[:, where] = change @ self._head.linear.weight
            if weight is not None:
                of_weight = _added(of_weight, _outer(change, some))
            if bias is not None:
                of_bias = _added(of_bias, change.sum(1, dtype=at_least_float32(change[:0]).dtype))
        found = self._pulled(curved.view_as(moved), batch).to(torch.float32 if flat.dtype.itemsize < 4 else flat.dtype)
        if of_weight is not None:
            found[:, self._weight] += of_weight.flatten(1)
        if of_bias is not None:
            found[:, self._bias] += of_bias
        return found

    def _curved(
        self,
        states: Float[Tensor, "position width"],
        moved: Float[Tensor, "vector position width"],
        beside: Float[Tensor, "vector word twice_width"] | None,
        bias: Float[Tensor, "vector word"] | None,
        counts: Float[Tensor, " position"],
    ) -> Float[Tensor, "vector position word"]:
        """ω·sᵀ(diag p − ppᵀ)s·ż, for what the head gives that changes by ż, with s the slope of its logits."""
        chances, slopes = self._head.chances(states)
        change = self._head.change(states, moved, beside, bias, slopes)
        mean = (change * chances).sum(2, keepdim=True, dtype=at_least_float32(change[:0]).dtype).to(change.dtype)
        change = (change - mean) * (chances * counts[:, None])
        return change if slopes is None else change * slopes

    def loss_tangents(self, vectors: Tensor, batch: Batch) -> Tensor:
        tokens = batch["input_ids"].shape[1]
        batch = self._padded(batch)
        states, moved = self._moved(vectors, batch)
        moved = moved.flatten(1, 2)
        weight, bias = self._of_head(vectors)
        beside = self._head.beside(weight)
        flat, targets = states.flatten(0, 1), self._head.targets(batch)[:, 1:].flatten()
        found = torch.empty(len(vectors), len(flat), dtype=at_least_float32(flat[:0]).dtype, device=flat.device)
        for places in torch.arange(len(flat), device=flat.device).split(self._chunk(len(vectors))):
            where = slice(int(places[0]), int(places[-1]) + 1)
            chances, slopes = self._head.chances(flat[where])
            change = self._head.change(flat[where], moved[:, where], beside, bias, slopes)
            own = change.gather(2, targets[where].expand(len(vectors), -1)[:, :, None])[:, :, 0]
            found[:, where] = torch.einsum("kpv,pv->kp", change, chances).to(found.dtype) - own
        return F.pad(found.view(len(vectors), len(states), -1), (1, 0))[..., :tokens]

    def _chunk(self, vectors: int) -> int:
        width = self._head.linear.weight.shape[0] * self._model.moving.center.dtype.itemsize
        return max(16, self._bytes // (vectors * width))


def _agree(squares: Tensor, vector: Tensor, pulled: Tensor, model: FunctionalModel) -> bool:
    """Whether ‖Jv‖² is v·Jᵀ(Jv), to rounding; of what is not finite, others have something to say."""
    if not squares.isfinite():
        return True
    return bool((squares - (vector.double() * pulled).sum()).abs() <= max(1e-3, model.tolerance) * squares)


def _added(total: Tensor | None, one: Tensor) -> Tensor:
    return one if total is None else total.add_(one)


def _outer(
    change: Float[Tensor, "vector position word"], states: Float[Tensor, "position width"]
) -> Float[Tensor, "vector word width"]:
    """Σ over positions of change ⊗ states, summed in float32."""
    columns, rows = change.transpose(1, 2), states.expand(len(change), -1, -1)
    if change.is_cuda and change.dtype.itemsize < 4:
        return torch.bmm(columns, rows, out_dtype=torch.float32)
    return columns @ rows


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _require_curvature(view: _Outputs, data: Data) -> None:
    """Refuse a loss of the user's own that reads weights past the outputs, or curves downwards in them."""
    center = view.model.moving.center
    few = data.batch(data.spread(PROBED)[:PROBED])
    values, back = view.network(center, few)

    def mean(losses: Tensor) -> Tensor:
        return sample_means(losses, view.loss, few).mean()

    def of_weights(flat: Tensor) -> Tensor:
        return mean(view.model.call(lambda model, few: view.loss(recorder(model, []), few), flat, few))

    def past_outputs(flat: Tensor) -> Tensor:
        kept = back(values)
        return mean(view.model.call(lambda model, few: view.loss(replayer(model, kept), few), flat, few))

    def of_outputs(values: list[Tensor]) -> Tensor:
        return mean(view.losses(back(values), few))

    one = torch.ones(1, dtype=of_outputs(values).dtype, device=center.device)
    whole, past = (view.way.pulled(function, center, one)[0] for function in (of_weights, past_outputs))
    slopes = [slope[None] for slope in view.way.gradient(of_outputs, values)]
    through = view.way.pulled(lambda flat: view.network(flat, few)[0], center, slopes)[0]
    if past.any() or not (whole - through).norm() <= max(1e-3, view.model.tolerance) * whole.norm():
        view.refuse(f"{described(view.loss)}, which reads weights past the model's outputs")
    generator, count = torch.Generator().manual_seed(0), len(view.losses(back(values), few))
    for _ in range(PROBES):
        moved = [torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device) for value in values]
        curved = [one[0] for one in view.way.curved(of_outputs, values, [one[None] for one in moved])]
        inner = [a * b for a, b in zip(moved, curved, strict=True)]
        # Of each example by itself, where outputs say whose they are: others would hide one that curves downwards.
        each = all(one.ndim and len(one) == count for one in inner)
        products, sizes = (
            sum((one.reshape(count if each else 1, -1).sum(1) for one in some), torch.zeros(()).to(center))
            for some in (inner, [one.abs() for one in inner])
        )
        if not (products >= -1e-5 * sizes).all():
            view.refuse(f"{described(view.loss)}, which curves downwards in the model's outputs")
