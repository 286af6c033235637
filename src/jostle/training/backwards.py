"""The derivative of a training: backwards through its own steps, from queries' losses to examples' weights.

A step takes weights w, what the optimizer keeps s, and running statistics r to the next ones, by the gradient
g = ∇Σ aᵢℓᵢ(w, r). With λ the derivative of a query's loss by what comes out of a step, that by what went in is

    λ_g, λ_w, λ_s   from the optimizer's rule, which treats every number by itself,
    λ_w += ∂(λ_g·g)/∂w,    λ_r = ∂(λ_g·g)/∂r + ...,    ∂/∂aᵢ += λ_g·∇ℓᵢ.

The last three are one way back through one gradient, which all queries share.

Reference: Maclaurin, Duvenaud and Adams, *Gradient-based hyperparameter optimization through reversible learning*,
2015; Ilyas and Engstrom, *MAGIC: near-optimal data attribution for deep learning*, 2025.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.utils import _pytree as pytree

from jostle.losses import Batch, plain_operations
from jostle.models.functional import called_with, eval_mode, places_of, sample_means
from jostle.training.repeatable import Microbatch, Repetition, own_randomness, set_random_state
from jostle.training.steps import Kept, Root, clipped, kept_of, rules_of

log = logging.getLogger("jostle")

Cotangents = dict[str, Tensor]
"""Derivatives of each query's loss, (query, ...), by name."""


@dataclass
class Costs:
    """Of every query, derivatives of its loss by what stands between two steps.

    Attributes:
        weights: by each parameter.
        kept: by what the optimizer keeps of it.
        statistics: by each running statistic.
    """

    weights: Cotangents
    kept: dict[str, Cotangents]
    statistics: Cotangents

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        kept = {f"kept/{own}/{name}": value for name, every in self.kept.items() for own, value in every.items()}
        parts = (("weights", self.weights), ("statistics", self.statistics))
        return {**{f"{kind}/{name}": value for kind, every in parts for name, value in every.items()}, **kept}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Costs:
        """Return what `tensors` gave."""
        found = cls({}, {}, {})
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "weights":
                found.weights[name] = value.to(device)
                found.kept.setdefault(name, {})
            elif kind == "statistics":
                found.statistics[name] = value.to(device)
            elif kind == "kept":
                own, _, name = name.partition("/")
                found.kept.setdefault(name, {})[own] = value.to(device)
        return found


