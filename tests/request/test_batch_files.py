"""Lines of the batch files that providers document: the endpoint, the method and the model that they name."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.prompts import ChatPrompt, TextPrompt
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.parser import row_extra
from batchgen.request.rows.values import RowDefaults
from tests.cases import each
from tests.rows import CHAT, COMPLETIONS, HELLO, line, parse

ASK = [{"role": "user", "content": "Which cheese is best?"}]
SYSTEM = [{"role": "system", "content": "Be helpful."}, *ASK]
DEPLOYMENT = "/openai/deployments/my-gpt/chat/completions?api-version=2024-10-21"


def posted(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "request-1", "method": "POST", "url": url, "body": body}


def bare(**body: Any) -> dict[str, Any]:
    return {"custom_id": "request-1", "body": body}


PROVIDERS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    # provider: (line, the name to serve, expected limit)
    "OpenAI": (posted(CHAT, model="gpt-4o-mini", messages=SYSTEM, max_tokens=20), "gpt-4o-mini", 20),
    "Azure": (posted("/chat/completions", model="my-deployment", messages=SYSTEM), "my-deployment", None),
    "Azure, url of a deployment": (posted(DEPLOYMENT, messages=ASK), "my-gpt", None),
    "vLLM": (
        posted(CHAT, model="meta-llama/Meta-Llama-3-8B-Instruct", messages=SYSTEM, max_completion_tokens=30),
        "meta-llama/Meta-Llama-3-8B-Instruct",
        30,
    ),
    "Mistral": (bare(max_tokens=40, messages=ASK), "", 40),
    "Together": (bare(model="deepseek-ai/DeepSeek-V3", messages=ASK, max_tokens=50), "deepseek-ai/DeepSeek-V3", 50),
    "Fireworks": (bare(messages=SYSTEM, max_tokens=60, temperature=0.7), "", 60),
    "Novita": (bare(model="deepseek/deepseek-v3-0324", messages=ASK, max_tokens=70), "deepseek/deepseek-v3-0324", 70),
}


@pytest.mark.field("body", "url", "method", "model")
@each("provider", PROVIDERS)
@each("any_model", [False, True])
def test_documented_lines_run_unchanged(provider: str, any_model: bool) -> None:
    value, served, limit = PROVIDERS[provider]
    names = ModelNames.of("./models/local", accept_all=True) if any_model else ModelNames.of("./models/local", [served])
    row = parse(value, RowDefaults(names=names))
    assert (row.id, row.dialect, row.params.max_new_tokens) == ("request-1", "openai-chat", limit)
    assert row.prompts == (ChatPrompt(tuple(value["body"]["messages"])),)


CHAT_URLS = [
    None, CHAT, "/chat/completions", "chat/completions", "v1/chat/completions", "/v1/chat/completions/",
    "/v4/chat/completions", "/api/v3/chat/completions", "/openai/v1/chat/completions", "/inference/v1/chat/completions",
    "https://api.example.com/v1/chat/completions", "/openai/deployments/llama/chat/completions?api-version=2024-10-21",
]  # fmt: skip
COMPLETION_URLS = [None, COMPLETIONS, "/completions", "http://localhost:8000/v1/completions", "v1/completions"]
METHODS: list[dict[str, Any]] = [{}, {"method": None}, {"method": "POST"}, {"method": "post"}]


@pytest.mark.field("url", "method")
@pytest.mark.parametrize("method", METHODS)
def test_endpoints(method: dict[str, Any]) -> None:
    for url in CHAT_URLS:
        row = parse({"custom_id": "a", "url": url, **method, "body": {"messages": HELLO, "max_tokens": 3}})
        assert (row.dialect, row.prompts, row.params.max_new_tokens) == ("openai-chat", (ChatPrompt(tuple(HELLO)),), 3)
    for url in COMPLETION_URLS:
        row = parse({"custom_id": "a", "url": url, **method, "body": {"prompt": "a"}})
        assert (row.dialect, row.prompts, row.params.max_new_tokens) == ("openai-completions", (TextPrompt("a"),), 16)


@pytest.mark.field("url")
@pytest.mark.parametrize(
    "url",
    [
        "/v1/responses", "/v1/score", "/score", "/v1/moderations", "/v1/fim/completions", "/v1/messages",
        "/v1/audio/transcriptions", "/v1/images/generations", "https://api.example.com/v1/responses",
        "/openai/deployments/llama/responses?api-version=1",
    ],
)  # fmt: skip
def test_other_endpoints_are_refused_by_name(url: str) -> None:
    with pytest.raises(RowError) as caught:
        parse({**line(CHAT), "url": url})
    info = caught.value.info
    assert (info.code, info.param) == (ErrorCode.UNSUPPORTED_FIELD, "url")
    assert url in info.message
    assert CHAT in info.message
    assert COMPLETIONS in info.message


def test_a_body_with_input_needs_its_endpoint() -> None:
    with pytest.raises(RowError, match="`url` must be given with `input`") as caught:
        parse(bare(input="Say hi"))
    assert caught.value.info.code == ErrorCode.INVALID_FIELD


def test_a_deployment_is_a_model() -> None:
    with pytest.raises(RowError, match=r"`url` names the model 'my-gpt'.*--served-model-name my-gpt"):
        parse(posted(DEPLOYMENT, messages=ASK))


def test_a_body_with_two_prompts_is_ambiguous() -> None:
    with pytest.raises(RowError) as caught:
        parse(bare(messages=ASK, prompt="a"))
    assert caught.value.info.code == ErrorCode.AMBIGUOUS_PROMPT


def test_carried_fields_of_a_line_without_url() -> None:
    value = {**bare(messages=ASK, user="u", temperature="hot"), "label": 1}
    assert row_extra(value) == {"label": 1, "body": {"user": "u"}}
