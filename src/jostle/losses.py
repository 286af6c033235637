"""Per-sample and per-token losses; never reduced over the batch.

A loss is any ``f(model, batch) -> (B,)`` or ``(B, S)`` tensor. A per-token loss may also have a method
``token_mask(batch) -> (B, S)`` that says which of its entries are real (not padding, not prompt); without
one, all are. What the mask leaves out is neither recorded nor part of any mean. A method ``token_positions(batch)``
says where in its sequence each entry stands, where that is not its column (padding on the left).

A loss that is a negative log-likelihood may say what labels the model itself would give: ``draw_labels(model, batch,
count, generator)`` are so many of them for each sample, (B, count, ...), or one where that says as much; and
``relabelled(batch, labels)`` is the batch with one of them each.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from jostle.errors import InputError

log = logging.getLogger("jostle")

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

IGNORED_LABEL = -100
"""The label of a token that is read but not scored, as everywhere in PyTorch and Hugging Face."""


class RightPadded(dict[str, Tensor]):
    """A batch of token sequences in which padding stands after every real token, and nowhere else.

    A causal model never looks at what comes later, so it needs no mask to leave such padding out, and attention without
    a mask takes the fast road.
    """


# So that `vmap` looks into such a batch as it does into a plain dictionary.
pytree.register_pytree_node(
    RightPadded,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, keys: RightPadded(zip(keys, values, strict=True)),
)


def classification(*, label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of each sample, ℓ(z; w) = −log p(y | x, w), for batches ``(inputs, labels)``.

    Labels are classes, or a weight for each class.

    ``label_smoothing`` is for `potential_loss`: a model trained with it is sampled with it, while the
    recorded loss stays plain.
    """
    return _Classification(float(label_smoothing))


def regression(*, noise_variance: float = 1.0) -> Loss:
    """Gaussian negative log-likelihood of each sample, ℓ(z; w) = ‖y − f(x)‖² / 2σ², up to its constant.

    Batches are ``(inputs, targets)``.
    """
    if not noise_variance > 0:
        raise InputError("noise_variance", got=noise_variance, expected="a positive number")
    return _Regression(float(noise_variance))


def next_token(*, chunk_bytes: int = 128 << 20) -> Loss:
    """Cross-entropy of each token given those before it: entry s is −log p(token s | tokens < s), shape (B, S).

    Batches are mappings with ``input_ids`` and, where needed, ``attention_mask`` (0 = padding) and ``labels`` (−100 =
    read but not scored; else what is scored in the token's place, nearly always the token itself). Entry 0 has nothing
    before it and is masked out.

    Of a Hugging Face model the unembedding is computed apart from the body, a few positions at a time: the float32
    logits of a batch, usually by far the largest thing in memory, never exist. Tied embeddings, logit scales and soft
    caps are respected; a model that does something else to its logits is noticed, and its logits are kept whole.

    Args:
        chunk_bytes: about how much memory the logits of the positions computed together may take.
    """
    if chunk_bytes < 1:
        raise InputError("chunk_bytes", got=chunk_bytes, expected="a positive number of bytes")
    return _NextToken(chunk_bytes)


FACTORIES = (classification, regression, next_token)


@dataclass(frozen=True)
class _Classification:
    label_smoothing: float

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, " batch"]:
        inputs, labels = batch
        logits = at_least_float32(model(inputs))
        if labels.is_floating_point():  # a weight for each class
            return F.cross_entropy(logits, labels.to(logits), reduction="none")
        if self.label_smoothing:
            return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)
        # −log p = log(1 + Σ exp(others − own)): near 0 the difference of logsumexp and logit, which is the usual form,
        # rounds to 0 in float32, and a confident example would seem to have no influence at all.
        own = logits.gather(1, labels[:, None])
        is_own = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
        return F.softplus(logits.masked_fill(is_own, -torch.inf).logsumexp(1) - own[:, 0])

    def draw_labels(
        self, model: nn.Module, batch: Batch, count: int, generator: torch.Generator
    ) -> Float[Tensor, "batch count class"]:
        # Not one class, which would hardly ever be another than a sure model's own, but a weight for each: q = p − v,
        # where v has the mean 0 and the covariance diag p − ppᵀ that e_y − p has for a class y that is drawn.
        chances = at_least_float32(model(batch[0])).softmax(1)[:, None]
        roots = chances.sqrt()
        signs = torch.randint(2, (len(chances), count, chances.shape[2]), generator=generator) * 2 - 1
        turned = signs.to(roots)
        return chances - roots * (turned - roots * (roots * turned).sum(2, keepdim=True))

    def relabelled(self, batch: Batch, labels: Float[Tensor, "batch class"]) -> Batch:
        return batch[0], labels


