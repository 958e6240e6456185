"""Generators of short tasks: arithmetic, sorting, copying, word facts and few-shot patterns.

Each is a function of a random number generator only.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from random import Random

from batchgen.bench.demo_tasks.content import CATEGORIES, FACTS, PAIRS, SORT, TEMPLATES, WORDS, Content

Pair = tuple[str, str]


def question_as_text(question: str) -> str:
    """Default plain-text form of a question."""
    return f"Q: {question}\nA:"


def worded(rng: Random, templates: Sequence[str], **values: object) -> str:
    """A random template, filled in; sometimes with "please" or a lower-case first letter."""
    template = rng.choice(templates)
    if template[0].isalpha() and rng.random() < 0.15:
        template = rng.choice(["", "Please ", "please "]) + template[0].lower() + template[1:]
    return template.format(**values)


def plain(question: str, answer: str, key: str) -> Content:
    """A content with the default plain-text form."""
    return Content(prompt=question, raw=question_as_text(question), answer=answer, key=key)


def addition_key(a: int, b: int) -> str:
    """Content key of a sum, the same for both orders of the terms."""
    return f"add {min(a, b)} {max(a, b)}"


def arithmetic(rng: Random) -> Content:
    """Addition of two-digit numbers, or subtraction of the smaller from the larger; the answer shows the steps."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if rng.random() < 0.5:
        return Content(worded(rng, TEMPLATES["add"], a=a, b=b), f"{a} + {b} =", added(a, b), addition_key(a, b))
    a, b = max(a, b), min(a, b)
    return Content(worded(rng, TEMPLATES["subtract"], a=a, b=b), f"{a} - {b} =", subtracted(a, b), f"sub {a} {b}")


def added(a: int, b: int) -> str:
    """`17 + 25` worked digit by digit: `7+5=12, 1+2+1=4: 42`."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carried = "+1" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carried}={tens + (ones > 9)}: {a + b}"


def subtracted(a: int, b: int) -> str:
    """`82 - 47` worked digit by digit: `12-7=5, 7-4=3: 35`."""
    top, tens = a % 10, a // 10
    if top < b % 10:
        top, tens = top + 10, tens - 1
    return f"{top}-{b % 10}={top - b % 10}, {tens}-{b // 10}={tens - b // 10}: {a - b}"


def sort(rng: Random) -> Content:
    """Sorting of three different numbers below 100, or of three words."""
    order = rng.choice(sorted(SORT))
    size = 3
    if order == "alphabetical":
        items = rng.sample(WORDS["colours"] + WORDS["pets"], size)
        ranked = sorted(items)
    else:
        numbers = rng.sample(range(100), size)
        items = [str(number) for number in numbers]
        ranked = [str(number) for number in sorted(numbers, reverse=order == "descending")]
    listed = ", ".join(items)
    question = worded(rng, SORT[order], x=listed)
    raw = rng.choice([f"Unsorted: {listed}\nSorted, {order}:", question_as_text(question)])
    return Content(question, raw, ", ".join(ranked), f"sort {order} {' '.join(ranked)}")


def made_up_word(rng: Random) -> str:
    """A word of two or three random syllables, which requires copying instead of recall."""
    syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
    return "".join([*syllables, rng.choice(["", "n", "r", "s", "l", "k"])])


def _copied_piece(rng: Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return str(rng.randrange(10 ** rng.randint(1, 4)))
    if kind == 1:
        return rng.choice(WORDS["foreign"])
    if kind == 2:
        return rng.choice([made_up_word(rng), made_up_word(rng).capitalize()])
    return rng.choice(
        rng.choice([WORDS["nouns"], WORDS["names"], WORDS["cities"], WORDS["colours"], WORDS["foods"], WORDS["jobs"]])
    )


def copy(rng: Random) -> Content:
    """Copying of words, names, numbers, random words and some text that is not English."""
    text = " ".join(_copied_piece(rng) for _ in range(rng.randint(1, 2)))
    if rng.random() < 0.15:
        text += rng.choice(["!", "?", ";", "..."])
    question = worded(rng, TEMPLATES["copy"], x=text)
    return Content(question, f"{text}\n{text}\n{text}\n", text, f"copy {text}")


_FACTS: dict[str, dict[str, str]] = {
    **PAIRS,
    "upper": {word: word.upper() for word in WORDS["nouns"]},
    "category": {word: label for label, members in sorted(CATEGORIES.items()) for word in members},
    "day": dict(zip(WORDS["days"], WORDS["days"][1:] + WORDS["days"][:1], strict=True)),
    "month": dict(zip(WORDS["months"], WORDS["months"][1:] + WORDS["months"][:1], strict=True)),
}
"""Kind of fact -> word -> answer."""


def word_facts(rng: Random) -> Content:
    """Facts: opposites, plurals, past tenses, capitals, upper case, categories, days and months.

    Wordings are held out, not facts, because a fact that is not in the training data cannot be inferred.
    """
    kind = rng.choice(sorted(_FACTS))
    facts = _FACTS[kind]
    word = rng.choice(sorted(facts))
    question = rng.choice(TEMPLATES["polite"]).format(q=worded(rng, FACTS[kind], x=word))
    return plain(question, facts[word], question)


def _fact_pairs(kind: str) -> Callable[[Random, int], list[Pair]]:
    facts = sorted(_FACTS[kind].items())

    def pairs(rng: Random, count: int) -> list[Pair]:
        return rng.sample(facts, count)

    return pairs


def _list_pairs(change: Callable[[list[str]], Sequence[str]]) -> Callable[[Random, int], list[Pair]]:
    def pairs(rng: Random, count: int) -> list[Pair]:
        glue = rng.choice([" ", ", "])
        pool = rng.choice(
            [WORDS["nouns"], WORDS["colours"] + WORDS["pets"], list(string.ascii_lowercase), WORDS["names"]]
        )
        lists = [rng.sample(pool, rng.randint(2, 4)) for _ in range(count)]
        return [(glue.join(items), glue.join(change(items))) for items in lists]

    return pairs


def _step_pairs(rng: Random, count: int) -> list[Pair]:
    step = rng.choice([1, 1, 2, 10])
    return [(str(number), str(number + step)) for number in rng.sample(range(100), count)]


_PATTERNS: dict[str, Callable[[Random, int], list[Pair]]] = {
    **{kind: _fact_pairs(kind) for kind in ("opposite", "plural", "past", "capital", "upper", "category")},
    "first": _list_pairs(lambda items: items[:1]),
    "last": _list_pairs(lambda items: items[-1:]),
    "step": _step_pairs,
}


def few_shot(rng: Random) -> Content:
    """Two to five `input -> output` pairs that follow a rule, then an input to complete."""
    kind = rng.choice(sorted(_PATTERNS))
    *shown, (query, answer) = _PATTERNS[kind](rng, rng.randint(3, 6))
    shape = rng.choice(TEMPLATES["shapes"])
    lines = [shape.format(i=given, o=result) for given, result in shown]
    body = "\n".join([*lines, shape.format(i=query, o="").rstrip()])
    key = f"few_shot {kind} {shown} {query}"
    prompt = body if rng.random() < 0.2 else f"{rng.choice(TEMPLATES['introductions'])}\n{body}"
    return Content(prompt, body, answer, key)
