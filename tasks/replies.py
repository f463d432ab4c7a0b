"""Samples of a run: the target's own replies to the prompts (on-policy), or the replies the data came with."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from hidden_states.errors import DataError
from hidden_states.fingerprint import target_fields
from hidden_states.prompts import Prompt
from hidden_states.samples import Sample, sample_from_reply
from tasks.capture_session import CaptureSession
from tasks.job import Job, need
from tasks.ledger import chunks
from tasks.step import step


@dataclass(frozen=True)
class RunSamples:
    """The samples a run extracts, and how many replies were left out by rule.

    Attributes:
        held_out: ids of those that training must not see. Drawn by the prompt where the target writes the replies, so
            that a prompt stays on its side whatever is answered.
        empty: replies without a token to learn: nothing to train on, left out and counted.
        cut: replies that met `max_new_tokens`: kept, every token of them is the target's own.
    """

    samples: list[Sample]
    held_out: frozenset[str]
    empty: int = 0
    cut: int = 0


@step("regenerate replies", retries=2)
def regenerate_replies(job: Job) -> None:
    """Let the target answer every prompt; what an earlier run stored is not asked again."""
    plan, ledger, capture = need(job.plan, "plan"), need(job.ledger, "ledger"), need(job.capture, "capture servers")
    settings = job.recipe.regenerate
    ledger.claim_target(target_fields(Path(job.recipe.target.model_path)))
    if not settings.enabled:
        held_out = frozenset(s.id for s in plan.samples if s.digest in plan.held_out)
        job.samples = RunSamples(plan.samples, held_out)
        return
    log = get_run_logger()
    known = ledger.replies()
    groups = chunks(plan.prompts, job.recipe.server.max_in_flight_requests)
    missing = [(group, asked) for group in groups if (asked := [p for p in group if p.digest not in known])]
    made: list[int] = []
    done = len(plan.prompts) - sum(len(group) for group, _ in missing)
    if done:
        log.info("%d of %d replies are in the bucket already", done, len(plan.prompts))
    waiting, lock = iter(job.own_order(missing)), threading.Lock()

    def answer(_: CaptureSession) -> None:
        nonlocal done
        while True:
            with lock:
                group, asked = next(waiting, ([], []))
            if not group:
                return
            answers = ledger.replies_to(asked)  # by a run on another host, since we looked
            if answers is None:
                with capture.take() as session:
                    answers = _ask(session, asked, job)
                    session.clear()  # what mode `all` captured of the prompts themselves: it must not fill the disk
                answers = ledger.keep_replies(settings.model_dump(mode="json"), answers)
                made.append(len(asked))
            with lock:
                known.update({answer["prompt"]: answer for answer in answers})
                done += len(group)
                log.info("%d of %d replies", done, len(plan.prompts))

    capture.each(answer)
    job.samples = _samples(plan.prompts, known, plan.held_out)
    job.figures |= {
        "replies_generated": sum(made),
        "replies_empty": job.samples.empty,
        "replies_cut": job.samples.cut,
    }
    log.info("%d samples; %d replies cut at %d tokens, %d empty", len(job.samples.samples), job.samples.cut,
             settings.max_new_tokens, job.samples.empty)  # fmt: skip


def _ask(session: CaptureSession, prompts: list[Prompt], job: Job) -> list[dict[str, Any]]:
    settings, server = job.recipe.regenerate, session.settings
    client = need(session.client, "client")
    sampling = {"top_p": settings.top_p, "top_k": settings.top_k} if settings.temperature else {}
    requests = [
        client.request(p.ids, rid=f"reply-{job.run_id}-{p.digest[:16]}", max_new_tokens=settings.max_new_tokens,
                       temperature=settings.temperature, sampling=sampling)
        for p in prompts
    ]  # fmt: skip
    asked = {request.rid: prompt for request, prompt in zip(requests, prompts, strict=True)}
    answers = client.generate_many(
        requests, max_in_flight_tokens=server.max_in_flight_tokens, max_in_flight=server.max_in_flight_requests
    )
    return [
        {"prompt": asked[a.rid].digest, "source": asked[a.rid].source, "ids": a.output_ids, "finish": a.finish_reason}
        for a in answers
    ]


def _samples(prompts: list[Prompt], replies: dict[str, dict[str, Any]], kept: frozenset[str]) -> RunSamples:
    samples: dict[str, Sample] = {}
    held_out: set[str] = set()
    empty = cut = 0
    for prompt in prompts:
        reply = replies[prompt.digest]
        try:
            sample = sample_from_reply(prompt.ids, list(reply["ids"]), prompt.source)
        except DataError:
            empty += 1
            continue
        cut += reply["finish"] == "length"
        samples[sample.digest] = sample
        if prompt.digest in kept:
            held_out.add(sample.id)
    if not samples:
        raise DataError("replies", f"all {empty} are empty", "some text", "Does the target's chat template fit it?")
    return RunSamples([samples[d] for d in sorted(samples)], frozenset(held_out), empty, cut)
