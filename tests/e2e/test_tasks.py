"""Embeddings and scores through the command line: columns, batch lines, shards, reuse, resuming, truncation."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.schema import SCHEMA
from tests.e2e.rows import read, write_lines
from tests.e2e.runner import run
from tests.models.tiny_encoders import add_modules, library_logits, library_states, save_encoder, save_scorer, texts

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = texts(9, longest=12)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder("bert", tmp_path_factory.mktemp("encoder"))
    add_modules(folder, {"pooling_mode": "mean"}, "Normalize")
    return folder


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scorer("xlm-roberta", tmp_path_factory.mktemp("scorer"), labels=1)


def vectors(folder: Path, rows: list[str]) -> list[Any]:
    means = [x.mean(0) for x in library_states(folder, rows)]
    return [x / np.linalg.norm(x) for x in means]


def lines_of(file: Path) -> list[Any]:
    return list(map(json.loads, file.read_text().splitlines()))


def line(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "*", **body}}


@pytest.mark.field("embed", "dimensions", "prompt_name")
def test_a_job_of_embeddings(encoder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": f"r{i}", "text": text, "embed": True} for i, text in enumerate(TEXTS)]
    rows += [{"id": "few", "text": TEXTS[0], "embed": True, "dimensions": 4}, {"id": "no", "text": "fox"}]
    rows += [{"id": "name", "text": "fox", "embed": True, "prompt_name": "query"}]
    source = write_lines(tmp_path / "in.jsonl", rows)
    job = ["run", source, "--model", encoder, "-o", "out.parquet", "--max-tokens-per-step", "32", "--max-num-seqs", "4"]
    run(job, tmp_path)
    table = read(tmp_path / "out.parquet")
    names = SCHEMA.names
    assert table.schema.names == [*names, "embedding"]
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    found = table.to_pylist()
    for row, expected in zip(found, vectors(encoder, TEXTS), strict=False):
        np.testing.assert_allclose(row["embedding"], expected, atol=1e-5)
        assert (row["text"], row["output_ids"], row["seed"], row["finish_reason"]) == (None, None, None, "length")
    np.testing.assert_allclose(np.linalg.norm(found[9]["embedding"]), 1, atol=1e-6)
    errors = [(row["error"]["code"], row["error"]["param"]) for row in found[10:]]
    assert errors == [("unsupported_field", "embed"), ("invalid_field", "prompt_name")]
    assert not (tmp_path / "out.hidden.parquet").exists()
    assert "3 of 3 rows are the same" in run(["verify", "out.parquet", "--rows", "3"], tmp_path).stdout
    run([*job, "--pooling", "cls"], tmp_path, expect=2)
    run(["verify", "out.parquet", "--file"], tmp_path)

    more = write_lines(tmp_path / "more.jsonl", [*rows[:5], {"text": "a new fox", "embed": True}])
    reused = run(["run", more, "--model", encoder, "-o", "more.parquet", "--reuse", "out.parquet"], tmp_path)
    assert "5 of 6 rows are reused" in reused.stderr
    assert [row["embedding"] for row in read(tmp_path / "more.parquet").to_pylist()][:5] == [
        row["embedding"] for row in found[:5]
    ]


def test_outputs_without_such_rows_are_as_before(model: Path, tmp_path: Path) -> None:
    """And a causal checkpoint embeds and generates in one job."""
    rows = [{"text": "The quick", "max_new_tokens": 2}, {"text": "The quick", "embed": True, "dimensions": 2}]
    run(["run", write_lines(tmp_path / "a.jsonl", rows[:1]), "--model", model, "-o", "a.parquet"], tmp_path)
    run(["run", write_lines(tmp_path / "b.jsonl", rows), "--model", model, "-o", "b.parquet"], tmp_path)
    plain, both = read(tmp_path / "a.parquet"), read(tmp_path / "b.parquet")
    assert plain.schema.remove_metadata() == SCHEMA
    assert both.to_pylist()[0] == plain.to_pylist()[0] | {"embedding": None}
    assert len(both.to_pylist()[1]["embedding"]) == 2


def test_shards_with_and_without_such_rows_are_merged(model: Path, tmp_path: Path) -> None:
    rows = [{"text": f"fox {i}", "max_new_tokens": 1, "embed": i == 1} for i in range(4)]
    rows[1].pop("max_new_tokens")
    source = write_lines(tmp_path / "in.jsonl", rows)
    for shard in ("0/2", "1/2"):
        run(["run", source, "--model", model, "-o", "out", "--shard", shard], tmp_path)
    run(["merge", "out", "-o", "all.parquet"], tmp_path)
    found = read(tmp_path / "all.parquet").to_pylist()
    assert [row["embedding"] is None for row in found] == [True, False, True, True]


def test_a_stopped_job_goes_on(encoder: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "embed": True} for text in texts(30, longest=10)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    job = ["run", source, "--model", encoder, "-o", "out.parquet", "--commit-every", "3"]
    run([*job, "--max-time", "0"], tmp_path, expect=75)
    run(job, tmp_path)
    run(["run", source, "--model", encoder, "-o", "whole.parquet"], tmp_path)
    got, whole = (read(tmp_path / name)["embedding"].to_pylist() for name in ("out.parquet", "whole.parquet"))
    np.testing.assert_allclose(got, whole, atol=1e-6)


@pytest.mark.field("input", "encoding_format", "dimensions")
def test_embedding_lines_are_answered_as_lines(encoder: Path, tmp_path: Path) -> None:
    rows = [
        line("two", EMBEDDINGS, input=TEXTS[:2]),
        line("base64", EMBEDDINGS, input=TEXTS[0], encoding_format="base64"),
        line("ids", EMBEDDINGS, input=[0, 8, 2], dimensions=3),
        line("bad", EMBEDDINGS, input="fox", dimensions=65),
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    run(["run", source, "--model", encoder, "-o", "out.jsonl"], tmp_path)
    got = {row["custom_id"]: row["response"] for row in lines_of(tmp_path / "out.jsonl")}
    data = got["two"]["body"]["data"]
    assert [(item["object"], item["index"]) for item in data] == [("embedding", 0), ("embedding", 1)]
    for item, expected in zip(data, vectors(encoder, TEXTS[:2]), strict=True):
        np.testing.assert_allclose(item["embedding"], expected, atol=1e-5)
    usage = got["two"]["body"]["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    packed = np.frombuffer(b64decode(got["base64"]["body"]["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(packed, np.array(data[0]["embedding"], np.float32))
    assert len(got["ids"]["body"]["data"][0]["embedding"]) == 3
    (bad,) = lines_of(tmp_path / "out.errors.jsonl")
    assert bad["response"]["body"]["error"]["param"] == "dimensions"


@pytest.mark.field("query", "documents", "top_n", "return_documents", "classify")
def test_documents_are_ranked(scorer: Path, tmp_path: Path) -> None:
    logits = library_logits(scorer, [(TEXTS[0], document) for document in TEXTS[1:5]])
    expected = [1 / (1 + np.exp(-x[0])) for x in logits]
    rows = [
        {"id": "native", "query": TEXTS[0], "documents": TEXTS[1:5]},
        line("all", RERANK, query=TEXTS[0], documents=TEXTS[1:5]),
        line("best", RERANK, query=TEXTS[0], documents=TEXTS[1:5], top_n=2),
        line("texts", RERANK, query=TEXTS[0], documents=TEXTS[1:5], return_documents=True),
        {"id": "label", "text": TEXTS[0], "classify": True},
    ]
    run(["run", write_lines(tmp_path / "in.jsonl", rows), "--model", scorer, "-o", "out.parquet"], tmp_path)
    table = read(tmp_path / "out.parquet")
    assert "embedding" not in table.schema.names
    found = table.filter(pa.compute.equal(table["id"], "native")).to_pylist()
    assert [row["prompt_index"] for row in found] == [0, 1, 2, 3]
    np.testing.assert_allclose([row["scores"][0]["score"] for row in found], expected, atol=1e-5)
    (label,) = table.filter(pa.compute.equal(table["id"], "label")).to_pylist()
    assert label["text"] == "label 0" == label["scores"][0]["label"]
    run(["export", "out.parquet", "--format", "openai-batch"], tmp_path)
    lines = {row["custom_id"]: row for row in lines_of(tmp_path / "out.openai.jsonl")}
    order = np.argsort(expected)[::-1].tolist()
    assert [item["index"] for item in lines["all"]["response"]["body"]["results"]] == order
    assert [item["index"] for item in lines["best"]["response"]["body"]["results"]] == order[:2]
    assert "texts" not in lines
    assert pq.read_schema(tmp_path / "out.parquet").field("scores").type != SCHEMA.field("scores").type
    assert "label 0 0." in run(["show", "out.parquet"], tmp_path).stdout


def test_long_texts_are_cut_within_their_special_tokens(encoder: Path, scorer: Path, tmp_path: Path) -> None:
    long = [" ".join(["fox", "lake"] * 60), " ".join(["cat", "tree", "sun"] * 50)]
    source = write_lines(tmp_path / "in.jsonl", [{"text": long[0], "embed": True}])
    run(["run", source, "--model", encoder, "-o", "out.parquet", "--truncate", "right"], tmp_path)
    (row,) = read(tmp_path / "out.parquet").to_pylist()
    (kept,) = vectors(encoder, [" ".join(long[0].split()[:58])])  # of 60 tokens, as the files say
    np.testing.assert_allclose(row["embedding"], kept, atol=1e-5)
    pairs = [("fox", long[1]), (long[0], "sun"), (long[0], long[1])]
    source = write_lines(tmp_path / "pairs.jsonl", [{"query": q, "documents": [d]} for q, d in pairs])
    run(["run", source, "--model", scorer, "-o", "pairs.parquet", "--truncate", "right"], tmp_path)
    got = [row["scores"][0]["score"] for row in read(tmp_path / "pairs.parquet").to_pylist()]
    room = 64 - 4  # of RoBERTa's table of positions, and four special tokens
    cut = [(1, room - 1), (room - 1, 1), (room // 2, room - room // 2)]
    shown = [(" ".join(q.split()[:a]), " ".join(d.split()[:b])) for (q, d), (a, b) in zip(pairs, cut, strict=True)]
    expected = [1 / (1 + np.exp(-x[0])) for x in library_logits(scorer, shown)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_retry_keeps_the_vectors_of_good_rows(encoder: Path, tmp_path: Path) -> None:
    rows = [{"id": "good", "text": "the fox", "embed": True}, {"id": "bad", "text": "a", "embed": True, "n": 0}]
    source = write_lines(tmp_path / "in.jsonl", rows)
    job = ["run", source, "-o", "out.parquet", "--model", encoder]
    run(job, tmp_path)
    before = read(tmp_path / "out.parquet")
    assert [vector is None for vector in before["embedding"].to_pylist()] == [False, True]
    run([*job, "--retry-errors"], tmp_path)
    assert read(tmp_path / "out.parquet").equals(before)
