"""Shapes of models whose calls have a tag for each argument."""

from __future__ import annotations

from tests.text.tools.shapes.shape import Shape

_VISIBLE = r"""
{%- macro visible(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part is mapping and part.type == 'text' %}{{- part.text }}
            {%- elif part is string %}{{- part }}{%- endif %}
        {%- endfor %}
    {%- elif content is none %}{{- '' }}{%- else %}{{- content }}{%- endif %}
{%- endmacro %}
"""
"""A macro for content that is text or a list of parts."""
_LAST_USER = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}
"""
_THOUGHTS = r"""
        {%- set thoughts, content = '', visible(m.content) %}
        {%- if m.reasoning_content is string %}{%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
"""
"""Thoughts and content of a message `m`."""
_GLM_HEAD = (
    "[gMASK]<sop>"
    + _VISIBLE
    + _LAST_USER
    + r"""
{%- if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>
{%- endif %}
"""
)
_SCHEMA_TAGS = r"""
{%- macro rest(spec, known) %}
    {%- for key in spec if key not in known %}
        {%- set value = spec[key] %}
        {%- if value is mapping or value is sequence and value is not string %}
            {%- set value = value | tojson %}
        {%- endif %}
        {{- '\n<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}
    {%- endfor %}
{%- endmacro %}
{%- if tools is iterable and tools | length > 0 %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '\n<function>\n<name>' ~ tool.name ~ '</name>' }}
        {{- '\n<description>' ~ tool.description | trim ~ '</description>' }}
        {%- for name, spec in tool.parameters.properties | items %}
            {{- '\n<parameter>\n<name>' ~ name ~ '</name>' ~ rest(spec, ['name']) ~ '\n</parameter>' }}
        {%- endfor %}
        {{- rest(tool, ['type', 'name', 'description', 'parameters']) ~ '\n</function>' }}
    {%- endfor %}
    {{- '\n</tools>\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n' }}
    {{- '</parameter>\n</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
"""
_FUNCTION_TAGS = r"""
        {%- for call in m.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n<function=' ~ call.name ~ '>\n' }}
            {%- for name, value in call.arguments | items %}
                {%- set text = value | tojson | safe if value is mapping or value is sequence and value is not string
                    else value | string %}
                {{- '<parameter=' ~ name ~ '>\n' ~ text ~ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
"""
_CHATML_END = r"""
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}
        {{- '<tool_response>\n' ~ m.content ~ '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
"""

SHAPES: dict[str, Shape] = {
    "glm 4.5": Shape("glm45", "glm45", _GLM_HEAD + r"""
{%- for m in messages %}
    {%- if m.role == 'user' %}<|user|>
{%- set content = visible(m.content) %}
{{ content }}
        {%- if enable_thinking is defined and not enable_thinking and not content.endswith('/nothink') %}
            {{- '/nothink' }}
        {%- endif %}
    {%- elif m.role == 'assistant' -%}
<|assistant|>""" + _THOUGHTS + r"""
        {%- if loop.index0 > ns.last and thoughts %}{{- '\n<think>' ~ thoughts.strip() ~ '</think>' }}
        {%- else %}{{- '\n<think></think>' }}{%- endif %}
        {%- if content.strip() %}{{- '\n' ~ content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>' ~ call.name }}
            {%- for k, v in call.arguments.items() %}
                {{- '\n<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' }}
                {{- (v | tojson(ensure_ascii=False) if v is not string else v) ~ '</arg_value>' }}
            {%- endfor %}
            {{- '\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ visible(m.content) ~ '\n</tool_response>' }}
    {%- elif m.role == 'system' %}<|system|>
{{ visible(m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}"""),
    "glm 4.7": Shape("glm47", "glm45", _GLM_HEAD + r"""
{%- for m in messages %}
    {%- if m.role == 'user' %}<|user|>{{ visible(m.content) }}
    {%- elif m.role == 'assistant' %}<|assistant|>""" + _THOUGHTS + r"""
        {%- if (clear_thinking is defined and not clear_thinking or loop.index0 > ns.last) and thoughts %}
            {{- '<think>' ~ thoughts.strip() ~ '</think>' }}
        {%- else %}{{- '</think>' }}{%- endif %}
        {{- content.strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' ~ call.function.name }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{%- endif %}
        {{- '<tool_response>' ~ visible(m.content) ~ '</tool_response>' }}
    {%- else %}<|system|>{{ visible(m.content) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}"""),
    "qwen 3 coder": Shape("qwen3_coder", None, _SCHEMA_TAGS + r"""
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' ~ (m.content or '') | trim }}""" + _FUNCTION_TAGS + _CHATML_END + r"""
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""),
    "nemotron 3, function tags and thoughts that are opened": Shape(
        "qwen3_coder", "qwen3", _VISIBLE + _LAST_USER + _SCHEMA_TAGS + r"""
{%- for m in messages %}
    {%- if m.role == 'assistant' %}""" + _THOUGHTS + r"""
        {{- '<|im_start|>assistant\n<think>' }}
        {%- if loop.index0 > ns.last or not truncate_history_thinking | default(true) %}
            {{- '\n' ~ thoughts ~ '\n' }}
        {%- endif %}
        {{- '</think>\n' ~ content | trim }}""" + _FUNCTION_TAGS + _CHATML_END + r"""
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' ~ ('<think>\n' if enable_thinking | default(true) else '<think></think>') }}
{%- endif %}"""),
    "seed-oss": Shape("seed_oss", "seed_oss", r"""
{%- set bos, eos = '<seed:bos>', '<seed:eos>' %}
{%- set think_begin, think_end, call_begin = '<seed:think>', '</seed:think>', '<seed:tool_call>' %}
{%- set call_end = '</seed:tool_call>' %}
{%- if not thinking_budget is defined %}{%- set thinking_budget = -1 %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {{- bos ~ 'system\n' ~ messages[0].content ~ eos }}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- bos ~ 'system\n' }}
    {%- for tool in tools %}
        {{- 'def ' ~ tool.function.name ~ '(' ~ tool.function.parameters.properties | join(', ') ~ '):' }}
        {{- '\n    # ' ~ tool.function.description ~ '\n' }}
    {%- endfor %}
    {{- call_begin ~ '\n<function=example_function_name>\n<parameter=example_parameter_1>value_1</parameter>\n' }}
    {{- '</function>\n' ~ call_end ~ eos }}
{%- endif %}
{%- if thinking_budget == 0 %}{{- bos ~ 'system\nAnswer at once, without thoughts.' ~ eos }}{%- endif %}
{%- for m in messages %}
    {{- bos ~ m.role ~ '\n' }}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.reasoning_content is string and m.reasoning_content | trim %}
            {{- '\n' ~ think_begin ~ m.reasoning_content | trim ~ think_end }}
        {%- endif %}
        {{- (m.content or '') | trim }}
        {%- for call in m.tool_calls %}
            {{- '\n' ~ call_begin ~ '\n<function=' ~ call.function.name ~ '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' ~ name ~ '>' ~ (value if value is string else value | tojson) ~ '</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n' ~ call_end }}
        {%- endfor %}
    {%- elif m.role == 'assistant' and m.reasoning_content is string %}
        {{- think_begin ~ m.reasoning_content | trim ~ think_end ~ m.content | trim }}
    {%- else %}{{- m.content }}{%- endif %}
    {{- eos }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- bos ~ 'assistant\n' }}
    {%- if thinking_budget == 0 %}{{- think_begin ~ think_end }}{%- endif %}
{%- endif %}"""),
    "minimax m2": Shape("minimax_m2", "minimax_m2", r"""
{%- set call_begin, call_end = '<minimax:tool_call>', '</minimax:tool_call>' %}""" + _VISIBLE + _LAST_USER + r"""
{%- set system = messages[0] if messages[0].role == 'system' else none %}
{{- ']~!b[]~b]system\n' ~ (visible(system.content) if system else 'Be helpful.') }}
{%- if tools %}
    {{- '\n\n<tools>\n' }}
    {%- for tool in tools %}{{- '<tool>' ~ tool.function | tojson(ensure_ascii=False) ~ '</tool>\n' }}{%- endfor %}
    {{- '</tools>\n\n' ~ call_begin ~ '\n<invoke name="tool-name-1">\n<parameter name="key-1">value-1</parameter>\n' }}
    {{- '</invoke>\n' ~ call_end }}
{%- endif %}
{{- '[e~[\n' }}
{%- for m in messages if m != system %}
    {%- if m.role == 'assistant' %}""" + _THOUGHTS + r"""
        {{- ']~b]ai\n' }}
        {%- if thoughts and loop.index0 > ns.last %}{{- '<think>\n' ~ thoughts ~ '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- if m.tool_calls %}
            {{- '\n' ~ call_begin ~ '\n' }}
            {%- for call in m.tool_calls %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<invoke name="' ~ call.name ~ '">\n' }}
                {%- for k, v in call.arguments.items() %}
                    {{- '<parameter name="' ~ k ~ '">' ~ (v if v is string else v | tojson) ~ '</parameter>\n' }}
                {%- endfor %}
                {{- '</invoke>\n' }}
            {%- endfor %}
            {{- call_end }}
        {%- endif %}
        {{- '[e~[\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- ']~b]tool' }}{%- endif %}
        {{- '\n<response>' ~ visible(m.content) ~ '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '[e~[\n' }}{%- endif %}
    {%- else %}{{- ']~b]' ~ m.role ~ '\n' ~ visible(m.content) ~ '[e~[\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}"""),
    "step 3": Shape("step3", None, r"""{{- bos_token }}
{%- if tools is defined and tools %}
    {{- '<|BOT|>tool_json_schemas\n' ~ tools | tojson(ensure_ascii=false) ~ '<|EOT|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool_response' or m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != m.role %}{{- '<|BOT|>tool_response\n' }}{%- endif %}
        {{- '<｜tool_outputs_begin｜>\n<｜tool_output_begin｜>\n' ~ m.content ~ '\n<｜tool_output_end｜>\n' }}
        {{- '<｜tool_outputs_end｜>' }}
        {%- if loop.last or loop.nextitem.role != m.role %}{{- '<|EOT|>' }}{%- endif %}
    {%- else %}
        {{- '<|BOT|>' ~ m.role ~ '\n' ~ (m.content or '') }}
        {%- if m.tool_calls is defined and m.tool_calls is not none and m.tool_calls | length > 0 %}
            {{- '<｜tool_calls_begin｜>\n' }}
            {%- for call in m.tool_calls %}
                {{- '<｜tool_call_begin｜>' ~ call.type ~ '<｜tool_sep｜>' }}
                {{- '<steptml:invoke name="' ~ call.function.name ~ '">\n' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- '<steptml:parameter name="' ~ name ~ '">' ~ value ~ '</steptml:parameter>\n' }}
                {%- endfor %}
                {{- '</steptml:invoke><｜tool_call_end｜>\n' }}
            {%- endfor %}
            {{- '<｜tool_calls_end｜>' }}
        {%- endif %}
        {{- '<|EOT|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|BOT|>assistant\n' }}{%- endif %}"""),
}  # fmt: skip
