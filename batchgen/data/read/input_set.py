"""Stream of the rows of all inputs, in order: `open_inputs(find_inputs(paths)).rows()`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from batchgen.config.units import STDIN
from batchgen.config.urls import shown_url
from batchgen.data.read.input_files import FoundInput, InputFile, describe_input
from batchgen.data.read.input_paths import partitions_of, unreadable
from batchgen.data.read.pieces import RowFilter
from batchgen.data.read.selection import Selection
from batchgen.errors import ErrorCode, RowError, UsageError, row_error
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.printable import encodable, printable
from batchgen.request.rows.other_rows import fields_there
from batchgen.request.rows.raw_row import RawRow
from batchgen.request.rows.row_ids import given_id
from batchgen.tables.text_fields import conversation

SOURCE_COLUMNS = ("source_file", "source_line")
"""Carried fields of `--include-source`: the file as the user names it, and the line, or row, in it."""
_RENDERED_ROWS = 32
"""Rows whose prompts a template makes at once."""
_SHOWN_FIELDS = 256
"""Most fields of the rows that are remembered for a message."""


class NamedFields:
    """The fields that options name, until a column or a row has them."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """`options`: name of a field -> the option that names it."""
        self._missing = dict(options)
        self._there: dict[str, None] = {}
        """Fields that the input has, in the order in which they were found."""

    def __bool__(self) -> bool:
        """Whether a field has not been found yet."""
        return bool(self._missing)

    def add(self, names: Collection[str]) -> None:
        """Add the names of columns, or of the fields of a row."""
        for name in [name for name in self._missing if name in names]:
            del self._missing[name]
        if len(self._there) < _SHOWN_FIELDS:
            self._there.update(dict.fromkeys(names))

    def problems(self, whose: str) -> list[tuple[str, str]]:
        """(option, message) of each field that is missing, unless no row could be read. `whose`: what was read."""
        there = [*self._there]
        return [
            (option, f"{whose} has no field `{printable(name)}`, which {option} names; {fields_there(there, name)}")
            for name, option in (self._missing.items() if there else ())
        ]


def open_inputs(inputs: Iterable[FoundInput], *, include_source: bool = False) -> InputSet:
    """Hash the inputs, in order. `include_source`: as in `InputSet`.

    Raises:
        InputError: a file is missing or unreadable, or two of its columns have the same name.
    """
    files = [describe_input(one) for one in inputs]
    for file in files:
        file.schema()  # raises before a row is read
    return InputSet(files, include_source=include_source)


class InputSet:
    """All input files as one sequence of rows, which can be read repeatedly."""

    def __init__(self, files: Sequence[InputFile], *, include_source: bool = False) -> None:
        """`include_source`: whether rows carry the `SOURCE_COLUMNS`."""
        self.files = tuple(files)
        self._include_source = include_source

    def count(self) -> int:
        """Number of rows in all files, counted without parsing them."""
        return sum(1 for _ in self._items(lambda _: False))

    def count_selected(self, selection: Selection) -> int:
        """Number of rows that a selection has, counted without parsing them."""
        total = self.count()
        keep = selection.row_filter(lambda: total)
        return total if keep is None else sum(map(keep, range(total)))

    def rows(
        self, columns: NamedColumns = UNNAMED, selection: Selection | None = None, wanted: NamedFields | None = None
    ) -> Iterator[RawRow]:
        """Stream the rows in bounded memory.

        A named prompt column becomes `text` (`messages` if it holds a list of objects, also as JSON text), a named id
        column becomes `id` (integers become strings), named columns of media become `image_data` and `audio_data`;
        fields that had these names move to `RawRow.displaced`. A template makes `text` or `messages` from all fields of
        a row, and the prompt that the row had moves there. So do the folders named `key=value` of a row's file, and its
        source.

        Args:
            columns: the fields that options name.
            selection: the rows that are read; None for all.
            wanted: learns of the columns of the files and the fields of the rows, until all that it wants are found.

        Raises:
            UsageError: a named column does not exist in a Parquet or CSV file, or an input is a `.txt` file.
            InputError: the disk fails or a file changes during reading.
        """
        self._check_columns(columns)
        selection = selection or Selection()
        keep = selection.row_filter(self.count)
        stop = selection.stop
        if wanted is not None:
            for file in self.files:
                wanted.add(dict(partitions_of(file.path)))
                schema = file.schema() if wanted else None
                wanted.add(() if schema is None else schema.names)
        return self._selected(keep, stop, columns, wanted)

    def rows_at(self, indexes: Collection[int], columns: NamedColumns = UNNAMED) -> Iterator[RawRow]:
        """Rows with these indexes, in order; columns are named as for `rows`."""
        wanted = frozenset(indexes)
        self._check_columns(columns)
        return self._selected(wanted.__contains__, max(wanted, default=-1) + 1, columns)

    def _selected(
        self, keep: RowFilter | None, stop: int | None, columns: NamedColumns, wanted: NamedFields | None = None
    ) -> Iterator[RawRow]:
        rows = self._read(keep, stop, columns, wanted)
        if columns.template is None:
            yield from rows if columns == UNNAMED else (_renamed(row, columns) for row in rows)
            return
        while batch := [*islice(rows, _RENDERED_ROWS)]:
            fields = [{**row.displaced, **row.fields} for row in batch if row.error is None]
            prompts = iter(columns.template.prompts(fields))
            yield from (_renamed(row, columns, next(prompts) if row.error is None else None) for row in batch)

    def _read(
        self, keep: RowFilter | None, stop: int | None, columns: NamedColumns, wanted: NamedFields | None
    ) -> Iterator[RawRow]:
        """The rows as they are in the files."""
        for index, row in enumerate(() if stop == 0 else self._items(keep, columns)):
            if row is not None:
                if wanted:
                    wanted.add(row.fields)
                    wanted.add(row.displaced)
                yield row
            if stop is not None and index + 1 >= stop:
                return

    def _items(self, keep: RowFilter | None, columns: NamedColumns = UNNAMED) -> Iterator[RawRow | None]:
        index = 0
        for file in self.files:
            try:
                partitions = dict(partitions_of(file.path))
                source = "standard input" if file.path == STDIN else encodable(shown_url(file.path))
                with file.open() as stream:
                    for row in file.format.rows(stream, source, index, keep, columns):
                        index += 1
                        if row is not None and (partitions or self._include_source):
                            row = _with_origin(row, partitions, self._include_source)
                        yield row
                file.check_unchanged()
            except OSError as error:
                raise unreadable(file.path, error) from None

    def _check_columns(self, columns: NamedColumns) -> None:
        options = columns.options()
        for file in self.files if options else ():
            schema = file.schema()
            if schema is None:
                continue
            if not schema.names:
                raise UsageError(f"{file.path} has no columns to name; leave out {' and '.join(options.values())}.")
            for name in sorted(options.keys() - set(schema.names)):
                there = fields_there(schema.names, name)
                end = "" if there.endswith("?") else "."
                raise UsageError(f"{file.path} has no column {name!r}; {there}{end} Correct {options[name]}.")


def _with_origin(row: RawRow, partitions: Mapping[str, str | None], include_source: bool) -> RawRow:
    """The row with the values of its file's folders, and its source, as carried fields unless it has them."""
    source = dict(zip(SOURCE_COLUMNS, (row.source, row.line), strict=True)) if include_source else {}
    own = row.fields
    problem = _conflict(own, partitions, source) if row.error is None else None
    if problem is not None:
        own = {name: value for name, value in own.items() if name not in source}  # those have types that a row may lack
        row = row.with_error(ErrorCode.INVALID_FIELD, problem).with_readable(own)
    origin: dict[str, Any] = {name: value for name, value in partitions.items() if value is not None} | source
    return row._replace(displaced={name: value for name, value in origin.items() if name not in own})


