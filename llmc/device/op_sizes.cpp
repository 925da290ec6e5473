// The sizes of each operation, and what its operands must be, for all devices (ops.h).
#include "llmc/device/ops.h"

#include <fmt/format.h>

#include <algorithm>

#include "llmc/core/error.h"
#include "llmc/device/eight_bit_moments.h"

namespace llmc {

namespace {

// ---- checks

void check_operand(std::string_view operation, const OperandField<Tensor>& field, DType dtype) {
    if (field.operand.dtype != dtype)
        programming_error(fmt::format("{}: {} is {}, not {}", operation, field.name,
                                      name_of(field.operand.dtype), name_of(dtype)));
}
void check_operand(std::string_view operation, const OperandField<Heads>& field, DType dtype) {
    check_operand(operation, OperandField<Tensor>{field.name, field.operand.rows, field.access}, dtype);
    const Heads& heads = field.operand;
    const Shape& shape = heads.rows.shape;
    if (shape.dimensions() == 0 || heads.first < 0 || heads.count < 1 || heads.size < 1 ||
        heads.first + heads.count * heads.size > shape.last())
        programming_error(fmt::format("{}: {} has {} heads of {} from element {}, not inside the rows of {}",
                                      operation, field.name, heads.count, heads.size, heads.first,
                                      to_string(shape)));
}

// Checks that the operands of a call are there and have their dtypes.
template <class O>
void check_operands(const O& op) {
    std::optional<DType> x;
    const auto check_one = [&]<class T>(const OperandField<T>& field) {
        const Tensor& tensor = tensor_of(field.operand);
        if (!tensor) {
            if (!field.is_optional) programming_error(fmt::format("{}: {} is missing", O::name, field.name));
            return;
        }
        if (field.dtype.is_x() && !x) {
            x = tensor.dtype;
            if (!is_compute_dtype(*x))
                programming_error(
                    fmt::format("{}: {} is {}, not a compute dtype", O::name, field.name, name_of(*x)));
        }
        check_operand(O::name, field,
                      field.dtype.is_any  ? tensor.dtype
                      : field.dtype.fixed ? *field.dtype.fixed
                                          : *x);
    };
    std::apply(
        [&](const auto&... field) {
            const auto visit = [&]<class F>(const F& of) {
                if constexpr (requires { of.operand; }) check_one(of);
            };
            (visit(field), ...);
        },
        op.fields());
}

void check_shape(const Tensor& tensor, const Shape& shape, std::string_view name) {
    if (tensor && tensor.shape != shape)
        programming_error(fmt::format("{} is {}, not {}", name, to_string(tensor.shape), to_string(shape)));
}

// In any shape.
void check_elements(const Tensor& tensor, std::int64_t elements, std::string_view name) {
    if (tensor && tensor.elements() != elements)
        programming_error(fmt::format("{} has {} elements, not {}", name, tensor.elements(), elements));
}

// `columns` in the last dimension, and `rows` rows in all others.
void check_rows(const Tensor& tensor, std::int64_t rows, std::int64_t columns, std::string_view name) {
    if (tensor && (tensor.shape.dimensions() == 0 || tensor.shape.last() != columns ||
                   tensor.elements() != rows * columns))
        programming_error(
            fmt::format("{} is {}, not {} rows of {}", name, to_string(tensor.shape), rows, columns));
}

RowSizes rows_of(const Tensor& x, std::string_view name) {
    if (x.shape.dimensions() == 0 || x.shape.last() <= 0)
        programming_error(fmt::format("{} is {}, not rows of channels", name, to_string(x.shape)));
    return {x.elements() / x.shape.last(), x.shape.last()};
}

// As many heads, as large, in as many rows.
void check_heads(const Heads& heads, std::int64_t rows, std::int64_t count, std::int64_t size,
                 std::string_view name) {
    if (!heads.rows || (heads.count == count && heads.size == size && number_of_rows(heads) == rows)) return;
    programming_error(fmt::format("{} has {} rows of {} heads of {} elements, not {} of {} of {}", name,
                                  number_of_rows(heads), heads.count, heads.size, rows, count, size));
}

}  // namespace

// ---- embedding

namespace {

EncoderSizes encoder_sizes(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe) {
    check(out.shape.dimensions() == 3, "the embedding is (B,T,C)");
    const EncoderSizes s{out.shape[0], out.shape[1], out.shape[2],
                         wte.shape.dimensions() == 2 ? wte.shape[0] : 0};
    check_shape(tokens, {s.batch, s.sequence}, "tokens");
    check_shape(wte, {s.rows_of_wte, s.channels}, "wte");
    check(!wpe || (wpe.shape.dimensions() == 2 && wpe.shape[0] >= s.sequence && wpe.shape[1] == s.channels),
          "wpe has a row for each position");
    return s;
}

}  // namespace

EncoderSizes EncoderForward::sizes() const {
    check_operands(*this);
    return encoder_sizes(out, tokens, wte, wpe);
}
EncoderSizes EncoderBackward::sizes() const {
    check_operands(*this);
    return encoder_sizes(dout, tokens, dwte, dwpe);
}
// ---- layernorm

namespace {

RowSizes layernorm_sizes(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& gamma,
                         const Tensor& beta) {
    const RowSizes s = rows_of(x, "the input of layernorm");
    check_elements(mean, s.rows, "mean");
    check_elements(rstd, s.rows, "rstd");
    check_elements(gamma, s.channels, "gamma");
    check_elements(beta, s.channels, "beta");
    return s;
}

}  // namespace

RowSizes LayerNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = layernorm_sizes(in, mean, rstd, gamma, beta);
    check_rows(out, s.rows, s.channels, "out");
    return s;
}
RowSizes LayerNormBackward::sizes() const {
    check_operands(*this);
    const RowSizes s = layernorm_sizes(in, mean, rstd, gamma, {});
    check_rows(dout, s.rows, s.channels, "dout");
    check_rows(din, s.rows, s.channels, "din");
    check(dgamma || !dbeta, "dbeta is computed only together with dgamma");
    check_elements(dgamma, s.channels, "dgamma");
    check_elements(dbeta, s.channels, "dbeta");
    return s;
}
RowSizes FusedResidualLayerNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = layernorm_sizes(residual, mean, rstd, gamma, beta);
    for (const auto& [x, which] : {std::pair{&out, "out"}, {&in1, "in1"}, {&in2, "in2"}})
        check_rows(*x, s.rows, s.channels, which);
    return s;
}
// ---- RMS norm

