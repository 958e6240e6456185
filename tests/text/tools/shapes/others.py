"""Shapes of models whose calls have Python's form, or are not written in a known one."""

from __future__ import annotations

from tests.text.tools.shapes.shape import Shape

_PYTHON_CALLS = r"""
{%- for call in m.tool_calls %}
    {{- call.function.name ~ '(' }}
    {%- for name, value in call.function.arguments.items() %}
        {{- name ~ '=' ~ value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
    {{- ')' }}{%- if not loop.last %}{{- BETWEEN }}{%- endif %}
{%- endfor %}
"""

SHAPES: dict[str, Shape] = {
    "llama 3.2 in Python's form": Shape("pythonic", None, r"""{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content ~ '\n\n' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools is not none %}{{- 'Call as [func_name1(a=1), func_name2()]:\n' ~ tools | tojson(indent=4) }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls is defined %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n[' }}""" + _PYTHON_CALLS.replace("BETWEEN", "', '") + r"""
        {{- ']<|eot_id|>' }}
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ m.content | tojson ~ '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""),
    "olmo 3": Shape("olmo3", "qwq", r"""
{%- set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 %}
{%- if not has_system %}{{- '<|im_start|>system\nYou are a function-calling AI.' }}
    {%- if tools is none or tools | length == 0 %}{{- ' You have no functions. <functions></functions>' }}
    {%- else %}{{- ' <functions>' ~ tools | tojson ~ '</functions>' }}{%- endif %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- '<|im_start|>system\n' ~ m.content }}
        {%- if m.functions is not none %}{{- ' <functions>' ~ (tools or []) | tojson ~ '</functions>' }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' ~ (m.content or '') }}
        {%- if m.function_calls is defined %}{{- '<function_calls>' ~ m.function_calls ~ '</function_calls>' }}
        {%- elif m.tool_calls is defined %}
            {{- '<function_calls>' }}""" + _PYTHON_CALLS.replace("BETWEEN", "'\\n'") + r"""
            {{- '</function_calls>' }}
        {%- endif %}
        {{- '<|im_end|>' ~ '\n' if not loop.last else eos_token }}
    {%- elif m.role in ['environment', 'tool'] %}{{- '<|im_start|>environment\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|im_start|>assistant\n<think>' }}{%- endif %}
{%- endfor %}"""),
    "minicpm 3, Python in a block": Shape(None, None, r"""
{%- for m in messages %}
    {{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' }}
    {%- if m.tool_calls %}
        {{- '<|tool_call_start|>\n```python\n' }}""" + _PYTHON_CALLS.replace("BETWEEN", "'\\n'") + r"""
        {{- '\n```\n<|tool_call_end|>\n' }}
    {%- endif %}
    {{- (m.content or '') ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""),
    "lfm2, tools and results but no calls": Shape(None, None, r"""{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {%- set ns.system = ns.system ~ ('\n' if ns.system else '') ~ 'List of tools: <|tool_list_start|>[' %}
    {%- for tool in tools %}
        {%- set ns.system = ns.system ~ (tool if tool is string else tool | tojson) ~ ('' if loop.last else ', ') %}
    {%- endfor %}
    {%- set ns.system = ns.system ~ ']<|tool_list_end|>' %}
{%- endif %}
{%- if ns.system %}{{- '<|im_start|>system\n' ~ ns.system ~ '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else m.content | tojson %}
    {%- if m.role == 'tool' %}
        {%- set content = '<|tool_response_start|>' ~ content ~ '<|tool_response_end|>' %}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""),
    "granite 3.3, thoughts by a switch": Shape(None, "granite", r"""
{%- set system = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if thinking %}
    {%- set system = system ~ ' Write thoughts between <think> and </think>, the answer between <response> and '
        ~ '</response>.' %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' ~ system ~ '<|end_of_text|>\n' }}
{%- for m in turns %}
    {{- '<|start_of_role|>' ~ m.role ~ '<|end_of_role|>' ~ m.content ~ '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant' }}
    {%- if controls %}{{- ' ' ~ controls | tojson }}{%- endif %}
    {{- '<|end_of_role|>' }}
{%- endif %}"""),
    "phi-4-mini, tools of the system turn alone": Shape(None, None, r"""{%- for m in messages %}
{%- if m.role == 'system' and 'tools' in m and m.tools is not none %}
{{- '<|system|>' ~ m.content ~ '<|tool|>' ~ m.tools ~ '<|/tool|><|end|>' }}
{%- else %}{{- '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""),
    "phi-4-reasoning": Shape(None, "phi4", r"""<|im_start|>system<|im_sep|>
{{- 'Two parts: thoughts and answer: <think> {thoughts} </think> {answer}.' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}<|im_end|>
{%- for m in messages %}
    {%- if m.role != 'system' %}{{- '<|im_start|>' ~ m.role ~ '<|im_sep|>' }}
        {%- generation %}{{- m.content }}{%- endgeneration %}{{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{%- endif %}"""),
    "apertus, names as keys": Shape(None, None, r"""{{- bos_token }}
{%- set ns = namespace(open=false) %}
{{- '<|system_start|>' ~ (messages[0].content if messages[0].role == 'system' else 'Be helpful.') ~ '<|system_end|>' }}
{{- '<|developer_start|>Deliberation: ' ~ ('enabled' if enable_thinking | default(false) else 'disabled') ~ '\n' }}
{%- if tools %}{{- '// tools\n' ~ tools | tojson }}{%- else %}{{- 'no tools' }}{%- endif %}<|developer_end|>
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}
        {%- if ns.open %}{{- '<|assistant_end|>' }}{%- set ns.open = false %}{%- endif %}
        {{- '<|user_start|>' ~ m.content ~ '<|user_end|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if not ns.open %}{{- '<|assistant_start|>' }}{%- set ns.open = true %}{%- endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            {{- '<|tools_prefix|>[' }}
            {%- for call in m.tool_calls %}
                {{- '{"' ~ call.function.name ~ '": ' ~ call.function.arguments | tojson ~ '}' }}
                {{- ', ' if not loop.last else '' }}
            {%- endfor %}
            {{- ']<|tools_suffix|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if not ns.open %}{{- raise_exception('A result outside an answer.') }}{%- endif %}
        {{- '[' ~ m.content ~ ']' }}
    {%- endif %}
{%- endfor %}
{%- if ns.open %}{{- '<|assistant_end|>' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|assistant_start|>' }}{%- endif %}"""),
    "hunyuan dense, names in front of blocks": Shape(None, "hunyuan", r"""
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{%- set ns.system = m.content %}{%- endfor %}
{{- '<｜hy_begin▁of▁sentence｜>' ~ ns.system }}
{%- if tools %}{{- '<tools>' ~ tools | map('tojson') | join('\n') ~ '</tools>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜hy_User｜>' ~ m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<｜hy_Assistant｜>' ~ (m.content or '') ~ '<tool_calls>' }}
        {%- for call in m.tool_calls %}
            {{- '<tool_call>' ~ call.type ~ '<tool_sep>' ~ call.function.name ~ '\n```json\n' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '\n```</tool_call>' }}
        {%- endfor %}
        {{- '</tool_calls><｜hy_place▁holder▁no▁2｜>' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '<answer>' in content and '</answer>' in content %}
            {%- set content = content.split('<answer>')[-1].split('</answer>')[0].strip() %}
        {%- endif %}
        {{- '<｜hy_Assistant｜>' ~ content ~ '<｜hy_place▁holder▁no▁2｜>' }}
    {%- elif m.role == 'tool' %}
        {{- '<tool_responses><tool_response>' ~ m.content ~ '</tool_response></tool_responses>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜hy_Assistant｜>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n' }}{%- endif %}
{%- endif %}"""),
    "toolace, described alone": Shape("pythonic", None, r"""{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nAnswer as [func_name1(name1=value1), func_name2(...)].\n' }}
    {{- tools | tojson ~ '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""),
}  # fmt: skip
