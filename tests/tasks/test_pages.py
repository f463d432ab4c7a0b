"""What a person sees in a browser: the comparison page, and MLflow's own pages of drafters."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.process import OwnedProcess
from infra.service import wait_ready
from infra.services import mlflow_server
from tasks.comparison import Side, compare_sides
from tasks.comparison_page import comparison_page
from tasks.saved_view import METRICS, MODELS, VIEW
from tests.tasks.registered import DOMAINS, LINEAGE, MODEL, registered, served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="neither Chromium nor Chrome is installed"),
]


def seen(url: str, folder: Path) -> str:
    """The page's DOM once its scripts have run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}",
             "--window-size=2400,1200", "--virtual-time-budget=20000"]  # fmt: skip
    shown = subprocess.run(
        [str(BROWSER), *flags, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
    )
    return shown.stdout


def test_the_comparison_page_shows_its_figures_in_a_browser(tmp_path: Path) -> None:
    curve = {"train/loss": [(1, 9.0), (2, 8.0)]}
    answer = compare_sides(
        Side("m/2", served("m/2", 0.6), LINEAGE, curve), Side("m/1", served("m/1", 0.4), LINEAGE, curve)
    )
    (tmp_path / "page.html").write_text(comparison_page(answer))
    dom = seen((tmp_path / "page.html").as_uri(), tmp_path)
    assert re.findall(r'<svg id="([\w-]+)"', dom) == ["differences", "by-position", "throughput", "losses"]
    for key, row in answer["sets"].items():
        assert f"<td>{key}</td>" in dom and f"{row['one']:.3f}" in dom and f"{row['difference']:+.3f}" in dom
    assert dom.count("<text") > 50  # the plots' labels are text
    assert len(re.findall(r"<path", dom)) > 100


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[float]]]:
    """MLflow's own server over two registered versions; its address, and their served acceptance lengths."""
    state = tmp_path_factory.mktemp("pages")
    (state / "mlflow").mkdir()
    uri = f"sqlite:///{state}/mlflow/mlflow.db"
    jobs = [registered(uri, state, luck, samples, steps=20)[0] for luck, samples in ((0.4, 100), (0.6, 400))]
    MlflowClient(tracking_uri=uri).set_registered_model_alias(MODEL, "champion", "1")
    service = mlflow_server(state)
    with OwnedProcess(
        service.command, log_path=state / "log", pid_file=state / "pid", env=service.env, name=service.name
    ) as process:
        wait_ready(service, process)
        yield service.url, [job.figures["served_acceptance_length"] for job in jobs]


def test_mlflows_run_list_shows_the_verdicts_columns_and_figures(
    pages: tuple[str, list[float]], tmp_path: Path
) -> None:
    url, lengths = pages
    dom = seen(f"{url}/#/experiments/1/runs?{MODELS}&viewStateShareKey={VIEW}", tmp_path)
    for name in METRICS[:3]:
        assert name in dom
    assert all(f"version {n}, demo-smollm2 {samples:04x}" in dom for n, samples in ((1, 100), (2, 400)))
    assert all(f"{length:.3f}"[:4] in dom for length in lengths)
    assert "The columns that matter" in dom


def test_mlflows_model_pages_show_aliases_served_acceptance_and_the_run(
    pages: tuple[str, list[float]], tmp_path: Path
) -> None:
    url, lengths = pages
    dom = seen(f"{url}/#/models/{MODEL}", tmp_path)
    for said in ("Version 1", "Version 2", "candidate", "champion", "moves only to a version that served better"):
        assert said in dom
    dom = seen(f"{url}/#/models/{MODEL}/versions/2", tmp_path)
    assert all(f"served/{key}/acceptance_length" in dom for key in list(DOMAINS)[:1])
    assert f"held-out {lengths[1]:.3f}" in dom and "on 400 samples" in dom
