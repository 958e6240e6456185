"""Hook of the build: compiles the CPU kernels into a wheel for Linux on x86-64, or for an editable installation."""

from __future__ import annotations

import platform
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface):
    """Compiles the kernels. Without a compiler the wheel has none: they are compiled where it runs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files of a wheel are collected."""
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        sys.path.insert(0, self.root)
        from batchgen.kernels.cpu.build import VARIANTS, CompilerMissing, build_ready, variants

        editable = version == "editable"
        try:
            build_ready(variants() if editable else VARIANTS)
        except (CompilerMissing, OSError) as problem:
            self.app.display_warning(f"The CPU kernels are not compiled: {problem}")
            return
        if not editable:
            build_data["artifacts"].append("/batchgen/kernels/cpu/ready/*.so")
            # Of any Python, but of this system: it is not examined for the C libraries of others (manylinux).
            build_data.update(pure_python=False, tag="py3-none-linux_x86_64")
