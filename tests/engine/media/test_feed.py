"""Features: decoded ahead of their use in bounded memory, encoded once, kept until their last use, spilled."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine import engine as engine_module
from batchgen.engine.media import feed as feed_module
from batchgen.engine.media import job as job_module
from batchgen.engine.media.features import FeatureStore
from batchgen.engine.media.job import ItemUses, most_media_bytes, plan_media
from batchgen.engine.memory.kv_budget import DeviceMemory
from batchgen.kernels.device import HOST
from batchgen.request.fields.media_items import DistinctItem, MediaItems, MediaPlan
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable
from tests.engine.fake_device import LateDevice
from tests.engine.media.fake_media import HIDDEN, FakeMedia, media_engine, picture, row, save_model

V = 100


def features(number: int, rows: int = 4) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full((rows, 8), number, np.float32) + np.arange(rows, dtype=np.float32)[:, None] / 8


def test_features_that_do_not_fit_are_read_from_the_file(tmp_path: Path) -> None:
    store = FeatureStore(3 * features(0).nbytes, tmp_path)
    for number in range(10):
        store.put(number, features(number))
        assert store.held_bytes <= 3 * features(0).nbytes
    assert store.spilled_bytes == 7 * features(0).nbytes
    for number in (9, 0, 5, 0, 3):
        np.testing.assert_array_equal(store.get(number), features(number))
    written = store.spilled_bytes
    for number in range(10):
        store.drop(number)
    assert (any(number in store for number in range(10)), store.held_bytes) == (False, 0)
    for number in range(10, 20):
        store.put(number, features(number))
    np.testing.assert_array_equal(store.get(10), features(10))
    assert store.spilled_bytes > written
    assert list(tmp_path.iterdir()) == [], "the file has no name"


class Kept(dict[int, Any]):
    """Features that outlive a job, in memory."""

    def add(self, number: int, values: Any) -> None:
        self[number] = values.copy()

    def read(self, number: int) -> Any:
        return self[number]

    def remove(self, number: int) -> None:
        self.pop(number, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_stay_on_the_device_that_computed_them_as_far_as_they_fit(tmp_path: Path, dtype: torch.dtype) -> None:
    size, device, kept = features(0).nbytes, LateDevice(), Kept()
    on_device = size * dtype.itemsize // 4
    store = FeatureStore(2 * size, tmp_path, device, 3 * on_device)
    store.kept = kept
    for number in range(10):
        store.put_computed(number, torch.from_numpy(np.stack([features(number)] * 2)).to(dtype)[1])
        store.keep_arrived()
    assert (store.device_bytes, store.device_peak_bytes, store.held_bytes) == (3 * on_device, 3 * on_device, 2 * size)
    assert sum(isinstance(store.get(number), torch.Tensor) for number in range(10)) == 3
    for number in (9, 0, 5, 0, 3, 9):
        found = store.get(number)
        np.testing.assert_array_equal(found.float() if isinstance(found, torch.Tensor) else found, features(number))
    device.upload(np.arange(1))
    store.forget(4)
    store.keep_arrived()
    assert kept.keys() == set(range(10)) - {4}
    for number, values in kept.items():
        np.testing.assert_array_equal(values, features(number))
        store.drop(number)
    store.drop(4)
    assert (store.device_bytes, store.held_bytes) == (0, 0)


def test_uses_are_found_in_the_ids_of_prompts() -> None:
    table, items = RequestTable(), MediaItems(V)
    for number, count in enumerate((2, 3, 1)):
        items.add(DistinctItem("image", f"digest {number}", "image_data", count, 7, {}, False, None))
    table.media = items
    for ids in ([1, V, V, 2], [V + 2, V, V, V, V], [1, 2], [V + 1] * 3):
        table.append(len(table), 0, ids, SamplingParams(), 0, 4)
    uses = ItemUses.of(table, np.array([True, True, True, False]))
    assert [uses.of_request(request) for request in range(4)] == [[0], [0, 2], [], []]
    assert tuple(a.tolist() for a in (uses.with_item(0), uses.with_item(1), uses.counts(3))) == ([0, 1], [], [2, 0, 1])
    assert uses.in_order(np.array([2, 1, 0, 3], np.int32)) == [0, 2]
    assert [table.media_of(request) for request in range(4)] == [[0], [2, 0, 0], [], [1]]


def test_only_items_of_prompts_are_counted() -> None:
    """A row that is refused may have numbered its items before."""
    table, items = RequestTable(), MediaItems(V)
    table.media = items
    for number, (kind, size) in enumerate((("image", (200, 50)), ("image", (300, 300)), ("audio", (800,)))):
        source = SimpleNamespace(size=size, nbytes=1000)
        items.add(DistinctItem(kind, f"digest {number}", "image_data", 2, 7, {}, False, source))  # type: ignore[arg-type]
    table.append(0, 0, [1, V, V, V + 2, V + 2, V, V], SamplingParams(), 0, 4)
    assert plan_media(table, 400) == MediaPlan(2, 1, 1, 0.01, 2.0, 4, 6)


def test_memory_of_items_is_that_of_their_budgets_at_most() -> None:
    table, items = RequestTable(), MediaItems(V)
    assert most_media_bytes(table, 8) == 0
    table.media = items
    for number, (features, nbytes) in enumerate(((3, 1000), (50, 500))):
        source = SimpleNamespace(size=(4, 4), nbytes=nbytes)
        items.add(DistinctItem("image", f"digest {number}", "image_data", features, 7, {}, False, source))
    assert most_media_bytes(table, 8) == 1500 + 53 * 8 * 4
    assert most_media_bytes(table, 1 << 24) == 1500 + feed_module.FEATURE_BYTES
    source = SimpleNamespace(size=(4, 4), nbytes=1 << 40)
    items.add(DistinctItem("image", "large", "image_data", 1, 7, {}, False, source))
    assert most_media_bytes(table, 8) == feed_module.PREPARED_BYTES + 54 * 8 * 4


@pytest.mark.parametrize(("sizes", "most"), [((900, 900, 900, 900), 900), ((300,) * 6, 900), ((5000, 5000, 10), 5000)])
def test_threads_decode_no_more_at_once_than_there_is_room_for(
    sizes: tuple[int, ...], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step needs first; an item that is larger than the room is decoded alone."""
    monkeypatch.setattr(feed_module, "PREPARED_BYTES", 1000)
    items, lock, peaks, running = MediaItems(V), Lock(), list[int](), set[int]()
    for number, nbytes in enumerate(sizes):
        source = SimpleNamespace(size=(4, 4), nbytes=nbytes)
        items.add(DistinctItem("image", str(number), "image_data", 4, 7, {}, False, source))

    def prepare(item: DistinctItem) -> Any:
        with lock:
            running.add(int(item.digest))
            peaks.append(sum(sizes[number] for number in running))
        time.sleep(0.02)
        with lock:
            running.remove(int(item.digest))
        return features(int(item.digest))

    settings = feed_module.FeedSettings(8, 4, HOST, together=False)
    count, encoder = len(sizes), SimpleNamespace()
    store = FeatureStore(1 << 20, tmp_path)
    feed = feed_module.MediaFeed(items, range(count), np.ones(count, np.int64), prepare, encoder, store, settings)  # type: ignore[arg-type]
    for number in reversed(range(count)):
        feed.prefetch()
        feed.load([number])
    feed.close()
    assert max(peaks) <= most
    assert len(peaks) == count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("feed"))


