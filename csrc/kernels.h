// The table of functions that is compiled for each instruction set. Python names the one to use.

#pragma once

#include <cstdint>
#include <vector>

namespace shardwise {

typedef uint16_t Bf16;

enum PageFormat { BF16_PAGES, INT8_PAGES, FP8_PAGES };

// One layer's pages and the new tokens of a step: see attention.h. spans [S, 2]: start and count of each sequence,
// whose tokens are in order; table [S, table_width]: its pages.
struct Attention {
    int format;
    void *keys, *values;
    float *key_scales, *value_scales;
    int64_t num_kv_heads, num_pages, page_tokens, head_dim;
    const Bf16 *q, *k, *v;
    int64_t q_token, k_token, v_token, num_heads;
    const Bf16 *cos, *sin;
    int64_t window;
    const int32_t* spans;
    int64_t num_spans;
    const int32_t* table;
    int64_t table_width;
    Bf16* out;
};

enum class NumberKind : int { bf16, fp16, fp32 };
enum class OffsetKind : int { none, zero_point, minimum };

// A weight [N, K] of integers: see quantized.h. group: columns that share a scale, a multiple of 32, or 0 for all.
// middle: subtracted from each code; offsets are zero points of 8 bits, or minima in the format of the scales.
struct QuantizedShape {
    int64_t num_columns, num_inner, group;
    int bits, middle;
    NumberKind scale_kind;
    OffsetKind offset_kind;

    int64_t scale_bytes() const { return scale_kind == NumberKind::fp32 ? 4 : 2; }
    int64_t offset_bytes() const {
        return offset_kind == OffsetKind::none ? 0 : offset_kind == OffsetKind::zero_point ? 1 : scale_bytes();
    }
};

// A packed weight [N, K] and a bias [N] or null; and a block of a decoder: its weights (the norms of q and k may be
// null), its pages, its window.
struct Matrix {
    const void* packed;
    const Bf16* bias;
    int64_t num_columns, num_inner;
    bool is_quantized;
    QuantizedShape quantized;
};

struct DecoderBlock {
    const Bf16 *norm1, *norm2, *q_norm, *k_norm;
    Matrix qkv, out, gate_up, down;
    void *keys, *values;
    float *key_scales, *value_scales;
    int64_t window;
};

// Causal attention within B sequences of T tokens, for training: see flash.h. q [B, T, H, C], k and v [B, T, K, C];
// window 0: none; documents [B, T rounded up to 16], or null.
struct Causal {
    const Bf16 *q, *k, *v;
    int64_t num_sequences, num_tokens, num_heads, num_kv_heads, head_dim, window;
    const int32_t* documents;
};

// Sampling parameters of a row, as in kernels/serving_interface.py; temperature 0: the largest logit.
struct SamplingRow {
    double temperature, min_p, top_k, top_p, uniform;
};

struct Kernels {
    void (*pack)(const Bf16* weight, int64_t num_columns, int64_t num_inner, Bf16* packed);
    void (*linear)(
        const Bf16* x, int64_t x_step, int64_t num_rows, const Bf16* packed, int64_t num_columns, int64_t num_inner,
        void* y, bool wide
    );
    void (*look_up)(
        const int64_t* ids, int64_t num_ids, const Bf16* packed, int64_t num_columns, int64_t num_inner, Bf16* y
    );
    int64_t (*quantized_bytes)(const QuantizedShape& shape);
    void (*pack_quantized)(
        const uint8_t* codes, const uint8_t* scales, const uint8_t* offsets, const QuantizedShape& shape,
        uint8_t* packed
    );
    void (*quantized_linear)(
        const Bf16* x, int64_t x_step, int64_t num_rows, const uint8_t* packed, const QuantizedShape& shape, void* y,
        bool wide
    );
    void (*look_up_quantized)(
        const int64_t* ids, int64_t num_ids, const uint8_t* packed, const QuantizedShape& shape, Bf16* y
    );
    void (*attend)(const Attention& attention);
    void (*rms_norm)(
        const Bf16* x, int64_t x_step, int64_t num_rows, int64_t size, const Bf16* weight, float eps, Bf16* y
    );
    void (*gated_silu)(const Bf16* x, int64_t num_rows, int64_t size, Bf16* y);
    void (*run_blocks)(
        const std::vector<DecoderBlock>& blocks, const Attention& step, int64_t num_tokens, float eps, Bf16* x,
        std::vector<uint8_t>& scratch
    );
    // sampling.h
    void (*choose_tokens)(
        const float* const* rows, int64_t num_rows, int64_t size, const SamplingRow* params, int64_t* tokens
    );
    void (*log_probabilities)(
        const float* const* rows, int64_t num_rows, int64_t size, const int64_t* tokens, int64_t num_top,
        float* values, int64_t* ids
    );

    // For training: flash.h, rows_training.h, cross_entropy.h.
    void (*causal_forward)(const Causal& a, Bf16* out);
    void (*causal_backward)(const Causal& a, const Bf16* out, const Bf16* d_out, Bf16* dq, Bf16* dk, Bf16* dv);
    void (*norm_forward)(
        const Bf16* from, int64_t step, int64_t num_tokens, int64_t rows_per_token, int64_t size, const Bf16* weight,
        float eps, Bf16* y, float* scales
    );
    void (*norm_backward)(
        const Bf16* from, int64_t step, int64_t num_tokens, int64_t rows_per_token, int64_t size, const Bf16* weight,
        const float* scales, const Bf16* dy, Bf16* dx, Bf16* d_weight
    );
    void (*gated_silu_backward)(const Bf16* x, const Bf16* dy, int64_t num_rows, int64_t size, Bf16* dx);
    void (*rotate)(
        const Bf16* from, int64_t step, int64_t num_tokens, int64_t num_heads, int64_t size, const Bf16* cos,
        const Bf16* sin, int64_t num_angles, float direction, Bf16* y
    );
    void (*softmax_statistics)(
        const Bf16* logits, int64_t step, int64_t num_rows, int64_t size, float* row_maxima, float* sums
    );
    void (*softmax_gradient)(
        Bf16* logits, int64_t step, int64_t num_rows, int64_t size, int64_t width, const float* row_maxima,
        const float* scales, const int64_t* targets, const float* at_targets
    );
};

extern const Kernels portable_kernels;
#ifdef SHARDWISE_X86
extern const Kernels avx2_kernels, avx512_kernels, avx512_vnni_kernels, avx512_bf16_kernels;
#endif

}  // namespace shardwise
