"""Generators of short tasks: arithmetic, sorting, copying, word facts and few-shot patterns.

Each is a function of a random number generator only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from batchgen.bench.demo_tasks import words
from batchgen.bench.demo_tasks.content import Content

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


# --- arithmetic ------------------------------------------------------------------------------------------------------

_ADD = ["What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "Compute {a} + {b}."]
_SUB = ["What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b} = ?", "Compute {a} - {b}."]


def addition_key(a: int, b: int) -> str:
    """Content key of a sum, the same for both orders of the terms."""
    return f"add {min(a, b)} {max(a, b)}"


def arithmetic(rng: Random) -> Content:
    """Addition of two-digit numbers, or subtraction of the smaller from the larger; the answer shows the steps."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if rng.random() < 0.5:
        return Content(worded(rng, _ADD, a=a, b=b), f"{a} + {b} =", added(a, b), addition_key(a, b))
    a, b = max(a, b), min(a, b)
    return Content(worded(rng, _SUB, a=a, b=b), f"{a} - {b} =", subtracted(a, b), f"sub {a} {b}")


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


# --- sorting ---------------------------------------------------------------------------------------------------------

_SORT = {
    "ascending": ["Sort these numbers: {x}", "Sort in ascending order: {x}", "Order from low to high: {x}"],
    "descending": ["Sort in descending order: {x}", "Order from high to low: {x}"],
    "alphabetical": ["Sort these words: {x}", "Sort alphabetically: {x}", "Order from A to Z: {x}"],
}


def sort(rng: Random) -> Content:
    """Sorting of three different numbers below 100, or of three words."""
    order = rng.choice(sorted(_SORT))
    size = 3
    if order == "alphabetical":
        items = rng.sample(words.COLOURS + words.PETS, size)
        ranked = sorted(items)
    else:
        numbers = rng.sample(range(100), size)
        items = [str(number) for number in numbers]
        ranked = [str(number) for number in sorted(numbers, reverse=order == "descending")]
    listed = ", ".join(items)
    question = worded(rng, _SORT[order], x=listed)
    raw = rng.choice([f"Unsorted: {listed}\nSorted, {order}:", question_as_text(question)])
    return Content(question, raw, ", ".join(ranked), f"sort {order} {' '.join(ranked)}")


# --- copying ---------------------------------------------------------------------------------------------------------

_COPY = ["Repeat this exactly: {x}", "Copy this text: {x}", 'Say "{x}".', "Echo: {x}", "Repeat after me: {x}"]


def made_up_word(rng: Random) -> str:
    """A word of two or three random syllables, which requires copying instead of recall."""
    syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
    return "".join([*syllables, rng.choice(["", "n", "r", "s", "l", "k"])])


