"""Hundreds of schemas, patterns and grammars in the engine: accepted ones are enforced, the rest is rejected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from batchgen import Completion, Engine
from tests.engine.sampling.constraint_cases import (
    CHOICES,
    GRAMMARS,
    INVALID,
    MORE_SCHEMAS,
    PATTERNS,
    SCHEMAS,
    TAGS,
    UNENFORCEABLE,
)
from tests.engine.sampling.grammar_model import CLOSING, EOS, save_grammar_model

ROOM = 400
"""Tokens per row, enough for all rows to end."""
VALID: list[tuple[str, Any]] = [
    *(("json_schema", schema) for schema in SCHEMAS),
    *(("regex", pattern) for pattern in PATTERNS),
    *(("ebnf", grammar) for grammar in GRAMMARS),
    *(("choice", choice) for choice in CHOICES),
    *(("structural_tag", tag) for tag in TAGS),
    *(("json_schema", schema) for schema in MORE_SCHEMAS),
]


def test_the_table_is_long() -> None:
    assert len(VALID) + len(UNENFORCEABLE) + len(INVALID) >= 200
    assert len(VALID) >= 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(str(save_grammar_model(tmp_path_factory.mktemp("table"))), dtype="float32", max_num_seqs=64)


@pytest.fixture(scope="module")
def finished(engine: Engine) -> dict[tuple[int, str], Completion]:
    """Every valid case greedy and sampled with two seeds, in one batch."""
    bias = {str(ids[0]): 3.0 for ids in engine.tokenizer.encode_plain(list(CLOSING))} | {str(EOS): 5.0}
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seed 1": {"temperature": 1.0, "seed": 1},
        "seed 2": {"temperature": 1.0, "seed": 2, "top_p": 0.9},
    }
    rows = [
        {"id": f"{number} {way}", "text": f"Case {number}: ", kind: value, "max_new_tokens": ROOM, "logit_bias": bias}
        | how
        for number, (kind, value) in enumerate(VALID)
        for way, how in ways.items()
    ]
    done = {}
    for completion in engine.generate(rows):
        number, _, way = (completion.id or "").partition(" ")
        done[int(number), way] = completion
    assert len(done) == len(rows)
    return done


def independent_check(kind: str, value: Any) -> Callable[[str], bool] | None:
    """A check by another library; None if only the grammar can tell."""
    if kind == "json_schema":
        validator = validator_for(value, default=jsonschema.Draft202012Validator)(value)
        return lambda text: bool(validator.is_valid(json.loads(text)))
    if kind == "regex":
        # With Unicode and with ASCII character classes.
        return lambda text: all(re.fullmatch(value, text, flags) for flags in (0, re.ASCII))
    if kind == "choice":
        return lambda text: text in value
    if kind == "ebnf" and GRAMMARS[value] is not None:
        return lambda text: re.fullmatch(GRAMMARS[value], text) is not None
    return None


@pytest.mark.field("json_schema", "regex", "ebnf", "structural_tag", "choice")
def test_rows_with_constraint_ok_satisfy_their_constraint(finished: dict[tuple[int, str], Completion]) -> None:
    """Checked by other libraries."""
    checked = 0
    for (number, way), done in finished.items():
        kind, value = VALID[number]
        check = independent_check(kind, value)
        if check is not None and done.constraint_ok:
            assert check(done.text or ""), (value, way, done.text)
            checked += 1
    assert checked > 500


def failures(finished: dict[tuple[int, str], Completion]) -> Iterator[tuple[Any, ...]]:
    for (number, way), done in finished.items():
        if done.error is not None or done.finish_reason != "stop" or not done.constraint_ok:
            yield VALID[number], way, done.error, done.finish_reason, done.constraint_ok, (done.text or "")[:200]


def test_every_valid_case_ends(finished: dict[tuple[int, str], Completion]) -> None:
    found = list(failures(finished))
    assert not found, f"{len(found)}: " + "\n".join(map(str, found[:9]))


def codes(engine: Engine, rows: list[tuple[str, Any]]) -> list[tuple[Any, str | None, str]]:
    """(code, param, message) of each row's error."""
    found = engine.generate(({"text": "x", kind: value} for kind, value in rows), ordered=True)
    return [
        (c.error.code, c.error.param, c.error.message) if c.error is not None else (None, None, c.text or "")
        for c in found
    ]


@pytest.mark.field("json_schema")
def test_unenforceable_schemas_are_rejected(engine: Engine) -> None:
    for schema, found in zip(UNENFORCEABLE, codes(engine, [("json_schema", s) for s in UNENFORCEABLE]), strict=True):
        assert found[:2] == ("unsupported_schema_keyword", "json_schema"), (schema, found)
        assert re.search(r"uses `[$\w]+`.* cannot be enforced: .*`lenient_schemas`", found[2]), found


@pytest.mark.field("json_schema", "regex", "ebnf", "structural_tag")
def test_invalid_constraints_are_rejected(engine: Engine) -> None:
    for (kind, value), found in zip(INVALID, codes(engine, INVALID), strict=True):
        expected = {"invalid_field"} if value == "" else {"invalid_grammar"}
        assert found[0] in expected, (value, found)
        assert found[1] == kind
        assert f"`{kind}`" in found[2]


@pytest.mark.field("json_schema")
def test_lenient_schemas_run_and_report_constraint_ok(engine: Engine, tmp_path: Path) -> None:
    lenient = Engine(str(save_grammar_model(tmp_path / "model")), dtype="float32", lenient_schemas=True)
    bias = {str(EOS): 5.0} | {str(ids[0]): 3.0 for ids in lenient.tokenizer.encode_plain(list(CLOSING))}
    row = {"text": "x", "max_new_tokens": ROOM, "logit_bias": bias, "temperature": 1.0}
    done = list(lenient.generate([row | {"json_schema": schema} for schema in UNENFORCEABLE], ordered=True))
    verdicts = []
    for schema, completion in zip(UNENFORCEABLE, done, strict=True):
        assert completion.error is None, (schema, completion.error)
        json.loads(completion.text or "") if completion.finish_reason == "stop" else None
        if completion.constraint_ok and "$dynamicRef" not in schema:
            assert independent_check("json_schema", schema)(completion.text or ""), (schema, completion.text)  # type: ignore[misc]
        verdicts.append(completion.constraint_ok)
    assert {True, False} <= set(verdicts)
