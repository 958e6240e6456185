"""Compiled constraints of a job: each distinct one is compiled once, stored on disk and used through matchers."""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any

from batchgen.errors import ErrorInfo, OutputError, RowError
from batchgen.request.params import Constraint
from batchgen.text.grammar.compiler import GrammarCompiler, stop_compiler
from batchgen.text.grammar.kinds import KINDS, Check
from batchgen.text.grammar.vocabulary import Vocabularies
from batchgen.text.grammar.worker import CompileLimits
from batchgen.text.tokenizer import Tokenizer

_MAX_CHECKS = 1024
"""Number of checks kept in memory."""


class Grammars:
    """Cache of compiled constraints for one tokenizer and model, and source of matchers and checks.

    Compiled grammars are stored in a temporary file; those used last are kept in memory.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: size of the model's vocabulary; ids past the tokenizer's vocabulary are never allowed.
        lenient: accept schemas with keywords that cannot be enforced.
        limits: time and memory limits for compiling one grammar.
        memory: bytes of compiled grammars to keep in memory, in addition to those that running samples use.

    Raises:
        OutputError: the temporary file cannot be created.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        lenient: bool = False,
        limits: CompileLimits | None = None,
        memory: int = 512 << 20,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.compiled = 0
        """Number of grammars compiled so far, including those that failed."""
        self._vocabularies = Vocabularies(tokenizer, vocab_size)
        self._compiler = GrammarCompiler(self._vocabularies, lenient=lenient, limits=limits)
        with _explain_disk_errors():
            self._file = tempfile.TemporaryFile(prefix="batchgen-grammars-")  # noqa: SIM115  # as long as this object
        self._finalizer = weakref.finalize(self, _close, self._compiler, self._file)
        self._results: dict[Constraint, tuple[int, int] | ErrorInfo] = {}
        """Constraint -> (offset, length) in the file, or its error."""
        self._infos: dict[str, Any] = {}
        self._loaded: OrderedDict[Constraint, Any] = OrderedDict()
        self._memory = memory
        self._bytes = 0
        """Bytes of the grammars in `_loaded`."""
        self._checks: OrderedDict[Constraint, Check] = OrderedDict()

    def prepare(self, constraints: Iterable[Constraint]) -> None:
        """Compile new constraints in parallel; `error` returns their errors.

        Raises:
            OutputError: the temporary folder has no room for them.
        """
        new = list(dict.fromkeys(c for c in constraints if c not in self._results))
        if not new:
            return
        try:
            for constraint, result in self._compiler.compile(new):
                self.compiled += 1
                self._results[constraint] = result if isinstance(result, ErrorInfo) else self._store(result)
        except RowError as error:  # an error of the tokenizer holds for all constraints
            self._results.update((c, replace(error.info, param=c.kind)) for c in new)

    def error(self, constraint: Constraint) -> ErrorInfo | None:
        """Error of a prepared constraint; None if it can be used."""
        known = self._results[constraint]
        return known if isinstance(known, ErrorInfo) else None

    def release(self) -> None:
        """Stop the compiler process to free its memory; it is started again when needed."""
        stop_compiler()

    def matcher(self, constraint: Constraint, stop_ids: Collection[int]) -> Any:
        """New matcher of a constraint; `stop_ids` are allowed where the text may end."""
        # Imported here: xgrammar is slow to import, and most runs do not need it.
        import xgrammar

        return xgrammar.GrammarMatcher(self._load(constraint), override_stop_tokens=sorted(stop_ids) or None)

    def satisfied(self, constraint: Constraint, text: str, ids: Sequence[int] | None) -> bool:
        """Whether a finished text satisfies a constraint.

        Args:
            constraint: a prepared constraint.
            text: the whole text.
            ids: token ids of the text, if they spell it; used for structural tags, whose tokens may have text that
                `text` leaves out.
        """
        kind = KINDS[constraint.kind]
        if kind.check is None:
            matcher = self.matcher(constraint, ())
            if kind.vocabulary == "tag" and ids is not None:
                return all(matcher.accept_token(token) for token in ids) and bool(matcher.is_completed())
            return bool(matcher.accept_string(text)) and bool(matcher.is_completed())
        check = self._checks.get(constraint)
        if check is None:
            check = self._checks[constraint] = kind.check(constraint.text)
            if len(self._checks) > _MAX_CHECKS:
                self._checks.popitem(last=False)
        return check(text)

    def _store(self, grammar: bytes) -> tuple[int, int]:
        with _explain_disk_errors():
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(grammar)
            self._file.flush()  # now, so that a failed write is reported here
        return offset, len(grammar)

    def _load(self, constraint: Constraint) -> Any:
        import xgrammar

        found = self._loaded.get(constraint)
        if found is not None:
            self._loaded.move_to_end(constraint)
            return found
        known = self._results[constraint]
        assert not isinstance(known, ErrorInfo), "rows with this constraint were refused"
        self._file.seek(known[0])
        text = zlib.decompress(self._file.read(known[1])).decode()
        kind = KINDS[constraint.kind].vocabulary
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
def _explain_disk_errors() -> Iterator[None]:
    """Turn an error of the temporary file into an `OutputError` that names its folder."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or "the folder for temporary files"  # None if no folder is writable
        raise OutputError(
            f"compiled grammars cannot be kept in {folder} ({error.strerror or error}). Set TMPDIR to a folder with "
            "room and run the same command again: committed rows are kept."
        ) from error


def _close(compiler: GrammarCompiler, file: IO[bytes]) -> None:
    compiler.close()
    with suppress(OSError):  # closing writes again what a full disk refused
        file.close()
