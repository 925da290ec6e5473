#include "llmc/model/block.h"

namespace llmc {

BlockTensors::BlockTensors(const UnitLayout& layout, const Tensor& flat)
    : ln_1_weight(layout.view(flat, "ln_1.weight")),
      ln_1_bias(layout.view(flat, "ln_1.bias")),
      qkv_weight(layout.view(flat, "attn.c_attn.weight").rows()),
      qkv_bias(layout.view(flat, "attn.c_attn.bias")),
      proj_weight(layout.view(flat, "attn.c_proj.weight")),
      proj_bias(layout.view(flat, "attn.c_proj.bias")),
      ln_2_weight(layout.view(flat, "ln_2.weight")),
      ln_2_bias(layout.view(flat, "ln_2.bias")),
      fc_weight(layout.view(flat, "mlp.c_fc.weight")),
      fc_bias(layout.view(flat, "mlp.c_fc.bias")),
      mlp_proj_weight(layout.view(flat, "mlp.c_proj.weight")),
      mlp_proj_bias(layout.view(flat, "mlp.c_proj.bias")) {}

namespace {

// Of making a tensor again.
enum class Cost { low, high };

bool is_kept(Cost cost, RecomputeKind kind) {
    return kind == RecomputeKind::none || (kind == RecomputeKind::selective && cost == Cost::high);
}

// add(name, cost, dtype, shape, member) for every tensor, in this order.
template <class Add>
BlockActivations<BufferId> block_activations(const GPTConfig& config, std::int64_t batch, DType dtype,
                                             Add&& add) {
    using enum Cost;
    using Buffers = BlockActivations<BufferId>;
    const std::int64_t B = batch, T = config.sequence_length, C = config.channels, NH = config.heads;
    const Shape channels = {B, T, C}, rows = {B, T}, wide = {B, T, 4 * C};
    return {.ln_1 = add("ln_1", low, dtype, channels, &Buffers::ln_1),
            .ln_1_mean = add("ln_1_mean", high, DType::fp32, rows, &Buffers::ln_1_mean),
            .ln_1_rstd = add("ln_1_rstd", high, DType::fp32, rows, &Buffers::ln_1_rstd),
            .qkv = add("qkv", high, dtype, Shape{B, T, 3, NH, C / NH}, &Buffers::qkv),
            .attention = add("attention", high, dtype, Shape{B, T, NH, C / NH}, &Buffers::attention),
            .lse = add("lse", high, DType::fp32, Shape{B, NH, T}, &Buffers::lse),
            .residual = add("residual", high, dtype, channels, &Buffers::residual),
            .ln_2 = add("ln_2", low, dtype, channels, &Buffers::ln_2),
            .ln_2_mean = add("ln_2_mean", high, DType::fp32, rows, &Buffers::ln_2_mean),
            .ln_2_rstd = add("ln_2_rstd", high, DType::fp32, rows, &Buffers::ln_2_rstd),
            .pre_gelu = add("pre_gelu", high, dtype, wide, &Buffers::pre_gelu),
            .gelu = add("gelu", low, dtype, wide, &Buffers::gelu)};
}

}  // namespace

BlockActivations<BufferId> lay_out_recomputed(MemoryLayout& layout, const GPTConfig& config,
                                              std::int64_t batch, DType dtype, RecomputeKind kind) {
    return block_activations(
        config, batch, dtype, [&](const std::string& what, Cost cost, DType type, const Shape& shape, auto) {
            return is_kept(cost, kind)
                       ? BufferId{}
                       : layout.add(ArenaKind::activations, "recomputed." + what, type, shape);
        });
}

BlockActivations<BufferId> lay_out_block_activations(MemoryLayout& layout, const std::string& name,
                                                     const GPTConfig& config, std::int64_t batch, DType dtype,
                                                     RecomputeKind kind,
                                                     const BlockActivations<BufferId>& recomputed) {
    return block_activations(
        config, batch, dtype,
        [&](const std::string& what, Cost cost, DType type, const Shape& shape, auto member) {
            return is_kept(cost, kind) ? layout.add(ArenaKind::activations, name + "." + what, type, shape)
                                       : recomputed.*member;
        });
}

BlockScratch<BufferId> lay_out_block_scratch(MemoryLayout& layout, const GPTConfig& config,
                                             std::int64_t batch, DType dtype) {
    const std::int64_t B = batch, T = config.sequence_length, C = config.channels, NH = config.heads;
    const auto add = [&](const char* what, const Shape& shape) {
        return layout.add(ArenaKind::activations, std::string("scratch.") + what, dtype, shape);
    };
    return {.channels = add("channels", {B, T, C}),
            .qkv = add("qkv", {B, T, 3, NH, C / NH}),
            .wide = add("wide", {B, T, 4 * C})};
}

namespace {

// All but y = h + GELU(...) W_mlp + b_mlp, of which the backward pass needs nothing.
void forward_to_gelu(Ops& ops, const Tensor& x, const BlockTensors& p, const BlockActivations<Tensor>& saved,
                     const BlockScratch<Tensor>& scratch) {
    ops.layernorm_forward(saved.ln_1, saved.ln_1_mean, saved.ln_1_rstd, x, p.ln_1_weight, p.ln_1_bias);
    const Tensor qkv = saved.qkv.view({x.shape[0], x.shape[1], 3 * x.shape[2]});
    ops.matmul_forward(qkv, saved.ln_1, p.qkv_weight, p.qkv_bias);
    ops.attention_forward(saved.attention, saved.lse, saved.qkv);
    ops.matmul_forward(scratch.channels, saved.attention.view(x.shape), p.proj_weight, p.proj_bias);
    ops.fused_residual_layernorm_forward(saved.residual, saved.ln_2, saved.ln_2_mean, saved.ln_2_rstd, x,
                                         scratch.channels, p.ln_2_weight, p.ln_2_bias);
    ops.matmul_forward(saved.gelu, saved.ln_2, p.fc_weight, p.fc_bias, saved.pre_gelu);
}

}  // namespace

void block_forward(Ops& ops, const Tensor& y, const Tensor& x, const BlockTensors& p,
                   const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    forward_to_gelu(ops, x, p, saved, scratch);
    ops.matmul_forward(scratch.channels, saved.gelu, p.mlp_proj_weight, p.mlp_proj_bias);
    ops.add(y, saved.residual, scratch.channels);
}

void block_recompute(Ops& ops, RecomputeKind kind, const Tensor& x, const BlockTensors& p,
                     const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    switch (kind) {
        case RecomputeKind::none:
            return;
        case RecomputeKind::selective:
            ops.layernorm_forward(saved.ln_1, saved.ln_1_mean, saved.ln_1_rstd, x, p.ln_1_weight,
                                  p.ln_1_bias);
            ops.layernorm_forward(saved.ln_2, saved.ln_2_mean, saved.ln_2_rstd, saved.residual, p.ln_2_weight,
                                  p.ln_2_bias);
            return ops.gelu_forward(saved.gelu, saved.pre_gelu);
        case RecomputeKind::block:
            return forward_to_gelu(ops, x, p, saved, scratch);
    }
}

void block_backward(Ops& ops, const Tensor& dx, const Tensor& x, const BlockTensors& p, const BlockTensors& g,
                    const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    ops.matmul_backward(scratch.wide, g.mlp_proj_weight, g.mlp_proj_bias, dx, saved.gelu, p.mlp_proj_weight,
                        saved.pre_gelu);
    ops.matmul_backward(scratch.channels, g.fc_weight, g.fc_bias, scratch.wide, saved.ln_2, p.fc_weight);
    ops.layernorm_backward(dx, g.ln_2_weight, g.ln_2_bias, scratch.channels, saved.residual, p.ln_2_weight,
                           saved.ln_2_mean, saved.ln_2_rstd);

    const Tensor attention = saved.attention.view(x.shape);
    ops.matmul_backward(scratch.channels, g.proj_weight, g.proj_bias, dx, attention, p.proj_weight);
    ops.attention_backward(scratch.qkv, scratch.channels.view(saved.attention.shape), saved.qkv,
                           saved.attention, saved.lse);
    const Tensor dqkv = scratch.qkv.view({x.shape[0], x.shape[1], 3 * x.shape[2]});
    ops.matmul_backward(scratch.channels, g.qkv_weight, g.qkv_bias, dqkv, saved.ln_1, p.qkv_weight);
    ops.layernorm_backward(dx, g.ln_1_weight, g.ln_1_bias, scratch.channels, x, p.ln_1_weight,
                           saved.ln_1_mean, saved.ln_1_rstd);
}

}  // namespace llmc
