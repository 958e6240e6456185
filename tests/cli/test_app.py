"""Exit codes, streams and messages of the command line, with a fake job."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen import __version__
from batchgen.cli.app import _replace_closed_streams, run_command
from batchgen.cli.flags import translated
from batchgen.config.run_config import OPTIONS, RunConfig
from batchgen.config.units import Shard
from batchgen.errors import (
    BatchgenError,
    DeviceError,
    FingerprintError,
    InputError,
    Interrupted,
    ModelError,
    OutputError,
    TooManyErrors,
    UsageError,
)
from batchgen.job.finished import OpenedCommand
from batchgen.job.preflight import CheckedJob
from batchgen.job.summary import RunSummary
from batchgen.request.fields.other_systems import FLAGS_OF_OTHERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"text": "a"}\n')  # checked before the job starts
    for name in os.environ:
        if name.startswith("BATCHGEN_"):
            monkeypatch.delenv(name)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[RunConfig]]:
    """Replace the job by a fake that records its configuration and returns or raises `outcome`."""

    def install(outcome: Any) -> list[RunConfig]:
        seen: list[RunConfig] = []

        def run_job(command: OpenedCommand, *display: object) -> Any:
            return end(command.job)

        def end(checked: CheckedJob) -> Any:
            seen.append(checked.config)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        def check_job(checked: CheckedJob, progress: object, as_json: bool) -> int:
            end(checked)
            print("json" if as_json else "text")
            return 0

        for name, function in (("run", run_job), ("check", check_job)):
            module = types.ModuleType(f"batchgen.job.{name}")
            setattr(module, f"{name}_job", function)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return seen

    return install


SUMMARY = RunSummary("p.out.parquet", rows=2, rows_ok=2, rows_error=0, fingerprint="f")


# Start-up


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom batchgen.cli.app import run_command\n"
        "status = [run_command(words.split()) for words in sys.argv[1:]]\n"
        "heavy = {'torch', 'transformers', 'xgrammar', 'pyarrow', 'pyarrow.dataset', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else any(status))"
    )
    done = python(code, "--help", "run --help", "run --help all", "check --help seed", "show --help", "help seed")
    assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"batchgen {__version__}\n"


def test_completion() -> None:
    done = python("from batchgen.cli.app import main; main()", _BATCHGEN_COMPLETE="source_bash")
    assert "_BATCHGEN_COMPLETE=complete_bash" in done.stdout


COMPLETIONS = {
    "run in.jsonl --device ": ["auto", "cuda", "cpu"],
    "check in.jsonl --device c": ["cuda", "cpu"],
    "run in.jsonl --on-bad-row ": ["error-row", "skip", "fail"],
    "verify out.parquet --device g": [],
    "export out.parquet --format ": ["openai-batch", "jsonl", "kd"],
    "bench --peer-dtype ": ["best", "asked"],
    "help con": ["constraints", "configuration", "contributing"],
    "run --retry": ["--retry-errors"],
    "do": ["doctor"],
}
"""Begun command line -> the words that a shell offers."""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("words", COMPLETIONS)
def test_choices_are_completed(words: str, shell: str) -> None:
    line = f"batchgen {words}"
    given = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    if shell == "zsh":
        given = {"_TYPER_COMPLETE_ARGS": line}
    done = python("from batchgen.cli.app import main; main()", _BATCHGEN_COMPLETE=f"complete_{shell}", **given)
    offered = done.stdout.split("\n")
    if shell == "zsh":
        offered = re.findall(r"""^(?:_arguments '\*: :\(\()?"(.*?)\"""", done.stdout, re.M)
    assert sorted(filter(None, offered)) == sorted(COMPLETIONS[words])


def test_bash_completes_with_the_script_that_is_installed(tmp_path: Path) -> None:
    program = tmp_path / "batchgen"
    program.write_text(f"#!{sys.executable}\nfrom batchgen.cli.app import main\nmain()\n")
    program.chmod(0o755)
    script = """
        eval "$(_BATCHGEN_COMPLETE=source_bash batchgen)"
        COMP_WORDS=(batchgen run in.jsonl --device c) COMP_CWORD=4
        _batchgen_completion batchgen
        echo "${COMPREPLY[@]}"
    """
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "cuda cpu\n", done.stderr


# Help


def test_help_shows_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--help", "all"]) == 0
    text = capsys.readouterr().out
    for option in OPTIONS:
        for flag in option.flags:
            assert re.search(rf"(^|[ /]){flag}\b", text, re.M), option.name


def test_no_arguments_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["run"], ["show"]):
        assert run_command(arguments) == 2
        captured = capsys.readouterr()
        assert "Usage: batchgen" in captured.out + captured.err


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_never_truncates_an_option(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run_command(["run", "--help", "all"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert "--skip-special-tokens / --no-skip-special-tokens" in text


@pytest.mark.parametrize("command", ["run", "check", "plan"])
def test_the_short_help_lists_what_people_use(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for flag in ("-h", "--help"):
        assert run_command([command, flag]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    for word in ("-o, --output ", "--model ", "--temperature ", "--max-new-tokens ", "--limit ", "--help all"):
        assert word in texts[0]
    assert "--page-size" not in texts[0]
    examples = re.findall(rf"^  batchgen {command} (.*)$", texts[0], re.M)
    assert len(examples) >= 2
    for example in examples:
        words = [command, "p.jsonl", *shlex.split(example)[1:], "--help"]  # each option is one that exists
        assert run_command(words) == 0


def test_the_help_about_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--help", "KV"]) == 0
    text = capsys.readouterr().out
    assert "--kv-memory" in text
    assert "--page-size" in text, "its help says KV"
    assert "--temperature" not in text
    assert "Usage:" not in text
    assert run_command(["merge", "--help", "duplicate"]) == 0
    text = capsys.readouterr().out
    assert "--allow-duplicate-ids" in text
    assert "--overwrite" not in text
    assert run_command(["run", "-h", "nothing-like-it"]) == 2
    assert "no option of `batchgen run` has `nothing-like-it`" in capsys.readouterr().err
    assert run_command(["run", "p.jsonl", "--stop", "-h", "--help", "--seed", "3"]) == 0
    assert "--page-size" not in capsys.readouterr().out, "-h is a value, and a flag is not a word"


# Delegation


def test_flags_reach_the_job(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seen = job(SUMMARY)
    line = "run p.jsonl --temperature 0.7 --stop a --stop b --no-dedup --overwrite --shard 0/2 --no-chat -o out"
    assert run_command(line.split()) == 0
    (config,) = seen
    assert config.inputs == ("p.jsonl",)
    assert config.sampling == {"temperature": 0.7, "stop": ("a", "b")}
    assert (config.engine.dedup, config.existing, config.chat) == (False, "overwrite", False)
    assert (config.shard, config.output) == (Shard(0, 2), Path("out"))
    captured = capsys.readouterr()
    assert captured.out == "", "the summary is not a result"
    assert "2 (ok 2, errors 0)" in captured.err


def test_flags_of_other_systems_are_named_and_reach_the_job(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    received = job(SUMMARY)
    words = ["--block-size", "32", "--max-num-batched-tokens=8k", "--gpu-memory-utilization", "0.9", "-o", "b.parquet"]
    words += ["--block-size", "64", "--max-model-len", "1k"]
    assert run_command(["run", "p.jsonl", *words]) == 0
    engine = received[0].engine
    assert (engine.page_size, engine.max_tokens_per_step, engine.max_model_len) == (64, 8000, 1000)
    assert engine.gpu_memory_utilization == engine.kv_budget == 0.9
    lines = capsys.readouterr().err.splitlines()
    expected = ["--block-size is read as --page-size", "--max-num-batched-tokens is read as --max-tokens-per-step"]
    assert lines[:2] == expected
    assert run_command(["run", "p.jsonl", "--gpu-memory-utilization", "0.9", "--kv-memory", "1GiB"]) == 2
    assert "cannot be combined" in capsys.readouterr().err
    assert run_command(["run", "p.jsonl", "--gpu-memory-utilization", "2"]) == 2
    assert "must be a share above 0 and up to 1" in capsys.readouterr().err


def test_words_behind_two_dashes_stay_words() -> None:
    assert translated(["run", "--", "--block-size"]) == (["run", "--", "--block-size"], [])


@pytest.mark.parametrize(("flag", "own"), FLAGS_OF_OTHERS.items())
def test_flags_of_other_systems_are_none_here_and_mean_one(flag: str, own: str) -> None:
    ours = {spelling for option in OPTIONS for spelling in option.flags}
    assert flag not in ours
    assert own in ours


def test_environment_and_files_reach_the_job(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = job(SUMMARY)
    (tmp_path / "batchgen.toml").write_text("seed = 5\nlimit = 7")
    monkeypatch.setenv("BATCHGEN_SEED", "6")
    assert run_command(["run", "p.jsonl"]) == 0
    assert (seen[0].engine.seed, seen[0].limit) == (6, 7)


def test_report_is_the_only_output_on_stdout(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job(SUMMARY)
    assert run_command(["run", "p.jsonl", "--report", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows_ok"] == 2
    assert "output" in captured.err


def test_check_and_dry_run(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seen = job(SUMMARY)
    assert run_command(["check", "p.jsonl", "--json"]) == 0
    assert run_command(["check", "p.jsonl", "--seed", "3"]) == 0
    assert run_command(["run", "p.jsonl", "--dry-run"]) == 0
    assert capsys.readouterr().out == "json\ntext\ntext\n"
    assert [config.engine.seed for config in seen] == [0, 3, 0]


# Errors


def test_exit_codes(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {BatchgenError: 1, UsageError: 2, FingerprintError: 2, TooManyErrors: 3, InputError: 4, OutputError: 5}
    kinds |= {ModelError: 6, DeviceError: 7}
    errors = [(kind("x"), status) for kind, status in kinds.items()]
    errors += [(Interrupted("x", status), status) for status in (75, 129, 130, 143)]
    for error, status in errors:
        job(error)
        assert run_command(["run", "p.jsonl"]) == status
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "error: x\n")


def _in_place_of(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception:
            raise ModelError("the tokenizer cannot be loaded") from None
    except ModelError as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 5),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 5),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), 5),
        (ImportError("libx.so: failed to map segment from shared object"), 5),
        (RuntimeError("can't start new thread"), 5),
        (_in_place_of(MemoryError()), 5),
        (_in_place_of(ValueError()), 6),
        (DeviceError("the host ran out of memory while reading a step's results; allocate memory"), 7),
        (RuntimeError("a shape"), 1),
    ],
    ids=str,
)
def test_a_process_without_memory(job: Any, capsys: pytest.CaptureFixture[str], error: Exception, status: int) -> None:
    job(error)
    assert run_command(["run", "p.jsonl"]) == status
    assert ("the process has no memory left. Give it more" in capsys.readouterr().err) == (status == 5)


def test_control_characters_never_reach_the_terminal(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job(InputError("`\x1b]0;title\x07\x9b2J\r` says\nerror: a library"))
    assert run_command(["run", "p.jsonl"]) == 4
    assert capsys.readouterr().err == "error: `\\x1b]0;title\\x07\\x9b2J\\r` says\n  error: a library\n"


def test_keyboard_interrupt(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job(KeyboardInterrupt())
    assert run_command(["run", "p.jsonl"]) == 130
    assert capsys.readouterr().err.strip() == "error: interrupted"


def test_internal_error_names_the_place_and_quotes_nothing(
    job: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(KeyError("a secret prompt"))
    assert run_command(["run", "p.jsonl"]) == 1
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"error: internal error, KeyError at test_app\.py:\d+; BATCHGEN_TRACEBACK=1 prints the traceback\n", line
    )
    monkeypatch.setenv("BATCHGEN_TRACEBACK", "1")
    assert run_command(["run", "p.jsonl"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run p --top-p 2", "`--top-p` must be in (0, 1], got 2.0"),
        ("run p --resume --overwrite", "`--resume` and `--overwrite` cannot be combined; keep one of them"),
    ],
)
def test_usage_errors(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(line.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {message}\n")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("run p --modle x", "--modle"),
        ("runn p", "runn"),
        ("run p --seed", "--seed"),
        ("show x --row -1", "--row"),
        ("merge x", "--output"),
        ("export p", "Missing option '--format'. Choose from: openai-batch, jsonl"),
    ],
)
def test_parser_errors_are_one_line(line: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"error: [^\n]*{part}[^\n]* \(see batchgen( \w+)? --help\)\n", captured.err)


def test_show_of_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "none.parquet"]) == 4
    assert capsys.readouterr().err.startswith("error: none.parquet does not exist")


def test_closed_pipe_exits_like_sigpipe() -> None:
    code = (
        "import sys, types\n"
        "module = types.ModuleType('batchgen.job.check')\n"
        "def check_job(job, progress, as_json):\n    print('x' * 1_000_000)\n    return 0\n"
        "module.check_job = check_job\nsys.modules[module.__name__] = module\n"
        "from batchgen.cli.app import main\nmain()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "check", str(Path("p.jsonl").absolute())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10) == 141


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("show none.parquet 2>&-", 4, ""),
        ("run - -o out.parquet 2>&1 <&-", 4, "error: Standard input (-) is closed."),
        ("--version 2>&1 >&-", 5, "error: stdout cannot be written (bad file descriptor)"),
        ("--version 2>&1 >/dev/full", 5, "error: stdout cannot be written (no space left on device)"),
    ],
)
def test_closed_or_full_streams(line: str, status: int, message: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m batchgen {line}",
        shell=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert message in done.stdout if message else done.stdout == ""


def test_replaced_stderr_accepts_names_that_are_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    _replace_closed_streams()
    with sys.stderr as stream:
        print("caf\udce9", file=stream, flush=True)
