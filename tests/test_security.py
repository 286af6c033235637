"""Nothing executable is loaded, code of a model's own is not run, and no token of the hub reaches a run or a log."""

from __future__ import annotations

import ast
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jostle
from test_commands import SMALL, jostle_command, place, sources  # noqa: F401
from test_survival import sample

SOURCE = Path(jostle.__file__).parent
LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
# joblib runs things in processes of our own; what it could read from files it is not asked to.


def test_no_module_imports_what_runs_code_on_loading() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & LOADERS, path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("joblib.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"), path
            if called == "torch.load":  # what optimizers are kept in: tensors and numbers, and no code
                assert "weights_only=True" in ast.unparse(node), path
            if called == "np.load":
                assert "allow_pickle=True" not in ast.unparse(node), path
            for keyword in node.keywords if isinstance(node, ast.Call) else []:
                assert keyword.arg != "trust_remote_code" or ast.unparse(keyword.value) == "False", path


def test_no_pickle_is_loaded_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a pickle was loaded")

    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", type("Unpickler", (pickle.Unpickler,), {"load": refuse}))
    monkeypatch.setattr(torch, "load", refuse)
    sample(tmp_path, examples={"train": [{"text": "a"}] * 9, "query": [{"text": "b"}] * 2})
    sample(tmp_path, draws=8)
    run = jostle.load(tmp_path)
    run.influence().save(tmp_path / "scores.safetensors")
    jostle.Scores.load(tmp_path / "scores.safetensors")
    np.testing.assert_array_equal(run.influence().values, sample(draws=8).influence().values)
    assert run.diagnostics()["verdict"]


class Bomb:
    """What an attacker puts into a file: unpickling it makes another."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("file", ["center.safetensors", "state/chain-0000.safetensors", "manifest.json", "config.yaml"])
def test_a_pickle_in_a_run_directory_is_not_run(file: str, tmp_path: Path) -> None:
    sample(tmp_path / "run")
    buffer = io.BytesIO()
    pickle.dump(Bomb(tmp_path / "exploded"), buffer)
    (tmp_path / "run" / file).write_bytes(buffer.getvalue())
    assert jostle_command("check", tmp_path / "run").exit_code == 4
    with pytest.raises(jostle.InputError):
        sample(tmp_path / "run", draws=8)
    assert not (tmp_path / "exploded").exists()


def test_yaml_that_makes_objects_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"!!python/object/apply:pathlib.Path.touch [{tmp_path / 'exploded'}]")
    result = jostle_command("run", tmp_path / "run", "--config", tmp_path / "config.yaml")
    assert result.exit_code == 2
    assert not (tmp_path / "exploded").exists()


def test_code_in_a_model_directory_is_not_run(place: Path, tmp_path: Path) -> None:  # noqa: F811
    import json
    import shutil

    shutil.copytree(place / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "mine.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'exploded')!r}).touch()")
    result = jostle_command("run", tmp_path / "run", *sources(place), "--model", tmp_path / "model", *SMALL)
    assert result.exit_code == 2
    assert not (tmp_path / "exploded").exists()


def test_tokens_of_the_hub_stay_out_of_runs_and_logs(
    place: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = "hf_" + "Q7" * 17
    monkeypatch.setenv("HF_TOKEN", secret)
    with caplog.at_level(logging.DEBUG):
        result = jostle_command("run", tmp_path / "run", *sources(place), *SMALL)
        failed = jostle_command("run", tmp_path / "other", *sources(place), "--model", "someone/private", *SMALL)
    assert (result.exit_code, failed.exit_code) == (0, 2)
    said = result.output + result.stderr + failed.output + failed.stderr + caplog.text
    assert secret not in said
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize("name", ["../escaped", "/etc/escaped", "a/../../b"])
def test_names_from_outside_do_not_leave_the_run_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(jostle.InputError, match="names without a slash"):
        sample(tmp_path / "run", observables={name: lambda model: model.bias})
    with pytest.raises(jostle.InputError, match=r"^examples: got"):
        sample(tmp_path / "run", examples={name: [{}]})
    assert list(tmp_path.iterdir()) == []
