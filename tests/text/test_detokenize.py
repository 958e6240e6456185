from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchgen.text.tokens.detokenize import Detokenizer
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.cases import examples
from tests.text.conftest import KINDS, SENTENCES

MODES = [(True, True), (False, True), (False, False)]


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """One token per byte, for a tokenizer with byte tokens."""
    if tokenizer.byte_level_tokens is not None:
        single = {tokenizer.byte_level_tokens[token]: token for token in range(tokenizer.vocab_size - 1, -1, -1)}
        return [single[bytes([byte])] for byte in content]
    spelled = {tokenizer.id_to_token(token): token for token in range(tokenizer.vocab_size)}
    return [spelled[f"<0x{byte:02X}>"] for byte in content]


@st.composite
def id_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Any ids, a few past the vocabulary, mixed with real text and byte tokens, complete and incomplete."""
    text = st.one_of(st.text(max_size=12), st.sampled_from(SENTENCES)).map(lambda t: tokenizer.encode_plain([t])[0])
    kinds = [st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12), text]
    if tokenizer.byte_level_tokens is not None or tokenizer.byte_fallback:
        whole = st.text(max_size=4).map(str.encode)
        kinds.append(st.one_of(st.binary(max_size=6), whole).map(lambda b: byte_ids(tokenizer, b)))
    parts = draw(st.lists(st.one_of(kinds), max_size=5))
    return [token for part in parts for token in part]


@pytest.mark.field("skip_special_tokens", "spaces_between_special_tokens")
@pytest.mark.parametrize("kind", KINDS)
@examples(120)
@given(data=st.data(), mode=st.sampled_from(MODES))
def test_joined_pieces_are_the_decoded_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, mode: tuple[bool, bool]
) -> None:
    tokenizer, (skip, spaces) = tokenizers[kind], mode
    ids = data.draw(id_lists(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip, spaces)
    text = ""
    for count, token in enumerate(ids, 1):
        text += detokenizer.append(token)
        assert text + detokenizer.tail == tokenizer.decode_output(ids[:count], skip, spaces)
    assert text + detokenizer.flush() == tokenizer.decode_output(ids, skip, spaces)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_prompt_and_output_are_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """For every split: the leading space of the output's first word belongs to the output, as in vLLM and SGLang."""
    tokenizer = tokenizers[kind]
    for ids in tokenizer.encode_plain([*SENTENCES, "Hello world", "a  b"]):
        for at in range(1, len(ids) + 1):
            prompt, output = ids[:at], ids[at:]
            if "\ufffd" not in tokenizer.decode(prompt) + tokenizer.decode(output):
                assert tokenizer.decode(prompt) + tokenizer.decode_output(output) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@example("<|im_end|>")
@examples(60)
def test_decode_equals_the_library_without_clean_up(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode_plain([text])[0]
    hf = tokenizer._hf
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == hf.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@pytest.mark.field("spaces_between_special_tokens", "skip_special_tokens")
def test_special_tokens_without_spaces(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["wordpiece"]
    start, end = (tokenizer._hf.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    fox = tokenizer.encode_plain(["fox"])[0]
    ids = [start, *fox, end, start]
    assert tokenizer.decode(ids, False, True) == "<|im_start|> fox <|im_end|> <|im_start|>"
    assert tokenizer.decode(ids, False, False) == "<|im_start|>fox<|im_end|><|im_start|>"
    assert tokenizer.decode(ids, True, False) == "fox"


@pytest.mark.parametrize("kind", KINDS)
def test_detokenization_cost_per_token_is_constant(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    line = tokenizer.encode_plain([" ".join(SENTENCES)])[0]

    def seconds(ids: list[int]) -> float:
        detokenizer = Detokenizer(tokenizer)
        start = time.thread_time()
        for token in ids:
            detokenizer.append(token)
            _ = detokenizer.tail
        return time.thread_time() - start

    short, long = min(seconds(line) for _ in range(3)), seconds(line * 40)
    assert long < 40 * 8 * short, "decoding the whole text each time would take 40 times as long per token"
