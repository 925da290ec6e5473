// A run in memory: the model, its optimizer and its place in the data. What it does is one step, a
// validation, a sample, or moving its state to files and back; when, is train_gpt.cu's business.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/data/samples.h"
#include "llmc/data/training_batches.h"
#include "llmc/device/arenas.h"
#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/metrics.h"
#include "llmc/parallel/executor.h"
#include "llmc/parallel/parameter_store.h"
#include "llmc/parallel/unit_transfer.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/diagnosis.h"
#include "llmc/train/options.h"

namespace llmc {

// Fills T inputs and T targets of a row (a sequence of its own); a target of ignored_target (-1) counts nothing.
using ReadRow =
    std::function<void(std::int64_t row, std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>;

// Called between the parts of what takes long, with the share that is done; gives it up by returning false.
using Watch = std::function<bool(double share)>;

class Trainer {
  public:
    // Allocates the plan's memory and initialises the weights from the seed or from --init, unless a checkpoint
    // is to be resumed. `world` talks of host memory, `groups` of the device's. All arguments outlive it. All ranks
    // make one at once, and call the functions below together.
    Trainer(const Options& options, const RunPlan& plan, Device& device, Communicator& world,
            const MeshGroups& groups, bool resumes = false);

    Device& device() { return device_; }
    const Arenas& arenas() const { return arenas_; }
    ParameterStore& store() { return store_; }
    // The ranks' state, for files.
    UnitTransfer& transfer() { return transfer_; }
    const Progress& progress() const { return progress_; }
    // Trained on since the first step.
    std::int64_t tokens() const { return progress_.samples * plan_.spec.model.sequence_length; }

    // Has the device meet every operation, and choose how it computes it: as it did `earlier` (Device::adopt_choices; rank
    // 0's counts), where it can, or as the first rank measures that has an operation. Samples continue so many tokens. After
    // the weights are there; all ranks choose alike.
    void choose_algorithms(std::string_view earlier, std::int64_t prompt_tokens);
    // Those of all stages (Device::choices).
    const std::string& algorithms() const { return algorithms_; }

    // The next step, of batches that the plan's share() divides. UserError on all ranks if its loss or gradient is not finite, which names the first tensor that
    // is not; and with `compares_replicas`, if ranks that must have the same parameters or optimizer state do not.
    StepMetrics train_step(TrainingBatches& batches, bool compares_replicas = false);

    // When the actions of steps ran (step_streams.h): whether that is measured, and of the last step.
    void watch_actions(bool on) { executor_.watch_actions(on); }
    std::span<const ActionTime> action_times() { return executor_.action_times(); }

    // UserError if a weight or moment is not finite: what must not be saved.
    void require_finite();

    // Mean loss in nats per token over the first `windows` windows; nothing if it was given up. All ranks receive it;
    // `watch` must tell them the same.
    std::optional<double> validate(const ValidationWindows& validation, std::int64_t windows,
                                   const Watch& watch);

    // The losses of each of so many rows in nats, summed over its targets; nothing if it was given up. Data ranks share the
    // rows; all ranks receive all sums; `watch` must tell them the same.
    std::optional<std::vector<double>> losses_of_rows(std::int64_t rows, const ReadRow& read,
                                                      const Watch& watch);

    // Continues a prompt of at least one token by `count` tokens, with the options' temperature, top-k and top-p;
    // returns the new ones, nothing if it was given up. Of the same prompt, weights and step always the same. `take`
    // is given each as soon as it is there. Where the text is longer than the model's context of T tokens, the last T of
    // the prompt count; when the context is full it begins anew with its later half, as positions are learned and those
    // of a window that moves on would all be others.
    // Where it takes all ranks, `watch` must tell them the same; otherwise one may do it alone.
    bool generates_together() const { return communicates(plan_.generation) || plan_.spec.mesh.tensor > 1; }
    std::optional<std::vector<std::int32_t>> generate(
        std::span<const std::int32_t> prompt, std::int64_t count, const Watch& watch,
        const std::function<void(std::int32_t token)>& take = [](std::int32_t) {});

    void resume(const CheckpointInfo& checkpoint);

    // To be said on all ranks when one has saved a checkpoint, which errors then point to.
    void saved() { has_checkpoint_ = true; }

  private:
    // The next token, from the logits of the last rows that were computed; the same on all ranks that took part.
    std::int32_t sample(double uniform);
    // How many rows generation computes at once: of a prompt, of a token, and where a full context begins anew.
    std::set<std::int64_t> row_counts(std::int64_t prompt_tokens) const;
    // Of the micro-batches that `load` fills, for first_non_finite.
    ForwardPasses forward_passes(int micro_batches,
                                 const std::function<void(int micro_batch, std::span<std::int32_t> inputs,
                                                          std::span<std::int32_t> targets)>& load);
    // The sum of the losses of all targets of so many rows, on all ranks; nothing if it was given up. `what` is named where it
    // is not finite. `see` is called where losses are made, with those of a row's T targets, fp32.
    std::optional<double> evaluate(std::string_view what, std::int64_t rows, const ReadRow& read,
                                   const std::function<void(std::int64_t row, std::span<const float>)>& see,
                                   const Watch& watch);
    void require_equal_replicas();
    AdamWStep adamw_step() const;
    std::optional<std::uint64_t> rounding_seed() const;  // of stochastic rounding, where it is asked for
    std::optional<double> model_flops_utilization(double tokens_per_second) const;
    std::string what_would_do() const;  // about numbers that are not finite

    const Options& options_;
    const RunPlan& plan_;
    Device& device_;
    Communicator& world_;
    Arenas arenas_;
    ParameterStore store_;
    UnitTransfer transfer_;
    Executor executor_;
    Schedule schedule_;
    Progress progress_;
    std::string algorithms_;
    std::int64_t first_step_ = 0;  // that was done before this run
    bool has_checkpoint_ = false;  // to go on from
};

}  // namespace llmc
