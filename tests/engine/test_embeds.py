"""Prompts given as embeddings: embeddings of token ids equal the ids, other embeddings equal transformers."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from batchgen.engine.engine import Engine
from batchgen.engine.row_reader import RowReader
from batchgen.errors import UsageError
from batchgen.request.completion import Completion
from batchgen.request.rows.raw_row import RawRow
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.request_table import RequestTable
from batchgen.text.encode import Encoder
from tests.engine.reference import eager_greedy, eager_model, save_with_words, shared_prefix_prompts
from tests.models.adapters import KINDS, merge_adapter, save_adapter
from tests.models.tiny import VOCAB

NEW_TOKENS = 8
HIDDEN = 64
COMMON = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "return_logprob": True}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words("llama", tmp_path_factory.mktemp("embeds") / "llama")


def embedding(folder: Path) -> torch.Tensor:
    """[V, H] output of the library's embedding layer, including scales."""
    with torch.no_grad():
        found: torch.Tensor = eager_model(folder).get_input_embeddings()(torch.arange(VOCAB))
    return found


def same(a: Completion, b: Completion) -> None:
    assert a.error is None, a.error
    assert b.error is None, b.error
    assert list(a.output_ids or []) == list(b.output_ids or [])
    np.testing.assert_allclose(a.output_logprobs, b.output_logprobs, atol=1e-4, rtol=0)


@pytest.mark.field("input_embeds")
@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [("llama", "native"), ("gemma3_text", "transformers"), ("gpt2", "transformers"), ("granite", "transformers")],
)
def test_embeddings_of_ids_equal_the_ids(tmp_path: Path, model_type: str, implementation: str) -> None:
    """One batch with rows of ids and rows of their embeddings, in every form that a row may have."""
    folder = save_with_words(model_type, tmp_path)
    table = embedding(folder)
    prompts = shared_prefix_prompts(24, VOCAB, seed=5)
    forms = [lambda e: e.tolist(), lambda e: e.numpy(), lambda e: e, lambda e: e.double().numpy()]
    rows = [{"input_ids": p, **COMMON} for p in prompts]
    rows += [{"input_embeds": forms[i % 4](table[p]), **COMMON} for i, p in enumerate(prompts)]
    engine = Engine(str(folder), model_impl=implementation, dtype="float32", page_size=4)
    done = list(engine.generate(rows, ordered=True))
    assert [c.row_index for c in done] == list(range(48))
    for prompt, by_ids, by_embeds in zip(prompts, done[:24], done[24:], strict=True):
        same(by_embeds, by_ids)
        assert by_embeds.prompt_ids is None
        assert by_embeds.prompt_tokens == len(prompt)
    expected = eager_greedy(folder, prompts, NEW_TOKENS)
    for i, result in enumerate(done[24:]):
        expected.assert_same(i, result)


def noise(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.3, (int(rng.integers(1, 40)), HIDDEN)).astype(np.float32) for _ in range(count)]


@torch.inference_mode()
def eager(folder: Path, values: np.ndarray) -> tuple[list[int], list[float]]:
    """Ids and logprobs of transformers' `generate(inputs_embeds=...)`."""
    model = eager_model(folder)
    given = torch.from_numpy(values)[None]
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    mask = torch.ones(given.shape[:2], dtype=torch.int64)
    out = model.generate(inputs_embeds=given, attention_mask=mask, output_logits=True, **how)
    steps = torch.stack(out.logits, dim=1)[0].log_softmax(-1)
    ids = out.sequences[0].tolist()
    return ids, [float(step[token]) for step, token in zip(steps, ids, strict=True)]


