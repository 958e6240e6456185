"""`--max-output-bytes`: limit on the bytes that a job writes."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.data.files import files_in, size_of
from batchgen.data.store.work_folder import WorkFolder
from batchgen.errors import OutputError
from batchgen.request.printable import format_size


@dataclass(slots=True)
class OutputBudget:
    """Limit on the bytes of results and hidden states together, and the bytes committed so far; None: no limit."""

    limit: int | None
    used: int = 0

    @classmethod
    def for_work(cls, work: WorkFolder, limit: int | None) -> OutputBudget:
        """The budget of a job, with the parts committed in `work` counted as used."""
        if limit is None:
            return cls(None)
        files = [*work.part_files(), *files_in(work.states, "*.states")]
        return cls(limit, sum(map(size_of, files)))

    def check(self, size: int) -> None:
        """Check that `size` more bytes fit.

        Raises:
            OutputError: they exceed the limit.
        """
        if self.limit is not None and self.used + size > self.limit:
            raise OutputError(
                f"the output would exceed --max-output-bytes {format_size(self.limit)}: {format_size(self.used)} are "
                "committed and kept. To continue, raise the limit and run the same command again."
            )

    def add(self, size: int) -> None:
        """Count committed bytes."""
        self.used += size
