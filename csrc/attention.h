// Attention over a paged KV cache (Kwon et al. 2023) that reads pages in place, with an online softmax (FlashAttention,
// Dao et al. 2022): decode and prefill, any number of sequences, any lengths.
//
// The context of a token is divided at fixed positions: blocks of 128 positions, and splits of four blocks. Each split
// has its own softmax, computed block by block; splits are merged in order, weighted by their log-sum-exp. So threads
// share a long context, and attention is batch-invariant: a token has the same bits alone, in a chunk and in any batch.
// A masked position has a weight of exactly zero and adds nothing.

#pragma once

#include <omp.h>

#include <atomic>
#include <vector>

#include "pages.h"
#include "tile.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int BLOCK_TOKENS = 128, SPLIT_TOKENS = 512, MAX_TILE_ROWS = 48;
constexpr int BLOCK_PANELS_OF_KEYS = BLOCK_TOKENS / LANES;

// Some tokens of a span and some of the heads that share a kv head, times one split.
struct Task {
    const Span* span;
    int64_t token, num_tokens, first_head, num_heads, kv_head;
    int64_t split, num_splits;
    bool is_first, is_last;  // among the splits of its rows
    int64_t slot;   // its first row among the rows of all partial results
};

struct Scratch {
    alignas(64) bf16 q[MAX_TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[MAX_TILE_ROWS * BLOCK_TOKENS];
    alignas(64) bf16 weights[MAX_TILE_ROWS * BLOCK_TOKENS];
    alignas(64) float out[MAX_TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) uint32_t pairs[BLOCK_TOKENS * MAX_HEAD_DIM / 2];
    alignas(64) float key_scales[BLOCK_TOKENS];
    float row_max[MAX_TILE_ROWS], row_sum[MAX_TILE_ROWS];
};

// -- one tile, one block -------------------------------------------------------------------------------------

// Keys and values of a block as panels of LANES positions. Rows attend to the panels [first, last).
struct Block {
    const uint32_t *keys[BLOCK_PANELS_OF_KEYS], *values[BLOCK_PANELS_OF_KEYS];
    const float *key_scales[BLOCK_PANELS_OF_KEYS], *value_scales[BLOCK_PANELS_OF_KEYS];
    int first, last;
    int64_t start;  // the position of the block
};

template <class Format>
static Block block_of(const Pages& pages, const Task& task, int64_t start, int64_t lowest, int64_t highest) {
    Block block;
    block.start = start;
    block.first = lowest <= start ? 0 : int((lowest - start) / LANES);
    block.last = highest - start >= BLOCK_TOKENS ? BLOCK_PANELS_OF_KEYS : int((highest - start) / LANES) + 1;
    for (int i = 0; i < BLOCK_PANELS_OF_KEYS; i++) {
        int64_t at = 0;
        if (i >= block.first && i < block.last) {
            int64_t position = start + i * LANES, page = task.span->pages[position >> pages.page_shift];
            at = pages.at(task.kv_head, page) + (position & (pages.page_tokens - 1));
        }
        int64_t bytes = at * pages.head_dim * Format::NUMBER_BYTES;
        block.keys[i] = (const uint32_t*)((const char*)pages.keys + bytes);
        block.values[i] = (const uint32_t*)((const char*)pages.values + bytes);
        if constexpr (Format::HAS_CODES) {
            block.key_scales[i] = pages.key_scales + at;
            block.value_scales[i] = pages.value_scales + at;
        }
    }
    return block;
}

// Prefetches the same offsets of other panels.
template <int P>
struct PrefetchPanels {
    const uint32_t* panel[P];
    int64_t step;

