"""Fill-in-the-middle prompts of each family, checked against layouts written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.request.fields.params import SamplingParams
from batchgen.text.encode import Encoder
from batchgen.text.fit import Truncate, find_fim
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import examples
from tests.text.conftest import encode, save_tokenizer

FAMILIES: dict[str, tuple[str, str, str]] = {
    "qwen": (
        "bytelevel", "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>",
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    "codegemma": (
        "bytelevel", "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|file_separator|>",
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    "starcoder": (
        "bytelevel", "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <file_sep> other",
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    ),
    "santacoder": (
        "bytelevel", "<fim-prefix> <fim-middle> <fim-suffix> <fim-pad>",
        "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    ),
    "deepseek": (
        "bytelevel", "<｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜>",
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    ),
    "codellama": ("bytefallback", "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>", "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>"),
    "codestral": ("bytefallback", "[PREFIX] [SUFFIX] [MIDDLE]", "[SUFFIX]{suffix}[PREFIX]{prefix}"),
}  # fmt: skip
"""Family -> (kind of tokenizer, special tokens, all but `other` end the middle; prompt layout)."""


def family_tokenizer(folder: Path, name: str, *, bos: bool = True) -> Tokenizer:
    kind, specials, _ = FAMILIES[name]
    tokenizer = Tokenizer.load(save_tokenizer(folder, kind, bos=bos))
    tokenizer._rust.add_special_tokens(specials.split())
    return Tokenizer(tokenizer._hf, folder)


def expected_prompt(tokenizer: Tokenizer, name: str, before: list[int], after: list[int]) -> list[int]:
    """Token ids of a prompt in the family's layout."""
    found = []
    for part in FAMILIES[name][2].replace("{", "\0{").replace("}", "}\0").split("\0"):
        if part in ("{prefix}", "{suffix}"):
            found += before if part == "{prefix}" else after
        elif part:
            token = tokenizer.token_to_id(part)
            assert token is not None
            found.append(token)
    return found


@pytest.mark.field("suffix", "text", "input_ids")
@pytest.mark.parametrize(("name", "bos"), [(name, at % 2 == 0) for at, name in enumerate(FAMILIES)])
def test_fim_prompt_of_each_family(tmp_path: Path, name: str, bos: bool) -> None:
    tokenizer = family_tokenizer(tmp_path, name, bos=bos)
    encoder = Encoder(tokenizer, tokenizer.vocab_size + 99, 256)
    before = tokenizer.encode_plain(["def add(a, b):\n    return"])[0]
    # The suffix has no leading space even if the tokenizer puts one in front of texts.
    (plain, space) = tokenizer.encode_plain(["x", "xprint(add(1, 2))"])
    assert space[: len(plain)] == plain
    after = space[len(plain) :]
    expected = tokenizer.prefix_ids + expected_prompt(tokenizer, name, before, after)
    row = {"text": "def add(a, b):\n    return", "suffix": "print(add(1, 2))", "stop_token_ids": [3]}
    (found,) = encode(encoder, row)
    assert found.ids == expected
    ends = {3, *(tokenizer.token_to_id(token) for token in FAMILIES[name][1].split() if token != "other")}
    assert found.params.suffix is None
    assert set(found.params.stop_token_ids) == ends
    (given,) = encode(encoder, {**row, "text": None, "input_ids": tokenizer.prefix_ids + before})
    assert given.ids == expected
    (empty,) = encode(encoder, {**row, "text": ""})
    assert empty.ids == tokenizer.prefix_ids + expected_prompt(tokenizer, name, [], after)


@pytest.mark.field("suffix", "ignore_eos")
def test_ignore_eos_applies_to_fim_end_tokens_that_are_eos(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, "starcoder")
    end, other = (tokenizer.token_to_id(name) for name in ("<file_sep>", "<fim_pad>"))
    assert end is not None
    tokenizer.eos_ids |= {end}
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 256)
    row = {"text": "a", "suffix": "b"}
    (plain,), (ignoring,) = encode(encoder, row), encode(encoder, {**row, "ignore_eos": True})
    assert {end, other} <= set(plain.params.stop_token_ids)
    assert set(ignoring.params.stop_token_ids) == set(plain.params.stop_token_ids) - {end}
    (named,) = encode(encoder, {**row, "ignore_eos": True, "stop_token_ids": [end]})
    assert set(named.params.stop_token_ids) == set(plain.params.stop_token_ids), "ids named by the row still stop"


@pytest.mark.field("suffix", "messages")
def test_conversations_and_tokenizers_without_fim_keep_the_suffix(tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, "qwen")
    encoder = Encoder(tokenizer, tokenizer.vocab_size, 256)
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    (plain,), (kept,) = encode(encoder, chat), encode(encoder, {**chat, "suffix": "end"})
    assert (kept.ids, kept.params.suffix) == (plain.ids, "end")
    (none,) = encode(encoder, {"text": "Hi", "suffix": ""})
    assert (none.params, none.ids) == (SamplingParams(), tokenizer.encode(["Hi"])[0])
    other = Tokenizer.load(save_tokenizer(tmp_path / "other", "bytelevel"))
    assert find_fim(other, other.vocab_size) is None
    (appended,) = encode(Encoder(other, other.vocab_size, 256), {"text": "Hi", "suffix": "end"})
    assert (appended.ids, appended.params.suffix) == (other.encode(["Hi"])[0], "end")
    assert find_fim(tokenizer, tokenizer.vocab_size - 6) is None, "special tokens without an embedding in the model"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.mark.field("suffix")
@examples(60)
@given(
    before=st.integers(0, 40), after=st.integers(1, 40), context=st.integers(12, 60), wanted=st.integers(1, 30),
    side=st.sampled_from(["left", "right"]),
)  # fmt: skip
def test_fim_truncation_keeps_what_is_next_to_the_middle(
    qwen: Tokenizer, before: int, after: int, context: int, wanted: int, side: Truncate
) -> None:
    (a,), (b,) = qwen.encode_plain(["a"])[0], qwen.encode_plain(["b"])[0]
    encoder = Encoder(qwen, qwen.vocab_size, context, side)
    row = {"input_ids": [*qwen.prefix_ids, *[a] * before], "suffix": "b" * after, "max_new_tokens": wanted}
    (found,) = encode(encoder, row)
    total = 4 + before + after
    if total < context:
        left, right = before, after
    else:
        room = context - min(wanted, context // 2) - 4
        left = max(0, min(before, room - after)) if side == "left" else min(before, room)
        right = min(after, room) if side == "left" else max(0, min(after, room - before))
        assert left + right == room
    after_ids = qwen.encode_plain(["b" * after])[0]
    assert len(after_ids) == after
    assert found.ids == qwen.prefix_ids + expected_prompt(qwen, "qwen", [a] * left, [b] * right)
