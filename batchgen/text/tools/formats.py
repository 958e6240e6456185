"""The formats of calls, by the names that the option `--tool-parser` has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from batchgen.text.tools.calls import Format, Function, Schemas, Span, ToolCall, ToolFormat
from batchgen.text.tools.json_calls import JsonCalls, NamedCalls
from batchgen.text.tools.keyed_calls import GemmaCalls, PythonCalls, TagCalls


@dataclass(frozen=True)
class FirstOf(ToolFormat):
    """Formats of one family, of which models write the first; the others are read, too."""

    formats: tuple[ToolFormat, ...] = ()

    def find(self, text: str, schemas: Schemas) -> list[Span]:
        """See `ToolFormat.find`."""
        found = [each.spans(text, schemas) for each in self.formats]
        with_calls = (spans for spans in found if any(span.calls for span in spans))
        return next(with_calls, next(filter(None, found), []))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `ToolFormat.write`."""
        return self.formats[0].write(calls)

    def tags(self, functions: Sequence[Function]) -> list[Format]:
        """See `ToolFormat.tags`."""
        return self.formats[0].tags(functions)

    def grammar(self, functions: Sequence[Function], *, parallel: bool) -> Format:
        """See `ToolFormat.grammar`."""
        return self.formats[0].grammar(functions, parallel=parallel)


