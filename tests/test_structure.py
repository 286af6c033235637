"""The architecture: imports point one way, and importing stays quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import jostle

SOURCE = Path(jostle.__file__).parent

ORDER = [
    "_version", "errors", "files", "presets", "ranks", "kernels", "losses", "data", "models", "training", "posterior", "samplers", "config",
    "scores", "estimate", "conditioning", "traces", "diagnose", "chains", "curvature", "attributors", "viewer", "runs", "probing",
    "calibration", "evaluate", "asking", "sweep", "demo", "cli", "__main__",
]  # fmt: skip
"""Along the flow of data: what is in a file or folder imports only from those before it."""

WITHIN = {
    "data": ["datasets", "texts"],
    "models": ["weights", "graphs", "functional", "checks", "prefix", "float8", "in_place", "sharding"],
    "training": [
        "schedules", "optimizers", "checkpoints", "description", "moments", "objective", "steps", "repeatable", "loaders",
        "batches", "records", "recorder", "trainer_callback", "__init__", "backwards",
    ],
    "traces": ["stores", "tensor_files", "store"],
    "diagnose": ["thresholds", "sample", "measures", "verdict", "__init__", "plots"],
    "chains": [
        "randomness", "observing", "recording", "thermometer", "chain", "checkpoints", "progress", "running",
        "spreading", "signals", "execution", "thinning", "stopping",
    ],
    "runs": [
        "manifest", "run", "examples", "layout", "integrity", "preparing", "planning", "widening", "rounds", "job", "sampling", "solving",
        "replaying",
    ],
    "asking": ["tasks", "requests"],
}  # fmt: skip
"""The same within the folders that the flow passes through."""


def imported(path: Path) -> set[tuple[str, ...]]:
    """The modules of ours that a file imports, as ``("chains", "running")`` or ``("errors",)``."""
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "jostle":
            parts = tuple(node.module.split(".")[1:])
            # `from jostle.chains import randomness` is an import of a module, `from jostle.errors import X` is not.
            names |= {
                (*parts, alias.name) if SOURCE.joinpath(*parts, f"{alias.name}.py").exists() else parts
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {tuple(one.name.split(".")[1:]) for one in node.names if one.name.startswith("jostle.")}
    return names - {()}


def test_imports_point_one_way() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(files) > 12
    for path in files:
        own, *inner = path.relative_to(SOURCE).with_suffix("").parts
        assert own in ORDER, f"{own} has no place in the order"
        order = WITHIN.get(own, [])
        assert not order or inner in (["__init__"], *([name] for name in order)), f"{path} has no place in the order"
        for name, *rest in imported(path):
            if name != own:
                assert ORDER.index(name) < ORDER.index(own), f"{path} imports {name}, which comes after it"
            elif order and inner[0] in order:
                other = rest[0] if rest else "__init__"
                assert order.index(other) < order.index(inner[0]), f"{path} imports {other}, which comes after it"


def test_importing_does_not_load_torch() -> None:
    script = "import sys, jostle; assert jostle.__version__; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_public_surface() -> None:
    for name in jostle.__all__:
        assert getattr(jostle, name) is not None
    assert {"attribute", "load", "Posterior", "SGLD", "RMSpropSGLD", "losses", "Run", "Scores"} <= set(jostle.__all__)
    for name in ("classification", "regression", "next_token"):
        assert callable(getattr(jostle.losses, name)())
