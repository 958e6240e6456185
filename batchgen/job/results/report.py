"""`batchgen report`: one HTML page that shows a job, from its output, the footer, and its inputs if they are there."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from batchgen.config.run_config import RunConfig
from batchgen.config.units import STDIN
from batchgen.config.urls import RemotePath
from batchgen.data.durable_files import refuse_existing, write_durably
from batchgen.data.files import followed, temporary_near
from batchgen.data.out.merge_jobs import is_merged
from batchgen.data.out.openai_bodies import PieceLookup
from batchgen.data.out.report.figures import read_figures, rows_at
from batchgen.data.out.report.page import island, page
from batchgen.data.out.view import Results, Totals, open_results, read_errors, read_totals
from batchgen.data.schema import KEY_COLUMNS, non_finite_to_none
from batchgen.data.store.timeline import timeline_of
from batchgen.errors import BatchgenError, InputError, ModelError, UsageError
from batchgen.job.results.export import piece_lookup, refuse_overwriting_sources
from batchgen.job.results.inputs import found_inputs, same_inputs
from batchgen.job.results.show import calls_text, message_of
from batchgen.job.summary import counted
from batchgen.media.root import MediaRoot
from batchgen.media.store import MediaLimits, MediaStore
from batchgen.request.fields.prompts import ChatPrompt, TextPrompt, TokenPrompt
from batchgen.request.foreign_text import ForeignTextError
from batchgen.request.printable import printable
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.raw_row import RawRow
from batchgen.request.rows.values import RowDefaults
from batchgen.text.chat.prompt_template import PromptTemplate

_MOST_TEXT: Final = 4000
"""Most characters of a text that are shown."""
_MOST_TOKENS: Final = 1000
_ROW_BYTES: Final = 2_700_000
_PICTURE_BYTES: Final = 900_000
"""Most bytes of all rows and of all pictures: with the library, about 1 MB, they leave a page below 5 MB."""
_PICTURE_SIZE: Final = (144, 144)
_COLUMNS: Final = (
    *(*KEY_COLUMNS, "id", "status", "error", "finish_reason", "stop_kind", "matched_stop", "text", "reasoning"),
    *("tool_calls", "tool_calls_error", "prompt_tokens", "cached_tokens", "completion_tokens", "constraint_ok"),
    *("output_ids", "output_logprobs", "output_tokens_text", "scores", "embedding", "dedup_of", "prompt", "extra"),
)
_FACTS: Final = (
    *("version", "model", "dtype", "quantization", "implementation", "kernels", "deterministic", "logprobs_mode"),
    *("reasoning", "tool_parser", "clock", "fingerprint"),
)
_Prompt = tuple[list[tuple[str, str]], list[int]]
"""Role (empty for a plain prompt) and text of each message, and numbers of the pictures."""


def write_page(
    out: Path, target: str | None, *, inputs: Sequence[str] | None, tokenizer: str | None, overwrite: bool
) -> None:
    """Write the page of `out`, and print to stderr how many samples it shows, and what it lacks.

    Args:
        out: a results file, a folder of shards, or unfinished work.
        target: the file to write, `-` for stdout; None for OUT with the suffix .html, of a URL in the current folder.
        inputs: input files of the run if they have moved.
        tokenizer: folder or id of the tokenizer, if the one recorded in the output is gone.
        overwrite: whether an existing file is replaced.

    Raises:
        InputError: there are no results to read.
        UsageError: the library for the charts is not installed, or the file to write is part of the job.
        OutputError: the file exists, or cannot be written.
    """
    try:
        import vl_convert  # optional
    except ImportError:
        raise UsageError(
            "batchgen report draws with vl-convert-python, which is not installed: pip install 'batchgen[report]'"
        ) from None
    results = open_results(out)
    default = Path(f"{out.stem}.html") if isinstance(out, RemotePath) else out.with_suffix(".html")
    path = followed(Path(target) if target else default)
    if target != STDIN:
        refuse_overwriting_sources([path], out, results.footer or {"inputs": ()})
        refuse_existing(path, overwrite)
    data = _Shown(results, inputs, tokenizer).data(out)
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    made = page(data, f"{printable(out.name)} - batchgen report", library)
    if target == STDIN:
        sys.stdout.buffer.write(made)
        sys.stdout.flush()
    else:
        write_durably(path, lambda stream: stream.write(made), temporary_near(path))
    line = f"{len(data['rows']):,} of {data['samples']:,} samples shown, {len(made) / 1e6:.1f} MB"
    print("\n".join([line if target == STDIN else printable(f"{path}: {line}"), *data["notes"]]), file=sys.stderr)


class _Shown:
    """What the page shows."""

    def __init__(self, results: Results, inputs: Sequence[str] | None, tokenizer: str | None) -> None:
        self._results, self._run = results, results.footer or {}
        self._inputs, self._tokenizer = inputs, tokenizer
        self._notes = [] if results.note is None else [results.note]
        self._pictures: list[str] = []
        self._numbers: dict[str, int | None] = {}
        """Digest of a picture -> its number; None: there are too many."""
        self._timeline = timeline_of(results.files)
        self._slow: dict[int, float] = {row: seconds for run in self._timeline for row, seconds in run["slowest"][::-1]}
        self._figures = read_figures(results.files, self._slow)

    def data(self, out: Path) -> dict[str, Any]:
        """The JSON of the page. Figures have the names of `run --report`."""
        totals, figures = Totals(), self._figures
        for file in self._results.files:
            with read_errors(file):
                read_totals(file, totals)
        return {
            "output": printable(str(out)),
            "complete": self._results.complete,
            "samples": figures.samples,
            "figures": {
                "rows": totals.rows,
                **counted(totals),
                "prompt_tokens": figures.prompt_tokens,
                "distinct_prompt_tokens": figures.distinct_tokens,
            },
            "lengths": {name: figures.histogram(name) for name in figures.lengths},
            "timeline": self._timeline,
            "environment": self._environment(),
            "rows": self._rows(),
            "pictures": self._pictures,
            "notes": [*map(printable, self._notes)],
        }

    def _environment(self) -> list[tuple[str, str]]:
        options = (self._run.get("configuration") or {}).get("options", {})
        facts: list[tuple[str, Any]] = [
            (name, self._run[name]) for name in _FACTS if self._run.get(name) not in (None, "")
        ]
        facts += [("input", f"{file['path']} ({file['size']:,} bytes)") for file in self._run.get("inputs", ())[:20]]
        facts += [
            (f"--{name.replace('_', '-')}", item["value"])
            for name, item in options.items()
            if item["origin"] != "default" and item["value"] is not None and name not in ("output", "shard")
        ]
        return [(printable(name), _cut(str(value), 1000)) for name, value in facts]

    def _rows(self) -> list[dict[str, Any]]:
        """The chosen samples that fit into the page, those with the most telling reasons first, in stored order."""
        chosen, files = self._figures.chosen, self._results.files
        found = dict(rows_at(files, chosen, _COLUMNS))
        prompts = self._prompts({row["row_index"] for row in found.values()})
        pieces = self._pieces(found)
        kept: dict[int, dict[str, Any]] = {}
        size = 0
        for place, reason in chosen.items():
            row = found[place]
            asked, number = prompts.get(row["row_index"], []), row["prompt_index"]
            shown = _row(row, asked[number] if number < len(asked) else ([], []), pieces)
            slow = self._slow.get(row["row_index"])
            more = {reason, "" if slow is None else "slow"} - {*shown["tags"], ""}
            shown["tags"] += sorted(more)
            shown |= {} if slow is None else {"seconds": slow}
            size += len(island(shown).encode())
            if size > _ROW_BYTES:
                break
            kept[place] = shown
        return [kept[place] for place in sorted(kept)]

    def _pieces(self, rows: Mapping[int, Mapping[str, Any]]) -> PieceLookup | None:
        """Token id -> piece, if a row needs it and the tokenizer is there."""
        if not any(row["output_logprobs"] and not row["output_tokens_text"] for row in rows.values()):
            return None
        try:
            piece = piece_lookup(self._run, self._tokenizer)
            piece(0)
            return piece
        except (ModelError, KeyError) as problem:
            self._notes.append(f"Tokens are not coloured by their logprobs: {problem}")
            return None

    def _prompts(self, wanted: set[int]) -> dict[int, list[_Prompt]]:
        """Row -> its prompts, from the inputs; nothing if they cannot be read as they were."""
        if not self._run.get("configuration"):
            return {}
        try:
            if is_merged(self._run):
                raise InputError("the output was merged from those of several jobs")
            config = RunConfig.restore(self._run["configuration"], self._results.files[0], {"inputs": self._inputs})
            inputs = same_inputs(found_inputs(config, self._run, "report"), self._run, "report")
            columns, engine = config.named_columns, config.engine
            if config.prompt_template is not None:
                columns = columns._replace(template=PromptTemplate(config.prompt_template))
            limits = MediaLimits(engine.max_image_pixels, engine.max_audio_seconds, engine.max_media_items)
            store = MediaStore(MediaRoot(engine.media_root), limits, audio_rate=16000)
            defaults = RowDefaults(chat=config.chat, system=config.system, events=True)
            return {raw.index: self._prompts_of(raw, defaults, store) for raw in inputs.rows_at(wanted, columns)}
        except BatchgenError as problem:
            self._notes.append(f"Prompts are not read from the input: {problem}")
            return {}

    def _prompts_of(self, raw: RawRow, defaults: RowDefaults, store: MediaStore) -> list[_Prompt]:
        try:
            prompts = parse_row(raw.value, raw.index, defaults, raw.displaced).prompts
        except BatchgenError:
            text = json.dumps(non_finite_to_none(raw.fields), ensure_ascii=False, default=str)
            return [([("row", _cut(text))], [])]
        return [([*_texts_of(prompt)], self._pictures_of(prompt, store)) for prompt in prompts]

    def _pictures_of(self, prompt: Any, store: MediaStore) -> list[int]:
        """The numbers of the small copies of a prompt's pictures, without those that cannot be read or are too many."""
        numbers = []
        for item in getattr(prompt, "media", ()):
            with suppress(BatchgenError, OSError):
                header = store.add(item)
                if header.kind == "image" and header.digest not in self._numbers:
                    small, data = store.decode(header), io.BytesIO()
                    small.thumbnail(_PICTURE_SIZE)
                    small.save(data, "JPEG", quality=70)
                    text = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
                    fits = sum(map(len, self._pictures)) + len(text) <= _PICTURE_BYTES
                    self._numbers[header.digest] = len(self._pictures) if fits else None
                    self._pictures += [text] * fits
                numbers.append(self._numbers.get(header.digest))
        return [number for number in numbers if number is not None]