_HERMES: Final = JsonCalls(begins=("<tool_call>\n", "<tool_call>"), end="\n</tool_call>", separator="\n")
_FUNCTION_TAGS: Final = TagCalls(
    needs="arguments",
    begin="<tool_call>\n<function={}>\n",
    key="<parameter={}>\n",
    close="\n</parameter>\n",
    end="</function>\n</tool_call>",
    separator="\n",
    pattern=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
    opening=r"<parameter=(?P<key>[^>\n]+)>",
    finish=r"</function>(?:\s*</tool_call>)?|</tool_call>",
    mark="<tool_call>|<function=",
    padded=True,
)
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V31: Final = NamedCalls(
    mark="<｜tool▁calls?▁begin｜>",
    needs="functions",
    around=_DEEPSEEK,
    begin="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    pattern=r"<｜tool▁call▁begin｜>(?:(?P<name>[^<\n]+)<｜tool▁sep｜>(?!\s*[\w.-]+\s*```)|(?P<near>[\w.:/-]+)\s*(?=\{))",
)
_DEEPSEEK_V3: Final = NamedCalls(
    mark="<｜tool▁calls?▁begin｜>",
    needs="functions",
    around=_DEEPSEEK,
    separator="\n",
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    pattern=r"<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>\s*(?:(?P<name>[^<\s]+)\s*```json|(?P<near>[\w.:/-]+)\s*(?=\{))",
    other_ends=("<｜tool▁call▁end｜>",),
)
_MISTRAL_LIST: Final = JsonCalls(begins=("[TOOL_CALLS]",), listed=True, id_length=9)
_MISTRAL_NAMED: Final = NamedCalls(
    id_length=9,
    mark=r"\[TOOL_CALLS\]",
    begin="[TOOL_CALLS]",
    middle="[ARGS]",
    pattern=r"\[TOOL_CALLS\]\s*(?P<name>[\w.:/-]+)(?:\[CALL_ID\](?P<id>[^\[]*))?(?:\s*\[ARGS\])?\s*(?=\{)",
)
_GLM45: Final = TagCalls(
    ends=("<|observation|>",),
    needs="arguments",
    begin="<tool_call>{}\n",
    key="<arg_key>{}</arg_key>\n<arg_value>",
    close="</arg_value>\n",
    end="</tool_call>",
    separator="\n",
    pattern=r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<arg_key>|</tool_call>)",
    opening=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
    finish=r"</tool_call>",
    mark="<tool_call>",
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
    "qwen3_coder": FirstOf(needs="arguments", formats=(_FUNCTION_TAGS, _HERMES)),
    "llama3_json": FirstOf(ends=("<|eom_id|>",), needs="functions", formats=(_LLAMA_JSON, _PYTHONIC)),
    "pythonic": FirstOf(ends=("<|eom_id|>", "<|eom|>"), needs="functions", formats=(_PYTHONIC, _LLAMA_JSON)),
    "mistral": FirstOf(id_length=9, formats=(_MISTRAL_LIST, _MISTRAL_NAMED)),
    "mistral_v11": FirstOf(id_length=9, formats=(_MISTRAL_NAMED, _MISTRAL_LIST)),
    "deepseek_v3": FirstOf(needs="functions", around=_DEEPSEEK, formats=(_DEEPSEEK_V3, _DEEPSEEK_V31)),
    "deepseek_v31": FirstOf(needs="functions", around=_DEEPSEEK, formats=(_DEEPSEEK_V31, _DEEPSEEK_V3)),
    "gpt_oss": NamedCalls(
        ends=("<|call|>",),
        needs="functions",
        mark=r"(?:^\s?|<\|(?:start|channel)\|>[^<]{0,64}?)\bto=",
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        pattern=r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w{1,20})?\s{0,2}to=(?:functions\.(?P<name>[\w.-]+)|(?P<near>[\w.:/-]+))"
        r"(?:<\|channel\|>\w{1,20})?\s{0,2}(?:<\|constrain\|>)?\s{0,2}\w{0,20}\s{0,2}<\|message\|>",
    ),
    "glm45": _GLM45,
    "glm47": replace(
        _GLM45, begin="<tool_call>{}", key="<arg_key>{}</arg_key><arg_value>", close="</arg_value>", separator=""
    ),
    "kimi_k2": NamedCalls(
        needs="functions",
        mark=r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>functions.",
        middle="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        counted=True,
        pattern=r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w./-]+):\d+|(?P<near>[^\s<]{0,128}))\s*"
        r"<\|tool_call_argument_begin\|>",
    ),
    "gemma4": GemmaCalls(
        ends=("<|tool_response>",), mark=r"<\|tool_call>", begin="<|tool_call>call:", end="<tool_call|>", quote='<|"|>'
    ),
    "functiongemma": GemmaCalls(
        ends=("<start_function_response>",),
        mark="<start_function_call>",
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
        needs="arguments",
        around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        begin='<invoke name="{}">\n',
        key='<parameter name="{}">',
        close="</parameter>\n",
        end="</invoke>\n",
        pattern=r'<invoke name="?(?P<name>[^">\n]+)"?>',
        opening=r'<parameter name="?(?P<key>[^">\n]+)"?>',
        finish=r"</invoke>",
        mark="<minimax:tool_call>|<invoke ",
    ),
    "deepseek_v32": TagCalls(
        around=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        needs="arguments",
        begin='<｜DSML｜invoke name="{}">\n',
        key='<｜DSML｜parameter name="{}" string="{string}">',
        close="</｜DSML｜parameter>\n",
        end="</｜DSML｜invoke>\n",
        pattern=r'<｜DSML｜invoke name="(?P<name>[^">\n]+)">',
        opening=r'<｜DSML｜parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">',
        finish=r"</｜DSML｜invoke>",
        mark="<｜DSML｜",
    ),
    "hunyuan": _listed("<tool_calls>", "</tool_calls>"),
    "seed_oss": TagCalls(
        needs="arguments",
        begin="<seed:tool_call>\n<function={}>\n",
        key="<parameter={}>",
        close="</parameter>\n",
        end="</function>\n</seed:tool_call>",
        separator="\n",
        pattern=r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
        opening=r"<parameter=(?P<key>[^>\n]+)>",
        finish=r"</function>(?:\s*</seed:tool_call>)?|</seed:tool_call>",
        mark="<seed:tool_call>|<function=",
    ),
    "longcat": JsonCalls(
        begins=("<longcat_tool_call>\n", "<longcat_tool_call>"), end="\n</longcat_tool_call>", separator="\n"
    ),
    "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "internlm": JsonCalls(
        mark=r"<\|action_start\|>",
        begins=("<|action_start|><|plugin|>\n", "<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
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
    "command_r": JsonCalls(
        mark="Action: ?```json",
        begins=("Action: ```json\n", "Action:```json"),
        end="\n```",
        listed=True,
        keys=("tool_name", "parameters"),
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
