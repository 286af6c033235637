"""Products of a function's Jacobian J with many vectors: forwards, J·v, and backwards, Jᵀ·u.

Forward mode is the quickest, but PyTorch does not have it for every operation (recurrent layers in float32). Jᵀ·u is
linear in u, and its own transposed Jacobian is J: so two passes backwards do the same, wherever what goes backwards can
be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils import _pytree as pytree

Function = Callable[[Tensor], Any]
"""Of weights, to a tensor or a list of them."""

Values = list[Tensor]


class ForwardMode:
    """J·v in forward mode, all vectors of a block at once."""

    name = "forward mode"

    def pushed(self, function: Function, at: Tensor, vectors: Float[Tensor, "vector weight"]) -> Any:
        """Return J·v of every vector."""
        return vmap(lambda vector: jvp(function, (at,), (vector,))[1])(vectors)

    def pulled(self, function: Function, at: Tensor, cotangents: Any) -> Float[Tensor, "vector weight"]:
        """Return Jᵀ·u of every u, each with the form of what the function gives."""
        pull: Any = vjp(function, at)[1]
        return vmap(lambda one: pull(one)[0])(cotangents)

    def curved(self, function: Callable[[Values], Tensor], at: Values, directions: Values) -> Values:
        """Return Λ·u of every u, with Λ the Hessian of a function to a number."""
        return vmap(lambda one: jvp(grad(function), (at,), (one,))[1])(directions)

    def gradient(self, function: Callable[[Values], Tensor], at: Values) -> Values:
        """Return the gradient of a function to a number."""
        return grad(function)(at)


class TwiceBackward(ForwardMode):
    """J·v as the derivative of Jᵀ·u by u."""

    name = "two backward passes"

    def pushed(self, function: Function, at: Tensor, vectors: Float[Tensor, "vector weight"]) -> Any:
        """Return J·v of every vector."""
        found: Any = vjp(function, at)
        values, pull = found[0], found[1]
        transposed: Any = vjp(lambda cotangent: pull(cotangent)[0], pytree.tree_map(torch.zeros_like, values))[1]
        return vmap(lambda vector: transposed(vector)[0])(vectors)

    def curved(self, function: Callable[[Values], Tensor], at: Values, directions: Values) -> Values:
        """Return Λ·u of every u, with Λ the Hessian of a function to a number: it is its own transpose."""
        pull: Any = vjp(grad(function), at)[1]
        return vmap(lambda one: pull(one)[0])(directions)


class OneByOne(ForwardMode):
    """The same by autograd alone, a vector at a time: for what `torch.func` cannot go through."""

    name = "two backward passes, a vector at a time"

    def pushed(self, function: Function, at: Tensor, vectors: Float[Tensor, "vector weight"]) -> Any:
        """Return J·v of every vector."""
        with torch.enable_grad():
            leaf = at.detach().requires_grad_()
            values, form = pytree.tree_flatten(function(leaf))
            cotangents = [torch.zeros_like(value).requires_grad_() for value in values]
            pulled = _gradients(values, [leaf], cotangents, differentiable=True)
            found = [_gradients(pulled, cotangents, [vector]) for vector in vectors]
        return pytree.tree_unflatten(_stacked(found), form)

    def pulled(self, function: Function, at: Tensor, cotangents: Any) -> Float[Tensor, "vector weight"]:
        """Return Jᵀ·u of every u, each with the form of what the function gives."""
        with torch.enable_grad():
            leaf = at.detach().requires_grad_()
            values = pytree.tree_leaves(function(leaf))
            each = zip(*pytree.tree_leaves(cotangents), strict=True)
            return torch.stack([_gradients(values, [leaf], one)[0] for one in each])

    def curved(self, function: Callable[[Values], Tensor], at: Values, directions: Values) -> Values:
        """Return Λ·u of every u, with Λ the Hessian of a function to a number."""
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in at]
            slopes = _gradients([function(leaves)], leaves, differentiable=True)
            return _stacked([_gradients(slopes, leaves, one) for one in zip(*directions, strict=True)])

    def gradient(self, function: Callable[[Values], Tensor], at: Values) -> Values:
        """Return the gradient of a function to a number."""
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in at]
            return _gradients([function(leaves)], leaves)


WAYS = (ForwardMode, TwiceBackward, OneByOne)
"""From the quickest on."""


def _stacked(found: list[Values]) -> Values:
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def _gradients(
    values: Sequence[Tensor],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    *,
    differentiable: bool = False,
) -> Values:
    """The gradients by leaves, 0 by those that values do not depend on."""
    given = cotangents or [torch.ones_like(value) for value in values]
    pairs = [(value, one) for value, one in zip(values, given, strict=True) if value.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(
        torch.autograd.grad(
            [value for value, _ in pairs], list(leaves), [one for _, one in pairs],
            create_graph=differentiable, retain_graph=True, materialize_grads=True,
        )
    )  # fmt: skip
