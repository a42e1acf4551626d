"""Calls of tools in every style: what is written is read back, and what is broken is said in a sentence."""

from __future__ import annotations

import asyncio
import json
from keyword import iskeyword
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agents.base import History
from agents.check import check_agent
from agents.memory.base import DemonstrationInputs
from agents.tool_calls import Style, ToolCall, Unreadable, read_calls, split_calls, write_calls
from agents.tools import ToolAgent
from rlhf.data import Action, Finish, Generation, Prompt, Role, Task, Turn
from rlhf.rollout.renderer import Renderer
from rlhf.training.policy.tokenizer import train_tokenizer
from tests.agents.spoken import Says

STYLES = get_args(Style)
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
#: Texts without what ends a call in some style; white space at the ends of a parameter belongs to the style.
TEXTS = st.text(st.characters(exclude_characters="<>[]`", exclude_categories=("Cs", "Cc")), max_size=12).map(str.strip)
MARKS = ("tool_call", "function=f", "function", "parameter=x", "parameter")
TAGS = [f"<{end}{mark}>" for end in ("", "/") for mark in MARKS]
TAGGED = st.builds("{0}{1}{2}".format, TEXTS, st.sampled_from(TAGS), TEXTS)
#: Names of tools, as APIs and MCP servers have them.
TOOLS = NAMES | st.sampled_from(
    ["get-weather", "web.search", "fs/read-file", "import", "a.from", "3d-plot", "x-2", "_", "__0"]
)
NUMBERS = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | TAGGED,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
KEYS = NAMES | st.sampled_from(["from", "class", "None", "a b", "due-date"])
CALLS = st.lists(st.builds(ToolCall, TOOLS, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=4)


@pytest.mark.parametrize("style", STYLES)
@given(calls=CALLS)
@example(calls=[ToolCall("f", {"from": "'</tool_call>'", "a b": ["</parameter>", {"x": "<parameter=x></function>"}]})])
def test_what_is_written_is_read_back(style: Style, calls: list[ToolCall]) -> None:
    assert read_calls(write_calls(calls, style), style) == calls


def test_names_that_python_has_not_are_read_in_its_style() -> None:
    said = "[get-weather(city='not-this(x=1)', note=\"it's\"), web.search(q='''a 'b' c-d('''), import(n=-2), f()]"
    assert read_calls(said, "python") == [
        ToolCall("get-weather", {"city": "not-this(x=1)", "note": "it's"}),
        ToolCall("web.search", {"q": "a 'b' c-d("}),
        ToolCall("import", {"n": -2}),
        ToolCall("f", {}),
    ]
    assert read_calls("I look.\n```python\nget-weather(city='Rome')\n```", "python") == [
        ToolCall("get-weather", {"city": "Rome"})
    ]
    for said in ("It's 5-f(3).", "a - f(x=1)", "[2x-f(x)]"):
        with pytest.raises(Unreadable):
            read_calls(said, "python")


@pytest.mark.parametrize("style", STYLES)
@given(text=st.text() | st.text("[]{}()<>=\"',:tool_call/function ", max_size=60))
def test_any_text_is_read_or_refused_in_a_sentence(style: Style, text: str) -> None:
    try:
        assert read_calls(text, style)
    except Unreadable as error:
        assert len(str(error)) > 10


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("json", 'I will search.\n```json\n{"name": "search", "arguments": {"query": "a"}}\n```'),
        ("json", '{"tool": "search", "parameters": {"query": "a"}}'),
        ("json", '[{"type": "function", "function": {"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}}]'),
        ("json", 'See [1]. {"name": "search", "arguments": {"query": "a"}} Done.'),
        ("hermes", 'Sure.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'),
        ("llama", '<|python_tag|>{"name": "search", "parameters": {"query": "a"}}'),
        ("llama", 'In {x}: <|python_tag|>{"name": "search", "parameters": {"query": "a"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}}]'),
        ("mistral", 'Well. [TOOL_CALLS]search[ARGS]{"query": "a"}'),
        ("mistral", '[TOOL_CALLS]search{"query": "a"}'),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]aB3dE5fG7[ARGS]{"query": "a"}'),
        ("xml", "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n</function>\n</tool_call>"),
        ("python", "[search(query='a')]"),
        ("python", '```python\nsearch(query="a")\n```'),
        ("python", '```search(query="a")```'),
        ("json", '```json{"name": "search", "arguments": {"query": "a"}}```'),
        ("json", '```tool_call\n{"name": "search", "arguments": {"query": "a"}}\n```'),
    ],
)
def test_calls_as_models_write_them(style: Style, text: str) -> None:
    assert read_calls(text, style) == [ToolCall("search", {"query": "a"})]
    assert read_calls('[plot(points={1: 2, "a": 3})]', "python") == [ToolCall("plot", {"points": {"1": 2, "a": 3}})]


