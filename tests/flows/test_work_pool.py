"""Work pools as the papers say: Prefect's own commands register the flows, start a worker, retry a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.services import prefect_server
from tests.flows.operated import GONE_S, Operated, end_with_parent, manifest_digest
from tests.flows.runs import CHECKOUT, tiny_recipe, wait_for

PREFECT = Path(sys.executable).with_name("prefect")


def prefect(place: Operated, *words: str) -> str:
    """A command of Prefect's in the checkout, where `prefect.yaml` is; what it said."""
    done = subprocess.run(
        [PREFECT, *words], cwd=CHECKOUT, env=environment(place), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment(place: Operated) -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "EYAS"))}
    return ours | place.env | {"EYAS_WORKSPACE": str(place.folder), "PREFECT_WORKER_QUERY_SECONDS": "1"}


@pytest.mark.long
def test_a_worker_of_a_pool_runs_a_flow_and_prefects_own_command_retries_it(tmp_path: Path) -> None:
    folder = (tmp_path / "host").resolve()
    folder.mkdir()
    recipe = tiny_recipe(folder, store={"uri": f"file://{folder}/store"})
    services = folder.with_name("host-services")
    services.mkdir()
    place = Operated(folder, prefect_server(services), recipe)
    try:
        prefect(place, "work-pool", "create", "--type", "process", "eyas")
        prefect(place, "--no-prompt", "deploy", "--all")
        with (folder / "serve.log").open("w") as log:
            place.server = subprocess.Popen(
                [PREFECT, "worker", "start", "--pool", "eyas"], cwd=folder, env=environment(place), text=True,
                stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
            )  # fmt: skip
        deployment = place.ask("GET", "/deployments/name/extract/pool")["id"]
        place.orders.write_text("kill commit dataset")
        begun = place.ask("POST", f"/deployments/{deployment}/create_flow_run", parameters={"recipe": str(recipe)})
        run = str(begun["id"])
        assert place.ends(run) == "CRASHED", place.log()
        assert not place.wait_alone()

        prefect(place, "flow-run", "retry", run)
        assert wait_for(lambda: place.run_of(run)["run_count"] == 2, 60), place.log()
        assert place.ends(run) == "COMPLETED", (place.message(run), place.log())
        assert len(manifest_digest(folder / "store")) == 64
    finally:
        place.stop_serving()
        left = place.wait_empty(GONE_S)
        place.prefect.stop()
    assert not left, left
