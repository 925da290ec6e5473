// Heads between other elements of rows, for dev/head_norm_forward.cu and dev/head_norm_backward.cu.
#pragma once

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/device/cuda/heads.cuh"

namespace lab {

// Rows of heads, with `before` elements before them and `behind` elements behind.
template <class X>
struct HeadRows {
    HeadRows(std::int64_t rows, std::int64_t heads_of_row, std::int64_t size_of_head,
             std::int64_t first_element, std::int64_t behind)
        : count(heads_of_row),
          size(size_of_head),
          first(first_element),
          row(first_element + heads_of_row * size_of_head + behind),
          elements(rows * row) {}

    llmc::cuda::HeadPlaces<X> places() { return {elements.data() + first, row}; }
    llmc::cuda::HeadPlaces<const X> const_places() const { return {elements.data() + first, row}; }
    // The place of element i of a head, which is counted over all rows.
    std::int64_t place(std::int64_t head, std::int64_t i) const {
        return head / count * row + first + head % count * size + i;
    }
    double at(std::int64_t head, std::int64_t i) const { return to_float(elements[place(head, i)]); }
    bool is_in_a_head(std::int64_t element) const {
        return element % row >= first && element % row < first + count * size;
    }

    std::int64_t count, size, first, row;
    Array<X> elements;
};

// Elements outside the heads are those of `before`.
template <class X>
void compare_outside(Comparison& comparison, const char* what, const HeadRows<X>& heads,
                     const HeadRows<X>& before) {
    for (std::int64_t i = 0; i < heads.elements.size(); ++i) {
        if (heads.is_in_a_head(i)) continue;
        comparison.see_equal(what, i, to_float(heads.elements[i]), to_float(before.elements[i]));
    }
}

}  // namespace lab
