"""Chat templates with the logic of known families, reduced to what decides which part of a row reaches the prompt."""

_OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"


def _turns(body: str, head: str = "", tail: str = _OPEN) -> str:
    return head + "{% for m in messages %}" + body + "{% endfor %}" + tail


_PLAIN_TURN = "<{{ m.role }}>{{ m.content }}"
_ELSE_PLAIN = "{% else %}" + _PLAIN_TURN + "{% endif %}"
_ELSE_JOINED = "{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}"
_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}: ARGUMENTS{% endfor %}"
_AS_JSON = _CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
_AS_TEXT = _CALLS.replace("ARGUMENTS", "{{ '' + c.function.arguments }}")

FAMILIES = {
    # Contents alone: no tools, no names, no thoughts.
    "plain": _turns(_PLAIN_TURN),
    # Calls and tools as JSON.
    "json": _turns("<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}" + _AS_JSON + "{% endif %}", _TOOLS),
    # A content that is printed, whatever it is.
    "printed": _turns(_PLAIN_TURN + "{% if m.tool_calls %}" + _AS_JSON + "{% endif %}"),
    # Calls only where the content is null; their arguments as JSON, or joined as text.
    "gated json": _turns(
        "{% if m.tool_calls and m.content is none %}" + _AS_JSON + "{% else %}" + _PLAIN_TURN + "{% endif %}"
    ),
    "gated text": _turns(
        "{% if m.tool_calls and m['content'] is none %}" + _AS_TEXT + "{% else %}" + _PLAIN_TURN + "{% endif %}"
    ),
    # Calls only where there is no content at all, and a content that is joined.
    "undefined": _turns("{% if m.content is not defined %}" + _AS_JSON + _ELSE_JOINED),
    # A content that is always joined.
    "joined": _turns("{{ '<' + m.role + '>' + m.content }}{% if m.tool_calls %}" + _AS_TEXT + "{% endif %}"),
    # Arguments as pairs, dropped without an error where they are text.
    "pairs": _turns(
        "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}"
        "{% endfor %}{% endif %}{% endfor %}",
        _TOOLS,
    ),
    # Both kinds of arguments; thoughts of the last turn only; thinking can be disabled.
    "thinking": _turns(
        "{% if m.role == 'assistant' %}<assistant>{% if m.reasoning_content and loop.index0 > ns.last %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }}: {% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
        "{% else %}" + _PLAIN_TURN + "{% endif %}",
        _TOOLS + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% endif %}{% endif %}",
    ),
    # One call at a time, strict ids, and the system message in front of the last question.
    "strict": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}"
        "[INST]{% if loop.last and system is defined %}{{ system }}\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 or m.tool_calls[0].id | length != 9 %}"
        "{{ raise_exception('one call with an id of nine characters') }}{% endif %}"
        "{{ m.tool_calls[0].function | tojson }}{% elif m.role == 'tool' %}[RESULT]{{ m.content | tojson }}"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    # Only the first call is written; the thoughts of a turn are called `thinking`.
    "channels": _turns(
        "{% if m.tool_calls %}<think>{{ m.thinking }}{% set f = m.tool_calls[0].function %}to={{ f.name }} "
        "{{ f.arguments | tojson }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}",
        "Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}\n",
    ),
    # The id is written in place of the name.
    "ids": _turns(
        "{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.id }} {{ c.function.arguments | tojson }}"
        "{% endfor %}"
        "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    ),
    # Names of speakers and of results.
    "names": _turns("<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}"),
    # No system message; it is dropped without an error.
    "two roles": _turns("{% if m.role in ['user', 'assistant'] %}" + _PLAIN_TURN + "{% endif %}"),
    # The system's content is printed, the parts of others are read.
    "parts": _turns(
        "<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}[{{ p.text }}]"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}"
    ),
    "first part": _turns("<{{ m.role }}>{{ m.content if m.content is string else m.content[0].text }}"),
    # Only the last question, as guards do.
    "last turn": "<check>{{ messages[-1].content }}",
    # A content that is joined, and no results of tools.
    "no results": _turns("{{ m.role + m.content }}{{ raise_exception('no results here') if m.role == 'tool' }}"),
    # A message with every key.
    "dump": _turns("{{ m | tojson }}"),
}
