// The root-mean-square norm of heads in the rows of tensors.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// The first head of the first row, and the elements from one row to the next.
template <class X>
struct Places {
    explicit Places(const Heads& heads)
        : data(heads.rows ? heads.rows.as<X>() + heads.first : nullptr),
          stride(heads.rows ? row_elements(heads) : 0),
          size(heads.size) {}
    X* at(std::int64_t row, std::int64_t head) const { return data + row * stride + head * size; }

    X* data;
    std::int64_t stride, size;
};

// The sums of rows that ranks share; without ranks, each row's own sum is used.
struct RankSums {
    RankSums(const SharedRows& shared, const HeadNormSizes& s)
        : sums(shared.sums ? shared.sums.as<float>() : nullptr), ranks(s.ranks), rows(s.rows) {}
    float row_sum(std::int64_t row) const {
        float sum = 0.0F;
        for (std::int64_t rank = 0; rank < ranks; ++rank) sum += sums[rank * rows + row];
        return sum;
    }

    const float* sums;
    std::int64_t ranks, rows;
};

template <class X>
float sum_of_squares(const X* x, std::int64_t size) {
    return lane_sum<float>(size, [=](std::int64_t i) {
        const float value = to_float(x[i]);
        return value * value;
    });
}

// Calls f with a function that gives the weight of element i: 1 if there are no weights.
template <class X, class F>
auto with_weight(const X* weight, const F& f) {
    if (weight) return f([=](std::int64_t i) { return to_float(weight[i]); });
    return f([](std::int64_t) { return 1.0F; });
}

template <class X>
void normalize_head(X* out, const X* x, const X* weight, float rstd, std::int64_t size) {
    with_weight(weight, [=](auto weight_at) {
#pragma omp simd
        for (std::int64_t i = 0; i < size; ++i) out[i] = from_float<X>(to_float(x[i]) * rstd * weight_at(i));
    });
}

// The sum of g h over a head.
template <class X>
float sum_of_gh(const X* dout, const X* x, const X* weight, float rstd, std::int64_t size) {
    return with_weight(weight, [=](auto weight_at) {
        return lane_sum<float>(
            size, [=](std::int64_t i) { return to_float(dout[i]) * weight_at(i) * (to_float(x[i]) * rstd); });
    });
}

// din may be dout.
template <class X>
void backward_head(X* din, const X* dout, const X* x, const X* weight, float rstd, float mean_gh,
                   std::int64_t size) {
    with_weight(weight, [=](auto weight_at) {
#pragma omp simd
        for (std::int64_t i = 0; i < size; ++i) {
            const float h = to_float(x[i]) * rstd;
            din[i] = from_float<X>(rstd * (to_float(dout[i]) * weight_at(i) - h * mean_gh));
        }
    });
}

// Adds the head's terms to the block's sums for dweight.
template <class X>
void add_head_to_weight(float* dweight, const X* dout, const X* x, float rstd, std::int64_t size) {
#pragma omp simd
    for (std::int64_t i = 0; i < size; ++i) dweight[i] += to_float(dout[i]) * (to_float(x[i]) * rstd);
}

}  // namespace

void CpuOps::compute(const HeadNormForward& op, const HeadNormSizes& s) {
    with_dtype(op.in.rows.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, s.rows,
                     [=, y = Places<X>(op.out), x = Places<X>(op.in),
                      w = op.weight ? op.weight.as<X>() : nullptr, rstds = op.rstd.as<float>(),
                      rank_sums = RankSums(op.shared, s), eps = op.eps](std::int64_t row) {
                         for (std::int64_t head = 0; head < s.heads; ++head) {
                             const X* const own = x.at(row, head);
                             const float sum =
                                 rank_sums.sums ? rank_sums.row_sum(row) : sum_of_squares(own, s.head_size);
                             const float r = 1.0F / std::sqrt(sum / static_cast<float>(s.whole) + eps);
                             normalize_head(y.at(row, head), own, w, r, s.head_size);
                             rstds[row * s.heads + head] = r;
                         }
                     });
    });
}

void CpuOps::compute(const HeadNormSums& op, const HeadNormSizes& s) {
    with_dtype(op.in.rows.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, s.rows, [=, to = op.sums.as<float>(), x = Places<X>(op.in)](std::int64_t row) {
            to[row] = sum_of_squares(x.at(row, 0), s.head_size);
        });
    });
}

void CpuOps::compute(const HeadNormBackward& op, const HeadNormSizes& s) {
    const RowBlocks blocks(s.rows);
    float* const partials = op.dweight ? workspace(blocks.count * s.head_size) : nullptr;  // (blocks, D)
    with_dtype(op.in.rows.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads_, blocks.count,
                     [=, dx = Places<X>(op.din), dy = Places<X>(op.dout), x = Places<X>(op.in),
                      w = op.weight ? op.weight.as<X>() : nullptr, rstds = op.rstd.as<float>(),
                      rank_sums = RankSums(op.shared, s)](std::int64_t block) {
                         float* const partial = partials ? partials + block * s.head_size : nullptr;
                         if (partial) std::fill_n(partial, s.head_size, 0.0F);
                         for (std::int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                             for (std::int64_t head = 0; head < s.heads; ++head) {
                                 const X* const d = dy.at(row, head);
                                 const X* const own = x.at(row, head);
                                 const float r = rstds[row * s.heads + head];
                                 // The weight's terms come first, since din may overwrite dout.
                                 if (partial) add_head_to_weight(partial, d, own, r, s.head_size);
                                 if (!dx.data) continue;
                                 const float sum = rank_sums.sums ? rank_sums.row_sum(row)
                                                                  : sum_of_gh(d, own, w, r, s.head_size);
                                 backward_head(dx.at(row, head), d, own, w, r,
                                               sum / static_cast<float>(s.whole), s.head_size);
                             }
                         }
                     });
        if (!partials) return;
        add_partials(threads_, op.dweight.as<float>(), partials, blocks.count, s.head_size, s.head_size);
    });
}

void CpuOps::compute(const HeadNormBackwardSums& op, const HeadNormSizes& s) {
    with_dtype(op.in.rows.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(
            threads_, s.rows,
            [=, to = op.sums.as<float>(), dy = Places<X>(op.dout), x = Places<X>(op.in),
             w = op.weight ? op.weight.as<X>() : nullptr, rstds = op.rstd.as<float>()](std::int64_t row) {
                to[row] = sum_of_gh(dy.at(row, 0), x.at(row, 0), w, rstds[row], s.head_size);
            });
    });
}

// A norm over all heads has the largest weight.
std::int64_t CpuOps::head_norm_floats(const WorkspaceRequest& request) const {
    return RowBlocks::count_up_to(request.batch * request.sequence) * request.heads * request.size_of_head();
}

}  // namespace llmc::cpu
