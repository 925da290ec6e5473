// The forward pass of generation: of a few rows of one sequence, which follow those that a cache knows. It takes no
// memory of its own; the cache is where a training step saves activations, of its first sequence:
// - in place of qkv there are the keys and values of all rows so far (llmc/device/ops.h, attention_cached_forward);
// - a block that does not keep qkv (recompute.h) keeps its input of all rows instead, and makes the rest again each time.
// Ranks that share the layers each compute the whole rows, also where they divide the tokens of a training step; what
// such a rank keeps of a block's input are its own tokens.
#pragma once

#include <cstdint>
#include <optional>

#include "llmc/core/tensor.h"
#include "llmc/device/ops.h"
#include "llmc/model/block.h"
#include "llmc/model/tensor_parallel.h"

namespace llmc {

// Of a sequence: [position, position + count).
struct RowRange {
    std::int64_t position = 0, count = 1;
};

// rows = wte[tokens] + wpe[positions].   rows X (1,n,C), tokens int32 (1,n), wte and wpe as in embedding.h
void embedding_cached_forward(Ops& ops, const TensorParallel& ranks, const Tensor& rows,
                              const RowRange& range, const Tensor& tokens, const Tensor& wte,
                              const Tensor& wpe, const BlockScratch<Tensor>& scratch);

// rows = block(rows), as block_forward with the rows before; of these, and of the new ones, `saved` has the cache.
//   rows X (1,n,C) in place; inputs X (1,T,C), or a rank's own tokens of it: what the block keeps, where that is not qkv
void block_cached_forward(Ops& ops, const TensorParallel& ranks, const Tensor& rows, const RowRange& range,
                          const BlockTensors& parameters, const std::optional<Tensor>& inputs,
                          const BlockActivations<Tensor>& saved, const BlockScratch<Tensor>& scratch);

}  // namespace llmc
