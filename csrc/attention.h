// Attention over keys and values that lie in pages, read where they lie (Kwon et al. 2023), with the softmax made on
// the way (FlashAttention, Dao et al. 2022): decode and prefill, any number of sequences, any lengths.
//
// What a token sees is cut at fixed places of its sequence: blocks of 128 positions, of which four are a split. Each
// split has a softmax of its own, made block by block; splits are added up in order, weighted by their log-sum-exp. So
// threads can share out a long context, and yet a token has the same bits alone, in a chunk and in any company. What
// a row does not see has a weight of exactly zero and adds exactly nothing.

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
    bool is_first, is_last;  // of its rows' splits
    int64_t slot;   // of its first row among the rows of all partial results
};

struct Scratch {
    alignas(64) bf16 q[MAX_TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[MAX_TILE_ROWS * BLOCK_TOKENS];
    alignas(64) bf16 seen[MAX_TILE_ROWS * BLOCK_TOKENS];
    alignas(64) float out[MAX_TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) uint32_t pairs[BLOCK_TOKENS * MAX_HEAD_DIM / 2];
    alignas(64) float key_scales[BLOCK_TOKENS];
    float highest[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
};

// -- one tile, one block -------------------------------------------------------------------------------------

// Keys and values of a block as panels, of LANES positions each. Those that some row sees are [first, last).
struct Block {
    const uint32_t *keys[BLOCK_PANELS_OF_KEYS], *values[BLOCK_PANELS_OF_KEYS];
    const float *key_scales[BLOCK_PANELS_OF_KEYS], *value_scales[BLOCK_PANELS_OF_KEYS];
    int first, last;
    int64_t start;  // the position of the block
};

template <class Kind>
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
        int64_t bytes = at * pages.head_dim * Kind::NUMBER_BYTES;
        block.keys[i] = (const uint32_t*)((const char*)pages.keys + bytes);
        block.values[i] = (const uint32_t*)((const char*)pages.values + bytes);
        if constexpr (Kind::HAS_CODES) {
            block.key_scales[i] = pages.key_scales + at;
            block.value_scales[i] = pages.value_scales + at;
        }
    }
    return block;
}

// Fetches the same places of other panels.
template <int P>
struct Ahead {
    const uint32_t* panel[P];
    int64_t step;

    Ahead(const uint32_t* const* from, int64_t step) : step(step) {
        for (int p = 0; p < P; p++) panel[p] = from[p];
    }
    Ahead(const uint32_t* first, int64_t step) : step(step) {
        for (int p = 0; p < P; p++) panel[p] = first + p * LANES;
    }
    INLINE void operator()(int64_t k) const {
        for (int p = 0; p < P; p++) __builtin_prefetch(panel[p] + k * step, 0, 2);
    }
};

// A block with panels of another in the places that nobody sees, to be fetched instead: after a block that is partly
// seen there is too little to read for all of what comes next to be fetched meanwhile.
template <class Kind>
static Block filled(Block block, const Block& other) {
    for (int i = 0; i < BLOCK_PANELS_OF_KEYS; i++) {
        if (i >= block.first && i < block.last) continue;
        block.keys[i] = other.keys[i], block.values[i] = other.values[i];
        if constexpr (Kind::HAS_CODES)
            block.key_scales[i] = other.key_scales[i], block.value_scales[i] = other.value_scales[i];
    }
    return block;
}

// Makes pairs of the panels of a block, each of `num_rows` rows of quads, and has `panels` point to them. Scales of the
// next block are fetched.
template <class Kind>
static void unpack_panels(
    const Block& block, const uint32_t** panels, const float* const* next_scales, int64_t num_rows, int64_t width,
    uint32_t* pairs
) {
    for (int i = block.first; i < block.last; i++) {
        uint32_t* unpacked = pairs + i * 2 * num_rows * width;
        unpack<Kind>(panels[i], num_rows, width, unpacked);
        __builtin_prefetch(next_scales[i], 0, 2);
        panels[i] = unpacked;
    }
}

// What the scores of each position are multiplied with.
template <class Kind>
static void scale_keys(const Block& block, Scratch& s, float scale) {
    for (int i = block.first; i < block.last; i++) {
        floats scales = all(scale / Kind::UNIT);
        if constexpr (Kind::HAS_CODES) scales *= load(block.key_scales[i]);
        store(s.key_scales + i * LANES, scales);
    }
}

