// What every instruction set offers: a table of functions, of which one is chosen when the module is loaded.

#pragma once

#include <cstdint>

namespace shardwise {

typedef uint16_t Bf16;

enum KindOfPages { BF16_PAGES, INT8_PAGES, FP8_PAGES };

// One layer's pages and what a step brings to them: see attention.h. spans [S, 2]: start and count of each sequence,
// whose tokens follow each other; table [S, table_width]: its pages.
struct Attention {
    int kind;
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

struct Kernels {
    void (*pack)(const Bf16* weight, int64_t num_columns, int64_t num_inner, Bf16* packed);
    void (*linear)(
        const Bf16* x, int64_t x_step, int64_t num_rows, const Bf16* packed, int64_t num_columns, int64_t num_inner,
        void* y, bool wide
    );
    void (*attend)(const Attention& attention);
    void (*rms_norm)(
        const Bf16* x, int64_t x_step, int64_t num_rows, int64_t size, const Bf16* weight, float eps, Bf16* y
    );
    void (*gated_silu)(const Bf16* x, int64_t num_rows, int64_t size, Bf16* y);
};

extern const Kernels portable_kernels;
#ifdef SHARDWISE_X86
extern const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels;
#endif

}  // namespace shardwise
