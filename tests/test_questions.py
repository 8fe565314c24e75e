"""Each question of users in docs/questions.yaml is answered by a page that a search leads to."""

import json
import math
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import yaml

from tests.helpers.models import ROOT

DOCS = ROOT / "docs"
QUESTIONS = yaml.safe_load((DOCS / "questions.yaml").read_text(encoding="utf-8"))
TITLE_WEIGHT, FOUND_IN = 8.0, 3  # words of headings count more, as on the site; the page is among the first three


def words_of(text: str) -> list[str]:
    """Words in lower case, with plural and singular alike."""
    return [word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower().replace("dataset", "data set"))]


@cache
def pages() -> dict[str, tuple[list[str], Counter[str]]]:
    """Headings and word counts of all pages, API reference apart."""
    found = {}
    for path in [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
            text = "\n\n".join("".join(cell["source"]) for cell in cells)
        name = path.relative_to(DOCS).with_suffix("").as_posix()
        if not name.startswith("reference/api"):
            headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
            found[name] = headings, Counter(words_of(text))
    return found


def search(query: str) -> list[str]:
    """Pages by relevance: rare words and words in headings count most (BM25, titles above other headings)."""
    index = pages()
    length = sum(sum(counts.values()) for _, counts in index.values()) / len(index)
    score: dict[str, float] = {}
    for word in set(words_of(query)):
        holders = [name for name, (_, counts) in index.items() if counts[word]]
        rarity = math.log(1 + (len(index) - len(holders) + 0.5) / (len(holders) + 0.5))
        for name in holders:
            headings, counts = index[name]
            share = counts[word] / (counts[word] + 1.2 * (0.25 + 0.75 * sum(counts.values()) / length))
            titled = word in words_of(headings[0])
            other = any(word in words_of(heading) for heading in headings[1:])
            score[name] = score.get(name, 0.0) + rarity * (2.2 * share + TITLE_WEIGHT * titled + 2 * other)
    return sorted(score, key=lambda name: -score[name])


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked["question"])
def test_a_search_leads_to_a_page_with_a_matching_heading(asked: dict[str, Any]) -> None:
    headings, _ = pages()[asked["page"]]
    assert any(set(words_of(asked["title"])) <= set(words_of(heading)) for heading in headings), headings
    assert asked["page"] in search(asked["search"])[:FOUND_IN]


def test_there_are_enough_questions_all_different() -> None:
    assert len({asked["question"] for asked in QUESTIONS}) == len(QUESTIONS) >= 25
