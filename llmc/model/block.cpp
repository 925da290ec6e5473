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

BlockActivations<BufferId> lay_out_block_activations(MemoryLayout& layout, const std::string& name,
                                                     const GPTConfig& config, std::int64_t batch,
                                                     DType dtype) {
    const std::int64_t B = batch, T = config.sequence_length, C = config.channels, NH = config.heads;
    const auto add = [&](const char* what, DType type, const Shape& shape) {
        return layout.add(ArenaKind::activations, name + "." + what, type, shape);
    };
    // Members are initialised in this order.
    return {.ln_1 = add("ln_1", dtype, {B, T, C}),
            .ln_1_mean = add("ln_1_mean", DType::fp32, {B, T}),
            .ln_1_rstd = add("ln_1_rstd", DType::fp32, {B, T}),
            .qkv = add("qkv", dtype, {B, T, 3, NH, C / NH}),
            .attention = add("attention", dtype, {B, T, NH, C / NH}),
            .lse = add("lse", DType::fp32, {B, NH, T}),
            .residual = add("residual", dtype, {B, T, C}),
            .ln_2 = add("ln_2", dtype, {B, T, C}),
            .ln_2_mean = add("ln_2_mean", DType::fp32, {B, T}),
            .ln_2_rstd = add("ln_2_rstd", DType::fp32, {B, T}),
            .pre_gelu = add("pre_gelu", dtype, {B, T, 4 * C}),
            .gelu = add("gelu", dtype, {B, T, 4 * C})};
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

void block_forward(Ops& ops, const Tensor& y, const Tensor& x, const BlockTensors& p,
                   const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    ops.layernorm_forward(saved.ln_1, saved.ln_1_mean, saved.ln_1_rstd, x, p.ln_1_weight, p.ln_1_bias);
    const Tensor qkv = saved.qkv.view({x.shape[0], x.shape[1], 3 * x.shape[2]});
    ops.matmul_forward(qkv, saved.ln_1, p.qkv_weight, p.qkv_bias);
    ops.attention_forward(saved.attention, saved.lse, saved.qkv);
    ops.matmul_forward(scratch.channels, saved.attention.view(x.shape), p.proj_weight, p.proj_bias);
    ops.fused_residual_layernorm_forward(saved.residual, saved.ln_2, saved.ln_2_mean, saved.ln_2_rstd, x,
                                         scratch.channels, p.ln_2_weight, p.ln_2_bias);
    ops.matmul_forward(saved.gelu, saved.ln_2, p.fc_weight, p.fc_bias, saved.pre_gelu);
    ops.matmul_forward(scratch.channels, saved.gelu, p.mlp_proj_weight, p.mlp_proj_bias);
    ops.add(y, saved.residual, scratch.channels);
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