namespace {

RowSizes rmsnorm_sizes(const Tensor& x, const Tensor& rstd, const Tensor& weight) {
    const RowSizes s = rows_of(x, "the input of RMS norm");
    check_elements(rstd, s.rows, "rstd");
    check_elements(weight, s.channels, "weight");
    return s;
}

}  // namespace

RowSizes RmsNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = rmsnorm_sizes(in, rstd, weight);
    check_rows(out, s.rows, s.channels, "out");
    return s;
}
RowSizes RmsNormBackward::sizes() const {
    check_operands(*this);
    const RowSizes s = rmsnorm_sizes(in, rstd, weight);
    check_rows(dout, s.rows, s.channels, "dout");
    check_rows(din, s.rows, s.channels, "din");
    check_elements(dweight, s.channels, "dweight");
    return s;
}
RowSizes FusedResidualRmsNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = rmsnorm_sizes(residual, rstd, weight);
    for (const auto& [x, which] : {std::pair{&out, "out"}, {&in1, "in1"}, {&in2, "in2"}})
        check_rows(*x, s.rows, s.channels, which);
    return s;
}
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
    const MatmulSizes s = matmul_sizes(dout, in, weight);
    check_rows(din, s.rows, s.in_channels, "din");
    check_elements(dweight, weight.elements(), "dweight");
    check_elements(dbias, s.out_channels, "dbias");
    check_rows(pre_gelu, s.rows, s.in_channels, "pre_gelu");
    return s;
}
// ---- activations

namespace {

template <class O>
std::int64_t same_elements(const O& op, const Tensor& in,
                           std::initializer_list<std::pair<const Tensor*, std::string_view>> others) {
    check_operands(op);
    for (const auto& [x, name] : others) check_elements(*x, in.elements(), name);
    return in.elements();
}

}  // namespace

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
// ---- attention

