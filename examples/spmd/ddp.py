# SPDX-License-Identifier: Apache-2.0
"""DDP and SGLang on the same GPUs, started by torchrun alone; every rank has an engine of its own unless ``--tp`` says
otherwise.

    torchrun --nproc-per-node 2 examples/spmd/ddp.py
    VERL_PLATFORM=cpu torchrun --nproc-per-node 2 examples/spmd/ddp.py    # without a GPU
"""

from common import parse, run, start
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = parse()
    device, model = start(options)
    replica = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    run(options, replica, model.config, device)


if __name__ == "__main__":
    main()
