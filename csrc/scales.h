// Scales and offsets of a quantized weight, in the formats of quant/format.py.

#pragma once

#include "integers.h"
#include "kernels.h"

namespace shardwise {
namespace INSTRUCTION_SET {

INLINE floats load_scales(const uint8_t* from, NumberKind kind) {
    switch (kind) {
        case NumberKind::bf16: return load_bf16((const bf16*)from);
        case NumberKind::fp16: return widen_half(load<uint8_t, shorts>(from));
        default: return load((const float*)from);
    }
}

// The offset that is multiplied by the sum of activations: a stored minimum, or a zero point times -scale.
INLINE floats load_offsets(const uint8_t* from, OffsetKind kind, NumberKind scale_kind, floats scales) {
    if (kind == OffsetKind::minimum) return load_scales(from, scale_kind);
    return -scales * __builtin_convertvector(load<uint8_t, bytes>(from), floats);
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