namespace {

// The number of key heads, which divides that of the query heads.
std::int64_t key_heads_of(const Heads& k, std::int64_t heads) {
    check(k.count > 0 && heads % k.count == 0, "the number of key heads divides that of the query heads");
    return k.count;
}

// A window of 0, and one that is longer than the sequence, hide nothing.
std::int64_t keys_seen(std::int64_t window, std::int64_t sequence) {
    check(window >= 0, "a window is a number of keys, or 0 for all");
    return window == 0 ? sequence : std::min(window, sequence);
}

// q, k and v, or their gradients.
void check_query_key_value(const Heads& q, const Heads& k, const Heads& v, std::int64_t rows,
                           std::int64_t heads, std::int64_t key_heads, std::int64_t size) {
    check_heads(q, rows, heads, size, "q");
    check_heads(k, rows, key_heads, size, "k");
    check_heads(v, rows, key_heads, size, "v");
}

AttentionShape attention_sizes(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                               const Heads& v, std::int64_t window) {
    check(out.shape.dimensions() == 4, "the output of attention is (B,T,H,D)");
    AttentionShape s{out.shape[0], out.shape[1], out.shape[2], out.shape[3]};
    s.key_heads = key_heads_of(k, s.heads);
    s.window = keys_seen(window, s.sequence);
    check_shape(lse, {s.batch, s.heads, s.sequence}, "lse");
    check_query_key_value(q, k, v, s.batch * s.sequence, s.heads, s.key_heads, s.head_size);
    return s;
}

// Whether both are heads in the same rows, and some elements belong to both.
bool overlap(const Heads& a, const Heads& b) {
    return a.rows.data == b.rows.data && a.first < b.first + b.count * b.size &&
           b.first < a.first + a.count * a.size;
}

}  // namespace

AttentionShape AttentionForward::sizes() const {
    check_operands(*this);
    return attention_sizes(out, lse, q, k, v, window);
}
AttentionShape AttentionBackward::sizes() const {
    check_operands(*this);
    const AttentionShape s = attention_sizes(out, lse, q, k, v, window);
    check_shape(dout, out.shape, "dout");
    check_query_key_value(dq, dk, dv, s.batch * s.sequence, s.heads, s.key_heads, s.head_size);
    check(!overlap(dq, dk) && !overlap(dq, dv) && !overlap(dk, dv), "the gradients have places of their own");
    return s;
}
CachedAttentionShape AttentionCachedForward::sizes() const {
    check_operands(*this);
    check(out.shape.dimensions() == 3, "the output of attention is (n,H,D)");
    check(cache.shape.dimensions() == 4, "the cache is (T,2,K,D)");
    CachedAttentionShape s{out.shape[0], cache.shape[0], out.shape[1], out.shape[2]};
    s.key_heads = key_heads_of(k, s.heads);
    s.window = keys_seen(window, s.capacity);
    check_shape(cache, {s.capacity, 2, s.key_heads, s.head_size}, "cache");
    check_query_key_value(q, k, v, s.rows, s.heads, s.key_heads, s.head_size);
    check(position >= 0 && position + s.rows <= s.capacity, "the cache has room for the rows");
    return s;
}
// ---- heads

RopeSizes Rope::sizes() const {
    check_operands(*this);
    const Shape& shape = x.rows.shape;
    check(shape.dimensions() == 2 || shape.dimensions() == 3, "rope takes rows (B,T,R) or (n,R)");
    const RopeSizes s{number_of_rows(x), shape[shape.dimensions() - 2], x.count, x.size};
    check(s.head_size % 2 == 0, "rope takes heads of pairs");
    check(angles.shape.dimensions() == 3 && angles.shape[1] == s.head_size / 2 && angles.shape[2] == 2,
          "angles are (positions, D/2, 2)");
    check(position >= 0 && position + s.sequence <= angles.shape[0], "there are angles for each position");
    return s;
}
namespace {

HeadNormSizes head_norm_sizes(const Heads& in, const Tensor& weight, const Tensor& rstd,
                              const SharedRows& shared = {}) {
    HeadNormSizes s{number_of_rows(in), in.count, in.size, in.size, 0};
    check_elements(weight, s.head_size, "weight");
    check_elements(rstd, s.rows * s.heads, "rstd");
    if (shared.sums) {
        check(s.heads == 1, "ranks share rows of one head");
        check(shared.size >= s.head_size, "a whole row is no smaller than a rank's part");
        const Shape& sums = shared.sums.shape;
        s.ranks = sums.dimensions() == 2 ? sums[0] : 0;
        check(s.ranks > 0, "the sums of rows that ranks share are (R,N)");
        check_shape(shared.sums, {s.ranks, s.rows}, "the sums of all ranks");
        s.whole = shared.size;
    }
    return s;
}

}  // namespace

