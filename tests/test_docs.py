"""Links between pages resolve, and every result file has a page that cites it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def links(page: Path) -> list[tuple[Path, str]]:
    """Return ``(file, anchor)`` of each link of a page that stays in the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    parts = [target.partition("#") for target in found if "://" not in target]
    return [((page.parent / file).resolve() if file else page, end) for file, _, end in parts]


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_resolve() -> None:
    for page in PAGES:
        for file, anchor in links(page):
            assert file.exists(), f"{page.name}: {file.name}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {file.name}#{anchor}"


def test_results_are_cited() -> None:
    cited = {file for page in PAGES for file, _ in links(page)}
    assert set((ROOT / "docs" / "results").iterdir()) <= cited
