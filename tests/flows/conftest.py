"""What several rooms of these tests share."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.flows.house import House
from tests.flows.runs import tiny_recipe


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe's folder, which is copied for every test; and an MLflow that holds nothing."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_recipe(folder)
    MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments(max_results=1)
    return folder


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are called, not started: this process' environment and signals stay as they are."""
    monkeypatch.setattr("flows.cli.settle", lambda: None)
    monkeypatch.setattr("flows.cli.signal.signal", lambda *_: None)


@pytest.fixture
def house(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    in_this_process: None,
) -> House:  # fmt: skip
    """Commands in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tiny}/mlflow.db")
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("mlflow.db"))
    made = House(tmp_path, capsys)
    recipe = Path(made.recipe)
    recipe.write_text(recipe.read_text().replace(str(tiny), str(tmp_path)))
    return made
