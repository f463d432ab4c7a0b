"""How the local stack looks in the terminal."""

from typing import Any

from rich.console import Console


def print_stack(status: dict[str, Any]) -> None:
    """Where each service of `eyas up` is."""
    console = Console(highlight=False, soft_wrap=True)
    for name, service in status["services"].items():
        console.print(f"{name:<14}{page(service['url'])}   (log: {service['log']})", markup=False)
    console.print(f"credentials of the object store: {status['credentials']}")
    console.print("`eyas run` uses these services while they are up; `eyas down` ends them.")


def page(url: str | None) -> str:
    """Where a person looks; Prefect's API has its pages one level up."""
    return url.removesuffix("/api") if url else "not running"
