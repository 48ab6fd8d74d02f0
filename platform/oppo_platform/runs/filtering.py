"""The filter language of the runs table: `state:running reward>1.2 tag:baseline -user:ada ppo.batch_size=64`.

    filter  = term { " " term }                      all of them hold
    term    = [ "-" ] ( field ":" values | number op value | word )
    values  = value { "," value }                    one of them holds
    op      = ">" | ">=" | "<" | "<=" | "=" | "!="

A word is looked for in name, owner, project, preset and tags; `#57` is also run 57. A number is one of `NUMBERS`, a metric's
key (`actor/entropy`), which means its newest value, or a setting's path (`rollout.max_new_tokens`). Values with spaces need
double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F, FloatField, Func, Q, QuerySet, TextField, Value
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast

from oppo_contract.spec_errors import nearest_match
from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState
from oppo_platform import clock
from oppo_platform.runs.models import Run

LONGEST, MOST_TERMS = 1000, 30
COMPARISONS = {">=": "gte", "<=": "lte", "!=": "exact", ">": "gt", "<": "lt", "=": "exact"}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
STATE_GROUPS = {"active": HOLDING_DEVICES, "waiting": {RunState.QUEUED, RunState.PAUSED}, "ended": ENDED}
ARCHIVED = {"yes": Q(archived_at__isnull=False), "no": Q(archived_at__isnull=True), "any": Q(pk__isnull=False)}
GIB = 2.0**30
WORDS = ("name", "user__username", "project__name", "preset")

TERM = re.compile(r'"[^"]*"?|[^\s"]+(?:"[^"]*"?[^\s"]*)*')
METRIC = re.compile(r"[A-Za-z@][\w./:@-]*")
BARE_METRICS = ("overlap_factor", "decode_occupancy")  # all others have a slash in their keys
SETTING = re.compile(r"^(seed|[a-z_0-9]+(\.[a-z_0-9]+)+)$")
COMPARED = re.compile(r"^([A-Za-z@][\w./:@-]*?)(>=|<=|!=|>|<|=)(.*)$", re.S)


class FilterError(ValueError):
    """What is wrong with a filter, where, and what would do."""

    def __init__(self, message: str, term: str = "") -> None:
        self.message, self.term = message, term
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Number:
    """A number by which runs can be compared and sorted."""

    expression: Callable[[], Any]
    says: str
    seconds: bool = False  # values may be written as `90s`, `15m`, `2h`, `3d`
    text: Any = None  # of a setting, which may be no number


NUMBERS: dict[str, Number] = {
    "reward": Number(lambda: F("reward"), "latest mean reward"),
    "kl": Number(lambda: F("kl"), "latest KL to the reference, nats"),
    "bubble": Number(lambda: F("bubble"), "idle share of device time, last step, 0 to 1"),
    "step": Number(lambda: Cast("step", FloatField()), "steps done"),
    "steps": Number(lambda: Cast("total_steps", FloatField()), "total steps"),
    "devices": Number(lambda: Cast("devices", FloatField()), "requested devices"),
    "priority": Number(lambda: Cast("priority", FloatField()), "1 to 99"),
    "elapsed": Number(lambda: F("elapsed_s"), "training time: 90s, 15m, 2h, 3d", seconds=True),
    "age": Number(lambda: _age(), "time since submission: 90s, 15m, 2h, 3d", seconds=True),
    "gib": Number(lambda: Cast("storage__bytes", FloatField()) / GIB, "GiB in the database and on disk"),
    "id": Number(lambda: Cast("id", FloatField()), "run number"),
}
TEXTS: dict[str, tuple[str, str]] = {
    "name": ("name__icontains", "part of the name"),
    "user": ("user__username__iexact", "submitting user"),
    "project": ("project__name__iexact", "project"),
    "team": ("project__team__name__iexact", "team"),
    "preset": ("preset__iexact", "preset"),
    "tag": ("tags__contains", "tag"),
    "state": ("state", "a state, or active, waiting, ended"),
    "archived": ("archived_at", "yes, no, or any; the default hides archived runs"),
}


def apply_filter(runs: QuerySet[Run], text: str) -> QuerySet[Run]:
    """The runs that match the filter. Raises FilterError, which names everything that is wrong with it."""
    if len(text) > LONGEST or "\0" in text:
        raise FilterError(f"A filter has at most {LONGEST} characters.")
    terms = TERM.findall(text)
    if len(terms) > MOST_TERMS:
        raise FilterError(f"A filter has at most {MOST_TERMS} terms.")
    wrong: list[FilterError] = []
    for place, term in enumerate(terms):
        try:
            runs = _apply(runs, term, f"filter_{place}")
        except FilterError as error:
            wrong.append(error)
    if wrong:
        raise FilterError(" ".join(dict.fromkeys(error.message for error in wrong)), wrong[0].term)
    return runs


def apply_list_filter(runs: QuerySet[Run], text: str) -> QuerySet[Run]:
    """As `apply_filter`, without archived runs unless the filter mentions them."""
    runs = apply_filter(runs, text)
    asks = any(term.lstrip("-").lower().startswith("archived:") for term in TERM.findall(text))
    return runs if asks else runs.filter(ARCHIVED["no"])


def sort_expression(name: str) -> Any:
    """The sort expression of a column: a number, or `name`, `user`, `project`, `state`, `submitted`. Raises FilterError."""
    by_text = {"name": "name", "user": "user__username", "project": "project__name", "state": "state", "submitted": "created_at"}
    if name in by_text:
        return F(by_text[name])
    if name == "age":  # it changes between two pages
        raise FilterError("Sort by submission time with “submitted”.", name)
    return _number(name, name).expression()


def _apply(runs: QuerySet[Run], term: str, alias: str) -> QuerySet[Run]:
    negated = term.startswith("-") and len(term) > 1
    inner = term[1:] if negated else term
    field, colon, rest = inner.partition(":")
    compared = COMPARED.match(inner)
    if colon and field.lower() in text_fields():
        condition = _text(field.lower(), rest, term)
    elif compared:
        number, op, value = _number(compared[1], term), compared[2], compared[3].strip('"')
        condition = _compare(alias, op, value, number, term)
        expression = number.text if condition is None else number.expression()
        runs = runs.alias(**{alias: expression})
        condition = condition or (Q(**{f"{alias}__iexact": value}) if op == "=" else ~Q(**{f"{alias}__iexact": value}))
    elif colon and re.fullmatch(r"[A-Za-z_]+", field):
        raise _unknown(field, term)
    else:
        condition = _anywhere(inner.strip('"'))
    return runs.filter(~condition if negated else condition)


def _text(field: str, values: str, term: str) -> Q:
    result = Q()
    requested = [value.strip('"') for value in re.findall(r'"[^"]*"?|[^,]+', values)]
    if not requested:
        raise FilterError(f"“{field}:” needs a value, as in “{field}:{_example(field)}”.", term)
    for value in requested:
        result |= _equals(field, value, term)
    return result


def _equals(field: str, value: str, term: str) -> Q:
    if field in ADDED_FIELDS:
        return _added(field, value, term)
    special = CLOSED_SETS.get(field)
    return special(value, term) if special is not None else Q(**{TEXTS[field][0]: [value] if field == "tag" else value})


def _states(value: str, term: str) -> Q:
    if value in STATE_GROUPS:
        return Q(state__in=STATE_GROUPS[value])
    if value not in set(RunState):
        raise _unknown_value("state", value, [*RunState, *STATE_GROUPS], term)
    return Q(state=value)


def _archived(value: str, term: str) -> Q:
    if value not in ARCHIVED:
        raise FilterError(f"“archived:” must be one of {', '.join(ARCHIVED)}.", term)
    return ARCHIVED[value]


# Fields with known values and their conditions, which raise FilterError for unknown values.
CLOSED_SETS: dict[str, Callable[[str, str], Q]] = {"state": _states, "archived": _archived}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the filter that an app above `runs` adds.

    Attributes:
        says: description of its values.
        values: all of them; the first one is the example.
        condition: query of a value.
    """

    says: str
    values: Sequence[str]
    condition: Callable[[str], Q]


