"""Pictures for the demonstration model: some equal shapes of one colour, or one digit, with questions about them.

A picture's *kind* is what is in it: shape, colour and count, or digit and colour. Kinds are divided into those to train
on and held-out ones. `python -m configs.demo_model.pictures` prints the rows of `sample_data/pictures.jsonl`.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, Final, Literal

from PIL import Image, ImageDraw, ImageFont

SIZE: Final = 64
"""Width and height of a picture, in pixels."""
_FINER: Final = 4
"""Drawn this much larger, so that edges are smooth."""
COLOURS: Final = {
    "red": (214, 40, 40),
    "green": (46, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 205, 30),
    "black": (25, 25, 25),
    "orange": (245, 130, 20),
    "purple": (125, 45, 165),
    "pink": (245, 130, 185),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "cross")
MOST: Final = 6
"""Largest number of shapes."""
HELD_OUT: Final = 7
"""One kind of this many is held out."""

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is in a picture: a digit, or `count` equal shapes."""

    colour: str
    shape: str | None = None
    count: int = 1
    digit: int | None = None

    @property
    def facts(self) -> dict[str, str | int]:
        """What may be asked, by its name."""
        if self.digit is not None:
            return {"colour": self.colour, "digit": self.digit}
        return {"colour": self.colour, "shape": str(self.shape), "quantity": self.count}


SHAPE_KINDS: Final = [Kind(*drawn) for drawn in product(COLOURS, SHAPES, range(1, MOST + 1))]
DIGIT_KINDS: Final = [Kind(colour, digit=digit) for colour, digit in product(COLOURS, range(10))]

_ASKED: Final = {
    "colour": ["What colour is it?", "Which colour is in the picture?", "Name the colour."],
    "shape": ["Which shape is it?", "What shape is in the picture?", "Name the shape."],
    "quantity": ["How many shapes are there?", "How many shapes are in the picture?", "Count the shapes."],
    "digit": ["Which digit is it?", "What digit is in the picture?", "Name the digit."],
}
_AS_JSON: Final = [
    "Extract the {fields} as JSON.",
    "Give me the {fields} as JSON.",
    "Return a JSON object with {fields}.",
]


def kinds(split: Split) -> tuple[list[Kind], list[Kind]]:
    """Kinds of shapes and of digits of a split; the held-out ones have no value that no kind to train on has."""
    wanted = split == "heldout"
    shuffled = [Random(number).sample(whole, len(whole)) for number, whole in enumerate((SHAPE_KINDS, DIGIT_KINDS))]
    shapes, digits = ([k for place, k in enumerate(all_) if (place % HELD_OUT == 0) == wanted] for all_ in shuffled)
    return shapes, digits


@dataclass(frozen=True, slots=True)
class Example:
    """A picture, a question about it, and the answer."""

    kind: Kind
    image: Image.Image
    question: str
    answer: str


def examples(split: Split, seed: int) -> Iterator[Example]:
    """The infinite stream of examples of a seed; a third are digits, a third ask for JSON."""
    rng, (shapes, digits) = Random(seed), kinds(split)
    while True:
        kind = rng.choice(digits if rng.random() < 1 / 3 else shapes)
        yield Example(kind, draw(kind, rng), *_ask(kind, rng))


def _ask(kind: Kind, rng: Random) -> tuple[str, str]:
    facts = kind.facts
    if rng.random() < 1 / 3:
        names = rng.sample(list(facts), rng.randint(1, len(facts)))
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        return rng.choice(_AS_JSON).format(fields=listed), json.dumps({name: facts[name] for name in names})
    name = rng.choice(list(facts))
    return rng.choice(_ASKED[name]), str(facts[name])


