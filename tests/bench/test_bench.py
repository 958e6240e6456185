"""`batchgen bench` with a tiny model: models, the correctness gate and whole runs. Tests no times."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer

import batchgen
from batchgen.bench.command import run_command as run_bench_command
from batchgen.bench.config import BenchConfig
from batchgen.bench.gate import Check, GateFailed, continues_to_json, gate_rows, returned_counts
from batchgen.bench.process import EngineFailed, EngineProcess, EngineSource, Generated, LoadSpec, parse_peers
from batchgen.bench.run import run_bench
from batchgen.bench.shapes import SHAPES, build_model, resolve_bench_model
from batchgen.bench.workloads import BenchRow
from batchgen.cli.app import run_command
from batchgen.demo import model_path
from batchgen.errors import UsageError
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.bench.fakes import TEXT, TOY, InProcess, Stub, console_text, silent_console, starting
from tests.models.loading import inspect_model

# Models


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (TEXT, 400 * 32 + 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32),
        (replace(TEXT, family="qwen3", tied=False), TEXT.parameters + 400 * 32 + 2 * 2 * 8),
    ],
)
def test_random_models_are_reproducible_and_have_their_shape(tmp_path: Path, shape, parameters: int) -> None:  # type: ignore[no-untyped-def]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        build_model(shape, tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    spec = inspect_model(tmp_path / "one", dtype="float32", device="cpu")
    assert (spec.implementation, spec.context_length) == ("native", 128)
    assert spec.parameters == shape.parameters == parameters
    tokenizer = RawTokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.decode(tokenizer.encode('{"a": 12}').ids) == '{"a": 12}'


def test_named_shapes_count_their_parameters() -> None:
    counts = {name: SHAPES[name].parameters for name in ("0.6b", "1b", "8b")}
    assert counts == {"0.6b": 596_049_920, "1b": 1_235_814_400, "8b": 8_030_261_248}


def test_a_random_model_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("batchgen.bench.shapes.SHAPES", {"tiny": TEXT})
    first = Path(resolve_bench_model("random:tiny"))
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_bench_model("random:tiny") == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in first.parent.iterdir()] == [first.name], "no temporary folder is left"
    assert resolve_bench_model("some/folder") == "some/folder"
    assert resolve_bench_model("demo") == str(model_path())
    with pytest.raises(UsageError, match="use one of random:tiny, demo, or"):
        resolve_bench_model("random:7b")


# The gate

ROWS = [BenchRow([5, 6], 2), BenchRow([7], 2)]
TRUTH = [[1, 2], [3, 4]]


def check(answers: Sequence[Sequence[int]], special: Sequence[Sequence[int]] | None = None, **counted: int) -> Check:
    plain = [list(ids) for ids in answers]
    return Check("toy", Stub(plain, None if special is None else [list(ids) for ids in special], counted), {})


def test_gate_passes_only_on_equal_ids() -> None:
    check(TRUTH).exact_ids(ROWS, TRUTH)
    for wrong, message in (
        ([[1, 2], [3, 5]], "checked row 1 .1 prompt tokens.: output position 1 is 5, the reference has 4"),
        ([[1], [3, 4]], "output position 1 is missing, the reference has 2"),
        ([[1, 2, 3], [3, 4]], "output position 2 is 3, the reference has missing"),
    ):
        with pytest.raises(GateFailed, match=message):
            check(wrong).exact_ids(ROWS, TRUTH)


def test_peers_must_have_most_rows_equal_and_some_first_tokens_in_the_measured_dtype() -> None:
    truth = [[i, i] for i in range(20)]
    rows = [BenchRow([5], 2)] * 20

    def share(wrong: int) -> float:
        return check([[i, i + (i < wrong)] for i in range(20)]).equality(rows, truth)

    assert [share(0), share(1), share(6)] == [1, 0.95, 0.7]
    with pytest.raises(GateFailed, match="stub on toy has the reference's ids in 65% of rows in float32, at least 70%"):
        share(7)
    half = [[i, 9] if i % 2 else [60, i] for i in range(20)]
    assert check(half).agreement(rows, truth) == 0.5
    with pytest.raises(GateFailed, match="0% of the first tokens"):
        check([[60, i] for i in range(20)]).agreement(rows, truth)
    with pytest.raises(GateFailed, match="checked row 0 has 1 new tokens, asked for 2"):
        check([[i] for i in range(20)]).agreement(rows, truth)


def test_gate_rows_are_spread_over_the_workload() -> None:
    rows = [BenchRow([i], 30, samples=4) for i in range(64)]
    picked = gate_rows(rows)
    assert (len(picked), len(gate_rows(rows, peers=True))) == (6, 20)
    assert picked[0].ids == [0]
    assert picked[-1].ids[0] > 48
    assert {(row.max_new, row.samples) for row in (*picked, *gate_rows(rows, peers=True))} == {(8, 1)}
    assert gate_rows(rows[:1]) == [BenchRow([0], 8)]


def test_fields_must_not_change_ids_and_must_be_returned(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    logprobs = {"return_logprob": True, "top_logprobs_num": 20}
    states = {"return_hidden_states": {"layers": [0, -1], "tokens": "output"}}
    rows = [BenchRow([5], 3, fields=logprobs), BenchRow([6], 3, fields=states)]
    ids = [[1, 2, 3], [4, 5, 6]]
    counts = {"top_logprobs": 60, "output_states": 6}
    assert returned_counts(rows, ids) == counts
    check(ids, ids, **counts).fields(rows, tokenizer)
    for special, counted, message in (
        ([[1, 2, 3], [4, 5, 7]], counts, "stub on toy in float32: row 1 has other ids with return_hidden_states than"),
        (ids, counts | {"top_logprobs": 59}, "59 top logprobs came back, not 60"),
        (ids, {"top_logprobs": 60}, "None output states"),
    ):
        with pytest.raises(GateFailed, match=message):
            check(ids, special, **counted).fields(rows, tokenizer)


def test_constrained_rows_must_begin_a_json_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    rows = [BenchRow([5], 9, fields={"json_schema": {}}), BenchRow([6], 1)]
    good, bad = (tokenizer.encode_plain([text])[0] for text in ('[{"kind": "no', '[{"kind": no'))
    check([[1], [7]], [good, [7]]).fields(rows, tokenizer)
    with pytest.raises(GateFailed, match="row 0 is held to a JSON schema and begins '"):
        check([[1], [7]], [bad, [7]]).fields(rows, tokenizer)
    with pytest.raises(GateFailed, match="row 1 has other ids"):
        check([[1], [7]], [good, [8]]).fields(rows, tokenizer)


def test_beginnings_of_json_are_recognised() -> None:
    document = '[{"a": "b\\u00e9\\n", "c": -12.5e-3, "d": true, "e": [null, false]}, {"x": {}}]'
    json.loads(document)
    assert [document[:end] for end in range(len(document) + 1) if not continues_to_json(document[:end])] == []
    for wrong in ("[}", "x", "[1,,", '{"a" 1', "{a", "[tru,", '["a" "b"', "nulx", "[1 2", '"\\x', "]", '{"a":}'):
        assert not continues_to_json(wrong), wrong


def test_rows_of_an_adapter_must_equal_the_merged_model() -> None:
    rows = [BenchRow([5], 2, fields={"lora_path": "rank-8-0"})]
    check([], [[1, 2]]).adapter(rows, [[1, 2]], [[3, 4]])
    with pytest.raises(GateFailed, match=r"row 0 of an adapter gives \[1, 3\], the merged model \[1, 2\]"):
        check([], [[1, 3]]).adapter(rows, [[1, 2]], [[3, 4]])
    with pytest.raises(GateFailed, match="changes no row"):
        check([], [[1, 2]]).adapter(rows, [[1, 2]], [[1, 2]])


def test_samples_must_differ_and_be_reproducible() -> None:
    rows = [BenchRow([5], 2, samples=2), BenchRow([6], 2, samples=2)]
    good = [[1, 2, 3, 4], [5, 6, 5, 7]]
    check(good).samples(rows, replays=True)
    with pytest.raises(GateFailed, match="row 1 has 3 ids, not 2 samples of 2"):
        check([[1, 2, 3, 4], [5, 6, 5]]).samples(rows, replays=True)
    with pytest.raises(GateFailed, match="the 2 samples of row 0 are all equal"):
        check([[1, 2, 1, 2], [5, 6, 5, 7]]).samples(rows, replays=True)

    class Forgetful(Stub):
        def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
            self.answers = [[ids[-1], *ids[:-1]] for ids in self.answers]
            return super().generate(rows, setting)

    Check("toy", Forgetful(good), {}).samples(rows, replays=False)
    with pytest.raises(GateFailed, match="samples differ when generated again with the same seeds"):
        Check("toy", Forgetful(good), {}).samples(rows, replays=True)


# Whole runs


@pytest.fixture
def toy(tmp_path: Path, fast_rates: None) -> str:
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return str(path)


def test_run_alone(folder: Path, toy: str) -> None:
    lines: list[str] = []
    console = silent_console()
    run_bench(
        BenchConfig((toy,), str(folder), "none", 2, "float32", device="cpu", cpu_threads=1),
        lines.append,
        console,
        starting(),
    )
    figures = [json.loads(line) for line in lines]
    assert [(f["engine"], f["metric"]) for f in figures] == [
        ("batchgen", "output_tokens_per_second"),
        ("batchgen", "output_tokens_per_cpu_second"),
    ]
    first = figures[0]
    assert (first["workload"], first["dtype"], first["repeat"], first["ratio"]) == ("toy", "float32", 2, {})
    assert first["min"] <= first["value"] <= first["max"]
    counted = first["counted"]
    assert counted["prompt_tokens_computed"] == counted["distinct_prompt_tokens"] < counted["prompt_tokens"]
    assert counted["decode_rows"] == counted["output_tokens"] - 2
    assert first["threads"] == 1
    assert first["cpu"]
    assert "batchgen equals the reference in float32" in console_text(console)
    assert "toy" in console_text(console).splitlines()[-1]


SPECIAL = TOY + "\n[fields]\nreturn_logprob = true\ntop_logprobs_num = 3\n"
ADAPTED = TOY.replace('"toy"', '"adapted"') + "\n[adapters]\ncount = 2\nrank = 2\n"
SAMPLED = TOY.replace('"toy"', '"sampled"\nsamples = 2')


def test_special_workloads_run_with_and_without_their_fields(
    folder: Path, tmp_path: Path, fast_rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = tuple(str(tmp_path / f"{number}.toml") for number in range(3))
    for name, text in zip(names, (ADAPTED, SPECIAL, SAMPLED), strict=True):
        Path(name).write_text(text)
    measured = set()

    def make(source: EngineSource, spec: LoadSpec) -> InProcess:
        measured.add((source.name, spec.dtype, "lora" in spec.options))
        return InProcess(source, spec)

    lines: list[str] = []
    console = silent_console()
    config = BenchConfig(names, str(folder), "transformers", 2, "bfloat16", "asked", "cpu", 1)
    run_bench_command(config, lines.append, console, starting(make))
    figures = [json.loads(line) for line in lines]
    rates = [(f["workload"], f["engine"]) for f in figures if f["metric"] == "output_tokens_per_second"]
    assert rates == [
        ("toy", "batchgen"),
        ("sampled", "batchgen"),
        ("sampled", "transformers"),
        ("adapted", "batchgen"),
    ], "transformers does not run rows with fields; adapters come last, in separate processes"
    for name in ("toy", "adapted"):
        assert console_text(console).count(f"left out: transformers of {name}: its script does not support") == 2, (
            "when it is skipped, and after the table"
        )
    assert "transformers of sampled" not in console_text(console)
    reasons = {f["workload"]: f["reason"] for f in figures if f["metric"] == "left_out"}
    assert reasons.keys() == {"toy", "adapted"}
    assert reasons["adapted"].endswith("does not support lora_path")
    slower = [(f["workload"], f["engine"], f["value"]) for f in figures if f["metric"] == "slowdown"]
    assert slower == [("toy", "batchgen", 0.0), ("adapted", "batchgen", 0.0)], "every pass takes a second"
    assert {(name, adapted) for name, dtype, adapted in measured if dtype == "bfloat16"} == {
        ("batchgen", False), ("transformers", False), ("batchgen", True)
    }  # fmt: skip
    counted = {f["workload"]: f["counted"] for f in figures if f["engine"] == "batchgen"}
    assert counted["toy"]["top_logprobs"] == 3 * counted["toy"]["output_tokens"]
    assert counted["sampled"]["output_tokens"] == 2 * counted["toy"]["output_tokens"]
    assert counted["adapted"]["distinct_prompt_tokens"] == counted["adapted"]["prompt_tokens"]


class WrongToken(InProcess):
    """Changes one id of one plain row of batchgen's."""

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        found = super().generate(rows, setting)
        if self.name == "batchgen" and not rows[1].fields:
            found.outputs[1][1] ^= 1
        return found