@pytest.mark.parametrize("style", ["json", "llama"])
@pytest.mark.parametrize(
    "prose", ["Use {braces}.", "The set {1,2} matters.", r"So \boxed{\frac{1}{2}}.", "Let { x | x > 0 }."]
)
def test_braces_of_a_sentence_are_passed_over(style: Style, prose: str) -> None:
    written = write_calls([ToolCall("f", {"x": 1})], style)
    for text in (f"{written}\n\n{prose}", f"{prose} {written}", f"{prose}\n{written}\n{prose}"):
        assert read_calls(text, style) == [ToolCall("f", {"x": 1})]
    with pytest.raises(Unreadable, match="no valid JSON"):
        read_calls(prose, style)
    for half in ('{"name": "g", "arg', "{", "{'name': 'g'}", '{name: "g"}', '{{"name": "g"}}'):
        with pytest.raises(Unreadable, match="no valid JSON"):
            read_calls(f"{prose} {written}\n{half}", style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("prose", ["", "I look.", "Of {a, b} and [1, 2] I take `x`:", "Now [the call]:", "{x} first."])
@pytest.mark.parametrize("n", [1, 2])
def test_what_is_said_before_the_first_call_is_kept_whole(style: Style, prose: str, n: int) -> None:
    calls = [ToolCall("f", {"x": {"y": [1]}})] * n
    written = write_calls(calls, style)
    for text in (f"{prose} {written} Done.", f"\n{prose}\n\n{written}"):
        assert split_calls(text, style) == (prose, calls)


@pytest.mark.parametrize(
    ("style", "written"),
    [
        ("json", '```json\n{"name": "f", "arguments": {"x": 1}}\n```'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}'),
        ("xml", "<function=f><parameter=x>1</parameter></function>"),
        ("python", "```python\nf(x=1)\n```"),
    ],
)
def test_the_mark_of_a_call_is_not_said_before_it(style: Style, written: str) -> None:
    assert split_calls(f"Of {{a}} [b]:\n{written}", style) == ("Of {a} [b]:", [F])
    assert split_calls(" Sure\r\n\r\nf(x=1)", "python") == ("Sure", [F])
    program = "```js\nlet x = {};\n```\nNow:"
    assert split_calls(f'{program} {{"name": "f", "arguments": {{"x": 1}}}}', "json") == (program, [F])


F, G = ToolCall("f", {"x": 1}), ToolCall("g", {"y": [True, {"a": None}, False]})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(x=1)]\nI will wait.", [F]),
        ("[f(x=1)]\nWait", [F]),
        ("[f(x=1)]\nNote: wait", [F]),
        ("I see [1]. Calling [f(x=1)]", [F]),
        ("In [0, 1) it's [g-h(x=1)], [see a(1)] and so on.", [ToolCall("g-h", {"x": 1})]),
        ("[f(x=1)] [g(y=[true, {'a': null}, false])]", [F, G]),
        ("f(x=1)\ng(y=[True, {'a': None}, False])", [F, G]),
        ("So:\n```python\nf(x=1)\ng(y=[true, {'a': null}, False])\n```", [F, G]),
        ("```python\n[f(x=1)]\n[g(y=[true, {'a': null}, False])]\n```", [F, G]),
        ("```python\nprint(1)\nprint(2)\n```\n```python\nf(x=1)\n```", [F]),
        ("```js\nlet x = [f(x=2)];\n```\n```python\nf(x=1)\n```", [F]),
    ],
)
def test_calls_in_python_are_read_beside_prose_and_one_after_another(text: str, calls: list[ToolCall]) -> None:
    assert read_calls(text, "python") == calls


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[f(x=1)]\nThen [g(y=", "no valid Python"),
        ("[f(x=1)] and [h, g(y=1), i(", "no valid Python"),
        ("[f(x=1)] and [g(y=1) h]", "no valid Python"),
        ("[f(x=1)] and [g(in=1)].", "in is a word of Python"),
        ("So: convert(in=1).", "in is a word of Python"),
        ("[f(x=1)] and [h, g(y=1)].", "'h', beside your calls"),
        ("f(x=1)\ng(1)", "have to be named"),
        ("print(1)\nprint(2)", "no call of a tool"),
        ("I do h(x=[f(x=1)]) now", "no call of a tool"),
        ("x = 1\nf(x=1)", "no call of a tool"),
        ("['" * 40_000, "no call of a tool"),
        ("[a b " * 15_000 + "]" * 15_000, "no call of a tool"),
    ],
)
def test_a_broken_call_in_python_beside_prose_is_said(text: str, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        read_calls(text, "python")


def test_a_tag_of_llama_in_an_argument_is_text() -> None:
    calls = [ToolCall("f", {"x": 1}), ToolCall("g", {"y": "<|python_tag|>"})]
    assert read_calls(write_calls(calls, "llama"), "llama") == calls
    assert read_calls("<|python_tag|>" + write_calls(calls, "llama"), "llama") == calls


@pytest.mark.parametrize(
    ("style", "text", "says"),
    [
        ("json", "search for a", "no call of a tool"),
        ("json", '{"name": "search", "arguments": {"query": ', "no valid JSON"),
        ("json", '{"arguments": {}}', "has no `name`"),
        ("json", '{"name": "f", "arguments": [1]}', "no JSON object"),
        ("json", '{"name": "f", "arguments": "{1"}', "no valid JSON"),
        ("json", '{"name": "f", "arguments": {"x": NaN}}', "NaN or infinite"),
        ("xml", "<tool_call><function=f><parameter=x>1e999</parameter></function></tool_call>", "NaN or infinite"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1e999}"}</tool_call>', "NaN or infinite"),
        ("json", "[" * 50_000, "no call of a tool|nested too deeply"),
        ("hermes", "<tool_call>search</tool_call>", "no JSON object"),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": ', "no valid JSON"),
        ("mistral", "[TOOL_CALLS]search[ARGS]", "no valid JSON"),
        ("mistral", "[TOOL_CALLS]search", "no JSON object"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"x"', "no valid JSON"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}g[ARGS]{}", "no .TOOL_CALLS. before"),
        ("mistral", "[TOOL_CALLS]f{}g{}", "no .TOOL_CALLS. before"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} and g[ARGS]{}", "no .TOOL_CALLS. before"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]", "no JSON object"),
        ("mistral", "[TOOL_CALLS]f{}" * 6_000 + "[TOOL_CALLS]", "no JSON object"),
        ("hermes", "<tool_call>{", "<tool_call> is not closed"),
        ("python", "[search('a')]", "have to be named"),
        ("python", "[f(x=__import__('os').getpid())]", "no plain value"),
        ("python", "[f(x=open)]", "no plain value"),
        ("json", "x" * 200_000, "200000 characters"),
        # Readers that look at white space again and again would take minutes for these.
        ("json", "```" + "\n" * 90_000, "no call of a tool"),
        ("json", "```" + "a" * 90_000, "no call of a tool"),
        ("json", "`" * 90_000, "no call of a tool"),
        ("python", "```a " * 20_000, "no call of a tool"),
        ("python", "[convert(to='USD', from = 'EUR')]", r"from is a word of Python; write \*\*{'from': ...}"),
        ("xml", "<function=f><parameter=x>'</parameter>'</parameter></function>", "more </parameter> than parameters"),
        ("xml", "<function=f><parameter=x>'</parameter></function>'</parameter></function>", "more </parameter>"),
        (
            "xml",
            "<function=f><parameter=x>'</parameter>'</parameter><parameter=y>1</parameter></function>",
            "more </parameter>",
        ),
        (
            "xml",
            "<function=f><parameter=x>'</parameter></function> and <function=g>'</parameter></function>",
            "more </parameter>",
        ),
        ("python", "The set [x (in=3)]", "no call of a tool"),
        ("python", "They are (and = both) [x (in=3)].", "no call of a tool"),
        ("json", '{"name": "f", "arguments": {"x": "\\ud800"}}', "an invalid character"),
        ("python", "[f(x='\\ud800')]", "an invalid character"),
        ("json", '{"name": "f\\ud800", "arguments": {}}', "an invalid character"),
        ("hermes", "<tool_call>" + "\n" * 90_000, "not closed"),
        ("hermes", "<tool_call>" * 9_000, "not closed"),
        ("xml", "<function=f>" * 8_000, "not closed"),
        ("xml", "<function=" * 9_900, "no call of a tool"),
        ("xml", f"<function=f{' ' * 90_000}", "no call of a tool"),
        ("xml", f"<function=f><parameter=x{' x' * 40_000}</function>" + "<function=f>", "not closed"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>' * 2_700 + "<tool_call>", "not closed"),
    ],
)
def test_what_is_broken_is_said_and_nothing_is_evaluated(style: Style, text: str, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        read_calls(text, style)


@pytest.mark.parametrize(
    ("style", "text", "says"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "rm", "arg', "<tool_call> is not closed"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}', "<tool_call> is not closed"),
        ("xml", "<function=f><parameter=a>1</parameter><parameter=b>x</function>", "<parameter=b> is not closed"),
        ("xml", "<function=f></function><function=g><parameter=b>x", "<function=g> is not closed"),
        ("xml", "<function=f><parameter=a>1</parameter><function=g></function>", "<function=g> is not closed"),
        (
            "xml",
            "<function=f><parameter=a>1</parameter><function=g><parameter=b>2</parameter></function>",
            "no </function> before <function=g>",
        ),
        ("python", "[f(x=1), h]", "'h', beside your calls, is no call"),
        ("python", "[g(), f(x=1)(y=2)]", r"'f\(x=1\)', which your call calls, is no name"),
        ("python", "[g(), 'a'.f(y=2)]", r"''a'.f', which your call calls, is no name"),
        ("json", '[{"name": "f"}, "g"]', "no `name`"),
        ("json", '```json\n{"name": "f"}\n```\n```json\n{"name": "g", \n```', "no valid JSON"),
        ("json", 'So:\n```json\n{"name": "f"}\n```\n```json\n{"name": "g", ', "no valid JSON"),
        ("python", "```python\n[f()]\n```\n```python\n[g(x=]\n```", "no valid Python"),
    ],
)
def test_a_broken_call_beside_whole_ones_makes_none_of_them(style: Style, text: str, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        read_calls(text, style)


@pytest.mark.parametrize(
    "text",
    [
        "<function=f><parameter=x>1</parameter>\n</parameter><parameter=y>2</parameter></function>",
        "<function=f><parameter=x>1</parameter><parameter=y>2</parameter></parameter></parameter></function>",
        "<function=f><parameter=x>1</parameter><parameter=y>2</parameter></function> A value ends with </parameter>.",
        "A </parameter> ends it: <function=f><parameter=x>1</parameter><parameter=y>2</parameter></function>",
    ],
)
def test_an_end_of_a_parameter_too_many_that_parts_no_value_is_passed_over(text: str) -> None:
    assert read_calls(text, "xml") == [ToolCall("f", {"x": 1, "y": 2})]


def test_a_forgotten_end_of_a_parameter_is_no_part_of_its_value() -> None:
    tools = [{"name": "f", "parameters": {"properties": {"x": {}, "y": {}}}}]
    with pytest.raises(Unreadable, match="no </parameter> before <parameter=y>"):
        read_calls("<function=f><parameter=x>1\n<parameter=y>2</parameter></function>", "xml", tools)
    text = "<function=f><parameter=x>as <parameter=other></parameter></function>"
    assert read_calls(text, "xml", tools) == [ToolCall("f", {"x": "as <parameter=other>"})]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "2024", "2024"),
        ({"type": "string"}, "02139", "02139"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, '"an exact phrase"', '"an exact phrase"'),
        ({"type": "string"}, '"2024"', "2024"),  # as `write_calls` has it
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "2024", 2024),
        ({"type": "integer"}, "2024", 2024),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, '"None"', "None"),  # as `write_calls` has it
        ({"type": "string"}, "True", "True"),
        ({"type": ["string", "null"]}, "True", "True"),
        ({"type": "integer"}, "None", "None"),
        ({}, "True", "True"),
        ({"type": "array"}, "['a', (1, None)]", ["a", [1, None]]),
        ({"type": "object"}, "{'a': True, 2: '\\d'}", {"a": True, "2": "\\d"}),
        ({"type": "array"}, "{'a': True}", "{'a': True}"),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "array"}, "[1e999, 'a']", "[1e999, 'a']"),
        ({"type": ["array", "string"]}, "['a']", "['a']"),
        ({}, "2024", 2024),
        (None, "2024", 2024),
    ],
)
def test_text_in_xml_is_text_where_the_schema_says_so(schema: Any, written: str, value: Any) -> None:
    tool = {"function": {"name": "search", "parameters": {"properties": {"query": schema}}}}
    text = f"<function=search>\n<parameter=query>\n{written}\n</parameter>\n</function>"
    assert read_calls(text, "xml", [tool]) == [ToolCall("search", {"query": value})]


