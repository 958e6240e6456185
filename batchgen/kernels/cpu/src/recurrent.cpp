// Recurrent layers, token by token (kernels/mixers): a unit of work is some channels of a run, whose state is in the
// cache of one thread from its first token to its last. A token's result is the same sum in the same order whatever
// other tokens the step has, and wherever chunks of its row end.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "rows.h"
#include "simd.h"

namespace bg {
namespace {

// Runs of consecutive tokens (RunBatch of kernels/mixers/states.py).
struct Runs {
    const int64_t *rows;               // [B, longest] flat tokens
    const int64_t *lengths, *sources;  // [B]
    const int64_t *slots;              // [B], 0: nowhere; null: the state of a run is that after its token already
    int64_t count, longest;
};

struct CausalConv {
    Runs runs;
    const void *x;       // [T, C]
    const void *weight;  // [K, C] of `weight_dtype`, in which sums are rounded
    const void *bias;    // [C] of the same, or null
    void *states;        // [P, K, C]
    void *out;           // [T, C]
    int64_t channels, width, silu, dtype, weight_dtype;
};

struct LinearAttention {
    Runs runs;
    const float *query, *key;    // [T, G, K]
    const void *value;           // [T, H, V]
    const float *decay, *beta;   // [T, H] or [T, H, K]; [T, H] or null
    float *states;               // [P, H, K, V]
    void *out;                   // [T, H, V]
    int64_t groups, heads, key_size, value_size, by_channel, dtype;
};

struct SelectiveScan {
    Runs runs;
    const void *x;          // [T, C]
    const float *dt;        // [T, C]
    const float *a;         // [C, N]
    const float *b, *c;     // [T, N]
    float *states;          // [P, C, N]
    float *out;             // [T, C]
    int64_t channels, size, dtype;
};

constexpr int64_t VECTORS = 2, BLOCK = VECTORS * LANES;  // numbers of a state's row at a time

// Calls unit(run, block) for this thread's share of the blocks of all runs.
template <class Unit>
void for_each_unit(const Runs& runs, int64_t blocks, int thread, int threads, Unit unit) {
    const Span span(runs.count * blocks, thread, threads);
    for (int64_t i = span.begin; i < span.end; i++) unit(i / blocks, i % blocks);
}

struct Columns {
    int64_t count;  // of a block, at most BLOCK
    template <class T>
    vf load(const T* p, int64_t v) const {
        const int64_t left = count - v * LANES;
        return left >= LANES ? bg::load(p + v * LANES) : load_some(p + v * LANES, std::max<int64_t>(left, 0));
    }
    template <class T>
    void store(T* p, int64_t v, vf x) const {
        const int64_t left = count - v * LANES;
        if (left >= LANES) bg::store(p + v * LANES, x);
        else if (left > 0) store_some(p + v * LANES, x, left);
    }
};

template <class T, class W>
void causal_conv(const CausalConv& c, int thread, int threads) {
    const int64_t C = c.channels, K = c.width;
    const T* x = static_cast<const T*>(c.x);
    const W *weight = static_cast<const W*>(c.weight), *bias = static_cast<const W*>(c.bias);
    std::vector<float> window(K * BLOCK);  // the last K inputs, as a ring
    for_each_unit(c.runs, round_up(C, BLOCK) / BLOCK, thread, threads, [&](int64_t run, int64_t block) {
        const int64_t first = block * BLOCK, start = c.runs.rows[run * c.runs.longest];
        const Columns columns{std::min(BLOCK, C - first)};
        const bool again = c.runs.slots == nullptr;
        T* states = static_cast<T*>(c.states);
        const T* source = states + c.runs.sources[run] * K * C + first;
        for (int64_t k = 0; k < K; k++)
            for (int64_t v = 0; v < VECTORS; v++)
                store(&window[k * BLOCK + v * LANES], columns.load(source + k * C, v));
        int64_t oldest = 0;
        for (int64_t t = 0; t < c.runs.lengths[run]; t++) {
            const int64_t token = (start + t) * C + first;
            if (!again) {
                for (int64_t v = 0; v < VECTORS; v++)
                    store(&window[oldest * BLOCK + v * LANES], columns.load(x + token, v));
                oldest = (oldest + 1) % K;
            }
            for (int64_t v = 0; v < VECTORS; v++) {
                vf acc = bias ? columns.load(bias + first, v) : vf{};
                for (int64_t k = 0; k < K; k++)
                    acc = fused(load(&window[(oldest + k) % K * BLOCK + v * LANES]),
                                columns.load(weight + k * C + first, v), acc);
                if (c.silu) {
                    acc = rounded<W>(acc);
                    acc = acc / (1.0f + exp(-acc));
                }
                columns.store(static_cast<T*>(c.out) + token, v, acc);
            }
        }
        if (again || !c.runs.slots[run]) return;
        T* slot = states + c.runs.slots[run] * K * C + first;
        for (int64_t k = 0; k < K; k++)
            for (int64_t v = 0; v < VECTORS; v++)
                columns.store(slot + k * C, v, load(&window[(oldest + k) % K * BLOCK + v * LANES]));
    });
}

template <class T>
void linear_attention(const LinearAttention& a, int thread, int threads) {
    const int64_t K = a.key_size, V = a.value_size, H = a.heads, blocks = round_up(V, BLOCK) / BLOCK;
    std::vector<float> state(K * BLOCK), decays(round_up(K, LANES));
    for_each_unit(a.runs, H * blocks, thread, threads, [&](int64_t run, int64_t unit) {
        const int64_t head = unit / blocks, first = unit % blocks * BLOCK, group = head / (H / a.groups);
        const Columns columns{std::min(BLOCK, V - first)};
        const bool again = a.runs.slots == nullptr;
        const float* source = a.states + (a.runs.sources[run] * H + head) * K * V + first;
        for (int64_t k = 0; k < K; k++)
            for (int64_t v = 0; v < VECTORS; v++) store(&state[k * BLOCK + v * LANES], columns.load(source + k * V, v));
        for (int64_t t = 0; t < a.runs.lengths[run]; t++) {
            const int64_t token = a.runs.rows[run * a.runs.longest] + t, row = token * H + head;
            const float *query = a.query + (token * a.groups + group) * K, *key = a.key + (token * a.groups + group) * K;
            vf out[VECTORS] = {}, stored[VECTORS] = {};
            if (again) {
                for (int64_t k = 0; k < K; k++)
                    for (int64_t v = 0; v < VECTORS; v++)
                        out[v] = fused(splat(query[k]), load(&state[k * BLOCK + v * LANES]), out[v]);
            } else {
                if (a.by_channel)
                    by_vectors(K, [&](int64_t k, auto load, auto) { store(&decays[k], exp(load(a.decay + row * K + k))); });
                else
                    std::fill_n(decays.begin(), K, exp(splat(a.decay[row]))[0]);
                for (int64_t v = 0; v < VECTORS; v++)
                    stored[v] = columns.load(static_cast<const T*>(a.value) + row * V + first, v);
                if (a.beta) {  // minus what the decayed state predicts for the key
                    for (int64_t k = 0; k < K; k++) {
                        const vf share = splat(-decays[k] * key[k]);
                        for (int64_t v = 0; v < VECTORS; v++)
                            stored[v] = fused(share, load(&state[k * BLOCK + v * LANES]), stored[v]);
                    }
                    for (int64_t v = 0; v < VECTORS; v++) stored[v] *= a.beta[row];
                }
                for (int64_t k = 0; k < K; k++) {
                    const vf decay = splat(decays[k]), share = splat(key[k]), read = splat(query[k]);
                    for (int64_t v = 0; v < VECTORS; v++) {
                        float* at = &state[k * BLOCK + v * LANES];
                        const vf after = fused(share, stored[v], load(at) * decay);
                        store(at, after);
                        out[v] = fused(read, after, out[v]);
                    }
                }
            }
            for (int64_t v = 0; v < VECTORS; v++) columns.store(static_cast<T*>(a.out) + row * V + first, v, out[v]);
        }
        if (again || !a.runs.slots[run]) return;
        float* slot = a.states + (a.runs.slots[run] * H + head) * K * V + first;
        for (int64_t k = 0; k < K; k++)
            for (int64_t v = 0; v < VECTORS; v++) columns.store(slot + k * V, v, load(&state[k * BLOCK + v * LANES]));
    });
}

template <class T>
void selective_scan(const SelectiveScan& s, int thread, int threads) {
    const int64_t C = s.channels, N = s.size, wide = round_up(N, LANES);
    std::vector<float> state(BLOCK * wide);
    for_each_unit(s.runs, round_up(C, BLOCK) / BLOCK, thread, threads, [&](int64_t run, int64_t block) {
        const int64_t first = block * BLOCK, count = std::min(BLOCK, C - first);
        const bool again = s.runs.slots == nullptr;
        const float* source = s.states + (s.runs.sources[run] * C + first) * N;
        std::fill(state.begin(), state.end(), 0.0f);  // behind N, too, where a NaN of another run would stay
        for (int64_t i = 0; i < count; i++) std::copy_n(source + i * N, N, &state[i * wide]);
        for (int64_t t = 0; t < s.runs.lengths[run]; t++) {
            const int64_t token = s.runs.rows[run * s.runs.longest] + t;
            const float *b = s.b + token * N, *c = s.c + token * N;
            for (int64_t i = 0; i < count; i++) {
                const int64_t at = token * C + first + i;
                const float step = s.dt[at], taken = step * widen(static_cast<const T*>(s.x)[at]);
                const float* decay = s.a + (first + i) * N;
                vf total = {};
                by_vectors(N, [&](int64_t n, auto load_n, auto) {
                    float* held = &state[i * wide + n];
                    vf after = load(held);
                    if (!again) {
                        after = fused(splat(taken), load_n(b + n), after * exp(splat(step) * load_n(decay + n)));
                        store(held, after);
                    }
                    total = fused(after, load_n(c + n), total);
                });
                s.out[at] = sum(total);
            }
        }
        if (again || !s.runs.slots[run]) return;
        float* slot = s.states + (s.runs.slots[run] * C + first) * N;
        for (int64_t i = 0; i < count; i++) std::copy_n(&state[i * wide], N, slot + i * N);
    });
}

}  // namespace
}  // namespace bg

extern "C" {

void bg_causal_conv(const bg::CausalConv* c, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), count = omp_get_num_threads();
        if (c->dtype && c->weight_dtype) bg::causal_conv<bg::bf16, bg::bf16>(*c, thread, count);
        else if (c->dtype) bg::causal_conv<bg::bf16, float>(*c, thread, count);
        else bg::causal_conv<float, float>(*c, thread, count);
    }
}

void bg_linear_attention(const bg::LinearAttention* a, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), count = omp_get_num_threads();
        if (a->dtype) bg::linear_attention<bg::bf16>(*a, thread, count);
        else bg::linear_attention<float>(*a, thread, count);
    }
}

void bg_selective_scan(const bg::SelectiveScan* s, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), count = omp_get_num_threads();
        if (s->dtype) bg::selective_scan<bg::bf16>(*s, thread, count);
        else bg::selective_scan<float>(*s, thread, count);
    }
}
}
