r"""Calls of tools, as the families of models write them: read, never evaluated, and written back.

| style | how a call looks | who writes it |
|---|---|---|
| `json` | `{"name": "f", "arguments": {"x": 1}}`, alone, in a list, or in code fences | prompts of one's own |
| `hermes` | `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>` | Hermes, Qwen2.5, Qwen3 |
| `llama` | `{"name": "f", "parameters": {"x": 1}}`, with or without `<|python_tag|>` | Llama 3 |
| `mistral` | `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]` | Mistral |
| `mistral` | `[TOOL_CALLS]f[ARGS]{"x": 1}`, also without `[ARGS]` | Devstral, Magistral, Ministral 3; read only |
| `xml` | `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>` | Qwen3-Coder |
| `python` | `[f(x=1), g()]` | Llama 4, BFCL |

An argument of `xml` that holds one of its tags is written in JSON, with `\u003c` for `<`; an argument of
`python` whose name is a word of Python as `**{"from": 1}`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from keyword import iskeyword, kwlist
from typing import Any, Literal

Style = Literal["json", "hermes", "llama", "mistral", "xml", "python"]

_MOST_CHARS = 100_000
# A reply may be anything, also a tag and ten thousand empty lines: no pattern here has two ways to read white space.
_FENCE = re.compile(r"`{3,}(\w++(?=\s)|json|python|tool_code|)(.*?)(?:`{3,}|\Z)", re.DOTALL)
_CONTENT = re.compile(r"\S")
_CALL = re.compile(r"<tool_call>")
_MISTRAL = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_NAME = re.compile(r"\s*+(\w[\w.\-/]*+)(?:\[CALL_ID\]\w++)?\s*+(?:\[ARGS\])?\s*+(?=\{)")
_OPENING = re.compile(r"[\[{]")
#: How an object begins that may be a call, cut or broken; other braces, as in `{x}`, are of a sentence.
_BEGUN = re.compile(r"""\{\s*+(?:["'{\[]|\Z|(?:name|tool|function|arguments|parameters)\s*+:)""")
_FUNCTION = re.compile(r"<function=([^<>\s]+)\s*>")
_INSIDE = re.compile(r"<(function|parameter)=([^<>\s](?:[^<>]*[^<>\s])?)\s*>")
_TAG = re.compile(r"</?(?:function|parameter)\b")
_CALLED = re.compile(r"\w\(")
#: A name before an opening bracket, also one that Python has not, as `get-weather`; texts in quotes are passed over.
_NAMED = re.compile(r"""('{3}|"{3}|['"])(?:\\.|(?!\1).)*+(?:\1|\Z)|(?<![\w.\-/])(\w[\w.\-/]*+)(?=\()""", re.DOTALL)
#: Texts in quotes and brackets of Python.
_BRACKET = re.compile(r"""('{3}|"{3}|['"])(?:\\.|(?!\1).)*+(?:\1|\Z)|[\[\]]""", re.DOTALL)
#: What stands in a list of calls, also in a broken one, and hardly in another.
_BROKEN = re.compile(r"\[\s*+\w[\w.\-/]*+\(|\w\(\s*+(?:\w+\s*+=(?!=)|\*\*|\Z)")
#: Brackets of a text that are tried in vain; each may take a look at all of it.
_MOST_BRACKETS = 16
_KEYWORD = re.compile(rf"[(,]\s*+({'|'.join(kwlist)})\s*+=(?!=)")
_LLAMA_TAG = "<|python_tag|>"
#: What stands in a call, also in a broken one, and hardly in an answer.
_MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "llama": (_LLAMA_TAG,),
    "mistral": ("[TOOL_CALLS]",),
    "xml": ("<tool_call>", "<function="),
}
#: Names that JSON schemas have for what `json.loads` returns; a text aside.
_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}), int: frozenset({"integer", "number"}), float: frozenset({"number"}),
    type(None): frozenset({"null"}), list: frozenset({"array"}), dict: frozenset({"object"}),
}  # fmt: skip
_JSON_WORDS = {"true": True, "false": False, "null": None}
_WORDS = {**_JSON_WORDS, "none": None}
#: Keys of a call in JSON without a tag. An answer may well have one of them, so it takes two, or one and a tool's name.
_KEYS = ('"name"', '"tool"', '"arguments"', '"parameters"')


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call.

    Attributes:
        name: of the tool.
        arguments: JSON values by name.
    """

    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """The call in JSON, which is what an environment is given, however it was written."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)

    @property
    def json_arguments(self) -> str:
        """The arguments alone in JSON, as OpenAI's wire has them."""
        return json.dumps(self.arguments, ensure_ascii=False)


