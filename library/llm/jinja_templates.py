"""The built-in templates of ``library.llm.dialogue_templates`` in Jinja, as other programs read them beside a model.

transformers, vLLM and llama.cpp's converter take ``chat_template.jinja`` from a model's folder. The texts here give the
tokens that the template's class gives, for conversations that it takes.
"""

from __future__ import annotations

from pathlib import Path

from library.files import write_text

FILE = "chat_template.jinja"

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message['role'] == 'tool' else message['role'] %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_SYSTEM_FIRST = """\
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if messages[0]['role'] == 'system' else messages) %}
    {%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('user and assistant speak in turn, after one system message') }}
    {%- endif %}
"""

_LLAMA2 = (
    _SYSTEM_FIRST
    + """\
    {%- if message['role'] == 'user' %}
        {%- set opening = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system and loop.first else '' %}
        {{- bos_token + '[INST] ' + opening + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
)

_PLAIN = (
    "{{- '' if bos_token is not defined or bos_token == eos_token else bos_token }}\n"
    + _SYSTEM_FIRST
    + """\
    {%- if message['role'] == 'user' %}
        {%- set opening = system + '\\n\\n' if system and loop.first else '' %}
        {{- opening + 'User: ' + message['content'] | trim + '\\nAssistant:' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
)

SOURCES = {"llama3": _LLAMA3, "llama2": _LLAMA2, "chatml": _CHATML, "plain": _PLAIN}


def write_jinja_template(name: str, folder: Path) -> Path:
    """Write the built-in template called ``name`` into a model's folder, in place of one that is there; return it."""
    path = folder / FILE
    write_text(path, SOURCES[name])
    return path
