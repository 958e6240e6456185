"""The formats of calls, by the names that the option `--tool-parser` has for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from batchgen.text.calls import ToolFormat
from batchgen.text.tools.json_calls import JsonCalls, NamedCalls
from batchgen.text.tools.keyed_calls import GemmaCalls, PythonCalls, TagCalls

_HERMES: Final = JsonCalls(begins=("<tool_call>\n", "<tool_call>"), end="\n</tool_call>", separator="\n")
_FUNCTION_TAGS: Final = TagCalls(
    mark="<tool_call>|<function=",
    wrap=("<tool_call>\n", "\n</tool_call>"),
    begin="<function={}>\n",
    key="<parameter={}>\n",
    close="\n</parameter>\n",
    end="</function>",
    separator="\n",
    padded=True,
)
_M3: Final = "]<]minimax[>["
"""In front of each tag of MiniMax M3."""
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V31: Final = NamedCalls(
    needs="functions",
    around=_DEEPSEEK,
    begin="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    other_ends=("```<｜tool▁call▁end｜>", "```"),
    pattern=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>\s*(?=[^\s{]))?"
    r"(?:(?P<name>[^<\s]+)(?:<｜tool▁sep｜>\s*(?:```json)?|\s*```json)|(?P<near>[\w.:/-]+)\s*(?=\{))",
)
_MISTRAL_LIST: Final = JsonCalls(begins=("[TOOL_CALLS]",), listed=True, id_length=9)
_MISTRAL_NAMED: Final = NamedCalls(
    id_length=9,
    begin="[TOOL_CALLS]",
    middle="[ARGS]",
    pattern=r"\[TOOL_CALLS\]\s*(?P<name>[\w.:/-]+)(?:\[CALL_ID\](?P<id>[^\[]*))?(?:\s*\[ARGS\])?\s*(?=\{)",
)
_GLM45: Final = TagCalls(
    ends=("<|observation|>",),
    begin="<tool_call>{}\n",
    key="<arg_key>{}</arg_key>\n<arg_value>",
    close="</arg_value>\n",
    end="</tool_call>",
    separator="\n",
)
_DSML: Final = TagCalls(
    mark="<｜DSML｜",
    around=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    begin='<｜DSML｜invoke name="{}">\n',
    key='<｜DSML｜parameter name="{}" string="{string}">',
    close="</｜DSML｜parameter>\n",
    end="</｜DSML｜invoke>\n",
)
_LLAMA_JSON: Final = JsonCalls(begins=("<|python_tag|>",), separator="; ", keys=("name", "parameters"), whole=True)
_PYTHONIC: Final = PythonCalls(
    around=("[", "]"),
    separator=", ",
    pattern=r"(?:<\|python_start\|>)?\s*\[|```(?:tool_code|python)\s*\[?",
    finish=r"\s*(?:\]\s*)?(?:<\|python_end\|>|```)?",
    whole=True,
    mark=r"<\|python_start\|>",
)


def _listed(begin: str, end: str = "", *others: str, keys: tuple[str, str] = ("name", "arguments")) -> JsonCalls:
    return JsonCalls(begins=(begin, *others), end=end, listed=True, keys=keys)


FORMATS: Final[dict[str, ToolFormat]] = {
    "hermes": _HERMES,
    "qwen3_coder": replace(_FUNCTION_TAGS, others=(_HERMES,)),
    "llama3_json": replace(_LLAMA_JSON, ends=("<|eom_id|>",), needs="functions", others=(_PYTHONIC,)),
    "pythonic": replace(_PYTHONIC, ends=("<|eom_id|>", "<|eom|>"), needs="functions", others=(_LLAMA_JSON,)),
    "mistral": replace(_MISTRAL_LIST, others=(_MISTRAL_NAMED,)),
    "mistral_v11": replace(_MISTRAL_NAMED, others=(_MISTRAL_LIST,)),
    "deepseek_v3": replace(
        _DEEPSEEK_V31,
        separator="\n",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        other_ends=("<｜tool▁call▁end｜>", "```"),
    ),
    "deepseek_v31": _DEEPSEEK_V31,
    "gpt_oss": NamedCalls(
        ends=("<|call|>",),
        needs="functions",
        mark=r"(?:^\s?|<\|(?:start|channel)\|>[^<]{0,64}?)\bto=",
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        pattern=r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w{1,20})?\s{0,2}"
        r"to=(?:functions\.(?P<name>[\w.-]+)|(?P<near>[\w.:/-]+))"
        r"(?:<\|channel\|>\w{1,20})?\s{0,2}(?:<\|constrain\|>)?\s{0,2}\w{0,20}\s{0,2}<\|message\|>",
    ),
    "glm45": _GLM45,
    "glm47": replace(
        _GLM45, begin="<tool_call>{}", key="<arg_key>{}</arg_key><arg_value>", close="</arg_value>", separator=""
    ),
    "kimi_k2": NamedCalls(
        needs="functions",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>functions.",
        middle="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        counted=True,
        pattern=r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w./-]+):\d+|(?P<near>[^\s<]{0,128}))\s*"
        r"<\|tool_call_argument_begin\|>",
    ),
    "gemma4": GemmaCalls(ends=("<|tool_response>",), begin="<|tool_call>call:", end="<tool_call|>", quote='<|"|>'),
    "functiongemma": GemmaCalls(
        ends=("<start_function_response>",),
        begin="<start_function_call>call:",
        end="<end_function_call>",
        quote="<escape>",
    ),
    "granite": _listed("<|tool_call|>", "", "<tool_call>", "<function_call>"),
    "phi4": _listed("<|tool_call|>", "<|/tool_call|>", "functools"),
    "xlam": JsonCalls(
        needs="functions",
        begins=("[TOOL_CALLS]", "<tool_call>", "```json"),
        end="</tool_call>",
        listed=True,
        whole=True,
    ),
    "minimax_m2": TagCalls(
        around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        begin='<invoke name="{}">\n',
        key='<parameter name="{}">',
        close="</parameter>\n",
        end="</invoke>\n",
    ),
    "minimax_m3": TagCalls(
        around=(f"{_M3}<tool_call>\n", f"\n{_M3}</tool_call>"),
        separator="\n",
        begin=_M3 + '<invoke name="{}">',
        key=_M3 + "<{}>",
        close=_M3 + "</{}>",
        end=f"{_M3}</invoke>",
    ),
    "deepseek_v32": _DSML,
    "deepseek_v4": replace(_DSML, around=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>")),
    "kimi_k3": TagCalls(
        mark=r"<\|open\|>(?:tools|call|argument)\b",
        around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        begin='<|open|>call tool="{}" index="{number}"<|sep|>',
        key='<|open|>argument key="{}" type="{type}"<|sep|>',
        close="<|close|>argument<|sep|>",
        end="<|close|>call<|sep|>",
        extra=r"(?:<\|close\|>response<\|sep\|>\s*)?(?:<\|open\|>tools<\|sep\|>\s*)?",
    ),
    "step3": TagCalls(
        mark="<｜tool_calls?_begin｜>|<steptml:",
        around=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
        wrap=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>\n"),
        begin='<steptml:invoke name="{}">\n',
        key='<steptml:parameter name="{}">',
        close="</steptml:parameter>\n",
        end="</steptml:invoke>",
    ),
    "functionary": NamedCalls(
        begin="<function=",
        middle=">",
        end="</function>",
        pattern=r"<function=(?P<name>[\w.:/-]+)>",
    ),
    "hunyuan": _listed("<tool_calls>", "</tool_calls>"),
    "seed_oss": TagCalls(
        mark="<seed:tool_call>|<function=",
        wrap=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        begin="<function={}>\n",
        key="<parameter={}>",
        close="</parameter>\n",
        end="</function>",
        separator="\n",
    ),
    "longcat": JsonCalls(
        begins=("<longcat_tool_call>\n", "<longcat_tool_call>"), end="\n</longcat_tool_call>", separator="\n"
    ),
    "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "internlm": JsonCalls(
        begins=tuple(f"<|action_start|>{each}" for each in ("<|plugin|>\n", "<|plugin|>", " <|plugin|>", "")),
        end="<|action_end|>",
        keys=("name", "parameters"),
        separator="\n",
    ),
    "cohere": JsonCalls(
        begins=("<|START_ACTION|>",),
        end="<|END_ACTION|>",
        listed=True,
        keys=("tool_name", "parameters"),
        numbered="tool_call_id",
    ),
    "command_r": _listed(
        "Action: ```json\n", "\n```", "Action: ```json", "Action:```json", keys=("tool_name", "parameters")
    ),
    "lfm2": PythonCalls(
        around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        separator=", ",
        pattern=r"<\|tool_call_start\|>\s*\[?",
        finish=r"\s*(?:\]\s*)?<\|tool_call_end\|>",
    ),
    "olmo3": PythonCalls(
        around=("<function_calls>\n", "\n</function_calls>"),
        separator="\n",
        pattern=r"<function_calls>\s*\[?",
        finish=r"\s*(?:\]\s*)?</function_calls>",
    ),
}
"""Name -> format. Families that write alike share one."""
