"""EK-FAC influence, through kronfluence: the strongest classical rival, on the same model, data and weights.

    values[i, j] = −∇ℓᵢᵀ(H + λI)⁻¹∇ℓⱼ,   H ≈ the Fisher information in its Kronecker-factored eigenbasis.

Reference: Grosse et al., *Studying Large Language Model Generalization with Influence Functions*, 2023.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from jostle.data.datasets import Collate, Data, collate_samples, fingerprint_tensors
from jostle.errors import InputError
from jostle.files import replace_file
from jostle.losses import OURS, Batch, Loss, at_least_float32, keep_logits_whole
from jostle.losses import classification as classification_loss
from jostle.models.functional import eval_mode, sample_means, token_mask
from jostle.models.weights import MovingWeights, WeightSelection, owners
from jostle.scores import Scores, timed

log = logging.getLogger("jostle")

WORTH_SAYING = 0.01
"""It is said where more than this share of the weights cannot be factored: norms are less, embeddings are not."""

PROBED = 2
"""Examples of the batch by which layers are looked at: by one, whatever is flattened would look as it should."""


@timed
def ekfac(
    model: nn.Module,
    train: Any,
    query: Any,
    *,
    fit_data: Any = None,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    damping: float | None = None,
    batch_size: int = 32,
    collate: Collate | None = None,
    factor_arguments: Mapping[str, Any] | None = None,
    score_arguments: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Scores:
    """Score every training example on every query by EK-FAC influence; negative helps.

    Only linear and convolutional layers can be factored: a layer takes part when all it has is among ``weights``, is no
    other layer's too, and the model calls it for whole batches. What moves and does not take part is named in
    ``provenance["left_out"]``, and in the log where it is more than a hundredth of the weights.

    Args:
        model: the trained model, at w*. It is left as it was; a copy is analysed.
        train: the training examples.
        query: the query examples.
        fit_data: what the factors are fitted on; default ``train``.
        loss: of those of `jostle.losses` labels are sampled from the model, as the Fisher information wants; with any
            other loss the labels of the data are used (the empirical Fisher).
        weights: which weights move, as for `jostle.Posterior`.
        damping: λ; None for kronfluence's own choice, a tenth of the mean eigenvalue of each layer. The paper has 1e-8.
        batch_size: examples in one pass.
        collate: makes a batch of a list of samples.
        factor_arguments: further arguments of kronfluence's ``FactorArguments`` (types, partitions, offloading).
        score_arguments: the same of its ``ScoreArguments``.
        directory: where factors go; default: a temporary one. Factors that are there already are used again.
        seed: of the sampled labels; factors that are there already keep theirs, which ``provenance`` says.

    Raises:
        InputError: kronfluence is missing, no layer that it can factor moves, or the directory has factors of something
            else.
    """
    sources = {"train": train, "query": query}
    fitting = _fitted(
        model, sources, fit_data=fit_data, loss=loss, weights=weights, batch_size=batch_size, collate=collate,
        factor_arguments=factor_arguments, directory=directory, seed=seed,
    )  # fmt: skip
    with fitting as fitted:
        fitted.analyzer.compute_pairwise_scores(
            "scores", "factors", query_dataset=fitted.samples["query"], train_dataset=fitted.samples["train"],
            per_device_query_batch_size=batch_size, per_device_train_batch_size=batch_size, overwrite_output_dir=True,
            score_args=_kronfluence("arguments").ScoreArguments(damping_factor=damping, **(score_arguments or {})),
        )  # fmt: skip
        scores = fitted.analyzer.load_pairwise_scores("scores")["all_modules"]
    return Scores(
        # kronfluence's rows are queries, and what helps is positive there.
        values=-scores.T.float().cpu().numpy(),
        method="EK-FAC",
        provenance={"damping": damping, **fitted.about},
    )


def ekfac_self_influence(
    model: nn.Module,
    train: Any,
    *,
    fit_data: Any = None,
    loss: Loss | None = None,
    weights: WeightSelection = "all",
    damping: float | None = None,
    batch_size: int = 32,
    collate: Collate | None = None,
    factor_arguments: Mapping[str, Any] | None = None,
    score_arguments: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Float[np.ndarray, " train"]:
    """−∇ℓᵢᵀ(H + λI)⁻¹∇ℓᵢ of every training example: the diagonal of `ekfac` of the training set on itself.

    Arguments are those of `ekfac`, and its factors can be used again.
    """
    fitting = _fitted(
        model, {"train": train}, fit_data=fit_data, loss=loss, weights=weights, batch_size=batch_size,
        collate=collate, factor_arguments=factor_arguments, directory=directory, seed=seed,
    )  # fmt: skip
    with fitting as fitted:
        fitted.analyzer.compute_self_scores(
            "self", "factors", train_dataset=fitted.samples["train"], per_device_train_batch_size=batch_size,
            score_args=_kronfluence("arguments").ScoreArguments(damping_factor=damping, **(score_arguments or {})),
            overwrite_output_dir=True,
        )  # fmt: skip
        scores = fitted.analyzer.load_self_scores("self")["all_modules"]
    return -scores.float().cpu().numpy()


def _kronfluence(name: str) -> Any:
    try:
        return importlib.import_module(f"kronfluence.{name}")
    except ImportError as error:
        raise InputError(
            "ekfac",
            got=f"no package {error.name!r}",
            expected="kronfluence and what it imports",
            fix="pip install 'jostle[ekfac]'; where its torchvision is unwanted: pip install --no-deps kronfluence "
            "einconv opt_einsum einops accelerate",
        ) from error


@dataclass(frozen=True)
class _Fitted:
    """kronfluence's analyzer with its factors, the data sets as it reads them, and what a result should say."""

    analyzer: Any
    samples: Mapping[str, _Samples]
    about: Mapping[str, Any]