    PrefetchPanels(const uint32_t* const* from, int64_t step) : step(step) {
        for (int p = 0; p < P; p++) panel[p] = from[p];
    }
    PrefetchPanels(const uint32_t* first, int64_t step) : step(step) {
        for (int p = 0; p < P; p++) panel[p] = first + p * LANES;
    }
    INLINE void operator()(int64_t k) const {
        for (int p = 0; p < P; p++) __builtin_prefetch(panel[p] + k * step, 0, 2);
    }
};

// Replaces the masked panels of a block by those of another, to be prefetched instead: a partly masked block takes too
// little time to prefetch a whole next block.
template <class Format>
static Block with_prefetch(Block block, const Block& other) {
    for (int i = 0; i < BLOCK_PANELS_OF_KEYS; i++) {
        if (i >= block.first && i < block.last) continue;
        block.keys[i] = other.keys[i], block.values[i] = other.values[i];
        if constexpr (Format::HAS_CODES)
            block.key_scales[i] = other.key_scales[i], block.value_scales[i] = other.value_scales[i];
    }
    return block;
}

// Unpacks the panels of a block, each of `num_rows` rows of quads, into pairs, and points `panels` to them. Prefetches
// the scales of the next block.
template <class Format>
static void unpack_panels(
    const Block& block, const uint32_t** panels, const float* const* next_scales, int64_t num_rows, int64_t width,
    uint32_t* pairs
) {
    for (int i = block.first; i < block.last; i++) {
        uint32_t* unpacked = pairs + i * 2 * num_rows * width;
        unpack<Format>(panels[i], num_rows, width, unpacked);
        __builtin_prefetch(next_scales[i], 0, 2);
        panels[i] = unpacked;
    }
}

// Computes the factor of the scores of each position.
template <class Format>
static void scale_keys(const Block& block, Scratch& s, float scale) {
    for (int i = block.first; i < block.last; i++) {
        floats scales = all(scale / Format::UNIT);
        if constexpr (Format::HAS_CODES) scales *= load(block.key_scales[i]);
        store(s.key_scales + i * LANES, scales);
    }
}

// Computes scores. For each row of pairs that is read, the panels of the next block are prefetched `ahead` words on.
static void compute_scores(
    const Block& block, const Block& next, Scratch& s, int64_t num_rows, int64_t size, int64_t ahead
) {
    for (int i = block.first; i < block.last; i += TILE_PANELS)
        for_each_tile(num_rows, [&]<int R>(int64_t row) {
            with_constant<TILE_PANELS>(block.last - i, [&]<int P>() {
                floats sums[R][P] = {};
                Panels<P> panels{{}, LANES};
                for (int p = 0; p < P; p++) panels.panel[p] = block.keys[i + p];
                const uint32_t* q = (const uint32_t*)(s.q + row * size);
                if (row == 0)
                    add_products(sums, q, size / 2, panels, size / 2, PrefetchPanels<P>(next.keys + i, ahead));
                else
                    add_products(sums, q, size / 2, panels, size / 2, NoPrefetch());
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++) {
                        float* to = s.scores + (row + r) * BLOCK_TOKENS + (i + p) * LANES;
                        store(to, sums[r][p] * load(s.key_scales + (i + p) * LANES));
                    }
            });
        });
}

// Turns the scores of the row at `position` into softmax weights, and rescales its previous result. For codes the
// weights include the scales of the values.
template <class Format>
static void softmax_row(const Block& block, Scratch& s, int64_t row, int64_t position, int64_t window, int64_t size) {
    float* scores = s.scores + row * BLOCK_TOKENS;
    bf16* weights = s.weights + row * BLOCK_TOKENS;
    const ints lanes = lane_numbers();
    floats most = all(minus_infinity());
    for (int i = block.first; i < block.last; i++) {
        floats v = load(scores + i * LANES);
        int64_t start = block.start + i * LANES, ahead = position - start, behind = ahead - window;
        if (ahead < LANES - 1) v = select(lanes <= int(ahead), v, all(minus_infinity()));
        if (window && behind >= 0) v = select(lanes > int(behind < LANES ? behind : LANES), v, all(minus_infinity()));
        store(scores + i * LANES, v);
        most = maximum(v, most);
    }
    float old = s.row_max[row], top = max_lane(most);
    if (old > top) top = old;
    float base = top == minus_infinity() ? 0 : top;
    floats total = {};
    for (int i = block.first; i < block.last; i++) {
        floats weight = exponential(load(scores + i * LANES) - base);
        total += weight;
        if constexpr (Format::HAS_CODES) {
            floats scaled = weight * (load(block.value_scales[i]) * (1 / Format::UNIT));
            weight = select(weight == 0, floats{}, scaled);
        }
        store_bf16(weights + i * LANES, weight);
    }
    float kept = exponential(all(old - base))[0];
    s.row_max[row] = top;
    s.row_sum[row] = s.row_sum[row] * kept + sum(total);
    if (kept != 1)
        for (int64_t c = 0; c < size; c += LANES) store(s.out + row * size + c, load(s.out + row * size + c) * kept);
}

