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
    if "prediction" in s:
        print_prediction(console, s["prediction"])

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
    """Outputs that differ first; then acceptance of the drafter, predicted and served, and of what it must beat."""
    champion = f"champion, version {s.get('champion_version')}"
    drafters = [("trained", "served"), ("before training", "control"), (champion, "champion")]
    for label, key in drafters:
        for line in s.get(f"{key}_differences", []):
            console.print(f"{label}: another output than plain decoding: {line}", markup=False)
    verdict = Table(
        title="Acceptance length (accepted tokens per verification + 1)", title_justify="left", padding=(0, 1)
    )
    for column in ("set", "drafter", "predicted", "served", "speed-up", "outputs equal to plain decoding"):
        verdict.add_column(column, justify="left" if column in ("set", "drafter") else "right")
    names = list(s.get("served_sets", {}))
    for name in names:
        for label, key in drafters:
            found = s.get(f"{key}_sets", {}).get(name)
            if found is None:
                continue
            known = s.get("predicted_acceptance_length")
            predicted = key == "served" and name == "held-out" and known is not None
            equal = f"{found['outputs_equal']} of {found['prompts']}" if "outputs_equal" in found else "sampled"
            verdict.add_row(
                name, label, number(known, 2) if predicted else "-",
                number(found["acceptance_length"], 2), number(found["speed_up"], 2), equal,
            )  # fmt: skip
    console.print(verdict)
    console.print(f"{s['decision'][0].upper()}{s['decision'][1:]}.", markup=False)


def print_evaluation(summary: dict[str, Any]) -> None:
    """What `eyas evaluate` found: acceptance by set, prediction against reality, and the decision."""
    console = Console(highlight=False)
    s = summary
    sets = Table(title=f"{s['drafter']}: prompt sets", title_justify="left", padding=(0, 1))
    for column in ("set", "version", "content", "prompts", "left out: in training"):
        sets.add_column(column, justify="left" if column in ("set", "version", "content") else "right")
    for found in s["prompt_sets"]:
        sets.add_row(
            found["name"],
            found["version"],
            found["digest"][:16],
            number(found["prompts"]),
            number(found["in_training"]),
        )
    console.print(sets)
    for change in s.get("stale", []):
        console.print(f"its last evaluation was stale: {change}", markup=False)
    print_verdict(console, s)
    print_prediction(console, s["prediction"])
    console.print(f"evaluation: {s['evaluation_path']}; MLflow run {s['mlflow_run_id']}", markup=False, soft_wrap=True)


def print_prediction(console: Console, found: dict[str, Any]) -> None:
    """Simulated, replayed and served acceptance, and the likely cause of a gap."""
    if "replayed" not in found:
        console.print(f"Prediction and serving are not compared: {found['why_not']}.", markup=False)
        return
    simulated = "-" if found["simulated"] is None else f"{found['simulated']:.3f}"
    console.print(
        f"Prediction: simulated {simulated} over the held-out split; on {found['prompts']} served prompts "
        f"replayed {found['replayed']:.3f}, served {found['served']:.3f}: a gap of {found['gap']:+.3f}, "
        f"bound {found['bound']:g}."
    )
    if found["diagnosis"]:
        console.print(f"{found['diagnosis']['in_words']}.", markup=False)
    for change in found["stale_dataset"]:
        console.print(f"changed since the states were captured: {change}", markup=False)