@contextlib.contextmanager
def _fitted(
    model: nn.Module,
    sources: Mapping[str, Any],
    *,
    fit_data: Any,
    loss: Loss | None,
    weights: WeightSelection,
    batch_size: int,
    collate: Collate | None,
    factor_arguments: Mapping[str, Any] | None,
    directory: str | Path | None,
    seed: int,
) -> Iterator[_Fitted]:
    """Fit the factors to a copy of the model, or find those that were fitted before."""
    analyzing, arguments, tasks, datasets = map(_kronfluence, ("analyzer", "arguments", "task", "utils.dataset"))
    loss = loss or classification_loss()
    device = next(model.parameters()).device
    everything = {**sources, "fit_data": sources["train"] if fit_data is None else fit_data}
    data = {
        name: Data(source, name, collate=collate, device=torch.device("cpu")) for name, source in everything.items()
    }
    samples = {name: _Samples(one) for name, one in data.items()}
    copied = copy.deepcopy(model)
    with contextlib.ExitStack() as stack:
        # Where labels are sampled; the caller's random numbers go on as if nothing had happened.
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(eval_mode(copied))
        if not gc.get_freeze_count():
            # It asks for garbage at every batch, and would look through all modules that were ever imported.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
        # With its own level it sets that of everything that is logged in the program.
        stack.callback(logging.root.setLevel, logging.root.level)
        # It warns at every call that it uses a deprecated name of PyTorch's, which its users cannot change.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=FutureWarning, module="kronfluence")
        if _head_moves(copied, weights):
            keep_logits_whole(copied)
        few = [data["train"].sample(index % len(data["train"])) for index in range(PROBED)]
        calls = _calls(copied, loss, Data(few, "train", collate=collate, device=device).batch(range(PROBED)))
        layers = _layers(copied, weights, calls)
        about = {
            "layers": len(layers),
            "left_out": _left_out(model, weights, layers),
            "fitted_on": len(data["fit_data"]),
            "fingerprints": {name: data[name].fingerprint() for name in sources},
        }
        # Of our own losses, labels can be drawn from what the model predicts.
        sampled = type(loss) in OURS
        factors = arguments.FactorArguments(**{
            "strategy": "ekfac", "use_empirical_fisher": not sampled,
            "has_shared_parameters": any(calls[layer] > 1 for layer in layers), **(factor_arguments or {}),
        })  # fmt: skip
        if directory is None:  # where nothing can be found that was fitted before, nothing has to be recognised
            directory, about["seed"] = stack.enter_context(tempfile.TemporaryDirectory()), seed
        else:
            about["seed"] = _require_same(Path(directory), seed, {
                "weights": fingerprint_tensors(model.state_dict()), "fit_data": data["fit_data"].fingerprint(),
                "layers": layers, "factors": factors.to_str_dict(),
                "loss": repr(loss) if sampled else type(loss).__name__,
            })  # fmt: skip
        if layers == [""]:  # a model that is itself a layer: kronfluence replaces layers in what holds them
            copied, layers = nn.Sequential(copied), ["0"]
        empirical = factors.use_empirical_fisher
        task = _task(tasks.Task, loss, layers, shared=factors.has_shared_parameters, empirical=empirical)
        torch.manual_seed(seed)
        analyzer = analyzing.Analyzer(
            "ekfac", analyzing.prepare_model(copied, task), task, cpu=device.type == "cpu", disable_tqdm=True,
            log_level=40, output_dir=str(directory),
        )  # fmt: skip
        analyzer.set_dataloader_kwargs(datasets.DataLoaderKwargs(collate_fn=collate or collate_samples))
        analyzer.fit_all_factors("factors", samples["fit_data"], per_device_batch_size=batch_size, factor_args=factors)
        yield _Fitted(analyzer, samples, about)