# By name; apps add theirs in `AppConfig.ready`.
ADDED_FIELDS: dict[str, Field] = {}


def text_fields() -> dict[str, str]:
    """Every text field, with a description of its values."""
    return {name: says for name, (_, says) in TEXTS.items()} | {name: field.says for name, field in ADDED_FIELDS.items()}


def _added(name: str, value: str, term: str) -> Q:
    field = ADDED_FIELDS[name]
    if value not in field.values:
        raise _unknown_value(name, value, list(field.values), term)
    return field.condition(value)


def _compare(alias: str, op: str, value: str, number: Number, term: str) -> Q | None:
    """The condition; None when a setting is compared with a text."""
    try:
        requested = _seconds(value) if number.seconds else float(value)
    except ValueError:
        if number.text is not None and value and op in ("=", "!="):
            return None
        kind = "a time such as 90s, 15m, 2h or 3d" if number.seconds else "a number"
        raise FilterError(f"“{value}” is not {kind}.", term) from None
    condition = Q(**{f"{alias}__{COMPARISONS[op]}": requested})
    # Explicit, so that `-reward>1` also matches runs without a reward.
    return Q(**{f"{alias}__isnull": False}) & (~condition if op == "!=" else condition)


def _number(name: str, term: str) -> Number:
    if name in NUMBERS:
        return NUMBERS[name]
    if "/" in name or name in BARE_METRICS:
        return Number(lambda: Cast(KeyTextTransform(name, "latest"), FloatField()), "a metric")
    if SETTING.match(name):
        place = "{" + name.replace(".", ",") + "}"  # words of a to z, digits and _
        text = f"(%(expressions)s #>> '{place}')"
        number = f"(CASE WHEN jsonb_typeof(%(expressions)s #> '{place}') = 'number' THEN {text}::float8 END)"
        return Number(
            lambda: Func(F("spec"), template=number, output_field=FloatField()), "a setting",
            text=Func(F("spec"), template=text, output_field=TextField()),
        )  # fmt: skip
    raise _unknown(name, term)


