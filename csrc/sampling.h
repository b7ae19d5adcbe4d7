// From a row of logits [V] in fp32 to a token, and to what is told of it: kernels/choose.py and serve/logprobs.py define
// them. A row is one thread's work, so it has the same token and the same bits in any company.
//
// Most rows of a large vocabulary keep a few hundred tokens at most. So a threshold that certainly keeps enough is found
// first, and only the candidates above it are ordered.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int64_t SUMMED = 256;  // neighbours whose weights are added up before any single one is looked at
constexpr int64_t COMPARED = 64;  // neighbours of which only the largest is looked at first
constexpr double DEPTH = 2, DEEPEST = 88;  // how far below the largest it is looked for enough; then nothing weighs any more

struct Logits {
    const float* values;
    int64_t size;

    // visit(values, place) for every register full from `start` to `stop`; the last is filled up with minus infinity.
    template <class Visit>
    INLINE void each(int64_t start, int64_t stop, Visit&& visit) const {
        int64_t i = start;
        for (; i + LANES <= stop; i += LANES) visit(load(values + i), i);
        if (i < stop) {
            floats rest = all(lowest());
            memcpy(&rest, values + i, (stop - i) * sizeof(float));
            visit(rest, i);
        }
    }

    // The largest; NaN if there is one.
    float largest() const {
        floats most = all(lowest());
        ints broken = {};
        each(0, size, [&](floats v, int64_t) {
            most = larger(v, most);
            broken |= v != v;
        });
        return lanes_of(broken) ? __builtin_nanf("") : highest(most);
    }

    int64_t first_of(float value) const {
        for (int64_t start = 0; start < size; start += SUMMED) {
            const int64_t stop = std::min(size, start + SUMMED);
            ints found = {};
            each(start, stop, [&](floats v, int64_t) { found |= v == value; });
            if (!lanes_of(found)) continue;
            return std::find(values + start, values + stop, value) - values;
        }
        return -1;
    }

    // Below it there are none of the k largest.
    float least_of_largest(int64_t k) const {
        std::vector<float> peaks;
        for (int64_t start = 0; start < size; start += COMPARED) {
            floats most = all(lowest());
            each(start, std::min(size, start + COMPARED), [&](floats v, int64_t) { most = larger(v, most); });
            peaks.push_back(highest(most));
        }
        if (k > int64_t(peaks.size())) return lowest();
        std::nth_element(peaks.begin(), peaks.begin() + k - 1, peaks.end(), std::greater<float>());
        return peaks[k - 1];
    }
};

// exp((z - largest) / t): what a token weighs, the largest 1.
struct Weights {
    float largest, inverse;
    INLINE floats of(floats logits) const { return exponential((logits - largest) * inverse); }
};

struct Candidate {
    float logit, weight;
    int32_t id;
    // By falling logit, of equal ones the lowest id first.
    bool operator<(const Candidate& other) const {
        return logit != other.logit ? logit > other.logit : id < other.id;
    }
};
typedef std::vector<Candidate> Candidates;

static Candidates candidates_above(const Logits& logits, float least, Weights weights) {
    Candidates found;
    logits.each(0, logits.size, [&](floats v, int64_t place) {
        uint32_t lanes = lanes_of(v >= least);
        if (!lanes) return;
        floats weight = weights.of(v);
        for (; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            if (place + lane < logits.size) found.push_back({v[lane], weight[lane], int32_t(place + lane)});
        }
    });
    return found;
}

// The sums of SUMMED weights at a time; those of logits below `least` count as zero.
static std::vector<double> summed(const Logits& logits, float least, Weights weights) {
    std::vector<double> sums;
    for (int64_t start = 0; start < logits.size; start += SUMMED) {
        floats total = {};
        logits.each(start, std::min(logits.size, start + SUMMED), [&](floats v, int64_t) {
            total += choose(v >= least, weights.of(v), floats{});
        });
        sums.push_back(sum(total));
    }
    return sums;
}

static double total_of(const std::vector<double>& sums) {
    double total = 0;
    for (double each : sums) total += each;
    return total;
}

// The place at which a running sum of `weight(place)` first exceeds `point`; what weighs nothing is never it.
template <class Weight>
int64_t piece_under(double point, int64_t count, Weight&& weight) {
    int64_t last = -1;
    double passed = 0;
    for (int64_t place = 0; place < count; place++) {
        if (!(weight(place) > 0)) continue;
        last = place;
        if ((passed += weight(place)) > point) break;
    }
    return last;
}

