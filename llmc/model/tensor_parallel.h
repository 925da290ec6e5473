// Tensor parallelism: ranks that share each product of a layer, by its outputs or by its inputs, and what they tell each other
// around these (operations.h: gather, scatter).
//
// Without sequence parallelism every rank has the whole residual stream. With it each has the rows of some tokens: of the
// B*T tokens in their order, rank r of R has the r-th of R equal runs, in tensors of shape (B,T/R,C).
#pragma once

#include "llmc/comm/communicator.h"
#include "llmc/core/tensor.h"

namespace llmc {

// How the layers are shared, for sizes.
struct TensorSplit {
    int ranks = 1;
    bool sequence_parallel = false;

    // Tokens of a sequence of which a rank has the residual stream.
    std::int64_t tokens(std::int64_t of_sequence) const {
        return sequence_parallel ? of_sequence / ranks : of_sequence;
    }
};

class TensorParallel {
  public:
    TensorParallel() = default;  // one rank has all
    // The ranks as a communicator of the device's data, which outlives this.
    explicit TensorParallel(Communicator& group) : group_(&group) {}

    int size() const { return group_ ? group_->size() : 1; }
    int rank() const { return group_ ? group_->rank() : 0; }
    bool is_shared() const { return size() > 1; }
    Communicator& group() const { return *group_; }
    // The same ranks, of which one goes through its operations alone: nobody says anything.
    TensorParallel silent() const {
        TensorParallel ranks = *this;
        ranks.is_silent_ = true;
        return ranks;
    }

    // all = the ranks' own, one after the other, among which is this one's
    void gather(const Tensor& all, const Tensor& own) const {
        if (!is_silent_) group_->all_gather(all, own);
    }

    void all_reduce(const Tensor& x) const {
        if (!is_silent_) group_->all_reduce(x);
    }
    // own = the rank's own part of the sum of all
    void reduce_scatter(const Tensor& own, const Tensor& all) const {
        if (!is_silent_) group_->reduce_scatter(own, all);
    }

  private:
    Communicator* group_ = nullptr;
    bool is_silent_ = false;
};

}  // namespace llmc