HeadNormSizes HeadNormForward::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, shared);
    check_heads(out, s.rows, s.heads, s.head_size, "out");
    return s;
}
HeadNormSizes HeadNormSums::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, {}, {});
    check(s.heads == 1, "ranks share rows of one head");
    check_elements(sums, s.rows, "sums");
    return s;
}
HeadNormSizes HeadNormBackward::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd, shared);
    check_heads(dout, s.rows, s.heads, s.head_size, "dout");
    check_heads(din, s.rows, s.heads, s.head_size, "din");
    check_elements(dweight, s.head_size, "dweight");
    return s;
}
HeadNormSizes HeadNormBackwardSums::sizes() const {
    check_operands(*this);
    const HeadNormSizes s = head_norm_sizes(in, weight, rstd);
    check(s.heads == 1, "ranks share rows of one head");
    check_heads(dout, s.rows, s.heads, s.head_size, "dout");
    check_elements(sums, s.rows, "sums");
    return s;
}
// ---- classifier

namespace {

// Only the first `columns` columns of the logits count.
RowSizes logits_sizes(const Tensor& logits, const Tensor& targets, std::int64_t columns,
                      const ClassifierTerms& terms) {
    check(logits.shape.dimensions() == 2, "logits are (N,Vp)");
    const RowSizes s{logits.shape[0], logits.shape[1]};
    check(columns >= 0 && columns <= s.channels, "the vocabulary lies inside the logits' columns");
    check_elements(targets, s.rows, "targets");
    check(terms.cap >= 0 && terms.z_loss >= 0, "the classifier's cap and z-loss are at least 0");
    return s;
}

}  // namespace

RowSizes FusedClassifier::sizes() const {
    check_operands(*this);
    check(vocabulary > 0, "the vocabulary is not empty");
    const RowSizes s = logits_sizes(logits, targets, vocabulary, terms);
    check_elements(losses, s.rows, "losses");
    return s;
}
RowSizes ClassifierStatistics::sizes() const {
    check_operands(*this);
    check(first_column >= 0, "first_column is at least 0");
    const RowSizes s = logits_sizes(logits, targets, columns, terms);
    check_shape(statistics, {s.rows, classifier_statistics_numbers}, "statistics");
    return s;
}
ClassifierSizes ClassifierFromStatistics::sizes() const {
    check_operands(*this);
    check(first_column >= 0, "first_column is at least 0");
    const RowSizes s = logits_sizes(logits, targets, columns, terms);
    check_elements(losses, s.rows, "losses");
    check(all_statistics.shape.dimensions() == 3 && all_statistics.shape[0] > 0, "statistics are (R,N,3)");
    const std::int64_t ranks = all_statistics.shape[0];
    check_shape(all_statistics, {ranks, s.rows, classifier_statistics_numbers}, "all_statistics");
    return {s.rows, s.channels, ranks};
}
std::int64_t SoftCap::sizes() const {
    check(cap > 0, "a cap is above 0");
    return same_elements(*this, in, {{&out, "out"}});
}
// ---- norm and update

