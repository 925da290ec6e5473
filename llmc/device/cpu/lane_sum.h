// Sums in a fixed order: element i is added to lane i % 32, and the lanes in a tree of halves. One running
// vector would wait for each addition to finish before the next; this keeps four at work, and its rounding
// errors grow with n / 32.
#pragma once

#include <cstdint>

namespace llmc::cpu {

// sum of term(i) over i = 0 ... n-1
template <class Number, class Term>
Number lane_sum(std::int64_t n, const Term& term) {
    constexpr std::int64_t width = 32;
    Number lanes[width] = {};
    const std::int64_t whole = n / width * width;
    for (std::int64_t begin = 0; begin < whole; begin += width) {
#pragma omp simd
        for (std::int64_t j = 0; j < width; ++j) lanes[j] += term(begin + j);
    }
    Number rest[width] = {};
    for (std::int64_t i = whole; i < n; ++i) rest[i - whole] = term(i);
#pragma omp simd
    for (std::int64_t j = 0; j < width; ++j) lanes[j] += rest[j];
#pragma GCC unroll 5
    for (std::int64_t half = width / 2; half > 0; half /= 2) {
#pragma omp simd
        for (std::int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
}

}  // namespace llmc::cpu
