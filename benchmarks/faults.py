"""Does extraction survive being killed? Run: .venv/bin/python -m benchmarks.faults

Jobs of 500 samples on a tiny model, each extracted by `eyas extract` again and again until it ends by itself, while
faults hit it at random moments:

    flow       kill -9 of the command, while it starts or while batches are in work
    server     kill -9 of SGLang's scheduler, with a batch in flight
    uploader   kill -9 of the command while an object is on its way to the bucket (held there by a proxy): the shard, or
               the sidecar that would have made it count

One job of three lets Eyas start the server, two capture from one that runs on (so a killed command leaves requests and
dumps behind). Real SGLang, a real S3 server, real Prefect. Afterwards every planned sample must be stored exactly once
or quarantined with a reason, with the tokens and mask that were planned and the states that a transformers forward of
its own gives. Prints one JSON object:

    faults           that hit, and how many of each kind
    lost             planned samples neither stored nor quarantined
    duplicated       samples stored more than once
    mislabelled      samples whose tokens, mask or states are not theirs
    rework_tokens    tokens of batches begun more than once; at most one batch a fault
    tokens           of all jobs
    orphans          processes that outlived a kill by more than 30 s
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eyas_capture import contract
from hidden_states.dataset import Dataset
from hidden_states.gate import Reference, row_distance
from hidden_states.samples import Sample
from hidden_states.store import open_store
from infra.recipe_file import load_recipe
from infra.services import LocalStack
from tasks.job import read_events
from tasks.planning import make_plan
from tests.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.flows.runs import Place, tiny_recipe
from tests.servers import running_server
from tests.tiny_models import make_tiny

AFTER_BLOCK = [1, 2, 4]
DEADLINE_S = 600.0  # of one attempt
FAR = 0.02  # row distance in float32 that no rounding explains
WORDS = ("hawk", "falcon", "eyas", "kestrel", "mews", "hood", "glove", "lure", "creance", "talon", "stoop", "quarry")


@dataclass
class Campaign:
    """What has happened so far."""

    wanted: int
    kinds: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    orphans: int = 0
    tokens: int = 0
    begun_tokens: int = 0
    largest_batch: int = 0
    lost: int = 0
    duplicated: int = 0
    mislabelled: int = 0
    quarantined: int = 0
    samples: int = 0

    @property
    def left(self) -> int:
        return self.wanted - self.kinds.total()


class Job:
    """One dataset, extracted until it is whole."""

    def __init__(self, place: Place, number: int, recipe: Path, proxy: FaultProxy, campaign: Campaign) -> None:
        self.place, self.number, self.recipe, self.proxy, self.campaign = place, number, recipe, proxy, campaign
        self.overrides = [f"dataset.name=job-{number}"]
        self.runs_before = set(place.folder.glob("runs/*"))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of this job's runs with this event."""
        runs = set(self.place.folder.glob("runs/*")) - self.runs_before
        return [entry for run in runs for entry in read_events(run, name)]

    def extract(self, kinds: list[str]) -> None:
        """Run and hurt it until a run ends by itself.

        Raises:
            RuntimeError: a run failed, which no fault excuses.
        """
        while not self._attempt(random.choice(kinds) if self.campaign.left > 0 else None):
            pass

    def _attempt(self, kind: str | None) -> bool:
        self.campaign.attempts += 1
        begun = len(self.events("batch begun"))
        process = self.place.start("extract", str(self.recipe), *self.overrides)
        fault = Fault("hold", when=self._upload()) if kind == "uploader" else None
        self.proxy.faults[:] = [fault] if fault is not None else []
        early = kind == "flow" and random.random() < 0.3
        moment = time.monotonic() + random.uniform(0, 12 if early else 4)
        started = time.monotonic()
        hit = False
        while process.poll() is None and time.monotonic() - started < DEADLINE_S:
            working = len(self.events("batch begun")) > begun
            if not working and not early:
                moment = time.monotonic() + random.uniform(0, 4)
            elif kind in ("flow", "server") and not hit and time.monotonic() >= moment:
                hit = self._kill_server() if kind == "server" else True
                if kind == "flow":
                    break
            if fault is not None and fault.reached.is_set():
                hit = True
                break
            time.sleep(0.05)
        late = time.monotonic() - started >= DEADLINE_S
        if process.poll() is None and (late or hit):  # a run whose server was killed has ended by itself by now
            process.kill()
        output, _ = process.communicate(timeout=DEADLINE_S)
        if fault is not None:
            fault.release.set()
        if hit and kind is not None:
            self.campaign.kinds[kind] += 1
        print(f"job {self.number}: {kind or 'no fault'} {'hit' if hit else 'came too late'}, exit code "
              f"{process.returncode}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
        self.campaign.orphans += len(self.place.wait_empty(30))
        if process.returncode not in (0, -9):
            raise RuntimeError(f"job {self.number} failed:\n{output}")
        return process.returncode == 0

    def _upload(self) -> Any:
        """Of the uploads to come, skip some; hold a shard or a sidecar."""
        skip, end = random.randrange(3), random.choice([".safetensors", ".json"])

        def when(method: str, path: str) -> bool:
            nonlocal skip
            if method != "PUT" or "/shards/" not in path or not path.split("?")[0].endswith(end):
                return False
            skip -= 1
            return skip < 0

        return when

    def _kill_server(self) -> bool:
        for process in self.place.processes():
            if "sglang::scheduler" in " ".join(process.cmdline()):
                process.kill()
                return True
        return False

    def examine(self, reference: Reference) -> None:
        """Compare what is stored with what was planned."""
        campaign = self.campaign
        recipe = load_recipe(str(self.recipe), self.overrides)
        planned = {sample.id: sample for sample in make_plan(recipe).samples}
        store = open_store(recipe.store.uri, endpoint_url=self.proxy.url, region="us-east-1")
        dataset = Dataset.open(store, f"job-{self.number}-v1")
        ids = dataset.sample_ids
        campaign.samples += len(planned)
        campaign.quarantined += len(dataset.manifest.left_out)
        campaign.lost += len(planned.keys() - set(ids) - dataset.manifest.left_out.keys())
        campaign.duplicated += len(ids) - len(set(ids))
        campaign.mislabelled += len(set(ids) - planned.keys())
        for sample_id in set(ids) & planned.keys():
            campaign.mislabelled += not is_right(dataset, planned[sample_id], reference)
        begun = self.events("batch begun")
        campaign.tokens += sum(len(sample) for sample in planned.values())
        campaign.begun_tokens += sum(entry["tokens"] for entry in begun)
        campaign.largest_batch = max([campaign.largest_batch, *(entry["tokens"] for entry in begun)])


def is_right(dataset: Dataset, sample: Sample, reference: Reference) -> bool:
    """Whether a stored sample has its own tokens, mask and states."""
    rows = dataset.read(sample.id)
    if rows.input_ids.tolist() != sample.input_ids or rows.loss_mask.tolist() != sample.loss_mask:
        return False
    states = reference.states(sample.input_ids)
    wanted = [states[f"the output of block {block}"] for block in AFTER_BLOCK]
    found = [*rows.aux.unbind(1), rows.final]
    final = states["the final state after its norm"]
    return all(float(row_distance(x, y).max()) < FAR for x, y in zip(found, [*wanted, final], strict=True))


def make_conversations(path: Path, samples: int) -> None:
    """Chats of one turn, all different."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(samples):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randint(8, 24))) for _ in range(2))
            talk = [("user", f"{number}: {question}?"), ("assistant", answer)]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="go on with new jobs until so many have hit")
    parser.add_argument("--samples", type=int, default=500, help="of a job")
    parser.add_argument("--batch-tokens", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.set_num_threads(1)
    campaign = Campaign(options.faults)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary).resolve()
        home = folder / "here"
        home.mkdir()
        model = make_tiny("llama", folder / "tiny-llama")
        make_conversations(home / "conversations.jsonl", options.samples)
        services = LocalStack(folder / "state")
        stack.callback(services.down)
        services.up()
        proxy = stack.enter_context(fault_proxy(services.environment()["AWS_ENDPOINT_URL"]))
        proxy.server.handle_error = hung_up  # type: ignore[method-assign]
        env = {**services.environment(), "AWS_ENDPOINT_URL": proxy.url}
        stack.enter_context(mock.patch.dict("os.environ", env))
        place = Place(home, env=env)
        sections: dict[str, dict[str, Any]] = {
            "target": {"model_path": str(model)}, "capture": {"after_block": AFTER_BLOCK},
            "regenerate": {"enabled": False}, "extract": {"batch_tokens": options.batch_tokens},
            "evaluate": {"enabled": False}, "server": {"env": {"OMP_NUM_THREADS": "1"}},
            "store": {"uri": "s3://eyas/faults"},
        }  # fmt: skip
        own = tiny_recipe(home, **sections).rename(home / "own.yaml")
        reference = Reference.load(model)
        number = 0
        while campaign.left > 0:
            with ExitStack() as server:
                recipe, kinds = own, ["server", "server", "flow", "uploader"]
                if number % 3:
                    runs_on = server.enter_context(_server(model, folder / f"server-{number}", home / "dumps"))
                    sections["server"] = {"env": {}, "url": runs_on.base_url, "dump_dir": str(home / "dumps")}
                    recipe = tiny_recipe(home, **sections)
                    kinds = ["flow", "uploader"]
                job = Job(place, number, recipe, proxy, campaign)
                job.extract(kinds)
                job.examine(reference)
            number += 1
    rework = campaign.begun_tokens - campaign.tokens
    answer = {
        "faults": campaign.kinds.total(), "by_kind": dict(campaign.kinds), "jobs": number,
        "attempts": campaign.attempts, "samples": campaign.samples, "quarantined": campaign.quarantined,
        "lost": campaign.lost, "duplicated": campaign.duplicated, "mislabelled": campaign.mislabelled,
        "rework_tokens": rework, "tokens": campaign.tokens, "largest_batch_tokens": campaign.largest_batch,
        "rework_within_a_batch_a_fault": rework <= campaign.kinds.total() * campaign.largest_batch,
        "orphans": campaign.orphans,
    }  # fmt: skip
    print(json.dumps(answer))


def hung_up(request: Any, client_address: Any) -> None:
    """A client that is killed in mid-request is no error of the proxy's."""


def _server(model: Path, folder: Path, dumps: Path) -> Any:
    env = {contract.ENV_DUMP_DIR: str(dumps), contract.ENV_AFTER_BLOCK: ",".join(map(str, AFTER_BLOCK))}
    return running_server(model, folder, env=env)


if __name__ == "__main__":
    main()
