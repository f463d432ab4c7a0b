"""How a plan looks in the terminal."""

from typing import Any

from rich.console import Console

from tasks.words import bytes_in_words, number


def print_plan(plan: dict[str, Any]) -> None:
    """Print a plan as a table, then what could not be checked from here."""
    console = Console(highlight=False, soft_wrap=True)

    def row(name: str, says: str) -> None:
        console.print(f"{name:<17}{says}", markup=False)

    row("target", f"{plan['target']} ({plan['num_blocks']} blocks, hidden size {number(plan['hidden_size'])})")
    row("captured", f"outputs of blocks {plan['after_block']} and the final state, {plan['dtype']}")
    row("bytes a token", f"{number(plan['bytes_per_token'])}")
    if plan["samples"] is not None:
        row("conversations", f"{number(plan['rows'])} rows, {number(plan['bad_rows'])} unusable")
        row("samples", f"{number(plan['samples'])} ({number(plan['held_out'])} held out)")
        bound = "at most " if plan["tokens_are_a_bound"] else ""
        row("tokens", f"{bound}{number(plan['tokens'])} in about {number(plan['batches'])} batches")
        row("in the bucket", f"{bound}{bytes_in_words(plan['bytes'])} at {plan['store']}")
    row("on local disk", f"about {bytes_in_words(plan['local_bytes'])} at a time in {plan['dump_dir']}")
    for samples in (10_000, 600_000):
        size = samples * plan["max_tokens"] * plan["bytes_per_token"]
        row(f"{number(samples)} samples", f"of {number(plan['max_tokens'])} tokens: {bytes_in_words(size)}")
    for problem in plan["not_checked"]:
        console.print(f"not checked here: {problem}")
