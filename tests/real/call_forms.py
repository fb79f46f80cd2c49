"""A call in the form of each of vLLM's tool parsers, and the tokens that they require of a tokenizer."""

from __future__ import annotations

TOKENS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
)
_ARGUMENTS = '{"code": "print(1)"}'
_CALL = f'{{"name": "python", "arguments": {_ARGUMENTS}}}'
_PARAMETERS = f'{{"name": "python", "parameters": {_ARGUMENTS}}}'
_PYTHON = "[python(code='print(1)')]"
_TAGGED = f"<tool_call>\n{_CALL}\n</tool_call>"
_XML = "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n</tool_call>"
_GLM = "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>print(1)</arg_value>\n</tool_call>"
_DSML = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="python">\n'
    '<｜DSML｜parameter name="code" string="true">print(1)</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜{0}>"
)
_HY = "<arg_key>code</arg_key><arg_value>print(1)</arg_value></tool_call></tool_calls>"
FORMS = {
    "apertus": f'<|tools_prefix|>[{{"python": {_ARGUMENTS}}}]<|tools_suffix|>',
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python\n"
        f"```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": _DSML.format("function_calls"),
    "deepseek_v4": _DSML.format("tool_calls"),
    "ernie45": f"</think>\n{_TAGGED}",
    "functiongemma": "<start_function_call>call:python{code:<escape>print(1)<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:python{code:<|"|>print(1)<|"|>}<tool_call|>',
    "gigachat3": f"function call<|role_sep|>\n{_CALL}",
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": f"<|tool_call|>[{_CALL}]",
    "granite-20b-fc": f"<function_call> {_CALL}",
    "granite4": _TAGGED,
    "hermes": _TAGGED,
    "hunyuan_a13b": f"<tool_calls>[{_CALL}]</tool_calls>",
    "hy_v3": f"<tool_calls><tool_call>python<tool_sep>{_HY}",
    "hy_v4": f"<tool_calls><tool_call>python{_HY}",
    "internlm": f"<|action_start|><|plugin|>{_PARAMETERS}<|action_end|>",
    "jamba": f"<tool_calls>[{_CALL}]</tool_calls>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "ling3": _GLM,
    "llama3_json": f"<|python_tag|>{_PARAMETERS}",
    "llama4_json": _PARAMETERS,
    "llama4_pythonic": _PYTHON,
    "longcat": f"<longcat_tool_call>{_CALL}</longcat_tool_call>",
    "mimo": _XML,
    "minicpm5": '<function name="python"><param name="code">print(1)</param></function>',
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="python">\n<parameter name="code">print(1)</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "mistral": f"[TOOL_CALLS]python[ARGS]{_ARGUMENTS}",
    "olmo3": "<function_calls>\npython(code='print(1)')\n</function_calls>",
    "phi4_mini_json": f"functools[{_CALL}]",
    "poolside_v1": _GLM,
    "pythonic": _PYTHON,
    "qwen3_coder": _XML,
    "qwen3_json": _TAGGED,
    "qwen3_xml": _XML,
    "seed_oss": _XML.replace("tool_call>", "seed:tool_call>"),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="python">'
        '<steptml:parameter name="code">print(1)</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "step3p5": _XML,
    "xlam": f"[{_CALL}]",
}
"""A call of `python` with the code `print(1)`."""
OTHERS = {"deepseek_v41", "dots", "inkling", "k2_horizon", "kimi_k3", "minimax_m3", "muse_glimmer", "plamo3"}
"""Parsers whose form is not known here."""
READ_NO_TEXT = {"cohere_command3", "cohere_command4", "hf", "openai"}
"""Parsers that raise NotImplementedError on every turn."""
_SECOND = (
    ('"print(1)"}', '"print(1)", "n": 12}'),
    ("code='print(1)'", "code='print(1)', n=12"),
    ("<escape>print(1)<escape>}", "<escape>print(1)<escape>,n:<escape>12<escape>}"),
    ('<|"|>print(1)<|"|>}', '<|"|>print(1)<|"|>,n:12}'),
    ("print(1)\n</parameter>", "print(1)\n</parameter>\n<parameter=n>\n12\n</parameter>"),
    ("print(1)</parameter>", 'print(1)</parameter>\n<parameter name="n">12</parameter>'),
    ("print(1)</param>", 'print(1)</param><param name="n">12</param>'),
    ("print(1)</steptml:parameter>", 'print(1)</steptml:parameter><steptml:parameter name="n">12</steptml:parameter>'),
    (
        "print(1)</｜DSML｜parameter>",
        'print(1)</｜DSML｜parameter><｜DSML｜parameter name="n" string="false">12</｜DSML｜parameter>',
    ),
    ("print(1)</arg_value>", "print(1)</arg_value><arg_key>n</arg_key><arg_value>12</arg_value>"),
)


def two_arguments(form: str) -> str:
    """The call of a form with a second argument."""
    end, longer = next((end, longer) for end, longer in _SECOND if end in form)
    return form.replace(end, longer, 1)