// Adds the weighted values of a block to the result of each row. Pairs of positions from `num_pairs` on are masked.
static void add_values(
    const Block& block, const Block& next, Scratch& s, int64_t num_rows, int64_t size, int64_t num_pairs, int64_t ahead
) {
    constexpr int PAIRS = LANES / 2;
    for (int64_t c = 0; c < size; c += TILE_PANELS * LANES)
        for_each_tile(num_rows, [&]<int R>(int64_t row) {
            with_constant<TILE_PANELS>(int((size - c) / LANES), [&]<int P>() {
                floats sums[R][P];
                float* out = s.out + row * size + c;
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++) sums[r][p] = load(out + r * size + p * LANES);
                for (int i = block.first; i < block.last; i++) {
                    Panels<P> panels{{}, size};
                    for (int p = 0; p < P; p++) panels.panel[p] = block.values[i] + c + p * LANES;
                    const uint32_t* weights = (const uint32_t*)(s.weights + row * BLOCK_TOKENS) + i * PAIRS;
                    int64_t rest = num_pairs - i * PAIRS, pairs = rest < PAIRS ? rest : PAIRS;
                    if (row == 0)
                        add_products(
                            sums, weights, BLOCK_TOKENS / 2, panels, pairs, PrefetchPanels<P>(next.values[i] + c, ahead)
                        );
                    else
                        add_products(sums, weights, BLOCK_TOKENS / 2, panels, pairs, NoPrefetch());
                }
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++) store(out + r * size + p * LANES, sums[r][p]);
            });
        });
}

// -- tasks ---------------------------------------------------------------------------------------------------

static int64_t first_visible(int64_t position, int64_t window) {
    return window && position >= window ? position - window + 1 : 0;
}

// The tasks of a step's attention, which all layers with the same window share.
struct Tasks {
    std::vector<Task> tasks;
    int64_t num_slots;  // rows of partial results
    bool write;  // decode: each task writes the key and value of its one token itself, without a barrier
};

static Tasks tasks_of(const std::vector<Span>& spans, int64_t group, int64_t num_kv_heads, int64_t window) {
    Tasks result{{}, 0, group <= MAX_TILE_ROWS};
    int64_t heads = group < MAX_TILE_ROWS ? group : MAX_TILE_ROWS, tokens = MAX_TILE_ROWS / heads;
    for (const Span& span : spans) {
        result.write = result.write && span.count == 1;
        for (int64_t token = 0; token < span.count; token += tokens) {
            int64_t count = span.count - token < tokens ? span.count - token : tokens;
            int64_t first = first_visible(span.start + token, window) / SPLIT_TOKENS;
            int64_t last = (span.start + token + count - 1) / SPLIT_TOKENS;
            for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++)
                for (int64_t head = 0; head < group; head += heads) {
                    int64_t num_heads = group - head < heads ? group - head : heads;
                    for (int64_t split = first; split <= last; split++) {
                        result.tasks.push_back(
                            {&span, token, count, head, num_heads, kv_head, split, last - first + 1, split == first,
                             split == last, result.num_slots}
                        );
                        if (last > first) result.num_slots += count * num_heads;
                    }
                }
        }
    }
    return result;
}

// The positions [lowest, highest] that a task attends to, in blocks from `start` to `stop`.
struct VisibleRange {
    int64_t lowest, highest, start, stop;
};

