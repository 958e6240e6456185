"""Questions with exact answers, made from the words and templates of `tasks.toml`: arithmetic, sorting, copying, facts,
few-shot patterns, field extraction, classification, and passages.

Each maker is a function of a random number generator only, independent of chat templates, tokens and models.
"""

from __future__ import annotations

import hashlib
import json
import string
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

_DATA = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {name: text.split() for name, text in _DATA["words"].items()}
PAIRS = {name: dict(pair.split(":") for pair in text.split()) for name, text in _DATA["pairs"].items()}
CATEGORIES: dict[str, list[str]] = {name: text.split() for name, text in _DATA["categories"].items()}
TOPICS: dict[str, dict[str, list[str]]] = _DATA["topics"]
TEMPLATES: dict[str, list[str]] = _DATA["templates"]
SORT: dict[str, list[str]] = _DATA["sort"]
"""Order -> templates of sorting questions."""
FACTS: dict[str, list[str]] = _DATA["facts"]
"""Kind of fact -> templates of questions about a word."""
SENTENCES: dict[str, list[str]] = _DATA["sentences"]
"""Kind of sentence -> templates that fields are extracted from."""
PASSAGES: dict[str, dict[str, list[str]]] = _DATA["passages"]
"""Kind of fact -> templates of statements, and of questions about the value and about the name."""

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 16
"""One of this many content keys is held out."""


@dataclass(frozen=True, slots=True)
class Content:
    """A question with its answer, independent of whether it is put as a chat turn or as plain text.

    Attributes:
        prompt: the question as a user asks it in a chat.
        raw: the same question as plain text to continue; the answer follows after one space.
        answer: the exact answer, without surrounding white space.
        key: identity of the question, which alone decides the split: both splits never contain the same key. If the
            answer can be derived from the question, the key does not depend on the wording; for facts, which can only
            be memorised, it is the wording.
    """

    prompt: str
    raw: str
    answer: str
    key: str


