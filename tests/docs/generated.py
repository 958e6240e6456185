"""The generated parts of the documentation: `python -m tests.docs.generated` writes them, a test compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.docs import results_tables
from tests.gpu import table as gpu_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "batchgen" / "docs"


@dataclass(frozen=True, slots=True)
class Part:
    """The text between a page's markers `<!-- NAME begin -->` and `<!-- NAME end -->`."""

    page: Path
    make: Callable[[], str]
    name: str

    def expected(self) -> str:
        """The page's text with the part generated again."""
        begin, end = f"<!-- {self.name} begin -->\n", f"<!-- {self.name} end -->"
        head, rest = self.page.read_text(encoding="utf-8").split(begin)
        return f"{head}{begin}{self.make()}{end}{rest.split(end)[1]}"


PARTS = (
    Part(ROOT / "README.md", results_tables.short_table, "results"),
    Part(DOCS / "benchmarks.md", results_tables.full_tables, "results"),
    Part(DOCS / "gpu-check.md", lambda: gpu_table.markdown(gpu_table.stored()), "goals"),
)


def main() -> None:
    """Write every part."""
    for part in PARTS:
        part.page.write_text(part.expected(), encoding="utf-8")


if __name__ == "__main__":
    main()
