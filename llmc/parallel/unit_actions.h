// What a step's list does with a unit's parameters and gradients around the parts of the model that use them: where they
// are in memory, gradients that begin and end in a backward pass and are reduced, the norm, the update, and making
// parameters whole again. build_step.h puts the parts of the model between these.
#pragma once

#include "llmc/parallel/build_step.h"

namespace llmc {

class UnitActions {
  public:
    // Adds its actions to the step's list. Both outlive it.
    UnitActions(const StepSpec& spec, Step& step)
        : spec_(spec), sharding_(spec.sharding), part_(spec.part), step_(step) {}

    BufferUse whole_parameters(int unit) const {
        return {BufferRole::parameters, place_of_parameters(sharding_, unit, part_), unit};
    }
    // What the backward pass adds a unit's gradients to: they themselves, or the sums of this micro-batch alone.
    BufferUse sums(int unit) const;

    // A part of the model needs a unit's parameters no more for now.
    void release(int unit);
    // Before the first action of a pass that writes a unit's gradients, and after the last one.
    struct Round {
        bool is_first, is_last;  // of the unit's in this step
    };
    void begin(int unit, Round round);
    void end(int unit, Round round);
    // Adds the shard that was received last to the sum. A part later than its reduction, which the backward pass need not
    // wait for.
    void accumulate_received();

    void reduce_loss();
    void norm_and_update();
    // Parameters of every unit made whole, on ranks that have set a shard.
    void publish_all();

  private:
    template <class F>
    void for_each_unit(F&& f) const;
    int micro_batches() const { return spec_.pipeline.micro_batches; }
    bool has_others() const {
        return sharding_.ranks() > 1 || spec_.pipeline.stages > 1 || spec_.tensor.ranks > 1;
    }
    // In so many rounds a unit's gradients are made.
    int rounds(int unit) const { return micro_batches() * part_.unit(unit).rounds; }
    bool accumulates_shards(int unit) const { return sharding_.accumulates_shards(rounds(unit)); }
    // Whether the whole gradients are those of one round.
    bool starts_afresh(int unit, Round round) const { return round.is_first || accumulates_shards(unit); }

    // What the rank's update makes.
    BufferUse own_parameters(int unit) const;
    BufferUse whole_gradients(int unit) const {
        return {BufferRole::gradients, place_of_gradients(sharding_, rounds(unit), unit, part_), unit};
    }
    // The rank's shard of the sum over ranks and micro-batches.
    BufferUse reduced(int unit) const;

    void add(Action action) { step_.actions.push_back(std::move(action)); }
    void communicate(Action action);
    // Where there are data ranks to talk to.
    void communicate_data(Action action);
    void make_room(int unit);
    void sum_replicated(int unit);
    void reduce(int unit, Round round);
    void gather_gradients(int unit);
    void finish_tied();
    void publish(int unit);

    const StepSpec& spec_;
    const Sharding& sharding_;
    const StagePart& part_;
    Step& step_;
    int received_ = -1;  // the unit whose shard waits to be added to the sum, if there is one
};

}  // namespace llmc
