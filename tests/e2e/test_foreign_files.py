"""Files that others wrote: hostile texts and wrongly typed values give one clear error, never a traceback."""

from __future__ import annotations

import ast
import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.config.resolve import resolve_config
from batchgen.data.store.work_state import read_state
from batchgen.errors import BatchgenError, ModelError, UsageError
from batchgen.models.check import check_model
from batchgen.models.checkpoint.safetensors_header import read_header
from batchgen.request import foreign_text
from batchgen.request.foreign_text import MAX_DEPTH, MAX_DIGITS, ForeignTextError, read_json, read_toml, typed
from batchgen.text.tokens.model_files import load_generation_config
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import interrupt, run

DEEP = "[" * 3000
LONG = "9" * 5000
HOSTILE = {
    "deep list": DEEP,
    "deep object": '{"a":' * 3000,
    "closed deep list": "[" * 500 + "]" * 500,
    "long integer": f'{{"a": {LONG}}}',
    "integer past a double": f'{{"a": {"9" * (MAX_DIGITS + 1)}}}',
    "half a surrogate pair": r'{"a": "\ud800"}',
    "not UTF-8": b'{"a": "\xff"}',
    "cut": '{"a": ',
    "empty": "",
    "nothing but zeros": b"\0\0\0\0",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("unique_keys", [True, False])
def test_the_reader_has_one_exception(name: str, unique_keys: bool) -> None:
    text = HOSTILE[name]
    with pytest.raises(ForeignTextError):
        read_json(text, unique_keys=unique_keys)


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[1.5, -0]",
        '{"a": {"a": [true]}}',
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        "9" * MAX_DIGITS,
        "[NaN, -Infinity]",
        str(1 << 64),
        r'"\ud83d\ude00 \u0000"',
        '{"a": 1, "a": 2}',
        "1e999",
    ],
)
def test_the_reader_gives_what_pythons_decoder_gives(text: str) -> None:
    assert repr(read_json(text)) == repr(read_json(text.encode())) == repr(json.loads(text))


def test_repeated_keys_and_constants_are_refused_where_asked() -> None:
    with pytest.raises(ForeignTextError, match="the key 'a' occurs twice in one object"):
        read_json('{"a": 1, "b": 2, "a": 3}', unique_keys=True)
    with pytest.raises(ForeignTextError, match="NaN"):
        read_json("[NaN]", constants=False)
    assert read_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    "text", [f"a = {DEEP}", f"a = {LONG}", f"a = {'9' * 400}", "a = '\\ud800", "a." * 3000 + "b = 1"]
)
def test_toml_has_the_same_limits(text: str) -> None:
    with pytest.raises(ForeignTextError):
        read_toml(text.encode())


