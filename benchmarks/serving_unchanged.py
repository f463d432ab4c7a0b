"""Does an installed and capturing plugin change any answer? 300 requests of mixed kinds, with it and without.

    python -m benchmarks.serving_unchanged [--alone N] [--groups N]

Requests go one at a time and in groups of eight that reach the scheduler as one message, so that both servers form the
same batches. The last line is one JSON object: `requests` compared and `different`: answers whose tokens, log-probs or
cached tokens are not identical.
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.capture_server import Served, capture_server, prompt
from tests.tiny_models import make_tiny

GROUP = 8
FLAGS = {"chunked-prefill-size": 64, "enable-mixed-chunk": True}
COMPARED = ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "cached_tokens", "finish_reason")


def bodies(alone: int, groups: int) -> list[dict[str, Any]]:
    """The same requests every time; a list of prompts in a body is one group."""
    rng = random.Random(0)
    shared = prompt(90, 1)

    def one(number: int) -> tuple[list[int], dict[str, Any]]:
        ids = prompt(rng.randint(1, 200), 1000 + number)
        if rng.random() < 0.3:  # prefix-cache hits
            ids = shared[: rng.randint(10, 90)] + ids
        sampling: dict[str, Any] = {"max_new_tokens": rng.choice([0, 1, 5, 20])}
        # Sampled tokens too: a plugin that drew from the server's random numbers would show.
        sampling["temperature"] = rng.choice([0.0, 0.0, 0.9])
        return ids, sampling

    result = []
    for number in range(alone):
        ids, sampling = one(number)
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3}
        if number % 3 == 0:
            body["logprob_start_len"] = 0
        result.append(body)
    for group in range(groups):
        members = [one(alone + group * GROUP + k) for k in range(GROUP)]
        result.append(
            {
                "input_ids": [ids for ids, _ in members],
                "sampling_params": [sampling for _, sampling in members],
                "return_logprob": [True] * GROUP,
            }
        )
    return result


def answers(served: Served, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is compared of every answer, in order."""
    found = []
    for body in requests:
        answer = served.post(body)
        for one in answer if isinstance(answer, list) else [answer]:
            found.append({"output_ids": one["output_ids"]} | {key: one["meta_info"].get(key) for key in COMPARED})
    return found


def main() -> None:
    """Run both servers and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", type=int, default=100)
    parser.add_argument("--groups", type=int, default=25, help=f"of {GROUP} requests each")
    arguments = parser.parse_args()
    requests = bodies(arguments.alone, arguments.groups)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_tiny("deepseek_v3", work / "model")
        with capture_server(model, work / "without", flags=FLAGS, capture=False) as served:
            without = answers(served, requests)
        with capture_server(model, work / "with", flags=FLAGS) as served:
            captured = answers(served, requests)
            totals = served.wait_for_totals(captured=len(captured))
    different = [number for number, (a, b) in enumerate(zip(without, captured, strict=True)) if a != b]
    result = {
        "requests": len(without),
        "different": len(different),
        "output_tokens": sum(len(answer["output_ids"]) for answer in without),
        "prefix_hits": sum(answer["cached_tokens"] > 0 for answer in without),
        "captured": totals["captured"],
        "different_requests": different[:20],
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
