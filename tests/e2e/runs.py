# SPDX-License-Identifier: Apache-2.0
"""Runs verl's real ``main_ppo`` in processes of its own and reads what it left."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

RUN_SH = Path(__file__).resolve().parents[2] / "examples" / "cpu_quickstart" / "run.sh"
MARK = "SYNC_TEST_RUN"  # in the environment of every process of a run, and of no other
TIMEOUT_SECONDS = 900.0  # a run takes 75 to 130 s on two cores
# A scheduler without work would keep a core busy
IDLE = "+actor_rollout_ref.rollout.engine_kwargs.sglang.sleep_on_idle=True"
GRACE_SECONDS = 180.0  # for Ray's processes to follow their driver; on a busy machine 60 s were too few

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
# verl's default: the engine starts with random weights, so only a sync can make it sample like the trainer
DUMMY = f"{ROLLOUT}.load_format=dummy"
SMALL_BUCKETS = f"{ROLLOUT}.update_weights_bucket_megabytes=1"
SHORT_WAIT = f"{ROLLOUT}.custom.sync.timeout_seconds=90"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Setup:
    """Lists what differs from the quickstart."""

    overrides: tuple[str, ...] = ()  # of Hydra, after the quickstart's own
    ranks: int = 1  # of the trainer
    steps: int = 1
    model: Path | None = None  # the quickstart's
    change: str = ""  # one of e2e/changes.py, made in each process of verl
    path: tuple[str, ...] = ()  # folders that come first in PYTHONPATH
    megatron: tuple[int, int, int] | None = None  # tensor, pipeline and expert parallel size; FSDP2 without
    replicas: int = 1  # rollout engines, among which the ranks are shared out
    main: str = "verl.trainer.main_ppo"


@dataclass(frozen=True)
class Line:
    """One line of output without colours, and when it came, in seconds since the start."""

    seconds: float
    text: str


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: Path
    returncode: int  # of run.sh, so of main_ppo, unless a step is missing or it had to be killed
    seconds: float
    lines: tuple[Line, ...]  # stdout and stderr of the driver; Ray forwards those of all workers
    logged: dict[int, dict[str, Any]]  # metrics by step, from verl's file logger
    reports: tuple[dict[str, Any], ...]  # the lines of VERL_SYNC_REPORT_FILE
    leftovers: tuple[str, ...]  # command lines of processes that outlived the run and had to be killed

    @cached_property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @property
    def tail(self) -> str:
        """The end of the output, for the message of a failed assertion."""
        return self.text[-6000:]

    def matching(self, pattern: str) -> list[Line]:
        """The lines in which a regular expression is found."""
        return [line for line in self.lines if re.search(pattern, line.text)]


Play = Callable[..., Run]


def main_ppo(setup: Setup, folder: Path) -> Run:
    """Runs a main of verl's in an empty folder to its end; once more where the port that verl found was taken."""
    run = _run(setup, folder)
    if run.returncode and "EADDRINUSE" in run.text and not run.reports:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run = _run(setup, folder)
    return run


def _run(setup: Setup, folder: Path) -> Run:
    command = ["bash", str(RUN_SH), 'trainer.logger=["console","file"]', IDLE, *setup.overrides]
    started = time.monotonic()
    process = subprocess.Popen(
        command, env=_environment(setup, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(TIMEOUT_SECONDS, lambda: _end(_members(folder)))
    timer.start()
    try:
        assert process.stdout is not None
        lines = tuple(Line(time.monotonic() - started, _ANSI.sub("", text.rstrip())) for text in process.stdout)
        returncode = process.wait()
        seconds = time.monotonic() - started
    finally:
        timer.cancel()
        leftovers = _end(_outliving(folder))
    logged = {entry["step"]: entry["data"] for entry in _json_lines(folder / "metrics.jsonl")}
    reports = tuple(_json_lines(folder / "reports.jsonl"))
    return Run(folder, returncode, seconds, lines, logged, reports, leftovers)


def _environment(setup: Setup, folder: Path) -> dict[str, str]:
    environment = {
        **os.environ,
        MARK: str(folder),
        "PYTHON": sys.executable,
        "WORK": str(folder / "work"),
        "N_GPUS": str(setup.ranks),
        "ROLLOUT_TP": str(setup.ranks // setup.replicas),
        "STEPS": str(setup.steps),
        "MAIN": setup.main,
        "SHOW": "all",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VERL_SYNC_REPORT_FILE": str(folder / "reports.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": "e2e.changes" if setup.change else "",
        "SYNC_TEST_CHANGE": setup.change,
        "PYTHONPATH": os.pathsep.join(filter(None, (*setup.path, os.environ.get("PYTHONPATH")))),
    }
    if setup.megatron is not None:
        tp, pp, ep = setup.megatron
        environment.update(STRATEGY="megatron", TRAIN_TP=str(tp), TRAIN_PP=str(pp), TRAIN_EP=str(ep))
    if setup.model is not None:
        environment["MODEL"] = str(setup.model)
    return environment


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _members(folder: Path) -> list[psutil.Process]:
    """The processes of one run; Ray's daemons are nobody's children, so the environment tells."""
    every = psutil.process_iter(["environ"])
    return [process for process in every if (process.info["environ"] or {}).get(MARK) == str(folder)]


def _outliving(folder: Path) -> list[psutil.Process]:
    """The processes of a run that are still there some time after its end."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (members := _members(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return members


def _end(processes: Sequence[psutil.Process]) -> tuple[str, ...]:
    """Kills processes; returns their command lines."""
    ended = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            ended.append(" ".join(process.cmdline())[:200])
            process.kill()
    return tuple(ended)
