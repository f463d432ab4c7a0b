"""Does operating Eyas lose anything, or leave anything behind? Run: .venv/bin/python -m benchmarks.operations

A real Prefect server, `eyas serve`, a tiny model in real SGLang. Runs of the deployments are disturbed at random
moments and retried by Prefect's API, as its page does, until they end by themselves:

    cancel    by API, as the button does
    kill      kill -9 of the process that runs the flow
    worker    kill -9 of `eyas serve`; another one is started
    retry     at each step in turn the run dies (kill -9) or refuses, and is retried from there; `--retries` rounds

Up to three disturbances hit the extraction of one dataset. Prints one JSON object:

    cancels, kills, worker_kills    that hit
    orphans              processes of a run that were still there a minute after its end
    slowest_end_s        longest time from a disturbance until nothing of the run was left
    retries              by API, disturbed again or not
    retries_completed    those of runs that ended Completed
    same_manifest        every dataset's manifest has the digest of the one that was extracted undisturbed
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.flows.operated import Operated, manifest_digest, operated
from tests.flows.runs import tiny_recipe, wait_for

EXTRACTION = ("plan", "launch server", "remove warm-up dumps", "regenerate replies", "open dataset", "prove states",
              "extract batch", "stop server", "commit dataset", "use dataset", "report extraction")  # fmt: skip
STEPS = (*EXTRACTION, "train drafter", "export drafter", "register drafter")
MOST_A_RUN = 3
EXPECTED = {"cancel": {"CANCELLED"}, "kill": {"CRASHED"}, "worker": {"CRASHED", "CANCELLED"}}


@dataclass
class Campaign:
    """What has happened so far."""

    hits: Counter[str] = field(default_factory=Counter)
    orphans: list[str] = field(default_factory=list)
    slowest_end_s: float = 0.0
    retries: int = 0
    retries_completed: int = 0
    digests: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    by_step: Counter[str] = field(default_factory=Counter)


class Operator:
    """Disturbs runs and looks after them."""

    def __init__(self, place: Operated, campaign: Campaign, until: float) -> None:
        self.place, self.campaign, self.until, self.number = place, campaign, until, 0
        self.usual_s = 0.0

    def undisturbed(self) -> str:
        """Extract once in peace; the digest all others must have."""
        started = time.monotonic()
        run, store = self._begin("extract")
        self._must_complete(run)
        self.usual_s = time.monotonic() - started
        return manifest_digest(store)

    def disturbed(self, kinds: list[str]) -> list[str]:
        """One dataset, extracted while disturbances of these kinds hit in turn; returns those that came too late."""
        run, store = self._begin("extract")
        retries = 0
        late: list[str] = []
        for number, kind in enumerate(kinds):
            if time.monotonic() > self.until or not self._disturb(run, kind):
                late = kinds[number:]
                break
            self._retry(run)
            retries += 1
        self._finish(run, store, retries)
        return late

    def every_step(self, steps: list[str], round_number: int) -> None:
        """One run of the whole pipeline that ends at each of these steps, and is retried from there."""
        retries = 0
        order = self._sabotage(steps[0], round_number)
        run, store = self._begin("drafter_pipeline")
        for number, step in enumerate(steps):
            state = self.place.ends(run)
            wanted = "CRASHED" if order == "kill" else "FAILED"
            if state != wanted:
                self.campaign.unexpected.append(f"{order} at {step}: {state}: {self.place.message(run)}")
                if state == "COMPLETED":
                    return
            self._look_after(time.monotonic())
            self.campaign.by_step[step] += 1
            if number + 1 < len(steps):
                order = self._sabotage(steps[number + 1], round_number + number + 1)
            self._retry(run)
            retries += 1
        self._finish(run, store, retries)

    def _sabotage(self, step: str, number: int) -> str:
        order = ("kill", "refuse")[number % 2]
        self.place.orders.write_text(f"{order} {step}")
        return order

    def _begin(self, flow: str) -> tuple[str, Path]:
        self.number += 1
        store = self.place.folder / f"store-{self.number}"
        run = self.place.begin(flow, [f"store.uri=file://{store}"])
        wait_for(lambda: self.place.process_of(run) is not None, 60)
        return run, store

    def _disturb(self, run: str, kind: str) -> bool:
        """Hit the run at a random moment; False when it had ended by then."""
        place = self.place
        if not wait_for(lambda: place.process_of(run) is not None, 60):
            return False
        time.sleep(random.uniform(0, 0.95 * self.usual_s))  # the moment is what is drawn
        process = place.process_of(run)
        if process is None or place.state(run) not in ("RUNNING", "PENDING"):
            return False
        at = time.monotonic()
        if kind == "cancel":
            place.cancel(run)
        elif kind == "kill":
            process.kill()
        elif place.server is not None:
            place.server.kill()
            place.server.wait()
            place.server = None
        if kind == "worker":
            wait_for(lambda: place.process_of(run) is None, 60)
            self._look_after(at)
            if place.state(run) not in EXPECTED[kind]:  # nobody was there to report its end: the automation would
                self.mark_crashed(run)
            place.serve()
        state = place.ends(run)
        if state not in EXPECTED[kind]:
            self.campaign.unexpected.append(f"{kind}: {state}: {place.message(run)}")
        self._look_after(at)
        self.campaign.hits[kind] += 1
        seconds = time.monotonic() - at
        print(f"run {self.number}: {kind}, ended {state}; {seconds:.1f} s", file=sys.stderr, flush=True)
        return True

    def mark_crashed(self, run: str) -> None:
        """What the automation `eyas: stuck run` does after five minutes."""
        self.place.ask("POST", f"/flow_runs/{run}/set_state", state={"type": "CRASHED"}, force=True)

    def _look_after(self, since: float) -> None:
        self.campaign.orphans += self.place.wait_alone()
        self.campaign.slowest_end_s = max(self.campaign.slowest_end_s, time.monotonic() - since)

    def _retry(self, run: str) -> None:
        self.campaign.retries += 1
        self.place.retry(run)
        wait_for(lambda: self.place.process_of(run) is not None, 60)

    def _must_complete(self, run: str) -> None:
        state = self.place.ends(run)
        print(f"undisturbed: {state}", file=sys.stderr, flush=True)
        if state != "COMPLETED":
            raise RuntimeError(f"undisturbed, it ended {state}: {self.place.message(run)}\n{self.place.log()}")
        self.campaign.orphans += self.place.wait_alone()

    def _finish(self, run: str, store: Path, retries: int) -> None:
        state = self.place.ends(run)
        if state == "COMPLETED":
            self.campaign.retries_completed += retries
            self.campaign.digests.append(manifest_digest(store))
        else:
            self.campaign.unexpected.append(f"the last retry ended {state}: {self.place.message(run)}")
        print(f"run {self.number}: {state} after {retries} retries", file=sys.stderr, flush=True)
        self.campaign.orphans += self.place.wait_alone()
        shutil.rmtree(store, ignore_errors=True)


def campaign_recipe(home: Path) -> Path:
    """Tiny, and with one request at a time: then every dataset is the same to the bit."""
    return tiny_recipe(
        home, evaluate={"enabled": False}, store={"uri": f"file://{home}/store"},
        server={"max_in_flight_requests": 1, "env": {"OMP_NUM_THREADS": "1"}},
    )  # fmt: skip


def run_campaign(
    place: Operated, counts: dict[str, int], retries: int, steps: list[str], until: float
) -> dict[str, Any]:
    """All of it, or as much as is begun before `until`; see the top of this file."""
    campaign = Campaign()
    operator = Operator(place, campaign, until)
    reference = operator.undisturbed()
    waiting = [kind for kind, count in counts.items() for _ in range(count)]
    random.shuffle(waiting)
    while waiting and time.monotonic() < until:
        size = random.randint(1, MOST_A_RUN)
        kinds, waiting = waiting[:size], waiting[size:]
        waiting += operator.disturbed(kinds)
    for number in range(retries):
        if time.monotonic() < until:
            operator.every_step(steps, number)
    return {
        "cancels": campaign.hits["cancel"], "kills": campaign.hits["kill"], "worker_kills": campaign.hits["worker"],
        "orphans": len(campaign.orphans), "slowest_end_s": round(campaign.slowest_end_s, 1),
        "retries": campaign.retries, "retries_completed": campaign.retries_completed,
        "retries_by_step": dict(campaign.by_step), "datasets": len(campaign.digests),
        "same_manifest": set(campaign.digests) <= {reference}, "unexpected": campaign.unexpected,
        "usual_s": round(operator.usual_s, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cancels", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--worker-kills", type=int, default=10)
    parser.add_argument("--retries", type=int, default=5, help="rounds of a retry at every step")
    parser.add_argument("--steps", default=",".join(STEPS), help="those steps, comma-separated")
    parser.add_argument("--minutes", type=float, default=240, help="nothing new is begun after so many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    until = time.monotonic() + 60 * options.minutes
    counts = {"cancel": options.cancels, "kill": options.kills, "worker": options.worker_kills}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary).resolve() / "here"
        home.mkdir()
        with operated(home, campaign_recipe(home)) as place:
            answer = run_campaign(place, counts, options.retries, options.steps.split(","), until)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
