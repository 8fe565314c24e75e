"""Hypothesis strategy for randomly damaged JSON, and the outcome of a parser on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from halopose.errors import HaloposeError

T = TypeVar("T")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mangled(draw: st.DrawFn, content: Any) -> Any:
    """The content with one to three values, anywhere in it, replaced, removed or repeated."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        node = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 3)):
                node = node[key]
                continue
            action = draw(st.sampled_from(["replace", "remove", "repeat"]))
            if action == "replace":
                node[key] = draw(JSON)
            elif action == "remove":
                del node[key]
            elif isinstance(node, list):
                node.append(copy.deepcopy(node[key]))
            break
    return content


def refusal(parse: Callable[..., T], *arguments: Any) -> tuple[T | None, str]:
    """Result of the parser, or its one-line error."""
    try:
        return parse(*arguments), ""
    except HaloposeError as error:
        return None, str(error)