def _require_same(directory: Path, seed: int, about: dict[str, Any]) -> int:
    """Refuse a directory with factors of another model, of other data, layers or settings; return their seed."""
    path = directory / "jostle.json"
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**about, "seed": seed}))
        return seed
    there = json.loads(path.read_text())
    for key, value in about.items():
        if there.get(key) != value:
            raise InputError(
                "directory",
                got=f"{directory}, with EK-FAC factors whose {key} is {there.get(key)}",
                expected=f"{value}, as passed now",
                fix="choose another directory, or delete this one",
            )
    return there.get("seed", seed)


def _head_moves(model: nn.Module, weights: WeightSelection) -> bool:
    """Whether a language model's head is among the weights: only then is it worth the memory of all logits."""
    find = getattr(model, "get_output_embeddings", lambda: None)
    head = set(head.parameters()) if (head := find()) is not None else set()
    parameters = dict(model.named_parameters())
    return any(parameters.get(name) in head for name in MovingWeights(model, weights).names)


@torch.no_grad()
def _calls(model: nn.Module, loss: Loss, batch: Batch) -> Counter[str]:
    """How often each layer is called for one loss: one whose weight is used in another way cannot be observed.

    Nor can one that is called for anything but the examples of the batch, one by one in its first dimension.
    """
    loss(model, batch)  # a loss may look at a model before it first uses it, which hooks would not stand
    calls: Counter[str] = Counter()
    otherwise: set[str] = set()

    def heard(name: str, output: Any) -> None:
        calls[name] += 1
        if isinstance(output, Tensor) and (not output.ndim or len(output) != PROBED):
            otherwise.add(name)

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: heard(name, output))
        for name, module in model.named_modules()
    ]
    try:
        loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return Counter({name: count for name, count in calls.items() if name not in otherwise})


def _layers(model: nn.Module, weights: WeightSelection, calls: Counter[str]) -> list[str]:
    """The layers that move as a whole, are called, and that kronfluence can factor.

    It takes a layer's bias along with its weight, and gives a weight that two layers share to one of them.
    """
    moving, modules = set(MovingWeights(model, weights).names), owners(model)
    layers = [
        name
        for name, module in model.named_modules()
        if _factorable(module)
        and calls[name]
        and all(
            _parameter(name, own) in moving and modules[parameter] == 1
            for own, parameter in module.named_parameters(recurse=False)
        )
    ]
    if not layers:
        raise InputError(
            "weights",
            got=f"{weights!r}, without a linear or convolutional layer that the model calls for each example",
            expected="one that EK-FAC can factor, with its bias",
        )
    return layers


