# SPDX-License-Identifier: Apache-2.0
"""Import-only stand-in for ``sgl_kernel``, whose published builds need CUDA.

SGLang imports a few names from it even on a CPU, without ever calling them there. The stand-in offers exactly those:
SGLang probes others with ``try: import``, and would believe that they work.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

PACKAGE = "sgl_kernel"
SUBMODULE = "sgl_kernel.kvcacheio"


def _is_offered(module_name: str, attribute: str) -> bool:
    if attribute.startswith("__"):
        return False
    # Newer SGLang releases import several operators named *_cpu from the package itself.
    return module_name == SUBMODULE or attribute.endswith("_cpu")


def _make_getattr(module_name: str) -> Callable[[str], Callable[..., NoReturn]]:
    def module_getattr(attribute: str) -> Callable[..., NoReturn]:
        if not _is_offered(module_name, attribute):
            raise AttributeError(f"stand-in module {module_name!r} has no attribute {attribute!r}")

        def not_available(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{module_name}.{attribute} needs the real sgl_kernel; this is the CPU stand-in")

        return not_available

    return module_getattr


class StandInLoader(Loader):
    """Fills the stand-in modules: every offered name is a function that raises when called."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the module's creation to the import system."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module a ``__getattr__`` that makes up what is asked for."""
        module.__doc__ = "CPU stand-in of verl_sync_plugin; see cpu_stack.sgl_kernel_standin."
        module.__dict__["__getattr__"] = _make_getattr(module.__name__)


class StandInFinder(MetaPathFinder):
    """Finds the stand-ins. Belongs at the end of ``sys.meta_path``: only what nobody else has gets here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the stand-in package or its submodule, None for any other name."""
        if fullname == PACKAGE:
            return ModuleSpec(fullname, StandInLoader(), origin="stand-in", is_package=True)
        if fullname == SUBMODULE and _parent_is_stand_in():
            return ModuleSpec(fullname, StandInLoader(), origin="stand-in")
        return None


def _parent_is_stand_in() -> bool:
    # A real sgl_kernel without this submodule must stay without it.
    spec = getattr(sys.modules.get(PACKAGE), "__spec__", None)
    return isinstance(getattr(spec, "loader", None), StandInLoader)
