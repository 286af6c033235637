"""One draw of the paper's scaling analysis: 448 sequences of 150 tokens observed, and one step of batch 32."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor

import jostle
from benchmarks.clock import Clock, EnoughDrawsError

TRAIN, QUERY, TOKENS, BATCH = 400, 48, 150, 32
STEP_SIZE, N_BETA, LOCALIZATION = 5e-6, 30.0, 300.0
WEIGHTS = "attention+mlp"
DRAWS = [60, 30, 10]
"""Of small, middling and large models: so many are timed, in one run."""
PROFILED = 3
"""Draws whose kernels are counted, after those that are timed."""
FLOAT8, DEVINTERP = "jostle compiled, float8", "devinterp 2.0.1"
WAYS = ["jostle compiled", "jostle", "algorithm 1, eager", DEVINTERP, FLOAT8]
"""Float8 is last: should it take the GPU down with it, the rest is recorded."""


class Shape(NamedTuple):
    """A Pythia model's size. Its weights cannot be had here, and cost does not depend on them: they are random."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50304

    @property
    def token_flops(self) -> float:
        """Floating-point operations of a forward pass, for each token of a sequence."""
        block = 12 * self.width**2 + self.width * TOKENS  # the second: scores and values, half of them masked
        return 2 * (self.layers * block + self.vocabulary * self.width)

    @property
    def flops(self) -> float:
        """Floating-point operations of a draw: a forward pass of every sequence, forward and backward of a batch."""
        return self.token_flops * TOKENS * (TRAIN + QUERY + 3 * BATCH)


SHAPES = {
    "14m": Shape(6, 128, 4),
    "70m": Shape(6, 512, 8),
    "160m": Shape(12, 768, 12),
    "410m": Shape(24, 1024, 16),
    "1b": Shape(16, 2048, 8),
    "1.4b": Shape(24, 2048, 16),
    "2.8b": Shape(32, 2560, 32),
    "6.9b": Shape(32, 4096, 32, 50432),
    "12b": Shape(36, 5120, 40, 50688),
}


