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

PROGRAMS = 264
"""About how many programs keep a large GPU busy; the vocabulary is split among them where there are few rows."""


def can_score(hidden: Tensor, head: object) -> bool:
    """Whether `linear_cross_entropy` takes this unembedding: an ordinary one, in half precision, without gradients."""
    return (
        triton is not None
        and hidden.is_cuda
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and type(head) is torch.nn.Linear
        and head.weight.dtype == hidden.dtype
        and head.weight.is_contiguous()
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
    hidden, targets = hidden.contiguous(), targets.contiguous()
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    one_block = width <= 128
    tile = (
        {"BM": 128, "BV": 128, "BD": max(16, triton.next_power_of_2(width)), "num_warps": 8, "num_stages": 3}
        if one_block
        else {"BM": 128, "BV": 256, "BD": 64, "num_warps": 8, "num_stages": 3}
    )
    row_tiles, word_tiles = triton.cdiv(rows, tile["BM"]), triton.cdiv(vocabulary, tile["BV"])
    splits = max(1, min(word_tiles, PROGRAMS // row_tiles))
    words = triton.cdiv(word_tiles, splits) * tile["BV"]
    splits = triton.cdiv(vocabulary, words)
    largest, total, own = (torch.empty(splits, rows, device=hidden.device, dtype=torch.float32) for _ in range(3))
    _linear_cross_entropy[(row_tiles, splits)](
        hidden, weight, weight if bias is None else bias, targets, largest, total, own,
        rows, vocabulary, width, words, scale, cap or 1.0,
        BIASED=bias is not None, CAPPED=cap is not None, ONE_BLOCK=one_block, EVEN=width % tile["BD"] == 0, **tile,
    )  # fmt: skip
    if splits == 1:
        return (largest + total.log() - own)[0]
    return torch.logsumexp(largest + total.log(), dim=0) - own.sum(0)


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
