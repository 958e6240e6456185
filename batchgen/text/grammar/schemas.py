"""Translations of a JSON Schema that a grammar compiler enforces.

Either every text that a translation allows satisfies the schema, or the error names the keyword that prevents it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.text.grammar.guidance_schemas import GuidanceWriter
from batchgen.text.grammar.keywords import Json
from batchgen.text.grammar.schema_writer import SchemaWriter
from batchgen.text.grammar.validation import Schema
from batchgen.text.grammar.xgrammar_schemas import XgrammarWriter

Backend = Literal["xgrammar", "llguidance"]
WRITERS: dict[Backend, type[SchemaWriter]] = {"xgrammar": XgrammarWriter, "llguidance": GuidanceWriter}
"""Grammar compiler -> translator of schemas for it, the preferred one first."""


def enforceable_schemas(text: str, field: str, *, lenient: bool = False) -> Iterator[tuple[Backend, Json]]:
    """Yield the schemas to compile for `text` and the compilers for them, the first choice first.

    Use the first that compiles. A structural tag is for xgrammar alone.

    Args:
        text: JSON text of a schema.
        field: name of its field, for messages.
        lenient: where no compiler enforces the whole schema, leave out what it does not enforce.

    Raises:
        RowError: `invalid_grammar`: the text is not a valid schema; `unsupported_schema_keyword`: a keyword cannot be
            enforced, or nothing that was yielded compiles.
    """
    schema = Schema.parse(text, field)
    backends: list[Backend] = ["xgrammar"] if field == "structural_tag" else list(WRITERS)
    refusal: RowError | None = None
    for backend in backends:
        try:
            yield backend, WRITERS[backend](schema, field, lenient=False).write()
        except RowError as error:
            if error.info.code != ErrorCode.UNSUPPORTED_SCHEMA_KEYWORD:
                raise
            refusal = error
    if lenient:
        for backend in reversed(backends):
            yield backend, WRITERS[backend](schema, field, lenient=True).write()
    if refusal is not None:
        raise refusal
