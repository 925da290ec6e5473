// Adds a step's actions on units' parameters and gradients: releases, zeroing, rounding, reductions, the
// norm, updates, and gathers of updated parameters. build_step.h puts the parts of the model between
// these. GradientRounds tells it which parts begin and end the rounds of a unit's gradients.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "llmc/parallel/step/build_step.h"

namespace llmc {

class UnitActions {
  public:
    // Adds its actions to the step's list. Both outlive it.
    UnitActions(const StepSpec& spec, Step& step)
        : spec_(spec), sharding_(spec.sharding), part_(spec.part), step_(step) {}

    BufferUse whole_parameters(int unit) const {
        return {BufferRole::parameters, place_of_parameters(sharding_, unit, part_), unit};
    }
    // The buffer to which the backward pass adds a unit's gradients: the gradients, or the sums of this
    // micro-batch.
    BufferUse sums(int unit) const;

    // Ends the use of a unit's whole parameters for now.
    void release(int unit);
    // A round is one backward pass's addition to a unit's gradients. begin() is called before the first
    // action of a pass that writes them, and end() after the last one.
    struct Round {
        bool is_first, is_last;  // among the unit's rounds in this step
    };
    void begin(int unit, Round round);
    void end(int unit, Round round);
    // Adds the shard that was received last to the sum. It is called one part of the model after the
    // reduction, so that the backward pass does not wait for the reduction.
    void accumulate_received();

    void reduce_loss();
    void norm();
    // The update of each of these units in turn, and then the gather of its parameters if ranks update shares of them.
    // With `releases`, parameters on a disk are given back at once.
    void update(std::span<const int> units, bool releases);
    // Gathers every unit's parameters on ranks that keep them whole and have set a shard.
    void gather_all_updated();
    // A unit's parameters in a tier, from or to which they are copied: at stage 3 those of the rank's shard.
    static BufferUse parameters_in(Tier tier, const Sharding& sharding, int unit, const StagePart& part);

  private:
    template <class F>
    void for_each_unit(F&& f) const;
    int micro_batches() const { return spec_.pipeline.micro_batches; }
    bool has_others() const {
        return sharding_.ranks() > 1 || spec_.pipeline.stages > 1 || spec_.tensor.ranks > 1;
    }
    // The number of rounds of a unit in a step.
    int rounds(int unit) const { return micro_batches() * part_.unit(unit).rounds; }
    bool accumulates_shards(int unit) const { return sharding_.accumulates_shards(rounds(unit)); }
    // Whether the whole gradients contain only one round.
    bool starts_afresh(int unit, Round round) const { return round.is_first || accumulates_shards(unit); }

    // The parameters that the rank's update writes.
    BufferUse own_parameters(int unit) const;
    BufferUse whole_gradients(int unit) const {
        return {BufferRole::gradients, place_of_gradients(sharding_, rounds(unit), unit, part_), unit};
    }
    // The rank's shard of the sum over ranks and micro-batches.
    BufferUse reduced(int unit) const;

    void add(Action action) { step_.actions.push_back(std::move(action)); }
    void communicate(Action action);
    // Adds an action only if there are several data-parallel ranks.
    void communicate_data(Action action);
    void make_room(int unit);
    void sum_replicated(int unit);
    void reduce(int unit, Round round);
    void gather_gradients(int unit);
    void finish_tied();
    BufferUse kept_gradients(int unit) const;
    BufferUse gradients_on_host(int unit) const { return {BufferRole::gradients, unit, unit, Tier::host}; }
    bool leave_device(int unit) const {
        return are_gradients_offloaded(sharding_, rounds(unit), unit, part_);
    }
    void bring_gradients(int unit, const BufferUse& to);
    void give_gradients(int unit, bool are_complete);
    void square(int unit);
    const Offload& offload() const { return sharding_.offload; }
    BufferUse parameters_in(Tier tier, int unit) const { return parameters_in(tier, sharding_, unit, part_); }
    Action update_of(int unit, const BufferUse& state) const;
    void make_directions(int unit, const BufferUse& state);
    // Where this rank's directions are when it uses them.
    BufferUse own_directions(int unit) const {
        return {BufferRole::directions, 0, unit, offload().updates_on_host() ? Tier::host : Tier::device};
    }
    void update_from_disk(std::span<const int> units, bool releases);
    void move_parameters(ActionKind kind, int unit, Tier from, Tier to);
    void finish_updated(int unit, bool releases, bool is_on_host);
    void gather_updated(int unit);
    bool are_offloaded(int unit) const { return are_parameters_offloaded(sharding_, unit, part_); }

    const StepSpec& spec_;
    const Sharding& sharding_;
    const StagePart& part_;
    Step& step_;
    std::map<int, int> ended_{};  // the rounds so far of each unit
    int received_ = -1;           // the unit whose received shard waits to be added to the sum, if any
    int received_round_ = 0;      // the number of its round
    bool received_last_ = false;  // whether that is the unit's last one
};

// Finds the first and the last part that add to a unit's gradients, within each backward pass and within the
// step. A round is one backward pass's addition to a unit's gradients.
class GradientRounds {
  public:
    GradientRounds() = default;
    // `passes` are those of a stage, in their order.
    GradientRounds(const StepSpec& spec, std::span<const Pass> passes);

    // A pass by its position among these, its kind, and its chunk among the stage's.
    struct PassPlace {
        int number;
        PassKind kind;
        int chunk;
    };
    using Units = std::vector<std::pair<int, UnitActions::Round>>;
    // The units whose gradients a pass begins to compute at this part, or finishes at this part.
    Units begun_by(const PassPlace& pass, int part) const {
        return units_at(pass, part, &FirstLast::first_part);
    }
    Units ended_by(const PassPlace& pass, int part) const {
        return units_at(pass, part, &FirstLast::last_part);
    }

  private:
    using ChunkOfPass = std::pair<PassKind, int>;
    // For one unit: the first and the last pass that compute its gradients, and the first and the last such
    // part of each pass.
    struct FirstLast {
        int first, last;
        std::map<ChunkOfPass, int> first_part{}, last_part{};
    };
    Units units_at(const PassPlace& pass, int part, std::map<ChunkOfPass, int> FirstLast::*parts) const;

    const Outline* outline_ = nullptr;
    std::map<int, FirstLast> first_last_;
};

}  // namespace llmc
