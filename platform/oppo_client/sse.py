"""Parser of server-sent events (SSE)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event; `id` resumes the stream after it."""

    kind: str
    data: str
    id: str = ""


@dataclass(slots=True)
class EventReader:
    """Assembles events from lines. An `id` also applies to later events without one (HTML standard)."""

    last_id: str = ""
    _kind: str = ""
    _data: list[str] = field(default_factory=list)

    def read(self, line: str) -> ServerEvent | None:
        """The event that ends with this line, if any. A comment (ping) is an event of kind `comment`."""
        if not line:
            return self._end()
        if line.startswith(":"):
            return ServerEvent("comment", "", self.last_id)
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self.last_id = value
        return None

    def _end(self) -> ServerEvent | None:
        kind, data, self._kind, self._data = self._kind, self._data, "", []
        return ServerEvent(kind or "message", "\n".join(data), self.last_id) if data else None
