// Token and position embeddings.
#include <algorithm>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/op_sizes.h"

namespace llmc::cpu {

namespace {

void check_tokens(const Tensor& tokens, std::int64_t rows_of_wte) {
    const auto ids = tokens.span<std::int32_t>();
    check(std::all_of(ids.begin(), ids.end(), [&](auto id) { return id >= 0 && id < rows_of_wte; }),
          "a token has a row in wte");
}

}  // namespace

void CpuOps::encoder_forward(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe) {
    const auto [B, T, C, rows_of_wte] = encoder_forward_sizes(out, tokens, wte, wpe);
    check_tokens(tokens, rows_of_wte);
    with_dtype(out.dtype, [&, T = T, C = C](auto element) {
        using X = decltype(element);
        parallel_for(threads_, tokens.elements(),
                     [=, y = out.as<X>(), ids = tokens.as<std::int32_t>(), w = wte.as<X>(),
                      p = wpe.as<X>()](std::int64_t row) {
                         const X* token = w + ids[row] * C;
                         const X* position = p + row % T * C;
                         X* to = y + row * C;
#pragma omp simd
                         for (std::int64_t c = 0; c < C; ++c) {
                             to[c] = from_float<X>(to_float(token[c]) + to_float(position[c]));
                         }
                     });
    });
}

void CpuOps::encoder_backward(const Tensor& dwte, const Tensor& dwpe, const Tensor& dout,
                              const Tensor& tokens) {
    const auto [B, T, C, rows_of_wte] = encoder_backward_sizes(dwte, dwpe, dout, tokens);
    check_tokens(tokens, rows_of_wte);
    with_dtype(dout.dtype, [&, B = B, T = T, C = C](auto element) {
        using X = decltype(element);
        // A thread adds a strip of channels of all rows, in the order of the rows: no two threads meet, and
        // no sum depends on their number. Strips are whole cache lines.
        const std::int64_t width = round_up(divide_up(C, threads_), 16);
        parallel_for(threads_, divide_up(C, width),
                     [=, dw = dwte.as<float>(), dp = dwpe.as<float>(), dy = dout.as<X>(),
                      ids = tokens.as<std::int32_t>()](std::int64_t strip) {
                         const std::int64_t begin = strip * width;
                         const std::int64_t end = std::min(begin + width, C);
                         for (std::int64_t row = 0; row < B * T; ++row) {
                             const X* from = dy + row * C;
                             float* token = dw + ids[row] * C;
                             float* position = dp + row % T * C;
#pragma omp simd
                             for (std::int64_t c = begin; c < end; ++c) {
                                 token[c] += to_float(from[c]);
                                 position[c] += to_float(from[c]);
                             }
                         }
                     });
    });
}

}  // namespace llmc::cpu
