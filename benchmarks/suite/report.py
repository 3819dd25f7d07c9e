"""The short table of a record: rates of the providers, ratios of ours, errors, compile times, bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from . import record as rec
from .bars import COLD_SECONDS, bars, error_ratio
from .record import best_peer, ratio, spread, tflops, times

OURS = "tilelang"


def table(data: dict[str, Any], providers: Sequence[str], peers: Sequence[str]) -> Iterator[str]:
    """Lines.  A cell is `burst/sustained` TFLOP/s, or why there is none; ratios are to the best of the peers."""
    rows = data["rows"]
    if not rows:
        return
    width = max(len(n) for n in rows) + 1
    yield "TFLOP/s burst/sustained; ratio: ours over the best peer; spread: largest of ours and that peer"
    yield (f"{'workload':{width}s}{'shape':28s}" + "".join(f"{p:>14s}" for p in providers)
           + f"  {'ratio':>13s} {'spread':>7s} {'error':>8s} {'/vendor':>7s} rounds")
    for name, row in rows.items():
        cells = "".join(f"{_cell(row, p):>14s}" for p in providers)
        yield (f"{name:{width}s}{row['shape']:28s}{cells}  {_ratios(row, peers):>13s} {_spread(row, peers):>7s} "
               f"{_error(row):>8s} {_number(error_ratio(row, OURS), '.2f'):>7s} {len(row['rounds']):>3d}")
    yield from _problems(rows)


def _cell(row: dict[str, Any], provider: str) -> str:
    burst, sustained = (tflops(row, provider, x) for x in ("burst", "sustained"))
    if burst and sustained:
        return f"{burst:.0f}/{sustained:.0f}" if burst >= 10 else f"{burst:.2g}/{sustained:.2g}"
    status = row["providers"].get(provider, {}).get("status", "")
    return {rec.SKIPPED: "-", rec.OK: "untimed"}.get(status, status or "-")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _ratios(row: dict[str, Any], peers: Sequence[str]) -> str:
    found = []
    for window in ("burst", "sustained"):
        peer = best_peer(row, peers, window)
        found.append(_number(ratio(row, OURS, peer, window) if peer else None, ".3f"))
    return "/".join(found) if found != ["-", "-"] else "-"


def _spread(row: dict[str, Any], peers: Sequence[str]) -> str:
    who = [p for p in (OURS, best_peer(row, peers, "burst")) if p]
    found = [spread(t) for p in who if (t := times(row, p, "burst"))]
    return f"{max(found):.1%}" if found else "-"


def _error(row: dict[str, Any]) -> str:
    accuracy = row["providers"].get(OURS, {}).get("accuracy")
    return f"{accuracy['relative']:.1e}" if accuracy else "-"


def _problems(rows: dict[str, Any]) -> Iterator[str]:
    for name, row in rows.items():
        for p, state in row["providers"].items():
            if state.get("status") in (rec.FAILED, rec.WRONG, rec.CRASHED):
                reason = (state.get("reason") or "").splitlines() or [""]
                yield f"  {name}: {p} {state['status']}: {reason[0][:160]}"
            if state.get("facts", {}).get("n_spills"):
                yield f"  {name}: {p} spills {state['facts']['n_spills']} bytes ({state['label']})"
        if "broken" in row:
            yield f"  {name}: not measured: {row['broken']}"


def clocks(data: dict[str, Any]) -> str:
    """One line: clock and power in the windows of the run."""
    out = []
    for window in ("burst", "sustained"):
        for key, unit in (("clock_mhz", "MHz"), ("power_w", "W")):
            found = [s[window][key] for row in data["rows"].values() for r in row["rounds"] for s in r.values()
                     if s[window].get(key) is not None]
            if found:
                out.append(f"{window} {statistics.median(found):.0f} {unit} ({min(found):.0f} to {max(found):.0f})")
    return "clocks and power: " + ("; ".join(out) or "not read")


def hosts(data: dict[str, Any], providers: Sequence[str]) -> str:
    """One line: what the host needs to queue a call, by provider."""
    out = []
    for p in providers:
        found = [v for row in data["rows"].values() if (v := row["providers"].get(p, {}).get("host_us")) is not None]
        if found:
            out.append(f"{p} {statistics.median(found):.1f}")
    return "microseconds of the host for a call, median: " + (", ".join(out) or "not measured")


def compiles(data: dict[str, Any]) -> Iterator[str]:
    """Compile times by provider; cold ones apart."""
    by: dict[str, list[float]] = {}
    for entry in data["compile"]:
        if "seconds" in entry:
            by.setdefault(entry["provider"], []).append(entry["seconds"])
    for provider, seconds in by.items():
        yield (f"compiled {len(seconds)} of {provider}, all processes busy: median {statistics.median(seconds):.2f} s, "
               f"longest {max(seconds):.2f} s")
    for entry in data["compile"]:
        if "error" in entry:
            yield f"  {entry['provider']} {entry['workload']} {entry['label']}: {entry['error'].splitlines()[0][:160]}"
    for entry in data["cold"]:
        text = ", ".join(f"{s:.2f}" for s in entry["seconds"]) or "; ".join(entry["errors"])[:160]
        most = COLD_SECONDS[entry["kind"]]
        verdict = "reached" if entry["seconds"] and statistics.median(entry["seconds"]) <= most else "missed"
        wanted = f", wanted at most {most} s: {verdict}" if entry["provider"] == OURS else ""
        yield f"cold compile {entry['provider']} {entry['workload']}: {text} s{wanted}"


def bar_lines(data: dict[str, Any]) -> Iterator[str]:
    """The bars by burst and sustained ratios."""
    burst, sustained = (bars(data["rows"], x) for x in ("burst", "sustained"))
    for b, s in zip(burst, sustained):
        yield (f"{'reached ' if b.ok and s.ok else 'partly  ' if b.ok or s.ok else 'missed  '} {b.text}: "
               f"{_number(b.value, '.3f')} / {_number(s.value, '.3f')}, wanted {b.least:.3g} ({b.of[0]} of {b.of[1]})")


def summary(data: dict[str, Any], providers: Sequence[str], peers: Sequence[str]) -> str:
    """All of it."""
    lines = [*table(data, providers, peers), clocks(data), hosts(data, providers), *compiles(data), *bar_lines(data)]
    lines += [f"event: {e}" for e in data["events"][:20]]
    return "\n".join(lines)