#: A call, behind the place in the reply where it, or the mark before it, begins.
_Placed = tuple[int, ToolCall]


class Unreadable(ValueError):
    """No call can be read; the message is a sentence for the policy."""


def read_calls(text: str, style: Style, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """The calls in a reply, as `split_calls` reads them."""
    return split_calls(text, style, tools)[1]


def split_calls(text: str, style: Style, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """Read the calls in a reply without its thoughts, in order, and what the reply says before the first of them.

    Text around the calls is passed over. In JSON and Python, where code fences hold calls, only the fences are read.
    Nothing is evaluated.

    Args:
        text: the reply.
        style: how calls are written.
        tools: their definitions. In the style `xml`, where text stands without quotes, they say which arguments are
            text: `2024` is a number otherwise.

    Returns:
        The text before the first call and its marks, without white space around it, and the calls.

    Raises:
        Unreadable: there is no call, or one of them is broken.
    """
    if len(text) > _MOST_CHARS:
        raise Unreadable(f"your reply has {len(text)} characters, at most {_MOST_CHARS} are read")
    try:
        found = list(_of_xml(text, tools) if style == "xml" else _READERS[style](text))
        for _, call in found:
            # As every reader of it will: JSON can spell out half a character.
            json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("your call is nested too deeply") from None
    except UnicodeEncodeError:
        raise Unreadable("your call has an invalid character, such as \\ud800") from None
    except ValueError:
        raise Unreadable("an argument is NaN or infinite, which JSON does not have") from None
    if not found:
        raise Unreadable(f"your reply has no call of a tool. {how_to_call(style)}")
    before = text[: found[0][0]].strip()
    return before.removesuffix("<tool_call>").rstrip() if style == "xml" else before, [call for _, call in found]


def is_attempt(text: str, style: Style, names: Collection[str]) -> bool:
    """True for a malformed call: a text with the marks of one, or of one of these names, in which no call is read."""
    if style == "python":
        return any(f"{name}(" in text for name in names)
    if any(mark in text for mark in _MARKS.get(style, ())):
        return True
    n_keys = sum(key in text for key in _KEYS)
    return style in ("json", "llama") and (n_keys > 1 or (n_keys == 1 and any(f'"{name}"' in text for name in names)))


def write_calls(calls: Sequence[ToolCall], style: Style) -> str:
    """Write calls as a model of that family does; the inverse of `read_calls`."""
    if style == "hermes":
        return "\n".join(f"<tool_call>\n{call.text}\n</tool_call>" for call in calls)
    if style == "llama":
        return "; ".join(_json({"name": call.name, "parameters": call.arguments}) for call in calls)
    if style == "mistral":
        return f"[TOOL_CALLS]{_json([_plain(call) for call in calls])}"
    if style == "xml":
        return "\n".join(_xml(call) for call in calls)
    if style == "python":
        return "[" + ", ".join(_python(call) for call in calls) + "]"
    return calls[0].text if len(calls) == 1 else _json([_plain(call) for call in calls])


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition itself, also where it is wrapped as `{"type": "function", "function": ...}`."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def how_to_call(style: Style) -> str:
    """Instruction on the format of a call, by an example."""
    return f"Write a call as {write_calls([ToolCall('NAME', {'ARGUMENT': 'VALUE'})], style)}"


def _of_json(text: str) -> Iterator[_Placed]:
    if text.lstrip().startswith(("{", "[")):
        return _objects(text)
    found: list[_Placed] = []
    fences = [fence for fence in _FENCE.finditer(text) if not _is_program(fence)]
    for fence in [fence for fence in fences if any(key in fence[2] for key in _KEYS)] or fences:
        try:
            found = [*found, *_all_at(fence.start(), _objects(fence[2]))]
        except Unreadable:  # the fence may have closed within an argument: what follows is read as one
            return iter([*found, *_all_at(fence.start(), _objects(text[fence.start(2) :]))])
    without = _FENCE.sub(lambda fence: " " * len(fence[0]) if _is_program(fence) else fence[0], text)
    return iter(found) if found else _objects(without)


def _all_at(at: int, calls: Iterable[_Placed]) -> Iterator[_Placed]:
    """The calls that a mark at this place begins."""
    return ((at, call) for _, call in calls)


def _is_program(fence: re.Match[str]) -> bool:
    """True for a fence with a program or other text beside the calls, by the word at its head and how it begins."""
    return fence[1] not in ("", "json") and not fence[2].lstrip().startswith(("{", "["))


def _of_hermes(text: str) -> Iterator[_Placed]:
    for tag, inside in _elements(text, _CALL, "</tool_call>", after=_end_of_json):
        yield from _all_at(tag.start(), _objects(inside, must=True))


def _end_of_json(text: str, at: int) -> int:
    """End of the JSON value at this place, in which a tag is text; the place itself if there is none."""
    begin = _CONTENT.search(text, at)
    try:
        return json.JSONDecoder().raw_decode(text, begin.start())[1] if begin else at
    except ValueError:
        return at


def _of_llama(text: str) -> Iterator[_Placed]:
    before, tag, behind = text.partition(_LLAMA_TAG)
    if tag and not before.lstrip().startswith("{"):  # in a call the tag is text
        return _all_at(len(before), _objects(behind))
    return _objects(text)


def _of_mistral(text: str) -> Iterator[_Placed]:
    tag = _MISTRAL.search(text)
    while tag is not None:
        begin, at = tag.span()
        named = _MISTRAL_NAME.match(text, at)
        tag = _MISTRAL.search(text, end := _end_of_json(text, named.end() if named else at))
        if named and end > named.end():
            yield begin, _of_object({"name": named[1], "arguments": json.loads(text[named.end() : end])})
            if _MISTRAL_NAME.match(text, end) or "[ARGS]" in text[end : tag.start() if tag else None]:
                raise Unreadable("there is no [TOOL_CALLS] before one of your calls")
        else:
            yield from _all_at(begin, _objects(text[at : tag.start() if tag else None], must=True))


def _of_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[_Placed]:
    known = {function.get("name"): function for function in map(function_of, tools)}
    filled = []
    for function, body in _elements(text, _FUNCTION, "</function>"):
        schema = known.get(function[1], {}).get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        found = list(_parameters(body, properties if isinstance(properties, Mapping) else {}))
        if found:
            filled.append((function, body))
        yield function.start(), ToolCall(function[1], dict(found))
    for behind in _behind(text, filled, "</function>"):
        _check_whole(behind.rpartition("</function>")[0])


def _parameters(body: str, properties: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    found = list(_elements(body, _INSIDE, "</parameter>"))
    for behind in _behind(body, found, "</parameter>"):
        _check_whole(behind)
    missing = properties.keys() - {tag[2] for tag, _ in found}
    for tag, value in found:
        if tag[1] == "function":
            raise Unreadable(f"there is no </function> before {tag[0][:80]}")
        if unclosed := next((inner for inner in _INSIDE.finditer(value) if inner[2] in missing), None):
            raise Unreadable(f"there is no </parameter> before {unclosed[0][:80]}")
        yield tag[2], _typed(_unwrapped(value), _types(properties.get(tag[2])))


def _check_whole(behind: str) -> None:
    """Raise Unreadable if the </parameter> before this text ended half a value, so that the other half is here."""
    if behind.rpartition("</parameter>")[0].replace("</parameter>", "").strip():
        raise Unreadable(
            "there are more </parameter> than parameters; write a text that has one in JSON, each < as \\u003c"
        )


def _behind(text: str, elements: Sequence[tuple[re.Match[str], str]], closing: str) -> Iterator[str]:
    """Yield the text between the end of each of the `_elements` and the next one, or the end of `text`."""
    begins = [*(tag.start() for tag, _ in elements[1:]), len(text)]
    for (tag, inside), end in zip(elements, begins, strict=False):
        yield text[tag.end() + len(inside) + len(closing) : end]


def _elements(
    text: str, opening: re.Pattern[str], closing: str, after: Callable[[str, int], int] = lambda _, at: at
) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each opening tag with the text up to its closing one, in one linear pass.

    Args:
        text: with both.
        opening: the tag.
        closing: its end.
        after: where the search for the end begins, of a tag that ends at this place.

    Raises:
        Unreadable: a tag is not closed, so that the text was cut or the closing tag forgotten.
    """
    at = 0
    while (tag := opening.search(text, at)) is not None:
        end = text.find(closing, after(text, tag.end()))
        if end < 0:
            raise Unreadable(f"{tag[0][:80]} is not closed")
        yield tag, text[tag.end() : end]
        at = end + len(closing)


def _unwrapped(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _of_python(text: str) -> Iterator[_Placed]:
    fences: list[re.Match[str] | None] = [] if text.lstrip().startswith("[") else list(_FENCE.finditer(text))
    found: list[_Placed] = []
    for fence in fences or [None]:
        source = (fence[2] if fence else text).strip()
        begin = text.find(source)
        is_list = source.startswith("[")
        try:
            calls = list(_of_source(source, with_lists=is_list or source.endswith("]") or not fences))
            found += _all_at(fence.start(), calls) if fence else [(begin + at, call) for at, call in calls]
        except Unreadable:
            if is_list or not found:
                raise  # else a program behind the calls
    yield from found


def _of_source(source: str, *, with_lists: bool) -> Iterator[_Placed]:
    """Yield the calls in Python statements; of other text those in its lists, if `with_lists`."""
    body, names = _parsed(source)
    groups = [(one.lineno, _nodes(one.value)) for one in body if isinstance(one, ast.Expr)]
    calls = [node for _, nodes in groups for node in nodes if isinstance(node, ast.Call)]
    if len(groups) == len(body) and any(len(body) == 1 or not call.args for call in calls):  # else a program
        starts = [0, *accumulate(map(len, io.StringIO(source, newline="")))]  # of its lines, as Python has them
        yield from ((starts[line - 1], call) for line, nodes in groups for call in _of_nodes(nodes, names))
        return
    lists = _lists(source) if with_lists else ()
    found = [(at, call) for at, nodes, names in lists for call in _of_nodes(nodes, names)]
    if not (body or found):
        _check_keywords(source)
    yield from found


def _parsed(source: str) -> tuple[list[ast.stmt], Mapping[str, str]]:
    """Statements of Python, none where it is no Python, and the names of `_with_names_of_python`."""
    source, names = _with_names_of_python(source)
    try:
        with warnings.catch_warnings():  # of Python, about what no Python program says
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source).body, names
    except (SyntaxError, ValueError, MemoryError):
        return [], names


def _nodes(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _lists(text: str) -> Iterator[tuple[int, list[ast.expr], Mapping[str, str]]]:
    """Yield place, elements, and names as of `_parsed` of each list in a text. Raises Unreadable if one is broken."""
    at = n_others = 0
    while (begin := text.find("[", at)) >= 0 and n_others < _MOST_BRACKETS:
        if text[max(0, begin - 1) : begin] in ("=", "(", ","):  # a list of an argument
            at = begin + 1
            continue
        end = _end_of_list(text, begin)
        body, names = _parsed(text[begin:end])
        if end and body and isinstance(body[0], ast.Expr):
            yield begin, _nodes(body[0].value), names
            at = end
            continue
        at = begin + 1
        part = text[begin : end or (text.find("[", at) + 1 or None)]
        if _BROKEN.search(part):
            _check_keywords(part)
            raise Unreadable("one of your lists of calls is no valid Python")
        n_others += 1


def _end_of_list(text: str, begin: int) -> int:
    """Index behind the list that begins at this bracket; 0 where it is not closed."""
    depth = 0
    for found in _BRACKET.finditer(text, begin):
        depth += {"[": 1, "]": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    return 0


def _check_keywords(source: str) -> None:
    """Raise Unreadable for an argument that is named by a word of Python."""
    called = _CALLED.search(source)
    if called and (word := _KEYWORD.search(source, called.start())):
        raise Unreadable(f"{word[1]} is a word of Python; write **{{'{word[1]}': ...}} for {word[1]}=...")


def _of_nodes(nodes: Sequence[ast.expr], names: Mapping[str, str]) -> Iterator[ToolCall]:
    if not any(isinstance(node, ast.Call) for node in nodes):
        return  # a list or a word in a sentence
    for node in nodes:
        if not isinstance(node, ast.Call):
            raise Unreadable(f"'{ast.unparse(node)[:80]}', beside your calls, is no call, such as f(x=1)")
        yield _of_node(node, names)


def _with_names_of_python(source: str) -> tuple[str, Mapping[str, str]]:
    """Source with valid Python identifiers in place of called names that are none, and the original of each."""
    mark = "_" * (1 + max(map(len, re.findall("_+", source)), default=0))
    names: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        name = found[2]
        if name is None or all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
            return found[0]
        names[f"{mark}{len(names)}"] = name
        return f"{mark}{len(names) - 1}"

    return _NAMED.sub(renamed, source), names


class _Constants(ast.NodeTransformer):
    """Puts the values of true, false and null, as JSON has them, in the place of their names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _of_node(node: ast.Call, names: Mapping[str, str]) -> ToolCall:
    if node.args:
        raise Unreadable("arguments have to be named, as in f(x=1)")
    try:
        arguments: dict[Any, Any] = {}
        for argument in node.keywords:
            value = ast.literal_eval(_Constants().visit(argument.value))
            arguments |= value if argument.arg is None else {argument.arg: value}
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError):
        raise Unreadable("an argument is no plain value, such as a number, a text or a list of them") from None
    name = ast.unparse(node.func)
    if not all(map(str.isidentifier, name.split("."))):
        raise Unreadable(f"'{name[:80]}', which your call calls, is no name of a tool, such as f in f(x=1)")
    return ToolCall(names.get(name, name), arguments)


def _objects(text: str, *, must: bool = False) -> Iterator[_Placed]:
    """Yield the calls in JSON objects of `text`, or in lists; `must` requires at least one."""
    decoder, at, n = json.JSONDecoder(), 0, 0
    refused: Unreadable | None = None
    while (found := _OPENING.search(text, at)) is not None:
        begin = at = found.start()
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            broken = Unreadable(f"your call is no valid JSON: {error}")
            if must or _BEGUN.match(text, at):
                raise broken from None
            refused = refused or (broken if text[at] == "{" else None)
            at += 1  # a bracket or a brace in a sentence
            continue
        several = value if isinstance(value, list) else [value]
        if not (must or any(isinstance(one, dict) for one in several)):
            continue  # a list in a sentence
        for one in several:
            yield begin, _of_object(one)
            n += 1
    if refused and not n:
        raise refused
    if must and not n:
        raise Unreadable("your call is no JSON object")


def _of_object(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as the API of OpenAI has it
    name = value.get("name", value.get("tool")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise Unreadable("your call has no `name`")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise Unreadable(f"`arguments` is no valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise Unreadable("`arguments` is no JSON object")
    return ToolCall(name, arguments)


def _value(text: str) -> Any:
    """JSON where it is JSON and no text, else the text itself."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _types(schema: Any) -> set[str]:
    """Types that a JSON schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    found = set(map(str, own)) if isinstance(own, list) else {str(own)} - {"None"}
    for name in ("anyOf", "oneOf"):
        several = schema.get(name)
        found = found.union(*map(_types, several if isinstance(several, list) else ()))
    return found


def _typed(text: str, types: Collection[str]) -> Any:
    """`_value`, and the text itself where the types allow a text and not that value.

    Also Python's words and, where a text is not allowed, its lists and dictionaries: templates of chats write them.
    In quotes is only what `_as_parameter` puts in quotes; others that a model writes belong to the text.
    """
    value = _value(text)
    if isinstance(value, str) and (word := value.strip().lower()) in _WORDS:
        value = _WORDS[word] if _TYPES[type(_WORDS[word])] & set(types) and value == text else value
    if "string" not in types:
        return _literal(value, types) if isinstance(value, str) else value
    if isinstance(value, str):
        return value if _as_parameter(value) == text else text
    return value if _TYPES[type(value)] & set(types) else text


def _literal(text: str, types: Collection[str]) -> Any:
    """A list or dictionary of Python, where the types allow it, else the text itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            value = json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return text
    return value if {"array", "object"} & _TYPES.get(type(value), frozenset()) & set(types) else text


def _plain(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _xml(call: ToolCall) -> str:
    shown = ((key, _as_parameter(value)) for key, value in call.arguments.items())
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown)
    return f"<tool_call>\n<function={call.name}>\n{inside}</function>\n</tool_call>"


def _as_parameter(value: Any) -> str:
    """A text as it is, unless it would be read as something else; anything else in JSON."""
    if (
        isinstance(value, str)
        and not (_TAG.search(value) or value.strip().lower() in _WORDS)
        and _value(value) == value
    ):
        return value
    text = _json(value)
    return text.replace("<", "\\u003c") if _TAG.search(text) else text


def _python(call: ToolCall) -> str:
    written = ", ".join(_as_keyword(key, value) for key, value in call.arguments.items())
    return f"{call.name}({written})"


def _as_keyword(key: str, value: Any) -> str:
    """An argument, in a dictionary where Python knows no argument of such a name."""
    return f"{key}={value!r}" if key.isidentifier() and not iskeyword(key) else "**" + repr({key: value})


_READERS = {
    "json": _of_json,
    "hermes": _of_hermes,
    "llama": _of_llama,
    "mistral": _of_mistral,
    "python": _of_python,
}
