"""How the local stack looks in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_stack(status: dict[str, Any]) -> None:
    """Where each service of `eyas up` is."""
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, service in status["services"].items():
        table.add_row(name, service["url"] or "not running", f"log: {service['log']}")
    console.print(table)
    console.print(f"credentials of the object store: {status['credentials']}", soft_wrap=True)
    console.print("`eyas run` uses these services while they are up; `eyas down` ends them.")