static int64_t draw_of_all(const Logits& logits, Weights weights, double point) {
    std::vector<double> sums = summed(logits, lowest(), weights);
    point *= total_of(sums);
    const int64_t block = piece_under(point, sums.size(), [&](int64_t i) { return sums[i]; });
    for (int64_t i = 0; i < block; i++) point -= sums[i];
    const int64_t start = block * SUMMED, stop = std::min(logits.size, start + SUMMED);
    float mine[SUMMED + LANES];
    logits.each(start, stop, [&](floats v, int64_t place) { store(mine + place - start, weights.of(v)); });
    return start + piece_under(point, stop - start, [&](int64_t i) { return mine[i]; });
}

static double weight_of(Candidates::const_iterator first, Candidates::const_iterator last) {
    double total = 0;
    for (; first != last; first++) total += first->weight;
    return total;
}

// The last, in their order, before which there is less than `wanted`: always to the half in which it is.
static Candidate last_within(Candidates some, double wanted) {
    auto first = some.begin(), last = some.end();
    double before = 0;
    while (last - first > 1) {
        auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last);
        double weight = weight_of(first, middle);
        if (before + weight < wanted)
            before += weight, first = middle;
        else
            last = middle;
    }
    return *first;
}

// What min_p, top_k and top_p leave, by id.
static Candidates kept_of(const Logits& logits, Weights weights, const Draw& draw) {
    const bool has_top_k = draw.top_k > 0 && draw.top_k < logits.size, has_top_p = draw.top_p < 1;
    const double temperature = 1 / double(weights.inverse);
    float least = lowest();
    if (draw.min_p > 0) least = float(weights.largest + temperature * std::log(draw.min_p));
    double total = 0;
    float enough = least;
    if (has_top_k) {
        enough = std::max(least, logits.least_of_largest(int64_t(draw.top_k)));
    } else if (has_top_p) {
        total = total_of(summed(logits, least, weights));
        for (double depth = DEPTH; depth < DEEPEST; depth += DEPTH) {
            const float reached = float(weights.largest - temperature * depth);
            if (reached <= least) break;
            if (total_of(summed(logits, reached, weights)) < draw.top_p * total) continue;
            enough = reached;
            break;
        }
    }
    Candidates kept = candidates_above(logits, enough, weights);
    auto keep_to = [&](const Candidate& last) { std::erase_if(kept, [&](const Candidate& c) { return last < c; }); };
    if (has_top_k && int64_t(kept.size()) > draw.top_k) {
        Candidates some = kept;
        std::nth_element(some.begin(), some.begin() + int64_t(draw.top_k) - 1, some.end());
        keep_to({some[int64_t(draw.top_k) - 1].logit, 0, INT32_MAX});  // all that tie with it stay
    }
    if (has_top_p) keep_to(last_within(kept, draw.top_p * (has_top_k ? weight_of(kept.begin(), kept.end()) : total)));
    return kept;
}

// -1: there is no largest one.
static int64_t choose_token(const Logits& logits, const Draw& draw) {
    const float largest = logits.largest();
    if (!std::isfinite(largest)) return -1;
    if (draw.temperature == 0) return logits.first_of(largest);
    const Weights weights{largest, float(1 / draw.temperature)};
    const bool filters = draw.min_p > 0 || (draw.top_k > 0 && draw.top_k < logits.size) || draw.top_p < 1;
    if (!filters) return draw_of_all(logits, weights, draw.point);
    const Candidates kept = kept_of(logits, weights, draw);
    const double point = draw.point * weight_of(kept.begin(), kept.end());
    return kept[piece_under(point, kept.size(), [&](int64_t i) { return kept[i].weight; })].id;
}

// values [1 + num_top] and ids [1 + num_top]: of `token`, and of the most probable.
static void log_probabilities_of(const Logits& logits, int64_t token, int64_t num_top, float* values, int64_t* ids) {
    const float largest = logits.largest();
    ids[0] = token;
    values[0] = logits.values[token];
    if (num_top) {
        Candidates top = candidates_above(logits, logits.least_of_largest(num_top), {largest, 1});
        std::partial_sort(top.begin(), top.begin() + std::min<int64_t>(num_top, top.size()), top.end());
        for (int64_t i = 0; i < num_top; i++) {
            bool found = i < int64_t(top.size());  // not all, if some are NaN
            ids[1 + i] = found ? top[i].id : 0;
            values[1 + i] = found ? top[i].logit : largest;
        }
    }
    const float log_total = float(std::log(total_of(summed(logits, lowest(), {largest, 1}))));
    for (int64_t i = 0; i <= num_top; i++) values[i] = values[i] - largest - log_total;
}

void choose_tokens(const float* const* rows, int64_t num_rows, int64_t size, const Draw* draws, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; row++) tokens[row] = choose_token({rows[row], size}, draws[row]);
}

void log_probabilities(
    const float* const* rows, int64_t num_rows, int64_t size, const int64_t* tokens, int64_t num_top, float* values,
    int64_t* ids
) {
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t place = row * (1 + num_top);
        log_probabilities_of({rows[row], size}, tokens[row], num_top, values + place, ids + place);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
