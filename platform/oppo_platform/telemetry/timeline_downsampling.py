"""Downsampled timelines: spans too short for the picture are merged into pieces that preserve every total.

When a step's spans arrive, `pack_downsampled` stores the data of a zoomed-out picture beside them: for every device the seconds
of each kind of work and of each idle cause, and the step's longest bubbles. A whole run is then drawn without parsing a thousand
large rows.

    window's start and end (float64) │ length of the names (uint32) │ names as JSON │ `ENTRY`s
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from oppo_contract.events import IdleCause, Phase, Role

MOST_PIECES = 5000
MOST_BUBBLES = 10
HEAD = struct.Struct("<ddI")
ENTRY = np.dtype([("device", "<u2"), ("kind", "<u2"), ("alone", "?"), ("start", "<f8"), ("seconds", "<f8")])

Kind = tuple[str, str]  # (role, phase) of work, ("", cause) of idle time
Entry = tuple[str, Kind, float, float]  # device, kind, start_s, seconds
Json = dict[str, Any]
KINDS: list[Kind] = [(role, phase) for role in get_args(Role) for phase in get_args(Phase)]
KINDS += [("", cause) for cause in get_args(IdleCause)]


class StoredStep(NamedTuple):
    """A stored step, and the offset in seconds of its attempt's clock."""

    step: int
    packed: bytes
    shift_s: float


@dataclass(frozen=True, slots=True)
class DownsampledSteps:
    """Unpacked steps. `rows` has the step of each of `entries` (`ENTRY`); numbers are indices into `devices` and `KINDS`."""

    steps: list[int]
    windows: NDArray[np.float64]
    devices: list[str]
    rows: NDArray[np.int64]
    entries: NDArray[Any]


def pack_downsampled(spans: Json) -> bytes:
    """Downsampled data of one step's spans (a `SpansEvent` as plain data; entries without finite times are left out)."""
    entries = list(_entries(spans))
    starts: dict[tuple[str, Kind], float] = {}
    seconds: dict[tuple[str, Kind], float] = defaultdict(float)
    for device, kind, start, length in entries:
        starts[device, kind] = min(start, starts.get((device, kind), math.inf))
        seconds[device, kind] += length
    devices, kinds = sorted({e[0] for e in entries}), sorted({e[1] for e in entries})
    device_at, kind_at = ({name: number for number, name in enumerate(names)} for names in (devices, kinds))
    rows = [(device_at[d], kind_at[k], False, start, seconds[d, k]) for (d, k), start in starts.items()]
    bubbles = sorted((e for e in entries if not e[1][0]), key=lambda e: -e[3])[:MOST_BUBBLES]
    rows += [(device_at[d], kind_at[k], True, start, length) for d, k, start, length in bubbles]
    names = json.dumps([devices, kinds], separators=(",", ":")).encode()
    start, end = (time if _is_finite(time) else 0.0 for time in spans["window_s"])
    return HEAD.pack(start, end, len(names)) + names + np.array(rows, ENTRY).tobytes()


def _entries(spans: Json) -> Iterator[Entry]:
    # A broken worker may send columns of different lengths; surplus entries are ignored.
    columns = (spans[name] for name in ("device", "role", "phase", "start_s", "end_s"))
    for device, role, phase, start, end in zip(*columns, strict=False):
        if _is_finite(start) and _is_finite(end):
            yield device, (role, phase), start, max(0.0, end - start)
    for device, cause, start, end in spans["idle"]:
        if _is_finite(start) and _is_finite(end):
            yield device, ("", cause), start, max(0.0, end - start)


def _is_finite(time: float | None) -> bool:
    return time is not None and math.isfinite(time)


def unpack_downsampled(stored: Sequence[StoredStep]) -> DownsampledSteps:
    """Steps in the given order, all times on one axis."""
    windows = np.zeros((len(stored), 2))
    by_names: dict[bytes, list[tuple[int, NDArray[Any]]]] = defaultdict(list)
    for row, (_, packed, shift) in enumerate(stored):
        start, end, length = HEAD.unpack_from(packed)
        windows[row] = start + shift, end + shift
        body = HEAD.size + length
        by_names[packed[HEAD.size : body]].append((row, np.frombuffer(packed, ENTRY, offset=body)))
    devices: dict[str, int] = {}
    rows, entries = [np.empty(0, np.int64)], [np.empty(0, ENTRY)]
    for names, pieces in by_names.items():
        step_devices, step_kinds = json.loads(names)
        device_at = np.array([devices.setdefault(name, len(devices)) for name in step_devices], np.uint16)
        kind_at = np.array([KINDS.index((role, name)) for role, name in step_kinds], np.uint16)
        joined = np.concatenate([piece for _, piece in pieces])
        joined["device"], joined["kind"] = device_at[joined["device"]], kind_at[joined["kind"]]
        entries.append(joined)
        rows.append(np.repeat([row for row, _ in pieces], [len(piece) for _, piece in pieces]))
    every_row, every_entry = np.concatenate(rows), np.concatenate(entries)
    if len(every_row):
        every_entry["start"] += np.array([step.shift_s for step in stored])[every_row]
    return DownsampledSteps([step.step for step in stored], windows, list(devices), every_row, every_entry)


