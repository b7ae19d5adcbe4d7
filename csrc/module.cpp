// The Python module. Tensors are passed as addresses and sizes, so that one build serves every version of torch.
// src/shardwise/kernels/native/ checks their shapes and dtypes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;
using namespace shardwise;
using Address = uintptr_t;

namespace {

struct Choice {
    const char* name;
    const Kernels* kernels;
};

// The instruction sets of this processor, the fastest first.
std::vector<Choice> choices() {
    std::vector<Choice> found;
#ifdef SHARDWISE_X86
    __builtin_cpu_init();
    bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = wide && __builtin_cpu_supports("avx512vnni");
    if (vnni && __builtin_cpu_supports("avx512bf16")) found.push_back({"avx512_bf16", &avx512_bf16_kernels});
    if (vnni) found.push_back({"avx512_vnni", &avx512_vnni_kernels});
    if (wide) found.push_back({"avx512", &avx512_kernels});
    if (fma) found.push_back({"avx2", &avx2_kernels});
#endif
    found.push_back({"portable", &portable_kernels});
    return found;
}

// The blocks of a decoder, and memory for the buffers between their kernels.
struct Decoder {
    std::vector<DecoderBlock> blocks;
    std::vector<uint8_t> scratch;
};

const Kernels& of(Address table) { return *reinterpret_cast<const Kernels*>(table); }

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (Choice choice : choices()) names.push_back(choice.name);
        return names;
    });
    m.def("kernels", [](const std::string& name) -> Address {
        for (Choice choice : choices())
            if (name == choice.name) return Address(choice.kernels);
        throw std::runtime_error("this processor has no " + name);
    });
    m.def("pack", [](Address table, Address weight, int64_t num_columns, int64_t num_inner, Address packed) {
        of(table).pack(at<Bf16>(weight), num_columns, num_inner, at<Bf16>(packed));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("use_huge_pages", [](Address start, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
        Address page = sysconf(_SC_PAGESIZE), stop = start + num_bytes;
        Address first = (start + page - 1) / page * page, last = stop / page * page;
        if (first < last) madvise(at<void>(first), last - first, MADV_HUGEPAGE);  // only advice
#endif
    });
    m.def("linear", [](Address table, Address x, int64_t x_step, int64_t num_rows, Address packed, int64_t num_columns,
                       int64_t num_inner, Address y, bool wide) {
        of(table).linear(at<Bf16>(x), x_step, num_rows, at<Bf16>(packed), num_columns, num_inner, at<void>(y), wide);
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("look_up", [](Address table, Address ids, int64_t num_ids, Address packed, int64_t num_columns,
                        int64_t num_inner, Address y) {
        of(table).look_up(at<int64_t>(ids), num_ids, at<Bf16>(packed), num_columns, num_inner, at<Bf16>(y));
    }, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<QuantizedShape>(m, "QuantizedShape")
        .def("__init__", [](QuantizedShape* shape, int64_t num_columns, int64_t num_inner, int64_t group, int bits,
                            int middle, int scale_kind, int offset_kind) {
            new (shape) QuantizedShape{num_columns, num_inner, group, bits, middle, NumberKind(scale_kind),
                                       OffsetKind(offset_kind)};
        });
    m.def("quantized_bytes", [](Address table, const QuantizedShape& shape) {
        return of(table).quantized_bytes(shape);
    });
    m.def("pack_quantized", [](Address table, Address codes, Address scales, Address offsets,
                               const QuantizedShape& shape, Address packed) {
        of(table).pack_quantized(at<uint8_t>(codes), at<uint8_t>(scales), at<uint8_t>(offsets), shape,
                                 at<uint8_t>(packed));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("quantized_linear", [](Address table, Address x, int64_t x_step, int64_t num_rows, Address packed,
                                 const QuantizedShape& shape, Address y, bool wide) {
        of(table).quantized_linear(at<Bf16>(x), x_step, num_rows, at<uint8_t>(packed), shape, at<void>(y), wide);
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("look_up_quantized", [](Address table, Address ids, int64_t num_ids, Address packed,
                                  const QuantizedShape& shape, Address y) {
        of(table).look_up_quantized(at<int64_t>(ids), num_ids, at<uint8_t>(packed), shape, at<Bf16>(y));
    }, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__", [](Matrix* matrix, Address packed, Address bias, int64_t num_columns, int64_t num_inner) {
            new (matrix) Matrix{at<void>(packed), at<Bf16>(bias), num_columns, num_inner, false, {}};
        })
        .def("__init__", [](Matrix* matrix, Address packed, Address bias, const QuantizedShape& shape) {
            new (matrix) Matrix{at<void>(packed), at<Bf16>(bias), shape.num_columns, shape.num_inner, true, shape};
        });
    nb::class_<Decoder>(m, "Decoder")
        .def(nb::init<>())
        .def("add", [](Decoder& decoder, Address norm1, Address norm2, Address q_norm, Address k_norm,
                       const Matrix& qkv, const Matrix& out, const Matrix& gate_up, const Matrix& down, Address keys,
                       Address values, Address key_scales, Address value_scales, int64_t window) {
            decoder.blocks.push_back({at<Bf16>(norm1), at<Bf16>(norm2), at<Bf16>(q_norm), at<Bf16>(k_norm), qkv, out,
                                      gate_up, down, at<void>(keys), at<void>(values), at<float>(key_scales),
                                      at<float>(value_scales), window});
        })
        .def("run", [](Decoder& decoder, Address table, int format, int64_t num_kv_heads, int64_t num_pages,
                       int64_t page_tokens, int64_t head_dim, int64_t num_heads, Address cos, Address sin,
                       Address spans, int64_t num_spans, Address pages, int64_t table_width, int64_t num_tokens,
                       float eps, Address x) {
            Attention step{};
            step.format = format, step.num_kv_heads = num_kv_heads, step.num_pages = num_pages;
            step.page_tokens = page_tokens, step.head_dim = head_dim, step.num_heads = num_heads;
            step.cos = at<Bf16>(cos), step.sin = at<Bf16>(sin), step.spans = at<int32_t>(spans);
            step.num_spans = num_spans, step.table = at<int32_t>(pages), step.table_width = table_width;
            of(table).run_blocks(decoder.blocks, step, num_tokens, eps, at<Bf16>(x), decoder.scratch);
        }, nb::call_guard<nb::gil_scoped_release>());
    m.def("attend", [](Address table, int format, Address keys, Address values, Address key_scales,
                       Address value_scales, int64_t num_kv_heads, int64_t num_pages, int64_t page_tokens,
                       int64_t head_dim, Address q,
                       Address k, Address v, int64_t q_token, int64_t k_token, int64_t v_token, int64_t num_heads,
                       Address cos, Address sin, int64_t window, Address spans, int64_t num_spans, Address pages,
                       int64_t table_width, Address out) {
        of(table).attend({format, at<void>(keys), at<void>(values), at<float>(key_scales), at<float>(value_scales),
                          num_kv_heads, num_pages, page_tokens, head_dim, at<Bf16>(q), at<Bf16>(k), at<Bf16>(v),
                          q_token, k_token, v_token, num_heads, at<Bf16>(cos), at<Bf16>(sin), window,
                          at<int32_t>(spans), num_spans, at<int32_t>(pages), table_width, at<Bf16>(out)});
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("rms_norm", [](Address table, Address x, int64_t x_step, int64_t num_rows, int64_t size, Address weight,
                         float eps, Address y) {
        of(table).rms_norm(at<Bf16>(x), x_step, num_rows, size, at<Bf16>(weight), eps, at<Bf16>(y));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("gated_silu", [](Address table, Address x, int64_t num_rows, int64_t size, Address y) {
        of(table).gated_silu(at<Bf16>(x), num_rows, size, at<Bf16>(y));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("choose_tokens", [](Address table, Address rows, int64_t num_rows, int64_t size, Address params,
                              Address tokens) {
        of(table).choose_tokens(at<const float*>(rows), num_rows, size, at<SamplingRow>(params), at<int64_t>(tokens));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("log_probabilities", [](Address table, Address rows, int64_t num_rows, int64_t size, Address tokens,
                                  int64_t num_top, Address values, Address ids) {
        of(table).log_probabilities(at<const float*>(rows), num_rows, size, at<int64_t>(tokens), num_top,
                                    at<float>(values), at<int64_t>(ids));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("causal_forward", [](Address table, Address q, Address k, Address v, int64_t num_sequences,
                               int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                               int64_t window, Address documents, Address out) {
        of(table).causal_forward({at<Bf16>(q), at<Bf16>(k), at<Bf16>(v), num_sequences, num_tokens, num_heads,
                                  num_kv_heads, head_dim, window, at<int32_t>(documents)}, at<Bf16>(out));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("causal_backward", [](Address table, Address q, Address k, Address v, int64_t num_sequences,
                                int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                int64_t window, Address documents, Address out, Address d_out, Address dq, Address dk,
                                Address dv) {
        of(table).causal_backward({at<Bf16>(q), at<Bf16>(k), at<Bf16>(v), num_sequences, num_tokens, num_heads,
                                   num_kv_heads, head_dim, window, at<int32_t>(documents)},
                                  at<Bf16>(out), at<Bf16>(d_out), at<Bf16>(dq), at<Bf16>(dk), at<Bf16>(dv));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("norm_forward", [](Address table, Address from, int64_t step, int64_t num_tokens, int64_t rows_per_token,
                             int64_t size, Address weight, float eps, Address y, Address scales) {
        of(table).norm_forward(at<Bf16>(from), step, num_tokens, rows_per_token, size, at<Bf16>(weight), eps,
                               at<Bf16>(y), at<float>(scales));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("norm_backward", [](Address table, Address from, int64_t step, int64_t num_tokens, int64_t rows_per_token,
                              int64_t size, Address weight, Address scales, Address dy, Address dx, Address d_weight) {
        of(table).norm_backward(at<Bf16>(from), step, num_tokens, rows_per_token, size, at<Bf16>(weight),
                                at<float>(scales), at<Bf16>(dy), at<Bf16>(dx), at<Bf16>(d_weight));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("gated_silu_backward", [](Address table, Address x, Address dy, int64_t num_rows, int64_t size, Address dx) {
        of(table).gated_silu_backward(at<Bf16>(x), at<Bf16>(dy), num_rows, size, at<Bf16>(dx));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("rotate", [](Address table, Address from, int64_t step, int64_t num_tokens, int64_t num_heads, int64_t size,
                       Address cos, Address sin, int64_t num_angles, float direction, Address y) {
        of(table).rotate(at<Bf16>(from), step, num_tokens, num_heads, size, at<Bf16>(cos), at<Bf16>(sin), num_angles,
                         direction, at<Bf16>(y));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("softmax_statistics", [](Address table, Address logits, int64_t step, int64_t num_rows, int64_t size,
                                   Address row_maxima, Address sums) {
        of(table).softmax_statistics(at<Bf16>(logits), step, num_rows, size, at<float>(row_maxima), at<float>(sums));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("softmax_gradient", [](Address table, Address logits, int64_t step, int64_t num_rows, int64_t size,
                                 int64_t width, Address row_maxima, Address scales, Address targets,
                                 Address at_targets) {
        of(table).softmax_gradient(at<Bf16>(logits), step, num_rows, size, width, at<float>(row_maxima),
                                   at<float>(scales), at<int64_t>(targets), at<float>(at_targets));
    }, nb::call_guard<nb::gil_scoped_release>());
}