def test_few_images_are_decoded_ahead_and_features_end_with_their_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two, not more are decoded before one is encoded; only running rows have features."""
    monkeypatch.setattr(feed_module, "PREPARED_BYTES", 2 * 4 * 4 * 24)
    fake, ahead = FakeMedia(), list[int]()
    rows = [row(f"{n} #", picture(n)) for n in range(3, 23)]
    engine = media_engine(folder, fake, max_num_seqs=2)
    for _ in engine.generate(rows):
        ahead.append(fake.counted.decoded.total() - fake.counted.encoded.total())
    assert max(ahead) <= 3
    counts = engine.last_run.loop.counts()
    assert counts["media_encoded"] == 20
    assert counts["media_feature_peak_bytes"] <= 6 * 4 * 64 * 4


@pytest.mark.parametrize("room", [1 << 30, 2 * 4 * HIDDEN * 4])
def test_a_step_takes_features_from_where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """In the memory of the device, or in that of the host; an image that a prompt has several times as well."""
    monkeypatch.setattr(job_module, "DEVICE_FEATURE_BYTES", room)
    fake, first = FakeMedia(), picture(1)
    rows = [row(f"{n} #", picture(n)) for n in range(3, 15)]
    rows += [row("7 # 8 #", first, first), row("7 # 8 # 9 #", first, picture(2), first)]
    rows += [row("7 # 8 #", picture(40), picture(41, 8, 8))]
    engine = media_engine(folder, fake, max_num_seqs=4, max_tokens_per_step=16)
    engine.device = device = LateDevice(poison_uploads=True)
    found = {done.row_index: done.output_ids for done in engine.generate(rows)}
    assert found == {done.row_index: done.output_ids for done in media_engine(folder, FakeMedia()).generate(rows)}
    counts, items = engine.last_run.loop.counts(), 16
    assert counts["media_encoded"] == items
    assert 0 < counts["media_device_peak_bytes"] <= room
    waited = len(device.counts.waits_of("outputs"))
    if room > 1 << 20:
        assert (waited, counts["media_feature_peak_bytes"]) == (0, 0), "no features pass through the host"
    else:
        assert 0 < waited < items
        assert counts["media_feature_peak_bytes"] > 0


def test_features_on_the_device_are_part_of_the_memory_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values get as much less of a device as features may take."""
    memory = DeviceMemory(free=1 << 20, total=1 << 20, exclusive=True)
    monkeypatch.setattr(engine_module, "job_memory", lambda *_: memory)
    rows = [row(f"{n} #", picture(n), max_new_tokens=100) for n in range(3, 43)]
    pools = []
    for device in (HOST, LateDevice()):
        engine = media_engine(folder, FakeMedia())
        engine.device = device
        next(engine.generate(rows))
        pools.append(engine.last_run.pool)
    page = pools[0].nbytes // pools[0].num_pages
    assert pools[0].nbytes - pools[1].nbytes == pytest.approx(40 * 4 * HIDDEN * 4, abs=page)


def test_steps_do_not_wait_for_images_of_later_rows(folder: Path) -> None:
    """The first row ends while the image of the last one cannot be decoded yet."""
    fake, last = FakeMedia(), picture(99)
    opened = Event()
    decode = fake.decode

    def held(header: Any) -> Any:
        if np.array_equal(header.pixels, last):
            assert opened.wait(30)
        return decode(header)

    fake.decode = held  # type: ignore[method-assign]
    rows = [row(f"{n} #", picture(n)) for n in range(3, 6)] + [row("9 #", last)]
    found = []
    for done in media_engine(folder, fake, max_num_seqs=1).generate(rows):
        found.append(done.row_index)
        if len(found) == 3:
            opened.set()
    assert sorted(found) == [0, 1, 2, 3]