std::int64_t GlobalNormSquared::sizes() const {
    check_operands(*this);
    check(x.elements() % norm_block_elements == 0, "the norm takes whole blocks of norm_block_elements");
    check_elements(partials, x.elements() / norm_block_elements, "partials");
    return x.elements();
}
std::int64_t Sum::sizes() const {
    check_operands(*this);
    check_elements(out, 1, "out");
    return x.elements();
}
namespace {

void check_rounding(const StochasticRounding& rounding) {
    check(rounding.first_element % 4 == 0, "the buffer's first element has an index that is a multiple of 4");
}

void check_segments(std::span<const AdamWSegment> segments, std::int64_t elements,
                    std::int64_t small_elements) {
    std::int64_t previous_end = 0;
    for (const AdamWSegment& segment : segments) {
        check(segment.begin >= previous_end && segment.end >= segment.begin && segment.end <= elements,
              "segments are in increasing order inside the buffer");
        check(segment.in_small < 0 || segment.in_small + segment.end - segment.begin <= small_elements,
              "a small tensor lies in the buffer of small ones");
        previous_end = segment.end;
    }
}

}  // namespace

std::int64_t AdamW::sizes() const {
    check_operands(*this);
    const std::int64_t n = parameters.elements();
    const DType X = parameters.dtype, moments = m.dtype;
    const bool has_master = master.dtype != X;
    check(!has_master || master.dtype == DType::fp32, "a master copy is in fp32");
    check(has_master || parameters.data == master.data,
          "without a master copy, the parameters take its place");
    check(has_master || X == DType::fp32 || rounding,
          "without a master copy, parameters are rounded at random");
    check(moments == v.dtype && (moments == DType::fp32 || moments == DType::bf16 || moments == DType::uint8),
          "moments are in fp32, bf16 or 8 bits");
    check(gradients.dtype == DType::fp32 || gradients.dtype == X, "gradients are in fp32 or X");
    for (const auto& [x, which] :
         {std::pair{&master, "master"}, {&m, "m"}, {&v, "v"}, {&gradients, "gradients"}})
        check_elements(*x, n, which);
    check_elements(norm_squared, 1, "norm_squared");
    const EightBitMoments& small = in_8_bits;
    if (moments == DType::uint8) {
        check(n % eight_bit_block == 0, "moments in 8 bits are whole blocks");
        check(small.m_amax && small.v_amax, "moments in 8 bits have the greatest magnitudes of their blocks");
        check_elements(small.m_amax, n / eight_bit_block, "m_amax");
        check_elements(small.v_amax, n / eight_bit_block, "v_amax");
        check_elements(small.v, small.m.elements(), "small_v");
    }
    check_segments(segments, n, small.m ? small.m.elements() : 0);
    check(!rounding || X == DType::bf16, "stochastic rounding is to bf16");
    check(rounding_of_moments.has_value() == (moments == DType::bf16),
          "moments in bf16 are rounded at random");
    for (const auto& random : {rounding, rounding_of_moments})
        if (random) check_rounding(*random);
    check(step.step >= 1, "AdamW's steps count from 1");
    return n;
}
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
        s = {N, weight.transposed.elements() / OC, OC};
        check_rows(weight.transposed, s.in_channels, OC, "weight_transposed");
        check_rows(din, N, s.in_channels, "din");
        check(din.dtype == DType::bf16, "products in 8 bits make numbers in bf16");
    }
    check_rows(pre_gelu, s.rows, s.in_channels, "pre_gelu");
    return s;
}
// ---- elementwise

std::int64_t Cast::sizes() const { return same_elements(*this, in, {{&out, "out"}}); }
std::int64_t Copy::sizes() const {
    check(out.dtype == in.dtype, "a copy has the dtype of its source");
    return same_elements(*this, in, {{&out, "out"}});
}
std::int64_t Fill::sizes() const { return same_elements(*this, out, {}); }
std::int64_t Add::sizes() const { return same_elements(*this, out, {{&a, "a"}, {&b, "b"}}); }
std::int64_t Accumulate::sizes() const {
    check(out.dtype == DType::bf16, "sums that are rounded at random are in bf16");
    check(in.dtype == DType::bf16 || in.dtype == DType::fp32, "terms of a sum are in fp32 or bf16");
    check_rounding(rounding);
    return same_elements(*this, out, {{&in, "in"}});
}
std::int64_t AllFinite::sizes() const {
    check_operands(*this);
    check_elements(flag, 1, "flag");
    return x.elements();
}
}  // namespace llmc