def _age() -> Any:
    created = Func(F("created_at"), template="extract(epoch from %(expressions)s)::float8", output_field=FloatField())
    return Value(clock.now().timestamp(), FloatField()) - created


def _anywhere(word: str) -> Q:
    result = Q(tags__contains=[word]) | Q(state__iexact=word)
    if re.fullmatch(r"#[1-9]\d{0,15}", word):  # a run's number, as pages show it
        result |= Q(pk=int(word[1:]))
    for field in WORDS:
        result |= Q(**{f"{field}__icontains": word})
    return result


def _seconds(text: str) -> float:
    """Raises ValueError."""
    return float(text[:-1]) * SECONDS[text[-1]] if text[-1:] in SECONDS else float(text)


def _unknown(name: str, term: str) -> FilterError:
    known = [*text_fields(), *NUMBERS]
    text = f"There is no field “{name}”{did_you_mean(name, known)} Fields: {', '.join(known)}, metrics and settings."
    return FilterError(text, term)


def _unknown_value(name: str, value: str, known: list[str], term: str) -> FilterError:
    text = f"There is no {name} “{value}”{did_you_mean(value, known)} {name.capitalize()}s: {', '.join(known)}."
    return FilterError(text, term)


def did_you_mean(word: str, known: list[str]) -> str:
    """`. Did you mean “…”?`, or a full stop without a similar word."""
    near = nearest_match(word, known)
    return f". Did you mean “{near}”?" if near else "."


def _example(field: str) -> str:
    if field in ADDED_FIELDS:
        return ADDED_FIELDS[field].values[0]
    return {"state": "running", "archived": "yes", "user": "ada", "tag": "baseline"}.get(field, "demo")
