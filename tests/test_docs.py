"""Links between pages resolve, and every result file has a page that cites it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pages(root: Path) -> list[Path]:
    return [*root.glob("*.md"), *root.glob("docs/*.md")]


def links(page: Path) -> list[tuple[Path, str]]:
    """Return ``(file, anchor)`` of each link of a page that stays in the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    parts = [target.partition("#") for target in found if "://" not in target]
    return [((page.parent / file).resolve() if file else page, end) for file, _, end in parts]


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(root: Path) -> list[str]:
    broken = []
    for page in pages(root):
        for file, anchor in links(page):
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {file.name}#{anchor}")
    return broken


def uncited_results(root: Path) -> set[Path]:
    cited = {file for page in pages(root) for file, _ in links(page)}
    return set((root / "docs" / "results").iterdir()) - cited


def test_links_resolve() -> None:
    assert broken_links(ROOT) == []


def test_results_are_cited() -> None:
    assert uncited_results(ROOT.resolve()) == set()
