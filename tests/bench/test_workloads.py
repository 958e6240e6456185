"""`batchgen bench`: workload definitions and adapters. Counts are compared to brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from batchgen.bench import workloads
from batchgen.bench.floors import count_work
from batchgen.bench.shapes import adapter_folders, adapter_parameters
from batchgen.bench.workloads import (
    GPU_WORKLOADS,
    HYBRID_WORKLOADS,
    MORE_WORKLOADS,
    WORKLOADS,
    AdapterSet,
    BenchRow,
    BenchWorkload,
    Level,
    Workload,
    find_workload,
    find_workloads,
    load_workload,
    plain,
)
from batchgen.demo import model_path
from batchgen.errors import UsageError
from batchgen.models.lora.config import read_adapters
from tests.bench.fakes import TOY
from tests.models.loading import inspect_model

DEFINITIONS = Path(workloads.__file__).parent / "definitions"


def distinct(rows: Sequence[BenchRow]) -> int:
    """Number of tokens in the prefix tree, by enumerating all prefixes."""
    return len({tuple(row.ids[:end]) for row in rows for end in range(1, len(row.ids) + 1)})


# Trees


def test_named_workloads_have_the_described_shapes() -> None:
    sizes = {}
    for name, workload in (WORKLOADS | MORE_WORKLOADS).items():
        rows = workload.rows(8192)
        assert sum(row.samples for row in rows) == 64
        assert all(3 <= i < 8192 for row in rows for i in row.ids)
        assert max(len(row.ids) + row.max_new for row in rows) <= workload.longest
        sizes[name] = (
            min(len(r.ids) for r in rows),
            max(len(r.ids) for r in rows),
            min(r.max_new for r in rows),
            max(r.max_new for r in rows),
        )
    assert sizes["shared-prefix"] == (1056, 1056, 32, 32)
    assert sizes["few-shot-tree"] == (800, 800, 32, 32)
    low, high, *output = sizes["unique"]
    assert 32 <= low < high <= 256
    assert output == [64, 64]
    assert 8 <= sizes["mixed-lengths"][2] < sizes["mixed-lengths"][3] <= 256
    assert sizes["logprobs"] == sizes["hidden-states"] == sizes["json-constrained"] == sizes["many-loras"]
    assert sizes["logprobs"] == sizes["unique"]


@pytest.mark.parametrize(
    ("name", "tokens"), [("shared-prefix", 1024 + 64 * 32), ("few-shot-tree", 256 + 8 * 512 + 64 * 32)]
)
def test_distinct_tokens_equal_the_trees_size(name: str, tokens: int) -> None:
    rows = WORKLOADS[name].rows(8192)
    assert distinct(rows) == tokens


@pytest.mark.parametrize("name", ["unique", "mixed-lengths", "n-samples"])
def test_unique_prompts_share_prefixes_only_by_chance(name: str) -> None:
    rows = find_workload(name).rows(8192)
    assert sum(len(row.ids) for row in rows) - distinct(rows) <= 2


def test_every_turn_extends_the_previous_one() -> None:
    rows = MORE_WORKLOADS["multi-turn"].rows(8192)
    prompts = sorted(tuple(row.ids) for row in rows)  # each conversation's turns are adjacent, shortest first
    conversations = [prompts[at : at + 8] for at in range(0, 64, 8)]
    for turns in conversations:
        assert 64 <= len(turns[0]) <= 128
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert 32 <= len(after) - len(before) <= 96
    assert distinct(rows) == sum(len(turns[-1]) for turns in conversations), "the last turn contains the earlier ones"


def test_rows_are_deterministic() -> None:
    workload = WORKLOADS["mixed-lengths"]
    assert workload.rows(100) == workload.rows(100)
    assert replace(workload, seed=1).rows(100) != workload.rows(100)


def test_custom_workload_of_one_level() -> None:
    workload = Workload("w", "d", (Level(3, (1, 1)),), (1, 1))
    assert [len(row.ids) for row in workload.rows(10)] == [1, 1, 1]
    with pytest.raises(UsageError, match="vocabulary of more than 3"):
        workload.rows(3)


# Special rows


def test_every_nth_row_has_fields() -> None:
    rows = MORE_WORKLOADS["json-constrained"].rows(8192)
    assert ["json_schema" in row.fields for row in rows] == [True, False] * 32
    assert all(row.fields for row in MORE_WORKLOADS["logprobs"].rows(8192))
    assert [row.ids for row in plain(rows)] == [row.ids for row in rows]
    assert not any(row.fields for row in plain(rows))
    assert [name for name, workload in MORE_WORKLOADS.items() if not workload.special] == ["multi-turn", "n-samples"]


def test_adapters_rotate_over_the_rows() -> None:
    rows = MORE_WORKLOADS["many-loras"].rows(8192)
    assert [row.fields["lora_path"] for row in rows[:9]] == [*(f"rank-8-{i}" for i in range(8)), "rank-8-0"]


# Definitions


def test_every_definition_has_the_name_of_its_file() -> None:
    """Figures refer to the files by the workloads' names."""
    files = {path.stem: load_workload(path) for path in DEFINITIONS.rglob("*.toml")}
    assert {name: workload.name for name, workload in files.items()} == {name: name for name in files}
    assert files.keys() == {*WORKLOADS, *MORE_WORKLOADS, *HYBRID_WORKLOADS, *GPU_WORKLOADS, "demo", "pictures"}
    assert all(find_workload(name) == workload for name, workload in files.items())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "toy"', "", "`name` is missing"),
        ("[2, 3]", "[3, 2]", "`output` must be"),
        ("[2, 3]", "[0, 2]", "`output` must be"),
        ("[2, 3]", "3", "`output` must be"),
        ("[2, 3]", "[2, true]", "`output` must be a whole number"),
        ("[8, 8]", "[8]", "`tokens` must be"),
        ("[8, 8]", "[0, 8]", r"`levels\[0\]`: `tokens` must be"),
        ("children = 2", "children = 0", r"`levels\[1\]`: `children` must be at least 1"),
        ("children = 2", "child = 2", r"unknown key `child` \(did you mean children\?\)"),
        ("", "rows = 1", "unknown key `rows`"),
        ("", "samples = 0", "`samples` must be at least 1"),
        ("", "every = 0", "`every` must be at least 1"),
        ("", "fields = 1", "`fields` must be a table"),
        ("", 'rows_at = "ends"', "`rows_at` must be one of leaves, nodes"),
        ("", "adapters = { rank = 2 }", "`adapters`: `count` is missing"),
        ("", "adapters = { count = 0 }", "`adapters`: `count` must be at least 1"),
        ("", "task_rows = 3", "unknown key `levels`"),
        ("", "fields = { temperature = 1 }", "cannot check 'temperature'; it can check"),
        ("", "fields = { top_logprob_num = 1 }", r"\(did you mean top_logprobs_num\?\)"),
        ("", "fields = { top_logprobs_num = 1 }", "needs `return_logprob: true`"),
        ("", "fields = { return_logprob = 1 }", "`fields`: `return_logprob` must be"),
        ("", "fields = { return_hidden_states = true }", 'tokens = "output"'),
        ("", "samples = 2\nfields = { return_logprob = true }", "cannot be combined with `fields` or `adapters`"),
        ("name", "name name", "is not valid TOML"),
    ],
)
def test_errors_name_the_wrong_key_of_a_definition(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TOY.replace(old, new, 1) if old else f"{new}\n{TOY}")
    with pytest.raises(UsageError, match=message):
        load_workload(path)


