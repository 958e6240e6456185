#include "fetch.h"

#include <algorithm>
#include <cstdio>

#include "attention.h"

namespace bg {
namespace {

// Size of the last-level cache that cores share. The C library reports the sum over the machine.
int64_t cache_bytes() {
    static const int64_t bytes = [] {
        long kilobytes = 0;
        if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
            if (std::fscanf(file, "%ldK", &kilobytes) != 1) kilobytes = 0;
            std::fclose(file);
        }
        return int64_t(kilobytes) << 10;
    }();
    return bytes;
}

// Limit for large caches, which other processes share.
constexpr int64_t MOST_BYTES = 16 << 20;

// The chunks of a share's pages in order, padded with MOST_CHUNKS more; empty if pages are not whole chunks or values
// are not as long as keys.
std::vector<int32_t> chunks_of(const AttentionList& l, int64_t share, int64_t most_bytes) {
    std::vector<int32_t> chunks;
    const int64_t bytes = l.page_size * l.kv_heads * l.key_dim * (l.dtype ? 2 : 4);
    if (l.value_dim != l.key_dim || bytes % CHUNK_BYTES) return chunks;
    const int32_t of_page = int32_t(bytes / CHUNK_BYTES);
    for (const int32_t page : attention_pages(l, share, most_bytes / (2 * bytes)))
        for (int32_t i = 0; i < of_page; i++) chunks.push_back(page * of_page + i);
    if (!chunks.empty()) chunks.resize(chunks.size() + MOST_CHUNKS, chunks.back());
    return chunks;
}

}  // namespace

KvFetch::KvFetch(const Attention& a, int64_t num_layers)
    : num_layers_(num_layers),
      num_shares_(num_layers ? a.lists[0]->num_shares : 1),
      layers_(new Layer[num_layers * num_shares_]) {
    const int64_t most = std::min(cache_bytes() / 2, MOST_BYTES) / num_shares_;
    if (!most) return;
    std::vector<const AttentionList*> lists;
    for (int64_t i = 0; i < num_layers; i++) {
        const AttentionList* list = a.lists[i];
        const size_t at = std::find(lists.begin(), lists.end(), list) - lists.begin();
        for (int64_t share = 0; share < num_shares_; share++) {
            if (at == lists.size()) chunks_.push_back(chunks_of(*list, share, most));
            const std::vector<int32_t>& chunks = chunks_[at * num_shares_ + share];
            Layer& layer = layers_[i * num_shares_ + share];
            layer.keys_ = static_cast<const char*>(a.keys[i]);
            layer.values_ = static_cast<const char*>(a.values[i]);
            layer.chunks_ = chunks.data();
            layer.count_ = std::max<int64_t>(int64_t(chunks.size()) - MOST_CHUNKS, 0);
        }
        if (at == lists.size()) lists.push_back(list);
    }
}

Lines KvFetch::Layer::take(int64_t lines) {
    const int64_t wanted = (lines + CHUNK_LINES - 1) / CHUNK_LINES;
    // Once all chunks are taken the counter is only read, so that its cache line stays shared.
    if (wanted > MOST_CHUNKS || taken_.load(std::memory_order_relaxed) >= 2 * count_) return {};
    const int64_t from = taken_.fetch_add(wanted, std::memory_order_relaxed);
    if (from >= 2 * count_) return {};
    return from < count_ ? Lines{keys_, chunks_ + from} : Lines{values_, chunks_ + (from - count_)};
}

}  // namespace bg

// For tests: writes the addresses of the lines prefetched for a layer's attention and a share to `at`, at most `most`,
// taken `lines` at a time as tiles do. Returns their number.
extern "C" int64_t bg_fetched_lines(
    const bg::Attention* a, int64_t num_layers, int64_t layer, int64_t share, int64_t lines, const void** at,
    int64_t most) {
    bg::KvFetch fetch(*a, num_layers);
    bg::KvFetch::Layer* from = fetch.layer(layer, share);
    int64_t count = 0;
    while (from) {
        const bg::Lines taken = from->take(lines);
        if (!taken.base) break;
        for (int64_t i = 0; i < lines && count < most; i++) at[count++] = taken.at(i);
    }
    return count;
}
