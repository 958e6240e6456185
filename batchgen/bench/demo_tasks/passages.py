"""Generators of tasks about a given text: field extraction as JSON, classification and question answering."""

from __future__ import annotations

import json
from random import Random

from batchgen.bench.demo_tasks import words
from batchgen.bench.demo_tasks.content import Content
from batchgen.bench.demo_tasks.makers import made_up_word, plain, worded

Value = str | int


def any_name(rng: Random) -> str:
    """A first name from the list or, less often, a random word, which requires copying instead of recall."""
    return rng.choice(words.NAMES) if rng.random() < 0.75 else made_up_word(rng).capitalize()


def any_city(rng: Random) -> str:
    """A city from the list or, less often, a random word."""
    return rng.choice(words.CITIES) if rng.random() < 0.8 else made_up_word(rng).capitalize()


# --- extraction ------------------------------------------------------------------------------------------------------

_SENTENCES = {
    "person": [
        "{name} is {age} years old and lives in {city}.",
        "{name}, {age}, lives in {city}.",
        "My name is {name}, I am {age} and I live in {city}.",
        "In {city} there is a {age}-year-old called {name}.",
        "{name} from {city} turned {age} on {day}.",
        "At the age of {age}, {name} moved to {city}.",
        "{name} is a {age}-year-old {job} from {city}.",
        "The {job} {name} is {age} years old and works in {city}.",
        "{name} works as a {job} in {city} and is {age}.",
        "Hello, I am {name}, a {job} in {city}. I am {age} years old.",
    ],
    "order": [
        "Please send {quantity} {colour} {item} to {city}.",
        "I would like {quantity} {colour} {item}.",
        "We ordered {quantity} {colour} {item} for our office in {city}.",
        "{name} bought {quantity} {colour} {item} on {day}.",
        "The parcel for {name} in {city} holds {quantity} {colour} {item}.",
    ],
    "event": [
        "The {event} is on {day} at {time} in {city}.",
        "Come to the {event} in {city} on {day} at {time}!",
        "{name} invites you to a {event} on {day}. It starts at {time}.",
        "On {day} at {time} there is a {event} in {city}.",
    ],
}
_EXTRACT = [
    "Extract the {fields} as JSON: {text}",
    "Extract {fields} as JSON from this text: {text}",
    "Text: {text}\nReturn a JSON object with {fields}.",
    "{text}\nGive me the {fields} as JSON.",
    'Read "{text}" and return JSON with the keys {fields}.',
    "Return the {fields} from the following sentence as a JSON object.\n{text}",
]


def _field_values(rng: Random) -> dict[str, Value]:
    return {
        "name": any_name(rng),
        "age": rng.randint(1, 99),
        "city": any_city(rng),
        "job": rng.choice(words.JOBS),
        "quantity": rng.randint(2, 99),
        "colour": rng.choice(words.COLOURS),
        "item": rng.choice(words.ITEMS),
        "event": rng.choice(words.EVENTS),
        "day": rng.choice(words.DAYS),
        "time": f"{rng.randint(7, 22)}:{rng.choice(['00', '15', '30', '45'])}",
    }


def joined(fields: list[str]) -> str:
    """Field names as English text: `a`, `a and b`, `a, b and c`."""
    return fields[0] if len(fields) == 1 else f"{', '.join(fields[:-1])} and {fields[-1]}"


def extract(rng: Random) -> Content:
    """Extraction of fields from a sentence about a person, order or event, as a JSON object in the order asked."""
    template = rng.choice(_SENTENCES[rng.choice(sorted(_SENTENCES))])
    values = _field_values(rng)
    text = template.format(**values)
    present = [field for field in values if f"{{{field}}}" in template]
    fields = rng.sample(present, rng.randint(1, min(3, len(present))))
    answer = json.dumps({field: values[field] for field in fields}, ensure_ascii=False)
    return plain(worded(rng, _EXTRACT, fields=joined(fields), text=text), answer, f"extract {text}")


# --- classification --------------------------------------------------------------------------------------------------

_FEELINGS = [
    "The {thing} was {word}.",
    "What a {word} {thing}!",
    "I think the {thing} is {word}.",
    "The {thing} was {word} and the {other} was {second}.",
    "Honestly, the {thing} in {city} was {word}.",
    "On {day} we had a {word} {thing}.",
    "{name} said that the {thing} was {word}.",
]
_CLASSIFY = [
    "Classify the {kind} as {labels}: {text}",
    "Is the {kind} of this text {labels}? {text}",
    "{text}\nWhat is the {kind}: {labels}?",
    "Text: {text}\nChoose the {kind} ({labels}).",
    "Label the {kind} of the sentence as {labels}.\n{text}",
]


def _sentiment_text(rng: Random, label: str) -> str:
    thing, other = rng.sample(words.REVIEWED, 2)
    day, city = rng.choice(words.DAYS), any_city(rng)
    if label == "neutral":
        return rng.choice(words.NEUTRAL).format(thing=thing, day=day, city=city, hour=rng.randint(8, 20))
    word, second = rng.sample(words.POSITIVE if label == "positive" else words.NEGATIVE, 2)
    return rng.choice(_FEELINGS).format(
        thing=thing, other=other, word=word, second=second, city=city, day=day, name=any_name(rng)
    )


