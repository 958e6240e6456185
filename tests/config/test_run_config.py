from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.engine_config import EngineConfig
from batchgen.config.option_types import NAME_PATH, STORED_PATH, Option
from batchgen.config.resolve import resolve_config
from batchgen.config.run_config import BY_NAME, GROUPS, OPTIONS, RunConfig
from batchgen.config.units import Shard, Threshold
from batchgen.errors import UsageError
from batchgen.request.fields.params import PARAMETERS


def resolve(cwd: Path, flags: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> RunConfig:
    return resolve_config({"inputs": ("prompts.jsonl",)} | (flags or {}), env or {}, cwd)


def error_message(cwd: Path, flags: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(cwd, flags, env)
    return str(caught.value)


# The option table


def test_every_option_is_complete(tmp_path: Path) -> None:
    config = resolve(tmp_path)
    for option in OPTIONS:
        assert option.group in GROUPS
        assert re.fullmatch("[a-z]+(_[a-z]+)*", option.name)
        for line in option.help.split("\n"):
            assert re.search(r"Example: -", line), f"the help text of {option.flag} has no example"
        assert option.choice_flags is False or len(option.help.split("\n")) == len(option.choices)
        if option.target in ("engine", "run") and option.name != "output":
            holder = config.engine if option.target == "engine" else config
            made = EngineConfig() if option.target == "engine" else RunConfig(("a.jsonl",), Path("a.parquet"))
            assert getattr(holder, option.name) == getattr(made, option.name) == option.default


def test_spellings_are_unique() -> None:
    spellings = [flag for option in OPTIONS for flag in option.flags]
    assert len(spellings) == len(set(spellings))


# Values, which are the same from every source


VALUES: list[tuple[str, str, Any]] = [
    ("model", "./m", "./m"), ("dtype", "float32", "float32"), ("max_model_len", "4096", 4096),
    ("kv_memory", "85%", 0.85), ("kv_memory", "0.00002", 0.00002), ("kv_memory", "4GiB", 2**32), ("seed", "-5", -5),
    ("temperature", "0.7", 0.7), ("top_k", "-1", -1), ("stop_token_ids", "2,13", (2, 13)), ("stop", "END", ("END",)),
    ("ignore_eos", "true", True), ("no_stop_trim", "1", True), ("carry", "a,b", ("a", "b")), ("carry", "none", "none"),
    ("chat", "no", False), ("dedup", "off", False), ("shard", "3/8", Shard(3, 8)),
    ("max_errors", "5%", Threshold(share=0.05)), ("max_time", "1-02:00:00", 93600.0), ("on_bad_row", "fail", "fail"),
    ("existing", "overwrite", "overwrite"), ("system", "Be brief.", "Be brief."), ("presence_penalty", "2", 2.0),
    ("repetition_penalty_scope", "prompt+output", "prompt+output"), ("spaces_between_special_tokens", "false", False),
    ("logit_bias", "20=2.5, 13=-100", ((13, -100.0), (20, 2.5))), ("bad_words", "damn, it", ("damn, it",)),
    ("token_ids_logprob", "7", (7,)), ("json_schema", '{"type": "object"}', '{"type": "object"}'),
    ("structural_tag", '{"format": {}}', '{"format": {}}'), ("regex", "@[a-z]+", "@[a-z]+"),
    ("ebnf", 'root ::= "a"', 'root ::= "a"'), ("choice", "yes", ("yes",)), ("return_hidden_states", "true", True),
    ("return_hidden_states", "False", False), ("return_hidden_states", "last", {"tokens": "last"}),
    ("return_hidden_states", "mean", {"pool": "mean"}),
    ("return_hidden_states", '{"layers": [0, -1], "pool": "last"}', {"layers": [0, -1], "pool": "last"}),
    ("stream", "no", False),
]  # fmt: skip


def found(config: RunConfig, name: str) -> Any:
    if BY_NAME[name].target == "sampling":
        return config.sampling[name]
    return getattr(config.engine if BY_NAME[name].target == "engine" else config, name)


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_values_through_flags_environment_and_files(name: str, text: str, value: Any, tmp_path: Path) -> None:
    assert found(resolve(tmp_path, {name: text}), name) == value
    assert found(resolve(tmp_path, env={BY_NAME[name].env: text}), name) == value
    (tmp_path / "job.toml").write_text(f"{name} = {json.dumps(text)}\n")
    assert found(resolve(tmp_path, {"config": "job.toml"}), name) == value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("max-num-seqs = 64", "max_num_seqs", 64),
        ("max_num_seqs = 64", "max_num_seqs", 64),
        ("kv_memory = 0.5", "kv_memory", 0.5),
        ("kv_memory = 4_000_000_000", "kv_memory", 4_000_000_000),
        ("temperature = 1", "temperature", 1.0),
        ("chat = true", "chat", True),
        ('stop = ["a", "b"]', "stop", ("a", "b")),
        ("stop_token_ids = [2, 13]", "stop_token_ids", (2, 13)),
        ("stop_token_ids = 2", "stop_token_ids", (2,)),
        ('carry = ["a", "b"]', "carry", ("a", "b")),
        ("commit_seconds = 2.5", "commit_seconds", 2.5),
        ("max_errors = 3", "max_errors", Threshold(count=3)),
        ("logit_bias = {13 = -100, 20 = 2.5}", "logit_bias", ((13, -100.0), (20, 2.5))),
        ("logit_bias = [[20, 2.5], [13, 1]]", "logit_bias", ((13, 1.0), (20, 2.5))),
        ('logit_bias = ["20=2.5", "13=1"]', "logit_bias", ((13, 1.0), (20, 2.5))),
        ("allowed_token_ids = [2, 13]", "allowed_token_ids", (2, 13)),
        ('choice = ["yes", "no"]', "choice", ("yes", "no")),
        ("echo = true", "echo", True),
        ("return_hidden_states = true", "return_hidden_states", True),
        (
            'return_hidden_states = {layers = [1], tokens = "last"}',
            "return_hidden_states",
            {"layers": [1], "tokens": "last"},
        ),
        ('[json_schema]\ntype = "object"\nrequired = ["ä"]', "json_schema", '{"type": "object", "required": ["ä"]}'),
    ],
)
def test_toml_types(line: str, name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text(line)
    assert found(resolve(tmp_path), name) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_num_seqs = true", "`max_num_seqs in ./batchgen.toml` must be N, got True"),
        ("max_num_seqs = 1.0", "`max_num_seqs in ./batchgen.toml` must be N, got 1.0"),
        ("max_num_seqs = [1]", "`max_num_seqs in ./batchgen.toml` must be one value, got a list: [1]"),
        ("chat = 1", "`chat in ./batchgen.toml` must be true or false, got 1"),
        ("system = 5", "`system in ./batchgen.toml` must be TEXT, got 5"),
        ("stop = [1]", "`stop in ./batchgen.toml` must be TEXT, got 1"),
        ("tempreature = 1", "unknown key `tempreature` in ./batchgen.toml; did you mean `temperature`?"),
        ("zzz = 1", "unknown key `zzz` in ./batchgen.toml"),
        ("overwrite = true", 'unknown key `overwrite` in ./batchgen.toml; write existing = "overwrite"'),
        ('inputs = ["a"]', "unknown key `inputs` in ./batchgen.toml; give input files on the command line"),
        ('config = "a.toml"', "unknown key `config` in ./batchgen.toml"),
        ("[engine]\nseed = 1", "unknown key `engine` in ./batchgen.toml"),
        ("top-k = 1\ntop_k = 2", "`top_k` is given twice in ./batchgen.toml, with - and with _; keep one of them"),
        ("logit_bias = 5", "`logit_bias in ./batchgen.toml` must be ID=X,..., got 5"),
        ("logit_bias = [5]", "`logit_bias in ./batchgen.toml` must be ID=X,..., got 5"),
        ("logit_bias = {13 = true}", "`logit_bias in ./batchgen.toml` must be a number, got 'True'"),
        ("json_schema = true", "`json_schema in ./batchgen.toml` must be JSON|@PATH, got True"),
        (
            "json_schema = {default = 2020-01-01}",
            "`json_schema in ./batchgen.toml` has a value that JSON cannot represent: Object of type date is not JSON "
            "serializable",
        ),
    ],
)
def test_wrong_toml_values(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text(line)
    assert error_message(tmp_path) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lora = ['a']", "`lora in job.toml` must be NAME=PATH, got 'a'"),
        ("lora = ['a=b', 'a=c']", "`lora in job.toml` names 'a' twice; use a different name for each"),
    ],
)
def test_wrong_pairs_in_a_named_file(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(line)
    assert error_message(tmp_path, {"config": "job.toml"}) == message


def test_unreadable_toml_files(tmp_path: Path) -> None:
    assert (
        error_message(tmp_path, {"config": "no.toml"}) == "`--config`: cannot read no.toml: No such file or directory"
    )
    (tmp_path / "bad.toml").write_text("a = = 1")
    assert error_message(tmp_path, {"config": "bad.toml"}).startswith("bad.toml is not valid TOML: ")
    (tmp_path / "bad.toml").write_bytes(b"a = '\xff'")
    assert error_message(tmp_path, {"config": "bad.toml"}).startswith("bad.toml is not valid TOML: ")


# Precedence


def test_precedence_of_sources(tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text("seed = 1\ntop_k = 1\nlimit = 1\nn = 1")
    (tmp_path / "job.toml").write_text("seed = 2\ntop_k = 2\nlimit = 2")
    env = {"BATCHGEN_SEED": "3", "BATCHGEN_TOP_K": "3"}
    config = resolve(tmp_path, {"seed": "4", "config": "job.toml"}, env)
    assert (config.engine.seed, config.sampling["top_k"], config.limit, config.sampling["n"]) == (4, 3, 2, 1)
    assert config.offset == 0
    options = config.describe()["options"]
    assert options["seed"] == {"value": 4, "origin": "flag"}
    assert options["top_k"] == {"value": 3, "origin": "environment BATCHGEN_TOP_K"}
    assert options["limit"] == {"value": 2, "origin": "job.toml"}
    assert options["n"] == {"value": 1, "origin": "./batchgen.toml"}
    assert options["offset"] == {"value": 0, "origin": "default"}


def test_wrong_key_is_refused_even_if_overridden(tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text("sed = 1")
    assert error_message(tmp_path, {"seed": "4"}).startswith("unknown key `sed`")


def test_config_file_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 1")
    (tmp_path / "b.toml").write_text("seed = 2")
    assert resolve(tmp_path, env={"BATCHGEN_CONFIG": "a.toml"}).engine.seed == 1
    assert resolve(tmp_path, {"config": "b.toml"}, {"BATCHGEN_CONFIG": "a.toml"}).engine.seed == 2


@pytest.mark.parametrize("name", ["BATCHGEN_SEEDS", "BATCHGEN_seed"])
def test_unknown_variables(name: str, tmp_path: Path) -> None:
    message = error_message(tmp_path, env={name: "1"})
    assert message == f"unknown environment variable `{name}`; did you mean `BATCHGEN_SEED`?"


def test_other_and_empty_variables_are_ignored(tmp_path: Path) -> None:
    env = {"BATCHGEN_TRACEBACK": "1", "BATCHGEN_SEED": "", "PATH": "x", "SEED": "9"}
    assert resolve(tmp_path, env=env).engine.seed == 0


def test_variables_that_are_not_texts(tmp_path: Path) -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8"}
    config = resolve(tmp_path, env={"BATCHGEN_STOP": '["a", "b"]', "BATCHGEN_SHARD": "auto", **slurm})
    assert (config.sampling["stop"], config.shard) == (("a", "b"), Shard(5, 8))
    message = error_message(tmp_path, env={"BATCHGEN_STOP": "[a"})
    assert message.startswith("`BATCHGEN_STOP` begins with [ but is not a JSON list")


def test_description_is_json_and_complete(tmp_path: Path) -> None:
    flags = {"stop": ("a",), "shard": "0/2", "max_errors": "5%", "carry": "x", "output": "o"}
    description = resolve(tmp_path, flags).describe()
    assert json.loads(json.dumps(description)) == description
    assert description["inputs"] == ["prompts.jsonl"]
    assert {n: o["value"] for n, o in description["options"].items() if o["origin"] == "flag"} == {
        "stop": ["a"],
        "shard": "0/2",
        "max_errors": "5%",
        "carry": ["x"],
        "output": "o",
    }


# Refusals


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"max_num_seqs": "0"}, "must be at least 1, got 0"),
        ({"max_num_seqs": "x"}, "must be a whole number, got 'x'"),
        ({"dtype": "fp8"}, "must be one of auto, bfloat16, float16, float32; got 'fp8'"),
        ({"page_size": "5000"}, "must be between 1 and 4096, got 5000"),
        ({"top_p": "0"}, "must be in (0, 1], got 0.0"),
        ({"min_new_tokens": "200"}, "must not exceed max_new_tokens (128), got 200"),
        ({"stop": tuple("abc" * 11)}, "must have at most 32 strings, got 33"),
        ({"commit_seconds": "0"}, "must be more than 0 seconds, got '0'"),
        ({"commit_seconds": "0h0m"}, "must be more than 0 seconds, got '0h0m'"),
        ({"best_of": "2", "n": "3"}, "must be at least n (3), got 2"),
        ({"stop_on_repeat": "3"}, "must be between 4 and 1048576, got 3"),
        ({"seed": str(2**63)}, f"must be at least {-(2**63)}, got {2**63}"),
        ({"model": " "}, "must not be empty"),
        ({"carry": "a,a"}, "names a column twice: 'a,a'"),
        ({"logit_bias": "13"}, "must be ID=X separated by commas, such as 13=-100 or 13=-100,20=2.5, got '13'"),
        ({"logit_bias": "13=1,013=2"}, "names token 13 twice"),
        ({"allowed_token_ids": "a"}, "must be token ids separated by commas, such as 2 or 2,13, got 'a'"),
        ({"regex": ""}, "must not be empty"),
        (
            {"regex": "a\udc80"},
            "contains a lone surrogate (U+DC80), which is not valid Unicode; write the whole character",
        ),
        (
            {"json_schema": "person.json"},
            "must be a JSON object, or @PATH of a file that contains one; this is not JSON: Expecting value: "
            "line 1 column 1 (char 0)",
        ),
        ({"structural_tag": "[1]"}, "must be a JSON object, or @PATH of a file that contains one; this is a list"),
        ({"json_schema": "@no.json"}, ": cannot read 'no.json': No such file or directory"),
        ({"ebnf": "@"}, ": cannot read '': Is a directory"),
        ({"regex": "a", "json_schema": "{}"}, "cannot be combined with `--json-schema`: a row has one constraint"),
        (
            {"return_hidden_states": "first"},
            "must be all, prompt, output, last, mean, true, false or a JSON object, got 'first'",
        ),
        ({"return_hidden_states": '{"layers": [-2]}'}, "must be between -1 and 1048576, got -2"),
        (
            {"return_hidden_states": "{"},
            "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (
            {"lora_path": "fr"},
            "names the adapter 'fr', but the adapters of this run are: none; add it with --lora NAME=PATH",
        ),
        (
            {"custom_logit_processor": "calm", "logit_processor": ("a=b:c",)},
            "names the processor 'calm', but the processors of this run are: a; add it with --logit-processor "
            "NAME=module:function",
        ),
        ({"custom_params": '{"by": 1}'}, "needs `--custom-logit-processor`"),
        ({"stream": True}, "needs a destination for events: --events PATH, or - for stdout"),
        (
            {"stream": True, "events": "-", "best_of": "2"},
            "cannot be true with `--best-of` above 1: the samples to keep are known only at the end",
        ),
        ({"logit_processor": ("calm",)}, "must be NAME=module:function, got 'calm'"),
        ({"logit_processor": ("calm=my module:f",)}, "must be NAME=module:function, got 'calm=my module:f'"),
        ({"logit_processor": ("=a:b",)}, "must be NAME=module:function, got '=a:b'"),
        ({"logit_processor": ("a=b:c", "a=b:d")}, "names 'a' twice; use a different name for each"),
    ],
)
def test_wrong_values(flags: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """The message begins with the first of the flags."""
    flag = BY_NAME[next(iter(flags))].flag
    assert error_message(tmp_path, flags) == f"`{flag}`{'' if problem.startswith(':') else ' '}{problem}"


# Constraints: at most one, given as text or as a file


@pytest.mark.parametrize("name", ["json_schema", "structural_tag", "ebnf"])
def test_value_read_from_a_file(name: str, tmp_path: Path) -> None:
    """The text of the file is the value, so the fingerprint and the footer contain it and the file may be removed."""
    text = '{"type": "object",\r\n "title": "Zażółć"}\n' if name != "ebnf" else 'root ::= "ż"\n'
    (tmp_path / "a b.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    text = text.replace("\r\n", "\n")
    config = resolve(tmp_path, {name: "@a b.txt"})
    assert config.sampling == {name: text}
    assert resolve(tmp_path, {name: f"@{tmp_path / 'a b.txt'}"}).sampling == {name: text}
    assert resolve(tmp_path, env={BY_NAME[name].env: "@a b.txt"}).sampling == {name: text}
    (tmp_path / "job.toml").write_text(f'{name} = "@a b.txt"')
    assert resolve(tmp_path, {"config": "job.toml"}).sampling == {name: text}
    described = config.describe()
    (tmp_path / "a b.txt").write_bytes(b"\xff")
    assert RunConfig.restore(described, config.output, {}) == config
    assert error_message(tmp_path, {name: "@a b.txt"}) == f"`{BY_NAME[name].flag}`: 'a b.txt' is not UTF-8 text"
    described["options"][name]["value"] = f"@{tmp_path / 'job.toml'}"
    if name != "ebnf":
        with pytest.raises(UsageError, match="not JSON"):
            RunConfig.restore(described, config.output, {})
    else:
        assert RunConfig.restore(described, config.output, {}).sampling[name].startswith("@")


def test_constraint_replaces_those_of_lower_precedence(tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text('json_schema = "{}"')
    (tmp_path / "job.toml").write_text('choice = ["a", "b"]')
    env = {"BATCHGEN_EBNF": 'root ::= "a"'}
    assert resolve(tmp_path).sampling == {"json_schema": "{}"}
    assert resolve(tmp_path, {"config": "job.toml"}).sampling == {"choice": ("a", "b")}
    assert resolve(tmp_path, {"config": "job.toml"}, env).sampling == {"ebnf": 'root ::= "a"'}
    assert resolve(tmp_path, {"regex": "a", "config": "job.toml"}, env).sampling == {"regex": "a"}
    both = env | {"BATCHGEN_REGEX": "a"}
    assert error_message(tmp_path, env=both) == "`--ebnf` cannot be combined with `--regex`: a row has one constraint"


def test_every_sampling_field_has_an_option() -> None:
    without = {"seed", "suffix", "stream_options"}  # their declarations say why
    assert set(PARAMETERS) - without == {o.name for o in OPTIONS if o.target == "sampling"}


# Logit processors: pairs of name and function


def processors_of(config: RunConfig) -> dict[str, Any]:
    return dict(config.engine.logit_processor)


def test_processors_come_from_every_source_but_the_default_file(tmp_path: Path) -> None:
    two = {"a": "m.n:f", "b": "m:o.f"}
    assert processors_of(resolve(tmp_path, {"logit_processor": ("a=m.n:f", "b=m:o.f")})) == two
    assert processors_of(resolve(tmp_path, env={"BATCHGEN_LOGIT_PROCESSOR": '["a=m.n:f", "b=m:o.f"]'})) == two
    for text in ('logit_processor = ["a=m.n:f", "b=m:o.f"]', '[logit_processor]\na = "m.n:f"\nb = "m:o.f"'):
        (tmp_path / "job.toml").write_text(text)
        assert processors_of(resolve(tmp_path, {"config": "job.toml"})) == two
    (tmp_path / "job.toml").rename(tmp_path / "batchgen.toml")
    assert error_message(tmp_path).startswith("`logit_processor in ./batchgen.toml` would run code because of a file")


@pytest.mark.parametrize(
    ("line", "flag", "value", "found"),
    [
        ('logit_processor = ["a=m:f"]', "logit_processor", "b=m:g", (("b", "m:g"),)),
        ('flash_library = "./evil.so"', "flash_library", "./good.so", "./good.so"),
    ],
)
def test_options_that_run_code_must_be_named_by_the_command(
    line: str, flag: str, value: str, found: object, tmp_path: Path
) -> None:
    """A flag, a variable or --config names them; the remedies in the message work."""
    (tmp_path / "batchgen.toml").write_text(f"{line}\nseed = 7\n")
    message = f"`{flag} in ./batchgen.toml` would run code because of a file in the current folder; name it with "
    assert error_message(tmp_path) == message + f"--{flag.replace('_', '-')}, or the file with --config batchgen.toml"
    (tmp_path / "seed.toml").write_text("seed = 8\n")
    assert error_message(tmp_path, {"config": "seed.toml"}).startswith(message)
    for given, env in (({flag: value}, {}), ({}, {f"BATCHGEN_{flag.upper()}": value})):
        config = resolve(tmp_path, given, env)
        assert (getattr(config.engine, flag), config.engine.seed) == (found, 7)
    for path in ("batchgen.toml", "./batchgen.toml", str(tmp_path / "batchgen.toml")):
        for config in (resolve(tmp_path, {"config": path}), resolve(tmp_path, env={"BATCHGEN_CONFIG": path})):
            assert (bool(getattr(config.engine, flag)), config.engine.seed) == (True, 7)
            assert config.describe()["options"]["seed"] == {"value": 7, "origin": path}


def test_processors_from_python_may_be_functions() -> None:
    assert EngineConfig(logit_processor={"a": max, "b": "m:f"}).logit_processor == (("a", max), ("b", "m:f"))  # type: ignore[arg-type]
    given = EngineConfig(logit_processor=(("a", max),))
    assert given.logit_processor == (("a", max),)
    for wrong in ({"a": 5}, {"": max}, {"a": "m"}, 7, [("a", max), ("a", min)]):
        with pytest.raises(UsageError, match="logit_processor"):
            EngineConfig(logit_processor=wrong)  # type: ignore[arg-type]


# Output names


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("prompts.jsonl", "prompts.out.parquet"),
        ("dir.v1/prompts.jsonl.gz", "dir.v1/prompts.out.parquet"),
        ("p.jsonl.zst", "p.out.parquet"),
        ("p.parquet", "p.out.parquet"),
        ("p.txt", "p.out.parquet"),
        ("a.b.jsonl", "a.b.out.parquet"),
        ("prompts", "prompts.out.parquet"),
    ],
)
def test_default_output(name: str, output: str, tmp_path: Path) -> None:
    assert resolve(tmp_path, {"inputs": (name,)}).output == Path(output)


def test_default_output_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data.v1").mkdir()
    for name in ("data.v1", "data.v1/"):
        assert resolve(tmp_path, {"inputs": (name,)}).output == Path("data.v1.out.parquet")


PATH_OPTIONS = [option for option in OPTIONS if option.value_type.reach == "files"]


@pytest.mark.parametrize("option", PATH_OPTIONS, ids=lambda option: option.name)
@pytest.mark.parametrize("path", ["s3://bucket/x", "hf://org/x", "abfss://c@a/x", "file:///x"])
def test_paths_with_a_scheme_are_refused_in_every_option(option: Option, path: str, tmp_path: Path) -> None:
    if option.value_type is STORED_PATH and path.startswith("s3://"):
        assert str(getattr(resolve(tmp_path, {option.name: path}), option.name)) == path
        return
    repeated = (f"n={path}",) if option.value_type is NAME_PATH else path
    for flags, env in (({option.name: repeated}, {}), ({}, {option.env: f"n={path}" if option.repeat else path})):
        with pytest.raises(
            UsageError, match=r"is not a local path|write the path without it|must name a dataset"
        ) as caught:
            resolve(tmp_path, flags, env)
        assert repr(path) in str(caught.value)
    with pytest.raises(UsageError, match=r"^input 'abfss://b/a\.jsonl' is not a local path"):
        resolve(tmp_path, {"inputs": ("abfss://b/a.jsonl",)})


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"inputs": ("s3://b/a.jsonl",)}, "the input is at a URL: name the result file with -o results.parquet"),
        ({"inputs": ("http://h/a.jsonl",), "output": "o.parquet"}, "is not a local path (http)"),
        ({"inputs": ("https://h",), "output": "o.parquet"}, "must name a file of a server"),
        ({"inputs": ("hf://user/name",), "output": "o.parquet"}, "must name a dataset"),
        ({"inputs": ("s3://b/../a.jsonl",), "output": "o.parquet"}, "without empty parts"),
        ({"output": "s3://b//o.parquet"}, "without empty parts"),
        ({"output": "s3://o.parquet"}, "must be a bucket and a name"),
        ({"output": "s3://b/o.csv"}, "must be a Parquet file"),
        ({"output": "https://h/o.parquet"}, "is not a local path (https), and batchgen reads and writes s3://"),
        ({"inputs": ("s3://b/a.parquet",), "output": "s3://b/a.parquet"}, "is an input file"),
        ({"work_dir": "https://b/work"}, "`--work-dir` 'https://b/work' is not a local path (https)"),
        (
            {"output": "-", "report": "-"},
            "`--output` - writes the results to stdout: give --report and --events a file",
        ),
        ({"output": "-", "shard": "0/2"}, "`--output` - with --shard: shards are Parquet"),
    ],
    ids=str,
)
def test_urls_that_cannot_be_used_are_refused(flags: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in error_message(tmp_path, flags)


def test_the_configuration_is_stored_without_what_may_be_secret(tmp_path: Path) -> None:
    inputs = ("S3://b/a.jsonl", "https://user:word@h/a.jsonl?signature=s#part", "HTTPS://u@h/a@b.jsonl?x=/y@z")
    config = resolve(tmp_path, {"inputs": inputs, "output": "S3://b/o.parquet"})
    assert config.describe()["inputs"] == ["S3://b/a.jsonl", "https://h/a.jsonl", "HTTPS://h/a@b.jsonl"]
    assert (str(config.output), config.output.name) == ("s3://b/o.parquet", "o.parquet")
    assert str(config.output.with_name("x").parent / "y") == "s3://b/y"


NOT_AN_OUTPUT = "`--output` must be a Parquet file such as results.parquet, or .jsonl for JSON lines"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"inputs": ()}, "name at least one input file, or - for stdin"),
        ({"inputs": ("-", "-"), "output": "o"}, "- (stdin) can be read only once"),
        ({"inputs": ("-",)}, "stdin has no name: name the result file with -o results.parquet"),
        ({"inputs": ("a", "b")}, "there are several inputs: name the result file with -o results.parquet"),
        (
            {"inputs": ("*.jsonl",)},
            "an input pattern may name several files: name the result file with -o results.parquet",
        ),
        ({"output": "o.json"}, f"{NOT_AN_OUTPUT}, got 'o.json'"),
        (
            {"output": "o.jsonl", "shard": "0/2"},
            "`--output` o.jsonl with --shard: shards are Parquet. Name a folder such as results, then run "
            "batchgen merge and batchgen export",
        ),
        ({"output": "."}, f"{NOT_AN_OUTPUT}, got '.'"),
        ({"inputs": (".",)}, ". is a folder without a name: name the result file with -o results.parquet"),
        ({"inputs": ("/",)}, "/ is a folder without a name: name the result file with -o results.parquet"),
        (
            {"inputs": ("./a.parquet",), "output": "a.parquet"},
            "`--output` a.parquet is an input file; give another name",
        ),
    ],
)
def test_refused_outputs(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert error_message(tmp_path, flags) == message


# The engine without a job


def test_engine_options_from_python() -> None:
    config = EngineConfig(model="m", kv_memory=0.5, max_num_seqs=8, dedup=False)
    assert (config.kv_memory, config.max_num_seqs, config.dedup) == (0.5, 8, False)
    assert EngineConfig(kv_memory="4GiB").kv_memory == 2**32  # type: ignore[arg-type]
    assert EngineConfig(model=Path("a/b")).model == "a/b"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "`max_num_seqs` must be at least 1, got 0"),
        ({"max_num_seqs": True}, "`max_num_seqs` must be N, got True"),
        ({"kv_memory": 1.5}, "`kv_memory` must be a share above 0 and up to 1 (0.85, 85%), got '1.5'"),
        ({"attention": "fast"}, "`attention` must be one of auto, flash, triton, compiled, torch; got 'fast'"),
        ({"dedup": 1}, "`dedup` must be true or false, got 1"),
        ({"page_size": None}, "`page_size` must be N, got None"),
    ],
)
def test_refused_engine_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**options)
    assert str(caught.value) == message


