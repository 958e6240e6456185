"""Families of models that write thoughts: their chat templates, reduced to what matters, and transcripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

THOUGHTS = "Add 2 and 3.\nThat is 5."
ANSWER = "It is 5."


class Case(NamedTuple):
    """An output behind the prompt that the family's template makes with `settings`."""

    output: str
    reasoning: str | None = THOUGHTS
    answer: str = ANSWER
    settings: Mapping[str, Any] = {}


class Family(NamedTuple):
    """What a model folder of the family has."""

    name: str
    template: str
    cases: Mapping[str, Case]
    added: tuple[str, ...] = ()
    """Added tokens that are text."""
    special: tuple[str, ...] = ()
    """Special tokens."""


def _turns(turn: str, opening: str) -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + opening + "{% endif %}"


_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
_CHATML_OPENING = "<|im_start|>assistant\n"
_TAGS = ("<think>", "</think>")
_DISABLED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_FULL = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
_INSIDE = f"{THOUGHTS}\n</think>\n\n{ANSWER}"
_OFF = Case(ANSWER, None, ANSWER, {"enable_thinking": False})

_ANY = {
    "thoughts": Case(_FULL),
    "none": Case(ANSWER, None),
    "unfinished": Case(f"<think>\n{THOUGHTS}", THOUGHTS, ""),
    "empty": Case(f"<think>\n\n</think>\n\n{ANSWER}", None),
    "quoted": Case(f"<think>{THOUGHTS}</think>Write <think> and </think>.", THOUGHTS, "Write <think> and </think>."),
    "again": Case(f"<think>{THOUGHTS}</think>\n<think> is a tag.", THOUGHTS, "<think> is a tag."),
    "late": Case(f"Well, <think>{THOUGHTS}</think>", None, f"Well, <think>{THOUGHTS}</think>"),
}
"""Outputs of models whose prompt does not open the thoughts."""
_OPENED = {
    "thoughts": Case(_INSIDE),
    "unfinished": Case(THOUGHTS, THOUGHTS, ""),
    "empty": Case(f"\n</think>\n\n{ANSWER}", None),
}
"""Outputs of models whose prompt opens them."""


def _by_template(name: str, turn: str, opening: str, *special: str, **cases: Case) -> Family:
    """A family whose prompt opens the thoughts."""
    return Family(name, _turns(turn, opening), {**_OPENED, **cases}, _TAGS, special)


_ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHTS}"
_CHANNELS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"

FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        "qwen3", _turns(_CHATML, _CHATML_OPENING + _DISABLED), {**_ANY, "disabled": _OFF}, _TAGS, ("<|im_start|>",)
    ),
    "qwq": _by_template("qwq", _CHATML, _CHATML_OPENING + "<think>\n", "<|im_start|>"),
    "deepseek_r1": _by_template(
        "deepseek_r1",
        "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
        "{{ m.content.split('</think>')[-1] }}{% endif %}",
        "<｜Assistant｜><think>\n",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    "gpt_oss": Family(
        "gpt_oss",
        _turns(
            "<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant",
        ),
        {
            "thoughts": Case(_CHANNELS.format(THOUGHTS, ANSWER)),
            "none": Case(f"<|channel|>final<|message|>{ANSWER}", None),
            "unfinished": Case(f"<|channel|>analysis<|message|>{THOUGHTS}", THOUGHTS, ""),
            "twice": Case(
                "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant" + _CHANNELS.format("Check.", ANSWER),
                "Add.\nCheck.",
            ),
            "preamble": Case(
                "<|channel|>commentary<|message|>Let me add. <|end|><|start|>assistant"
                + _CHANNELS.format("Add.", ANSWER),
                "Add.",
                f"Let me add. {ANSWER}",
            ),
            **{
                head: Case(f"{_ANALYSIS}<|end|><|start|>assistant{head}{ANSWER}")
                for head in (
                    "<|channel|>final json<|message|>",
                    "<|channel|>final <|constrain|>json<|message|>",
                    "<|channel|>commentary <|constrain|>json<|message|>",
                    "<|channel|>comment<|message|>",
                    "<|message|>",
                    " ",
                )
            },
            "without a head": Case(f"<|channel|>analysis<|message|>{THOUGHTS}<|end|>{ANSWER}"),
            "without an end": Case(f"<|channel|>analysis<|message|>{THOUGHTS}<|channel|>final<|message|>{ANSWER}"),
            "cut in a head": Case(
                f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|chan", answer=""
            ),
            "a call": Case(
                f"{_ANALYSIS}<|end|><|start|>assistant to=f<|channel|>commentary<|message|>{{}}",
                answer="to=fcommentary{}",
            ),
        },
        (),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    ),
    "gemma4": Family(
        "gemma4",
        _turns(
            "<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n",
            "<|turn>model\n{% if enable_thinking is defined and not enable_thinking %}<|channel>thought\n<channel|>"
            "{% endif %}",
        ),
        {
            "thoughts": Case(f"<|channel>thought\n{THOUGHTS}\n<channel|>{ANSWER}"),
            "none": Case(ANSWER, None),
            "unfinished": Case(f"<|channel>thought\n{THOUGHTS}", THOUGHTS, ""),
            "disabled": _OFF,
        },
        (),
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
    ),
    "glm45": Family(
        "glm45",
        "[gMASK]<sop>" + _turns("<|{{ m.role }}|>\n{{ m.content.split('</think>')[-1] }}", "<|assistant|>" + _DISABLED),
        {**_ANY, "disabled": _OFF},
        _TAGS,
        ("[gMASK]", "<|assistant|>", "<|user|>"),
    ),
    "granite": Family(
        "granite",
        _turns(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            "{% if thinking %}Write <think></think> and <response></response>.{% endif %}"
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        {
            "thoughts": Case(f"<think>{THOUGHTS}</think>\n<response>{ANSWER}</response>"),
            "no response": Case(f"<think>{THOUGHTS}</think>\n{ANSWER}"),
            "unfinished": Case(f"<think>{THOUGHTS}</think><response>{ANSWER}"),
            "none": Case(ANSWER, None),
            "a quoted end": Case(
                f"<think>{THOUGHTS}</think><response>Write </response>. {ANSWER} </response>\n\n",
                answer=f"Write </response>. {ANSWER}",
            ),
            "an answer about tags": Case(
                f"<think>{THOUGHTS}</think>\nUse <response> and </response>", answer="Use <response> and </response>"
            ),
        },
        (),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "granite_sentences": Family(
        "granite_sentences",
        _turns(
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            "{% if thinking %}Write 'Here is my thought process:' and 'Here is my response:'.{% endif %}"
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        {
            "thoughts": Case(f"Here is my thought process:\n\n{THOUGHTS}\n\nHere is my response:\n\n{ANSWER}"),
            "short": Case(f"Here's my thought process: {THOUGHTS} Here's my response: {ANSWER}"),
            "none": Case(f"Here is my view: {ANSWER}", None, f"Here is my view: {ANSWER}"),
        },
        (),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "mistral": Family(
        "mistral",
        _turns("{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}", ""),
        {
            "thoughts": Case(f"[THINK]{THOUGHTS}[/THINK]{ANSWER}"),
            "unfinished": Case(f"[THINK]{THOUGHTS}", THOUGHTS, ""),
            "none": Case(ANSWER, None),
        },
        (),
        ("[INST]", "[/INST]", "[THINK]", "[/THINK]"),
    ),
    "mistral tags": Family(
        "think",
        _turns(
            "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'system' %}Write <think>\n</think>."
            "{% endif %}",
            "",
        ),
        _ANY,
        (),
        ("[INST]", "[/INST]"),
    ),
    "kimi_k2": Family(
        "kimi_k2",
        _turns(
            "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|><think></think>{{ m.content }}<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        _ANY,
        _TAGS,
        ("<|im_assistant|>", "<|im_user|>", "<|im_middle|>"),
    ),
    "kimi_k3": Family(
        "kimi_k3",
        _turns(
            "<|open|>{{ m.role }}<|sep|>{{ m.content }}<|close|>message<|sep|>",
            "{% if thinking is defined %}<|open|>{{ 'think' if thinking else 'response' }}<|sep|>{% endif %}",
        ),
        {
            "thoughts": Case(
                f"<|open|>think<|sep|>{THOUGHTS}<|close|>think<|sep|><|open|>response<|sep|>{ANSWER}"
                "<|close|>response<|sep|><|close|>message<|sep|>"
            ),
            "unfinished": Case(f"<|open|>think<|sep|>{THOUGHTS}", THOUGHTS, ""),
            "cut": Case(f"<|open|>think<|sep|>{THOUGHTS}<|close|>think<|sep|><|open|>response<|sep|>{ANSWER}"),
            "no response": Case(f"<|open|>think<|sep|>{THOUGHTS}<|close|>think<|sep|>{ANSWER}"),
            "none": Case(f"<|open|>response<|sep|>{ANSWER}<|close|>response<|sep|>", None),
            "opened": Case(
                f"{THOUGHTS}<|close|>think<|sep|><|open|>response<|sep|>{ANSWER}<|close|>response<|sep|>",
                settings={"thinking": True},
            ),
            "opened answer": Case(
                f"{ANSWER}<|close|>response<|sep|><|close|>message<|sep|>", None, settings={"thinking": False}
            ),
        },
        (),
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "minimax_m3": Family(
        "minimax_m3",
        _turns("]~b]{{ m.role }}\n{{ m.content }}[e~[\n", "]~b]ai\n"),
        {"thoughts": Case(f"<mm:think>{THOUGHTS}</mm:think>{ANSWER}"), "none": Case(ANSWER, None)},
        ("<mm:think>", "</mm:think>"),
        ("]~b]", "[e~["),
    ),
    "minimax_m2": _by_template(
        "minimax_m2",
        "]~b]{{ m.role }}\n{{ m.content.split('</think>')[-1] }}[e~[\n",
        "]~b]ai\n<think>\n",
        "]~b]",
        "[e~[",
    ),
    "smollm3": Family(
        "smollm3",
        "{% set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' %}"
        "<|im_start|>system\n## Metadata\n\nReasoning Mode: {{ mode }}<|im_end|>\n"
        + _turns(
            _CHATML,
            "{% if '/no_think' in messages[0].content or (enable_thinking is defined and not enable_thinking) %}"
            "<|im_start|>assistant\n<think>\n\n</think>\n{% else %}<|im_start|>assistant\n{% endif %}",
        ),
        {**_ANY, "disabled": _OFF},
        _TAGS,
        ("<|im_start|>",),
    ),
    "nemotron": Family(
        "nemotron",
        _turns(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.role == 'system' %}detailed thinking on"
            "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        _ANY,
        (),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "nemotron nano": _by_template(
        "nemotron",
        "<SPECIAL_10>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<SPECIAL_12>\n",
        "<SPECIAL_10>Assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}"
        "<think>\n{% endif %}",
        "<SPECIAL_10>",
        "<SPECIAL_12>",
        disabled=_OFF,
    ),
    "hunyuan": Family(
        "hunyuan",
        _turns(
            "{% if m.role == 'user' %}{{ m.content }}<|extra_0|>{% else %}"
            "{{ m.content.split('<answer>')[-1].split('</think>')[-1] }}<|eos|>{% endif %}",
            "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}",
        ),
        {
            "thoughts": Case(f"<think>\n{THOUGHTS}\n</think>\n<answer>\n{ANSWER}\n</answer>"),
            "unfinished": Case(f"<think>\n{THOUGHTS}\n</think>\n<answer>\n{ANSWER}"),
            "none": Case(ANSWER, None),
            "disabled": Case(f"<answer>\n{ANSWER}\n</answer>", None, ANSWER, {"enable_thinking": False}),
        },
        (),
        ("<|extra_0|>", "<|eos|>"),
    ),
    "ernie45": _by_template(
        "ernie45",
        "<|im_start|>{{ m.role }}\n{{ m.content.split('<response>')[-1].split('</think>')[-1] }}<|im_end|>\n\n",
        "<|im_start|>assistant\n<think>\n",
        "<|im_start|>",
        wrapped=Case(f"{THOUGHTS}\n</think>\n\n<response>\n{ANSWER}\n</response>\n"),
    ),
    "phi4": Family(
        "phi4",
        _turns(
            "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
        ),
        _ANY,
        _TAGS,
        ("<|im_start|>", "<|im_sep|>"),
    ),
    "exaone": Family(
        "exaone",
        _turns(
            "[|{{ m.role }}|]\n{{ m.content.split('</think>')[-1] }}[|endofturn|]\n",
            "[|assistant|]\n{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}",
        ),
        {
            **{name: one._replace(settings={"enable_thinking": True}) for name, one in _OPENED.items()},
            "default": Case(ANSWER, None),
        },
        _TAGS,
        ("[|assistant|]", "[|user|]", "[|endofturn|]"),
    ),
    "exaone_deep": Family(
        "exaone_deep",
        _turns("[|{{ m.role }}|]{{ m.content.split('</thought>')[-1] }}[|endofturn|]\n", "[|assistant|]<thought>\n"),
        {"thoughts": Case(f"{THOUGHTS}\n</thought>\n\n{ANSWER}"), "unfinished": Case(THOUGHTS, THOUGHTS, "")},
        ("<thought>", "</thought>"),
        ("[|assistant|]", "[|user|]", "[|endofturn|]"),
    ),
    "cohere": Family(
        "cohere",
        _turns(
            "<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        {
            "thoughts": Case(f"<|START_THINKING|>{THOUGHTS}<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>"),
            "unfinished": Case(f"<|START_THINKING|>{THOUGHTS}", THOUGHTS, ""),
        },
        (),
        (
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
    ),
    "seed_oss": Family(
        "seed_oss",
        _turns("<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>", "<seed:bos>assistant\n"),
        {"thoughts": Case(f"<seed:think>{THOUGHTS}</seed:think>{ANSWER}"), "none": Case(ANSWER, None)},
        ("<seed:think>", "</seed:think>"),
        ("<seed:bos>", "<seed:eos>"),
    ),
    "any other": Family(
        "think",
        _turns("{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n", "assistant: "),
        _ANY,
    ),
}
"""By a name of the case; `Family.name` is the one that batchgen gives."""

RESPONSE_TEMPLATES: dict[str, tuple[dict[str, Any], str]] = {
    "tags": (
        {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {"thinking": {"open": "<mind>", "close": "</mind>"}, "content": {"close": "<|im_end|>"}},
        },
        f"<mind>{THOUGHTS}</mind>{ANSWER}",
    ),
    "several": (
        {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {"reasoning_content": {"open": ["<a>", "<b>"], "close": ["</a>", "</b>"]}, "content": {}},
        },
        f"<b>{THOUGHTS}</b>{ANSWER}",
    ),
    "channels": (
        {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "thinking": {"open": "<ch>analysis:", "close": "<end>"},
                "content": {"open": "<ch>final:", "close": "<end>"},
            },
        },
        f"<ch>analysis:{THOUGHTS}<end><|im_start|>assistant\n<ch>final:{ANSWER}<end>",
    ),
}
"""Response templates of the library's form, each with an output of `THOUGHTS` and `ANSWER`."""
