"""Reading speed: a dataset in a local S3 server into packed batches, beside raw reads of the same bytes, in pairs.

    PATH=$PATH:/where/s5cmd/is .venv/bin/python -m benchmarks.streaming_read --gb 2 --read-gb 20

cold   an epoch with an empty cache (fetch, verify, pack) / the same shards downloaded to disk in parallel: by s5cmd
       where it is in PATH, else by boto3's own transfer manager
warm   an epoch from the cache (map, pack) / all bytes of the cached files copied out of a memory map into memory as
       large as two batches: what comes out of a map has to lie somewhere, and batches lie in memory, where each byte is
       read once and written once. `ratio_warm_of_cached` is against the same copy into 16 MB again and again, which
       never leave the processor's cache: half the traffic, and nothing that anybody could hand out.

A ratio is the median over rounds of (raw seconds / our seconds): 1 is as fast as raw. Warm epochs go on until
`--read-gb` have been read; `rss_growth_mb` is how much more memory without a file behind it there is at the end of the
last of them than of the first.

The last line is one JSON object: ratio_cold, ratio_warm, ratio_warm_of_cached, rss_peak_mb, rss_growth_mb, raw,
mb_per_s.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import peak_rss_mb, reset_peak_rss
from benchmarks.synthetic import Shape, commit, pack
from hidden_states.dataset import Dataset
from hidden_states.store import open_store
from hidden_states.store_s3 import S3Store
from hidden_states.stream import SampleStream
from infra.services import embedded_store

BUCKET = "eyas-benchmark"
COPY_BYTES = 16 << 20
BATCH_TOKENS = 8192


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def anonymous_mb() -> float:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def raw_download(dataset: Dataset, url: str, folder: Path) -> str:
    """All shards to `folder`, in parallel; returns by what."""
    store = dataset.store
    assert isinstance(store, S3Store)
    folder.mkdir(parents=True)
    if shutil.which("s5cmd"):
        source = f"s3://{BUCKET}/{store.prefix}/{dataset.name}/shards/*.safetensors"
        command = ["s5cmd", "--endpoint-url", url, "cp", source, f"{folder}/"]
        subprocess.run(command, check=True, env=os.environ | {"AWS_REGION": "us-east-1"}, stdout=subprocess.DEVNULL)
        return "s5cmd"
    for record in dataset.manifest.shards:
        key = f"{store.prefix}/{dataset.key(record)}"
        store.client.download_file(BUCKET, key, str(folder / Path(record.key).name))
    return "boto3"


def raw_mapped(folder: Path, target: Tensor) -> None:
    """Copies every byte of the files out of a memory map, into `target` again and again from its beginning."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        for start in range(0, len(whole), len(target)):
            block = whole[start : start + len(target)]
            target[: len(block)] = block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the dataset, in GB")
    parser.add_argument("--read-gb", type=float, default=20.0, help="bytes to read from the cache, in GB")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of cold reads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, hidden, per_shard = 2048, 2048, 8  # 33.5 MB a sample, 268 MB a shard
    shape = Shape(round(options.gb * 1e9 / (tokens * 4 * hidden * 2)), tokens, hidden, tokens * per_shard)
    with tempfile.TemporaryDirectory() as name, embedded_store(Path(name) / "state", BUCKET) as url:
        folder = Path(name)
        dataset = commit(open_store(f"s3://{BUCKET}/data", endpoint_url=url), pack(shape, folder / "shards"))
        shutil.rmtree(folder / "shards")
        total = dataset.manifest.total_bytes
        raw = ""

        def download() -> None:
            nonlocal raw
            raw = raw_download(dataset, url, folder / "raw")

        def epoch() -> None:
            read = sum(len(batch.input_ids) for batch in stream)
            assert read == dataset.manifest.tokens

        cold: dict[str, list[float]] = {"ours": [], "raw": []}
        for number in range(options.rounds):
            for which in ("ours", "raw") if number % 2 else ("raw", "ours"):
                if which == "raw":
                    cold["raw"].append(timed(download))
                    shutil.rmtree(folder / "raw")
                else:
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                    stream = SampleStream(dataset, batch_tokens=BATCH_TOKENS, cache_dir=folder / "cache")
                    cold["ours"].append(timed(epoch))
            print(f"cold {number}: ours {cold['ours'][-1]:.2f} s, raw {cold['raw'][-1]:.2f} s", flush=True)

        warm: dict[str, list[float]] = {"ours": [], "raw": [], "cached": []}
        small = torch.empty(COPY_BYTES, dtype=torch.uint8)
        large = torch.zeros(2 * BATCH_TOKENS * 4 * hidden * 2, dtype=torch.uint8)
        anonymous = []
        reset_peak_rss()
        for number in range(1, max(2, round(options.read_gb * 1e9 / total)) + 1):
            stream.set_epoch(number)
            warm["ours"].append(timed(epoch))
            anonymous.append(anonymous_mb())
            warm["raw"].append(timed(lambda: raw_mapped(folder / "cache", large)))
            warm["cached"].append(timed(lambda: raw_mapped(folder / "cache", small)))
        rss = peak_rss_mb()

    def ratio(pairs: dict[str, list[float]], raw: str = "raw") -> float:
        return round(statistics.median(r / o for r, o in zip(pairs[raw], pairs["ours"], strict=True)), 3)

    def speed(taken: list[float]) -> float:
        return round(total / 1e6 / statistics.median(taken), 1)

    print(
        json.dumps(
            {
                "ratio_cold": ratio(cold),
                "ratio_warm": ratio(warm),
                "ratio_warm_of_cached": ratio(warm, "cached"),
                "rss_peak_mb": rss,
                "rss_growth_mb": round(anonymous[-1] - anonymous[0], 1),
                "raw": raw,
                "read_gb": round(len(anonymous) * total / 1e9, 2),
                "mb_per_s": {f"{temper}_{who}": speed(taken) for temper, pairs in (("cold", cold), ("warm", warm))
                             for who, taken in pairs.items()},
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
