// Operations on heads in the rows of tensors: rotary positions.
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/head_operands.h"

namespace llmc::cpu {

namespace {

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

void CpuOps::rope(const Heads& x, const Tensor& angles, std::int64_t position, bool inverse) {
    const RopeSizes s = rope_sizes(x, angles, position);
    const int threads = threads_for(s.rows * s.heads * s.head_size, threads_);
    with_dtype(x.rows.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads, s.rows,
                     [=, to = x.rows.as<X>() + x.first, stride = row_elements(x), table = angles.as<float>(),
                      sign = inverse ? -1.0F : 1.0F](std::int64_t row) {
                         const float* const own = table + (position + row % s.sequence) * s.head_size;
                         for (std::int64_t head = 0; head < s.heads; ++head) {
                             rotate_head(to + row * stride + head * s.head_size, own, sign, s.head_size / 2);
                         }
                     });
    });
}

}  // namespace llmc::cpu
