"""batchgen in Ray Data: `BatchgenStage` for `Dataset.map_batches`. Imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from batchgen.errors import UsageError
from batchgen.library_settings import short_openmp_spins

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "BatchgenStage"]

COLUMNS: Final = (
    "prompt_index", "sample_index", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error",
)  # fmt: skip
"""Columns of the results that a stage adds by default."""


class BatchgenStage:
    """Generates the rows of Arrow batches: a callable class for `Dataset.map_batches(..., batch_format="pyarrow")`.

    A row means what it means in an input file of `batchgen run`. Each batch is a job, whose results do not depend on
    others.

    Args:
        model: model folder, or id in the local Hugging Face cache of each node.
        columns: columns of the results to add.
        prefix: put before their names.
        work_dir: folder where each batch commits its finished rows, so that a batch which Ray gives again is not
            computed again, nor a row that kills its process tried for ever. None: a temporary one.
        options: options of `batchgen run` for rows, model, sampling and engine, with `_` in their names.

    Raises:
        UsageError: an argument is unknown or wrong.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        columns: Sequence[str] = COLUMNS,
        prefix: str = "generated_",
        work_dir: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        with short_openmp_spins():
            from batchgen.ray.batches import BatchJobs  # imports torch, which the process that plans does without

        self._jobs = BatchJobs(model, tuple(columns), work_dir, options)
        self._names = {name: prefix + name for name in columns}

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The rows of a batch, each as often as it has samples, with the columns of the results.

        Raises:
            UsageError: it is not an Arrow table, or has a column that would be added.
        """
        import pyarrow as pa

        if not isinstance(batch, pa.Table):
            raise UsageError(
                f'a batch is of the type {type(batch).__name__}; call map_batches with batch_format="pyarrow"'
            )
        if clash := next((name for name in self._names.values() if name in batch.column_names), None):
            raise UsageError(f"the column `{clash}` would be added, but the rows have it; give another `prefix`")
        results = self._jobs.run(batch)
        rows, made = results["row_index"].to_pylist(), batch
        if rows != [*range(batch.num_rows)]:  # slices, since Arrow cannot select rows of some types
            made = pa.concat_tables(batch.slice(row, 1) for row in rows)
        for name, added in self._names.items():
            made = made.append_column(added, results[name])
        return made