def _conflict(own: Mapping[str, Any], partitions: Mapping[str, str | None], source: Mapping[str, Any]) -> str | None:
    """Reason why fields of a row clash with those of its folders or its source; None if they do not."""
    for name, value in partitions.items():
        if own.get(name) is not None and str(own[name]) != value:
            return f"the row has {name!r}, and its folder {name}={value} another value; rename one of them"
    twice = next((name for name in source if name in own), None)
    return None if twice is None else f"the row has a field {twice!r}, which --include-source adds; rename it"


def _renamed(row: RawRow, columns: NamedColumns, made: str | RowError | None = None) -> RawRow:
    try:
        return _rename(row, columns, made)
    except Exception as error:
        info = row_error(error, "reading the named columns")
        return row.with_error(info.code, info.message)


def _rename(row: RawRow, columns: NamedColumns, made: str | RowError | None) -> RawRow:
    value, problem = dict(row.fields), row.error
    named = {name: value.pop(name) for name in columns.options() if name in value}
    displaced = {**row.displaced, **{name: value.pop(name) for name in columns.replaced() if name in value}}
    if isinstance(made, RowError):
        problem = problem or row.locate(made.info)
    elif made is not None or columns.prompt in named:
        prompt = made if columns.prompt is None else named[columns.prompt]
        if type(prompt) is str:
            prompt = conversation(prompt) or prompt
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        value["messages" if chat else "text"] = prompt
    if columns.id in named:
        value["id"] = named[columns.id]
    try:
        for name, field in columns.media():
            if name in named:
                value[field] = LOOKUP["row"][field].check(name, named[name])  # errors name the column
    except RowError as error:
        problem = problem or row.locate(error.info)
    if problem is None:
        return row._replace(value=value, displaced=displaced)
    # The id of a text that cannot be parsed was read from a field that may not be the named one.
    own = given_id(value) if value else row.id if columns.id is None else None
    return row._replace(value=None, error=problem, readable=value, displaced=displaced, id=own)
