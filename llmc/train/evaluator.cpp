#include "llmc/train/evaluator.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace llmc {

Evaluator::Evaluator(PreparedRun& run, Records& records) : run_(run), records_(records) {
    if (run.data.validation) windows_.emplace(*run.data.validation, run.model().sequence_length);
    for (const auto& [step, loss] : records.earlier_validations()) update_best(loss, step);
    is_new_best_ = false;
}

bool Evaluator::is_validation_due(std::int64_t step) const {
    return step == run_.options.steps || is_due(run_.options.val_every, step);
}

bool Evaluator::is_score_due(std::int64_t step) const {
    return run_.hellaswag && (step == run_.options.steps || is_due(run_.options.eval_every, step));
}

void Evaluator::update_best(double loss, std::int64_t step) {
    if (best_ && loss >= best_->loss) return;
    best_ = BestLoss{loss, step};
    is_new_best_ = true;
}

bool Evaluator::found_best() {
    const bool is_new = std::exchange(is_new_best_, false);
    return on_any_rank(run_.session.world(), run_.is_rank_zero() && is_new);
}

// Shows the progress of a long evaluation, and cancels it when the run is asked to stop.
Watch Evaluator::watch(std::string_view doing) {
    return [this, doing](double share) {
        run_.session.console().doing(doing, share);
        return !run_.session.ask_to_stop();
    };
}

std::optional<double> Evaluator::validate() {
    if (!windows_) return std::nullopt;
    const std::int64_t some = run_.options.val_batches * run_.plan.global_sequences();
    const std::int64_t all = windows_->windows();
    const auto loss =
        run_.trainer->validate(*windows_, some == 0 ? all : std::min(some, all), watch("validating"));
    if (loss) update_best(*loss, run_.trainer->progress().step);
    return loss;
}

std::optional<HellaSwagScore> Evaluator::score() {
    if (!run_.hellaswag) return std::nullopt;
    const auto read = [this](std::int64_t row, auto inputs, auto targets) {
        run_.hellaswag->read(row, inputs, targets);
    };
    const auto losses = run_.trainer->losses_of_rows(run_.hellaswag->rows(), read, watch("scoring"));
    if (!losses) return std::nullopt;
    return run_.hellaswag->score(*losses);
}

void Evaluator::evaluate_given_weights() {
    HostCommunicator& world = run_.session.world();
    Console& console = run_.session.console();
    const Progress& progress = run_.trainer->progress();
    const bool is_last = progress.step >= run_.options.steps;
    const bool lacks_validation =
        is_validation_due(progress.step) && on_any_rank(world, records_.lacks_validation());
    const bool lacks_score = is_score_due(progress.step) && on_any_rank(world, records_.lacks_hellaswag());
    std::optional<double> loss;
    std::optional<HellaSwagScore> accuracy;
    if (run_.trains || run_.has_given_weights()) {
        if (lacks_validation || is_last) loss = validate();
        if (loss) {
            if (lacks_validation) records_.add_validation(*loss);
            console.validation(progress.step, *loss);
        }
        if (lacks_score || is_last) accuracy = score();
        if (accuracy) {
            if (lacks_score) records_.add_hellaswag(*accuracy);
            console.hellaswag(progress.step, *accuracy);
        }
    }
    if (!run_.trains) records_.write_evaluation(progress.step, run_.trainer->tokens(), loss, accuracy);
}

void Evaluator::evaluate(StepMetrics& step) {
    if (is_validation_due(step.step)) step.val_loss = validate();
    if (is_score_due(step.step) && !run_.session.is_stopping()) step.hellaswag = score();
}

}  // namespace llmc
