"""Configuration of the engine and of a job. Each option is declared once, as an attribute.

Its name, type, default, flag, variable, TOML key and help text follow from the attribute's declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchgen.config.engine_config import ENGINE, ENGINE_OPTIONS, INPUT, JOB, MODEL, OUTPUT, EngineConfig
from batchgen.config.option_types import (
    CARRY,
    COLUMNS,
    COUNT,
    DURATION,
    FILE,
    NAME,
    PATH,
    POSITIVE_DURATION,
    SHARD,
    SIZE,
    STORED_PATH,
    TEXT,
    TEXT_FILE,
    THRESHOLD,
    Option,
    coerce,
    declared_options,
    int_range,
)
from batchgen.config.sampling_options import SAMPLING, SAMPLING_OPTIONS
from batchgen.config.units import Shard, Threshold, parse_shard
from batchgen.config.urls import RemotePath, is_url, shown_url
from batchgen.errors import UsageError
from batchgen.request.fields.named_columns import NamedColumns


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Resolved configuration of one job, created by `resolve_config`."""

    inputs: tuple[str, ...]
    """Paths, URLs, globs, or "-" for stdin, in order."""
    output: Path
    """Result file; with `shard`, the folder of the shards' files; "-" for stdout."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Run-wide sampling defaults that are set: `SamplingParams` field -> value."""
    input_format: Literal["auto", "jsonl", "json", "csv", "tsv", "txt", "parquet", "arrow"] = INPUT.option(
        "auto", "Format of all input files; auto goes by their suffixes. Example: --input-format jsonl"
    )
    prompt_column: str | None = INPUT.option(
        None, "Field that contains the prompt. Example: --prompt-column question", NAME
    )
    prompt_template: str | None = INPUT.option(
        None,
        "Jinja template that makes each prompt from the fields of its row: a text, or messages if it is their JSON. "
        "Example: --prompt-template 'Translate to {{ language }}: {{ text }}'",
        TEXT_FILE,
    )
    id_column: str | None = INPUT.option(None, "Field that contains the id of the row. Example: --id-column uid", NAME)
    image_column: str | None = INPUT.option(
        None, "Field that contains the images of the row. Example: --image-column image", NAME
    )
    audio_column: str | None = INPUT.option(
        None, "Field that contains the sounds of the row. Example: --audio-column audio", NAME
    )
    chat: bool | None = INPUT.option(
        None,
        "Apply the chat template to text prompts (--chat), or refuse rows with messages (--no-chat). Example: --chat",
    )
    """True: text prompts are wrapped as user messages. False: `messages` are refused. None: both are accepted."""
    system: str | None = INPUT.option(
        None, "System message for conversations without one. Example: --system 'Be brief.'", TEXT
    )
    truncate: Literal["none", "left", "right"] = INPUT.option(
        "none", "Side on which prompts that are too long are truncated. Example: --truncate left"
    )
    replicas: int | None = JOB.option(
        None,
        "Number of processes that generate the rows, each on a GPU, or on a part of the CPU; auto is one for "
        "each GPU. Example: --replicas 4",
        COUNT,
    )
    """0: auto. None: one, and with `ray` auto."""
    ray: str | None = JOB.option(
        None,
        "Generate the rows on the Ray cluster at this address; auto finds the one of this machine or starts one. "
        "Example: --ray auto",
        NAME,
        reach="network",
    )
    shard: Shard | None = INPUT.option(  # noqa: RUF009  # a field
        None, "Run part I of N of the input; auto reads the Slurm array variables. Example: --shard 0/16", SHARD
    )
    limit: int | None = INPUT.option(None, "Run the first N rows after --offset. Example: --limit 100", int_range(0))
    offset: int = INPUT.option(0, "Skip the first N rows. Example: --offset 1000", int_range(0))
    sample: int | None = INPUT.option(
        None, "Run N rows selected at random by --seed. Example: --sample 50", int_range(1)
    )
    on_bad_row: Literal["error-row", "skip", "fail"] = INPUT.option(
        "error-row",
        "Action for an invalid input row: write an error row, skip it, or stop the run. Example: --on-bad-row fail",
    )
    on_duplicate_id: Literal["error", "suffix", "allow"] = INPUT.option(
        "error",
        "Action for a repeated id: report an error, add a suffix, or allow it. Example: --on-duplicate-id suffix",
    )
    work_dir: str | None = OUTPUT.option(
        None,
        "Folder for the work folder OUT.work; the default is that of the output, for a URL and stdout see `batchgen "
        "help resume`. At a URL are copies of its committed parts, from which another machine goes on. "
        "Example: --work-dir /scratch",
        STORED_PATH,
    )
    carry: Literal["all", "none"] | tuple[str, ...] = OUTPUT.option(
        "all",
        "Unknown fields of a row to write to the output: all as JSON in the column `extra`, none, or the named ones as "
        "separate columns. Example: --carry source,lang",
        CARRY,
    )
    columns: tuple[str, ...] | None = OUTPUT.option(
        None,
        "Columns to write, in this order, carried fields among them; all if not given. Rows cannot be reused from such "
        "an output. Example: --columns id,text,lang",
        COLUMNS,
    )
    strict_fields: bool = INPUT.option(
        False,
        "Refuse a carried key that looks like a misspelt field or is an option of another system, unless --carry names "
        "it. Example: --strict-fields",
    )
    include_source: bool = OUTPUT.option(
        False,
        "Carry the input file and line that each row came from, as `source_file` and `source_line`. "
        "Example: --include-source",
    )
    include_prompt: bool = OUTPUT.option(
        False, "Write the text of each prompt to the output. Example: --include-prompt"
    )
    include_prompt_ids: bool = OUTPUT.option(
        False, "Write the token ids of each prompt to the output. Example: --include-prompt-ids"
    )
    report: str | None = OUTPUT.option(
        None, "Write counts and timings of the run as JSON to this file; - is stdout. Example: --report run.json", FILE
    )
    max_output_bytes: int | None = OUTPUT.option(
        None,
        "Most bytes of results and hidden states together; the run does not start, or stops, if they are exceeded. "
        "Example: --max-output-bytes 10GB",
        SIZE,
    )
    existing: Literal["resume", "overwrite", "resume-anyway"] = JOB.option(
        "resume",
        "Resume unfinished work; the default. Example: --resume\n"
        "Start over; replace an earlier result when the new one is complete. Example: --overwrite\n"
        "Continue although the input or an option has changed: reuse the rows that stay the same. "
        "Example: --resume-anyway",
        choice_flags=True,
        reach="files",
    )
    reuse: str | None = JOB.option(
        None,
        "Take finished rows that stay the same from this output, finished or not. Example: --reuse old.parquet",
        STORED_PATH,
    )
    retry_errors: bool = JOB.option(False, "Run rows again that failed in an earlier run. Example: --retry-errors")
    max_errors: Threshold = JOB.option(  # noqa: RUF009  # a field
        Threshold(),
        "Most row errors before the run fails with exit code 3; by default it fails only if all rows have errors. "
        "Example: --max-errors 5%",
        THRESHOLD,
    )
    commit_every: int = JOB.option(
        2000, "Most finished rows between two commits to disk. Example: --commit-every 500", int_range(1)
    )
    commit_seconds: float = JOB.option(
        30.0, "Longest time between two commits to disk. Example: --commit-seconds 10", POSITIVE_DURATION
    )
    max_time: float | None = JOB.option(
        None,
        "Stop after this time with exit code 75; the same command resumes the run. Example: --max-time 2h",
        DURATION,
    )
    progress: Literal["auto", "bar", "plain", "json", "none"] = JOB.option(
        "auto", "Format of the progress display on stderr. Example: --progress plain"
    )
    events: str | None = JOB.option(
        None,
        "Write events of rows with `stream` to this file, one JSON line per token; - is stdout. "
        "Example: --events events.jsonl",
        FILE,
    )
    dry_run: bool = JOB.option(
        False, "Only check the input and print the plan, like `batchgen check`. Example: --dry-run"
    )
    sampling_defaults: Literal["model", "openai"] = SAMPLING.option(
        "model",
        "Defaults of sampling fields: the model's generation_config.json where it sets them, or those of the fields. "
        "Example: --sampling-defaults openai",
    )
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option -> source of its value; absent: default."""

    @property
    def work_path(self) -> Path | None:
        """The folder of this machine that `--work-dir` names."""
        return None if self.work_dir is None or is_url(self.work_dir) else Path(self.work_dir)

    @property
    def copies(self) -> RemotePath | None:
        """The folder at a URL that `--work-dir` names."""
        return RemotePath(self.work_dir) if self.work_dir is not None and is_url(self.work_dir) else None

    @property
    def named_columns(self) -> NamedColumns:
        """The fields that options name."""
        return NamedColumns(self.prompt_column, self.id_column, self.image_column, self.audio_column)

    def describe(self) -> dict[str, Any]:
        """JSON form of the configuration, with the origin of each value."""
        return {
            "inputs": list(map(shown_url, self.inputs)),
            "options": {
                option.name: {
                    "value": _json_value(self._value(option)),
                    "origin": self.origins.get(option.name, "default"),
                }
                for option in OPTIONS
                if option.target != "meta"
            },
        }

    @staticmethod
    def restore(description: Mapping[str, Any], output: Path, changes: Mapping[str, Any]) -> RunConfig:
        """Configuration from the output of `describe`, with changed values for some options.

        Options that run code (logit processors, libraries) are read from `changes` only.

        Args:
            description: output of `describe`, from an output's footer.
            output: the result file.
            changes: option name (or `inputs`) -> value as on the command line; None changes nothing.

        Raises:
            UsageError: this version does not know an option, or a value is wrong.
        """
        described = description["options"].items()
        code = {option.name for option in OPTIONS if option.reach_of() == "code"}
        values: dict[str, Any] = {name: item["value"] for name, item in described if name not in code}
        values |= {name: value for name, value in changes.items() if value is not None and name != "inputs"}
        unknown = sorted(values.keys() - BY_NAME.keys())
        if unknown:
            raise UsageError(f"the output was made with `{unknown[0]}`, which this version does not know")
        values = {
            name: coerce(BY_NAME[name], value, name)
            for name, value in values.items()
            if BY_NAME[name].target != "meta" and value not in (None, _json_value(BY_NAME[name].default))
        }
        if "shard" in values:
            values["shard"] = resolve_shard(values["shard"], {})
        values.pop("output", None)
        by_target: dict[str, dict[str, Any]] = {"engine": {}, "sampling": {}, "run": {}}
        for name, value in values.items():
            by_target[BY_NAME[name].target or "run"][name] = value
        return RunConfig(
            inputs=tuple(changes.get("inputs") or description["inputs"]),
            output=output,
            engine=EngineConfig(**by_target["engine"]),
            sampling=by_target["sampling"],
            **by_target["run"],
        )

    def _value(self, option: Option) -> object:
        if option.target == "sampling":
            return self.sampling.get(option.name)
        return getattr(self.engine if option.target == "engine" else self, option.name)


_WITHOUT_ATTRIBUTE = (
    Option(
        "output",
        STORED_PATH,
        "Result file, also at a URL, or - for JSON lines on stdout; the default is INPUT with its suffix replaced by "
        ".out.parquet. Example: -o results.parquet",
        group=OUTPUT.title,
        target="run",
        short="-o",
    ),
    Option(
        "config", PATH, "Read options from this TOML file. Example: --config job.toml", group=JOB.title, target="meta"
    ),
)
_OPTIONS = (
    *_WITHOUT_ATTRIBUTE,
    *declared_options(RunConfig, "run"),
    *SAMPLING_OPTIONS,
    *ENGINE_OPTIONS,
)
GROUPS = tuple(group.title for group in (INPUT, OUTPUT, MODEL, JOB, SAMPLING, ENGINE))
"""Sections of the help, in order."""
OPTIONS = tuple(sorted(_OPTIONS, key=lambda option: GROUPS.index(option.group)))
BY_NAME = {option.name: option for option in OPTIONS}


def resolve_shard(text: str, env: Mapping[str, str]) -> Shard:
    """The shard that the option `shard` names.

    Raises:
        UsageError: the text is wrong, or `auto` finds no Slurm array in the environment variables `env`.
    """
    try:
        return parse_shard(text, env)
    except ValueError as problem:
        raise UsageError(f"`--shard` {problem}") from None


def _json_value(value: object) -> Any:
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return str(value) if isinstance(value, Path | Threshold | Shard) else value