def worst_bubbles(sampled: DownsampledSteps) -> list[Json]:
    """The ten longest bubbles, longest first: device, time (seconds), cause, and a sentence."""
    at = np.flatnonzero(sampled.entries["alone"])
    at = at[np.argsort(-sampled.entries["seconds"][at], kind="stable")][:MOST_BUBBLES]
    return [
        _bubble(sampled, row, *entry.item()) for row, entry in zip(sampled.rows[at].tolist(), sampled.entries[at], strict=True)
    ]


def _bubble(sampled: DownsampledSteps, row: int, device: int, kind: int, alone: bool, start: float, seconds: float) -> Json:
    name, cause, step = sampled.devices[device], KINDS[kind][1], sampled.steps[row]
    words = f"{name} was idle for {seconds:.3g} s in step {step}, {start:.0f} s after the run started. Cause: {cause}."
    return {"device": name, "cause": cause, "step": step, "start_s": start, "length_s": seconds, "words": words}


def merged_steps(sampled: DownsampledSteps, most: int = MOST_PIECES) -> list[Json]:
    """Neighbouring steps merged until there are at most `most` pieces; each looks like a `SpansEvent` without its envelope.

    A merged step is as long as its steps together. A lane's work is at its beginning, one piece per phase, a device's idle time
    at its end, one piece per cause: lengths are totals, positions within the merged step mean nothing. If devices and phases
    alone exceed `most`, all steps become one.
    """
    totals = ~sampled.entries["alone"]
    rows, entries = sampled.rows[totals], sampled.entries[totals]
    together = 1
    while True:
        place = (rows // together * len(sampled.devices) + entries["device"]) * len(KINDS) + entries["kind"]
        places, inverse = np.unique(place, return_inverse=True)
        if len(places) <= most or together >= len(sampled.steps):
            break
        together = max(together + 1, together * len(places) // most)
    seconds = np.bincount(inverse, weights=entries["seconds"], minlength=len(places))
    steps = [_merged_step(sampled, first, together) for first in range(0, len(sampled.steps), together)]
    _place_pieces(steps, sampled.devices, places.tolist(), seconds.tolist())
    return steps


def _merged_step(sampled: DownsampledSteps, first: int, together: int) -> Json:
    windows, steps = sampled.windows[first : first + together], sampled.steps[first : first + together]
    start = float(windows[0, 0])
    length = float((windows[:, 1] - windows[:, 0]).sum())
    about: Json = {"step": steps[0], "to_step": steps[-1], "merged": len(steps), "window_s": [start, start + length]}
    columns: Json = {name: [] for name in ("device", "role", "phase", "start_s", "end_s", "chunk", "rows", "idle")}
    return about | columns | {"deferred": [], "flows": [], "counters": {}, "trained": []}


def _place_pieces(steps: list[Json], devices: list[str], places: list[int], seconds: list[float]) -> None:
    """Place the pieces in their steps: work from the left in each lane, idle time at the right on each device."""
    ends: dict[tuple[int, str, str], float] = {}
    idle: dict[tuple[int, str], float] = defaultdict(float)
    pieces = []
    for place, length in zip(places, seconds, strict=True):
        rest, kind = divmod(place, len(KINDS))
        row, device = divmod(rest, len(devices))
        role, name = KINDS[kind]
        pieces.append((row, devices[device], role, name, length))
        if not role:
            idle[row, devices[device]] += length
    for row, on, role, name, length in pieces:
        step = steps[row]
        begin = step["window_s"][0] if role else step["window_s"][1] - idle[row, on]
        start = ends.get((row, on, role), begin)
        ends[row, on, role] = start + length
        if not role:
            step["idle"].append([on, name, start, start + length])
            continue
        span = {"device": on, "role": role, "phase": name, "start_s": start, "end_s": start + length, "chunk": 0, "rows": 0}
        for column, value in span.items():
            step[column].append(value)
