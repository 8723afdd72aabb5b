# SPDX-License-Identifier: Apache-2.0
"""What the link between two GPUs carries: the second of those that are visible reads from the first.

``python -m benchmarks.link`` prints bytes per second, of the best of ten copies by the driver.
"""

from __future__ import annotations

import subprocess
import sys

NBYTES = 1 << 30
COPIES = 10


def bytes_per_second() -> int | None:
    """The rate, measured in a process of its own, whose device memory goes back; None where it could not be had."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.link"], capture_output=True, text=True, timeout=120)
    if done.returncode:
        print(f"the link was not measured: {done.stderr.strip()[-300:]}", file=sys.stderr, flush=True)
        return None
    return int(done.stdout.split()[-1])


def main() -> None:
    """Prints the rate."""
    import torch

    source = torch.ones(NBYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(NBYTES, dtype=torch.uint8, device="cuda:1")
    seconds = []
    with torch.cuda.device(1):
        for _ in range(COPIES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    print(int(NBYTES / min(seconds)))


if __name__ == "__main__":
    main()
