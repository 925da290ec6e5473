// A tensor is a view: the address, type and shape of elements. It owns no memory; memory comes from arenas
// (core/memory_layout.h). Row-major, contiguous.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>

#include "llmc/core/dtype.h"
#include "llmc/core/error.h"

namespace llmc {

// Products and sums of sizes, limited to the largest 64-bit number. Absurd sizes can thus be planned and then
// refused.
inline std::int64_t saturated_product(std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}
inline std::int64_t saturated_sum(std::int64_t a, std::int64_t b) {
    std::int64_t sum = 0;
    return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<std::int64_t>::max() : sum;
}

// Up to five dimensions; the longest shape in use is (B,T,3,NH,HS).
class Shape {
  public:
    Shape() = default;
    Shape(std::initializer_list<std::int64_t> sizes);

    int dimensions() const { return dimensions_; }
    std::int64_t operator[](int i) const { return sizes_[static_cast<std::size_t>(i)]; }
    std::int64_t last() const { return (*this)[dimensions_ - 1]; }
    std::int64_t elements() const;  // 1 for a scalar (no dimensions); saturated
    void resize(int dimension, std::int64_t size) { sizes_[static_cast<std::size_t>(dimension)] = size; }
    bool operator==(const Shape&) const = default;
    // The dimensions of `first`, then those of `then`.
    friend Shape operator+(Shape first, const Shape& then) {
        for (int i = 0; i < then.dimensions_; ++i)
            first.sizes_.at(static_cast<std::size_t>(first.dimensions_++)) = then[i];
        return first;
    }

  private:
    std::array<std::int64_t, 5> sizes_{};
    int dimensions_ = 0;
};

std::string to_string(const Shape& shape);  // "(2, 3, 4)"

struct Tensor {
    std::byte* data = nullptr;
    DType dtype = DType::fp32;
    Shape shape;

    explicit operator bool() const { return data != nullptr; }  // false for an absent optional operand
    std::int64_t elements() const { return shape.elements(); }
    std::size_t bytes() const { return static_cast<std::size_t>(elements()) * size_of(dtype); }

    // The elements as C++ values; T must match the tensor's dtype.
    template <class T>
    T* as() const {
        check(dtype_of<T>() == dtype, "a tensor is read as its own type");
        return reinterpret_cast<T*>(data);
    }
    template <class T>
    std::span<T> span() const {
        return {as<T>(), static_cast<std::size_t>(elements())};
    }

    // The same elements under another shape.
    Tensor view(const Shape& new_shape) const;
    // `count` entries of the first dimension, from `first`.
    Tensor slice(std::int64_t first, std::int64_t count) const;
    // Flattens all dimensions but the last: (rows, last).
    Tensor rows() const;
    // `count` elements of the flattened tensor, from `first`.
    Tensor flat(std::int64_t first, std::int64_t count) const;
};

}  // namespace llmc
