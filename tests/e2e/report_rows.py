"""Rows of every kind that a report shows, for the demonstration model; and the JSON inside a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.e2e.rows import write_lines

SAMPLES = Path(__file__).parents[2] / "sample_data"
HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028\u2029\0\x1b[31m \u202etxet \u0627\u0644 {{data}}"
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
}


def write_rows(path: Path, copies: int = 3) -> None:
    """Conversations, pictures, logprobs, constraints that cannot be met, required calls, errors, hostile texts."""
    plain, pictures = (
        [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("prompts", "pictures")
    )
    rows: list[bytes | dict[str, Any]] = [*plain[: 10 * copies], *pictures[:copies]]
    for i in range(copies):
        call = {"tools": [ADD], "tool_choice": "required", "max_new_tokens": 100}
        rows += [
            {"id": f"lp-{i}", "text": f"The capital {i} is é", "max_new_tokens": 20, "return_logprob": True, "seed": i},
            {"id": f"unmet-{i}", "text": "number:", "max_new_tokens": 3, "regex": "[0-9]{8}"},
            {"id": f"call-{i}", "messages": [{"role": "user", "content": f"Add {i}"}], **call},
            {"id": f"bad-{i}", "text": "x", "top_p": 1.5},
            {
                "id": f"{HOSTILE}{i}",
                "messages": [{"role": "user", "content": HOSTILE}],
                "max_new_tokens": 9,
                "x": HOSTILE,
            },
            {"id": f"two-{i}", "text": f"Once {i}", "n": 2, "max_new_tokens": 5},
        ]
    write_lines(path, [*rows, {"id": "hostile-bad", "text": HOSTILE, "temperature": HOSTILE}])


def data_of(page: Path | str) -> Any:
    """What a page shows."""
    text = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])
