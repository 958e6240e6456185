from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ErrorCode, ErrorInfo, ModelError, RowError
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import KINDS, SENTENCES, save_tokenizer


def chat(*contents: Any, **options: Any) -> ChatPrompt:
    roles = ["user", "assistant"]
    return ChatPrompt(tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_raw_text_gets_one_bos_and_no_eos(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    bos, eos = tokenizer._hf.bos_token_id, tokenizer._hf.eos_token_id
    texts = [*SENTENCES, "a<|im_end|>b", "<s>already", ""]
    encoded = tokenizer.encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        expected = tokenizer._hf(text).input_ids
        assert ids == (expected[1:] if text.startswith("<s>") else expected)
        assert ids[0] == bos
        assert ids.count(bos) == 1
        assert eos not in ids
    assert encoded[-1] == [bos]


def test_a_tokenizer_without_bos_adds_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", bos=False))
    assert tokenizer.prefix_ids == []
    assert tokenizer.encode(["", "a"])[0] == []
    assert tokenizer.encode(["fox"]) == tokenizer.encode_plain(["fox"])


def test_an_eos_appended_by_the_tokenizer_is_left_out(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "bytelevel")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    content["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer._hf("a").input_ids[-1] == 1
    assert tokenizer.encode(["a"])[0] == [0, *tokenizer.encode_plain(["a"])[0]]


@pytest.mark.field("messages", "add_generation_prompt")
def test_encode_chat_equals_apply_chat_template(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        prompt = chat("Hello there", "Hi!", "how are you?")
        expected = tokenizer._hf.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokenizer.encode_chat(prompt) == expected
        assert expected.count(tokenizer._hf.bos_token_id) == 1, "the template's BOS, not doubled"


@pytest.mark.field("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
def test_chat_options_reach_the_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(chat("Hi")).endswith("<|im_start|>assistant\n")
    assert tokenizer.render_chat(chat("Hi", add_generation_prompt=False)).endswith("<|im_end|>\n")
    continued = chat("Hi", "Sure, the", add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.render_chat(continued).endswith("assistant\nSure, the")
    assert "mood:glad" in tokenizer.render_chat(chat("Hi", template_kwargs={"mood": "glad"}))
    assert 'tools:[{"type": "function"}]' in tokenizer.render_chat(chat("Hi", tools=({"type": "function"},)))


@pytest.mark.field("tools", "chat_template_kwargs")
@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tools", {"tools": ({"type": "function"},)}),
        ("chat_template_kwargs", {"template_kwargs": {"mood": "glad"}}),
        ("chat_template_kwargs", {"template_kwargs": {"content": 1, "thinking": False}}),
    ],
)
def test_inputs_that_the_template_does_not_read_are_refused(
    tmp_path: Path, field: str, options: dict[str, Any]
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    with pytest.raises(RowError, match="template does not read it") as caught:
        tokenizer.render_chat(chat("Hi", **options))
    assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.UNSUPPORTED_FIELD, field)


@pytest.mark.field("tools")
def test_tools_may_have_a_separate_template(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    both = {"default": plain, "tool_use": plain + "{{ tools | tojson }}"}
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=both))
    assert tokenizer.render_chat(chat("Hi", tools=({"type": "function"},))) == 'Hi[{"type": "function"}]'


@pytest.mark.field("messages")
def test_content_parts_are_passed_to_templates_that_read_them(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\n[one][two]<|im_end|>" in tokenizer.render_chat(chat(parts))


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{{ m.content }};{% endfor %}", "{% for m in messages %}{{ m.content + ';' }}{% endfor %}"],
)
def test_content_parts_are_joined_for_templates_that_read_strings(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat(chat(parts)) == "one\ntwo;"


def test_tool_call_arguments_become_objects(tmp_path: Path) -> None:
    call = "{% set f = m.tool_calls[0].function %}{{ f.name }}({{ f.arguments | tojson }})"
    template = "{% for m in messages %}" + call + "{% endfor %}"
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=template))

    def render(arguments: Any) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return tokenizer.render_chat(ChatPrompt(({"role": "assistant", "content": None, "tool_calls": [call]},)))

    assert render('{"a": 1}') == render({"a": 1}) == 'f({"a": 1})'
    assert render("") == "f({})"
    with pytest.raises(RowError, match="not a JSON object"):
        render("[1")


@pytest.mark.field("messages")
def test_tool_calls_reach_the_prompt_or_are_refused(tmp_path: Path) -> None:
    conversation = ChatPrompt(
        ({"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "a"}]},)
    )
    reading = "{% for m in messages %}[{{ m.content }}{{ m.tool_calls[0].id }}]{% endfor %}"
    reader = Tokenizer.load(save_tokenizer(tmp_path / "reader", "bytelevel", template=reading))
    assert reader.render_chats([conversation, conversation]) == ["[a]", "[a]"]
    without_tool_calls = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    other = Tokenizer.load(save_tokenizer(tmp_path / "other", "bytelevel", template=without_tool_calls))
    refused, plain = other.render_chats([conversation, chat("Hi")])
    assert plain == "[Hi]"
    assert isinstance(refused, ErrorInfo)
    assert (refused.code, refused.param) == ("unsupported_field", "messages")
    assert "`messages[0].tool_calls[0]`" in refused.message


def test_batched_rendering_equals_rendering_one_at_a_time(tokenizers: dict[str, Tokenizer]) -> None:
    good = [chat("Hi"), chat("a", "b", "c"), chat([{"type": "text", "text": "one"}]), chat("Once more")]
    settings = [
        chat("Hi", add_generation_prompt=False),
        chat("Hi", template_kwargs={"mood": "glad"}),
        chat("Hi", tools=({"type": "function"},)),
        chat("Hi", "Sure, the", add_generation_prompt=False, continue_final_message=True),
    ]
    for tokenizer in tokenizers.values():
        for prompts in ([], good, [good[0], *settings, good[1]]):
            assert tokenizer.render_chats(prompts) == [tokenizer.render_chat(prompt) for prompt in prompts]


def test_a_bad_conversation_among_many_fails_alone(tokenizer: Tokenizer) -> None:
    narrator, empty = ChatPrompt(({"role": "narrator", "content": "Once"},)), ChatPrompt(())
    first, bad, nothing, last = tokenizer.render_chats([chat("Hi"), narrator, empty, chat("Bye")])
    assert (first, last) == (tokenizer.render_chat(chat("Hi")), tokenizer.render_chat(chat("Bye")))
    for found, prompt in ((bad, narrator), (nothing, empty)):
        with pytest.raises(RowError) as caught:
            tokenizer.render_chat(prompt)
        assert found == caught.value.info
    assert isinstance(bad, ErrorInfo)
    assert (bad.code, bad.param) == (ErrorCode.INVALID_FIELD, "messages")
    assert "no role narrator" in bad.message


def test_no_template_is_a_row_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, "bytelevel", template=None))
    assert tokenizer.template is None
    assert tokenizer.template_digest is None
    with pytest.raises(RowError, match="no chat template"):
        tokenizer.encode_chat(chat("Hi"))


def test_deeply_nested_messages_are_a_row_error(tokenizer: Tokenizer) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RowError, match="cannot be rendered"):
        tokenizer.render_chat(ChatPrompt(({"role": "user", "content": "a", "name": nested},)))


def test_eos_ids_are_the_models_and_the_tokenizers(
    tokenizer: Tokenizer, folders: dict[str, Path], tmp_path: Path
) -> None:
    ids = tokenizer._hf.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert tokenizer.eos_ids == frozenset(ids)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    other = Tokenizer.load(folders["bytelevel"], model=tmp_path)
    assert other.eos_ids == {9, ids[1]}, (
        "the generation configuration is the model's, not that of the tokenizer's folder"
    )


def test_vocabulary_and_token_text(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        assert tokenizer.id_to_token(tokenizer.vocab_size - 1) is not None
        assert tokenizer.id_to_token(tokenizer.vocab_size) is None
        assert tokenizer.token_text(tokenizer._hf.eos_token_id) == "</s>"
        assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_digests_follow_content(folders: dict[str, Path], tmp_path: Path) -> None:
    original = Tokenizer.load(folders["bytelevel"])
    copied = tmp_path / "copy"
    shutil.copytree(folders["bytelevel"], copied)
    (copied / "model.safetensors").write_bytes(b"weights")
    assert Tokenizer.load(copied).digest == original.digest
    template = copied / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    changed = Tokenizer.load(copied)
    assert changed.digest != original.digest
    assert changed.template_digest != original.template_digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.4.0.0.json", "added_tokens.json", "tokenizer.model.v3"])
def test_the_digest_covers_every_file_that_may_be_read(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(folders["bytelevel"], tmp_path / "copy")
    (folder / name).write_text("{}")
    before = Tokenizer.load(folder)
    (folder / name).write_text("{ }")
    assert Tokenizer.load(folder).digest != Tokenizer.load(folders["bytelevel"]).digest
    with pytest.raises(ModelError, match=f"{name} changed while it was read"):
        _ = before.digest


def test_truncation_and_padding_of_the_file_are_off(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders["bytelevel"], folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(folder).encode([SENTENCES[0]])[0]) > 2


def test_missing_and_damaged_folders(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="neither a model folder nor"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="neither a model folder nor"):
        Tokenizer.load("no-such-organisation/no-such-model")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ half a file")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
