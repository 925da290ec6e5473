// A run in memory: the model, its optimizer and its position in the data. It performs one step, one
// validation or one sample, and moves its state to files and back. train_gpt.cu decides when.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/data/samples.h"
#include "llmc/data/training_batches.h"
#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/metrics.h"
#include "llmc/parallel/step/executor.h"
#include "llmc/parallel/zero/checkpoint_share.h"
#include "llmc/parallel/zero/parameter_store.h"
#include "llmc/parallel/zero/unit_transfer.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/diagnosis.h"
#include "llmc/train/fp8_scaling.h"
#include "llmc/train/loss_scale.h"
#include "llmc/train/options.h"

namespace llmc {

// Fills the T inputs and T targets of a row. Here a row is one sequence; in generation a row is one token. A
// target equal to ignored_target (-1) adds nothing to the loss.
using ReadRow =
    std::function<void(std::int64_t row, std::span<std::int32_t> inputs, std::span<std::int32_t> targets)>;

// Called between the pieces of a long computation with the share that is done. Returning false cancels the
// computation.
using Watch = std::function<bool(double share)>;

// Whether something that happens every `every` steps (0: never) is due after a step.
inline bool is_due(std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; }

// The context of a text that may go on: the tokens whose keys and values the device still holds.
struct KeptContext {
    std::vector<std::int32_t> tokens;
    std::int64_t computed_rows = 0;  // of all texts
};

// A text to continue.
struct Continuation {
    std::span<const std::int32_t> prompt;  // at least one token
    std::int64_t count;                    // the most new tokens
    // The text ends before these tokens, which are no part of it.
    std::span<const std::int32_t> ends = {};
    // Receives each token as soon as it is known.
    std::function<void(std::int32_t token)> take = [](std::int32_t) {};
    // The last text's, of which no row is computed again that this text begins with, too. Only generation may run
    // between two texts.
    KeptContext* kept = nullptr;
};

class Trainer {
  public:
    // Allocates the plan's memory and initialises the weights from the seed or from --init, unless a
    // checkpoint is to be resumed. `world` communicates host memory, `groups` the device's memory. What is on
    // a disk is in a file of the directory `scratch`. All other arguments outlive the trainer. All ranks make
    // one at the same time, and call the functions below together.
    Trainer(const Options& options, const RunPlan& plan, Device& device, Communicator& world,
            const MeshGroups& groups, bool resumes = false, const std::string& scratch = "");

    Device& device() { return device_; }
    const Arenas& arenas() const { return arenas_; }
    ParameterStore& store() { return store_; }
    // Moves the sharded state between the ranks and rank 0, which reads and writes the files.
    UnitTransfer& transfer() { return transfer_; }
    // The copy from which checkpoints are written beside training; null if there is none, on any rank.
    const CheckpointCopy* copy() const { return copy_ ? &*copy_ : nullptr; }
    const Progress& progress() const { return progress_; }
    // The number of training tokens so far, with those of the runs that this one resumes.
    std::int64_t tokens() const { return progress_.samples * plan_.spec.model.sequence_length; }

    // Chooses an algorithm for each matrix product; all ranks choose the same. Takes it from `earlier` of
    // rank 0 (Device::adopt_choices), or autotunes it on the first rank that has the product. The weights
    // must be set. `prompt_tokens` is the length of the samples' prompt.
    void choose_algorithms(std::string_view earlier, std::int64_t prompt_tokens);
    // The algorithms of all stages (Device::choices).
    const std::string& algorithms() const { return algorithms_; }
    // The algorithms of all ranks that failed or varied.
    const LeftOut& left_out() const { return left_out_; }

    // Trains one step: loads this rank's micro-batches (RunPlan::share) and performs the list of actions. The step's
    // update is pending until the next step, whose list begins with it, or until finish_update(). In fp16 and
    // with products in 8 bits, a step whose gradient overflowed is skipped: it counts, but changes nothing. Otherwise
    // UserError on all ranks if the loss or the gradient is not finite; it names the first tensor that is not.
    // UserError also if ranks that must have the same parameters or optimizer state differ, where
    // --check-replicas-every compares them.
    StepMetrics train_step(TrainingBatches& batches);

    // Performs the pending update, if any. It comes before all that reads the weights or the optimizer's state; the
    // functions below call it that all ranks call together.
    void finish_update();

    // Whether the times of actions are measured (step_streams.h), and the times of the last step's actions.
    void watch_actions(bool on) { executor_.watch_actions(on); }
    std::span<const ActionTime> action_times() { return executor_.action_times(); }

    // The speed of the disk, measured before anything was on it; only in training.
    const ScratchFile::Speed& disk_speed() const { return disk_speed_; }
    // The sums of StepMetrics::disk over the steps of this run.
    const StepMetrics::Disk& disk() const { return disk_; }

