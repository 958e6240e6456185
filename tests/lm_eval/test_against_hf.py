"""Scores and samples of the harness with batchgen against those with its own model `hf`, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", minversion="0.4.13")
pytest.importorskip("accelerate")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from batchgen.lm_eval.model import BatchgenLM, EvaluationError
from tests.e2e.model import SENTENCES, TEMPLATE, save_model
from tests.lm_eval.tasks import NAMES, write_tasks
from tests.models.adapters import KINDS, save_adapter

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONTEXT = 128
"""Tokens of the model: fewer than those of the longest texts, and of some prompts with examples."""
_CASES = [(shots, chat) for shots in (0, 3) for chat in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm_eval")
    save_model(folder / "model", CONTEXT)
    return write_tasks(folder)


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def both(folder: Path, **options: Any) -> tuple[BatchgenLM, HFLM]:
    shared = {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu", **options}
    return BatchgenLM(**shared), HFLM(**shared, batch_size=1)


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[BatchgenLM, HFLM]:
    return both(folder)


def evaluated(model: Any, folder: Path, **options: Any) -> Any:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=list(NAMES), task_manager=manager, bootstrap_iters=0, **options)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Equal answers to equal requests, and so equal scores."""
    for name in NAMES:
        for own, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert own["arguments"] == other["arguments"], "the prompts"
            for answers, expected in zip(own["resps"], other["resps"], strict=True):
                for answer, wanted in zip(answers, expected, strict=True):
                    if name == "choices":
                        assert answer[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-4)
                        assert answer[1] == wanted[1]
                    elif name == "rolling":
                        assert answer == pytest.approx(wanted, rel=1e-5, abs=1e-3)
                    else:
                        assert answer == wanted
        found, expected = ours["results"][name], theirs["results"][name]
        assert found.keys() == expected.keys()
        for metric, value in found.items():
            assert value == (
                pytest.approx(expected[metric], rel=1e-4) if isinstance(value, float) else expected[metric]
            )


@pytest.mark.parametrize(("shots", "chat"), _CASES)
def test_scores_equal_those_of_hf(shots: int, chat: bool, folder: Path, models: tuple[BatchgenLM, HFLM]) -> None:
    options = {"num_fewshot": shots, "apply_chat_template": chat, "fewshot_as_multiturn": chat}
    options |= {"system_instruction": "Be brief."} if chat else {}
    assert_equal(*(evaluated(model, folder, **options) for model in models))


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


LONG = " ".join(SENTENCES * 3)
_WORDS = LONG.split()
PAIRS = [
    ("The quick", " brown fox"),
    ("The quick ", "brown fox"),
    ("The qui", "ck brown"),
    ("", "The quick"),
    ("", "<s>The quick"),
    ("<s>The quick", " brown"),
    ("  ", "x"),
    (LONG, " a"),
    (LONG, LONG[:250]),
    *((f"Sorting {n}", " numbers") for n in range(3)),
]
"""Contexts with continuations: spaces, a border inside a token, no context, BOS in the text, more than fits."""


@pytest.mark.parametrize(
    "options",
    [{}, {"add_bos_token": False}, {"add_bos_token": True, "max_length": 40}, {"prefix_token_id": 7}],
    ids=str,
)
def test_every_kind_of_text_is_scored_as_by_hf(options: dict[str, Any], folder: Path) -> None:
    ours, theirs = both(folder, **options)
    pairs = [
        (context, text)
        for context, text in PAIRS
        if len(ours.tok_encode(text)) < ours.max_length and (not context or ours.tok_encode(context.rstrip()))
    ]
    begins = [" ".join(_WORDS[: n + 1]) for n in range(30)]
    likely = theirs.generate_until(requests("generate_until", [(begin, {"max_gen_toks": 1}) for begin in begins]))
    greedy = [(begin, text) for begin, text in zip(begins, likely, strict=True) if text.strip()]
    asked = requests("loglikelihood", [*pairs, *greedy])
    scores = ours.loglikelihood(asked)
    for own, wanted, request in zip(scores, theirs.loglikelihood(asked), asked, strict=True):
        assert own[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-4), request.args
        assert own[1] == wanted[1], request.args
    assert 0 < sum(is_greedy for _, is_greedy in scores) < len(scores)
    pages = requests("loglikelihood_rolling", [(text,) for text in ("", "a", LONG, LONG[:200], "<s>The quick")])
    for own, wanted in zip(ours.loglikelihood_rolling(pages), theirs.loglikelihood_rolling(pages), strict=True):
        assert own == pytest.approx(wanted, rel=1e-5, abs=1e-3)
    assert len(ours.tok_encode(LONG)) > 2 * ours.max_length, "several windows"


