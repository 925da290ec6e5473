// The work and the workspace of each operation, for all devices (ops.h).
#include <algorithm>

#include "llmc/device/ops.h"

namespace llmc {

namespace {

double moved(const Tensor& x) { return x ? static_cast<double>(x.bytes()) : 0; }
double elements_of(const Tensor& x) { return x ? static_cast<double>(x.elements()) : 0; }
double elements_of(const Heads& x) {
    return x.rows ? static_cast<double>(number_of_rows(x) * x.count * x.size) : 0;
}
double moved(const Heads& x) { return elements_of(x) * static_cast<double>(size_of(x.rows.dtype)); }

// The bytes of all operands; those that are changed count twice.
template <class O>
double moved_by(const O& op) {
    const auto of = []<class F>(const F& field) {
        if constexpr (requires { field.operand; })
            return (field.access == Access::add ? 2 : 1) * moved(field.operand);
        return 0.0;
    };
    return std::apply([&](const auto&... field) { return (of(field) + ...); }, op.fields());
}

template <class O>
OpCost elementwise(const O& op, double flops) {
    return {.flops = flops, .bytes = moved_by(op)};
}

OpCost products(double bytes, DType dtype, const ProductSizes& one, const ProductSizes& other = {}) {
    return {.flops = one.flops() + other.flops(),
            .bytes = bytes,
            .arithmetic = Arithmetic::products,
            .dtype = dtype,
            .products = {one, other}};
}
ProductSizes forward_product(const MatmulSizes& s) {
    return {static_cast<double>(s.rows), static_cast<double>(s.in_channels),
            static_cast<double>(s.out_channels)};
}
ProductSizes input_product(const MatmulSizes& s) {
    return {static_cast<double>(s.rows), static_cast<double>(s.out_channels),
            static_cast<double>(s.in_channels)};
}
ProductSizes weight_product(const MatmulSizes& s) {
    return {static_cast<double>(s.out_channels), static_cast<double>(s.rows),
            static_cast<double>(s.in_channels)};
}

// The keys that rows [first, end) of a sequence see, all together: row t sees t + 1 keys, but at most `window`.
double pairs(std::int64_t first, std::int64_t end, std::int64_t window) {
    const std::int64_t full = std::clamp(window, first, end);
    const auto short_rows = static_cast<double>(full - first), long_rows = static_cast<double>(end - full);
    return short_rows * (static_cast<double>(first + full) + 1.0) / 2.0 +
           long_rows * static_cast<double>(window);
}

// So many products of causal attention, such as q k^T or p v.
template <class O>
OpCost attention(const O& op, int count, const AttentionShape& s) {
    return {.flops = count * 2.0 * elements_of(op.out) / static_cast<double>(s.sequence) *
                     pairs(0, s.sequence, s.window),
            .bytes = moved_by(op),
            .arithmetic = Arithmetic::attention,
            .dtype = op.out.dtype};
}

// ---- workspace

// For rows of so many channels: one sequence.
WorkspaceRequest request(DType dtype, const RowSizes& s, std::int64_t other_channels = 0) {
    return {.batch = 1,
            .sequence = s.rows,
            .channels = s.channels,
            .heads = 1,
            .largest_matmul_channels = std::max(s.channels, other_channels),
            .head_rows = s.rows,
            .dtype = dtype};
}
WorkspaceRequest request(DType dtype, const MatmulSizes& s) {
    return request(dtype, {s.rows, s.in_channels}, s.out_channels);
}
WorkspaceRequest request(DType dtype, const AttentionShape& s) {
    return {.batch = s.batch,
            .sequence = s.sequence,
            .channels = s.heads * s.head_size,
            .heads = s.heads,
            .largest_matmul_channels = (s.heads + 2 * s.key_heads) * s.head_size,
            .head_rows = s.batch * s.sequence,
            .dtype = dtype,
            .head_size = s.head_size,
            .key_heads = s.key_heads,
            .window = s.window};
}

}  // namespace

std::string_view name_of(const Op& op) {
    return std::visit([]<class O>(const O&) { return O::name; }, op);
}

OpCost cost_of(const Op& op) {
    return std::visit([](const auto& of) { return of.cost(); }, op);
}

// ---- embedding

OpCost EncoderForward::cost() const {
    return {
        .flops = elements_of(out), .bytes = (wpe ? 3 : 2) * moved(out) + moved(tokens), .dtype = out.dtype};
}
OpCost EncoderBackward::cost() const {
    return {.flops = 2 * elements_of(dout),
            .bytes = moved(dout) + moved(tokens) + 2 * sizeof(float) * elements_of(dout)};
}
WorkspaceRequest EncoderBackward::workspace() const {
    const EncoderSizes s = sizes();
    return request(dout.dtype, RowSizes{s.batch * s.sequence, s.channels});
}

// ---- layernorm

OpCost LayerNormForward::cost() const { return elementwise(*this, 8 * elements_of(in)); }
OpCost LayerNormBackward::cost() const { return elementwise(*this, 16 * elements_of(in)); }
WorkspaceRequest LayerNormBackward::workspace() const { return request(in.dtype, sizes()); }
OpCost FusedResidualLayerNormForward::cost() const { return elementwise(*this, 9 * elements_of(in1)); }

// ---- RMS norm

OpCost RmsNormForward::cost() const { return elementwise(*this, 4 * elements_of(in)); }
OpCost RmsNormBackward::cost() const { return elementwise(*this, 12 * elements_of(in)); }
WorkspaceRequest RmsNormBackward::workspace() const { return request(in.dtype, sizes()); }
OpCost FusedResidualRmsNormForward::cost() const { return elementwise(*this, 5 * elements_of(in1)); }

// ---- matrix products

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
WorkspaceRequest MatmulBackward::workspace() const { return request(in.dtype, sizes()); }

// ---- activations

OpCost GeluForward::cost() const { return elementwise(*this, 0); }
OpCost GeluBackward::cost() const { return elementwise(*this, 0); }
OpCost SwigluForward::cost() const { return elementwise(*this, 5 * elements_of(out)); }
OpCost SwigluBackward::cost() const { return elementwise(*this, 11 * elements_of(dout)); }
OpCost ReluSquaredForward::cost() const { return elementwise(*this, 2 * elements_of(in)); }
OpCost ReluSquaredBackward::cost() const { return elementwise(*this, 3 * elements_of(in)); }

// ---- attention

OpCost AttentionForward::cost() const { return attention(*this, 2, sizes()); }
WorkspaceRequest AttentionForward::workspace() const { return request(out.dtype, sizes()); }
OpCost AttentionBackward::cost() const { return attention(*this, 5, sizes()); }
WorkspaceRequest AttentionBackward::workspace() const { return request(out.dtype, sizes()); }
OpCost AttentionCachedForward::cost() const {
    const CachedAttentionShape s = sizes();
    // The earlier rows of the cache that the first row sees are read, and the new ones written.
    const std::int64_t seen = std::min(position, s.window - 1);
    const double row = moved(cache) / static_cast<double>(s.capacity);
    return {.flops = 4.0 * elements_of(out) / static_cast<double>(s.rows) *
                     pairs(position, position + s.rows, s.window),
            .bytes = moved(out) + moved(q) + moved(k) + moved(v) + row * static_cast<double>(seen + s.rows),
            .arithmetic = Arithmetic::attention,
            .dtype = out.dtype};
}
WorkspaceRequest AttentionCachedForward::workspace() const {
    const CachedAttentionShape s = sizes();
    return request(out.dtype, AttentionShape{1, s.capacity, s.heads, s.head_size, s.key_heads, s.window});
}

// ---- heads

OpCost Rope::cost() const { return {.flops = 3 * elements_of(x), .bytes = 2 * moved(x)}; }
OpCost HeadNormForward::cost() const { return elementwise(*this, 4 * elements_of(in)); }
OpCost HeadNormSums::cost() const { return elementwise(*this, 2 * elements_of(in)); }
OpCost HeadNormBackward::cost() const { return elementwise(*this, 12 * elements_of(in)); }
WorkspaceRequest HeadNormBackward::workspace() const {
    return request(in.rows.dtype, RowSizes{number_of_rows(in), in.size});
}
OpCost HeadNormBackwardSums::cost() const { return elementwise(*this, 4 * elements_of(in)); }

// ---- classifier

OpCost FusedClassifier::cost() const {
    return {.bytes = (write_dlogits ? 2 : 1) * moved(logits) + moved(losses) + moved(targets)};
}
OpCost ClassifierStatistics::cost() const { return elementwise(*this, 0); }
OpCost ClassifierFromStatistics::cost() const {
    return {.bytes = (write_dlogits ? 2 * moved(logits) : 0) + moved(losses) + moved(all_statistics) +
                     moved(targets)};
}
OpCost SoftCap::cost() const { return elementwise(*this, 0); }

// ---- norm and update

OpCost GlobalNormSquared::cost() const { return elementwise(*this, 2 * elements_of(x)); }
OpCost Sum::cost() const { return elementwise(*this, elements_of(x)); }
WorkspaceRequest Sum::workspace() const { return request(DType::fp32, RowSizes{1, 8}); }
OpCost AdamW::cost() const {
    const bool has_master = master.data != parameters.data;
    return {.flops = 15 * elements_of(m),
            .bytes = (has_master ? moved(parameters) : 0) + 2 * (moved(master) + moved(m) + moved(v)) +
                     moved(gradients)};
}
WorkspaceRequest AdamW::workspace() const { return request(parameters.dtype, RowSizes{1, 8}); }

// ---- products in 8 bits

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

// ---- elementwise

OpCost Cast::cost() const { return elementwise(*this, 0); }
OpCost Copy::cost() const { return elementwise(*this, 0); }
OpCost Fill::cost() const { return elementwise(*this, 0); }
OpCost Add::cost() const { return elementwise(*this, elements_of(out)); }
OpCost Accumulate::cost() const { return elementwise(*this, elements_of(out)); }
OpCost AllFinite::cost() const { return elementwise(*this, 0); }

}  // namespace llmc
