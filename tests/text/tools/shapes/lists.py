"""Shapes of models whose calls are a JSON list."""

from __future__ import annotations

from tests.text.tools.shapes.shape import Shape

_RESULT = r"""
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
"""
"""The end of a loop over turns: results that follow one another are one turn."""
_MISTRAL_HEAD = r"""
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
    {%- if not (m.role in ['tool', 'tool_results'] or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('Turns of the user and the assistant must alternate.') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
"""
_MISTRAL_LIST = r"""
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS]BLANK[' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('An id of a call must have 9 letters or digits.') }}
            {%- endif %}
            {{- ', "id": "' ~ call.id ~ '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' ~ eos_token }}{%- endif %}
        {%- endfor %}
"""

SHAPES: dict[str, Shape] = {
    "mistral v3": Shape("mistral", None, _MISTRAL_HEAD + r"""
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' ~ key ~ '": "' ~ value ~ '"' }}
                    {%- else %}{{- '"' ~ key ~ '": ' ~ value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' ~ system ~ '\n\n' ~ m.content ~ '[/INST]' }}
        {%- else %}{{- '[INST] ' ~ m.content ~ '[/INST]' }}{%- endif %}
""" + _MISTRAL_LIST.replace("BLANK", " ") + r"""
    {%- elif m.role == 'assistant' %}{{- ' ' ~ m.content | trim ~ eos_token }}
    {%- elif m.role in ['tool_results', 'tool'] %}
        {%- set content = m.content.content if m.content is mapping and m.content.content is defined else m.content %}
        {{- '[TOOL_RESULTS] {"content": ' ~ content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('The roles are user, assistant and tool.') }}{%- endif %}
{%- endfor %}"""),
    "mistral v7": Shape("mistral", None, _MISTRAL_HEAD + r"""
{%- if system is defined %}{{- '[SYSTEM_PROMPT]' ~ system ~ '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}""" + _MISTRAL_LIST.replace("BLANK", "") + r"""
    {%- elif m.role == 'assistant' %}{{- m.content ~ eos_token }}
    {%- else %}{{- '[TOOL_RESULTS]' ~ m.tool_call_id ~ '[TOOL_CONTENT]' ~ m.content ~ '[/TOOL_RESULTS]' }}{%- endif %}
{%- endfor %}"""),
    "granite 3.1, the list of calls as it is given": Shape("granite", None, r"""
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = "Today is " ~ strftime_now('%B %d, %Y') ~ "." %}{%- set turns = messages %}
    {%- if tools and documents %}{%- set system = system ~ " Use the tools and the documents." %}
    {%- elif tools %}{%- set system = system ~ " Use the tools." %}{%- endif %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' ~ system ~ '<|end_of_text|>\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' ~ tools | tojson(indent=4) ~ '<|end_of_text|>\n' }}
{%- endif %}
{%- for m in turns %}
    {%- if m.role == 'assistant' and m.tool_calls is defined %}
        {%- set content = '<|tool_call|>' ~ m.tool_calls | tojson %}
    {%- else %}{%- set content = m.content %}{%- endif %}
    {%- set role = 'tool_response' if m.role == 'tool' else m.role %}
    {{- '<|start_of_role|>' ~ role ~ '<|end_of_role|>' ~ content ~ '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""),
    "command r 7b": Shape("cohere", "cohere", r"""{{- bos_token }}
{%- macro listed(calls, at) %}
    {%- for call in calls %}
    {%- set call = call.function %}
    {"tool_call_id": "{{ at + loop.index0 }}", "tool_name": "{{ call.name }}", "parameters":
        {{- ' ' ~ call.arguments | tojson }}}
        {%- if not loop.last %},{% endif %}
    {%- endfor %}
{%- endmacro %}
{%- set ns = namespace(calls=0, results=0) %}
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Rules
{%- if tools %}
{{ tools | tojson(indent=2) }}
{%- endif %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}<|END_OF_TURN_TOKEN|>
{%- for m in messages %}
    {%- if m.role == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>
    {%- elif m.role | lower in ['assistant', 'chatbot'] and m.tool_calls %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
        {%- if m.tool_plan %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>{%- endif %}<|START_ACTION|>[
        {{- listed(m.tool_calls, ns.calls) }}
        {%- set ns.calls = ns.calls + m.tool_calls | length %}
]<|END_ACTION|><|END_OF_TURN_TOKEN|>
    {%- elif m.role | lower in ['assistant', 'chatbot'] %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
        {%- if m.thinking %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{%- endif %}
        {{- '<|START_RESPONSE|>' ~ m.content ~ '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}
    {%- elif m.role == 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[
    {"tool_call_id": "{{ ns.results }}", "results": {"0": {{ m.content | tojson }}}, "is_error": null}
        {%- set ns.results = ns.results + 1 %}
]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{%- endif %}"""),
    "command r, from a template of tools": Shape("command_r", None, {
        "default": r"""{{- bos_token }}{%- for m in messages %}
{{- '<|START_OF_TURN_TOKEN|><|' ~ m.role | upper ~ '_TOKEN|>' ~ m.content ~ '<|END_OF_TURN_TOKEN|>' }}{%- endfor %}""",
        "tool_use": r"""{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- if m.content %}{{- m.content ~ '\n' }}{%- endif %}
        {{- 'Action: ```json\n[\n' }}
        {%- for call in m.tool_calls %}
            {{- '{\n'.rjust(6) ~ '"tool_name": "'.rjust(23) ~ call.function.name ~ '",\n' }}
            {{- '"parameters": '.rjust(22) ~ call.function.arguments | tojson(indent=8) ~ '\n' ~ '}'.rjust(5) }}
            {%- if not loop.last %}{{- ',\n' }}{%- endif %}
        {%- endfor %}
        {{- '\n]```<|END_OF_TURN_TOKEN|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\nDocument: 0\n' ~ m.content ~ '</results>' }}
        {{- '<|END_OF_TURN_TOKEN|>' }}
    {%- else %}
        {{- '<|START_OF_TURN_TOKEN|><|' ~ m.role | upper ~ '_TOKEN|>' ~ m.content ~ '<|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' ~ tools | tojson ~ '<|END_OF_TURN_TOKEN|>' }}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""}),
    "hunyuan": Shape("hunyuan", "hunyuan", r"""{%- set ns = namespace(system='', first=true) %}
{%- for m in messages if m.role == 'system' %}{%- set ns.system = ns.system ~ m.content %}{%- endfor %}
{{- bos_token ~ ns.system }}
{%- if tools %}{{- '\n<tools>' ~ tools | map('tojson') | join('\n') ~ '</tools>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- m.content ~ '<|extra_0|>' }}
    {%- elif m.role == 'assistant' and m.tool_calls is defined and m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '<tool_calls>[' if loop.first else ', ' }}
            {%- set given = call.function.arguments %}
            {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- given if given is string else given | tojson }}{{- '}' }}
            {%- if loop.last %}{{- ']</tool_calls><|eos|>' }}{%- endif %}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {%- if '<answer>' in m.content and '</answer>' in m.content %}
            {{- m.content.split('<answer>')[-1].split('</answer>')[0].strip() ~ '<|eos|>' }}
        {%- else %}{{- m.content ~ '<|eos|>' }}{%- endif %}
    {%- elif m.role == 'tool' %}{{- '<tool_response>' ~ m.content ~ '</tool_response><|extra_0|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\n\n</think>\n' }}
{%- endif %}"""),
    "jamba": Shape("hunyuan", None, r"""{{- bos_token }}
{%- if tools %}<|bom|><|system|> Tools: {{ tools | tojson(indent=4) }}<|eom|>{%- endif %}
{%- for m in messages %}
    {{- '<|bom|><|' ~ m.role ~ '|> ' }}
    {%- if m.content is not none and m.content %}{{- m.content }}{%- endif %}
    {%- if m.tool_calls %}
        {{- '<tool_calls>[\n' }}
        {%- for call in m.tool_calls %}
            {{- '    {"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}' ~ (',\n' if not loop.last else '\n') }}
        {%- endfor %}
        {{- ']</tool_calls>' }}
    {%- endif %}
    {{- '<|eom|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bom|><|assistant|> ' }}{%- endif %}"""),
    "minimax m1, lines in one tag": Shape("hunyuan", None, r"""
{%- for m in messages %}
    {{- '<beginning_of_sentence>' ~ ('ai' if m.role == 'assistant' else m.role) ~ ' name=' ~ m.role ~ '\n' }}
    {%- if m.content is string %}{{- m.content }}
    {%- else %}{%- for part in m.content if part.type == 'text' %}{{- part.text }}{%- endfor %}{%- endif %}
    {%- if m.tool_calls %}
        {{- '\n<tool_calls>\n' }}
        {%- for call in m.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\n' }}
        {%- endfor %}
        {{- '</tool_calls>' }}
    {%- endif %}
    {{- '<end_of_sentence>\n' }}
{%- endfor %}
{%- if tools %}<beginning_of_sentence>system tool_setting=tools
{%- for tool in tools %}{{- '\n' ~ tool | tojson }}{%- endfor %}<end_of_sentence>{%- endif %}
{%- if add_generation_prompt %}{{- '<beginning_of_sentence>ai name=assistant\n' }}{%- endif %}"""),
    "nemotron on llama": Shape("nemotron", "nemotron", r"""{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else 'detailed thinking on' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' ~ system }}
{%- if tools is not none %}
    {{- '\n\n<AVAILABLE_TOOLS>[' ~ tools | map(attribute='function') | map('tojson') | join(', ') }}
    {{- ']</AVAILABLE_TOOLS>' }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}
            {{- '<|start_header_id|>user<|end_header_id|>\n\n<TOOL_RESPONSE>[' }}
        {%- endif %}
        {{- m.content ~ (', ' if not loop.last and loop.nextitem.role == 'tool' else ']</TOOL_RESPONSE><|eot_id|>') }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' ~ (m.content or '') ~ '<TOOLCALL>[' }}
        {%- for call in m.tool_calls %}
            {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}' }}
            {{- ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']</TOOLCALL><|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}
        {{- m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' ~ ('<think>\n\n</think>' if 'off' in system else '') }}
{%- endif %}"""),
    "xlam 2": Shape("xlam", None, r"""{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You can call tools as a JSON list.' }}
{%- if tools %}{%- for tool in tools %}{{- '\n' ~ tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages if m.role != 'system' %}
    {{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}
    {%- if m.tool_calls %}
        {{- '[' }}
        {%- for call in m.tool_calls %}
            {%- set out = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- out | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' }}
    {%- else %}{{- m.content if m.content is string else m.content | tojson }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""),
}  # fmt: skip
