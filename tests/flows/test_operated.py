"""Runs as people operate them: from schedules, from Prefect's pages, with somebody pulling the plug."""

import os
import signal
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from flows.automations import read_automations
from flows.gpus import limit_name
from hidden_states.errors import RecipeError
from tests.browser import BROWSER, browser
from tests.flows.operated import Operated, manifest_digest, operated
from tests.flows.runs import tiny_recipe, wait_for

EVERY_MINUTE = {"cron": "* * * * *", "timezone": "UTC"}
HARDLY_EVER = {"cron": "0 0 29 2 *", "timezone": "UTC"}
HELD_S = 120


def another_recipe(recipe: Path, name: str, **sections: dict[str, object]) -> str:
    """The recipe under another name, with some keys changed."""
    content = yaml.safe_load(recipe.read_text()) | {"name": name}
    for section, keys in sections.items():
        content[section] = {**content.get(section, {}), **keys}
    path = recipe.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """`eyas serve` with one recipe; one request at a time, so that datasets are the same to the bit."""
    folder = tmp_path_factory.mktemp("operated").resolve()
    recipe = tiny_recipe(
        folder, store={"uri": f"file://{folder}/store"}, evaluate={"enabled": False},
        server={"max_in_flight_requests": 1, "env": {"OMP_NUM_THREADS": "1"}}, schedule=HARDLY_EVER,
    )  # fmt: skip
    with operated(folder, recipe) as served:
        yield served


def have_dataset(place: Operated) -> None:
    """Committed by the test before, or now."""
    if not list(place.folder.glob("store/tiny-v*/manifest.json")):
        assert place.ends(place.begin("extract")) == "COMPLETED", place.log()


@pytest.mark.long
def test_of_two_schedules_that_fire_while_a_run_holds_the_gpus_one_waits_and_one_is_skipped(place: Operated) -> None:
    """And a cancelled run gives the GPUs back, with nothing of it left behind."""
    place.stop_serving()
    sleeper = place.folder / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    never_ready = {"server": {"python": str(sleeper), "ready_deadline_s": 600}}
    waits = another_recipe(place.recipe, "waits", schedule={**EVERY_MINUTE, "when_busy": "wait"}, **never_ready)
    skips = another_recipe(place.recipe, "skips", schedule={**EVERY_MINUTE, "when_busy": "skip"}, **never_ready)
    place.serve(str(place.recipe), waits, skips)
    holder = place.begin("extract", [f"server.python={sleeper}", "server.ready_deadline_s=600"])
    assert wait_for(lambda: any("sleep" in " ".join(p.cmdline()) for p in place.processes()), 60)

    def scheduled(name: str) -> list[dict[str, object]]:
        found = place.ask("POST", "/flow_runs/filter", deployments={"name": {"any_": [name]}})
        return sorted(found, key=lambda run: str(run["expected_start_time"]))

    def first(name: str) -> str:
        return str(scheduled(name)[0]["id"])

    assert wait_for(lambda: bool(scheduled("waits") and scheduled("skips")), HELD_S)
    due = [datetime.fromisoformat(str(scheduled(name)[0]["expected_start_time"])) for name in ("waits", "skips")]
    assert abs((due[0] - due[1]).total_seconds()) <= 60
    assert place.ends(first("skips"), HELD_S) == "CANCELLED"
    assert "another run holds this host's GPUs" in place.message(first("skips"))
    waiting = first("waits")
    assert wait_for(lambda: "waiting for it to end" in place.log(), 60)
    assert place.state(waiting) == "RUNNING"
    for deployment in ("waits", "skips"):  # what else comes due would hold the GPUs in its turn
        pause(place, f"drafter_pipeline/{deployment}")

    place.cancel(holder)
    assert place.ends(holder, 60) == "CANCELLED"
    assert wait_for(lambda: any(run["name"] == "tiny-deepseek-v3 waits-v1" for run in scheduled("waits")), 60)
    place.cancel(waiting)
    assert place.ends(waiting, 60) == "CANCELLED"
    for run in scheduled("waits"):
        if run["id"] != waiting and place.state(str(run["id"])) in ("RUNNING", "PENDING"):
            place.cancel(str(run["id"]))
            place.ends(str(run["id"]), 60)
    assert not place.wait_alone()
    assert place.ask("GET", f"/v2/concurrency_limits/{limit_name()}")["active_slots"] == 0


