#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace bg {
namespace {

constexpr int64_t BLOCK = 256;       // elements whose maximum is found before they are summed or searched
constexpr float GREEDY = 1e-5f;      // lower temperatures are greedy
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
constexpr float INFINITE = __builtin_inff();

constexpr int HALF = LANES / 2;  // 64-bit numbers in a register

typedef uint64_t vu64 __attribute__((vector_size(8 * HALF)));
typedef int64_t vi64 __attribute__((vector_size(8 * HALF)));
typedef double vd __attribute__((vector_size(8 * HALF)));
typedef float vhalf __attribute__((vector_size(4 * HALF)));

struct RowStats {
    float largest = -INFINITE, normalizer = 0;
    int64_t id = 0;
    bool nan = false;
    bool bad() const { return nan || !(std::fabs(largest) < INFINITE); }
};

template <class T>
const T* row_of(const Logits& l, int64_t r) {
    return static_cast<const T*>(l.data) + r * l.stride;
}

// One pass over a row; with SUM also log(sum(exp)), rescaled whenever a block has a larger maximum.
template <bool SUM, class T>
RowStats scan_row(const T* row, int64_t vocab) {
    RowStats stats;
    int64_t block = 0;
    vu odd = {};  // bits of the largest magnitude; above those of infinity, there is a NaN
    vf total = {};
    for (int64_t from = 0; from < vocab; from += BLOCK) {
        const int64_t count = std::min(BLOCK, vocab - from);
        vf top = splat(-INFINITE);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const vf v = load(row + from + i);
            const vu magnitude = (vu)v << 1;
            odd = magnitude > odd ? magnitude : odd;
            top = max(top, v);
        }
        float most = largest(top);
        for (; i < count; i++) {
            const float v = widen(row[from + i]);
            if (v != v) stats.nan = true;
            most = v > most ? v : most;
        }
        if (most > stats.largest) {
            if (SUM) total *= stats.largest > -INFINITE ? std::exp(stats.largest - most) : 0.0f;
            stats.largest = most;
            block = from;
        }
        if (SUM && stats.largest > -INFINITE) {
            const vf minus = splat(stats.largest);
            for (i = 0; i + LANES <= count; i += LANES) total += exp(load(row + from + i) - minus);
            for (; i < count; i++) total[0] += std::exp(widen(row[from + i]) - stats.largest);
        }
    }
    for (int i = 0; i < LANES; i++) stats.nan |= odd[i] > 0xff000000u;
    if (stats.largest > -INFINITE)
        for (int64_t i = block; i < vocab; i++)
            if (widen(row[i]) == stats.largest) {
                stats.id = i;
                break;
            }
    if (SUM) {
        if (stats.nan) stats.normalizer = __builtin_nanf("");
        else if (stats.bad()) stats.normalizer = stats.largest;
        else stats.normalizer = stats.largest + std::log(sum(total));
    }
    return stats;
}

template <class T>
void scan_rows(const RowScan& s, int thread, int threads) {
    const Span span(s.logits.rows, thread, threads);
    for (int64_t r = span.begin; r < span.end; r++) {
        const T* row = row_of<T>(s.logits, r);
        const RowStats stats =
            s.normalizers ? scan_row<true>(row, s.logits.vocab) : scan_row<false>(row, s.logits.vocab);
        if (s.ids) s.ids[r] = stats.id;
        if (s.largest) s.largest[r] = stats.nan ? __builtin_nanf("") : stats.largest;
        if (s.normalizers) s.normalizers[r] = stats.normalizer;
        if (s.bad) s.bad[r] = stats.bad();
    }
}

struct Candidate {
    float value;
    int32_t id;
    bool operator<(const Candidate& other) const {  // order: falling value, rising id
        return value > other.value || (value == other.value && id < other.id);
    }
};

// Puts the k first candidates of a row, in order, at the front of `found`. NaN counts as -inf.
//
// A row is divided into at least 4k groups (lanes of strips). k of the groups have a maximum at or above the k-th
// largest group maximum, so no number below that is among the first k.
template <class T>
void find_top(const T* row, int64_t vocab, int64_t k, std::vector<Candidate>& found, std::vector<float>& groups) {
    const int64_t vectors = vocab / LANES, strips = std::max<int64_t>(4 * k / LANES + 1, 4);
    float threshold = -INFINITE;
    if (vectors >= 2 * strips) {
        groups.resize(strips * LANES);
        for (int64_t s = 0; s < strips; s++) {
            vf top = splat(-INFINITE);
            for (int64_t i = vectors * s / strips; i < vectors * (s + 1) / strips; i++)
                top = max(load(row + i * LANES), top);
            store(groups.data() + s * LANES, top);
        }
        std::nth_element(groups.begin(), groups.begin() + k - 1, groups.end(), std::greater<float>());
        threshold = groups[k - 1];
    }
    found.clear();
    auto take = [&](int64_t i) {
        const float v = widen(row[i]);
        if (!(v < threshold)) found.push_back({v == v ? v : -INFINITE, int32_t(i)});
    };
    int64_t i = 0;
    for (; i < vectors * LANES; i += LANES)
        if (!(threshold > -INFINITE) || any((vi)(load(row + i) >= threshold)))
            for (int64_t lane = 0; lane < LANES; lane++) take(i + lane);
    for (; i < vocab; i++) take(i);
    std::partial_sort(found.begin(), found.begin() + k, found.end());
}

