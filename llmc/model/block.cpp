#include "llmc/model/block.h"

namespace llmc {

namespace {

Tensor flattened(const Tensor& tensor) { return tensor.flat(0, tensor.elements()); }

}  // namespace

BlockTensors::BlockTensors(const UnitLayout& layout, const Tensor& flat)
    : ln_1_weight(layout.view(flat, "ln_1.weight")),
      ln_1_bias(layout.view(flat, "ln_1.bias")),
      qkv_weight(layout.view(flat, "attn.c_attn.weight").rows()),
      qkv_bias(flattened(layout.view(flat, "attn.c_attn.bias"))),
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
BlockActivations<BufferId> block_activations(const BlockSizes& sizes, Add&& add) {
    using enum Cost;
    using Buffers = BlockActivations<BufferId>;
    const GPTConfig& config = sizes.config;
    const std::int64_t B = sizes.batch, T = config.sequence_length, C = config.channels;
    const std::int64_t NH = sizes.split.heads(config), HS = config.head_size();
    const std::int64_t own_T = sizes.split.stream_tokens(config);
    const DType dtype = sizes.dtype;
    const Shape channels = {B, own_T, C}, rows = {B, own_T}, wide = {B, T, sizes.split.wide_channels(config)};
    return {.ln_1 = add("ln_1", low, dtype, channels, &Buffers::ln_1),
            .ln_1_mean = add("ln_1_mean", high, DType::fp32, rows, &Buffers::ln_1_mean),
            .ln_1_rstd = add("ln_1_rstd", high, DType::fp32, rows, &Buffers::ln_1_rstd),
            .qkv = add("qkv", high, dtype, Shape{B, T, 3, NH, HS}, &Buffers::qkv),
            .attention = add("attention", high, dtype, Shape{B, T, NH, HS}, &Buffers::attention),
            .lse = add("lse", high, DType::fp32, Shape{B, NH, T}, &Buffers::lse),
            .residual = add("residual", high, dtype, channels, &Buffers::residual),
            .ln_2 = add("ln_2", low, dtype, channels, &Buffers::ln_2),
            .ln_2_mean = add("ln_2_mean", high, DType::fp32, rows, &Buffers::ln_2_mean),
            .ln_2_rstd = add("ln_2_rstd", high, DType::fp32, rows, &Buffers::ln_2_rstd),
            .pre_gelu = add("pre_gelu", high, dtype, wide, &Buffers::pre_gelu),
            .gelu = add("gelu", low, dtype, wide, &Buffers::gelu)};
}

}  // namespace

BlockActivations<BufferId> lay_out_recomputed(MemoryLayout& layout, const BlockSizes& sizes,
                                              RecomputeKind kind) {
    return block_activations(sizes, [&](const std::string& what, Cost cost, DType type, const Shape& shape,
                                        auto) {
        return is_kept(cost, kind) ? BufferId{}
                                   : layout.add(ArenaKind::activations, "recomputed." + what, type, shape);
    });
}

BlockActivations<BufferId> lay_out_block_activations(MemoryLayout& layout, const std::string& name,
                                                     const BlockSizes& sizes, RecomputeKind kind,
                                                     const BlockActivations<BufferId>& recomputed) {
    return block_activations(
        sizes, [&](const std::string& what, Cost cost, DType type, const Shape& shape, auto member) {
            return is_kept(cost, kind) ? layout.add(ArenaKind::activations, name + "." + what, type, shape)
                                       : recomputed.*member;
        });
}

BlockOutputGradients<BufferId> lay_out_output_gradients(MemoryLayout& layout, const std::string& name,
                                                        const BlockSizes& sizes) {
    const GPTConfig& config = sizes.config;
    const std::int64_t B = sizes.batch, T = config.sequence_length, C = config.channels;
    const std::int64_t own_T = sizes.split.stream_tokens(config);
    const auto add = [&](const char* what, const Shape& shape) {
        return layout.add(ArenaKind::activations, name + ".d" + what, sizes.dtype, shape);
    };
    return {.ln_1 = add("ln_1", {B, own_T, C}),
            .qkv = add("qkv", {B, T, 3, sizes.split.heads(config), config.head_size()}),
            .proj = add("proj", {B, own_T, C}),
            .ln_2 = add("ln_2", {B, own_T, C}),
            .fc = add("fc", {B, T, sizes.split.wide_channels(config)}),
            .mlp_proj = add("mlp_proj", {B, own_T, C})};
}

