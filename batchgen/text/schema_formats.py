"""Formats of JSON Schema: those a grammar is written for here, those xgrammar writes well, those nobody does."""

from __future__ import annotations

__all__ = ["FORMATS", "NATIVE_FORMATS", "NEVER_EMPTY", "UNENFORCED_FORMATS"]

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:[0-9]{1,6}W|[0-9]{1,6}D(?:T[0-9]{1,6}H)?|T[0-9]{1,6}[HMS]|[0-9]{1,6}[YM])",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,6}}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL}){{1,6}}",
}
"""Patterns of formats, none of whose texts is wrong (a month has no 31st day that is none, a leap day is left out)."""

NATIVE_FORMATS = frozenset({"ipv6", "uri", "uri-reference", "uri-template"})
"""Those left to xgrammar, whose grammars for them held when tried."""

NEVER_EMPTY = frozenset({*FORMATS, "ipv6", "uri"})
"""Formats whose texts have a character at least."""

UNENFORCED_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "relative-json-pointer", "regex"}
)
"""JSON Schema's others: xgrammar ignores them or writes them wrongly."""
