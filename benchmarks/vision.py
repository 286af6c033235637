"""The paper's CIFAR-10 workloads.

``resnet9``: 4 chains × 100 draws, 10 steps of batch 1,024 apart, 6,750 images observed. ``cifar10``: its full setting,
all scores of 47,500 training images on 10,000 queries, from 400 consecutive draws, beside EK-FAC's. Weights and images
are random: cost does not depend on the values.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jostle
from jostle.attributors import ekfac

TRAIN, QUERY, SAMPLED, BATCH = 4_750, 2_000, 47_500, 1_024
CHAINS, DRAWS, THIN = 4, 100, 10
STEP_SIZE, N_BETA, LOCALIZATION = 1e-5, 200.0, 1e4
CONVOLUTIONS = "its convolutions alone"
WAYS = ["jostle bfloat16 compiled", "jostle bfloat16", CONVOLUTIONS, "algorithm 1, eager"]
ALL_QUERIES, SCORING_BATCH = 10_000, 1_000
FULL_WAYS = ["jostle, without a gradient", "jostle, as in the paper", "EK-FAC"]


class ResNet9(nn.Module):
    """The paper's network of 1,972,792 weights, after Keller Jordan's fast CIFAR-10 training; random weights here."""

    def __init__(self) -> None:
        super().__init__()

        def group(inputs: int, outputs: int) -> list[nn.Module]:
            return [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(outputs),
                nn.GELU(), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU(),
            ]  # fmt: skip

        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 2), nn.GELU(), *group(24, 64), *group(64, 256), *group(256, 256), nn.MaxPool2d(3),
            nn.Flatten(), nn.Linear(256, 10, bias=False),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images) / 9


def images(count: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 3, 32, 32, generator=generator).to(device),
        torch.randint(10, (count,), generator=generator).to(device),
    )


def flops() -> float:
    """Floating-point operations of the whole run: 236 million a forward pass of one image, and twice that back."""
    macs = 961 * 24 * 64 * 9 + 225 * (64 * 64 + 64 * 256) * 9 + 49 * 2 * 256 * 256 * 9 + 9 * 256 * 256 * 9
    return 2 * macs * CHAINS * DRAWS * (3 * THIN * BATCH + TRAIN + QUERY)


def convolutions_alone(model: nn.Module) -> float:
    """Seconds that the convolutions of the run take by themselves, as the library makes them in bfloat16."""
    seen: list[tuple[nn.Conv2d, tuple[int, ...]]] = []

    def look(module: nn.Module, inputs: Any) -> None:
        assert isinstance(module, nn.Conv2d)
        seen.append((module, tuple(inputs[0].shape[1:])))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model(images(1, 0, "cuda")[0])
    for hook in hooks:
        hook.remove()

    def seconds(work: Callable[[], Any], repeated: int = 20) -> float:
        for _ in range(3):
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeated):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeated

    forward = backward = 0.0
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
        for number, (module, shape) in enumerate(seen):
            x, w = (
                torch.randn(*size, **kind).contiguous(memory_format=torch.channels_last)
                for size in ((BATCH, *shape), module.weight.shape)
            )
            padding: Any = module.padding
            out = torch.randn_like(F.conv2d(x, w, padding=padding))
            forward += seconds(lambda x=x, w=w, padding=padding: F.conv2d(x, w, padding=padding))
            for wanted in ([True, False, False], [False, True, False]):
                if number or wanted[1]:  # nothing asks for the gradient of an image
                    backward += seconds(
                        lambda out=out, x=x, w=w, padding=padding, wanted=wanted: torch.ops.aten.convolution_backward(
                            out, x, w, None, [1, 1], padding, [1, 1], False, [0, 0], 1, wanted
                        )
                    )
    return CHAINS * DRAWS * (THIN * (forward + backward) + forward * (TRAIN + QUERY) / BATCH)


def with_jostle(model: nn.Module, draws: int, precision: Any, compile: bool | None) -> float:
    train, query, sampled = (images(count, seed, "cuda") for seed, count in enumerate((TRAIN, QUERY, SAMPLED)))
    with tempfile.TemporaryDirectory() as directory:
        run = jostle.attribute(
            model, train, query, sampling_data=sampled,
            posterior=jostle.Posterior(n_beta=N_BETA, localization=LOCALIZATION),
            sampler=jostle.SGLD(step_size=STEP_SIZE), chains=CHAINS, draws=draws, thin=THIN, batch_size=BATCH,
            precision=precision, compile=compile, checkpoint_seconds=1e9, progress=False, out=f"{directory}/run",
        )  # fmt: skip
        print(f"    {draws} draws: {run.manifest['seconds']}", flush=True)
        return run.manifest["seconds"]["sampling"]


def by_the_book(model: nn.Module, draws: int) -> float:
    """Algorithm 1 as one would write it down."""
    (train, _), (query, _), (sampled, labels) = (
        images(count, seed, "cuda") for seed, count in enumerate((TRAIN, QUERY, SAMPLED))
    )
    (_, train_labels), (_, query_labels) = (images(count, seed, "cuda") for seed, count in enumerate((TRAIN, QUERY)))
    parameters = list(model.parameters())
    center = [parameter.detach().clone() for parameter in parameters]
    generator = np.random.default_rng(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CHAINS):
        trace = []
        for _ in range(draws):
            for _ in range(THIN):
                chosen = torch.from_numpy(generator.choice(SAMPLED, BATCH, replace=False)).cuda()
                loss = F.cross_entropy(model(sampled[chosen]), labels[chosen])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for parameter, origin, gradient in zip(parameters, center, gradients, strict=True):
                        parameter -= STEP_SIZE / 2 * (N_BETA * gradient + LOCALIZATION * (parameter - origin))
                        parameter += math.sqrt(STEP_SIZE) * torch.randn_like(parameter)
            with torch.no_grad():
                parts = [
                    F.cross_entropy(model(x), y, reduction="none")
                    for pixels, labelled in ((train, train_labels), (query, query_labels))
                    for x, y in zip(pixels.split(256), labelled.split(256), strict=True)
                ]
            trace.append(torch.cat(parts).cpu())
        with torch.no_grad():
            for parameter, origin in zip(parameters, center, strict=True):
                parameter.copy_(origin)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def bench(peak: float, variants: list[str], table: dict[str, Any], save: Callable[[], None]) -> None:
    """Time the whole run in each way; each is put into ``table`` and saved as soon as it is there."""
    torch.manual_seed(0)
    model = ResNet9().cuda().eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    ways: dict[str, Callable[[int], float]] = {
        "jostle bfloat16": lambda draws: with_jostle(model, draws, "bfloat16", None),
        "jostle bfloat16 compiled": lambda draws: with_jostle(model, draws, "bfloat16", True),
        "jostle": lambda draws: with_jostle(model, draws, "model", None),
        "jostle compiled": lambda draws: with_jostle(model, draws, "model", True),
        "algorithm 1, eager": lambda draws: by_the_book(model, draws),
        CONVOLUTIONS: lambda _: convolutions_alone(model),
    }
    floor = flops() / peak
    table |= {"weights": count, "floor": {"seconds": floor}}
    print(f"  resnet9 {count:,} weights, floor {floor:.2f} s", flush=True)
    for variant in variants:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            seconds = ways[variant](DRAWS)
        except Exception as error:  # what cannot run is a result
            table[variant] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"  resnet9 {variant:25} {table[variant]['failed']}", flush=True)
            continue
        memory = torch.cuda.max_memory_allocated() / 1e9
        table[variant] = {"seconds": seconds, "share_of_peak": floor / seconds, "peak_memory_gb": memory}
        save()
        print(f"  resnet9 {variant:25} {seconds:8.2f} s  {floor / seconds:6.1%}  {memory:6.1f} GB", flush=True)


def scores_by_jostle(
    model: nn.Module, train: Any, query: Any, draws: int, sampler: Any, n_beta: float
) -> dict[str, float]:
    """Seconds from the model to all scores in memory: losses at w*, draws, and reading."""
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        run = jostle.attribute(
            model, train, query, posterior=jostle.Posterior(n_beta=n_beta, localization=LOCALIZATION), sampler=sampler,
            chains=CHAINS, draws=draws, thin=1, batch_size=BATCH, precision="bfloat16" if train[0].is_cuda else "model",
            progress=False, out=f"{directory}/run",
        )  # fmt: skip
        sampled = time.perf_counter()
        assert run.influence().values.shape == (len(train[1]), len(query[1]))
        ended = time.perf_counter()
    return {"seconds": ended - started, "sampling": sampled - started, "scoring": ended - sampled}


def scores_by_ekfac(model: nn.Module, train: Any, query: Any) -> dict[str, float]:
    """The same, of kronfluence: the factors' fit on all training images, and then the scores."""
    with tempfile.TemporaryDirectory() as directory:
        few = slice(0, 2)
        options = {"fit_data": train, "batch_size": SCORING_BATCH, "directory": directory}
        started = time.perf_counter()
        ekfac(model, (train[0][few], train[1][few]), (query[0][few], query[1][few]), **options)
        fitted = time.perf_counter()
        assert ekfac(model, train, query, **options).values.shape == (len(train[1]), len(query[1]))
        ended = time.perf_counter()
    return {"seconds": ended - started, "fitting": fitted - started, "scoring": ended - fitted}


def bench_all_scores(
    variants: list[str], table: dict[str, Any], save: Callable[[], None], *,
    train: int = SAMPLED, query: int = ALL_QUERIES, draws: int = DRAWS, device: str = "cuda",
) -> None:  # fmt: skip
    """Time all scores of the paper's full setting in each way, EK-FAC's included."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # in EK-FAC's favour
    model = ResNet9().to(device).eval()
    data = images(train, 0, device), images(query, 1, device)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        FULL_WAYS[0]: lambda: scores_by_jostle(model, *data, draws, jostle.Gaussian(), 0.0),
        FULL_WAYS[1]: lambda: scores_by_jostle(model, *data, draws, jostle.SGLD(step_size=STEP_SIZE), N_BETA),
        FULL_WAYS[2]: lambda: scores_by_ekfac(model, *data),
    }
    table |= {"train": train, "queries": query, "draws": CHAINS * draws}
    for variant in variants:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        table[variant] = ways[variant]()
        if device == "cuda":
            table[variant]["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        save()
        parts = ", ".join(f"{name} {value:.2f}" for name, value in table[variant].items())
        print(f"  all scores, {variant:30} {parts}", flush=True)
