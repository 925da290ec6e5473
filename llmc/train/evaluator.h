// Evaluates a model during training: the validation loss and the accuracy on HellaSwag. Knows when each is
// due.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "llmc/data/samples.h"
#include "llmc/io/metrics.h"
#include "llmc/train/prepared_run.h"
#include "llmc/train/records.h"
#include "llmc/train/report.h"

namespace llmc {

class Evaluator {
  public:
    // Both outlive it.
    Evaluator(PreparedRun& run, Records& records);

    // Called before the first step. Evaluates given weights, or makes up for an evaluation that is missing in
    // the metrics because an earlier run was stopped. Prints and records the results. Returns the validation
    // loss, if it validates. All ranks call this and evaluate().
    std::optional<double> evaluate_given_weights();
    // Called after a step: adds the results of the evaluations that are due to its metrics. Does nothing once
    // the run was asked to stop.
    void evaluate(StepMetrics& step);

    // Whether a validation has a lower loss than the checkpoint of --keep-best, which is to be saved then. All ranks
    // call it and receive rank 0's answer, because only rank 0 reads that checkpoint. False without a loss, and if
    // the run trains nothing.
    bool is_best(const std::optional<double>& loss);
    // The lowest validation loss so far, including those that earlier runs wrote to the same metrics file.
    const std::optional<BestLoss>& best() const { return best_; }

  private:
    bool is_validation_due(std::int64_t step) const;
    bool is_score_due(std::int64_t step) const;
    // nullopt if there are no data to evaluate on, or if the run was asked to stop.
    std::optional<double> validate();
    std::optional<HellaSwagScore> score();
    void update_best(double loss, std::int64_t step);
    Watch watch(std::string_view doing);

    PreparedRun& run_;
    Records& records_;
    std::optional<BestLoss> best_;
    // On rank 0: whether losses are comparable with that of the checkpoint of --keep-best, if there is one.
    bool keeps_best_ = true;
    std::optional<double> kept_loss_;  // that of the checkpoint of --keep-best, if it is known on rank 0
};

}  // namespace llmc
