#include "llmc/model/cached_forward.h"

#include <algorithm>

#include "llmc/model/embedding.h"

namespace llmc {

namespace {

// The first n rows of so many columns in a buffer.
Tensor first_rows(const Tensor& buffer, std::int64_t n, std::int64_t columns) {
    return buffer.flat(0, n * columns).view({1, n, columns});
}

// ln_1 of x X (1,n,C)
Tensor normalised(Ops& ops, const Tensor& x, const BlockTensors& p, const BlockActivations<Tensor>& saved) {
    const std::int64_t n = x.shape[1];
    const Tensor out = first_rows(saved.ln_1, n, x.shape.last());
    ops.layernorm_forward(out, saved.ln_1_mean.flat(0, n), saved.ln_1_rstd.flat(0, n), x, p.ln_1_weight,
                          p.ln_1_bias);
    return out;
}

// Keeps the new rows of a block's input, and returns ln_1 of all rows up to them.
Tensor normalised_again(Ops& ops, const TensorParallel& ranks, const Tensor& rows, const RowRange& range,
                        const BlockTensors& p, const Tensor& inputs, const BlockActivations<Tensor>& saved,
                        const BlockScratch<Tensor>& scratch) {
    const std::int64_t C = rows.shape.last(), end = range.position + range.count;
    const std::int64_t own = inputs.shape[1];
    const std::int64_t first_own = ranks.divides_tokens() ? ranks.rank() * own : 0;
    const std::int64_t first = std::max(range.position, first_own), last = std::min(end, first_own + own);
    if (first < last) {
        ops.copy(inputs.flat((first - first_own) * C, (last - first) * C),
                 rows.flat((first - range.position) * C, (last - first) * C));
    }
    // Ranks that gather give the same number of rows each; of those that are not there yet nothing is read.
    const Tensor known = first_rows(inputs, ranks.divides_tokens() ? own : end, C);
    return first_rows(ranks.enter(normalised(ops, known, p, saved), scratch.gathered), end, C);
}

}  // namespace

void embedding_cached_forward(Ops& ops, const TensorParallel& ranks, const Tensor& rows,
                              const RowRange& range, const Tensor& tokens, const Tensor& wte,
                              const Tensor& wpe, const BlockScratch<Tensor>& scratch) {
    embedding_forward(ops, ranks.with_whole_stream(), rows, tokens, wte,
                      wpe.slice(range.position, range.count),
                      first_rows(scratch.channels, range.count, rows.shape.last()));
}

void block_cached_forward(Ops& ops, const TensorParallel& ranks, const Tensor& rows, const RowRange& range,
                          const BlockTensors& p, const std::optional<Tensor>& inputs,
                          const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch) {
    const TensorParallel whole = ranks.with_whole_stream();
    const std::int64_t n = range.count, C = rows.shape.last();
    const std::int64_t T = saved.qkv.shape[1], NH = saved.qkv.shape[3], HS = saved.qkv.shape[4];
    const std::int64_t wide = p.fc_bias.elements();

    const Tensor cache = saved.qkv.flat(0, T * 2 * NH * HS).view({T, 2, NH, HS});
    const Tensor in = inputs ? normalised_again(ops, ranks, rows, range, p, *inputs, saved, scratch)
                             : normalised(ops, rows, p, saved);
    const std::int64_t made = in.shape[1];  // rows: the new ones, or all
    const Tensor qkv = first_rows(scratch.qkv, made, 3 * NH * HS);
    ops.matmul_forward(qkv, in, p.qkv_weight, p.qkv_bias);
    const Tensor attention = first_rows(saved.attention, made, NH * HS);
    ops.attention_cached_forward(attention.view({made, NH, HS}), cache, qkv.view({made, 3, NH, HS}),
                                 range.position + n - made);
    const Tensor of_rows = attention.flat((made - n) * NH * HS, n * NH * HS).view({1, n, NH * HS});

    const Tensor addend = first_rows(scratch.channels, n, C), h = first_rows(saved.residual, n, C);
    const Tensor ln_2 = first_rows(saved.ln_2, n, C), gelu = first_rows(saved.gelu, n, wide);
    ops.matmul_forward(addend, of_rows, p.proj_weight, whole.of_one(p.proj_bias));
    ops.fused_residual_layernorm_forward(h, ln_2, saved.ln_2_mean.flat(0, n), saved.ln_2_rstd.flat(0, n),
                                         rows, whole.leave(addend), p.ln_2_weight, p.ln_2_bias);
    ops.matmul_forward(gelu, ln_2, p.fc_weight, p.fc_bias, first_rows(saved.pre_gelu, n, wide));
    ops.matmul_forward(addend, gelu, p.mlp_proj_weight, whole.of_one(p.mlp_proj_bias));
    ops.add(rows, h, whole.leave(addend));
}

}  // namespace llmc
