"""Constraints of a job: each distinct one compiled once, kept on disk, and handed to samples as matchers."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any

from batchgen.errors import ErrorInfo, OutputError, RowError
from batchgen.params import Constraint
from batchgen.text.grammar_compiler import GrammarCompiler, stop_compiling, vocabulary_of
from batchgen.text.grammar_vocabulary import Vocabularies
from batchgen.text.grammar_worker import Limits
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Grammars"]


_MOST_CHECKS = 1024
"""Schemas and patterns kept ready to be asked."""

Check = Callable[[str], bool]
"""Whether a finished text satisfies a constraint."""


class Grammars:
    """Compiles constraints for one tokenizer and model, and makes matchers and checks of them.

    A compiled grammar stands in a temporary file; memory holds those in use, and up to 512 MiB of others.

    Args:
        tokenizer: whose tokens are drawn.
        vocab_size: the model's; ids past the tokenizer's are never allowed.
        lenient: let schemas pass whose keywords cannot all be enforced.
        limits: what compiling one may take.
        memory: bytes of compiled grammars kept beside those that running samples use.

    Raises:
        OutputError: there is no place for the temporary file.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        lenient: bool = False,
        limits: Limits | None = None,
        memory: int = 512 << 20,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.compiled = 0
        """Grammars compiled so far, those that failed included."""
        self._vocabularies = Vocabularies(tokenizer, vocab_size)
        self._compiler = GrammarCompiler(self._vocabularies, lenient=lenient, limits=limits)
        with _full_folder():
            self._file = tempfile.TemporaryFile(prefix="batchgen-grammars-")  # noqa: SIM115  # as long as this object
        self._end = weakref.finalize(self, _close, self._compiler, self._file)
        self._known: dict[Constraint, tuple[int, int] | ErrorInfo] = {}
        """Place and length in the file, or what is wrong."""
        self._infos: dict[str, Any] = {}
        self._loaded: OrderedDict[Constraint, Any] = OrderedDict()
        self._memory = memory
        self._bytes = 0
        """Held by `_loaded`."""
        self._checks: OrderedDict[Constraint, Check] = OrderedDict()

    def prepare(self, constraints: Iterable[Constraint]) -> None:
        """Compile those that are new, in parallel; what is wrong with one is kept for `error`.

        Raises:
            OutputError: they do not fit the folder for temporary files.
        """
        new = list(dict.fromkeys(c for c in constraints if c not in self._known))
        if not new:
            return
        try:
            for constraint, result in self._compiler.compile(new):
                self.compiled += 1
                self._known[constraint] = result if isinstance(result, ErrorInfo) else self._store(result)
        except RowError as error:  # of the tokenizer: it holds for all of them
            self._known.update((c, replace(error.info, param=c.kind)) for c in new)

    def error(self, constraint: Constraint) -> ErrorInfo | None:
        """What is wrong with a constraint that was prepared; None where it can be used."""
        known = self._known[constraint]
        return known if isinstance(known, ErrorInfo) else None

    def release(self) -> None:
        """Stop the compiling process, which holds some hundred MB; it starts again when needed."""
        stop_compiling()

    def matcher(self, constraint: Constraint, stop_ids: Collection[int]) -> Any:
        """A matcher at the beginning of a text; `stop_ids` are drawable where the text may end."""
        # Imported here: xgrammar takes seconds, and most runs need none of it.
        import xgrammar

        return xgrammar.GrammarMatcher(self._load(constraint), override_stop_tokens=sorted(stop_ids) or None)

    def satisfied(self, constraint: Constraint, text: str, ids: Sequence[int] | None) -> bool:
        """Whether a finished text satisfies a constraint, asked of somebody else than the grammar where there is one.

        Args:
            constraint: one that was prepared.
            text: the whole text.
            ids: its tokens, where they spell it; those of a structural tag may have text that `text` leaves out.
        """
        if constraint.kind == "structural_tag" and ids is not None:
            matcher = self.matcher(constraint, ())
            return all(matcher.accept_token(token) for token in ids) and bool(matcher.is_completed())
        if constraint.kind in ("ebnf", "structural_tag"):
            matcher = self.matcher(constraint, ())
            return bool(matcher.accept_string(text)) and bool(matcher.is_completed())
        check = self._checks.get(constraint)
        if check is None:
            check = self._checks[constraint] = _check(constraint)
            if len(self._checks) > _MOST_CHECKS:
                self._checks.popitem(last=False)
        return check(text)

    def _store(self, grammar: bytes) -> tuple[int, int]:
        with _full_folder():
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(grammar)
            self._file.flush()  # here, where it is known what could not be written
        return place, len(grammar)

    def _load(self, constraint: Constraint) -> Any:
        import xgrammar

        found = self._loaded.get(constraint)
        if found is not None:
            self._loaded.move_to_end(constraint)
            return found
        known = self._known[constraint]
        assert not isinstance(known, ErrorInfo), "rows with this constraint were refused"
        self._file.seek(known[0])
        text = zlib.decompress(self._file.read(known[1])).decode()
        kind = vocabulary_of(constraint)
        info = self._infos.get(kind)
        if info is None:
            pieces = self._vocabularies[kind]
            info = self._infos[kind] = xgrammar.TokenizerInfo(pieces, vocab_size=len(pieces), stop_token_ids=[])
        compiled = self._loaded[constraint] = xgrammar.CompiledGrammar.deserialize_json(text, info)
        self._bytes += compiled.memory_size_bytes
        while self._bytes > self._memory and len(self._loaded) > 1:
            self._bytes -= self._loaded.popitem(last=False)[1].memory_size_bytes
        return compiled


@contextmanager
def _full_folder() -> Iterator[None]:
    """What the operating system says of the temporary file, in words, with the folder that it stands in."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or "the folder for temporary files"  # None where there is none that can be written
        raise OutputError(
            f"compiled grammars cannot be kept in {folder} ({error.strerror or error}). Set TMPDIR to a folder with "
            "room and run the same command again: committed rows are kept."
        ) from error


def _close(compiler: GrammarCompiler, file: IO[bytes]) -> None:
    compiler.close()
    with suppress(OSError):  # what a full disk did not take is tried once more
        file.close()


def _check(constraint: Constraint) -> Check:
    # Imported here: jsonschema is needed for finished rows with a schema alone.
    from batchgen.text.validation import Schema, matches_whole

    if constraint.kind == "json_schema":
        return Schema.parse(constraint.text, constraint.kind).satisfied_by
    if constraint.kind == "choice":
        return frozenset(json.loads(constraint.text)).__contains__
    return partial(matches_whole, constraint.text)