// With each row of pairs that is read of this block, the panels of the next one are fetched `ahead` words further.
static void make_scores(
    const Block& block, const Block& next, Scratch& s, int64_t num_rows, int64_t size, int64_t ahead
) {
    for (int i = block.first; i < block.last; i += TILE_PANELS)
        over_tiles(num_rows, [&]<int R>(int64_t row) {
            with_constant<TILE_PANELS>(block.last - i, [&]<int P>() {
                floats sums[R][P] = {};
                Panels<P> panels{{}, LANES};
                for (int p = 0; p < P; p++) panels.panel[p] = block.keys[i + p];
                const uint32_t* q = (const uint32_t*)(s.q + row * size);
                if (row == 0)
                    add_products(sums, q, size / 2, panels, size / 2, Ahead<P>(next.keys + i, ahead));
                else
                    add_products(sums, q, size / 2, panels, size / 2, Nothing());
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++) {
                        float* to = s.scores + (row + r) * BLOCK_TOKENS + (i + p) * LANES;
                        store(to, sums[r][p] * load(s.key_scales + (i + p) * LANES));
                    }
            });
        });
}

// Turns the scores of a row that is at `position` into weights, and makes room for them in what it has so far. Weights
// of codes have the scales of their values in them.
template <class Kind>
static void softmax_row(const Block& block, Scratch& s, int64_t row, int64_t position, int64_t window, int64_t size) {
    float* scores = s.scores + row * BLOCK_TOKENS;
    bf16* seen = s.seen + row * BLOCK_TOKENS;
    const ints lanes = lane_numbers();
    floats most = all(lowest());
    for (int i = block.first; i < block.last; i++) {
        floats v = load(scores + i * LANES);
        int64_t start = block.start + i * LANES, ahead = position - start, behind = ahead - window;
        if (ahead < LANES - 1) v = choose(lanes <= int(ahead), v, all(lowest()));
        if (window && behind >= 0) v = choose(lanes > int(behind < LANES ? behind : LANES), v, all(lowest()));
        store(scores + i * LANES, v);
        most = larger(v, most);
    }
    float old = s.highest[row], top = highest(most);
    if (old > top) top = old;
    float base = top == lowest() ? 0 : top;
    floats total = {};
    for (int i = block.first; i < block.last; i++) {
        floats weight = exponential(load(scores + i * LANES) - base);
        total += weight;
        if constexpr (Kind::HAS_CODES) {
            floats scaled = weight * (load(block.value_scales[i]) * (1 / Kind::UNIT));
            weight = choose(weight == 0, floats{}, scaled);
        }
        store_bf16(seen + i * LANES, weight);
    }
    float kept = exponential(all(old - base))[0];
    s.highest[row] = top;
    s.total[row] = s.total[row] * kept + sum(total);
    if (kept != 1)
        for (int64_t c = 0; c < size; c += LANES) store(s.out + row * size + c, load(s.out + row * size + c) * kept);
}

// Adds the weighted values of a block to what each row has. Pairs of positions after `num_pairs` nobody sees.
static void add_values(
    const Block& block, const Block& next, Scratch& s, int64_t num_rows, int64_t size, int64_t num_pairs, int64_t ahead
) {
    constexpr int PAIRS = LANES / 2;
    for (int64_t c = 0; c < size; c += TILE_PANELS * LANES)
        over_tiles(num_rows, [&]<int R>(int64_t row) {
            with_constant<TILE_PANELS>(int((size - c) / LANES), [&]<int P>() {
                floats sums[R][P];
                float* out = s.out + row * size + c;
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++) sums[r][p] = load(out + r * size + p * LANES);
                for (int i = block.first; i < block.last; i++) {
                    Panels<P> panels{{}, size};
                    for (int p = 0; p < P; p++) panels.panel[p] = block.values[i] + c + p * LANES;
                    const uint32_t* seen = (const uint32_t*)(s.seen + row * BLOCK_TOKENS) + i * PAIRS;
                    int64_t rest = num_pairs - i * PAIRS, pairs = rest < PAIRS ? rest : PAIRS;
                    if (row == 0)
                        add_products(sums, seen, BLOCK_TOKENS / 2, panels, pairs, Ahead<P>(next.values[i] + c, ahead));
                    else
                        add_products(sums, seen, BLOCK_TOKENS / 2, panels, pairs, Nothing());
                }
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++) store(out + r * size + p * LANES, sums[r][p]);
            });
        });
}