@given(text=TEXTS | TAGGED | st.from_regex(r"-?[0-9.e]{1,4}|null|true|True|None|NaN|\"[a0\"]{0,3}\"", fullmatch=True))
def test_any_text_of_a_text_argument_is_read_back_from_xml(text: str) -> None:
    optional = {"name": "search", "parameters": {"properties": {"query": {"type": ["string", "null", "boolean"]}}}}
    for tool in (SEARCH, optional):
        [found] = read_calls(write_calls([ToolCall("search", {"query": text})], "xml"), "xml", [tool])
        assert found.arguments == {"query": text}


def test_an_agent_reads_xml_by_the_schemas_of_its_tools() -> None:
    said = "<function=search>\n<parameter=query>\n2024\n</parameter>\n</function>"
    assert act(ToolAgent(tool_format="xml"), said)[0].text == call("2024")


def call(query: str = "a", name: str = "search") -> str:
    return json.dumps({"name": name, "arguments": {"query": query}})


def act(agent: ToolAgent, text: str, *turns: Turn, tools: Any = (SEARCH,)) -> tuple[Action, Says]:
    policy = Says(text)
    task = Task("t", info={"tools": list(tools)})
    return asyncio.run(agent.act(History(task, "Who is Mia?", turns), policy)), policy


@pytest.mark.parametrize("style", STYLES)
def test_an_agent_of_any_style_keeps_the_contract_and_gives_json(style: Style) -> None:
    agent = ToolAgent(tool_format=style)
    report = check_agent(agent)
    assert report.ok, str(report)
    written = agent.write(DemonstrationInputs(call()))
    action, _ = act(agent, written)
    assert (action.text, action.error, action.parts) == (call(), None, ())
    assert written == write_calls([ToolCall("search", {"query": "a"})], style)


