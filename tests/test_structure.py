"""The architecture: imports point one way, and importing stays quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import jostle

SOURCE = Path(jostle.__file__).parent

ORDER = [
    "_version", "errors", "presets", "ranks", "kernels", "losses", "data", "weights", "posterior", "samplers", "randomness", "scores", "stores", "traces", "estimate",
    "functional", "checks", "observing", "prefix", "float8", "in_place", "sharding", "config", "chains", "spreading", "tensor_files", "recording", "checkpoints", "progress", "running", "execution", "attributors", "diagnose", "plots", "viewer", "run", "stopping", "layout", "integrity", "preparing", "planning", "thinning", "signals", "replaying", "rounds", "job", "sampling", "calibration", "evaluate", "texts", "tasks", "requests", "sweep", "terminal",
    "demo", "cli", "__main__",
]  # fmt: skip
"""Along the flow of data: a module imports only from those before it."""


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jostle"):
            rest = node.module.split(".")[1:]
            names |= {rest[0]} if rest else {alias.name for alias in node.names if alias.name in ORDER}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jostle.")}
    return names


def test_imports_point_one_way() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(files) > 12
    for path in files:
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert own in ORDER, f"{own} has no place in the order"
        for name in imported_modules(path) - {own}:
            assert ORDER.index(name) < ORDER.index(own), f"{path.name} imports {name}, which comes after it"


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
