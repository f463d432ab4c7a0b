"""Two hosts at one dataset with nothing in common but the bucket: own folders, servers, Prefects and GPUs."""

import json
import shutil
from pathlib import Path

import pytest

from hidden_states.dataset import Dataset
from hidden_states.store import open_store
from tests.flows.operated import events
from tests.flows.runs import Place, tiny_recipe


@pytest.mark.long
def test_two_hosts_share_an_extraction_through_the_bucket_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    places = []
    for name in ("host-a", "host-b"):
        folder = (tmp_path / name).resolve()
        folder.mkdir()
        if places:  # the same target, as every host has it
            shutil.copytree(places[0].folder / "tiny-deepseek-v3", folder / "tiny-deepseek-v3")
        tiny_recipe(
            folder, store={"uri": f"file://{store}"}, regenerate={"max_new_tokens": 24}, extract={"batch_tokens": 160},
            server={"max_in_flight_requests": 1, "env": {"OMP_NUM_THREADS": "1"}},
        )  # fmt: skip
        places.append(Place(folder, {"EYAS_GPU_HOST": name, "OMP_NUM_THREADS": "1"}))

    running = [place.start("extract", "recipe.yaml") for place in places]
    told = [process.communicate(timeout=400)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], told

    assert [path.name for path in store.glob("tiny-v*")] == ["tiny-v1"]
    begun = [[e["batch"] for e in events(place.folder, "batch begun")] for place in places]
    stored = Dataset.open(open_store(f"file://{store}"), "tiny-v1").manifest
    assert set(begun[0]) | set(begun[1]) == {shard.batch for shard in stored.shards}
    twice = set(begun[0]) & set(begun[1])
    assert all(begun) and len(twice) <= len(stored.shards) / 2, "what was in work when the other came to it, no more"
    summaries = [place.summaries()[0] for place in places]
    assert summaries[0]["manifest_digest"] == summaries[1]["manifest_digest"]
    replies = [summary["replies_generated"] for summary in summaries]
    assert all(replies) and sum(replies) < 1.75 * 40, replies
    code, answer = places[0].run("datasets", "verify", f"file://{store}/tiny-v1", "--json")
    assert code == 0, answer
    assert json.loads(answer)["problems"] == []
