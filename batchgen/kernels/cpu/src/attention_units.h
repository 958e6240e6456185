// Packed units for the bfloat16 dot instruction: keys and values of LANES positions in its order, cached between steps
// where many rows attend to them, and prefetched. Included only by attention_dot.h.
#pragma once

#include <cstdlib>

#include "attention_rows.h"

namespace bg {
namespace {

#if defined(__AVX512BF16__)

constexpr int DOT_COLUMNS = 2, DOT_PANEL = DOT_COLUMNS * LANES;  // registers and numbers across a panel of values

// Interleaves two rows of UNIT numbers into pairs: `first` gives the first LANES columns, `second` the others.
struct PairInterleaver {
    __m512i low, high;

    PairInterleaver() {
        alignas(64) int16_t order[2][UNIT];
        for (int i = 0; i < UNIT; i++)
            for (int half = 0; half < 2; half++) order[half][i] = int16_t(half * LANES + i / 2 + i % 2 * UNIT);
        low = (__m512i)load_as<vu>(order[0]), high = (__m512i)load_as<vu>(order[1]);
    }
    vu first(vu even, vu odd) const { return (vu)_mm512_permutex2var_epi16((__m512i)even, low, (__m512i)odd); }
    vu second(vu even, vu odd) const { return (vu)_mm512_permutex2var_epi16((__m512i)even, high, (__m512i)odd); }
};

// Layout of a unit: keys and values of LANES positions, as 32-bit words of two bfloat16. A word of a key is two
// adjacent numbers; a word of values is one column of two adjacent positions.
struct DotUnit {
    int64_t pairs, columns;  // pairs of a key; padded value size

    explicit DotUnit(const AttentionList& l)
        : pairs(round_up(l.key_dim, UNIT) / 2), columns(round_up(l.value_dim, DOT_PANEL)) {}

    int64_t key_words() const { return pairs * LANES; }
    int64_t words() const { return key_words() + LANES / 2 * columns; }

    // Packs `count` slots, with zeros up to LANES.
    void pack(
        const AttentionList& l, const HeadCache<bf16>& cache, const int32_t* slots, int64_t count, int32_t* to) const {
        pack_keys(cache.keys, cache.key_stride, slots, count, l.key_dim, to);
        pack_values(cache.values, cache.value_stride, slots, count, l.value_dim, to + key_words());
    }

  private:
    // Writes [pairs, LANES].
    void pack_keys(
        const bf16* from, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, int32_t* to) const {
        for (int64_t d = 0; d < dim; d += UNIT) {
            vu words[LANES];
            for (int64_t j = 0; j < LANES; j++)
                words[j] = j < count ? load_pairs(from + slots[j] * stride + d, dim - d) : vu{};
            transpose(words);
            for (int i = 0; i < LANES; i++, to += LANES) store_as(to, words[i]);
        }
    }

    // Writes [LANES / 2, columns].
    void pack_values(
        const bf16* from, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, int32_t* to) const {
        const PairInterleaver interleave;
        for (int64_t k = 0; k < LANES; k += 2)
            for (int64_t d = 0; d < columns; d += DOT_PANEL, to += DOT_PANEL) {
                const auto at = [&](int64_t k) {
                    return k < count ? load_pairs(from + slots[k] * stride + d, dim - d) : vu{};
                };
                const vu even = at(k), odd = at(k + 1);
                store_as(to, interleave.first(even, odd));
                store_as(to + LANES, interleave.second(even, odd));
            }
    }
};

// An item's units in the cache of packed pages (packed_pages.py).
class CachedUnits {
  public:
    CachedUnits(
        const Attention& a, const AttentionList& l, int64_t layer, const Item& item, int64_t head, const DotUnit& unit)
        : item_(item), page_size_(l.page_size), words_(unit.words()) {
        if (!a.packed || !item.versions || item.first % LANES || page_size_ % LANES) return;
        packed_ = a.packed + layer;
        first_ = head * packed_->pages * (page_size_ / LANES);
    }

