"""Two drafters side by side: where one leads, how sure that is, what differs; as words, JSON and a page."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from markupsafe import escape
from mlflow import MlflowClient
from mlflow.entities import Metric

from flows.compare import compare_drafters, print_comparison
from hidden_states.errors import DatasetError
from tasks import plots
from tasks.comparison import POINTS, Side, compare_sides, training_curves
from tasks.comparison_page import comparison_page, figures, short_names
from tasks.differences import differences
from tasks.verdict_report import alone, markdown
from tests.tasks.registered import DOMAINS, LINEAGE, MODEL, registered, served


def pair(**other: Any) -> tuple[Side, Side]:
    curve = {"train/loss": [(n, 9.0 - n / 10) for n in range(1, 60)], "held_out/loss": [(30, 8.0), (60, 7.0)]}
    return (
        Side("m/2", served("m/2", 0.6), LINEAGE, curve),
        Side("m/1", served("m/1", 0.4), LINEAGE | other, {}),
    )


def test_a_comparison_says_where_by_position_and_how_sure() -> None:
    answer = compare_sides(*pair())
    assert answer["sets"].keys() == DOMAINS.keys()
    for row in [*answer["sets"].values(), answer["overall"], *answer["domains"].values()]:
        assert row["verdict"] == "better" and 0 < row["low"] <= row["difference"] <= row["high"]
    for row in answer["sets"].values():
        assert [entry["position"] for entry in row["positions"]] == [1, 2, 3]
        for entry, difference in zip(row["positions"], row["by_position"], strict=True):
            assert entry["difference"] == pytest.approx(difference, abs=2e-4)
            assert entry["low"] <= entry["difference"] <= entry["high"]
        # acceptance length = 1 + the shares of all positions: the two tell one story
        assert row["one"] - 1 == pytest.approx(sum(entry["one"] for entry in row["positions"]), abs=1e-3)
        each = [prompt["one"] > prompt["other"] for prompt in row["each"]]
        assert sum(each) == row["better"] and len(each) == row["prompts"]
        assert row["speed_up"] == [1.5, 1.5]
    assert json.loads(json.dumps(answer, allow_nan=False)) == json.loads(json.dumps(answer))


def test_sets_of_one_domain_are_compared_together_too() -> None:
    answer = compare_sides(*pair())
    assert {name: row["prompts"] for name, row in answer["domains"].items()} == {"held-out": 12, "code": 24}
    only = compare_sides(*pair(), ["repos"])
    assert list(only["sets"]) == ["repos"] and list(only["domains"]) == ["code"]


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("data", {"samples": 4000}, "samples: 1,000 / 4,000"),
        ("data", {"manifest_digest": "b" * 64}, "manifest_digest: aaaaaaaaaaaaaaaa… / bbbbbbbbbbbbbbbb…"),
        ("code", {"git_commit": "def"}, "git_commit: abc / def"),
        ("code", {"sglang_version": "0.6"}, "sglang_version: 0.5.23 / 0.6"),
        ("recipe", {"recipe": {"train": {"lr": 0.002, "steps": 100}}}, "train.lr: 0.001 / 0.002"),
        ("recipe", {"recipe": {"train": {"lr": 0.001}}}, "train.steps: 100 / -"),
    ],
)
def test_what_differs_is_named_in_its_kind_alone(kind: str, change: dict[str, Any], says: str) -> None:
    found = differences(LINEAGE, LINEAGE | change)
    assert found.pop(kind) == [says]
    assert not any(found.values())


def test_places_and_names_are_no_difference_and_a_missing_lineage_is_said() -> None:
    elsewhere = LINEAGE | {"recipe": {**LINEAGE["recipe"], "name": "other", "store": {"uri": "file:///x"}}}
    assert not any(differences(LINEAGE, elsewhere).values())
    assert all("no lineage.json" in line for lines in differences(LINEAGE, {}).values() for line in lines)


def test_the_page_needs_nothing_beside_it_and_shows_every_figure() -> None:
    page = comparison_page(compare_sides(*pair(git_commit="def")))
    assert [m for m in re.findall(r"<svg id=\"([\w-]+)\"", page)] == [
        "differences",
        "by-position",
        "throughput",
        "losses",
    ]
    assert not re.search(r"<script|<link|<img|@import|@font-face|src=", page)
    assert all(place.startswith("#") for place in re.findall(r"(?:href=\"|url\()([^\")]+)", page))
    assert set(re.findall(r"https?://[^\"]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "prefers-color-scheme: dark" in page and not any(colour in page for colour in plots.CSS)
    ids = re.findall(r'\bid="([^"]+)"', page)
    svg_parts = [i for i in ids if "-" in i]
    assert len(svg_parts) == len(set(svg_parts))
    for said in ("m: ", "version 2", "version 1", "git_commit: abc / def", "humaneval", "repos", "By domain"):
        assert said in page


def test_names_of_models_and_sets_cannot_become_markup() -> None:
    one, other = pair()
    wicked = "<script>alert(1)</script>"
    page = comparison_page(compare_sides(Side(wicked, one.evaluation, {}), other))
    assert wicked not in page and "&lt;script&gt;" in page
    assert "No loss curves" in page and "no lineage.json" in page


@pytest.mark.parametrize(
    "name", ["$a$", "$\\frac{$", "cost $1 or $2", "_x", "名前", "a\"b'c", "[red]x[/]", "%s {{7*7}}"]
)
@pytest.mark.filterwarnings("error")
def test_names_are_shown_as_they_are_written(name: str) -> None:
    (one, other), shown = pair(), str(escape(name))
    sets = {key: replace(found, name=name) for key, found in one.evaluation.sets.items()}
    served_as = [replace(side.evaluation, sets={name: sets["repos"]}) for side in (one, other)]
    answer = compare_sides(Side(name, served_as[0]), Side("m/1", served_as[1]))
    page = comparison_page(answer)
    assert f"<td>{shown}</td>" in page and f'<span class="one">{shown}</span>' in page
    for svg in figures(answer, answer["names"]).values():
        text = "".join(ElementTree.fromstring(svg).itertext())
        assert name in text, text


def test_settings_that_were_not_noted_leave_gaps_in_the_page() -> None:
    one, other = (replace(side, evaluation=replace(side.evaluation, settings={})) for side in pair())
    assert "Target -, SGLang -" in comparison_page(compare_sides(one, other))


def test_the_same_comparison_makes_the_same_page() -> None:
    assert comparison_page(compare_sides(*pair())) == comparison_page(compare_sides(*pair()))


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["m/2", "m/1"], ("m", ["version 2", "version 1"])), (["a/2", "b/1"], (None, ["a/2", "b/1"])),
        (["runs/x/drafter", "runs/y/drafter"], (None, ["runs/x/drafter", "runs/y/drafter"])),
        (["/2", "/1"], (None, ["/2", "/1"])),
    ],
)  # fmt: skip
def test_versions_of_one_model_are_called_by_their_number(
    names: list[str], short: tuple[str | None, list[str]]
) -> None:
    assert short_names(names) == short


def test_a_drafter_alone_has_plots_too_and_a_plot_alone_brings_its_colours() -> None:
    drawn = alone(pair()[0])
    assert drawn.keys() == {"by_position", "throughput", "losses"}
    for svg in drawn.values():
        assert "--one:" in plots.standalone(svg) and re.match(
            r'<svg width="[\d.]+pt" height="[\d.]+pt"', plots.standalone(svg)
        )


def test_the_table_for_prefect_has_a_row_a_set_and_says_what_differs() -> None:
    text = markdown(compare_sides(*pair(git_commit="def")))
    assert [line.split(" | ")[0] for line in text.splitlines()[2:5]] == [f"| {key}" for key in DOMAINS]
    assert "code: `git_commit: abc / def`" in text and "data: the same" in text


@dataclass(frozen=True)
class Registry:
    """A real MLflow with two versions; `folders` are their drafters'."""

    client: MlflowClient
    folders: list[Path]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    folder = tmp_path_factory.mktemp("registry")
    uri = f"sqlite:///{folder}/mlflow.db"
    jobs = [registered(uri, folder, luck, samples)[0] for luck, samples in ((0.4, 1), (0.6, 2))]
    client = MlflowClient(tracking_uri=uri)
    client.set_registered_model_alias(MODEL, "champion", "1")
    return Registry(client, [job.folder / "drafter" for job in jobs])