def test_description_is_restored(tmp_path: Path) -> None:
    """Options with values other than the default survive the JSON of the footer."""
    flags = {
        "inputs": ("a.jsonl", "b*.jsonl"), "model": "m", "dtype": "float32", "max_num_seqs": "7", "kv_memory": "40%",
        "temperature": "0.5", "stop": ("x, y", "z"), "stop_token_ids": "1,2", "ignore_eos": True, "seed": "-3",
        "shard": "1/4", "carry": "a,b", "chat": True, "system": "S", "max_errors": "5%", "existing": "overwrite",
        "max_time": "2h", "on_duplicate_id": "suffix", "dedup": False, "limit": "9", "output": "out.parquet",
        "logit_bias": "13=-1e-07,2=0.1", "bad_words": ("a, b", "c"), "allowed_token_ids": "1,2", "echo": False,
        "token_ids_logprob": "3", "choice": ("[1]", "@b"), "return_hidden_states": '{"layers": [0, 1]}',
        "return_routed_experts": True, "spaces_between_special_tokens": False, "stream": True, "events": "-",
        "lora": ("a=b",), "lora_path": "a",
    }  # fmt: skip
    config = resolve_config(flags, {}, tmp_path)
    described = json.loads(json.dumps(config.describe()))
    assert RunConfig.restore(described, config.output, {}) == config
    plain = resolve_config({"inputs": ("a.jsonl",)}, {}, tmp_path)
    described = json.loads(json.dumps(plain.describe()))
    assert RunConfig.restore(described, plain.output, {"model": None}) == plain
    changed = RunConfig.restore(described, plain.output, {"inputs": ["c.jsonl"], "model": "other"})
    assert changed == resolve_config(
        {"inputs": ("c.jsonl",), "model": "other", "output": str(plain.output)}, {}, tmp_path
    )
    named = resolve_config(
        {"inputs": ("a.jsonl",), "flash_library": "a.so", "logit_processor": ("a=m:f",)}, {}, tmp_path
    )
    restored = RunConfig.restore(json.loads(json.dumps(named.describe())), named.output, {"flash_library": "b.so"})
    assert (restored.engine.flash_library, restored.engine.logit_processor) == ("b.so", ()), (
        "code is not read from a footer"
    )
    described["options"]["gone"] = {"value": 1, "origin": "flag"}
    with pytest.raises(UsageError, match="gone"):
        RunConfig.restore(described, plain.output, {})


@pytest.mark.parametrize("name", ["system", "prompt_column", "id_column", "revision", "carry", "stop", "lora"])
def test_text_that_is_not_utf_8_is_refused(tmp_path: Path, name: str) -> None:
    """Python represents a byte of the command line that is not UTF-8 by a lone surrogate."""
    flag = BY_NAME[name].flag
    given = "\udce9=folder" if name == "lora" else "\udce9"
    message = f"`{flag}` contains a lone surrogate (U+DCE9), which is not valid Unicode; write the whole character"
    assert error_message(tmp_path, {name: given}) == message
    assert error_message(tmp_path, env={BY_NAME[name].env: given}) == message


def test_file_names_may_be_any_bytes(tmp_path: Path) -> None:
    odd = "caf\udce9"
    paths = dict.fromkeys(("model", "tokenizer", "output", "report", "events", "media_root"), odd)
    config = resolve(tmp_path, {**paths, "lora": (f"fr={odd}",)})
    assert (str(config.output), config.report, config.events) == (odd, odd, odd)
    assert (config.engine.model, config.engine.media_root, config.engine.lora) == (odd, odd, (("fr", odd),))