// -- tasks ---------------------------------------------------------------------------------------------------

static int64_t lowest_seen(int64_t position, int64_t window) {
    return window && position >= window ? position - window + 1 : 0;
}

// What the attention of a step consists of, the same in all layers of one window.
struct Tasks {
    std::vector<Task> tasks;
    int64_t num_slots;  // rows of partial results
    bool write;  // each sequence has one token, whose key and value the task writes that sees it, so nobody need wait
};

static Tasks tasks_of(const std::vector<Span>& spans, int64_t group, int64_t num_kv_heads, int64_t window) {
    Tasks made{{}, 0, group <= MAX_TILE_ROWS};
    int64_t heads = group < MAX_TILE_ROWS ? group : MAX_TILE_ROWS, tokens = MAX_TILE_ROWS / heads;
    for (const Span& span : spans) {
        made.write = made.write && span.count == 1;
        for (int64_t token = 0; token < span.count; token += tokens) {
            int64_t count = span.count - token < tokens ? span.count - token : tokens;
            int64_t first = lowest_seen(span.start + token, window) / SPLIT_TOKENS;
            int64_t last = (span.start + token + count - 1) / SPLIT_TOKENS;
            for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++)
                for (int64_t head = 0; head < group; head += heads) {
                    int64_t num_heads = group - head < heads ? group - head : heads;
                    for (int64_t split = first; split <= last; split++) {
                        made.tasks.push_back(
                            {&span, token, count, head, num_heads, kv_head, split, last - first + 1, split == first,
                             split == last, made.num_slots}
                        );
                        if (last > first) made.num_slots += count * num_heads;
                    }
                }
        }
    }
    return made;
}

// Which blocks a task sees: it sees positions [lowest, highest], and begins with the block at `start`.
struct Seen {
    int64_t lowest, highest, start, stop;
};

static Seen seen_by(const Task& task, int64_t window) {
    int64_t position = task.span->start + task.token, split = task.split * SPLIT_TOKENS;
    Seen seen{lowest_seen(position, window), position + task.num_tokens - 1, split, split + SPLIT_TOKENS};
    if (seen.lowest > split) seen.start = seen.lowest / BLOCK_TOKENS * BLOCK_TOKENS;
    if (seen.highest < seen.stop) seen.stop = seen.highest + 1;
    return seen;
}

struct Place {
    int64_t token, head;
};

static Place place_of(const Task& task, int64_t row, int64_t group) {
    int64_t token = task.span->first + task.token + row / task.num_heads;
    return {token, task.kv_head * group + task.first_head + row % task.num_heads};
}

