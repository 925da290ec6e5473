// Tensor parallelism: ranks that share each product of a layer, by its outputs (whole heads of q, k and v; the first product
// of the MLP) or by its inputs (the products that follow), and what they tell each other around these.
//
// Without sequence parallelism every rank has the whole residual stream. With it each has the rows of some tokens: of the
// B*T tokens in their order, rank r of R has the r-th of R equal runs, in tensors of shape (B,T/R,C).
#pragma once

#include <optional>

#include "llmc/comm/communicator.h"
#include "llmc/core/tensor.h"
#include "llmc/model/config.h"
#include "llmc/model/units.h"

namespace llmc {

// How the layers are shared, for sizes.
struct TensorSplit {
    int ranks = 1;
    bool sequence_parallel = false;

    // Tokens of a sequence of which a rank has the residual stream.
    std::int64_t stream_tokens(const GPTConfig& config) const {
        return sequence_parallel ? config.sequence_length / ranks : config.sequence_length;
    }
    std::int64_t heads(const GPTConfig& config) const { return config.heads / ranks; }
    std::int64_t wide_channels(const GPTConfig& config) const { return 4 * config.channels / ranks; }
    // Columns of the logits that are stored.
    std::int64_t padded_vocabulary(const GPTConfig& config) const {
        const std::int64_t multiple = vocabulary_multiple * ranks;
        return (config.vocabulary + multiple - 1) / multiple * vocabulary_multiple;
    }
};

class TensorParallel {
  public:
    TensorParallel() = default;  // one rank has all
    // The ranks as a communicator of the device's data, which outlives this.
    TensorParallel(Communicator& group, const TensorSplit& split) : group_(&group), split_(split) {}

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

    // The same ranks, of which each has the whole residual stream.
    TensorParallel with_whole_stream() const {
        TensorParallel ranks = *this;
        ranks.split_.sequence_parallel = false;
        return ranks;
    }

    // all = the ranks' own, one after the other, among which is this one's
    void gather(const Tensor& all, const Tensor& own) const {
        if (!is_silent_) group_->all_gather(all, own);
    }

    // Before a product that is shared by its outputs: the stream of all tokens, in `gathered` where a rank has only some.
    //   own X (B,T/R,C) or (B,T,C), gathered X (B,T,C); returns X (B,T,C)
    Tensor enter(const Tensor& own, const std::optional<Tensor>& gathered) const;
    // Behind a product that is shared by its inputs, of which each rank made an addend: their sum, of the rank's own tokens.
    //   addend X (B,T,C) is overwritten; returns its part X (B,T/R,C), or all of it
    Tensor leave(const Tensor& addend) const;
    // What is added once.
    Tensor of_one(const Tensor& bias) const { return rank() == 0 ? bias : Tensor{}; }
    // The gradient of what each rank has whole, made from all tokens: of one where those of all ranks will be summed
    // (sums_replicated), as those are that each makes from its own tokens.
    Tensor of_one_if_summed(const Tensor& gradient) const {
        return sums_replicated() ? of_one(gradient) : gradient;
    }
    bool sums_replicated() const { return divides_tokens(); }
    // Whether each has the residual stream of some tokens.
    bool divides_tokens() const { return is_shared() && split_.sequence_parallel; }

  private:
    Communicator* group_ = nullptr;
    TensorSplit split_{};
    bool is_silent_ = false;
};

}  // namespace llmc
