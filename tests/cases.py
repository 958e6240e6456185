"""Many small cases in one test, and how many of those that hypothesis draws."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import HealthCheck, settings


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each case in turn; a failure names its case.

    Unlike `pytest.mark.parametrize`, which makes a test of each case, with fixtures and a report for it: too slow
    for hundreds of cases that take microseconds.

    Args:
        names: the test's parameters that a case gives, with commas between them; the others are fixtures.
        cases: a value each, or a tuple of as many values as there are names.
    """
    keys = names.replace(",", " ").split()
    given = list(cases)

    def loop(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for case in given:
                values = case if len(keys) > 1 else (case,)
                try:
                    test(**fixtures, **dict(zip(keys, values, strict=True)))
                except BaseException as error:
                    error.add_note(f"Case: {case!r:.500}")
                    raise

        signature = inspect.signature(test)
        fixtures = [value for name, value in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return loop


def examples(count: int) -> settings:
    """Settings of a test of drawn examples: `count` of them with the profile `explore`, a fifth otherwise.

    Fixtures of a function are those of all its examples.
    """
    share = settings.default.max_examples / settings.get_profile("explore").max_examples
    few = max(int(count * share), min(count, 10))
    return settings(max_examples=few, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
