# SPDX-License-Identifier: Apache-2.0
"""Memory that a process of its own takes from every device, so that less is left, as on a smaller device.

``python -m benchmarks.memory.ballast --gb 61 --gpus 2`` holds it until its standard input ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READY = "ballast is held"


@contextmanager
def held(gb: float, gpus: int) -> Iterator[None]:
    """Holds ``gb`` times 1e9 bytes of each of the first ``gpus`` devices.

    Raises:
        RuntimeError: the memory could not be had.
    """
    if not gb:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.memory.ballast", "--gb", str(gb), "--gpus", str(gpus)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline().strip() != READY:
                raise RuntimeError(f"{gb} GB of {gpus} devices could not be taken")
            yield
        finally:
            process.stdin.close()
            process.wait(30)


def main() -> None:
    """Takes the memory and keeps it."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    args = parser.parse_args()
    size = int(args.gb * 1e9)
    kept = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}") for index in range(args.gpus)]
    print(READY, flush=True)
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