@dataclass(frozen=True)
class _Regression:
    noise_variance: float

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, " batch"]:
        inputs, targets = batch
        predictions = at_least_float32(model(inputs))
        if predictions.shape != targets.shape:
            raise InputError(
                "regression loss",
                got=f"predictions of shape {tuple(predictions.shape)} for targets of shape {tuple(targets.shape)}",
                expected="equal shapes",
                fix="add or squeeze a dimension of one of them, since broadcasting would mix examples",
            )
        squares = (predictions - targets).square()
        return squares.reshape(len(squares), -1).sum(1) / (2 * self.noise_variance)

    def draw_labels(
        self, model: nn.Module, batch: Batch, count: int, generator: torch.Generator
    ) -> Float[Tensor, "batch count ..."]:
        # One standard deviation up or down: the Fisher matrix asks for no more of the noise than its variance. Of a
        # single output both have the same square, so that one says it all.
        predictions = at_least_float32(model(batch[0]))[:, None]
        count = count if predictions[0].numel() > 1 else 1
        signs = torch.randint(2, (len(predictions), count, *predictions.shape[2:]), generator=generator) * 2 - 1
        return predictions + math.sqrt(self.noise_variance) * signs.to(predictions)

    def relabelled(self, batch: Batch, labels: Float[Tensor, "batch ..."]) -> Batch:
        return batch[0], labels