def test_a_file_is_read_up_to_the_limit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "options.toml"
    config.write_text("temperature = 0.5")
    size = (model / "config.json").stat().st_size
    monkeypatch.setattr(foreign_text, "MAX_FILE_BYTES", size)
    check_model(model)
    monkeypatch.setattr(foreign_text, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(ModelError, match=r"config\.json is larger than 0 MiB"):
        check_model(model)
    monkeypatch.setattr(foreign_text, "MAX_FILE_BYTES", len(config.read_bytes()) - 1)
    with pytest.raises(UsageError, match=r"options\.toml is larger than 0 MiB"):
        resolve_config({"inputs": ("in.jsonl",), "config": str(config)}, {}, tmp_path)


def test_the_view_names_the_key_and_both_types() -> None:
    for value, message in [
        ([], "must hold an object, and holds a list"),
        ({}, "has nothing as `a`, which must be an integer"),
        ({"a": True}, "has a boolean as `a`, which must be an integer"),
        ({"a": 1, "b": 1.5}, "has a number as `b`, which must be a string"),
    ]:
        with pytest.raises(ForeignTextError) as caught:
            typed(value, {"a": int, "b": (str, type(None))})
        assert str(caught.value) == message
    assert typed({"a": 1, "c": []}, {"a": int, "b": (str, type(None))}) == {"a": 1, "c": []}


OWN_TEXT = {
    "config/example_file.py": "reads what it has just written",
    "demo/questions.py": "a file of the package",
    "gguf/family.py": "a file of the package",
    "gguf/vocabulary.py": "a file of the package",
    "job/rows/fingerprint.py": "normalises what it has just written",
    "job/rows/ingest.py": "reads the spool of this job",
    "job/rows/tokenized_cache.py": "reads the spool of this job, whose checksum was compared",
    "data/store/sealed_json.py": "compares a checksum next",
    "data/states.py": "reads a record whose checksum was compared",
    "kernels/layouts.py": "a cache; imports nothing of ours",
    "kernels/chips.py": "a file of the package; imports nothing of ours",
    "request/fields/other_systems.py": "a file of the package",
    "request/foreign_text.py": "the reader",
    "request/json_text.py": "the reader of rows",
    "text/calls.py": "reads a value that begins inside an output, and catches what that raises",
    "request/rows/row_ids.py": "looks for the id of a row that json_text has refused",
}
"""Modules that call a decoder themselves, and why they may. Benchmarks read their own figures."""


DECODERS = ("json.loads", "json.load", "json.JSONDecoder", "orjson.loads", "tomllib.loads", "tomllib.load")


def test_no_other_module_decodes_foreign_text() -> None:
    package = Path(batchgen.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                call = f"{node.value.id}.{node.attr}"
                if call in DECODERS:
                    found.add(str(file.relative_to(package)))
    assert {name for name in found if not name.startswith("bench/")} == set(OWN_TEXT)


VALUES: list[Any] = [None, True, -1, 10**280, "x", [], [1], {}, {"a": 1}, [[None]]]
KEYS = [
    *("model_type", "architectures", "layer_types", "text_config", "auto_map", "num_hidden_layers", "hidden_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "sliding_window", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "dtype"),
    *("quantization_config", "vocab_size", "is_encoder_decoder", "index_topk"),
]


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


def test_every_wrongly_typed_value_of_config_json_is_refused_or_works(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    changes = [{key: value} for key in KEYS for value in VALUES]
    changes += [{"rope_parameters": None, "rope_scaling": {**rope, key: value}} for key in rope for value in VALUES]
    for change in changes:
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with suppress(ModelError):
            check_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_hostile_files_of_a_model_give_a_model_error(folder: Path, name: str) -> None:
    for text in HOSTILE.values():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if name == "config.json":
            with pytest.raises(ModelError, match=r"config\.json"):
                check_model(folder)
        if name == "generation_config.json":
            with pytest.raises(ModelError, match=name):
                load_generation_config(folder)
        with suppress(BatchgenError):  # the library may not read what is hostile
            Tokenizer.load(folder, model=folder)


@pytest.mark.parametrize("text", [*map(str, HOSTILE), '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_hostile_weight_indexes(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    found = HOSTILE.get(text, text)
    (folder / "model.safetensors.index.json").write_bytes(found if isinstance(found, bytes) else found.encode())
    with pytest.raises(ModelError, match="is not an index of weights"):
        check_model(folder)


def safetensors(path: Path, header: str) -> Path:
    data = header.encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(data)) + data + b"\0" * 8)
    return path


def entry(**changes: Any) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}})


HEADERS = [
    *(text for text in HOSTILE.values() if isinstance(text, str)),
    entry(shape=[10**399]),
    entry(shape=[1 << 62, 1 << 62, 1 << 62]),
    entry(shape=[2] * 10_000),
    entry(shape=[2.5]),
    entry(shape="2"),
    entry(shape=[True, 2]),
    entry(shape=[-1, -2]),
    entry(data_offsets=[0]),
    entry(data_offsets=[8, 0]),
    entry(data_offsets={"0": 8}),
    entry(dtype=["F32"]),
    entry(dtype="F99"),
    '{"a": 1}',
    '{"__metadata__": 3}',
]


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_a_hostile_tensor_file_that_a_row_names_is_the_error_of_that_row(
    model: Path, tmp_path: Path, number: int
) -> None:
    path = safetensors(tmp_path / "a.safetensors", HEADERS[number])
    with pytest.raises(ModelError):
        read_header(path)
    if number % 5:
        return
    rows = [{"input_embeds": "a.safetensors", "max_new_tokens": 1}, {"text": "Hello", "max_new_tokens": 1}]
    write_lines(tmp_path / "in.jsonl", rows)
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--media-root", tmp_path], tmp_path)
    first, second = rows_of(tmp_path / "out.parquet")
    assert first["error"]["code"] == "media_error"
    assert second["error"] is None


ARGUMENTS = [DEEP, LONG, '{"a": ' + LONG + "}", r'{"a": "\ud800"}', '{"a": ' * 900]


def test_hostile_arguments_of_tool_calls_are_at_most_the_errors_of_their_rows(model: Path, tmp_path: Path) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": text}} for text in ARGUMENTS]
    asked = {"role": "user", "content": "1+1?"}
    rows = [{"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]} for call in calls]
    write_lines(tmp_path / "in.jsonl", [*rows, {"text": "Hello", "max_new_tokens": 1}])
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model], tmp_path)
    assert rows_of(tmp_path / "out.parquet")[-1]["error"] is None


@pytest.mark.parametrize(
    "text", [f"temperature = {DEEP}", f"seed = {LONG}", "temperature = 1e999999", "seed = 1979-05-27"]
)
def test_hostile_configurations_exit_with_2(model: Path, tmp_path: Path, text: str) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "Hello"}])
    (tmp_path / "job.toml").write_text(text)
    done = run(["run", "in.jsonl", "--model", model, "--config", "job.toml"], tmp_path, expect=2)
    assert "job.toml" in done.stderr
    assert "Traceback" not in done.stderr


