"""Generators of tasks about a given text: field extraction as JSON, classification and question answering."""

from __future__ import annotations

import json
from random import Random

from batchgen.bench.demo_tasks.content import PASSAGES, SENTENCES, TEMPLATES, TOPICS, WORDS, Content
from batchgen.bench.demo_tasks.makers import made_up_word, plain, worded

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
