// Checks, costs and requests for workspace that the operations' .cpp files share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/device/ops.h"

namespace llmc {

// ---- checks

inline void check_operand(std::string_view operation, const OperandField<Tensor>& field, DType dtype) {
    if (field.operand.dtype != dtype)
        programming_error(fmt::format("{}: {} is {}, not {}", operation, field.name,
                                      name_of(field.operand.dtype), name_of(dtype)));
}
inline void check_operand(std::string_view operation, const OperandField<Heads>& field, DType dtype) {
    check_operand(operation, OperandField<Tensor>{field.name, field.operand.rows, field.access}, dtype);
    const Heads& heads = field.operand;
    const Shape& shape = heads.rows.shape;
    if (shape.dimensions() == 0 || heads.first < 0 || heads.count < 1 || heads.size < 1 ||
        heads.count > shape.last() / heads.size || heads.first > shape.last() - heads.count * heads.size)
        programming_error(fmt::format("{}: {} has {} heads of {} from element {}, not inside the rows of {}",
                                      operation, field.name, heads.count, heads.size, heads.first,
                                      to_string(shape)));
}

// Checks that the operands of a call are there and have their dtypes.
template <class O>
void check_operands(const O& op) {
    std::optional<DType> x;
    for_each_operand(op, [&](const auto& field) {
        const Tensor& tensor = tensor_of(field.operand);
        if (!tensor) {
            if (!field.is_optional) programming_error(fmt::format("{}: {} is missing", O::name, field.name));
            return;
        }
        if (field.dtype.is_x() && !x) {
            x = tensor.dtype;
            if (!is_compute_dtype(*x))
                programming_error(
                    fmt::format("{}: {} is {}, not a compute dtype", O::name, field.name, name_of(*x)));
        }
        check_operand(O::name, field,
                      field.dtype.is_any  ? tensor.dtype
                      : field.dtype.fixed ? *field.dtype.fixed
                                          : *x);
    });
}

inline void check_shape(const Tensor& tensor, const Shape& shape, std::string_view name) {
    if (tensor && tensor.shape != shape)
        programming_error(fmt::format("{} is {}, not {}", name, to_string(tensor.shape), to_string(shape)));
}

// In any shape.
inline void check_elements(const Tensor& tensor, std::int64_t elements, std::string_view name) {
    if (tensor && tensor.elements() != elements)
        programming_error(fmt::format("{} has {} elements, not {}", name, tensor.elements(), elements));
}

// `columns` in the last dimension, and `rows` rows in all others.
inline void check_rows(const Tensor& tensor, std::int64_t rows, std::int64_t columns, std::string_view name) {
    if (tensor && (tensor.shape.dimensions() == 0 || tensor.shape.last() != columns ||
                   tensor.elements() != rows * columns))
        programming_error(
            fmt::format("{} is {}, not {} rows of {}", name, to_string(tensor.shape), rows, columns));
}

inline RowSizes rows_of(const Tensor& x, std::string_view name) {
    if (x.shape.dimensions() == 0 || x.shape.last() <= 0)
        programming_error(fmt::format("{} is {}, not rows of channels", name, to_string(x.shape)));
    return {x.elements() / x.shape.last(), x.shape.last()};
}

// As many heads, as large, in as many rows.
inline void check_heads(const Heads& heads, std::int64_t rows, std::int64_t count, std::int64_t size,
                        std::string_view name) {
    if (!heads.rows || (heads.count == count && heads.size == size && number_of_rows(heads) == rows)) return;
    programming_error(fmt::format("{} has {} rows of {} heads of {} elements, not {} of {} of {}", name,
                                  number_of_rows(heads), heads.count, heads.size, rows, count, size));
}

// The operands of an elementwise operation, of which `in` has so many elements.
template <class O>
std::int64_t same_elements(const O& op, const Tensor& in,
                           std::initializer_list<std::pair<const Tensor*, std::string_view>> others) {
    check_operands(op);
    for (const auto& [x, name] : others) check_elements(*x, in.elements(), name);
    return in.elements();
}

// ---- costs

inline double moved(const Tensor& x) { return x ? static_cast<double>(x.bytes()) : 0; }
inline double elements_of(const Tensor& x) { return x ? static_cast<double>(x.elements()) : 0; }
inline double elements_of(const Heads& x) {
    return x.rows ? static_cast<double>(number_of_rows(x) * x.count * x.size) : 0;
}
inline double moved(const Heads& x) { return elements_of(x) * static_cast<double>(size_of(x.rows.dtype)); }

// The bytes of all operands; those that are changed count twice.
template <class O>
double moved_by(const O& op) {
    double bytes = 0;
    for_each_operand(op, [&](const auto& field) {
        bytes += (field.access == Access::add ? 2 : 1) * moved(field.operand);
    });
    return bytes;
}

template <class O>
OpCost elementwise(const O& op, double flops) {
    return {.flops = flops, .bytes = moved_by(op)};
}

inline OpCost products(double bytes, DType dtype, const ProductSizes& one, const ProductSizes& other = {}) {
    return {.flops = one.flops() + other.flops(),
            .bytes = bytes,
            .arithmetic = Arithmetic::products,
            .dtype = dtype,
            .products = {one, other}};
}
inline ProductSizes forward_product(const MatmulSizes& s) {
    return {static_cast<double>(s.rows), static_cast<double>(s.in_channels),
            static_cast<double>(s.out_channels)};
}
inline ProductSizes input_product(const MatmulSizes& s) {
    return {static_cast<double>(s.rows), static_cast<double>(s.out_channels),
            static_cast<double>(s.in_channels)};
}
inline ProductSizes weight_product(const MatmulSizes& s) {
    return {static_cast<double>(s.out_channels), static_cast<double>(s.rows),
            static_cast<double>(s.in_channels)};
}

// The keys that rows [first, end) of a sequence see, all together: row t sees t + 1 keys, but at most `window`.
inline double pairs(std::int64_t first, std::int64_t end, std::int64_t window) {
    const std::int64_t full = std::clamp(window, first, end);
    const auto short_rows = static_cast<double>(full - first), long_rows = static_cast<double>(end - full);
    return short_rows * (static_cast<double>(first + full) + 1.0) / 2.0 +
           long_rows * static_cast<double>(window);
}

// So many products of causal attention, such as q k^T or p v.
template <class O>
OpCost attention(const O& op, int count, const AttentionShape& s) {
    return {.flops = count * 2.0 * elements_of(op.out) / static_cast<double>(s.sequence) *
                     pairs(0, s.sequence, s.window),
            .bytes = moved_by(op),
            .arithmetic = Arithmetic::attention,
            .dtype = op.out.dtype};
}

// ---- workspace

// For rows of so many channels: one sequence.
inline WorkspaceRequest request(DType dtype, const RowSizes& s, std::int64_t other_channels = 0) {
    return {.batch = 1,
            .sequence = s.rows,
            .channels = s.channels,
            .heads = 1,
            .largest_matmul_channels = std::max(s.channels, other_channels),
            .head_rows = s.rows,
            .dtype = dtype};
}
inline WorkspaceRequest request(DType dtype, const MatmulSizes& s) {
    return request(dtype, {s.rows, s.in_channels}, s.out_channels);
}
inline WorkspaceRequest request(DType dtype, const AttentionShape& s) {
    return {.batch = s.batch,
            .sequence = s.sequence,
            .channels = s.heads * s.head_size,
            .heads = s.heads,
            .largest_matmul_channels = (s.heads + 2 * s.key_heads) * s.head_size,
            .head_rows = s.batch * s.sequence,
            .dtype = dtype,
            .head_size = s.head_size,
            .key_heads = s.key_heads,
            .window = s.window};
}

}  // namespace llmc