static VisibleRange visible_range(const Task& task, int64_t window) {
    int64_t position = task.span->start + task.token, split = task.split * SPLIT_TOKENS;
    VisibleRange visible{first_visible(position, window), position + task.num_tokens - 1, split, split + SPLIT_TOKENS};
    if (visible.lowest > split) visible.start = visible.lowest / BLOCK_TOKENS * BLOCK_TOKENS;
    if (visible.highest < visible.stop) visible.stop = visible.highest + 1;
    return visible;
}

struct RowIndex {
    int64_t token, head;
};

static RowIndex row_index(const Task& task, int64_t row, int64_t group) {
    int64_t token = task.span->first + task.token + row / task.num_heads;
    return {token, task.kv_head * group + task.first_head + row % task.num_heads};
}

// Computes one split. A row of partial results is the C sums of the split, its largest score and the sum of its
// weights. `next` is the following task, whose keys are prefetched.
template <class Format>
static void attend_split(
    const Pages& pages, const Step& step, const Task& task, const Task& next, int64_t group, float scale, Scratch& s,
    float* partial
) {
    const int64_t size = pages.head_dim, num_rows = task.num_tokens * task.num_heads, window = step.window;
    for (int64_t row = 0; row < num_rows; row++) {
        RowIndex place = row_index(task, row, group);
        apply_rope(step, place.token, step.q + place.token * step.q_token + place.head * size, size, s.q + row * size);
        if constexpr (Format::UNIT != 1)
            for (int64_t c = row * size; c < (row + 1) * size; c += LANES)
                store_bf16(s.q + c, load_bf16(s.q + c) * (1 / Format::UNIT));
        s.row_max[row] = minus_infinity(), s.row_sum[row] = 0;
    }
    memset(s.out, 0, num_rows * size * sizeof(float));
    VisibleRange visible = visible_range(task, window), following_range = visible_range(next, window);
    Block after = block_of<Format>(pages, next, following_range.start, following_range.lowest, following_range.highest);
    Block block = block_of<Format>(pages, task, visible.start, visible.lowest, visible.highest);
    for (int64_t start = visible.start; start < visible.stop; start += BLOCK_TOKENS) {
        bool ends = start + BLOCK_TOKENS >= visible.stop;
        Block following = after;
        if (!ends)
            following = with_prefetch<Format>(
                block_of<Format>(pages, task, start + BLOCK_TOKENS, visible.lowest, visible.highest), after
            );
        if constexpr (Format::HAS_CODES)
            unpack_panels<Format>(block, block.keys, following.key_scales, size / 4, LANES, s.pairs);
        scale_keys<Format>(block, s, scale);
        compute_scores(block, following, s, num_rows, size, LANES * Format::NUMBER_BYTES / 2);
        for (int64_t row = 0; row < num_rows; row++)
            softmax_row<Format>(block, s, row, task.span->start + task.token + row / task.num_heads, window, size);
        if constexpr (Format::HAS_CODES)
            unpack_panels<Format>(block, block.values, following.value_scales, LANES / 4, size, s.pairs);
        int64_t num_pairs = (visible.highest - start) / 2 + 1;
        add_values(block, following, s, num_rows, size, num_pairs, size * Format::NUMBER_BYTES / 2);
        block = following;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float *out = s.out + row * size, total = s.row_sum[row] * Format::UNIT;
        if (task.num_splits > 1) {
            float* to = partial + (task.slot + row) * (size + 2);
            memcpy(to, out, size * sizeof(float));
            to[size] = s.row_max[row], to[size + 1] = total;
            continue;
        }
        RowIndex place = row_index(task, row, group);
        bf16* to = step.out + (place.token * step.num_heads + place.head) * size;
        for (int64_t c = 0; c < size; c += LANES) store_bf16(to + c, load(out + c) / total);
    }
}

