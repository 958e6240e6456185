"""Shapes of models whose calls have the name in front of a JSON object."""

from __future__ import annotations

from tests.text.tools.shapes.shape import Shape

_DEEPSEEK_HEAD = r"""
{%- if not add_generation_prompt is defined %}{%- set add_generation_prompt = false %}{%- endif %}
{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{%- set ns = namespace(first=false, tool=false, output_first=true, system='', first_system=true) %}
{%- for m in messages if m.role == 'system' %}
    {%- if ns.first_system %}{%- set ns.system = ns.system ~ m.content %}{%- set ns.first_system = false %}
    {%- else %}{%- set ns.system = ns.system ~ '\n\n' ~ m.content %}{%- endif %}
{%- endfor %}
{%- if tools is defined and tools is not none %}
    {%- set ns.system = ns.system ~ '\n\n## Tools\n' ~ tools | map(attribute='function') | map('tojson') | join('\n') %}
{%- endif %}
{{- bos_token ~ ns.system }}
"""
_DEEPSEEK_TURNS = r"""
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.tool = false %}{%- set ns.first = false %}{{- '<｜User｜>' ~ m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is not none %}
        {%- set ns.tool = false %}
        {%- for call in m.tool_calls %}
            {%- set given = call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson %}
            {%- set written = '<｜tool▁call▁begin｜>' ~ call.type ~ '<｜tool▁sep｜>' ~ call.function.name
                ~ '\n```json\n' ~ given ~ '\n```<｜tool▁call▁end｜>' %}
            {%- if not ns.first %}
                {%- set ns.first = true %}
                {{- '<｜Assistant｜>' ~ (m.content or '') ~ '<｜tool▁calls▁begin｜>' ~ written }}
            {%- else %}{{- '\n' ~ written }}{%- endif %}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1] %}
        {%- if ns.tool %}
            {{- '<｜tool▁outputs▁end｜>' ~ content ~ '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}
        {%- else %}{{- '<｜Assistant｜>' ~ content ~ '<｜end▁of▁sentence｜>' }}{%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if not ns.tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- set ns.tool = true %}{%- endif %}
        {{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
"""
_KIMI = r"""
{%- macro text_of(m) %}
    {%- if m.content is string %}{{- m.content }}
    {%- elif m.content is not none %}{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- macro calls_of(m) %}
    {{- '<|tool_calls_section_begin|>' }}
    {%- for call in m['tool_calls'] %}
        {{- '<|tool_call_begin|>' ~ call['id'] ~ '<|tool_call_argument_begin|>' }}
        {%- if call.function.arguments is string %}{{- call.function.arguments }}
        {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
        {{- '<|tool_call_end|>' }}
    {%- endfor %}
    {{- '<|tool_calls_section_end|>' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson(separators=(',', ':')) ~ '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- set name = m.get('name') or m.role %}
    {%- if m.role == 'user' %}{{- '<|im_user|>' ~ name ~ '<|im_middle|>' }}
    {%- elif m.role == 'assistant' %}{{- '<|im_assistant|>' ~ name ~ '<|im_middle|>THOUGHTS' }}
    {%- else %}{{- '<|im_system|>' ~ name ~ '<|im_middle|>' }}{%- endif %}
    {%- if m.role == 'tool' %}{{- '## Return of ' ~ m.tool_call_id ~ '\n' }}{%- endif %}
    {{- text_of(m) }}
    {%- if m.role == 'assistant' and m.get('tool_calls') %}{{- calls_of(m) }}{%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
_MISTRAL = r"""{{- bos_token }}
{%- set default = 'Think first:[THINK]thoughts[/THINK]then the answer.' if THINKS else '' %}
{%- if messages[0].role != 'system' and default %}{{- '[SYSTEM_PROMPT]' ~ default ~ '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'system' %}{{- '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == 'assistant' %}
        {%- if not m.content and not m.tool_calls %}
            {{- raise_exception('An answer needs content or calls.') }}
        {%- endif %}
        {%- if m.content is string %}{{- m.content }}
        {%- else %}
            {%- for part in m.content %}
                {{- '[THINK]' ~ part.thinking ~ '[/THINK]' if part.type == 'thinking' else part.text }}
            {%- endfor %}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {%- if given is not string %}{%- set given = given | tojson | safe %}
            {%- elif given == '' %}{%- set given = '{}' %}{%- endif %}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ CALL_ID ~ '[ARGS]' ~ given }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' ~ m.tool_call_id ~ '[TOOL_CONTENT]' ~ m.content ~ '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Unknown role ' ~ m.role) }}{%- endif %}
{%- endfor %}"""

SHAPES: dict[str, Shape] = {
    "deepseek v3": Shape("deepseek_v3", None, _DEEPSEEK_HEAD + _DEEPSEEK_TURNS.replace(
        ".split('</think>')[-1]", "") + r"""
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}"""),
    "deepseek r1": Shape("deepseek_v3", "deepseek_r1", _DEEPSEEK_HEAD + _DEEPSEEK_TURNS + r"""
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"""),
    "deepseek v3.1": Shape("deepseek_v31", "deepseek_r1", _DEEPSEEK_HEAD + _DEEPSEEK_TURNS.replace(
        "call.type ~ '<｜tool▁sep｜>' ~ call.function.name", "call.function.name ~ '<｜tool▁sep｜>'"
    ).replace(" ~ '\\n```json\\n'", "").replace("\\n```<", "<").replace(
        "'<｜Assistant｜>' ~ content", "'<｜Assistant｜></think>' ~ content") + r"""
{%- if add_generation_prompt and not ns.tool %}
    {{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') }}
{%- endif %}"""),
    "kimi k2": Shape("kimi_k2", None, _KIMI.replace("THOUGHTS", "")),
    "kimi k2 thinking": Shape("kimi_k2", "kimi_k2", _KIMI.replace(
        "THOUGHTS", "<think>' ~ (m.reasoning_content or '') ~ '</think>")),
    "mistral v11": Shape("mistral_v11", None, _MISTRAL.replace("THINKS", "false").replace(
        "CALL_ID", "'[CALL_ID]' ~ call.id")),
    "mistral v13": Shape("mistral_v11", "mistral", _MISTRAL.replace("THINKS", "true").replace("CALL_ID ~", "")),
    "gpt-oss": Shape("gpt_oss", "gpt_oss", r"""
{%- macro typed(spec, indent='') %}
    {%- if spec.enum %}{{- '"' ~ spec.enum | join('" | "') ~ '"' }}
    {%- elif spec.type == 'array' %}{{- typed(spec['items']) ~ '[]' }}
    {%- elif spec.type == 'integer' %}{{- 'number' }}
    {%- else %}{{- spec.type or 'any' }}{%- endif %}
{%- endmacro %}
{%- if developer_instructions is defined %}{%- set developer = developer_instructions %}
{%- elif messages[0].role in ['developer', 'system'] %}
    {%- set developer = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start|>system<|message|>Knowledge cutoff: 2024-06\nCurrent date: " ~ strftime_now("%Y-%m-%d") }}
{{- "\n\nReasoning: " ~ (reasoning_effort or 'medium') ~ "\n\n# Valid channels: analysis, commentary, final." }}
{{- "<|end|>" }}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer %}{{- "# Instructions\n\n" ~ developer }}{%- endif %}
    {%- if tools %}
        {{- "# Tools\n\n## functions\n\nnamespace functions {\n\n" }}
        {%- for tool in tools %}
            {{- "// " ~ tool.function.description ~ "\ntype " ~ tool.function.name ~ " = (_: {\n" }}
            {%- for name, spec in tool.function.parameters.properties.items() %}
                {{- "// " ~ spec.description ~ "\n" ~ name ~ ": " ~ typed(spec) ~ ",\n" }}
            {%- endfor %}
            {{- "}) => any;\n\n" }}
        {%- endfor %}
        {{- "} // namespace functions" }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>analysis<|message|>' in (m.content or '') %}
            {{- raise_exception('Give thoughts as `thinking`.') }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function %}
            {%- if m.content and m.thinking %}{{- raise_exception('Both content and thoughts.') }}
            {%- elif m.content or m.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ (m.content or m.thinking) ~ "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson ~ "<|call|>" }}
            {%- set last.call = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if m.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ m.thinking ~ "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" ~ m.content ~ "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" ~ m.content ~ "<|end|>" }}{%- set last.call = none %}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if last.call is none %}{{- raise_exception('A result without a call.') }}{%- endif %}
        {{- "<|start|>functions." ~ last.call ~ " to=assistant<|channel|>commentary<|message|>" }}
        {{- m.content | tojson ~ "<|end|>" }}
    {%- else %}{{- "<|start|>" ~ m.role ~ "<|message|>" ~ m.content ~ "<|end|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""),
    "functionary v3.2": Shape(None, None, r"""{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n// functions\nnamespace functions {\n' }}
    {%- for tool in tools %}{{- 'type ' ~ tool.function.name ~ ' = (_: any) => any;\n' }}{%- endfor %}
    {{- '}<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role in ['user', 'system'] %}
        {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content ~ '<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>tool<|end_header_id|>\n\n' ~ m.content ~ '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- if m.content %}{{- '>>>all\n' ~ m.content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '>>>' ~ call.function.name ~ '\n' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n>>>' }}{%- endif %}"""),
}  # fmt: skip
