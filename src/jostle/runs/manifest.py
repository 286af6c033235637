"""What a run's two small files say, ``manifest.json`` and ``config.yaml``, for whoever needs no scores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jostle.config import fingerprint_settings
from jostle.errors import InputError
from jostle.traces.stores import Place, check_url

FORMAT = 1
"""The version of the layout of a run directory."""


def healthy_chains(chains: int, failed: Iterable[int], *, antithetic: bool) -> np.ndarray:
    """Return the chains that estimates use: those that did not fail, nor, in an antithetic pair, their mirror image."""
    lost = {chain ^ other for chain in failed for other in ((0, 1) if antithetic else (0,))}
    return np.setdiff1d(np.arange(chains), sorted(lost))


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a run's manifest: status, fingerprints, versions."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        fix = ""
        if (directory / "calibration.json").is_file():
            fix = "it was being calibrated: the same jostle run goes on"
        elif directory.is_file():
            fix = "files of scores are for jostle top and evaluate and, beside a run, for jostle view"
        got = f"no readable manifest.json in {directory}"
        raise InputError("run", got=got, expected="a run directory", fix=fix) from error
    if not isinstance(manifest, dict):
        raise InputError("run", got=f"a manifest.json in {directory} that is no object", expected="a run directory")
    if manifest.get("format") != FORMAT:
        raise InputError(
            "run",
            got=f"format {manifest.get('format')} in {directory}",
            expected=f"format {FORMAT}",
            fix="read it with the version of Jostle that wrote it",
        )
    _check_manifest(manifest, directory)
    return manifest


def place_of_traces(directory: Path, manifest: Mapping[str, Any]) -> Place:
    """Return where the traces of a run are: in its directory, unless the manifest names a store elsewhere."""
    elsewhere = manifest.get("traces")
    return directory / "traces.zarr" if elsewhere is None else check_url(elsewhere)


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return a hash of a manifest, which is kept in it."""
    return fingerprint_settings({name: value for name, value in manifest.items() if name != "checksum"})


def check_config(config: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Refuse a ``config.yaml`` that is not the one that the run was made with."""
    found = fingerprint_settings({name: value for name, value in config.items() if name != "source"})
    expected = manifest["fingerprints"].get("config")
    if found != expected:
        raise InputError("config.yaml", got=f"fingerprint {found}", expected=f"{expected}, as the manifest has it")


def _check_manifest(manifest: dict[str, Any], directory: Path) -> None:
    """Refuse a manifest that lacks what everybody reads of it."""
    failed = manifest.get("failed_chains")
    well = (
        isinstance(manifest.get("status"), str)
        and isinstance(manifest.get("fingerprints"), dict)
        and isinstance(manifest.get("draws"), int)
        and isinstance(manifest.get("jostle"), str)
        and isinstance(manifest.get("remarks"), list)
        and isinstance(manifest.get("traces", ""), str)
        and "scale" in manifest
        and isinstance(seconds := manifest.get("seconds"), dict)
        and isinstance(seconds.get("sampling"), int | float)
        and isinstance(failed, list)
        and all(isinstance(one, dict) and isinstance(one.get("chain"), int) for one in failed)
        and manifest.get("checksum", manifest_checksum(manifest)) == manifest_checksum(manifest)
    )
    if not well:
        raise InputError("run", got=f"a damaged manifest.json in {directory}", expected="it as Jostle wrote it")


def read_config(directory: Path) -> dict[str, Any]:
    """Read a run's configuration."""
    config: dict[str, Any] = {}
    try:
        config = yaml.safe_load((directory / "config.yaml").read_text())
        well = config["keep"] in ("traces", "covariance") and all(
            isinstance(config[name], int) for name in ("chains", "draws", "burn_in", "thin")
        )
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        well = False
    if not well:
        raise InputError("run", got=f"no readable config.yaml in {directory}", expected="it as Jostle wrote it")
    return config
