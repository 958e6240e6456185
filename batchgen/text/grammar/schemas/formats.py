"""Formats of JSON Schema: for each a pattern, which the grammar follows, and a check of finished texts.

A pattern matches valid texts only, but not all of them: it describes a common form. Checks follow the format's own
standard (RFC 3339, 3986, 3987, 4291, 5321, 6570, 6901, 9562, ...) and share nothing with the patterns, so that each
holds the other to account.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """A format of strings."""

    pattern: str | None
    """Matches valid texts only, whole; None: no grammar for the format is known."""
    check: Callable[[str], bool]
    """Whether a text is valid."""


_DAY31 = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAY30 = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[13579][26]|[2468][048])"
_DATE = f"(?:{_YEAR}-(?:{_DAY31}|{_DAY30}|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_N = "[0-9]{1,6}"
_SPAN = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = f"P(?:{_N}W|(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)(?:{_SPAN})?|{_SPAN})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_IPV6 = (
    f"(?:(?:{_H16}:){{7}}{_H16}|::(?:{_H16}(?::{_H16}){{0,5}})?|"
    + "|".join(f"{_H16}(?::{_H16}){{{n - 1}}}::(?:{_H16}(?::{_H16}){{0,{5 - n}}})?" for n in range(1, 6))
    + f"|{_H16}(?::{_H16}){{5}}::)"
)
_NETWORK4 = (
    rf"(?:{_IPV4}/32|{_OCTET}\.{_OCTET}\.{_OCTET}\.0/24|{_OCTET}\.{_OCTET}\.0\.0/16|{_OCTET}\.0\.0\.0/8|0\.0\.0\.0/0)"
)
_LABEL = "[A-Za-z0-9]{1,15}(?:-[A-Za-z0-9]{1,15}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_WORD = "[A-Za-z0-9_+-]{1,20}"
_EMAIL = rf"{_WORD}(?:\.{_WORD}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{0,2}}\.[A-Za-z]{{2,15}}"
_ESCAPED = "%[0-9A-Fa-f]{2}"
_PCHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_AFTER_PATH = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_AUTHORITY = rf"//(?:{_HOST}|{_IPV4})(?::[0-9]{{1,5}})?(?:/{_PCHAR}*)*"
_URI = (
    rf"(?:[A-Za-z][A-Za-z0-9+.-]{{0,30}}:{_AUTHORITY}|mailto:{_EMAIL}|urn:[a-z0-9]{{2,20}}:{_PCHAR}+(?:/{_PCHAR}+)*)"
    rf"{_AFTER_PATH}"
)
_NO_COLON = f"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_ESCAPED})"
_REFERENCE = rf"(?:{_URI}|(?:{_AUTHORITY}|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_NO_COLON}+(?:/{_PCHAR}*)*)?{_AFTER_PATH})"
_VARIABLES = r"\{[+#./;?&]?[A-Za-z0-9_]+(?:\*|:[1-9][0-9]{0,3})?(?:,[A-Za-z0-9_]+(?:\*|:[1-9][0-9]{0,3})?)*\}"
_TEMPLATE = rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|{_ESCAPED}|{_VARIABLES})*"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_HEX = "[0-9a-f]"


def _uuid(version: str = _HEX) -> str:
    variant = _HEX if version == _HEX else "[89ab]"
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"


def _base64(last: str) -> str:
    letter = f"[A-Za-z0-9{last}]"
    return f"(?:{letter}{{4}})*(?:{letter}[AQgw]==|{letter}{{2}}[AEIMQUYcgkosw048]=)?"


def _is_date(text: str) -> bool:
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is None:
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _is_time(text: str) -> bool:
    parts = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[Zz]|([+-])(\d\d):(\d\d))", text, re.ASCII)
    if parts is None:
        return False
    hour, minute, second = (int(parts[i]) for i in (1, 2, 3))
    ahead_hour, ahead_minute = int(parts[5] or 0), int(parts[6] or 0)
    if hour > 23 or minute > 59 or second > 60 or ahead_hour > 23 or ahead_minute > 59:
        return False
    ahead = (ahead_hour * 60 + ahead_minute) * (-1 if parts[4] == "-" else 1)
    return second < 60 or (hour * 60 + minute - ahead) % 1440 == 1439  # a leap second ends a day of UTC


def _is_date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and _is_date(text[:10]) and _is_time(text[11:])


_DURATION_PARTS = re.compile(
    r"P(?!\Z)(?:\d+W|(?:\d+Y(?=\Z|T|\d+M))?(?:\d+M)?(?:\d+D)?(?:T(?=\d)(?:\d+H(?=\Z|\d+M))?(?:\d+M)?(?:\d+S)?)?)",
    re.ASCII,
)


def _is_ip(text: str, kind: Callable[[str], object]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return "%" not in text and text.isascii()


def _is_address_with_prefix(text: str, kind: Callable[[str], object]) -> bool:
    return "/" in text and text.rsplit("/", 1)[1].isdecimal() and _is_ip(text, kind)


def _is_hostname(text: str) -> bool:
    labels = text.split(".")
    return len(text) <= 253 and all(map(_is_label, labels))


def _is_label(label: str) -> bool:
    if re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", label, re.IGNORECASE | re.ASCII) is None:
        return False
    if label[2:4] != "--":
        return True
    if label[:2].lower() != "xn":
        return False
    try:
        return bool(label[4:].encode().decode("punycode"))
    except UnicodeError:
        return False


def _is_idn_hostname(text: str) -> bool:
    labels = re.split("[.\u3002\uff0e\uff61]", text)
    if any("-" in (label[:1], label[-1:]) for label in labels):
        return False
    try:
        return _is_hostname(".".join(label if label.isascii() else label.encode("idna").decode() for label in labels))
    except UnicodeError:
        return False


_ATOMS = r"[a-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[a-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
_QUOTED = r'"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\[\x20-\x7e])*"'
_LOCAL = re.compile(f"{_ATOMS}|{_QUOTED}", re.IGNORECASE | re.ASCII)


def _is_email(text: str, is_host: Callable[[str], bool] = _is_hostname) -> bool:
    local, at, host = text.rpartition("@")
    written = local if is_host is _is_hostname else re.sub(r"[^\x00-\x7f]", "a", local)
    if not at or len(local.encode()) > 64 or _LOCAL.fullmatch(written) is None:
        return False
    if host[:1] == "[" and host[-1:] == "]":
        literal = host[1:-1]
        is_ipv6 = literal[:5].lower() == "ipv6:"
        return _is_ip(literal[5:], ipaddress.IPv6Address) if is_ipv6 else _is_ip(literal, ipaddress.IPv4Address)
    return is_host(host)


_WIDE = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000efffd"
_PARTS = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
"""Scheme, authority, path, query and fragment, as in appendix B of RFC 3986."""


def _is_reference(text: str, *, absolute: bool = False, wide: bool = False) -> bool:
    """Whether `text` is a URI reference, or an IRI reference if `wide`; `absolute`: it must have a scheme."""
    parts = _PARTS.fullmatch(text)
    assert parts is not None, "every part may be empty"
    scheme, authority, path, query, fragment = parts.groups()
    if scheme is None and (absolute or ":" in path.split("/")[0]):
        return False
    if scheme is not None and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme, re.IGNORECASE | re.ASCII) is None:
        return False
    letters = rf"[\w.~!$&'()*+,;=:@/?{_WIDE}-]" if wide else r"[\w.~!$&'()*+,;=:@/?-]"
    whole = re.compile(rf"(?:{letters}|%[0-9A-Fa-f]{{2}})*", re.ASCII)
    if any(part is not None and whole.fullmatch(part) is None for part in (path, query, fragment)):
        return False
    return authority is None or _is_authority(authority, whole)


def _is_authority(text: str, whole: re.Pattern[str]) -> bool:
    user, _, rest = text.rpartition("@")
    parts = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::\d*)?", rest, re.ASCII)
    if parts is None or "@" in user or "/" in text or whole.fullmatch(user) is None:
        return False
    host = parts[1]
    if host[:1] != "[":
        return whole.fullmatch(host) is not None
    future = re.fullmatch(r"v[0-9a-f]+\.[\w.~!$&'()*+,;=:-]+", host[1:-1], re.IGNORECASE | re.ASCII)
    return future is not None or _is_ip(host[1:-1], ipaddress.IPv6Address)


_VARIABLE = r"(?:\w|%[0-9A-Fa-f]{2})(?:\.?(?:\w|%[0-9A-Fa-f]{2}))*(?:\*|:[1-9]\d{0,3})?"
_EXPRESSION = re.compile(rf"\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}}", re.ASCII)
_TEMPLATE_TEXT = re.compile(r"(?:[^\x00-\x20\x7f\"'%<>\\^`{|}]|%[0-9A-Fa-f]{2})*")


def _is_uri_template(text: str) -> bool:
    return _TEMPLATE_TEXT.fullmatch(_EXPRESSION.sub("", text)) is not None


def _is_pointer(text: str) -> bool:
    return text == "" or (text[0] == "/" and re.search(r"~(?![01])", text) is None)


def _is_relative_pointer(text: str) -> bool:
    parts = re.fullmatch(r"(?:0|[1-9]\d*)(#|.*)", text, re.ASCII | re.DOTALL)
    return parts is not None and (parts[1] == "#" or _is_pointer(parts[1]))


def _is_regex(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # of classes that a later Python may read differently
            re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _is_uuid(text: str, version: str = "") -> bool:
    parts = re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-([0-9a-f])[0-9a-f]{3}-([0-9a-f])[0-9a-f]{3}-[0-9a-f]{12}", text.lower()
    )
    return parts is not None and (not version or (parts[1] == version and parts[2] in "89ab"))


def _is_base64(text: str, letters: bytes) -> bool:
    try:
        return base64.b64encode(base64.b64decode(text.encode(), letters, validate=True), letters).decode() == text
    except (binascii.Error, ValueError):
        return False


def _ip(pattern: str, kind: Callable[[str], object]) -> Format:
    return Format(pattern, partial(_is_ip, kind=kind))


def _prefixed(pattern: str, kind: Callable[[str], object]) -> Format:
    return Format(pattern, partial(_is_address_with_prefix, kind=kind))


_PREFIX4, _PREFIX6 = "/(?:[12]?[0-9]|3[0-2])", "/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])"
FORMATS: dict[str, Format] = {
    "date": Format(_DATE, _is_date),
    "time": Format(_TIME, _is_time),
    "date-time": Format(f"{_DATE}T{_TIME}", _is_date_time),
    "duration": Format(_DURATION, lambda text: _DURATION_PARTS.fullmatch(text) is not None),
    "email": Format(_EMAIL, _is_email),
    "idn-email": Format(_EMAIL, partial(_is_email, is_host=_is_idn_hostname)),
    "hostname": Format(_HOST, _is_hostname),
    "idn-hostname": Format(_HOST, _is_idn_hostname),
    "ipv4": _ip(_IPV4, ipaddress.IPv4Address),
    "ipv6": _ip(_IPV6, ipaddress.IPv6Address),
    "ipvanyaddress": _ip(f"(?:{_IPV4}|{_IPV6})", ipaddress.ip_address),
    "ipv4network": _prefixed(_NETWORK4, ipaddress.IPv4Network),
    "ipv6network": _prefixed(f"{_IPV6}/128", ipaddress.IPv6Network),
    "ipvanynetwork": _prefixed(f"(?:{_NETWORK4}|{_IPV6}/128)", ipaddress.ip_network),
    "ipv4interface": _prefixed(_IPV4 + _PREFIX4, ipaddress.IPv4Interface),
    "ipv6interface": _prefixed(_IPV6 + _PREFIX6, ipaddress.IPv6Interface),
    "ipvanyinterface": _prefixed(f"(?:{_IPV4}{_PREFIX4}|{_IPV6}{_PREFIX6})", ipaddress.ip_interface),
    "uuid": Format(_uuid(), _is_uuid),
    **{f"uuid{n}": Format(_uuid(str(n)), partial(_is_uuid, version=str(n))) for n in range(1, 9)},
    "uri": Format(_URI, partial(_is_reference, absolute=True)),
    "uri-reference": Format(_REFERENCE, _is_reference),
    "iri": Format(_URI, partial(_is_reference, absolute=True, wide=True)),
    "iri-reference": Format(_REFERENCE, partial(_is_reference, wide=True)),
    "uri-template": Format(_TEMPLATE, _is_uri_template),
    "json-pointer": Format(_POINTER, _is_pointer),
    "relative-json-pointer": Format(rf"(?:0|[1-9][0-9]{{0,5}})(?:#|{_POINTER})", _is_relative_pointer),
    "base64": Format(_base64("+/"), partial(_is_base64, letters=b"+/")),
    "byte": Format(_base64("+/"), partial(_is_base64, letters=b"+/")),
    "base64url": Format(_base64("_-"), partial(_is_base64, letters=b"-_")),
    "regex": Format(None, _is_regex),
}
"""Format of strings -> its pattern and its check: those of JSON Schema, and those of OpenAPI and pydantic."""

INTEGER_FORMATS = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""Format of integers -> its least and greatest value."""

NOTE_FORMATS = frozenset(
    {"binary", "directory-path", "double", "enum", "file-path", "float", "new-path", "password", "path"}
)
"""Formats that say what a value is for, and exclude no text or number."""

PATTERN_FORMATS = frozenset(
    {
        "cidrv4", "cidrv6", "cuid", "cuid2", "e164", "emoji", "ends_with", "hex", "includes", "ksuid", "lowercase",
        "mac", "nanoid", "starts_with", "ulid", "uppercase", "xid",
    }
)  # fmt: skip
"""Formats of zod that say no more than the `pattern` that zod writes next to them."""
IMPLIED_PATTERNS = {
    "email": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    "duration": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    "hostname": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
}
"""Format -> the pattern with look-around that zod writes next to it; all texts of the format's own pattern match it."""
_CHECKED = FORMATS.keys() | INTEGER_FORMATS.keys() | NOTE_FORMATS


def is_known_format(schema: Mapping[str, Any]) -> bool:
    """Whether finished values of a schema's `format` are checked, or need no check."""
    name = schema["format"]
    return isinstance(name, str) and (name in _CHECKED or (name in PATTERN_FORMATS and "pattern" in schema))