GENERATIONS: list[dict[str, Any]] = [
    {"until": ["\n\n"]},
    {"until": "a", "max_gen_toks": 9},
    {"until": [], "max_new_tokens": 12},
    {"until": [chr(code) for code in range(48, 48 + 40)], "max_gen_toks": 30},
    {"until": ["</s>", "<|im_end|>"], "max_gen_toks": 40, "do_sample": False, "temperature": 0.7},
    {"until": ["."], "max_gen_toks": 20, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("options", [{}, {"think_end_token": "e"}, {"think_end_token": 7}], ids=str)
def test_every_kind_of_generation_equals_that_of_hf(options: dict[str, Any], folder: Path) -> None:
    ours, theirs = both(folder, max_length=100, **options)
    contexts = ["The quick", "<s>Hello", LONG, *SENTENCES]
    given = [(context, {"max_gen_toks": 32, **kwargs}) for context in contexts for kwargs in GENERATIONS]
    asked = requests("generate_until", given)
    for own, wanted, request in zip(ours.generate_until(asked), theirs.generate_until(asked), asked, strict=True):
        assert own == wanted, request.args


def test_templates_without_a_system_message(folder: Path, tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    save_model(tmp_path / "model", CONTEXT, template=template)
    ours, theirs = both(tmp_path)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ends = [*talk, {"role": "assistant", "content": "He"}]
    for messages, prompt in ((talk, True), (talk[1:], True), (ends, False)):
        assert ours.apply_chat_template(messages, prompt) == theirs.apply_chat_template(messages, prompt)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name


def test_adapters(folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(folder / "model", tmp_path / "adapter", **KINDS["all"])
    pages = requests("loglikelihood_rolling", [(LONG,), (LONG[:90],)])
    ours, theirs = (model.loglikelihood_rolling(pages) for model in both(folder, peft=str(adapter)))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-3)
    plain = BatchgenLM(str(folder / "model"), dtype="float32").loglikelihood_rolling(pages)
    assert plain != pytest.approx(ours, rel=1e-3), "the adapter changes them"


def test_a_model_whose_positions_are_learned(tmp_path: Path) -> None:
    """It has none behind its context, up to which the windows of the harness go."""
    save_model(tmp_path / "model", CONTEXT, model_type="gpt2", n_positions=CONTEXT)
    pages = requests("loglikelihood_rolling", [(LONG,), (LONG[:90],)])
    ours, theirs = (model.loglikelihood_rolling(pages) for model in both(tmp_path))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-3)


def test_requests_that_cannot_be_computed_are_one_error(folder: Path) -> None:
    ours = BatchgenLM(str(folder / "model"), dtype="float32", add_bos_token=False)
    with pytest.raises(EvaluationError, match="request 1 has 0 tokens of context"):
        ours.loglikelihood(requests("loglikelihood", [("a", "b"), ("  ", "b")]))
    with pytest.raises(EvaluationError, match=r"request 0 has 1 tokens of context and \d{3} of continuation"):
        ours.loglikelihood(requests("loglikelihood", [("a", LONG)]))
    for given, problem in (
        ({"num_beams": 4}, "`num_beams` is not an argument of generation"),
        ({"n": 2}, "`n` is not an argument"),
        ({"max_gen_toks": CONTEXT}, f"`max_gen_toks` is {CONTEXT}, and the context is {CONTEXT}"),
        ({"top_p": 3, "do_sample": True}, "request 0: `top_p` must be"),
        ({"regex": "("}, "request 0: "),
    ):
        with pytest.raises(EvaluationError, match=problem):
            ours.generate_until(requests("generate_until", [("Hello", {"max_gen_toks": 3, **given})]))


def test_answers_are_kept_as_they_come(folder: Path, models: tuple[BatchgenLM, HFLM], tmp_path: Path) -> None:
    """With `--use_cache`: an evaluation that stops has lost nothing."""
    ours = models[0]
    options = {"use_cache": str(tmp_path / "cache"), "num_fewshot": 0}
    first = evaluated(ours, folder, **options)
    asked: list[int] = []
    run = ours._run

    def counted(rows: Any, what: str, quiet: bool) -> Any:
        asked.append(len(rows))
        return run(rows, what, quiet)

    ours._run = counted  # type: ignore[method-assign]
    try:
        again = evaluated(ours, folder, **options)
    finally:
        del ours._run
    assert (again["results"], asked) == (first["results"], [])


def test_samples_differ_and_can_be_constrained(models: tuple[BatchgenLM, HFLM]) -> None:
    given = {"max_gen_toks": 20, "do_sample": True, "temperature": 1.0, "until": []}
    (asked,) = requests("generate_until", [("The quick", given)])
    texts = models[0].generate_until([asked] * 3)
    assert len(set(texts)) == 3
    assert texts == models[0].generate_until([asked] * 3)
    (digits,) = models[0].generate_until(
        requests("generate_until", [("The quick", {"regex": "[0-9]{4}", "max_gen_toks": 9})])
    )
    assert len(digits) == 4
    assert digits.isdigit()