def test_return_hidden_states_of_a_definition_gets_explicit_layers(tmp_path: Path) -> None:
    path = tmp_path / "states.toml"
    path.write_text(TOY + '\n[fields]\nreturn_hidden_states = { tokens = "output" }\n')
    workload = load_workload(path)
    assert isinstance(workload, Workload)
    assert workload.fields == {"return_hidden_states": {"layers": [-1], "tokens": "output"}}


def test_unknown_workload_error_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError,
        match=r"'uniqe' \(did you mean unique\?\); use one of unique, shared-prefix, .*demo, .*all, or a .toml file",
    ):
        find_workload("uniqe")
    with pytest.raises(UsageError, match="cannot read"):
        find_workload("missing.toml")


def test_names_of_a_command_line_select_workloads() -> None:
    assert [w.name for w in find_workloads([])] == [*WORKLOADS]
    assert [w.name for w in find_workloads([], demo=True)] == ["demo"]
    assert [w.name for w in find_workloads(["all", "demo"])] == [*WORKLOADS, *MORE_WORKLOADS, "demo"]
    with pytest.raises(UsageError, match="unique is given more than once"):
        find_workloads(["unique", "all"])


# Workloads for GPUs


def test_gpu_workloads_run_only_if_named() -> None:
    assert not set(GPU_WORKLOADS) & set(WORKLOADS)
    rows = GPU_WORKLOADS["w-tree"].rows(128_256)
    assert (len(rows), rows[0].samples, len(rows[0].ids), rows[0].max_new) == (4096, 4, 1620, 200)
    rows = GPU_WORKLOADS["w-nano"].rows(128_256)
    assert len(rows) == 256
    assert sum(row.max_new for row in rows) / 256 == pytest.approx(562, rel=0.05)


