"""Shares of a job: each request is in one, equal requests are together, and the shares cost about the same."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from batchgen.engine.workload import plan_workload
from batchgen.job.scale.replicas import shares
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable


def job(rng: Random, requests: int) -> RequestTable:
    table = RequestTable()
    greedy, drawn = SamplingParams(temperature=0), SamplingParams()
    stems = [[rng.randrange(100) for _ in range(rng.randrange(40))] for _ in range(6)]
    for row in range(requests):
        prompt = [*rng.choice(stems), *(rng.randrange(3) for _ in range(rng.randrange(1, 6)))]
        table.append(row, 0, prompt, rng.choice([greedy, drawn]), row, rng.choice([4, 8, 64]))
    return table


@pytest.mark.parametrize("seed", range(6))
def test_each_request_is_in_one_share(seed: int) -> None:
    rng = Random(seed)
    table = job(rng, rng.choice([0, 1, 7, 200]))
    done = np.array([rng.random() < 0.3 for _ in range(len(table))], np.bool_)
    workload, count = plan_workload(table, done), rng.choice([1, 2, 3, 8])
    wanted = ~done & (np.arange(len(table)) % 11 > 0)
    found = shares(workload, wanted, count)
    assert len(found) == count
    assert sorted(np.concatenate(found).tolist()) == np.flatnonzero(wanted).tolist()
    for share in found:
        kept = {*share.tolist()}
        for request in share:
            equal = np.flatnonzero((workload.leader == workload.leader[request]) & wanted)
            assert kept.issuperset(equal.tolist())


def test_shares_cost_about_the_same_and_cut_between_prefixes() -> None:
    table, params = RequestTable(), SamplingParams()
    for row in range(400):
        table.append(row, 0, [row // 100] * 50 + [row], params, row, 10)
    workload = plan_workload(table)
    everything = np.ones(400, np.bool_)
    assert [len(share) for share in shares(workload, everything, 2)] == [200, 200]
    assert [{*(share // 100).tolist()} for share in shares(workload, everything, 4)] == [{0}, {1}, {2}, {3}]
    assert all(110 <= len(share) <= 157 for share in shares(workload, everything, 3))
