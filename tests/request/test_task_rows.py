"""Rows that ask for an embedding, for scores of labels, or of documents for a query: how they are recognised, and what
they refuse.
"""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import TextPrompt
from batchgen.request.rows.values import RowDefaults
from batchgen.request.tasks import SentenceFiles, TaskSupport
from tests.cases import each
from tests.rows import HELLO, PLAIN, parse, text

EMBED = SamplingParams(max_new_tokens=0, temperature=0.0, embed=True)
RERANK = SamplingParams(max_new_tokens=0, temperature=0.0, rerank=True)
PAIRS = {"query": "q", "documents": ["a", "b"]}


def body(url: str, /, **fields: Any) -> dict[str, Any]:
    return {"custom_id": "r", "method": "POST", "url": url, "body": fields}


@pytest.mark.field("embed", "classify", "dimensions", "prompt_name")
def test_native_rows() -> None:
    assert parse(text(embed=True)).params == EMBED
    assert parse(text(embed=True)).params is parse(text(embed=True, other=1)).params
    row = parse(text(sampling_params={"embed": True, "dimensions": 8.0, "prompt_name": "query"}))
    assert (row.params.task, row.params.dimensions, row.params.prompt_name) == ("embed", 8, "query")
    assert parse(text(classify=True)).params.task == "classify"
    assert parse(text(embed=False, classify=None)).params == SamplingParams()
    assert parse({"messages": HELLO, "embed": True}).params == EMBED


def test_options_are_defaults_of_rows_that_ask_for_nothing_else() -> None:
    flags = {"embed": True, "dimensions": 4, "temperature": 0.7, "max_new_tokens": 9, "json_schema": "{}"}
    run = RowDefaults(flags=flags, adapters=frozenset({"a"}))
    assert parse(text(), run).params == SamplingParams(max_new_tokens=0, temperature=0.0, embed=True, dimensions=4)
    assert parse(text(lora_path="a"), run).params.lora_path == "a"
    generating = parse(text(embed=False), run).params
    assert (generating.task, generating.dimensions, generating.max_new_tokens) == (None, None, 9)
    assert parse(text(classify=True), run).params.task == "classify"
    assert parse(text(completion="b"), run).params.task is None
    assert parse(PAIRS, run).params == RERANK


@pytest.mark.field("query", "documents")
def test_documents_for_a_query() -> None:
    row = parse({**PAIRS, "id": "x", "note": 1})
    assert row.prompts == (TextPrompt("a", (), "q"), TextPrompt("b", (), "q"))
    assert (row.params, row.id, dict(row.extra)) == (RERANK, "x", {"note": 1})
    assert parse({"query": "q", "documents": [{"text": "a"}, "b"]}).prompts == row.prompts
    assert parse({**PAIRS, "text": None}).params == RERANK


@pytest.mark.field("query", "documents")
def test_columns_of_these_names_next_to_a_prompt_are_carried() -> None:
    row = parse(text(**PAIRS))
    assert (row.params.task, dict(row.extra)) == (None, PAIRS)


@pytest.mark.field("input", "encoding_format", "top_n", "return_documents", "dimensions")
def test_batch_lines() -> None:
    row = parse(body("/v1/embeddings", input=["a", "b"], dimensions=3, encoding_format="base64", user="u"))
    assert (row.dialect, row.prompts) == ("openai-embeddings", (TextPrompt("a"), TextPrompt("b")))
    assert row.params == SamplingParams(max_new_tokens=0, temperature=0.0, embed=True, dimensions=3)
    assert dict(row.extra) == {"body": {"encoding_format": "base64", "user": "u"}}
    assert len(parse(body("/v1/embeddings", input=[[1, 2], [3]])).prompts) == 2
    for url in ("/v1/rerank", "/v2/rerank", "/rerank"):
        row = parse(body(url, **PAIRS, top_n=1, return_documents=False))
        assert (row.dialect, row.params, len(row.prompts)) == ("rerank", RERANK, 2)
        assert dict(row.extra) == {"body": {"top_n": 1}}
    assert parse({"custom_id": "a", "body": PAIRS}).dialect == "rerank"


UNSUPPORTED, INVALID = ErrorCode.UNSUPPORTED_FIELD, ErrorCode.INVALID_FIELD
WRONG: tuple[tuple[dict[str, Any], ErrorCode, str], ...] = (
    (text(embed=True, temperature=0.5), INVALID, "temperature"),
    (text(embed=True, n=2), INVALID, "n"),
    (text(embed=True, max_tokens=5), INVALID, "max_tokens"),
    (text(embed=True, regex="a"), INVALID, "regex"),
    (text(embed=True, return_hidden_states=True), INVALID, "return_hidden_states"),
    (text(embed=True, classify=True), INVALID, "classify"),
    (text(embed=True, completion="b"), INVALID, "embed"),
    (text(dimensions=4), INVALID, "dimensions"),
    (text(classify=True, prompt_name="query"), INVALID, "prompt_name"),
    (text(embed=True, dimensions=0), INVALID, "dimensions"),
    ({**PAIRS, "stop": ["a"]}, INVALID, "stop"),
    ({**PAIRS, "documents": "a"}, INVALID, "documents"),
    ({**PAIRS, "documents": [1]}, INVALID, "documents"),
    ({**PAIRS, "documents": []}, ErrorCode.EMPTY_PROMPT, "documents"),
    ({**PAIRS, "query": 1}, INVALID, "query"),
    (body("/v1/embeddings", prompt="a"), ErrorCode.UNKNOWN_FIELD, "prompt"),
    (body("/v1/embeddings"), ErrorCode.MISSING_PROMPT, ""),
    (body("/v1/embeddings", input=[]), ErrorCode.EMPTY_PROMPT, "input"),
    (body("/v1/embeddings", input="a", encoding_format="int8"), INVALID, "encoding_format"),
    (body("/v1/rerank", query="a"), ErrorCode.MISSING_PROMPT, ""),
    (body("/v1/rerank", documents=["a"]), ErrorCode.MISSING_PROMPT, "query"),
    (body("/v1/rerank", **PAIRS, return_documents=True), UNSUPPORTED, "return_documents"),
    (body("/v1/rerank", **PAIRS, top_n=0), INVALID, "top_n"),
)


@each("row, code, param", WRONG)
def test_one_error_names_the_field(row: dict[str, Any], code: ErrorCode, param: str) -> None:
    with pytest.raises(RowError) as caught:
        parse(row, PLAIN)
    assert (caught.value.info.code, caught.value.info.param or "") == (code, param), caught.value.info.message


def test_prompts_of_a_checkpoint() -> None:
    support = TaskSupport(
        files=SentenceFiles(("mean",), prompts={"query": "find: ", "plain": ""}, default_prompt="query")
    )
    assert [support.prompt(name) for name in (None, "query", "plain")] == ["find: ", "find: ", ""]
    with pytest.raises(RowError, match="the prompts of this checkpoint are: plain, query"):
        support.prompt("other")
    with pytest.raises(RowError, match="include_prompt"):
        TaskSupport(files=SentenceFiles(("mean",), prompts={"query": "find: "}, pools_prompt=False)).prompt("query")
    assert TaskSupport().prompt(None) == ""
