// The program's output while it runs. Only rank 0 prints. Errors go to standard error (Job::fail,
// bootstrap.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/io/metrics.h"
#include "llmc/parallel/pipeline/pipeline_simulation.h"
#include "llmc/train/command_line.h"
#include "llmc/train/terminal.h"

namespace llmc {

using Rows = std::vector<std::pair<std::string, std::string>>;  // names and values

class Console {
  public:
    explicit Console(bool is_rank_zero) : is_rank_zero_(is_rank_zero) {}

    // From now on, prints a line for the first step, for every `every`-th and for the last. With `is_quiet`,
    // prints no header, no steps and no progress line.
    void settle(std::int64_t every, bool is_quiet);

    void header(std::string_view title, const Rows& rows);
    // Starts the clock of the progress line. Call it before step `first`; `total` is the last step.
    void begin(std::int64_t first, std::int64_t total);
    // Shows work between steps ("validating") and the share of it that is done. Only the progress line shows
    // it.
    void doing(std::string_view what, double share);
    // Prints one line for a step, if it is due. A terminal also shows the step and the progress in its last
    // line.
    void step(const StepMetrics& metrics);
    // The results of an evaluation after a step, if there was one.
    void evaluation(const StepMetrics& metrics);
    void validation(std::int64_t step, double loss);
    void hellaswag(std::int64_t step, const HellaSwagScore& score);
    void sample(std::int64_t step, std::string_view text);
    // A checkpoint of a step is complete.
    void checkpoint(std::int64_t step, std::string_view path);
    // Prints the summary after the last step, and the commands to suggest, each on a line of its own, to be
    // copied. The first one continues the run.
    void summary(const Rows& rows, const std::vector<Suggestion>& suggestions);
    void note(std::string_view text);
    void text(std::string_view text);
    // Prints the chart as wide as the terminal (pipeline_timeline.h), then an empty line.
    void chart(const Timeline& timeline, std::string_view title);

    // Removes the progress line. Call this before writing to standard error.
    void remove_progress() { terminal_.print("", ""); }

    // If writing to standard output failed: a line for standard error with the reason and the summary's
    // command. Otherwise empty. require_written throws the line as a UserError.
    std::string what_was_lost() const;
    void require_written() const;

    // The text for a signal handler, which writes it over the progress line.
    std::string over_progress(std::string_view text) const { return terminal_.over_status(text); }

  private:
    std::string progress(std::string_view before = "") const;
    void print(std::string_view text);
    void print_rows(const Rows& rows);

    bool is_rank_zero_;
    Terminal terminal_;
    std::int64_t first_ = 1, done_ = 0, total_ = 0;
    std::int64_t every_ = 1;
    bool is_quiet_ = false;
    std::int64_t steps_since_heading_ = 0;
    std::string last_step_;  // for the progress line: "step 12: loss 3.21  "
    std::chrono::steady_clock::time_point start_, shown_;
    std::string command_;  // the summary's
};

// The progress line: "[=======>      ]  29%  350/1,200  0:21 passed, 0:52 left", at most `columns` wide. With
// less room the bar becomes shorter and disappears. Then the time passed, the share and the time left
// disappear in turn. `done` of `total` steps are done. Those from `first` on took `seconds`; an earlier run
// did the others.
std::string progress_line(std::int64_t first, std::int64_t done, std::int64_t total, double seconds,
                          int columns);

}  // namespace llmc
