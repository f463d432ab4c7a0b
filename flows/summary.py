"""The end of a run: the table in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from flows.words import bytes_in_words, number, seconds_in_words


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
    done.add_row("training", f"{number(s['train_steps'])} steps, loss {s['loss_first']:.3f} -> {s['loss_last']:.3f}")
    console.print(done)

    times = Table(title="How long it took", title_justify="left", padding=(0, 1))
    times.add_column("step")
    times.add_column("time", justify="right")
    for name, seconds in s["wall_s"].items():
        times.add_row(name, seconds_in_words(seconds), end_section=name == list(s["wall_s"])[-2])
    console.print(times)

    verdict = Table(
        title="Acceptance length (accepted tokens per verification + 1)", title_justify="left", padding=(0, 1)
    )
    for column in ("drafter", "predicted", "served", "outputs equal to plain decoding"):
        verdict.add_column(column, justify="left" if column == "drafter" else "right")
    for label, key in (("trained", "served"), ("untrained control", "control")):
        if s.get(f"{key}_acceptance_length") is not None:
            predicted = number(s["predicted_acceptance_length"], 2) if key == "served" else "-"
            same = f"{s[f'{key}_outputs_equal']} of {s[f'{key}_prompts']}"
            verdict.add_row(label, predicted, number(s[f"{key}_acceptance_length"], 2), same)
    console.print(verdict)

    look = Table(title="Where to look", title_justify="left", show_header=False, padding=(0, 1))
    look.add_row("summary", s["summary_path"])
    look.add_row("drafter", s["drafter_path"])
    look.add_row("dataset", f"eyas inspect {s['dataset_uri']}")
    look.add_row("MLflow", f"run {s['mlflow_run_id']}, model {s['model_name']} version {s['model_version']}")
    look.add_row("Prefect", f"flow run {s['prefect_flow_run_id']}")
    look.add_row("pages", "eyas up   (then `eyas down`)")
    console.print(look)
