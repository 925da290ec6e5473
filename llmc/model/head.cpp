#include "llmc/model/head.h"

#include <algorithm>

namespace llmc {

namespace {

void layernorm(Ops& ops, const Tensor& x, const HeadTensors& p, const HeadActivations<Tensor>& saved) {
    ops.layernorm_forward(saved.ln_f, saved.ln_f_mean, saved.ln_f_rstd, x, p.ln_f_weight, p.ln_f_bias);
}

// Of the vocabulary, those that a rank has.
struct Columns {
    std::int64_t first, count;
};
Columns columns_of(const TensorParallel& ranks, const GPTConfig& config, const Tensor& wte) {
    const std::int64_t stored = wte.shape[0], first = ranks.rank() * stored;
    return {first, std::clamp<std::int64_t>(config.vocabulary - first, 0, stored)};
}

// Losses, and with `writes` logits overwritten with their gradients, of some rows.
void classify(Ops& ops, const TensorParallel& ranks, const GPTConfig& config, const Columns& columns,
              const Tensor& logits, const Tensor& losses, const Tensor& targets, float scale, bool writes,
              const HeadActivations<Tensor>& saved) {
    if (!ranks.is_shared())
        return ops.fused_classifier(logits, losses, targets, config.vocabulary, scale, writes);
    const std::int64_t rows = logits.shape[0];
    const Tensor all = saved.statistics->flat(0, ranks.size() * rows * 3).view({ranks.size(), rows, 3});
    const Tensor own = all.slice(ranks.rank(), 1).view({rows, 3});
    ops.classifier_statistics(own, logits, targets, columns.count, columns.first);
    ranks.gather(all, own);
    ops.classifier_from_statistics(logits, losses, all, targets, columns.count, columns.first, scale, writes);
}

// Calls f(logits, input, first row) for each group of rows, the logits computed.
template <class F>
void for_each_rows(Ops& ops, const TensorParallel& ranks, const HeadTensors& p,
                   const HeadActivations<Tensor>& saved, F&& f) {
    const Tensor input = ranks.enter(saved.ln_f, saved.gathered).rows();
    const std::int64_t rows = input.shape[0];
    for (std::int64_t first = 0; first < rows; first += saved.logits.shape[0]) {
        const Tensor logits = saved.logits.slice(0, std::min(saved.logits.shape[0], rows - first));
        const Tensor these = input.slice(first, logits.shape[0]);
        ops.matmul_forward(logits, these, p.wte, {});
        f(logits, these, first);
    }
}

}  // namespace

std::int64_t head_rows(const BlockSizes& sizes, std::int64_t logits_bytes) {
    const std::int64_t row_bytes =
        sizes.split.padded_vocabulary(sizes.config) * static_cast<std::int64_t>(size_of(sizes.dtype));
    const std::int64_t fit = logits_bytes / row_bytes;
    // Whole tiles of the products, where there are some.
    constexpr std::int64_t tile = 128;
    return std::clamp<std::int64_t>(fit > tile ? fit / tile * tile : fit, 1,
                                    sizes.batch * sizes.config.sequence_length);
}

HeadActivations<BufferId> lay_out_head(MemoryLayout& layout, const BlockSizes& sizes, std::int64_t rows) {
    const GPTConfig& config = sizes.config;
    const std::int64_t B = sizes.batch, T = config.sequence_length, C = config.channels;
    const std::int64_t own_T = sizes.split.stream_tokens(config), R = sizes.split.ranks;
    const std::int64_t Vp = sizes.split.padded_vocabulary(config);
    const auto add = [&](const char* what, DType type, const Shape& shape) {
        return layout.add(ArenaKind::activations, std::string("head.") + what, type, shape);
    };
    HeadActivations<BufferId> head{.ln_f = add("ln_f", sizes.dtype, {B, own_T, C}),
                                   .ln_f_mean = add("ln_f_mean", DType::fp32, {B, own_T}),
                                   .ln_f_rstd = add("ln_f_rstd", DType::fp32, {B, own_T}),
                                   .dln_f = add("dln_f", sizes.dtype, {B, T, C}),
                                   .logits = add("logits", sizes.dtype, {rows, Vp}),
                                   .losses = add("losses", DType::fp32, {B, T}),
                                   .statistics = {},
                                   .all_columns = {},
                                   .gathered = {}};
    if (R > 1) {
        head.statistics = add("statistics", DType::fp32, {R, rows, 3});
        head.all_columns = add("all columns", sizes.dtype, {R, Vp});
    }
    if (sizes.split.sequence_parallel) head.gathered = add("gathered", sizes.dtype, {B, T, C});
    return head;
}

void head_forward(Ops& ops, const TensorParallel& ranks, const GPTConfig& config, const Tensor& x,
                  const Tensor& targets, const HeadTensors& p, const HeadActivations<Tensor>& saved) {
    layernorm(ops, x, p, saved);
    const Columns columns = columns_of(ranks, config, p.wte);
    for_each_rows(ops, ranks, p, saved, [&](const Tensor& logits, const Tensor&, std::int64_t first) {
        const std::int64_t count = logits.shape[0];
        classify(ops, ranks, config, columns, logits, saved.losses.flat(first, count),
                 targets.flat(first, count), 0.0F, false, saved);
    });
}

void head_forward_backward(Ops& ops, const TensorParallel& ranks, const GPTConfig& config, const Tensor& dx,
                           const Tensor& x, const Tensor& targets, float scale, const HeadTensors& p,
                           const HeadTensors& g, const HeadActivations<Tensor>& saved) {
    layernorm(ops, x, p, saved);
    const Columns columns = columns_of(ranks, config, p.wte);
    for_each_rows(ops, ranks, p, saved, [&](const Tensor& logits, const Tensor& input, std::int64_t first) {
        const std::int64_t count = logits.shape[0];
        classify(ops, ranks, config, columns, logits, saved.losses.flat(first, count),
                 targets.flat(first, count), scale, true, saved);
        ops.matmul_backward(saved.dln_f.rows().slice(first, count), g.wte, {}, logits, input, p.wte);
    });
    ops.fill(dx, 0.0F);
    ops.layernorm_backward(dx, g.ln_f_weight, g.ln_f_bias, ranks.leave(saved.dln_f), x, p.ln_f_weight,
                           saved.ln_f_mean, saved.ln_f_rstd);
}

Tensor head_logits(Ops& ops, const TensorParallel& ranks, const Tensor& row, const HeadTensors& p,
                   const HeadActivations<Tensor>& saved) {
    const Tensor input = saved.ln_f.flat(0, row.elements()).view(row.shape);
    ops.layernorm_forward(input, saved.ln_f_mean.flat(0, 1), saved.ln_f_rstd.flat(0, 1), row, p.ln_f_weight,
                          p.ln_f_bias);
    const Tensor logits = saved.logits.slice(0, 1);
    ops.matmul_forward(logits, input.rows(), p.wte, {});
    if (!ranks.is_shared()) return logits;
    // Whole rows, in the order of the tokens.
    const Tensor all = saved.all_columns->flat(0, ranks.size() * logits.elements());
    ranks.gather(all, logits.flat(0, logits.elements()));
    return all.view({1, all.elements()});
}

}  // namespace llmc