def _factorable(module: nn.Module) -> bool:
    """Say whether kronfluence has this layer right.

    A subclass may do anything with its weight. Of convolutions, kronfluence takes every padding for zeros, refuses one
    that is uneven, and averages over groups.
    """
    if type(module) is nn.Conv2d:
        even = module.padding != "same" or all(
            dilation * (size - 1) % 2 == 0 for size, dilation in zip(module.kernel_size, module.dilation, strict=True)
        )
        return even and module.padding_mode == "zeros" and module.groups == 1
    return type(module) is nn.Linear


def _parameter(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _left_out(model: nn.Module, weights: WeightSelection, layers: list[str]) -> list[str]:
    """The weights that move and are in no layer that can be factored: EK-FAC takes them for fixed."""
    factored = {_parameter(layer, name) for layer in layers for name in ("weight", "bias")}
    moving = MovingWeights(model, weights)
    sizes = {name: size for name, size in zip(moving.names, moving.sizes, strict=True) if name not in factored}
    share = sum(sizes.values()) / moving.total
    if share > WORTH_SAYING:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        more = f" and {len(sizes) - len(largest)} more" if len(sizes) > len(largest) else ""
        fixed = f"EK-FAC takes {100 * share:.0f} % of the weights that move for fixed"
        log.warning("%s, since it cannot factor their layers: %s%s", fixed, ", ".join(largest), more)
    return list(sizes)


class _Samples(torch.utils.data.Dataset):
    """A data set as kronfluence reads it: one sample at a time."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data.sample(index)


def _task(base: type, loss: Loss, layers: list[str], *, shared: bool, empirical: bool) -> Any:
    """What kronfluence asks of a task, answered by one of our losses."""

    class Task(base):
        # Without it, the last call of a layer that is called several times would be the only one that is scored.
        enable_post_process_per_sample_gradient = shared

        def post_process_per_sample_gradient(self, module_name: str, gradient: Tensor) -> Tensor:
            return gradient

        def compute_train_loss(self, batch: Batch, model: nn.Module, sample: bool = False) -> Tensor:
            if sample:
                return _sampled_loss(model, batch, loss)
            if empirical and isinstance(batch, dict):
                # Not as one that is known to be padded on the right: of such, a loss may leave out a token, and factors
                # that are fitted to it would no longer know which activations are padding.
                batch = dict(batch)
            return self.compute_measurement(batch, model)

        def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
            return sample_means(loss(model, batch), loss, batch).sum()

        def get_influence_tracked_modules(self) -> list[str]:
            return layers

        def get_attention_mask(self, batch: Batch) -> Tensor | None:
            return batch.get("attention_mask") if isinstance(batch, dict) else None

    return Task()


def _sampled_loss(model: nn.Module, batch: Batch, loss: Any) -> Tensor:
    """The loss of labels drawn from the model itself: the covariance of its gradients is the Fisher information."""
    if isinstance(batch, dict):
        mask = token_mask(loss, batch)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        output = model(**inputs)
        logits = at_least_float32(output if isinstance(output, Tensor) else output.logits)[:, :-1]
        with torch.no_grad():
            labels = torch.distributions.Categorical(logits=logits).sample()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        real = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask[:, 1:]
        # Independent tokens of a sum over √length have the Hessian of the sequence's mean loss as their covariance.
        return (torch.where(real, losses, 0).sum(1) / real.sum(1).sqrt()).sum()
    output = at_least_float32(model(batch[0]))
    if hasattr(loss, "noise_variance"):
        noise = loss.noise_variance**0.5 * torch.randn_like(output)
        return (output - (output.detach() + noise)).square().sum() / (2 * loss.noise_variance)
    with torch.no_grad():
        labels = torch.distributions.Categorical(logits=output).sample()
    return F.cross_entropy(output, labels, reduction="sum")
