"""Verifiable mathematics: whether a response states the reference answer, compared by the library math-verify."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

# It warns about its timeouts, which need signals in the main thread and are switched off: the engine limits the time of a rule.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify(prompt: str, response: str, line: Mapping[str, Any]) -> float:
    """1 if the response's answer equals `line["answer"]`, otherwise 0.

    The answer is the last number or expression of the response, or the content of its last LaTeX `\\boxed{}`.

    Raises:
        ValueError: the line has no `answer`, or one that cannot be parsed.
    """
    from math_verify import parse
    from math_verify import verify as equal

    if "answer" not in line:
        raise ValueError("the prompt's line has no `answer` to compare with; add it, or map a column to it")
    gold = parse(f"${line['answer']}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the prompt's answer {line['answer']!r:.100} cannot be parsed as mathematics")
    return float(equal(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
