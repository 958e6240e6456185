"""The generated parts of the documentation: `python -m tests.docs.generated` writes them, a test compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.docs import results_tables
from tests.gpu import table as gpu_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "batchgen" / "docs"


def recipe(name: str, fence: str) -> str:
    """A file of `configs/recipes` as a block with this first line."""
    return f"```{fence}\n{(ROOT / 'configs' / 'recipes' / name).read_text(encoding='utf-8')}```\n"


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
    Part(ROOT / "README.md", partial(recipe, "slurm-array.sh", "sh slurm-array.sh"), "slurm"),
    Part(ROOT / "README.md", partial(recipe, "Makefile", "makefile Makefile"), "make"),
    Part(DOCS / "sharding.md", partial(recipe, "slurm-array.sh", "sh slurm-array.sh"), "slurm"),
    Part(DOCS / "sharding.md", partial(recipe, "slurm-submit.sh", "sh needs=slurm"), "submit"),
    Part(DOCS / "sharding.md", partial(recipe, "Snakefile", "snakemake"), "snakemake"),
    Part(DOCS / "sharding.md", partial(recipe, "github-actions.yml", "yaml"), "actions"),
    Part(DOCS / "benchmarks.md", results_tables.full_tables, "results"),
    Part(DOCS / "gpu-check.md", lambda: gpu_table.markdown(gpu_table.stored()), "goals"),
)


def main() -> None:
    """Write every part."""
    for part in PARTS:
        part.page.write_text(part.expected(), encoding="utf-8")


if __name__ == "__main__":
    main()
