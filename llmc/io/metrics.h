// The record of a run as JSON lines: the first holds `run`, what was run; then a line a step.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "llmc/parallel/phase.h"

namespace llmc {

// The shares of examples whose right ending has the lowest loss of the four: summed over its tokens, and their mean.
struct HellaSwagScore {
    double accuracy = 0, accuracy_norm = 0;
    std::int64_t examples = 0;
};

// One step's line, which says its `time` too, seconds since 1970. `loss` and `val_loss` are nats per token, and are
// written with 9 significant digits.
struct StepMetrics {
    std::int64_t step = 0;  // from 1
    double loss = 0;        // on the step's batch, before its update
    double grad_norm = 0;   // before clipping
    double learning_rate = 0;
    std::int64_t tokens = 0;  // trained on since the first step
    double tokens_per_second = 0;
    double step_ms = 0;
    PhaseTimes phase_ms;
    // Floating-point operations of the model a second over those that the devices could do (MFU), where their
    // peak is known.
    std::optional<double> model_flops_utilization;
    std::optional<double> val_loss;
    std::optional<HellaSwagScore> hellaswag{};
};

// Whether a file holds a step of some run.
bool holds_steps(const std::filesystem::path& file);

class MetricsWriter {
  public:
    // A new run (`done` 0) empties the file, and so does one whose `identity` is not the file's. A resumed one
    // keeps the lines of the first `done` steps, drops
    // the others, and goes on; where there is no file it begins one. UserError with the system's reason if
    // the file cannot be written.
    MetricsWriter(std::filesystem::path path, const nlohmann::ordered_json& run, std::int64_t done);

    // Each line is in the system's hands on return.
    void write(const StepMetrics& metrics);

    // The validations of the steps that were kept.
    struct Validation {
        std::int64_t step;
        double loss;
    };
    const std::vector<Validation>& earlier_validations() const { return earlier_; }
    // Whether the last line that was kept is of the last step that is done, and has no validation, or no score; and what
    // adds one to it, before the first new line.
    bool lacks_validation() const { return lacks_validation_; }
    bool lacks_hellaswag() const { return lacks_hellaswag_; }
    void add_validation(double loss);
    void add_hellaswag(const HellaSwagScore& score);

    // A line of what weights come to that are not trained, if there is anything: the `step` and `tokens` that they are from,
    // and `val_loss` and HellaSwag's fields.
    void write_evaluation(std::int64_t step, std::int64_t tokens, const std::optional<double>& val_loss,
                          const std::optional<HellaSwagScore>& hellaswag);

  private:
    struct Close {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };
    void write_line(const std::string& line);
    void add_to_last_line(const nlohmann::ordered_json& more);
    [[noreturn]] void fail() const;

    void open();

    std::filesystem::path path_;
    std::vector<Validation> earlier_;
    bool lacks_validation_ = false, lacks_hellaswag_ = false;
    std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace llmc