def draw(kind: Kind, rng: Random) -> Image.Image:
    """A picture [SIZE, SIZE] RGB of a kind: sizes, places, shades and the ground are drawn by `rng`."""
    ground = tuple(rng.randint(215, 255) for _ in range(3))
    image = Image.new("RGB", (SIZE * _FINER, SIZE * _FINER), ground)
    canvas = ImageDraw.Draw(image)
    shade = tuple(min(255, max(0, value + rng.randint(-18, 18))) for value in COLOURS[kind.colour])
    if kind.digit is not None:
        size = rng.randint(34, 56) * _FINER
        font = ImageFont.load_default(size)
        left, top, right, bottom = font.getbbox(str(kind.digit))
        room = (SIZE * _FINER - (right - left), SIZE * _FINER - (bottom - top))
        at = [rng.uniform(0.1, 0.9) * free for free in room]
        canvas.text((at[0] - left, at[1] - top), str(kind.digit), fill=shade, font=font)
    else:
        for x, y, radius, turn in _places(kind.count, rng):
            _DRAW[str(kind.shape)](canvas, x * _FINER, y * _FINER, radius * _FINER, turn, shade)
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def _places(count: int, rng: Random) -> list[tuple[float, float, float, float]]:
    """(x, y, radius, turn) of shapes that do not touch."""
    largest = {1: 24.0, 2: 15.0, 3: 13.0, 4: 12.0, 5: 10.5, 6: 10.0}[count]
    while True:
        found: list[tuple[float, float, float, float]] = []
        for _ in range(200):
            radius = rng.uniform(0.65, 1) * largest
            x, y = (rng.uniform(radius + 1, SIZE - radius - 1) for _ in range(2))
            if all(math.dist((x, y), other[:2]) > radius + other[2] + 1.5 for other in found):
                found.append((x, y, radius, rng.uniform(-0.25, 0.25)))
                if len(found) == count:
                    return found


Shade = tuple[int, ...]


def _polygon(points: Callable[[], list[tuple[float, float]]]) -> Callable[..., None]:
    """Draws the outline, given for radius 1 around the origin, filled."""
    outline = points()

    def paint(canvas: ImageDraw.ImageDraw, x: float, y: float, radius: float, turn: float, shade: Shade) -> None:
        cosine, sine = math.cos(turn), math.sin(turn)
        canvas.polygon(
            [(x + radius * (a * cosine - b * sine), y + radius * (a * sine + b * cosine)) for a, b in outline], shade
        )

    return paint


def _circle(canvas: ImageDraw.ImageDraw, x: float, y: float, radius: float, turn: float, shade: Shade) -> None:
    canvas.ellipse((x - radius, y - radius, x + radius, y + radius), shade)


def _ring(corners: int, first: float, radii: tuple[float, ...]) -> list[tuple[float, float]]:
    angles = [first + 2 * math.pi * corner / corners for corner in range(corners)]
    return [
        (radii[i % len(radii)] * math.cos(angle), radii[i % len(radii)] * math.sin(angle))
        for i, angle in enumerate(angles)
    ]


def _plus() -> list[tuple[float, float]]:
    corners = [(-0.33, -1), (0.33, -1), (0.33, -0.33), (1, -0.33), (1, 0.33), (0.33, 0.33)]
    corners += [(-x, -y) for x, y in corners]
    return [(0.95 * x, 0.95 * y) for x, y in corners]


_DRAW: Final = {
    "circle": _circle,
    "square": _polygon(lambda: _ring(4, math.pi / 4, (1.0,))),
    "triangle": _polygon(lambda: _ring(3, -math.pi / 2, (1.0,))),
    "star": _polygon(lambda: _ring(10, -math.pi / 2, (1.0, 0.42))),
    "cross": _polygon(_plus),
}


def sample_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows that ask about held-out pictures, each with its picture in a data URL."""
    for number, example in enumerate(itertools.islice(examples("heldout", seed), count)):
        data = io.BytesIO()
        example.image.save(data, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": example.question}]
        yield {
            "id": f"picture-{number:04}",
            "messages": [{"role": "user", "content": parts}],
            "sampling_params": {"max_new_tokens": 40, "temperature": 0},
            "expected": example.answer,
        }


if __name__ == "__main__":
    for row in sample_rows(12, 5):
        sys.stdout.write(json.dumps(row) + "\n")
