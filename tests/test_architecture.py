"""Architecture: no import circles, no crowded folders, no ambiguous file names (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

from memprof.policies.registry import policy_types

ROOT = Path(__file__).parents[1]
PACKAGES = {"memprof": ROOT / "memprof", "memprof_dashboard": ROOT / "dashboard" / "memprof_dashboard"}
FILES = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
#: File names that a convention gives to every policy or planner.
CONVENTIONAL = {"__init__", "apply", "candidates", "planner", "policy", "transform"}
MOST_FILES, MOST_FOLDERS = 20, 3


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module imports: at its head, inside functions, and for type checkers alone."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_there_is_no_import_circle(imports: dict[str, set[str]]) -> None:
    """Modules can be put in an order in which each imports earlier ones only."""
    left = dict(imports)
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    # What is left is in a circle, or imports one: take away those that nobody of the rest imports.
    while unused := left.keys() - set().union(*left.values(), ()):
        for module in unused:
            del left[module]
    assert not left, f"modules in import circles: {sorted(left)}"


def test_tests_use_the_lab_through_one_folder() -> None:
    """What measures (lab/) stands on the tests, not the tests on it: tests/lab alone imports it."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.parent != ROOT / "tests" / "lab"]
    users = [path for path in files if re.search(r"^\s*(from|import) lab\b", path.read_text("utf-8"), re.MULTILINE)]
    assert not users


def test_folders_have_few_files() -> None:
    """No folder holds more than twenty modules."""
    count: dict[Path, int] = defaultdict(int)
    for path in FILES:
        count[path.parent.relative_to(ROOT)] += 1
    crowded = {str(folder): files for folder, files in count.items() if files > MOST_FILES}
    assert not crowded


def test_a_file_name_stands_for_few_things() -> None:
    """No file name is in more than three folders, but for those of a convention."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        if path.stem not in CONVENTIONAL:
            folders[path.stem].append(str(path.parent.relative_to(ROOT)))
    repeated = {stem: places for stem, places in folders.items() if len(places) > MOST_FOLDERS}
    assert not repeated


def test_every_policy_has_a_folder_of_the_same_form() -> None:
    """`Policy.transform` and `Policy.apply` find the policy's own transform.py and apply.py."""
    for kind in policy_types():
        folder = PACKAGES["memprof"].joinpath(*kind.__module__.split(".")[1:-1])
        assert {"policy.py", "transform.py", "apply.py"} <= {path.name for path in folder.glob("*.py")}


def test_operators_are_named_in_one_place() -> None:
    """What is known of an operator is in trace/operator_facts.py; only what implements operators names them besides."""
    named = re.compile(r"aten(\.|::)\w+(\.\w+)?")
    folders = [ROOT / "memprof" / name for name in ("recorder", "virtual")]
    others = [path for path in FILES if path.name != "operator_facts.py" and not any(map(path.is_relative_to, folders))]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in others
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and named.fullmatch(node.value)
    ]
    assert not found
