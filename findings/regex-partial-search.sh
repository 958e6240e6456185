#!/usr/bin/env bash
# regex: a partial search does not return the leftmost match that more text can complete.
#
# Versions: regex 2026.11.19, Python 3.11.
#
# Input: the pattern `abc|b`, and the beginnings "ab" and "abc" of one text, as a reader of a stream has them.
#
# Documented: `search(text, partial=True)` also finds a match that the end of the text cuts off.
# Behaviour: a full match further to the right wins over a partial one that begins before it. For "ab" the search returns
# "b" at 1 as a full match, though "abc" at 0 is still possible, and one character later is what the search returns. So a
# reader that acts on the first full match, which no later text seems able to change, finds other matches in a stream
# than in the whole text. Only where there is no full match at all is the partial one returned. Patterns are safe if no
# alternative matches inside the beginning of another one.
#
# Output seen:
#   abc|b in ab:  1-2 full
#   abc|b in abc: 0-3 full
#   abc|d in ab:  0-2 partial
#
# Exits with 0 while this is so, and with 1 once the first line is a partial match at 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q regex==2026.11.19
"$folder/venv/bin/python" - <<'PY'
import regex

seen = []
for pattern, text in (("abc|b", "ab"), ("abc|b", "abc"), ("abc|d", "ab")):
    match = regex.compile(pattern).search(text, partial=True)
    seen.append(f"{pattern} in {text}: {match.start()}-{match.end()} {'partial' if match.partial else 'full'}")
print("\n".join(seen))
raise SystemExit(seen != ["abc|b in ab: 1-2 full", "abc|b in abc: 0-3 full", "abc|d in ab: 0-2 partial"])
PY
