// Sampling of a token from a row of logits [V] in fp32, and log-probabilities, as kernels/reference/sampling.py and
// logprobs.py define them. One thread computes a row, so both are batch-invariant.
//
// Filters keep at most a few hundred tokens of most rows. So a threshold that keeps at least those is computed first,
// and only the candidates above it are sorted.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

// Tokens per block of the inverse CDF: the draw finds a block first, then a token in it.
constexpr int64_t CDF_BLOCK = 256;
// Tokens per block of the maxima that bound the k-th largest.
constexpr int64_t MAX_BLOCK = 64;
// Thresholds are tried in steps below the largest logit; below the deepest, weights are zero.
constexpr double DEPTH_STEP = 2, MAX_DEPTH = 88;

struct Logits {
    const float* values;
    int64_t size;

    // Calls visit(values, index) for each vector from `start` to `stop`; the last is padded with minus infinity.
    template <class Visit>
    INLINE void for_each(int64_t start, int64_t stop, Visit&& visit) const {
        int64_t i = start;
        for (; i + LANES <= stop; i += LANES) visit(load(values + i), i);
        if (i < stop) {
            floats rest = all(minus_infinity());
            memcpy(&rest, values + i, (stop - i) * sizeof(float));
            visit(rest, i);
        }
    }

    // The largest logit, or NaN if any is NaN.
    float largest() const {
        floats most = all(minus_infinity());
        ints broken = {};
        for_each(0, size, [&](floats v, int64_t) {
            most = maximum(v, most);
            broken |= v != v;
        });
        return lane_mask(broken) ? __builtin_nanf("") : max_lane(most);
    }

    int64_t index_of(float value) const {
        for (int64_t start = 0; start < size; start += CDF_BLOCK) {
            const int64_t stop = std::min(size, start + CDF_BLOCK);
            ints found = {};
            for_each(start, stop, [&](floats v, int64_t) { found |= v == value; });
            if (!lane_mask(found)) continue;
            return std::find(values + start, values + stop, value) - values;
        }
        return -1;
    }

    // A lower bound of the k largest.
    float top_k_bound(int64_t k) const {
        std::vector<float> maxima;
        for (int64_t start = 0; start < size; start += MAX_BLOCK) {
            floats most = all(minus_infinity());
            for_each(start, std::min(size, start + MAX_BLOCK), [&](floats v, int64_t) { most = maximum(v, most); });
            maxima.push_back(max_lane(most));
        }
        if (k > int64_t(maxima.size())) return minus_infinity();
        std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
        return maxima[k - 1];
    }
};

// The weight of a token, exp((z - largest) / t): 1 for the largest.
struct Weights {
    float largest, inverse;
    INLINE floats of(floats logits) const { return exponential((logits - largest) * inverse); }
};

struct Candidate {
    float logit, weight;
    int32_t id;
    // Order: by falling logit, of equal ones the lowest id first.
    bool operator<(const Candidate& other) const {
        return logit != other.logit ? logit > other.logit : id < other.id;
    }
};
typedef std::vector<Candidate> Candidates;

static Candidates candidates_above(const Logits& logits, float least, Weights weights) {
    Candidates found;
    logits.for_each(0, logits.size, [&](floats v, int64_t index) {
        uint32_t lanes = lane_mask(v >= least);
        if (!lanes) return;
        floats weight = weights.of(v);
        for (; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            if (index + lane < logits.size) found.push_back({v[lane], weight[lane], int32_t(index + lane)});
        }
    });
    return found;
}

// The sums of blocks of weights; logits below `least` count as zero.
static std::vector<double> block_sums(const Logits& logits, float least, Weights weights) {
    std::vector<double> sums;
    for (int64_t start = 0; start < logits.size; start += CDF_BLOCK) {
        floats total = {};
        logits.for_each(start, std::min(logits.size, start + CDF_BLOCK), [&](floats v, int64_t) {
            total += select(v >= least, weights.of(v), floats{});
        });
        sums.push_back(sum(total));
    }
    return sums;
}

static double sum_of(const std::vector<double>& sums) {
    double total = 0;
    for (double each : sums) total += each;
    return total;
}

// The first index at which the cumulative sum of weight(index) exceeds `point`; never one with weight zero.
template <class Weight>
int64_t inverse_cdf(double point, int64_t count, Weight&& weight) {
    int64_t last = -1;
    double passed = 0;
    for (int64_t index = 0; index < count; index++) {
        if (!(weight(index) > 0)) continue;
        last = index;
        if ((passed += weight(index)) > point) break;
    }
    return last;
}

