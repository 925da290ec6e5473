#include "llmc/device/head_operands.h"

#include <fmt/format.h>

#include <string_view>

#include "llmc/core/error.h"
#include "llmc/device/operands.h"

namespace llmc {

namespace {

// Checks that the heads are present, lie inside the rows, and have this dtype. Returns the number of rows.
std::int64_t check_heads(const Heads& heads, DType dtype, std::string_view name,
                         SourceLocation where = SourceLocation::current()) {
    check_dtype(heads.rows, dtype, name, where);
    const Shape& shape = heads.rows.shape;
    if (shape.dimensions() == 0 || heads.first < 0 || heads.count < 1 || heads.size < 1 ||
        heads.first + heads.count * heads.size > shape.last()) {
        programming_error(fmt::format("{}: {} heads of {} from element {} are not inside the rows of {}",
                                      name, heads.count, heads.size, heads.first, to_string(shape)),
                          where);
    }
    return heads.rows.elements() / shape.last();
}

// Checks that these heads are as many and as large as those of `in`, in as many rows.
void check_like(const Heads& heads, const Heads& in, std::string_view name,
                SourceLocation where = SourceLocation::current()) {
    const std::int64_t rows = check_heads(heads, in.rows.dtype, name, where);
    if (heads.count != in.count || heads.size != in.size ||
        rows != in.rows.elements() / in.rows.shape.last()) {
        programming_error(
            fmt::format("{}: {} rows of {} heads of {}, unlike `in`", name, rows, heads.count, heads.size),
            where);
    }
}

HeadNormSizes head_norm_sizes(const Heads& in, const Tensor& weight, const Tensor& rstd,
                              const std::optional<SharedRows>& shared) {
    HeadNormSizes s{check_heads(in, in.rows.dtype, "in"), in.count, in.size, in.size, 0};
    if (weight) check_elements(weight, in.rows.dtype, s.head_size, "weight");
    check_elements(rstd, DType::fp32, s.rows * s.heads, "rstd");
    if (shared) {
        check(s.heads == 1, "ranks share rows of one head");
        check(shared->size >= s.head_size, "a whole row is no smaller than a rank's part");
        const Shape& sums = shared->sums.shape;
        s.ranks = sums.dimensions() == 2 ? sums[0] : 0;
        check(s.ranks > 0, "the sums of rows that ranks share are (R,N)");
        check_tensor(shared->sums, DType::fp32, {s.ranks, s.rows}, "the sums of all ranks");
        s.whole = shared->size;
    }
    return s;
}

}  // namespace

RopeSizes rope_sizes(const Heads& x, const Tensor& angles, std::int64_t position) {
    const std::int64_t rows = check_heads(x, x.rows.dtype, "x");
    const Shape& shape = x.rows.shape;
    check(shape.dimensions() == 2 || shape.dimensions() == 3, "rope takes rows (B,T,R) or (n,R)");
    const RopeSizes s{rows, shape[shape.dimensions() - 2], x.count, x.size};
    check(s.head_size % 2 == 0, "rope takes heads of pairs");
    check_dtype(angles, DType::fp32, "angles");
    check(angles.shape.dimensions() == 3 && angles.shape[1] == s.head_size / 2 && angles.shape[2] == 2,
          "angles are (positions, D/2, 2)");
    check(position >= 0 && position + s.sequence <= angles.shape[0], "there are angles for each position");
    return s;
}

HeadNormSizes head_norm_forward_sizes(const Heads& out, const Tensor& rstd, const Heads& in,
                                      const Tensor& weight, const std::optional<SharedRows>& shared) {
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, shared);
    check_like(out, in, "out");
    return s;
}

HeadNormSizes head_norm_sums_sizes(const Tensor& sums, const Heads& in) {
    const HeadNormSizes s{check_heads(in, in.rows.dtype, "in"), in.count, in.size, in.size, 0};
    check(s.heads == 1, "ranks share rows of one head");
    check_elements(sums, DType::fp32, s.rows, "sums");
    return s;
}

HeadNormSizes head_norm_backward_sizes(const Heads& din, const Tensor& dweight, const Heads& dout,
                                       const Heads& in, const Tensor& weight, const Tensor& rstd,
                                       const std::optional<SharedRows>& shared) {
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, shared);
    check_like(dout, in, "dout");
    if (din.rows) check_like(din, in, "din");
    if (dweight) check_elements(dweight, DType::fp32, s.head_size, "dweight");
    return s;
}

HeadNormSizes head_norm_backward_sums_sizes(const Tensor& sums, const Heads& dout, const Heads& in,
                                            const Tensor& weight, const Tensor& rstd) {
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, {});
    check(s.heads == 1, "ranks share rows of one head");
    check_like(dout, in, "dout");
    check_elements(sums, DType::fp32, s.rows, "sums");
    return s;
}

}  // namespace llmc