    // UserError if a weight or a moment is not finite. Such a state must not be saved.
    void require_finite();

    // The mean loss in nats per token over the first `windows` windows; nullopt if `watch` cancelled it. All
    // ranks receive the same result. `watch` must return the same on all ranks.
    std::optional<double> validate(const ValidationWindows& validation, std::int64_t windows,
                                   const Watch& watch);

    // The loss of each of `rows` rows in nats, summed over the row's targets; nullopt if `watch` cancelled
    // it. Data-parallel ranks share the rows, and all ranks receive all sums. `watch` must return the same on
    // all ranks.
    std::optional<std::vector<double>> losses_of_rows(std::int64_t rows, const ReadRow& read,
                                                      const Watch& watch);

    // Whether generation needs all ranks. If not, one rank may generate alone.
    bool generates_together() const { return communicates(plan_.generation) || plan_.spec.mesh.tensor > 1; }
    // Continues a text, with the options' temperature, top-k and top-p. Returns the new tokens, or nullopt if `watch`
    // cancelled it. The same text, weights and step always give the same tokens. The context holds T tokens; a longer
    // prompt is cut to its last T. When the context is full, generation continues from its later half: a sliding window
    // would have to be recomputed for each token, because positions are learned. If generates_together(), `watch` must
    // return the same on all ranks. finish_update() was called before.
    std::optional<std::vector<std::int32_t>> generate(const Continuation& of, const Watch& watch);

    void resume(const CheckpointInfo& checkpoint);

    // All ranks call this after a checkpoint was saved. Errors then point to the checkpoint.
    void saved() { has_checkpoint_ = true; }
    // Sets what waits for a checkpoint that is being saved. Errors that all ranks find call it before they point to it.
    void before_errors(std::function<void()> settle) { settle_ = std::move(settle); }

    // Of the weights beside which adapters are trained (load_stored); empty without adapters.
    const std::string& base_checksum() const { return base_checksum_; }

  private:
    // The next token, from the logits of the rows that were computed last. All ranks that took part receive
    // the same.
    std::int32_t sample(double uniform);
    // The numbers of tokens that generation computes at once: for a prompt, for one new token, and for the
    // later half of a full context.
    std::set<std::int64_t> row_counts(std::int64_t prompt_tokens) const;
    // Forward passes of the micro-batches that `load` fills, for first_non_finite.
    ForwardPasses forward_passes(int micro_batches,
                                 const std::function<void(int micro_batch, std::span<std::int32_t> inputs,
                                                          std::span<std::int32_t> targets)>& load);
    // The sum of the losses of all targets of `rows` rows, on all ranks; nullopt if `watch` cancelled it.
    // `what` names the evaluation in error messages. Ranks with the head pass the T losses (fp32) of each row
    // to `see`.
    std::optional<double> evaluate(std::string_view what, std::int64_t rows, const ReadRow& read,
                                   const std::function<void(std::int64_t row, std::span<const float>)>& see,
                                   const Watch& watch);
    void require_equal_replicas();
    Update next_update() const;
    void set_pending_update(const std::optional<Update>& update);
    // Runs a list, and counts what it moves from and to the disk.
    void run(const Step& list, const StepInput& input);
    // For stochastic rounding of weights, if the options ask for it.
    std::optional<std::uint64_t> rounding_seed() const;
    void begin_adapters();
    void require_base(const std::string& checksum, const std::string& adapters) const;
    // Scales products in 8 bits without a history.
    void begin_fp8();
    std::optional<double> model_flops_utilization(double tokens_per_second) const;
    bool has_checkpoint();               // to resume from
    std::string advice_if_not_finite();  // for errors about numbers that are not finite

    const Options& options_;
    const RunPlan& plan_;
    Device& device_;
    Communicator& world_;
    Arenas arenas_;
    ParameterStore store_;
    UnitTransfer transfer_;
    std::optional<CheckpointCopy> copy_;
    Executor executor_;
    Schedule schedule_;
    LossScaler scaler_;
    Fp8Scaler fp8_;
    Progress progress_;
    std::optional<Update> pending_update_;  // the last step's
    // The time of finish_update() since the last step, which counts to the next step.
    struct FinishedUpdate {
        std::chrono::duration<double> elapsed{};
        PhaseTimes phases{};
    };
    FinishedUpdate finished_{};
    StepMetrics::Disk disk_, disk_of_step_;  // of all lists so far; of those since the last step's
    ScratchFile::Speed disk_speed_;
    std::string algorithms_;
    LeftOut left_out_;
    std::int64_t step_before_run_ = 0;  // the last step before this run
    bool has_checkpoint_ = false;
    std::function<void()> settle_;
    std::string base_checksum_;
};

}  // namespace llmc
