"""Seeds: `--seed` changes the sampled rows without one, and a recorded seed reproduces its samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchgen.engine.engine import Engine
from tests.e2e.engines import generate
from tests.e2e.rows import prompts


@pytest.mark.field("seed", "temperature")
def test_another_run_seed_changes_rows_without_a_seed(engine: Engine) -> None:
    """Every other row has a `seed`."""
    drawn = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    rows = [
        {"id": str(i), "text": text, **drawn, **({"seed": i} if i % 2 else {})} for i, text in enumerate(prompts(40, 3))
    ]
    other = Engine.from_parts(replace(engine.config, seed=1), engine.model, engine.tokenizer)
    before, after = ([list(c.output_ids or ()) for c in generate(each, rows)] for each in (engine, other))
    assert before[1::2] == after[1::2], "rows with a `seed`"
    assert all(one != another for one, another in zip(before[::2], after[::2], strict=True))


@pytest.mark.field("n", "seed", "id")
def test_samples_differ_and_the_recorded_seed_reproduces_them(engine: Engine) -> None:
    row = {"id": "x", "text": "The quick", "temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_new_tokens": 12}
    samples = list(engine.generate([row | {"n": 6}]))
    assert [c.sample_index for c in samples] == list(range(6))
    assert len({tuple(c.output_ids or ()) for c in samples}) == 6
    replayed = list(engine.generate([row | {"id": "y", "n": 6, "seed": samples[0].seed}]))
    assert [list(c.output_ids or ()) for c in replayed] == [list(c.output_ids or ()) for c in samples]
