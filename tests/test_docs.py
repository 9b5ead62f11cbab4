"""The README and the pages: links lead somewhere, code parses, and what it imports and runs exists."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        if language in languages:
            yield code


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_parses_and_what_it_imports_exists(page: Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lightning_hpc":
                module = importlib.import_module(node.module)
                missing = [each.name for each in node.names if not hasattr(module, each.name)]
                assert not missing, f"{page.name}: {node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_run_what_is_there(page: Path) -> None:
    for code in blocks(page, "bash", "sh", "console"):
        for module in re.findall(r"python -m ((?:benchmarks|tests|lightning_hpc|examples)[\w.]*)", code):
            assert importlib.util.find_spec(module) is not None, f"{page.name}: {module}"
        for script in re.findall(r"python ((?:benchmarks|tests|examples)/[\w/]+\.py)", code):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_can_be_found(page: Path) -> None:
    """From the README, or from a page that it links to."""
    linked = set(re.findall(r"docs/(\w+\.md)", (ROOT / "README.md").read_text()))
    assert page.name in linked, f"the README does not lead to {page.name}"
