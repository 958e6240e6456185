"""The demonstration tasks: disjoint splits, determinism, correct answers, and the committed sample rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.demo.questions import HELDOUT_ONE_IN, Content, split_of
from batchgen.demo.tasks import TASKS, WEIGHTS, Example, draw, is_correct, main, rows

SAMPLE = Path(__file__).parents[2] / "sample_data" / "prompts.jsonl"


def examples(task: str, count: int = 300) -> list[Example]:
    return [draw("heldout", 3, index, task) for index in range(count)]


@pytest.mark.parametrize("task", TASKS)
def test_splits_have_no_common_content(task: str) -> None:
    train = {draw("train", 0, index, task).content.key for index in range(2000)}
    heldout = {draw("heldout", 0, index, task).content.key for index in range(500)}
    assert not train & heldout
    assert all(split_of(key) == "train" for key in train)
    assert all(split_of(key) == "heldout" for key in heldout)


def test_one_key_in_sixteen_is_held_out() -> None:
    held = sum(split_of(f"key {number}") == "heldout" for number in range(16_000))
    assert held / 16_000 == pytest.approx(1 / HELDOUT_ONE_IN, rel=0.1)


def test_held_out_sums_are_not_in_training_prompts() -> None:
    for index in range(3000):
        content = draw("train", 0, index, "few_shot").content
        for line in content.raw.splitlines():
            left = line.removeprefix("Input: ").removeprefix("in: ").split(" + ")
            if len(left) == 2:
                a, b = int(left[0]), int("".join(c for c in left[1].split()[0] if c.isdigit()))
                assert split_of(f"add {min(a, b)} {max(a, b)}") == "train", line


@pytest.mark.parametrize("task", TASKS)
def test_examples_depend_on_the_arguments_only(task: str) -> None:
    drawn = [draw("train", 5, index, task) for index in range(40)]
    assert drawn == [draw("train", 5, index, task) for index in range(40)]
    assert drawn != [draw("train", 6, index, task) for index in range(40)]
    assert len({example.content.key for example in drawn}) > 30


def test_every_task_has_a_weight() -> None:
    assert set(TASKS) == set(WEIGHTS)
    assert all(weight > 0 for weight in WEIGHTS.values())


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_stripped_and_not_empty(task: str) -> None:
    for example in examples(task):
        assert example.content.answer
        assert example.content.answer == example.content.answer.strip()
        assert not example.content.raw.endswith(" ")
        assert "<|" not in example.content.prompt


def test_sums_and_differences_and_their_steps_are_correct() -> None:
    for example in examples("arithmetic"):
        a, sign, b, _ = example.content.raw.split()
        work, result = example.content.answer.split(": ")
        assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b)}[sign]
        for step in work.split(", "):
            left, right = step.split("=")
            first, *rest = [int(term) for term in left.split(sign)]
            assert int(right) == (first + sum(rest) if sign == "+" else first - sum(rest))


def test_sorted_lists_are_sorted_permutations() -> None:
    for example in examples("sort"):
        items = example.content.answer.split(", ")
        if items[0].isdigit():
            numbers = [int(item) for item in items]
            assert numbers in (sorted(numbers), sorted(numbers, reverse=True))
        else:
            assert items == sorted(items)
        assert all(item in example.content.prompt for item in items)


def test_prompts_contain_the_text_to_copy() -> None:
    assert all(example.content.answer in example.content.prompt for example in examples("copy"))


def test_prompts_contain_the_extracted_fields() -> None:
    for example in examples("extract"):
        fields = json.loads(example.content.answer)
        assert isinstance(fields, dict)
        assert all(str(value) in example.content.prompt for value in fields.values())
        assert all(field in example.content.prompt for field in fields)


def test_prompts_contain_the_label() -> None:
    assert all(example.content.answer in example.content.prompt for example in examples("classify"))


def test_passages_contain_the_answer() -> None:
    for example in examples("question"):
        passage, asked, _ = example.content.raw.split("\n")
        holding = [sentence for sentence in passage.split(".") if example.content.answer in sentence]
        assert holding, asked


def test_the_check_ignores_surrounding_white_space_only() -> None:
    example = Example("copy", Content(prompt="p", raw="r", answer="a b", key="k"), chat=True, system=None)
    assert is_correct(example, " a b\n")
    assert not is_correct(example, "a  b")
    assert not is_correct(example, "a b.")
    assert not is_correct(example, "")


def test_a_system_message_comes_first() -> None:
    example = Example("copy", Content(prompt="p", raw="r", answer="a", key="k"), chat=True, system="Be brief.")
    assert example.messages() == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}]


def test_rows_mix_tasks_and_input_formats() -> None:
    made = list(rows("heldout", 200))
    assert {line["task"] for line in made} == set(TASKS)
    assert sum("text" in line for line in made) > 20
    assert sum("messages" in line for line in made) > 60
    assert sum("body" in line for line in made) > 30
    names = [line.get("id", line.get("custom_id")) for line in made]
    assert len(set(names)) == len(names)
    assert all("expected" in line for line in made)


def test_the_command_writes_the_committed_sample(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--split", "heldout", "--rows", "200"])
    assert capsys.readouterr().out == SAMPLE.read_text(encoding="utf-8")
