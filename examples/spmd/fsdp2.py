# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and SGLang on the same GPUs, started by torchrun alone.

torchrun --nproc-per-node 2 examples/spmd/fsdp2.py --tp 2
VERL_PLATFORM=cpu torchrun --nproc-per-node 2 examples/spmd/fsdp2.py --tp 2    # without a GPU
"""

from common import parse, run, start
from torch.distributed.fsdp import fully_shard


def main() -> None:
    options = parse()
    device, model = start(options)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    run(options, model, model.config, device)


if __name__ == "__main__":
    main()