static int64_t draw_unfiltered(const Logits& logits, Weights weights, double point) {
    std::vector<double> sums = block_sums(logits, minus_infinity(), weights);
    point *= sum_of(sums);
    const int64_t block = inverse_cdf(point, sums.size(), [&](int64_t i) { return sums[i]; });
    for (int64_t i = 0; i < block; i++) point -= sums[i];
    const int64_t start = block * CDF_BLOCK, stop = std::min(logits.size, start + CDF_BLOCK);
    float block_weights[CDF_BLOCK + LANES];
    logits.for_each(start, stop, [&](floats v, int64_t index) { store(block_weights + index - start, weights.of(v)); });
    return start + inverse_cdf(point, stop - start, [&](int64_t i) { return block_weights[i]; });
}

static double weight_of(Candidates::const_iterator first, Candidates::const_iterator last) {
    double total = 0;
    for (; first != last; first++) total += first->weight;
    return total;
}

// The last candidate, in their order, before which the weights add up to less than `wanted`, by bisection.
static Candidate last_of_top_p(Candidates some, double wanted) {
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

// The candidates that min_p, top_k and top_p keep, by id.
static Candidates filter(const Logits& logits, Weights weights, const SamplingRow& params) {
    const bool has_top_k = params.top_k > 0 && params.top_k < logits.size, has_top_p = params.top_p < 1;
    const double temperature = 1 / double(weights.inverse);
    float least = minus_infinity();
    if (params.min_p > 0) least = float(weights.largest + temperature * std::log(params.min_p));
    double total = 0;
    float enough = least;
    if (has_top_k) {
        enough = std::max(least, logits.top_k_bound(int64_t(params.top_k)));
    } else if (has_top_p) {
        total = sum_of(block_sums(logits, least, weights));
        for (double depth = DEPTH_STEP; depth < MAX_DEPTH; depth += DEPTH_STEP) {
            const float reached = float(weights.largest - temperature * depth);
            if (reached <= least) break;
            if (sum_of(block_sums(logits, reached, weights)) < params.top_p * total) continue;
            enough = reached;
            break;
        }
    }
    Candidates kept = candidates_above(logits, enough, weights);
    auto keep_to = [&](const Candidate& last) { std::erase_if(kept, [&](const Candidate& c) { return last < c; }); };
    if (has_top_k && int64_t(kept.size()) > params.top_k) {
        Candidates some = kept;
        std::nth_element(some.begin(), some.begin() + int64_t(params.top_k) - 1, some.end());
        keep_to({some[int64_t(params.top_k) - 1].logit, 0, INT32_MAX});  // keeps all that tie with it
    }
    if (has_top_p) {
        const double weight = has_top_k ? weight_of(kept.begin(), kept.end()) : total;
        keep_to(last_of_top_p(kept, params.top_p * weight));
    }
    return kept;
}

// Returns -1 if the largest logit is not finite.
static int64_t sample_token(const Logits& logits, const SamplingRow& params) {
    const float largest = logits.largest();
    if (!std::isfinite(largest)) return -1;
    if (params.temperature == 0) return logits.index_of(largest);
    const Weights weights{largest, float(1 / params.temperature)};
    const bool filters = params.min_p > 0 || (params.top_k > 0 && params.top_k < logits.size) || params.top_p < 1;
    if (!filters) return draw_unfiltered(logits, weights, params.uniform);
    const Candidates kept = filter(logits, weights, params);
    const double point = params.uniform * weight_of(kept.begin(), kept.end());
    return kept[inverse_cdf(point, kept.size(), [&](int64_t i) { return kept[i].weight; })].id;
}

// Writes values [1 + num_top] and ids [1 + num_top]: of `token`, and of the most probable tokens.
static void log_probabilities_of(const Logits& logits, int64_t token, int64_t num_top, float* values, int64_t* ids) {
    const float largest = logits.largest();
    ids[0] = token;
    values[0] = logits.values[token];
    if (num_top) {
        Candidates top = candidates_above(logits, logits.top_k_bound(num_top), {largest, 1});
        std::partial_sort(top.begin(), top.begin() + std::min<int64_t>(num_top, top.size()), top.end());
        for (int64_t i = 0; i < num_top; i++) {
            bool found = i < int64_t(top.size());  // fewer, if some are NaN
            ids[1 + i] = found ? top[i].id : 0;
            values[1 + i] = found ? top[i].logit : largest;
        }
    }
    const float log_total = float(std::log(sum_of(block_sums(logits, minus_infinity(), {largest, 1}))));
    for (int64_t i = 0; i <= num_top; i++) values[i] = values[i] - largest - log_total;
}

void choose_tokens(
    const float* const* rows, int64_t num_rows, int64_t size, const SamplingRow* params, int64_t* tokens
) {
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; row++) tokens[row] = sample_token({rows[row], size}, params[row]);
}

void log_probabilities(
    const float* const* rows, int64_t num_rows, int64_t size, const int64_t* tokens, int64_t num_top, float* values,
    int64_t* ids
) {
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t index = row * (1 + num_top);
        log_probabilities_of({rows[row], size}, tokens[row], num_top, values + index, ids + index);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
