// The blocks of a decoder, as model/transformer.py defines them: the same sums in the same order as its kernels one by
// one, but without Python calls between them, which take as long as the products of a single token, and by one team of
// threads with few barriers:
//
//     qkv       product of the normed x        each row is normed and quantized in one pass
//     attended  attention
//     x        += product of attended          added where the product is computed
//     inner     product of the normed x
//     x        += product of silu(gate) up     as above, with gated rows
//
// There is a barrier at the end of each line, and where rows are prepared for a product; except for a single row, which
// every thread prepares itself.

#pragma once

#include <vector>

#include "attention.h"
#include "quantized.h"
#include "rows.h"

namespace shardwise {
namespace INSTRUCTION_SET {

// -- inputs of products --------------------------------------------------------------------------------------

// Rows [M, K] in memory, or computed on demand: row(number, to) returns the address of a row.
struct StoredRows {
    static constexpr bool IS_COMPUTED = false;
    const bf16* x;
    int64_t size;
    INLINE const bf16* row(int64_t number, bf16*) const { return x + number * size; }
};

struct Normed {
    static constexpr bool IS_COMPUTED = true;
    const bf16* x;
    int64_t size;
    const bf16* weight;
    float eps;
    INLINE const bf16* row(int64_t number, bf16* to) const {
        norm_row(x + number * size, size, weight, eps, to);
        return to;
    }
};

struct Gated {
    static constexpr bool IS_COMPUTED = true;
    const bf16* x;
    int64_t size;
    INLINE const bf16* row(int64_t number, bf16* to) const {
        gated_row(x + number * 2 * size, size, to);
        return to;
    }
};

// Buffers between the kernels of a step. `computed` and `stretches` hold all rows, or one row per thread.
struct StepMemory {
    bf16 *qkv, *attended, *inner, *product, *computed;
    Stretch* stretches;
    std::vector<float> partial;
};

// Allocates allocator of memory, one after the other. With a null start it measures their size.
struct Allocator {
    uint8_t* start;
    int64_t bytes = 0;

    template <class T>
    T* take(int64_t count) {
        T* piece = (T*)(start + bytes);
        bytes += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }
};

static StepMemory memory_of(
    const std::vector<DecoderBlock>& blocks, int64_t num_tokens, std::vector<uint8_t>& scratch
) {
    const int64_t threads = omp_get_max_threads(), row_buffers = num_tokens > threads ? num_tokens : threads;
    int64_t widest = 0;
    for (const Matrix* w : {&blocks[0].qkv, &blocks[0].out, &blocks[0].gate_up, &blocks[0].down})
        if (w->num_inner > widest) widest = w->num_inner;
    const int64_t num_rows = num_tokens == 1 ? threads : Rows::count(num_tokens, 1);
    auto take_all = [&](Allocator allocator, StepMemory& memory) {
        memory.qkv = allocator.take<bf16>(num_tokens * blocks[0].qkv.num_columns);
        memory.attended = allocator.take<bf16>(num_tokens * blocks[0].out.num_inner);
        memory.inner = allocator.take<bf16>(num_tokens * blocks[0].gate_up.num_columns);
        memory.product = allocator.take<bf16>(num_tokens * blocks[0].out.num_columns);
        memory.computed = allocator.take<bf16>(row_buffers * widest);
        memory.stretches = allocator.take<Stretch>(num_rows * stretches_of(widest));
        return allocator.bytes;
    };
    StepMemory memory;
    const size_t needed = size_t(take_all({nullptr}, memory)) + 64;
    if (scratch.size() < needed) scratch.resize(needed);
    take_all({scratch.data() + (64 - uintptr_t(scratch.data()) % 64) % 64}, memory);
    return memory;
}

// -- the steps of a block, each run by all threads of a parallel region --------------------------------------------

// y = rows w^T, or y += rows w^T where Out is Residual. Ends without a barrier.
template <class Out, class Source>
static void multiply(const Matrix& w, const Source& source, int64_t num_rows, StepMemory& memory, Out* y) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), size = w.num_inner;
    const bool single = num_rows == 1;
    const int64_t first = single ? 0 : part_start(num_rows, threads, thread);
    const int64_t stop = single ? 1 : part_start(num_rows, threads, thread + 1);
    if (w.is_quantized) {
        const QuantizedLinear packed{(const uint8_t*)w.packed, w.quantized};
        Rows rows{memory.stretches, num_rows, packed.num_stretches()};
        if (single) rows.stretches += thread * rows.num_stretches;
        bf16* computed = memory.computed + thread * size;
        for (int64_t row = first; row < stop; row++)
            quantize_row(source.row(row, computed), size, w.quantized.middle, rows, row);
        if (!single) {
#pragma omp barrier
        }
        quantized_share(rows, packed, y, w.num_columns);
        return;
    }
    const bf16* x = source.x;
    if constexpr (Source::IS_COMPUTED) {
        bf16* computed = memory.computed + (single ? thread * size : 0);
        for (int64_t row = first; row < stop; row++) source.row(row, computed + row * size);
        if (!single) {
#pragma omp barrier
        }
        x = computed;
    }
    linear_share(x, size, num_rows, Linear{(const uint32_t*)w.packed, w.num_columns, size / 2}, y, w.num_columns);
}

