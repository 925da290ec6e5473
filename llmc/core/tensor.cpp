#include "llmc/core/tensor.h"

#include <fmt/format.h>

#include <numeric>

namespace llmc {

Shape::Shape(std::initializer_list<std::int64_t> sizes) : dimensions_(static_cast<int>(sizes.size())) {
    check(sizes.size() <= sizes_.size(), "a shape has at most five dimensions");
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
}

std::int64_t Shape::elements() const {
    return std::accumulate(sizes_.begin(), sizes_.begin() + dimensions_, std::int64_t{1}, saturated_product);
}

std::string to_string(const Shape& shape) {
    std::string text = "(";
    for (int i = 0; i < shape.dimensions(); ++i) text += fmt::format("{}{}", i ? ", " : "", shape[i]);
    return text + ")";
}

Tensor Tensor::view(const Shape& new_shape) const {
    check(new_shape.elements() == elements(), "a view keeps the number of elements");
    return {data, dtype, new_shape};
}

Tensor Tensor::slice(std::int64_t first, std::int64_t count) const {
    check(shape.dimensions() > 0 && first >= 0 && count >= 0 && first + count <= shape[0],
          "a slice lies inside its tensor");
    const std::int64_t stride = shape[0] == 0 ? 0 : elements() / shape[0];
    Tensor part = *this;
    part.data += static_cast<std::size_t>(first * stride) * size_of(dtype);
    part.shape.resize(0, count);
    return part;
}

Tensor Tensor::rows() const {
    check(shape.dimensions() > 0 && shape.last() > 0, "rows need a last dimension");
    return view({elements() / shape.last(), shape.last()});
}

Tensor Tensor::flat(std::int64_t first, std::int64_t count) const {
    return view({elements()}).slice(first, count);
}

}  // namespace llmc