def _cut(text: str | None, most: int = _MOST_TEXT) -> str:
    """A text with what deceives or controls escaped, and with its end left out if it is long."""
    text = text or ""
    more = f"… {len(text) - most:,} more characters" if len(text) > most else ""
    return printable(text[:most], keep="\n\t") + more


def _texts_of(prompt: Any) -> Iterator[tuple[str, str]]:
    """Role and text of each message of a prompt."""
    if isinstance(prompt, ChatPrompt):
        for message in prompt.messages:
            content, calls = message.get("content") or (), message.get("tool_calls")
            parts = [{"text": content}] if isinstance(content, str) else content
            texts = [str(part.get("text", f"[{part.get('type')}]")) for part in parts]
            texts += [json.dumps(calls, ensure_ascii=False, default=str)] if calls else []
            yield _cut(str(message.get("role")), 40), _cut("\n".join(texts))
    elif isinstance(prompt, TextPrompt):
        yield "", _cut(prompt.text if prompt.query is None else f"{prompt.query}\n{prompt.text}")
    else:
        yield "", f"[{len(prompt.ids):,} token ids]" if isinstance(prompt, TokenPrompt) else "[embeddings]"


def _row(row: Mapping[str, Any], prompt: _Prompt, pieces: PieceLookup | None) -> dict[str, Any]:
    """A sample of the browser, without what it lacks."""
    texts, pictures = prompt
    tags = {
        row["status"]: True,
        str(row["error"]["code"] if row["error"] else row["finish_reason"]): row["error"] or row["finish_reason"],
        "constraint met": row["constraint_ok"],
        "constraint failed": row["constraint_ok"] is False,
        "tool calls": row["tool_calls"],
        "unreadable call": row["tool_calls_error"],
        "thoughts": row["reasoning"],
        "pictures": pictures,
        "logprobs": row["output_logprobs"],
        "copy": row["dedup_of"] is not None,
    }
    try:
        calls = calls_text(row["tool_calls"])
    except (ForeignTextError, KeyError, TypeError, AttributeError):
        calls = row["tool_calls"]
    shown = {
        "prompt": texts or ([("", _cut(row["prompt"]))] if row["prompt"] else []),
        "pictures": pictures,
        "thoughts": _cut(row["reasoning"]),
        "text": _cut(message_of({**row, "tool_calls": None})),
        "calls": _cut(calls),
        "tokens": [*_tokens(row, pieces)],
        "stop": _cut(": ".join(filter(None, (row["stop_kind"], row["matched_stop"]))), 200),
        "extra": _cut(row["extra"], 1000),
    }
    return {
        "row": [row[name] for name in KEY_COLUMNS],
        "id": _cut(row["id"], 200),
        "tags": [printable(tag) for tag, there in tags.items() if there],
        "length": [row[name] or 0 for name in ("prompt_tokens", "cached_tokens", "completion_tokens")],
        **{name: value for name, value in shown.items() if value},
    }


def _tokens(row: Mapping[str, Any], pieces: PieceLookup | None) -> Iterator[tuple[str, float]]:
    """(text, logprob) of the generated tokens; those that are parts of one character are joined."""
    if row["output_tokens_text"]:
        data = [text.encode("utf-8", "replace") for text in row["output_tokens_text"]]
    else:
        data = [pieces(token).data for token in row["output_ids"] or ()] if pieces and row["output_logprobs"] else []
    waiting, least = b"", 0.0
    for piece, logprob in list(zip(data, row["output_logprobs"] or (), strict=False))[:_MOST_TOKENS]:
        waiting, least = waiting + piece, max(-99.0, min(least, -99.0 if logprob is None else logprob))
        with suppress(UnicodeDecodeError):
            yield printable(waiting.decode(), keep="\n\t"), round(least, 3)
            waiting, least = b"", 0.0
    if waiting:
        yield printable(waiting.decode("utf-8", "replace")), round(least, 3)
