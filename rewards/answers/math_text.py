r"""Normal form of formulas, before they are compared.

`normal` only changes how a formula is written, never what it says. It is plain text work, bounded and quick.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_FRACTIONS = {c: unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"}
_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ", "0123456789+-nx")
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "°": r"^{\circ}", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "’": "'", "′": "'", "“": '"', "”": '"', "，": ",",
    "；": ";", "（": "(", "）": ")", "：": ":", "。": ".", "≈": r"\approx ", "→": r"\to ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∖": r"\setminus ",
}  # fmt: skip
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp"


def _environment(match: re.Match[str]) -> str:
    return r"\begin{pmatrix}" if match[0].startswith(r"\begin") else r"\end{pmatrix}"


_RENAMED: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?<=\d)(?:\{,\}|,?\\!)(?=\d{3})"), ""),
    (re.compile(r"\\(?:d|t|c)frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:d|t)binom(?![a-z])"), r"\\binom"),
    (re.compile(r"\\leq(?:slant)?(?![a-z])"), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![a-z])"), r"\\ge "),
    (re.compile(r"\\(?:neq)(?![a-z])"), r"\\ne "),
    (re.compile(r"\\(?:lbrace)(?![a-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-z])"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-z])"), "|"),
    (re.compile(r"\\(?:varnothing)(?![a-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:lparen)(?![a-z])"), "("),
    (re.compile(r"\\(?:rparen)(?![a-z])"), ")"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|(?:display|text)style|(?:no)?limits|protect)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\(?:quad|qquad|thinspace|enspace|hfill|newline)(?![a-z])|\\[,;:! ]|~|&nbsp;"), " "),
    (re.compile(r"\\(?:hspace|vspace|phantom|label|tag)\*?\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:math(?:rm|bf|it|sf)|boldsymbol|bm|text(?:bf|it|rm)?|mbox|operatorname\*?)\s*\{"), r"\\text{"),
    (re.compile(rf"\\text\s*\{{\s*({_FUNCTIONS}|gcd|lcm|max|min|det)\s*\}}"), r"\\\1 "),
    (re.compile(r"\\text\s*\{\s*([a-zA-Z])\s*\}"), r" \1"),  # with a space: 5 m is no product
    (re.compile(r"\\(?:degree|textdegree)(?![a-z])|\^\s*\\circ(?![a-z])|\^\s*\{\s*\\circ\s*\}"), r"^{\\circ}"),
    (re.compile(r"\\sqrt\s+([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s*([0-9])(?![0-9])"), r"\\sqrt{\1}"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9a-zA-Z])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])"), r"\1{\2}"),
    (re.compile(r"\\(?:begin|end)\s*\{(?:p|b|B|v|V|small)?matrix\}"), _environment),
    (re.compile(r"\\(?:begin)\s*\{array\}\s*\{[^{}]*\}"), r"\\begin{pmatrix}"),
    (re.compile(r"\\end\s*\{array\}"), r"\\end{pmatrix}"),
    (re.compile(r"\{\s*+([^{}]*?)\s*+\\choose(?![a-z])\s*+([^{}]*?)\s*+\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\{\s*+([^{}]*?)\s*+\\over(?![a-z])\s*+([^{}]*?)\s*+\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
)  # fmt: skip
_ASCII = (
    (re.compile(r"(?<![\\a-zA-Z])(?:math\.|np\.|sp\.|sympy\.)(?=[a-z])"), ""),
    (re.compile(r"(?<![\\a-zA-Z])(?:pi|Pi|PI)(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![\\a-zA-Z])(?:oo|inf|infty|infinity|Infinity)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?=[ ({{^0-9])"), r"\\\1 "),
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"\^\s*(-?\d{2,})"), r"^{\1}"),
    (re.compile(r"\^\s*(-\w)"), r"^{\1}"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!=|≠"), r"\\ne "),
    (re.compile(r"\+/-|\+-"), r"\\pm "),
    (re.compile(r"(?<=[\])\d\s])U(?=[\[(\s])"), r"\\cup "),
    (re.compile(r"(?<=[0-9a-zA-Z)}\s])\*(?=[0-9a-zA-Z(\\\s])"), r"\\cdot "),
    (re.compile(r"(?<=[)}])\s*\*\s*"), r"\\cdot "),
)
_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(sqrt|cbrt|abs)\s*\(|√\s*\(?|∛\s*\(?")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,5})(?!\w)")
_MATRIX = re.compile(r"\[\s*\[[^\[\]]*\](?:\s*,?\s*\[[^\[\]]*\])*\s*\]")
_WORDED = (
    (re.compile(r"(?:there (?:is|are) )?no solutions?(?: exists?)?|(?:the )?empty set", re.IGNORECASE), r"\emptyset"),
    (re.compile(r"all real(?: number)?s", re.IGNORECASE), r"\mathbb{R}"),
)
_END = " \t\n.,;:!"


def normal(text: str) -> str:
    """Return `text` as it is compared: ASCII and plain LaTeX, without the marks around a formula."""
    text = text.strip().strip("`").strip().lstrip("= ").replace("\\\\", r"\cr ")
    text = re.sub(r"(?<![\\a-zA-Z])sqrt(?=\s*\d)", "√", text)
    for char in set(text):
        if char in _SIGNS or char in _FRACTIONS:
            text = _fraction(text, char) if char in _FRACTIONS else text.replace(char, _SIGNS[char])
    text = _scripts(text)
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    text = "".join(c for c in text if c.isprintable() or c in "\n\t")
    text = re.sub(r"[^\W0-9A-Za-z_]|\d", lambda m: str(unicodedata.digit(m[0], m[0])), text)
    text = text.replace(r"\$", "$ ").replace(r"\[", " ").replace(r"\]", " ").replace(r"\(", " ").replace(r"\)", " ")
    text = re.sub(r"\*\*([^*]+)\*\*\Z", r"\1", text.strip()) if text.strip().startswith("**") else text
    for pattern, new in _RENAMED:
        text = pattern.sub(new, text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = _calls(text)
    for pattern, new in _ASCII:
        text = pattern.sub(new, text)
    text = _MATRIX.sub(_matrix, text)
    text = re.sub(r"\(\s*-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)", r"\\mathbb{R}", text)
    text = " ".join(text.replace("$", " ").split())
    text = re.sub(r"[(\[]\s*(\\begin\{pmatrix\}.*\\end\{pmatrix\})\s*[)\]]", r"\1", text)
    text = _unwrapped(text)
    return next((sign for pattern, sign in _WORDED if pattern.fullmatch(text)), text)


def _fraction(text: str, char: str) -> str:
    top, _, bottom = _FRACTIONS[char].partition("/")
    return text.replace(char, rf"\frac{{{top}}}{{{bottom}}}")


def _scripts(text: str) -> str:
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ]+", lambda m: "^{" + m[0].translate(_SUPER) + "}", text)
    return re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋]+", lambda m: "_{" + m[0].translate(_SUB) + "}", text)


def _calls(text: str) -> str:
    r"""Write `sqrt(...)`, `√(...)` and `√2` as `\sqrt{...}`."""
    out, place = [], 0
    for match in _FUNCTION.finditer(text):
        if match.start() < place:
            continue
        name = {"√": r"\sqrt", "∛": r"\sqrt[3]", "sqrt": r"\sqrt", "cbrt": r"\sqrt[3]", "abs": "|"}[
            match[1] or match[0][0]
        ]
        if match[0].endswith("("):
            end = _close(text, match.end() - 1)
            inner = text[match.end() : end]
        else:
            number = re.match(r"\s*(\d+(?:\.\d+)?|[a-zA-Z]|\{[^{}]*\})", text[match.end() : match.end() + 200])
            end = match.end() + (number.end() if number else 0) - 1
            inner = number[1].strip("{}") if number else ""
        out.append(text[place : match.start()] + (f"|{inner}|" if name == "|" else f"{name}{{{inner}}}"))
        place = end + 1
    return "".join([*out, text[place:]])


def _close(text: str, begin: int) -> int:
    """Place where the bracket opened at `begin` closes; the end of the text if it does not."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return len(text)


def _matrix(match: re.Match[str]) -> str:
    rows = re.findall(r"\[([^\[\]]*)\]", match[0])
    return r"\begin{pmatrix}" + r" \cr ".join(" & ".join(row.split(",")) for row in rows) + r"\end{pmatrix}"


def _unwrapped(text: str) -> str:
    """Take away end marks, and brackets and wrappers around everything."""
    for _ in range(4):
        before = text
        text = text.strip(" \t\n")
        if not text.endswith((r"\,", r"\!")):
            text = text.rstrip(_END) if not re.fullmatch(r"[.,;:!?\s]*", text) else text
            if before.endswith("!") and re.search(r"[\d)a-zA-Z]!$", before):
                text += "!"
        for opening, closing in ((r"\text{", "}"), ("{", "}")):
            if text.startswith(opening) and _close(text, len(opening) - 1) == len(text) - 1:
                text = text[len(opening) : -len(closing)]
        if text == before:
            break
    return text