# The demonstration model's rows


def written(tmp_path: Path, text: str) -> BenchWorkload:
    (tmp_path / "own.toml").write_text(f'name = "own"\ndescription = "d"\n{text}')
    return load_workload(tmp_path / "own.toml")


def test_demo_rows_are_as_long_as_their_answers(tmp_path: Path) -> None:
    workload = written(tmp_path, "task_rows = 16")
    rows = workload.rows(2048)
    assert len(rows) == 16
    assert workload.longest == max(len(row.ids) + row.max_new for row in rows)
    assert rows == workload.rows(2048)
    assert rows != written(tmp_path, "task_rows = 16\nseed = 1").rows(2048)
    assert min(row.max_new for row in rows) >= 2, "an answer and an end"
    with pytest.raises(UsageError, match="needs the demonstration model's vocabulary of 2048 ids, the model has 8192"):
        workload.rows(8192)
    with pytest.raises(UsageError, match="`task_rows`"):
        written(tmp_path, "task_rows = 0")


def test_pictures_are_distinct_and_counted_as_such(tmp_path: Path) -> None:
    text = "pictures = 6\ninstructions = 2\ninstruction_tokens = [4, 4]\noutput = [3, 3]"
    workload = written(tmp_path, text)
    rows = workload.rows(2048)
    assert workload.pictures
    assert len({row.image for row in rows}) == 6
    assert len({tuple(row.ids) for row in rows}) == 2, "prompts have their instruction"
    assert [len(row.keys) for row in rows] == [len(row.ids) for row in rows]
    assert {row.max_new for row in rows} == {3}
    roots = {tuple(row.ids[:6]) for row in rows}  # ids in front of the picture, of which the first two are equal
    work = count_work(rows, inspect_model(model_path()), tied=True)
    assert work.distinct_prompt_tokens == sum(len(row.ids) - 6 for row in rows) + 4 * len(roots) + 2
    assert [row.image for row in rows] != [row.image for row in written(tmp_path, text + "\nseed = 1").rows(2048)]
    with pytest.raises(UsageError, match="`instructions` must be at least 1"):
        written(tmp_path, "pictures = 6\ninstructions = 0\ninstruction_tokens = [4, 4]\noutput = [3, 3]")


# Adapters


def test_adapters_are_built_once_in_pefts_layout(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    adapters = AdapterSet(2, rank=3)
    pairs = adapter_folders(str(folder), adapters)
    assert [name for name, _ in pairs] == ["rank-3-0", "rank-3-1"]
    read = read_adapters(pairs)
    per_layer = 3 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 48) + (48 + 32))
    assert adapter_parameters(str(folder), 3) == 2 * per_layer
    assert all({layer.scale for layer in adapter.layers.values()} == {1.0} for adapter in read)
    first = Path(pairs[0][1]) / "adapter_model.safetensors"
    stamp = first.stat().st_mtime_ns
    assert adapter_folders(str(folder), adapters) == pairs
    assert first.stat().st_mtime_ns == stamp
    assert {p.name for p in first.parent.parent.iterdir()} == {"0", "1"}, "no temporary folder is left"
