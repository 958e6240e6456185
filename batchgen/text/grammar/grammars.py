"""Compiled constraints of a job: each distinct one is compiled once, stored on disk and used through matchers."""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any, NamedTuple

from batchgen.errors import ErrorInfo, OutputError, RowError, apart
from batchgen.request.fields.constraint import Constraint
from batchgen.text.grammar.compilation import LLGUIDANCE
from batchgen.text.grammar.compiler import GrammarCompiler, Vocabularies
from batchgen.text.grammar.guidance import GuidanceMatcher, GuidanceVocabulary, guidance_matcher
from batchgen.text.grammar.kinds import KINDS, Check
from batchgen.text.grammar.worker import CompileLimits
from batchgen.text.tokens.tokenizer import Tokenizer

_MAX_CHECKS = 1024
"""Number of checks kept in memory."""
_GUIDANCE_BYTES = 1 << 20
"""Assumed memory of a constraint of llguidance, which does not tell its size."""


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
        self.backends: Counter[str] = Counter()
        """Compiler (`xgrammar` or `llguidance`) -> number of grammars that it compiled."""
        self._vocabularies = Vocabularies(tokenizer, vocab_size)
        self._compiler = GrammarCompiler(self._vocabularies, lenient=lenient, limits=limits)
        with _explain_disk_errors():
            self._file = tempfile.TemporaryFile(prefix="batchgen-grammars-")  # noqa: SIM115  # as long as this object
        self._finalizer = weakref.finalize(self, _close, self._compiler, self._file)
        self._results: dict[Constraint, _Stored | ErrorInfo] = {}
        """Constraint -> where it is stored, or its error."""
        self._infos: dict[tuple[str, bool], Any] = {}
        """(kind of vocabulary, whether it is for llguidance) -> a compiler's form of the vocabulary."""
        self._loaded: OrderedDict[Constraint, tuple[Any, int]] = OrderedDict()
        """Constraint -> its compiled grammar, or a matcher of llguidance to copy; and its size in bytes."""
        self._memory = memory
        self._bytes = 0
        """Bytes of the grammars in `_loaded`."""
        self._checks: OrderedDict[Constraint, Check] = OrderedDict()

    def prepare(self, constraints: Iterable[Constraint]) -> None:
        """Compile new constraints in parallel; `error` returns their errors.

        One that raises anything is its rows' error.

        Raises:
            OutputError: the temporary folder has no room for them.
        """
        new = list(dict.fromkeys(c for c in constraints if c not in self._results))
        for constraint, error in zip(new, apart(new, self._compile, "compiling the constraint"), strict=True):
            if error is not None:
                self._results[constraint] = replace(error, param=constraint.kind)

    def _compile(self, constraints: Sequence[Constraint]) -> list[None]:
        """Compile constraints and keep their results."""
        try:
            for constraint, result in self._compiler.compile(constraints) if constraints else ():
                self.compiled += 1
                self._results[constraint] = result if isinstance(result, ErrorInfo) else self._store(result)
        except RowError as error:  # an error of the tokenizer holds for all constraints
            self._results.update((c, replace(error.info, param=c.kind)) for c in constraints)
        return [None] * len(constraints)

    def error(self, constraint: Constraint) -> ErrorInfo | None:
        """Error of a prepared constraint; None if it can be used."""
        known = self._results[constraint]
        return known if isinstance(known, ErrorInfo) else None

    def matcher(self, constraint: Constraint, stop_ids: Collection[int]) -> Any:
        """New matcher of a constraint; `stop_ids` are allowed where the text may end.

        Raises:
            RuntimeError: it cannot be created.
        """
        compiled = self._load(constraint)
        if not self.fills_in_batches(constraint):
            vocabulary = self._vocabulary(KINDS[constraint.kind].vocabulary, is_guidance=True)
            return GuidanceMatcher(compiled.deep_copy(), vocabulary, sorted(stop_ids))
        # Imported here: xgrammar is slow to import, and most runs do not need it.
        import xgrammar

        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stop_ids) or None)

    def fills_in_batches(self, constraint: Constraint) -> bool:
        """Whether masks of the matchers of a prepared constraint may be filled together, by xgrammar."""
        known = self._results[constraint]
        assert not isinstance(known, ErrorInfo), "rows with this constraint were refused"
        return not known.is_guidance

    def satisfied(self, constraint: Constraint, text: str, ids: Sequence[int] | None) -> bool | None:
        """Whether a finished text satisfies a constraint; None if it breaks nothing that is checked, but not all is.

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

    def _store(self, grammar: bytes) -> _Stored:
        is_guidance = grammar[:1] == LLGUIDANCE
        self.backends["llguidance" if is_guidance else "xgrammar"] += 1
        with _explain_disk_errors():
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(grammar[1:])
            self._file.flush()  # now, so that a failed write is reported here
        return _Stored(offset, len(grammar) - 1, is_guidance)

    def _load(self, constraint: Constraint) -> Any:
        kept = self._loaded.get(constraint)
        if kept is not None:
            self._loaded.move_to_end(constraint)
            return kept[0]
        known = self._results[constraint]
        assert not isinstance(known, ErrorInfo), "rows with this constraint were refused"
        self._file.seek(known.offset)
        text = zlib.decompress(self._file.read(known.length)).decode()
        info = self._vocabulary(KINDS[constraint.kind].vocabulary, known.is_guidance)
        loaded = self._loaded[constraint] = (
            _load_guidance(text, info) if known.is_guidance else _load_xgrammar(text, info)
        )
        self._bytes += loaded[1]
        while self._bytes > self._memory and len(self._loaded) > 1:
            self._bytes -= self._loaded.popitem(last=False)[1][1]
        return loaded[0]

    def _vocabulary(self, kind: str, is_guidance: bool) -> Any:
        info = self._infos.get((kind, is_guidance))
        if info is None:
            pieces = self._vocabularies[kind]
            info = self._infos[kind, is_guidance] = (
                GuidanceVocabulary.of(pieces) if is_guidance else _token_info(pieces)
            )
        return info


class _Stored(NamedTuple):
    """A compiled constraint in the temporary file."""

    offset: int
    length: int
    is_guidance: bool
    """Whether it is for llguidance, else for xgrammar."""


def _token_info(pieces: list[bytes]) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo(pieces, vocab_size=len(pieces), stop_token_ids=[])


def _load_xgrammar(text: str, info: Any) -> tuple[Any, int]:
    import xgrammar

    compiled = xgrammar.CompiledGrammar.deserialize_json(text, info)
    return compiled, compiled.memory_size_bytes


def _load_guidance(text: str, info: Any) -> tuple[Any, int]:
    try:
        return guidance_matcher(text, info), _GUIDANCE_BYTES
    except ValueError as error:  # its limits depend on the vocabulary
        raise RuntimeError(str(error)) from None


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
