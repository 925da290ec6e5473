// What the program says while it runs. Rank 0 speaks alone; errors go to standard error (train_gpt.cu).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/io/metrics.h"
#include "llmc/parallel/pipeline_simulation.h"
#include "llmc/train/terminal.h"

namespace llmc {

using Rows = std::vector<std::pair<std::string, std::string>>;  // names and values

class Console {
  public:
    explicit Console(bool speaks) : speaks_(speaks) {}

    void header(std::string_view title, const Rows& rows);
    // Before the first of the steps first ... total.
    void begin(std::int64_t first, std::int64_t total);
    // What is going on between steps ("validating"), of which a share is done: only the progress shows it.
    void doing(std::string_view what, double share);
    // A line a step; on a terminal also the progress at the bottom.
    void step(const StepMetrics& metrics);
    void validation(std::int64_t step, double loss);
    void hellaswag(std::int64_t step, const HellaSwagScore& score);
    void sample(std::int64_t step, std::string_view text);
    // After the last step; `command` goes on from there and is one line, however long, to be copied.
    void summary(const Rows& rows, std::string_view command);
    void note(std::string_view text);
    void text(std::string_view text);
    // As wide as there is room for (pipeline_timeline.h), and an empty line.
    void chart(const Timeline& timeline, std::string_view title);

    // Where standard output did not take all that there was to print: a line for standard error that says why, and the
    // summary's command; empty where it did. The other one throws it as a UserError.
    std::string what_was_lost() const;
    void require_written() const;

    // The text as a signal handler writes it, in place of the progress.
    std::string over_progress(std::string_view text) const { return terminal_.over_status(text); }

  private:
    std::string progress(std::string_view before = "") const;
    void print(std::string_view text);
    void print_rows(const Rows& rows);

    bool speaks_;
    Terminal terminal_;
    std::int64_t first_ = 1, done_ = 0, total_ = 0;
    std::int64_t steps_since_heading_ = 0;
    std::chrono::steady_clock::time_point start_, shown_;
    std::string command_;  // that goes on
};

// The progress line: "[=======>      ]  29%  350/1,200  0:21 passed, 0:52 left", at most `columns` wide: where there is
// less room the bar is shorter, then gone, then the time passed, the share, and the time left.
// `done` of `total` steps took `seconds`; those before `first` were done by an earlier run.
std::string progress_line(std::int64_t first, std::int64_t done, std::int64_t total, double seconds,
                          int columns);

}  // namespace llmc