def _copied_piece(rng: Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return str(rng.randrange(10 ** rng.randint(1, 4)))
    if kind == 1:
        return rng.choice(words.FOREIGN)
    if kind == 2:
        return rng.choice([made_up_word(rng), made_up_word(rng).capitalize()])
    return rng.choice(rng.choice([words.NOUNS, words.NAMES, words.CITIES, words.COLOURS, words.FOODS, words.JOBS]))


def copy(rng: Random) -> Content:
    """Copying of words, names, numbers, random words and some text that is not English."""
    text = " ".join(_copied_piece(rng) for _ in range(rng.randint(1, 2)))
    if rng.random() < 0.15:
        text += rng.choice(["!", "?", ";", "..."])
    question = worded(rng, _COPY, x=text)
    return Content(question, f"{text}\n{text}\n{text}\n", text, f"copy {text}")


# --- facts about words -----------------------------------------------------------------------------------------------

_FACTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "opposite": (
        words.OPPOSITES,
        [
            "What is the opposite of {x}?",
            "Give the opposite of {x}.",
            "Opposite of {x}:",
            'What is the opposite of "{x}"?',
        ],
    ),
    "plural": (
        words.PLURALS,
        ["What is the plural of {x}?", "Give the plural of {x}.", "Plural of {x}:", 'Write the plural of "{x}".'],
    ),
    "past": (
        words.PAST_TENSES,
        ["What is the past tense of {x}?", "Give the past tense of {x}.", "Past tense of {x}:", 'Past tense of "{x}"?'],
    ),
    "capital": (
        words.CAPITALS,
        [
            "What is the capital of {x}?",
            "Name the capital of {x}.",
            "Capital of {x}:",
            "Which city is the capital of {x}?",
        ],
    ),
    "upper": (
        {word: word.upper() for word in words.NOUNS},
        ["Write {x} in capital letters.", "Put {x} in upper case.", "Uppercase {x}.", 'Convert "{x}" to upper case.'],
    ),
    "category": (
        {word: label for label, members in sorted(words.CATEGORIES.items()) for word in members},
        [f"Is {{x}} an {', '.join(sorted(words.CATEGORIES))}?", "What kind of thing is {x}?", "Category of {x}:"],
    ),
    "day": (
        dict(zip(words.DAYS, words.DAYS[1:] + words.DAYS[:1], strict=True)),
        ["Which day comes after {x}?", "What day follows {x}?", "The day after {x}:"],
    ),
    "month": (
        dict(zip(words.MONTHS, words.MONTHS[1:] + words.MONTHS[:1], strict=True)),
        ["Which month comes after {x}?", "What month follows {x}?", "The month after {x}:"],
    ),
}
_POLITE = ["{q}", "{q}", "{q}", "{q}", "Please answer: {q}", "Tell me: {q}", "Question: {q}", "{q} One word, please."]


def word_facts(rng: Random) -> Content:
    """Facts: opposites, plurals, past tenses, capitals, upper case, categories, days and months.

    Wordings are held out, not facts, because a fact that is not in the training data cannot be inferred.
    """
    facts, templates = _FACTS[rng.choice(sorted(_FACTS))]
    word = rng.choice(sorted(facts))
    question = rng.choice(_POLITE).format(q=worded(rng, templates, x=word))
    return plain(question, facts[word], question)


# --- few-shot patterns -----------------------------------------------------------------------------------------------


def _fact_pairs(kind: str) -> Callable[[Random, int], list[Pair]]:
    facts = sorted(_FACTS[kind][0].items())

    def pairs(rng: Random, count: int) -> list[Pair]:
        return rng.sample(facts, count)

    return pairs


def _list_pairs(change: Callable[[list[str]], Sequence[str]]) -> Callable[[Random, int], list[Pair]]:
    def pairs(rng: Random, count: int) -> list[Pair]:
        glue = rng.choice([" ", ", "])
        pool = rng.choice([words.NOUNS, words.COLOURS + words.PETS, list(words.LETTERS), words.NAMES])
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
_SHAPES = ["{i} -> {o}", "{i} => {o}", "{i}: {o}", "Input: {i}\nOutput: {o}"]
_INTRODUCTIONS = [
    "Complete the pattern.",
    "Continue the pattern:",
    "Fill in the last answer.",
    "Give the missing output.",
    "Follow the examples.",
]


def few_shot(rng: Random) -> Content:
    """Two to five `input -> output` pairs that follow a rule, then an input to complete."""
    kind = rng.choice(sorted(_PATTERNS))
    *shown, (query, answer) = _PATTERNS[kind](rng, rng.randint(3, 6))
    shape = rng.choice(_SHAPES)
    lines = [shape.format(i=given, o=result) for given, result in shown]
    body = "\n".join([*lines, shape.format(i=query, o="").rstrip()])
    key = f"few_shot {kind} {shown} {query}"
    prompt = body if rng.random() < 0.2 else f"{rng.choice(_INTRODUCTIONS)}\n{body}"
    return Content(prompt, body, answer, key)
