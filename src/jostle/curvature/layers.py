"""Jacobians of a model whose layers are a chain, one layer after another.

What a layer takes and gives is small beside what it computes in between, so a layer at a time needs little memory; and
layers that are alike are compiled once for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from jostle.curvature.compiled import Compiled
from jostle.losses import Batch
from jostle.models.functional import FunctionalModel

Body = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Call:
    """How a layer was called.

    Attributes:
        hidden: what the layer before has given it.
        others: what else it was given, by place and by name.
    """

    hidden: Tensor
    others: tuple[tuple[Any, ...], dict[str, Any]]


class Layers:
    """The body of a model: what is before its layers, the layers, and what is after them.

    Args:
        model: the model as a function of the weights that move.
        body: what is taken Jacobians of.
        layers: a chain of modules: each gives its first result to the next.
        compiled: calls functions.

    Raises:
        ValueError: they are no chain, or not there.
    """

    def __init__(self, model: FunctionalModel, body: Body, layers: Sequence[nn.Module], compiled: Compiled) -> None:
        self._model, self._body, self._layers, self._compiled = model, body, list(layers), compiled
        if not layers:
            raise ValueError("no layers")
        moving, names = model.moving, {id(value): name for name, value in model.model.named_parameters()}
        self._weights = [
            {
                own: names[id(value)] for own, value in layer.named_parameters()
                if names.get(id(value)) in moving.slices
            }
            for layer in layers
        ]  # fmt: skip
        inside = [name for own in self._weights for name in own.values()]
        if len(set(inside)) < len(inside):
            raise ValueError("layers share weights")
        self._frozen = [
            {own: value for own, value in (*layer.named_parameters(), *layer.named_buffers()) if own not in weights}
            for layer, weights in zip(layers, self._weights, strict=True)
        ]
        self._outside = [name for name in moving.names if name not in inside]
        self._ahead: list[str] | None = None
        self._behind: list[str] | None = None
        # Of layers that are alike, the first stands for all.
        signs = [_signature(layer) for layer in layers]
        self._like = [signs.index(sign) for sign in signs]
        self._settings: list[tuple[Any, str]] = []
        self._gives_tuples = False
        self._last: tuple[Batch, list[Call], Tensor, Tensor] | None = None

    @staticmethod
    def found_in(model: nn.Module) -> Sequence[nn.Module]:
        """The outermost list of modules of one kind, if there is one."""
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(one) for one in module}) == 1:
                return list(module)
        return []

    def moved(
        self, vectors: Float[Tensor, "vector weight"], batch: Batch
    ) -> tuple[Float[Tensor, "sample token width"], Float[Tensor, "vector sample token width"]]:
        """Return the states at the end, and how they change along each vector."""
        calls, last, states = self._calls(batch)
        moved = self._moved_ahead(vectors, calls[0].hidden, batch)
        for number, call in enumerate(calls):
            weights, directions = self._of_layer(number, self._model.moving.center), self._of_layer(number, vectors)
            moved = self._compiled(
                f"layer {self._like[number]} moved", self._layer_moved(number), call.hidden, moved, weights,
                directions, self._frozen[number], call.others,
            )  # fmt: skip
        after, weights = self._after(last, batch)
        directions = self._parts(self._behind, vectors)
        return states, vmap(lambda one, own: jvp(after, (last, weights), (one, own))[1])(moved, directions)

    def pulled(
        self, curved: Float[Tensor, "vector sample token width"], batch: Batch
    ) -> Float[Tensor, "vector weight"]:
        """Return what changes of the states weigh in the weights, summed in float32 or wider."""
        calls, last, _ = self._calls(batch)
        moving = self._model.moving
        found = torch.empty(len(curved), moving.total, dtype=moving.dtype, device=curved.device)
        there = set[str]()

        def add(slopes: dict[str, Tensor], names: dict[str, str] | None = None) -> None:
            for own, slope in slopes.items():
                name = names[own] if names else own
                place = found[:, moving.slices[name]]
                if name in there:
                    place.add_(slope.flatten(1))
                else:
                    place.copy_(slope.flatten(1))
                    there.add(name)

        after, weights = self._after(last, batch)
        curved, slopes = vmap(cast(Any, vjp(after, last, weights)[1]))(curved)
        add(slopes)
        for number, call in reversed([*enumerate(calls)]):
            curved, slopes = self._compiled(
                f"layer {self._like[number]} pulled", self._layer_pulled(number), call.hidden, curved,
                self._of_layer(number, moving.center), self._frozen[number], call.others,
            )  # fmt: skip
            add(slopes, self._weights[number])
        before, weights = self._before(batch)
        if weights:
            add(vmap(cast(Any, vjp(before, weights)[1]))(curved)[0])
        for name in moving.names:
            if name not in there:
                found[:, moving.slices[name]] = 0.0
        return found

    def _moved_ahead(self, vectors: Tensor, hidden: Tensor, batch: Batch) -> Float[Tensor, "vector ..."]:
        """How what the first layer is given changes along each vector."""
        before, weights = self._before(batch)
        if not weights:
            return hidden.new_zeros(len(vectors), *hidden.shape)
        directions = self._parts(self._ahead, vectors)
        return vmap(lambda own: jvp(before, (weights,), (own,))[1])(directions)

    def _parts(self, names: Iterable[str] | None, flat: Tensor) -> dict[str, Tensor]:
        """Some weights, or what vectors have of them."""
        moving = self._model.moving
        shapes = dict(zip(moving.names, moving.shapes, strict=True))
        return {name: flat[..., moving.slices[name]].unflatten(-1, shapes[name]) for name in names or ()}

    def _of_layer(self, number: int, flat: Tensor) -> dict[str, Tensor]:
        """A layer's weights, or what vectors have of them, by the layer's own names."""
        parts = self._parts(self._weights[number].values(), flat)
        return {own: parts[name] for own, name in self._weights[number].items()}

    def _layer_moved(self, number: int) -> Callable[..., Tensor]:
        def moved(hidden: Tensor, along: Tensor, weights: Any, directions: Any, frozen: Any, others: Any) -> Tensor:
            def layer(hidden: Tensor, weights: Any) -> Tensor:
                return self._forward(self._like[number], hidden, {**frozen, **weights}, others)

            return vmap(lambda one, own: jvp(layer, (hidden, weights), (one, own))[1])(along, directions)

        return moved

    def _layer_pulled(self, number: int) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        def pulled(hidden: Tensor, curved: Tensor, weights: Any, frozen: Any, others: Any) -> Any:
            def layer(hidden: Tensor, weights: Any) -> Tensor:
                return self._forward(self._like[number], hidden, {**frozen, **weights}, others)

            pull: Any = vjp(layer, hidden, weights)[1]
            return vmap(pull)(curved)

        return pulled

    def _forward(self, number: int, hidden: Tensor, weights: dict[str, Tensor], others: Any) -> Tensor:
        args, named = others
        with self._as_set():
            return _first(functional_call(self._layers[number], weights, (hidden, *args), named))

    def _calls(self, batch: Batch) -> tuple[list[Call], Tensor, Tensor]:
        """How each layer is called for this batch, what the last one gives, and the states at the end."""
        if self._last is not None and self._last[0] is batch:
            return self._last[1:]
        calls: list[Call] = []
        results: list[Tensor] = []

        def before(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not args or (results and args[0] is not results[-1]):
                raise ValueError("layers are no chain")
            calls.append(Call(args[0], (args[1:], named)))
            self._settings = [(config, config._attn_implementation) for config in _configs(layer)]

        def after(layer: nn.Module, args: Any, result: Any) -> None:
            results.append(_first(result))
            self._gives_tuples = isinstance(result, tuple)

        with contextlib.ExitStack() as hooks:
            for layer in self._layers:
                for handle in (
                    layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)
                ):  # fmt: skip
                    hooks.callback(handle.remove)
            states = self._model.call(self._body, self._model.moving.center, batch)
        if len(calls) != len(self._layers):
            raise ValueError("layers are not called once each")
        self._last = batch, calls, results[-1], states
        return self._last[1:]

    def _before(self, batch: Batch) -> tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]]:
        """What the first layer is given, as a function of weights, and these."""

        def before(weights: dict[str, Tensor]) -> Tensor:
            reached: list[Tensor] = []
            with self._in_place_of_layers(lambda number, hidden: reached.append(hidden) or hidden):
                self._model.call_with(self._body, weights, batch)
            return reached[0]

        if self._ahead is None:
            self._ahead = self._that_count(before)
        return before, self._parts(self._ahead, self._model.moving.center)

    def _after(self, last: Tensor, batch: Batch) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """What becomes of what the last layer gives, as a function of that and of weights, and these."""
        number_of_last = len(self._layers) - 1

        def after(hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
            with self._in_place_of_layers(lambda number, own: hidden if number == number_of_last else own):
                return self._model.call_with(self._body, weights, batch)

        if self._behind is None:
            self._behind = self._that_count(lambda weights: after(last, weights))
        return after, self._parts(self._behind, self._model.moving.center)

    def _that_count(self, function: Callable[[dict[str, Tensor]], Tensor]) -> list[str]:
        """Those weights outside the layers that something depends on."""
        if not self._outside:
            return []
        with torch.enable_grad():
            leaves = {
                name: value.detach().requires_grad_()
                for name, value in self._parts(self._outside, self._model.moving.center).items()
            }
            value = function(leaves)
            if not value.requires_grad:
                return []
            slopes = torch.autograd.grad(value.sum(), [*leaves.values()], allow_unused=True)
        return [name for name, slope in zip(leaves, slopes, strict=True) if slope is not None]

    @contextlib.contextmanager
    def _in_place_of_layers(self, function: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        def stand_in(number: int) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **named: Any) -> Any:
                found = function(number, hidden)
                return (found,) if self._gives_tuples else found

            return forward

        # A layer may have a `forward` of its own, beside its class's, as hooks that move it between devices do.
        own = [vars(layer).get("forward") for layer in self._layers]
        for number, layer in enumerate(self._layers):
            layer.forward = stand_in(number)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, own, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    @contextlib.contextmanager
    def _as_set(self) -> Iterator[None]:
        """Have layers attend as they did within the model."""
        before = [(config, config._attn_implementation) for config, _ in self._settings]
        for config, implementation in self._settings:
            config._attn_implementation = implementation
        try:
            yield
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _configs(layer: nn.Module) -> list[Any]:
    found = {id(module.config): module.config for module in layer.modules() if hasattr(module, "config")}
    return [config for config in found.values() if hasattr(config, "_attn_implementation")]


def _signature(layer: nn.Module) -> list[Any]:
    """What tells the code of a layer: its modules, and their plain settings but for its number."""
    return [
        (name, type(module), id(vars(module).get("forward")), sorted(
            (key, value) for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
        ))
        for name, module in layer.named_modules()
    ]  # fmt: skip