def split_of(key: str) -> Split:
    """Split of a content key, from its SHA-256 digest: one key in `HELDOUT_ONE_IN` is held out."""
    digest = hashlib.sha256(key.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


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
    lines = [shape.format(i=asked, o=result) for asked, result in shown]
    body = "\n".join([*lines, shape.format(i=query, o="").rstrip()])
    key = f"few_shot {kind} {shown} {query}"
    prompt = body if rng.random() < 0.2 else f"{rng.choice(TEMPLATES['introductions'])}\n{body}"
    return Content(prompt, body, answer, key)


Value = str | int


def any_name(rng: Random) -> str:
    """A first name from the list or, less often, a random word, which requires copying instead of recall."""
    return rng.choice(WORDS["names"]) if rng.random() < 0.75 else made_up_word(rng).capitalize()


def any_city(rng: Random) -> str:
    """A city from the list or, less often, a random word."""
    return rng.choice(WORDS["cities"]) if rng.random() < 0.8 else made_up_word(rng).capitalize()


def _field_values(rng: Random) -> dict[str, Value]:
    return {
        "name": any_name(rng),
        "age": rng.randint(1, 99),
        "city": any_city(rng),
        "job": rng.choice(WORDS["jobs"]),
        "quantity": rng.randint(2, 99),
        "colour": rng.choice(WORDS["colours"]),
        "item": rng.choice(WORDS["items"]),
        "event": rng.choice(WORDS["events"]),
        "day": rng.choice(WORDS["days"]),
        "time": f"{rng.randint(7, 22)}:{rng.choice(['00', '15', '30', '45'])}",
    }


def joined(fields: list[str]) -> str:
    """Field names as English text: `a`, `a and b`, `a, b and c`."""
    return fields[0] if len(fields) == 1 else f"{', '.join(fields[:-1])} and {fields[-1]}"


def extract(rng: Random) -> Content:
    """Extraction of fields from a sentence about a person, order or event, as a JSON object in the order asked."""
    template = rng.choice(SENTENCES[rng.choice(sorted(SENTENCES))])
    values = _field_values(rng)
    text = template.format(**values)
    present = [field for field in values if f"{{{field}}}" in template]
    fields = rng.sample(present, rng.randint(1, min(3, len(present))))
    answer = json.dumps({field: values[field] for field in fields}, ensure_ascii=False)
    return plain(worded(rng, TEMPLATES["extract"], fields=joined(fields), text=text), answer, f"extract {text}")


def _sentiment_text(rng: Random, label: str) -> str:
    thing, other = rng.sample(WORDS["reviewed"], 2)
    day, city = rng.choice(WORDS["days"]), any_city(rng)
    if label == "neutral":
        return rng.choice(TEMPLATES["neutral"]).format(thing=thing, day=day, city=city, hour=rng.randint(8, 20))
    word, second = rng.sample(WORDS["positive"] if label == "positive" else WORDS["negative"], 2)
    return rng.choice(TEMPLATES["feelings"]).format(
        thing=thing, other=other, word=word, second=second, city=city, day=day, name=any_name(rng)
    )


def _topic_text(rng: Random, label: str) -> str:
    subjects, events = TOPICS[label].values()
    text = f"{rng.choice(subjects)} {rng.choice(events)}"
    extra = rng.choice(["", "", f" on {rng.choice(WORDS['days'])}", f" in {any_city(rng)}", f", said {any_name(rng)}"])
    return f"{text[0].upper()}{text[1:]}{extra}."


def classify(rng: Random) -> Content:
    """Classification of a sentence's sentiment or topic; the question lists the labels."""
    kind = rng.choice(["sentiment", "topic"])
    if kind == "sentiment":
        labels = ["positive", "negative", "neutral"]
        label = rng.choice(labels)
        text = _sentiment_text(rng, label)
    else:
        label = rng.choice(sorted(TOPICS))
        text = _topic_text(rng, label)
        labels = [label, *rng.sample(sorted(set(TOPICS) - {label}), rng.randint(2, 4))]
    rng.shuffle(labels)
    listed = f"{', '.join(labels[:-1])} or {labels[-1]}"
    return plain(worded(rng, TEMPLATES["classify"], kind=kind, labels=listed, text=text), label, f"classify {text}")


_FACT_VALUES = {
    "city": WORDS["cities"],
    "job": WORDS["jobs"],
    "pet": WORDS["pets"],
    "food": WORDS["foods"],
    "hobby": WORDS["hobbies"],
    "age": [str(age) for age in range(5, 95)],
    "place": WORDS["places"],
}
"""Kind of fact in a passage -> its values."""


def _passage_size(rng: Random) -> int:
    """Number of facts: mostly two to five, rarely up to thirty, so that the answer can be far from the question."""
    return rng.randint(2, 5) if rng.random() < 0.98 else rng.randint(6, 30)


def _facts(rng: Random, size: int) -> list[tuple[str, str, str]]:
    """Facts (kind, name, value). Each (kind, name) and (kind, value) is unique, so every question has one answer."""
    people = [any_name(rng) for _ in range(max(2, size // 2))]
    facts: list[tuple[str, str, str]] = []
    used: set[tuple[str, str]] = set()
    for _ in range(size * 2):
        kind = rng.choice(sorted(_FACT_VALUES))
        name = rng.choice(WORDS["things"] if kind == "place" else people)
        value = rng.choice(_FACT_VALUES[kind])
        if (kind, name) not in used and (kind, value) not in used and len(facts) < size:
            used |= {(kind, name), (kind, value)}
            facts.append((kind, name, value))
    return facts


def question(rng: Random) -> Content:
    """A passage of facts about people and things, and a question about one of them."""
    facts = _facts(rng, _passage_size(rng))
    passage = " ".join(
        rng.choice(PASSAGES[kind]["facts"]).format(name=name, value=value) for kind, name, value in facts
    )
    kind, name, value = rng.choice(facts)
    backwards = rng.random() < 0.3
    asked = rng.choice(PASSAGES[kind]["about_value" if backwards else "about_name"]).format(name=name, value=value)
    prompt = worded(rng, TEMPLATES["ask"], passage=passage, question=asked)
    raw = f"{passage}\nQuestion: {asked}\nAnswer:"
    return Content(prompt, raw, name if backwards else value, f"question {passage}")
