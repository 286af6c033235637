"""A kernel of our own, in Triton, for what no library does: cross-entropy straight from hidden states.

Unembedding and cross-entropy in one pass. A tile of logits lives in registers, is folded into a running logsumexp in
float32, and is gone: logits are neither stored nor rounded to half precision. For small models, whose vocabulary is
most of their cost, this is where an observation's time goes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a PyTorch without CUDA comes without it
    triton = None

NARROW = 128
"""The widest hidden states that are kept in registers as a whole."""

PROGRAMS = 264
"""About how many programs keep a large GPU busy; the vocabulary is split among them where there are few rows."""


def can_score(hidden: Tensor, head: object) -> bool:
    """Whether `linear_cross_entropy` takes this unembedding: an ordinary one, in half precision.

    With gradients, only where they stop at the hidden states and those are narrow: a wide model's time goes into matrix
    products, which libraries do better.
    """
    return (
        triton is not None
        and hidden.is_cuda
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and type(head) is torch.nn.Linear
        and head.weight.dtype == hidden.dtype
        and head.weight.is_contiguous()
        and (
            not torch.is_grad_enabled()
            or (hidden.shape[1] <= NARROW and not any(value.requires_grad for value in head.parameters()))
        )
    )


def linear_cross_entropy(
    hidden: Float[Tensor, "row width"],
    weight: Float[Tensor, "vocabulary width"],
    bias: Float[Tensor, " vocabulary"] | None,
    targets: Int[Tensor, " row"],
    *,
    scale: float = 1.0,
    cap: float | None = None,
) -> Float[Tensor, " row"]:
    """Return −log softmax(c·tanh(scale·(Wh + b)/c))[target] of each row, in float32; without a cap c, no tanh."""
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _Differentiable.apply(hidden, weight, bias, targets, scale, cap)
    return _forward(hidden, weight, bias, targets, scale, cap)[0]


class _Differentiable(torch.autograd.Function):
    """With a gradient for the hidden states alone."""

    @staticmethod
    def forward(context, hidden, weight, bias, targets, scale, cap):
        losses, logsumexp = _forward(hidden, weight, bias, targets, scale, cap)
        context.save_for_backward(hidden, weight, bias, targets, logsumexp)
        context.scale, context.cap = scale, cap
        return losses

    @staticmethod
    def backward(context, gradient):
        hidden, weight, bias, targets, logsumexp = context.saved_tensors
        return _backward(hidden, weight, bias, targets, logsumexp, gradient, context.scale, context.cap), *[None] * 5


def _tiles(rows: int, vocabulary: int, tile: dict[str, int]) -> tuple[tuple[int, int], int]:
    """The grid, and how many words a program goes through: the vocabulary is split where there are few rows."""
    row_tiles, word_tiles = triton.cdiv(rows, tile["BM"]), triton.cdiv(vocabulary, tile["BV"])
    splits = max(1, min(word_tiles, PROGRAMS // row_tiles))
    words = triton.cdiv(word_tiles, splits) * tile["BV"]
    return (row_tiles, triton.cdiv(vocabulary, words)), words


def _forward(hidden, weight, bias, targets, scale, cap) -> tuple[Tensor, Tensor]:
    """The losses, and the logsumexp of every row's logits."""
    hidden, targets = hidden.contiguous(), targets.contiguous()
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    one_block = width <= NARROW
    tile = (
        {"BM": 128, "BV": 128, "BD": max(16, triton.next_power_of_2(width)), "num_warps": 8, "num_stages": 3}
        if one_block
        else {"BM": 128, "BV": 256, "BD": 64, "num_warps": 8, "num_stages": 3}
    )
    grid, words = _tiles(rows, vocabulary, tile)
    largest, total, own = (torch.empty(grid[1], rows, device=hidden.device, dtype=torch.float32) for _ in range(3))
    _linear_cross_entropy[grid](
        hidden, weight, weight if bias is None else bias, targets, largest, total, own,
        rows, vocabulary, width, words, scale, cap or 1.0,
        BIASED=bias is not None, CAPPED=cap is not None, ONE_BLOCK=one_block, EVEN=width % tile["BD"] == 0, **tile,
    )  # fmt: skip
    logsumexp = (largest + total.log())[0] if grid[1] == 1 else torch.logsumexp(largest + total.log(), dim=0)
    return logsumexp - own.sum(0), logsumexp


def _backward(hidden, weight, bias, targets, logsumexp, gradient, scale, cap) -> Tensor:
    """The gradient for the hidden states: Wᵀ(softmax − one-hot) of each row, times its loss's gradient."""
    hidden, targets, gradient = hidden.contiguous(), targets.contiguous(), gradient.float().contiguous()
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    tile = {"BM": 64, "BV": 128, "BD": max(16, triton.next_power_of_2(width)), "num_warps": 8, "num_stages": 2}
    grid, words = _tiles(rows, vocabulary, tile)
    parts = torch.empty(grid[1], rows, width, device=hidden.device, dtype=torch.float32)
    _linear_cross_entropy_backward[grid](
        hidden, weight, weight if bias is None else bias, targets, logsumexp, gradient, parts,
        rows, vocabulary, width, words, scale, cap or 1.0, BIASED=bias is not None, CAPPED=cap is not None, **tile,
    )  # fmt: skip
    return parts.sum(0).to(hidden.dtype)