    // The unit of the item's keys [k, k + LANES), or null if it is not cached.
    const int32_t* find(int64_t k) const {
        const int64_t number = number_of(k);
        if (number < 0 || __atomic_load_n(packed_->stamps + number, __ATOMIC_ACQUIRE) != std::abs(version(k)))
            return nullptr;
        return packed_->words + number * words_;
    }

    // Memory for the unit, to be published by `put`; null: the unit is not to be cached, or another thread packs it.
    int32_t* claim(int64_t k) const {
        const int64_t number = number_of(k);
        if (number < 0 || version(k) < 0) return nullptr;
        int32_t found = __atomic_load_n(packed_->stamps + number, __ATOMIC_RELAXED);
        if (found == BUSY || found == version(k)) return nullptr;
        const bool mine = __atomic_compare_exchange_n(
            packed_->stamps + number, &found, BUSY, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        return mine ? packed_->words + number * words_ : nullptr;
    }

    void put(int64_t k) const { __atomic_store_n(packed_->stamps + number_of(k), version(k), __ATOMIC_RELEASE); }

  private:
    static constexpr int32_t BUSY = -1;

    int32_t version(int64_t k) const { return item_.versions[(item_.first + k) / page_size_]; }
    int64_t number_of(int64_t k) const {
        if (!packed_ || k + LANES > item_.keys() || !version(k)) return -1;
        const int64_t at = item_.first + k, page = item_.pages[at / page_size_];
        return first_ + (page * page_size_ + at % page_size_) / LANES;
    }

    const Item& item_;
    const int64_t page_size_, words_;
    const Packed* packed_ = nullptr;
    int64_t first_ = 0;
};

// Prefetches a block's cached units, or the keys and values to pack, into the L2 cache, a few lines per call, while the
// block before it is multiplied.
class DotPrefetcher {
  public:
    DotPrefetcher() = default;

    // Prefetches the item's keys [b, b + count) within `calls` calls.
    DotPrefetcher(
        const AttentionList& l, const HeadCache<bf16>& cache, const CachedUnits& kept, const DotUnit& unit,
        const int32_t* slots, int64_t b, int64_t count, int64_t calls)
        : cache_(&cache),
          kept_(&kept),
          slots_(slots),
          k_(b),
          end_(b + count),
          unit_bytes_(unit.words() * 4),
          key_bytes_(l.key_dim * 2),
          value_bytes_(l.value_dim * 2) {
        const int64_t lines = count * (key_bytes_ / LINE + value_bytes_ / LINE + 2);
        lines_ = round_up(lines, calls) / calls;
        next();
    }

    void step() {
        for (int64_t i = 0; i < lines_ && at_ < at_end_; i++) {
            __builtin_prefetch(at_, 0, 2);
            at_ += LINE;
            if (at_ >= at_end_) next();
        }
    }

  private:
    // Begins the next range: a cached unit, a key, or that key's value.
    void next() {
        if (value_) {
            value_ = false;
            begin(cache_->values + slots_[k_++] * cache_->value_stride, value_bytes_);
        } else if (k_ >= end_) {
            return;
        } else if (const int32_t* unit = k_ % LANES ? nullptr : kept_->find(k_)) {
            begin(unit, unit_bytes_);
            k_ += LANES;
        } else {
            begin(cache_->keys + slots_[k_] * cache_->key_stride, key_bytes_);
            value_ = cache_->values != cache_->keys;
            k_ += !value_;
        }
    }
    void begin(const void* from, int64_t bytes) {
        at_ = static_cast<const char*>(from);
        at_end_ = at_ + bytes;
    }

    const HeadCache<bf16>* cache_ = nullptr;
    const CachedUnits* kept_ = nullptr;
    const int32_t* slots_ = nullptr;
    int64_t k_ = 0, end_ = 0, unit_bytes_ = 0, key_bytes_ = 0, value_bytes_ = 0, lines_ = 0;
    const char *at_ = nullptr, *at_end_ = nullptr;
    bool value_ = false;
};

#endif

}  // namespace
}  // namespace bg
