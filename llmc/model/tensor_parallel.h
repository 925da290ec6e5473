// Tensor parallelism: ranks divide each product of a layer, by its outputs or by its inputs, and exchange
// data around the products (operations.h: gather, scatter).
//
// Without sequence parallelism, every rank has the whole residual stream. With it, rank r of R has the r-th
// of R equal ranges of the B*T tokens of a micro-batch, in tensors of shape (B,T/R,C). For B > 1 these are
// not T/R tokens of each sequence.
#pragma once

#include "llmc/comm/communicator.h"
#include "llmc/core/tensor.h"

namespace llmc {

// How layers are divided, as far as sizes depend on it.
struct TensorSplit {
    int ranks = 1;
    bool sequence_parallel = false;

    // The number of tokens per sequence for which a rank has the residual stream, on average over a
    // micro-batch.
    std::int64_t tokens(std::int64_t of_sequence) const {
        return sequence_parallel ? of_sequence / ranks : of_sequence;
    }
};

class TensorParallel {
  public:
    TensorParallel() = default;  // a single rank
    // `group` transfers the device's data, and outlives this.
    explicit TensorParallel(Communicator& group) : group_(&group), size_(group.size()), rank_(group.rank()) {}

    int size() const { return size_; }
    int rank() const { return rank_; }
    bool is_shared() const { return size() > 1; }
    Communicator& group() const { return *group_; }
    // Ranks without communication: one of them runs its operations alone.
    static TensorParallel silent(int size, int rank = 0) {
        TensorParallel ranks;
        ranks.size_ = size;
        ranks.rank_ = rank;
        return ranks;
    }
    TensorParallel silent() const { return silent(size_, rank_); }

    // Gathers all ranks' parts into `all`, in order. `own`, this rank's part, lies in `all`.
    void gather(const Tensor& all, const Tensor& own) const {
        if (group_) group_->all_gather(all, own);
    }

    void all_reduce(const Tensor& x) const {
        if (group_) group_->all_reduce(x);
    }
    // own = this rank's part of the sum of all ranks' `all`
    void reduce_scatter(const Tensor& own, const Tensor& all) const {
        if (group_) group_->reduce_scatter(own, all);
    }

  private:
    Communicator* group_ = nullptr;
    int size_ = 1, rank_ = 0;
};

}  // namespace llmc
