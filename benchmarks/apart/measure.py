# SPDX-License-Identifier: Apache-2.0
"""Times the transfer from verl's trainer on one GPU into an SGLang engine on another, beside verl's own and a peer's.

``python -m benchmarks.apart --case transfer-dense-7b-apart-2gpu --model 7b --out results.json``

Each variant has an engine of its own, which starts with other weights. ``plugin`` and ``stock`` (verl's backend
``nccl``) get the calls that verl makes around every sync of a separate rollout; ``awex`` is another project's
(``peer.py``). SGLang's own checksums of all parameters have to be the same behind all.

With ``--hosts 2`` trainer and rollout count as processes of two hosts, which NCCL connects by sockets of this machine;
where one GPU is visible they share it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import floor, gauges, link, machine, models, schema
from benchmarks.apart import peer
from benchmarks.command import command_line
from benchmarks.soak import apart, trainers
from benchmarks.transfer import measure as transfer
from benchmarks.transfer import rig
from benchmarks.transfer.peer import digest

TRAINERS = ("megatron", "fsdp2")
VARIANTS = ("plugin", "stock", peer.NAME)
HOSTS = ("trainer-host", "rollout-host")
WAIT_SECONDS = 30.0
IDLE_BYTES = 2 << 30


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", choices=sorted(models.SHAPES), required=True)
    parser.add_argument("--trainer", choices=TRAINERS, default=TRAINERS[0])
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="FSDP2 only")
    parser.add_argument("--bucket-mb", type=int, default=2048)
    parser.add_argument("--variants", default=f"{VARIANTS[0]},{peer.NAME}")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per variant")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--delivery", choices=("auto", "broadcast"), default="auto", help="of the plugin, on one host")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder for model and log; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"unknown variants {sorted(unknown)}; choose from {', '.join(VARIANTS)}")
    if args.variants[0] != VARIANTS[0]:
        parser.error(f"--variants: {VARIANTS[0]} comes first, which tells how much is sent")
    for name in set(args.variants) - {VARIANTS[0]} if args.device != "cuda" else ():
        parser.error(f"--variants {name}: with --device cuda")
    if args.delivery != "auto" and (args.hosts > 1 or args.delivery not in args.case):
        parser.error(f"--delivery {args.delivery}: with --hosts 1, in a case whose name says so")
    if peer.NAME in args.variants and args.hosts > 1:
        parser.error(f"--variants {peer.NAME}: with --hosts 1")
    if peer.NAME in args.variants and args.trainer != TRAINERS[0]:
        parser.error(f"--variants {peer.NAME}: knows no other trainer than {TRAINERS[0]}")
    return args


class Peer:
    """What ``transfer.measure`` asks of a rig, of the peer.

    Attributes:
        server: whose tokens tell of the weights: the peer, too, for it has the engine.
        tensors: as many as the plugin sent.
        nbytes: likewise.
    """

    def __init__(self, trained: Any, folder: Path, sent: tuple[int, int]) -> None:
        self.server = peer.Awex(trained, folder)
        self.tensors, self.nbytes = sent
        self.other_weights = trainers.Turned(trained).turn
        self.sync, self.digest, self.close = self.server.sync, self.server.digest, self.server.close


class Plugin(trainers.Trained):
    """Likewise, of the plugin."""

    def digest(self) -> str:
        return digest(self.server)

    def close(self) -> None:
        super().close()
        self.server.stop()


class Stock(Plugin):
    """Likewise, of verl's own backend, which does not say how much it sent."""

    def sync(self) -> dict[str, Any]:
        return self.way.sync()


def bench(
    variant: str, args: argparse.Namespace, trained: Any, folder: Path, work: Path, sent: tuple[int, int]
) -> Peer | Plugin:
    """A variant with its engine; ``sent``: how many tensors and bytes, where it does not say so itself."""
    from benchmarks.transfer.server import Server

    if variant == peer.NAME:
        return Peer(trained, folder, sent)
    where = apart.second_gpu(args.device)
    server = Server(folder, args.device, work / f"{variant}-server.log", variables=where)
    given = (trainers.SEPARATE + args.trainer, trained, server, args.bucket_mb, work, args.device)
    host = HOSTS[1] if args.hosts > 1 else ""
    if variant == VARIANTS[0]:
        return Plugin(*given, host=host, delivery=args.delivery if args.hosts == 1 else "")
    made = Stock(*given, stock=True, host=host)
    made.tensors, made.nbytes = sent
    return made


def compare(args: argparse.Namespace, trained: Any, folder: Path, work: Path) -> None:
    """Measures every variant, and writes the result after each.

    Raises:
        RuntimeError: a variant left other weights in its engine than the first one.
    """
    apart_gpus = args.device == "cuda" and gauges.gpus() > 1
    rate = link.bytes_per_second() if apart_gpus and args.hosts == 1 else None
    runs: list[dict[str, Any]] = []
    sent = (0, 0)
    for variant in args.variants:
        print(f"[{args.case}] {variant}", flush=True)
        with closing(bench(variant, args, trained, folder, work, sent)) as made:
            samples = transfer.measure(made, made, args.repeat)
            samples["digest"] = made.digest() if args.device == "cuda" else ""
            sent = (made.tensors, made.nbytes)
            run = transfer.run_of(args, variant, args.bucket_mb, samples, made)
        # every byte comes over the link between the two GPUs
        lowest = made.nbytes / floor.LINK_BYTES_PER_SECOND
        run["settings"].update(trainer=args.trainer, rollout_gpus=1, floor_seconds=lowest, hosts=args.hosts)
        run["settings"].update(delivery=args.delivery)
        runs.append(run)
        # Greedy tokens of random weights may differ between engines that differ in their kernels
        what = "digest" if args.device == "cuda" else "tokens"
        if samples[what] != runs[0]["samples"][what]:
            raise RuntimeError(f"{variant}: the engine's {what}: {samples[what]}, not {runs[0]['samples'][what]}")
        result = machine.result(args.case, command_line("apart", args), runs)
        if rate is not None:
            result["machine"]["link_bytes_per_second"] = rate
        assert not schema.problems(result), schema.problems(result)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        _wait_for_memory()


def _wait_for_memory() -> None:
    """An engine that has ended gives its device memory back with a delay; the next one counts what is free."""
    if gauges.gpus() == 1:  # the trainer's memory, too
        time.sleep(5)
        return
    end = time.monotonic() + WAIT_SECONDS
    while (gauges.device_used_bytes(1) or 0) > IDLE_BYTES and time.monotonic() < end:
        time.sleep(0.5)


def main(argv: list[str] | None = None) -> int:
    """Measures one case; raises when a variant fails."""
    args = arguments(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="sync-apart-"))).resolve()
    if peer.NAME in args.variants:
        peer.prepare()
    if args.hosts > 1:
        apart.count_as_host(HOSTS[0])
    with rig.one_rank(work, args.device):
        folder = work / args.model
        trained = trainers.engine(trainers.SEPARATE + args.trainer, args.model, folder, args.device, args.trainer_dtype)
        compare(args, trained, folder, work)
    return 0
