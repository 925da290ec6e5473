// The operands of operations: checks of their dtypes and shapes against ops.h, one line each at the start
// of an operation, and the sizes of each operation, for all devices. A wrong operand is a
// ProgrammingError.
#pragma once

#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"
#include "llmc/device/ops.h"

namespace llmc {

inline void check_dtype(const Tensor& tensor, DType dtype, std::string_view name,
                        SourceLocation where = SourceLocation::current()) {
    if (!tensor) programming_error(fmt::format("{} is missing", name), where);
    if (tensor.dtype != dtype) {
        programming_error(fmt::format("{} is {}, not {}", name, name_of(tensor.dtype), name_of(dtype)),
                          where);
    }
}

// Checks that the tensor is present and has this dtype and shape.
inline void check_tensor(const Tensor& tensor, DType dtype, const Shape& shape, std::string_view name,
                         SourceLocation where = SourceLocation::current()) {
    check_dtype(tensor, dtype, name, where);
    if (tensor.shape != shape) {
        programming_error(fmt::format("{} is {}, not {}", name, to_string(tensor.shape), to_string(shape)),
                          where);
    }
}

// Checks that the tensor is present and has this dtype and number of elements, in any shape.
inline void check_elements(const Tensor& tensor, DType dtype, std::int64_t elements, std::string_view name,
                           SourceLocation where = SourceLocation::current()) {
    check_dtype(tensor, dtype, name, where);
    if (tensor.elements() != elements) {
        programming_error(fmt::format("{} has {} elements, not {}", name, tensor.elements(), elements),
                          where);
    }
}

// Checks that the tensor is present and has this dtype, `columns` in the last dimension, and `rows` rows
// in all others.
inline void check_rows(const Tensor& tensor, DType dtype, std::int64_t rows, std::int64_t columns,
                       std::string_view name, SourceLocation where = SourceLocation::current()) {
    check_dtype(tensor, dtype, name, where);
    if (tensor.shape.dimensions() == 0 || tensor.shape.last() != columns ||
        tensor.elements() != rows * columns) {
        programming_error(
            fmt::format("{} is {}, not {} rows of {}", name, to_string(tensor.shape), rows, columns), where);
    }
}

struct EncoderSizes {
    std::int64_t batch, sequence, channels, rows_of_wte;
};
EncoderSizes encoder_forward_sizes(const Tensor& out, const Tensor& tokens, const Tensor& wte,
                                   const Tensor& wpe);
EncoderSizes encoder_backward_sizes(const Tensor& dwte, const Tensor& dwpe, const Tensor& dout,
                                    const Tensor& tokens);

struct RowSizes {
    std::int64_t rows, channels;
};
RowSizes layernorm_forward_sizes(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& in,
                                 const Tensor& gamma, const Tensor& beta);
RowSizes layernorm_backward_sizes(const Tensor& din, const Tensor& dgamma, const Tensor& dbeta,
                                  const Tensor& dout, const Tensor& in, const Tensor& gamma,
                                  const Tensor& mean, const Tensor& rstd);
RowSizes fused_residual_layernorm_sizes(const Tensor& residual, const Tensor& out, const Tensor& mean,
                                        const Tensor& rstd, const Tensor& in1, const Tensor& in2,
                                        const Tensor& gamma, const Tensor& beta);

// RMS norm; the weight may be absent.
RowSizes rmsnorm_forward_sizes(const Tensor& out, const Tensor& rstd, const Tensor& in, const Tensor& weight);
RowSizes rmsnorm_backward_sizes(const Tensor& din, const Tensor& dweight, const Tensor& dout,
                                const Tensor& in, const Tensor& weight, const Tensor& rstd);
RowSizes fused_residual_rmsnorm_sizes(const Tensor& residual, const Tensor& out, const Tensor& rstd,
                                      const Tensor& in1, const Tensor& in2, const Tensor& weight);

struct MatmulSizes {
    std::int64_t rows, in_channels, out_channels;
};
MatmulSizes matmul_forward_sizes(const Tensor& out, const Tensor& in, const Tensor& weight,
                                 const Tensor& bias, const Tensor& pre_gelu);
MatmulSizes matmul_backward_sizes(const Tensor& din, const Tensor& dweight, const Tensor& dbias,
                                  const Tensor& dout, const Tensor& in, const Tensor& weight,
                                  const Tensor& pre_gelu);

// The rows, and the F elements of a row of out.
RowSizes swiglu_forward_sizes(const Tensor& out, const Tensor& in);
RowSizes swiglu_backward_sizes(const Tensor& din, const Tensor& dout, const Tensor& in);

// The sizes of attention. `window` is the number of keys that a row sees at most, at least 1.
struct HeadSizes {
    std::int64_t batch, sequence, heads, head_size;
    std::int64_t key_heads = heads;
    std::int64_t window = sequence;  // hides nothing
    auto operator<=>(const HeadSizes&) const = default;
};
HeadSizes attention_forward_sizes(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                                  const Heads& v, std::int64_t window);
HeadSizes attention_backward_sizes(const Heads& dq, const Heads& dk, const Heads& dv, const Tensor& dout,
                                   const Heads& q, const Heads& k, const Heads& v, const Tensor& out,
                                   const Tensor& lse, std::int64_t window);

// `rows` is the number of new rows, `capacity` the most rows that the cache holds.
struct CachedHeadSizes {
    std::int64_t rows, capacity, heads, head_size;
    std::int64_t key_heads = heads;
    std::int64_t window = capacity;
};
CachedHeadSizes attention_cached_forward_sizes(const Tensor& out, const Tensor& cache, const Heads& q,
                                               const Heads& k, const Heads& v, std::int64_t position,
                                               std::int64_t window);

// The rows and the columns of the logits.
RowSizes classifier_sizes(const Tensor& logits, const Tensor& losses, const Tensor& targets,
                          std::int64_t vocabulary);
// The numbers in a row's statistics: maximum, sum, logit.
inline constexpr std::int64_t classifier_statistics_numbers = 3;
RowSizes classifier_statistics_sizes(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                                     std::int64_t columns, std::int64_t first_column);
struct ClassifierSizes {
    std::int64_t rows, channels, ranks;
};
ClassifierSizes classifier_from_statistics_sizes(const Tensor& logits, const Tensor& losses,
                                                 const Tensor& all_statistics, const Tensor& targets,
                                                 std::int64_t columns, std::int64_t first_column);

void check_terms(const ClassifierTerms& terms);
// Checks the operands of soft_cap.
void check_soft_cap(const Tensor& out, const Tensor& in, float cap);

// The operands of AdamW. They are a struct because six tensors in a row are easy to confuse.
struct AdamWOperands {
    const Tensor &parameters, &master, &m, &v, &gradients, &norm_squared;
};
// Checks the operands of accumulate.
void check_accumulate(const Tensor& out, const Tensor& in, const StochasticRounding& rounding);

void check_adamw(const AdamWOperands& operands, std::span<const AdamWSegment> segments, const AdamWStep& step,
                 const std::optional<StochasticRounding>& rounding,
                 const std::optional<StochasticRounding>& rounding_of_moments,
                 const EightBitMoments& in_8_bits);

}  // namespace llmc