def test_versions_aliases_and_folders_are_compared_alike(registry: Registry, tmp_path: Path, capsys: Any) -> None:
    one, other = map(str, registry.folders)
    names = [(f"{MODEL}/2", f"{MODEL}/1"), (f"{MODEL}@candidate", f"{MODEL}@champion"), (other, one)]
    answers = [compare_drafters(*pair, html=tmp_path / "page.html", client=registry.client) for pair in names]
    assert len({json.dumps(answer["sets"]) for answer in answers}) == 1
    assert answers[1]["names"] == [f"{MODEL}/2", f"{MODEL}/1"]
    assert answers[0]["differs"]["data"] == ["samples: 2 / 1"]
    assert "<svg" in (tmp_path / "page.html").read_text()
    print_comparison(answers[0])
    said = capsys.readouterr().out
    for words in ("held-out", "humaneval", "domain code", "all together", "better", "samples: 2 / 1", "page.html"):
        assert words in said


def test_a_version_that_was_measured_again_is_compared_as_last_measured(registry: Registry, tmp_path: Path) -> None:
    before = compare_drafters(f"{MODEL}/2", f"{MODEL}/1", client=registry.client)
    served("again", 0.1).write(tmp_path)
    run = registry.client.create_run("1").info.run_id
    registry.client.log_artifacts(run, str(tmp_path), "evaluations/2")
    registry.client.set_model_version_tag(MODEL, "2", "evaluation.source", f"runs:/{run}/evaluations/2/evaluation.json")
    after = compare_drafters(f"{MODEL}/2", f"{MODEL}/1", client=registry.client)
    registry.client.delete_model_version_tag(MODEL, "2", "evaluation.source")
    assert (before["overall"]["verdict"], after["overall"]["verdict"]) == ("better", "worse")
    assert before["differs"] == after["differs"]