def pythia(shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A GPT-NeoX model of this shape with random weights."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    options: dict[str, Any] = {"rotary_pct": 0.25}  # which newer versions of transformers keep under another name
    config = GPTNeoXConfig(
        hidden_size=shape.width, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width, vocab_size=shape.vocabulary, max_position_embeddings=2048,
        use_parallel_residual=True, tie_word_embeddings=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = GPTNeoXForCausalLM(config)
    return model.to(dtype).eval()


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(50_000, (count, TOKENS), generator=torch.Generator().manual_seed(seed))


At = Mapping[int, Callable[[], None]]
"""What to do at which mark of the clock."""


def with_jostle(
    model: Any, draws: int, compile: bool, precision: Any = "model", *, at: At, scores: dict[str, np.ndarray] | None
) -> float:
    """Seconds a draw, from one run; it is finished only where its scores are wanted, and left in ``scores``.

    A run that is finished writes where its chain ends: 10 GB of 2.8 billion weights.
    """
    train, query = ([{"input_ids": row} for row in tokens(count, seed)] for count, seed in ((TRAIN, 0), (QUERY, 1)))
    total = max([draws, *at])
    # The thread that writes traces may still be at it when a run ends in the middle.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        out = Path(directory) / "run"
        clock = Clock(out, end=total if scores is None else None, at=at)
        with contextlib.suppress(EnoughDrawsError):
            run = jostle.attribute(
                model, train, query, loss=jostle.losses.next_token(), observables={"clock": clock},
                posterior=jostle.Posterior(n_beta=N_BETA, localization=LOCALIZATION, weights=WEIGHTS),
                sampler=jostle.SGLD(step_size=STEP_SIZE), chains=1, draws=total, thin=1, batch_size=BATCH,
                compile=compile, precision=precision, checkpoint_seconds=1e9, progress=False, out=out,
            )  # fmt: skip
            if scores is not None:
                scores[precision] = np.asarray(run.influence(normalize=True).values)
        print(f"    {total} draws: {json.loads((out / 'manifest.json').read_text())['execution']}", flush=True)
    return clock.seconds_a_draw(draws)


def by_the_book(model: Any, draws: int, *, at: At) -> float:
    """Algorithm 1 as one would write it down: eager, every parameter in turn, logits in float32; seconds a draw."""
    from jostle.models.weights import MovingWeights

    device = next(model.parameters()).device
    train, query = tokens(TRAIN, 0).to(device), tokens(QUERY, 1).to(device)
    named = dict(model.named_parameters())
    moving = [named[name] for name in MovingWeights(model, WEIGHTS).names]
    center = [parameter.detach().clone() for parameter in moving]
    chain = [parameter.detach().float() for parameter in moving]

    def losses(batch: Tensor) -> Tensor:
        logits = model(batch, use_cache=False).logits.float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none")

    generator = np.random.default_rng(0)
    trace, clock = [], Clock(at=at)
    for _ in range(max([draws, *at])):
        batch = train[torch.from_numpy(generator.choice(TRAIN, BATCH, replace=False)).to(device)]
        gradients = torch.autograd.grad(losses(batch).mean(), moving)
        with torch.no_grad():
            for parameter, state, origin, gradient in zip(moving, chain, center, gradients, strict=True):
                state -= STEP_SIZE / 2 * (N_BETA * gradient.float() + LOCALIZATION * (state - origin.float()))
                state += math.sqrt(STEP_SIZE) * torch.randn_like(state)
                parameter.copy_(state)
            parts = [losses(part) for part in (*train.split(BATCH), *query.split(BATCH))]
        trace.append(torch.cat(parts).cpu())
        clock(model)
    with torch.no_grad():
        for parameter, origin in zip(moving, center, strict=True):
            parameter.copy_(origin)
    return clock.seconds_a_draw(draws)


def with_devinterp(model: Any, draws: int) -> float:
    """Seconds a draw. Nothing looks at its draws one by one: the difference of two runs, after a short one."""
    from jostle.models.weights import MovingWeights

    sample = importlib.import_module("devinterp.slt.sampling").sample

    rows = [{"input_ids": row} for row in (*tokens(TRAIN, 0), *tokens(QUERY, 1))]
    arguments: Any = {
        "model": model, "dataset": rows, "observables": {"all": (rows, (TRAIN + QUERY) // BATCH)},
        "param_masks": dict.fromkeys(MovingWeights(model, WEIGHTS).names), "lr": STEP_SIZE, "n_beta": N_BETA,
        "localization": LOCALIZATION, "num_chains": 1, "batch_size": BATCH, "device": "cuda",
        "num_init_loss_batches": 1,
    }  # fmt: skip
    fewer, taken = max(2, draws // 5), []
    for count in (2, fewer, draws):  # the first carries what is done once in a process
        torch.cuda.synchronize()
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            sample(**arguments, num_draws=count, output_path=f"{directory}/trace.zarr")
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return (taken[2] - taken[1]) / (draws - fewer)


def bench(
    name: str, peak: float, variants: list[str], draws: int, table: dict[str, Any], save: Callable[[], None],
    profile: bool = False,
) -> None:  # fmt: skip
    """Time a draw in each way, on one model; ``peak`` is the measured rate of a large matrix product.

    Every way is put into ``table`` and saved as soon as it is there.
    """
    shape = SHAPES[name]
    cuda = torch.cuda.is_available()
    model = pythia(shape) if cuda else pythia(shape, "cpu", torch.float32)
    compared = {"jostle compiled", FLOAT8} <= set(variants)
    scores: dict[str, np.ndarray] = {}
    kept = scores if compared else None
    ways: dict[str, Callable[[At], float]] = {
        "jostle compiled": lambda at: with_jostle(model, draws, True, "model", at=at, scores=kept),
        "jostle": lambda at: with_jostle(model, draws, False, at=at, scores=None),
        "algorithm 1, eager": lambda at: by_the_book(model, draws, at=at),
        DEVINTERP: lambda _: with_devinterp(model, draws),
        FLOAT8: lambda at: with_jostle(model, draws, True, "float8", at=at, scores=kept),
    }
    floor = shape.flops / peak
    table["floor"] = {"seconds": floor}
    for variant in variants:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        activity = torch.profiler.ProfilerActivity
        profiler = torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU])
        profiled = profile and variant != DEVINTERP
        try:
            seconds = ways[variant](profiling(profiler, draws) if profiled else {})
        except Exception as error:  # a rival that cannot run is a result
            table[variant] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            print(f"  {name:5} {variant:24} {table[variant]['failed']}", flush=True)
            save()
            continue
        memory = torch.cuda.max_memory_allocated() / 1e9
        table[variant] = {"seconds": seconds, "share_of_peak": floor / seconds, "peak_memory_gb": memory}
        beside = ""
        if variant == FLOAT8 and "model" in scores:
            # From one seed the chains are the same, so what differs is the rounding of what is observed.
            found: Any = spearmanr(scores["float8"].ravel(), scores["model"].ravel())
            agreement, of = float(found.statistic), draws + (PROFILED if profile else 0)
            table[variant] |= {"rank_correlation_with_bfloat16": agreement, "draws_of_the_scores": of}
            beside = f"  rank correlation {agreement:.4f} of {of} draws"
        save()
        print(f"  {name:5} {variant:24} {seconds:8.4f} s  {floor / seconds:6.1%}  {memory:6.1f} GB{beside}", flush=True)
        if profiled:
            print_kernels(profiler)


def profiling(profiler: Any, draws: int) -> At:
    """Look at a few draws after those that are timed, from mark to mark: no preparation is among them."""

    def waiting(do: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            do()

        return call

    return {draws: waiting(profiler.start), draws + PROFILED: waiting(profiler.stop)}


def kernels(profiler: Any) -> list[tuple[str, float, float]]:
    """Of every kernel, or of every operation on a CPU: milliseconds and calls a draw; what takes longest first."""
    time_of = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda one: -getattr(one, time_of))
    return [(one.key, getattr(one, time_of) / 1e3 / PROFILED, one.count / PROFILED) for one in found]


def print_kernels(profiler: Any, most: int = 25) -> None:
    """Where the time of a draw goes."""
    print(f"    {sum(one[1] for one in kernels(profiler)):9.3f} ms            in all", flush=True)
    for name, milliseconds, calls in kernels(profiler)[:most]:
        print(f"    {milliseconds:9.3f} ms  {calls:8.1f} ×  {name[:110]}", flush=True)
