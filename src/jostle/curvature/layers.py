"""Jacobians of a model whose layers are a chain, one layer after another.

What a layer takes and gives is small beside what it computes in between, so a layer at a time needs little memory; and
layers that are alike are compiled once for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from jostle.curvature.compiled import Compiled
from jostle.losses import Batch
from jostle.models.functional import FunctionalModel
from jostle.models.weights import MovingWeights

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
        within = {id(value) for layer in layers for value in layer.parameters()}
        others = [name for name, value in model.model.named_parameters() if id(value) not in within]
        # At least one, which then has directions of 0.
        around = [name for name in others if name in moving.slices] or others[-1:]
        if not around:
            raise ValueError("nothing around the layers")
        self._around = FunctionalModel(model.model, MovingWeights(model.model, around))
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
        center, around = self._around.moving.center, self._part_around(vectors)
        moved = vmap(lambda own: jvp(lambda flat: self._before(flat, batch), (center,), (own,))[1])(around)
        for number, call in enumerate(calls):
            weights, directions = self._of_layer(number, self._model.moving.center), self._of_layer(number, vectors)
            moved = self._compiled(
                f"layer {self._like[number]} moved", self._layer_moved(number), call.hidden, moved, weights,
                directions, self._frozen[number], call.others,
            )  # fmt: skip

        def after(hidden: Tensor, flat: Tensor) -> Tensor:
            return self._after(hidden, flat, batch)

        return states, vmap(lambda one, own: jvp(after, (last, center), (one, own))[1])(moved, around)

    def pulled(
        self, curved: Float[Tensor, "vector sample token width"], batch: Batch
    ) -> Float[Tensor, "vector weight"]:
        """Return what changes of the states weigh in the weights."""
        calls, last, states = self._calls(batch)
        moving, center = self._model.moving, self._around.moving.center
        found = torch.zeros(len(curved), moving.total, dtype=states.dtype, device=states.device)
        pull: Any = vjp(lambda hidden, flat: self._after(hidden, flat, batch), last, center)[1]
        curved, around = vmap(pull)(curved)
        for number, call in reversed([*enumerate(calls)]):
            curved, slopes = self._compiled(
                f"layer {self._like[number]} pulled", self._layer_pulled(number), call.hidden, curved,
                self._of_layer(number, moving.center), self._frozen[number], call.others,
            )  # fmt: skip
            for own, name in self._weights[number].items():
                found[:, moving.slices[name]] = slopes[own].flatten(1)
        pull = vjp(lambda flat: self._before(flat, batch), center)[1]
        around = around + vmap(pull)(curved)[0]
        for name, part in zip(self._around.moving.names, around.split(self._around.moving.sizes, dim=1), strict=True):
            if name in moving.slices:
                found[:, moving.slices[name]] = part
        return found

    def _part_around(self, vectors: Tensor) -> Tensor:
        """What vectors have of the weights that are not the layers'."""
        slices, around = self._model.moving.slices, self._around.moving
        return torch.cat(
            [
                vectors[:, slices[name]] if name in slices else vectors.new_zeros(len(vectors), size)
                for name, size in zip(around.names, around.sizes, strict=True)
            ],
            dim=1,
        )

    def _of_layer(self, number: int, flat: Tensor) -> dict[str, Tensor]:
        """A layer's weights, or what vectors have of them."""
        moving = self._model.moving
        shapes = dict(zip(moving.names, moving.shapes, strict=True))
        return {
            own: flat[..., moving.slices[name]].unflatten(-1, shapes[name])
            for own, name in self._weights[number].items()
        }

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

    def _before(self, flat: Tensor, batch: Batch) -> Tensor:
        """What the first layer is given."""
        reached: list[Tensor] = []
        with self._in_place_of_layers(lambda number, hidden: reached.append(hidden) or hidden):
            self._around.call(self._body, flat, batch)
        return reached[0]

    def _after(self, hidden: Tensor, flat: Tensor, batch: Batch) -> Tensor:
        """What becomes of what the last layer gives."""
        last = len(self._layers) - 1
        with self._in_place_of_layers(lambda number, own: hidden if number == last else own):
            return self._around.call(self._body, flat, batch)

    @contextlib.contextmanager
    def _in_place_of_layers(self, function: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        def stand_in(number: int) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **named: Any) -> Any:
                found = function(number, hidden)
                return (found,) if self._gives_tuples else found

            return forward

        for number, layer in enumerate(self._layers):
            layer.forward = stand_in(number)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

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
        (name, type(module), sorted(
            (key, value) for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
        ))
        for name, module in layer.named_modules()
    ]  # fmt: skip
