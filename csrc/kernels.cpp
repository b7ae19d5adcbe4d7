// Compiled once per instruction set. INSTRUCTION_SET names its namespace and its table.

#include "kernels.h"

#include <cmath>

#include "attention.h"
#include "cross_entropy.h"
#include "flash.h"
#include "linear.h"
#include "quantized.h"
#include "rows.h"
#include "rows_training.h"
#include "sampling.h"
// Last: it uses the kernels above.
#include "blocks.h"

namespace shardwise {
namespace INSTRUCTION_SET {

static void any_linear(
    const Bf16* x, int64_t x_step, int64_t num_rows, const Bf16* packed, int64_t num_columns, int64_t num_inner,
    void* y, bool wide
) {
    Linear w{(const uint32_t*)packed, num_columns, num_inner / 2};
    if (wide)
        linear(x, x_step, num_rows, w, (float*)y, num_columns);
    else
        linear(x, x_step, num_rows, w, (bf16*)y, num_columns);
}

static void any_look_up(
    const int64_t* ids, int64_t num_ids, const Bf16* packed, int64_t num_columns, int64_t num_inner, Bf16* y
) {
    look_up(ids, num_ids, {(const uint32_t*)packed, num_columns, num_inner / 2}, y);
}

static int64_t quantized_bytes(const QuantizedShape& shape) {
    QuantizedLinear w{nullptr, shape};
    return w.num_panels() * w.group_bytes() * w.num_groups();
}

static void any_pack_quantized(
    const uint8_t* codes, const uint8_t* scales, const uint8_t* offsets, const QuantizedShape& shape, uint8_t* packed
) {
    pack_quantized(codes, scales, offsets, {packed, shape});
}

static void any_quantized_linear(
    const Bf16* x, int64_t x_step, int64_t num_rows, const uint8_t* packed, const QuantizedShape& shape, void* y,
    bool wide
) {
    QuantizedLinear w{packed, shape};
    if (wide)
        quantized_linear(x, x_step, num_rows, w, (float*)y, shape.num_columns);
    else
        quantized_linear(x, x_step, num_rows, w, (bf16*)y, shape.num_columns);
}

static void any_look_up_quantized(
    const int64_t* ids, int64_t num_ids, const uint8_t* packed, const QuantizedShape& shape, Bf16* y
) {
    look_up_quantized(ids, num_ids, {packed, shape}, y);
}

}  // namespace INSTRUCTION_SET

#define JOINED(a, b) a##b
#define TABLE(name) JOINED(name, _kernels)

const Kernels TABLE(INSTRUCTION_SET) = {
    INSTRUCTION_SET::pack,
    INSTRUCTION_SET::any_linear,
    INSTRUCTION_SET::any_look_up,
    INSTRUCTION_SET::quantized_bytes,
    INSTRUCTION_SET::any_pack_quantized,
    INSTRUCTION_SET::any_quantized_linear,
    INSTRUCTION_SET::any_look_up_quantized,
    INSTRUCTION_SET::attend,
    INSTRUCTION_SET::rms_norm,
    INSTRUCTION_SET::gated_silu,
    INSTRUCTION_SET::run_blocks,
    INSTRUCTION_SET::choose_tokens,
    INSTRUCTION_SET::log_probabilities,

    INSTRUCTION_SET::causal_forward,
    INSTRUCTION_SET::causal_backward,
    INSTRUCTION_SET::norm_forward,
    INSTRUCTION_SET::norm_backward,
    INSTRUCTION_SET::gated_silu_backward,
    INSTRUCTION_SET::rotate,
    INSTRUCTION_SET::softmax_statistics,
    INSTRUCTION_SET::softmax_gradient,
};

}  // namespace shardwise
