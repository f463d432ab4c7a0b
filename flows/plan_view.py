"""How a plan looks in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from flows.words import bytes_in_words, number


def print_plan(plan: dict[str, Any]) -> None:
    """Print a plan as a table, then what could not be checked from here."""
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row(
        "target", f"{plan['target']} ({plan['num_blocks']} blocks, hidden size {number(plan['hidden_size'])})"
    )
    table.add_row("captured", f"outputs of blocks {plan['after_block']} and the final state, {plan['dtype']}")
    table.add_row("bytes a token", f"{number(plan['bytes_per_token'])}")
    if plan["samples"] is not None:
        table.add_row("conversations", f"{number(plan['rows'])} rows, {number(plan['bad_rows'])} unusable")
        table.add_row("samples", f"{number(plan['samples'])} ({number(plan['held_out'])} held out)")
        bound = "at most " if plan["tokens_are_a_bound"] else ""
        table.add_row("tokens", f"{bound}{number(plan['tokens'])} in about {number(plan['batches'])} batches")
        table.add_row("in the bucket", f"{bound}{bytes_in_words(plan['bytes'])} at {plan['store']}")
    table.add_row("on local disk", f"about {bytes_in_words(plan['local_bytes'])} at a time in {plan['dump_dir']}")
    for samples in (10_000, 600_000):
        size = samples * plan["max_tokens"] * plan["bytes_per_token"]
        table.add_row(f"{number(samples)} samples", f"of {number(plan['max_tokens'])} tokens: {bytes_in_words(size)}")
    console.print(table)
    for problem in plan["not_checked"]:
        console.print(f"not checked here: {problem}", soft_wrap=True)