class WithoutLogprobs(InProcess):
    """Returns no logprobs."""

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        return replace(super().generate(rows, setting), counted={})


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (WrongToken, r"batchgen on toy in float32, checked row 1 .* output position 1 is"),
        (WithoutLogprobs, "batchgen on toy in float32: None top logprobs came back, not"),
    ],
)
def test_wrong_output_fails_the_run_without_figures(
    folder: Path, toy: str, engine: type[InProcess], message: str
) -> None:
    Path(toy).write_text(SPECIAL)
    lines: list[str] = []
    config = BenchConfig((toy,), str(folder), "none", 1, "float32", device="cpu", cpu_threads=1)
    with pytest.raises(GateFailed, match=message) as red:
        run_bench(config, lines.append, silent_console(), starting(engine))
    assert lines == []
    assert red.value.exit_code == 1


def test_rows_longer_than_the_context_are_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="shared-prefix has rows of up to 1088 tokens, the model's context is 128"):
        run_bench(BenchConfig(("shared-prefix",), str(folder)), print, silent_console())


def test_baseline_runs_another_checkout(tmp_path: Path, folder: Path) -> None:
    """The other checkout's modules run in a separate process, driven by this version."""
    root = tmp_path / "older"
    shutil.copytree(Path(batchgen.__file__).parent, root / "batchgen", ignore=shutil.ignore_patterns("__pycache__"))
    init = root / "batchgen" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{batchgen.__version__}"', '"0.0.9"'))
    (source,) = parse_peers(f"baseline={root}")
    with EngineProcess(source, LoadSpec(str(folder), "float32", "cpu", 1)) as engine:
        assert (engine.name, engine.version) == ("baseline", "0.0.9")
        with pytest.raises(EngineFailed, match="baseline failed at generate: RuntimeError: row 0"):
            engine.generate([BenchRow([999], 1)], {})
        assert len(engine.generate([BenchRow([9], 2)], {}).outputs[0]) == 2, "the process survives the error"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown workload 'nothing'"),
        (["plan", "uniqe"], "unknown workload 'uniqe' (did you mean unique?)"),
        (["strtup"], "did you mean startup?"),
        (["plan", "--plan-size", "many"], "--plan-size must be ROWSxTOKENS"),
        (["job", "--cpu-threads", "1"], "--cpu-threads has no effect on job, which run no engines; leave it out"),
        (["plan", "startup", "--model", "random:5m"], "--model has no effect on plan and startup"),
        (["plan", "startup", "--tuned", "x.jsonl"], "--tuned has no effect on plan and startup"),
        (["startup", "--dtype", "bfloat16"], "--dtype has no effect on startup"),
        (["plan", "--repeat", "3"], "--repeat has no effect on plan, which is measured once; leave it out"),
        (["job", "--plan-size", "9x9"], "--plan-size has no effect on job; only workload plan uses it; leave it out"),
        (["--plan-size", "9x9"], "--plan-size has no effect on the default workloads"),
        (["plan", "unique", "--peers", "vlm"], "unknown peer 'vlm' (did you mean vllm?)"),
        (["plan", "unique", "--tuned", "none.jsonl"], "--tuned: cannot read none.jsonl"),
        (["plan", "unique", "--timeout", "inf"], "`--timeout` must be a duration such as 90,"),
        (["--model", "random:1t"], "unknown random model"),
        (["--dtype", "int3"], "dtype"),
        (["--repeat", "0"], "--repeat"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_options_are_checked_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("measured")

    if arguments[:2] == ["plan", "unique"]:
        monkeypatch.setattr("batchgen.bench.jobs.planning.plan_lines", never)
    assert run_command(["bench", "--peers", "none", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""
