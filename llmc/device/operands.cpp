#include "llmc/device/operands.h"
#include "llmc/device/eight_bit_moments.h"

#include <algorithm>

namespace llmc {

namespace {

EncoderSizes encoder_sizes(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe,
                           DType table_dtype) {
    check(out.shape.dimensions() == 3, "the embedding is (B,T,C)");
    const EncoderSizes s{out.shape[0], out.shape[1], out.shape[2],
                         wte.shape.dimensions() == 2 ? wte.shape[0] : 0};
    check_tensor(tokens, DType::int32, {s.batch, s.sequence}, "tokens");
    check_tensor(wte, table_dtype, {s.rows_of_wte, s.channels}, "wte");
    if (wpe) check_dtype(wpe, table_dtype, "wpe");
    check(!wpe || (wpe.shape.dimensions() == 2 && wpe.shape[0] >= s.sequence && wpe.shape[1] == s.channels),
          "wpe has a row for each position");
    return s;
}

RowSizes layernorm_sizes(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& gamma) {
    check(x.shape.dimensions() > 0 && x.shape.last() > 0, "layernorm takes rows of channels");
    const RowSizes sizes{x.elements() / x.shape.last(), x.shape.last()};
    check_elements(mean, DType::fp32, sizes.rows, "mean");
    check_elements(rstd, DType::fp32, sizes.rows, "rstd");
    check_elements(gamma, x.dtype, sizes.channels, "gamma");
    return sizes;
}

RowSizes rmsnorm_sizes(const Tensor& x, const Tensor& rstd, const Tensor& weight) {
    check(x.shape.dimensions() > 0 && x.shape.last() > 0, "RMS norm takes rows of channels");
    const RowSizes sizes{x.elements() / x.shape.last(), x.shape.last()};
    check_elements(rstd, DType::fp32, sizes.rows, "rstd");
    if (weight) check_elements(weight, x.dtype, sizes.channels, "weight");
    return sizes;
}

// `in` is (N,IC), `weight` (OC,IC) and `out` (N,OC). `out` may be a gradient.
MatmulSizes matmul_sizes(const Tensor& out, const Tensor& in, const Tensor& weight) {
    check(weight.shape.dimensions() > 0 && weight.shape.last() > 0, "a weight is (OC,IC)");
    const std::int64_t IC = weight.shape.last();
    const std::int64_t OC = weight.elements() / IC;
    check(in.shape.dimensions() > 0, "the input is rows of IC");
    const std::int64_t N = in.elements() / IC;
    check_dtype(weight, out.dtype, "weight");
    check_rows(in, out.dtype, N, IC, "in");
    check_rows(out, out.dtype, N, OC, "out");
    check(is_compute_dtype(out.dtype), "products are in a compute dtype");
    return {N, IC, OC};
}

// Checks `rows` rows with `count` heads of `size` elements.
void check_heads(const Heads& heads, DType dtype, std::int64_t rows, std::int64_t count, std::int64_t size,
                 std::string_view name) {
    check_dtype(heads.rows, dtype, name);
    const Shape& shape = heads.rows.shape;
    const std::int64_t row = shape.dimensions() > 0 ? shape.last() : 0;
    if (heads.count != count || heads.size != size) {
        programming_error(fmt::format("{} has {} heads of {} elements, not {} of {}", name, heads.count,
                                      heads.size, count, size));
    }
    if (heads.first < 0 || heads.first + count * size > row || heads.rows.elements() != rows * row) {
        programming_error(
            fmt::format("{}: {} heads of {} elements from element {} on do not lie in {} rows "
                        "of a tensor {}",
                        name, count, size, heads.first, rows, to_string(shape)));
    }
}

// Checks q, k and v, or their gradients.
void check_query_key_value(const Heads& q, const Heads& k, const Heads& v, DType dtype, std::int64_t rows,
                           std::int64_t heads, std::int64_t key_heads, std::int64_t size) {
    check_heads(q, dtype, rows, heads, size, "q");
    check_heads(k, dtype, rows, key_heads, size, "k");
    check_heads(v, dtype, rows, key_heads, size, "v");
}

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

HeadSizes attention_sizes(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                          const Heads& v, std::int64_t window) {
    check(out.shape.dimensions() == 4, "the output of attention is (B,T,H,D)");
    HeadSizes s{out.shape[0], out.shape[1], out.shape[2], out.shape[3]};
    s.key_heads = key_heads_of(k, s.heads);
    s.window = keys_seen(window, s.sequence);
    check_dtype(out, q.rows.dtype, "out");
    check_tensor(lse, DType::fp32, {s.batch, s.heads, s.sequence}, "lse");
    check_query_key_value(q, k, v, out.dtype, s.batch * s.sequence, s.heads, s.key_heads, s.head_size);
    return s;
}

// Whether both are heads in the same rows, and some elements belong to both.
bool overlap(const Heads& a, const Heads& b) {
    return a.rows.data == b.rows.data && a.first < b.first + b.count * b.size &&
           b.first < a.first + a.count * a.size;
}

// Only the first `columns` columns of the logits count.
RowSizes logits_sizes(const Tensor& logits, const Tensor& targets, std::int64_t columns) {
    check(logits.shape.dimensions() == 2, "logits are (N,Vp)");
    const RowSizes s{logits.shape[0], logits.shape[1]};
    check(columns >= 0 && columns <= s.channels, "the vocabulary lies inside the logits' columns");
    check_dtype(logits, logits.dtype, "logits");
    check_elements(targets, DType::int32, s.rows, "targets");
    return s;
}

void check_segments(std::span<const AdamWSegment> segments, std::int64_t elements) {
    std::int64_t previous_end = 0;
    for (const AdamWSegment& segment : segments) {
        check(segment.begin >= previous_end && segment.end >= segment.begin && segment.end <= elements,
              "segments are in increasing order inside the buffer");
        previous_end = segment.end;
    }
}

}  // namespace

EncoderSizes encoder_forward_sizes(const Tensor& out, const Tensor& tokens, const Tensor& wte,
                                   const Tensor& wpe) {
    return encoder_sizes(out, tokens, wte, wpe, out.dtype);
}

EncoderSizes encoder_backward_sizes(const Tensor& dwte, const Tensor& dwpe, const Tensor& dout,
                                    const Tensor& tokens) {
    return encoder_sizes(dout, tokens, dwte, dwpe, DType::fp32);
}

RowSizes layernorm_forward_sizes(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& in,
                                 const Tensor& gamma, const Tensor& beta) {
    const RowSizes s = layernorm_sizes(in, mean, rstd, gamma);
    check_rows(out, in.dtype, s.rows, s.channels, "out");
    if (beta) check_elements(beta, in.dtype, s.channels, "beta");
    return s;
}

RowSizes layernorm_backward_sizes(const Tensor& din, const Tensor& dgamma, const Tensor& dbeta,
                                  const Tensor& dout, const Tensor& in, const Tensor& gamma,
                                  const Tensor& mean, const Tensor& rstd) {
    const RowSizes s = layernorm_sizes(in, mean, rstd, gamma);
    check_rows(dout, in.dtype, s.rows, s.channels, "dout");
    if (din) check_rows(din, in.dtype, s.rows, s.channels, "din");
    check(dgamma || !dbeta, "dbeta is computed only together with dgamma");
    if (dgamma) check_elements(dgamma, DType::fp32, s.channels, "dgamma");
    if (dbeta) check_elements(dbeta, DType::fp32, s.channels, "dbeta");
    return s;
}

RowSizes fused_residual_layernorm_sizes(const Tensor& residual, const Tensor& out, const Tensor& mean,
                                        const Tensor& rstd, const Tensor& in1, const Tensor& in2,
                                        const Tensor& gamma, const Tensor& beta) {
    const RowSizes s = layernorm_forward_sizes(out, mean, rstd, residual, gamma, beta);
    check_rows(in1, residual.dtype, s.rows, s.channels, "in1");
    check_rows(in2, residual.dtype, s.rows, s.channels, "in2");
    return s;
}

RowSizes rmsnorm_forward_sizes(const Tensor& out, const Tensor& rstd, const Tensor& in,
                               const Tensor& weight) {
    const RowSizes s = rmsnorm_sizes(in, rstd, weight);
    check_rows(out, in.dtype, s.rows, s.channels, "out");
    return s;
}

RowSizes rmsnorm_backward_sizes(const Tensor& din, const Tensor& dweight, const Tensor& dout,
                                const Tensor& in, const Tensor& weight, const Tensor& rstd) {
    const RowSizes s = rmsnorm_sizes(in, rstd, weight);
    check_rows(dout, in.dtype, s.rows, s.channels, "dout");
    if (din) check_rows(din, in.dtype, s.rows, s.channels, "din");
    if (dweight) check_elements(dweight, DType::fp32, s.channels, "dweight");
    return s;
}

RowSizes fused_residual_rmsnorm_sizes(const Tensor& residual, const Tensor& out, const Tensor& rstd,
                                      const Tensor& in1, const Tensor& in2, const Tensor& weight) {
    const RowSizes s = rmsnorm_forward_sizes(out, rstd, residual, weight);
    check_rows(in1, residual.dtype, s.rows, s.channels, "in1");
    check_rows(in2, residual.dtype, s.rows, s.channels, "in2");
    return s;
}

MatmulSizes matmul_forward_sizes(const Tensor& out, const Tensor& in, const Tensor& weight,
                                 const Tensor& bias, const Tensor& pre_gelu) {
    const MatmulSizes s = matmul_sizes(out, in, weight);
    if (bias) check_elements(bias, out.dtype, s.out_channels, "bias");
    if (pre_gelu) check_rows(pre_gelu, out.dtype, s.rows, s.out_channels, "pre_gelu");
    return s;
}

MatmulSizes matmul_backward_sizes(const Tensor& din, const Tensor& dweight, const Tensor& dbias,
                                  const Tensor& dout, const Tensor& in, const Tensor& weight,
                                  const Tensor& pre_gelu) {
    const MatmulSizes s = matmul_sizes(dout, in, weight);
    if (din) check_rows(din, dout.dtype, s.rows, s.in_channels, "din");
    if (dweight) check_elements(dweight, DType::fp32, weight.elements(), "dweight");
    if (dbias) check_elements(dbias, DType::fp32, s.out_channels, "dbias");
    if (pre_gelu) check_rows(pre_gelu, dout.dtype, s.rows, s.in_channels, "pre_gelu");
    return s;
}

RowSizes swiglu_forward_sizes(const Tensor& out, const Tensor& in) {
    check(out.shape.dimensions() > 0 && out.shape.last() > 0, "SwiGLU makes rows of F");
    const RowSizes s{out.elements() / out.shape.last(), out.shape.last()};
    check_rows(in, out.dtype, s.rows, 2 * s.channels, "in");
    return s;
}

RowSizes swiglu_backward_sizes(const Tensor& din, const Tensor& dout, const Tensor& in) {
    const RowSizes s = swiglu_forward_sizes(dout, in);
    check_rows(din, dout.dtype, s.rows, 2 * s.channels, "din");
    return s;
}

HeadSizes attention_forward_sizes(const Tensor& out, const Tensor& lse, const Heads& q, const Heads& k,
                                  const Heads& v, std::int64_t window) {
    return attention_sizes(out, lse, q, k, v, window);
}

HeadSizes attention_backward_sizes(const Heads& dq, const Heads& dk, const Heads& dv, const Tensor& dout,
                                   const Heads& q, const Heads& k, const Heads& v, const Tensor& out,
                                   const Tensor& lse, std::int64_t window) {
    const HeadSizes s = attention_sizes(out, lse, q, k, v, window);
    check_tensor(dout, out.dtype, out.shape, "dout");
    check_query_key_value(dq, dk, dv, out.dtype, s.batch * s.sequence, s.heads, s.key_heads, s.head_size);
    check(!overlap(dq, dk) && !overlap(dq, dv) && !overlap(dk, dv), "the gradients have places of their own");
    return s;
}

CachedHeadSizes attention_cached_forward_sizes(const Tensor& out, const Tensor& cache, const Heads& q,
                                               const Heads& k, const Heads& v, std::int64_t position,
                                               std::int64_t window) {
    check(out.shape.dimensions() == 3, "the output of attention is (n,H,D)");
    check(cache.shape.dimensions() == 4, "the cache is (T,2,K,D)");
    CachedHeadSizes s{out.shape[0], cache.shape[0], out.shape[1], out.shape[2]};
    s.key_heads = key_heads_of(k, s.heads);
    s.window = keys_seen(window, s.capacity);
    check_dtype(out, q.rows.dtype, "out");
    check_tensor(cache, out.dtype, {s.capacity, 2, s.key_heads, s.head_size}, "cache");
    check_query_key_value(q, k, v, out.dtype, s.rows, s.heads, s.key_heads, s.head_size);
    check(position >= 0 && position + s.rows <= s.capacity, "the cache has room for the rows");
    return s;
}

RowSizes classifier_sizes(const Tensor& logits, const Tensor& losses, const Tensor& targets,
                          std::int64_t vocabulary) {
    check(vocabulary > 0, "the vocabulary is not empty");
    const RowSizes s = logits_sizes(logits, targets, vocabulary);
    check_elements(losses, DType::fp32, s.rows, "losses");
    return s;
}

RowSizes classifier_statistics_sizes(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                                     std::int64_t columns, std::int64_t first_column) {
    check(first_column >= 0, "first_column is at least 0");
    const RowSizes s = logits_sizes(logits, targets, columns);
    check_tensor(statistics, DType::fp32, {s.rows, classifier_statistics_numbers}, "statistics");
    return s;
}

ClassifierSizes classifier_from_statistics_sizes(const Tensor& logits, const Tensor& losses,
                                                 const Tensor& all_statistics, const Tensor& targets,
                                                 std::int64_t columns, std::int64_t first_column) {
    check(first_column >= 0, "first_column is at least 0");
    const RowSizes s = logits_sizes(logits, targets, columns);
    check_elements(losses, DType::fp32, s.rows, "losses");
    check(all_statistics.shape.dimensions() == 3 && all_statistics.shape[0] > 0, "statistics are (R,N,3)");
    const std::int64_t ranks = all_statistics.shape[0];
    check_tensor(all_statistics, DType::fp32, {ranks, s.rows, classifier_statistics_numbers},
                 "all_statistics");
    return {s.rows, s.channels, ranks};
}

void check_terms(const ClassifierTerms& terms) {
    check(terms.cap >= 0 && terms.z_loss >= 0, "the classifier's cap and z-loss are at least 0");
}

void check_soft_cap(const Tensor& out, const Tensor& in, float cap) {
    check(cap > 0, "a cap is above 0");
    check_dtype(in, in.dtype, "in");
    check_elements(out, in.dtype, in.elements(), "out");
}

namespace {

void check_rounding(const StochasticRounding& rounding) {
    check(rounding.first_element % 4 == 0, "the buffer's first element has an index that is a multiple of 4");
}

}  // namespace

void check_accumulate(const Tensor& out, const Tensor& in, const StochasticRounding& rounding) {
    check_elements(out, DType::bf16, out.elements(), "out");
    check_elements(in, in.dtype == DType::bf16 ? DType::bf16 : DType::fp32, out.elements(), "in");
    check_rounding(rounding);
}

void check_adamw(const AdamWOperands& o, std::span<const AdamWSegment> segments, const AdamWStep& step,
                 const std::optional<StochasticRounding>& rounding,
                 const std::optional<StochasticRounding>& rounding_of_moments,
                 const EightBitMoments& in_8_bits) {
    const std::int64_t n = o.parameters.elements();
    check_dtype(o.parameters, o.parameters.dtype, "parameters");
    const bool has_master = o.master.dtype != o.parameters.dtype;
    check_elements(o.master, has_master ? DType::fp32 : o.parameters.dtype, n, "master");
    check(has_master || o.parameters.data == o.master.data,
          "without a master copy, the parameters take its place");
    const DType moments = o.m.dtype == DType::bf16 || o.m.dtype == DType::uint8 ? o.m.dtype : DType::fp32;
    if (moments == DType::uint8) {
        check(n % eight_bit_block == 0, "moments in 8 bits are whole blocks");
        check_elements(in_8_bits.m_amax, DType::fp32, n / eight_bit_block, "m_amax");
        check_elements(in_8_bits.v_amax, DType::fp32, n / eight_bit_block, "v_amax");
        check_elements(in_8_bits.v, DType::fp32, in_8_bits.m.elements(), "small v");
        for (const AdamWSegment& segment : segments)
            check(segment.in_small < 0 ||
                      segment.in_small + segment.end - segment.begin <= in_8_bits.m.elements(),
                  "a small tensor lies in the buffer of small ones");
    }
    check_elements(o.m, moments, n, "m");
    check_elements(o.v, moments, n, "v");
    const bool alike = o.gradients.dtype == o.parameters.dtype;
    check_elements(o.gradients, alike ? o.parameters.dtype : DType::fp32, n, "gradients");
    check_elements(o.norm_squared, DType::fp64, 1, "norm_squared");
    check(has_master || o.parameters.dtype == DType::fp32 || rounding,
          "without a master copy, parameters are rounded at random");
    check(!rounding || o.parameters.dtype == DType::bf16, "stochastic rounding is to bf16");
    check(rounding_of_moments.has_value() == (moments == DType::bf16),
          "moments in bf16 are rounded at random");
    for (const auto& random : {rounding, rounding_of_moments})
        if (random) check_rounding(*random);
    check(step.step >= 1, "AdamW's steps count from 1");
    check_segments(segments, n);
}

}  // namespace llmc
