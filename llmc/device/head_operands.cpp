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

}  // namespace llmc
