"""`./batchgen.toml` that is not named may be of any user: its options reach no file, code or network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.option_types import BOOL, Option, coerce
from batchgen.config.resolve import resolve_config
from batchgen.config.run_config import OPTIONS, RunConfig
from batchgen.errors import UsageError

REACHING = {
    "output": "files", "report": "files", "events": "files", "reuse": "files", "media_root": "files", "lora": "files",
    "work_dir": "files",
    "model": "files", "tokenizer": "files", "flash_library": "code", "logit_processor": "code",
    "allow_pickle_weights": "code",
    "revision": "files",  # anybody may propose a revision of a model on the hub
    "existing": "files",  # permission to replace an output
    "allow_media_url": "network",
    "ray": "network",
}  # fmt: skip
"""Options that reach files, code or the network."""
HARMLESS = {
    *("prompt_column", "id_column", "image_column", "audio_column"),  # names within the input
    *("system", "shard", "carry", "columns", "prompt_template", "served_model_name"),  # texts
    *("truncate", "input_format", "on_bad_row", "on_duplicate_id", "progress", "sampling_defaults"),  # choices
    *("dtype", "device", "attention", "quantization", "kv_dtype", "model_impl", "reasoning", "tool_parser"),
    *("hidden_states_dtype", "repetition_penalty_scope", "logprobs_mode", "pooling", "normalize"),
    *("chat", "strict_fields", "include_source", "include_prompt", "include_prompt_ids", "retry_errors", "dry_run"),
    *("any_model", "lenient_schemas", "dedup", "deterministic", "chat_template_name", "ignore_template_options"),
    "offload",
}
"""Options of the run and of the engine that take words or switches, and reach nothing. Sampling fields, which any row
may set, and numbers, sizes and times reach nothing by their kind."""
PATHS = ("./secret/file", "name=./secret/file", "name=module:function", "module:function", "/etc/passwd")


def resolve(cwd: Path, flags: dict[str, Any] | None = None) -> RunConfig:
    return resolve_config({"inputs": ("prompts.jsonl",)} | (flags or {}), {}, cwd)


def refusal(cwd: Path, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(cwd, flags)
    return str(caught.value)


def takes(option: Option, text: str) -> bool:
    try:
        coerce(option, text, option.name)
    except UsageError:
        return False
    return True


def given(option: Option) -> Any:
    """A value that the option accepts, as in a TOML file."""
    if option.value_type is BOOL:
        return True
    if option.name == "shard":
        return "0/2"
    words = (*option.choices[-1:], *PATHS, "0.5", "4", "{}", "2026-01-31", "13=1", "all")
    return next(word for word in words if takes(option, word))


def test_each_option_is_known_to_reach_files_or_code_or_nothing() -> None:
    """A new option that takes words or switches must be added to one of the two lists above."""
    for option in OPTIONS:
        if option.target == "meta":
            continue
        assert option.reach_of() == REACHING.get(option.name), option.name
        words = bool(option.choices) or option.value_type is BOOL or any(takes(option, path) for path in PATHS)
        if words and option.target != "sampling" and option.name not in REACHING:
            assert option.name in HARMLESS, f"what does {option.flag} reach? decide in its declaration and in this test"
    assert {*REACHING, *HARMLESS} <= {option.name for option in OPTIONS}


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.target != "meta"], ids=lambda o: o.name)
def test_every_option_in_a_file_that_is_not_named(option: Option, tmp_path: Path) -> None:
    """What reaches files or code is refused by its name; what does not is taken; --config allows both."""
    words = json.dumps(given(option))
    needed = {"custom_logit_processor": {"logit_processor": "x=m:f"}, "lora_path": {"lora": "x=a"}}.get(option.name, {})
    line = f'{option.name} = "x"\n' if needed else f"{option.name} = {words}\n"
    flags = needed | ({"events": "-"} if option.name == "stream" else {})
    (tmp_path / "batchgen.toml").write_text(line)
    named = resolve(tmp_path, {**flags, "config": "batchgen.toml"})
    if option.name not in REACHING:
        unnamed = resolve(tmp_path, flags)
        assert unnamed == named
        assert unnamed.origins[option.name] == "./batchgen.toml"
        return
    would = {"code": "run code", "files": "read or write files", "network": "reach the network"}[REACHING[option.name]]
    message = refusal(tmp_path)
    assert message.startswith(f"`{option.name} in ./batchgen.toml` would {would} because of a file in the current ")
    assert message.endswith(", or the file with --config batchgen.toml")
    assert any(flag in message for flag in option.flags)
    assert named.origins[option.name] == "batchgen.toml", "the remedy works"


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.value_type.accepts_file], ids=lambda o: o.name)
def test_a_value_read_from_a_file_needs_a_named_file(option: Option, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}" if option.name != "ebnf" else 'root ::= "a"')
    (tmp_path / "batchgen.toml").write_text(f'{option.name} = "@secret.json"\n')
    assert "would read or write files" in refusal(tmp_path)
    assert option.name in resolve(tmp_path, {"config": "./batchgen.toml"}).origins


def test_an_option_of_a_stronger_source_replaces_a_refused_one(tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text('events = "/etc/passwd"\nseed = 7\n')
    config = resolve(tmp_path, {"events": "e.jsonl"})
    assert (config.events, config.engine.seed) == ("e.jsonl", 7)


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = tmp_path / "batchgen.toml", tmp_path / "kept.toml"
    kept.write_text("seed = 7\n")
    file.symlink_to(kept)
    assert resolve(tmp_path).engine.seed == 7, "the user's own link"
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me:  # a file of root is trusted
        assert f"belongs to another user (uid {me})" in refusal(tmp_path)
    monkeypatch.undo()
    if me:
        return
    for link_owner, owner in ((12345, 0), (0, 12345), (12345, 12345)):
        os.lchown(file, link_owner, -1)
        os.chown(kept, owner, -1)
        message = refusal(tmp_path)
        assert message.startswith("./batchgen.toml belongs to another user (uid 12345), so it is not read unless")
        assert resolve(tmp_path, {"config": "batchgen.toml"}).engine.seed == 7, "the remedy works"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_large(path: Path) -> None:
    path.write_bytes(b"#" * (1 << 20) + b"\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, "./batchgen.toml is not a regular file, so it is not read unless it is named; name it with "),
        (Path.mkdir, "`batchgen.toml`: cannot read ./batchgen.toml: Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "./batchgen.toml is not a regular file, so it is not read unless"),
        (lambda path: path.symlink_to("gone"), "`batchgen.toml`: cannot read ./batchgen.toml: No such file or dir"),
        (make_large, "./batchgen.toml is larger than 1 MiB, so it is not read unless it is named; name it with --co"),
        (lambda path: path.write_text("seed = " + "[" * 50_000), "./batchgen.toml is nested more than 200 deep"),
    ],
)
def test_odd_files_are_refused_and_never_waited_for(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "batchgen.toml")
    assert refusal(tmp_path).startswith(message)
