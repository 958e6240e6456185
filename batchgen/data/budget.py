"""`--max-output-bytes`: what a job may write, held against what it has written."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.data.work import WorkFolder
from batchgen.errors import OutputError
from batchgen.units import format_size

__all__ = ["OutputBudget"]


@dataclass(slots=True)
class OutputBudget:
    """Bytes of results and hidden states together, of which `used` are committed; `limit` None allows any."""

    limit: int | None
    used: int = 0

    @classmethod
    def of(cls, work: WorkFolder, limit: int | None) -> OutputBudget:
        """The budget of a job whose committed parts stand in `work`."""
        if limit is None:
            return cls(None)
        files = [*work.part_files(), *(work.states.glob("*.states") if work.states.is_dir() else ())]
        return cls(limit, sum(file.stat().st_size for file in files))

    def hold(self, size: int) -> None:
        """Refuse `size` further bytes if they do not fit.

        Raises:
            OutputError: they do not.
        """
        if self.limit is not None and self.used + size > self.limit:
            raise OutputError(
                f"the output would exceed --max-output-bytes {format_size(self.limit)}: {format_size(self.used)} are "
                "committed and kept. With a higher limit the same command goes on."
            )

    def spend(self, size: int) -> None:
        """Count committed bytes."""
        self.used += size