class RunningStatistics:
    """Batch norms whose running statistics are numbers like others: they come out, and can be differentiated.

    PyTorch's own change them in place, and have no derivative by them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = {
            name: module for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        }  # fmt: skip
        self.names = [f"{name}.{kind}" for name in self._norms for kind in ("running_mean", "running_var")]

    @contextlib.contextmanager
    def coming_out(self) -> Iterator[dict[str, Tensor]]:
        """Within, those in training mode leave their next statistics here, and nowhere else."""
        found: dict[str, Tensor] = {}
        try:
            for name, module in self._norms.items():
                module.__dict__["forward"] = self._forward_of(name, module, found)
            yield found
        finally:
            for module in self._norms.values():
                module.__dict__.pop("forward", None)

    def _forward_of(self, name: str, module: Any, found: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            shape, dims = [1, -1, *[1] * (inputs.ndim - 2)], [0, *range(2, inputs.ndim)]
            if module.training:
                mean, variance = inputs.mean(dims), inputs.var(dims, correction=0)
                count = inputs.numel() / inputs.shape[1]
                pace = module.momentum
                if pace is None:
                    pace = 1 / (float(module.num_batches_tracked) + 1)
                for kind, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
                    own = f"{name}.running_{kind}"
                    before: Any = found.get(own, getattr(module, f"running_{kind}"))
                    found[own] = (1 - pace) * before + pace * value
            else:
                mean, variance = module.running_mean, module.running_var
            normed = (inputs - mean.view(shape)) * (variance.view(shape) + module.eps).rsqrt()
            if module.weight is None:
                return normed
            return normed * module.weight.view(shape) + module.bias.view(shape)

        return forward


class Backwards:
    """Goes back through a training, a step at a time.

    Args:
        repetition: the training, at its end. Its model is used for passes, at whatever weights, and without autocast:
            with it only where steps draw random numbers, which are others in another precision.
        root: √v̂ of Adam, as it is differentiated.
    """

    def __init__(self, repetition: Repetition, root: Root = torch.sqrt) -> None:
        self._repetition, self._root = repetition, root
        model = repetition.model
        self._model, self._places = model, places_of(model)
        names = {id(value): name for name, value in model.named_parameters()}
        self._parameters = {names[id(value)]: value for value in repetition.parameters}
        self._trained = [*self._parameters]
        self._norms = RunningStatistics(model)
        objective = repetition.about.objective
        self._objective = objective if repetition.draws else objective.in_full_precision
        self._shapes: dict[Any, torch.Size] = {}
        self._at_once = sys.maxsize

    def of_queries(self, batches: Sequence[Batch]) -> Costs:
        """The derivative of each query's mean loss at the end, in eval mode."""
        objective, buffers = self._objective, dict(self._model.named_buffers())
        leaves = {name: value.detach() for name, value in self._parameters.items()}
        statistics = {name: buffers[name].detach() for name in self._norms.names}

        def losses(leaves: dict[str, Tensor], statistics: dict[str, Tensor], batch: Batch) -> Tensor:
            with self._norms.coming_out():
                found: Any = self._call(objective.loss, {**leaves, **statistics}, batch)
            return sample_means(found, objective.loss, batch)

        rows: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        with eval_mode(self._model), plain_operations():
            for batch in batches:
                found, pull = _vjp(lambda one, other, batch=batch: losses(one, other, batch), leaves, statistics)
                rows += [pull(unit) for unit in torch.eye(len(found), dtype=found.dtype, device=found.device)]
        parts = [{name: torch.stack([row[which][name] for row in rows]) for name in kind}
                 for which, kind in enumerate((leaves, statistics))]  # fmt: skip
        kept = {
            name: {
                own: torch.zeros_like(parts[0][name])
                for own in kept_of(self._repetition.optimizer, self._repetition.kind, self._parameters[name])
            }
            for name in self._trained
        }
        return Costs(parts[0], kept, parts[1])

    def step(
        self, costs: Costs, number: int, moved: Sequence[bool], found: Callable[[Microbatch, Tensor], None]
    ) -> Costs:
        """Go back through step ``number``, before which the training stands now.

        Args:
            costs: after the step.
            number: of the step.
            moved: which parameters it moved.
            found: is told the derivative by the weight of each loss of a microbatch, (query, sample, ...).
        """
        repetition, about = self._repetition, self._repetition.about
        by_parameter = {id(parameter): rule for parameter, rule in rules_of(repetition.optimizer, repetition.kind)}
        rules = {name: by_parameter[id(value)] for name, value in self._parameters.items()}
        weights = {name: value.detach() for name, value in self._parameters.items()}
        parts = about.steps[number]
        passes = self._passes(weights, parts)
        gradients = {name: torch.stack([one.gradients[name] for one in passes]).sum(0) for name in self._trained}
        names = [name for name, does in zip(self._trained, moved, strict=True) if does]
        cut, back = clipped([gradients[name] for name in names], about.clip_norm)
        before = Costs({**costs.weights}, {**costs.kept}, {**costs.statistics})
        by_gradient: list[Tensor] = []
        for name, gradient in zip(names, cut, strict=True):
            kept = kept_of(repetition.optimizer, repetition.kind, self._parameters[name])

            def rule(weight: Tensor, kept: Kept, gradient: Tensor, own: Any = rules[name]) -> tuple[Tensor, Kept]:
                after, keeps = own(weight, kept, gradient, self._root)
                return after, {kind: keeps.get(kind, value) for kind, value in kept.items()}

            _, pull = _vjp(rule, weights[name], kept, gradient)
            own, of_kept, of_gradient = vmap(pull)((costs.weights[name], costs.kept[name]))
            before.weights[name], before.kept[name] = own, of_kept
            by_gradient.append(of_gradient)
        by_gradients = dict(zip(names, back(by_gradient), strict=True))
        for name in self._trained:
            if name not in by_gradients:  # a parameter without a gradient: nothing comes of it
                by_gradients[name] = torch.zeros_like(costs.weights[name])
        for part, one in reversed([*zip(parts, passes, strict=True)]):
            of_weights, before.statistics, of_losses = self._pulled(one, by_gradients, before.statistics)
            for name, value in of_weights.items():
                before.weights[name] = before.weights[name] + value
            found(part, of_losses)
        return before

    def _pulled(self, one: _Pass, by_gradients: Cotangents, by_statistics: Cotangents) -> Any:
        """The way back through a pass, for all queries at once or as many as there is room for."""
        count = len(next(iter(by_gradients.values())))
        while True:
            now = min(self._at_once, count)
            try:
                return vmap(one.pull, chunk_size=now)((by_gradients, by_statistics))
            except torch.OutOfMemoryError:
                if now == 1:
                    raise
            # Only here: an error that is being handled holds on to the memory of what failed.
            self._at_once = -(-now // 2)
            log.info("%d queries at once have no room; going on with %d", now, self._at_once)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _passes(self, weights: dict[str, Tensor], parts: Sequence[Microbatch]) -> list[_Pass]:
        """The gradient of each microbatch, with its way back."""
        repetition = self._repetition
        buffers = dict(self._model.named_buffers())
        statistics = {name: buffers[name].detach() for name in self._norms.names}
        passes: list[_Pass] = []
        with own_randomness(), plain_operations():
            set_random_state(repetition.random)
            for part in parts:
                if part.state is not None:
                    set_random_state(part.state)
                batch = repetition.about.data.batch(part.examples)
                one = self._pass(weights, statistics, batch, part.share)
                passes.append(one)
                statistics = one.statistics
        return passes

    def _pass(self, weights: dict[str, Tensor], statistics: dict[str, Tensor], batch: Batch, share: float) -> _Pass:
        objective = self._objective

        def gradient(weights: Any, statistics: Any, ones: Tensor) -> tuple[Any, Any]:
            def mean(weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
                with self._norms.coming_out() as after:
                    losses = self._call(objective.loss, {**weights, **statistics}, batch)
                counts = share * objective.shares(losses.detach(), batch)
                losses = torch.where(counts > 0, losses, 0)
                return (counts * ones * losses).sum(), {**statistics, **after}

            return grad(mean, has_aux=True)(weights)

        some = next(iter(weights.values()))
        ones = torch.ones(self._shape(weights, statistics, batch), dtype=some.dtype, device=some.device)
        (gradients, after), pull = _vjp(gradient, weights, statistics, ones)
        return _Pass(gradients, after, pull)

    def _shape(self, weights: dict[str, Tensor], statistics: dict[str, Tensor], batch: Batch) -> torch.Size:
        """Of the losses of a batch: looked at once for all batches of one form."""
        leaves, form = pytree.tree_flatten(batch)
        key = str(form), *(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if key not in self._shapes:
            with torch.no_grad(), own_randomness(), self._norms.coming_out():
                self._shapes[key] = self._call(self._objective.loss, {**weights, **statistics}, batch).shape
        return self._shapes[key]

    def _call(self, function: Callable[..., Tensor], numbers: Mapping[str, Tensor], *inputs: Any) -> Tensor:
        return called_with(self._model, self._places, function, numbers, *inputs)


@dataclass
class _Pass:
    gradients: dict[str, Tensor]
    statistics: dict[str, Tensor]
    pull: Callable[[Any], Any]


def _vjp(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Callable[[Any], Any]]:
    found: Any = vjp(function, *inputs)
    return found[0], found[1]
