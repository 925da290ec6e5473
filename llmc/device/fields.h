// The fields of an operation (ops.h), seen one by one: its operands, each with a name, a dtype and how a call uses it,
// and its numbers. What holds for every operation is written once over them: checks, the bytes that a call moves, the
// operands of a test.
#pragma once

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
    bool is_optional = false;
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
template <class T>
constexpr OperandField<T> optional(OperandField<T> field) {
    field.is_optional = true;
    return field;
}
template <class T>
constexpr NumberField<T> number(std::string_view name, const T& value) {
    return {name, value};
}

inline const Tensor& tensor_of(const Tensor& operand) { return operand; }
inline const Tensor& tensor_of(const Heads& operand) { return operand.rows; }

}  // namespace llmc
