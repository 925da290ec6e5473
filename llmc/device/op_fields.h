// The fields of an operation (ops.h), seen one by one: its operands, each with a name, a dtype and how a call uses it,
// and its numbers. Rules for all operations are written once over fields: checks, the bytes that a call moves, the
// operands of a test. Here is also the work of a call.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"

namespace llmc {

// How a call uses an operand.
enum class Access : std::uint8_t {
    read,
    write,
    add,   // changes the present values
    shape  // uses only its shape
};

// The dtype that an operand must have: X, the compute dtype that all such operands of a call share; a certain one; or
// one of several, which sizes() of the operation checks.
struct FieldDType {
    constexpr FieldDType() = default;
    constexpr FieldDType(DType dtype) : fixed(dtype) {}

    bool is_x() const { return !fixed && !is_any; }

    std::optional<DType> fixed{};
    bool is_any = false;
};
inline constexpr FieldDType any_dtype = [] {
    FieldDType dtype;
    dtype.is_any = true;
    return dtype;
}();

// T: Tensor or Heads
template <class T>
struct OperandField {
    std::string_view name;
    const T& operand;
    Access access;
    FieldDType dtype{};
    bool is_optional = false, is_of_variant = false;
};

template <class T>
struct NumberField {
    std::string_view name;
    const T& value;
};

template <class T>
constexpr OperandField<T> reads(std::string_view name, const T& operand, FieldDType dtype = {}) {
    return {name, operand, Access::read, dtype};
}
template <class T>
constexpr OperandField<T> writes(std::string_view name, const T& operand, FieldDType dtype = {}) {
    return {name, operand, Access::write, dtype};
}
// Its present values count.
template <class T>
constexpr OperandField<T> changes(std::string_view name, const T& operand, FieldDType dtype = {}) {
    return {name, operand, Access::add, dtype};
}
// A call without it has the same other results.
template <class T>
constexpr OperandField<T> optional(OperandField<T> field) {
    field.is_optional = true;
    return field;
}
// A call without it is another variant of the operation, with other results.
template <class T>
constexpr OperandField<T> of_variant(OperandField<T> field) {
    field.is_optional = field.is_of_variant = true;
    return field;
}
template <class T>
constexpr NumberField<T> number(std::string_view name, const T& value) {
    return {name, value};
}

// A matrix product (rows, inner) x (inner, columns).
struct ProductSizes {
    double rows = 0, inner = 0, columns = 0;
    double flops() const { return 2 * rows * inner * columns; }
};
enum class Arithmetic : std::uint8_t { other, products, attention };

// The work of a call on any device: its floating-point operations, and the bytes that it must move. A tensor that is
// changed in place is moved twice, a table only in the rows that are looked up.
struct OpCost {
    double flops = 0, bytes = 0;
    Arithmetic arithmetic = Arithmetic::other;
    DType dtype = DType::fp32;               // of the arithmetic, at best; uint8: of products in 8 bits
    std::array<ProductSizes, 2> products{};  // those whose flops these are
};

struct RowSizes {
    std::int64_t rows, channels;
};

// Calls f with the field of each operand of an operation.
template <class O, class F>
void for_each_operand(const O& op, const F& f) {
    const auto visit = [&]<class Field>(const Field& field) {
        if constexpr (requires { field.operand; }) f(field);
    };
    op.fields([&](const auto&... field) { (visit(field), ...); });
}

inline const Tensor& tensor_of(const Tensor& operand) { return operand; }
inline const Tensor& tensor_of(const Heads& operand) { return operand.rows; }

}  // namespace llmc
