// A run in memory: the model, its optimizer and its place in the data. What it does is one step, a
// validation, a sample, or moving its state to files and back; when, is train_gpt.cu's business.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/data/samples.h"
#include "llmc/device/arenas.h"
#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/metrics.h"
#include "llmc/parallel/executor.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"

namespace llmc {

// Called between the parts of what takes long, with the share that is done; gives it up by returning false.
using Watch = std::function<bool(double share)>;

class Trainer {
  public:
    // Allocates the plan's memory and initialises the weights from the seed or from --init, unless a checkpoint
    // is to be resumed. `world` talks of host memory, `data_ranks` of the device's. All arguments outlive it.
    Trainer(const Options& options, const RunPlan& plan, Device& device, Communicator& world,
            Communicator& data_ranks, bool resumes = false);

    Device& device() { return device_; }
    const Arenas& arenas() const { return arenas_; }
    ParameterStore& store() { return store_; }
    const Progress& progress() const { return progress_; }

    // Has the device meet every operation, and choose how it computes it: as it did `earlier` (Device::adopt_choices; rank
    // 0's counts), where it can, or as rank 0 measures. All ranks call it, after the weights are there, and choose alike.
    void choose_algorithms(std::string_view earlier);

    // The next step. UserError on all ranks if its loss or gradient is not finite, which names the first tensor that
    // is not.
    StepMetrics train_step(const TrainingSamples& samples);

    // UserError if a weight or moment is not finite: what must not be saved. One rank does it alone.
    void require_finite();

    // Mean loss in nats per token over the first `windows` windows; nothing if it was given up. All ranks take
    // part and receive it; `watch` must tell them the same.
    std::optional<double> validate(const ValidationWindows& validation, std::int64_t windows,
                                   const Watch& watch);

    // Continues a prompt of at least one token by `count` tokens, with the options' temperature and top-k;
    // returns the new ones, nothing if it was given up. Of the same prompt, weights and step always the same.
    // One rank does it alone.
    std::optional<std::vector<std::int32_t>> generate(std::span<const std::int32_t> prompt,
                                                      std::int64_t count, const Watch& watch);

    void resume(const CheckpointInfo& checkpoint);

  private:
    AdamWStep adamw_step() const;
    std::optional<std::uint64_t> rounding_seed() const;  // of stochastic rounding, where it is asked for
    std::optional<double> model_flops_utilization(double tokens_per_second) const;

    const Options& options_;
    const RunPlan& plan_;
    Device& device_;
    Communicator& world_;
    Communicator& data_ranks_;
    Arenas arenas_;
    ParameterStore store_;
    Executor executor_;
    Schedule schedule_;
    Progress progress_;
};

}  // namespace llmc
