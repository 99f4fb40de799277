"""Chat templates of many kinds, and what is supervised of the conversations that they write, for test_chat.py."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and what is supervised of the conversations that it writes."""

    template: str
    says: Callable[[str], str]  # an assistant's words -> the supervised text of the last turn
    marker: str  # that begins an assistant's turn
    specials: tuple[str, ...] = ()
    system: bool = True  # whether it takes a system turn
    blanks: bool = True  # whether the words' outer blanks stay
    history: Callable[[str], str] | None = None  # as `says`, of turns that others follow, where that differs
    begun: str = ""  # what the generation prompt begins of the answer, and no turn that others follow has
    added: str = ""  # the end of a turn, which the template leaves out of a last one


IM = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATE = (
    "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% endfor %}"
)
SPLIT_SYSTEM = (
    "{% if messages and messages[0].role == 'system' %}{% set system = messages[0].content %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set loop_messages = messages %}{% endif %}"
)
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.searching = false %}{%- set ns.last_query = index %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{%- set reasoning = '' %}
{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""


def qwen35(begun):
    """QWEN3 with reasoning in each turn after the last question, and a prompt that begins it."""
    text = QWEN3.replace("(loop.last or reasoning)", "true").rpartition("{%- if add_generation_prompt %}")[0]
    return text + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n" + begun + "' }}{%- endif %}"


DEEPSEEK = """{% set ns = namespace(system='', tool=false, first=true) %}{{ bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m.content }}{% endif %}
{%- if m.role == 'assistant' and m.content is none %}{% set tool = ns.tool %}{% set ns.tool = false %}{% for call in m.tool_calls %}
{%- if loop.first %}{{ ('<|outputs_end|>' if tool else '<|Assistant|>') + '<|calls|>' }}{% else %}{{ '\\n' }}{% endif %}
{{- '<|call|>' + call.function.name + '\\n' + call.function.arguments }}{% endfor %}{{ '<|calls_end|><|eos|>' }}{% endif %}
{%- if m.role == 'assistant' and m.content is not none %}
{%- if ns.tool %}{{ '<|outputs_end|>' + m.content + '<|eos|>' }}{% set ns.tool = false %}
{%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|eos|>' }}{% endif %}{% endif %}
{%- if m.role == 'tool' %}{{ ('<|output|>' if ns.tool else '<|outputs|><|output|>') + m.content }}{% set ns.tool = true %}{% endif %}
{%- endfor %}{% if ns.tool %}{{ '<|outputs_end|>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
HARMONY = """{% for m in messages %}{% if m.role == 'assistant' %}
{%- if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}INSIDE{% endgeneration %}OUTSIDE{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def marked(inside, outside):
    return MARKED.replace("INSIDE", "{{ '" + inside + "' }}" if inside else "").replace(
        "OUTSIDE", "{{ '" + outside + "' }}" if outside else ""
    )


def think(words):
    return words.rpartition("</think>")[2]


def qwen(words):
    """In Qwen's history, the blank lines after the reasoning go with it."""
    return think(words).lstrip("\n") if "</think>" in words else words


def reasoned(words, between="\n</think>\n\n"):
    """The reasoning and the words, as Qwen takes them apart."""
    reasoning = words.split("</think>")[0].rstrip("\n").split("<think>")[-1].strip("\n") if "</think>" in words else ""
    return (reasoning + "\n</think>\n\n" if reasoning else between) + think(words).lstrip("\n")


CHAT_TEMPLATES = {
    "chatml": ChatTemplate(CHATML, lambda s: s + "<|im_end|>", "<|im_start|>assistant\n", IM),
    "chatml with a default system prompt": ChatTemplate(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML,
        lambda s: s + "<|im_end|>",
        "<|im_end|>\n<|im_start|>assistant\n",
        IM,
    ),
    "llama 3": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        lambda s: s + "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        blanks=False,
    ),
    "mistral without system": ChatTemplate(
        "{% set loop_messages = messages %}" + ALTERNATE + "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        lambda s: f" {s}</s>",
        " [/INST]",
        system=False,
    ),
    "mistral, system in the last user turn": ChatTemplate(
        SPLIT_SYSTEM + ALTERNATE + "{{ bos_token }}{% set last = (loop_messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
        "{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if system and m == last else '') + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}",
        lambda s: f" {s}</s>",
        "[/INST]",
        ("[INST]", "[/INST]"),
        blanks=False,
    ),
    "mistral, system only where the user is last": ChatTemplate(
        SPLIT_SYSTEM + "{{ bos_token }}{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if system and loop.last else '') + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}",
        lambda s: f" {s}</s>",
        "[/INST] ",
        ("[INST]", "[/INST]"),
        blanks=False,
    ),
    "llama 2, system in the first user turn": ChatTemplate(
        SPLIT_SYSTEM + ALTERNATE + "{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if system and loop.first else '') + m.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        lambda s: f" {s} </s>",
        " [/INST] ",
        blanks=False,
    ),
    "gemma": ChatTemplate(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        lambda s: s + "<end_of_turn>",
        "<start_of_turn>model\n",
        ("<start_of_turn>", "<end_of_turn>"),
        system=False,
        blanks=False,
    ),
    "phi 3, which closes the conversation": ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        lambda s: s + "<|end|>",
        "<|assistant|>\n",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
    ),
    "phi 4 mini, where the closing follows at once": ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        lambda s: s + "<|end|>",
        "<|end|><|assistant|>",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
    ),
    "zephyr": ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        lambda s: s + "</s>",
        "<|assistant|>\n",
    ),
    "deepseek r1, whose history has no reasoning": ChatTemplate(
        DEEPSEEK,
        lambda s: think(s) + "<|eos|>",
        "<|Assistant|><think>\n",
        ("<|User|>", "<|Assistant|>", "<|eos|>", "<|calls|>", "<|call|>", "<|calls_end|>", "<|outputs|>", "<|output|>", "<|outputs_end|>"),
        begun="<think>\n",
    ),
    "qwen 3, an empty block for the last turn": ChatTemplate(
        QWEN3,
        lambda s: "<think>\n\n</think>\n\n" + think(s).lstrip("\n") + "<|im_end|>",
        "<|im_start|>assistant\n<think>",
        IM,
        history=lambda s: qwen(s) + "<|im_end|>",
    ),
    "harmony, whose last turn ends otherwise": ChatTemplate(
        HARMONY,
        lambda s: f"<|channel|>final<|message|>{s}<|return|>",
        "<|start|>assistant",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        history=lambda s: f"<|channel|>final<|message|>{s}<|end|>",
    ),
    "marked, end inside": ChatTemplate(marked("<|im_end|>\n", ""), lambda s: s + "<|im_end|>", "<|im_start|>assistant\n", IM),
    "marked, end outside": ChatTemplate(marked("", "<|im_end|>\n"), lambda s: s + "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n", IM),
    "marked, no end": ChatTemplate(marked("", "\n"), lambda s: s, "<|im_start|>assistant\n", IM),
    "trimmed": ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}\n{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}",
        lambda s: s + "\n</s>",
        "[assistant]\n",
        blanks=False,
    ),
    "plain text": ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}"
        "{{ '### Instruction:\n' + m.content + '\n\n' }}{% else %}{{ '### Response:\n' + m.content + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
        lambda s: s + "\n\n",
        "### Response:\n",
    ),
    "vicuna": ChatTemplate(
        SPLIT_SYSTEM + "{{ (system or 'A chat.') + ' ' }}{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        lambda s: f" {s}</s>",
        "ASSISTANT:",
    ),
    "a generation prompt that ends in a blank": ChatTemplate(
        SPLIT_SYSTEM + "{{ system }}{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}",
        lambda s: s + "</s>",
        "ASSISTANT: ",
    ),
    "command r": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% set role = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m.role] %}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + ('<|START_RESPONSE|>' if role == 'CHATBOT' else '') + m.content | trim"
        " + ('<|END_RESPONSE|>' if role == 'CHATBOT' else '') + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        lambda s: f"<|START_RESPONSE|>{s}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        (
            "<|START_OF_TURN_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        blanks=False,
    ),
    "the end is left out of a last turn": ChatTemplate(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if add_generation_prompt or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        lambda s: s + "<|im_end|>",
        "<|im_end|>\n<|im_start|>assistant\n",
        IM,
        added="<|im_end|>",
    ),
    "the same after a default system prompt": ChatTemplate(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if m.role != 'assistant' or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        lambda s: s + "<|im_end|>",
        "<|im_start|>assistant\n",
        IM,
        added="<|im_end|>",
    ),
    "apertus, whose roles have tokens of their own and whose last turn no end": ChatTemplate(
        "{{ bos_token + '<|developer_start|>No tools.<|developer_end|>' }}{% for m in messages %}{{ '<|' + m.role + '_start|>' + m.content }}"
        "{% if m.role != 'assistant' or not loop.last %}{{ '<|' + m.role + '_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}",
        lambda s: s + "<|assistant_end|>",
        "<|assistant_start|>",
        tuple(f"<|{role}_{edge}|>" for role in ("developer", "system", "user", "assistant") for edge in ("start", "end")),
        added="<|assistant_end|>",
    ),
    "apriel 1.6, whose prompt begins the reasoning in words": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '\n<|begin_assistant|>\n' + m.content }}"
        "{% if not loop.last %}{{ '\n<|end|>\n' }}{% endif %}{% else %}{{ '<|begin_' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n<|begin_assistant|>\nHere are my reasoning steps:\n' }}{% endif %}",
        lambda s: s + "\n<|end|>",
        "<|begin_assistant|>\n",
        ("<|begin_system|>", "<|begin_user|>", "<|begin_assistant|>", "<|end|>"),
        begun="Here are my reasoning steps:\n",
        added="\n<|end|>",
    ),
    "hy 3, an empty block in the prompt and no end of a last turn": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + ('<think></think>' if m.role == 'assistant' else '') + m.content }}"
        "{% if m.role == 'assistant' and not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think></think>' }}{% endif %}",
        lambda s: s + "</s>",
        "<|assistant|><think></think>",
        ("<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>"),
        added="</s>",
    ),
    "kimi k3, whose tags are three tokens": ChatTemplate(
        "{% macro open(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}{% macro close(tag) %}{{ '<|close|>' + tag + '<|sep|>' }}{% endmacro %}"
        "{% for m in messages %}{{ open('message role=' + m.role) }}{% if m.role == 'assistant' %}"
        "{{ open('think') + close('think') + open('response') + m.content + close('response') }}{% else %}{{ m.content }}{% endif %}"
        "{{ close('message') + '<|end_of_msg|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ open('message role=assistant') + open('think') }}{% endif %}",
        lambda s: f"<|close|>think<|sep|><|open|>response<|sep|>{s}<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
        "<|open|>message role=assistant<|sep|><|open|>think<|sep|>",
        ("<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"),
    ),
    "command r7b, whose generation prompt is always there": ChatTemplate(
        "{{ bos_token + '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are Command.<|END_OF_TURN_TOKEN|>' }}"
        "{% for m in messages %}{% set role = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m.role] %}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + ('<|START_RESPONSE|>' if role == 'CHATBOT' else '') + m.content"
        " + ('<|END_RESPONSE|>' if role == 'CHATBOT' else '') + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>' }}",
        lambda s: f"<|START_RESPONSE|>{s}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        (*(f"<|{role}_TOKEN|>" for role in ("START_OF_TURN", "END_OF_TURN", "CHATBOT", "USER", "SYSTEM")),)
        + ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        begun="<|START_THINKING|><|END_THINKING|>",
    ),
    "toolace, llama 3 whose generation prompt is always there": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
        "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        lambda s: s + "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "metharme, where only the last turn has an end": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ '<|' + ('model' if m.role == 'assistant' else m.role) + '|>' + m.content | trim }}{% endfor %}"
        "{{ '<|model|>' if add_generation_prompt else eos_token }}",
        lambda s: s + "</s>",
        "<|model|>",
        ("<|system|>", "<|user|>", "<|model|>"),
        blanks=False,
        history=lambda s: s,
    ),
    "qwen 3.5, whose prompt begins the reasoning": ChatTemplate(
        qwen35("<think>\\n"),
        lambda s: reasoned(s) + "<|im_end|>",
        "<|im_start|>assistant\n<think>\n",
        IM,
        history=lambda s: qwen(s) + "<|im_end|>",
    ),
    "axolotl's qwen 3, whose prompt goes on after the tag": ChatTemplate(
        qwen35("<think>\\n\\n"),
        lambda s: reasoned(s, "</think>\n\n") + "<|im_end|>",
        "<|im_start|>assistant\n<think>\n",
        (*IM, "<think>", "</think>"),
        history=lambda s: qwen(s) + "<|im_end|>",
    ),
    "minicpm 4.5, an empty block in the prompt and before the last turn": ChatTemplate(
        qwen35("<think>\\n\\n</think>\\n\\n"),
        lambda s: reasoned(s, "") + "<|im_end|>",
        "<|im_start|>assistant\n<think>\n",
        IM,
        history=lambda s: qwen(s) + "<|im_end|>",
    ),
    "nemotron nano 2, a tag before the last turn alone": ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<S11>Assistant\n' + ('<think>\n' if loop.last else '') + m.content | trim + '\n<S12>\n' }}"
        "{% else %}{{ ('<S10>System' if m.role == 'system' else '<S11>User') + '\n' + m.content | trim + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<S11>Assistant\n<think>\n' }}{% endif %}",
        lambda s: s + "\n<S12>",
        "<S11>Assistant\n",
        ("<S10>", "<S11>", "<S12>"),
        blanks=False,
    ),
    "gemma 4, a channel in the prompt alone": ChatTemplate(
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<turn|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn>model\n<|channel>thought\n<channel|>' }}{% endif %}",
        lambda s: s + "<turn|>",
        "<|turn>model\n",
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        begun="<|channel>thought\n<channel|>",
    ),
    "glm, where the next role ends a turn": ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        lambda s: "\n" + s,
        "<|assistant|>\n",
        ("<|user|>", "<|assistant|>", "<|system|>"),
    ),
    "roles without a prompt to generate": ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        lambda s: f"<|im_start|>assistant\n{s}<|im_end|>",
        "<|im_start|>assistant\n",
        IM,
    ),
}