template <class T>
void top_rows(const Top& t, int thread, int threads) {
    std::vector<Candidate> found;
    std::vector<float> groups;
    const Span span(t.logits.rows, thread, threads);
    for (int64_t r = span.begin; r < span.end; r++) {
        find_top(row_of<T>(t.logits, r), t.logits.vocab, t.k, found, groups);
        for (int64_t i = 0; i < t.k; i++) {
            t.ids[r * t.k + i] = found[i].id;
            t.values[r * t.k + i] = found[i].value;
        }
    }
}

template <class V>
inline V finalise(V z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

inline uint64_t absorb(uint64_t key, uint64_t value) { return finalise((key ^ finalise(value + GAMMA)) + GAMMA); }

constexpr float LARGEST_UNIFORM = 1.0f - 0x1p-24f;

inline float gumbel(uint64_t key, int64_t id) {
    const uint64_t bits = finalise(key + (uint64_t(id) + 1) * GAMMA) >> 11;
    const float v = std::min((float(int64_t(bits)) + 0.5f) * 0x1p-53f, LARGEST_UNIFORM);
    return -std::log(-std::log1p(-v));
}

// Uniform numbers of LANES tokens with the counters `low` and `high`.
inline vf uniform(vu64 low, vu64 high) {
    const vhalf a = __builtin_convertvector((vi64)(finalise(low) >> 11), vhalf);
    const vhalf b = __builtin_convertvector((vi64)(finalise(high) >> 11), vhalf);
    vf v;
    std::memcpy(&v, &a, sizeof a);
    std::memcpy(reinterpret_cast<char*>(&v) + sizeof a, &b, sizeof b);
    return (v + 0.5f) * 0x1p-53f;
}

// Inputs of one row's sample.
template <class T>
struct Draw {
    const T* row;
    int64_t vocab;
    float largest, temperature, min_p;
    uint64_t key;

    float score(int64_t i) const { return (widen(row[i]) - largest) / temperature; }
    float mass(int64_t i) const { return std::exp(score(i)); }

    // Whether token i is ordered before a token with logit `value` and this id.
    bool before(int64_t i, float value, int64_t id) const {
        const float v = widen(row[i]);
        return v > value || (v == value && i < id);
    }
};

// The token with the largest score + gumbel among those before (value, id) that min_p keeps, `start` included.
//
// The noise of uniform v is at most -log(v), so a token can only win if v <= exp(score - best). Comparing v with a
// power of two above that bound skips nearly all tokens without a logarithm.
template <class T>
int64_t best_scored(const Draw<T>& d, int64_t start, float value, int64_t id) {
    int64_t winner = start;
    float best = d.score(start) + gumbel(d.key, start);
    auto consider = [&](int64_t i) {
        const float x = d.score(i);
        if (!(x > -INFINITE) || !d.before(i, value, id) || (d.min_p > 0 && std::exp(x) < d.min_p)) return;
        const float found = x + gumbel(d.key, i);
        if (found > best || (found == best && i < winner)) {
            best = found;
            winner = i;
        }
    };
    const float scale = 1.44269504f / d.temperature;
    vu64 low, high;
    for (int i = 0; i < HALF; i++) {
        low[i] = d.key + uint64_t(i + 1) * GAMMA;
        high[i] = d.key + uint64_t(i + 1 + HALF) * GAMMA;
    }
    int64_t i = 0;
    for (; i + LANES <= d.vocab; i += LANES, low += LANES * GAMMA, high += LANES * GAMMA) {
        const vf power = (load(d.row + i) - d.largest) * scale - best * 1.44269504f + 1.01f;
        const vi rough = __builtin_convertvector(min(max(power, splat(-60.0f)), splat(100.0f)), vi);
        const vi may = uniform(low, high) <= (vf)((rough + 127) << 23);
        if (any(may))
            for (int lane = 0; lane < LANES; lane++)
                if (may[lane]) consider(i + lane);
    }
    for (; i < d.vocab; i++) consider(i);
    return winner;
}

// Without top_k: samples from the whole row until the token is within top_p. If it is not, no token ordered behind it
// is, so the next attempt is restricted to the tokens before it.
template <class T>
int64_t sample_full(const Draw<T>& d, int64_t top, float top_p) {
    int64_t token = best_scored(d, top, -INFINITE, d.vocab);
    if (!(top_p < 1.0f)) return token;
    const vi lanes = lane_numbers<vi>();
    auto mass_before = [&](float value, int64_t id) {
        const vf least = splat(value);
        vd low = {}, high = {};
        int64_t i = 0;
        for (; i + LANES <= d.vocab; i += LANES) {
            const vf v = load(d.row + i);
            const vi before = (v > least) | ((v == least) & (lanes + int32_t(i) < int32_t(id)));
            if (!any(before)) continue;
            const vf q = (vf)((vi)exp((v - d.largest) / d.temperature) & before);
            vhalf half[2];
            std::memcpy(half, &q, sizeof q);
            low += __builtin_convertvector(half[0], vd);
            high += __builtin_convertvector(half[1], vd);
        }
        double mass = 0;
        for (int lane = 0; lane < HALF; lane++) mass += low[lane] + high[lane];
        for (; i < d.vocab; i++)
            if (d.before(i, value, id)) mass += double(d.mass(i));
        return mass;
    };
    const double limit = mass_before(-INFINITE, d.vocab) * double(top_p);
    while (token != top) {
        const float value = widen(d.row[token]);
        const double mass = mass_before(value, token);
        if (!(mass >= limit && mass > 0)) break;
        token = best_scored(d, top, value, token);
    }
    return token;
}

// Workspace reused by the rows.
struct SampleScratch {
    std::vector<Candidate> found;
    std::vector<float> groups;
    std::vector<double> before;
};

template <class T>
int64_t sample_top_k(const Draw<T>& d, int64_t k, float top_p, SampleScratch& memory) {
    auto& [found, groups, before] = memory;
    find_top(d.row, d.vocab, k, found, groups);
    before.resize(k + 1);
    before[0] = 0;
    for (int64_t i = 0; i < k; i++) before[i + 1] = before[i] + double(d.mass(found[i].id));
    const double limit = double(top_p) * before[k];
    int64_t winner = found[0].id;
    float best = gumbel(d.key, winner);
    for (int64_t i = 1; i < k && before[i] < limit; i++) {
        const float x = d.score(found[i].id), q = std::exp(x);
        if (q < d.min_p || !(q > 0)) break;  // later candidates are not more likely
        const float score = x + gumbel(d.key, found[i].id);
        if (score > best || (score == best && found[i].id < winner)) {
            best = score;
            winner = found[i].id;
        }
    }
    return winner;
}

template <class T>
void sample_rows(const Sample& s, int thread, int threads) {
    SampleScratch memory;
    const int64_t vocab = s.logits.vocab;
    const Span span(s.draws, thread, threads);
    for (int64_t r = span.begin; r < span.end; r++) {
        const T* row = row_of<T>(s.logits, s.sample_rows ? s.sample_rows[r] : r);
        const RowStats stats = scan_row<false>(row, vocab);
        s.bad[r] = stats.bad();
        s.tokens[r] = stats.id;
        if (stats.bad() || !s.keys || s.temperature[r] < GREEDY) continue;
        const Draw<T> d{row, vocab, stats.largest, s.temperature[r], s.min_p[r], uint64_t(s.keys[r])};
        s.tokens[r] = s.top_k[r] > 0 ? sample_top_k(d, std::min(s.top_k[r], vocab), s.top_p[r], memory)
                                     : sample_full(d, stats.id, s.top_p[r]);
    }
}

}  // namespace

