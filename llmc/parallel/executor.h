// Runs a step: the list of actions on a device, with the store's parameters and the activation buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "llmc/device/device.h"
#include "llmc/device/ops.h"
#include "llmc/model/model.h"
#include "llmc/parallel/activations.h"
#include "llmc/parallel/mesh_groups.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/parallel/phase.h"
#include "llmc/parallel/step.h"
#include "llmc/parallel/step_streams.h"
#include "llmc/parallel/token_feed.h"

namespace llmc {

// What a step made, on all ranks.
struct StepResults {
    double loss_sum;      // of the last training or evaluation step
    double norm_squared;  // of the last training step's gradients
};

// What a run of a list takes from outside.
struct StepInput {
    // Fills inputs and targets, int32 (sequences, T) each, of a micro-batch.
    std::function<void(int micro_batch, std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>
        load;
    std::int64_t sequences = 0;  // of a micro-batch; at most the buffers' batch
    // Of a training step: its number. While it computes, `load` is then asked for the next one's first micro-batch
    // too, by the number of micro-batches of this one.
    std::optional<std::int64_t> step{};
    float loss_scale = 0;  // gradients are those of loss_scale * (sum of losses)
    AdamWStep adamw{};
    // Of generation: the rows of its one sequence that are computed, whose tokens `load` puts first. Those before them
    // were computed last, by the same list.
    RowRange rows{};
    // Called before the first update, with all ranks at the same place.
    std::function<void()> before_update{};
    std::optional<std::uint64_t> rounding_seed{};  // of stochastic rounding; without it the nearest is taken
    // Called where the head is after the forward pass of each micro-batch of an evaluation, with the losses of its tokens,
    // fp32 (sequences, T), before the next ones overwrite them.
    std::function<void(int micro_batch, const Tensor& losses)> see_losses{};
};

class Executor final : private Performer {
  public:
    // The buffers are bound once. All outlive the executor. A training step has
    // so many micro-batches. With `overlap` communication goes on beside computing.
    Executor(const ModelLists& lists, Device& device, const MeshGroups& groups, const ParameterStore& store,
             const ActivationBuffers<Tensor>& activations, int micro_batches, bool overlap);

    // A device with queues goes on with it after this returns.
    void run(const Step& step, const StepInput& input);
    // Waits for the device.
    StepResults results() const;
    // Where the time of the last list went, after results().
    PhaseTimes times() { return streams_->times(); }
    // Each action's time, as in StepStreams.
    void watch_actions(bool on) { streams_->watch_actions(on); }
    std::span<const ActionTime> action_times() { return streams_->action_times(); }

    // Performs what a list computes before its first update, with any tokens and no other ranks, so that the device
    // meets every operation with its shape. `rows` is of generation.
    void rehearse(const Step& step, std::int64_t sequences, const RowRange& rows = {});

    // X (1,Vp), of the last generation step, where the head is.
    const Tensor& logits() const { return logits_; }

  private:
    void perform(const Action& action) override;
    bool is_done(const Action& action) override;
    void load(const Action& action);
    // A part of the model by one of its lists.
    void run_part(const Action& action, const List& list);
    void forward_rows(const Action& action);
    PartMemory memory_of(const Action& action) const;
    Running running(const RowRange& rows) const;
    void sum_losses(const Action& action);
    void transfer(const Action& action);
    void gather_parameters(int unit);
    void reduce_scatter(const Action& action);
    void gather_gradients(int unit);
    Tensor received_shard(const BufferUse& use) const;
    void reduce_loss();
    void square();
    void gather_squares();
    void norm();
    Tensor squares_of(int unit) const;
    void update(int unit);

    // Where a part's parameters and their gradient sums begin, in the order of the part.
    struct ParameterPlaces {
        std::vector<std::byte*> parameters, gradients;
    };
    ParameterPlaces places_of(const Outline::OutlinedPart& part) const;
    Tensor loss_sum() const { return activations_.results.flat(0, 1); }
    Tensor norm_squared() const { return activations_.results.flat(1, 1); }
    const TokenBuffers<Tensor>& tokens_of(const Action& action) const {
        return tokens_[static_cast<std::size_t>(action.slot)];
    }
    const Outline& outline() const { return *store_.part().outline; }
    const Outline::OutlinedPart& part_of(const Action& action) const { return outline().part(action.part); }
    const PartLists& lists_of(const Action& action) const { return lists_.of(part_of(action)); }
    // The stream, or its gradient, that an action reads or writes; of the sequences of this run, or the rows of generation.
    Tensor stream(const Action& action, std::span<const BufferUse> uses) const;
    Tensor gradient(std::span<const BufferUse> uses) const;
    Tensor rows(int width) const;

    const ModelLists& lists_;
    Device& device_;
    Ops& ops_;
    const MeshGroups& groups_;
    TensorParallel ranks_;
    const ParameterStore& store_;
    ActivationBuffers<Tensor> activations_;
    TokenFeed feed_;
    std::vector<TokenBuffers<Tensor>> tokens_;  // of the micro-batch in each slot
    // First bytes, for the lists: of each slot and place in a chunk what is kept.
    std::vector<std::vector<std::vector<std::byte*>>> kept_;
    std::vector<std::vector<std::byte*>> output_gradients_;
    std::vector<std::byte*> scratch_, losses_;
    std::vector<ParameterPlaces> parameters_;  // by the model's part; none of other stages
    Tensor logits_;
    // Of the list that runs.
    const Step* step_ = nullptr;
    const StepInput* input_ = nullptr;
    bool updates_ = false;        // whether it has come to its first update
    std::vector<int> transfers_;  // what was begun between stages, by its place in the list
    std::unique_ptr<StepStreams> streams_;
};

}  // namespace llmc
