"""What became of everything that was planned: counts by state and reason, with examples of each."""

from collections.abc import Iterable, Mapping
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from tasks.job import Job, need
from tasks.page import shown
from tasks.quarantine import quarantined
from tasks.step import step

ARTIFACT = "extraction-report"
EXAMPLES = 3


@step("report extraction")
def report_extraction(job: Job) -> None:
    """The table of this dataset, as a Prefect artifact, in the log, and in the summary."""
    rows = table(job)
    job.figures["extraction"] = rows
    lines = [{**row, "examples": "; ".join(row["examples"])} for row in rows]
    said = f"What became of every row and sample of {job.figures['dataset_uri']}"
    shown(lambda: create_table_artifact(lines, key=ARTIFACT, description=said))
    for row in rows:
        why = f" ({row['reason']})" if row["reason"] else ""
        examples = f": {row['examples'][0]}" if row["examples"] else ""
        get_run_logger().info("%6d %s%s%s", row["count"], row["state"], why, examples)


def table(job: Job) -> list[dict[str, Any]]:
    """Rows of `state`, `reason`, `count`, `examples`; stored first, then what is not, the most frequent first."""
    manifest = need(job.dataset, "dataset").manifest
    rows = [_row("stored and proved", "", manifest.samples, [])]
    rows += _by_reason("quarantined", quarantined(job, manifest))
    samples, report = job.samples, need(job.plan, "plan").report
    if samples is not None and samples.empty:
        rows.append(_row("no sample", "the target's reply is empty", samples.empty, []))
    if samples is not None and samples.cut:
        rows.append(_row("stored, with a remark", "reply cut at regenerate.max_new_tokens", samples.cut, []))
    for state, reasons in (
        ("no sample", report.dropped if report else {}),
        ("stored, with a remark", report.notes if report else {}),
    ):
        found = sorted(reasons.items(), key=lambda item: -item[1].count)
        rows += [_row(state, reason, entry.count, entry.examples) for reason, entry in found]
    return rows


def _by_reason(state: str, reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of reasons written as `kind: in words`, by kind."""
    kinds: dict[str, list[str]] = {}
    for sample, reason in sorted(reasons.items()):
        kind, _, words = reason.partition(": ")
        kinds.setdefault(kind, []).append(f"{sample}: {words}")
    return [_row(state, kind, len(found), found) for kind, found in sorted(kinds.items(), key=lambda i: -len(i[1]))]


def _row(state: str, reason: str, count: int, examples: Iterable[str]) -> dict[str, Any]:
    return {"state": state, "reason": reason, "count": count, "examples": list(examples)[:EXAMPLES]}
