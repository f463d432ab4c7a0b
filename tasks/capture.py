"""Steps around the capture servers: launched, rid of their warm-up, stopped."""

from prefect.logging import get_run_logger

from tasks.capture_pool import CapturePool
from tasks.capture_session import CaptureSession
from tasks.job import Job, need
from tasks.step import step


@step("launch server", retries=1)
def launch_servers(job: Job) -> None:
    """Start SGLang with the capture plugin, once per server of the recipe, and wait until all are ready."""
    if job.capture is not None:  # a retry: whatever the first try left is ended first
        job.capture.stop()
    servers = job.recipe.capture_servers()
    job.capture = CapturePool([CaptureSession(job, server, number) for number, server in enumerate(servers)])
    job.capture.start()


@step("remove warm-up dumps")
def clear_warm_up(job: Job) -> int:
    """Remove what the servers' own warm-up captured and take the counters' base line."""
    sessions = need(job.capture, "capture servers").sessions
    removed = sum(session.clear() for session in sessions)
    job.figures["warmup_dumps_removed"] = removed
    lines = {writer: counter for session in sessions for writer, counter in session.base_line.items()}
    get_run_logger().info("removed %d warm-up dump%s; counters start at %s", removed, "s" * (removed != 1), lines)
    return removed


@step("stop server")
def stop_servers(job: Job) -> None:
    """End the capture servers, whatever happened before."""
    if job.capture is not None:
        job.capture.stop()
        job.figures["server_starts"] = job.capture.starts
