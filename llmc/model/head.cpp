#include "llmc/model/head.h"

#include <algorithm>

namespace llmc {

namespace {

void layernorm(Ops& ops, const Tensor& x, const HeadTensors& p, const HeadActivations<Tensor>& saved) {
    ops.layernorm_forward(saved.ln_f, saved.ln_f_mean, saved.ln_f_rstd, x, p.ln_f_weight, p.ln_f_bias);
}

// Calls f(logits, first row) for each group of rows, the logits computed.
template <class F>
void for_each_rows(Ops& ops, const HeadTensors& p, const HeadActivations<Tensor>& saved, F&& f) {
    const Tensor input = saved.ln_f.rows();
    const std::int64_t rows = input.shape[0];
    for (std::int64_t first = 0; first < rows; first += saved.logits.shape[0]) {
        const Tensor logits = saved.logits.slice(0, std::min(saved.logits.shape[0], rows - first));
        ops.matmul_forward(logits, input.slice(first, logits.shape[0]), p.wte, {});
        f(logits, first);
    }
}

}  // namespace

std::int64_t head_rows(const GPTConfig& config, std::int64_t batch, DType dtype, std::int64_t logits_bytes) {
    const std::int64_t row_bytes = config.padded_vocabulary() * static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t fit = logits_bytes / row_bytes;
    // Whole tiles of the products, where there are some.
    constexpr std::int64_t tile = 128;
    return std::clamp<std::int64_t>(fit > tile ? fit / tile * tile : fit, 1, batch * config.sequence_length);
}

HeadActivations<BufferId> lay_out_head(MemoryLayout& layout, const GPTConfig& config, std::int64_t batch,
                                       DType dtype, std::int64_t rows) {
    const std::int64_t B = batch, T = config.sequence_length, C = config.channels;
    const auto add = [&](const char* what, DType type, const Shape& shape) {
        return layout.add(ArenaKind::activations, std::string("head.") + what, type, shape);
    };
    return {.ln_f = add("ln_f", dtype, {B, T, C}),
            .ln_f_mean = add("ln_f_mean", DType::fp32, {B, T}),
            .ln_f_rstd = add("ln_f_rstd", DType::fp32, {B, T}),
            .dln_f = add("dln_f", dtype, {B, T, C}),
            .logits = add("logits", dtype, {rows, config.padded_vocabulary()}),
            .losses = add("losses", DType::fp32, {B, T})};
}

void head_forward(Ops& ops, const GPTConfig& config, const Tensor& x, const Tensor& targets,
                  const HeadTensors& p, const HeadActivations<Tensor>& saved) {
    layernorm(ops, x, p, saved);
    for_each_rows(ops, p, saved, [&](const Tensor& logits, std::int64_t first) {
        const std::int64_t count = logits.shape[0];
        ops.fused_classifier(logits, saved.losses.flat(first, count), targets.flat(first, count),
                             config.vocabulary, 0.0F, false);
    });
}

void head_forward_backward(Ops& ops, const GPTConfig& config, const Tensor& dx, const Tensor& x,
                           const Tensor& targets, float scale, const HeadTensors& p, const HeadTensors& g,
                           const HeadActivations<Tensor>& saved) {
    layernorm(ops, x, p, saved);
    for_each_rows(ops, p, saved, [&](const Tensor& logits, std::int64_t first) {
        const std::int64_t count = logits.shape[0];
        ops.fused_classifier(logits, saved.losses.flat(first, count), targets.flat(first, count),
                             config.vocabulary, scale, true);
        ops.matmul_backward(saved.dln_f.rows().slice(first, count), g.wte, {}, logits,
                            saved.ln_f.rows().slice(first, count), p.wte);
    });
    ops.fill(dx, 0.0F);
    ops.layernorm_backward(dx, g.ln_f_weight, g.ln_f_bias, saved.dln_f, x, p.ln_f_weight, saved.ln_f_mean,
                           saved.ln_f_rstd);
}

Tensor head_logits(Ops& ops, const Tensor& x, std::int64_t position, const HeadTensors& p,
                   const HeadActivations<Tensor>& saved) {
    const HeadActivations<Tensor> row{
        .ln_f = saved.ln_f.rows().slice(0, 1),
        .ln_f_mean = saved.ln_f_mean.flat(0, 1),
        .ln_f_rstd = saved.ln_f_rstd.flat(0, 1),
        .dln_f = {},
        .logits = saved.logits.slice(0, 1),
        .losses = {},
    };
    layernorm(ops, x.rows().slice(position, 1), p, row);
    ops.matmul_forward(row.logits, row.ln_f, p.wte, {});
    return row.logits;
}

}  // namespace llmc
