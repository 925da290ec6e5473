// ZeRO and FSDP: which part of the model's state a data-parallel rank keeps, and where the rest of it lies while it is
// needed. A stage is only where a buffer lives: lay_out_store (parameter_store.h) puts the buffers there, and the
// step's list (build_step.h) brings them together; nothing else knows the stage.
//
//   stage 0  everything whole on every rank
//   stage 1  master weights and moments in shards
//   stage 2  gradients too; a layer's whole gradients live in one of two buffers that layers take in turn
//   stage 3  parameters too; a layer's whole parameters live in one of a few buffers that layers take in turn
//
// Ranks form `replicas` groups of `shards` neighbours. Each group holds the whole state, in shards.
#pragma once

#include <optional>
#include <string>

#include "llmc/parallel/stage.h"

namespace llmc {

struct Sharding {
    int stage = 0;
    int shards = 1;    // ranks of a group; rank r has shard r % shards. All ranks at stage 0
    int replicas = 1;  // groups: more than one is hybrid sharding
    // Gradients of each micro-batch are reduced, and accumulate in shards; otherwise those of the step, once.
    bool reduces_each_micro_batch = false;
    int prefetch_units = 1;  // stage 3: parameters are gathered so many parts of the model ahead
    bool reshards_after_forward =
        true;  // stage 3: a block's parameters are gathered again for its backward pass

    int ranks() const { return shards * replicas; }
    int shard_of(int rank) const { return rank % shards; }

    bool keeps_optimizer_whole() const { return stage == 0; }
    // A rank's sums of gradients, even where each micro-batch is reduced.
    bool keeps_gradients_whole() const { return stage < 2; }
    bool keeps_parameters_whole() const { return stage < 3; }
    // Of all of it, what a rank keeps at least.
    double share_of_optimizer() const { return share(keeps_optimizer_whole()); }
    double share_of_gradients() const { return share(keeps_gradients_whole()); }
    double share_of_parameters() const { return share(keeps_parameters_whole()); }

    // Unless a person wants it otherwise: where gradients are kept in shards, no whole ones wait for the step's end.
    bool usually_reduces_each_micro_batch() const { return !keeps_gradients_whole(); }
    // What could be in shards is whole until the step's last micro-batch.
    bool holds_back_gradients() const { return !keeps_gradients_whole() && !reduces_each_micro_batch; }
    // Where gradients are made in so many rounds, and each is reduced, the sums add up in shards.
    bool accumulates_shards(int rounds) const {
        return reduces_each_micro_batch && rounds > 1 && ranks() > 1;
    }
    bool rotates_gradients(int rounds) const {
        return !keeps_gradients_whole() && (reduces_each_micro_batch || rounds == 1);
    }
    // Whether the reduced gradients lie apart from the whole ones, or in these, at the rank's own part.
    bool keeps_gradient_shards(int rounds) const {
        return rotates_gradients(rounds) || accumulates_shards(rounds);
    }

    // The next stage, with more in shards, if there is one; with the reduction that is usual there, or this one's.
    std::optional<Sharding> next_stage(bool usual_reduction) const;

    std::string description() const;

  private:
    double share(bool whole) const { return whole ? 1.0 : 1.0 / shards; }
};

// The unit in whose buffer a unit's whole parameters lie, its whole gradients, and its gradient sums of one micro-batch
// (those that --gradient-dtype bf16 has beside the gradients): its own, or, where layers that are alike take turns, that of the
// stage's first one that uses it.
int place_of_parameters(const Sharding& sharding, int unit, const StagePart& part);
int place_of_gradients(const Sharding& sharding, int micro_batches, int unit, const StagePart& part);
int place_of_gradient_sums(int unit, const StagePart& part);

}  // namespace llmc
