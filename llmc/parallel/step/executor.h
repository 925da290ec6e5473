// Runs a step's list of actions on a device, with the parameters of the store and the activation buffers.
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
#include "llmc/parallel/mesh_groups.h"
#include "llmc/parallel/step/activations.h"
#include "llmc/parallel/step/step.h"
#include "llmc/parallel/step/step_streams.h"
#include "llmc/parallel/step/token_feed.h"
#include "llmc/parallel/zero/parameter_store.h"

namespace llmc {

// The results of a step, on all ranks.
struct StepResults {
    double loss_sum;      // sum of the losses of the last training or evaluation step
    double norm_squared;  // squared norm of the last training step's gradients
};

// How a training step updates.
struct Update {
    UpdateStep step{}, others{};  // of the optimizer, and of Optimizer::others
    double norm_squared = 0;      // of the gradients (StepResults), where the host updates
    // For stochastic rounding of weights; unset: they are rounded to nearest. For that of state in bf16.
    std::optional<std::uint64_t> rounding_seed{}, state_seed{};
};

// The inputs of a run of a list.
struct StepInput {
    // Fills a micro-batch's inputs and targets, int32 (sequences, T) each.
    std::function<void(int micro_batch, std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>
        load{};
    std::int64_t sequences = 0;  // in a micro-batch; at most the buffers' batch
    // The number of a training step. If set, the last micro-batch also asks `load` for the next step's first
    // micro-batch, as number `micro_batches` (one more than this step's last).
    std::optional<std::int64_t> step{};
    float loss_scale = 0;             // gradients are those of loss_scale * (sum of losses)
    std::uint64_t gradient_seed = 0;  // rounds sums of gradients in bf16
    // For lists with updates: the pending update. Without one, the list leaves parameters as they are.
    std::optional<Update> update{};
    // For generation: the rows of the one sequence to compute. `load` puts their tokens at the start of the
    // inputs. Earlier runs of the same list have computed the rows before them.
    RowRange rows{};
    bool records_amax = false;  // of the operands of products in 8 bits
    // Called after the forward pass of each micro-batch of an evaluation, on the ranks with the head.
    // `losses` are those of its tokens, fp32 (sequences, T), before the next ones overwrite them.
    std::function<void(int micro_batch, const Tensor& losses)> see_losses{};
};

class Executor {
  public:
    // Binds the buffers once. All arguments outlive the executor. `micro_batches` is the number in a training
    // step. With `overlap`, communication overlaps with computing.
    Executor(const ModelLists& lists, Device& device, const MeshGroups& groups, const ParameterStore& store,
             const ActivationBuffers<Tensor>& activations, int micro_batches, bool overlap);

    // Runs a list. A device with streams continues with it after this returns.
    void run(const Step& step, const StepInput& input);
    // Waits for the device.
    StepResults results() const;
    // For products in 8 bits with delayed scaling: the greatest magnitude by which each operand is scaled from now on
    // (first_amax).
    void set_amax(std::span<const float> amax);
    // The greatest magnitudes that the last training step saw, or record_weights(), on all ranks; those of operands
    // that nobody has seen are 0.
    std::vector<float> recorded_amax() const;
    // Records the greatest magnitudes of the matrices of products in 8 bits. All ranks call it.
    void record_weights();
    // The time of each phase of the last list, after results().
    PhaseTimes times() { return streams_->times(); }
    // See StepStreams.
    void watch_actions(bool on) { streams_->watch_actions(on); }
    std::span<const ActionTime> action_times() { return streams_->action_times(); }

    // Performs the computations of a list except the norm and the update, without communication, on the tokens
    // 0, 1, ..., vocabulary - 1, 0, ... The device thus sees the shape of every product. `rows` is for generation.
    void autotune(const Step& step, std::int64_t sequences, std::int64_t vocabulary,
                  const RowRange& rows = {});

    // Calls the operations of a list that autotune() leaves out; only for a device that loads (Device::set_loading).
    // `update` is as that of a training step.
    void load_code(const Step& step, const Update& update);

    // The logits of the last generation step: (1, padded vocabulary) in the compute dtype, on the ranks with
    // the head.
    const Tensor& logits() const { return logits_; }