def _topic_text(rng: Random, label: str) -> str:
    subjects, events = words.TOPICS[label]
    text = f"{rng.choice(subjects)} {rng.choice(events)}"
    extra = rng.choice(["", "", f" on {rng.choice(words.DAYS)}", f" in {any_city(rng)}", f", said {any_name(rng)}"])
    return f"{text[0].upper()}{text[1:]}{extra}."


def classify(rng: Random) -> Content:
    """Classification of a sentence's sentiment or topic; the question lists the labels."""
    kind = rng.choice(["sentiment", "topic"])
    if kind == "sentiment":
        labels = ["positive", "negative", "neutral"]
        label = rng.choice(labels)
        text = _sentiment_text(rng, label)
    else:
        label = rng.choice(sorted(words.TOPICS))
        text = _topic_text(rng, label)
        labels = [label, *rng.sample(sorted(set(words.TOPICS) - {label}), rng.randint(2, 4))]
    rng.shuffle(labels)
    listed = f"{', '.join(labels[:-1])} or {labels[-1]}"
    return plain(worded(rng, _CLASSIFY, kind=kind, labels=listed, text=text), label, f"classify {text}")


# --- question answering ----------------------------------------------------------------------------------------------

# Kind of fact -> (values, sentences, questions about the value, questions about the person or thing).
_FACTS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "city": (
        words.CITIES,
        ["{name} lives in {value}.", "{name} has a flat in {value}.", "The home of {name} is in {value}."],
        ["Where does {name} live?", "In which city does {name} live?"],
        ["Who lives in {value}?"],
    ),
    "job": (
        words.JOBS,
        ["{name} is a {value}.", "{name} works as a {value}.", "The job of {name} is {value}."],
        ["What is the job of {name}?", "What does {name} work as?", "What is {name}'s job?"],
        ["Who is the {value}?", "Who works as a {value}?"],
    ),
    "pet": (
        words.PETS,
        ["{name} has a {value}.", "{name} owns a {value}.", "The pet of {name} is a {value}."],
        ["Which pet does {name} have?", "What animal does {name} own?", "What is {name}'s pet?"],
        ["Who has a {value}?", "Who owns the {value}?"],
    ),
    "food": (
        words.FOODS,
        ["{name} likes to eat {value}.", "{name} loves {value}.", "The favourite food of {name} is {value}."],
        ["What does {name} like to eat?", "What is {name}'s favourite food?"],
        ["Who likes to eat {value}?", "Who loves {value}?"],
    ),
    "hobby": (
        words.HOBBIES,
        ["{name} enjoys {value}.", "The hobby of {name} is {value}.", "In the evening {name} goes for {value}."],
        ["What is the hobby of {name}?", "What does {name} enjoy?"],
        ["Who enjoys {value}?", "Whose hobby is {value}?"],
    ),
    "age": (
        [str(age) for age in range(5, 95)],
        ["{name} is {value} years old.", "{name} turned {value}.", "The age of {name} is {value}."],
        ["How old is {name}?", "What is the age of {name}?"],
        ["Who is {value} years old?"],
    ),
    "place": (
        words.PLACES,
        ["The {name} is in the {value}.", "You find the {name} in the {value}.", "We left the {name} in the {value}."],
        ["Where is the {name}?", "In which place is the {name}?"],
        ["What is in the {value}?"],
    ),
}
_ASK = [
    "{passage}\n{question}",
    "{passage}\n\nQuestion: {question}",
    "{passage} {question}",
    "Read the text and answer the question.\n{passage}\n{question}",
    "Text: {passage}\nQuestion: {question}",
    "{question}\n{passage}",
]


def _passage_size(rng: Random) -> int:
    """Number of facts: mostly two to five, rarely up to thirty, so that the answer can be far from the question."""
    return rng.randint(2, 5) if rng.random() < 0.98 else rng.randint(6, 30)


def _facts(rng: Random, size: int) -> list[tuple[str, str, str]]:
    """Facts (kind, name, value). Each (kind, name) and (kind, value) is unique, so every question has one answer."""
    people = [any_name(rng) for _ in range(max(2, size // 2))]
    facts: list[tuple[str, str, str]] = []
    used: set[tuple[str, str]] = set()
    for _ in range(size * 2):
        kind = rng.choice(sorted(_FACTS))
        name = rng.choice(words.THINGS if kind == "place" else people)
        value = rng.choice(_FACTS[kind][0])
        if (kind, name) not in used and (kind, value) not in used and len(facts) < size:
            used |= {(kind, name), (kind, value)}
            facts.append((kind, name, value))
    return facts


def question(rng: Random) -> Content:
    """A passage of facts about people and things, and a question about one of them."""
    facts = _facts(rng, _passage_size(rng))
    passage = " ".join(rng.choice(_FACTS[kind][1]).format(name=name, value=value) for kind, name, value in facts)
    kind, name, value = rng.choice(facts)
    backwards = rng.random() < 0.3
    asked = rng.choice(_FACTS[kind][3 if backwards else 2]).format(name=name, value=value)
    prompt = worded(rng, _ASK, passage=passage, question=asked)
    raw = f"{passage}\nQuestion: {asked}\nAnswer:"
    return Content(prompt, raw, name if backwards else value, f"question {passage}")