@pytest.mark.field("input_embeds")
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_embeddings_that_no_id_has(llama: Path, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against `generate(inputs_embeds=...)`: in a batch, alone, in small chunks and in a pool with preemptions."""
    prompts = noise(24)
    expected = [eager(llama, values) for values in prompts]
    rows = [{"input_embeds": values, **COMMON} for values in prompts]
    # A duplicate of the first prompt, and a row of ids.
    rows += [{"input_embeds": prompts[0], **COMMON}, {"input_ids": [5, 6, 7], **COMMON}]

    def check(results: list[Completion], members: list[int]) -> None:
        for result, i in zip(results, members, strict=True):
            assert result.error is None
            assert list(result.output_ids or []) == expected[i][0], i
            np.testing.assert_allclose(result.output_logprobs, expected[i][1], atol=1e-4, rtol=0)

    options: dict[str, Any] = {"model_impl": implementation, "dtype": "float32", "page_size": 4}
    engine = Engine(str(llama), **options)
    done = list(engine.generate(rows, ordered=True))
    check(done[:25], [*range(24), 0])
    assert done[24].dedup_of == 0
    for i in range(3):
        check(list(engine.generate([rows[i]])), [i])
    small = Engine(str(llama), **options, max_tokens_per_step=24, max_num_seqs=16)
    small.order, small.admission = "tree", "free"  # rows are to be preempted
    longest = max(map(len, prompts)) + NEW_TOKENS
    monkeypatch.setattr("batchgen.engine.engine.pool_pages", lambda *_: 2 * longest // 4 + 4)
    check(list(small.generate(rows, ordered=True))[:25], [*range(24), 0])
    assert small.last_run.scheduler.stats.preemptions > 0


def test_several_prompts_in_one_row(llama: Path) -> None:
    prompts = noise(3, seed=4)
    engine = Engine(str(llama), dtype="float32")
    alone = list(engine.generate([{"input_embeds": v, **COMMON} for v in prompts], ordered=True))
    for several in ([v.tolist() for v in prompts], prompts):
        together = list(engine.generate([{"input_embeds": several, **COMMON}], ordered=True))
        assert [c.prompt_index for c in together] == [0, 1, 2]
        for a, b in zip(together, alone, strict=True):
            same(a, b)


@pytest.mark.field("input_embeds", "completion", "completions")
def test_texts_are_scored_after_embeddings(llama: Path) -> None:
    """As after the ids of the embeddings; some texts start with 0, the placeholder id of embeddings."""
    table = embedding(llama)
    prompts = shared_prefix_prompts(6, VOCAB, seed=8)
    texts = [[0, 0, 9], [5, 6], "w3 w4 w5", [0, 0]]
    rows = [{"input_ids": p, "completions": texts} for p in prompts]
    rows += [{"input_embeds": table[p], "completions": texts} for p in prompts]
    engine = Engine(str(llama), dtype="float32", page_size=4, max_tokens_per_step=16, max_num_seqs=8)
    done = list(engine.generate(rows, ordered=True))
    for by_ids, by_embeds in zip(done[:6], done[6:], strict=True):
        assert by_embeds.error is None, by_embeds.error
        np.testing.assert_allclose(by_embeds.score_logprobs, by_ids.score_logprobs, atol=1e-4, rtol=0)
        assert by_embeds.prompt_ids is None


@pytest.mark.field("input_embeds")
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_embeddings(llama: Path, side: Literal["left", "right"]) -> None:
    """Truncated embeddings equal a row with only the remaining ones."""
    values = noise(1, seed=2)[0]
    values = np.concatenate([values] * (-(-40 // len(values))))[:40]
    engine = Engine(str(llama), dtype="float32")
    (expected,) = engine.generate([{"input_embeds": values[-14:] if side == "left" else values[:14], **COMMON}])
    table = RequestTable(EmbedsStore(HIDDEN))
    encoder = Encoder(engine.tokenizer, VOCAB, 14 + NEW_TOKENS, side)
    (processed,) = RowReader(table, encoder, RowDefaults()).read([RawRow(0, value={"input_embeds": values, **COMMON})])
    assert processed.error is None
    ((result,),) = engine.start(table).loop.run()
    same(result, expected)


@pytest.mark.field("input_embeds", "lora_path")
def test_embeddings_through_an_adapter(llama: Path, tmp_path: Path) -> None:
    """The same embeddings with and without an adapter do not share a prefix."""
    adapter = save_adapter(llama, tmp_path / "a", **KINDS["all"])
    values = noise(1, seed=9)[0]
    expected = [eager(llama, values), eager(merge_adapter(llama, adapter, tmp_path / "merged"), values)]
    assert expected[0][0] != expected[1][0]
    engine = Engine(str(llama), dtype="float32", lora={"a": str(adapter)})
    rows = [{"input_embeds": values, "lora_path": name, **COMMON} for name in (None, "a")]
    for result, (ids, logprobs) in zip(engine.generate(rows, ordered=True), expected, strict=True):
        assert list(result.output_ids or []) == ids
        np.testing.assert_allclose(result.output_logprobs, logprobs, atol=1e-4, rtol=0)


@pytest.mark.field("input_embeds")
def test_tensors_of_files(llama: Path, tmp_path: Path) -> None:
    values = noise(2, seed=6)
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    tensors = {"a": torch.from_numpy(values[0]), "b": torch.from_numpy(values[1]), "x:y": torch.zeros(2, HIDDEN)}
    save_file(tensors, root / "two.safetensors")
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("f64", torch.float64)):
        save_file({"only": torch.from_numpy(values[0]).to(dtype)}, root / "deep" / f"{name}.safetensors")
    bad = {"ids": torch.zeros(3, HIDDEN, dtype=torch.int64), "flat": torch.zeros(HIDDEN), "wide": torch.zeros(3, 65)}
    bad |= {"none": torch.zeros(0, HIDDEN), "nan": torch.full((2, HIDDEN), torch.nan)}
    save_file(bad, root / "bad.safetensors")
    engine = Engine(str(llama), dtype="float32", media_root=str(root))

    def half(dtype: torch.dtype) -> np.ndarray:
        return torch.from_numpy(values[0]).to(dtype).float().numpy()

    named = {
        "two.safetensors:a": values[0],
        "two.safetensors:b": values[1],
        "./two.safetensors:b": values[1],
        "two.safetensors:x:y": np.zeros((2, HIDDEN), np.float32),
        "deep/f16.safetensors": half(torch.float16),
        "deep/bf16.safetensors:only": half(torch.bfloat16),
        "deep/f64.safetensors:only": values[0],
    }
    by_name = engine.generate([{"input_embeds": name, **COMMON} for name in named], ordered=True)
    by_value = engine.generate([{"input_embeds": v, **COMMON} for v in named.values()], ordered=True)
    for a, b in zip(list(by_name), list(by_value), strict=True):
        same(a, b)
    wrong = dict.fromkeys(("two.safetensors", "two.safetensors:c", "none.safetensors:a"), "media_error")
    wrong |= dict.fromkeys(("two.safetensors:", "two.bin:a"), "invalid_field")
    wrong |= {f"bad.safetensors:{name}": "invalid_field" for name in ("ids", "flat", "wide", "nan")}
    wrong["bad.safetensors:none"] = "empty_prompt"
    results = engine.generate([{"input_embeds": name} for name in wrong], ordered=True)
    assert [(c.error.code, c.error.param) for c in results if c.error] == [(c, "input_embeds") for c in wrong.values()]


def test_invalid_embeddings_are_errors_of_their_field(llama: Path) -> None:
    one = {"input_embeds": [[0.5] * HIDDEN]}
    scored = {"return_logprob": True, "logprob_start_len": 0}
    rows: list[tuple[Any, str, str | None]] = [
        ({"input_embeds": [[0.5] * 63]}, "invalid_field", "input_embeds"),
        ({"input_embeds": []}, "empty_prompt", "input_embeds"),
        ({"input_embeds": np.zeros((0, HIDDEN))}, "empty_prompt", "input_embeds"),
        ({"input_embeds": np.zeros((2, HIDDEN), bool)}, "invalid_field", "input_embeds"),
        ({"input_embeds": np.full((2, HIDDEN), np.inf)}, "invalid_field", "input_embeds"),
        ({"input_embeds": "a.safetensors:b"}, "media_error", "input_embeds"),
        ({"input_embeds": np.zeros((600, HIDDEN))}, "context_length_exceeded", None),
        (one | {"echo": True}, "unsupported_field", "echo"),
        (one | {"suffix": "a"}, "unsupported_field", "suffix"),
        (one | scored, "unsupported_field", "logprob_start_len"),
    ]
    results = Engine(str(llama), dtype="float32").generate([row for row, _, _ in rows], ordered=True)
    for result, (_, code, param) in zip(results, rows, strict=True):
        assert (result.error.code, result.error.param) == (code, param)
    with pytest.raises(UsageError, match=r"`media_root` .* is not a folder"):
        Engine(str(llama), media_root=str(llama / "config.json"))


def test_a_model_that_needs_ids_rejects_embeddings(tmp_path: Path) -> None:
    """Gemma 4 looks its ids up in a second embedding table."""
    engine = Engine(str(save_with_words("gemma4_text", tmp_path)), dtype="float32")
    hidden = engine.model.spec.hidden_size
    rows = [{"input_embeds": np.full((3, hidden), 0.1)}, {"input_ids": [5, 6], "max_new_tokens": 2}]
    scored = {"input_embeds": np.full((3, hidden), 0.1), "completions": [[5], [6, 7], [8]]}
    first, second, third = engine.generate([*rows, scored], ordered=True)  # several texts of a prompt are one result
    for refused in (first, third):
        assert (refused.error.code, refused.error.param) == ("unsupported_field", "input_embeds")
    assert second.error is None


def test_one_row_of_embeddings_is_in_memory_at_a_time(llama: Path) -> None:
    """60 MB of embeddings are read with a peak of a few rows."""
    engine = Engine(str(llama), dtype="float32")
    table = RequestTable(EmbedsStore(HIDDEN))
    row_reader = RowReader(table, Encoder(engine.tokenizer, VOCAB, 8192), RowDefaults())
    rng = np.random.default_rng(0)
    rows = (RawRow(i, value={"input_embeds": rng.random((4096, HIDDEN), np.float32)}) for i in range(60))
    size = 4096 * HIDDEN * 4
    tracemalloc.start()
    try:
        assert all(processed.error is None for processed in row_reader.read(rows))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ids = 60 * 4096 * 8  # placeholder ids, until they are spooled
    assert peak < 8 * size + 3 * ids
    assert len(table.embeds) == 60 * 4096
