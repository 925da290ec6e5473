#include "llmc/train/evaluator.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "llmc/train/outputs.h"

namespace llmc {

Evaluator::Evaluator(PreparedRun& run, Records& records) : run_(run), records_(records) {
    for (const auto& [step, loss] : records.earlier_validations()) update_best(loss, step);
    if (!run.options.keep_best || !run.trains || !run.is_rank_zero()) return;
    const std::optional<CheckpointInfo> kept = best_checkpoint(run.out_dir);
    if (!kept) return;
    const bool is_of_another = kept->lineage != run.lineage;
    keeps_best_ = !is_of_another && run.validation && kept->validation &&
                  kept->validation->windows == run.validation->fingerprint;
    if (keeps_best_) {
        kept_loss_ = kept->validation->loss;
    } else {
        run.session.console().note(fmt::format(
            "--keep-best keeps nothing: {} {}; remove it, or choose another --out-dir",
            kept->directory.string(),
            is_of_another       ? "is another run's"
            : !kept->validation ? "does not say on which tokens it was validated"
                                : "was not validated on the same tokens, so the losses are not comparable"));
    }
}

bool Evaluator::is_validation_due(std::int64_t step) const {
    return step == run_.options.steps || is_due(run_.options.val_every, step);
}

bool Evaluator::is_score_due(std::int64_t step) const {
    return run_.hellaswag && (step == run_.options.steps || is_due(run_.options.eval_every, step));
}

void Evaluator::update_best(double loss, std::int64_t step) {
    if (!best_ || loss < best_->loss) best_ = BestLoss{loss, step};
}

bool Evaluator::is_best(const std::optional<double>& loss) {
    if (!loss || !run_.trains) return false;
    const bool here = keeps_best_ && (!kept_loss_ || *loss < *kept_loss_);
    const bool is_best = on_any_rank(run_.session.world(), run_.is_rank_zero() && here);
    if (is_best) kept_loss_ = loss;
    return is_best;
}

// Shows the progress of a long evaluation, and cancels it when the run is asked to stop.
Watch Evaluator::watch(std::string_view doing) {
    return [this, doing](double share) {
        run_.session.console().doing(doing, share);
        return !run_.session.ask_to_stop();
    };
}

std::optional<double> Evaluator::validate() {
    if (!run_.validation) return std::nullopt;
    const auto loss =
        run_.trainer->validate(run_.validation->windows, run_.validation->count, watch("validating"));
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

std::optional<double> Evaluator::evaluate_given_weights() {
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
    return loss;
}

void Evaluator::evaluate(StepMetrics& step) {
    if (is_validation_due(step.step)) step.val_loss = validate();
    if (is_score_due(step.step) && !run_.session.is_stopping()) step.hellaswag = score();
}

}  // namespace llmc
