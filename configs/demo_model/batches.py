"""Training batches: tokenised examples, grouped by similar length. Deterministic for a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from batchgen.demo.tasks import Example, draw
from configs.demo_model.network import Group
from configs.demo_model.tokenizer import BOS, END, EOS, ROLES

PROMPT_SHARE = 0.1
"""Share of prompt tokens that are trained on."""
PROMPT_WEIGHT = 0.2
"""Loss weight of those prompt tokens."""
SECOND_TURN_SHARE = 0.05
"""Probability that a conversation has another turn."""
MAX_LENGTH = 1024
"""Longest document, in tokens."""
# oneDNN compiles a kernel for every matrix size, so sizes are rounded up to a few values.
ROUND_TOKENS = 512
ROUND_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of a conversation or text, and for each whether it is part of an answer."""

    ids: list[int]
    answer: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one training step; see `Network.loss`."""

    tokens: Tensor
    groups: list[Group]
    targets: Tensor
    weights: Tensor
    real_tokens: int


class Encoder:
    """Converter of examples to documents."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._special = {token: tokenizer.convert_tokens_to_ids(token) for token in [BOS, EOS, END, *ROLES.values()]}

    def documents(self, conversations: list[list[Example]]) -> list[Document]:
        """One document per conversation, which is one or more chat turns, or one example as plain text."""
        segments = [list(_segments(conversation)) for conversation in conversations]
        texts = [text for pieces in segments for text, _, _ in pieces]
        encoded = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        documents = []
        for pieces in segments:
            document = Document([self._special[BOS]], [False])
            for _, before, after in pieces:
                self._append(document, next(encoded).ids, before, after)
            documents.append(document)
        return documents

    def _append(self, document: Document, ids: list[int], before: str, after: str) -> None:
        answers = before == ROLES["assistant"] or after == EOS
        head = [self._special[before]] if before else []
        tail = [self._special[after]] if after else []
        document.ids.extend([*head, *ids, *tail])
        document.answer.extend([*[False] * len(head), *[answers] * (len(ids) + len(tail))])


def _segments(conversation: list[Example]) -> Iterator[tuple[str, str, str]]:
    """Segments of a conversation in order: (text, special token before it, special token after it)."""
    if not conversation[0].chat and conversation[0].task == "copy":
        # Only the first occurrence is the prompt, so that every repetition is trained on.
        answer = conversation[0].content.answer
        yield f"{answer}\n", "", ""
        yield f"{answer}\n{answer}\n{answer}", "", EOS
        return
    if not conversation[0].chat:
        yield conversation[0].content.raw, "", ""
        yield f" {conversation[0].content.answer}", "", EOS
        return
    for turn, example in enumerate(conversation):
        for message in example.messages()[-1 if turn else 0 :]:
            yield message["content"], ROLES[message["role"]], END
        yield example.content.answer, ROLES["assistant"], END


def conversations(seed: int, weights: Mapping[str, int]) -> Iterator[list[Example]]:
    """The infinite stream of training conversations, mostly of one turn, with tasks weighted by `weights`."""
    rng = Random(seed)
    index = 0
    while True:
        turns = [draw("train", seed, index, weights=weights)]
        index += 1
        while turns[0].chat and rng.random() < SECOND_TURN_SHARE:
            turns.append(draw("train", seed, index, weights=weights))
            index += 1
        yield turns


def batches(encoder: Encoder, seed: int, tokens_per_batch: int, weights: Mapping[str, int]) -> Iterator[Batch]:
    """Batches of at least `tokens_per_batch` tokens, without documents longer than `MAX_LENGTH`."""
    stream = conversations(seed, weights)
    rng = Random(seed + 1)
    pending: list[Document] = []
    while True:
        chosen: list[Document] = []
        size = 0
        while size < tokens_per_batch:
            if not pending:
                pending = encoder.documents([next(stream) for _ in range(1024)])[::-1]
            document = pending.pop()
            if len(document.ids) <= MAX_LENGTH:
                chosen.append(document)
                size += len(document.ids)
        yield collate(chosen, rng)


def collate(documents: list[Document], rng: Random) -> Batch:
    """Pack documents into groups of similar length, padded on the right to the longest of the group."""
    ordered = sorted(documents, key=lambda document: len(document.ids))
    clusters: list[list[Document]] = []
    for document in ordered:
        # Lengths within a group differ by about a tenth: little padding, and few groups in a batch.
        if not clusters or len(document.ids) > len(clusters[-1][0].ids) * 1.12 + 4:
            clusters.append([])
        clusters[-1].append(document)
    tokens: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    groups: list[Group] = []
    for cluster in clusters:
        length = -(-(len(cluster[-1].ids) - 1) // ROUND_LENGTH) * ROUND_LENGTH
        groups.append(Group(len(tokens), len(cluster), length))
        for document in cluster:
            padding = length + 1 - len(document.ids)
            tokens += document.ids[:-1] + [0] * padding
            targets += document.ids[1:] + [0] * padding
            weights += [_weight(answer, rng) for answer in document.answer[1:]] + [0.0] * padding
    real = sum(len(document.ids) for document in documents)
    padding = -len(tokens) % ROUND_TOKENS
    if padding:
        groups.append(Group(len(tokens), padding, 1))
        tokens += [0] * padding
        targets += [0] * padding
        weights += [0.0] * padding
    return Batch(torch.tensor(tokens), groups, torch.tensor(targets), torch.tensor(weights), real)


def _weight(answer: bool, rng: Random) -> float:
    """Loss weight of a token: 1 for answers, `PROMPT_WEIGHT` for a random share of prompt tokens, otherwise 0."""
    if answer:
        return 1.0
    return PROMPT_WEIGHT if rng.random() < PROMPT_SHARE else 0.0
