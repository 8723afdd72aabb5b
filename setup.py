# SPDX-License-Identifier: Apache-2.0
"""Package metadata. Everything that other tools need is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Read ``__version__`` without importing the package."""
    text = (ROOT / "verl_sync_plugin" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("verl_sync_plugin/__init__.py defines no __version__")
    return found.group(1)


def read_requirements(name: str) -> list[str]:
    """Read the pins of ``requirements/<name>.txt``."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


setup(
    name="verl-sync-plugin",
    version=read_version(),
    description="Takes over the weight sync of verl: a fast, verified update from the trainer to SGLang",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["verl_sync_plugin", "verl_sync_plugin.*"]), "verl_sync_plugin.configs"],
    package_dir={"verl_sync_plugin.configs": "configs"},
    package_data={"verl_sync_plugin.configs": ["*.yaml", "*/*.yaml"]},
    # verl, torch and SGLang are expected in the environment: pinning them here would replace working builds.
    install_requires=["wrapt>=1.14", "hydra-core>=1.3", "omegaconf>=2.3", "msgspec>=0.18"],
    extras_require={
        "verl": ["verl>=0.9,<0.11"],
        "sglang": ["sglang>=0.5.12"],
        "megatron": ["megatron-core>=0.18", "megatron-bridge>=0.5.1"],
        "report": ["matplotlib>=3.8"],  # draws the page of verl-sync report
        # Without SGLang and torchvision: scripts/setup_venv.sh installs these without their CUDA dependencies.
        "cpu-test": read_requirements("cpu"),
    },
    entry_points={
        "verl.plugins": ["verl_sync_plugin = verl_sync_plugin.plugin"],
        "console_scripts": ["verl-sync = verl_sync_plugin.cli:main"],
    },
)