void row_scan_part(const RowScan& s, int thread, int threads) {
    return s.logits.dtype ? scan_rows<bf16>(s, thread, threads) : scan_rows<float>(s, thread, threads);
}

void top_part(const Top& t, int thread, int threads) {
    return t.logits.dtype ? top_rows<bf16>(t, thread, threads) : top_rows<float>(t, thread, threads);
}

void sample_part(const Sample& s, int thread, int threads) {
    return s.logits.dtype ? sample_rows<bf16>(s, thread, threads) : sample_rows<float>(s, thread, threads);
}

}  // namespace bg

extern "C" {

void bg_row_scan(const bg::RowScan* s, int threads) {
#pragma omp parallel num_threads(threads)
    bg::row_scan_part(*s, omp_get_thread_num(), omp_get_num_threads());
}

void bg_top(const bg::Top* t, int threads) {
#pragma omp parallel num_threads(threads)
    bg::top_part(*t, omp_get_thread_num(), omp_get_num_threads());
}

void bg_sample(const bg::Sample* s, int threads) {
#pragma omp parallel num_threads(threads)
    bg::sample_part(*s, omp_get_thread_num(), omp_get_num_threads());
}

void bg_row_keys(const bg::RowKeys* k) {
    for (int64_t r = 0; r < k->rows; r++)
        k->keys[r] = int64_t(bg::absorb(bg::absorb(bg::absorb(0, k->seeds[r]), k->samples[r]), k->positions[r]));
}
}