def pause(place: Operated, deployment: str) -> None:
    """Its schedule fires no more."""
    found = place.ask("GET", f"/deployments/name/{deployment}")
    place.http.patch(f"/deployments/{found['id']}", json={"paused": True}).raise_for_status()


@pytest.mark.long
def test_a_killed_run_goes_on_when_it_is_retried_unless_its_recipe_was_edited(place: Operated) -> None:
    """The retry of an edited one is refused and names what changed; nothing that is stored is made again."""
    place.orders.write_text("kill stop server")
    run = place.begin("extract")
    assert place.ends(run) == "CRASHED"
    assert not place.wait_alone()
    shards = {path: path.stat().st_mtime_ns for path in place.folder.glob("store/tiny-v1/shards/*")}
    assert len(shards) > 6
    dumps = list(place.folder.glob("runs/*/dumps"))
    assert dumps and {stat.S_IMODE(folder.stat().st_mode) for folder in dumps} == {0o700}
    folders = set(place.folder.glob("runs/*"))
    original = place.recipe.read_text()
    place.recipe.write_text(original.replace("max_new_tokens: 12", "max_new_tokens: 13", 1))
    assert place.recipe.read_text() != original
    place.retry(run)
    assert wait_for(lambda: place.run_of(run)["run_count"] == 2, 60)
    assert place.ends(run) == "FAILED"
    message = place.message(run)
    assert "edited since this run began" in message and "max_new_tokens (12 / 13)" in message
    assert set(place.folder.glob("runs/*")) == folders, "a refused retry began to work"

    place.recipe.write_text(original)
    place.retry(run)
    assert wait_for(lambda: place.run_of(run)["run_count"] == 3, 60)
    assert place.ends(run) == "COMPLETED", place.log()
    assert {path: path.stat().st_mtime_ns for path in place.folder.glob("store/tiny-v1/shards/*")} == shards
    assert len(manifest_digest(place.folder / "store")) == 64
    assert place.run_of(run)["name"] == "tiny-deepseek-v3 tiny-v1"


@pytest.mark.long
def test_a_training_ends_with_its_worker_goes_on_when_retried_and_does_not_mind_a_restart_of_prefect(
    place: Operated,
) -> None:
    """`eyas serve` is killed while a training runs; retried under another one it goes on from its checkpoint, and on
    while Prefect's server is killed and started again."""
    have_dataset(place)
    run = place.begin("train", ["train.steps=100000", "train.max_seconds=15", "train.checkpoint_every=2"])
    checkpoints = place.folder / ".eyas" / "checkpoints"

    def steps() -> set[str]:
        return {path.name for path in checkpoints.glob("*/step-*")}

    assert wait_for(lambda: bool(steps()), 120), place.log()
    assert place.server is not None
    place.server.kill()
    place.server.wait()
    assert not place.wait_empty(60)
    assert place.state(run) == "CRASHED"
    before = steps()
    assert before

    place.serve()
    place.retry(run)
    assert wait_for(lambda: bool(steps() - before), 120), place.log()
    place.restart_prefect()
    assert place.ends(run) == "COMPLETED", place.log()
    summary = place.summary_of(run)
    assert summary["train_steps"] > max(int(name.removeprefix("step-")) for name in before)
    assert summary["model_version"] == "1" and Path(summary["drafter_path"], "model.safetensors").exists()
    assert not place.wait_alone()
    assert wait_for(lambda: place.ask("GET", f"/v2/concurrency_limits/{limit_name()}")["active_slots"] == 0, 10)


