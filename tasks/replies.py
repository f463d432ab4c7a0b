"""Replies by the target itself: on-policy data, kept in the bucket chunk by chunk so that a kill loses one chunk."""

import json
from dataclasses import dataclass

from prefect.logging import get_run_logger

from hidden_states.samples import Sample, sample_from_reply
from infra.client import SGLangClient
from tasks.job import Job, need
from tasks.planning import Plan, Prompt
from tasks.step import step

CHUNK = 64  # prompts kept per object: a few seconds of work on GPUs, half a minute on a laptop


@dataclass(frozen=True)
class PreparedSamples:
    """The samples of a run and the prompts kept for serving.

    Attributes:
        samples: all of them, training and held out.
        held_out: ids of the held-out ones.
        served: held-out prompts with the target's own plain reply, where one is known.
    """

    samples: list[Sample]
    held_out: frozenset[str]
    served: list[tuple[list[int], list[int] | None]]


@dataclass(frozen=True)
class Reply:
    """What the target answered to one prompt."""

    prompt: str
    ids: list[int]
    finish_reason: str


def answer(client: SGLangClient, prompts: list[Prompt], job: Job) -> list[Reply]:
    """Ask the target; replies in the order of `prompts`."""
    settings, server = job.recipe.regenerate, job.recipe.server
    requests = [
        client.request(p.ids, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature) for p in prompts
    ]
    answers = client.generate_many(
        requests, max_in_flight_tokens=server.max_in_flight_tokens, max_in_flight=server.max_in_flight_requests
    )
    by_rid = {a.rid: a for a in answers}
    return [
        Reply(p.digest, by_rid[r.rid].output_ids, by_rid[r.rid].finish_reason)
        for p, r in zip(prompts, requests, strict=True)
    ]
