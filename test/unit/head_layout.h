// Heads in the rows of tensors, for the tests of operations on them.
#pragma once

#include <string>
#include <vector>

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

// Heads from element `first` of rows with `behind` elements after them.
struct Layout {
    std::int64_t rows, count, size, first, behind;

    std::int64_t row() const { return first + count * size + behind; }
    // The place of element i of head `head`, which is counted over all rows.
    std::int64_t place(std::int64_t head, std::int64_t i) const {
        return head / count * row() + first + head % count * size + i;
    }
    Heads of(const Tensor& tensor) const { return {tensor, first, count, size}; }
    Shape shape() const { return {rows, row()}; }
    // The heads of all rows, element by element.
    std::vector<double> heads(const OwnedTensor& tensor) const {
        std::vector<double> values;
        for (std::int64_t head = 0; head < rows * count; ++head) {
            for (std::int64_t i = 0; i < size; ++i) values.push_back(tensor.get(place(head, i)));
        }
        return values;
    }
};

// The heads are near the reference; all other elements are those of `before`.
inline void expect_heads(const Layout& layout, const OwnedTensor& result, const OwnedTensor& before,
                         const std::vector<double>& reference, const std::vector<double>& bound,
                         const std::string& what) {
    const std::vector<double> heads = layout.heads(result);
    OwnedTensor values(DType::fp64, {static_cast<std::int64_t>(heads.size())});
    for (std::size_t i = 0; i < heads.size(); ++i) values.set(static_cast<std::int64_t>(i), heads[i]);
    expect_close(
        values, reference, [&](std::size_t i) { return bound[i] + subnormal_rounding(result->dtype); }, what);
    for (std::int64_t i = 0; i < result->elements(); ++i) {
        const std::int64_t place = i % layout.row() - layout.first;
        if (place >= 0 && place < layout.count * layout.size) continue;
        ASSERT_EQ(result.get(i), before.get(i)) << what << " outside the heads, " << i;
    }
}

}  // namespace llmc::cpu_test
