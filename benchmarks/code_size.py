"""Size and structure of the code: files, lines, functions, import cycles, words of the guides.

    python benchmarks/code_size.py                          # this tree
    python benchmarks/code_size.py main                     # main, this tree, and the difference
    python benchmarks/code_size.py main --tree ../other

The library is what `root_packages` of import-linter names in `pyproject.toml`. Counted by `tokenize` and `ast`:

- code lines: with anything on them but comments and docstrings, those after a field among them;
- functions: methods and nested ones too, each as long as its code lines;
- public names: what a file defines at its top, without an underscore before it;
- import cycles: files that import each other, whatever the way, in functions and under TYPE_CHECKING too; a package
  that is imported only because a file lies in it does not count;
- recipe keys: fields of settings classes, dataclasses with a `config`, each where it is declared;
- words of the guides: of `docs/*.md` without code, generated tables, and the pages that are nothing else.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_GENERATED = re.compile(r"<!-- ([\w ]+)(?:: written by [^>]*)? -->.*?<!-- end of \1 -->", re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file.

    Attributes:
        path: in the tree.
        text: what is in it.
    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        """As it is imported."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """Numbers of the lines that count."""
        texts = self.text.splitlines()
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                found.update(n for n in range(token.start[0], token.end[0] + 1) if texts[n - 1].strip())
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return frozenset(found)

    def functions(self) -> Iterator[tuple[int, str]]:
        """Length and place of each function."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                yield len(self.code_lines.intersection(lines)), f"{self.path}:{node.name}"

    def public_names(self) -> set[str]:
        """Public names defined at its top level, under conditions too."""
        found: set[str] = set()
        left: list[ast.stmt] = list(self.tree.body)
        for node in left:
            if isinstance(node, ast.If | ast.Try):
                left.extend([*node.body, *node.orelse])
            elif isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        return {name for name in found if not name.startswith("_")}

    def asked_by_name(self) -> int:
        """Number of calls of getattr and hasattr with a literal name."""
        return sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            for node in ast.walk(self.tree)
        )

    def recipe_keys(self) -> int:
        """Number of fields that its settings classes declare."""
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef) and _is_settings(node)]
        fields = [line for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
        return sum("ClassVar" not in ast.unparse(line.annotation) for line in fields)

    def imports(self, modules: Mapping[str, str]) -> set[str]:
        """Those of `modules`, by what they are called, that it imports anywhere."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                inner = {f"{base}.{alias.name}" for alias in node.names}
                found |= inner & modules.keys()
                if inner - modules.keys():
                    found.add(base)
        return {modules[name] for name in found & modules.keys()} - {self.path}

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*package, *(node.module or "").split(".")]).rstrip(".")


def _is_settings(node: ast.ClassDef) -> bool:
    return any(isinstance(d, ast.Call) and any(k.arg == "config" for k in d.keywords) for d in node.decorator_list)


@dataclass(frozen=True)
class Tree:
    """The files of a revision, or of a folder.

    Attributes:
        name: what its column is called.
        sources: Python files of the library.
        tests: those of the tests.
        guides: text of each page.
    """

    name: str
    sources: Sequence[Source]
    tests: Sequence[Source]
    guides: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def cycles(self) -> list[list[str]]:
        """Files that import each other, the largest circle first."""
        modules = {source.module: source.path for source in self.sources}
        found = components({source.path: sorted(source.imports(modules)) for source in self.sources})
        return sorted((sorted(files) for files in found if len(files) > 1), key=lambda files: (-len(files), files))

    def rows(self) -> list[tuple[str, int | str]]:
        """Rows of the table, by name; texts are shown and not compared."""
        functions = sorted((found for source in self.sources for found in source.functions()), reverse=True)
        lengths = [length for length, _ in functions] or [0]
        folders = Counter(str(PurePosixPath(source.path).parent) for source in self.sources)
        fullest = max(folders, key=lambda name: folders[name], default="")
        files = sorted(((len(source.code_lines), source.path) for source in self.sources), reverse=True) or [(0, "")]
        words = (len(_FENCED.sub("", _GENERATED.sub("", text)).split()) for text in self.guides.values())
        return [
            ("files", len(self.sources)),
            ("code lines", sum(length for length, _ in files)),
            ("code lines outside contrib folders", sum(n for n, path in files if "/contrib/" not in path)),
            ("code lines of the largest file", files[0][0]),
            ("that file", files[0][1]),
            ("functions", len(functions)),
            ("code lines of a function, median", int(statistics.median(lengths))),
            ("code lines of a function, 95th percentile", sorted(lengths)[-(-95 * len(lengths) // 100) - 1]),
            ("code lines of a function, largest", lengths[0]),
            ("that function", functions[0][1] if functions else ""),
            ("public names", sum(len(source.public_names()) for source in self.sources)),
            ("folders", len(folders)),
            ("files of the fullest folder", folders[fullest]),
            ("that folder", fullest),
            ("import cycles", len(self.cycles)),
            ("files in import cycles", sum(map(len, self.cycles))),
            ("getattr and hasattr of a literal name", sum(source.asked_by_name() for source in self.sources)),
            ("recipe keys", sum(source.recipe_keys() for source in self.sources)),
            ("files of tests", len(self.tests)),
            ("code lines of tests", sum(len(source.code_lines) for source in self.tests)),
            ("words of the guides", sum(words)),
        ]


def components(arrows: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph, each node in one of them (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in arrows:
        todo = [(start, iter(arrows[start]))] if start not in number else []
        while todo:
            node, ahead = todo[-1]
            if node not in number:
                number[node] = low[node] = len(number)
                stack.append(node)
            step = next((other for other in ahead if other not in number or other in stack), None)
            if step is not None and step not in number:
                todo.append((step, iter(arrows[step])))
            elif step is not None:
                low[node] = min(low[node], number[step])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                if low[node] == number[node]:
                    found.append(stack[stack.index(node) :])
                    del stack[stack.index(node) :]
    return found


# --- reading a tree --------------------------------------------------------------------------------------------------


def of_folder(folder: Path) -> dict[str, str]:
    """Return the text of the files of a folder that git does not ignore, by path."""
    git = ["git", "-C", str(folder), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name: (folder / name).read_text("utf-8") for name in names if _counts(name) and (folder / name).is_file()}


def of_revision(revision: str) -> dict[str, str]:
    """Return the same of a revision."""
    git = ["git", "-C", str(ROOT)]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", revision], capture_output=True, text=True)
    if listed.returncode:
        sys.exit(f"code_size: {revision} is no revision: {listed.stderr.strip()}")
    rows = [row.split("\t", 1) for row in listed.stdout.split("\0") if row]
    blobs = [(name, head.split()[2]) for head, name in rows if head.split()[1] == "blob" and _counts(name)]
    asked = "".join(f"{blob}\n" for _, blob in blobs).encode()
    content = subprocess.run([*git, "cat-file", "--batch"], input=asked, capture_output=True, check=True).stdout
    found, at = {}, 0
    for name, _ in blobs:
        begin = content.index(b"\n", at) + 1
        at = begin + int(content[at : begin - 1].split()[2]) + 1
        found[name] = content[begin : at - 1].decode()
    return found


def _counts(name: str) -> bool:
    return name.endswith(".py") or name == "pyproject.toml" or bool(re.fullmatch(r"docs/[^/]+\.md", name))


def tree_of(name: str, texts: Mapping[str, str]) -> Tree:
    """Return what is counted of the files of a tree."""
    settings = tomllib.loads(texts["pyproject.toml"])
    packages = tuple(settings["tool"]["importlinter"]["root_packages"])
    sources = [Source(path, text) for path, text in sorted(texts.items()) if path.endswith(".py")]
    library = [source for source in sources if source.path.split("/")[0] in packages]
    tests = [source for source in sources if source.path.startswith("tests/")]
    return Tree(name, library, tests, {path: text for path, text in texts.items() if path.endswith(".md")})


def table(trees: Sequence[Tree]) -> str:
    """Return the rows of one tree, or of two and how the second differs, as a table in Markdown."""
    lines = [["", *(tree.name for tree in trees), *["difference"] * (len(trees) > 1)]]
    for row in zip(*(tree.rows() for tree in trees), strict=True):
        values = [value for _, value in row]
        cells = [f"{value:,}" if isinstance(value, int) else value for value in values]
        if len(values) > 1:
            old, new = values
            cells.append(f"{new - old:+,}" if isinstance(old, int) and isinstance(new, int) else "")
        lines.append([row[0][0], *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [shown[0], rule, *shown[1:]])


def main() -> None:
    """Print the table, and the members of each import cycle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="what the tree is compared with")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a folder; this one if left out")
    given = parser.parse_args()
    trees = [tree_of(given.revision, of_revision(given.revision))] if given.revision else []
    trees.append(tree_of("present", of_folder(given.tree)))
    print(table(trees))
    for tree in trees:
        for files in tree.cycles:
            print(f"\n{tree.name}: a cycle of {len(files)} files\n  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
