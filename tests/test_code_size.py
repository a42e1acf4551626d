"""`benchmarks/code_size.py`: what it counts, of files that are short enough to count by hand."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = '[tool.importlinter]\nroot_packages = ["lib"]\n'
ONE = '''"""What the file
is for."""

from dataclasses import dataclass  # not counted by itself

NAMES = """
a

b
"""
_HIDDEN = 1


@dataclass(config=NAMES)
class Settings:
    """A docstring."""

    lr: float = 1.0
    """Another one."""
    kind: ClassVar[str] = "x"

    def value(self):
        """A third."""
        # and a comment

        def inner():
            return (
                1
            )

        return getattr(self, "lr"), hasattr(self, NAMES)
'''


@pytest.fixture
def code_size(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("code_size")


def rows(code_size: Any, **files: str) -> dict[str, Any]:
    """Count a tree of these files of `lib`, named without their ending."""
    texts = {f"lib/{name.replace('__', '/')}.py": text for name, text in files.items()}
    return dict(code_size.tree_of("here", {"pyproject.toml": SETTINGS, **texts}).rows())


def test_lines_functions_and_names(code_size: Any) -> None:
    found = rows(code_size, one=ONE)
    # One import, four of NAMES, _HIDDEN, decorator, class, two fields, `value` with its six.
    assert found["code lines"] == 1 + 4 + 1 + 2 + 2 + 6
    assert found["functions"] == 2 and found["code lines of a function, largest"] == 6
    assert found["that function"] == "lib/one.py:value" and found["code lines of a function, median"] == 5
    assert found["public names"] == 2 and found["recipe keys"] == 1
    assert found["getattr and hasattr of a literal name"] == 1


def test_the_95th_percentile_is_the_least_that_so_many_do_not_exceed(code_size: Any) -> None:
    text = "".join(f"def f{n}():\n" + "    pass\n" * n for n in range(1, 41))
    assert rows(code_size, one=text)["code lines of a function, 95th percentile"] == 39  # the 38th of 2, 3, ..., 41


def test_cycles_of_imports_wherever_they_stand(code_size: Any) -> None:
    texts = {
        "lib/__init__.py": "",
        "lib/a.py": "from lib import b\nimport os\n",
        "lib/b.py": "def f():\n    from .sub.c import g\n",
        "lib/sub/__init__.py": "from lib.sub.c import g\n",
        "lib/sub/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..a import f\n",
        "lib/d.py": "import lib.e\n",
        "lib/e.py": "from lib.d import x\n",
        "lib/alone.py": "from lib import alone\nimport lib.a\n",
    }
    tree = code_size.tree_of("here", {"pyproject.toml": SETTINGS, **texts})
    assert tree.cycles == [["lib/a.py", "lib/b.py", "lib/sub/c.py"], ["lib/d.py", "lib/e.py"]]
    assert dict(tree.rows())["files in import cycles"] == 5


def test_components_of_a_graph(code_size: Any) -> None:
    # A figure of eight through 1, a tail into it, and a node that leads nowhere.
    arrows = {0: [1], 1: [2, 3], 2: [1], 3: [4], 4: [1, 5], 5: []}
    found = code_size.components({str(node): [str(n) for n in to] for node, to in arrows.items()})
    assert sorted(map(sorted, found)) == [["0"], ["1", "2", "3", "4"], ["5"]]


def test_words_are_those_of_the_guides_and_not_of_what_is_generated(code_size: Any) -> None:
    tables = "<!-- keys: written by x.py -->\n\n| a | b |\n\n<!-- end of keys -->\n"
    page = f"# Two words\n\n```yaml\nno: words\n```\n{tables}three\n"
    tree = code_size.tree_of("here", {"pyproject.toml": SETTINGS, "docs/a.md": page})
    assert dict(tree.rows())["words of the guides"] == 4  # the sign of the heading is one


def test_a_revision_beside_what_has_become_of_it(
    code_size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "pyproject.toml").write_text(SETTINGS, "utf-8")
    (tmp_path / "lib" / "a.py").write_text("x = 1\n", "utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "lib" / "ä.py").write_text("y = 1\nz = 2\n", "utf-8")
    monkeypatch.setattr(code_size, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["code_size.py", "HEAD", "--tree", str(tmp_path)])
    code_size.main()
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["files", "1", "2", "+1"] in printed and ["code lines", "1", "3", "+2"] in printed
    assert ["", "HEAD", "present", "difference"] in printed and ["that file", "lib/a.py", "lib/ä.py", ""] in printed
    monkeypatch.setattr(sys, "argv", ["code_size.py", "nowhere"])
    with pytest.raises(SystemExit, match="nowhere is no revision"):
        code_size.main()


def test_this_tree_is_counted(code_size: Any) -> None:
    texts = code_size.of_folder(ROOT)
    assert {"rlhf/__init__.py", "benchmarks/code_size.py", "docs/index.md"} <= texts.keys()
    some = {path: text for path, text in texts.items() if path.startswith(("rlhf/losses/", "docs/", "pyproject"))}
    found = dict(code_size.tree_of("present", some).rows())
    assert all(found[name] for name in ("files", "functions", "public names", "recipe keys", "words of the guides"))