def test_a_long_training_is_thinned_without_losing_its_ends(registry: Registry) -> None:
    run = registry.client.create_run("1").info.run_id
    below = {"mlflow.parentRunId": run, "eyas.stage": "training"}
    training = registry.client.create_run("1", tags=below).info.run_id
    registry.client.log_batch(training, [Metric("train/loss", 1000 - step, 0, step) for step in range(1000)])
    curve = training_curves(registry.client, run)["train/loss"]
    assert len(curve) <= POINTS and curve[-1][0] == 999
    values = [value for _, value in curve]
    assert values == sorted(values, reverse=True) and values[0] > 990
    assert training_curves(registry.client, "unknown") == training_curves(registry.client, None) == {}
    for run_id in (3, [1], {}):  # of a lineage written by hand
        assert training_curves(registry.client, run_id) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [f"{MODEL}/9", f"{MODEL}/x", "nobody/1", f"{MODEL}@nobody", "nothing", "nowhere/at/all"]
)
def test_a_drafter_that_is_not_there_is_refused_by_name(registry: Registry, name: str) -> None:
    with pytest.raises(DatasetError, match=re.escape(name)):
        compare_drafters(name, f"{MODEL}/1", client=registry.client)


def test_a_set_that_is_not_there_is_refused_with_those_that_are(registry: Registry) -> None:
    with pytest.raises(DatasetError, match="no set maths"):
        compare_drafters(f"{MODEL}/2", f"{MODEL}/1", ["maths"], client=registry.client)
