"""Bodies and error lines against the `openai` package's own response types, strictly validated."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from batchgen.data.out.openai_bodies import TokenPiece, batch_line, finish_reason
from batchgen.data.row_shapes import RowShape
from batchgen.data.schema import SCHEMA
from batchgen.errors import ErrorCode

RUN = {"fingerprint": "ab" * 32, "model": "/models/llama", "created": 1_700_000_000}
CHAT, TEXT, ECHO = RowShape(True, False), RowShape(False, False), RowShape(False, True)
VOCAB = [b"<s>", b"</s>", b"Hello", b" w\xc3\xb6", b"rld", b"\xe2\x82", b"\xac", b"!", b" a", b" a"]
SPECIAL = {0, 1}


def piece(token: int) -> TokenPiece:
    return TokenPiece(VOCAB[token], token in SPECIAL)


def row(ids: list[int] | None = None, **values: Any) -> dict[str, Any]:
    """An output row of which only `values` are not null."""
    given: dict[str, Any] = {"id": "r", "row_index": 3, "prompt_index": 0, "sample_index": 0, "status": "ok"}
    if ids is not None:
        text = b"".join(VOCAB[i] for i in ids if i not in SPECIAL).decode("utf-8", "replace")
        given |= {"output_ids": ids, "completion_tokens": len(ids), "prompt_tokens": 4, "text": text}
        given |= {"cached_tokens": 1, "finish_reason": "length"}
    return dict.fromkeys(SCHEMA.names) | given | values


def body(rows: list[dict[str, Any]], shape: RowShape) -> Any:
    good, line = batch_line(rows, shape, RUN, piece)
    assert good
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"]) == ("r", None)
    assert line["response"]["status_code"] == 200
    return json.loads(json.dumps(line["response"]["body"], allow_nan=False))


def text_completion(rows: list[dict[str, Any]], shape: RowShape = TEXT) -> Completion:
    return Completion.model_validate(body(rows, shape), strict=True)


def chat_completion(rows: list[dict[str, Any]]) -> ChatCompletion:
    return ChatCompletion.model_validate(body(rows, CHAT), strict=True)


def test_a_text_completion() -> None:
    found = text_completion([row([2, 3, 4])])
    assert (found.object, found.model, found.created) == ("text_completion", "llama", 1_700_000_000)
    assert found.id.startswith("cmpl-")
    assert found.system_fingerprint == "fp_abababababab"
    (choice,) = found.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("Hello wörld", 0, "length", None)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (4, 3, 7)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_completion() -> None:
    found = chat_completion([row([2, 1], finish_reason="stop", stop_kind="eos", matched_stop="1")])
    assert (found.object, found.id.startswith("chatcmpl-")) == ("chat.completion", True)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "Hello", None)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert choice.stop_reason is None  # type: ignore[attr-defined]


CALLS = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


@pytest.mark.parametrize(
    ("values", "content", "reason"),
    [
        ({"text": "", "finish_reason": "stop"}, None, "tool_calls"),
        ({"text": "I add.", "finish_reason": "stop", "tool_calls_error": "no JSON"}, "I add.", "tool_calls"),
        ({"text": "", "finish_reason": "length"}, None, "length"),
        ({"text": "", "finish_reason": "repetition"}, None, "length"),
    ],
)
def test_calls_of_tools(values: dict[str, Any], content: str | None, reason: str) -> None:
    given = row([2, 1], tool_calls=json.dumps(CALLS), **values)
    (choice,) = chat_completion([given]).choices
    assert (choice.message.content, choice.finish_reason) == (content, reason)
    assert [call.model_dump() for call in choice.message.tool_calls or ()] == CALLS
    made = body([given], CHAT)["choices"][0]
    assert made["message"].get("tool_calls_error") == values.get("tool_calls_error")
    assert finish_reason(made) == values["finish_reason"]


def test_samples_and_prompts_are_choices_and_a_prompt_counts_once() -> None:
    rows = [
        row([2, 3], prompt_index=p, sample_index=s, cached_tokens=4 if s else p, dropped_tokens=None if s else 5)
        for p in range(2)
        for s in range(3)
    ]
    found = text_completion(rows)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 12 + 10)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 0 + 1


@pytest.mark.parametrize(
    ("columns", "finish", "reason"),
    [
        ({"finish_reason": "length"}, "length", None),
        ({"finish_reason": "stop", "stop_kind": "eos", "matched_stop": "1"}, "stop", None),
        ({"finish_reason": "stop", "stop_kind": "string", "matched_stop": "END"}, "stop", "END"),
        ({"finish_reason": "stop", "stop_kind": "token", "matched_stop": "7"}, "stop", "7"),
        ({"finish_reason": "stop", "stop_kind": "grammar"}, "stop", None),
        ({"finish_reason": "repetition"}, "length", "repetition"),
        ({"finish_reason": "abort"}, "length", "abort"),
    ],
)
def test_finish_and_stop_reasons(columns: dict[str, Any], finish: str, reason: str | None) -> None:
    for shape in (TEXT, CHAT):
        (choice,) = body([row([2], **columns)], shape)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)


LOGPROBS: dict[str, Any] = {
    "output_logprobs": [-0.5, -1.0, -math.inf],
    "output_top_ids": [2, 7, 3, 2, 4, 5],
    "output_top_logprobs": [-0.5, -2.0, -0.25, -1.5, -0.125, -math.inf],
}


def test_logprobs_of_a_text_completion() -> None:
    found = text_completion([row([2, 4, 6], **LOGPROBS)]).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["Hello", "rld", "bytes:\\xac"]
    assert found.token_logprobs == [-0.5, -1.0, -9999.0]
    assert found.top_logprobs == [
        {"Hello": -0.5, "!": -2.0},
        {" wö": -0.25, "Hello": -1.5, "rld": -1.0},
        {"rld": -0.125, "bytes:\\xe2\\x82": -9999.0, "bytes:\\xac": -9999.0},
    ]
    assert text_completion([row([2], output_logprobs=[-0.5])]).choices[0].logprobs.top_logprobs is None  # type: ignore[union-attr]
    given = {"output_logprobs": [-3.0], "output_top_ids": [9], "output_top_logprobs": [-0.5]}
    same = text_completion([row([8], **given)]).choices[0].logprobs
    assert same is not None
    assert same.top_logprobs == [{" a": -0.5}], "of tokens with equal text the most likely is kept"


def test_logprobs_of_a_chat_completion() -> None:
    found = chat_completion([row([2, 4, 6], **LOGPROBS)]).choices[0].logprobs
    assert found is not None
    assert found.refusal is None
    assert found.content is not None
    assert [(t.token, t.bytes, t.logprob) for t in found.content] == [
        ("Hello", list(b"Hello"), -0.5),
        ("rld", list(b"rld"), -1.0),
        ("\\xac", [0xAC], -9999.0),
    ]
    assert [(t.token, t.logprob) for t in found.content[1].top_logprobs] == [(" wö", -0.25), ("Hello", -1.5)]
    bare = chat_completion([row([2], output_logprobs=[-0.5])]).choices[0].logprobs
    assert bare is not None
    assert bare.content is not None
    assert bare.content[0].top_logprobs == []


def test_logprobs_of_an_echo_begin_with_the_prompt_tokens() -> None:
    echoed = row(
        [7],
        text="Hello wörld!",
        prompt_ids=[0, 2, 3, 4],
        output_logprobs=[-0.5],
        input_logprobs=[None, -1.0, -2.0, -3.0],
        input_top_ids=[None, 2, 3, 3],
        input_top_logprobs=[None, -1.0, -2.0, -0.5],
        output_top_ids=[7],
        output_top_logprobs=[-0.5],
    )
    found = text_completion([echoed], ECHO).choices[0]
    assert found.text == "Hello wörld!"
    assert found.logprobs is not None
    assert found.logprobs.tokens == ["<s>", "Hello", " wö", "rld", "!"]
    assert found.logprobs.token_logprobs == [0.0, -1.0, -2.0, -3.0, -0.5]
    assert found.logprobs.text_offset == [0, 0, 5, 8, 11]
    assert found.logprobs.top_logprobs == [{}, {"Hello": -1.0}, {" wö": -2.0}, {" wö": -0.5, "rld": -3.0}, {"!": -0.5}]


@pytest.mark.parametrize(
    ("scored", "offsets"), [([-2.0, -3.0], [5, 8, 11]), ([-3.0], [8, 11]), ([], [11]), (None, [11])]
)
def test_offsets_of_an_echo_count_prompt_tokens_without_logprobs(
    scored: list[float] | None, offsets: list[int]
) -> None:
    echoed = row([7], text="Hello wörld!", prompt_ids=[0, 2, 3, 4], output_logprobs=[-0.5], input_logprobs=scored)
    found = text_completion([echoed], ECHO).choices[0].logprobs
    assert found is not None
    assert found.tokens == [" wö", "rld", "!"][3 - len(offsets) :]
    assert found.text_offset == offsets


@pytest.mark.parametrize(
    ("ids", "text", "offsets"),
    [
        ([2, 3, 4, 7], "Hello wörld!", [0, 5, 8, 11]),
        ([2, 5, 6, 7], "Hello€!", [0, 5, 5, 6]),
        ([2, 3, 4, 7], "Hello w", [0, 5, 7, 7]),
        ([0, 2, 1, 7], "Hello!", [0, 0, 5, 5]),
        ([0, 2, 1, 7], "<s>Hello</s>!", [0, 3, 8, 12]),
        ([8, 9], "a a", [0, 1]),
        ([6, 7], "\ufffd!", [0, 1]),
        ([5, 7], "\ufffd!", [0, 1]),
        ([5, 5, 6, 7], "\ufffd€!", [0, 1, 1, 2]),
        ([], "", []),
    ],
)
def test_text_offsets(ids: list[int], text: str, offsets: list[int]) -> None:
    given = row(ids, text=text, output_logprobs=[-1.0] * len(ids))
    found = text_completion([given]).choices[0].logprobs
    assert found is not None
    assert found.text_offset == offsets


def test_scores_are_extra_fields_of_the_choice() -> None:
    scores = [{"sum": -3.0, "mean": -1.5, "tokens": 2, "is_greedy": True}]
    scored = row([], text=None, scores=scores, score_logprobs=[-1.0, -math.inf])
    for shape in (TEXT, CHAT):
        found = body([scored], shape)
        (Completion if shape is TEXT else ChatCompletion).model_validate(found, strict=True)
        (choice,) = found["choices"]
        assert (choice["scores"], choice["score_logprobs"]) == (scores, [-1.0, -9999.0])
        assert choice.get("text", "") == "" == choice.get("message", {"content": ""})["content"]


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID_FIELD, 400, "invalid_request_error"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, "invalid_request_error"),
        (ErrorCode.NAN_LOGITS, 500, "server_error"),
        (ErrorCode.OOM, 500, "server_error"),
    ],
)
def test_status_and_type_of_errors(code: ErrorCode, status: int, kind: str) -> None:
    """One failed prompt fails the request, as at the endpoint."""
    error = {"code": str(code), "message": "`top_p` is ½", "param": "top_p"}
    good, line = batch_line([row([2]), row(prompt_index=1, status="error", error=error)], TEXT, RUN, piece)
    assert not good
    assert (line["custom_id"], line["response"]["status_code"], line["error"]) == ("r", status, None)
    found = ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)
    assert (found.code, found.message, found.param, found.type) == (str(code), "`top_p` is ½", "top_p", kind)


def test_ids_depend_on_the_row_and_the_job() -> None:
    def ids(run: dict[str, Any], index: int) -> tuple[str, str, str]:
        _, line = batch_line([row([2], row_index=index)], TEXT, run, piece)
        return line["id"], line["response"]["request_id"], line["response"]["body"]["id"]

    assert ids(RUN, 1) == ids(RUN, 1)
    assert len({*ids(RUN, 1), *ids(RUN, 2), *ids(RUN | {"fingerprint": "c" * 64}, 1)}) == 9


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/models/llama", "llama"),
        ("./llama/", "llama"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("demonstration model", "demonstration model"),
    ],
)
def test_the_model_name_contains_no_path(name: str, shown: str) -> None:
    _, line = batch_line([row([2])], TEXT, RUN | {"model": name}, piece)
    assert line["response"]["body"]["model"] == shown


def test_thoughts_are_in_the_message_and_their_tokens_in_no_text() -> None:
    thought = row([8, 8, 2, 3, 4], reasoning=" a a", reasoning_tokens=2, text="Hello wörld")
    chat = body([thought], CHAT)
    assert chat["choices"][0]["message"]["reasoning"] == " a a"
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    scored = {**thought, "output_logprobs": [-1.0] * 5}
    assert body([scored], TEXT)["choices"][0]["logprobs"]["text_offset"] == [0, 0, 0, 5, 8]
    assert len(body([scored], CHAT)["choices"][0]["logprobs"]["content"]) == 5
    older = {name: value for name, value in row([2]).items() if not name.startswith("reasoning")}
    assert "reasoning" not in body([older], CHAT)["choices"][0]["message"]
