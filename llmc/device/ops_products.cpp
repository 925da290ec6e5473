// The sizes, the work and the workspace of the operations in ops_products.h.
#include "llmc/device/ops_products.h"

#include <algorithm>
#include <utility>

#include "llmc/device/nf4.h"
#include "llmc/device/op_checks.h"

namespace llmc {

// ---- matrix products

namespace {

// `in` is (N,IC), `weight` (OC,IC) and `out` (N,OC). `out` may be a gradient.
MatmulSizes matmul_sizes(const Tensor& out, const Tensor& in, const Tensor& weight) {
    const auto [OC, IC] = rows_of(weight, "weight");
    check(in.shape.dimensions() > 0, "the input is rows of IC");
    const std::int64_t N = in.elements() / IC;
    check_rows(in, N, IC, "in");
    check_rows(out, N, OC, "out");
    return {N, IC, OC};
}

}  // namespace

MatmulSizes MatmulForward::sizes() const {
    check_operands(*this);
    const MatmulSizes s = matmul_sizes(out, in, weight);
    check_elements(bias, s.out_channels, "bias");
    check_rows(pre_gelu, s.rows, s.out_channels, "pre_gelu");
    return s;
}
MatmulSizes MatmulBackward::sizes() const {
    check_operands(*this);
    check(in || !dweight, "dweight is made of dout and in");
    const auto [OC, IC] = rows_of(weight, "weight");
    const MatmulSizes s{rows_of(dout, "dout").rows, IC, OC};
    check_rows(dout, s.rows, OC, "dout");
    check_rows(in, s.rows, IC, "in");
    check_rows(din, s.rows, s.in_channels, "din");
    check_elements(dweight, weight.elements(), "dweight");
    check_elements(dbias, s.out_channels, "dbias");
    check_rows(pre_gelu, s.rows, s.in_channels, "pre_gelu");
    return s;
}

OpCost MatmulForward::cost() const { return products(moved_by(*this), out.dtype, forward_product(sizes())); }
WorkspaceRequest MatmulForward::workspace() const { return request(in.dtype, sizes()); }
OpCost MatmulBackward::cost() const {
    const MatmulSizes s = sizes();
    // din is made of the weight, dweight of the input, and all of dout.
    const double bytes = moved(dout) + (din ? moved(din) + moved(weight) + moved(pre_gelu) : 0) +
                         (dweight ? 2 * moved(dweight) + moved(in) : 0) + 2 * moved(dbias);
    if (!din && !dweight) return {.flops = elements_of(dout), .bytes = bytes};
    return products(bytes, dout.dtype, din ? input_product(s) : ProductSizes{},
                    dweight ? weight_product(s) : ProductSizes{});
}
WorkspaceRequest MatmulBackward::workspace() const { return request(dout.dtype, sizes()); }

MatmulSizes MatmulAdd::sizes() const {
    check_operands(*this);
    const auto matrix = [](const Heads& of, bool is_transposed) {
        const std::int64_t rows = number_of_rows(of), columns = of.count * of.size;
        return is_transposed ? std::pair(columns, rows) : std::pair(rows, columns);
    };
    const auto [N, M] = matrix(out, false);
    const auto [a_rows, K] = matrix(a, a_transposed);
    check(a_rows == N && matrix(b, b_transposed) == std::pair(K, M), "the factors of a product match");
    check(out.rows.dtype == a.rows.dtype || out.rows.dtype == DType::fp32, "a product is in X or in fp32");
    return {N, K, M};
}
OpCost MatmulAdd::cost() const { return products(moved_by(*this), a.rows.dtype, forward_product(sizes())); }
WorkspaceRequest MatmulAdd::workspace() const { return request(a.rows.dtype, sizes()); }

// ---- activations

std::int64_t GeluForward::sizes() const { return same_elements(*this, in, {{&out, "out"}}); }
std::int64_t GeluBackward::sizes() const {
    return same_elements(*this, in, {{&din, "din"}, {&dout, "dout"}});
}
RowSizes SwigluForward::sizes() const {
    check_operands(*this);
    const RowSizes s = rows_of(out, "out");
    check_rows(in, s.rows, 2 * s.channels, "in");
    return s;
}
RowSizes SwigluBackward::sizes() const {
    check_operands(*this);
    const RowSizes s = rows_of(dout, "dout");
    check_rows(in, s.rows, 2 * s.channels, "in");
    check_rows(din, s.rows, 2 * s.channels, "din");
    return s;
}
std::int64_t ReluSquaredForward::sizes() const { return same_elements(*this, in, {{&out, "out"}}); }
std::int64_t ReluSquaredBackward::sizes() const {
    return same_elements(*this, in, {{&din, "din"}, {&dout, "dout"}});
}

OpCost GeluForward::cost() const { return elementwise(*this, 0); }
OpCost GeluBackward::cost() const { return elementwise(*this, 0); }
OpCost SwigluForward::cost() const { return elementwise(*this, 5 * elements_of(out)); }
OpCost SwigluBackward::cost() const { return elementwise(*this, 11 * elements_of(dout)); }
OpCost ReluSquaredForward::cost() const { return elementwise(*this, 2 * elements_of(in)); }
OpCost ReluSquaredBackward::cost() const { return elementwise(*this, 3 * elements_of(in)); }

// ---- weights in 4 bits

std::int64_t DequantiseNf4::sizes() const {
    check_operands(*this);
    check(out.elements() % nf4_block == 0, "numbers in 4 bits are whole blocks");
    check_elements(in, nf4_bytes(out.elements()), "in");
    return out.elements();
}
OpCost DequantiseNf4::cost() const { return elementwise(*this, elements_of(out)); }

// ---- products in 8 bits

std::int64_t Amax::sizes() const {
    check_operands(*this);
    check(x.dtype == DType::bf16, "products in 8 bits are of numbers in bf16");
    check_elements(out, 1, "out");
    return x.elements();
}
std::int64_t Quantise::sizes() const {
    check(x.dtype == DType::bf16, "products in 8 bits are of numbers in bf16");
    check_elements(amax, 1, "amax");
    return same_elements(*this, x, {{&out, "out"}});
}
RowSizes QuantiseToBytes::sizes() const {
    check_operands(*this);
    check(x.dtype == DType::bf16, "products in 8 bits are of numbers in bf16");
    const RowSizes s = rows_of(x, "x");
    check(to.plain || to.transposed, "a tensor in 8 bits has a copy");
    check_rows(to.plain, s.rows, s.channels, "plain");
    check_rows(to.transposed, s.channels, s.rows, "transposed");
    check_elements(to.inverse, 1, "inverse");
    check_elements(amax, 1, "amax");
    return s;
}
MatmulSizes Fp8MatmulForward::sizes() const {
    check_operands(*this);
    check(out.dtype == DType::bf16, "products in 8 bits make numbers in bf16");
    const MatmulSizes s = matmul_sizes(out, in.plain, weight.plain);
    check_elements(bias, s.out_channels, "bias");
    check_rows(pre_gelu, s.rows, s.out_channels, "pre_gelu");
    return s;
}
MatmulSizes Fp8MatmulBackward::sizes() const {
    check_operands(*this);
    check(din || dweight, "a backward pass makes din or dweight");
    MatmulSizes s{0, 0, 0};
    if (dweight) {
        check(dout.transposed && in.transposed && in.inverse,
              "dweight is made of the transposed dout and in");
        const auto [OC, N] = rows_of(dout.transposed, "dout_transposed");
        s = {N, in.transposed.elements() / N, OC};
        check_rows(in.transposed, s.in_channels, N, "in_transposed");
        check_elements(dweight, OC * s.in_channels, "dweight");
    }
    if (din) {
        check(dout.plain && weight.transposed && weight.inverse,
              "din is made of dout and the transposed weight");
        const auto [N, OC] = rows_of(dout.plain, "dout");
        const std::int64_t IC = weight.transposed.elements() / OC;
        check(!dweight || (s.rows == N && s.in_channels == IC && s.out_channels == OC),
              "din and dweight are of the same product");
        s = {N, IC, OC};
        check_rows(weight.transposed, s.in_channels, OC, "weight_transposed");
        check_rows(din, N, s.in_channels, "din");
        check(din.dtype == DType::bf16, "products in 8 bits make numbers in bf16");
    }
    check_rows(pre_gelu, s.rows, s.in_channels, "pre_gelu");
    return s;
}

OpCost Amax::cost() const { return elementwise(*this, 0); }
OpCost Quantise::cost() const { return elementwise(*this, 0); }
OpCost QuantiseToBytes::cost() const { return elementwise(*this, 0); }
OpCost Fp8MatmulForward::cost() const {
    return products(moved_by(*this), DType::uint8, forward_product(sizes()));
}
WorkspaceRequest Fp8MatmulForward::workspace() const { return request(DType::bf16, sizes()); }
OpCost Fp8MatmulBackward::cost() const {
    const MatmulSizes s = sizes();
    const double bytes =
        (din ? moved(din) + moved(dout.plain) + moved(weight.transposed) + moved(pre_gelu) : 0) +
        (dweight ? 2 * moved(dweight) + moved(dout.transposed) + moved(in.transposed) : 0);
    return products(bytes, DType::uint8, din ? input_product(s) : ProductSizes{},
                    dweight ? weight_product(s) : ProductSizes{});
}
WorkspaceRequest Fp8MatmulBackward::workspace() const { return request(DType::bf16, sizes()); }

}  // namespace llmc
