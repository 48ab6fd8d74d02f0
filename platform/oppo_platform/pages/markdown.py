"""Markdown that users write, as HTML: CommonMark without raw HTML, images and links other than http, https and mailto."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

SCHEMES = ("http://", "https://", "mailto:")


def render_markdown(text: str) -> SafeString:
    """HTML of the text; everything that is not Markdown is escaped."""
    return mark_safe(_parser().render(text))  # noqa: S308  # the parser escapes HTML


@cache
def _parser() -> MarkdownIt:
    parser = (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable(["image", "html_block", "html_inline"])
    )
    parser.add_render_rule("link_open", _link)
    parser.validateLink = lambda url: url.lower().startswith(SCHEMES)  # type: ignore[method-assign]
    return parser


def _link(renderer: RendererHTML, tokens: list[Token], at: int, options: Any, env: Any) -> str:
    tokens[at].attrSet("rel", "nofollow noopener noreferrer")
    return renderer.renderToken(tokens, at, options, env)
