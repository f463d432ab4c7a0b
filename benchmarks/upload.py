"""Upload speed: our shards into a local S3 server, beside the ready-made clients that are installed, in pairs.

    PATH=$PATH:/where/s5cmd/is .venv/bin/python -m benchmarks.upload --gb 4

Every round takes another part of the shards and lets each contender upload it to a place of its own, in rotating order:
ours (conditional multipart upload, proved after arrival, one shard after the other), each of s5cmd, rclone and the AWS
CLI that is in PATH with its own defaults, and a naive loop that puts one object a sample. A ratio is the median over
rounds of (contender's seconds / our seconds): above 1 we are faster.

The last line is one JSON object: ratio_vs_best_client, best_client, ratio_vs_naive, rss_peak_mb (ours), mb_per_s.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import peak_rss_mb, reset_peak_rss
from benchmarks.synthetic import Shape, pack
from hidden_states.shard_layout import ShardInfo
from hidden_states.store import open_store
from hidden_states.store_s3 import S3Store
from infra.services import embedded_store

BUCKET = "eyas-benchmark"
Contender = Callable[[list[ShardInfo], str], None]


def ready_made(url: str) -> dict[str, Contender]:
    """The clients in PATH, each with its own settings."""
    rclone = {
        "RCLONE_CONFIG_B_TYPE": "s3", "RCLONE_CONFIG_B_PROVIDER": "Other", "RCLONE_CONFIG_B_ENV_AUTH": "true",
        "RCLONE_CONFIG_B_ENDPOINT": url, "RCLONE_CONFIG_B_REGION": "us-east-1", "RCLONE_CONFIG": "/dev/null",
    }  # fmt: skip
    commands: dict[str, list[str]] = {
        "s5cmd": ["s5cmd", "--endpoint-url", url, "cp", "{folder}/", "s3://{bucket}/{prefix}/"],
        "rclone": ["rclone", "copy", "{folder}", "b:{bucket}/{prefix}"],
        "aws": [
            "aws",
            "--endpoint-url",
            url,
            "s3",
            "cp",
            "--recursive",
            "--quiet",
            "{folder}",
            "s3://{bucket}/{prefix}/",
        ],
    }

    def contender(command: list[str]) -> Contender:
        def upload(infos: list[ShardInfo], prefix: str) -> None:
            with tempfile.TemporaryDirectory() as folder:  # of hard links: clients take whole folders
                for info in infos:
                    assert info.path is not None
                    os.link(info.path, Path(folder) / info.path.name)
                filled = [part.format(folder=folder, bucket=BUCKET, prefix=prefix) for part in command]
                env = os.environ | rclone | {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
                subprocess.run(filled, check=True, env=env, stdout=subprocess.DEVNULL)

        return upload

    return {name: contender(command) for name, command in commands.items() if shutil.which(name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="bytes of shards, in GB")
    parser.add_argument("--rounds", type=int, default=4, help="parts they are uploaded in")
    options = parser.parse_args()
    tokens, hidden, per_shard = 2048, 2048, 8  # 33.5 MB a sample, 268 MB a shard
    shape = Shape(round(options.gb * 1e9 / (tokens * 4 * hidden * 2)), tokens, hidden, tokens * per_shard)
    with tempfile.TemporaryDirectory() as name, embedded_store(Path(name) / "state", BUCKET) as url:
        infos = pack(shape, Path(name) / "shards")
        store = open_store(f"s3://{BUCKET}/ours", endpoint_url=url)
        assert isinstance(store, S3Store)
        store.capabilities()
        rss = 0.0

        def ours(infos: list[ShardInfo], prefix: str) -> None:
            nonlocal rss
            reset_peak_rss()
            for info in infos:
                assert info.path is not None
                store.put_file(f"{prefix}/{info.path.name}", info.path, info.digest, if_none_match=True)
            rss = max(rss, peak_rss_mb())

        def naive(infos: list[ShardInfo], prefix: str) -> None:
            for info in infos:
                assert info.path is not None
                data = info.path.read_bytes()
                size = len(data) // len(info.samples)
                for entry in range(len(info.samples)):
                    body = data[entry * size : (entry + 1) * size]
                    key = f"naive/{prefix}/{info.batch_id}-{entry}"
                    store.client.put_object(Bucket=BUCKET, Key=key, Body=body)

        clients = ready_made(url)
        contenders: dict[str, Contender] = {"ours": ours, "naive": naive, **clients}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        parts = [infos[number :: options.rounds] for number in range(options.rounds)]
        for number, part in enumerate(parts):
            order = list(contenders)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                began = time.perf_counter()
                contenders[name](part, f"{name}-{number}")
                seconds[name].append(time.perf_counter() - began)
            print(f"round {number}: " + ", ".join(f"{n} {s[-1]:.1f} s" for n, s in seconds.items()), flush=True)

    def ratio(name: str) -> float:
        return round(statistics.median(t / o for t, o in zip(seconds[name], seconds["ours"], strict=True)), 3)

    ratios = {name: ratio(name) for name in clients}
    best = min(ratios, key=lambda name: ratios[name], default=None)
    total = sum(info.bytes for info in infos) / 1e6
    print(
        json.dumps(
            {
                "ratio_vs_best_client": ratios[best] if best else None,
                "best_client": best,
                "ratios": ratios,
                "ratio_vs_naive": ratio("naive"),
                "rss_peak_mb": rss,
                "mb_per_s": {name: round(total / sum(taken), 1) for name, taken in seconds.items()},
                "gb": round(total / 1e3, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