@dataclass(frozen=True)
class _NextToken:
    chunk_bytes: int = field(repr=False)

    def __call__(self, model: nn.Module, batch: Batch) -> Float[Tensor, "batch token"]:
        tokens, targets = batch["input_ids"], self._targets(batch)
        network, states, known = self._states(model, batch)
        # Flat, because cross-entropy over a middle dimension copies the logits and strides through them.
        flat = states.flatten(0, 1)
        if known:
            predicted = self._cross_entropy(network, flat, targets[:, 1:].flatten())
        else:
            predicted = F.cross_entropy(flat, targets[:, 1:].flatten(), reduction="none")
        return F.pad(predicted.view(len(tokens), -1), (1, 0))

    def draw_labels(
        self, model: nn.Module, batch: Batch, count: int, generator: torch.Generator
    ) -> Int[Tensor, "batch count token"]:
        network, states, known = self._states(model, batch)
        flat = states.flatten(0, 1)
        vocabulary = network.get_output_embeddings().weight.shape[0] if known else flat.shape[1]
        chunk = max(1, self.chunk_bytes // (4 * vocabulary))
        uniform = torch.rand(len(flat), count, generator=generator)
        drawn = [
            _draw(_logits(network, some) if known else some, numbers)
            for some, numbers in zip(flat.split(chunk), uniform.split(chunk), strict=True)
        ]
        return F.pad(torch.cat(drawn).unflatten(0, (len(states), -1)).movedim(2, 1), (1, 0), value=IGNORED_LABEL)

    def relabelled(self, batch: Batch, labels: Int[Tensor, "batch token"]) -> Batch:
        return type(batch)({**batch, "labels": labels})

    def _targets(self, batch: Batch) -> Int[Tensor, "batch token"]:
        """The token that each place is scored on."""
        tokens = batch["input_ids"]
        if "labels" not in batch:
            return tokens
        # What is not scored may have any label at all, and no place in the vocabulary.
        return torch.where(self.token_mask(batch), batch["labels"], tokens)

    def _states(self, model: nn.Module, batch: Batch) -> tuple[Any, Float[Tensor, "batch token ..."], bool]:
        """The network without its adapters; the states that its head reads, and True, or its logits, and False.

        Of all tokens but the last, after which nothing is predicted.
        """
        tokens = batch["input_ids"]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        base: Any = model
        network: Any = base.get_base_model() if hasattr(base, "get_base_model") else base  # what an adapter wraps
        accepted = inspect.signature(network.forward).parameters
        needs_mask = not self._may_be_padded(network, batch)
        if not needs_mask:
            inputs.pop("attention_mask", None)
        if "attention_mask" in inputs and "position_ids" in accepted:
            # Count from the first real token, so that padding on the left does not shift learned positions.
            inputs.setdefault("position_ids", (inputs["attention_mask"].long().cumsum(1) - 1).clamp(min=0))
        if "use_cache" in accepted:
            inputs.setdefault("use_cache", False)
        if _has_known_head(network, inputs):
            if not needs_mask and tokens.shape[1] > 1:  # nor does any other token look at the last one
                whole = tokens.shape
                inputs = {k: v[:, :-1] if isinstance(v, Tensor) and v.shape == whole else v for k, v in inputs.items()}
            with _with_masks(network.config) if needs_mask else _without_masks(network, tokens):
                return network, network.base_model(**inputs)[0][:, : tokens.shape[1] - 1], True
        with _with_masks(getattr(network, "config", None)):
            output = network(**inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        return network, at_least_float32(logits[:, :-1]), False

    def _may_be_padded(self, network: Any, batch: Batch) -> bool:
        """Whether more tokens at the end of this batch change nothing for those before."""
        accepted = inspect.signature(network.forward).parameters
        return isinstance(batch, RightPadded) and _looks_only_back(network, batch["input_ids"], accepted)

    def _cross_entropy(
        self, network: Any, hidden: Float[Tensor, "position width"], targets: Int[Tensor, " position"]
    ) -> Float[Tensor, " position"]:
        """Unembed and score a few positions at a time: the logits of a batch are never in memory together."""
        head = network.get_output_embeddings()
        if hidden.is_cuda and not _PLAIN_OPERATIONS.get():
            from jostle.kernels import can_score, linear_cross_entropy

            if torch.is_autocast_enabled("cuda"):
                hidden = hidden.to(torch.get_autocast_dtype("cuda"))
            if can_score(hidden, head):
                scale, cap = _scale_and_cap(network.config)
                return linear_cross_entropy(hidden, head.weight, head.bias, targets, scale=scale, cap=cap)

        def score(states: Tensor, labels: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
            unembed = functools.partial(functional_call, head, weights) if weights else head
            return F.cross_entropy(_logits(network, states, unembed), labels, reduction="none")

        vocabulary = head.weight.shape[0]
        chunk = max(1, self.chunk_bytes // (4 * vocabulary))
        if len(hidden) <= chunk:
            return score(hidden, targets)
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        if not torch.is_grad_enabled() or is_batchedtensor(hidden):
            return torch.cat([score(states, labels) for states, labels in parts])
        # With a gradient, a chunk's logits are computed again on the way back instead of being kept; but not among
        # chains side by side, which are gone by then.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        # What stands in for the head's weights in this call may be gone then.
        given = {name: value for name, value in head.named_parameters() if not isinstance(value, nn.Parameter)}
        return torch.cat([checkpoint(score, *part, given, **options) for part in parts])

    def token_mask(self, batch: Mapping[str, Tensor]) -> Bool[Tensor, "batch token"]:
        tokens = batch["input_ids"]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if "attention_mask" in batch:
            real = batch["attention_mask"].bool()
            # A token is scored where it and the one it is predicted from are both real: left padding too.
            mask = real & F.pad(real[:, :-1], (1, 0))
        if "labels" in batch:
            mask = mask & (batch["labels"] != IGNORED_LABEL)
        mask[:, 0] = False
        return mask

    def token_positions(self, batch: Mapping[str, Tensor]) -> Int[Tensor, "batch token"]:
        tokens = batch["input_ids"]
        real = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(tokens)
        return real.long().cumsum(1) - 1


@dataclass(frozen=True)
class LanguageHead:
    """The unembedding of a language model, apart from its body: logits = cap·tanh(scale·(Wh + b)/cap).

    Attributes:
        linear: W and b.
        states: what the head reads, of every token but the last: ``states(model, batch) -> (B, S − 1, width)``.
        targets: the token that each place is scored on, ``targets(batch) -> (B, S)``.
        may_be_padded: whether more tokens at the end of a batch change nothing for those before.
        scale: of the logits.
        cap: their soft cap; None where there is none.
    """

    linear: nn.Linear
    states: Callable[[nn.Module, Batch], Float[Tensor, "batch token width"]]
    targets: Callable[[Batch], Int[Tensor, "batch token"]]
    may_be_padded: bool
    scale: float
    cap: float | None

    @classmethod
    def of(cls, loss: Loss, model: nn.Module, batch: Batch) -> LanguageHead | None:
        """Return the head that a loss knows a model to have; None where it knows none."""
        if not isinstance(loss, _NextToken):
            return None
        with torch.no_grad():
            network, _, known = loss._states(model, batch)
        linear = network.get_output_embeddings() if known else None
        if type(linear) is not nn.Linear:
            return None
        return cls(
            linear, lambda model, batch: loss._states(model, batch)[1], loss._targets,
            loss._may_be_padded(network, batch), *_scale_and_cap(network.config),
        )  # fmt: skip

    def padded(self, batch: Batch, multiple: int) -> Batch:
        """Return the batch with so many more tokens that a multiple of them is read; the last one never is."""
        tokens = batch["input_ids"]
        missing = (1 - tokens.shape[1]) % multiple
        if not missing or not self.may_be_padded:
            return batch
        mask = {"attention_mask": torch.ones_like(tokens)}
        return type(batch)({
            key: F.pad(value, (0, missing), value=IGNORED_LABEL if key == "labels" else 0)
            if value.shape == tokens.shape else value
            for key, value in {**mask, **batch}.items()
        })  # fmt: skip

    def chances(
        self, states: Float[Tensor, "position width"]
    ) -> tuple[Float[Tensor, "position word"], Float[Tensor, "position word"] | None]:
        """Return the probability of every word, and dlogits/d(Wh + b) where that is not 1."""
        logits, slopes = self.scale * at_least_float32(self.linear(states)), None
        if self.cap is not None:
            bounded = torch.tanh(logits / self.cap)
            logits, slopes = self.cap * bounded, (self.scale * (1 - bounded.square())).to(states.dtype)
        elif self.scale != 1:
            slopes = states.new_full((1, 1), self.scale)
        return logits.softmax(1).to(states.dtype), slopes

    def beside(
        self, moved: Float[Tensor, "vector word width"] | None
    ) -> Float[Tensor, "vector word twice_width"] | None:
        """Return W beside its change Ẇ, which `change` multiplies with both at once; None where W does not move."""
        return None if moved is None else torch.cat([self.linear.weight.expand_as(moved), moved], dim=2)

    def change(
        self,
        states: Float[Tensor, "position width"],
        moved: Float[Tensor, "vector position width"],
        beside: Float[Tensor, "vector word twice_width"] | None,
        bias: Float[Tensor, "vector word"] | None,
        slopes: Float[Tensor, "position word"] | None,
    ) -> Float[Tensor, "vector position word"]:
        """Return how logits change where the states, and the head itself, change by so much."""
        if beside is None:
            change = moved @ self.linear.weight.T
        else:  # W·ḣ + Ẇ·h as one product: what it gives is by far the largest tensor here
            change = torch.cat([moved, states.expand(len(moved), -1, -1)], dim=2) @ beside.transpose(1, 2)
        if bias is not None:
            change = change + bias[:, None]
        return change if slopes is None else change * slopes


OURS = (_Classification, _Regression, _NextToken)
"""The losses of which it is known what a model's outputs mean, so that labels can be drawn from them."""


def described(loss: Loss) -> str:
    """A loss in words, of which there are none for functions that are not ours."""
    return repr(loss).removeprefix("_") if type(loss) in OURS else "a function of your own"


TF32_EPS = 2.0**-10
"""Of products that a GPU takes in TF32, where it is told that it may."""


def _agree(network: nn.Module, found: Tensor, expected: Tensor) -> bool:
    """Whether two ways of computing the same differ by no more than rounding, in the precision of the computation."""
    parameter = next(network.parameters())
    eps = torch.finfo(parameter.dtype).eps
    if torch.is_autocast_enabled(parameter.device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(parameter.device.type)).eps)
    if parameter.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32":
        eps = max(eps, TF32_EPS)
    return bool((found - expected).norm() <= min(0.05, 1000 * eps) * expected.norm())


_KNOWN_HEADS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Of each model, whether its logits were found to be `_logits` of its last hidden states."""


def _has_known_head(network: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the unembedding can be computed apart from the body; tried once for each model, and said if not."""
    if not (hasattr(network, "get_output_embeddings") and hasattr(network, "base_model")):
        return False
    if hasattr(network, "stands_for"):  # calls are recorded, or answered: there is no body apart
        return False
    if network not in _KNOWN_HEADS:
        small = {key: value[:1] if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with torch.no_grad():
            expected = at_least_float32(network(**small).logits)
            try:
                found = _logits(network, network.base_model(**small)[0])
                known = found.shape == expected.shape and _agree(network, found, expected)
            except Exception:  # a head that is none of ours may fail in any way
                known = False
        if not known:
            log.warning(
                "%s does something of its own to its logits: the loss keeps them whole, in float32",
                type(network).__name__,
            )
        _KNOWN_HEADS[network] = known
    return _KNOWN_HEADS[network]


def keep_logits_whole(model: nn.Module) -> None:
    """Have the loss call this model's head as the model does itself, a batch at a time: for whoever observes layers."""
    base: Any = model
    _KNOWN_HEADS[base.get_base_model() if hasattr(base, "get_base_model") else base] = False


_LOOKS_ONLY_BACK: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Of each model, whether what follows a token was found to change nothing for it."""


def _looks_only_back(network: Any, tokens: Int[Tensor, "batch token"], accepted: Mapping[str, Any]) -> bool:
    """Whether padding on the right needs no mask; tried once for each model, with and without something following."""
    network = getattr(network, "stands_for", network)
    if network not in _LOOKS_ONLY_BACK:
        more = {"use_cache": False} if "use_cache" in accepted else {}
        alone = tokens[:1, : max(1, tokens.shape[1] // 2)]
        try:
            with torch.no_grad():
                expected, found = (
                    at_least_float32(output if isinstance(output, Tensor) else output.logits)
                    for output in (network(input_ids=alone, **more), network(input_ids=tokens[:1], **more))
                )
            _LOOKS_ONLY_BACK[network] = _agree(network, found[:, : alone.shape[1]], expected)
        except (TypeError, ValueError):  # a model that insists on its mask
            _LOOKS_ONLY_BACK[network] = False
    return _LOOKS_ONLY_BACK[network]


_CAUSAL_ATTENTION = "jostle_causal"
_NEEDS_NO_MASK: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Of each model, whether causal attention without a mask was found to give the same."""


def _without_masks(network: Any, tokens: Int[Tensor, "batch token"]) -> contextlib.AbstractContextManager[None]:
    """Have a Hugging Face model attend causally without making masks, where that is the same; tried once a model.

    Making a mask asks the GPU what the positions are, which neither a queue of work nor a CUDA graph can wait for; and
    attention with a mask has no fast kernel.
    """
    config = network.config
    window = getattr(config, "sliding_window", None)
    if getattr(config, "_attn_implementation", None) != "sdpa" or (window and window < tokens.shape[1]):
        return _with_masks(config)
    if network not in _NEEDS_NO_MASK:
        from transformers import AttentionInterface

        AttentionInterface.register(_CAUSAL_ATTENTION, _causal_attention())
        with torch.no_grad():
            expected = network.base_model(input_ids=tokens[:1])[0]
            with _attention(config, _CAUSAL_ATTENTION):
                found = network.base_model(input_ids=tokens[:1])[0]
        _NEEDS_NO_MASK[network] = _agree(network, found, expected)
    return _attention(config, _CAUSAL_ATTENTION) if _NEEDS_NO_MASK[network] else _with_masks(config)


def _with_masks(config: Any) -> contextlib.AbstractContextManager[None]:
    """Attention as the model has it; where plain operations are wanted, the model's own in plain operations."""
    known = hasattr(config, "_attn_implementation")
    return _attention(config, "eager") if known and _PLAIN_OPERATIONS.get() else contextlib.nullcontext()


_PLAIN_OPERATIONS: contextvars.ContextVar[bool] = contextvars.ContextVar("plain_operations", default=False)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Have models attend and score by operations that have a forward mode and second derivatives.

    Fused attention has neither in PyTorch, and kernels of ours have a backward pass without a graph.
    """
    token = _PLAIN_OPERATIONS.set(True)
    fast_encoder = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_encoder)
        _PLAIN_OPERATIONS.reset(token)


_UNDERSTOOD = {"scaling", "is_causal", "position_ids", "cache_position", "sliding_window", "use_cache"}
"""What our attention may be told: all but the first two changes nothing where a sequence is whole, and no longer than
a window."""


def _causal_attention() -> Callable[..., tuple[Tensor, None]]:
    """Attention as Hugging Face models call it: PyTorch's, and of short sequences on a GPU our own."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from jostle.kernels import can_attend, causal_attention

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if _PLAIN_OPERATIONS.get() and causal and attention_mask is None:
            return _plain_attention(query, key, value, options.get("scaling")), None
        heads = query, key, value
        if torch.is_autocast_enabled("cuda"):  # as for PyTorch's, of whose operations this is none
            heads = tuple(one.to(torch.get_autocast_dtype("cuda")) for one in heads)
        asked = {name for name, value in options.items() if isinstance(value, Tensor) or value} - _UNDERSTOOD
        if causal and attention_mask is None and not asked and can_attend(*heads):
            scale = options.get("scaling")
            return causal_attention(*heads, query.shape[-1] ** -0.5 if scale is None else scale), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    return attend


def _plain_attention(
    query: Float[Tensor, "batch head token width"],
    key: Float[Tensor, "batch key_head token width"],
    value: Float[Tensor, "batch key_head token width"],
    scale: float | None,
) -> Float[Tensor, "batch token head width"]:
    """softmax(scale·QKᵀ)V of every head, where no token looks at later ones; the softmax in float32."""
    heads, length = query.shape[1] // key.shape[1], query.shape[2]
    # Key heads that several query heads share are not copied: the query heads of each become a dimension of their own.
    grouped = query.unflatten(1, (-1, heads))
    products = grouped @ key[:, :, None].transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    products = products.to(torch.promote_types(query.dtype, torch.float32))
    products = products.masked_fill(later, torch.finfo(products.dtype).min)
    # Not `softmax`: compiled for a GPU, its derivative in forward mode was wrong (torch 2.11), by a third. It was not
    # tried again since the compiler pads no rows.
    weights = (products - products.amax(-1, keepdim=True).detach()).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights.to(query.dtype) @ value[:, :, None]).flatten(1, 2).transpose(1, 2)


@contextlib.contextmanager
def _attention(config: Any, implementation: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _logits(
    network: Any, hidden: Tensor, unembed: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, "... vocabulary"]:
    """Unembed hidden states as Hugging Face models do."""
    scale, cap = _scale_and_cap(network.config)
    logits = scale * at_least_float32((unembed or network.get_output_embeddings())(hidden))
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What becomes of a Hugging Face model's logits: scaled (Cohere, Granite), and soft-capped (Gemma)."""
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return scale, getattr(config, "final_logit_softcapping", None) or None


def _draw(
    logits: Float[Tensor, "position label"], uniform: Float[Tensor, "position count"]
) -> Int[Tensor, "position count"]:
    """Labels with the probabilities of a model, for numbers that are uniform in [0, 1)."""
    reached = at_least_float32(logits).softmax(1).cumsum(1)
    return torch.searchsorted(reached, uniform.to(reached) * reached[:, -1:], right=True).clamp(max=logits.shape[1] - 1)


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision values as float32; wider ones as they are. Losses are never formed in half precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