// Merges the splits of some rows; `task` is the first of them.
static void merge_splits(const Pages& pages, const Step& step, const Task& task, int64_t group, const float* partial) {
    const int64_t size = pages.head_dim, num_rows = task.num_tokens * task.num_heads, stride = size + 2;
    for (int64_t row = 0; row < num_rows; row++) {
        const float* from = partial + (task.slot + row) * stride;
        float top = minus_infinity();
        for (int64_t i = 0; i < task.num_splits; i++) {
            float each = from[i * num_rows * stride + size];
            if (each > top) top = each;
        }
        floats out[MAX_HEAD_DIM / LANES] = {};
        float total = 0;
        for (int64_t i = 0; i < task.num_splits; i++) {
            const float* split = from + i * num_rows * stride;
            float weight = exponential(all(split[size] - top))[0];
            total += split[size + 1] * weight;
            for (int64_t c = 0; c < size / LANES; c++) out[c] += load(split + c * LANES) * weight;
        }
        RowIndex place = row_index(task, row, group);
        bf16* to = step.out + (place.token * step.num_heads + place.head) * size;
        for (int64_t c = 0; c < size / LANES; c++) store_bf16(to + c * LANES, out[c] / total);
    }
}

// Writes keys and values and attends: one thread's share, in a parallel region. Threads take tasks dynamically, one
// task ahead, to know what to prefetch; `taken` counts them. Ends without a barrier.
template <class Format>
void attend_share(
    const Pages& pages, const Step& step, const std::vector<Span>& spans, const Tasks& tasks, float scale,
    std::atomic<int64_t>& taken, float* partial
) {
    const int64_t group = step.num_heads / pages.num_kv_heads, count = int64_t(tasks.tasks.size());
    if (!tasks.write) {
#pragma omp for collapse(2) schedule(static)
        for (size_t i = 0; i < spans.size(); i++)
            for (int64_t head = 0; head < pages.num_kv_heads; head++) write_head<Format>(pages, step, spans[i], head);
    }
    Scratch scratch;
    for (int64_t current = taken++, next = 0; current < count; current = next) {
        next = taken++;
        const Task &task = tasks.tasks[current], &then = tasks.tasks[next < count ? next : current];
        if (tasks.write && task.is_last) write_head<Format>(pages, step, *task.span, task.kv_head);
        attend_split<Format>(pages, step, task, then, group, scale, scratch, partial);
    }
    if (!tasks.num_slots) return;
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i++)
        if (tasks.tasks[i].num_splits > 1 && tasks.tasks[i].is_first)
            merge_splits(pages, step, tasks.tasks[i], group, partial);
}

// Calls work<Format>() for the format of the pages.
template <class Work>
void with_format(int format, Work&& work) {
    if (format == INT8_PAGES)
        work.template operator()<Int8>();
    else if (format == FP8_PAGES)
        work.template operator()<Fp8>();
    else
        work.template operator()<Plain>();
}

static std::vector<Span> spans_of(const Attention& a) {
    std::vector<Span> spans(a.num_spans);
    int64_t first = 0;
    for (int64_t i = 0; i < a.num_spans; i++) {
        spans[i] = {a.spans[2 * i], a.spans[2 * i + 1], first, a.table + i * a.table_width};
        first += spans[i].count;
    }
    return spans;
}

static Pages pages_of(const Attention& a) {
    return {a.keys,      a.values,      a.key_scales, a.value_scales, a.num_kv_heads,
            a.num_pages, a.page_tokens, a.head_dim,   __builtin_ctzll(a.page_tokens)};
}

static Step step_of(const Attention& a) {
    return {a.q, a.k, a.v, a.q_token, a.k_token, a.v_token, a.num_heads, a.cos, a.sin, a.window, a.out};
}

static float scale_of(const Attention& a) { return 1 / std::sqrt(float(a.head_dim)); }

static void attend(const Attention& a) {
    const std::vector<Span> spans = spans_of(a);
    const Tasks tasks = tasks_of(spans, a.num_heads / a.num_kv_heads, a.num_kv_heads, a.window);
    std::vector<float> partial(tasks.num_slots * (a.head_dim + 2));
    std::atomic<int64_t> taken = 0;
    with_format(a.format, [&]<class Format>() {
#pragma omp parallel
        attend_share<Format>(pages_of(a), step_of(a), spans, tasks, scale_of(a), taken, partial.data());
    });
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