  private:
    // Performs an action of the list, or begins the transfer that it is.
    TransferTest start(const Action& action);
    bool is_left_out(const Action& action) const;
    void perform(const Action& action);
    void load(const Action& action);
    // Runs one of the lists of a part of the model.
    void run_part(const Action& action, const List& list);
    void forward_rows(const Action& action);
    PartMemory memory_of(const Action& action) const;
    Running running(const RowRange& rows) const;
    void sum_losses(const Action& action);
    // Goes over to a list, and begins it.
    void take(const Step& step, const StepInput& input);
    void begin();
    TransferTest transfer(const Action& action);
    void gather_parameters(int unit);
    void reduce_scatter(const Action& action);
    void gather_gradients(int unit);
    void accumulate(const Action& action);
    void accumulate_shard(const Action& action);
    // Tells a round of this step from all others (Ops::accumulate).
    std::int64_t round_count(std::int64_t round) const;
    Tensor received_shard(const BufferUse& use) const;
    void reduce_loss();
    void reduce_amax();
    void square(const Action& action);
    void gather_squares();
    void norm();
    Tensor squares_of(int unit) const;
    void momentum(int unit);
    void gather_directions(int unit);
    void orthogonalise(int unit);
    void copy_directions(const Action& action);
    // The operations of the device that updates, and the norm there.
    Ops& updating_ops() { return updates_on_host_ ? device_.host().ops() : ops_; }
    Tensor updating_norm();
    void update(int unit);
    void update_piece(const Action& action);
    void update(const UnitBuffers& of_unit, std::span<const UpdateGroup> groups, std::int64_t first_element);
    static int buffer_of(const Action& action);
    TransferTest transfer_from_or_to_disk(const Action& action);
    Tensor on_device(const BufferUse& use) const;
    void copy_between_host_and_device(const Action& action);

    // The first bytes of a part's parameters and of their gradient sums, in the order of the part; and those of its
    // amax.
    struct ParameterPlaces {
        std::vector<std::byte*> parameters, gradients, amax;
    };
    ParameterPlaces places_of(int number) const;
    // The rows of the table of amax: those that scale, and those that are recorded.
    Tensor scaling_amax() const { return activations_.amax.slice(0, 1); }
    Tensor seen_amax() const { return activations_.amax.slice(1, 1); }
    Tensor loss_sum() const { return activations_.results.flat(0, 1); }
    Tensor norm_squared() const { return activations_.results.flat(1, 1); }
    const Outline& outline() const { return *store_.part().outline; }
    const Outline::OutlinedPart& part_of(const Action& action) const { return outline().part(action.part); }
    const PartLists& lists_of(const Action& action) const { return lists_.of(part_of(action)); }
    // The residual stream, or its gradient, that an action reads or writes: of the sequences of this run, or
    // the rows of generation.
    Tensor stream(const Action& action, std::span<const BufferUse> uses) const;
    Tensor gradient(std::span<const BufferUse> uses) const;
    Tensor rows(int width) const;

    const ModelLists& lists_;
    Device& device_;
    Ops& ops_;
    bool updates_on_host_;
    const MeshGroups& groups_;
    TensorParallel ranks_;
    const ParameterStore& store_;
    ActivationBuffers<Tensor> activations_;
    TokenFeed feed_;
    std::vector<TokenBuffers<Tensor>> tokens_;  // by micro-batch
    // Pointers to the kept activations, by slot and by the part's position in its chunk.
    std::vector<std::vector<std::vector<std::byte*>>> kept_;
    std::vector<std::vector<std::byte*>> output_gradients_;
    std::vector<std::byte*> scratch_, angles_, losses_;
    std::vector<ParameterPlaces> parameters_;  // by the model's part; empty for parts of other stages
    Tensor logits_;
    double norm_on_host_ = 0;  // squared, of the pending update
    HostMemory staged_amax_;   // where copies of the host's amax to the device begin
    // The current list.
    const Step* step_ = nullptr;
    const StepInput* input_ = nullptr;
    std::unique_ptr<StepStreams> streams_;
};

}  // namespace llmc