BlockScratch<BufferId> lay_out_block_scratch(MemoryLayout& layout, const BlockSizes& sizes) {
    const GPTConfig& config = sizes.config;
    const std::int64_t B = sizes.batch, T = config.sequence_length, C = config.channels;
    const auto add = [&](const char* what, const Shape& shape) {
        return layout.add(ArenaKind::activations, std::string("scratch.") + what, sizes.dtype, shape);
    };
    BlockScratch<BufferId> scratch{
        .channels = add("channels", {B, T, C}),
        .qkv = add("qkv", {B, T, 3, sizes.split.heads(config), config.head_size()}),
        .wide = add("wide", {B, T, sizes.split.wide_channels(config)}),
        .gathered = {}};
    if (sizes.split.sequence_parallel) scratch.gathered = add("gathered", {B, T, C});
    return scratch;
}

namespace {

// (B,T,...) with the rest flattened.
Tensor by_token(const Tensor& tensor) {
    const Shape& shape = tensor.shape;
    return tensor.view({shape[0], shape[1], tensor.elements() / (shape[0] * shape[1])});
}

// All but y = h + GELU(...) W_mlp + b_mlp, of which the backward pass needs nothing.
void forward_to_gelu(Ops& ops, const TensorParallel& ranks, const Tensor& x, const BlockTensors& p,
                     const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    ops.layernorm_forward(saved.ln_1, saved.ln_1_mean, saved.ln_1_rstd, x, p.ln_1_weight, p.ln_1_bias);
    ops.matmul_forward(by_token(saved.qkv), ranks.enter(saved.ln_1, scratch.gathered), p.qkv_weight,
                       p.qkv_bias);
    ops.attention_forward(saved.attention, saved.lse, saved.qkv);
    ops.matmul_forward(scratch.channels, by_token(saved.attention), p.proj_weight, ranks.of_one(p.proj_bias));
    ops.fused_residual_layernorm_forward(saved.residual, saved.ln_2, saved.ln_2_mean, saved.ln_2_rstd, x,
                                         ranks.leave(scratch.channels), p.ln_2_weight, p.ln_2_bias);
    ops.matmul_forward(saved.gelu, ranks.enter(saved.ln_2, scratch.gathered), p.fc_weight, p.fc_bias,
                       saved.pre_gelu);
}

// What a backward pass makes.
struct BackwardParts {
    bool input = true, weight = true;
};

// `outputs` receive the gradients of the layers' outputs, or hold them where only the parameters' are made.
void backward(Ops& ops, const TensorParallel& ranks, BackwardParts makes, const Tensor& dx, const Tensor& x,
              const BlockTensors& p, const BlockTensors& g, const BlockOutputGradients<Tensor>& outputs,
              const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    const auto for_input = [&](const Tensor& tensor) { return makes.input ? tensor : Tensor{}; };
    // A gradient where `outputs` has it.
    const auto keep = [&](const Tensor& kept, const Tensor& gradient) {
        if (makes.input && kept.data != gradient.data) ops.copy(kept, gradient);
    };
    // A product's input, which only its parameters' gradients need.
    const auto input_of = [&](const Tensor& own) {
        return makes.weight || !scratch.gathered ? ranks.enter(own, scratch.gathered) : *scratch.gathered;
    };

    keep(outputs.mlp_proj, dx);
    ops.matmul_backward(for_input(outputs.fc), g.mlp_proj_weight, ranks.of_one_if_summed(g.mlp_proj_bias),
                        ranks.enter(outputs.mlp_proj, scratch.gathered), saved.gelu, p.mlp_proj_weight,
                        for_input(saved.pre_gelu));
    ops.matmul_backward(for_input(scratch.channels), g.fc_weight, g.fc_bias, outputs.fc, input_of(saved.ln_2),
                        p.fc_weight);
    if (makes.input) keep(outputs.ln_2, ranks.leave(scratch.channels));
    ops.layernorm_backward(for_input(dx), g.ln_2_weight, g.ln_2_bias, outputs.ln_2, saved.residual,
                           p.ln_2_weight, saved.ln_2_mean, saved.ln_2_rstd);

    keep(outputs.proj, dx);
    const Tensor attention = by_token(saved.attention);
    const Tensor dattention = scratch.channels.flat(0, attention.elements()).view(attention.shape);
    ops.matmul_backward(for_input(dattention), g.proj_weight, ranks.of_one_if_summed(g.proj_bias),
                        ranks.enter(outputs.proj, scratch.gathered), attention, p.proj_weight);
    if (makes.input)
        ops.attention_backward(outputs.qkv, dattention.view(saved.attention.shape), saved.qkv,
                               saved.attention, saved.lse);
    ops.matmul_backward(for_input(scratch.channels), g.qkv_weight, g.qkv_bias, by_token(outputs.qkv),
                        input_of(saved.ln_1), p.qkv_weight);
    if (makes.input) keep(outputs.ln_1, ranks.leave(scratch.channels));
    ops.layernorm_backward(for_input(dx), g.ln_1_weight, g.ln_1_bias, outputs.ln_1, x, p.ln_1_weight,
                           saved.ln_1_mean, saved.ln_1_rstd);
}

}  // namespace

