"""What a benchmark must know of the machine it runs on: its matrix rate, and a process's peak memory."""

import resource
import time
from pathlib import Path

import torch

from drafter.product import forward_product


def matrix_rate(dtype: torch.dtype = torch.float32, size: int = 2048, rounds: int = 3) -> float:
    """Operations a second of a square matrix product with torch's current threads: the best of a few rounds, by the
    faster of the two libraries that the drafter uses."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(rounds + 1):
        for product in (lambda: a @ b.T, lambda: forward_product(a, b)):
            began = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def reset_peak_rss() -> None:
    """Starts the peak of `peak_rss_mb` anew; Linux only, elsewhere the peak is the process's whole life's."""
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")


def peak_rss_mb() -> float:
    """Largest resident memory since the last reset, in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return round(int(line.split()[1]) / 1024, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
