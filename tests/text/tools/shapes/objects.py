"""Shapes of models whose calls are JSON objects."""

from __future__ import annotations

from tests.text.tools.shapes.shape import Shape

_HERMES_TURN = r"""
{%- for call in m.tool_calls %}
    {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
    {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
    {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
    {{- '}\n</tool_call>' }}
{%- endfor %}
"""
"""The calls of a message `m`."""
_QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\n\n' }}{%- endif %}
    {{- "You may call these functions:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\nWrite each call so:\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
"""
"""The head of a template with a list of tools."""
_RESULT = r"""
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
"""
"""The end of a loop over turns: results that follow one another are one turn."""
_LLAMA_HEAD = r"""
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if tools_in_user_message is not defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if date_string is not defined %}{%- set date_string = "1 Jan 2024" %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today is " ~ date_string ~ ".\n\n" ~ system ~ "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("The tools need a first user message.") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nCall a function as {"name": its name, "parameters": an object}.' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first ~ "<|eot_id|>" }}
{%- endif %}
"""
_LLAMA_OPENING = "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
_LLAMA_RESULT = r"""
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if m.content is mapping or m.content is iterable and m.content is not string %}{{- m.content | tojson }}
        {%- else %}{{- m.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
"""

SHAPES: dict[str, Shape] = {
    "qwen 2.5": Shape("hermes", None, _QWEN + r"""
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first)
        or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\n' ~ m.content }}{%- endif %}""" + _HERMES_TURN + r"""
        {{- '<|im_end|>\n' }}""" + _RESULT + r"""
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""),
    "qwen 3": Shape("hermes", "qwen3", _QWEN + r"""
{%- set ns = namespace(looking=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.looking and m.role == 'user' and not (m.content is string and m.content.startswith('<tool_response>')) %}
        {%- set ns.looking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.content is string %}{%- set content = m.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if m.reasoning_content is string %}{%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\n' ~ thoughts.strip('\n') ~ '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}""" + _HERMES_TURN + r"""
        {{- '<|im_end|>\n' }}""" + _RESULT + r"""
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""),
    "qwq": Shape("hermes", "qwq", _QWEN + r"""
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' ~ (m.content or '').split('</think>')[-1].lstrip('\n') }}
""" + _HERMES_TURN + r"""
        {{- '<|im_end|>\n' }}""" + _RESULT + r"""
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""),
    "hermes 3, with a template of tools": Shape("hermes", None, {
        "default": r"""{{- bos_token }}{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' ~ '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
        "tool_use": r"""
{%- macro kind(spec) %}
    {%- set names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"} %}
    {%- if spec.type in names %}{{- names[spec.type] }}
    {%- elif spec.type == 'array' %}{{- "list[" ~ kind(spec.items) ~ "]" }}
    {%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token ~ "<|im_start|>system\nThe functions: <tools> " }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": {"name": "' ~ tool.name ~ '", "description": "' ~ tool.name ~ '(' }}
    {%- for name, spec in tool.parameters.properties | items %}
        {{- name ~ ": " ~ kind(spec) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ') - ' ~ tool.description ~ '", "parameters": ' ~ tool.parameters | tojson ~ '}' }}
    {%- if not loop.last %}{{- "\n" }}{%- endif %}
{%- endfor %}
{{- " </tools>\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-dict>}\n</tool_call><|im_end|>\n" }}
{%- for m in messages %}
    {%- if m.role in ['user', 'system'] or (m.role == 'assistant' and m.tool_calls is not defined) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}""" + _HERMES_TURN + r"""
        {{- '<|im_end|>\n' }}""" + _RESULT + r"""
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""}),
    "llama 3.1": Shape("llama3_json", None, _LLAMA_HEAD + r"""
{%- for m in messages %}
    {%- if not (m.role in ['ipython', 'tool'] or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}{{- raise_exception("One call at a time.") }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- "<|python_tag|>" ~ call.name ~ ".call(" }}
            {%- for name, value in call.arguments | items %}
                {{- name ~ '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' ~ call.name ~ '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
        {%- endif %}
        {%- if builtin_tools is defined %}{{- "<|eom_id|>" }}{%- else %}{{- "<|eot_id|>" }}{%- endif %}
""" + _LLAMA_RESULT + _LLAMA_OPENING),
    "llama 4": Shape("llama3_json", None, r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is string %}{%- set system = messages[0].content | trim %}
    {%- else %}{%- set system = messages[0].content[0].text | trim %}{%- endif %}
    {%- set messages = messages[1:] %}
    {{- "<|header_start|>system<|header_end|>\n\n" ~ system ~ "<|eot|>" }}
{%- endif %}
{%- if tools %}
    {{- '<|header_start|>user<|header_end|>\n\nAnswer as {"name": function name, "parameters": dictionary}.\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) ~ "\n\n" }}{%- endfor %}
    {{- messages[0].content | trim ~ "<|eot|>" }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' in m and m.tool_calls | length > 0 %}
        {{- '<|header_start|>assistant<|header_end|>\n\n<|python_start|>' }}
        {%- if m.content is string %}{{- m.content }}
        {%- else %}{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}
        {{- '<|python_end|>' }}
        {%- for call in m.tool_calls %}
            {{- '{"name": "' ~ call.function.name ~ '", "parameters": ' ~ call.function.arguments | tojson ~ '}' }}
        {%- endfor %}
        {{- "<|eot|>" }}
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- "<|header_start|>ipython<|header_end|>\n\n" ~ m.content | tojson ~ "<|eot|>" }}
    {%- else %}
        {{- '<|header_start|>' ~ m.role ~ '<|header_end|>\n\n' }}
        {%- if m.content is string %}{{- m.content }}
        {%- else %}{%- for part in m.content %}{%- if part.type == 'image' %}{{- '<|image|>' }}
            {%- elif part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}"""),
    "exaone 4": Shape("hermes", "exaone", r"""
{%- set roles = {
    'user': '[|user|]\n', 'assistant': '[|assistant|]\n', 'system': '[|system|]\n', 'tool': '[|tool|]\n'
} %}
{%- set think = enable_thinking is defined and enable_thinking %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}
{%- for m in messages %}
    {%- if loop.first and tools is defined and tools %}
        {{- roles['system'] ~ (m.content if m.role == 'system' else '') ~ '# Tools\n' }}
        {%- for tool in tools %}{{- '<tool>' ~ tool | tojson(ensure_ascii=False) ~ '</tool>\n' }}{%- endfor %}
        {{- '[|endofturn|]\n' }}
        {%- if m.role == 'system' %}{%- continue %}{%- endif %}
    {%- endif %}
    {{- roles[m.role] }}
    {%- if m.role == 'tool' %}
        {{- '<tool_result>' ~ m.content ~ '</tool_result>[|endofturn|]\n' }}
        {%- continue %}
    {%- endif %}
    {%- set content = m.content or '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thoughts = content.split('</think>')[0].strip() ~ '</think>' %}
        {%- set content = content.split('</think>')[-1].strip() %}
        {{- thoughts ~ '\n\n' if loop.index0 > ns.last else '<think>\n\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n' if content or not loop.first else '' }}
        {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '[|endofturn|]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- roles['assistant'] ~ ('<think>\n' if think else '<think>\n\n</think>\n\n') }}
{%- endif %}"""),
    "ernie 4.5 thinking": Shape("hermes", "ernie45", r"""
{%- macro part_text(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content or [] %}{{- part.text if part is mapping else part }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set ns = namespace(system='', last=-1) %}
{%- if messages[0].role == 'system' %}{%- set ns.system = part_text(messages[0].content) %}{%- endif %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}
{{- '<|im_start|>system\n<global_setting>\nthink_mode=True\n</global_setting>' }}
{{- '\n\n<system_setting>\n' ~ ns.system ~ '\n</system_setting>' if ns.system else '' }}
{{- '\n\n<tool_list>\n' ~ tools | tojson ~ '\n</tool_list>' if tools else '' }}
{{- '<|im_end|>\n\n' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\n' ~ part_text(m.content) ~ '<|im_end|>\n\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = part_text(m.content) %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {%- if '<response>' in content and '</response>' in content %}
            {%- set content = content.split('<response>')[1].split('</response>')[0].strip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
        {%- if content %}{{- '<response>\n' ~ content ~ '\n</response>\n' }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) ~ '}\n</tool_call>\n' }}
        {%- endfor %}
        {{- '<|im_end|>\n\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_output>\n' ~ part_text(m.content) ~ '\n</tool_output>\n<|im_end|>\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""),
    "smollm 3, an example but no calls": Shape("hermes", "smollm3", r"""
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- if '/no_think' in system %}{%- set mode = '/no_think' %}
    {%- elif '/think' in system %}{%- set mode = '/think' %}{%- endif %}
    {%- set custom = system.replace('/no_think', '').replace('/think', '').rstrip() %}
{%- endif %}
{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: ' ~ mode ~ '\n\n## Instructions\n\n' }}
{%- if custom %}{{- custom }}
{%- elif mode == '/think' %}{{- 'Write <think> thoughts </think> and then the answer.' }}{%- endif %}
{%- set xml_tools = xml_tools or tools %}
{%- if xml_tools or python_tools %}
    {{- '\n\n### Tools\n\n' }}
    {%- if xml_tools %}
        {{- '<tools>\n' }}
        {%- for tool in xml_tools %}{{- (tool | string).replace('\n', ' ') ~ '\n' }}{%- endfor %}
        {{- '</tools>\n\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
    {%- endif %}
    {%- if python_tools %}{{- '<code>\nresult = tool()\n</code>' }}{%- endif %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' ~ ('' if mode == '/think' else '<think>\n\n</think>\n') ~ content.lstrip('\n') }}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' ~ ('' if mode == '/think' else '<think>\n\n</think>\n') }}
{%- endif %}"""),
    "internlm 2": Shape("internlm", None, r"""{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system name=<|plugin|>\n' ~ tools | tojson ~ '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|im_start|>environment name=<|plugin|>\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') }}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function %}
            {{- '<|action_start|><|plugin|>\n' ~ {'name': call.name, 'parameters': call.arguments} | tojson }}
            {{- '<|action_end|>' }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""),
    "ling": Shape("hermes", None, r"""
{%- set off = 'detailed thinking off' %}
{{- '<role>SYSTEM</role>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\n' }}{%- endif %}
{%- if tools %}{{- '# Tools\n<tools>' ~ tools | map('tojson') | join('\n') ~ '</tools>\n' }}{%- endif %}
{{- off ~ '<|role_end|>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<role>HUMAN</role>' ~ m.content ~ '<|role_end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<role>ASSISTANT</role>' ~ (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n' ~ {'arguments': call.function.arguments, 'name': call.function.name} | tojson }}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|role_end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<role>OBSERVATION</role>' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|role_end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<role>ASSISTANT</role>' }}{%- endif %}"""),
    "longcat, turns that are counted": Shape("longcat", None, r"""
{%- set ns = namespace(round=0) %}
{%- if tools and tools | length > 0 %}
    {{- '## Tools\n' }}
    {%- for tool in tools %}
        {{- '### ' ~ tool.function.name ~ '\n' ~ tool.function.parameters | tojson(indent=2) ~ '\n' }}
    {%- endfor %}
    {{- '<longcat_tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</longcat_tool_call>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- 'SYSTEM:' ~ m.content }}
    {%- elif m.role == 'user' %}
        {{- ' ' if not loop.first else '' }}{{- '[Round ' ~ ns.round ~ '] USER:' ~ m.content ~ ' ASSISTANT:' }}
        {%- set ns.round = ns.round + 1 %}
    {%- elif m.role == 'assistant' %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- set f = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- '<longcat_tool_call>\n' ~ f | tojson ~ '\n</longcat_tool_call>\n' }}
        {%- endfor %}
        {{- '</longcat_s>' }}
    {%- elif m.role == 'tool' %}{{- '<longcat_tool_response>' ~ m.content ~ '</longcat_tool_response>' }}{%- endif %}
{%- endfor %}"""),
}  # fmt: skip
