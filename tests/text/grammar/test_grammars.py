"""Grammars: compilation in a separate process within limits, storage and reloading, and what matchers accept."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
import torch

from batchgen.errors import BatchgenError, ErrorInfo, OutputError
from batchgen.kernels.shaping import bitmask_width
from batchgen.request.fields.constraint import Constraint, ConstraintKind
from batchgen.text.grammar import compiler as grammar_compiler
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.grammar.worker import CompileLimits, import_compiler
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import each

HOSTILE: list[tuple[str, Constraint, CompileLimits]] = [
    (
        "more than 0.5 seconds",
        Constraint("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(60_000)]})),
        CompileLimits(seconds=0.5),
    ),
    (
        "more than 100,000",
        SIZE := Constraint("choice", json.dumps([f"{i:05} {i * 7919 % 10_007}" for i in range(5000)])),
        CompileLimits(seconds=20, size=100_000),
    ),
    ("`choice`", SIZE, CompileLimits(memory=1 << 20)),
    ("`json_schema`", Constraint("json_schema", '{"items":' * 201 + "{}" + "}" * 201), CompileLimits(seconds=1)),
    ("`regex`", Constraint("regex", "(" * 1000 + "a" + ")" * 1000), CompileLimits(seconds=1)),
]
GOOD = Constraint("regex", "[a-z]{2,5}")


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders["bytelevel"])


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def texts(grammars: Grammars, constraint: Constraint, count: int = 20, longest: int = 60) -> list[str]:
    """Random texts that a grammar allows, generated token by token."""
    grammars.prepare([constraint])
    assert grammars.error(constraint) is None
    stop = min(grammars.tokenizer.eos_ids)
    found = []
    for seed in range(count):
        rng, ids = Random(seed), list[int]()
        matcher = grammars.matcher(constraint, [stop])
        while len(ids) < longest:
            mask = torch.zeros(1, bitmask_width(grammars.vocab_size), dtype=torch.int32)
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            allowed = [t for t in range(grammars.vocab_size) if words[t // 32] >> t % 32 & 1]
            assert allowed, "some token is always allowed"
            token = stop if allowed == [stop] or (stop in allowed and rng.random() < 0.3) else rng.choice(allowed)
            if token == stop:
                break
            assert matcher.accept_token(token)
            ids.append(token)
        else:
            continue
        found.append(grammars.tokenizer.decode_output(ids, False))
    return found


def error_of(grammars: Grammars, kind: ConstraintKind, text: str) -> ErrorInfo | None:
    constraint = Constraint(kind, text)
    grammars.prepare([constraint])
    return grammars.error(constraint)


def children() -> set[str]:
    """Ids of the processes that this one has started."""
    return {pid for of in Path("/proc/self/task").glob("*/children") for pid in of.read_text().split()}


def test_each_constraint_is_compiled_once_by_a_process_that_starts_when_needed(tokenizer: Tokenizer) -> None:
    grammar_compiler.PROCESS.stop()
    before = children()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.prepare([])
    assert children() == before, "a run without constraints starts no process"
    several = [Constraint("regex", "a" * n) for n in range(1, 6)]
    grammars.prepare(several * 3)
    assert grammars.compiled == 5
    grammars.prepare([*several, GOOD])
    assert grammars.compiled == 6
    grammar_compiler.PROCESS.stop()
    grammars.prepare(several)
    assert children() == before, "no new constraints, so no process is started"
    assert grammars.compiled == 6


def test_large_batches_do_not_deadlock(grammars: Grammars) -> None:
    """The batch is larger than the pipe buffers in both directions."""
    names = [Random(i).randbytes(30).hex() for i in range(30)]
    about = "x" * 10_000  # ignored by the compiler
    several = [
        Constraint("json_schema", json.dumps({"description": about, "enum": [f"{n} {name}" for name in names]}))
        for n in range(12)
    ]
    grammars.prepare(several)
    assert all(grammars.error(constraint) is None for constraint in several)


@pytest.mark.parametrize(
    ("message", "constraint", "limits"), HOSTILE, ids=["time", "size", "memory", "depth", "groups"]
)
def test_a_hostile_grammar_is_an_error_and_the_next_one_compiles(
    tokenizer: Tokenizer, message: str, constraint: Constraint, limits: CompileLimits
) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, limits=limits)
    grammars.prepare([constraint, GOOD])
    error = grammars.error(constraint)
    assert error is not None
    assert (error.code, error.param) == ("invalid_grammar", constraint.kind)
    assert message in error.message
    assert grammars.error(GOOD) is None or limits.memory == 1 << 20, "a limit that no grammar is under"


def test_grammars_compiled_by_one_process_do_not_change_each_other(tokenizer: Tokenizer) -> None:
    limits = CompileLimits(seconds=0.5)
    good = [Constraint("regex", f"[a-z]{{{i + 1}}}") for i in range(90)]
    bad = {1: Constraint("regex", "(" * 1000 + "a" + ")" * 1000), 30: HOSTILE[0][1], 31: Constraint("regex", "(")}
    mixed = [bad.get(i, each) for i, each in enumerate(good)]
    grammars, alone = (Grammars(tokenizer, tokenizer.vocab_size, limits=limits) for _ in range(2))
    grammars.prepare(mixed)
    for constraint in mixed:
        if constraint in bad.values():
            alone.prepare([constraint])
            assert grammars.error(constraint) == alone.error(constraint) is not None
        else:
            assert grammars.error(constraint) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to simulate a full disk")
def test_a_full_temporary_folder_is_named_in_the_error(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("w+b"))  # noqa: SIM115  # as above
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    message = rf"cannot be kept in {re.escape(str(tmp_path))} \(No space left on device\)\. Set TMPDIR"
    with pytest.raises(OutputError, match=message):
        grammars.prepare([GOOD])


def test_a_missing_temporary_folder_is_named_in_the_error(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OutputError, match=r"cannot be kept in .*gone \(No such file or directory\)\. Set TMPDIR"):
        Grammars(tokenizer, tokenizer.vocab_size)


def test_a_compiler_process_that_dies_is_not_a_row_error_and_restarts(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.prepare([GOOD])
    process = grammar_compiler.PROCESS.running()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BatchgenError, match="compiles grammars ended"):
        grammars.prepare([Constraint("regex", "b")])
    grammars.prepare([Constraint("regex", "b")])
    assert grammars.error(Constraint("regex", "b")) is None


def test_signals_to_all_processes_of_a_job_do_not_end_the_compiler(grammars: Grammars) -> None:
    grammars.prepare([Constraint("regex", "signals one")])
    process = grammar_compiler.PROCESS.running()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(process.pid, number)
    grammars.prepare([Constraint("regex", "signals two")])
    assert grammar_compiler.PROCESS.running() is process


def test_grammars_that_are_collected_in_any_thread_block_no_one(
    tokenizer: Tokenizer, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run in the thread that sends, while the others wait for what it sends."""
    others = [Grammars(tokenizer, tokenizer.vocab_size)]
    others[0].prepare([GOOD])
    send = Connection.send

    def collect_first(self: Connection, message: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            others.clear()
            gc.collect()
        send(self, message)

    monkeypatch.setattr(Connection, "send", collect_first)
    grammars.prepare([Constraint("regex", "collected meanwhile")])
    assert not others
    assert grammars.error(Constraint("regex", "collected meanwhile")) is None


def test_an_abandoned_batch_leaves_no_results(grammars: Grammars) -> None:
    several = [Constraint("regex", f"given up {n}") for n in range(6)]
    batch = grammars._compiler.compile(several)
    next(batch)
    batch.close()  # type: ignore[attr-defined]
    grammars.prepare([Constraint("regex", "after it")])
    assert grammars.error(Constraint("regex", "after it")) is None
    grammars.prepare(several)
    assert grammars.matcher(several[5], ()).accept_string("given up 5")


def test_jobs_still_being_sent_to_a_stopped_process_never_reach_the_next_one(grammars: Grammars) -> None:
    batch = grammars._compiler.compile(
        [Constraint("regex", "first"), *(Constraint("regex", "a" * (1 << 20)) for _ in range(64))]  # fill the pipe
    )
    next(batch)
    assert "grammars" in {thread.name for thread in threading.enumerate()}
    batch.close()  # type: ignore[attr-defined]
    assert "grammars" not in {thread.name for thread in threading.enumerate()}
    grammars.prepare([Constraint("regex", "after those")])
    assert grammars.error(Constraint("regex", "after those")) is None


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "import os, sys\n"
        "from batchgen.text.grammar import compiler as grammar_compiler\n"
        "from batchgen.request.fields.constraint import Constraint\n"
        "compiler = grammar_compiler.GrammarCompiler({'text': [bytes([i]) for i in range(256)]})\n"
        "list(compiler.compile([Constraint('regex', 'a')]))\n"
        "print(grammar_compiler.PROCESS.running().pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(200):
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("the process is still running")


LIBRARY = """
import sys
from batchgen.text.grammar import worker as library
from batchgen.text.grammar.compilation import compile_constraint
from batchgen.request.fields.constraint import Constraint
if sys.argv[1]:
    library._StubModule.__getattr__ = None
xgrammar = library.import_compiler()
tokenizer = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], vocab_size=256, stop_token_ids=[])
for kind, text in (("regex", "a+"), ("json_schema", '{"enum": [1]}'), ("choice", '["a"]'), ("ebnf", 'root ::= "b"')):
    found = compile_constraint(Constraint(kind, text), tokenizer, lenient=False, max_size=1 << 28)
    assert isinstance(found, bytes), found
print(*sorted({"llguidance", "torch", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("needs", "left"), [("", ""), pytest.param("torch", "torch transformers", marks=pytest.mark.slow)]
)
def test_a_compiler_imports_no_torch(needs: str, left: str) -> None:
    """Unless xgrammar needs it; nor the other compiler."""
    command = [sys.executable, "-c", LIBRARY, needs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, left), done.stderr
    assert import_compiler() is sys.modules["xgrammar"], "xgrammar is imported with torch if that is imported already"
    assert {"torch", "transformers"} <= sys.modules.keys()


def test_memory_is_bounded_and_evicted_grammars_are_reloaded(tokenizer: Tokenizer) -> None:
    several = [Constraint("regex", f"{chr(97 + n)}+[0-9]{{3}}") for n in range(8)]
    grammars = Grammars(tokenizer, tokenizer.vocab_size, memory=6000)
    grammars.prepare(several)
    sizes = []
    for constraint in several * 2:
        matcher = grammars.matcher(constraint, tokenizer.eos_ids)
        assert matcher.accept_string(constraint.text[0] + "123")
        assert matcher.is_completed()
        sizes.append(grammars._bytes)
        assert grammars._bytes == sum(size for _, size in grammars._loaded.values())
    assert len(grammars._loaded) < len(several)
    assert max(sizes) <= 6000


LEFT_RECURSIVE = [
    'root ::= root "a" | "a"',
    'root ::= expr\nexpr ::= expr "+" expr | [0-9]',
    'root ::= x\nx ::= y "a" | "b"\ny ::= x "1" | "{"',
    'root ::= e root | "b"\ne ::= "a"?',
    'root ::= ("a" | root "b")*',
    'root ::= [a]* root "b" | "1"',
    'root ::= root{2,3} "a" | "b"',
    'root ::= "a"{0,2} root "b" | "1"',
]
NOT_LEFT_RECURSIVE = [
    'root ::= "(" root ")" | "1"',
    'root ::= ("a"*)* "b"',
    'root ::= "a" root | ""',
    'root ::= item ("," item)*\nitem ::= [a-z] | "[" root "]"',
    'root ::= "\\")(=" root | "]" [\\]"|] root | "::= x"',
    'root ::= x\nx ::= "a"{1,3} x | "b"',
    'root ::= a b\na ::= "" | "q"\nb ::= "r" root | "s"',
    'root ::= ([^"\\\\] root) | "x" # root ::= root\n',
]


@each("grammar", [*LEFT_RECURSIVE, *NOT_LEFT_RECURSIVE])
def test_left_recursion_is_refused_and_other_recursion_is_not(grammars: Grammars, grammar: str) -> None:
    error = error_of(grammars, "ebnf", grammar)
    assert (error is not None) == (grammar in LEFT_RECURSIVE)
    if error is not None:
        assert error.code == "invalid_grammar"
        assert "left-recursive" in error.message


@each(
    "kind, text, message",
    [
        ("ebnf", "root ::= ", "does not compile"),
        ("ebnf", 'start ::= "a"', "root"),
        ("ebnf", 'root ::= missing "a"', "missing"),
        ("ebnf", "root ::= [z-a]", "lower bound"),
        ("ebnf", 'root ::= "a" root', "no text that ends"),
        ("ebnf", 'root ::= x\nx ::= "a" (x | y)\ny ::= x "b"', "no text that ends"),
        (
            "json_schema",
            '{"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}, '
            '"$ref": "#/$defs/n"}',
            "without end",
        ),
        ("regex", "(", "unterminated"),
        ("regex", r"(?=a)b", "look-around"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", "[]", "object, true or false"),
        ("json_schema", "NaN", "not JSON"),
        ("json_schema", '{"type": "integer", "type": "string"}', "'type' occurs twice"),
        ("json_schema", '{"type": "strin"}', "not a JSON Schema"),
        ("json_schema", '{"enum": []}', "no value"),
        ("json_schema", "false", "no value"),
        ("json_schema", '{"$ref": "#/$defs/a"}', "does not exist"),
        ("json_schema", '{"$ref": "#"}', "refers to itself"),
        ("structural_tag", "{", "is not JSON"),
        ("structural_tag", "[]", "object"),
        ("structural_tag", "{}", "Format must be an object"),
        ("structural_tag", '{"format": {"type": "any_text"}, "structures": []}', "'structures' (known: format"),
        (
            "structural_tag",
            '{"structures": [{"begin": "<", "scheme": {}}], "triggers": ["<"]}',
            "'scheme' (known: begin",
        ),
        ("structural_tag", '{"format": {"type": "regex", "pattern": "("}}', "unterminated"),
        ("structural_tag", '{"structures": [1], "triggers": []}', "structures"),
    ],
)
def test_errors_name_the_problem(grammars: Grammars, kind: ConstraintKind, text: str, message: str) -> None:
    error = error_of(grammars, kind, text)
    assert error is not None
    assert (error.code, error.param) == ("invalid_grammar", kind)
    assert f"`{kind}`" in error.message
    assert message in error.message, error.message


@pytest.mark.field("choice")
def test_choices_are_exact(grammars: Grammars) -> None:
    choices = [
        "a",
        "ab",
        "abc",
        'say "hi"',
        "back\\slash",
        "line\nbreak\ttab",
        "日本",
        "😀",
        "\u2028",
        "a/b",
        "\x7f\x01",
    ]
    constraint = Constraint("choice", json.dumps(choices))
    assert set(texts(grammars, constraint, count=200)) == set(choices)
    for text in (*choices, "b", "a ", "abcd", ""):
        assert grammars.satisfied(constraint, text, []) == (text in choices)


@pytest.mark.field("structural_tag")
def test_both_forms_of_structural_tags(grammars: Grammars) -> None:
    structures = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]
    older = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tags = [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]
    newer = {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}}
    for tag in (older, newer):
        constraint = Constraint("structural_tag", json.dumps(tag))
        grammars.prepare([constraint])
        assert grammars.error(constraint) is None
        for text, good in {"hi <f>12</f> you": True, "hi": True, "<f>a</f>": False, "<f>1": False}.items():
            assert grammars.satisfied(constraint, text, None) is good, text
            ids = grammars.tokenizer.encode_plain([text])[0]
            assert grammars.satisfied(constraint, text, ids) is good, text


def test_schemas_in_tags_are_checked_too(grammars: Grammars) -> None:
    tag = {"format": {"type": "json_schema", "json_schema": {"not": {}}}}
    error = error_of(grammars, "structural_tag", json.dumps(tag))
    assert error is not None
    assert (error.code, error.param) == ("unsupported_schema_keyword", "structural_tag")
    short = {"format": {"type": "json_schema", "json_schema": {"type": "string", "minLength": 2, "maxLength": 3}}}
    for text in texts(grammars, Constraint("structural_tag", json.dumps(short))):
        value = json.loads(text)
        assert 2 <= len(value) <= 3


def test_json_has_little_whitespace(grammars: Grammars) -> None:
    schema = Constraint("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 3}))
    for text in texts(grammars, schema, longest=200):
        assert text == json.dumps(json.loads(text))
    grammars.prepare([schema])
    matcher = grammars.matcher(schema, ())
    assert not matcher.accept_string(" [")
    tag = Constraint("structural_tag", json.dumps({"format": {"type": "json_schema", "json_schema": {"items": {}}}}))
    grammars.prepare([tag])
    matcher = grammars.matcher(tag, ())
    assert matcher.accept_string("[" + " " * 16 + "1" + "\n" * 16)
    assert not matcher.accept_string("\n")


@pytest.mark.parametrize("kind", ["bytelevel", "nested", "bytefallback", "unigram"])
def test_choices_are_exact_for_every_tokenizer_with_token_bytes(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 5)
    for choices in (["fox", "the fox", "How are you?"], [" fox", " the fox"]):
        constraint = Constraint("choice", json.dumps(choices))
        found = texts(grammars, constraint, count=60)
        assert set(found) <= set(choices)
        assert found
        assert all(grammars.satisfied(constraint, text, []) for text in found)


def test_a_tokenizer_with_context_dependent_decoding_refuses_constraints(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["wordpiece"]
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    error = error_of(grammars, "regex", "[a-z]+")
    assert error is not None
    assert (error.code, error.param) == ("unsupported_field", "regex")


def test_lenient_schemas(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, lenient=True)
    schema = {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 20, "not": {"const": 14}}
    constraint = Constraint("json_schema", json.dumps(schema))
    found = set(texts(grammars, constraint, count=60))
    verdicts = {text: grammars.satisfied(constraint, text, []) for text in found}
    assert {text for text, good in verdicts.items() if good} <= {"0", "7"}
    assert not all(verdicts.values())


def test_a_reference_to_another_document_is_never_fetched(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the network was used"))
    constraint = Constraint("json_schema", json.dumps({"$ref": "http://127.0.0.1:9/schema.json"}))
    strict, lenient = (Grammars(tokenizer, tokenizer.vocab_size, lenient=is_lenient) for is_lenient in (False, True))
    strict.prepare([constraint])
    error = strict.error(constraint)
    assert error is not None
    assert error.code == "unsupported_schema_keyword"
    lenient.prepare([constraint])
    assert lenient.error(constraint) is None
    assert not lenient.satisfied(constraint, "1", [])
