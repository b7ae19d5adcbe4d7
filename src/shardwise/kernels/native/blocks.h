// The blocks of a decoder, one after the other, as model/transformer.py defines them: the same kernels in the same
// order, without Python between them, whose calls take as long as the products of a single token.

#pragma once

#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

static void any_linear(
    const Bf16* x, int64_t x_step, int64_t num_rows, const Bf16* packed, int64_t num_columns, int64_t num_inner,
    void* y, bool wide
);
static void any_quantized_linear(
    const Bf16* x, int64_t x_step, int64_t num_rows, const uint8_t* packed, const QuantizedShape& shape, void* y,
    bool wide
);
static void any_attend(const Attention& a);

static void multiply(const Matrix& w, const bf16* x, int64_t num_rows, bf16* y) {
    if (w.is_quantized)
        any_quantized_linear(x, w.num_inner, num_rows, (const uint8_t*)w.packed, w.quantized, y, false);
    else
        any_linear(x, w.num_inner, num_rows, (const bf16*)w.packed, w.num_columns, w.num_inner, y, false);
}

// x += y
static void add(bf16* x, const bf16* y, int64_t size) {
#pragma omp parallel for if (size > PARALLEL_NUMBERS)
    for (int64_t i = 0; i < size / LANES; i++)
        store_bf16(x + i * LANES, load_bf16(x + i * LANES) + load_bf16(y + i * LANES));
    for (int64_t i = size / LANES * LANES; i < size; i++) x[i] = narrow(widen(x[i]) + widen(y[i]));
}

// x [N, D], in place. Of `step` what belongs to no layer is given; `scratch` grows to what a step needs.
static void run_blocks(
    const std::vector<DecoderBlock>& blocks, Attention step, int64_t num_tokens, float eps, bf16* x, std::vector<bf16>& scratch
) {
    for (const DecoderBlock& block : blocks) {
        const int64_t width = block.qkv.num_inner, fused = block.qkv.num_columns, seen_width = block.out.num_inner;
        const int64_t inner_width = block.gate_up.num_columns, size = step.head_dim;
        const size_t needed = num_tokens * (2 * width + fused + seen_width + inner_width + inner_width / 2);
        if (scratch.size() < needed) scratch.resize(needed);
        bf16* normed = scratch.data();
        bf16* y = normed + num_tokens * width;
        bf16* qkv = y + num_tokens * width;
        bf16* seen = qkv + num_tokens * fused;
        bf16* inner = seen + num_tokens * seen_width;
        bf16* gated = inner + num_tokens * inner_width;

        rms_norm(x, width, num_tokens, width, block.norm1, eps, normed);
        multiply(block.qkv, normed, num_tokens, qkv);
        step.keys = block.keys, step.values = block.values;
        step.key_scales = block.key_scales, step.value_scales = block.value_scales;
        step.q = qkv, step.k = qkv + step.num_heads * size, step.v = step.k + step.num_kv_heads * size;
        step.q_token = step.k_token = step.v_token = fused;
        step.window = block.window, step.out = seen;
        any_attend(step);
        multiply(block.out, seen, num_tokens, y);
        add(x, y, num_tokens * width);

        rms_norm(x, width, num_tokens, width, block.norm2, eps, normed);
        multiply(block.gate_up, normed, num_tokens, inner);
        gated_silu(inner, num_tokens, inner_width / 2, gated);
        multiply(block.down, gated, num_tokens, y);
        add(x, y, num_tokens * width);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
