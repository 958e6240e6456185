"""The Python API: the same rows and results as the command, without files."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchgen
from batchgen import AdviceWarning, Completion, Engine, SamplingParams
from batchgen.config.python_words import in_python
from batchgen.errors import ModelError, RowError, UsageError
from tests.e2e.model import CONTEXT, DEFAULTS
from tests.e2e.rows import TOLERANCE, mixed_lines, prompts, rows_of, write_lines
from tests.e2e.runner import run

GREEDY = {"temperature": 0, "max_new_tokens": 8}


def test_importing_the_package_imports_no_large_library() -> None:
    code = "import sys, batchgen; assert not {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_exports_few_names() -> None:
    names = ["AdviceWarning", "Completion", "Engine", "SamplingParams", "__version__", "load_kd", "read"]
    assert dir(batchgen) == names
    assert all(getattr(batchgen, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        batchgen.Motor  # noqa: B018


def test_same_results_as_the_command(engine: Engine, model: Path, tmp_path: Path) -> None:
    lines = mixed_lines(80, seed=5)
    rows: list[Any] = [line for line in lines if isinstance(line, dict)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    # The command decides which values a batch line's `model` may have: these rows have `*`.
    run(["run", source, "-o", "out.parquet", "--model", model, "--dtype", "float32"], tmp_path)
    output = rows_of(tmp_path / "out.parquet")
    completions = list(engine.generate(rows, ordered=True))
    assert [c.key for c in completions] == [
        (row["row_index"], row["prompt_index"], row["sample_index"]) for row in output
    ]
    for completion, row in zip(completions, output, strict=True):
        assert_same(completion, row)


def assert_same(completion: Completion, row: dict[str, Any]) -> None:
    if row["error"] is not None:
        assert completion.error is not None
        assert row["error"]["code"] == completion.error.code
        assert in_python(row["error"]["message"]).endswith(completion.error.message)
        return
    for name in ("id", "text", "finish_reason", "stop_kind", "matched_stop", "prompt_tokens", "completion_tokens"):
        assert getattr(completion, name) == row[name]
    for name in ("cached_tokens", "seed", "effective_max_new_tokens", "dedup_of", "matched_text"):
        assert getattr(completion, name) == row[name], name
    assert (completion.output_ids is None) == (row["output_ids"] is None) == (row["scores"] is not None)
    assert list(completion.output_ids or []) == (row["output_ids"] or [])
    scores = None if completion.scores is None else [asdict(score) for score in completion.scores]
    assert (scores is None) == (row["scores"] is None)
    for score, expected in zip(scores or (), row["scores"] or (), strict=True):
        assert score == pytest.approx(expected, abs=TOLERANCE * score["tokens"])
    for name in ("output_logprobs", "output_top_logprobs", "score_logprobs"):
        got = getattr(completion, name)
        assert (got is None) == (row[name] is None)
        assert got is None or list(got) == pytest.approx(row[name], abs=TOLERANCE)
    assert np.array_equal(completion.output_top_ids, row["output_top_ids"])
    for name in ("input_logprobs", "input_top_ids", "input_top_logprobs"):
        got = getattr(completion, name)
        assert (got is None) == (row[name] is None)
        assert got is None or got.tolist() == pytest.approx(row[name], abs=TOLERANCE), "a masked entry is a null"


def test_completions_are_returned_as_they_finish(engine: Engine) -> None:
    rows = [{"id": str(i), "text": t, **GREEDY, "ignore_eos": True} for i, t in enumerate(prompts(40, 2))]
    rows[7]["max_new_tokens"] = 1
    stream = engine.generate(rows)
    assert isinstance(stream, Iterator)
    first = next(stream)
    assert first.id == "7", "the shortest row is returned before the others end"
    assert engine.last_run is not None
    steps = engine.last_run.loop.state.steps
    assert len(list(stream)) >= 39
    assert engine.last_run.loop.state.steps > steps


def test_ordered_gives_input_order(engine: Engine) -> None:
    texts = prompts(30, 3)
    rows: list[Any] = [{"text": t, "max_new_tokens": 30 - i, "temperature": 0, "n": 2} for i, t in enumerate(texts)]
    rows[4] = {"text": "x", "temperature": "hot"}
    rows[9] = {"text": ["one", "two"], **GREEDY}
    by_completion = [c.key for c in engine.generate(rows)]
    by_input = [c.key for c in engine.generate(rows, ordered=True)]
    assert by_input == sorted(by_completion)
    assert by_completion != by_input


def test_strings_are_prompts_under_the_models_defaults(engine: Engine) -> None:
    done = list(engine.generate(["The quick", "Hello there"], ordered=True))
    same = [{"text": "The quick", **DEFAULTS}, {"text": "Hello there", **DEFAULTS}]
    assert [list(c.output_ids or []) for c in done] == [
        list(c.output_ids or []) for c in engine.generate(same, ordered=True)
    ]
    assert [c.id for c in done] == ["row-0", "row-1"]
    assert all(c.effective_max_new_tokens == 128 for c in done)


def test_rows_override_params(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=5, return_logprob=True, stop=("zz",), seed=3)
    rows = ["Hello", {"text": "Hello", "max_new_tokens": 3}, {"text": "Hello", "temperature": 1.0, "seed": 4}]
    first, short, drawn = engine.generate(iter(rows), params, ordered=True)
    assert len(first.output_ids or []) == 5
    assert list(short.output_ids or []) == list(first.output_ids or [])[:3]
    assert (first.seed, short.seed, drawn.seed) == (3, 3, 4)
    assert drawn.output_logprobs is not None
    assert len(drawn.output_logprobs) == len(drawn.output_ids or []) > 0


@pytest.mark.field("max_new_tokens")
def test_max_new_tokens_none_generates_to_the_end_of_the_context(engine: Engine) -> None:
    (done,) = engine.generate(["Hello"], SamplingParams(temperature=0, max_new_tokens=None, ignore_eos=True))
    assert done.finish_reason == "length"
    assert (done.prompt_tokens or 0) + len(done.output_ids or []) == CONTEXT == engine.model.spec.context_length


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"max_tokens": 3}, "`max_tokens` is not an argument of generate(); write generate(rows, SamplingParams(max"),
        ({"temperature": 0}, "SamplingParams(temperature=...)"),
        ({"sampling_params": None}, "did you mean `params`?"),
        ({"order": True}, "did you mean `ordered`?"),
        ({"use_tqdm": False}, "did you mean `progress`?"),
        ({"prompt": "a"}, "did you mean `rows`?"),
        ({"lora_request": None}, "give rows `lora_path`"),
        ({"num_return_sequences": 2}, "an option of Hugging Face: use `n`"),
        ({"max_length": 9}, "use `max_new_tokens`, which does not count the prompt"),
        ({"shards": 3}, "its arguments are rows, params, ordered, on_event, progress"),
        ({"params": {"n": 2}}, "must be one SamplingParams for all rows, got dict; write SamplingParams(**params)"),
        ({"params": [SamplingParams()]}, "got list; give rows their own fields"),
    ],
)
def test_wrong_arguments_of_generate_name_the_right_one(engine: Engine, arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match=re.escape(part)):
        engine.generate(["a"], **arguments)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_model_length": 9}, "`max_model_length` is not an argument of Engine; did you mean `max_model_len`?"),
        ({"mem_fraction_static": 0.9}, "did you mean `gpu_memory_utilization`?"),
        ({"shard": "0/2"}, "its arguments are model, revision, "),
        (
            {"tensor_parallel_size": 2},
            "`tensor_parallel_size` is not an argument of Engine; did you mean `tensor_parallel`?",
        ),
        ({"trust_remote_code": True}, "code of a model folder is never run; leave it out"),
        ({"torch_dtype": "float32"}, "did you mean `dtype`?"),
        ({"device_map": "auto"}, "did you mean `device`?"),
        ({"enforce_eager": True}, "the engine does this where it helps; leave it out"),
        ({"temperature": 0.5}, "write generate(rows, SamplingParams(temperature=...))"),
        ({"max_num_seqs": 64, "max_tokens_per_step": 32}, "`max_tokens_per_step` (32) must be at least `max_num_"),
        ({"max_model_len": 10**9}, "`max_model_len=1000000000` is past the model's context"),
        ({"lora": {"x": "/none"}}, "Engine argument `lora`"),
    ],
)
def test_errors_of_an_engine_name_arguments_and_no_flags(model: Path, options: dict[str, Any], part: str) -> None:
    with pytest.raises((UsageError, ModelError), match=re.escape(part)) as caught:
        Engine(str(model), **options)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"text": "a", "lora_path": "x"}, "add it with Engine argument `lora=NAME=PATH`"),
        ({"text": "a", "stream": True}, "`stream` needs a destination for events: `on_event` of generate() in Python"),
        ({"text": "a" * 9000}, "shorten it"),
        ({"question": "a"}, "give it `text`, `input_ids`, `input_embeds` or `messages`"),
        ({"text": "a", "json_schema": {"if": {}}}, "allow it with Engine argument `lenient_schemas`"),
        ({"text": "a", "sampling_params": {"chat_template": "x"}}, "an option of vLLM"),
    ],
)
def test_errors_of_rows_name_arguments_and_no_flags(engine: Engine, row: dict[str, Any], part: str) -> None:
    (done,) = engine.generate([row])
    assert done.error is not None
    assert part in done.error.message
    assert "--" not in done.error.message


def test_advice_is_a_warning_once(model: Path) -> None:
    engine = Engine(str(model), dtype="float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(engine.generate([{"input_ids": [5]}] * 3, SamplingParams(max_new_tokens=1)))
        assert [str(each.message) for each in caught] == [
            "all 3 prompts are equal: for more samples of one prompt set `n`"
        ]
        rows = [{"input_ids": [token], "choice": ["yes"]} for token in (5, 6, 7)]
        for _ in engine.generate(rows):
            assert len(caught) == 1
    assert str(caught[1].message).startswith("all 3 answers are equal, and the prompts are not:")
    assert {(each.category, each.filename) for each in caught} == {(AdviceWarning, __file__)}


def test_the_demonstration_model_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{"role": "user", "content": "What is 17 + 25?"}], **GREEDY, "model": "demo"}]
    engine = Engine()
    (done,) = engine.generate(rows)
    assert done.text == "7+5=12, "
    assert re.fullmatch(r"Engine\('demo', llama, \d+M parameters, \w+ on cpu\)", repr(engine))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    with pytest.raises(ModelError, match="demo"):
        Engine("demo")


def test_progress_is_shown_where_it_is_watched(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = [{"text": "a", **GREEDY, "n": 2}, {"txt": "?"}, {"text": ["b", "c"], **GREEDY}]
    list(engine.generate(rows))
    assert capsys.readouterr().err == "", "not a terminal"
    list(engine.generate(rows, progress=True))
    shown = capsys.readouterr().err
    assert "reading" in shown
    assert "generating: 100%" in shown
    assert "4/4" in shown, "prompts, those of refused rows included"
    assert "tokens/s" in shown
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    next(stopped := engine.generate(rows))
    stopped.close()  # type: ignore[attr-defined]
    assert "generating" in capsys.readouterr().err
    list(engine.generate(rows, progress=False))
    assert capsys.readouterr().err == ""


def test_failed_rows_give_completions_with_errors(engine: Engine) -> None:
    rows: list[Any] = [
        {"text": "fine", **GREEDY},
        {"txt": "?"},
        {"text": "x", "image_data": ["a.png"]},
        {"input_ids": [10**6]},
        7,
    ]
    done = {c.row_index: c for c in engine.generate(rows)}
    codes = {i: c.error.code for i, c in done.items() if c.error is not None}
    assert codes == {1: "missing_prompt", 2: "unsupported_field", 3: "token_out_of_range", 4: "invalid_json"}
    assert done[0].error is None
    assert list(engine.generate([])) == []


@pytest.mark.field("model")
def test_a_row_may_name_the_engines_model(engine: Engine, model: Path) -> None:
    rows = [{"text": "x", **GREEDY, "model": name} for name in (str(model), model.name, "*", "another")]
    errors = [c.error and c.error.param for c in engine.generate(rows, ordered=True)]
    assert errors == [None, None, None, "model"]


@pytest.mark.parametrize("row", ["Hello", b"Hello", {"text": "Hello"}])
def test_one_row_instead_of_a_list_is_refused(engine: Engine, row: Any) -> None:
    """Refused at the call: each of its characters or keys would be a prompt."""
    with pytest.raises(
        UsageError,
        match=rf"`rows` must be a list of rows or a table, got one {type(row).__name__}; call generate\(\[row",
    ):
        engine.generate(row)


def test_wrong_options_and_models_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing-here"):
        Engine(str(tmp_path / "nothing-here"))
    with pytest.raises(UsageError, match="page_size"):
        Engine(str(model), page_size=0)
    for kind in (UsageError, TypeError):
        with pytest.raises(kind, match="pages"):
            Engine(str(model), pages=3)
    with pytest.raises(RowError, match="top_p"):
        SamplingParams(top_p=2.0)
