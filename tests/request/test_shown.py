"""What a prompt of Python and a notebook show of completions and parameters."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen import Completion, SamplingParams
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.completion import StateBlock
from batchgen.request.html import html_table


def test_a_completion_is_one_short_line() -> None:
    done = Completion(3, text="a\nb" * 100, finish_reason="stop", completion_tokens=12, output_ids=[1] * 100, id="x")
    assert "\n" not in repr(done)
    assert repr(done).startswith(
        "Completion(row_index=3, id='x', finish_reason='stop', completion_tokens=12, text='a\\n"
    )
    assert len(repr(done)) < 200
    failed = Completion(0, error=ErrorInfo(ErrorCode.OOM, "no memory"))
    assert repr(failed) == "Completion(row_index=0, error='oom: no memory')"
    assert repr(Completion(1, 2, 3, text="")) == "Completion(row_index=1, prompt_index=2, sample_index=3, text='')"


def test_params_show_what_was_set() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, stop="x")
    assert repr(params) == "SamplingParams(temperature=0.0, max_new_tokens=8, stop=('x',))"
    assert eval(repr(params)) == params
    assert repr(SamplingParams()) == "SamplingParams()"


def test_states_show_their_shape() -> None:
    block = StateBlock(-1, "all", 0, np.zeros((7, 5), np.float32), "bfloat16")
    assert repr(block) == "StateBlock(layer=-1, span='all', token_start=0, values=[7, 5])"


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "'\"&", "\x1b[31m\u202e", "</td></table>"])
def test_every_text_of_a_notebook_is_escaped(text: str) -> None:
    done = Completion(0, text=text, reasoning=text, tool_calls=text, id=text, output_tokens_text=[text])
    failed = Completion(0, error=ErrorInfo(ErrorCode.OOM, text))
    for html in (done._repr_html_(), failed._repr_html_(), html_table([text], [[text]], text)):
        assert text not in html
        assert "<script" not in html
        assert html.count("</table>") == 1


def test_long_values_are_cut() -> None:
    done = Completion(0, text="x" * 10_000, output_ids=np.arange(1000), output_logprobs=[0.5, 1.0])  # type: ignore[arg-type]
    html = done._repr_html_()
    assert len(html) < 4000
    assert "0, 1, 2, 3, 4, 5, 6, 7, … (1,000)" in html
    assert ">0.5, 1.0<" in html
