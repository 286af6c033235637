"""Which weights move: groups that people can type, patterns, and the flat vector that a chain is.

A group is recognised by the names that Hugging Face architectures give to their modules, one path segment at a time:

================  =====================================================================
``attention``     attention modules, with their projections, biases and inner norms
``mlp``           feed-forward modules, experts included
``norm``          normalization layers outside of those
``embedding``     token and position embeddings, with an unembedding that is tied to them
``head``          the unembedding, with embeddings that are tied to it
================  =====================================================================

Groups are joined by ``+`` and restricted to layers by a prefix: ``attention+mlp``, ``layers.3-5.attention``,
``layers.0.attention+mlp``; several such selections are separated by commas.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.errors import InputError

WeightSelection = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | Callable[[str, nn.Parameter], bool]

GROUPS = {
    "attention": re.compile(r"(self_|cross_)?(attn|attention)"),
    "mlp": re.compile(r"mlp|ffn|feed_?forward|fc_?[12]|block_sparse_moe|moe|experts"),
    "norm": re.compile(r".*norm.*|ln_\w+"),
    "embedding": re.compile(r"embed.*|.*_embed(dings?)?|wte|wpe|word_embeddings.*"),
    "head": re.compile(r"lm_head|embed_out|output_projection"),
}
"""The path segment that puts a parameter into a group; the first segment that fits any group decides."""

_LAYER_RANGE = re.compile(r"layers\.(\d+)(?:-(\d+))?\.(.+)")


def _in_group(name: str, group: str) -> bool:
    for segment in name.split("."):
        for candidate, pattern in GROUPS.items():
            if pattern.fullmatch(segment):
                return candidate == group
    return False


def _layer_of(name: str) -> int | None:
    return next((int(segment) for segment in name.split(".") if segment.isdigit()), None)


def _group_matcher(selection: str) -> Callable[[str], bool] | None:
    """What a selection written in groups means; None where it is not one (and so a glob)."""
    parts: list[tuple[range | None, list[str]]] = []
    for part in selection.split(","):
        restricted = _LAYER_RANGE.fullmatch(part.strip())
        layers, text = None, part.strip()
        if restricted:
            first, last, text = int(restricted[1]), int(restricted[2] or restricted[1]), restricted[3]
            layers = range(first, last + 1)
        names = text.split("+")
        if not all(name in GROUPS for name in names):
            return None
        parts.append((layers, names))

    def matches(name: str) -> bool:
        return any(
            (layers is None or _layer_of(name) in layers) and any(_in_group(name, group) for group in groups)
            for layers, groups in parts
        )

    return matches


class MovingWeights:
    """The weights that move, as slices of one flat vector; chain state has shape ``(chain, weight)``.

    The state is float32 or wider, whatever the model computes in: in bfloat16 one step's drift is below half a
    unit in the last place of a typical weight and would be rounded away while the noise stayed. The centre, which never
    moves, is exact in the model's own precision, and kept once.

    Attributes:
        dtype: of a chain's state.
        center: w*.
        whole: all of them, where this is a `shard`; itself otherwise.
        kept: which part of each parameter is here.
    """

    whole: MovingWeights

    def __init__(self, model: nn.Module, selection: WeightSelection) -> None:
        parameters = _select(model, selection)
        self.names = tuple(parameters)
        self._lay_out([parameter.shape for parameter in parameters.values()])
        self.whole, self.kept = self, tuple(slice(0, size) for size in self.sizes)
        self._dtypes = tuple(parameter.dtype for parameter in parameters.values())
        own = functools.reduce(torch.promote_types, self._dtypes)
        self.dtype = torch.promote_types(torch.float32, own)
        self.center = torch.cat([parameter.detach().reshape(-1).to(own) for parameter in parameters.values()])
        if not torch.isfinite(self.center).all():
            bad = next(name for name, value in parameters.items() if not torch.isfinite(value).all())
            raise InputError(
                f"weight {bad!r}",
                got="NaN or infinite values",
                expected="finite weights",
                fix="load a checkpoint from before training diverged",
            )

    def _lay_out(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = tuple(shapes)
        self.sizes = tuple(shape.numel() for shape in shapes)
        self.total = sum(self.sizes)
        ends = list(itertools.accumulate(self.sizes))
        self.slices = {
            name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)
        }

    def shard(self, rank: int, count: int) -> MovingWeights:
        """Return what one of several processes has of them: some rows of each, as `fully_shard` deals them."""
        part = copy.copy(self)
        rows = [-(-shape[0] // count) for shape in self.shapes]
        bounds = [
            [min(shape[0], each * number) for number in (rank, rank + 1)]
            for shape, each in zip(self.shapes, rows, strict=True)
        ]
        part._lay_out(
            [torch.Size([last - first, *shape[1:]]) for shape, (first, last) in zip(self.shapes, bounds, strict=True)]
        )
        widths = [size // shape[0] for size, shape in zip(self.sizes, self.shapes, strict=True)]
        part.kept = tuple(
            slice(first * width, last * width) for (first, last), width in zip(bounds, widths, strict=True)
        )
        part.center = part.keep(self.center)
        return part

    def places(self) -> list[slice]:
        """Return where what is here stands in the whole vector, a slice for each parameter."""
        starts = [place.start for place in self.whole.slices.values()]
        return [slice(start + kept.start, start + kept.stop) for start, kept in zip(starts, self.kept, strict=True)]

    def keep(self, whole: Float[Tensor, " whole_weight"]) -> Float[Tensor, " weight"]:
        """Return what is here of a whole vector."""
        return whole if self.whole is self else torch.cat([whole[place] for place in self.places()])

    def unflatten(self, flat: Float[Tensor, " weight"]) -> dict[str, Tensor]:
        """Name the slices, in the shape and type in which the model computes with them."""
        parts = flat.split(self.sizes)
        return {
            name: part.view(shape).to(dtype)
            for name, part, shape, dtype in zip(self.names, parts, self.shapes, self._dtypes, strict=True)
        }


def owners(model: nn.Module) -> Counter[Tensor]:
    """How many modules have each parameter for their own."""
    return Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))


def _select(model: nn.Module, selection: WeightSelection) -> dict[str, nn.Parameter]:
    """The chosen parameters under their first name: a tied weight has several names, and moves once."""
    aliases: dict[int, list[str]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_floating_point():
            continue
        aliases.setdefault(id(parameter), []).append(name)
        if aliases[id(parameter)] == [name]:
            parameters[name] = parameter
    matches = _matcher(selection)
    chosen = {
        name: parameter
        for name, parameter in parameters.items()
        if any(matches(alias, parameter) for alias in aliases[id(parameter)])
    }
    if chosen:
        return chosen
    some = ", ".join(list(parameters)[:4]) or "none at all"
    fix = "list(dict(model.named_parameters())) shows every name"
    near = difflib.get_close_matches(selection, GROUPS) if isinstance(selection, str) else []
    if near:
        fix = f"did you mean {near[0]!r}?"
    if selection == "all" and parameters:
        fix = "every weight is frozen: pass weights='*' to move them all the same"
    elif isinstance(selection, str) and _group_matcher(selection) is not None:
        existing = [group for group in GROUPS if any(_in_group(name, group) for name in parameters)]
        fix = f"groups that this model has: {', '.join(existing) or 'none'}"
    raise InputError(
        "weights",
        got=f"{selection!r}, which matches no weight",
        expected=f"a match among the model's {len(parameters)} floating-point weights ({some}, ...)",
        fix=fix,
    )


def _matcher(selection: WeightSelection) -> Callable[[str, nn.Parameter], bool]:
    if callable(selection):
        return selection
    if selection == "all":
        return lambda name, parameter: parameter.requires_grad
    if isinstance(selection, re.Pattern):
        return lambda name, parameter: selection.search(name) is not None
    if isinstance(selection, str):
        if selection.startswith("re:"):
            return _matcher(_compiled(selection.removeprefix("re:")))
        group = _group_matcher(selection)
        if group is not None:
            return lambda name, parameter: group(name)
        return lambda name, parameter: fnmatch.fnmatchcase(name, selection)
    matchers = [_matcher(part) for part in selection]
    return lambda name, parameter: any(matches(name, parameter) for matches in matchers)


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise InputError(
            "weights", got=f"{expression!r} ({error})", expected="a regular expression after 're:'"
        ) from error