// A row of partial results is the C sums of a split, their highest score and the total of their weights. `next` is
// the task that comes after this one, whose keys are fetched meanwhile.
template <class Kind>
static void attend_split(
    const Pages& pages, const Step& step, const Task& task, const Task& next, int64_t group, float scale, Scratch& s,
    float* partial
) {
    const int64_t size = pages.head_dim, num_rows = task.num_tokens * task.num_heads, window = step.window;
    for (int64_t row = 0; row < num_rows; row++) {
        Place place = place_of(task, row, group);
        turn(step, place.token, step.q + place.token * step.q_token + place.head * size, size, s.q + row * size);
        if constexpr (Kind::UNIT != 1)
            for (int64_t c = row * size; c < (row + 1) * size; c += LANES)
                store_bf16(s.q + c, load_bf16(s.q + c) * (1 / Kind::UNIT));
        s.highest[row] = lowest(), s.total[row] = 0;
    }
    memset(s.out, 0, num_rows * size * sizeof(float));
    Seen seen = seen_by(task, window), then = seen_by(next, window);
    Block after = block_of<Kind>(pages, next, then.start, then.lowest, then.highest);
    Block block = block_of<Kind>(pages, task, seen.start, seen.lowest, seen.highest);
    for (int64_t start = seen.start; start < seen.stop; start += BLOCK_TOKENS) {
        bool ends = start + BLOCK_TOKENS >= seen.stop;
        Block following = after;
        if (!ends)
            following = filled<Kind>(
                block_of<Kind>(pages, task, start + BLOCK_TOKENS, seen.lowest, seen.highest), after
            );
        if constexpr (Kind::HAS_CODES)
            unpack_panels<Kind>(block, block.keys, following.key_scales, size / 4, LANES, s.pairs);
        scale_keys<Kind>(block, s, scale);
        make_scores(block, following, s, num_rows, size, LANES * Kind::NUMBER_BYTES / 2);
        for (int64_t row = 0; row < num_rows; row++)
            softmax_row<Kind>(block, s, row, task.span->start + task.token + row / task.num_heads, window, size);
        if constexpr (Kind::HAS_CODES)
            unpack_panels<Kind>(block, block.values, following.value_scales, LANES / 4, size, s.pairs);
        int64_t num_pairs = (seen.highest - start) / 2 + 1;
        add_values(block, following, s, num_rows, size, num_pairs, size * Kind::NUMBER_BYTES / 2);
        block = following;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float *out = s.out + row * size, total = s.total[row] * Kind::UNIT;
        if (task.num_splits > 1) {
            float* to = partial + (task.slot + row) * (size + 2);
            memcpy(to, out, size * sizeof(float));
            to[size] = s.highest[row], to[size + 1] = total;
            continue;
        }
        Place place = place_of(task, row, group);
        bf16* to = step.out + (place.token * step.num_heads + place.head) * size;
        for (int64_t c = 0; c < size; c += LANES) store_bf16(to + c, load(out + c) / total);
    }
}

// `task` is the first split of its rows.
static void add_splits(const Pages& pages, const Step& step, const Task& task, int64_t group, const float* partial) {
    const int64_t size = pages.head_dim, num_rows = task.num_tokens * task.num_heads, stride = size + 2;
    for (int64_t row = 0; row < num_rows; row++) {
        const float* from = partial + (task.slot + row) * stride;
        float top = lowest();
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
        Place place = place_of(task, row, group);
        bf16* to = step.out + (place.token * step.num_heads + place.head) * size;
        for (int64_t c = 0; c < size / LANES; c++) store_bf16(to + c * LANES, out[c] / total);
    }
}

// Writes keys and values and attends: what falls to one thread of a parallel region. Threads take tasks as they come,
// each one ahead, to know what it will read; `taken` is how many have been. Ends without waiting for the others.
template <class Kind>
void attend_share(
    const Pages& pages, const Step& step, const std::vector<Span>& spans, const Tasks& tasks, float scale,
    std::atomic<int64_t>& taken, float* partial
) {
    const int64_t group = step.num_heads / pages.num_kv_heads, count = int64_t(tasks.tasks.size());
    if (!tasks.write) {
#pragma omp for collapse(2) schedule(static)
        for (size_t i = 0; i < spans.size(); i++)
            for (int64_t head = 0; head < pages.num_kv_heads; head++) write_head<Kind>(pages, step, spans[i], head);
    }
    Scratch scratch;
    for (int64_t mine = taken++, next = 0; mine < count; mine = next) {
        next = taken++;
        const Task &task = tasks.tasks[mine], &then = tasks.tasks[next < count ? next : mine];
        if (tasks.write && task.is_last) write_head<Kind>(pages, step, *task.span, task.kv_head);
        attend_split<Kind>(pages, step, task, then, group, scale, scratch, partial);
    }
    if (!tasks.num_slots) return;
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i++)
        if (tasks.tasks[i].num_splits > 1 && tasks.tasks[i].is_first)
            add_splits(pages, step, tasks.tasks[i], group, partial);
}

// Calls work<Kind>() for what pages hold.
template <class Work>
void with_kind(int kind, Work&& work) {
    if (kind == INT8_PAGES)
        work.template operator()<Int8>();
    else if (kind == FP8_PAGES)
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
    with_kind(a.kind, [&]<class Kind>() {
#pragma omp parallel
        attend_share<Kind>(pages_of(a), step_of(a), spans, tasks, scale_of(a), taken, partial.data());
    });
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