void block_forward(Ops& ops, const TensorParallel& ranks, const Tensor& y, const Tensor& x,
                   const BlockTensors& p, const BlockActivations<Tensor>& saved,
                   const BlockScratch<Tensor>& scratch) {
    forward_to_gelu(ops, ranks, x, p, saved, scratch);
    ops.matmul_forward(scratch.channels, saved.gelu, p.mlp_proj_weight, ranks.of_one(p.mlp_proj_bias));
    ops.add(y, saved.residual, ranks.leave(scratch.channels));
}

void block_recompute(Ops& ops, const TensorParallel& ranks, RecomputeKind kind, const Tensor& x,
                     const BlockTensors& p, const BlockActivations<Tensor>& saved,
                     const BlockScratch<Tensor>& scratch) {
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
            return forward_to_gelu(ops, ranks, x, p, saved, scratch);
    }
}

void block_backward(Ops& ops, const TensorParallel& ranks, const Tensor& dx, const Tensor& x,
                    const BlockTensors& p, const BlockTensors& g, const BlockActivations<Tensor>& saved,
                    const BlockScratch<Tensor>& scratch) {
    // Each is read before its memory is written again: dx flows through, and the layernorms' lie where `leave` puts them.
    Tensor own = scratch.channels;
    if (scratch.gathered)
        own = scratch.channels.flat(ranks.rank() * dx.elements(), dx.elements()).view(dx.shape);
    const BlockOutputGradients<Tensor> outputs{
        .ln_1 = own, .qkv = scratch.qkv, .proj = dx, .ln_2 = own, .fc = scratch.wide, .mlp_proj = dx};
    backward(ops, ranks, {}, dx, x, p, g, outputs, saved, scratch);
}

void block_backward_input(Ops& ops, const TensorParallel& ranks, const Tensor& dx, const Tensor& x,
                          const BlockTensors& p, const BlockOutputGradients<Tensor>& outputs,
                          const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    backward(ops, ranks, {.weight = false}, dx, x, p, {}, outputs, saved, scratch);
}

void block_backward_weight(Ops& ops, const TensorParallel& ranks, const Tensor& x, const BlockTensors& p,
                           const BlockTensors& g, const BlockOutputGradients<Tensor>& outputs,
                           const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    backward(ops, ranks, {.input = false}, {}, x, p, g, outputs, saved, scratch);
}

}  // namespace llmc
