// ZeRO and FSDP: which part of the model's state a data-parallel rank keeps, and where the rest lies while it
// is needed. A stage only decides where buffers lie. lay_out_store (store_layout.h) places them, and the
// step's list (build_step.h) gathers and reduces them. No other code knows the stage.
//
//   stage 0  every rank holds everything whole
//   stage 1  master weights and moments are sharded
//   stage 2  gradients too; a layer's whole gradients lie in one of two buffers that layers take in turn
//   stage 3  parameters too; a layer's whole parameters lie in one of a few buffers that layers take in turn
//
// Ranks form `replicas` groups of `shards` consecutive ranks. Each group holds the whole state, sharded over
// its ranks.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "llmc/core/memory_layout.h"
#include "llmc/parallel/pipeline/stage.h"

namespace llmc {

// The tiers in which state and parameters lie between their uses; elsewhere than in the device's memory, they are
// offloaded.
struct Offload {
    Tier state = Tier::device;       // master weights and moments
    Tier parameters = Tier::device;  // of layers: whole, or at stage 3 this rank's shard
    // Whether the device has memory of its own. What is offloaded then passes through the host's, and the host updates:
    // it gets the gradients, and has the parameters that it updates, besides offloaded optimizer state.
    bool has_own_memory = false;

    bool has_state() const { return state != Tier::device; }
    bool has_parameters() const { return parameters != Tier::device; }
    bool updates_on_host() const { return has_own_memory && has_state(); }
};

struct Sharding {
    int stage = 0;
    int shards = 1;    // ranks of a group (at stage 0, all ranks); rank r has shard r % shards
    int replicas = 1;  // groups; several are hybrid sharding
    // Gradients are reduced after each micro-batch, and the shards are added up. Otherwise they are reduced
    // once a step.
    bool reduces_each_micro_batch = false;
    // Whether no other layer's round comes between those of a layer. Its whole gradients then stay in their buffer
    // between them.
    bool rounds_are_consecutive = false;
    // Parameters are gathered, or brought from where they are offloaded, this many parts of the model ahead.
    int prefetch_units = 1;
    bool reshards_after_forward =
        true;  // stage 3: a block's parameters are gathered again for its backward pass

    Offload offload{};

    int ranks() const { return shards * replicas; }
    int shard_of(int rank) const { return rank % shards; }

    bool keeps_optimizer_whole() const { return stage == 0; }
    // A rank's sums of gradients are whole, even if each micro-batch is reduced.
    bool keeps_gradients_whole() const { return stage < 2; }
    bool keeps_parameters_whole() const { return stage < 3; }
    // The share of each kind of state that a rank keeps.
    double share_of_optimizer() const { return share(keeps_optimizer_whole()); }
    double share_of_gradients() const { return share(keeps_gradients_whole()); }
    double share_of_parameters() const { return share(keeps_parameters_whole()); }

    // How many parts of the model ahead parameters are read from a disk, copied to a device that has memory of its own,
    // and gathered at stage 3. Each of these that there is comes a part later than the one before.
    int read_ahead() const { return prefetch_units; }
    int uploaded_ahead() const { return later(offload.parameters == Tier::disk ? 1 : 0); }
    int gathered_ahead() const {
        return later((offload.parameters == Tier::disk ? 1 : 0) +
                     (offload.has_parameters() && offload.has_own_memory ? 1 : 0));
    }
    // From where they are offloaded, into the device's memory.
    int fetched_ahead() const { return offload.has_own_memory ? uploaded_ahead() : read_ahead(); }
    // The default of prefetch_units.
    int default_prefetch_units() const {
        return offload.has_parameters()
                   ? std::max(2, 1 + (offload.parameters == Tier::disk && offload.has_own_memory ? 1 : 0) +
                                     (keeps_parameters_whole() ? 0 : 1))
                   : 1;
    }

    // Whether a rank updates all that it keeps of the parameters, and the host what it keeps there.
    bool updates_what_it_keeps() const {
        return shards == 1 || keeps_optimizer_whole() || !keeps_parameters_whole();
    }
    bool updates_what_is_uploaded() const { return offload.updates_on_host() && updates_what_it_keeps(); }

    // The default of reduces_each_micro_batch: true if otherwise a rank would keep gradients whole until the end of the
    // step that could be sharded.
    bool reduces_each_micro_batch_by_default() const {
        return !keeps_gradients_whole() && !rounds_are_consecutive;
    }
    // Whether gradients that could be sharded stay whole until the step's last micro-batch.
    bool holds_back_gradients() const {
        return !keeps_gradients_whole() && !reduces_each_micro_batch && !rounds_are_consecutive;
    }
    // Whether reduced shards are added up: a unit's gradients are made in several rounds, and each is
    // reduced.
    bool accumulates_shards(int rounds) const {
        return reduces_each_micro_batch && rounds > 1 && ranks() > 1;
    }
    bool rotates_gradients(int rounds) const {
        return !keeps_gradients_whole() &&
               (reduces_each_micro_batch || rounds == 1 || rounds_are_consecutive);
    }
    // Whether reduced gradients have a buffer of their own. Otherwise they lie in the rank's part of the
    // whole gradients.
    bool keeps_gradient_shards(int rounds) const {
        return rotates_gradients(rounds) || accumulates_shards(rounds);
    }

    // The next ZeRO stage, which shards more; nullopt after the last, or with one rank. With
    // `default_reduction` it reduces at that stage's default time, otherwise at the same time as this one.
    std::optional<Sharding> next_stage(bool default_reduction) const;

    std::string description() const;

  private:
    double share(bool whole) const { return whole ? 1.0 : 1.0 / shards; }
    int later(int parts) const { return std::max(prefetch_units - parts, 0); }
};

// Whether a unit's parameters are offloaded. Those of units that share no buffers stay on the device.
bool are_parameters_offloaded(const Sharding& sharding, int unit, const StagePart& part);
// Whether the sums of a unit's gradients, made in several rounds, are in the host's memory between the rounds.
bool are_gradients_offloaded(const Sharding& sharding, int rounds, int unit, const StagePart& part);

// The unit whose buffer holds a unit's whole parameters, a rank's shard of them, what the host has of them, its whole
// gradients, a rank's shard of them, or its gradient sums of one micro-batch (with --gradient-dtype bf16). It is the
// unit itself; or, if layers of a class take buffers in turn, the first unit of the pipeline stage that has the buffer.
int place_of_parameters(const Sharding& sharding, int unit, const StagePart& part);
int place_of_parameter_shard(const Sharding& sharding, int unit, const StagePart& part);
int place_of_host_parameters(const Sharding& sharding, int unit, const StagePart& part);
int place_of_gradients(const Sharding& sharding, int rounds, int unit, const StagePart& part);
int place_of_gradient_shard(const Sharding& sharding, int rounds, int unit, const StagePart& part);
int place_of_gradient_sums(int unit, const StagePart& part);

}  // namespace llmc
