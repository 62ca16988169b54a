"""The plan of the house: small folders, small files, maps that are true, each noun once. Read off the source."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
ROOT = Path(__file__).parents[2]
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})

MOST_FILES = 14  # of a folder
MOST_LINES = 400  # of a file
ONE_FILE_EACH = {"models/families"}  # as many files as there are families
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOR_THE_READER = {"try.py"}  # files that a page asks its reader to write


def place(path: Path) -> str:
    """The path inside of the package."""
    return str(path.relative_to(SOURCE))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_folder_has_few_files() -> None:
    counts = {place(folder): len(list(folder.glob("*.py"))) for folder in FOLDERS}
    large = {folder: count for folder, count in counts.items() if count > MOST_FILES and folder not in ONE_FILE_EACH}
    assert not large


def test_a_file_has_few_lines() -> None:
    written = [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    long = {str(path.relative_to(ROOT)): lines_of(path) for path in written if lines_of(path) > MOST_LINES}
    assert not long


@pytest.mark.parametrize("folder", FOLDERS, ids=place)
def test_a_folders_docstring_is_its_map(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    missing = {name for name in names if not re.search(rf"(?<!\w){name}(?!\w)", said)}
    assert not missing, f"{place(folder)} does not say what is in {missing}"


def test_a_public_class_exists_once() -> None:
    found = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(place(path))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert not twice


def names_of_files(text: str) -> list[str]:
    """Names in backticks, such as `layout/mesh.py`, without placeholders."""
    return [name for name in re.findall(r"`([\w./-]+\.(?:py|cpp|h|md))`", text) if "NAME" not in name]


def test_files_that_are_named_exist() -> None:
    """From the root, the package, `csrc`, or the same folder."""
    wrong = []
    for path in FILES:
        here = [ROOT, SOURCE, path.parent, ROOT / "csrc"]
        for name in names_of_files(path.read_text(encoding="utf-8")):
            if not any((folder / name).exists() for folder in here):
                wrong.append((place(path), name))
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """From the root, `src`, the package, the page's own folder there, or a folder that the page itself names."""
    text = page.read_text(encoding="utf-8")
    names = set(names_of_files(text)) - FOR_THE_READER
    starts = [ROOT, SOURCE.parent, SOURCE, page.parent]
    said = {str(Path(name).parent) for name in names} | set(re.findall(r"`([\w./-]+/[\w-]*)`", text))
    here = [*starts, SOURCE / page.stem, *(start / folder for start in starts for folder in said)]
    wrong = {name for name in names if not any((folder / name).exists() for folder in here)}
    assert not wrong


def reads_of_the_environment(tree: ast.AST) -> list[int]:
    """The lines that read `os.environ`; to set a variable for a library is no reading."""
    written = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    names = ("environ", "environb", "getenv")
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    imported = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & set(names)
    ]  # fmt: skip
    return [node.lineno for node in [*found, *imported] if id(node) not in written]


def test_only_what_people_start_reads_the_environment() -> None:
    """Groups, sizes and switches are arguments; a variable is read by the command line, a job or vLLM's plugin."""
    found = {
        place(path): lines
        for path in FILES
        if path.relative_to(SOURCE).parts[0] not in ("cli", "jobs", "vllm")
        and (lines := reads_of_the_environment(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not found


def test_a_read_of_the_environment_is_seen() -> None:
    code = "import os\nos.environ['A'] = '1'\nx = os.environ['A']\ny = os.getenv('B')\nz = os.environ.get('C')\n"
    assert reads_of_the_environment(ast.parse(f"{code}from os import environ")) == [3, 4, 5, 6]
