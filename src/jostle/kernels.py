"""Kernels of our own, in Triton, for what no library does, or not as quickly.

Unembedding and cross-entropy in one pass. A tile of logits lives in registers, is folded into a running logsumexp in
float32, and is gone: logits are neither stored nor rounded to half precision. For small models, whose vocabulary is
most of their cost, this is where an observation's time goes.

Causal attention of short sequences, without a gradient: libraries' kernels are made for long ones. Heads are read from
wherever they are, and written side by side, as what comes next reads them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a PyTorch without CUDA comes without it
    triton = None

NARROW = 128
"""The widest hidden states that are kept in registers as a whole."""

QUERIES, KEYS = 64, 32
"""How many of each a program of attention looks at together."""

CHUNK_BYTES = 256 << 20
"""About how much memory the half-precision logits of the rows computed together take on the way back."""


SHORT = 256
"""So many tokens at most have attention of our own; not tuned for more."""

WIDEST_HEAD = 128
"""How wide heads are that it takes, at most."""


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `causal_attention` takes these, each (batch, head, token, width), with as many tokens in each."""
    return (
        triton is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and not torch.is_grad_enabled()
        and 1 < query.shape[2] <= SHORT
        and query.shape[2] == key.shape[2]
        and query.shape[3] == value.shape[3] <= WIDEST_HEAD
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


@torch.library.custom_op(
    "jostle::causal_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale) -> Tensor",
)
def causal_attention(
    query: Float[Tensor, "batch head token width"],
    key: Float[Tensor, "batch key_head token width"],
    value: Float[Tensor, "batch key_head token width"],
    scale: float,
) -> Float[Tensor, "batch token head width"]:
    """Return softmax(scale·QKᵀ)V of every head, where no token looks at later ones; no gradient.

    Reference: the softmax without its matrix, Dao et al., *FlashAttention*, 2022.
    """
    batch, heads, length, width = query.shape
    out = torch.empty(batch, length, heads, width, device=query.device, dtype=query.dtype)
    # A width between two powers of 2 is taken in two parts: 80 is 64 and 16, where one part would be 128.
    first = 1 << (width.bit_length() - 1)
    rest = 0 if first == width else max(16, triton.next_power_of_2(width - first))
    if first < 16:
        first, rest = 16, 0
    places = [stride for tensor in (query, key, value) for stride in tensor.stride()[:3]]
    grid = (batch * heads, triton.cdiv(length, QUERIES))
    _causal_attention[grid](
        query, key, value, out, *places, heads, heads // key.shape[1], length, scale * LOG2_E.value,
        WIDTH=width, FIRST=first, REST=rest, BM=QUERIES, BN=KEYS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    batch, heads, length, width = query.shape
    return query.new_empty(batch, length, heads, width)


def can_score(hidden: Tensor, head: object) -> bool:
    """Whether `linear_cross_entropy` takes this unembedding: an ordinary one, in half precision, that does not move."""
    return (
        triton is not None
        and hidden.is_cuda
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and type(head) is torch.nn.Linear
        and (head.weight.dtype == hidden.dtype or torch.is_autocast_enabled("cuda"))
        and head.weight.is_contiguous()
        and not (torch.is_grad_enabled() and any(value.requires_grad for value in head.parameters()))
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
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
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
        return _Gradient.apply(*context.saved_tensors, gradient, context.scale, context.cap), *[None] * 5


class _Gradient(torch.autograd.Function):
    """The gradient for the hidden states, which has none of its own, and says so.

    What kernels write has no graph, and a second derivative would lack its terms. `once_differentiable` is not enough:
    it is silent where the gradient that comes in has no graph either, or where terms are asked for by name.
    """

    @staticmethod
    def forward(context, hidden, weight, bias, targets, logsumexp, gradient, scale, cap):
        way = _backward_narrow if hidden.shape[1] <= NARROW else _backward_wide
        return way(hidden, weight, bias, targets, logsumexp, gradient, scale, cap)

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("this kernel has no second derivative: within plain_operations() it is not used")


def _tiles(rows: int, vocabulary: int, tile: dict[str, int], processors: int) -> tuple[tuple[int, int], int]:
    """The grid, and how many words a program goes through.

    The vocabulary is split so that programs come in whole rounds: half a round takes as long as a whole one.
    """
    row_tiles, word_tiles = triton.cdiv(rows, tile["BM"]), triton.cdiv(vocabulary, tile["BV"])
    # A program that goes through few words spends its time on beginning.
    most = max(1, min(word_tiles // 8, 2 * processors // row_tiles + 8))
    words, best = vocabulary, 0.0
    for splits in range(1, most + 1):
        length = triton.cdiv(word_tiles, splits)
        programs = row_tiles * triton.cdiv(word_tiles, length)
        busy = row_tiles * word_tiles / (triton.cdiv(programs, processors) * processors * length)
        if busy > 1.02 * best:
            words, best = length * tile["BV"], busy
    return (row_tiles, triton.cdiv(vocabulary, words)), words


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _forward(hidden, weight, bias, targets, scale, cap) -> tuple[Tensor, Tensor]:
    """The losses, and the logsumexp of every row's logits."""
    hidden, targets = hidden.contiguous(), targets.contiguous()
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    one_block = width <= NARROW
    tile = (
        {"BM": 128, "BV": 64, "BD": max(16, triton.next_power_of_2(width)), "num_warps": 8, "num_stages": 3}
        if one_block
        else {"BM": 128, "BV": 256, "BD": 64, "num_warps": 8, "num_stages": 3}
    )
    # From Hopper on, tiles can be fetched by the memory unit itself, which leaves the rest of a program free.
    fetched = not one_block and hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) >= (9, 0)
    fetched = fetched and width * hidden.element_size() % 16 == 0
    states, vectors = (
        TensorDescriptor.from_tensor(tensor, [rows_of_tile, tile["BD"]]) if fetched else tensor
        for tensor, rows_of_tile in ((hidden, tile["BM"]), (weight, tile["BV"]))
    )
    grid, words = _tiles(rows, vocabulary, tile, _processors(hidden.device))
    parts = torch.empty(grid[1], rows, device=hidden.device, dtype=torch.float32)
    own = torch.empty(rows, device=hidden.device, dtype=torch.float32)
    _linear_cross_entropy[grid](
        hidden, weight, states, vectors, weight if bias is None else bias, targets, parts, own,
        rows, vocabulary, width, words, scale, cap or 1.0, BIASED=bias is not None, CAPPED=cap is not None,
        ONE_BLOCK=one_block, FETCHED=fetched,
        EVEN_WIDTH=width % tile["BD"] == 0, EVEN_WORDS=vocabulary % tile["BV"] == 0, **tile,
    )  # fmt: skip
    logsumexp = parts[0] if grid[1] == 1 else torch.logsumexp(parts, dim=0)
    return logsumexp - own, logsumexp


def _backward_narrow(hidden, weight, bias, targets, logsumexp, gradient, scale, cap) -> Tensor:
    """The gradient for the hidden states: Wᵀ(softmax − one-hot) of each row, times its loss's gradient."""
    hidden, targets, gradient = hidden.contiguous(), targets.contiguous(), gradient.float().contiguous()
    rows, width = hidden.shape
    vocabulary = weight.shape[0]
    tile = {"BM": 64, "BV": 128, "BD": max(16, triton.next_power_of_2(width)), "num_warps": 4, "num_stages": 3}
    grid, words = _tiles(rows, vocabulary, tile, _processors(hidden.device))
    parts = torch.empty(grid[1], rows, width, device=hidden.device, dtype=torch.float32)
    _linear_cross_entropy_backward[grid](
        hidden, weight, weight if bias is None else bias, targets, logsumexp, gradient, parts,
        rows, vocabulary, width, words, scale, cap or 1.0, BIASED=bias is not None, CAPPED=cap is not None, **tile,
    )  # fmt: skip
    return parts.sum(0).to(hidden.dtype)


def _backward_wide(hidden, weight, bias, targets, logsumexp, gradient, scale, cap) -> Tensor:
    """The same for wide states, whose time goes into matrix products, which libraries do best: a chunk at a time."""
    targets, gradient = targets.contiguous(), gradient.float().contiguous()
    vocabulary = weight.shape[0]
    chunk = max(1, CHUNK_BYTES // (vocabulary * hidden.element_size()))
    result = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        logits = torch.nn.functional.linear(hidden[part], weight, bias)
        grid = (len(logits), triton.cdiv(vocabulary, 2048))
        _softmax_difference[grid](
            logits, targets[part], logsumexp[part], gradient[part], vocabulary, scale, cap or 1.0,
            CAPPED=cap is not None, BV=2048, num_warps=8,
        )  # fmt: skip
        torch.mm(logits, weight, out=result[part])
    return result


if triton is not None:
    LOG2_E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _causal_attention(
        query, key, value, out,
        query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
        heads, queries_a_key, length, factor,
        WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ):  # fmt: skip
        batch = (tl.program_id(0) // heads).to(tl.int64)
        head = tl.program_id(0) % heads
        # Later tokens look at more: those are begun first.
        begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
        row = begin + tl.arange(0, BM)
        column = tl.arange(0, BN)
        inner, further = tl.arange(0, FIRST), FIRST + tl.arange(0, REST if REST else 16)
        inside, beyond = (inner < WIDTH)[None, :], (further < WIDTH)[None, :]
        exists = (row < length)[:, None]
        query += batch * query_batch + head * query_head
        key += batch * key_batch + (head // queries_a_key) * key_head
        value += batch * value_batch + (head // queries_a_key) * value_head
        own = query + row[:, None] * query_token
        q = tl.load(own + inner[None, :], mask=exists & inside, other=0.0)
        if REST:
            q_rest = tl.load(own + further[None, :], mask=exists & beyond, other=0.0)
            result_rest = tl.zeros((BM, REST), tl.float32)
        result = tl.zeros((BM, FIRST), tl.float32)
        largest = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        for start in range(0, begin + BM, BN):
            place = start + column
            known = (place < length)[:, None]
            keys, values = key + place[:, None] * key_token, value + place[:, None] * value_token
            k = tl.load(keys + inner[None, :], mask=known & inside, other=0.0)
            scores = tl.dot(q, k.T)
            if REST:
                k_rest = tl.load(keys + further[None, :], mask=known & beyond, other=0.0)
                scores = tl.dot(q_rest, k_rest.T, scores)
            # A token looks at itself at least, so that no row is without a finite number.
            scores = tl.where(row[:, None] >= place[None, :], factor * scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            shrunk = tl.exp2(largest - larger)
            chances = tl.exp2(scores - larger[:, None])
            total = total * shrunk + tl.sum(chances, axis=1)
            largest = larger
            chances = chances.to(value.dtype.element_ty)
            v = tl.load(values + inner[None, :], mask=known & inside, other=0.0)
            result = tl.dot(chances, v, result * shrunk[:, None])
            if REST:
                v_rest = tl.load(values + further[None, :], mask=known & beyond, other=0.0)
                result_rest = tl.dot(chances, v_rest, result_rest * shrunk[:, None])
        written = out + ((batch * length + row[:, None]) * heads + head) * WIDTH
        tl.store(written + inner[None, :], (result / total[:, None]).to(out.dtype.element_ty), mask=exists & inside)
        if REST:
            rest = (result_rest / total[:, None]).to(out.dtype.element_ty)
            tl.store(written + further[None, :], rest, mask=exists & beyond)

    @triton.jit
    def _linear_cross_entropy(
        hidden, weight, states, vectors, bias, targets, logsumexp_out, own_out,
        rows, vocabulary, width, words, scale, cap,
        BIASED: tl.constexpr, CAPPED: tl.constexpr, ONE_BLOCK: tl.constexpr, FETCHED: tl.constexpr,
        EVEN_WIDTH: tl.constexpr, EVEN_WORDS: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    ):  # fmt: skip
        # The work on each logit decides the time of narrow states: no masks where nothing needs masking, the scale and
        # the base of the logarithm folded into one product, and a row's own logit computed apart.
        first_row = tl.program_id(0) * BM
        row = first_row + tl.arange(0, BM)
        split = tl.program_id(1)
        inner = tl.arange(0, BD)
        row_exists = row < rows
        # Rows beyond the end are read from the last one, and never stored.
        row_start = hidden + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * width
        largest = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        factor = LOG2_E if CAPPED else LOG2_E * scale
        if ONE_BLOCK:
            if EVEN_WIDTH:
                state = tl.load(row_start + inner[None, :])
            else:
                state = tl.load(row_start + inner[None, :], mask=(inner < width)[None, :], other=0.0)
        begin = split * words
        end = tl.minimum(begin + words, vocabulary)
        # Flattened with the loop inside it, so that the next words are on their way while these are reduced.
        for first in tl.range(begin, end, BV, flatten=True):
            word = first + tl.arange(0, BV)
            # So are words, which are left out below.
            place = word if EVEN_WORDS else tl.minimum(word, vocabulary - 1)
            word_start = weight + place[:, None].to(tl.int64) * width
            logits = tl.zeros((BM, BV), tl.float32)
            if ONE_BLOCK:
                if EVEN_WIDTH:
                    vector = tl.load(word_start + inner[None, :])
                else:
                    vector = tl.load(word_start + inner[None, :], mask=(inner < width)[None, :], other=0.0)
                logits = tl.dot(state, vector.T, logits)
            else:
                for start in range(0, width, BD):
                    inside = start + inner
                    if FETCHED:
                        state = states.load([first_row, start])
                        vector = vectors.load([first, start])
                    elif EVEN_WIDTH:
                        state = tl.load(row_start + inside[None, :])
                        vector = tl.load(word_start + inside[None, :])
                    else:
                        state = tl.load(row_start + inside[None, :], mask=(inside < width)[None, :], other=0.0)
                        vector = tl.load(word_start + inside[None, :], mask=(inside < width)[None, :], other=0.0)
                    logits = tl.dot(state, vector.T, logits)
            if BIASED:
                logits += tl.load(bias + place)[None, :].to(tl.float32)
            if CAPPED:
                logits = cap * (2 * tl.sigmoid(2 * scale / cap * logits) - 1)  # tanh
            if not EVEN_WORDS:
                logits = tl.where((word < end)[None, :], logits, float("-inf"))
            larger = tl.maximum(largest, factor * tl.max(logits, axis=1))
            total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(factor * logits - larger[:, None]), axis=1)
            largest = larger
        tl.store(logsumexp_out + split * rows + row, (largest + tl.log2(total)) / LOG2_E, mask=row_exists)
        if split == 0:
            target = tl.load(targets + row, mask=row_exists, other=0)
            target_start = weight + target[:, None].to(tl.int64) * width
            own = tl.zeros((BM,), tl.float32)
            for start in range(0, width, BD):
                inside = start + inner
                known = (inside < width)[None, :]
                left = tl.load(row_start + inside[None, :], mask=known, other=0.0).to(tl.float32)
                right = tl.load(target_start + inside[None, :], mask=known, other=0.0).to(tl.float32)
                own += tl.sum(left * right, axis=1)
            if BIASED:
                own += tl.load(bias + target).to(tl.float32)
            own *= scale
            if CAPPED:
                own = cap * (2 * tl.sigmoid(2 * own / cap) - 1)
            tl.store(own_out + row, own, mask=row_exists)

    @triton.jit
    def _softmax_difference(
        logits, targets, logsumexp, gradient, vocabulary, scale, cap, CAPPED: tl.constexpr, BV: tl.constexpr
    ):  # fmt: skip
        """A loss's gradient for a row's logits, written over them."""
        row = tl.program_id(0)
        word = tl.program_id(1) * BV + tl.arange(0, BV)
        place = logits + row.to(tl.int64) * vocabulary + word
        target = tl.load(targets + row)
        normalizer = tl.load(logsumexp + row)
        upstream = tl.load(gradient + row) * scale
        values = scale * tl.load(place, mask=word < vocabulary, other=0.0).to(tl.float32)
        if CAPPED:
            bent = 2 * tl.sigmoid(2 * values / cap) - 1  # tanh
            values = cap * bent
            upstream = upstream * (1 - bent * bent)
        difference = tl.exp(values - normalizer) - tl.where(word == target, 1.0, 0.0)
        tl.store(place, (difference * upstream).to(logits.dtype.element_ty), mask=word < vocabulary)

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
