# SPDX-License-Identifier: Apache-2.0
"""A development package: what lets verl, SGLang and Megatron run without a GPU, when VERL_PLATFORM=cpu is set."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PTH_FILE = "verl_sync_cpu_stack.pth"


class BuildWithPth(build_py):
    """Adds the ``.pth`` file to the root of the wheel, which becomes site-packages."""

    def run(self) -> None:
        super().run()
        shutil.copyfile(ROOT / PTH_FILE, Path(self.build_lib) / PTH_FILE)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Lists the file too, so that an uninstall removes it."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / PTH_FILE)]


setup(
    name="verl-sync-cpu-stack",
    version="0.0.0",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["cpu_stack"],
    package_dir={"cpu_stack": "."},
    install_requires=["wrapt>=1.14"],
    cmdclass={"build_py": BuildWithPth},
)
