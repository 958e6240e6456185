#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "matmul.h"

namespace bg {
namespace {

constexpr int64_t CHUNK = 512;  // elements of a row that form one unit of work

// 1 / sqrt(mean of squares + eps); `square` is the sum.
inline float inverse_rms(vf square, int64_t count, double eps) {
    return 1.0f / std::sqrt(sum(square) / float(count) + float(eps));
}

// v rounded to T, unless storing it as Out rounds it.
template <class T, class Out>
inline vf to_output(vf v) {
    return std::is_same_v<T, Out> ? v : rounded<T>(v);
}

template <class T, class Out>
void norm_row(T* x, const T* delta, const T* weight, Out* out, int64_t hidden, double eps) {
    vf square = {};
    by_vectors(hidden, [&](int64_t i, auto get, auto put) {
        vf v = get(x + i);
        if (delta) {
            v = rounded<T>(v + get(delta + i));
            put(x + i, v);
        }
        square += v * v;
    });
    const float scale = inverse_rms(square, hidden, eps);
    by_vectors(hidden, [&](int64_t i, auto get, auto put) {
        put(out + i, to_output<T, Out>(get(x + i) * scale * get(weight + i)));
    });
}

template <class T, class Out>
void norm_rows(const Norm& n, int thread, int threads) {
    const Span span(n.tokens, thread, threads);
    for (int64_t t = span.begin; t < span.end; t++) {
        const int64_t at = t * n.hidden;
        norm_row(static_cast<T*>(n.x) + at, n.delta ? static_cast<const T*>(n.delta) + at : nullptr,
                 static_cast<const T*>(n.weight), static_cast<Out*>(n.out) + at, n.hidden, n.eps);
    }
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// x times the cumulative normal distribution, by 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
inline vf gelu(vf x) {
    const vf z = x < 0 ? x * -0.70710678f : x * 0.70710678f;
    const vf t = 1.0f / (1.0f + 0.3275911f * z);
    vf p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf tail = 0.5f * p * t * exp(-z * z);
    return x * (x < 0 ? tail : 1.0f - tail);
}

// Has the error of `power_of_two`: one unit in the last place for a few of all bfloat16 numbers.
inline vf silu_bf16(vf x) {
#if defined(__AVX512DQ__)
    x = max(splat(-87.0f), x);  // below it the result is 0; avoids infinity, keeps NaN
    const vf whole = 1.0f + power_of_two(x * -1.44269504f);
    const vf near = (vf)_mm512_rcp14_ps((__m512)whole);
    return x * (near * (2.0f - whole * near));
#else
    return x / (1.0f + exp(-x));
#endif
}

template <int64_t A, class T>
inline vf activated(vf x) {
    if constexpr (A == SILU) return sizeof(T) == 2 ? silu_bf16(x) : x / (1.0f + exp(-x));
    if constexpr (A == GELU) return gelu(x);
    // (1 + tanh(u)) / 2 = sigmoid(2u)
    if constexpr (A == GELU_TANH) return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    if constexpr (A == QUICK_GELU) return rounded<T>(sigmoid(rounded<T>(1.702f * x))) * x;
    return x < 0 ? vf{} : x;  // keeps NaN
}

template <int64_t A, class T, class Out>
void gated_rows(const Gated& g, int thread, int threads) {
    const int64_t chunks = (g.inner + CHUNK - 1) / CHUNK;
    const Span span(g.tokens * chunks, thread, threads);
    for (int64_t at = span.begin; at < span.end; at++) {
        const int64_t t = at / chunks, from = at % chunks * CHUNK;
        const T* gate = static_cast<const T*>(g.gate_up) + t * 2 * g.inner + from;
        Out* out = static_cast<Out*>(g.out) + t * g.inner + from;
        by_vectors(std::min(CHUNK, g.inner - from), [&](int64_t i, auto get, auto put) {
            put(out + i, to_output<T, Out>(rounded<T>(activated<A, T>(get(gate + i))) * get(gate + g.inner + i)));
        });
    }
}

template <class T, class Out>
void gated_by(const Gated& g, int thread, int threads) {
    switch (g.activation) {
        case SILU: return gated_rows<SILU, T, Out>(g, thread, threads);
        case GELU: return gated_rows<GELU, T, Out>(g, thread, threads);
        case GELU_TANH: return gated_rows<GELU_TANH, T, Out>(g, thread, threads);
        case QUICK_GELU: return gated_rows<QUICK_GELU, T, Out>(g, thread, threads);
        default: return gated_rows<RELU, T, Out>(g, thread, threads);
    }
}

// Rotary embedding of a head [D], normalised first if there is a weight; out may be x.
template <class T>
void norm_and_rotate(const T* x, T* out, const T* weight, const T* cos, const T* sin, int64_t dim, double eps) {
    float scale = 1.0f;
    if (weight) {
        vf square = {};
        by_vectors(dim, [&](int64_t i, auto get, auto) {
            const vf v = get(x + i);
            square += v * v;
        });
        scale = inverse_rms(square, dim, eps);
    }
    const int64_t half = dim / 2;
    by_vectors(half, [&](int64_t i, auto get, auto put) {
        vf one = get(x + i), two = get(x + half + i);
        if (weight) {
            one = rounded<T>(one * scale * get(weight + i));
            two = rounded<T>(two * scale * get(weight + half + i));
        }
        const vf first = rounded<T>(two * get(sin + i)) + one * get(cos + i);
        const vf second = rounded<T>(one * get(sin + half + i)) + two * get(cos + half + i);
        put(out + i, first);
        put(out + half + i, second);
    });
}

template <class T>
void heads_rows(const Heads& h, int thread, int threads) {
    const Span span(h.tokens, thread, threads);
    for (int64_t t = span.begin; t < span.end; t++) {
        T* row = static_cast<T*>(h.qkv) + t * (h.heads + 2 * h.kv_heads) * h.dim;
        const int64_t at = h.positions ? h.positions[t] : t;
        const T* cos = static_cast<const T*>(h.cos) + at * h.dim;
        const T* sin = static_cast<const T*>(h.sin) + at * h.dim;
        for (int64_t n = 0; n < h.heads; n++, row += h.dim)
            norm_and_rotate(row, row, static_cast<const T*>(h.q_norm), cos, sin, h.dim, h.eps);
        const int64_t slot = h.slots[t] * h.kv_heads * h.dim;
        T* key = static_cast<T*>(h.keys) + slot;
        for (int64_t n = 0; n < h.kv_heads; n++, row += h.dim)
            norm_and_rotate(row, key + n * h.dim, static_cast<const T*>(h.k_norm), cos, sin, h.dim, h.eps);
        std::memcpy(static_cast<T*>(h.values) + slot, row, h.kv_heads * h.dim * sizeof(T));
    }
}

}  // namespace

void norm_part(const Norm& n, int thread, int threads) {
    if (!n.dtype) return norm_rows<float, float>(n, thread, threads);
    return n.wide ? norm_rows<bf16, float>(n, thread, threads) : norm_rows<bf16, bf16>(n, thread, threads);
}

void gated_part(const Gated& g, int thread, int threads) {
    if (!g.dtype) return gated_by<float, float>(g, thread, threads);
    return g.wide ? gated_by<bf16, float>(g, thread, threads) : gated_by<bf16, bf16>(g, thread, threads);
}

void heads_part(const Heads& h, int thread, int threads) {
    return h.dtype ? heads_rows<bf16>(h, thread, threads) : heads_rows<float>(h, thread, threads);
}

// Copies a row out of panels: a panel holds four bytes of each of its rows, then the next four.
void copy_from_panel(const Embed& e, int64_t row, char* out) {
    const int64_t words = (e.bytes + 3) / 4;
    const char* in = static_cast<const char*>(e.table) + (row / PANEL * words * PANEL + row % PANEL) * 4;
    for (int64_t word = 0; word < words; word++)
        std::memcpy(out + 4 * word, in + word * PANEL * 4, std::min<int64_t>(4, e.bytes - 4 * word));
}

void embed_part(const Embed& e, int thread, int threads) {
    const Span span(e.tokens, thread, threads);
    if (e.packed) {
        for (int64_t t = span.begin; t < span.end; t++)
            copy_from_panel(e, e.ids[t], static_cast<char*>(e.out) + t * e.bytes);
        return;
    }
    for (int64_t t = span.begin; t < span.end; t++)
        std::memcpy(static_cast<char*>(e.out) + t * e.bytes, static_cast<const char*>(e.table) + e.ids[t] * e.bytes,
                    e.bytes);
}

void fill_sampled_ids_part(const FillSampledIds& f, int thread, int threads) {
    const Span span(f.tokens, thread, threads);
    for (int64_t t = span.begin; t < span.end; t++)
        if (f.source[t] >= 0) f.ids[t] = f.sampled[f.source[t]];
}

}  // namespace bg

extern "C" {

void bg_norm(const bg::Norm* n, int threads) {
#pragma omp parallel num_threads(threads)
    bg::norm_part(*n, omp_get_thread_num(), omp_get_num_threads());
}

void bg_gated(const bg::Gated* g, int threads) {
#pragma omp parallel num_threads(threads)
    bg::gated_part(*g, omp_get_thread_num(), omp_get_num_threads());
}

void bg_heads(const bg::Heads* h, int threads) {
#pragma omp parallel num_threads(threads)
    bg::heads_part(*h, omp_get_thread_num(), omp_get_num_threads());
}
}
