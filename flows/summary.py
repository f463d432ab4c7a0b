"""The end of a run: the table in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.words import bytes_in_words, number, seconds_in_words


def print_summary(summary: dict[str, Any]) -> None:
    """What was done, how long each step took, predicted and served acceptance, where to look."""
    console = Console(highlight=False)
    s = summary

    done = Table(title="What was done", title_justify="left", show_header=False, padding=(0, 1))
    done.add_row("target", f"{s['target']} in SGLang {s['sglang_version']}")
    done.add_row(
        "samples",
        f"{number(s['samples_valid'])} of {number(s['samples_planned'])} stored and proved, "
        f"{number(s['samples_quarantined'])} quarantined, {number(s['samples_held_out'])} of them held out",
    )
    done.add_row("tokens", number(s["tokens"]))
    done.add_row("warm-up dumps removed", number(s["warmup_dumps_removed"]))
    done.add_row("uploaded", f"{number(s['objects_uploaded'])} objects, {bytes_in_words(s['bytes_uploaded'])}")
    done.add_row("teacher agreement", f"{s['teacher_agreement']:.4f} of {number(s['teacher_positions'])} positions")
    if "train_steps" in s:
        done.add_row(
            "training", f"{number(s['train_steps'])} steps, loss {s['loss_first']:.3f} -> {s['loss_last']:.3f}"
        )
    console.print(done)

    print_extraction(console, s["extraction"])

    times = Table(title="How long it took", title_justify="left", padding=(0, 1))
    times.add_column("step")
    times.add_column("time", justify="right")
    for name, seconds in s["wall_s"].items():
        times.add_row(name, seconds_in_words(seconds), end_section=name == list(s["wall_s"])[-2])
    console.print(times)

    if "train_steps" in s:
        print_verdict(console, s)

    look = Table(title="Where to look", title_justify="left", show_header=False, padding=(0, 1))
    look.add_row("summary", s["summary_path"])
    if "drafter_path" in s:
        look.add_row("drafter", s["drafter_path"])
    look.add_row("dataset", f"eyas inspect {s['dataset_uri']}")
    model = f", model {s['model_name']} version {s['model_version']}" if "model_name" in s else ""
    look.add_row("MLflow", f"run {s['mlflow_run_id']}{model}")
    look.add_row("Prefect", f"flow run {s['prefect_flow_run_id']}")
    look.add_row("pages", "eyas up   (then `eyas down`)")
    console.print(look)


def print_extraction(console: Console, rows: list[dict[str, Any]]) -> None:
    """What became of every row and sample; nothing to show when each was simply stored."""
    if len(rows) < 2:
        return
    table = Table(title="What became of every sample", title_justify="left", padding=(0, 1))
    for column in ("count", "state", "reason", "for example"):
        table.add_column(column, justify="right" if column == "count" else "left", overflow="fold")
    for row in rows:
        table.add_row(number(row["count"]), row["state"], Text(row["reason"]), Text((row["examples"] or [""])[0]))
    console.print(table)


def print_verdict(console: Console, s: dict[str, Any]) -> None:
    """Predicted and served acceptance, of the drafter and of its control."""
    verdict = Table(
        title="Acceptance length (accepted tokens per verification + 1)", title_justify="left", padding=(0, 1)
    )
    for column in ("drafter", "predicted", "served", "outputs equal to plain decoding"):
        verdict.add_column(column, justify="left" if column == "drafter" else "right")
    champion = f"champion, version {s.get('champion_version')}"
    for label, key in (("trained", "served"), ("untrained control", "control"), (champion, "champion")):
        if s.get(f"{key}_acceptance_length") is not None:
            predicted = number(s["predicted_acceptance_length"], 2) if key == "served" else "-"
            same = f"{s[f'{key}_outputs_equal']} of {s['served_prompts']}"
            verdict.add_row(label, predicted, number(s[f"{key}_acceptance_length"], 2), same)
    console.print(verdict)
    console.print(f"{s['decision'][0].upper()}{s['decision'][1:]}.", markup=False)