def test_several_calls_are_parts_of_one_turn() -> None:
    action, _ = act(ToolAgent(max_calls_per_reply=2), f"[{call('a')}, {call('b')}]")
    assert action.parts == action.steps == (call("a"), call("b")) and action.text == f"{call('a')}\n{call('b')}"
    action, _ = act(ToolAgent(max_calls_per_reply=1), f"[{call('a')}, {call('b')}]")
    assert action.error and "2 calls, at most 1" in action.error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (call(name="find"), "there is no tool 'find'; there are search"),
        ('{"name": "search", "arguments": {}}', "lacks query"),
        ("search Mia", "no call of a tool"),
        (call("a" * 5000), "at most 4000"),
        ("<think>so</think>" + call(), "<think> is not allowed"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_that_the_policy_reads(text: str, says: str) -> None:
    action, _ = act(ToolAgent(), text)
    assert action.text == "" and action.error and says in action.error


def test_a_tool_may_be_called_only_so_often() -> None:
    turn = Turn(Action(f"{call('a')}\n{call('b')}", parts=(call("a"), call("b"))), "found")
    agent = ToolAgent(max_calls_per_tool={"search": 3})
    assert act(agent, call("c"), turn)[0].error is None
    action, _ = act(agent, f"[{call('c')}, {call('d')}]", turn)
    assert action.error and "'search' may be called 3 times in all" in action.error
    refused = Turn(Action("", error="No tool was called"), "No tool was called", valid=False)
    assert act(agent, call("c"), turn, refused)[0].error is None, "what was refused was not called"


def test_the_instruction_tells_of_the_tools_or_the_template_does() -> None:
    _, policy = act(ToolAgent(), call())
    assert json.dumps(SEARCH) in policy.shown[-1][1][0].content and not policy.tools
    turn = Turn(Action(call(), (_generation(),)), "Mia is a baker.")
    _, policy = act(ToolAgent(tool_definitions="chat_template", tool_format="hermes"), call(), turn)
    assert list(policy.tools) == [SEARCH] and "search" not in policy.shown[-1][1][0].content
    assert [m.role for m in policy.shown[-1][1][1:]] == [Role.USER, Role.ASSISTANT, Role.TOOL]


def test_what_follows_an_answer_is_said_by_the_user_and_by_a_tool_what_follows_a_call() -> None:
    task = Task("t", info={"tools": [SEARCH], "plain_answer": True})
    texts = (call(), "Which size?", call(name="Mia"), f"{call()}\n{call('b')}")
    turns = tuple(Turn(Action(text, parts=tuple(text.split("\n")) if "\n" in text else ()), "...") for text in texts)
    refused = Turn(Action("", error="No tool was called"), "No tool was called", valid=False)
    past = ToolAgent(tool_definitions="chat_template", tool_format="hermes").past(
        History(task, "Hello", (*turns, refused))
    )
    assert [one.role for one in past] == [Role.USER, Role.TOOL, Role.USER, Role.USER, Role.TOOL, Role.USER]


def test_without_definitions_any_name_is_passed_on() -> None:
    action, policy = act(ToolAgent(), call(name="whatever"), tools=())
    assert action.error is None and "Tools:" not in policy.shown[-1][1][0].content


def _generation() -> Generation:
    return Generation(Prompt((1,)), (5, 7), (0.0, 0.0), Finish.STOP, 0)


def test_a_fence_within_an_argument_ends_nothing() -> None:
    said = "Run:\n```\nls\n```"
    call = json.dumps({"name": "write", "arguments": {"text": said}})
    for text in (call, f"```json\n{call}\n```", f"Well:\n```json\n{call}\n```"):
        [found] = read_calls(text, "json")
        assert found.arguments == {"text": said}
    [found] = read_calls(f"[write(text={said!r})]", "python")
    assert found.arguments == {"text": said}


@pytest.mark.parametrize("program", ["```python\nprint({1})\n```", "```bash\nls\n```", "```\nls\n```"])
def test_calls_are_read_from_every_fence_and_programs_are_passed_over(program: str) -> None:
    fenced = [f"```json\n{call(query)}\n```" for query in ("a", "```\nb\n```", "c")]
    expected = [ToolCall("search", {"query": query}) for query in ("a", "```\nb\n```", "c")]
    assert read_calls("\n".join([program, *fenced]), "json") == expected
    assert read_calls("\n".join(["So:", *fenced[:1], program, *fenced[2:]]), "json") == expected[::2]
    assert read_calls(f"{program}\nNow: {call()}", "json") == [ToolCall("search", {"query": "a"})]
    written = "\n".join(f"```python\n{write_calls([one], 'python')}\n```" for one in expected[::2])
    assert read_calls(f"So:\n{written}", "python") == expected[::2]


def test_calls_of_one_fence_are_made_once_and_expected_results_are_no_calls() -> None:
    several = [ToolCall("search", {"query": "a"}), ToolCall("search", {"query": "```\nb\n```"})]
    both = "\n".join(call(one.arguments["query"]) for one in several)
    assert read_calls(f"So:\n```json\n{both}\n```", "json") == several
    for result in ('```json\n{"result": 3}\n```', "```text\n{ok}\n```", "```\n[1, 2]\n```"):
        assert read_calls(f"So:\n```json\n{call()}\n```\nThen:\n{result}", "json") == several[:1]
    assert read_calls("So:\n```python\n[f(x=1)]\n```\n```python\nprint(2)\n```", "python") == [ToolCall("f", {"x": 1})]
    with pytest.raises(Unreadable, match="named"):
        read_calls("So:\n```python\nprint(2)\n```", "python")


def test_a_call_without_arguments_may_say_null_and_no_number_is_infinite() -> None:
    [found] = read_calls('{"name": "look", "arguments": null}', "json")
    assert found == ToolCall("look", {})
    with pytest.raises(Unreadable, match="no plain value"):
        read_calls("[move(x=1e999)]", "python")


def test_the_marks_of_a_call_that_are_control_tokens_are_read() -> None:
    tokenizer = train_tokenizer(["a"], vocab_size=300, max_context=64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]})
    renderer = Renderer(tokenizer)
    for text in ('[TOOL_CALLS][{"name": "look", "arguments": {}}]', "[TOOL_CALLS]look[CALL_ID]a1[ARGS]{}"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert read_calls(renderer.reply_text(ids), "mistral") == [ToolCall("look", {})]


def test_several_calls_of_mistral_each_have_a_mark() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]g[ARGS]{}"}[TOOL_CALLS]get-weather[ARGS]{"city": "Paris"} So.'
    weather = ToolCall("get-weather", {"city": "Paris"})
    assert read_calls(text, "mistral") == [ToolCall("f", {"x": "[TOOL_CALLS]g[ARGS]{}"}), weather]