@pytest.mark.slow
def test_the_automations_of_the_repository_are_declared_once(place: Operated) -> None:
    there = [entry["name"] for entry in place.ask("POST", "/automations/filter")]
    assert sorted(there) == sorted(automation.name for automation in read_automations())


@pytest.mark.slow
def test_a_form_asks_for_a_recipe_and_overrides_with_words_for_each(place: Operated) -> None:
    for flow in ("drafter_pipeline", "extract", "train"):
        fields = place.ask("GET", f"/deployments/name/{flow}/any-recipe")["parameter_openapi_schema"]["properties"]
        assert {"recipe", "overrides"} <= set(fields) and len(fields) <= 4
        assert all(field["description"] for field in fields.values())
        assert fields["overrides"]["type"] == "array"


def test_a_schedule_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    from flows.deployments import deployments

    recipe = tiny_recipe(tmp_path, schedule={"cron": "every night"})
    with pytest.raises(RecipeError, match=r"`schedule\.cron`"):
        deployments([str(recipe)])


def test_nothing_is_served_without_a_server_to_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.deployments import serve_recipes
    from hidden_states.errors import ServerError

    monkeypatch.setenv("EYAS_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(ServerError, match="eyas up"):
        serve_recipes([], None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="neither Chromium nor Chrome is installed")
def test_a_person_starts_a_run_with_an_override_in_the_browser_and_sees_how_far_it_is(place: Operated) -> None:
    have_dataset(place)
    pages = place.service.url.removesuffix("/api")
    deployment = place.ask("GET", "/deployments/name/train/any-recipe")["id"]
    with browser(place.folder) as page:
        page.open(f"{pages}/deployments/deployment/{deployment}/run")
        page.wait("document.querySelector('textarea')?.value === 'demo-smollm2'")
        assert "strings that change the recipe" in page.text()
        page.fill("document.querySelector('textarea')", str(place.recipe))
        page.click("[...document.querySelectorAll('button')].find(e => e.innerText.trim() === 'Add item')")
        page.wait("document.querySelectorAll('textarea').length === 2")
        page.fill("document.querySelectorAll('textarea')[1]", "train.steps=8")
        page.click("document.querySelector('button[type=submit]')")

        def started() -> list[dict[str, object]]:
            return list(place.ask("POST", "/flow_runs/filter", deployments={"name": {"any_": ["any-recipe"]}}))

        assert wait_for(lambda: bool(started()), 30), page.text()
        (run,) = started()
        assert run["parameters"]["overrides"] == ["train.steps=8"]  # type: ignore[index]
        assert place.ends(str(run["id"])) == "COMPLETED", place.log()
        assert place.summary_of(str(run["id"]))["train_steps"] == 8
        page.open(f"{pages}/artifacts/key/training-progress")
        page.wait("document.body?.innerText.includes('trained')")  # it began with `training begins`
        page.open(f"{pages}/runs/flow-run/{run['id']}")
        page.wait("document.body?.innerText.includes('tiny-deepseek-v3 tiny-v1')")


@pytest.mark.slow
def test_eyas_serve_outlives_an_absence_of_its_server_and_ends_without_it(place: Operated) -> None:
    """Away for as long as ten failed polls take: Prefect's own runner would give up after three."""

    def ended() -> bool:
        return place.server is None or place.server.poll() is not None

    def go_away() -> None:
        for pid in place.prefect.pids():
            os.kill(pid, signal.SIGKILL)
        place.prefect.stop()

    go_away()
    assert not wait_for(ended, 20), place.log()
    place.prefect = place.start_prefect()
    run = place.begin("train", ["train.steps=2"])
    assert wait_for(lambda: place.state(run) not in ("SCHEDULED", "PENDING"), 60), place.log()
    place.cancel(run)
    assert place.ends(run) == "CANCELLED"

    go_away()
    place.stop_serving(30)
    assert ended() and "the schedules are not paused" in place.log()
    place.prefect = place.start_prefect()
