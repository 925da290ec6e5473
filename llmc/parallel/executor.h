// Runs a step: the list of actions on a device, with the store's parameters and the activation buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/device/device.h"
#include "llmc/device/ops.h"
#include "llmc/model/config.h"
#include "llmc/parallel/activations.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/parallel/phase.h"
#include "llmc/parallel/step.h"
#include "llmc/parallel/streams.h"

namespace llmc {

// What a run of a list takes from outside.
struct StepInput {
    // Fills inputs and targets, int32 (sequences, T) each, of a micro-batch.
    std::function<void(int micro_batch, std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>
        load;
    std::int64_t sequences = 0;  // of a micro-batch; at most the buffers' batch
    float loss_scale = 0;        // gradients are those of loss_scale * (sum of losses)
    AdamWStep adamw{};
    std::optional<std::uint64_t> rounding_seed{};  // of stochastic rounding; without it the nearest is taken
};

class Executor {
  public:
    // The buffers are bound once; `data` is the communicator of the data-parallel ranks. All outlive the
    // executor. With `overlap` gradients are reduced while the backward pass goes on.
    Executor(const GPTConfig& config, Device& device, Communicator& data, const ParameterStore& store,
             const ActivationBuffers<Tensor>& activations, bool overlap);

    // Afterwards loss_sum() and norm_squared() are those of this step; returns where the time went.
    PhaseTimes run(const Step& step, const StepInput& input);

    // The sum of the losses that the last training or evaluation step made on all ranks. Waits for the
    // device.
    double loss_sum() const { return read_scalar(activations_.loss_sum); }
    double norm_squared() const { return read_scalar(activations_.norm_squared); }

    // Logits X (1,Vp) of one position of the first sequence, after a generation step.
    Tensor logits(std::int64_t position);

  private:
    void perform(const Action& action, const StepInput& input);
    void load(const Action& action, const StepInput& input);
    void forward(const Action& action, std::int64_t sequences);
    void backward(const Action& action, const StepInput& input);
    void reduce_scatter(int unit);
    void all_gather(int unit);
    void square();
    void gather_squares();
    void norm();
    Tensor squares_of(int unit) const;
    void update(int unit, const StepInput& input);

    // Parameters, or gradients, of a block and of the head.
    BlockTensors block_tensors(int block, Tensor UnitBuffers<Tensor>::*flat) const;
    HeadTensors head_tensors(Tensor UnitBuffers<Tensor>::*flat) const;
    Tensor tensor_of(int unit, Tensor UnitBuffers<Tensor>::*flat, std::string_view param) const;
    double read_scalar(const Tensor& scalar) const;

    GPTConfig config_;
    Device& device_;
    Ops& ops_;
    Communicator& data_;
    const ParameterStore& store_;
    ActivationBuffers<Tensor> activations_;
    std::vector<std::int32_t> host_inputs_, host_targets_;
    Streams streams_;
};

}  // namespace llmc
