#include "llmc/model/embedding.h"

namespace llmc {

namespace {

// Of the table, the rank's part begins here; nothing where it has all.
std::optional<std::int64_t> first_row(const TensorParallel& ranks, const Tensor& wte) {
    if (!ranks.is_shared()) return std::nullopt;
    return ranks.rank() * wte.shape[0];
}

}  // namespace

void embedding_forward(Ops& ops, const TensorParallel& ranks, const Tensor& out, const Tensor& tokens,
                       const Tensor& wte, const Tensor& wpe, const Tensor& scratch) {
    // Each token's row is added by the rank that has it, and the positions by one.
    const bool has_all_tokens = out.elements() == scratch.elements();
    const Tensor& addend = has_all_tokens ? out : scratch;
    ops.encoder_forward(addend, tokens, wte, ranks.of_one(wpe), first_row(ranks, wte));
    const Tensor sum = ranks.leave(addend);
    if (!has_all_tokens) ops.copy(out, sum);
}

void embedding_backward(Ops& ops, const TensorParallel& ranks, const Tensor& dwte, const Tensor& dwpe,
                        const Tensor& dout, const Tensor& tokens, const std::optional<Tensor>& gathered) {
    ops.encoder_backward(dwte, dwpe, ranks.enter(dout, gathered), tokens, first_row(ranks, dwte));
}

}  // namespace llmc
