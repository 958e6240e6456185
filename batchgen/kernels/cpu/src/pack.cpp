// Packs weights into the layout of matmul.h, and unpacks them.
#include <algorithm>

#include "matmul.h"
#include "parallel.h"

namespace bg {
namespace {

struct Packing {
    void* weight;  // [N, K], rows `stride` elements apart
    void* packed;
    int64_t inner, outer, stride;
};

// Index of element k of a panel's row n. bfloat16 elements are stored in pairs.
template <class T>
inline int64_t index_of(int64_t k, int64_t n) {
    constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
    return (k / PAIR * PANEL + n) * PAIR + k % PAIR;
}

template <class T>
int64_t rounded(int64_t inner) {
    return sizeof(T) == 2 ? (inner + 1) / 2 * 2 : inner;
}

constexpr int64_t BLOCK = 64;  // elements of a row moved together, so that a block of a panel stays in the cache

template <class T>
void pack(const Packing& p) {
    const int64_t panels = (p.outer + PANEL - 1) / PANEL, inner = rounded<T>(p.inner);
#pragma omp for
    for (int64_t panel = 0; panel < panels; panel++) {
        T* out = static_cast<T*>(p.packed) + panel * inner * PANEL;
        for (int64_t from = 0; from < inner; from += BLOCK) {
            const int64_t to = std::min(from + BLOCK, inner);
            for (int64_t n = 0; n < PANEL; n++) {
                const int64_t row = panel * PANEL + n;
                const T* in = static_cast<const T*>(p.weight) + row * p.stride;
                const int64_t filled = row < p.outer ? std::min(to, p.inner) : from;
                for (int64_t k = from; k < filled; k++) out[index_of<T>(k, n)] = in[k];
                for (int64_t k = std::max(from, filled); k < to; k++) out[index_of<T>(k, n)] = T{};
            }
        }
    }
}

template <class T>
void unpack(const Packing& p) {
    const int64_t panels = (p.outer + PANEL - 1) / PANEL, inner = rounded<T>(p.inner);
#pragma omp for
    for (int64_t panel = 0; panel < panels; panel++) {
        const T* in = static_cast<const T*>(p.packed) + panel * inner * PANEL;
        const int64_t filled = std::min<int64_t>(PANEL, p.outer - panel * PANEL);
        for (int64_t from = 0; from < p.inner; from += BLOCK) {
            const int64_t to = std::min(from + BLOCK, p.inner);
            for (int64_t n = 0; n < filled; n++) {
                T* out = static_cast<T*>(p.weight) + (panel * PANEL + n) * p.stride;
                for (int64_t k = from; k < to; k++) out[k] = in[index_of<T>(k, n)];
            }
        }
    }
}

}  // namespace
}  // namespace bg

extern "C" {

int64_t bg_matmul_panel() { return bg::PANEL; }

int64_t bg_matmul_scratch(int64_t inner, int64_t method, int64_t group) {
    return bg::matmul_scratch(inner, method, group);
}

// Whether the processor has the bfloat16 dot instruction.
int64_t bg_matmul_has_dot() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Whether the processor has the int8 dot instruction.
int64_t bg_matmul_has_int8() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

void bg_matmul_pack(const bg::Packing* p, int64_t bfloat16, int64_t threads) {
#pragma omp parallel num_threads(threads)
    if (bfloat16) bg::pack<bg::bf16>(*p);
    else bg::pack<float>(*p);
}

void bg_matmul_unpack(const bg::Packing* p, int64_t bfloat16, int64_t threads) {
#pragma omp parallel num_threads(threads)
    if (bfloat16) bg::unpack<bg::bf16>(*p);
    else bg::unpack<float>(*p);
}

}  // extern "C"
