"""Families of models that call tools: their chat templates, reduced to what matters, and transcripts of their calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 5},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                    "unit": {"enum": ["c", "f"]},
                    "dates": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": None}},
]
Call = tuple[str, dict[str, Any]]
PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
OSLO: Call = ("get_weather", {"city": "Oslo", "days": 1, "unit": "c", "dates": [True]})
NOW: Call = ("now", {})
P, O = '{"city": "Paris", "days": 3}', '{"city": "Oslo", "days": 1, "unit": "c", "dates": [true]}'  # noqa: E741


class Case(NamedTuple):
    """An output behind the prompt."""

    output: str
    calls: tuple[Call, ...] = (PARIS,)
    text: str = ""
    error: str | None = None
    """Words of the error."""


class Family(NamedTuple):
    """What a model folder of the family has, and what its models write."""

    name: str
    template: str
    cases: Mapping[str, Case]
    added: tuple[str, ...] = ()
    """Added tokens that are text."""
    special: tuple[str, ...] = ()
    """Special tokens."""


def template_of(turn: str, calls: str, opening: str = "") -> str:
    """A template that names tools, and writes the calls of a message `m`, where it has some, as `calls` does."""
    turn = turn.replace("{{ m.content }}", f"{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}")
    return (
        f"{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}{turn}{{% endfor %}}{opening}"
    )


def _each(call: str, between: str = "") -> str:
    """Each call of `m`, with its name for NAME and the JSON of its arguments for VALUES."""
    call = call.replace("NAME", "{{ c.function.name }}").replace("VALUES", "{{ c.function.arguments | tojson }}")
    between = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for c in m.tool_calls %}}{call}{between}{{% endfor %}}"


def json_calls(begin: str, end: str, keys: tuple[str, str] = ("name", "arguments"), between: str = "") -> str:
    return _each(f'{begin}{{"{keys[0]}": "NAME", "{keys[1]}": VALUES}}{end}', between)


def _tags(begin: str, key: str, close: str, end: str, around: tuple[str, str] = ("", "")) -> str:
    value = (
        "{% for k, v in c.function.arguments.items() %}" + key.format("{{ k }}") + "{{ v }}" + close + "{% endfor %}"
    )
    return around[0] + _each(begin.format("NAME") + value + end) + around[1]


def _python(begin: str, end: str, between: str = ", ") -> str:
    value = (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
    )
    return begin + _each(f"NAME({value})", between) + end


def _gemma(begin: str, end: str, quote: str) -> str:
    value = f"{{% for k, v in c.function.arguments.items() %}}{{{{ k }}}}:{quote}{{{{ v }}}}{quote}{{% endfor %}}"
    return _each(f"{begin}NAME{{{{ '{{' }}}}{value}{{{{ '}}' }}}}{end}")


def _dsml(around: str) -> str:
    """The markers are joined from a variable, as in the real templates."""
    return "{% set d = '｜DSML｜' %}" + _tags(
        '<{{{{ d }}}}invoke name="{}">\n', '<{{{{ d }}}}parameter name="{}" string="true">',
        "</{{ d }}parameter>\n", "</{{ d }}invoke>\n", (f"<{{{{ d }}}}{around}>\n", f"</{{{{ d }}}}{around}>"),
    )  # fmt: skip


_M2 = ('<invoke name="{}">', '<parameter name="{}">', "</parameter>", "</invoke>\n")
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CHATML_OPENING = "<|im_start|>assistant\n"


def _ofjson_calls(begin: str, end: str = "", keys: tuple[str, str] = ("name", "arguments"), between: str = "\n") -> Any:
    """Transcripts of calls that are JSON objects."""

    def call(name: str, arguments: str) -> str:
        return f'{begin}{{"{keys[0]}": "{name}", "{keys[1]}": {arguments}}}{end}'

    cut = call("get_weather", P).partition("ris")[0]
    return {
        "one": Case(call("get_weather", P)),
        "two": Case(between.join([call("get_weather", P), call("now", "{}")]), (PARIS, NOW)),
        "text": Case(f"I look.\n{call('get_weather', P)}", text="I look."),
        "none": Case("It rains.", (), "It rains."),
        "cut": Case(cut, (), cut, "cannot be read"),
        "half": Case(
            between.join([call("now", "{}"), call("get_weather", "{,}")]),
            (NOW,),
            call("get_weather", "{,}").rstrip(),
            "cannot be read",
        ),
    }


def _of_lists(begin: str, end: str = "", keys: tuple[str, str] = ("name", "arguments")) -> Any:
    """Transcripts of calls in a JSON list."""
    one = f'{{"{keys[0]}": "get_weather", "{keys[1]}": {P}}}'
    now = f'{{"{keys[0]}": "now", "{keys[1]}": {{}}}}'
    return {
        "one": Case(f"{begin}[{one}]{end}"),
        "two": Case(f"{begin}[{one}, {now}]{end}", (PARIS, NOW)),
        "lines": Case(f"{begin}[\n    {one},\n    {now}\n]{end}", (PARIS, NOW)),
        "text": Case(f"I look. {begin}[{one}]{end}", text="I look."),
        "none": Case("It rains.", (), "It rains."),
        "cut": Case(f"{begin}[{one}, {{", (), f"{begin}[{one}, {{", "cannot be read"),
    }


def _of_tags(begin: str, key: str, close: str, end: str, name: str = "get_weather", mark: str = "") -> Any:
    """Transcripts of calls with a tag for each argument; `key` and `begin` have `{}` for a name, `mark` begins them."""

    def call(*pairs: tuple[str, str], name: str = name) -> str:
        return (
            begin.format(name)
            + "".join(f"{key.format(each)}{value}{close.format(each)}" for each, value in pairs)
            + end
        )

    def error(output: str) -> Case:
        return Case(output, (), output, "")

    paris, days, quoted = ("city", "Paris"), ("days", "3"), f"a {key.format('days').strip()} b"
    one, ends = call(paris, days), [close.strip().format(each) for each in ("city", "days")]
    first, last = one.find(ends[0]), one.rfind(ends[1])
    other = call(("city", f"a\n{key.format('other')}b"), days)
    left_out = one[:last] + one[last + len(ends[1]) :]
    return {
        "one": Case(one),
        "two": Case(f"I look.\n{one}{call(name='now')}", (PARIS, NOW), "I look."),
        "doubled": Case(one + one, (PARIS, PARIS)),
        "none": Case("It rains.", (), "It rains."),
        "a close left out": Case(one[:first] + one[first + len(ends[0]) :]),
        "the last close left out": Case(left_out),
        "both left out": Case(left_out[:first] + left_out[first + len(ends[0]) :]),
        "a close left out, and a call": Case(
            left_out + call(("city", "Oslo"), name="now"), (PARIS, ("now", {"city": "Oslo"}))
        ),
        "a doubled close": error(one[:first] + ends[0] + one[first:]),
        "a doubled opening": error(call(("city", f"{key.format('city')}Paris"), days)),
        "JSON": Case(f"{begin.format('get_weather')}{P}{end}"),
        "an empty value": Case(call(("city", ""), days), (("get_weather", {"city": "", "days": 3}),)),
        "text behind a value": error(one[:first] + ends[0] + "and" + one[first + len(ends[0]) :]),
        "a mark in a value": Case(call(("city", quoted), days), (("get_weather", {"city": quoted, "days": 3}),)),
        "a mark in a last value": Case(call(days, ("city", quoted)), (("get_weather", {"city": quoted, "days": 3}),)),
        "what may be an argument": error(other if "{}" not in close else other.replace(ends[0], "", 1)),
        "cut in a value": error(one[: one.find("ris")]),
        "cut behind a value": error(one[: first + len(ends[0])]),
        "a mark alone": error(f"The mark {mark} begins a call."),
        "untyped": Case(
            call(*((f"a{number}", text) for number, text in enumerate(UNTYPED)), name="now"),
            (("now", {f"a{number}": value for number, value in enumerate(UNTYPED.values())}),),
        ),
        "typed": Case(call(paris, ("days", "007")), (("get_weather", {"city": "Paris", "days": 7}),)),
    }


UNTYPED = {
    "00123": "00123", "007": "007", "1_000": "1_000", "0x1F": "0x1F", "+5": "+5", "-01": "-01", "1.2.3": "1.2.3",
    "12": 12, "-1.5": -1.5, "1e3": 1000.0, "0": 0, "true": True, "[1, 'a']": [1, "a"], "[007]": "[007]",
}  # fmt: skip
"""Texts of arguments whose type is not known, and their values: what is neither JSON nor Python is a string."""


def _without_text_of(cases: Any, special: tuple[str, ...]) -> Any:
    """The same cases with texts as they are where markers are special tokens, which the text leaves out."""
    found = {}
    for name, case in cases.items():
        text = case.text
        for marker in special:
            text = text.replace(marker, "")
        found[name] = case._replace(text=text)
    return found


_XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
_PARIS_XML = _XML.format("get_weather", "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n")
_OSLO_XML = _XML.format(
    "get_weather",
    "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n1\n</parameter>\n<parameter=unit>\nc\n</parameter>\n"
    "<parameter=dates>\n[true]\n</parameter>\n",
)
_DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_DS_TURN = "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}{% endif %}"
_DS3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_DS31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_K = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
_MINIMAX = (
    '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n'
)


def _of_dsml(around: str) -> Any:
    """Transcripts of DeepSeek V3.2 and V4; each argument says whether it is a string."""
    cases = _of_tags(
        f'<｜DSML｜{around}>\n<｜DSML｜invoke name="{{}}">\n', '<｜DSML｜parameter name="{}" string="false">',
        "</｜DSML｜parameter>\n", f"</｜DSML｜invoke>\n</｜DSML｜{around}>", mark="<｜DSML｜invoke",
    )  # fmt: skip
    text = cases["one"].output.replace('"days" string="false"', '"days" string="true"')
    return {**cases, "a string": Case(text, (("get_weather", {"city": "Paris", "days": "3"}),))}


_OSS = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + P
_THOUGHTS = "<|channel|>analysis<|message|>I call get_weather.<|end|><|start|>assistant"
_GRANITE_TURN = "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
_LLAMA_TURN = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
_PLAIN = "{{ m.role }}: {{ m.content }}\n"

FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        "hermes",
        template_of(_CHATML, json_calls("\n<tool_call>\n", "\n</tool_call>"), _CHATML_OPENING),
        _ofjson_calls("<tool_call>\n", "\n</tool_call>"),
    ),
    "qwen3": Family(
        "hermes",
        template_of(
            _CHATML,
            json_calls("\n<tool_call>\n", "\n</tool_call>"),
            _CHATML_OPENING + "{{ '' if enable_thinking }}",
        ),
        {
            **_ofjson_calls("<tool_call>\n", "\n</tool_call>"),
            "thoughts": Case(
                "<think>\nI write <tool_call>.\n</think>\n\n<tool_call>\n"
                f'{{"name": "get_weather", "arguments": {P}}}\n</tool_call>'
            ),
            "unended": Case(f'<tool_call>\n{{"name": "get_weather", "arguments": {P}}}'),
            "as text": Case(
                '<tool_call>{"name": "get_weather", '
                '"arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>'
            ),
            "text behind the arguments": Case(
                '<tool_call>{"name": "now", "arguments": "{} is it"}</tool_call>',
                (),
                '<tool_call>{"name": "now", "arguments": "{} is it"}</tool_call>',
                "follows the arguments",
            ),
            "quoted": Case(
                "The tag <tool_call> begins a call.", (), "The tag <tool_call> begins a call.", "cannot be read"
            ),
            "no name": Case(
                '<tool_call>{"arguments": {}}</tool_call>', (), '<tool_call>{"arguments": {}}</tool_call>', "`name`"
            ),
            "no key": Case(
                '<tool_call>{"name": "now", "args": {"a": 1}}</tool_call>',
                (),
                '<tool_call>{"name": "now", "args": {"a": 1}}</tool_call>',
                "`arguments` is needed",
            ),
            "only a name": Case('<tool_call>{"name": "now", "id": "a"}</tool_call>', (NOW,)),
            "a list": Case(
                '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
                (),
                '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
                "not an object",
            ),
            "not a number": Case(
                '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
                (),
                '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
                "NaN",
            ),
        },
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "smollm3": Family(
        "hermes",
        template_of(_CHATML, json_calls("<tool_call>", "</tool_call>"), _CHATML_OPENING),
        _ofjson_calls("<tool_call>", "</tool_call>"),
    ),
    "ernie 4.5": Family(
        "hermes",
        template_of(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<response>\n{{ m.content }}\n</response>\n"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
            json_calls("\n<tool_call>\n", "\n</tool_call>\n"),
            _CHATML_OPENING + "{% if enable_thinking %}<think>\n{% endif %}",
        ),
        _ofjson_calls("<tool_call>\n", "\n</tool_call>\n", between=""),
    ),
    "exaone 4": Family(
        "hermes",
        template_of(
            "[|{{ m.role }}|]\n{{ m.content }}[|endofturn|]\n",
            json_calls("<tool_call>", "</tool_call>\n"),
            "[|assistant|]\n",
        ),
        _ofjson_calls("<tool_call>", "</tool_call>"),
    ),
    "granite 4": Family(
        "hermes",
        template_of(_GRANITE_TURN, json_calls("<tool_call>\n", "\n</tool_call>\n")),
        _ofjson_calls("<tool_call>\n", "\n</tool_call>"),
    ),
    "qwen3 coder": Family(
        "qwen3_coder",
        template_of(
            _CHATML,
            _tags("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
            _CHATML_OPENING,
        ),
        {
            **_of_tags(
                "<tool_call>\n<function={}>\n",
                "<parameter={}>\n",
                "\n</parameter>\n",
                "</function>\n</tool_call>",
                mark="<tool_call>",
            ),
            "all types": Case(f"I look.\n\n{_PARIS_XML}\n{_OSLO_XML}", (PARIS, OSLO), "I look."),
            "a close in a value": Case(
                _PARIS_XML.replace("Paris", "x </parameter>"),
                (("get_weather", {"city": "x </parameter>", "days": 3}),),
            ),
            "an end left out": Case(_PARIS_XML.replace("</function>\n", "")),
            "one line, a close left out": Case(
                "<tool_call><function=get_weather><parameter=city>Paris<parameter=days>3</parameter></function>"
                "</tool_call>"
            ),
            "one line": Case(
                "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter>"
                "</function></tool_call>"
            ),
            "without a tag": Case(_PARIS_XML.removeprefix("<tool_call>\n")),
            "hermes": Case(f'<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n</tool_call>'),
        },
    ),
    "llama 3.1": Family(
        "llama3_json",
        template_of(_LLAMA_TURN, json_calls("", "", ("name", "parameters"))),
        {
            "one": Case(f'{{"name": "get_weather", "parameters": {P}}}'),
            "two": Case(
                f'{{"name": "get_weather", "parameters": {P}}}; {{"name": "now", "parameters": {{}}}}', (PARIS, NOW)
            ),
            "tag": Case(f'<|python_tag|>{{"name": "get_weather", "parameters": {P}}}'),
            "function": Case(f'{{"type": "function", "name": "get_weather", "parameters": {P}}}'),
            "an answer": Case('{"name": "Bob", "age": 3}', (), '{"name": "Bob", "age": 3}'),
            "python": Case("[get_weather(city='Paris', days=3)]"),
            "text": Case("It rains.", (), "It rains."),
            "cut": Case(
                '{"name": "get_weather", "parameters": {"ci',
                (),
                '{"name": "get_weather", "parameters": {"ci',
                "cannot be read",
            ),
            "text behind": Case(
                '{"name": "now", "parameters": {}} is it', (), '{"name": "now", "parameters": {}} is it', "follows"
            ),
        },
        (),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>"),
    ),
    "llama 4": Family(
        "pythonic",
        template_of(
            "<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>",
            _python("<|python_start|>[", "]<|python_end|>"),
        ),
        {
            "one": Case("[get_weather(city='Paris', days=3)]"),
            "two": Case('[get_weather(city="Oslo", days=1, unit="c", dates=[True]), now()]', (OSLO, NOW)),
            "tags": Case("<|python_start|>[get_weather(city='Paris', days=3)]<|python_end|>"),
            "escapes": Case(
                "[get_weather(city='P\\'a\\n\\u00e9', days=-1.5e3)]",
                (("get_weather", {"city": "P'a\né", "days": -1500.0}),),
            ),
            "nested": Case("[now(a={'b': [None, False, (1, 2)]})]", (("now", {"a": {"b": [None, False, [1, 2]]}}),)),
            "an answer": Case("[1] says so", (), "[1] says so"),
            "other": Case("[print(a=1)]", (), "[print(a=1)]"),
            "cut": Case("[get_weather(city='Pa", (), "[get_weather(city='Pa", "not ended"),
            "twice": Case("[now(a=1, a=2)]", (), "[now(a=1, a=2)]", "given twice"),
            "code": Case("[now(a=open('x'))]", (), "[now(a=open('x'))]", "a value is missing"),
        },
        (),
        ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
    ),
    "gemma 3": Family(
        "pythonic",
        template_of("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n", _python("[", "]")),
        {
            "list": Case("[get_weather(city='Paris', days=3)]"),
            "block": Case("```tool_code\nget_weather(city='Paris', days=3)\n```"),
        },
    ),
    "mistral v3": Family(
        "mistral",
        template_of(
            "[INST]{{ m.content }}[/INST]",
            "[TOOL_CALLS] [" + _each('{"name": "NAME", "arguments": VALUES, "id": "{{ c.id }}"}', ", ") + "]",
        ),
        {
            **_of_lists("[TOOL_CALLS]"),
            "ids": Case(f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {P}, "id": "abcdefghi"}}]'),
        },
        (),
        ("[INST]", "[/INST]", "[TOOL_CALLS]"),
    ),
    "mistral v11": Family(
        "mistral_v11",
        template_of("[INST]{{ m.content }}[/INST]", _each("[TOOL_CALLS]NAME[CALL_ID]{{ c.id }}[ARGS]VALUES")),
        {
            "one": Case(f"[TOOL_CALLS]get_weather[ARGS]{P}"),
            "two": Case(f"[TOOL_CALLS]get_weather[ARGS]{P}[TOOL_CALLS]now[ARGS]{{}}", (PARIS, NOW)),
            "ids": Case(f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{P}"),
            "without a marker": Case(f"[TOOL_CALLS]get_weather{P}"),
            "text": Case(f"I look.[TOOL_CALLS]get_weather[ARGS]{P}", text="I look."),
            "list": Case(f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {P}}}]'),
            "thoughts": Case(f"[THINK]I call.[/THINK][TOOL_CALLS]get_weather[ARGS]{P}"),
            "cut": Case("[TOOL_CALLS]get_weather[ARGS]{", (), "get_weather{", "cannot be read"),
        },
        (),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "deepseek v3": Family(
        "deepseek_v3",
        template_of(_DS_TURN, _DS[0] + _each(_DS3.format("NAME", "VALUES"), "\n") + _DS[4], "<｜Assistant｜>"),
        {
            "one": Case(f"{_DS[0]}{_DS3.format('get_weather', P)}{_DS[4]}"),
            "two": Case(
                f"I look.\n{_DS[0]}{_DS3.format('get_weather', P)}\n{_DS3.format('now', '{}')}{_DS[4]}",
                (PARIS, NOW),
                "I look.",
            ),
            "unended": Case(f"{_DS[0]}{_DS3.format('get_weather', P)}"),
            "none": Case("It rains.", (), "It rains."),
        },
        (),
        ("<｜User｜>", "<｜Assistant｜>", *_DS),
    ),
    "deepseek v3.1": Family(
        "deepseek_v31",
        template_of(_DS_TURN, _DS[0] + _each(_DS31.format("NAME", "VALUES")) + _DS[4], "<｜Assistant｜></think>"),
        {
            "one": Case(f"{_DS[0]}{_DS31.format('get_weather', P)}{_DS[4]}"),
            "two": Case(
                f"I look.{_DS[0]}{_DS31.format('get_weather', P)}{_DS31.format('now', '{}')}{_DS[4]}",
                (PARIS, NOW),
                "I look.",
            ),
            "half": Case(
                f"{_DS[0]}{_DS31.format('now', '{}')}{_DS31.format('get_weather', '[]')}{_DS[4]}",
                (NOW,),
                "get_weather[]",
                "not an object",
            ),
            "without a separator": Case(f"{_DS[0]}{_DS[1]}get_weather{P}{_DS[3]}{_DS[4]}"),
            "as v3, without a fence": Case(f"{_DS[0]}{_DS[1]}function{_DS[2]}get_weather\n{P}{_DS[3]}{_DS[4]}"),
            "another name": Case(f"{_DS[0]}{_DS[1]}weather{P}{_DS[3]}{_DS[4]}", (), f"weather{P}", "none of the"),
            "no name": Case(f"{_DS[0]}{P}{_DS[4]}", (), P, "no call"),
        },
        ("<think>", "</think>"),
        ("<｜User｜>", "<｜Assistant｜>", *_DS),
    ),
    "deepseek v3.2": Family(
        "deepseek_v32",
        template_of(_DS_TURN, _dsml("function_calls"), "<｜Assistant｜>"),
        _of_dsml("function_calls"),
        (),
        ("<｜User｜>", "<｜Assistant｜>", "｜DSML｜"),
    ),
    "deepseek v4": Family(
        "deepseek_v4",
        template_of(_DS_TURN, _dsml("tool_calls"), "<｜Assistant｜>"),
        _of_dsml("tool_calls"),
        (),
        ("<｜User｜>", "<｜Assistant｜>", "｜DSML｜"),
    ),
    "kimi k3": Family(
        "kimi_k3",
        template_of(
            "<|open|>{{ m.role }}<|sep|>{{ m.content }}",
            _tags(
                '<|open|>call tool="{}" index="{{{{ loop.index }}}}"<|sep|>',
                '<|open|>argument key="{}" type="string"<|sep|>',
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
                ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            ),
        ),
        {
            **_of_tags(
                '<|open|>tools<|sep|><|open|>call tool="{}" index="1"<|sep|>',
                '<|open|>argument key="{}" type="number"<|sep|>',
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|><|close|>tools<|sep|>",
                mark='<|open|>call tool="',
            ),
            "a reply": Case(
                "<|open|>think<|sep|>I call.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
                '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
                '<|open|>argument key="city" type="string"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
                '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
                "<|close|>message<|sep|>",
                (("get_weather", {"city": "3"}), NOW),
                "I look.",
            ),
            "no call": Case(
                "<|open|>response<|sep|>It rains.<|close|>response<|sep|><|close|>message<|sep|>", (), "It rains."
            ),
        },
        (),
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "minimax m3": Family(
        "minimax_m3",
        template_of(
            "]~b]{{ m.role }}\n{{ m.content }}[e~[\n",
            "{% set ns = ']<]minimax[>[' %}"
            + _tags(
                '{{{{ ns }}}}<invoke name="{}">',
                "{{{{ ns }}}}<{}>",
                "{{ ns }}</{{ k }}>",
                "{{ ns }}</invoke>\n",
                ("{{ ns }}<tool_call>\n", "{{ ns ~ '</tool_call>' }}"),
            ),
        ),
        {
            **_of_tags(
                ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{}">',
                "]<]minimax[>[<{}>",
                "]<]minimax[>[</{}>",
                "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
                mark="]<]minimax[>[<tool_call>",
            ),
            "tags inside": Case(
                ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="now">]<]minimax[>[<a>]<]minimax[>[<b>x'
                "]<]minimax[>[</b>]<]minimax[>[<c>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>y"
                "]<]minimax[>[</item>]<]minimax[>[</c>]<]minimax[>[</a>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
                (("now", {"a": {"b": "x", "c": [1, "y"]}}),),
            ),
            "a list": Case(
                ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<dates>]<]minimax[>[<item>true'
                "]<]minimax[>[</item>]<]minimax[>[</dates>]<]minimax[>[</invoke>",
                (("get_weather", {"dates": [True]}),),
            ),
        },
        ("<mm:think>", "</mm:think>"),
        ("]~b]", "[e~[", "]<]minimax[>["),
    ),
    "step 3": Family(
        "step3",
        template_of(
            _DS_TURN,
            _tags(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n',
                '<steptml:parameter name="{}">',
                "</steptml:parameter>\n",
                "</steptml:invoke><｜tool_call_end｜>\n",
                ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
            ),
            "<｜Assistant｜>",
        ),
        _of_tags(
            '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n',
            '<steptml:parameter name="{}">',
            "</steptml:parameter>\n",
            "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
            mark="<｜tool_calls_begin｜>",
        ),
        (),
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
    ),
    "functionary": Family(
        "functionary",
        template_of(_LLAMA_TURN, _each("<function=NAME>VALUES</function>")),
        {
            "one": Case(f"<function=get_weather>{P}</function>"),
            "two": Case(
                f"I look.\n<function=get_weather>{P}</function><function=now>{{}}</function>", (PARIS, NOW), "I look."
            ),
            "unended": Case(f"<function=get_weather>{P}"),
            "cut": Case(f"<function=get_weather>{P[:-3]}", (), f"<function=get_weather>{P[:-3]}", "cannot be read"),
            "tags": Case("<function=now>\n<parameter=a>1", (), "<function=now>\n<parameter=a>1", "cannot be read"),
        },
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        + _each("<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>VALUES<|call|>")
        + "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant",
        {
            "one": Case(_OSS),
            "ended": Case(f"{_OSS}<|call|>"),
            "thoughts": Case(f"{_THOUGHTS}{_OSS}<|call|>"),
            "role": Case(f"{_THOUGHTS} to=functions.get_weather<|channel|>commentary json<|message|>{P}<|call|>"),
            "analysis": Case(f"<|channel|>analysis to=functions.get_weather code<|message|>{P}<|call|>"),
            "preamble": Case(
                f"{_THOUGHTS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{_OSS}<|call|>",
                text="I look.",
            ),
            "no arguments": Case(_OSS.replace("get_weather", "now").replace(P, "{}"), (NOW,)),
            "none": Case(f"{_THOUGHTS}<|channel|>final<|message|>It rains.", (), "It rains."),
            "cut": Case(_OSS[:-3], (), f"commentary to=functions.get_weather json{P[:-3]}", "cannot be read"),
            "cut in the head": Case(_OSS[:40], (), "commentary to=functions.get_w", "no call"),
            "a known name": Case(_OSS.replace("functions.", "")),
            "a role, another channel": Case(
                f"{_THOUGHTS} to=functions.get_weather<|channel|>commentary<|message|>{P}<|call|>"
            ),
            **{
                name: Case(
                    _OSS.replace("functions.get_weather", name), (), f"commentary to={name} json{P}", "none of the"
                )
                for name in ("browser.search", "python", "get_weather2")
            },
            "code": Case(
                "<|channel|>analysis to=python code<|message|>now()", (), "analysis to=python codenow()", "none of the"
            ),
        },
        (),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    ),
    "glm 4.5": Family(
        "glm45",
        template_of(
            "<|{{ m.role }}|>\n{{ m.content }}",
            "{% set arg = 'arg' %}"
            + _tags(
                "\n<tool_call>{}\n",
                "<{{{{ arg }}}}_key>{}</{{{{ arg }}}}_key>\n<arg_value>",
                "</arg_value>\n",
                "</tool_call>",
            ),
            "<|assistant|>",
        ),
        {
            **_of_tags(
                "\n<tool_call>{}\n",
                "<arg_key>{}</arg_key>\n<arg_value>",
                "</arg_value>\n",
                "</tool_call>",
                mark="<tool_call>",
            ),
            "one line": Case(_GLM.replace("\n", "")),
            "thoughts": Case(f"<think>I write <tool_call>.</think>\n{_GLM}"),
            "quoted": Case(_GLM.replace("Paris", '"Paris"'), (("get_weather", {"city": '"Paris"', "days": 3}),)),
            "a wrong type": Case(
                _GLM.replace(">3<", ">three<"), (("get_weather", {"city": "Paris", "days": "three"}),)
            ),
        },
        (
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        ("<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "glm 4.7": Family(
        "glm47",
        template_of(
            "<|{{ m.role }}|>{{ m.content }}",
            _tags("<tool_call>{}", "<arg_key>{}</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
            "<|assistant|>",
        ),
        _of_tags(
            "<tool_call>{}", "<arg_key>{}</arg_key><arg_value>", "</arg_value>", "</tool_call>", mark="<tool_call>"
        ),
        ("<think>", "</think>"),
        ("<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "kimi k2": Family(
        "kimi_k2",
        template_of(
            "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
            _KIMI[0] + _each(f"{_KIMI[2]}{{{{ c.id }}}}{_KIMI[3]}VALUES{_KIMI[4]}") + _KIMI[1],
            "<|im_assistant|>",
        ),
        {
            "one": Case(f"{_KIMI[0]}{_K.format('get_weather:0', P)}{_KIMI[1]}"),
            "two": Case(
                f"I look.{_KIMI[0]}{_K.format('get_weather:0', P)}{_K.format('now:1', '{}')}{_KIMI[1]}",
                (PARIS, NOW),
                "I look.",
            ),
            **{
                name: Case(f"{_KIMI[0]}{_K.replace('functions.', '').format(name, P)}{_KIMI[1]}")
                for name in (
                    *(
                        "functions_get_weather_1",
                        "functions.get_weather",
                        "get_weather",
                        "get_weather_0",
                        "get_weather:2",
                    ),
                    *(" functions:get_weather:0 ", "functions-get_weather-12"),
                )
            },
            **{
                name: Case(
                    f"{_KIMI[0]}{_K.replace('functions.', '').format(name, P)}{_KIMI[1]}",
                    (),
                    f"{name}{P}",
                    "none of the",
                )
                for name in ("functionsget_weather5", "call00003", "", "functions.0", "get_weather5")
            },
            "without arguments": Case(
                f"{_KIMI[0]}{_KIMI[2]}functions.now:0{_KIMI[4]}", (), "functions.now:0", "no call"
            ),
        },
        (),
        ("<|im_assistant|>", "<|im_user|>", "<|im_middle|>", *_KIMI),
    ),
    "gemma 4": Family(
        "gemma4",
        template_of(
            "<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n",
            _gemma("<|tool_call>call:", "<tool_call|>", '<|"|>'),
            "<|turn>model\n",
        ),
        {
            "one": Case('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'),
            "two": Case(
                '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:1,unit:<|"|>c<|"|>,dates:[true]}<tool_call|>'
                "<|tool_call>call:now{}<tool_call|>",
                (OSLO, NOW),
            ),
            "nested": Case(
                '<|tool_call>call:now{a:{b:[<|"|>x, {"y"}<|"|>,null]}}<tool_call|>',
                (("now", {"a": {"b": ['x, {"y"}', None]}}),),
            ),
            "cut": Case('<|tool_call>call:get_weather{city:<|"|>Pa', (), "call:get_weather{city:Pa", "not ended"),
        },
        (),
        ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "functiongemma": Family(
        "functiongemma",
        template_of(
            "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n",
            _gemma("<start_function_call>call:", "<end_function_call>", "<escape>"),
        ),
        {
            "one": Case("<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"),
        },
        (),
        ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
    ),
    "granite 3": Family(
        "granite",
        template_of(_GRANITE_TURN, "<|tool_call|>[" + json_calls("", "", between=", ") + "]"),
        _of_lists("<|tool_call|>"),
        (),
        ("<|tool_call|>",),
    ),
    "phi-4-mini": Family(
        "phi4",
        template_of(
            "<|{{ m.role }}|>{{ m.content }}<|end|>",
            "<|tool_call|>[" + json_calls("", "", between=", ") + "]<|/tool_call|>",
        ),
        {
            **_of_lists("<|tool_call|>", "<|/tool_call|>"),
            "functools": Case(f'functools[{{"name": "get_weather", "arguments": {P}}}]'),
        },
        (),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "xlam": Family(
        "xlam",
        template_of(_LLAMA_TURN, "[" + json_calls("", "", between=", ") + "]"),
        {
            "one": Case(f'[{{"name": "get_weather", "arguments": {P}}}]'),
            "two": Case(
                f'[{{"name": "get_weather", "arguments": {P}}}, {{"name": "now", "arguments": {{}}}}]', (PARIS, NOW)
            ),
            "block": Case(f'```json\n[{{"name": "get_weather", "arguments": {P}}}]\n```'),
            "an answer": Case('[{"name": "Bob"}]', (), '[{"name": "Bob"}]'),
        },
    ),
    "minimax m2": Family(
        "minimax_m2",
        template_of(
            "]~b]{{ m.role }}\n{{ m.content }}[e~[\n",
            _tags(*_M2, ("\n<minimax:tool_call>\n", "</minimax:tool_call>")),
            "]~b]ai\n<think>\n",
        ),
        {
            "one": Case(f"I call.</think>\n\n<minimax:tool_call>\n{_MINIMAX}</minimax:tool_call>"),
            "two": Case(
                f"I call.</think>I look.\n<minimax:tool_call>\n{_MINIMAX}"
                '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
                (PARIS, NOW),
                "I look.",
            ),
        },
        ("<think>", "</think>"),
        ("]~b]", "[e~["),
    ),
    "minimax m2 without thoughts": Family(
        "minimax_m2",
        template_of(
            "]~b]{{ m.role }}\n{{ m.content }}[e~[\n",
            _tags(*_M2, ("\n<minimax:tool_call>\n", "</minimax:tool_call>")),
            "]~b]ai\n",
        ),
        _of_tags(
            '<minimax:tool_call>\n<invoke name="{}">\n',
            '<parameter name="{}">',
            "</parameter>\n",
            "</invoke>\n</minimax:tool_call>",
            mark="<minimax:tool_call>",
        ),
        ("<think>", "</think>"),
        ("]~b]", "[e~["),
    ),
    "hunyuan": Family(
        "hunyuan",
        template_of(_PLAIN, "<tool_calls>[" + json_calls("", "", between=", ") + "]</tool_calls>"),
        {
            **_of_lists("<tool_calls>", "</tool_calls>"),
            "JSON lines": Case(
                f'<tool_calls>\n{{"name": "get_weather", "arguments": {P}}}\n'
                '{"name": "now", "arguments": {}}\n</tool_calls>',
                (PARIS, NOW),
            ),
        },
    ),
    "seed-oss": Family(
        "seed_oss",
        template_of(
            "<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>",
            _tags(
                "<seed:tool_call>\n<function={}>\n",
                "<parameter={}>",
                "</parameter>\n",
                "</function>\n</seed:tool_call>",
            ),
        ),
        _of_tags(
            "<seed:tool_call>\n<function={}>\n",
            "<parameter={}>",
            "</parameter>\n",
            "</function>\n</seed:tool_call>",
            mark="<seed:tool_call>",
        ),
    ),
    "longcat": Family(
        "longcat",
        template_of(_PLAIN, json_calls("<longcat_tool_call>\n", "\n</longcat_tool_call>\n")),
        _ofjson_calls("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    ),
    "nemotron": Family(
        "nemotron",
        template_of(_PLAIN, "<TOOLCALL>[" + json_calls("", "", between=", ") + "]</TOOLCALL>"),
        _of_lists("<TOOLCALL>", "</TOOLCALL>"),
    ),
    "internlm": Family(
        "internlm",
        template_of(_CHATML, json_calls("<|action_start|><|plugin|>\n", "<|action_end|>\n", ("name", "parameters"))),
        _ofjson_calls("<|action_start|><|plugin|>\n", "<|action_end|>\n", ("name", "parameters"), ""),
    ),
    "jamba": Family(
        "hunyuan",
        template_of(_PLAIN, "<tool_calls>[\n    " + json_calls("", "", between=",\n    ") + "\n]</tool_calls>"),
        _of_lists("<tool_calls>", "</tool_calls>"),
    ),
    "command a": Family(
        "cohere",
        template_of(
            "<|START_OF_TURN_TOKEN|>{{ m.role }}{{ m.content }}<|END_OF_TURN_TOKEN|>",
            "<|START_ACTION|>[\n    "
            + _each('{"tool_call_id": "{{ loop.index0 }}", "tool_name": "NAME", "parameters": VALUES}', ",\n    ")
            + "\n]<|END_ACTION|>",
        ),
        {
            "one": Case(
                "<|START_THINKING|>I call.<|END_THINKING|><|START_ACTION|>[\n"
                f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {P}}}\n]<|END_ACTION|>'
            ),
        },
        (),
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "command r": Family(
        "command_r",
        template_of(
            _PLAIN,
            "Action: ```json\n[\n"
            + _each('    {\n        "tool_name": "NAME",\n        "parameters": VALUES\n    }', ",\n")
            + "]```",
        ),
        {
            "one": Case(
                'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n'
                f'        "parameters": {P}\n    }}\n]```'
            )
        },
    ),
    "lfm2": Family(
        "lfm2",
        template_of(_CHATML, _python("<|tool_call_start|>[", "]<|tool_call_end|>"), _CHATML_OPENING),
        {
            "one": Case(
                '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>I look.', text="I look."
            ),
        },
        (),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo 3": Family(
        "olmo3",
        template_of(_CHATML, _python("<function_calls>\n", "\n</function_calls>", between="\n"), _CHATML_OPENING),
        {
            "one": Case("<function_calls>\nget_weather(city='Paris', days=3)\n</function_calls>"),
            "two": Case("<function_calls>get_weather(city='Paris', days=3)\nnow()</function_calls>", (PARIS, NOW)),
        },
    ),
}
"""By a name of the case; `Family.name` is the format that batchgen finds."""
_IN_FRONT = {
    "hermes": "<tool_call>", "qwen3_coder": "<function=", "llama3_json": "<|python_tag|>",
    "pythonic": "<|python_start|>",
    "mistral": "[TOOL_CALLS]", "mistral_v11": "[TOOL_CALLS]", "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>", "gpt_oss": "<|channel|>commentary to=", "glm45": "<tool_call>",
    "glm47": "<tool_call>", "kimi_k2": "<|tool_calls_section_begin|>", "gemma4": "<|tool_call>",
    "functiongemma": "<start_function_call>", "granite": "<|tool_call|>", "phi4": "<|tool_call|>",
    "xlam": "[TOOL_CALLS]",
    "minimax_m2": "<minimax:tool_call>", "deepseek_v32": "<｜DSML｜function_calls>", "hunyuan": "<tool_calls>",
    "seed_oss": "<seed:tool_call>", "longcat": "<longcat_tool_call>", "nemotron": "<TOOLCALL>",
    "internlm": "<|action_start|>", "cohere": "<|START_ACTION|>", "command_r": "Action: ```json",
    "lfm2": "<|tool_call_start|>", "olmo3": "<function_calls>", "deepseek_v4": "<｜DSML｜tool_calls>",
    "kimi_k3": "<|open|>tools<|sep|>", "minimax_m3": "]<]minimax[>[<tool_call>", "step3": "<｜tool_call_begin｜>",
    "functionary": "<function=",
}  # fmt: skip
"""By the name of a format: what is in front of calls only."""
MARKS = {name: _IN_FRONT[family.name] for name, family in FAMILIES.items()}
"""The same by a name of the case."""
FAMILIES = {
    name: family._replace(cases=_without_text_of(family.cases, family.special)) for name, family in FAMILIES.items()
}

RESPONSE_TEMPLATES: dict[str, tuple[dict[str, Any], str, str]] = {
    "hermes": (
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n</tool_call>',
    ),
    "function tags": (
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "qwen3_coder",
        _PARIS_XML,
    ),
    "gemma": (
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    ),
    "unknown": (
        {
            "open_pattern": r"<<(?P<name>\w+)>>",
            "close": "<<end>>",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "response_template",
        "<<get_weather>>city=Paris\ndays=3<<end>>",
    ),
}
"""Field `tool_calls` of response templates, with the format that batchgen finds and an output of one call."""