RUN_JSON = [
    *HOSTILE.values(),
    "[]",
    '{"fingerprint": 1, "info": {}, "overwrite": false}',
    '{"fingerprint": "a", "info": [], "overwrite": false}',
    '{"fingerprint": "a", "info": {}, "overwrite": "no"}',
    '{"fingerprint": "a", "info": {}, "overwrite": false, "clock": 5}',
    '{"fingerprint": "a", "info": {}, "overwrite": false, "replaces": []}',
]


def test_a_hostile_run_json_or_lock_ends_no_run_with_a_traceback(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": f"Hello {i}", "max_new_tokens": 3} for i in range(40)])
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model]
    interrupt(command, tmp_path)
    work = tmp_path / "out.parquet.work"
    whole = (work / "run.json").read_bytes()
    for text in RUN_JSON:
        (work / "run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        state = read_state(work)
        assert state is not None, "each part has a copy"
        assert state["info"] is None
    for text in RUN_JSON[:1], RUN_JSON[-1:]:
        for name in ("run.json", "lock"):
            (work / name).write_text(str(text[0]))
        done = run([*command, "--limit", "3"], tmp_path, expect=2)  # another job: the work is looked at, and kept
        assert "Traceback" not in done.stderr
        assert "internal error" not in done.stderr
    (work / "run.json").write_bytes(whole)
    run(command, tmp_path)
    assert len(rows_of(tmp_path / "out.parquet")) == 40


def test_a_column_name_that_is_not_utf_8_exits_with_4(model: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "qzqz": [1]}), tmp_path / "in.parquet", store_schema=False)
    data = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(data.replace(b"qzqz", b"q\xff\xfeq"))
    done = run(["run", "in.parquet", "--model", model], tmp_path, expect=4)
    assert "in.parquet: the name of a column is not UTF-8" in done.stderr
