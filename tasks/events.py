"""What Prefect hears of a drafter beside the states of runs; `infra/automations.yaml` says what follows from it."""

import os
from typing import Any

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.events.worker import EventsWorker

CHAMPION_MOVED, GATE_FAILED, EVALUATION_STALE = "eyas.champion.moved", "eyas.gate.failed", "eyas.evaluation.stale"
SENT_S = 20.0


def emit(event: str, subject: str, **payload: Any) -> None:
    """Send an event to the run's Prefect server; outside a run to the one PREFECT_API_URL names, if it names one.

    Args:
        subject: what it is about, for example `model/eagle3-SmolLM2-135M-Instruct`.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None and "PREFECT_API_URL" not in os.environ:
        return
    flow_run = (
        [{"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.role": "flow-run"}] if run else []
    )
    emit_event(
        event=event,
        resource={"prefect.resource.id": f"eyas.{subject.replace('/', '.', 1)}", "prefect.resource.name": subject},
        related=flow_run,
        payload=payload,
    )
    if run is None:  # a run's own end waits for what is on its way
        EventsWorker.drain_all(timeout=SENT_S)
