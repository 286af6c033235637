"""Where a record comes from: hardware, versions, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jostle import __version__
from jostle.files import replace_file


def environment() -> dict[str, Any]:
    """Return what a number depends on besides the code under test."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "jostle": __version__,
        "commit": commit,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "accelerator": accelerator,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record with its environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"environment": environment(), **record}, indent=2, default=float) + "\n")
