"""What a run found out about its drafter, where people look: plots, the comparison with the champion, in words."""

import json
from dataclasses import replace
from typing import Any

from prefect.artifacts import create_markdown_artifact

from hidden_states.errors import DatasetError
from tasks import plots
from tasks.comparison import Side, compare_sides
from tasks.comparison_page import comparison_page, figures
from tasks.job import Job, need
from tasks.page import shown
from tasks.step import step

ARTIFACT = "comparison"


@step("report verdict", retries=2)
def report_verdict(job: Job) -> None:
    """Put the plots, the page and the decision into MLflow, and the table into Prefect."""
    tracker, found = need(job.tracker, "MLflow run"), job.figures
    words = [f"**{found['decision']}**"]
    if job.evaluation is not None:
        name = f"{found['model_name']}/{found['model_version']}"
        ours = Side.of(replace(job.evaluation, name=name), job.folder / "drafter", tracker.client)
        drawn = alone(ours)
        answer = _against_champion(ours, job.champion)
        if answer is not None:
            drawn = figures(answer, answer["names"])
            tracker.text(comparison_page(answer), "comparison.html")
            tracker.text(json.dumps(answer, indent=1), "comparison.json")
            table = markdown(answer)
            said = f"{words[0]}\n\n{table}"
            shown(lambda: create_markdown_artifact(said, key=ARTIFACT, description="Against the champion"))
            words += [table, "Plots and details: artifact `comparison.html`."]
        for plot, svg in drawn.items():
            tracker.text(plots.standalone(svg), f"plots/{plot}.svg")
    tracker.tags({"decision": found["decision"]})
    tracker.describe("\n\n".join(words))


def _against_champion(ours: Side, champion: Side | None) -> dict[str, Any] | None:
    try:
        return compare_sides(ours, champion) if champion is not None else None
    except DatasetError:  # too few prompts in common: the decision names them, set by set
        return None


def alone(side: Side) -> dict[str, str]:
    """The plots of one drafter."""
    sets, names = side.evaluation.sets, [side.name]
    drawn = {
        "by_position": plots.by_position([{key: record.by_position for key, record in sets.items()}], names),
        "throughput": plots.throughput([{key: record.figures() for key, record in sets.items()}], list(sets), names),
    }
    return drawn | ({"losses": plots.losses([side.curves], names)} if side.curves else {})


def markdown(answer: dict[str, Any]) -> str:
    """The comparison as a table, a row a set."""
    one, other = answer["names"]
    lines = [
        f"| set | prompts | {one} | {other} | difference, 95% interval | verdict | speed-up |",
        "|-|-|-|-|-|-|-|",
    ]
    for key, row in answer["sets"].items():
        lines.append(
            f"| {key} | {row['prompts']} | {row['one']:.3f} | {row['other']:.3f} | {interval(row)} | {row['verdict']} "
            f"| {row['speed_up'][0]:.2f} / {row['speed_up'][1]:.2f} |"
        )
    for kind, differing in answer["differs"].items():
        lines += [] if lines[-1] == "" else [""]
        lines.append(f"{kind}: " + ("; ".join(f"`{line}`" for line in differing) or "the same"))
    return "\n".join(lines)


def interval(row: dict[str, Any]) -> str:
    """`+0.147 [+0.112, +0.184]`"""
    ends = ", ".join("-" if row[end] is None else f"{row[end]:+.3f}" for end in ("low", "high"))
    return f"{row['difference']:+.3f} [{ends}]"
