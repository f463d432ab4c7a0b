"""What Prefect hears of a drafter beside the states of runs; `infra/automations.yaml` says what follows from it."""

from typing import Any

from prefect.context import FlowRunContext
from prefect.events import emit_event

CHAMPION_MOVED, GATE_FAILED, EVALUATION_STALE = "eyas.champion.moved", "eyas.gate.failed", "eyas.evaluation.stale"


def emit(event: str, subject: str, **payload: Any) -> None:
    """Send an event of a run to its Prefect server. Without a run there is no server to tell: nothing is sent.

    Args:
        subject: what it is about, for example `model/eagle3-SmolLM2-135M-Instruct`.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    emit_event(
        event=event,
        resource={"prefect.resource.id": f"eyas.{subject.replace('/', '.', 1)}", "prefect.resource.name": subject},
        related=[
            {"prefect.resource.id": f"prefect.flow-run.{context.flow_run.id}", "prefect.resource.role": "flow-run"}
        ],
        payload=payload,
    )