// to += from, rounded.
INLINE void add_row(bf16* to, const bf16* from, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_bf16(to + i, load_bf16(to + i) + load_bf16(from + i));
    for (; i < size; i++) to[i] = narrow(widen(to[i]) + widen(from[i]));
}

// y = rows w^T, rounded, plus the bias, rounded again (model/layers.py). Ends with a barrier.
template <class Source>
static void project(const Matrix& w, const Source& source, int64_t num_rows, StepMemory& memory, bf16* y) {
    multiply(w, source, num_rows, memory, y);
#pragma omp barrier
    if (!w.bias) return;
#pragma omp for
    for (int64_t row = 0; row < num_rows; row++) add_row(y + row * w.num_columns, w.bias, w.num_columns);
}

// x += the result of `project`.
template <class Source>
static void add_projected(const Matrix& w, const Source& source, int64_t num_rows, StepMemory& memory, bf16* x) {
    if (!w.bias) {
        multiply(w, source, num_rows, memory, (Residual*)x);
#pragma omp barrier
        return;
    }
    project(w, source, num_rows, memory, memory.product);
#pragma omp for
    for (int64_t row = 0; row < num_rows; row++)
        add_row(x + row * w.num_columns, memory.product + row * w.num_columns, w.num_columns);
}

// Norms the heads of q or k, of tokens that are `step` numbers apart, in place.
static void norm_heads(
    bf16* x, int64_t step, int64_t num_tokens, int64_t num_heads, int64_t size, const bf16* weight, float eps
) {
#pragma omp for collapse(2)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            bf16* row = x + token * step + head * size;
            norm_row(row, size, weight, eps, row);
        }
}

// The attention of one block: its queries, keys and values, and its pages.
static Attention of_block(Attention a, const DecoderBlock& block, const StepMemory& memory) {
    a.keys = block.keys, a.values = block.values;
    a.key_scales = block.key_scales, a.value_scales = block.value_scales;
    a.q = memory.qkv, a.k = a.q + a.num_heads * a.head_dim, a.v = a.k + a.num_kv_heads * a.head_dim;
    a.q_token = a.k_token = a.v_token = block.qkv.num_columns;
    a.window = block.window, a.out = memory.attended;
    return a;
}

// The tasks of the layers with one window.
struct WindowTasks {
    int64_t window;
    Tasks tasks;
};

static std::vector<WindowTasks> tasks_by_window(
    const std::vector<DecoderBlock>& blocks, const Attention& a, const std::vector<Span>& spans
) {
    std::vector<WindowTasks> found;
    for (const DecoderBlock& block : blocks) {
        bool known = false;
        for (const WindowTasks& each : found) known = known || each.window == block.window;
        if (!known)
            found.push_back(
                {block.window, tasks_of(spans, a.num_heads / a.num_kv_heads, a.num_kv_heads, block.window)}
            );
    }
    return found;
}

// Runs x [N, D] through all blocks, in place. `step` has the fields that all layers share; `scratch` grows as needed.
static void run_blocks(
    const std::vector<DecoderBlock>& blocks, const Attention& step, int64_t num_tokens, float eps, bf16* x,
    std::vector<uint8_t>& scratch
) {
    const std::vector<Span> spans = spans_of(step);
    const std::vector<WindowTasks> by_window = tasks_by_window(blocks, step, spans);
    StepMemory memory = memory_of(blocks, num_tokens, scratch);
    for (const WindowTasks& each : by_window)
        memory.partial.resize(std::max<size_t>(memory.partial.size(), each.tasks.num_slots * (step.head_dim + 2)));
    std::vector<std::atomic<int64_t>> taken(blocks.size());
    const int64_t width = blocks[0].qkv.num_inner, size = step.head_dim;
#pragma omp parallel
    for (size_t layer = 0; layer < blocks.size(); layer++) {
        const DecoderBlock& block = blocks[layer];
        project(block.qkv, Normed{x, width, block.norm1, eps}, num_tokens, memory, memory.qkv);
        if (block.q_norm) {
            norm_heads(memory.qkv, block.qkv.num_columns, num_tokens, step.num_heads, size, block.q_norm, eps);
            bf16* keys = memory.qkv + step.num_heads * size;
            norm_heads(keys, block.qkv.num_columns, num_tokens, step.num_kv_heads, size, block.k_norm, eps);
        }
        const Attention a = of_block(step, block, memory);
        const Tasks* tasks = &by_window[0].tasks;
        for (const WindowTasks& each : by_window)
            if (each.window == block.window) tasks = &each.tasks;
        with_format(a.format, [&]<class Format>() {
            attend_share<Format>(
                pages_of(a), step_of(a), spans, *tasks, scale_of(a), taken[layer], memory.partial.data()
            );
        });
#pragma omp barrier
        add_projected(block.out, StoredRows{memory.attended, block.out.num_inner}, num_tokens, memory, x);
        project(block.gate_up, Normed{x, width, block.norm2, eps}, num_tokens, memory, memory.inner);
        add_projected(block.down, Gated{memory.inner, block.down.num_inner}, num_tokens, memory, x);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
