"""Linear layers with float8 operands, for observation alone; gradients never see them.

Every row of the inputs (a token) and every row of the weights (an output channel) has a scale of its own, so that its
largest entry is the largest number that float8 has. An example's loss therefore still depends on nothing else in its
batch. Products are summed in float32 by the hardware, and rounded to bfloat16.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jostle.errors import InputError
from jostle.models.prefix import repeated_blocks

log = logging.getLogger("jostle")

LARGEST = torch.finfo(torch.float8_e4m3fn).max
DIVISOR = 16
"""The hardware's products need both sides of a layer to be a multiple of this."""
LEAST_CAPABILITY = (8, 9)


def quantize(values: Float[Tensor, "row column"]) -> tuple[Tensor, Float[Tensor, "row 1"]]:
    """Return q in float8 and s with s·q ≈ values, a scale s = max|values|/448 for each row."""
    wide = values.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-20) / LARGEST
    # A quotient may round to slightly more than the largest number, which would become NaN.
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def refresh(weight: Tensor, place: Tensor, scales: Float[Tensor, "row 1"]) -> None:
    """`quantize` weights into the places of earlier ones."""
    rounded, scale = quantize(weight)
    place.copy_(rounded)
    scales.copy_(scale)


def product(
    rows: Tensor, row_scales: Float[Tensor, "row 1"], weight: Tensor, channel_scales: Float[Tensor, "channel 1"]
) -> Float[Tensor, "row channel"]:
    """Return rows · weightᵀ in bfloat16, from float8 operands, by the GPU's float8 units."""
    scales = {"scale_a": row_scales, "scale_b": channel_scales.reshape(1, -1)}
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(rows, weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def emulated_product(
    rows: Tensor, row_scales: Float[Tensor, "row 1"], weight: Tensor, channel_scales: Float[Tensor, "channel 1"]
) -> Float[Tensor, "row channel"]:
    """Return the same by ordinary means: the numbers that the operands stand for, multiplied in float32."""
    return (rows.float() @ weight.float().t() * row_scales * channel_scales.reshape(1, -1)).to(torch.bfloat16)


class Float8Linear(nn.Linear):
    """A linear layer whose operands are float8 where no gradient is taken; a `nn.Linear` becomes one, and back.

    Attributes:
        emulated: whether the products are ordinary ones.
        kept: its weights in float8, with their scales, where somebody has seen to it that they are up to date.
    """

    emulated: bool
    kept: tuple[Tensor, Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        """Return input · weightᵀ + bias."""
        if torch.is_grad_enabled():
            return super().forward(input)
        rows, row_scales = quantize(input.reshape(-1, self.in_features))
        weight, channel_scales = quantize(self.weight) if self.kept is None else self.kept
        multiply = emulated_product if self.emulated else product
        output = multiply(rows, row_scales, weight, channel_scales)
        if not torch.is_autocast_enabled(input.device.type):
            output = output.to(input.dtype)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.unflatten(0, input.shape[:-1]) if input.ndim != 2 else output


class Float8:
    """The linear layers of a model, lent to float8: a context manager that gives them back.

    Args:
        model: the model.
        emulated: round as float8 does, and compute by ordinary products.
    """

    def __init__(self, model: nn.Module, *, emulated: bool) -> None:
        self._emulated = emulated
        find: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = find()  # which has a kernel of its own
        # Once each: blocks may share a layer.
        within = dict.fromkeys(module for block in repeated_blocks(model) or [model] for module in block.modules())
        layers = [module for module in within if type(module) is nn.Linear and module is not head]
        self._layers: list[Any] = [
            layer for layer in layers if layer.in_features % DIVISOR == 0 and layer.out_features % DIVISOR == 0
        ]
        if not self._layers:
            raise InputError(
                "precision",
                got=f"'float8' for a model with {len(layers)} linear layers, none of which has sides that are "
                f"multiples of {DIVISOR}",
                expected="'bfloat16' or 'model' for it",
            )
        self._refresh = refresh
        how = "emulated" if emulated else "by its own units"
        log.info("%d of %d linear layers are observed in float8 (%s)", len(self._layers), len(layers), how)

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.__class__ = Float8Linear
            layer.emulated, layer.kept = self._emulated, None
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            layer.__class__ = nn.Linear
            del layer.emulated, layer.kept
        self._kept = []

    def compile(self, backend: str | None) -> None:
        """Round weights in one pass over memory; None undoes it."""
        self._refresh = refresh if backend is None else torch.compile(refresh, backend=backend, dynamic=False)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Have every layer's weights in float8 made once, now, for as long as they stay what they are."""
        if not self._kept:  # at places that stay, for what is compiled or recorded
            self._kept = [quantize(layer.weight) for layer in self._layers]
        for layer, kept in zip(self._layers, self._kept, strict=True):
            self._refresh(layer.weight, *kept)
            layer.kept = kept
        try:
            yield
        finally:
            for layer in self._layers:
                layer.kept = None


def require_float8(device: torch.device) -> None:
    """Refuse hardware without float8 units."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < LEAST_CAPABILITY:
        got = f"{device} of compute capability {capability[0]}.{capability[1]}" if capability else f"{device}"
        raise InputError(
            "precision",
            got=f"'float8' on {got}",
            expected="a GPU of compute capability 8.9 or more",
            fix="'float8-emulated' rounds in the same way, and is slow",
        )