if triton is not None:

    @triton.jit
    def _linear_cross_entropy(
        hidden, weight, bias, targets, largest_out, total_out, own_out,
        rows, vocabulary, width, words, scale, cap,
        BIASED: tl.constexpr, CAPPED: tl.constexpr, ONE_BLOCK: tl.constexpr, EVEN: tl.constexpr,
        BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BM + tl.arange(0, BM)
        split = tl.program_id(1)
        inner = tl.arange(0, BD)
        row_exists = row < rows
        target = tl.load(targets + row, mask=row_exists, other=-1)
        largest = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        own = tl.zeros((BM,), tl.float32)
        row_start = hidden + row[:, None].to(tl.int64) * width
        if ONE_BLOCK:
            state = tl.load(row_start + inner[None, :], mask=row_exists[:, None] & (inner < width)[None, :], other=0.0)
        begin = split * words
        end = tl.minimum(begin + words, vocabulary)
        for first in range(begin, end, BV):
            word = first + tl.arange(0, BV)
            word_exists = word < end
            # Words beyond the end are read from the last one, and left out below.
            word_start = weight + tl.minimum(word, vocabulary - 1)[:, None].to(tl.int64) * width
            logits = tl.zeros((BM, BV), tl.float32)
            if ONE_BLOCK:
                vector = tl.load(word_start + inner[None, :], mask=(inner < width)[None, :], other=0.0)
                logits = tl.dot(state, vector.T, logits)
            else:
                for start in range(0, width, BD):
                    place = start + inner
                    if EVEN:
                        state = tl.load(row_start + place[None, :], mask=row_exists[:, None], other=0.0)
                        vector = tl.load(word_start + place[None, :])
                    else:
                        inside = (place < width)[None, :]
                        state = tl.load(row_start + place[None, :], mask=row_exists[:, None] & inside, other=0.0)
                        vector = tl.load(word_start + place[None, :], mask=inside, other=0.0)
                    logits = tl.dot(state, vector.T, logits)
            if BIASED:
                logits += tl.load(bias + tl.minimum(word, vocabulary - 1))[None, :].to(tl.float32)
            logits *= scale
            if CAPPED:
                logits = cap * (2 * tl.sigmoid(2 * logits / cap) - 1)  # tanh
            logits = tl.where(word_exists[None, :], logits, float("-inf"))
            own += tl.sum(tl.where(word[None, :] == target[:, None], logits, 0.0), axis=1)
            larger = tl.maximum(largest, tl.max(logits, axis=1))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logits - larger[:, None]), axis=1)
            largest = larger
        place = split * rows + row
        tl.store(largest_out + place, largest, mask=row_exists)
        tl.store(total_out + place, total, mask=row_exists)
        tl.store(own_out + place, own, mask=row_exists)

    @triton.jit
    def _linear_cross_entropy_backward(
        hidden, weight, bias, targets, logsumexp, gradient, out,
        rows, vocabulary, width, words, scale, cap,
        BIASED: tl.constexpr, CAPPED: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BM + tl.arange(0, BM)
        split = tl.program_id(1)
        inner = tl.arange(0, BD)
        row_exists = row < rows
        inside = (inner < width)[None, :]
        target = tl.load(targets + row, mask=row_exists, other=-1)
        normalizer = tl.load(logsumexp + row, mask=row_exists, other=0.0)
        upstream = tl.load(gradient + row, mask=row_exists, other=0.0) * scale
        state = tl.load(
            hidden + row[:, None].to(tl.int64) * width + inner[None, :], mask=row_exists[:, None] & inside, other=0.0
        )
        result = tl.zeros((BM, BD), tl.float32)
        begin = split * words
        end = tl.minimum(begin + words, vocabulary)
        for first in range(begin, end, BV):
            word = first + tl.arange(0, BV)
            place = tl.minimum(word, vocabulary - 1)
            vector = tl.load(weight + place[:, None].to(tl.int64) * width + inner[None, :], mask=inside, other=0.0)
            logits = tl.dot(state, vector.T)
            if BIASED:
                logits += tl.load(bias + place)[None, :].to(tl.float32)
            logits *= scale
            slope = tl.full((BM, BV), 1.0, tl.float32)
            if CAPPED:
                bent = 2 * tl.sigmoid(2 * logits / cap) - 1  # tanh
                logits = cap * bent
                slope = 1 - bent * bent
            difference = tl.exp(logits - normalizer[:, None]) - tl.where(word[None, :] == target[:, None], 1.0, 0.0)
            difference = tl.where((word < end)[None, :], difference * slope * upstream[:, None], 0.0)
            result = tl.dot(difference.to(vector.dtype), vector, result)
        tl.store(
            out + (split * rows + row[:, None]).to(tl.int64) * width + inner[None, :], result,
            mask=row_exists[:, None] & inside,
        )  # fmt: skip
