// Token and position embeddings, and rotary positions.
#include <algorithm>
#include <cmath>
#include <optional>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// The rows of the table that this rank holds.
struct TableRows {
    std::int64_t first, count;

    // The row of a token, or -1 if this rank does not hold it.
    std::int64_t of(std::int32_t token) const {
        const std::int64_t row = token - first;
        return row >= 0 && row < count ? row : -1;
    }
};

// to += from
template <class X>
void add_row(float* to, const X* from, std::int64_t channels) {
#pragma omp simd
    for (std::int64_t c = 0; c < channels; ++c) to[c] += to_float(from[c]);
}

TableRows table_rows(const Tensor& tokens, std::int64_t count, std::optional<std::int64_t> first_row) {
    const TableRows rows{first_row.value_or(0), count};
    const auto ids = tokens.span<std::int32_t>();
    check(std::all_of(ids.begin(), ids.end(),
                      [&](auto id) { return id >= 0 && (first_row || rows.of(id) >= 0); }),
          "a token has a row in wte");
    return rows;
}

// Rotates the pairs (i, i + half) of a head by angles (half, 2) of (cos, sin); `sign` is that of the
// rotation. Each multiply-add is an explicit fma, so that all compilations round alike.
template <class X>
void rotate_head(X* x, const float* angles, float sign, std::int64_t half) {
#pragma omp simd
    for (std::int64_t i = 0; i < half; ++i) {
        const float cos = angles[2 * i], sin = sign * angles[2 * i + 1];
        const float low = to_float(x[i]), high = to_float(x[i + half]);
        x[i] = from_float<X>(std::fma(low, cos, -(high * sin)));
        x[i + half] = from_float<X>(std::fma(high, cos, low * sin));
    }
}

}  // namespace

void CpuOps::compute(const EncoderForward& op, const EncoderSizes& s) {
    const TableRows table = table_rows(op.tokens, s.rows_of_wte, op.first_row);
    with_dtype(op.out.dtype, [&, T = s.sequence, C = s.channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, op.tokens.elements(),
                     [=, y = op.out.as<X>(), ids = op.tokens.as<std::int32_t>(), w = op.wte.as<X>(),
                      p = op.wpe ? op.wpe.as<X>() : nullptr](std::int64_t row) {
                         const std::int64_t row_of_wte = table.of(ids[row]);
                         const X* token = row_of_wte >= 0 ? w + row_of_wte * C : nullptr;
                         const X* position = p ? p + row % T * C : nullptr;
                         X* to = y + row * C;
                         if (!token && !position) {
                             std::fill_n(to, C, X{});
                             return;
                         }
                         if (!token || !position) {
                             std::copy_n(token ? token : position, C, to);
                             return;
                         }
#pragma omp simd
                         for (std::int64_t c = 0; c < C; ++c) {
                             to[c] = from_float<X>(to_float(token[c]) + to_float(position[c]));
                         }
                     });
    });
}

void CpuOps::compute(const EncoderBackward& op, const EncoderSizes& s) {
    const TableRows table = table_rows(op.tokens, s.rows_of_wte, op.first_row);
    with_dtype(op.dout.dtype, [&, N = s.batch * s.sequence, T = s.sequence, C = s.channels](auto element) {
        using X = decltype(element);
        // A thread adds a strip of channels of all rows, in the order of the rows. No two threads write the
        // same element, and no sum depends on the number of threads. Strips are whole cache lines.
        const std::int64_t width = round_up(divide_up(C, threads_), 16);
        parallel_for(threads_, divide_up(C, width),
                     [=, dw = op.dwte.as<float>(), dp = op.dwpe ? op.dwpe.as<float>() : nullptr,
                      dy = op.dout.as<X>(), ids = op.tokens.as<std::int32_t>()](std::int64_t strip) {
                         const std::int64_t begin = strip * width;
                         const std::int64_t end = std::min(begin + width, C);
                         for (std::int64_t row = 0; row < N; ++row) {
                             const X* from = dy + row * C;
                             if (dp) add_row(dp + row % T * C + begin, from + begin, end - begin);
                             const std::int64_t row_of_wte = table.of(ids[row]);
                             if (row_of_wte < 0) continue;
                             add_row(dw + row_of_wte * C + begin, from + begin, end - begin);
                         }
                     });
    });
}

void CpuOps::compute(const Rope& op, const RopeSizes& s) {
    const int threads = threads_for(s.rows * s.heads * s.head_size, threads_);
    with_dtype(op.x.rows.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads, s.rows,
                     [=, to = op.x.rows.as<X>() + op.x.first, stride = row_elements(op.x),
                      table = op.angles.as<float>(), sign = op.inverse ? -1.0F : 1.0F,
                      position = op.position](std::int64_t row) {
                         const float* const own = table + (position + row % s.sequence) * s.head_size;
                         for (std::int64_t head = 0; head < s.heads; ++head) {
                             rotate_head(to + row * stride + head * s.head_size, own, sign, s.head_size / 2);
                         }
                     });
    });
}

}  // namespace llmc::cpu
