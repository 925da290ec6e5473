// The record of a run as JSON lines. The first line has `run`, which describes the run; then there is one
// line per step. A resumed run that differs in its description adds another `run` line.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/parallel/step/step_streams.h"

namespace llmc {

// The fractions of examples whose correct ending has the lowest loss of the four: by the sum over its tokens,
// and by their mean.
struct HellaSwagScore {
    double accuracy = 0, accuracy_norm = 0;
    std::int64_t examples = 0;
};

// The line of one step. It also has `time`, in seconds since 1970. `loss` and `val_loss` are in nats per
// token, with 9 significant digits.
struct StepMetrics {
    std::int64_t step = 0;              // from 1
    double loss = 0;                    // on the step's batch, before its update
    std::optional<double> grad_norm{};  // before clipping; none if the step was skipped
    double learning_rate = 0;
    std::int64_t tokens = 0;  // trained on since step 1, with those of padding
    // Those of the step that the loss counts, where some do not count.
    std::optional<std::int64_t> targets{};
    double tokens_per_second = 0;
    double step_ms = 0;
    PhaseTimes phase_ms;
    // Model FLOPs utilization: the model's floating-point operations per second, divided by the peak of the
    // devices, if that is known.
    std::optional<double> model_flops_utilization;
    std::optional<double> val_loss;
    std::optional<HellaSwagScore> hellaswag{};
    // What this process read from its disk and wrote to it, how long the disk worked, and how much of that computing
    // waited for (Phase::disk).
    struct Disk {
        std::uint64_t read_bytes = 0, written_bytes = 0;
        double ms = 0, waited_ms = 0;
    };
    std::optional<Disk> disk{};
    std::optional<double> loss_scale{};           // of this step, in fp16
    std::optional<std::int64_t> skipped_steps{};  // since the run's start, in fp16 and fp8
};

// The file that MetricsWriter replaces: where a link leads, if the path is one. Empty for a device and for a
// standard stream, which is appended to even if it is redirected to a file.
std::optional<std::filesystem::path> replaced_metrics(const std::filesystem::path& path);

// Whether a file holds a step of any run.
bool holds_steps(const std::filesystem::path& file);
// The step of the file's last whole line; 0 if there is none.
std::int64_t last_step(const std::filesystem::path& file);

class MetricsWriter {
  public:
    // A new run (`done` 0), or a run whose `identity` differs from the file's, replaces the contents of the
    // file; the steps of another run are kept as FILE.1, FILE.2, ... A resumed run keeps the lines of the
    // first `done` steps and drops the others. A missing file is created. UserError with the system's reason
    // if the file cannot be written.
    MetricsWriter(std::filesystem::path path, const nlohmann::ordered_json& run, std::int64_t done);
    ~MetricsWriter();
    MetricsWriter(const MetricsWriter&) = delete;
    MetricsWriter& operator=(const MetricsWriter&) = delete;

    // Writes a line and passes it to the system before it returns. If the system refuses it, as when the disk is
    // full, the line is kept, and written before the next one as soon as that is possible. Training must not be
    // lost because of it.
    void write(const StepMetrics& metrics);
    // Tries to write the lines that are kept.
    void write_kept() { write_line(""); }
    // The reason why lines are kept now; empty if there are none.
    const std::string& failure() const { return failure_; }

    // The validations of the steps that were kept, as far as they used the windows of this run.
    struct Validation {
        std::int64_t step;
        double loss;
    };
    const std::vector<Validation>& earlier_validations() const { return earlier_; }
    // The new name of the file with the steps of another run; empty if there was none.
    const std::filesystem::path& moved_to() const { return moved_to_; }
    // Whether the last kept line is of the last finished step and has no validation, or no HellaSwag score.
    // The functions below add one to it, before the first new line.
    bool lacks_validation() const { return lacks_validation_; }
    bool lacks_hellaswag() const { return lacks_hellaswag_; }
    void add_validation(double loss);
    void add_hellaswag(const HellaSwagScore& score);

    // Writes the evaluation of a run that does not train, if there is one: the `step` and `tokens` of the
    // weights, `val_loss` and HellaSwag's fields.
    void write_evaluation(std::int64_t step, std::int64_t tokens, const std::optional<double>& val_loss,
                          const std::optional<HellaSwagScore>& hellaswag);

  private:
    class File;
    void write_line(std::string_view line);
    void add_to_last_line(const nlohmann::ordered_json& more);
    void open();

    std::filesystem::path path_;
    std::filesystem::path moved_to_;
    std::vector<Validation> earlier_;
    bool lacks_validation_ = false, lacks_hellaswag_ = false;
    std::unique_ptr<File> file_;
    std::string kept_;  // not written yet
    std::string failure_;
};

}  // namespace llmc
